//! Completion of symmetric matrices.

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Side of the tile that a cube moves.
const TILE: u32 = 16;

/// Copies the lower triangle of every matrix of a batch onto its upper one, in place.
///
/// `matrices` holds `[batch, m, m]` elements of type `F`, in order; any `m` will do. What the upper
/// triangles held before is not read.
pub fn mirror<F: Float + CubeElement>(client: &Client, matrices: &Handle, m: usize, batch: usize) {
    if m == 0 || batch == 0 {
        return;
    }
    let tiles = (m as u32).div_ceil(TILE);
    let count = CubeCount::Static(tiles, tiles, batch as u32);
    // SAFETY: the buffer holds batch * m * m elements, by contract.
    let buffer = unsafe { BufferArg::from_raw_parts(matrices.clone(), batch * m * m) };
    mirror_tiles::launch::<F>(client, count, CubeDim::new_2d(TILE, TILE), buffer, m as u32);
}

/// One cube a tile: the tile is read and its transpose written in whole rows each, with shared
/// memory in between. Cubes above the diagonal have nothing to do.
#[cube(launch)]
fn mirror_tiles<F: Float>(matrices: &mut [F], m: u32) {
    let (row_tile, column_tile) = (CUBE_POS_Y, CUBE_POS_X);
    if column_tile > row_tile {
        terminate!();
    }
    let base = (CUBE_POS_Z * m * m) as usize;
    let mut tile = Shared::<[F]>::new_slice(comptime!((TILE * (TILE + 1)) as usize));

    let row = row_tile * TILE + UNIT_POS_Y;
    let column = column_tile * TILE + UNIT_POS_X;
    if row < m && column < m {
        tile[(UNIT_POS_Y * (TILE + 1) + UNIT_POS_X) as usize] =
            matrices[base + (row * m + column) as usize];
    }
    sync_cube();

    let row = column_tile * TILE + UNIT_POS_Y;
    let column = row_tile * TILE + UNIT_POS_X;
    if row < column && column < m {
        matrices[base + (row * m + column) as usize] =
            tile[(UNIT_POS_X * (TILE + 1) + UNIT_POS_Y) as usize];
    }
}
