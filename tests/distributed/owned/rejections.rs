//! Layouts, models and passes that all ranks reject, and ranks that fail.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::module::{Lora, Module, Param, ParamId};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{
    Axis, DistModuleOptimizer, DistMuonConfig, Gradients, Keep, Layout, Mesh, Place, Publish,
};
use distmuon::link::Link;
use distmuon::{Error, MuonConfig, Result, RoutingRule, checkpoint};
use distmuon_testing::excused;
use distmuon_testing::models::{Fixed, Layers, weights};
use distmuon_testing::watched::watched;
use distmuon_testing::worlds::{self, Folder};

use super::{layers, layout, ones, output, with_checkpoints};
use crate::{DEADLINE, loads_states, ranks_here};

/// The errors of both ranks of a world.
pub fn errors<T>(run: impl Fn(&World) -> Result<T> + Sync) -> Vec<Error> {
    let errors = ranks_here(2, |world| {
        let world = with_checkpoints(&world);
        Ok(run(&world).err().expect("the call is rejected"))
    });
    errors.unwrap()
}

pub fn assert_says(errors: &[Error], words: &[&str]) {
    for error in errors {
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text} without {words:?}");
    }
}

pub fn meshes_and_layouts_that_do_not_fit_are_rejected() {
    for (axes, words) in [
        (vec![Axis::data("dp", 3)], "dp=3 for 2 ranks"),
        (vec![Axis::data("dp", 2), Axis::data("dp", 1)], "different names"),
        (vec![Axis::data("a", 2), Axis::data("b", 0)], "at least one rank"),
        (vec![], "multiply to the number of ranks"),
    ] {
        assert_says(&errors(|world| Mesh::new(world, axes.clone())), &["`mesh`", words]);
    }
    let axes = |world: &World| Mesh::new(world, [Axis::data(format!("{}", world.rank()), 2)]);
    assert_says(&errors(axes), &["rank 1", "`mesh`", "1=2", "0=2"]);

    let shard = |layout: &(dyn Fn(&Mesh) -> Layout + Sync)| {
        errors(|world| layout(&Mesh::flat(world)).shard(layers(world.device())))
    };
    let unknown = shard(&|mesh| Layout::new(mesh).owned("tp"));
    assert_says(&unknown, &["`owned`", "`tp`", "`dp`"]);
    let without_axis = shard(&|mesh| Layout::new(mesh).with_place(Place::owned("weight")));
    assert_says(&without_axis, &["`places`", "`Layout::owned`"]);
    let unused =
        shard(&|mesh| Layout::new(mesh).owned("dp").with_place(Place::replicated("absent")));
    assert_says(&unused, &["`absent` has no effect"]);
    let malformed = shard(&|mesh| Layout::new(mesh).owned("dp").with_place(Place::replicated("(")));
    assert_says(&malformed, &["`(` is not a regular expression"]);
    let other_models = errors(|world| {
        let net = Layers::square(2, 32 << world.rank(), world.device());
        Layout::new(&Mesh::flat(world)).owned("dp").shard(net)
    });
    assert_says(&other_models, &["rank 1", "`layers.0.weight`", "[64, 64]", "[32, 32]"]);
    let other_settings = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        layout.with_ahead_mb(world.rank() as f64).shard(layers(world.device()))
    });
    assert_says(&other_settings, &["rank 1", "`ahead_mb`", "1.0", "0.0"]);
    let negative = shard(&|mesh| Layout::new(mesh).owned("dp").with_ahead_mb(-1.0));
    assert_says(&negative, &["`ahead_mb`", "-1"]);
}

