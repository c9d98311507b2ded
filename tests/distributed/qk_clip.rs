//! Attention heads that are clipped within the step of ranks: the weights of one device that are
//! clipped after its step, however the projections are cut and divided.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdafactorConfig, GradientsParams};
use burn::tensor::{DType, Device, FloatDType, Tensor, bf16};
use distmuon::comm::World;
use distmuon::distributed::{Axis, DistMuonConfig, Gradients, Layout, Mesh, Place};
use distmuon::{
    LatentHead, MaxLogits, MuonConfig, QkClip, QkClipConfig, QkClipRule, Result, RoutingRule,
};
use distmuon_testing::models::Fixed;
use distmuon_testing::precision::{LR, Rounded, STEPS, assert_same, floats, gradients, has};
use distmuon_testing::worlds::{self, Case, cases};

use crate::cuts::{Cutting, slices};
use crate::{device, ranks};

pub const EVERYWHERE: &[Case] = cases![
    heads_are_those_that_are_clipped_after_the_step,
    heads_of_slices_are_clipped_as_those_of_whole_projections,
    clipped_heads_keep_the_digits_of_master_weights,
    projections_that_are_divided_are_not_clipped_after_the_step,
];

/// The maxima of two heads of every attention, the first of which is above the threshold.
const MAXIMA: [f32; 2] = [103.7, 99.0];

/// One attention of every kind.
#[derive(Module, Debug)]
struct Net {
    multi_head: Attention,
    grouped: Attention,
    latent: Attention,
    fused: Fused,
}

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
}

#[derive(Module, Debug)]
struct Fused {
    qkv: Linear,
}

impl Net {
    fn new(dtype: DType, device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(8, outputs).init(device);
        let attention =
            |[query, key]: [usize; 2]| Attention { query: linear(query), key: linear(key) };
        let net = Self {
            multi_head: attention([8, 8]),
            grouped: attention([8, 4]),
            latent: attention([10, 10]),
            fused: Fused { qkv: linear(16) },
        };
        net.map(&mut Fixed::new(3)).map(&mut Rounded(dtype))
    }

    /// Gradients of a step. One projection has none that is usable in the second, and another one
    /// none at all in the third; their heads are clipped nevertheless.
    fn gradients(&self, step: u64, dtype: DType) -> GradientsParams {
        let mut all = gradients(self, step, dtype);
        if step == 1 {
            let id = self.multi_head.query.weight.id;
            let gradient = all.remove::<2>(id).expect("the projection has a gradient");
            all.register(id, gradient.mul_scalar(f32::NAN));
        }
        if step == 2 {
            drop(all.remove::<2>(self.grouped.key.weight.id));
        }
        all
    }

    fn clip(&self) -> Result<QkClip> {
        let latent = LatentHead { nope: 3, rope: 2, value: 2 };
        QkClipConfig::new()
            .with_alpha(0.3)
            .with_rule(QkClipRule::multi_head("multi_head$", 2))
            .with_rule(QkClipRule::grouped_query("grouped$", 2, 1))
            .with_rule(QkClipRule::latent("latent$", 2, latent))
            .with_rule(QkClipRule::grouped_query("fused$", 2, 1).fused("qkv"))
            .init(self)
    }
}

/// The reports of a rank. Only the last rank has logits above the threshold.
fn logits(rank: usize, count: usize) -> MaxLogits {
    let mut logits = MaxLogits::new();
    let maxima = if rank + 1 == count { MAXIMA } else { [0.1; 2] };
    for attention in ["multi_head", "grouped", "latent", "fused"] {
        let maxima = Tensor::from_data(maxima, (&Device::default(), DType::F32));
        logits.report(attention, maxima);
    }
    logits
}

/// The weights of every rank after steps that clip heads.
fn on_ranks(count: usize, dtype: DType, muon: &MuonConfig) -> Vec<Vec<f32>> {
    // The mean of three equal gradients may differ from them in the last digit.
    let reduced = if count == 3 { Gradients::Averaged } else { Gradients::PerRank };
    let dist = DistMuonConfig::new()
        .with_muon(muon.clone())
        .with_gradients(reduced)
        .with_bucket_mb(Some(0.0003))
        .with_small_elements(4);
    let trained = ranks(count, |world: World| {
        let mut net = Net::new(dtype, world.device());
        let clip = net.clip()?;
        let mut optim = dist.init(&world, &net)?;
        for step in 0..STEPS {
            let logits = logits(world.rank(), world.size());
            optim.clip_heads(&clip.factors_on(&world, &logits)?);
            let grads = net.gradients(step, dtype);
            optim.request_diagnostics();
            net = optim.step(LR, net, grads)?;
            let attentions = optim.diagnostics()?.expect("the step was observed").attentions;
            assert!(attentions.len() == 4 && attentions.iter().all(|each| each.clipped == 1));
        }
        Ok(floats(&net))
    });
    trained.unwrap()
}

