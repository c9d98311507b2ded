//! The forecast of an iteration's time for a model and a layout, from assumed rates.

use std::fmt;

use burn::module::Module;

use super::{Links, Machine, PassTimes, Timeline, timeline};
use crate::comm::World;
use crate::distributed::config::{CostSource, DistMuonConfig};
use crate::distributed::forecast::planned_rank::PlannedRanks;
use crate::distributed::layout::Layout;
use crate::distributed::measured_costs;
use crate::distributed::plan::{Parameter, Plan};
use crate::error::{Error, Result};

/// Floating-point operations of a forward and a backward pass, for each parameter and token.
const OPERATIONS: f64 = 6.0;

/// The rates and the batch that [`DistMuonConfig::forecast_time`] assumes. Prints as three
/// lines.
///
/// The rates of [`new`](Self::new) are near the rates of a GPU of 2023: 400 TFLOP/s in products,
/// 3 TB/s of memory, over which AdamW passes eight times, 450 GB/s inside a node and 50 GB/s
/// between nodes, and 10 µs of latency. None of them was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct TimeAssumptions {
    /// Tokens of a step, on all ranks together.
    pub tokens: f64,
    /// Floating-point operations per second of a rank, in passes and in iterations.
    pub operations: f64,
    /// Bytes of parameters per second that a rank updates element by element.
    pub elementwise: f64,
    /// The links of a rank inside its node.
    pub inside: Links,
    /// The links of a rank to other nodes.
    pub across: Links,
    /// Bytes of activations and their gradients that a rank sums up with the ranks that have the
    /// other slices, in both passes together. Rows that are
    /// [exchanged](crate::parallel::exchange) count half, since they are sent once.
    pub activations: usize,
}

impl TimeAssumptions {
    /// Returns the assumptions for a number of tokens in a step, without activations that are
    /// summed up.
    pub fn new(tokens: f64) -> Self {
        let [inside, across] = [4.5e11, 5e10].map(|bandwidth| Links { bandwidth, latency: 1e-5 });
        Self { tokens, operations: 4e14, elementwise: 3e12 / 8.0, inside, across, activations: 0 }
    }

    /// The machine of ranks on nodes.
    fn machine(&self, ranks: usize, nodes: usize) -> Machine {
        let Self { elementwise, inside, across, .. } = *self;
        match nodes {
            1 => Machine { links: inside, node: None, elementwise },
            _ => Machine { links: across, node: Some((ranks / nodes, inside)), elementwise },
        }
    }

    /// Fails for rates with which no time is a number.
    fn check(&self) -> Result<()> {
        let Self { tokens, operations, elementwise, inside, across, .. } = *self;
        for (name, rate) in [
            ("operations", operations),
            ("elementwise", elementwise),
            ("inside.bandwidth", inside.bandwidth),
            ("across.bandwidth", across.bandwidth),
        ] {
            if rate.is_nan() || rate <= 0.0 {
                return Err(Error::setting(name, rate, "more than 0"));
            }
        }
        for (name, number) in [
            ("tokens", tokens),
            ("inside.latency", inside.latency),
            ("across.latency", across.latency),
        ] {
            if !number.is_finite() || number < 0.0 {
                return Err(Error::setting(name, number, "a finite number, at least 0"));
            }
        }
        Ok(())
    }
}

impl fmt::Display for TimeAssumptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, operations, elementwise, inside, across, activations } = *self;
        let links = |Links { bandwidth, latency }: Links| {
            format!("{} GB/s and {} us", bandwidth / 1e9, latency * 1e6)
        };
        write!(
            f,
            "assumed: {tokens} tokens a step, {} MB of activations in sums,\n{} TFLOP/s in \
             products, {} GB/s of parameters in AdamW,\nlinks of {} inside nodes and {} between \
             them",
            activations as f64 / 1e6,
            operations / 1e12,
            elementwise / 1e9,
            links(inside),
            links(across)
        )
    }
}

impl DistMuonConfig {
    /// Predicts the time of an iteration on `ranks` ranks on `nodes` nodes: a forward pass, a
    /// backward pass and a step. No rank runs, and parameters that are not initialised yet stay so.
    /// `layout` makes the layout of a rank, as for [`start`](Self::start).
    ///
    /// It goes through the messages of a plan on assumed links. A collective over `N` ranks passes
    /// `B` bytes in `latency ceil(log2 N) + B (N - 1) / (N bandwidth)`. A pass takes 6 operations
    /// for each trained parameter and token, and an iteration its products. Messages of
    /// the passes are hidden behind them where they arrive in time, as with
    /// [`AtFirstUse`](crate::distributed::Publish::AtFirstUse) and
    /// [`Keep::Nothing`](crate::distributed::Keep::Nothing). Launches, recomputed activations,
    /// other loads on the links, and ranks of different speed do not count. Parts that neither all
    /// ranks nor the ranks of a node share count as shared by all ranks.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::Device};
    /// use distmuon::distributed::{Layout, Links, Mesh, TimeAssumptions, Timeline};
    /// use distmuon::{DistMuonConfig, Error, World};
    ///
    /// let device = Device::default().autodiff();
    /// let layer = LinearConfig::new(4096, 4096).with_bias(false);
    /// let model: Vec<_> = (0..64).map(|_| layer.init(&device)).collect();
    /// let config = DistMuonConfig::new();
    /// let owned = |world: &World| Ok::<_, Error>(Layout::new(&Mesh::flat(world)).owned("dp"));
    /// let mut assumed = TimeAssumptions::new(65_536.0);
    /// assumed.inside = Links { bandwidth: 2e11, latency: 2e-5 };
    /// let forecast: Timeline = config.forecast_time(8, 1, &model, owned, &assumed)?;
    /// println!("{assumed}\n{forecast}");
    /// # assert!(forecast.total >= forecast.compute && forecast.communication > 0.0);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a rate that is not above 0, for tokens or latencies that are below 0
    /// or not finite, and for [`CostSource::Measured`], since nothing is measured; as
    /// [`forecast_memory`](Self::forecast_memory).
    pub fn forecast_time<M: Module, E: From<Error>>(
        &self,
        ranks: usize,
        nodes: usize,
        model: &M,
        layout: impl Fn(&World) -> Result<Layout, E>,
        assumed: &TimeAssumptions,
    ) -> Result<Timeline, E> {
        assumed.check()?;
        let rank = PlannedRanks { config: self, ranks, nodes, model, layout }.first()?;
        let plan = rank.plan()?;
        let passes = rank.layout.passes();
        let is_of_node = nodes > 1
            && rank.layout.owning().is_some_and(|owning| {
                owning.len() == ranks / nodes && owning.iter().all(|rank| *rank < ranks / nodes)
            });
        let costs = measured_costs::costs(
            CostSource::Operations,
            rank.layout.world(),
            plan.parameters(),
            &rank.trainable.trainable,
            rank.routing.updates(),
        )?;
        let times = PassTimes {
            seconds: OPERATIONS * elements(&plan) * assumed.tokens
                / (ranks as f64 * assumed.operations),
            inside_nodes: is_of_node,
            ahead: Some(passes.limits().ahead),
            in_flight: Some(passes.limits().in_flight),
            activations: assumed.activations,
        };
        let machine = assumed.machine(ranks, nodes);
        Ok(timeline(&plan, &costs.scaled(1.0 / assumed.operations), &machine, &times))
    }
}

/// The elements of all trained parameters.
fn elements(plan: &Plan) -> f64 {
    plan.parameters().iter().map(Parameter::elements).sum::<usize>() as f64
}
