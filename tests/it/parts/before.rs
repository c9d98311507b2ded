//! Parts before the iteration.

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::comm::World;
use distmuon::distributed::Layout;
use distmuon::parts::{ColumnEquilibration, Mars, RowEquilibration};
use distmuon::{DistMuonConfig, Error, GradientPair, MatrixLayout, MomentumConfig};
use distmuon_testing::device::has_type;
use distmuon_testing::references::{self, random};
use faer::Mat;

use super::{LAYOUTS, One, all_close, cases, iterated, mapped, matrix, plain, times, updates};

/// Rows scaled to the root mean square of their norms.
fn equal_rows(matrix: &Mat<f64>) -> Mat<f64> {
    let mean = matrix.norm_l2() / (matrix.nrows() as f64).sqrt();
    mapped(matrix, |i, _, x| x * mean / matrix.row(i).norm_l2())
}

fn equal_columns(matrix: &Mat<f64>) -> Mat<f64> {
    equal_rows(&matrix.transpose().to_owned()).transpose().to_owned()
}

#[test]
fn equilibration_gives_rows_or_columns_the_mean_norm() {
    let rows = plain().with_parts(vec![RowEquilibration.into()]);
    let columns = plain().with_parts(vec![ColumnEquilibration.into()]);
    let both = plain().with_parts(vec![ColumnEquilibration.into(), RowEquilibration.into()]);
    for (case, grads) in cases() {
        for layout in LAYOUTS {
            let expected = |equal: &dyn Fn(&Mat<f64>) -> Mat<f64>| {
                grads.iter().map(|grad| iterated(&equal(grad))).collect::<Vec<_>>()
            };
            all_close(&updates(&rows, &grads, layout), &expected(&equal_rows), case);
            all_close(&updates(&columns, &grads, layout), &expected(&equal_columns), case);
            let expected = expected(&|grad| equal_rows(&equal_columns(grad)));
            all_close(&updates(&both, &grads, layout), &expected, case);
        }
    }
}

#[test]
fn mars_adds_the_change_of_the_gradient_and_limits_its_norm() {
    let (gamma, mu) = (0.05, 0.9);
    let config = plain()
        .with_parts(vec![Mars::new(gamma).into()])
        .with_momentum(MomentumConfig::new().with_momentum(mu.into()));
    for (case, grads) in cases() {
        // Norms on both sides of the limit of 1.
        let sizes = [0.02, 1.0, 0.05];
        let grads: Vec<_> = grads.iter().zip(sizes).map(|(grad, size)| times(size, grad)).collect();
        let mut previous = times(0.0, &grads[0]);
        let mut momentum = previous.clone();
        let expected = grads.iter().map(|grad| {
            let change = times(gamma * mu / (1.0 - mu), &(grad - &previous));
            let corrected = grad + change;
            let corrected = times(1.0 / corrected.norm_l2().max(1.0), &corrected);
            previous = grad.clone();
            momentum = times(mu, &momentum) + times(1.0 - mu, &corrected);
            iterated(&(times(mu, &momentum) + times(1.0 - mu, &corrected)))
        });
        let expected: Vec<_> = expected.collect();
        for layout in LAYOUTS {
            all_close(&updates(&config, &grads, layout), &expected, case);
        }
    }
}

/// A loss of `a (w - b)^2 / 2` for every element: the gradients of a batch for two values differ by
/// more than their batch.
struct Batch {
    curvature: Mat<f64>,
    target: Mat<f64>,
}

impl Batch {
    fn new(step: usize, rank: usize) -> Self {
        let seed = (10 * step + rank) as u64;
        let size = [0.05, 1.0][step % 2];
        let curvature = mapped(&random(12, 20, seed + 100), |_, _, x| size * x * x);
        Self { curvature, target: random(12, 20, seed + 200) }
    }

    fn gradient(&self, values: &Mat<f64>) -> Mat<f64> {
        mapped(values, |i, j, x| self.curvature[(i, j)] * (x - self.target[(i, j)]))
    }

    fn backward(&self, model: &One) -> GradientsParams {
        let device = model.weight.val().device();
        let [curvature, target] = [&self.curvature, &self.target]
            .map(|matrix| references::tensor(matrix, &device).reshape([12, 20]));
        let loss = (curvature * (model.weight.val() - target).square()).sum() * 0.5;
        GradientsParams::from_grads(loss.backward(), model)
    }
}

