//! This rank's part of a bucket: what it remembers, and how it is updated.
//!
//! A share consists of [rows](super::rows), each of one parameter: whole matrices, or [`GRAIN`] elements
//! for AdamW.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::flat;
use super::held::Values;
use super::memory::bytes;
use super::plan::{Bucket, BucketKind, GRAIN, Parameter, Work};
use super::rows::Orders;
use crate::adamw::{self, AdamWSettings, Moments, largest_gradient, moment_dtype};
use crate::clipping::Norms;
use crate::muon::ops::{self, Flagged};
use crate::muon::rule::{self, Settings, momentum_dtype};
use crate::orthogonalize::Kernels;

/// A rank's part of a bucket.
pub struct Shard {
    pub bucket: Bucket,
    /// This rank's part of the bucket's buffer.
    pub range: Range<usize>,
    pub state: State,
    /// The parameters in this rank's part, in order.
    runs: Vec<Run>,
    device: Device,
}

/// Neighbouring elements of a parameter, all of one share.
struct Run {
    /// The number of the parameter.
    number: usize,
    /// Where they are in the parameter.
    elements: Range<usize>,
    /// Where they are in the share. Zeros may follow.
    at: Range<usize>,
}

/// What a rank remembers of its share.
pub enum State {
    Muon { settings: Arc<Settings>, stacks: Vec<Stack> },
    AdamW(Box<Elementwise>),
}

/// What AdamW remembers of a share.
pub struct Elementwise {
    settings: AdamWSettings,
    kernels: Kernels,
    moments: Moments<1>,
}

/// Matrices of one shape, which are updated as a batch.
pub struct Stack {
    /// Their parameters, as places among those of the share.
    runs: Range<usize>,
    /// The flag of the first one among those of all matrices of the rank.
    first: usize,
    /// Their elements of the share.
    elements: Range<usize>,
    shape: [usize; 3],
    momentum: Tensor<3>,
}

/// The rows of a rank, those of one bucket after those of another: for each, the number of its parameter.
#[derive(Default)]
pub struct RowsOf {
    /// What is accepted or refused as a whole: matrices, and [`GRAIN`] elements of what AdamW updates.
    pub all: Vec<usize>,
    /// Only the matrices.
    pub matrices: Vec<usize>,
}

/// What a step has on the device for every parameter, and for all of them.
pub struct Controls {
    /// 1 for parameters that stay as they are, else 0.
    pub left: Tensor<1>,
    /// The corrections of AdamW.
    pub corrections: [Tensor<1>; 2],
    /// What gradients are multiplied by.
    pub factor: Option<Tensor<1>>,
}

impl Shard {
    /// A share whose state is zero. Its rows are added to those that the rank has.
    pub fn new(
        bucket: &Bucket,
        parameters: &[Parameter],
        rank: usize,
        (muon, adamw): (&Arc<Settings>, &AdamWSettings),
        rows: &mut RowsOf,
        device: &Device,
    ) -> Self {
        let range = bucket.share(rank);
        let mut runs = runs(bucket, &range);
        let state = match bucket.kind {
            BucketKind::Matrices => {
                let matrices = matrices(bucket, parameters, &range);
                let first = rows.matrices.len();
                let stacks = stacks(&runs, parameters, first, bucket.dtype, device);
                rows.all.extend(&matrices);
                rows.matrices.extend(matrices);
                State::Muon { settings: muon.clone(), stacks }
            }
            BucketKind::Elements | BucketKind::Replicated => {
                rows.all.extend(grains(bucket, &range));
                // Alike are next to each other, since a launch works on several as if all had the length of the
                // longest, and reads them in vectors only where all can be.
                runs.sort_by_key(|run| (run.at.len() % 8 != 0, Reverse(run.at.len())));
                let zeros = Tensor::zeros([range.len()], (device, moment_dtype(bucket.dtype)));
                let moments = Moments { moment_1: zeros.clone(), moment_2: zeros };
                let (settings, kernels) = (adamw.clone(), muon.newton_schulz.kernels());
                State::AdamW(Box::new(Elementwise { settings, kernels, moments }))
            }
        };
        Self { bucket: bucket.clone(), range, state, runs, device: device.clone() }
    }

