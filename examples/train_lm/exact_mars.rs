//! MARS-M's exact form, which compares the gradients of one batch for the parameters of two steps.

use anyhow::{Result, ensure};
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor};
use distmuon::parts::{Mars, Part};
use distmuon::{GradientBuffer, GradientPair, MuonConfig, ParameterRole, Schedule};

use super::model::Gpt;
use super::optimizer::{Contender, OptimizerName};

/// The correction of gradients, with the model before the last step.
pub struct ExactMars {
    mars: Mars,
    momentum: Schedule,
    /// The parameters that are corrected.
    matrices: Vec<ParamId>,
    previous: Gpt,
    gradients: GradientBuffer,
}

/// The exact form, if a run with Muon has it in its settings. Fails where it can't correct the
/// gradients.
pub fn exact_mars(
    contender: Contender,
    config: &MuonConfig,
    reduces_in_passes: bool,
) -> Result<Option<Mars>> {
    let is_muon = contender.optimizer.single() == OptimizerName::Muon;
    let exact = config.parts.iter().filter(|_| is_muon).find_map(|part| match part {
        Part::Mars(mars) if mars.exact => Some(*mars),
        _ => None,
    });
    ensure!(
        exact.is_none() || !reduces_in_passes,
        "exact MARS corrects the gradients of a rank's own batch, which passes send to other \
         ranks; give --overlap=false, and leave --owned and --rows out"
    );
    Ok(exact)
}

impl ExactMars {
    /// Starts a run. A resumed run has no correction in its first step, since a checkpoint has no
    /// former parameters.
    pub fn start(mars: Mars, config: &MuonConfig, model: &Gpt) -> Result<Self> {
        // Anew: a model that was loaded has parameters of another identity than the optimizer saw.
        let routing = config.route(model)?;
        let of_muon = |role| matches!(role, ParameterRole::Muon { .. });
        let routes = routing.routes().iter().filter(|route| of_muon(route.role));
        let matrices: Vec<ParamId> = routes.map(|route| route.id).collect();
        ensure!(!matrices.is_empty(), "--settings has exact MARS, and no parameter is Muon's");
        let (momentum, gradients) = (config.momentum.momentum.clone(), GradientBuffer::new());
        Ok(Self { mars, momentum, matrices, previous: model.clone(), gradients })
    }

    /// Adds the gradients of a part of the batch for the former parameters. `scale` multiplies the
    /// loss.
    pub fn add(&mut self, [tokens, targets]: [Tensor<2, Int>; 2], scale: f64) -> Result<()> {
        let loss = self.previous.loss(tokens, targets, None).mul_scalar(scale);
        let mut gradients = loss.backward();
        let gradients =
            GradientsParams::from_params(&mut gradients, &self.previous, &self.matrices);
        Ok(self.gradients.add(&self.previous, gradients)?)
    }

    /// Corrects the gradients of a step, and keeps its parameters for the next one.
    pub fn correct(
        &mut self,
        model: &Gpt,
        step: usize,
        current: GradientsParams,
    ) -> Result<GradientsParams> {
        let pair = GradientPair { current, previous: self.gradients.take_sum() };
        self.previous = model.clone();
        Ok(self.mars.correct(model, self.momentum.at(step), pair)?)
    }
}
