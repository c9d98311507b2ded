//! The host's side of Hopper's kernels, without a GPU: modules, tensor maps, launches, recordings,
//! and their order with other work, on a stand-in for CUDA's driver that computes the kernels from
//! the parameters of their launches (`driver/`).

#![cfg(feature = "cuda")]

mod checks;
#[allow(dead_code)] // the benches need all of it
#[path = "../driver/mod.rs"]
mod driver;
mod order;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use distmuon_kernels::native;
use distmuon_skips::skip;

/// Mistakes in files of `src/native`: their descriptions, the file, the text that each replaces,
/// and its replacement.
const MUTANTS: [(&str, &str, &str, &str); 39] = [
    (
        "boxes are on their sides",
        "ptx_module.rs",
        "let in_box = [width, height, 1]",
        "let in_box = [height, width, 1]",
    ),
    ("matrices lie within each other", "ptx_module.rs", "[2 * x, 2 * x * y]", "[2 * x, 2 * x]"),
    (
        "lines are taken for columns",
        "ptx_module.rs",
        "[x, y, batch as u64]",
        "[y, x, batch as u64]",
    ),
    ("a tensor has one matrix", "ptx_module.rs", "[x, y, batch as u64]", "[x, y, 1]"),
    ("a box has several matrices", "ptx_module.rs", "[width, height, 1]", "[width, height, 2]"),
    (
        "boxes are not swizzled as the kernels expect",
        "ptx_module.rs",
        "CU_TENSOR_MAP_SWIZZLE_128B",
        "CU_TENSOR_MAP_SWIZZLE_64B",
    ),
    (
        "what is out of bounds is NaN",
        "ptx_module.rs",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
        "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA",
    ),
    (
        "tensors have the other type",
        "ptx_module.rs",
        "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
        "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    ),
    (
        "the kernels of the other type are loaded",
        "ptx_module.rs",
        "Element::F16 => include_str!(\"kernels/hopper_f16.ptx\")",
        "Element::F16 => include_str!(\"kernels/hopper_bf16.ptx\")",
    ),
    (
        "kernels may not have their shared memory",
        "ptx_module.rs",
        "set(*product, most, MAX_SHARED_BYTES)?;",
        "let _ = most;",
    ),
    (
        "kernels may have more shared memory than there is",
        "ptx_module.rs",
        "227 << 10",
        "228 << 10",
    ),
    ("A and B are exchanged", "ptx_module.rs", "[a?, b?, d?, c?]", "[b?, a?, d?, c?]"),
    ("C and D are exchanged", "ptx_module.rs", "[a?, b?, d?, c?]", "[a?, b?, c?, d?]"),
    (
        "n and k are exchanged",
        "ptx_module.rs",
        "let [m, n, k] = product.sizes.map",
        "let [m, k, n] = product.sizes.map",
    ),
    ("products are not scaled", "ptx_module.rs", "alpha: product.alpha", "alpha: 1.0"),
    ("D is not scaled", "ptx_module.rs", "map_or(0.0, |(_, beta)| beta)", "map_or(0.0, |_| 1.0)"),
    ("D is not added", "ptx_module.rs", "addend: product.addend.is_some().into()", "addend: 0"),
    (
        "all of a symmetric result is announced",
        "ptx_module.rs",
        "lower: product.lower.into()",
        "lower: 0",
    ),
    (
        "the kernel knows of one block in a cluster",
        "ptx_module.rs",
        "cluster: grid.shape.cluster as c_int",
        "cluster: 1",
    ),
    (
        "the driver knows of one block in a cluster",
        "ptx_module.rs",
        "{ x: self.cluster, y: 1, z: 1 }",
        "{ x: 1, y: 1, z: 1 }",
    ),
    (
        "tasks lack the parts",
        "ptx_module.rs",
        "(grid.whole + grid.slots()) as c_int",
        "grid.whole as c_int",
    ),
    (
        "each cut tile has one part",
        "ptx_module.rs",
        "slots: grid.slots() as c_int",
        "slots: grid.cut as c_int",
    ),
    (
        "a launch has half of its blocks",
        "ptx_module.rs",
        "(sizes.clusters * sizes.cluster) as u32",
        "sizes.clusters as u32",
    ),
    (
        "a launch has no shared memory",
        "ptx_module.rs",
        "sharedMemBytes: self.shared",
        "sharedMemBytes: 0",
    ),
    (
        "a launch lacks the warp that copies",
        "ptx_module.rs",
        "threads: THREADS, shared",
        "threads: 256, shared",
    ),
    (
        "sums and counters are exchanged",
        "ptx_module.rs",
        "parameter(&scratch[0]), parameter(&scratch[1])",
        "parameter(&scratch[1]), parameter(&scratch[0])",
    ),
    (
        "there are too few counters",
        "ptx_module.rs",
        "multiprocessors * size_of::<u32>()",
        "size_of::<u32>()",
    ),
    (
        "wide tiles are computed by the kernels of narrow ones",
        "ptx_module.rs",
        "[shape.width_index()]",
        "[0]",
    ),
    (
        "the identity is not added to the last elements",
        "ptx_module.rs",
        ".div_ceil(threads * neighbours)",
        " / (threads * neighbours)",
    ),
    (
        "the identity is added to one matrix",
        "ptx_module.rs",
        "[of_matrix as u32, sum.batch as u32]",
        "[of_matrix as u32, 1]",
    ),
    ("the boxes of B are those of whole tiles", "tile_choice.rs", "shape.width / 2", "shape.width"),
    (
        "the boxes of D are those of C",
        "tile_choice.rs",
        "result(d, HEIGHT as u32)",
        "result(d, PANEL)",
    ),
    (
        "tiles on the diagonal are left out",
        "tile_choice.rs",
        "((row + 1) * self.height())",
        "(row * self.height())",
    ),
    ("the first launch overlaps with a copy", "engine.rs", "index > 0", "true"),
    (
        "an iteration does not wait for other work",
        "engine.rs",
        "self.stream.wait_for(ready)",
        "self.stream.make_current()",
    ),
    (
        "other work does not wait for an iteration",
        "engine.rs",
        ".and_then(|event| event.make_context_wait())",
        ".map(|_| true)",
    ),
    (
        "kernels are first launched in a recording",
        "cuda_graphs.rs",
        "        queue(&addresses)?;\n",
        "",
    ),
    ("a recording returns its input", "cuda_graphs.rs", "[0, self.result].map", "[0, 0].map"),
    (
        "a recording copies a half",
        "cuda_graphs.rs",
        "bytes: work.bytes[0]",
        "bytes: work.bytes[0] / 2",
    ),
];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver")
}

