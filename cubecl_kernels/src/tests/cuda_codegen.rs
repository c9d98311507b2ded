//! The kernels compiled for CUDA, on machines without it.
//!
//! Each kernel is generated as CUDA C++ and, with feature `cuda`, as PTX by LLVM: the two compilers
//! of CubeCL. LLVM writes the PTX for two drivers. `DISTMUON_CUDA_TOOLS` names a folder with
//! NVIDIA's tools, those of the unpacked wheels `nvidia-cuda-nvrtc`, `-runtime`, `-crt` and
//! `-nvcc`. If it is set, NVRTC compiles the C++, ptxas assembles the PTX of all, and the tests
//! check matrix instructions, registers, spills and shared memory of the machine code. distmuon's
//! `docs/results/kernels.md` has the table.

use std::fmt;
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

use super::any_device;
use crate::product::{Product, Tiling, Triangle, Unit};
use crate::skipped_tests::excused;
use crate::{Matrices, fused, gram, identity, mirror};

const F32: ElemType = ElemType::Float(FloatKind::F32);
const F16: ElemType = ElemType::Float(FloatKind::F16);
const BF16: ElemType = ElemType::Float(FloatKind::BF16);

/// Compute capabilities of Ampere, Hopper and Blackwell.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];

/// Registers of a multiprocessor (CUDA programming guide, technical specifications).
const REGISTERS: usize = 65_536;

/// Threads that a multiprocessor runs at a time (the same source).
const THREADS: usize = 2048;

/// Blocks that a multiprocessor runs at a time (the same source).
const BLOCKS: usize = 32;

/// Returns the bytes of shared memory of a multiprocessor and of one block, which leaves 1 KiB to
/// the system (the same source).
fn shared_memory(version: u32) -> [usize; 2] {
    let kib = if version == 80 { 164 } else { 228 };
    [kib << 10, (kib - 1) << 10]
}

/// Returns the properties that the driver would report of a device.
fn device(version: u32) -> DeviceProperties {
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

/// A compiler of kernels to PTX.
#[derive(Debug, Clone, Copy, PartialEq)]
enum KernelCompiler {
    /// CubeCL's generator of CUDA C++, and NVRTC.
    Cpp,
    /// CubeCL's LLVM, which writes the newest version of PTX that the driver of a CUDA version
    /// loads.
    #[cfg(feature = "cuda")]
    Llvm { driver: i32 },
}

impl fmt::Display for KernelCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpp => write!(f, "C++"),
            #[cfg(feature = "cuda")]
            Self::Llvm { driver } => {
                write!(f, "LLVM for CUDA {}.{}", driver / 1000, driver % 1000 / 10)
            }
        }
    }
}

/// The source of a kernel.
struct KernelSource {
    /// CUDA C++ or PTX.
    text: String,
    /// Bytes of shared memory that a launch requests.
    shared: usize,
}

impl KernelCompiler {
    fn all() -> Vec<Self> {
        vec![
            Self::Cpp,
            // PTX 8.7 and 9.0.
            #[cfg(feature = "cuda")]
            Self::Llvm { driver: 12_080 },
            #[cfg(feature = "cuda")]
            Self::Llvm { driver: 13_000 },
        ]
    }

    fn device(self, version: u32) -> Arc<DeviceProperties> {
        #[allow(unused_mut)] // only LLVM restricts the features
        let mut properties = device(version);
        #[cfg(feature = "cuda")]
        if self != Self::Cpp {
            use cubecl_llvm::shared::lowered_features::{GpuTarget, restrict_features};
            restrict_features(&mut properties, GpuTarget::Nvptx);
        }
        Arc::new(properties)
    }

