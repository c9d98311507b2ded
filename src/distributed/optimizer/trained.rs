//! The trained parameters, as the optimizer knows them.

use std::ops::Range;

use burn::module::ParamId;
use burn::optim::join_path;
use burn::tensor::DType;

use crate::blocks::Blocks;
use crate::routing::Updates;
use crate::update::{ElementwiseUpdate, Matrices, SKIPPED, Slot, StepSize};

/// A trained parameter of the model.
pub struct ModelParameter {
    pub path: String,
    /// Its identity in the model of the last step.
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// The blocks that are trained each as a parameter of its own, and their indices.
    pub blocks: Blocks,
    pub trained: Range<usize>,
}

/// A parameter as it is trained: a parameter of the model, or a block of it.
pub struct TrainedParameter {
    /// The path in the model, with the range of a block.
    pub path: String,
    /// Index of the model's parameter.
    pub model: usize,
    /// Index of the block among those of the model's parameter, unless it is the only one.
    pub block: Option<usize>,
    /// Its shape: that in the model, or a batch of matrices for a block.
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// Steps in which it had a gradient on any rank: its position in the schedules.
    pub time: usize,
    pub kind: Kind,
}

/// The way in which a parameter is updated.
#[derive(Clone)]
pub enum Kind {
    /// As `count` matrices, by Muon.
    Muon { count: usize, matrices: Matrices },
    /// Element by element, at `lr` times the learning rate.
    Elementwise { lr: f64 },
    /// By the user's optimizer of a name, at `lr` times the learning rate.
    Whole { lr: f64, optimizer: String },
}

impl TrainedParameter {
    /// The name in the records of the model's parameter.
    pub fn recorded(&self, name: &str) -> String {
        match self.block {
            Some(block) => join_path(&block.to_string(), name),
            None => name.to_owned(),
        }
    }

    /// The parameter as a batch.
    pub fn batch(&self) -> [usize; 3] {
        match self.kind {
            Kind::Muon { count, matrices: Matrices { shape: [m, n], .. } } => [count, m, n],
            Kind::Elementwise { .. } | Kind::Whole { .. } => ElementwiseUpdate::batch(&self.shape),
        }
    }

    /// The slots that are sharded: those of elements, rows, columns and matrices.
    pub fn slots(&self, updates: &Updates) -> Vec<Slot> {
        match self.kind {
            Kind::Muon { matrices, .. } => updates.muon.slots(matrices, self.dtype),
            Kind::Elementwise { .. } => updates.rest.slots(self.dtype),
            Kind::Whole { .. } => updates.rest.precision.slots(self.dtype).into_iter().collect(),
        }
    }

    /// The slots of whole parameters, which every rank has.
    pub fn counters(&self, updates: &Updates) -> Vec<Slot> {
        let corrections = match self.kind {
            Kind::Muon { .. } | Kind::Whole { .. } => &[],
            Kind::Elementwise { .. } => updates.rest.rule.corrections(),
        };
        [&[SKIPPED], corrections].concat()
    }

    /// The size of its next step.
    pub fn size(&self, lr: f64, updates: &Updates) -> StepSize {
        match self.kind {
            Kind::Muon { matrices, .. } => updates.muon.size(lr, matrices, self.time),
            Kind::Elementwise { lr: role } => updates.rest.size(lr, role),
            // The decay is the optimizer's own.
            Kind::Whole { lr: role, .. } => StepSize::decoupled(lr * role, 0.0),
        }
    }
}