/// A setting is no help to whoever forgot the division that it is for.
pub fn settings_of_messages_that_no_pass_sends_are_rejected() {
    type Set = fn(Layout) -> Layout;
    let keep: Set = |layout| layout.with_keep(Keep::Weights);
    let ahead: Set = |layout| layout.with_ahead_mb(1.0);
    let in_flight: Set = |layout| layout.with_in_flight_mb(1.0);
    let rounded: Set = Layout::round_means;
    let settings = [
        ("keep", keep),
        ("ahead_mb", ahead),
        ("in_flight_mb", in_flight),
        ("round_means", rounded),
    ];
    let replicated: Set = |layout| layout;
    let overlapping: Set = Layout::overlap_backward;
    let cut: Set = |layout| layout.with_place(Place::shard("weight", "dp", 0));
    for (with, is_accepted) in [
        (replicated, [false; 4]),
        (cut, [false; 4]),
        (overlapping, [false, false, true, true]),
        (|layout| layout.owned("dp"), [true; 4]),
        (|layout| layout.rows("dp"), [true; 4]),
    ] {
        for ((name, set), is_accepted) in settings.into_iter().zip(is_accepted) {
            let outcomes = ranks_here(2, |world| {
                let world = with_checkpoints(&world);
                let layout = set(with(Layout::from(&world)));
                let linear = LinearConfig::new(64, 64).with_bias(false).init(world.device());
                Ok(layout.shard(linear).err())
            });
            for outcome in outcomes.unwrap() {
                assert_eq!(outcome.is_none(), is_accepted, "{name}: {outcome:?}");
                let text = outcome.map(|error| error.to_string()).unwrap_or_default();
                let named = format!("`{name}` is invalid: expected a layout with `owned`");
                assert!(is_accepted || text.contains(&named), "{text}");
            }
        }
    }
}

pub fn models_that_a_layout_has_not_divided_are_rejected() {
    let unfrozen = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        let mut net = layers(world.device());
        let first = net.layers.remove(0);
        net.layers.insert(0, first.no_grad());
        let mut net = layout.shard(net)?;
        let first = net.layers.remove(0);
        net.layers.insert(0, first.set_require_grad(true));
        DistMuonConfig::new().init_on(&layout, &net)
    });
    assert_says(&unfrozen, &["`layers.0.weight`", "frozen when", "`Layout::unshard`"]);
    let layout = |world: &World| Layout::new(&Mesh::flat(world)).owned("dp");
    let twice = errors(|world| {
        let layout = layout(world);
        let net = layout.shard(layers(world.device()))?;
        layout.shard(net)
    });
    assert_says(&twice, &["the layout has divided", "a second model", "make a new layout"]);
    let by_another =
        errors(|world| layout(world).shard(layout(world).shard(layers(world.device()))?));
    assert_says(&by_another, &["`layers.0.weight`", "already divided"]);

    let undivided = errors(|world| {
        let layout = layout(world);
        layout.shard(layers(world.device()))?;
        DistMuonConfig::new().init_on(&layout, &layers(world.device()))
    });
    assert_says(&undivided, &["`layers.0.weight`", "`Layout::shard`"]);
    let without_layout = errors(|world| {
        let net = layout(world).shard(layers(world.device()))?;
        DistMuonConfig::new().init(world, &net)
    });
    assert_says(&without_layout, &["`layers.0.weight`", "not by this layout"]);
    // Otherwise a matrix would be updated as the vector of this rank's part of it.
    let of_one_device = errors(|world| {
        let net = layout(world).shard(layers(world.device()))?;
        MuonConfig::new().try_init(&net)
    });
    assert_says(&of_one_device, &["`layers.0.weight`", "on one device", "`Layout::unshard`"]);
    let of_single_parameters = errors(|world| {
        let layout = Layout::from(world).overlap_backward();
        let net = layout.shard(layers(world.device()))?;
        DistMuonConfig::new().with_gradients(Gradients::Averaged).per_parameter(world)?.init(&net)
    });
    assert_says(&of_single_parameters, &["`layers.0.weight`", "passes reduce its gradient"]);
    let other_routing = errors(|world| {
        let layout = layout(world);
        let net = layout.shard(layers(world.device()))?;
        let muon = MuonConfig::new().with_rule(RoutingRule::adamw(r"layers\.3\."));
        DistMuonConfig::new().with_muon(muon).init_on(&layout, &net)
    });
    assert_says(&other_routing, &["`layers.3.weight`", "`Layout::with_muon`"]);
    let stepped_whole = errors(|world| {
        let layout = layout(world);
        let net = layout.shard(layers(world.device()))?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        optim.step(0.1, layers(world.device()), GradientsParams::new())
    });
    assert_says(&stepped_whole, &["not divided", "`Layout::shard`"]);

    let adapted = errors(|world| {
        let model = LinearConfig::new(64, 64).init(world.device()).apply_lora(Lora::new(32, 4.0));
        layout(world).shard(model)
    });
    assert_says(&adapted, &["`weight", "adapter"]);
    for owned in [true, false] {
        let lost = errors(|world| {
            let layout = divided(world, owned);
            let net = layout.shard(layers(world.device()))?.apply_lora(Lora::new(8, 4.0));
            layout.backward(&output(&net, ones(world.device())), &net)
        });
        assert_says(&lost, &["the loss", "adapter"]);
    }
    let lost_in_part = errors(|world| {
        let layout = divided(world, true).with_place(Place::replicated("layers.1"));
        let net = layout.shard(layers(world.device()))?.apply_lora(Lora::new(8, 4.0));
        let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
        DistMuonConfig::new().init_on(&layout, &net)?.step(0.1, net, gradients)
    });
    assert_says(&lost_in_part, &["`layers.1.weight.lora.a`", "when the model was divided"]);
    let cut = errors(|world| {
        let model = LinearConfig::new(64, 64).init(world.device()).apply_lora(Lora::new(32, 4.0));
        let mesh = Mesh::new(world, [Axis::model("tp", 2)])?;
        Layout::new(&mesh).with_place(Place::shard("weight", "tp", 1)).shard(model)
    });
    assert_says(&cut, &["`weight", "adapter"]);

    let mixed = errors(|world| {
        let rule = RoutingRule::muon(r"layers\.1\.weight").split([24, 8]).leave([1]);
        layout(world).with_muon(MuonConfig::new().with_rule(rule)).shard(layers(world.device()))
    });
    assert_says(&mixed, &["`layers.1.weight`", "leaves to AdamW", "`leave`"]);
}

