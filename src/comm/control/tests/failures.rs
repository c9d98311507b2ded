//! Tests of ranks that die, hang, depart, or are slow.

use std::sync::atomic::AtomicBool;

use super::*;

fn assert_blames(error: &Error, rank: usize, text: &str) {
    let Error::PeerFailed { rank: failed, cause } = error else { panic!("{error}") };
    assert!(*failed == rank && cause.contains(text), "rank {failed}: {cause}");
}

/// A deadline for tests that wait until it has passed.
const SHORT: Duration = Duration::from_millis(800);

/// Waits for an external call that never finishes.
fn hang(rank: &Control, call: &str) -> Error {
    rank.wait(&rank.begin_call(call), || Ok(false)).unwrap_err()
}

#[test]
fn a_lost_connection_fails_all_ranks_at_once() {
    let (mut world, _) = world(3);
    let dead = world.0.remove(1);
    // As if its process had been killed: it sends nothing.
    dead.link.stream().shutdown(Shutdown::Both).unwrap();
    let start = Instant::now();
    for error in on_all(&world.0, |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        assert_blames(&error, 1, "the connection to it was lost");
    }
    assert!(start.elapsed() < DEADLINE, "the deadline was not waited for");
    assert!(world.0.iter().all(|rank| rank.has_failed() && rank.check().is_err()));
}

#[test]
fn a_failure_reaches_ranks_that_make_no_call() {
    let (world, _) = world(3);
    world.0[1].fail("a bug");
    for rank in &world.0 {
        rank.link.wait_for_failure(DEADLINE);
        assert_blames(&rank.check().unwrap_err(), 1, "a bug");
    }
}

#[test]
fn a_lost_rank_0_fails_the_other_ranks() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let rank_0 = thread::spawn(move || drop(fake_rank_0(listener, SECRET)));
    let other = join(&address, 1, 2).unwrap();
    rank_0.join().unwrap();
    assert_blames(&other.all_gather_bytes(vec![]).unwrap_err(), 0, "the connection to it was lost");
}

#[test]
fn a_silent_rank_0_fails_the_other_ranks() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let rank_0 = thread::spawn(move || fake_rank_0(listener, SECRET));
    let deadline = Duration::from_secs(1);
    let other = Endpoint::known(address).join(1, 2, SECRET, deadline).unwrap();
    let stream = rank_0.join().unwrap();
    assert_blames(&other.all_gather_bytes(vec![]).unwrap_err(), 0, "silent for");
    drop(stream);
}

#[test]
fn a_rank_that_becomes_silent_is_blamed() {
    let (endpoint, address) = open();
    let first = endpoint.join(0, 2, SECRET, Duration::from_secs(4)).unwrap();
    // Rank 1 joins, reports a wait, and sends nothing more.
    let stream = silent_member(&address, 1, 2);
    let call = first.begin_call("sum");
    let wait = Request::Wait { key: (0, 0), call: call.call.clone(), waited: Duration::ZERO };
    write(&stream, &short_frame(&wait)).unwrap();
    let error = first.wait(&call, || Ok(false)).unwrap_err();
    assert_blames(&error, 1, "silent for");
    assert_blames(&error, 1, "when it waited for sum");
}

#[test]
fn a_rank_that_never_joins_is_blamed() {
    let (endpoint, address) = open();
    let deadline = Duration::from_secs(1);
    let first = endpoint.join(0, 3, SECRET, deadline).unwrap();
    let third = Endpoint::known(address.clone()).join(2, 3, SECRET, deadline).unwrap();
    let text = format!("it never joined, and rank 0 listens at {address}");
    for error in on_all(&[first, third], |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        assert_blames(&error, 1, "did not come to all_gather_bytes within 1s");
        assert_blames(&error, 1, &text);
    }
}

#[test]
fn a_rank_that_fails_before_others_join_is_blamed_at_once() {
    for failing in [0, 1] {
        let (endpoint, address) = open();
        let start = Instant::now();
        let rank = |rank: usize, joined: Result<Control>| {
            let joined = joined.unwrap();
            match rank == failing {
                true => joined.fail("it has no device"),
                false => assert_blames(
                    &joined.broadcast_bytes(vec![], 0).unwrap_err(),
                    failing,
                    "it has no device",
                ),
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| rank(0, endpoint.join(0, 3, SECRET, DEADLINE)));
            for other in [1, 2] {
                let address = &address;
                scope.spawn(move || {
                    thread::sleep(Duration::from_millis(500 * other as u64));
                    rank(other, join(address, other, 3));
                });
            }
        });
        assert!(start.elapsed() < Duration::from_secs(3), "{failing}: {:?}", start.elapsed());
    }
}

