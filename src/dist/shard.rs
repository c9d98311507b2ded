//! This rank's part of a bucket: what it remembers, and how it is updated.
//!
//! A share consists of rows, each of one parameter: whole matrices, or [`GRAIN`] elements for AdamW.
//! Whatever is known per parameter, in vectors over the bucket's parameters, is spread to the rows.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};

use super::flat;
use super::memory::bytes;
use super::plan::{Bucket, BucketKind, GRAIN, Parameter, Work};
use crate::adamw::{AdamWSettings, Moments, Rows, moment_dtype};
use crate::gate::{Gate, spread};
use crate::muon::{ops, rule::Rates, rule::Settings};
use crate::orthogonalize::Kernels;

/// A rank's part of a bucket.
pub struct Shard {
    pub bucket: Bucket,
    /// The own part of the bucket's buffer.
    pub range: Range<usize>,
    /// For every row, the place of its parameter in the bucket.
    places: Tensor<1, Int>,
    pub state: State,
    /// How often each parameter was left untouched because its gradient was not finite.
    pub skipped: Tensor<1>,
    device: Device,
}

/// What a rank remembers of its share.
pub enum State {
    Muon { settings: Arc<Settings>, stacks: Vec<Stack> },
    AdamW(Box<Elementwise>),
}

/// What AdamW remembers of rows.
pub struct Elementwise {
    pub settings: AdamWSettings,
    kernels: Kernels,
    moments: Moments<2>,
    /// For every parameter of the bucket, the same on all ranks.
    corrections: [Tensor<1>; 2],
}

/// Matrices of one shape, which are updated as a batch.
pub struct Stack {
    /// Their rows of the share.
    rows: Range<usize>,
    /// Their elements of the share.
    elements: Range<usize>,
    shape: [usize; 3],
    momentum: Tensor<3>,
}

/// What is decided for a bucket's parameters in a step; one value each.
pub struct Verdict {
    pub accepted: Tensor<1>,
    pub refused: Tensor<1>,
}

impl Verdict {
    /// Of how many rows of each parameter are refused, and on how many ranks it has a gradient.
    pub fn new(refused: Tensor<1>, present: Tensor<1>) -> Self {
        let fine = refused.clone().equal_elem(0.0).float().cast(FloatDType::F32);
        let there = present.greater_elem(0.0).float().cast(FloatDType::F32);
        Self { accepted: fine * there, refused }
    }
}

impl Shard {
    /// A share whose state is zero.
    pub fn new(
        bucket: &Bucket,
        parameters: &[Parameter],
        rank: usize,
        (muon, adamw): (&Arc<Settings>, &AdamWSettings),
        device: &Device,
    ) -> Self {
        let range = bucket.share(rank);
        let (places, state) = match bucket.kind {
            BucketKind::Matrices => {
                let matrices = matrices(bucket, parameters, &range);
                let state = State::Muon {
                    settings: muon.clone(),
                    stacks: stacks(&matrices, bucket.dtype, device),
                };
                (matrices.into_iter().map(|(place, _)| place).collect(), state)
            }
            BucketKind::Elements | BucketKind::Replicated => {
                let places = grains(bucket, &range);
                let dtype = moment_dtype(bucket.dtype);
                let zeros = Tensor::zeros([places.len(), GRAIN], (device, dtype));
                let moments = Moments { moment_1: zeros.clone(), moment_2: zeros };
                let corrections = [(); 2].map(|()| per_parameter(bucket, device));
                let (settings, kernels) = (adamw.clone(), muon.newton_schulz.kernels());
                let adamw = Elementwise { settings, kernels, moments, corrections };
                (places, State::AdamW(Box::new(adamw)))
            }
        };
        let indices: Vec<i32> = places.iter().map(|place| *place as i32).collect();
        Self {
            bucket: bucket.clone(),
            range,
            places: Tensor::from_data(TensorData::from(&*indices), device),
            state,
            skipped: per_parameter(bucket, device),
            device: device.clone(),
        }
    }

