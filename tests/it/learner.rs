//! burn-train's `Learner` on ranks: the same training as with Burn's strategy.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::LrScheduler;
use burn::module::{Module, ParamGroup};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, MuonConfig as BurnMuonConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData, activation::relu};
use burn::train::metric::store::EventStoreClient;
use burn::train::metric::{LearningRateMetric, LossMetric};
use burn::train::{
    EarlyStoppingStrategy, ExecutionStrategy, InferenceStep, Interrupter, Learner, LearningResult,
    MultiDeviceOptim, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use distmuon::comm::World;
use distmuon::distributed::{
    Axis, Diagnostics, DistModuleOptimizer, DistMuonConfig, DistMuonStrategy, GradDtype,
    LatestAccount, LatestDiagnostics, Layout, LearnerLogits, LossScaleConfig, Mesh, Place,
};
use distmuon::schedule::ScheduledLr;
use distmuon::{
    DiagnosticsMetric, DiagnosticsQuantity, Error, Expectation, GradientBuffer, MaxLogits,
    MuonConfig, MuonShareMetric, QkClipConfig, QkClipRule, RoutingRule, Schedule, SkippedSteps,
    SkippedStepsMetric,
};
use distmuon_testing::device::{has_type, is_flex};
use distmuon_testing::models::{Fixed, largest_difference, values, weights};
use distmuon_testing::precision::{Rounded, assert_same, floats};
use distmuon_testing::watched::watched;
use distmuon_testing::{lacks, logs, panic_message};
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// The number of items to train on. The first items of both halves form a batch of two ranks.
const ITEMS: usize = 32;
const BATCH: usize = 4;

#[derive(Module, Debug)]
struct Net {
    up: Linear,
    hidden: Linear,
    head: Linear,
    norm: Option<BatchNorm>,
    #[module(skip)]
    logits: LearnerLogits,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let [up, hidden, head] = [linear(3, 8), linear(8, 8), linear(8, 2)];
        let net = Self { up, hidden, head, norm: None, logits: LearnerLogits::new() };
        net.map(&mut Fixed::new(3))
    }

    fn regression(&self, [x, targets]: Batch) -> RegressionOutput {
        let dtype = self.up.weight.val().dtype();
        let [x, targets] = [x, targets].map(|tensor| tensor.cast(dtype));
        let up = self.up.forward(x);
        // Two heads of four outputs.
        let batch = up.dims()[0];
        let heads = up.clone().reshape([batch, 2, 4]).swap_dims(0, 1).reshape([2, 4 * batch]);
        self.logits.report("", heads.max_dim(1).reshape([2]));
        let up = match &self.norm {
            Some(norm) => norm.forward(up),
            None => up,
        };
        let hidden = relu(self.hidden.forward(relu(up)));
        let output = self.head.forward(hidden);
        let loss = (output.clone() - targets.clone()).square().mean();
        RegressionOutput { loss, output, targets }
    }

    fn weights(&self) -> Vec<Vec<u8>> {
        weights(self)
    }
}

/// Inputs and targets.
type Batch = [Tensor<2>; 2];

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        if PANICS.with(|panics| panics.get()) {
            panic!("a bug in the model");
        }
        let output = self.regression(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        // Would clip all heads.
        self.logits.report("", Tensor::full([2], 1e3, &batch[0].device()));
        self.regression(batch)
    }
}

thread_local! {
    /// `true` if the model has to panic on this thread.
    static PANICS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[derive(Default)]
struct Regression {
    /// An item that makes the model panic where it is seen.
    poison: Option<usize>,
    /// An item whose inputs are NaN.
    nan: Option<usize>,
    /// An item that interrupts the training where it is seen.
    interrupting: Option<(usize, Arc<OnceLock<Interrupter>>)>,
}

impl Batcher<usize, Batch> for Regression {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        PANICS.with(|panics| panics.set(self.poison.is_some_and(|poison| items.contains(&poison))));
        if let Some((item, interrupter)) = &self.interrupting
            && items.contains(item)
        {
            interrupter.get().expect("the training has one").stop(Some("enough"));
        }
        let mut inputs = vec![];
        let mut targets = vec![];
        for item in &items {
            let mut rng = StdRng::seed_from_u64(*item as u64);
            let x: [f32; 3] = [(); 3].map(|()| rng.random_range(-1.0..1.0));
            inputs.extend(if self.nan == Some(*item) { [f32::NAN; 3] } else { x });
            targets.extend([x[0] * x[1], x[2]]);
        }
        let tensor = |values: Vec<f32>, width: usize| {
            Tensor::from_data(TensorData::new(values, [items.len(), width]), device)
        };
        [tensor(inputs, 3), tensor(targets, 2)]
    }
}

fn loader(items: Vec<usize>, batch: usize, batcher: Regression) -> Arc<dyn DataLoader<Batch>> {
    DataLoaderBuilder::new(batcher).batch_size(batch).build(InMemDataset::new(items))
}

/// In a training loop of one's own, as the guide has it.
#[test]
fn a_rank_takes_its_slice_of_a_loader_in_batches_of_the_same_size() {
    let batches = World::launch(3, |world| {
        let loader = loader((0..72).collect(), 8, Regression::default());
        let part = world.part(loader.num_items());
        let own = loader.slice(part.start, part.end);
        let sizes: Vec<usize> =
            own.iter().map(|batch| batch.expect("the items are in memory")[0].dims()[0]).collect();
        world.all_gather_value(&sizes)
    });
    assert_eq!(batches.unwrap(), vec![vec![8; 3]; 3]);
}

