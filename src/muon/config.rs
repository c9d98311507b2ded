//! The configuration of Muon.

use std::sync::Arc;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::Optimizer;

use super::Muon;
use crate::backend::KernelPolicy;
use crate::checks::ensure_size;
use crate::custom::CustomOptimizers;
use crate::elementwise::{AdamWConfig, ElementwiseConfig};
use crate::error::{Error, Result};
use crate::matrix_view::{MatrixLayout, MatrixView, UNNAMED};
use crate::orthogonalize::NewtonSchulzConfig;
use crate::routing::{Expectation, FirstLinear, RoutingRule};
use crate::update::parts::{Part, check_combination};
use crate::update::{
    LayerOptimizer, Ledger, LrScale, MasterWeights, MomentumConfig, MuonUpdate, Precision,
    SkippedSteps, StateDtype, WeightDecay,
};

/// Configuration of [`Muon`], and of the AdamW for everything that is not a hidden matrix.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::Device};
/// use distmuon::{LrScale, MomentumConfig, MuonConfig};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
/// let mut optim = MuonConfig::new()
///     .with_momentum(MomentumConfig::new().with_nesterov(false))
///     .with_lr_scale(LrScale::Original)
///     .with_weight_decay(0.05.into())
///     .init(&model);
/// ```
///
/// The defaults suit the learning rate of an AdamW run: updates have AdamW's size
/// ([`LrScale::MatchRmsAdamW`]), and AdamW's parameters are trained at the same rate. Also try
/// twice and four times that rate: see [Choosing a learning rate](crate::guide::learning_rate). For
/// the learning rates of Keller Jordan's Muon (about 0.02), use [`LrScale::Original`] and give
/// AdamW its own rate with [`AdamWConfig`].
#[derive(Config, Debug)]
pub struct MuonConfig {
    /// The momentum of hidden matrices. A number or a schedule converts to Nesterov momentum, as in
    /// `.with_momentum(0.9.into())`.
    #[config(default = "MomentumConfig::new()")]
    pub momentum: MomentumConfig,
    /// The iteration that orthogonalises the momentum.
    #[config(default = "NewtonSchulzConfig::new()")]
    pub newton_schulz: NewtonSchulzConfig,
    /// Weight decay of hidden matrices. A number converts to decoupled weight decay at a constant
    /// rate, as in `.with_weight_decay(0.1.into())`.
    #[config(default = "WeightDecay::from(0.1)")]
    pub weight_decay: WeightDecay,
    /// Optional stages of the update, in the order in which they run; each kind at most once.
    #[config(default = "Vec::new()")]
    pub parts: Vec<Part>,
    /// The factor on the learning rate that depends on the shape of a matrix.
    #[config(default = "LrScale::MatchRmsAdamW")]
    pub lr_scale: LrScale,
    /// A factor on the learning rate of all matrices that Muon updates, in addition to `lr_scale`;
    /// zero or more.
    #[config(default = 1.0)]
    pub lr_factor: f64,
    /// The dimension of a matrix that counts the outputs of its layer, for matrices without a
    /// routing rule that sets it.
    #[config(default = "MatrixLayout::InOut")]
    pub layout: MatrixLayout,
    /// The implementations that may be used by Muon and by AdamW.
    #[config(default = "KernelPolicy::Auto")]
    pub kernels: KernelPolicy,
    /// Routing rules, which take precedence over the built-in ones. If several match a path, the
    /// last one counts.
    #[config(default = "Vec::new()")]
    pub rules: Vec<RoutingRule>,
    /// The optimizer of the first `Linear` of a network that takes data without an embedding or a
    /// convolution before it. The routing's table marks such matrices by a question mark.
    #[config(default = "FirstLinear::Auto")]
    pub first_linear: FirstLinear,
    /// Further optimizers, for the parameters that rules route to them by name: see
    /// [`with_optimizer`](Self::with_optimizer).
    #[config(default = "CustomOptimizers::new()")]
    pub optimizers: CustomOptimizers,
    /// The optimizer of embeddings, the output head, vectors and scalars: AdamW or Lion.
    #[config(default = "AdamWConfig::new().into()")]
    pub rest: ElementwiseConfig,
    /// The precision that is kept of parameters in float16 and bfloat16, by all optimizers.
    #[config(default = "MasterWeights::Full")]
    pub master_weights: MasterWeights,
    /// The type of momentum and moments. `Int8` is for the momentum of matrices alone: see
    /// [`StateDtype`].
    #[config(default = "StateDtype::Float32")]
    pub state_dtype: StateDtype,
    /// Clipping of each parameter's gradient separately, after the check that the gradient is
    /// finite; `None` for none.
    ///
    /// For clipping by the norm of all gradients together, also on one device, see
    /// [`DistMuonConfig::max_norm`](crate::DistMuonConfig::max_norm).
    pub grad_clipping: Option<GradientClippingConfig>,
    /// Number of consecutive skipped steps of a parameter that ends the run with
    /// [`Error::Skipped`], when the counts are next read; `None` for no limit. See
    /// [`SkippedSteps`].
    #[config(default = "Some(100)")]
    pub max_skipped: Option<usize>,
    /// Number of consecutive steps without a gradient of any parameter that ends the run with
    /// [`Error::Usage`]; `None` for no limit. The first of them is logged as a warning, and so is
    /// a single parameter that has had no gradient for that number of steps: see
    /// [`DistModuleOptimizer::absent`](crate::DistModuleOptimizer::absent). Burn's
    /// [`ModuleOptimizer`](burn::optim::ModuleOptimizer) calls nothing in a step without any
    /// gradient, so there only single parameters are named, and a warning is logged when it is
    /// dropped without ever having had a gradient.
    #[config(default = "Some(100)")]
    pub max_absent: Option<usize>,
    /// Statements about every step, each an error where it does not hold: see
    /// [`expect`](Self::expect).
    #[config(default = "Vec::new()")]
    pub expectations: Vec<Expectation>,
}

