//! Bad input, the command line, and the settings of a continued run.

use std::fs;

use super::{cell, curve, folder, rejected, succeed, succeed_with_output, train_lm};

#[test]
fn bad_input_is_rejected_before_the_first_step() {
    let folder = folder();
    for (arguments, expected) in [
        ("--data missing", "--data missing: no such file or folder"),
        ("--data folder", "--data folder: the folder holds no file"),
        ("--data small.rs", "--data small.rs: 12 tokens are too few; give a text of at least"),
        ("--data empty.rs", "--data empty.rs: 0 tokens are too few; give a text of at least"),
        ("--data empty.rs --bpe 300", "--data empty.rs: 0 tokens are too few"),
        ("--data text.rs --bpe 3", "--bpe 3: a vocabulary has 257 to 65536 tokens"),
        ("--data text.rs --steps 0", "'0' for '--steps <STEPS>': it must be at least 1"),
        ("--data text.rs --steps many", "'many' for '--steps <STEPS>': invalid digit"),
        ("--data text.rs --batch 0", "'0' for '--batch <BATCH>': it must be at least 1"),
        (
            "--data text.rs --width 100",
            "--width 100 is not one of whole heads of preset tiny; give a multiple of 32",
        ),
        ("--data text.rs --width 64 --depth 4", "'--width <WIDTH>' cannot be used with"),
        ("--data text.rs --lr nan", "'nan' for '--lr <LR>': it must be a positive number"),
        ("--data text.rs --lr -1", "'-1' for '--lr <LR>': it must be a positive number"),
        ("--data text.rs --lr 0", "'0' for '--lr <LR>': it must be a positive number"),
        ("--data text.rs --optimizer sgd", "'sgd' for '--optimizer <NAME>'"),
        (
            "--data text.rs --optimizer sgd",
            "[possible values: adamw, burn-muon, muon, dist-muon, dist-adamw]",
        ),
        ("--data text.rs --compare muon,sgd", "'sgd' for '--compare <NAME,..>'"),
        ("--data text.rs --compare muon,nano", "a similar value exists: 'nanochat'"),
        (
            "--data text.rs --settings {\"newton_schulz\":{\"norm\":\"Aol\"}}",
            "newton_schulz has an unknown setting: expected one of coefficients",
        ),
        (
            "--data text.rs --settings {\"newton_schulz\":{\"normalization\":\"Nuclear\"}}",
            "Caused by: unknown variant `Nuclear`, expected one of `Frobenius`,",
        ),
        ("--data text.rs --settings {\"moment\":0.9}", "muon has an unknown setting: expected"),
        (
            "--data text.rs --settings {\"parts\":[{\"Mars\":{\"gamma\":0.1,\"exakt\":true}}]}",
            "Mars has an unknown setting: expected one of exact, gamma, got exakt",
        ),
        (
            "--data text.rs --settings [1]",
            "'[1]' for '--settings <JSON>': invalid type: sequence, expected a map",
        ),
        (
            "--data text.rs --settings {\"newton_schulz\":{\"steps\":0}}",
            "newton_schulz.steps` is invalid: expected at least 1",
        ),
        (
            r#"--compare muon,nanochat --settings {"weight_decay":{"Decoupled":{}}}"#,
            "--settings for nanochat\nCaused by: missing field `start`",
        ),
        (
            "--data text.rs --optimizer adamw --settings {\"lr_factor\":2}",
            "--settings is for muon, dist-muon and recipes; use or compare one of them",
        ),
        (
            "--data text.rs --soap mlp --optimizer adamw",
            "--soap is for muon, dist-muon and recipes",
        ),
        ("--data text.rs --soap (", "routing rule `(` is not a regular expression"),
        ("--data text.rs --soap nothing", "nothing"),
        ("--data text.rs --average 3", "from=STEP,span=STEPS"),
        ("--data text.rs --average from=3", "it must be from=STEP,span=STEPS, or"),
        ("--data text.rs --average from=3,span=0", "span: it must be at least 1"),
        ("--data text.rs --average from=3,span=9,share=2", "share: it must be at most 1"),
        ("--data text.rs --average from=300,span=9", "--average begins after step 300 of 300"),
        ("--data text.rs --recipe adamw", "'adamw' for '--recipe <NAME>'"),
        ("--data text.rs --recipe torch --compare muon", "cannot be used with"),
        ("--data text.rs --seeds 1,2", "--compare <NAME,..>"),
        ("--data text.rs --compare muon --seeds 1 --seed 2", "cannot be used with"),
        (
            "--data text.rs --recipe nanochat --optimizer burn-muon",
            "--recipe nanochat is for muon and dist-muon; leave --optimizer burn-muon out",
        ),
        ("--data text.rs --ranks 0", "'0' for '--ranks <NUMBER,..>': it must be at least 1"),
        ("--data text.rs --ranks 3", "--batch 16 can't be divided among 3 ranks"),
        ("--data text.rs --mesh dp=2 --ranks 4", "`mesh` is invalid"),
        ("--data text.rs --mesh dp --ranks 4", "it must be AXIS=RANKS, as in gpu=2"),
        ("--data text.rs --mesh dp=0", "RANKS"),
        ("--data text.rs --owned tp --ranks 2", "axis `tp` of a mesh with `dp`"),
        ("--data text.rs --owned dp --optimizer adamw", "compare only these"),
        ("--data text.rs --ahead-mb 1 --ranks 2", "--ahead-mb limits what"),
        ("--data text.rs --owned dp --ahead-mb=-1 --ranks 2", "it must be zero or more"),
        ("--data text.rs --keep weights --ranks 2", "--keep says what is kept of weights"),
        ("--data text.rs --keep nothing", "give one of them, or leave it out"),
        ("--data text.rs --in-flight-mb 1 --overlap=false --ranks 2", "leave --overlap=false out"),
        ("--data text.rs --in-flight-mb 1 --optimizer adamw", "compare only these"),
        ("--data text.rs --bucket-mb 1 --optimizer adamw", "compare only these"),
        ("--data text.rs --mesh tp=2 --ranks 2 --optimizer muon", "trains on one rank"),
        (
            "--data text.rs --mesh ep=2 --ranks 2",
            "no experts for the axis ep; use --preset mixture",
        ),
        ("--data text.rs --preset mixture --optimizer burn-muon", "which burn-muon does not take"),
        ("--data text.rs --mesh tp=3 --ranks 3", "heads of attention can't be divided among 3"),
        ("--data text.rs --accumulate 0", "'0' for '--accumulate <PARTS>': it must be at least 1"),
        (
            "--data text.rs --ranks 2 --accumulate 3",
            "--batch 16 can't be divided among 2 ranks in 3 parts each; give a multiple of 6",
        ),
        (
            "--data text.rs --optimizer burn-muon --dtype bf16 --accumulate 2",
            "--accumulate 2 adds gradients up in float32, which burn-muon does not take",
        ),
        ("--data text.rs --ranks 1,2", "--ranks with several numbers: say what to --compare"),
        ("--data text.rs --engine mpi --ranks 2", "cannot be used with"),
        ("--data text.rs --ranks 2 --optimizer muon", "--optimizer muon trains on one rank"),
        ("--data text.rs --save no/run.bpk", "'no/run.bpk' for '--save <FILE>': can't write into"),
        ("--data text.rs --save folder", "'folder' for '--save <FILE>': it is a folder"),
        ("--data text.rs --log no/a.json", "'no/a.json' for '--log <FILE>': can't write into"),
        ("--data text.rs --plot no/a.svg", "'no/a.svg' for '--plot <FILE>': can't write into"),
    ] {
        rejected(folder.path(), arguments, expected);
    }
}

