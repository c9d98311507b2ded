//! The settings of rules in place of the configuration's: one update for all parameters that have
//! the same.

use std::sync::Arc;

use super::{ParameterRole, Updates};
use crate::elementwise::ElementwiseConfig;
use crate::update::{ElementwiseUpdate, MomentumConfig, MuonUpdate, RoleSettings, WeightDecay};

/// The settings that a rule has of its own. `None` where the configuration's hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnSettings<'a> {
    /// The factor on the learning rate.
    pub lr_factor: f64,
    /// The momentum of matrices.
    pub momentum: Option<&'a MomentumConfig>,
    pub weight_decay: Option<&'a WeightDecay>,
    /// The optimizer of all other parameters.
    pub elementwise: Option<&'a ElementwiseConfig>,
}

impl OwnSettings<'_> {
    /// The settings of parameters without a rule.
    pub const NONE: Self =
        Self { lr_factor: 1.0, momentum: None, weight_decay: None, elementwise: None };

    /// The text in the table of a routing, after the name of the optimizer. `rest` is an update
    /// with other settings than the configuration's, and its parameter's role.
    pub fn describe(&self, rest: Option<(&ElementwiseUpdate, RoleSettings)>) -> String {
        let rate = |factor: f64| (factor != 1.0).then(|| format!("{factor} x rate"));
        let momentum = self.momentum.map(|momentum| {
            // The value after a warm-up, at which most steps are taken.
            let mu = momentum.momentum.at(momentum.momentum.settled());
            format!("momentum {mu}")
        });
        let decay = self.weight_decay.map(|decay| {
            let rate = decay.rate();
            format!("decay {}", rate.at(rate.settled()))
        });
        let elementwise = rest.map(|(rest, role)| {
            let [beta_1, beta_2] = rest.rule.betas();
            format!("betas {beta_1}, {beta_2}, decay {}", rest.weight_decay * role.decay)
        });
        let epsilon = match self.elementwise {
            Some(ElementwiseConfig::AdamW(adamw)) => Some(format!("epsilon {:e}", adamw.epsilon)),
            _ => None,
        };
        let all = [rate(self.lr_factor), momentum, decay, elementwise, epsilon];
        all.into_iter().flatten().map(|text| format!(", {text}")).collect()
    }
}

impl Updates {
    /// The index of Muon's update with these settings.
    pub(super) fn muon_with(&mut self, own: &OwnSettings<'_>) -> usize {
        let all = &self.muon[0];
        let update = MuonUpdate {
            lr_factor: all.lr_factor * own.lr_factor,
            momentum: own.momentum.unwrap_or(&all.momentum).clone(),
            weight_decay: own.weight_decay.unwrap_or(&all.weight_decay).clone(),
            has_own_momentum: own.momentum.is_some(),
            has_own_decay: own.weight_decay.is_some(),
            ..(**all).clone()
        };
        // Equal settings are one update, so that their matrices may share a batch.
        position_or_push(&mut self.muon, update, |other, update| {
            let of = |update: &MuonUpdate| (update.has_own_momentum, update.has_own_decay);
            other.lr_factor == update.lr_factor
                && other.momentum == update.momentum
                && other.weight_decay == update.weight_decay
                // Equal values may become different: `set_momentum` leaves a rule's own values as
                // they are.
                && of(other) == of(update)
        })
    }

    /// The index of the update element by element with these settings, for parameters of a role.
    pub(super) fn rest_with(&mut self, own: &OwnSettings<'_>, role: ParameterRole) -> usize {
        let all = (*self.rest[0]).clone();
        let update = match own.elementwise {
            Some(config) => {
                config.update(all.precision, all.policy, all.clipping.as_ref(), all.ledger)
            }
            None => all,
        };
        let settings = update.roles.of(role);
        let update = update.of_role(settings);
        position_or_push(&mut self.rest, update, |other, update| {
            // All else is taken from the configuration, and equal.
            other.rule == update.rule
                && other.weight_decay == update.weight_decay
                && other.roles == update.roles
        })
    }
}

/// The index of the first of some updates that is the same as another, which is added if none is.
fn position_or_push<T>(all: &mut Vec<Arc<T>>, new: T, same: impl Fn(&T, &T) -> bool) -> usize {
    let known = all.iter().position(|other| same(other, &new));
    known.unwrap_or_else(|| {
        all.push(Arc::new(new));
        all.len() - 1
    })
}
