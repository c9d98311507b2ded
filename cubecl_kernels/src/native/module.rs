//! The kernels of a type, loaded by the driver.

use std::ffi::{CString, c_int, c_void};

use cudarc::driver::{DriverError, result, sys};

use super::memory::Memory;
use super::order::SideStream;
use super::product::{
    ELEMENTWISE, Element, Launch, Layout, PlusIdentity, SHARED_BYTES, THREADS, TILE, Tiled,
};

/// The PTX of a type, made from `kernels/product.cu` by `kernels/compile.py`.
pub(super) fn ptx(element: Element) -> &'static str {
    match element {
        Element::F16 => include_str!("kernels/hopper_f16.ptx"),
        Element::Bf16 => include_str!("kernels/hopper_bf16.ptx"),
    }
}

/// The kernels of a type in the context of a device, which keeps them to the end of the process.
pub(super) struct Module {
    element: Element,
    products: [sys::CUfunction; Layout::ALL.len()],
    plus_identity: sys::CUfunction,
}

// SAFETY: any thread that makes the context current may launch functions of CUDA.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The parameter `sizes` of a product, as in `product.cu`.
#[repr(C)]
pub(super) struct Sizes {
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    beta: f32,
    lower: c_int,
    addend: c_int,
    whole: c_int,
    parts: c_int,
}

/// Memory for the sums of tiles that several blocks compute, for the launches of one stream.
pub(super) struct Scratch {
    multiprocessors: usize,
    /// A tile of float32 for every part of a launch: at most one for every multiprocessor.
    partials: Memory,
    /// The number of parts that are done, for every tile: 0 between launches.
    arrived: Memory,
}

impl Scratch {
    /// Allocates it for a stream, whose context is current.
    pub fn new(stream: &SideStream, multiprocessors: usize) -> Result<Self, DriverError> {
        let tiles = multiprocessors * TILE * TILE * size_of::<f32>();
        let partials = Memory::zeroed(stream, tiles)?;
        let arrived = Memory::zeroed(stream, multiprocessors * size_of::<u32>())?;
        Ok(Self { multiprocessors, partials, arrived })
    }

    /// Returns the number of multiprocessors, and of the parts that have room.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }
}

/// A launch with everything that the driver may refuse to encode.
pub(super) enum Prepared {
    Product {
        kernel: sys::CUfunction,
        blocks: u32,
        maps: Box<[sys::CUtensorMap; 4]>,
        sizes: Sizes,
        /// Addresses of the scratch memory.
        scratch: [u64; 2],
    },
    PlusIdentity {
        kernel: sys::CUfunction,
        sum: PlusIdentity,
    },
}

impl Module {
    /// Loads the kernels into the context that is current.
    pub fn load(element: Element) -> Result<Self, DriverError> {
        let ptx = CString::new(ptx(element)).expect("PTX is text");
        // SAFETY: the text ends with a zero.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }?;
        let function = |name: &str| {
            let name = CString::new(name).expect("a name is text");
            // SAFETY: the module is loaded, and never unloaded.
            unsafe { result::module::get_function(module, name) }
        };
        let mut products = [std::ptr::null_mut(); Layout::ALL.len()];
        for (product, layout) in products.iter_mut().zip(Layout::ALL) {
            *product = function(layout.kernel())?;
            use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just loaded.
            unsafe {
                result::function::set_function_attribute(
                    *product,
                    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    SHARED_BYTES as i32,
                )
            }?;
        }
        Ok(Self { element, products, plus_identity: function("plus_identity")? })
    }

