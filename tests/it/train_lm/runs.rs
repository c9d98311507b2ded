//! Runs of one optimizer: their logs, curves and ends.

use std::fs;
use std::path::Path;

use super::{curve, folder, log, per_step, rejected, succeed, succeed_with_output, train_lm};

#[test]
fn a_diverged_run_can_be_continued() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 4 --eval-every 1 --sample 0 --lr 1e30";
    succeed(folder.path(), &format!("{flags} --save run.bpk"));
    let losses = curve(&folder.path().join("run.bpk"));
    assert!(losses.iter().any(|(_, loss)| loss.is_none_or(|loss| !loss.is_finite())), "{losses:?}");
    succeed(folder.path(), &format!("{flags} --resume run.bpk"));
}

#[test]
fn runs_that_skip_every_step_are_reported_and_ended() {
    let folder = folder();
    let flags = "--data text.rs --steps 40 --eval-every 4 --sample 0 --lr 1e30";
    // The error of ranks is that of a thread.
    for (name, more) in [("run.jsonl", "--batch 1"), ("ranks.jsonl", "--batch 2 --ranks 2")] {
        let arguments = format!("{flags} --log {name} {more}");
        fail_after_some_steps(folder.path(), &arguments, "so that nothing was learnt in them");
        let log = log(&folder.path().join(name));
        assert_eq!(log.last().unwrap()["end"], "diverged", "{more}");
        let step = log.last().unwrap()["step"].as_u64().unwrap();
        assert!((10..20).contains(&step), "{more}: {step}");
    }
}

/// The error and the skipped steps of a run that fails.
fn fail_after_some_steps(folder: &Path, arguments: &str, expected: &str) {
    let output = train_lm(folder, arguments).env("RUST_BACKTRACE", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{arguments}: the run ended without an error");
    assert!(!stderr.to_lowercase().contains("backtrace"), "{arguments}: {stderr}");
    let skipped = " 8/40: 43 parameters skipped 4 of 4 steps: gradients not finite";
    for expected in [expected, skipped, "start anew with a lower --lr than 1e30"] {
        assert!(stderr.contains(expected), "{arguments}: {expected:?} is not in {stderr}");
    }
    assert_eq!(stderr.matches("skipped").count(), 2, "reported once per validation: {stderr}");
}

#[test]
fn logs_contain_every_step_and_are_appended_to() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 2 --eval-every 1 --sample 0 --log run.jsonl";
    succeed(folder.path(), &format!("{flags} --save run.bpk"));
    let path = folder.path().join("run.jsonl");
    let first = log(&path);
    let with = |log: &[serde_json::Value], key: &str| -> Vec<serde_json::Value> {
        log.iter().filter_map(|record| record.get(key)).cloned().collect()
    };
    assert_eq!(first[0]["run"], "muon");
    assert_eq!(first[0]["settings"]["batch"], 1);
    assert_eq!(with(&first, "step"), [0, 1, 1, 2, 2, 2]);
    assert_eq!(with(&first, "loss").len(), 2);
    assert_eq!(with(&first, "lr"), [0.008, 0.0]);
    for key in ["tokens_per_second", "seconds"] {
        assert!(with(&first, key).iter().all(|number| number.as_f64() > Some(0.0)), "{first:?}");
    }
    let losses: Vec<f64> =
        with(&first, "validation_loss").iter().map(|loss| loss.as_f64().unwrap()).collect();
    let saved = curve(&folder.path().join("run.bpk"));
    assert_eq!(losses, saved[1..].iter().map(|(_, loss)| loss.unwrap()).collect::<Vec<_>>());
    assert_eq!(first.last().unwrap()["end"], "finished");

    succeed(folder.path(), "--resume run.bpk --steps 3 --sample 0 --log run.jsonl");
    let both = log(&path);
    assert_eq!(both[..first.len()], first);
    assert_eq!(with(&both, "loss").len(), 3);
}

