//! Parts of the update: alone against float64, together on ranks, and in checkpoints.

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{DType, Device, Tensor};
use distmuon::distributed::Gradients;
use distmuon::parts::{NorMuon, Renormalization, RowEquilibration};
use distmuon::{
    Coefficients, DistMuonConfig, Error, IterationDtype, LrScale, MatrixLayout, MomentumConfig,
    MuonConfig, NewtonSchulzConfig, Part, Result, RoutingRule, WeightDecay, World, checkpoint,
};
use distmuon_testing::device::tf32_or;
use distmuon_testing::models::{Fixed, assert_same_weights, gradients, values};
use distmuon_testing::references::{self, newton_schulz, random};
use faer::Mat;

/// The plainest update that orthogonalises the gradient itself, with unit learning rate and scale.
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

fn all_parts() -> Vec<Part> {
    vec![RowEquilibration.into(), Renormalization::orthogonal().into(), NorMuon::new(0.9).into()]
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

/// The updates that steps subtract from a parameter in a layout. The gradients are matrices
/// `[outputs, inputs]`.
fn updates(config: &MuonConfig, grads: &[Mat<f64>], layout: MatrixLayout) -> Vec<Mat<f64>> {
    let turned = |matrix: &Mat<f64>| match layout {
        MatrixLayout::OutIn => matrix.clone(),
        MatrixLayout::InOut => matrix.transpose().to_owned(),
    };
    let config = config.clone().with_layout(layout);
    let start = Tensor::from_inner(tensor(&turned(&grads[0])).zeros_like()).require_grad();
    let mut model = One { weight: Param::from_tensor(start) };
    let mut optim = config.init(&model);
    let mut before = matrix(&model.weight.val().inner());
    let step = |grad: &Mat<f64>| {
        let mut grads = GradientsParams::new();
        grads.register(model.weight.id, tensor(&turned(grad)));
        model = optim.step(1.0, model.clone(), grads);
        let after = matrix(&model.weight.val().inner());
        let update = &before - &after;
        before = after;
        turned(&update)
    };
    grads.iter().map(step).collect()
}

fn close(actual: &Mat<f64>, expected: &Mat<f64>, case: &str) {
    let error = (actual - expected).norm_l2() / expected.norm_l2();
    assert!(error < tf32_or(1e-4), "{case}: {error:.1e}");
}

/// Matrices of every orientation, with rows of very different sizes.
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

fn iterated(matrix: &Mat<f64>) -> Mat<f64> {
    let schedule = Coefficients::KellerJordan.schedule(5).unwrap();
    newton_schulz(matrix, &schedule, 1e-7)
}

const LAYOUTS: [MatrixLayout; 2] = [MatrixLayout::OutIn, MatrixLayout::InOut];

#[test]
fn row_equilibration_gives_every_output_the_mean_norm() {
    let config = plain().with_parts(vec![RowEquilibration.into()]);
    for (case, grads) in cases() {
        for layout in LAYOUTS {
            for (update, grad) in updates(&config, &grads, layout).iter().zip(&grads) {
                let mean = grad.norm_l2() / (grad.nrows() as f64).sqrt();
                let norm = |i: usize| grad.row(i).norm_l2();
                let equal =
                    Mat::from_fn(grad.nrows(), grad.ncols(), |i, j| grad[(i, j)] * mean / norm(i));
                close(update, &iterated(&equal), case);
            }
        }
    }
}

#[test]
fn renormalization_gives_the_norm_of_an_orthogonal_matrix() {
    let config = plain().with_parts(vec![Renormalization::orthogonal().into()]);
    for (case, grads) in cases() {
        for (update, grad) in updates(&config, &grads, MatrixLayout::OutIn).iter().zip(&grads) {
            let iterated = iterated(grad);
            let rank = grad.nrows().min(grad.ncols()) as f64;
            let expected = faer::Scale(rank.sqrt() / iterated.norm_l2()) * &iterated;
            close(update, &expected, case);
        }
    }
}

#[test]
fn normuon_divides_by_a_second_moment_and_keeps_the_norm() {
    let beta_2 = 0.8;
    let config = plain().with_parts(vec![NorMuon::new(beta_2).into()]);
    for (case, grads) in cases() {
        for layout in LAYOUTS {
            let (rows, columns) = (grads[0].nrows(), grads[0].ncols());
            let by_row = rows >= columns;
            let mut second = vec![0.0; rows.max(columns)];
            for (update, grad) in updates(&config, &grads, layout).iter().zip(&grads) {
                let iterated = iterated(grad);
                let index = |i: usize, j: usize| if by_row { i } else { j };
                let averaged = if by_row { columns } else { rows } as f64;
                let mut squares = vec![0.0; second.len()];
                for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                    squares[index(i, j)] += iterated[(i, j)].powi(2) / averaged;
                }
                for (second, squares) in second.iter_mut().zip(squares) {
                    *second = beta_2 * *second + (1.0 - beta_2) * squares;
                }
                let divided = Mat::from_fn(rows, columns, |i, j| {
                    iterated[(i, j)] / second[index(i, j)].max(1e-10).sqrt()
                });
                let expected = faer::Scale(iterated.norm_l2() / divided.norm_l2()) * &divided;
                close(update, &expected, case);
            }
        }
    }
}

