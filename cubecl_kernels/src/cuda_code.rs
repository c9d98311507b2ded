//! The kernels compiled for CUDA, on machines without it.
//!
//! Each kernel is generated as CUDA C++ and, with feature `cuda`, as PTX by LLVM: the two compilers
//! that CubeCL has. With the folder of NVIDIA's tools in `DISTMUON_CUDA_TOOLS` (that of the wheels
//! `nvidia-cuda-nvrtc`, `-runtime`, `-crt` and `-nvcc`, unpacked), the C++ goes through NVRTC, both go
//! through ptxas, and what comes out is looked at: matrix instructions, registers, spills, shared
//! memory. `docs/kernels.md` has the table.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use cubecl::client::Client;
use cubecl::ir::{
    ContiguousElements, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, MmaProperties, OpaqueType, TargetProperties, VectorSize,
    features::{Features, Plane, TypeUsage},
};
use cubecl::prelude::*;
use cubecl_core::Compiler;
use cubecl_core::cmma::MatrixLayout;
use cubecl_cpp::cuda::{
    arch::CudaArchitecture,
    mma::{CudaCmmaCompiler, manual::contiguous_elements_cuda},
    supported_mma_combinations,
};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_wmma_features,
};
use cubecl_cpp::{register_supported_types, target::Cuda};

use crate::product::{Product, Tiling, Triangle, Unit};
use crate::{Matrices, fused, gram, identity, mirror};

const F32: ElemType = ElemType::Float(FloatKind::F32);
const F16: ElemType = ElemType::Float(FloatKind::F16);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// Compute capabilities: Ampere, Hopper, Blackwell.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

/// What a multiprocessor has: registers, threads and blocks (CUDA programming guide, technical
/// specifications).
const REGISTERS: usize = 65_536;
const THREADS: usize = 2048;
const BLOCKS: usize = 32;

/// Bytes of shared memory of a multiprocessor, and of one block, which leaves 1 KiB to the system (the same).
fn shared_memory(version: u32) -> [usize; 2] {
    let kib = if version == 80 { 164 } else { 228 };
    [kib << 10, (kib - 1) << 10]
}

/// What the driver would report of a device.
pub(crate) fn device(version: u32) -> DeviceProperties {
    let arch = CudaArchitecture { version, tensor_cores: true };
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared_memory(version)[1],
        max_cube_count: (i32::MAX as u32, u32::from(u16::MAX), u32::from(u16::MAX)),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        last_level_cache_size: None,
        max_vector_size: VectorSize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity {
        name: "offline".into(),
        fingerprint: format!("sm_{version}"),
        physical: None,
    };
    let mut properties = DeviceProperties::new(
        Features::default(),
        MemoryDeviceProperties::new(u64::MAX, 512),
        hardware,
        cubecl_core::profile::TimingMethod::Device,
        identity,
    );
    register_supported_types(&mut properties);
    properties.register_opaque_type(OpaqueType::Barrier);
    for feature in [Plane::Sync, Plane::Ops, Plane::NonUniformControlFlow] {
        properties.features.plane.insert(feature);
    }
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    properties.features.alignment = true;
    properties.features.memory_reinterpret = true;
    for half in [F16, BF16] {
        properties.features.matmul.ldmatrix.insert(half);
        if version >= 90 {
            properties.features.matmul.stmatrix.insert(half);
        }
    }
    register_wmma_features(
        CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch),
        &mut properties,
    );
    register_mma_features(supported_mma_combinations(&arch), &mut properties);
    properties
}

fn target() -> Arc<TargetProperties> {
    Arc::new(TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    })
}

/// A way from a kernel to PTX.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Backend {
    /// CUDA C++ and NVRTC.
    Cpp,
    /// LLVM.
    #[cfg(feature = "cuda")]
    Llvm,
}

/// A kernel's source, and the shared memory that it asks for at launch.
struct Code {
    text: String,
    shared: usize,
}

impl Backend {
    fn all() -> Vec<Self> {
        vec![
            Self::Cpp,
            #[cfg(feature = "cuda")]
            Self::Llvm,
        ]
    }