/// A thread that only yields would poll a hundred thousand times.
#[test]
fn a_rank_that_waits_leaves_its_core_to_others() {
    let (ranks, _) = world(2);
    let (start, mut polls) = (Instant::now(), 0);
    let waited = ranks.0[0].wait(&ranks.0[0].begin_call("sum"), || {
        // A short call is polled without pauses.
        polls += usize::from(start.elapsed() > Duration::from_millis(2));
        Ok(start.elapsed() > Duration::from_millis(300))
    });
    assert!(waited.is_ok() && polls < 1000, "{polls} polls: {waited:?}");
}

#[test]
fn external_calls_are_compared_and_time_out() {
    // Different calls, and no rank is late.
    let (ranks, _) = world(2);
    let errors = on_all(&ranks.0, |rank| hang(rank, &format!("sum on {}", rank.rank())));
    for error in errors {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(
            calls.contains("rank 0: sum on 0") && calls.contains("rank 1: sum on 1"),
            "{calls}"
        );
    }
    // A rank that does not make the call.
    let (ranks, _) = world_within(Duration::from_millis(1500), 2);
    assert_blames(&hang(&ranks.0[0], "sum"), 1, "did not come to sum within 1.5s");
    // The same call, which is slow, succeeds.
    let (ranks, _) = world(2);
    let start = Instant::now();
    let slow = on_all(&ranks.0, |rank| {
        rank.wait(&rank.begin_call("sum"), || Ok(start.elapsed() > 2 * COMPARE_AFTER))
    });
    assert!(slow.iter().all(Result::is_ok), "{slow:?}");
    // All ranks make the call, and it does not finish.
    let (ranks, _) = world_within(Duration::from_secs(1), 2);
    for error in on_all(&ranks.0, |rank| hang(rank, "sum")) {
        let Error::PeerFailed { cause, .. } = &error else { panic!("{error}") };
        assert_eq!(cause, "sum did not finish, although all ranks came to it");
    }
}

