//! Norms of a step: against those of the weights, on any number of ranks.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::distributed::Diagnostics;
use distmuon::{
    Coefficients, DistMuonConfig, IterationDtype, MuonConfig, NewtonSchulzConfig, Result,
    RoutingRule, World,
};
use distmuon_testing::device::{has_type, tf32_or};
use distmuon_testing::lacks;
use distmuon_testing::models::{Fixed, gradients, values};
use distmuon_testing::references::{matrix, newton_schulz};
use faer::Mat;

/// A stack of matrices, a matrix in two blocks, a table and a vector.
#[derive(Module, Debug)]
struct Net {
    stack: Param<Tensor<3>>,
    fused: Param<Tensor<2>>,
    table: Param<Tensor<2>>,
    gain: Param<Tensor<1>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        let options = (device, DType::F32);
        let net = Self {
            stack: Param::from_tensor(Tensor::ones([3, 6, 10], options).require_grad()),
            fused: Param::from_tensor(Tensor::ones([6, 12], options).require_grad()),
            table: Param::from_tensor(Tensor::ones([40, 32], options).require_grad()),
            gain: Param::from_tensor(Tensor::ones([7], options).require_grad()),
        };
        net.map(&mut Fixed::new(3))
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

fn config() -> MuonConfig {
    let newton_schulz = NewtonSchulzConfig::new()
        .with_coefficients(Coefficients::KellerJordan)
        .with_dtype(IterationDtype::F32);
    MuonConfig::new()
        .with_newton_schulz(newton_schulz)
        .with_rule(RoutingRule::muon("stack").batch())
        .with_rule(RoutingRule::muon("fused").split([8, 4]))
        .with_rule(RoutingRule::adamw("table"))
}

/// The weights before and after the second of two steps on every rank, and its diagnostics.
fn observed(ranks: usize) -> Vec<(Net, Net, Diagnostics)> {
    let dist = DistMuonConfig::new().with_muon(config()).with_bucket_mb(Some(0.0005));
    let trained = World::threads(vec![device(); ranks], |world| -> Result<_> {
        let mut net = Net::new(world.device());
        let mut optim = dist.init(&world, &net)?;
        let grads = gradients(&net, 0);
        net = optim.step(0.01, net, grads)?;
        assert!(optim.diagnostics()?.is_none(), "nothing was requested");
        let before = net.clone();
        optim.request_diagnostics();
        assert!(optim.diagnostics()?.is_none(), "no step was taken");
        let mut grads = gradients(&net, 1);
        let gain = grads.remove::<1>(net.gain.id).unwrap();
        grads.register(net.gain.id, gain.mul_scalar(f32::NAN));
        net = optim.step(0.01, net, grads)?;
        let diagnostics = optim.diagnostics()?.unwrap();
        assert!(optim.diagnostics()?.is_none(), "they were read");
        let grads = gradients(&net, 2);
        optim.step(0.01, net.clone(), grads)?;
        assert!(optim.diagnostics()?.is_none(), "one step was requested");
        Ok((before, net, diagnostics))
    });
    trained.unwrap()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt()
}

fn close(actual: f64, expected: f64, case: &str) {
    assert!((actual - expected).abs() <= tf32_or(1e-5) * expected, "{case}: {actual}, {expected}");
}

#[derive(Module, Debug)]
struct One<const D: usize> {
    weight: Param<Tensor<D>>,
}

fn of<const D: usize>(weight: &Param<Tensor<D>>) -> Vec<f32> {
    values(&One { weight: weight.clone() })
}

#[test]
fn norms_are_those_of_the_weights_on_any_number_of_ranks() {
    for ranks in [1, 2, 3] {
        for (before, after, diagnostics) in observed(ranks) {
            let found = |path: &str| {
                let mut each = diagnostics.parameters.iter();
                each.find(|parameter| parameter.path == path).unwrap_or_else(|| panic!("{path}"))
            };
            for (path, old, new) in [
                ("stack", of(&before.stack), of(&after.stack)),
                ("table", of(&before.table), of(&after.table)),
                ("gain", of(&before.gain), of(&after.gain)),
            ] {
                let change: Vec<f32> = new.iter().zip(&old).map(|(new, old)| new - old).collect();
                close(found(path).update_norm, norm(&change), path);
                close(found(path).weight_norm, norm(&new), path);
            }
            assert_eq!((found("gain").update_norm, found("gain").skipped), (0.0, 1));
            assert_eq!((found("stack").skipped, found("table").orthogonality_error), (0, None));
            let [left, right] = ["fused[0..8]", "fused[8..12]"].map(|path| found(path).weight_norm);
            close(left.hypot(right), norm(&of(&after.fused)), "blocks");
            let lr = found("stack").lr;
            assert!((lr - 0.01 * 0.2 * 10f64.sqrt()).abs() < 1e-12, "{lr}");

            let groups = diagnostics.groups();
            let names: Vec<&str> = groups.iter().map(|group| group.group.as_str()).collect();
            assert_eq!(
                names,
                ["Muon (Batch)", "Muon, 2 blocks", "AdamW (vector)"],
                "{diagnostics}"
            );
            assert_eq!((groups[1].tensors, groups[2].skipped), (2, 1));
            close(groups[1].weight_norm, norm(&of(&after.fused)), "the group of blocks");
            let table = diagnostics.to_string();
            assert!(table.lines().all(|line| line.len() <= 100), "{table}");
        }
    }
}

#[test]
fn the_error_of_the_iteration_is_that_of_float64() {
    let device = device();
    let net =
        One { weight: Param::from_tensor(Tensor::<2>::ones([6, 10], &device).require_grad()) };
    let net = net.map(&mut Fixed::new(5));
    let config = config().with_rule(RoutingRule::muon("weight"));
    let config = MuonConfig { rules: config.rules.into_iter().skip(3).collect(), ..config };
    let mut optim = config.init_batched(&net).unwrap();
    optim.request_diagnostics();
    let grads = gradients(&net, 4);
    let grad: Tensor<2> = grads.get(net.weight.id).unwrap();
    optim.step(0.01, net, grads).unwrap();
    let diagnostics = optim.diagnostics().unwrap().unwrap();
    let schedule = Coefficients::KellerJordan.schedule(5).unwrap();
    let direction = newton_schulz(&matrix(&grad.unsqueeze::<3>(), 0), &schedule, 1e-7);
    let error = &direction * direction.transpose() - Mat::<f64>::identity(6, 6);
    let expected = error.norm_l2() / 6f64.sqrt();
    close(diagnostics.parameters[0].orthogonality_error.unwrap(), expected, "error");
    assert!(expected > 0.01 && expected < 0.4, "{expected}");
}

/// Changes below the resolution of the parameters.
#[test]
fn norms_of_half_precision_are_those_of_master_weights() {
    if !has_type(FloatDType::BF16) {
        return lacks("bfloat16");
    }
    let norms = |dtype: DType| {
        let ones = Tensor::<2>::ones([8, 8], (&device(), dtype));
        let net = One { weight: Param::from_tensor(ones.require_grad()) };
        let config = MuonConfig::new().with_rule(RoutingRule::adamw("weight"));
        let mut optim = config.init_batched(&net).unwrap();
        let mut grads = GradientsParams::new();
        grads.register(net.weight.id, Tensor::<2>::ones([8, 8], (&Device::default(), dtype)));
        optim.request_diagnostics();
        optim.step(1e-5, net, grads).unwrap();
        optim.diagnostics().unwrap().unwrap().parameters.swap_remove(0)
    };
    let (half, single) = (norms(DType::BF16), norms(DType::F32));
    assert_eq!(half, single);
    assert!(half.effective_lr() > 0.9e-5 && half.effective_lr() < 1.1e-5, "{half:?}");
}
