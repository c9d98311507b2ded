//! Training burn-train's `Learner` on many ranks.

mod fit;
mod logits;
mod optimizer_state;
mod ranks;
mod training_loop;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::Device;

use super::{Diagnostics, DistMuonConfig, Layout};
use crate::account::Account;
use crate::comm::{DEADLINE, World};
use crate::error::Result;
use crate::qk_clip::QkClipConfig;
use crate::update::SkippedSteps;
pub use logits::LearnerLogits;
use ranks::Ranks;

/// Trains a burn-train [`Learner`](burn::train::Learner) on many ranks with
/// [`DistModuleOptimizer`](super::DistModuleOptimizer): on threads by [`new`](Self::new), or in
/// processes by [`on`](Self::on). Needs the feature `train`.
///
/// ```no_run
/// # use burn::train::{Learner, LearnerModel, LearningResult, SupervisedTraining};
/// # use burn::tensor::Device;
/// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy};
/// use distmuon::Schedule;
///
/// # fn train<M: LearnerModel>(
/// #     model: M,
/// #     devices: Vec<Device>,
/// #     training: SupervisedTraining<M>,
/// # ) -> LearningResult<M> {
/// let config = DistMuonConfig::new();
/// let lr = Schedule::constant(1e-3).into_lr_scheduler();
/// let learner = Learner::new(model.clone(), config.muon.init(&model), lr);
/// training
///     .with_training_strategy(DistMuonStrategy::new(devices, config).into())
///     .launch(learner)
/// # }
/// ```
///
/// The learner's optimizer has to be made by [`MuonConfig::init`](crate::MuonConfig::init)
/// with the same configuration: training continues from its state, and checkpoints contain its
/// state. A checkpoint does not depend on ranks: it continues on any number of them, or with Burn's
/// own strategies.
///
/// Differences from Burn's strategies:
///
/// - if there are checkpointers, rank 0 gathers the state of the optimizer in host memory at the
///   end of every epoch, because Burn's checkpointers accept the state only as a whole;
/// - the training items are cut into one part of equal length per rank. The remaining items, fewer
///   than there are ranks, are not used. A step takes the mean of the gradients of all ranks, so
///   `N` ranks with batches of `B` items train as one rank with batches of `N B` items;
/// - the validation items are also divided between the ranks;
/// - [`TrainStep::optimize`](burn::train::TrainStep::optimize) is not called, so a model's override
///   of it has no effect;
/// - the initial model stays in memory in addition to the models of the ranks.
///
/// The optimizer of the learner is checked when training starts: an optimizer of another kind is
/// rejected.
///
/// In processes, every process makes the learner and launches the training with its rank's
/// strategy. Rank 0 alone saves and reports metrics. Metrics of training cover its part of the
/// items, metrics of validation all items. Rank 0 processes these alone, or every rank does if a
/// [layout](Self::with_layout) has divided the parameters. Give the other processes a folder of
/// their own for burn-train's files.
///
/// An error or a panic on a rank ends the training on all ranks.
/// [`LearningResult::error`](burn::train::LearningResult) then has the error, and the returned
/// model is the initial one: continue from the last checkpoint, which is newer.
#[derive(Clone, Debug)]
pub struct DistMuonStrategy {
    ranks: Ranks,
    layout: MakeLayout,
    config: DistMuonConfig,
    deadline: Duration,
    skipped: SkippedSteps,
    /// Steps between two diagnostics, and between two accounts.
    diagnosed: Every,
    accounted: Every,
    latest: LatestDiagnostics,
    account: LatestAccount,
    qk_clip: Option<(QkClipConfig, LearnerLogits)>,
}

/// Steps between two of something; 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct Every(usize);

impl Every {
    /// Returns `true` for the first step, and then for every so many.
    fn is_due(self, step: usize) -> bool {
        self.0 > 0 && step.is_multiple_of(self.0)
    }
}

/// The function that makes the layout of a rank.
#[derive(Clone)]
struct MakeLayout(Arc<LayoutOfWorld>);

type LayoutOfWorld = dyn Fn(&World) -> Result<Layout> + Send + Sync;

impl fmt::Debug for MakeLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MakeLayout")
    }
}

/// A report on a step of a training in progress, for a metric. Clones share it. Needs the feature
/// `train`.
#[derive(Clone, Debug)]
pub struct Latest<T>(Arc<Mutex<Option<T>>>);

/// The diagnostics of a training in progress, for [`DiagnosticsMetric`](crate::DiagnosticsMetric).
pub type LatestDiagnostics = Latest<Diagnostics>;

