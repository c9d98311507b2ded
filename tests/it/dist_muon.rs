//! Muon on ranks as an optimizer of single parameters, inside Burn's `ModuleOptimizer`.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, DType, Device, Tensor};
use burn_pack::Reader;
use distmuon::comm::World;
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{
    CostSource, DistMuonConfig, Gradients, LossScaleConfig, Publish, StatesOn,
};
use distmuon::{Error, MuonConfig, Result, RoutingRule};
use distmuon_testing::device::beyond_memory;
use distmuon_testing::models::{
    ExpertNet as Net, Fixed, gradients, largest_difference, scaled, values, weights,
};
use distmuon_testing::panic_message;

const DEADLINE: Duration = Duration::from_secs(20);

const VOCABULARY: usize = 11;

fn device() -> Device {
    Device::default().autodiff()
}

fn config() -> DistMuonConfig {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("experts").batch());
    DistMuonConfig::new().with_muon(muon).with_gradients(Gradients::Averaged)
}

fn ranks<T: Send>(count: usize, run: impl Fn(World) -> Result<T> + Sync) -> Result<Vec<T>> {
    World::threads_within(DEADLINE, vec![device(); count], run)
}

fn train(mut net: Net, optim: &mut ModuleOptimizer, steps: std::ops::Range<u64>) -> Net {
    for step in steps {
        let gradients = gradients(&net, step);
        net = optim.step(0.01, net, gradients);
    }
    net
}

/// The weights after the same steps of the single-device optimizer.
fn single_device(steps: std::ops::Range<u64>) -> Vec<Vec<u8>> {
    let net = Net::new(VOCABULARY, &device());
    let mut optim = config().muon.init(&net);
    weights(&train(net, &mut optim, steps))
}

/// The elements of every momentum in a record, by path.
fn momenta(optim: &ModuleOptimizer) -> BTreeMap<String, usize> {
    states(optim, "momentum")
}

/// The elements of every state of a name in a record, by path.
fn states(optim: &ModuleOptimizer, of: &str) -> BTreeMap<String, usize> {
    let reader = Reader::from_bytes(optim.into_bytes().unwrap()).unwrap();
    let paths = reader.metadata().clone();
    let tensors = reader.into_tensors().unwrap().into_iter();
    let momenta = tensors.filter_map(|tensor| {
        let (name, _, shape, ..) = tensor.into_parts().unwrap();
        let (id, name) = name.split_once('.')?;
        (name == of).then(|| (paths[id].clone(), shape.iter().product()))
    });
    momenta.collect()
}

#[test]
fn ranks_are_bit_equal_to_one_device_and_store_each_momentum_once() {
    let expected = single_device(0..10);
    for count in [1, 2, 3, 7] {
        let runs = ranks(count, |world| {
            let net = Net::new(VOCABULARY, world.device());
            let mut optim = config().per_parameter(&world)?.init(&net)?;
            let net = train(net, &mut optim, 0..10);
            // Every rank updates AdamW's parameters, and has their states.
            let moments = states(&optim, "moment_1");
            assert_eq!(moments["embedding.weight"], 6 * VOCABULARY, "{count} ranks");
            Ok((weights(&net), momenta(&optim)))
        });
        let runs = runs.unwrap();
        assert!(runs.iter().all(|(weights, _)| *weights == expected), "{count} ranks");
        for (path, elements) in [
            ("layers.0.weight", 36),
            ("layers.1.weight", 54),
            ("layers.2.weight", 54),
            ("experts", 40),
        ] {
            let mut kept: Vec<usize> = runs.iter().map(|(_, momenta)| momenta[path]).collect();
            kept.sort_unstable();
            let owner = kept.pop();
            assert_eq!(owner, Some(elements), "{path} on {count} ranks");
            assert!(kept.iter().all(|elements| *elements == 0), "{path}: {kept:?}");
        }
        if count == 3 {
            // The costliest parameters are assigned first, to the least loaded rank: every rank is
            // an owner.
            assert!(runs.iter().all(|(_, momenta)| momenta.values().any(|elements| *elements > 0)));
        }
    }
}

