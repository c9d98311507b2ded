//! The rounding errors of the two forms, predicted to first order.
//!
//! In the bases of its singular vectors `X` is a diagonal matrix, and so are all polynomials of
//! `X`. Rounding a product adds an error `E`, whose entries `(i, j)` and `(j, i)` propagate
//! independently of all others. Through an odd polynomial `f` of `X`, the symmetric part
//! `E_ij + E_ji` is multiplied by `(f(s_i) - f(s_j)) / (s_i - s_j)`, and the antisymmetric part by
//! `(f(s_i) + f(s_j)) / (s_i + s_j)`. That is the theorem of Daleckii and Krein for the matrix with
//! blocks `X` and `X^T` (Higham, Functions of Matrices, theorem 3.11). The singular vectors are
//! assumed to be random, so the rounding error of a product is distributed evenly over all entries.
//! The errors of different products are assumed to be independent, so their squares add.
//!
//! Of a symmetric product only the lower triangle is computed and then mirrored. Once `Q` and `R`
//! have errors, `Q Z` and `R Z` are not exactly symmetric. The antisymmetric part of their errors
//! is mirrored as well, and is distributed as if it were a rounding error.

use burn::tensor::FloatDType;

use super::config::Normalization;
use crate::backend::Polynomial;

/// The root mean square of the relative error of one rounding, in units of the last place of 1. It
/// is a quarter, since the error is uniform up to one half, and numbers are between 1 and 2.
const ROUNDING_RMS: f64 = 0.25;

/// The largest relative change, by rounding, of the factor by which one step multiplies a least
/// eigenvalue of `R` that was 0. Negative eigenvalues grow by `a^2` per step, in the end faster
/// than to first order.
const MAX_FACTOR_CHANGE: f64 = 0.25;

/// The largest size of the result with errors, in multiples of its largest exact singular value.
/// Beyond their interval, polynomials soon diverge.
const MAX_GROWTH: f64 = 2.0;

/// The relative rounding errors of an arithmetic.
#[derive(Debug, Clone, Copy)]
pub struct Arithmetic {
    /// The error of a stored number.
    pub storing: f64,
    /// The error of a number that is added to a sum.
    pub summing: f64,
}

impl Arithmetic {
    /// The arithmetic of a type. Half precision is summed in float32.
    pub fn new(dtype: FloatDType) -> Self {
        // The bits of the fractions of the type and of the type in which products are summed.
        let rounding = |bits: i32| ROUNDING_RMS * 2f64.powi(-bits);
        let (storing, summing) = match dtype {
            FloatDType::F64 => (52, 52),
            FloatDType::F16 => (10, 23),
            FloatDType::BF16 => (7, 23),
            FloatDType::F32 | FloatDType::Flex32 => (23, 23),
        };
        Self { storing: rounding(storing), summing: rounding(summing) }
    }
}

/// The singular values of a matrix, of Frobenius norm 1 when it is made, that has twice as many
/// columns as rows: groups of equal values, the largest first.
#[derive(Debug, Clone)]
pub struct Spectrum {
    values: Vec<f64>,
    /// The number of singular values in each group.
    counts: Vec<f64>,
}

impl Spectrum {
    /// Makes a spectrum with values in proportion to `values`.
    pub fn new(values: Vec<f64>, counts: Vec<f64>) -> Self {
        let norm = squares(&counts, &values).sqrt();
        Self { values: values.iter().map(|value| value / norm).collect(), counts }
    }

    /// The spectrum after the division by a norm.
    ///
    /// [`Normalization::Aol`] divides by one number too if the singular vectors are random, since
    /// all rows of `R = X X^T` then have nearly the same sum. Their diagonal elements have the mean
    /// `1 / m`, and the squares of the others have the sum of all `s^4`, less `1 / m`. The mean
    /// magnitude of normal numbers is `(2 / pi)^(1/2)` times their root mean square.
    pub fn over(&self, normalization: Normalization) -> Self {
        let fourth = |(count, value): (&f64, &f64)| count * value.powi(4);
        let fourths = self.counts.iter().zip(&self.values).map(fourth).sum::<f64>();
        let norm = match normalization {
            Normalization::Frobenius => return self.clone(),
            Normalization::Schatten4 => fourths.powf(0.25),
            Normalization::Aol => {
                let rows = self.counts.iter().sum::<f64>();
                let others = (fourths - rows.recip()).max(0.0) * (1.0 - rows.recip());
                let sum = rows.recip() + (std::f64::consts::FRAC_2_PI * others).sqrt();
                // No rescaling leaves a larger singular value than 1.
                sum.sqrt().max(self.values[0])
            }
        };
        let values = self.values.iter().map(|value| value / norm).collect();
        Self { values, counts: self.counts.clone() }
    }
}

