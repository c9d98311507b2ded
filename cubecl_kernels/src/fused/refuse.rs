//! The search for what no step can use.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::parts::{Layout, groups, number_of, own_part, read};
use super::{F32, Part, UNITS, own_matrix, own_vectors};
use crate::error::{Result, check_buffer};

/// Sets the flag of every row with an entry that is not finite, or larger than `largest` in magnitude, to 1;
/// the others keep theirs. Every part comes with the number of its first row's flag, of which there are
/// `count` in float32.
///
/// # Errors
///
/// Those of the [module](super).
pub fn refuse(
    client: &Client,
    parts: &[(Part, usize)],
    flags: &Handle,
    count: usize,
    dtype: ElemType,
    largest: f32,
) -> Result<()> {
    for (part, first) in parts {
        part.check(client, "the gradient", dtype)?;
        check_buffer("the flags", flags, count.max(first + part.rows), F32)?;
    }
    let parts: Vec<_> = parts.iter().filter(|(part, _)| !part.is_empty()).cloned().collect();
    for group in groups(client, &parts, 1, 1) {
        let all = group.iter().map(|(part, _)| part);
        let layout = Layout::new(client, &[dtype], all.clone(), &[]);
        let size = layout.vector_size;
        // SAFETY: every index is below the vectors of a row, and flags were checked above.
        unsafe {
            refuse_kernel::launch_unchecked(
                client,
                layout.cube_count(layout.cubes),
                CubeDim::new_1d(UNITS),
                layout.address_type(count),
                size,
                all.clone().map(|part| part.vectors(size)).collect(),
                BufferArg::from_raw_parts(flags.clone(), count),
                layout.firsts(),
                layout.ends(),
                all.map(|part| part.elements / size).collect(),
                group.iter().map(|(_, first)| *first).collect(),
                largest,
                dtype,
            );
        }
    }
    Ok(())
}

/// Units that find something write the same one.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn refuse_kernel<F: Float, N: Size>(
    parts: &Sequence<Box<[Vector<F, N>]>>,
    flags: &mut [f32],
    firsts: &Sequence<usize>,
    ends: &Sequence<usize>,
    vectors: &Sequence<usize>,
    numbers: &Sequence<usize>,
    largest: f32,
    #[define(F)] _dtype: ElemType,
) {
    let (own, row) = own_part(firsts, ends, own_matrix());
    if own >= parts.len() {
        terminate!();
    }
    let (length, flag) = (number_of(vectors, own), number_of(numbers, own) + row);
    let (first, step) = own_vectors();
    for i in range_stepped(first, length, step) {
        let x = read(parts, own, row * length + i);
        #[unroll]
        for j in 0..N::value() {
            let value = x.extract(j);
            if value.is_nan() || value.is_inf() || value.abs() > largest {
                flags[flag] = 1.0;
            }
        }
    }
}