/// The items of one device, in an order in which its batches are those of `ranks` ranks joined.
fn as_ranks_see_them(ranks: usize) -> Vec<usize> {
    let each = ITEMS / ranks;
    let steps = 0..each / BATCH;
    let batches = steps.flat_map(|step| (0..ranks).map(move |rank| rank * each + step * BATCH));
    batches.flat_map(|first| first..first + BATCH).collect()
}

#[derive(Clone)]
struct Setup {
    epochs: usize,
    items: Vec<usize>,
    batch: usize,
    accumulation: usize,
    resume: Option<usize>,
    stop_after: Option<usize>,
    poison: Option<usize>,
    /// An item that makes gradients NaN.
    nan: Option<usize>,
    /// An item that interrupts the training.
    interrupting: Option<usize>,
    checkpoints: bool,
    /// Counts that are shown as a metric.
    skipped: Option<SkippedSteps>,
    /// Diagnostics that are shown as a metric.
    diagnostics: Option<LatestDiagnostics>,
    /// An account that is shown as a metric.
    account: Option<LatestAccount>,
}

impl Default for Setup {
    fn default() -> Self {
        let items = (0..ITEMS).collect();
        Self {
            epochs: 2,
            items,
            batch: BATCH,
            accumulation: 1,
            resume: None,
            stop_after: None,
            poison: None,
            nan: None,
            interrupting: None,
            checkpoints: true,
            skipped: None,
            diagnostics: None,
            account: None,
        }
    }
}

/// A strategy that stops after an epoch, and counts its calls.
#[derive(Clone)]
struct StopAfter(usize, Arc<AtomicUsize>);

impl EarlyStoppingStrategy for StopAfter {
    fn should_stop(&mut self, epoch: usize, _store: &EventStoreClient) -> bool {
        self.1.fetch_add(1, Ordering::SeqCst);
        epoch >= self.0
    }
}

/// A rate that grows with every step, so that a step too many or too few would show.
fn growing() -> ScheduledLr {
    Schedule::constant(1e-3).linear(100, 1e-1).into_lr_scheduler()
}

fn device() -> Device {
    Device::default().autodiff()
}

fn on_ranks(count: usize) -> TrainingStrategy<Net> {
    on_ranks_with(count, DistMuonConfig::new())
}

fn on_ranks_with(count: usize, config: DistMuonConfig) -> TrainingStrategy<Net> {
    let strategy = DistMuonStrategy::new(vec![device(); count], config);
    strategy.with_deadline(Duration::from_secs(20)).into()
}

fn training(
    folder: &Path,
    setup: &Setup,
    strategy: TrainingStrategy<Net>,
) -> SupervisedTraining<Net> {
    let interrupter = Arc::new(OnceLock::new());
    let batcher = Regression {
        poison: setup.poison,
        nan: setup.nan,
        interrupting: setup.interrupting.map(|item| (item, interrupter.clone())),
    };
    let train = loader(setup.items.clone(), setup.batch, batcher);
    let valid = loader((100..107).collect(), 2, Regression::default());
    let training = SupervisedTraining::new(folder, train, valid)
        .metrics((LossMetric::new(),))
        .metric_train_numeric(LearningRateMetric::new());
    let training = match &setup.skipped {
        Some(skipped) => training.metric_train_numeric(SkippedStepsMetric::new(skipped)),
        None => training,
    };
    let training = match &setup.diagnostics {
        Some(latest) => training.metric_train_numeric(DiagnosticsMetric::new(
            latest,
            "Muon",
            DiagnosticsQuantity::EffectiveLr,
        )),
        None => training,
    };
    let training = match &setup.account {
        Some(latest) => training.metric_train_numeric(MuonShareMetric::new(latest)),
        None => training,
    };
    let training = if setup.checkpoints { training.with_default_checkpointers() } else { training };
    let training = training
        .with_application_logger(None)
        .with_training_strategy(strategy)
        .num_epochs(setup.epochs)
        .grads_accumulation(setup.accumulation);
    interrupter.get_or_init(|| training.interrupter());
    match setup.resume {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    }
}

fn launch(folder: &Path, setup: &Setup, strategy: TrainingStrategy<Net>) -> LearningResult<Net> {
    launch_with(Net::new(&device()), folder, setup, strategy)
}

fn launch_with(
    net: Net,
    folder: &Path,
    setup: &Setup,
    strategy: TrainingStrategy<Net>,
) -> LearningResult<Net> {
    let training = training(folder, setup, strategy);
    let asked = Arc::new(AtomicUsize::new(0));
    let training = match setup.stop_after {
        Some(epoch) => training.early_stopping(StopAfter(epoch, asked.clone())),
        None => training,
    };
    let optim = DistMuonConfig::new().muon.init(&net);
    let result = training.launch(Learner::new(net, optim, growing()));
    if let Some(epoch) = setup.stop_after {
        assert_eq!(asked.load(Ordering::SeqCst), epoch, "one rank asks, once an epoch");
    }
    result
}

/// The model that was trained without a failure.
fn trained(setup: &Setup, strategy: TrainingStrategy<Net>) -> Net {
    let folder = tempfile::tempdir().unwrap();
    let result = launch(folder.path(), setup, strategy);
    assert!(result.error.is_none() && result.interrupted.is_none(), "{:?}", result.error);
    result.model
}

fn burns_strategy() -> TrainingStrategy<Net> {
    ExecutionStrategy::single(device()).into()
}

#[test]
fn one_rank_is_bit_equal_to_burns_strategy() {
    for accumulation in [1, 3] {
        let setup = Setup { accumulation, ..Setup::default() };
        assert!(
            trained(&setup, on_ranks(1)).weights() == trained(&setup, burns_strategy()).weights(),
            "accumulation {accumulation}"
        );
    }
}

