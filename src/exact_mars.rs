//! The correction of gradients in MARS-M's exact form, which needs two gradients of a batch.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use crate::backend::precise_dtype;
use crate::checks::{ensure_decay, ensure_gradient_matches, ensure_size};
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};
use crate::update::ONLY_RANK;
use crate::update::parts::Mars;

/// The gradients of one batch for the parameters of two steps.
#[derive(Debug)]
pub struct GradientPair {
    /// For the parameters as they are.
    pub current: GradientsParams,
    /// For the parameters before the last step; before the first step, for those that the run
    /// starts with. Parameters without a gradient here are not corrected.
    pub previous: GradientsParams,
}

impl Mars {
    /// Returns the gradients of a step in the exact form: `G + gamma mu / (1 - mu) (G - G')`, where
    /// `G` is the current gradient of the pair, `G'` the previous one and `mu` the momentum of the
    /// step. For parameters in half precision, corrected gradients are float32.
    ///
    /// MARS-M corrects the matrices that Muon updates, and no parameters of AdamW: the previous
    /// gradients should be of these matrices alone, as below.
    ///
    /// The correction is linear, so every rank corrects the gradients of its own batch, of
    /// parameters that it has whole or in slices. On several ranks, set
    /// [`GradDtype::Float32`](crate::distributed::GradDtype::Float32) in half precision. With loss
    /// scaling, multiply both losses by the same scale. A checkpoint does not have the former
    /// parameters: a resumed run has no correction in its first step.
    ///
    /// ```
    /// use burn::module::ParamId;
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::parts::Mars;
    /// use distmuon::{GradientPair, MomentumConfig, MuonConfig, ParameterRole, RoutingRule};
    ///
    /// let device = Device::default().autodiff();
    /// let mut model = LinearConfig::new(8, 8).init(&device);
    /// let (mars, momentum) = (Mars::exact(0.025), 0.95);
    /// let config = MuonConfig::new()
    ///     .with_rule(RoutingRule::muon("weight"))
    ///     .with_parts(vec![mars.into()])
    ///     .with_momentum(MomentumConfig::from(momentum).with_nesterov(false));
    /// let routing = config.route(&model)?;
    /// let is_matrix = |role| matches!(role, ParameterRole::Muon { .. });
    /// let routes = routing.routes().iter().filter(|route| is_matrix(route.role));
    /// let matrices: Vec<ParamId> = routes.map(|route| route.id).collect();
    /// let mut optim = config.init_batched(&model)?;
    /// let mut previous_model = model.clone();
    /// for _step in 0..3 {
    ///     let batch = Tensor::<2>::ones([4, 8], &device);
    ///     let backward = |model: &Linear| model.forward(batch.clone()).square().mean().backward();
    ///     let current = GradientsParams::from_grads(backward(&model), &model);
    ///     let mut previous = backward(&previous_model);
    ///     let previous = GradientsParams::from_params(&mut previous, &previous_model, &matrices);
    ///     let gradients = mars.correct(&model, momentum, GradientPair { current, previous })?;
    ///     previous_model = model.clone();
    ///     model = optim.step(1e-3, model, gradients)?;
    /// }
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Error::Setting`] for a strength that is negative or not finite, or a momentum that is
    ///   not in `[0, 1)`.
    /// - [`Error::Usage`] for a pair without previous gradients, or with one of a parameter that
    ///   has no current one.
    /// - [`Error::Parameter`] for a gradient that is on another device than its parameter or has
    ///   another shape, and for a parameter whose gradient a
    ///   [`Layout`](crate::distributed::Layout) reduces in the backward pass (`owned`, `rows`,
    ///   `overlap_backward`).
    pub fn correct<M: Module>(
        &self,
        model: &M,
        momentum: f64,
        gradients: GradientPair,
    ) -> Result<GradientsParams> {
        ensure_size("Mars.gamma", self.gamma)?;
        ensure_decay("momentum", momentum)?;
        let unpaired = |got: String| {
            Error::usage(
                "the gradients are no pair",
                "previous gradients of parameters that have current ones",
                got,
                "compute both with the same parameters of one batch, as `Mars::correct` shows",
            )
        };
        if gradients.previous.is_empty() {
            return Err(unpaired("no previous gradients".into()));
        }
        let mut found = parameters::of(model).into_iter();
        if let Some(found) = found.find(|found| found.placement.reduces_in_backward()) {
            return Err(Error::parameter(
                &found.path,
                ONLY_RANK,
                "its gradient can't be corrected: expected one of this rank's batch, got a shard \
                 of the mean of all ranks",
                "leave `owned`, `rows`, `overlap_backward` and `DistMuonConfig::overlap` out, or \
                 use `Mars::new`",
            ));
        }
        let strength = self.gamma * momentum / (1.0 - momentum);
        let mut correct = Correct { gradients, strength, error: None };
        parameters::visit(model, &mut correct);
        let Correct { gradients: GradientPair { current, previous }, error, .. } = correct;
        match (error, previous.len()) {
            (Some(error), _) => Err(error),
            (None, 0) => Ok(current),
            (None, left) => Err(unpaired(format!("{left} previous gradients of other parameters"))),
        }
    }
}

struct Correct {
    gradients: GradientPair,
    strength: f64,
    error: Option<Error>,
}

impl Visit for Correct {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let GradientPair { current, previous } = &mut self.gradients;
        let value = param.val().inner();
        let Some(gradient) = current.get::<D>(param.id) else { return };
        let Some(before) = previous.remove::<D>(param.id) else { return };
        for gradient in [&gradient, &before] {
            let path = parameters::path(fields);
            if let Err(error) = ensure_gradient_matches(&path, ONLY_RANK, &value, gradient) {
                self.error.get_or_insert(error);
                return;
            }
        }
        let precise = precise_dtype(value.dtype());
        let [gradient, before] = [gradient, before].map(|gradient| gradient.cast(precise));
        let change = (gradient.clone() - before).mul_scalar(self.strength);
        current.remove::<D>(param.id);
        current.register(param.id, gradient + change);
    }
}