/// The account of a step of a training in progress, for
/// [`MuonShareMetric`](crate::MuonShareMetric).
pub type LatestAccount = Latest<Account>;

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone> Latest<T> {
    /// Returns the report on the last step that had one.
    pub fn get(&self) -> Option<T> {
        self.0.lock().expect("no holder of the lock panics").clone()
    }

    fn set(&self, report: T) {
        *self.0.lock().expect("no holder of the lock panics") = Some(report);
    }
}

impl DistMuonStrategy {
    /// Makes one rank per device, a thread each. A device may be given more than once.
    pub fn new(devices: impl IntoIterator<Item = Device>, config: DistMuonConfig) -> Self {
        Self::of(Ranks::Threads(devices.into_iter().collect()), config)
    }

    /// Makes this process a rank of a world of processes, as from `World::from_env`.
    pub fn on(world: &World, config: DistMuonConfig) -> Self {
        Self::of(Ranks::Process(world.clone()), config)
    }

    fn of(ranks: Ranks, config: DistMuonConfig) -> Self {
        let skipped = SkippedSteps::new(config.muon.max_skipped);
        Self {
            ranks,
            layout: MakeLayout(Arc::new(|world| Ok(world.into()))),
            config,
            deadline: DEADLINE,
            skipped,
            diagnosed: Every::default(),
            accounted: Every::default(),
            latest: LatestDiagnostics::default(),
            account: LatestAccount::default(),
            qk_clip: None,
        }
    }

    /// Sets the layout of the model, from a function that every rank calls with its world. Where
    /// parameters are divided, all ranks hold the whole model before the first step and after the
    /// last one, and, if a checkpointer saves, at the end of every epoch: Burn's checkpointers
    /// accept whole records only.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use distmuon::distributed::{DistMuonConfig, DistMuonStrategy, Layout};
    ///
    /// let devices = vec![Device::default(); 2];
    /// let strategy = DistMuonStrategy::new(devices, DistMuonConfig::new())
    ///     .with_layout(|world| Ok(Layout::from(world).owned("dp")));
    /// ```
    pub fn with_layout(
        mut self,
        layout: impl Fn(&World) -> Result<Layout> + Send + Sync + 'static,
    ) -> Self {
        self.layout = MakeLayout(Arc::new(layout));
        self
    }

    /// Clips the heads of attention whose maximum logit of any rank was above the threshold, in
    /// every step. The model reports to a clone of `logits`, in all batches of a step.
    ///
    /// A rule that does not fit the model, or an attention that does not report in a step, ends
    /// the training with [`Error::QkClip`](crate::Error::QkClip).
    pub fn with_qk_clip(mut self, config: QkClipConfig, logits: &LearnerLogits) -> Self {
        self.qk_clip = Some((config, logits.clone()));
        self
    }

    /// Computes the [diagnostics](super::DistModuleOptimizer::diagnostics) of the first and then of
    /// every `steps`-th step; 0 for none.
    pub fn with_diagnostics(mut self, steps: usize) -> Self {
        self.diagnosed = Every(steps);
        self
    }

    /// Keeps the [account](super::DistModuleOptimizer::account) of the first and then of every
    /// `steps`-th step; 0 for none.
    pub fn with_account(mut self, steps: usize) -> Self {
        self.accounted = Every(steps);
        self
    }

    /// Returns the account of the last step that had one: clone it before the training. For a
    /// metric, see [`MuonShareMetric`](crate::MuonShareMetric).
    pub fn account(&self) -> &LatestAccount {
        &self.account
    }

    /// Returns the diagnostics of the last step that had any: clone them before the training. For a
    /// metric, see [`DiagnosticsMetric`](crate::DiagnosticsMetric).
    pub fn diagnostics(&self) -> &LatestDiagnostics {
        &self.latest
    }

    /// Returns the counts of the steps that left parameters untouched. Clone the counts before the
    /// training to read them during the training and afterwards. For a metric, see
    /// [`SkippedStepsMetric`](crate::SkippedStepsMetric).
    pub fn skipped_steps(&self) -> &SkippedSteps {
        &self.skipped
    }

    /// Sets the time after which a wait for another rank fails, [`DEADLINE`] by default.
    ///
    /// ```
    /// use distmuon::distributed::DistMuonStrategy;
    /// use distmuon::{DistMuonConfig, World};
    /// use std::time::Duration;
    ///
    /// let strategy = DistMuonStrategy::new(World::devices(2), DistMuonConfig::new())
    ///     .with_deadline(Duration::from_secs(60));
    /// ```
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}
