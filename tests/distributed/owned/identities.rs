//! Models whose parameters have other identities than those that were divided: made anew and
//! loaded, mapped, or cloned with other values.

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{DistModuleOptimizer, Layout, Mesh, Publish, WeightAverage};
use distmuon::{Error, GradientBuffer, Result, checkpoint};
use distmuon_testing::logs;
use distmuon_testing::models::{assert_same_weights, bits, values, weights};
use distmuon_testing::precision::{Rounded, has};
use distmuon_testing::worlds::Folder;

use super::{Net, are_equal, config, tokens, with_checkpoints};
use crate::{ranks, ranks_here};

/// The ways in which the passes reduce gradients: owned or not, of all parameters or of owned ones.
const LAYOUTS: [(bool, bool); 3] = [(false, true), (true, false), (true, true)];

fn layout(world: &World, (is_owned, overlaps): (bool, bool)) -> Layout {
    let layout = Layout::new(&Mesh::flat(world)).with_muon(config().muon).with_small_elements(8);
    let layout = if is_owned { layout.owned("dp") } else { layout };
    if overlaps { layout.overlap_backward() } else { layout }
}

type Run = (Net, DistModuleOptimizer);

/// A model and its optimizer, made anew.
fn start(layout: &Layout, publish: Publish) -> Result<Run> {
    let net = layout.shard(Net::new(layout.mesh().world().device()))?;
    let optim = config().with_publish(publish).init_on(layout, &net)?;
    Ok((net, optim))
}

fn advance(
    layout: &Layout,
    (mut net, mut optim): Run,
    steps: std::ops::Range<usize>,
) -> Result<Run> {
    let world = layout.mesh().world();
    for step in steps {
        let loss = net.loss(tokens(world.rank(), step, world.device()));
        let gradients = layout.backward(&loss, &net)?;
        net = optim.step(0.01, net, gradients)?;
    }
    Ok((net, optim))
}

fn assert_equal(expected: &[Vec<Vec<u8>>], got: &[Vec<Vec<u8>>], what: &str) {
    for (expected, got) in expected.iter().zip(got) {
        assert_eq!(expected.len(), got.len());
        let differs =
            expected.iter().zip(got).position(|(expected, got)| !are_equal(expected, got));
        assert_eq!(differs, None, "{what}: a parameter differs");
    }
}

pub fn runs_continue_in_models_that_are_made_anew() {
    let folder = Folder::create();
    for kind in LAYOUTS {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let path = folder.path().join(format!("{kind:?}-{publish:?}.ckpt"));
            let run = |resumes: bool| {
                let run = ranks(2, |world| {
                    let layout = layout(&with_checkpoints(&world), kind);
                    let mut run = start(&layout, publish)?;
                    if resumes {
                        let (net, optim) = run;
                        let (net, optim, ()) = optim.load(&path, net)?;
                        run = (net, optim);
                    } else {
                        run = advance(&layout, run, 0..2)?;
                        run.1.save(&path, &run.0, &())?;
                    }
                    let (net, _) = advance(&layout, run, 2..4)?;
                    Ok(weights(&layout.unshard(&net)?))
                });
                run.unwrap()
            };
            let expected = run(false);
            assert_equal(&expected, &run(true), &format!("{kind:?}, {publish:?}"));
        }
    }
}

/// Gives all parameters new identities.
struct NewIds;

impl ModuleMapper for NewIds {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (_, value, mapper) = param.consume();
        Param::from_mapped_value(ParamId::new(), value, mapper)
    }
}

/// Multiplies all values, in new leaves.
struct Scaled(f32);

impl ModuleMapper for Scaled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let value = Tensor::from_inner(old.clone().inner() * self.0);
            if old.is_require_grad() { value.require_grad() } else { value }
        })
    }
}

