//! Muon: momentum, orthogonalised, for one parameter at a time.
//!
//! With momentum `mu`, weight decay `w` and learning rate `lr`, a step with gradient `G` is
//!
//! ```text
//! M <- mu M + (1 - mu) G
//! U  = mu M + (1 - mu) G  with Nesterov, else M
//! P <- (1 - lr w) P - lr scale orthogonalize(U)
//! ```
//!
//! (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>; decoupled weight decay and the
//! scale that matches AdamW from Liu et al., <https://arxiv.org/abs/2502.16982>).

mod config;
#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
pub(crate) mod flex;
pub(crate) mod ops;
pub(crate) mod rule;
mod view;

pub use config::MuonConfig;
pub use rule::{Muon, MuonState};
pub use view::{LrScale, MatrixLayout, MatrixView};
