//! Momentum before the iteration, and the update after it.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::norm::{Norms, SUMMED, joined, store_part, with_squares};
use super::{Batch, UNITS, own_matrix, own_vectors};
use crate::error::Result;
use crate::units::together;

/// Which matrices of a type are finite and at most `largest` in magnitude: `[k]`, 1 for those, else 0.
pub fn finite(
    client: &Client,
    grads: &Handle,
    batch: Batch,
    dtype: ElemType,
    largest: f32,
) -> Result<Handle> {
    batch.check(client, &[("the gradient", grads, dtype)])?;
    let accepted = ones(client, batch.count);
    if batch.is_empty() {
        return Ok(accepted);
    }
    let size = batch.vector_size(client, &[dtype]);
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        finite_kernel::launch_unchecked(
            client,
            batch.cube_count(batch.cubes(size)),
            CubeDim::new_1d(UNITS),
            batch.address_type(),
            size,
            batch.vectors(grads, size),
            batch.per_matrix(&accepted),
            largest,
            batch.elements / size,
            batch.count,
            dtype,
        );
    }
    Ok(accepted)
}

/// So many float32 ones, made on the device: a copy from the host would wait for the bus.
fn ones(client: &Client, count: usize) -> Handle {
    let values = client.empty(count * size_of::<f32>());
    if count > 0 {
        // SAFETY: the kernel writes below `count`, for which there is room.
        unsafe {
            let buffer = BufferArg::from_raw_parts(values.clone(), count);
            let cubes = CubeCount::Static((count as u32).div_ceil(UNITS), 1, 1);
            let addresses = AddressType::from_len(count);
            ones_kernel::launch_unchecked(
                client,
                cubes,
                CubeDim::new_1d(UNITS),
                addresses,
                buffer,
                count,
            );
        }
    }
    values
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn ones_kernel(values: &mut [f32], count: usize) {
    if ABSOLUTE_POS < count {
        values[ABSOLUTE_POS] = 1.0;
    }
}

/// Units that find something write the same zero.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn finite_kernel<F: Float, N: Size>(
    grads: &[Vector<F, N>],
    accepted: &mut [f32],
    largest: f32,
    vectors: usize,
    count: usize,
    #[define(F)] _dtype: ElemType,
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    let (first, step) = own_vectors();
    for i in range_stepped(first, vectors, step) {
        let x = Vector::<f32, N>::cast_from(grads[matrix * vectors + i]);
        #[unroll]
        for j in 0..N::value() {
            let value = x.extract(j);
            if value.is_nan() || value.is_inf() || value.abs() > largest {
                accepted[matrix] = 0.0;
            }
        }
    }
}

/// How momentum is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Momentum {
    /// The weight of what was, in `[0, 1)`.
    pub mu: f32,
    /// Whether the update looks ahead.
    pub nesterov: bool,
}

/// Advances the momentum in place, `M <- mu M + (1 - mu) G`. Returns what is to be orthogonalised,
/// `mu M + (1 - mu) G` with Nesterov and else `M`, zeros where a matrix is refused; and the norms of
/// that, in parts.
pub fn accumulate(
    client: &Client,
    [grads, momentum, accepted]: [&Handle; 3],
    batch: Batch,
    dtype: ElemType,
    Momentum { mu, nesterov }: Momentum,
    parts: usize,
) -> Result<(Handle, Norms)> {
    batch.check(client, &[("the gradient", grads, dtype), ("the momentum", momentum, dtype)])?;
    Batch::check_values(&[("the flags", accepted, batch.count)])?;
    let size = batch.vector_size(client, &[dtype]);
    let update = client.empty(batch.len() * dtype.size());
    let norms = Norms::empty(client, batch, parts);
    let units = together(&client.properties().hardware, UNITS);
    if batch.is_empty() {
        return Ok((update, norms));
    }
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        accumulate_kernel::launch_unchecked(
            client,
            batch.cube_count(parts),
            CubeDim::new_1d(units),
            batch.address_type(),
            size,
            batch.vectors(grads, size),
            batch.vectors(momentum, size),
            batch.vectors(&update, size),
            batch.per_matrix(accepted),
            norms.arg(batch),
            batch.elements / size,
            batch.count,
            mu,
            nesterov,
            units,
            dtype,
        );
    }
    Ok((update, norms))
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn accumulate_kernel<F: Float, N: Size>(
    grads: &[Vector<F, N>],
    momentum: &mut [Vector<F, N>],
    update: &mut [Vector<F, N>],
    accepted: &[f32],
    norms: &mut [f32],
    vectors: usize,
    count: usize,
    mu: f32,
    #[comptime] nesterov: bool,
    #[comptime] units: u32,
    #[define(F)] _dtype: ElemType,
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    let taken = accepted[matrix] != 0.0;
    let (keep, fresh) = (Vector::<f32, N>::new(mu), Vector::<f32, N>::new(1.0 - mu));
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    let (first, step) = own_vectors();
    for start in range_stepped(first, vectors, step * SUMMED) {
        let mut s = f32::new(0.0);
        let mut q = f32::new(0.0);
        for i in range_stepped(start, min(start + step * SUMMED, vectors), step) {
            let at = matrix * vectors + i;
            if taken {
                let grad = fresh * Vector::cast_from(grads[at]);
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
    store_part(norms, scale, squares, units);
}

/// Updates accepted matrices in place: `P <- keep P - lr U`, with one `keep` and `lr` per matrix. The
/// types are those of `P` and `U`.
pub fn apply(
    client: &Client,
    parameters: &Handle,
    directions: &Handle,
    [accepted, keep, lr]: [&Handle; 3],
    batch: Batch,
    dtypes: [ElemType; 2],
) -> Result<()> {
    let each = batch.count;
    let parameters_of = ("the parameter", parameters, dtypes[0]);
    batch.check(client, &[parameters_of, ("the direction", directions, dtypes[1])])?;
    Batch::check_values(&[("the flags", accepted, each), ("keep", keep, each), ("lr", lr, each)])?;
    if batch.is_empty() {
        return Ok(());
    }
    let size = batch.vector_size(client, &dtypes);
    // SAFETY: every index is below the vectors of a matrix.
    unsafe {
        apply_kernel::launch_unchecked(
            client,
            batch.cube_count(batch.cubes(size)),
            CubeDim::new_1d(UNITS),
            batch.address_type(),
            size,
            batch.vectors(parameters, size),
            batch.vectors(directions, size),
            batch.per_matrix(accepted),
            batch.per_matrix(keep),
            batch.per_matrix(lr),
            batch.elements / size,
            batch.count,
            dtypes,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn apply_kernel<F: Float, U: Float, N: Size>(
    parameters: &mut [Vector<F, N>],
    directions: &[Vector<U, N>],
    accepted: &[f32],
    keep: &[f32],
    lr: &[f32],
    vectors: usize,
    count: usize,
    #[define(F, U)] _dtypes: [ElemType; 2],
) {
    let matrix = own_matrix();
    if matrix >= count {
        terminate!();
    }
    if accepted[matrix] == 0.0 {
        terminate!();
    }
    let (keep, lr) = (Vector::<f32, N>::new(keep[matrix]), Vector::<f32, N>::new(lr[matrix]));
    let (first, step) = own_vectors();
    for i in range_stepped(first, vectors, step) {
        let at = matrix * vectors + i;
        let kept = keep * Vector::cast_from(parameters[at]);
        parameters[at] = Vector::cast_from(kept - lr * Vector::cast_from(directions[at]));
    }
}
