//! The products on Burn's CubeCL backends, by the kernels of `distmuon-kernels`.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, FloatDType};
use burn_cubecl::{CubeBackend, CubeDevice};
use distmuon_kernels::fused::{self, Norms};
use distmuon_kernels::product::{Product, Triangle};
use distmuon_kernels::{Matrices, Result, gram};

pub(crate) use crate::cube::serves;

use super::{ops::MatrixOps, portable};
use crate::cube::{batch, contiguous, matrices, tensor};

type Float = FloatTensor<CubeBackend>;

/// Which kernel computes a symmetric product `[k, m, inner] x [k, inner, m]`.
pub(crate) fn kernel(device: &CubeDevice, dtype: DType, [k, m, inner]: [usize; 3]) -> String {
    let client = device.client();
    // Only the layout counts: nothing is launched.
    let a = Matrices::contiguous(client.empty(1), dtype_to_elem_type(dtype), [k, m, inner]);
    let product = Product {
        a: &a,
        b: &a.clone().transposed(),
        alpha: 1.0,
        addend: None,
        triangle: Triangle::Lower,
    };
    match product.tiling(&client) {
        Ok(tiling) => tiling.to_string(),
        Err(reason) => format!("Burn's matmul, since {reason}"),
    }
}

/// The most rows of matrices that one cube carries through the whole iteration.
pub(crate) fn most_small_rows(device: &CubeDevice) -> usize {
    gram::most_rows(&device.client())
}

/// Operands are summed in float32 and rounded once. What a kernel refuses, Burn's operations do.
impl MatrixOps for CubeBackend {
    fn syrk(a: Float) -> Float {
        let transposed = matrices(a.clone()).transposed();
        multiply(&a, transposed, 1.0, None, Triangle::Lower)
            .unwrap_or_else(|_| portable::syrk::<Self>(a))
    }

    fn symmetric_product(a: Float, b: Float, c: Float, alpha: f32, beta: f32) -> Float {
        let transposed = matrices(b.clone()).transposed();
        multiply(&a, transposed, alpha, Some((c.clone(), beta)), Triangle::Lower)
            .unwrap_or_else(|_| portable::symmetric_product::<Self>(a, b, c, alpha, beta))
    }

    fn product_add(a: Float, b: Float, c: Float, beta: f32) -> Float {
        multiply(&a, matrices(b.clone()), 1.0, Some((c.clone(), beta)), Triangle::Full)
            .unwrap_or_else(|_| portable::product_add::<Self>(a, b, c, beta))
    }

    fn accumulate_small(r: Float, schedule: Vec<[f32; 3]>) -> Float {
        let q = gram::accumulate(&r.client, &matrices(r.clone()), &schedule);
        let q = q.expect("Engine::is_small asks for what is refused");
        tensor(&r, q.handle, r.shape(), r.dtype)
    }

    fn norms(x: Float, parts: usize) -> Float {
        let x = contiguous(x.clone(), x.dtype);
        let of = batch(&x);
        let norms = fused::norms(&x.client, &x.handle, of, dtype_to_elem_type(x.dtype), parts);
        tensor(&x, norms.handle, [of.count, parts, 2].into(), DType::F32)
    }

    fn normalize(x: Float, norms: Float, epsilon: f32, dtype: FloatDType) -> Float {
        let [x, norms] = [x, norms].map(|x| contiguous(x.clone(), x.dtype));
        let norms = Norms { parts: norms.shape()[1], handle: norms.handle };
        let dtype: DType = dtype.into();
        let dtypes = [x.dtype, dtype].map(dtype_to_elem_type);
        let normal = fused::normalize(&x.client, &x.handle, &norms, batch(&x), dtypes, epsilon);
        tensor(&x, normal, x.shape(), dtype)
    }
}

/// `alpha A B + beta C`.
fn multiply(
    a: &Float,
    b: Matrices,
    alpha: f32,
    addend: Option<(Float, f32)>,
    triangle: Triangle,
) -> Result<Float> {
    let lhs = matrices(a.clone());
    let addend = addend.map(|(addend, beta)| (matrices(addend), beta));
    let addend = addend.as_ref().map(|(addend, beta)| (addend, *beta));
    let product = Product { a: &lhs, b: &b, alpha, addend, triangle };
    let result = product.launch(&a.client, &product.tiling(&a.client)?)?;
    Ok(tensor(a, result.handle, result.shape.into(), a.dtype))
}