/// The weights after the steps of one device, each of which is followed by the clip.
fn clipped_after_the_step(muon: &MuonConfig) -> Vec<f32> {
    let mut net = Net::new(DType::F32, &device());
    let clip = net.clip().unwrap();
    let mut optim = muon.init(&net);
    for step in 0..STEPS {
        let grads = net.gradients(step, DType::F32);
        net = optim.step(LR, net, grads);
        net = clip.apply(net, &logits(0, 1)).unwrap().0;
    }
    floats(&net)
}

fn heads_are_those_that_are_clipped_after_the_step() {
    let matrices = || MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let blocks = matrices()
        .with_rule(RoutingRule::muon(r"(multi_head|latent)\..*\.weight").heads(2))
        .with_rule(RoutingRule::muon(r"qkv\.weight").split([8, 4, 4]));
    let whole = MuonConfig::new()
        .with_optimizer("adafactor", AdafactorConfig::new().build())
        .with_rule(RoutingRule::custom("", "adafactor"));
    for (name, muon) in [
        ("matrices", matrices()),
        ("blocks of matrices", blocks),
        ("elements", MuonConfig::new().with_rule(RoutingRule::adamw(""))),
        ("another optimizer", whole),
    ] {
        let expected = clipped_after_the_step(&muon);
        for count in [1, 2, 3, 4].into_iter().filter(worlds::has) {
            for weights in on_ranks(count, DType::F32, &muon) {
                assert_same(&weights, &expected, format_args!("{name}, {count} ranks"));
            }
        }
    }
}

fn heads_of_slices_are_clipped_as_those_of_whole_projections() {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let expected = clipped_after_the_step(&muon);
    let case = Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![
            (r"^multi_head\.query\.weight$", vec![("tp", 1, 1)]),
            (r"^multi_head\.key\.weight$", vec![("tp", 1, 1)]),
            (r"^latent\.query\.weight$", vec![("tp", 0, 1)]),
            (r"^fused\.qkv\.weight$", vec![("tp", 1, 1)]),
        ],
    };
    let dist = DistMuonConfig::new().with_muon(muon.clone()).with_bucket_mb(Some(0.0003));
    // The owners of matrices clip observed steps, and the ranks that have the slices all others.
    for observed in [false, true] {
        let trained = ranks(4, |world| {
            let layout = case.layout(&world)?.with_muon(muon.clone());
            let whole = Net::new(DType::F32, world.device());
            let clip = whole.clip()?;
            let mut net = layout.shard(whole.clone())?;
            let mut optim = dist.init_on(&layout, &net)?;
            for step in 0..STEPS {
                let logits = logits(world.rank(), world.size());
                optim.clip_heads(&clip.factors_on(&world, &logits)?);
                let grads = (&whole, whole.gradients(step, DType::F32));
                let grads = slices(&case, grads, &net, (world.rank(), false));
                if observed {
                    optim.request_diagnostics();
                }
                net = optim.step(LR, net, grads)?;
            }
            Ok(floats(&layout.unshard(&net)?))
        });
        for weights in trained.unwrap() {
            assert_same(&weights, &expected, format_args!("observed: {observed}"));
        }
    }
}

fn clipped_heads_keep_the_digits_of_master_weights() {
    if !has(FloatDType::BF16) {
        return;
    }
    let muon = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let wide = on_ranks(1, DType::F32, &muon).swap_remove(0);
    let rounded: Vec<f32> = wide.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
    for count in [1, 2, 4].into_iter().filter(worlds::has) {
        for weights in on_ranks(count, DType::BF16, &muon) {
            assert_same(&weights, &rounded, format_args!("{count} ranks"));
        }
    }
}

fn projections_that_are_divided_are_not_clipped_after_the_step() {
    type Lay = fn(&World) -> Result<Layout>;
    let slices: Lay = |world| {
        let mesh = Mesh::new(world, [Axis::model("tp", 2)])?;
        Ok(Layout::new(&mesh).with_place(Place::shard(r"multi_head\..*\.weight", "tp", 1)))
    };
    let owned: Lay = |world| Ok(Layout::from(world).owned("dp").with_small_elements(1));
    for (lay, words) in [(slices, "its shape has changed"), (owned, "it is divided among ranks")] {
        let errors = ranks(2, |world| {
            let net = Net::new(DType::F32, world.device());
            let clip = net.clip()?;
            let net = lay(&world)?.shard(net)?;
            let error = clip.apply(net, &logits(0, 1)).map(|_| ()).expect_err("it is divided");
            Ok(error.to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains(words) && error.contains("`multi_head."), "{error}");
        }
    }
}
