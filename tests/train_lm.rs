//! The example `train_lm` as a user meets it on the command line: bad input, Ctrl-C, results.

#[cfg(feature = "mpi")]
#[path = "common/mpirun.rs"]
mod mpirun;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with a text that is just large enough, and others that are no text to train on.
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
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("target/tmp");
    let example = target
        .join(profile)
        .join("examples")
        .join(format!("train_lm{}", std::env::consts::EXE_SUFFIX));
    assert!(example.exists(), "no {}: run `cargo test`, which builds it", example.display());
    let mut command = Command::new(example);
    command.args(arguments.split(' ')).current_dir(folder);
    command.env("RUST_LOG", "info").env_remove("RUST_BACKTRACE");
    command
}

/// Standard output of a run that has to succeed.
fn succeed(folder: &Path, arguments: &str) -> String {
    stdout(arguments, &train_lm(folder, arguments).output().unwrap())
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
    let found = row.zip(index).and_then(|(row, index)| row.get(index));
    found.unwrap_or_else(|| panic!("no {column} of {optimizer} in {stdout}"))
}

fn refused(folder: &Path, arguments: &str, expected: &str) {
    let output = train_lm(folder, arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}: accepted");
    assert!(stderr.contains(expected), "{arguments}: {expected:?} is not in {stderr}");
    assert!(!stderr.contains("panicked at"), "{arguments}: {stderr}");
    assert!(!stderr.contains("tokens/s"), "{arguments}: refused after the first step: {stderr}");
}

#[test]
fn bad_input_is_refused_before_the_first_step() {
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
        ("--data text.rs --optimizer sgd", "'sgd' for '--optimizer <OPTIMIZER>'"),
        (
            "--data text.rs --optimizer sgd",
            "[possible values: adamw, burn-muon, muon, dist-muon, dist-adamw]",
        ),
        ("--data text.rs --compare muon,sgd", "'sgd' for '--compare <COMPARE>'"),
        ("--data text.rs --ranks 0", "'0' for '--ranks <RANKS>': it must be at least 1"),
        ("--data text.rs --ranks 3", "--batch 16 can't be divided among 3 ranks"),
        ("--data text.rs --ranks 1,2", "--ranks with several numbers: say what to --compare"),
        ("--data text.rs --engine mpi --ranks 2", "cannot be used with"),
        ("--data text.rs --ranks 2 --optimizer muon", "--optimizer muon trains on one rank"),
        ("--data text.rs --save no/run.bpk", "'no/run.bpk' for '--save <SAVE>': can't write into"),
        ("--data text.rs --save folder", "'folder' for '--save <SAVE>': it is a folder"),
        ("--data text.rs --plot no/a.svg", "'no/a.svg' for '--plot <PLOT>': can't write into"),
    ] {
        refused(folder.path(), arguments, expected);
    }
}