#[test]
fn qk_clip_bounds_the_logits_on_any_number_of_ranks() {
    const TAU: f64 = 2.0;
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 12 --eval-every 0 --sample 0 --lr 0.03";
    let run = |name: &str, flags: &str| {
        let (_, stderr) = succeed_with_output(folder.path(), &format!("{flags} --log {name}"));
        (log(&folder.path().join(name)), stderr)
    };
    let (free, shown) = run("free.jsonl", &format!("{flags} --qk-clip 1e9"));
    let line = shown.lines().find(|line| line.starts_with("dist-muon 1/12: max logit "));
    assert!(line.is_some_and(|line| line.ends_with(", 0 heads clipped")), "{shown}");
    let (one, _) = run("one.jsonl", &format!("{flags} --qk-clip {TAU} --save run.bpk"));
    let (two, _) = run("two.jsonl", &format!("{flags} --qk-clip {TAU} --ranks 2"));
    let (parts, _) = run("parts.jsonl", &format!("{flags} --qk-clip {TAU} --accumulate 2"));

    let free_logits = per_step(&free, "max_logit");
    assert_eq!(free_logits.len(), 12);
    assert!(per_step(&free, "clipped_heads").iter().all(|heads| *heads == 0.0), "{free:?}");
    let (logits, heads) = (per_step(&one, "max_logit"), per_step(&one, "clipped_heads"));
    assert!(heads.iter().any(|heads| *heads > 0.0), "no head is clipped: {logits:?}");
    for (logit, heads) in logits.iter().zip(&heads) {
        assert_eq!(*heads > 0.0, *logit > TAU, "{logits:?}, {heads:?}");
    }
    let largest = |logits: &[f64]| logits.iter().copied().fold(f64::MIN, f64::max);
    assert!(largest(&logits) < 0.7 * largest(&free_logits), "{logits:?} and {free_logits:?}");
    for other in [two, parts] {
        for (other, logit) in per_step(&other, "max_logit").iter().zip(&logits) {
            assert!((other - logit).abs() < 1e-3 * logit, "{other:?} and {logits:?}");
        }
        assert_eq!(per_step(&other, "clipped_heads"), heads);
    }
    let (more, _) = run("run.jsonl", "--resume run.bpk --steps 13 --sample 0");
    assert_eq!(per_step(&more, "max_logit").len(), 1, "the setting is that of the checkpoint");
    rejected(folder.path(), "--resume run.bpk --qk-clip 3", "--qk-clip 3.0 (saved: 2.0)");
    rejected(
        folder.path(),
        "--data text.rs --qk-clip 0",
        "--qk-clip <TAU>': it must be a positive",
    );
}

#[test]
fn half_precision_trains_on_any_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --context 16 --batch 2 --steps 4 --eval-every 0 --sample 0";
    let losses = |name: &str, more: &str| {
        succeed(folder.path(), &format!("{flags} {more} --log {name} --diagnose-every 2"));
        let log = log(&folder.path().join(name));
        let observed: Vec<_> = log.iter().filter_map(|line| line.get("diagnostics")).collect();
        assert_eq!(observed.len(), 2, "{log:?}");
        for groups in observed {
            let muon = groups.as_array().unwrap().iter().find(|group| group["group"] == "Muon");
            assert!(muon.unwrap()["effective_lr"].as_f64().unwrap() > 0.0, "{groups}");
        }
        per_step(&log, "loss")
    };
    let wide = losses("wide.jsonl", "--dtype f32");
    for (half, worlds) in [
        ("--dtype bf16", &["--ranks 1", "--ranks 2", "--accumulate 2"][..]),
        ("--dtype bf16 --master mantissa", &["--ranks 2"]),
        ("--dtype bf16 --master none", &["--ranks 1"]),
        ("--dtype bf16 --master stochastic", &["--ranks 2"]),
        ("--dtype f16", &["--ranks 1", "--ranks 2", "--accumulate 2"]),
    ] {
        for world in worlds {
            for (half, wide) in losses("half.jsonl", &format!("{half} {world}")).iter().zip(&wide) {
                assert!((half - wide).abs() < 0.02 * wide, "{half} instead of {wide}");
            }
        }
    }
    let observed = "--diagnose-every 1 --plot a.svg";
    succeed(folder.path(), &format!("{flags} {observed} --qk-clip 0.5"));
    for quantity in [
        "effective-learning-rate",
        "update-norm",
        "weight-norm",
        "orthogonality-error",
        "skipped-steps",
        "clipped-heads",
        "maximum-logit",
    ] {
        let plot = folder.path().join(format!("a-{quantity}.svg"));
        let plot = fs::read_to_string(&plot).unwrap_or_else(|e| panic!("{quantity}: {e}"));
        assert!(plot.contains("dist-muon, Muon"), "{quantity}: {plot}");
    }
    let muon = "--data text.rs --dtype f16 --optimizer muon";
    rejected(folder.path(), muon, "--dtype f16 needs loss scaling");
    let mantissa = "--data text.rs --dtype f16 --master mantissa";
    rejected(folder.path(), mantissa, "bfloat16 parameters for `Mantissa`");
    let unseen = "--data text.rs --optimizer muon --diagnose-every 1";
    rejected(folder.path(), unseen, "--diagnose-every shows norms of dist-muon");
    let unseen = "--data text.rs --compare adamw,muon --diagnose-every 1";
    rejected(folder.path(), unseen, "--diagnose-every shows norms of dist-muon");
    let clipped = "--data text.rs --optimizer muon --dtype bf16 --qk-clip 2";
    rejected(folder.path(), clipped, "loses the digits of --master");
}

