//! This rank's part of a bucket: what it remembers, and how it is updated.
//!
//! A share consists of [rows](super::rows), each of one parameter: whole matrices, or [`GRAIN`] elements
//! for AdamW.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::flat;
use super::memory::bytes;
use super::plan::{Bucket, BucketKind, GRAIN, Parameter, Work};
use super::rows::RowValues;
use crate::adamw::{AdamWSettings, Moments, Rows, largest_gradient, moment_dtype};
use crate::clipping::{self, Norms};
use crate::gate::Gate;
use crate::muon::ops;
use crate::muon::rule::{Settings, Stepped, momentum_dtype};
use crate::orthogonalize::Kernels;

/// A rank's part of a bucket.
pub struct Shard {
    pub bucket: Bucket,
    /// This rank's part of the bucket's buffer.
    pub range: Range<usize>,
    /// The part's rows among all that the rank has.
    pub rows: Range<usize>,
    pub state: State,
    /// For every row, 1 if the iteration made something of the last step's momentum that is not finite. It
    /// is counted with what the next step refuses, since no rank waits for another while it updates.
    pub late: Tensor<1>,
    device: Device,
}

/// What a rank remembers of its share.
pub enum State {
    Muon { settings: Arc<Settings>, stacks: Vec<Stack> },
    AdamW(Box<Elementwise>),
}

/// What AdamW remembers of rows.
pub struct Elementwise {
    settings: AdamWSettings,
    kernels: Kernels,
    moments: Moments<2>,
}

/// Matrices of one shape, which are updated as a batch.
pub struct Stack {
    /// The numbers of their parameters.
    parameters: Vec<usize>,
    /// Their rows among all that the rank has.
    rows: Range<usize>,
    /// Their elements of the share.
    elements: Range<usize>,
    shape: [usize; 3],
    momentum: Tensor<3>,
}

impl Shard {
    /// A share whose state is zero. The numbers of its rows' parameters are added to `rows`.
    pub fn new(
        bucket: &Bucket,
        parameters: &[Parameter],
        rank: usize,
        (muon, adamw): (&Arc<Settings>, &AdamWSettings),
        rows: &mut Vec<usize>,
        device: &Device,
    ) -> Self {
        let range = bucket.share(rank);
        let first = rows.len();
        let state = match bucket.kind {
            BucketKind::Matrices => {
                let matrices = matrices(bucket, parameters, &range);
                let stacks = stacks(&matrices, first, bucket.dtype, device);
                rows.extend(matrices.into_iter().map(|(number, _)| number));
                State::Muon { settings: muon.clone(), stacks }
            }
            BucketKind::Elements | BucketKind::Replicated => {
                rows.extend(grains(bucket, &range));
                let dtype = moment_dtype(bucket.dtype);
                let zeros = Tensor::zeros([rows.len() - first, GRAIN], (device, dtype));
                let moments = Moments { moment_1: zeros.clone(), moment_2: zeros };
                let (settings, kernels) = (adamw.clone(), muon.newton_schulz.kernels());
                State::AdamW(Box::new(Elementwise { settings, kernels, moments }))
            }
        };
        let rows = first..rows.len();
        let late = Tensor::zeros([rows.len()], (device, DType::F32));
        Self { bucket: bucket.clone(), range, rows, state, late, device: device.clone() }
    }

    /// For every row, 1 if its gradients can be used and 0 otherwise.
    pub fn finite(&self, gradients: &Tensor<1>) -> Tensor<1> {
        let per_stack = match &self.state {
            State::Muon { settings, stacks } => stacks
                .iter()
                .map(|stack| {
                    let batch = stack.batch(gradients);
                    ops::finite(settings.newton_schulz.kernels(), &batch, f64::MAX).accepted()
                })
                .collect(),
            State::AdamW(_) if self.rows.is_empty() => vec![],
            State::AdamW(adamw) => {
                let rows = gradients.clone().reshape([self.rows.len(), 1, GRAIN]);
                let largest = largest_gradient(self.bucket.dtype);
                vec![ops::finite(adamw.kernels, &rows, largest).accepted()]
            }
        };
        flat::join(per_stack, DType::F32, &self.device)
    }

    /// The norms of the gradients of every row, stack by stack.
    pub fn norms(&self, gradients: &Tensor<1>) -> Vec<Norms> {
        match &self.state {
            State::Muon { stacks, .. } => {
                let rows = stacks.iter().map(|stack| {
                    let [k, m, n] = stack.shape;
                    Norms::of_rows(stack.batch(gradients).reshape([k, m * n]))
                });
                rows.collect()
            }
            State::AdamW(_) if self.rows.is_empty() => vec![],
            State::AdamW(_) => vec![Norms::of_rows(grain_rows(gradients.clone()))],
        }
    }

