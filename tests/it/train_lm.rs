//! The example `train_lm` on the command line: bad input, Ctrl-C, results.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

#[cfg(feature = "mpi")]
use distmuon_testing::{mpirun, skip};
use tempfile::TempDir;

/// A folder with a text that is just large enough, and others that can't be trained on.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let line =
        |i: u32| format!("fn f{i}(x: u32) -> u32 {{ x.pow({}) + {} }}\n", i % 7, i * i % 997);
    let text: String = (0..9000).map(line).collect();
    fs::write(folder.path().join("text.rs"), text).unwrap();
    fs::write(folder.path().join("small.rs"), "fn main() {}").unwrap();
    fs::write(folder.path().join("empty.rs"), "").unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    folder
}

/// The example with arguments that are separated by spaces, run in `folder`.
fn train_lm(folder: &Path, arguments: &str) -> Command {
    // Cargo puts tests into `deps` and examples into `examples`, both in the folder of a profile.
    // The first argument and not the path of the process, which is that of the loader if a
    // loader starts the test.
    let program = std::env::args_os().next().expect("the first argument is the program");
    let program = std::path::absolute(program).expect("the program has a path");
    let profile = program.ancestors().nth(2).expect("the program is in a folder of cargo");
    let example =
        profile.join("examples").join(format!("train_lm{}", std::env::consts::EXE_SUFFIX));
    assert!(
        example.exists(),
        "{} is missing: expected the example; build it by `cargo build -p distmuon --example \
         train_lm` with the profile and the features of this test",
        example.display()
    );
    let mut command = Command::new(example);
    command.args(arguments.split(' ')).current_dir(folder);
    command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    command
}

/// Standard output of a run that has to succeed.
fn succeed(folder: &Path, arguments: &str) -> String {
    succeed_with_output(folder, arguments).0
}

/// Standard output and error of a run that has to succeed.
fn succeed_with_output(folder: &Path, arguments: &str) -> (String, String) {
    let output = train_lm(folder, arguments).output().unwrap();
    (stdout(arguments, &output), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn stdout(arguments: &str, output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The cell of the final table in the optimizer's row.
fn cell<'a>(stdout: &'a str, optimizer: &str, column: &str) -> &'a str {
    let rows: Vec<Vec<&str>> =
        stdout.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    let index = rows.iter().find_map(|row| row.iter().position(|cell| *cell == column));
    let row = rows.iter().find(|row| row.get(1) == Some(&optimizer));
    let cell = row.zip(index).and_then(|(row, index)| row.get(index));
    cell.unwrap_or_else(|| panic!("no {column} of {optimizer} in {stdout}"))
}

fn rejected(folder: &Path, arguments: &str, expected: &str) {
    let output = train_lm(folder, arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}: accepted");
    assert!(stderr.contains(expected), "{arguments}: {expected:?} is not in {stderr}");
    assert!(!stderr.contains("panicked at"), "{arguments}: {stderr}");
    assert!(!stderr.contains("tokens/s"), "{arguments}: rejected after the first step: {stderr}");
}

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
fn a_diverged_run_can_be_continued() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 4 --eval-every 1 --sample 0 --lr 1e30";
    succeed(folder.path(), &format!("{flags} --save run.bpk"));
    let losses = curve(&folder.path().join("run.bpk"));
    assert!(losses.iter().any(|(_, loss)| loss.is_none_or(|loss| !loss.is_finite())), "{losses:?}");
    succeed(folder.path(), &format!("{flags} --resume run.bpk"));
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
fn runs_that_skip_every_step_are_reported_and_ended() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 40 --eval-every 4 --sample 0 --lr 1e30";
    let arguments = format!("{flags} --log run.jsonl");
    fail_after_some_steps(folder.path(), &arguments, "so that nothing was learnt in them");
    let log = log(&folder.path().join("run.jsonl"));
    assert_eq!(log.last().unwrap()["end"], "diverged");
    let step = log.last().unwrap()["step"].as_u64().unwrap();
    assert!((10..20).contains(&step), "{step}");
}

