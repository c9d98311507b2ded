//! The optimizers that can be compared.

use anyhow::Result;
use burn::optim::{self, ModuleOptimizer};
use clap::ValueEnum;
use distmuon::{Group, LrScale, MuonConfig, Routing, Schedule};

use crate::model::Gpt;

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerName {
    /// AdamW for everything.
    Adamw,
    /// Burn's Muon for hidden matrices, AdamW for the rest.
    BurnMuon,
    /// This crate's Muon for hidden matrices, AdamW for the rest.
    Muon,
}

impl OptimizerName {
    pub fn name(self) -> String {
        self.to_possible_value().expect("no value is skipped").get_name().to_owned()
    }

    /// The best peak learning rate of a sweep over the default task; see the README.
    pub fn tuned_lr(self) -> f64 {
        match self {
            Self::Adamw => 4e-3,
            Self::BurnMuon | Self::Muon => 8e-3,
        }
    }

    /// The optimizer, and the routing where there is one.
    pub fn init(self, model: &Gpt) -> Result<(ModuleOptimizer, Routing)> {
        let routing = MuonConfig::new().with_lr_scale(LrScale::MatchRmsAdamW).route(model)?;
        let adamw = || optim::AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        let optim = match self {
            Self::Adamw => adamw().with_weight_decay(0.1).init(),
            Self::BurnMuon => {
                let muon = optim::MuonConfig::new()
                    .with_adjust_lr_fn(optim::AdjustLrFn::MatchRmsAdamW)
                    .with_weight_decay(Some(optim::decay::WeightDecayConfig::new(0.1)))
                    .build();
                let matrices = routing.group(|group| matches!(group, Group::Muon { .. }));
                adamw().with_weight_decay(0.0).init().with_group(matrices, muon, None)
            }
            Self::Muon => routing.init(),
        };
        Ok((optim, routing))
    }

    /// Warm-up over a twentieth of the run, warm-down over its last half.
    pub fn schedule(self, lr: f64, steps: usize) -> Schedule {
        let (warmup, warmdown) = (steps / 20, steps / 2);
        Schedule::warmup_constant_warmdown(lr, warmup, steps - warmup - warmdown, warmdown)
    }
}
