//! How a product is divided among cubes, planes and units.

use core::fmt;

use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::ir::{DeviceProperties, ElemType, FloatKind, HardwareProperties};
use cubek_matmul::definition::MatmulElems;
use cubek_matmul::multi_level::components::stage::PartitionBuffering;
use cubek_matmul::multi_level::components::tile::TileMatmulKind;
use cubek_matmul::multi_level::definition::TilingScheme;

use super::grid::Triangle;
use crate::units;

/// What multiplies the smallest tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Matrix units, by `mma` instructions on registers that the kernel lays out itself.
    Mma,
    /// Matrix units, as cooperative matrices.
    Cmma,
    /// Plain arithmetic in registers, where there are no matrix units.
    Registers,
}

/// Stages of the operands in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Buffering {
    /// One: it is filled, then multiplied.
    Single,
    /// Two: one is filled while the other is multiplied.
    Double,
}

/// A tiling: `tile` elements by one [`Unit`] at a time, `partition` tiles by one plane (or, with
/// registers, by one unit of a plane), `stage` partitions by one cube. All as `m`, `n`, and for the
/// first two the inner dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// What multiplies.
    pub unit: Unit,
    /// Stages in shared memory.
    pub buffering: Buffering,
    /// Elements of a tile.
    pub tile: [u32; 3],
    /// Tiles of a partition.
    pub partition: [u32; 3],
    /// Partitions of a cube.
    pub stage: [u32; 2],
}

impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, buffering, tile: [m, n, k], .. } = self;
        let [rows, columns] = self.side();
        let unit = format!("{unit:?}").to_lowercase();
        let buffering = format!("{buffering:?}").to_lowercase();
        write!(f, "{unit} {m}x{n}x{k}, cube {rows}x{columns}x{}, {buffering}", self.depth())
    }
}

impl Tiling {
    /// Rows and columns that a cube computes.
    pub fn side(&self) -> [usize; 2] {
        [0, 1].map(|i| (self.tile[i] * self.partition[i] * self.stage[i]) as usize)
    }

    /// The part of the inner dimension that a cube has in shared memory at a time.
    pub fn depth(&self) -> u32 {
        self.tile[2] * self.partition[2]
    }

    /// The tilings that suit a device and a type, by what multiplies: matrix units before plain
    /// arithmetic, but for software devices, which only imitate them; and the largest first.
    pub fn candidates(client: &Client, dtype: ElemType) -> Vec<Self> {
        Self::of(client.properties(), dtype)
    }

    pub(crate) fn of(properties: &DeviceProperties, dtype: ElemType) -> Vec<Self> {
        let wide = properties.hardware.plane_size_max >= 32;
        let on_matrix_units = [Unit::Mma, Unit::Cmma]
            .into_iter()
            .filter_map(|unit| Some((unit, instruction(unit, dtype, properties)?)))
            .flat_map(|(unit, tile)| match wide {
                true => for_planes(unit, dtype, tile),
                false => for_narrow_planes(unit, tile),
            });
        let on_units = for_units(&properties.hardware);
        match wide {
            true => on_matrix_units.chain(on_units).collect(),
            false => on_units.into_iter().chain(on_matrix_units).collect(),
        }
    }

    /// The [candidates](Self::candidates), the most suitable for a result `[k, m, n]` first: by what multiplies;
    /// then those that leave the busiest multiprocessor the least to do; of equals, the largest that keeps
    /// all multiprocessors busy, or else the smallest.
    pub(crate) fn by_suitability(
        properties: &DeviceProperties,
        dtype: ElemType,
        triangle: Triangle,
        [k, m, n]: [usize; 3],
    ) -> Vec<Self> {
        let mut candidates = Self::of(properties, dtype);
        let units: Vec<Unit> = candidates.iter().map(|tiling| tiling.unit).collect();
        let processors = properties.hardware.num_streaming_multiprocessors;
        candidates.sort_by_key(|tiling| {
            let [rows, columns] = tiling.side();
            let cubes = k * triangle.cubes(m.div_ceil(rows), n.div_ceil(columns));
            let fills = cubes >= processors.map_or(CUBES_OF_SOFTWARE, |count| count as usize);
            let load = processors.map_or(0, |count| {
                let cost = rows * columns + READ * (rows + columns);
                HIDDEN.max(cubes.div_ceil(count as usize) * cost)
            });
            let area = (rows * columns) as isize;
            let unit = units.iter().position(|unit| *unit == tiling.unit);
            (unit, load, !fills, if fills { -area } else { area })
        });
        candidates
    }

    pub(super) fn scheme(&self) -> TilingScheme {
        let [m, n] = self.stage;
        TilingScheme::builder()
            .with_tile_size(triple(self.tile))
            .with_partition_size(triple(self.partition))
            .with_stage_size((m, n, 1).into())
            .build()
            .expect("all three sizes are given")
    }