/// The error and the skipped steps of a run that fails.
fn fail_after_some_steps(folder: &Path, arguments: &str, expected: &str) {
    let output = train_lm(folder, arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}: the run ended without an error");
    let skipped = "muon 8/40: 43 parameters skipped 4 of 4 steps: gradients not finite";
    for expected in [expected, skipped, "start anew with a lower --lr than 1e30"] {
        assert!(stderr.contains(expected), "{arguments}: {expected:?} is not in {stderr}");
    }
    assert_eq!(stderr.matches("skipped").count(), 2, "reported once per validation: {stderr}");
}

/// The records of `--log`.
fn log(path: &Path) -> Vec<serde_json::Value> {
    let lines = fs::read_to_string(path).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

#[test]
fn logs_contain_every_step_and_are_appended_to() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 2 --eval-every 1 --sample 0 --log run.jsonl";
    succeed(folder.path(), &format!("{flags} --save run.bpk"));
    let path = folder.path().join("run.jsonl");
    let first = log(&path);
    let with = |log: &[serde_json::Value], key: &str| -> Vec<serde_json::Value> {
        log.iter().filter_map(|record| record.get(key)).cloned().collect()
    };
    assert_eq!(first[0]["run"], "muon");
    assert_eq!(first[0]["settings"]["batch"], 1);
    assert_eq!(with(&first, "step"), [0, 1, 1, 2, 2, 2]);
    assert_eq!(with(&first, "loss").len(), 2);
    assert_eq!(with(&first, "lr"), [0.008, 0.0]);
    for key in ["tokens_per_second", "seconds"] {
        assert!(with(&first, key).iter().all(|number| number.as_f64() > Some(0.0)), "{first:?}");
    }
    let losses: Vec<f64> =
        with(&first, "validation_loss").iter().map(|loss| loss.as_f64().unwrap()).collect();
    let saved = curve(&folder.path().join("run.bpk"));
    assert_eq!(losses, saved[1..].iter().map(|(_, loss)| loss.unwrap()).collect::<Vec<_>>());
    assert_eq!(first.last().unwrap()["end"], "finished");

    succeed(folder.path(), "--resume run.bpk --steps 3 --sample 0 --log run.jsonl");
    let both = log(&path);
    assert_eq!(both[..first.len()], first);
    assert_eq!(with(&both, "loss").len(), 3);
}

/// The numbers of a key in the records of every step.
fn per_step(log: &[serde_json::Value], key: &str) -> Vec<f64> {
    log.iter().filter_map(|record| record.get(key)?.as_f64()).collect()
}

#[test]
fn qk_clip_bounds_the_logits_on_any_number_of_ranks() {
    const TAU: f64 = 2.0;
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 12 --eval-every 0 --sample 0 --lr 0.03";
    let run = |name: &str, flags: &str| {
        let (_, stderr) = succeed_with_output(folder.path(), &format!("{flags} --log {name}"));
        (log(&folder.path().join(name)), stderr)
    };
    let (free, shown) = run("free.jsonl", &format!("{flags} --qk-clip 1e9"));
    let line = shown.lines().find(|line| line.starts_with("dist-muon 1/12: max logit "));
    assert!(line.is_some_and(|line| line.ends_with(", 0 heads clipped")), "{shown}");
    let (one, _) = run("one.jsonl", &format!("{flags} --qk-clip {TAU} --save run.bpk"));
    let (two, _) = run("two.jsonl", &format!("{flags} --qk-clip {TAU} --ranks 2"));
    let (parts, _) = run("parts.jsonl", &format!("{flags} --qk-clip {TAU} --accumulate 2"));

    let free_logits = per_step(&free, "max_logit");
    assert_eq!(free_logits.len(), 12);
    assert!(per_step(&free, "clipped_heads").iter().all(|heads| *heads == 0.0), "{free:?}");
    let (logits, heads) = (per_step(&one, "max_logit"), per_step(&one, "clipped_heads"));
    assert!(heads.iter().any(|heads| *heads > 0.0), "no head is clipped: {logits:?}");
    for (logit, heads) in logits.iter().zip(&heads) {
        assert_eq!(*heads > 0.0, *logit > TAU, "{logits:?}, {heads:?}");
    }
    let largest = |logits: &[f64]| logits.iter().copied().fold(f64::MIN, f64::max);
    assert!(largest(&logits) < 0.7 * largest(&free_logits), "{logits:?} and {free_logits:?}");
    for other in [two, parts] {
        for (other, logit) in per_step(&other, "max_logit").iter().zip(&logits) {
            assert!((other - logit).abs() < 1e-3 * logit, "{other:?} and {logits:?}");
        }
        assert_eq!(per_step(&other, "clipped_heads"), heads);
    }
    let (more, _) = run("run.jsonl", "--resume run.bpk --steps 13 --sample 0");
    assert_eq!(per_step(&more, "max_logit").len(), 1, "the setting is that of the checkpoint");
    rejected(folder.path(), "--resume run.bpk --qk-clip 3", "--qk-clip 3.0 (saved: 2.0)");
    rejected(
        folder.path(),
        "--data text.rs --qk-clip 0",
        "--qk-clip <TAU>': it must be a positive",
    );
}

