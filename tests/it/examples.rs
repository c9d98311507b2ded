//! The small programs of `examples/`, each with a claim about what it prints.

use std::env::consts::EXE_SUFFIX;
use std::process::Command;

/// The program of an example, which cargo builds before the tests.
pub fn command(example: &str) -> Command {
    // Cargo puts tests into `deps` and examples into `examples`, both in the folder of a profile.
    // The first argument and not the path of the process, which is that of the loader if a
    // loader starts the test.
    let test = std::env::args_os().next().expect("the first argument is the program");
    let test = std::path::absolute(test).expect("the program has a path");
    let profile = test.ancestors().nth(2).expect("the program is in a folder of cargo");
    let program = profile.join("examples").join(format!("{example}{EXE_SUFFIX}"));
    assert!(
        program.exists(),
        "{} is missing: expected the example; build it by `cargo build -p distmuon --example \
         {example}` with the profile and the features of this test",
        program.display()
    );
    let mut command = Command::new(program);
    command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    command
}

/// The lines that an example prints.
fn lines(example: &str, arguments: &[&str]) -> Vec<String> {
    let output = command(example).args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// The number behind a text, in the line that has it.
fn number(lines: &[String], text: &str) -> f64 {
    let rest = lines.iter().find_map(|line| Some(line.split_once(text)?.1));
    let word = rest.and_then(|rest| rest.split([' ', ',']).find(|word| !word.is_empty()));
    let number = word.and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number after {text:?} in {lines:?}"))
}

#[test]
fn minimal_trains() {
    let lines = lines("minimal", &[]);
    let (first, last) = (number(&lines, "step 1: loss"), number(&lines, "step 200: loss"));
    assert!(last < 0.7 * first, "{lines:?}");
}

#[test]
fn ranks_print_the_same_on_any_number_of_ranks() {
    let alone = lines("ranks", &["1"]);
    let (first, last) = (number(&alone, "step 1: loss"), number(&alone, "step 40: loss"));
    assert!(last < 0.5 * first, "{alone:?}");
    assert_eq!(lines("ranks", &["2"]), alone);
    assert_eq!(lines("ranks", &["3"]), alone);
}

#[test]
fn a_layout_divides_the_parameters_and_trains_the_model_of_the_ranks() {
    let lines_of = |example: &str| lines(example, &["2"]);
    let divided = lines_of("layout");
    let is_loss = |line: &&String| line.starts_with("step");
    let losses: Vec<&String> = divided.iter().filter(is_loss).collect();
    assert_eq!(losses, lines_of("ranks").iter().collect::<Vec<_>>());
    // Every rank has the two biases, which are small, and its part of the two matrices.
    let bytes = ["rank 0:", "rank 1:"].map(|rank| number(&divided, rank));
    let whole = number(&divided, " of ");
    assert_eq!(whole, 4.0 * (2.0 * 16.0 * 64.0 + 64.0 + 16.0));
    let sum: f64 = bytes.iter().sum();
    assert!(whole < sum && sum < 1.1 * whole, "{bytes:?} of {whole}");
}

#[cfg(feature = "train")]
#[test]
fn the_learner_trains() {
    let lines = lines("learner", &[]);
    let (before, after) = (number(&lines, "loss:"), number(&lines, "before,"));
    assert!(after < 0.5 * before, "{lines:?}");
}

#[test]
fn masters_keep_small_steps_of_weights_in_half_precision() {
    let lines = lines("mixed_precision", &[]);
    let float32 = number(&lines, "in float32:");
    let [with, without] = ["float32 masters:", "without masters:"].map(|text| number(&lines, text));
    assert!((with - float32).abs() < 0.1 * (without - float32), "{lines:?}");
}

#[test]
fn a_resumed_run_ends_with_the_bits_of_one_without_a_break() {
    let folder = tempfile::tempdir().unwrap();
    let run = |file: &str, steps| {
        let path = folder.path().join(file);
        lines("resume", &[path.to_str().unwrap(), steps])
    };
    let start = run("broken.bpk", "20");
    let resumed = run("broken.bpk", "40");
    assert_eq!(resumed[0], "resumed at step 20");
    let whole = run("whole.bpk", "40");
    assert_eq!(resumed[1..], whole);
    assert!(number(&whole, "step 40: loss") < number(&start, "step 20: loss"));
}