#[test]
fn audits_and_states_on_the_host_change_no_loss() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 3 --eval-every 0 --sample 0 --ranks 2";
    let losses = |more: &str| {
        let name = format!("run{more}.jsonl").replace(' ', "");
        succeed(folder.path(), &format!("{flags}{more} --log {name}"));
        let log = log(&folder.path().join(name));
        log.iter().filter_map(|line| line.get("loss").cloned()).collect::<Vec<_>>()
    };
    let plain = losses("");
    assert!(plain.len() >= 3, "{plain:?}");
    for more in [" --audit-every 1", " --audit-every 1 --bucket-mb 0.1", " --states-on host"] {
        assert_eq!(losses(more), plain, "{more}");
    }
    for (unseen, problem) in [
        ("--ranks 2 --audit-every 1 --overlap", "--audit-every compares parameters"),
        ("--ranks 2 --audit-every 1 --owned dp", "leave --owned, --rows, --overlap"),
        ("--ranks 2 --audit-every 1 --in-flight-mb 1", "with --audit-every; leave one"),
        ("--ranks 1 --audit-every 1", "audit_every"),
        ("--ranks 2 --bucket-mb 0", "a positive number"),
    ] {
        rejected(folder.path(), &flags.replace("--ranks 2", unseen), problem);
    }
}

#[test]
fn the_account_of_the_first_step_is_printed_and_logged() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 2 --eval-every 0 --sample 0 --account";
    let alone = "--ranks 1 --optimizer dist-muon";
    for (more, ranks) in [("--optimizer muon", 1), (alone, 1), ("--ranks 2", 2)] {
        let flags = format!("{flags} {more} --log account.jsonl");
        let (_, printed) = succeed_with_output(folder.path(), &flags);
        assert!(printed.contains("| Muon      |"), "{printed}");
        let log = log(&folder.path().join("account.jsonl"));
        let mut accounts = log.iter().filter_map(|line| line.get("account"));
        let groups = accounts.next().expect("the log has an account").as_array().unwrap();
        assert!(accounts.next().is_none(), "the first step has one");
        let muon = groups.iter().find(|group| group["updated_by"] == "Muon").unwrap();
        assert_eq!(muon["iterations"], muon["matrices"], "{more}");
        assert_eq!(muon["ranks"].as_array().unwrap().len(), ranks, "{more}");
        assert_eq!(muon["update_norm"].is_number(), more.contains("ranks"), "{more}: {muon}");
    }
    let settings = r#"--settings {"newton_schulz":{"steps":3}}"#;
    for recipe in ["torch", "kimi-k3"] {
        let flags = format!("{flags} --recipe {recipe} {settings}");
        let (_, printed) = succeed_with_output(folder.path(), &flags);
        assert!(printed.contains(", 3 steps, F32"), "{recipe}: {printed}");
    }
    let unseen = "--data text.rs --optimizer adamw --account";
    rejected(folder.path(), unseen, "--account shows steps of muon");
}

