//! This rank's part of a bucket: its state, and its update.
//!
//! A shard consists of rows, each of one parameter: whole matrices, or [`ROW_ELEMENTS`] elements.

use std::cell::Cell;
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use burn::optim::{DynState, StateSink, StateSource};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::bucket_exchange::{Exchange, Publishers};
use super::decisions::{Decisions, StepControls, StepInputs};
use super::detached_parameters::{FlatTensors, pack};
use super::divided_model::DividedModel;
use crate::backend::{
    AdamWControls, ElementwiseRows, FlaggedRows, KernelPolicy, ScaledNorms, precise_dtype, reject,
    scaled,
};
use crate::checksum;
use crate::distributed::plan::{self, Bucket, BucketKind, Overlap, ROW_ELEMENTS};
use crate::distributed::trainable::{TrainableParameter, UpdateKind};
use crate::flat;
use crate::host::moved;
use crate::routing::Updates;
use crate::update::{
    Clocks, Decision, ElementwiseParameter, ElementwiseUpdate, Ledger, Matrices, MuonBatch,
    MuonParameter, MuonUpdate, Observations, Origin, Slots, StepSize, UpdateTensors,
    WholeParameter, WholeUpdate,
};

/// A rank's part of a bucket.
pub struct Shard {
    pub bucket: Bucket,
    pub exchange: Exchange,
    /// This rank's range of the bucket's buffer.
    range: Range<usize>,
    update: Update,
    /// The index of the update among updates of its kind.
    settings: usize,
    /// `true` if any of the bucket's parameters is a stack of matrices.
    has_stacks: bool,
    /// The parameters in this range, in order.
    runs: Vec<ShardRun>,
    batches: Vec<Batch>,
    device: Device,
    /// The device of the states between updates, if it is another one.
    states_device: Option<Device>,
    /// `true` while the states are there.
    are_states_away: bool,
}

/// The bytes of the states of shards.
#[derive(Debug, Clone, Copy, Default)]
pub struct StateBytes {
    pub masters: usize,
    /// Momentum and moments, without master weights.
    pub states: usize,
    /// Master weights, momentum and moments that are on the host, and not counted above.
    pub on_host: usize,
}

impl StateBytes {
    pub fn of(shards: &[Shard]) -> Self {
        shards.iter().fold(Self::default(), |Self { masters, states, on_host }, shard| {
            let [all, of_masters] = [shard.state_bytes(), shard.master_bytes()];
            match shard.are_states_away {
                true => Self { masters, states, on_host: on_host + all },
                false => Self {
                    masters: masters + of_masters,
                    states: states + all - of_masters,
                    on_host,
                },
            }
        })
    }
}

/// The rule for the parameters of a shard.
enum Update {
    Muon(Arc<MuonUpdate>),
    Elementwise(Arc<ElementwiseUpdate>),
    /// Every batch is a whole parameter, and has its optimizer.
    Whole(KernelPolicy),
}

/// Neighbouring elements of a parameter, all in one shard.
struct ShardRun {
    /// Index of the parameter, and its path.
    parameter: usize,
    path: String,
    /// The elements' range in the parameter.
    elements: Range<usize>,
    /// The elements' range in the shard. Zeros may follow.
    range: Range<usize>,
    /// `true` for matrices of a stack.
    is_stack: bool,
}

/// Rows that are updated together: the matrices of one shape, everything that is updated element by
/// element, or a whole parameter.
struct Batch {
    /// Indices of their runs.
    runs: Range<usize>,
    /// The range of its values in the shard.
    elements: Range<usize>,
    /// Elements of a row.
    row: usize,
    /// `None` for elements.
    matrices: Option<MatrixRows>,
    /// `None` unless the batch is a whole parameter.
    whole: Option<WholeRow>,
    state: Slots,
    clocks: Clocks,
}

/// A row that is a whole parameter.
struct WholeRow {
    update: WholeUpdate,
    shape: Vec<usize>,
    /// The state that its optimizer made.
    own: Option<DynState>,
}

