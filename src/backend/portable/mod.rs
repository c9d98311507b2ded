//! The operations in Burn's own operations, for every backend.

mod adamw;
mod lion;
mod matrix;
mod step;

pub(super) use adamw::adamw;
pub(crate) use lion::lion;
pub(super) use matrix::{
    SIZE_OF_SUM, divisors, least_gram_norm, least_row_sum, normalize, over, plus_identity,
    product_add, scaled, symmetric_product, symmetric_share, syrk,
};
pub(crate) use step::corrected;
pub(super) use step::{accept, apply, reject, restore, update_momentum};