#[test]
fn cautious_decay_never_works_against_the_update() {
    let device = Device::default();
    let values = |seed| tensor(&random(12, 8, seed));
    let (lr, rate, scale) = (0.1, 0.5, 4.0);
    for (decay, decayed_at) in [
        (WeightDecay::Cautious(rate.into()), lr),
        (WeightDecay::CautiousScaled(rate.into()), lr * scale),
    ] {
        let step = |config: &MuonConfig| {
            let muon = config.clone().with_lr_factor(scale).build();
            muon.step(lr, values(1), values(2), None).0
        };
        let undecayed = step(&plain());
        let actual = step(&plain().with_weight_decay(decay));
        let (old, update) = (values(1), values(1) - undecayed.clone());
        let opposed = (old.clone() * update).lower_elem(0.0);
        let none = Tensor::zeros([12, 8], (&device, DType::F32));
        let expected =
            undecayed - old.mul_scalar(decayed_at * rate).mask_where(opposed.clone(), none);
        let error = (actual - expected).abs().max().into_scalar::<f32>();
        assert!(error < 1e-6, "{error}");
        let count = opposed.int().sum().into_scalar::<i64>();
        assert!((10..86).contains(&count), "both signs occur: {count}");
    }
}

/// Matrices of one shape in several parameters, and a stack of them.
#[derive(Module, Debug)]
struct Net {
    weights: Vec<Param<Tensor<2>>>,
    weight_stack: Param<Tensor<3>>,
    bias: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let ones = |shape: [usize; 2]| {
            Param::from_tensor(Tensor::<2>::ones(shape, (device, DType::F32)).require_grad())
        };
        let stack = Tensor::<3>::ones([3, 6, 10], (device, DType::F32));
        let bias = Tensor::<1>::ones([5], (device, DType::F32));
        let net = Self {
            weights: vec![ones([6, 10]), ones([10, 6]), ones([6, 10]), ones([7, 7])],
            weight_stack: Param::from_tensor(stack.require_grad()),
            bias: Param::from_tensor(bias.require_grad()),
        };
        net.map(&mut Fixed::new(5))
    }

    /// Gradients of a step. One of the second step is not finite.
    fn gradients(&self, step: u64) -> GradientsParams {
        let mut gradients = gradients(self, step);
        if step == 1 {
            let id = self.weights[2].id;
            let gradient = gradients.remove::<2>(id).expect("the matrix has a gradient");
            gradients.register(id, gradient.mul_scalar(f32::NAN));
        }
        gradients
    }
}

fn config() -> MuonConfig {
    MuonConfig::new()
        .with_parts(all_parts())
        .with_weight_decay(WeightDecay::CautiousScaled(0.2.into()))
        .with_rule(RoutingRule::muon("weights"))
        .with_rule(RoutingRule::muon(r"weights\.2").layout(MatrixLayout::OutIn))
        .with_rule(RoutingRule::muon("weight_stack").batch())
}

const STEPS: u64 = 4;

fn device() -> Device {
    Device::default().autodiff()
}

/// The weights after all steps of Burn's optimizer of single parameters.
fn by_parameter() -> Vec<f32> {
    let mut net = Net::new(&device());
    let mut optim = config().init(&net);
    for step in 0..STEPS {
        let gradients = net.gradients(step);
        net = optim.step(0.02, net, gradients);
    }
    values(&net)
}

#[test]
fn parts_are_exact_on_any_number_of_ranks() {
    let expected = by_parameter();
    for count in [1, 2, 3, 5] {
        // The mean of five equal gradients may differ from them in the last digit.
        let gradients = if count == 5 { Gradients::Averaged } else { Gradients::PerRank };
        let dist = DistMuonConfig::new()
            .with_muon(config())
            .with_gradients(gradients)
            .with_bucket_mb(Some(0.0005));
        let trained = World::threads(vec![device(); count], |world| -> Result<_> {
            let mut net = Net::new(world.device());
            let mut optim = dist.init(&world, &net)?;
            for step in 0..STEPS {
                let gradients = net.gradients(step);
                net = optim.step(0.02, net, gradients)?;
            }
            Ok((values(&net), optim.skipped_steps().read()))
        });
        for (actual, skipped) in trained.unwrap() {
            assert_same_weights(&format!("{count} ranks"), &actual, &expected);
            assert_eq!(skipped, [("weights.2".to_owned(), 1)].into());
        }
    }
}

