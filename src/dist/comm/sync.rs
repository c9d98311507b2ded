//! The primitives that [`rendezvous`](super::rendezvous) is made of. `tests/interleavings.rs`
//! replaces them by those of a checker that explores interleavings.

pub use std::sync::atomic::{AtomicU64, Ordering};
pub use std::sync::{Condvar, Mutex, MutexGuard};

/// Tests of the rendezvous with the real primitives, which know time.
#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use super::super::rendezvous::{Failure, Hall, Seat};

    const DEADLINE: Duration = Duration::from_millis(300);

    fn on_all<T: Send>(
        seats: &[Seat<String, usize>],
        run: impl Fn(&Seat<String, usize>) -> T + Sync,
    ) -> Vec<T> {
        thread::scope(|scope| {
            let run = &run;
            let ranks: Vec<_> = seats.iter().map(|seat| scope.spawn(move || run(seat))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn meet(seat: &Seat<String, usize>, call: &str) -> Result<Vec<usize>, Failure> {
        seat.arrive(call.to_owned(), seat.rank())?.meet()
    }

    #[test]
    fn a_busy_rank_is_waited_for_beyond_the_deadline_and_blamed_if_it_hangs() {
        let seats = Hall::seats(3, DEADLINE);
        seats[0].set_busy(true);
        let met = on_all(&seats, |seat| {
            if seat.rank() == 0 {
                thread::sleep(3 * DEADLINE);
                seat.set_busy(false);
            }
            meet(seat, "sum")
        });
        assert!(met.iter().all(|met| *met == Ok(vec![0, 1, 2])), "{met:?}");
        // It is busy no longer, and does not come.
        seats[0].set_busy(true);
        let start = Instant::now();
        let failed = on_all(&seats, |seat| {
            if seat.rank() == 0 {
                thread::sleep(2 * DEADLINE);
                seat.set_busy(false);
                return None;
            }
            Some(meet(seat, "gather").unwrap_err())
        });
        assert!(start.elapsed() >= 3 * DEADLINE, "the deadline starts anew");
        let cause = format!("it did not come to gather within {DEADLINE:?}");
        for failure in failed.into_iter().flatten() {
            assert_eq!(failure, Failure::Peer { rank: 0, cause: cause.clone() });
        }
    }

    #[test]
    fn a_rank_that_waits_is_not_blamed_but_the_one_it_waits_for() {
        let seats = Hall::seats(3, DEADLINE);
        let group = seats[0].new_group();
        let failures = on_all(&seats, |seat| match seat.rank() {
            0 => Some(meet(&seat.join(group, vec![0, 1], 0), "first").unwrap_err()),
            1 => {
                thread::sleep(DEADLINE / 3);
                Some(meet(&seat.join(group + 1, vec![1, 2], 0), "second").unwrap_err())
            }
            _ => None,
        });
        let cause = format!("it did not come to second within {DEADLINE:?}");
        for failure in failures.into_iter().flatten() {
            assert_eq!(failure, Failure::Peer { rank: 2, cause: cause.clone() });
        }
    }

    #[test]
    fn a_deadline_may_be_as_long_as_any_duration() {
        let seats = Hall::seats(2, Duration::MAX);
        let met = on_all(&seats, |seat| {
            thread::sleep(DEADLINE * seat.rank() as u32);
            meet(seat, "sum")
        });
        assert!(met.iter().all(Result::is_ok), "{met:?}");
    }

    #[test]
    fn many_threads_meet_often() {
        let seats = Hall::seats(64, Duration::from_secs(60));
        let met = on_all(&seats, |seat| (0..20).all(|_| meet(seat, "sum").unwrap().len() == 64));
        assert!(met.into_iter().all(|met| met));
    }
}
