//! Ranks that are processes: launchers, processes that are killed, and hosts that lose their link.
//!
//! The program starts itself as the ranks. They train over the engine `nccl` and the test library.
//! Between hosts, which are network namespaces here, they train over `mpi`, as do those with owned
//! parameters. Also ranks of one process with a GPU each.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod gpus;
#[cfg(all(feature = "cuda", feature = "mpi", target_os = "linux"))]
mod hosts;
#[cfg(all(feature = "cuda", feature = "mpi", target_os = "linux"))]
mod passes;
#[cfg(all(feature = "cuda", target_os = "linux"))]
mod ranks;

fn main() {
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    ranks::main();
    #[cfg(not(all(feature = "cuda", target_os = "linux")))]
    distmuon_testing::skip("processes train over nccl, which needs --features cuda, and on Linux");
}
