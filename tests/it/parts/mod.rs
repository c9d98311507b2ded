//! Parts of the update, forms of momentum and kinds of weight decay: alone against float64,
//! together, and the properties that they claim. On ranks, they are tested in
//! `distributed/parts.rs`.

mod after;
mod before;
mod combinations;
mod momentum;
mod parameter;
mod properties;
mod rejected;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use distmuon::{
    Coefficients, IterationDtype, LrScale, MatrixLayout, MomentumConfig, MuonConfig,
    NewtonSchulzConfig, RoutingRule,
};
use distmuon_testing::device::tf32_or;
use distmuon_testing::references::{self, newton_schulz, random};
use faer::Mat;

const LAYOUTS: [MatrixLayout; 2] = [MatrixLayout::OutIn, MatrixLayout::InOut];

/// The plainest update, which orthogonalises the gradient itself.
fn plain() -> MuonConfig {
    let newton_schulz = NewtonSchulzConfig::new()
        .with_coefficients(Coefficients::KellerJordan)
        .with_steps(Some(5))
        .with_dtype(IterationDtype::F32);
    MuonConfig::new()
        .with_momentum(MomentumConfig::new().with_momentum(0.0.into()).with_nesterov(false))
        .with_newton_schulz(newton_schulz)
        .with_weight_decay(0.0.into())
        .with_lr_scale(LrScale::None)
        .with_rule(RoutingRule::muon("weight"))
}

/// The result of the iteration of [`plain`], in float64.
fn iterated(matrix: &Mat<f64>) -> Mat<f64> {
    iterated_above(matrix, 1e-7)
}

/// The same with another `epsilon`.
fn iterated_above(matrix: &Mat<f64>, epsilon: f64) -> Mat<f64> {
    let schedule = Coefficients::KellerJordan.schedule(5).unwrap();
    newton_schulz(matrix, &schedule, epsilon)
}

#[derive(Module, Debug)]
struct One {
    weight: Param<Tensor<2>>,
}

fn tensor(matrix: &Mat<f64>) -> Tensor<2> {
    references::tensor(matrix, &Device::default()).reshape([matrix.nrows(), matrix.ncols()])
}

fn matrix(tensor: &Tensor<2>) -> Mat<f64> {
    references::matrix(&tensor.clone().unsqueeze::<3>(), 0)
}

/// The values of a parameter after every step in a layout. Values and gradients are
/// `[outputs, inputs]`.
fn trajectory(
    config: &MuonConfig,
    start: &Mat<f64>,
    grads: &[Mat<f64>],
    lr: f64,
    layout: MatrixLayout,
) -> Vec<Mat<f64>> {
    let turned = |matrix: &Mat<f64>| match layout {
        MatrixLayout::OutIn => matrix.clone(),
        MatrixLayout::InOut => matrix.transpose().to_owned(),
    };
    let start = Tensor::from_inner(tensor(&turned(start))).require_grad();
    let mut model = One { weight: Param::from_tensor(start) };
    let mut optim = config.clone().with_layout(layout).init(&model);
    let step = |grad: &Mat<f64>| {
        let mut grads = GradientsParams::new();
        grads.register(model.weight.id, tensor(&turned(grad)));
        model = optim.step(lr, model.clone(), grads);
        turned(&matrix(&model.weight.val().inner()))
    };
    grads.iter().map(step).collect()
}

/// The updates that steps subtract at a learning rate of 1, in a layout.
fn updates(config: &MuonConfig, grads: &[Mat<f64>], layout: MatrixLayout) -> Vec<Mat<f64>> {
    let start = Mat::zeros(grads[0].nrows(), grads[0].ncols());
    let values = trajectory(config, &start, grads, 1.0, layout);
    let before = std::iter::once(&start).chain(&values);
    before.zip(&values).map(|(before, after)| before - after).collect()
}

fn close(actual: &Mat<f64>, expected: &Mat<f64>, case: &str) {
    close_within(1e-4, actual, expected, case);
}

fn close_within(tolerance: f64, actual: &Mat<f64>, expected: &Mat<f64>, case: &str) {
    let error = (actual - expected).norm_l2() / expected.norm_l2();
    assert!(error < tf32_or(tolerance), "{case}: {error:.1e}");
}

/// Compares all steps of two runs.
fn all_close(actual: &[Mat<f64>], expected: &[Mat<f64>], case: &str) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    for (step, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        close(actual, expected, &format!("{case}, step {step}"));
    }
}

/// The gradients of three steps of matrices of every orientation, with rows of very different
/// sizes.
fn cases() -> Vec<(&'static str, Vec<Mat<f64>>)> {
    let grads = |rows, columns| {
        let grad = |seed| {
            let random = random(rows, columns, seed);
            Mat::from_fn(rows, columns, |i, j| random[(i, j)] * 10f64.powi(i as i32 % 3 - 1))
        };
        (1..=3).map(grad).collect::<Vec<_>>()
    };
    vec![("wide", grads(12, 20)), ("tall", grads(20, 12)), ("square", grads(16, 16))]
}

/// A matrix with the values of a function of every index.
fn mapped(matrix: &Mat<f64>, f: impl Fn(usize, usize, f64) -> f64) -> Mat<f64> {
    Mat::from_fn(matrix.nrows(), matrix.ncols(), |i, j| f(i, j, matrix[(i, j)]))
}

fn times(factor: f64, matrix: &Mat<f64>) -> Mat<f64> {
    faer::Scale(factor) * matrix
}

/// The matrix with another Frobenius norm.
fn resized(matrix: &Mat<f64>, norm: f64) -> Mat<f64> {
    times(norm / matrix.norm_l2(), matrix)
}
