//! The training loop.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData, activation::softmax, s};
use distmuon::dist::{ReduceOp, World};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Deserializer, Serialize};

use crate::Options;
use crate::data::{Corpus, Split};
use crate::model::{Gpt, GptConfig};
use crate::optimizer::{Optim, OptimizerName};

/// Inputs and targets, `[sequences, context]` each.
type Batch = [Tensor<2, Int>; 2];

/// Batches of a validation.
const VALIDATION_BATCHES: u64 = 8;
/// Seed of the validation batches: the same in every run.
const VALIDATION_SEED: u64 = 0x5eed;
/// What the text sample continues.
const PROMPT: &str = "pub fn ";
/// Lines without a terminal come this many steps apart.
const LINE_EVERY: usize = 25;

/// One run of training.
pub struct Run<'a> {
    pub options: &'a Options,
    pub optimizer: OptimizerName,
    pub ranks: usize,
    pub corpus: &'a Corpus,
    pub sizes: &'a GptConfig,
    pub stop: &'a AtomicBool,
    /// Of processes; else the ranks are threads.
    pub world: Option<&'a World>,
}

/// What a checkpoint keeps beside model and optimizer.
#[derive(Serialize, Deserialize)]
struct Progress {
    settings: Settings,
    step: usize,
    #[serde(deserialize_with = "with_nan")]
    curve: Vec<(usize, f64)>,
}

/// The losses of a curve, where JSON has null for those of a run that diverged.
fn with_nan<'de, D: Deserializer<'de>>(saved: D) -> Result<Vec<(usize, f64)>, D::Error> {
    let curve = Vec::<(usize, Option<f64>)>::deserialize(saved)?.into_iter();
    Ok(curve.map(|(step, loss)| (step, loss.unwrap_or(f64::NAN))).collect())
}

/// What has to be the same when a run is continued.
#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Settings {
    optimizer: String,
    lr: f64,
    steps: usize,
    batch: usize,
    seed: u64,
    tokens: usize,
    /// Tells texts of one length apart.
    text: u64,
}

/// What came out of a run.
pub struct Summary {
    pub optimizer: String,
    pub lr: f64,
    /// Steps and the validation loss after them.
    pub curve: Vec<(usize, f64)>,
    pub tokens_per_second: f64,
    /// Part of the time spent in the optimizer.
    pub optimizer_share: f64,
    pub optimizer_ms: f64,
}

