//! Any other optimizer of Burn's interface, for the parameters that a routing rule names.
//!
//! An optimizer that is not elementwise, such as Adafactor, needs all elements of a parameter. On
//! many ranks, every parameter of such an optimizer therefore has one owner: the rank that gets the
//! reduced gradient, keeps the state, takes the step and sends the result to the others.
//!
//! ```
//! use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
//! use burn::{module::Module, optim::AdafactorConfig, tensor::Device};
//! use distmuon::{DistMuonConfig, MuonConfig, RoutingRule, World};
//!
//! #[derive(Module, Debug)]
//! struct Net { tokens: Embedding, body: Linear, head: Linear }
//!
//! let device = Device::default().autodiff();
//! let linear = || LinearConfig::new(16, 16).init(&device);
//! let tokens = EmbeddingConfig::new(100, 16).init(&device);
//! let model = Net { tokens, body: linear(), head: linear() };
//!
//! let muon = MuonConfig::new()
//!     .with_optimizer("adafactor", AdafactorConfig::new().build())
//!     .with_rule(RoutingRule::custom("^(tokens|head)", "adafactor"));
//! println!("{}", muon.route(&model)?);
//! let optim = muon.try_init(&model)?; // on one device, or on many ranks:
//! let optim = DistMuonConfig::new().with_muon(muon).init(&World::alone(device), &model)?;
//! # Ok::<(), distmuon::Error>(())
//! ```
//!
//! # The step
//!
//! - The learning rate is the step's, times the factor of the parameter's role in
//!   [`ElementwiseConfig`](crate::ElementwiseConfig): `embedding_lr` or `head_lr` for parameters to
//!   which the built-in rules give that role, and `vector_lr` for all others.
//! - Clipping and loss scaling apply as to all other gradients. Clipping that was configured for
//!   the optimizer by itself, as in Burn's configurations, is not part of what their `build`
//!   returns, and does not apply.
//! - A gradient that is not finite leaves the parameter and the optimizer's state as they are, and
//!   is counted in [`SkippedSteps`](crate::SkippedSteps). For that decision the host of an owner
//!   waits for the device: once per step, or once per parameter with Burn's `ModuleOptimizer`. It
//!   does not wait for a [`LayerOptimizer`], which may wait itself, as [`Soap`] does in two of ten
//!   steps. The result of the optimizer is not checked.
//! - Parameters in float16 and bfloat16, and their gradients, are float32 for the optimizer.
//!   [`MasterWeights`](crate::MasterWeights) decides on the digits that are kept between steps.
//! - The position in the optimizer's own schedules is part of its state, and advances with the
//!   steps that were not skipped.
//!
//! # Costs
//!
//! Owners are chosen so that every rank has about the same work. The operations of a
//! [`LayerOptimizer`] are balanced together with Muon's operations, and so are the steps of
//! all optimizers with [`CostSource::Measured`](crate::distributed::CostSource::Measured).
//! Parameters of other optimizers are balanced by their elements, among themselves.
//!
//! The bytes of an optimizer's state are not known before it is copied to the host, and are no part
//! of [`Routing`](crate::Routing). A [`MemoryReport`](crate::distributed::MemoryReport) and a save
//! copy the states to the host of the owner, one parameter at a time. A save does so twice, to
//! learn their shapes and to send them. A [forecast](crate::DistMuonConfig::forecast_memory) makes
//! the state of one parameter of each shape.
//!
//! Burn reads the tensors of such a state in the default type of the device. Where that is not the
//! type of the saved state, loading on many ranks or in a world of one is an error; Burn's
//! `ModuleOptimizer` reads them in the other type.

mod optimizer;
mod soap;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn::optim::Optimizer;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::update::WholeOptimizer;
pub use crate::update::{LayerOptimizer, Rejected};
pub(crate) use optimizer::Whole;
pub use soap::{Soap, SoapConfig, SoapState};

/// Optimizers by the names that [`RoutingRule::custom`](crate::RoutingRule::custom) gives them.
///
/// Of an optimizer, only its name is serialized: ranks compare the names, and a configuration that
/// was read from a file needs the optimizers again, by
/// [`MuonConfig::with_optimizer`](crate::MuonConfig::with_optimizer). All ranks have to give
/// optimizers with equal settings, which is not checked.
///
/// ```
/// use burn::optim::AdafactorConfig;
/// use distmuon::{CustomOptimizers, MuonConfig, RoutingRule};
///
/// // The optimizers of a program, also for configurations that it reads from files.
/// let known = CustomOptimizers::new().with("adafactor", AdafactorConfig::new().build());
/// assert!(known.names().eq(["adafactor"]));
/// let config = MuonConfig::new()
///     .with_rule(RoutingRule::custom("^tokens", "adafactor"))
///     .with_optimizers(known);
/// ```
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(from = "Vec<String>", into = "Vec<String>")]
pub struct CustomOptimizers(BTreeMap<String, Option<WholeOptimizer>>);

impl CustomOptimizers {
    /// Returns no optimizers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an optimizer, or replaces the one of the same name.
    pub fn with(mut self, name: impl Into<String>, optimizer: impl Optimizer) -> Self {
        self.0.insert(name.into(), Some(WholeOptimizer::Any(Arc::new(optimizer))));
        self
    }

    /// Adds an optimizer whose step the device can take back, or replaces the one of the same name.
    pub fn with_layer(mut self, name: impl Into<String>, optimizer: impl LayerOptimizer) -> Self {
        self.0.insert(name.into(), Some(WholeOptimizer::Layer(Arc::new(optimizer))));
        self
    }

    /// Returns the names, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The optimizer of a name that was [checked](Self::check).
    pub(crate) fn get(&self, name: &str) -> &WholeOptimizer {
        self.0.get(name).and_then(Option::as_ref).expect("the routing has checked the names")
    }

    /// Fails unless the names are in routing rules, and all optimizers are there.
    pub(crate) fn check<'a>(&self, named: impl Iterator<Item = &'a str> + Clone) -> Result<()> {
        if let Some(unknown) = named.clone().find(|name| !self.0.contains_key(*name)) {
            let expected = "names of optimizers that were given to `MuonConfig::with_optimizer`";
            return Err(Error::setting("rules", format!("`{unknown}`"), expected));
        }
        for (name, optimizer) in &self.0 {
            let field = || format!("optimizers.{name}");
            if optimizer.is_none() {
                let expected = "an optimizer, by `MuonConfig::with_optimizer` (files have names)";
                return Err(Error::setting(field(), "a name only", expected));
            }
            // An optimizer that no rule names would train nothing, in silence.
            if !named.clone().any(|used| used == name) {
                let expected = "a `RoutingRule::custom` that names it";
                return Err(Error::setting(field(), "an optimizer without a rule", expected));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for CustomOptimizers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

impl From<Vec<String>> for CustomOptimizers {
    fn from(names: Vec<String>) -> Self {
        Self(names.into_iter().map(|name| (name, None)).collect())
    }
}

impl From<CustomOptimizers> for Vec<String> {
    fn from(optimizers: CustomOptimizers) -> Self {
        optimizers.0.into_keys().collect()
    }
}
