//! The tiles of a product, and the choice of their distribution over the multiprocessors of a
//! device, by times that were measured on an H200.

use std::fmt;

use super::launches::Product;

/// Rows of a tile for each block of a cluster.
pub(super) const HEIGHT: usize = 128;

/// Elements of the inner dimension in a slice: 128 bytes, the width of a swizzled row.
pub(super) const DEPTH: usize = 64;

/// Columns of tiles, each with kernels of its own.
pub(super) const WIDTHS: [usize; 2] = [128, 256];

/// Shared memory of which a multiprocessor does not have room for two blocks: half of its 228 KiB,
/// of which each block takes 1 KiB.
const SPREADING_BYTES: u32 = (114 << 10) - 1024 + 128;

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

    fn costs(self) -> Costs {
        match (self.width, self.cluster) {
            (128, 1) => Costs { launch: 4.38, slice: 0.559, tile: 0.73, cut: 3.53, part: 0.87 },
            (128, _) => Costs { launch: 4.20, slice: 0.458, tile: 1.70, cut: 4.08, part: 0.56 },
            (_, 1) => Costs { launch: 0.0, slice: 0.807, tile: 5.05, cut: 2.43, part: 2.34 },
            _ => Costs { launch: 0.0, slice: 0.663, tile: 5.87, cut: 3.10, part: 2.02 },
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

/// The microseconds that the work with tiles of a shape takes: the least squares of the relative
/// errors for the symmetric products of `tile_times_h200.csv`, measured on an H200 on 2026-11-26.
/// The average error is 5 to 7 %. Only ratios matter: other devices of the kind keep them.
struct Costs {
    /// The launch.
    launch: f64,
    /// A slice, where all multiprocessors multiply.
    slice: f64,
    /// The end of a tile: its sums are converted and stored.
    tile: f64,
    /// The meeting of the parts of cut tiles.
    cut: f64,
    /// The sums of a part of a cut tile.
    part: f64,
}

/// The microseconds of a slice of narrow tiles while a multiprocessor has one block instead of two.
const LONE_SLICE: f64 = 0.43;

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
    /// Returns the grid that is estimated to be the fastest, with tiles of one of the shapes (at
    /// least one), on at least two multiprocessors.
    ///
    /// Tiles are cut in matrices that are [alone](Product::launches): once all multiprocessors have
    /// the same number of tiles, those that are left are cut, so that the others do not wait for
    /// the few that have one more. All other tiles are whole, whatever the batch, so the bits of a
    /// result do not depend on it: in tiles of all shapes, an entry is the same sum.
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

    /// All distributions of tiles of a shape, with their estimated times in microseconds.
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
        // A small matrix is never cut, so that its bits do not depend on the batch that it is in.
        let is_alone = product.batch == 1 && fills(product, multiprocessors);
        let most_parts = match rest {
            1.. if is_alone && rounds > 0 => (places / rest).min(slices),
            _ => 1,
        };
        (1..=most_parts).map(move |parts| {
            let cut = if parts > 1 { rest } else { 0 };
            let (whole, slots) = (all - cut, cut * parts);
            let clusters = (whole + slots).min(places * shape.blocks_of_multiprocessor());
            let grid = Self { shape, tiles, whole, cut, parts, clusters };
            (grid.time(slices, rounds, rest), grid)
        })
    }

    /// The estimated microseconds if every place has some rounds of whole tiles, and some tiles are
    /// left.
    fn time(&self, slices: usize, rounds: usize, rest: usize) -> f64 {
        let Costs { launch, slice, tile, cut, part } = self.shape.costs();
        let slices = slices as f64;
        let parts = self.parts as f64;
        let all_rounds = (rounds + usize::from(rest > 0)) as f64;
        if self.cut > 0 {
            let multiplied = (rounds as f64 + 1.0 / parts) * slices;
            return launch + multiplied * slice + all_rounds * tile + cut + parts * part;
        }
        // In a single round, a multiprocessor has one block instead of two, which multiplies
        // faster.
        if all_rounds == 1.0 && self.shape.blocks_of_multiprocessor() > 1 {
            return launch + slices * LONE_SLICE;
        }
        launch + all_rounds * (slices * slice + tile)
    }
}

