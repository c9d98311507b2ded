//! Copies into a given buffer.

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Batch, UNITS};

/// Copies one buffer into another.
pub fn copy(client: &Client, from: &Handle, to: &Handle, batch: Batch, dtype: ElemType) {
    if batch.is_empty() {
        return;
    }
    let size = batch.vector_size(client, &[dtype]);
    let (vectors, units) = (batch.len() / size, CubeDim::new_1d(UNITS));
    // SAFETY: units beyond the vectors do nothing.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, vectors, units),
            units,
            batch.address_type(),
            size,
            batch.vectors(from, size),
            batch.vectors(to, size),
            vectors,
            dtype,
        );
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn copy_kernel<F: Float, N: Size>(
    from: &[Vector<F, N>],
    to: &mut [Vector<F, N>],
    vectors: usize,
    #[define(F)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        to[at] = from[at];
    }
}
