//! Ranks that are processes of Open MPI.

use std::fs;
use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use distmuon_skips::skip;

/// The variables without which Open MPI does not run as root, the user of most containers.
pub const ROOT: [(&str, &str); 2] =
    [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];

/// Returns `true` if there is an mpirun of Open MPI, whose arguments the tests know, and otherwise
/// reports a skipped test.
pub fn is_there() -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    let is_open_mpi =
        version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("Open MPI"));
    if !is_open_mpi {
        skip("there is no mpirun of Open MPI");
    }
    is_open_mpi
}

/// Returns a command that starts a number of processes on this host, on any number of cores.
pub fn mpirun(processes: usize) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &processes.to_string()]);
    mpirun.envs(ROOT).env("RAYON_NUM_THREADS", "1");
    mpirun
}

/// The time that mpirun may take to end after the last of its ranks.
const GRACE: Duration = Duration::from_secs(10);

/// The runs after which a test gives up.
const RUNS: usize = 3;

/// Runs mpirun to its end, and runs it again if it hangs at its end: Open MPI 4.1 may deadlock in
/// `PMIx_server_finalize`, after all ranks have ended.
pub fn output(mut mpirun: Command) -> io::Result<Output> {
    mpirun.stdout(Stdio::piped()).stderr(Stdio::piped());
    output_of(|| mpirun.spawn())
}

/// As [`output`], of a process that `start` starts, with pipes for what it writes.
pub fn output_of(mut start: impl FnMut() -> io::Result<Child>) -> io::Result<Output> {
    for _ in 0..RUNS {
        let mut mpirun = start()?;
        let [stdout, stderr] = [
            read(mpirun.stdout.take().expect("a pipe")),
            read(mpirun.stderr.take().expect("a pipe")),
        ];
        let status = wait(&mut mpirun)?;
        let [stdout, stderr] = [stdout, stderr].map(|text| text.join().expect("no reader panics"));
        match status {
            Some(status) => return Ok(Output { status, stdout, stderr }),
            None => println!("mpirun hung after its ranks had ended: it is run again"),
        }
    }
    Err(io::Error::other(format!("mpirun hung in {RUNS} runs")))
}

/// Waits for the end of mpirun. If it hangs after all of its ranks have ended, it is killed, and
/// the result is `None`.
pub fn wait(mpirun: &mut Child) -> io::Result<Option<ExitStatus>> {
    let (mut has_ranks, mut last_rank) = (false, Instant::now());
    loop {
        if let Some(status) = mpirun.try_wait()? {
            return Ok(Some(status));
        }
        if has_children(mpirun.id()) {
            (has_ranks, last_rank) = (true, Instant::now());
        } else if has_ranks && last_rank.elapsed() > GRACE {
            mpirun.kill()?;
            mpirun.wait()?;
            return Ok(None);
        }
        // Seldom, since every look reads the states of all processes.
        thread::sleep(Duration::from_millis(100));
    }
}

/// Returns `true` if a process has children that have not ended. Without Linux's `/proc` it is
/// taken to have some.
fn has_children(parent: u32) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else { return true };
    // The fields after the name in parentheses: the state, then the parent.
    let is_child = |stat: String| {
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        fields.next().is_some_and(|state| state != "Z")
            && fields.next() == Some(&parent.to_string())
    };
    let mut stats = processes
        .flatten()
        .filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    stats.any(is_child)
}

/// Reads everything that a process writes, on a thread.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut text = vec![];
        pipe.read_to_end(&mut text).expect("a pipe can be read");
        text
    })
}
