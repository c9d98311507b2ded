//! Master weights of parameters in half precision, brought up to date with the parameters.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::rows::{LaunchArguments, RowGrid, launch_groups, number_of, read};
use super::{F32, Rows, UNITS, cube_row, unit_vectors};
use crate::error::{Result, check_buffer, check_dtype};

/// A parameter in half precision.
#[derive(Debug, Clone)]
pub struct Published {
    /// The values: one row.
    pub values: Rows,
    /// The index of the parameter's first element in the master weights.
    pub first: usize,
}

/// Replaces the float32 master weights of elements that were changed: those whose parameter is not
/// the `rounded` master weight. Their new master weight is the parameter itself, also for NaN.
///
/// There are `elements` master weights, and as many rounded ones, which have the type `dtype` of
/// the parameters.
///
/// # Errors
///
/// Those of the [module](super).
pub fn restore(
    client: &Client,
    parameters: &[Published],
    masters: &Handle,
    rounded: &Handle,
    elements: usize,
    dtype: ElemType,
) -> Result<()> {
    check_dtype(client, dtype)?;
    for Published { values, first } in parameters {
        values.check(client, "the parameter", dtype)?;
        let needed = elements.max(first + values.len());
        check_buffer("the master weights", masters, needed, F32)?;
        check_buffer("the rounded master weights", rounded, needed, dtype)?;
    }
    let parameters: Vec<_> =
        parameters.iter().filter(|parameter| !parameter.values.is_empty()).cloned().collect();
    let longest = parameters.iter().map(|parameter| parameter.values.len()).max().unwrap_or(0);
    let address = AddressType::from_len(longest.max(elements));
    let arguments = LaunchArguments { buffers: 1, numbers: 2, shared: 2, address };
    for group in launch_groups(client, &parameters, arguments, |parameter| parameter.values.shape())
    {
        let all_rows = group.iter().map(|parameter| &parameter.values);
        // With the end: the length of the master weights is also a number of whole vectors.
        let firsts: Vec<usize> =
            group.iter().map(|parameter| parameter.first).chain([elements]).collect();
        let grid = RowGrid::new(client, &[F32, dtype], all_rows.clone(), &firsts);
        let size = grid.vector_size;
        // SAFETY: every index is below the vectors of a parameter, whose place in the master
        // weights was checked above.
        unsafe {
            restore_kernel::launch_unchecked(
                client,
                grid.cube_count(grid.cubes_per_row),
                CubeDim::new_1d(UNITS),
                address,
                size,
                all_rows.clone().map(|rows| rows.vectors(size)).collect(),
                BufferArg::from_raw_parts(masters.clone(), elements / size),
                BufferArg::from_raw_parts(rounded.clone(), elements / size),
                firsts[..group.len()].iter().map(|first| first / size).collect(),
                all_rows.map(|rows| rows.len() / size).collect(),
                dtype,
            );
        }
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn restore_kernel<H: Float, N: Size>(
    parameters: &Sequence<Box<[Vector<H, N>]>>,
    masters: &mut [Vector<f32, N>],
    rounded: &[Vector<H, N>],
    firsts: &Sequence<usize>,
    vectors: &Sequence<usize>,
    #[define(H)] _dtype: ElemType,
) {
    let index = cube_row();
    if index >= parameters.len() {
        terminate!();
    }
    let start = number_of(firsts, index);
    let length = number_of(vectors, index);
    let (first, step) = unit_vectors();
    for i in range_stepped(first, length, step) {
        let published = read(parameters, index, i);
        let expected = Vector::<f32, N>::cast_from(rounded[start + i]);
        // The masters are neither read nor written where nothing was changed, as in almost every
        // step.
        let mut is_changed = false;
        #[unroll]
        for j in 0..N::value() {
            // Not by `!=`, which is false for NaN on some devices.
            let is_same = published.extract(j) == expected.extract(j);
            if !is_same {
                is_changed = true;
            }
        }
        if is_changed {
            let mut values = masters[start + i];
            #[unroll]
            for j in 0..N::value() {
                let is_same = published.extract(j) == expected.extract(j);
                if !is_same {
                    values.insert(j, published.extract(j));
                }
            }
            masters[start + i] = values;
        }
    }
}
