//! Every test that a GPU has to pass, as one program, so that a machine without Rust gets the
//! libraries of all of them only once.
//!
//! `benches/gpu.sh` runs it, one module after the other (`product::`, `optimizer::`, ...).

// Each test of the kernels includes their shared module.
#![allow(clippy::duplicate_mod)]

#[path = "it/audits.rs"]
mod audits;
#[allow(dead_code)] // its `main`; this program runs its trials
#[path = "conformance.rs"] // without the path, its modules would be looked for in `conformance/`
mod conformance;
#[allow(dead_code)] // its `main`; this program runs its trials
mod cuda;
#[path = "it/dist_muon.rs"]
mod dist_muon;
#[path = "../cubecl_kernels/tests/fused.rs"]
mod fused;
#[path = "../cubecl_kernels/tests/gram.rs"]
mod gram;
mod launches;
mod memory;
#[path = "../cubecl_kernels/tests/mirror.rs"]
mod mirror;
#[path = "it/optimizer.rs"]
mod optimizer;
#[path = "it/orthogonalize/mod.rs"]
mod orthogonalize;
#[path = "it/parts/mod.rs"]
mod parts;
#[path = "it/precision.rs"]
mod precision;
#[path = "../cubecl_kernels/tests/product.rs"]
mod product;
#[path = "it/saver.rs"]
mod saver;
#[path = "it/states_on_host.rs"]
mod states_on_host;

use libtest_mimic::{Arguments, Trial};

/// Runs the trials of a program that has its own harness.
fn run(trials: Vec<Trial>) {
    let arguments = Arguments { test_threads: Some(1), ..Arguments::default() };
    assert!(!libtest_mimic::run(&arguments, trials).has_failed());
}

#[test]
fn golden_trajectories() {
    run(conformance::trials());
}

#[test]
fn nccl() {
    run(cuda::gpu::trials());
}

#[test]
#[ignore = "a process that the test `nccl` starts"]
fn nccl_rank() {
    cuda::gpu::rank();
}
