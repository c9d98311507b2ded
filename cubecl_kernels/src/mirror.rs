//! Completion of symmetric matrices.

use cubecl::client::Client;
use cubecl::prelude::*;

use crate::error::{Error, Result, check_addresses, check_buffer, check_count, check_dtype};
use crate::matrices::Matrices;
use crate::units::together;

/// Side of the tile that a cube moves.
pub(crate) const TILE: u32 = 16;

/// Scales the lower triangle of every matrix of a batch, adds to it, and copies it onto the upper one,
/// in place: `C <- alpha C + beta D`.
///
/// The matrices are square and contiguous; any size will do. What the upper triangles held before is not
/// read. The addend `D` is `[k, m, m]` of the same type, symmetric and contiguous.
///
/// # Errors
///
/// Before anything is launched: [`Error::Dtype`], [`Error::Shape`], [`Error::Strides`], [`Error::Buffer`],
/// [`Error::TooMany`] and [`Error::TooLarge`].
pub fn mirror(
    client: &Client,
    matrices: &Matrices,
    alpha: f32,
    addend: Option<(&Matrices, f32)>,
) -> Result<()> {
    check_dtype(client, matrices.dtype)?;
    let [k, m, n] = matrices.shape;
    if m != n {
        let expected = "square".to_owned();
        return Err(Error::Shape { what: "C", found: matrices.shape, expected });
    }
    if let Some((addend, _)) = addend
        && (addend.shape != matrices.shape || addend.dtype != matrices.dtype)
    {
        let expected = format!("{:?} of {:?}", matrices.shape, matrices.dtype);
        return Err(Error::Shape { what: "D", found: addend.shape, expected });
    }
    let added = addend.map(|(addend, _)| ("D", addend));
    for (what, of) in [("C", matrices)].into_iter().chain(added) {
        if !of.is_contiguous() {
            return Err(Error::Strides(what));
        }
        check_buffer(what, &of.handle, of.extent(), of.dtype)?;
    }
    check_count(k, client.properties().hardware.max_cube_count.2)?;
    let elements = k * m * m;
    check_addresses(client, elements)?;
    if elements == 0 {
        return Ok(());
    }
    let side = together(&client.properties().hardware, TILE);
    let tiles = (m as u32).div_ceil(side);
    let count = CubeCount::Static(tiles, tiles, k as u32);
    // SAFETY: the buffers were checked above.
    let buffer = |of: &Matrices| unsafe { BufferArg::from_raw_parts(of.handle.clone(), elements) };
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

/// One cube a tile: the tile is read and its transpose written in whole rows each, with shared
/// memory in between. Cubes above the diagonal have nothing to do.
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
    let mut tile = Shared::<[F]>::new_slice(comptime!((tile_side * (tile_side + 1)) as usize));

    let row = row_tile * tile_side + UNIT_POS_Y;
    let column = column_tile * tile_side + UNIT_POS_X;
    if row < m && column <= row {
        let at = base + row as usize * side + column as usize;
        let mut value = alpha * f32::cast_from(matrices[at]);
        #[comptime]
        match addend {
            ComptimeOption::Some(addend) => value += beta * f32::cast_from(addend[at]),
            ComptimeOption::None => {}
        }
        let value = F::cast_from(value);
        matrices[at] = value;
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
