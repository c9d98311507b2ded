//! Matrices that are stored in rows against those that every rank has: equal bits, and 1/N of
//! every parameter on a rank.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Keep, Layout, Mesh, Place, Publish};
use distmuon::parts::MaxNorm;
use distmuon::{MuonConfig, Result, RoutingRule};
use distmuon_testing::combinations;
use distmuon_testing::models::{Fixed, assert_same_weights, bits, weights};
use distmuon_testing::precision::floats;
use distmuon_testing::watched::counted;
use distmuon_testing::worlds;

use super::rejections::{assert_says, errors};
use super::{assert_equal, config, layout, train_on, train_replicated, with_checkpoints};
use crate::{ranks, ranks_here};

pub fn parameters_in_rows_train_as_replicated_ones() {
    type Lay = fn(Layout) -> Layout;
    let lays: [(&str, Lay); 4] = [
        ("rows", |layout| layout.rows("dp").with_ahead_mb(0.0)),
        ("all kept", |layout| layout.rows("dp").with_keep(Keep::Weights).with_in_flight_mb(0.0)),
        ("some rows", |layout| {
            let layout = layout.owned("dp").with_place(Place::rows("wide|experts|norm|conv"));
            layout.with_place(Place::replicated("twice")).with_ahead_mb(0.004)
        }),
        ("some whole", |layout| {
            let layout = layout.rows("dp").overlap_backward();
            layout.with_place(Place::owned("wide|experts")).with_place(Place::replicated("feed"))
        }),
    ];
    for count in [1, 2, 3, 4, 7].into_iter().filter(worlds::has) {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let config = config().with_publish(publish);
            let expected = ranks(count, |world| {
                train_replicated(&with_checkpoints(&world), &config, 6, 1, DType::F32)
            });
            let expected = expected.unwrap();
            for (name, lay) in lays {
                let runs = ranks(count, |world| {
                    let world = with_checkpoints(&world);
                    train_on(&world, &lay(layout(&world)), &config, 6, 1, DType::F32)
                });
                assert_equal(&expected, &runs.unwrap(), &format!("{count} ranks, {name}"));
            }
        }
    }
}

/// The sum of the products of all parameters with gradients of the whole model, under the
/// identities that it has: the loss that has these gradients.
fn loss(
    net: &combinations::Net,
    whole: &combinations::Net,
    mut gradients: GradientsParams,
) -> Tensor<1> {
    fn product<const D: usize>(
        param: &Param<Tensor<D>>,
        whole: &Param<Tensor<D>>,
        gradients: &mut GradientsParams,
    ) -> Tensor<1> {
        let gradient = gradients.remove::<D>(whole.id).expect("every parameter has a gradient");
        // In float32: a sum in half precision may overflow, and its gradient is exact in both.
        let product = param.val() * Tensor::from_inner(gradient);
        product.cast(DType::F32).sum()
    }
    let matrices = net.weights.iter().zip(&whole.weights);
    let products = matrices.map(|(weight, whole)| product(weight, whole, &mut gradients));
    let sum = products.reduce(|sum, term| sum + term).expect("the net has matrices");
    let sum = sum + product(&net.weight_stack, &whole.weight_stack, &mut gradients);
    let sum = sum + product(&net.bias, &whole.bias, &mut gradients);
    sum + product(&net.table, &whole.table, &mut gradients)
}

pub fn every_part_of_the_update_is_exact_for_rows() {
    for (name, muon, dtype) in combinations::in_types() {
        let config = DistMuonConfig::new().with_muon(muon.clone()).with_bucket_mb(Some(0.0005));
        let run = |count: usize, in_rows: bool| {
            let nets = ranks(count, |world| {
                let layout = Layout::new(&Mesh::flat(&world)).with_muon(muon.clone());
                let layout = layout.with_small_elements(8);
                let layout = if in_rows { layout.rows("dp") } else { layout };
                let whole = combinations::Net::of(dtype, world.device());
                let mut net = layout.shard(whole.clone())?;
                let mut optim = config.init_on(&layout, &net)?;
                for step in 0..4 {
                    let loss = loss(&net, &whole, whole.gradients(step));
                    let gradients = layout.backward(&loss, &net)?;
                    net = optim.step(0.02, net, gradients)?;
                }
                Ok((floats(&layout.unshard(&net)?), optim.skipped_steps().read()))
            });
            nets.unwrap()
        };
        let (expected, skipped) = run(1, false).swap_remove(0);
        for (trained, also_skipped) in run(4, true) {
            assert_same_weights(&format!("{name}, in rows"), &trained, &expected);
            assert_eq!(also_skipped, skipped, "{name}");
        }
    }
}

