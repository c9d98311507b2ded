//! Estimates of memory and time on the command line.

use super::{folder, rejected, succeed};

/// The bytes of a kind on the rank with the most memory.
fn bytes(table: &str, kind: &str) -> usize {
    let row =
        table.lines().find(|line| line.split('|').nth(1).is_some_and(|cell| cell.trim() == kind));
    let cell = row.and_then(|row| row.split('|').nth(3)?.trim().parse().ok());
    cell.unwrap_or_else(|| panic!("no {kind} in {table}"))
}

#[test]
fn an_estimate_is_what_a_run_reports() {
    let folder = folder();
    for (ranks, options) in [
        (1, ""),
        (2, ""),
        (4, " --owned dp"),
        (4, " --rows dp"),
        (2, " --overlap=false"),
        (2, " --dtype bf16"),
        (2, " --states int8"),
    ] {
        let estimate = format!("--estimate ranks={ranks} --optimizer dist-muon{options}");
        let estimate = succeed(folder.path(), &estimate);
        let run =
            "--data text.rs --batch 4 --steps 1 --eval-every 0 --sample 0 --optimizer dist-muon";
        let run = succeed(folder.path(), &format!("{run} --ranks {ranks}{options}"));
        // The report of rank 0: kind, now, peak.
        let report = |kind: &str| -> usize {
            let is_kind =
                |line: &&str| line.split('|').nth(1).is_some_and(|cell| cell.trim() == kind);
            let rows = run.lines().filter(is_kind).filter_map(|row| row.split('|').nth(2));
            let mut rows = rows.filter_map(|cell| cell.trim().parse().ok());
            rows.next().unwrap_or_else(|| panic!("no {kind} in {run}"))
        };
        for kind in ["parameters", "master weights", "states"] {
            let (least, most) = (least(&estimate, kind), bytes(&estimate, kind));
            let now = report(kind);
            assert!((least..=most).contains(&now), "{options}, {kind}: {now}\n{estimate}");
        }
    }
}

/// The bytes of a kind on the rank with the least or the most, whichever is less.
fn least(table: &str, kind: &str) -> usize {
    let row =
        table.lines().find(|line| line.split('|').nth(1).is_some_and(|cell| cell.trim() == kind));
    let cells =
        row.unwrap().split('|').skip(2).filter_map(|cell| cell.trim().parse::<usize>().ok());
    cells.min().unwrap()
}

#[test]
fn large_models_are_estimated_on_ranks_that_are_not_there() {
    let folder = folder();
    let depth = "--depth 20 --vocabulary 65536 --dtype bf16 --master stochastic";
    let replicated = succeed(folder.path(), &format!("{depth} --estimate ranks=8 --overlap"));
    assert!(replicated.contains("depth 20,") && replicated.contains("ranks: 8"), "{replicated}");
    let matrices = 20 * 12 * 1280 * 1280;
    let parameters = bytes(&replicated, "parameters");
    assert!(parameters / 2 > matrices + 2 * 65_536 * 1280, "{replicated}");
    let owned = format!("{depth} --estimate ranks=16,nodes=2 --owned gpu");
    let owned = succeed(folder.path(), &owned);
    // The parts of 8 ranks, and small parameters on all.
    assert!(bytes(&owned, "parameters") < parameters / 6, "{owned}");
    assert!(owned.lines().all(|line| line.len() <= 80), "{owned}");
}

#[test]
fn a_vocabulary_decides_on_the_parameters_of_a_depth() {
    let folder = folder();
    for (depth, vocabulary, millions) in [
        (20, "", 394),
        (20, " --vocabulary 50304", 522),
        (20, " --vocabulary 65536", 561),
        (16, " --vocabulary 32768", 268),
    ] {
        let arguments = format!("--depth {depth}{vocabulary} --dtype f32 --estimate ranks=1");
        let estimate = succeed(folder.path(), &arguments);
        let parameters = bytes(&estimate, "parameters") / 4;
        assert_eq!((parameters + 500_000) / 1_000_000, millions, "{arguments}: {estimate}");
    }
}

/// The milliseconds of a part of an iteration.
fn milliseconds(output: &str, part: &str) -> f64 {
    let row = output.lines().find(|line| line.contains(part));
    let cell = row.and_then(|row| row.split('|').nth(2)?.trim().parse().ok());
    cell.unwrap_or_else(|| panic!("no {part} in {output}"))
}

