//! The comparison of what ranks hold in common, so that nothing diverges in silence.
//!
//! Several ranks have the same bits of a parameter that is not divided, of a slice of one, of an
//! owned part with replicas, and of the states of small parameters, which every rank updates. All
//! else has one owner, and nothing to be compared with.
//!
//! A check sends one digest in every group of ranks that have the same. The parameters are looked
//! for only where digests differ.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::bucket_shard::Shard;
use super::divided_model::DividedModel;
use super::step_counts::{COUNTERS, Counters};
use crate::checksum;
use crate::comm::{Communicator, World, digest, named, unequal, unite};
use crate::distributed::layout::{Layout, Passes};
use crate::distributed::trainable::ModelParameter;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit};

/// The ranks that hold the same of a parameter. In the order of the checks: all ranks, and groups
/// of ranks with the same slices of parameters that are cut along axes, or with replicas of parts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Holders {
    All,
    Alike(Vec<String>),
    Replicas(Vec<String>),
}

/// The parameters and states that this rank has in common with a group of ranks.
pub struct Common {
    group: World,
    /// Path and part of a parameter, and the checksum of its bits.
    held: Vec<(String, String, u64)>,
}

/// A parameter that differs among the ranks of a group.
#[derive(Serialize, Deserialize)]
struct Drift {
    parameter: String,
    part: String,
    /// The ranks with the bits that most have, and the others.
    most: Vec<usize>,
    others: Vec<usize>,
    /// The number of other parameters and states that differ.
    more: usize,
}

/// Everything that this rank has in common with others.
pub fn held_in_common<M: Module>(
    model: &M,
    divided: &DividedModel,
    shards: &[Shard],
    counters: &Counters,
) -> Vec<Common> {
    let parameters = divided.parameters.iter();
    let known = parameters.map(|parameter| (&*parameter.path, parameter)).collect();
    let DividedModel { world, layout, passes, .. } = divided;
    let mut held = CommonWalk { world, layout, passes, known, groups: BTreeMap::new() };
    let states: Vec<_> = shards
        .iter()
        .flat_map(|shard| shard.replicated_states())
        .map(|(parameter, slot, values)| (parameter, slot, checksum::of_bits(values)))
        .collect();
    let counters = COUNTERS.iter().zip(counters.values()).flat_map(|(slot, values)| {
        // Counters are small: their bits are the checksums.
        let values: Vec<f32> = values.to_data().iter::<f32>().collect();
        let sums = values.into_iter().map(|value| u64::from(value.to_bits()));
        sums.enumerate().map(|(parameter, sum)| (parameter, slot.name, sum))
    });
    // Made even if nothing is in it, since every check ends with a call of all ranks.
    let all = held.group(Holders::All, || world.clone());
    for (parameter, slot, sum) in states.into_iter().chain(counters) {
        all.held.push((divided.path(parameter).to_owned(), format!("state `{slot}`"), sum));
    }
    parameters::visit(model, &mut held);
    held.groups.into_values().collect()
}

/// Fails on all ranks of a world if what a group has in common differs on any of its ranks.
pub fn ensure_same(common: &[Common], world: &World) -> Result<()> {
    let (all, groups) = common.split_first().expect("all ranks are a group");
    let mut differs = false;
    for group in groups {
        // No return at a difference: all groups make their calls, and the ranks outside of one
        // learn of it in the last message.
        differs |= unite(group.group.comm(), vec![], group.digest())?.is_none();
    }
    let united = unite(world.comm(), vec![u8::from(differs)], all.digest())?;
    if united.is_some_and(|differs| differs == [0]) {
        return Ok(());
    }
    // In all groups, since the others of a later one do not know of an earlier one.
    let drifts: Result<Vec<_>> = common.iter().map(|common| common.drift(world.rank())).collect();
    let found = drifts?.into_iter().flatten().next();
    let found = found.map(|drift| serde_json::to_vec(&drift).expect("a drift is valid JSON"));
    let first = world.comm().first_bytes(found)?;
    let (_, drift) = first.expect("digests differ by a checksum");
    let drift: Drift = serde_json::from_slice(&drift).expect("a rank has sent a drift");
    Err(drift.into())
}

impl Common {
    fn digest(&self) -> u64 {
        digest(&self.held)
    }

    /// The first parameter that differs, and the ranks.
    fn drift(&self, rank: usize) -> Result<Option<Drift>> {
        let sums: Vec<u64> = self.held.iter().map(|(_, _, sum)| *sum).collect();
        let differing = unequal(self.group.comm(), &sums)?;
        let Some(first) = differing.first() else { return Ok(None) };
        let of_ranks = self.group.all_gather_value(&(rank, sums[*first]))?;
        let mut by_sum: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        of_ranks.into_iter().for_each(|(rank, sum)| by_sum.entry(sum).or_default().push(rank));
        let mut alike: Vec<Vec<usize>> = by_sum.into_values().collect();
        // The majority is taken to be right; of groups of equal size, that with the lowest rank.
        alike.sort_by_key(|ranks| (Reverse(ranks.len()), ranks[0]));
        let most = alike.remove(0);
        let mut others = alike.concat();
        others.sort_unstable();
        let (parameter, part, _) = self.held[*first].clone();
        Ok(Some(Drift { parameter, part, most, others, more: differing.len() - 1 }))
    }
}

