//! The launches of an iteration, as data.

use half::{bf16, f16};

/// Rows and columns of a tile.
pub(super) const TILE: usize = 128;

/// Elements of the inner dimension in a stage: 128 bytes, the width of a swizzled row.
pub(super) const DEPTH: u32 = 64;

/// Threads of a block: two warpgroups that multiply, and a warp that copies.
pub(super) const THREADS: u32 = 288;

/// Bytes of shared memory of a block: three stages of two operands, and room to align them.
pub(super) const SHARED_BYTES: u32 = 3 * 2 * TILE as u32 * DEPTH * 2 + 1024;

/// Threads of a block of `plus_identity`, and the neighbours that each of them adds to.
pub(super) const ELEMENTWISE: [usize; 2] = [256, 8];

/// The type of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Element {
    /// Both types, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::F16, Self::Bf16];

    /// Returns the bits of a number, rounded.
    pub(super) fn bits(self, value: f32) -> u16 {
        match self {
            Self::F16 => f16::from_f32(value).to_bits(),
            Self::Bf16 => bf16::from_f32(value).to_bits(),
        }
    }
}

/// The layout of the factors of a product `A B`. Every matrix is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `A` in rows and `B` in columns: of both, the inner dimension is contiguous.
    RowsColumns,
    /// Both in rows.
    RowsRows,
    /// `A` in columns and `B` in rows: of neither, the inner dimension is contiguous.
    ColumnsRows,
}

impl Layout {
    /// All layouts, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::RowsColumns, Self::RowsRows, Self::ColumnsRows];

    /// Returns the name of the kernel.
    pub(super) fn kernel(self) -> &'static str {
        match self {
            Self::RowsColumns => "product_kk",
            Self::RowsRows => "product_km",
            Self::ColumnsRows => "product_mm",
        }
    }

    /// Returns `true` for every factor whose inner dimension is contiguous.
    pub(super) fn inner_is_contiguous(self) -> [bool; 2] {
        match self {
            Self::RowsColumns => [true, true],
            Self::RowsRows => [true, false],
            Self::ColumnsRows => [false, false],
        }
    }
}

/// A product `C = alpha A B + beta D` of every matrix of a batch, by addresses on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// The layout of the factors.
    pub layout: Layout,
    /// Number of matrices.
    pub batch: usize,
    /// Rows, columns and inner dimension: multiples of 8.
    pub sizes: [usize; 3],
    /// `A`.
    pub a: u64,
    /// `B`.
    pub b: u64,
    /// `alpha`.
    pub alpha: f32,
    /// `D` and `beta`. A symmetric `C` has a symmetric `D`.
    pub addend: Option<(u64, f32)>,
    /// `C`, which overlaps none of the others.
    pub c: u64,
    /// `true` if `C` is known to be symmetric: only its lower triangle is computed.
    pub lower: bool,
}

/// The sum `Z + I` of every matrix of a batch, by addresses on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlusIdentity {
    /// Number of matrices.
    pub batch: usize,
    /// Rows, a multiple of 8.
    pub rows: usize,
    /// `Z`.
    pub z: u64,
    /// `Z + I`, which does not overlap `Z`.
    pub sum: u64,
}

/// A launch of an iteration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Launch {
    /// A product.
    Product(Product),
    /// A sum with the identity.
    PlusIdentity(PlusIdentity),
}

/// The fewest slices of a part of a tile: a part takes a round of its sums through memory, about as
/// long as a slice. An estimate.
const MIN_SLICES: usize = 4;

/// The most parts of a tile, which one block adds up.
const MAX_PARTS: usize = 16;

/// The blocks of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    /// Tiles that one block computes each.
    pub whole: usize,
    /// Tiles that several blocks compute.
    pub cut: usize,
    /// Blocks of each of these.
    pub parts: usize,
}

impl Grid {
    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.whole + self.cut * self.parts
    }
}

impl Product {
    /// Returns the number of tiles of a matrix that are computed.
    fn tiles(&self) -> usize {
        let [rows, columns] = [self.sizes[0], self.sizes[1]].map(|size| size.div_ceil(TILE));
        if self.lower { rows * (rows + 1) / 2 } else { rows * columns }
    }

