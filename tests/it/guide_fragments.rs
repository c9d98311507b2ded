//! The parts of programs in the README and the guide, which are compiled here as they stand there.
//! Parts that the pages mark by `ignore`, since a program needs more, changed lines and calls in
//! tables are text of this file.

#![allow(dead_code, unused_variables, unused_mut, clippy::let_and_return)]

use std::fs;
use std::path::Path;

/// The code of the blocks of a page that rustdoc ignores, without indents and empty lines.
fn ignored(page: &str) -> Vec<Vec<&str>> {
    let blocks = page.split("```rust,ignore\n").skip(1);
    blocks.filter_map(|block| Some(lines(block.split_once("```")?.0))).collect()
}

/// The lines of the differences of a page that a program has after the change.
fn changed(page: &str) -> Vec<Vec<&str>> {
    let blocks = page.split("```diff\n").skip(1).filter_map(|block| block.split_once("```"));
    blocks
        .map(|(block, _)| {
            let kept = lines(block).into_iter().filter(|line| !line.starts_with('-'));
            kept.map(|line| line.strip_prefix('+').unwrap_or(line).trim()).collect()
        })
        .collect()
}

/// The settings in the tables of a page, as in `.with_rule(..)`.
fn settings(page: &str) -> Vec<String> {
    let cells = page.lines().filter_map(|line| line.strip_prefix('|')?.split("| `.with_").nth(1));
    // With dots for what is left out, a cell is no code.
    let cells = cells.filter(|cell| !cell.contains(".."));
    cells
        .map(|cell| {
            let code = cell.split('`').next().expect("a split has a first part");
            format!(".with_{}", code.replace("\\|", "|"))
        })
        .collect()
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

#[test]
fn every_part_of_a_program_is_compiled_as_it_stands() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let guide = fs::read_dir(root.join("docs/guide")).unwrap();
    let mut pages: Vec<_> = guide.map(|page| page.unwrap().path()).collect();
    pages.push(root.join("README.md"));
    let compiled = lines(include_str!("guide_fragments.rs"));
    let mut count = 0;
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let mut parts = ignored(&text);
        // The differences of two other pages are those of whole programs: see `examples.rs`.
        if ["README.md", "from-adamw.md"].iter().any(|name| page.ends_with(name)) {
            parts.extend(changed(&text));
        }
        let settings = settings(&text);
        parts.extend(settings.iter().map(|line| vec![line.as_str()]));
        for part in parts {
            let is_here = compiled.windows(part.len()).any(|window| window == part);
            assert!(is_here, "{page:?}: not compiled as it stands:\n{}", part.join("\n"));
            count += 1;
        }
    }
    assert!(count > 20, "{count} parts were found");
}

#[test]
fn the_readme_names_the_version_of_burn() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let line = |file: &str| {
        let text = fs::read_to_string(root.join(file)).unwrap();
        text.lines().find(|line| line.starts_with("burn = ")).map(str::to_owned)
    };
    assert_eq!(line("README.md").expect("the README has a manifest"), line("Cargo.toml").unwrap());
}

/// `README.md` and `docs/guide/from-adamw.md`.
mod changed_lines {
    use burn::config::Config;
    use burn::nn::Linear;

    #[derive(Config, Debug)]
    pub struct TrainingConfig {
        pub optimizer: distmuon::MuonConfig,
    }

    fn optimizer(model: Linear) {
        use distmuon::MuonConfig;
        let mut optim = MuonConfig::new().init(&model);
    }

    #[cfg(feature = "train")]
    fn learner<M: burn::train::LearnerModel>(config: TrainingConfig, model: M, lr: f64) {
        use burn::train::Learner;
        let optimizer = config.optimizer.init(&model);
        let learner = Learner::new(model, optimizer, lr);
    }
}

/// `docs/guide/ranks.md`.
mod averaged {
    use burn::nn::Linear;
    use distmuon::{Result, World};

    #[rustfmt::skip]
    fn averaged(world: World, model: Linear) -> Result<()> {
        use distmuon::distributed::{DistMuonConfig, Gradients};

        let config = DistMuonConfig::new().with_gradients(Gradients::Averaged);
        let mut optim = config.per_parameter(&world)?.init(&model)?; // a `ModuleOptimizer`
        Ok(())
    }
}

/// `docs/guide/excluding.md`.
mod rules {
    use distmuon::{FirstLinear, MuonConfig, RoutingRule};

    #[rustfmt::skip]
    fn rules() -> MuonConfig {
        MuonConfig::new()
            .with_rule(RoutingRule::adamw("probe"))
            .with_rule(RoutingRule::muon(r"^proj\.weight$"))
            .with_rule(RoutingRule::adamw("conv"))
            .with_rule(RoutingRule::muon("stem").flatten())
            .with_first_linear(FirstLinear::AdamW)
            .with_rule(RoutingRule::muon("experts").batch())
            .with_rule(RoutingRule::muon("spectral").leading())
            .with_rule(RoutingRule::muon(r"(query|key|value)\.weight$").heads(8))
            .with_rule(RoutingRule::muon("qkv").split([2048, 512, 512]))
            .with_rule(RoutingRule::muon("in_proj").split([64, 64, 8]).leave([2]))
    }
}

/// `docs/guide/slices.md`.
mod slices {
    use burn::module::Module;
    use burn::nn::{EmbeddingConfig, Linear};
    use burn::optim::GradientsParams;
    use burn::tensor::activation::relu;
    use burn::tensor::{Device, Int, Tensor};
    use distmuon::comm::Communicator;
    use distmuon::distributed::{Axis, DistModuleOptimizer, Layout, Mesh, Place};
    use distmuon::parallel::{RowEmbedding, enter, exchange, leave};
    use distmuon::{MaxLogits, MuonConfig, QkClipConfig, QkClipRule, Result, RoutingRule, World};

