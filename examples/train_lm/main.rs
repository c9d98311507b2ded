//! Trains a small GPT on real text, with Muon or with what it is compared to.
//!
//! ```text
//! cargo run --release --example train_lm
//! cargo run --release --example train_lm -- --compare adamw,burn-muon,muon --plot loss.svg
//! mpirun -n 4 target/release/examples/train_lm --engine mpi
//! ```

mod data;
mod display;
mod model;
mod optimizer;
mod options;
mod report;
mod settings;
mod stop;
mod train;

use std::ffi::OsString;
use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;
use std::{env, panic};

use anyhow::{Context, Result, anyhow};
use burn::tensor::Device;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};

use data::Corpus;
use options::Options;
use report::Summary;
use settings::Progress;
use tracing_subscriber::EnvFilter;
use train::Run;

fn main() -> Result<()> {
    run(env::args_os())
}

/// Runs the program with these arguments, of which the first is its name.
pub fn run(arguments: impl Iterator<Item = OsString>) -> Result<()> {
    tell_in_plain_lines();
    let (options, saved) = options(arguments)?;
    check_device()?;
    let stop = stop::on_ctrl_c()?;
    let world = options.engine.connect()?;
    let is_first = world.as_ref().is_none_or(|world| world.rank() == 0);
    if let Some(world) = &world {
        let description = world.describe()?;
        if is_first {
            println!("{description}\n");
        }
    }
    let runs = options.runs(world.as_ref())?;
    let corpus = Corpus::load(options.settings.data.as_deref(), options.settings.bpe)?;
    if let Some(saved) = &saved {
        saved.check(&corpus, &options.settings).with_context(|| options.resume_flag())?;
    }
    let sizes = options.settings.preset.config(corpus.tokenizer.vocabulary());
    let log = options.log.as_deref().filter(|_| is_first);
    let log = log.map(|path| open_log(path, saved.is_some())).transpose()?;
    let run = |(optimizer, ranks)| {
        let settings = options.settings.of_run(optimizer)?;
        let (options, corpus, sizes, stop) = (&options, &corpus, &sizes, &*stop);
        let (log, world) = (log.as_ref(), world.as_ref());
        Ok(Run { options, settings, optimizer, ranks, corpus, sizes, stop, log, world })
    };
    let runs: Vec<Run> = runs.into_iter().map(run).collect::<Result<_>>()?;
    let summaries = train(&runs, is_first)?;
    if !is_first {
        return Ok(());
    }
    println!("{}", report::table(&summaries));
    if let Some(path) = &options.plot {
        report::plot(path, &options.settings.describe(&sizes), &summaries)?;
    }
    Ok(())
}

/// Trains one run after the other, up to the one that Ctrl-C has stopped.
fn train(runs: &[Run], is_first: bool) -> Result<Vec<Summary>> {
    let mut summaries = Vec::new();
    for (i, run) in runs.iter().enumerate() {
        let summary = run.train()?;
        let stopped = summary.stopped.clone();
        summaries.push(summary);
        if let Some((step, path)) = stopped {
            if is_first {
                println!("{}\n", stop::advice(run, step, &path, &runs[i + 1..]));
            }
            break;
        }
    }
    Ok(summaries)
}

/// Prints what happens as lines on standard error, without times and places. Of skipped steps, runs tell
/// themselves.
fn tell_in_plain_lines() {
    let filter = EnvFilter::try_from_default_env();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| "warn,train_lm=info,distmuon=error".into()))
        .without_time()
        .with_target(false)
        .with_level(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// The file of `--log`, which a resumed run adds to.
fn open_log(path: &Path, resumes: bool) -> Result<File> {
    let mut log = File::options();
    let log = if resumes { log.append(true) } else { log.write(true).truncate(true) };
    log.create(true).open(path).with_context(|| format!("--log {}", path.display()))
}

/// The command line, with the settings of the checkpoint that it names.
fn options(arguments: impl Iterator<Item = OsString>) -> Result<(Options, Option<Progress>)> {
    let matches = Options::command().get_matches_from(arguments);
    let mut options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let Some(path) = &options.resume else {
        return Ok((options, None));
    };
    let resume = || options.resume_flag();
    let saved = Progress::read(path).with_context(resume)?;
    let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
    let settings = options.settings.or_saved(is_given, &saved.settings).with_context(resume)?;
    options.settings = settings;
    Ok((options, Some(saved)))
}

/// Fails if `BURN_DEVICE` names a device that Burn was built without, where Burn panics.
fn check_device() -> Result<()> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let device = panic::catch_unwind(Device::default);
    panic::set_hook(hook);
    device.map(drop).map_err(|panic| {
        let reason = panic.downcast_ref::<String>().map(String::as_str);
        let reason = reason.or(panic.downcast_ref::<&str>().copied()).unwrap_or("BURN_DEVICE");
        anyhow!("{reason} Build train_lm with the device's feature, or name another.")
    })
}
