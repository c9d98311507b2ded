//! Comparisons of optimizers, recipes, ranks and seeds.

use std::fs;

use super::{cell, curve, folder, rejected, succeed, texts};

#[test]
fn comparisons_print_and_plot_every_optimizer() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 8 --eval-every 2 --sample 0 --log run.jsonl";
    let stdout = succeed(folder.path(), &format!("{flags} --compare adamw,muon --plot loss.svg"));
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    let texts = texts(&plot);
    assert!(texts.contains(&"preset tiny, 8 steps of 1 x 128 tokens"), "{texts:?}");
    for optimizer in ["adamw", "muon"] {
        let loss = cell(&stdout, optimizer, "final loss");
        assert!(loss.parse::<f64>().is_ok_and(|loss| loss > 0.0), "{stdout}");
        let is_curve = |text: &&str| text.starts_with(optimizer) && text.ends_with(loss);
        assert!(texts.iter().any(is_curve), "no {optimizer} with {loss} in {texts:?}");
    }
    let start = 256f64.ln(); // about what a model loses that has learnt nothing
    let losses: Vec<f64> = texts
        .iter()
        .filter(|text| text.contains('.'))
        .filter_map(|text| text.parse().ok())
        .collect();
    assert!(losses.len() > 1 && losses.iter().all(|loss| *loss < start - 0.5), "{losses:?}");
}

#[test]
fn comparisons_include_every_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 2 --eval-every 1 --sample 0";
    let compare = "--compare muon,dist-muon --ranks 1,2 --plot loss.svg";
    let stdout = succeed(folder.path(), &format!("{flags} {compare}"));
    assert!(stdout.contains("2 ranks over threads\n"), "{stdout}");
    let losses = ["muon", "dist-muon", "dist-muon x2"].map(|run| {
        let loss: f64 = cell(&stdout, run, "final loss").parse().unwrap();
        loss
    });
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 2e-4), "{losses:?}");
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    assert!(
        texts(&plot).iter().any(|text| text.starts_with("dist-muon x2, lr")),
        "no curve of two ranks in the plot"
    );
}

#[test]
fn recipes_train_on_any_number_of_ranks_and_are_saved() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 3 --eval-every 1 --sample 0";
    let arguments = format!("{flags} --compare muon,nanochat --ranks 1,2");
    let stdout = succeed(folder.path(), &arguments);
    let loss = |run| cell(&stdout, run, "final loss").parse::<f64>().expect("a number");
    assert!((loss("nanochat") - loss("nanochat x2")).abs() < 2e-4, "{stdout}");
    assert!((loss("nanochat") - loss("muon")).abs() > 1e-3, "{stdout}");
    assert_eq!(cell(&stdout, "nanochat", "lr"), "2.0e-2");

    succeed(folder.path(), &format!("{flags} --recipe nanochat --save run.bpk"));
    let losses = curve(&folder.path().join("run.bpk"));
    assert_eq!(format!("{:.4}", losses[3].1.unwrap()), format!("{:.4}", loss("nanochat")));
    let resume = "--resume run.bpk --steps 4 --sample 0";
    rejected(folder.path(), &format!("{resume} --recipe torch"), "torch (saved: nanochat)");
    let stdout = succeed(folder.path(), &format!("{resume} --ranks 2"));
    assert_eq!(cell(&stdout, "nanochat x2", "lr"), "2.0e-2");
}

#[test]
fn comparisons_repeat_every_run_with_every_seed() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 3 --eval-every 0 --sample 0";
    let seeds = "--compare adamw,muon --seeds 4,5 --plot loss.svg";
    let stdout = succeed(folder.path(), &format!("{flags} {seeds}"));
    for run in ["adamw", "muon"] {
        let loss = |column| cell(&stdout, run, column).parse::<f64>().expect("a number");
        let [four, five] = [loss("seed 4"), loss("seed 5")];
        assert!((loss("mean") - (four + five) / 2.0).abs() < 1.5e-4, "{stdout}");
        let alone = format!("{flags} --optimizer {run} --seed 5");
        let alone = succeed(folder.path(), &alone);
        assert_eq!(cell(&stdout, run, "seed 5"), cell(&alone, run, "final loss"));
        assert_ne!(four, five, "{stdout}");
    }
    assert_eq!(cell(&stdout, "adamw", "reached"), "3, 3");
    let plot = fs::read_to_string(folder.path().join("loss.svg")).unwrap();
    let curves = texts(&plot).iter().filter(|text| text.ends_with("mean of 2 seeds")).count();
    assert_eq!(curves, 2, "one curve per optimizer");
}
