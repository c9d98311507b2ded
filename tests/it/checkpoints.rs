//! Checkpoints of a single device: every byte is protected, and Burn opens them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::{Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Int, Tensor};
use burn_pack::Reader;
use distmuon::{DistModuleOptimizer, Error, MuonConfig, RoutingRule, checkpoint};
use distmuon_testing::models::{self, Fixed};

/// A matrix for Muon, a bias for AdamW, and tensors that are not trained.
#[derive(Module, Debug)]
struct Net {
    layer: Linear,
    counts: Param<Tensor<1, Int>>,
    flags: Param<Tensor<2, Bool>>,
}

impl Net {
    fn new(seed: u64) -> Self {
        let device = Device::default().autodiff();
        let counts = Tensor::from_data([seed as i64, 2, 3], &device);
        let flags = Tensor::from_data([[true, false, seed.is_multiple_of(2)]], &device);
        let net = Self {
            layer: LinearConfig::new(3, 5).init(&device),
            counts: Param::initialized(ParamId::new(), counts),
            flags: Param::initialized(ParamId::new(), flags),
        };
        net.map(&mut Fixed::new(seed))
    }

    fn bits(&self) -> (Vec<Vec<u8>>, Vec<u8>, Vec<u8>) {
        let untrained = (self.counts.val().into_data(), self.flags.val().into_data());
        let (counts, flags) = untrained;
        (models::weights(self), counts.as_bytes().to_vec(), flags.as_bytes().to_vec())
    }
}

fn config() -> MuonConfig {
    MuonConfig::new().with_rule(RoutingRule::muon("layer.weight"))
}

/// A model and its optimizer after some steps.
fn trained(seed: u64, steps: u64) -> (Net, ModuleOptimizer) {
    let mut net = Net::new(seed);
    let mut optim = config().init(&net);
    for step in 0..steps {
        let gradients = models::gradients(&net, step);
        net = optim.step(0.01, net, gradients);
    }
    (net, optim)
}

fn load(path: &Path) -> distmuon::Result<(Net, ModuleOptimizer, Vec<usize>)> {
    thread_local! {
        // Made once, since a file is loaded for each of its bytes.
        static FRESH: (Net, ModuleOptimizer) = trained(1, 0);
    }
    let (net, optim) = FRESH.with(|(net, optim)| (net.clone(), optim.clone()));
    checkpoint::load(path, net, optim)
}

/// A checkpoint, and the folder that holds it.
fn saved() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let (net, optim) = trained(7, 2);
    checkpoint::save(&path, &net, &optim, &vec![1usize, 2]).unwrap();
    (folder, path)
}

/// The reason for which a file is rejected.
fn rejection(path: &Path, case: &str) -> String {
    match load(path).map(|_| ()) {
        Err(Error::Checkpoint { path: named, reason, .. }) if named == path => reason,
        other => panic!("{case}: {other:?}"),
    }
}

fn state(optim: &ModuleOptimizer) -> BTreeMap<String, Vec<u8>> {
    models::tensors(optim.to_record().into_bytes().unwrap())
}

#[test]
fn a_loaded_checkpoint_equals_the_saved_run() {
    let (_folder, path) = saved();
    let (net, optim) = trained(7, 2);
    let (loaded, state_loaded, progress) = load(&path).unwrap();
    assert_eq!(loaded.bits(), net.bits());
    assert_eq!(progress, [1, 2]);
    // The ids of parameters differ from run to run.
    let values = |optim| state(optim).into_values().collect::<Vec<_>>();
    assert_eq!(sorted(values(&state_loaded)), sorted(values(&optim)));
    assert_eq!(state_loaded.to_record().len(), optim.to_record().len());
}

fn sorted(mut values: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    values.sort();
    values
}

