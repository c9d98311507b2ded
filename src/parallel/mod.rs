//! Tensor and expert parallelism: collectives inside a forward pass, with their gradients.
//!
//! In a *region* of tensor parallelism, the ranks of a group compute the same rows with different
//! slices of the weights. [`enter`] begins a region and [`leave`] ends it, as `f` and `g` of
//! Megatron-LM (<https://arxiv.org/abs/1909.08053>, section 3). [`exchange`] sends rows to the
//! ranks that have their experts, and back. A [`RowEmbedding`] looks up rows that other ranks have.
//!
//! ```text
//!                    rank 0   x W[:, ..k] ──► relu ──► W'[..k, :] ─┐
//!  x ──► enter ──►                                                 ├─► leave ──► y
//!                    rank 1   x W[:, k..] ──► relu ──► W'[k.., :] ─┘
//! ```
//!
//! All ranks of the group make the same calls in the same order, also in evaluation. In a backward
//! pass, a call is made for each of them on which the loss depends: that has to be the same on all
//! ranks, also on one that has received no rows. The group has to live until then.
//!
//! # Failures
//!
//! A forward or backward pass can't return an error. After a failure, results are NaN or undefined,
//! and the next collective of any rank returns an error.

mod collective;
mod embedding;
mod layers;
mod regions;
mod row_exchange;

pub use embedding::RowEmbedding;
pub use layers::{ColumnLinear, RowLinear};
pub use regions::{enter, leave};
pub use row_exchange::exchange;