pub fn parameters_with_new_identities_are_trained() {
    for kind in LAYOUTS {
        let run = |changes: bool| {
            let run = ranks_here(2, |world| {
                let layout = layout(&world, kind);
                let run = start(&layout, Publish::AtFirstUse)?;
                let (mut net, optim) = advance(&layout, run, 0..1)?;
                if changes {
                    net = net.map(&mut NewIds);
                    if kind.0 {
                        net = net.map(&mut Scaled(1.0));
                    } else {
                        let record = layout.unshard(&net)?.into_record();
                        net = net.load_record(record);
                    }
                }
                let (net, _) = advance(&layout, (net, optim), 1..3)?;
                Ok(weights(&layout.unshard(&net)?))
            });
            run.unwrap()
        };
        assert_equal(&run(false), &run(true), &format!("{kind:?}"));
    }
}

pub fn gradients_under_other_identities_are_rejected() {
    for kind in LAYOUTS {
        let errors = ranks_here(2, |world| {
            let layout = layout(&world, kind);
            let (mut net, mut optim) = start(&layout, Publish::Now)?;
            let gradients = layout.backward(&net.loss(tokens(0, 0, world.device())), &net)?;
            net = net.map(&mut NewIds);
            world.comm().barrier()?;
            Ok(optim.step(0.01, net, gradients).map(|_| ()).expect_err("the gradients are lost"))
        });
        for error in errors.unwrap() {
            let text = error.to_string();
            assert!(
                text.contains("other identities") && text.contains("`embedding.weight`"),
                "{text}"
            );
        }
    }
    let device = crate::device();
    let net = Net::new(&device);
    let gradients = GradientsParams::from_grads(net.loss(tokens(0, 0, &device)).backward(), &net);
    let error = GradientBuffer::new().add(&net.map(&mut NewIds), gradients).unwrap_err();
    assert!(error.to_string().contains("are of another model"), "{error}");
}

/// Trains a model next to a clone with other values, both of which have gradients.
fn train_next_to_a_clone(
    world: &World,
    kind: Option<(bool, bool)>,
    micro_batches: usize,
) -> Result<Vec<Vec<u8>>> {
    let layout = kind.map(|kind| layout(world, kind));
    let device = world.device();
    let (mut net, mut optim) = match &layout {
        Some(layout) => start(layout, Publish::Now)?,
        None => {
            let net = world.broadcast(Net::new(device))?;
            let optim = config().init(world, &net)?;
            (net, optim)
        }
    };
    for step in 0..3 {
        let other = net.clone().map(&mut Scaled(1.5));
        let mut buffer = GradientBuffer::new();
        for batch in 0..micro_batches {
            let data = || tokens(world.rank(), 10 * step + batch, device);
            // The clone is used first, in between and last.
            let loss = other.loss(data()) + net.loss(data()) * other.loss(data());
            let is_last = batch + 1 == micro_batches;
            match &layout {
                Some(layout) if is_last => {
                    let gradients = layout.backward(&loss, &net)?;
                    net = optim.step(0.01, net.clone(), gradients)?;
                }
                Some(layout) => layout.accumulate(&loss, &net)?,
                None => {
                    buffer.add(&net, GradientsParams::from_grads(loss.backward(), &net))?;
                    if is_last {
                        net = optim.step(0.01, net.clone(), buffer.take_sum())?;
                    }
                }
            }
        }
    }
    let whole = layout.map_or(Ok(net.clone()), |layout| layout.unshard(&net))?;
    Ok(weights(&whole))
}

pub fn gradients_of_a_clone_with_other_values_are_not_those_of_the_model() {
    for micro_batches in [1, 2] {
        let run = |kind| {
            let run = ranks(2, |world| train_next_to_a_clone(&world, kind, micro_batches));
            run.unwrap()
        };
        let expected = run(None);
        for kind in LAYOUTS {
            assert_equal(&expected, &run(Some(kind)), &format!("{kind:?}, {micro_batches}"));
        }
    }
}

