//! Reductions that NCCL makes itself, in float32: half precision is widened before and rounded once
//! after.

use std::os::raw::c_int;
use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};

use super::super::{Call, Pending, ReduceOp, check_counts, check_dtype, starts};
use super::call::Shared;
use crate::dist::flat;
use crate::error::Result;

const F32: c_int = ncclDataType_t::ncclFloat32 as c_int;
const SUM: c_int = ncclRedOp_t::ncclSum as c_int;

/// Starts an [`all_reduce`](super::Communicator::all_reduce).
pub fn all_reduce(shared: &Arc<Shared>, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
    let (rank, size) = (shared.peers.control.rank(), shared.peers.control.size());
    check_dtype("all_reduce", rank, tensor.dtype())?;
    let (length, dtype) = (tensor.dims()[0], tensor.dtype());
    let call = Call { counts: vec![length], op: Some(op), ..Call::on("all_reduce", &tensor) };
    let sum = everywhere(shared, call, tensor)?;
    Ok(Pending::new(sum.bytes(), move || Ok(op.finish(sum.wait()?, size, dtype))))
}

/// Starts a [`reduce_scatter`](super::Communicator::reduce_scatter) whose result has the type `dtype`.
pub fn reduce_scatter(
    shared: &Arc<Shared>,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let (rank, size) = (shared.peers.control.rank(), shared.peers.control.size());
    check_dtype("reduce_scatter", rank, tensor.dtype())?;
    let length = tensor.dims()[0];
    check_counts("reduce_scatter", rank, size, counts, (counts.iter().sum(), length))?;
    let call =
        Call { counts: counts.to_vec(), op: Some(op), ..Call::on("reduce_scatter", &tensor) };
    let share = counts.iter().max().copied().unwrap_or_default();
    // NCCL takes equal shares. A rank sends N - 1 of them, or twice (N - 1) / N of the whole for the
    // sum of everything on every rank: less, where one share is far larger than the others.
    let (sum, start) = if size * share <= 2 * length {
        (padded(shared, call, tensor, counts, share)?, 0)
    } else {
        (everywhere(shared, call, tensor)?, starts(counts)[rank])
    };
    let own = start..start + counts[rank];
    Ok(Pending::new(sum.bytes(), move || Ok(op.finish(flat::part(&sum.wait()?, own), size, dtype))))
}

/// Starts the sum of everything on every rank, in float32.
fn everywhere(shared: &Arc<Shared>, call: Call, tensor: Tensor<1>) -> Result<Pending> {
    let length = tensor.dims()[0];
    shared.start(call, tensor.cast(FloatDType::F32), length, |given| {
        let (from, to) = (given.send.at(0), given.receive.at(0));
        let (comm, stream) = (given.comm, given.stream);
        // SAFETY: both buffers hold that many floats and are held until the stream has passed.
        unsafe { (given.nccl.all_reduce)(from, to, length, F32, SUM, comm, stream) }
    })
}

/// Starts the sums of shares that are padded with zeros to `share` elements, in float32.
fn padded(
    shared: &Arc<Shared>,
    call: Call,
    tensor: Tensor<1>,
    counts: &[usize],
    share: usize,
) -> Result<Pending> {
    let mut tensor = tensor.cast(FloatDType::F32);
    if counts.iter().any(|count| *count < share) {
        let device = tensor.device();
        let zeros = Tensor::<1>::zeros([share], (&device, DType::F32));
        let parts = starts(counts).into_iter().zip(counts).flat_map(|(start, count)| {
            let filled = flat::part(&tensor, start..start + count);
            [filled, flat::part(&zeros, 0..share - count)]
        });
        let parts = parts.collect();
        tensor = flat::join(parts, DType::F32, &device);
    }
    shared.start(call, tensor, share, |given| {
        let (from, to) = (given.send.at(0), given.receive.at(0));
        let (comm, stream) = (given.comm, given.stream);
        // SAFETY: the buffers hold one share per rank and one share, and are held until the stream has
        // passed.
        unsafe { (given.nccl.reduce_scatter)(from, to, share, F32, SUM, comm, stream) }
    })
}
