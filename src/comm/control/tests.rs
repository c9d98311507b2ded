//! Tests of the control plane, whose ranks are threads with one connection each.

mod admission;
mod failures;
mod limits;
mod many_ranks;

use std::net::{Shutdown, TcpListener, TcpStream};

use super::authentication::{Admission, Challenge, Hello};
use super::connect::handshake;
use super::protocol::{MAX_UNAUTHENTICATED_MESSAGE, short_frame, write};
use super::*;

const DEADLINE: Duration = Duration::from_secs(20);
const SECRET: &str = "a secret";

/// Opens rank 0's endpoint at any port, and returns its address for the other ranks.
fn open() -> (Endpoint, String) {
    let endpoint = Endpoint::at_free_port("127.0.0.1").unwrap();
    let address = endpoint.address.clone();
    (endpoint, address)
}

fn join(address: &str, rank: usize, size: usize) -> Result<Control> {
    Endpoint::known(address.to_owned()).join(rank, size, SECRET, DEADLINE)
}

/// The ranks of a world. Rank 0 is dropped last, since it waits until the others have departed.
struct World(Vec<Control>);

impl Drop for World {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// Makes a world of `size` ranks, and returns it with the address of rank 0.
fn world(size: usize) -> (World, String) {
    world_within(DEADLINE, size)
}

fn world_within(deadline: Duration, size: usize) -> (World, String) {
    let (endpoint, address) = open();
    let first = endpoint.join(0, size, SECRET, deadline).unwrap();
    let other = |rank| Endpoint::known(address.clone()).join(rank, size, SECRET, deadline).unwrap();
    (World([first].into_iter().chain((1..size).map(other)).collect()), address)
}

fn on_all<T: Send>(world: &[Control], run: impl Fn(&Control) -> T + Sync) -> Vec<T> {
    let run = &run;
    thread::scope(|scope| {
        let ranks: Vec<_> = world.iter().map(|rank| scope.spawn(move || run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Checks that a gather works in a world.
fn assert_gathers(world: &[Control]) {
    let results = on_all(world, |rank| rank.all_gather_bytes(vec![rank.rank() as u8; rank.rank()]));
    let expected: Vec<_> = (0..world.len()).map(|rank| vec![rank as u8; rank]).collect();
    for gathered in results {
        assert_eq!(gathered.unwrap(), expected);
    }
}

/// Opens a connection of a rank that rank 0 has admitted, and that sends nothing by itself.
fn silent_member(address: &str, rank: usize, size: usize) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    let refusal = handshake(&stream, (rank, size), SECRET.as_bytes(), Instant::now() + DEADLINE);
    assert_eq!(refusal.unwrap(), None);
    stream
}

/// Imitates a rank 0 with a secret that admits one process, and returns the connection.
fn fake_rank_0(listener: TcpListener, secret: &str) -> TcpStream {
    let (stream, _) = listener.accept().unwrap();
    let challenge = Challenge::new().unwrap();
    write(&stream, &short_frame(&challenge)).unwrap();
    let hello: Hello = receive(&stream);
    write(&stream, &short_frame(&hello.welcome(&challenge, secret.as_bytes()))).unwrap();
    stream
}

fn receive<T: serde::de::DeserializeOwned>(stream: &TcpStream) -> T {
    let mut incoming = protocol::Incoming::new(MAX_UNAUTHENTICATED_MESSAGE);
    loop {
        assert!(incoming.fill(stream, &mut [0]).unwrap() > 0);
        if let Some(content) = incoming.take_frame().unwrap() {
            return protocol::parse_all(&content).unwrap();
        }
    }
}

#[test]
fn gathers_work_in_a_world_and_in_nested_groups() {
    let (world, _) = world(5);
    assert_gathers(&world.0);
    let groups = on_all(&world.0, |rank| {
        let (group, first) = rank.split(rank.rank() % 2, 10 - rank.rank()).unwrap();
        let ranks = group.all_gather_bytes(vec![rank.rank() as u8]).unwrap().concat();
        let (pair, _) = group.split(group.rank() / 2, 0).unwrap();
        let pair_size = pair.all_gather_bytes(vec![9]).unwrap().len();
        (group.rank(), group.size(), first, ranks, pair_size)
    });
    assert_eq!(groups[0], (2, 3, 4, vec![4, 2, 0], 1));
    assert_eq!(groups[3], (0, 2, 3, vec![3, 1], 2));
    assert_eq!(groups[4], (0, 3, 4, vec![4, 2, 0], 2));
}

#[test]
fn every_operation_returns_the_right_bytes_to_every_rank() {
    let (world, _) = world(3);
    let results = on_all(&world.0, |rank| {
        let byte = rank.rank() as u8;
        let gathered = rank.gather_bytes(vec![byte; 2], 1).unwrap();
        let broadcast = rank.broadcast_bytes(vec![byte, 7], 2).unwrap();
        let first = rank.first_bytes((byte > 0).then(|| vec![byte])).unwrap();
        let empty = rank.first_bytes((byte == 2).then(Vec::new)).unwrap();
        let nothing = rank.first_bytes(None).unwrap();
        let bits = rank.or_bytes(vec![1 << byte, 0, byte]).unwrap();
        (gathered, broadcast, first, empty, nothing, bits)
    });
    for (rank, result) in results.into_iter().enumerate() {
        let (gathered, broadcast, first, empty, nothing, bits) = result;
        assert_eq!(gathered, (rank == 1).then(|| vec![vec![0, 0], vec![1, 1], vec![2, 2]]));
        assert_eq!(broadcast, [2, 7]);
        assert_eq!(first, Some((1, vec![1])));
        assert_eq!(empty, Some((2, vec![])));
        assert_eq!(nothing, None);
        assert_eq!(bits, [7, 0, 3]);
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
    let names = ["rank 2: or_bytes of 2", "rank 2: broadcast_bytes"];
    for (call, name) in calls.into_iter().zip(names) {
        let (world, _) = world(3);
        for error in on_all(&world.0, |rank| call(rank).unwrap_err()) {
            let Error::Mismatch { calls } = &error else { panic!("{error}") };
            assert!(calls.contains(name) && calls.contains(", rank "), "{calls}");
        }
    }
}

#[test]
fn a_hundred_and_twenty_eight_ranks_gather() {
    let (world, _) = world(128);
    assert_gathers(&world.0);
}

#[test]
fn threads_of_a_process_may_call_at_the_same_time() {
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
