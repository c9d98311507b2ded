//! Native kernels for Hopper (compute capability 9.0): products with `wgmma` instructions and TMA
//! copies, neither of which CubeCL 0.11 emits.
//!
//! Their PTX lies in the package next to its source, so that a user needs no compiler. They run on
//! a [`SideStream`], since CubeCL's streams are not accessible, and are therefore called for whole
//! iterations: work is ordered once before and once after. Before they are used, a device has to
//! multiply integers exactly. Small iterations are recorded as a graph. Where cuBLASLt is
//! installed, it computes the full products. The kernels are proved in an emulator of the
//! instructions that they use, and multiplied exactly on an H200 (2026-11-26).

mod cublaslt;
mod cuda_graphs;
mod engine;
mod launches;
mod memory;
mod per_device;
mod ptx_module;
mod self_test;
mod stream_order;
mod switch;
mod tile_choice;
mod time_products;

pub use engine::Native;
pub use launches::{Element, Launch, Layout, PlusIdentity, Product};
pub(crate) use per_device::Devices;
pub use stream_order::{Claim, DriverError, Ready, SideEvent, SideStream, in_relaxed_mode};
pub use switch::unless_required;
pub use time_products::Measured;

/// The reason why native kernels do not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

/// The outcome of launches that did not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotRun {
    /// Nothing was launched.
    Refused(Refusal),
    /// Some launches may have run before one failed. No native kernel runs in this process any
    /// more.
    Failed(Refusal),
}

impl From<Refusal> for NotRun {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// An iteration in buffers of the device.
pub struct Work<'a> {
    /// Bytes of every buffer. The first one has the input.
    pub bytes: &'a [usize],
    /// The launches, from the addresses of the buffers.
    pub launches: &'a dyn Fn(&[u64]) -> Vec<Launch>,
    /// Index of the buffer that has the result, which is as large as the input.
    pub result: usize,
}

impl Refusal {
    pub(crate) fn new(operation: &str, error: DriverError) -> Self {
        Self(format!("the driver failed to {operation}: {error:?}"))
    }
}
