//! The planner on divided models: every balancing gives the bits of one rank, costs decide the
//! owners, and checkpoints move between balancings.

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::{env, fs};

use burn::nn::LinearConfig;
use burn::tensor::Device;
use distmuon::comm::World;
use distmuon::distributed::plan::{Balancing, Costs, Plan};
use distmuon::distributed::{Axis, CostSource, DistMuonConfig, Layout, Mesh, Place};
use distmuon::{Error, MuonConfig, Result, RoutingRule};
use distmuon_testing::excused;
use distmuon_testing::models::{Layers, weights};
use distmuon_testing::worlds::{self, Folder};

use super::{Net, advance, config, with_checkpoints};
use crate::{ranks, ranks_here};

/// A configuration under every balancing, with counted and with measured costs.
pub fn planners(config: &DistMuonConfig) -> Vec<DistMuonConfig> {
    let balancings = [
        Balancing::Greedy,
        Balancing::BlockCyclic,
        #[cfg(feature = "optimal")]
        Balancing::Optimal { time_limit_s: 0.5 },
    ];
    let all = balancings.map(|balancing| config.clone().with_balancing(balancing));
    let with = |config: DistMuonConfig| {
        [CostSource::Operations, CostSource::Measured].map(|costs| config.clone().with_costs(costs))
    };
    all.into_iter().flat_map(with).collect()
}

/// The bytes of every weight, and the owners of every matrix.
type WeightsAndOwners = (Vec<Vec<u8>>, Vec<Vec<usize>>);

/// Starts a model on ranks, loads a checkpoint if there is one, takes steps, and saves another if
/// asked to. Returns the whole weights and the owners.
fn advanced(
    world: &World,
    (config, lay): (&DistMuonConfig, fn(Layout) -> Layout),
    steps: Range<usize>,
    [from, to]: [Option<&Path>; 2],
) -> Result<WeightsAndOwners> {
    let world = with_checkpoints(world);
    let layout = lay(Layout::from(&world).with_small_elements(64)).with_config(config.clone());
    let net = layout.shard(Net::new(world.device()))?;
    let mut optim = config.init_on(&layout, &net)?;
    let mut net = net;
    if let Some(from) = from {
        let saved: usize;
        (net, optim, saved) = optim.load(from, net)?;
        assert_eq!(saved, steps.start);
    }
    let end = steps.end;
    let (net, optim) = advance(&layout, (net, optim), steps)?;
    if let Some(to) = to {
        optim.save(to, &net, &end)?;
    }
    Ok((weights(&layout.unshard(&net)?), optim.plan().owners().to_vec()))
}

fn owned(layout: Layout) -> Layout {
    layout.owned("dp")
}

fn in_rows(layout: Layout) -> Layout {
    layout.rows("dp")
}

fn reduced(layout: Layout) -> Layout {
    layout.overlap_backward()
}

/// The weights of one rank that has everything.
fn alone(steps: usize) -> Vec<Vec<u8>> {
    let run = ranks_here(1, |world| {
        advanced(&world, (&config(), |layout| layout), 0..steps, [None, None])
    });
    run.unwrap().swap_remove(0).0
}

pub fn every_balancing_of_divided_parameters_trains_as_one_rank() {
    let expected = alone(3);
    let lays: [fn(Layout) -> Layout; 3] = [owned, in_rows, reduced];
    for (config, lay) in planners(&config()).iter().flat_map(|config| lays.map(|lay| (config, lay)))
    {
        for count in [1, 2, 4] {
            let run = ranks(count, |world| advanced(&world, (config, lay), 0..3, [None, None]));
            let run = run.unwrap();
            for (weights, owners) in &run {
                assert!(*weights == expected, "{count} ranks, {config}");
                // Every rank measures other times: rank 0 decides.
                assert_eq!(*owners, run[0].1, "{count} ranks, {config}");
            }
        }
    }
}

