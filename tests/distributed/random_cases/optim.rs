//! The optimizers of runs: this crate's on all ranks, and two that are compared with it.

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{AdafactorConfig, GradientsParams, LambConfig, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Tensor};
use burn_pack::Reader;
use distmuon::checkpoint::{self, Difference, Saver};
use distmuon::comm::World;
use distmuon::custom::Soap;
use distmuon::distributed::DistMuonConfig;
use distmuon::{DistModuleOptimizer, MuonConfig, Result, RoutingRule, SkippedSteps};
use distmuon_testing::naive;

use super::model::Net;

/// An optimizer that is neither Muon nor AdamW.
#[derive(Debug, Clone, Copy)]
pub enum Other {
    /// For parameters of all shapes.
    Adafactor,
    Lamb,
    /// A layer optimizer, for which the host does not wait.
    Soap,
}

/// The parameters that another optimizer updates.
#[derive(Debug, Clone, Copy)]
pub struct Users {
    pub optimizer: Other,
    /// `true` for all layers but stacks, and `false` for the table and the head.
    pub has_layers: bool,
}

impl Users {
    /// Settings with the other optimizer, behind earlier rules.
    pub fn add_to(self, muon: MuonConfig) -> MuonConfig {
        let muon = match self.optimizer {
            Other::Adafactor => muon.with_optimizer("users", AdafactorConfig::new().build()),
            Other::Lamb => muon.with_optimizer("users", LambConfig::new().build()),
            Other::Soap => muon.with_layer_optimizer("users", Soap::default()),
        };
        let pattern = if self.has_layers { "embedding|layers" } else { "embedding|head" };
        muon.with_rule(RoutingRule::custom(pattern, "users"))
    }
}

/// The optimizer of a run.
pub enum Optim {
    Ranks(DistModuleOptimizer),
    /// One rank's, on every rank, with the means of all gradients.
    Everything(DistModuleOptimizer, World),
    Burn(ModuleOptimizer, SkippedSteps),
}

impl Optim {
    /// The optimizer of one rank that gets the means of all gradients.
    pub fn everything(config: &DistMuonConfig, world: &World, net: &Net) -> Result<Self> {
        let alone = World::alone(world.device().clone());
        Ok(Self::Everything(config.init(&alone, net)?, world.clone()))
    }

    pub fn burn(config: &DistMuonConfig, net: &Net) -> Result<Self> {
        let routing = config.muon.route(net)?;
        Ok(Self::Burn(routing.init(), routing.skipped_steps().clone()))
    }

    pub fn step(&mut self, rate: f64, net: Net, gradients: GradientsParams) -> Result<Net> {
        match self {
            Self::Ranks(optim) => optim.step(rate, net, gradients),
            Self::Everything(optim, world) => {
                let gradients = completed(world, &net, gradients)?;
                let means = naive::means(world.comm(), &net, gradients)?;
                optim.step(rate, net, means)
            }
            Self::Burn(optim, _) => Ok(optim.step(rate, net, gradients)),
        }
    }

    /// Saves a run, on all ranks.
    pub fn save(&self, saver: &mut Saver, path: &Path, net: &Net, passes: usize) -> Result<()> {
        match self {
            Self::Ranks(optim) => saver.save(path, net, optim, &passes)?,
            Self::Everything(optim, world) if world.is_main() => {
                saver.save(path, net, optim, &passes)?;
            }
            Self::Everything(..) => {}
            Self::Burn(optim, _) => saver.save(path, net, optim, &passes)?,
        }
        saver.wait()
    }

    /// Loads all of a run.
    pub fn load(self, path: &Path, net: Net) -> Result<(Net, Self, usize)> {
        match self {
            Self::Ranks(optim) => {
                let (net, optim, passes) = optim.load(path, net)?;
                Ok((net, Self::Ranks(optim), passes))
            }
            Self::Everything(optim, world) => {
                let (net, optim, passes) = optim.load(path, net)?;
                Ok((net, Self::Everything(optim, world), passes))
            }
            Self::Burn(optim, skipped) => {
                let (net, optim, passes) = checkpoint::load(path, net, optim)?;
                Ok((net, Self::Burn(optim, skipped), passes))
            }
        }
    }

    /// Loads what fits of a run.
    pub fn load_matching(
        self,
        path: &Path,
        net: Net,
    ) -> Result<(Net, Self, usize, Vec<Difference>)> {
        match self {
            Self::Ranks(optim) => {
                let (net, optim, passes, rest) = checkpoint::load_matching(path, net, optim)?;
                Ok((net, Self::Ranks(optim), passes, rest))
            }
            Self::Everything(optim, world) => {
                let (net, optim, passes, rest) = checkpoint::load_matching(path, net, optim)?;
                Ok((net, Self::Everything(optim, world), passes, rest))
            }
            Self::Burn(optim, skipped) => {
                let (net, optim, passes, rest) = checkpoint::load_matching(path, net, optim)?;
                Ok((net, Self::Burn(optim, skipped), passes, rest))
            }
        }
    }

