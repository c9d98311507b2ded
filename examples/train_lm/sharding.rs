//! The division of the model among ranks.

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use distmuon::comm::World;
use distmuon::distributed::plan;
use distmuon::distributed::{
    self, Axis, CostSource, DistMuonConfig, Layout, Mesh, Publish, StatesOn,
};

use super::model::Gpt;
use super::options::{at_least_one, not_negative, positive};

/// The options that place parameters on ranks. The results are the same with all of them.
#[derive(Args, Debug, Clone, Default)]
pub struct Sharding {
    /// Axes of the ranks, the fastest links last. Default: dp, of all ranks.
    ///
    /// As in node=2,gpu=4. The sizes multiply to the number of ranks.
    ///
    /// The ranks of an axis tp have slices of the layers, and the same data.
    ///
    /// Those of ep have different experts. For dist-muon and dist-adamw.
    #[arg(long, value_delimiter = ',', value_name = "AXIS=RANKS,..", value_parser = axis)]
    #[arg(help_heading = "Ranks")]
    pub mesh: Vec<Axis>,
    /// Divides the parameters among the ranks along an axis of --mesh.
    ///
    /// A rank has the part that it updates. For dist-muon and dist-adamw.
    #[arg(long, value_name = "AXIS", help_heading = "Ranks")]
    pub owned: Option<String>,
    /// As --owned, with each matrix in equal rows.
    ///
    /// A rank has 1/N of every parameter, also of a single matrix.
    #[arg(long, value_name = "AXIS", help_heading = "Ranks", conflicts_with = "owned")]
    pub rows: Option<String>,
    /// Weights that are kept until the backward pass. Default: nothing.
    ///
    /// For --owned and --rows.
    #[arg(long, value_enum, help_heading = "Ranks")]
    pub keep: Option<Keep>,
    /// Sends messages during the passes. Default: true on several ranks.
    ///
    /// For dist-muon and dist-adamw.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "true", help_heading = "Ranks")]
    pub overlap: Option<bool>,
    /// Limits the MB that are gathered before their use. Default: two layers.
    ///
    /// For --owned and --rows.
    #[arg(long, value_name = "MB", value_parser = not_negative)]
    #[arg(help_heading = "Ranks")]
    pub ahead_mb: Option<f64>,
    /// Limits the MB of gradients on their way. Default: two layers.
    ///
    /// For dist-muon and dist-adamw.
    #[arg(long, value_name = "MB", value_parser = not_negative, help_heading = "Ranks")]
    pub in_flight_mb: Option<f64>,
    /// Keeps averaged gradients in the type of the parameters, as bf16.
    ///
    /// By default, they are float32. For gradients that a pass sends.
    #[arg(long, help_heading = "Ranks")]
    pub round_means: bool,
    /// Size of the optimizer's buckets in MB. An audit takes one bucket.
    ///
    /// Default: 25, or 1000 on one rank without --states-on host.
    ///
    /// For dist-muon and dist-adamw.
    #[arg(long, value_name = "MB", value_parser = positive, help_heading = "Ranks")]
    pub bucket_mb: Option<f64>,
    /// Chooses the owner of each matrix. Default: greedy.
    ///
    /// For dist-muon and dist-adamw, which print the plan.
    #[arg(long, value_enum, help_heading = "Ranks")]
    pub balancing: Option<Balancing>,
    /// Costs that are balanced. Default: operations.
    #[arg(long, value_enum, help_heading = "Ranks")]
    pub costs: Option<Costs>,
    /// Place of momentum, moments and master weights between steps.
    ///
    /// host is for a model on a GPU, and for dist-muon and dist-adamw.
    #[arg(long, value_enum, default_value_t, help_heading = "Ranks")]
    pub states_on: StatesPlace,
    /// Steps between two audits; 0 for none.
    ///
    /// Every rank then computes matrices of another again, to compare bits.
    ///
    /// For whole parameters, and without --overlap, which is then off.
    #[arg(long, value_name = "STEPS", default_value_t = 0, help_heading = "Ranks")]
    pub audit_every: usize,
}

/// The seconds after which the search for the best plan ends.
#[cfg(feature = "optimal")]
const SEARCH_S: f64 = 10.0;

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq)]
pub enum Balancing {
    /// The most expensive first, to the rank with least work.
    #[default]
    Greedy,
    /// In turns, whatever each costs.
    BlockCyclic,
    /// By mixed-integer programming, for up to ten seconds.
    Optimal,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq)]
