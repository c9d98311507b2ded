//! The kernels of a type, loaded by the driver.

use std::ffi::{CStr, CString, c_int, c_void};

use cudarc::driver::{DriverError, result, sys};

use super::Refusal;
use super::launches::{ELEMENTWISE, Element, Launch, Layout, PlusIdentity, Product, THREADS};
use super::memory::Memory;
use super::stream_order::SideStream;
use super::tile_choice::{Boxed, Grid, HEIGHT, TileShape, WIDTHS};

/// The PTX of a type, made from `kernels/product.cu` by `kernels/compile.py`.
pub(super) fn ptx(element: Element) -> &'static str {
    match element {
        Element::F16 => include_str!("kernels/hopper_f16.ptx"),
        Element::Bf16 => include_str!("kernels/hopper_bf16.ptx"),
    }
}

/// Bytes of the log of the driver's compiler that a refusal repeats.
const LOG_BYTES: usize = 8 << 10;

/// Shared memory that a block may have: 227 KiB (CUDA programming guide, compute capability 9.0).
const MAX_SHARED_BYTES: c_int = 227 << 10;

/// The kernels of a type in the context of a device, which keeps them to the end of the process.
pub(super) struct Module {
    element: Element,
    /// The products, by the columns of their tiles and by their layouts.
    products: [[sys::CUfunction; Layout::ALL.len()]; WIDTHS.len()],
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
    cluster: c_int,
    clusters: c_int,
    tiles: c_int,
    parts: c_int,
    slots: c_int,
    tasks: c_int,
    /// Nanoseconds after which a wait is given up, or 0.
    patience: u32,
}

impl Sizes {
    fn new(product: &Product, grid: &Grid, patience: u32) -> Self {
        let [m, n, k] = product.sizes.map(|size| size as c_int);
        Self {
            m,
            n,
            k,
            alpha: product.alpha,
            beta: product.addend.map_or(0.0, |(_, beta)| beta),
            lower: product.lower.into(),
            addend: product.addend.is_some().into(),
            cluster: grid.shape.cluster as c_int,
            clusters: grid.clusters as c_int,
            tiles: grid.tiles as c_int,
            parts: grid.parts as c_int,
            slots: grid.slots() as c_int,
            tasks: (grid.whole + grid.slots()) as c_int,
            patience,
        }
    }
}

/// Memory for the sums of tiles that several blocks compute, for the launches of one stream.
pub(super) struct Scratch {
    multiprocessors: usize,
    /// The sums of the largest tile for every block with a part: at most one for each
    /// multiprocessor.
    partials: Memory,
    /// The number of parts that are done, for every block of a cut tile: 0 between launches.
    arrived: Memory,
}

impl Scratch {
    /// Allocates it for a stream, whose context is current.
    pub fn new(stream: &SideStream, multiprocessors: usize) -> Result<Self, DriverError> {
        let [_, width] = WIDTHS;
        let sums = multiprocessors * HEIGHT * width;
        let partials = Memory::zeroed(stream, sums * size_of::<f32>())?;
        let arrived = Memory::zeroed(stream, multiprocessors * size_of::<u32>())?;
        Ok(Self { multiprocessors, partials, arrived })
    }

    /// Counts no parts as done, for later work of the stream, whose context is current.
    pub fn clear(&self, stream: &SideStream) -> Result<(), DriverError> {
        self.arrived.clear(stream)
    }

    /// Returns the number of multiprocessors, and of the blocks with parts that have room.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }
}