/// Rows that are matrices.
struct MatrixRows {
    matrices: Matrices,
    /// Index of the first among the flags of all matrices of the rank.
    first: usize,
    /// For each of them, the index of its parameter.
    parameters: Tensor<1, Int>,
}

impl Shard {
    /// A shard whose state is zero. The parameters of its matrices are added to the parameters of
    /// the matrices that the rank has.
    pub fn new(
        bucket: &Bucket,
        divided: &DividedModel,
        publishers: &Publishers,
        rank_matrices: &mut Vec<usize>,
    ) -> Self {
        let DividedModel { layout, plan, .. } = divided;
        let exchange = Exchange::new(bucket, plan.parameters(), layout, publishers);
        Self::with_exchange(bucket, exchange, divided, rank_matrices)
    }

    fn with_exchange(
        bucket: &Bucket,
        exchange: Exchange,
        divided: &DividedModel,
        rank_matrices: &mut Vec<usize>,
    ) -> Self {
        let DividedModel { world, plan, trainable: parameters, routing, .. } = divided;
        let updates = routing.updates();
        let settings = bucket.settings(plan.parameters());
        let (rank, device) = (world.rank(), &divided.device());
        // Made where they lie, or a model whose states don't fit its device could not begin.
        let states_device = divided.states_device.as_ref().unwrap_or(device);
        let range = bucket.shard_range(rank);
        let run = |plan::Run { parameter, elements, range }| {
            let path = parameters[parameter].path.clone();
            let is_stack = parameters[parameter].is_stack();
            ShardRun { parameter, path, elements, range, is_stack }
        };
        let mut runs: Vec<ShardRun> = bucket.runs(rank).into_iter().map(run).collect();
        let (update, batches) = match bucket.kind {
            BucketKind::Matrices => {
                // The flags of the matrices of all buckets are one tensor, so that one sum adds
                // them up for all parameters.
                let (first, muon) = (rank_matrices.len(), &updates.muon[settings]);
                let devices = Devices { of_indices: device, of_states: states_device };
                let batches = batches(&runs, parameters, first, bucket.dtype, devices, muon);
                rank_matrices.extend(matrices(bucket, parameters, &range));
                (Update::Muon(muon.clone()), batches)
            }
            BucketKind::Whole => {
                let batches =
                    whole_batches(&runs, parameters, bucket.dtype, states_device, updates);
                (Update::Whole(updates.rest[0].policy), batches)
            }
            BucketKind::Elements | BucketKind::Replicated => {
                // Runs of similar length are neighbours: a launch processes several as if all had
                // the length of the longest, and reads them in vectors only if all lengths are
                // multiples of 8.
                let rest = &updates.rest[settings];
                runs.sort_by_key(|run| (run.range.len() % 8 != 0, Reverse(run.range.len())));
                let elements = range.len();
                let batch =
                    || elementwise_batch(runs.len(), elements, bucket.dtype, states_device, rest);
                // Not every backend accepts empty tensors.
                let batches = (!range.is_empty()).then(batch).into_iter().collect();
                (Update::Elementwise(rest.clone()), batches)
            }
        };
        let has_stacks = bucket.parameters.iter().any(|index| parameters[*index].is_stack());
        Self {
            bucket: bucket.clone(),
            exchange,
            range,
            update,
            settings,
            has_stacks,
            runs,
            batches,
            device: device.clone(),
            states_device: divided.states_device.clone(),
            are_states_away: divided.states_device.is_some(),
        }
    }

    /// The shard of the rank before this one, with a state of zero, by the rule of this rank.
    pub fn of_previous_rank(&self, divided: &DividedModel) -> Self {
        let bucket = self.bucket.of_previous_ranks();
        let exchange = self.exchange.of_previous_ranks(&bucket);
        // With an empty list: diverged matrices are counted by their owner alone.
        let mut shard = Self::with_exchange(&bucket, exchange, divided, &mut vec![]);
        if let Update::Muon(muon) = &self.update {
            // With a ledger of its own, which nobody reads: the iterations of an audit are none of
            // the step's.
            let update = MuonUpdate { ledger: Ledger::default(), ..(**muon).clone() };
            shard.update = Update::Muon(Arc::new(update));
        }
        shard
    }

