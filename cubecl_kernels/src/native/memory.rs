//! Memory of the device, next to CubeCL's.

use cudarc::driver::{DriverError, result, sys};

use super::stream_order::SideStream;

/// Memory of the device, freed when it is dropped.
pub(super) struct Memory {
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// Memory with zeros for later work of a stream, whose context is current.
    pub fn zeroed(stream: &SideStream, bytes: usize) -> Result<Self, DriverError> {
        // SAFETY: there are some bytes, which are set below.
        let address = unsafe { result::malloc_sync(bytes) }?;
        let memory = Self { address, bytes };
        memory.clear(stream)?;
        Ok(memory)
    }

    /// Sets all of it to zero, for later work of a stream, whose context is current.
    pub fn clear(&self, stream: &SideStream) -> Result<(), DriverError> {
        let stream = stream.as_ptr().cast();
        // SAFETY: the allocation has these bytes.
        unsafe { result::memset_d8_async(self.address, 0, self.bytes, stream) }
    }

    /// Memory with values for later work of a stream, whose context is current.
    pub fn of(stream: &SideStream, values: &[u16]) -> Result<Self, DriverError> {
        let memory = Self::zeroed(stream, size_of_val(values))?;
        // Without a stream, a copy from memory that is not pinned may be under way when the call
        // returns.
        // SAFETY: the allocation has these bytes, and the values are staged when the call returns,
        // since their memory is not pinned.
        unsafe { result::memcpy_htod_async(memory.address, values, stream.as_ptr().cast()) }?;
        Ok(memory)
    }

    /// Returns the address, a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the values, once the work that writes them is done.
    pub fn read(&self) -> Result<Vec<u16>, DriverError> {
        let mut values = vec![0; self.bytes / size_of::<u16>()];
        // SAFETY: the allocation has these bytes.
        unsafe { result::memcpy_dtoh_sync(&mut values, self.address) }?;
        Ok(values)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated here, and freeing waits for the work of the device.
        unsafe { result::free_sync(self.address) }.ok();
    }
}
