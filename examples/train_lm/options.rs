//! The command line.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Parser, ValueEnum};
use distmuon::checkpoint::Saver;
use distmuon::comm::World;
#[cfg(any(feature = "mpi", feature = "cuda"))]
use distmuon::comm::{DEADLINE, Launch};

use super::estimate::{Estimate, Rate, estimate, rate};
use super::optimizer::Contender;
use super::settings::{Dtype, Settings};
use super::sharding::Sharding;

/// Steps between two lines of output, between two reads of the skipped steps and, by default,
/// between two validations.
pub const LINE_EVERY: usize = 25;

const EXAMPLES: &str = "\
Examples:
  train_lm                                    two minutes on two cores (release)
  train_lm --compare adamw,muon --plot a.svg  curves of both
  train_lm --save run.bpk --log run.jsonl     ended by Ctrl-C, then
  train_lm --resume run.bpk --ranks 2         continued on two ranks
  train_lm --depth 20 --dtype bf16 --estimate ranks=8 --owned dp
                                              memory and time of 8 ranks
  mpirun -n 4 train_lm --engine mpi           the ranks as processes

Devices:
  BURN_DEVICE=flex, cuda, vulkan, ... selects one that was built in:
  cargo build --release --example train_lm --features cuda,mpi
  With few cores, build without Burn's fusion: docs/guide/gpu.md.";

/// Trains a small GPT on real text.
#[derive(Parser, Debug, Clone)]
#[command(version, after_help = EXAMPLES)]
pub struct Options {
    #[command(flatten)]
    pub settings: Settings,
    /// Optimizers and recipes to compare, from the same start.
    #[arg(
        long, value_parser = Contender::parser(), value_delimiter = ',', value_name = "NAME,..",
        conflicts_with_all = ["optimizer", "recipe", "save", "save_parts", "resume"],
        help_heading = "Optimizer",
    )]
    pub compare: Vec<Contender>,
    /// Seeds of --compare, which repeats every run with each of them.
    #[arg(long, value_delimiter = ',', value_name = "NUMBER,..", requires = "compare")]
    #[arg(conflicts_with = "seed", help_heading = "Optimizer")]
    pub seeds: Vec<u64>,
    /// Parts of a rank's batch, computed one after the other to save memory.
    #[arg(long, value_name = "PARTS", default_value_t = 1, value_parser = at_least_one)]
    #[arg(help_heading = "Optimizer")]
    pub accumulate: usize,
    /// Number of ranks: threads that share the work, on all devices in turn.
    ///
    /// They use NCCL where each has a CUDA device.
    ///
    /// Without it, those of --mesh, or 1.
    ///
    /// Several numbers, as in 1,2,4, need --compare.
    #[arg(long, value_delimiter = ',', value_name = "NUMBER,..", default_value = "1")]
    #[arg(value_parser = at_least_one, help_heading = "Ranks")]
    pub ranks: Vec<usize>,
    /// Engine that moves gradients and parameters between ranks.
    ///
    /// With mpi and nccl, mpirun, torchrun or srun has to start the ranks.
    #[arg(long, value_enum, default_value_t = Engine::Threads, conflicts_with = "ranks")]
    #[arg(help_heading = "Ranks")]
    pub engine: Engine,
    #[command(flatten)]
    pub sharding: Sharding,
    /// Prints the bytes of ranks and the time of a step, and ends.
    ///
    /// Nothing of the model is allocated, and nothing measured. The bytes
    ///
    /// leave activations out, and the working memory of a step.
    ///
    /// As in ranks=8,nodes=2, which need not be there.
    ///
    /// For dist-muon and dist-adamw.
    ///
    /// Without --mesh, nodes make the axes node and gpu. Give --dtype, too,
    ///
    /// if the ranks are on CUDA and this machine is not.
    #[arg(long, value_name = "ranks=NUMBER,..", value_parser = estimate)]
    #[arg(conflicts_with_all = ["compare", "resume", "save", "save_parts", "ranks", "engine"])]
    #[arg(help_heading = "Ranks")]
    pub estimate: Option<Estimate>,
    /// Rates of a rank in the time of --estimate.
    ///
    /// Default: tflops=400,adamw-gb=375,node-gb=450,link-gb=50,latency-us=10.
    ///
    /// These are near a GPU of 2023: products, parameters in AdamW, links
    ///
    /// inside a node and between nodes, and their latency.
    #[arg(long, value_name = "NAME=NUMBER,..", value_delimiter = ',', value_parser = rate)]
    #[arg(requires = "estimate", help_heading = "Ranks")]
    pub assume: Vec<Rate>,
    /// Checkpoint to write at the end, at every validation and on Ctrl-C.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(writable))]
    #[arg(help_heading = "Checkpoints")]
    pub save: Option<PathBuf>,
    /// Folder for such checkpoints, with a file from every rank.
    #[arg(long, value_name = "FOLDER", value_parser = PathBufValueParser::new().try_map(folder))]
    #[arg(conflicts_with = "save", help_heading = "Checkpoints")]
    pub save_parts: Option<PathBuf>,
    /// File for a hash chain of settings, data and weights after every step.
    ///
    /// Runs with equal chains had equal weights. --resume continues the file.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(writable))]
    #[arg(conflicts_with = "compare", help_heading = "Checkpoints")]
    pub certificate: Option<PathBuf>,
    /// Checkpoint to continue from, on any number of ranks.
    ///
    /// The settings are those of the saved run. Only --steps may differ.
    #[arg(long, value_name = "FILE", help_heading = "Checkpoints")]
    pub resume: Option<PathBuf>,
    /// Steps between validations; 0 for a single one at the end.
    #[arg(long, value_name = "STEPS", default_value_t = LINE_EVERY, help_heading = "Output")]
    pub eval_every: usize,
    /// Steps between norms of updates and weights; 0 for none.
    ///
    /// dist-muon and dist-adamw have them, in --log and next to --plot.
    #[arg(long, value_name = "STEPS", default_value_t = 0, help_heading = "Output")]
    pub diagnose_every: usize,
    /// File for all losses and rates, one JSON object per line.
    ///
    /// With --resume, lines are appended.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(writable))]
    #[arg(help_heading = "Output")]
    pub log: Option<PathBuf>,
    /// File for the loss curves, in SVG.
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(writable))]
    #[arg(help_heading = "Output")]
    pub plot: Option<PathBuf>,
    /// Tokens of text to generate at the end.
    #[arg(long, value_name = "TOKENS", default_value_t = 200, help_heading = "Output")]
    pub sample: usize,
    /// Prints which optimizer updates each parameter.
    #[arg(long, help_heading = "Output")]
    pub routes: bool,
    /// Prints what the first step did: a line for every optimizer.
    ///
    /// The optimizers of this crate give it.
    #[arg(long, help_heading = "Output")]
    pub account: bool,
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq)]
pub enum Engine {
    /// Threads of this process.
    Threads,
    /// Processes over MPI, on any device.
    Mpi,
    /// Processes over NCCL, on CUDA devices.
    Nccl,
}

