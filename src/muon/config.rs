//! The configuration of Muon.

use std::sync::Arc;

use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::ModuleOptimizer;

use super::rule::Settings;
use super::view::UNNAMED;
use super::{LrScale, MatrixLayout, MatrixView, Muon};
use crate::adamw::AdamWSettings;
use crate::error::{Error, Result};
use crate::orthogonalize::{Coefficients, Form, IterationDtype, Kernels, NewtonSchulz};
use crate::route::{Routing, Rule};
use crate::schedule::Schedule;
use crate::skipped::SkippedSteps;

/// Configuration of [`Muon`], and of the AdamW that updates what is no hidden matrix.
///
/// ```
/// use burn::{nn::{Linear, LinearConfig}, tensor::Device};
/// use distmuon::{LrScale, MuonConfig};
///
/// let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
/// let mut optim = MuonConfig::new()
///     .with_lr_scale(LrScale::Original)
///     .with_weight_decay(0.05.into())
///     .init(&model);
/// ```
///
/// The defaults are made for the learning rate of an AdamW run: updates have AdamW's size
/// ([`LrScale::MatchRmsAdamW`]), and AdamW's parameters are trained at the same rate. Try twice and four
/// times that rate, too: see [Choosing a learning rate](crate::guide::learning_rate). For the
/// learning rates of Keller Jordan's Muon (about 0.02) use [`LrScale::Original`] and give AdamW its
/// own rate with [`AdamWSettings`].
#[derive(Config, Debug)]
pub struct MuonConfig {
    /// Momentum `mu`, in `[0, 1)`: a schedule, or a number as in `.with_momentum(0.9.into())`.
    #[config(default = "Schedule::constant(0.95)")]
    pub momentum: Schedule,
    /// Whether the update looks ahead, `mu M + (1 - mu) G`, instead of being `M`.
    #[config(default = true)]
    pub nesterov: bool,
    /// Decoupled weight decay: each step multiplies the parameter by `1 - lr * weight_decay`, with
    /// the learning rate before it is scaled.
    #[config(default = "Schedule::constant(0.1)")]
    pub weight_decay: Schedule,
    /// The factor that the shape of a matrix puts on the learning rate.
    #[config(default = "LrScale::MatchRmsAdamW")]
    pub lr_scale: LrScale,
    /// A further factor on the learning rate of all matrices.
    #[config(default = 1.0)]
    pub lr_factor: f64,
    /// Which dimension of a matrix counts the outputs of the layer.
    #[config(default = "MatrixLayout::InOut")]
    pub layout: MatrixLayout,
    /// The coefficients of the Newton-Schulz iteration.
    #[config(default = "Coefficients::polar_express()")]
    pub coefficients: Coefficients,
    /// Steps of the iteration; `None` for as many as the coefficients were designed for.
    pub steps: Option<usize>,
    /// The least Frobenius norm that a matrix is divided by; zero for none. As in PyTorch, gradients
    /// far below it give small updates instead of amplified noise.
    #[config(default = 1e-7)]
    pub epsilon: f64,
    /// The precision of the iteration.
    #[config(default = "IterationDtype::Auto")]
    pub iteration_dtype: IterationDtype,
    /// The form of the iteration.
    #[config(default = "Form::Auto")]
    pub form: Form,
    /// Which implementations may be used, AdamW's included: the fastest, or for comparison Burn's
    /// operations only.
    #[config(default = "Kernels::Auto")]
    pub kernels: Kernels,
    /// Memory that an iteration may use beside what it works on, in MB; larger batches are worked on in
    /// parts.
    #[config(default = 1024)]
    pub workspace_mb: usize,
    /// Whether iterations are recorded and replayed as one launch each, where the device has graphs: see
    /// [`NewtonSchulz::with_graphs`].
    #[config(default = false)]
    pub graphs: bool,
    /// Where parameters go that the built-in rules would send elsewhere; the last match counts.
    #[config(default = "Vec::new()")]
    pub rules: Vec<Rule>,
    /// AdamW for embeddings, the output head, vectors and scalars.
    #[config(default = "AdamWSettings::new()")]
    pub adamw: AdamWSettings,
    /// Clipping of the gradient of every parameter by itself, after it was found to be finite.
    ///
    /// For clipping by the norm of all gradients together, on one device too, see
    /// [`DistMuonConfig::max_norm`](crate::dist::DistMuonConfig::max_norm).
    pub grad_clipping: Option<GradientClippingConfig>,
    /// Steps in a row in which a parameter may be skipped before the run ends with [`Error::Skipped`], at the
    /// next look at the counts; `None` for any number. See [`SkippedSteps`].
    #[config(default = "Some(100)")]
    pub max_skipped: Option<usize>,
}

