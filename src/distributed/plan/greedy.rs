//! Greedy assignment: the most expensive matrices first, then exchanges between ranks.

use std::iter;

use super::loads::{Assignment, Class, busiest, load, makespan};

/// The smallest part of its load by which the busiest rank has to gain from an exchange. Smaller
/// gains are rounding errors.
const MIN_GAIN: f64 = 1e-6;

/// The sizes of chunks that are tried, as fractions of the mean load. Smaller chunks are almost
/// single matrices.
const CHUNK_FRACTIONS: [f64; 4] = [1.0, 0.5, 0.25, 0.125];

/// The best of several assignments: one of single matrices, and one for each chunk size, in which
/// matrices of a class stay together and are exchanged as long as that helps the busiest rank.
///
/// Single matrices balance best where a batch has no fixed cost, and leave nothing to exchange.
/// Chunks pay fixed costs less often.
pub(super) fn greedy(classes: &[Class], world_size: usize) -> Assignment {
    let total = classes.iter().map(|class| class.cost.batch(class.matrices.len())).sum::<f64>();
    // With fixed costs, a rank should take several matrices of a shape. How many is not known, so
    // several sizes are tried.
    let chunked = CHUNK_FRACTIONS.map(|fraction| {
        let chunk_cost = total * fraction / world_size as f64;
        improve_by_exchanges(classes, longest_first(classes, world_size, chunk_cost))
    });
    iter::once(longest_first(classes, world_size, 0.0))
        .chain(chunked)
        .min_by(|a, b| makespan(classes, a).total_cmp(&makespan(classes, b)))
        .expect("the assignment of single matrices is a candidate")
}

/// Assigns chunks of matrices by the longest processing time first (Graham, "Bounds on
/// Multiprocessing Timing Anomalies", 1969): each chunk goes to the first of the ranks that then
/// finish soonest. A chunk costs at most `chunk_cost`, or is a single matrix.
fn longest_first(classes: &[Class], world_size: usize, chunk_cost: f64) -> Assignment {
    let mut assignment = vec![vec![0; classes.len()]; world_size];
    let mut loads = vec![0.0; world_size];
    for (class, size) in chunks(classes, chunk_cost) {
        let load_with_chunk = |rank: usize| {
            let cost = classes[class].cost;
            let count = assignment[rank][class];
            loads[rank] + cost.batch(count + size) - cost.batch(count)
        };
        let rank = (0..world_size)
            .filter(|rank| classes[class].allows(*rank))
            // The first of several: the plan must not depend on anything but its arguments.
            .min_by(|&a, &b| load_with_chunk(a).total_cmp(&load_with_chunk(b)))
            .expect("every matrix may have an owner");
        loads[rank] = load_with_chunk(rank);
        assignment[rank][class] += size;
    }
    assignment
}

/// All matrices in chunks, each described by its class and its number of matrices. The most
/// expensive chunk comes first.
fn chunks(classes: &[Class], chunk_cost: f64) -> Vec<(usize, usize)> {
    let mut chunks = vec![];
    for (index, Class { cost, matrices, .. }) in classes.iter().enumerate() {
        // The cast saturates: negative sizes become 0, and infinite ones the largest number.
        let size = (((chunk_cost - cost.fixed) / cost.each) as usize).clamp(1, matrices.len());
        // Chunks of one class are of one size, except for the last.
        chunks.extend(matrices.chunks(size).map(|chunk| (index, chunk.len())));
    }
    let cost = |&(class, size): &(usize, usize)| classes[class].cost.batch(size);
    // Longest first: the small ones fill what the large ones leave uneven.
    chunks.sort_by(|a, b| cost(b).total_cmp(&cost(a)));
    chunks
}

/// Carries out the best exchange of the busiest rank until none helps it.
fn improve_by_exchanges(classes: &[Class], mut assignment: Assignment) -> Assignment {
    let mut loads: Vec<f64> = assignment.iter().map(|counts| load(classes, counts)).collect();
    loop {
        let (rank, max_load) = busiest(&loads);
        // Only the busiest rank decides the time of a step.
        let best = exchanges(classes, &assignment, rank)
            .map(|exchange| (exchange, exchange.larger_load(classes, &assignment, &loads)))
            .min_by(|(_, a), (_, b)| a.total_cmp(b));
        match best {
            // A gain at the level of rounding could be exchanged back and forth without an end.
            Some((exchange, larger)) if larger < max_load * (1.0 - MIN_GAIN) => {
                exchange.carry_out(&mut assignment);
                for rank in [exchange.giver, exchange.receiver] {
                    loads[rank] = load(classes, &assignment[rank]);
                }
            }
            _ => return assignment,
        }
    }
}

/// A matrix that moves from one rank to another, with or without a matrix in return.
#[derive(Clone, Copy)]
struct MatrixExchange {
    giver: usize,
    receiver: usize,
    /// The class of the matrix that the giver gives.
    given_class: usize,
    /// The class of the matrix that the giver gets in return, which is another one.
    returned_class: Option<usize>,
}

/// All exchanges in which `giver` gives a matrix.
fn exchanges(
    classes: &[Class],
    assignment: &Assignment,
    giver: usize,
) -> impl Iterator<Item = MatrixExchange> {
    let owned =
        move |rank: usize| (0..classes.len()).filter(move |&class| assignment[rank][class] > 0);
    owned(giver).flat_map(move |given_class| {
        let receivers = (0..assignment.len())
            .filter(move |&rank| rank != giver && classes[given_class].allows(rank));
        receivers.flat_map(move |receiver| {
            // The same class back would change nothing.
            let others = owned(receiver)
                .filter(move |&class| class != given_class && classes[class].allows(giver));
            iter::once(None).chain(others.map(Some)).map(move |returned_class| MatrixExchange {
                giver,
                receiver,
                given_class,
                returned_class,
            })
        })
    })
}

impl MatrixExchange {
    /// The larger load of both ranks after the exchange.
    fn larger_load(self, classes: &[Class], assignment: &Assignment, loads: &[f64]) -> f64 {
        let Self { giver, receiver, given_class, returned_class } = self;
        // The cost of the last matrix of a class, if a rank has `extra` more of them than now.
        let last_cost = |rank: usize, class: usize, extra: usize| {
            let cost = classes[class].cost;
            let count = assignment[rank][class] + extra;
            cost.batch(count) - cost.batch(count - 1)
        };
        let returned_cost =
            |rank, extra| returned_class.map_or(0.0, |class| last_cost(rank, class, extra));
        let giver_load = loads[giver] - last_cost(giver, given_class, 0) + returned_cost(giver, 1);
        let receiver_load =
            loads[receiver] + last_cost(receiver, given_class, 1) - returned_cost(receiver, 0);
        // The others keep their loads, and none of them is above the busiest.
        giver_load.max(receiver_load)
    }

    fn carry_out(self, assignment: &mut Assignment) {
        let Self { giver, receiver, given_class, returned_class } = self;
        assignment[giver][given_class] -= 1;
        assignment[receiver][given_class] += 1;
        if let Some(class) = returned_class {
            assignment[receiver][class] -= 1;
            assignment[giver][class] += 1;
        }
    }
}