impl Run<'_> {
    /// Trains to the end, or until it is stopped.
    pub fn train(&self) -> Result<Summary> {
        if let Some(world) = self.world {
            world.device().seed(self.options.seed);
            let model = self.sizes.init(world.device()).fork(world.device());
            // A rank that can't go on says why: the others would wait for it.
            let start = world.broadcast(model).map_err(anyhow::Error::from);
            let trained = start.and_then(|model| self.rank(world, model));
            return trained.inspect_err(|error| world.comm().fail(&format!("{error:#}")));
        }
        let devices: Vec<Device> =
            World::devices(self.ranks).into_iter().map(Device::autodiff).collect();
        devices[0].seed(self.options.seed);
        let start = self.sizes.init(&devices[0]).fork(&devices[0]);
        let models = devices.iter().map(|device| Mutex::new(Some(start.clone().fork(device))));
        let models: Vec<_> = models.collect();
        drop(start);
        let mut summaries = World::threads(devices, |world| {
            let model = models[world.rank()].lock().expect("nobody panics with it").take();
            self.rank(&world, model.expect("one for every rank"))
        })?;
        Ok(summaries.swap_remove(0))
    }

    /// How the run is called where there are several.
    pub fn name(&self) -> String {
        match self.ranks {
            1 => self.optimizer.name(),
            ranks => format!("{} x{ranks}", self.optimizer.name()),
        }
    }

    /// What one rank does: all of them do the same, and rank 0 tells of it.
    fn rank(&self, world: &World, model: Gpt) -> Result<Summary> {
        let Options { steps, batch, seed, .. } = *self.options;
        let first_rank = world.rank() == 0;
        let (optim, routing) = self.optimizer.init(world, &model)?;
        if self.options.routes && first_rank {
            println!("{routing}");
        }
        if let (Optim::Dist(optim), true) = (&optim, first_rank) {
            println!("{}\n", optim.report());
        }
        let lr = self.options.lr.unwrap_or(self.optimizer.tuned_lr());
        let settings = Settings {
            optimizer: self.optimizer.name(),
            lr,
            steps,
            batch,
            seed,
            tokens: self.corpus.len(),
            text: self.corpus.fingerprint,
        };
        let schedule = self.optimizer.schedule(lr, steps);
        let progress = Progress { settings, step: 0, curve: vec![] };
        let (mut model, mut optim, mut progress) = self.resumed(model, optim, progress)?;
        if progress.step == 0 {
            progress.curve.push((0, self.validate(world, &model)?));
        }

        let display = first_rank.then(|| Display::new(self.name(), steps, progress.step));
        let device = world.device();
        let (start, first) = (Instant::now(), progress.step);
        let mut optimizing = Duration::ZERO;
        while progress.step < steps && !self.stopped(world)? {
            let batch = self.batch(Split::Train, self.batch_seed(progress.step), device);
            let [tokens, targets] = self.own_part(world, batch);
            let loss = model.loss(tokens, targets);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            device.sync()?;
            let optimizer_start = Instant::now();
            model = optim.step(schedule.at(progress.step), model, grads)?;
            device.sync()?;
            optimizing += optimizer_start.elapsed();
            progress.step += 1;

            let loss = world.comm().all_reduce(loss.inner(), ReduceOp::Mean)?.wait()?;
            let done = progress.step - first;
            let rate = (done * self.tokens_per_step()) as f64 / start.elapsed().as_secs_f64();
            if let Some(display) = &display {
                display.step(progress.step, loss.into_scalar(), rate);
            }
            let due = progress.step.is_multiple_of(self.options.eval_every.max(1));
            if due || progress.step == steps {
                progress.curve.push((progress.step, self.validate(world, &model)?));
                if let Some(display) = &display {
                    display.validation(&progress.curve);
                }
                if let Some(path) = &self.options.save {
                    optim.save(path, &model, &progress)?;
                }
            }
        }
        // Nothing is shown of a model that is not there yet.
        world.comm().synchronize()?;
        let elapsed = start.elapsed().as_secs_f64();
        let done = progress.step - first;
        if progress.step < steps {
            let path = self.options.save.as_deref();
            let path = path.unwrap_or(Path::new("train_lm-interrupted.bpk"));
            optim.save(path, &model, &progress)?;
            self.interrupted(path, &progress, display.as_ref());
        }
        let summary = Summary {
            optimizer: self.name(),
            lr,
            curve: progress.curve,
            tokens_per_second: (done * self.tokens_per_step()) as f64 / elapsed,
            optimizer_share: optimizing.as_secs_f64() / elapsed,
            optimizer_ms: optimizing.as_secs_f64() * 1e3 / done.max(1) as f64,
        };
        let skipped = optim.skipped_steps();
        if let Some(display) = display {
            display.finish();
            for (parameter, count) in skipped {
                tracing::warn!(parameter, count, "steps skipped: the gradient was not finite");
            }
            if let Optim::Dist(optim) = &optim {
                println!("rank 0 of {}:\n{}\n", world.size(), optim.memory());
            }
            if self.options.sample > 0 {
                println!("{}: {}\n", self.name(), self.sample(&model, device)?);
            }
        }
        Ok(summary)
    }

    fn tokens_per_step(&self) -> usize {
        self.options.batch * self.sizes.context
    }

    /// Every step has its own seed, so that a continued run sees what it would have seen.
    fn batch_seed(&self, step: usize) -> u64 {
        self.options.seed.wrapping_mul(1_000_003).wrapping_add(step as u64)
    }

    fn batch(&self, split: Split, seed: u64, device: &Device) -> Batch {
        self.corpus.batch(split, seed, self.options.batch, self.sizes.context, device)
    }

    /// The sequences of a batch that the rank trains on: as many on each.
    fn own_part(&self, world: &World, batch: Batch) -> Batch {
        let each = self.options.batch / world.size();
        let own = world.rank() * each..(world.rank() + 1) * each;
        batch.map(|tokens| tokens.slice(s![own.clone()]))
    }

    /// The loss on the validation batches, which the ranks share.
    fn validate(&self, world: &World, model: &Gpt) -> Result<f64> {
        let device = world.device().clone().inner();
        let model = model.valid();
        let own = (0..VALIDATION_BATCHES).skip(world.rank()).step_by(world.size());
        let losses = own.map(|i| {
            let [tokens, targets] = self.batch(Split::Validation, VALIDATION_SEED + i, &device);
            (i, f64::from(model.loss(tokens, targets).into_scalar::<f32>()).to_bits())
        });
        let losses = world.all_gather_value(&losses.collect::<Vec<_>>())?;
        // In the same order on any number of ranks.
        let losses: BTreeMap<u64, u64> = losses.into_iter().flatten().collect();
        Ok(losses.into_values().map(f64::from_bits).sum::<f64>() / VALIDATION_BATCHES as f64)
    }

    /// Returns `true` on all ranks if Ctrl-C was pressed on any.
    fn stopped(&self, world: &World) -> Result<bool> {
        Ok(world.any(self.stop.load(Ordering::SeqCst))?)
    }

    fn resumed(
        &self,
        model: Gpt,
        optim: Optim,
        progress: Progress,
    ) -> Result<(Gpt, Optim, Progress)> {
        let Some(path) = &self.options.resume else {
            return Ok((model, optim, progress));
        };
        let (model, optim, saved): (_, _, Progress) = optim.load(path, model)?;
        ensure!(
            saved.settings == progress.settings,
            "--resume {}: it was trained with {:?}, not with {:?}",
            path.display(),
            saved.settings,
            progress.settings
        );
        tracing::info!(step = saved.step, path = %path.display(), "resumed");
        Ok((model, optim, saved))
    }

    fn interrupted(&self, path: &Path, progress: &Progress, display: Option<&Display>) {
        if display.is_some() {
            let optimizer = self.optimizer.name();
            println!(
                "stopped after step {}; go on with --optimizer {optimizer} --resume {}",
                progress.step,
                path.display()
            );
        }
    }

    /// Continues the prompt, drawing every token from the model's distribution.
    fn sample(&self, model: &Gpt, device: &Device) -> Result<String> {
        let device = device.clone().inner();
        let model = model.valid();
        let mut rng = StdRng::seed_from_u64(self.options.seed);
        let mut tokens = self.corpus.tokenizer.encode(PROMPT.as_bytes())?;
        for _ in 0..self.options.sample {
            let window = &tokens[tokens.len().saturating_sub(self.sizes.context)..];
            let values: Vec<i32> = window.iter().map(|token| i32::from(*token)).collect();
            let input = Tensor::from_data(TensorData::new(values, [1, window.len()]), &device);
            let logits = model.forward(input).slice([0..1, window.len() - 1..window.len()]);
            let chances: Vec<f64> = softmax(logits, 2).into_data().iter::<f64>().collect();
            let mut draw = rng.random_range(0.0..1.0);
            let token = chances.iter().position(|chance| {
                draw -= chance;
                draw < 0.0
            });
            tokens.push(token.unwrap_or(chances.len() - 1) as u16);
        }
        self.corpus.tokenizer.decode(&tokens)
    }
}