impl MuonConfig {
    /// Adds a routing rule; the last one that matches a path counts.
    pub fn with_rule(mut self, rule: impl Into<Rule>) -> Self {
        self.rules.push(rule.into());
        self
    }

    /// Muon for single matrices, to be combined by hand.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a setting that no run can use.
    pub fn try_build(&self) -> Result<Muon> {
        Ok(Muon {
            settings: Arc::new(self.settings()?),
            view: MatrixView::Single,
            layout: self.layout,
            parameter: UNNAMED.into(),
            skipped: SkippedSteps::new(self.max_skipped),
            reserved: None,
        })
    }

    /// [`try_build`](Self::try_build), for use where Burn's configurations are.
    ///
    /// # Panics
    ///
    /// With the message of the error.
    pub fn build(&self) -> Muon {
        self.try_build().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Decides for every parameter of a model what updates it. The result can be printed.
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`] for a setting that no run can use;
    /// - [`Error::Dtype`] for an iteration in a type that a device has not;
    /// - [`Error::Shape`] for a parameter of more than two dimensions without a rule that says how to
    ///   see it as matrices;
    /// - [`Error::Pattern`] and [`Error::UnusedRule`] for rules that are malformed or match nothing;
    /// - [`Error::Shared`] for a parameter that is in the model twice;
    /// - [`Error::EmptyModel`] and [`Error::AllFrozen`] for a model without parameters to train.
    pub fn route<M: Module>(&self, model: &M) -> Result<Routing> {
        let routing = Routing::new(self, model)?;
        log::debug!("who updates what:\n{routing}");
        Ok(routing)
    }

    /// Burn's optimizer for the whole model: hidden matrices by Muon, the rest by AdamW.
    ///
    /// Burn hands it one parameter at a time, so that nothing but what is stacked in one parameter is worked on
    /// together: each matrix is about 20 launches, each other parameter about 3, where
    /// [`init_whole`](Self::init_whole) takes as many for all of one shape. Use it where a `ModuleOptimizer` is asked
    /// for, as by burn-train's `Learner`.
    ///
    /// Clipping belongs into the configuration: Burn's setter `with_grad_clipping` of the returned optimizer
    /// reaches a part of it that updates nothing, and has no effect. See the guide's
    /// [clipping](crate::guide::clipping).
    ///
    /// # Errors
    ///
    /// As [`route`](Self::route).
    pub fn try_init<M: Module>(&self, model: &M) -> Result<ModuleOptimizer> {
        Ok(self.route(model)?.init())
    }

    /// [`try_init`](Self::try_init), for use where Burn's configurations are. On a GPU,
    /// [`init_whole`](Self::init_whole) takes far fewer launches.
    ///
    /// Burn's setter `with_grad_clipping` has no effect on the returned optimizer; use that of the configuration.
    ///
    /// # Panics
    ///
    /// With the message of the error.
    pub fn init<M: Module>(&self, model: &M) -> ModuleOptimizer {
        self.try_init(model).unwrap_or_else(|error| panic!("{error}"))
    }

    fn settings(&self) -> Result<Settings> {
        let refuse = |setting, value: f64, expected| {
            Err(Error::Setting { setting, value: value.to_string(), expected })
        };
        if let Some(mu) = self.momentum.extremes().find(|mu| !(0.0..1.0).contains(mu)) {
            return refuse("momentum", mu, "at least 0 and less than 1");
        }
        let usable = |value: &f64| value.is_finite() && *value >= 0.0;
        if let Some(decay) = self.weight_decay.extremes().find(|decay| !usable(decay)) {
            return refuse("weight_decay", decay, "a finite number, zero or more");
        }
        if !usable(&self.lr_factor) {
            return refuse("lr_factor", self.lr_factor, "a finite number, zero or more");
        }
        let positive = |value: f64| value.is_finite() && value > 0.0;
        match self.grad_clipping {
            Some(GradientClippingConfig::Norm(most) | GradientClippingConfig::Value(most))
                if !positive(most.into()) =>
            {
                return refuse("grad_clipping", most.into(), "a positive number");
            }
            _ => {}
        }
        if self.max_skipped == Some(0) {
            return refuse("max_skipped", 0.0, "at least 1, or `None` for any number");
        }
        self.adamw.check()?;
        Ok(Settings {
            momentum: self.momentum.clone(),
            nesterov: self.nesterov,
            weight_decay: self.weight_decay.clone(),
            lr_scale: self.lr_scale,
            lr_factor: self.lr_factor,
            clipping: self.grad_clipping.clone(),
            newton_schulz: NewtonSchulz::new(
                &self.coefficients,
                self.steps.unwrap_or(self.coefficients.designed_steps()),
                self.epsilon,
                self.iteration_dtype,
                self.form,
            )?
            .with_kernels(self.kernels)
            .with_workspace(self.workspace_mb)
            .with_graphs(self.graphs),
        })
    }
}
