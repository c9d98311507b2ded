//! Hopper's kernels, without a GPU: their results on an emulator and their machine code.
//!
//! `emulate.cpp` needs g++. `DISTMUON_CUDA_TOOLS` names a folder with NVIDIA's tools, as for the
//! unit tests; of these, ptxas and, if it is there, nvdisasm may be of any version from 13.0, but
//! only NVRTC 13.0 writes the PTX that is committed.

#![cfg(feature = "cuda")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use distmuon_skips::excused;

/// The types of the elements, as in the names of the files with PTX.
const DTYPES: [&str; 2] = ["bf16", "f16"];

const PRODUCTS: [&str; 3] = ["product_kk", "product_km", "product_mm"];

/// Registers that allow two blocks of 288 threads on a multiprocessor.
const MAX_REGISTERS: usize = 112;

/// Mistakes in `product.cu`: their descriptions, the text that each replaces, and its replacement.
const MUTANTS: [(&str, &str, &str); 44] = [
    (
        "a stage is overwritten before it has been multiplied",
        "if (slice >= STAGES) barrier_wait",
        "if (slice > STAGES) barrier_wait",
    ),
    (
        "slices are multiplied before they arrive",
        "barrier_wait(&block.full[slice % STAGES], slice / STAGES & 1);",
        "",
    ),
    ("a stage is released while it is in use", "multiply_wait<1>(sums);", ""),
    ("sums are used before they are complete", "multiply_wait<0>(sums);", ""),
    ("matrix instructions have no fence", "multiply_fence(sums);", ""),
    ("matrix instructions are not committed", "multiply_commit();", ""),
    ("the copy engine stores stale memory", "fence_async();", ""),
    (
        "the fence comes after the barrier",
        "fence_async();\n    sync_threads<CONSUMERS>();",
        "sync_threads<CONSUMERS>();\n    fence_async();",
    ),
    (
        "a tile is stored before all threads have written it",
        "fence_async();\n    sync_threads<CONSUMERS>();",
        "fence_async();",
    ),
    (
        "a tile overwrites a slice in use",
        "stages are written now.\n    sync_threads<CONSUMERS>();",
        "stages are written now.",
    ),
    (
        "a mirror image is merged before it is complete",
        "exactly symmetric.\n        sync_threads<CONSUMERS>();",
        "exactly symmetric.",
    ),
    ("a block ends before its stores", "store_finish();", ""),
    ("chunks are not swizzled", "(column % PANEL / 8) ^ (row % 8)", "column % PANEL / 8"),
    ("steps through an MN-major operand are too short", "A_MN ? STEP * 128", "A_MN ? STEP * 64"),
    (
        "panels of an MN-major operand are too close",
        "B_LEADING = B_MN ? PANEL_BYTES",
        "B_LEADING = B_MN ? 4096",
    ),
    ("chunks on the diagonal are not merged", "if (c + 7 > r) merge", "if (c > r) merge"),
    ("the diagonal comes from the mirror image's neighbor", ", r - c);", ", r - c + 1);"),
    (
        "a mirror image is stored in the wrong place",
        "store_box(&c, mirror, block.row, block.column,",
        "store_box(&c, mirror, block.column, block.row,",
    ),
    ("a mirror image is not transposed", "store_transposed(mirror", "store_matrices(mirror"),
    ("D overwrites a slice in use", "wait_until_empty(block, block.slices);", ""),
    ("D is used before it arrives", "barrier_wait(block.added, 0);", ""),
    (
        "fewer bytes are expected than arrive",
        "barrier_expect(full, STAGE_BYTES)",
        "barrier_expect(full, OPERAND_BYTES)",
    ),
    ("barriers are used before they are initialized", "sync_block();", ""),
    (
        "all threads, not warps, have to release a stage",
        "barrier_init(&empty[s], CONSUMERS / 32)",
        "barrier_init(&empty[s], CONSUMERS)",
    ),
    ("all blocks compute the first matrix", "block.matrix = tile / tiles", "block.matrix = 0"),
    ("a tile is computed twice", "block >= height - c", "block > height - c"),
    ("stages are not aligned", "align_1024(shared)", "shared"),
    (
        "the sums of a part are not published",
        "thread_fence();\n    sync_threads<CONSUMERS>();\n    bool is_last",
        "sync_threads<CONSUMERS>();\n    bool is_last",
    ),
    (
        "the sums of other parts are not acquired",
        "return false;\n    thread_fence();",
        "return false;",
    ),
    (
        "a part is counted before all of its threads have stored their sums",
        "sync_threads<CONSUMERS>();\n    bool is_last",
        "bool is_last",
    ),
    ("a counter is not reset", "store_global(count, 0u);", ""),
    ("every part resets its counter", "if (is_last) {", "store_global(count, 0u);\n        {"),
    (
        "every warp counts a part",
        "is_last = false;\n    if (thread == 0)",
        "is_last = false;\n    if (thread % 32 == 0)",
    ),
    ("all cut tiles have the same counter", "arrived + block.slot / block.parts", "arrived"),
    ("the first part to arrive stores the tile", "== (u32)block.parts - 1", "== 0"),
    (
        "every part stores the tile",
        "if (!sync_threads_or<CONSUMERS>(is_last)) return false;",
        "sync_threads_or<CONSUMERS>(is_last);",
    ),
    ("one part is left out", "other < block.parts", "other < block.parts - 1"),
    ("all cut tiles have the same sums", "block.slot - block.slot % block.parts", "0"),
    (
        "tiles with the same part share a slot",
        "(u64)block.slot * (TILE * TILE)",
        "(u64)(block.slot % block.parts) * (TILE * TILE)",
    ),
    (
        "the order of the sums depends on the last part",
        "sums[i] = load_global(part + i * CONSUMERS);\n    for (int other = 1; \
         other < block.parts; ++other) {\n        part += TILE * TILE;",
        "sums[i] += 0.0f;\n    for (int other = 0; other < block.parts; ++other, \
         part += TILE * TILE) {\n        if (part == own) continue;",
    ),
    ("every part loads D", "addend && block.parts == 1", "addend"),
    ("parts overlap", "slices * part / block.parts", "slices / block.parts * part"),
    ("parts multiply the same slices", "from = block.first + slice", "from = slice"),
    ("the identity has two ones in a row", "one == 2 * p + 1", "one == 2 * p"),
];