    struct Region {
        tp: Communicator,
        up: Linear,
        down: Linear,
    }

    impl Region {
        #[rustfmt::skip]
        fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            let x = enter(x, &self.tp);                // the same `x` on all ranks of the group
            let hidden = relu(self.up.forward(x));     // a `Linear`: columns of this rank
leave(self.down.forward(hidden), &self.tp) // a `Linear` without a bias, which every rank would add
        }
    }

    #[rustfmt::skip]
    fn norms(layout: Layout) -> Layout {
        layout
            .with_place(Place::partial(r"\.(query|key)_norm\.", "tp")) // its gradients are added up
    }

    struct Experts;

    impl Experts {
        fn experts(&self, rows: Tensor<2>) -> Tensor<2> {
            rows
        }

        #[rustfmt::skip]
        fn forward(
            &self, world: World, device: Device, rows: Tensor<2>, sent: Vec<usize>,
        ) -> Result<Tensor<2>> {
            let mesh = Mesh::new(&world, [Axis::data("dp", 2), Axis::data("ep", 4)])?;
            let muon = MuonConfig::new().with_rule(RoutingRule::muon("experts").batch());
            let layout = Layout::new(&mesh)
                .with_muon(muon.clone())
                .with_place(Place::shard(r"\.experts\.(up|down)$", "ep", 0));

            let ep = mesh.group("ep").expect("an axis of the mesh");

// In the forward pass: `rows` are in the order of their experts, `sent[to]` of them for the experts
            // of rank `to`.
            let counts = ep.pair_counts(&sent, &device)?; // also those that this rank receives
            let received = exchange(rows, &counts, ep); // those of rank 0 first
            let results = self.experts(received); // one row for each
            let results = exchange(results, &counts.back(), ep); // in the order of `rows`
            Ok(results)
        }
    }

    struct Tokens {
        tokens: RowEmbedding,
    }

    impl Tokens {
        #[rustfmt::skip]
        fn forward(&self, world: World, device: &Device, ids: Tensor<2, Int>) -> Tensor<3> {
            let mesh = Mesh::flat(&world);
            let layout = Layout::new(&mesh).with_place(Place::shard(r"^tokens\.", "dp", 0));
            // In the model, `tokens: RowEmbedding`, made with the whole table:
let tokens = RowEmbedding::new(EmbeddingConfig::new(65_536, 1280).init(device), world.comm());
            // In the forward pass, `[batch, length]` to `[batch, length, 1280]`:
            let x = self.tokens.forward(ids);
            x
        }
    }

    #[rustfmt::skip]
    #[allow(clippy::too_many_arguments)]
    fn clip<M: Module>(
        world: World, rule: QkClipRule, model: M, layout: Layout, tp: Communicator,
        maxima: Tensor<1>, mut logits: MaxLogits, mut optim: DistModuleOptimizer,
        (lr, grads): (f64, GradientsParams),
    ) -> Result<M> {
        let clip = QkClipConfig::new().with_rule(rule).init(&model)?; // the whole model
        let mut model = layout.shard(model)?;

        // In the attention: `maxima` of this rank's heads, without autodiff.
        let counts = vec![maxima.dims()[0]; tp.size()];
        logits.report("blocks.0.attention", tp.all_gather(maxima, &counts)?.wait()?); // all heads

        // In the training loop. `QkClip::apply` is an error for divided projections.
        optim.clip_heads(&clip.factors_on(&world, &logits)?);
        model = optim.step(lr, model, grads)?;
        Ok(model)
    }
}

/// `docs/guide/qk-clip.md`.
mod qk_clip {
    use burn::module::Module;
    use burn::optim::GradientsParams;
    use distmuon::distributed::DistModuleOptimizer;
    use distmuon::{MaxLogits, QkClip, Result};

    #[rustfmt::skip]
    fn step<M: Module>(
        mut model: M, clip: QkClip, logits: MaxLogits, mut optim: DistModuleOptimizer,
        (lr, grads): (f64, GradientsParams),
    ) -> Result<M> {
        optim.clip_heads(&clip.factors(&logits)?);
        model = optim.step(lr, model, grads)?;
        Ok(model)
    }

    #[cfg(feature = "train")]
    mod learner {
        use burn::module::Module;
        use burn::nn::Linear;
        use burn::tensor::Device;
        use distmuon::distributed::DistMuonConfig;
        use distmuon::{DistMuonStrategy, LearnerLogits, QkClipConfig};

        type Block = Linear;

        #[rustfmt::skip]
        fn strategy(devices: Vec<Device>, config: DistMuonConfig, clip: QkClipConfig) {
            #[derive(Module, Debug)]
            struct Net {
                blocks: Vec<Block>,
                #[module(skip)]
logits: LearnerLogits, // in the forward pass: `self.logits.report("blocks.0.attention", maxima)`
            }

            let logits = LearnerLogits::new(); // the model has a clone
// `clip` is a `QkClipConfig`.
let strategy = DistMuonStrategy::new(devices, config).with_qk_clip(clip, &logits);
        }
    }
}

/// "Is it really Muon?".
#[cfg(feature = "train")]
mod account {
    #[rustfmt::skip]
    fn metric() {
use burn::tensor::Device;
use distmuon::{DistMuonConfig, DistMuonStrategy, Expectation, MuonConfig, MuonShareMetric};

        let muon = MuonConfig::new().expect(Expectation::MuonShare(0.6));
        let config = DistMuonConfig::new().with_muon(muon);
        let strategy = DistMuonStrategy::new([Device::default()], config).with_account(100);
        let metric = MuonShareMetric::new(strategy.account());
    }
}
