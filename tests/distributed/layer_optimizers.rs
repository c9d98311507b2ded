//! Optimizers of whole matrices, such as SOAP, on parameters that every rank has, that one rank
//! owns and that lie in slices: the bits of one device, costs, and checkpoints that move.

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use burn::module::Module;
use burn::optim::{AdafactorConfig, GradientsParams, LearningRate, Optimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::custom::{LayerOptimizer, Rejected, Soap, SoapConfig, SoapState};
use distmuon::distributed::plan::{Balancing, Costs};
use distmuon::distributed::{Axis, CostSource, DistMuonConfig, Layout, Mesh};
use distmuon::{Error, MuonConfig, RoutingRule};
use distmuon_testing::precision::{Rounded, has};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::cuts::{Cutting, loss, slices};
use crate::owned::with_checkpoints;
use crate::{Net, config, device, loads_states, ranks, ranks_here, trained};

pub const EVERYWHERE: &[Case] = cases![
    soap_gives_the_bits_of_one_device_on_every_layout,
    soap_in_bfloat16_gives_the_bits_of_one_device_on_every_layout,
    states_of_soap_move_between_layouts_and_numbers_of_ranks,
];

pub const IN_PROCESS: &[Case] = cases![
    states_of_soap_continue_in_a_new_process,
    a_bad_gradient_leaves_soap_and_its_state_as_they_are,
    the_operations_of_a_layer_optimizer_balance_the_ranks,
    whole_parameters_have_measured_costs,
    divided_parameters_of_layer_optimizers_have_the_same_costs,
    operations_that_are_no_cost_are_rejected,
    a_balancing_by_which_the_layout_has_not_chosen_the_owners_is_rejected,
];

/// SOAP for matrices and a vector. Muon and AdamW update the others.
fn muon() -> MuonConfig {
    let rule = RoutingRule::custom(r"embedding|head|^wide|square\.[01]|norm\.gamma", "soap");
    // Refreshed in steps that are rejected, and between two files.
    let soap = SoapConfig::new().with_refresh_every(2).init().expect("the settings are right");
    config().muon.with_layer_optimizer("soap", soap).with_rule(rule)
}

fn soap() -> DistMuonConfig {
    config().with_muon(muon()).with_bucket_mb(Some(0.002))
}

/// The weights after some steps on one device, as a Burn optimizer.
fn on_one_device(muon: &MuonConfig, steps: u64) -> Vec<Vec<u8>> {
    on_one_device_in(DType::F32, muon, steps)
}

fn on_one_device_in(dtype: DType, muon: &MuonConfig, steps: u64) -> Vec<Vec<u8>> {
    let mut net = net_of(dtype, &device());
    let mut optim = muon.init(&net);
    for step in 0..steps {
        let loss = loss(&net, net.gradients(step));
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optim.step(0.01, net, gradients);
    }
    net.weights()
}

/// The model in a type.
fn net_of(dtype: DType, device: &Device) -> Net {
    let net = Net::new(device);
    if dtype == DType::F32 { net } else { net.map(&mut Rounded(dtype)) }
}

/// A place of all parameters: on a mesh, whole or in slices, and divided between steps or not.
#[derive(Clone)]
struct Placed {
    cutting: Cutting,
    divided: Divided,
    /// The type of the model.
    dtype: DType,
}

#[derive(Clone, Copy, Debug)]
enum Divided {
    Not,
    Owned,
    InRows,
}

impl Placed {
    fn layout(&self, layout: Layout) -> Layout {
        let layout = layout.with_small_elements(8);
        match self.divided {
            Divided::Not => layout,
            Divided::Owned => layout.owned("dp").with_ahead_mb(0.002),
            Divided::InRows => layout.rows("dp").with_ahead_mb(0.002),
        }
    }
}

/// Replicated, owned and sliced parameters on 1, 2 and 4 ranks, as far as this engine has them.
fn places() -> Vec<Placed> {
    let cuts = vec![
        ("^embedding\\.weight$", vec![("tp", 0, 1)]),
        ("^square\\.0\\.weight$", vec![("tp", 1, 1)]),
        ("^wide\\.weight$", vec![("tp", 0, 1)]),
        ("^norm\\.gamma$", vec![("tp", 0, 1)]),
        ("^head\\.weight$", vec![("tp", 1, 1)]),
    ];
    let mesh = |dp, tp| vec![Axis::data("dp", dp), Axis::model("tp", tp)];
    let mut places = vec![];
    for count in [1, 2, 4] {
        let whole = Cutting { axes: vec![Axis::data("dp", count)], cuts: vec![] };
        let divided = [Divided::Not, Divided::Owned, Divided::InRows];
        places.extend(divided.map(|divided| Placed {
            cutting: whole.clone(),
            divided,
            dtype: DType::F32,
        }));
    }
    for (dp, tp, divided) in [
        (1, 2, Divided::Not),
        (2, 2, Divided::Not),
        (2, 2, Divided::Owned),
        (2, 2, Divided::InRows),
        (1, 4, Divided::Not),
    ] {
        let cutting = Cutting { axes: mesh(dp, tp), cuts: cuts.clone() };
        places.push(Placed { cutting, divided, dtype: DType::F32 });
    }
    places.retain(|placed| worlds::has(&placed.cutting.ranks()));
    places
}

/// The weights after some steps, from one file if it is given, and saved in another.
fn advanced(
    Placed { cutting, dtype, .. }: &Placed,
    place: &(dyn Fn(Layout) -> Layout + Sync),
    steps: Range<u64>,
    [from, to]: [Option<&Path>; 2],
) -> Vec<Vec<u8>> {
    let nets = ranks(cutting.ranks(), |world| {
        let layout = place(cutting.layout(&world)?.with_muon(muon()));
        let whole = net_of(*dtype, world.device());
        let mut net = layout.shard(whole.clone())?;
        let mut optim = soap().init_on(&layout, &net)?;
        if let Some(path) = from {
            let step: u64;
            (net, optim, step) = optim.load(path, net)?;
            assert_eq!(step, steps.start);
        }
        for step in steps.clone() {
            let of = (world.rank(), false);
            let gradients = slices(cutting, (&whole, whole.gradients(step)), &net, of);
            let gradients = layout.backward(&loss(&net, gradients), &net)?;
            net = optim.step(0.01, net, gradients)?;
        }
        if let Some(path) = to {
            optim.save(path, &net, &steps.end)?;
        }
        Ok(layout.unshard(&net)?.weights())
    });
    let mut nets = nets.unwrap();
    assert!(nets.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
    nets.swap_remove(0)
}

fn soap_gives_the_bits_of_one_device_on_every_layout() {
    let expected = on_one_device(&muon(), 4);
    assert_ne!(expected, on_one_device(&config().muon, 4), "the optimizers differ");
    for count in [1, 2, 4] {
        assert!(trained(count, 4, &soap()) == expected, "{count} ranks");
    }
    for placed in places() {
        let (axes, divided) = (placed.cutting.name(), placed.divided);
        let weights = advanced(&placed, &|layout| placed.layout(layout), 0..4, [None; 2]);
        assert!(weights == expected, "{axes}, {divided:?}");
    }
}

/// The parameters are rounded in every step.
fn soap_in_bfloat16_gives_the_bits_of_one_device_on_every_layout() {
    let dtype = DType::BF16;
    if !has(FloatDType::BF16) {
        return;
    }
    let expected = on_one_device_in(dtype, &muon(), 4);
    for placed in places() {
        let placed = Placed { dtype, ..placed };
        let (axes, divided) = (placed.cutting.name(), placed.divided);
        let weights = advanced(&placed, &|layout| placed.layout(layout), 0..4, [None; 2]);
        assert!(weights == expected, "{axes}, {divided:?}");
    }
}

fn states_of_soap_move_between_layouts_and_numbers_of_ranks() {
    if !loads_states() {
        return;
    }
    let (folder, expected) = (Folder::create(), on_one_device(&muon(), 6));
    let places: Vec<Placed> = places();
    let path = |index: usize| folder.path().join(format!("{index}.ckpt"));
    for (index, placed) in places.iter().enumerate() {
        let place = |layout| placed.layout(layout);
        advanced(placed, &place, 0..3, [None, Some(&path(index))]);
    }
    for from in 0..places.len() {
        // Each file in three places, and each place from several files.
        for to in (0..places.len()).filter(|to| (to + from) % 3 == 0) {
            let placed = &places[to];
            let place = |layout| placed.layout(layout);
            let weights = advanced(placed, &place, 3..6, [Some(&path(from)), None]);
            assert!(weights == expected, "saved in place {from}, loaded in place {to}");
        }
    }
}

/// The folder with a checkpoint, in a process that continues from it.
const FOLDER: &str = "DISTMUON_TEST_FOLDER";

fn states_of_soap_continue_in_a_new_process() {
    if !loads_states() {
        return;
    }
    let (saved, weights) = ("run.ckpt", "weights");
    let plain = |count| Cutting { axes: vec![Axis::data("dp", count)], cuts: vec![] };
    let owned = |layout: Layout| layout.owned("dp").with_small_elements(8);
    if let Some(folder) = env::var_os(FOLDER) {
        let folder = Path::new(&folder);
        let placed = Placed { cutting: plain(4), divided: Divided::Owned, dtype: DType::F32 };
        let from = folder.join(saved);
        let bytes = advanced(&placed, &owned, 3..6, [Some(&from), None]).concat();
        return fs::write(folder.join(weights), bytes).expect("the folder exists");
    }
    let folder = Folder::create();
    let placed = Placed { cutting: plain(2), divided: Divided::Not, dtype: DType::F32 };
    advanced(&placed, &|layout| layout, 0..3, [None, Some(&folder.path().join(saved))]);
    let program = env::args_os().next().expect("a program has a name");
    let name = format!("{}::states_of_soap_continue_in_a_new_process", worlds::name());
    let output = Command::new(program).args(["--exact", &name]).env(FOLDER, folder.path()).output();
    let output = output.expect("the program starts again");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let continued = fs::read(folder.path().join(weights)).expect("the process has written them");
    assert!(continued == on_one_device(&muon(), 6).concat());
}

/// The flag of the device has the effect of the host's decision: a rejected first step and a later
/// one leave no trace, with clipping of all gradients as without.
fn a_bad_gradient_leaves_soap_and_its_state_as_they_are() {
    for (config, spoiled_at) in [(soap(), 0), (soap(), 2), (soap().with_max_norm(Some(0.5)), 2)] {
        let run = |spoils: bool| {
            let run = ranks_here(2, |world| {
                let mut net = world.broadcast(Net::new(world.device()))?;
                let mut optim = config.init(&world, &net)?;
                for step in 0..5 {
                    let mut gradients = net.gradients(step);
                    if step == spoiled_at {
                        let param = &net.head.weight;
                        let bad = gradients
                            .remove::<2>(param.id)
                            .expect("every parameter has a gradient");
                        if spoils {
                            gradients.register(param.id, bad.mul_scalar(f32::NAN));
                        }
                    }
                    net = optim.step(0.01, net, gradients)?;
                }
                Ok((net.weights(), optim.skipped_steps().read()))
            });
            run.unwrap().swap_remove(0)
        };
        let ((spoiled, skipped), (without, none)) = (run(true), run(false));
        assert!(spoiled == without, "as if there were no gradient at step {spoiled_at}");
        assert!(none.is_empty());
        assert_eq!(skipped.into_iter().collect::<Vec<_>>(), [("head.weight".to_owned(), 1)]);
    }
    // Also in Burn's optimizer of modules.
    let run = |spoils: bool| {
        let mut net = Net::new(&device());
        let mut optim = muon().init(&net);
        for step in 0..4 {
            let mut gradients = net.gradients(step);
            if step % 2 == 0 {
                let bad = gradients
                    .remove::<2>(net.head.weight.id)
                    .expect("every parameter has a gradient");
                if spoils {
                    gradients.register(net.head.weight.id, bad.mul_scalar(f32::NAN));
                }
            }
            net = optim.step(0.01, net, gradients);
        }
        net.weights()
    };
    assert!(run(true) == run(false));
}

/// The costs of a model's parameters, and the owners of the whole ones with their loads.
fn planned(config: &DistMuonConfig, count: usize) -> (Costs, Vec<f64>) {
    let plans = ranks_here(count, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let optim = config.init(&world, &net)?;
        let costs = optim.costs().clone();
        let loads = optim.plan().loads(&costs);
        Ok((costs, loads))
    });
    let mut plans = plans.unwrap();
    assert!(plans.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
    plans.swap_remove(0)
}

fn the_operations_of_a_layer_optimizer_balance_the_ranks() {
    let (costs, loads) = planned(&soap(), 3);
    let of_layers = SoapConfig::new().with_refresh_every(2).init().unwrap();
    let operations = |shape: &[usize]| Some(of_layers.operations(shape));
    assert_eq!(costs.of_whole("head.weight"), operations(&[21, 37]));
    assert_eq!(costs.of_whole("norm.gamma"), operations(&[21]));
    assert_eq!(costs.of_whole("tall.weight"), None, "Muon's matrices have a cost by their shape");
    // The embedding and the head are most of the work: neither shares a rank with the other.
    let (table, head) = (costs.of_whole("embedding.weight"), costs.of_whole("head.weight"));
    let [table, head] = [table, head].map(Option::unwrap);
    let busiest = loads.iter().copied().fold(0.0, f64::max);
    assert!(busiest < table + head, "{loads:?}");
    assert!(loads.iter().all(|load| *load > 0.0), "{loads:?}");
    // By turns, whole parameters are balanced by their elements alone.
    let by_turns = soap().with_balancing(Balancing::BlockCyclic);
    let turns = planned(&by_turns, 3).1.into_iter().fold(0.0, f64::max);
    assert!(busiest <= turns, "{busiest} and {turns}");
}

/// A planner of divided models knows what it divides.
fn divided_parameters_of_layer_optimizers_have_the_same_costs() {
    let expected = planned(&soap(), 3).0;
    let layouts: [fn(Layout) -> Layout; 3] =
        [|layout| layout.owned("dp"), |layout| layout.rows("dp"), Layout::overlap_backward];
    for (index, lay) in layouts.iter().enumerate() {
        let costs = ranks_here(3, |world| {
            let world = with_checkpoints(&world);
            let layout = lay(Layout::from(&world));
            let (_, optim) = soap().start(&layout, Net::new(world.device()))?;
            Ok(optim.costs().clone())
        });
        for costs in costs.unwrap() {
            for path in ["embedding.weight", "head.weight", "norm.gamma"] {
                let cost = costs.of_whole(path);
                assert!(cost.is_some() && cost == expected.of_whole(path), "{index}: {path}");
            }
        }
    }
}

fn whole_parameters_have_measured_costs() {
    let adafactor = RoutingRule::custom("^tall", "adafactor");
    let muon = muon().with_optimizer("adafactor", AdafactorConfig::new().build());
    let config = soap().with_muon(muon.with_rule(adafactor));
    let unmeasured = planned(&config, 2).0;
    assert_eq!(
        unmeasured.of_whole("tall.weight"),
        None,
        "an optimizer of Burn's has no operations"
    );
    let measured = planned(&config.with_costs(CostSource::Measured), 2).0;
    for path in ["tall.weight", "tall.bias", "head.weight", "norm.gamma"] {
        assert!(measured.of_whole(path).is_some_and(|seconds| seconds > 0.0), "{path}");
    }
    // Equal shapes are measured once.
    let squares = ["square.0.weight", "square.1.weight"].map(|path| measured.of_whole(path));
    assert_eq!(squares[0], squares[1]);
}

/// A layer optimizer whose operations are no number.
#[derive(Clone)]
struct Endless;

impl Optimizer for Endless {
    type State<const D: usize> = SoapState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<SoapState<D>>,
    ) -> (Tensor<D>, Option<SoapState<D>>) {
        Soap::default().step(lr, parameter, gradient, state)
    }

    fn to_device<const D: usize>(state: SoapState<D>, device: &Device) -> SoapState<D> {
        Soap::to_device(state, device)
    }
}

impl LayerOptimizer for Endless {
    fn initial<const D: usize>(&self, parameter: &Tensor<D>) -> SoapState<D> {
        Soap::default().initial(parameter)
    }

    fn keep<const D: usize>(
        rejected: &Rejected,
        old: SoapState<D>,
        new: SoapState<D>,
    ) -> SoapState<D> {
        Soap::keep(rejected, old, new)
    }

    fn operations(&self, _shape: &[usize]) -> f64 {
        f64::INFINITY
    }
}

fn operations_that_are_no_cost_are_rejected() {
    let errors = ranks_here(2, |world| {
        let net = world.broadcast(Net::new(world.device()))?;
        let muon = config().muon.with_layer_optimizer("endless", Endless);
        let muon = muon.with_rule(RoutingRule::custom("head", "endless"));
        Ok(DistMuonConfig::new().with_muon(muon).init(&world, &net).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        let Error::Setting { setting, value, .. } = &error else { panic!("{error}") };
        assert_eq!(setting, "optimizers.endless");
        assert!(value.contains("inf operations for `head."), "{error}");
    }
}

/// `Layout::shard` has chosen the owners by then, by the default.
fn a_balancing_by_which_the_layout_has_not_chosen_the_owners_is_rejected() {
    let others =
        [soap().with_balancing(Balancing::BlockCyclic), soap().with_costs(CostSource::Measured)];
    for (config, expected) in others.into_iter().zip(["balancing", "costs"]) {
        let errors = ranks_here(2, |world| {
            let layout = Layout::new(&Mesh::flat(&world)).owned("dp").with_small_elements(8);
            let layout = layout.with_muon(muon());
            let net = layout.shard(Net::new(world.device()))?;
            Ok(config.init_on(&layout, &net).map(|_| ()).unwrap_err())
        });
        for error in errors.unwrap() {
            let Error::Setting { setting, .. } = &error else { panic!("{error}") };
            assert_eq!(setting, expected);
            assert!(error.to_string().contains("Layout::with_config"), "{error}");
        }
    }
}
