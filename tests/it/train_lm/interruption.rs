//! Runs that Ctrl-C ends, and runs that are killed.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use burn_pack::Reader;

use super::{cell, curve, folder, stdout, succeed, train_lm};

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

/// The time of the last change of a checkpoint, if there is one: of a file, or of the index of a
/// folder.
fn changed(folder: &Path, name: &str) -> Option<SystemTime> {
    let path = folder.join(name);
    let path = if path.is_dir() { path.join("index.json") } else { path };
    fs::metadata(path).and_then(|file| file.modified()).ok()
}

/// The longest time that two steps with their saves may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Kills the only process of a run while its thread writes, a little later every time. Each run
/// continues from what the one before has left, or fails.
#[test]
fn runs_that_are_killed_while_they_save_leave_complete_checkpoints() {
    let folder = folder();
    let folder = folder.path();
    let flags = "--data text.rs --batch 2 --eval-every 1 --sample 0 --steps 100000";
    let in_parts = ("parts", "--ranks 2 --save-parts parts");
    for (name, first) in [("run.bpk", "--save run.bpk"), in_parts] {
        let resume = format!("{first} --resume {name}");
        for trial in 0..6 {
            let before = changed(folder, name);
            let arguments = if before.is_some() { &*resume } else { first };
            let mut run = train_lm(folder, &format!("{flags} {arguments}"));
            let mut run = run.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
            // Two saves: one that continues shows that the checkpoint before was complete.
            let begin = Instant::now();
            for _ in 0..2 {
                let seen = changed(folder, name);
                while changed(folder, name) == seen {
                    assert!(
                        begin.elapsed() < LIMIT,
                        "{arguments}, trial {trial}: nothing is saved"
                    );
                    if let Some(status) = run.try_wait().unwrap() {
                        let mut stderr = String::new();
                        run.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
                        panic!("{arguments}, trial {trial}: {status}: {stderr}");
                    }
                    thread::sleep(Duration::from_millis(2));
                }
            }
            thread::sleep(Duration::from_millis(7 * trial));
            run.kill().unwrap();
            run.wait().unwrap();
            assert!(changed(folder, name) > before, "{arguments}, trial {trial}");
        }
    }
    curve(&folder.join("run.bpk"));
}

/// A disk that is full at some point of the file, as a limit on the size of files shows it.
#[test]
fn a_save_that_does_not_fit_the_disk_leaves_the_checkpoint_before() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --eval-every 1 --sample 0";
    succeed(folder.path(), &format!("{flags} --steps 1 --save run.bpk"));
    let saved = folder.path().join("run.bpk");
    let before = fs::read(&saved).unwrap();
    // In blocks of 512 bytes: parts of the file, in which the tokens of the text have room.
    for percent in [40, 70, 99] {
        let blocks = before.len() * percent / 100 / 512;
        let run =
            train_lm(folder.path(), &format!("{flags} --steps 9 --resume run.bpk --save run.bpk"));
        let mut limited = Command::new("sh");
        limited.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
        limited.arg(run.get_program()).args(run.get_args()).current_dir(folder.path());
        let output = limited.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{percent} %: {stderr}");
        assert!(
            stderr.contains("run.bpk") && !stderr.contains("panicked"),
            "{percent} %: {stderr}"
        );
        assert!(fs::read(&saved).unwrap() == before, "{percent} %: the file has changed");
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains("bpk")).collect();
        assert_eq!(left, ["run.bpk"], "{percent} %");
    }
}