#[test]
fn half_precision_trains_on_any_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 4 --eval-every 0 --sample 0";
    let losses = |name: &str, more: &str| {
        succeed(folder.path(), &format!("{flags} {more} --log {name} --diagnose-every 2"));
        let log = log(&folder.path().join(name));
        let observed: Vec<_> = log.iter().filter_map(|line| line.get("diagnostics")).collect();
        assert_eq!(observed.len(), 2, "{log:?}");
        for groups in observed {
            let muon = groups.as_array().unwrap().iter().find(|group| group["group"] == "Muon");
            assert!(muon.unwrap()["effective_lr"].as_f64().unwrap() > 0.0, "{groups}");
        }
        per_step(&log, "loss")
    };
    let wide = losses("wide.jsonl", "--dtype f32");
    for (half, worlds) in [
        ("--dtype bf16", &["--ranks 1", "--ranks 2", "--accumulate 2"][..]),
        ("--dtype bf16 --master mantissa", &["--ranks 2"]),
        ("--dtype bf16 --master none", &["--ranks 1"]),
        ("--dtype bf16 --master stochastic", &["--ranks 2"]),
        ("--dtype f16", &["--ranks 1", "--ranks 2", "--accumulate 2"]),
    ] {
        for world in worlds {
            for (half, wide) in losses("half.jsonl", &format!("{half} {world}")).iter().zip(&wide) {
                assert!((half - wide).abs() < 0.02 * wide, "{half} instead of {wide}");
            }
        }
    }
    let observed = "--diagnose-every 1 --plot a.svg";
    succeed(folder.path(), &format!("{flags} {observed} --qk-clip 0.5"));
    for quantity in [
        "effective-learning-rate",
        "update-norm",
        "weight-norm",
        "orthogonality-error",
        "skipped-steps",
        "clipped-heads",
        "maximum-logit",
    ] {
        let plot = folder.path().join(format!("a-{quantity}.svg"));
        let plot = fs::read_to_string(&plot).unwrap_or_else(|e| panic!("{quantity}: {e}"));
        assert!(plot.contains("dist-muon, Muon"), "{quantity}: {plot}");
    }
    let muon = "--data text.rs --dtype f16 --optimizer muon";
    rejected(folder.path(), muon, "--dtype f16 needs loss scaling");
    let mantissa = "--data text.rs --dtype f16 --master mantissa";
    rejected(folder.path(), mantissa, "bfloat16 parameters for `Mantissa`");
    let unseen = "--data text.rs --optimizer muon --diagnose-every 1";
    rejected(folder.path(), unseen, "--diagnose-every shows norms of dist-muon");
    let unseen = "--data text.rs --compare adamw,muon --diagnose-every 1";
    rejected(folder.path(), unseen, "--diagnose-every shows norms of dist-muon");
    let clipped = "--data text.rs --optimizer muon --dtype bf16 --qk-clip 2";
    rejected(folder.path(), clipped, "loses the digits of --master");
}

