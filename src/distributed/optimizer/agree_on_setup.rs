//! The agreement of the ranks before the first step.

use std::collections::HashSet;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::busy::Busy;
use crate::checksum;
use crate::comm::{World, exchanges};
use crate::distributed::config::{CostSource, DistMuonConfig};
use crate::distributed::layout::Layout;
use crate::distributed::plan::{Balancing, Costs, Parameter, Plan, PlanConfig, node_order};
use crate::distributed::same_parameters::{first_unequal, same_parameters};
use crate::distributed::sliced_parameters::SliceGroup;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};

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

/// The plan of all ranks. Rank 0 makes it, since a search with a time limit may find another plan
/// elsewhere.
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
        None => {
            let owners = owners(world, &parameters, &settings, costs)?;
            let in_order = |(parameter, owners): (&Parameter, Vec<usize>)| match parameter.slices {
                // The plan knows ranks, and not which of them have slices of a matrix.
                Some(_) => layout.in_order(parameter, &owners),
                None => owners,
            };
            parameters.iter().zip(owners).map(in_order).collect()
        }
    };
    let plan = Plan::with_owners(parameters, world.size(), &settings, owners);
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

/// Fails for settings of a plan that a divided model can't follow.
pub fn ensure_followed(
    config: &DistMuonConfig,
    layout: &Layout,
    parameters: &[Parameter],
) -> Result<()> {
    if layout.owners(parameters).is_none() {
        return Ok(());
    }
    let expected = "the default, by which `Layout::shard` has chosen the owners: leave it, or \
                    divide no parameters";
    if config.balancing != Balancing::default() {
        return Err(Error::setting("balancing", format!("{:?}", config.balancing), expected));
    }
    match config.costs {
        CostSource::Operations => Ok(()),
        CostSource::Measured => Err(Error::setting("costs", "Measured", expected)),
    }
}

/// The owners of all matrices, for a model that was not divided.
fn owners(
    world: &World,
    parameters: &[Parameter],
    settings: &PlanConfig,
    costs: &Costs,
) -> Result<Vec<Vec<usize>>> {
    let order = node_order(&world.comm().nodes());
    let made = match world.rank() {
        0 => {
            // A search may take longer than the deadline.
            let _busy = Busy::new(world.communicator());
            Plan::new(parameters.to_vec(), world.size(), settings, costs).map(Some)
        }
        _ => Ok(None),
    };
    let owners = world.agree(made)?.map_or(vec![], |plan| plan.owners_in(&order));
    world.broadcast_value(&owners, 0)
}

/// The paths and checksums of the parameters that every rank has, of the bits of their values.
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
}
