//! The choice of the implementation that computes.

use burn::backend::DispatchDevice;
use burn::tensor::{Device, FloatDType};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use super::cubecl;
use super::portable;

/// The implementations that may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KernelPolicy {
    /// The kernels for the device that suit the shape; without any, Burn's operations.
    Auto,
    /// On CubeCL's devices, the kernels that are measured to be the fastest when a shape is first
    /// used, with Burn's own matmul among the candidates. On other devices, the same as `Auto`.
    Tuned,
    /// Burn's own operations only: the reference for all others.
    Portable,
}

/// The implementation that computes a product or a step, chosen by policy, device and type.
///
/// ```
/// use burn::tensor::{Device, FloatDType};
/// use distmuon::{ComputePath, KernelPolicy};
///
/// let path = |policy| ComputePath::choose(policy, &Device::default(), FloatDType::F32);
/// assert_eq!(path(KernelPolicy::Portable), ComputePath::Portable);
/// println!("{:?}", path(KernelPolicy::Auto)); // `Flex` on Burn's Flex backend
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ComputePath {
    /// Burn's operations; symmetric products in block rows.
    Portable,
    /// faer and plain loops on the buffers of Burn's Flex backend; symmetric products as a lower
    /// triangle, mirrored.
    Flex,
    /// The CubeCL kernels of `distmuon-kernels`; symmetric products as lower tiles, mirrored.
    CubeCl {
        /// `true` if the kernels are chosen by measuring.
        tuned: bool,
    },
}

/// The use of kernels that are written for one kind of device, in its own instructions, by an
/// iteration: those for Hopper (compute capability 9.0), with `wgmma` and TMA.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NativeKernels {
    /// Native kernels compute the iteration, unless the driver refuses one of its launches. With
    /// their description.
    Used(String),
    /// Native kernels are compared with the others when a shape is first iterated
    /// ([`KernelPolicy::Tuned`]). With their description.
    Measured(String),
    /// Native kernels do not compute the iteration, for this reason.
    Refused(String),
}

impl NativeKernels {
    /// Returns `true` unless they are refused.
    pub(crate) fn may_run(&self) -> bool {
        !matches!(self, Self::Refused(_))
    }
}

impl ComputePath {
    /// Chooses the path for values of `dtype` on `device`.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn choose(policy: KernelPolicy, device: &Device, dtype: FloatDType) -> Self {
        let tuned = match policy {
            KernelPolicy::Auto => false,
            KernelPolicy::Tuned => true,
            KernelPolicy::Portable => return Self::Portable,
        };
        match device.as_dispatch() {
            #[cfg(feature = "flex")]
            // By the type as well: kernels compute in float32, which is too little for float64.
            DispatchDevice::Flex(_) if super::flex::serves(dtype.into()) => Self::Flex,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) if cubecl::serves(device, dtype.into()) => {
                Self::CubeCl { tuned }
            }
            // Also for devices that Burn will add.
            _ => Self::Portable,
        }
    }

    /// Returns `true` if the backend of a device has this crate's operations, whatever the type.
    pub(super) fn has_operations(device: &DispatchDevice) -> bool {
        match device {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => true,
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) => true,
            _ => false,
        }
    }

    #[doc(hidden)] // for the bench `gpu`
    /// Returns the name of the kernel for a symmetric product `[k, m, inner] x [k, inner, m]` of
    /// `dtype` on `device`. If kernels are chosen by measuring, the name is known only after the
    /// first product.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn kernel(self, device: &Device, dtype: FloatDType, [k, m, inner]: [usize; 3]) -> String {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cube")]
            (Self::CubeCl { tuned }, DispatchDevice::Cube(device)) => {
                cubecl::kernel(device, dtype.into(), [k, m, inner], tuned)
            }
            (Self::Flex, _) => "faer's triangular product".to_owned(),
            _ if self.symmetric_share(m, inner) < 1.0 => "Burn's matmul, in block rows".to_owned(),
            _ => "Burn's matmul".to_owned(),
        }
    }

    /// Returns the use of native kernels for iterations of matrices `[k, m, n]` of `dtype` on
    /// `device`. The first call for a device loads and verifies them.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn native_kernels(
        self,
        device: &Device,
        dtype: FloatDType,
        [k, m, n]: [usize; 3],
    ) -> NativeKernels {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cuda")]
            (Self::CubeCl { tuned }, DispatchDevice::Cube(device)) => {
                match cubecl::native_kernels(device, dtype.into(), [k, m, n]) {
                    Ok(kernels) if tuned => NativeKernels::Measured(kernels),
                    Ok(kernels) => NativeKernels::Used(kernels),
                    Err(reason) => NativeKernels::Refused(reason),
                }
            }
            _ => NativeKernels::Refused("the products are not those of a CUDA device".to_owned()),
        }
    }

    /// Returns `true` unless native kernels are refused for such iterations, as
    /// [`native_kernels`](Self::native_kernels) says. Without their description, for every step.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
    pub(crate) fn has_native_kernels(
        self,
        device: &Device,
        dtype: FloatDType,
        shape: [usize; 3],
    ) -> bool {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cuda")]
            (Self::CubeCl { .. }, DispatchDevice::Cube(device)) => {
                cubecl::has_native_kernels(device, dtype.into(), shape)
            }
            _ => false,
        }
    }

    #[doc(hidden)] // for tests
    /// Returns `true` if the device rounds the factors of products of `dtype`: float32 is rounded
    /// to TF32 on devices with matrix units for TF32.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn rounds_factors(device: &Device, dtype: FloatDType) -> bool {
        // Only float32: half precision has no more than the ten bits of TF32, and is multiplied as
        // it is.
        match (dtype, device.as_dispatch()) {
            #[cfg(feature = "simulated-tf32")]
            (_, DispatchDevice::Flex(_)) => super::tf32::is_simulated(device, dtype.into()),
            #[cfg(feature = "cube")]
            (FloatDType::F32, DispatchDevice::Cube(device)) => cubecl::has_tf32(device),
            _ => false,
        }
    }

    /// Returns `true` if one kernel, `MatrixOps::accumulate_q`, computes the whole Gram form of
    /// matrices with `m` rows.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub(crate) fn is_small(self, device: &Device, m: usize) -> bool {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cube")]
            (Self::CubeCl { .. }, DispatchDevice::Cube(device)) => {
                m <= cubecl::max_small_rows(device)
            }
            _ => false,
        }
    }

    /// Returns the fraction of a symmetric product `[m, inner] x [inner, m]` that is computed: one
    /// half for a triangle, 1 for the whole.
    pub(crate) fn symmetric_share(self, m: usize, inner: usize) -> f64 {
        match self {
            Self::Flex | Self::CubeCl { .. } => 0.5,
            Self::Portable => portable::symmetric_share(m, inner),
        }
    }

    /// Returns `true` if kernels are chosen by measuring.
    pub(super) fn is_tuned(self) -> bool {
        self == Self::CubeCl { tuned: true }
    }
}