    /// The values of this rank's parameters, each where it is stored: moved out where the rank has
    /// all of it. Zeros for those that are absent.
    pub fn take(&self, values: &mut FlatTensors) -> Vec<Tensor<1>> {
        let (dtype, device) = (self.bucket.dtype, &self.device);
        let each = self.runs.iter().map(|ShardRun { parameter, elements, .. }| {
            values.take_elements(*parameter, elements.clone(), dtype, device)
        });
        each.collect()
    }

    /// The parameters of a shard, as slices of its buffer.
    pub fn split(&self, shard: &Tensor<1>) -> Vec<Tensor<1>> {
        self.runs.iter().map(|run| flat::slice(shard, run.range.clone())).collect()
    }

    /// The ranges of the parameters in the buffer of a shard. `None` for a share of slices, which
    /// are not whole parameters.
    pub fn parts(&self) -> Option<Vec<Range<usize>>> {
        let ranges = || self.runs.iter().map(|run| run.range.clone()).collect();
        (!self.exchange.is_cut()).then(ranges)
    }

    /// The buffer of a shard from its parameters, with zeros in between.
    pub fn pack(&self, values: Vec<Tensor<1>>) -> Tensor<1> {
        if values.is_empty() {
            return flat::zeros(self.range.len(), self.bucket.dtype, &self.device);
        }
        let firsts: Vec<usize> = self.runs.iter().map(|run| run.range.start).collect();
        flat::place(values, &firsts, self.range.len())
    }

    /// The indices of this rank's parameters, in the order of their values, and the first of their
    /// elements.
    pub fn parameters(&self) -> impl Iterator<Item = (usize, usize)> {
        self.runs.iter().map(|run| (run.parameter, run.elements.start))
    }

    /// Replaces the rule of matrices by one with other settings of a step, of the updates of all.
    pub fn set_muon(&mut self, updates: &[Arc<MuonUpdate>]) {
        if let Update::Muon(muon) = &mut self.update {
            *muon = updates[self.settings].clone();
        }
    }

    /// This rank's share of the bucket as it has it, whose parameters may be slices.
    pub fn pack_share(&self, values: &mut FlatTensors, dtype: DType) -> Tensor<1> {
        pack(values, &self.exchange.held, self.exchange.share_range(), dtype, &self.device)
    }

    /// Returns `true` if the ranks update the bucket in shards, and every rank has all of it, or
    /// the same slices.
    pub fn is_gathered(&self) -> bool {
        self.exchange.group.size() > 1
            && self.bucket.kind != BucketKind::Replicated
            && !self.bucket.placement.is_owned()
    }

    fn policy(&self) -> KernelPolicy {
        match &self.update {
            Update::Muon(muon) => muon.policy(),
            Update::Elementwise(rest) => rest.policy,
            Update::Whole(policy) => *policy,
        }
    }

    /// Brings the states to the model's device, for an update.
    pub fn bring_states(&mut self) {
        if std::mem::take(&mut self.are_states_away) {
            self.batches.iter_mut().for_each(|batch| batch.move_states(&self.device));
        }
    }

    /// Takes the states to the device where they lie between updates.
    pub fn take_states_away(&mut self) {
        if let (Some(device), false) = (&self.states_device, self.are_states_away) {
            self.batches.iter_mut().for_each(|batch| batch.move_states(device));
            self.are_states_away = true;
        }
    }

    /// Returns `true` if the states leave the model's device between updates.
    pub fn states_leave(&self) -> bool {
        self.states_device.is_some()
    }

    /// Sets the flags of parameters whose gradients are not usable.
    pub fn reject(&self, gradients: &[Tensor<1>], flags: Tensor<1>) -> Tensor<1> {
        let largest = match &self.update {
            Update::Muon(_) | Update::Whole(_) => f64::MAX,
            Update::Elementwise(rest) => rest.largest_gradient(self.bucket.dtype),
        };
        let rows: Vec<_> =
            self.parameters().map(|(flag, _)| FlaggedRows { flag, rows: 1 }).collect();
        reject(self.policy(), flags, gradients, &rows, largest)
    }

