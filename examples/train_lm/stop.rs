//! Ctrl-C, and the command that continues a run after it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use super::train::Run;

/// Returns a flag that the first Ctrl-C sets. The second one ends the program.
pub fn on_ctrl_c() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let pressed = stop.clone();
    let handler = move || {
        if pressed.swap(true, Ordering::SeqCst) {
            // The status of a program that SIGINT has ended: 128 + 2.
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).context("can't catch Ctrl-C")?;
    Ok(stop)
}

/// The advice after Ctrl-C: the command that continues the stopped run, and the runs that were not
/// begun.
pub fn advice(run: &Run, step: usize, path: &Path, not_begun: &[Run]) -> String {
    let mut advice = format!("{} stopped after step {step} of {}", run.name(), run.settings.steps);
    if !not_begun.is_empty() {
        let names: Vec<String> = not_begun.iter().map(Run::name).collect();
        advice += &format!("; not begun: {}", names.join(", "));
    }
    let launcher = if run.world.is_some() { ", under its launcher," } else { "" };
    format!("{advice}; go on{launcher} with\n  {}", command(run, path))
}

/// The command of this process, changed to continue the run from a checkpoint.
fn command(run: &Run, path: &Path) -> String {
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let mut command = if run.options.compare.is_empty() {
        without(&["--resume"], arguments)
    } else {
        // A comparison continues as a single run.
        let mut single = without(&["--compare", "--ranks", "--seeds"], arguments);
        if run.world.is_none() {
            single.extend(["--ranks".into(), run.plan.ranks.to_string()]);
        }
        single
    };
    command.extend(["--resume".into(), path.to_string_lossy().into_owned()]);
    let command: Vec<String> = command.iter().map(|argument| quote(argument)).collect();
    command.join(" ")
}

/// Removes some options and their values from the arguments.
fn without(names: &[&str], mut arguments: impl Iterator<Item = String>) -> Vec<String> {
    let mut kept = Vec::new();
    while let Some(argument) = arguments.next() {
        if names.contains(&argument.as_str()) {
            arguments.next();
        } else if !names.iter().any(|name| argument.starts_with(&format!("{name}="))) {
            kept.push(argument);
        }
    }
    kept
}

/// Quotes an argument for a shell.
fn quote(argument: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:+@%".contains(c);
    match !argument.is_empty() && argument.chars().all(is_plain) {
        true => argument.to_owned(),
        false => format!("'{}'", argument.replace('\'', r"'\''")),
    }
}
