//! Muon for one parameter at a time: gradient descent along the orthogonalised momentum.
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
//! [Parts](crate::Part) add stages before and after the iteration.

mod config;
mod module;
mod optimizer;
mod split;

pub use config::MuonConfig;
pub use optimizer::Muon;
#[doc(hidden)]
pub use optimizer::MuonState;