    /// The norms of the gradients of every row, batch by batch.
    pub fn norms(&self, gradients: &[Tensor<1>]) -> Vec<ScaledNorms> {
        let norms = self.batches.iter().map(|batch| {
            let Batch { runs, elements, row, .. } = batch;
            let firsts: Vec<_> = self.runs[runs.clone()]
                .iter()
                .map(|run| (run.range.start - elements.start) / row)
                .collect();
            let rows = elements.len() / row;
            let gradients = &gradients[runs.clone()];
            ScaledNorms::of_tensors(self.policy(), gradients, &firsts, *row, rows, &self.device)
        });
        norms.collect()
    }

    /// Updates this rank's parameters: their new values from the reduced gradients and the old
    /// values. Sets the flags of matrices for which the iteration diverged in `diverged`, and adds
    /// the norms of the step to `observations`.
    pub fn update(
        &mut self,
        UpdateTensors { mut gradients, mut values }: UpdateTensors,
        decisions: Decisions<'_>,
        diverged: &mut Tensor<1>,
        mut observations: Option<&mut Observations>,
    ) -> Vec<Tensor<1>> {
        self.bring_states();
        let (update, all, dtype) = (&self.update, &self.runs, self.bucket.dtype);
        let updated = self.batches.iter_mut().flat_map(|batch| {
            let runs = &all[batch.runs.clone()];
            let tensors = UpdateTensors {
                // Moved out, so that the update has the only reference, and works in place.
                values: values.drain(..runs.len()).collect(),
                gradients: gradients.drain(..runs.len()).collect(),
            };
            let observations = observations.as_deref_mut();
            match update {
                Update::Muon(muon) => batch.with_matrices(
                    runs,
                    dtype,
                    decisions,
                    diverged,
                    |batch, state, clocks, flags| {
                        muon.step(batch, tensors, state, clocks, flags, observations)
                    },
                ),
                Update::Elementwise(rest) => {
                    batch.update_elements(rest, runs, tensors, decisions, observations)
                }
                Update::Whole(_) => batch.update_whole(&runs[0], tensors, decisions, observations),
            }
        });
        updated.collect()
    }

    /// Returns `true` if [`directions`](Self::directions) may take the place of
    /// [`update`](Self::update): if the values are only needed to apply directions to them.
    pub fn separates(&self) -> bool {
        match &self.update {
            Update::Muon(muon) => muon.separates(self.has_stacks, self.bucket.dtype),
            Update::Elementwise(_) | Update::Whole(_) => false,
        }
    }

    /// The directions of this rank's matrices from the reduced gradients, for
    /// [`apply`](Self::apply). Sets the flags of matrices for which the iteration diverged in
    /// `diverged`.
    ///
    /// # Panics
    ///
    /// If the update does not [separate](Self::separates).
    pub fn directions(
        &mut self,
        mut gradients: Vec<Tensor<1>>,
        decisions: Decisions<'_>,
        diverged: &mut Tensor<1>,
    ) -> Vec<Tensor<1>> {
        self.bring_states();
        let Update::Muon(muon) = &self.update else { unreachable!("only Muon separates") };
        let (all, dtype) = (&self.runs, self.bucket.dtype);
        let directions = self.batches.iter_mut().flat_map(|batch| {
            let runs = &all[batch.runs.clone()];
            let gradients = gradients.drain(..runs.len()).collect();
            batch.with_matrices(runs, dtype, decisions, diverged, |batch, state, clocks, flags| {
                muon.directions(batch, gradients, state, clocks, flags)
            })
        });
        directions.collect()
    }

    /// This rank's share of slices after a step: from the values before it, and the directions that
    /// the owners of the matrices have distributed.
    ///
    /// # Panics
    ///
    /// If the parameters are not slices, or the update does not [separate](Self::separates).
    pub fn apply(
        &self,
        directions: &Tensor<1>,
        values: &mut FlatTensors,
        inputs: &StepInputs,
    ) -> Tensor<1> {
        let Update::Muon(muon) = &self.update else { unreachable!("only Muon separates") };
        let share = self.exchange.share().expect("the parameters are slices");
        share.apply(muon, directions, values, inputs)
    }