    /// Rows of the share.
    pub fn rows(&self) -> usize {
        self.places.dims()[0]
    }

    /// For every row, 1 if its gradients are finite and 0 otherwise.
    pub fn finite(&self, gradients: &Tensor<1>) -> Gate {
        let per_stack = match &self.state {
            State::Muon { settings, stacks } => stacks
                .iter()
                .map(|stack| {
                    ops::finite(settings.newton_schulz.kernels(), &stack.batch(gradients))
                        .accepted()
                })
                .collect(),
            State::AdamW(_) if self.rows() == 0 => vec![],
            State::AdamW(adamw) => {
                let rows = gradients.clone().reshape([self.rows(), 1, GRAIN]);
                vec![ops::finite(adamw.kernels, &rows).accepted()]
            }
        };
        Gate::from_accepted(flat::join(per_stack, DType::F32, &self.device))
    }

    /// For every row, the sum of the squares of its gradients.
    pub fn squares(&self, gradients: &Tensor<1>) -> Tensor<1> {
        let sums = |rows: Tensor<2>| {
            let [count, _] = rows.dims();
            rows.cast(FloatDType::F32).square().sum_dim(1).reshape([count])
        };
        let per_stack = match &self.state {
            State::Muon { stacks, .. } => stacks
                .iter()
                .map(|stack| {
                    let [k, m, n] = stack.shape;
                    sums(stack.batch(gradients).reshape([k, m * n]))
                })
                .collect(),
            State::AdamW(_) if self.rows() == 0 => vec![],
            State::AdamW(_) => vec![sums(grain_rows(gradients.clone()))],
        };
        flat::join(per_stack, DType::F32, &self.device)
    }

    /// For every parameter of the bucket, how many of the own rows are refused.
    pub fn refused(&self, rows: &Gate) -> Tensor<1> {
        let none = per_parameter(&self.bucket, &self.device);
        if self.rows() == 0 {
            return none;
        }
        let refused = rows.count(Tensor::zeros([self.rows()], (&self.device, DType::F32)));
        none.select_assign(0, self.places.clone(), refused, IndexingUpdateOp::Add)
    }

    /// One value per row from one per parameter.
    pub fn by_row(&self, values: Tensor<1>) -> Tensor<1> {
        values.select(0, self.places.clone())
    }

