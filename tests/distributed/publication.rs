//! Parameters that arrive at their first use, against those that a step waits for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use burn::module::{Lora, Module};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Int, Tensor};
use distmuon::checkpoint;
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistModuleOptimizer, DistMuonConfig, Layout, Mesh, Publish};
use distmuon::{Error, MuonConfig, Result, RoutingRule};
use distmuon_testing::models::{Fixed, bits, weights};
use distmuon_testing::watched::{Event, watched};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::owned::{self, assert_equal, config, train_replicated};
use crate::{device, ranks, ranks_here};

pub const EVERYWHERE: &[Case] = cases![
    parameters_that_arrive_at_first_use_have_the_same_bits,
    one_setting_hides_messages_behind_the_passes,
];

pub const IN_PROCESS: &[Case] = cases![
    parameters_that_a_pass_can_not_reduce_train_with_overlap,
    a_step_returns_before_its_parameters_have_arrived,
    a_step_returns_before_parts_with_replicas_have_arrived,
    parameters_arrive_in_the_order_of_the_model,
    parameters_on_their_way_keep_their_mappers,
    steps_do_not_wrap_mappers_again,
    parameters_on_their_way_can_be_frozen,
    frozen_parameters_on_their_way_can_be_trained_again,
    clones_that_freeze_parameters_on_their_way_are_rejected,
    a_layer_on_its_way_that_is_frozen_and_trained_again_shares_its_clone_as_in_burn,
    a_failure_after_a_step_makes_parameters_nan_and_is_returned_by_the_next_call,
];

fn parameters_that_arrive_at_first_use_have_the_same_bits() {
    let [now, later] = [Publish::Now, Publish::AtFirstUse].map(|at| config().with_publish(at));
    for count in [1, 2, 4].into_iter().filter(worlds::has) {
        let train = |config: &DistMuonConfig| {
            ranks(count, |world| train_replicated(&world, config, 6, 2, DType::F32)).unwrap()
        };
        assert_equal(&train(&now), &train(&later), &format!("{count} ranks"));
    }
}

fn one_setting_hides_messages_behind_the_passes() {
    if !worlds::has(&2) {
        return;
    }
    let train = |overlap: bool| {
        let run = ranks(2, |world| {
            let config = DistMuonConfig::new().with_overlap(overlap);
            let (mut net, mut optim) = config.start(&world, Pair::new(world.device()))?;
            let elements = net.first.weight.val().shape().num_elements();
            for _step in 0..3 {
                let grads = optim.backward(&net.loss(), &net)?;
                // After a pass that reduces, only the owner has a gradient: the mean.
                let held = grads.get::<2>(net.first.weight.id);
                let held = held.map_or(0, |gradient| gradient.shape().num_elements());
                let mut all = world.all_gather_value(&held)?;
                all.sort_unstable();
                assert_eq!(all, [if overlap { 0 } else { elements }, elements]);
                net = optim.step(0.01, net, grads)?;
                assert_eq!(net.first.weight.is_initialized(), !overlap);
            }
            Ok((world.comm().has_exact_sums(), weights(&net)))
        });
        run.unwrap()
    };
    for ((is_exact, weights), (_, expected)) in train(true).into_iter().zip(train(false)) {
        assert!(!is_exact || weights == expected);
    }
    // A setting of `start`, without which nothing follows it.
    let outcomes = ranks(2, |world| {
        let config = DistMuonConfig::new().with_overlap(true);
        Ok(config.init(&world, &Pair::new(world.device())).err().map(|error| error.to_string()))
    });
    for outcome in outcomes.unwrap() {
        let text = outcome.expect("an error");
        assert!(text.contains("`overlap`") && text.contains("`DistMuonConfig::start`"), "{text}");
    }
}

