//! The devices of the default backend.

use burn::backend::{Backend, Device as _, DeviceId, Dispatch, DispatchDevice};
use burn::tensor::Device;

/// Returns a device with autodiff for each of `ranks` ranks: all devices of the default device's
/// backend, in turn.
pub fn devices(ranks: usize) -> Vec<Device> {
    let id = Device::default().as_dispatch().to_id();
    let count = Dispatch::device_count(id.type_id).max(1);
    let device = |index| DispatchDevice::from_id(DeviceId { index_id: index as _, ..id });
    (0..ranks).map(|rank| Device::new(device(rank % count)).autodiff()).collect()
}
