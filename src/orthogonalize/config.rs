//! The configuration of the iteration.

use burn::backend::{Backend, DTypeUsage, Dispatch};
use burn::config::Config;
use burn::tensor::{DType, Device, FloatDType};
use serde::{Deserialize, Serialize};

use super::coefficients::Coefficients;

/// The precision of the iteration. The norm before it is computed in float32 at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum IterationDtype {
    /// float64 for float64 matrices. For all others float16, or else bfloat16, where the device has
    /// matrix units for that type, and float32 elsewhere.
    Auto,
    /// float32, or float64 for float64 matrices.
    F32,
    /// float16: eight times as exact as bfloat16, because of three more bits of mantissa.
    F16,
    /// bfloat16. `docs/design/precision.md` has the errors of all types.
    Bf16,
}

impl IterationDtype {
    /// The type that tensors of `dtype` on `device` are iterated in.
    pub(super) fn resolve(self, device: &Device, dtype: DType) -> FloatDType {
        let accelerated = |half: DType| {
            Dispatch::dtype_usage(device.as_dispatch(), half).contains(DTypeUsage::Accelerated)
        };
        match self {
            // Training in float64 asks for its digits.
            Self::Auto | Self::F32 if dtype == DType::F64 => FloatDType::F64,
            Self::Auto if accelerated(DType::F16) => FloatDType::F16,
            Self::Auto if accelerated(DType::BF16) => FloatDType::BF16,
            Self::Auto | Self::F32 => FloatDType::F32,
            Self::F16 => FloatDType::F16,
            Self::Bf16 => FloatDType::BF16,
        }
    }

    /// The types that [`resolve`](Self::resolve) may return.
    pub(super) fn candidates(self) -> &'static [FloatDType] {
        match self {
            Self::Auto => &[FloatDType::F16, FloatDType::BF16, FloatDType::F32, FloatDType::F64],
            Self::F32 => &[FloatDType::F32, FloatDType::F64],
            Self::F16 => &[FloatDType::F16],
            Self::Bf16 => &[FloatDType::BF16],
        }
    }
}

/// The form of the iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum IterationForm {
    /// The form with fewer operations for the shape. The standard form runs nevertheless
    ///
    /// - where the Gram form would take more than three times the memory of the matrix: for nearly
    ///   square matrices, unless the iteration is in half the precision of the matrix;
    /// - where [`restarts::choose`](super::restarts::choose) finds no restarts that keep the error
    ///   of the Gram form within about three times the standard form's. Where all singular values
    ///   of a matrix are equal, all roundings agree, which that prediction leaves out: in bfloat16,
    ///   the Gram form may scale such a matrix by a further tenth;
    /// - in float32 where the device multiplies in TF32, which has 10 bits of mantissa: there the
    ///   standard form is up to a hundred times as exact.
    Auto,
    /// The form that multiplies `X` at every step.
    Standard,
    /// The form that iterates on `X X^T` and multiplies `X` only at restarts and at the end.
    ///
    /// [`restarts::choose`](super::restarts::choose) computes the restarts;
    /// [`NewtonSchulzConfig::init`] fails where it finds none. In float32 on a device that
    /// multiplies in TF32, it has the restarts of float16 and is about as exact as in float16; the
    /// standard form runs if float16 has no restarts.
    Gram,
}