/// With an adapter, or blocks of AdamW, the step reduces the gradient.
fn parameters_that_a_pass_can_not_reduce_train_with_overlap() {
    type Change = fn(Pair) -> Pair;
    let (adapt, keep): (Change, Change) = (|pair| pair.apply_lora(Lora::new(32, 4.0)), |pair| pair);
    let rule = RoutingRule::muon(r"first\.weight").split([24, 8]).leave([1]);
    let mixed = MuonConfig::new().with_rule(rule);
    for (change, muon) in [(adapt, MuonConfig::new()), (keep, mixed)] {
        // The factors of an adapter are random.
        let first = change(Pair::new(&device()));
        let train = |overlap: bool| {
            let run = ranks_here(2, |world| {
                let config = DistMuonConfig::new().with_muon(muon.clone()).with_overlap(overlap);
                let (mut net, mut optim) = config.start(&world, first.clone())?;
                for _step in 0..2 {
                    let grads = optim.backward(&net.loss(), &net)?;
                    net = optim.step(0.01, net, grads)?;
                }
                Ok(weights(&net))
            });
            run.unwrap()
        };
        assert!(train(true) == train(false));
    }
}

/// Two layers, of which the second one stores its weight transposed.
#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(32, 32).with_bias(false);
        let second = layer.clone().with_layout(LinearLayout::Col);
        Self { first: layer.init(device), second: second.init(device) }.map(&mut Fixed::new(2))
    }

    fn loss(&self) -> Tensor<1> {
        let dtype = self.first.weight.val().dtype();
        let input = Tensor::<2>::ones([3, 32], (&self.devices()[0], dtype));
        self.second.forward(self.first.forward(input)).square().mean()
    }

    fn gradients(&self) -> GradientsParams {
        GradientsParams::from_grads(self.loss().backward(), self)
    }
}

/// Two ranks with two buckets.
fn pair_config() -> DistMuonConfig {
    DistMuonConfig::new().with_bucket_mb(Some(1e-3)).with_publish(Publish::AtFirstUse)
}

fn a_step_returns_before_its_parameters_have_arrived() {
    let run = ranks_here(2, |world| {
        let events = Arc::new(Mutex::new(vec![]));
        let log = events.clone();
        let world = watched(&world, move |event: Event| {
            log.lock().unwrap().push((event.collective, event.waits));
            Ok(())
        });
        let pair = world.broadcast(Pair::new(world.device()))?;
        let mut optim = pair_config().init(&world, &pair)?;
        let waited = || {
            let mut events = events.lock().unwrap();
            events.drain(..).filter(|event| *event == ("all_gather", true)).count()
        };
        let before = (bits(&pair.first.weight.val()), bits(&pair.second.weight.val()));
        let gradients = pair.gradients();
        let pair = optim.step(0.1, pair, gradients)?;
        assert_eq!(waited(), 0);
        assert!(!pair.first.weight.is_initialized() && !pair.second.weight.is_initialized());
        let memory = optim.memory();
        assert!(memory.parameters.now == 0 && memory.buffers.now > 0, "{memory}");
        let first = bits(&pair.first.weight.val());
        assert_eq!(waited(), 1);
        let clone = pair.clone();
        assert!(bits(&clone.second.weight.val()) != before.1 && first != before.0);
        assert_eq!(waited(), 1);
        assert!(pair.second.weight.is_initialized(), "clones share what has arrived");

        let gradients = pair.gradients();
        let pair = optim.step(0.1, pair, gradients)?;
        optim.finish_publication()?;
        assert_eq!(waited(), 2);
        let memory = optim.memory();
        assert_eq!((memory.parameters.now, memory.buffers.now), (2 * 32 * 32 * 4, 0));
        if world.is_main() {
            drop(pair.gradients()); // alone
        }
        Ok(())
    });
    run.unwrap();
}