#[test]
fn accumulated_parts_follow_the_curve_of_the_whole_batch() {
    let folder = folder();
    let flags = "--data text.rs --context 16 --batch 4 --steps 4 --eval-every 0 --sample 0";
    let loss = |flags: &str| {
        succeed(folder.path(), &format!("{flags} --save run.bpk"));
        match curve(&folder.path().join("run.bpk"))[..] {
            [(4, Some(loss))] => loss,
            ref other => panic!("one validation, at the end, not {other:?}"),
        }
    };
    let whole = loss(flags);
    for parts in ["--accumulate 4", "--accumulate 2 --ranks 2"] {
        let accumulated = loss(&format!("{flags} {parts}"));
        assert!((accumulated - whole).abs() < 1e-4 * whole, "{parts}: {accumulated} and {whole}");
    }
}

#[test]
fn the_loss_curve_is_the_same_on_any_number_of_ranks() {
    let folder = folder();
    let flags = "--data text.rs --context 16 --batch 4 --steps 6 --eval-every 2 --sample 0";
    for optimizer in ["dist-muon", "dist-adamw"] {
        let curves = [1, 2, 4].map(|ranks| {
            let name = format!("{ranks}.bpk");
            let flags = format!("{flags} --optimizer {optimizer} --ranks {ranks} --save {name}");
            let stdout = succeed(folder.path(), &flags);
            assert!(stdout.contains("imbalance of cost"), "no plan in {stdout}");
            assert!(stdout.contains("gradient shards"), "no memory report in {stdout}");
            curve(&folder.path().join(name))
        });
        let losses = curves.map(|curve| {
            curve.into_iter().map(|(_, loss)| loss.expect("a number")).collect::<Vec<_>>()
        });
        assert!(losses[0].len() == 4 && losses[0][3] < losses[0][0], "it learns: {losses:?}");
        for other in &losses[1..] {
            for (step, (loss, alone)) in other.iter().zip(&losses[0]).enumerate() {
                let difference = (loss - alone).abs() / alone;
                assert!(difference < 1e-5, "{optimizer}, number {step}: {loss} and {alone}");
            }
        }
        // Four ranks can continue from a checkpoint of two.
        let more = format!("{flags} --optimizer {optimizer} --ranks 4 --resume 2.bpk");
        succeed(folder.path(), &more);
    }
}

#[test]
fn divided_models_print_the_losses_of_replicated_ones() {
    let folder = folder();
    let flags = "--data text.rs --context 16 --batch 4 --steps 5 --eval-every 2 --sample 4";
    let losses = |name: &str, more: &str| {
        let flags = format!("{flags} --log {name}.jsonl --save {name}.bpk {more}");
        let stdout = succeed(folder.path(), &flags);
        assert!(stdout.contains("gathered parameters"), "no memory report in {stdout}");
        let log = log(&folder.path().join(format!("{name}.jsonl")));
        let losses = [per_step(&log, "loss"), per_step(&log, "validation_loss")];
        assert_eq!(losses[0].len(), 5);
        (losses, curve(&folder.path().join(format!("{name}.bpk"))))
    };
    for (ranks, accumulate) in [(2, 1), (2, 2), (4, 1)] {
        let on = format!("--ranks {ranks} --accumulate {accumulate} --optimizer dist-muon");
        let expected = losses("replicated", &format!("{on} --overlap=false"));
        for more in [
            "",
            "--owned dp",
            "--owned dp --keep weights --ahead-mb 0 --in-flight-mb 0.01",
            "--rows dp",
            "--overlap",
            "--mesh node=2,gpu=RANKS --owned gpu --overlap",
        ] {
            let more = more.replace("RANKS", &(ranks / 2).to_string());
            let on = format!("{on} {more}");
            assert_eq!(losses("divided", on.trim_end()), expected, "{on}");
        }
    }
    // A checkpoint of a divided model continues on any ranks, in a process of its own.
    let resumed = |name: &str, ranks: &str| {
        let more = "--steps 9 --eval-every 2 --sample 0 --resume divided.bpk";
        succeed(folder.path(), &format!("--data text.rs {more} {ranks} --log {name}.jsonl"));
        let log = log(&folder.path().join(format!("{name}.jsonl")));
        [per_step(&log, "loss"), per_step(&log, "validation_loss")]
    };
    resumed("alone", "--ranks 1");
    let expected = resumed("resumed", "--ranks 2");
    for (name, layout) in [("owned", "--owned dp"), ("rows", "--rows dp"), ("overlap", "--overlap")]
    {
        assert_eq!(resumed(name, &format!("--ranks 2 {layout}")), expected, "{layout}");
    }
}