/// A matrix and a stack of two: fewer matrices than ranks.
#[derive(Module, Debug)]
struct Few {
    matrix: Param<Tensor<2>>,
    stack: Param<Tensor<3>>,
}

impl Few {
    fn new(matrix: [usize; 2], stack: [usize; 3], device: &Device) -> Self {
        let zeros = Tensor::<2>::zeros(matrix, (device, DType::F32)).require_grad();
        let stacked = Tensor::<3>::zeros(stack, (device, DType::F32)).require_grad();
        let few = Self { matrix: Param::from_tensor(zeros), stack: Param::from_tensor(stacked) };
        few.map(&mut Fixed::new(9))
    }

    fn config() -> DistMuonConfig {
        let muon = MuonConfig::new()
            .with_rule(RoutingRule::muon("matrix"))
            .with_rule(RoutingRule::muon("stack").batch());
        DistMuonConfig::new().with_muon(muon)
    }

    /// The loss on the data of a rank.
    fn loss(&self, rank: usize) -> Tensor<1> {
        let matrix = (self.matrix.val() - 0.1 * rank as f32).square().mean();
        matrix + (self.stack.val() + 0.1 * rank as f32).square().mean()
    }

    /// The bits of the weights after some steps, on a layout or with all parameters on every rank.
    fn trained(
        world: &World,
        sizes: ([usize; 2], [usize; 3]),
        layout: Option<Layout>,
    ) -> Result<Vec<Vec<u8>>> {
        let few = Self::new(sizes.0, sizes.1, world.device());
        let layout = layout.unwrap_or(Layout::from(world)).with_muon(Self::config().muon);
        let mut few = layout.shard(few)?;
        let mut optim = Self::config().init_on(&layout, &few)?;
        for _ in 0..3 {
            let gradients = layout.backward(&few.loss(world.rank()), &few)?;
            few = optim.step(0.01, few, gradients)?;
        }
        Ok(weights(&layout.unshard(&few)?))
    }
}

pub fn a_rank_holds_its_rows_of_every_parameter_also_with_fewer_matrices() {
    const MATRIX: usize = 48 * 64 * 4;
    const STACK: usize = 2 * 24 * 64 * 4;
    // A part that needs whole values has them sent as well.
    let limited = Few::config().muon.with_parts(vec![MaxNorm::new(1.0).into()]);
    let limited = DistMuonConfig::new().with_muon(limited.with_weight_decay(0.0.into()));
    let configs = [(2, Few::config()), (3, limited)];
    for (count, (times, config)) in
        [1, 2, 4, 8].into_iter().flat_map(|count| configs.iter().map(move |config| (count, config)))
    {
        let run = ranks_here(count, |world| {
            let (comm, traffic) = counted(world.communicator());
            let world = World::new(comm, world.device().clone());
            let layout = Layout::new(&Mesh::flat(&world)).rows("dp").with_keep(Keep::Weights);
            let layout = layout.with_muon(config.muon.clone());
            let mut few = layout.shard(Few::new([48, 64], [2, 24, 64], world.device()))?;
            let table = layout.table(&few)?;
            for (path, bytes) in [("matrix", MATRIX), ("stack", STACK)] {
                assert_eq!(table.parts(path), Some(vec![bytes / 4 / count; count]), "{path}");
            }
            assert_eq!(layout.num_params(&few)?, (MATRIX + STACK) / 4);
            let mut optim = config.init_on(&layout, &few)?;
            assert_eq!(optim.memory().parameters.now, (MATRIX + STACK) / count);
            let mut sent = [0; 2];
            for _ in 0..2 {
                traffic.lock().unwrap().clear();
                let gradients = layout.backward(&few.loss(world.rank()), &few)?;
                let passes = std::mem::take(&mut *traffic.lock().unwrap());
                few = optim.step(0.01, few, gradients)?;
                let step = std::mem::take(&mut *traffic.lock().unwrap());
                // Gathered once, and reduced once: of a pass and not of the step.
                let of = |name: &str, calls: &BTreeMap<&str, usize>| {
                    calls.get(name).copied().unwrap_or_default()
                };
                let in_calls = |calls| of("all_gather", calls) + of("reduce_scatter", calls);
                assert_eq!(in_calls(&step), 0, "{step:?}");
                sent = [in_calls(&passes), of("all_to_all", &step)];
            }
            let memory = optim.memory();
            assert_eq!(memory.parameters.now, (MATRIX + STACK) / count);
            Ok((sent, memory.states.now))
        });
        let run = run.unwrap();
        let passes = 2 * (count - 1) * (MATRIX + STACK) / count;
        for ([sent, _], _) in &run {
            assert!(*sent == passes || !worlds::is_exact(), "{sent} of {passes}");
        }
        // A gradient to its owner, and a direction back: of the rows that the owner does not have.
        // Of the stack, half of the ranks have each matrix.
        let of_matrix = MATRIX - MATRIX / count;
        let of_stack = STACK - STACK / (count / 2).max(1);
        let exchanged: usize = run.iter().map(|([_, exchanged], _)| exchanged).sum();
        assert_eq!(exchanged, times * (of_matrix + of_stack), "{count} ranks");
        // Momentum, and the idle steps of each matrix of the stack.
        let states: usize = run.iter().map(|(_, states)| states).sum();
        assert_eq!(states, MATRIX + STACK + 2 * 4);
    }
}

