//! The number of units of a cube.

use cubecl::ir::HardwareProperties;

/// Returns `true` if units are threads, as on CubeCL's CPU runtime.
///
/// Threads lose more time by waiting for each other than they gain by sharing. A cube whose units
/// exchange values therefore has one unit on such a device where possible, and the iteration in one
/// cube ([`gram`](crate::gram)) is not worthwhile.
pub fn are_threads(hardware: &HardwareProperties) -> bool {
    hardware.plane_size_max == 1
}

/// Returns the number of units of a cube whose units exchange values: one where they are threads,
/// and else the requested number.
pub(crate) fn exchanging_units(hardware: &HardwareProperties, requested: u32) -> u32 {
    if are_threads(hardware) { 1 } else { requested }
}
