//! What the ranks agree on before the first step.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{FloatDType, Tensor};

use super::World;
use super::config::DistMuonConfig;
use super::optimizer::Member;
use super::plan::{Costs, Parameter, Plan, Work};
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
    let all = world.all_gather_value(&sums(model))?;
    for (rank, other) in all.iter().enumerate() {
        if let Some(((path, first), (_, other))) =
            all[0].iter().zip(other).find(|((_, first), (_, other))| first != other)
        {
            let value =
                |bits: &[u32; 2]| format!("of other values (sum {})", f32::from_bits(bits[0]));
            let (first, other) = (value(first), value(other));
            return Err(Error::ModelsDiffer { rank, parameter: path.clone(), other, first });
        }
    }
    Ok(())
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
    let own = match world.rank() {
        0 => Plan::new(parameters.clone(), world.size(), &settings, costs).map(Some),
        _ => Ok(None),
    };
    let own = world.agree(own)?;
    let owners = own.as_ref().map(|plan| plan.owners().to_vec());
    let owners = world.all_gather_value(&owners)?.swap_remove(0).expect("rank 0 has made it");
    let plan = match own {
        Some(plan) => Ok(plan),
        None => Plan::with_owners(parameters, world.size(), &settings, owners),
    };
    let plan = world.agree(plan)?;
    let digests = world.all_gather_value(&plan.digest())?;
    match digests.iter().position(|digest| *digest != digests[0]) {
        Some(rank) => Err(Error::Mismatch {
            calls: format!("rank {rank} has another plan than rank 0, so another configuration"),
        }),
        None => Ok(plan),
    }
}

/// For every parameter, its path and the bits of the sum and of the sum of magnitudes.
fn sums<M: Module>(model: &M) -> Vec<(String, [u32; 2])> {
    struct Sums(Vec<Tensor<1>>);
    impl ModuleVisitor for Sums {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.val().inner().cast(FloatDType::F32);
            self.0.push(Tensor::cat(vec![value.clone().sum(), value.abs().sum()], 0));
        }
    }
    let mut sums = Sums(vec![]);
    model.visit(&mut sums);
    let bits = |sums: Tensor<1>| {
        let bits: Vec<u32> = sums.into_data().iter::<f32>().map(f32::to_bits).collect();
        [bits[0], bits[1]]
    };
    let paths = Walk::through(model).into_iter().map(|found| found.path);
    paths.zip(sums.0.into_iter().map(bits)).collect()
}
