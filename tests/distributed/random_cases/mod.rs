//! A hunt for runs that go wrong in silence: random models, layouts and sequences of calls, each
//! compared with ranks that have all parameters, and some of them with two simpler references.

mod model;
mod optim;
mod run;
mod trial;

use std::cell::Cell;
use std::time::{Duration, Instant};

use distmuon::Result;
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{Keep, Publish};
use distmuon_testing::device::is_flex;
use distmuon_testing::excused;
use distmuon_testing::worlds::{self, Case, Folder, cases};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::owned::with_checkpoints;
use crate::ranks_here;
use model::{Experts, Shape};
use run::{Kind, Run, Seen};
use trial::{Call, Division, Named, Second, Trial, Way, trials};

pub const IN_PROCESS: &[Case] = cases![
    sequences_that_went_wrong_train_as_ranks_with_all_parameters,
    sequences_of_calls_train_as_ranks_with_all_parameters,
];

/// The number of random cases, in place of a few that are the same in every run.
const CASES: &str = "DISTMUON_HUNT";
/// The minutes for which random cases run, in place of a number.
const MINUTES: &str = "DISTMUON_HUNT_MINUTES";
const FEW: u32 = 13;

/// The losses, weights and states that every rank of a run has seen.
fn seen(trial: &Trial, kind: Kind) -> Result<Vec<Seen>> {
    let folder = Folder::create();
    let path = folder.path().join("run.ckpt");
    let ranks = match kind {
        Kind::Divided => trial.ranks(),
        Kind::Whole | Kind::Second(Second::Everything) => trial.data,
        Kind::Second(Second::Burn) => 1,
    };
    let seen = ranks_here(ranks, |world| {
        let world = with_checkpoints(&world);
        let run = Run::new(trial, &world, kind)?;
        trial.calls.iter().try_fold(run, |run, call| run.call(call, &path))?.end()
    })?;
    Ok(seen.into_iter().flatten().collect())
}

/// Reduced cases of faults that random ones have found: a layer that was frozen during a step was
/// not trained again, a clone shared that it was frozen on some ranks only, and ranks with nothing
/// of a parameter did not gather it ahead. Where ranks left layers out in the middle of a model,
/// the layers around them were gathered again in another order on each rank.
fn sequences_that_went_wrong_train_as_ranks_with_all_parameters() {
    if !is_flex() {
        return excused("a device that computes a matrix of a batch otherwise than alone");
    }
    let train = |batches| Call::Train { batches, spoiled: None, way: Way::InTurn };
    let freeze = || Call::Freeze(0);
    let freezes = vec![train(1), freeze(), train(1), freeze(), train(1)];
    let teaches = vec![train(3), Call::Teach { is_read: false }, freeze(), train(1)];
    // With the only layers that are owned, vectors included, or none for all matrices.
    for (ranks, kinds, uses, skips, owned, calls) in [
        (2, vec![2], vec![0], false, vec![], freezes),
        (4, vec![2], vec![0], false, vec![], teaches),
        (4, vec![0, 0], vec![0, 1, 0], false, vec![], vec![train(3), train(3)]),
        (2, vec![0, 0, 0], vec![2, 0, 2], true, vec![2], vec![train(3)]),
        (2, vec![0, 0, 0], vec![1, 2, 1], true, vec![1], vec![train(2)]),
        (3, vec![0, 0, 0, 0], vec![0, 1, 2, 3], true, vec![0, 1, 2, 3], vec![train(2); 3]),
    ] {
        if !worlds::has(&ranks) {
            continue;
        }
        let shape = Shape {
            kinds,
            uses,
            frozen: None,
            has_head: !skips,
            has_evaluated: false,
            experts: Experts::All,
            skips,
            is_cut: false,
        };
        for (keep, in_rows) in
            [(Keep::Weights, false), (Keep::Nothing, false), (Keep::Nothing, true)]
        {
            let division = Division {
                is_owned: true,
                in_rows,
                // A sequence that went wrong with one parameter at a time did so without overlap.
                overlaps: !skips,
                nodes: if skips { 1 } else { 2 },
                keep,
                limits_mb: if skips { [Some(0.0); 2] } else { [Some(64.0), None] },
                small_elements: if owned.is_empty() { 16 } else { 0 },
                allows_unused: false,
                balancing: Balancing::Greedy,
                cuts: [None; 4],
                cuts_data: false,
                places: owned.iter().map(|layer| (*layer, Named::Owned)).collect(),
            };
            compare(&Trial {
                data: ranks,
                model: 1,
                half: None,
                users: None,
                shape: shape.clone(),
                divisions: vec![division],
                publish: if skips { Publish::Now } else { Publish::AtFirstUse },
                max_norm: None,
                checks: false,
                calls: calls.clone(),
                second: None,
            })
            .unwrap_or_else(|error| {
                panic!("{ranks} ranks, {calls:?}, {keep:?}, in rows: {in_rows}: {error}")
            });
        }
    }
}