pub fn rows_may_be_uneven_or_none() {
    // 2 and 15 rows, and a matrix of a single one.
    for (sizes, rows) in [
        (([2, 40], [3, 5, 8]), [("matrix", [0, 40, 0, 40]), ("stack", [24, 32, 32, 32])]),
        (([9, 5], [1, 1, 30]), [("matrix", [10, 10, 10, 15]), ("stack", [0, 0, 0, 30])]),
    ] {
        let expected = ranks_here(4, |world| Few::trained(&world, sizes, None)).unwrap();
        let run = ranks_here(4, |world| {
            let layout = || Layout::from(&world).rows("dp").with_small_elements(0);
            let table = layout().with_muon(Few::config().muon).table(&Few::new(
                sizes.0,
                sizes.1,
                world.device(),
            ))?;
            for (path, elements) in rows {
                assert_eq!(table.parts(path), Some(elements.to_vec()), "{table}");
            }
            let nodes = Mesh::new(&world, [Axis::data("node", 2), Axis::data("gpu", 2)])?;
            let on_nodes = Layout::new(&nodes).rows("gpu").with_small_elements(0);
            let trained = Few::trained(&world, sizes, Some(layout()))?;
            assert!(trained == Few::trained(&world, sizes, Some(on_nodes))?, "on nodes");
            Ok((trained, table.to_string()))
        });
        for ((trained, table), expected) in run.unwrap().into_iter().zip(expected) {
            assert!(trained == expected, "{table}");
            let words = [("[2, 40]", "in rows at 1, 3"), ("[3, 5, 8]", "in rows at all")];
            for (shape, place) in words {
                let row = table.lines().find(|line| line.contains(shape));
                assert!(row.is_none_or(|row| row.contains(place)), "{table}");
            }
        }
    }
}

