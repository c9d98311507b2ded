//! How many units a cube has.

use cubecl::ir::HardwareProperties;

/// Whether units are threads, as on CubeCL's CPU runtime: waiting for each other costs them more than what
/// they would share, so that a cube whose units exchange anything has one of them where it can, and the
/// iteration in one cube ([`gram`](crate::gram)) does not pay.
pub fn are_threads(hardware: &HardwareProperties) -> bool {
    hardware.plane_size_max == 1
}

/// Of the units that a cube of exchanging units would have, those that it gets on a device.
pub(crate) fn together(hardware: &HardwareProperties, wanted: u32) -> u32 {
    if are_threads(hardware) { 1 } else { wanted }
}
