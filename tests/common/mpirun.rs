//! Ranks that are processes of Open MPI.

use std::process::Command;

use super::skip;

/// Open MPI asks twice before it runs as root, as containers do.
pub const ROOT: [(&str, &str); 2] =
    [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];

/// Whether there is the mpirun whose arguments the tests know.
pub fn is_there() -> bool {
    let version = Command::new("mpirun").arg("--version").output();
    let found =
        version.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("Open MPI"));
    if !found {
        skip("there is no mpirun of Open MPI");
    }
    found
}

/// Starts processes on this host, as many as asked for on any number of cores.
pub fn mpirun(processes: usize) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--oversubscribe", "--bind-to", "none", "-n", &processes.to_string()]);
    mpirun.envs(ROOT).env("RAYON_NUM_THREADS", "1");
    mpirun
}
