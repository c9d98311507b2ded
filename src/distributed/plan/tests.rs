use proptest::prelude::{
    Just, Strategy as _, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest,
};

#[cfg(feature = "optimal")]
use proptest::prelude::ProptestConfig;

use std::collections::BTreeSet;

use super::*;

/// Models, each with its name and its matrices.
pub fn models() -> [(&'static str, Vec<Parameter>); 3] {
    let matrix = |layer: usize, name: &str, [rows, columns]: [usize; 2]| {
        stack(&format!("layers.{layer}.{name}"), 1, [rows, columns])
    };
    let gpt2 = (0..12).flat_map(|layer| {
        let square = ["q", "k", "v", "o"].map(|name| matrix(layer, name, [768, 768]));
        let wide = [matrix(layer, "up", [768, 3072]), matrix(layer, "down", [3072, 768])];
        square.into_iter().chain(wide)
    });
    let llama = (0..32).flat_map(|layer| {
        [
            matrix(layer, "q", [4096, 4096]),
            matrix(layer, "k", [4096, 1024]),
            matrix(layer, "v", [4096, 1024]),
            matrix(layer, "o", [4096, 4096]),
            matrix(layer, "gate", [4096, 14336]),
            matrix(layer, "up", [4096, 14336]),
            matrix(layer, "down", [14336, 4096]),
        ]
    });
    let mixture = (0..16).flat_map(|layer| {
        let square = ["q", "k", "v", "o"].map(|name| matrix(layer, name, [2048, 2048]));
        let up = stack(&format!("layers.{layer}.experts.up"), 64, [2048, 1408]);
        let down = stack(&format!("layers.{layer}.experts.down"), 64, [1408, 2048]);
        square.into_iter().chain([up, down])
    });
    [
        ("GPT-2 small", gpt2.collect()),
        ("Llama-3-8B", llama.collect()),
        ("64-expert mixture", mixture.collect()),
    ]
}

pub fn stack(path: &str, count: usize, [rows, columns]: [usize; 2]) -> Parameter {
    let shape = if count == 1 { vec![rows, columns] } else { vec![count, rows, columns] };
    let work = Work::Matrices { count, rows, columns };
    Parameter {
        path: path.to_owned(),
        shape,
        dtype: DType::F32,
        work,
        placement: Placement::Replicated,
        slices: None,
        settings: 0,
    }
}

/// Operations of five steps with symmetric products, in the cheaper of the two forms.
pub fn flops([rows, columns]: [usize; 2]) -> f64 {
    let (m, n) = (rows.min(columns) as f64, rows.max(columns) as f64);
    (15.0 * m * m * n + 5.0 * m.powi(3)).min(6.0 * m * m * n + 14.0 * m.powi(3))
}

pub fn costs(parameters: &[Parameter], fixed: f64) -> Costs {
    Costs::new(parameters.iter().filter_map(|parameter| match parameter.work {
        Work::Matrices { rows, columns, .. } => {
            Some(([rows, columns], ShapeCost { fixed, each: flops([rows, columns]) }))
        }
        Work::Whole | Work::Elements => None,
    }))
}

fn config_with(balancing: Balancing) -> PlanConfig {
    PlanConfig { balancing, ..PlanConfig::default() }
}

/// Fixed costs of a batch: zero, small, and as of a square matrix of GPT-2 small (9e9).
const FIXED: [f64; 3] = [0.0, 1e9, 1e10];

pub const WORLDS: [usize; 6] = [2, 3, 4, 8, 16, 64];

pub fn plan(
    parameters: &[Parameter],
    world_size: usize,
    balancing: Balancing,
    costs: &Costs,
) -> Plan {
    Plan::new(parameters.to_vec(), world_size, &config_with(balancing), costs).unwrap()
}

pub fn max_load(plan: &Plan, costs: &Costs) -> f64 {
    plan.loads(costs).into_iter().fold(0.0, f64::max)
}

/// The mean load without fixed costs.
fn mean(parameters: &[Parameter], world_size: usize) -> f64 {
    matrix_costs(parameters).iter().sum::<f64>() / world_size as f64
}

/// The cost of every matrix without fixed costs, the most expensive first.
fn matrix_costs(parameters: &[Parameter]) -> Vec<f64> {
    let each = |parameter: &Parameter| match parameter.work {
        Work::Matrices { count, rows, columns } => vec![flops([rows, columns]); count],
        Work::Whole | Work::Elements => vec![],
    };
    let mut all: Vec<f64> = parameters.iter().flat_map(each).collect();
    all.sort_by(|a, b| b.total_cmp(a));
    all
}

/// A lower bound on the load of the busiest rank without fixed costs: the mean load, and the load
/// of a rank that owns `k + 1` of the `k N + 1` most expensive matrices, since some rank owns that
/// number.
fn lower_bound(parameters: &[Parameter], world_size: usize) -> f64 {
    let all = matrix_costs(parameters);
    let forced = (world_size..all.len())
        .step_by(world_size)
        .map(|last| all[last - last / world_size..=last].iter().sum());
    forced.chain([all[0]]).fold(mean(parameters, world_size), f64::max)
}

pub fn elements(path: &str, shape: &[usize]) -> Parameter {
    let (path, shape) = (path.to_owned(), shape.to_vec());
    Parameter {
        path,
        shape,
        dtype: DType::F32,
        work: Work::Elements,
        placement: Placement::Replicated,
        slices: None,
        settings: 0,
    }
}

#[test]
fn greedy_is_balanced_where_matrices_allow_it() {
    for (name, parameters) in models() {
        for (world_size, fixed) in WORLDS.into_iter().flat_map(|n| FIXED.map(|fixed| (n, fixed))) {
            let costs = costs(&parameters, fixed);
            let greedy = plan(&parameters, world_size, Balancing::Greedy, &costs);
            let cyclic = plan(&parameters, world_size, Balancing::BlockCyclic, &costs);
            let case = format!("{name}, {world_size} ranks, {fixed} for a batch");
            assert!(max_load(&greedy, &costs) <= max_load(&cyclic, &costs), "{case}");
            if fixed == 0.0 {
                let bound = lower_bound(&parameters, world_size);
                assert!(max_load(&greedy, &costs) <= 1.05 * bound, "{case}");
            }
            // With fewer than two matrices per rank, or with batches that cost more than their
            // matrices, no assignment is balanced.
            if (world_size, name) != (64, "GPT-2 small") && fixed < 1e10 {
                assert!(greedy.imbalance(&costs) <= 1.05, "{case}");
            }
        }
    }
}

#[test]
fn a_matrix_that_dominates_all_others_is_alone_on_its_rank() {
    let tiny = (0..100).map(|index| stack(&format!("tiny.{index}"), 1, [16, 16]));
    let giant = stack("giant", 1, [1024, 1024]);
    let parameters: Vec<_> = tiny.chain([giant]).collect();
    let costs = costs(&parameters, 0.0);
    let plan = plan(&parameters, 4, Balancing::Greedy, &costs);
    assert_eq!(max_load(&plan, &costs), flops([1024, 1024]));
    assert_eq!(
        plan.owners().iter().flatten().filter(|&&rank| rank == plan.owner(100, 0)).count(),
        1
    );
}

#[test]
fn matrices_of_a_batch_stay_on_one_rank_if_that_is_balanced() {
    let parameters: Vec<_> = (0..4).map(|index| stack(&format!("{index}"), 8, [16, 16])).collect();
    let config = PlanConfig { bucket_bytes: 8 * 16 * 16 * 4, ..PlanConfig::default() };
    let costs = costs(&parameters, 1e9);
    let plan = Plan::new(parameters, 4, &config, &costs).unwrap();
    for owners in plan.owners() {
        assert!(owners.iter().all(|owner| owner == &owners[0]), "{owners:?}");
    }
    assert_eq!(plan.imbalance(&costs), 1.0);
}

#[test]
fn block_cyclic_assigns_matrices_in_turn() {
    let parameters = [stack("a", 3, [8, 8]), stack("b", 1, [8, 16]), stack("c", 1, [8, 8])];
    let costs = costs(&parameters, 0.0);
    let plan = plan(&parameters, 2, Balancing::BlockCyclic, &costs);
    assert_eq!(plan.owners(), [vec![1, 0, 1], vec![0], vec![0]]);
}

#[test]
fn matrices_go_to_their_candidates_in_every_balancing() {
    // Two layers of experts, of which the even ranks have the first half, and a matrix that every
    // rank may own, as expensive as eight experts.
    let experts = ["a", "b"].map(|path| stack(path, 8, [16, 16]));
    let parameters = [&experts[..], &[stack("wide", 1, [32, 32])]].concat();
    let ranks = |matrix: usize| if matrix < 4 { vec![0, 2] } else { vec![1, 3] };
    let matrices = (0..2).flat_map(|index| (0..8).map(move |matrix| (index, matrix)));
    let candidates: Candidates =
        matrices.map(|(index, matrix)| ((index, matrix), ranks(matrix))).collect();
    for fixed in FIXED {
        let costs = costs(&parameters, fixed);
        for balancing in [
            Balancing::BlockCyclic,
            Balancing::Greedy,
            #[cfg(feature = "optimal")]
            Balancing::Optimal { time_limit_s: 0.5 },
        ] {
            let work = (&costs, &candidates);
            let plan = Plan::among(parameters.clone(), 4, &config_with(balancing), work).unwrap();
            for ((index, matrix), ranks) in &candidates {
                assert!(ranks.contains(&plan.owner(*index, *matrix)), "{balancing:?}, {fixed}");
            }
            if balancing != Balancing::BlockCyclic {
                let half = costs.of([16, 16]).batch(8);
                let wide = costs.of([32, 32]).batch(1);
                assert!(max_load(&plan, &costs) <= half / 2.0 + wide + fixed, "{balancing:?}");
            }
        }
    }
}

#[test]
fn whole_parameters_are_balanced_by_their_elements() {
    let whole = |path: &str, len| Parameter { work: Work::Whole, ..elements(path, &[len]) };
    let parameters = [whole("a", 30), stack("b", 1, [8, 8]), whole("c", 50), whole("d", 20)];
    let costs = costs(&parameters, 0.0);
    for balancing in [Balancing::Greedy, Balancing::BlockCyclic] {
        let plan = plan(&parameters, 2, balancing, &costs);
        assert_eq!(plan.owners(), [vec![1], vec![0], vec![0], vec![1]]);
        let whole = &plan.buckets()[1];
        assert_eq!((whole.kind, whole.counts.to_vec()), (BucketKind::Whole, vec![50, 50]));
        let matrices: Vec<usize> =
            plan.report(&costs).ranks.iter().map(|rank| rank.matrices).collect();
        assert_eq!(matrices, [1, 0]);
    }
}

#[test]
fn whole_parameters_with_a_cost_are_balanced_together_with_matrices() {
    let whole = |path: &str, len| Parameter { work: Work::Whole, ..elements(path, &[len]) };
    let parameters =
        [whole("a", 30), stack("b", 1, [8, 8]), whole("c", 50), whole("d", 20), whole("e", 90)];
    let of_matrix = flops([8, 8]);
    let of_whole = [("a", of_matrix), ("c", 0.5 * of_matrix), ("d", 0.5 * of_matrix)];
    let of_whole = of_whole.map(|(path, cost)| (path.to_owned(), cost));
    let costs = costs(&parameters, 0.0).with_whole(of_whole);
    let plan_by = |balancing| plan(&parameters, 3, balancing, &costs);
    let greedy = plan_by(Balancing::Greedy);
    assert_eq!(greedy.loads(&costs), [of_matrix; 3]);
    assert_eq!(greedy.owners()[2], greedy.owners()[3], "the two halves share a rank");
    assert_ne!(greedy.owners()[0], greedy.owners()[1]);
    // Without a cost, it goes to the rank with the fewest elements of such parameters.
    assert_eq!(greedy.owners()[4], [0]);
    #[cfg(feature = "optimal")]
    {
        let optimal = plan_by(Balancing::Optimal { time_limit_s: 1.0 });
        assert_eq!(optimal.imbalance(&costs), 1.0);
    }
    let endless = costs.with_whole([("a".to_owned(), f64::NAN)]);
    let made = Plan::new(parameters.to_vec(), 3, &PlanConfig::default(), &endless);
    let Error::Setting { setting, value, .. } = made.unwrap_err() else { panic!("a setting") };
    assert_eq!((&*setting, &*value), ("costs", "NaN for `a`"));
}

#[test]
fn with_more_ranks_than_work_some_shards_are_empty_or_padding() {
    let parameters =
        [stack("matrix", 1, [8, 8]), elements("vector", &[300]), elements("scalar", &[1])];
    let costs = costs(&parameters, 0.0);
    let config = PlanConfig { small_elements: 2, ..PlanConfig::default() };
    let plan = Plan::new(parameters.to_vec(), 5, &config, &costs).unwrap();
    let counts: Vec<_> = plan.buckets().iter().map(|b| (b.kind, b.counts.to_vec())).collect();
    assert_eq!(
        counts,
        [
            (BucketKind::Matrices, vec![64, 0, 0, 0, 0]),
            (BucketKind::Elements, vec![256; 5]),
            (BucketKind::Replicated, vec![256; 5]),
        ]
    );
    let elements = &plan.buckets()[1];
    let overlap = |elements, padding| [Overlap { parameter: 1, elements, padding }];
    assert!(elements.overlaps(elements.shard_range(1)).eq(overlap(256..300, 212)));
    assert!(elements.overlaps(elements.shard_range(2)).eq(overlap(300..300, 256)));
    assert!(elements.overlaps(400..500).eq(overlap(300..300, 100)));
}

#[test]
fn a_model_without_matrices_is_balanced() {
    let plan = plan(&[elements("vector", &[2000])], 2, Balancing::Greedy, &Costs::default());
    assert_eq!(
        (plan.loads(&Costs::default()), plan.imbalance(&Costs::default())),
        (vec![0.0; 2], 1.0)
    );
}

#[test]
fn the_digest_covers_parameters_owners_and_buckets() {
    let parameters = vec![stack("a", 2, [8, 8]), elements("b", &[2000])];
    let make = |parameters: &[Parameter], config: &PlanConfig, owners: [usize; 2]| {
        let owners = vec![owners.to_vec(), vec![]];
        Plan::with_owners(parameters.to_vec(), 2, config, owners).unwrap().digest()
    };
    let config = PlanConfig::default();
    let digest = make(&parameters, &config, [0, 1]);
    assert_eq!(make(&parameters, &config, [0, 1]), digest);
    assert_ne!(make(&parameters, &config, [1, 0]), digest);
    let replicated = PlanConfig { small_elements: 4000, ..config.clone() };
    assert_ne!(make(&parameters, &replicated, [0, 1]), digest);
    let (mut renamed, mut reshaped) = (parameters.clone(), parameters.clone());
    renamed[0].path = "c".to_owned();
    reshaped[1].shape = vec![1000, 2];
    assert_ne!(make(&renamed, &config, [0, 1]), digest);
    assert_ne!(make(&reshaped, &config, [0, 1]), digest);
}

#[test]
fn invalid_settings_are_rejected_by_name() {
    let parameters = vec![stack("a", 2, [8, 8])];
    let costs = costs(&parameters, 0.0);
    let make = |world_size, config: &PlanConfig, costs: &Costs| match Plan::new(
        parameters.clone(),
        world_size,
        config,
        costs,
    ) {
        Err(Error::Setting { setting, .. }) => setting,
        Err(error) => panic!("{error}"),
        Ok(_) => "nothing".to_owned(),
    };
    let config = PlanConfig::default();
    assert_eq!(make(1, &config, &costs), "nothing");
    assert_eq!(make(0, &config, &costs), "world_size");
    assert_eq!(make(1, &config, &Costs::default()), "costs");
    let negative = ShapeCost { fixed: 0.0, each: -1.0 };
    assert_eq!(make(1, &config, &Costs::new([([8, 8], negative)])), "costs");
    let empty = PlanConfig { bucket_bytes: 0, ..config.clone() };
    assert_eq!(make(1, &empty, &costs), "bucket_bytes");
    #[cfg(feature = "optimal")]
    for time_limit_s in [-1.0, f64::NAN, f64::INFINITY] {
        let config = config_with(Balancing::Optimal { time_limit_s });
        assert_eq!(make(1, &config, &costs), "time_limit_s");
    }
    for owners in [vec![], vec![vec![0]], vec![vec![0, 2]]] {
        Plan::with_owners(parameters.clone(), 2, &config, owners).unwrap_err();
    }
}

#[test]
#[should_panic = "matrices of `a`"]
fn a_shape_that_its_matrices_do_not_cover_panics() {
    let parameter = Parameter { shape: vec![8, 9], ..stack("a", 1, [8, 8]) };
    let _ = Plan::with_owners(vec![parameter], 1, &PlanConfig::default(), vec![vec![0]]);
}

#[test]
fn buckets_in_the_order_of_the_model_have_batches_of_one_shape() {
    let shapes = [[8, 8], [16, 8], [8, 8], [16, 8], [8, 8]];
    let parameters: Vec<_> = shapes.iter().map(|shape| stack("a", 1, *shape)).collect();
    let costs = costs(&parameters, 0.0);
    let buckets = |order| {
        // Three of the smaller matrices, or one of each shape.
        let config = PlanConfig { bucket_bytes: 768, order, ..PlanConfig::default() };
        let plan = Plan::new(parameters.clone(), 1, &config, &costs).unwrap();
        plan.buckets().iter().map(|bucket| bucket.parameters.clone()).collect::<Vec<_>>()
    };
    assert_eq!(buckets(MatrixOrder::Size), [vec![1], vec![3, 0], vec![2, 4]]);
    assert_eq!(buckets(MatrixOrder::Model), [vec![1, 0], vec![3, 2], vec![4]]);
}

#[test]
fn the_report_prints_as_a_table() {
    let parameters = [stack("a", 3, [8, 8]), elements("b", &[10])];
    let costs = Costs::new([([8, 8], ShapeCost { fixed: 1.0, each: 2.0 })]);
    let report = plan(&parameters, 2, Balancing::BlockCyclic, &costs).report(&costs);
    let text = "\
| count | shape  | owners     |
|-------|--------|------------|
| 3     | [8, 8] | 0: 2, 1: 1 |

| rank | matrices | cost    | bytes |
|------|----------|---------|-------|
| 0    | 2        | 5.000e0 | 1536  |
| 1    | 1        | 3.000e0 | 1280  |

imbalance of cost: 1.2500";
    assert_eq!(report.to_string(), text);
}

#[cfg(feature = "optimal")]
#[test]
fn optimal_is_never_worse_than_greedy() {
    let optimal = Balancing::Optimal { time_limit_s: 0.2 };
    for (name, parameters) in models() {
        for (world_size, fixed) in
            [2, 3, 4, 16].into_iter().flat_map(|n| FIXED.map(|fixed| (n, fixed)))
        {
            let costs = costs(&parameters, fixed);
            let [greedy, optimal] = [Balancing::Greedy, optimal].map(|balancing| {
                max_load(&plan(&parameters, world_size, balancing, &costs), &costs)
            });
            assert!(
                optimal <= greedy * (1.0 + 1e-12),
                "{name}, {world_size} ranks, {fixed} for a batch"
            );
        }
    }
}

/// Above a number of shapes times ranks, `Balancing::Optimal` is `Greedy` without a search.
#[cfg(feature = "optimal")]
#[test]
fn optimal_is_greedy_if_the_program_is_too_large_or_there_is_no_time() {
    let parameters: Vec<Parameter> =
        (1..=40).map(|rows| stack(&format!("{rows}"), 3, [rows, 64])).collect();
    let costs = costs(&parameters, 1e3);
    let world_size = 64; // 40 shapes on 64 ranks: 2560 > 1024
    let start = std::time::Instant::now();
    let optimal = plan(&parameters, world_size, Balancing::Optimal { time_limit_s: 600.0 }, &costs);
    assert!(start.elapsed().as_secs() < 300, "the program is not searched");
    assert_eq!(optimal.owners(), plan(&parameters, world_size, Balancing::Greedy, &costs).owners());
    let without_time = plan(&parameters, 8, Balancing::Optimal { time_limit_s: 0.0 }, &costs);
    assert_eq!(without_time.owners(), plan(&parameters, 8, Balancing::Greedy, &costs).owners());
}

fn any_parameter() -> impl proptest::strategy::Strategy<Value = Parameter> {
    let work = prop_oneof![
        (0..5usize, 1..9usize, 1..9usize).prop_map(|(count, rows, columns)| Work::Matrices {
            count,
            rows,
            columns
        }),
        Just(Work::Whole),
        Just(Work::Elements),
    ];
    let dtype = prop_oneof![Just(DType::F32), Just(DType::BF16)];
    (work, dtype, 0..1500usize).prop_map(|(work, dtype, len)| {
        let shape = match work {
            Work::Matrices { count, rows, columns } => vec![count, rows, columns],
            Work::Whole | Work::Elements => vec![len],
        };
        Parameter {
            path: String::new(),
            shape,
            dtype,
            work,
            placement: Placement::Replicated,
            slices: None,
            settings: 0,
        }
    })
}

proptest! {
    #[test]
    fn every_element_is_in_one_shard(
        parameters in prop::collection::vec(any_parameter(), 0..20),
        world_size in 1..9usize,
        bucket_bytes in 1..8000usize,
        fixed in prop_oneof![Just(0.0), 1.0..1e5],
        cyclic in any::<bool>(),
        in_order in any::<bool>(),
    ) {
        let balancing = if cyclic { Balancing::BlockCyclic } else { Balancing::Greedy };
        let order = if in_order { MatrixOrder::Model } else { MatrixOrder::Size };
        let config = PlanConfig { balancing, bucket_bytes, order, small_elements: 600 };
        let costs = costs(&parameters, fixed);
        let plan = Plan::new(parameters.clone(), world_size, &config, &costs).unwrap();
        let same = Plan::new(parameters.clone(), world_size, &config, &costs).unwrap();
        prop_assert_eq!(&plan, &same);
        let owners = plan.owners().to_vec();
        let again = Plan::with_owners(parameters.clone(), world_size, &config, owners).unwrap();
        prop_assert_eq!(plan.digest(), again.digest());

        let mut bucket_counts = vec![0; parameters.len()];
        let mut updates: Vec<_> = parameters.iter().map(|p| vec![0; p.elements()]).collect();
        for bucket in plan.buckets() {
            bucket.parameters.iter().for_each(|&parameter| bucket_counts[parameter] += 1);
            // Excludes the zeros that make shards equal.
            let buffer_len = |piece: &Piece| match bucket.kind {
                BucketKind::Matrices | BucketKind::Whole => piece.len,
                _ => piece.len.next_multiple_of(ROW_ELEMENTS),
            };
            let bytes = bucket.pieces.iter().map(buffer_len).sum::<usize>() * bucket.dtype.size();
            prop_assert!(bytes <= bucket_bytes || bucket.parameters.len() == 1);
            if bucket.kind == BucketKind::Elements {
                prop_assert!(bucket.counts.iter().all(|count| count == bucket.counts.of(0)));
            }
            let replicated = bucket.kind == BucketKind::Replicated;
            let times = if replicated { world_size } else { 1 };
            prop_assert_eq!(bucket.counts.iter().sum::<usize>(), times * bucket.elements());

            for rank in 0..world_size {
                let mut filled = 0;
                let mut shapes = vec![];
                for overlap in bucket.overlaps(bucket.shard_range(rank)) {
                    let Overlap { parameter, elements: range, padding } = overlap;
                    filled += range.len() + padding;
                    prop_assert_eq!(parameters[parameter].dtype, bucket.dtype);
                    prop_assert!(padding == 0 || range.end == parameters[parameter].elements());
                    if let Work::Matrices { rows, columns, .. } = parameters[parameter].work {
                        prop_assert_eq!(range.len(), rows * columns);
                        prop_assert_eq!(plan.owner(parameter, range.start / range.len()), rank);
                        shapes.push([rows, columns]);
                    }
                    if parameters[parameter].work == Work::Whole {
                        prop_assert_eq!(&range, &(0..parameters[parameter].elements()));
                        prop_assert_eq!(plan.owner(parameter, 0), rank);
                    }
                    range.for_each(|element| updates[parameter][element] += 1);
                }
                prop_assert_eq!(filled, bucket.counts.of(rank));
                shapes.dedup();
                let runs = shapes.len();
                shapes.sort();
                shapes.dedup();
                prop_assert_eq!(runs, shapes.len());
            }
        }
        prop_assert!(bucket_counts.iter().all(|&count| count == 1));
        for (parameter, updates) in parameters.iter().zip(updates) {
            let small = parameter.work == Work::Elements && parameter.elements() < 600;
            let expected = if small { world_size } else { 1 };
            prop_assert!(updates.iter().all(|&count| count == expected));
        }
    }

    #[test]
    fn overlaps_are_the_pieces_cut_at_the_range(
        lengths in prop::collection::vec(0..600usize, 1..6),
        from in 0..3000usize,
        len in 0..3000usize,
    ) {
        let parameters: Vec<_> = lengths.iter().map(|&len| elements("", &[len])).collect();
        let config = PlanConfig { small_elements: 0, ..PlanConfig::default() };
        let plan = Plan::new(parameters, 1, &config, &Costs::default()).unwrap();
        let bucket = &plan.buckets()[0];
        let flat = |range| {
            let parts = bucket.overlaps(range).flat_map(|Overlap { parameter, elements, padding }| {
                let zeros = std::iter::repeat_n(None, padding);
                elements.map(move |element| Some((parameter, element))).chain(zeros)
            });
            parts.collect::<Vec<_>>()
        };
        let (from, to) = (from.min(bucket.elements()), (from + len).min(bucket.elements()));
        prop_assert_eq!(&flat(from..to), &flat(0..bucket.elements())[from..to]);
    }
}

#[cfg(feature = "optimal")]
proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compares with all ways to divide three stacks between two ranks.
    #[test]
    fn optimal_finds_the_optimum(
        fixed in prop_oneof![Just(0.0), 0.0..10.0],
        each in prop::array::uniform3(1.0..10.0),
        counts in prop::array::uniform3(1..5usize),
    ) {
        let sides = [8, 16, 32];
        let shapes = sides.map(|side| [side, side]);
        let costs = Costs::new(shapes.into_iter().zip(each.map(|each| ShapeCost { fixed, each })));
        let stacks = shapes.into_iter().zip(counts);
        let parameters: Vec<_> = stacks.map(|(shape, count)| stack("", count, shape)).collect();
        let load = |counts: [usize; 3]| -> f64 {
            shapes.into_iter().zip(counts).map(|(shape, count)| costs.of(shape).batch(count)).sum()
        };
        let [a, b, c] = counts;
        let optimum = (0..=a)
            .flat_map(|i| (0..=b).flat_map(move |j| (0..=c).map(move |k| [i, j, k])))
            .map(|[i, j, k]| load([i, j, k]).max(load([a - i, b - j, c - k])))
            .fold(f64::INFINITY, f64::min);
        let plan = plan(&parameters, 2, Balancing::Optimal { time_limit_s: 60.0 }, &costs);
        let max_load = max_load(&plan, &costs);
        let excess = max_load / optimum - 1.0;
        prop_assert!((-1e-9..1.1e-3).contains(&excess), "{max_load} for {optimum}");
    }
}

