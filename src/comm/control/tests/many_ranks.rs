//! Tests of the control plane with many ranks, which connect over loopback from a few processes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::super::{Control, Endpoint};

/// The environment variable with the role of a child process: the number of ranks, and then either
/// `rank0`, or the address of rank 0 and the range of ranks that the process holds.
const ROLE: &str = "DISTMUON_TEST_SCALE";
const DEADLINE: Duration = Duration::from_secs(120);
/// The number of processes that hold the ranks except rank 0.
const CHILDREN: usize = 4;
/// The stack size of a rank's calling thread, whose calls are not deep.
const STACK: usize = 1 << 17;
/// The number of parameters of a model like Llama-8B, with one byte each for the owner.
const OWNERS: usize = 300 * 7;
const NODE: usize = 8;
const STEPS: usize = 4;

/// The measurements of rank 0.
struct Row {
    ranks: usize,
    seconds: f64,
    peak_mb: f64,
    sent: u64,
}

/// The calls of a rank from the start of a run, over a few steps, to its end.
fn run(rank: &Control) {
    let id = rank.broadcast_bytes(vec![7; 128], 0).unwrap();
    assert_eq!(id, [7; 128]);
    for _ in 0..6 {
        assert_eq!(rank.first_bytes(None).unwrap(), None);
    }
    let digest = rank.broadcast_bytes(vec![1; 8], 0).unwrap();
    let differs = (digest != [1; 8]).then(Vec::new);
    assert_eq!(rank.first_bytes(differs).unwrap(), None);
    let owners = rank.broadcast_bytes(vec![3; OWNERS], 0).unwrap();
    assert_eq!(owners.len(), OWNERS);
    for step in 0..STEPS {
        let mut bits = vec![0; 64];
        bits[rank.rank() % 64] = 1 << step;
        let bits = rank.or_bytes(bits).unwrap();
        assert!(bits.iter().take(rank.size()).all(|byte| *byte == 1 << step));
    }
    let names = rank.gather_bytes(format!("host-{:015}", rank.rank() / NODE).into_bytes(), 0);
    assert_eq!(names.unwrap().is_some(), rank.rank() == 0);
    assert_eq!(rank.broadcast_bytes(vec![8; 16], 0).unwrap(), [8; 16]);
    let (across, _) = rank.split(rank.rank() % NODE, rank.rank()).unwrap();
    across.first_bytes(None).unwrap();
    let (node, first) = rank.split(rank.rank() / NODE, rank.rank()).unwrap();
    assert_eq!((first, node.rank()), (rank.rank() / NODE * NODE, rank.rank() % NODE));
    node.first_bytes(None).unwrap();
    rank.first_bytes(None).unwrap();
}

/// Runs rank 0, alone in its process. Prints its address, and at the end its measurements.
fn rank_0(size: usize) {
    let start = Instant::now();
    let endpoint = Endpoint::at_free_port("127.0.0.1").unwrap();
    println!("address: {}", endpoint.address);
    let rank = endpoint.join(0, size, "", DEADLINE).unwrap();
    run(&rank);
    let sent = rank.link.sent().unwrap();
    // Waits until all other ranks have departed.
    drop(rank);
    let seconds = start.elapsed().as_secs_f64();
    println!("measured: {seconds} {} {sent}", peak_mb().unwrap_or_default());
}

/// Returns the peak memory of this process, if the operating system reports it.
fn peak_mb() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<f64>().ok()? / 1024.0)
}

/// Runs ranks as threads with one connection each.
fn other_ranks(address: &str, ranks: std::ops::Range<usize>, size: usize) {
    let rank = |rank| {
        let address = address.to_owned();
        let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
            run(&Endpoint::known(address).join(rank, size, "", DEADLINE).unwrap());
        });
        thread.unwrap()
    };
    let threads: Vec<_> = ranks.map(rank).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// Runs the role of a child process, and returns `true` if this process is one.
fn run_as_child() -> bool {
    let Ok(role) = std::env::var(ROLE) else { return false };
    let words: Vec<&str> = role.split(' ').collect();
    let number = |word: usize| words[word].parse::<usize>().unwrap();
    match words[1] {
        "rank0" => rank_0(number(0)),
        address => other_ranks(address, number(2)..number(3), number(0)),
    }
    true
}

fn child(test: &str, role: String) -> Child {
    let (_, module) = module_path!().split_once("::").unwrap();
    let mut command = Command::new(std::env::args_os().next().unwrap());
    command.args([&format!("{module}::{test}"), "--exact", "--nocapture", "--include-ignored"]);
    command.env(ROLE, role).stdout(Stdio::piped()).spawn().unwrap()
}

fn measure(test: &str, ranks: usize) -> Row {
    let mut first = child(test, format!("{ranks} rank0"));
    let mut lines = BufReader::new(first.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut printed =
        |key: &str| lines.find_map(|line| Some(line.split_once(key)?.1.to_owned())).expect(key);
    let address = printed("address: ");
    let first_rank = |child: usize| 1 + (ranks - 1) * child / CHILDREN;
    let others: Vec<_> = (0..CHILDREN)
        .map(|i| {
            let end = first_rank(i + 1);
            child(test, format!("{ranks} {address} {} {end}", first_rank(i)))
        })
        .collect();
    let measured = printed("measured: ");
    let numbers: Vec<f64> = measured.split(' ').map(|number| number.parse().unwrap()).collect();
    for mut child in others.into_iter().chain([first]) {
        assert!(child.wait().unwrap().success());
    }
    Row { ranks, seconds: numbers[0], peak_mb: numbers[1], sent: numbers[2] as u64 }
}

fn table(test: &str, sizes: &[usize]) -> Vec<Row> {
    println!("| ranks | seconds | peak memory of rank 0, MB | bytes out of rank 0 | per rank |");
    println!("|---|---|---|---|---|");
    let row = |ranks: &usize| {
        let row = measure(test, *ranks);
        let Row { ranks, seconds, peak_mb, sent } = row;
        let per_rank = sent / ranks as u64;
        println!("| {ranks} | {seconds:.2} | {peak_mb:.1} | {sent} | {per_rank} |");
        row
    };
    sizes.iter().map(row).collect()
}

#[test]
fn bytes_of_a_start_grow_in_proportion_to_the_ranks() {
    if run_as_child() {
        return;
    }
    let rows = table("bytes_of_a_start_grow_in_proportion_to_the_ranks", &[8, 64, 512]);
    let per_rank = |row: &Row| row.sent as f64 / row.ranks as f64;
    let fewer = per_rank(&rows[1]);
    let more = per_rank(&rows[2]);
    assert!(more <= 1.2 * fewer, "{more} and {fewer}");
}

#[test]
#[ignore = "takes a minute; run by hand for docs/results/ranks.md"]
fn four_thousand_ranks_start() {
    if run_as_child() {
        return;
    }
    let row = table("four_thousand_ranks_start", &[4096]).pop().unwrap();
    assert!(row.seconds < 60.0 && row.peak_mb < 1024.0);
}