#[test]
fn exact_mars_compares_the_gradients_of_one_batch_on_any_number_of_ranks() {
    let (mars, mu, lr, steps) = (Mars::exact(0.05), 0.9, 0.3, 4);
    let muon = plain()
        .with_parts(vec![mars.into()])
        .with_momentum(MomentumConfig::from(mu).with_nesterov(false))
        .with_layout(MatrixLayout::OutIn);
    for ranks in 1..=3 {
        let start = random(12, 20, 1);
        let (mut values, mut previous) = (start.clone(), start.clone());
        let mut momentum = times(0.0, &start);
        let mut norms = vec![];
        let expected = (0..steps).map(|step| {
            let mean = |values: &Mat<f64>| {
                let of_rank = |rank| Batch::new(step, rank).gradient(values);
                let sum = (1..ranks).map(of_rank).fold(of_rank(0), |sum, of_rank| sum + of_rank);
                times(1.0 / ranks as f64, &sum)
            };
            let change = mean(&values) - mean(&previous);
            let corrected = mean(&values) + times(0.05 * mu / (1.0 - mu), &change);
            norms.push(corrected.norm_l2());
            let corrected = times(1.0 / corrected.norm_l2().max(1.0), &corrected);
            momentum = times(mu, &momentum) + times(1.0 - mu, &corrected);
            previous = values.clone();
            values = &values - times(lr, &iterated(&momentum));
            values.clone()
        });
        let expected: Vec<_> = expected.collect();
        let actual = World::threads(World::devices(ranks), |world| {
            let weight = references::tensor(&start, world.device()).reshape([12, 20]);
            let mut model = One { weight: Param::from_tensor(weight.require_grad()) };
            let mut former = model.clone();
            let mut optim = DistMuonConfig::new().with_muon(muon.clone()).init(&world, &model)?;
            let mut values = vec![];
            for step in 0..steps {
                let batch = Batch::new(step, world.rank());
                let [current, previous] = [&model, &former].map(|model| batch.backward(model));
                let pair = GradientPair { current, previous };
                let gradients = mars.correct(&model, mu, pair)?;
                former = model.clone();
                model = optim.step(lr, model, gradients)?;
                values.push(matrix(&model.weight.val().inner()));
            }
            Ok::<_, Error>(values)
        });
        for actual in actual.expect("all ranks step") {
            all_close(&actual, &expected, &format!("{ranks} ranks"));
        }
        // Both sides of the limit of the norm.
        assert!(norms.iter().any(|norm| *norm > 1.0), "{norms:?}");
        assert!(norms.iter().any(|norm| *norm < 1.0), "{norms:?}");
    }
}

#[test]
fn exact_mars_corrects_in_float32_and_rejects_gradients_without_a_pair() {
    let device = Device::default().autodiff();
    // No device of the tests lacks both.
    let half = if has_type(FloatDType::BF16) { DType::BF16 } else { DType::F16 };
    let ones = Tensor::<2>::ones([8, 8], (&device, half)).require_grad();
    let model = One { weight: Param::from_tensor(ones) };
    let gradient = |value: f64| {
        let mut gradients = GradientsParams::new();
        let like = model.weight.val().inner();
        gradients.register(model.weight.id, like.full_like(value));
        gradients
    };
    let mars = Mars::exact(0.025);
    let pair = GradientPair { current: gradient(1.0), previous: gradient(0.5) };
    let corrected = mars.correct(&model, 0.75, pair).unwrap().remove::<2>(model.weight.id).unwrap();
    assert_eq!(corrected.dtype(), DType::F32);
    // 0.025 times 3 times 0.5, which half precision would round.
    assert!((corrected.max().into_scalar::<f32>() - 1.0375).abs() < 1e-6);

    let none = || GradientPair { current: gradient(1.0), previous: GradientsParams::new() };
    let error = mars.correct(&model, 0.75, none()).unwrap_err();
    assert!(error.to_string().contains("got no previous gradients"), "{error}");
    let unpaired = GradientPair { current: GradientsParams::new(), previous: gradient(1.0) };
    let error = mars.correct(&model, 0.75, unpaired).unwrap_err();
    assert!(error.to_string().contains("got 1 previous gradients of other"), "{error}");
    let mut wide = GradientsParams::new();
    wide.register(model.weight.id, Tensor::<2>::ones([8, 4], &device).inner());
    let pair = GradientPair { current: gradient(1.0), previous: wide };
    let error = mars.correct(&model, 0.75, pair).unwrap_err();
    assert!(error.to_string().contains("expected [8, 8], got [8, 4]"), "{error}");
    let error = Mars::exact(f64::NAN).correct(&model, 0.75, none()).unwrap_err();
    assert!(error.to_string().contains("`Mars.gamma` is invalid"), "{error}");
    for momentum in [1.0, -0.1, f64::NAN] {
        let error = mars.correct(&model, momentum, none()).unwrap_err();
        assert!(error.to_string().contains("`momentum` is invalid"), "{error}");
    }
    let shards = World::launch(2, |world| {
        let weight = Tensor::<2>::ones([64, 64], world.device()).require_grad();
        let model = One { weight: Param::from_tensor(weight) };
        let layout = Layout::from(&world).owned("dp");
        let model = layout.shard(model)?;
        mars.correct(
            &model,
            0.75,
            GradientPair { current: GradientsParams::new(), previous: gradient(1.0) },
        )
        .map(drop)
    });
    let error = shards.unwrap_err();
    assert!(error.to_string().contains("got a shard of the mean of all ranks"), "{error}");
}
