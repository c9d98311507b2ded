//! The settings of a case of AdamW or Lion.

use distmuon::{AdamWConfig, ElementwiseConfig, LionConfig, MuonConfig, RoutingRule};
use serde::Deserialize;

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWSettings {
    betas: [f64; 2],
    epsilon: f64,
    weight_decay: f64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LionSettings {
    betas: [f64; 2],
    weight_decay: f64,
}

impl AdamWSettings {
    /// The configuration for a model with the parameter `weight` of `rank` dimensions.
    pub fn config(&self, rank: usize) -> MuonConfig {
        let adamw = AdamWConfig::new()
            .with_beta_1(self.betas[0])
            .with_beta_2(self.betas[1])
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay);
        elementwise(adamw.into(), rank)
    }
}

impl LionSettings {
    /// The configuration for a model with the parameter `weight` of `rank` dimensions.
    pub fn config(&self, rank: usize) -> MuonConfig {
        let lion = LionConfig::new()
            .with_beta_1(self.betas[0])
            .with_beta_2(self.betas[1])
            .with_weight_decay(self.weight_decay);
        elementwise(lion.into(), rank)
    }
}

fn elementwise(rest: ElementwiseConfig, rank: usize) -> MuonConfig {
    let config = MuonConfig::new().with_rest(rest);
    if rank == 1 { config } else { config.with_rule(RoutingRule::adamw("weight")) }
}