#[test]
fn slices_of_layers_train_as_whole_ones() {
    let folder = folder();
    let losses = |name: &str, more: &str| {
        let flags = format!(
            "--data text.rs --context 16 --batch 4 --eval-every 10 --sample 4 \
             --optimizer dist-muon --log {name}.jsonl --save {name}.bpk {more}"
        );
        let output = succeed(folder.path(), &flags);
        // A mesh says how many ranks there are.
        let ranks = [("--mesh dp=2,tp=2", "x4"), ("--ranks 2", "x2")];
        if let Some((_, ranks)) = ranks.iter().find(|(flag, _)| more.contains(flag)) {
            assert!(output.contains(&format!("dist-muon {ranks}")), "{more}: {output}");
        }
        let log = log(&folder.path().join(format!("{name}.jsonl")));
        [per_step(&log, "loss"), per_step(&log, "validation_loss")].concat()
    };
    for (more, count) in [("--steps 20", 20 + 2), ("--steps 5 --qk-clip 1", 5 + 1)] {
        let expected = losses("whole", &format!("--ranks 1 {more}"));
        assert!(expected.len() >= count, "{expected:?}");
        for mesh in [
            "--ranks 2 --mesh tp=2",
            "--mesh dp=2,tp=2 --owned dp --overlap",
            "--mesh dp=2,tp=2 --rows dp",
        ] {
            let sliced = losses("sliced", &format!("{mesh} {more}"));
            for (sliced, expected) in sliced.iter().zip(&expected) {
                let error = (sliced - expected).abs();
                assert!(error < 1e-4, "{mesh} {more}: {sliced} for {expected}");
            }
            if more == "--steps 20" {
                let again = losses("again", &format!("{mesh} {more}"));
                assert_eq!(again, sliced, "{mesh}: the same bits again");
            }
        }
    }
    // A checkpoint of slices continues on one rank, and back.
    let resume = "--data text.rs --eval-every 2 --sample 0 --optimizer dist-muon";
    let on_one = "--steps 7 --resume sliced.bpk --save one.bpk --ranks 1";
    succeed(folder.path(), &format!("{resume} {on_one}"));
    let on_slices = "--steps 9 --resume one.bpk --ranks 2 --mesh tp=2";
    succeed(folder.path(), &format!("{resume} {on_slices}"));
}

#[test]
fn experts_on_ranks_train_as_on_one() {
    let folder = folder();
    let losses = |name: &str, more: &str| {
        let flags = format!(
            "--data text.rs --preset mixture --context 16 --batch 4 --steps 6 --eval-every 3 \
             --sample 4 --optimizer dist-muon --log {name}.jsonl --save {name}.bpk {more}"
        );
        succeed(folder.path(), &flags);
        let log = log(&folder.path().join(format!("{name}.jsonl")));
        [per_step(&log, "loss"), per_step(&log, "validation_loss")].concat()
    };
    let expected = losses("one", "--ranks 1");
    assert!(expected[5] < expected[0], "{expected:?}");
    for mesh in [
        "--ranks 2 --mesh ep=2",
        "--mesh dp=2,ep=2 --owned dp",
        "--ranks 4 --mesh ep=2,tp=2 --overlap",
    ] {
        let divided = losses("divided", mesh);
        for (divided, expected) in divided.iter().zip(&expected) {
            assert!((divided - expected).abs() < 1e-4, "{mesh}: {divided} for {expected}");
        }
    }
    let resume = "--data text.rs --eval-every 2 --sample 0 --optimizer dist-muon --steps 8";
    succeed(folder.path(), &format!("{resume} --resume divided.bpk --ranks 2 --mesh ep=2"));
}