/// A layout whose passes reduce all gradients, of parameters that are owned or not.
fn divided(world: &World, is_owned: bool) -> Layout {
    let layout = Layout::new(&Mesh::flat(world)).with_small_elements(1);
    if is_owned { layout.owned("dp") } else { layout.overlap_backward() }
}

pub fn gradients_that_were_not_collected_are_rejected() {
    let uncollected = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        let net = layout.shard(layers(world.device()))?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        let loss = output(&net, ones(world.device()));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        optim.step(0.1, net, gradients)
    });
    assert_says(&uncollected, &["`layers.0.weight`", "not collected", "`Layout::collect`"]);
    for is_owned in [true, false] {
        let of_micro_batches = errors(|world| {
            let layout = Layout::new(&Mesh::flat(world));
            let layout = if is_owned { layout.owned("dp") } else { layout };
            let net = layout.shard(layers(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
            layout.accumulate(&output(&net, ones(world.device())), &net)?;
            optim.step(0.1, net, GradientsParams::new())
        });
        assert_says(&of_micro_batches, &["1 calls of `Layout::accumulate`", "`Layout::backward`"]);
    }
    let collected = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        let net = layout.shard(layers(world.device()))?;
        layout.accumulate(&output(&net, ones(world.device())), &net)?;
        layout.collect(&net, &mut GradientsParams::new())
    });
    assert_says(&collected, &["`Layout::accumulate`", "`Layout::backward`"]);
    // Two models of one layout: the gradients of the first would be lost.
    let other_model = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world));
        let (first, second) = (layers(world.device()), layers(world.device()));
        layout.accumulate(&output(&first, ones(world.device())), &first)?;
        layout.backward(&output(&second, ones(world.device())), &second)
    });
    assert_says(&other_model, &["of another model", "make a layout for each model"]);
    // A pass for the gradient of an input, whose gradients of parameters nobody wants.
    type Pass = fn(&Layout, &Tensor<1>, &Layers) -> Result<()>;
    let passes: [Pass; 3] = [
        |layout, loss, net| layout.backward(loss, net).map(drop),
        |layout, loss, net| layout.drain(loss, net).map(drop),
        |layout, loss, net| layout.accumulate(loss, net),
    ];
    for (pass, is_owned) in passes.iter().flat_map(|pass| [(pass, true), (pass, false)]) {
        let earlier = errors(|world| {
            let layout = divided(world, is_owned);
            let net = layout.shard(layers(world.device()))?;
            drop(output(&net, ones(world.device())).backward());
            layout.discard()?;
            pass(&layout, &output(&net, ones(world.device())), &net)?;
            layout.discard()?;
            drop(output(&net, ones(world.device())).backward());
            pass(&layout, &output(&net, ones(world.device())), &net)
        });
        assert_says(&earlier, &["of an earlier backward pass", "`Layout::discard_pass`"]);
    }
}

