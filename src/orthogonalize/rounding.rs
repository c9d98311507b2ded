//! The errors that rounding makes in the two forms, predicted to first order.
//!
//! In the bases of its singular vectors `X` is a diagonal matrix, and so are all polynomials of it. A
//! product is rounded to something else, and an error `E` in entry `(i, j)` travels by itself:
//! through an odd polynomial `f` of `X`, its symmetric part `E_ij + E_ji` is multiplied by
//! `(f(s_i) - f(s_j)) / (s_i - s_j)`, its antisymmetric part by `(f(s_i) + f(s_j)) / (s_i + s_j)`
//! (Daleckii and Krein; Higham, Functions of Matrices, theorem 3.11, for the matrix with blocks `X` and
//! `X^T`). The singular vectors are taken for random, so that what a product rounds is spread evenly over
//! all entries, and the errors of different products for independent, so that their squares add.
//!
//! Of a symmetric product only the lower triangle is computed and then mirrored. Once `Q` and `R` carry
//! errors of their own, `Q Z` and `R Z` are not quite symmetric; what that makes antisymmetric is
//! mirrored as well, and is spread as if it had been rounded.

use burn::tensor::FloatDType;

use super::coefficients::Polynomial;

/// The root mean square of the relative error of one rounding, over the unit in the last place of 1:
/// a quarter, since an error is uniform up to a half, of numbers between 1 and 2.
const OF_LAST_PLACE: f64 = 0.25;

/// The part that one step may change the factor of the least eigenvalue of `R` by, if that was 0 and rounded. Negative
/// eigenvalues grow by `a^2` a step, in the end faster than to first order.
const STABLE: f64 = 0.25;

/// The size that errors may give the result, in multiples of its largest exact singular value: polynomials diverge
/// not far beyond their interval.
const BOUND: f64 = 2.0;

/// The rounding of numbers.
#[derive(Debug, Clone, Copy)]
pub struct Arithmetic {
    /// Of what is stored.
    pub storing: f64,
    /// Of what is summed.
    pub summing: f64,
}

impl Arithmetic {
    /// That of a type; half precision is summed in float32.
    pub fn of(dtype: FloatDType) -> Self {
        let rounding = |bits: i32| OF_LAST_PLACE * 2f64.powi(-bits);
        let (storing, summing) = match dtype {
            FloatDType::F64 => (52, 52),
            FloatDType::F16 => (10, 23),
            FloatDType::BF16 => (7, 23),
            _ => (23, 23),
        };
        Self { storing: rounding(storing), summing: rounding(summing) }
    }
}

/// The singular values of a matrix of Frobenius norm 1 that has twice as many columns as rows: some
/// values, from the largest, each so many times.
#[derive(Debug, Clone)]
pub struct Spectrum {
    values: Vec<f64>,
    counts: Vec<f64>,
}

impl Spectrum {
    /// Values in proportion to these.
    pub fn new(values: Vec<f64>, counts: Vec<f64>) -> Self {
        let norm = squares(&counts, &values).sqrt();
        Self { values: values.iter().map(|value| value / norm).collect(), counts }
    }
}

/// The squares of the relative errors of a run.
#[derive(Debug)]
pub struct Errors {
    /// Of the standard form.
    pub standard: f64,
    /// Of rounding the matrix.
    input: f64,
    /// Of the steps from one to before another, done by the Gram form: `[start][end - start - 1]`. Infinite
    /// where errors are too large to be predicted; one step is a step of the standard form.
    segments: Vec<Vec<f64>>,
}

impl Errors {
    /// The errors for one spectrum.
    pub fn of(schedule: &[Polynomial], arithmetic: Arithmetic, spectrum: &Spectrum) -> Self {
        let run = Run::new(schedule, arithmetic, spectrum);
        let steps = schedule.len();
        let last = squares(run.counts, &run.values[steps]);
        let input = run.stored(0, 0.0) / last;
        let standard = (0..steps).map(|step| run.standard_step(step)).sum::<f64>() / last + input;
        let of = |start| run.segments(start).into_iter().map(|error| error / last).collect();
        Self { standard, input, segments: (0..steps).map(of).collect() }
    }

    /// Of the Gram form up to the last of these bounds, from 0 on, between which it restarts.
    pub fn gram(&self, bounds: &[usize]) -> f64 {
        let segment = |part: &[usize]| self.segments[part[0]][part[1] - part[0] - 1];
        self.input + bounds.windows(2).map(segment).sum::<f64>()
    }
}

