//! Ranks on several nodes.

use std::cell::RefCell;

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Error;
use distmuon::comm::ReduceOp;
use distmuon::comm::{Communicator, Hierarchy, Pending};
use distmuon::distributed::{Axis, DistMuonConfig, Layout, Mesh, Place, Publish};
use distmuon_testing::models::{Layers, bits};
use distmuon_testing::worlds::{self, Case, cases};
use distmuon_testing::{excused, watched};

use crate::{Net, collectives, config, device, ranks, trained};

pub const EVERYWHERE: &[Case] = cases![
    a_world_of_nodes_is_bit_equal_to_a_flat_world,
    reductions_over_nodes_of_neighbours_equal_sums_in_pairs_bit_for_bit,
    reductions_over_nodes_send_fewer_bytes_between_nodes,
    groups_of_ranks_on_several_nodes_have_nodes,
    groups_of_the_same_ranks_have_one_communicator,
];

fn a_world_of_nodes_is_bit_equal_to_a_flat_world() {
    // A node consists of neighbours, or of every other rank.
    for node in [|rank: usize| rank / 2, |rank: usize| rank % 2] {
        let nets = ranks(4, |world| {
            let name = format!("node {}", node(world.rank()));
            let world = world.by_node(&name)?;
            assert!(world.comm().version().ends_with(", 2 nodes"), "{}", world.comm().version());
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_bucket_mb(Some(0.002)).init(&world, &net)?;
            for step in 0..5 {
                let gradients = net.gradients(step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok(net.weights())
        });
        let alone = trained(1, 5, &config());
        for net in nets.unwrap() {
            assert!(net == alone);
        }
    }
    // Nodes of different sizes, of one rank, and a single node are a flat world.
    for name in [|rank: usize| rank / 3, |rank: usize| rank, |_| 0] {
        let versions = ranks(4, |world| {
            let flat = world.comm().version();
            Ok(world.clone().by_node(&name(world.rank()).to_string())?.comm().version() == flat)
        });
        assert_eq!(versions.unwrap(), [true; 4]);
    }
}

/// With neighbours in nodes of two, the order of additions is that of a flat world.
fn reductions_over_nodes_of_neighbours_equal_sums_in_pairs_bit_for_bit() {
    if !worlds::is_exact() {
        excused("NCCL chooses the order of its additions");
        return;
    }
    let checked = ranks(4, |world| {
        let world = world.clone().by_node(&format!("{}", world.rank() / 2))?;
        for counts in [[8; 4], [5, 0, 4, 7]] {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    collectives::check_reductions(&world, &counts, dtype, op)?;
                }
            }
        }
        Ok(())
    });
    checked.unwrap();
}

/// The communicators that common meshes and layouts make, in addition to that of the world.
fn groups_of_the_same_ranks_have_one_communicator() {
    type Owned = fn(Layout) -> Layout;
    let data = [Axis::data("dp", 2), Axis::data("fsdp", 2)];
    let slices = [Axis::data("dp", 2), Axis::model("tp", 2)];
    let cases: [(&str, Vec<Axis>, Owned, usize); 6] = [
        ("replicated", vec![Axis::data("dp", 4)], |layout| layout, 0),
        // Each rank alone, with the replicas of its parts.
        ("owned", vec![Axis::data("dp", 4)], |layout| layout.owned("dp"), 1),
        ("hybrid", data.to_vec(), |layout| layout.owned("fsdp"), 2),
        ("overlap", vec![Axis::data("dp", 4)], |layout| layout.overlap_backward(), 1),
        ("slices", slices.to_vec(), |layout| layout, 2),
        ("owned slices", slices.to_vec(), |layout| layout.owned("dp"), 3),
    ];
    for (name, axes, owned, expected) in cases {
        let made = |publish: Publish, has_nodes: bool| {
            ranks(4, |world| {
                let before = world.comm().communicators();
                let world = if has_nodes {
                    world.clone().by_node(&(world.rank() / 2).to_string())?
                } else {
                    world
                };
                let mesh = Mesh::new(&world, axes.clone())?;
                let layout = owned(Layout::new(&mesh)).with_small_elements(8);
                let layout = match axes.iter().any(Axis::is_model) {
                    true => layout.with_place(Place::shard(r"^layers\.0\.", "tp", 1)),
                    false => layout,
                };
                let model = layout.shard(Layers::square(3, 8, world.device()))?;
                let optim = DistMuonConfig::new().with_publish(publish).init_on(&layout, &model)?;
                assert_eq!(optim.memory().communicators, world.comm().communicators());
                let described = match world.comm().communicators() {
                    1 => ", 1 communicator each".to_owned(),
                    count => format!(", {count} communicators each"),
                };
                let text = world.describe()?;
                assert!(text.contains(&described) || !world.is_main(), "{text}");
                Ok(world.comm().communicators() - before)
            })
            .unwrap()
        };
        assert_eq!(made(Publish::Now, false), [expected; 4], "{name}");
        // With slices, whole parameters have another group than slices of them.
        let more = if axes.iter().any(Axis::is_model) { 2 } else { 1 };
        assert_eq!(made(Publish::AtFirstUse, false), [expected + more; 4], "{name}");
        for made in made(Publish::Now, true) {
            assert!(made < 3 * (1 + expected), "{name}: {made} with nodes");
        }
    }
}

