//! The form in which an owned parameter is stored, and its base, which Burn's own records refuse.

use std::any::Any;
use std::fmt;
use std::sync::OnceLock;

use burn::module::{Param, ParamId, ParamMapper};
use burn::tensor::Tensor;

use crate::error::Error;
use crate::parameters;

/// The mapper of a whole parameter, by which records store and load it.
#[derive(Default)]
pub struct Form(OnceLock<Box<dyn Any + Send + Sync>>);

impl fmt::Debug for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Form")
    }
}

impl Form {
    /// The base of an owned parameter: NaN in the shape of the whole, so that a parameter that was
    /// taken out of the division shows at its first use. Burn's records would save them, or load
    /// values into them that nothing uses: their functions panic. Keeps the mapper of the whole.
    pub fn base<const D: usize>(
        &self,
        nan: Tensor<D>,
        mapper: ParamMapper<Tensor<D>>,
        (path, rank): (&str, usize),
    ) -> Param<Tensor<D>> {
        self.0.get_or_init(|| Box::new(mapper));
        let refusal = Error::parameter(
            path,
            rank,
            "it is divided among ranks, and Burn's own records have whole parameters",
            "save and load with `DistModuleOptimizer`, or the model of `Layout::unshard`",
        );
        let (saved, loaded) = (refusal.to_string(), refusal.to_string());
        // A new identity: the part has the parameter's, under which optimizers look for its
        // gradient.
        Param::initialized(ParamId::new(), nan)
            .save_mapper(move |_| panic!("{saved}"))
            .load_mapper(move |_| panic!("{loaded}"))
            // The base must never get a gradient: it has the shape of the whole and one element.
            .set_require_grad(false)
    }

    /// A whole parameter, with its mapper.
    pub fn whole<const D: usize>(&self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        parameters::with_mapper(param, self.mapper())
    }

    /// The [`ParamMapper`] of the whole; `None` if it was not divided by value.
    pub fn mapper(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.get().map(|mapper| &**mapper)
    }
}