#[test]
fn accumulated_parts_follow_the_curve_of_the_whole_batch() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 4 --eval-every 0 --sample 0";
    let loss = |flags: &str| {
        succeed(folder.path(), &format!("{flags} --save run.bpk"));
        match curve(&folder.path().join("run.bpk"))[..] {
            [(4, Some(loss))] => loss,
            ref other => panic!("one validation, at the end, not {other:?}"),
        }
    };
    let whole = loss(flags);
    for parts in ["--accumulate 4", "--accumulate 2 --ranks 2"] {
        let accumulated = loss(&format!("{flags} {parts}"));
        assert!((accumulated - whole).abs() < 1e-4 * whole, "{parts}: {accumulated} and {whole}");
    }
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
mod interruption {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Stdio};

    use burn_pack::Reader;

    use super::*;

    const STEPS: usize = 40;

    /// Interrupts a process as Ctrl-C does. The shell has `kill` where no such program is
    /// installed.
    fn interrupt(child: &Child) {
        let kill = format!("kill -INT {}", child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Runs until `line` is in the log, and interrupts.
    fn interrupt_at(line: &str, mut command: Command) -> String {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut log = String::new();
        while !log.contains(line) {
            let length = stderr.read_line(&mut log).unwrap();
            assert!(length > 0, "{command:?}: ended without {line:?}: {log}");
        }
        interrupt(&child);
        stderr.read_to_string(&mut log).unwrap();
        let output = child.wait_with_output().unwrap();
        stdout(&format!("{command:?}"), &Output { stderr: log.into_bytes(), ..output })
    }

    /// The line after the advice of a stopped run, for a shell.
    fn advised(folder: &Path, stdout: &str) -> Command {
        let advice = stdout.lines().skip_while(|line| !line.ends_with("; go on with")).nth(1);
        let advice = advice.unwrap_or_else(|| panic!("not stopped: {stdout}"));
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec {advice}")]).current_dir(folder);
        shell
    }

    /// The model's parameters by path, as bytes.
    fn weights(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
        let checkpoint = Reader::from_file_exact(checkpoint).expect("a checkpoint");
        let names = checkpoint.tensor_names().into_iter();
        let weights: BTreeMap<_, _> = names
            .filter(|name| name.starts_with("model."))
            .map(|name| (name.to_owned(), checkpoint.tensor_data(name).unwrap()))
            .collect();
        assert!(weights.contains_key("model.head.weight"), "{:?}", weights.keys());
        weights
    }

    #[test]
    fn interrupted_runs_continue_bit_for_bit() {
        let folder = folder();
        let flags = format!("--data text.rs --steps {STEPS} --batch 1 --eval-every 10 --sample 0");
        let whole = succeed(folder.path(), &format!("{flags} --save whole.bpk"));

        let mut command = train_lm(folder.path(), &flags);
        command.args(["--save", "it's a run.bpk"]);
        let stopped = interrupt_at(&format!("muon 10/{STEPS}: validation loss"), command);
        let step = stopped.strip_prefix("muon stopped after step ");
        let step = step.and_then(|rest| rest.split_once(' ')).map(|(step, _)| step.parse());
        let step: usize = step.unwrap_or_else(|| panic!("not stopped: {stopped}")).unwrap();
        assert!((10..STEPS).contains(&step), "{stopped}");
        let marked = cell(&stopped, &format!("muon (stopped at {step})"), "final loss");
        assert!(marked.ends_with(&format!("(at {})", step / 10 * 10)), "{stopped}");

        let resumed = advised(folder.path(), &stopped).output().unwrap();
        let resumed = stdout("the advised command", &resumed);
        let loss = |stdout| cell(stdout, "muon", "final loss");
        assert_eq!(loss(&resumed), loss(&whole));
        let weights = |name| weights(&folder.path().join(name));
        assert!(weights("it's a run.bpk") == weights("whole.bpk"), "the weights differ");
    }

    #[test]
    fn interrupted_runs_continue_on_other_numbers_of_ranks() {
        let folder = folder();
        let on = |arguments: &str| {
            train_lm(folder.path(), &format!("--eval-every 10 --sample 0 --save {arguments}"))
        };
        let flags = format!("--data text.rs --steps {STEPS} --batch 2");
        let whole = on(&format!("whole.bpk {flags}")).output().unwrap();
        stdout("the whole run", &whole);
        interrupt_at("muon 10/40: validation loss", on(&format!("run.bpk {flags}")));
        let shared = on("run.bpk --resume run.bpk --ranks 2");
        interrupt_at("dist-muon x2 20/40: validation loss", shared);
        let output = on("run.bpk --resume run.bpk").output().unwrap();
        stdout("the last part", &output);
        let [whole, parts] = ["whole.bpk", "run.bpk"].map(|name| curve(&folder.path().join(name)));
        assert_eq!(whole.len(), parts.len());
        for ((step, whole), (_, parts)) in whole.into_iter().zip(parts) {
            let [whole, parts] = [whole, parts].map(|loss| loss.expect("a number"));
            assert!((whole - parts).abs() < 1e-4 * whole, "step {step}: {whole} and {parts}");
        }
    }

    #[test]
    fn interrupted_comparisons_list_the_runs_that_did_not_begin() {
        let folder = folder();
        let flags = format!("--data text.rs --steps {STEPS} --batch 2 --eval-every 10 --sample 0");
        let compare = format!("{flags} --compare muon,dist-muon --ranks 1,2");
        let command = train_lm(folder.path(), &compare);
        let stopped = interrupt_at("muon 10/40: validation loss", command);
        assert!(stopped.starts_with("muon stopped after step "), "{stopped}");
        assert!(stopped.contains(" of 40; not begun: dist-muon, dist-muon x2; go on"), "{stopped}");
        let output = advised(folder.path(), &stopped).output().unwrap();
        let finished = stdout("the advised command", &output);
        cell(&finished, "muon", "final loss").parse::<f64>().expect("a loss");
    }
}

#[test]
fn comparisons_print_and_plot_every_optimizer() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 8 --eval-every 2 --sample 0 --log run.jsonl";
    let stdout = succeed(folder.path(), &format!("{flags} --compare adamw,muon --plot loss.svg"));
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    let texts = texts(&plot);
    assert!(texts.contains(&"preset tiny, 8 steps of 1 x 128 tokens"), "{texts:?}");
    for optimizer in ["adamw", "muon"] {
        let loss = cell(&stdout, optimizer, "final loss");
        assert!(loss.parse::<f64>().is_ok_and(|loss| loss > 0.0), "{stdout}");
        let is_curve = |text: &&str| text.starts_with(optimizer) && text.ends_with(loss);
        assert!(texts.iter().any(is_curve), "no {optimizer} with {loss} in {texts:?}");
    }
    let start = 256f64.ln(); // about what a model loses that has learnt nothing
    let losses: Vec<f64> = texts
        .iter()
        .filter(|text| text.contains('.'))
        .filter_map(|text| text.parse().ok())
        .collect();
    assert!(losses.len() > 1 && losses.iter().all(|loss| *loss < start - 0.5), "{losses:?}");
}

