//! The trained parameters, as the optimizer knows them.

use burn::module::ParamId;

use super::counters::COUNTERS;
use crate::update::{AdamWUpdate, Matrices, MuonUpdate, SKIPPED, Slot, StepSize};

/// A trained parameter.
pub struct TrainedParameter {
    pub path: String,
    /// Its identity in the model of the last step.
    pub id: ParamId,
    /// Its shape in the model.
    pub shape: Vec<usize>,
    /// Steps in which it had a gradient on any rank: its position in the schedules.
    pub time: usize,
    pub kind: Kind,
}

/// The way in which a parameter is updated.
#[derive(Clone, Copy)]
pub enum Kind {
    /// As `count` matrices, by Muon.
    Muon { count: usize, matrices: Matrices },
    /// Element by element, by AdamW, at `lr` times the learning rate.
    AdamW { lr: f64 },
}

impl TrainedParameter {
    /// The parameter as a batch.
    pub fn batch(&self) -> [usize; 3] {
        match self.kind {
            Kind::Muon { count, matrices: Matrices { shape: [m, n], .. } } => [count, m, n],
            Kind::AdamW { .. } => AdamWUpdate::batch(&self.shape),
        }
    }

    /// The slots that are sharded: those of elements, rows, columns and matrices.
    pub fn slots(&self, muon: &MuonUpdate) -> Vec<Slot> {
        match self.kind {
            Kind::Muon { matrices, .. } => muon.slots(matrices),
            Kind::AdamW { .. } => AdamWUpdate::SLOTS.to_vec(),
        }
    }

    /// The slots of whole parameters, which every rank has.
    pub fn counters(&self) -> &'static [Slot] {
        match self.kind {
            Kind::Muon { .. } => &[SKIPPED],
            Kind::AdamW { .. } => &COUNTERS,
        }
    }

    /// The size of its next step.
    pub fn size(&self, lr: f64, muon: &MuonUpdate, adamw: &AdamWUpdate) -> StepSize {
        match self.kind {
            Kind::Muon { matrices, .. } => muon.size(lr, matrices, self.time),
            Kind::AdamW { lr: role } => adamw.size(lr, role),
        }
    }
}
