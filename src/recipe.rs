//! Recipes: the settings with which others train by Muon, with their sources.
//!
//! A [`Recipe`] has the settings of the optimizer ([`MuonConfig::preset`]), the learning rate of
//! the source ([`Recipe::peak_lr`]) and its schedule ([`Recipe::lr`]). The guide compares them:
//! [Recipes](crate::guide::recipes).
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Device};
//! use distmuon::{MuonConfig, Recipe};
//!
//! let model = LinearConfig::new(64, 256).init(&Device::default().autodiff());
//! let (recipe, steps) = (Recipe::Nanochat, 2_000);
//! let optim = MuonConfig::preset(recipe, steps).init_batched(&model)?;
//! let lr = recipe.lr(recipe.peak_lr(), steps);
//! assert_eq!(lr.at(100), 0.02);
//! # Ok::<(), distmuon::Error>(())
//! ```

use serde::{Deserialize, Serialize};

use crate::elementwise::AdamWConfig;
use crate::muon::MuonConfig;
use crate::orthogonalize::{Coefficients, NewtonSchulzConfig};
use crate::qk_clip::QkClipConfig;
use crate::routing::RoutingRule;
use crate::schedule::{Schedule, risen, then_down};
use crate::update::parts::{NorMuon, Renormalization, RowEquilibration};
use crate::update::{LrScale, MomentumConfig, MomentumForm, WeightDecay};

/// Fraction of a run that the warm-ups of [`Recipe::Moonlight`], [`Recipe::KimiK2`] and
/// [`Recipe::DeepSeekV4`], and the extension of [`Recipe::ModdedNanogpt`], take at most. The runs
/// of the sources are far longer.
const LONGEST_WARMUP: f64 = 0.05;

/// nanochat's weight decay at the first step, for batches of 2^19 tokens: `--weight-decay`.
pub(crate) const NANOCHAT_DECAY: f64 = 0.28;