    /// The values of a slot on the model's device, flat, in the order of the shard, of the
    /// parameters that have it.
    pub fn state(&self, slot: &str, dtype: DType) -> Tensor<1> {
        let states = self.batches.iter().map(|batch| &batch.state).filter(|state| state.has(slot));
        let values = states.map(|state| self.on_device(state.get(slot)));
        flat::concat(values.collect(), dtype, &self.device)
    }

    /// The values of a state on the model's device.
    fn on_device(&self, values: Tensor<1>) -> Tensor<1> {
        match self.are_states_away {
            true => values.to_device(&self.device),
            false => values,
        }
    }

    /// Sets the values that [`state`](Self::state) returns.
    pub fn set_state(&mut self, slot: &str, values: &Tensor<1>) {
        let mut end = 0;
        let away = self.states_device.as_ref().filter(|_| self.are_states_away);
        for batch in self.batches.iter_mut().filter(|batch| batch.state.has(slot)) {
            let [count] = batch.state.get(slot).dims();
            let new = flat::slice(values, end..end + count);
            batch.state.put(slot, if let Some(device) = away { moved(new, device) } else { new });
            // The counts on the host are of the former state.
            batch.clocks = Clocks::default();
            end += count;
        }
    }

    /// The values of all slots in float32, which has the digits of every type of slot.
    pub fn all_states(&self) -> Tensor<1> {
        let slots = self.batches.iter().flat_map(|batch| {
            let names = batch.state.names();
            names.map(|name| self.on_device(batch.state.get(name)).cast(DType::F32))
        });
        flat::concat(slots.collect(), DType::F32, &self.device)
    }

    /// Sets the values that [`all_states`](Self::all_states) returns, for an update that follows.
    pub fn set_all_states(&mut self, values: &Tensor<1>) {
        self.bring_states();
        let mut end = 0;
        for Batch { state, clocks, .. } in &mut self.batches {
            let names: Vec<_> = state.names().collect();
            for name in names {
                let old = state.get(name);
                let start = end;
                end += old.dims()[0];
                state.put(name, flat::slice(values, start..end).cast(old.dtype()));
            }
            *clocks = Clocks::default();
        }
    }

    /// The checksums of the states of matrices: of each parameter, its index, and the name and the
    /// checksum of a slot.
    pub fn state_sums(&self) -> Vec<(usize, &'static str, u64)> {
        let slots = self
            .batches
            .iter()
            .flat_map(|batch| batch.state.names().map(move |name| (batch, name)));
        slots.flat_map(|(batch, name)| self.sums_of_slot(batch, name)).collect()
    }

    fn sums_of_slot(
        &self,
        Batch { runs, elements, row, state, .. }: &Batch,
        name: &'static str,
    ) -> Vec<(usize, &'static str, u64)> {
        let (runs, matrices) = (&self.runs[runs.clone()], elements.len() / row);
        // Hashed on the host, wherever they lie.
        let values = state.get(name);
        // Slots have the values of one matrix after the other.
        let each = values.dims()[0] / matrices;
        let matrix = |element: usize| (element - elements.start) / row * each;
        let parts = runs.iter().map(|run| matrix(run.range.start)..matrix(run.range.end));
        let sums = checksum::of_parts(values, parts);
        runs.iter().zip(sums).map(|(run, sum)| (run.parameter, name, sum)).collect()
    }

    /// The states that every rank has, since all of them update the shard: of each parameter, its
    /// index, and the name and the values of a slot.
    pub fn replicated_states(&self) -> Vec<(usize, &'static str, Tensor<1>)> {
        let Update::Elementwise(rest) = &self.update else { return vec![] };
        if self.bucket.kind != BucketKind::Replicated {
            return vec![];
        }
        let slots = rest.slots(self.bucket.dtype).into_iter();
        slots
            .flat_map(|slot| {
                let values = self.state(slot.name, slot.dtype.resolve(self.bucket.dtype));
                self.runs.iter().map(move |run| {
                    (run.parameter, slot.name, flat::slice(&values, run.range.clone()))
                })
            })
            .collect()
    }

