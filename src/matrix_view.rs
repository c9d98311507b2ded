//! Parameters as batches of matrices.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The name of a parameter without a name, in errors.
pub(crate) const UNNAMED: &str = "(unnamed)";

/// The dimension of a matrix that counts the outputs of its layer.
// Exhaustive: a matrix has two dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MatrixLayout {
    /// `[inputs, outputs]`: Burn's `Linear`.
    InOut,
    /// `[outputs, inputs]`: Burn's convolutions, and everything from PyTorch.
    OutIn,
}

/// The view of a parameter as a batch of matrices.
///
/// ```
/// use distmuon::MatrixView;
///
/// // Eight experts, and a convolution.
/// assert_eq!(MatrixView::Batch.batch_shape("experts.up", &[8, 64, 256])?, [8, 64, 256]);
/// assert_eq!(MatrixView::Flatten.batch_shape("conv.weight", &[64, 3, 7, 7])?, [1, 64, 147]);
/// assert!(MatrixView::Single.batch_shape("experts.up", &[8, 64, 256]).is_err());
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MatrixView {
    /// One matrix, of exactly two dimensions.
    Single,
    /// A matrix for every index of the leading dimensions, as for experts: `[experts, in, out]`.
    Batch,
    /// One matrix of the first dimension by all others, as for convolutions:
    /// `[out, in, height, width]`.
    Flatten,
    /// A matrix of the first two dimensions for every index of the others, as for weights of
    /// frequencies: `[in, out, modes]`.
    Leading,
}

impl MatrixView {
    /// Returns `true` if a rule with this view applies to parameters of a shape. No rule applies to
    /// vectors, and no rule with [`Batch`](Self::Batch) or [`Leading`](Self::Leading) to two
    /// dimensions: the stacked vectors of a batch of layers.
    pub(crate) fn fits(self, shape: &[usize]) -> bool {
        match self {
            Self::Single | Self::Flatten => shape.len() >= 2,
            Self::Batch | Self::Leading => shape.len() >= 3,
        }
    }

    /// Returns the batch `[k, m, n]` of `k` matrices that a parameter of this shape is seen as.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], with the name of the parameter, for fewer than two dimensions, and for
    /// more than two with [`Single`](Self::Single).
    pub fn batch_shape(self, parameter: &str, shape: &[usize]) -> Result<[usize; 3]> {
        let error = |expected, remedy| {
            let (parameter, shape) = (parameter.to_owned(), shape.to_vec());
            Err(Error::Shape { parameter, expected, shape, remedy })
        };
        match (self, shape) {
            (_, [] | [_]) => error(
                "two dimensions or more",
                "leave it to AdamW, as `MuonConfig::init` does".to_owned(),
            ),
            (Self::Single | Self::Batch | Self::Leading, [m, n]) => Ok([1, *m, *n]),
            (Self::Single, _) => error("two dimensions", view_by_rule(parameter)),
            (Self::Batch, [batch @ .., m, n]) => Ok([batch.iter().product(), *m, *n]),
            (Self::Flatten, [m, rest @ ..]) => Ok([1, *m, rest.iter().product()]),
            (Self::Leading, [m, n, rest @ ..]) => Ok([rest.iter().product(), *m, *n]),
        }
    }
}

/// The rules for a parameter of more than two dimensions, as code to copy.
fn view_by_rule(parameter: &str) -> String {
    if parameter == UNNAMED {
        return "use `MuonConfig::init` with a routing rule for the parameter, as in \
                `.with_rule(RoutingRule::muon(path).flatten())`"
            .to_owned();
    }
    // The whole path, since a pattern also fits a part of one.
    let path = format!("r\"^{}$\"", regex::escape(parameter));
    format!(
        "add `.with_rule(RoutingRule::muon({path}).flatten())` for a convolution, with `.batch()` \
         instead for a stack of matrices, or `.with_rule(RoutingRule::adamw({path}))`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_view_maps_its_shapes_and_rejects_others_by_name() {
        let view = |view: MatrixView, shape: &[usize]| view.batch_shape("net.weight", shape);
        assert_eq!(view(MatrixView::Single, &[3, 4]), Ok([1, 3, 4]));
        assert_eq!(view(MatrixView::Batch, &[2, 5, 3, 4]), Ok([10, 3, 4]));
        assert_eq!(view(MatrixView::Flatten, &[8, 3, 5, 5]), Ok([1, 8, 75]));
        assert_eq!(view(MatrixView::Leading, &[8, 3, 5, 2]), Ok([10, 8, 3]));
        for (refused, shape) in [
            (MatrixView::Single, &[2, 3, 4][..]),
            (MatrixView::Batch, &[7]),
            (MatrixView::Flatten, &[]),
        ] {
            let error = view(refused, shape).unwrap_err().to_string();
            assert!(error.contains("net.weight"), "{error}");
        }
        let error = view(MatrixView::Single, &[2, 3, 4]).unwrap_err().to_string();
        assert!(
            error.contains(r#".with_rule(RoutingRule::muon(r"^net\.weight$").flatten())"#),
            "{error}"
        );
    }
}
