//! The user's routing rules, by path.

use regex::Regex;
use serde::{Deserialize, Serialize};

use super::ParameterRole;
use super::built_in::flat_layout;
use super::settings::OwnSettings;
use crate::checks::ensure_size;
use crate::elementwise::ElementwiseConfig;
use crate::error::{Error, Result};
use crate::matrix_blocks::{BlockSide, Split};
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::parameters::Found;
use crate::update::{MomentumConfig, Precision, WeightDecay};

/// Routes the parameters whose path matches a regular expression to Muon, to AdamW or to an
/// optimizer of the user's.
///
/// A path consists of field names and indices, as in `blocks.0.mlp.up.weight`. The expression, in
/// the syntax of the crate `regex`, may match any part of the path. An expression that is malformed
/// or matches no suitable parameter is an error of [`MuonConfig::route`](crate::MuonConfig::route).
///
/// ```
/// use distmuon::{MuonConfig, RoutingRule};
///
/// let config = MuonConfig::new()
///     .with_rule(RoutingRule::muon(r"experts\.(up|down)$").batch())
///     .with_rule(RoutingRule::muon("spectral").leading())
///     .with_rule(RoutingRule::adamw("probe"));
/// ```
///
/// Frozen parameters stay frozen, even if a rule matches them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RoutingRule {
    pattern: String,
    /// The built-in role of the parameters that the rule is for; any for `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    role: Option<ParameterRole>,
    #[serde(default = "one")]
    lr_factor: f64,
    to: Destination,
}

/// The factor of rules without one.
fn one() -> f64 {
    1.0
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Destination {
    Muon {
        view: MatrixView,
        layout: Option<MatrixLayout>,
        split: Option<Split>,
        #[serde(default)]
        side: BlockSide,
        #[serde(default)]
        left: Vec<usize>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        momentum: Option<Box<MomentumConfig>>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weight_decay: Option<Box<WeightDecay>>,
    },
    AdamW,
    Elementwise {
        settings: Box<ElementwiseConfig>,
    },
    Custom {
        optimizer: String,
    },
}

impl Destination {
    /// Fails for settings that no run can use, as [`RoutingRule::check`].
    fn check(
        &self,
        precision: Precision,
        of_muon: impl Fn(Option<&MomentumConfig>, Option<&WeightDecay>) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Muon { momentum, weight_decay, .. } => {
                of_muon(momentum.as_deref(), weight_decay.as_deref())
            }
            Self::Elementwise { settings } => {
                settings.check()?;
                let mut decays = settings.decays().into_iter();
                decays.try_for_each(|(name, decay)| precision.ensure_decays(name, decay))
            }
            Self::AdamW | Self::Custom { .. } => Ok(()),
        }
    }
}

/// A [`RoutingRule`] that routes to Muon, from [`RoutingRule::muon`], with optional settings in any
/// order.
///
/// ```
/// use distmuon::{MuonConfig, MuonRoutingRule, RoutingRule};
///
/// let of_heads = |rule: MuonRoutingRule| rule.heads(8).lr_factor(0.5);
/// let config = MuonConfig::new()
///     .with_rule(of_heads(RoutingRule::muon(r"(query|key|value)\.weight$")))
///     .with_rule(of_heads(RoutingRule::muon(r"output\.weight$")).of_inputs());
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct MuonRoutingRule {
    pattern: String,
    view: MatrixView,
    layout: Option<MatrixLayout>,
    split: Option<Split>,
    side: BlockSide,
    left: Vec<usize>,
    lr_factor: f64,
    momentum: Option<Box<MomentumConfig>>,
    weight_decay: Option<Box<WeightDecay>>,
}

impl RoutingRule {
    /// Routes matrices to Muon: parameters of two dimensions, or of more with
    /// [`MuonRoutingRule::batch`], [`MuonRoutingRule::leading`] or [`MuonRoutingRule::flatten`].
    /// AdamW updates vectors that match as well.
    pub fn muon(pattern: impl Into<String>) -> MuonRoutingRule {
        MuonRoutingRule {
            pattern: pattern.into(),
            view: MatrixView::Single,
            layout: None,
            split: None,
            side: BlockSide::Outputs,
            left: vec![],
            lr_factor: 1.0,
            momentum: None,
            weight_decay: None,
        }
    }

    /// Routes parameters to AdamW. The learning rate has the factor `embedding_lr` or `head_lr` for
    /// parameters to which the built-in rules give that role, and `vector_lr` for all others.
    pub fn adamw(pattern: impl Into<String>) -> Self {
        Self::to(pattern, Destination::AdamW)
    }