    /// The values of this rank's parameters, each where it lies: taken out where the rank has all of it. Zeros for
    /// those that are absent.
    pub fn take(&self, values: &mut Values) -> Vec<Tensor<1>> {
        let each = self.runs.iter().map(|Run { number, elements, .. }| match values.get(*number) {
            None => Tensor::zeros([elements.len()], (&self.device, self.bucket.dtype)),
            Some(whole) if whole.dims() == [elements.len()] => {
                values.take(*number).expect("it is there")
            }
            Some(value) => flat::part(value, elements.clone()),
        });
        each.collect()
    }

    /// The parameters of a share, as parts of its buffer.
    pub fn split(&self, share: &Tensor<1>) -> Vec<Tensor<1>> {
        self.runs.iter().map(|run| flat::part(share, run.at.clone())).collect()
    }

    /// The buffer of a share from its parameters, with zeros in between.
    pub fn pack(&self, parts: Vec<Tensor<1>>) -> Tensor<1> {
        let mut parts: Vec<_> = self.runs.iter().map(|run| run.at.clone()).zip(parts).collect();
        parts.sort_by_key(|(at, _)| at.start);
        let zeros = |length| Tensor::zeros([length], (&self.device, self.bucket.dtype));
        let (mut all, mut end) = (vec![], 0);
        for (at, part) in parts {
            all.extend((at.start > end).then(|| zeros(at.start - end)));
            end = at.end;
            all.push(part);
        }
        all.extend((self.range.len() > end).then(|| zeros(self.range.len() - end)));
        flat::join(all, self.bucket.dtype, &self.device)
    }

    /// The numbers of this rank's parameters, in the order of their values.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        self.runs.iter().map(|run| run.number)
    }

    /// Sets the flags of parameters whose gradients can't be used.
    pub fn refuse(&self, gradients: &[Tensor<1>], flags: Tensor<1>) -> Tensor<1> {
        let (kernels, largest) = match &self.state {
            State::Muon { settings, .. } => (settings.newton_schulz.kernels(), f64::MAX),
            State::AdamW(adamw) => (adamw.kernels, largest_gradient(self.bucket.dtype)),
        };
        let rows: Vec<_> = self.numbers().map(|flag| Flagged { flag, rows: 1 }).collect();
        ops::refuse(kernels, flags, gradients, &rows, largest)
    }

    /// The norms of the gradients of every row, stack by stack.
    pub fn norms(&self, gradients: &[Tensor<1>]) -> Vec<Norms> {
        match &self.state {
            State::Muon { settings, stacks } => {
                let kernels = settings.newton_schulz.kernels();
                let of_stack = |stack: &Stack| {
                    let ([k, m, n], runs) = (stack.shape, &self.runs[stack.runs.clone()]);
                    let first = |run: &Run| (run.at.start - stack.elements.start) / (m * n);
                    let firsts: Vec<_> = runs.iter().map(first).collect();
                    Norms::of_tensors(
                        kernels,
                        &gradients[stack.runs.clone()],
                        &firsts,
                        m * n,
                        k,
                        &self.device,
                    )
                };
                stacks.iter().map(of_stack).collect()
            }
            State::AdamW(_) if self.range.is_empty() => vec![],
            State::AdamW(adamw) => {
                let firsts: Vec<_> = self.runs.iter().map(|run| run.at.start / GRAIN).collect();
                let rows = self.range.len() / GRAIN;
                vec![Norms::of_tensors(
                    adamw.kernels,
                    gradients,
                    &firsts,
                    GRAIN,
                    rows,
                    &self.device,
                )]
            }
        }
    }

    /// Updates this rank's parameters: their new values from the reduced gradients and the old values. Flags of
    /// matrices of which the iteration has made something that is not finite are set in `late`.
    pub fn update(
        &mut self,
        mut gradients: Vec<Tensor<1>>,
        mut values: Vec<Tensor<1>>,
        controls: &Controls,
        orders: &Orders,
        late: &mut Tensor<1>,
    ) -> Vec<Tensor<1>> {
        let runs = &self.runs;
        match &mut self.state {
            State::Muon { settings, stacks } => {
                let stacks = stacks.iter_mut().map(|stack| {
                    let count = stack.runs.len();
                    let gradients = gradients.drain(..count).collect();
                    let values = values.drain(..count).collect();
                    let runs = &runs[stack.runs.clone()];
                    stack.update(settings, runs, (gradients, values), controls, orders, late)
                });
                stacks.collect::<Vec<_>>().concat()
            }
            State::AdamW(adamw) => {
                let Elementwise { settings, kernels, moments } = &mut **adamw;
                let part = |Run { number, at, .. }: &Run| adamw::Part {
                    flag: *number,
                    first: at.start,
                    rates: orders.rates[*number],
                };
                let parts: Vec<_> = runs.iter().map(part).collect();
                let Controls { left, corrections, factor } = controls;
                let controls = adamw::Controls { left, corrections, factor: factor.as_ref() };
                let nothing = Tensor::empty([1], (&self.device, moments.moment_1.dtype()));
                let nothing = Moments { moment_1: nothing.clone(), moment_2: nothing };
                let old = core::mem::replace(moments, nothing);
                let (updated, new) =
                    settings.step(*kernels, values, gradients, old, &controls, &parts);
                *moments = new;
                updated
            }
        }
    }
}