pub fn layers_in_other_places_are_rejected() {
    for is_owned in [true, false] {
        let moved = errors(|world| {
            let layout = divided(world, is_owned);
            let mut net = layout.shard(layers(world.device()))?;
            net.layers.swap(0, 2);
            layout.backward(&output(&net, ones(world.device())), &net)
        });
        assert_says(&moved, &["the model has it as `layers.", "before `Layout::shard`"]);
    }
}

/// A map of one parameter by Burn drops its division.
pub fn a_parameter_that_was_taken_out_of_its_division_is_nan() {
    let run = ranks_here(2, |world| {
        let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
        let mut net = layout.shard(layers(world.device()))?;
        let first = &mut net.layers[0];
        first.weight = first.weight.clone().set_require_grad(false);
        Ok(output(&net, ones(world.device())).into_scalar::<f32>().is_nan())
    });
    assert_eq!(run.unwrap(), [true; 2]);
}

pub fn a_backward_pass_whose_gradients_nothing_averages_is_rejected() {
    let config = DistMuonConfig::new().with_gradients(Gradients::Averaged);
    let averaged = errors(|world| {
        let (net, optim) = config.start(world, layers(world.device()))?;
        optim.backward(&output(&net, ones(world.device())), &net)
    });
    assert_says(&averaged, &["`Gradients::Averaged`", "`Gradients::PerRank`"]);
    let changes: [fn(Layout) -> Layout; 3] = [
        |layout| layout.owned("dp"),
        |layout| layout.rows("dp"),
        |layout| layout.with_small_elements(16).overlap_backward(),
    ];
    for change in changes {
        let averaged = errors(|world| {
            config.start(change(Layout::new(&Mesh::flat(world))), layers(world.device()))
        });
        assert_says(&averaged, &["setting `gradients`", "`PerRank`", "Averaged"]);
    }
}

pub fn ranks_whose_passes_differ_are_rejected_naming_the_parameter() {
    // Layers 0 and 2 belong to one rank, so that an engine sees equal calls.
    let swapped = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        let mut net = layout.shard(layers(world.device()))?;
        let table = layout.mesh().world().size();
        assert_eq!(table, 2);
        if world.rank() == 1 {
            net.layers.swap(0, 2);
        }
        let loss = output(&net, ones(world.device()));
        layout.backward(&loss, &net)
    });
    assert_says(&swapped, &["rank 1", "used `layers.2.weight`", "used `layers.0.weight`"]);

    // A rank that leaves a layer out does not make a call that the others wait for.
    let left_out = errors(|world| {
        let layout = Layout::new(&Mesh::flat(world)).owned("dp");
        let mut net = layout.shard(layers(world.device()))?;
        net.layers.truncate(16 - world.rank());
        let loss = output(&net, ones(world.device()));
        let gradients = layout.backward(&loss, &net);
        assert!(loss.into_scalar::<f32>().is_nan() || world.rank() == 1);
        gradients
    });
    assert_says(&left_out, &["the ranks disagree", "(while ", "`layers.1"]);
}

/// Layer 0 comes last in a backward pass: rank 1 is already at the comparison.
pub fn a_parameter_that_one_rank_does_not_use_is_named() {
    for unused in [0, 7, 15] {
        let errors = errors(|world| {
            let layout = Layout::new(&Mesh::flat(world)).overlap_backward();
            let net = layout.shard(layers(world.device()))?;
            let mut used = net.clone();
            if world.rank() == 1 {
                used.layers.remove(unused);
            }
            layout.backward(&output(&used, ones(world.device())), &net)
        });
        assert_says(&errors, &["the ranks disagree"]);
        if worlds::results_may_be_early() {
            // The call that the other rank does not come to has returned.
            continue;
        }
        assert_says(&errors, &["(while ", "`layers."]);
        let unused = format!(" of `layers.{unused}.weight`)");
        assert!(errors.iter().any(|error| error.to_string().contains(&unused)), "{errors:?}");
    }
}

pub fn ranks_of_other_groups_are_told_of_a_difference() {
    let outcomes = Mutex::new(vec![]);
    let run = worlds::ranks_here(DEADLINE, 4, |world| {
        let world = with_checkpoints(&world);
        let layout = Layout::new(&super::nodes(&world)?).owned("gpu");
        let mut net = layout.shard(layers(world.device()))?;
        if world.rank() == 1 {
            net.layers.swap(0, 2);
        }
        let outcome = layout.backward(&output(&net, ones(world.device())), &net);
        outcomes.lock().unwrap().push(outcome.err().map(|error| error.to_string()));
        Ok::<_, Error>(())
    });
    drop(run);
    let outcomes = outcomes.into_inner().unwrap();
    assert_eq!(outcomes.len(), 4);
    for text in outcomes {
        let text = text.expect("every rank has an error");
        assert!(text.contains("rank 1") && text.contains("used `layers.2.weight`"), "{text}");
    }
}

