//! The fastest kernel for a product, measured by CubeCL's autotuner when a shape is met first.
//!
//! Candidates are the tilings of `distmuon-kernels`, block rows by Burn's matmul, and Burn's full
//! product, so that nothing can become slower than that. A tiling that does not compute a small
//! product of integers exactly is no candidate. Decisions stay in memory, and with Burn's feature
//! `persistence` on disk.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::{CubeBackend, CubeTuneId};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::zspace::metadata::Metadata;
use distmuon_kernels::product::{Tiling, Triangle};
use distmuon_kernels::{Matrices, mirror};

use super::Operands;
use crate::cube::tensor;

type Float = FloatTensor<CubeBackend>;

/// No device has more tilings for a type.
const MOST_TILINGS: usize = 12;

/// Block rows of a symmetric product by Burn's matmul; each begins where devices may bind a buffer.
const BLOCK_ROWS: usize = 4;
const BLOCK_ALIGNMENT: usize = 128;

/// A tiling for a type on a device.
type Trust = (String, DType, Tiling);

/// What may compute a product.
#[derive(Debug, Clone, Copy)]
enum Candidate {
    /// The tiling of this number.
    Tiling(usize),
    /// Block rows of the lower triangle by Burn's matmul, then a pass that completes it.
    BlockRows,
    /// The whole product by Burn's matmul, then a pass that completes it.
    Whole,
}

/// The product, by the fastest candidate for its shape, type and layout.
pub(super) fn multiply(operands: Operands) -> Float {
    static TUNER: LocalTuner<String, CubeTuneId> = local_tuner!("distmuon-product");
    let client = operands.tensor.client.clone();
    let id = CubeTuneId::new(&client, &operands.tensor.device);
    let set = TUNER.init(&id, || {
        let tilings = (0..MOST_TILINGS).map(Candidate::Tiling);
        let all = tilings.chain([Candidate::BlockRows, Candidate::Whole]);
        let set = TunableSet::<_, Operands, Float, _>::new_cloning_inputs(Operands::key);
        all.fold(set, |set, candidate| {
            let name = format!("{candidate:?}");
            let run = move |operands: Operands| operands.by(candidate);
            set.with(Tunable::new(&name, run))
        })
    });
    TUNER.execute(&id, &client, set, operands)
}

impl Operands {
    /// Products of one key share a decision: sizes count by their next power of two.
    fn key(&self) -> String {
        let [k, m, n] = self.product().shape().map(usize::next_power_of_two);
        let inner = self.lhs.shape[2].next_power_of_two();
        let lines =
            [&self.lhs, &self.rhs].map(|of| if of.strides[2] == 1 { "rows" } else { "columns" });
        let dtype = self.tensor.dtype;
        let addend = self.addend.is_some();
        let triangle = self.triangle;
        format!("{triangle:?} {dtype:?} {k}x{m}x{inner}x{n} {lines:?} addend {addend}")
    }

    fn by(&self, candidate: Candidate) -> Result<Float, String> {
        match candidate {
            Candidate::Tiling(number) => {
                let client = &self.tensor.client;
                let tilings = Tiling::candidates(client, self.lhs.dtype);
                let tiling = tilings.get(number).ok_or("the device has no such tiling")?;
                if !self.trusts(tiling) {
                    return Err(format!("{tiling} does not multiply integers exactly"));
                }
                self.multiply_with(tiling).map_err(|error| error.to_string())
            }
            Candidate::BlockRows if self.triangle == Triangle::Full => {
                Err("the result is not symmetric".to_owned())
            }
            Candidate::BlockRows => self.by_rows(BLOCK_ROWS),
            Candidate::Whole => self.by_rows(1),
        }
    }

    /// Whether a tiling has shown that it multiplies. Asked once for every device and type.
    fn trusts(&self, tiling: &Tiling) -> bool {
        static KNOWN: LazyLock<Mutex<HashMap<Trust, bool>>> = LazyLock::new(Mutex::default);
        let key = (format!("{:?}", self.tensor.device), self.tensor.dtype, *tiling);
        let known = KNOWN.lock().expect("no holder of the lock panics").get(&key).copied();
        known.unwrap_or_else(|| {
            let right = tiling.multiplies_integers(&self.tensor.client, self.lhs.dtype);
            KNOWN.lock().expect("no holder of the lock panics").insert(key, right);
            right
        })
    }

    /// Rows of the result in so many blocks, each by Burn's matmul up to the diagonal.
    fn by_rows(&self, blocks: usize) -> Result<Float, String> {
        let shape @ [k, m, n] = self.product().shape();
        let result = Matrices::empty(&self.tensor.client, self.lhs.dtype, shape);
        let height = m.div_ceil(blocks).next_multiple_of(BLOCK_ALIGNMENT).min(m);
        for start in (0..m).step_by(height) {
            let end = (start + height).min(m);
            let columns = if blocks == 1 { n } else { end };
            let lhs = self.part(&self.lhs, start, [k, end - start, self.lhs.shape[2]]);
            let rhs = self.part(&self.rhs, 0, [k, self.rhs.shape[1], columns]);
            let out = self.part(&result, start, [k, end - start, columns]);
            matmul(lhs, rhs, Some(out), MatmulStrategy::default(), self.tensor.dtype)
                .map_err(|error| error.to_string())?;
        }
        let addend = self.addend.as_ref().map(|(addend, beta)| (addend, *beta));
        let whole = tensor(&self.tensor, result.handle.clone(), shape.into(), self.tensor.dtype);
        match self.triangle {
            Triangle::Lower => {
                mirror(&self.tensor.client, &result, self.alpha, addend);
                Ok(whole)
            }
            Triangle::Full => {
                use burn::backend::ops::FloatTensorOps;
                let scaled = CubeBackend::float_mul_scalar(whole, self.alpha.into());
                Ok(match &self.addend {
                    None => scaled,
                    Some((addend, beta)) => {
                        let added = self.part(addend, 0, shape);
                        let added = CubeBackend::float_mul_scalar(added, (*beta).into());
                        CubeBackend::float_add(scaled, added)
                    }
                })
            }
        }
    }

    /// Some rows of matrices from a row on, and their first columns.
    fn part(&self, of: &Matrices, start: usize, shape: [usize; 3]) -> Float {
        let bytes = start * of.strides[1] * of.dtype.size();
        Float::new(
            self.tensor.client.clone(),
            of.handle.clone().offset_start(bytes as u64),
            Metadata::new(shape, of.strides),
            self.tensor.device.clone(),
            self.tensor.dtype,
        )
    }
}
