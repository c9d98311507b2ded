//! One number for a run: the settings that nanochat derives from the depth of a model.

use crate::elementwise::ElementwiseConfig;
use crate::error::{Error, Result};
use crate::muon::MuonConfig;
use crate::recipe::{NANOCHAT_DECAY, Recipe, nanochat_decay};

/// Width of a model per layer, and of a head of attention: `--aspect-ratio` and `--head-dim`.
const ASPECT_RATIO: usize = 64;
const HEAD: usize = 128;
/// Tokens of a sequence: `--max-seq-len`.
const CONTEXT: usize = 2048;
/// Tokens of a run for each of the parameters that count: `--target-param-data-ratio`.
const TOKENS_PER_PARAMETER: usize = 12;
/// The depth for which the rates were tuned, and its best batch in tokens: `B_REF`.
const REFERENCE: usize = 12;
const REFERENCE_BATCH: f64 = 524_288.0;
/// The growth of the best batch with the tokens of a run (<https://arxiv.org/abs/2505.13738>).
const BATCH_EXPONENT: f64 = 0.383;
/// The width for which the rates of embeddings and head were tuned: `setup_optimizer` of `gpt.py`.
const REFERENCE_WIDTH: f64 = 768.0;

/// Sizes, batch, length and rates of a run from the depth of its model, by the rules of nanochat
/// (`scripts/base_train.py` and `nanochat/gpt.py`, read in November 2026, for the source of
/// [`Recipe::Nanochat`]: <https://github.com/karpathy/nanochat>).
///
/// | setting | rule |
/// |---|---|
/// | width | 64 times the depth, up to a multiple of 128 |
/// | heads | one for 128 of the width |
/// | context | 2048 tokens |
/// | tokens of a run `D` | 12 for every parameter of the layers' matrices and of the head |
/// | batch `B` | `2^19 (D / D12)^0.383` tokens, to the nearest power of two |
/// | rates | the recipe's times `sqrt(B / 2^19)`; of embeddings and head, also times `sqrt(768 / width)` |
/// | weight decay | the recipe's times `sqrt(B / 2^19) D12 / D` |
///
/// `D12` is `D` of depth 12. The rules count `12 width^2` parameters of matrices in a layer, so the
/// small gates of nanochat's value embeddings are left out.
///
/// ```
/// use distmuon::Dial;
///
/// let dial = Dial::nanochat(20, 65_536)?;
/// assert_eq!((dial.width, dial.heads, dial.context), (1280, 10, 2048));
/// assert_eq!(dial.batch, 1 << 20); // tokens
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Dial {
    /// Layers of the model.
    pub depth: usize,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Width of the layers.
    pub width: usize,
    /// Heads of attention of a layer.
    pub heads: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Tokens of a step, on all ranks together.
    pub batch: usize,
}

impl Dial {
    /// Returns the settings for a depth and a vocabulary.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a depth or a vocabulary of 0.
    pub fn nanochat(depth: usize, vocabulary: usize) -> Result<Self> {
        for (setting, value) in [("depth", depth), ("vocabulary", vocabulary)] {
            if value == 0 {
                return Err(Error::setting(setting, value, "at least 1"));
            }
        }
        let width = width(depth);
        let ratio = tokens(depth, vocabulary) as f64 / tokens(REFERENCE, vocabulary) as f64;
        let predicted = REFERENCE_BATCH * ratio.powf(BATCH_EXPONENT);
        // Ties go to even numbers, as Python rounds in the source.
        let batch = 1 << predicted.log2().round_ties_even() as usize;
        let (heads, context) = (width / HEAD, CONTEXT);
        Ok(Self { depth, vocabulary, width, heads, context, batch })
    }

    /// Sets the tokens of a step, to which rates and decay are adapted.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for 0 tokens.
    pub fn with_batch(self, tokens: usize) -> Result<Self> {
        match tokens {
            0 => Err(Error::setting("batch", 0, "at least 1")),
            batch => Ok(Self { batch, ..self }),
        }
    }

    /// Returns the tokens of a run.
    pub fn tokens(&self) -> usize {
        tokens(self.depth, self.vocabulary)
    }

    /// Returns the steps of a run, at least 1.
    pub fn steps(&self) -> usize {
        (self.tokens() / self.batch).max(1)
    }