pub fn a_rank_that_can_not_divide_a_model_stops_all_ranks() {
    if crate::device().settings().float_dtype != FloatDType::F32 {
        return excused("a parameter that is not initialised counts as one of the default type");
    }
    let of_another_type = errors(|world| {
        let mut net = layers(world.device());
        // Rank 0 alone draws initial values.
        if world.is_main() {
            let half = |device: &Device, _: bool| Tensor::zeros([32, 32], (device, DType::F16));
            let (device, shape) = (world.device().clone(), [32, 32].into());
            net.layers[3].weight = Param::uninitialized(ParamId::new(), half, device, true, shape);
        }
        Layout::new(&Mesh::flat(world)).owned("dp").shard(net)
    });
    assert_says(&of_another_type, &["`layers.3.weight`", "another type", "rank 0"]);
    let own = |error: &&Error| matches!(error, Error::Parameter { rank: 0, .. });
    assert_eq!(of_another_type.iter().filter(own).count(), 1, "{of_another_type:?}");
}

pub fn ranks_may_start_from_clones_of_one_model() {
    let devices = World::devices(2);
    let model = layers(&devices[0]).map(&mut Fixed::new(5));
    let run = World::threads_with(devices, model, |world, model: Layers| {
        let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
        let mut net = layout.shard(model)?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        for _ in 0..20 {
            let loss = output(&net, ones(world.device()));
            let gradients = layout.backward(&loss, &net)?;
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, Error>(())
    });
    run.unwrap();
}

const VICTIM: usize = 1;

/// The results of all ranks, or that of the run, and each rank with its own.
type Outcomes = (Result<Vec<()>>, Vec<(usize, Result<()>)>);

/// A function that is called before every event of the victim.
type Watch = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// A rank of a training in which the victim may fail, from the moment that it is ready.
pub struct Watched {
    pub world: World,
    is_ready: Arc<AtomicBool>,
}

impl Watched {
    fn new(world: &World, watch: &Watch) -> Self {
        let is_ready = Arc::new(AtomicBool::new(false));
        let (fails, watch) = (is_ready.clone(), watch.clone());
        let world = watched(world, move |event| match event.rank == VICTIM && fails.load(SeqCst) {
            true => watch(),
            false => Ok(()),
        });
        Self { world, is_ready }
    }

    pub fn set_ready(&self) {
        self.is_ready.store(true, SeqCst);
    }
}

pub fn a_rank_that_fails_at_any_event_stops_all_ranks() {
    assert_failures_stop_all_ranks(3, |rank, path| {
        let world = with_checkpoints(&rank.world);
        let layout = layout(&world).with_ahead_mb(0.01);
        let net = layout.shard(super::Net::new(world.device()))?;
        let mut optim = super::config().init_on(&layout, &net)?;
        rank.set_ready();
        let loss = net.loss(super::tokens(world.rank(), 0, world.device()));
        let gradients = layout.backward(&loss, &net)?;
        let net = optim.step(0.01, net, gradients)?;
        layout.unshard(&net)?;
        world.comm().synchronize()?;
        optim.save(path, &net, &1)
    });
}

/// A forward pass can't return an error.
pub fn a_failure_in_a_forward_pass_is_returned_by_the_next_step_or_save() {
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    for (saves, publish) in
        [false, true].into_iter().flat_map(|s| [(s, Publish::Now), (s, Publish::AtFirstUse)])
    {
        let texts = Mutex::new(vec![]);
        let run = ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let fails = Arc::new(AtomicBool::new(false));
            let failing = fails.clone();
            let world = watched(&world, move |event| {
                let is_fatal = event.rank == VICTIM && event.collective == "all_gather";
                if is_fatal && failing.load(SeqCst) { Err(Error::EmptyModel) } else { Ok(()) }
            });
            let (device, rank, layout) = (world.device(), world.rank(), layout(&world));
            let net = layout.shard(super::Net::new(device))?;
            let config = super::config().with_publish(publish);
            let mut optim = config.init_on(&layout, &net)?;
            let gradients = layout.backward(&net.loss(super::tokens(rank, 0, device)), &net)?;
            let net = optim.step(0.01, net, gradients)?;
            let gradients = layout.backward(&net.loss(super::tokens(rank, 1, device)), &net)?;
            optim.save(path, &net, &1)?;
            fails.store(true, SeqCst);
            let evaluated = net.valid().loss(super::tokens(rank, 2, &device.clone().inner()));
            let is_nan = evaluated.into_scalar::<f32>().is_nan();
            let next = match saves {
                true => optim.save(path, &net, &2),
                false => optim.step(0.01, net, gradients).map(drop),
            };
            let text = next.err().map(|error| error.to_string());
            texts.lock().unwrap().push((rank, is_nan, text));
            Ok::<_, Error>(())
        });
        drop(run);
        let texts = texts.into_inner().unwrap();
        assert_eq!(texts.len(), 2);
        for (rank, is_nan, text) in texts {
            // Calls that run ahead may have what the victim does not send any more.
            let may_be_early = rank != VICTIM && worlds::results_may_be_early();
            assert!(is_nan || may_be_early, "{saves}, {publish:?}, rank {rank}");
            assert!(text.is_some(), "{saves}, {publish:?}, rank {rank}");
        }
        assert_eq!(checkpoint::progress::<i32>(path), Ok(1), "{saves}, {publish:?}");
    }
}

