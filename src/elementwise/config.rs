//! The choice of the optimizer for everything that is not a hidden matrix.

use burn::grad_clipping::GradientClippingConfig;
use serde::{Deserialize, Serialize};

use super::{AdamWConfig, LionConfig};
use crate::backend::KernelPolicy;
use crate::error::Result;
use crate::update::{ElementwiseRule, ElementwiseUpdate, Ledger, Precision};

/// The optimizer of everything that is not a hidden matrix, which updates parameters element by
/// element. Configurations convert, as in `.with_rest(LionConfig::new().into())`.
///
/// ```
/// use distmuon::{AdamWConfig, ElementwiseConfig, LionConfig, MuonConfig};
///
/// /// Vectors at half the rate with AdamW, and at a tenth of it with Lion.
/// fn rest(lion: bool) -> ElementwiseConfig {
///     match lion {
///         true => LionConfig::new().with_vector_lr(0.1).into(),
///         false => AdamWConfig::new().with_vector_lr(0.5).into(),
///     }
/// }
///
/// let config = MuonConfig::new().with_rest(rest(true));
/// assert!(matches!(config.rest, ElementwiseConfig::Lion(_)));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ElementwiseConfig {
    /// AdamW.
    AdamW(AdamWConfig),
    /// Lion.
    Lion(LionConfig),
}

impl From<AdamWConfig> for ElementwiseConfig {
    fn from(config: AdamWConfig) -> Self {
        Self::AdamW(config)
    }
}

impl From<LionConfig> for ElementwiseConfig {
    fn from(config: LionConfig) -> Self {
        Self::Lion(config)
    }
}

impl ElementwiseConfig {
    /// Fails for settings that no run can use.
    pub(crate) fn check(&self) -> Result<()> {
        match self {
            Self::AdamW(config) => config.check().map_err(|error| error.in_field("AdamW")),
            Self::Lion(config) => config.check().map_err(|error| error.in_field("Lion")),
        }
    }

    /// The decays of all averages, with the names of their settings.
    pub(crate) fn decays(&self) -> Vec<(&'static str, f64)> {
        match self {
            Self::AdamW(config) => {
                let common = [("AdamW.beta_1", config.beta_1), ("AdamW.beta_2", config.beta_2)];
                let own = config
                    .own_betas()
                    .flat_map(|(_, betas)| betas.map(|beta| ("AdamW's betas of a role", beta)));
                common.into_iter().chain(own).collect()
            }
            // `beta_1` mixes a direction that is not stored, so no type is too coarse for it.
            Self::Lion(LionConfig { beta_2, .. }) => vec![("Lion.beta_2", *beta_2)],
        }
    }

    /// The update of parameters.
    pub(crate) fn update(
        &self,
        precision: Precision,
        policy: KernelPolicy,
        clipping: Option<&GradientClippingConfig>,
        ledger: Ledger,
    ) -> ElementwiseUpdate {
        let (rule, weight_decay, roles) = match self {
            Self::AdamW(config) => {
                (ElementwiseRule::AdamW(config.step()), config.weight_decay, config.roles())
            }
            Self::Lion(config) => {
                (ElementwiseRule::Lion(config.step()), config.weight_decay, config.roles())
            }
        };
        let clipping = clipping.cloned();
        ElementwiseUpdate { rule, weight_decay, roles, precision, policy, clipping, ledger }
    }
}
