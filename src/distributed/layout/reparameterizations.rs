//! Reparameterizations of the parameters of passes: a use of an owned one gathers the whole, and
//! the gradient of every use is reduced.

use std::sync::Arc;

use burn::module::{Module, Param, Reparameterization};
use burn::tensor::Tensor;

use super::identity::Versioned;
use super::pass_parameter::PassParameter;
use super::passes::Passes;
use crate::parameters::{OWNED, REDUCED};

/// This rank's part of a parameter. The base has the shape of the whole, which some modules read,
/// and a single element in memory.
#[derive(Module, Debug)]
pub struct Owned {
    /// Flat, so that optimizers of single elements may update it, and no other takes it for a
    /// matrix.
    pub part: Param<Tensor<1>>,
    pub version: Versioned,
    #[module(skip)]
    pub parameter: Arc<PassParameter>,
    #[module(skip)]
    pub passes: Arc<Passes>,
}

impl Reparameterization for Owned {
    const NAME: &'static str = OWNED;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let part = (self.part.val(), self.version.version);
        self.passes.use_whole(&self.parameter, part, base.shape())
    }
}

/// The reduction of the gradient of a parameter that every rank has.
#[derive(Module, Debug)]
pub struct Reduced {
    #[module(skip)]
    pub parameter: Arc<PassParameter>,
    #[module(skip)]
    pub passes: Arc<Passes>,
}

impl Reparameterization for Reduced {
    const NAME: &'static str = REDUCED;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        self.passes.use_replica(&self.parameter, base)
    }
}
