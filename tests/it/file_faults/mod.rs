//! Saves of a process that is killed before any one of its changes of files, or for which any one
//! of them fails as on a full disk: a library between the process and libc counts them.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use distmuon::checkpoint::{self, Saver};
use distmuon::{DistModuleOptimizer, DistMuonConfig, Error, Result, World};
use distmuon_testing::models::{self, Fixed};
use distmuon_testing::skip;
use tempfile::TempDir;

/// The folder of a child process, and what it saves into it.
const FOLDER: &str = "DISTMUON_TEST_FOLDER";
const FORM: &str = "DISTMUON_TEST_WORKER";
const TEST: &str = "file_faults::a_save_that_ends_at_any_change_of_files_leaves_a_checkpoint";

/// A way to save the steps of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    /// One file, which each save replaces.
    File,
    /// The same by a thread that nobody waits for.
    Background,
    /// A file for each step, of which the last is kept.
    Kept,
    /// A folder to which two ranks write.
    Parts,
}

const FORMS: [Form; 4] = [Form::File, Form::Background, Form::Kept, Form::Parts];

impl Form {
    fn ranks(self) -> usize {
        if self == Self::Parts { 2 } else { 1 }
    }

    /// The path of the checkpoint of a step.
    fn path(self, folder: &Path, step: u64) -> PathBuf {
        match self {
            Self::File | Self::Background => folder.join("run.bpk"),
            Self::Kept => folder.join(format!("run-{step}.bpk")),
            Self::Parts => folder.join("run"),
        }
    }

    fn save(
        self,
        world: &World,
        path: &Path,
        net: &Linear,
        optim: &DistModuleOptimizer,
        step: u64,
    ) -> Result<()> {
        let mut saver = match self {
            Self::File => return optim.save(path, net, &step),
            Self::Background => Saver::new(),
            Self::Kept => Saver::new().with_keep_last(1),
            Self::Parts => Saver::new().with_parts(),
        };
        saver.save(path, net, optim, &step)?;
        let saved = saver.wait();
        // The ranks agree on the outcome, so that all of them try again or none.
        world.agree(saved)
    }

    /// The complete checkpoint with the highest step.
    fn latest(self, folder: &Path) -> PathBuf {
        match self {
            Self::Kept => checkpoint::latest(self.path(folder, 0))
                .unwrap()
                .expect("the folder has a checkpoint"),
            _ => self.path(folder, 0),
        }
    }
}

fn start(world: &World) -> Result<(Linear, DistModuleOptimizer)> {
    let net: Linear = LinearConfig::new(7, 9).init(world.device()).map(&mut Fixed::new(3));
    let optim = DistMuonConfig::new().with_small_elements(1).init(world, &net)?;
    Ok((net, optim))
}

/// Continues from the latest checkpoint of a folder by one step, and saves it. After a failure, it
/// tries again.
fn continue_and_save(form: Form, folder: &Path) -> Result<()> {
    let ranks = World::threads(World::devices(form.ranks()), |world| {
        let (net, optim) = start(&world)?;
        let (net, mut optim, step): (_, _, u64) = optim.load(form.latest(folder), net)?;
        let net = optim.step(0.01, net.clone(), models::gradients(&net, step))?;
        let path = form.path(folder, step + 1);
        match form.save(&world, &path, &net, &optim, step + 1) {
            Err(error @ (Error::Checkpoint { .. } | Error::PeerFailed { .. })) => {
                eprintln!("failed: {error}");
                form.save(&world, &path, &net, &optim, step + 1)
            }
            outcome => outcome,
        }
    });
    ranks.map(drop)
}

/// The step and the weights of the latest checkpoint of a folder.
fn saved(form: Form, folder: &Path) -> Result<(u64, Vec<u8>)> {
    let world = World::alone(Device::default().autodiff());
    let (net, optim) = start(&world)?;
    let (net, _, step) = optim.load(form.latest(folder), net)?;
    Ok((step, models::weights(&net).concat()))
}