    /// Returns the blocks for a device with a number of multiprocessors. Tiles that are left once
    /// all of these have the same number are cut along the inner dimension, so that the others do
    /// not wait for the few that have one more.
    pub(super) fn grid(&self, multiprocessors: usize) -> Grid {
        let tiles = self.batch * self.tiles();
        let rest = tiles % multiprocessors;
        let slices = self.sizes[2].div_ceil(DEPTH as usize);
        let parts = multiprocessors.checked_div(rest).unwrap_or(1);
        match parts.min(slices / MIN_SLICES).min(MAX_PARTS) {
            0 | 1 => Grid { whole: tiles, cut: 0, parts: 1 },
            parts => Grid { whole: tiles - rest, cut: rest, parts },
        }
    }

    /// Returns the tensors that the kernel copies: `A`, `B`, `D` (or `C` in its place), `C`.
    pub(super) fn tensors(&self) -> [Tiled; 4] {
        let [m, n, k] = self.sizes;
        let factor = |address, lines, inner_is_contiguous| match inner_is_contiguous {
            true => Tiled { address, sizes: [k, lines], tile: [DEPTH, TILE as u32] },
            false => Tiled { address, sizes: [lines, k], tile: [DEPTH, DEPTH] },
        };
        let result = |address| Tiled { address, sizes: [n, m], tile: [DEPTH, TILE as u32] };
        let [of_a, of_b] = self.layout.inner_is_contiguous();
        let d = self.addend.map_or(self.c, |(d, _)| d);
        [factor(self.a, m, of_a), factor(self.b, n, of_b), result(d), result(self.c)]
    }
}

/// A batch of contiguous matrices, of which tiles are copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tiled {
    pub address: u64,
    /// Elements of a line, and lines of a matrix.
    pub sizes: [usize; 2],
    /// The same of a tile.
    pub tile: [u32; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symmetric_products_have_a_triangle_of_tiles() {
        let product = |sizes, lower| Product {
            layout: Layout::RowsColumns,
            batch: 1,
            sizes,
            a: 0,
            b: 0,
            alpha: 1.0,
            addend: None,
            c: 0,
            lower,
        };
        assert_eq!(product([128, 128, 8], true).tiles(), 1);
        assert_eq!(product([136, 136, 8], true).tiles(), 3);
        assert_eq!(product([2048, 2048, 64], true).tiles(), 136);
        assert_eq!(product([136, 264, 8], false).tiles(), 6);
        // The 132 multiprocessors of an H200: of 136 tiles, four are left.
        let grid = product([2048, 2048, 2048], true).grid(132);
        assert_eq!((grid, grid.blocks()), (Grid { whole: 132, cut: 4, parts: 8 }, 164));
        // All of 36 tiles in three parts each.
        assert_eq!(
            product([1024, 1024, 1024], true).grid(132),
            Grid { whole: 0, cut: 36, parts: 3 }
        );
        // Too few slices, an even number, and more than half of the multiprocessors.
        assert_eq!(product([2048, 2048, 448], true).grid(132).parts, 1);
        assert_eq!(product([2048, 2048, 2048], true).grid(68).parts, 1);
        assert_eq!(product([1408, 1408, 2048], true).grid(132).parts, 2);
        assert_eq!(product([1536, 1536, 2048], true).grid(132).parts, 1);
    }

    #[test]
    fn constants_are_those_of_the_kernels() {
        let source = include_str!("kernels/product.cu");
        let constant = |name: &str| -> usize {
            let start = format!("constexpr int {name} = ");
            let (_, rest) = source.split_once(&start).unwrap_or_else(|| panic!("{name}"));
            let number = rest.split(';').next().unwrap_or_default();
            number.parse().unwrap_or_else(|error| panic!("{name}: {number}: {error}"))
        };
        assert_eq!(constant("TILE"), TILE);
        assert_eq!(constant("PANEL"), DEPTH as usize);
        assert_eq!(constant("THREADS"), THREADS as usize);
        assert_eq!(constant("SHARED_BYTES"), SHARED_BYTES as usize);
        assert_eq!(constant("SUM_THREADS"), ELEMENTWISE[0]);
    }
}
