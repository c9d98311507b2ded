//! Who owns which matrix.

use std::iter;

use super::bucket::{BucketKind, Contents};
use super::{Costs, Parameter, ShapeCost, Strategy, Work};

/// The least part of its load by which the busiest rank has to gain from an exchange. Below are
/// rounding errors.
const WORTHWHILE: f64 = 1e-6;

/// Sizes of chunks that are tried, as parts of the mean load. In smaller ones, matrices are dealt
/// out almost singly.
const SHARES: [f64; 4] = [1.0, 0.5, 0.25, 0.125];

/// A matrix: the index of its parameter, and its own in the parameter.
type Matrix = (usize, usize);

/// Matrices that make no difference to a load when they change places.
pub(super) struct Class {
    pub cost: ShapeCost,
    pub matrices: Vec<Matrix>,
}

/// How many matrices of each class each rank gets: `[rank][class]`.
pub(super) type Deal = Vec<Vec<usize>>;

/// The owners of the matrices of every parameter.
pub(super) fn owners(
    parameters: &[Parameter],
    layout: &[Contents],
    world_size: usize,
    strategy: Strategy,
    costs: &Costs,
) -> Vec<Vec<usize>> {
    let batches = batches(parameters, layout);
    let owned: Vec<(Matrix, usize)> = match strategy {
        Strategy::BlockCyclic => {
            let matrices = batches.into_iter().flat_map(|(_, matrices)| matrices);
            matrices.zip((0..world_size).cycle()).collect()
        }
        Strategy::Greedy => {
            let classes = classes(batches, costs);
            hand_out(&classes, &greedy(&classes, world_size)).collect()
        }
        #[cfg(feature = "optimal")]
        Strategy::Optimal { time_limit_s } => {
            let classes = classes(batches, costs);
            let start = greedy(&classes, world_size);
            hand_out(&classes, &super::optimal::improve(&classes, start, time_limit_s)).collect()
        }
    };
    let mut owners: Vec<_> = parameters.iter().map(|p| vec![0; p.matrices()]).collect();
    for ((parameter, index), rank) in owned {
        owners[parameter][index] = rank;
    }
    owners
}

/// The matrices of each shape in each bucket, in the order of the layout: of those that one rank
/// owns it makes one batch.
fn batches(parameters: &[Parameter], layout: &[Contents]) -> Vec<([usize; 2], Vec<Matrix>)> {
    let mut batches: Vec<([usize; 2], Vec<Matrix>)> = vec![];
    for contents in layout.iter().filter(|contents| contents.kind == BucketKind::Matrices) {
        let first = batches.len();
        for &parameter in &contents.parameters {
            let Work::Matrices { count: count @ 1.., rows, columns } = parameters[parameter].work
            else {
                continue;
            };
            let matrices = (0..count).map(|index| (parameter, index));
            match batches[first..].last_mut() {
                Some((shape, batch)) if *shape == [rows, columns] => batch.extend(matrices),
                _ => batches.push(([rows, columns], matrices.collect())),
            }
        }
    }
    batches
}

/// The interchangeable matrices, the most expensive first.
///
/// Those of one batch are. So are those of different batches if they cost the same and have no
/// fixed cost to share with others, for lack of it or of others.
fn classes(batches: Vec<([usize; 2], Vec<Matrix>)>, costs: &Costs) -> Vec<Class> {
    let mut classes: Vec<Class> = vec![];
    for (shape, matrices) in batches {
        let cost = match matrices.len() {
            1 => ShapeCost { fixed: 0.0, each: costs.of(shape).batch(1) },
            _ => costs.of(shape),
        };
        match classes.iter_mut().find(|class| cost.fixed == 0.0 && class.cost == cost) {
            Some(class) => class.matrices.extend(matrices),
            None => classes.push(Class { cost, matrices }),
        }
    }
    classes.sort_by(|a, b| b.cost.batch(1).total_cmp(&a.cost.batch(1)));
    classes
}

/// Which rank gets which matrix: within a class in turn, so that every bucket has work for as many
/// ranks as possible.
fn hand_out(classes: &[Class], deal: &Deal) -> impl Iterator<Item = (Matrix, usize)> {
    classes.iter().enumerate().flat_map(move |(index, class)| {
        let ranks = move |round| (0..deal.len()).filter(move |&rank| deal[rank][index] > round);
        class.matrices.iter().copied().zip((0..class.matrices.len()).flat_map(ranks))
    })
}

/// What a rank spends, given how many matrices of each class it has.
fn load(classes: &[Class], counts: &[usize]) -> f64 {
    classes.iter().zip(counts).map(|(class, &count)| class.cost.batch(count)).sum()
}

/// The load of the busiest rank.
pub(super) fn makespan(classes: &[Class], deal: &Deal) -> f64 {
    deal.iter().map(|counts| load(classes, counts)).fold(0.0, f64::max)
}

/// The first of the busiest ranks, and its load.
pub(super) fn busiest(loads: &[f64]) -> (usize, f64) {
    let later = |most: (usize, f64), next: (usize, f64)| if next.1 > most.1 { next } else { most };
    loads.iter().copied().enumerate().reduce(later).expect("a world has ranks")
}

