//! Norms of the last step by parameter and by group, on request.

use std::collections::{HashMap, HashSet};
use std::fmt;

use burn::tensor::Tensor;
use comfy_table::{Table, presets};
use serde::{Deserialize, Serialize};

use super::DistModuleOptimizer;
use super::decisions::StepInputs;
use super::divided_model::DividedModel;
use crate::comm::ReduceOp;
use crate::distributed::trainable::UpdateKind;
use crate::error::Result;
use crate::qk_clip::{ClippedAttention, ClippedHeads};
use crate::update::{Observations, SUMS};

/// The observation of steps, on request.
#[derive(Default)]
pub struct Observing {
    /// `true` if the next step is to be observed.
    pub requested: bool,
    /// The observations of the last step that was.
    observed: Option<Observed>,
}

/// The requested observations of a step.
struct Observed {
    /// The sums of all parameters over this rank's parts.
    sums: Tensor<1>,
    /// The learning rates of the step.
    lrs: Vec<f64>,
    /// The heads that the step has clipped.
    heads: Option<ClippedHeads>,
}

/// The norms of a step, from
/// [`DistModuleOptimizer::diagnostics`](super::DistModuleOptimizer::diagnostics). Prints as a table
/// of groups.
///
/// ```
/// use distmuon::distributed::{Diagnostics, ParameterDiagnostics};
///
/// /// The parameter that the step has changed most, relative to its norm.
/// fn fastest(diagnostics: &Diagnostics) -> Option<&ParameterDiagnostics> {
///     let parameters = diagnostics.parameters.iter();
///     parameters.max_by(|a, b| a.effective_lr().total_cmp(&b.effective_lr()))
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Diagnostics {
    /// Every trained parameter, in the order of the model. A matrix that is cut into blocks has one
    /// entry for each.
    pub parameters: Vec<ParameterDiagnostics>,
    /// The attentions that were passed to [`clip_heads`](super::DistModuleOptimizer::clip_heads),
    /// if it was called: the step could clip their heads.
    pub attentions: Vec<ClippedAttention>,
}

/// The norms of one parameter in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParameterDiagnostics {
    /// The path of the parameter, with the range of a block.
    pub path: String,
    /// The name of its optimizer, as in [`ParameterRoute::optimizer`](crate::ParameterRoute).
    pub group: String,
    /// The learning rate of the step, times the scale of the shape or the factor of the role.
    pub lr: f64,
    /// The Frobenius norm of the change of the parameter, with weight decay. Master weights count
    /// where there are any.
    pub update_norm: f64,
    /// The Frobenius norm of the parameter after the step.
    pub weight_norm: f64,
    /// The root of the mean square of `s^2 - 1` over the singular values `s` of the matrices that
    /// the iteration returned. It is 0 for orthogonal matrices, about 0.1 to 0.3 for most
    /// coefficients, and up to 1 for gradients of low rank. `None` without an iteration.
    pub orthogonality_error: Option<f64>,
    /// The number of steps so far that left the parameter untouched.
    pub skipped: u64,
}

/// The norms of the parameters of one group in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupDiagnostics {
    /// The name of the optimizer.
    pub group: String,
    /// The number of parameters.
    pub tensors: usize,
    /// The largest learning rate.
    pub lr: f64,
    /// The norm of the change of all parameters.
    pub update_norm: f64,
    /// The norm of all parameters.
    pub weight_norm: f64,
    /// The largest error of a parameter.
    pub orthogonality_error: Option<f64>,
    /// The sum of the skipped steps of all parameters.
    pub skipped: u64,
    /// The number of clipped heads of the attentions that have parameters in the group; `None`
    /// without such an attention.
    pub clipped_heads: Option<usize>,
    /// The number of their heads whose maximum logit was not finite, which are not clipped.
    pub not_finite_heads: Option<usize>,
    /// The largest logit of their heads whose maximum was finite.
    pub max_logit: Option<f32>,
}

/// The norm of a change relative to the values' norm.
fn effective_lr(update: f64, weight: f64) -> f64 {
    if weight == 0.0 { 0.0 } else { update / weight }
}

impl ParameterDiagnostics {
    /// Returns the effective learning rate: the norm of the change relative to the norm of the
    /// parameter. Where weights keep their norm, it is the angle of a step (Kosson et al.,
    /// <https://arxiv.org/abs/2305.17212>). 0 for a parameter of zeros.
    pub fn effective_lr(&self) -> f64 {
        effective_lr(self.update_norm, self.weight_norm)
    }
}