impl Stack {
    fn batch(&self, share: &Tensor<1>) -> Tensor<3> {
        flat::part(share, self.elements.clone()).reshape(self.shape)
    }

    /// Updates the batch: the new values of its parameters.
    fn update(
        &mut self,
        settings: &Settings,
        runs: &[Run],
        (gradients, values): (Vec<Tensor<1>>, Vec<Tensor<1>>),
        Controls { left, factor, .. }: &Controls,
        orders: &Orders,
        late: &mut Tensor<1>,
    ) -> Vec<Tensor<1>> {
        let part = |Run { number, .. }: &Run| rule::Part {
            flag: *number,
            mu: settings.momentum.at(orders.times[*number]),
            rates: orders.rates[*number],
        };
        let parts: Vec<_> = runs.iter().map(part).collect();
        let [_, m, n] = self.shape;
        let device = self.momentum.device();
        let nothing = Tensor::empty([1, m, n], (&device, self.momentum.dtype()));
        let old = core::mem::replace(&mut self.momentum, nothing);
        let (momentum, direction) =
            settings.direction(gradients, old, left, factor.as_ref(), &parts);
        self.momentum = momentum;
        // Out of its place, so that it is written in place.
        let flags = core::mem::replace(late, flat::empty(DType::F32, &device));
        *late = settings.refuse_late(&direction, flags, self.first);
        settings.apply(values, direction, left, (late, self.first), &parts)
    }
}

/// The parameters of a share, neighbours in one run.
fn runs(bucket: &Bucket, share: &Range<usize>) -> Vec<Run> {
    let (mut runs, mut end): (Vec<Run>, usize) = (vec![], 0);
    for (number, elements, padding) in bucket.overlaps(share.clone()) {
        let at = end..end + elements.len();
        end = at.end + padding;
        match runs.last_mut() {
            Some(last)
                if last.number == number
                    && last.elements.end == elements.start
                    && last.at.end == at.start =>
            {
                (last.elements.end, last.at.end) = (elements.end, at.end);
            }
            _ if at.is_empty() => {}
            _ => runs.push(Run { number, elements, at }),
        }
    }
    runs
}

