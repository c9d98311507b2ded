//! The search for NCCL's library, and the functions of it that are used.
//!
//! Names, types and meanings are from `nccl.h` (<https://docs.nvidia.com/deeplearning/nccl>),
//! the constants from `cudarc`. The library is loaded here, since `cudarc` looks for
//! `libnccl.so` only, which neither Debian's packages nor PyTorch's wheels install without the
//! development files.

use std::error::Error as _;
use std::ffi::{CStr, OsStr, OsString};
use std::os::raw::{c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::{env, fs};

use cudarc::nccl::sys::{ncclComm_t, ncclResult_t, ncclUniqueId};

use crate::error::{Error, Result};

pub const ENGINE: &str = "nccl";
/// The first version with `ncclCommSplit`.
const MIN_VERSION: c_int = 21_800;
/// The file names of NCCL, and of its development files.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
const INSTALL: &str = "install NCCL 2.18 or later (`pip install nvidia-nccl-cu12`, or NVIDIA's \
                       packages), and set DISTMUON_NCCL_PATH to the folder of libnccl.so.2";

/// The configuration of a communicator as of NCCL 2.14. Later versions use defaults for the fields
/// that they have added.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

impl Config {
    /// Returns a configuration in which calls return at once, and are polled later.
    pub fn nonblocking() -> Self {
        // The magic number is from `NCCL_CONFIG_INITIALIZER` in `nccl.h`. The version is 2.14.0.
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 }
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal($($argument:ty),*) -> $result:ty),* $(,)?) => {
        /// The functions that the engine calls.
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// The file of the library.
            pub path: PathBuf,
            _library: libloading::Library,
        }

        impl Library {
            fn symbols(
                library: libloading::Library,
                path: PathBuf,
            ) -> Result<Self, libloading::Error> {
                // SAFETY: the types are from NCCL's header, and the library lives as long as
                // the functions.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!($symbol, "\0").as_bytes())?,)*
                        path,
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    get_version: "ncclGetVersion"(*mut c_int) -> c_int,
    get_unique_id: "ncclGetUniqueId"(*mut ncclUniqueId) -> c_int,
    init_rank: "ncclCommInitRankConfig"(
        *mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config
    ) -> c_int,
    split: "ncclCommSplit"(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut Config) -> c_int,
    finalize: "ncclCommFinalize"(ncclComm_t) -> c_int,
    destroy: "ncclCommDestroy"(ncclComm_t) -> c_int,
    abort: "ncclCommAbort"(ncclComm_t) -> c_int,
    async_error: "ncclCommGetAsyncError"(ncclComm_t, *mut c_int) -> c_int,
    error_string: "ncclGetErrorString"(c_int) -> *const c_char,
    last_error: "ncclGetLastError"(ncclComm_t) -> *const c_char,
    group_start: "ncclGroupStart"() -> c_int,
    group_end: "ncclGroupEnd"() -> c_int,
    all_reduce: "ncclAllReduce"(
        *const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, *mut c_void
    ) -> c_int,
    reduce_scatter: "ncclReduceScatter"(
        *const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, *mut c_void
    ) -> c_int,
    all_gather: "ncclAllGather"(
        *const c_void, *mut c_void, usize, c_int, ncclComm_t, *mut c_void
    ) -> c_int,
    broadcast: "ncclBroadcast"(
        *const c_void, *mut c_void, usize, c_int, c_int, ncclComm_t, *mut c_void
    ) -> c_int,
    send: "ncclSend"(*const c_void, usize, c_int, c_int, ncclComm_t, *mut c_void) -> c_int,
    receive: "ncclRecv"(*mut c_void, usize, c_int, c_int, ncclComm_t, *mut c_void) -> c_int,
}

impl Library {
    /// Loads NCCL from `DISTMUON_NCCL_PATH`, from the system's library folders, or from a PyTorch
    /// wheel.
    ///
    /// # Errors
    ///
    /// [`Error::Engine`] with all files that were tried, or with the version if it is too old.
    pub fn load(rank: usize) -> Result<Self> {
        let failed = |operation: &str, reason| Error::Engine {
            engine: ENGINE,
            rank,
            operation: operation.to_owned(),
            reason,
            remedy: INSTALL,
        };
        let mut tried = Vec::new();
        for path in candidates(|name| env::var_os(name)) {
            // SAFETY: a library with NCCL's name is assumed to be NCCL.
            let loaded = unsafe { libloading::Library::new(&path) };
            match loaded.and_then(|library| Self::symbols(library, path.clone())) {
                Ok(library) => {
                    let version = library.version();
                    if version < MIN_VERSION {
                        let got = dotted(version);
                        let reason = format!("expected 2.18 or later, got NCCL {got}: {path:?}");
                        return Err(failed("NCCL is too old", reason));
                    }
                    return Ok(library);
                }
                Err(error) => {
                    let cause =
                        error.source().map_or_else(|| error.to_string(), |cause| cause.to_string());
                    tried.push(format!("{}: {cause}", path.display()));
                }
            }
        }
        Err(failed("NCCL was not found", tried.join("; ")))
    }

    /// Returns the version as NCCL encodes it: 22903 is 2.29.3.
    pub fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: the function writes one number.
        unsafe { (self.get_version)(&mut version) };
        version
    }

    /// Returns NCCL's texts for a code and for its last error.
    pub fn error_text(&self, code: c_int, comm: ncclComm_t) -> String {
        // SAFETY: both return text that NCCL owns, or null.
        let texts = unsafe { [(self.error_string)(code), (self.last_error)(comm)] };
        let texts = texts.into_iter().filter(|text| !text.is_null()).map(|text| {
            // SAFETY: the text ends with a zero, and is copied before the next call.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        });
        let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
        format!("{} (code {code})", texts.join(": "))
    }
}

/// Returns `true` if a code means success, or a call in progress without an error so far.
pub fn is_ok_so_far(code: c_int) -> bool {
    code == ncclResult_t::ncclSuccess as c_int || code == ncclResult_t::ncclInProgress as c_int
}

/// Returns a version in the dotted form, as in 2.29.3.
pub fn dotted(version: c_int) -> String {
    // Up to 2.8, the major version is counted in thousands.
    let (major, rest) = if version < 10_000 {
        (version / 1000, version % 1000)
    } else {
        (version / 10_000, version % 10_000)
    };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// Returns the files that may be NCCL, in the order in which they are tried. `variable` is the
/// value of an environment variable.
fn candidates(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
    let in_folder = variable("DISTMUON_NCCL_PATH")
        .map(PathBuf::from)
        .into_iter()
        .flat_map(|folder| NAMES.map(|name| folder.join(name)));
    // A bare name is looked up by the dynamic linker.
    let bare_names = NAMES.map(PathBuf::from);
    in_folder.chain(bare_names).chain(wheels(prefixes(variable))).collect()
}

/// Returns the folders of Python environments that may contain NCCL: those named by variables, that
/// of the `python3` on the PATH (for which an image need not set a variable), the user's, and the
/// system's.
fn prefixes(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(&variable);
    let on_path = variable("PATH").and_then(|path| prefix_of_python(&path));
    let home = variable("HOME").map(|home| Path::new(&home).join(".local"));
    let system = ["/usr/local".into(), "/usr".into()];
    active.map(PathBuf::from).chain(on_path).chain(home).chain(system).collect()
}

/// Returns the environment of the first `python3` in these folders. The `python3` of a virtual
/// environment is a link to a file outside the environment, and is not followed.
fn prefix_of_python(path: &OsStr) -> Option<PathBuf> {
    let folder = env::split_paths(path).find(|folder| folder.join("python3").is_file())?;
    folder.parent().map(Path::to_owned)
}

/// Returns the files of NCCL that Python packages have installed in these environments.
fn wheels(prefixes: Vec<PathBuf>) -> Vec<PathBuf> {
    let pythons = prefixes
        .into_iter()
        .flat_map(|prefix| fs::read_dir(prefix.join("lib")).into_iter().flatten())
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"));
    let packages = pythons
        .flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.path().join(name)));
    packages
        .map(|folder| folder.join("nvidia/nccl/lib").join(NAMES[0]))
        .filter(|library| library.exists())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_versions_have_a_dotted_form() {
        assert_eq!(dotted(22_903), "2.29.3");
        assert_eq!(dotted(2_708), "2.7.8");
    }

    /// The order of the guide.
    #[cfg(unix)]
    #[test]
    fn a_folder_comes_before_the_system_and_the_system_before_wheels() {
        let root = tempfile::tempdir().unwrap();
        let environment = |name: &str| root.path().join(name);
        let wheel = |environment: PathBuf| {
            environment.join("lib/python3.12/site-packages/nvidia/nccl/lib").join(NAMES[0])
        };
        let environments = ["venv", "conda", "python", "home/.local"].map(environment);
        for folder in &environments {
            let library = wheel(folder.clone());
            fs::create_dir_all(library.parent().unwrap()).unwrap();
            fs::write(library, "").unwrap();
        }
        let [venv, conda, python, _] = &environments;
        fs::create_dir_all(python.join("bin")).unwrap();
        fs::write(python.join("bin/python3"), "").unwrap();
        let variables = [
            ("DISTMUON_NCCL_PATH", environment("nccl")),
            ("VIRTUAL_ENV", venv.clone()),
            ("CONDA_PREFIX", conda.clone()),
            ("PATH", python.join("bin")),
            ("HOME", environment("home")),
        ];
        let find = |unset: &str| {
            candidates(|name| {
                let value = variables.iter().find(|(variable, _)| *variable == name);
                value.filter(|_| name != unset).map(|(_, value)| value.clone().into_os_string())
            })
        };
        let system = NAMES.map(PathBuf::from);
        let folder = NAMES.map(|name| environment("nccl").join(name));
        let wheels = environments.clone().map(wheel);
        let all = [&folder[..], &system, &wheels].concat();
        // Wheels of this machine's own Python may follow.
        assert_eq!(find("")[..all.len()], all);
        assert_eq!(find("DISTMUON_NCCL_PATH")[..2], system);
        let without_venv = find("VIRTUAL_ENV");
        assert_eq!(without_venv[4..7], wheels[1..]);
    }

    #[cfg(unix)]
    #[test]
    fn nccl_in_the_environment_of_the_python_on_the_path_is_found() {
        let root = tempfile::tempdir().unwrap();
        let [system, venv] = ["system", "venv"].map(|name| root.path().join(name));
        let packages = venv.join("lib/python3.12/site-packages/nvidia/nccl/lib");
        for folder in [&packages, &venv.join("bin"), &system.join("bin")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::write(system.join("bin/python3"), "").unwrap();
        std::os::unix::fs::symlink(system.join("bin/python3"), venv.join("bin/python3")).unwrap();
        let library = packages.join(NAMES[0]);
        fs::write(&library, "").unwrap();
        let path = env::join_paths([root.path(), &venv.join("bin"), &system.join("bin")]).unwrap();
        let prefix = prefix_of_python(&path).expect("the PATH has a folder with a python3");
        assert_eq!(prefix, venv);
        assert_eq!(wheels(vec![system, prefix]), [library]);
    }
}
