//! Tests of the admission of processes.

use std::io::{Read, Write};

use super::super::authentication::VERSION;
use super::super::server::{HANDSHAKE_TIMEOUT, MAX_UNAUTHENTICATED_CONNECTIONS};
use super::*;

fn refusal(outcome: Result<Control>) -> String {
    match outcome.map(drop) {
        Err(Error::Rendezvous { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn unauthenticated_connections_do_not_disturb_a_world() {
    let (world, address) = world(2);
    // Noise, bytes that announce gigabytes, an incomplete message, zeros; some are shut down. There
    // are more connections than may be unauthenticated at once.
    let noise: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", &[0xff; 64], &[16, 0, 0, 0, 1], &[0; 4096]];
    let connections: Vec<_> = (0..100)
        .filter_map(|i| {
            let mut stream = TcpStream::connect(&address).ok()?;
            stream.write_all(noise[i % 4]).ok();
            if i % 3 == 0 {
                stream.shutdown(Shutdown::Write).ok();
            }
            Some(stream)
        })
        .collect();
    assert_gathers(&world.0);
    for mut stream in connections {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut received = Vec::new();
        stream.shutdown(Shutdown::Write).ok();
        // An unauthenticated process receives the challenge only.
        stream.read_to_end(&mut received).ok();
        assert!(received.len() <= 4 + 8 + 32, "{received:?}");
    }
    assert_gathers(&world.0);
}

#[test]
fn a_refused_process_is_told_the_reason() {
    let (world, address) = world(3);
    let wrong = Endpoint::known(address.clone()).join(1, 3, "another", DEADLINE);
    assert!(refusal(wrong).contains("DISTMUON_SECRET"));
    assert!(refusal(join(&address, 1, 3)).contains("another process is rank 1"));
    let other_rank = refusal(join(&address, 7, 3));
    assert!(other_rank.contains("does not exist: expected a rank below 3"), "{other_rank}");
    let other_size = refusal(join(&address, 1, 4));
    assert!(other_size.contains("launched with 4 ranks and rank 0 with 3"), "{other_size}");
    // The world is complete, so a refused process does not end it.
    assert_gathers(&world.0);
}

#[test]
fn an_authenticated_process_that_is_refused_ends_an_incomplete_world() {
    let other_version = |address: &str| {
        let stream = TcpStream::connect(address).unwrap();
        let challenge: Challenge = receive(&stream);
        let mut hello = Hello::new(&challenge, 1, 2, SECRET.as_bytes()).unwrap();
        hello.version = "distmuon 0.0.1".into();
        write(&stream, &short_frame(&hello.signed(&challenge, SECRET.as_bytes()))).unwrap();
        match receive(&stream) {
            Admission::Refused(reason) => reason,
            other => panic!("{other:?}"),
        }
    };
    let same_rank = |address: &str| refusal(join(address, 0, 2));
    let other_size = |address: &str| refusal(join(address, 1, 9));
    let attempts: [fn(&str) -> String; 3] = [other_version, same_rank, other_size];
    let expected = [
        (1, "it runs distmuon 0.0.1"),
        (0, "another process is rank 0"),
        (1, "launched with 9 ranks"),
    ];
    for (attempt, (rank, text)) in attempts.into_iter().zip(expected) {
        let (endpoint, address) = open();
        let first = endpoint.join(0, 2, SECRET, DEADLINE).unwrap();
        let reason = attempt(&address);
        assert!(reason.contains(text), "{reason}");
        let error = first.all_gather_bytes(vec![]).unwrap_err();
        let Error::PeerFailed { rank: failed, cause } = &error else { panic!("{error}") };
        assert_eq!(*failed, rank);
        assert!(reason.ends_with(cause.as_str()), "{cause}");
    }
    assert!(VERSION.starts_with("distmuon "));
}

#[test]
fn a_rank_0_that_does_not_know_the_secret_is_detected() {
    for (secret, is_known) in [("another", false), ("", false), (SECRET, true)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let rank_0 = thread::spawn(move || fake_rank_0(listener, secret));
        let joined = join(&address, 1, 2);
        if is_known {
            joined.unwrap();
        } else {
            let reason = refusal(joined);
            assert!(reason.contains("does not know the secret"), "{reason}");
        }
        rank_0.join().unwrap();
    }
}

#[test]
fn slow_connections_delay_a_rank_by_at_most_one_handshake_timeout() {
    let (endpoint, address) = open();
    let first = endpoint.join(0, 2, SECRET, 4 * HANDSHAKE_TIMEOUT).unwrap();
    let start = Instant::now();
    let slow: Vec<_> = (0..2 * MAX_UNAUTHENTICATED_CONNECTIONS)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    let second = thread::scope(|scope| {
        let joining = scope.spawn(|| join(&address, 1, 2));
        // One byte at a time, so that no single read takes long.
        let frame = [0, 4, 0, 0].into_iter().chain([0; 1 << 10]);
        for byte in frame {
            if joining.is_finished() {
                break;
            }
            slow.iter().for_each(|mut stream| _ = stream.write_all(&[byte]));
            thread::sleep(Duration::from_millis(100));
        }
        joining.join().unwrap().unwrap()
    });
    assert!(start.elapsed() < 3 * HANDSHAKE_TIMEOUT, "{:?}", start.elapsed());
    assert_gathers(&World(vec![first, second]).0);
}

#[test]
fn an_address_without_a_usable_rank_0_is_an_error() {
    let (endpoint, address) = open();
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    let second = Endpoint::at(0, "127.0.0.1", port);
    let error = second.map(|endpoint| endpoint.address).unwrap_err();
    assert!(
        matches!(&error, Error::Rendezvous { rank: 0, reason, .. }
            if reason.contains("in use") && reason.contains(&address)),
        "{error}"
    );
    drop(endpoint);
    let deadline = Duration::from_millis(200);
    // A port that the system never chooses by itself.
    let silent = Endpoint::known("127.0.0.1:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(silent).contains("did not answer within 200ms at 127.0.0.1:1: "));
    let unknown = Endpoint::known("no.such.host.invalid:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(unknown).contains("did not answer within 200ms at no address: "));
    // Another program that listens at the address.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let web = thread::spawn(move || {
        other.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    });
    assert!(refusal(join(&address, 1, 2)).contains("the handshake with rank 0 failed"));
    web.join().unwrap().unwrap();
}

#[test]
fn ranks_join_at_every_address_that_a_host_resolves_to() {
    // Not every machine has an IPv6 loopback interface.
    let v6 = TcpListener::bind("[::1]:0").is_ok();
    if !v6 {
        crate::skipped_tests::skip("there is no IPv6 loopback");
    }
    let hosts = [
        ("127.0.0.1", &["127.0.0.1"][..]),
        ("localhost", &["localhost"]),
        // A name may resolve to 127.0.1.1 on one rank, and to another address on the others.
        ("no.such.host.invalid", &["127.0.0.1", "127.0.1.1"]),
        ("::1", &["[::1]"]),
        ("[::1]", &["[::1]"]),
        ("[::]", &["[::1]", "127.0.0.1"]),
    ];
    for (host, addresses) in hosts.into_iter().filter(|(host, _)| v6 || !host.contains(':')) {
        for address in addresses {
            let endpoint = Endpoint::at_free_port(host).unwrap();
            let (_, port) = endpoint.address.rsplit_once(':').unwrap();
            let address = format!("{address}:{port}");
            let first = endpoint.join(0, 2, SECRET, DEADLINE).unwrap();
            assert_gathers(&World(vec![first, join(&address, 1, 2).unwrap()]).0);
        }
    }
}
