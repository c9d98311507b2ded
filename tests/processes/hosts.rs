//! Two hosts of two ranks each, over MPI and a link that can be cut.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use distmuon::Error;
use distmuon::comm::Launch;
use distmuon_testing::mpirun::{ROOT, is_there, output_of, wait};
use distmuon_testing::skip;

use crate::ranks::{self, CUT_AT, FOLDER, text, trained};

/// The deadline for other ranks. Ranks that are cut off get no other signal.
pub const DEADLINE: Duration = Duration::from_secs(4);
const RANKS: usize = 4;
const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
const HARDWARE: [&str; 2] = ["02:00:00:00:77:01", "02:00:00:00:77:02"];
const NETWORK: &str = "10.213.77.0/24";
/// No other process is in the namespaces, and the kernel assigns higher ports.
const PORT: &str = "29500";
const CUTS: [&str; 3] = ["step 1: 9", "step 2: 22", "save 2: 3"];
/// The end of a complete error in a rank's file.
const END: &str = "\n";

const FORWARDED: [&str; 7] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    FOLDER,
    CUT_AT,
    "RAYON_NUM_THREADS",
    "LD_LIBRARY_PATH",
    "BURN_DEVICE",
];

/// Two network namespaces with a link between them.
struct Hosts {
    names: [String; 2],
}

fn ip(arguments: &str) -> Option<String> {
    let ip = Command::new("ip").args(arguments.split(' ')).output().ok()?;
    ip.status.success().then(|| text(&ip.stdout))
}

impl Hosts {
    /// Creates the hosts. `None` if this is not permitted.
    fn new() -> Option<Self> {
        let process = std::process::id();
        let names = ["a", "b"].map(|host| format!("distmuon-{process}-{host}"));
        let hosts = Self { names };
        let [a, b] = &hosts.names;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        let [first, second] = HARDWARE;
        ip(&format!(
            "link add dm netns {a} address {first} type veth peer dm netns {b} address {second}"
        ))?;
        for (host, address) in hosts.names.iter().zip(ADDRESSES) {
            ip(&format!("-n {host} link set lo up"))?;
            ip(&format!("-n {host} addr add {address}/24 dev dm"))?;
        }
        ip(&format!("-n {b} link set dm up"))?;
        hosts.connect()?;
        Some(hosts)
    }

    fn cut(&self) {
        ip(&format!("-n {} link set dm down", self.names[0])).expect("the link was up");
    }

    /// Connects the hosts. Waits until both ends have a carrier, which takes the kernel a moment,
    /// and makes both ends forget that they could not reach each other.
    fn connect(&self) -> Option<()> {
        let [a, b] = &self.names;
        ip(&format!("-n {a} link set dm up"))?;
        let carries =
            |host| ip(&format!("-n {host} -br link show dm")).is_some_and(|dm| dm.contains(" UP "));
        wait_for("carrier", || carries(a) && carries(b));
        for (host, other) in [(a, 1), (b, 0)] {
            let (address, hardware) = (ADDRESSES[other], HARDWARE[other]);
            ip(&format!("-n {host} neigh replace {address} lladdr {hardware} dev dm"))?;
        }
        Some(())
    }

    /// Starts the ranks on both hosts by mpirun on the first host.
    fn start(&self, folder: &Path, cut_at: &str) -> Child {
        // The program that mpirun runs instead of ssh. Its arguments are a host and a command.
        let [a, b] = &self.names;
        let agent = folder.join("agent");
        let script = format!(
            "#!/bin/sh\nshift\nexec ip netns exec {b} unshare --uts sh -c \"hostname b; $*\"\n"
        );
        fs::write(&agent, script).unwrap();
        let executable = Command::new("chmod").arg("+x").arg(&agent).status();
        assert!(executable.is_ok_and(|done| done.success()));
        let program = std::env::args_os().next().expect("a program has a name");
        let [first, second] = ADDRESSES;
        let mpirun = format!(
            "hostname a; exec mpirun --mca plm_rsh_agent {} -H {first}:2,{second}:2 --bind-to none \
             --mca btl self,tcp --mca btl_tcp_if_include {NETWORK} \
             --mca oob_tcp_if_include {NETWORK} {} {}",
            agent.display(),
            // The variables for the other host.
            FORWARDED.map(|name| format!("-x {name}")).join(" "),
            Path::new(&program).display(),
        );
        let mut command = Command::new("ip");
        command.args(["netns", "exec", a, "unshare", "--uts", "sh", "-c"]).arg(mpirun);
        for (name, value) in [
            ("MASTER_ADDR", first.to_owned()),
            ("MASTER_PORT", PORT.to_owned()),
            (FOLDER, folder.display().to_string()),
            (CUT_AT, cut_at.to_string()),
            ("RAYON_NUM_THREADS", "1".to_owned()),
        ] {
            command.env(name, value);
        }
        command.envs(ROOT).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the program ip can be started")
    }