    fn compile(self, definition: KernelDefinition, version: u32) -> KernelSource {
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
                KernelSource { text: kernel.source, shared: kernel.shared_memory_size }
            }
            #[cfg(feature = "cuda")]
            Self::Llvm { driver } => {
                use cubecl_core::ir::nvidia::SmArch;
                use cubecl_llvm::nvptx::ptx_version::PtxVersion;
                use cubecl_llvm::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
                let options = PlironOptions {
                    sm_arch: Some(SmArch::new(version, version >= 90)),
                    ptx_version: PtxVersion::for_driver(driver),
                    grid_constants: true,
                    ..Default::default()
                };
                let mut compiler = PlironCompiler { target: LlvmTarget::Nvptx };
                match compiler.compile(definition, &options) {
                    Ok(PlironArtifact::NvptxCode(module)) => {
                        // SAFETY: the artifact contains a string that ends with zero.
                        let text = unsafe { std::ffi::CStr::from_ptr(module.ptx.as_ptr()) };
                        let text = text.to_string_lossy().into_owned();
                        KernelSource { text, shared: module.shared_memory_size }
                    }
                    Ok(_) => panic!("the compiler did not return PTX for its target NVPTX"),
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    }
}

/// The resources of a kernel in machine code.
struct MachineCode {
    /// Instructions of matrix units.
    instructions: usize,
    /// Registers of every unit.
    registers: usize,
    /// Bytes of every unit that are neither in registers nor shared: spilled registers, and arrays.
    local: usize,
    /// Bytes of shared memory.
    shared: usize,
}

/// NVIDIA's compilers.
struct Tools {
    folder: PathBuf,
}

impl Tools {
    /// Returns the tools if `DISTMUON_CUDA_TOOLS` is set.
    fn find() -> Option<Self> {
        Some(Self { folder: std::env::var_os("DISTMUON_CUDA_TOOLS")?.into() })
    }

    fn ptx(&self, compiler: KernelCompiler, source: &KernelSource, version: u32) -> String {
        match compiler {
            KernelCompiler::Cpp => {
                let include = self.folder.join("include").display().to_string();
                let options = cudarc::nvrtc::CompileOptions {
                    include_paths: vec![include.clone(), format!("{include}/cccl")],
                    options: vec![format!("--gpu-architecture=compute_{}", arch_suffix(version))],
                    ..Default::default()
                };
                let ptx = cudarc::nvrtc::compile_ptx_with_opts(&source.text, options);
                ptx.unwrap_or_else(|error| panic!("{error}")).to_src()
            }
            #[cfg(feature = "cuda")]
            KernelCompiler::Llvm { .. } => source.text.clone(),
        }
    }

    /// Assembles a kernel and returns its resources.
    fn assemble(
        &self,
        compiler: KernelCompiler,
        source: &KernelSource,
        version: u32,
    ) -> MachineCode {
        let ptx = self.ptx(compiler, source, version);
        let mut file = tempfile::NamedTempFile::new().expect("a folder for temporary files exists");
        file.write_all(ptx.as_bytes()).expect("the folder for temporary files is writable");
        let report = self.run_ptxas(file.path(), version);
        MachineCode {
            instructions: ptx.matches("mma.sync").count(),
            registers: number_before(&report, "registers"),
            local: number_before(&report, "bytes stack frame")
                .max(number_before(&report, "bytes spill stores")),
            shared: source.shared.max(number_before(&report, "bytes smem")),
        }
    }

