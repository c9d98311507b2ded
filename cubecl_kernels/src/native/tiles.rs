//! The tiles of a product, and their distribution over the multiprocessors of a device.

use std::fmt;

use super::product::Product;

/// Rows of a tile for each block of a cluster.
pub(super) const HEIGHT: usize = 128;

/// Elements of the inner dimension in a slice: 128 bytes, the width of a swizzled row.
pub(super) const DEPTH: usize = 64;

/// Columns of tiles, each with kernels of its own.
pub(super) const WIDTHS: [usize; 2] = [128, 256];

/// Shared memory of which a multiprocessor does not have room for two blocks: half of its 228 KiB,
/// of which each block takes 1 KiB.
const SPREADING_BYTES: u32 = (114 << 10) - 1024 + 128;

/// The time to store a tile of 128 columns, in the time that a multiprocessor takes to multiply one
/// of its slices at full rate (0.35 µs at 790 TFLOP/s for 132 of them). An estimate, as the next.
const STORING: f64 = 1.7;

/// The time to read the sums of one part of such a tile: 64 KiB at 100 GB/s.
const ADDING: f64 = 2.0;

/// The tile that a cluster of blocks computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileShape {
    /// Columns: one of [`WIDTHS`].
    pub width: usize,
    /// Blocks, 1 or 2. Their rows lie below each other, and need the same columns of `B`.
    pub cluster: usize,
}

impl TileShape {
    /// All shapes.
    pub const ALL: [Self; 4] = [
        Self { width: 128, cluster: 1 },
        Self { width: 128, cluster: 2 },
        Self { width: 256, cluster: 1 },
        Self { width: 256, cluster: 2 },
    ];

    /// Returns the rows of the tile.
    pub fn height(self) -> usize {
        self.cluster * HEIGHT
    }

    /// Returns the index of its columns among [`WIDTHS`].
    pub fn width_index(self) -> usize {
        usize::from(self.width == 256)
    }

    /// Returns the bytes of shared memory of a block.
    pub fn shared_bytes(self) -> u32 {
        if self.width == 256 { 229_456 } else { 114_752 }
    }

    /// The blocks that a multiprocessor has room for.
    fn blocks_of_multiprocessor(self) -> usize {
        256 / self.width
    }

    /// The fraction of a multiprocessor's rate at which it multiplies. Assumed, not measured: wide
    /// tiles read less shared memory for each multiplication, and clusters less of the L2 cache.
    fn efficiency(self) -> f64 {
        match (self.width, self.cluster) {
            (128, 1) => 0.80,
            (128, _) => 0.85,
            (_, 1) => 0.90,
            _ => 0.95,
        }
    }

    /// The tiles of a matrix: of a symmetric one, those that reach the diagonal or lie below it.
    fn tiles(self, product: &Product) -> usize {
        let [m, n, _] = product.sizes;
        let (rows, columns) = (m.div_ceil(self.height()), n.div_ceil(self.width));
        let reached = |row: usize| ((row + 1) * self.height()).div_ceil(self.width);
        match product.lower {
            true => (0..rows).map(|row| reached(row).min(columns)).sum(),
            false => rows * columns,
        }
    }
}

impl fmt::Display for TileShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.height(), self.width)
    }
}

/// The distribution of a product's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grid {
    pub shape: TileShape,
    /// Tiles of a matrix.
    pub tiles: usize,
    /// Tiles that one cluster computes each.
    pub whole: usize,
    /// Tiles that several clusters compute, each a part of the inner dimension.
    pub cut: usize,
    /// Parts of each of these: at most the number of slices.
    pub parts: usize,
    /// Clusters of the launch, each of which has at most one part.
    pub clusters: usize,
}

impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { shape, whole, cut, parts, .. } = self;
        write!(f, "{whole} tiles of {shape}")?;
        if self.cut > 0 { write!(f, ", {cut} in {parts} parts") } else { Ok(()) }
    }
}

impl Grid {
    /// Returns the distribution that is estimated to take the least time, with tiles of one of the
    /// shapes, at least one, on a device with a number of multiprocessors, at least two.
    ///
    /// Tiles that are left once all multiprocessors have the same number are cut, so that the
    /// others do not wait for the few that have one more.
    pub fn fastest(product: &Product, shapes: &[TileShape], multiprocessors: usize) -> Self {
        let grids = shapes.iter().flat_map(|shape| Self::of(product, *shape, multiprocessors));
        let (_, fastest) = grids
            .min_by(|(time, _), (other, _)| time.total_cmp(other))
            .expect("a shape's tiles can be left whole");
        fastest
    }

    /// Returns the number of parts of all tiles that are cut.
    pub fn slots(&self) -> usize {
        self.cut * self.parts
    }

    /// Returns the bytes of shared memory of a block. If there is at most one for each
    /// multiprocessor, none has room for a second one, which would leave another without any.
    pub fn shared_bytes(&self, multiprocessors: usize) -> u32 {
        let least = self.shape.shared_bytes();
        let spreads = self.clusters * self.shape.cluster <= multiprocessors;
        if spreads { least.max(SPREADING_BYTES) } else { least }
    }

