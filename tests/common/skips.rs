//! Tests and benches that can't run here: reported, counted, and failures where everything has to run.

#![allow(dead_code)] // every target uses its own part

use std::env;
use std::fmt::Display;

/// Reports what does not run; fails where `DISTMUON_MUST_RUN=1` says that everything has to.
pub fn skip(reason: impl Display) {
    excused(&reason);
    let must_run = env::var("DISTMUON_MUST_RUN").is_ok_and(|value| value == "1");
    assert!(!must_run, "a skip under DISTMUON_MUST_RUN=1: {reason}; install what is missing");
}

/// Reports what a device does not have by its own properties. A skip on CUDA, which has everything that tests
/// ask for; excused on devices in software.
pub fn lacks(what: impl Display) {
    let reason = format!("the device does not have {what}");
    if is_on_cuda() { skip(reason) } else { excused(reason) }
}

/// Returns `true` if Burn's default device is that of CUDA.
pub fn is_on_cuda() -> bool {
    env::var("BURN_DEVICE").is_ok_and(|device| device.eq_ignore_ascii_case("cuda"))
}

/// Reports what does not run for a reason that no installation changes, and never fails. The callers are the
/// allow list of `DISTMUON_MUST_RUN`: two ranks on one device, and what is about other devices or other systems.
pub fn excused(reason: impl Display) {
    println!("skipped: {reason}");
}
