//! Collectives without an optimizer.

use burn::tensor::{DType, Device, Tensor, TensorData, bf16, f16};
use distmuon::Error;
use distmuon::comm::{PairCounts, ReduceOp, World};
use distmuon_testing::device::has_type;
use distmuon_testing::models::bits;
use distmuon_testing::worlds::{self, Case, cases};
use distmuon_testing::{lacks, watched};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::ranks;

pub const EVERYWHERE: &[Case] = cases![
    every_collective_returns_its_defined_result,
    reductions_equal_sums_in_pairs_bit_for_bit,
    reductions_to_one_large_shard_equal_sums_in_pairs_bit_for_bit,
    every_element_is_sent_once_and_without_widening,
    pending_results_report_the_bytes_that_they_hold,
    values_are_exchanged_between_ranks_bit_for_bit,
    ranks_divide_items_and_average_numbers,
];

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn every_collective_returns_its_defined_result() {
    for dtype in DTYPES {
        if !has_type(dtype.into()) {
            lacks(format!("{dtype:?}"));
            continue;
        }
        let engine = worlds::name();
        let outcome = ranks(3, |world| {
            assert_eq!(world.comm().engine_name(), engine);
            let (rank, comm) = (world.rank(), world.comm());
            let device = Device::default();
            let input =
                |values: &[f32]| Tensor::<1>::from_data(TensorData::from(values), (&device, dtype));
            let read = |tensor: Tensor<1>| {
                assert_eq!(tensor.dtype(), dtype);
                tensor.into_data().iter::<f32>().collect::<Vec<_>>()
            };
            let r = rank as f32;
            let sum = comm.all_reduce(input(&[r, 10.0 * r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [3.0, 30.0]);
            // Uneven and empty shards; several collectives in flight at once.
            let scattered =
                comm.reduce_scatter(input(&[r, 1.0, 2.0 + r]), &[2, 0, 1], ReduceOp::Mean)?;
            let counts = [1, 0, 2];
            let gathered = comm.all_gather(input(&[r; 2][..counts[rank]]), &counts)?;
            let parts = [&[1.0f32, 1.0][..], &[], &[3.0]];
            assert_eq!(read(scattered.wait()?), parts[rank]);
            assert_eq!(read(gathered.wait()?), [0.0, 2.0, 2.0]);
            let root = comm.broadcast(input(&[r]), 2)?.wait()?;
            assert_eq!(read(root), [2.0]);
            // Rank r sends r elements to every rank.
            let counts = PairCounts { sent: vec![rank; 3], received: vec![0, 1, 2] };
            let exchanged = comm.all_to_all(input(&vec![r; 3 * rank]), &counts)?.wait()?;
            assert_eq!(read(exchanged), [1.0, 2.0, 2.0]);
            let most = (1 << 40) + 1;
            let numbers = [0, 1, 2].map(|to| 10 * most * rank + to);
            let numbers = comm.all_to_all_numbers(&numbers, world.device())?;
            assert_eq!(numbers, [0, 1, 2].map(|from| 10 * most * from + rank));
            // To one rank: from all ranks, and from that rank alone.
            for (counts, all) in [([1, 0, 2], &[0.0, 2.0, 2.0][..]), ([0, 3, 0], &[1.0; 3])] {
                let part = input(&[r; 3][..counts[rank]]);
                let gathered = comm.gather(part, &counts, 1)?.wait()?;
                let gathered: Vec<f32> = gathered.into_iter().flat_map(read).collect();
                assert_eq!(gathered, if rank == 1 { all } else { &[] });
            }
            let wrong = comm.gather(input(&[r]), &[1, 1, 1], 3).unwrap_err();
            assert!(matches!(wrong, Error::Collective { collective: "gather", .. }), "{wrong}");
            // Groups of the even and of the odd ranks. The even ranks are in reverse order.
            let group = world.split(rank % 2, 10 - rank)?;
            assert_eq!((group.size(), group.rank()), [(2, 1), (1, 0), (2, 0)][rank]);
            let sum = group.comm().all_reduce(input(&[r]), ReduceOp::Sum)?.wait()?;
            assert_eq!(read(sum), [[2.0], [1.0], [2.0]][rank]);
            let wrong = comm.all_gather(input(&[r]), &[1, 1]).unwrap_err();
            assert!(matches!(wrong, Error::Collective { collective: "all_gather", .. }), "{wrong}");
            Ok(())
        });
        outcome.unwrap();
    }
}

/// Random values of a rank, rounded to a type.
fn contribution(rank: usize, length: usize, dtype: DType) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(rank as u64);
    (0..length).map(|_| rounded(rng.random_range(-1.0..1.0), dtype)).collect()
}

fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Sums of neighbours, then of neighbouring sums, and so on: in float32, and rounded once.
fn reference(ranks: usize, length: usize, dtype: DType, op: ReduceOp) -> Vec<f32> {
    let all: Vec<_> = (0..ranks).map(|rank| contribution(rank, length, dtype)).collect();
    let sum = |i: usize| {
        let mut level: Vec<f32> = all.iter().map(|values| values[i]).collect();
        while level.len() > 1 {
            level = level.chunks(2).map(|pair| pair.iter().sum()).collect();
        }
        rounded(if op == ReduceOp::Mean { level[0] / ranks as f32 } else { level[0] }, dtype)
    };
    (0..length).map(sum).collect()
}

fn tensor(values: &[f32], dtype: DType) -> Tensor<1> {
    Tensor::from_data(TensorData::from(values), (&Device::default(), dtype))
}

/// Compares the reductions of a world with the reference, for shards of these lengths.
pub fn check_reductions(
    world: &World,
    counts: &[usize],
    dtype: DType,
    op: ReduceOp,
) -> distmuon::Result<()> {
    let (rank, size, comm) = (world.rank(), world.size(), world.comm());
    let length = counts.iter().sum();
    let input = || tensor(&contribution(rank, length, dtype), dtype);
    let expected = reference(size, length, dtype, op);
    let start = counts[..rank].iter().sum::<usize>();
    let shard = &expected[start..start + counts[rank]];
    // All three are in flight at once.
    let scattered = comm.reduce_scatter(input(), counts, op)?;
    let reduced = comm.all_reduce(input(), op)?;
    let wide = comm.reduce_scatter_f32(input(), counts)?;
    let case = format!("{size} ranks, {counts:?}, {dtype:?}, {op:?}");
    assert!(bits(&scattered.wait()?) == bits(&tensor(shard, dtype)), "reduce_scatter, {case}");
    assert!(bits(&reduced.wait()?) == bits(&tensor(&expected, dtype)), "all_reduce, {case}");
    let wide = wide.wait()?;
    assert_eq!((wide.dtype(), wide.dims()), (DType::F32, [counts[rank]]));
    if op == ReduceOp::Sum {
        assert!(bits(&wide.cast(dtype)) == bits(&tensor(shard, dtype)), "in float32, {case}");
    }
    Ok(())
}

fn reductions_equal_sums_in_pairs_bit_for_bit() {
    if !worlds::is_exact() {
        return;
    }
    for size in (1..=7).filter(worlds::has) {
        let outcome = ranks(size, |world| {
            for counts in [
                vec![5; size],
                (0..size).map(|rank| (rank * 7 + 3) % 5).collect(),
                (0..size).map(|rank| 33 * usize::from(rank == size / 2)).collect(),
                vec![0; size],
            ] {
                for dtype in DTYPES {
                    for op in [ReduceOp::Sum, ReduceOp::Mean] {
                        check_reductions(&world, &counts, dtype, op)?;
                    }
                }
            }
            Ok(())
        });
        outcome.unwrap();
    }
}

/// The shard is so large that its owner can't receive it from all other ranks at once.
fn reductions_to_one_large_shard_equal_sums_in_pairs_bit_for_bit() {
    if !worlds::is_exact() {
        return;
    }
    let outcome =
        ranks(3, |world| check_reductions(&world, &[1, 400_001, 0], DType::BF16, ReduceOp::Mean));
    outcome.unwrap();
}

/// Bytes are counted on the engine.
fn every_element_is_sent_once_and_without_widening() {
    let is_exact = worlds::is_exact();
    for dtype in DTYPES {
        let outcome = ranks(3, |world| {
            let (comm, traffic) = watched::counted(world.communicator());
            let input = |length| tensor(&contribution(world.rank(), length, dtype), dtype);
            comm.reduce_scatter(input(24), &[8; 3], ReduceOp::Sum)?.wait()?;
            comm.all_reduce(input(24), ReduceOp::Mean)?.wait()?;
            comm.all_gather(input(8), &[8; 3])?.wait()?;
            comm.gather(input(8), &[8; 3], 0)?.wait()?;
            let traffic = traffic.lock().unwrap().clone();
            Ok((traffic["reduce_scatter"], traffic["all_reduce"], traffic["all_gather"]))
        });
        // Two thirds of the buffer, and twice that for the sum on every rank. NCCL adds up in
        // float32.
        let width = if is_exact { dtype.size() } else { 4 };
        let expected = (16 * width, 32 * width, 16 * dtype.size());
        assert_eq!(outcome.unwrap(), [expected; 3], "{dtype:?}");
    }
}

fn pending_results_report_the_bytes_that_they_hold() {
    let engine = worlds::name();
    let (is_exact, size) = (worlds::is_exact(), 2);
    let outcome = ranks(size, |world| {
        let input = || tensor(&[1.0; 8], DType::F16);
        let comm = world.comm();
        let scattered = comm.reduce_scatter(input(), &[6, 2], ReduceOp::Sum)?;
        let gathered = comm.all_gather(input(), &[8; 2])?;
        // Threads hold their contribution, and receive nothing before they wait.
        let [shards, copies] = match (engine, is_exact) {
            ("threads", _) => [0, 0],
            (_, true) => [size * [6, 2][world.rank()] * 2, 32],
            // Padded shards, in float32.
            (_, false) => [12 * 4 - 16 + 6 * 4, 32],
        };
        assert_eq!((scattered.bytes(), gathered.bytes()), (16 + shards, 16 + copies));
        scattered.wait()?;
        let gathered = gathered.wait()?;
        assert_eq!(distmuon::comm::Pending::ready(gathered).bytes(), 32);
        Ok(())
    });
    outcome.unwrap();
}

fn values_are_exchanged_between_ranks_bit_for_bit() {
    let outcome = ranks(3, |world| {
        let input = [f64::NAN, f64::INFINITY, -0.0][world.rank()];
        let all = world.all_gather_value(&input)?;
        assert!(all[0].is_nan() && all[1] == f64::INFINITY && all[2].is_sign_negative());
        let gathered = world.gather_value(&world.rank(), 2)?;
        assert_eq!(gathered, (world.rank() == 2).then(|| vec![0, 1, 2]));
        world.broadcast_value(&Some(input), 1)
    });
    assert_eq!(outcome.unwrap(), [Some(f64::INFINITY); 3]);
}

fn ranks_divide_items_and_average_numbers() {
    let outcome = ranks(3, |world| {
        assert_eq!(world.is_main(), world.rank() == 0);
        assert_eq!(world.part(8), [0..2, 2..5, 5..8][world.rank()]);
        assert!(world.part(1).len() <= 1 && world.part(0).is_empty());
        assert_eq!(world.mean(world.rank() as f32)?, 1.0);
        assert!(world.mean([1.0, f64::NAN, 2.0][world.rank()])?.is_nan());
        Ok(())
    });
    outcome.unwrap();
}
