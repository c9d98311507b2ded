//! The fastest kernel for a product, measured by CubeCL's autotuner when a shape is first met.
//!
//! Candidates are the tilings of `distmuon-kernels`, block rows by Burn's matmul, and Burn's full
//! product, so the choice is never slower than Burn. A tiling that does not compute small products
//! of integers exactly is excluded. Decisions stay in memory, and with Burn's feature `persistence`
//! on disk.

use core::fmt;
use std::sync::Arc;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::{CubeBackend, CubeDevice, CubeTuneId};
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::zspace::metadata::Metadata;
use distmuon_kernels::product::{Product, Tiling, Triangle};
use distmuon_kernels::{Matrices, mirror};

use super::product::Operands;
use super::tensors::{matrices, tensor};

type Float = FloatTensor<CubeBackend>;
type Set = TunableSet<String, Operands, Float, Candidate>;

/// One for every device and type, which have tilings of their own.
static TUNER: LocalTuner<String, String> = local_tuner!("distmuon-product");

/// Block rows of a symmetric product by Burn's matmul; each begins where devices may bind a buffer.
const BLOCK_ROWS: usize = 4;
const BLOCK_ALIGNMENT: usize = 128;

/// An implementation of a product.
#[derive(Debug, Clone, Copy)]
enum Candidate {
    /// A kernel of `distmuon-kernels`.
    Tiling(Tiling),
    /// Block rows of the lower triangle by Burn's matmul, then a pass that completes it.
    BlockRows,
    /// The whole product by Burn's matmul, then the scaling and the addend, if there are any.
    Whole,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tiling(tiling) => tiling.fmt(f),
            Self::BlockRows => write!(f, "Burn's matmul, in block rows"),
            Self::Whole => write!(f, "Burn's matmul"),
        }
    }
}

/// The product, by the fastest candidate for its shape, type and layout.
pub(super) fn multiply(operands: Operands) -> Float {
    let client = operands.tensor.client.clone();
    let (id, set) = candidates(&client, &operands.tensor.device, operands.lhs.dtype);
    TUNER.execute(&id, &client, set, operands)
}

/// Returns the candidate that was measured to be the fastest for a product.
pub(super) fn fastest(client: &Client, device: &CubeDevice, product: &Product) -> Option<String> {
    let (id, set) = candidates(client, device, product.a.dtype);
    Some(TUNER.fastest_identity(&id, &set, &key(product))?.to_string())
}

/// Returns the candidates for a type on a device, and their key in the tuner.
fn candidates(client: &Client, device: &CubeDevice, dtype: ElemType) -> (String, Arc<Set>) {
    // By type as well: devices multiply some types by other units.
    let id = format!("{}-{dtype:?}", CubeTuneId::new(client, device));
    let of_device = client.clone();
    let set = TUNER.init(&id, move || {
        let tilings = Tiling::candidates(&of_device, dtype).into_iter().map(Candidate::Tiling);
        let all = tilings.chain([Candidate::BlockRows, Candidate::Whole]);
        let set = Set::new_cloning_inputs(|operands: &Operands| key(&operands.product()));
        all.fold(set, |set, candidate| {
            let run = move |operands: Operands| operands.by(candidate);
            set.with(Tunable::identified(candidate, run))
        })
    });
    (id, set)
}

/// Returns the key of a product. Products with the same key share a decision.
fn key(product: &Product) -> String {
    let layout = |matrices: &Matrices| format!("{:?} at {:?}", matrices.shape, matrices.strides);
    let Product { a, b, addend, triangle, .. } = product;
    // An addend is one more matrix to read, which may change the order of the candidates.
    let added = if addend.is_some() { "plus" } else { "alone" };
    format!("{triangle:?} {} by {} {added}", layout(a), layout(b))
}

impl Operands {
    fn by(&self, candidate: Candidate) -> Result<Float, String> {
        match candidate {
            Candidate::Tiling(tiling) => {
                // Before it is measured: a kernel that is fast and wrong must not win.
                let verified = tiling.verify(&self.tensor.client, self.lhs.dtype);
                let product = verified.and_then(|()| self.multiply_with(&tiling));
                product.map_err(|error| error.to_string())
            }
            Candidate::BlockRows if self.triangle == Triangle::Full => {
                Err("the result is not symmetric".to_owned())
            }
            Candidate::BlockRows => self.by_rows(BLOCK_ROWS),
            Candidate::Whole => self.by_rows(1),
        }
    }

