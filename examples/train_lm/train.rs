//! The training loop.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, bail};
use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::softmax, s};
use distmuon::dist::World;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::data::{Corpus, Split};
use super::display::Display;
use super::model::{Gpt, GptConfig};
use super::optimizer::{Optim, OptimizerName};
use super::options::{LINE_EVERY, Options};
use super::report::Summary;
use super::settings::{Progress, Settings};

/// Inputs and targets, `[sequences, context]` each.
type Batch = [Tensor<2, Int>; 2];

/// Batches of a validation.
const VALIDATION_BATCHES: u64 = 8;
/// Seed of the validation batches: the same in every run.
const VALIDATION_SEED: u64 = 0x5eed;
/// The text that the sample continues.
const PROMPT: &str = "pub fn ";
/// Steps that compile and tune kernels, whose time does not count where there are more.
const WARM_UP: usize = 5;
/// Steps in a row without a finite loss after which a run is given up.
const MOST_LOST: usize = 10;

/// The time of some steps, in seconds: without validation, and without what is saved and shown.
#[derive(Default)]
struct Clock {
    steps: usize,
    seconds: f64,
    /// In the optimizer.
    optimizing: f64,
}

impl Clock {
    /// Counts a step that ends now.
    fn count(&mut self, start: Instant, optimizer_start: Instant) {
        self.steps += 1;
        self.seconds += start.elapsed().as_secs_f64();
        self.optimizing += optimizer_start.elapsed().as_secs_f64();
    }

    /// More than nothing, for quotients.
    fn seconds(&self) -> f64 {
        self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// One run of training.
pub struct Run<'a> {
    pub options: &'a Options,
    pub settings: Settings,
    pub optimizer: OptimizerName,
    pub ranks: usize,
    pub corpus: &'a Corpus,
    pub sizes: &'a GptConfig,
    pub stop: &'a AtomicBool,
    pub log: Option<&'a File>,
    /// Of processes; else the ranks are threads.
    pub world: Option<&'a World>,
}

impl Run<'_> {
    /// Trains to the end, or until it is stopped.
    pub fn train(&self) -> Result<Summary> {
        if let Some(world) = self.world {
            world.device().seed(self.settings.seed);
            let model = self.sizes.init(world.device()).fork(world.device());
            // A rank that can't go on says why: the others would wait for it.
            let start = world.broadcast(model).map_err(anyhow::Error::from);
            let trained = start.and_then(|model| self.rank(world, model));
            return trained.inspect_err(|error| world.comm().fail(&format!("{error:#}")));
        }
        let devices = World::devices(self.ranks);
        devices[0].seed(self.settings.seed);
        let model = self.sizes.init(&devices[0]);
        let mut summaries =
            World::threads_with(devices, model, |world, model| self.rank(&world, model))?;
        Ok(summaries.swap_remove(0))
    }

    fn lr(&self) -> f64 {
        self.settings.lr.unwrap_or(self.optimizer.tuned_lr())
    }

    /// The name of the run where there are several.
    pub fn name(&self) -> String {
        match self.ranks {
            1 => self.optimizer.name(),
            ranks => format!("{} x{ranks}", self.optimizer.name()),
        }
    }

    /// The work of one rank: all of them do the same, and rank 0 tells of it.
    fn rank(&self, world: &World, model: Gpt) -> Result<Summary> {
        let (steps, name) = (self.settings.steps, self.name());
        let (mut model, mut optim, mut progress) = self.start(world, model)?;
        let first = progress.step;
        let display = || Display::new(&name, self.ranks, &self.settings, &progress, self.log);
        let mut display = world.is_main().then(display).transpose()?;
        let schedule = self.optimizer.schedule(self.lr(), steps);
        let (mut clock, mut lost) = (Clock::default(), 0);
        while progress.step < steps && !self.stopped(world)? {
            let lr = schedule.at(progress.step);
            let start = Instant::now();
            let (loss, grads) = self.gradients(world, &model, progress.step)?;
            let optimizer_start = Instant::now();
            model = optim.step(lr, model, grads)?;
            world.device().sync()?;
            if progress.step - first == WARM_UP {
                clock = Clock::default();
            }
            clock.count(start, optimizer_start);
            progress.step += 1;

            if let Some(display) = &display {
                display.step(progress.step, loss, lr, self.tokens_per_step())?;
            }
            lost = if loss.is_finite() { 0 } else { lost + 1 };
            if lost == MOST_LOST {
                return self.give_up(progress.step, display.as_ref());
            }
            self.after_step(world, &model, &optim, &mut progress, display.as_mut())?;
        }
        // Nothing is shown of a model that is not there yet.
        world.comm().synchronize()?;
        let stopped = match progress.step < steps {
            true => Some((progress.step, self.save_stopped(&model, &optim, &mut progress)?)),
            false => None,
        };
        if let Some(display) = display {
            display.end(progress.step, if stopped.is_some() { "stopped" } else { "finished" })?;
            self.epilogue(world, &optim, &model)?;
        }
        Ok(Summary {
            name,
            lr: self.lr(),
            curve: progress.curve,
            tokens_per_second: (clock.steps * self.tokens_per_step()) as f64 / clock.seconds(),
            optimizer_share: clock.optimizing / clock.seconds(),
            optimizer_ms: clock.optimizing * 1e3 / clock.steps.max(1) as f64,
            stopped,
        })
    }