#[test]
fn the_list_of_recipes_has_their_versions_and_dates() {
    let folder = folder();
    for arguments in ["--recipe list", "--recipe=list"] {
        let list = succeed(folder.path(), arguments);
        for recipe in distmuon::Recipe::ALL {
            let row = list.lines().find(|line| line.split(' ').next() == Some(recipe.name()));
            let row = row.unwrap_or_else(|| panic!("{recipe:?} is in {list}"));
            for cell in [recipe.version(), recipe.date(), recipe.source()] {
                assert!(row.contains(cell), "{row}");
            }
        }
    }
}

#[test]
fn recipes_bring_their_clip_and_their_iteration() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 2 --eval-every 0 --sample 0";
    let clipped = format!("{flags} --recipe kimi-k2 --log kimi.jsonl");
    succeed(folder.path(), &clipped);
    let kimi = log(&folder.path().join("kimi.jsonl"));
    assert_eq!(kimi[0]["settings"]["qk_clip"], 100.0);
    assert_eq!(per_step(&kimi, "max_logit").len(), 2);
    succeed(folder.path(), &format!("{flags} --recipe kimi-k2 --qk-clip 7 --log seven.jsonl"));
    assert_eq!(log(&folder.path().join("seven.jsonl"))[0]["settings"]["qk_clip"], 7.0);
    for ranks in [1, 2] {
        let motif = "--data text.rs --batch 2 --steps 3 --eval-every 0 --sample 0";
        succeed(
            folder.path(),
            &format!("{motif} --recipe motif --ranks {ranks} --log motif.jsonl"),
        );
        let losses = per_step(&log(&folder.path().join("motif.jsonl")), "loss");
        assert!(losses.len() == 3 && losses[2] < losses[0], "{losses:?}");
    }
}

/// Ranks add gradients up in another order than one.
fn assert_near(losses: &[f64], expected: &[f64]) {
    assert_eq!(losses.len(), expected.len());
    for (loss, expected) in losses.iter().zip(expected) {
        assert!((loss - expected).abs() < 1e-4, "{losses:?} for {expected}");
    }
}

#[test]
fn soap_trains_the_parameters_of_a_pattern_on_any_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 4 --eval-every 2 --sample 0 --soap mlp";
    let run = |name: &str, more: &str| {
        succeed(folder.path(), &format!("{flags} --account --log {name} {more}"));
        let log = log(&folder.path().join(name));
        let account = log.iter().find_map(|line| line.get("account")).expect("an account");
        assert!(account.to_string().contains("soap"), "{account}");
        per_step(&log, "validation_loss")
    };
    let losses = run("one.jsonl", "--save run.bpk");
    let of_ranks = run("two.jsonl", "--ranks 2");
    assert_near(&of_ranks, &losses);
    assert_eq!(of_ranks, run("rows.jsonl", "--ranks 2 --rows dp"));
    succeed(folder.path(), "--resume run.bpk --steps 5 --sample 0");
    rejected(folder.path(), "--resume run.bpk --soap head", "--soap head (saved: mlp)");
}