/// Progress as a bar on a terminal, and as lines elsewhere.
struct Display {
    name: String,
    bar: Option<ProgressBar>,
    steps: usize,
}

impl Display {
    fn new(name: String, steps: usize, done: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = "{prefix} {bar:30} {pos}/{len} {msg} ETA {eta}";
            let style = ProgressStyle::with_template(style).expect("a valid template");
            ProgressBar::new(steps as u64)
                .with_style(style)
                .with_prefix(name.clone())
                .with_position(done as u64)
        });
        if let Some(bar) = &bar {
            bar.reset_eta();
        }
        Self { name, bar, steps }
    }

    fn step(&self, step: usize, loss: f32, rate: f64) {
        let message = format!("loss {loss:.3}, {rate:.0} tokens/s");
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(step as u64);
            }
            None if step.is_multiple_of(LINE_EVERY) || step == 1 => {
                let left = (self.steps - step) as f64;
                tracing::info!("{} {step}/{}: {message}, {left} steps left", self.name, self.steps);
            }
            None => {}
        }
    }

    fn validation(&self, curve: &[(usize, f64)]) {
        let Some((step, loss)) = curve.last() else {
            return;
        };
        let line = format!("{} {step}/{}: validation loss {loss:.4}", self.name, self.steps);
        match &self.bar {
            Some(bar) => bar.println(line),
            None => tracing::info!("{line}"),
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