    /// Updates this rank's share: its new values from the reduced gradients and the old values. `clip` is
    /// what gradients are multiplied by, if anything; `times` are the steps that every parameter has taken.
    pub fn update(
        &mut self,
        gradients: Tensor<1>,
        values: Tensor<1>,
        rows: &RowValues,
        clip: Option<&Tensor<1>>,
        times: &[usize],
    ) -> Tensor<1> {
        if self.rows.is_empty() {
            return values;
        }
        let gradients = match clip {
            Some(clip) => clipping::scaled(gradients, clip.clone()),
            None => gradients,
        };
        match &mut self.state {
            State::Muon { settings, stacks } => {
                let (mut updated, mut late) = (vec![], vec![]);
                for stack in stacks {
                    let new = stack.update(settings, &gradients, &values, rows, times);
                    updated.push(new.0);
                    late.push(new.1);
                }
                self.late = flat::join(late, DType::F32, &self.device);
                flat::join(updated, self.bucket.dtype, &self.device)
            }
            State::AdamW(adamw) => {
                let Elementwise { settings, kernels, moments } = &mut **adamw;
                let gate = Gate::from_accepted(rows.accepted(&self.rows));
                let rates = rows.rates(&self.rows);
                let corrections = rows.corrections(&self.rows);
                let rows = Rows { gate, rates, corrections };
                let (gradients, values) = (grain_rows(gradients), grain_rows(values));
                let dtype = moments.moment_1.dtype();
                let nothing = Tensor::empty([1, GRAIN], (&self.device, dtype));
                let nothing = Moments { moment_1: nothing.clone(), moment_2: nothing };
                let old = core::mem::replace(moments, nothing);
                let (updated, new) = settings.step(*kernels, values, gradients, old, &rows);
                *moments = new;
                updated.reshape([-1])
            }
        }
    }
}

impl Stack {
    fn batch(&self, share: &Tensor<1>) -> Tensor<3> {
        flat::part(share, self.elements.clone()).reshape(self.shape)
    }

    /// Updates the batch: its new values, and for every matrix 1 if the iteration has made something that is
    /// not finite. In parts, where the schedule of the momentum is not at the same place for all of its
    /// matrices.
    fn update(
        &mut self,
        settings: &Settings,
        gradients: &Tensor<1>,
        values: &Tensor<1>,
        rows: &RowValues,
        times: &[usize],
    ) -> (Tensor<1>, Tensor<1>) {
        let (gradients, values) = (self.batch(gradients), self.batch(values));
        let [_, m, n] = self.shape;
        let nothing = Tensor::empty([1, m, n], (&values.device(), self.momentum.dtype()));
        let old = core::mem::replace(&mut self.momentum, nothing);
        let momentum = |number: &usize| settings.momentum.at(times[*number]);
        let runs: Vec<usize> = self
            .parameters
            .chunk_by(|a, b| momentum(a) == momentum(b))
            .map(<[usize]>::len)
            .collect();
        let parts = [gradients, values, old].map(|batch| split(batch, &runs));
        let [gradients, values, old] = parts.map(Vec::into_iter);
        let mut first = self.rows.start;
        let (mut updated, mut momenta, mut late) = (vec![], vec![], vec![]);
        for ((gradients, values), old) in gradients.zip(values).zip(old) {
            let run = first..first + gradients.dims()[0];
            let time = times[self.parameters[first - self.rows.start]];
            first = run.end;
            let gate = Gate::from_accepted(rows.accepted(&run));
            let rates = rows.rates(&run);
            let stepped = settings.step(time, values, gradients, old, &gate, &rates);
            let Stepped { parameters, momentum, updated: taken } = stepped;
            updated.push(parameters);
            momenta.push(momentum);
            late.push(gate.accepted() - taken.accepted());
        }
        self.momentum = join(momenta);
        (join(updated).reshape([-1]), Tensor::cat(late, 0))
    }
}

/// A batch as batches of so many matrices.
fn split(batch: Tensor<3>, runs: &[usize]) -> Vec<Tensor<3>> {
    match runs {
        // As it is, so that it can be written in place.
        [_] => vec![batch],
        _ => batch.split_with_sizes(runs.to_vec(), 0),
    }
}

/// The reverse of [`split`].
fn join(mut batches: Vec<Tensor<3>>) -> Tensor<3> {
    match batches.len() {
        1 => batches.swap_remove(0),
        _ => Tensor::cat(batches, 0),
    }
}

fn grain_rows(share: Tensor<1>) -> Tensor<2> {
    let rows = share.dims()[0] / GRAIN;
    share.reshape([rows, GRAIN])
}

/// The matrices of a share in order: the number of the parameter, and the shape.
fn matrices(
    bucket: &Bucket,
    parameters: &[Parameter],
    share: &Range<usize>,
) -> Vec<(usize, [usize; 2])> {
    let pieces = bucket.overlaps(share.clone());
    let matrix = |(number, ..): (usize, Range<usize>, usize)| match parameters[number].work {
        Work::Matrices { rows, columns, .. } => (number, [rows, columns]),
        Work::Elements => unreachable!("a bucket of matrices"),
    };
    pieces.map(matrix).collect()
}

/// The matrices as batches of one shape; their rows follow those before `first`.
fn stacks(
    matrices: &[(usize, [usize; 2])],
    first: usize,
    dtype: DType,
    device: &Device,
) -> Vec<Stack> {
    let (mut row, mut element) = (first, 0);
    let alike = matrices.chunk_by(|(_, a), (_, b)| a == b);
    let stacks = alike.map(|alike| {
        let (count, [m, n]) = (alike.len(), alike[0].1);
        let (rows, elements) = (row..row + count, element..element + count * m * n);
        (row, element) = (rows.end, elements.end);
        let shape = [count, m, n];
        let momentum = Tensor::zeros(shape, (device, momentum_dtype(dtype)));
        let parameters = alike.iter().map(|(number, _)| *number).collect();
        Stack { parameters, rows, elements, shape, momentum }
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
                vec![moment_1.reshape([-1]), moment_2.reshape([-1])]
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
                adamw.moments.moment_2 = grain_rows(vectors.swap_remove(1));
                adamw.moments.moment_1 = grain_rows(vectors.swap_remove(0));
            }
        }
    }
}
