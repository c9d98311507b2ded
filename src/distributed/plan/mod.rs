//! Ownership plans: the rank that updates each parameter, and the parameters that are communicated
//! together.
//!
//! A [`Plan`] is computed once, from the trainable parameters and the costs of updating them. Every
//! hidden matrix gets an owner, the one rank that orthogonalises it, and so does every parameter
//! that is updated whole, by an optimizer of the user's. Parameters that are updated element by
//! element are cut into shards of equal size. All parameters are laid out in [`Bucket`]s, flat
//! buffers that are reduced and gathered as a whole.
//!
//! Every rank has to have the same plan: compare [`Plan::digest`] before the first step. Without a
//! time limit, equal arguments give equal plans. With `Balancing::Optimal`, one rank has to send
//! its [`Plan::owners`] to the others, which build their plans by `Plan::with_owners`.
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Device};
//! use distmuon::distributed::plan::{GroupReport, Parameter, Placement, RankReport, Report, Work};
//! use distmuon::{DistMuonConfig, World};
//!
//! let world = World::alone(Device::default().autodiff());
//! let model: Vec<_> = (0..4).map(|_| LinearConfig::new(64, 64).init(world.device())).collect();
//! let optim = DistMuonConfig::new().init(&world, &model)?;
//!
//! let plan = optim.plan();
//! for (parameter, owners) in plan.parameters().iter().zip(plan.owners()) {
//!     let Parameter { path, work, placement, .. } = parameter;
//!     match work {
//!         Work::Matrices { count, .. } => println!("{path}: {count} matrices of {owners:?}"),
//!         Work::Whole => println!("{path}: of rank {owners:?}"),
//!         Work::Elements => println!("{path}: divided, if it is large"),
//!     }
//!     assert_eq!(*placement, Placement::Replicated); // without a layout that divides it
//! }
//! let Report { groups, ranks, .. } = optim.report();
//! for GroupReport { shape, owned } in groups {
//!     println!("{shape:?}: {owned:?} of them, by rank");
//! }
//! let RankReport { matrices, bytes, .. } = &ranks[world.rank()];
//! println!("{matrices} matrices on this rank, {bytes} bytes");
//! # Ok::<(), distmuon::Error>(())
//! ```

mod bucket;
mod cost;
mod element_counts;
mod greedy;
mod loads;
mod node_order;
#[cfg(feature = "optimal")]
mod optimal;
mod owners;
mod report;
mod slice_elements;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

pub use crate::parameters::Placement;
#[doc(hidden)]
pub use bucket::{Bucket, BucketKind, InBuffer, Overlap, Piece, ROW_ELEMENTS, Run};
pub use cost::Costs;
#[doc(hidden)]
pub use cost::ShapeCost;
#[doc(hidden)]
pub use element_counts::Counts;
pub(super) use loads::Candidates;
pub(super) use node_order::node_order;
pub use report::{GroupReport, RankReport, Report};
pub(crate) use slice_elements::Slice;
#[doc(hidden)]
pub use slice_elements::{Cut, Slices};

use crate::error::{Error, Result};

/// A trainable parameter, as plans describe it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Parameter {
    /// Path of the parameter in its module.
    pub path: String,
    /// Shape of the parameter: the whole's if it is cut.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// The unit of work in which the parameter is updated.
    pub work: Work,
    /// The parameter's place between steps.
    pub placement: Placement,
    /// The slices into which it is cut, along axes of a mesh. `None` if it is not cut.
    pub slices: Option<Slices>,
    /// The settings of the update, by an index: parameters of other settings are in other buckets.
    #[serde(default)]
    pub settings: usize,
}

impl Parameter {
    /// The axes along which it is cut, the outermost first.
    pub fn cut_axes(&self) -> &[String] {
        self.slices.as_ref().map_or(&[], Slices::axes)
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of matrices: 0 if the parameter is not updated as matrices.
    pub fn matrices(&self) -> usize {
        match self.work {
            Work::Matrices { count, .. } => count,
            Work::Whole | Work::Elements => 0,
        }
    }

    /// Number of parts that need an owner, and the elements of each: the matrices, or the whole
    /// parameter. No parts if it is updated element by element.
    pub fn owned(&self) -> (usize, usize) {
        match self.work {
            Work::Matrices { count, rows, columns } => (count, rows * columns),
            Work::Whole => (1, self.elements()),
            Work::Elements => (0, 0),
        }
    }
}

/// The unit of work in which a parameter is updated.
// Exhaustive: code that makes or reads plans has to handle every kind of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Work {
    /// Matrices, one after the other in memory. Each of them has an owner.
    Matrices {
        /// Number of matrices.
        count: usize,
        /// Rows of each matrix.
        rows: usize,
        /// Columns of each matrix.
        columns: usize,
    },
    /// All elements together, as for an optimizer of the user's. The parameter has one owner.
    Whole,
    /// Single elements, as for AdamW. Ranks divide them into rows of [`ROW_ELEMENTS`].
    Elements,
}