/// Settings with which others train by Muon, as their sources had them at a [`date`](Self::date).
///
/// | recipe | coefficients | momentum | weight decay | scale | peak rate | further parts |
/// |---|---|---|---|---|---|---|
/// | `Torch` | Keller Jordan, 5 | 0.95, Nesterov | 0.1 | `Original` | 1e-3 | |
/// | `KellerJordan` | Keller Jordan, 5 | 0.95, Nesterov | 0 | `Original` | 2e-2 | |
/// | `Moonlight` | Keller Jordan, 5 | 0.95, Nesterov, sum | 0.1 | `MatchRmsAdamW` | 1e-3 | |
/// | `Nanochat` | Polar Express, 5 | 0.85 to 0.97 to 0.90, Nesterov | 0.28 to 0, cautious | `Original` | 2e-2 | row equilibration, renormalisation, NorMuon 0.9 |
/// | `ModdedNanogpt` | Polar Express, 5 | 0.85 to 0.95 to 0.85, Nesterov | 1.2 times the rate, cautious | `Original` | 2.3e-2 | NorMuon 0.9 |
/// | `KimiK2` | Keller Jordan, 5 | 0.95, sum | 0.1 | `MatchRmsAdamW` | 2e-4 | |
/// | `DeepSeekV4` | DeepSeek-V4, 10 | 0.95, Nesterov, sum | 0.1 | 0.9 `MatchRmsAdamW` | 2e-4 | |
/// | `Motif` | Polar Express from 1e-3, 10 | 0.95, Nesterov, sum | 0.1 | `MatchRmsAdamW` | 1e-3 | |
/// | `Track3` | (2, -1.5, 0.5), 12 | 0.95, Nesterov | 0.05 | `Original` | 2.5e-2 | |
/// | `KimiK3` | Keller Jordan, 5 | 0.95, sum | 0.1 | `MatchRmsAdamW` | 2e-4 | heads |
/// | `Glm5` | Keller Jordan, 5 | 0.95, sum | 0.1 | `MatchRmsAdamW` | 2e-4 | heads |
///
/// Recipes with heads orthogonalise projections of attention head by head: see
/// [`per_head`](Self::per_head).
///
/// [`Torch`](Self::Torch) divides a matrix by the larger of its norm and 1e-7, as all recipes do
/// with the number of their source ([`NewtonSchulzConfig::epsilon`]): 1e-7, or 1e-6 in `Nanochat`
/// and `ModdedNanogpt`. The other sources add that number to the norm. What they iterate on is then
/// half as large where the norm has this size, and one per cent smaller at a hundred times of it.
/// Kimi K2's recipes and `Motif` have [`Moonlight`](Self::Moonlight)'s number, and `DeepSeekV4` the
/// crate's default, since no account of its report has one. The sources iterate in bfloat16; here
/// [`IterationDtype::Auto`](crate::IterationDtype::Auto) chooses the type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Recipe {
    /// The defaults of `torch.optim.Muon`, and for all other parameters the defaults of
    /// `torch.optim.AdamW` (<https://github.com/pytorch/pytorch/blob/098e03f/torch/optim/_muon.py>).
    ///
    /// Exact, but for the type of the iteration, which is bfloat16 in the source. The learning rate
    /// is constant, since the source leaves its schedule to the program.
    Torch,
    /// The defaults of `MuonWithAuxAdam`, the original Muon
    /// (<https://github.com/KellerJordan/Muon/blob/857d1ad/muon.py>).
    ///
    /// AdamW's parameters have 0.015 times the rate of matrices (3e-4 to 0.02). The learning rate
    /// is constant, since the source leaves its schedule to the program. What differs: the source
    /// adds 1e-7 to the norm, and iterates in bfloat16 only.
    KellerJordan,
    /// The small example program of Moonlight
    /// (<https://github.com/MoonshotAI/Moonlight/blob/c2ad5b2/examples/toy_train.py>; Liu et al.,
    /// <https://arxiv.org/abs/2502.16982>), which trains a small Qwen on OpenWebText. The paper's
    /// own runs have other rates.
    ///
    /// The rate of the first step is zero, as the source's scheduler has it. The warm-up has 100
    /// steps in the source, and here a twentieth of the run if that is less. Then the rate falls
    /// along a cosine, which would be zero at the step after the run. The source's AdamW adds
    /// epsilon before it corrects the bias, and its Muon adds 1e-7 to the norm.
    Moonlight,
    /// The base model of nanochat
    /// (<https://github.com/karpathy/nanochat/blob/92d63d4/scripts/base_train.py>, `optim.py` and
    /// `gpt.py`), for batches of 2^19 tokens.
    ///
    /// Momentum, weight decay and learning rate follow the formulas of the source at every step.
    /// The source divides a matrix by 1.01 times its norm: here the first polynomial does. So no
    /// restarts are exact enough for the Gram form in bfloat16, and the standard form runs, as in
    /// the source. What differs:
    ///
    /// - the source's value embeddings have half the rate of the token embedding, and a decay of
    ///   0.01 in place of 0.001;
    /// - the mixing weights of the source's residual stream have rates and betas of their own
    ///   (`x0_lambdas` 0.5 and betas of 0.96 and 0.95, `smear` and `backout` 0.2);
    /// - the source equilibrates rows and renormalises with floors of 1e-6, here 1e-15 of the
    ///   largest element, and 1e-10; it iterates in bfloat16 only, and refuses float16 as unstable,
    ///   which [`IterationDtype::Auto`](crate::IterationDtype::Auto) takes first;
    /// - vectors have the rate of the source's `resid_lambdas`, since its norms have no weights;
    /// - the source multiplies the rates of embeddings and head by `sqrt(768 / width)`, and all
    ///   rates and the decay by factors for other batches: [`Dial`](crate::Dial) has these rules.
    Nanochat,
    /// The speed run of modded-nanogpt
    /// (<https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d/train_gpt.py>).
    ///
    /// The momentum follows the formula of the source at every step. The source divides a matrix by
    /// 1.02 times its norm: here the first polynomial does, as for [`Nanochat`](Self::Nanochat).
    /// What differs:
    ///
    /// - the source orthogonalises queries and keys by pairs of heads, here whole: add the rule of
    ///   [`per_head`](Self::per_head);
    /// - the last 15 steps keep the last rate, as the source's extension, and a twentieth of the
    ///   run if that is less;
    /// - the value and bigram embeddings of the source have 75 times the rate of the others, five
    ///   times the decay, and betas of 0.75 and 0.95; its gates have settings of their own;
    /// - the source's AdamW adds epsilon before it corrects the bias, and its cautious decay leaves
    ///   out products of zero;
    /// - the decay of a matrix is 1.2 times the rate in the source. Here it is 1.2 times the
    ///   schedule [`Recipe::lr`] at the peak of the source, whichever peak is used;
    /// - AdamW's decay is a constant 0.006. The source has a cautious decay with this peak, which
    ///   falls with the square of the rate;
    /// - the source updates AdamW's parameters at every other step, with the sum of two gradients;
    /// - it multiplies the rate of the output matrices of its MLPs by four, and all rates by 1.52
    ///   and 1.73 where its batch doubles and triples.
    ModdedNanogpt,
    /// Kimi K2 (section 2 of its report, <https://arxiv.org/abs/2507.20534>).
    ///
    /// QK-clip acts on attention logits and weights, and is not part of an optimizer's update:
    /// [`qk_clip`](Self::qk_clip) returns it, a limit of 100 and equal exponents, to which rules
    /// for the attentions are added. Momentum, coefficients and
    /// AdamW's settings are as for [`Moonlight`](Self::Moonlight), whose optimizer the report
    /// builds on. The algorithm of the report has no Nesterov. The warm-up has 500 steps in the
    /// source, and here a twentieth of the run if that is less. The rate is constant for 10 of 15.5
    /// parts, then falls along a cosine to a tenth. The report's last anneal, from 2e-5 to 7e-6 on
    /// further tokens, is [`anneal`](Self::anneal).
    KimiK2,
    /// DeepSeek-V4-Pro (sections 2.4 and 4.2.2 of its report,
    /// <https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro>), as quoted by
    /// <https://github.com/microsoft/dion/pull/67> and
    /// <https://github.com/AMD-AGI/Primus/pull/729>.
    ///
    /// Updates have a root mean square of 0.18, that is 0.9 times [`LrScale::MatchRmsAdamW`]. The
    /// rate falls from 2e-4 to 2e-5. The report itself was not at hand. The quotations do not
    /// confirm the betas of AdamW (0.9 and 0.95), nor the warm-up of 2000 steps, or a twentieth of
    /// the run if that is less. The cosine over the last fifth of the run is a choice of this
    /// crate.
    ///
    /// Its ten steps multiply small singular values by up to 8e4, which brings the rounding errors
    /// of half precision up with them. In a simulation where half of a spectrum is zero, the error
    /// to the exact polar factor was 0.975 in bfloat16 and 0.823 in float16. The zeros themselves
    /// are 0.707 of it. For momentum of low rank, choose
    /// [`IterationDtype::F32`](crate::IterationDtype::F32).
    #[serde(rename = "deepseek-v4")]
    DeepSeekV4,
    /// Motif's optimizer (<https://huggingface.co/Motif-Technologies/optimizer>), whose description
    /// was read in November 2026: ten steps of Polar Express from singular values of 1e-3, which
    /// give the exact polar factor.
    ///
    /// The description has no other constants, and the program itself was not at hand: momentum,
    /// decay, scale, rate and AdamW's settings are [`Moonlight`](Self::Moonlight)'s, and not
    /// confirmed. The learning rate is constant, since the source leaves its schedule to the
    /// program.
    Motif,
    /// The tuned baseline of modded-nanogpt's third track, which counts steps on a fixed model and
    /// batch: result 36 of its records
    /// (<https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d/records/track_3_optimization/train_gpt_simple.py>).
    ///
    /// Twelve steps of one polynomial give the exact polar factor. The rate is constant for three
    /// tenths of the run, then falls in a straight line, which would be zero at the step after it.
    /// AdamW decays all of its parameters, vectors included. What differs: the source adds 1e-7 to
    /// the norm, and iterates in bfloat16 only.
    #[serde(rename = "track-3")]
    Track3,
    /// Kimi K3 (section 2.5 of its report, <https://arxiv.org/abs/2607.24653>): Kimi K2's settings,
    /// with projections of attention by heads ([`per_head`](Self::per_head)).
    ///
    /// The report itself was not at hand. That Muon works by heads was read in accounts of it; all
    /// other settings are [`KimiK2`](Self::KimiK2)'s, its QK-clip included, and not confirmed. Nor
    /// are the projections that are split.
    #[serde(rename = "kimi-k3")]
    KimiK3,
    /// GLM-5 (<https://arxiv.org/abs/2602.15763>): Muon Split, which orthogonalises the
    /// up-projections of latent attention by heads ([`per_head`](Self::per_head)).
    ///
    /// The report itself was not at hand. Muon Split was read in accounts of it; all other settings
    /// are [`KimiK2`](Self::KimiK2)'s without its QK-clip, and not confirmed.
    #[serde(rename = "glm-5")]
    Glm5,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Self; 11] = [
        Self::Torch,
        Self::KellerJordan,
        Self::Moonlight,
        Self::Nanochat,
        Self::ModdedNanogpt,
        Self::KimiK2,
        Self::DeepSeekV4,
        Self::Motif,
        Self::Track3,
        Self::KimiK3,
        Self::Glm5,
    ];

    /// Returns the name of the recipe, such as `modded-nanogpt`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::KellerJordan => "keller-jordan",
            Self::Moonlight => "moonlight",
            Self::Nanochat => "nanochat",
            Self::ModdedNanogpt => "modded-nanogpt",
            Self::KimiK2 => "kimi-k2",
            Self::DeepSeekV4 => "deepseek-v4",
            Self::Motif => "motif",
            Self::Track3 => "track-3",
            Self::KimiK3 => "kimi-k3",
            Self::Glm5 => "glm-5",
        }
    }

    /// Returns the recipe with a name, or `None` if there is none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|recipe| recipe.name() == name)
    }

    /// Returns the address of the source, in the [`version`](Self::version) that was read.
    pub fn source(self) -> &'static str {
        match self {
            Self::Torch => "https://github.com/pytorch/pytorch/blob/098e03f/torch/optim/_muon.py",
            Self::KellerJordan => "https://github.com/KellerJordan/Muon/blob/857d1ad/muon.py",
            Self::Moonlight => {
                "https://github.com/MoonshotAI/Moonlight/blob/c2ad5b2/examples/toy_train.py"
            }
            Self::Nanochat => {
                "https://github.com/karpathy/nanochat/blob/92d63d4/scripts/base_train.py"
            }
            Self::ModdedNanogpt => {
                "https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d/train_gpt.py"
            }
            Self::KimiK2 => "https://arxiv.org/abs/2507.20534",
            Self::DeepSeekV4 => "https://huggingface.co/deepseek-ai/DeepSeek-V4-Pro",
            Self::Motif => "https://huggingface.co/Motif-Technologies/optimizer",
            Self::Track3 => {
                "https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d/records/\
                 track_3_optimization/train_gpt_simple.py"
            }
            Self::KimiK3 => "https://arxiv.org/abs/2607.24653",
            Self::Glm5 => "https://arxiv.org/abs/2602.15763",
        }
    }

    /// Returns the version of the source whose constants these are: a commit, or the number of a
    /// report.
    pub fn version(self) -> &'static str {
        match self {
            Self::Torch => "098e03f",
            Self::KellerJordan => "857d1ad",
            Self::Moonlight => "c2ad5b2",
            Self::Nanochat => "92d63d4",
            Self::ModdedNanogpt | Self::Track3 => "f411b3d",
            Self::KimiK2 => "arXiv 2507.20534",
            Self::DeepSeekV4 => "quoted",
            Self::Motif => "described",
            Self::KimiK3 => "arXiv 2607.24653",
            Self::Glm5 => "arXiv 2602.15763",
        }
    }

    /// Returns the date of that version, of the record that it has, or the month of the report; for
    /// a source without any, the month in which it was read.
    pub fn date(self) -> &'static str {
        match self {
            Self::Torch | Self::DeepSeekV4 => "2026-08",
            Self::KellerJordan => "2025-11-23",
            Self::Moonlight => "2025-08-02",
            Self::Nanochat => "2026-07-03",
            Self::ModdedNanogpt => "2026-08-01",
            Self::KimiK2 => "2025-07",
            Self::Motif => "2026-11",
            Self::Track3 => "2026-06-11",
            Self::KimiK3 => "2026-07",
            Self::Glm5 => "2026-02",
        }
    }

    /// Returns the rule by which the recipe orthogonalises projections of attention, whose paths
    /// match a pattern, in blocks of heads; `None` for a recipe that takes them whole.
    ///
    /// `Recipe::ModdedNanogpt` takes queries and keys in pairs of heads, which is why it needs an
    /// even number of them, `Recipe::Glm5` the up-projections of latent attention by single heads,
    /// and `Recipe::KimiK3` projections by single heads. A number of heads that does not divide a
    /// projection is an error of [`MuonConfig::route`].
    ///
    /// ```
    /// use distmuon::{MuonConfig, Recipe};
    ///
    /// let (recipe, heads) = (Recipe::Glm5, 64);
    /// let config = MuonConfig::preset(recipe, 2_000);
    /// let rule = recipe.per_head("(q_b|kv_b)_proj", heads);
    /// let config = rule.into_iter().fold(config, MuonConfig::with_rule);
    /// ```
    pub fn per_head(self, projections: &str, heads: usize) -> Option<RoutingRule> {
        let blocks = match self {
            Self::ModdedNanogpt => heads.div_ceil(2),
            Self::KimiK3 | Self::Glm5 => heads,
            _ => return None,
        };
        Some(RoutingRule::muon(projections).heads(blocks).into())
    }

    /// Returns the learning rate of a final anneal of `steps` steps, which continues a run whose
    /// peak was `peak`; `None` for a recipe without one.
    ///
    /// `Recipe::KimiK2` falls from a tenth of the peak to 0.035 of it (2e-5 to 7e-6 in its report).
    /// The straight line is a choice of this crate: the report does not name the curve.
    pub fn anneal(self, peak: f64, steps: usize) -> Option<Schedule> {
        let falls = self == Self::KimiK2;
        falls.then(|| Schedule::constant(0.1 * peak).linear(steps, 7e-6 / 2e-4 * peak))
    }

    /// Returns the peak learning rate of matrices in the source. The rates of all other parameters
    /// are factors on it in [`AdamWConfig`].
    pub fn peak_lr(self) -> f64 {
        match self {
            Self::Torch | Self::Moonlight | Self::Motif => 1e-3,
            Self::KellerJordan | Self::Nanochat => 0.02,
            Self::ModdedNanogpt => 0.023,
            Self::KimiK2 | Self::DeepSeekV4 | Self::KimiK3 | Self::Glm5 => 2e-4,
            Self::Track3 => 0.025,
        }
    }

    /// Returns the learning rate over a run of `steps` steps with a peak of `peak`.
    pub fn lr(self, peak: f64, steps: usize) -> Schedule {
        let warmup = |warmup: usize| warmup.min((LONGEST_WARMUP * steps as f64) as usize);
        match self {
            Self::Torch | Self::KellerJordan | Self::Motif => Schedule::constant(peak),
            Self::Moonlight => {
                // As `get_cosine_schedule_with_warmup` of the library transformers.
                let warmup = warmup(100);
                let risen = match warmup {
                    0 => Schedule::constant(peak),
                    _ => risen(0.0, peak, warmup),
                };
                // The peak is at step `warmup`, so that the cosine ends one step after the run.
                risen.linear(1, peak).cosine(steps - warmup, 0.0)
            }
            // `get_lr_multiplier` of `base_train.py`.
            Self::Nanochat => {
                let warmdown = nanochat_warmdown(steps);
                let warmup = Schedule::constant(0.0).linear(40, peak);
                then_down(warmup, 40, steps, warmdown, [peak, 0.05 * peak])
            }
            // `TrainingSchedule.get_lr` of `train_gpt.py`, without the factors of its stages.
            Self::ModdedNanogpt => {
                // `num_extension_iterations`, in which the rate stays.
                let scheduled = steps - warmup(15);
                let start = (0.4 * scheduled as f64) as usize;
                let down = scheduled - start;
                then_down(Schedule::constant(peak), 0, scheduled, down, [peak, 0.15 * peak])
            }
            // `set_hparams` of `train_gpt_simple.py`.
            Self::Track3 => {
                let start = (0.3 * steps as f64).ceil() as usize;
                // The line starts at three tenths, which may lie between two steps.
                let reached = peak * (steps - start) as f64 / (0.7 * steps as f64);
                let held = Schedule::constant(peak).hold(start);
                // A run of one step never reaches the line.
                if start == steps {
                    return held.linear(1, 0.0);
                }
                held.linear(1, reached).linear(steps - start, 0.0)
            }
            Self::KimiK2 | Self::KimiK3 | Self::Glm5 => {
                let warmup = warmup(500);
                // The report counts in tokens: 10 of 15.5 trillion.
                held_then_cosine(peak, warmup, (10.0 / 15.5 * steps as f64) as usize, steps)
            }
            Self::DeepSeekV4 => {
                let warmup = warmup(2_000);
                held_then_cosine(peak, warmup, (0.8 * steps as f64) as usize, steps)
            }
        }
    }

    /// Returns QK-clip as the recipe has it, to which rules for the attentions are added; `None`
    /// for a recipe without.
    pub fn qk_clip(self) -> Option<QkClipConfig> {
        // By default, it is as in Kimi K2's report.
        matches!(self, Self::KimiK2 | Self::KimiK3).then(QkClipConfig::new)
    }

    /// The steps of the iteration, if the coefficients do not decide.
    fn iterations(self) -> Option<usize> {
        match self {
            Self::Motif => Some(10),
            Self::Track3 => Some(12),
            _ => None,
        }
    }

    fn coefficients(self) -> Coefficients {
        match self {
            Self::Torch
            | Self::KellerJordan
            | Self::Moonlight
            | Self::KimiK2
            | Self::KimiK3
            | Self::Glm5 => Coefficients::KellerJordan,
            Self::Track3 => Coefficients::Custom(vec![[2.0, -1.5, 0.5]]),
            Self::Nanochat => Coefficients::cushioned_with_margin(1.01),
            Self::ModdedNanogpt => Coefficients::cushioned_with_margin(1.02),
            Self::DeepSeekV4 => Coefficients::DeepSeekV4,
            Self::Motif => Coefficients::polar_express_for(1e-3),
        }
    }

    /// The smallest norm by which a matrix is divided: the number that the source adds to the norm,
    /// or in `torch.optim.Muon` compares with it.
    fn least_norm(self) -> Option<f64> {
        match self {
            Self::Torch
            | Self::KellerJordan
            | Self::Moonlight
            | Self::KimiK2
            | Self::Motif
            | Self::Track3
            | Self::KimiK3
            | Self::Glm5 => Some(1e-7),
            Self::Nanochat | Self::ModdedNanogpt => Some(1e-6),
            Self::DeepSeekV4 => None,
        }
    }

    fn newton_schulz(self) -> NewtonSchulzConfig {
        let config = NewtonSchulzConfig::new()
            .with_coefficients(self.coefficients())
            .with_steps(self.iterations());
        match self.least_norm() {
            Some(norm) => config.with_epsilon(norm),
            None => config,
        }
    }

    fn lr_scale(self) -> LrScale {
        match self {
            Self::Torch
            | Self::KellerJordan
            | Self::Nanochat
            | Self::ModdedNanogpt
            | Self::Track3 => LrScale::Original,
            Self::Moonlight
            | Self::KimiK2
            | Self::DeepSeekV4
            | Self::Motif
            | Self::KimiK3
            | Self::Glm5 => LrScale::MatchRmsAdamW,
        }
    }

    fn momentum(self, steps: usize) -> MomentumConfig {
        let sum = || MomentumConfig::from(0.95).with_form(MomentumForm::Sum);
        match self {
            Self::Torch | Self::KellerJordan | Self::Track3 => 0.95.into(),
            Self::Moonlight | Self::DeepSeekV4 | Self::Motif => sum(),
            Self::KimiK2 | Self::KimiK3 | Self::Glm5 => sum().with_nesterov(false),
            // `get_muon_momentum` of `base_train.py`, whose first step has the value of its start.
            Self::Nanochat => {
                let warmdown = nanochat_warmdown(steps);
                then_down(risen(0.85, 0.97, 400), 400, steps, warmdown, [0.97, 0.90]).into()
            }
            // `get_muon_momentum` of `train_gpt.py`, likewise.
            Self::ModdedNanogpt => {
                Schedule::momentum_cool_down([0.85, 0.95], [300, 50], steps).into()
            }
        }
    }

    fn weight_decay(self, steps: usize) -> WeightDecay {
        match self {
            Self::KellerJordan => 0.0.into(),
            Self::Track3 => 0.05.into(),
            Self::Torch
            | Self::Moonlight
            | Self::KimiK2
            | Self::DeepSeekV4
            | Self::Motif
            | Self::KimiK3
            | Self::Glm5 => 0.1.into(),
            Self::Nanochat => nanochat_decay(NANOCHAT_DECAY, steps),
            Self::ModdedNanogpt => {
                WeightDecay::CautiousScaled(self.lr(1.2 * self.peak_lr(), steps))
            }
        }
    }
}

