//! The products on Burn's CubeCL backends, by the kernels of `distmuon-kernels`.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::std::tensor::copy_into;
use distmuon_kernels::fused::{self, RowNorms};
use distmuon_kernels::product::{Product, Triangle};
use distmuon_kernels::{Matrices, Result, add_identity, gram, units};

#[cfg(feature = "cuda")]
use super::hopper;
use super::product::Operands;
use super::tensors::{VALIDATED, batch, contiguous, matrices, part, tensor, unshared};
use super::tune;
use crate::backend::ops::{MatrixOps, Products};
use crate::backend::portable;
use crate::backend::program::{Polynomial, PreparedProgram};
use crate::backend::tensor_list::TensorList;

type Float = FloatTensor<CubeBackend>;

/// Names the kernel that computes a symmetric product `[k, m, inner] x [k, inner, m]` of contiguous
/// matrices.
pub(crate) fn kernel(
    device: &CubeDevice,
    dtype: DType,
    [k, m, inner]: [usize; 3],
    tuned: bool,
) -> String {
    let client = device.client();
    // Only the layout counts: the product is not computed.
    let a = Matrices::contiguous(client.empty(1), dtype_to_elem_type(dtype), [k, m, inner]);
    let product = Product {
        a: &a,
        b: &a.clone().transposed(),
        alpha: 1.0,
        addend: None,
        triangle: Triangle::Lower,
    };
    match product.tiling(&client) {
        Ok(_) if tuned => tune::fastest(&client, device, &product)
            .unwrap_or_else(|| "the fastest, to be measured at first use".to_owned()),
        Ok(tiling) => tiling.to_string(),
        Err(reason) => format!("Burn's matmul, since {reason}"),
    }
}

/// The most rows of a matrix that one cube carries through the whole iteration, where it fits.
/// Estimated, not measured: a product of `m` rows takes a multiprocessor about `m^2` cycles, since
/// every warp reads two numbers for each 16 rows and step of the sums. That is less than a launch
/// with 64 rows, and twice a launch with 128.
const MAX_SMALL_ROWS: usize = 64;

/// Returns [`MAX_SMALL_ROWS`], or the largest number of rows that fits.
pub(crate) fn max_small_rows(device: &CubeDevice) -> usize {
    let client = device.client();
    match units::are_threads(&client.properties().hardware) {
        // Units that are threads take longer to wait for each other than to multiply: see
        // `docs/design/kernels.md`.
        true => 0,
        false => gram::max_rows(&client).min(MAX_SMALL_ROWS),
    }
}

/// Products are summed in float32 and rounded once. Burn's operations compute those that no kernel
/// supports.
impl MatrixOps for CubeBackend {
    fn syrk(a: Float, tuned: bool) -> Float {
        let product = Operands::symmetric(&a, &a, 1.0, None);
        product.multiply(tuned).unwrap_or_else(|_| portable::syrk::<Self>(a))
    }

    fn symmetric_product(
        a: Float,
        b: Float,
        c: Float,
        alpha: f64,
        beta: f64,
        tuned: bool,
    ) -> Float {
        let product = Operands::symmetric(&a, &b, alpha as f32, Some((&c, beta as f32)));
        product
            .multiply(tuned)
            .unwrap_or_else(|_| portable::symmetric_product::<Self>(a, b, c, alpha, beta))
    }

    fn product_add(a: Float, b: Float, c: Float, beta: f64, tuned: bool) -> Float {
        let rhs = matrices(b.clone());
        let product = Operands::new(&a, rhs, 1.0, Some((&c, beta as f32)), Triangle::Full);
        product.multiply(tuned).unwrap_or_else(|_| portable::product_add::<Self>(a, b, c, beta))
    }

    fn plus_identity(z: Float) -> Float {
        let dtype = z.dtype;
        let z = contiguous(z, dtype);
        let sum = add_identity(&z.client, &matrices(z.clone())).expect(VALIDATED);
        tensor(&z, sum.handle, z.shape(), dtype)
    }

    fn accumulate_q(r: Float, schedule: Vec<Polynomial>) -> Float {
        let schedule: Vec<_> = schedule.iter().map(|p| p.map(|x| x as f32)).collect();
        let q = gram::accumulate_q(&r.client, &matrices(r.clone()), &schedule)
            .expect("`ComputePath::is_small` accepts only what the kernel accepts");
        tensor(&r, q.handle, r.shape(), r.dtype)
    }

    fn iterate(x: Float, program: PreparedProgram, tuned: bool, _native: bool) -> Float {
        // Burn's products may leave gaps between rows, which every reader would copy away.
        let products = Products::Backend { tuned };
        let others = |x| into_contiguous(program.program().compute::<Self>(x, products, |x| x));
        #[cfg(feature = "cuda")]
        if _native {
            return hopper::iterate(x, &program, tuned, &others);
        }
        others(x)
    }

    fn overwrite(target: Float, values: Float) -> Float {
        let values = cast(values, target.dtype);
        let (from, to) = (values.clone().binding(), target.clone().binding());
        copy_into(&target.client, from, to, dtype_to_elem_type(target.dtype));
        target
    }

    fn norms(
        norms: Float,
        tensors: TensorList<Self>,
        firsts: Vec<usize>,
        elements: usize,
    ) -> Float {
        let (norms, tensors) = (unshared(norms), tensors.0);
        let dtype = tensors[0].dtype;
        let tensors: Vec<_> = tensors
            .into_iter()
            .zip(firsts)
            .map(|(tensor, first)| {
                let length = tensor.shape().num_elements();
                (part(&contiguous(tensor, dtype), 1, length), first)
            })
            .collect();
        let of_rows = RowNorms { handle: norms.handle.clone(), partials: norms.shape()[1] };
        let dtype = dtype_to_elem_type(dtype);
        fused::norms(&norms.client, &tensors, elements, &of_rows, dtype).expect(VALIDATED);
        norms
    }

    fn normalize(x: Float, norms: Float, epsilon: f64, dtype: FloatDType) -> Float {
        let [x, norms] = [x, norms].map(|x| contiguous(x.clone(), x.dtype));
        let norms = RowNorms { partials: norms.shape()[1], handle: norms.handle };
        let dtype: DType = dtype.into();
        let dtypes = [x.dtype, dtype].map(dtype_to_elem_type);
        let normal =
            fused::normalize(&x.client, &x.handle, &norms, batch(&x), dtypes, epsilon as f32)
                .expect(VALIDATED);
        tensor(&x, normal, x.shape(), dtype)
    }
}

impl Operands {
    /// Computes the product by the kernel that suits it, or by the one measured to be the fastest.
    fn multiply(self, tuned: bool) -> Result<Float> {
        if tuned {
            // A product that no kernel supports is not measured either.
            self.product().tiling(&self.tensor.client)?;
            return Ok(tune::multiply(self));
        }
        Ok(self.result(self.product().compute(&self.tensor.client)?))
    }
}