    /// Returns `true` if the host has to know which of this rank's parameters stay as they are.
    pub fn reads_decisions(&self) -> bool {
        let whole = self.batches.iter().filter_map(|batch| batch.whole.as_ref());
        whole.into_iter().any(|whole| whole.update.optimizer.reads())
    }

    /// The states that the optimizers of this rank's whole parameters made, by parameter: each is
    /// copied to the host when it is asked for.
    pub fn own_states(&self) -> impl Iterator<Item = (usize, StateSink)> {
        let runs = self.runs.iter().map(|run| run.parameter);
        let whole = runs.filter(|parameter| self.owns(*parameter));
        whole.map(|parameter| (parameter, self.own_state(parameter)))
    }

    /// The state that the optimizer of a whole parameter made, copied to the host.
    ///
    /// # Panics
    ///
    /// If the rank does not own the whole parameter.
    pub fn own_state(&self, parameter: usize) -> StateSink {
        let whole = self.batches[self.position(parameter)].whole.as_ref();
        let WholeRow { update, own, .. } = whole.expect("a whole parameter");
        let mut sink = StateSink::default();
        update.flatten(own.as_ref(), "", &mut sink);
        sink
    }

    /// Bytes of the states that the optimizers of whole parameters made. Each is copied to the
    /// host, to see its size, and dropped.
    pub fn own_bytes(&self) -> usize {
        let whole = self.batches.iter().filter_map(|batch| batch.whole.as_ref());
        whole.map(|row| row.update.own_bytes(row.own.as_ref())).sum()
    }

    /// Returns `true` if this rank owns a whole parameter.
    pub fn owns(&self, parameter: usize) -> bool {
        self.bucket.kind == BucketKind::Whole
            && self.runs.iter().any(|run| run.parameter == parameter)
    }

    /// Reads the state of a whole parameter. `None` if it is another optimizer's.
    ///
    /// # Panics
    ///
    /// If the rank does not own the whole parameter.
    pub fn read_own(
        &self,
        parameter: usize,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<Option<DynState>> {
        let whole = self.batches[self.position(parameter)].whole.as_ref();
        let WholeRow { update, shape, .. } = whole.expect("a whole parameter");
        update.unflatten(shape.len(), "", source, device)
    }

    /// Sets the state of a whole parameter.
    ///
    /// # Panics
    ///
    /// If the rank does not own the whole parameter.
    pub fn set_own(&mut self, parameter: usize, own: Option<DynState>) {
        let index = self.position(parameter);
        self.batches[index].whole.as_mut().expect("a whole parameter").own = own;
    }

    fn position(&self, parameter: usize) -> usize {
        let index = self.runs.iter().position(|run| run.parameter == parameter);
        index.expect("the rank owns the parameter")
    }

    /// Bytes of the master weights in the state.
    pub fn master_bytes(&self) -> usize {
        self.batches.iter().map(|batch| batch.state.master_bytes()).sum()
    }

    /// Bytes of the state.
    pub fn state_bytes(&self) -> usize {
        self.batches.iter().map(|batch| batch.state.bytes()).sum()
    }
}

impl ShardRun {
    /// The origin of its values in a step.
    fn origin(&self, inputs: &StepInputs) -> Origin<'_> {
        let (element, step) = (self.elements.start, inputs.times[self.parameter]);
        Origin { parameter: &self.path, element, step }
    }

    /// The factors on its new values.
    fn factors(&self, inputs: &StepInputs) -> Option<Tensor<1>> {
        inputs.factors(self.parameter, &self.elements)
    }
}

impl Batch {
    /// Moves its states to a device.
    fn move_states(&mut self, device: &Device) {
        self.state = std::mem::take(&mut self.state).to_device(device);
    }