impl MuonConfig {
    /// Returns the settings of a recipe for a run of `steps` steps. Its schedules of momentum and
    /// weight decay depend on that number.
    pub fn preset(recipe: Recipe, steps: usize) -> Self {
        let adamw = AdamWConfig::new;
        let config = Self::new()
            .with_momentum(recipe.momentum(steps))
            .with_newton_schulz(recipe.newton_schulz())
            .with_weight_decay(recipe.weight_decay(steps))
            .with_lr_scale(recipe.lr_scale());
        match recipe {
            Recipe::Torch => config.with_adamw(adamw().with_beta_2(0.999).with_weight_decay(0.01)),
            Recipe::KellerJordan => {
                // Rates of AdamW are relative to the rate of matrices, 0.02 in the source.
                let relative = 3e-4 / 0.02;
                config.with_adamw(with_lrs(adamw().with_epsilon(1e-10), [relative; 3]))
            }
            Recipe::Moonlight | Recipe::KimiK2 | Recipe::Motif | Recipe::KimiK3 | Recipe::Glm5 => {
                config.with_adamw(adamw().with_weight_decay(0.1))
            }
            Recipe::Track3 => {
                let adamw = adamw().with_beta_1(0.8).with_epsilon(1e-10).with_weight_decay(0.001);
                let rates = [0.7, 0.004, 0.015].map(|rate| rate / 0.025);
                config.with_adamw(with_lrs(adamw, rates))
            }
            Recipe::Nanochat => {
                let adamw = adamw()
                    .with_beta_1(0.8)
                    .with_beta_2(0.96)
                    .with_epsilon(1e-10)
                    .with_weight_decay(0.01)
                    .with_embedding_betas(Some([0.8, 0.995]))
                    .with_embedding_decay(0.001 / 0.01)
                    .with_vector_betas(Some([0.8, 0.95]))
                    .with_vector_decay(0.05 / 0.01);
                let parts = vec![
                    RowEquilibration.into(),
                    Renormalization::orthogonal().into(),
                    NorMuon::new(0.9).into(),
                ];
                // `--embedding-lr`, `--unembedding-lr`, and a hundredth of `--scalar-lr`.
                let rates = [0.3, 0.008, 0.005].map(|rate| rate / 0.02);
                config.with_parts(parts).with_adamw(with_lrs(adamw, rates))
            }
            Recipe::ModdedNanogpt => {
                let adamw = adamw()
                    .with_beta_1(0.5)
                    .with_vector_betas(Some([0.9, 0.99]))
                    .with_epsilon(1e-10)
                    // `weight_decay`, `wd_mul` and the peak rate.
                    .with_weight_decay(0.005 * 150.0 * 0.008);
                // The last is `lr_mul` of the scalars.
                let rates = [0.008, 0.008, 5.0 * 0.008].map(|rate| rate / 0.023);
                config.with_parts(vec![NorMuon::new(0.9).into()]).with_adamw(with_lrs(adamw, rates))
            }
            Recipe::DeepSeekV4 => config
                .with_lr_factor(0.9)
                .with_adamw(adamw().with_epsilon(1e-20).with_weight_decay(0.1)),
        }
    }
}

