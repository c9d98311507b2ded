//! The configuration of AdamW.

use burn::config::Config;

use crate::backend::AdamWStep;
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;
use crate::update::{RoleFactors, Roles};

/// Configuration of AdamW for embeddings, the output head, vectors and scalars.
///
/// The `*_lr` are factors on the learning rate given to `step`, so one schedule changes all
/// learning rates. For separate schedules, see [`Routing::group`](crate::Routing::group).
#[derive(Config, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment, in `[0, 1)`.
    #[config(default = 0.9)]
    pub beta_1: f64,
    /// Decay of the second moment, in `[0, 1)`.
    #[config(default = 0.95)]
    pub beta_2: f64,
    /// Summand of the root of the second moment in the divisor, zero or more.
    #[config(default = 1e-8)]
    pub epsilon: f64,
    /// Rate of decoupled weight decay, zero or more.
    #[config(default = 0.0)]
    pub weight_decay: f64,
    /// Decays only the elements that the decay does not move against the update, as Burn's setting
    /// of this name (Chen et al., <https://arxiv.org/abs/2510.12402>). Burn's operations compute
    /// it, without kernels of this crate.
    #[config(default = false)]
    pub cautious_weight_decay: bool,
    /// AMSGrad: divides by the root of the largest second moment so far, which is a third state
    /// (Reddi et al., <https://arxiv.org/abs/1904.09237>). Burn's operations compute it, without
    /// kernels of this crate.
    #[config(default = false)]
    pub amsgrad: bool,
    /// Learning rate of embeddings, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub embedding_lr: f64,
    /// Learning rate of the output head, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub head_lr: f64,
    /// Learning rate of vectors and scalars, relative to the one given to `step`.
    #[config(default = 1.0)]
    pub vector_lr: f64,
    /// Weight decay of embeddings, relative to `weight_decay`.
    #[config(default = 1.0)]
    pub embedding_decay: f64,
    /// Weight decay of the output head, relative to `weight_decay`.
    #[config(default = 1.0)]
    pub head_decay: f64,
    /// Weight decay of vectors and scalars, relative to `weight_decay`: 0 spares norms and biases.
    #[config(default = 1.0)]
    pub vector_decay: f64,
}

impl AdamWConfig {
    /// Fails for settings that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        ensure_decay("beta_1", self.beta_1)?;
        ensure_decay("beta_2", self.beta_2)?;
        ensure_size("epsilon", self.epsilon)?;
        ensure_size("weight_decay", self.weight_decay)?;
        self.roles().check()
    }

    pub(super) fn step(&self) -> AdamWStep {
        AdamWStep {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            cautious: self.cautious_weight_decay,
            amsgrad: self.amsgrad,
        }
    }

    pub(super) fn roles(&self) -> Roles {
        Roles {
            embedding: RoleFactors { lr: self.embedding_lr, decay: self.embedding_decay },
            head: RoleFactors { lr: self.head_lr, decay: self.head_decay },
            vector: RoleFactors { lr: self.vector_lr, decay: self.vector_decay },
        }
    }
}