impl MuonConfig {
    /// Adds a routing rule. If several rules match a path, the last one counts.
    pub fn with_rule(mut self, rule: impl Into<RoutingRule>) -> Self {
        self.rules.push(rule.into());
        self
    }

    /// Adds an expectation, such as that Muon updates 60 % of what is trained. Where it does not
    /// hold for a model, the optimizer is not made, and a step for which it does not hold is an
    /// error.
    pub fn expect(mut self, expectation: Expectation) -> Self {
        self.expectations.push(expectation);
        self
    }

    /// Adds an optimizer for the parameters that a
    /// [`RoutingRule::custom`](crate::RoutingRule::custom) routes to this name: any optimizer of
    /// Burn's interface, which updates every parameter as a whole. See [`custom`](crate::custom).
    pub fn with_optimizer(mut self, name: impl Into<String>, optimizer: impl Optimizer) -> Self {
        self.optimizers = self.optimizers.with(name, optimizer);
        self
    }

    /// Adds an optimizer as [`with_optimizer`](Self::with_optimizer) does, for whose steps the host
    /// does not wait, and by whose operations plans balance the ranks.
    pub fn with_layer_optimizer(
        mut self,
        name: impl Into<String>,
        optimizer: impl LayerOptimizer,
    ) -> Self {
        self.optimizers = self.optimizers.with_layer(name, optimizer);
        self
    }

    /// Sets the optimizer of everything that is not a hidden matrix to AdamW with these settings.
    pub fn with_adamw(self, config: AdamWConfig) -> Self {
        self.with_rest(config.into())
    }

    /// Builds Muon for parameters of two dimensions, to be combined with other optimizers by hand.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a setting that no run can use.
    pub fn try_build(&self) -> Result<Muon> {
        Ok(Muon {
            update: Arc::new(self.update()?),
            view: MatrixView::Single,
            layout: self.layout,
            parameter: UNNAMED.into(),
            skipped: SkippedSteps::new(self.max_skipped),
            reserved: None,
            once: false,
        })
    }

    /// Builds Muon like [`try_build`](Self::try_build), but panics instead of returning an error,
    /// as Burn's configurations do.
    ///
    /// # Panics
    ///
    /// With the message of the error that `try_build` returns.
    pub fn build(&self) -> Muon {
        self.try_build().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The update of matrices.
    pub(super) fn update(&self) -> Result<MuonUpdate> {
        self.momentum.check()?;
        // A schedule is checked by its extremes, so that no later step meets a rate that no run can
        // use.
        let mut rates = self.weight_decay.rate().extremes();
        rates.try_for_each(|rate| ensure_size("weight_decay", rate))?;
        ensure_size("lr_factor", self.lr_factor)?;
        if let Some(GradientClippingConfig::Norm(limit) | GradientClippingConfig::Value(limit)) =
            self.grad_clipping
            && !(limit.is_finite() && limit > 0.0)
        {
            return Err(Error::setting("grad_clipping", limit, "a positive number"));
        }
        if self.max_absent == Some(0) {
            return Err(Error::setting("max_absent", 0, "at least 1, or `None` for no limit"));
        }
        if self.max_skipped == Some(0) {
            return Err(Error::setting("max_skipped", 0, "at least 1, or `None` for no limit"));
        }
        self.parts.iter().try_for_each(Part::check).map_err(|error| error.in_field("parts"))?;
        check_combination(&self.parts, &self.momentum, &self.weight_decay)?;
        self.rest.check().map_err(|error| error.in_field("rest"))?;
        let precision = self.precision();
        let mut momenta = self.momentum.momentum.extremes();
        momenta.try_for_each(|mu| precision.ensure_momentum_decays("momentum.momentum", mu))?;
        let decays = self.rest.decays().into_iter();
        let mut decays = decays.map(|(name, decay)| precision.ensure_decays(name, decay));
        decays.try_for_each(|decay| decay).map_err(|error| error.in_field("rest"))?;
        let iteration =
            self.newton_schulz.init().map_err(|error| error.in_field("newton_schulz"))?;
        Ok(MuonUpdate {
            momentum: self.momentum.clone(),
            weight_decay: self.weight_decay.clone(),
            lr_scale: self.lr_scale,
            lr_factor: self.lr_factor,
            has_own_momentum: false,
            has_own_decay: false,
            clipping: self.grad_clipping.clone(),
            newton_schulz: iteration.with_kernels(self.kernels),
            parts: self.parts.clone(),
            precision,
            ledger: Ledger::default(),
        })
    }

    /// Fails for settings of rules that no run can use.
    pub(super) fn check_rules(&self) -> Result<()> {
        let of_muon = |momentum: Option<&MomentumConfig>, decay: Option<&WeightDecay>| {
            let momentum = momentum.unwrap_or(&self.momentum);
            let weight_decay = decay.unwrap_or(&self.weight_decay);
            momentum.check()?;
            let mut rates = weight_decay.rate().extremes();
            rates.try_for_each(|rate| ensure_size("weight_decay", rate))?;
            let mut momenta = momentum.momentum.extremes();
            let precision = self.precision();
            momenta.try_for_each(|mu| precision.ensure_momentum_decays("momentum.momentum", mu))?;
            check_combination(&self.parts, momentum, weight_decay)
        };
        self.rules.iter().try_for_each(|rule| rule.check(self.precision(), of_muon))
    }

    /// The settings of half precision.
    pub(super) fn precision(&self) -> Precision {
        Precision { master: self.master_weights, states: self.state_dtype }
    }
}
