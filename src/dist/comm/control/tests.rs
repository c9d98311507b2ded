//! Processes, here threads, that find together, or should not.

use std::io::{Read, Write};
use std::net::Shutdown;

use super::protocol::VERSION;
use super::*;

const DEADLINE: Duration = Duration::from_secs(20);
const SECRET: &str = "a secret";

/// Rank 0's meeting at any port, and the address of it for the others.
fn open() -> (Meeting, String) {
    let meeting = Meeting::anywhere("127.0.0.1").unwrap();
    let address = meeting.address.clone();
    (meeting, address)
}

fn join(address: &str, rank: usize, size: usize) -> Result<Control> {
    Meeting::known(address.to_owned()).join(rank, size, SECRET, DEADLINE)
}

/// The ranks of a world, of which rank 0 leaves last: it waits for the others.
struct World(Vec<Control>);

impl Drop for World {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// A world of so many ranks, and where strangers find it.
fn world(size: usize) -> (World, String) {
    world_within(DEADLINE, size)
}

fn world_within(deadline: Duration, size: usize) -> (World, String) {
    let (meeting, address) = open();
    let first = meeting.join(0, size, SECRET, deadline).unwrap();
    let other = |rank| Meeting::known(address.clone()).join(rank, size, SECRET, deadline).unwrap();
    (World([first].into_iter().chain((1..size).map(other)).collect()), address)
}

fn on_all<T: Send>(world: &[Control], run: impl Fn(&Control) -> T + Sync) -> Vec<T> {
    let run = &run;
    thread::scope(|scope| {
        let ranks: Vec<_> = world.iter().map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What every rank has is what every rank gets: the world works.
fn gathers(world: &[Control]) {
    let all = on_all(world, |rank| rank.all_gather_bytes(vec![rank.rank() as u8; rank.rank()]));
    let expected: Vec<_> = (0..world.len()).map(|rank| vec![rank as u8; rank]).collect();
    for gathered in all {
        assert_eq!(gathered.unwrap(), expected);
    }
}

#[test]
fn bytes_reach_all_and_groups_are_groups() {
    let (world, _) = world(5);
    gathers(&world.0);
    let groups = on_all(&world.0, |rank| {
        let (group, members) = rank.split(rank.rank() % 2, 10 - rank.rank()).unwrap();
        let all = group.all_gather_bytes(vec![rank.rank() as u8]).unwrap().concat();
        let (pair, _) = group.split(group.rank() / 2, 0).unwrap();
        (group.rank(), members, all, pair.all_gather_bytes(vec![9]).unwrap().len())
    });
    assert_eq!(groups[0], (2, vec![4, 2, 0], vec![4, 2, 0], 1));
    assert_eq!(groups[3], (0, vec![3, 1], vec![3, 1], 2));
    assert_eq!(groups[4], (0, vec![4, 2, 0], vec![4, 2, 0], 2));
}

#[test]
fn strangers_change_nothing() {
    let (world, address) = world(2);
    // Silence, noise, a promise of gigabytes, half a message, a farewell: and more than may be unproved.
    let noise: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64], &[16, 0, 0, 0, 1], &[0; 4096]];
    let strangers: Vec<_> = (0..100)
        .filter_map(|i| {
            let mut stream = TcpStream::connect(&address).ok()?;
            stream.write_all(noise[i % 4]).ok();
            if i % 3 == 0 {
                stream.shutdown(Shutdown::Write).ok();
            }
            Some(stream)
        })
        .collect();
    gathers(&world.0);
    for mut stream in strangers {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut text = Vec::new();
        stream.shutdown(Shutdown::Write).ok();
        // All that a stranger learns is the challenge.
        stream.read_to_end(&mut text).ok();
        assert!(text.len() <= 36, "{text:?}");
    }
    gathers(&world.0);
}

fn refusal(outcome: Result<Control>) -> String {
    match outcome.map(drop) {
        Err(Error::Rendezvous { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_does_not_belong_is_told_why() {
    let (world, address) = world(3);
    let wrong = Meeting::known(address.clone()).join(1, 3, "another", DEADLINE);
    assert!(refusal(wrong).contains("DISTMUON_SECRET"));
    assert!(refusal(join(&address, 1, 3)).contains("another process is rank 1"));
    assert!(refusal(join(&address, 7, 3)).contains("no rank 7 among 3"));
    assert!(refusal(join(&address, 1, 4)).contains("told of 4 ranks and rank 0 of 3"));
    // The world is complete: none of them ends it.
    gathers(&world.0);
}

#[test]
fn a_member_that_cannot_take_part_ends_a_world_that_waits_for_it() {
    let old = |address: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        let challenge: Challenge = protocol::read(&mut stream, protocol::STRANGER).unwrap();
        let hello = Hello::new(&challenge, 1, 2, SECRET.as_bytes());
        protocol::write(&mut stream, &Hello { version: "distmuon 0.0.1".into(), ..hello }).unwrap();
        match protocol::read(&mut stream, protocol::STRANGER) {
            Ok(Reply::Refused(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    let twice = |address: &str| refusal(join(address, 0, 2));
    let other_size = |address: &str| refusal(join(address, 1, 9));
    let misfits: [fn(&str) -> String; 3] = [old, twice, other_size];
    let reasons =
        [(1, "it runs distmuon 0.0.1"), (0, "another process is rank 0"), (1, "told of 9 ranks")];
    for (misfit, (rank, reason)) in misfits.into_iter().zip(reasons) {
        let (meeting, address) = open();
        let first = meeting.join(0, 2, SECRET, DEADLINE).unwrap();
        let told = misfit(&address);
        assert!(told.contains(reason), "{told}");
        let error = first.all_gather_bytes(vec![]).unwrap_err();
        let Error::PeerFailed { rank: named, cause } = &error else { panic!("{error}") };
        assert_eq!(*named, rank);
        assert!(told.ends_with(cause.as_str()), "{cause}");
    }
    assert!(VERSION.starts_with("distmuon "));
}

#[test]
fn a_death_is_known_at_once() {
    let (mut world, _) = world(3);
    let dead = world.0.remove(1);
    // As if its process had been killed: no farewell.
    dead.link.stream.lock().unwrap().shutdown(Shutdown::Both).unwrap();
    let start = Instant::now();
    for error in on_all(&world.0, |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        let Error::PeerFailed { rank: 1, cause } = &error else { panic!("{error}") };
        assert!(cause.contains("the connection to it was lost"), "{cause}");
    }
    assert!(start.elapsed() < DEADLINE, "nobody waited for the deadline");
    assert!(world.0.iter().all(|rank| rank.has_failed() && rank.check().is_err()));
}

#[test]
fn the_death_of_rank_0_is_known_too() {
    let (meeting, address) = open();
    let listener = meeting.listener.unwrap();
    let rank_0 = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        protocol::write(&mut stream, &Challenge([1; 32])).unwrap();
        let _: Hello = protocol::read(&mut stream, protocol::STRANGER).unwrap();
        protocol::write(&mut stream, &Reply::Fine).unwrap();
    });
    let other = join(&address, 1, 2).unwrap();
    rank_0.join().unwrap();
    let error = other.check().unwrap_err();
    assert!(matches!(error, Error::PeerFailed { rank: 0, .. }), "{error}");
}

#[test]
fn who_does_not_come_is_named() {
    let (meeting, address) = open();
    let deadline = Duration::from_secs(2);
    let first = meeting.join(0, 3, SECRET, deadline).unwrap();
    let third = Meeting::known(address).join(2, 3, SECRET, deadline).unwrap();
    for error in on_all(&[first, third], |rank| rank.all_gather_bytes(vec![]).unwrap_err()) {
        let Error::PeerFailed { rank: 1, cause } = &error else { panic!("{error}") };
        assert!(cause.contains("did not come to all_gather_bytes within 2s"), "{cause}");
    }
}

#[test]
fn calls_elsewhere_are_compared_and_missed() {
    // Different calls, with nobody late.
    let (ranks, _) = world(2);
    let errors = on_all(&ranks.0, |rank| {
        let call = rank.announce(format!("sum on {}", rank.rank()));
        rank.wait(&call, || Ok(false)).unwrap_err()
    });
    for error in errors {
        let Error::Mismatch { calls } = &error else { panic!("{error}") };
        assert!(
            calls.contains("rank 0: sum on 0") && calls.contains("rank 1: sum on 1"),
            "{calls}"
        );
    }
    // A rank that does not come at all.
    let (ranks, _) = world_within(Duration::from_millis(1500), 2);
    let first = &ranks.0[0];
    let error = first.wait(&first.announce("sum"), || Ok(false)).unwrap_err();
    let Error::PeerFailed { rank: 1, cause } = &error else { panic!("{error}") };
    assert!(cause.contains("did not come to sum within 1.5s"), "{cause}");
    // Slow, but the same call: it goes on.
    let (ranks, _) = world(2);
    let start = Instant::now();
    let slow = on_all(&ranks.0, |rank| {
        rank.wait(&rank.announce("sum"), || Ok(start.elapsed() > 2 * PATIENCE))
    });
    assert!(slow.iter().all(Result::is_ok), "{slow:?}");
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
        thread::sleep(CHECK);
        let second = wait(second, "second");
        vec![first.join().unwrap(), second]
    })
}

#[test]
fn who_keeps_others_from_coming_is_named() {
    let gather: fn(&Control, &str) -> Error =
        |group, _| group.all_gather_bytes(vec![]).unwrap_err();
    let elsewhere: fn(&Control, &str) -> Error =
        |group, call| group.wait(&group.announce(call), || Ok(false)).unwrap_err();
    for (deadline, wait, call) in
        [(500, gather, "all_gather_bytes"), (1500, elsewhere, "second within")]
    {
        for error in chain(Duration::from_millis(deadline), wait) {
            let Error::PeerFailed { rank: 2, cause } = &error else { panic!("{error}") };
            assert!(cause.contains(&format!("it did not come to {call}")), "{cause}");
        }
    }
}

#[test]
fn who_falls_silent_is_named() {
    let (ranks, _) = world_within(Duration::from_secs(5), 2);
    let [first, other] = &ranks.0[..] else { panic!("two ranks") };
    // It comes, says that it waits, and is cut off.
    other.compare(&other.announce("sum"), false).unwrap();
    let error = first.wait(&first.announce("sum"), || Ok(false)).unwrap_err();
    let Error::PeerFailed { rank: 1, cause } = &error else { panic!("{error}") };
    assert!(cause.contains("when it waited for sum"), "{cause}");
}

#[test]
fn addresses_that_do_not_work_are_errors() {
    let (meeting, address) = open();
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    let error = Meeting::at(0, "127.0.0.1", port).map(|meeting| meeting.address).unwrap_err();
    assert!(
        matches!(&error, Error::Rendezvous { rank: 0, reason, .. } if reason.contains("in use")),
        "{error}"
    );
    drop(meeting);
    let deadline = Duration::from_millis(200);
    // A port that nobody is given.
    let nobody = Meeting::known("127.0.0.1:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(nobody).contains("did not answer within 200ms"));
    let unknown = Meeting::known("no.such.host.invalid:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(unknown).contains("did not answer"));
    // Something else that listens there.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let web = thread::spawn(move || {
        other.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    });
    assert!(refusal(join(&address, 1, 2)).contains("did not greet back"));
    web.join().unwrap().unwrap();
}
