//! Ranks that are processes of Open MPI.

use std::process::Command;

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
