//! The factors of a step, computed on the device.

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};

use super::attention::{Attentions, Projected};
use super::logits::{ClippedHeads, NOT_FINITE};
use super::{QkClip, of_parameter};
use crate::backend::precise_dtype;
use crate::error::{Error, Result};
use crate::flat;
use crate::parameters::{self, in_place_of};

/// The factors by which a step of QK-clip scales projections, from [`QkClip::factors`] or
/// [`QkClip::factors_on`].
///
/// ```
/// use burn::nn::attention::MultiHeadAttentionConfig;
/// use burn::tensor::{Device, Tensor};
/// use distmuon::qk_clip::Factors;
/// use distmuon::{MaxLogits, QkClipConfig, QkClipRule};
///
/// let device = Device::default();
/// let model = MultiHeadAttentionConfig::new(16, 4).init(&device.clone().autodiff());
/// let clip = QkClipConfig::new().with_rule(QkClipRule::multi_head("^$", 4)).init(&model)?;
/// let mut logits = MaxLogits::new();
/// logits.report("", Tensor::<1>::from_floats([400.0, 80.0, 90.0, 100.0], &device));
/// let factors: Factors = clip.factors(&logits)?;
/// let query = factors.of("query.weight").expect("a projection").into_data().to_vec::<f32>();
/// assert!((query.unwrap()[0] - 0.5).abs() < 1e-5); // the root of 100 / 400
/// let model = factors.apply(model)?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Factors<'a> {
    clip: &'a QkClip,
    /// The factors of every rule, in the order of [`Attentions::index`].
    tables: Vec<Tensor<1>>,
    /// The maxima of all heads of all attentions.
    maxima: Tensor<1>,
}

impl<'a> Factors<'a> {
    pub(super) fn new(clip: &'a QkClip, maxima: Tensor<1>) -> Self {
        let mut first = 0;
        let tables = clip.attentions.iter().map(|attentions| {
            let range = first..first + attentions.queries();
            first = range.end;
            let gamma = gamma(flat::slice(&maxima, range), clip.tau);
            table(gamma, attentions, clip.alpha)
        });
        Self { clip, tables: tables.collect(), maxima }
    }

    /// Returns the factor of every output of a parameter, in float32: `[outputs]`, by the index of
    /// the output in the whole projection. A rank with a range of the outputs takes that range.
    /// Returns `None` for a parameter that no rule has found.
    pub fn of(&self, path: &str) -> Option<Tensor<1>> {
        self.clip.parameters.get(path).map(|projected| self.of_projected(projected))
    }

    /// The factor of every element of a parameter, flat.
    pub(crate) fn of_elements(&self, path: &str) -> Option<Tensor<1>> {
        let projected = self.clip.parameters.get(path)?;
        let factors = self.of_projected(projected);
        // A bias is a matrix of one row.
        let matrix = |shape: &[usize]| match *shape {
            [rows, columns] => [rows, columns],
            _ => [1, shape.iter().product()],
        };
        let factors = factors.reshape(matrix(&projected.broadcast));
        Some(flat::expand(factors, matrix(&projected.shape)).reshape([-1]))
    }

    fn of_projected(&self, projected: &Projected) -> Tensor<1> {
        let table = self.tables[projected.rule].clone().to_device(&projected.indices.device());
        table.select(0, projected.indices.clone())
    }

    /// Returns the model with the projections scaled. Half-precision parameters are scaled in
    /// float32 and rounded once.
    ///
    /// # Errors
    ///
    /// [`Error::QkClip`] if a parameter of a projection is missing, or has another shape than in
    /// the model that the clip was made for, as in slices; [`Error::Parameter`] for a model that
    /// is divided among ranks.
    pub fn apply<M: Module>(&self, model: M) -> Result<M> {
        parameters::ensure_whole(&model)?;
        let mut scale = Scale { factors: self, scaled: 0, error: None };
        let model = parameters::map(model, &mut scale);
        let Scale { scaled, error, .. } = scale;
        let known = self.clip.parameters.len();
        match error {
            Some(error) => Err(error),
            None if scaled == known => Ok(model),
            None => Err(Error::QkClip {
                subject: "the model".into(),
                reason: format!(
                    "it lacks parameters of projections: expected {known}, got {scaled}"
                ),
                remedy: "clip the model that `QkClipConfig::init` was given",
            }),
        }
    }

