//! Grids of cubes that cover a matrix, or exactly the tiles on and below its diagonal.

use cubecl::prelude::*;

/// Which entries of the result are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Triangle {
    /// All of them.
    Full,
    /// Those on and below the diagonal; the others are their mirror images.
    Lower,
}

impl Triangle {
    /// One cube for every tile to compute, in every matrix of a batch.
    ///
    /// The rows of tiles of a triangle are folded: the first row joins the last one, the second the
    /// last but one, so that all joined rows have the same length. With an odd number of rows it is
    /// the last row that stands alone. No cube is idle.
    ///
    /// ```text
    /// T = 4            T = 5
    /// 0                0                 joined rows of T = 5:   1 1 | 4 4 4 ...
    /// 1 1              1 1               row y holds the y tiles of row y - 1
    /// 2 2 2            2 2 2             and the T - y tiles of row T - 1 - y
    /// 3 3 3 3          3 3 3 3
    ///                  4 4 4 4 4
    /// ```
    pub fn cube_count(self, rows: usize, columns: usize, batch: usize) -> CubeCount {
        let (rows, columns, batch) = (rows as u32, columns as u32, batch as u32);
        match self {
            Self::Full => CubeCount::Static(columns, rows, batch),
            Self::Lower => CubeCount::Static(rows + 1 - rows % 2, rows.div_ceil(2), batch),
        }
    }

    /// How many cubes that are.
    pub fn cubes(self, rows: usize, columns: usize) -> usize {
        match self {
            Self::Full => rows * columns,
            Self::Lower => rows * (rows + 1) / 2,
        }
    }
}

/// The row and the column of the tile of this cube.
#[cube]
pub fn own_tile(rows: u32, #[comptime] triangle: Triangle) -> (u32, u32) {
    match triangle {
        Triangle::Full => (CUBE_POS_Y, CUBE_POS_X),
        Triangle::Lower => lower_tile(CUBE_POS_X, CUBE_POS_Y, rows),
    }
}

/// Unfolds a position in a folded triangle of so many rows of tiles.
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
    fn no_cube_is_idle() {
        for rows in 1..300 {
            let CubeCount::Static(x, y, z) = Triangle::Lower.cube_count(rows, rows, 7) else {
                panic!("the count is known");
            };
            assert_eq!((x * y) as usize, Triangle::Lower.cubes(rows, rows), "{rows} rows of tiles");
            assert_eq!(z, 7);
        }
    }
}