fn groups_of_ranks_on_several_nodes_have_nodes() {
    let nodes = ranks(4, |world| {
        let rank = world.rank();
        let world = world.by_node(&(rank / 2).to_string())?;
        let reversed = world.split(0, 3 - rank)?;
        let [inside, across] = [world.split(rank / 2, rank)?, world.split(rank % 2, rank)?]
            .map(|group| (group.size(), group.comm().nodes().len()));
        let counts = [3, 0, 2, 1];
        let part = Tensor::<1>::full([counts[reversed.rank()]], rank as f32, &device());
        let gathered = reversed.comm().all_gather(part, &counts)?.wait()?;
        let gathered: Vec<f32> = gathered.into_data().iter::<f32>().collect();
        Ok((reversed.comm().nodes(), inside, across, gathered))
    });
    for (nodes, inside, across, gathered) in nodes.unwrap() {
        assert_eq!(nodes, [[0, 1], [2, 3]]);
        assert_eq!((inside, across), ((2, 1), (2, 1)));
        assert_eq!(gathered, [3.0, 3.0, 3.0, 1.0, 1.0, 0.0]);
    }
}

fn reductions_over_nodes_send_fewer_bytes_between_nodes() {
    let (counts, is_exact) = ([5, 0, 4, 7], worlds::is_exact());
    let input = |rank: usize, length: usize, dtype| {
        let values = (0..length).map(|i| ((3 * i + rank) % 11) as f32 - 5.0).collect::<Vec<f32>>();
        Tensor::<1>::from_data(TensorData::from(&values[..]), (&Device::default(), dtype))
    };
    let sent = ranks(4, |world| {
        let rank = world.rank();
        let name = format!("{}", rank / 2);
        let nodes = Hierarchy::over(world.communicator(), &name)?.expect("two nodes");
        let links = RefCell::new(vec![]);
        let nodes = Communicator::from(nodes.watched(|_, comm| {
            let (comm, traffic) = watched::counted(comm);
            links.borrow_mut().push(traffic);
            comm
        }));
        let read = |result: Pending| Ok::<_, Error>(bits(&result.wait()?));
        for dtype in [DType::F32, DType::F16] {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                let flat = world.comm().reduce_scatter(input(rank, 16, dtype), &counts, op)?;
                let summed = nodes.reduce_scatter(input(rank, 16, dtype), &counts, op)?;
                assert_eq!(read(summed)?, read(flat)?, "exact in any order");
            }
            let part = || input(rank, counts[rank], dtype);
            let flat = world.comm().all_gather(part(), &counts)?;
            assert_eq!(read(nodes.all_gather(part(), &counts)?)?, read(flat)?);
        }
        // Traffic inside nodes, then between nodes.
        let links = links.into_inner();
        let sent = |collective, call: Result<Pending, Error>| {
            call?.wait()?;
            let bytes = links.iter().map(|link| link.lock().unwrap().remove(collective));
            Ok::<Vec<_>, Error>(bytes.map(|bytes| bytes.unwrap_or(0)).collect())
        };
        let sum = |dtype| nodes.reduce_scatter(input(rank, 16, dtype), &[4; 4], ReduceOp::Sum);
        links.iter().for_each(|link| link.lock().unwrap().clear());
        Ok([
            sent("reduce_scatter", sum(DType::F32))?,
            sent("reduce_scatter", sum(DType::F16))?,
            sent("all_gather", nodes.all_gather(input(rank, 4, DType::F32), &[4; 4]))?,
        ])
    });
    let half = if is_exact { 16 } else { 32 };
    for [float32, float16, gathered] in sent.unwrap() {
        // In a flat world, a rank sends 32 of its 64 bytes to the other node.
        assert_eq!(float32, [32, 16]);
        // The sums of nodes are not rounded before they are sent to other nodes.
        assert_eq!(float16, [half, 16]);
        // The 64 bytes of all four ranks: each rank sends its own 16 to the other node, once.
        assert_eq!(gathered[1], 16);
    }
}
