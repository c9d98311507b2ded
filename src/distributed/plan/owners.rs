//! The choice of an owner for every matrix and every whole parameter.

use std::collections::BTreeMap;

use super::bucket::{BucketContents, BucketKind};
use super::greedy::greedy;
use super::loads::{Assignment, Candidates, Class, Matrix};
#[cfg(feature = "optimal")]
use super::optimal;
use super::{Balancing, Costs, Parameter, ShapeCost, Work};

/// Returns the owner of every matrix and every whole parameter: one list per parameter.
///
/// A matrix goes to one of its candidates. Whole parameters that have a cost are balanced together
/// with the matrices. All others are balanced among themselves, by their elements, which do not
/// have the unit of `costs`.
pub(super) fn owners(
    parameters: &[Parameter],
    layout: &[BucketContents],
    world_size: usize,
    balancing: Balancing,
    (costs, candidates): (&Costs, &Candidates),
) -> Vec<Vec<usize>> {
    let batches = batches(parameters, layout);
    let ranks_of_matrices: Vec<(Matrix, usize)> = match balancing {
        Balancing::BlockCyclic => {
            let matrices = batches.into_iter().flat_map(|(_, matrices)| matrices);
            // The baseline: one matrix after the other, whatever each costs.
            let turns = matrices.zip((0..world_size).cycle());
            turns.map(|(matrix, turn)| (matrix, in_turn(candidates.get(&matrix), turn))).collect()
        }
        Balancing::Greedy => {
            let classes = classes(parameters, batches, costs, candidates);
            assign(&classes, &greedy(&classes, world_size)).collect()
        }
        #[cfg(feature = "optimal")]
        Balancing::Optimal { time_limit_s } => {
            let classes = classes(parameters, batches, costs, candidates);
            let start = greedy(&classes, world_size);
            // From the greedy plan, so that a search without time returns at least that.
            assign(&classes, &optimal::improve(&classes, start, time_limit_s)).collect()
        }
    };
    let of_elements = |parameter: &Parameter| {
        let is_planned = balancing != Balancing::BlockCyclic;
        let has_cost = is_planned && costs.of_whole(&parameter.path).is_some();
        (!has_cost).then_some(parameter.elements() as f64)
    };
    let whole = whole(parameters, of_elements);
    let assignment = greedy(&whole, world_size);
    let ranks_of_whole = assign(&whole, &assignment);
    // Elements have no owner: their list is empty.
    let mut owners: Vec<_> = parameters.iter().map(|p| vec![0; p.owned().0]).collect();
    for ((parameter, index), rank) in ranks_of_matrices.into_iter().chain(ranks_of_whole) {
        owners[parameter][index] = rank;
    }
    owners
}

/// The rank whose turn it is, of those that may own a matrix.
fn in_turn(candidates: Option<&Vec<usize>>, turn: usize) -> usize {
    candidates.map_or(turn, |ranks| ranks[turn % ranks.len()])
}

/// The whole parameters that have a cost, the most expensive first. All of one cost are one class.
fn whole(parameters: &[Parameter], cost: impl Fn(&Parameter) -> Option<f64>) -> Vec<Class> {
    let whole = parameters.iter().enumerate().filter(|(_, p)| p.work == Work::Whole);
    let mut costs: Vec<(f64, Matrix)> =
        whole.filter_map(|(index, parameter)| Some((cost(parameter)?, (index, 0)))).collect();
    // The sort is stable, and keeps the order of the model.
    costs.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    let class = |costs: &[(f64, Matrix)]| Class {
        cost: ShapeCost { fixed: 0.0, each: costs[0].0 },
        matrices: costs.iter().map(|(_, matrix)| *matrix).collect(),
        candidates: None,
    };
    // The largest first, as the greedy assignment expects its classes.
    costs.chunk_by(|(a, _), (b, _)| a == b).map(class).collect()
}

/// The matrices of each shape in each bucket, in the order of the layout. A rank updates those that
/// it owns of one entry as one batch.
fn batches(parameters: &[Parameter], layout: &[BucketContents]) -> Vec<([usize; 2], Vec<Matrix>)> {
    let mut batches: Vec<([usize; 2], Vec<Matrix>)> = vec![];
    for contents in layout.iter().filter(|contents| contents.kind == BucketKind::Matrices) {
        let first = batches.len();
        for &parameter in &contents.parameters {
            // A parameter without matrices is left out, so that no class is empty.
            let Work::Matrices { count: count @ 1.., rows, columns } = parameters[parameter].work
            else {
                continue;
            };
            let matrices = (0..count).map(|index| (parameter, index));
            match batches[first..].last_mut() {
                // Only the last one: the layout has sorted by shape, and a batch ends with its
                // bucket.
                Some((shape, batch)) if *shape == [rows, columns] => batch.extend(matrices),
                _ => batches.push(([rows, columns], matrices.collect())),
            }
        }
    }
    batches
}

/// The classes of interchangeable matrices and whole parameters, the most expensive first.
///
/// The matrices of one batch with the same candidates are interchangeable. So are matrices of
/// different batches if they cost the same and share no fixed cost with other matrices. There may
/// be no fixed cost, or each of them is alone in its batch. A batch with several sets of candidates
/// is several classes, in each of which a rank pays the fixed cost.
fn classes(
    parameters: &[Parameter],
    batches: Vec<([usize; 2], Vec<Matrix>)>,
    costs: &Costs,
    candidates: &Candidates,
) -> Vec<Class> {
    let mut classes = whole(parameters, |parameter| costs.of_whole(&parameter.path));
    for (shape, matrices) in batches {
        let cost = match matrices.len() {
            // Alone in its batch, a matrix always pays the fixed cost: it is part of the price.
            1 => ShapeCost { fixed: 0.0, each: costs.of(shape).batch(1) },
            _ => costs.of(shape),
        };
        let mut alike: BTreeMap<Option<&Vec<usize>>, Vec<Matrix>> = BTreeMap::new();
        for matrix in matrices {
            alike.entry(candidates.get(&matrix)).or_default().push(matrix);
        }
        for (candidates, matrices) in alike {
            let candidates = candidates.cloned();
            // A fixed cost is shared inside of a batch only, so such batches are not merged.
            let same = |class: &&mut Class| {
                cost.fixed == 0.0 && class.cost == cost && class.candidates == candidates
            };
            match classes.iter_mut().find(same) {
                Some(class) => class.matrices.extend(matrices),
                None => classes.push(Class { cost, matrices, candidates }),
            }
        }
    }
    // Stable: classes of one cost stay in the order of the layout, so that equal arguments give
    // equal plans.
    classes.sort_by(|a, b| b.cost.batch(1).total_cmp(&a.cost.batch(1)));
    classes
}

/// Returns every matrix with its rank. Within a class, the ranks take turns, so that every bucket
/// has work for the largest number of ranks.
fn assign(classes: &[Class], assignment: &Assignment) -> impl Iterator<Item = (Matrix, usize)> {
    classes.iter().enumerate().flat_map(move |(index, class)| {
        class.matrices.iter().copied().zip((0..class.matrices.len()).flat_map(move |turn| {
            (0..assignment.len()).filter(move |&rank| assignment[rank][index] > turn)
        }))
    })
}