#[test]
fn every_damaged_byte_is_detected_and_named() {
    let (folder, path) = saved();
    let sound = fs::read(&path).unwrap();
    let damaged = folder.path().join("damaged.bpk");
    let mut named = BTreeMap::new();
    for position in 0..sound.len() {
        let mut bytes = sound.clone();
        bytes[position] ^= [0x01, 0x80, 0xff][position % 3];
        fs::write(&damaged, &bytes).unwrap();
        let reason = rejection(&damaged, &format!("byte {position} of {}", sound.len()));
        let part = reason.split(" is damaged").next().unwrap().to_owned();
        *named.entry(part).or_insert(0) += 1;
    }
    println!("{} bytes: {named:#?}", sound.len());
    let parts: Vec<_> = named.keys().map(String::as_str).collect();
    for part in ["its head", "its index or footer", "tensor `model.layer.weight`"] {
        assert!(parts.contains(&part), "{part}: {parts:?}");
    }
    assert!(parts.iter().any(|part| part.contains(".momentum")), "{parts:?}");
    assert!(load(&path).is_ok());
}

#[test]
fn files_of_another_length_are_rejected() {
    let (folder, path) = saved();
    let sound = fs::read(&path).unwrap();
    let cut = folder.path().join("cut.bpk");
    for length in 0..sound.len() {
        fs::write(&cut, &sound[..length]).unwrap();
        rejection(&cut, &format!("{length} of {} bytes", sound.len()));
    }
    for more in [1, 8, 24, 4096] {
        fs::write(&cut, [&sound[..], &vec![0; more]].concat()).unwrap();
        rejection(&cut, &format!("{more} bytes more"));
    }
    // Another footer behind a whole file.
    fs::write(&cut, [&sound[..], &sound[sound.len() - 24..]].concat()).unwrap();
    rejection(&cut, "two footers");
}

/// As for the latest of several checkpoints.
#[cfg(unix)]
#[test]
fn saving_onto_a_symbolic_link_replaces_its_target() {
    use std::os::unix::fs::symlink;

    let (folder, real) = saved();
    let [link, chain, dangling, circle] =
        ["latest", "chain", "dangling", "circle"].map(|name| folder.path().join(name));
    symlink("run.bpk", &link).unwrap();
    symlink(&link, &chain).unwrap();
    symlink("new.bpk", &dangling).unwrap();
    symlink("circle", &circle).unwrap();
    let (net, optim) = trained(7, 2);
    for (number, path, target) in
        [(5usize, &link, &real), (6, &chain, &real), (7, &dangling, &folder.path().join("new.bpk"))]
    {
        checkpoint::save(path, &net, &optim, &vec![number]).unwrap();
        assert!(path.symlink_metadata().unwrap().is_symlink(), "{path:?} stays a link");
        assert!(target.symlink_metadata().unwrap().is_file(), "{target:?}");
        assert_eq!(checkpoint::progress::<Vec<usize>>(target).unwrap(), [number]);
    }
    let error = checkpoint::save(&circle, &net, &optim, &vec![1usize]).unwrap_err().to_string();
    assert!(error.contains("circle"), "{error}");
}

#[test]
fn burns_reader_opens_a_checkpoint() {
    let (_folder, path) = saved();
    let (net, _) = trained(7, 2);
    let reader = Reader::from_file_exact(&path).unwrap();
    assert_eq!(reader.metadata()["progress"], "[1,2]");
    let weight = reader.tensor_data("model.layer.weight").unwrap();
    assert_eq!(weight, models::bits(&net.layer.weight.val()));
    let names = reader.tensor_names();
    let ends = |end: &str| names.iter().any(|n| n.starts_with("optimizer.") && n.ends_with(end));
    assert!(ends(".momentum") && ends(".moment_1") && ends(".skipped"), "{names:?}");
}

/// Files of the first layout of the states, which later versions have to continue. The version that
/// wrote them no longer exists. If `DISTMUON_WRITE_CHECKPOINTS` is set, this version writes them
/// anew. Those of half precision are of version 0.1.0.
mod older_files {
    use std::ops::Range;