    /// Routes parameters to AdamW or Lion with settings of their own, in place of
    /// [`MuonConfig::rest`](crate::MuonConfig::rest): betas, epsilon, weight decay and the factors
    /// of roles. Roles are as for [`adamw`](Self::adamw).
    ///
    /// ```
    /// use distmuon::{AdamWConfig, MuonConfig, ParameterRole, RoutingRule};
    ///
    /// // As in nanochat: three sets of betas, and a tenth of the weight decay for values.
    /// let adamw = |beta_1, beta_2| AdamWConfig::new().with_beta_1(beta_1).with_beta_2(beta_2);
    /// let values = adamw(0.8, 0.995).with_weight_decay(0.01);
    /// let config = MuonConfig::new()
    ///     .with_adamw(adamw(0.8, 0.95))
    ///     .with_rule(RoutingRule::elementwise("", adamw(0.8, 0.96)).of_role(ParameterRole::Head))
    ///     .with_rule(RoutingRule::elementwise("value_embeds", values).lr_factor(0.5));
    /// ```
    pub fn elementwise(pattern: impl Into<String>, settings: impl Into<ElementwiseConfig>) -> Self {
        Self::to(pattern, Destination::Elementwise { settings: Box::new(settings.into()) })
    }

    /// Routes parameters of up to eight dimensions to an optimizer that
    /// [`MuonConfig::with_optimizer`](crate::MuonConfig::with_optimizer) was given under this name,
    /// which updates every parameter as a whole: see [`custom`](crate::custom). Roles and learning
    /// rates are as for [`adamw`](Self::adamw).
    pub fn custom(pattern: impl Into<String>, optimizer: impl Into<String>) -> Self {
        Self::to(pattern, Destination::Custom { optimizer: optimizer.into() })
    }

    fn to(pattern: impl Into<String>, to: Destination) -> Self {
        Self { pattern: pattern.into(), role: None, lr_factor: 1.0, to }
    }

    /// Sets a factor on the learning rate of the parameters, in addition to the factor of their
    /// role; zero or more. Of Muon's, in addition to [`lr_factor`](crate::MuonConfig::lr_factor).
    pub fn lr_factor(self, lr_factor: f64) -> Self {
        Self { lr_factor, ..self }
    }

    /// Limits the rule to parameters to which the built-in rules give a role, of whatever view: for
    /// settings of all embeddings, for example, with the expression `""`.
    pub fn of_role(self, role: ParameterRole) -> Self {
        Self { role: Some(role), ..self }
    }

    /// The name of the optimizer of the user's that the rule routes to.
    pub(crate) fn optimizer(&self) -> Option<&str> {
        match &self.to {
            Destination::Custom { optimizer } => Some(optimizer),
            Destination::Muon { .. } | Destination::AdamW | Destination::Elementwise { .. } => None,
        }
    }

    /// Fails for settings that no run can use, with averages of a precision. `of_muon` checks a
    /// momentum and a weight decay together with what all matrices have in common.
    pub(crate) fn check(
        &self,
        precision: Precision,
        of_muon: impl Fn(Option<&MomentumConfig>, Option<&WeightDecay>) -> Result<()>,
    ) -> Result<()> {
        let checked = ensure_size("lr_factor", self.lr_factor);
        let checked = checked.and_then(|()| self.to.check(precision, of_muon));
        checked.map_err(|error| error.in_field(&format!("rules (`{}`)", self.pattern)))
    }

    /// Returns `true` if the rule is for parameters of a built-in role.
    fn is_for(&self, built_in: ParameterRole) -> bool {
        // By index: with `==`, the view and the layout in the rule's role would have to fit as
        // well.
        self.role.is_none_or(|role| role.index() == built_in.index())
    }
}

impl MuonRoutingRule {
    /// Takes parameters of three or more dimensions as stacks of matrices: a matrix of the last two
    /// dimensions for every index of the others. AdamW updates parameters with fewer dimensions,
    /// such as stacked biases.
    pub fn batch(self) -> Self {
        Self { view: MatrixView::Batch, ..self }
    }

    /// Takes parameters of three or more dimensions as matrices of the first two, one for every
    /// index of the others, as for weights of frequencies: `[in, out, modes]`. AdamW updates
    /// parameters with fewer dimensions.
    pub fn leading(self) -> Self {
        Self { view: MatrixView::Leading, ..self }
    }

    /// Takes a parameter as one matrix of the first dimension by all others. Unless
    /// [`layout`](Self::layout) is called, the first dimension counts the outputs, except in Burn's
    /// transposed convolutions (`[in, out, height, width]`), where it counts the inputs.
    pub fn flatten(self) -> Self {
        Self { view: MatrixView::Flatten, ..self }
    }

