//! Full products by NVIDIA's cuBLASLt, where the library is found. Nothing links to it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt::Debug;
use std::sync::Mutex;

use cudarc::cublaslt::{result, sys};
use cudarc::driver;

use super::Refusal;
use super::launches::{ALIGNMENT, Element, Layout, Product};
use super::stream_order::SideStream;

/// Bytes of memory that algorithms may use, as NVIDIA recommends for Hopper
/// (<https://docs.nvidia.com/cuda/cublas/#cublassetworkspace>).
const WORKSPACE: usize = 32 << 20;

/// `CUBLASLT_REDUCTION_SCHEME_NONE`
/// (<https://docs.nvidia.com/cuda/cublas/#cublasltreductionscheme-t>).
const NO_REDUCTION: u32 = 0;

/// The batch for which algorithms are chosen. An algorithm without reductions adds the terms of an
/// entry in an order that the sizes of the matrix decide, so all batches take the same one.
const CHOSEN_FOR: usize = 8;

/// Batches for which an algorithm has to be valid, so that a product is the library's in all
/// batches or in none.
const CHECKED_FOR: [usize; 2] = [1, 64];

/// cuBLASLt on a device, to the end of the process.
pub(super) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: driver::sys::CUdeviceptr,
    /// Refusals are also kept: the library was asked once.
    plans: Mutex<HashMap<PlanKey, Result<Plan, Refusal>>>,
}

// SAFETY: the handle may be used by several threads at a time, as the documentation says
// (<https://docs.nvidia.com/cuda/cublas/#cublasltcreate>), and plans are behind a lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// The products that have a plan in common: type, layout, batch and sizes, and `true` with an
/// addend.
type PlanKey = (Element, Layout, usize, [usize; 3], bool);

/// The description of a product and its algorithm.
#[derive(Clone, Copy)]
pub(super) struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    a: sys::cublasLtMatrixLayout_t,
    b: sys::cublasLtMatrixLayout_t,
    c: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions are only read after they were made.
unsafe impl Send for Plan {}

fn failed(error: impl Debug) -> Refusal {
    Refusal(format!("cuBLASLt failed: {error:?}"))
}

/// The bytes of a value, as cuBLASLt takes attributes.
fn bytes<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

impl CublasLt {
    /// Opens the library in the context that is current.
    pub fn open() -> Result<Self, Refusal> {
        // SAFETY: the library is only searched for.
        if !unsafe { sys::is_culib_present() } {
            return Err(Refusal("cuBLASLt is not installed".to_owned()));
        }
        let handle = result::create_handle().map_err(failed)?;
        // SAFETY: there are some bytes, which algorithms write before they read them.
        let workspace = unsafe { driver::result::malloc_sync(WORKSPACE) }.map_err(failed)?;
        Ok(Self { handle, workspace, plans: Mutex::default() })
    }

    /// Queues a full product on a stream.
    ///
    /// # Safety
    ///
    /// As for [`Prepared::launch`](super::ptx_module::Prepared::launch). All products of the
    /// library are on one stream, since they share its workspace.
    pub unsafe fn multiply(
        &self,
        stream: &SideStream,
        (product, plan): (&Product, &Plan),
    ) -> Result<(), Refusal> {
        let Product { a, b, alpha, addend, c, .. } = *product;
        let (d, beta) = addend.unwrap_or((c, 0.0));
        let [a, b, d, c] = [a, b, d, c].map(|address| address as *mut c_void);
        // Rows of a matrix are columns to the library: the product is `C^T = B^T A^T`.
        // SAFETY: as for this function; the plan is that of the product.
        unsafe {
            result::matmul(
                self.handle,
                plan.product,
                bytes(&alpha).0,
                bytes(&beta).0,
                b,
                plan.b,
                a,
                plan.a,
                d,
                plan.c,
                c,
                plan.c,
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                stream.as_ptr().cast(),
            )
        }
        .map_err(failed)
    }

    /// Returns the plan of a product, if the library has an algorithm for it.
    pub fn plan(&self, element: Element, product: &Product) -> Result<Plan, Refusal> {
        let Product { layout, batch, sizes, addend, .. } = *product;
        let key = (element, layout, batch, sizes, addend.is_some());
        let mut plans = self.plans.lock().expect("nothing panics while it holds the lock");
        plans.entry(key).or_insert_with(|| self.make_plan(key).map_err(failed)).clone()
    }

