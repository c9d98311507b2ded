//! The elementwise parts of a step, as a Burn backend extension: each may be one pass over memory.
//!
//! Gradients and parameters are read and written where they lie, several in a call; what the optimizer owns are
//! batches `[k, m, n]`, in which a parameter has as many matrices as its tensor. Backends that are not named in the
//! attribute run everything in Burn's operations.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor, s};

use super::rule::Part;
use crate::clipping;
use crate::gate::{Gate, ones_where};
use crate::orthogonalize::ops::{Norms, norm_parts};
use crate::orthogonalize::{Engine, Kernels};
use crate::parts::{Parts, calls};

/// Rows of a tensor, and their flags.
#[derive(Debug, Clone, Copy)]
pub struct Flagged {
    /// The number of the first row's flag.
    pub flag: usize,
    /// How many rows the tensor has.
    pub rows: usize,
}

/// How the gradient of a parameter goes into its momentum.
#[derive(Debug, Clone, Copy)]
pub struct Averaging {
    /// The number of the parameter's flag.
    pub flag: usize,
    /// The weight of the momentum that was.
    pub mu: f32,
}

/// How a parameter is updated.
#[derive(Debug, Clone, Copy)]
pub struct Updating {
    /// The number of the parameter's flag.
    pub flag: usize,
    /// The factor on the old values.
    pub keep: f32,
    /// The factor on the direction.
    pub lr: f32,
}

/// The elementwise parts of a step.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait StepOps: Backend {
    /// Sets the flags of rows with an entry that is not finite, or larger than `largest` in magnitude, to 1.
    #[fusion(dtype = flags, shape = flags)]
    fn refuse(
        flags: FloatTensor<Self>,
        #[extension_type] tensors: Parts<Self>,
        rows: Vec<Flagged>,
        largest: f32,
    ) -> FloatTensor<Self>;

    /// Advances the momentum of the matrices from `first` on by their gradients, and writes what is to be
    /// orthogonalised and its norms in [parts](crate::orthogonalize::ops::MatrixOps::norms). A parameter whose
    /// flag in `left` is set keeps its momentum, and zeros are to be orthogonalised. Gradients are multiplied by
    /// `factor` if they are `scaled`.
    #[fusion(meta = |_grads, momentum, update, norms, _left, _factor, _parts, _first, _nesterov, _scaled| {
        (momentum.clone(), update.clone(), norms.clone())
    })]
    #[allow(clippy::too_many_arguments)] // a backend extension takes no struct of tensors and numbers
    fn accumulate(
        #[extension_type] grads: Parts<Self>,
        momentum: FloatTensor<Self>,
        update: FloatTensor<Self>,
        norms: FloatTensor<Self>,
        left: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        parts: Vec<Averaging>,
        first: usize,
        nesterov: bool,
        scaled: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// `keep P - lr U` with the matrices of a batch from `first` on. A parameter whose flag in `left` is set, and a
    /// matrix whose flag in `late` is, where those of the batch begin at `first_late`, stay as they are.
    #[fusion(meta = |parameters, _direction, _left, _late, _parts, _first, _first_late| {
        parameters.clone()
    })]
    fn apply(
        #[extension_type] parameters: Parts<Self>,
        direction: FloatTensor<Self>,
        left: FloatTensor<Self>,
        late: FloatTensor<Self>,
        parts: Vec<Updating>,
        first: usize,
        first_late: usize,
    ) -> Parts<Self>;
}

/// Sets the flags of rows with an entry that is not finite, or larger than `largest` in magnitude, to 1.
pub(crate) fn refuse(
    kernels: Kernels,
    flags: Tensor<1>,
    tensors: &[Tensor<1>],
    rows: &[Flagged],
    largest: f64,
) -> Tensor<1> {
    let Some(first) = tensors.first() else { return flags };
    match Engine::choose(kernels, &first.device(), first.dtype().into()) {
        Engine::Portable => {
            let each = tensors.iter().zip(rows);
            each.fold(flags, |flags, (tensor, rows)| refuse_portably(flags, tensor, *rows, largest))
        }
        Engine::Flex | Engine::Cube { .. } => calls(tensors.len()).fold(flags, |flags, call| {
            Tensor::from_dispatch(Dispatch::refuse(
                flags.into_dispatch(),
                Parts::from_tensors(tensors[call.clone()].to_vec()),
                rows[call].to_vec(),
                largest.min(f32::MAX.into()) as f32,
            ))
        }),
    }
}