pub fn micro_batches_of_other_values_are_rejected() {
    let errors = ranks_here(2, |world| {
        let layout = layout(&world, (true, true));
        let (net, _) = start(&layout, Publish::Now)?;
        let loss = |net: &Net| net.loss(tokens(0, 0, world.device()));
        layout.accumulate(&loss(&net), &net)?;
        let other = net.map(&mut Scaled(1.5));
        Ok(layout.backward(&loss(&other), &other).map(|_| ()).expect_err("the values differ"))
    });
    for error in errors.unwrap() {
        assert!(error.to_string().contains("`Layout::accumulate`"), "{error}");
    }
}

/// A use of a model or of its clone with other values, with gradients or without.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Use {
    Model,
    Clone,
    OtherClone,
    EvaluatedModel,
    EvaluatedClone,
}

/// The outcome of passes on two ranks, each with uses of its own, after some steps.
fn outcomes_of_uses(uses: [&[Use]; 2], steps: usize, publish: Publish) -> Vec<Result<()>> {
    let run = ranks_here(2, |world| {
        let device = world.device();
        let layout = layout(&world, (true, true));
        let (net, optim) = advance(&layout, start(&layout, publish)?, 0..steps)?;
        let other = net.clone().map(&mut Scaled(1.5));
        let another = net.clone().map(&mut Scaled(0.5));
        let mut loss = Tensor::<1>::zeros([1], (device, DType::F32));
        for step in uses[world.rank()] {
            let data = || tokens(world.rank(), 5, device);
            let inner = || data().inner();
            match step {
                Use::Model => loss = loss + net.loss(data()),
                Use::Clone => loss = loss + other.loss(data()),
                Use::OtherClone => loss = loss + another.loss(data()),
                Use::EvaluatedModel => drop(net.valid().loss(inner())),
                Use::EvaluatedClone => drop(other.valid().loss(inner())),
            }
        }
        let outcome = layout.backward(&loss, &net).map(drop);
        // Parts may still be on their way: the ranks wait for them when they drop the optimizer.
        drop(optim);
        Ok(outcome)
    });
    run.unwrap()
}

pub fn values_of_other_models_at_one_place_are_rejected() {
    use Use::{Clone, EvaluatedClone, EvaluatedModel, Model, OtherClone};
    let clone_alone: [&[Use]; 2] = [&[Clone], &[Model]];
    let swapped: [&[Use]; 2] = [&[Clone, Model], &[Model, Clone]];
    let evaluated: [&[Use]; 2] = [&[EvaluatedClone, Model], &[EvaluatedModel, Model]];
    let swapped_twice: [&[Use]; 2] =
        [&[EvaluatedClone, EvaluatedModel, Model], &[EvaluatedModel, EvaluatedClone, Model]];
    // Clones that no rank has used before.
    let other_alone: [&[Use]; 2] = [&[Clone, Model], &[OtherClone, Model]];
    let others_swapped: [&[Use]; 2] = [&[Clone, OtherClone, Model], &[OtherClone, Clone, Model]];
    let all = [clone_alone, swapped, evaluated, swapped_twice, other_alone, others_swapped];
    for uses in all {
        for (steps, publish) in [(0, Publish::Now), (2, Publish::Now), (2, Publish::AtFirstUse)] {
            let what = format!("{uses:?}, {steps}, {publish:?}");
            for outcome in outcomes_of_uses(uses, steps, publish) {
                let error = outcome.expect_err(&what);
                let text = error.to_string();
                // Before the first step, nothing is gathered ahead. Later, one rank may gather what
                // the other has already, and the engine finds it first.
                let is_found = match error {
                    Error::Mismatch { .. } => steps > 0 || text.contains("used `"),
                    Error::Engine { .. } | Error::PeerFailed { .. } => steps > 0,
                    _ => false,
                };
                assert!(is_found && text.contains("rank"), "{what}: {text}");
            }
            for alike in uses {
                for outcome in outcomes_of_uses([alike; 2], steps, publish) {
                    outcome.expect(&what);
                }
            }
        }
    }
}

