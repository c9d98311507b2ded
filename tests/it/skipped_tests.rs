//! Reports of skipped tests, which must not look like tests that ran.

use std::process::Command;

use distmuon_testing::{excused, lacks, skip};

/// A skip, or a property that a device does not have, in its own process.
#[test]
#[ignore = "a process that the other test starts"]
fn a_child_process_reports_a_skip() {
    match std::env::var("DISTMUON_TEST_SKIP").as_deref() {
        Ok("lacks") => lacks("float16"),
        Ok("excused") => excused("there is one device"),
        _ => skip("there is no device"),
    }
}

#[test]
fn a_skip_fails_if_every_test_must_run() {
    for (kind, device, must_run, passes) in [
        ("skip", "vulkan", "1", false),
        ("skip", "vulkan", "0", true),
        ("lacks", "cuda", "1", false),
        ("lacks", "cuda", "0", true),
        ("lacks", "vulkan", "1", true),
        ("excused", "cuda", "1", true),
    ] {
        // Not the path of the process, which is that of the loader if a loader starts the test.
        let program = std::env::args_os().next().expect("the first argument is the program");
        let output = Command::new(program)
            .args([
                "skipped_tests::a_child_process_reports_a_skip",
                "--exact",
                "--ignored",
                "--nocapture",
            ])
            .env("DISTMUON_TEST_SKIP", kind)
            .env("BURN_DEVICE", device)
            .env("DISTMUON_MUST_RUN", must_run)
            .output()
            .expect("this program starts");
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success(), passes, "{kind} on {device}, {must_run}: {text}");
        assert!(text.contains("skipped: "), "{text}");
    }
}
