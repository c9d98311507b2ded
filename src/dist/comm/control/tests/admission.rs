//! Admission of processes.

use std::io::{Read, Write};

use super::super::proof::VERSION;
use super::super::server::{GREETING, STRANGERS};
use super::*;

fn refusal(outcome: Result<Control>) -> String {
    match outcome.map(drop) {
        Err(Error::Rendezvous { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn strangers_change_nothing() {
    let (world, address) = world(2);
    // Silence, noise, a promise of gigabytes, half a message, a shutdown: and more than may be unproved.
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
        assert!(text.len() <= 4 + 8 + 32, "{text:?}");
    }
    gathers(&world.0);
}

#[test]
fn a_process_that_does_not_belong_is_told_why() {
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
        let stream = TcpStream::connect(address).unwrap();
        let challenge: Challenge = receive(&stream);
        let mut hello = Hello::new(&challenge, 1, 2, SECRET.as_bytes()).unwrap();
        hello.version = "distmuon 0.0.1".into();
        write(&stream, &short(&hello.signed(&challenge, SECRET.as_bytes()))).unwrap();
        match receive(&stream) {
            Greeting::Refused(reason) => reason,
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
fn a_rank_0_that_does_not_know_the_secret_is_detected() {
    for (secret, is_known) in [("another", false), ("", false), (SECRET, true)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let rank_0 = thread::spawn(move || false_rank_0(listener, secret));
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
fn slow_strangers_keep_ranks_out_for_the_time_of_one_greeting_only() {
    let (meeting, address) = open();
    let first = meeting.join(0, 2, SECRET, 4 * GREETING).unwrap();
    let start = Instant::now();
    let slow: Vec<_> = (0..2 * STRANGERS).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let second = thread::scope(|scope| {
        let joining = scope.spawn(|| join(&address, 1, 2));
        // A byte now and then: no single read takes long.
        let promise = [0, 4, 0, 0].into_iter().chain([0; 1 << 10]);
        for byte in promise {
            if joining.is_finished() {
                break;
            }
            slow.iter().for_each(|mut stream| _ = stream.write_all(&[byte]));
            thread::sleep(Duration::from_millis(100));
        }
        joining.join().unwrap().unwrap()
    });
    assert!(start.elapsed() < 3 * GREETING, "{:?}", start.elapsed());
    gathers(&World(vec![first, second]).0);
}

#[test]
fn addresses_that_do_not_work_are_errors() {
    let (meeting, address) = open();
    let port = address.rsplit(':').next().unwrap().parse().unwrap();
    let error = Meeting::at(0, "127.0.0.1", port).map(|meeting| meeting.address).unwrap_err();
    assert!(
        matches!(&error, Error::Rendezvous { rank: 0, reason, .. }
            if reason.contains("in use") && reason.contains(&address)),
        "{error}"
    );
    drop(meeting);
    let deadline = Duration::from_millis(200);
    // A port that is never given out.
    let nobody = Meeting::known("127.0.0.1:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(nobody).contains("did not answer within 200ms at 127.0.0.1:1: "));
    let unknown = Meeting::known("no.such.host.invalid:1".into()).join(1, 2, SECRET, deadline);
    assert!(refusal(unknown).contains("did not answer within 200ms at no address: "));
    // Something else that listens there.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let web = thread::spawn(move || {
        other.accept().unwrap().0.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    });
    assert!(refusal(join(&address, 1, 2)).contains("did not greet back"));
    web.join().unwrap().unwrap();
}

#[test]
fn ranks_meet_wherever_the_host_leads_to() {
    // Not every machine takes every address: an IPv6 loopback may be absent.
    let v6 = TcpListener::bind("[::1]:0").is_ok();
    if !v6 {
        crate::skips::skip("there is no IPv6 loopback");
    }
    let hosts = [
        ("127.0.0.1", &["127.0.0.1"][..]),
        ("localhost", &["localhost"]),
        // A name that may mean 127.0.1.1 to one rank, and an address of the network to another.
        ("no.such.host.invalid", &["127.0.0.1", "127.0.1.1"]),
        ("::1", &["[::1]"]),
        ("[::1]", &["[::1]"]),
        ("[::]", &["[::1]", "127.0.0.1"]),
    ];
    for (host, reached_at) in hosts.into_iter().filter(|(host, _)| v6 || !host.contains(':')) {
        for reached_at in reached_at {
            let meeting = Meeting::anywhere(host).unwrap();
            let (_, port) = meeting.address.rsplit_once(':').unwrap();
            let address = format!("{reached_at}:{port}");
            let first = meeting.join(0, 2, SECRET, DEADLINE).unwrap();
            gathers(&World(vec![first, join(&address, 1, 2).unwrap()]).0);
        }
    }
}
