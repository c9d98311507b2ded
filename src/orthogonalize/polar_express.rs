//! Polar Express: the minimax polynomials of every step, computed for an interval of singular
//! values.
//!
//! Algorithm 1 of Amsel et al., <https://arxiv.org/abs/2505.16932>, in the form of its published
//! code, <https://github.com/NoahAmsel/PolarExpress>. Singular values start in `[l, 1]`. Every step
//! takes the odd quintic that is closest to 1 on their interval, and maps them to `[l', 2 - l']`,
//! the interval of the next step.

use crate::backend::Polynomial;

/// Above this ratio of its ends, an interval gets the polynomial that is closest to 1 around a
/// point, `(15/8, -10/8, 3/8)`, as in the published code, which has a ratio of `1 - 5e-6`. Rounding
/// makes the equations of shorter intervals useless. Outputs are within 2.5e-12 of 1.
const POINT: f64 = 1.0 - 1e-4;

/// The number of exchanges of points. They converge quadratically: from an interval with a ratio of
/// 1e-12, the last digits of the error are reached after ten.
const EXCHANGES: usize = 16;

/// Largest number of steps that [`Composition::needed_steps`] returns.
const MOST_STEPS: usize = 30;

/// The settings of the polynomials of all steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Composition {
    /// The smallest singular value.
    pub lower: f64,
    /// The least ratio of the ends of an interval that a polynomial is made for.
    pub cushion: f64,
    /// The divisor of the input of every polynomial except the last.
    pub safety: f64,
}

/// The interval of the singular values before a step.
#[derive(Clone, Copy, Debug)]
struct Interval {
    lower: f64,
    upper: f64,
}

impl Composition {
    /// The polynomials of `steps` steps.
    pub fn polynomials(self, steps: usize) -> Vec<Polynomial> {
        let mut interval = self.start();
        (1..=steps)
            .map(|step| {
                let exact = self.closest(interval);
                let polynomial = if step < steps { scaled(exact, self.safety) } else { exact };
                interval = interval.after(polynomial);
                polynomial
            })
            .collect()
    }

    /// The least number of steps, at most [`MOST_STEPS`], after which no singular value is further
    /// from 1 than `error`.
    pub fn needed_steps(self, error: f64) -> usize {
        let mut interval = self.start();
        for step in 1..MOST_STEPS {
            let exact = self.closest(interval);
            if 1.0 - interval.after(exact).lower <= error {
                return step;
            }
            interval = interval.after(scaled(exact, self.safety));
        }
        MOST_STEPS
    }

    fn start(self) -> Interval {
        Interval { lower: self.lower, upper: 1.0 }
    }

    /// The polynomial that is closest to 1 on an interval, with the cushion.
    fn closest(self, Interval { lower, upper }: Interval) -> Polynomial {
        let cushioned = self.cushion * upper;
        if lower >= cushioned {
            return odd_quintic(lower, upper);
        }
        // Made for a shorter interval, it is scaled so that both ends of the whole interval are
        // equally far from 1.
        let polynomial = odd_quintic(cushioned, upper);
        let ends = evaluate(polynomial, lower) + evaluate(polynomial, upper);
        polynomial.map(|coefficient| coefficient * 2.0 / ends)
    }
}

impl Interval {
    /// The interval after a polynomial that was made for it: the lower end is furthest from 1.
    fn after(self, polynomial: Polynomial) -> Self {
        // Rounding may put it above 1.
        let lower = evaluate(polynomial, self.lower).min(1.0);
        Self { lower, upper: 2.0 - lower }
    }
}

/// The odd quintic with the least largest distance from 1 on `[lower, upper]`, by the Remez
/// algorithm: the distance is largest, with alternating signs, at both ends and at the two extrema
/// in between.
fn odd_quintic(lower: f64, upper: f64) -> Polynomial {
    let ratio = lower / upper;
    if ratio >= POINT {
        return scaled([15.0 / 8.0, -10.0 / 8.0, 3.0 / 8.0], upper);
    }
    // Exact in the limit of short intervals.
    let mut inner = [(3.0 * ratio + 1.0) / 4.0, (ratio + 3.0) / 4.0];
    let mut polynomial = levelled([ratio, inner[0], inner[1], 1.0]);
    for _ in 0..EXCHANGES {
        inner = extrema(polynomial);
        polynomial = levelled([ratio, inner[0], inner[1], 1.0]);
    }
    scaled(polynomial, upper)
}

/// The odd quintic that is at the same distance from 1 at four points, with alternating signs. It
/// solves `a x + b x^3 + c x^5 + s E = 1` with signs `s`, for `a`, `b`, `c` and `E`.
fn levelled(points: [f64; 4]) -> Polynomial {
    let mut sign = -1.0;
    let mut rows = points.map(|x| {
        sign = -sign;
        [x, x.powi(3), x.powi(5), sign, 1.0]
    });
    // Gaussian elimination with pivots.
    for pivot in 0..4 {
        let size = |row: &usize| rows[*row][pivot].abs();
        let largest = (pivot..4).max_by(|i, j| size(i).total_cmp(&size(j)));
        rows.swap(pivot, largest.expect("a row is left"));
        let above = rows[pivot];
        for row in &mut rows[pivot + 1..] {
            let factor = row[pivot] / above[pivot];
            for (value, above) in row.iter_mut().zip(above) {
                *value -= factor * above;
            }
        }
    }
    let mut solution = [0.0; 4];
    for i in (0..4).rev() {
        let known: f64 = (i + 1..4).map(|j| rows[i][j] * solution[j]).sum();
        solution[i] = (rows[i][4] - known) / rows[i][i];
    }
    let [a, b, c, _] = solution;
    [a, b, c]
}