impl Product {
    /// Returns the products of the launches that compute this one: of each matrix alone if it fills
    /// a device with a number of multiprocessors, else of all matrices together. So the launch of
    /// a matrix depends on its size only, and its bits do not depend on the batch.
    pub(super) fn launches(&self, multiprocessors: usize) -> impl Iterator<Item = Self> + use<> {
        let (product, [m, n, k]) = (*self, self.sizes);
        let (launches, batch) = match fills(self, multiprocessors) {
            true => (self.batch, 1),
            false => (1, self.batch),
        };
        (0..launches).map(move |index| {
            let of = |address: u64, elements: usize| address + (2 * index * elements) as u64;
            Self {
                batch,
                a: of(product.a, m * k),
                b: of(product.b, k * n),
                addend: product.addend.map(|(d, beta)| (of(d, m * n), beta)),
                c: of(product.c, m * n),
                ..product
            }
        })
    }

    /// Returns the tensors that the kernel copies, in boxes for tiles of a shape: `A`, `B`, `D` (or
    /// `C` in its place), `C`.
    pub(super) fn tensors(&self, shape: TileShape) -> [Boxed; 4] {
        const PANEL: u32 = DEPTH as u32;
        let [m, n, k] = self.sizes;
        let factor = |address, lines, in_box, inner_is_contiguous| match inner_is_contiguous {
            true => Boxed { address, sizes: [k, lines], in_box: [PANEL, in_box as u32] },
            false => Boxed { address, sizes: [lines, k], in_box: [PANEL, PANEL] },
        };
        let result = |address, in_box| Boxed { address, sizes: [n, m], in_box: [PANEL, in_box] };
        let [of_a, of_b] = self.layout.inner_is_contiguous();
        // A tensor map needs an address, also where nothing is copied by it.
        let d = self.addend.map_or(self.c, |(d, _)| d);
        [
            factor(self.a, m, HEIGHT, of_a),
            // Each of two blocks of a cluster copies a half.
            factor(self.b, n, shape.width / 2, of_b),
            result(d, HEIGHT as u32),
            result(self.c, PANEL),
        ]
    }
}

/// A batch of contiguous matrices, of which boxes are copied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Boxed {
    pub address: u64,
    /// Elements of a line, and lines of a matrix.
    pub sizes: [usize; 2],
    /// Elements of a line, and lines, of a box.
    pub in_box: [u32; 2],
}

