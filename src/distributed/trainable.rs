//! The parameters to be trained: as a model has them, as they are trained, and as a plan sees them.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::module::ParamId;
use burn::optim::join_path;
use burn::tensor::DType;

use crate::distributed::plan::{Parameter, Slice, Slices, Work};
use crate::distributed::sliced_parameters::Cuts;
use crate::error::Result;
use crate::matrix_blocks::Blocks;
use crate::parameters::{Found, Placement};
use crate::routing::{ParameterRole, ParameterRoute, Routing, Updates};
use crate::update::{ELEMENTS, ElementwiseUpdate, Matrices, RoleSettings, SKIPPED, Slot, StepSize};

/// A trained parameter of the model.
#[derive(Clone)]
pub struct ModelParameter {
    pub path: String,
    /// The parameter's identity in the model of the last step.
    pub id: ParamId,
    /// The shape that this rank has: of the whole, or of its slice.
    pub shape: Vec<usize>,
    /// The slice with which this rank computes, if the parameter is cut.
    pub slice: Option<Slice>,
    /// The factor on the mean of its gradients over the ranks that have the same slice.
    pub gradient_factor: f64,
    pub dtype: DType,
    pub placement: Placement,
    /// The mappers of the model's parameter, once it was published at its first use.
    pub mapper: Arc<OnceLock<Box<dyn Any + Send + Sync>>>,
    /// The blocks that are trained each as a parameter of its own, and their indices.
    pub blocks: Blocks,
    /// The parts of the blocks that this rank has.
    pub held: Blocks,
    /// The indices of its blocks as they are trained; none for a frozen one.
    pub trainable: Range<usize>,
}

/// A parameter as it is trained: a parameter of the model, or a block of it.
pub struct TrainableParameter {
    /// The path in the model, with the range of a block.
    pub path: String,
    /// Index of the model's parameter.
    pub model: usize,
    /// Index of the block in the model's parameter, unless it is the only one.
    pub block: Option<usize>,
    /// The shape in the model, or a batch of matrices for a block.
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// Steps in which it had a gradient on any rank: its position in the schedules, or the position
    /// of a stack's matrices with a gradient in each of them.
    pub time: usize,
    pub kind: UpdateKind,
}

/// The way in which a parameter is updated.
#[derive(Clone)]
pub enum UpdateKind {
    /// As `count` matrices, by Muon's update of an index.
    Muon { count: usize, matrices: Matrices, settings: usize },
    /// Element by element, with the factors of its role, by the update of an index.
    Elementwise { role: RoleSettings, settings: usize },
    /// By the user's optimizer of a name, at `lr` times the learning rate.
    Whole { lr: f64, optimizer: String },
}

impl UpdateKind {
    /// The index of the update among updates of its kind.
    pub fn settings(&self) -> usize {
        match self {
            Self::Muon { settings, .. } | Self::Elementwise { settings, .. } => *settings,
            // The update of every parameter is its optimizer's.
            Self::Whole { .. } => 0,
        }
    }
}

impl TrainableParameter {
    /// The name in the records of the model's parameter.
    pub fn recorded(&self, name: &str) -> String {
        match (self.block, &self.kind) {
            (Some(block), UpdateKind::Elementwise { .. }) => {
                join_path(&block.to_string(), &join_path(ELEMENTS, name))
            }
            (Some(block), _) => join_path(&block.to_string(), name),
            (None, _) => name.to_owned(),
        }
    }

    /// The parameter as a batch.
    pub fn batch(&self) -> [usize; 3] {
        match self.kind {
            UpdateKind::Muon { count, matrices: Matrices { shape: [m, n], .. }, .. } => {
                [count, m, n]
            }
            UpdateKind::Elementwise { .. } | UpdateKind::Whole { .. } => {
                ElementwiseUpdate::batch(&self.shape)
            }
        }
    }

    /// Returns `true` for several matrices, each of which may be without a gradient.
    pub fn is_stack(&self) -> bool {
        matches!(self.kind, UpdateKind::Muon { count: 2.., .. })
    }

    /// The slots that are sharded: one value per element, row, column or matrix.
    pub fn slots(&self, updates: &Updates) -> Vec<Slot> {
        match self.kind {
            UpdateKind::Muon { matrices, settings, .. } => {
                updates.muon[settings].slots(matrices, self.is_stack(), self.dtype)
            }
            UpdateKind::Elementwise { settings, .. } => updates.rest[settings].slots(self.dtype),
            UpdateKind::Whole { .. } => updates.precision().slots(self.dtype).into_iter().collect(),
        }
    }

    /// The slots of whole parameters, which every rank has.
    pub fn counters(&self, updates: &Updates) -> Vec<Slot> {
        let corrections = match self.kind {
            UpdateKind::Muon { .. } | UpdateKind::Whole { .. } => &[],
            UpdateKind::Elementwise { settings, .. } => updates.rest[settings].rule.corrections(),
        };
        [&[SKIPPED], corrections].concat()
    }

    /// The size of its next step.
    pub fn size(&self, lr: f64, updates: &Updates) -> StepSize {
        match self.kind {
            UpdateKind::Muon { matrices, settings, .. } => {
                updates.muon[settings].size(lr, matrices, self.time)
            }
            UpdateKind::Elementwise { role, settings } => updates.rest[settings].size(lr, role),
            // The decay is the optimizer's own.
            UpdateKind::Whole { lr: role, .. } => StepSize::decoupled(lr * role, 0.0),
        }
    }
}