    fn device(self, version: u32) -> Arc<DeviceProperties> {
        #[allow(unused_mut)] // LLVM takes some features away
        let mut properties = device(version);
        #[cfg(feature = "cuda")]
        if self == Self::Llvm {
            use cubecl_llvm::shared::lowered_features::{GpuTarget, restrict_features};
            restrict_features(&mut properties, GpuTarget::Nvptx);
        }
        Arc::new(properties)
    }

    fn compile(self, definition: KernelDefinition, version: u32) -> Code {
        match self {
            Self::Cpp => {
                let options = CompilationOptions {
                    warp_size: 32,
                    supports_features: CppSupportedFeatures {
                        grid_constants: true,
                        clusters: version >= 90,
                        fast_math: true,
                        fast_tanh: true,
                        elect_sync: version >= 90,
                        dp4a: true,
                    },
                    ..Default::default()
                };
                let kernel = CppCompiler::<Cuda>::default().compile(definition, &options);
                let kernel = kernel.unwrap_or_else(|error| panic!("{error:?}"));
                Code { text: kernel.source, shared: kernel.shared_memory_size }
            }
            #[cfg(feature = "cuda")]
            Self::Llvm => {
                use cubecl_core::ir::nvidia::SmArch;
                use cubecl_llvm::nvptx::ptx_version::PtxVersion;
                use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
                let options = PlironOptions {
                    sm_arch: Some(SmArch::new(version, version >= 90)),
                    ptx_version: PtxVersion::for_driver(12_080),
                    grid_constants: true,
                    ..Default::default()
                };
                let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
                match compiler.compile(definition, &options) {
                    Ok(PlironArtifact::NvptxCode(module)) => {
                        // SAFETY: the artifact holds a string that ends with zero.
                        let text = unsafe { std::ffi::CStr::from_ptr(module.ptx.as_ptr()) };
                        let text = text.to_string_lossy().into_owned();
                        Code { text, shared: module.shared_memory_size }
                    }
                    Ok(_) => panic!("asked for PTX"),
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    }
}

/// A kernel in machine code.
struct Assembled {
    /// Those of matrix units.
    instructions: usize,
    /// Of every unit.
    registers: usize,
    /// Bytes of every unit that are neither in registers nor shared: spilled ones, and arrays.
    local: usize,
    /// Bytes.
    shared: usize,
}

/// NVIDIA's compilers.
struct Tools {
    folder: PathBuf,
}

impl Tools {
    fn find() -> Option<Self> {
        Some(Self { folder: std::env::var_os("DISTMUON_CUDA_TOOLS")?.into() })
    }

    fn ptx(&self, backend: Backend, code: &Code, version: u32) -> String {
        match backend {
            Backend::Cpp => {
                let include = self.folder.join("include").display().to_string();
                let options = cudarc::nvrtc::CompileOptions {
                    include_paths: vec![include.clone(), format!("{include}/cccl")],
                    options: vec![format!("--gpu-architecture=compute_{}", arch(version))],
                    ..Default::default()
                };
                let ptx = cudarc::nvrtc::compile_ptx_with_opts(&code.text, options);
                ptx.unwrap_or_else(|error| panic!("{error}")).to_src()
            }
            #[cfg(feature = "cuda")]
            Backend::Llvm => code.text.clone(),
        }
    }

    /// What a kernel has become.
    fn assembled(&self, backend: Backend, code: &Code, version: u32) -> Assembled {
        let ptx = self.ptx(backend, code, version);
        let mut file =
            tempfile::NamedTempFile::new().expect("there is a folder for temporary files");
        file.write_all(ptx.as_bytes()).expect("the folder for temporary files is writable");
        let said = self.assemble(file.path(), version);
        Assembled {
            instructions: ptx.matches("mma.sync").count(),
            registers: number_before(&said, "registers"),
            local: number_before(&said, "bytes stack frame")
                .max(number_before(&said, "bytes spill stores")),
            shared: code.shared.max(number_before(&said, "bytes smem")),
        }
    }

    /// What ptxas says of some PTX.
    fn assemble(&self, ptx: &Path, version: u32) -> String {
        let output = Command::new(self.folder.join("bin/ptxas"))
            .args(["-v", &format!("-arch=sm_{}", arch(version)), "-o", "/dev/null"])
            .arg(ptx)
            .output()
            .expect("ptxas starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {said}", ptx.display());
        said
    }
}

/// Hopper and later have instructions that only the exact architecture takes.
fn arch(version: u32) -> String {
    if version >= 90 { format!("{version}a") } else { version.to_string() }
}

/// The number before some words.
fn number_before(said: &str, words: &str) -> usize {
    let (before, _) = said.split_once(words).unwrap_or_default();
    let digits = before.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Blocks of a kernel that a multiprocessor runs at a time.
fn blocks(version: u32, threads: usize, registers: usize, shared: usize) -> usize {
    // Registers are dealt out to warps in units of 256.
    let of_warp = (registers * 32).next_multiple_of(256);
    let by_registers = REGISTERS / (of_warp * threads.div_ceil(32)).max(1);
    let by_shared = shared_memory(version)[0] / (shared + 1024);
    by_registers.min(by_shared).min(THREADS / threads).min(BLOCKS)
}

/// Every tiling in bfloat16 for all architectures, and in the other types for Hopper. Plain arithmetic may
/// spill a few bytes, matrix units may not.
#[test]
fn products_become_matrix_instructions_without_spills() {
    let Some(host) = host() else { return };
    check_table(&[BF16, F16, F32], |compile, properties, dtype| {
        let tilings = Tiling::of(properties, dtype);
        for unit in [Unit::Mma, Unit::Cmma, Unit::Registers] {
            assert!(tilings.iter().any(|tiling| tiling.unit == unit), "{unit:?} of {dtype:?}");
        }
        let row = |tiling: Tiling| {
            let (definition, units) = product(&host, &tiling, properties, dtype);
            let right = |made: &Assembled| {
                tiling.unit == Unit::Registers || made.instructions > 0 && made.local == 0
            };
            compile.row(&tiling.to_string(), dtype, definition, units, right)
        };
        tilings.into_iter().filter_map(row).collect()
    });
}

/// Elementwise kernels, the small matrices and the mirror, in bfloat16 for all architectures, and in float32 for
/// Hopper: none spills.
#[test]
fn other_kernels_compile_without_spills() {
    let Some(host) = host() else { return };
    check_table(&[BF16, F32], |compile, properties, dtype| {
        let row = |(name, definition, units)| {
            compile.row(name, dtype, definition, units, |made| made.local == 0)
        };
        others(&host, properties, dtype).into_iter().filter_map(row).collect()
    });
}

/// Compiles kernels with both compilers, for all architectures in the first of the types and for Hopper in
/// all of them, and prints what they became. All of it has to be right.
fn check_table(
    dtypes: &[ElemType],
    rows: impl Fn(Compile<'_>, &Arc<DeviceProperties>, ElemType) -> Vec<Row> + Sync,
) {
    let tools = Tools::find();
    if tools.is_none() {
        println!(
            "skipped: NVRTC and ptxas (DISTMUON_CUDA_TOOLS is not set); sources are generated"
        );
    }
    let of_backend = |backend: Backend| {
        let mut all = vec![];
        for version in ARCHITECTURES {
            let properties = backend.device(version);
            let compile = Compile { backend, version, tools: tools.as_ref() };
            for dtype in if version == 90 { dtypes } else { &dtypes[..1] } {
                all.extend(rows(compile, &properties, *dtype));
            }
        }
        all
    };
    let all: Vec<Row> = std::thread::scope(|scope| {
        let of_backend = &of_backend;
        let start = |backend| scope.spawn(move || of_backend(backend));
        let threads: Vec<_> = Backend::all().into_iter().map(start).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("it compiles")).collect()
    });
    println!(
        "| kernel | type | compiler | sm | matrix instructions | registers | local bytes | shared KiB | blocks per SM |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    all.iter().for_each(|row| println!("{}", row.text));
    let wrong: Vec<&String> = all.iter().filter(|row| !row.right).map(|row| &row.text).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A row of the table, and whether the code is what it should be.
struct Row {
    text: String,
    right: bool,
}

/// How kernels are compiled.
#[derive(Clone, Copy)]
struct Compile<'a> {
    backend: Backend,
    version: u32,
    tools: Option<&'a Tools>,
}

impl Compile<'_> {
    /// What a kernel becomes; nothing without the tools.
    fn row(
        self,
        name: &str,
        dtype: ElemType,
        definition: KernelDefinition,
        units: u32,
        is_right: impl Fn(&Assembled) -> bool,
    ) -> Option<Row> {
        let Self { backend, version, tools } = self;
        let code = backend.compile(definition, version);
        let [_, most] = shared_memory(version);
        assert!(code.shared <= most, "{name}: {} bytes", code.shared);
        let made = tools?.assembled(backend, &code, version);
        let blocks = blocks(version, units as usize, made.registers, made.shared);
        let ElemType::Float(kind) = dtype else { unreachable!("matrices are of floats") };
        let text = format!(
            "| {name} | {kind:?} | {backend:?} | {version} | {} | {} | {} | {:.1} | {blocks} |",
            made.instructions,
            made.registers,
            made.local,
            made.shared as f64 / 1024.0,
        );
        Some(Row { text, right: blocks > 0 && is_right(&made) })
    }
}

/// A device that buffers are made on, as the definition of a kernel asks for some: whatever there is.
fn host() -> Option<Client> {
    let client = std::panic::catch_unwind(|| cubecl::Device::Wgpu(Default::default()).client());
    if client.is_err() {
        crate::skips::skip("there is no device to make buffers on");
    }
    client.ok()
}

/// A symmetric product as it would run on a device, and the units of a cube.
fn product(
    host: &Client,
    tiling: &Tiling,
    properties: &Arc<DeviceProperties>,
    dtype: ElemType,
) -> (KernelDefinition, u32) {
    let of = |shape| Matrices::empty(host, dtype, shape);
    let a = of([1, 256, 256]);
    let (b, d) = (a.clone().transposed(), of([1, 256, 256]));
    let (addend, triangle) = (Some((&d, 0.5)), Triangle::Lower);
    let product = Product { a: &a, b: &b, alpha: 2.0, addend, triangle };
    product.definition(tiling, properties, target())
}

/// A kernel that multiplies no tiles, as it would run on a device, and the units of a cube.
type Other = (&'static str, KernelDefinition, u32);

/// All kernels but the products, for matrices of a type, on a device.
fn others(host: &Client, properties: &Arc<DeviceProperties>, dtype: ElemType) -> Vec<Other> {
    // SAFETY: nothing is launched.
    let buffer = || unsafe { BufferArg::from_raw_parts(host.empty(4), 1 << 20) };
    // A launch takes eight parameters.
    let (sizes, floats) = (|| 1..=8_usize, || [0.5_f32; 8].into_iter());
    macro_rules! buffers {
        () => {
            sizes().map(|_| buffer()).collect()
        };
    }
    let (short, length, count) = (AddressType::U32, 16 / dtype.size(), 4_usize);
    macro_rules! kernel {
        ($name:literal, $($kernel:ident)::+, $units:expr, $($argument:expr),*) => {{
            let dim: CubeDim = $units;
            let kernel = $($kernel)::+::create_dummy_kernel(
                properties.clone(), target(), CubeCount::Static(1, 1, 1), dim, short, $($argument),*
            );
            let definition = cubecl_core::define_kernel(&kernel);
            let definition = definition.unwrap_or_else(|error| panic!("{}: {error:?}", $name));
            ($name, definition, dim.num_elems())
        }};
    }
    let line = CubeDim::new_1d(fused::UNITS);
    let side = gram::SIDE;
    let small = |rows: usize| {
        let polynomials = vec![gram::Bits([1.5_f32, -0.5, 0.25].map(f32::to_bits)); 5];
        let (blocks, square) = (rows as u32 / side, CubeDim::new_2d(side, side));
        kernel!(
            "gram",
            gram::accumulate_kernel,
            square,
            buffer(),
            buffer(),
            rows as u32,
            rows * rows,
            rows,
            1_usize,
            blocks,
            polynomials,
            dtype
        )
    };
    let most = gram::most_rows_of(&properties.hardware);
    let tile = mirror::TILE;
    let addend = || ComptimeOptionArgs::Some(buffer());
    vec![
        kernel!(
            "refuse",
            fused::refuse_kernel,
            line,
            length,
            buffers!(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            1.0_f32,
            dtype
        ),
        kernel!(
            "accumulate",
            fused::accumulate_kernel,
            line,
            length,
            buffers!(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            floats().collect(),
            count,
            1_usize << 10,
            true,
            true,
            fused::UNITS,
            [dtype; 2]
        ),
        kernel!(
            "norms",
            fused::norms_kernel,
            line,
            4_usize,
            buffers!(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            1_usize << 10,
            fused::UNITS,
            dtype
        ),
        kernel!(
            "join",
            fused::join_kernel,
            line,
            buffer(),
            buffer(),
            count,
            100_usize,
            fused::UNITS
        ),
        kernel!(
            "normalize",
            fused::normalize_kernel,
            line,
            length,
            buffer(),
            buffer(),
            buffer(),
            1_usize << 10,
            count,
            3_usize,
            1e-7_f32,
            fused::UNITS,
            [dtype; 2]
        ),
        kernel!(
            "apply",
            fused::apply_kernel,
            line,
            length,
            buffers!(),
            buffer(),
            buffer(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            floats().collect(),
            floats().collect(),
            count,
            count,
            1_usize << 10,
            [dtype; 2]
        ),
        kernel!(
            "adamw",
            fused::adamw_kernel,
            line,
            length,
            buffers!(),
            buffers!(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            sizes().collect(),
            floats().collect(),
            floats().collect(),
            0.9_f32,
            0.95_f32,
            1e-8_f32,
            true,
            [dtype; 2]
        ),
        kernel!(
            "identity",
            identity::add_identity_kernel,
            line,
            length,
            buffer(),
            buffer(),
            1024_usize,
            dtype
        ),
        kernel!(
            "mirror",
            mirror::mirror_tiles,
            CubeDim::new_2d(tile, tile),
            buffer(),
            addend(),
            1024_u32,
            2.0_f32,
            0.5_f32,
            tile,
            dtype
        ),
        small(most),
    ]
}

/// 136 tiles of 128 x 128 on 132 multiprocessors would take as long as 264, so as long as a full product.
#[test]
fn no_multiprocessor_has_much_more_to_do_than_others() {
    let properties = device(90);
    let side = |k, m, n, triangle| {
        Tiling::by_suitability(&properties, BF16, triangle, [k, m, n])[0].side()
    };
    assert_eq!(side(1, 2048, 2048, Triangle::Lower), [64, 64]);
    assert_eq!(side(1, 4096, 4096, Triangle::Lower), [128, 128]);
    assert_eq!(side(128, 2048, 2048, Triangle::Lower), [128, 128]);
    assert_eq!(side(1, 1024, 4096, Triangle::Full), [128, 128]);
    assert_eq!(side(1, 512, 512, Triangle::Lower), [32, 32]);
}

/// Buffers of more than 2^32 elements get 64-bit addresses, smaller ones do not pay for them.
#[test]
fn large_matrices_get_long_addresses() {
    let Some(host) = host() else { return };
    let properties = Arc::new(device(90));
    let tiling = Tiling::of(&properties, BF16)[0];
    for (m, long) in [(60_000, false), (70_000, true)] {
        // Nothing is launched: the buffer need not be there.
        let a = Matrices::contiguous(host.empty(4), BF16, [1, m, 64]);
        let b = a.clone().transposed();
        let triangle = Triangle::Lower;
        let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle };
        let (definition, _) = product.definition(&tiling, &properties, target());
        let address = definition.settings.address_type;
        assert_eq!(address == AddressType::U64, long, "{m} rows");
    }
}
