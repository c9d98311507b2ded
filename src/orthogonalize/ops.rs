//! The matrix products of the iteration, as a Burn backend extension.
//!
//! Every backend runs the default bodies, which are composed of Burn's own operations
//! (`portable.rs`). A backend with something better implements [`MatrixOps`] and is named in its
//! attribute: Flex does so with faer's triangular product (`flex.rs`), all that CubeCL runs on with the
//! kernels of `distmuon-kernels` (`cube/`). Backends that are not named need no entry, since the
//! default bodies also run on the dispatching backend itself.

use burn::backend::{Backend, Dispatch, DispatchDevice, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use super::cube;
use super::{Polynomial, portable};
use crate::parts::Parts;

/// Which implementations of the products may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kernels {
    /// Those of the device that suit the shape.
    Auto,
    /// On CubeCL's devices those that were measured to be the fastest, when a shape is met first; Burn's
    /// own matmul is among them. Elsewhere as `Auto`.
    Tuned,
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
    /// The CubeCL kernels of `distmuon-kernels`, on CubeCL's devices; symmetric products as lower
    /// tiles, mirrored.
    Cube {
        /// Whether the kernels are chosen by measuring.
        tuned: bool,
    },
}

/// Products of matrices in batches. Factors are rounded to what a kernel computes in.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MatrixOps: Backend {
    /// `A A^T`: `[k, m, n]` to `[k, m, m]`. Kernels may be chosen by measuring.
    #[fusion(dtype = a, shape = square(a))]
    fn syrk(a: FloatTensor<Self>, _tuned: bool) -> FloatTensor<Self> {
        portable::syrk::<Self>(a)
    }

    /// `alpha A B^T + beta C`, for a result that is known to be symmetric: `a` and `b` are
    /// `[k, m, n]`; `c` is symmetric and `[k, m, m]` like the result.
    #[fusion(dtype = c, shape = c)]
    fn symmetric_product(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        alpha: f64,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        portable::symmetric_product::<Self>(a, b, c, alpha, beta)
    }

    /// `A B + beta C`, with `a` `[k, m, n]`, `b` `[k, n, p]`, and `c` `[k, m, p]` like the result.
    #[fusion(dtype = c, shape = c)]
    fn product_add(
        a: FloatTensor<Self>,
        b: FloatTensor<Self>,
        c: FloatTensor<Self>,
        beta: f64,
        _tuned: bool,
    ) -> FloatTensor<Self> {
        portable::product_add::<Self>(a, b, c, beta)
    }

    /// `A B`, with `a` `[k, m, n]`, `b` `[k, n, p]`.
    #[fusion(meta = |a, b| {
        let [k, m, _] = a.shape.dims();
        let [_, _, p] = b.shape.dims();
        burn::backend::fusion::custom::TensorSpec::new([k, m, p].into(), a.dtype)
    })]
    fn product(a: FloatTensor<Self>, b: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(a, b)
    }

    /// `Z + I`.
    #[fusion(dtype = z, shape = z)]
    fn plus_identity(z: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The product of all `Z + a I` with `Z = b R + c R^2`, where every step advances
    /// `R <- (Z + a I) R (Z + a I)`: `Q` of [the Gram form](super::Form::Gram) for small matrices.
    #[fusion(dtype = r, shape = r)]
    fn accumulate_small(r: FloatTensor<Self>, schedule: Vec<Polynomial>) -> FloatTensor<Self>;

    /// Copies `values` into the buffer of `target`, whoever else reads it, and returns that.
    #[fusion(dtype = target, shape = target)]
    fn overwrite(target: FloatTensor<Self>, values: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Writes the norms of the rows of tensors, of so many elements each, in as many parts as there is room for:
    /// `[rows, parts, 2]` float32 values, a scale and the sum of the squares of what is divided by it, as in LAPACK's
    /// `slassq`. The last row of a tensor may be shorter. The first row of each has a number.
    #[fusion(dtype = norms, shape = norms)]
    fn norms(
        norms: FloatTensor<Self>,
        #[extension_type] tensors: Parts<Self>,
        firsts: Vec<usize>,
        elements: usize,
    ) -> FloatTensor<Self>;

    /// Divides every matrix by its norm, or by `epsilon` if that is larger, and rounds to `dtype`.
    #[fusion(meta = |x, _norms, _epsilon, dtype| {
        burn::backend::fusion::custom::TensorSpec::new(x.shape.clone(), (*dtype).into())
    })]
    fn normalize(
        x: FloatTensor<Self>,
        norms: FloatTensor<Self>,
        epsilon: f64,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;
}

/// `[k, m, m]` for `[k, m, n]`.
#[cfg(feature = "fusion")]
fn square(shape: &burn::tensor::Shape) -> burn::tensor::Shape {
    let [k, m, _] = shape.dims();
    [k, m, m].into()
}

impl Engine {
    /// What computes products of `dtype` on `device`.
    pub fn choose(kernels: Kernels, device: &Device, dtype: FloatDType) -> Self {
        match (kernels, device.as_dispatch()) {
            #[cfg(feature = "flex")]
            (Kernels::Auto | Kernels::Tuned, DispatchDevice::Flex(_))
                if super::flex::serves(dtype.into()) =>
            {
                Self::Flex
            }
            #[cfg(feature = "cube")]
            (Kernels::Auto | Kernels::Tuned, DispatchDevice::Cube(device))
                if cube::serves(device, dtype.into()) =>
            {
                Self::Cube { tuned: kernels == Kernels::Tuned }
            }
            _ => Self::Portable,
        }
    }