/// A launch with everything that the driver may refuse to encode.
pub(super) enum Prepared {
    Product {
        kernel: sys::CUfunction,
        /// Bytes of shared memory of a block.
        shared: u32,
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
    ///
    /// # Errors
    ///
    /// The driver's error, with what its compiler says.
    pub fn load(element: Element) -> Result<Self, Refusal> {
        let ptx = CString::new(ptx(element)).expect("PTX is text");
        let module = compiled(&ptx)?;
        Self::of(element, module).map_err(|error| Refusal::new("load the kernels", error))
    }

    /// Finds the kernels of a loaded module, and sets their attributes.
    fn of(element: Element, module: sys::CUmodule) -> Result<Self, DriverError> {
        let function = |name: &str| {
            let name = CString::new(name).expect("a name is text");
            // SAFETY: the module is loaded, and never unloaded.
            unsafe { result::module::get_function(module, name) }
        };
        let mut products = [[std::ptr::null_mut(); Layout::ALL.len()]; WIDTHS.len()];
        use sys::CUfunction_attribute_enum as Attribute;
        let set = |function, attribute, value| {
            // SAFETY: the function was loaded.
            unsafe { result::function::set_function_attribute(function, attribute, value) }
        };
        for (products, width) in products.iter_mut().zip(WIDTHS) {
            for (product, layout) in products.iter_mut().zip(Layout::ALL) {
                *product = function(&layout.kernel_name(width))?;
                let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                set(*product, most, MAX_SHARED_BYTES)?;
            }
        }
        let plus_identity = function("plus_identity")?;
        // As much shared memory as there is, in percent: between kernels that ask for different
        // amounts, a multiprocessor may have to wait until it is idle.
        for kernel in products.iter().flatten().chain([&plus_identity]) {
            set(*kernel, Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        Ok(Self { element, products, plus_identity })
    }

    /// Prepares a launch for the stream of the scratch memory, with tiles of one of the shapes and
    /// for a number of multiprocessors, at most that of the scratch memory. Its blocks give up to
    /// wait for others after `patience` nanoseconds, below 2^31, unless that is 0.
    pub fn prepare(
        &self,
        scratch: &Scratch,
        launch: &Launch,
        shapes: &[TileShape],
        multiprocessors: usize,
        patience: u32,
    ) -> Result<Prepared, DriverError> {
        let product = match launch {
            Launch::PlusIdentity(sum) => {
                return Ok(Prepared::PlusIdentity { kernel: self.plus_identity, sum: *sum });
            }
            Launch::Product(product) => product,
        };
        debug_assert!(multiprocessors <= scratch.multiprocessors);
        let grid = Grid::fastest(product, shapes, multiprocessors);
        let shape = grid.shape;
        let kernel = self.products[shape.width_index()][product.layout as usize];
        let [a, b, d, c] =
            product.tensors(shape).map(|tensor| self.tensor_map(&tensor, product.batch));
        let scratch = [scratch.partials.address(), scratch.arrived.address()];
        let maps = Box::new([a?, b?, d?, c?]);
        let shared = grid.shared_bytes(multiprocessors);
        let sizes = Sizes::new(product, &grid, patience);
        Ok(Prepared::Product { kernel, shared, maps, sizes, scratch })
    }

    /// The description of a tensor for the copy engine, which swizzles boxes by 128 bytes and
    /// fills what is out of bounds with zeros.
    fn tensor_map(&self, tensor: &Boxed, batch: usize) -> Result<sys::CUtensorMap, DriverError> {
        let [x, y] = tensor.sizes.map(|size| size as u64);
        let (sizes, strides) = ([x, y, batch as u64], [2 * x, 2 * x * y]);
        let ([width, height], ones) = (tensor.in_box, [1; 3]);
        let in_box = [width, height, 1];
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
                tensor.address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                in_box.as_ptr(),
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

/// Compiles PTX for the device of the context that is current.
fn compiled(ptx: &CStr) -> Result<sys::CUmodule, Refusal> {
    use sys::CUjit_option_enum::{CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    let mut log = vec![0u8; LOG_BYTES];
    let mut options = [CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // The driver takes the number of bytes as the value of a pointer, and returns the bytes of the
    // log in its place.
    let mut values = [log.as_mut_ptr().cast(), LOG_BYTES as *mut c_void];
    let mut module = std::ptr::null_mut();
    // SAFETY: the text ends with a zero, and the two options have the values that are documented
    // for them; the log is alive.
    let loaded = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            ptx.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    loaded.result().map(|()| module).map_err(|error| {
        let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
        let Refusal(reason) = Refusal::new("compile the kernels", error);
        match String::from_utf8_lossy(text).trim() {
            "" => Refusal(reason),
            text => Refusal(format!("{reason}: {text}")),
        }
    })
}

impl Prepared {
    /// Queues the launch on a stream, in whose context the kernels and the scratch memory are. One
    /// that `overlaps` begins while the launch before it ends; its kernel waits for the results of
    /// that launch.
    ///
    /// # Safety
    ///
    /// The addresses of the launch are those of memory of the device with the launch's elements,
    /// until the stream has done its work. They are multiples of 16. The scratch memory is that of
    /// the stream.
    pub unsafe fn launch(&self, stream: &SideStream, overlaps: bool) -> Result<(), DriverError> {
        // The driver copies the parameters, and does not write to them.
        fn parameter<T>(value: &T) -> *mut c_void {
            std::ptr::from_ref(value).cast_mut().cast()
        }
        match self {
            Self::Product { kernel, shared, maps, sizes, scratch } => {
                let others = [parameter(sizes), parameter(&scratch[0]), parameter(&scratch[1])];
                let mut parameters: Vec<_> = maps.iter().map(parameter).chain(others).collect();
                let grid = [(sizes.clusters * sizes.cluster) as u32, 1];
                let (shared, cluster) = (*shared, sizes.cluster as u32);
                let launch = Blocks { grid, threads: THREADS, shared, cluster, overlaps };
                // SAFETY: as for this function; the parameters are those of the kernel.
                unsafe { launch.queue(stream, *kernel, &mut parameters) }
            }
            Self::PlusIdentity { kernel, sum } => {
                let [threads, neighbours] = ELEMENTWISE;
                let of_matrix = (sum.rows * sum.rows).div_ceil(threads * neighbours);
                let rows = sum.rows as c_int;
                let mut parameters = [
                    parameter(&sum.z),
                    parameter(&sum.sum),
                    parameter(&rows),
                    parameter(&sum.factor),
                ];
                let grid = [of_matrix as u32, sum.batch as u32];
                let threads = threads as u32;
                let launch = Blocks { grid, threads, shared: 0, cluster: 1, overlaps };
                // SAFETY: as above.
                unsafe { launch.queue(stream, *kernel, &mut parameters) }
            }
        }
    }
}

/// The blocks of a launch, and its place in a stream.
struct Blocks {
    grid: [u32; 2],
    /// Threads of a block.
    threads: u32,
    /// Bytes of dynamic shared memory of a block.
    shared: u32,
    /// Blocks of a cluster.
    cluster: u32,
    overlaps: bool,
}

impl Blocks {
    /// Queues the launch of a kernel.
    ///
    /// # Safety
    ///
    /// The kernel is in the context of the stream. The parameters point to values of its types,
    /// which the driver copies, and the memory of the device whose addresses they have lives until
    /// the stream has done its work.
    unsafe fn queue(
        &self,
        stream: &SideStream,
        kernel: sys::CUfunction,
        parameters: &mut [*mut c_void],
    ) -> Result<(), DriverError> {
        use sys::CUlaunchAttributeID_enum as Id;
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let cluster =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
        let mut attributes = [
            attribute(
                Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue { clusterDim: cluster },
            ),
            attribute(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: self.overlaps.into(),
                },
            ),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream.as_ptr().cast(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: as for this function; the attributes live to the end of the call.
        unsafe {
            sys::cuLaunchKernelEx(&config, kernel, parameters.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_the_kernels() {
        for element in Element::ALL {
            let ptx = ptx(element);
            let kernels = WIDTHS.map(|width| Layout::ALL.map(|layout| layout.kernel_name(width)));
            for kernel in kernels.iter().flatten() {
                let sizes = format!("{kernel}_param_4[{}]", size_of::<Sizes>());
                assert!(ptx.contains(&sizes), "{element:?}: {sizes}");
                assert!(ptx.contains(&format!("{kernel}_param_6")), "{kernel}");
                assert!(!ptx.contains(&format!("{kernel}_param_7")), "{kernel}");
            }
        }
    }
}