/// The squared relative errors of a run.
#[derive(Debug)]
pub struct Errors {
    /// The error of the standard form.
    pub standard: f64,
    /// The error of rounding the input.
    input: f64,
    /// The errors of segments of the Gram form, from step `start` to before step `end`, at
    /// `[start][end - start - 1]`. They are infinite where they are too large to be predicted. A
    /// segment of one step is a step of the standard form.
    segments: Vec<Vec<f64>>,
}

impl Errors {
    /// Predicts the errors for one spectrum.
    pub fn new(schedule: &[Polynomial], arithmetic: Arithmetic, spectrum: &Spectrum) -> Self {
        let run = ExactIteration::new(schedule, arithmetic, spectrum);
        let steps = schedule.len();
        let last = squares(run.counts, &run.values[steps]);
        let input = run.stored(0, 0.0) / last;
        let standard = (0..steps).map(|step| run.standard_step(step)).sum::<f64>() / last + input;
        let segments = |start| run.segments(start).into_iter().map(|error| error / last).collect();
        Self { standard, input, segments: (0..steps).map(segments).collect() }
    }

    /// The error of the Gram form with segments between these bounds, of which the first is 0.
    pub fn gram(&self, bounds: &[usize]) -> f64 {
        let segment = |part: &[usize]| self.segments[part[0]][part[1] - part[0] - 1];
        self.input + bounds.windows(2).map(segment).sum::<f64>()
    }
}

/// The singular values of a run in exact arithmetic, and the propagation of errors to its result.
struct ExactIteration<'a> {
    schedule: &'a [Polynomial],
    arithmetic: Arithmetic,
    counts: &'a [f64],
    rows: f64,
    columns: f64,
    /// All unordered pairs of groups.
    pairs: Vec<(usize, usize)>,
    /// The singular values before every step and after the last.
    values: Vec<Vec<f64>>,
    /// For every step, the gains of errors by this step and all later ones.
    gains: Vec<Gains>,
}

/// The factors by which errors of `X` are multiplied on their way to the result.
#[derive(Clone)]
struct Gains {
    /// The factors of symmetric and antisymmetric errors, for all pairs of groups.
    symmetric: Vec<f64>,
    antisymmetric: Vec<f64>,
    /// The factors of errors in the columns of `X` beyond the square part.
    outside: Vec<f64>,
}

impl<'a> ExactIteration<'a> {
    fn new(schedule: &'a [Polynomial], arithmetic: Arithmetic, spectrum: &'a Spectrum) -> Self {
        let mut values = vec![spectrum.values.clone()];
        for polynomial in schedule {
            values.push(
                values[values.len() - 1].iter().map(|x| x * even(polynomial, x * x)).collect(),
            );
        }
        let groups = spectrum.values.len();
        let pairs: Vec<_> = (0..groups).flat_map(|i| (0..=i).map(move |j| (i, j))).collect();
        let ones = vec![1.0; pairs.len()];
        let mut gains = vec![Gains {
            symmetric: ones.clone(),
            antisymmetric: ones,
            outside: vec![1.0; groups],
        }];
        for (polynomial, x) in schedule.iter().zip(&values).rev() {
            let mut gain = gains[gains.len() - 1].clone();
            gain.precede(polynomial, x, &pairs);
            gains.push(gain);
        }
        // Computed from the last step to the first, since a gain is a product over the steps after
        // it.
        gains.reverse();
        let rows = spectrum.counts.iter().sum();
        let counts = &spectrum.counts;
        Self { schedule, arithmetic, counts, rows, columns: 2.0 * rows, pairs, values, gains }
    }

    /// The error of the result from rounding `X` before a step, given the squares that the sums of
    /// `X` go through.
    fn stored(&self, step: usize, summed: f64) -> f64 {
        let Gains { symmetric, antisymmetric, outside } = &self.gains[step];
        let inside = (symmetric.iter().zip(antisymmetric))
            .enumerate()
            .map(|(pair, (s, a))| self.weight(pair) * (s * s + a * a) / 2.0)
            .sum::<f64>();
        // The columns beyond the square part meet no singular value on the right: each step scales
        // them by the even factor of their row.
        let outside = (self.columns - self.rows) * squares(self.counts, outside);
        let Arithmetic { storing, summing } = self.arithmetic;
        let stored = squares(self.counts, &self.values[step]);
        let noise = storing.powi(2) * stored + summing.powi(2) * summed;
        noise / (self.rows * self.columns) * (inside + outside)
    }