/// nanochat's weight decay, which falls from `peak` to zero: `get_weight_decay` of `base_train.py`.
pub(crate) fn nanochat_decay(peak: f64, steps: usize) -> WeightDecay {
    WeightDecay::CautiousScaled(Schedule::constant(peak).hold(1).cosine(steps, 0.0))
}

/// The steps of nanochat's warm-down: `--warmdown-ratio` of the run, rounded as Python does.
fn nanochat_warmdown(steps: usize) -> usize {
    (0.65 * steps as f64).round_ties_even() as usize
}

/// AdamW with the relative learning rates of embeddings, the head and vectors.
fn with_lrs(config: AdamWConfig, [embedding, head, vector]: [f64; 3]) -> AdamWConfig {
    config.with_embedding_lr(embedding).with_head_lr(head).with_vector_lr(vector)
}

/// A linear warm-up, a constant rate to step `until`, and half a cosine to a tenth of it.
fn held_then_cosine(peak: f64, warmup: usize, until: usize, steps: usize) -> Schedule {
    Schedule::constant(if warmup == 0 { peak } else { 0.0 })
        .linear(warmup, peak)
        .hold(until - warmup)
        .cosine(steps - until, 0.1 * peak)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise::ElementwiseConfig;
    use crate::update::parts::Part;

    const STEPS: usize = 5_000;
    /// Lengths of runs, of which the first are shorter than the warm-ups.
    const LENGTHS: [usize; 7] = [1, 20, 70, 110, 300, 1_000, STEPS];

    fn adamw(recipe: Recipe) -> AdamWConfig {
        match MuonConfig::preset(recipe, STEPS).rest {
            ElementwiseConfig::AdamW(config) => config,
            other => panic!("{other:?}"),
        }
    }

    /// The largest difference between a schedule and a formula over a run.
    fn difference(schedule: &Schedule, steps: usize, formula: impl Fn(f64) -> f64) -> f64 {
        let of_step = |step| (schedule.at(step) - formula(step as f64)).abs();
        (0..steps).map(of_step).fold(0.0, f64::max)
    }

    #[test]
    fn settings_of_matrices_are_those_of_the_sources() {
        use Coefficients::{DeepSeekV4, KellerJordan};
        use LrScale::{MatchRmsAdamW, Original};
        use MomentumForm::{Average, Sum};
        let normuon = || Part::from(NorMuon::new(0.9));
        let nanochat =
            || vec![RowEquilibration.into(), Renormalization::orthogonal().into(), normuon()];
        for (recipe, coefficients, (form, nesterov), (scale, factor), decay, peak, parts) in [
            (Recipe::Torch, KellerJordan, (Average, true), (Original, 1.0), 0.1, 1e-3, vec![]),
            (
                Recipe::KellerJordan,
                KellerJordan,
                (Average, true),
                (Original, 1.0),
                0.0,
                0.02,
                vec![],
            ),
            (Recipe::Moonlight, KellerJordan, (Sum, true), (MatchRmsAdamW, 1.0), 0.1, 1e-3, vec![]),
            (
                Recipe::Nanochat,
                Coefficients::cushioned_with_margin(1.01),
                (Average, true),
                (Original, 1.0),
                0.28,
                0.02,
                nanochat(),
            ),
            (
                Recipe::ModdedNanogpt,
                Coefficients::cushioned_with_margin(1.02),
                (Average, true),
                (Original, 1.0),
                1.2 * 0.023,
                0.023,
                vec![normuon()],
            ),
            (Recipe::KimiK2, KellerJordan, (Sum, false), (MatchRmsAdamW, 1.0), 0.1, 2e-4, vec![]),
            (Recipe::DeepSeekV4, DeepSeekV4, (Sum, true), (MatchRmsAdamW, 0.9), 0.1, 2e-4, vec![]),
            (
                Recipe::Motif,
                Coefficients::polar_express_for(1e-3),
                (Sum, true),
                (MatchRmsAdamW, 1.0),
                0.1,
                1e-3,
                vec![],
            ),
            (
                Recipe::Track3,
                Coefficients::Custom(vec![[2.0, -1.5, 0.5]]),
                (Average, true),
                (Original, 1.0),
                0.05,
                0.025,
                vec![],
            ),
            (Recipe::KimiK3, KellerJordan, (Sum, false), (MatchRmsAdamW, 1.0), 0.1, 2e-4, vec![]),
            (Recipe::Glm5, KellerJordan, (Sum, false), (MatchRmsAdamW, 1.0), 0.1, 2e-4, vec![]),
        ] {
            let config = MuonConfig::preset(recipe, STEPS);
            assert_eq!(config.newton_schulz.coefficients, coefficients, "{recipe:?}");
            let steps = match recipe {
                Recipe::Motif => Some(10),
                Recipe::Track3 => Some(12),
                _ => None,
            };
            assert_eq!(config.newton_schulz.steps, steps, "{recipe:?}");
            let least_norm = match recipe {
                Recipe::Nanochat | Recipe::ModdedNanogpt => 1e-6,
                Recipe::DeepSeekV4 => NewtonSchulzConfig::new().epsilon,
                _ => 1e-7,
            };
            assert_eq!(config.newton_schulz.epsilon, least_norm, "{recipe:?}");
            assert_eq!((config.momentum.form, config.momentum.nesterov), (form, nesterov));
            assert_eq!(
                config.momentum.momentum.at(STEPS / 4),
                [0.95, 0.97][usize::from(recipe == Recipe::Nanochat)]
            );
            assert_eq!((config.lr_scale, config.lr_factor), (scale, factor), "{recipe:?}");
            let rate = config.weight_decay.rate().at(0);
            assert!((rate - decay).abs() < 1e-12, "{recipe:?}: {rate}");
            let cautious = matches!(config.weight_decay, WeightDecay::CautiousScaled(_));
            assert_eq!(cautious, !parts.is_empty(), "{recipe:?}");
            assert_eq!(config.parts, parts, "{recipe:?}");
            assert_eq!(recipe.peak_lr(), peak, "{recipe:?}");
            config.try_build().expect("settings that a run can use");
        }
    }

    #[test]
    fn settings_of_adamw_are_those_of_the_sources() {
        for (recipe, betas, epsilon, decay, rates) in [
            (Recipe::Torch, [0.9, 0.999], 1e-8, 0.01, [1e-3; 3]),
            (Recipe::KellerJordan, [0.9, 0.95], 1e-10, 0.0, [3e-4; 3]),
            (Recipe::Moonlight, [0.9, 0.95], 1e-8, 0.1, [1e-3; 3]),
            (Recipe::Nanochat, [0.8, 0.96], 1e-10, 0.01, [0.3, 0.008, 0.005]),
            (Recipe::ModdedNanogpt, [0.5, 0.95], 1e-10, 0.006, [0.008, 0.008, 0.04]),
            (Recipe::KimiK2, [0.9, 0.95], 1e-8, 0.1, [2e-4; 3]),
            (Recipe::DeepSeekV4, [0.9, 0.95], 1e-20, 0.1, [2e-4; 3]),
            (Recipe::Motif, [0.9, 0.95], 1e-8, 0.1, [1e-3; 3]),
            (Recipe::Track3, [0.8, 0.95], 1e-10, 0.001, [0.7, 0.004, 0.015]),
            (Recipe::KimiK3, [0.9, 0.95], 1e-8, 0.1, [2e-4; 3]),
            (Recipe::Glm5, [0.9, 0.95], 1e-8, 0.1, [2e-4; 3]),
        ] {
            let config = adamw(recipe);
            assert_eq!([config.beta_1, config.beta_2], betas, "{recipe:?}");
            assert_eq!(config.epsilon, epsilon, "{recipe:?}");
            assert!((config.weight_decay - decay).abs() < 1e-12, "{recipe:?}");
            let relative = [config.embedding_lr, config.head_lr, config.vector_lr];
            for (relative, rate) in relative.into_iter().zip(rates) {
                assert!((relative * recipe.peak_lr() - rate).abs() < 1e-12, "{recipe:?}");
            }
        }
    }

    #[test]
    fn schedules_of_nanochat_follow_its_formulas() {
        for steps in LENGTHS {
            let total = steps as f64;
            let warmdown = (0.65 * total).round_ties_even();
            let lr = |step: f64| match step {
                step if step < 40.0 => 0.02 * (step + 1.0) / 40.0,
                step if step <= total - warmdown => 0.02,
                step => {
                    let progress = (total - step) / warmdown;
                    0.02 * (progress + (1.0 - progress) * 0.05)
                }
            };
            let momentum = |step: f64| match step {
                step if step < 400.0 => 0.85 + step / 400.0 * 0.12,
                step if step >= total - warmdown => {
                    0.97 - 0.07 * (step - (total - warmdown)) / warmdown
                }
                _ => 0.97,
            };
            let decay =
                |step: f64| 0.28 * 0.5 * (1.0 + (core::f64::consts::PI * step / total).cos());
            let config = MuonConfig::preset(Recipe::Nanochat, steps);
            assert!(difference(&Recipe::Nanochat.lr(0.02, steps), steps, lr) < 1e-12, "{steps}");
            assert!(difference(&config.momentum.momentum, steps, momentum) < 1e-12, "{steps}");
            assert!(difference(config.weight_decay.rate(), steps, decay) < 1e-12, "{steps}");
        }
    }

    #[test]
    fn the_schedule_of_moonlight_follows_its_formula() {
        for steps in LENGTHS {
            let (total, warmup) = (steps as f64, (0.05 * steps as f64).floor().min(100.0));
            let lr = |step: f64| match step {
                step if step < warmup => 1e-3 * step / warmup,
                step => {
                    let progress = (step - warmup) / (total - warmup);
                    1e-3 * 0.5 * (1.0 + (core::f64::consts::PI * progress).cos())
                }
            };
            assert!(difference(&Recipe::Moonlight.lr(1e-3, steps), steps, lr) < 1e-15, "{steps}");
        }
    }

    #[test]
    fn schedules_of_modded_nanogpt_follow_its_formulas() {
        for steps in LENGTHS {
            let total = steps as f64;
            let scheduled = total - (total * 0.05).floor().min(15.0);
            let start = (scheduled * 0.4).floor();
            let lr = |step: f64| match step {
                step if step >= start => {
                    let progress = ((step - start) / (scheduled - start)).min(1.0);
                    0.023 * (1.0 - progress + 0.15 * progress)
                }
                _ => 0.023,
            };
            let momentum = |step: f64| match step {
                step if step < 300.0 => 0.85 + step / 300.0 * 0.1,
                step if step > total - 50.0 => 0.95 - (step - (total - 50.0)) / 50.0 * 0.1,
                _ => 0.95,
            };
            let recipe = Recipe::ModdedNanogpt;
            let config = MuonConfig::preset(recipe, steps);
            let decay = |step| 1.2 * lr(step);
            assert!(difference(&recipe.lr(0.023, steps), steps, lr) < 1e-12, "{steps}");
            assert!(difference(&config.momentum.momentum, steps, momentum) < 1e-12, "{steps}");
            assert!(difference(config.weight_decay.rate(), steps, decay) < 1e-12, "{steps}");
        }
    }

    #[test]
    fn the_schedule_of_track_3_follows_its_formula() {
        for steps in LENGTHS {
            let lr = |step: f64| {
                let progress = step / steps as f64;
                0.025 * if progress < 1.0 - 0.7 { 1.0 } else { (1.0 - progress) / 0.7 }
            };
            let schedule = Recipe::Track3.lr(0.025, steps);
            assert!(difference(&schedule, steps, lr) < 1e-12, "{steps}");
            assert!(schedule.at(steps).abs() < 1e-12, "{steps}");
        }
    }

    #[test]
    fn the_anneal_of_kimi_k2_continues_its_run() {
        let (peak, steps) = (2e-4, 1_000);
        let anneal = Recipe::KimiK2.anneal(peak, 100).unwrap();
        let end = Recipe::KimiK2.lr(peak, steps).at(steps);
        let falls = (0..100).all(|step| anneal.at(step) < end && anneal.at(step) > 7e-6 - 1e-18);
        assert!(falls, "it falls from the end of the run, {end}");
        assert!((anneal.at(99) - 7e-6).abs() < 1e-18);
        let others = Recipe::ALL.into_iter().filter(|recipe| *recipe != Recipe::KimiK2);
        assert!(others.into_iter().all(|recipe| recipe.anneal(peak, 100).is_none()));
    }

    #[test]
    fn momentum_cools_down_in_a_run_of_any_length() {
        let momentum = |lengths, steps| Schedule::momentum_cool_down([0.8, 0.9], lengths, steps);
        let long = momentum([10, 4], 100);
        let values = [0, 5, 10, 95, 96, 98, 99].map(|step| long.at(step));
        for (value, expected) in values.into_iter().zip([0.8, 0.85, 0.9, 0.9, 0.9, 0.85, 0.825]) {
            assert!((value - expected).abs() < 1e-12, "{values:?}");
        }
        assert_eq!(momentum([0, 0], 10), Schedule::constant(0.9).linear(0, 0.9));
        for steps in 0..20 {
            let short = momentum([10, 4], steps);
            let is_between = |step| (0.8 - 1e-12..=0.9 + 1e-12).contains(&short.at(step));
            assert!((0..steps).all(is_between), "{steps}: {short:?}");
        }
    }

    #[test]
    fn rates_end_as_in_the_sources() {
        for (recipe, end) in [
            (Recipe::Torch, 1.0),
            (Recipe::KellerJordan, 1.0),
            (Recipe::Moonlight, 0.0),
            (Recipe::Nanochat, 0.05),
            (Recipe::ModdedNanogpt, 0.15),
            (Recipe::KimiK2, 0.1),
            (Recipe::DeepSeekV4, 0.1),
            (Recipe::Motif, 1.0),
            (Recipe::Track3, 0.0),
            (Recipe::KimiK3, 0.1),
            (Recipe::Glm5, 0.1),
        ] {
            for steps in [0].into_iter().chain(LENGTHS) {
                let lr = recipe.lr(1.0, steps);
                let largest = (0..steps).map(|step| lr.at(step)).fold(0.0, f64::max);
                assert!(largest <= 1.0, "{recipe:?} in {steps} steps: {largest}");
                if steps >= 300 {
                    assert_eq!(largest, 1.0, "{recipe:?} in {steps} steps");
                    assert!((lr.at(steps) - end).abs() < 1e-12, "{recipe:?} in {steps} steps");
                }
            }
        }
    }

    #[test]
    fn sources_are_named_in_the_documentation() {
        let file = include_str!("recipe.rs");
        for recipe in Recipe::ALL {
            let link = format!("<{}>", recipe.source());
            assert!(file.contains(&link), "{recipe:?}: {link}");
        }
    }

    #[test]
    fn recipes_of_kimi_have_its_clip_and_no_others_have() {
        let with_clip = Recipe::ALL.into_iter().filter_map(|recipe| {
            let clip = recipe.qk_clip()?;
            assert_eq!((clip.tau, clip.alpha), (100.0, 0.5));
            Some(recipe)
        });
        assert_eq!(with_clip.collect::<Vec<_>>(), [Recipe::KimiK2, Recipe::KimiK3]);
    }

    #[test]
    fn names_lead_to_their_recipes() {
        for recipe in Recipe::ALL {
            assert_eq!(Recipe::from_name(recipe.name()), Some(recipe));
            let json = serde_json::to_string(&recipe).unwrap();
            assert_eq!(json, format!("{:?}", recipe.name()));
        }
        assert_eq!(Recipe::from_name("adamw"), None);
    }
}
