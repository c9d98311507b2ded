//! Ranks that die, hang, leave, or are slow.

use std::sync::atomic::AtomicBool;

use super::*;

fn peer(error: &Error, rank: usize, said: &str) {
    let Error::PeerFailed { rank: named, cause } = error else { panic!("{error}") };
    assert!(*named == rank && cause.contains(said), "rank {named}: {cause}");
}

/// A deadline for tests that wait until it has passed.
const SHORT: Duration = Duration::from_millis(800);

/// Waits for a call that never finishes.
fn hangs(rank: &Control, call: &str) -> Error {
    rank.wait(&rank.announce(call), || Ok(false)).unwrap_err()
}

#[test]
fn a_death_is_known_at_once() {
    let (mut world, _) = world(3);
    let dead = world.0.remove(1);
    // As if its process had been killed: it says nothing.
    dead.link.stream().shutdown(Shutdown::Both).unwrap();
    let start = Instant::now();
    for error in on_all(&world.0, |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        peer(&error, 1, "the connection to it was lost");
    }
    assert!(start.elapsed() < DEADLINE, "the deadline was not waited for");
    assert!(world.0.iter().all(|rank| rank.has_failed() && rank.check().is_err()));
}

#[test]
fn a_failure_reaches_ranks_that_ask_for_nothing() {
    let (world, _) = world(3);
    world.0[1].fail("a bug");
    for rank in &world.0 {
        rank.link.listen(DEADLINE);
        peer(&rank.check().unwrap_err(), 1, "a bug");
    }
}

#[test]
fn the_death_of_rank_0_is_known_too() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let rank_0 = thread::spawn(move || drop(false_rank_0(listener, SECRET)));
    let other = join(&address, 1, 2).unwrap();
    rank_0.join().unwrap();
    peer(&other.all_gather_bytes(vec![]).unwrap_err(), 0, "the connection to it was lost");
}

#[test]
fn a_silent_rank_0_is_noticed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let rank_0 = thread::spawn(move || false_rank_0(listener, SECRET));
    let deadline = Duration::from_secs(1);
    let other = Meeting::known(address).join(1, 2, SECRET, deadline).unwrap();
    let stream = rank_0.join().unwrap();
    peer(&other.all_gather_bytes(vec![]).unwrap_err(), 0, "silent for");
    drop(stream);
}

#[test]
fn a_rank_that_falls_silent_is_named() {
    let (meeting, address) = open();
    let first = meeting.join(0, 2, SECRET, Duration::from_secs(4)).unwrap();
    // It comes, says that it waits, and is cut off.
    let cut_off = silent(&address, 1, 2);
    let call = first.announce("sum");
    let wait = Request::Wait { key: (0, 0), call: call.call.clone(), waited: Duration::ZERO };
    write(&cut_off, &short(&wait)).unwrap();
    let error = first.wait(&call, || Ok(false)).unwrap_err();
    peer(&error, 1, "silent for");
    peer(&error, 1, "when it waited for sum");
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let (meeting, address) = open();
    let deadline = Duration::from_secs(1);
    let first = meeting.join(0, 3, SECRET, deadline).unwrap();
    let third = Meeting::known(address.clone()).join(2, 3, SECRET, deadline).unwrap();
    let said = format!("it never joined, and rank 0 listens at {address}");
    for error in on_all(&[first, third], |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        peer(&error, 1, "did not come to all_gather_bytes within 1s");
        peer(&error, 1, &said);
    }
}