#[test]
fn an_estimate_has_the_time_of_a_step_at_assumed_rates() {
    let folder = folder();
    let estimate = |more: &str| {
        succeed(folder.path(), &format!("--estimate ranks=8,nodes=2 --batch 64{more}"))
    };
    let usual = estimate("");
    let expected = "assumed: 8192 tokens a step, 0 MB of activations in sums,\n400 TFLOP/s in \
                    products, 375 GB/s of parameters in AdamW,\nlinks of 450 GB/s and 10 us inside \
                    nodes and 50 GB/s and 10 us between them";
    assert!(usual.contains(expected), "{usual}");
    let free = " --assume node-gb=1e12,link-gb=1e12,latency-us=0";
    let [slow, fast] =
        ["1", "2"].map(|rate| estimate(&format!("{free},tflops={rate},adamw-gb=1e9")));
    let step = |output: &str| milliseconds(output, "an iteration");
    // Nothing but operations takes time.
    assert!((step(&slow) / step(&fast) - 2.0).abs() < 1e-3, "{slow}\n{fast}");
    assert_eq!(milliseconds(&slow, "messages, one"), 0.0, "{slow}");
    // Passes: 6 operations for each parameter and token, on 8 ranks of 10^12 a second.
    let elements = bytes(&slow, "parameters") as f64 / 4.0;
    let passes = 6.0 * elements * 8192.0 / 8.0 / 1e9;
    assert!((1.0..1.5).contains(&(step(&slow) / passes)), "{slow}");
    let links = estimate(" --assume link-gb=0.1");
    assert!(
        milliseconds(&links, "messages, one") > 10.0 * milliseconds(&usual, "messages, one"),
        "{links}"
    );
    // Two sums in each of 4 layers and either pass, of 32 x 128 tokens for 4 ranks, by 128.
    let slices = succeed(folder.path(), "--estimate ranks=8 --batch 64 --mesh dp=2,tp=4");
    let megabytes = 4.0 * 4.0 * 32.0 * 128.0 * 128.0 * 4.0 / 1e6;
    assert!(slices.contains(&format!("{megabytes} MB of activations")), "{slices}");
}

#[test]
fn estimates_of_what_no_run_can_do_are_rejected() {
    let folder = folder();
    for (arguments, expected) in [
        ("--estimate 8", "it must be ranks=RANKS, or ranks=RANKS,nodes=NODES"),
        ("--estimate ranks=8,racks=2", "it must be ranks=RANKS"),
        ("--estimate nodes=2", "it must be ranks=RANKS"),
        ("--estimate ranks=many", "ranks"),
        ("--estimate ranks=0", "`ranks` is invalid: expected at least 1, got 0"),
        (
            "--estimate ranks=8,nodes=3",
            "`nodes` is invalid: expected a divisor of the number of ranks, got 3 for 8 ranks",
        ),
        ("--estimate ranks=8 --owned gpu", "axis `gpu` of a mesh with `dp`"),
        ("--estimate ranks=8 --rows gpu", "`rows` is invalid"),
        ("--estimate ranks=8 --rows dp --owned dp", "cannot be used with"),
        ("--estimate ranks=8 --mesh dp=4", "`mesh` is invalid"),
        ("--estimate ranks=3 --mesh tp=3", "heads of attention can't be divided among 3"),
        ("--estimate ranks=2 --optimizer muon", "trains on one rank"),
        (
            "--estimate ranks=1 --optimizer adamw",
            "--estimate forecasts dist-muon and dist-adamw, not --optimizer adamw; name one of",
        ),
        ("--estimate ranks=1 --optimizer burn-muon", "not --optimizer burn-muon; name one of them"),
        ("--estimate ranks=1 --optimizer muon", "not --optimizer muon; name one of them"),
        ("--estimate ranks=2 --optimizer dist-adamw --soap mlp", "--soap is for muon, dist-muon"),
        ("--estimate ranks=2 --soap nothing", "nothing"),
        ("--estimate ranks=2 --average from=400,span=9", "begins after step 400 of 300"),
        ("--estimate ranks=2 --ranks 4", "cannot be used with"),
        ("--estimate ranks=2 --engine mpi", "cannot be used with"),
        ("--estimate ranks=3", "--batch 16 can't be divided among 3 ranks; give a multiple of 3"),
        (
            "--estimate ranks=8 --accumulate 4",
            "--batch 16 can't be divided among 8 ranks in 4 parts each; give a multiple of 32",
        ),
        ("--estimate ranks=8 --ahead-mb 1", "--ahead-mb limits what --owned and --rows gather"),
        ("--estimate ranks=8 --in-flight-mb 1 --overlap=false", "leave --overlap=false out"),
        ("--estimate ranks=8 --keep weights", "--keep says what is kept of weights"),
        ("--estimate ranks=2 --costs measured", "`costs` is invalid: expected `Operations`"),
        ("--estimate ranks=2 --owned dp --costs measured", "(a forecast measures nothing)"),
        ("--estimate ranks=2 --resume run.bpk", "cannot be used with"),
        ("--estimate ranks=2 --assume flops=4", "it must be NAME=NUMBER, with the names tflops"),
        ("--estimate ranks=2 --assume tflops=0", "it must be a positive number"),
        ("--assume tflops=1", "--estimate <ranks=NUMBER,..>"),
    ] {
        rejected(folder.path(), arguments, expected);
    }
}