/// Burn adds up the gradients of its devices.
#[test]
fn burns_strategy_on_two_devices_is_bit_equal_to_one_device_that_accumulates() {
    let items = as_ranks_see_them(2);
    let alone = trained(&Setup { items, accumulation: 2, ..Setup::default() }, burns_strategy());
    for optim in [MultiDeviceOptim::OptimMainDevice, MultiDeviceOptim::OptimSharded] {
        let strategy = ExecutionStrategy::multi(vec![device(); 2], optim).into();
        let together = trained(&Setup::default(), strategy);
        assert!(together.weights() == alone.weights(), "{optim:?}");
    }
}

#[test]
fn ranks_follow_one_device_that_trains_on_their_batches_joined() {
    // The rate grows with every step: a step counts as one, whatever batches it has.
    for (ranks, accumulation) in [(2, 1), (2, 2), (4, 1)] {
        let setup = Setup { accumulation, ..Setup::default() };
        let together = values(&trained(&setup, on_ranks(ranks)));
        let items = as_ranks_see_them(ranks);
        let joined = Setup { items, batch: ranks * BATCH, ..setup.clone() };
        let alone = values(&trained(&joined, burns_strategy()));
        let worst = largest_difference(&together, &alone);
        assert!(worst < 1e-5, "{ranks} ranks, {accumulation} batches: {worst}");
        // Where the device computes gradients in one order, every run is the same.
        let again = values(&trained(&setup, on_ranks(ranks)));
        let worst = largest_difference(&together, &again);
        assert!(worst <= if is_flex() { 0.0 } else { 1e-5 }, "{ranks} ranks, again: {worst}");
    }
}

/// By the norm of the mean over all ranks, of all parameters together.
#[test]
fn a_strategy_clips_by_the_norm_of_all_gradients() {
    let clipping = DistMuonConfig::new().with_max_norm(Some(0.05));
    let setup = Setup { checkpoints: false, ..Setup::default() };
    // The same steps in a loop of one's own.
    let by_hand = |config: &DistMuonConfig, items: &[usize], batch: usize| {
        let mut net = Net::new(&device());
        let mut optim = config.init(&World::alone(device()), &net).unwrap();
        let mut lr = growing();
        for _ in 0..setup.epochs {
            for items in items.chunks(batch) {
                let data = Regression::default().batch(items.to_vec(), &device());
                let gradients =
                    GradientsParams::from_grads(net.regression(data).loss.backward(), &net);
                let rate = LrScheduler::step(&mut lr);
                net = optim.step(rate, net, gradients).unwrap();
            }
        }
        values(&net)
    };
    for ranks in [1, 2] {
        let items = as_ranks_see_them(ranks);
        let clipped = values(&trained(&setup, on_ranks_with(ranks, clipping.clone())));
        let expected = by_hand(&clipping, &items, ranks * BATCH);
        let worst = largest_difference(&clipped, &expected);
        assert!(worst < 1e-5, "{ranks} ranks: {worst}");
        let unclipped = by_hand(&DistMuonConfig::new(), &items, ranks * BATCH);
        let effect = largest_difference(&clipped, &unclipped);
        assert!(effect > 1e-3, "{ranks} ranks: {effect}");
    }
}

#[test]
fn items_that_cannot_be_divided_equally_are_left_out() {
    let items = |count| (0..count).collect::<Vec<_>>();
    let odd = Setup { items: items(11), ..Setup::default() };
    let even = Setup { items: items(10), ..Setup::default() };
    assert!(trained(&even, on_ranks(2)).weights() != Net::new(&device()).weights());
    let [odd, even] = [odd, even].map(|setup| trained(&setup, on_ranks(2)).weights());
    assert!(odd == even);

    let folder = tempfile::tempdir().unwrap();
    let too_few = Setup { items: items(2), ..Setup::default() };
    let result = launch(folder.path(), &too_few, on_ranks(3));
    let error = result.error.expect("a run with fewer items than ranks fails");
    assert!(error.to_string().contains("at least one item per rank, got fewer than"), "{error}");
}

#[test]
fn loss_scaling_is_rejected_since_the_model_computes_the_gradients() {
    let folder = tempfile::tempdir().unwrap();
    let config = DistMuonConfig::new().with_loss_scale(Some(LossScaleConfig::new()));
    let result = launch(folder.path(), &Setup::default(), on_ranks_with(2, config));
    let error = result.error.expect("a run with loss scaling fails").to_string();
    assert!(error.contains("loss_scale") && error.contains("bfloat16"), "{error}");
}

#[test]
fn checkpoints_continue_on_ranks_and_on_one_device() {
    let whole = trained(&Setup::default(), on_ranks(2)).weights();
    let first = Setup { epochs: 1, ..Setup::default() };
    let second = Setup { resume: Some(1), ..Setup::default() };
    let continued = |strategy| {
        let folder = tempfile::tempdir().unwrap();
        let result = launch(folder.path(), &first, on_ranks(2));
        assert!(result.error.is_none(), "{:?}", result.error);
        let result = launch(folder.path(), &second, strategy);
        assert!(result.error.is_none(), "{:?}", result.error);
        result.model.weights()
    };
    assert!(continued(on_ranks(2)) == whole, "on the same number of ranks, bit for bit");
    // On other numbers of ranks, batches have other items. One rank and Burn's strategy have the
    // same batches.
    let alone = continued(on_ranks(1));
    assert!(alone != whole && alone == continued(burns_strategy()));
}