    /// The counts of skipped steps, and of the steps without a gradient, which Burn's optimizer
    /// does not have.
    pub fn counts(&self) -> Vec<(String, Vec<u8>)> {
        let text = |map: BTreeMap<String, u64>| format!("{map:?}").into_bytes();
        let (skipped, absent) = match self {
            Self::Ranks(optim) | Self::Everything(optim, _) => {
                (optim.skipped_steps(), Some(optim.absent()))
            }
            Self::Burn(_, skipped) => (skipped, None),
        };
        let absent = absent.map(|absent| format!("{absent:?}").into_bytes());
        let absent = absent.map(|absent| (ABSENT.to_owned(), absent));
        [("skipped steps".to_owned(), text(skipped.read()))].into_iter().chain(absent).collect()
    }

    /// The bytes of the states, by the parameters that the record names: Burn's does not.
    pub fn states(&self) -> Result<Vec<(String, Vec<u8>)>> {
        match self {
            Self::Ranks(optim) | Self::Everything(optim, _) => Ok(states(optim.to_record()?)),
            Self::Burn(..) => Ok(vec![]),
        }
    }
}

/// The names of what Burn's optimizer does not have, or has otherwise: counts of steps without a
/// gradient, the differences to a run that was loaded, and the paths of states.
pub const ABSENT: &str = "steps without a gradient";
pub const DIFFERENCES: &str = "differences";
pub const STATE: &str = "state of";

/// The tensors and numbers of a record, by path and name.
fn states(record: OptimizerRecord) -> Vec<(String, Vec<u8>)> {
    let bytes = record.into_bytes().expect("a record can be written");
    let reader = Reader::from_bytes(bytes).expect("a record can be read");
    let named = |name: &str| {
        let (id, state) = name.split_once('.').unwrap_or((name, ""));
        let path = reader.metadata().get(id).map_or(id, String::as_str);
        format!("{STATE} {path}: {state}")
    };
    let tensor = |name: &str| reader.tensor_data(name).expect("the record has this tensor");
    let tensors = reader.tensor_names().into_iter().map(|name| (named(name), tensor(name)));
    let scalars = reader.scalars().iter();
    let scalars = scalars.map(|(name, value)| (named(name), format!("{value:?}").into_bytes()));
    let mut states: Vec<_> = tensors.chain(scalars).collect();
    states.sort_unstable();
    states
}

/// A rank's gradients, with zeros for those that only other ranks have.
fn completed(world: &World, net: &Net, gradients: GradientsParams) -> Result<GradientsParams> {
    let mut completing = Completing { gradients, bits: vec![], zeros: None };
    net.visit(&mut completing);
    let united = world.comm().or_bytes(std::mem::take(&mut completing.bits))?;
    completing.zeros = Some(united.into_iter().rev().collect());
    net.visit(&mut completing);
    Ok(completing.gradients)
}

struct Completing {
    gradients: GradientsParams,
    /// 1 for every parameter with a gradient, 0 for others.
    bits: Vec<u8>,
    /// The bits of all ranks, the first parameter's last.
    zeros: Option<Vec<u8>>,
}

impl ModuleVisitor for Completing {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let found = self.gradients.get::<D>(param.id).is_some();
        let Some(all) = &mut self.zeros else { return self.bits.push(u8::from(found)) };
        if all.pop() == Some(1) && !found {
            let value = param.val().inner();
            let zeros = Tensor::<D>::zeros(value.shape(), (&value.device(), DType::F32));
            self.gradients.register(param.id, zeros);
        }
    }
}

/// The mean of several ranks' gradients, added up in pairs of neighbouring ranks.
pub fn mean(net: &Net, mut gradients: Vec<GradientsParams>) -> GradientsParams {
    let ranks = gradients.len();
    while gradients.len() > 1 {
        let mut rest = gradients.into_iter();
        let mut sums = vec![];
        while let Some(left) = rest.next() {
            let right = rest.next().expect("a power of two of ranks");
            let mut adding = Adding { left, right, sums: GradientsParams::new(), factor: 1.0 };
            net.visit(&mut adding);
            sums.push(adding.sums);
        }
        gradients = sums;
    }
    let (left, right) = (gradients.remove(0), GradientsParams::new());
    let factor = 1.0 / ranks as f64;
    let mut dividing = Adding { left, right, sums: GradientsParams::new(), factor };
    net.visit(&mut dividing);
    dividing.sums
}

/// Adds up the gradients of two ranks, and multiplies the sums.
struct Adding {
    left: GradientsParams,
    right: GradientsParams,
    sums: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Adding {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let sum = match [self.left.remove::<D>(param.id), self.right.remove::<D>(param.id)] {
            [Some(left), Some(right)] => left + right,
            [Some(one), None] | [None, Some(one)] => one,
            [None, None] => return,
        };
        self.sums.register(param.id, sum * self.factor);
    }
}