#[test]
fn native_kernels_run_on_the_stand_in() {
    on_the_stand_in("native_kernels_run_on_the_stand_in", checks::run);
}

#[test]
fn kernels_that_wait_for_ever_are_left_out() {
    let test = "kernels_that_wait_for_ever_are_left_out";
    on_the_stand_in(test, checks::run_with_stalled_kernels);
}

#[test]
fn distmuon_native_off_refuses_the_kernels() {
    on_the_stand_in("distmuon_native_off_refuses_the_kernels", || {
        set_switch("off");
        let Err(refusal) = native::Native::of(0, native::Element::F16) else { panic!("they run") };
        assert_eq!(refusal.to_string(), "DISTMUON_NATIVE is off");
    });
}

#[test]
fn distmuon_native_must_ends_a_program_whose_kernels_are_refused() {
    on_the_stand_in("distmuon_native_must_ends_a_program_whose_kernels_are_refused", || {
        set_switch("must");
        // Kept, since the driver is unloaded, and forgets it, when nothing else has it.
        let stand_in = driver::StandIn::loaded();
        stand_in.stall("product");
        let opened = std::panic::catch_unwind(|| native::Native::of(0, native::Element::F16));
        let Err(panic) = opened else { panic!("the program goes on") };
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(message.contains("required by DISTMUON_NATIVE=must, but refused"), "{message}");
    });
}

#[test]
fn a_refusal_repeats_the_log_of_the_drivers_compiler() {
    on_the_stand_in("a_refusal_repeats_the_log_of_the_drivers_compiler", || {
        let reason = "ptxas fatal : Unsupported .version 9.0; current version is '8.0'";
        let stand_in = driver::StandIn::loaded();
        stand_in.refuse_modules(reason);
        let Err(refusal) = native::Native::of(0, native::Element::F16) else { panic!("they run") };
        let refusal = refusal.to_string();
        assert!(refusal.contains("compile the kernels") && refusal.ends_with(reason), "{refusal}");
    });
}

#[test]
fn a_driver_before_cuda_12_5_does_not_run_the_kernels() {
    on_the_stand_in("a_driver_before_cuda_12_5_does_not_run_the_kernels", || {
        let stand_in = driver::StandIn::loaded();
        for (version, runs) in [(12_040, false), (12_050, true)] {
            stand_in.set_version(version);
            // An element each: a process decides once for each of them.
            let element = if runs { native::Element::Bf16 } else { native::Element::F16 };
            let reason = native::Native::of(0, element).err().map(|refusal| refusal.to_string());
            let expected = (!runs).then_some("the driver is older than CUDA 12.5");
            assert_eq!(reason.as_deref(), expected);
        }
    });
}

