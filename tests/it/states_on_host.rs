//! States that lie on the host between updates, of models on the default device. On Flex, which is
//! the host, nothing moves.

use std::fs;

use std::path::Path;

use burn::optim::AdamConfig;
use burn::tensor::{DType, Device, FloatDType};
use distmuon::custom::Soap;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, Layout, MemoryReport, Mesh, Place, StatesOn,
};
use distmuon::parts::NorMuon;
use distmuon::{
    DistMuonConfig, Error, LionConfig, MasterWeights, MuonConfig, Result, RoutingRule, StateDtype,
    World,
};
use distmuon_testing::device::is_flex;
use distmuon_testing::models::{Layers, weights};
use distmuon_testing::precision::{LR, Net, config, dist, gradients, has};

fn device() -> Device {
    Device::default().autodiff()
}

/// Settings with states of all kinds, and the type of the parameters.
fn cases() -> Vec<(&'static str, DType, DistMuonConfig)> {
    let full = || config(MasterWeights::Full);
    let of_users = full()
        .with_optimizer("adam", AdamConfig::new().build())
        .with_layer_optimizer("soap", Soap::default())
        .with_rule(RoutingRule::custom("table", "adam"))
        .with_rule(RoutingRule::custom("hidden.1", "soap"));
    let mut cases = vec![
        ("float32", DType::F32, dist(full())),
        ("one bucket", DType::F32, dist(full()).with_bucket_mb(None)),
        ("parts", DType::F32, dist(full().with_parts(vec![NorMuon::new(0.9).into()]))),
        ("Lion", DType::F32, dist(full().with_rest(LionConfig::new().into()))),
        ("clipped", DType::F32, dist(full()).with_max_norm(Some(0.5))),
        ("users' optimizers", DType::F32, dist(of_users)),
    ];
    if device().supports_dtype(DType::I8) {
        cases.push(("8 bits", DType::F32, dist(full().with_state_dtype(StateDtype::Int8))));
    }
    if has(FloatDType::F16) {
        cases.push(("masters of float16", DType::F16, dist(full())));
    }
    if has(FloatDType::BF16) {
        cases.push(("masters", DType::BF16, dist(full())));
        cases.push(("mantissas", DType::BF16, dist(config(MasterWeights::Mantissa))));
    }
    cases
}

/// Takes steps from one number to another.
fn step(
    optim: &mut DistModuleOptimizer,
    mut net: Net,
    steps: std::ops::Range<u64>,
    dtype: DType,
) -> Result<Net> {
    for seed in steps {
        let grads = gradients(&net, seed, dtype);
        net = optim.step(LR, net, grads)?;
    }
    Ok(net)
}

/// The weights of rank 0 after three steps, a save, and three more steps of a new optimizer that
/// loads the file, and the memory of the first optimizer.
fn trained(
    config: &DistMuonConfig,
    start: &Net,
    ranks: usize,
    path: &Path,
) -> Result<(Vec<Vec<u8>>, MemoryReport)> {
    let dtype = start.table.val().dtype();
    let results = World::threads_with(World::devices(ranks), start.clone(), |world, net| {
        let again = net.clone();
        let mut optim = config.init(&world, &net)?;
        let net = step(&mut optim, net, 0..3, dtype)?;
        optim.save(path, &net, &3)?;
        let memory = optim.memory();

        let optim = config.init(&world, &again)?;
        let (net, mut optim, _) = optim.load::<_, i32>(path, again)?;
        Ok::<_, Error>((weights(&step(&mut optim, net, 3..6, dtype)?), memory))
    });
    Ok(results?.swap_remove(0))
}

#[test]
fn steps_and_files_are_those_of_resident_states() {
    let folder = tempfile::tempdir().unwrap();
    let [on_model, on_host] = ["model.bpk", "host.bpk"].map(|name| folder.path().join(name));
    for (name, dtype, config) in cases() {
        let start = Net::new(dtype, &device());
        for ranks in [1, 2] {
            let case = format!("{name}, {ranks} ranks");
            let away = config.clone().with_states_on(StatesOn::Host);
            let (expected, resident) = trained(&config, &start, ranks, &on_model).unwrap();
            let (actual, memory) = trained(&away, &start, ranks, &on_host).unwrap();
            assert!(actual == expected, "{case}: other weights");
            assert!(fs::read(&on_host).unwrap() == fs::read(&on_model).unwrap(), "{case}: files");

            let [here, left] = [resident, memory].map(|of| of.states.now + of.masters.now);
            assert_eq!(resident.on_host.peak, 0, "{case}");
            if is_flex() {
                assert_eq!(memory, resident, "{case}: the model is on the host");
                continue;
            }
            assert_eq!(memory.on_host.now, here - left, "{case}:\n{memory}");
            // Users' optimizers keep theirs on the device.
            assert_eq!(left > 0, name == "users' optimizers", "{case}");
        }
    }
}

