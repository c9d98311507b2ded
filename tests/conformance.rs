//! Golden trajectories: every case of `tests/conformance/` and of the folder that
//! `DISTMUON_CONFORMANCE_DIR` names, with the folders in it, is run on the default device, through
//! a whole-module optimizer, and compared with its reference. The format is described in
//! `tests/conformance/README.md`.
//!
//! A case that can't be expressed fails. With `DISTMUON_WRITE_CASES` set, the crate's own cases are
//! written anew from their float64 reference.

mod cases;

use std::path::{Path, PathBuf};

use cases::Case;
use distmuon_testing::{empty_operations, excused, lacks};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    libtest_mimic::run(&Arguments::from_args(), trials()).exit();
}

/// A trial for every case.
pub fn trials() -> Vec<Trial> {
    let folder = own_cases();
    if std::env::var_os("DISTMUON_WRITE_CASES").is_some() {
        cases::write_own(&folder);
    }
    let mut trials = vec![Trial::test("the crate's own cases follow their float64 reference", {
        let folder = folder.clone();
        move || cases::check_own(&folder).map_err(Failed::from)
    })];
    let further = std::env::var_os("DISTMUON_CONFORMANCE_DIR").map(PathBuf::from);
    if further.is_none() {
        trials.push(Trial::test("trajectories of other implementations", || {
            excused("no trajectories of other implementations: set DISTMUON_CONFORMANCE_DIR");
            Ok(())
        }));
    }
    for folder in [Some(folder), further].into_iter().flatten() {
        for path in files(&folder) {
            let name = path.strip_prefix(&folder).expect("a file of the folder").with_extension("");
            let name = name.to_string_lossy().into_owned();
            trials.push(Trial::test(name.clone(), move || run(&name, &path)));
        }
    }
    trials
}

/// Returns the folder of the crate's cases: in the working folder of `benches/gpu.sh`, or in the
/// sources that this program was built from.
fn own_cases() -> PathBuf {
    let working_folder = Path::new("tests/conformance");
    let sources = || Path::new(env!("CARGO_MANIFEST_DIR")).join("conformance");
    if working_folder.exists() { working_folder.into() } else { sources() }
}

/// The cases of a folder and of the folders in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("conformance folder {}: {error}", folder.display()));
    let mut entries: Vec<PathBuf> =
        entries.map(|entry| entry.expect("a readable folder").path()).collect();
    entries.sort();
    let is_case = |path: &Path| path.extension().is_some_and(|end| end == "safetensors");
    let cases = entries.into_iter().flat_map(|path| match path.is_dir() {
        true => files(&path),
        false => Some(path).filter(|path| is_case(path)).into_iter().collect(),
    });
    cases.collect()
}

fn run(name: &str, path: &Path) -> Result<(), Failed> {
    let case = Case::read(path)?;
    if let Some(dtype) = case.missing() {
        lacks(format!("{dtype:?}, which {name} needs"));
        return Ok(());
    }
    let error = empty_operations::ensure_none(|| case.run())?;
    println!("{name}: error {error:.2e}, tolerance {:.0e}", case.tolerance());
    if error <= case.tolerance() {
        Ok(())
    } else {
        Err(format!("error {error:.2e} exceeds tolerance {:.0e}", case.tolerance()).into())
    }
}
