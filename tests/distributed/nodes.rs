//! Ranks on several nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Error;
use distmuon::dist::comm::{Communicator, Hierarchy, Pending};
use distmuon::dist::{ReduceOp, World};

use crate::common::bits;
use crate::worlds::{Case, cases};
use crate::{Net, config, ranks, trained, watched};

pub const SOUND: &[Case] =
    cases![nodes_are_bit_equal_to_a_flat_world, nodes_send_less_between_them,];

fn nodes_are_bit_equal_to_a_flat_world() {
    // Neighbours are a node, or every other rank is.
    for node in [|rank: usize| rank / 2, |rank: usize| rank % 2] {
        let nets = ranks(4, |world| {
            let name = format!("node {}", node(world.rank()));
            let world = world.by_node(&name)?;
            assert!(world.comm().version().ends_with(", 2 nodes"), "{}", world.comm().version());
            let mut net = world.broadcast(Net::new(world.device()))?;
            let mut optim = config().with_bucket_mb(0.002).init(&world, &net)?;
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

fn nodes_send_less_between_them() {
    let counts = [5, 0, 4, 7];
    let own = |rank: usize, length: usize, dtype| {
        let values = (0..length).map(|i| ((3 * i + rank) % 11) as f32 - 5.0).collect::<Vec<f32>>();
        Tensor::<1>::from_data(TensorData::from(&values[..]), (&Device::default(), dtype))
    };
    let sent = ranks(4, |world| {
        let rank = world.rank();
        let bytes = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
        let nodes = Hierarchy::over(world.engine(), &format!("{}", rank / 2))?.expect("two nodes");
        let nodes = nodes.watched(|link, engine| {
            let bytes = bytes[usize::from(link == "across")].clone();
            let group = World::new(engine, world.device().clone());
            let count = move |event: watched::Event| {
                bytes.fetch_add(event.bytes, Ordering::SeqCst);
                Ok(())
            };
            watched::watched(&group, count).engine()
        });
        let read = |result: Pending| Ok::<_, Error>(bits(&result.wait()?));
        for dtype in [DType::F32, DType::F16] {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                let flat = world.comm().reduce_scatter(own(rank, 16, dtype), &counts, op)?;
                let summed = nodes.reduce_scatter(own(rank, 16, dtype), &counts, op)?;
                assert_eq!(read(summed)?, read(flat)?, "exact in any order");
            }
            let part = || own(rank, counts[rank], dtype);
            let flat = world.comm().all_gather(part(), &counts)?;
            assert_eq!(read(nodes.all_gather(part(), &counts)?)?, read(flat)?);
        }
        bytes.iter().for_each(|bytes| bytes.store(0, Ordering::SeqCst));
        nodes.reduce_scatter(own(rank, 16, DType::F32), &[4; 4], ReduceOp::Sum)?.wait()?;
        Ok(bytes.map(|bytes| bytes.load(Ordering::SeqCst)))
    });
    for [inside, across] in sent.unwrap() {
        // Of 64 bytes a flat rank sends the 32 of the other node across.
        assert_eq!((inside, across), (32, 16));
    }
}