    /// Prepares a launch, for the stream of the scratch memory and a number of multiprocessors.
    pub fn prepare(
        &self,
        (scratch, multiprocessors): (&Scratch, usize),
        launch: &Launch,
    ) -> Result<Prepared, DriverError> {
        let product = match launch {
            Launch::PlusIdentity(sum) => {
                return Ok(Prepared::PlusIdentity { kernel: self.plus_identity, sum: *sum });
            }
            Launch::Product(product) => product,
        };
        let kernel = self.products[product.layout as usize];
        let [a, b, d, c] = product.tensors().map(|tiled| self.tensor_map(&tiled, product.batch));
        let grid = product.grid(multiprocessors);
        let [m, n, k] = product.sizes.map(|size| size as c_int);
        let sizes = Sizes {
            m,
            n,
            k,
            alpha: product.alpha,
            beta: product.addend.map_or(0.0, |(_, beta)| beta),
            lower: product.lower.into(),
            addend: product.addend.is_some().into(),
            whole: grid.whole as c_int,
            parts: grid.parts as c_int,
        };
        let scratch = [scratch.partials.address(), scratch.arrived.address()];
        let blocks = grid.blocks() as u32;
        let maps = Box::new([a?, b?, d?, c?]);
        Ok(Prepared::Product { kernel, blocks, maps, sizes, scratch })
    }

    /// The description of a tensor for the copy engine, which swizzles tiles by 128 bytes and
    /// fills what is out of bounds with zeros.
    fn tensor_map(&self, tiled: &Tiled, batch: usize) -> Result<sys::CUtensorMap, DriverError> {
        let [x, y] = tiled.sizes.map(|size| size as u64);
        let (sizes, strides) = ([x, y, batch as u64], [2 * x, 2 * x * y]);
        let ([width, height], ones) = (tiled.tile, [1; 3]);
        let tile = [width, height, 1];
        let element = match self.element {
            Element::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Element::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have the three dimensions that are announced, the strides one less.
        // The driver reads the address as a number.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                element,
                3,
                tiled.address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                ones.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()?;
        Ok(map)
    }
}

impl Prepared {
    /// Queues the launch on a stream, in whose context the kernels and the scratch memory are.
    ///
    /// # Safety
    ///
    /// The addresses of the launch are those of memory of the device with the launch's elements,
    /// until the stream has done its work. They are multiples of 16. The scratch memory is that of
    /// the stream.
    pub unsafe fn launch(&self, stream: &SideStream) -> Result<(), DriverError> {
        // The driver copies the parameters, and does not write to them.
        fn parameter<T>(value: &T) -> *mut c_void {
            std::ptr::from_ref(value).cast_mut().cast()
        }
        let stream = stream.as_ptr().cast();
        match self {
            Self::Product { kernel, blocks, maps, sizes, scratch } => {
                let others = [parameter(sizes), parameter(&scratch[0]), parameter(&scratch[1])];
                let mut parameters: Vec<_> = maps.iter().map(parameter).chain(others).collect();
                let (grid, block) = ((*blocks, 1, 1), (THREADS, 1, 1));
                let shared = SHARED_BYTES;
                // SAFETY: as for this function; the parameters are those of the kernel.
                unsafe {
                    result::launch_kernel(*kernel, grid, block, shared, stream, &mut parameters)
                }
            }
            Self::PlusIdentity { kernel, sum } => {
                let [threads, neighbours] = ELEMENTWISE;
                let blocks = (sum.rows * sum.rows).div_ceil(threads * neighbours);
                let rows = sum.rows as c_int;
                let mut parameters = [parameter(&sum.z), parameter(&sum.sum), parameter(&rows)];
                let grid = (blocks as u32, sum.batch as u32, 1);
                let block = (threads as u32, 1, 1);
                // SAFETY: as above.
                unsafe { result::launch_kernel(*kernel, grid, block, 0, stream, &mut parameters) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_kernels() {
        for element in Element::ALL {
            let ptx = ptx(element);
            for layout in Layout::ALL {
                let kernel = layout.kernel();
                let sizes = format!("{kernel}_param_4[{}]", size_of::<Sizes>());
                assert!(ptx.contains(&sizes), "{element:?}: {sizes}");
                assert!(ptx.contains(&format!("{kernel}_param_6")), "{kernel}");
                assert!(!ptx.contains(&format!("{kernel}_param_7")), "{kernel}");
            }
        }
    }
}
