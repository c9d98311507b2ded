//! Trains a small GPT on real text, with Muon or with what it is compared to.
//!
//! ```text
//! cargo run --release --example train_lm
//! cargo run --release --example train_lm -- --compare adamw,burn-muon,muon --plot loss.svg
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
    /// What trains it.
    #[arg(long, value_enum, default_value_t = OptimizerName::Muon)]
    optimizer: OptimizerName,
    /// Trains with each of these from the same start, and compares.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with_all = ["optimizer", "save", "resume"])]
    compare: Vec<OptimizerName>,
    /// Steps of training.
    #[arg(long, default_value_t = 300, value_parser = at_least_one)]
    steps: usize,
    /// Sequences in a step.
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

    let device = Device::default().autodiff();
    let corpus = Corpus::load(options.data.as_deref(), options.bpe)?;
    let sizes = options.preset.config(corpus.tokenizer.vocabulary());
    tracing::info!(?device, ?sizes, tokens = corpus.len(), "training");
    let optimizers =
        if options.compare.is_empty() { vec![options.optimizer] } else { options.compare.clone() };
    let mut summaries = Vec::new();
    for optimizer in optimizers {
        let run = Run { options: &options, optimizer, corpus: &corpus, sizes: &sizes, stop: &stop };
        summaries.push(run.train(&device)?);
        if stop.load(Ordering::SeqCst) {
            break;
        }
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
