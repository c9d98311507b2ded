//! The shards of every parameter that the passes reduce or gather, on all ranks that share it.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Layout;
use super::choose_owners::Chosen;
use super::pass_parameter::{ParameterShards, PassParameter, Position};
use super::placements::Division;
use crate::distributed::mesh::Grid;
use crate::distributed::plan::{Bucket, Overlap, Parameter};
use crate::distributed::trainable;

impl Layout {
    /// The parameters that are divided, or whose gradients the backward pass reduces, in the order
    /// of the model, with the owners of their blocks.
    pub(super) fn pass_parameters(
        &self,
        Division { found, cuts, model, planned, .. }: &Division,
        chosen: Option<&Chosen>,
    ) -> Vec<Arc<PassParameter>> {
        let Some(Chosen { owners, .. }) = chosen else { return vec![] };
        let (mut trained, mut all) = (model.iter(), vec![]);
        // Of all ranks: once for all parameters with the same cuts.
        let mut positions: BTreeMap<Vec<String>, Vec<Position>> = BTreeMap::new();
        for found in found {
            let known = found.trainable.then(|| trained.next().expect("each is in the model"));
            if !found.placement.reduces_in_backward() {
                continue;
            }
            let (parameter, blocks, owners) = match known {
                Some(known) => {
                    // All blocks of a parameter are sent together, whichever bucket the plan has
                    // them in.
                    let range = known.trainable.clone();
                    let blocks = planned[range.clone()].to_vec();
                    (known.clone(), blocks, owners[range].to_vec())
                }
                None => {
                    let (parameter, rows) = trainable::frozen(found, cuts);
                    (parameter, vec![rows], vec![vec![]])
                }
            };
            let axes = parameter.slice.as_ref().map_or(&[][..], |slice| slice.slices.axes());
            let grid = self.mesh.grid(axes);
            let bucket = Bucket::of_one(&blocks, &owners, self.world().size());
            let shards = self.shards(&bucket, &blocks, &grid);
            let positions =
                positions.entry(axes.to_vec()).or_insert_with(|| self.positions(axes, &grid));
            let positions = (&**positions, grid.replica);
            let dtype = self.mean_dtype(parameter.dtype);
            let index = all.len();
            all.push(Arc::new(PassParameter::new(index, &parameter, dtype, shards, positions)));
        }
        all
    }

    /// The shards of a parameter that the ranks of a column of the grid share.
    fn shards(&self, bucket: &Bucket, blocks: &[Parameter], grid: &Grid) -> ParameterShards {
        // By the slices that are stored, which are rows of those in the grid, or the same.
        let stored = self.mesh.grid(blocks[0].cut_axes());
        let mut of_slices: BTreeMap<usize, Bucket> = BTreeMap::new();
        let shard = |ranks: &Vec<usize>| {
            let [replica, slice] = stored.positions[ranks[grid.slice]];
            // Replicas store the same slice, whose bucket is made once.
            let held = of_slices
                .entry(slice)
                .or_insert_with(|| bucket.of_slice(blocks, &stored.positions, slice));
            held.overlaps(held.shard_range(replica))
                .map(|Overlap { parameter: block, elements, padding }| {
                    let slices = blocks[block].slices.as_ref();
                    let first = slices.map_or(0, |slices| slices.before_in_use(slice));
                    let elements = first + elements.start..first + elements.end;
                    Overlap { parameter: block, elements, padding }
                })
                .collect()
        };
        let in_use = grid.ranks.iter().map(shard).collect();
        let runs = of_slices[&stored.slice].runs(stored.replica);
        ParameterShards { in_use, runs }
    }

    /// The ranks that own parameters together with this one, if any are owned.
    pub(in crate::distributed) fn owning(&self) -> Option<Vec<usize>> {
        let axis = self.axis.as_ref()?;
        let replica = |rank: usize| self.mesh.position(axis, rank).1;
        let own = replica(self.world().rank());
        Some((0..self.world().size()).filter(|rank| replica(*rank) == own).collect())
    }

    /// The positions of the ranks that share this rank's slice of a parameter and its replicas.
    pub(super) fn positions(&self, axes: &[String], grid: &Grid) -> Vec<Position> {
        // Slices along the axis of owners are not divided further.
        let axis = self.axis.as_ref().filter(|axis| !axes.contains(axis));
        let part = |rank: usize| axis.map_or(0, |axis| self.mesh.position(axis, rank).0);
        let ranks = grid.ranks.iter().map(|row| row[grid.slice]).enumerate();
        let mut shards = BTreeMap::new();
        ranks
            .map(|(replica, rank)| {
                let part = part(rank);
                // Ranks with replicas of a part update one shard of it each, in the order of ranks.
                let shard = shards.entry(part).or_insert(0);
                *shard += 1;
                Position { replica, part, shard: *shard - 1 }
            })
            .collect()
    }
}