/// The method by which owners are chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Balancing {
    /// Ranks take turns: the first matrix goes to rank 0, the next to rank 1, and so on, shape
    /// after shape, as in nanochat (<https://github.com/karpathy/nanochat>). Costs do not count:
    /// the baseline of comparisons.
    BlockCyclic,
    /// Longest processing time first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969):
    /// each matrix, in descending order of cost, goes to the rank that then finishes soonest. The
    /// same is tried with chunks of matrices that share a batch, followed by exchanges as long as
    /// these help the busiest rank. The best of these assignments is taken.
    #[default]
    Greedy,
    /// The smallest load of the busiest rank, by mixed-integer programming. The search starts from
    /// `Greedy`, never ends with a larger load, and ends when no assignment can be better by more
    /// than a thousandth.
    ///
    /// The result of a search with a time limit depends on the machine: compute the plan on one
    /// rank and send its owners to the others. The owners are as by `Greedy` if the program is
    /// too large to be solved, or if the time runs out before a better assignment is found. Needs
    /// the feature `optimal`.
    #[cfg(feature = "optimal")]
    Optimal {
        /// The time after which the search stops, in seconds.
        time_limit_s: f64,
    },
}

/// The order in which matrices are distributed to buckets.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MatrixOrder {
    /// The largest come first, so that the longest work starts soonest, and that a bucket has few
    /// shapes.
    #[default]
    Size,
    /// The model's order, in which a forward pass uses them: for parameters that arrive during it.
    Model,
}

/// Configuration of a [`Plan`].
#[doc(hidden)] // for the bench `scaling`: `DistMuonConfig` has the settings of programs
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanConfig {
    /// The method by which owners are chosen.
    pub balancing: Balancing,
    /// The largest size of a bucket of several parameters, in bytes.
    pub bucket_bytes: usize,
    /// The order in which matrices are distributed to buckets.
    pub order: MatrixOrder,
    /// Parameters that are updated element by element and have fewer elements than this are updated
    /// as a whole by every rank.
    pub small_elements: usize,
}

impl Default for PlanConfig {
    /// `Greedy`; buckets by size, of 25 MB (10^6 bytes), near the 25 MiB of PyTorch's
    /// `DistributedDataParallel`
    /// (<https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>);
    /// parameters with fewer than 1024 elements on every rank, as in nanochat
    /// (<https://github.com/karpathy/nanochat>).
    fn default() -> Self {
        Self {
            balancing: Balancing::default(),
            // The size of PyTorch's buckets (`bucket_cap_mb` of `DistributedDataParallel`).
            bucket_bytes: 25_000_000,
            order: MatrixOrder::default(),
            small_elements: 1024,
        }
    }
}

impl PlanConfig {
    fn check(&self) -> Result<()> {
        if self.bucket_bytes == 0 {
            return Err(Error::setting("bucket_bytes", 0, "at least 1"));
        }
        #[cfg(feature = "optimal")]
        if let Balancing::Optimal { time_limit_s } = self.balancing
            && std::time::Duration::try_from_secs_f64(time_limit_s).is_err()
        {
            let expected = "a finite number of seconds, at least 0";
            return Err(Error::setting("time_limit_s", time_limit_s, expected));
        }
        Ok(())
    }
}

/// The owners of all matrices and whole parameters, and the buckets of all parameters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    world_size: usize,
    parameters: Vec<Parameter>,
    owners: Vec<Vec<usize>>,
    buckets: Vec<Bucket>,
}