/// Both extrema of a polynomial above zero: the roots of `a + 3 b x^2 + 5 c x^4`.
fn extrema([a, b, c]: Polynomial) -> [f64; 2] {
    let root = (9.0 * b * b - 20.0 * a * c).sqrt();
    [-root, root].map(|root| ((-3.0 * b + root) / (10.0 * c)).sqrt())
}

/// The polynomial of the input divided by a number.
pub(super) fn scaled([a, b, c]: Polynomial, divisor: f64) -> Polynomial {
    [a / divisor, b / divisor.powi(3), c / divisor.powi(5)]
}

fn evaluate([a, b, c]: Polynomial, x: f64) -> f64 {
    a * x + b * x.powi(3) + c * x.powi(5)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATIOS: [f64; 7] = [1e-9, 1e-6, 1e-3, 0.024, 0.3, 0.9, 0.99];

    fn composition(lower: f64, cushion: f64, safety: f64) -> Composition {
        Composition { lower, cushion, safety }
    }

    /// The largest distance from 1 on an interval.
    fn distance(polynomial: Polynomial, [lower, upper]: [f64; 2]) -> f64 {
        let points = (0..=100_000).map(|i| lower * (upper / lower).powf(i as f64 / 1e5));
        points.map(|x| (evaluate(polynomial, x) - 1.0).abs()).fold(0.0, f64::max)
    }

    #[test]
    fn polynomials_have_their_largest_distance_at_four_points() {
        for ratio in RATIOS {
            let polynomial = odd_quintic(ratio, 1.0);
            let largest = distance(polynomial, [ratio, 1.0]);
            let [first, second] = extrema(polynomial);
            assert!(ratio < first && first < second && second < 1.0, "{ratio}");
            for (x, sign) in [(ratio, 1.0), (first, -1.0), (second, 1.0), (1.0, -1.0)] {
                let distance = sign * (1.0 - evaluate(polynomial, x));
                assert!((distance - largest).abs() < 1e-9, "{ratio}, {x}: {distance} {largest}");
            }
        }
    }

    /// By the theorem of equioscillation, no change makes the distance smaller.
    #[test]
    fn no_neighbour_is_closer_to_one() {
        for ratio in RATIOS {
            let polynomial = odd_quintic(ratio, 1.0);
            let least = distance(polynomial, [ratio, 1.0]);
            for (i, change) in [(0, 1e-2), (1, 1e-2), (2, 1e-2)] {
                for change in [change, -change] {
                    let mut neighbour = polynomial;
                    neighbour[i] += change;
                    assert!(distance(neighbour, [ratio, 1.0]) > least, "{ratio}, {i} {change}");
                }
            }
        }
    }

    #[test]
    fn polynomials_follow_the_scale_of_the_interval() {
        for upper in [1e-3, 0.5, 1.7, 1e3] {
            let expected = scaled(odd_quintic(0.02, 1.0), upper);
            let actual = odd_quintic(0.02 * upper, upper);
            for (actual, expected) in actual.iter().zip(expected) {
                assert!((actual / expected - 1.0).abs() < 1e-10, "{actual} for {expected}");
            }
        }
    }

    #[test]
    fn short_intervals_are_mapped_to_one() {
        for i in 0..=4_000 {
            let ratio = 1.0 - 10f64.powf(-1.0 - i as f64 / 1e3);
            let polynomial = odd_quintic(ratio, 1.0);
            let bound = 0.1 * (1.0 - ratio).powi(3) + 2.6e-12;
            for x in [ratio, 0.5 * (ratio + 1.0), 1.0] {
                let distance = (evaluate(polynomial, x) - 1.0).abs();
                assert!(distance < bound, "{ratio}, {x}: {distance}");
            }
        }
        assert_eq!(odd_quintic(1.0, 1.0), [1.875, -1.25, 0.375]);
    }

    #[test]
    fn every_step_brings_the_interval_closer_to_one() {
        for lower in [0.9, 0.3, 0.1, 1e-2, 1e-3] {
            for cushion in [0.0, 0.02, 0.1] {
                let made = composition(lower, cushion, 1.0);
                let mut interval = made.start();
                for (step, polynomial) in made.polynomials(8).into_iter().enumerate() {
                    let outputs = [interval.lower, interval.upper];
                    let after = interval.after(polynomial);
                    // The lower end is the furthest from 1, on either side.
                    let furthest = distance(polynomial, outputs);
                    assert!((furthest - (1.0 - after.lower)).abs() < 1e-9, "{lower} {step}");
                    assert!(after.lower >= interval.lower, "{lower} {step}");
                    interval = after;
                }
                assert!(interval.lower > 1.0 - 1e-9, "{lower} {cushion}: {}", interval.lower);
            }
        }
    }

    #[test]
    fn the_number_of_steps_is_the_least_that_suffices() {
        for (lower, safety, steps) in
            [(0.5, 1.05, 1), (1e-2, 1.05, 4), (1e-3, 1.0, 5), (1e-3, 1.05, 5), (1e-6, 1.01, 10)]
        {
            let made = composition(lower, 0.02, safety);
            assert_eq!(made.needed_steps(0.2), steps, "{lower} {safety}");
            let end = |steps| {
                let polynomials = made.polynomials(steps);
                polynomials.into_iter().fold(lower, |x, polynomial| evaluate(polynomial, x))
            };
            assert!(end(steps) >= 0.8 && (steps == 1 || end(steps - 1) < 0.8), "{lower} {safety}");
        }
        assert_eq!(composition(f64::MIN_POSITIVE, 0.02, 1.0).needed_steps(0.2), MOST_STEPS);
    }
}
