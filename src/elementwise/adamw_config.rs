//! The configuration of AdamW.

use burn::config::Config;

use crate::backend::AdamWStep;
use crate::checks::{ensure_decay, ensure_size};
use crate::error::Result;
use crate::update::{RoleSettings, Roles};

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
    /// Decays of both moments of embeddings, in place of `beta_1` and `beta_2`.
    pub embedding_betas: Option<[f64; 2]>,
    /// Decays of both moments of the output head, in place of `beta_1` and `beta_2`.
    pub head_betas: Option<[f64; 2]>,
    /// Decays of both moments of vectors and scalars, in place of `beta_1` and `beta_2`.
    pub vector_betas: Option<[f64; 2]>,
}

impl AdamWConfig {
    /// Fails for settings that no run can use.
    pub(super) fn check(&self) -> Result<()> {
        ensure_decay("beta_1", self.beta_1)?;
        ensure_decay("beta_2", self.beta_2)?;
        ensure_size("epsilon", self.epsilon)?;
        ensure_size("weight_decay", self.weight_decay)?;
        for (name, betas) in self.own_betas() {
            betas.into_iter().try_for_each(|beta| ensure_decay(name, beta))?;
        }
        self.roles().check()
    }

    /// The decays of the roles that have their own, with the names of their settings.
    pub(super) fn own_betas(&self) -> impl Iterator<Item = (&'static str, [f64; 2])> {
        let betas = [
            ("embedding_betas", self.embedding_betas),
            ("head_betas", self.head_betas),
            ("vector_betas", self.vector_betas),
        ];
        betas.into_iter().filter_map(|(name, betas)| Some((name, betas?)))
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
        let of = |lr, decay, betas| RoleSettings { lr, decay, betas };
        Roles {
            embedding: of(self.embedding_lr, self.embedding_decay, self.embedding_betas),
            head: of(self.head_lr, self.head_decay, self.head_betas),
            vector: of(self.vector_lr, self.vector_decay, self.vector_betas),
        }
    }
}
