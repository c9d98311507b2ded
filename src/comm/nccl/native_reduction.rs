//! Reductions by NCCL itself, in float32: half precision is widened before and rounded once after.

use std::os::raw::c_int;
use std::sync::Arc;

use burn::tensor::{DType, FloatDType, Tensor};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};

use super::call::Shared;
use crate::comm::call::Call;
use crate::comm::counts::{offset, offsets};
use crate::comm::validate::assert_fits;
use crate::comm::{Pending, ReduceOp};
use crate::error::Result;
use crate::flat;

const F32: c_int = ncclDataType_t::ncclFloat32 as c_int;
const SUM: c_int = ncclRedOp_t::ncclSum as c_int;

/// Starts an [`all_reduce`](crate::comm::Engine::all_reduce).
pub fn all_reduce(shared: &Arc<Shared>, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
    let size = shared.peers.control.size();
    let dtype = tensor.dtype();
    let call = Call::all_reduce(&tensor, op);
    let sum = sum_on_all_ranks(shared, call, tensor)?;
    Ok(Pending::new(sum.bytes(), move || Ok(op.finish(sum.wait()?, size, dtype))))
}

/// Starts a [`reduce_scatter`](crate::comm::Engine::reduce_scatter) whose result has the type
/// `dtype`.
pub fn reduce_scatter(
    shared: &Arc<Shared>,
    tensor: Tensor<1>,
    counts: &[usize],
    op: ReduceOp,
    dtype: DType,
) -> Result<Pending> {
    let (rank, size) = (shared.peers.control.rank(), shared.peers.control.size());
    let length = tensor.dims()[0];
    assert_fits(&tensor, counts.iter().sum(), [counts], size);
    let call = Call::reduce_scatter(&tensor, counts, op);
    let largest = counts.iter().max().copied().unwrap_or_default();
    // NCCL takes equal parts. A rank sends N - 1 of them, or twice (N - 1) / N of the whole for the
    // sum of everything on every rank: less, if one part is far larger than the others.
    let (sum, start) = if size * largest <= 2 * length {
        (sum_of_padded_parts(shared, call, tensor, counts, largest)?, 0)
    } else {
        (sum_on_all_ranks(shared, call, tensor)?, offset(counts, rank))
    };
    let elements = start..start + counts[rank];
    Ok(Pending::new(sum.bytes(), move || {
        Ok(op.finish(flat::slice(&sum.wait()?, elements), size, dtype))
    }))
}

/// Starts the sum of everything on every rank, in float32.
fn sum_on_all_ranks(shared: &Arc<Shared>, call: Call, tensor: Tensor<1>) -> Result<Pending> {
    let length = tensor.dims()[0];
    shared.start(call, tensor.cast(FloatDType::F32), length, |arguments| {
        let (send, receive) = (arguments.send.address(0), arguments.receive.address(0));
        let (comm, stream) = (arguments.comm, arguments.stream);
        // SAFETY: both buffers hold that many floats and are kept until the stream has passed the
        // call.
        unsafe { (arguments.nccl.all_reduce)(send, receive, length, F32, SUM, comm, stream) }
    })
}

/// Starts the sums of parts that are padded with zeros to `padded` elements, in float32.
fn sum_of_padded_parts(
    shared: &Arc<Shared>,
    call: Call,
    tensor: Tensor<1>,
    counts: &[usize],
    padded: usize,
) -> Result<Pending> {
    let mut tensor = tensor.cast(FloatDType::F32);
    if counts.iter().any(|count| *count < padded) {
        let device = tensor.device();
        let zeros = Tensor::<1>::zeros([padded], (&device, DType::F32));
        let parts = offsets(counts)
            .into_iter()
            .zip(counts)
            .flat_map(|(start, count)| {
                let filled = flat::slice(&tensor, start..start + count);
                [filled, flat::slice(&zeros, 0..padded - count)]
            })
            .collect();
        tensor = flat::concat(parts, DType::F32, &device);
    }
    shared.start(call, tensor, padded, |arguments| {
        let (send, receive) = (arguments.send.address(0), arguments.receive.address(0));
        let (comm, stream) = (arguments.comm, arguments.stream);
        // SAFETY: the buffers hold one padded part per rank and one padded part, and are kept until
        // the stream has passed the call.
        unsafe { (arguments.nccl.reduce_scatter)(send, receive, padded, F32, SUM, comm, stream) }
    })
}
