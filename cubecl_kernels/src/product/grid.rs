//! Grids of cubes that cover a matrix, or exactly the tiles on and below its diagonal.

use cubecl::prelude::*;

/// The entries of the result that are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Triangle {
    /// All entries.
    Full,
    /// The entries on and below the diagonal; the others are their mirror images.
    Lower,
}

impl Triangle {
    /// Returns a grid of one cube for every tile to compute, in every matrix of a batch.
    ///
    /// The rows of tiles of a triangle are folded: the first row is joined with the last one, the
    /// second with the second to last, so that all joined rows have the same length. If the number
    /// of rows is odd, the last row is not joined. No cube is idle.
    ///
    /// ```text
    /// T = 4            T = 5
    /// 0                0                 joined rows of T = 5:   1 1 | 4 4 4 ...
    /// 1 1              1 1               row y has the y tiles of row y - 1
    /// 2 2 2            2 2 2             and the T - y tiles of row T - 1 - y
    /// 3 3 3 3          3 3 3 3
    ///                  4 4 4 4 4
    /// ```
    pub fn cube_count(self, rows: usize, columns: usize, batch: usize) -> CubeCount {
        let (rows, columns, batch) = (rows as u32, columns as u32, batch as u32);
        match self {
            Self::Full => CubeCount::Static(columns, rows, batch),
            // Row `i` and row `n - 1 - i` have `n + 1` tiles together, or `n` where `n` is odd and
            // a row stands alone: folded, the triangle is a rectangle without idle cubes.
            Self::Lower => CubeCount::Static(rows + 1 - rows % 2, rows.div_ceil(2), batch),
        }
    }

    /// Returns the number of cubes of one matrix.
    pub fn cubes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Full => rows * columns,
            Self::Lower => rows * (rows + 1) / 2,
        }
    }
}

/// Returns the row and the column of the tile of this cube.
#[cube]
pub fn cube_tile(rows: u32, #[comptime] triangle: Triangle) -> (u32, u32) {
    match triangle {
        Triangle::Full => (CUBE_POS_Y, CUBE_POS_X),
        Triangle::Lower => lower_tile(CUBE_POS_X, CUBE_POS_Y, rows),
    }
}

/// Returns the row and the column of the tile at a position in a folded triangle of `rows` rows of
/// tiles.
#[cube]
pub fn lower_tile(x: u32, y: u32, rows: u32) -> (u32, u32) {
    // The short row of the pair has this many tiles.
    let short = y + 1 - rows % 2;
    let in_short = x < short;
    // The unsigned differences wrap where they are not selected.
    (select(in_short, short - 1, rows - 1 - y), select(in_short, x, x - short))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folded_triangle_of_any_size_has_no_idle_cube() {
        for rows in 1..300 {
            let CubeCount::Static(x, y, z) = Triangle::Lower.cube_count(rows, rows, 7) else {
                panic!("a grid has a static count");
            };
            assert_eq!((x * y) as usize, Triangle::Lower.cubes(rows, rows), "{rows} rows of tiles");
            assert_eq!(z, 7);
        }
    }
}