#[test]
fn a_step_has_the_states_of_two_buckets_as_forecast() {
    let (count, width) = (6, 16);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon(""));
    // A bucket for every matrix.
    let config = DistMuonConfig::new().with_muon(muon).with_bucket_mb(Some(1e-4));
    let config = config.with_states_on(StatesOn::Host);
    let mut net = Layers::square(count, width, &device());
    let mut optim = config.init(&World::alone(device()), &net).unwrap();
    let before = optim.memory();
    assert_eq!(optim.plan().buckets().len(), count);
    for seed in 0..2 {
        let grads = gradients(&net, seed, DType::F32);
        net = optim.step(LR, net, grads).unwrap();
    }
    let memory = optim.memory();
    let matrix = width * width * size_of::<f32>();
    if is_flex() {
        assert_eq!((memory.states.now, memory.on_host.peak), (count * matrix, 0), "{memory}");
    } else {
        assert_eq!((before.states.peak, before.on_host.now), (0, count * matrix), "{before}");
        assert_eq!((memory.states.peak, memory.on_host.now), (2 * matrix, count * matrix));
    }

    let lay = |world: &World| Ok::<_, Error>(Layout::from(world));
    let forecast = config.forecast_memory(1, 1, &net, lay).unwrap().ranks()[0];
    assert_eq!((forecast.states, forecast.on_host), (memory.states.now, memory.on_host.now));
    let peak = memory.total.peak;
    assert!(peak <= forecast.peak, "{forecast:?}\n{memory}");
    assert!(forecast.peak <= peak + forecast.messages, "{forecast:?}\n{memory}");
}

#[test]
fn audits_find_nothing_in_states_from_the_host() {
    let config = dist(config(MasterWeights::Full)).with_audit_every(1);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let start = Net::new(DType::F32, &device());
    let (expected, _) = trained(&config, &start, 2, &path).unwrap();
    let away = config.with_states_on(StatesOn::Host);
    assert!(trained(&away, &start, 2, &path).unwrap().0 == expected);
}

/// The place of the states is a setting of a run, and not of its files.
#[test]
fn a_file_continues_with_states_in_the_other_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    let config = dist(config(MasterWeights::Full));
    let start = Net::new(DType::F32, &device());
    for places in [[StatesOn::Host, StatesOn::Model], [StatesOn::Model, StatesOn::Host]] {
        let [config, other] = places.map(|place| config.clone().with_states_on(place));
        let (expected, _) = trained(&config, &start, 1, &path).unwrap();
        let optim = other.init(&World::alone(device()), &start).unwrap();
        let (net, mut optim, _) = optim.load::<_, i32>(&path, start.clone()).unwrap();
        let net = step(&mut optim, net, 3..6, DType::F32).unwrap();
        assert!(weights(&net) == expected, "{places:?}");
    }
}

/// Matrices among ranks, so that owners of whole parameters and of slices bring them as well.
#[test]
fn divided_models_take_the_steps_of_resident_states() {
    let axes = |world: &World| Mesh::new(world, [Axis::model("tp", 2)]);
    type Lay<'a> = &'a (dyn Fn(&World) -> Result<Layout> + Sync);
    let owned: Lay<'_> = &|world| Ok(Layout::from(world).owned("dp"));
    let rows: Lay<'_> = &|world| Ok(Layout::from(world).rows("dp"));
    let overlapped: Lay<'_> = &|world| Ok(Layout::from(world).overlap_backward());
    let cut: Lay<'_> =
        &|world| Ok(Layout::new(&axes(world)?).with_place(Place::shard("hidden", "tp", 1)));
    let start = Net::new(DType::F32, &device());
    for (name, lay) in [("owned", owned), ("rows", rows), ("overlap", overlapped), ("cut", cut)] {
        let run = |place: StatesOn| {
            let config = dist(config(MasterWeights::Full)).with_states_on(place);
            let net = start.clone();
            let results = World::threads_with(World::devices(2), net, |world, net| {
                let layout = lay(&world)?;
                let (mut net, mut optim) = config.start(&layout, net)?;
                for step in 1..4 {
                    let hidden = net.hidden.iter().map(|matrix| matrix.val().square().mean());
                    let loss = hidden.reduce(|sum, term| sum + term).expect("matrices");
                    let loss = loss + net.table.val().square().mean() * f64::from(step);
                    let grads = optim.backward(&loss, &net)?;
                    net = optim.step(LR, net, grads)?;
                }
                Ok::<_, Error>(weights(&layout.unshard(&net)?))
            });
            results.unwrap()
        };
        assert!(run(StatesOn::Host) == run(StatesOn::Model), "{name}");
    }
}

/// Without the feature `flex`, no device is the host.
#[cfg(not(feature = "flex"))]
#[test]
fn states_on_a_host_that_is_not_there_are_rejected() {
    let net = Net::new(DType::F32, &device());
    let config = dist(config(MasterWeights::Full)).with_states_on(StatesOn::Host);
    let error = config.init(&World::alone(device()), &net).map(drop).unwrap_err().to_string();
    assert!(error.contains("`states_on`") && error.contains("the feature `flex`"), "{error}");
}