impl Plan {
    /// Makes a plan for `world_size` ranks, with owners chosen by the balancing of `config`.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if `world_size` or `bucket_bytes` is 0, if the time limit is not a
    /// duration, or if `costs` does not have a finite cost of at least 0 for every shape.
    ///
    /// # Panics
    ///
    /// If the matrices of a parameter do not have the same number of elements as its shape.
    #[doc(hidden)] // for the bench `scaling`: a program's plan is its optimizer's
    pub fn new(
        parameters: Vec<Parameter>,
        world_size: usize,
        config: &PlanConfig,
        costs: &Costs,
    ) -> Result<Self> {
        Self::among(parameters, world_size, config, (costs, &Candidates::new()))
    }

    /// [`new`](Self::new), with an owner among its candidates for every matrix.
    pub(super) fn among(
        parameters: Vec<Parameter>,
        world_size: usize,
        config: &PlanConfig,
        (costs, candidates): (&Costs, &Candidates),
    ) -> Result<Self> {
        check(&parameters, world_size, config)?;
        costs.check(&parameters)?;
        // Before the owners: which matrices are a batch, and share a fixed cost, depends on the
        // buckets.
        let layout = bucket::layout(&parameters, config);
        let work = (costs, candidates);
        let owners = owners::owners(&parameters, &layout, world_size, config.balancing, work);
        Ok(Self::from_layout(parameters, world_size, layout, owners))
    }

    /// Makes a plan with the given owners: for each parameter, the rank of each of its matrices, or
    /// of the whole parameter.
    ///
    /// The balancing of `config` is not used. The owners of another plan of the same parameters,
    /// ranks and configuration give that plan.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if `world_size` or `bucket_bytes` is 0, or if the time limit is not a
    /// duration; [`Error::Usage`] if `owners` does not have one rank of the world for every matrix
    /// and every whole parameter.
    ///
    /// # Panics
    ///
    /// If the matrices of a parameter do not have the same number of elements as its shape.
    #[doc(hidden)] // as `new`
    pub fn with_owners(
        parameters: Vec<Parameter>,
        world_size: usize,
        config: &PlanConfig,
        owners: Vec<Vec<usize>>,
    ) -> Result<Self> {
        check(&parameters, world_size, config)?;
        let parts = parameters.iter().map(|parameter| parameter.owned().0);
        if !parts.eq(owners.iter().map(Vec::len)) {
            return Err(Error::usage(
                "the owners do not fit the parameters",
                "one rank for every matrix and every whole parameter",
                format!("{:?} ranks", owners.iter().map(Vec::len).collect::<Vec<_>>()),
                "take the owners from a plan of the same parameters",
            ));
        }
        if let Some(rank) = owners.iter().flatten().find(|&&rank| rank >= world_size) {
            return Err(Error::usage(
                "the owners do not fit the world",
                "ranks below the number of ranks",
                format!("rank {rank} of {world_size}"),
                "take the owners from a plan of as large a world",
            ));
        }
        let layout = bucket::layout(&parameters, config);
        Ok(Self::from_layout(parameters, world_size, layout, owners))
    }

