//! The agreement of the ranks before the first step.

use std::collections::HashSet;

use burn::module::{Module, Param};
use burn::tensor::{Tensor, TensorData};

use crate::checksum;
use crate::comm::{World, exchanges};
use crate::distributed::config::{DistMuonConfig, Gradients};
use crate::distributed::layout::Layout;
use crate::distributed::measured_costs;
use crate::distributed::plan::{Costs, Parameter, Plan};
use crate::distributed::same_parameters::{first_unequal, same_parameters};
use crate::distributed::sliced_parameters::SliceGroup;
use crate::distributed::trainable::TrainableParameter;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};
use crate::routing::Updates;

/// Fails for types that ranks can't exchange.
pub fn ensure_exchangeable(parameters: &[Parameter], rank: usize) -> Result<()> {
    match parameters.iter().find(|parameter| !exchanges(parameter.dtype)) {
        None => Ok(()),
        Some(parameter) => Err(Error::parameter(
            &parameter.path,
            rank,
            format!(
                "ranks can't exchange its type: expected float32, float16 or bfloat16, got {}",
                parameter.dtype.name()
            ),
            "cast the parameter, or train on one device with `MuonConfig::init`",
        )),
    }
}

/// Fails if the models differ, and names the first parameter that does: those that all ranks have,
/// and slices among the ranks that have the same ones.
pub fn same_model<M: Module>(layout: &Layout, parameters: &[Parameter], model: &M) -> Result<()> {
    let world = layout.world();
    same_parameters(world, parameters)?;
    if world.size() == 1 {
        // Nothing to compare with, and checksums read the whole model.
        return Ok(());
    }
    let cuts = layout.cut_parameters();
    let axes = |path: &str| cuts.slice(path).map_or(&[][..], |slice| slice.slices.axes());
    let sums = checksums(model);
    let of_axes = |cut: &[String]| -> Vec<(String, u64)> {
        sums.iter().filter(|(path, _)| axes(path) == cut).cloned().collect()
    };
    let compare = |group: &World, rank: &dyn Fn(usize) -> usize, sums: Vec<(String, u64)>| {
        let other_values = group.compare(&sums, |first, local| {
            let (first, local) = first_unequal(first, local)?;
            first.or(local).map(|(path, _)| path.clone())
        })?;
        match other_values {
            Some((number, parameter)) => Err(Error::ModelsDiffer {
                rank: rank(number),
                parameter,
                other: "other values".into(),
                first: "the same values".into(),
            }),
            None => Ok(()),
        }
    };
    // Parameters that all ranks have, in one message; then the slices, in a group for each kind of
    // cut.
    compare(world, &|rank| rank, of_axes(&[]))?;
    for (cut, SliceGroup { grid, alike, .. }) in layout.all_slice_groups() {
        // The other slices of a parameter have other values, rightly.
        let group = World::new(alike.clone(), world.device().clone());
        let same = compare(&group, &|number| grid.ranks[number][grid.slice], of_axes(cut));
        // Only the ranks with these slices know of it.
        world.agree(same)?;
    }
    Ok(())
}

/// The costs of all matrices and whole parameters: those by which the layout has chosen the owners
/// of a divided model, so that they are measured once.
pub fn costs(
    config: &DistMuonConfig,
    layout: &Layout,
    parameters: &[Parameter],
    (trainable, updates): (&[TrainableParameter], &Updates),
) -> Result<Costs> {
    match layout.costs() {
        Some(costs) => Ok(costs.clone()),
        None => measured_costs::costs(config.costs, layout.world(), parameters, trainable, updates),
    }
}

/// The plan of all ranks.
pub fn plan(
    config: &DistMuonConfig,
    layout: &Layout,
    parameters: Vec<Parameter>,
    costs: &Costs,
) -> Result<Plan> {
    let world = layout.world();
    let settings = config.plan_config(world.size());
    let owners = match layout.owners(&parameters) {
        Some(owners) => owners,
        None => layout.choose_owners(&settings, &parameters, costs)?,
    };
    let plan = Plan::with_owners(parameters, world.size(), &settings, owners);
    let plan = plan.and_then(|plan| ensure_reduced(config, layout, &plan).map(|()| plan));
    // Each rank has made its own plan from the owners of rank 0: the digests show that nothing else
    // differs.
    let plan = world.agree(plan)?;
    match world.compare(&plan.digest(), |first, local| (first != local).then_some(()))? {
        Some((rank, ())) => Err(Error::Mismatch {
            calls: format!("rank {rank} has another plan than rank 0, from another configuration"),
        }),
        None => Ok(plan),
    }
}

/// Fails if backward passes average gradients, and a step would leave small parameters out.
fn ensure_reduced(config: &DistMuonConfig, layout: &Layout, plan: &Plan) -> Result<()> {
    let has_other_data = layout.mesh().data().size() > 1;
    let is_left_out = has_other_data && config.gradients == Gradients::Averaged;
    let mut buckets = plan.buckets().iter();
    match is_left_out && buckets.any(|bucket| bucket.placement.reduces_in_backward()) {
        true => {
            let expected = "`PerRank` for a layout whose backward pass averages gradients";
            Err(Error::setting("gradients", "Averaged", expected))
        }
        false => Ok(()),
    }
}

/// Fails for settings of a plan other than those by which the layout has chosen the owners.
pub fn ensure_followed(
    config: &DistMuonConfig,
    layout: &Layout,
    parameters: &[Parameter],
) -> Result<()> {
    if layout.owners(parameters).is_none() {
        return Ok(());
    }
    let chosen = layout.config();
    let differs = |setting: &str, value: String| {
        let expected = "the layout's, by which `Layout::shard` has chosen the owners: give the \
                        layout the optimizer's configuration with `Layout::with_config`, or use \
                        `DistMuonConfig::start`";
        Err(Error::setting(setting, value, expected))
    };
    if config.balancing != chosen.balancing {
        let value = format!("{:?}, on a layout with {:?}", config.balancing, chosen.balancing);
        return differs("balancing", value);
    }
    if config.costs != chosen.costs {
        let value = format!("{:?}, on a layout with {:?}", config.costs, chosen.costs);
        return differs("costs", value);
    }
    Ok(())
}

/// The paths and checksums of the parameters that every rank has, of the bits of their values. No
/// layout divides integers.
fn checksums<M: Module>(model: &M) -> Vec<(String, u64)> {
    let found = parameters::of(model).into_iter().filter(|found| !found.placement.is_owned());
    let mut sums = Checksums { replicated: found.map(|found| found.path).collect(), sums: vec![] };
    parameters::visit(model, &mut sums);
    sums.sums
}

struct Checksums {
    replicated: HashSet<String>,
    sums: Vec<(String, u64)>,
}

impl Visit for Checksums {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let path = parameters::path(fields);
        if self.replicated.contains(&path) {
            self.sums.push((path, checksum::of_bits(param.val().inner())));
        }
    }

    fn visit_other(&mut self, fields: &[Field], data: &dyn Fn() -> TensorData) {
        self.sums.push((parameters::path(fields), checksum::of_data(&data())));
    }
}