    /// Takes the matrix as blocks of the given numbers of outputs, as for a fused projection of
    /// queries, keys and values, or of gates and inputs. The sizes add up to the outputs of the
    /// matrix.
    ///
    /// Every block is a matrix of its own: its momentum is orthogonalised alone, and its shape
    /// decides its learning-rate scale. The update is as for separate parameters.
    ///
    /// ```
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// // 32 heads of 64 queries, and 8 heads of 64 keys and values.
    /// let config =
    ///     MuonConfig::new().with_rule(RoutingRule::muon(r"qkv\.weight$").split([2048, 512, 512]));
    /// ```
    pub fn split(self, outputs: impl Into<Vec<usize>>) -> Self {
        Self { split: Some(Split::Sizes(outputs.into())), ..self }
    }

    /// Takes the matrix as a number of blocks of equal size, one for each head; half as many for
    /// pairs of heads. Otherwise as [`split`](Self::split).
    pub fn heads(self, count: usize) -> Self {
        Self { split: Some(Split::Equal(count)), ..self }
    }

    /// Takes the blocks of [`split`](Self::split) or [`heads`](Self::heads) along the inputs: for
    /// the output projection of an attention, whose inputs are the heads. The layout of the
    /// matrix, and with it the scales, stay as they are.
    ///
    /// ```
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// let config = MuonConfig::new()
    ///     .with_rule(RoutingRule::muon(r"(query|key|value)\.weight$").heads(8))
    ///     .with_rule(RoutingRule::muon(r"output\.weight$").heads(8).of_inputs());
    /// ```
    pub fn of_inputs(self) -> Self {
        Self { side: BlockSide::Inputs, ..self }
    }

    /// Leaves blocks of [`split`](Self::split) or [`heads`](Self::heads) to AdamW, at the learning
    /// rate of vectors, by their indices: the time steps of a state space, for example, whose fused
    /// projection is a matrix in other outputs.
    ///
    /// ```
    /// use distmuon::{MuonConfig, RoutingRule};
    ///
    /// // Gates, inputs and both state matrices are Muon's; the time steps are AdamW's.
    /// let in_proj = RoutingRule::muon(r"in_proj\.weight$").split([64, 64, 16, 16, 8]).leave([4]);
    /// let config = MuonConfig::new().with_rule(in_proj);
    /// ```
    pub fn leave(self, blocks: impl Into<Vec<usize>>) -> Self {
        Self { left: blocks.into(), ..self }
    }

    /// Sets the dimension of the matrix that counts the outputs, which Muon's learning-rate scale
    /// and parts depend on.
    pub fn layout(self, layout: MatrixLayout) -> Self {
        Self { layout: Some(layout), ..self }
    }

    /// Sets a factor on the learning rate of the matrices, in addition to
    /// [`MuonConfig::lr_factor`](crate::MuonConfig::lr_factor); zero or more.
    pub fn lr_factor(self, lr_factor: f64) -> Self {
        Self { lr_factor, ..self }
    }

    /// Sets the momentum of the matrices, in place of
    /// [`MuonConfig::momentum`](crate::MuonConfig::momentum).
    pub fn momentum(self, momentum: impl Into<MomentumConfig>) -> Self {
        Self { momentum: Some(Box::new(momentum.into())), ..self }
    }

    /// Sets the weight decay of the matrices, in place of
    /// [`MuonConfig::weight_decay`](crate::MuonConfig::weight_decay).
    pub fn weight_decay(self, weight_decay: impl Into<WeightDecay>) -> Self {
        Self { weight_decay: Some(Box::new(weight_decay.into())), ..self }
    }
}

impl From<MuonRoutingRule> for RoutingRule {
    fn from(rule: MuonRoutingRule) -> Self {
        let MuonRoutingRule { pattern, view, layout, split, side, left, .. } = rule;
        let MuonRoutingRule { lr_factor, momentum, weight_decay, .. } = rule;
        let to = Destination::Muon { view, layout, split, side, left, momentum, weight_decay };
        Self { pattern, role: None, lr_factor, to }
    }
}

