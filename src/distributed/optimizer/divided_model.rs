//! A model as the ranks divide it: its parameters, the plan of their owners, and the ranks.

use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::agree_on_setup;
use crate::checks::ensure_computed;
use crate::comm::World;
use crate::distributed::config::DistMuonConfig;
use crate::distributed::layout::{Layout, Passes};
use crate::distributed::plan::{Bucket, Costs, Plan};
use crate::distributed::sliced_parameters::Cuts;
use crate::distributed::trainable::{self, ModelParameter, Trainable, TrainableParameter};
use crate::error::Result;
use crate::parameters;
use crate::routing::Routing;
use crate::update::ensure_rate;

/// The parameters of a model, the ranks that train them, and what each rank has. Of all that, a
/// step changes only the identities and the positions in the schedules.
pub struct DividedModel {
    pub world: World,
    pub layout: Layout,
    /// The parameters that are divided among ranks between steps.
    pub passes: Arc<Passes>,
    /// The parameters of which this rank has a slice.
    pub cuts: Cuts,
    pub routing: Routing,
    pub plan: Plan,
    pub costs: Costs,
    /// In the order of the model.
    pub parameters: Vec<ModelParameter>,
    /// In the order of the plan.
    pub trainable: Vec<TrainableParameter>,
    /// The device of the states between updates, if it is not the model's.
    pub states_device: Option<Device>,
}

/// Bytes of a parameter between steps: of the whole, of this rank's slice, or of its part.
pub fn bytes_of_parameter(parameter: &ModelParameter, passes: &Passes) -> usize {
    let elements = match passes.get(&parameter.path) {
        // A rank without a part has one element, since a parameter can't be empty.
        Some(owned) if parameter.placement.is_owned() => owned.part_count().max(1),
        _ => parameter.shape.iter().product(),
    };
    elements * parameter.dtype.size()
}

impl DividedModel {
    /// Agrees on the parameters, the optimizer of each and the plan. All ranks make this call.
    pub fn new<M: Module>(config: &DistMuonConfig, layout: &Layout, model: &M) -> Result<Self> {
        let world = layout.world();
        // First: what follows depends on the configuration, and would differ in ways that explain
        // less.
        world.same_config(config)?;
        // Ranks compare the initial values. A rank alone leaves it to Burn when they are drawn: a
        // program may still load a record into layers that are not initialised.
        let mut found = match world.size() {
            1 => parameters::lazily(model),
            _ => parameters::of(model),
        };
        let cuts = layout.cut_parameters();
        // Agreed at once: a rank that returned here would leave the others waiting in the next
        // call.
        world.agree(cuts.restore_whole(&mut found, world.rank()))?;
        let checked = config.check().and_then(|()| layout.ensure_overlaps(config));
        let routed = checked.and_then(|()| config.muon.route_found(&found));
        let routing = world.agree(routed)?;
        let Trainable { model: parameters, trainable, planned } =
            world.agree(trainable::of_model(&routing, &found, &cuts))?;
        world.agree(layout.check_planned(&planned))?;
        // Before costs are measured, which takes long and is of no use for models that differ.
        agree_on_setup::same_model(layout, &planned, model)?;
        // The parameters are equal on all ranks here, so all ranks fail alike.
        agree_on_setup::ensure_exchangeable(&planned, world.rank())?;
        agree_on_setup::ensure_followed(config, layout, &planned)?;
        let work = (&trainable[..], routing.updates());
        let costs = agree_on_setup::costs(config, layout, &planned, work)?;
        let plan = agree_on_setup::plan(config, layout, planned, &costs)?;
        let states_device = config.states_device(&world.device().clone().inner());
        Ok(Self {
            world: world.clone(),
            layout: layout.clone(),
            passes: layout.passes(),
            cuts,
            routing,
            plan,
            costs,
            parameters,
            trainable,
            states_device,
        })
    }

    /// The device of this rank, without autodiff.
    pub fn device(&self) -> Device {
        self.world.device().clone().inner()
    }

    /// The path of a trained parameter.
    pub fn path(&self, index: usize) -> &str {
        &self.trainable[index].path
    }

    /// The model's parameter that a trained one is, or is a block of.
    pub fn of_model(&self, index: usize) -> &ModelParameter {
        &self.parameters[self.trainable[index].model]
    }

    /// The steps that each trained parameter has taken part in.
    pub fn times(&self) -> Vec<usize> {
        self.trainable.iter().map(|parameter| parameter.time).collect()
    }

    /// Bytes of this rank's parameters between steps.
    pub fn bytes(&self) -> usize {
        self.parameters.iter().map(|parameter| bytes_of_parameter(parameter, &self.passes)).sum()
    }

    /// Counts a step in which the `present` parameters took part.
    pub fn advance(&mut self, present: &[bool]) {
        for (parameter, present) in self.trainable.iter_mut().zip(present) {
            parameter.time += usize::from(*present);
        }
    }

    /// The learning rate of every trained parameter, before the factors of roles and shapes.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`](crate::Error::Usage) for a rate that no step can use.
    pub fn learning_rates(&self, lr: &ModuleLearningRate) -> Result<Vec<f64>> {
        let lrs: Vec<f64> = (0..self.trainable.len())
            .map(|index| {
                let ModelParameter { id, path, .. } = self.of_model(index);
                lr.lr_from_param(*id, Some(path))
            })
            .collect();
        // Here and not in the update: no rank has sent anything yet.
        lrs.iter().try_for_each(|lr| ensure_rate(*lr))?;
        Ok(lrs)
    }

    /// Fails if the device had no memory for the buffer of a bucket.
    pub fn ensure_bucket_computed(&self, bucket: &Bucket, buffer: &Tensor<1>) -> Result<()> {
        // A buffer has no path: its first parameter stands for it.
        ensure_computed(self.path(bucket.parameters[0]), buffer)
    }
}