/// Sums of micro-batches are float32, which parameters in half precision take only if asked to.
pub fn micro_batches_in_half_precision_need_gradients_in_float32() {
    let errors =
        errors(|world| super::train_on(world, &layout(world), &super::config(), 1, 2, DType::BF16));
    assert_says(&errors, &["with_grad_dtype"]);
}

/// Asserts that a victim that fails at any event of a training, which ends with a checkpoint, stops
/// all ranks with its name, and that the checkpoint of the first, undisturbed run stays.
pub fn assert_failures_stop_all_ranks(
    count: usize,
    train_and_save: impl Fn(&Watched, &Path) -> Result<()> + Sync,
) {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let run = |watch: Watch| -> Outcomes {
        let outcomes = Mutex::new(vec![]);
        let run = ranks_here(count, |world| {
            let outcome = train_and_save(&Watched::new(&world, &watch), &path);
            outcomes.lock().unwrap().push((world.rank(), outcome.clone()));
            outcome
        });
        (run, outcomes.into_inner().unwrap())
    };
    let seen = Arc::new(AtomicUsize::new(0));
    let counting = seen.clone();
    let count = move || {
        counting.fetch_add(1, SeqCst);
        Ok(())
    };
    run(Arc::new(count)).0.unwrap();
    let events = seen.load(SeqCst);
    assert!(events > 60, "{events}");
    for fatal in 0..events {
        let number = AtomicUsize::new(0);
        let fail = move || match number.fetch_add(1, SeqCst) == fatal {
            true => Err(Error::EmptyModel),
            false => Ok(()),
        };
        let (run, outcomes) = run(Arc::new(fail));
        assert_eq!(run.unwrap_err(), Error::EmptyModel, "event {fatal}");
        for (rank, outcome) in outcomes {
            match outcome {
                Err(Error::PeerFailed { rank: VICTIM, .. }) if rank != VICTIM => {}
                Err(Error::EmptyModel) if rank == VICTIM => {}
                other => panic!("rank {rank} returned {other:?}; event {fatal} of {events}"),
            }
        }
        assert_eq!(checkpoint::progress::<i32>(&path), Ok(1), "event {fatal}");
    }
}

pub fn delays_in_passes_do_not_change_results() {
    let train = |delays: bool| {
        let run = ranks_here(4, |world| {
            let world = with_checkpoints(&world);
            let calls = AtomicUsize::new(world.rank());
            let world = watched(&world, move |_| {
                let call = calls.fetch_add(1, SeqCst);
                if delays && call.is_multiple_of(7) {
                    std::thread::sleep(Duration::from_micros(call as u64 * 37 % 400));
                }
                Ok(())
            });
            super::train_on(&world, &layout(&world), &super::config(), 4, 1, DType::F32)
        });
        run.unwrap()
    };
    super::assert_equal(&train(false), &train(true), "delays");
}