    use burn::optim::GradientsParams;
    use burn::tensor::{DType, FloatDType};
    use distmuon::comm::World;
    use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig, Gradients};
    use distmuon::{MasterWeights, Result, Schedule, StateDtype};
    use distmuon_testing::models::{ExpertNet as Net, assert_same_weights, values};
    use distmuon_testing::precision;

    use super::*;

    /// The steps before a file was written, and after.
    const BEFORE: u64 = 3;
    const AFTER: u64 = 2;

    /// The model of the files, with a vocabulary of 7.
    fn net(device: &Device) -> Net {
        Net::new(7, device)
    }

    fn muon() -> MuonConfig {
        MuonConfig::new()
            .with_momentum(Schedule::momentum_warmup(0.95, 4).into())
            .with_rule(RoutingRule::muon("experts").batch())
    }

    fn ranks() -> DistMuonConfig {
        DistMuonConfig::new().with_muon(muon()).with_small_elements(8)
    }

    /// Gradients of a step. One of the second step is not finite.
    fn gradients(net: &Net, step: u64) -> GradientsParams {
        let mut gradients = models::gradients(net, step);
        if step == 1 {
            let weight = &net.layers[1].weight;
            let gradient = gradients.remove::<2>(weight.id).expect("the layer has a gradient");
            gradients.register(weight.id, gradient.mul_scalar(f32::NAN));
        }
        gradients
    }

    fn step(optim: &mut ModuleOptimizer, net: Net, number: u64) -> Net {
        let gradients = gradients(&net, number);
        optim.step(0.01, net, gradients)
    }

    fn step_on_ranks(optim: &mut DistModuleOptimizer, net: Net, number: u64) -> Net {
        let gradients = gradients(&net, number);
        optim.step(0.01, net, gradients).unwrap()
    }

    /// A net after the steps of these numbers.
    fn steps<O>(
        optim: &mut O,
        net: Net,
        numbers: Range<u64>,
        step: fn(&mut O, Net, u64) -> Net,
    ) -> Net {
        numbers.fold(net, |net, number| step(optim, net, number))
    }

    fn path(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
    }

    fn writes() -> bool {
        std::env::var_os("DISTMUON_WRITE_CHECKPOINTS").is_some()
    }

    fn continued<O: checkpoint::Checkpointed>(
        name: &str,
        net: Net,
        optim: O,
        step: fn(&mut O, Net, u64) -> Net,
    ) {
        let (net, mut optim, expected): (Net, O, Vec<f32>) =
            checkpoint::load(path(name), net, optim).unwrap();
        let net = steps(&mut optim, net, BEFORE..BEFORE + AFTER, step);
        // Flex wrote the files.
        assert_same_weights(name, &values(&net), &expected);
    }

    #[test]
    fn a_file_of_burns_optimizer_continues_there_and_on_ranks() {
        let device = Device::default().autodiff();
        let name = "checkpoint-v2-module.bpk";
        if writes() {
            let trained = |end: u64| {
                let fresh = net(&device);
                let mut optim = muon().init(&fresh);
                (steps(&mut optim, fresh, 0..end, step), optim)
            };
            let (after, _) = trained(BEFORE + AFTER);
            let (before, optim) = trained(BEFORE);
            checkpoint::save(path(name), &before, &optim, &values(&after)).unwrap();
        }
        let fresh = net(&device);
        continued(name, fresh.clone(), muon().init(&fresh), step);
        on_ranks(name, 2);
    }

    fn on_ranks(name: &str, count: usize) {
        let devices = vec![Device::default().autodiff(); count];
        World::threads(devices, |world| -> Result<()> {
            let fresh = net(world.device());
            let optim = ranks().init(&world, &fresh)?;
            continued(name, fresh, optim, step_on_ranks);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn a_file_of_ranks_continues_on_any_number_of_ranks() {
        let name = "checkpoint-v2-ranks.bpk";
        if writes() {
            World::threads(vec![Device::default().autodiff(); 2], |world| -> Result<()> {
                let trained = |end: u64| -> Result<_> {
                    let fresh = net(world.device());
                    let mut optim = ranks().init(&world, &fresh)?;
                    Ok((steps(&mut optim, fresh, 0..end, step_on_ranks), optim))
                };
                let (after, _) = trained(BEFORE + AFTER)?;
                let (before, optim) = trained(BEFORE)?;
                optim.save(path(name), &before, &values(&after))
            })
            .unwrap();
        }
        for count in [1, 2, 3] {
            on_ranks(name, count);
        }
    }

    #[test]
    fn files_of_the_per_parameter_optimizer_continue_on_their_ranks() {
        let name = |rank: usize| format!("checkpoint-v2-per-parameter-{rank}.bpk");
        let config = ranks().with_gradients(Gradients::Averaged);
        World::threads(vec![Device::default().autodiff(); 2], |world| -> Result<()> {
            if writes() {
                let trained = |end: u64| -> Result<_> {
                    let fresh = net(world.device());
                    let mut optim = config.per_parameter(&world)?.init(&fresh)?;
                    Ok((steps(&mut optim, fresh, 0..end, step), optim))
                };
                let (after, _) = trained(BEFORE + AFTER)?;
                let (before, optim) = trained(BEFORE)?;
                checkpoint::save(path(&name(world.rank())), &before, &optim, &values(&after))?;
            }
            let fresh = net(world.device());
            let optim = config.per_parameter(&world)?.init(&fresh)?;
            continued(&name(world.rank()), fresh, optim, step);
            Ok(())
        })
        .unwrap();
    }

    /// A model in bfloat16 that ranks have saved, with the digits that it does not have.
    #[test]
    fn files_of_half_precision_continue_on_ranks_and_on_one_device() {
        if !precision::has(FloatDType::BF16) {
            return;
        }
        let new = |device: &Device| precision::Net::new(DType::BF16, device);
        let gradients = |net: &precision::Net, step| precision::gradients(net, step, DType::BF16);
        let on_ranks = |mut net, optim: &mut DistModuleOptimizer, steps: Range<u64>| -> Result<_> {
            for step in steps {
                let grads = gradients(&net, step);
                net = optim.step(precision::LR, net, grads)?;
            }
            Ok(net)
        };
        for (name, master, states) in [
            ("checkpoint-v2-master.bpk", MasterWeights::Full, StateDtype::Float32),
            ("checkpoint-v2-mantissa.bpk", MasterWeights::Mantissa, StateDtype::BFloat16),
        ] {
            let config = precision::config(master).with_state_dtype(states);
            let ranks = precision::dist(config.clone()).with_gradients(Gradients::Averaged);
            if writes() {
                World::threads(vec![Device::default().autodiff(); 2], |world| -> Result<()> {
                    let trained = |end: u64| -> Result<_> {
                        let net = new(world.device());
                        let mut optim = ranks.init(&world, &net)?;
                        Ok((on_ranks(net, &mut optim, 0..end)?, optim))
                    };
                    let (after, _) = trained(BEFORE + AFTER)?;
                    let (before, optim) = trained(BEFORE)?;
                    optim.save(path(name), &before, &precision::floats(&after))
                })
                .unwrap();
            }
            for count in [1, 2, 3] {
                let devices = vec![Device::default().autodiff(); count];
                World::threads(devices, |world| -> Result<()> {
                    let net = new(world.device());
                    let optim = ranks.init(&world, &net)?;
                    let (net, mut optim, expected): (_, _, Vec<f32>) =
                        optim.load(path(name), net)?;
                    let net = on_ranks(net, &mut optim, BEFORE..BEFORE + AFTER)?;
                    let case = format_args!("{name} on {count} ranks");
                    precision::assert_same(&precision::floats(&net), &expected, case);
                    Ok(())
                })
                .unwrap();
            }
            let net = new(&Device::default().autodiff());
            let optim = config.init(&net);
            let (mut net, mut optim, expected): (_, _, Vec<f32>) =
                checkpoint::load(path(name), net, optim).unwrap();
            for step in BEFORE..BEFORE + AFTER {
                let grads = gradients(&net, step);
                net = optim.step(precision::LR, net, grads);
            }
            precision::assert_same(&precision::floats(&net), &expected, name);
        }
    }
}

/// Layers around a norm with running statistics.
#[derive(Module, Debug)]
struct Normed {
    up: Linear,
    norm: BatchNorm,
    down: Linear,
}

impl Normed {
    fn new(seed: u64) -> Self {
        let device = Device::default().autodiff();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let norm = BatchNormConfig::new(5).init(&device);
        Self { up: linear(3, 5), norm, down: linear(5, 3) }.map(&mut Fixed::new(seed))
    }

    fn loss(&self, scale: f32) -> Tensor<1> {
        let device = Device::default().autodiff();
        let x = Tensor::<1, Int>::arange(0..12, &device).float().reshape([4, 3]) * scale;
        self.down.forward(self.norm.forward(self.up.forward(x))).square().mean()
    }

    /// The running statistics, as an evaluation uses them.
    fn evaluated(&self) -> [Vec<u8>; 2] {
        let norm = self.valid().norm;
        [norm.running_mean, norm.running_var].map(|state| models::bits(&state.value()))
    }
}

/// Burn keeps the statistics of the last pass beside those that a visitor sees.
#[test]
fn running_statistics_are_saved_and_loaded_as_an_evaluation_has_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let config = MuonConfig::new();
    for is_batched in [false, true] {
        let (mut net, new) = (Normed::new(1), Normed::new(2));
        let saved = if is_batched {
            let mut optim = config.init_batched(&net).unwrap();
            for step in 1..4 {
                let gradients = GradientsParams::from_grads(net.loss(step as f32).backward(), &net);
                net = optim.step(0.01, net, gradients).unwrap();
            }
            checkpoint::save(&path, &net, &optim, &3).unwrap();
            net.evaluated()
        } else {
            let mut optim = config.init(&net);
            for step in 1..4 {
                let gradients = GradientsParams::from_grads(net.loss(step as f32).backward(), &net);
                net = optim.step(0.01, net, gradients);
            }
            checkpoint::save(&path, &net, &optim, &3).unwrap();
            net.evaluated()
        };
        assert!(saved != new.evaluated(), "the statistics move");
        assert_eq!(checkpoint::load_weights(&path, new).unwrap().evaluated(), saved);
        // As after a spike of the loss: the last pass is not a part of the run any more.
        net.loss(1e3);
        let net = checkpoint::load_weights(&path, net).unwrap();
        assert_eq!(net.evaluated(), saved, "{is_batched}");
    }
}

/// The optimizer of a part of a model.
#[test]
fn a_model_without_any_of_the_optimizers_parameters_is_not_saved() {
    #[derive(Module, Debug)]
    struct Agent {
        online: Net,
        target: Net,
    }
    let (folder, path) = saved();
    let before = fs::read(&path).unwrap();
    let (online, optim) = trained(7, 3);
    let agent = Agent { online, target: Net::new(8) };
    let error = checkpoint::save(&path, &agent, &optim, &4).unwrap_err().to_string();
    assert!(error.contains("save the model that the optimizer trains"), "{error}");
    assert!(fs::read(&path).unwrap() == before, "the file before stays");
    checkpoint::save(&path, &agent.online, &optim, &4).unwrap();
    drop((agent.target, folder));
}

/// As in a program that keeps the best model with its optimizer, and goes back to both.
#[test]
fn a_run_goes_back_to_a_clone_of_its_optimizer() {
    let (mut net, mut optim) = trained(7, 40);
    let (best, of_best) = (net.clone(), optim.clone());
    let steps = |(mut net, mut optim): (Net, ModuleOptimizer), range: std::ops::Range<u64>| {
        for step in range {
            let gradients = models::gradients(&net, step);
            net = optim.step(0.01, net, gradients);
        }
        (net, optim)
    };
    let expected = steps(trained(7, 40), 40..100).0;
    (net, optim) = steps((net, optim), 40..110);
    drop((net, optim));
    // Clones count skipped steps together, and are read at every 25th.
    let again = steps((best, of_best), 40..100).0;
    assert!(again.bits() == expected.bits());
}

#[test]
fn the_states_of_other_layers_continue_where_one_is_unfrozen() {
    let frozen = |net: &Normed| Normed { down: net.down.clone().no_grad(), ..net.clone() };
    let step = |net: Normed, optim: &mut DistModuleOptimizer, number: u64| {
        let gradients = models::gradients(&net, number);
        optim.step(0.01, net, gradients).unwrap()
    };
    let config = MuonConfig::new();
    let mut net = frozen(&Normed::new(1));
    let mut optim = config.init_batched(&net).unwrap();
    for number in 0..3 {
        net = step(net, &mut optim, number);
    }
    let record = optim.to_record().unwrap();
    let thawed = Normed { down: net.down.clone().set_require_grad(true), ..net.clone() };
    let mut of_all = config.init_batched(&thawed).unwrap().load_record(record).unwrap();
    let expected = step(net, &mut optim, 3);
    let continued = step(thawed.clone(), &mut of_all, 3);
    let up = |net: &Normed| models::bits(&net.up.weight.val());
    assert_eq!(up(&continued), up(&expected));
    assert!(models::bits(&continued.down.weight.val()) != models::bits(&thawed.down.weight.val()));
}