    /// All distributions of tiles of a shape, with their estimated times in the unit of
    /// [`STORING`].
    fn of(
        product: &Product,
        shape: TileShape,
        multiprocessors: usize,
    ) -> impl Iterator<Item = (f64, Self)> + use<> {
        let slices = product.sizes[2].div_ceil(DEPTH);
        let tiles = shape.tiles(product);
        let all = product.batch * tiles;
        // Groups of multiprocessors that have clusters together.
        let places = multiprocessors / shape.cluster;
        let (rounds, rest) = (all / places, all % places);
        let most_parts = places.checked_div(rest).unwrap_or(1).min(slices).max(1);
        (1..=most_parts).map(move |parts| {
            let cut = if parts > 1 { rest } else { 0 };
            let (whole, slots) = (all - cut, cut * parts);
            let clusters = (whole + slots).min(places * shape.blocks_of_multiprocessor());
            let grid = Self { shape, tiles, whole, cut, parts, clusters };
            (grid.time(slices, rounds, rest), grid)
        })
    }

    /// The estimated time if every place has some rounds of whole tiles, and some tiles are left.
    fn time(&self, slices: usize, rounds: usize, rest: usize) -> f64 {
        let columns = self.shape.width as f64 / 128.0;
        let multiplying = columns * slices as f64 / self.shape.efficiency();
        let storing = columns * STORING;
        let whole = rounds as f64 * multiplying;
        let part = if rest > 0 { multiplying / self.parts as f64 } else { 0.0 };
        let adding = if self.cut > 0 { self.parts as f64 * columns * ADDING } else { 0.0 };
        match self.shape.blocks_of_multiprocessor() {
            1 => whole + part + adding + (rounds + usize::from(rest > 0)) as f64 * storing,
            // While a block adds or stores, the other one multiplies, at most at half the rate.
            _ if rounds > 0 => (whole + part).max(2.0 * part + adding) + storing,
            _ => part + adding + storing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::product::Layout;
    use super::*;

    fn product(batch: usize, sizes: [usize; 3], lower: bool) -> Product {
        Product {
            layout: Layout::RowsColumns,
            batch,
            sizes,
            a: 0,
            b: 0,
            alpha: 1.0,
            addend: None,
            c: 0,
            lower,
        }
    }

    #[test]
    fn symmetric_products_have_tiles_up_to_the_diagonal() {
        let tiles =
            |sizes, lower| TileShape::ALL.map(|shape| shape.tiles(&product(1, sizes, lower)));
        assert_eq!(tiles([128, 128, 8], true), [1, 1, 1, 1]);
        assert_eq!(tiles([136, 136, 8], true), [3, 2, 2, 1]);
        assert_eq!(tiles([384, 384, 8], true), [6, 5, 4, 3]);
        assert_eq!(tiles([2048, 2048, 64], true), [136, 72, 72, 36]);
        assert_eq!(tiles([136, 264, 8], false), [6, 3, 4, 2]);
    }

    #[test]
    fn all_multiprocessors_have_as_much_to_do() {
        let fastest = |batch, rows, inner, multiprocessors| {
            let product = product(batch, [rows, rows, inner], true);
            Grid::fastest(&product, &TileShape::ALL, multiprocessors)
        };
        // On the 132 multiprocessors of an H200: of 72 tiles of 256 x 128, six are left, of each of
        // which eleven clusters multiply a part.
        let [_, tall, _, large] = TileShape::ALL;
        let grid = fastest(1, 2048, 2048, 132);
        let expected = Grid { shape: tall, tiles: 72, whole: 66, cut: 6, parts: 11, clusters: 132 };
        assert_eq!(grid, expected);
        // Of 406 tiles of 256 x 256, ten.
        let grid = fastest(1, 7168, 7168, 132);
        let expected =
            Grid { shape: large, tiles: 406, whole: 396, cut: 10, parts: 6, clusters: 66 };
        assert_eq!(grid, expected);
        // Nothing is left, and nothing can be cut.
        assert_eq!(fastest(132, 128, 512, 132).parts, 1);
        assert_eq!(fastest(1, 2048, 64, 132).parts, 1);
    }

    #[test]
    fn parts_have_a_cluster_and_a_slice_each() {
        for (batch, rows, inner) in
            [(1, 64, 64), (48, 768, 768), (1, 2048, 8192), (3, 1000, 200), (128, 512, 512)]
        {
            for lower in [false, true] {
                let product = product(batch, [rows, rows, inner], lower);
                for shape in TileShape::ALL {
                    for (time, grid) in Grid::of(&product, shape, 132) {
                        assert_eq!(grid.whole + grid.cut, batch * grid.tiles, "{grid:?}");
                        assert!(grid.slots() <= grid.clusters, "{grid:?}");
                        assert!(grid.slots() * shape.cluster <= 132, "{grid:?}");
                        assert!((1..=inner.div_ceil(DEPTH)).contains(&grid.parts), "{grid:?}");
                        assert!(grid.clusters * shape.cluster <= 132 * (256 / shape.width));
                        assert!(time.is_finite() && time > 0.0, "{grid:?}: {time}");
                    }
                }
            }
        }
    }
}
