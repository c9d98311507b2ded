//! Newton-Schulz orthogonalisation of batches of matrices.
//!
//! [`NewtonSchulz::orthogonalize`] maps every matrix `X = U S V^T` of a batch to a matrix near its
//! polar factor `U V^T`, by applying odd polynomials to its singular values. Two forms compute the
//! same polynomials:
//!
//! - the [standard form](IterationForm::Standard), `X <- a X + (b A + c A^2) X` with `A = X X^T`
//!   (Keller Jordan, <https://kellerjordan.github.io/posts/muon/>);
//! - the [Gram form](IterationForm::Gram), which iterates on the small `R = X X^T` alone and
//!   multiplies `X` once at the end (<https://github.com/Dao-AILab/gram-newton-schulz>).
//!
//! Both run on the smaller side of the matrix, and all products of polynomials of one symmetric
//! matrix go through one operation that computes a single triangle.

mod coefficients;
mod config;
#[doc(hidden)] // for the bench `gpu`
pub mod cost;
mod gram;
mod iteration;
mod iteration_plan;
mod polar_express;
pub mod restarts;
mod rounding_errors;
mod standard;

pub use crate::backend::Polynomial;
pub use coefficients::Coefficients;
pub use config::{IterationDtype, IterationForm, NewtonSchulzConfig, Normalization};
pub(crate) use iteration::IterationDecision;
pub use iteration::NewtonSchulz;
pub use iteration_plan::IterationPlan;
