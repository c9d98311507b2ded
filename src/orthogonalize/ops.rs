//! The matrix products of the iteration, as a Burn backend extension.
//!
//! Every backend runs the default bodies, which are composed of Burn's own operations
//! (`portable.rs`). A backend with something better implements [`MatrixOps`] and is named in its
//! attribute: Flex does so with faer's triangular product (`flex.rs`). Backends that are not named
//! need no entry, since the default bodies also run on the dispatching backend itself.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

use super::portable;

/// Which implementations of the products may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kernels {
    /// The fastest that the device has.
    Auto,
    /// Burn's own operations only: the reference that the others are compared with.
    Portable,
}

/// What computes the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Burn's operations; symmetric products in block rows.
    Portable,
    /// faer and plain loops on the buffers of Burn's Flex backend; symmetric products as a lower
    /// triangle, mirrored.
    Flex,
}

/// Products of matrices in batches.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub trait MatrixOps: Backend {
    /// `A A^T`: `[k, m, n]` to `[k, m, m]`.
    fn syrk(a: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::syrk::<Self>(a)
    }

    /// `alpha A B^T + beta C`, for a result that is known to be symmetric: `a` and `b` are
    /// `[k, m, n]`; `c` is symmetric and `[k, m, m]` like the result.
    fn symmetric_product(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        alpha: f32,
        beta: f32,
    ) -> FloatTensor<Self> {
        portable::symmetric_product::<Self>(a, b, c, alpha, beta)
    }

    /// `A B + beta C`, with `a` `[k, m, n]`, `b` `[k, n, p]`, and `c` `[k, m, p]` like the result.
    fn product_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        beta: f32,
    ) -> FloatTensor<Self> {
        portable::product_add::<Self>(a, b, c, beta)
    }

    /// Divides every float32 matrix by its Frobenius norm, or by `epsilon` if that is larger, without
    /// overflow or underflow at any scale.
    fn normalize(x: FloatTensor<Self>, epsilon: f32) -> FloatTensor<Self>;
}

impl Engine {
    /// What computes products of `dtype` on `device`.
    #[cfg_attr(not(feature = "flex"), allow(unused_variables))] // the type decides on Flex only
    pub fn choose(kernels: Kernels, device: &Device, dtype: FloatDType) -> Self {
        match (kernels, device.as_dispatch()) {
            #[cfg(feature = "flex")]
            (Kernels::Auto, burn::backend::DispatchDevice::Flex(_))
                if super::flex::serves(dtype.into()) =>
            {
                Self::Flex
            }
            _ => Self::Portable,
        }
    }

    /// The part of a symmetric product `[m, inner] x [inner, m]` that is really computed: one half for
    /// a triangle, 1 for the whole.
    pub fn symmetric_share(self, m: usize, inner: usize) -> f64 {
        match self {
            Self::Flex => 0.5,
            Self::Portable => portable::symmetric_share(m, inner),
        }
    }

    /// `A A^T`.
    pub fn syrk(self, a: Tensor<3>) -> Tensor<3> {
        let syrk = match self {
            Self::Portable => portable::syrk::<Dispatch>,
            Self::Flex => Dispatch::syrk,
        };
        Tensor::from_dispatch(syrk(a.into_dispatch()))
    }

    /// `alpha A B^T + beta C`, for a symmetric result.
    pub fn symmetric_product(
        self,
        a: Tensor<3>,
        b: Tensor<3>,
        c: Tensor<3>,
        alpha: f64,
        beta: f64,
    ) -> Tensor<3> {
        let product = match self {
            Self::Portable => portable::symmetric_product::<Dispatch>,
            Self::Flex => Dispatch::symmetric_product,
        };
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(product(a, b, c, alpha as f32, beta as f32))
    }

    /// `A B + beta C`.
    pub fn product_add(self, a: Tensor<3>, b: Tensor<3>, c: Tensor<3>, beta: f64) -> Tensor<3> {
        let product = match self {
            Self::Portable => portable::product_add::<Dispatch>,
            Self::Flex => Dispatch::product_add,
        };
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(product(a, b, c, beta as f32))
    }

    /// Every matrix divided by its Frobenius norm, or by `epsilon` if that is larger.
    pub fn normalize(self, x: Tensor<3>, epsilon: f64) -> Tensor<3> {
        match self {
            Self::Portable => portable::normalize(x, epsilon),
            Self::Flex => {
                Tensor::from_dispatch(Dispatch::normalize(x.into_dispatch(), epsilon as f32))
            }
        }
    }
}