    /// Passes its matrices, its state and the flags in `diverged` to a function that returns a
    /// tensor for each parameter, and the new flags.
    fn with_matrices(
        &mut self,
        runs: &[ShardRun],
        dtype: DType,
        Decisions { controls, inputs }: Decisions<'_>,
        diverged: &mut Tensor<1>,
        update: impl FnOnce(
            &MuonBatch,
            &mut Slots,
            &mut Clocks,
            Tensor<1>,
        ) -> (Vec<Tensor<1>>, Tensor<1>),
    ) -> Vec<Tensor<1>> {
        let rows = self.matrices.as_ref().expect("a batch of matrices");
        let indices = &rows.parameters;
        let parameters = runs.iter().map(|run| MuonParameter {
            flag: run.parameter,
            is_present: inputs.present[run.parameter],
            origin: run.origin(inputs),
            lr: inputs.lrs[run.parameter],
            factors: run.factors(inputs),
        });
        let parameters: Vec<_> = parameters.collect();
        let batch = MuonBatch {
            count: self.elements.len() / self.row,
            matrices: rows.matrices,
            is_stack: runs[0].is_stack,
            dtype,
            parameters: &parameters,
            factor: controls.factor.as_ref(),
            rejected: Some(&controls.rejected),
            by_matrix: &|flags| flags.clone().select(0, indices.clone()),
            first: rows.first,
            iterations: Cell::default(),
            // All parameters are counted together.
            skips: Cell::default(),
        };
        let flags = flat::take(diverged, &controls.rejected);
        let (tensors, flags) = update(&batch, &mut self.state, &mut self.clocks, flags);
        *diverged = flags;
        tensors
    }

    fn update_elements(
        &mut self,
        rest: &ElementwiseUpdate,
        runs: &[ShardRun],
        tensors: UpdateTensors,
        Decisions { controls, inputs }: Decisions<'_>,
        observations: Option<&mut Observations>,
    ) -> Vec<Tensor<1>> {
        let StepControls { rejected, corrections, factor, .. } = controls;
        let parameters = runs.iter().map(|run| {
            let StepSize { decay, lr, .. } = inputs.sizes[run.parameter];
            let (flag, first) = (run.parameter, run.range.start);
            let rows = ElementwiseRows { flag, first, decay, lr };
            ElementwiseParameter { rows, origin: run.origin(inputs), factors: run.factors(inputs) }
        });
        let parameters: Vec<_> = parameters.collect();
        let controls = AdamWControls { rejected, corrections, factor: factor.as_ref() };
        let elements = self.elements.len();
        rest.step(tensors, &mut self.state, elements, &controls, &parameters, observations)
    }

    fn update_whole(
        &mut self,
        run: &ShardRun,
        mut tensors: UpdateTensors,
        Decisions { controls, inputs }: Decisions<'_>,
        observations: Option<&mut Observations>,
    ) -> Vec<Tensor<1>> {
        if let Some(factor) = controls.factor.clone() {
            // Widened first: in half precision, the factor would be rounded.
            let precise = precise_dtype(tensors.values[0].dtype());
            let gradient = tensors.gradients.swap_remove(0);
            tensors.gradients = vec![scaled(gradient.cast(precise), factor)];
        }
        let flag = flat::slice(&controls.rejected, run.parameter..run.parameter + 1);
        let WholeRow { update, shape, own } = self.whole.as_mut().expect("a whole parameter");
        let parameter = WholeParameter {
            flag: run.parameter,
            shape,
            lr: inputs.sizes[run.parameter].lr,
            origin: run.origin(inputs),
            factors: run.factors(inputs),
            decision: Decision { flag, read: controls.read.get(run.parameter).copied() },
        };
        vec![update.step(tensors, parameter, &mut self.state, own, observations)]
    }
}

/// The batch of all elements, with a state of zero.
fn elementwise_batch(
    runs: usize,
    elements: usize,
    dtype: DType,
    states_device: &Device,
    update: &ElementwiseUpdate,
) -> Batch {
    let (batch, slots) = (ElementwiseUpdate::batch(&[elements]), update.slots(dtype));
    Batch {
        runs: 0..runs,
        elements: 0..elements,
        row: ROW_ELEMENTS,
        matrices: None,
        whole: None,
        state: Slots::zeros(&slots, batch, &[elements], dtype, states_device),
        clocks: Clocks::default(),
    }
}