    /// Which kernel computes a symmetric product `[k, m, inner] x [k, inner, m]` of `dtype` on `device`. A
    /// choice that is measured is known after the first product.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn kernel(self, device: &Device, dtype: FloatDType, [k, m, inner]: [usize; 3]) -> String {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cube")]
            (Self::Cube { tuned }, DispatchDevice::Cube(device)) => {
                cube::kernel(device, dtype.into(), [k, m, inner], tuned)
            }
            (Self::Flex, _) => "faer's triangular product".to_owned(),
            _ if self.symmetric_share(m, inner) < 1.0 => "Burn's matmul, in block rows".to_owned(),
            _ => "Burn's matmul".to_owned(),
        }
    }

    /// Whether the device rounds the factors of products of this type: those of float32 to TF32, where it has
    /// matrix units for that.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn rounds_factors(device: &Device, dtype: FloatDType) -> bool {
        match (dtype, device.as_dispatch()) {
            #[cfg(feature = "cube")]
            (FloatDType::F32, DispatchDevice::Cube(device)) => crate::cube::has_tf32(device),
            _ => false,
        }
    }

    /// Whether [`accumulate_small`](Self::accumulate_small) takes matrices of so many rows.
    #[cfg_attr(not(feature = "cube"), allow(unused_variables))]
    pub fn is_small(self, device: &Device, m: usize) -> bool {
        match (self, device.as_dispatch()) {
            #[cfg(feature = "cube")]
            (Self::Cube { .. }, DispatchDevice::Cube(device)) => m <= cube::most_small_rows(device),
            _ => false,
        }
    }

    /// The part of a symmetric product `[m, inner] x [inner, m]` that is really computed: one half for
    /// a triangle, 1 for the whole.
    pub fn symmetric_share(self, m: usize, inner: usize) -> f64 {
        match self {
            Self::Flex | Self::Cube { .. } => 0.5,
            Self::Portable => portable::symmetric_share(m, inner),
        }
    }

    /// `A A^T`.
    pub fn syrk(self, a: Tensor<3>) -> Tensor<3> {
        let a = a.into_dispatch();
        Tensor::from_dispatch(match self {
            Self::Portable => portable::syrk::<Dispatch>(a),
            _ => Dispatch::syrk(a, self.is_tuned()),
        })
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
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(match self {
            Self::Portable => portable::symmetric_product::<Dispatch>(a, b, c, alpha, beta),
            _ => Dispatch::symmetric_product(a, b, c, alpha, beta, self.is_tuned()),
        })
    }

    /// `Z + I`.
    pub fn plus_identity(self, z: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Portable => portable::plus_identity(z),
            _ => Tensor::from_dispatch(Dispatch::plus_identity(z.into_dispatch())),
        }
    }

    /// `A B`. Burn's matmul, but on Flex.
    pub fn product(self, a: Tensor<3>, b: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Flex => {
                Tensor::from_dispatch(Dispatch::product(a.into_dispatch(), b.into_dispatch()))
            }
            _ => a.matmul(b),
        }
    }

    /// `A B + beta C`.
    pub fn product_add(self, a: Tensor<3>, b: Tensor<3>, c: Tensor<3>, beta: f64) -> Tensor<3> {
        let [a, b, c] = [a, b, c].map(Tensor::into_dispatch);
        Tensor::from_dispatch(match self {
            Self::Portable => portable::product_add::<Dispatch>(a, b, c, beta),
            _ => Dispatch::product_add(a, b, c, beta, self.is_tuned()),
        })
    }

    fn is_tuned(self) -> bool {
        self == Self::Cube { tuned: true }
    }

    /// [`MatrixOps::accumulate_small`].
    ///
    /// # Panics
    ///
    /// Where [`is_small`](Self::is_small) says no.
    pub fn accumulate_small(self, r: Tensor<3>, schedule: &[Polynomial]) -> Tensor<3> {
        Tensor::from_dispatch(Dispatch::accumulate_small(r.into_dispatch(), schedule.to_vec()))
    }

    /// Room for what a kernel writes; it may hold anything.
    pub(crate) fn room(self, shape: [usize; 3], dtype: DType, device: &Device) -> Tensor<3> {
        match self {
            // In one dimension: of more, Burn may leave gaps between rows.
            Self::Cube { .. } => {
                let [k, m, n] = shape;
                Tensor::<1>::empty([k * m * n], (device, dtype)).reshape(shape)
            }
            // Of an `empty`, Flex makes two.
            _ => Tensor::full(shape, 0.0, (device, dtype)),
        }
    }

    /// Every matrix divided by its Frobenius norm, or by `epsilon` if that is larger, in `dtype`. The
    /// norms may be known already.
    pub(crate) fn normalize(
        self,
        x: Tensor<3>,
        norms: Option<Norms>,
        epsilon: f64,
        dtype: FloatDType,
    ) -> Tensor<3> {
        if self == Self::Portable {
            return portable::normalize(x, epsilon).cast(dtype);
        }
        let norms = match norms {
            Some(Norms(norms)) => norms.into_dispatch(),
            None => {
                let [k, m, n] = x.dims();
                let rows = Parts::from_tensors(vec![x.clone().reshape([-1])]);
                let room = self.room([k, norm_parts(m * n), 2], DType::F32, &x.device());
                Dispatch::norms(room.into_dispatch(), rows, vec![0], m * n)
            }
        };
        Tensor::from_dispatch(Dispatch::normalize(x.into_dispatch(), norms, epsilon, dtype))
    }
}

/// The norms of a batch, as [`MatrixOps::norms`] returns them.
pub(crate) struct Norms(pub Tensor<3>);

/// The number of parts that the norm of a row of so many elements is taken in.
pub(crate) fn norm_parts(elements: usize) -> usize {
    elements.div_ceil(NORM_PART).max(1)
}

/// Elements of a part of a norm.
pub(crate) const NORM_PART: usize = 1 << 14;