/// Returns `true` if a matrix of the product has a tile of the largest shape for each place of a
/// device.
fn fills(product: &Product, multiprocessors: usize) -> bool {
    let [.., largest] = TileShape::ALL;
    largest.tiles(product) >= multiprocessors / largest.cluster
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::launches::{ELEMENTWISE, Layout, THREADS};
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
    fn constants_are_those_of_the_kernels() {
        let source = include_str!("kernels/product.cu");
        let constant = |name: &str| -> usize {
            let start = format!("constexpr int {name} = ");
            let (_, rest) = source.split_once(&start).unwrap_or_else(|| panic!("{name}"));
            let number = rest.split(';').next().unwrap_or_default();
            number.parse().unwrap_or_else(|error| panic!("{name}: {number}: {error}"))
        };
        assert_eq!(constant("HEIGHT"), HEIGHT);
        assert_eq!(constant("PANEL"), DEPTH);
        assert_eq!(constant("THREADS"), THREADS as usize);
        for shape in TileShape::ALL {
            let bytes = constant(&format!("SHARED_BYTES_{}", shape.width));
            assert_eq!(bytes, shape.shared_bytes() as usize);
        }
        assert_eq!(constant("SUM_THREADS"), ELEMENTWISE[0]);
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
        let [small, .., large] = TileShape::ALL;
        // On the 132 multiprocessors of an H200: of 136 tiles of 256 x 256, four are left, of each
        // of which five clusters multiply a part.
        let grid = fastest(1, 4096, 4096, 132);
        let expected =
            Grid { shape: large, tiles: 136, whole: 132, cut: 4, parts: 5, clusters: 66 };
        assert_eq!(grid, expected);
        // Of 406 tiles, ten.
        let grid = fastest(1, 7168, 7168, 132);
        let expected =
            Grid { shape: large, tiles: 406, whole: 396, cut: 10, parts: 6, clusters: 66 };
        assert_eq!(grid, expected);
        // Smaller matrices have whole tiles, alone and in a batch.
        let grid = fastest(48, 768, 768, 132);
        let expected =
            Grid { shape: small, tiles: 21, whole: 1008, cut: 0, parts: 1, clusters: 264 };
        assert_eq!(grid, expected);
        assert_eq!(fastest(1, 2048, 2048, 132).cut, 0);
    }

    /// A rank that has three matrices computes the bits of one that has twelve.
    #[test]
    fn cuts_depend_on_the_matrix_and_not_on_the_batch() {
        for (rows, inner) in [(64, 64), (768, 3072), (1032, 4104), (2048, 8192), (4096, 4096)] {
            for lower in [true, false] {
                let cuts = [1, 2, 3, 12, 48].map(|batch| {
                    let launches: Vec<Product> =
                        product(batch, [rows, rows, inner], lower).launches(132).collect();
                    assert_eq!(launches.iter().map(|launch| launch.batch).sum::<usize>(), batch);
                    let grid = Grid::fastest(&launches[0], &TileShape::ALL, 132);
                    (grid.cut, grid.parts, if grid.cut > 0 { Some(grid.shape) } else { None })
                });
                assert_eq!(cuts, [cuts[0]; 5], "{rows} x {inner}");
            }
        }
    }

    #[test]
    fn launches_of_large_matrices_have_the_addresses_of_each() {
        let sizes @ [m, n, k] = [2304, 2560, 64].map(|size: usize| size as u64);
        let addend = Some((3, 1.0));
        let batch = Product {
            a: 1,
            b: 2,
            addend,
            c: 4,
            ..product(3, sizes.map(|size| size as usize), false)
        };
        let launches: Vec<Product> = batch.launches(132).collect();
        for (index, launch) in (0..).zip(&launches) {
            let at = |first: u64, elements: u64| first + 2 * index * elements;
            let addresses = (launch.a, launch.b, launch.addend, launch.c);
            let addend = Some((at(3, m * n), 1.0));
            assert_eq!(addresses, (at(1, m * k), at(2, k * n), addend, at(4, m * n)));
        }
        assert_eq!(launches.len(), 3);
    }

    /// A product as it was measured.
    struct Measured {
        /// The source, the batch, the sizes and the name: times are compared within a group.
        group: [&'static str; 5],
        product: Product,
        shape: TileShape,
        parts: usize,
        microseconds: f64,
    }

    impl Measured {
        fn is_of_sweep(&self) -> bool {
            self.group[0] == "sweep"
        }
    }

    /// The products that were measured, except cuBLASLt's.
    fn measured() -> Vec<Measured> {
        let rows = include_str!("tile_times_h200.csv").lines().skip(1);
        let parsed = rows.filter_map(|row| {
            let fields: Vec<&str> = row.split(',').collect();
            let number = |column: usize| fields[column].parse::<usize>().ok();
            let [batch, m, n] = [1, 2, 3].map(|column| number(column).expect("a size"));
            let group: [&str; 5] = fields[..5].try_into().expect("five columns");
            let [.., name] = group;
            let sizes = match name {
                "Q X" => [m, n, m],
                "X X^T" | "X^T X" => [m, m, n],
                _ => [m, m, m],
            };
            let shape = TileShape { width: number(6)?, cluster: number(5)? / HEIGHT };
            let addend = (name == "b R + c R^2").then_some((0, 1.0));
            Some(Measured {
                group,
                product: Product { addend, ..product(batch, sizes, name != "Q X") },
                shape,
                parts: number(9)?,
                microseconds: fields[10].parse().expect("a time"),
            })
        });
        parsed.collect()
    }

    /// The rows of each product and source.
    fn by_group(rows: &[Measured]) -> BTreeMap<[&str; 5], Vec<&Measured>> {
        let mut groups = BTreeMap::<_, Vec<_>>::new();
        for row in rows {
            groups.entry(row.group).or_default().push(row);
        }
        groups
    }

    fn fastest(rows: &[&Measured]) -> f64 {
        rows.iter().map(|row| row.microseconds).fold(f64::INFINITY, f64::min)
    }

    fn mean(values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / values.len() as f64
    }

    /// Fails if choices take more than 2 % longer than the fastest on average, or one of them 8 %.
    fn assert_nearly_fastest(regrets: &[f64]) {
        let worst = regrets.iter().copied().fold(0.0, f64::max);
        assert!(mean(regrets) < 0.02 && worst < 0.08, "{}, {worst}: {regrets:?}", mean(regrets));
    }

    #[test]
    fn estimates_are_close_to_measured_times() {
        let measured = measured();
        let symmetric = measured.iter().filter(|row| row.product.lower && !row.is_of_sweep());
        let errors = symmetric.filter_map(|row| {
            // Tiles that were cut in a batch no longer are.
            let mut grids = Grid::of(&row.product, row.shape, 132);
            let (estimate, _) = grids.find(|(_, grid)| grid.parts == row.parts)?;
            Some((estimate / row.microseconds - 1.0).abs())
        });
        let errors: Vec<f64> = errors.collect();
        assert!(errors.len() > 50 && mean(&errors) < 0.08, "{} of {errors:?}", mean(&errors));
    }

    /// Tiles of the chosen shape took nearly the time of the fastest ones, for each product that
    /// was measured with all shapes.
    #[test]
    fn chosen_shapes_are_nearly_the_fastest_that_were_measured() {
        let measured = measured();
        let groups = by_group(&measured).into_values().filter(|rows| !rows[0].is_of_sweep());
        let regrets = groups.map(|rows| {
            let chosen = Grid::fastest(&rows[0].product, &TileShape::ALL, 132).shape;
            let of_shape: Vec<&Measured> =
                rows.iter().copied().filter(|row| row.shape == chosen).collect();
            fastest(&of_shape) / fastest(&rows) - 1.0
        });
        let regrets: Vec<f64> = regrets.collect();
        assert_eq!(regrets.len(), 63);
        assert_nearly_fastest(&regrets);
    }

    /// The same for shapes and parts, where exactly these were measured. One matrix of 1024 x 4096
    /// is not cut, so that it has the bits that it has in a batch.
    #[test]
    fn chosen_parts_are_nearly_the_fastest_that_were_measured() {
        let measured = measured();
        let mut regrets = Vec::new();
        for (group, rows) in by_group(&measured) {
            let chosen = Grid::fastest(&rows[0].product, &TileShape::ALL, 132);
            let is_chosen =
                |row: &&&Measured| (chosen.shape, chosen.parts) == (row.shape, row.parts);
            let regret = |row: &&Measured| (row.microseconds / fastest(&rows) - 1.0, group);
            regrets.extend(rows.iter().find(is_chosen).map(regret));
        }
        let (uncut, judged): (Vec<_>, Vec<_>) =
            regrets.iter().partition(|(_, group)| group[..4] == ["sweep", "1", "1024", "4096"]);
        let [(uncut, _)] = uncut[..] else { panic!("{uncut:?}") };
        assert!((0.4..0.5).contains(&uncut), "{uncut}");
        let judged: Vec<f64> = judged.into_iter().map(|(regret, _)| regret).collect();
        assert!(judged.len() >= 32, "{regrets:?}");
        assert_nearly_fastest(&judged);
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