fn a_step_returns_before_parts_with_replicas_have_arrived() {
    let waits = |publish: Publish| {
        let run = ranks_here(4, |world| {
            let gathers = Arc::new(AtomicUsize::new(0));
            let counted = gathers.clone();
            let world = watched(&owned::with_checkpoints(&world), move |event: Event| {
                let is_wait = event.waits && event.collective == "all_gather";
                counted.fetch_add(usize::from(is_wait), SeqCst);
                Ok(())
            });
            let mesh = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
            let layout = Layout::new(&mesh).owned("gpu").with_small_elements(1);
            let pair = layout.shard(Pair::new(world.device()))?;
            let mut optim = pair_config().with_publish(publish).init_on(&layout, &pair)?;
            let gradients = layout.backward(&pair.loss(), &pair)?;
            gathers.store(0, SeqCst);
            let pair = optim.step(0.1, pair, gradients)?;
            let in_step = gathers.load(SeqCst);
            layout.backward(&pair.loss(), &pair)?;
            Ok([in_step > 0, gathers.load(SeqCst) > in_step])
        });
        run.unwrap()
    };
    assert_eq!(waits(Publish::Now), [[true, true]; 4]);
    assert_eq!(waits(Publish::AtFirstUse), [[false, true]; 4]);
}

/// A table, which is updated last, and layers, of which the larger one is updated first.
#[derive(Module, Debug)]
struct Words {
    table: Embedding,
    first: Linear,
    second: Linear,
}

fn parameters_arrive_in_the_order_of_the_model() {
    let run = ranks_here(2, |world| {
        let waits = Arc::new(AtomicUsize::new(0));
        let counted = waits.clone();
        let world = watched(&world, move |event: Event| {
            if event.waits && event.collective == "all_gather" {
                counted.fetch_add(1, SeqCst);
            }
            Ok(())
        });
        let device = world.device();
        let layer = |outputs| LinearConfig::new(32, outputs).with_bias(false).init(device);
        let table = EmbeddingConfig::new(64, 32).init(device);
        let words = Words { table, first: layer(32), second: layer(64) };
        let mut words = world.broadcast(words.map(&mut Fixed::new(2)))?;
        let mut optim = pair_config().init(&world, &words)?;
        assert_eq!(optim.plan().buckets().len(), 3);
        for _step in 0..2 {
            let ids = Tensor::<2, Int>::from_data([[1, 2]], device);
            let hidden = words.first.forward(words.table.forward(ids));
            let loss = words.second.forward(hidden).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &words);
            waits.store(0, SeqCst);
            words = optim.step(0.1, words, gradients)?;
            assert_eq!(waits.load(SeqCst), 0);
            for (number, layer) in [&words.table.weight, &words.first.weight].iter().enumerate() {
                drop(layer.val());
                assert_eq!(waits.load(SeqCst), number + 1);
            }
        }
        Ok(())
    });
    run.unwrap();
}

fn parameters_on_their_way_keep_their_mappers() {
    let folder = Folder::create();
    let weights = |publish: Publish| {
        let path = folder.path().join(format!("{publish:?}.ckpt"));
        let config = pair_config().with_publish(publish);
        let run = ranks_here(2, |world| {
            let mut pair = world.broadcast(Pair::new(world.device()))?;
            let mut optim = config.init(&world, &pair)?;
            for _ in 0..2 {
                let gradients = pair.gradients();
                pair = optim.step(0.1, pair, gradients)?;
                optim.save(&path, &pair, &())?;
                (pair, optim, ()) = checkpoint::load(&path, pair, optim)?;
            }
            let record = pair.clone().into_record();
            let pair = Pair::new(world.device()).load_record(record);
            Ok([bits(&pair.first.weight.val()), bits(&pair.second.weight.val())])
        });
        run.unwrap()
    };
    assert!(weights(Publish::AtFirstUse) == weights(Publish::Now));
}