#[test]
fn threads_that_share_one_instance_are_bit_equal_to_one_device() {
    let shared = config().per_parameter_on_threads(3).unwrap();
    let net = Net::new(VOCABULARY, &device());
    let optim = shared.init(&net).unwrap();
    let trained = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (net, mut optim) = (net.clone().fork(&device()), optim.clone());
                scope.spawn(move || weights(&train(net, &mut optim, 0..10)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let expected = single_device(0..10);
    assert!(trained.iter().all(|weights| *weights == expected));
    // A fourth thread is rejected.
    let mut optim = optim.clone();
    let message = panic_message(|| train(net, &mut optim, 0..1));
    assert!(message.contains("which is larger, got 3"), "{message}");
}

#[test]
fn records_continue_bit_for_bit() {
    let expected = single_device(0..10);
    let halfway = ranks(2, |world| {
        let net = Net::new(VOCABULARY, world.device());
        let mut optim = config().per_parameter(&world)?.init(&net)?;
        let net = train(net, &mut optim, 0..5);
        Ok((net.clone().into_record().into_bytes().unwrap(), optim.into_bytes().unwrap()))
    });
    let halfway = halfway.unwrap();
    let resume = |world: &World, model: &Bytes, states: &Bytes| {
        let net = Net::new(VOCABULARY, world.device());
        let net = net.load_record(burn::store::ModuleRecord::from_bytes(model.clone()).unwrap());
        let optim = config().per_parameter(world)?.init(&net)?;
        let mut optim = optim.load_record(OptimizerRecord::from_bytes(states.clone()).unwrap());
        Ok::<_, Error>(weights(&train(net, &mut optim, 5..10)))
    };
    let continued = ranks(2, |world| {
        let (model, states) = &halfway[world.rank()];
        resume(&world, model, states)
    });
    assert!(continued.unwrap().iter().all(|weights| *weights == expected));

    // A record of a single device is accepted on any number of ranks.
    let net = Net::new(VOCABULARY, &device());
    let mut optim = config().muon.init(&net);
    let net = train(net, &mut optim, 0..5);
    let model = net.clone().into_record().into_bytes().unwrap();
    let states = optim.into_bytes().unwrap();
    for count in [2, 3] {
        let runs = ranks(count, |world| resume(&world, &model, &states));
        assert!(runs.unwrap().iter().all(|weights| *weights == expected), "{count} ranks");
    }

    // A rank rejects the record of another rank.
    let message = panic_message(|| {
        ranks(2, |world| {
            let (model, states) = &halfway[0];
            resume(&world, model, states)
        })
    });
    assert!(message.contains("on rank 1: its momentum at the owner does not fit"), "{message}");
    assert!(message.contains("got [0, 0]"), "{message}");
}

#[test]
fn a_gradient_that_is_missing_on_one_rank_fails_all_ranks() {
    for missing_at in [0, 2] {
        let message = panic_message(|| {
            ranks(2, |world| {
                let net = Net::new(VOCABULARY, world.device());
                let mut optim = config().per_parameter(&world)?.init(&net)?;
                let net = train(net, &mut optim, 0..missing_at);
                let mut gradients = gradients(&net, missing_at);
                if world.rank() == 1 {
                    gradients.remove::<2>(net.layers[1].weight.id);
                }
                optim.step(0.01, net, gradients);
                Ok(())
            })
        });
        assert!(message.contains("the ranks disagree"), "{message}");
        assert!(
            message.contains("layers.1.weight") && message.contains("layers.2.weight"),
            "{message}"
        );
    }
}

/// The rank whose device is out of memory returns the cause, and the other rank gets it.
#[test]
fn a_rank_without_memory_is_reported_on_all_ranks() {
    let Some(lost) = beyond_memory(6, 9) else { return };
    type Step = fn(&World, Net, GradientsParams) -> Result<Net>;
    let step_per_parameter: Step = |world, net, gradients| {
        let mut optim = config().per_parameter(world)?.init(&net)?;
        Ok(optim.step(0.01, net, gradients))
    };
    let step_of_whole_model: Step = |world, net, gradients| {
        let config = config().with_gradients(Gradients::PerRank);
        config.init(world, &net)?.step(0.01, net, gradients)
    };
    for (step, rank_0_owns_it) in [(step_of_whole_model, false), (step_per_parameter, true)] {
        let errors = Mutex::new(BTreeMap::new());
        let run = catch_unwind(AssertUnwindSafe(|| {
            ranks(2, |world| {
                let net = Net::new(VOCABULARY, world.device());
                let mut gradients = gradients(&net, 0);
                let id = net.layers[1].weight.id;
                if world.rank() == 0 || rank_0_owns_it {
                    gradients.remove::<2>(id);
                    gradients.register(id, lost.clone());
                }
                let stepped = catch_unwind(AssertUnwindSafe(|| step(&world, net, gradients)));
                let words = match stepped {
                    Ok(stepped) => stepped.map(drop).unwrap_err().to_string(),
                    Err(panic) => panic.downcast_ref::<String>().unwrap().clone(),
                };
                errors.lock().unwrap().insert(world.rank(), words.clone());
                Err::<(), _>(Error::PeerFailed { rank: world.rank(), cause: words })
            })
        }));
        assert!(run.is_err() || run.unwrap().is_err());
        let errors = errors.into_inner().unwrap();
        let first = errors.values().filter(|words| !words.starts_with("rank ")).count();
        assert_eq!((errors.len(), first), (2, 1), "{errors:?}");
        for words in errors.values() {
            assert!(words.contains("1099511627776 bytes"), "{errors:?}");
        }
    }
}

#[test]
fn a_batched_step_without_memory_fails_naming_the_parameter() {
    let Some(lost) = beyond_memory(10, 4) else { return };
    let mut net = Net::new(VOCABULARY, &device());
    net.experts = Param::from_tensor(Tensor::from_inner(lost.reshape([2, 5, 4])).require_grad());
    let gradients = gradients(&net, 0);
    let mut optim = config().muon.init_batched(&net).unwrap();
    let error = optim.step(0.01, net, gradients).unwrap_err().to_string();
    assert!(error.contains("`experts`") && error.contains("1099511627776 bytes"), "{error}");
}

#[test]
fn settings_that_need_whole_models_are_rejected() {
    let world = World::alone(device());
    for (config, expected) in [
        (config().with_gradients(Gradients::PerRank), "setting `gradients` is invalid"),
        (config().with_max_norm(Some(1.0)), "setting `max_norm` is invalid"),
        (config().with_loss_scale(Some(LossScaleConfig::new())), "setting `loss_scale` is invalid"),
        (config().with_audit_every(3), "setting `audit_every` is invalid"),
        (config().with_balancing(Balancing::BlockCyclic), "setting `balancing` is invalid"),
        (config().with_costs(CostSource::Measured), "setting `costs` is invalid"),
        (config().with_publish(Publish::AtFirstUse), "setting `publish` is invalid"),
        (config().with_states_on(StatesOn::Host), "setting `states_on` is invalid"),
    ] {
        let error = config.per_parameter(&world).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = config().per_parameter_on_threads(0).unwrap_err().to_string();
    assert!(error.contains("setting `ranks` is invalid"), "{error}");
}

/// Matrices that one rank owns, and vectors that every rank updates.
#[derive(Module, Debug)]
struct Small {
    matrices: Vec<Param<Tensor<2>>>,
    vectors: Vec<Param<Tensor<1>>>,
}

impl Small {
    fn new([matrices, vectors]: [usize; 2], device: &Device) -> Self {
        let matrix = || Param::from_tensor(Tensor::<2>::ones([6, 10], device).require_grad());
        let vector = || Param::from_tensor(Tensor::<1>::ones([7], device).require_grad());
        let net = Self {
            matrices: (0..matrices).map(|_| matrix()).collect(),
            vectors: (0..vectors).map(|_| vector()).collect(),
        };
        net.map(&mut Fixed::new(3))
    }
}

/// Ranks without a matrix have flags without elements, which Burn must not fuse with the factor on
/// gradients or, in a model of one parameter, with counters.
#[test]
fn ranks_that_own_nothing_train_like_all_others() {
    let scale = || Some(LossScaleConfig::new().with_initial(1024.0));
    for counts in [[1, 1], [1, 0], [0, 1]] {
        let train = |ranks_of: usize, max_norm: Option<f64>, scale: Option<LossScaleConfig>| {
            let mut muon = MuonConfig::new();
            if counts[0] > 0 {
                muon = muon.with_rule(RoutingRule::muon("matrices"));
            }
            let config = DistMuonConfig::new()
                .with_muon(muon)
                .with_gradients(Gradients::Averaged)
                .with_max_norm(max_norm)
                .with_loss_scale(scale);
            let runs = ranks(ranks_of, |world| {
                let mut net = Small::new(counts, world.device());
                let mut optim = config.init(&world, &net)?;
                for step in 0..3 {
                    let gradients = gradients(&net, step);
                    let gradients = scaled(&net, gradients, optim.loss_scale(), DType::F32);
                    net = optim.step(0.01, net, gradients)?;
                }
                Ok((values(&net), optim.skipped_steps().read()))
            });
            runs.unwrap()
        };
        let start = values(&Small::new(counts, &device()));
        let plain = &train(1, None, None)[0].0;
        assert!(largest_difference(plain, &start) > 1e-3, "{counts:?}: the model moves");
        for max_norm in [None, Some(0.3)] {
            let expected = &train(1, max_norm, None)[0].0;
            for (ranks_of, scale) in [(1, None), (1, scale()), (3, None), (3, scale())] {
                let case = format!("{counts:?}, {max_norm:?}, {scale:?} on {ranks_of} ranks");
                for (weights, skipped) in train(ranks_of, max_norm, scale.clone()) {
                    let difference = largest_difference(&weights, expected);
                    assert!(difference < 1e-5, "{case}: {difference}");
                    assert_eq!(skipped, BTreeMap::new(), "{case}");
                }
            }
        }
    }
}
