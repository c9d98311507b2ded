//! Shared code of the kernels' tests and benches.
#![allow(dead_code, unused_imports)] // every target uses a part

use cubecl::client::Client;
use cubecl::device::RuntimeId;
use cubecl::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::{WgpuDevice, WgpuServer, WgslCompiler};
use cubecl::zspace::{Shape, Strides};
use distmuon_kernels::{Error, Matrices};
pub use distmuon_skips::{excused, lacks, skip};

/// The element types of matrices.
pub trait Real: Float + CubeElement + Into<f64> {}

impl<F: Float + CubeElement + Into<f64>> Real for F {}

/// Returns a client of the device that `BURN_DEVICE` names, as for the tests of distmuon. `wgsl` is
/// a Vulkan device whose kernels are written in that language, as on devices without SPIR-V.
pub fn device_client() -> Client {
    match std::env::var("BURN_DEVICE").unwrap_or_default().to_lowercase().as_str() {
        #[cfg(feature = "cuda")]
        "cuda" => cubecl::Device::Cuda(Default::default()).client(),
        #[cfg(feature = "cpu")]
        "cpu" => cubecl::Device::Cpu(Default::default()).client(),
        "wgsl" => {
            let device = cubecl::Device::Wgpu(WgpuDevice::default());
            Client::load::<WgpuServer<WgslCompiler>>(RuntimeId::strip(device.to_id()))
        }
        _ => cubecl::Device::Wgpu(Default::default()).client(),
    }
}

/// Returns a client, if there is a device and it supports the type.
pub fn client<F: Real>() -> Option<Client> {
    let Ok(client) = std::panic::catch_unwind(device_client) else {
        skip("there is no device");
        return None;
    };
    let is_supported =
        F::supported_uses(&client).contains(TypeUsage::Buffer) && rounds_to::<F>(&client);
    if !is_supported {
        lacks(core::any::type_name::<F>());
    }
    is_supported.then_some(client)
}

/// Returns `true` if the device really rounds to a type that it reports to support: CubeCL's CPU
/// runtime needs a processor with instructions for bfloat16, or libgcc 13.
fn rounds_to<F: Real>(client: &Client) -> bool {
    let values = [1.5_f32, -2.0];
    let source = client.create_from_slice(f32::as_bytes(&values));
    let rounded = upload::<F>(client, &[0.0; 2]);
    // SAFETY: both buffers hold two values.
    let [from, to] =
        [&source, &rounded].map(|handle| unsafe { BufferArg::from_raw_parts(handle.clone(), 2) });
    let count = CubeCount::Static(1, 1, 1);
    round::launch(client, count, CubeDim::new_1d(1), from, to, F::elem_type_native());
    download::<F>(client, &rounded) == values.map(f64::from)
}

#[cube(launch)]
fn round<F: Float>(from: &[f32], to: &mut [F], #[define(F)] _dtype: ElemType) {
    for i in 0..2_usize {
        to[i] = F::cast_from(from[i]);
    }
}

/// Returns the tolerance for float32: that of TF32 on a device whose matrix units round to it.
pub fn tf32_or(tolerance: f64) -> f64 {
    let tf32 = ElemType::Float(FloatKind::TF32);
    let has_tf32 = client::<f32>().is_some_and(|client| client.properties().supports_type(tf32));
    if has_tf32 { 1e-3 } else { tolerance }
}

/// Rounds values and copies them to the device.
pub fn upload<F: Real>(client: &Client, values: &[f64]) -> Handle {
    let values: Vec<F> = values.iter().map(|x| F::new(*x as f32)).collect();
    client.create_from_slice(F::as_bytes(&values))
}

/// Copies values from the device.
pub fn download<F: Real>(client: &Client, handle: &Handle) -> Vec<f64> {
    let bytes = client.read_one_unchecked(handle.clone());
    F::from_bytes(&bytes).iter().map(|x| (*x).into()).collect()
}

/// Returns values from -1 to 1 that a type represents exactly.
pub fn values<F: Real>(count: usize, seed: usize) -> Vec<f64> {
    let value = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    (0..count).map(|i| F::new(value(i)).into()).collect()
}

/// Checks that the text of an error contains some words.
pub fn assert_mentions(error: Error, words: &str) {
    assert!(error.to_string().contains(words), "{error}");
}

/// Returns matrices as CubeCL describes tensors.
///
/// # Safety
///
/// The buffer holds the elements of all matrices at their strides.
pub unsafe fn binding(matrices: &Matrices) -> TensorBinding {
    let Matrices { handle, shape, strides, .. } = matrices;
    // SAFETY: by the contract of this function.
    unsafe {
        TensorBinding::from_raw_parts(handle.clone(), Strides::new(strides), Shape::new(*shape))
    }
}
