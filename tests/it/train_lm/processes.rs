//! Ranks that are processes.

use std::fs;
use std::path::Path;
use std::process::Command;

use distmuon_testing::{mpirun, skip};

use super::{curve, folder, stdout, succeed, train_lm};

/// The example as processes of MPI, if there is MPI.
fn mpirun(folder: &Path, processes: usize, arguments: &str) -> Option<Command> {
    if !mpirun::is_there() {
        return None;
    }
    let example = train_lm(folder, arguments);
    let mut mpirun = mpirun::mpirun(processes);
    mpirun.arg(example.get_program()).args(example.get_args()).current_dir(folder);
    Some(mpirun)
}

#[test]
fn processes_follow_the_curve_of_threads() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 4 --eval-every 1 --sample 0";
    let flags = format!("{flags} --optimizer dist-muon");
    succeed(folder.path(), &format!("{flags} --ranks 2 --save threads.bpk"));
    let processes = format!("{flags} --engine mpi --save processes.bpk");
    let Some(mpirun) = mpirun(folder.path(), 2, &processes) else { return };
    let stdout = stdout(&processes, &mpirun::output(mpirun).expect("mpirun runs"));
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

#[cfg(unix)]
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
    let ended = mpirun::wait(&mut mpirun).expect("mpirun was started");
    assert!(ended.is_none_or(|status| !status.success()));
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