fn refuse_portably(
    flags: Tensor<1>,
    tensor: &Tensor<1>,
    Flagged { flag, rows }: Flagged,
    largest: f64,
) -> Tensor<1> {
    let usable = tensor.clone().is_finite();
    let usable = usable.bool_and(tensor.clone().abs().lower_equal_elem(largest));
    let refused = usable.reshape([rows, tensor.dims()[0] / rows]).all_dim(1).bool_not();
    let place = flag..flag + rows;
    let new = ones_where(refused).reshape([rows]).max_pair(flags.clone().slice([place.clone()]));
    flags.slice_assign([place], new)
}

/// The results of [`accumulate`].
pub(super) struct Accumulated {
    pub momentum: Tensor<3>,
    /// What is to be orthogonalised, in the type of the momentum.
    pub update: Tensor<3>,
    /// Its norms, where they cost nothing.
    pub norms: Option<Norms>,
}

/// [`StepOps::accumulate`] for a whole batch, on the engine of the gradients.
pub(super) fn accumulate(
    kernels: Kernels,
    grads: Vec<Tensor<1>>,
    momentum: Tensor<3>,
    left: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    parts: &[Part],
    nesterov: bool,
) -> Accumulated {
    let (shape @ [k, m, n], device) = (momentum.dims(), momentum.device());
    let engine = Engine::choose(kernels, &device, grads[0].dtype().into());
    if engine == Engine::Portable {
        return accumulate_portably(grads, momentum, left, factor, parts, nesterov);
    }
    let dtype = momentum.dtype();
    // Flex computes in float32: once for the batch, not in every call.
    let held = if engine == Engine::Flex { DType::F32 } else { dtype };
    let momentum = momentum.cast(held);
    let update = engine.room(shape, held, &device).into_dispatch();
    let norms = engine.room([k, norm_parts(m * n), 2], DType::F32, &device).into_dispatch();
    let mut first = 0;
    let all = calls(grads.len()).fold((momentum.into_dispatch(), update, norms), |all, call| {
        let grads = grads[call.clone()].to_vec();
        let rows: usize = grads.iter().map(|grad| grad.dims()[0] / (m * n)).sum();
        let averaging = |part: &Part| Averaging { flag: part.flag, mu: part.mu as f32 };
        let parts = parts[call].iter().map(averaging).collect();
        let (grads, left) = (Parts::from_tensors(grads), left.clone());
        // A backend extension takes no tensor that may be absent.
        let by = factor.unwrap_or(&left).clone().into_dispatch();
        let (left, scaled) = (left.into_dispatch(), factor.is_some());
        let start = first;
        first += rows;
        Dispatch::accumulate(grads, all.0, all.1, all.2, left, by, parts, start, nesterov, scaled)
    });
    let [momentum, update, norms] = [all.0, all.1, all.2].map(Tensor::from_dispatch);
    let [momentum, update] = [momentum, update].map(|of: Tensor<3>| of.cast(dtype));
    Accumulated { momentum, update, norms: Some(Norms(norms)) }
}

fn accumulate_portably(
    grads: Vec<Tensor<1>>,
    momentum: Tensor<3>,
    left: &Tensor<1>,
    factor: Option<&Tensor<1>>,
    parts: &[Part],
    nesterov: bool,
) -> Accumulated {
    let [_, m, n] = momentum.dims();
    let rows: Vec<usize> = grads.iter().map(|grad| grad.dims()[0] / (m * n)).collect();
    let (mut momenta, mut updates) = (vec![], vec![]);
    let old = split(momentum, &rows);
    for (((grad, part), old), rows) in grads.into_iter().zip(parts).zip(old).zip(rows) {
        let row = |tensor: Tensor<3>| tensor.reshape([1, -1]);
        let back = |row: Tensor<2>| row.reshape([rows, m, n]);
        let (old, gate) = (row(old), part.gate(left));
        let grad =
            factor.map_or_else(|| grad.clone(), |by| clipping::scaled(grad.clone(), by.clone()));
        let grad = gate.clean(grad.reshape([1, -1])).cast(old.dtype());
        let averaged = lerp(old.clone(), grad.clone(), 1.0 - part.mu);
        let update =
            if nesterov { lerp(grad, averaged.clone(), part.mu) } else { averaged.clone() };
        momenta.push(back(gate.choose(averaged, old)));
        updates.push(back(gate.clean(update)));
    }
    Accumulated { momentum: joined(momenta), update: joined(updates), norms: None }
}