    /// Asks the library for an algorithm. The descriptions are kept with the plan.
    fn make_plan(
        &self,
        (element, layout, batch, [m, n, k], _): PlanKey,
    ) -> Result<Plan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Descriptions;
        let float = sys::cudaDataType::CUDA_R_32F;
        let product =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, float)?;
        let [a_in_rows, b_in_columns] = layout.inner_is_contiguous();
        let transposed = [
            (Descriptions::CUBLASLT_MATMUL_DESC_TRANSA, b_in_columns),
            (Descriptions::CUBLASLT_MATMUL_DESC_TRANSB, !a_in_rows),
        ];
        for (factor, is_transposed) in transposed {
            // `CUBLAS_OP_T` or `CUBLAS_OP_N`, which cudarc has with cuBLAS only.
            let operation = i32::from(is_transposed);
            let (value, size) = bytes(&operation);
            // SAFETY: the description was just made, and the value has that size.
            unsafe { result::set_matmul_desc_attribute(product, factor, value, size) }?;
        }
        // Elements of a line in memory, and lines: of `B`, `A` and `C`, which are transposed.
        let lines = [
            if b_in_columns { [k, n] } else { [n, k] },
            if a_in_rows { [k, m] } else { [m, k] },
            [n, m],
        ];
        let algorithm = self.choose(product, element, lines)?;
        for batch in CHECKED_FOR {
            self.check(product, layouts(element, batch, lines)?, &algorithm)?;
        }
        let [b, a, c] = layouts(element, batch, lines)?;
        Ok(Plan { product, a, b, c, algorithm })
    }

    /// Fails unless an algorithm is valid for matrices in these layouts, and has the memory that it
    /// needs. The layouts are not used afterwards.
    fn check(
        &self,
        product: sys::cublasLtMatmulDesc_t,
        [b, a, c]: [sys::cublasLtMatrixLayout_t; 3],
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<(), result::CublasError> {
        let mut checked = std::mem::MaybeUninit::uninit();
        let check = sys::cublasLtMatmulAlgoCheck;
        // SAFETY: the descriptions are alive, and the result is written if the call succeeds.
        let needed = unsafe {
            let code = check(self.handle, product, b, a, c, c, algorithm, checked.as_mut_ptr());
            for layout in [a, b, c] {
                result::destroy_matrix_layout(layout)?;
            }
            code.result()?;
            checked.assume_init().workspaceSize
        };
        match needed <= WORKSPACE {
            true => Ok(()),
            false => Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
        }
    }

    /// Asks for an algorithm for a batch of [`CHOSEN_FOR`] products of matrices with these lines.
    fn choose(
        &self,
        product: sys::cublasLtMatmulDesc_t,
        element: Element,
        lines: [[usize; 2]; 3],
    ) -> Result<sys::cublasLtMatmulAlgo_t, result::CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preferences;
        let [b, a, c] = layouts(element, CHOSEN_FOR, lines)?;
        let preference = result::create_matmul_pref()?;
        let (value, size) = bytes(&WORKSPACE);
        let workspace = Preferences::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let (scheme, scheme_size) = bytes(&NO_REDUCTION);
        let schemes = Preferences::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        // Without it, algorithms may rely on multiples of 256
        // (<https://docs.nvidia.com/cuda/cublas/#cublasltmatmulpreferenceattributes-t>).
        let (alignment, alignment_size) = bytes(&(ALIGNMENT as u32));
        let alignments = [
            Preferences::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            Preferences::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            Preferences::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preferences::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        // SAFETY: everything was made above; the values have these sizes.
        let heuristic = unsafe {
            result::set_matmul_pref_attribute(preference, workspace, value, size)?;
            result::set_matmul_pref_attribute(preference, schemes, scheme, scheme_size)?;
            for attribute in alignments {
                let size = alignment_size;
                result::set_matmul_pref_attribute(preference, attribute, alignment, size)?;
            }
            let heuristic =
                result::get_matmul_algo_heuristic(self.handle, product, b, a, c, c, preference);
            result::destroy_matmul_pref(preference)?;
            for layout in [a, b, c] {
                result::destroy_matrix_layout(layout)?;
            }
            heuristic?
        };
        Ok(heuristic.algo)
    }
}

/// The layouts of batches of contiguous matrices, of which each has lines of some elements.
fn layouts(
    element: Element,
    batch: usize,
    [b, a, c]: [[usize; 2]; 3],
) -> Result<[sys::cublasLtMatrixLayout_t; 3], result::CublasError> {
    let of_batch = |lines| matrices(element, batch, lines);
    Ok([of_batch(b)?, of_batch(a)?, of_batch(c)?])
}

/// The layout of a batch of contiguous matrices.
fn matrices(
    element: Element,
    batch: usize,
    [line, lines]: [usize; 2],
) -> Result<sys::cublasLtMatrixLayout_t, result::CublasError> {
    use sys::cublasLtMatrixLayoutAttribute_t as Attributes;
    let element = match element {
        Element::F16 => sys::cudaDataType::CUDA_R_16F,
        Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    };
    let layout = result::create_matrix_layout(element, line as u64, lines as u64, line as i64)?;
    let (count, offset) = (batch as i32, (line * lines) as i64);
    let attributes = [
        (Attributes::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, bytes(&count)),
        (Attributes::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, bytes(&offset)),
    ];
    for (attribute, (value, size)) in attributes {
        // SAFETY: the layout was just made, and the value has that size.
        unsafe { result::set_matrix_layout_attribute(layout, attribute, value, size) }?;
    }
    Ok(layout)
}