/// Otherwise a seed would give other initial values than on one device.
pub fn measuring_draws_no_random_numbers() {
    if worlds::name() != "mpi" {
        return excused("threads of one process, which have one sequence of random numbers");
    }
    let [counted, measured] = [CostSource::Operations, CostSource::Measured].map(|costs| {
        let config = mixture_config().with_costs(costs);
        let weights = ranks(2, |world| {
            let owned = Layout::from(&world).owned("dp");
            world.device().seed(11);
            let (model, optim) = config.start(owned, mixture(world.device()))?;
            Ok(weights(&optim.layout().unshard(&model)?))
        });
        weights.unwrap()
    });
    assert!(counted == measured);
}

/// Squares, and layers of as many elements whose iteration costs a fourth of theirs or less.
fn mixture(device: &Device) -> Layers {
    let layer = |index: usize| match index % 2 {
        0 => LinearConfig::new(64, 64),
        _ => LinearConfig::new(16, 256),
    };
    Layers { layers: (0..6).map(|index| layer(index).with_bias(false).init(device)).collect() }
}

fn mixture_config() -> DistMuonConfig {
    DistMuonConfig::new().with_muon(MuonConfig::new().with_rule(RoutingRule::muon("layers")))
}

/// The plan and the costs of the divided mixture on ranks, after the check that all have the same.
fn planned(count: usize, config: &DistMuonConfig) -> (Plan, Costs) {
    let plans = ranks_here(count, |world| {
        let (_, optim) = config.start(Layout::from(&world).owned("dp"), mixture(world.device()))?;
        Ok((optim.plan().clone(), optim.costs().clone()))
    });
    let mut plans = plans.unwrap();
    assert!(plans.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
    plans.swap_remove(0)
}

fn busiest(plan: &Plan, costs: &Costs) -> f64 {
    plan.loads(costs).into_iter().fold(0.0, f64::max)
}

pub fn loads_of_a_mixture_of_widths_are_balanced_by_their_costs() {
    let (greedy, costs) = planned(2, &mixture_config());
    let in_turns = mixture_config().with_balancing(Balancing::BlockCyclic);
    let (in_turns, _) = planned(2, &in_turns);
    // All have as many elements: by sizes, the ranks take turns in the order of the model, and one
    // of them gets all squares.
    let by_size: f64 = 3.0 * costs.of([64, 64]).batch(1);
    let [greedy, in_turns] = [greedy, in_turns].map(|plan| busiest(&plan, &costs));
    assert!(greedy < in_turns, "{greedy} and {in_turns}");
    assert!(in_turns < by_size, "{in_turns} and {by_size}");
    let measured = mixture_config().with_costs(CostSource::Measured);
    let (plan, costs) = planned(2, &measured);
    let square = costs.of([64, 64]);
    assert!(square.each > 0.0 && square.each < 10.0, "seconds: {square:?}");
    // By the costs that all ranks agreed on, no matrix too much is on the busiest rank.
    let loads = plan.loads(&costs);
    let [least, most] = [loads[0].min(loads[1]), loads[0].max(loads[1])];
    let largest = square.batch(1).max(costs.of([16, 256]).batch(1));
    assert!(most - least <= 2.0 * largest, "{loads:?}");
}

pub fn owners_of_a_divided_model_are_those_of_its_balancing() {
    let owners = |config: DistMuonConfig, lay: fn(Layout) -> Layout| {
        let run = ranks_here(2, |world| {
            let layout = lay(Layout::from(&world));
            let (_, optim) = config.start(layout, mixture(world.device()))?;
            Ok(optim.plan().owners().concat())
        });
        run.unwrap().swap_remove(0)
    };
    let in_turns = mixture_config().with_balancing(Balancing::BlockCyclic);
    let lays: [fn(Layout) -> Layout; 2] = [owned, reduced];
    for lay in lays {
        let whole = owners(in_turns.clone(), |layout| layout);
        assert_eq!(owners(in_turns.clone(), lay), whole);
        assert_ne!(owners(mixture_config(), lay), whole);
    }
}

pub fn neighbouring_matrices_have_owners_in_node_order() {
    let config = mixture_config().with_balancing(Balancing::BlockCyclic);
    let lays: [fn(Layout) -> Layout; 3] = [owned, in_rows, reduced];
    for lay in lays {
        let owners = ranks_here(4, |world| {
            // Ranks 0 and 1 are a node, and ranks 2 and 3 another.
            let node = (world.rank() / 2).to_string();
            let world = world.by_node(&node)?;
            let model = Layers::square(8, 16, world.device());
            let layout = lay(Layout::from(&world).with_small_elements(64));
            Ok(config.start(layout, model)?.1.plan().owners().concat())
        });
        // As in a plan of replicated matrices: neighbours differ in their ranks inside nodes.
        assert_eq!(owners.unwrap(), vec![vec![0, 3, 2, 1, 0, 3, 2, 1]; 4]);
    }
}

pub fn experts_in_slices_have_owners_among_the_ranks_that_hold_them() {
    for config in planners(&config()) {
        let owners = ranks_here(4, |world| {
            let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::data("ep", 2)])?;
            let layout = Layout::new(&mesh).with_place(Place::shard("experts", "ep", 0));
            let (_, optim) = config.start(layout.owned("dp"), Net::new(world.device()))?;
            let parameters = optim.plan().parameters().iter();
            let experts = parameters.zip(optim.plan().owners());
            let mut experts = experts.filter(|(parameter, _)| parameter.path == "experts");
            Ok(experts.next().expect("the model has experts").1.clone())
        });
        let owners = owners.unwrap();
        assert!(owners.windows(2).all(|pair| pair[0] == pair[1]), "{config}: {owners:?}");
        // The first expert lies on the ranks 0 and 2, and the others on 1 and 3.
        let candidates = [[0, 2], [1, 3], [1, 3]];
        for (owner, candidates) in owners[0].iter().zip(candidates) {
            assert!(candidates.contains(owner), "{config}: {owners:?}");
        }
    }
}

