//! Collectives by themselves.

use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::Error;
use distmuon::dist::ReduceOp;

use crate::ranks;
use crate::worlds::{self, Case, cases};

pub const SOUND: &[Case] = cases![collectives_move_what_they_say,];

fn collectives_move_what_they_say() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !Device::default().supports_dtype(dtype) {
            println!("skipped: the device has no {dtype:?}");
            continue;
        }
        let engine = worlds::name();
        let outcome = ranks(3, |world| {
            assert_eq!(world.comm().engine(), engine);
            let (rank, comm) = (world.rank(), world.comm());
            let device = Device::default();
            let own =
                |values: &[f32]| Tensor::<1>::from_data(TensorData::from(values), (&device, dtype));
            let read = |tensor: Tensor<1>| {
                assert_eq!(tensor.dtype(), dtype);
                tensor.into_data().iter::<f32>().collect::<Vec<_>>()
            };
            let r = rank as f32;
            let sum = comm.all_reduce(own(&[r, 10.0 * r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [3.0, 30.0]);
            // Uneven and empty shares; several collectives on their way at once.
            let scattered =
                comm.reduce_scatter(own(&[r, 1.0, 2.0 + r]), &[2, 0, 1], ReduceOp::Mean)?;
            let counts = [1, 0, 2];
            let gathered = comm.all_gather(own(&[r; 2][..counts[rank]]), &counts)?;
            let parts = [&[1.0f32, 1.0][..], &[], &[3.0]];
            assert_eq!(read(scattered.wait()?), parts[rank]);
            assert_eq!(read(gathered.wait()?), [0.0, 2.0, 2.0]);
            let root = comm.broadcast(own(&[r]), 2)?.wait()?;
            assert_eq!(read(root), [2.0]);
            // Rank r sends r elements to every rank.
            let sent = vec![r; 3 * rank];
            let exchanged = comm.all_to_all(own(&sent), &[rank; 3], &[0, 1, 2])?.wait()?;
            assert_eq!(read(exchanged), [1.0, 2.0, 2.0]);
            // Groups of the even and of the odd ranks, the even ones in reverse.
            let group = world.split(rank % 2, 10 - rank)?;
            assert_eq!((group.size(), group.rank()), [(2, 1), (1, 0), (2, 0)][rank]);
            let sum = group.comm().all_reduce(own(&[r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [[2.0], [1.0], [2.0]][rank]);
            let wrong = comm.all_gather(own(&[r]), &[1, 1]).unwrap_err();
            assert!(matches!(wrong, Error::Collective { collective: "all_gather", .. }), "{wrong}");
            Ok(())
        });
        outcome.unwrap();
    }
}