    /// The error of the result from a symmetric error in a factor that takes `X` from before step
    /// `from` to before step `to`. `variance` is the variance of the entries, for all pairs of
    /// groups.
    fn multiplied(&self, variance: impl Fn(usize) -> f64, from: usize, to: usize) -> f64 {
        let Gains { symmetric, antisymmetric, .. } = &self.gains[to];
        let x = &self.values[from];
        let pairs = 0..symmetric.len();
        let squares = pairs.map(|pair| {
            let (i, j) = self.groups(pair);
            let (even, odd) =
                ((x[i] + x[j]) * symmetric[pair], (x[i] - x[j]) * antisymmetric[pair]);
            self.weight(pair) * variance(pair) * (even * even + odd * odd) / 4.0
        });
        squares.sum()
    }

    /// Returns `true` if the result stays bounded in spite of a symmetric error in a factor of `X`.
    /// Every singular value is taken to be too large by the norm of the error, as for a random
    /// matrix.
    fn is_bounded(&self, variance: impl Fn(usize) -> f64, from: usize, to: usize) -> bool {
        let x = &self.values[from];
        let mut rows = vec![0.0; x.len()];
        for (pair, (i, j)) in self.pairs.iter().enumerate() {
            let squares = variance(pair) * (x[*i] * x[*i] + x[*j] * x[*j]) / 2.0;
            rows[*i] += self.counts[*j] * squares;
            rows[*j] += if i == j { 0.0 } else { self.counts[*i] * squares };
        }
        let largest = |values: &[f64]| values.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
        let limit = MAX_GROWTH * largest(&self.values[self.schedule.len()]);
        rows.iter().zip(&self.values[to]).all(|(squares, x)| {
            // The norm of a random symmetric matrix is twice the root of its rows' variance (the
            // semicircle law).
            let perturbed = x.abs() + 2.0 * squares.sqrt();
            let steps = self.schedule[to..].iter();
            steps.fold(perturbed, |x, polynomial| x * even(polynomial, x * x)).abs() <= limit
        })
    }

    /// The error that one step of the standard form adds.
    fn standard_step(&self, step: usize) -> f64 {
        let [_, b, c] = self.schedule[step];
        let x = &self.values[step];
        let r = squared(x);
        let z = self.z(step, &r);
        let r_noise = self.gram_variance(x, &r);
        let z_noise = self.product_variance(&z, c * c * self.summed(&r, &r));
        let variance = |pair| {
            let (i, j) = self.groups(pair);
            r_noise * (b + c * (r[i] + r[j])).powi(2) + z_noise
        };
        self.multiplied(variance, step, step + 1) + self.stored(step + 1, self.summed(&z, x))
    }

    /// The errors that the Gram form adds if it starts at a step: one for each end after this or a
    /// later step.
    fn segments(&self, start: usize) -> Vec<f64> {
        let x = &self.values[start];
        let mut segment = Segment::new(self, start);
        let mut stable = true;
        let ends = (start..self.schedule.len()).map(|step| {
            stable &= segment.is_stable(&self.schedule[step]);
            segment.advance(step);
            let q_variance = |pair: usize| segment.errors[pair].q;
            let is_safe = stable && self.is_bounded(q_variance, start, step + 1);
            let q_error = self.multiplied(q_variance, start, step + 1);
            let x_error = self.stored(step + 1, self.summed(&segment.q, x));
            match step == start {
                // A segment of one step has no `Q` to multiply: it is the standard step.
                true => self.standard_step(step),
                false if is_safe => q_error + x_error,
                false => f64::INFINITY,
            }
        });
        ends.collect()
    }

    /// The eigenvalues of `Z` at a step.
    fn z(&self, step: usize, r: &[f64]) -> Vec<f64> {
        let [_, b, c] = self.schedule[step];
        r.iter().map(|r| (b + c * r) * r).collect()
    }

    /// The squares that the sums of a product go through. The mean of a factor's diagonal is
    /// excluded, because it is multiplied without a sum.
    fn summed(&self, a: &[f64], b: &[f64]) -> f64 {
        let split = |values: &[f64]| {
            let all = squares(self.counts, values);
            let mean = self.counts.iter().zip(values).map(|(n, x)| n * x).sum::<f64>() / self.rows;
            (mean * mean, (all - self.rows * mean * mean).max(0.0))
        };
        let ((mean_a, rest_a), (mean_b, rest_b)) = (split(a), split(b));
        rest_a * rest_b + mean_a * (self.rows * mean_b + rest_b) + mean_b * rest_a
    }

