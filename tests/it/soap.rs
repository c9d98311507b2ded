//! SOAP against its authors' steps in float64, and its settings.

use burn::optim::Optimizer;
use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Error;
use distmuon::custom::{LayerOptimizer, SoapConfig, SoapState};
use distmuon_testing::device::is_flex;
use faer::{Mat, Scale, Side};

const LR: f64 = 0.01;
const EVERY: usize = 4;

fn config() -> SoapConfig {
    SoapConfig::new()
        .with_beta_1(0.8)
        .with_beta_2(0.9)
        .with_weight_decay(0.3)
        .with_refresh_every(EVERY)
        .with_largest_side(6)
}

/// Numbers without a pattern, so that a matrix of them has full rank: of a smaller one, the
/// eigenvectors are not unique.
fn numbers(rows: usize, columns: usize, seed: usize) -> Mat<f64> {
    Mat::from_fn(rows, columns, |i, j| {
        let at = 1000 * (seed + 1) + i * columns + j;
        ((at * at % 1_000_003) as f64 * 0.618_034).sin() * (1.0 + i as f64)
    })
}

/// The steps of the authors' code. Sides without a preconditioner have an empty basis.
struct Reference {
    preconditioners: [Mat<f64>; 2],
    bases: [Mat<f64>; 2],
    momentum: Mat<f64>,
    second: Mat<f64>,
    step: usize,
}

impl Reference {
    fn new([m, n]: [usize; 2], is_matrix: bool) -> Self {
        let size = |side: usize| if is_matrix && side <= config().largest_side { side } else { 0 };
        let preconditioners = [m, n].map(|side| Mat::zeros(size(side), size(side)));
        Self {
            bases: preconditioners.clone(),
            preconditioners,
            momentum: Mat::zeros(m, n),
            second: Mat::zeros(m, n),
            step: 0,
        }
    }

    fn projected(&self, x: &Mat<f64>, back: bool) -> Mat<f64> {
        let [left, right] = &self.bases;
        let mut x = x.clone();
        if left.nrows() > 0 {
            x = if back { left * &x } else { left.transpose() * &x };
        }
        if right.nrows() > 0 {
            x = if back { &x * right.transpose() } else { &x * right };
        }
        x
    }

    fn precondition(&mut self, gradient: &Mat<f64>) {
        let products =
            [gradient * gradient.transpose(), (gradient.transpose() * gradient).to_owned()];
        for (preconditioner, product) in self.preconditioners.iter_mut().zip(products) {
            if preconditioner.nrows() > 0 {
                *preconditioner = Scale(config().beta_2) * &*preconditioner
                    + Scale(1.0 - config().beta_2) * product;
            }
        }
    }

    fn step(&mut self, parameter: &mut Mat<f64>, gradient: &Mat<f64>, is_first: bool) {
        let SoapConfig { beta_1, beta_2, epsilon, weight_decay, .. } = config();
        if is_first {
            self.precondition(gradient);
            for (basis, of) in self.bases.iter_mut().zip(&self.preconditioners) {
                if of.nrows() > 0 {
                    let decomposed = of.self_adjoint_eigen(Side::Lower).unwrap();
                    *basis = decomposed.U().reverse_cols().to_owned();
                }
            }
            return;
        }
        self.step += 1;
        let rotated = self.projected(gradient, false);
        self.momentum = Scale(beta_1) * &self.momentum + Scale(1.0 - beta_1) * gradient;
        let [rows, columns] = [self.second.nrows(), self.second.ncols()];
        self.second = Mat::from_fn(rows, columns, |i, j| {
            beta_2 * self.second[(i, j)] + (1.0 - beta_2) * rotated[(i, j)].powi(2)
        });
        let momentum = self.projected(&self.momentum, false);
        let ratio = Mat::from_fn(rows, columns, |i, j| {
            momentum[(i, j)] / (self.second[(i, j)].sqrt() + epsilon)
        });
        let steps = self.step as i32;
        let size = LR * (1.0 - beta_2.powi(steps)).sqrt() / (1.0 - beta_1.powi(steps));
        *parameter = &*parameter - Scale(size) * self.projected(&ratio, true);
        *parameter = Scale(1.0 - LR * weight_decay) * &*parameter;
        self.precondition(gradient);
        if self.step.is_multiple_of(EVERY) {
            self.refresh();
        }
    }

    fn refresh(&mut self) {
        for dimension in 0..2 {
            let (of, basis) = (&self.preconditioners[dimension], &self.bases[dimension]);
            if of.nrows() == 0 {
                continue;
            }
            let values = basis.transpose() * of * basis;
            let mut order: Vec<usize> = (0..of.nrows()).collect();
            order.sort_by(|a, b| values[(*b, *b)].total_cmp(&values[(*a, *a)]));
            let old = self.second.clone();
            self.second = Mat::from_fn(old.nrows(), old.ncols(), |i, j| match dimension {
                0 => old[(order[i], j)],
                _ => old[(i, order[j])],
            });
            let sorted = Mat::from_fn(of.nrows(), of.nrows(), |i, j| basis[(i, order[j])]);
            self.bases[dimension] = (of * sorted).qr().compute_thin_Q();
        }
    }
}

