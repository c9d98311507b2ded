//! The training loop.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::softmax};
use distmuon::checkpoint;
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

use crate::Options;
use crate::data::{Corpus, Split};
use crate::model::{Gpt, GptConfig};
use crate::optimizer::OptimizerName;

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
    pub corpus: &'a Corpus,
    pub sizes: &'a GptConfig,
    pub stop: &'a AtomicBool,
}

/// What a checkpoint keeps beside model and optimizer.
#[derive(Serialize, Deserialize)]
struct Progress {
    settings: Settings,
    step: usize,
    curve: Vec<(usize, f64)>,
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
    pub fn train(&self, device: &Device) -> Result<Summary> {
        let Options { steps, batch, seed, .. } = *self.options;
        device.seed(seed);
        let model = self.sizes.init(device);
        let (optim, routing) = self.optimizer.init(&model)?;
        if self.options.routes {
            println!("{routing}");
        }
        let lr = self.options.lr.unwrap_or(self.optimizer.tuned_lr());
        let settings = Settings {
            optimizer: self.optimizer.name(),
            lr,
            steps,
            batch,
            seed,
            tokens: self.corpus.len(),
        };
        let schedule = self.optimizer.schedule(lr, steps);
        let progress = Progress { settings, step: 0, curve: vec![] };
        let (mut model, mut optim, mut progress) = self.resumed(model, optim, progress)?;
        if progress.step == 0 {
            progress.curve.push((0, self.validate(&model)));
        }

        let display = Display::new(self.optimizer.name(), steps, progress.step);
        let (start, first) = (Instant::now(), progress.step);
        let mut optimizing = Duration::ZERO;
        while progress.step < steps && !self.stop.load(Ordering::SeqCst) {
            let [tokens, targets] =
                self.batch(Split::Train, self.batch_seed(progress.step), device);
            let loss = model.loss(tokens, targets);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            device.sync()?;
            let optimizer_start = Instant::now();
            model = optim.step(schedule.at(progress.step), model, grads);
            device.sync()?;
            optimizing += optimizer_start.elapsed();
            progress.step += 1;

            let done = progress.step - first;
            let rate = (done * self.tokens_per_step()) as f64 / start.elapsed().as_secs_f64();
            display.step(progress.step, loss.into_scalar(), rate);
            let due = progress.step.is_multiple_of(self.options.eval_every.max(1));
            if due || progress.step == steps {
                progress.curve.push((progress.step, self.validate(&model)));
                display.validation(&progress.curve);
                self.save(&model, &optim, &progress)?;
            }
        }
        let elapsed = start.elapsed().as_secs_f64();
        let done = progress.step - first;
        display.finish();
        if progress.step < steps {
            self.interrupted(&model, &optim, &progress)?;
        }
        for (parameter, count) in routing.skipped_steps().read() {
            tracing::warn!(parameter, count, "steps skipped: the gradient was not finite");
        }
        if self.options.sample > 0 {
            println!("{}: {}\n", self.optimizer.name(), self.sample(&model)?);
        }
        Ok(Summary {
            optimizer: self.optimizer.name(),
            lr,
            curve: progress.curve,
            tokens_per_second: (done * self.tokens_per_step()) as f64 / elapsed,
            optimizer_share: optimizing.as_secs_f64() / elapsed,
            optimizer_ms: optimizing.as_secs_f64() * 1e3 / done.max(1) as f64,
        })
    }

    fn tokens_per_step(&self) -> usize {
        self.options.batch * self.sizes.context
    }

    /// Every step has its own seed, so that a continued run sees what it would have seen.
    fn batch_seed(&self, step: usize) -> u64 {
        self.options.seed.wrapping_mul(1_000_003).wrapping_add(step as u64)
    }

    fn batch(&self, split: Split, seed: u64, device: &Device) -> [Tensor<2, Int>; 2] {
        self.corpus.batch(split, seed, self.options.batch, self.sizes.context, device)
    }

    fn validate(&self, model: &Gpt) -> f64 {
        let device = Device::default();
        let model = model.valid();
        let losses = (0..VALIDATION_BATCHES).map(|i| {
            let [tokens, targets] = self.batch(Split::Validation, VALIDATION_SEED + i, &device);
            f64::from(model.loss(tokens, targets).into_scalar::<f32>())
        });
        losses.sum::<f64>() / VALIDATION_BATCHES as f64
    }

    fn resumed(
        &self,
        model: Gpt,
        optim: ModuleOptimizer,
        progress: Progress,
    ) -> Result<(Gpt, ModuleOptimizer, Progress)> {
        let Some(path) = &self.options.resume else {
            return Ok((model, optim, progress));
        };
        let (model, optim, saved): (_, _, Progress) = checkpoint::load(path, model, optim)?;
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

    fn save(&self, model: &Gpt, optim: &ModuleOptimizer, progress: &Progress) -> Result<()> {
        if let Some(path) = &self.options.save {
            checkpoint::save(path, model, optim, progress)?;
        }
        Ok(())
    }

    fn interrupted(&self, model: &Gpt, optim: &ModuleOptimizer, progress: &Progress) -> Result<()> {
        let path = self.options.save.as_deref().unwrap_or(Path::new("train_lm-interrupted.bpk"));
        checkpoint::save(path, model, optim, progress)?;
        println!("stopped after step {}; go on with --resume {}", progress.step, path.display());
        Ok(())
    }

    /// Continues the prompt, drawing every token from the model's distribution.
    fn sample(&self, model: &Gpt) -> Result<String> {
        let device = Device::default();
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
