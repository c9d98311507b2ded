//! The products of the iteration, on a compute path.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::ops::{MatrixOps, PartialNorms, norm_parts};
use super::path::ComputePath;
use super::portable;
use super::program::{Polynomial, Products, Program, Side};
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

    /// The result of a program for a batch of matrices, by native products if they are allowed.
    pub(crate) fn iterate(self, x: Tensor<3>, program: Program, native: bool) -> Tensor<3> {
        let [_, m, n] = x.dims();
        #[cfg(feature = "simulated-tf32")]
        if super::tf32::is_simulated(&x.device(), x.dtype()) {
            let products = super::tf32::RoundedFactors(TensorProducts(self));
            return program.run(x, Side::of([m, n]), &products);
        }
        match self {
            Self::Portable => program.run(x, Side::of([m, n]), &TensorProducts(self)),
            Self::Flex | Self::CubeCl { .. } => {
                let x = x.into_dispatch();
                Tensor::from_dispatch(Dispatch::iterate(x, program, self.is_tuned(), native))
            }
        }
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

/// The products of an iteration on tensors, one call of a compute path each. What differs between
/// paths in speed alone is by Burn's operations.
struct TensorProducts(ComputePath);

impl Products for TensorProducts {
    type Matrix = Tensor<3>;

    fn transposed(&self, x: Tensor<3>) -> Tensor<3> {
        x.swap_dims(1, 2)
    }

    fn syrk(&self, a: Tensor<3>) -> Tensor<3> {
        self.0.syrk(a)
    }

    fn symmetric_product(
        &self,
        [a, b]: [Tensor<3>; 2],
        c: Tensor<3>,
        alpha: f64,
        beta: f64,
    ) -> Tensor<3> {
        self.0.symmetric_product(a, b, c, alpha, beta)
    }

    fn plus_identity(&self, z: Tensor<3>) -> Tensor<3> {
        portable::plus_identity(z)
    }

    fn product(&self, [a, b]: [Tensor<3>; 2]) -> Tensor<3> {
        a.matmul(b)
    }

    fn product_add(&self, [a, b]: [Tensor<3>; 2], c: Tensor<3>, beta: f64) -> Tensor<3> {
        self.0.product_add(a, b, c, beta)
    }

    fn accumulate_q(&self, _: Tensor<3>, _: &[Polynomial]) -> Tensor<3> {
        unreachable!("`ComputePath::is_small` is false for these paths")
    }
}
