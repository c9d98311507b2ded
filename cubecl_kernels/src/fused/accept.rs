//! The parameters that a step leaves as they are, and the counts of all parameters.

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Batch, UNITS};
use crate::error::Result;

/// The float32 buffers that [`accept`] reads and writes, with one value for every parameter.
#[derive(Debug, Clone, Copy)]
pub struct AcceptBuffers<'a> {
    /// Positive for parameters whose gradient is rejected. Positive values for those that diverged
    /// may follow.
    pub sums: &'a Handle,
    /// 1 for parameters without a gradient, and else 0.
    pub absent: Option<&'a Handle>,
    /// The number of steps that left each parameter as it is.
    pub skipped: &'a Handle,
    /// The bias corrections of both moments, updated in place.
    pub corrections: [&'a Handle; 2],
    /// Receives 1 for parameters that stay as they are, and else 0.
    pub rejected: &'a Handle,
    /// Receives the number of skipped steps after this one.
    pub counted: &'a Handle,
    /// Receives zeros: flags of a later step.
    pub zeros: &'a Handle,
}

/// Decides which of some parameters a step leaves as they are, in one launch, and counts.
///
/// A parameter is skipped once if its gradient is rejected, and once if it `diverged` before, which
/// only counts. The corrections of parameters that are updated advance as the moments do, for
/// gradients of 1, by the weights of the old value and of the gradient: `keep C + fresh`.
///
/// # Errors
///
/// Those of the [module](super).
pub fn accept(
    client: &Client,
    buffers: AcceptBuffers<'_>,
    parameters: usize,
    diverged: bool,
    [first, second]: [[f32; 2]; 2],
) -> Result<()> {
    let AcceptBuffers { sums, absent, skipped, corrections, rejected, counted, zeros } = buffers;
    let of_sums = if diverged { 2 * parameters } else { parameters };
    // Where there are none, any buffer is bound in their place and not read.
    let absent_or_any = absent.unwrap_or(skipped);
    Batch::check_f32_buffers(&[
        ("the sums", sums, of_sums),
        ("the flags of absent gradients", absent_or_any, parameters),
        ("the counts", skipped, parameters),
        ("the corrections", corrections[0], parameters),
        ("the corrections", corrections[1], parameters),
        ("the flags", rejected, parameters),
        ("the new counts", counted, parameters),
        ("the zeros", zeros, parameters),
    ])?;
    if parameters == 0 {
        return Ok(());
    }
    let units = CubeDim::new_1d(UNITS);
    // SAFETY: every buffer was checked to have these elements.
    let buffer =
        |handle: &Handle, length| unsafe { BufferArg::from_raw_parts(handle.clone(), length) };
    // SAFETY: units past the parameters do nothing.
    unsafe {
        accept_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, parameters, units),
            units,
            AddressType::from_len(of_sums),
            buffer(sums, of_sums),
            buffer(absent_or_any, parameters),
            buffer(skipped, parameters),
            buffer(corrections[0], parameters),
            buffer(corrections[1], parameters),
            buffer(rejected, parameters),
            buffer(counted, parameters),
            buffer(zeros, parameters),
            first[0],
            first[1],
            second[0],
            second[1],
            absent.is_some(),
            diverged,
        );
    }
    Ok(())
}

// A condition is either of the kernel's compilation or of its units.
#[allow(clippy::collapsible_if)]
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn accept_kernel(
    sums: &[f32],
    absent: &[f32],
    skipped: &[f32],
    corrections_1: &mut [f32],
    corrections_2: &mut [f32],
    rejected: &mut [f32],
    counted: &mut [f32],
    zeros: &mut [f32],
    keep_1: f32,
    fresh_1: f32,
    keep_2: f32,
    fresh_2: f32,
    #[comptime] has_absent: bool,
    #[comptime] has_diverged: bool,
) {
    let parameter = ABSOLUTE_POS;
    if parameter >= skipped.len() {
        terminate!();
    }
    let mut count = skipped[parameter];
    let mut stays = f32::new(0.0);
    if sums[parameter] > 0.0 {
        stays = f32::new(1.0);
        count += 1.0;
    }
    if comptime!(has_diverged) {
        if sums[skipped.len() + parameter] > 0.0 {
            count += 1.0;
        }
    }
    if comptime!(has_absent) {
        stays = max(stays, absent[parameter]);
    }
    if stays == 0.0 {
        corrections_1[parameter] = corrections_1[parameter] * keep_1 + fresh_1;
        corrections_2[parameter] = corrections_2[parameter] * keep_2 + fresh_2;
    }
    rejected[parameter] = stays;
    counted[parameter] = count;
    zeros[parameter] = f32::new(0.0);
}
