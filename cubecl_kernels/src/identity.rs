//! Sums with the identity.

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;

use crate::error::{Error, Result, check_addresses, check_buffer, check_dtype};
use crate::matrices::Matrices;

/// Units of a cube.
const UNITS: u32 = 256;

/// `Z + I` for every matrix of a batch, which are square and contiguous.
///
/// # Errors
///
/// Before anything is launched: [`Error::Dtype`], [`Error::Shape`], [`Error::Strides`], [`Error::Buffer`] and
/// [`Error::TooLarge`].
pub fn add_identity(client: &Client, z: &Matrices) -> Result<Matrices> {
    check_dtype(client, z.dtype)?;
    let [_, m, n] = z.shape;
    if m != n {
        let expected = "square".to_owned();
        return Err(Error::Shape { what: "Z", found: z.shape, expected });
    }
    if !z.is_contiguous() {
        return Err(Error::Strides("Z"));
    }
    let elements = z.extent();
    check_buffer("Z", &z.handle, elements, z.dtype)?;
    check_addresses(client, elements)?;
    let sum = Matrices::empty(client, z.dtype, z.shape);
    if elements == 0 {
        return Ok(sum);
    }
    let size = z.vector_size(client);
    let (vectors, units) = (elements / size, CubeDim::new_1d(UNITS));
    // SAFETY: both buffers hold the elements, and units beyond them do nothing.
    unsafe {
        add_identity_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, vectors, units),
            units,
            AddressType::from_len(elements),
            size,
            BufferArg::from_raw_parts(z.handle.clone(), vectors),
            BufferArg::from_raw_parts(sum.handle.clone(), vectors),
            m,
            z.dtype,
        );
    }
    Ok(sum)
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn add_identity_kernel<F: Float, N: Size>(
    z: &[Vector<F, N>],
    sum: &mut [Vector<F, N>],
    side: usize,
    #[define(F)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= z.len() {
        terminate!();
    }
    let mut values = Vector::<f32, N>::cast_from(z[at]);
    let first = at * N::value();
    let (row, column) = ((first / side) % side, first % side);
    #[unroll]
    for j in 0..N::value() {
        if column + j == row {
            values.insert(j, values.extract(j) + 1.0);
        }
    }
    sum[at] = Vector::cast_from(values);
}
