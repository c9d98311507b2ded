//! Learning rates that depend on the shape of a matrix.

use serde::{Deserialize, Serialize};

use crate::matrix_view::MatrixLayout;

/// The factor on the learning rate that depends on the shape of a matrix.
///
/// The examples are for a `Linear` of 512 inputs and 1024 outputs, whose weight is `[512, 1024]` in
/// Burn.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LrScale {
    /// 1 for all shapes.
    None,
    /// `sqrt(max(1, outputs / inputs))`: 1.414 (Keller Jordan,
    /// <https://kellerjordan.github.io/posts/muon/>).
    Original,
    /// `0.2 sqrt(max(outputs, inputs))`: 6.4. Updates are as large as AdamW's, so AdamW's learning
    /// rate and weight decay carry over (Liu et al., <https://arxiv.org/abs/2502.16982>).
    MatchRmsAdamW,
    /// `sqrt(outputs / inputs)`: 1.414. The effect on activations is the same at any width
    /// (Bernstein, <https://jeremybernste.in/writing/deriving-muon>).
    Spectral,
}

impl LrScale {
    /// Returns the factor for a matrix `[rows, columns]`, whose layout says which of them count the
    /// outputs.
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
}