fn tensor<const D: usize>(matrix: &Mat<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
    let columns = matrix.ncols();
    let values = (0..matrix.nrows() * columns).map(|at| matrix[(at / columns, at % columns)]);
    let data = TensorData::new(values.collect::<Vec<_>>(), shape);
    Tensor::from_data(data, (&Device::default(), dtype))
}

/// Compares steps of a parameter of a shape with the reference's.
fn compare<const D: usize>([m, n]: [usize; 2], shape: [usize; D], dtype: DType, most: f64) {
    let soap = config().init().unwrap();
    let mut expected = numbers(m, n, 0);
    let mut parameter = tensor(&expected, shape, dtype);
    let (mut reference, mut state) = (Reference::new([m, n], D == 2), None::<SoapState<D>>);
    for step in 0..3 * EVERY + 2 {
        let gradient = numbers(m, n, step + 1);
        reference.step(&mut expected, &gradient, step == 0);
        let gradient = tensor(&gradient, shape, dtype);
        (parameter, state) = soap.step(LR, parameter, gradient, state);
        let values = parameter.to_data().iter::<f64>().collect::<Vec<_>>();
        for (index, value) in values.into_iter().enumerate() {
            let wanted = expected[(index / n, index % n)];
            let error = (value - wanted).abs();
            assert!(error < most, "{shape:?}, step {step}, {index}: {value} for {wanted}");
        }
    }
}

/// A square matrix, matrices with one long side, a matrix with two, a vector and a stack: without
/// bases for those that have none.
#[test]
fn steps_are_those_of_the_authors_in_float64() {
    // Products on other devices may read float64 and float32 with ten bits.
    let float64 = is_flex().then_some((DType::F64, 1e-10));
    let of_float32 = if is_flex() { 2e-4 } else { 1e-2 };
    for (dtype, most) in float64.into_iter().chain([(DType::F32, of_float32)]) {
        compare([6, 6], [6, 6], dtype, most);
        compare([5, 8], [5, 8], dtype, most);
        compare([9, 4], [9, 4], dtype, most);
        compare([7, 8], [7, 8], dtype, most);
        compare([1, 7], [7], dtype, most);
        compare([4, 3], [2, 2, 3], dtype, most);
    }
}

/// Squares of this gradient overflow: the step has no direction, and later ones have one again.
#[test]
fn a_gradient_whose_squares_overflow_leaves_finite_weights() {
    let (soap, device) = (config().init().unwrap(), Device::default());
    for large_at in [0, 3, EVERY + 1] {
        let mut parameter = Tensor::<2>::ones([4, 4], (&device, DType::F32));
        let mut state = None;
        for step in 0..2 * EVERY + 3 {
            let size = if step == large_at { 1e25 } else { 1.0 };
            let gradient = tensor(&(Scale(size) * numbers(4, 4, step)), [4, 4], DType::F32);
            (parameter, state) = soap.step(LR, parameter, gradient, state);
        }
        let values = parameter.into_data().iter::<f32>().collect::<Vec<_>>();
        assert!(values.iter().all(|value| value.is_finite()), "{large_at}: {values:?}");
    }
}

/// As the first one of a layer without tokens.
#[test]
fn a_gradient_of_zeros_makes_bases() {
    let (soap, device) = (config().init().unwrap(), Device::default());
    let mut parameter = Tensor::<2>::ones([4, 4], (&device, DType::F32));
    let mut state = None;
    for step in 0..EVERY + 3 {
        let gradient = tensor(&numbers(4, 4, step), [4, 4], DType::F32);
        let gradient = if step < 2 { gradient.zeros_like() } else { gradient };
        (parameter, state) = soap.step(LR, parameter, gradient, state);
    }
    let values = parameter.into_data().iter::<f32>().collect::<Vec<_>>();
    assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
    assert!(values.iter().any(|value| (value - 1.0).abs() > 0.01), "{values:?}");
}

#[test]
fn settings_out_of_their_ranges_are_rejected() {
    let new = SoapConfig::new;
    for (config, name) in [
        (new().with_beta_1(1.0), "beta_1"),
        (new().with_beta_2(-0.1), "beta_2"),
        (new().with_epsilon(f64::NAN), "epsilon"),
        (new().with_weight_decay(-1.0), "weight_decay"),
        (new().with_refresh_every(0), "refresh_every"),
        (new().with_largest_side(0), "largest_side"),
    ] {
        let error = config.init().unwrap_err();
        let Error::Setting { setting, .. } = &error else { panic!("{error}") };
        assert_eq!(setting, name);
    }
}

/// Both sides cost more than one, and rarer refreshes less.
#[test]
fn operations_follow_the_sides_and_the_refreshes() {
    let of = |config: SoapConfig| config.init().unwrap().operations(&[64, 128]);
    let whole = of(SoapConfig::new());
    assert!(of(SoapConfig::new().with_largest_side(64)) < whole);
    assert!(of(SoapConfig::new().with_refresh_every(100)) < whole);
    assert!(of(SoapConfig::new().with_largest_side(1)) > 0.0);
}