    /// Returns the heads that are clipped.
    pub fn clipped_heads(&self) -> ClippedHeads {
        let of = |attentions: &Attentions| {
            let heads = attentions.heads[0];
            attentions.paths.clone().into_iter().map(move |path| (path, heads))
        };
        ClippedHeads {
            attentions: self.clip.attentions.iter().flat_map(of).collect(),
            maxima: self.maxima.clone(),
            tau: self.clip.tau,
        }
    }
}

/// `min(1, tau / S)` for the maximum `S` of every head (Kimi K2, arXiv 2507.20534, section 2.1); 1
/// for a maximum that is not finite.
fn gamma(maxima: Tensor<1>, tau: f64) -> Tensor<1> {
    let is_below = maxima.clone().lower_equal_elem(tau);
    let is_kept = is_below.bool_or(maxima.clone().greater_equal_elem(NOT_FINITE));
    // Masked after the division: a maximum of 0 or infinity makes the quotient useless, not the
    // mask.
    (maxima.full_like(tau) / maxima).mask_fill(is_kept, 1.0)
}

/// The factors of the attentions of a rule.
///
/// A head of keys takes `min gamma^(1 - alpha)` over the heads of queries that share it: the factor
/// for the one with the largest logit. Each head of queries takes the rest of its gamma, so that
/// its logits are scaled by exactly that: `gamma^alpha`, and what the keys took from it for another
/// head, `(gamma / min gamma)^(1 - alpha)`, which is 1 in a group of one head.
///
/// The rotary part of a latent query meets a key that is shared by all heads and keeps its values:
/// it takes all of gamma (Kimi K2, section 2.1).
fn table(gamma: Tensor<1>, attentions: &Attentions, alpha: f64) -> Tensor<1> {
    let [queries, keys] = attentions.heads;
    let groups = [attentions.paths.len() * keys, queries / keys];
    let grouped = gamma.clone().reshape(groups);
    // A head of keys serves several heads of queries: it takes the factor of the largest logit, and
    // each head of queries the rest of its own.
    let least = grouped.clone().min_dim(1);
    let taken = flat::expand(least.clone(), groups);
    let query = power(grouped.clone(), alpha) * power(grouped / taken, 1.0 - alpha);
    let key = power(least, 1.0 - alpha);
    let one = Tensor::ones([1], (&gamma.device(), DType::F32));
    Tensor::cat(vec![one, query.reshape([-1]), key.reshape([-1]), gamma], 0)
}

/// A power, exactly 1 for 1: the logarithm in the power of some devices is not exactly 0.
fn power(base: Tensor<2>, exponent: f64) -> Tensor<2> {
    // A logarithm and an exponential may miss 1 by a bit, and would then change heads that are not
    // clipped.
    let is_one = base.clone().equal_elem(1.0);
    base.powf_scalar(exponent).mask_fill(is_one, 1.0)
}

/// A walk that scales the parameters of projections.
struct Scale<'a> {
    factors: &'a Factors<'a>,
    scaled: usize,
    error: Option<Error>,
}

impl parameters::Map for Scale<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(projected) = self.factors.clip.parameters.get(path) else { return param };
        self.scaled += 1;
        let shape = param.val().dims();
        if shape[..] != projected.shape {
            self.error.get_or_insert(of_parameter(path, &projected.shape, &shape));
            return param;
        }
        let factors = self.factors.of_projected(projected);
        param.map(|value| {
            let dtype = value.dtype();
            let broadcast = projected.broadcast.as_slice().try_into();
            let broadcast: [usize; D] = broadcast.expect("the parameter has its shape of `init`");
            let factors = factors.to_device(&value.device().inner()).reshape(broadcast);
            let precise = precise_dtype(dtype);
            // In float32: half precision would round the factor as well.
            let scaled = value.clone().inner().cast(precise) * factors.cast(precise);
            in_place_of(&value, scaled.cast(dtype))
        })
    }
}
