//! Reports of tests and benches that cannot run on this machine.
//!
//! A report is a line that begins with `skipped:`. Under `DISTMUON_MUST_RUN=1` a test that is
//! skipped fails. This file is also a module of the unit tests of `distmuon` and of
//! `distmuon-kernels`.

use std::env;
use std::fmt::Display;

/// Reports a test that does not run.
///
/// # Panics
///
/// Under `DISTMUON_MUST_RUN=1`, which says that every test has to run.
pub fn skip(reason: impl Display) {
    excused(&reason);
    let must_run = env::var("DISTMUON_MUST_RUN").is_ok_and(|value| value == "1");
    assert!(!must_run, "a skip under DISTMUON_MUST_RUN=1: {reason}; install what is missing");
}

/// Reports a property that the device does not have: [`skip`] on CUDA, which has all that the tests
/// use, and [`excused`] on software devices.
pub fn lacks(what: impl Display) {
    let reason = format!("the device does not have {what}");
    if is_on_cuda() { skip(reason) } else { excused(reason) }
}

/// Returns `true` if Burn's default device is that of CUDA.
pub fn is_on_cuda() -> bool {
    env::var("BURN_DEVICE").is_ok_and(|device| device.eq_ignore_ascii_case("cuda"))
}

/// Reports a test that does not run for a reason that no installation changes, and never fails. The
/// callers are the allow list of `DISTMUON_MUST_RUN`: two ranks on one device, tests about other
/// devices or systems, and files that are not part of the repository.
pub fn excused(reason: impl Display) {
    println!("skipped: {reason}");
}