/// Saves after two steps with one optimizer, and continues with another.
#[test]
fn checkpoints_of_parts_continue_on_any_number_of_ranks() {
    let expected = by_parameter();
    let folder = tempfile::tempdir().unwrap();
    let on_ranks = |count: usize, save: Option<&str>, load: Option<&str>| {
        let dist = DistMuonConfig::new().with_muon(config()).with_bucket_mb(Some(0.0005));
        let path = |name: &str| folder.path().join(name);
        let trained = World::threads(vec![device(); count], |world| -> Result<_> {
            let mut net = Net::new(world.device());
            let mut optim = dist.init(&world, &net)?;
            let mut start = 0;
            if let Some(name) = load {
                (net, optim, start) = optim.load::<_, u64>(path(name), net)?;
            }
            let end = if save.is_some() { 2 } else { STEPS };
            for step in start..end {
                let gradients = net.gradients(step);
                net = optim.step(0.02, net, gradients)?;
            }
            if let Some(name) = save {
                optim.save(path(name), &net, &end)?;
            }
            Ok(values(&net))
        });
        trained.unwrap().swap_remove(0)
    };
    on_ranks(3, Some("ranks"), None);
    for count in [1, 2] {
        assert_same_weights("ranks to ranks", &on_ranks(count, None, Some("ranks")), &expected);
    }

    let net = Net::new(&device());
    let optim = config().init(&net);
    let path = folder.path().join("ranks");
    let (mut net, mut optim, start) = checkpoint::load::<_, u64, _>(path, net, optim).unwrap();
    assert_eq!(start, 2);
    let single = folder.path().join("single");
    checkpoint::save(&single, &net, &optim, &start).unwrap();
    for step in start..STEPS {
        let gradients = net.gradients(step);
        net = optim.step(0.02, net, gradients);
    }
    assert_same_weights("ranks to a single device", &values(&net), &expected);
    assert_same_weights("a single device to ranks", &on_ranks(2, None, Some("single")), &expected);

    // Without the second moment, the state of another configuration does not fit.
    let net = Net::new(&device());
    let mut optim = config().with_parts(vec![]).init(&net);
    let gradients = net.gradients(0);
    let net = optim.step(0.02, net, gradients);
    let plain = folder.path().join("plain");
    checkpoint::save(&plain, &net, &optim, &1u64).unwrap();
    let error = World::threads([device()], |world| -> Result<()> {
        let net = Net::new(world.device());
        let optim = DistMuonConfig::new().with_muon(config()).init(&world, &net)?;
        optim.load::<_, u64>(&plain, net).map(|_| ())
    });
    let error = error.unwrap_err();
    let Error::Parameter { parameter, reason, .. } = &error else { panic!("{error}") };
    assert!(parameter.starts_with("weight") && reason.contains("second_moment"), "{error}");
}

/// Gradients before a projection that starts at zero are such matrices.
#[test]
fn matrices_of_zeros_stay_finite_with_all_parts() {
    for size in [[8, 8], [16, 16], [64, 32]] {
        let start = Tensor::<2>::ones(size, (&Device::default(), DType::F32));
        let zeros = start.zeros_like();
        let muon = plain().with_parts(all_parts()).build();
        let (after, state) = muon.step(0.1, start.clone(), zeros, None);
        assert_eq!((after - start.clone()).abs().max().into_scalar::<f32>(), 0.0);
        for tiny in [1e-30, 1.0] {
            let grad = tensor(&random(size[0], size[1], 3)).mul_scalar(tiny);
            let (after, state) = muon.step(0.1, start.clone(), grad, state.clone());
            let moved = (after - start.clone()).abs().max().into_scalar::<f32>();
            assert!(moved.is_finite() && moved < 0.1, "{size:?}, {tiny}: {moved}");
            assert_eq!(state.unwrap().skipped().into_scalar::<f32>(), 0.0);
        }
    }
}

#[test]
fn invalid_settings_of_parts_are_rejected() {
    for beta_2 in [-0.1, 1.0, f64::NAN] {
        let error = plain().with_parts(vec![NorMuon::new(beta_2).into()]).try_build().unwrap_err();
        assert!(
            matches!(&error, Error::Setting { setting, .. } if setting == "parts.NorMuon.beta_2"),
            "{error}"
        );
    }
    let twice = vec![NorMuon::new(0.9).into(), NorMuon::new(0.5).into()];
    let error = plain().with_parts(twice).try_build().unwrap_err();
    assert!(matches!(&error, Error::Setting { setting, .. } if setting == "parts"), "{error}");
    assert_eq!(Part::from(NorMuon::new(0.9)).to_string(), "NorMuon (after the iteration)");
}