pub enum Costs {
    /// Floating-point operations.
    #[default]
    Operations,
    /// Seconds, measured when the optimizer is made.
    Measured,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq)]
pub enum StatesPlace {
    /// The device of the model.
    #[default]
    Model,
    /// The host.
    Host,
}

#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq)]
pub enum Keep {
    /// None: they are gathered again.
    #[default]
    Nothing,
    /// All.
    Weights,
}

impl Sharding {
    /// Returns `true` if it needs an optimizer that sees the whole model.
    pub fn is_shared(&self) -> bool {
        let is_planned =
            self.balancing.is_some() || self.costs.is_some() || self.bucket_mb.is_some();
        let overlaps =
            self.overlap == Some(true) || self.in_flight_mb.is_some() || self.round_means;
        let is_special = self.states_on == StatesPlace::Host || self.audit_every > 0;
        is_planned || self.is_in_parts() || overlaps || is_special
    }

    /// Returns `true` if ranks have parts of parameters, slices or parts of the experts.
    fn is_in_parts(&self) -> bool {
        self.is_divided() || self.slices() > 1 || self.parts() > 1
    }

    /// Returns `true` if gradients and parameters are sent during the passes.
    fn overlaps(&self, ranks: usize) -> bool {
        self.overlap.unwrap_or(ranks > 1 && self.audit_every == 0)
    }

    /// Returns `true` if passes send gradients.
    pub fn reduces_in_passes(&self, ranks: usize) -> bool {
        self.is_divided() || self.overlaps(ranks)
    }

    /// Fails for limits of messages that are not sent, and of weights that are not gathered, and
    /// for audits of parameters that are divided.
    pub fn check_limits(&self) -> Result<()> {
        ensure!(
            self.keep.is_none() || self.is_divided(),
            "--keep says what is kept of weights that --owned and --rows gather; give one of them, \
             or leave it out"
        );
        ensure!(
            self.ahead_mb.is_none() || self.is_divided(),
            "--ahead-mb limits what --owned and --rows gather; give one of them, or leave it out"
        );
        ensure!(
            self.audit_every == 0 || !self.is_in_parts() && self.overlap != Some(true),
            "--audit-every compares parameters that every rank has whole, with their gradients; \
             leave --owned, --rows, --overlap and the axes tp and ep out"
        );
        ensure!(
            self.audit_every == 0 || self.in_flight_mb.is_none(),
            "--in-flight-mb limits gradients that a backward pass reduces, which none does with \
             --audit-every; leave one of them out"
        );
        // With any number of ranks above one, on which alone messages are sent.
        let sends = self.reduces_in_passes(2);
        ensure!(
            self.in_flight_mb.is_none() || sends,
            "--in-flight-mb limits gradients that a backward pass reduces; leave --overlap=false \
             out"
        );
        ensure!(
            !self.round_means || sends,
            "--round-means is for gradients that a backward pass reduces; leave --overlap=false \
             and --audit-every out"
        );
        Ok(())
    }

    /// The number of ranks of the axes, if there are any.
    pub fn ranks(&self) -> Option<usize> {
        (!self.mesh.is_empty()).then(|| self.mesh.iter().map(Axis::size).product())
    }

    /// The number of parts into which experts are divided.
    pub fn parts(&self) -> usize {
        self.mesh.iter().find(|axis| axis.name() == EXPERT).map_or(1, Axis::size)
    }

    /// The number of slices into which layers are cut.
    pub fn slices(&self) -> usize {
        self.mesh.iter().filter(|axis| axis.is_model()).map(Axis::size).product()
    }

    /// The time at which parameters are waited for.
    pub fn publish(&self, ranks: usize) -> Publish {
        if self.overlaps(ranks) { Publish::AtFirstUse } else { Publish::Now }
    }