/// Whole parameters, each as a batch of one row.
fn whole_batches(
    runs: &[ShardRun],
    parameters: &[TrainableParameter],
    dtype: DType,
    device: &Device,
    updates: &Updates,
) -> Vec<Batch> {
    let batches = runs.iter().enumerate().map(|(index, run)| {
        let TrainableParameter { kind, shape, .. } = &parameters[run.parameter];
        let UpdateKind::Whole { optimizer, .. } = kind else {
            unreachable!("a bucket of whole parameters has no other parameters")
        };
        let update = updates.whole(optimizer);
        let batch = ElementwiseUpdate::batch(shape);
        let state = Slots::zeros(&update.slots(dtype), batch, shape, dtype, device);
        Batch {
            runs: index..index + 1,
            elements: run.range.clone(),
            row: run.range.len(),
            matrices: None,
            whole: Some(WholeRow { update, shape: shape.clone(), own: None }),
            state,
            clocks: Clocks::default(),
        }
    });
    batches.collect()
}

/// The parameter of every matrix of a shard, in order.
fn matrices(
    bucket: &Bucket,
    parameters: &[TrainableParameter],
    shard: &Range<usize>,
) -> Vec<usize> {
    let matrices = |Overlap { parameter, elements, .. }: Overlap| {
        let [_, m, n] = parameters[parameter].batch();
        std::iter::repeat_n(parameter, elements.len() / (m * n))
    };
    bucket.overlaps(shard.clone()).flat_map(matrices).collect()
}

/// The devices of a batch.
#[derive(Clone, Copy)]
struct Devices<'a> {
    of_indices: &'a Device,
    of_states: &'a Device,
}

/// The parameters as batches of one shape; their flags follow those before `first`.
fn batches(
    runs: &[ShardRun],
    parameters: &[TrainableParameter],
    mut first: usize,
    dtype: DType,
    Devices { of_indices, of_states }: Devices<'_>,
    muon: &MuonUpdate,
) -> Vec<Batch> {
    let matrices = |run: &ShardRun| match parameters[run.parameter].kind {
        UpdateKind::Muon { matrices, .. } => matrices,
        UpdateKind::Elementwise { .. } | UpdateKind::Whole { .. } => {
            unreachable!("a bucket of matrices has no other parameters")
        }
    };
    // Only parts depend on the layout, and only matrices of stacks have clocks of their own.
    let alike = |run: &ShardRun, other: &ShardRun| {
        let (a, b) = (matrices(run), matrices(other));
        a.shape == b.shape
            && run.is_stack == other.is_stack
            && (muon.parts.is_empty() || a.layout == b.layout)
    };
    let mut next = 0;
    let batches = runs.chunk_by(alike).map(|runs| {
        let matrices = matrices(&runs[0]);
        let [m, n] = matrices.shape;
        let elements = runs[0].range.start..runs[runs.len() - 1].range.end;
        let count = elements.len() / (m * n);
        let slots = muon.slots(matrices, runs[0].is_stack, dtype);
        let state = Slots::zeros(&slots, [count, m, n], &[count, m, n], dtype, of_states);
        let batch = Batch {
            whole: None,
            runs: next..next + runs.len(),
            elements,
            row: m * n,
            matrices: Some(MatrixRows {
                matrices,
                first,
                parameters: indices(runs, m * n, of_indices),
            }),
            state,
            clocks: Clocks::default(),
        };
        next += runs.len();
        first += count;
        batch
    });
    batches.collect()
}

/// The parameter of every matrix of some runs, on the device.
fn indices(runs: &[ShardRun], matrix: usize, device: &Device) -> Tensor<1, Int> {
    let indices = runs
        .iter()
        .flat_map(|run| std::iter::repeat_n(run.parameter as i32, run.range.len() / matrix));
    Tensor::from_data(TensorData::from(&*indices.collect::<Vec<_>>()), device)
}
