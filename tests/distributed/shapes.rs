//! Matrices of many shapes and types, more ranks than matrices.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use distmuon::distributed::DistMuonConfig;
use distmuon::{MuonConfig, RoutingRule};
use distmuon_testing::device::has_type;
use distmuon_testing::lacks;
use distmuon_testing::models::{gradients, weights};
use distmuon_testing::worlds::{self, Case, cases};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{device, ranks};

pub const EVERYWHERE: &[Case] = cases![
    shapes_from_the_tests_of_other_systems_are_bit_equal_on_ranks,
    uneven_models_and_models_with_fewer_matrices_than_ranks_are_bit_equal,
    half_precision_models_are_bit_equal_on_ranks,
];

/// Matrices of any shapes.
#[derive(Module, Debug)]
struct Stack {
    matrices: Vec<Param<Tensor<2>>>,
}

impl Stack {
    fn new(shapes: &[[usize; 2]], dtype: DType, device: &Device) -> Self {
        let mut rng = StdRng::seed_from_u64(11);
        let mut matrix = |shape: &[usize; 2]| {
            let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(-0.3..0.3));
            let values = TensorData::new(values.collect::<Vec<f32>>(), *shape);
            Param::from_tensor(Tensor::from_data(values, (device, dtype)).require_grad())
        };
        Self { matrices: shapes.iter().map(&mut matrix).collect() }
    }

    /// The weights after ten steps on a number of ranks, which have to agree.
    fn trained(
        shapes: &[[usize; 2]],
        dtype: DType,
        count: usize,
        config: &DistMuonConfig,
    ) -> Vec<Vec<u8>> {
        let mut runs = ranks(count, |world| {
            let mut stack = Self::new(shapes, dtype, world.device());
            let mut optim = config.init(&world, &stack)?;
            for step in 0..10 {
                let gradients = gradients(&stack, step);
                stack = optim.step(0.01, stack, gradients)?;
            }
            Ok(weights(&stack))
        })
        .unwrap();
        assert!(runs.iter().all(|weights| *weights == runs[0]), "the ranks agree");
        runs.swap_remove(0)
    }
}

fn matrices_only() -> DistMuonConfig {
    DistMuonConfig::new().with_muon(MuonConfig::new().with_rule(RoutingRule::muon("matrices")))
}

/// The shapes on which Emerging-Optimizers tests its distributed Muon, and two properties from the
/// tests of DMuon and Megatron: overlapped buckets equal buckets in turn, and all runs are equal.
fn shapes_from_the_tests_of_other_systems_are_bit_equal_on_ranks() {
    let shapes = [[21, 16], [16, 32], [3, 32], [5, 100]];
    let trained =
        |count, config: &DistMuonConfig| Stack::trained(&shapes, DType::F32, count, config);
    let alone = trained(1, &matrices_only());
    for count in [2, 4] {
        for in_flight in [1, 2, 3] {
            let config = matrices_only().with_bucket_mb(Some(0.002)).with_in_flight(in_flight);
            assert!(trained(count, &config) == alone, "{count} ranks, {in_flight} in flight");
        }
    }
    for run in 0..10 {
        assert!(trained(4, &matrices_only()) == alone, "run {run}");
    }
}

fn uneven_models_and_models_with_fewer_matrices_than_ranks_are_bit_equal() {
    let mut shapes = vec![[3, 2]; 30];
    shapes.insert(7, [64, 96]);
    for (shapes, counts) in [(&shapes[..], [2, 4, 8]), (&[[4, 6], [6, 4]][..], [4, 8, 16])] {
        let trained = |count| Stack::trained(shapes, DType::F32, count, &matrices_only());
        let alone = trained(1);
        for count in counts.into_iter().filter(worlds::has) {
            assert!(trained(count) == alone, "{count} ranks, {shapes:?}");
        }
    }
}

fn half_precision_models_are_bit_equal_on_ranks() {
    let shapes = [[16, 24], [24, 16], [24, 16], [7, 5]];
    for dtype in [DType::F16, DType::BF16] {
        if !has_type(dtype.into()) {
            lacks(format!("{dtype:?}"));
            continue;
        }
        let alone = Stack::trained(&shapes, dtype, 1, &matrices_only());
        let start = Stack::new(&shapes, dtype, &device());
        assert!(start.matrices.iter().all(|matrix| matrix.val().dtype() == dtype));
        assert!(alone.iter().zip(weights(&start)).all(|(new, old)| *new != old), "{dtype:?}");
        for count in [2, 4] {
            assert!(Stack::trained(&shapes, dtype, count, &matrices_only()) == alone, "{dtype:?}");
        }
    }
}
