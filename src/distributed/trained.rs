//! The trained parameters: as a model has them, as they are trained, and as a plan sees them.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::module::ParamId;
use burn::optim::join_path;
use burn::tensor::DType;

use crate::blocks::Blocks;
use crate::distributed::plan::{Parameter, Work};
use crate::error::Result;
use crate::parameters::{Found, Placement};
use crate::routing::{ParameterRole, ParameterRoute, Routing, Updates};
use crate::update::{ElementwiseUpdate, Matrices, SKIPPED, Slot, StepSize};

/// A trained parameter of the model.
#[derive(Clone)]
pub struct ModelParameter {
    pub path: String,
    /// Its identity in the model of the last step.
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub placement: Placement,
    /// The mappers of the model's parameter, once it was published at its first use.
    pub mapper: Arc<OnceLock<Box<dyn Any + Send + Sync>>>,
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

/// The trained parameters of a model in its order: as the model has them, as they are trained, and
/// as a plan sees them.
pub fn trained(routing: &Routing, found: &[Found]) -> Result<Trained> {
    let mut all = Trained { model: vec![], trained: vec![], planned: vec![] };
    let found = found.iter().zip(routing.routes());
    for (found, route) in found.filter(|(found, _)| found.trainable) {
        let blocks = route.matrix_blocks()?;
        let first = all.trained.len();
        let is_whole = blocks.count() == 1;
        for (index, (path, batch)) in
            blocks.names(&found.path).into_iter().zip(blocks.batches()).enumerate()
        {
            let (kind, work) = kind(routing, route, batch);
            let shape = if is_whole { found.shape.clone() } else { batch.to_vec() };
            let dtype = found.dtype;
            let placement = found.placement;
            let planned =
                Parameter { path: path.clone(), shape: shape.clone(), dtype, work, placement };
            let block = (!is_whole).then_some(index);
            let model = all.model.len();
            all.trained.push(TrainedParameter { path, model, block, shape, dtype, time: 0, kind });
            all.planned.push(planned);
        }
        all.model.push(ModelParameter {
            path: found.path.clone(),
            id: route.id,
            shape: found.shape.clone(),
            dtype: found.dtype,
            placement: found.placement,
            mapper: Arc::default(),
            blocks,
            trained: first..all.trained.len(),
        });
    }
    Ok(all)
}

/// The trained parameters of a model.
pub struct Trained {
    pub model: Vec<ModelParameter>,
    pub trained: Vec<TrainedParameter>,
    pub planned: Vec<Parameter>,
}

/// The way in which a batch of a parameter is updated.
fn kind(routing: &Routing, route: &ParameterRoute, [count, m, n]: [usize; 3]) -> (Kind, Work) {
    let role = route.role;
    match role {
        ParameterRole::Muon { layout, .. } => {
            let matrices = Matrices { shape: [m, n], layout };
            (Kind::Muon { count, matrices }, Work::Matrices { count, rows: m, columns: n })
        }
        ParameterRole::Embedding
        | ParameterRole::Head
        | ParameterRole::Vector
        | ParameterRole::Frozen => {
            let lr = routing.role_lr(role);
            match route.custom.clone() {
                Some(optimizer) => (Kind::Whole { lr, optimizer }, Work::Whole),
                None => (Kind::Elementwise { lr }, Work::Elements),
            }
        }
    }
}
