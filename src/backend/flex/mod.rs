//! The operations on Burn's Flex backend: faer's products, and one pass over memory for everything
//! elementwise.

mod adamw;
mod chunks;
mod iteration;
mod matrix;
mod products;
mod step;
mod tensors;

pub(super) use tensors::serves;
