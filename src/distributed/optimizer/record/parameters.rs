//! The parameters of a divided model in checkpoints, which have them whole.

use std::any::Any;
use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::super::divided_model::DividedModel;
use crate::checkpoint::Divided;
use crate::comm::Communicator;
use crate::distributed::sliced_parameters::Cuts;
use crate::error::Result;
use crate::flat;
use crate::parameters::{self, Field, Visit};

impl DividedModel {
    /// This rank's parts of all owned parameters, and its slices of those that are cut, with their
    /// paths, in the order of the model.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`](crate::Error::Parameter) for a model that was not divided as the
    /// optimizer's.
    pub fn divided_values<M: Module>(&self, model: &M) -> Result<Vec<(String, Tensor<1>)>> {
        let rank = self.world.rank();
        let mut found = parameters::of(model);
        self.cuts.restore_whole(&mut found, rank)?;
        let mut values: HashMap<String, Tensor<1>> =
            self.passes.parts(model, rank)?.into_iter().collect();
        let mut slices = HeldSlices { cuts: &self.cuts, values: &mut values };
        parameters::visit(model, &mut slices);
        let divided = found.into_iter().filter_map(|found| {
            let value = values.remove(&found.path)?;
            Some((found.path, value))
        });
        Ok(divided.collect())
    }

    /// The whole of a divided parameter, flat, on one rank: rank 0 for a sliced one. All ranks make
    /// this call.
    pub fn collect_whole(&self, path: &str, part: Tensor<1>, root: usize) -> Result<Tensor<1>> {
        let slice = self.cuts.slice(path);
        let axes = slice.map_or(&[][..], |slice| slice.slices.axes());
        let group = self.layout.slice_group(axes);
        let held = match self
            .passes
            .get(path)
            .filter(|pass_parameter| pass_parameter.placement.is_owned())
        {
            Some(pass_parameter) => {
                let comm = group.map_or(self.world.comm(), |group| &group.alike);
                let shard = pass_parameter.shard(&part);
                let shards = gathered(comm, shard, &pass_parameter.counts().to_vec(), root)?;
                if comm.rank() == root { pass_parameter.whole_of_shards(&shards) } else { shards }
            }
            None => part,
        };
        // The first of the ranks with each slice have it now.
        let Some((slice, group)) = slice.zip(group.filter(|group| group.grid.replica == 0)) else {
            return Ok(held);
        };
        let all = gathered(&group.across, held, &slice.counts(), 0)?;
        Ok(if self.world.is_main() { slice.whole(&all) } else { all })
    }
}

/// The elements of all ranks in one tensor, on a rank; none on the others.
fn gathered(
    comm: &Communicator,
    part: Tensor<1>,
    counts: &[usize],
    root: usize,
) -> Result<Tensor<1>> {
    let (dtype, device) = (part.dtype(), part.device());
    let parts = comm.gather(part, counts, root)?.wait()?;
    Ok(flat::concat(parts, dtype, &device))
}

impl Divided for DividedModel {
    fn whole_shape(&self, path: &str) -> Option<Vec<usize>> {
        Some(self.cuts.slice(path)?.slices.whole().to_vec())
    }

    fn part(&self, path: &str, whole: Tensor<1>) -> Tensor<1> {
        let held = self.cuts.slice(path).map_or(whole.clone(), |slice| slice.of(&whole));
        match self.passes.get(path).filter(|pass_parameter| pass_parameter.placement.is_owned()) {
            Some(pass_parameter) => pass_parameter.part(held),
            None => held,
        }
    }

    fn mapper(&self, path: &str) -> Option<&(dyn Any + Send + Sync)> {
        self.passes.get(path)?.form.mapper()
    }
}

/// Collects this rank's slices of the parameters that are not owned.
struct HeldSlices<'a> {
    cuts: &'a Cuts,
    /// The parts of those that are.
    values: &'a mut HashMap<String, Tensor<1>>,
}

impl Visit for HeldSlices<'_> {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let path = parameters::path(fields);
        if self.cuts.slice(&path).is_some() && !self.values.contains_key(&path) {
            self.values.insert(path, param.val().without_autodiff().reshape([-1]));
        }
    }
}