/// Returns the folder with the kernels.
fn kernels() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/native/kernels")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn temporary_folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder for temporary files exists")
}

/// Returns `true` if a command succeeds, and the text that it prints.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn has_compiler() -> bool {
    let is_there = Command::new("g++").arg("--version").output().is_ok();
    if !is_there {
        excused("g++, which compiles the emulator of Hopper's kernels");
    }
    is_there
}

/// Compiles the kernels of a folder for the emulator and runs their checks, each within a number of
/// seconds.
fn emulate(folder: &Path, dtype: &str, seconds: u32) -> (bool, String) {
    let build = temporary_folder();
    let program = build.path().join("emulate");
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-DEMULATE"]);
    if dtype == "f16" {
        compiler.arg("-DTYPE_F16");
    }
    let (compiles, report) = run(compiler.arg(folder.join("emulate.cpp")).arg("-o").arg(&program));
    assert!(compiles, "{report}");
    run(Command::new(program).arg(seconds.to_string()))
}

/// Returns the folder of NVIDIA's tools if `DISTMUON_CUDA_TOOLS` is set.
fn tools() -> Option<PathBuf> {
    let tools = std::env::var_os("DISTMUON_CUDA_TOOLS");
    if tools.is_none() {
        excused("NVRTC and ptxas (DISTMUON_CUDA_TOOLS is not set)");
    }
    tools.map(PathBuf::from)
}

/// Returns the lines of PTX that are not comments.
fn code(ptx: &str) -> Vec<&str> {
    let lines = ptx.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).collect()
}

/// Returns the number before some words of a report.
fn number_before(report: &str, words: &str) -> usize {
    let (before, _) = report.split_once(words).unwrap_or_else(|| panic!("{words}: {report}"));
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("{words}: {report}"))
}

/// The emulator compares integers, which all types of elements represent, with loops in float64.
#[test]
fn emulated_kernels_are_exact() {
    if !has_compiler() {
        return;
    }
    for dtype in DTYPES {
        let (succeeds, report) = emulate(&kernels(), dtype, 20);
        println!("{dtype}\n{report}");
        assert!(succeeds, "{dtype}: {report}");
    }
}

