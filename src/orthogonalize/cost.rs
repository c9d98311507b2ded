//! What the two forms cost: floating-point operations, and memory.
//!
//! A product counts twice its multiplications. `share` tells which part of a symmetric product is
//! really computed, given the length of its inner dimension: one half where only a triangle is, 1
//! where it is computed in full.

/// Operations of the standard form on an `m` by `n` matrix, `m <= n`: at every step `X X^T`, its
/// square, and the product with `X`.
pub fn standard(steps: usize, m: usize, n: usize, share: impl Fn(usize) -> f64) -> f64 {
    let (of_x, of_r) = (share(n), share(m));
    let (m, n) = (m as f64, n as f64);
    steps as f64 * 2.0 * m * m * (of_x * n + of_r * m + n)
}

/// Operations of the Gram form on an `m` by `n` matrix, `m <= n`, with this many restarts.
///
/// `X X^T` and the product of `Q` and `X` are computed once, and again at every restart. Each step
/// squares `R`; all but the first after a (re)start multiply `Q`; all but the last before a restart
/// or the end advance `R` by two products.
pub fn gram(
    steps: usize,
    restarts: usize,
    m: usize,
    n: usize,
    share: impl Fn(usize) -> f64,
) -> f64 {
    let (of_x, of_r) = (share(n), share(m));
    let segments = 1.0 + restarts as f64;
    let (steps, m, n) = (steps as f64, m as f64, n as f64);
    let squares = steps + 3.0 * (steps - segments);
    2.0 * m * m * (segments * (of_x * n + n) + squares * of_r * m)
}

/// Elements that the standard form has at a time beside the matrix that it was given: `X`, `Z` and the
/// next `X`.
pub fn standard_memory(m: usize, n: usize) -> usize {
    2 * m * n + m * m
}

/// Elements that the Gram form has at a time beside the matrix that it was given: `X`, and `Q` with the
/// next `X`, or where it is longer `R`, `Z`, `Q` and the next of them.
pub fn gram_memory(m: usize, n: usize) -> usize {
    m * n + (m * n + m * m).max(4 * m * m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_the_published_ones() {
        let (full, half) = (|_| 1.0, |_| 0.5);
        let cube = 64f64.powi(3);
        assert_eq!(standard(5, 64, 64, full), 30.0 * cube);
        assert_eq!(standard(5, 64, 64, half), 20.0 * cube);
        assert_eq!(standard(5, 64, 256, half), 65.0 * cube);
        assert_eq!(gram(5, 1, 64, 64, half), 20.0 * cube);
        assert_eq!(gram(5, 1, 64, 256, half), 38.0 * cube);
        assert_eq!(gram(5, 1, 64, 256, full), 60.0 * cube);
        assert_eq!(gram(5, 0, 64, 256, half), 29.0 * cube);
    }
}