#[test]
fn exact_mars_corrects_the_gradients_of_parts_and_ranks() {
    let folder = folder();
    let flags = "--data text.rs --batch 4 --steps 4 --eval-every 1 --sample 0";
    let run = |name: &str, gamma: f64, more: &str| {
        let mars =
            format!(r#"--settings {{"parts":[{{"Mars":{{"gamma":{gamma},"exact":true}}}}]}}"#);
        succeed(folder.path(), &format!("{flags} --log {name} {mars}{more}"));
        per_step(&log(&folder.path().join(name)), "validation_loss")
    };
    let losses = run("one.jsonl", 0.025, " --save run.bpk");
    assert_near(&run("parts.jsonl", 0.025, " --accumulate 2"), &losses);
    assert_near(&run("two.jsonl", 0.025, " --ranks 2 --overlap=false"), &losses);
    let without = run("without.jsonl", 0.0, "");
    assert_eq!(losses[0], without[0], "the first step has no former parameters");
    let change = (losses.last().unwrap() - without.last().unwrap()).abs();
    assert!(change > 1e-3, "{losses:?} and {without:?}");
    succeed(folder.path(), "--resume run.bpk --steps 5 --sample 0");
    let mars = r#"--settings {"parts":[{"Mars":{"gamma":0.025,"exact":true}}]}"#;
    for layout in ["--ranks 2", "--ranks 2 --rows dp"] {
        let arguments = format!("--data text.rs --steps 2 --batch 2 {mars} {layout}");
        rejected(folder.path(), &arguments, "exact MARS corrects the gradients of a rank's own");
    }
    let estimate = format!("--estimate ranks=2 {mars}");
    rejected(folder.path(), &estimate, "exact MARS corrects the gradients of a rank's own");
    let estimate = succeed(folder.path(), &format!("{estimate} --overlap=false"));
    assert!(estimate.contains("the model of the step before"), "{estimate}");
}

/// An average over one step is the weights themselves, and none changes the training.
#[test]
fn averages_are_validated_on_any_ranks_and_train_nothing() {
    let folder = folder();
    let flags = "--data text.rs --batch 2 --steps 6 --eval-every 2 --sample 0";
    let run = |name: &str, more: &str| {
        succeed(folder.path(), &format!("{flags} --log {name}{more}"));
        let log = log(&folder.path().join(name));
        (per_step(&log, "loss"), per_step(&log, "validation_loss"))
    };
    let (losses, validated) = run("plain.jsonl", "");
    let average = " --average from=2,span=3";
    assert_eq!(run("last.jsonl", " --average from=2,span=1"), (losses.clone(), validated.clone()));
    let averaged = run("averaged.jsonl", &format!("{average} --save run.bpk"));
    assert_eq!(averaged.0, losses);
    assert_eq!(averaged.1[0], validated[0], "an average begins as the weights after step 2");
    assert_ne!(averaged.1[1..], validated[1..]);
    assert_ne!(averaged.1, run("share.jsonl", &format!("{average},share=0.5")).1);
    let of_ranks = run("ranks.jsonl", &format!("{average} --ranks 2"));
    assert_near(&of_ranks.1, &averaged.1);
    assert_eq!(of_ranks, run("owned.jsonl", &format!("{average} --ranks 2 --owned dp")));
    // A checkpoint has the weights alone.
    let flags = flags.replace("--steps 6", "--steps 2");
    succeed(folder.path(), &format!("{flags} --average from=1,span=3 --save short.bpk"));
    rejected(
        folder.path(),
        "--resume short.bpk --steps 6",
        "saved after step 2, without the average of --average, which began after step 1",
    );
}

/// In four layers with four heads each.
#[test]
fn recipes_orthogonalise_projections_by_their_blocks_of_heads() {
    let folder = folder();
    let flags = "--data text.rs --batch 1 --steps 1 --eval-every 0 --sample 0 --account";
    let matrices = |recipe: &str| {
        succeed(folder.path(), &format!("{flags} --recipe {recipe} --log run.jsonl"));
        let log = log(&folder.path().join("run.jsonl"));
        let groups = log.iter().find_map(|line| line.get("account")).expect("an account");
        let groups = groups.as_array().unwrap().iter();
        groups.map(|group| group["matrices"].as_u64().unwrap()).sum::<u64>()
    };
    let whole = matrices("moonlight");
    // A projection is one matrix less and a matrix for every block more.
    let in_blocks = |projections: u64, blocks: u64| whole + 4 * projections * (blocks - 1);
    assert_eq!(matrices("kimi-k3"), in_blocks(3, 4));
    assert_eq!(matrices("glm-5"), in_blocks(3, 4));
    assert_eq!(matrices("modded-nanogpt"), in_blocks(2, 2));
}

#[test]
fn a_divided_run_prints_its_plan_and_continues_under_another() {
    let folder = folder();
    let flags =
        "--data text.rs --context 16 --batch 4 --eval-every 2 --sample 0 --ranks 2 --owned dp";
    let train = |more: &str| succeed(folder.path(), &format!("{flags} {more}"));
    let log = |name: &str| log(&folder.path().join(name));
    train("--steps 4 --log greedy.jsonl");
    let planned = "--balancing block-cyclic --costs measured";
    let stdout = train(&format!("--steps 4 {planned} --log turns.jsonl --save turns.bpk"));
    let [greedy, turns] = ["greedy.jsonl", "turns.jsonl"].map(|name| per_step(&log(name), "loss"));
    assert_eq!(greedy, turns, "a plan changes no bit");
    assert!(stdout.contains("plan: block-cyclic, costs in measured seconds"), "{stdout}");
    let rows: Vec<Vec<&str>> =
        stdout.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    let header = rows.iter().position(|row| *row == ["", "count", "shape", "owners", ""]);
    let groups = &rows[header.expect("a line for every shape") + 2..];
    let groups: Vec<_> = groups.iter().take_while(|row| row.len() == 5).collect();
    assert!(groups.iter().any(|row| row[2] == "[128, 128]"), "{stdout}");
    for row in &groups {
        let count: usize = row[1].parse().unwrap();
        let each = row[3].strip_prefix("0-1: ").and_then(|rest| rest.strip_suffix(" each"));
        let each: usize = each.unwrap_or_else(|| panic!("{stdout}")).parse().unwrap();
        assert_eq!(2 * each, count, "{stdout}");
    }
    let loads = rows.iter().position(|row| *row == ["", "rank", "matrices", "cost", "bytes", ""]);
    let loads = &rows[loads.expect("the load of every rank") + 2..];
    assert!(loads[..2].iter().all(|row| row[3].parse::<f64>().unwrap() > 0.0), "{stdout}");

    // In new processes, under its own plan and under another.
    let resume = |name: &str, planned: &str| {
        let flags = "--ranks 2 --owned dp --resume turns.bpk --steps 6 --sample 0";
        succeed(folder.path(), &format!("{flags} {planned} --log {name}"));
        per_step(&log(name), "loss")
    };
    let [own, other] = [("own.jsonl", "block-cyclic"), ("other.jsonl", "greedy")]
        .map(|(name, balancing)| resume(name, &format!("--balancing {balancing}")));
    assert_eq!(own.len(), 2);
    assert_eq!(own, other);
}

#[cfg(feature = "optimal")]
#[test]
fn an_optimal_plan_changes_no_bit() {
    let folder = folder();
    let flags =
        "--data text.rs --context 16 --batch 2 --steps 2 --eval-every 0 --sample 0 --ranks 2";
    let losses = |balancing: &str| {
        let more = format!("--owned dp --balancing {balancing} --log {balancing}.jsonl");
        let stdout = succeed(folder.path(), &format!("{flags} {more}"));
        let plan = format!("plan: {balancing}, costs in operations");
        assert!(stdout.contains(&plan), "{stdout}");
        per_step(&log(&folder.path().join(format!("{balancing}.jsonl"))), "loss")
    };
    let [optimal, greedy] = ["optimal", "greedy"].map(losses);
    assert_eq!(optimal.len(), 2);
    assert_eq!(optimal, greedy);
}

#[cfg(not(feature = "optimal"))]
#[test]
fn an_optimal_plan_needs_its_feature() {
    let folder = folder();
    let expected = "--balancing optimal is missing in this program: build train_lm with --features \
                    optimal";
    for arguments in ["--data text.rs --ranks 2", "--estimate ranks=2"] {
        rejected(folder.path(), &format!("{arguments} --balancing optimal"), expected);
    }
}
