//! Every test that a GPU has to pass, as one program: a machine without Rust gets what all of them link only once.
//!
//! `benches/gpu.sh` runs it, one module after the other (`product::`, `optimizer::`, ...).

// Every module brings what it shares with others, as it does in a program of its own.
#![allow(clippy::duplicate_mod)]

#[allow(dead_code)] // its `main`; this program runs its trials
#[path = "conformance.rs"]
mod conformance;
#[allow(dead_code)] // its `main`; this program runs its trials
#[path = "cuda.rs"]
mod cuda;
#[path = "dist_muon.rs"]
mod dist_muon;
#[path = "../cubecl_kernels/tests/fused.rs"]
mod fused;
#[path = "../cubecl_kernels/tests/gram.rs"]
mod gram;
#[path = "launches.rs"]
mod launches;
#[path = "memory.rs"]
mod memory;
#[path = "../cubecl_kernels/tests/mirror.rs"]
mod mirror;
#[path = "optimizer.rs"]
mod optimizer;
#[path = "orthogonalize.rs"]
mod orthogonalize;
#[path = "../cubecl_kernels/tests/product.rs"]
mod product;

use libtest_mimic::{Arguments, Trial};

/// Runs the trials of a program with a harness of its own.
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
