//! The products of the iteration, on a compute path.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::ops::{MatrixOps, PartialNorms, Polynomial, norm_parts};
use super::path::ComputePath;
use super::portable;
use super::tensor_list::TensorList;

impl ComputePath {
    /// Computes `A A^T` of a batch: `[k, m, n]` to `[k, m, m]`.
    pub fn syrk(self, a: Tensor<3>) -> Tensor<3> {
        let a = a.into_dispatch();
        Tensor::from_dispatch(match self {
            Self::Portable => portable::syrk::<Dispatch>(a),
            Self::Flex | Self::CubeCl { .. } => Dispatch::syrk(a, self.is_tuned()),
        })
    }

    /// Computes `alpha A B^T + beta C`, for a result that is known to be symmetric: `a` and `b` are
    /// `[k, m, n]`; `c` is symmetric and `[k, m, m]` like the result.
    pub fn symmetric_product(
        self,
        a: Tensor<3>,
        b: Tensor<3>,
        c: Tensor<3>,
        alpha: f64,
        beta: f64,
    ) -> Tensor<3> {
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(match self {
            Self::Portable => portable::symmetric_product::<Dispatch>(a, b, c, alpha, beta),
            Self::Flex | Self::CubeCl { .. } => {
                Dispatch::symmetric_product(a, b, c, alpha, beta, self.is_tuned())
            }
        })
    }

    /// Adds the identity to every matrix of a batch `[k, m, m]`.
    pub fn plus_identity(self, z: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Portable => portable::plus_identity(z),
            Self::Flex | Self::CubeCl { .. } => {
                Tensor::from_dispatch(Dispatch::plus_identity(z.into_dispatch()))
            }
        }
    }

    /// Computes `A B`, with `a` `[k, m, n]` and `b` `[k, n, p]`, by Burn's matmul except on Flex.
    pub fn product(self, a: Tensor<3>, b: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Flex => {
                Tensor::from_dispatch(Dispatch::product(a.into_dispatch(), b.into_dispatch()))
            }
            Self::Portable | Self::CubeCl { .. } => a.matmul(b),
        }
    }

    /// Computes `A B + beta C`, with `a` `[k, m, n]`, `b` `[k, n, p]`, and `c` `[k, m, p]` like the
    /// result.
    pub fn product_add(self, a: Tensor<3>, b: Tensor<3>, c: Tensor<3>, beta: f64) -> Tensor<3> {
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(match self {
            Self::Portable => portable::product_add::<Dispatch>(a, b, c, beta),
            Self::Flex | Self::CubeCl { .. } => {
                Dispatch::product_add(a, b, c, beta, self.is_tuned())
            }
        })
    }

    /// Computes the matrix `Q` of the Gram form in one kernel: `r` and the result are `[k, m, m]`,
    /// and the schedule has the polynomial of every step.
    ///
    /// # Panics
    ///
    /// If [`is_small`](Self::is_small) returns `false`.
    pub fn accumulate_q(self, r: Tensor<3>, schedule: &[Polynomial]) -> Tensor<3> {
        Tensor::from_dispatch(Dispatch::accumulate_q(r.into_dispatch(), schedule.to_vec()))
    }

    /// A tensor that a kernel will write, of any values.
    pub(super) fn output(self, shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
        match self {
            // In one dimension: in more, Burn may leave gaps between rows.
            Self::CubeCl { .. } => {
                let [k, m, n] = shape;
                Tensor::<1>::empty([k * m * n], (device, dtype)).reshape(shape)
            }
            // Flex allocates an `empty` twice.
            Self::Portable | Self::Flex => Tensor::full(shape, 0.0, (device, dtype)),
        }
    }

    /// Every matrix divided by its Frobenius norm, or by `epsilon` if that is larger, in `dtype`.
    /// The norms are computed unless they are given.
    pub(crate) fn normalize(
        self,
        x: Tensor<3>,
        norms: Option<PartialNorms>,
        epsilon: f64,
        dtype: FloatDType,
    ) -> Tensor<3> {
        if self == Self::Portable {
            return portable::normalize(x, epsilon).cast(dtype);
        }
        let norms = match norms {
            Some(PartialNorms(norms)) => norms.into_dispatch(),
            None => {
                let [k, m, n] = x.dims();
                let rows = TensorList::from_tensors(vec![x.clone().reshape([-1])]);
                let output = self.output([k, norm_parts(m * n), 2], DType::F32, &x.device());
                Dispatch::norms(output.into_dispatch(), rows, vec![0], m * n)
            }
        };
        Tensor::from_dispatch(Dispatch::normalize(x.into_dispatch(), norms, epsilon, dtype))
    }
}
