//! The example `train_lm` on the command line.

mod certificates;
mod comparisons;
mod estimate;
mod from_depth;
#[cfg(unix)]
mod interruption;
#[cfg(feature = "mpi")]
mod processes;
mod runs;
mod settings;
mod shards;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::examples;

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
    let mut command = examples::command("train_lm");
    command.args(arguments.split(' ')).current_dir(folder);
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
    let output = train_lm(folder, arguments).env("RUST_BACKTRACE", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}: accepted");
    assert!(!stderr.to_lowercase().contains("backtrace"), "{arguments}: {stderr}");
    assert!(stderr.contains(expected), "{arguments}: {expected:?} is not in {stderr}");
    assert!(!stderr.contains("panicked at"), "{arguments}: {stderr}");
    assert!(!stderr.contains("tokens/s"), "{arguments}: rejected after the first step: {stderr}");
}

/// The records of `--log`.
fn log(path: &Path) -> Vec<serde_json::Value> {
    let lines = fs::read_to_string(path).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

/// The numbers of a key in the records of every step.
fn per_step(log: &[serde_json::Value], key: &str) -> Vec<f64> {
    log.iter().filter_map(|record| record.get(key)?.as_f64()).collect()
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