impl RoutingRule {
    /// The decision about a parameter in place of the built-in one.
    fn decide(
        &self,
        found: &Found,
        built_in: &Decision<'_>,
        default: MatrixLayout,
    ) -> Decision<'_> {
        // A rule moves the parameter to AdamW, and leaves it the learning rate of its role.
        let adamw = match built_in.role {
            ParameterRole::Muon { .. } => ParameterRole::Vector,
            role @ (ParameterRole::Embedding
            | ParameterRole::Head
            | ParameterRole::Vector
            | ParameterRole::Frozen) => role,
        };
        let rest = |reason| Decision {
            role: adamw,
            optimizer: self.optimizer(),
            split: None,
            left: &[],
            own: self.own(),
            reason,
        };
        match &self.to {
            &Destination::Muon { view, layout, ref split, side, ref left, .. }
                if view.fits(&found.shape) =>
            {
                let layout = layout.unwrap_or_else(|| match view {
                    MatrixView::Flatten => flat_layout(found),
                    MatrixView::Single | MatrixView::Batch | MatrixView::Leading => default,
                });
                let overridden = match built_in.role {
                    ParameterRole::Muon { .. } => String::new(),
                    _ => format!(", overrides \"{}\"", built_in.reason),
                };
                Decision {
                    role: ParameterRole::Muon { view, layout },
                    optimizer: None,
                    split: split.as_ref().map(|split| (split, side)),
                    left,
                    own: self.own(),
                    reason: format!("rule `{}`{overridden}", self.pattern),
                }
            }
            // Its settings are for matrices.
            Destination::Muon { .. } => Decision {
                own: OwnSettings::NONE,
                ..rest(format!("rule `{}`, but not a matrix", self.pattern))
            },
            Destination::AdamW | Destination::Elementwise { .. } | Destination::Custom { .. } => {
                rest(format!("rule `{}`", self.pattern))
            }
        }
    }

    /// The settings of the parameters that the rule matches.
    fn own(&self) -> OwnSettings<'_> {
        let none = OwnSettings { lr_factor: self.lr_factor, ..OwnSettings::NONE };
        match &self.to {
            Destination::Muon { momentum, weight_decay, .. } => OwnSettings {
                momentum: momentum.as_deref(),
                weight_decay: weight_decay.as_deref(),
                ..none
            },
            Destination::Elementwise { settings } => {
                OwnSettings { elementwise: Some(settings), ..none }
            }
            Destination::AdamW | Destination::Custom { .. } => none,
        }
    }

    /// Returns the kind of parameter that the rule needs, if none of those that it matches is one.
    fn missing(&self, matches: &[&Found]) -> Option<&'static str> {
        match &self.to {
            _ if matches.is_empty() => Some("a parameter that it matches"),
            Destination::Muon { view, .. }
                if !matches.iter().any(|found| view.fits(&found.shape)) =>
            {
                Some(match view {
                    MatrixView::Batch | MatrixView::Leading => {
                        "a parameter of three or more dimensions that it matches"
                    }
                    MatrixView::Single | MatrixView::Flatten => "a matrix that it matches",
                })
            }
            Destination::Muon { .. }
            | Destination::AdamW
            | Destination::Elementwise { .. }
            | Destination::Custom { .. } => None,
        }
    }
}

/// The decision about a parameter.
pub(super) struct Decision<'a> {
    pub role: ParameterRole,
    /// The name of an optimizer of the user's that updates the parameter.
    pub optimizer: Option<&'a str>,
    /// The blocks that the parameter's matrices are cut into, and the side that is cut.
    pub split: Option<(&'a Split, BlockSide)>,
    /// The indices of the blocks that AdamW updates.
    pub left: &'a [usize],
    pub own: OwnSettings<'a>,
    pub reason: String,
}

/// The rules of a configuration, with compiled patterns.
pub(super) struct Rules<'a>(Vec<(&'a RoutingRule, Regex)>);

impl<'a> Rules<'a> {
    /// Compiles rules. Fails for patterns that are malformed, and for rules that have no effect in
    /// a model.
    pub fn compile(
        rules: &'a [RoutingRule],
        parameters: &[(&Found, ParameterRole)],
    ) -> Result<Self> {
        let compile = |rule: &'a RoutingRule| match Regex::new(&rule.pattern) {
            Ok(regex) => Ok((rule, regex)),
            Err(error) => {
                Err(Error::Pattern { pattern: rule.pattern.clone(), reason: error.to_string() })
            }
        };
        let rules = rules.iter().map(compile).collect::<Result<Vec<_>>>()?;
        for (rule, regex) in &rules {
            let matches: Vec<&Found> = parameters
                .iter()
                .filter(|(found, role)| regex.is_match(&found.path) && rule.is_for(*role))
                .map(|(found, _)| *found)
                .collect();
            // A rule with a typing error would otherwise train with the defaults, in silence.
            if let Some(expected) = rule.missing(&matches) {
                return Err(Error::UnusedRule { pattern: rule.pattern.clone(), expected });
            }
        }
        Ok(Self(rules))
    }

    /// Returns the decision of the last rule that matches a parameter.
    pub fn decide(
        &self,
        found: &Found,
        built_in: &Decision<'_>,
        layout: MatrixLayout,
    ) -> Option<Decision<'a>> {
        // The last rule that matches counts, so general rules come first.
        let (rule, _) = self
            .0
            .iter()
            .rev()
            .find(|(rule, regex)| regex.is_match(&found.path) && rule.is_for(built_in.role))?;
        Some(rule.decide(found, built_in, layout))
    }
}