    /// Ends all processes on the hosts.
    fn clear(&self) {
        for host in &self.names {
            let pids = ip(&format!("netns pids {host}")).unwrap_or_default();
            for pid in pids.split_whitespace() {
                Command::new("kill").args(["-9", pid]).output().ok();
            }
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        self.clear();
        for host in &self.names {
            ip(&format!("netns del {host}"));
        }
    }
}

/// Waits until the link has been cut.
pub fn wait_for_the_cut(folder: &Path) {
    fs::write(folder.join("ready"), "").expect("the folder exists");
    wait_for("cut", || folder.join("cut").exists());
}

/// Waits for a condition, and returns the time that this took.
pub fn wait_for(what: &str, done: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < ranks::DEADLINE, "no {what}");
        thread::sleep(Duration::from_millis(5));
    }
    start.elapsed()
}

/// Writes a rank's error to the folder, since mpirun may then kill the rank before it prints.
pub fn report(folder: &Path, error: &Error) {
    if std::env::var_os(CUT_AT).is_some() {
        let rank = Launch::from_env().map_or(0, |launch| launch.rank);
        let kind = match error {
            Error::PeerFailed { .. } => "PeerFailed",
            _ => "other",
        };
        let path = folder.join(format!("error-{rank}"));
        fs::write(&path, format!("{kind}: {error}{END}")).expect("the folder exists");
        // mpirun ends the other ranks when the first rank has ended.
        let all = || (0..RANKS).all(|rank| folder.join(format!("error-{rank}")).exists());
        wait_for("error on every rank", all);
        thread::sleep(Duration::from_millis(200));
    }
}

fn succeed(hosts: &Hosts, folder: &Path) -> (String, Vec<u8>) {
    let output = output_of(|| Ok(hosts.start(folder, "never"))).expect("mpirun runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), trained(folder, RANKS))
}

pub fn fail_and_resume_after_a_cut() {
    if !is_there() {
        return;
    }
    let Some(hosts) = Hosts::new() else {
        return skip("network namespaces are not permitted");
    };
    let undisturbed = tempfile::tempdir().unwrap();
    let (described, expected) = succeed(&hosts, undisturbed.path());
    assert!(described.contains("4 ranks over mpi"), "{described}");
    assert!(described.contains(", 2 nodes"), "shards stay inside hosts first: {described}");

    for cut_at in CUTS {
        let folder = tempfile::tempdir().unwrap();
        fail_after_a_cut(&hosts, folder.path(), cut_at);
        hosts.connect().expect("the link was up before");
        let (_, resumed) = succeed(&hosts, folder.path());
        assert!(resumed == expected, "{cut_at}: as if the link had not been cut");
    }
}

fn fail_after_a_cut(hosts: &Hosts, folder: &Path, cut_at: &str) {
    let mut mpirun = hosts.start(folder, cut_at);
    wait_for("step", || folder.join("ready").exists());
    hosts.cut();
    fs::write(folder.join("cut"), "").unwrap();
    let error = |rank: usize| fs::read_to_string(folder.join(format!("error-{rank}")));
    let has_reported = |rank| error(rank).is_ok_and(|error| error.ends_with(END));
    let waited = wait_for("error on every rank", || (0..RANKS).all(has_reported));
    println!("{cut_at}: all ranks had reported {waited:?} after the cut");
    assert!(waited < 3 * DEADLINE, "{waited:?}");
    for rank in 0..RANKS {
        let error = error(rank).unwrap();
        println!("rank {rank}: {error}");
        // Each side reports a rank of the other side: rank 0 is on the side of ranks 0 and 1.
        assert!(error.starts_with("PeerFailed: "), "rank {rank}: {error}");
        let others: &[_] = if rank < 2 { &[2, 3] } else { &[0] };
        let blames = |other: &usize| error.contains(&format!(": rank {other} failed"));
        assert!(others.iter().any(blames), "rank {rank}: {error}");
    }
    hosts.clear();
    wait(&mut mpirun).expect("mpirun was started");
}
