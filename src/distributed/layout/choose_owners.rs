//! The owners of a model's matrices and whole parameters, chosen by the planner.

use std::collections::BTreeMap;

use super::Layout;
use super::placements::Division;
use crate::distributed::busy::Busy;
use crate::distributed::config::CostSource;
use crate::distributed::measured_costs::costs;
use crate::distributed::plan::{
    Balancing, Candidates, Costs, Parameter, Plan, PlanConfig, node_order,
};
use crate::error::{Error, Result};

/// The owners of all planned parameters, and the costs by which they were chosen.
#[derive(Clone)]
pub struct Chosen {
    pub owners: Vec<Vec<usize>>,
    pub costs: Costs,
}

impl Layout {
    /// The owners of a model to be divided. All ranks make this call.
    pub(super) fn owners_together(&self, division: &Division) -> Result<Chosen> {
        let Division { planned, trainable, routing, .. } = division;
        let (world, updates) = (self.world(), routing.updates());
        let costs = costs(self.config.costs, world, planned, trainable, updates)?;
        let settings = self.config.plan_config(world.size());
        let owners = self.choose_owners(&settings, planned, &costs)?;
        Ok(Chosen { owners, costs })
    }

    /// The owners of a model to be divided, if one rank knows them without the others.
    pub(super) fn owners_alone(&self, division: &Division) -> Result<Chosen> {
        let settings = self.config.plan_config(self.world().size());
        let is_search = match settings.balancing {
            Balancing::BlockCyclic | Balancing::Greedy => false,
            #[cfg(feature = "optimal")]
            Balancing::Optimal { .. } => true,
        };
        let is_chosen_together = is_search || self.config.costs == CostSource::Measured;
        // One rank owns everything.
        if is_chosen_together && self.world().size() > 1 {
            return Err(Error::usage(
                "the owners are not chosen yet",
                "a layout that has divided its model, for owners by a search with a time limit or \
                 by measured costs",
                format!("{:?} with costs by {:?}", settings.balancing, self.config.costs),
                "call `Layout::table` after `Layout::shard`",
            ));
        }
        let Division { planned, trainable, routing, .. } = division;
        let (world, updates) = (self.world(), routing.updates());
        // One rank owns everything by any costs, so that nothing has to be measured.
        let costs = costs(CostSource::Operations, world, planned, trainable, updates)?;
        let owners = self.planned_owners(&settings, planned, &costs)?;
        Ok(Chosen { owners, costs })
    }

    /// The owners of all matrices and whole parameters. All ranks make this call.
    ///
    /// Rank 0 chooses them, since a search with a time limit may find others elsewhere.
    pub(in crate::distributed) fn choose_owners(
        &self,
        settings: &PlanConfig,
        parameters: &[Parameter],
        costs: &Costs,
    ) -> Result<Vec<Vec<usize>>> {
        let world = self.world();
        let made = match world.rank() {
            0 => {
                // A search may take longer than the deadline.
                let _busy = Busy::new(world.communicator());
                self.planned_owners(settings, parameters, costs)
            }
            _ => Ok(vec![]),
        };
        world.broadcast_value(&world.agree(made)?, 0)
    }

    /// The owners by the plan, each parameter's in the order of a rank's parts.
    fn planned_owners(
        &self,
        settings: &PlanConfig,
        parameters: &[Parameter],
        costs: &Costs,
    ) -> Result<Vec<Vec<usize>>> {
        let order = node_order(&self.world().comm().nodes());
        let in_plan = |rank: usize| order.iter().position(|other| *other == rank);
        let mut candidates = Candidates::new();
        for (index, parameter) in parameters.iter().enumerate() {
            for (cells, matrices) in self.cells_of_matrices(parameter) {
                // Every rank may own them: the planner needs no list.
                if cells.len() == self.world().size() {
                    continue;
                }
                let mut ranks: Vec<usize> = cells.into_iter().filter_map(in_plan).collect();
                ranks.sort_unstable();
                candidates.extend(matrices.iter().map(|matrix| ((index, *matrix), ranks.clone())));
            }
        }
        let work = (costs, &candidates);
        let plan = Plan::among(parameters.to_vec(), self.world().size(), settings, work)?;
        let owners = parameters.iter().zip(plan.owners_in(&order));
        Ok(owners.map(|(parameter, owners)| self.in_order(parameter, owners)).collect())
    }