/// The texts of an SVG.
fn texts(svg: &str) -> Vec<&str> {
    assert!(svg.starts_with("<svg"), "{svg}");
    let texts = svg.split("<text").skip(1).filter_map(|text| text.split_once('>'));
    texts.filter_map(|(_, text)| Some(text.split_once('<')?.0.trim())).collect()
}

/// The validation losses that a checkpoint has kept.
fn curve(checkpoint: &Path) -> Vec<(usize, Option<f64>)> {
    let checkpoint = burn_pack::Reader::from_file_exact(checkpoint).expect("a checkpoint");
    let progress: serde_json::Value =
        serde_json::from_str(&checkpoint.metadata()["progress"]).expect("the progress of a run");
    serde_json::from_value(progress["curve"].clone()).expect("steps and losses")
}

#[test]
fn the_loss_curve_is_the_same_on_any_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 6 --eval-every 1 --sample 0";
    for optimizer in ["dist-muon", "dist-adamw"] {
        let curves = [1, 2, 4].map(|ranks| {
            let name = format!("{ranks}.bpk");
            let flags = format!("{flags} --optimizer {optimizer} --ranks {ranks} --save {name}");
            let stdout = succeed(folder.path(), &flags);
            assert!(stdout.contains("imbalance of cost"), "no plan in {stdout}");
            assert!(stdout.contains("gradient shards"), "no memory report in {stdout}");
            curve(&folder.path().join(name))
        });
        let losses = curves.map(|curve| {
            curve.into_iter().map(|(_, loss)| loss.expect("a number")).collect::<Vec<_>>()
        });
        assert!(losses[0].len() == 7 && losses[0][6] < losses[0][0], "it learns: {losses:?}");
        for other in &losses[1..] {
            for (step, (loss, alone)) in other.iter().zip(&losses[0]).enumerate() {
                let difference = (loss - alone).abs() / alone;
                assert!(difference < 1e-5, "{optimizer}, step {step}: {loss} and {alone}");
            }
        }
        // Four ranks can continue from a checkpoint of two.
        let more = format!("{flags} --optimizer {optimizer} --ranks 4 --resume 2.bpk");
        succeed(folder.path(), &more);
    }
}

