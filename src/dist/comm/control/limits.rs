//! Limits of the operating system on rank 0's connections.

use std::net::TcpListener;

/// File descriptors of rank 0 besides those of the other ranks: for files, libraries, devices, and
/// processes that are no members.
pub const RESERVE: usize = 32;
/// Connections that may wait to be accepted: all ranks connect at once.
#[cfg(unix)]
const BACKLOG: i32 = 4096;

/// Raises the limit on file descriptors as far as this process may, and returns it.
#[cfg(unix)]
pub fn descriptors() -> Option<usize> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limits = getrlimit(Resource::Nofile);
    limits.current = limits.maximum;
    if setrlimit(Resource::Nofile, limits).is_err() {
        limits = getrlimit(Resource::Nofile);
    }
    limits.current.map(|limit| limit as usize)
}

/// Lets as many connections wait as the operating system allows.
#[cfg(unix)]
pub fn deepen(listener: &TcpListener) {
    // Best effort: connections that do not fit are tried again.
    rustix::net::listen(listener, BACKLOG).ok();
}

/// There is no such limit.
#[cfg(not(unix))]
pub fn descriptors() -> Option<usize> {
    None
}

/// The standard library's number of waiting connections stays.
#[cfg(not(unix))]
pub fn deepen(_listener: &TcpListener) {}