#[test]
fn bad_checkpoints_are_refused_before_the_first_step() {
    let folder = folder();
    let flags = "--batch 1 --sample 0";
    let text = fs::read_to_string(folder.path().join("text.rs")).unwrap();
    fs::write(folder.path().join("other.rs"), text.replace("pow", "bow")).unwrap();
    succeed(folder.path(), &format!("{flags} --data text.rs --steps 1 --save run.bpk"));
    let checkpoint = fs::read(folder.path().join("run.bpk")).unwrap();
    let middle = checkpoint.len() / 2;
    fs::write(folder.path().join("cut.bpk"), &checkpoint[..middle]).unwrap();
    let mut damaged = checkpoint;
    damaged[middle] ^= 1;
    fs::write(folder.path().join("damaged.bpk"), damaged).unwrap();
    for (arguments, expected) in [
        ("--steps 1 --resume no.bpk", "\"no.bpk\": cannot open the file"),
        ("--steps 1 --resume cut.bpk", "the file is missing or damaged"),
        ("--steps 1 --resume text.rs", "the file is missing or damaged"),
        ("--steps 1 --resume damaged.bpk", "is damaged: expected checksum"),
        ("--steps 1 --optimizer dist-muon --ranks 1 --resume damaged.bpk", "is damaged: expected"),
        ("--steps 2 --resume run.bpk", "--resume run.bpk: it was trained with Settings"),
        ("--steps 1 --data other.rs --resume run.bpk", "it was trained with Settings"),
        ("--steps 1 --lr 0.1 --resume run.bpk", "--resume run.bpk: it was trained with Settings"),
        ("--steps 1 --optimizer adamw --resume run.bpk", "\"run.bpk\": 0 of the"),
        ("--steps 1 --bpe 300 --resume run.bpk", "\"run.bpk\" is of another model"),
        ("--steps 1 --preset small --resume run.bpk", "\"run.bpk\" is of another model"),
    ] {
        let data = if arguments.contains("--data") { "" } else { "--data text.rs " };
        refused(folder.path(), &format!("{flags} {data}{arguments}"), expected);
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

#[cfg(unix)]
mod interruption {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Stdio};

    use burn_pack::Reader;

    use super::*;

    const STEPS: usize = 40;

    /// What Ctrl-C does. The shell has `kill` where no such program is installed.
    fn interrupt(child: &Child) {
        let kill = format!("kill -INT {}", child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// Runs until `line` is in the log, and interrupts.
    fn interrupt_at(line: &str, folder: &Path, arguments: &str) -> String {
        let mut command = train_lm(folder, arguments);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a process");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut log = String::new();
        while !log.contains(line) {
            let length = stderr.read_line(&mut log).unwrap();
            assert!(length > 0, "{arguments}: ended without {line:?}: {log}");
        }
        interrupt(&child);
        stderr.read_to_string(&mut log).unwrap();
        let output = child.wait_with_output().unwrap();
        stdout(arguments, &Output { stderr: log.into_bytes(), ..output })
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

        let with_save = format!("{flags} --save run.bpk");
        let line = format!("muon 10/{STEPS}: validation loss");
        let stopped = interrupt_at(&line, folder.path(), &with_save);
        let step =
            stopped.strip_prefix("stopped after step ").and_then(|rest| rest.split_once(';'));
        let (step, remedy) = step.unwrap_or_else(|| panic!("not stopped: {stopped}"));
        let step: usize = step.parse().unwrap();
        assert!((10..STEPS).contains(&step), "{stopped}");
        assert!(remedy.starts_with(" go on with --optimizer muon --resume run.bpk"), "{stopped}");

        let resumed = succeed(folder.path(), &format!("{with_save} --resume run.bpk"));
        let loss = |stdout| cell(stdout, "muon", "final validation loss");
        assert_eq!(loss(&resumed), loss(&whole));
        assert_ne!(loss(&resumed), loss(&stopped));
        let weights = |name| weights(&folder.path().join(name));
        assert!(weights("run.bpk") == weights("whole.bpk"), "the weights differ");
    }
}

#[test]
fn comparisons_print_and_plot_every_optimizer() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 3 --eval-every 1 --sample 0";
    let stdout = succeed(folder.path(), &format!("{flags} --compare adamw,muon --plot loss.svg"));
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    assert!(plot.starts_with("<svg"), "{plot}");
    for optimizer in ["adamw", "muon"] {
        let loss: f64 = cell(&stdout, optimizer, "final validation loss").parse().unwrap();
        assert!(loss.is_finite() && loss > 0.0, "{stdout}");
        assert!(plot.contains(&format!("{optimizer} (lr")), "no {optimizer} in the plot");
    }
}

/// The validation losses that a checkpoint has kept.
fn curve(checkpoint: &Path) -> Vec<(usize, Option<f64>)> {
    let checkpoint = burn_pack::Reader::from_file_exact(checkpoint).expect("a checkpoint");
    let progress: serde_json::Value =
        serde_json::from_str(&checkpoint.metadata()["progress"]).expect("the progress of a run");
    serde_json::from_value(progress["curve"].clone()).expect("steps and losses")
}

#[test]
fn any_number_of_ranks_follows_one_curve() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 6 --eval-every 1 --sample 0";
    for optimizer in ["dist-muon", "dist-adamw"] {
        let curves = [1, 2, 4].map(|ranks| {
            let name = format!("{ranks}.bpk");
            let flags = format!("{flags} --optimizer {optimizer} --ranks {ranks} --save {name}");
            let stdout = succeed(folder.path(), &flags);
            assert!(stdout.contains("imbalance of cost"), "no plan in {stdout}");
            assert!(stdout.contains("gradient shares"), "no memory report in {stdout}");
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
        // What two ranks have saved, four can take over.
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
    mpirun.env("RUST_LOG", "info");
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
    // What processes have saved, threads go on from.
    succeed(folder.path(), &format!("{flags} --ranks 4 --resume processes.bpk"));
}

#[cfg(all(feature = "mpi", unix))]
#[test]
fn a_killed_process_of_mpi_ends_all() {
    let folder = folder();
    let flags =
        "--data text.rs --batch 4 --eval-every 1 --sample 0 --optimizer dist-muon --save run.bpk";
    let endless = format!("{flags} --engine mpi --steps 100000");
    let Some(mut mpirun) = mpirun(folder.path(), 2, &endless) else { return };
    let mut mpirun = mpirun.spawn().unwrap();
    let saved = folder.path().join("run.bpk");
    while !saved.exists() {
        assert!(mpirun.try_wait().unwrap().is_none(), "it ended before its first checkpoint");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let found = Command::new("pgrep").args(["-P", &mpirun.id().to_string()]).output().unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    let ranks: Vec<&str> = found.split_whitespace().collect();
    assert_eq!(ranks.len(), 2, "{found}");
    Command::new("kill").args(["-9", ranks[1]]).status().unwrap();
    assert!(!mpirun.wait().unwrap().success());
    for rank in ranks {
        // A process that nobody waits for stays as a zombie.
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
fn processes_without_a_launcher_are_told() {
    let folder = folder();
    for engine in ["mpi", "nccl"] {
        let mut alone = train_lm(folder.path(), &format!("--data text.rs --engine {engine}"));
        for launcher in ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
            alone.env_remove(launcher);
        }
        let output = alone.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        if stderr.contains("build train_lm with") {
            println!("skipped: train_lm was built without {engine}");
            continue;
        }
        assert!(!output.status.success() && stderr.contains("RANK is not set"), "{stderr}");
        assert!(stderr.contains("torchrun, mpirun or srun"), "{stderr}");
    }
    // One rank that the launcher counts and MPI does not.
    let mut other = train_lm(folder.path(), "--data text.rs --engine mpi");
    let output = other.env("RANK", "1").env("WORLD_SIZE", "2").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("1 of 2: but MPI says 0 of 1"), "{stderr}");
}

#[test]
fn numbers_of_ranks_are_compared() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 2 --eval-every 1 --sample 0";
    let compare = "--compare muon,dist-muon --ranks 1,2 --plot loss.svg";
    let stdout = succeed(folder.path(), &format!("{flags} {compare}"));
    let losses = ["muon", "dist-muon", "dist-muon x2"].map(|run| {
        let loss: f64 = cell(&stdout, run, "final validation loss").parse().unwrap();
        loss
    });
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 2e-4), "{losses:?}");
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    assert!(plot.contains("dist-muon x2 (lr"), "no curve of two ranks in the plot");
}

#[cfg(unix)]
#[test]
fn links_to_a_text_are_followed() {
    let folder = folder();
    std::os::unix::fs::symlink("text.rs", folder.path().join("link.rs")).unwrap();
    succeed(folder.path(), "--data link.rs --batch 1 --steps 1 --sample 8");
}
