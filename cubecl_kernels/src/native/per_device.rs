//! Values of devices, or the reasons why there are none.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

use super::Refusal;

/// A value for every device that was asked for, to the end of the process.
pub(crate) struct Devices<T: 'static>(Mutex<BTreeMap<usize, Slot<T>>>);

/// Each device has its own lock: making the value waits for the device.
type Slot<T> = &'static OnceLock<Result<T, Refusal>>;

impl<T> Devices<T> {
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Returns the value of a device, which the first call makes.
    ///
    /// # Errors
    ///
    /// The reason why there is none, the same each time.
    pub fn get(
        &self,
        device: usize,
        make: impl FnOnce() -> Result<T, Refusal>,
    ) -> Result<&'static T, Refusal> {
        let slot = *self
            .0
            .lock()
            .expect("nothing panics while it holds the lock")
            .entry(device)
            .or_insert_with(|| Box::leak(Box::default()));
        slot.get_or_init(make).as_ref().map_err(Clone::clone)
    }
}
