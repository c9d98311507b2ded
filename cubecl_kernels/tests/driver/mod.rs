//! The stand-in for CUDA's driver of this folder, in processes of tests. A process loads its driver
//! once, so a test that needs the stand-in runs again in a process of its own.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_long, c_uint};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::slice;
use std::sync::{Mutex, MutexGuard, OnceLock};

use tempfile::TempDir;

/// The variable that processes on the stand-in have.
const IS_CHILD: &str = "DISTMUON_TEST_STAND_IN";

/// Returns the folder with the compiled `libcuda.so.1`, or the reason why there is none. `sources`
/// is the folder of this file.
fn compiled(sources: &Path) -> Result<&'static Path, String> {
    static FOLDER: OnceLock<Result<TempDir, String>> = OnceLock::new();
    let compile = || {
        let Ok(files) = sources.read_dir() else {
            return Err("the sources of the stand-in for CUDA's driver".to_owned());
        };
        let files = files.map(|file| file.map(|file| file.path()));
        let files: Vec<PathBuf> = files.collect::<Result<_, _>>().expect("the folder is readable");
        let folder = tempfile::tempdir().expect("a folder for temporary files exists");
        let mut compiler = Command::new("g++");
        compiler.args(["-std=c++17", "-O3", "-march=native", "-fvisibility=hidden"]);
        compiler.args(["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fPIC", "-shared"]);
        compiler.arg("-o").arg(folder.path().join("libcuda.so.1"));
        compiler.args(files.iter().filter(|file| file.extension().is_some_and(|e| e == "cpp")));
        let Ok(output) = compiler.output() else {
            return Err("g++, which compiles the stand-in for CUDA's driver".to_owned());
        };
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{report}");
        Ok(folder)
    };
    FOLDER.get_or_init(compile).as_ref().map(TempDir::path).map_err(Clone::clone)
}

/// Returns a command whose process finds the stand-in, or the reason why there is none.
pub fn command(program: &Path, sources: &Path) -> Result<Command, String> {
    let folder = compiled(sources)?;
    let mut path = OsString::from(folder);
    if let Some(others) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(others);
    }
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", path).env(IS_CHILD, "1");
    Ok(command)
}

/// Runs the body of a test of this program in a process that finds the stand-in. Returns the reason
/// if there is none.
///
/// # Panics
///
/// If the body does.
pub fn run(test: &str, sources: &Path, body: impl FnOnce()) -> Result<(), String> {
    if std::env::var_os(IS_CHILD).is_some() {
        body();
        return Ok(());
    }
    // Not the current executable, which may be a loader that was given this program.
    let program = std::env::args_os().next().expect("a program has a name");
    let mut child = command(Path::new(&program), sources)?;
    let output = child.args(["--exact", test, "--show-output"]).output();
    let output = output.expect("a test starts again");
    let report = [output.stdout, output.stderr].concat();
    let report = String::from_utf8_lossy(&report);
    println!("{report}");
    assert!(output.status.success() && report.contains("1 passed"), "{test}: {report}");
    Ok(())
}

/// The arguments of a launch.
#[derive(Clone, Debug)]
pub struct Arguments {
    pub kernel: String,
    /// Blocks in all dimensions.
    pub grid: [u32; 3],
    /// The bytes of every parameter.
    pub parameters: Vec<Vec<u8>>,
}

type Observer =
    unsafe extern "C" fn(*const c_char, *const [u32; 3], c_uint, *const *const u8, *const usize);

fn observed_launches() -> MutexGuard<'static, Vec<Arguments>> {
    static LAUNCHES: Mutex<Vec<Arguments>> = Mutex::new(vec![]);
    LAUNCHES.lock().expect("no holder of the lock panics")
}

/// Keeps the arguments of a launch.
///
/// # Safety
///
/// The name is a C string, the grid is there, and so are `count` parameters of the sizes.
unsafe extern "C" fn observe_launch(
    name: *const c_char,
    grid: *const [u32; 3],
    count: c_uint,
    parameters: *const *const u8,
    sizes: *const usize,
) {
    // SAFETY: the caller's.
    let (name, grid) = unsafe { (CStr::from_ptr(name), *grid) };
    let kernel = name.to_string_lossy().into_owned();
    let parameter = |index: usize| {
        // SAFETY: the caller's.
        unsafe { slice::from_raw_parts(*parameters.add(index), *sizes.add(index)) }.to_vec()
    };
    let parameters = (0..count as usize).map(parameter).collect();
    observed_launches().push(Arguments { kernel, grid, parameters });
}

/// The functions of the stand-in that order and count the work of this process.
pub struct StandIn(libloading::Library);