    /// Computes the rows of the result in `blocks` blocks, each by Burn's matmul, of symmetric
    /// results up to the diagonal.
    fn by_rows(&self, blocks: usize) -> Result<Float, String> {
        let shape @ [k, m, n] = self.product().shape();
        let result = Matrices::empty(&self.tensor.client, self.lhs.dtype, shape);
        let height = m.div_ceil(blocks).next_multiple_of(BLOCK_ALIGNMENT).min(m);
        for start in (0..m).step_by(height) {
            let end = (start + height).min(m);
            // Up to the diagonal; `mirror` fills in the rest.
            let columns = if blocks == 1 { n } else { end };
            let lhs = self.part(&self.lhs, start, [k, end - start, self.lhs.shape[2]]);
            let rhs = self.part(&self.rhs, 0, [k, self.rhs.shape[1], columns]);
            let out = self.part(&result, start, [k, end - start, columns]);
            matmul(lhs, rhs, Some(out), MatmulStrategy::default(), self.tensor.dtype)
                .map_err(|error| error.to_string())?;
        }
        let whole = tensor(&self.tensor, result.handle.clone(), shape.into(), self.tensor.dtype);
        match self.triangle {
            Triangle::Lower if blocks > 1 || self.addend.is_some() || self.alpha != 1.0 => {
                let addend = self.addend.as_ref().map(|(addend, beta)| {
                    (matrices(into_contiguous(self.part(addend, 0, shape))), *beta)
                });
                let addend = addend.as_ref().map(|(addend, beta)| (addend, *beta));
                mirror(&self.tensor.client, &result, self.alpha, addend)
                    .map_err(|error| error.to_string())?;
                Ok(whole)
            }
            _ => Ok(self.scaled_and_added(whole)),
        }
    }

    /// `alpha AB + beta C` of `AB`, by Burn's operations.
    fn scaled_and_added(&self, product: Float) -> Float {
        let scale = |values: Float, factor: f32| match factor {
            1.0 => values,
            _ => CubeBackend::float_mul_scalar(values, factor.into()),
        };
        let scaled = scale(product, self.alpha);
        let Some((addend, beta)) = &self.addend else { return scaled };
        let added = self.part(addend, 0, self.product().shape());
        CubeBackend::float_add(scaled, scale(added, *beta))
    }

    /// The rows of matrices from `start` on, and their first columns, as a view.
    fn part(&self, matrices: &Matrices, start: usize, shape: [usize; 3]) -> Float {
        let bytes = start * matrices.strides[1] * matrices.dtype.size();
        Float::new(
            self.tensor.client.clone(),
            matrices.handle.clone().offset_start(bytes as u64),
            Metadata::new(shape, matrices.strides),
            self.tensor.device.clone(),
            self.tensor.dtype,
        )
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::DispatchDevice;
    use burn::tensor::{Device, Distribution, Tensor, try_read_sync};

    use super::*;
    use crate::backend::cubecl::primitives::primitive;
    use crate::skipped_tests::excused;

    fn random(shape: [usize; 3]) -> Tensor<3> {
        Tensor::random(shape, Distribution::Uniform(-1.0, 1.0), &Device::default())
    }

    /// Several block rows, rows and columns, and addends with gaps between their rows.
    #[test]
    fn all_candidates_compute_the_same() {
        if !matches!(Device::default().as_dispatch(), DispatchDevice::Cube(_)) {
            excused("kernels are measured on CubeCL's devices");
            return;
        }
        for ([k, m, inner], triangle) in [
            ([2, 300, 40], Triangle::Lower),
            ([1, 515, 24], Triangle::Lower),
            ([2, 40, 50], Triangle::Full),
        ] {
            let (rows, columns) = (random([k, m, inner]), random([k, inner, m]).swap_dims(1, 2));
            let larger = random([k, m + 8, m + 8]);
            let larger = larger.clone() + larger.swap_dims(1, 2);
            let added = larger.slice([0..k, 0..m, 0..m]);
            for (a, added) in [(&rows, None), (&columns, Some(&added)), (&rows, Some(&added))] {
                let alpha = if added.is_some() { 2.0 } else { 1.0 };
                let product = a.clone().matmul(a.clone().swap_dims(1, 2)).mul_scalar(alpha);
                let expected = match added {
                    Some(added) => product + added.clone().mul_scalar(0.5),
                    None => product,
                };
                let primitive = |tensor: &Tensor<3>| primitive(tensor.clone()).unwrap();
                let (a, added) = (primitive(a), added.map(primitive));
                let added = added.as_ref().map(|added| (added, 0.5));
                let right = matrices(a.clone()).transposed();
                check(&Operands::new(&a, right, alpha, added, triangle), &expected);
            }
        }
    }

    fn check(operands: &Operands, expected: &Tensor<3>) {
        let tilings = Tiling::candidates(&operands.tensor.client, operands.lhs.dtype);
        let tilings = tilings.into_iter().map(Candidate::Tiling);
        for candidate in tilings.chain([Candidate::BlockRows, Candidate::Whole]) {
            match operands.by(candidate) {
                Ok(computed) => {
                    let error = error(computed, expected);
                    assert!(error < 1e-3, "{candidate}: {error}");
                }
                Err(error) => assert!(error.contains("not symmetric"), "{candidate}: {error}"),
            }
        }
    }

    /// The largest difference, relative to the largest entry.
    fn error(computed: Float, expected: &Tensor<3>) -> f32 {
        let data = try_read_sync(CubeBackend::float_into_data(computed)).unwrap().unwrap();
        let computed = Tensor::<3>::from_data(data, &Device::default());
        let largest = expected.clone().abs().max().into_scalar::<f32>();
        (computed - expected.clone()).abs().max().into_scalar::<f32>() / largest
    }
}