    /// The owners of a parameter's matrices in the order of a rank's parts. Matrices of a stack are
    /// equal work, and a rank's are then neighbours.
    fn in_order(&self, parameter: &Parameter, mut owners: Vec<usize>) -> Vec<usize> {
        if parameter.slices.is_none() {
            // In the order of ranks, the elements of a rank are neighbours, and a part is one
            // piece.
            if parameter.placement.reduces_in_backward() {
                owners.sort_unstable();
            }
            return owners;
        }
        for (cells, matrices) in self.cells_of_matrices(parameter) {
            let position = |matrix: &usize| {
                let cell = cells.iter().position(|cell| *cell == owners[*matrix]);
                cell.expect("an owner is one of the candidates")
            };
            let mut chosen: Vec<usize> = matrices.iter().map(position).collect();
            chosen.sort_unstable();
            for (matrix, cell) in matrices.into_iter().zip(chosen) {
                owners[matrix] = cells[cell];
            }
        }
        owners
    }

    /// The matrices of a parameter in slices, by the ranks that may own them, row by row of the
    /// grid, as a rank has the parts of others. A matrix of which only some slices have elements,
    /// such as an expert, has an owner with one of these.
    fn cells_of_matrices(&self, parameter: &Parameter) -> Vec<(Vec<usize>, Vec<usize>)> {
        let Some(slices) = &parameter.slices else { return vec![] };
        let grid = self.mesh.grid(slices.axes());
        let (count, elements) = parameter.owned();
        let mut of_slices: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for matrix in 0..count {
            let all = matrix * elements..(matrix + 1) * elements;
            let holders = (0..slices.count())
                .filter(|slice| !slices.range(*slice, &all).is_empty())
                .collect();
            of_slices.entry(holders).or_default().push(matrix);
        }
        let cells = |holders: Vec<usize>| -> Vec<usize> {
            let rows = grid.ranks.iter();
            rows.flat_map(|row| holders.iter().map(|slice| row[*slice])).collect()
        };
        of_slices.into_iter().map(|(holders, matrices)| (cells(holders), matrices)).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::comm::World;
    use crate::distributed::plan::ShapeCost;
    use crate::distributed::plan::tests::stack;

    /// As ranks with different devices have, whose iterations have different forms.
    #[test]
    fn ranks_with_other_costs_take_the_owners_of_rank_0() {
        let parameters = vec![stack("wide", 3, [8, 32]), stack("square", 4, [16, 16])];
        let costs = |wide: f64, square: f64| {
            let cost = |each: f64| ShapeCost { fixed: 0.0, each };
            Costs::new([([8, 32], cost(wide)), ([16, 16], cost(square))])
        };
        let owners = World::threads(vec![Device::default(); 2], |world| {
            let costs = if world.is_main() { costs(8.0, 1.0) } else { costs(1.0, 8.0) };
            let layout = Layout::from(&world);
            let settings = layout.config.plan_config(2);
            let together = layout.choose_owners(&settings, &parameters, &costs)?;
            Ok::<_, Error>((together, layout.planned_owners(&settings, &parameters, &costs)?))
        });
        let [(of_rank_0, alone_0), (of_rank_1, alone_1)] =
            <[_; 2]>::try_from(owners.unwrap()).expect("two ranks");
        assert!(of_rank_0 == alone_0 && of_rank_1 == alone_0);
        assert_ne!(alone_0, alone_1, "they would have chosen others");
    }
}