impl StandIn {
    /// Returns those of the driver that this process has loaded.
    pub fn loaded() -> Self {
        // SAFETY: the stand-in has no initialisers that this process has not run already.
        Self(unsafe { libloading::Library::new("libcuda.so.1") }.expect("the driver is loaded"))
    }

    /// Lets operations run only in [`step`](Self::step), and when the host waits for them.
    pub fn hold(&self, is_held: bool) {
        // SAFETY: the function has this type.
        let hold = unsafe { self.0.get::<extern "C" fn(c_int) -> c_int>(b"standin_hold") };
        assert_eq!(hold.expect("a function of the stand-in")(is_held.into()), 0);
    }

    /// Runs one of the operations that can run, by a random number. Returns `false` if none can.
    pub fn step(&self, seed: u32) -> bool {
        // SAFETY: as above.
        let step = unsafe { self.0.get::<extern "C" fn(c_uint) -> c_int>(b"standin_step") };
        step.expect("a function of the stand-in")(seed) == 0
    }

    /// Makes the products whose names begin with a text wait for ever.
    pub fn stall(&self, begin: &str) {
        type Stall = extern "C" fn(*const c_char) -> c_int;
        // SAFETY: as above.
        let stall = unsafe { self.0.get::<Stall>(b"standin_stall") };
        let begin = CString::new(begin).expect("a name is text");
        assert_eq!(stall.expect("a function of the stand-in")(begin.as_ptr()), 0);
    }

    /// Refuses all modules from now on, for a reason that the driver's compiler writes to its log.
    pub fn refuse_modules(&self, reason: &str) {
        type Refuse = extern "C" fn(*const c_char) -> c_int;
        // SAFETY: as above.
        let refuse = unsafe { self.0.get::<Refuse>(b"standin_refuse_modules") };
        let reason = CString::new(reason).expect("a reason is text");
        assert_eq!(refuse.expect("a function of the stand-in")(reason.as_ptr()), 0);
    }

    /// Sets the version of CUDA that the driver has from now on: 12040 is 12.4.
    pub fn set_version(&self, version: i32) {
        // SAFETY: as above.
        let set = unsafe { self.0.get::<extern "C" fn(c_int) -> c_int>(b"standin_set_version") };
        assert_eq!(set.expect("a function of the stand-in")(version), 0);
    }

    /// Adds a number to each value that streams wait for from now on.
    pub fn fault_values(&self, fault: i32) {
        // SAFETY: as above.
        let set = unsafe { self.0.get::<extern "C" fn(c_int) -> c_int>(b"standin_value_fault") };
        assert_eq!(set.expect("a function of the stand-in")(fault), 0);
    }

    /// Lets products and copies within the device do nothing, or do their work again.
    pub fn idle(&self, is_idle: bool) {
        // SAFETY: as above.
        let idle = unsafe { self.0.get::<extern "C" fn(c_int) -> c_int>(b"standin_idle") };
        assert_eq!(idle.expect("a function of the stand-in")(is_idle.into()), 0);
    }

    /// Returns the bytes of the copies from the device to the device that have run.
    pub fn copied(&self) -> usize {
        let mut bytes = 0;
        // SAFETY: as above.
        let copied =
            unsafe { self.0.get::<extern "C" fn(*mut c_long) -> c_int>(b"standin_copied") };
        assert_eq!(copied.expect("a function of the stand-in")(&mut bytes), 0);
        bytes.try_into().expect("a count")
    }

    /// Returns the number of calls of the driver's functions whose names begin with a text.
    pub fn calls(&self, begin: &str) -> usize {
        self.count(b"standin_calls", begin)
    }

    /// Returns the number of launches that ran, of kernels whose names begin with a text.
    pub fn launches(&self, begin: &str) -> usize {
        self.count(b"standin_count", begin)
    }

    /// Runs a function that ends with a wait for the device, and returns the launches that ran.
    pub fn observed<T>(&self, run: impl FnOnce() -> T) -> (T, Vec<Arguments>) {
        type Observe = extern "C" fn(Option<Observer>) -> c_int;
        // SAFETY: as above.
        let observe = unsafe { self.0.get::<Observe>(b"standin_observe") };
        let observe = observe.expect("a function of the stand-in");
        assert_eq!(observe(Some(observe_launch)), 0);
        let result = run();
        assert_eq!(observe(None), 0);
        (result, std::mem::take(&mut *observed_launches()))
    }

    fn count(&self, function: &[u8], begin: &str) -> usize {
        type Count = extern "C" fn(*const c_char, *mut c_long) -> c_int;
        // SAFETY: as above.
        let function = unsafe { self.0.get::<Count>(function) };
        let (begin, mut count) = (CString::new(begin).expect("a name is text"), 0);
        let function = function.expect("a function of the stand-in");
        assert_eq!(function(begin.as_ptr(), &mut count), 0);
        count.try_into().expect("a count")
    }
}
