//! The products of the iteration, on a compute path.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use super::compute_path::ComputePath;
use super::ops::{MatrixOps, PartialNorms, Products, norm_parts};
use super::portable;
use super::program::{PreparedProgram, Program, Step};
use super::tensor_list::TensorList;

impl ComputePath {
    /// The result of a program for a batch of matrices, by native products if they are allowed.
    pub(crate) fn iterate(
        self,
        x: Tensor<3>,
        program: &PreparedProgram,
        native: bool,
    ) -> Tensor<3> {
        let products = match self {
            Self::Portable => Products::Portable,
            Self::Flex | Self::CubeCl { .. } => Products::Backend { tuned: self.is_tuned() },
        };
        #[cfg(feature = "simulated-tf32")]
        if super::tf32::is_simulated(&x.device(), x.dtype()) {
            let x = x.into_dispatch();
            let rounded = super::tf32::rounded;
            let program = program.program();
            return Tensor::from_dispatch(program.compute::<Dispatch>(x, products, rounded));
        }
        let x = x.into_dispatch();
        Tensor::from_dispatch(match products {
            Products::Portable => program.program().compute::<Dispatch>(x, products, |x| x),
            // One operation, which the backend divides: with fusion, each product would be one.
            Products::Backend { tuned } => Dispatch::iterate(x, program.clone(), tuned, native),
        })
    }

    /// One product of an iteration, for the benches: `X X^T`, or `alpha X X + beta X` of symmetric
    /// matrices.
    #[doc(hidden)]
    pub fn product(self, x: Tensor<3>, alpha_and_beta: Option<[f64; 2]>) -> Tensor<3> {
        let (input, mut program) = (Program::INPUT, Program::default());
        program.push(match alpha_and_beta {
            None => Step::Square { x: input },
            Some([alpha, beta]) => Step::Symmetric { a: input, b: input, c: input, alpha, beta },
        });
        self.iterate(x, &program.into(), false)
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
            // No norms of this tensor are known, as after a part of the update.
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
