//! Adapters of layers that are frozen and divided: the bits of one rank, no reduction of what is
//! frozen, and checkpoints that move.

use std::ops::Range;
use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor};
use distmuon::comm::World;
use distmuon::distributed::{DistMuonConfig, Keep, Layout, Mesh, Place, Publish};
use distmuon::{Error, Result, checkpoint};
use distmuon_testing::models::{Fixed, bits, weights};
use distmuon_testing::watched::counted;
use distmuon_testing::worlds::{self, Folder};

use super::{Run, TOKENS, tokens, with_checkpoints};
use crate::{device, ranks, ranks_here};

const WIDTH: usize = 32;
const RANK: usize = 4;

/// A frozen layer, and two factors of a low rank that are trained instead, as in LoRA.
#[derive(Module, Debug)]
struct Adapted {
    base: Linear,
    down: Linear,
    up: Linear,
}

impl Adapted {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.base.forward(x.clone()) + self.up.forward(self.down.forward(x)) * 0.5
    }
}

#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Adapted>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let adapted = |_| Adapted {
            base: linear(WIDTH, WIDTH),
            down: linear(WIDTH, RANK),
            up: linear(RANK, WIDTH),
        };
        let net = Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            layers: (0..3).map(adapted).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: linear(WIDTH, TOKENS),
        };
        let mut net = net.map(&mut Fixed::new(17));
        net.embedding = net.embedding.no_grad();
        net.layers = net.layers.into_iter().map(Adapted::frozen).collect();
        net
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.embedding.forward(tokens);
        let x = self.layers.iter().fold(x, |x, layer| relu(layer.forward(x)));
        self.head.forward(self.norm.forward(x)).square().mean()
    }

    /// The bits of the parameters that are frozen.
    fn frozen(&self) -> Vec<Vec<u8>> {
        let bases = self.layers.iter().map(|layer| bits(&layer.base.weight.val()));
        bases.chain([bits(&self.embedding.weight.val())]).collect()
    }
}

impl Adapted {
    fn frozen(self) -> Self {
        Self { base: self.base.no_grad(), ..self }
    }
}

fn config() -> DistMuonConfig {
    DistMuonConfig::new().with_small_elements(8).with_bucket_mb(Some(0.002))
}

/// The places of the base and of the factors.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Replicated,
    /// All that is frozen is divided, and nothing else.
    Base,
    /// All parameters are divided, but for the small ones that are trained.
    All,
}

impl Kind {
    fn layout(self, world: &World) -> Layout {
        let layout = Layout::new(&Mesh::flat(world)).with_muon(config().muon);
        let frozen = Place::owned(r"base|embedding");
        match self {
            Self::Replicated => layout,
            Self::Base => layout
                .owned("dp")
                .with_place(Place::replicated(r"down|up|norm|head"))
                .with_place(frozen),
            Self::All => layout.owned("dp").with_small_elements(8).with_place(frozen),
        }
    }
}

/// The losses and the weights after some steps on the same tokens, from a file if it is given, and
/// saved in another.
fn trained(
    world: &World,
    layout: &Layout,
    config: &DistMuonConfig,
    steps: Range<usize>,
    [from, to]: [Option<&Path>; 2],
) -> Result<Run> {
    let device = world.device();
    let mut net = layout.shard(Net::new(device))?;
    let mut optim = config.init_on(layout, &net)?;
    if let Some(path) = from {
        let step: usize;
        (net, optim, step) = optim.load(path, net)?;
        assert_eq!(step, steps.start);
    }
    let mut losses = vec![];
    for step in steps.clone() {
        let loss = net.loss(tokens(0, step, device));
        losses.push(bits(&loss));
        let gradients = layout.backward(&loss, &net)?;
        net = optim.step(0.01, net, gradients)?;
        losses.push(bits(&net.valid().loss(tokens(1, step, &device.clone().inner()))));
    }
    if let Some(path) = to {
        optim.save(path, &net, &steps.end)?;
    }
    let whole = layout.unshard(&net)?;
    let training = |param: &Param<Tensor<2>>| param.is_require_grad();
    for layer in &whole.layers {
        assert!(!training(&layer.base.weight), "the base stays frozen");
        assert!(training(&layer.down.weight) && training(&layer.up.weight), "factors do not");
    }
    Ok((losses, weights(&whole)))
}