/// Sets `DISTMUON_NATIVE` for this process, which reads it once.
fn set_switch(value: &str) {
    // SAFETY: the process has this test alone, and no other thread that reads the environment.
    unsafe { std::env::set_var("DISTMUON_NATIVE", value) };
}

fn on_the_stand_in(test: &str, body: impl FnOnce()) {
    if let Err(missing) = driver::run(test, &sources(), body) {
        skip(missing);
    }
}

/// Each mutant is a program of the module `native` and the checks, which needs few packages: those
/// that this program was built with.
#[test]
fn mutants_are_found() {
    let folder = tempfile::tempdir().expect("a folder for temporary files exists");
    let program = |name: &str, mutant: Option<&(&str, &str, &str, &str)>| -> Result<_, String> {
        let folder = folder.path().join(name);
        copy(&folder);
        if let Some((mistake, file, text, replacement)) = mutant {
            let file = folder.join("native").join(file);
            let source = fs::read_to_string(&file).expect("the source was copied");
            assert_eq!(source.matches(text).count(), 1, "{mistake}: occurrences of `{text}`");
            fs::write(file, source.replace(text, replacement)).expect("the copy is writable");
        }
        let program = compiled(&folder)?;
        let mut command = driver::command(&program, &sources())?;
        let output = command.output().expect("the program starts");
        let report = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok((output.status.success(), report))
    };
    match program("original", None) {
        Ok((succeeds, report)) => assert!(succeeds, "{report}"),
        Err(missing) => return skip(missing),
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(mutant) = MUTANTS.get(number) else { break };
                    let result = program(&format!("mutant_{number}"), Some(mutant));
                    let (succeeds, report) = result.expect("the original was compiled");
                    let (mistake, ..) = mutant;
                    assert!(!succeeds, "{mistake}, and nothing found it");
                    // A refusal of the stand-in, or else the message of the panic.
                    let refusal = report.lines().find(|line| line.contains("stand-in for libcuda"));
                    let mut panic = report.lines().skip_while(|line| !line.contains("panicked"));
                    println!("{mistake}: {}", refusal.or(panic.nth(1)).unwrap_or(&report));
                }
            });
        }
    });
}

/// Copies the sources of a mutant to a folder.
fn copy(folder: &Path) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (to, from) in [
        ("native", "src/native"),
        ("native/kernels", "src/native/kernels"),
        ("driver", "tests/driver"),
        (".", "tests/host"),
    ] {
        let to = folder.join(to);
        fs::create_dir_all(&to).expect("the folder for temporary files is writable");
        let files = package.join(from).read_dir().expect("a folder of this package");
        for file in files {
            let file = file.expect("the folder is readable").path();
            let name = file.file_name().expect("a file has a name");
            if file.is_file() {
                fs::copy(&file, to.join(name)).expect("the folder is writable");
            }
        }
    }
}

/// Compiles the program of a mutant, or returns the reason why that is not possible.
fn compiled(folder: &Path) -> Result<PathBuf, String> {
    let program = folder.join("mutant");
    let own = std::env::args_os().next().expect("a program has a name");
    let packages = Path::new(&own).parent().expect("the program is in a folder");
    let mut compiler = Command::new("rustc");
    compiler.args(["--edition=2024", "-Copt-level=1", "--cap-lints=allow", "-o"]).arg(&program);
    compiler.arg("-L").arg(format!("dependency={}", packages.display()));
    for name in ["cudarc", "half", "libloading", "tempfile", "thiserror"] {
        let package = newest(packages, name)?;
        compiler.arg("--extern").arg(format!("{name}={}", package.display()));
    }
    let Ok(output) = compiler.arg(folder.join("mutant.rs")).output() else {
        return Err("rustc, which compiles mutants".to_owned());
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(program)
}

/// The library of a package that was compiled last.
fn newest(folder: &Path, name: &str) -> Result<PathBuf, String> {
    let begin = format!("lib{name}-");
    let files = folder.read_dir().expect("the folder of this program is readable");
    let files = files.map(|file| file.expect("the folder is readable").path());
    let libraries = files.filter(|file| {
        let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(&begin) && name.ends_with(".rlib")
    });
    let time = |file: &PathBuf| file.metadata().and_then(|data| data.modified()).ok();
    libraries.max_by_key(time).ok_or_else(|| format!("the compiled package {name}"))
}