    /// The variance of the entries of a symmetric product from its rounding, given the eigenvalues
    /// of the product and the squares that its sums go through.
    fn product_variance(&self, values: &[f64], summed: f64) -> f64 {
        let Arithmetic { storing, summing } = self.arithmetic;
        let noise = storing.powi(2) * squares(self.counts, values) + summing.powi(2) * summed;
        noise / self.rows.powi(2)
    }

    /// [`product_variance`](Self::product_variance) of `X X^T`, which sums the squares of rows.
    fn gram_variance(&self, x: &[f64], r: &[f64]) -> f64 {
        self.product_variance(r, squares(self.counts, x).powi(2))
    }

    fn groups(&self, pair: usize) -> (usize, usize) {
        self.pairs[pair]
    }

    /// The number of matrix entries of a pair of groups, in both orders.
    fn weight(&self, pair: usize) -> f64 {
        let (i, j) = self.groups(pair);
        self.counts[i] * self.counts[j] * if i == j { 1.0 } else { 2.0 }
    }
}

impl Gains {
    /// Prepends a step that starts with the singular values `x`.
    fn precede(&mut self, polynomial: &Polynomial, x: &[f64], pairs: &[(usize, usize)]) {
        let gains = self.symmetric.iter_mut().zip(&mut self.antisymmetric);
        for ((s, a), (i, j)) in gains.zip(pairs) {
            let (p, q) = (x[*i], x[*j]);
            *s *= divided(polynomial, p, q);
            *a *= divided(polynomial, p, -q);
        }
        let outside = self.outside.iter_mut().zip(x);
        outside.for_each(|(gain, x)| *gain *= even(polynomial, x * x));
    }
}

/// The eigenvalues of `R` and `Q` of the Gram form between two restarts, and the errors of their
/// entries for all pairs of groups.
struct Segment<'a> {
    run: &'a ExactIteration<'a>,
    r: Vec<f64>,
    q: Vec<f64>,
    errors: Vec<Covariance>,
}

/// The variances and the covariance of the errors of `R` and `Q`.
#[derive(Clone, Copy)]
struct Covariance {
    r: f64,
    q: f64,
    both: f64,
}

/// An error as a linear combination of other errors: the previous ones of `R` and `Q`, and the
/// errors of rounding `Z` and `R (Z + a I)`.
#[derive(Clone, Copy, Default)]
struct Sum {
    r: f64,
    q: f64,
    z: f64,
    rz: f64,
}

impl<'a> Segment<'a> {
    fn new(run: &'a ExactIteration<'a>, start: usize) -> Self {
        let x = &run.values[start];
        let r = squared(x);
        let error = Covariance { r: run.gram_variance(x, &r), q: 0.0, both: 0.0 };
        Self { run, r, q: vec![1.0; x.len()], errors: vec![error; run.pairs.len()] }
    }

    /// Returns `true` if the next step is stable for the least eigenvalue of `R`. The error of this
    /// eigenvalue is at most the norm of a random symmetric matrix.
    fn is_stable(&self, [a, b, c]: &Polynomial) -> bool {
        let (count, variance) = (self.run.counts.last(), self.errors.last());
        // The semicircle law again: twice the root of `n` times the variance.
        let error = 2.0 * count.zip(variance).map_or(0.0, |(n, error)| (n * error.r).sqrt());
        (b.abs() + c.abs() * error) * error <= MAX_FACTOR_CHANGE * a.abs()
    }

