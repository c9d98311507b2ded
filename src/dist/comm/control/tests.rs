//! Processes, here threads, that find together, or should not.

mod admission;
mod failures;
mod limits;

use std::net::{Shutdown, TcpListener, TcpStream};

use super::meeting::greet;
use super::proof::{Challenge, Greeting, Hello};
use super::protocol::{STRANGER, short, write};
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

/// A world of `size` ranks, and where strangers find it.
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

/// Checks that the world works: what every rank has is what every rank gets.
fn gathers(world: &[Control]) {
    let all = on_all(world, |rank| rank.all_gather_bytes(vec![rank.rank() as u8; rank.rank()]));
    let expected: Vec<_> = (0..world.len()).map(|rank| vec![rank as u8; rank]).collect();
    for gathered in all {
        assert_eq!(gathered.unwrap(), expected);
    }
}

/// A connection of a rank that rank 0 has welcomed, and that is silent from now on.
fn silent(address: &str, rank: usize, size: usize) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    let refused = greet(&stream, (rank, size), SECRET.as_bytes(), Instant::now() + DEADLINE);
    assert_eq!(refused.unwrap(), None);
    stream
}

/// A rank 0 that lets one process in, with a secret, and hands over the connection.
fn false_rank_0(listener: TcpListener, secret: &str) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    let challenge = Challenge::new().unwrap();
    write(&stream, &short(&challenge)).unwrap();
    let hello: Hello = receive(&stream);
    write(&stream, &short(&hello.welcome(&challenge, secret.as_bytes()))).unwrap();
    stream
}

fn receive<T: serde::de::DeserializeOwned>(stream: &TcpStream) -> T {
    let mut incoming = protocol::Incoming::new(STRANGER);
    loop {
        assert!(incoming.fill(stream, &mut [0]).unwrap() > 0);
        if let Some(content) = incoming.take().unwrap() {
            return protocol::parse_all(&content).unwrap();
        }
    }
}

#[test]
fn bytes_reach_all_and_groups_are_groups() {
    let (world, _) = world(5);
    gathers(&world.0);
    let groups = on_all(&world.0, |rank| {
        let (group, first) = rank.split(rank.rank() % 2, 10 - rank.rank()).unwrap();
        let all = group.all_gather_bytes(vec![rank.rank() as u8]).unwrap().concat();
        let (pair, _) = group.split(group.rank() / 2, 0).unwrap();
        (group.rank(), group.size(), first, all, pair.all_gather_bytes(vec![9]).unwrap().len())
    });
    assert_eq!(groups[0], (2, 3, 4, vec![4, 2, 0], 1));
    assert_eq!(groups[3], (0, 2, 3, vec![3, 1], 2));
    assert_eq!(groups[4], (0, 3, 4, vec![4, 2, 0], 2));
}

#[test]
fn small_data_go_where_their_names_say() {
    let (world, _) = world(3);
    let results = on_all(&world.0, |rank| {
        let own = rank.rank() as u8;
        let gathered = rank.gather_bytes(vec![own; 2], 1).unwrap();
        let sent = rank.broadcast_bytes(vec![own, 7], 2).unwrap();
        let first = rank.first_bytes((own > 0).then(|| vec![own])).unwrap();
        let empty = rank.first_bytes((own == 2).then(Vec::new)).unwrap();
        let nothing = rank.first_bytes(None).unwrap();
        let any = rank.or_bytes(vec![1 << own, 0, own]).unwrap();
        (gathered, sent, first, empty, nothing, any)
    });
    for (rank, (gathered, sent, first, empty, nothing, any)) in results.into_iter().enumerate() {
        assert_eq!(gathered, (rank == 1).then(|| vec![vec![0, 0], vec![1, 1], vec![2, 2]]));
        assert_eq!(sent, [2, 7]);
        assert_eq!(first, Some((1, vec![1])));
        assert_eq!(empty, Some((2, vec![])));
        assert_eq!(nothing, None);
        assert_eq!(any, [7, 0, 3]);
    }
}

#[test]
fn different_calls_are_an_error_on_all_ranks() {
    let calls: [fn(&Control) -> Result<()>; 2] = [
        |rank| rank.or_bytes(vec![0; 1 + rank.rank() / 2]).map(drop),
        |rank| match rank.rank() {
            2 => rank.broadcast_bytes(vec![], 0).map(drop),
            _ => rank.first_bytes(None).map(drop),
        },
    ];
    for (call, named) in calls.into_iter().zip(["rank 2: or_bytes of 2", "rank 2: broadcast_bytes"])
    {
        let (world, _) = world(3);
        for error in on_all(&world.0, |rank| call(rank).unwrap_err()) {
            let Error::Mismatch { calls } = &error else { panic!("{error}") };
            assert!(calls.contains(named) && calls.contains(", rank "), "{calls}");
        }
    }
}

#[test]
fn a_hundred_and_twenty_eight_ranks_gather() {
    let (world, _) = world(128);
    gathers(&world.0);
}

#[test]
fn threads_of_a_process_call_at_the_same_time() {
    let (world, _) = world(3);
    let sums = on_all(&world.0, |rank| {
        let groups: Vec<_> = (0..4).map(|_| rank.split(0, 0).unwrap().0).collect();
        on_all(&groups, |group| {
            (0..50)
                .map(|i| group.all_gather_bytes(vec![i; 3]).unwrap().concat().len())
                .sum::<usize>()
        })
    });
    assert_eq!(sums, [[450; 4]; 3]);
}
