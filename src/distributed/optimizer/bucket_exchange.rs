//! The exchange of a bucket's gradients and values, and of the slices of parameters that are cut.
//!
//! The ranks that have the same slices of parameters reduce their gradients and gather new values
//! among each other: without cuts, those are all ranks. A rank then has a share of a slice. The
//! owner of a matrix *assembles* it from the shares of the ranks with the other slices, updates all
//! of it, and *distributes* the slices of the new values:
//!
//! ```text
//! gradients -> reduce -> share -> assemble -> whole -> update -> distribute -> share -> gather
//! ```
//!
//! The update is as for whole matrices, whatever the mesh: of momentum and master weights, and of
//! every part. The gradients are assembled, and where the update only needs the values to apply a
//! direction to them, the directions are distributed and applied by the ranks that have the slices
//! ([`Share`](super::share_of_slices::Share)): `2 (S - 1) / S` times a rank's part of the
//! parameters are sent, for `S` slices. Everywhere else, values are assembled and distributed. In
//! half precision, the bytes are the same; in full precision, half as many are added.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::share_of_slices::Share;
use crate::comm::{Communicator, PairCounts, Pending};
use crate::distributed::config::Publish;
use crate::distributed::layout::Layout;
use crate::distributed::plan::{Bucket, Parameter, Run, Slices};
use crate::distributed::sliced_parameters::SliceGroup;
use crate::error::Result;
use crate::flat;

/// The ranks with which a rank exchanges a bucket, and what they exchange.
pub struct Exchange {
    /// The bucket as this rank has it, whose parameters may be slices: a share for every rank of
    /// the group.
    pub held: Bucket,
    /// The ranks that have the same slices.
    pub group: Communicator,
    /// The same ranks, for new parameters: a group of their own if their results are waited for
    /// after the step.
    pub publishers: Communicator,
    assembly: Option<Assembly>,
}

/// The exchange between the owner of whole parameters and the ranks that have slices.
struct Assembly {
    across: Communicator,
    /// Elements that this rank exchanges to assemble. To distribute, they go back. `None` if every
    /// rank keeps what it has, as with whole experts.
    to_owners: Option<PairCounts>,
    /// The shard of the bucket that this rank owns.
    owned: Arc<Owned>,
    share: Share,
}

/// The whole parameters of a shard.
struct Owned {
    runs: Vec<(Slices, Run)>,
    elements: usize,
}

/// Groups of ranks that have the same slices, by the axes of cuts. Without cuts, all ranks.
pub type Publishers = BTreeMap<Vec<String>, Communicator>;

/// The groups in which new parameters are gathered. All ranks make this call.
pub fn publishers(layout: &Layout, publish: Publish) -> Result<Publishers> {
    let world = layout.world();
    let all = [(&[][..], world.comm())].into_iter();
    let groups = all.chain(layout.all_slice_groups().map(|(axes, group)| (axes, &group.alike)));
    let own = |(axes, group): (&[String], &Communicator)| {
        let group = match publish {
            Publish::Now => group.clone(),
            // A group of its own: these calls are in flight during the passes, whose calls would
            // otherwise wait behind them.
            Publish::AtFirstUse => group.split(0, group.rank())?,
        };
        Ok((axes.to_vec(), group))
    };
    groups.map(own).collect()
}

impl Exchange {
    /// `publishers` has the groups in which new parameters are gathered, by the axes of cuts.
    pub fn new(
        bucket: &Bucket,
        parameters: &[Parameter],
        layout: &Layout,
        publishers: &Publishers,
    ) -> Self {
        // One for all of the bucket: parameters with other cuts are in other buckets.
        let axes = parameters[bucket.parameters[0]].cut_axes();
        let publishers = publishers[axes].clone();
        match layout.slice_group(axes) {
            None => {
                let (held, group) = (bucket.clone(), layout.world().communicator());
                Self { held, group, publishers, assembly: None }
            }
            Some(group) => Self {
                held: bucket.of_slice(parameters, &group.grid.positions, group.grid.slice),
                group: group.alike.clone(),
                publishers,
                assembly: Some(Assembly::new(bucket, parameters, group)),
            },
        }
    }

    /// The exchange of a bucket in which every rank has the shard of the rank before it.
    ///
    /// # Panics
    ///
    /// If the parameters are slices.
    pub fn of_previous_ranks(&self, bucket: &Bucket) -> Self {
        assert!(!self.is_cut(), "slices are assembled by the plan's owners");
        let (group, publishers) = (self.group.clone(), self.publishers.clone());
        Self { held: bucket.clone(), group, publishers, assembly: None }
    }

    /// The pieces of matrices in this rank's share, if the parameters are slices.
    pub fn share(&self) -> Option<&Share> {
        self.assembly.as_ref().map(|assembly| &assembly.share)
    }

    /// Returns `true` if the parameters are slices.
    pub fn is_cut(&self) -> bool {
        self.assembly.is_some()
    }

    /// The range of this rank's share in the bucket as it has it.
    pub fn share_range(&self) -> Range<usize> {
        self.held.shard_range(self.group.rank())
    }