/// The example as processes of MPI, if there is MPI.
#[cfg(feature = "mpi")]
fn mpirun(folder: &Path, processes: usize, arguments: &str) -> Option<Command> {
    if !mpirun::is_there() {
        return None;
    }
    let example = train_lm(folder, arguments);
    let mut mpirun = mpirun::mpirun(processes);
    mpirun.arg(example.get_program()).args(example.get_args()).current_dir(folder);
    Some(mpirun)
}

#[cfg(feature = "mpi")]
#[test]
fn processes_follow_the_curve_of_threads() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 4 --eval-every 1 --sample 0";
    let flags = format!("{flags} --optimizer dist-muon");
    succeed(folder.path(), &format!("{flags} --ranks 2 --save threads.bpk"));
    let processes = format!("{flags} --engine mpi --save processes.bpk");
    let Some(mut mpirun) = mpirun(folder.path(), 2, &processes) else { return };
    let stdout = stdout(&processes, &mpirun.output().unwrap());
    assert!(stdout.contains("2 ranks over mpi"), "no description in {stdout}");
    let [threads, processes] =
        ["threads.bpk", "processes.bpk"].map(|name| curve(&folder.path().join(name)));
    assert_eq!(threads.len(), processes.len());
    for ((step, threads), (_, processes)) in threads.into_iter().zip(processes) {
        let [threads, processes] = [threads, processes].map(|loss| loss.expect("a number"));
        let difference = (threads - processes).abs() / threads;
        assert!(difference < 1e-5, "step {step}: {threads} and {processes}");
    }
    // Threads can continue from a checkpoint of processes.
    succeed(folder.path(), &format!("{flags} --ranks 4 --resume processes.bpk"));
}

#[cfg(all(feature = "mpi", unix))]
#[test]
fn a_killed_mpi_process_ends_all_processes() {
    let folder = folder();
    let flags =
        "--data text.rs --batch 4 --eval-every 1 --sample 0 --optimizer dist-muon --save run.bpk";
    let endless = format!("{flags} --engine mpi --steps 100000");
    let Some(mut mpirun) = mpirun(folder.path(), 2, &endless) else { return };
    let mut mpirun = mpirun.spawn().unwrap();
    let saved = folder.path().join("run.bpk");
    while !saved.exists() {
        assert!(mpirun.try_wait().unwrap().is_none(), "mpirun ended before the first checkpoint");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let children = Command::new("pgrep").args(["-P", &mpirun.id().to_string()]).output().unwrap();
    let children = String::from_utf8(children.stdout).unwrap();
    let ranks: Vec<&str> = children.split_whitespace().collect();
    assert_eq!(ranks.len(), 2, "{children}");
    Command::new("kill").args(["-9", ranks[1]]).status().unwrap();
    assert!(!mpirun.wait().unwrap().success());
    for rank in ranks {
        // A process whose status is not collected stays as a zombie.
        let status = || fs::read_to_string(Path::new("/proc").join(rank).join("status"));
        let gone = || status().map_or(true, |status| status.contains("State:\tZ"));
        let waited = (0..1000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            gone()
        });
        assert!(waited, "process {rank} is left behind");
    }
    curve(&saved); // it can be read: a save that was cut short replaced nothing
}