    fn from_layout(
        parameters: Vec<Parameter>,
        world_size: usize,
        layout: Vec<bucket::BucketContents>,
        owners: Vec<Vec<usize>>,
    ) -> Self {
        let fill = |contents| Bucket::new(contents, &parameters, &owners, world_size);
        let buckets = layout.into_iter().map(fill).collect();
        Self { world_size, parameters, owners, buckets }
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the parameters, in the order of the model.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Returns the buckets: first of matrices, with the most expensive shapes first, then of whole
    /// parameters and of elements, then the replicated ones.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Returns, for each parameter, the rank that updates each of its matrices, or all of it.
    pub fn owners(&self) -> &[Vec<usize>] {
        &self.owners
    }

    /// The owners for another order of the ranks: the matrices of rank `r` go to `order[r]`. The
    /// loads are the same, in another order.
    pub(super) fn owners_in(&self, order: &[usize]) -> Vec<Vec<usize>> {
        let owners = self.owners.iter();
        owners.map(|owners| owners.iter().map(|rank| order[*rank]).collect()).collect()
    }

    /// Returns the rank that updates matrix `index` of the parameter with index `parameter`. A
    /// whole parameter has index 0.
    ///
    /// # Panics
    ///
    /// If the plan does not have that parameter or matrix.
    pub fn owner(&self, parameter: usize, index: usize) -> usize {
        self.owners[parameter][index]
    }

    /// Returns a fingerprint of the plan's parameters, owners and buckets, which is the same in
    /// every process that runs the same program.
    pub fn digest(&self) -> u64 {
        // Without random keys, so that ranks of one build agree.
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Returns the cost of each rank's matrices and whole parameters in a step, in the unit of
    /// `costs`. A rank's matrices of one shape in one bucket are one batch. Whole parameters
    /// without a cost do not count.
    ///
    /// # Panics
    ///
    /// If `costs` has no entry for a shape of the plan.
    pub fn loads(&self, costs: &Costs) -> Vec<f64> {
        let work = self.work(costs);
        (0..self.world_size).map(|rank| work.iter().map(|bucket| bucket[rank]).sum()).collect()
    }

    /// The cost of each rank's matrices and whole parameters: `[bucket][rank]`.
    pub(super) fn work(&self, costs: &Costs) -> Vec<Vec<f64>> {
        let work = self.buckets.iter().map(|bucket| {
            // A rank iterates its matrices of one shape in a bucket together, and pays their fixed
            // cost once.
            let mut batches: BTreeMap<(usize, [usize; 2]), usize> = BTreeMap::new();
            let mut work = vec![0.0; self.world_size];
            for &parameter in &bucket.parameters {
                let Parameter { path, work: kind, .. } = &self.parameters[parameter];
                for &owner in &self.owners[parameter] {
                    match *kind {
                        Work::Matrices { rows, columns, .. } => {
                            *batches.entry((owner, [rows, columns])).or_default() += 1;
                        }
                        Work::Whole => work[owner] += costs.of_whole(path).unwrap_or_default(),
                        Work::Elements => {}
                    }
                }
            }
            for ((owner, shape), count) in batches {
                work[owner] += costs.of(shape).batch(count);
            }
            work
        });
        work.collect()
    }

    /// Returns `true` if the owners of a bucket's parameters decide alone on their updates.
    pub(super) fn decides_alone(&self, bucket: usize) -> bool {
        let parameters = &self.buckets[bucket].parameters;
        // By parameter and not by rank: a parameter is decided on as a whole, and several owners
        // would have to agree.
        parameters.iter().all(|parameter| self.owners[*parameter].len() == 1)
    }

    /// The order in which a step updates the buckets: first those that owners decide on alone.
    pub(super) fn update_order(&self) -> Vec<usize> {
        // The order of the stages of a step.
        let (alone, together): (Vec<_>, Vec<_>) =
            (0..self.buckets.len()).partition(|bucket| self.decides_alone(*bucket));
        [alone, together].concat()
    }

    /// Returns the load of the busiest rank divided by the mean load: 1 at best, and 1 for a plan
    /// without matrices.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::Device};
    /// use distmuon::distributed::plan::{Costs, ShapeCost};
    /// use distmuon::{DistMuonConfig, World};
    ///
    /// let world = World::alone(Device::default().autodiff());
    /// let model = LinearConfig::new(64, 64).init(world.device());
    /// let optim = DistMuonConfig::new().init(&world, &model)?;
    /// let costs = Costs::new([([64, 64], ShapeCost { fixed: 0.0, each: 1.0 })]);
    /// assert_eq!(optim.plan().imbalance(&costs), 1.0); // one rank has all of it
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If `costs` has no entry for a shape of the plan.
    pub fn imbalance(&self, costs: &Costs) -> f64 {
        let loads = self.loads(costs);
        let mean = loads.iter().sum::<f64>() / self.world_size as f64;
        let (_, max) = loads::busiest(&loads);
        // Without any matrix, every rank has the mean load, 0.
        if max == 0.0 { 1.0 } else { max / mean }
    }

    /// Returns the work of every rank. Prints as a table.
    ///
    /// # Panics
    ///
    /// If `costs` has no entry for a shape of the plan.
    pub fn report(&self, costs: &Costs) -> Report {
        Report::new(self, costs)
    }
}

fn check(parameters: &[Parameter], world_size: usize, config: &PlanConfig) -> Result<()> {
    for Parameter { path, shape, work, .. } in parameters {
        if let Work::Matrices { count, rows, columns } = work {
            let elements: usize = shape.iter().product();
            assert_eq!(
                count * rows * columns,
                elements,
                "the matrices of `{path}` do not cover its shape {shape:?}"
            );
        }
    }
    if world_size == 0 {
        return Err(Error::setting("world_size", 0, "at least 1"));
    }
    config.check()
}

#[cfg(test)]
pub(super) mod tests;