/// The norm by which a matrix is divided before the iteration, or those by which its rows are. The
/// singular values are then at most 1, and the larger they are, the closer five steps bring them to
/// 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Normalization {
    /// The root of the sum of all squares, as in most of the field.
    Frobenius,
    /// The fourth root of the sum of the fourth powers of the singular values, `|X X^T|^(1/2)`
    /// (Frobenius), as in <https://github.com/google-deepmind/optax/pull/1602>. It needs no further
    /// product, since the iteration begins with `X X^T`; native kernels do not have it.
    Schatten4,
    /// A number for each row, `(sum_j |X X^T|_ij)^(1/2)` ("almost orthogonal layers", Prach and
    /// Lampert, <https://arxiv.org/abs/2208.03160>), or for each column of a matrix with more rows
    /// than columns, from `X^T X`. Turbo-Muon (Boissin et al., <https://arxiv.org/abs/2512.04632>)
    /// and <https://github.com/microsoft/dion> begin with it.
    ///
    /// The singular values become larger than with any norm, mostly. But the singular vectors
    /// change as well: the result approaches the polar factor of the rescaled matrix, in which all
    /// rows have about the same weight. `docs/results/precision.md` has its distance from the polar
    /// factor of the matrix itself. It needs no further product either, and native kernels do not
    /// have it.
    ///
    /// Of a square matrix, [`MuonConfig`](crate::MuonConfig) rescales the outputs in either layout,
    /// and [`NewtonSchulz::orthogonalize`](super::NewtonSchulz::orthogonalize) the rows.
    ///
    /// Rows of zeros stay zero. In float16, rows of an `m` by `n` matrix whose norms are less than
    /// about `2^-19 m^(1/2)` times its own stay smaller; in other types, all rows are rescaled.
    Aol,
}

/// Configuration of [`NewtonSchulz`](super::NewtonSchulz).
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use distmuon::NewtonSchulzConfig;
///
/// let iteration = NewtonSchulzConfig::new().init()?;
/// let batch = Tensor::<3>::random([2, 8, 16], Distribution::Normal(0.0, 1.0), &Device::default());
/// assert_eq!(iteration.orthogonalize(batch).dims(), [2, 8, 16]);
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Config, Debug, PartialEq)]
pub struct NewtonSchulzConfig {
    /// The coefficients of the polynomials.
    #[config(default = "Coefficients::polar_express()")]
    pub coefficients: Coefficients,
    /// Number of steps; `None` for the number that the coefficients were designed for.
    pub steps: Option<usize>,
    /// The smallest Frobenius norm by which a matrix is divided: a matrix with a smaller norm gives
    /// a smaller result. A matrix of zeros stays zero, also with an `epsilon` of zero.
    ///
    /// The default guards only against the end of float32's range, as in NVIDIA's
    /// Emerging-Optimizers (<https://github.com/NVIDIA-NeMo/Emerging-Optimizers/pull/230>). With
    /// the 1e-7 of Keller Jordan and PyTorch, one large gradient and a clip of the global norm make
    /// all other updates fade. Where gradients become zero, momentum of 0.95 falls below 1e-30
    /// after 1350 steps.
    #[config(default = 1e-30)]
    pub epsilon: f64,
    /// The norm, or the norms of rows, by which a matrix is divided. `epsilon` is compared with its
    /// Frobenius norm in any case; with [`Normalization::Aol`], a matrix of `m` rows has to be
    /// smaller by `(2m)^(1/2)` to be certain to give a smaller result.
    #[config(default = "Normalization::Frobenius")]
    pub normalization: Normalization,
    /// The precision of the iteration.
    #[config(default = "IterationDtype::Auto")]
    pub dtype: IterationDtype,
    /// The form of the iteration.
    #[config(default = "IterationForm::Auto")]
    pub form: IterationForm,
    /// Scratch memory per iteration, excluding its input, in MB (10^6 bytes). Larger batches are
    /// processed in parts, of one matrix at least, whose results are then joined.
    /// [`explain`](super::NewtonSchulz::explain) has the workspace of one matrix: up to three times
    /// the matrix, and up to five times with [`IterationForm::Gram`] where [`IterationForm::Auto`]
    /// would not choose it. Native kernels take up to four and six times a matrix in half
    /// precision; their recordings of small batches have memory in addition.
    #[config(default = 1024)]
    pub workspace_mb: usize,
    /// `true` to record the iterations of a shape as a graph once and to replay the graph as one
    /// launch.
    ///
    /// Batches of up to 1024 x 4096 elements are recorded: larger ones are bound by their products,
    /// and copying them in and out of the recording takes longer than its launches. Where native
    /// kernels may run, they make recordings of their own, with or without the setting. A batch
    /// that one kernel iterates is one launch already. On devices without graphs, the setting has
    /// no effect.
    ///
    /// Every recording keeps its memory. No other thread may work on the device while a recording
    /// is made, which is at the first step.
    #[config(default = false)]
    pub graphs: bool,
}