    /// Updates the own share: its new values from the reduced gradients and the old values. The rates
    /// are one per parameter; `clip` is what gradients are multiplied by, if anything.
    pub fn update(
        &mut self,
        gradients: Tensor<1>,
        values: Tensor<1>,
        verdict: Verdict,
        rates: &Rates,
        clip: Option<&Tensor<1>>,
        time: usize,
    ) -> Tensor<1> {
        self.skipped = self.skipped.clone() + verdict.refused.clone().greater_elem(0.0).float();
        let gate = Gate::from_accepted(verdict.accepted);
        if let State::AdamW(adamw) = &mut self.state {
            adamw.corrections = adamw.settings.correct(adamw.corrections.clone(), &gate);
        }
        if self.rows() == 0 {
            return values;
        }
        let gate = Gate::from_accepted(self.by_row(gate.accepted()));
        let rates =
            Rates { keep: self.by_row(rates.keep.clone()), lr: self.by_row(rates.lr.clone()) };
        let gradients = match clip {
            Some(clip) => {
                let clip = spread(clip.clone().cast(gradients.dtype()).expand([1]), &gradients);
                gradients * clip
            }
            None => gradients,
        };
        let places = self.places.clone();
        match &mut self.state {
            State::Muon { settings, stacks } => {
                let mut updated = Vec::new();
                for stack in stacks {
                    updated.push(stack.update(settings, time, &gradients, &values, &gate, &rates));
                }
                flat::join(updated, self.bucket.dtype, &self.device)
            }
            State::AdamW(adamw) => {
                let Elementwise { settings, kernels, moments, corrections } = &mut **adamw;
                let corrections = corrections.clone().map(|c| c.select(0, places.clone()));
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

    fn update(
        &mut self,
        settings: &Settings,
        time: usize,
        gradients: &Tensor<1>,
        values: &Tensor<1>,
        gate: &Gate,
        rates: &Rates,
    ) -> Tensor<1> {
        let own = |rows: &Tensor<1>| flat::part(rows, self.rows.clone());
        let gate = Gate::from_accepted(own(&gate.accepted()));
        let rates = Rates { keep: own(&rates.keep), lr: own(&rates.lr) };
        let (gradients, values) = (self.batch(gradients), self.batch(values));
        let [_, m, n] = self.shape;
        let nothing = Tensor::empty([1, m, n], (&values.device(), values.dtype()));
        let old = core::mem::replace(&mut self.momentum, nothing);
        let (updated, momentum) = settings.step(time, values, gradients, old, &gate, &rates);
        self.momentum = momentum;
        updated.reshape([-1])
    }
}

/// One value per parameter of a bucket: zero.
fn per_parameter(bucket: &Bucket, device: &Device) -> Tensor<1> {
    Tensor::zeros([bucket.parameters.len()], (device, DType::F32))
}

fn grain_rows(share: Tensor<1>) -> Tensor<2> {
    let rows = share.dims()[0] / GRAIN;
    share.reshape([rows, GRAIN])
}

/// The matrices of a share in order: the place of the parameter in the bucket, and the shape.
fn matrices(
    bucket: &Bucket,
    parameters: &[Parameter],
    share: &Range<usize>,
) -> Vec<(usize, [usize; 2])> {
    let pieces = bucket.overlaps(share.clone());
    let matrix = |(number, ..): (usize, Range<usize>, usize)| match parameters[number].work {
        Work::Matrices { rows, columns, .. } => (place(bucket, number), [rows, columns]),
        Work::Elements => unreachable!("a bucket of matrices"),
    };
    pieces.map(matrix).collect()
}

fn stacks(matrices: &[(usize, [usize; 2])], dtype: DType, device: &Device) -> Vec<Stack> {
    let (mut row, mut element) = (0, 0);
    let alike = matrices.chunk_by(|(_, a), (_, b)| a == b);
    let stacks = alike.map(|alike| {
        let (count, [m, n]) = (alike.len(), alike[0].1);
        let (rows, elements) = (row..row + count, element..element + count * m * n);
        (row, element) = (rows.end, elements.end);
        let shape = [count, m, n];
        Stack { rows, elements, shape, momentum: Tensor::zeros(shape, (device, dtype)) }
    });
    stacks.collect()
}

/// For every grain of a share, the place of its parameter in the bucket.
fn grains(bucket: &Bucket, share: &Range<usize>) -> Vec<usize> {
    let parts = bucket.overlaps(share.clone());
    let places = parts.flat_map(|(number, elements, padding)| {
        std::iter::repeat_n(place(bucket, number), (elements.len() + padding) / GRAIN)
    });
    places.collect()
}

fn place(bucket: &Bucket, number: usize) -> usize {
    bucket.parameters.iter().position(|of| *of == number).expect("of the bucket")
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
            State::Muon { .. } => self.bucket.dtype,
            State::AdamW(_) => moment_dtype(self.bucket.dtype),
        }
    }

    /// The state as flat vectors over the share.
    pub fn state_vectors(&self) -> Vec<Tensor<1>> {
        match &self.state {
            State::Muon { stacks, .. } => {
                let momenta = stacks.iter().map(|stack| stack.momentum.clone().reshape([-1]));
                vec![flat::join(momenta.collect(), self.bucket.dtype, &self.device)]
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

    /// What is known per parameter of the bucket, by the names it has in records.
    pub fn counters(&mut self) -> Vec<(&'static str, &mut Tensor<1>)> {
        let mut counters = vec![("skipped", &mut self.skipped)];
        if let State::AdamW(adamw) = &mut self.state {
            let [first, second] = &mut adamw.corrections;
            counters.push(("correction_1", first));
            counters.push(("correction_2", second));
        }
        counters
    }
}
