//! Tests that share one process: none of them counts the memory, the kernels or the log of the
//! process, and none sets its environment. Tests that do are targets by themselves.

mod account;
mod adamw;
mod audits;
mod checkpoints;
mod custom;
mod diagnostics;
mod dist_muon;
mod examples;
mod exchange;
mod extremes;
#[cfg(target_os = "linux")]
mod file_faults;
mod forecast;
mod guide;
mod guide_fragments;
mod idle_matrices;
#[cfg(feature = "train")]
mod learner;
mod link;
mod lion;
#[cfg(feature = "mpi")]
mod mpi;
mod mutations;
mod optimizer;
mod orthogonalize;
mod parts;
mod precision;
mod qk_clip;
mod recipes;
mod resuming;
mod routing;
mod rule_settings;
mod saver;
mod skipped_tests;
mod soap;
mod split;
mod start;
mod states_on_host;
mod train_lm;
mod unusual_parameters;

/// A visible skip instead of the learner's tests.
#[cfg(not(feature = "train"))]
#[test]
#[ignore = "needs the feature `train`"]
fn learner() {}
