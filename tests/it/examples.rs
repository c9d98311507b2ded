//! The small programs of `examples/`, each with a claim about what it prints.

use std::env::consts::EXE_SUFFIX;
use std::process::Command;

#[cfg(feature = "mpi")]
use distmuon_testing::mpirun;

/// The program of an example, which cargo builds before the tests.
pub fn command(example: &str) -> Command {
    // Cargo puts tests into `deps` and examples into `examples`, both in the folder of a profile.
    // The first argument and not the path of the process, which is that of the loader if a
    // loader starts the test.
    let test = std::env::args_os().next().expect("the first argument is the program");
    let test = std::path::absolute(test).expect("the program has a path");
    let profile = test.ancestors().nth(2).expect("the program is in a folder of cargo");
    let program = profile.join("examples").join(format!("{example}{EXE_SUFFIX}"));
    assert!(
        program.exists(),
        "{} is missing: expected the example; build it by `cargo build -p distmuon --example \
         {example}` with the profile and the features of this test",
        program.display()
    );
    let mut command = Command::new(program);
    command.env_remove("RUST_LOG").env_remove("RUST_BACKTRACE");
    command
}

/// The lines that an example prints.
fn lines(example: &str, arguments: &[&str]) -> Vec<String> {
    let output = command(example).args(arguments).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{example}: {}: {stderr}", output.status);
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// The number behind a text, in the line that has it.
fn number(lines: &[String], text: &str) -> f64 {
    let rest = lines.iter().find_map(|line| Some(line.split_once(text)?.1));
    let word = rest.and_then(|rest| rest.split([' ', ',']).find(|word| !word.is_empty()));
    let number = word.and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no number after {text:?} in {lines:?}"))
}

/// The lines of losses, in the order of the steps.
fn losses(lines: &[String]) -> Vec<&String> {
    lines.iter().filter(|line| line.starts_with("step")).collect()
}

#[test]
fn one_device_and_ranks_and_divided_parameters_print_the_same_losses() {
    let alone = lines("minimal", &[]);
    let (first, last) = (number(&alone, "step 1: loss"), number(&alone, "step 40: loss"));
    assert!(last < 0.5 * first, "{alone:?}");
    // The page that shows them, to rounding on another processor.
    let page = include_str!("../../docs/guide/ranks.md").lines().map(str::to_owned);
    let page: Vec<String> = page.collect();
    for (step, loss) in [("step 1: loss", first), ("step 40: loss", last)] {
        assert!((number(&page, step) - loss).abs() < 1e-3, "{step}: {loss}");
    }
    for example in ["ranks", "layout"] {
        for ranks in ["1", "2", "3"] {
            let several = lines(example, &[ranks]);
            assert_eq!(losses(&several), losses(&alone), "{example} {ranks}");
        }
    }
}

#[cfg(feature = "mpi")]
#[test]
fn a_program_for_threads_runs_on_the_processes_of_a_launcher() {
    if !mpirun::is_there() {
        return;
    }
    let mut mpirun = mpirun::mpirun(2);
    mpirun.arg(command("layout").get_program());
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let several: Vec<String> =
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert_eq!(losses(&several), losses(&lines("minimal", &[])), "{output:?}");
    assert!(number(&several, "rank 1:") > 0.0, "{several:?}");

    // The launcher's number of ranks counts, not the program's.
    let mut mpirun = mpirun::mpirun(3);
    mpirun.arg(command("ranks").get_program()).arg("2");
    let output = mpirun::output(mpirun).expect("mpirun runs");
    let three: Vec<String> =
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    assert!(number(&three, "rank 2:") > 0.0, "{three:?}");
}

#[test]
fn a_layout_divides_the_parameters() {
    let whole = 4.0 * (2.0 * 16.0 * 64.0 + 64.0 + 16.0);
    assert_eq!(number(&lines("minimal", &[]), "rank 0:"), whole);
    assert_eq!(number(&lines("ranks", &["2"]), "rank 1:"), whole);
    // Every rank has the two biases, which are small, and its part of the two matrices.
    let divided = lines("layout", &["2"]);
    let bytes = ["rank 0:", "rank 1:"].map(|rank| number(&divided, rank));
    let sum: f64 = bytes.iter().sum();
    assert!(whole < sum && sum < 1.1 * whole, "{bytes:?} of {whole}");
}

/// The code of the `main` of a program, without indents.
fn main_of(program: &str) -> Vec<&str> {
    let start = program.find("fn main()").expect("a program has a main");
    let length = program[start..].find("\n}\n").expect("a function has an end");
    let main = &program[start..start + length + 2];
    let code = main.lines().map(|line| line.split(" //").next().unwrap_or_default().trim());
    code.filter(|line| !line.is_empty()).collect()
}

/// The least number of lines of two programs that are changed, added or taken away.
fn changed_lines(old: &[&str], new: &[&str]) -> usize {
    // A line changes into another one, or there is only one of the two.
    let mut of_prefixes: Vec<usize> = (0..=new.len()).collect();
    for (row, old) in old.iter().enumerate() {
        let mut diagonal = row;
        of_prefixes[0] = row + 1;
        for (column, new) in new.iter().enumerate() {
            let changed = diagonal + usize::from(old != new);
            diagonal = of_prefixes[column + 1];
            of_prefixes[column + 1] = changed.min(diagonal + 1).min(of_prefixes[column] + 1);
        }
    }
    of_prefixes[new.len()]
}

#[test]
fn three_lines_of_a_learner_name_its_ranks() {
    let learner = main_of(include_str!("../../examples/learner.rs"));
    let of_ranks = |line: &&&str| ["World::", "DistMuon"].iter().any(|name| line.contains(name));
    assert_eq!(learner.iter().filter(of_ranks).count(), 3, "{learner:?}");
}

/// Fails unless the first diff of a page has all lines in which two programs differ.
fn assert_shown(page: &str, old: &[&str], new: &[&str]) {
    let (_, diff) = page.split_once("```diff\n").expect("the page has a diff");
    let (diff, _) = diff.split_once("```").expect("a block has an end");
    let marked = |mark: char| diff.lines().filter_map(move |line| line.strip_prefix(mark));
    let without = |program: &[&str], mark| {
        let mut rest = program.iter().map(|line| line.to_string()).collect::<Vec<_>>();
        for line in marked(mark) {
            let found = rest.iter().position(|other| other == line.trim());
            rest.remove(found.unwrap_or_else(|| panic!("not in the program: {line}")));
        }
        rest
    };
    let kept = without(old, '-');
    assert_eq!(kept, without(new, '+'));
    let shown = marked(' ').all(|line| kept.iter().any(|other| other == line.trim()));
    assert!(shown, "{diff}");
}

#[test]
fn three_lines_lead_from_one_device_to_ranks_and_three_to_divided_parameters() {
    let [alone, ranks, divided] = [
        include_str!("../../examples/minimal.rs"),
        include_str!("../../examples/ranks.rs"),
        include_str!("../../examples/layout.rs"),
    ]
    .map(main_of);
    assert!(alone.len() > 15, "{alone:?}");
    assert_eq!(changed_lines(&alone, &ranks), 3);
    assert_eq!(changed_lines(&ranks, &divided), 3);
    let page = include_str!("../../docs/guide/ranks.md");
    let program = include_str!("../../examples/minimal.rs");
    let (_, program) = program.split_once("\n\n").expect("a program has a first comment");
    assert!(page.contains(program), "the guide has another program");
    assert_shown(page, &alone, &ranks);
    assert_shown(include_str!("../../docs/guide/large-models.md"), &ranks, &divided);
    // The count itself.
    assert_eq!(changed_lines(&["a", "b", "c"], &["a", "d", "c", "e"]), 2);
    assert_eq!(changed_lines(&["a", "b", "c"], &["c"]), 2);
}

#[cfg(feature = "train")]
#[test]
fn the_learner_trains() {
    let lines = lines("learner", &[]);
    let (before, after) = (number(&lines, "loss:"), number(&lines, "before,"));
    assert!(after < 0.5 * before, "{lines:?}");
}

#[test]
fn masters_keep_small_steps_of_weights_in_half_precision() {
    let lines = lines("mixed_precision", &[]);
    let float32 = number(&lines, "in float32:");
    let [with, without] = ["float32 masters:", "without masters:"].map(|text| number(&lines, text));
    assert!((with - float32).abs() < 0.1 * (without - float32), "{lines:?}");
}

#[test]
fn a_resumed_run_ends_with_the_bits_of_one_without_a_break() {
    let folder = tempfile::tempdir().unwrap();
    let run = |file: &str, steps| {
        let path = folder.path().join(file);
        lines("resume", &[path.to_str().unwrap(), steps])
    };
    let start = run("broken.bpk", "20");
    let resumed = run("broken.bpk", "40");
    assert_eq!(resumed[0], "resumed at step 20");
    let whole = run("whole.bpk", "40");
    assert_eq!(resumed[1..], whole);
    assert!(number(&whole, "step 40: loss") < number(&start, "step 20: loss"));
}

#[test]
fn a_run_comes_back_from_a_file_of_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let [run, file, back] = ["run.bpk", "run.safetensors", "back.bpk"].map(path);
    lines("resume", &[&run, "20"]);
    for (arguments, problem) in [
        (vec!["export", &*run, &*file, "dion"], "dion's momentum is a sum"),
        (vec!["import", &*file, &*back, "many"], "STEPS is no number"),
        (vec!["export"], "the arguments are wrong"),
    ] {
        let refused = command("convert").args(arguments).output().unwrap();
        assert_eq!(refused.status.code(), Some(2));
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.starts_with(problem), "{text}");
    }
    for implementation in ["torch", "keller-jordan"] {
        assert_eq!(
            lines("convert", &["export", &run, &file, implementation]),
            ["exported step 20"]
        );
        let imported = lines("convert", &["import", &file, &back, "20", implementation]);
        assert_eq!(imported, ["imported step 20"]);
        let continued = lines("resume", &[&back, "40"]);
        assert_eq!(continued[0], "resumed at step 20");
        let whole = lines("resume", &[&path("whole.bpk"), "40"]);
        let losses = [&continued, &whole].map(|lines| number(lines, "step 40: loss"));
        assert!((losses[0] - losses[1]).abs() < 1e-4 * losses[1], "{losses:?}");
        std::fs::remove_file(path("whole.bpk")).unwrap();
    }
}