/// A number that an environment variable sets.
fn number(variable: &str) -> Option<u32> {
    let number = std::env::var(variable).ok()?;
    Some(number.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

fn sequences_of_calls_train_as_ranks_with_all_parameters() {
    if !is_flex() {
        return excused("a device that computes a matrix of a batch otherwise than alone");
    }
    let (cases, minutes) = (number(CASES), number(MINUTES));
    let config = Config {
        cases: cases.unwrap_or(FEW),
        failure_persistence: None,
        max_shrink_iters: 400,
        ..Config::default()
    };
    let runner = || match cases.or(minutes) {
        Some(_) => TestRunner::new(config.clone()),
        None => {
            let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
            TestRunner::new_with_rng(config.clone(), rng)
        }
    };
    let end = minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * u64::from(minutes)));
    let (ran, rejected, failed) = (Cell::new([0; 3]), Cell::new(0), Cell::new(false));
    loop {
        // A runner counts the cases of all of its runs.
        let outcome = runner().run(&trials(), |trial| {
            if !worlds::has(&trial.ranks()) {
                rejected.set(rejected.get() + 1);
                return Err(TestCaseError::reject("fewer ranks"));
            }
            let [all, everything, burn] = ran.get();
            let of = |second| u32::from(trial.has(second));
            ran.set([all + 1, everything + of(Second::Everything), burn + of(Second::Burn)]);
            // Before it is made smaller, which may take long.
            compare(&trial).inspect_err(|error| {
                if !failed.replace(true) {
                    println!("{error}: {trial:?}");
                }
            })
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
        if end.is_none_or(|end| end <= Instant::now()) {
            break;
        }
    }
    let ([ran, everything, burn], rejected) = (ran.get(), rejected.get());
    println!(
        "{ran} random cases ran, {everything} of them also with all gradients on every rank and \
         {burn} with Burn's optimizer; {rejected} were rejected"
    );
}

/// Fails if a rank of the divided model has seen something else than one with all parameters.
fn compare(trial: &Trial) -> std::result::Result<(), TestCaseError> {
    let run = |kind: Kind| {
        seen(trial, kind).map_err(|error| TestCaseError::fail(format!("{kind:?}: {error}")))
    };
    let whole = run(Kind::Whole)?;
    let divided = run(Kind::Divided)?;
    prop_assert_eq!(divided.len(), trial.ranks());
    for (rank, divided) in divided.iter().enumerate() {
        // The ranks that share data have the same.
        same(&format!("rank {rank}"), &whole[rank / trial.model], divided)?;
    }
    for second in [Second::Everything, Second::Burn] {
        if !trial.has(second) {
            continue;
        }
        let other = run(Kind::Second(second))?;
        prop_assert_eq!(other.len(), whole.len());
        let known = |seen: &Seen| -> Seen {
            seen.iter().filter(|(name, _)| second.has(name)).cloned().collect()
        };
        for (rank, (whole, other)) in whole.iter().zip(&other).enumerate() {
            same(&format!("{second:?} for rank {rank}"), &known(whole), &known(other))?;
        }
    }
    Ok(())
}

/// Fails at the first difference of two ranks.
fn same(what: &str, expected: &Seen, got: &Seen) -> std::result::Result<(), TestCaseError> {
    let differs = expected.iter().zip(got).find(|(expected, got)| expected != got);
    let differs = differs.map(|((expected, _), (got, _))| format!("`{expected}`, `{got}`"));
    let lengths = (expected.len(), got.len());
    prop_assert!(
        differs.is_none() && lengths.0 == lengths.1,
        "{what} has another {differs:?}, of {lengths:?}"
    );
    Ok(())
}
