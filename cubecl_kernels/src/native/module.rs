//! The kernels of a type, loaded by the driver.

use std::ffi::{CString, c_int, c_void};

use cudarc::driver::{DriverError, result, sys};

use super::order::SideStream;
use super::product::{
    ELEMENTWISE, Element, Launch, Layout, PlusIdentity, Product, SHARED_BYTES, THREADS, Tiled,
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
struct Sizes {
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: f32,
    beta: f32,
    lower: c_int,
    addend: c_int,
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

    /// Queues a launch on a stream, in whose context the kernels are.
    ///
    /// # Safety
    ///
    /// The addresses of the launch are those of memory of the device with the launch's elements,
    /// until the stream has done its work. They are multiples of 16.
    pub unsafe fn launch(&self, stream: &SideStream, launch: &Launch) -> Result<(), DriverError> {
        // SAFETY: as for this function.
        unsafe {
            match launch {
                Launch::Product(product) => self.launch_product(stream, product),
                Launch::PlusIdentity(sum) => self.launch_plus_identity(stream, sum),
            }
        }
    }

    unsafe fn launch_product(
        &self,
        stream: &SideStream,
        product: &Product,
    ) -> Result<(), DriverError> {
        let index = Layout::ALL.iter().position(|layout| *layout == product.layout);
        let function = self.products[index.expect("all layouts have a kernel")];
        let [a, b, d, c] = product.tensors().map(|tiled| self.tensor_map(&tiled, product.batch));
        let mut maps = [a?, b?, d?, c?];
        let [m, n, k] = product.sizes.map(|size| size as c_int);
        let mut sizes = Sizes {
            m,
            n,
            k,
            alpha: product.alpha,
            beta: product.addend.map_or(0.0, |(_, beta)| beta),
            lower: product.lower.into(),
            addend: product.addend.is_some().into(),
        };
        let maps = maps.iter_mut().map(|map| std::ptr::from_mut(map).cast());
        let mut parameters: Vec<*mut c_void> =
            maps.chain([std::ptr::from_mut(&mut sizes).cast()]).collect();
        let grid = (product.tiles() as u32, product.batch as u32, 1);
        // SAFETY: as for `launch`; the parameters are those of the kernel, and are copied.
        unsafe {
            result::launch_kernel(
                function,
                grid,
                (THREADS, 1, 1),
                SHARED_BYTES,
                stream.as_ptr().cast(),
                &mut parameters,
            )
        }
    }

    unsafe fn launch_plus_identity(
        &self,
        stream: &SideStream,
        &PlusIdentity { batch, rows, mut z, mut sum }: &PlusIdentity,
    ) -> Result<(), DriverError> {
        let [threads, neighbours] = ELEMENTWISE;
        let blocks = (rows * rows).div_ceil(threads * neighbours);
        let mut rows = rows as c_int;
        let mut parameters: [*mut c_void; 3] = [
            std::ptr::from_mut(&mut z).cast(),
            std::ptr::from_mut(&mut sum).cast(),
            std::ptr::from_mut(&mut rows).cast(),
        ];
        let (grid, block) = ((blocks as u32, batch as u32, 1), (threads as u32, 1, 1));
        let stream = stream.as_ptr().cast();
        // SAFETY: as in `launch_product`.
        unsafe {
            result::launch_kernel(self.plus_identity, grid, block, 0, stream, &mut parameters)
        }
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
