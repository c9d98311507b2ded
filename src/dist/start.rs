//! What the ranks agree on before the first step.

use burn::module::Module;
use burn::tensor::Tensor;

use super::World;
use super::config::DistMuonConfig;
use super::optimizer::Member;
use super::plan::{Costs, Parameter, Plan, Work, spread};
use super::world::values;
use crate::error::{Error, Result};
use crate::route::{Group, Routing, Walk};

/// The trained parameters of a model in its order: what the rules say of them, and what a plan sees.
pub fn members<M: Module>(
    config: &DistMuonConfig,
    routing: &Routing,
    model: &M,
) -> Result<(Vec<Member>, Vec<Parameter>)> {
    let settings = routing.muon().settings();
    let mut members = Vec::new();
    let mut parameters = Vec::new();
    let found = Walk::through(model).into_iter();
    for (found, route) in found.zip(routing.routes()).filter(|(found, _)| found.trainable) {
        let work = match route.group {
            Group::Muon { view, .. } => {
                let [count, rows, columns] = view.batch_shape(&found.path, &found.shape)?;
                Work::Matrices { count, rows, columns }
            }
            _ => Work::Elements,
        };
        members.push(Member::new(config, settings, route, work));
        parameters.push(Parameter {
            path: found.path,
            shape: found.shape,
            dtype: found.dtype,
            work,
        });
    }
    if members.is_empty() { Err(Error::EmptyModel) } else { Ok((members, parameters)) }
}

/// Names the first parameter that is not the same on all ranks.
pub fn compare<M: Module>(world: &World, parameters: &[Parameter], model: &M) -> Result<()> {
    let all = world.all_gather_value(&parameters.to_vec())?;
    let described = |parameter: Option<&Parameter>| match parameter {
        Some(found) => format!("{:?} {} ({:?})", found.shape, found.dtype.name(), found.work),
        None => "absent".to_owned(),
    };
    if let Some((rank, other)) = all.iter().enumerate().find(|(_, other)| **other != all[0]) {
        let longest = all[0].len().max(other.len());
        let differs = (0..longest).find(|i| all[0].get(*i) != other.get(*i));
        let at = differs.expect("unequal lists differ somewhere");
        let (first, other) = (all[0].get(at), other.get(at));
        // Where one is missing or of another name, both names tell more than one.
        let named = |found: Option<&Parameter>| found.map(|found| found.path.clone());
        let parameter = match (named(first), named(other)) {
            (Some(first), Some(other)) if first != other => format!("{first}` / `{other}"),
            (first, other) => first.or(other).expect("one of them is there"),
        };
        let (first, other) = (described(first), described(other));
        return Err(Error::ModelsDiffer { rank, parameter, other, first });
    }
    let all = world.all_gather_value(&other_values(world, model)?)?.into_iter().enumerate();
    match all.filter_map(|(rank, path)| Some((rank, path?))).next() {
        Some((rank, parameter)) => Err(Error::ModelsDiffer {
            rank,
            parameter,
            other: "of other values".into(),
            first: "of the first ones".into(),
        }),
        None => Ok(()),
    }
}

/// The plan of all ranks: made by rank 0, since one that was searched for with a time limit may
/// come out differently elsewhere.
pub fn plan(
    config: &DistMuonConfig,
    world: &World,
    parameters: Vec<Parameter>,
    costs: &Costs,
) -> Result<Plan> {
    let settings = config.plan_settings();
    let order = spread(&world.comm().nodes());
    let own = match world.rank() {
        0 => Plan::new(parameters.clone(), world.size(), &settings, costs).map(Some),
        _ => Ok(None),
    };
    let owners = world.agree(own)?.map(|plan| plan.owners_in(&order));
    let owners = world.all_gather_value(&owners)?.swap_remove(0).expect("rank 0 has made it");
    let plan = Plan::with_owners(parameters, world.size(), &settings, owners);
    let plan = world.agree(plan)?;
    let digests = world.all_gather_value(&plan.digest())?;
    match digests.iter().position(|digest| *digest != digests[0]) {
        Some(rank) => Err(Error::Mismatch {
            calls: format!("rank {rank} has another plan than rank 0, so another configuration"),
        }),
        None => Ok(plan),
    }
}

/// The first parameter that has not the values that it has on rank 0. Element by element: sums depend
/// on the order in which a device takes them.
fn other_values<M: Module>(world: &World, model: &M) -> Result<Option<String>> {
    let mut differences = Vec::new();
    for own in values(model) {
        let first = world.comm().broadcast(own.clone(), 0)?.wait()?;
        let both_undefined = own.clone().is_nan().bool_and(first.clone().is_nan());
        differences.push(own.not_equal(first).bool_and(both_undefined.bool_not()).any());
    }
    let differences = Tensor::cat(differences, 0).into_data();
    let mut paths = Walk::through(model).into_iter().zip(differences.iter::<bool>());
    Ok(paths.find_map(|(found, differs)| differs.then_some(found.path)))
}