    /// Operands of planes are loaded while others are multiplied, if there is more than one.
    pub(super) fn partition_buffering(&self) -> PartitionBuffering {
        match self.unit {
            Unit::Mma | Unit::Cmma if self.partition[1] > 1 => PartitionBuffering::Double,
            _ => PartitionBuffering::Single,
        }
    }

    pub(super) fn kind(&self) -> TileMatmulKind {
        match self.unit {
            Unit::Mma => TileMatmulKind::Mma,
            Unit::Cmma => TileMatmulKind::Cmma,
            Unit::Registers => TileMatmulKind::Register,
        }
    }
}

/// Cubes that keep a device busy that does not tell how many it runs at a time.
const CUBES_OF_SOFTWARE: usize = 8;

/// What reading a row or column of a tile costs a multiprocessor, in elements that it multiplies meanwhile; and
/// how many it could multiply while it waits for the next stage anyway. Estimated from latencies and peak rates
/// of Hopper, not measured.
const READ: usize = 12;
const HIDDEN: usize = 29_000;

fn triple<T: From<(u32, u32, u32)>>([m, n, k]: [u32; 3]) -> T {
    (m, n, k).into()
}

const F32: ElemType = ElemType::Float(FloatKind::F32);
const TF32: ElemType = ElemType::Float(FloatKind::TF32);

/// The types of operands in registers, float32 being rounded to TF32 for matrix units that take it.
/// Sums are float32.
pub(super) fn types(unit: Unit, dtype: ElemType, properties: &DeviceProperties) -> MatmulElems {
    let mut types = MatmulElems::from_single_dtype(dtype);
    (types.acc_global, types.acc_stage, types.acc_register) = (F32, F32, F32);
    if unit != Unit::Registers && dtype == F32 && properties.supports_type(TF32) {
        (types.lhs_stage, types.rhs_stage) = (TF32, TF32);
        (types.lhs_register, types.rhs_register) = (TF32, TF32);
    }
    types
}

/// The largest instruction that multiplies this type and sums in float32.
fn instruction(unit: Unit, dtype: ElemType, properties: &DeviceProperties) -> Option<[u32; 3]> {
    let types = types(unit, dtype, properties);
    let matmul = &properties.features.matmul;
    let offered = if unit == Unit::Mma { &matmul.mma } else { &matmul.cmma };
    let fits = |config: &&MmaConfig| {
        config.a_type == types.lhs_register
            && config.b_type == types.rhs_register
            && config.cd_type == F32
    };
    let square = |config: &MmaConfig| config.m.min(config.n);
    let best = offered.iter().filter(fits).max_by_key(|config| (square(config), config.k))?;
    Some([best.m, best.n, best.k])
}

/// Tilings for planes of 32 units and more, by the share of the result that a plane has. The sums of a
/// share and the operands beside them must fit into the registers of its units: TF32 leaves room for
/// 32x32, half precision for 32x64; 64x64 spills on some architectures. See `docs/kernels.md` for what the
/// compilers make of each.
fn for_planes(unit: Unit, dtype: ElemType, tile: [u32; 3]) -> Vec<Tiling> {
    use Buffering::{Double, Single};
    let large = (dtype.size() == 2).then_some((Double, [32, 64], [4, 2]));
    let others = [(Double, [32, 32], [2, 2]), (Single, [16, 32], [2, 1])];
    let tiling = |(buffering, share, stage): (_, [u32; 2], _)| Tiling {
        unit,
        buffering,
        tile,
        partition: [share[0] / tile[0], share[1] / tile[1], 32 / tile[2]],
        stage,
    };
    large.into_iter().chain(others).map(tiling).collect()
}

/// Tilings for the narrow planes of software devices.
fn for_narrow_planes(unit: Unit, tile: [u32; 3]) -> Vec<Tiling> {
    [([2, 8, 1], [4, 1]), ([2, 2, 2], [2, 2])]
        .map(|(partition, stage)| Tiling {
            unit,
            buffering: Buffering::Single,
            tile,
            partition,
            stage,
        })
        .into()
}

/// Tilings by plain arithmetic: every unit has a few small tiles, and more of them where the sums of a
/// unit are no registers; all tiles of a cube where units are threads.
fn for_units(hardware: &HardwareProperties) -> Vec<Tiling> {
    let stages = match hardware.plane_size_max {
        _ if units::are_threads(hardware) => vec![([2, 2, 4], [1, 1])],
        ..32 => vec![([2, 4, 4], [16, 8]), ([2, 2, 4], [8, 8]), ([1, 1, 4], [8, 8])],
        _ => vec![([2, 2, 4], [16, 16]), ([2, 2, 4], [8, 8]), ([1, 1, 4], [8, 8])],
    };
    let tiling = |(partition, stage)| Tiling {
        unit: Unit::Registers,
        buffering: Buffering::Single,
        tile: [4, 4, 4],
        partition,
        stage,
    };
    stages.into_iter().map(tiling).collect()
}