impl From<Drift> for Error {
    fn from(Drift { parameter, part, most, others, more }: Drift) -> Self {
        let got = format!("other bits on {}", named(&others));
        let got = match more {
            0 => got,
            more => format!("{got}, and differences in {more} more values and states"),
        };
        let expected = format!("that of {}", named(&most));
        Self::Drifted { parameter, part, ranks: others, expected, got }
    }
}

/// A walk through the trained parameters of a model.
struct CommonWalk<'a> {
    world: &'a World,
    layout: &'a Layout,
    passes: &'a Passes,
    known: HashMap<&'a str, &'a ModelParameter>,
    groups: BTreeMap<Holders, Common>,
}

impl CommonWalk<'_> {
    fn group(&mut self, holders: Holders, group: impl FnOnce() -> World) -> &mut Common {
        self.groups.entry(holders).or_insert_with(|| Common { group: group(), held: vec![] })
    }

    /// The group of the ranks that hold the same of a parameter as this one.
    fn of(&mut self, parameter: &ModelParameter) -> &mut Common {
        let (world, layout, passes) = (self.world, self.layout, self.passes);
        let group = |comm: &Communicator| World::new(comm.clone(), world.device().clone());
        if parameter.placement.is_owned() {
            let pass_parameter = &passes[&parameter.path];
            let holders = Holders::Replicas(pass_parameter.axes().to_vec());
            return self.group(holders, || group(passes.replicas(pass_parameter)));
        }
        match parameter.slice.as_ref().map(|slice| slice.slices.axes().to_vec()) {
            Some(axes) => {
                let alike = &layout.slice_group(&axes).expect("a cut has a group").alike;
                self.group(Holders::Alike(axes), || group(alike))
            }
            None => self.group(Holders::All, || world.clone()),
        }
    }
}

impl Visit for CommonWalk<'_> {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let whole = parameters::path_of_whole(fields);
        let is_part = whole.is_some();
        let path = whole.unwrap_or_else(|| parameters::path(fields));
        let Some(known) = self.known.get(&*path).copied() else { return };
        if known.placement.is_owned() != is_part {
            return; // the base
        }
        // Its one element is not a value of the parameter, and ranks may have others.
        let is_empty = is_part && self.passes[&path].part_count() == 0;
        let common = self.of(known);
        if !is_empty && common.group.size() > 1 {
            let sum = checksum::of_bits(param.val().without_autodiff());
            common.held.push((path, "value".to_owned(), sum));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::LinearConfig;
    use burn::optim::GradientsParams;
    use burn::tensor::DType;

    use super::*;
    use crate::distributed::config::DistMuonConfig;
    use crate::distributed::optimizer::DistModuleOptimizer;
    use crate::flat;

    /// The values with another bit in the first one: none that further steps round away, or that
    /// makes a number which devices take for zero.
    fn flipped(values: Tensor<1>) -> Tensor<1> {
        let first = flat::slice(&values, 0..1).into_scalar::<f32>();
        let first = f32::from_bits(first.to_bits() ^ 1 << 23);
        let first = Tensor::full([1], first, (&values.device(), DType::F32));
        let range = 0..1;
        values.slice_assign([range], first)
    }

    /// The errors of three ranks in the fourth step, where rank 1 changes the optimizer after the
    /// second. A step is checked after four.
    fn errors(change: impl Fn(&mut DistModuleOptimizer) + Sync) -> Vec<Error> {
        let errors = World::threads(World::devices(3), |world| {
            let device = world.device();
            let mut model = world.broadcast(LinearConfig::new(8, 8).init(device))?;
            let mut optim = DistMuonConfig::new().with_check_every(4).init(&world, &model)?;
            for step in 0..4 {
                let x = Tensor::<2>::ones([2, 8], device);
                let loss = (model.forward(x) - 0.5).square().mean();
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                match optim.step(0.01, model, gradients) {
                    Ok(stepped) => model = stepped,
                    Err(error) => {
                        assert_eq!(step, 3, "{error}");
                        return Ok(error);
                    }
                }
                if step == 1 && world.rank() == 1 {
                    change(&mut optim);
                }
            }
            Err(Error::setting("step", "no error", "one"))
        });
        errors.unwrap()
    }

    #[test]
    fn states_that_differ_are_found_and_named() {
        for slot in ["moment_1", "moment_2"] {
            let errors = errors(|optim| {
                let replicated = |shard: &&mut Shard| !shard.replicated_states().is_empty();
                let mut shards = optim.shards.iter_mut().filter(replicated);
                let shard = shards.next().expect("all parameters are small");
                let values = flipped(shard.state(slot, DType::F32));
                shard.set_state(slot, &values);
            });
            for error in errors {
                let Error::Drifted { parameter, part, ranks, .. } = &error else {
                    panic!("{error}")
                };
                assert_eq!((&**parameter, &**part), ("weight", &*format!("state `{slot}`")));
                assert_eq!(ranks, &[1]);
            }
        }
    }

    #[test]
    fn counters_that_differ_are_found_and_named() {
        for error in errors(|optim| {
            let counters = &mut optim.accounts.counters;
            counters.skipped = flipped(counters.skipped.clone());
        }) {
            let text = error.to_string();
            let Error::Drifted { parameter, part, .. } = error else { panic!("{text}") };
            assert_eq!((&*parameter, &*part), ("weight", "state `skipped`"));
            assert!(text.contains("to be that of ranks 0, 2, got other bits on rank 1;"), "{text}");
        }
    }
}