/// The usual mistake: `if world.is_main() { average = layout.average(..)? }`.
/// Rank 0 writes the file.
pub fn an_average_that_one_rank_has_changed_alone_is_rejected() {
    let folder = Folder::create();
    let path = &folder.path().join("run.ckpt");
    type OnWorld = fn(&World) -> Result<Layout>;
    let on_nodes: OnWorld = |world| {
        let layout = Layout::new(&super::nodes(world)?).owned("gpu").overlap_backward();
        Ok(layout.with_muon(config().muon).with_small_elements(8))
    };
    let layouts: [(usize, OnWorld); 3] = [
        (2, |world| Ok(layout(world, (true, false)))),
        (2, |world| Ok(layout(world, (true, true)))),
        (4, on_nodes),
    ];
    for (count, layout) in layouts {
        for publish in [Publish::Now, Publish::AtFirstUse] {
            let run = ranks_here(count, |world| {
                let layout = layout(&with_checkpoints(&world))?;
                let (net, optim) = advance(&layout, start(&layout, publish)?, 0..2)?;
                let of_all = layout.average(net.clone(), &net, 0.5)?;
                optim.save(path, &of_all, &2_usize)?;
                let average = match world.is_main() {
                    true => layout.average(net.clone(), &net, 0.5)?,
                    false => net.clone(),
                };
                let saved = optim.save(path, &average, &3_usize);
                let whole = layout.unshard(&average);
                for error in [saved.unwrap_err(), whole.expect_err("the models differ")] {
                    let text = error.to_string();
                    let is_told = |words: &str| text.contains(words);
                    assert!(is_told("the ranks disagree") && is_told("of version"), "{text}");
                }
                checkpoint::progress::<usize>(path)
            });
            assert_eq!(run.unwrap(), vec![2; count], "{count} ranks, {publish:?}");
        }
    }
}

pub fn averages_are_those_of_whole_parameters() {
    let average = |kind: Option<(bool, bool)>| {
        let run = ranks_here(2, |world| {
            let layout =
                kind.map_or_else(|| Layout::new(&Mesh::flat(&world)), |kind| layout(&world, kind));
            let layout = layout.with_muon(config().muon);
            let mut run = start(&layout, Publish::AtFirstUse)?;
            let mut average = run.0.clone();
            let mut expected = values(&layout.unshard(&run.0)?);
            for step in 0..3 {
                run = advance(&layout, run, step..step + 1)?;
                average = layout.average(average, &run.0, 0.75)?;
                let new = values(&layout.unshard(&run.0)?);
                expected.iter_mut().zip(new).for_each(|(a, p)| *a = *a * 0.75 + p * 0.25);
            }
            // The readout of a tail average: a part of it, and the rest of the model.
            let read = layout.unshard(&layout.average(run.0.clone(), &average, 0.4)?)?;
            let last = values(&layout.unshard(&run.0)?);
            let blended: Vec<f32> =
                last.iter().zip(&expected).map(|(p, e)| p * 0.4 + e * 0.6).collect();
            for (actual, expected) in values(&read).iter().zip(&blended) {
                assert!((actual - expected).abs() <= 1e-6, "{kind:?}: {actual} for {expected}");
            }
            // Used like the model.
            let tokens = tokens(0, 0, world.device());
            let whole = layout.unshard(&average)?;
            assert_eq!(bits(&average.loss(tokens.clone())), bits(&whole.loss(tokens)));
            layout.discard()?;
            assert_same_weights(&format!("{kind:?}"), &values(&whole), &expected);
            let other = layout.average(average.clone(), &run.0, 1.5);
            assert!(other.is_err_and(|error| error.to_string().contains("`decay`")));
            Ok(weights(&whole))
        });
        run.unwrap()
    };
    let expected = average(None);
    for kind in LAYOUTS {
        assert_equal(&expected, &average(Some(kind)), &format!("{kind:?}"));
    }
}

