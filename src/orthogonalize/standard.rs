//! The standard form: products with `X` at every step.

use super::Polynomial;
use crate::backend::{Program, Step, Value};

/// Adds the polynomials, applied to the singular values of `x`, which is at most 1 in norm. `r` is
/// `X X^T`, if the program has it already.
pub fn iterate(
    program: &mut Program,
    mut x: Value,
    mut r: Option<Value>,
    schedule: &[Polynomial],
) -> Value {
    for &[a, b, c] in schedule {
        let r = r.take().unwrap_or_else(|| program.push(Step::Square { x }));
        let (z, factor) = program.push_polynomial(r, [b, c]);
        x = program.push(Step::ApplyAndAdd { z, x, factor, a });
    }
    x
}
