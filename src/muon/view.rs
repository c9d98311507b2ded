//! Parameters as batches of matrices, and what their shape does to the learning rate.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The name of a parameter in errors where nobody gave it one.
pub(super) const UNNAMED: &str = "(unnamed)";

/// Which dimension of a matrix counts the outputs of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MatrixLayout {
    /// `[inputs, outputs]`: Burn's `Linear`.
    InOut,
    /// `[outputs, inputs]`: Burn's convolutions, and everything from PyTorch.
    OutIn,
}

/// How a parameter is seen as a batch of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MatrixView {
    /// One matrix; only two dimensions will do.
    Single,
    /// A matrix for every index of the leading dimensions, as of experts: `[experts, in, out]`.
    Batch,
    /// One matrix of the first dimension by all others, as of convolutions:
    /// `[out, in, height, width]`.
    Flatten,
}

impl MatrixView {
    /// Whether a rule with this view is about parameters of a shape: vectors are not, nor are the
    /// vectors of a stack, which are a matrix by their shape.
    pub(crate) fn fits(self, shape: &[usize]) -> bool {
        match self {
            Self::Single | Self::Flatten => shape.len() >= 2,
            Self::Batch => shape.len() >= 3,
        }
    }

    /// The batch `[k, m, n]` that a parameter of this shape is seen as.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], with the name of the parameter, for fewer than two dimensions, and for more
    /// than two without an explicit view.
    pub fn batch_shape(self, parameter: &str, shape: &[usize]) -> Result<[usize; 3]> {
        let refuse = |expected, remedy| {
            let (parameter, shape) = (parameter.to_owned(), shape.to_vec());
            Err(Error::Shape { parameter, expected, shape, remedy })
        };
        match (self, shape) {
            (_, [] | [_]) => refuse(
                "two dimensions or more",
                "leave it to AdamW, as `MuonConfig::init` does".to_owned(),
            ),
            (Self::Single | Self::Batch, [m, n]) => Ok([1, *m, *n]),
            (Self::Single, _) => refuse("two dimensions", view_by_rule(parameter)),
            (Self::Batch, [batch @ .., m, n]) => Ok([batch.iter().product(), *m, *n]),
            (Self::Flatten, [m, rest @ ..]) => Ok([1, *m, rest.iter().product()]),
        }
    }
}

/// The rules to choose from for a parameter of more than two dimensions, to be copied.
fn view_by_rule(parameter: &str) -> String {
    if parameter == UNNAMED {
        return "use `MuonConfig::init`, with a rule that says how to see it".to_owned();
    }
    let path = format!("r\"^{}$\"", regex::escape(parameter));
    format!(
        "add `.with_rule(Rule::muon({path}).flatten())` for a convolution, with `.batch()` instead for a \
         stack of matrices, or `.with_rule(Rule::adamw({path}))`"
    )
}

/// The factor that a matrix puts on the learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum LrScale {
    /// 1.
    None,
    /// `sqrt(max(1, outputs / inputs))` (Keller Jordan).
    Original,
    /// `0.2 sqrt(max(outputs, inputs))`: updates as large as AdamW's, so that its learning rate and
    /// weight decay carry over (Liu et al., <https://arxiv.org/abs/2502.16982>).
    MatchRmsAdamW,
    /// `sqrt(outputs / inputs)`: the same effect on activations of any width (Bernstein,
    /// <https://jeremybernste.in/writing/deriving-muon>).
    Spectral,
}

impl LrScale {
    /// The factor for a matrix of `[rows, columns]`.
    pub fn factor(self, layout: MatrixLayout, [rows, columns]: [usize; 2]) -> f64 {
        let (inputs, outputs) = match layout {
            MatrixLayout::InOut => (rows as f64, columns as f64),
            MatrixLayout::OutIn => (columns as f64, rows as f64),
        };
        match self {
            Self::None => 1.0,
            Self::Original => (outputs / inputs).max(1.0).sqrt(),
            Self::MatchRmsAdamW => 0.2 * outputs.max(inputs).sqrt(),
            Self::Spectral => (outputs / inputs).sqrt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_over_inputs_for_burns_linear() {
        // Linear::new(256, 1024) stores [256, 1024]: four times more outputs than inputs.
        let factor = |scale: LrScale, layout| scale.factor(layout, [256, 1024]);
        assert_eq!(factor(LrScale::Original, MatrixLayout::InOut), 2.0);
        assert_eq!(factor(LrScale::Original, MatrixLayout::OutIn), 1.0);
        assert_eq!(factor(LrScale::Spectral, MatrixLayout::InOut), 2.0);
        assert_eq!(factor(LrScale::Spectral, MatrixLayout::OutIn), 0.5);
        assert!((factor(LrScale::MatchRmsAdamW, MatrixLayout::InOut) - 6.4).abs() < 1e-12);
        assert_eq!(factor(LrScale::None, MatrixLayout::InOut), 1.0);
    }

    #[test]
    fn views_of_shapes() {
        let view = |view: MatrixView, shape: &[usize]| view.batch_shape("net.weight", shape);
        assert_eq!(view(MatrixView::Single, &[3, 4]), Ok([1, 3, 4]));
        assert_eq!(view(MatrixView::Batch, &[2, 5, 3, 4]), Ok([10, 3, 4]));
        assert_eq!(view(MatrixView::Flatten, &[8, 3, 5, 5]), Ok([1, 8, 75]));
        for (refused, shape) in [
            (MatrixView::Single, &[2, 3, 4][..]),
            (MatrixView::Batch, &[7]),
            (MatrixView::Flatten, &[]),
        ] {
            let error = view(refused, shape).unwrap_err().to_string();
            assert!(error.contains("net.weight"), "{error}");
        }
        let error = view(MatrixView::Single, &[2, 3, 4]).unwrap_err().to_string();
        assert!(error.contains(r#".with_rule(Rule::muon(r"^net\.weight$").flatten())"#), "{error}");
    }
}