/// A long average in half precision, whose additions are below its last digit.
pub fn averages_of_half_precision_are_in_float32() {
    const DECAY: f64 = 0.999;
    if !has(FloatDType::BF16) {
        return;
    }
    let average = |kind: Option<(bool, bool)>| {
        let run = ranks_here(2, |world| {
            let layout =
                kind.map_or_else(|| Layout::new(&Mesh::flat(&world)), |kind| layout(&world, kind));
            let layout = layout.with_muon(config().muon);
            let net = layout.shard(Net::new(world.device()).map(&mut Rounded(DType::BF16)))?;
            let of = |net: &Net, by: f64| {
                let moved = |_: &str, values: Tensor<1>| values.mul_scalar(by);
                layout.map_elements(net.clone(), moved)
            };
            let mut average = WeightAverage::new(&layout, &net);
            let mut rounded = net.clone();
            let other = of(&net, 1.5);
            for _ in 0..1000 {
                average.add(&other, DECAY)?;
                rounded = layout.average(rounded, &other, DECAY)?;
            }
            let whole = |model: &Net| {
                let whole = layout.unshard(model)?;
                Ok::<_, Error>(values(&whole.map(&mut Rounded(DType::F32))))
            };
            let [first, last, rounded] = [whole(&net)?, whole(&other)?, whole(&rounded)?];
            let mean = whole(&average.mixed_into(net.clone(), 1.0)?)?;
            let half = whole(&average.mixed_into(net.clone(), 0.5)?)?;
            let kept = DECAY.powi(1000) as f32;
            for index in 0..first.len() {
                let expected = first[index] * kept + last[index] * (1.0 - kept);
                // Half a digit of bfloat16, and rounding in float32.
                let digit = expected.abs() / 250.0;
                assert!((mean[index] - expected).abs() <= digit, "{kind:?}: {index}");
                let expected = (first[index] + expected) / 2.0;
                assert!((half[index] - expected).abs() <= digit, "{kind:?}: {index}");
            }
            assert!(rounded == first, "an average in bfloat16 has not moved");
            for share in [-0.1, 1.1, f64::NAN] {
                let error = average.mixed_into(net.clone(), share).unwrap_err();
                assert!(error.to_string().contains("`share`"), "{error}");
            }
            let other: Linear = LinearConfig::new(4, 4).init(world.device());
            for error in [average.add(&other, 0.5), average.add(&net, 1.0)] {
                let text = error.unwrap_err().to_string();
                assert!(text.contains("does not have it") || text.contains("`decay`"), "{text}");
            }
            Ok(mean)
        });
        run.unwrap()
    };
    let expected = average(None);
    for kind in LAYOUTS {
        assert!(average(Some(kind)) == expected, "{kind:?}");
    }
}

pub fn passes_that_are_not_trained_are_warned_of() {
    const USES: usize = 10_000;
    #[derive(Module, Debug)]
    struct Forgetful {
        never_trained: Linear,
    }
    logs::collect();
    let warnings =
        || logs::with(&["WARN", "`never_trained.weight` was used", "discard_pass"]).len();
    let run = ranks_here(1, |world| {
        let layout = Layout::from(&world).owned("dp").with_small_elements(1);
        let layer = LinearConfig::new(8, 8).with_bias(false).init(world.device());
        let net = layout.shard(Forgetful { never_trained: layer })?;
        let mut seen = vec![];
        for _ in 0..2 {
            for last in [1, USES - 1] {
                (0..last).for_each(|_| drop(net.never_trained.weight.val()));
                seen.push(warnings());
            }
            layout.discard_pass()?;
        }
        Ok(seen)
    });
    assert_eq!(run.unwrap(), [[0, 1, 1, 2]]);
}

pub fn a_device_without_gradient_checkpointing_is_warned_of() {
    logs::collect();
    let warnings = || logs::with(&["WARN", "weights of which a layer makes a view"]).len();
    let before = warnings();
    let run = ranks_here(1, |world| {
        let layout = Layout::from(&world).owned("dp").with_small_elements(1);
        let layer = LinearConfig::new(8, 8).with_bias(false).init(world.device());
        layout.shard(layer).map(drop)
    });
    run.unwrap();
    assert!(warnings() > before);
}