#[test]
fn calls_elsewhere_are_compared_and_missed() {
    // Different calls, with nobody late.
    let (ranks, _) = world(2);
    let errors = on_all(&ranks.0, |rank| hangs(rank, &format!("sum on {}", rank.rank())));
    for error in errors {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(
            calls.contains("rank 0: sum on 0") && calls.contains("rank 1: sum on 1"),
            "{calls}"
        );
    }
    // A rank that does not come at all.
    let (ranks, _) = world_within(Duration::from_millis(1500), 2);
    peer(&hangs(&ranks.0[0], "sum"), 1, "did not come to sum within 1.5s");
    // Slow, but the same call: it goes on.
    let (ranks, _) = world(2);
    let start = Instant::now();
    let slow = on_all(&ranks.0, |rank| {
        rank.wait(&rank.announce("sum"), || Ok(start.elapsed() > 2 * PATIENCE))
    });
    assert!(slow.iter().all(Result::is_ok), "{slow:?}");
    // All have come, and it does not end.
    let (ranks, _) = world_within(Duration::from_secs(1), 2);
    for error in on_all(&ranks.0, |rank| hangs(rank, "sum")) {
        let Error::PeerFailed { cause, .. } = &error else { panic!("{error}") };
        assert_eq!(cause, "sum did not finish, though all ranks came to it");
    }
}