    /// The settings of the library for owners, the place of the states, and audits.
    pub fn planned(&self, config: DistMuonConfig) -> Result<DistMuonConfig> {
        let balancing = match self.balancing.unwrap_or_default() {
            Balancing::Greedy => plan::Balancing::Greedy,
            Balancing::BlockCyclic => plan::Balancing::BlockCyclic,
            #[cfg(feature = "optimal")]
            Balancing::Optimal => plan::Balancing::Optimal { time_limit_s: SEARCH_S },
            #[cfg(not(feature = "optimal"))]
            Balancing::Optimal => anyhow::bail!(
                "--balancing optimal is missing in this program: build train_lm with --features \
                 optimal"
            ),
        };
        let costs = match self.costs.unwrap_or_default() {
            Costs::Operations => CostSource::Operations,
            Costs::Measured => CostSource::Measured,
        };
        let states = match self.states_on {
            StatesPlace::Model => StatesOn::Model,
            StatesPlace::Host => StatesOn::Host,
        };
        let config = config.with_balancing(balancing).with_costs(costs).with_states_on(states);
        Ok(config.with_audit_every(self.audit_every).with_bucket_mb(self.bucket_mb))
    }

    /// Describes the plan in a line.
    pub fn describe_plan(&self) -> String {
        let balancing = self.balancing.unwrap_or_default().to_possible_value();
        let balancing = balancing.expect("no value is skipped");
        let unit = match self.costs.unwrap_or_default() {
            Costs::Operations => "operations",
            Costs::Measured => "measured seconds",
        };
        format!("plan: {}, costs in {unit}", balancing.get_name())
    }

    /// The device of a rank, which computes activations again if weights are gathered again.
    pub fn device(&self, device: Device) -> Device {
        if self.gathers_again() { device.gradient_checkpointing() } else { device }
    }

    /// A rank on such a device.
    pub fn world(&self, world: World) -> World {
        if self.gathers_again() { world.gradient_checkpointing() } else { world }
    }

    fn gathers_again(&self) -> bool {
        self.is_divided() && self.keep.unwrap_or_default() == Keep::Nothing
    }

    /// Returns `true` if the ranks divide parameters between steps.
    fn is_divided(&self) -> bool {
        self.owned.is_some() || self.rows.is_some()
    }

    /// The layout for an optimizer with these settings. All ranks make this call.
    pub fn layout(&self, world: &World, config: &DistMuonConfig, model: &Gpt) -> Result<Layout> {
        let mesh = match &self.mesh[..] {
            [] => Mesh::flat(world),
            axes => Mesh::new(world, axes.iter().cloned())?,
        };
        let keep = self.keep.map(|keep| match keep {
            Keep::Nothing => distributed::Keep::Nothing,
            Keep::Weights => distributed::Keep::Weights,
        });
        let overlaps = self.overlaps(world.size());
        // One rank may neither divide nor overlap: then no gradient is sent in a pass.
        let sends = self.reduces_in_passes(world.size());
        let in_flight_mb = self.in_flight_mb.filter(|_| sends);
        let layout = Layout::new(&mesh).with_config(config.clone());
        let layout = keep.into_iter().fold(layout, Layout::with_keep);
        let layout = self.ahead_mb.into_iter().fold(layout, Layout::with_ahead_mb);
        let layout = in_flight_mb.into_iter().fold(layout, Layout::with_in_flight_mb);
        let layout = match self.slices() {
            1 => layout,
            _ => model.places_of_slices(TENSOR).into_iter().fold(layout, Layout::with_place),
        };
        let layout = match self.parts() {
            1 => layout,
            _ => layout.with_place(Gpt::places_of_experts(EXPERT)),
        };
        let layout = if overlaps { layout.overlap_backward() } else { layout };
        let layout = if self.round_means && sends { layout.round_means() } else { layout };
        Ok(match (&self.owned, &self.rows) {
            (Some(axis), _) => layout.owned(axis),
            (None, Some(axis)) => layout.rows(axis),
            (None, None) => layout,
        })
    }
}

/// A model whose parameters a layout has divided, with the ranks that have the other slices and
/// experts.
pub fn on_ranks(model: Gpt, layout: &Layout) -> Gpt {
    let mesh = layout.mesh();
    model.on_ranks(mesh.group(TENSOR), mesh.group(EXPERT))
}

/// The names of the axes of tensor parallelism, and of experts.
const TENSOR: &str = "tp";
const EXPERT: &str = "ep";

/// Parses an axis.
fn axis(text: &str) -> Result<Axis> {
    let (name, ranks) = text.split_once('=').context("it must be AXIS=RANKS, as in gpu=2")?;
    ensure!(!name.is_empty(), "it must be AXIS=RANKS, as in gpu=2");
    let ranks = at_least_one(ranks).context("RANKS")?;
    Ok(if name == TENSOR { Axis::model(name, ranks) } else { Axis::data(name, ranks) })
}