    /// Returns the peak learning rate of matrices.
    pub fn peak_lr(&self) -> f64 {
        Recipe::Nanochat.peak_lr() * self.batch_scale()
    }

    /// Returns the weight decay at the first step.
    pub fn weight_decay(&self) -> f64 {
        let reference = tokens(REFERENCE, self.vocabulary) as f64;
        NANOCHAT_DECAY * self.batch_scale() * reference / self.tokens() as f64
    }

    /// Returns the settings of the optimizer for a run of `steps` steps: [`Recipe::Nanochat`] with
    /// the weight decay and the relative rates of this depth.
    pub fn muon(&self, steps: usize) -> MuonConfig {
        let mut config = MuonConfig::preset(Recipe::Nanochat, steps);
        if let ElementwiseConfig::AdamW(adamw) = &mut config.rest {
            let scale = (REFERENCE_WIDTH / self.width as f64).sqrt();
            adamw.embedding_lr *= scale;
            adamw.head_lr *= scale;
        }
        config.with_weight_decay(nanochat_decay(self.weight_decay(), steps))
    }

    /// `sqrt(B / 2^19)`.
    fn batch_scale(&self) -> f64 {
        (self.batch as f64 / REFERENCE_BATCH).sqrt()
    }
}

fn width(depth: usize) -> usize {
    (depth * ASPECT_RATIO).next_multiple_of(HEAD)
}

/// The tokens of a run: of the matrices of the layers and of the head, as `get_scaling_params`.
fn tokens(depth: usize, vocabulary: usize) -> usize {
    let width = width(depth);
    // In a layer, attention has `4 width^2` parameters, and the MLP twice as many.
    TOKENS_PER_PARAMETER * (12 * depth * width * width + vocabulary * width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_of_the_source() {
        // Computed by hand from the source's formulas, with its vocabulary of 2^15.
        for (depth, width, heads, log2_batch) in [
            (1, 128, 1, 17),
            (4, 256, 2, 18),
            (12, 768, 6, 19),
            (20, 1280, 10, 20),
            (26, 1664, 13, 20),
        ] {
            let dial = Dial::nanochat(depth, 32_768).unwrap();
            assert_eq!((dial.width, dial.heads), (width, heads), "{depth}");
            assert_eq!(dial.batch, 1 << log2_batch, "{depth}");
        }
        let dial = Dial::nanochat(12, 32_768).unwrap();
        assert_eq!(dial.tokens(), 12 * (12 * 12 * 768 * 768 + 32_768 * 768));
        assert_eq!(dial.steps(), dial.tokens() / 524_288);
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a}, not {b}");
        close(dial.peak_lr(), 0.02);
        close(dial.weight_decay(), 0.28);
        // A quarter of the batch: half of the rate and of the decay.
        let small = dial.with_batch(1 << 17).unwrap();
        close(small.peak_lr(), 0.01);
        close(small.weight_decay(), 0.14);
        assert_eq!(small.steps(), dial.tokens() >> 17);
    }

    #[test]
    fn rates_of_embeddings_and_head_fall_with_the_width() {
        let rates = |depth| match Dial::nanochat(depth, 256).unwrap().muon(1000).rest {
            ElementwiseConfig::AdamW(adamw) => [adamw.embedding_lr, adamw.head_lr, adamw.vector_lr],
            other => panic!("{other:?}"),
        };
        let [reference, wide] = [12, 48].map(rates);
        assert!((wide[0] / reference[0] - 0.5).abs() < 1e-12);
        assert!((wide[1] / reference[1] - 0.5).abs() < 1e-12);
        assert_eq!(wide[2], reference[2]);
        let config = Dial::nanochat(48, 256).unwrap().muon(1000);
        let expected = Dial::nanochat(48, 256).unwrap().weight_decay();
        assert_eq!(config.weight_decay.rate().at(0), expected);
        assert!(expected < 0.05, "{expected}");
    }

    #[test]
    fn settings_that_no_run_can_use_are_rejected() {
        let error = |dial: Result<Dial>| dial.unwrap_err().to_string();
        let expected = "`depth` is invalid: expected at least 1, got 0";
        assert!(error(Dial::nanochat(0, 256)).contains(expected));
        assert!(error(Dial::nanochat(4, 0)).contains("`vocabulary` is invalid"));
        assert!(error(Dial::nanochat(4, 256).unwrap().with_batch(0)).contains("`batch`"));
    }
}
