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
use std::time::Instant;

use distmuon_skips::excused;

/// The ends of the names of the products.
const LAYOUTS: [&str; 3] = ["kk", "km", "mm"];

/// Registers that allow the planned number of blocks of 288 threads on a multiprocessor, by the
/// columns of their tiles: the 9 warps of a block share four partitions of 16,384 registers. Of the
/// second generation, each block has a multiprocessor of its own.
fn max_registers(product: &str) -> [(&'static str, usize); 2] {
    [("128", if product == "product" { 96 } else { 168 }), ("256", 168)]
}

/// The files with PTX, the definitions that each is compiled with, and the beginning of its
/// products' names.
const FILES: [(&str, &[&str], &str); 4] = [
    ("hopper_bf16", &["-DONLY_GENERATION=1"], "product"),
    ("hopper_f16", &["-DONLY_GENERATION=1", "-DTYPE_F16"], "product"),
    ("hopper2_bf16", &["-DONLY_GENERATION=2"], "product2"),
    ("hopper2_f16", &["-DONLY_GENERATION=2", "-DTYPE_F16"], "product2"),
];

/// Mistakes in `product.cu` that the checks of the first generation find: their descriptions, the
/// text that each replaces, and its replacement.
const MUTANTS: [(&str, &str, &str); 73] = [
    (
        "a stage is overwritten before it has been multiplied",
        "return use(entry) == 0 || wait",
        "return use(entry) <= 1 || wait",
    ),
    (
        "slices are multiplied before they arrive",
        "        block.wait_until_full(entry);\n        char *a",
        "        char *a",
    ),
    ("a stage is released while it is in use", "multiply_wait<1>(sums);", ""),
    (
        "sums are used before they are complete",
        "    multiply_wait<0>(sums);\n    block.release(entry - 1);\n}",
        "    block.release(entry - 1);\n}",
    ),
    ("matrix instructions have no fence", "multiply_fence(sums);", ""),
    ("matrix instructions are not committed", "multiply_commit();", ""),
    (
        "the copy engine stores stale memory",
        "wrote before its fence.\n        fence_async();",
        "wrote before its fence.",
    ),
    (
        "the fence comes after the meeting",
        "fence_async();\n        sync_group(group);",
        "sync_group(group);\n        fence_async();",
    ),
    (
        "a panel is stored before all threads have written it",
        "fence_async();\n        sync_group(group);",
        "fence_async();",
    ),
    (
        "a buffer is overwritten before it is stored",
        "if (thread == 0) store_wait_read<BUFFERS - 1>();",
        "",
    ),
    (
        "a buffer is overwritten while the older of two stores reads it",
        "BUFFERS - 1>();",
        "BUFFERS>();",
    ),
    (
        "a buffer is overwritten before all threads know that it is stored",
        "BUFFERS - 1>();\n        sync_group(group);",
        "BUFFERS - 1>();",
    ),
    (
        "a panel on the diagonal is written before its mirror image is complete",
        "        sync_group(store.group);\n",
        "",
    ),
    ("a block ends before its stores", "if (stores.thread == 0 && !TURNS) store_finish();", ""),
    ("chunks are not swizzled", "((column / 8) ^ (row % 8)) * 16", "column / 8 * 16"),
    ("steps through an MN-major operand are too short", "A_MN ? STEP * 128", "A_MN ? STEP * 64"),
    (
        "panels of an MN-major operand are too close",
        "B_LEADING = B_MN ? PANEL_BYTES",
        "B_LEADING = B_MN ? 4096",
    ),
    (
        "a block's place in its cluster is taken for the layout of an operand",
        "(address(p) & 0x3ffff)",
        "address(p)",
    ),
    (
        "the diagonal is left to the mirror image's rows",
        "if (row >= column) {",
        "if (row > column + 1) {",
    ),
    ("entries above the diagonal are those of the tile", "if (row >= column) {", "{"),
    (
        "squares above the diagonal are those of the tile",
        "column < row || s < warp",
        "column < row || s != warp",
    ),
    ("panels above the diagonal are stored", "if (lower && column > row) return;", ""),
    (
        "a mirror image is stored in the wrong place",
        "store.end(c, column, row, matrix);",
        "store.end(c, row, column, matrix);",
    ),
    ("a mirror image is not transposed", "    if (MIRROR) {", "    if (false) {"),
    (
        "D overwrites a slice in use",
        "++entry) {\n        if (!block.wait_until_empty(entry)) return;\n        Barrier",
        "++entry) {\n        Barrier",
    ),
    (
        "D is used before it arrives",
        "if (i % (D_WIDTH / 8) == 0 && !block.wait_until_full(entry)) beta = NOT_A_NUMBER;",
        "",
    ),
    ("D is overwritten while other threads of a warp read it", "        sync_warp();\n", ""),
    (
        "fewer bytes are expected than arrive",
        "barrier_expect(full, T::STAGE_BYTES)",
        "barrier_expect(full, A_BYTES)",
    ),
    (
        "barriers are used before they are initialized",
        "    sync_cluster();\n    wait_for_launch_before();",
        "    wait_for_launch_before();",
    ),
    (
        "a block ends while the other one of its cluster writes to it",
        "    }\n    sync_cluster();\n}",
        "    }\n}",
    ),
    (
        "a stage is empty as soon as one block of the cluster has released it",
        "CONSUMERS / 32 * block.cluster",
        "CONSUMERS / 32",
    ),
    (
        "all threads of a warp release a stage",
        "if (other < cluster) barrier_arrive",
        "barrier_arrive",
    ),
    (
        "only this block is told that a stage is empty",
        "barrier_arrive(empty(entry), other)",
        "barrier_arrive(empty(entry), rank)",
    ),
    (
        "both blocks of a cluster load the same half of B",
        "for (int half = block.rank;",
        "for (int half = 0;",
    ),
    ("a block keeps its half of B", "task.matrix, all);", "task.matrix, own);"),
    (
        "A is written to both blocks of a cluster",
        "task.row, task.matrix, own);\n        for",
        "task.row, task.matrix, all);\n        for",
    ),
    ("halves of B have the same columns", "task.column + half * HALF", "task.column"),
    (
        "both blocks of a cluster compute the same rows",
        "(task.row * block.cluster + block.rank) * HEIGHT",
        "task.row * block.cluster * HEIGHT",
    ),
    (
        "a launch does not wait for the one before it",
        "wait_for_launch_before();\n    let_next_launch_begin();\n\n",
        "",
    ),
    (
        "a sum with the identity does not wait for the launch before it",
        "wait_for_launch_before();\n    let_next_launch_begin();\n    const",
        "let_next_launch_begin();\n    const",
    ),
    (
        "all clusters compute the first matrix",
        "task.matrix = tile / sizes.tiles",
        "task.matrix = 0",
    ),
    (
        "a cluster computes one tile only",
        "i < sizes.tasks; i += sizes.clusters) {\n            float sums",
        "i < sizes.clusters; i += sizes.clusters) {\n            float sums",
    ),
    ("the stages of a second tile begin anew", "int task, u32 &entry", "int task, u32 entry"),
    (
        "D takes no stage of the consumers",
        "bool has_addend, u32 &entry",
        "bool has_addend, u32 entry",
    ),
    ("a tile is computed twice", "if (tile < end - row) {", "if (tile <= end - row) {"),
    (
        "a column has tiles above the first that it reaches",
        "row = column * (T::WIDTH / HEIGHT) >> halvings;",
        "row = first;",
    ),
    ("the last row of tiles is left out", "+ halvings) >> halvings", ") >> halvings"),
    (
        "the sums of a part are not published",
        "thread_fence();\n    sync_consumers();\n    bool is_last",
        "sync_consumers();\n    bool is_last",
    ),
    (
        "the sums of other parts are not acquired",
        "return false;\n    thread_fence();",
        "return false;",
    ),
    (
        "a part is counted before all of its threads have stored their sums",
        "sync_consumers();\n    bool is_last",
        "bool is_last",
    ),
    ("a counter is not reset", "if (is_last) store_global(count, 0u);", ""),
    ("every part resets its counter", "if (is_last) store_global", "store_global"),
    (
        "every warp counts a part",
        "is_last = false;\n    if (thread == 0)",
        "is_last = false;\n    if (thread % 32 == 0)",
    ),
    (
        "all cut tiles have the same counter",
        "arrived + task.slot / task.parts * block.cluster + block.rank",
        "arrived + block.rank",
    ),
    (
        "the blocks of a cluster have the same counter",
        "task.slot / task.parts * block.cluster + block.rank",
        "task.slot / task.parts * block.cluster",
    ),
    ("the first part to arrive stores the tile", "== (u32)task.parts - 1", "== 0"),
    (
        "every part stores the tile",
        "if (!sync_consumers_or(is_last)) return false;",
        "sync_consumers_or(is_last);",
    ),
    ("one part is left out", "other < task.parts; ++other", "other < task.parts - 1; ++other"),
    ("all cut tiles have the same sums", "(task.slot - task.part) * stride", "0"),
    (
        "tiles with the same part share a slot",
        "first + task.slot * stride",
        "first + task.part * stride",
    ),
    (
        "the blocks of a cluster share a slot",
        "partials + block.rank * (HEIGHT * T::WIDTH) + thread",
        "partials + thread",
    ),
    (
        "the order of the sums depends on the last part",
        "sums[i] = load_global(part + i * CONSUMERS);\n    for (int other = 1; \
         other < task.parts; ++other) {\n        part += stride;",
        "sums[i] += 0.0f;\n    for (int other = 0; other < task.parts; ++other, \
         part += stride) {\n        if (part == own) continue;",
    ),
    ("every part adds D", "return sizes.addend && task.part == 0;", "return sizes.addend;"),
    ("parts overlap", "/ DEPTH * part / parts", "/ DEPTH / parts * part"),
    (
        "parts multiply the same slices",
        "slice = task.first; slice < task.first + task.slices",
        "slice = 0; slice < task.slices",
    ),
    (
        "a wait is never given up",
        "if ((int)(now() - start) > (int)patience) store_shared(surrender(), 1u);",
        "",
    ),
    ("a wait is given up too early", "if (start == 0) start = now() | 1;", ""),
    ("a block begins without patience", "        store_shared(block.surrender(), 0u);\n", ""),
    (
        "sums of slices that did not arrive are stored",
        "block.has_given_up() ? NOT_A_NUMBER : sizes.alpha",
        "sizes.alpha",
    ),
    (
        "a D that did not arrive is added",
        " && !block.wait_until_full(entry)) beta = NOT_A_NUMBER;",
        ") block.wait_until_full(entry);",
    ),
    (
        "slices are copied after a wait that was given up",
        "if (!block.wait_until_empty(entry)) return;\n        char *to",
        "block.wait_until_empty(entry);\n        char *to",
    ),
    (
        "D is copied after a wait that was given up",
        "if (!block.wait_until_empty(entry)) return;\n        Barrier *full",
        "block.wait_until_empty(entry);\n        Barrier *full",
    ),
    ("the identity has two ones in a row", "one == 2 * p + 1", "one == 2 * p"),
];

/// The same for the second generation.
const MUTANTS2: [(&str, &str, &str); 46] = [
    ("a warpgroup does not wait for its turn", "            take_turn<MULTIPLY>();\n", ""),
    (
        "a warpgroup leaves more slices than there are stages",
        "STAGES - (sizes.addend",
        "STAGES + 1 - (sizes.addend",
    ),
    (
        "a warpgroup does not leave its last slices",
        "max(slices - slices_left<T>(sizes), 0)",
        "max(slices - slices_left<T>(sizes) + 1, 0)",
    ),
    (
        "a warpgroup with few slices takes no turn",
        "max(slices - slices_left<T>(sizes), 0)",
        "slices - slices_left<T>(sizes)",
    ),
    ("both warpgroups wait for a turn", "half == 1 ? max", "half >= 0 ? max"),
    (
        "a warpgroup that waits for its turn keeps a stage",
        "            if (slice > 0) block.release(entry - 1);\n            take",
        "            take",
    ),
    (
        "a stage is released in use before a turn",
        "            multiply_wait<0>(sums);\n            if (slice > 0)",
        "            if (slice > 0)",
    ),
    ("a stage is released twice", "if (slice > 0 && !is_turn)", "if (slice > 0)"),
    (
        "a turn is given before the one before it is answered",
        "if (task != CLUSTER) take_turn<NEXT>();",
        "",
    ),
    ("the first task waits for an answer", "if (task != CLUSTER) take", "take"),
    (
        "an answer comes after the last task",
        "if (group == 1 && i + sizes.clusters < sizes.tasks) give",
        "if (group == 1) give",
    ),
    (
        "both turns are given at once",
        "give_turn<MULTIPLY>();\n    }",
        "give_turn<MULTIPLY>();\n        give_turn<STORE>();\n    }",
    ),
    ("a warpgroup stores before its turn", "if (TURNS && group == 1) take_turn<STORE>();", ""),
    (
        "buffers are given before they are read",
        "                if (stores.thread == 0) store_wait_read<0>();\n",
        "",
    ),
    (
        "the oldest of the buffers in turn is not read",
        "store_wait_read<BUFFERS - 2>()",
        "store_wait_read<BUFFERS - 1>()",
    ),
    (
        "buffers in turn are not waited for",
        "        if (IN_TURN && thread == 0) store_wait_read<BUFFERS - 2>();\n",
        "",
    ),
    (
        "panels overwrite the buffers of the other warpgroup",
        "            sync_consumers();\n            Store",
        "            Store",
    ),
    (
        "panels of both warpgroups share buffers",
        "{own_buffers, group, opaque",
        "{buffers, group, opaque",
    ),
    (
        "panels are added before all parts are stored",
        "== (u32)(groups * sizes.parts)) {",
        "<= (u32)(groups * sizes.parts)) {",
    ),
    (
        "sums for panels are not published",
        "    thread_fence();\n    sync_group(thread / 128);",
        "    sync_group(thread / 128);",
    ),
    (
        "a part counts as stored before all threads have stored their sums",
        "    sync_group(thread / 128);\n    if (thread",
        "    if (thread",
    ),
    (
        "sums for panels are not acquired",
        "        thread_fence();\n        const int p =",
        "        const int p =",
    ),
    (
        "the next panel is told before all threads have read the last one",
        "        // Before the word is written again.\n        sync_group(stores.group);\n",
        "",
    ),
    (
        "a panel is read before it is told",
        "        sync_group(stores.group);\n        const int next",
        "        const int next",
    ),
    (
        "a panel is taken twice",
        "atomic_add(counters.taken(tile), 1)",
        "atomic_add(counters.taken(tile), 0)",
    ),
    (
        "counters are not reset",
        "    for (int i = 0; i <= 2 * cut; ++i) store_global(counters.arrived + i, 0u);\n",
        "",
    ),
    ("the count of warpgroups is not reset", "i <= 2 * cut; ++i", "i < 2 * cut; ++i"),
    (
        "the first warpgroup resets the counters",
        "(u32)(sizes.clusters * groups - 1)) return",
        "0u) return",
    ),
    ("every thread counts as a warpgroup", "    if (stores.thread > 0) return;\n", ""),
    (
        "a warpgroup leaves its tile to others",
        "CLUSTER < sizes.slots ? CLUSTER / sizes.parts : CLUSTER % cut",
        "CLUSTER % cut",
    ),
    ("panels lack a part", "other < sizes.parts; ++other", "other < sizes.parts - 1; ++other"),
    ("panels have the sums of one block", "stride + rank * (HEIGHT * T::WIDTH)", "stride"),
    ("panels have the sums of one warpgroup", "group * 128 + stores.thread", "stores.thread"),
    ("all panels of a warpgroup have the same sums", "p * (PANEL / 2) * CONSUMERS", "0"),
    ("all cut tiles have the same panels", "tile * sizes.parts * stride", "0"),
    (
        "panels are stored in one place",
        "task.column + p * PANEL, task.matrix, c,\n                    sizes.lower",
        "task.column, task.matrix, c,\n                    sizes.lower",
    ),
    (
        "panels of both blocks have the same rows",
        "nullptr, sizes.cluster, rank, 0}",
        "nullptr, sizes.cluster, 0, 0}",
    ),
    ("every warp counts as a warpgroup", "if (thread % 128 == 0) {", "if (thread % 32 == 0) {"),
    (
        "parts of several tiles share their sums",
        "(u64)task.slot * block.cluster + block.rank",
        "(u64)task.part * block.cluster + block.rank",
    ),
    (
        "parts of both blocks share their sums",
        "task.slot * block.cluster + block.rank) * (HEIGHT",
        "task.slot * block.cluster) * (HEIGHT",
    ),
    ("all cut tiles count as one", "counters.stored(task.slot / task.parts)", "counters.stored(0)"),
    (
        "a block ends while the other one releases its stages",
        "            block.wait_until_empty(entry + s);\n",
        "",
    ),
    (
        "a block ends while the other one releases its last stage",
        "s < T::STAGES && thread",
        "s < T::STAGES - 1 && thread",
    ),
    (
        "a block ends before its panels are read",
        "            if (own.thread == 0) store_wait_read<0>();\n",
        "",
    ),
    (
        "blocks that give up do not meet",
        "if (GENERATION > 1 && sizes.patience == 0) {",
        "if (GENERATION > 1) {",
    ),
    (
        "panels add parts in another order",
        "        for (int other = 1; other < sizes.parts; ++other) {\n            part += stride;",
        "        part += sizes.parts * stride;\n        for (int other = 1; \
         other < sizes.parts; ++other) {\n            part -= stride;",
    ),
];

/// The least time of each check of a mutant, in seconds.
const MUTANT_SECONDS: u32 = 5;

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

/// Compiles the kernels of a folder for the emulator, with definitions, and runs their checks, each
/// within a number of seconds.
fn emulate(folder: &Path, definitions: &[&str], seconds: u32) -> (bool, String) {
    let build = temporary_folder();
    let program = build.path().join("emulate");
    let mut compiler = Command::new("g++");
    compiler.args(["-std=c++17", "-O1", "-DEMULATE"]).args(definitions);
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

/// Returns the number of fences of the whole device from a matrix instruction to the release of its
/// stage: there, each would take longer than the instruction.
fn fences_among_instructions(code: &str) -> usize {
    let mut is_multiplying = false;
    let mut fences = 0;
    for line in code.lines() {
        is_multiplying |= line.contains(" HGMMA");
        is_multiplying &= !line.contains("SYNCS.ARRIVE");
        fences += usize::from(is_multiplying && line.contains("MEMBAR"));
    }
    fences
}

/// The emulator compares integers, which all types of elements represent, with loops in float64.
#[test]
fn emulated_kernels_are_exact() {
    if !has_compiler() {
        return;
    }
    let definitions: [&[&str]; 2] = [&[], &["-DTYPE_F16"]];
    for definitions in definitions {
        let (succeeds, report) = emulate(&kernels(), definitions, 60);
        println!("{definitions:?}\n{report}");
        assert!(succeeds, "{definitions:?}: {report}");
    }
}

#[test]
fn mutants_are_found() {
    if !has_compiler() {
        return;
    }
    let source = read(&kernels().join("product.cu"));
    let begin = Instant::now();
    let (succeeds, report) = emulate(&kernels(), &["-DONLY_GENERATION=2"], 60);
    assert!(succeeds, "{report}");
    // A mistake that hangs is given what all checks of a generation take, so that a slow machine
    // finds nothing else.
    let seconds = MUTANT_SECONDS.max(begin.elapsed().as_secs() as u32);
    let next = AtomicUsize::new(0);
    let check = |generation: &str, (mistake, text, replacement): (&str, &str, &str)| {
        assert_eq!(source.matches(text).count(), 1, "{mistake}: occurrences of `{text}`");
        let folder = temporary_folder();
        for name in ["emulator.hpp", "emulate.cpp"] {
            fs::copy(kernels().join(name), folder.path().join(name))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        fs::write(folder.path().join("product.cu"), source.replace(text, replacement))
            .expect("the folder for temporary files is writable");
        // The kernels of the other generation would take time to compile.
        let (succeeds, report) = emulate(folder.path(), &[generation], seconds);
        assert!(!succeeds, "{mistake}, and nothing found it");
        println!("{mistake}: {}", report.lines().last().unwrap_or_default());
    };
    let first = MUTANTS.map(|mutant| ("-DONLY_GENERATION=1", mutant));
    let second = MUTANTS2.map(|mutant| ("-DONLY_GENERATION=2", mutant));
    let mutants: Vec<_> = first.into_iter().chain(second).collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((generation, mutant)) =
                    mutants.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    check(generation, *mutant);
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
    for (name, definitions, _) in FILES {
        let options = ["--gpu-architecture=compute_90a", "--std=c++17"];
        let options = options.iter().chain(definitions).copied();
        let options = cudarc::nvrtc::CompileOptions {
            options: options.map(String::from).collect(),
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
        let committed = read(&kernels().join(format!("{name}.ptx")));
        assert!(code(&ptx) == code(&committed), "{name}.ptx is old; run compile.py");
    }
}

#[test]
fn machine_code_is_as_planned() {
    let Some(tools) = tools() else { return };
    let disassembler = tools.join("bin/nvdisasm");
    for (file, _, product) in FILES {
        let folder = temporary_folder();
        let cubin = folder.path().join("hopper.cubin");
        let mut assembler = Command::new(tools.join("bin/ptxas"));
        assembler.args(["-v", "-arch=sm_90a", "-o"]).arg(&cubin);
        let (succeeds, report) = run(assembler.arg(kernels().join(format!("{file}.ptx"))));
        println!("{file}\n{report}");
        assert!(succeeds, "{report}");
        // ptxas reports serialized matrix instructions as a loss of performance.
        for words in ["warning", "Performance Loss", "serialized"] {
            assert!(!report.contains(words), "{report}");
        }
        let of_width = max_registers(product);
        let products = of_width.iter().flat_map(|(width, most)| {
            LAYOUTS.map(|layout| (format!("{product}_{width}_{layout}"), *most))
        });
        let sum = (product == "product").then(|| ("plus_identity".to_owned(), of_width[0].1));
        for (name, most) in products.chain(sum) {
            let start = format!("Compiling entry function '{name}'");
            let (_, entry) = report.split_once(&start).unwrap_or_else(|| panic!("{name}"));
            let entry = entry.split("Compiling entry function").next().unwrap_or_default();
            for words in [" bytes stack frame", " bytes spill stores", " bytes spill loads"] {
                assert_eq!(number_before(entry, words), 0, "{name}: {entry}");
            }
            assert!(number_before(entry, " registers") <= most, "{name}: {entry}");
        }
        if !disassembler.exists() {
            excused("nvdisasm; machine code is not disassembled");
            continue;
        }
        let (succeeds, code) = run(Command::new(&disassembler).arg("-c").arg(&cubin));
        assert!(succeeds, "{code}");
        let count = |instruction: &str| code.matches(instruction).count();
        // Four matrix instructions for each slice, in every layout.
        for (width, _) in of_width {
            let instructions = count(&format!(" HGMMA.64x{width}x16.F32"));
            assert!(instructions >= 4 * LAYOUTS.len(), "{width}: {instructions}");
        }
        // Parts of tiles are published by fences.
        assert!(count(" MEMBAR") > 0, "fences");
        assert_eq!(fences_among_instructions(&code), 0, "fences between matrix instructions");
        assert_eq!(count(" LDL") + count(" STL"), 0, "accesses of local memory");
    }
}
