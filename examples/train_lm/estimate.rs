//! The memory and the time of a run on ranks that need not be there.

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{Device, FloatDType};
use distmuon::distributed::{Axis, TimeAssumptions};

use super::exact_mars::exact_mars;
use super::model::GptConfig;
use super::optimizer::Contender;
use super::options::{Options, not_negative, positive};
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

/// A rate of a rank, in place of the one that a forecast of time assumes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    name: RateName,
    number: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum RateName {
    /// 10^12 floating-point operations per second.
    Tflops,
    /// GB of parameters per second in AdamW.
    AdamwGb,
    /// GB per second to the ranks of the node, and to other nodes.
    NodeGb,
    LinkGb,
    LatencyUs,
}

/// Parses `tflops=400`.
pub fn rate(text: &str) -> Result<Rate> {
    let form = "it must be NAME=NUMBER, with the names tflops, adamw-gb, node-gb, link-gb and \
                latency-us";
    let (name, number) = text.split_once('=').context(form)?;
    let (name, parsed) = match name {
        "tflops" => (RateName::Tflops, positive(number)),
        "adamw-gb" => (RateName::AdamwGb, positive(number)),
        "node-gb" => (RateName::NodeGb, positive(number)),
        "link-gb" => (RateName::LinkGb, positive(number)),
        "latency-us" => (RateName::LatencyUs, not_negative(number)),
        _ => bail!(form),
    };
    Ok(Rate { name, number: parsed.map_err(|error| anyhow!("{text}: {error}"))? })
}

impl Rate {
    fn replace(self, assumed: &mut TimeAssumptions) {
        let Self { name, number } = self;
        match name {
            RateName::Tflops => assumed.operations = number * 1e12,
            RateName::AdamwGb => assumed.elementwise = number * 1e9,
            RateName::NodeGb => assumed.inside.bandwidth = number * 1e9,
            RateName::LinkGb => assumed.across.bandwidth = number * 1e9,
            RateName::LatencyUs => {
                assumed.inside.latency = number / 1e6;
                assumed.across.latency = number / 1e6;
            }
        }
    }
}

/// Bytes of activations that a rank sums up or exchanges in both passes, of its part of a batch.
fn activations(sizes: &GptConfig, sharding: &Sharding, of_element: usize, tokens: usize) -> usize {
    let row = sizes.layers * sizes.width * of_element;
    // Two regions in a layer, each with a sum in either pass, of the tokens of all slices.
    let sums = if sharding.slices() > 1 { 4 * row * tokens * sharding.slices() } else { 0 };
    // Rows go to their experts and back in either pass, and an exchange counts half.
    let exchanges = if sharding.parts() > 1 { 2 * row * tokens } else { 0 };
    sums + exchanges
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

    /// The optimizer of a run with these options, if there can be one, and a forecast of it.
    fn contender(self, options: &Options, sharding: &Sharding) -> Result<Contender> {
        // The forecast has an error for no ranks.
        let ranks = self.ranks.max(1);
        options.check_batch(ranks.div_ceil(sharding.slices()))?;
        options.settings.check_sizes(sharding.slices(), sharding.parts())?;
        let contender = options.settings.contender_on(ranks, true)?;
        ensure!(
            contender.optimizer.is_shared(),
            "--estimate forecasts dist-muon and dist-adamw, not --optimizer {}; name one of them, \
             or leave --optimizer out",
            contender.optimizer.name()
        );
        sharding.check_limits()?;
        options.settings.check_muon(&[contender])?;
        options.settings.check_average()?;
        Ok(contender)
    }

    /// Prints the memory and the time of a run with these options, of which nothing is allocated.
    pub fn print(self, options: &Options) -> Result<()> {
        let (settings, sharding) = (&options.settings, self.sharding(&options.sharding));
        let contender = self.contender(options, &sharding)?;
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
        let in_passes = sharding.reduces_in_passes(self.ranks);
        let is_exact = exact_mars(contender, &config.muon, in_passes)?.is_some();
        let layout = |world: &_| sharding.layout(world, &config, &model);
        let memory = config.forecast_memory(self.ranks, self.nodes, &model, layout)?;
        println!(
            "{}, {}, {} bytes for each parameter\n{memory}",
            contender.name(),
            settings.describe(&sizes),
            settings.dtype.dtype().size()
        );
        let tokens = settings.batch * sizes.context;
        let mut assumed = TimeAssumptions::new(tokens as f64);
        let of_element = settings.dtype.dtype().size();
        assumed.activations = activations(&sizes, &sharding, of_element, tokens / self.ranks);
        options.assume.iter().for_each(|rate| rate.replace(&mut assumed));
        let time = config.forecast_time(self.ranks, self.nodes, &model, layout, &assumed)?;
        println!("\n{time}\n{assumed}");
        println!("\nMemory is without activations and the working memory of a step's kernels.");
        if is_exact {
            println!(
                "With exact MARS, a rank also has the model of the step before and gradients of it."
            );
        }
        Ok(())
    }
}