#[test]
fn long_descriptions_of_calls_are_compared_in_full() {
    let (ranks, _) = world(2);
    let errors = on_all(&ranks.0, |rank| {
        let description = format!("sum({:?} {})", [7; 4096], rank.rank());
        let call = rank.begin_call(description);
        assert!(call.call.len() <= 200);
        rank.wait(&call, || Ok(false)).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn calls_of_the_world_are_compared_after_many_calls_of_a_group() {
    let (world, _) = world(2);
    let errors = on_all(&world.0, |rank| {
        let (group, _) = rank.split(0, 0).unwrap();
        for _ in 0..1001 {
            // As a slow call, which is reported to rank 0.
            drop(group.report_wait(&group.begin_call("sum"), Duration::ZERO));
        }
        hang(rank, &format!("call of {}", rank.rank()))
    });
    for error in errors {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(calls.contains("rank 0: call of 0"), "{calls}");
    }
}

#[test]
fn a_rank_that_departs_early_is_blamed_in_an_external_call() {
    for early in [2, 0] {
        let (mut world, _) = world(3);
        on_all(&world.0, |rank| rank.wait(&rank.begin_call("first"), || Ok(true)).unwrap());
        let departing = world.0.remove(early);
        let start = Instant::now();
        let errors = thread::scope(|scope| {
            scope.spawn(move || drop(departing));
            on_all(&world.0, |rank| hang(rank, "second"))
        });
        let waited = start.elapsed();
        assert!(waited < DEADLINE / 2, "{waited:?}");
        for error in errors {
            assert_blames(&error, early, "it returned without second");
        }
    }
}

#[test]
fn rank_0_waits_for_others_at_its_end_at_most_for_the_deadline() {
    let deadline = Duration::from_secs(3); // longer than any grace
    for leaves_at in [None, Some(deadline / 3)] {
        let (mut world, _) = world_within(deadline, 2);
        let other = world.0.pop().unwrap();
        let start = Instant::now();
        let ended = thread::scope(|scope| {
            scope.spawn(move || {
                // Its heartbeats go on, as if the rank computed.
                thread::sleep(leaves_at.unwrap_or(3 * deadline));
                drop(other);
            });
            drop(world);
            start.elapsed()
        });
        let least = leaves_at.unwrap_or(deadline);
        let is_in_time = ended + Duration::from_millis(50) >= least && ended < 2 * deadline;
        assert!(is_in_time, "{leaves_at:?}: {ended:?}");
    }
}

#[test]
fn a_rank_that_departs_after_a_call_is_not_blamed_for_that_call() {
    let (mut world, _) = world(2);
    let departing = world.0.pop().unwrap();
    _ = [departing.begin_call("first"), departing.begin_call("second")];
    drop(departing);
    let rank = &world.0[0];
    let start = Instant::now();
    for call in ["first", "second"] {
        let slow = || Ok(start.elapsed() > 2 * REPORT_AFTER);
        rank.wait(&rank.begin_call(call), slow).unwrap();
    }
    assert_blames(&hang(rank, "third"), 1, "it returned without third");
}

/// Returns the errors of ranks 0 and 1 if rank 0 waits for rank 1, and rank 1 for rank 2, which
/// makes no call.
fn chain_errors(deadline: Duration, wait: fn(&Control, &str) -> Error) -> Vec<Error> {
    let (world, _) = world_within(deadline, 3);
    let groups = on_all(&world.0, |rank| {
        let pair = |colors: [usize; 3]| rank.split(colors[rank.rank()], 0).unwrap().0;
        [pair([0, 0, 1]), pair([0, 1, 1])]
    });
    let first = &groups[0][0];
    let second = &groups[1][1];
    thread::scope(|scope| {
        let first = scope.spawn(|| wait(first, "first"));
        // So that the wait of rank 0 expires first.
        thread::sleep(Duration::from_millis(100));
        let second = wait(second, "second");
        vec![first.join().unwrap(), second]
    })
}

#[test]
fn the_rank_at_the_end_of_a_chain_of_waits_is_blamed() {
    let gather: fn(&Control, &str) -> Error =
        |group, _| group.all_gather_bytes(vec![]).unwrap_err();
    for (deadline, wait, call) in [(500, gather, "all_gather_bytes"), (1500, hang, "second within")]
    {
        for error in chain_errors(Duration::from_millis(deadline), wait) {
            assert_blames(&error, 2, &format!("it did not come to {call}"));
        }
    }
}

#[test]
fn a_wait_of_one_thread_is_not_cleared_by_the_calls_of_another() {
    let (world, _) = world_within(Duration::from_millis(1500), 3);
    let groups = on_all(&world.0, |rank| {
        let pair = |colors: [usize; 3]| rank.split(colors[rank.rank()], 0).unwrap().0;
        [pair([0, 0, 1]), pair([0, 1, 1]), pair([0, 1, 2])]
    });
    let errors = thread::scope(|scope| {
        let first = scope.spawn(|| hang(&groups[0][0], "first"));
        // One thread of rank 1 waits for rank 2, while another thread makes calls that finish.
        let second = scope.spawn(|| hang(&groups[1][1], "second"));
        let alone = &groups[1][2];
        while !second.is_finished() {
            alone.first_bytes(None).ok();
            drop(alone.report_wait(&alone.begin_call("third"), Duration::ZERO));
            thread::sleep(Duration::from_millis(1));
        }
        [first.join().unwrap(), second.join().unwrap()]
    });
    errors.iter().for_each(|error| assert_blames(error, 2, "it did not come to second"));
}

#[test]
fn a_busy_rank_is_waited_for_beyond_the_deadline_and_blamed_if_it_hangs() {
    let in_round: fn(&Control, &AtomicBool) -> Result<()> =
        |rank, _| rank.first_bytes(None).map(drop);
    let external: fn(&Control, &AtomicBool) -> Result<()> =
        |rank, arrived| rank.wait(&rank.begin_call("sum"), || Ok(arrived.load(Ordering::SeqCst)));
    for wait in [in_round, external] {
        let (world, _) = world_within(SHORT, 3);
        let arrived = AtomicBool::new(false);
        world.0[0].set_busy(true);
        let outcomes = on_all(&world.0, |rank| {
            if rank.rank() == 0 {
                thread::sleep(3 * SHORT);
                rank.set_busy(false);
                arrived.store(true, Ordering::SeqCst);
            }
            wait(rank, &arrived)
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        // Rank 0 ceases to be busy, and does not arrive.
        let first = &world.0[0];
        first.set_busy(true);
        let start = Instant::now();
        let errors = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(2 * SHORT);
                first.set_busy(false);
            });
            on_all(&world.0[1..], |rank| rank.all_gather_bytes(vec![]).unwrap_err())
        });
        assert!(start.elapsed() >= 3 * SHORT, "the deadline starts anew");
        for error in errors {
            assert_blames(&error, 0, "it did not come to all_gather_bytes");
        }
    }
}

/// Rank 0 is busy. Rank 1 waits for rank 0 without a report, so the calls of rank 1 are unknown.
/// Rank 2 waits for both.
#[test]
fn no_rank_is_blamed_while_a_rank_is_busy() {
    let (world, _) = world_within(SHORT, 3);
    world.0[0].set_busy(true);
    let arrived = AtomicBool::new(false);
    let has_arrived = || arrived.load(Ordering::SeqCst);
    let outcomes = on_all(&world.0, |rank| {
        match rank.rank() {
            0 => {
                thread::sleep(3 * SHORT);
                rank.set_busy(false);
                arrived.store(true, Ordering::SeqCst);
            }
            1 => {
                while !has_arrived() {
                    thread::sleep(SHORT / 10);
                }
            }
            _ => return rank.wait(&rank.begin_call("sum"), || Ok(has_arrived())),
        }
        rank.check()
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn a_rank_for_which_a_busy_rank_waits_is_blamed() {
    let in_round: fn(&Control) -> Error = |rank| rank.all_gather_bytes(vec![]).unwrap_err();
    let external: fn(&Control) -> Error = |rank| hang(rank, "gather");
    for (wait, call) in [(in_round, "all_gather_bytes"), (external, "gather")] {
        let (world, _) = world_within(SHORT, 3);
        world.0[0].set_busy(true);
        let errors = on_all(&world.0, |rank| (rank.rank() != 1).then(|| wait(rank)));
        let cause = format!("it did not come to {call}");
        errors.into_iter().flatten().for_each(|error| assert_blames(&error, 1, &cause));
    }
}

#[test]
fn a_busy_rank_that_dies_fails_the_others_at_once() {
    let (mut world, _) = world(2);
    let busy = world.0.pop().unwrap();
    busy.set_busy(true);
    busy.link.stream().shutdown(Shutdown::Both).unwrap();
    let error = world.0[0].all_gather_bytes(vec![]).unwrap_err();
    assert_blames(&error, 1, "the connection to it was lost");
}

/// The errors of three ranks, each on a thread of its own that makes all of its calls: rank 0 makes
/// another call in the world than the others in a group.
fn errors_across_groups(wait: fn(&Control, &str) -> Error) -> Vec<Error> {
    let (world, _) = world(3);
    on_all(&world.0, |rank| {
        let (group, _) = rank.split(0, rank.rank()).unwrap();
        match rank.rank() {
            0 => wait(rank, "save"),
            _ => wait(&group, "gather"),
        }
    })
}

#[test]
fn calls_in_different_groups_are_compared_within_seconds() {
    let in_round: fn(&Control, &str) -> Error = |group, call| match call {
        "save" => group.first_bytes(None).unwrap_err(),
        _ => group.all_gather_bytes(vec![]).unwrap_err(),
    };
    for (wait, calls_of) in
        [(in_round, ["first_bytes", "all_gather_bytes"]), (hang, ["save", "gather"])]
    {
        let start = Instant::now();
        let errors = errors_across_groups(wait);
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        for error in errors {
            let Error::Mismatch { calls } = &error else { panic!("{error}") };
            let [save, gather] = calls_of;
            let in_world = format!("rank 0: {save} in group 0 of ranks 0 to 2");
            assert!(calls.contains(&in_world), "{calls}");
            assert!(calls.contains(&format!("{gather} in group 1 of ranks 0 to 2")), "{calls}");
        }
    }
}

#[test]
fn a_call_that_a_waiting_rank_has_begun_is_no_deadlock() {
    let (world, _) = world(2);
    let finished = AtomicBool::new(false);
    let outcomes = on_all(&world.0, |rank| {
        let sum = rank.begin_call("sum");
        if rank.rank() == 0 {
            // Slow, although the other rank has made the call and waits for this one.
            let start = Instant::now();
            rank.wait(&sum, || Ok(start.elapsed() > 3 * REPORT_AFTER))?;
            finished.store(true, Ordering::SeqCst);
        }
        rank.first_bytes(None).map(drop)
    });
    assert!(finished.load(Ordering::SeqCst) && outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

/// A call of the only thread that has made calls was reported, and then another thread makes some.
#[test]
fn a_second_thread_may_make_the_call_that_others_wait_for() {
    let (world, _) = world(2);
    let pause = |times: u32| thread::sleep(times * REPORT_AFTER);
    let finished = [const { AtomicBool::new(false) }; 2];
    let [first, second] = &finished;
    let outcomes = on_all(&world.0, |rank| {
        let [one, other, own] = [(); 3].map(|()| rank.split(0, 0).unwrap().0);
        if rank.rank() == 0 {
            pause(4);
            let call = one.begin_call("sum");
            one.wait(&call, || Ok(first.load(Ordering::SeqCst)))?;
            other.begin_call("sum");
            second.store(true, Ordering::SeqCst);
            return Ok(());
        }
        let call = other.begin_call("sum");
        thread::scope(|scope| {
            let watch = scope.spawn(|| other.wait(&call, || Ok(second.load(Ordering::SeqCst))));
            scope.spawn(|| {
                pause(2);
                own.begin_call("sum");
                pause(6);
                one.begin_call("sum");
                first.store(true, Ordering::SeqCst);
            });
            watch.join().expect("the watch does not panic")
        })
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn a_rank_that_is_busy_beyond_the_limit_is_blamed() {
    let (world, _) = world_within(SHORT, 2);
    world.0[1].set_busy_limit(2 * SHORT);
    world.0[0].set_busy(true);
    let error = world.0[1].all_gather_bytes(vec![]).unwrap_err();
    assert_blames(&error, 0, "did not come to all_gather_bytes, and was busy for 1.6s");
}