    /// Advances by one step: `Q <- Q W` and `R <- (R W) W` with `W = Z + a I`.
    fn advance(&mut self, step: usize) {
        let Self { run, r, q, errors } = self;
        let [a, b, c] = run.schedule[step];
        let z = run.z(step, r);
        let w: Vec<f64> = z.iter().map(|z| z + a).collect();
        let times_w =
            |values: &[f64]| values.iter().zip(&w).map(|(x, w)| x * w).collect::<Vec<_>>();
        let next_q = times_w(q);
        let rw = times_w(r);
        let next_r = times_w(&rw);
        let pair_of = |values: &[f64], pair| {
            let (i, j) = run.groups(pair);
            [values[i], values[j]]
        };
        let dz = |pair| {
            let r = b + c * pair_of(r, pair).iter().sum::<f64>();
            Sum { r, z: 1.0, ..Sum::default() }
        };
        let dq = |pair| {
            let dq = Sum { q: 1.0, ..Sum::default() };
            product(dq, dz(pair), pair_of(q, pair), pair_of(&w, pair))
        };
        let drw = |pair| {
            let dr = Sum { r: 1.0, ..Sum::default() };
            product(dr, dz(pair), pair_of(r, pair), pair_of(&w, pair))
        };
        let dr = |pair| {
            let drw = Sum { rz: 1.0, ..drw(pair).0 };
            product(drw, dz(pair), pair_of(&rw, pair), pair_of(&w, pair))
        };
        let z_noise = run.product_variance(&z, c * c * run.summed(r, r));
        // The variance of an entry from the mirrored antisymmetric part of the errors.
        let mirrored = |odd: &dyn Fn(usize) -> Sum, rw_noise| {
            let energy = |(pair, known): (usize, &Covariance)| {
                run.weight(pair) * known.with(odd(pair), odd(pair), z_noise, rw_noise)
            };
            errors.iter().enumerate().map(energy).sum::<f64>() / run.rows.powi(2)
        };
        let q_noise = match q.iter().all(|q| *q == 1.0) {
            // The first `Q` is a sum.
            true => run.product_variance(&next_q, 0.0),
            false => {
                run.product_variance(&next_q, run.summed(q, &z)) + mirrored(&|pair| dq(pair).1, 0.0)
            }
        };
        let rw_noise =
            run.product_variance(&rw, run.summed(r, &z)) + mirrored(&|pair| drw(pair).1, 0.0);
        let r_noise = run.product_variance(&next_r, run.summed(&rw, &z))
            + mirrored(&|pair| dr(pair).1, rw_noise);
        let next = |(pair, known): (usize, &Covariance)| {
            let (dq, dr) = (dq(pair).0, dr(pair).0);
            Covariance {
                r: known.with(dr, dr, z_noise, rw_noise) + r_noise,
                q: known.with(dq, dq, z_noise, rw_noise) + q_noise,
                both: known.with(dr, dq, z_noise, rw_noise),
            }
        };
        let errors = errors.iter().enumerate().map(next).collect();
        *self = Self { run, r: next_r, q: next_q, errors };
    }
}

impl Covariance {
    /// The covariance of two sums, given the variances of the new rounding errors.
    fn with(&self, x: Sum, y: Sum, z_noise: f64, rz_noise: f64) -> f64 {
        x.r * y.r * self.r
            + x.q * y.q * self.q
            + (x.r * y.q + x.q * y.r) * self.both
            + x.z * y.z * z_noise
            + x.rz * y.rz * rz_noise
    }
}

impl Sum {
    /// `factor` times this plus `other_factor` times the other.
    fn scaled_add(self, factor: f64, other: Self, other_factor: f64) -> Self {
        let add = |x: f64, y: f64| factor * x + other_factor * y;
        Self {
            r: add(self.r, other.r),
            q: add(self.q, other.q),
            z: add(self.z, other.z),
            rz: add(self.rz, other.rz),
        }
    }
}

/// The symmetric and the antisymmetric part of the errors of an entry of `Y W` and its mirror
/// image, given the errors of `Y` and of `W` and their eigenvalues.
fn product(dy: Sum, dw: Sum, [yi, yj]: [f64; 2], [wi, wj]: [f64; 2]) -> (Sum, Sum) {
    let even = dy.scaled_add((wi + wj) / 2.0, dw, (yi + yj) / 2.0);
    let odd = dy.scaled_add((wj - wi) / 2.0, dw, (yi - yj) / 2.0);
    (even, odd)
}

/// `a + b r + c r^2`, the factor by which a step multiplies a singular value whose square is `r`.
fn even([a, b, c]: &Polynomial, r: f64) -> f64 {
    a + (b + c * r) * r
}

/// The divided difference of the odd polynomial at `p` and `q`, without cancellation where they are
/// near.
fn divided([a, b, c]: &Polynomial, p: f64, q: f64) -> f64 {
    let (squares, product) = (p * p + q * q, p * q);
    a + b * (squares + product) + c * (squares * squares - product * product + product * squares)
}

fn squared(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x * x).collect()
}

/// The sum of the squares of values, each counted with its number.
fn squares(counts: &[f64], values: &[f64]) -> f64 {
    counts.iter().zip(values).map(|(count, x)| count * x * x).sum()
}
