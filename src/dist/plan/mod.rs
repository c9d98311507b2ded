//! Ownership plans: which rank updates what, and what travels together.
//!
//! A [`Plan`] is computed once, from the trainable parameters and from what updating them costs.
//! Every hidden matrix gets an owner, the one rank that orthogonalises it; parameters that are
//! updated element by element are cut into equal shares. All of it is laid out in [`Bucket`]s, flat
//! buffers that are reduced and gathered as a whole.
//!
//! Every rank has to hold the same plan: compare [`Plan::digest`] before the first step. Strategies
//! without a time limit make equal plans of equal arguments; after
//! `Strategy::Optimal` one rank has to send its [`Plan::owners`] to the others, which build theirs
//! by [`Plan::with_owners`].

mod bucket;
mod cost;
mod deal;
#[cfg(feature = "optimal")]
mod optimal;
mod report;
mod spread;
mod timeline;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

pub use bucket::{Bucket, BucketKind, GRAIN, Piece};
pub use cost::{Costs, ShapeCost};
pub use report::{RankReport, Report};
pub(super) use spread::spread;
pub use timeline::{Machine, Timeline};

use crate::error::{Error, Result};

/// One trainable parameter, as a plan sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Parameter {
    /// Its path in its module.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: DType,
    /// How it is updated.
    pub work: Work,
}

impl Parameter {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of matrices that need an owner: none where it is updated element by element.
    pub fn matrices(&self) -> usize {
        match self.work {
            Work::Matrices { count, .. } => count,
            Work::Elements => 0,
        }
    }
}

/// How a parameter is updated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Work {
    /// As matrices, contiguous one after the other, each of which has an owner.
    Matrices {
        /// How many.
        count: usize,
        /// Rows of each.
        rows: usize,
        /// Columns of each.
        columns: usize,
    },
    /// Element by element, as AdamW does: split between ranks at borders of [`GRAIN`].
    Elements,
}

/// How owners are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub enum Strategy {
    /// In turn: the first matrix to rank 0, the next to rank 1, and so on, shape after shape.
    BlockCyclic,
    /// The most expensive first, each to the rank that is done soonest: of single matrices, and of
    /// chunks of them that share a batch, with exchanges as long as they help the busiest rank.
    #[default]
    Greedy,
    /// The least load of the busiest rank, by mixed-integer programming that starts from `Greedy`
    /// and never ends with more. The search ends where less than a thousandth is left to gain.
    ///
    /// What is found within a time depends on the machine: compute the plan on one rank and send
    /// its owners to the others. Where the program would be too large to get anywhere, and when the
    /// time is over before anything better was found, the owners are those of `Greedy`.
    #[cfg(feature = "optimal")]
    Optimal {
        /// When to stop, in seconds.
        time_limit_s: f64,
    },
}

/// How to make a [`Plan`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanSettings {
    /// How owners are chosen.
    pub strategy: Strategy,
    /// The most that a bucket of several parameters may hold, in bytes.
    pub bucket_bytes: usize,
    /// Parameters that are updated element by element and have fewer elements than this are
    /// updated whole by every rank.
    pub small_elements: usize,
}

impl Default for PlanSettings {
    /// `Greedy`; buckets of 25 MiB, as in PyTorch's `DistributedDataParallel`
    /// (<https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>);
    /// parameters under 1024 elements on every rank, as in nanochat
    /// (<https://github.com/karpathy/nanochat>).
    fn default() -> Self {
        Self { strategy: Strategy::default(), bucket_bytes: 25 << 20, small_elements: 1024 }
    }
}

impl PlanSettings {
    fn check(&self) -> Result<()> {
        if self.bucket_bytes == 0 {
            return Err(refused("bucket_bytes", 0, "at least 1"));
        }
        #[cfg(feature = "optimal")]
        if let Strategy::Optimal { time_limit_s } = self.strategy
            && std::time::Duration::try_from_secs_f64(time_limit_s).is_err()
        {
            return Err(refused("time_limit_s", time_limit_s, "a number of seconds, at least 0"));
        }
        Ok(())
    }
}

/// Who updates what, and what travels together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    world_size: usize,
    parameters: Vec<Parameter>,
    owners: Vec<Vec<usize>>,
    buckets: Vec<Bucket>,
}

impl Plan {
    /// A plan for `world_size` ranks, with the owners that the strategy chooses.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if there is no rank, `bucket_bytes` is 0, the time limit is no duration,
    /// or `costs` has no finite cost of at least 0 for some shape.
    ///
    /// # Panics
    ///
    /// If the matrices of a parameter have not as many elements as its shape.
    pub fn new(
        parameters: Vec<Parameter>,
        world_size: usize,
        settings: &PlanSettings,
        costs: &Costs,
    ) -> Result<Self> {
        check(&parameters, world_size, settings)?;
        costs.check(&parameters)?;
        let layout = bucket::layout(&parameters, settings);
        let owners = deal::owners(&parameters, &layout, world_size, settings.strategy, costs);
        Ok(Self::laid_out(parameters, world_size, layout, owners))
    }