/// The parameter of every matrix of a share, in order.
fn matrices(bucket: &Bucket, parameters: &[Parameter], share: &Range<usize>) -> Vec<usize> {
    let matrices = |(number, elements, _): (usize, Range<usize>, usize)| {
        let [m, n] = matrix_shape(&parameters[number]);
        std::iter::repeat_n(number, elements.len() / (m * n))
    };
    bucket.overlaps(share.clone()).flat_map(matrices).collect()
}

fn matrix_shape(parameter: &Parameter) -> [usize; 2] {
    match parameter.work {
        Work::Matrices { rows, columns, .. } => [rows, columns],
        Work::Elements => unreachable!("a bucket of matrices"),
    }
}

/// The parameters as batches of one shape; their flags follow those before `first`.
fn stacks(
    runs: &[Run],
    parameters: &[Parameter],
    mut first: usize,
    dtype: DType,
    device: &Device,
) -> Vec<Stack> {
    let shape = |run: &Run| matrix_shape(&parameters[run.number]);
    let mut next = 0;
    let stacks = runs.chunk_by(|a, b| shape(a) == shape(b)).map(|alike| {
        let [m, n] = shape(&alike[0]);
        let elements = alike[0].at.start..alike[alike.len() - 1].at.end;
        let shape = [elements.len() / (m * n), m, n];
        let momentum = Tensor::zeros(shape, (device, momentum_dtype(dtype)));
        let (of_stack, first_flag) = (next..next + alike.len(), first);
        next = of_stack.end;
        first += shape[0];
        Stack { runs: of_stack, first: first_flag, elements, shape, momentum }
    });
    stacks.collect()
}

/// For every grain of a share, the number of its parameter.
fn grains(bucket: &Bucket, share: &Range<usize>) -> Vec<usize> {
    let parts = bucket.overlaps(share.clone());
    let numbers = parts.flat_map(|(number, elements, padding)| {
        std::iter::repeat_n(number, (elements.len() + padding) / GRAIN)
    });
    numbers.collect()
}

/// The state as records and reports see it.
impl Shard {
    /// The names of [`state_vectors`](Self::state_vectors) in records.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self.state {
            State::Muon { .. } => &["momentum"],
            State::AdamW(_) => &["moment_1", "moment_2"],
        }
    }

    /// The type of [`state_vectors`](Self::state_vectors).
    pub fn state_dtype(&self) -> DType {
        match self.state {
            State::Muon { .. } => momentum_dtype(self.bucket.dtype),
            State::AdamW(_) => moment_dtype(self.bucket.dtype),
        }
    }

    /// The state as flat vectors over the share.
    pub fn state_vectors(&self) -> Vec<Tensor<1>> {
        match &self.state {
            State::Muon { stacks, .. } => {
                let momenta = stacks.iter().map(|stack| stack.momentum.clone().reshape([-1]));
                vec![flat::join(momenta.collect(), self.state_dtype(), &self.device)]
            }
            State::AdamW(adamw) => {
                let Moments { moment_1, moment_2 } = adamw.moments.clone();
                vec![moment_1, moment_2]
            }
        }
    }

    /// Bytes of the state.
    pub fn state_bytes(&self) -> usize {
        match &self.state {
            State::Muon { stacks, .. } => stacks.iter().map(|stack| bytes(&stack.momentum)).sum(),
            State::AdamW(adamw) => bytes(&adamw.moments.moment_1) + bytes(&adamw.moments.moment_2),
        }
    }

    /// Sets what [`state_vectors`](Self::state_vectors) returns, in its order.
    pub fn set_state_vectors(&mut self, mut vectors: Vec<Tensor<1>>) {
        match &mut self.state {
            State::Muon { stacks, .. } => {
                for stack in stacks {
                    stack.momentum = stack.batch(&vectors[0]);
                }
            }
            State::AdamW(adamw) => {
                let moment_2 = vectors.swap_remove(1);
                adamw.moments = Moments { moment_1: vectors.swap_remove(0), moment_2 };
            }
        }
    }
}
