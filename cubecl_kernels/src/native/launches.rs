//! The launches of an iteration, as data.

use half::{bf16, f16};

/// Addresses are multiples of it: the copy engine takes no others.
pub(super) const ALIGNMENT: u64 = 16;

/// Threads of a block: two warpgroups that multiply, and a warp that copies.
pub(super) const THREADS: u32 = 288;

/// Threads of a block of `plus_identity`, and the neighbours that each of them adds to.
pub(super) const ELEMENTWISE: [usize; 2] = [256, 8];

/// The type of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

    /// Returns the nearest number of the type.
    pub(super) fn rounded(self, value: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(value).to_f32(),
            Self::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }
}

/// The layout of the factors of a product `A B`. Every matrix is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `A` in rows and `B` in columns: of both, the inner dimension is contiguous.
    RowsColumns,
    /// `A` and `B` in rows.
    RowsRows,
    /// `A` in columns and `B` in rows: of neither, the inner dimension is contiguous.
    ColumnsRows,
}

impl Layout {
    /// All layouts, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::RowsColumns, Self::RowsRows, Self::ColumnsRows];

    /// Returns the name of the kernel with tiles of a number of columns.
    pub(super) fn kernel_name(self, width: usize) -> String {
        let letters = match self {
            Self::RowsColumns => "kk",
            Self::RowsRows => "km",
            Self::ColumnsRows => "mm",
        };
        format!("product_{width}_{letters}")
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

/// The sum `factor Z + I` of every matrix of a batch, by addresses on the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlusIdentity {
    /// Number of matrices.
    pub batch: usize,
    /// Rows, a multiple of 8.
    pub rows: usize,
    /// `Z`.
    pub z: u64,
    /// The factor on `Z`.
    pub factor: f32,
    /// The sum, which does not overlap `Z`.
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