/// The trained parameters of a model in its order: as the model has them, as they are trained, and
/// as a plan sees them. `found` has the shapes of whole parameters, and `cuts` those that are cut.
pub fn of_model(routing: &Routing, found: &[Found], cuts: &Cuts) -> Result<Trainable> {
    let mut all = Trainable { model: vec![], trainable: vec![], planned: vec![] };
    let found = found.iter().zip(routing.routes());
    for (found, route) in found.filter(|(found, _)| found.trainable) {
        let blocks = route.matrix_blocks()?;
        let first = all.trainable.len();
        let is_whole = blocks.is_whole();
        let slice = cuts.slice(&found.path);
        let slices = slices_of_blocks(slice, &blocks);
        for (index, ((path, batch), slices)) in
            blocks.names(&found.path).into_iter().zip(blocks.batches()).zip(&slices).enumerate()
        {
            let (kind, work) = kind(routing, route, index, batch);
            let shape = if is_whole { found.shape.clone() } else { batch.to_vec() };
            let (dtype, placement) = (found.dtype, found.placement);
            let slices = cuts.stored(&found.path, slices.clone(), &shape);
            let settings = kind.settings();
            let planned = Parameter {
                path: path.clone(),
                shape: shape.clone(),
                dtype,
                work,
                placement,
                slices,
                settings,
            };
            let block = (!is_whole).then_some(index);
            // The index that the parameter gets below, after its blocks.
            let model = all.model.len();
            all.trainable.push(TrainableParameter {
                path,
                model,
                block,
                shape,
                dtype,
                time: 0,
                kind,
            });
            all.planned.push(planned);
        }
        all.model.push(ModelParameter {
            path: found.path.clone(),
            id: route.id,
            shape: slice.map_or_else(|| found.shape.clone(), Slice::shape),
            slice: slice.cloned(),
            gradient_factor: cuts.gradient_factor(&found.path),
            dtype: found.dtype,
            placement: found.placement,
            mapper: Arc::default(),
            held: held(slice, &blocks, &slices),
            blocks,
            trainable: first..all.trainable.len(),
        });
    }
    Ok(all)
}

/// A frozen parameter that the ranks divide, as the model has it, and as a plan would see it: in
/// even rows, since no optimizer needs more.
pub fn frozen(found: &Found, cuts: &Cuts) -> (ModelParameter, Parameter) {
    let slice = cuts.slice(&found.path);
    let blocks = Blocks::of_elements(found.shape.iter().product());
    let slices = slices_of_blocks(slice, &blocks);
    let rows = Parameter {
        path: found.path.clone(),
        shape: found.shape.clone(),
        dtype: found.dtype,
        work: Work::Elements,
        placement: found.placement,
        slices: slices[0].clone(),
        settings: 0,
    };
    let parameter = ModelParameter {
        path: found.path.clone(),
        id: found.id,
        shape: slice.map_or_else(|| found.shape.clone(), Slice::shape),
        slice: slice.cloned(),
        gradient_factor: 1.0,
        dtype: found.dtype,
        placement: found.placement,
        mapper: Arc::default(),
        held: held(slice, &blocks, &slices),
        blocks,
        trainable: 0..0,
    };
    (parameter, rows)
}

/// The slices of every block of a parameter, each as a parameter of its own.
fn slices_of_blocks(slice: Option<&Slice>, blocks: &Blocks) -> Vec<Option<Slices>> {
    let Some(Slice { slices, .. }) = slice else { return vec![None; blocks.count()] };
    if blocks.count() == 1 {
        return vec![Some(slices.clone())];
    }
    // Blocks are ranges of a batch of matrices, whatever number of dimensions the parameter has.
    let batch = batched(slices);
    blocks.ranges().map(|range| Some(batch.of_range(blocks.dimension(), range))).collect()
}

/// The slices of a parameter as slices of a batch of matrices.
fn batched(slices: &Slices) -> Slices {
    match slices.whole().len() {
        2 => slices.unsqueezed(),
        _ => slices.clone(),
    }
}

/// The parts of a parameter's blocks that a rank has.
fn held(slice: Option<&Slice>, blocks: &Blocks, slices: &[Option<Slices>]) -> Blocks {
    let Some(Slice { slices: whole, index }) = slice.filter(|_| blocks.count() > 1) else {
        return blocks.clone();
    };
    let batch =
        batched(whole).shape(*index).try_into().expect("blocks are cut from batches of matrices");
    let of_block = slices.iter().flatten().map(|slices| slices.shape(*index)[blocks.dimension()]);
    blocks.of_slice(batch, of_block.collect())
}

/// The trained parameters of a model.
pub struct Trainable {
    pub model: Vec<ModelParameter>,
    pub trainable: Vec<TrainableParameter>,
    pub planned: Vec<Parameter>,
}

/// The way in which a block of a parameter, a batch, is updated.
fn kind(
    routing: &Routing,
    route: &ParameterRoute,
    block: usize,
    [count, m, n]: [usize; 3],
) -> (UpdateKind, Work) {
    let role = route.role;
    match role {
        ParameterRole::Muon { .. } if route.left.contains(&block) => {
            let role = routing.factors_of_left();
            (UpdateKind::Elementwise { role, settings: 0 }, Work::Elements)
        }
        ParameterRole::Muon { layout, .. } => {
            let matrices = Matrices { shape: [m, n], layout };
            let settings = route.settings;
            (
                UpdateKind::Muon { count, matrices, settings },
                Work::Matrices { count, rows: m, columns: n },
            )
        }
        ParameterRole::Embedding
        | ParameterRole::Head
        | ParameterRole::Vector
        | ParameterRole::Frozen => {
            let (role, settings) = (route.factors, route.settings);
            match route.custom.clone() {
                Some(optimizer) => (UpdateKind::Whole { lr: role.lr, optimizer }, Work::Whole),
                None => (UpdateKind::Elementwise { role, settings }, Work::Elements),
            }
        }
    }
}