pub fn a_table_of_owners_that_are_chosen_together_waits_for_the_division() {
    let config = mixture_config().with_costs(CostSource::Measured);
    let tables = ranks_here(2, |world| {
        let layout = Layout::from(&world).owned("dp").with_config(config.clone());
        let model = mixture(world.device());
        let Err(error @ Error::Usage { .. }) = layout.table(&model) else {
            panic!("one rank does not know the owners")
        };
        assert!(error.to_string().contains("after `Layout::shard`"), "{error}");
        let model = layout.shard(model)?;
        Ok(layout.table(&model)?.to_string())
    });
    let tables = tables.unwrap();
    assert!(tables[0].contains("whole at 0") && tables[0].contains("whole at 1"), "{}", tables[0]);
    assert_eq!(tables[0], tables[1]);
}

/// The folder with a checkpoint, in a process that continues from it.
const FOLDER: &str = "DISTMUON_TEST_FOLDER";

pub fn a_checkpoint_of_one_balancing_continues_under_another_in_a_new_process() {
    let (saved, continued) = ("run.ckpt", "weights");
    if let Some(folder) = env::var_os(FOLDER) {
        let folder = Path::new(&folder);
        let from = folder.join(saved);
        let config = config().with_costs(CostSource::Measured);
        let run =
            ranks_here(4, |world| advanced(&world, (&config, owned), 2..4, [Some(&from), None]));
        let (weights, _) = run.unwrap().swap_remove(0);
        return fs::write(folder.join(continued), weights.concat()).expect("the folder exists");
    }
    let folder = Folder::create();
    let to = folder.path().join(saved);
    let in_turns = config().with_balancing(Balancing::BlockCyclic);
    ranks_here(2, |world| advanced(&world, (&in_turns, owned), 0..2, [None, Some(&to)])).unwrap();
    let program = env::args_os().next().expect("a program has a name");
    // On threads, whatever the engine that saved.
    let name = "threads::a_checkpoint_of_one_balancing_continues_under_another_in_a_new_process";
    let output = Command::new(program).args(["--exact", name]).env(FOLDER, folder.path()).output();
    let output = output.expect("the program starts again");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let continued = fs::read(folder.path().join(continued)).expect("the process has written them");
    assert!(continued == alone(4).concat());
}
