//! The agreement of the ranks before the first step.

use std::collections::HashSet;

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use serde_json::Value;

use super::busy::Busy;
use crate::comm::{Difference, World, exchanges};
use crate::distributed::config::DistMuonConfig;
use crate::distributed::layout::Layout;
use crate::distributed::plan::{Costs, Parameter, Plan, PlanConfig, node_order};
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

/// Fails on all ranks if their configurations are not the same.
pub fn same_config(world: &World, config: &DistMuonConfig) -> Result<()> {
    let local = serde_json::to_value(config).expect("a configuration is valid JSON");
    world.same_settings(&local, |first, other| difference("", first, other))
}

/// The first entry that two JSON values do not have in common.
fn difference(path: &str, first: &Value, other: &Value) -> Option<Difference> {
    if first == other {
        return None;
    }
    if let (Value::Object(first), Value::Object(other)) = (first, other) {
        return first.keys().chain(other.keys()).find_map(|key| {
            let path = format!("{path}{}{key}", if path.is_empty() { "" } else { "." });
            let [first, other] = [first, other].map(|value| value.get(key).unwrap_or(&Value::Null));
            difference(&path, first, other)
        });
    }
    let setting = path.to_owned();
    Some(Difference { setting, first: first.to_string(), other: other.to_string() })
}

/// Fails if the models differ, and names the first parameter that does.
pub fn same_model<M: Module>(world: &World, parameters: &[Parameter], model: &M) -> Result<()> {
    if let Some((rank, (parameter, first, other))) =
        world.compare(&parameters.to_vec(), |first, local| first_difference(first, local))?
    {
        return Err(Error::ModelsDiffer { rank, parameter, other, first });
    }
    if world.size() == 1 {
        // Nothing to compare with, and checksums read the whole model.
        return Ok(());
    }
    let other_values = world.compare(&checksums(model), |first, local| {
        let (first, local) = first_unequal(first, local)?;
        first.or(local).map(|(path, _)| path.clone())
    })?;
    match other_values {
        Some((rank, parameter)) => Err(Error::ModelsDiffer {
            rank,
            parameter,
            other: "other values".into(),
            first: "the same values".into(),
        }),
        None => Ok(()),
    }
}

/// The first entries at one index that two lists do not have in common. One may be missing.
fn first_unequal<'a, T: PartialEq>(
    first: &'a [T],
    local: &'a [T],
) -> Option<(Option<&'a T>, Option<&'a T>)> {
    let entries =
        (0..first.len().max(local.len())).map(|index| (first.get(index), local.get(index)));
    entries.into_iter().find(|(first, local)| first != local)
}

/// The first parameter that two models do not have in common: its path, and what it is in both.
fn first_difference(first: &[Parameter], local: &[Parameter]) -> Option<(String, String, String)> {
    let described = |parameter: Option<&Parameter>| match parameter {
        Some(found) => format!("{:?} {} ({:?})", found.shape, found.dtype.name(), found.work),
        None => "absent".to_owned(),
    };
    let (first, local) = first_unequal(first, local)?;
    // Both names, if they differ: one of them is the misplaced parameter.
    let named = |found: Option<&Parameter>| found.map(|found| found.path.clone());
    let parameter = match (named(first), named(local)) {
        (Some(first), Some(local)) if first != local => format!("{first}` / `{local}"),
        (first, local) => first.or(local).expect("different entries are not both missing"),
    };
    Some((parameter, described(first), described(local)))
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
        None => owners(world, &parameters, &settings, costs)?,
    };
    let plan = Plan::with_owners(parameters, world.size(), &settings, owners);
    let plan = world.agree(plan)?;
    match world.compare(&plan.digest(), |first, local| (first != local).then_some(()))? {
        Some((rank, ())) => Err(Error::Mismatch {
            calls: format!("rank {rank} has another plan than rank 0, from another configuration"),
        }),
        None => Ok(plan),
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
fn checksums<M: Module>(model: &M) -> Vec<(String, u32)> {
    let found = parameters::of(model).into_iter().filter(|found| !found.placement.is_owned());
    let mut sums = Checksums { replicated: found.map(|found| found.path).collect(), sums: vec![] };
    parameters::visit(model, &mut sums);
    sums.sums
}

struct Checksums {
    replicated: HashSet<String>,
    sums: Vec<(String, u32)>,
}

impl Visit for Checksums {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let path = parameters::path(fields);
        if self.replicated.contains(&path) {
            let values = param.val().inner().into_data();
            self.sums.push((path, crc32fast::hash(values.as_bytes())));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_setting_that_differs_is_named() {
        let first = json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Cosine": 1}});
        let named = |other: Value| difference("", &first, &other).map(|found| found.setting);
        assert_eq!(named(first.clone()), None);
        for (other, setting) in [
            (json!({"a": {"b": 1, "c": [1, 3]}, "d": {"Cosine": 1}}), "a.c"),
            (json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Linear": 1}}), "d.Cosine"),
            (json!({"a": {"b": 1, "c": [1, 2]}, "d": {"Cosine": 1}, "e": 1}), "e"),
            (json!({"a": 1, "d": {"Cosine": 1}}), "a"),
        ] {
            assert_eq!(named(other).as_deref(), Some(setting));
        }
    }

    #[test]
    fn lists_of_which_one_is_longer_differ() {
        assert_eq!(first_unequal(&[1, 2], &[1, 2]), None);
        assert_eq!(first_unequal(&[1, 2], &[1]), Some((Some(&2), None)));
        assert_eq!(first_unequal(&[1], &[1, 3]), Some((None, Some(&3))));
    }
}