/// [`StepOps::apply`] for a whole batch, on the engine of the parameters. The flags of its matrices in `late` begin
/// at a number.
pub(super) fn apply(
    kernels: Kernels,
    parameters: Vec<Tensor<1>>,
    direction: Tensor<3>,
    left: &Tensor<1>,
    (late, first_late): (&Tensor<1>, usize),
    parts: &[Part],
) -> Vec<Tensor<1>> {
    let [_, m, n] = direction.dims();
    let engine = Engine::choose(kernels, &direction.device(), parameters[0].dtype().into());
    if engine == Engine::Portable {
        return apply_portably(parameters, direction, left, (late, first_late), parts);
    }
    // As in `accumulate`.
    let direction = if engine == Engine::Flex { direction.cast(DType::F32) } else { direction };
    let lengths: Vec<usize> = parameters.iter().map(|parameter| parameter.dims()[0]).collect();
    let (mut first, mut parameters) = (0, parameters.into_iter());
    let call = |call: std::ops::Range<usize>| {
        let rows = lengths[call.clone()].iter().sum::<usize>() / (m * n);
        // Taken out, so that they are updated in place.
        let parameters = Parts::from_tensors(parameters.by_ref().take(call.len()).collect());
        let [left, late] = [left, late].map(|flags| flags.clone().into_dispatch());
        let direction = direction.clone().into_dispatch();
        let parts = parts[call].iter().map(Part::updating).collect();
        let start = first;
        first += rows;
        Dispatch::apply(parameters, direction, left, late, parts, start, first_late).into_tensors()
    };
    calls(lengths.len()).flat_map(call).collect()
}

fn apply_portably(
    parameters: Vec<Tensor<1>>,
    direction: Tensor<3>,
    left: &Tensor<1>,
    (late, mut first): (&Tensor<1>, usize),
    parts: &[Part],
) -> Vec<Tensor<1>> {
    let [_, m, n] = direction.dims();
    let rows: Vec<usize> = parameters.iter().map(|values| values.dims()[0] / (m * n)).collect();
    let directions = split(direction, &rows);
    let each = parameters.into_iter().zip(parts).zip(directions).zip(rows);
    let update = |(((old, part), direction), rows): (((Tensor<1>, &Part), Tensor<3>), usize)| {
        let old = old.reshape([rows, m * n]);
        let late = late.clone().slice(s![first..first + rows]);
        first += rows;
        let gates = [part.gate(left).expanded(rows), Gate::from_left(late)];
        let wide = if old.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        // In a type in which `1 - 1e-4` is not 1, and rounded once.
        let kept = old.clone().cast(wide).mul_scalar(part.rates.keep);
        let step = direction.reshape([rows, m * n]).cast(wide).mul_scalar(part.rates.lr);
        let new = (kept - step).cast(old.dtype());
        gates.iter().fold(new, |new, gate| gate.choose(new, old.clone())).reshape([-1])
    };
    each.map(update).collect()
}

impl Part {
    fn updating(&self) -> Updating {
        let Self { flag, rates, .. } = *self;
        Updating { flag, keep: rates.keep as f32, lr: rates.lr as f32 }
    }

    /// The gate of the parameter, of one row.
    fn gate(&self, left: &Tensor<1>) -> Gate {
        Gate::from_left(left.clone().slice(s![self.flag..self.flag + 1]))
    }
}

/// A batch as batches of so many matrices.
fn split(batch: Tensor<3>, rows: &[usize]) -> Vec<Tensor<3>> {
    match rows {
        [_] => vec![batch],
        _ => batch.split_with_sizes(rows.to_vec(), 0),
    }
}

/// The reverse of [`split`].
fn joined(mut batches: Vec<Tensor<3>>) -> Tensor<3> {
    match batches.len() {
        1 => batches.swap_remove(0),
        _ => Tensor::cat(batches, 0),
    }
}

/// `from + weight (to - from)`, as `(1 - weight) from + weight to`.
fn lerp(from: Tensor<2>, to: Tensor<2>, weight: f64) -> Tensor<2> {
    from.mul_scalar(1.0 - weight) + to.mul_scalar(weight)
}
