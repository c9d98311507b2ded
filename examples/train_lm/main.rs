//! Trains a small GPT on real text, with Muon or with what it is compared to.
//!
//! ```text
//! cargo run --release --example train_lm
//! cargo run --release --example train_lm -- --compare adamw,burn-muon,muon --plot loss.svg
//! mpirun -n 4 target/release/examples/train_lm --engine mpi
//! ```

mod data;
mod model;
mod optimizer;
mod report;
mod train;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Device;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Parser, ValueEnum};

use distmuon::dist::World;
#[cfg(any(feature = "mpi", feature = "cuda"))]
use distmuon::dist::{DEADLINE, Launch};

use data::Corpus;
use model::GptConfig;
use optimizer::OptimizerName;
use train::Run;

/// Trains a small GPT on real text.
#[derive(Parser, Debug, Clone)]
#[command(version)]
pub struct Options {
    /// Text to train on: a file, or a folder of files. Default: Rust sources in cargo's registry.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Tokens of a BPE vocabulary that is trained on the text. Default: bytes.
    #[arg(long, value_name = "TOKENS")]
    bpe: Option<usize>,
    /// Size of the model.
    #[arg(long, value_enum, default_value_t = Preset::Tiny)]
    preset: Preset,
    /// What trains it. Default: muon, and dist-muon on several ranks.
    #[arg(long, value_enum)]
    optimizer: Option<OptimizerName>,
    /// Trains with each of these from the same start, and compares.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["optimizer", "save", "resume"])]
    compare: Vec<OptimizerName>,
    /// Ranks that share the work: threads, on all devices of one kind in turn. Several numbers, as in
    /// 1,2,4, with --compare.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = at_least_one)]
    ranks: Vec<usize>,
    /// What carries gradients and parameters between ranks. With mpi and nccl, every rank is a process
    /// that mpirun, torchrun or srun started.
    #[arg(long, value_enum, default_value_t = Engine::Threads, conflicts_with = "ranks")]
    engine: Engine,
    /// Steps of training.
    #[arg(long, default_value_t = 300, value_parser = at_least_one)]
    steps: usize,
    /// Sequences in a step, on all ranks together.
    #[arg(long, default_value_t = 16, value_parser = at_least_one)]
    batch: usize,
    /// Peak learning rate. Default: the tuned one of the optimizer.
    #[arg(long, allow_negative_numbers = true, value_parser = positive)]
    lr: Option<f64>,
    /// Steps between validations.
    #[arg(long, default_value_t = 25)]
    eval_every: usize,
    /// Seed of the weights, the batches and the samples.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Checkpoint to write at the end, at every validation and on Ctrl-C.
    #[arg(long, value_parser = PathBufValueParser::new().try_map(writable))]
    save: Option<PathBuf>,
    /// Checkpoint to continue from, with the same settings.
    #[arg(long)]
    resume: Option<PathBuf>,
    /// File for the loss curves, in SVG.
    #[arg(long, value_parser = PathBufValueParser::new().try_map(writable))]
    plot: Option<PathBuf>,
    /// Tokens to write at the end.
    #[arg(long, default_value_t = 200)]
    sample: usize,
    /// Prints which parameter is updated by what.
    #[arg(long)]
    routes: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Engine {
    /// Threads of this process.
    Threads,
    /// Processes over MPI, on any device.
    Mpi,
    /// Processes over NCCL, on CUDA devices.
    Nccl,
}

impl Engine {
    /// The world of this process, unless it makes one of threads.
    fn connect(self) -> Result<Option<World>> {
        if self == Self::Threads {
            return Ok(None);
        }
        #[cfg(any(feature = "mpi", feature = "cuda"))]
        {
            let launch = Launch::from_env()?;
            let device = launch.device().autodiff();
            match self {
                #[cfg(feature = "mpi")]
                Self::Mpi => return Ok(Some(World::mpi(&launch, device, DEADLINE)?)),
                #[cfg(feature = "cuda")]
                Self::Nccl => return Ok(Some(World::nccl(&launch, device, DEADLINE)?)),
                _ => {}
            }
        }
        bail!("--engine {self:?}: build train_lm with --features mpi, or cuda for nccl")
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Preset {
    /// 0.9 million parameters.
    Tiny,
    /// 7 million parameters.
    Small,
    /// GPT-2's 12 layers of 768, for GPUs.
    Gpt2,
}

impl Preset {
    fn config(self, vocabulary: usize) -> GptConfig {
        match self {
            Self::Tiny => GptConfig::new(4, 4, 128, 128, vocabulary),
            Self::Small => GptConfig::new(8, 8, 256, 256, vocabulary),
            Self::Gpt2 => GptConfig::new(12, 12, 768, 1024, vocabulary),
        }
    }
}

impl Options {
    /// What is trained, one after the other: an optimizer on a number of ranks.
    fn runs(&self, world: Option<&World>) -> Result<Vec<(OptimizerName, usize)>> {
        let of_world = world.map(|world| vec![world.size()]);
        let all_ranks = of_world.as_ref().unwrap_or(&self.ranks);
        for ranks in all_ranks {
            ensure!(
                self.batch.is_multiple_of(*ranks),
                "--batch {} can't be divided among {ranks} ranks; give a multiple of {ranks}",
                self.batch
            );
        }
        if self.compare.is_empty() {
            let [ranks] = all_ranks[..] else {
                bail!("--ranks with several numbers: say what to --compare on them")
            };
            let default = if ranks == 1 { OptimizerName::Muon } else { OptimizerName::DistMuon };
            let optimizer = self.optimizer.unwrap_or(default);
            ensure!(
                ranks == 1 || optimizer.is_shared(),
                "--optimizer {} trains on one rank; --ranks {ranks} is for dist-muon and dist-adamw",
                optimizer.name()
            );
            return Ok(vec![(optimizer, ranks)]);
        }
        let on_ranks = |optimizer: &OptimizerName| {
            let (optimizer, alone) = (*optimizer, vec![1]);
            let ranks = if optimizer.is_shared() { all_ranks.clone() } else { alone };
            ranks.into_iter().map(move |ranks| (optimizer, ranks))
        };
        let runs: Vec<_> = self.compare.iter().flat_map(on_ranks).collect();
        ensure!(
            world.is_none_or(|world| runs.iter().all(|(_, ranks)| *ranks == world.size())),
            "--compare on several processes is for dist-muon and dist-adamw"
        );
        Ok(runs)
    }
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let options = Options::parse();
    let stop = Arc::new(AtomicBool::new(false));
    ctrlc::set_handler({
        let stop = stop.clone();
        move || {
            if stop.swap(true, Ordering::SeqCst) {
                std::process::exit(130);
            }
        }
    })
    .context("can't catch Ctrl-C")?;

    let world = options.engine.connect()?;
    let is_first = world.as_ref().is_none_or(|world| world.rank() == 0);
    if let Some(world) = &world {
        let description = world.describe()?;
        if is_first {
            println!("{description}\n");
        }
    }
    let runs = options.runs(world.as_ref())?;
    let corpus = Corpus::load(options.data.as_deref(), options.bpe)?;
    let sizes = options.preset.config(corpus.tokenizer.vocabulary());
    tracing::info!(device = ?Device::default(), ?sizes, tokens = corpus.len(), "training");
    let mut summaries = Vec::new();
    for (optimizer, ranks) in runs {
        let (options, corpus, sizes, stop) = (&options, &corpus, &sizes, &stop);
        let world = world.as_ref();
        summaries.push(Run { options, optimizer, ranks, corpus, sizes, stop, world }.train()?);
        if stop.load(Ordering::SeqCst) {
            break;
        }
    }
    if !is_first {
        return Ok(());
    }
    println!("{}", report::table(&summaries));
    if let Some(path) = &options.plot {
        report::plot(path, &summaries)?;
    }
    Ok(())
}

fn at_least_one(text: &str) -> Result<usize> {
    let number = text.parse()?;
    ensure!(number > 0, "it must be at least 1");
    Ok(number)
}

fn positive(text: &str) -> Result<f64> {
    let number: f64 = text.parse()?;
    ensure!(number.is_finite() && number > 0.0, "it must be a positive number");
    Ok(number)
}

/// A file for results: that it can't be written should be known before the training.
fn writable(path: PathBuf) -> Result<PathBuf> {
    ensure!(!path.is_dir(), "it is a folder; name a file in it");
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if let Err(error) = tempfile::tempfile_in(folder) {
        bail!("can't write into the folder {}: {}", folder.display(), error.kind());
    }
    Ok(path)
}
