//! The counts of an optimizer over its steps, for every parameter.

use burn::tensor::{DType, Device, Tensor};

use super::divided_model::DividedModel;
use super::rejected_gradients::RowSums;
use crate::backend::StepCounts;
use crate::distributed::trainable::{TrainableParameter, UpdateKind};
use crate::error::Result;
use crate::flat;
use crate::muon::MuonConfig;
use crate::update::missing_gradients::Absence;
use crate::update::{CORRECTIONS, CountSlot, SKIPPED, SkippedSteps, Slot};

/// The counts of skipped steps, of diverged matrices and of steps without a gradient.
pub struct Accounts {
    pub counters: Counters,
    pub skipped: SkippedSteps,
    /// The place of the counters among the skipped steps of all optimizers.
    pub place: CountSlot,
    /// Sums over the matrices that this rank updates, by parameter. `None` if no rank updates any.
    pub matrices: Option<RowSums>,
    /// For each of these matrices, 1 if the iteration diverged since the ranks last exchanged the
    /// parameters that stay as they are, when it is counted.
    pub diverged: Tensor<1>,
    /// A zero for each parameter, if the last step has left some for the next one.
    pub zeros: Option<Tensor<1>>,
    pub absence: Absence,
    /// For each update element by element, 1 for the parameters of all others; none if there is one
    /// update.
    pub others: Vec<Tensor<1>>,
}

/// The parameters that each update element by element does not have.
fn others(divided: &DividedModel) -> Vec<Tensor<1>> {
    let count = divided.routing.updates().rest.len();
    let flags = |index: usize| -> Vec<f32> {
        let is_other = |parameter: &TrainableParameter| match parameter.kind {
            UpdateKind::Elementwise { settings, .. } => settings != index,
            // Nothing reads the corrections of other kinds: the first update advances them.
            UpdateKind::Muon { .. } | UpdateKind::Whole { .. } => index != 0,
        };
        divided.trainable.iter().map(|p| f32::from(u8::from(is_other(p)))).collect()
    };
    match count {
        1 => vec![],
        _ => (0..count)
            .map(|index| Tensor::from_data(&*flags(index), (&divided.device(), DType::F32)))
            .collect(),
    }
}

impl Accounts {
    /// Counts of zero. `matrices` has the parameter of each matrix that this rank updates.
    pub fn new(config: &MuonConfig, divided: &DividedModel, matrices: &[usize]) -> Self {
        let (parameters, device) = (divided.trainable.len(), divided.device());
        let is_muon =
            |parameter: &TrainableParameter| matches!(parameter.kind, UpdateKind::Muon { .. });
        let has_matrices = divided.trainable.iter().any(is_muon);
        Self {
            counters: Counters::new(parameters, &device),
            skipped: divided.routing.updates().skipped.clone(),
            place: CountSlot::default(),
            matrices: has_matrices.then(|| RowSums::new(matrices, parameters, &device)),
            zeros: None,
            diverged: flat::zeros(matrices.len(), DType::F32, &device),
            absence: Absence::new(config.max_absent, parameters),
            others: others(divided),
        }
    }

    /// Registers the counts as they are now.
    pub fn start_counting(&mut self, divided: &DividedModel) {
        let names = divided.trainable.iter().map(|parameter| parameter.path.clone()).collect();
        let reserved = self.place.has_started().then_some(self.place);
        let skipped = self.counters.skipped.clone();
        self.place = self.skipped.start(reserved, names, skipped, divided.times());
    }

    /// Counts skipped steps in other counts.
    pub fn count_skipped_in(&mut self, skipped: &SkippedSteps, divided: &DividedModel) {
        self.skipped = skipped.clone();
        self.place = CountSlot::default();
        self.start_counting(divided);
    }

    /// Counts a step in which the `present` parameters have a gradient on any rank, and logs what
    /// is unusual.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`](crate::Error::Usage) if no parameter had a gradient in too many steps.
    pub fn count_absent(&mut self, present: &[bool], divided: &DividedModel) -> Result<()> {
        let warning = self.absence.count(present, |index| divided.path(index))?;
        if let Some(warning) = warning.filter(|_| divided.world.is_main()) {
            log::warn!("{warning}");
        }
        Ok(())
    }

    /// Counts no matrix as diverged.
    pub fn forget_diverged(&mut self) {
        let matrices = self.diverged.dims()[0];
        self.diverged = flat::zeros(matrices, DType::F32, &self.diverged.device());
    }
}

/// The counters on the device, the same on all ranks: one value for every parameter, in the order
/// of the plan.
pub struct Counters {
    /// Steps that left the parameter untouched.
    pub skipped: Tensor<1>,
    /// AdamW's bias corrections.
    pub corrections: [Tensor<1>; 2],
}

impl From<StepCounts> for Counters {
    fn from(StepCounts { skipped, corrections }: StepCounts) -> Self {
        Self { skipped, corrections }
    }
}

/// The slots of all counters.
pub const COUNTERS: [Slot; 3] = [SKIPPED, CORRECTIONS[0], CORRECTIONS[1]];

impl Counters {
    /// Zeros.
    pub fn new(parameters: usize, device: &Device) -> Self {
        let zeros = || Tensor::zeros([parameters], (device, DType::F32));
        Self { skipped: zeros(), corrections: [zeros(), zeros()] }
    }

    /// Moves the counters out, so that a step updates them in place. Any tensor takes their places,
    /// until the step puts new ones there.
    pub fn take(&mut self, any: &Tensor<1>) -> StepCounts {
        let Self { skipped, corrections } = self;
        let take = |counter: &mut Tensor<1>| flat::take(counter, any);
        StepCounts { skipped: take(skipped), corrections: corrections.each_mut().map(take) }
    }

    /// The counters in the order of [`COUNTERS`].
    pub fn values(&self) -> [&Tensor<1>; 3] {
        let [first, second] = &self.corrections;
        [&self.skipped, first, second]
    }
}
