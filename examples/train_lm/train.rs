//! The training loop.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, anyhow};
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData, activation::softmax};
use distmuon::GradientBuffer;
use distmuon::account::Account;
use distmuon::certificate::Certificate;
use distmuon::checkpoint::Saver;
use distmuon::comm::World;
use distmuon::distributed::{GroupDiagnostics, WeightAverage};
use distmuon::qk_clip::ClippedHeads;
use distmuon::{MaxLogits, QkClip};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::average::Averaging;
use super::data::{Corpus, Draw, Split};
use super::display::Display;
use super::exact_mars::{ExactMars, exact_mars};
use super::model::{Gpt, GptConfig};
use super::optimizer::{Optim, OptimizerName};
use super::options::{LINE_EVERY, Options, Plan};
use super::report::Summary;
use super::settings::{Progress, Settings};

/// Batches of a validation.
const VALIDATION_BATCHES: u64 = 8;
/// Seed of the validation batches, which are the same in every run.
const VALIDATION_SEED: u64 = 0x5eed;
/// The text that the sample continues.
const PROMPT: &str = "pub fn ";
/// The first steps, which compile and tune kernels. Their time does not count if there are more
/// steps.
const WARM_UP: usize = 5;
/// Consecutive steps with a non-finite loss after which a run ends.
const MAX_NON_FINITE: usize = 10;

/// The time of some steps, in seconds, without that of validation, saving and output.
#[derive(Default)]
struct Clock {
    steps: usize,
    seconds: f64,
    /// The part of the optimizer.
    optimizing: f64,
}

impl Clock {
    /// Counts a step that ends now.
    fn count(&mut self, start: Instant, optimizer_start: Instant) {
        self.steps += 1;
        self.seconds += start.elapsed().as_secs_f64();
        self.optimizing += optimizer_start.elapsed().as_secs_f64();
    }

    /// The time as a divisor, never zero.
    fn seconds(&self) -> f64 {
        self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// One run of training.
pub struct Run<'a> {
    pub options: &'a Options,
    pub settings: Settings,
    pub plan: Plan,
    pub corpus: &'a Corpus,
    pub sizes: &'a GptConfig,
    pub stop: &'a AtomicBool,
    pub log: Option<&'a File>,
    /// The world of processes; `None` if the ranks are threads.
    pub world: Option<&'a World>,
}

/// A run in progress on one rank.
struct Training<'a> {
    model: Gpt,
    optim: Optim,
    clip: Option<QkClip>,
    average: Option<WeightAverage>,
    mars: Option<ExactMars>,
    /// Steps of this run, and their norms.
    norms: Vec<(usize, Vec<GroupDiagnostics>)>,
    progress: Progress,
    clock: Clock,
    saver: Saver,
    /// On rank 0 only, as the display.
    certificate: Option<Certificate>,
    display: Option<Display<'a>>,
}

impl Training<'_> {
    /// The model that is validated: with the average of its weights, if one has begun.
    fn validated(&self) -> Result<Gpt> {
        match (&self.average, self.progress.settings.average) {
            (Some(average), Some(Averaging { share, .. })) => {
                Ok(average.mixed_into(self.model.clone(), share)?)
            }
            _ => Ok(self.model.clone()),
        }
    }

    /// Takes a step, and clips the heads of attention whose logits were above the threshold, on all
    /// ranks.
    fn step(
        mut self,
        world: &World,
        lr: f64,
        grads: GradientsParams,
        logits: &MaxLogits,
    ) -> Result<(Self, Option<ClippedHeads>)> {
        let Some(clip) = &self.clip else {
            self.model = self.optim.step(lr, self.model, grads)?;
            return Ok((self, None));
        };
        let factors = clip.factors_on(world, logits)?;
        let clipped = factors.clipped_heads();
        self.model = match &mut self.optim {
            Optim::Single(optim, _) => factors.apply(optim.step(lr, self.model, grads))?,
            Optim::Dist(optim, _) => {
                optim.clip_heads(&factors);
                optim.step(lr, self.model, grads)?
            }
        };
        Ok((self, Some(clipped)))
    }
}