    /// A plan with these owners: of each parameter, of each of its matrices, the rank.
    ///
    /// The strategy of the settings is not asked. With the owners of another plan of the same
    /// parameters, ranks and settings, this is that plan.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if there is no rank, `bucket_bytes` is 0, the time limit is no duration,
    /// or `owners` has not one rank of the world for every matrix.
    ///
    /// # Panics
    ///
    /// If the matrices of a parameter have not as many elements as its shape.
    pub fn with_owners(
        parameters: Vec<Parameter>,
        world_size: usize,
        settings: &PlanSettings,
        owners: Vec<Vec<usize>>,
    ) -> Result<Self> {
        check(&parameters, world_size, settings)?;
        let matrices = parameters.iter().map(Parameter::matrices);
        if !matrices.eq(owners.iter().map(Vec::len)) {
            return Err(refused("owners", "of another model", "one rank for every matrix"));
        }
        if let Some(rank) = owners.iter().flatten().find(|&&rank| rank >= world_size) {
            return Err(refused("owners", format!("rank {rank}"), "below the number of ranks"));
        }
        let layout = bucket::layout(&parameters, settings);
        Ok(Self::laid_out(parameters, world_size, layout, owners))
    }

    fn laid_out(
        parameters: Vec<Parameter>,
        world_size: usize,
        layout: Vec<bucket::Contents>,
        owners: Vec<Vec<usize>>,
    ) -> Self {
        let fill = |contents| Bucket::new(contents, &parameters, &owners, world_size);
        let buckets = layout.into_iter().map(fill).collect();
        Self { world_size, parameters, owners, buckets }
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The parameters, in the order of the model.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// What travels together: buckets of matrices first, the most expensive shapes before others,
    /// then those of elements, then the replicated ones.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Of each parameter, of each of its matrices, the rank that updates it.
    pub fn owners(&self) -> &[Vec<usize>] {
        &self.owners
    }

    /// The owners, if the ranks were dealt matrices in another order: what rank `r` owns goes to
    /// `order[r]`. Nobody has more or less to do.
    pub(super) fn owners_in(&self, order: &[usize]) -> Vec<Vec<usize>> {
        let owners = self.owners.iter();
        owners.map(|owners| owners.iter().map(|rank| order[*rank]).collect()).collect()
    }

    /// The rank that updates matrix `index` of a parameter.
    ///
    /// # Panics
    ///
    /// If there is no such matrix.
    pub fn owner(&self, parameter: usize, index: usize) -> usize {
        self.owners[parameter][index]
    }

    /// What tells two plans apart: of their parameters, their owners and their buckets. The same
    /// in every process that runs the same program.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// What each rank spends on its matrices in a step, in the unit of the costs. A rank's matrices
    /// of one shape in one bucket are one batch.
    ///
    /// # Panics
    ///
    /// If `costs` has nothing for a shape of the plan.
    pub fn loads(&self, costs: &Costs) -> Vec<f64> {
        let work = self.work(costs);
        (0..self.world_size).map(|rank| work.iter().map(|bucket| bucket[rank]).sum()).collect()
    }

    /// What each rank spends on its matrices, bucket by bucket.
    fn work(&self, costs: &Costs) -> Vec<Vec<f64>> {
        let work = self.buckets.iter().map(|bucket| {
            let mut batches: BTreeMap<(usize, [usize; 2]), usize> = BTreeMap::new();
            for &parameter in &bucket.parameters {
                let Work::Matrices { rows, columns, .. } = self.parameters[parameter].work else {
                    continue;
                };
                for &owner in &self.owners[parameter] {
                    *batches.entry((owner, [rows, columns])).or_default() += 1;
                }
            }
            let mut work = vec![0.0; self.world_size];
            for ((owner, shape), count) in batches {
                work[owner] += costs.of(shape).batch(count);
            }
            work
        });
        work.collect()
    }

    /// The load of the busiest rank over the mean load: 1 at best. Also 1 if there is no load.
    ///
    /// # Panics
    ///
    /// If `costs` has nothing for a shape of the plan.
    pub fn imbalance(&self, costs: &Costs) -> f64 {
        let loads = self.loads(costs);
        let mean = loads.iter().sum::<f64>() / self.world_size as f64;
        let (_, most) = deal::busiest(&loads);
        if most == 0.0 { 1.0 } else { most / mean }
    }

    /// What every rank has to do. Prints as a table.
    ///
    /// # Panics
    ///
    /// If `costs` has nothing for a shape of the plan.
    pub fn report(&self, costs: &Costs) -> Report {
        Report::new(self, costs)
    }
}

fn check(parameters: &[Parameter], world_size: usize, settings: &PlanSettings) -> Result<()> {
    for Parameter { path, shape, work, .. } in parameters {
        if let Work::Matrices { count, rows, columns } = work {
            let elements: usize = shape.iter().product();
            assert_eq!(count * rows * columns, elements, "matrices of `{path}`, shape {shape:?}");
        }
    }
    if world_size == 0 {
        return Err(refused("world_size", 0, "at least 1"));
    }
    settings.check()
}

fn refused(setting: &'static str, value: impl ToString, expected: &'static str) -> Error {
    Error::Setting { setting, value: value.to_string(), expected }
}

#[cfg(test)]
mod tests;