/// Averages, and a whole model again, of parameters in rows.
pub fn averages_of_rows_are_those_of_whole_parameters() {
    let run = ranks_here(3, |world| {
        let few = Few::new([7, 6], [2, 5, 4], world.device());
        let layout = Layout::from(&world).rows("dp").with_small_elements(0);
        let layout = layout.with_muon(Few::config().muon);
        let divided = layout.shard(few.clone())?;
        let mut optim = Few::config().init_on(&layout, &divided)?;
        let gradients = layout.backward(&divided.loss(world.rank()), &divided)?;
        let stepped = optim.step(0.1, divided.clone(), gradients)?;
        let whole = layout.unshard(&stepped)?;
        let average = layout.unshard(&layout.average(divided, &stepped, 0.75)?)?;
        let plain = Layout::new(&Mesh::flat(&world));
        assert!(weights(&plain.average(few, &whole, 0.75)?) == weights(&average));
        Ok(bits(&whole.matrix.val()))
    });
    let run = run.unwrap();
    assert!(run.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
}

pub fn elements_of_rows_are_mapped_as_those_of_whole_parameters() {
    let run = ranks_here(3, |world| {
        let clip = |path: &str, values: Tensor<1>| {
            if path == "matrix" { values.clamp(-0.1, 0.1) } else { values * 0.5 }
        };
        let few = Few::new([7, 6], [2, 5, 4], world.device());
        let layout = Layout::from(&world).rows("dp").with_small_elements(0);
        let layout = layout.with_muon(Few::config().muon);
        let divided = layout.map_elements(layout.shard(few.clone())?, clip);
        let plain = Layout::new(&Mesh::flat(&world));
        let expected = plain.map_elements(few.clone(), clip);
        assert!(weights(&expected) != weights(&few));
        assert!(weights(&layout.unshard(&divided)?) == weights(&expected));
        // The mapped model is trained like any other.
        let mut optim = Few::config().init_on(&layout, &divided)?;
        let gradients = layout.backward(&divided.loss(world.rank()), &divided)?;
        let stepped = optim.step(0.1, divided, gradients)?;
        assert!(weights(&layout.unshard(&stepped)?) != weights(&expected));
        Ok(())
    });
    run.unwrap();
}

/// A parameter with more dimensions than layouts divide, and one with as many.
#[derive(Module, Debug)]
struct Deep {
    seven: Param<Tensor<7>>,
    six: Param<Tensor<6>>,
}

pub fn parameters_with_seven_dimensions_stay_on_all_ranks() {
    let run = ranks_here(2, |world| {
        let param = |shape: [usize; 7]| Tensor::<7>::full(shape, 0.5, (world.device(), DType::F32));
        let deep = Deep {
            seven: Param::from_tensor(param([2; 7]).require_grad()),
            six: Param::from_tensor(
                param([4, 4, 4, 4, 4, 4, 1]).squeeze_dim::<6>(6).require_grad(),
            ),
        };
        let rest = RoutingRule::adamw("six|seven");
        let config = DistMuonConfig::new().with_muon(MuonConfig::new().with_rule(rest));
        let layout = Layout::from(&world).owned("dp").with_small_elements(0);
        let (deep, mut optim) = config.start(&layout, deep)?;
        let parameters = optim.memory().parameters.now;
        let loss = deep.seven.val().square().mean() + deep.six.val().square().mean();
        let gradients = optim.backward(&loss, &deep)?;
        let whole = layout.unshard(&optim.step(0.1, deep, gradients)?)?;
        Ok((parameters, weights(&whole)))
    });
    let run = run.unwrap();
    for (parameters, _) in &run {
        assert_eq!(*parameters, 4 * (128 + 4096 / 2), "bytes of a rank");
    }
    assert!(run[0].1 == run[1].1);
}

pub fn rows_that_do_not_fit_are_rejected() {
    let few = |world: &World| Few::new([8, 8], [2, 4, 4], world.device());
    let shard = |lay: &(dyn Fn(&World) -> Result<Layout> + Sync)| {
        errors(|world| lay(world)?.with_muon(Few::config().muon).shard(few(world)))
    };
    let unknown = shard(&|world| Ok(Layout::from(world).rows("tp")));
    assert_says(&unknown, &["`rows`", "`tp`", "`dp`"]);
    let of_model = shard(&|world| {
        let mesh = Mesh::new(world, [Axis::model("tp", world.size())])?;
        Ok(Layout::new(&mesh).rows("tp"))
    });
    assert_says(&of_model, &["`rows`", "`Axis::data`"]);
    let without_axis = shard(&|world| Ok(Layout::from(world).with_place(Place::rows("matrix"))));
    assert_says(&without_axis, &["`places`", "`Place::rows`", "`Layout::rows`"]);
    let unused = shard(&|world| Ok(Layout::from(world).rows("dp").with_place(Place::rows("b"))));
    assert_says(&unused, &["`b` has no effect"]);
    let others = shard(&|world| {
        let layout = Layout::from(world);
        Ok(if world.is_main() { layout.rows("dp") } else { layout.owned("dp") })
    });
    assert_says(&others, &["rank 1", "`owned`"]);
}