/// A layout of small parameters, for a strategy.
fn divided(world: &World) -> Result<Layout, Error> {
    Ok(Layout::new(&Mesh::flat(world)).owned("dp").with_small_elements(8))
}

fn hidden(world: &World) -> Result<Layout, Error> {
    Ok(Layout::new(&Mesh::flat(world)).overlap_backward().with_small_elements(8))
}

#[test]
fn layouts_train_as_replicated_parameters() {
    for ranks in [2, 3] {
        for accumulation in [1, 2] {
            let setup = Setup { accumulation, ..Setup::default() };
            let expected = trained(&setup, on_ranks(ranks)).weights();
            let strategy = || DistMuonStrategy::new(vec![device(); ranks], DistMuonConfig::new());
            let first = Setup { epochs: 1, ..setup.clone() };
            let second = Setup { resume: Some(1), ..setup.clone() };
            for layout in [divided, hidden] {
                let folder = tempfile::tempdir().unwrap();
                let result = launch(folder.path(), &first, strategy().with_layout(layout).into());
                assert!(result.error.is_none(), "{:?}", result.error);
                let strategy = strategy().with_layout(layout).into();
                let result = launch(folder.path(), &second, strategy);
                assert!(result.error.is_none(), "{:?}", result.error);
                if is_flex() {
                    let weights = result.model.weights();
                    assert!(weights == expected, "{ranks} ranks, accumulation {accumulation}");
                }
            }
        }
    }
}

#[test]
fn ranks_that_are_processes_train_as_threads() {
    let expected = trained(&Setup::default(), on_ranks(2)).weights();
    for layout in [None, Some(divided as fn(&World) -> _)] {
        let folder = tempfile::tempdir().unwrap();
        // Each with a learner and a folder of its own, as in a process.
        let run = World::threads(vec![device(); 2], |world| {
            let folder = folder.path().join(world.rank().to_string());
            let launch = |setup: &Setup| {
                let strategy = DistMuonStrategy::on(&world, DistMuonConfig::new());
                let strategy = match layout {
                    Some(layout) => strategy.with_layout(layout),
                    None => strategy,
                };
                launch(&folder, setup, strategy.into())
            };
            // Rank 0 alone has checkpointers.
            let result = launch(&Setup { checkpoints: world.is_main(), ..Setup::default() });
            assert!(result.error.is_none(), "{:?}", result.error);
            Ok::<_, Error>(result.model.weights())
        });
        for weights in run.unwrap() {
            assert!(weights == expected || !is_flex());
        }
        // Rank 0 validates all items, and saves.
        let log = folder.path().join("0/valid/epoch-1/Loss.log");
        let log = std::fs::read_to_string(log).unwrap();
        assert_eq!(log.lines().count(), 4 + 1, "7 items in batches of 2, and their mean: {log}");
        assert!(folder.path().join("0/checkpoint").is_dir());
        let saved = std::fs::read_dir(folder.path().join("1/checkpoint"));
        assert_eq!(saved.map_or(0, Iterator::count), 0, "rank 1 saves nothing");
    }
}

/// Rank 0 alone saves checkpoints, which the guide says to copy.
#[test]
fn ranks_that_are_processes_continue_from_copies_of_a_checkpoint() {
    let whole = trained(&Setup::default(), on_ranks(2)).weights();
    for layout in [None, Some(divided as fn(&World) -> _)] {
        let folder = tempfile::tempdir().unwrap();
        let run = |setup: &Setup| {
            World::threads(vec![device(); 2], |world| {
                let folder = folder.path().join(world.rank().to_string());
                let strategy = DistMuonStrategy::on(&world, DistMuonConfig::new());
                let strategy = match layout {
                    Some(layout) => strategy.with_layout(layout),
                    None => strategy,
                };
                let result = launch(&folder, setup, strategy.into());
                Ok::<_, Error>((result.error.map(|e| e.to_string()), result.model.weights()))
            })
        };
        let first = run(&Setup { epochs: 1, ..Setup::default() }).unwrap();
        assert!(first.iter().all(|(error, _)| error.is_none()), "{:?}", first[0].0);
        let second = Setup { resume: Some(1), ..Setup::default() };
        let [of_rank_0, of_rank_1] =
            ["0/checkpoint", "1/checkpoint"].map(|p| folder.path().join(p));
        // Burn's learner loads before it calls the strategy, and panics.
        let uncopied = panic_message(|| drop(run(&second)));
        assert!(uncopied.contains("1/checkpoint/model-1.bpk"), "{uncopied}");
        std::fs::create_dir_all(&of_rank_1).unwrap();
        for file in std::fs::read_dir(of_rank_0).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), of_rank_1.join(file.file_name())).unwrap();
        }
        for (error, weights) in run(&second).unwrap() {
            assert_eq!(error, None);
            assert!(weights == whole || !is_flex());
        }
    }
}

/// Each rank has running statistics of its own, as in processes.
#[test]
fn threads_train_batch_norm_as_processes_do() {
    let net = || {
        let norm = Some(BatchNormConfig::new(8).init(&device()));
        Net { norm, ..Net::new(&device()) }
    };
    let folder = tempfile::tempdir().unwrap();
    let threads = launch_with(net(), folder.path(), &Setup::default(), on_ranks(2));
    assert!(threads.error.is_none(), "{:?}", threads.error);
    let processes = World::threads(vec![device(); 2], |world| {
        let folder = folder.path().join(world.rank().to_string());
        let strategy = DistMuonStrategy::on(&world, DistMuonConfig::new());
        let setup = Setup { checkpoints: world.is_main(), ..Setup::default() };
        let result = launch_with(net(), &folder, &setup, strategy.into());
        assert!(result.error.is_none(), "{:?}", result.error);
        Ok::<_, Error>(result.model.weights())
    });
    let expected = &processes.unwrap()[0];
    assert!(threads.model.weights() == *expected || !is_flex());
    assert!(*expected != net().weights(), "it trains");
}