    /// The start of a run, or where its checkpoint has left it.
    fn start(&self, world: &World, model: Gpt) -> Result<(Gpt, Optim, Progress)> {
        let (optim, routing) = self.optimizer.init(world, &model)?;
        if world.is_main() {
            let (name, parameters) = (self.name(), model.num_params());
            let settings = self.settings.describe(self.sizes);
            tracing::info!("{name}: {parameters} parameters, {settings}, lr {:e}", self.lr());
            if self.options.routes {
                println!("{routing}");
            }
            if let Optim::Dist(optim) = &optim {
                println!("{}\n", optim.report());
            }
        }
        let Some(path) = &self.options.resume else {
            let mut progress = Progress::new(self.settings.clone(), self.corpus);
            if self.options.eval_every > 0 {
                self.validate(world, &model, &mut progress, None)?;
            }
            return Ok((model, optim, progress));
        };
        let (model, optim, saved): (_, _, Progress) = optim.load(path, model)?;
        if world.is_main() {
            tracing::info!("{}: {}", self.name(), saved.describe(self.settings.steps));
        }
        Ok((model, optim, Progress { settings: self.settings.clone(), ..saved }))
    }

    /// The loss of a step and its gradients, of this rank's sequences.
    fn gradients(&self, world: &World, model: &Gpt, step: usize) -> Result<(f64, GradientsParams)> {
        let parts = self.options.accumulate;
        let batch = self.batch(Split::Train, self.batch_seed(step), world.device());
        let own = self.own_part(world, batch).map(|tokens| tokens.chunk(parts, 0));
        let [tokens, targets] = own;
        let mut accumulator = GradientsAccumulator::new();
        let mut losses = Vec::new();
        for (tokens, targets) in tokens.into_iter().zip(targets) {
            let loss = model.loss(tokens, targets).div_scalar(parts as f64);
            accumulator.accumulate(model, GradientsParams::from_grads(loss.backward(), model));
            losses.push(loss.inner());
        }
        world.device().sync()?;
        let loss = world.mean(Tensor::cat(losses, 0).sum().into_scalar::<f32>())?;
        Ok((loss, accumulator.grads()))
    }

    /// Tells of skipped steps, validates and saves, if one of these is due.
    fn after_step(
        &self,
        world: &World,
        model: &Gpt,
        optim: &Optim,
        progress: &mut Progress,
        display: Option<&mut Display>,
    ) -> Result<()> {
        let step = progress.step;
        let validates = is_due(step, self.options.eval_every) || step == self.settings.steps;
        if !validates && !is_due(step, LINE_EVERY) {
            return Ok(());
        }
        progress.skipped.extend(optim.skipped_steps());
        let display = display.map(|display| {
            display.skipped(step, &progress.skipped);
            &*display
        });
        if !validates {
            return Ok(());
        }
        self.validate(world, model, progress, display)?;
        let save = |path| optim.save(path, model, progress);
        self.options.save.as_deref().map_or(Ok(()), save)
    }

    /// Saves a run that Ctrl-C has stopped, and returns where.
    fn save_stopped(&self, model: &Gpt, optim: &Optim, progress: &mut Progress) -> Result<PathBuf> {
        let path = self.options.save.clone().unwrap_or("train_lm-interrupted.bpk".into());
        progress.skipped.extend(optim.skipped_steps());
        optim.save(&path, model, progress)?;
        Ok(path)
    }

    fn give_up(&self, step: usize, display: Option<&Display>) -> Result<Summary> {
        if let Some(display) = display {
            display.end(step, "diverged")?;
        }
        bail!(
            "{}: the losses of steps {} to {step} are not finite, so that nothing was learnt in them; \
             start anew with a lower --lr than {:e}",
            self.name(),
            step + 1 - MOST_LOST,
            self.lr()
        )
    }

    /// Tells on rank 0 of a run once it has ended.
    fn epilogue(&self, world: &World, optim: &Optim, model: &Gpt) -> Result<()> {
        if let Optim::Dist(optim) = optim {
            println!("rank 0 of {}:\n{}\n", world.size(), optim.memory());
        }
        if self.options.sample > 0 {
            println!("{}: {}\n", self.name(), self.sample(model, world.device())?);
        }
        Ok(())
    }

    fn tokens_per_step(&self) -> usize {
        self.settings.batch * self.sizes.context
    }

    /// Every step has its own seed, so that a continued run sees what it would have seen.
    fn batch_seed(&self, step: usize) -> u64 {
        self.settings.seed.wrapping_mul(1_000_003).wrapping_add(step as u64)
    }

    fn batch(&self, split: Split, seed: u64, device: &Device) -> Batch {
        self.corpus.batch(split, seed, self.settings.batch, self.sizes.context, device)
    }

    /// The sequences of a batch that the rank trains on: as many on each.
    fn own_part(&self, world: &World, batch: Batch) -> Batch {
        let own = world.part(self.settings.batch);
        batch.map(|tokens| tokens.slice(s![own.clone()]))
    }

    /// Adds the loss on the validation batches, which the ranks share, to the curve.
    fn validate(
        &self,
        world: &World,
        model: &Gpt,
        progress: &mut Progress,
        display: Option<&Display>,
    ) -> Result<()> {
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
        let sum: f64 = losses.into_values().map(f64::from_bits).sum();
        let loss = sum / VALIDATION_BATCHES as f64;
        progress.curve.push((progress.step, loss));
        match display {
            Some(display) => display.validation(progress.step, loss, &progress.skipped),
            None => Ok(()),
        }
    }

    /// Returns `true` on all ranks if Ctrl-C was pressed on any.
    fn stopped(&self, world: &World) -> Result<bool> {
        Ok(world.any(self.stop.load(Ordering::SeqCst))?)
    }

    /// Continues the prompt, drawing every token from the model's distribution.
    fn sample(&self, model: &Gpt, device: &Device) -> Result<String> {
        let device = device.clone().inner();
        let model = model.valid();
        let mut rng = StdRng::seed_from_u64(self.settings.seed);
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

/// Tells whether something that happens every so many steps does after this one; with 0, never.
fn is_due(step: usize, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every)
}
