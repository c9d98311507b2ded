//! A differentiable operation whose value is computed elsewhere.
//!
//! A [`Link`] connects an output to the input that it was made from: its backward pass is a
//! closure. The output may be made again in the backward pass instead of being kept. Parameters
//! that lie on other ranks are used in this way: their value is gathered, and their gradient is
//! sent to its owner.
//!
//! Backward steps run by depth, the deepest first, and a link on a leaf has depth 1, however late
//! it is used. Its closure would run at the end of the backward pass, and its gradient would wait
//! until then. A [`GraphOrder`] gives every use its own depth.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use distmuon::link::{Link, supports};
//!
//! let device = Device::default().autodiff();
//! assert!(supports(&device)); // not every backend has links
//! let input = Tensor::<2>::from_floats([[1.0, 2.0]], &device).require_grad();
//! let tripled = input.clone().without_autodiff() * 3.0; // by any means
//! let output = Link::new(|gradient| gradient * 3.0).attach(input.clone(), tripled);
//! let gradient = input.grad(&output.sum().backward()).unwrap();
//! assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), [3.0, 3.0]);
//! ```

mod autodiff;
mod backward_order;

use std::fmt;
use std::sync::Arc;

use burn::tensor::Tensor;

pub(crate) use autodiff::identity;
pub use autodiff::supports;
#[doc(hidden)]
pub use backward_order::{Depth, GraphOrder};

type Backward = Arc<dyn Fn(Tensor<1>) -> Option<Tensor<1>> + Send + Sync>;
type Forward = Arc<dyn Fn(Tensor<1>) -> Tensor<1> + Send + Sync>;

/// The relation of an output to its input. The tensors that its closures get and return are flat
/// and without autodiff.
#[derive(Clone)]
pub struct Link {
    backward: Backward,
    again: Option<Forward>,
    depth: Option<Depth>,
}

impl Link {
    /// Returns a link whose closure computes the input's gradient from the output's.
    pub fn new(backward: impl Fn(Tensor<1>) -> Tensor<1> + Send + Sync + 'static) -> Self {
        Self::from_backward(move |gradient| Some(backward(gradient)))
    }

    /// Returns a link whose closure takes the gradient of the output out of the backward pass: the
    /// input gets none. The input has to be a leaf, since an operation before it would panic for
    /// want of a gradient.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::link::Link;
    /// use std::sync::{Arc, Mutex};
    ///
    /// let x = Tensor::<1>::ones([2], &Device::default().autodiff()).require_grad();
    /// let taken = Arc::new(Mutex::new(None));
    /// let place = taken.clone();
    /// let link = Link::taking(move |gradient| *place.lock().unwrap() = Some(gradient));
    /// let gradients = (link.attach(x.clone(), x.clone()) * 3.0).sum().backward();
    /// assert!(x.grad(&gradients).is_none());
    /// assert_eq!(taken.lock().unwrap().take().unwrap().sum().into_scalar::<f32>(), 6.0);
    /// ```
    pub fn taking(take: impl Fn(Tensor<1>) + Send + Sync + 'static) -> Self {
        Self::from_backward(move |gradient| {
            take(gradient);
            None
        })
    }

    fn from_backward(
        backward: impl Fn(Tensor<1>) -> Option<Tensor<1>> + Send + Sync + 'static,
    ) -> Self {
        Self { backward: Arc::new(backward), again: None, depth: None }
    }

    /// Makes the output again from the input when the backward pass needs it, at most once, instead
    /// of keeping it from the forward pass.
    ///
    /// A view of the output, such as its transpose, is kept on a device without
    /// [`gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing), and the output
    /// with it. Burn's `Linear` makes none. An embedding always keeps its table.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::link::Link;
    ///
    /// let device = Device::default().autodiff().gradient_checkpointing();
    /// let part = Tensor::<2>::ones([2, 2], &device).require_grad();
    /// // Twice the part, which the backward pass of the product makes again.
    /// let link = Link::new(|gradient| gradient * 2.0).made_again(|part| part * 2.0);
    /// let whole: Tensor<2> = link.attach(part.clone(), part.clone().inner() * 2.0);
    /// let x = Tensor::<2>::ones([1, 2], &device).require_grad();
    /// let gradients = x.clone().matmul(whole).sum().backward();
    /// assert_eq!(x.grad(&gradients).unwrap().sum().into_scalar::<f32>(), 8.0);
    /// ```
    pub fn made_again(
        mut self,
        again: impl Fn(Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        self.again = Some(Arc::new(again));
        self
    }

    /// Places the link at a depth of the graph, from a [`GraphOrder`].
    pub fn at(mut self, depth: Depth) -> Self {
        self.depth = Some(depth);
        self
    }

    /// Returns the output as if an operation with this backward pass had computed it from the
    /// input. Without autodiff on the input's device, the output is returned as it is.
    ///
    /// # Panics
    ///
    /// If the backend is not [supported](supports), or if the output is on another one.
    pub fn attach<const D: usize, const E: usize>(
        self,
        input: Tensor<D>,
        output: Tensor<E>,
    ) -> Tensor<E> {
        // The operations that computed the output would otherwise have a backward pass of their
        // own.
        autodiff::attach(self, input, output.without_autodiff())
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("made_again", &self.again.is_some()).finish_non_exhaustive()
    }
}
