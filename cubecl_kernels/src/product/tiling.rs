//! The division of a product among cubes, planes and units.

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

/// The instructions that multiply the smallest tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Matrix units, by `mma` instructions on registers whose layout the kernel chooses.
    Mma,
    /// Matrix units, as cooperative matrices.
    Cmma,
    /// Plain arithmetic in registers, for devices without matrix units.
    Registers,
}

/// The number of stages of the operands in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Buffering {
    /// One stage: it is filled, then multiplied.
    Single,
    /// Two stages: one is filled while the other is multiplied.
    Double,
}

/// A tiling of a product: one [`Unit`] multiplies `tile` elements at a time, one plane (or, with
/// registers, one unit of a plane) `partition` tiles, and one cube `stage` partitions.
///
/// `tile` and `partition` are sizes in `m`, `n` and the inner dimension, `stage` in `m` and `n`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// The instructions that multiply.
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
    /// Returns the rows and columns that a cube computes.
    pub fn side(&self) -> [usize; 2] {
        [0, 1].map(|i| (self.tile[i] * self.partition[i] * self.stage[i]) as usize)
    }

    /// Returns the length of the inner dimension that a cube has in shared memory at a time.
    pub fn depth(&self) -> u32 {
        self.tile[2] * self.partition[2]
    }

    /// Returns the tilings that suit a device and a type.
    ///
    /// Tilings for matrix units come before those by plain arithmetic, except on software devices,
    /// which only emulate matrix units. Of each [`Unit`], the largest tiling comes first.
    pub fn candidates(client: &Client, dtype: ElemType) -> Vec<Self> {
        Self::for_device(client.properties(), dtype)
    }

    pub(crate) fn for_device(properties: &DeviceProperties, dtype: ElemType) -> Vec<Self> {
        // Software devices have narrower planes than GPUs.
        let wide = properties.hardware.plane_size_max >= 32;
        let on_matrix_units = [Unit::Mma, Unit::Cmma]
            .into_iter()
            .filter_map(|unit| Some((unit, instruction(unit, dtype, properties)?)))
            .flat_map(|(unit, tile)| match wide {
                true => for_planes(unit, dtype, tile),
                false => for_narrow_planes(unit, tile),
            });
        // Always there: every device can multiply in registers.
        let on_units = for_units(&properties.hardware);
        match wide {
            true => on_matrix_units.chain(on_units).collect(),
            false => on_units.into_iter().chain(on_matrix_units).collect(),
        }
    }

    /// Returns the [candidates](Self::candidates), the most suitable for a result `[k, m, n]`
    /// first.
    ///
    /// They are ordered by their units, then by the work of the busiest multiprocessor. Of equal
    /// ones, the largest comes first among those that keep all multiprocessors busy, and the
    /// smallest among the others.
    pub(crate) fn by_suitability(
        properties: &DeviceProperties,
        dtype: ElemType,
        triangle: Triangle,
        [k, m, n]: [usize; 3],
    ) -> Vec<Self> {
        let mut candidates = Self::for_device(properties, dtype);
        let units: Vec<Unit> = candidates.iter().map(|tiling| tiling.unit).collect();
        let processors = properties.hardware.num_streaming_multiprocessors;
        candidates.sort_by_key(|tiling| {
            let [rows, columns] = tiling.side();
            let cubes = k * triangle.cubes(m.div_ceil(rows), n.div_ceil(columns));
            // Of equal loads, a tiling that leaves processors idle comes last.
            let fills = cubes >= processors.map_or(SOFTWARE_CUBES, |count| count as usize);
            // The work of the processor with the most cubes: what it multiplies, and what it reads
            // for that.
            let load = processors.map_or(0, |count| {
                let cost = rows * columns + READ_COST * (rows + columns);
                LATENCY_COST.max(cubes.div_ceil(count as usize) * cost)
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
            .expect("a scheme with all three sizes is complete")
    }

    /// Returns the buffering of operands in registers. Planes load one operand while they multiply
    /// another, if they have more than one.
    pub(super) fn partition_buffering(&self) -> PartitionBuffering {
        match self.unit {
            Unit::Mma | Unit::Cmma if self.partition[1] > 1 => PartitionBuffering::Double,
            Unit::Mma | Unit::Cmma | Unit::Registers => PartitionBuffering::Single,
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

/// Cubes that keep a device busy whose number of multiprocessors is unknown, such as a software
/// device.
const SOFTWARE_CUBES: usize = 8;

/// The cost of reading a row or column of a tile, in elements that a multiprocessor multiplies in
/// that time. Estimated from latencies and peak rates of Hopper, not measured.
const READ_COST: usize = 12;

/// The latency of a stage, in elements that a multiprocessor could multiply in that time: less work
/// takes as long. Estimated from latencies and peak rates of Hopper, not measured.
const LATENCY_COST: usize = 29_000;

fn triple<T: From<(u32, u32, u32)>>([m, n, k]: [u32; 3]) -> T {
    (m, n, k).into()
}

const F32: ElemType = ElemType::Float(FloatKind::F32);
const TF32: ElemType = ElemType::Float(FloatKind::TF32);

/// Returns the types of the operands. float32 is rounded to TF32 for matrix units that support it.
/// Sums are float32.
pub(super) fn types(unit: Unit, dtype: ElemType, properties: &DeviceProperties) -> MatmulElems {
    let mut types = MatmulElems::from_single_dtype(dtype);
    // Sums in half precision would lose most of a long inner dimension.
    (types.acc_global, types.acc_stage, types.acc_register) = (F32, F32, F32);
    if unit != Unit::Registers && dtype == F32 && properties.supports_type(TF32) {
        (types.lhs_stage, types.rhs_stage) = (TF32, TF32);
        (types.lhs_register, types.rhs_register) = (TF32, TF32);
    }
    types
}

/// Returns the tile of the largest instruction that multiplies a type and sums in float32.
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
    // Square instructions first: they read the fewest elements for each product.
    let best = offered.iter().filter(fits).max_by_key(|config| (square(config), config.k))?;
    Some([best.m, best.n, best.k])
}

/// Returns the tilings for planes of 32 units and more.
///
/// A plane computes a block of the result. The sums of a block and the operands must fit into the
/// registers of the plane's units: TF32 leaves room for 32x32, half precision for 32x64; 64x64
/// spills on some architectures. distmuon's `docs/results/kernels.md` lists the registers of each.
fn for_planes(unit: Unit, dtype: ElemType, tile: [u32; 3]) -> Vec<Tiling> {
    use Buffering::{Double, Single};
    // In half precision only: in float32, two stages of it take 64 KiB of shared memory.
    let large = (dtype.size() == 2).then_some((Double, [32, 64], [4, 2]));
    let others = [(Double, [32, 32], [2, 2]), (Single, [16, 32], [2, 1])];
    let tiling = |(buffering, block, stage): (_, [u32; 2], _)| Tiling {
        unit,
        buffering,
        tile,
        partition: [block[0] / tile[0], block[1] / tile[1], 32 / tile[2]],
        stage,
    };
    large.into_iter().chain(others).map(tiling).collect()
}

/// Returns the tilings for the narrow planes of software devices.
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

/// Returns the tilings by plain arithmetic. Every unit has a few small tiles, more of them on
/// devices that do not keep the sums of a unit in registers, and all tiles of a cube where units
/// are threads.
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