/// Prints a table of the load of the busiest rank over the smallest mean load, which is that of one
/// batch for each shape in each bucket.
#[cfg(feature = "optimal")]
#[test]
#[ignore = "prints a table, and takes minutes"]
fn imbalance_table() {
    let optimal = Balancing::Optimal { time_limit_s: 10.0 };
    for fixed in [0.0, 1e10] {
        println!(
            "\n| fixed {fixed:.0e} | N | BlockCyclic | Greedy | Optimal | one matrix forces |"
        );
        println!("|---|---|---|---|---|---|");
        for (name, parameters) in models() {
            let costs = costs(&parameters, fixed);
            let whole = max_load(&plan(&parameters, 1, Balancing::Greedy, &costs), &costs);
            for world_size in WORLDS {
                let mean = whole / world_size as f64;
                let [cyclic, greedy, optimal] =
                    [Balancing::BlockCyclic, Balancing::Greedy, optimal].map(|balancing| {
                        max_load(&plan(&parameters, world_size, balancing, &costs), &costs) / mean
                    });
                let forced = ((matrix_costs(&parameters)[0] + fixed) / mean).max(1.0);
                let row = [cyclic, greedy, optimal, forced].map(|ratio| format!("{ratio:.4}"));
                println!("| {name} | {world_size} | {} |", row.join(" | "));
            }
        }
    }
}

