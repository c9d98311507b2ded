//! The costs of the two forms: floating-point operations and memory.
//!
//! A product counts as twice its multiplications. `share` returns the part of a symmetric product
//! that is computed, given the length of the inner dimension: one half where only a triangle is
//! computed, and 1 where the product is computed in full.

use crate::backend::Polynomial;

/// The number of steps, and of those whose polynomial has a square term: a cubic one has none.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub all: usize,
    pub with_square: usize,
}

impl Steps {
    /// The steps with these polynomials.
    pub fn of(schedule: &[Polynomial]) -> Self {
        let with_square = schedule.iter().filter(|[_, _, c]| *c != 0.0).count();
        Self { all: schedule.len(), with_square }
    }
}

/// Floating-point operations of the standard form on an `m` by `n` matrix, `m <= n`. Every step
/// computes `X X^T`, the square of `X X^T` if its polynomial has one, and the product with `X`.
pub fn standard(steps: Steps, m: usize, n: usize, share: impl Fn(usize) -> f64) -> f64 {
    // `X X^T` has the inner dimension `n`, products of `m` by `m` matrices have `m`.
    let x_share = share(n);
    let r_share = share(m);
    let (m, n) = (m as f64, n as f64);
    let (steps, squares) = (steps.all as f64, steps.with_square as f64);
    2.0 * m * m * (steps * (x_share * n + n) + squares * r_share * m)
}

/// Floating-point operations of the Gram form on an `m` by `n` matrix, `m <= n`, with a number of
/// restarts.
///
/// `X X^T` and the product of `Q` and `X` are computed once, and again at every restart. Each step
/// squares `R` if its polynomial has a square term. Each step except the first after a (re)start
/// multiplies `Q`. Each step except the last before a restart or the end advances `R` by two
/// products.
pub fn gram(
    steps: Steps,
    restarts: usize,
    m: usize,
    n: usize,
    share: impl Fn(usize) -> f64,
) -> f64 {
    // `X X^T` has the inner dimension `n`, products of `m` by `m` matrices have `m`.
    let x_share = share(n);
    let r_share = share(m);
    let segments = 1.0 + restarts as f64;
    let (m, n) = (m as f64, n as f64);
    let r_products = steps.with_square as f64 + 3.0 * (steps.all as f64 - segments);
    2.0 * m * m * (segments * (x_share * n + n) + r_products * r_share * m)
}

/// Elements that the standard form has in memory at a time, excluding its input: `X`, `Z` and the
/// next `X`.
pub fn standard_memory(m: usize, n: usize) -> usize {
    2 * m * n + m * m
}

/// Elements that the Gram form has in memory at a time, excluding its input: `X`, and in addition
/// `Q` with the next `X`, or `R`, `Z`, `Q` and the next of them, whichever is larger.
pub fn gram_memory(m: usize, n: usize) -> usize {
    m * n + (m * n + m * m).max(4 * m * m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_counts_are_the_published_ones() {
        let full = |_| 1.0;
        let half = |_| 0.5;
        let cube = 64f64.powi(3);
        let five = Steps { all: 5, with_square: 5 };
        assert_eq!(standard(five, 64, 64, full), 30.0 * cube);
        assert_eq!(standard(five, 64, 64, half), 20.0 * cube);
        assert_eq!(standard(five, 64, 256, half), 65.0 * cube);
        assert_eq!(gram(five, 1, 64, 64, half), 20.0 * cube);
        assert_eq!(gram(five, 1, 64, 256, half), 38.0 * cube);
        assert_eq!(gram(five, 2, 64, 256, half), 47.0 * cube);
        assert_eq!(gram(five, 1, 64, 256, full), 60.0 * cube);
        assert_eq!(gram(five, 0, 64, 256, half), 29.0 * cube);
    }
}
