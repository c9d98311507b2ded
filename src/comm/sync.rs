//! The synchronisation primitives of [`thread_rounds`](super::thread_rounds).
//! `tests/interleavings.rs` replaces them by a checker's, which explores interleavings.

pub use std::sync::atomic::{AtomicU64, Ordering};
pub use std::sync::{Condvar, Mutex, MutexGuard};
pub use std::thread::{ThreadId, current as current_thread};

/// Tests of the rounds of threads with the standard library's primitives, whose timeouts are real.
#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::super::thread_rounds::{Failure, Participant, ThreadRounds};

    const DEADLINE: Duration = Duration::from_millis(300);

    fn on_all<T: Send>(
        participants: &[Participant<String, usize>],
        run: impl Fn(&Participant<String, usize>) -> T + Sync,
    ) -> Vec<T> {
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> =
                participants.iter().map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Arrives in a round with this rank's index as the payload, and collects all payloads.
    fn exchange(rank: &Participant<String, usize>, call: &str) -> Result<Vec<usize>, Failure> {
        rank.arrive(call.to_owned(), rank.rank())?.collect()
    }

    #[test]
    fn a_busy_rank_is_waited_for_beyond_the_deadline_and_blamed_if_it_hangs() {
        let participants = ThreadRounds::participants(3, DEADLINE);
        participants[0].set_busy(true);
        let outcomes = on_all(&participants, |rank| {
            if rank.rank() == 0 {
                thread::sleep(3 * DEADLINE);
                rank.set_busy(false);
            }
            exchange(rank, "sum")
        });
        assert!(outcomes.iter().all(|outcome| *outcome == Ok(vec![0, 1, 2])), "{outcomes:?}");
        // Rank 0 ceases to be busy, and does not arrive.
        participants[0].set_busy(true);
        let start = Instant::now();
        let failures = on_all(&participants, |rank| {
            if rank.rank() == 0 {
                thread::sleep(2 * DEADLINE);
                rank.set_busy(false);
                return None;
            }
            Some(exchange(rank, "gather").unwrap_err())
        });
        assert!(start.elapsed() >= 3 * DEADLINE, "the deadline starts anew");
        let cause = format!("it did not come to gather within {DEADLINE:?}");
        for failure in failures.into_iter().flatten() {
            assert_eq!(failure, Failure::Peer { rank: 0, cause: cause.clone() });
        }
    }

    #[test]
    fn a_timeout_is_blamed_on_the_end_of_a_chain_of_waiting_ranks() {
        let participants = ThreadRounds::participants(3, DEADLINE);
        let group = participants[0].new_group();
        let failures = on_all(&participants, |rank| match rank.rank() {
            0 => Some(exchange(&rank.join(group, vec![0, 1], 0), "first").unwrap_err()),
            1 => {
                thread::sleep(DEADLINE / 3);
                Some(exchange(&rank.join(group + 1, vec![1, 2], 0), "second").unwrap_err())
            }
            _ => None,
        });
        let cause = format!("it did not come to second within {DEADLINE:?}");
        for failure in failures.into_iter().flatten() {
            assert_eq!(failure, Failure::Peer { rank: 2, cause: cause.clone() });
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_fail_while_others_compute() {
        let participants = ThreadRounds::participants(3, Duration::from_secs(600));
        let group = participants[0].new_group();
        let start = Instant::now();
        let failures = on_all(&participants, |rank| match rank.rank() {
            0 => Some(exchange(&rank.join(group, vec![0, 1], 0), "first").unwrap_err()),
            1 => Some(exchange(&rank.join(group + 1, vec![0, 1], 1), "second").unwrap_err()),
            // Computes, and makes no call.
            _ => {
                thread::sleep(Duration::from_secs(2));
                None
            }
        });
        assert!(start.elapsed() < Duration::from_secs(5), "the deadline is not waited for");
        for failure in failures.into_iter().flatten() {
            let Failure::Mismatch { calls } = failure else { panic!("{failure:?}") };
            let expected =
                ["rank 0: first in group 1 of ranks 0 to 1", "rank 1: second in group 2"];
            assert!(expected.iter().all(|text| calls.contains(text)), "{calls}");
        }
    }

    #[test]
    fn a_rank_of_several_threads_is_not_taken_for_one_that_waits() {
        let participants = ThreadRounds::participants(2, Duration::from_secs(60));
        let groups: Vec<u64> = (0..4).map(|_| participants[0].new_group()).collect();
        let in_group = |rank: &Participant<String, usize>, group: usize| {
            let rank = rank.join(groups[group], vec![0, 1], rank.rank());
            exchange(&rank, "sum").unwrap();
        };
        let in_group = &in_group;
        thread::scope(|scope| {
            let [first, second] = &participants[..] else { unreachable!("two ranks") };
            let (sender, receiver) = std::sync::mpsc::channel();
            // One thread of rank 0 waits for rank 1, which waits for another thread of rank 0.
            scope.spawn(move || {
                in_group(first, 0);
                sender.send(()).unwrap();
                thread::sleep(Duration::from_secs(1));
                in_group(first, 1);
            });
            scope.spawn(move || {
                receiver.recv().unwrap();
                in_group(first, 2);
                in_group(first, 3);
            });
            [0, 2, 1, 3].into_iter().for_each(|group| in_group(second, group));
        });
    }

    #[test]
    fn a_rank_that_is_busy_beyond_the_limit_is_blamed() {
        let participants = ThreadRounds::participants(2, DEADLINE);
        participants[1].set_busy_limit(3 * DEADLINE);
        participants[0].set_busy(true);
        let start = Instant::now();
        let failure = exchange(&participants[1], "sum").unwrap_err();
        assert!(start.elapsed() >= 2 * DEADLINE, "the rank is waited for while it may be busy");
        let Failure::Peer { rank: 0, cause } = failure else { panic!("{failure:?}") };
        assert!(cause.contains("did not come to sum, and was busy for 900ms"), "{cause}");
    }

    #[test]
    fn a_deadline_may_be_as_long_as_any_duration() {
        let participants = ThreadRounds::participants(2, Duration::MAX);
        let outcomes = on_all(&participants, |rank| {
            thread::sleep(DEADLINE * rank.rank() as u32);
            exchange(rank, "sum")
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }

    #[test]
    fn sixty_four_threads_complete_twenty_rounds() {
        let participants = ThreadRounds::participants(64, Duration::from_secs(60));
        let outcomes = on_all(&participants, |rank| {
            (0..20).all(|_| exchange(rank, "sum").unwrap().len() == 64)
        });
        assert!(outcomes.into_iter().all(|complete| complete));
    }
}