/// The ranks of `count` nodes in their order, `local_ranks` on each.
fn nodes(count: usize, local_ranks: usize) -> Vec<Vec<usize>> {
    (0..count).map(|node| (node * local_ranks..(node + 1) * local_ranks).collect()).collect()
}

#[test]
fn neighbours_in_node_order_differ_in_node_and_local_rank() {
    for (count, local_ranks) in [(1, 1), (1, 8), (2, 4), (3, 4), (4, 2), (5, 3), (4, 8)] {
        let case = format!("{count} x {local_ranks}");
        let order = node_order(&nodes(count, local_ranks));
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..count * local_ranks), "every rank once");
        let distinct = |ranks: &[usize], coordinate: fn(usize, usize) -> usize| {
            let coordinates = ranks.iter().map(|rank| coordinate(*rank, local_ranks));
            coordinates.collect::<BTreeSet<_>>().len()
        };
        let local_rank = |rank: usize, local_ranks: usize| rank % local_ranks;
        let node = |rank: usize, local_ranks: usize| rank / local_ranks;
        for neighbours in order.windows(2) {
            let expected = local_ranks.min(2);
            assert_eq!(distinct(neighbours, local_rank), expected, "{case}: {order:?}");
        }
        let mut runs = order.chunks(local_ranks);
        assert!(runs.all(|ranks| distinct(ranks, local_rank) == local_ranks));
        let first = &order[..count.min(local_ranks)];
        assert_eq!(distinct(first, node), first.len(), "{case}: {order:?}");
    }
}