/// The best of several deals in which matrices of a class stay together up to some cost, exchanged
/// as long as that helps the busiest rank, and of a deal of single matrices.
///
/// Single matrices balance best where a batch has no fixed cost, and leave nothing to exchange;
/// chunks pay fixed costs less often.
fn greedy(classes: &[Class], world_size: usize) -> Deal {
    let whole = classes.iter().map(|class| class.cost.batch(class.matrices.len())).sum::<f64>();
    let chunked = SHARES.map(|share| {
        let chunk = whole * share / world_size as f64;
        exchanged(classes, longest_first(classes, world_size, chunk))
    });
    iter::once(longest_first(classes, world_size, 0.0))
        .chain(chunked)
        .min_by(|a, b| makespan(classes, a).total_cmp(&makespan(classes, b)))
        .expect("there is at least one")
}

/// Chunks of matrices, each at most of this cost or a single one: the longest processing time first
/// (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969), each to the first of the ranks
/// that are then done soonest.
fn longest_first(classes: &[Class], world_size: usize, chunk: f64) -> Deal {
    let mut deal = vec![vec![0; classes.len()]; world_size];
    let mut loads = vec![0.0; world_size];
    for (index, size) in chunks(classes, chunk) {
        let with_it = |rank: usize| {
            let (cost, count) = (classes[index].cost, deal[rank][index]);
            loads[rank] + cost.batch(count + size) - cost.batch(count)
        };
        let rank = (0..world_size)
            .min_by(|&a, &b| with_it(a).total_cmp(&with_it(b)))
            .expect("a world has ranks");
        loads[rank] = with_it(rank);
        deal[rank][index] += size;
    }
    deal
}

/// All matrices in chunks of a class and a number, the most expensive chunk first.
fn chunks(classes: &[Class], chunk: f64) -> Vec<(usize, usize)> {
    let mut chunks = vec![];
    for (index, Class { cost, matrices }) in classes.iter().enumerate() {
        let size = (((chunk - cost.fixed) / cost.each) as usize).clamp(1, matrices.len());
        chunks.extend(matrices.chunks(size).map(|some| (index, some.len())));
    }
    let cost = |&(index, size): &(usize, usize)| classes[index].cost.batch(size);
    chunks.sort_by(|a, b| cost(b).total_cmp(&cost(a)));
    chunks
}

/// The deal after as many exchanges as help the busiest rank: it gives a matrix to another rank,
/// for nothing or for one of another class.
fn exchanged(classes: &[Class], mut deal: Deal) -> Deal {
    let mut loads: Vec<f64> = deal.iter().map(|counts| load(classes, counts)).collect();
    loop {
        let (rank, most) = busiest(&loads);
        let best = exchanges(classes, &deal, rank)
            .map(|exchange| (exchange, exchange.worse_load(classes, &deal, &loads)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b));
        match best {
            Some((exchange, worse)) if worse < most * (1.0 - WORTHWHILE) => {
                exchange.carry_out(&mut deal);
                for rank in [exchange.from, exchange.to] {
                    loads[rank] = load(classes, &deal[rank]);
                }
            }
            _ => return deal,
        }
    }
}

/// A rank gives a matrix of one class to another and takes one of another class, or none.
#[derive(Clone, Copy)]
struct Exchange {
    from: usize,
    to: usize,
    given: usize,
    taken: Option<usize>,
}

/// All exchanges that begin with a matrix of `from`.
fn exchanges(classes: &[Class], deal: &Deal, from: usize) -> impl Iterator<Item = Exchange> {
    let held = move |rank: usize| (0..classes.len()).filter(move |&class| deal[rank][class] > 0);
    held(from).flat_map(move |given| {
        (0..deal.len()).filter(move |&to| to != from).flat_map(move |to| {
            let taken = held(to).filter(move |&class| class != given).map(Some);
            iter::once(None).chain(taken).map(move |taken| Exchange { from, to, given, taken })
        })
    })
}

impl Exchange {
    /// The larger of both loads afterwards.
    fn worse_load(self, classes: &[Class], deal: &Deal, loads: &[f64]) -> f64 {
        let Self { from, to, given, taken } = self;
        // What a rank saves by one matrix less than it holds and `more`.
        let last = |rank: usize, class: usize, more: usize| {
            let (cost, count) = (classes[class].cost, deal[rank][class] + more);
            cost.batch(count) - cost.batch(count - 1)
        };
        let take = |rank, more| taken.map_or(0.0, |class| last(rank, class, more));
        let giver = loads[from] - last(from, given, 0) + take(from, 1);
        let taker = loads[to] + last(to, given, 1) - take(to, 0);
        giver.max(taker)
    }

    fn carry_out(self, deal: &mut Deal) {
        let Self { from, to, given, taken } = self;
        deal[from][given] -= 1;
        deal[to][given] += 1;
        if let Some(class) = taken {
            deal[to][class] -= 1;
            deal[from][class] += 1;
        }
    }
}
