//! A model as ranks would have it that are not there.

use burn::module::Module;
use burn::tensor::Device;

use super::planned_world::Planned;
use crate::comm::World;
use crate::distributed::config::{CostSource, DistMuonConfig};
use crate::distributed::layout::Layout;
use crate::distributed::optimizer::{costs, ensure_exchangeable, plan};
use crate::distributed::plan::Plan;
use crate::distributed::trainable::{self, Trainable};
use crate::error::{Error, Result};
use crate::parameters::{self, Found};
use crate::routing::Routing;

/// The ranks of a forecast, on nodes, with what makes a rank's layout.
pub struct PlannedRanks<'a, M, L> {
    pub config: &'a DistMuonConfig,
    pub ranks: usize,
    pub nodes: usize,
    pub model: &'a M,
    pub layout: L,
}

impl<'a, M, L, E> PlannedRanks<'a, M, L>
where
    M: Module,
    L: Fn(&World) -> Result<Layout, E>,
    E: From<Error>,
{
    /// The first rank, whose layout chooses the owners.
    pub fn first(&self) -> Result<PlannedRank, E> {
        self.config.check()?;
        ensure_counted(self.config.costs)?;
        self.rank(0, None)
    }

    /// Another rank, with the owners of the first.
    pub fn next(&self, rank: usize, first: &PlannedRank) -> Result<PlannedRank, E> {
        self.rank(rank, Some(&first.layout))
    }

    fn rank(&self, rank: usize, first: Option<&Layout>) -> Result<PlannedRank, E> {
        // A world for each rank, since a layout knows the rank that it is on.
        let world = Planned::world(rank, self.ranks, self.nodes, device_of(self.model))?;
        let layout = (self.layout)(&world)?.overlapped(self.config.clone());
        Ok(PlannedRank::new(layout, first, self.model)?)
    }
}

/// Fails for costs that are measured, which ranks that are not there can't do.
fn ensure_counted(costs: CostSource) -> Result<()> {
    match costs {
        CostSource::Operations => Ok(()),
        CostSource::Measured => {
            let expected = "`Operations` (a forecast measures nothing)";
            Err(Error::setting("costs", "Measured", expected))
        }
    }
}

/// The device of the trained parameters.
fn device_of<M: Module>(model: &M) -> Device {
    let found = parameters::lazily(model).into_iter();
    found.filter(|found| found.trainable).map(|found| found.device).next().unwrap_or_default()
}

/// A model as a rank would have it.
pub struct PlannedRank {
    /// Has the configuration.
    pub layout: Layout,
    pub routing: Routing,
    pub trainable: Trainable,
    pub found: Vec<Found>,
}

impl PlannedRank {
    /// A rank with this layout, with the owners of the first rank's.
    fn new<M: Module>(layout: Layout, first: Option<&Layout>, model: &M) -> Result<Self> {
        let found = layout.divide(model, first)?;
        let routing = layout.config().muon.route_found(&found)?;
        let trainable = trainable::of_model(&routing, &found, &layout.cut_parameters())?;
        layout.check_planned(&trainable.planned)?;
        Ok(Self { layout, routing, trainable, found })
    }

    /// The plan of all ranks.
    pub fn plan(&self) -> Result<Plan> {
        let (parameters, world) = (self.trainable.planned.clone(), self.layout.world());
        ensure_exchangeable(&parameters, world.rank())?;
        let work = (&self.trainable.trainable[..], self.routing.updates());
        let costs = costs(self.layout.config(), &self.layout, &parameters, work)?;
        plan(self.layout.config(), &self.layout, parameters, &costs)
    }
}