#[test]
fn traffic_of_a_bucket_between_nodes_uses_all_links() {
    let [(name, parameters), ..] = models();
    let costs = costs(&parameters, 0.0);
    let config = PlanConfig::default();
    for (count, local_ranks) in [(2, 4), (4, 2), (3, 4)] {
        let size = count * local_ranks;
        let by_rank = Plan::new(parameters.clone(), size, &config, &costs).unwrap();
        let owners = by_rank.owners_in(&node_order(&nodes(count, local_ranks)));
        let by_node = Plan::with_owners(parameters.clone(), size, &config, owners).unwrap();
        // The elements that the busiest link carries of each bucket, summed over the buckets.
        let busiest_links = |plan: &Plan| -> usize {
            let busiest_link = |bucket: &Bucket| {
                let counts = bucket.counts.to_vec();
                let links = counts.chunks(local_ranks).map(|counts| counts.iter().sum());
                links.max().unwrap_or(0)
            };
            plan.buckets().iter().map(busiest_link).sum()
        };
        let all: usize = parameters.iter().map(Parameter::elements).sum();
        let [before, after] = [busiest_links(&by_rank), busiest_links(&by_node)];
        assert!(after < before, "{name}: {after} of {before}");
        let over_mean = |busiest: usize| (busiest * count) as f64 / all as f64;
        println!(
            "{name} on {count} x {local_ranks}: {:.2} in the order of ranks, {:.2} in the order of \
             nodes, over the mean link",
            over_mean(before),
            over_mean(after)
        );
        let sorted_loads = |plan: &Plan| {
            let mut loads = plan.loads(&costs);
            loads.sort_by(f64::total_cmp);
            loads
        };
        assert_eq!(sorted_loads(&by_rank), sorted_loads(&by_node), "loads are the same");
    }
}
