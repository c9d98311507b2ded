//! Ranks that are processes: launchers, processes that are killed, and hosts that lose each other.
//!
//! The program starts itself as the ranks. They train over the engine `nccl` and the test library, and
//! between hosts, which are network namespaces here, over `mpi`.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod common;
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[path = "common/host.rs"]
mod host;
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[path = "common/watched.rs"]
mod watched;
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[path = "common/worlds.rs"]
mod worlds;

fn main() {
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    ranks::main();
    #[cfg(not(all(feature = "cuda", target_os = "linux")))]
    println!("skipped: processes train over nccl, which needs --features cuda, and on Linux");
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod ranks {
    use std::fs;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Child, Command, Output, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};

    use burn::module::Module;
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;
    use distmuon::Result;
    use distmuon::dist::{DistMuonConfig, Launch, World};
    use libtest_mimic::{Arguments, Trial};
    use rand::{SeedableRng, rngs::StdRng};

    use crate::common::{Fixed, gradients, weights};
    use crate::host::{self, Waits};
    use crate::watched::watched;
    use crate::worlds;

    const RANKS: usize = 3;
    const VICTIM: usize = 1;
    const STEPS: u64 = 4;
    /// How long a rank is waited for; nobody should come near it.
    const DEADLINE: Duration = Duration::from_secs(60);
    /// Where checkpoints go; says that a process is a rank.
    const FOLDER: &str = "DISTMUON_TEST_FOLDER";
    /// The event at which the victim is killed.
    const KILLED_AT: &str = "DISTMUON_TEST_KILLED_AT";
    /// Says that a process is of a world of hosts, and how many milliseconds it rests after a step.
    #[cfg(feature = "mpi")]
    const PAUSE: &str = "DISTMUON_TEST_PAUSE";

    #[derive(Module, Debug)]
    struct Net {
        matrices: Vec<Linear>,
    }

    impl Net {
        fn new(device: &Device) -> Self {
            let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
            let net =
                Self { matrices: vec![linear(6, 6), linear(4, 9), linear(9, 4), linear(6, 6)] };
            net.map(&mut Fixed(StdRng::seed_from_u64(5)))
        }
    }

    /// Buckets of a parameter or two, so that a step has many points.
    fn config() -> DistMuonConfig {
        DistMuonConfig::new().with_bucket_mb(0.0002).with_small_elements(32)
    }

    pub fn main() {
        host::use_test_library();
        if let Some(folder) = std::env::var_os(FOLDER) {
            return work(Path::new(&folder));
        }
        let cases: &[(&str, fn())] = &[
            ("processes_train_and_go_on", processes_train_and_go_on),
            ("a_killed_rank_is_named_by_all", a_killed_rank_is_named_by_all),
            ("torchrun_starts_them", torchrun_starts_them),
            ("what_is_missing_is_said", what_is_missing_is_said),
            #[cfg(feature = "mpi")]
            ("hosts_that_lose_each_other_go_on_later", hosts::lose_each_other_and_go_on_later),
        ];
        let trials = cases.iter().map(|(name, case)| {
            Trial::test(*name, move || {
                case();
                Ok(())
            })
        });
        libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
    }

    /// What a rank does: trains, saves every step, and says how it ended.
    fn work(folder: &Path) {
        if let Err(error) = train(folder) {
            eprintln!("{error}");
            #[cfg(feature = "mpi")]
            hosts::report(folder, &error);
            std::process::exit(3);
        }
    }

    fn train(folder: &Path) -> Result<()> {
        let launch = Launch::from_env()?;
        let device = Device::default().autodiff();
        #[cfg(feature = "mpi")]
        let world = match std::env::var_os(PAUSE) {
            Some(_) => World::mpi(&launch, device, hosts::DEADLINE)?,
            None => host::world(&launch, device, DEADLINE, Waits::Device)?,
        };
        #[cfg(not(feature = "mpi"))]
        let world = host::world(&launch, device, DEADLINE, Waits::Device)?;
        let description = world.describe()?;
        if world.rank() == 0 {
            println!("{description}");
        }
        let engine = world.engine();
        let steps = steps(&world, folder);
        steps.inspect_err(|error| engine.fail(&error.to_string()))
    }

    fn steps(world: &World, folder: &Path) -> Result<()> {
        let killed_at = std::env::var(KILLED_AT).ok().and_then(|at| at.parse::<usize>().ok());
        let world = watched(world, move |event| {
            if event.rank == VICTIM && Some(event.number) == killed_at {
                kill(std::process::id());
            }
            Ok(())
        });
        let path = folder.join("run.ckpt");
        let mut net = world.broadcast(Net::new(world.device()))?;
        let mut optim = config().init(&world, &net)?;
        let mut step = 0;
        if path.exists() {
            (net, optim, step) = optim.load(&path, net)?;
        }
        while step < STEPS {
            let gradients = gradients(&net, step);
            net = optim.step(0.01, net, gradients)?;
            step += 1;
            optim.save(&path, &net, &step)?;
            #[cfg(feature = "mpi")]
            hosts::rest(folder, step);
        }
        fs::write(folder.join(format!("weights-{}", world.rank())), weights(&net).concat())
            .expect("the folder is there");
        Ok(())
    }

    /// Ends a process as the system does when memory is short: without a word.
    fn kill(process: u32) {
        let killed = Command::new("kill").args(["-9", &process.to_string()]).status();
        assert!(killed.is_ok_and(|killed| killed.success()));
        thread::sleep(DEADLINE);
    }

    fn program() -> Command {
        let own = std::env::args_os().next().expect("a program has a name");
        let mut program = Command::new(own);
        program.env("RAYON_NUM_THREADS", "1");
        program
    }

    /// The processes of a world, as a launcher starts them.
    fn start(folder: &Path, variables: &[(&str, String)]) -> Vec<Child> {
        let port = worlds::free_port().to_string();
        let rank = |rank: usize| {
            let mut program = program();
            program.env("RANK", rank.to_string()).env("WORLD_SIZE", RANKS.to_string());
            program.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env(FOLDER, folder);
            program.envs(variables.iter().map(|(name, value)| (name, value)));
            program.stdout(Stdio::piped()).stderr(Stdio::piped());
            program.spawn().expect("it can be started")
        };
        (0..RANKS).map(rank).collect()
    }

    /// How they end, all of them.
    fn finish(children: Vec<Child>) -> Vec<Output> {
        children.into_iter().map(|child| child.wait_with_output().expect("it ends")).collect()
    }

    fn text(output: &[u8]) -> String {
        String::from_utf8_lossy(output).into_owned()
    }

    /// What every rank has at the end, which is the same.
    fn trained(folder: &Path, ranks: usize) -> Vec<u8> {
        let weights: Vec<_> = (0..ranks)
            .map(|rank| fs::read(folder.join(format!("weights-{rank}"))).unwrap())
            .collect();
        assert!(weights.iter().all(|own| *own == weights[0]), "the ranks agree");
        weights.into_iter().next().expect("there are ranks")
    }

    /// What threads of one process make of it.
    fn expected() -> Vec<u8> {
        let devices = vec![Device::default().autodiff(); RANKS];
        let trained = World::threads(devices, |world| {
            let mut net = Net::new(world.device());
            let mut optim = config().init(&world, &net)?;
            for step in 0..STEPS {
                let gradients = gradients(&net, step);
                net = optim.step(0.01, net, gradients)?;
            }
            Ok::<_, distmuon::Error>(weights(&net).concat())
        });
        trained.unwrap().swap_remove(0)
    }

    fn processes_train_and_go_on() {
        let folder = tempfile::tempdir().unwrap();
        for output in finish(start(folder.path(), &[])) {
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
        assert!(trained(folder.path(), RANKS) == expected(), "as threads do, bit by bit");
    }

    fn a_killed_rank_is_named_by_all() {
        // In the start, in the middle of steps, and in saves.
        for at in [0, 2, 5, 11, 17, 23, 31, 40, 52] {
            let folder = tempfile::tempdir().unwrap();
            let begin = Instant::now();
            let outputs = finish(start(folder.path(), &[(KILLED_AT, at.to_string())]));
            assert!(begin.elapsed() < DEADLINE, "event {at}: nobody waited for the deadline");
            for (rank, output) in outputs.iter().enumerate() {
                let said = text(&output.stderr);
                if rank == VICTIM {
                    assert_eq!(output.status.signal(), Some(9), "event {at}: {said}");
                } else {
                    assert_eq!(output.status.code(), Some(3), "event {at}, rank {rank}: {said}");
                    assert!(said.contains("rank 1 failed"), "event {at}, rank {rank}: {said}");
                }
            }
            // All start again, from the last checkpoint, and end as if nothing had been.
            for output in finish(start(folder.path(), &[])) {
                assert!(output.status.success(), "event {at}: {}", text(&output.stderr));
            }
            assert!(trained(folder.path(), RANKS) == expected(), "event {at}");
        }
    }

    fn torchrun_starts_them() {
        let folder = tempfile::tempdir().unwrap();
        let mut torchrun = Command::new("torchrun");
        torchrun.args(["--no-python", "--standalone", "--nproc-per-node", &RANKS.to_string()]);
        let own = std::env::args_os().next().expect("a program has a name");
        torchrun.arg(own).env(FOLDER, folder.path()).env("RAYON_NUM_THREADS", "1");
        match torchrun.output() {
            Ok(output) => {
                assert!(output.status.success(), "{}", text(&output.stderr));
                assert!(trained(folder.path(), RANKS) == expected());
            }
            Err(_) => println!("skipped: there is no torchrun"),
        }
    }

    /// One process that can't join says why, in words that help.
    fn what_is_missing_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().to_str().expect("a plain path");
        let elsewhere = without_test_library();
        let full = [
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "0"),
        ];
        type Variables<'a> = &'a [(&'a str, &'a str)];
        let cases: [(Variables<'_>, &[&str]); 4] = [
            (&[("RANK", "0")], &["WORLD_SIZE is not set"]),
            (&[("RANK", "0"), ("WORLD_SIZE", "1")], &["MASTER_ADDR is not set", "free port"]),
            (
                &[&full[..], &[("DISTMUON_TEST_NCCL_VERSION", "20403")]].concat(),
                &["NCCL is too old", "NCCL 2.4.3", "2.18"],
            ),
            (
                &[&full[..], &[("DISTMUON_NCCL_PATH", empty), ("LD_LIBRARY_PATH", &elsewhere)]]
                    .concat(),
                &["NCCL was not found", "libnccl.so.2", "DISTMUON_NCCL_PATH", empty],
            ),
        ];
        for (variables, said) in cases {
            let mut program = program();
            program.env(FOLDER, folder.path()).envs(variables.iter().copied());
            if said[0] == "NCCL was not found" && system_has_nccl() {
                println!("skipped: this system has NCCL");
                continue;
            }
            let output = program.output().unwrap();
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{error}");
            for said in said {
                assert!(error.contains(said), "{said:?} is not in: {error}");
            }
        }
    }

    /// Where libraries are looked for, but for the folder that cargo puts the test library in.
    fn without_test_library() -> String {
        let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&folders);
        let others = folders.filter(|folder| !folder.join("libnccl.so").exists());
        let others = std::env::join_paths(others).expect("they were joined before");
        others.into_string().expect("plain paths")
    }

    fn system_has_nccl() -> bool {
        // SAFETY: NCCL's initialisers do nothing but register.
        unsafe { libloading::Library::new("libnccl.so.2").is_ok() }
    }

    /// Two hosts of two ranks each, over MPI and a link that can be cut.
    #[cfg(feature = "mpi")]
    mod hosts {
        use distmuon::Error;

        use super::*;
        use crate::worlds::mpi::ROOT;

        /// How long a rank is waited for; who is cut off hears nothing else.
        pub const DEADLINE: Duration = Duration::from_secs(4);
        const RANKS: usize = 4;
        const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
        const NETWORK: &str = "10.213.77.0/24";

        const TAKEN_ALONG: [&str; 7] = [
            "MASTER_ADDR",
            "MASTER_PORT",
            FOLDER,
            PAUSE,
            "RAYON_NUM_THREADS",
            "LD_LIBRARY_PATH",
            "BURN_DEVICE",
        ];

        /// Two network namespaces with a link between them.
        struct Hosts {
            names: [String; 2],
        }

        fn ip(arguments: &str) -> bool {
            let ip = Command::new("ip").args(arguments.split(' ')).output();
            ip.is_ok_and(|output| output.status.success())
        }

        impl Hosts {
            /// Nothing where this is not permitted.
            fn new() -> Option<Self> {
                let own = std::process::id();
                let names = ["a", "b"].map(|host| format!("distmuon-{own}-{host}"));
                let hosts = Self { names };
                let [a, b] = &hosts.names;
                let link = format!("link add dm-a netns {a} type veth peer name dm-b netns {b}");
                let made =
                    ip(&format!("netns add {a}")) && ip(&format!("netns add {b}")) && ip(&link);
                let [first, second] = ADDRESSES;
                let ready = made
                    && ip(&format!("-n {a} addr add {first}/24 dev dm-a"))
                    && ip(&format!("-n {b} addr add {second}/24 dev dm-b"))
                    && hosts.names.iter().all(|host| ip(&format!("-n {host} link set lo up")))
                    && ip(&format!("-n {b} link set dm-b up"));
                (ready && hosts.set_link("up")).then_some(hosts)
            }

            fn set_link(&self, state: &str) -> bool {
                ip(&format!("-n {} link set dm-a {state}", self.names[0]))
            }

            /// The ranks as mpirun on the first host starts them on both.
            fn start(&self, folder: &Path) -> Child {
                // What mpirun has instead of ssh: it is told a host, and what to run there.
                let [a, b] = &self.names;
                let agent = folder.join("agent");
                let script = format!(
                    "#!/bin/sh\nshift\nexec ip netns exec {b} unshare --uts sh -c \"hostname b; $*\"\n"
                );
                fs::write(&agent, script).unwrap();
                let executable = Command::new("chmod").arg("+x").arg(&agent).status();
                assert!(executable.is_ok_and(|done| done.success()));
                let own = std::env::args_os().next().expect("a program has a name");
                let [first, second] = ADDRESSES;
                let mpirun = format!(
                    "hostname a; exec mpirun --mca plm_rsh_agent {} -H {first}:2,{second}:2 --bind-to none \
                     --mca btl self,tcp --mca btl_tcp_if_include {NETWORK} \
                     --mca oob_tcp_if_include {NETWORK} {} {}",
                    agent.display(),
                    // What the other host has to know.
                    TAKEN_ALONG.map(|name| format!("-x {name}")).join(" "),
                    Path::new(&own).display(),
                );
                let mut command = Command::new("ip");
                command.args(["netns", "exec", a, "unshare", "--uts", "sh", "-c"]).arg(mpirun);
                for (name, value) in [
                    ("MASTER_ADDR", first.to_owned()),
                    ("MASTER_PORT", worlds::free_port().to_string()),
                    (FOLDER, folder.display().to_string()),
                    (PAUSE, "200".to_owned()),
                    ("RAYON_NUM_THREADS", "1".to_owned()),
                ] {
                    command.env(name, value);
                }
                command.envs(ROOT).stdout(Stdio::piped()).stderr(Stdio::piped());
                command.spawn().expect("it can be started")
            }

            /// Ends whatever runs there.
            fn clear(&self) {
                for host in &self.names {
                    let pids = Command::new("ip").args(["netns", "pids", host]).output();
                    let pids = pids.map(|output| text(&output.stdout)).unwrap_or_default();
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

        /// Rests after a step, and tells of it.
        pub fn rest(folder: &Path, step: u64) {
            if let Some(pause) = std::env::var(PAUSE).ok().and_then(|pause| pause.parse().ok()) {
                fs::write(folder.join("step"), step.to_string()).expect("the folder is there");
                thread::sleep(Duration::from_millis(pause));
            }
        }

        /// Leaves a rank's last words where the test finds them, whatever mpirun does to it then.
        pub fn report(folder: &Path, error: &Error) {
            if std::env::var_os(PAUSE).is_some() {
                let rank = Launch::from_env().map_or(0, |launch| launch.rank);
                let kind = match error {
                    Error::PeerFailed { .. } => "PeerFailed",
                    _ => "other",
                };
                let path = folder.join(format!("error-{rank}"));
                fs::write(&path, format!("{kind}: {error}")).expect("the folder is there");
                thread::sleep(Duration::from_secs(2));
            }
        }

        fn succeed(hosts: &Hosts, folder: &Path) -> (String, Vec<u8>) {
            let output = hosts.start(folder).wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
            (text(&output.stdout), trained(folder, RANKS))
        }

        pub fn lose_each_other_and_go_on_later() {
            if Command::new("mpirun").arg("--version").output().is_err() {
                return println!("skipped: there is no mpirun");
            }
            let Some(hosts) = Hosts::new() else {
                return println!("skipped: network namespaces are not permitted");
            };
            let undisturbed = tempfile::tempdir().unwrap();
            let (described, expected) = succeed(&hosts, undisturbed.path());
            assert!(described.contains("4 ranks over mpi"), "{described}");
            assert!(described.contains(", 2 nodes"), "shares go inside hosts first: {described}");

            let folder = tempfile::tempdir().unwrap();
            let mut mpirun = hosts.start(folder.path());
            let wait_for = |what: &str, done: &dyn Fn() -> bool| {
                let start = Instant::now();
                while !done() {
                    assert!(start.elapsed() < Duration::from_secs(60), "no {what}");
                    thread::sleep(Duration::from_millis(5));
                }
                start.elapsed()
            };
            wait_for("second step", &|| {
                fs::read_to_string(folder.path().join("step")).is_ok_and(|step| step == "2")
            });
            assert!(hosts.set_link("down"));
            let error =
                |rank: usize| fs::read_to_string(folder.path().join(format!("error-{rank}")));
            let waited =
                wait_for("error on every rank", &|| (0..RANKS).all(|rank| error(rank).is_ok()));
            println!("all ranks had reported {waited:?} after the cut");
            assert!(waited < 3 * DEADLINE, "{waited:?}");
            for rank in 0..RANKS {
                let error = error(rank).unwrap();
                println!("rank {rank}: {error}");
                // Each side misses the other: rank 0 is here for two of them, and there for two.
                assert!(error.starts_with("PeerFailed: "), "rank {rank}: {error}");
                let other = if rank < 2 {
                    ["rank 2 failed", "rank 3 failed"]
                } else {
                    ["rank 0 failed"; 2]
                };
                assert!(other.iter().any(|other| error.contains(other)), "rank {rank}: {error}");
            }
            hosts.clear();
            mpirun.wait().unwrap();

            assert!(hosts.set_link("up"));
            let (_, resumed) = succeed(&hosts, folder.path());
            assert!(resumed == expected, "as if the link had not been cut, bit by bit");
        }
    }
}