impl GroupDiagnostics {
    /// Returns the effective learning rate of the group: see
    /// [`ParameterDiagnostics::effective_lr`].
    pub fn effective_lr(&self) -> f64 {
        effective_lr(self.update_norm, self.weight_norm)
    }

    fn add(&mut self, parameter: &ParameterDiagnostics) {
        self.tensors += 1;
        self.lr = self.lr.max(parameter.lr);
        // Squares of norms add up; `hypot` keeps them from overflowing.
        self.update_norm = self.update_norm.hypot(parameter.update_norm);
        self.weight_norm = self.weight_norm.hypot(parameter.weight_norm);
        let errors = self.orthogonality_error.into_iter().chain(parameter.orthogonality_error);
        self.orthogonality_error = errors.reduce(f64::max);
        self.skipped += parameter.skipped;
    }

    fn add_attention(&mut self, attention: &ClippedAttention) {
        *self.clipped_heads.get_or_insert(0) += attention.clipped;
        *self.not_finite_heads.get_or_insert(0) += attention.not_finite;
        let maxima = self.max_logit.into_iter().chain(attention.max_logit);
        self.max_logit = maxima.reduce(f32::max);
    }
}

impl Diagnostics {
    /// Returns the norms by group, in the order of the first parameter of each.
    pub fn groups(&self) -> Vec<GroupDiagnostics> {
        let mut groups: Vec<GroupDiagnostics> = vec![];
        for parameter in &self.parameters {
            let known = groups.iter().position(|group| group.group == parameter.group);
            let index = known.unwrap_or_else(|| {
                groups.push(GroupDiagnostics {
                    group: parameter.group.clone(),
                    tensors: 0,
                    lr: 0.0,
                    update_norm: 0.0,
                    weight_norm: 0.0,
                    orthogonality_error: None,
                    skipped: 0,
                    clipped_heads: None,
                    not_finite_heads: None,
                    max_logit: None,
                });
                groups.len() - 1
            });
            groups[index].add(parameter);
        }
        for attention in &self.attentions {
            let parameters = self.parameters.iter();
            let within = parameters.filter(|each| is_within(&each.path, &attention.path));
            let names: HashSet<&str> = within.map(|each| &*each.group).collect();
            let groups = groups.iter_mut().filter(|group| names.contains(&*group.group));
            groups.for_each(|group| group.add_attention(attention));
        }
        groups
    }
}

/// Returns `true` for the path of a parameter of a module. The path of the whole model is empty.
fn is_within(path: &str, module: &str) -> bool {
    let rest = path.strip_prefix(module);
    module.is_empty() || rest.is_some_and(|rest| rest.starts_with('.'))
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let columns = ["group", "lr", "update", "weight", "effective lr", "error", "skipped"];
        table.set_header(columns.into_iter().chain(["clipped heads"]));
        for group in self.groups() {
            let norms = [group.lr, group.update_norm, group.weight_norm, group.effective_lr()];
            let [lr, update, weight, effective] = norms.map(|norm| format!("{norm:.2e}"));
            let error = group.orthogonality_error.map_or("-".into(), |error| format!("{error:.3}"));
            let skipped = group.skipped.to_string();
            let heads = group.clipped_heads.map_or("-".into(), |heads| heads.to_string());
            table.add_row([group.group, lr, update, weight, effective, error, skipped, heads]);
        }
        write!(f, "{table}")
    }
}

impl DistModuleOptimizer {
    /// Requests the [`diagnostics`](Self::diagnostics) of the next step. All ranks make this call;
    /// otherwise the step fails with [`Error::SettingsDiffer`](crate::Error::SettingsDiffer).
    ///
    /// That step computes norms of every parameter, with a second reference to its old values, and
    /// a product for every matrix. Of parameters in slices, it also sends the values to the owners.
    /// It reads nothing back.
    pub fn request_diagnostics(&mut self) {
        self.observing.requested = true;
    }

    /// Returns the norms of the step for which they were
    /// [requested](Self::request_diagnostics), or `None` if no step was taken since. All ranks make
    /// this call, and get the same. It takes one message, and waits for the device once.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::{Device, Tensor};
    /// use distmuon::MuonConfig;
    ///
    /// let device = Device::default().autodiff();
    /// let model = LinearConfig::new(64, 256).init(&device);
    /// let mut optim = MuonConfig::new().init_batched(&model)?;
    /// let loss = model.forward(Tensor::<2>::ones([8, 64], &device)).square().mean();
    /// let grads = GradientsParams::from_grads(loss.backward(), &model);
    /// optim.request_diagnostics();
    /// let model = optim.step(1e-3, model, grads)?;
    /// println!("{}", optim.diagnostics()?.expect("the step was observed"));
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn diagnostics(&mut self) -> Result<Option<Diagnostics>> {
        let Some(observed) = self.observing.observed.take() else { return Ok(None) };
        observed.diagnostics(&self.divided, &self.accounts.counters.skipped).map(Some)
    }
}