#[test]
fn rank_0_gathers_the_state_at_every_epoch_that_has_a_checkpointer() {
    let gathered = |epochs, checkpoints| {
        let folder = tempfile::tempdir().unwrap();
        let run = World::threads(vec![device(); 2], |world| {
            let calls = Arc::new(AtomicUsize::new(0));
            let counted = calls.clone();
            let world = watched(&world, move |event| {
                let is_gathering = event.collective == "gather" && !event.waits;
                counted.fetch_add(is_gathering.into(), Ordering::SeqCst);
                Ok(())
            });
            let folder = folder.path().join(world.rank().to_string());
            let strategy = DistMuonStrategy::on(&world, DistMuonConfig::new());
            let checkpoints = checkpoints && world.is_main();
            let setup = Setup { epochs, checkpoints, ..Setup::default() };
            let result = launch(&folder, &setup, strategy.into());
            assert!(result.error.is_none(), "{:?}", result.error);
            Ok::<_, Error>(calls.load(Ordering::SeqCst))
        });
        let calls = run.unwrap();
        assert_eq!(calls[0], calls[1], "both ranks take part");
        calls[0]
    };
    let once = gathered(1, true);
    assert!(once > 0);
    assert_eq!(gathered(2, true), 2 * once);
    assert_eq!(gathered(2, false), 0);
}

#[test]
fn layouts_whose_ranks_compute_together_are_rejected() {
    let slices = |world: &World| {
        let mesh = Mesh::new(world, [Axis::data("dp", 1), Axis::model("tp", 2)])?;
        Ok(Layout::new(&mesh))
    };
    let experts = |world: &World| {
        Ok(Layout::new(&Mesh::flat(world)).with_place(Place::shard("experts", "dp", 0)))
    };
    let strategy = || DistMuonStrategy::new(vec![device(); 2], DistMuonConfig::new());
    for (strategy, axis) in
        [(strategy().with_layout(slices), "tp"), (strategy().with_layout(experts), "dp")]
    {
        let folder = tempfile::tempdir().unwrap();
        let result = launch(folder.path(), &Setup::default(), strategy.into());
        let text = result.error.expect("the layout is rejected").to_string();
        assert!(text.contains(&format!("slices along `{axis}`")), "{text}");
    }
}

#[test]
fn processes_with_different_trainings_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let run = World::threads(vec![device(); 2], |world| {
        let folder = folder.path().join(world.rank().to_string());
        let strategy = DistMuonStrategy::on(&world, DistMuonConfig::new());
        let setup = Setup { epochs: 2 + world.rank(), ..Setup::default() };
        let result = launch(&folder, &setup, strategy.into());
        Ok::<_, Error>(result.error.expect("the run failed").to_string())
    });
    for error in run.unwrap() {
        assert!(error.contains("`epochs.end`") && error.contains("rank 1"), "{error}");
    }
}

#[test]
fn early_stopping_ends_all_ranks() {
    let setup = Setup { epochs: 9, stop_after: Some(2), ..Setup::default() };
    let stopped = trained(&setup, on_ranks(3));
    assert!(stopped.weights() == trained(&Setup::default(), on_ranks(3)).weights());
}

#[test]
fn interruption_ends_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let training = training(folder.path(), &Setup::default(), on_ranks(2));
    training.interrupter().stop(Some("enough"));
    let net = Net::new(&device());
    let optim = DistMuonConfig::new().muon.init(&net);
    let before = net.weights();
    let result = training.launch(Learner::new(net, optim, growing()));
    let interrupted = result.interrupted.expect("the run was interrupted");
    assert_eq!(interrupted.reason.as_deref(), Some("enough"));
    assert!(result.model.weights() == before, "no step was taken");
}

/// Only one rank sees the item, in its third batch.
#[test]
fn an_interruption_on_one_rank_ends_all_ranks_after_the_same_step() {
    let half = ITEMS / 2;
    for interrupting in [2 * BATCH + 1, half + 2 * BATCH + 1] {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { interrupting: Some(interrupting), ..Setup::default() };
        let result = launch(folder.path(), &setup, on_ranks(2));
        assert!(result.error.is_none(), "{:?}", result.error);
        let interrupted = result.interrupted.expect("the run was interrupted");
        assert_eq!(interrupted.reason.as_deref(), Some("enough"));
        // The two steps before, with the same batches on both ranks.
        let items = (0..2 * BATCH).chain(half..half + 2 * BATCH).collect();
        let two_steps = Setup { epochs: 1, items, ..Setup::default() };
        assert!(result.model.weights() == trained(&two_steps, on_ranks(2)).weights());
    }
}

#[test]
fn a_panic_on_a_rank_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    // The second half of the items belongs to rank 1.
    let setup = Setup { poison: Some(ITEMS - 1), ..Setup::default() };
    logs::collect();
    let result = launch(folder.path(), &setup, on_ranks(2));
    let error = result.error.expect("the run failed").to_string();
    assert!(error.contains("device 1") && error.contains("a bug in the model"), "{error}");
    // A program that ignores the error saves this model.
    let logged = logs::with(&["ERROR", "ended with the initial model", "a bug in the model"]);
    assert!(!logged.is_empty());
    assert!(result.model.weights() == Net::new(&device()).weights());
}

