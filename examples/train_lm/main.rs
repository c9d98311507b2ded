//! Trains a small GPT on real text, with Muon or with optimizers to compare it with.
//!
//! ```text
//! cargo run --release --example train_lm
//! cargo run --release --example train_lm -- --compare adamw,burn-muon,muon --plot loss.svg
//! cargo run --release --example train_lm -- --compare adamw,muon,nanochat --seeds 1,2,3
//! mpirun -n 4 target/release/examples/train_lm --engine mpi
//! ```

mod average;
mod chart;
mod data;
mod display;
mod estimate;
mod exact_mars;
mod experts;
mod host_memory;
// Also for a bench.
pub(crate) mod model;
mod optimizer;
mod options;
mod report;
mod settings;
mod sharding;
mod shards;
mod stop;
mod train;

use std::ffi::OsString;
use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::{env, panic};

use anyhow::{Context, Result, anyhow};
use burn::tensor::Device;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};

use options::{Options, Plan};
use report::Summary;
use settings::Progress;
use tracing_subscriber::EnvFilter;
use train::Run;

fn main() -> ExitCode {
    let ended = start().and_then(|stop| run(env::args_os(), &stop));
    let Err(error) = ended else { return ExitCode::SUCCESS };
    // Without the backtraces that an error of a rank's thread may have: it is about the input.
    eprintln!("Error: {error}");
    error.chain().skip(1).for_each(|cause| eprintln!("Caused by: {cause}"));
    ExitCode::FAILURE
}

/// Prepares the process. Returns the flag that Ctrl-C sets.
pub fn start() -> Result<Arc<AtomicBool>> {
    host_memory::keep();
    init_logging();
    stop::on_ctrl_c()
}

/// Runs the program in a process that was prepared. The first argument is its name.
pub fn run(arguments: impl Iterator<Item = OsString>, stop: &AtomicBool) -> Result<()> {
    let (options, saved) = options(arguments)?;
    if let Some(estimate) = options.estimate {
        return estimate.print(&options);
    }
    let world = options.engine.connect()?;
    let is_first = world.as_ref().is_none_or(|world| world.rank() == 0);
    if let Some(world) = &world {
        let description = world.describe()?;
        if is_first {
            println!("{description}\n");
        }
    }
    if let Some(world) = &world {
        options.settings.ensure_same(world)?;
    }
    let runs = options.runs(world.as_ref())?;
    let corpus = options.settings.corpus()?;
    if let Some(saved) = &saved {
        saved.check(&corpus, &options.settings).with_context(|| options.resume_flag())?;
    }
    let sizes = options.settings.model(corpus.tokenizer.vocabulary());
    corpus.check(options.settings.batch, sizes.context)?;
    let log = options.log.as_deref().filter(|_| is_first);
    let log = log.map(|path| open_log(path, saved.is_some())).transpose()?;
    let run = |plan: Plan| {
        Ok(Run {
            options: &options,
            settings: options.settings.for_run(plan.contender, plan.seed)?,
            plan,
            corpus: &corpus,
            sizes: &sizes,
            stop,
            log: log.as_ref(),
            world: world.as_ref(),
        })
    };
    let runs: Vec<Run> = runs.into_iter().map(run).collect::<Result<_>>()?;
    let summaries = train(&runs, is_first)?;
    if !is_first {
        return Ok(());
    }
    let table = if options.seeds.len() > 1 { report::table_of_seeds } else { report::table };
    println!("{}", table(&summaries));
    if let Some(path) = &options.plot {
        let title = options.settings.describe(&sizes);
        report::plot(path, &title, &summaries)?;
        report::plot_norms(path, &title, &summaries)?;
    }
    Ok(())
}

/// Trains one run after the other, until Ctrl-C stops one.
fn train(runs: &[Run], is_first: bool) -> Result<Vec<Summary>> {
    let mut summaries = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let summary = run.train()?;
        let stopped = summary.stopped.clone();
        summaries.push(summary);
        if let Some((step, path)) = stopped {
            if is_first {
                println!("{}\n", stop::advice(run, step, &path, &runs[index + 1..]));
            }
            break;
        }
    }
    Ok(summaries)
}

/// Logs to standard error, in lines without time, level and module.
fn init_logging() {
    // Without the library's warnings of skipped steps, since the display reports these.
    let filter = EnvFilter::try_from_default_env();
    tracing_subscriber::fmt()
        .with_env_filter(
            filter
                .unwrap_or_else(|_| "warn,train_lm=info,distmuon=error,distmuon::comm=warn".into()),
        )
        .without_time()
        .with_target(false)
        .with_level(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}

/// Opens the file of `--log`. A resumed run appends to it.
fn open_log(path: &Path, resumes: bool) -> Result<File> {
    let mut log = File::options();
    let log = if resumes { log.append(true) } else { log.write(true).truncate(true) };
    log.create(true).open(path).with_context(|| format!("--log {}", path.display()))
}

/// Parses the command line. With `--resume`, adds the settings of the checkpoint, and returns its
/// progress.
fn options(arguments: impl Iterator<Item = OsString>) -> Result<(Options, Option<Progress>)> {
    let matches = Options::command().get_matches_from(arguments);
    let mut options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let is_given = |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
    if let Some(ranks) = options.sharding.ranks()
        && !is_given("ranks")
    {
        options.ranks = vec![ranks];
    }
    options.settings.complete(&default_device()?, &options.compare, is_given)?;
    let Some(path) = &options.resume else {
        return Ok((options, None));
    };
    let resume = || options.resume_flag();
    let saved = Progress::read(path).with_context(resume)?;
    let settings = options.settings.or_saved(is_given, &saved.settings).with_context(resume)?;
    options.settings = settings;
    Ok((options, Some(saved)))
}

/// The device that `BURN_DEVICE` names, or an error if Burn was built without it.
fn default_device() -> Result<Device> {
    // Burn panics for such a device: the panic becomes an error, and its message is printed only
    // once.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let device = panic::catch_unwind(Device::default);
    panic::set_hook(hook);
    device.map_err(|panic| {
        let reason = panic.downcast_ref::<String>().map(String::as_str);
        let reason = reason.or(panic.downcast_ref::<&str>().copied()).unwrap_or("BURN_DEVICE");
        anyhow!("{reason} Build train_lm with the device's feature, or name another.")
    })
}