impl Observed {
    /// The norms of the step, with the counts of skipped steps.
    fn diagnostics(self, divided: &DividedModel, skipped: &Tensor<1>) -> Result<Diagnostics> {
        let Self { sums, lrs, heads } = self;
        let parameters = divided.trainable.len();
        let sums = divided.world.comm().all_reduce(sums, ReduceOp::Sum)?.wait()?;
        let maxima = heads.as_ref().map(|heads| heads.maxima().to_device(&divided.device()));
        let counts = skipped.clone();
        // As one tensor, for which the host waits once.
        let read = Tensor::cat([sums, counts].into_iter().chain(maxima).collect(), 0).into_data();
        let read: Vec<f64> = read.iter::<f64>().collect();
        let (sums, read) = read.split_at(SUMS * parameters);
        let (skipped, maxima) = read.split_at(parameters);
        let maxima: Vec<f32> = maxima.iter().map(|maximum| *maximum as f32).collect();
        let attentions = heads.map_or(vec![], |heads| heads.of_maxima(&maxima));
        let routes = divided.routing.routes().iter();
        let groups: HashMap<&str, &str> =
            routes.map(|route| (&*route.path, &*route.optimizer)).collect();
        let each = divided.trainable.iter().zip(lrs).zip(sums.chunks_exact(SUMS)).zip(skipped);
        let parameters = each.map(|(((parameter, lr), sums), skipped)| ParameterDiagnostics {
            path: parameter.path.clone(),
            group: groups[&*divided.parameters[parameter.model].path].to_owned(),
            lr,
            update_norm: sums[0].sqrt(),
            weight_norm: sums[1].sqrt(),
            orthogonality_error: match parameter.kind {
                UpdateKind::Muon { count, .. } => Some((sums[2] / count as f64).sqrt()),
                UpdateKind::Elementwise { .. } | UpdateKind::Whole { .. } => None,
            },
            skipped: *skipped as u64,
        });
        Ok(Diagnostics { parameters: parameters.collect(), attentions })
    }
}

impl Observing {
    /// Keeps the observations of a step.
    pub fn keep(
        &mut self,
        observations: Observations,
        inputs: &StepInputs,
        divided: &DividedModel,
    ) {
        let sums = observations.sums(divided.trainable.len(), &divided.device());
        let lrs = inputs.sizes.iter().map(|size| size.lr).collect();
        let heads = inputs.head_clip.as_ref().map(|clip| clip.heads.clone());
        self.observed = Some(Observed { sums, lrs, heads });
        self.requested = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(path: &str, group: &str) -> ParameterDiagnostics {
        ParameterDiagnostics {
            path: path.into(),
            group: group.into(),
            lr: 0.1,
            update_norm: 3.0,
            weight_norm: 4.0,
            orthogonality_error: None,
            skipped: 0,
        }
    }

    fn attention(path: &str, clipped: usize, max_logit: Option<f32>) -> ClippedAttention {
        ClippedAttention { path: path.into(), max_logit, clipped, not_finite: 1 }
    }

    #[test]
    fn attentions_count_in_the_groups_of_their_parameters() {
        let parameters = vec![
            parameter("blocks.1.attention.query.weight", "Muon"),
            parameter("blocks.1.attention.query.bias", "AdamW (vector)"),
            parameter("blocks.10.attention.query.weight", "Muon"),
            parameter("blocks.1.attention_norm.gamma", "AdamW (norm)"),
        ];
        let attentions = vec![
            attention("blocks.1.attention", 2, Some(7.0)),
            attention("blocks.10.attention", 1, None),
        ];
        let diagnostics = Diagnostics { parameters, attentions };
        let found: Vec<_> = diagnostics
            .groups()
            .into_iter()
            .map(|group| (group.clipped_heads, group.not_finite_heads, group.max_logit))
            .collect();
        let expected =
            [(Some(3), Some(2), Some(7.0)), (Some(2), Some(1), Some(7.0)), (None, None, None)];
        assert_eq!(found, expected);
        let json = serde_json::to_string(&diagnostics).unwrap();
        assert_eq!(serde_json::from_str::<Diagnostics>(&json).unwrap(), diagnostics);
    }
}