/// A spectrum under exact arithmetic, and the way of errors through it.
struct Run<'a> {
    schedule: &'a [Polynomial],
    arithmetic: Arithmetic,
    counts: &'a [f64],
    rows: f64,
    columns: f64,
    /// All pairs of groups, in one order each.
    pairs: Vec<(usize, usize)>,
    /// The singular values before every step and after the last.
    values: Vec<Vec<f64>>,
    /// The gains of errors by the steps from one on.
    gains: Vec<Gains>,
}

/// The factors on errors of `X` on their way to the result.
#[derive(Clone)]
struct Gains {
    /// Of symmetric and antisymmetric errors, for all pairs of groups.
    symmetric: Vec<f64>,
    antisymmetric: Vec<f64>,
    /// Of errors in the columns that `X` has beyond its rows.
    outside: Vec<f64>,
}

impl<'a> Run<'a> {
    fn new(schedule: &'a [Polynomial], arithmetic: Arithmetic, spectrum: &'a Spectrum) -> Self {
        let mut values = vec![spectrum.values.clone()];
        for polynomial in schedule {
            let odd = |x: &f64| x * even(polynomial, x * x);
            values.push(values[values.len() - 1].iter().map(odd).collect());
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
        gains.reverse();
        let rows = spectrum.counts.iter().sum();
        let counts = &spectrum.counts;
        Self { schedule, arithmetic, counts, rows, columns: 2.0 * rows, pairs, values, gains }
    }

    /// The part that reaches the result of rounding `X` before a step, given the squares that its sums went through.
    fn stored(&self, step: usize, summed: f64) -> f64 {
        let Gains { symmetric, antisymmetric, outside } = &self.gains[step];
        let inside = (symmetric.iter().zip(antisymmetric))
            .enumerate()
            .map(|(pair, (s, a))| self.weight(pair) * (s * s + a * a) / 2.0)
            .sum::<f64>();
        let outside = (self.columns - self.rows) * squares(self.counts, outside);
        let Arithmetic { storing, summing } = self.arithmetic;
        let stored = squares(self.counts, &self.values[step]);
        let noise = storing.powi(2) * stored + summing.powi(2) * summed;
        noise / (self.rows * self.columns) * (inside + outside)
    }

    /// The part that reaches the result of a symmetric error in a factor of `X`, where `X` was before a step and
    /// becomes what it is before another; `variance` for all pairs of groups.
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

    /// Tells whether the result stays bounded if every singular value is too large by what a symmetric error in a
    /// factor of `X` may make of it, as the norm of a random matrix.
    fn is_bounded(&self, variance: impl Fn(usize) -> f64, from: usize, to: usize) -> bool {
        let x = &self.values[from];
        let mut rows = vec![0.0; x.len()];
        for (pair, (i, j)) in self.pairs.iter().enumerate() {
            let squares = variance(pair) * (x[*i] * x[*i] + x[*j] * x[*j]) / 2.0;
            rows[*i] += self.counts[*j] * squares;
            rows[*j] += if i == j { 0.0 } else { self.counts[*i] * squares };
        }
        let largest = |values: &[f64]| values.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let limit = BOUND * largest(&self.values[self.schedule.len()]);
        rows.iter().zip(&self.values[to]).all(|(squares, x)| {
            let wrong = x.abs() + 2.0 * squares.sqrt();
            let steps = self.schedule[to..].iter();
            steps.fold(wrong, |x, polynomial| x * even(polynomial, x * x)).abs() <= limit
        })
    }

    /// The error that one step of the standard form adds.
    fn standard_step(&self, step: usize) -> f64 {
        let [_, b, c] = self.schedule[step];
        let x = &self.values[step];
        let (r, z) = (squared(x), self.z(step, &squared(x)));
        let of_r = self.of_gram(x, &r);
        let of_z = self.spread(&z, c * c * self.summed(&r, &r));
        let variance = |pair| {
            let (i, j) = self.groups(pair);
            of_r * (b + c * (r[i] + r[j])).powi(2) + of_z
        };
        self.multiplied(variance, step, step + 1) + self.stored(step + 1, self.summed(&z, x))
    }

    /// The error that the Gram form adds if it starts at a step and ends after this or a later one.
    fn segments(&self, start: usize) -> Vec<f64> {
        let x = &self.values[start];
        let mut segment = Segment::new(self, start);
        let mut stable = true;
        let ends = (start..self.schedule.len()).map(|step| {
            stable &= segment.is_stable(&self.schedule[step]);
            segment.advance(step);
            let of_q = |pair: usize| segment.errors[pair].q;
            let is_safe = stable && self.is_bounded(of_q, start, step + 1);
            let in_q = self.multiplied(of_q, start, step + 1);
            let in_x = self.stored(step + 1, self.summed(&segment.q, x));
            match step == start {
                true => self.standard_step(step),
                false if is_safe => in_q + in_x,
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

    /// The squares that the sums of a product go through. What one factor has in common on its diagonal
    /// is multiplied, not summed.
    fn summed(&self, a: &[f64], b: &[f64]) -> f64 {
        let split = |values: &[f64]| {
            let all = squares(self.counts, values);
            let mean = self.counts.iter().zip(values).map(|(n, x)| n * x).sum::<f64>() / self.rows;
            (mean * mean, (all - self.rows * mean * mean).max(0.0))
        };
        let ((mean_a, rest_a), (mean_b, rest_b)) = (split(a), split(b));
        rest_a * rest_b + mean_a * (self.rows * mean_b + rest_b) + mean_b * rest_a
    }

    /// The variance of an entry of a symmetric product that was rounded, given its eigenvalues and the
    /// squares that its sums went through.
    fn spread(&self, values: &[f64], summed: f64) -> f64 {
        let Arithmetic { storing, summing } = self.arithmetic;
        let noise = storing.powi(2) * squares(self.counts, values) + summing.powi(2) * summed;
        noise / self.rows.powi(2)
    }

    /// [`spread`](Self::spread) of `X X^T`, whose rows are summed in squares.
    fn of_gram(&self, x: &[f64], r: &[f64]) -> f64 {
        self.spread(r, squares(self.counts, x).powi(2))
    }

    fn groups(&self, pair: usize) -> (usize, usize) {
        self.pairs[pair]
    }

    /// The number of entries of a pair of groups, in either order.
    fn weight(&self, pair: usize) -> f64 {
        let (i, j) = self.groups(pair);
        self.counts[i] * self.counts[j] * if i == j { 1.0 } else { 2.0 }
    }
}

impl Gains {
    /// Puts a step before these, on the values `x`.
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

/// `R` and `Q` of the Gram form between two restarts, with the errors of their entries for all pairs of
/// groups.
struct Segment<'a> {
    run: &'a Run<'a>,
    r: Vec<f64>,
    q: Vec<f64>,
    errors: Vec<Covariance>,
}

/// Variances and covariance of the errors of `R` and `Q`.
#[derive(Clone, Copy)]
struct Covariance {
    r: f64,
    q: f64,
    both: f64,
}

/// An error as a sum of others: those that `R` and `Q` had, and what rounding `Z` and `R (Z + a I)` adds.
#[derive(Clone, Copy, Default)]
struct Sum {
    r: f64,
    q: f64,
    z: f64,
    rz: f64,
}

impl<'a> Segment<'a> {
    fn new(run: &'a Run<'a>, start: usize) -> Self {
        let x = &run.values[start];
        let r = squared(x);
        let error = Covariance { r: run.of_gram(x, &r), q: 0.0, both: 0.0 };
        Self { run, r, q: vec![1.0; x.len()], errors: vec![error; run.pairs.len()] }
    }

    /// Tells whether the least eigenvalue of `R` is safe; its error is at most the norm of a random symmetric matrix.
    fn is_stable(&self, [a, b, c]: &Polynomial) -> bool {
        let (count, variance) = (self.run.counts.last(), self.errors.last());
        let error = 2.0 * count.zip(variance).map_or(0.0, |(n, error)| (n * error.r).sqrt());
        (b.abs() + c.abs() * error) * error <= STABLE * a.abs()
    }

    /// One step: `Q <- Q W` and `R <- (R W) W` with `W = Z + a I`.
    fn advance(&mut self, step: usize) {
        let Self { run, r, q, errors } = self;
        let [a, b, c] = run.schedule[step];
        let z = run.z(step, r);
        let w: Vec<f64> = z.iter().map(|z| z + a).collect();
        let times_w =
            |values: &[f64]| values.iter().zip(&w).map(|(x, w)| x * w).collect::<Vec<_>>();
        let (next_q, rw) = (times_w(q), times_w(r));
        let next_r = times_w(&rw);
        let at = |values: &[f64], pair| {
            let (i, j) = run.groups(pair);
            [values[i], values[j]]
        };
        let dz =
            |pair| Sum { r: b + c * at(r, pair).iter().sum::<f64>(), z: 1.0, ..Sum::default() };
        let dq = |pair| {
            let dq = Sum { q: 1.0, ..Sum::default() };
            product(dq, dz(pair), at(q, pair), at(&w, pair))
        };
        let drw = |pair| {
            let dr = Sum { r: 1.0, ..Sum::default() };
            product(dr, dz(pair), at(r, pair), at(&w, pair))
        };
        let dr = |pair| {
            let drw = Sum { rz: 1.0, ..drw(pair).0 };
            product(drw, dz(pair), at(&rw, pair), at(&w, pair))
        };
        let of_z = run.spread(&z, c * c * run.summed(r, r));
        let mirrored = |odd: &dyn Fn(usize) -> Sum, of_rw| {
            let energy = |(pair, known): (usize, &Covariance)| {
                run.weight(pair) * known.with(odd(pair), odd(pair), of_z, of_rw)
            };
            errors.iter().enumerate().map(energy).sum::<f64>() / run.rows.powi(2)
        };
        let of_q = match q.iter().all(|q| *q == 1.0) {
            // The first `Q` is a sum.
            true => run.spread(&next_q, 0.0),
            false => run.spread(&next_q, run.summed(q, &z)) + mirrored(&|pair| dq(pair).1, 0.0),
        };
        let of_rw = run.spread(&rw, run.summed(r, &z)) + mirrored(&|pair| drw(pair).1, 0.0);
        let of_r = run.spread(&next_r, run.summed(&rw, &z)) + mirrored(&|pair| dr(pair).1, of_rw);
        let next = errors.iter().enumerate().map(|(pair, known)| {
            let (dq, dr) = (dq(pair).0, dr(pair).0);
            Covariance {
                r: known.with(dr, dr, of_z, of_rw) + of_r,
                q: known.with(dq, dq, of_z, of_rw) + of_q,
                both: known.with(dr, dq, of_z, of_rw),
            }
        });
        let next = next.collect();
        *self = Self { run, r: next_r, q: next_q, errors: next };
    }
}

impl Covariance {
    /// The covariance of two sums, given the variances of what rounding adds.
    fn with(&self, x: Sum, y: Sum, of_z: f64, of_rz: f64) -> f64 {
        x.r * y.r * self.r
            + x.q * y.q * self.q
            + (x.r * y.q + x.q * y.r) * self.both
            + x.z * y.z * of_z
            + x.rz * y.rz * of_rz
    }
}

impl Sum {
    fn scaled_add(self, factor: f64, other: Self, of_other: f64) -> Self {
        let add = |x: f64, y: f64| factor * x + of_other * y;
        Self {
            r: add(self.r, other.r),
            q: add(self.q, other.q),
            z: add(self.z, other.z),
            rz: add(self.rz, other.rz),
        }
    }
}

/// The error of an entry of `Y W`, and the difference from its mirror image, over two, given the errors of
/// `Y` and of `W` and their eigenvalues.
fn product(dy: Sum, dw: Sum, [yi, yj]: [f64; 2], [wi, wj]: [f64; 2]) -> (Sum, Sum) {
    let even = dy.scaled_add((wi + wj) / 2.0, dw, (yi + yj) / 2.0);
    let odd = dy.scaled_add((wj - wi) / 2.0, dw, (yi - yj) / 2.0);
    (even, odd)
}

/// `a + b r + c r^2`: what a step multiplies a singular value by whose square is `r`.
fn even([a, b, c]: &Polynomial, r: f64) -> f64 {
    a + (b + c * r) * r
}

/// The divided difference of the odd polynomial, without cancellation where the two are near.
fn divided([a, b, c]: &Polynomial, p: f64, q: f64) -> f64 {
    let (squares, product) = (p * p + q * q, p * q);
    a + b * (squares + product) + c * (squares * squares - product * product + product * squares)
}

fn squared(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x * x).collect()
}

/// The sum of the squares of values, each so many times.
fn squares(counts: &[f64], values: &[f64]) -> f64 {
    counts.iter().zip(values).map(|(count, x)| count * x * x).sum()
}
