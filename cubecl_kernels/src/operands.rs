//! The order of CubeCL's work with that of a [`SideStream`] on the same memory.
//!
//! A side stream waits for the work that CubeCL was given on its [operands](Operand), by
//! [words](Words) in memory. Where the device can't, it waits for all work of the context, or the
//! host waits ([`Order`]).

mod words;

use std::fmt;

use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl::future::block_on;
use cubecl::server::{Handle, ServerError};
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::ServerStorage;
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
pub use words::Words;

use crate::native::{Claim, Devices, Ready, Refusal, SideStream, in_relaxed_mode};

type Storage = <<CudaRuntime as Runtime>::Server as ServerStorage>::Storage;

/// Memory of CubeCL that work of a side stream reads or writes. It keeps its address.
pub struct Operand(ManagedResource<<Storage as ComputeStorage>::Resource>);

impl Operand {
    /// Pins the memory of a handle. As for a kernel that uses it, CubeCL's stream of this thread
    /// waits for the stream that the memory comes from.
    ///
    /// # Errors
    ///
    /// The failure of the work that should have filled the memory, or to allocate it.
    pub fn new(client: &Client, handle: &Handle) -> Result<Self, ServerError> {
        client.get_resource::<<CudaRuntime as Runtime>::Server>(handle.clone()).map(Self)
    }

    /// Returns the address.
    pub fn address(&self) -> u64 {
        self.0.resource().ptr
    }
}

/// Returns a refusal because of an error of CubeCL.
fn failed(operation: &'static str) -> impl FnOnce(ServerError) -> Refusal {
    move |error| {
        let error = error.to_string();
        let reason = error.lines().next().unwrap_or_default();
        Refusal(format!("CubeCL failed to {operation}: {reason}"))
    }
}

/// The way in which a side stream waits for CubeCL's work.
#[derive(Clone)]
pub enum Order {
    /// For the work on its operands alone, by words in memory.
    Operands(&'static Words),
    /// For all work of the context, also on other side streams, for the reason that is given.
    Context(String),
    /// By waits of the host, before the work of the side stream and after it: the driver is older
    /// than CUDA 12.5.
    Host,
}

impl Order {
    /// Returns the best order that a device has. The first call tries it.
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn of(device: usize) -> Result<Self, Refusal> {
        static DEVICES: Devices<Order> = Devices::new();
        let tried = || {
            let stream =
                SideStream::new(device).map_err(|error| Refusal::new("open the device", error))?;
            if !stream.has_context_events() {
                return Ok(Self::Host);
            }
            let words = Words::verified(device);
            Ok(words.map_or_else(|Refusal(reason)| Self::Context(reason), Self::Operands))
        };
        DEVICES.get(device, || in_relaxed_mode(tried)).cloned()
    }

    /// Returns the best order of a device for iterations, which have to run next to messages
    /// between ranks.
    ///
    /// # Errors
    ///
    /// The driver's error, or the reason why iterations would wait for messages.
    pub fn of_iterations(device: usize) -> Result<Self, Refusal> {
        match Self::of(device)? {
            Self::Context(reason) if Claim::is_held(device) => Err(Refusal(format!(
                "ranks exchange messages on the device, which iterations would wait for, since \
                 {reason}"
            ))),
            order => Ok(order),
        }
    }

    /// Returns the point from which work on memory may start that this thread has made an
    /// [`Operand`] of: all work on it that CubeCL was given so far is done.
    ///
    /// # Errors
    ///
    /// The failure of CubeCL.
    pub fn ready(&self, client: &Client) -> Result<Ready, Refusal> {
        match self {
            // A graph would write the word each time that it is replayed.
            Self::Operands(words) if !client.is_capturing() => {
                let (address, number) = words.announce(client)?;
                Ok(Ready::Word { address, number })
            }
            Self::Operands(_) | Self::Context(_) => Ok(Ready::Context),
            // The stream of this thread waits for all others that the operands come from.
            Self::Host => {
                block_on(client.sync()).map_err(failed("wait for the device"))?;
                Ok(Ready::Now)
            }
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operands(_) => write!(f, "after the work on their operands"),
            Self::Context(reason) => write!(f, "after all work of the context, since {reason}"),
            Self::Host => {
                write!(f, "after waits of the host, since the driver is older than CUDA 12.5")
            }
        }
    }
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