impl Engine {
    /// Connects this process to its world. `None` for threads, which share a world inside the
    /// process.
    pub fn connect(self) -> Result<Option<World>> {
        if self == Self::Threads {
            return Ok(None);
        }
        #[cfg(any(feature = "mpi", feature = "cuda"))]
        {
            let launch = Launch::from_env()?;
            let device = launch.device();
            match self {
                #[cfg(feature = "mpi")]
                Self::Mpi => return Ok(Some(World::mpi(&launch, device, DEADLINE)?)),
                #[cfg(feature = "cuda")]
                Self::Nccl => return Ok(Some(World::nccl(&launch, device, DEADLINE)?)),
                _ => {}
            }
        }
        bail!(
            "--engine {self:?} is missing in this program: \
             build train_lm with --features mpi, or cuda for nccl"
        )
    }
}

/// A run to do.
#[derive(Clone, Copy)]
pub struct Plan {
    pub contender: Contender,
    pub ranks: usize,
    pub seed: u64,
}

impl Options {
    /// The path of the checkpoints.
    pub fn checkpoint(&self) -> Option<&Path> {
        self.save.as_deref().or(self.save_parts.as_deref())
    }

    /// Saves while the training goes on.
    pub fn saver(&self) -> Saver {
        if self.save_parts.is_some() { Saver::new().with_parts() } else { Saver::new() }
    }

