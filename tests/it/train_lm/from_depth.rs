//! Runs from one number.

#[cfg(feature = "mpi")]
use distmuon_testing::mpirun;

use super::{cell, folder, rejected, succeed_with_output};

#[test]
fn a_depth_sets_sizes_batch_and_rates() {
    let folder = folder();
    let flags = "--data text.rs --depth 2 --context 32 --batch 4 --steps 3 --sample 0";
    let (stdout, stderr) = succeed_with_output(folder.path(), flags);
    // 2 layers of 128: 12 x 128^2 each, and two tables of 256 tokens.
    assert!(stderr.contains("depth 2, 3 steps of 4 x 32 tokens"), "{stderr}");
    let matrices = 2 * 12 * 128 * 128 + 2 * 256 * 128;
    let parameters: usize = {
        let line = stderr.lines().find(|line| line.contains(" parameters, ")).expect("a line");
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| word.starts_with("parameters")).unwrap();
        words[at - 1].parse().unwrap()
    };
    assert!((matrices..matrices + 2000).contains(&parameters), "{parameters}");
    // 0.02 for 2^19 tokens, by the root of the batch.
    let expected = 0.02 * (128.0_f64 / 524_288.0).sqrt();
    assert_eq!(cell(&stdout, "nanochat", "lr"), format!("{expected:.1e}"));
}

#[test]
fn settings_of_a_depth_are_saved_and_may_not_be_given_twice() {
    let folder = folder();
    let flags = "--data text.rs --depth 1 --context 32 --batch 2 --sample 0";
    let (_, saved) =
        succeed_with_output(folder.path(), &format!("{flags} --steps 2 --save run.bpk"));
    let (_, more) = succeed_with_output(folder.path(), "--resume run.bpk --steps 3 --sample 0");
    assert!(saved.contains("depth 1, 2 steps") && more.contains("depth 1, 3 steps"), "{more}");
    for (arguments, expected) in [
        ("--data text.rs --depth 0", "'0' for '--depth <LAYERS>': it must be at least 1"),
        ("--data text.rs --depth 4 --preset small", "cannot be used with"),
        ("--data text.rs --depth 4 --recipe torch", "cannot be used with"),
        ("--resume run.bpk --depth 2", "--depth 2 (saved: 1)"),
        ("--data text.rs --depth 4 --context 9000", "a text has blocks of 8192 tokens"),
    ] {
        rejected(folder.path(), arguments, expected);
    }
}

#[cfg(feature = "mpi")]
#[test]
fn a_rank_whose_depth_differs_is_rejected_on_all_ranks() {
    if !mpirun::is_there() {
        return;
    }
    let folder = folder();
    let example = super::train_lm(folder.path(), "--depth 1");
    let mut mpirun = mpirun::mpirun(1);
    let common = ["--data", "text.rs", "--context", "32", "--batch", "2", "--steps", "1"];
    let engine = ["--engine", "mpi"];
    mpirun.arg(example.get_program()).args(["--depth", "1"]).args(common).args(engine);
    mpirun.args([":", "-n", "1"]).arg(example.get_program());
    mpirun.args(["--depth", "2"]).args(common).args(engine).current_dir(folder.path());
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    let expected = "--depth differs on rank 1: expected 1 as on rank 0, got 2; give all ranks the";
    assert!(stderr.contains(expected), "{stderr}");
}