#[test]
fn a_learner_with_another_optimizer_is_rejected() {
    logs::collect();
    // Also without checkpoints, where the optimizer would be dropped without a message.
    for checkpoints in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let net = Net::new(&device());
        let optim: ModuleOptimizer = AdamWConfig::new().init();
        let setup = Setup { checkpoints, ..Setup::default() };
        let training = training(folder.path(), &setup, on_ranks(2));
        let result = training.launch(Learner::new(net, optim, growing()));
        let error = result.error.expect("the optimizer is rejected").to_string();
        assert!(error.contains("config.muon.init(&model)"), "{error}");
        // `Learner::fit` of a program that does not look at the error returns the model as it was.
        let logged = logs::with(&["ERROR", "config.muon.init(&model)", "initial model"]);
        assert!(!logged.is_empty());
    }
    trained(&Setup { checkpoints: false, ..Setup::default() }, on_ranks(2));
}

/// Burn's learner has no error for states that an optimizer can't read: the strategy has, and so
/// has the next step.
#[test]
fn a_checkpoint_of_another_optimizer_is_rejected() {
    let (first, second) =
        (Setup { epochs: 1, ..Setup::default() }, Setup { resume: Some(1), ..Setup::default() });
    let strategies = [on_ranks as fn(usize) -> TrainingStrategy<Net>, |_| burns_strategy()];
    for (strategy, optim) in
        strategies.into_iter().flat_map(|strategy| others().map(|optim| (strategy, optim)))
    {
        let folder = tempfile::tempdir().unwrap();
        let net = Net::new(&device());
        let learner = Learner::new(net.clone(), optim(&net), growing());
        let result = training(folder.path(), &first, burns_strategy()).launch(learner);
        assert!(result.error.is_none(), "{:?}", result.error);
        let resumed = catch_unwind(AssertUnwindSafe(|| {
            let result = launch(folder.path(), &second, strategy(2));
            result.error.expect("the states are rejected").to_string()
        }));
        let message = resumed.unwrap_or_else(|panic| *panic.downcast::<String>().unwrap());
        assert!(message.contains("optimizer state of `hidden.weight`"), "{message}");
        // The moments of the others continue.
        assert!(!message.contains("`up.bias`"), "{message}");
        assert!(message.contains("load the model alone"), "{message}");
    }
}

/// A run of Burn's AdamW continues with this crate's, also on ranks.
#[test]
fn moments_of_burns_adamw_continue_in_a_learner() {
    let first = Setup { epochs: 1, ..Setup::default() };
    let second = Setup { resume: Some(1), ..Setup::default() };
    let burns = || AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01).init();
    let adamw = distmuon::AdamWConfig::new().with_beta_2(0.999).with_weight_decay(0.01);
    let muon = MuonConfig::new().with_adamw(adamw).with_rule(RoutingRule::adamw("."));
    let continued = |second: &Setup, strategy, optim: &dyn Fn(&Net) -> ModuleOptimizer| {
        let folder = tempfile::tempdir().unwrap();
        let net = Net::new(&device());
        let run = |setup, strategy, optim| {
            let training = training(folder.path(), setup, strategy);
            let result = training.launch(Learner::new(net.clone(), optim, growing()));
            assert!(result.error.is_none(), "{:?}", result.error);
            values(&result.model)
        };
        let before = run(&first, burns_strategy(), burns());
        let after = run(second, strategy, optim(&net));
        assert!(largest_difference(&before, &after) > 1e-3, "the second epoch trains");
        after
    };
    let ranks = |count| on_ranks_with(count, DistMuonConfig::new().with_muon(muon.clone()));
    let joined = Setup { items: as_ranks_see_them(2), batch: 2 * BATCH, ..second.clone() };
    for (case, strategy, alone) in [
        ("Burn's strategy", burns_strategy(), &second),
        ("one rank", ranks(1), &second),
        ("two ranks", ranks(2), &joined),
    ] {
        let expected = continued(alone, burns_strategy(), &|_| burns());
        let trained = continued(&second, strategy, &|net| muon.init(net));
        let worst = largest_difference(&trained, &expected);
        assert!(worst < 1e-5, "{case}: {worst}");
    }
}

/// Optimizers whose states of matrices Muon can't continue from: Burn's, and other rules.
fn others() -> [fn(&Net) -> ModuleOptimizer; 3] {
    [
        |_| AdamWConfig::new().init(),
        |_| {
            let matrices = ParamGroup::from_paths(vec!["hidden.weight"]);
            AdamWConfig::new().init().with_group(matrices, BurnMuonConfig::new().build(), None)
        },
        |net| MuonConfig::new().with_rule(RoutingRule::adamw(".")).init(net),
    ]
}

/// Burn can't load them into a model that is in use.
#[test]
fn weights_that_are_stored_transposed_have_no_checkpointers_on_ranks() {
    let column = || {
        let net = Net::new(&device());
        let config = LinearConfig::new(3, 8).with_layout(LinearLayout::Col);
        Net { up: config.init(&device()), ..net }
    };
    let first = Setup { epochs: 1, ..Setup::default() };
    let folder = tempfile::tempdir().unwrap();
    let result = launch_with(column(), folder.path(), &first, on_ranks(2));
    let error = result.error.expect("the model is rejected").to_string();
    assert!(error.contains("`up.weight`") && error.contains("LinearLayout::Row"), "{error}");
    let without = Setup { checkpoints: false, ..first.clone() };
    assert!(launch_with(column(), folder.path(), &without, on_ranks(2)).error.is_none());
    // Burn's strategy loads before the first pass.
    let resumed = Setup { resume: Some(1), ..Setup::default() };
    for setup in [&first, &resumed] {
        let result = launch_with(column(), folder.path(), setup, burns_strategy());
        assert!(result.error.is_none(), "{:?}", result.error);
    }
}

