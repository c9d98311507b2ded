//! Momentum before the iteration, and the update after it.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::norm::{Norms, SUMMED, joined, store_part, with_squares};
use super::parts::{Layout, factor_of, groups, number_of, own_part, read, write};
use super::{Batch, Part, UNITS, own_matrix, own_vectors};
use crate::error::Result;
use crate::units::together;

/// The gradient of a parameter, and how it goes into the momentum.
#[derive(Debug, Clone)]
pub struct Averaged {
    /// The gradient: a row for every matrix.
    pub grad: Part,
    /// The number of the parameter's flag.
    pub flag: usize,
    /// The weight of what was, in `[0, 1)`.
    pub mu: f32,
}

/// The buffers that [`accumulate`] reads and writes beside gradients.
#[derive(Debug, Clone, Copy)]
pub struct Momenta<'a> {
    /// The momentum of the batch, advanced in place.
    pub momentum: &'a Handle,
    /// Receives what is to be orthogonalised.
    pub update: &'a Handle,
    /// Receives the norms of that.
    pub norms: &'a Norms,
    /// A float32 value for every parameter, 1 for those that stay as they are.
    pub left: &'a Handle,
    /// A float32 value that gradients are multiplied by.
    pub factor: Option<&'a Handle>,
}

/// Advances the momentum of some matrices of a batch in place, those from `first` on: `M <- mu M + (1 - mu) G`.
/// Writes what is to be orthogonalised, `mu M + (1 - mu) G` with `nesterov` and else `M`, zeros where a parameter is
/// left; and the norms of that, in parts. The types are those of gradients and of the momentum.
///
/// # Errors
///
/// Those of the [module](super).
pub fn accumulate(
    client: &Client,
    grads: &[Averaged],
    Momenta { momentum, update, norms, left, factor }: Momenta<'_>,
    batch: Batch,
    mut first: usize,
    [of_grads, dtype]: [ElemType; 2],
    nesterov: bool,
) -> Result<()> {
    batch.check(client, &[("the momentum", momentum, dtype), ("the update", update, dtype)])?;
    let flags = grads.iter().map(|of| of.flag + 1).max().unwrap_or(0);
    let (of_norms, scaled) = (2 * batch.count * norms.parts, factor.is_some());
    let factor = factor.unwrap_or(left);
    Batch::check_values(&[
        ("the flags", left, flags),
        ("the norms", &norms.handle, of_norms),
        ("the factor", factor, usize::from(scaled)),
    ])?;
    grads.iter().try_for_each(|of| of.grad.check(client, "the gradient", of_grads))?;
    batch.check_parts("the gradients", grads.iter().map(|of| &of.grad), first)?;
    if batch.is_empty() {
        return Ok(());
    }
    let units = together(&client.properties().hardware, UNITS);
    for group in groups(client, grads, 1, 5) {
        let all = group.iter().map(|of| &of.grad);
        let layout = Layout::new(client, &[of_grads, dtype], all.clone(), &[]);
        let size = layout.vector_size;
        // SAFETY: every index is below the vectors of a matrix; rows, flags and norms were checked above.
        unsafe {
            accumulate_kernel::launch_unchecked(
                client,
                layout.cube_count(norms.parts),
                CubeDim::new_1d(units),
                batch.address_type(),
                size,
                all.map(|part| part.vectors(size)).collect(),
                batch.vectors(momentum, size),
                batch.vectors(update, size),
                norms.arg(batch),
                BufferArg::from_raw_parts(left.clone(), flags),
                BufferArg::from_raw_parts(factor.clone(), 1),
                layout.firsts(),
                layout.ends(),
                group.iter().map(|of| of.flag).collect(),
                group.iter().map(|of| of.mu).collect(),
                first,
                batch.elements / size,
                nesterov,
                scaled,
                units,
                [of_grads, dtype],
            );
        }
        first += layout.rows;
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn accumulate_kernel<G: Float, F: Float, N: Size>(
    grads: &Sequence<Box<[Vector<G, N>]>>,
    momentum: &mut [Vector<F, N>],
    update: &mut [Vector<F, N>],
    norms: &mut [f32],
    left: &[f32],
    factor: &[f32],
    firsts: &Sequence<usize>,
    ends: &Sequence<usize>,
    flags: &Sequence<usize>,
    mus: &Sequence<f32>,
    base: usize,
    vectors: usize,
    #[comptime] nesterov: bool,
    #[comptime] scaled: bool,
    #[comptime] units: u32,
    #[define(G, F)] _dtypes: [ElemType; 2],
) {
    let row = own_matrix();
    let (own, of_part) = own_part(firsts, ends, row);
    if own >= grads.len() {
        terminate!();
    }
    let taken = left[number_of(flags, own)] == 0.0;
    let mu = factor_of(mus, own);
    let (keep, fresh) = (Vector::<f32, N>::new(mu), Vector::<f32, N>::new(1.0 - mu));
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    let (first, step) = own_vectors();
    for start in range_stepped(first, vectors, step * SUMMED) {
        let mut s = f32::new(0.0);
        let mut q = f32::new(0.0);
        for i in range_stepped(start, min(start + step * SUMMED, vectors), step) {
            let at = (base + row) * vectors + i;
            if taken {
                let mut grad = read(grads, own, of_part * vectors + i);
                if comptime!(scaled) {
                    grad *= Vector::new(factor[0]);
                }
                let grad = fresh * grad;
                let averaged = keep * Vector::cast_from(momentum[at]) + grad;
                momentum[at] = Vector::cast_from(averaged);
                let ahead = if comptime!(nesterov) { keep * averaged + grad } else { averaged };
                update[at] = Vector::cast_from(ahead);
                let (scale, squares) = with_squares::<N>(s, q, ahead);
                s = scale;
                q = squares;
            } else {
                update[at] = Vector::new(F::new(0.0));
            }
        }
        let (s, q) = joined(scale, squares, s, q);
        scale = s;
        squares = q;
    }
    store_part(norms, base + row, scale, squares, units);
}

/// The values of a parameter, and how they are updated.
#[derive(Debug, Clone)]
pub struct Updated {
    /// The values, updated in place: a row for every matrix.
    pub values: Part,
    /// The number of the parameter's flag.
    pub flag: usize,
    /// The factor on the old values.
    pub keep: f32,
    /// The factor on the direction.
    pub lr: f32,
}

/// Updates parameters in place: `P <- keep P - lr U`, where `U` are the matrices of a batch from `first` on. A
/// parameter with a flag in `left`, and a matrix with a flag in `late`, where those of the batch begin at a
/// number, stay as they are. The types are those of `P` and `U`.
///
/// # Errors
///
/// Those of the [module](super).
pub fn apply(
    client: &Client,
    parameters: &[Updated],
    directions: &Handle,
    left: &Handle,
    (late, first_late): (&Handle, usize),
    (batch, mut first): (Batch, usize),
    dtypes: [ElemType; 2],
) -> Result<()> {
    batch.check(client, &[("the direction", directions, dtypes[1])])?;
    parameters.iter().try_for_each(|of| of.values.check(client, "the parameter", dtypes[0]))?;
    let flags = parameters.iter().map(|of| of.flag + 1).max().unwrap_or(0);
    let all_late = first_late + batch.count;
    Batch::check_values(&[("the flags", left, flags), ("the late flags", late, all_late)])?;
    batch.check_parts("the parameters", parameters.iter().map(|of| &of.values), first)?;
    if batch.is_empty() {
        return Ok(());
    }
    for group in groups(client, parameters, 1, 3) {
        let all = group.iter().map(|of| &of.values);
        let layout = Layout::new(client, &dtypes, all.clone(), &[]);
        let size = layout.vector_size;
        // SAFETY: every index is below the vectors of a matrix; rows and flags were checked above.
        unsafe {
            apply_kernel::launch_unchecked(
                client,
                layout.cube_count(layout.cubes),
                CubeDim::new_1d(UNITS),
                batch.address_type(),
                size,
                all.map(|part| part.vectors(size)).collect(),
                batch.vectors(directions, size),
                BufferArg::from_raw_parts(left.clone(), flags),
                BufferArg::from_raw_parts(late.clone(), all_late),
                layout.firsts(),
                layout.ends(),
                group.iter().map(|of| of.flag).collect(),
                group.iter().map(|of| of.keep).collect(),
                group.iter().map(|of| of.lr).collect(),
                first,
                first_late,
                batch.elements / size,
                dtypes,
            );
        }
        first += layout.rows;
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn apply_kernel<F: Float, U: Float, N: Size>(
    parameters: &mut Sequence<Box<[Vector<F, N>]>>,
    directions: &[Vector<U, N>],
    left: &[f32],
    late: &[f32],
    firsts: &Sequence<usize>,
    ends: &Sequence<usize>,
    flags: &Sequence<usize>,
    keeps: &Sequence<f32>,
    lrs: &Sequence<f32>,
    base: usize,
    first_late: usize,
    vectors: usize,
    #[define(F, U)] _dtypes: [ElemType; 2],
) {
    let row = own_matrix();
    let (own, of_part) = own_part(firsts, ends, row);
    if own >= parameters.len() {
        terminate!();
    }
    let matrix = base + row;
    if left[number_of(flags, own)] != 0.0 || late[first_late + matrix] != 0.0 {
        terminate!();
    }
    let keep = Vector::<f32, N>::new(factor_of(keeps, own));
    let lr = Vector::<f32, N>::new(factor_of(lrs, own));
    let (first, step) = own_vectors();
    for i in range_stepped(first, vectors, step) {
        let at = of_part * vectors + i;
        let kept = keep * read(&*parameters, own, at);
        let direction = Vector::cast_from(directions[matrix * vectors + i]);
        write(parameters, own, at, kept - lr * direction);
    }
}