fn steps_do_not_wrap_mappers_again() {
    let run = ranks_here(2, |world| {
        let depth = Arc::new(AtomicUsize::new(0));
        let seen = depth.clone();
        let mut pair = world.broadcast(Pair::new(world.device()))?;
        pair.first.weight = pair.first.weight.save_mapper(move |weight| {
            // The address of a local variable grows with the calls that lead here.
            let local = 0_u8;
            seen.store(std::hint::black_box(&raw const local).addr(), SeqCst);
            weight
        });
        let mut optim = pair_config().init(&world, &pair)?;
        let mut depths = vec![];
        for _ in 0..4 {
            let gradients = pair.gradients();
            pair = optim.step(0.1, pair, gradients)?;
            drop(pair.first.weight.clone().transform_for_save());
            depths.push(depth.load(SeqCst));
        }
        assert!(depths[0] != 0 && depths.windows(2).all(|pair| pair[0] == pair[1]), "{depths:?}");
        Ok(())
    });
    run.unwrap();
}

fn parameters_on_their_way_can_be_frozen() {
    let run = ranks_here(2, |world| {
        let pair = world.broadcast(Pair::new(world.device()))?;
        let mut optim = pair_config().init(&world, &pair)?;
        let gradients = pair.gradients();
        let mut pair = optim.step(0.1, pair, gradients)?;
        pair.first = pair.first.no_grad();
        assert!(!pair.first.weight.val().is_require_grad());
        assert!(pair.second.weight.val().is_require_grad());
        Ok(())
    });
    run.unwrap();
}

fn frozen_parameters_on_their_way_can_be_trained_again() {
    let train = |publish: Publish, is_owned: bool| {
        let run = ranks_here(4, |world| {
            let nodes = [Axis::data("node", 2), Axis::data("gpu", 2)];
            let layout = Layout::new(&Mesh::new(&world, nodes)?).with_small_elements(1);
            let layout = if is_owned { layout.owned("gpu") } else { layout.overlap_backward() };
            let mut pair = layout.shard(world.broadcast(Pair::new(world.device()))?)?;
            let config = pair_config().with_publish(publish);
            let mut optim = config.init_on(&layout, &pair)?;
            let mut seen = vec![];
            for step in 0..4 {
                let is_trained = step != 1;
                pair.first = pair.first.set_require_grad(is_trained);
                let before = bits(&layout.unshard(&pair)?.first.weight.val());
                let gradients = layout.backward(&pair.loss(), &pair)?;
                pair = optim.step(0.1, pair, gradients)?;
                // Without a use in between, the parameter is still on its way.
                let next = pair.clone();
                let whole = layout.unshard(&next)?;
                let after = bits(&whole.first.weight.val());
                assert_eq!(before != after, is_trained, "{publish:?}, {is_owned}, step {step}");
                seen.push((after, bits(&whole.second.weight.val())));
            }
            Ok(seen)
        });
        run.unwrap()
    };
    if !worlds::has(&4) {
        return;
    }
    let expected = train(Publish::Now, false);
    for is_owned in [false, true] {
        assert_eq!(train(Publish::AtFirstUse, is_owned), expected, "owned: {is_owned}");
    }
}

/// Burn's clones share a value before its first use, and the setting that it gets.
fn clones_that_freeze_parameters_on_their_way_are_rejected() {
    for (is_used, is_owned) in [(false, false), (false, true), (true, false), (true, true)] {
        if !worlds::has(&4) {
            return;
        }
        let outcomes = ranks_here(4, |world| {
            let nodes = [Axis::data("node", 2), Axis::data("gpu", 2)];
            let layout = Layout::new(&Mesh::new(&world, nodes)?).with_small_elements(1);
            let layout = if is_owned { layout.owned("gpu") } else { layout };
            let pair = layout.shard(world.broadcast(Pair::new(world.device()))?)?;
            let mut optim = pair_config().init_on(&layout, &pair)?;
            let gradients = layout.backward(&pair.loss(), &pair)?;
            let pair = optim.step(0.1, pair, gradients)?;
            if is_used {
                drop(pair.loss());
                layout.discard()?;
            }
            let teacher = pair.clone().no_grad();
            let loss = pair.loss() + teacher.loss();
            let outcome = match loss.is_require_grad() {
                true => layout.backward(&loss, &pair),
                // Nothing is trained.
                false => layout.discard().map(|()| GradientsParams::new()),
            };
            Ok(outcome.and_then(|gradients| optim.step(0.1, pair, gradients)).map(drop))
        });
        for outcome in outcomes.unwrap() {
            match outcome {
                Ok(()) => assert!(is_used, "a frozen model is trained"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!is_used && text.contains("a clone of it was frozen"), "{text}");
                }
            }
        }
    }
}