#[test]
fn skipped_steps_are_reported_as_a_metric() {
    let skipped_steps = |folder: &Path| {
        let file = folder.join("train").join("epoch-2").join("Skipped_steps.log");
        let log = std::fs::read_to_string(&file);
        let log = log.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let last = log.lines().last().unwrap().split(',').next().unwrap().parse::<f64>();
        last.unwrap_or_else(|error| panic!("{log}: {error}"))
    };
    // One batch of each of two epochs.
    let setup = Setup { nan: Some(ITEMS - 1), ..Setup::default() };
    let strategy = DistMuonStrategy::new(vec![device(); 2], DistMuonConfig::new());
    let counts = strategy.skipped_steps().clone();
    let folder = tempfile::tempdir().unwrap();
    let shown = Setup { skipped: Some(counts.clone()), ..setup };
    launch(folder.path(), &shown, strategy.into());
    assert_eq!(skipped_steps(folder.path()), 2.0);
    assert!(counts.read().values().all(|count| *count == 2) && counts.read().len() == 6);

    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(&device());
    let routing = DistMuonConfig::new().muon.route(&net).unwrap();
    let shown = Setup { skipped: Some(routing.skipped_steps().clone()), ..shown };
    let training = training(folder.path(), &shown, burns_strategy());
    training.launch(Learner::new(net, routing.init(), growing()));
    assert_eq!(skipped_steps(folder.path()), 2.0);
    assert_eq!(routing.skipped_steps().read(), counts.read());
}

#[test]
fn diagnostics_are_a_metric() {
    let strategy = DistMuonStrategy::new(vec![device(); 2], DistMuonConfig::new());
    let strategy = strategy.with_diagnostics(3);
    let latest = strategy.diagnostics().clone();
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { diagnostics: Some(latest.clone()), ..Setup::default() };
    launch(folder.path(), &setup, strategy.into());
    let groups = latest.get().expect("a step was observed").groups();
    let names: Vec<&str> = groups.iter().map(|group| group.group.as_str()).collect();
    assert_eq!(names, ["AdamW (embedding)", "AdamW (vector)", "Muon", "AdamW (head)"]);
    let file = folder.path().join("train").join("epoch-2").join("Muon_effective_lr.log");
    let log = std::fs::read_to_string(&file);
    let log = log.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let last = log.lines().last().unwrap().split(',').next().unwrap().parse::<f64>().unwrap();
    assert!((last - groups[2].effective_lr()).abs() < 1e-9 && last > 0.0, "{log}");
}

#[test]
fn the_share_of_muon_is_a_metric_and_expectations_hold_in_a_learner() {
    let muon = MuonConfig::new().expect(Expectation::OncePerStep);
    let config = DistMuonConfig::new().with_muon(muon);
    let strategy = DistMuonStrategy::new(vec![device(); 2], config).with_account(3);
    let latest = strategy.account().clone();
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { account: Some(latest.clone()), ..Setup::default() };
    launch(folder.path(), &setup, strategy.into());
    let account = latest.get().expect("a step was accounted for");
    let groups = account.groups();
    let muon = groups.iter().find(|group| group.updated_by.to_string() == "Muon");
    let muon = muon.expect("Muon updates the hidden matrix");
    assert_eq!(muon.iterations, muon.matrices);
    let file = folder.path().join("train").join("epoch-2").join("Updated_by_Muon.log");
    let log = std::fs::read_to_string(&file);
    let log = log.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let last = log.lines().last().unwrap().split(',').next().unwrap().parse::<f64>().unwrap();
    assert!((last - 100.0 * account.muon_share()).abs() < 1e-9 && last > 0.0, "{log}");
}

/// QK-clip of layers that need not be those of an attention.
fn qk_clip() -> QkClipConfig {
    let rule = QkClipRule::multi_head("^$", 2).query("up").key("hidden");
    QkClipConfig::new().with_tau(0.5).with_rule(rule)
}

/// The model after a training on ranks that clip heads, and the norms of the last step.
fn clipped(setup: &Setup, ranks: usize) -> (Net, Diagnostics) {
    let logits = LearnerLogits::new();
    let strategy = DistMuonStrategy::new(vec![device(); ranks], DistMuonConfig::new());
    let strategy = strategy.with_qk_clip(qk_clip(), &logits).with_diagnostics(1);
    let latest = strategy.diagnostics().clone();
    let folder = tempfile::tempdir().unwrap();
    let net = Net { logits, ..Net::new(&device()) };
    let result = launch_with(net, folder.path(), setup, strategy.into());
    assert!(result.error.is_none(), "{:?}", result.error);
    (result.model, latest.get().expect("every step was observed"))
}

/// The model after the same training in a loop of one device. `before_step` gets the batches of a
/// step.
fn by_hand(
    setup: &Setup,
    mut net: Net,
    mut before_step: impl FnMut(&Net, &[Batch], &mut DistModuleOptimizer),
) -> Net {
    let mut optim = DistMuonConfig::new().muon.init_batched(&net).unwrap();
    let rates = Schedule::constant(1e-3).linear(100, 1e-1);
    let regression = Regression::default();
    let batch = |items: &[usize]| regression.batch(items.to_vec(), &device());
    let batches: Vec<Batch> = setup.items.chunks(setup.batch).map(batch).collect();
    let steps = (0..setup.epochs).flat_map(|_| batches.chunks(setup.accumulation));
    for (step, batches) in steps.enumerate() {
        before_step(&net, batches, &mut optim);
        let mut gradients = batches.iter().map(|batch| TrainStep::step(&net, batch.clone()).grads);
        let gradients = match setup.accumulation {
            1 => gradients.next().expect("a batch"),
            _ => {
                let mut sum = GradientBuffer::new();
                gradients.for_each(|gradients| sum.add(&net, gradients).unwrap());
                sum.take_sum()
            }
        };
        net = optim.step(rates.at(step), net, gradients).unwrap();
    }
    net
}