    /// Starts to assemble this rank's shard of whole parameters, from the shares of the ranks with
    /// all slices. It stays as it is if nothing is cut.
    pub fn assemble(&self, share: Tensor<1>) -> Result<Pending> {
        let Some(Assembly { across, to_owners, owned, .. }) = &self.assembly else {
            return Ok(Pending::ready(share));
        };
        let Some(to_owners) = to_owners else {
            let owned = owned.clone();
            // Joined when it is waited for, so that both ways take their memory at the same time.
            return Ok(Pending::new(flat::bytes(&share), move || Ok(owned.join(&share))));
        };
        // Every rank of the row owns some matrices and has slices of all of them.
        let received = across.all_to_all(share, to_owners)?;
        let owned = owned.clone();
        Ok(Pending::new(received.bytes(), move || Ok(owned.join(&received.wait()?))))
    }

    /// Starts to distribute this rank's shard of whole parameters: the reverse of
    /// [`assemble`](Self::assemble).
    pub fn distribute(&self, shard: Tensor<1>) -> Result<Pending> {
        match &self.assembly {
            None => Ok(Pending::ready(shard)),
            Some(Assembly { across, to_owners, owned, .. }) => match to_owners {
                None => Ok(Pending::ready(owned.cut(&shard))),
                Some(to_owners) => across.all_to_all(owned.cut(&shard), &to_owners.back()),
            },
        }
    }
}

impl Assembly {
    fn new(
        bucket: &Bucket,
        parameters: &[Parameter],
        SliceGroup { grid, across, .. }: &SliceGroup,
    ) -> Self {
        // Borrowed: slices have ranges for every rank, and each rank asks for all of them.
        let of_rank = |rank: usize| -> Vec<(&Slices, Run)> {
            let runs = bucket.runs(rank).into_iter().map(|run| {
                let slices = parameters[run.parameter].slices.as_ref();
                (slices.expect("all of a bucket are cut"), run)
            });
            runs.collect()
        };
        let row = &grid.ranks[grid.replica];
        let held = |slice: usize, runs: &[(&Slices, Run)]| -> usize {
            runs.iter().map(|(slices, run)| slices.range(slice, &run.elements).len()).sum()
        };
        let (mut sent, mut moves) = (vec![], false);
        for (owner, rank) in row.iter().enumerate() {
            let runs = of_rank(*rank);
            sent.push(held(grid.slice, &runs));
            let whole: usize = runs.iter().map(|(_, run)| run.elements.len()).sum();
            // The sum over all owners, since every rank has to decide alike whether there is a
            // call.
            moves |= held(owner, &runs) < whole;
        }
        let (runs, elements) = (of_rank(row[grid.slice]), bucket.counts.of(row[grid.slice]));
        // Slices may differ in length: a dimension need not be a multiple of the ranks.
        let received = (0..row.len()).map(|slice| held(slice, &runs)).collect();
        // If every owner has its matrices whole already, nothing is sent.
        let to_owners = moves.then_some(PairCounts { sent, received });
        let runs = runs.into_iter().map(|(slices, run)| (slices.clone(), run)).collect();
        let owned = Arc::new(Owned { runs, elements });
        let share = Share::new(bucket, parameters, grid);
        Self { across: across.clone(), to_owners, owned, share }
    }
}

impl Owned {
    /// The shard, from what the ranks have sent one after the other: the slices of all runs.
    fn join(&self, received: &Tensor<1>) -> Tensor<1> {
        let (dtype, device) = (received.dtype(), received.device());
        let Some((first, _)) = self.runs.first() else {
            return flat::zeros(self.elements, dtype, &device);
        };
        let mut pieces: Vec<Vec<Tensor<1>>> = vec![vec![]; self.runs.len()];
        let mut start = 0;
        // Slice by slice, as the ranks have sent them; a run is complete after the last one.
        for slice in 0..first.count() {
            for ((slices, run), pieces) in self.runs.iter().zip(&mut pieces) {
                let end = start + slices.range(slice, &run.elements).len();
                pieces.push(flat::slice(received, start..end));
                start = end;
            }
        }
        let whole = self.runs.iter().zip(pieces);
        let whole = whole.map(|((slices, run), pieces)| slices.join(&pieces, &run.elements));
        let firsts: Vec<usize> = self.runs.iter().map(|(_, run)| run.range.start).collect();
        flat::place(whole.collect(), &firsts, self.elements)
    }

    /// The slices of all runs, one slice after the other: the reverse of [`join`](Self::join).
    fn cut(&self, shard: &Tensor<1>) -> Tensor<1> {
        let (dtype, device) = (shard.dtype(), shard.device());
        let count = self.runs.first().map_or(0, |(slices, _)| slices.count());
        let runs: Vec<_> =
            self.runs.iter().map(|(_, run)| flat::slice(shard, run.range.clone())).collect();
        let of_slice = |slice: usize| {
            let runs = self.runs.iter().zip(&runs);
            runs.map(move |((slices, run), values)| slices.cut(values, &run.elements, slice))
        };
        flat::concat((0..count).flat_map(of_slice).collect(), dtype, &device)
    }
}