/// Burn's clones of a parameter that has no value yet are one parameter. The limit goes when Burn's
/// own models no longer have it.
fn a_layer_on_its_way_that_is_frozen_and_trained_again_shares_its_clone_as_in_burn() {
    let is_shared = |pair: Pair| {
        let clone = pair.clone();
        let first = pair.first.no_grad().set_require_grad(true);
        let gradients = GradientsParams::from_grads(clone.loss().backward(), &first);
        gradients.get::<2>(first.weight.id).is_some()
    };
    let device = device();
    let layer = || LinearConfig::new(32, 32).with_bias(false).init(&device);
    let lazy = Pair { first: layer(), second: layer() };
    assert!(!lazy.first.weight.is_initialized() && is_shared(lazy));
    assert!(!is_shared(Pair::new(&device)));
    for (publish, expected) in [(Publish::Now, false), (Publish::AtFirstUse, true)] {
        let run = ranks_here(2, |world| {
            let pair = world.broadcast(Pair::new(world.device()))?;
            let mut optim = pair_config().with_publish(publish).init(&world, &pair)?;
            let gradients = pair.gradients();
            Ok(is_shared(optim.step(0.1, pair, gradients)?))
        });
        assert_eq!(run.unwrap(), [expected; 2], "{publish:?}");
    }
}

fn a_failure_after_a_step_makes_parameters_nan_and_is_returned_by_the_next_call() {
    type Call = fn(&mut DistModuleOptimizer, Pair, &Folder) -> Result<()>;
    let calls: [(&str, Call); 3] = [
        ("step", |optim, pair, _| optim.step(0.1, pair, GradientsParams::new()).map(drop)),
        ("save", |optim, pair, folder| optim.save(folder.path().join("run.ckpt"), &pair, &())),
        ("finish_publication", |optim, _, _| optim.finish_publication()),
    ];
    for (name, call) in calls {
        let (outcomes, folder) = (Mutex::new(vec![]), Folder::create());
        let [steps, has_stepped] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let run: Result<Vec<()>> = ranks_here(2, |world: World| {
            let (rank, begins, ends) = (world.rank(), steps.clone(), has_stepped.clone());
            // Rank 1 fails once the step of rank 0 has returned, before it sends new parameters.
            let world = watched(&world, move |event| {
                if rank == 0 || event.collective != "all_gather" || !begins.load(SeqCst) {
                    return Ok(());
                }
                while !ends.load(SeqCst) {
                    std::thread::yield_now();
                }
                Err(Error::EmptyModel)
            });
            let pair = world.broadcast(Pair::new(world.device()))?;
            let mut optim = pair_config().init(&world, &pair)?;
            let gradients = pair.gradients();
            world.comm().barrier()?;
            steps.store(true, SeqCst);
            let stepped = optim.step(0.1, pair, gradients)?;
            has_stepped.store(true, SeqCst);
            let is_nan = stepped.first.weight.val().sum().into_scalar::<f32>().is_nan();
            let next = call(&mut optim, stepped, &folder);
            outcomes.lock().unwrap().push((is_nan, next));
            Ok(())
        });
        assert_eq!(run.unwrap_err(), Error::EmptyModel, "{name}");
        let outcomes = outcomes.into_inner().unwrap();
        let [(true, Err(Error::PeerFailed { rank: 1, .. }))] = &outcomes[..] else {
            panic!("{name}: {outcomes:?}");
        };
    }
}