/// The largest output of each of two heads of four.
fn max_outputs(net: &Net, batches: &[Batch]) -> [f32; 2] {
    let outputs =
        |[x, _]: &Batch| -> Vec<f32> { net.up.forward(x.clone()).into_data().iter().collect() };
    let outputs: Vec<f32> = batches.iter().flat_map(outputs).collect();
    [0, 1].map(|head| {
        let of_head = outputs.iter().enumerate().filter(|(index, _)| index / 4 % 2 == head);
        of_head.map(|(_, output)| *output).fold(f32::MIN, f32::max)
    })
}

#[test]
fn heads_are_clipped_by_the_reports_of_all_ranks_and_batches() {
    for accumulation in [1, 3] {
        let setup = Setup { accumulation, ..Setup::default() };
        let net = Net::new(&device());
        let clip = qk_clip().init(&net).unwrap();
        let mut counts = vec![];
        let net = by_hand(&setup, net, |net, batches, optim| {
            let mut logits = MaxLogits::new();
            logits.report("", Tensor::from_data(max_outputs(net, batches), &device()));
            let factors = clip.factors(&logits).unwrap();
            counts.push(factors.clipped_heads().read()[0].clipped);
            optim.clip_heads(&factors);
        });
        let clipped_heads: usize = counts.iter().sum();
        assert!((1..2 * counts.len()).contains(&clipped_heads), "{counts:?}");

        let (alone, diagnostics) = clipped(&setup, 1);
        let worst = largest_difference(&values(&alone), &values(&net));
        assert!(worst <= if is_flex() { 0.0 } else { 1e-5 }, "{worst}");
        assert!(alone.weights() != trained(&setup, on_ranks(1)).weights());
        let attentions = &diagnostics.attentions;
        assert!(attentions.len() == 1 && attentions[0].path.is_empty(), "{diagnostics:?}");
        assert_eq!(attentions[0].clipped, *counts.last().unwrap());
    }
    // Half of the batches of the joined ones are those of the other rank.
    let setup = Setup::default();
    let (together, _) = clipped(&setup, 2);
    let joined = Setup { items: as_ranks_see_them(2), batch: 2 * BATCH, ..setup };
    let worst = largest_difference(&values(&together), &values(&clipped(&joined, 1).0));
    assert!(worst < 1e-5, "{worst}");
}

#[test]
fn batches_of_half_precision_are_added_up_in_float32() {
    if !has_type(FloatDType::BF16) {
        lacks("bfloat16");
        return;
    }
    let half = || Net::new(&device()).map(&mut Rounded(DType::BF16));
    let setup = Setup { accumulation: 4, ..Setup::default() };
    let net = by_hand(&setup, half(), |_, _, _| {});

    let folder = tempfile::tempdir().unwrap();
    let launch = |strategy| launch_with(half(), folder.path(), &setup, strategy);
    let result = launch(on_ranks(1));
    assert!(result.error.is_none(), "{:?}", result.error);
    assert_same(&floats(&result.model), &floats(&net), "one rank");
    assert_ne!(floats(&net), floats(&half()));
    let error = launch(on_ranks(2)).error.expect("the sums are float32").to_string();
    assert!(error.contains("with_grad_dtype"), "{error}");
    let wide = DistMuonConfig::new().with_grad_dtype(GradDtype::Float32);
    let result = launch(on_ranks_with(2, wide));
    assert!(result.error.is_none(), "{:?}", result.error);
}

#[test]
fn a_model_that_reports_no_logits_ends_the_training_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let strategy = DistMuonStrategy::new(vec![device(); 2], DistMuonConfig::new());
    let strategy = strategy.with_qk_clip(qk_clip(), &LearnerLogits::new());
    let result = launch(folder.path(), &Setup::default(), strategy.into());
    let error = result.error.expect("nothing was reported").to_string();
    assert!(error.contains("has not reported"), "{error}");
}

#[test]
fn metrics_cover_the_batches_of_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    launch(folder.path(), &Setup::default(), on_ranks(2));
    // burn-train's log of an epoch has a line per batch, and their mean at the end.
    let losses = |split: &str| {
        let file = folder.path().join(split).join("epoch-1").join("Loss.log");
        let log = std::fs::read_to_string(&file);
        let log = log.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let loss = |line: &str| line.split(',').next().unwrap().parse::<f64>().unwrap();
        let mut losses: Vec<f64> = log.lines().map(loss).collect();
        assert!(log.lines().last().unwrap().ends_with("final"), "{log}");
        (losses.pop().unwrap(), losses)
    };
    for (split, batches) in [("train", ITEMS / BATCH), ("valid", 2 + 2)] {
        let (last, losses) = losses(split);
        assert_eq!(losses.len(), batches, "{split}: 7 items to validate on are 3 and 4");
        let mean = losses.iter().sum::<f64>() / batches as f64;
        assert!((last - mean).abs() < 1e-6, "{split}: {last}, and {mean} of all ranks");
    }
}
