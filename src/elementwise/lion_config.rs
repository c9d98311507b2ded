//! The configuration of Lion.

use burn::config::Config;

use crate::backend::LionStep;
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;
use crate::update::{RoleSettings, Roles};

/// Configuration of Lion (Chen et al., <https://arxiv.org/abs/2302.06675>) for embeddings, the
/// output head, vectors and scalars.
///
/// Every element moves by the learning rate, so Lion's rate is three to ten times smaller than
/// AdamW's, and its weight decay as much larger (section 5 of the paper): set the `*_lr` below 1.
#[derive(Config, Debug, PartialEq)]
pub struct LionConfig {
    /// Weight of the momentum in the update, in `[0, 1)`.
    #[config(default = 0.9)]
    pub beta_1: f64,
    /// Decay of the momentum, in `[0, 1)`.
    #[config(default = 0.99)]
    pub beta_2: f64,
    /// Rate of decoupled weight decay, zero or more.
    #[config(default = 0.0)]
    pub weight_decay: f64,
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

impl LionConfig {
    /// Fails for settings that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        ensure_decay("beta_1", self.beta_1)?;
        ensure_decay("beta_2", self.beta_2)?;
        ensure_size("weight_decay", self.weight_decay)?;
        self.roles().check()
    }

    pub(super) fn step(&self) -> LionStep {
        LionStep { beta_1: self.beta_1, beta_2: self.beta_2 }
    }

    pub(super) fn roles(&self) -> Roles {
        let of = |lr, decay| RoleSettings { lr, decay, betas: None };
        Roles {
            embedding: of(self.embedding_lr, self.embedding_decay),
            head: of(self.head_lr, self.head_decay),
            vector: of(self.vector_lr, self.vector_decay),
        }
    }
}