pub fn adapters_of_a_divided_base_train_as_on_one_rank() {
    let run = |count: usize, kind: Kind, keep, ahead_mb, config: &DistMuonConfig| {
        let runs = ranks(count, |world| {
            let world = with_checkpoints(&world);
            let layout = match kind {
                Kind::Replicated => kind.layout(&world),
                _ => kind.layout(&world).with_keep(keep).with_ahead_mb(ahead_mb),
            };
            trained(&world, &layout, config, 0..4, [None; 2])
        });
        let mut runs = runs.unwrap();
        assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "the ranks agree");
        runs.swap_remove(0)
    };
    let expected = run(1, Kind::Replicated, Keep::Weights, 64.0, &config());
    assert_ne!(expected.0[0], expected.0[6], "it trains");
    // With equal data, the mean over a power of two of ranks is exact.
    for count in [1, 2, 4].into_iter().filter(worlds::has) {
        for kind in [Kind::Replicated, Kind::Base, Kind::All] {
            for (keep, ahead_mb) in [(Keep::Nothing, 64.0), (Keep::Weights, 0.0)] {
                for publish in [Publish::Now, Publish::AtFirstUse] {
                    let config = config().with_publish(publish);
                    let what = format!("{count} ranks, {kind:?}, {keep:?}, {publish:?}");
                    assert!(run(count, kind, keep, ahead_mb, &config) == expected, "{what}");
                }
            }
        }
    }
    assert_eq!(expected.1.len(), weights(&Net::new(&device())).len());
}

pub fn checkpoints_with_a_divided_base_continue_on_other_ranks() {
    let folder = Folder::create();
    let path = |count: usize, kind: Kind| folder.path().join(format!("{count}-{kind:?}.ckpt"));
    let places: Vec<(usize, Kind)> =
        [(1, Kind::Replicated), (2, Kind::Base), (4, Kind::All), (2, Kind::All)]
            .into_iter()
            .filter(|(count, _)| worlds::has(count))
            .collect();
    let run = |(count, kind): (usize, Kind), steps: Range<usize>, files: [Option<&Path>; 2]| {
        let runs = ranks(count, |world| {
            let world = with_checkpoints(&world);
            trained(&world, &kind.layout(&world), &config(), steps.clone(), files)
        });
        runs.unwrap().swap_remove(0).1
    };
    let expected = run(places[0], 0..4, [None; 2]);
    for (count, kind) in places.clone() {
        let saved = path(count, kind);
        run((count, kind), 0..2, [None, Some(&saved)]);
        for other in places.clone() {
            let weights = run(other, 2..4, [Some(&saved), None]);
            assert!(weights == expected, "{count}, {kind:?} to {other:?}");
        }
        // Without ranks.
        let net = Net::new(&device());
        let optim = config().muon.init(&net);
        let (net, _, step): (_, _, usize) = checkpoint::load(&saved, net, optim).unwrap();
        assert_eq!((step, net.frozen()), (2, Net::new(&device()).frozen()));
    }
}

pub fn a_divided_base_is_held_in_parts_and_never_reduced() {
    let run = |kind: Kind| {
        let runs = ranks_here(4, |world| {
            let (comm, traffic) = counted(world.communicator());
            let world = with_checkpoints(&World::new(comm, world.device().clone()));
            let layout = kind.layout(&world);
            let net = layout.shard(Net::new(world.device()))?;
            let mut optim = config().init_on(&layout, &net)?;
            traffic.lock().unwrap().clear();
            let loss = net.loss(tokens(0, 0, world.device()));
            let gradients = layout.backward(&loss, &net)?;
            optim.step(0.01, net, gradients)?;
            let traffic = traffic.lock().unwrap().clone();
            Ok(["reduce_scatter", "all_gather"].map(|call| traffic.get(call).copied().unwrap_or(0)))
        });
        runs.unwrap()
    };
    let (replicated, divided) = (run(Kind::Replicated), run(Kind::Base));
    for ([reduced, gathered], [also_reduced, more]) in replicated.into_iter().zip(divided) {
        assert_eq!(reduced, also_reduced, "what is frozen has no gradient on its way");
        assert!(more > gathered, "and is gathered for its uses: {more} and {gathered} bytes");
    }
    let parts = ranks_here(4, |world| {
        let table = Kind::Base.layout(&world).table(&Net::new(world.device()))?;
        let elements = |path: &str| table.parts(path);
        Ok(["embedding.weight", "layers.1.base.weight", "layers.1.up.weight"].map(elements))
    });
    let [embedding, base, up] = parts.unwrap().swap_remove(0);
    assert_eq!(base, Some(vec![WIDTH * WIDTH / 4; 4]), "rows of the base, one part on each rank");
    assert_eq!(up, None, "the factors are on every rank");
    let embedding = embedding.expect("the frozen table is divided");
    assert!(embedding.iter().sum::<usize>() >= TOKENS * WIDTH && embedding.len() == 4);
}

pub fn places_of_frozen_parameters_are_checked() {
    let errors = ranks_here(2, |world| {
        let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
        let layout = layout.with_place(Place::owned("adapter"));
        Ok(layout.shard(Net::new(world.device())).map(|_| ()).unwrap_err())
    });
    for error in errors.unwrap() {
        assert!(matches!(error, Error::UnusedRule { .. }), "{error}");
    }
    // Unless a place names them, frozen parameters are on every rank.
    let parts = ranks_here(2, |world| {
        let layout = Layout::new(&Mesh::flat(&world)).owned("dp").with_small_elements(8);
        let table = layout.table(&Net::new(world.device()))?;
        Ok(["layers.0.base.weight", "layers.0.up.weight"].map(|path| table.parts(path).is_some()))
    });
    assert_eq!(parts.unwrap(), vec![[false, true]; 2]);
}
