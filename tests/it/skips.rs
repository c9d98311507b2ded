//! Skips, which must not look as if something had run.

use std::process::Command;

use distmuon_testing::{excused, lacks, skip};

/// A skip, or a property that a device does not have, in its own process.
#[test]
#[ignore = "started by the other test"]
fn skips_something() {
    match std::env::var("DISTMUON_TEST_SKIP").as_deref() {
        Ok("lacks") => lacks("float16"),
        Ok("excused") => excused("there is one device"),
        _ => skip("there is no device"),
    }
}

#[test]
fn a_skip_fails_where_everything_has_to_run() {
    for (kind, device, must_run, passes) in [
        ("skip", "vulkan", "1", false),
        ("skip", "vulkan", "0", true),
        ("lacks", "cuda", "1", false),
        ("lacks", "cuda", "0", true),
        ("lacks", "vulkan", "1", true),
        ("excused", "cuda", "1", true),
    ] {
        // Not the path of the process, which is the loader's where a test is started by one.
        let program = std::env::args_os().next().expect("the first argument is the program");
        let output = Command::new(program)
            .args(["skips::skips_something", "--exact", "--ignored", "--nocapture"])
            .env("DISTMUON_TEST_SKIP", kind)
            .env("BURN_DEVICE", device)
            .env("DISTMUON_MUST_RUN", must_run)
            .output()
            .expect("this program starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.success(), passes, "{kind} on {device}, {must_run}: {said}");
        assert!(said.contains("skipped: "), "{said}");
    }
}