    /// The runs in their order.
    pub fn runs(&self, world: Option<&World>) -> Result<Vec<Plan>> {
        let world_size = world.map(|world| vec![world.size()]);
        let all_ranks = world_size.as_ref().unwrap_or(&self.ranks);
        let slices = self.sharding.slices();
        all_ranks.iter().try_for_each(|ranks| self.check_batch(ranks.div_ceil(slices)))?;
        self.settings.check_sizes(slices, self.sharding.parts())?;
        if self.compare.is_empty() {
            let [ranks] = all_ranks[..] else {
                bail!("--ranks with several numbers: say what to --compare on them")
            };
            let sees_all = self.diagnose_every > 0 || self.sharding.is_shared();
            let contender = self.settings.contender_on(ranks, sees_all)?;
            let plan = Plan { contender, ranks, seed: self.settings.seed };
            return self.checked(vec![plan]);
        }
        let seeds =
            if self.seeds.is_empty() { vec![self.settings.seed] } else { self.seeds.clone() };
        let mut runs = Vec::new();
        for contender in &self.compare {
            let on = |ranks| contender.on_ranks(ranks).map(|contender| (contender, ranks));
            let shared: Vec<_> = all_ranks.iter().filter_map(|&ranks| on(ranks)).collect();
            let each = if shared.is_empty() { vec![(*contender, 1)] } else { shared };
            for (contender, ranks) in each {
                runs.extend(seeds.iter().map(|&seed| Plan { contender, ranks, seed }));
            }
        }
        ensure!(
            world.is_none_or(|world| runs.iter().all(|run| run.ranks == world.size())),
            "--compare on several processes is for dist-muon, dist-adamw and recipes"
        );
        self.checked(runs)
    }

    /// The runs, if their optimizers can do everything that the options ask for.
    fn checked(&self, runs: Vec<Plan>) -> Result<Vec<Plan>> {
        for Plan { contender, .. } in &runs {
            self.check_sums(*contender)?;
            self.settings.check_digits(*contender)?;
        }
        self.settings.check_muon(&runs.iter().map(|run| run.contender).collect::<Vec<_>>())?;
        self.sharding.check_limits()?;
        self.settings.check_average()?;
        ensure!(
            !self.sharding.is_shared()
                || runs.iter().all(|run| run.contender.optimizer.is_shared()),
            "--owned, --rows, --overlap, --in-flight-mb, --round-means, --bucket-mb, --balancing, \
             --costs, --states-on, --audit-every and the axes tp and ep are for dist-muon and \
             dist-adamw; use or compare only these"
        );
        let has_norms = runs.iter().any(|run| run.contender.optimizer.is_shared());
        ensure!(
            self.diagnose_every == 0 || has_norms,
            "--diagnose-every shows norms of dist-muon and dist-adamw, which also train recipes on \
             several ranks; use or compare one of them"
        );
        ensure!(
            !self.account || runs.iter().any(|run| !run.contender.optimizer.is_burns()),
            "--account shows steps of muon, dist-muon, dist-adamw and recipes; use or compare one \
             of them"
        );
        Ok(runs)
    }

    /// The option `--resume` as it was written on the command line, for messages.
    pub fn resume_flag(&self) -> String {
        let path = self.resume.as_deref().unwrap_or(Path::new(""));
        format!("--resume {}", path.display())
    }

    /// Fails for an optimizer that does not take the float32 sums of micro-batches.
    fn check_sums(&self, contender: Contender) -> Result<()> {
        let is_burns = contender.optimizer.is_burns();
        ensure!(
            self.accumulate == 1 || self.settings.dtype == Dtype::F32 || !is_burns,
            "--accumulate {} adds gradients up in float32, which {} does not take for parameters \
             in half precision; use muon, dist-muon or dist-adamw, or --dtype f32",
            self.accumulate,
            contender.optimizer.name()
        );
        Ok(())
    }

    /// Fails for a batch that cannot be divided into parts of equal size.
    pub fn check_batch(&self, ranks: usize) -> Result<()> {
        let batch = self.settings.batch;
        let parts = self.accumulate;
        let each = if parts == 1 { String::new() } else { format!(" in {parts} parts each") };
        ensure!(
            batch.is_multiple_of(ranks * parts),
            "--batch {batch} can't be divided among {ranks} ranks{each}; give a multiple of {}",
            ranks * parts
        );
        Ok(())
    }
}

pub fn at_least_one(text: &str) -> Result<usize> {
    let number = text.parse()?;
    ensure!(number > 0, "it must be at least 1");
    Ok(number)
}

pub fn positive(text: &str) -> Result<f64> {
    let number: f64 = text.parse()?;
    ensure!(number.is_finite() && number > 0.0, "it must be a positive number");
    Ok(number)
}

/// Makes a folder for checkpoints. Fails if it can't be written to.
fn folder(path: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&path)?;
    tempfile::tempfile_in(&path)?;
    Ok(path)
}

pub fn not_negative(text: &str) -> Result<f64> {
    let number: f64 = text.parse()?;
    ensure!(number.is_finite() && number >= 0.0, "it must be zero or more");
    Ok(number)
}

/// Fails for a path that no result can be written to, before the training rather than after it.
fn writable(path: PathBuf) -> Result<PathBuf> {
    ensure!(!path.is_dir(), "it is a folder; name a file in it");
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if let Err(error) = tempfile::tempfile_in(folder) {
        bail!("can't write into the folder {}: {}", folder.display(), error.kind());
    }
    Ok(path)
}