impl Run<'_> {
    /// Trains to the end, or until Ctrl-C.
    pub fn train(&self) -> Result<Summary> {
        let sharding = &self.options.sharding;
        if let Some(world) = self.world {
            let world = &sharding.world(world.clone());
            world.device().seed(self.settings.seed);
            let model = self.model(world.device()).fork(world.device());
            let model = world.broadcast(model).map_err(anyhow::Error::from);
            let summary = model.and_then(|model| self.rank(world, model));
            // A rank that fails has to report it, since the others wait for it.
            return summary.inspect_err(|error| world.comm().fail(&format!("{error:#}")));
        }
        let devices = World::devices(self.plan.ranks).into_iter();
        let devices: Vec<Device> = devices.map(|device| sharding.device(device)).collect();
        devices[0].seed(self.settings.seed);
        let model = self.model(&devices[0]);
        let mut summaries =
            World::threads_with(devices, model, |world, model| self.rank(&world, model))?;
        Ok(summaries.swap_remove(0))
    }

    /// The model before the first step.
    fn model(&self, device: &Device) -> Gpt {
        self.sizes.init(device).cast(self.settings.dtype.dtype())
    }

    fn lr(&self) -> f64 {
        self.settings.lr.unwrap_or(self.plan.contender.tuned_lr())
    }

    /// The name of the run, to tell it from others.
    pub fn name(&self) -> String {
        match self.options.seeds[..] {
            [] => self.title(),
            _ => format!("{} seed {}", self.title(), self.plan.seed),
        }
    }

    /// The name without the seed.
    fn title(&self) -> String {
        match self.plan {
            Plan { contender, ranks: 1, .. } => contender.name(),
            Plan { contender, ranks, .. } => format!("{} x{ranks}", contender.name()),
        }
    }

    /// Trains on one rank. All ranks do the same, and rank 0 reports it.
    fn rank(&self, world: &World, model: Gpt) -> Result<Summary> {
        let name = self.name();
        if world.is_main() && world.size() > 1 {
            println!("{} ranks over {}\n", world.size(), world.comm().engine_name());
        }
        // Heads are those of the whole model.
        let clip = self.settings.qk_clip.map(|tau| self.sizes.qk_clip(tau).init(&model));
        let (model, optim, progress) = self.start(world, model)?;
        let mars = self.exact_mars(world, &model)?;
        let display = || Display::new(&name, self.plan.ranks, &self.settings, &progress, self.log);
        let display = world.is_main().then(display).transpose()?;
        let certificate = self.certificate(world, &model, &optim, &progress)?;
        let mut training = Training {
            model,
            optim,
            clip: clip.transpose()?,
            average: None,
            mars,
            norms: vec![],
            progress,
            clock: Clock::default(),
            saver: self.options.saver(),
            certificate,
            display,
        };
        self.average(world, &mut training)?;
        self.finish(world, self.steps(world, training)?)
    }

    /// The correction of gradients in MARS-M's exact form, if the settings have it.
    fn exact_mars(&self, world: &World, model: &Gpt) -> Result<Option<ExactMars>> {
        let contender = self.plan.contender;
        let config = contender.muon(&self.settings)?;
        let in_passes = self.options.sharding.reduces_in_passes(world.size());
        let exact = exact_mars(contender, &config, in_passes)?;
        exact.map(|mars| ExactMars::start(mars, &config, model)).transpose()
    }

    /// Adds the weights to their average, if one is wanted. All ranks make this call.
    fn average(&self, world: &World, training: &mut Training) -> Result<()> {
        let Some(averaging) = self.settings.average else { return Ok(()) };
        let Training { model, optim, average, progress, .. } = training;
        averaging.add(average, &optim.layout(world), model, progress.step)
    }

    /// Starts the certificate of a run, or continues that of the run that is resumed. All ranks
    /// make this call.
    fn certificate(
        &self,
        world: &World,
        model: &Gpt,
        optim: &Optim,
        Progress { step, .. }: &Progress,
    ) -> Result<Option<Certificate>> {
        let Some(path) = &self.options.certificate else { return Ok(None) };
        let (whole, described) = (optim.whole(model)?, world.describe()?);
        if !world.is_main() {
            return Ok(None);
        }
        // The file of the text may lie elsewhere: its digest tells texts apart. A resumed run may
        // be given more steps, of which the chain has the weights. One rank and many have one
        // optimizer under two names.
        let optimizer = self.settings.optimizer.map(OptimizerName::single);
        let settings = Settings { data: None, steps: 0, optimizer, ..self.settings.clone() };
        let new = Certificate::new(&settings, format!("{:016x}", self.corpus.fingerprint));
        let mut certificate = match self.options.resume.is_some() && path.exists() {
            true => Certificate::read(path)?.resume(&new, *step, &whole)?,
            false => {
                if self.options.resume.is_some() {
                    let path = path.display();
                    tracing::warn!("the certificate begins at step {step}: there is no {path}");
                }
                let mut new = new;
                new.record(*step, &whole)?;
                new
            }
        };
        certificate.computed_by(format!("{described}\n{:?}", self.options.sharding));
        Ok(Some(certificate))
    }

    /// Adds the weights after a step to the certificate. All ranks make this call.
    fn certify(&self, training: &mut Training) -> Result<()> {
        if self.options.certificate.is_none() {
            return Ok(());
        }
        let whole = training.optim.whole(&training.model)?;
        let step = training.progress.step;
        let Some(certificate) = &mut training.certificate else { return Ok(()) };
        Ok(certificate.record(step, &whole)?)
    }

    /// Writes the certificate, on rank 0.
    fn write_certificate(&self, training: &Training) -> Result<()> {
        match (&training.certificate, &self.options.certificate) {
            (Some(certificate), Some(path)) => Ok(certificate.write(path)?),
            _ => Ok(()),
        }
    }

    /// Trains up to the last step, or until Ctrl-C.
    fn steps<'a>(&self, world: &World, mut training: Training<'a>) -> Result<Training<'a>> {
        let schedule = self.plan.contender.lr_schedule(self.lr(), self.settings.steps);
        let first = training.progress.step;
        let mut non_finite = 0;
        while training.progress.step < self.settings.steps && !self.stopped(world)? {
            let lr = schedule.at(training.progress.step);
            let start = Instant::now();
            let mut logits = training.clip.is_some().then(MaxLogits::new);
            let (loss, grads) = self.gradients(world, &mut training, logits.as_mut())?;
            let optimizer_start = Instant::now();
            if is_due(training.progress.step, self.options.diagnose_every) {
                training.optim.request_diagnostics();
            }
            let is_first = training.progress.step == first;
            if is_first && self.options.account && !self.plan.contender.optimizer.is_burns() {
                training.optim.request_account();
            }
            let clipped;
            (training, clipped) = training.step(world, lr, grads, &logits.unwrap_or_default())?;
            world.device().sync()?;
            if training.progress.step - first == WARM_UP {
                training.clock = Clock::default();
            }
            training.clock.count(start, optimizer_start);
            training.progress.step += 1;

            self.average(world, &mut training)?;
            self.certify(&mut training)?;
            let step = training.progress.step;
            let (account, norms) = (training.optim.account()?, training.optim.diagnostics()?);
            if let (Some(account), Some(display)) = (account, &training.display) {
                let account = norms.iter().fold(account, Account::with_norms);
                display.account(step, &account)?;
            }
            // The account has asked for norms that may not be wanted otherwise.
            if let Some(norms) = norms.filter(|_| self.options.diagnose_every > 0) {
                let groups = norms.groups();
                if let Some(display) = &training.display {
                    display.diagnostics(step, &groups)?;
                }
                training.norms.push((step, groups));
            }
            if let Some(display) = &training.display {
                display.step(step, loss, lr, self.tokens_per_step(), clipped.as_ref())?;
            }
            non_finite = if loss.is_finite() { 0 } else { non_finite + 1 };
            if non_finite == MAX_NON_FINITE {
                if let Some(display) = &training.display {
                    display.end(step, "diverged")?;
                }
                return Err(self.diverged(step));
            }
            self.after_step(world, &mut training)?;
        }
        Ok(training)
    }

    /// Ends a run: saves it if Ctrl-C has stopped it, and reports its results.
    fn finish(&self, world: &World, mut training: Training) -> Result<Summary> {
        // Nothing is shown of parameters that are still in flight.
        world.comm().synchronize()?;
        let step = training.progress.step;
        // Before the checkpoint: a certificate may have further steps than the checkpoint that is
        // resumed, and not fewer.
        self.write_certificate(&training)?;
        let stopped = match step < self.settings.steps {
            true => Some((step, self.save_stopped(&mut training)?)),
            false => None,
        };
        // The last checkpoint is complete before anything says so.
        training.saver.wait()?;
        let whole = training.optim.whole(&training.validated()?)?;
        if let Some(display) = &training.display {
            display.end(step, if stopped.is_some() { "stopped" } else { "finished" })?;
            self.epilogue(world, &training.optim, &whole)?;
        }
        let clock = &training.clock;
        Ok(Summary {
            name: self.title(),
            seed: self.plan.seed,
            lr: self.lr(),
            tokens_per_second: (clock.steps * self.tokens_per_step()) as f64 / clock.seconds(),
            optimizer_share: clock.optimizing / clock.seconds(),
            optimizer_ms: clock.optimizing * 1e3 / clock.steps.max(1) as f64,
            curve: training.progress.curve,
            norms: training.norms,
            stopped,
        })
    }

    /// Starts a run, or continues one from its checkpoint.
    fn start(&self, world: &World, model: Gpt) -> Result<(Gpt, Optim, Progress)> {
        let parameters = model.num_params();
        let (contender, sharding) = (self.plan.contender, &self.options.sharding);
        let (model, optim, routing) = contender.init(world, model, &self.settings, sharding)?;
        if world.is_main() {
            let name = self.name();
            let settings = self.settings.describe(self.sizes);
            tracing::info!("{name}: {parameters} parameters, {settings}, lr {:e}", self.lr());
            if self.options.routes {
                println!("{routing}");
            }
            if let Optim::Dist(optim, _) = &optim {
                println!("{}\n{}\n", sharding.describe_plan(), optim.report());
            }
        }
        let Some(path) = &self.options.resume else {
            let mut progress = Progress::new(self.settings.clone(), self.corpus);
            if self.options.eval_every > 0 {
                self.validate((world, optim.data(world)), &model, &mut progress, None)?;
            }
            return Ok((model, optim, progress));
        };
        let (model, optim, saved): (_, _, Progress) = optim.load(path, model)?;
        if world.is_main() {
            tracing::info!("{}: {}", self.name(), saved.describe(self.settings.steps));
            if let Some((path, byte)) = self.corpus.position(&self.training_batch(saved.step)) {
                tracing::info!("{}: at byte {byte} of {}", self.name(), path.display());
            }
        }
        Ok((model, optim, Progress { settings: self.settings.clone(), ..saved }))
    }

    /// Computes the loss of a step on all ranks, and the gradients of this rank's sequences.
    /// The attentions report to `logits`, if there are any.
    fn gradients(
        &self,
        world: &World,
        Training { model, optim, mars, progress, .. }: &mut Training,
        mut logits: Option<&mut MaxLogits>,
    ) -> Result<(f64, GradientsParams)> {
        let parts = self.options.accumulate;
        let sequences = optim.data(world).part(self.settings.batch);
        let draw = self.training_batch(progress.step);
        let local = self.corpus.batch(&draw, sequences, world.device())?;
        let [tokens, targets] = local.map(|tokens| tokens.chunk(parts, 0));
        let (mut sum, mut gradients) = (GradientBuffer::new(), None);
        let mut losses = Vec::new();
        for (part, (tokens, targets)) in tokens.into_iter().zip(targets).enumerate() {
            if let Some(mars) = mars {
                let scale = optim.loss_scale() / parts as f64;
                mars.add([tokens.clone(), targets.clone()], scale)?;
            }
            let loss = model.loss(tokens, targets, logits.as_deref_mut());
            let loss = loss.div_scalar(parts as f64);
            losses.push(loss.clone().inner());
            let loss = loss.mul_scalar(optim.loss_scale());
            gradients = optim.backward(&loss, model, &mut sum, part + 1 == parts)?;
        }
        let mut gradients = gradients.expect("the batch has a last part");
        if let Some(mars) = mars {
            gradients = mars.correct(model, progress.step, gradients)?;
        }
        world.device().sync()?;
        let loss = world.mean(Tensor::cat(losses, 0).sum().into_scalar::<f32>())?;
        Ok((loss, gradients))
    }

    /// Reports skipped steps, validates and saves, if one of these is due.
    fn after_step(&self, world: &World, training: &mut Training) -> Result<()> {
        let Training { optim, progress, display, .. } = training;
        let step = progress.step;
        let validates = is_due(step, self.options.eval_every) || step == self.settings.steps;
        if !validates && !is_due(step, LINE_EVERY) {
            return Ok(());
        }
        progress.skipped.extend(optim.skipped_steps());
        if let Some(display) = display {
            display.skipped(step, &progress.skipped);
        }
        if !validates {
            return Ok(());
        }
        let model = training.validated()?;
        let Training { optim, progress, display, .. } = training;
        self.validate((world, optim.data(world)), &model, progress, display.as_ref())?;
        let Some(path) = self.options.checkpoint() else { return Ok(()) };
        self.write_certificate(training)?;
        let Training { model, optim, progress, saver, .. } = training;
        optim.save((saver, path), model, progress)
    }

    /// Saves a run that Ctrl-C has stopped, and returns the path of the checkpoint.
    fn save_stopped(&self, training: &mut Training) -> Result<PathBuf> {
        let Training { model, optim, progress, saver, .. } = training;
        let path = self.options.checkpoint().unwrap_or(Path::new("train_lm-interrupted.bpk"));
        progress.skipped.extend(optim.skipped_steps());
        optim.save((saver, path), model, progress)?;
        Ok(path.to_owned())
    }

    /// The error of a run that has diverged.
    fn diverged(&self, step: usize) -> anyhow::Error {
        anyhow!(
            "{}: the losses of steps {} to {step} are not finite, so that nothing was learnt in \
             them; start anew with a lower --lr than {:e}",
            self.name(),
            step + 1 - MAX_NON_FINITE,
            self.lr()
        )
    }

    /// Prints the memory report and the sample of a run that has ended, on rank 0.
    fn epilogue(&self, world: &World, optim: &Optim, model: &Gpt) -> Result<()> {
        if let Optim::Dist(optim, _) = optim {
            println!("rank 0 of {}:\n{}\n", world.size(), optim.memory());
        }
        if self.options.sample > 0 {
            let sample = self.sample(model, world.device())?;
            println!("{}: {sample}\n", self.name());
        }
        Ok(())
    }

    fn tokens_per_step(&self) -> usize {
        self.settings.batch * self.sizes.context
    }

    /// The seed of a step's batch. It does not depend on earlier steps, so a resumed run draws the
    /// same batches as an uninterrupted one.
    fn batch_seed(&self, step: usize) -> u64 {
        self.settings.seed.wrapping_mul(1_000_003).wrapping_add(step as u64)
    }

    fn training_batch(&self, step: usize) -> Draw {
        self.draw(Split::Train, step as u64, self.batch_seed(step))
    }

    fn draw(&self, split: Split, index: u64, seed: u64) -> Draw {
        let (batch, context) = (self.settings.batch, self.sizes.context);
        Draw { split, index, seed, batch, context }
    }

    /// Computes the loss on the validation batches, which are divided among the ranks of data, and
    /// adds it to the curve.
    fn validate(
        &self,
        (world, data): (&World, &World),
        model: &Gpt,
        progress: &mut Progress,
        display: Option<&Display>,
    ) -> Result<()> {
        let device = world.device().clone().inner();
        let model = model.valid();
        let (rank, size) = (data.rank() as u64, data.size() as u64);
        // The same number on all ranks, since a pass may be a collective call: some batches twice.
        let local = (0..VALIDATION_BATCHES.div_ceil(size)).map(|turn| rank + turn * size);
        let losses = local.map(|i| i % VALIDATION_BATCHES).map(|i| {
            let draw = self.draw(Split::Validation, i, VALIDATION_SEED + i);
            let [tokens, targets] = self.corpus.batch(&draw, 0..draw.batch, &device)?;
            Ok((i, f64::from(model.loss(tokens, targets, None).into_scalar::<f32>()).to_bits()))
        });
        let losses = world.all_gather_value(&losses.collect::<Result<Vec<_>>>()?)?;
        // The map orders the losses, so that their sum is the same on any number of ranks.
        let losses: BTreeMap<u64, u64> = losses.into_iter().flatten().collect();
        let sum: f64 = losses.into_values().map(f64::from_bits).sum();
        let loss = sum / VALIDATION_BATCHES as f64;
        progress.curve.push((progress.step, loss));
        match display {
            Some(display) => display.validation(progress.step, loss, &progress.skipped),
            None => Ok(()),
        }
    }

    /// Returns `true` on all ranks if Ctrl-C was pressed on any of them.
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
            let logits = model.forward(input, None).slice([0..1, window.len() - 1..window.len()]);
            let probabilities: Vec<f64> = softmax(logits, 2).into_data().iter::<f64>().collect();
            let mut draw = rng.random_range(0.0..1.0);
            let token = probabilities.iter().position(|probability| {
                draw -= probability;
                draw < 0.0
            });
            // Rounding may leave a sum of probabilities below the draw.
            tokens.push(token.unwrap_or(probabilities.len() - 1) as u16);
        }
        self.corpus.tokenizer.decode(&tokens)
    }
}

/// Returns `true` after every `every`-th step; never for 0.
fn is_due(step: usize, every: usize) -> bool {
    every > 0 && step.is_multiple_of(every)
}