    /// Runs ptxas and returns its report.
    fn run_ptxas(&self, ptx: &Path, version: u32) -> String {
        let output = Command::new(self.folder.join("bin/ptxas"))
            .args(["-v", &format!("-arch=sm_{}", arch_suffix(version)), "-o", "/dev/null"])
            .arg(ptx)
            .output()
            .expect("the tools' folder has an executable ptxas");
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {report}", ptx.display());
        report
    }
}

/// Returns the name of an architecture after `sm_`. Hopper and later have instructions that only
/// the exact architecture accepts, which is written with an `a`.
fn arch_suffix(version: u32) -> String {
    if version >= 90 { format!("{version}a") } else { version.to_string() }
}

/// Returns the number before some words of a report, or 0 if it has none.
fn number_before(report: &str, words: &str) -> usize {
    let (before, _) = report.split_once(words).unwrap_or_default();
    let digits = before.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Returns the number of blocks of a kernel that a multiprocessor runs at a time.
fn blocks(version: u32, threads: usize, registers: usize, shared: usize) -> usize {
    // Registers are allocated to warps in units of 256.
    let warp_registers = (registers * 32).next_multiple_of(256);
    let by_registers = REGISTERS / (warp_registers * threads.div_ceil(32)).max(1);
    let by_shared = shared_memory(version)[0] / (shared + 1024);
    by_registers.min(by_shared).min(THREADS / threads).min(BLOCKS)
}

/// Compiles every tiling, in bfloat16 for all architectures and in the other types for Hopper.
/// Plain arithmetic may spill a few bytes, matrix units may not.
#[test]
fn products_become_matrix_instructions_without_spills() {
    let Some(host) = any_device() else { return };
    check_table(&[BF16, F16, F32], |target, properties, dtype| {
        let tilings = Tiling::for_device(properties, dtype);
        for unit in [Unit::Mma, Unit::Cmma, Unit::Registers] {
            assert!(tilings.iter().any(|tiling| tiling.unit == unit), "{unit:?} of {dtype:?}");
        }
        let row = |tiling: Tiling| {
            let (definition, units) = symmetric_product(&host, &tiling, properties, dtype);
            let is_right = |code: &MachineCode| {
                tiling.unit == Unit::Registers || code.instructions > 0 && code.local == 0
            };
            target.row(&tiling.to_string(), dtype, definition, units, is_right)
        };
        tilings.into_iter().filter_map(row).collect()
    });
}

/// Compiles the elementwise kernels and those of small matrices and mirrored triangles, in bfloat16
/// for all architectures and in float32 for Hopper. None may spill.
#[test]
fn other_kernels_compile_without_spills() {
    let Some(host) = any_device() else { return };
    check_table(&[BF16, F32], |target, properties, dtype| {
        let row = |(name, definition, units)| {
            target.row(name, dtype, definition, units, |code| code.local == 0)
        };
        let kernels = other_kernels::<{ fused::BRANCHES }>(&host, properties, dtype);
        kernels.into_iter().filter_map(row).collect()
    });
}

/// With as many short tensors as a launch takes, kernels may spill a few registers, and their
/// arguments fit.
#[test]
fn kernels_of_many_tensors_compile() {
    const MOST_SPILLED: usize = 128;
    let Some(host) = any_device() else { return };
    check_table(&[BF16, F32], |target, properties, dtype| {
        let row = |(name, definition, units)| {
            target.row(name, dtype, definition, units, |code| code.local <= MOST_SPILLED)
        };
        let kernels = other_kernels::<{ fused::MAX_TENSORS }>(&host, properties, dtype);
        let of_tensors = ["reject", "update_momentum", "norms", "apply", "adamw", "restore"];
        let is_of_tensors = |name: &str| of_tensors.iter().any(|kernel| name.starts_with(kernel));
        let kernels = kernels.into_iter().filter(|(name, ..)| is_of_tensors(name));
        kernels.filter_map(row).collect()
    });
}

/// Compiles kernels with all compilers, in the first of the types for all architectures and in all
/// types for Hopper, prints the table of their resources, and fails if a row of it is not right.
fn check_table(
    dtypes: &[ElemType],
    rows: impl Fn(CompileTarget<'_>, &Arc<DeviceProperties>, ElemType) -> Vec<TableRow> + Sync,
) {
    let tools = Tools::find();
    if tools.is_none() {
        excused("NVRTC and ptxas (DISTMUON_CUDA_TOOLS is not set); sources are generated");
    }
    let compile_all = |compiler: KernelCompiler| {
        let mut table = vec![];
        for version in ARCHITECTURES {
            let properties = compiler.device(version);
            let target = CompileTarget { compiler, version, tools: tools.as_ref() };
            for dtype in if version == 90 { dtypes } else { &dtypes[..1] } {
                table.extend(rows(target, &properties, *dtype));
            }
        }
        table
    };
    let table: Vec<TableRow> = std::thread::scope(|scope| {
        let compile_all = &compile_all;
        let start = |compiler| scope.spawn(move || compile_all(compiler));
        let threads: Vec<_> = KernelCompiler::all().into_iter().map(start).collect();
        let tables = threads.into_iter();
        tables.flat_map(|thread| thread.join().expect("all kernels compile")).collect()
    });
    println!(
        "| kernel | type | compiler | sm | matrix instructions | registers | local bytes \
         | shared KiB | blocks per SM |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    table.iter().for_each(|row| println!("{}", row.text));
    let wrong: Vec<&String> =
        table.iter().filter(|row| !row.is_right).map(|row| &row.text).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A row of the table.
struct TableRow {
    text: String,
    /// `true` if the machine code is as required.
    is_right: bool,
}

/// A compiler and an architecture that kernels are compiled for.
#[derive(Clone, Copy)]
struct CompileTarget<'a> {
    compiler: KernelCompiler,
    version: u32,
    tools: Option<&'a Tools>,
}

impl CompileTarget<'_> {
    /// Compiles a kernel and returns its row of the table, or `None` without the tools.
    fn row(
        self,
        name: &str,
        dtype: ElemType,
        definition: KernelDefinition,
        units: u32,
        is_right: impl Fn(&MachineCode) -> bool,
    ) -> Option<TableRow> {
        let Self { compiler, version, tools } = self;
        let source = compiler.compile(definition, version);
        let [_, max_shared] = shared_memory(version);
        assert!(source.shared <= max_shared, "{name}: {} bytes", source.shared);
        let code = tools?.assemble(compiler, &source, version);
        let blocks = blocks(version, units as usize, code.registers, code.shared);
        let ElemType::Float(kind) = dtype else { unreachable!("matrices are of floats") };
        let text = format!(
            "| {name} | {kind:?} | {compiler} | {version} | {} | {} | {} | {:.1} | {blocks} |",
            code.instructions,
            code.registers,
            code.local,
            code.shared as f64 / 1024.0,
        );
        Some(TableRow { text, is_right: blocks > 0 && is_right(&code) })
    }
}

/// Returns a symmetric product as it would run on a device, and the units of a cube. `host` is any
/// device, for the buffers that the definition of a kernel needs.
fn symmetric_product(
    host: &Client,
    tiling: &Tiling,
    properties: &Arc<DeviceProperties>,
    dtype: ElemType,
) -> (KernelDefinition, u32) {
    let a = Matrices::empty(host, dtype, [1, 256, 256]);
    let b = a.clone().transposed();
    let d = Matrices::empty(host, dtype, [1, 256, 256]);
    let addend = Some((&d, 0.5));
    let product = Product { a: &a, b: &b, alpha: 2.0, addend, triangle: Triangle::Lower };
    product.definition(tiling, properties, target())
}

/// The name of a kernel, the kernel as it would run on a device, and the units of a cube.
type NamedKernel = (&'static str, KernelDefinition, u32);

fn defined(name: &str, kernel: &impl CubeKernel) -> KernelDefinition {
    define_kernel(kernel).unwrap_or_else(|error| panic!("{name}: {error:?}"))
}

/// Returns the kernel for small iterations, as it would run on a device.
fn gram_kernel(
    host: &Client,
    properties: &Arc<DeviceProperties>,
    dtype: ElemType,
    rows: usize,
    polynomials: &[[f32; 3]],
) -> impl CubeKernel {
    // SAFETY: nothing is launched.
    let buffer = || unsafe { BufferArg::from_raw_parts(host.empty(4), 1 << 20) };
    let coefficients = |index: usize| polynomials.iter().map(|p| p[index]).collect();
    gram::accumulate_q_kernel::create_dummy_kernel(
        properties.clone(),
        target(),
        CubeCount::Static(1, 1, 1),
        CubeDim::new_2d(gram::SIDE, gram::SIDE),
        AddressType::U32,
        buffer(),
        buffer(),
        rows as u32,
        rows * rows,
        rows,
        1_usize,
        coefficients(0),
        coefficients(1),
        coefficients(2),
        gram::are_cubic(polynomials),
        rows as u32 / gram::SIDE,
        dtype,
    )
}

/// Returns all kernels except the products, for matrices of a type, on a device. Those of several
/// tensors are for a number of them.
fn other_kernels<const TENSORS: usize>(
    host: &Client,
    properties: &Arc<DeviceProperties>,
    dtype: ElemType,
) -> Vec<NamedKernel> {
    // SAFETY: nothing is launched.
    let buffer = || unsafe { BufferArg::from_raw_parts(host.empty(4), 1 << 20) };
    let sizes = || 1..=TENSORS;
    let floats = || [0.5_f32; TENSORS].into_iter();
    macro_rules! buffers {
        () => {
            sizes().map(|_| buffer()).collect()
        };
    }
    let short = AddressType::U32;
    let length = 16 / dtype.size();
    let count = 4_usize;
    macro_rules! kernel {
        ($name:literal, $($kernel:ident)::+, $units:expr, $($argument:expr),*) => {{
            let dim: CubeDim = $units;
            let kernel = $($kernel)::+::create_dummy_kernel(
                properties.clone(), target(), CubeCount::Static(1, 1, 1), dim, short, $($argument),*
            );
            ($name, defined($name, &kernel), dim.num_elems())
        }};
    }
    let line = CubeDim::new_1d(fused::UNITS);
    let max_rows = gram::max_rows_for(&properties.hardware);
    let square = gram::SIDE * gram::SIDE;
    let tile = mirror::TILE;
    let addend = || ComptimeOptionArgs::Some(buffer());
    let small = |name, polynomial| {
        let kernel = gram_kernel(host, properties, dtype, max_rows, &[polynomial; 8]);
        (name, defined(name, &kernel), square)
    };
    vec![
        kernel!(
            "reject",
            fused::reject_kernel,
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
            "update_momentum",
            fused::update_momentum_kernel,
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
            "accept",
            fused::accept_kernel,
            line,
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            0.9_f32,
            0.1_f32,
            0.95_f32,
            0.05_f32,
            true,
            true
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
            false,
            [dtype; 2]
        ),
        kernel!(
            "count_and_apply",
            fused::apply_and_count_kernel,
            line,
            length,
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            1_usize << 10,
            0.9_f32,
            0.1_f32,
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
            false,
            [dtype; 3]
        ),
        // As with master weights: one buffer of float32 for all parameters.
        kernel!(
            "apply, joined",
            fused::apply_kernel,
            line,
            length,
            [buffer()].into_iter().collect(),
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
            true,
            [F32, dtype]
        ),
        kernel!(
            "adamw, joined",
            fused::adamw_kernel,
            line,
            length,
            [buffer()].into_iter().collect(),
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
            true,
            [F32, dtype, F32]
        ),
        kernel!(
            "restore",
            fused::restore_kernel,
            line,
            length,
            buffers!(),
            buffer(),
            buffer(),
            sizes().collect(),
            sizes().collect(),
            dtype
        ),
        kernel!(
            "add_identity",
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
        small("gram", [0.5; 3]),
        small("gram, cubic", [0.5, 0.5, 0.0]),
    ]
}

/// Compiled kernels are cached by their identity, which has no coefficients.
#[test]
fn schedules_of_as_many_steps_share_a_kernel() {
    let Some(host) = any_device() else { return };
    let properties = Arc::new(device(90));
    let id = |polynomials: &[[f32; 3]]| gram_kernel(&host, &properties, F32, 64, polynomials).id();
    let [one, other] = [[3.4445, -4.775, 2.0315], [1.875, -1.25, 0.375]];
    assert_eq!(id(&[one, one, one]), id(&[one, other, other]));
    assert_ne!(id(&[one, one, one]), id(&[one, one]));
    let cubic = [1.5, -0.5, 0.0];
    assert_ne!(id(&[one, one, one]), id(&[cubic, cubic, cubic]));
    assert_eq!(id(&[one, one, one]), id(&[one, cubic, cubic]));
}

/// 136 tiles of 128 x 128 on 132 multiprocessors would take as long as 264, and so as a full
/// product.
#[test]
fn the_chosen_tiling_divides_a_product_evenly_among_multiprocessors() {
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

/// Smaller buffers have 32-bit addresses, which are faster.
#[test]
fn a_product_with_a_result_of_more_than_2_to_the_32_elements_has_64_bit_addresses() {
    let Some(host) = any_device() else { return };
    let properties = Arc::new(device(90));
    let tiling = Tiling::for_device(&properties, BF16)[0];
    for (m, long) in [(60_000, false), (70_000, true)] {
        // Nothing is launched: the buffer may be smaller than the matrices.
        let a = Matrices::contiguous(host.empty(4), BF16, [1, m, 64]);
        let b = a.clone().transposed();
        let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle: Triangle::Lower };
        let (definition, _) = product.definition(&tiling, &properties, target());
        let address = definition.settings.address_type;
        assert_eq!(address == AddressType::U64, long, "{m} rows");
    }
}
