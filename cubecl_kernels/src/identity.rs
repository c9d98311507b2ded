//! The sum of a matrix and the identity.

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;

use crate::error::{Result, check_addresses, check_buffer, check_dtype};
use crate::matrices::Matrices;

/// Units of a cube.
const UNITS: u32 = 256;

/// Returns `Z + I` for every matrix of a batch. The matrices are square and contiguous.
///
/// # Errors
///
/// Before anything is launched: [`Error::Dtype`](crate::Error::Dtype),
/// [`Error::Shape`](crate::Error::Shape), [`Error::Strides`](crate::Error::Strides),
/// [`Error::Buffer`](crate::Error::Buffer) and [`Error::TooLarge`](crate::Error::TooLarge).
pub fn add_identity(client: &Client, z: &Matrices) -> Result<Matrices> {
    check_dtype(client, z.dtype)?;
    let [_, m, _] = z.shape;
    z.check_square("Z")?;
    z.check_contiguous("Z")?;
    let elements = z.extent();
    check_buffer("Z", &z.handle, elements, z.dtype)?;
    check_addresses(client, elements)?;
    let sum = Matrices::empty(client, z.dtype, z.shape);
    if elements == 0 {
        return Ok(sum);
    }
    let vector_size = z.vector_size(client);
    let vectors = elements / vector_size;
    let units = CubeDim::new_1d(UNITS);
    // SAFETY: both buffers hold the elements, and units past the end do nothing.
    unsafe {
        add_identity_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, vectors, units),
            units,
            AddressType::from_len(elements),
            vector_size,
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
    let position = ABSOLUTE_POS;
    if position >= z.len() {
        terminate!();
    }
    let mut values = Vector::<f32, N>::cast_from(z[position]);
    let first = position * N::value();
    let (row, column) = ((first / side) % side, first % side);
    // Vectors divide rows: all elements of a vector are in one row.
    #[unroll]
    for j in 0..N::value() {
        if column + j == row {
            values.insert(j, values.extract(j) + 1.0);
        }
    }
    sum[position] = Vector::cast_from(values);
}