pub fn averages_and_abandoned_passes_do_not_disturb_training() {
    let train = |disturbs: bool| {
        let run = ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let (device, layout) = (world.device(), layout(&world));
            let mut net = layout.shard(super::Net::new(device))?;
            let mut optim = super::config().init_on(&layout, &net)?;
            let first = net.clone();
            for step in 0..4 {
                let data = || super::tokens(world.rank(), step, device);
                if disturbs {
                    drop(net.loss(data())); // abandoned
                    let old = first.loss(data());
                    assert_eq!(step == 0, super::bits(&old) == super::bits(&net.loss(data())));
                }
                let gradients = layout.backward(&net.loss(data()), &net)?;
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(weights(&layout.unshard(&net)?))
        });
        run.unwrap()
    };
    for (calm, disturbed) in train(false).iter().zip(&train(true)) {
        let mut both = calm.iter().zip(disturbed);
        assert!(both.all(|(calm, disturbed)| super::are_equal(calm, disturbed)));
    }
}

pub fn discarded_passes_and_whole_models_leave_no_trace() {
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    let train = |disturbs: bool| {
        let run = ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let (device, layout) = (world.device(), layout(&world).overlap_backward());
            let mut net = layout.shard(super::Net::new(device))?;
            let mut optim = super::config().init_on(&layout, &net)?;
            for step in 0..3 {
                if disturbs {
                    drop(net.loss(super::tokens(1, 50 + step, device)));
                    layout.discard()?;
                    // A panic that the caller catches.
                    let loss = net.loss(super::tokens(1, 70 + step, device));
                    let fails = Link::new(|_| panic!("there is no gradient"));
                    let loss = fails.attach(loss.clone(), loss.inner());
                    let accumulate = || layout.accumulate(&loss, &net);
                    assert!(catch_unwind(AssertUnwindSafe(accumulate)).is_err());
                    layout.discard()?;
                }
                let tokens = || super::tokens(world.rank(), step, device);
                let loss = net.loss(tokens());
                if disturbs {
                    layout.discard()?;
                    let whole = layout.unshard(&net)?;
                    assert_eq!(super::bits(&whole.loss(tokens())), super::bits(&loss));
                }
                let loss = net.loss(tokens());
                let gradients = layout.backward(&loss, &net)?;
                net = optim.step(0.01, net, gradients)?;
            }
            let in_flight = optim.memory().in_flight.peak;
            if disturbs {
                // A micro-batch, and a pass whose gradients are dropped.
                let loss = || net.loss(super::tokens(1, 60, device));
                layout.accumulate(&loss(), &net)?;
                drop(GradientsParams::from_grads(loss().backward(), &net));
                layout.discard()?;
                // Gradients of values that are replaced.
                optim.save(path, &net, &())?;
                layout.accumulate(&loss(), &net)?;
                (net, optim, ()) = optim.load(path, net)?;
            }
            let gradients = layout.backward(&net.loss(super::tokens(0, 3, device)), &net)?;
            net = optim.step(0.01, net, gradients)?;
            Ok((weights(&layout.unshard(&net)?), in_flight))
        });
        run.unwrap()
    };
    for ((calm, in_flight), (disturbed, peak)) in train(false).into_iter().zip(train(true)) {
        assert!(calm.iter().zip(&disturbed).all(|(calm, values)| super::are_equal(calm, values)));
        // Gradients are reduced as early as without other passes.
        assert!(peak <= in_flight, "{peak} of {in_flight}");
    }
}

pub fn a_layer_is_unfrozen_in_a_model_that_is_divided_anew() {
    if !loads_states() {
        return;
    }
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    let run = ranks_here(2, |world| {
        let frozen = |mut net: Layers| {
            let first = net.layers.remove(0);
            net.layers.insert(0, first.no_grad());
            net
        };
        let layout = Layout::from(&world).owned("dp");
        let net = frozen(layers(world.device()));
        let (net, mut optim) = DistMuonConfig::new().start(&layout, net)?;
        let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
        let net = optim.step(0.1, net, gradients)?;
        optim.save(path, &net, &())?;
        let mut whole = layout.unshard(&net)?;
        let before = weights(&whole);
        whole.layers = whole.layers.into_iter().map(|l| l.set_require_grad(true)).collect();
        let layout = Layout::from(&world).owned("dp");
        let (net, optim) = DistMuonConfig::new().start(&layout, whole)?;
        let (net, mut optim, (), anew) = checkpoint::load_matching(path, net, optim)?;
        assert!(anew.iter().all(|each| each.to_string().contains("layers.0")), "{anew:?}");
        assert!(!anew.is_empty() && weights(&layout.unshard(&net)?) == before);
        let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
        let after = weights(&layout.unshard(&optim.step(0.1, net, gradients)?)?);
        assert!(before.iter().zip(&after).all(|(before, after)| before != after));
        Ok(())
    });
    run.unwrap();
}

