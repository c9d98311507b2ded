//! The memory of a run on ranks that need not be there.

use anyhow::{Context, Result, anyhow, bail};
use burn::tensor::{Device, FloatDType};
use distmuon::distributed::Axis;

use super::options::Options;
use super::settings::Dtype;
use super::sharding::Sharding;

/// The numbers of ranks and of nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    ranks: usize,
    nodes: usize,
}

/// Parses `ranks=8,nodes=2`.
pub fn estimate(text: &str) -> Result<Estimate> {
    let form = "it must be ranks=RANKS, or ranks=RANKS,nodes=NODES";
    let mut estimate = Estimate { ranks: 0, nodes: 1 };
    let mut names = vec![];
    for part in text.split(',') {
        let (name, number) = part.split_once('=').context(form)?;
        let number = number.parse().with_context(|| name.to_owned())?;
        match name {
            "ranks" => estimate.ranks = number,
            "nodes" => estimate.nodes = number,
            _ => bail!(form),
        }
        names.push(name);
    }
    match names[..] {
        ["ranks"] | ["ranks", "nodes"] | ["nodes", "ranks"] => Ok(estimate),
        _ => bail!(form),
    }
}

impl Estimate {
    /// The axes of the ranks: those that are given, or else of the nodes.
    fn sharding(self, given: &Sharding) -> Sharding {
        let Self { ranks, nodes } = self;
        let mut sharding = given.clone();
        if sharding.mesh.is_empty() && nodes > 1 && ranks.is_multiple_of(nodes) {
            sharding.mesh = vec![Axis::data("node", nodes), Axis::data("gpu", ranks / nodes)];
        }
        sharding
    }

    /// Prints the memory of a run with these options, of which nothing is allocated.
    pub fn print(self, options: &Options) -> Result<()> {
        let (settings, sharding) = (&options.settings, self.sharding(&options.sharding));
        let contender = settings.contender_on(self.ranks.max(1), true)?;
        settings.check_axes(sharding.slices(), sharding.parts())?;
        let mut device = Device::default();
        let dtype = match settings.dtype {
            Dtype::F32 => FloatDType::F32,
            Dtype::Bf16 => FloatDType::BF16,
            Dtype::F16 => FloatDType::F16,
        };
        // Of the parameters, which are never initialised.
        device.configure(dtype).map_err(|error| anyhow!("--dtype: {error:?}"))?;
        let sizes = settings.model(settings.vocabulary());
        let model = sizes.init(&device.autodiff());
        let config = contender.config(settings, &sharding, self.ranks)?;
        let forecast = config.forecast_memory(self.ranks, self.nodes, &model, |world| {
            sharding.layout(world, &config, &model)
        })?;
        println!("{}, {}\n{forecast}", contender.name(), settings.describe(&sizes));
        Ok(())
    }
}
