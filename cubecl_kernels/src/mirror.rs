//! The completion of symmetric matrices.

use cubecl::client::Client;
use cubecl::prelude::*;

use crate::error::{Result, check_addresses, check_buffer, check_count, check_dtype};
use crate::matrices::Matrices;
use crate::units::exchanging_units;

/// Side of the tile that a cube copies.
pub(crate) const TILE: u32 = 16;

/// Computes `C <- alpha C + beta D` from the lower triangles of a batch, in place, and copies the
/// result onto the upper triangles.
///
/// The matrices are square and contiguous, and of any size. The previous values of the upper
/// triangles are not read. The addend `D` is `[k, m, m]` of the same type, symmetric and
/// contiguous.
///
/// # Errors
///
/// Before anything is launched: [`Error::Dtype`](crate::Error::Dtype),
/// [`Error::Shape`](crate::Error::Shape), [`Error::Strides`](crate::Error::Strides),
/// [`Error::Buffer`](crate::Error::Buffer), [`Error::TooMany`](crate::Error::TooMany) and
/// [`Error::TooLarge`](crate::Error::TooLarge).
pub fn mirror(
    client: &Client,
    matrices: &Matrices,
    alpha: f32,
    addend: Option<(&Matrices, f32)>,
) -> Result<()> {
    check_dtype(client, matrices.dtype)?;
    let [k, m, _] = matrices.shape;
    matrices.check_square("C")?;
    if let Some((addend, _)) = addend {
        addend.check_like("D", matrices.shape, matrices.dtype)?;
    }
    let named_addend = addend.map(|(addend, _)| ("D", addend));
    for (name, operand) in [("C", matrices)].into_iter().chain(named_addend) {
        operand.check_contiguous(name)?;
        check_buffer(name, &operand.handle, operand.extent(), operand.dtype)?;
    }
    check_count(k, client.properties().hardware.max_cube_count.2)?;
    let elements = k * m * m;
    check_addresses(client, elements)?;
    if elements == 0 {
        return Ok(());
    }
    // One unit where units are threads, which wait longer for each other than they copy.
    let side = exchanging_units(&client.properties().hardware, TILE);
    let tiles = (m as u32).div_ceil(side);
    let count = CubeCount::Static(tiles, tiles, k as u32);
    // SAFETY: the buffers were checked above.
    let buffer =
        |operand: &Matrices| unsafe { BufferArg::from_raw_parts(operand.handle.clone(), elements) };
    let beta = addend.map_or(0.0, |(_, beta)| beta);
    let addend = match addend {
        Some((addend, _)) => ComptimeOptionArgs::Some(buffer(addend)),
        None => ComptimeOptionArgs::None,
    };
    mirror_tiles::launch(
        client,
        count,
        CubeDim::new_2d(side, side),
        AddressType::from_len(elements),
        buffer(matrices),
        addend,
        m as u32,
        alpha,
        beta,
        side,
        matrices.dtype,
    );
    Ok(())
}

/// Completes one tile per cube: the tile is read and its transpose written in whole rows each, with
/// shared memory in between. Cubes above the diagonal end immediately.
#[cube(launch, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn mirror_tiles<F: Float>(
    matrices: &mut [F],
    addend: &ComptimeOption<&[F]>,
    m: u32,
    alpha: f32,
    beta: f32,
    #[comptime] tile_side: u32,
    #[define(F)] _dtype: ElemType,
) {
    let (row_tile, column_tile) = (CUBE_POS_Y, CUBE_POS_X);
    if column_tile > row_tile {
        terminate!();
    }
    let side = m as usize;
    let base = CUBE_POS_Z as usize * side * side;
    // Rows of the tile are one element longer than needed: its columns, which are read below, then
    // spread over the banks of shared memory.
    let mut tile = Shared::<[F]>::new_slice(comptime!((tile_side * (tile_side + 1)) as usize));

    let row = row_tile * tile_side + UNIT_POS_Y;
    let column = column_tile * tile_side + UNIT_POS_X;
    if row < m && column <= row {
        let position = base + row as usize * side + column as usize;
        let mut value = alpha * f32::cast_from(matrices[position]);
        #[comptime]
        match addend {
            ComptimeOption::Some(addend) => value += beta * f32::cast_from(addend[position]),
            ComptimeOption::None => {}
        }
        let value = F::cast_from(value);
        matrices[position] = value;
        tile[(UNIT_POS_Y * (tile_side + 1) + UNIT_POS_X) as usize] = value;
    }
    sync_cube();

    let row = column_tile * tile_side + UNIT_POS_Y;
    let column = row_tile * tile_side + UNIT_POS_X;
    if row < column && column < m {
        matrices[base + row as usize * side + column as usize] =
            tile[(UNIT_POS_X * (tile_side + 1) + UNIT_POS_Y) as usize];
    }
}