/// The library, or what is missing for it.
fn library() -> Result<&'static Path, &'static str> {
    static BUILT: OnceLock<Option<TempDir>> = OnceLock::new();
    let build = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("it/file_faults/faults.c");
        let folder = tempfile::tempdir().expect("a folder");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(folder.path().join("faults.so"));
        let output = compiler.arg(source).arg("-ldl").output().ok()?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(folder)
    };
    BUILT.get_or_init(build).as_ref().map(TempDir::path).ok_or("cc, which compiles the faults")
}

/// The outcome of a process that continues a run.
struct Outcome {
    is_killed: bool,
    text: String,
}

fn run(form: Form, folder: &Path, fault: Option<(&str, usize)>) -> Outcome {
    let library = library().expect("the library is built").join("faults.so");
    // Not the current executable, which may be a loader that was given this program.
    let mut child = Command::new(std::env::args_os().next().expect("a program has a name"));
    child.args([TEST, "--exact", "--nocapture"]);
    child.env("LD_PRELOAD", library).env(FOLDER, folder).env(FORM, format!("{form:?}"));
    if let Some((variable, change)) = fault {
        child.env(variable, change.to_string());
    }
    let output = child.output().expect("a test starts again");
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let is_killed = output.status.signal() == Some(9);
    assert!(is_killed || output.status.success(), "{form:?}, {fault:?}: {text}");
    Outcome { is_killed, text }
}

#[test]
fn a_save_that_ends_at_any_change_of_files_leaves_a_checkpoint() {
    if let (Some(folder), Ok(name)) = (std::env::var_os(FOLDER), std::env::var(FORM)) {
        let form = FORMS.into_iter().find(|form| format!("{form:?}") == name).expect("a form");
        return continue_and_save(form, Path::new(&folder)).unwrap();
    }
    if let Err(missing) = library() {
        return skip(missing);
    }
    for form in FORMS {
        let at_start = tempfile::tempdir().unwrap();
        let world = World::threads(World::devices(form.ranks()), |world| {
            let (net, optim) = start(&world)?;
            form.save(&world, &form.path(at_start.path(), 1), &net, &optim, 1)
        });
        world.unwrap();
        let begin = || {
            let folder = tempfile::tempdir().unwrap();
            copy(at_start.path(), folder.path());
            folder
        };
        let before = saved(form, at_start.path()).unwrap();
        let folder = begin();
        let whole = run(form, folder.path(), None);
        let after = saved(form, folder.path()).unwrap();
        assert_eq!((before.0, after.0), (1, 2), "{form:?}");
        let (_, count) =
            whole.text.rsplit_once("changes of files: ").expect("the library prints the number");
        let changes: usize = count.split_whitespace().next().unwrap().parse().unwrap();
        assert!(changes > 3, "{form:?}: {changes}");
        let mut kept = 0;
        for change in 1..=changes {
            let folder = begin();
            let outcome = run(form, folder.path(), Some(("DISTMUON_TEST_KILLED_AT", change)));
            assert!(outcome.is_killed, "{form:?}, change {change}: {}", outcome.text);
            let left = saved(form, folder.path());
            let left = left.unwrap_or_else(|error| panic!("{form:?}, killed at {change}: {error}"));
            assert!(left == before || left == after, "{form:?}, killed at {change}");
            kept += usize::from(left == before);
            // The next run goes on, whatever was left besides.
            run(form, folder.path(), None);
            assert_eq!(saved(form, folder.path()).unwrap().0, left.0 + 1, "{form:?}, {change}");
        }
        let mut failed = 0;
        for change in 1..=changes {
            let folder = begin();
            let outcome = run(form, folder.path(), Some(("DISTMUON_TEST_FAILS_AT", change)));
            failed += usize::from(outcome.text.contains("failed: "));
            let left = saved(form, folder.path()).unwrap();
            assert!(left == after, "{form:?}, failed at {change}: {}", outcome.text);
        }
        println!("{form:?}: {changes} changes, {kept} kills leave the old one, {failed} fail");
        assert!(kept > 0 && failed > 0, "{form:?}: {kept} and {failed} of {changes}");
    }
}

/// Copies all files of a folder.
fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(std::result::Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => {
                fs::create_dir(&target).unwrap();
                copy(&entry.path(), &target);
            }
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}
