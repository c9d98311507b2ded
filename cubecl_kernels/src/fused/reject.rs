//! The search for gradients with elements that are not finite or too large.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::rows::{LaunchArguments, RowGrid, launch_groups, locate_row, number_of, read};
use super::{F32, Rows, UNITS, cube_row, unit_vectors};
use crate::error::{Result, check_buffer};

/// Sets the flag to 1 for every row that has an entry that is not finite, or whose magnitude is
/// larger than `largest`. The other flags keep their values.
///
/// Every tensor comes with the index of its first row's flag. There are `count` float32 flags.
///
/// # Errors
///
/// Those of the [module](super).
pub fn reject(
    client: &Client,
    tensors: &[(Rows, usize)],
    flags: &Handle,
    count: usize,
    dtype: ElemType,
    largest: f32,
) -> Result<()> {
    for (rows, first_flag) in tensors {
        rows.check(client, "the gradient", dtype)?;
        check_buffer("the flags", flags, count.max(first_flag + rows.count), F32)?;
    }
    let tensors: Vec<_> = tensors.iter().filter(|(rows, _)| !rows.is_empty()).cloned().collect();
    let longest = tensors.iter().map(|(rows, _)| rows.len()).max().unwrap_or(0);
    let address = AddressType::from_len(longest.max(count));
    let arguments = LaunchArguments { buffers: 1, numbers: 4, shared: 1, address };
    for group in launch_groups(client, &tensors, arguments, |(rows, _)| rows.shape()) {
        let all_rows = group.iter().map(|(rows, _)| rows);
        let grid = RowGrid::new(client, &[dtype], all_rows.clone(), &[]);
        let vector_size = grid.vector_size;
        // SAFETY: every index is below the vectors of a row, and flags were checked above.
        unsafe {
            reject_kernel::launch_unchecked(
                client,
                grid.cube_count(grid.cubes_per_row),
                CubeDim::new_1d(UNITS),
                address,
                vector_size,
                all_rows.clone().map(|rows| rows.vectors(vector_size)).collect(),
                BufferArg::from_raw_parts(flags.clone(), count),
                grid.first_rows(),
                grid.end_rows(),
                all_rows.map(|rows| rows.elements / vector_size).collect(),
                group.iter().map(|(_, first_flag)| *first_flag).collect(),
                largest,
                dtype,
            );
        }
    }
    Ok(())
}

// Several units may set the same flag: all of them write the same value.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn reject_kernel<F: Float, N: Size>(
    tensors: &Sequence<Box<[Vector<F, N>]>>,
    flags: &mut [f32],
    first_rows: &Sequence<usize>,
    end_rows: &Sequence<usize>,
    vectors: &Sequence<usize>,
    first_flags: &Sequence<usize>,
    largest: f32,
    #[define(F)] _dtype: ElemType,
) {
    let (index, row) = locate_row(first_rows, end_rows, cube_row());
    if index >= tensors.len() {
        terminate!();
    }
    let length = number_of(vectors, index);
    let flag = number_of(first_flags, index) + row;
    let (first, step) = unit_vectors();
    for i in range_stepped(first, length, step) {
        let x = read(tensors, index, row * length + i);
        #[unroll]
        for j in 0..N::value() {
            let value = x.extract(j);
            // NaN compares as false with everything, so it needs a question of its own.
            if value.is_nan() || value.is_inf() || value.abs() > largest {
                // Only ever set, so that the flags of several launches are kept in one buffer.
                flags[flag] = 1.0;
            }
        }
    }
}