#[test]
fn long_descriptions_of_calls_are_compared_whole() {
    let (ranks, _) = world(2);
    let errors = on_all(&ranks.0, |rank| {
        let counts = format!("sum({:?} {})", [7; 4096], rank.rank());
        let call = rank.announce(counts);
        assert!(call.call.len() <= 200);
        rank.wait(&call, || Ok(false)).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn calls_of_the_world_are_compared_after_many_in_a_group() {
    let (world, _) = world(2);
    let errors = on_all(&world.0, |rank| {
        let (group, _) = rank.split(0, 0).unwrap();
        for _ in 0..1001 {
            // Slow calls, which rank 0 is told of.
            drop(group.waiting(&group.announce("sum"), Duration::ZERO));
        }
        hangs(rank, &format!("call of {}", rank.rank()))
    });
    for error in errors {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(calls.contains("rank 0: call of 0"), "{calls}");
    }
}

#[test]
fn a_rank_that_returns_early_is_noticed_within_a_second_elsewhere() {
    for early in [2, 0] {
        let (mut world, _) = world(3);
        on_all(&world.0, |rank| rank.wait(&rank.announce("first"), || Ok(true)).unwrap());
        let leaver = world.0.remove(early);
        let start = Instant::now();
        let errors = thread::scope(|scope| {
            scope.spawn(move || drop(leaver));
            on_all(&world.0, |rank| hangs(rank, "second"))
        });
        let waited = start.elapsed();
        assert!(waited < DEADLINE / 2, "{waited:?}");
        for error in errors {
            peer(&error, early, "it returned without second");
        }
    }
}

#[test]
fn a_rank_that_has_finished_and_left_is_not_blamed() {
    let (mut world, _) = world(2);
    let leaver = world.0.pop().unwrap();
    _ = [leaver.announce("first"), leaver.announce("second")];
    drop(leaver);
    let (rank, start) = (&world.0[0], Instant::now());
    for call in ["first", "second"] {
        let slow = || Ok(start.elapsed() > 2 * QUIET);
        rank.wait(&rank.announce(call), slow).unwrap();
    }
    peer(&hangs(rank, "third"), 1, "it returned without third");
}

/// Rank 0 waits for rank 1, which waits for rank 2, which does nothing.
fn chain(deadline: Duration, wait: fn(&Control, &str) -> Error) -> Vec<Error> {
    let (world, _) = world_within(deadline, 3);
    let groups = on_all(&world.0, |own| {
        let pair = |colors: [usize; 3]| own.split(colors[own.rank()], 0).unwrap().0;
        [pair([0, 0, 1]), pair([0, 1, 1])]
    });
    let (first, second) = (&groups[0][0], &groups[1][1]);
    thread::scope(|scope| {
        let first = scope.spawn(|| wait(first, "first"));
        // Rank 0 is the first that has waited for too long.
        thread::sleep(Duration::from_millis(100));
        let second = wait(second, "second");
        vec![first.join().unwrap(), second]
    })
}

#[test]
fn the_rank_that_keeps_others_from_coming_is_named() {
    let gather: fn(&Control, &str) -> Error =
        |group, _| group.all_gather_bytes(vec![]).unwrap_err();
    for (deadline, wait, call) in
        [(500, gather, "all_gather_bytes"), (1500, hangs, "second within")]
    {
        for error in chain(Duration::from_millis(deadline), wait) {
            peer(&error, 2, &format!("it did not come to {call}"));
        }
    }
}

#[test]
fn a_wait_of_one_thread_outlives_the_calls_of_another() {
    let (world, _) = world_within(Duration::from_millis(1500), 3);
    let groups = on_all(&world.0, |own| {
        let pair = |colors: [usize; 3]| own.split(colors[own.rank()], 0).unwrap().0;
        [pair([0, 0, 1]), pair([0, 1, 1]), pair([0, 1, 2])]
    });
    let errors = thread::scope(|scope| {
        let first = scope.spawn(|| hangs(&groups[0][0], "first"));
        // One thread of rank 1 waits for rank 2, another makes calls that end.
        let second = scope.spawn(|| hangs(&groups[1][1], "second"));
        let alone = &groups[1][2];
        while !second.is_finished() {
            alone.first_bytes(None).ok();
            drop(alone.waiting(&alone.announce("third"), Duration::ZERO));
            thread::sleep(Duration::from_millis(1));
        }
        [first.join().unwrap(), second.join().unwrap()]
    });
    errors.iter().for_each(|error| peer(error, 2, "it did not come to second"));
}

#[test]
fn a_busy_rank_is_waited_for_beyond_the_deadline_and_blamed_if_it_hangs() {
    let here: fn(&Control, &AtomicBool) -> Result<()> = |rank, _| rank.first_bytes(None).map(drop);
    let elsewhere: fn(&Control, &AtomicBool) -> Result<()> =
        |rank, came| rank.wait(&rank.announce("sum"), || Ok(came.load(Ordering::SeqCst)));
    for wait in [here, elsewhere] {
        let (world, _) = world_within(SHORT, 3);
        let came = AtomicBool::new(false);
        world.0[0].set_busy(true);
        let outcomes = on_all(&world.0, |rank| {
            if rank.rank() == 0 {
                thread::sleep(3 * SHORT);
                rank.set_busy(false);
                came.store(true, Ordering::SeqCst);
            }
            wait(rank, &came)
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        // It is busy no longer, and does not come.
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
        errors.iter().for_each(|error| peer(error, 0, "it did not come to all_gather_bytes"));
    }
}

/// Rank 0 is busy and keeps rank 1 from reporting calls, which it may have made or not; rank 2 waits for both.
#[test]
fn nobody_is_blamed_while_a_rank_is_busy() {
    let (world, _) = world_within(SHORT, 3);
    world.0[0].set_busy(true);
    let came = AtomicBool::new(false);
    let has_come = || came.load(Ordering::SeqCst);
    let outcomes = on_all(&world.0, |rank| {
        match rank.rank() {
            0 => {
                thread::sleep(3 * SHORT);
                rank.set_busy(false);
                came.store(true, Ordering::SeqCst);
            }
            1 => {
                while !has_come() {
                    thread::sleep(SHORT / 10);
                }
            }
            _ => return rank.wait(&rank.announce("sum"), || Ok(has_come())),
        }
        rank.check()
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}

#[test]
fn a_rank_that_keeps_a_busy_one_waiting_is_blamed() {
    let here: fn(&Control) -> Error = |rank| rank.all_gather_bytes(vec![]).unwrap_err();
    let elsewhere: fn(&Control) -> Error = |rank| hangs(rank, "gather");
    for (wait, call) in [(here, "all_gather_bytes"), (elsewhere, "gather")] {
        let (world, _) = world_within(SHORT, 3);
        world.0[0].set_busy(true);
        let errors = on_all(&world.0, |rank| (rank.rank() != 1).then(|| wait(rank)));
        let cause = format!("it did not come to {call}");
        errors.into_iter().flatten().for_each(|error| peer(&error, 1, &cause));
    }
}

#[test]
fn a_busy_rank_that_dies_is_not_waited_for() {
    let (mut world, _) = world(2);
    let busy = world.0.pop().unwrap();
    busy.set_busy(true);
    busy.link.stream().shutdown(Shutdown::Both).unwrap();
    peer(&world.0[0].all_gather_bytes(vec![]).unwrap_err(), 1, "the connection to it was lost");
}