#[cfg(feature = "mpi")]
#[test]
fn processes_without_a_launcher_fail_naming_the_variables() {
    let folder = folder();
    for engine in ["mpi", "nccl"] {
        let mut alone = train_lm(folder.path(), &format!("--data text.rs --engine {engine}"));
        for launcher in ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
            alone.env_remove(launcher);
        }
        let output = alone.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("build train_lm with") {
            skip(format!("train_lm was built without {engine}"));
            continue;
        }
        assert!(!output.status.success() && stderr.contains("RANK is not set"), "{stderr}");
        assert!(stderr.contains("torchrun, mpirun or srun"), "{stderr}");
    }
    // A rank that the launcher counts, and that MPI does not count.
    let mut other = train_lm(folder.path(), "--data text.rs --engine mpi");
    let output = other.env("RANK", "1").env("WORLD_SIZE", "2").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("1 of 2: expected 0 of 1, as MPI reports"), "{stderr}");
}

#[test]
fn comparisons_include_every_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 2 --eval-every 1 --sample 0";
    let compare = "--compare muon,dist-muon --ranks 1,2 --plot loss.svg";
    let stdout = succeed(folder.path(), &format!("{flags} {compare}"));
    let losses = ["muon", "dist-muon", "dist-muon x2"].map(|run| {
        let loss: f64 = cell(&stdout, run, "final loss").parse().unwrap();
        loss
    });
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 2e-4), "{losses:?}");
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    assert!(
        texts(&plot).iter().any(|text| text.starts_with("dist-muon x2, lr")),
        "no curve of two ranks in the plot"
    );
}

#[test]
fn recipes_train_on_any_number_of_ranks_and_are_saved() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 3 --eval-every 1 --sample 0";
    let arguments = format!("{flags} --compare muon,nanochat --ranks 1,2");
    let stdout = succeed(folder.path(), &arguments);
    let loss = |run| cell(&stdout, run, "final loss").parse::<f64>().expect("a number");
    assert!((loss("nanochat") - loss("nanochat x2")).abs() < 2e-4, "{stdout}");
    assert!((loss("nanochat") - loss("muon")).abs() > 1e-3, "{stdout}");
    assert_eq!(cell(&stdout, "nanochat", "lr"), "2.0e-2");

    succeed(folder.path(), &format!("{flags} --recipe nanochat --save run.bpk"));
    let losses = curve(&folder.path().join("run.bpk"));
    assert_eq!(format!("{:.4}", losses[3].1.unwrap()), format!("{:.4}", loss("nanochat")));
    let resume = "--resume run.bpk --steps 4 --sample 0";
    rejected(folder.path(), &format!("{resume} --recipe torch"), "torch (saved: nanochat)");
    let stdout = succeed(folder.path(), &format!("{resume} --ranks 2"));
    assert_eq!(cell(&stdout, "nanochat x2", "lr"), "2.0e-2");
}

#[test]
fn comparisons_repeat_every_run_with_every_seed() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 3 --eval-every 0 --sample 0";
    let seeds = "--compare adamw,muon --seeds 4,5 --plot loss.svg";
    let stdout = succeed(folder.path(), &format!("{flags} {seeds}"));
    for run in ["adamw", "muon"] {
        let loss = |column| cell(&stdout, run, column).parse::<f64>().expect("a number");
        let [four, five] = [loss("seed 4"), loss("seed 5")];
        assert!((loss("mean") - (four + five) / 2.0).abs() < 1.5e-4, "{stdout}");
        let alone = format!("{flags} --optimizer {run} --seed 5");
        let alone = succeed(folder.path(), &alone);
        assert_eq!(cell(&stdout, run, "seed 5"), cell(&alone, run, "final loss"));
        assert_ne!(four, five, "{stdout}");
    }
    assert_eq!(cell(&stdout, "adamw", "reached"), "3, 3");
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    let curves = texts(&plot).iter().filter(|text| text.ends_with("mean of 2 seeds")).count();
    assert_eq!(curves, 2, "one curve per optimizer");
}

#[cfg(unix)]
#[test]
fn symbolic_links_to_a_text_are_followed() {
    let folder = folder();
    std::os::unix::fs::symlink("text.rs", folder.path().join("link.rs")).unwrap();
    succeed(folder.path(), "--data link.rs --batch 1 --steps 1 --sample 8");
}
