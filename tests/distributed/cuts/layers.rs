//! Slices of convolutions and of frozen layers, in micro-batches, with states that are records.

use std::path::Path;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use distmuon::distributed::{Axis, DistMuonConfig, Layout};
use distmuon::{GradientBuffer, MuonConfig, RoutingRule};
use distmuon_testing::models::{Fixed, bits, gradients, weights};
use distmuon_testing::worlds::Folder;

use super::{Cutting, product, slices};
use crate::ranks;

#[derive(Module, Debug)]
struct Pictures {
    filters: Conv2d,
    frozen: Linear,
    head: Linear,
}

impl Pictures {
    fn new(device: &Device) -> Self {
        let model = Self {
            filters: Conv2dConfig::new([3, 9], [3, 3]).init(device),
            frozen: LinearConfig::new(9, 10).with_bias(false).init(device),
            head: LinearConfig::new(10, 6).init(device),
        };
        let model = model.map(&mut Fixed::new(5));
        Self { frozen: model.frozen.no_grad(), ..model }
    }

    fn cutting() -> Cutting {
        Cutting {
            axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
            cuts: vec![
                ("^filters.", vec![("tp", 0, 1)]),
                ("^frozen.weight$", vec![("tp", 1, 1)]),
                ("^head.weight$", vec![("tp", 0, 1)]),
            ],
        }
    }

    /// Gradients of the trained parameters.
    fn gradients(&self, seed: u64) -> GradientsParams {
        let mut gradients = gradients(self, seed);
        gradients.remove::<2>(self.frozen.weight.id);
        gradients
    }

    fn loss(&self, mut gradients: GradientsParams) -> Tensor<1> {
        let bias = |bias: &Option<_>| bias.clone().expect("a bias");
        product(&self.filters.weight, &mut gradients)
            + product(&bias(&self.filters.bias), &mut gradients)
            + product(&self.head.weight, &mut gradients)
            + product(&bias(&self.head.bias), &mut gradients)
    }
}

/// A way to add up two micro-batches.
#[derive(Debug, Clone, Copy)]
enum Sum {
    Layout,
    Buffer,
}

fn config() -> DistMuonConfig {
    let muon = MuonConfig::new().with_rule(RoutingRule::muon(r"^filters\.weight").flatten());
    DistMuonConfig::new().with_muon(muon)
}

/// The weights of the whole model after some steps of two micro-batches, and a checkpoint.
fn train(
    case: &Cutting,
    change: impl Fn(Layout) -> Layout + Sync,
    sum: Sum,
    path: &Path,
) -> Vec<Vec<u8>> {
    let config = config();
    let nets = ranks(case.ranks(), |world| {
        let layout = change(case.layout(&world)?.with_muon(config.muon.clone()));
        let whole = Pictures::new(world.device());
        let mut net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        for step in 0..3 {
            let [first, second] = [0, 1].map(|batch| {
                let gradients = (&whole, whole.gradients(2 * step + batch));
                net.loss(slices(case, gradients, &net, (world.rank(), false)))
            });
            let gradients = match sum {
                Sum::Layout => {
                    layout.accumulate(&first, &net)?;
                    layout.backward(&second, &net)?
                }
                Sum::Buffer => {
                    let mut buffer = GradientBuffer::new();
                    buffer.add(&net, layout.backward(&first, &net)?)?;
                    buffer.add(&net, layout.backward(&second, &net)?)?;
                    buffer.take_sum()
                }
            };
            net = optim.step(0.01, net, gradients)?;
            let record = optim.to_record()?;
            optim = config.init_on(&layout, &net)?.load_record(record)?;
        }
        optim.save(path, &net, &3)?;
        let (net, _, steps): (_, _, i32) = optim.load(path, net)?;
        assert_eq!(steps, 3);
        let trained = layout.unshard(&net)?;
        assert!(bits(&trained.frozen.weight.val()) == bits(&whole.frozen.weight.val()));
        assert!(bits(&trained.head.weight.val()) != bits(&whole.head.weight.val()));
        Ok(weights(&trained))
    });
    nets.unwrap().swap_remove(0)
}

pub fn convolutions_and_frozen_layers_are_trained_as_whole_ones() {
    let (folder, one) =
        (Folder::create(), Cutting { axes: vec![Axis::data("dp", 1)], cuts: vec![] });
    let path = folder.path().join("pictures.bpk");
    let alone = train(&one, |layout| layout, Sum::Layout, &path);
    let layouts: [&(dyn Fn(Layout) -> Layout + Sync); 3] =
        [&|layout| layout, &|layout| layout.owned("dp").with_small_elements(8), &|layout| {
            layout.overlap_backward().with_small_elements(8)
        }];
    for (index, change) in layouts.into_iter().enumerate() {
        for sum in [Sum::Layout, Sum::Buffer] {
            let trained = train(&Pictures::cutting(), change, sum, &path);
            assert!(trained == alone, "layout {index}, {sum:?}");
            let loaded = ranks(1, |world| {
                let model = Pictures::new(world.device());
                let optim = config().init(&world, &model)?;
                let (model, _, _): (_, _, i32) = optim.load(&path, model)?;
                Ok(weights(&model))
            });
            assert!(loaded.unwrap()[0] == alone, "saved by layout {index}");
        }
    }
}