/// One rank may evaluate alone if every rank has all parameters: then nothing is sent.
pub fn a_rank_that_evaluates_alone_is_rejected_where_parameters_are_owned() {
    let train = |lay: fn(Layout) -> Layout, evaluating: Option<usize>| {
        ranks_here(2, |world| {
            let world = with_checkpoints(&world);
            let layout = lay(Layout::new(&Mesh::flat(&world)));
            let mut net = layout.shard(layers(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
            for _ in 0..3 {
                if evaluating == Some(world.rank()) {
                    output(&net.valid(), ones(&world.device().clone().inner()));
                }
                let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(weights(&layout.unshard(&net)?))
        })
    };
    let replicated: [fn(Layout) -> Layout; 2] = [|layout| layout, Layout::overlap_backward];
    for lay in replicated {
        let expected = train(lay, None).unwrap();
        assert!(train(lay, Some(1)).unwrap() == expected);
    }
    let owned: [fn(Layout) -> Layout; 2] =
        [|layout| layout.owned("dp"), |layout| layout.rows("dp")];
    for (lay, evaluating) in owned.into_iter().flat_map(|lay| [0, 1].map(|rank| (lay, rank))) {
        let start = Instant::now();
        let error = train(lay, Some(evaluating)).expect_err("one rank makes other calls");
        assert!(start.elapsed() < DEADLINE / 4, "{:?}: {error}", start.elapsed());
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

/// As in `if world.is_main() { log(world.mean(loss)?) }`.
pub fn any_call_of_one_rank_alone_is_found_at_once() {
    /// A rank of a training.
    struct Rank {
        world: World,
        layout: Layout,
        net: Layers,
        optim: DistModuleOptimizer,
    }
    type Call = fn(Rank) -> Result<()>;
    let calls: [(&str, Call); 7] = [
        ("mean", |rank| rank.world.mean(1.0).map(drop)),
        ("agree", |rank| rank.world.agree(Ok(()))),
        ("describe", |rank| rank.world.describe().map(drop)),
        ("all_gather_value", |rank| rank.world.all_gather_value(&1).map(drop)),
        ("unshard", |rank| rank.layout.unshard(&rank.net).map(drop)),
        ("discard", |rank| rank.layout.discard()),
        ("load", |rank| rank.optim.load::<_, ()>("no such file", rank.net).map(drop)),
    ];
    for (name, call) in calls {
        let start = Instant::now();
        let run = ranks_here(3, |world| {
            let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
            let mut net = layout.shard(layers(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
            for _ in 0..2 {
                let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
                net = optim.step(0.01, net, gradients)?;
            }
            if world.rank() == 1 {
                return call(Rank { world, layout, net, optim });
            }
            layout.backward(&output(&net, ones(world.device())), &net).map(drop)
        });
        let error = run.expect_err("one rank makes another call").to_string();
        assert!(start.elapsed() < DEADLINE / 4, "{name}, {:?}: {error}", start.elapsed());
        assert!(error.contains("the ranks disagree"), "{name}: {error}");
    }
}

/// The usual mistake: `if world.is_main() { optim.save(..) }`.
pub fn calls_of_one_rank_alone_are_compared_with_those_of_the_others_at_once() {
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    for (is_owned, saving) in [(true, 0), (true, 1), (false, 1)] {
        let start = Instant::now();
        let run = ranks_here(3, |world| {
            let layout = Layout::new(&Mesh::flat(&world));
            let layout = if is_owned { layout.owned("dp") } else { layout.overlap_backward() };
            let mut net = layout.shard(layers(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
            for step in 0..3 {
                let gradients = layout.backward(&output(&net, ones(world.device())), &net)?;
                net = optim.step(0.01, net, gradients)?;
                if world.rank() == saving {
                    optim.save(path, &net, &step)?;
                }
            }
            Ok(())
        });
        let error = run.expect_err("one rank makes another call").to_string();
        assert!(start.elapsed() < DEADLINE / 4, "{:?}: {error}", start.elapsed());
        assert!(error.contains(&format!("rank {saving}: first_bytes")), "{error}");
    }
}