#[test]
fn mutants_are_found() {
    if !has_compiler() {
        return;
    }
    let source = read(&kernels().join("product.cu"));
    let next = AtomicUsize::new(0);
    let check = |(mistake, text, replacement): (&str, &str, &str)| {
        assert_eq!(source.matches(text).count(), 1, "{mistake}: occurrences of `{text}`");
        let folder = temporary_folder();
        for name in ["emulator.hpp", "emulate.cpp"] {
            fs::copy(kernels().join(name), folder.path().join(name))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        fs::write(folder.path().join("product.cu"), source.replace(text, replacement))
            .expect("the folder for temporary files is writable");
        let (succeeds, report) = emulate(folder.path(), "bf16", 5);
        assert!(!succeeds, "{mistake}, and nothing found it");
        println!("{mistake}: {}", report.lines().last().unwrap_or_default());
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(mutant) = MUTANTS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    check(*mutant);
                }
            });
        }
    });
}

#[test]
fn ptx_is_up_to_date() {
    if tools().is_none() {
        return;
    }
    let device = read(&kernels().join("device.cuh"));
    let source = read(&kernels().join("product.cu")).replace("#include \"device.cuh\"", &device);
    for dtype in DTYPES {
        let mut options = vec!["--gpu-architecture=compute_90a", "--std=c++17"];
        if dtype == "f16" {
            options.push("-DTYPE_F16");
        }
        let options = cudarc::nvrtc::CompileOptions {
            options: options.into_iter().map(String::from).collect(),
            ..Default::default()
        };
        let ptx = cudarc::nvrtc::compile_ptx_with_opts(&source, options);
        let ptx = ptx.unwrap_or_else(|error| panic!("{error}")).to_src();
        // As `compile.py` does, for drivers from CUDA 12.5 on.
        let ptx = ptx.replace(".version 9.0", ".version 8.5");
        let release = ptx.lines().find(|line| line.contains("release ")).unwrap_or_default();
        if !release.contains("release 13.0,") {
            excused(format!("NVRTC 13.0, which writes the committed PTX; found `{release}`"));
            return;
        }
        let committed = read(&kernels().join(format!("hopper_{dtype}.ptx")));
        assert!(code(&ptx) == code(&committed), "hopper_{dtype}.ptx is old; run compile.py");
    }
}

#[test]
fn machine_code_is_as_planned() {
    let Some(tools) = tools() else { return };
    let disassembler = tools.join("bin/nvdisasm");
    for dtype in DTYPES {
        let folder = temporary_folder();
        let cubin = folder.path().join("hopper.cubin");
        let mut assembler = Command::new(tools.join("bin/ptxas"));
        assembler.args(["-v", "-arch=sm_90a", "-o"]).arg(&cubin);
        let (succeeds, report) = run(assembler.arg(kernels().join(format!("hopper_{dtype}.ptx"))));
        println!("{dtype}\n{report}");
        assert!(succeeds, "{report}");
        // ptxas reports serialized matrix instructions as a loss of performance.
        for words in ["warning", "Performance Loss", "serialized"] {
            assert!(!report.contains(words), "{report}");
        }
        for name in PRODUCTS.into_iter().chain(["plus_identity"]) {
            let start = format!("Compiling entry function '{name}'");
            let (_, entry) = report.split_once(&start).unwrap_or_else(|| panic!("{name}"));
            let entry = entry.split("Compiling entry function").next().unwrap_or_default();
            for words in [" bytes stack frame", " bytes spill stores", " bytes spill loads"] {
                assert_eq!(number_before(entry, words), 0, "{name}: {entry}");
            }
            assert!(number_before(entry, " registers") <= MAX_REGISTERS, "{name}: {entry}");
        }
        if !disassembler.exists() {
            excused("nvdisasm; machine code is not disassembled");
            continue;
        }
        let (succeeds, code) = run(Command::new(&disassembler).arg("-c").arg(&cubin));
        assert!(succeeds, "{code}");
        let count = |instruction| code.matches(instruction).count();
        // Four matrix instructions for each slice.
        assert!(count(" HGMMA.64x128x16.F32") >= 4 * PRODUCTS.len(), "matrix instructions");
        assert_eq!(count(" LDL") + count(" STL"), 0, "accesses of local memory");
    }
}