#[test]
fn bad_checkpoints_are_rejected_before_the_first_step() {
    let folder = folder();
    let text = fs::read_to_string(folder.path().join("text.rs")).unwrap();
    fs::write(folder.path().join("other.rs"), text.replace("pow", "bow")).unwrap();
    succeed(folder.path(), "--data text.rs --batch 1 --steps 2 --sample 0 --save run.bpk");
    let checkpoint = fs::read(folder.path().join("run.bpk")).unwrap();
    let middle = checkpoint.len() / 2;
    fs::write(folder.path().join("cut.bpk"), &checkpoint[..middle]).unwrap();
    let mut damaged = checkpoint;
    damaged[middle] ^= 1;
    fs::write(folder.path().join("damaged.bpk"), damaged).unwrap();
    for (arguments, expected) in [
        ("--resume no.bpk", "--resume no.bpk"),
        ("--resume cut.bpk", "give a file that train_lm has saved"),
        ("--resume text.rs", "give a file that train_lm has saved"),
        ("--resume damaged.bpk", "is damaged: expected checksum"),
        ("--optimizer dist-muon --ranks 1 --resume damaged.bpk", "is damaged: expected"),
        ("--resume run.bpk --data other.rs", "trained on another text; give that one with --data"),
        ("--resume run.bpk --lr 0.1", "other settings: --lr 0.1 (saved: 0.008); leave them out"),
        ("--resume run.bpk --seed 2 --bpe 300", "--bpe 300 (saved: none), --seed 2 (saved: 1);"),
        ("--resume run.bpk --optimizer adamw", "--optimizer adamw (saved: muon);"),
        ("--resume run.bpk --preset small", "--preset small (saved: tiny);"),
        ("--resume run.bpk --batch 2 --steps 9", "other settings: --batch 2 (saved: 1); leave"),
        ("--resume run.bpk --steps 1", "it has 2 steps behind it; give more than that"),
    ] {
        rejected(folder.path(), arguments, expected);
    }
}

#[test]
fn settings_come_from_the_checkpoint_and_steps_may_be_increased() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --seed 7 --lr 0.01 --eval-every 1 --sample 0";
    succeed(folder.path(), &format!("{flags} --steps 2 --save run.bpk"));
    let resumed = "--resume ../run.bpk --steps 4 --save ../more.bpk --eval-every 1 --sample 0";
    let (stdout, stderr) = succeed_with_output(&folder.path().join("folder"), resumed);
    assert_eq!(cell(&stdout, "muon", "lr"), "1.0e-2");
    let expected = [
        "muon: resumed after step 2 of 4, no longer of 2",
        "from here on, the learning rate is that of 4 steps",
        "4 steps of 2 x 128 tokens",
    ];
    for expected in expected {
        assert!(stderr.contains(expected), "no {expected:?} in {stderr}");
    }
    let [before, after] = ["run.bpk", "more.bpk"].map(|name| curve(&folder.path().join(name)));
    assert_eq!(after[..3], before);
    assert_eq!(after.len(), 5);
}

#[test]
fn the_output_fits_into_80_columns() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 26 --eval-every 25 --sample 0";
    let arguments = format!("{flags} --compare burn-muon,muon");
    let (stdout, stderr) = succeed_with_output(folder.path(), &arguments);
    let help = succeed(folder.path(), "--help");
    for line in stdout.lines().chain(stderr.lines()).chain(help.lines()) {
        assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
    }
    let line = stderr.lines().find(|line| line.starts_with("muon 25/26: loss"));
    let line = line.unwrap_or_else(|| panic!("no line of step 25 in {stderr}"));
    assert!(line.contains("tokens/s") && line.ends_with("s left"), "{line}");
    for expected in [
        "Data:",
        "Model:",
        "Optimizer:",
        "Ranks:",
        "Checkpoints:",
        "Output:",
        "Examples:",
        "BURN_DEVICE",
        "--features",
        "--resume <FILE>",
        "--compare <NAME,..>",
    ] {
        assert!(help.contains(expected), "no {expected} in {help}");
    }
}

#[test]
fn devices_that_were_not_built_are_rejected() {
    let folder = folder();
    for (device, expected) in [("tch", "'tch' feature is not enabled"), ("gpu", "'gpu'")] {
        let mut command = train_lm(folder.path(), "--data text.rs");
        let output = command.env("BURN_DEVICE", device).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{stderr}");
        assert!(stderr.contains("Build train_lm with the device's feature"), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

#[cfg(unix)]
#[test]
fn symbolic_links_to_a_text_are_followed() {
    let folder = folder();
    std::os::unix::fs::symlink("text.rs", folder.path().join("link.rs")).unwrap();
    succeed(folder.path(), "--data link.rs --batch 1 --steps 1 --sample 8");
}
