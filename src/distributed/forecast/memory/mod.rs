//! The memory of a rank, before any of it is allocated.

mod passes;
mod step;

use std::collections::BTreeMap;
use std::fmt;

use burn::module::Module;
use burn::tensor::DType;
use comfy_table::{Table, presets};

use super::planned_rank::{PlannedRank, PlannedRanks};
use crate::backend::precise_dtype;
use crate::comm::World;
use crate::distributed::config::{DistMuonConfig, GradDtype};
use crate::distributed::layout::Layout;
use crate::distributed::optimizer::bytes_of_parameter;
use crate::distributed::plan::{Bucket, BucketKind, Plan};
use crate::distributed::trainable::{TrainableParameter, UpdateKind};
use crate::error::{Error, Result};
use crate::parameters::Found;
use crate::update::{ElementwiseUpdate, MANTISSA, MASTER, Slot};
use passes::PassMemory;
use step::StepMemory;

/// The bytes that a rank would hold, from
/// [`DistMuonConfig::forecast_memory`](crate::DistMuonConfig::forecast_memory).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankMemory {
    /// Trained parameters between steps: all of them, this rank's slices, or its parts.
    pub parameters: usize,
    /// Frozen parameters.
    pub frozen: usize,
    /// Whole gradients when a step begins, of the parameters that the step reduces.
    pub gradients: usize,
    /// This rank's shards of reduced gradients, at most.
    pub shards: usize,
    /// Master weights: see [`MasterWeights`](crate::MasterWeights).
    pub masters: usize,
    /// Momentum, moments and everything else in the state, also what an optimizer of the user's
    /// stores.
    pub states: usize,
    /// Master weights and states on the host, for a model on another device: see
    /// [`StatesOn::Host`](crate::distributed::StatesOn::Host). They do not count in `masters` and
    /// `states`, and only two buckets of them in `peak`.
    pub on_host: usize,
    /// Messages that are sent and received at one time, with the sums of what is received, at
    /// most: of a step, or of the gradients that a backward pass reduces.
    pub messages: usize,
    /// Owned parameters that are gathered ahead of their use, with the one in use, at most. Without
    /// those that are held longer since ranks left them out.
    pub gathered: usize,
    /// All of it at one time, at most. Less than the sum of the kinds, whose largest are at
    /// different times.
    pub peak: usize,
}

impl RankMemory {
    /// Returns the bytes between steps.
    pub fn between_steps(&self) -> usize {
        self.parameters + self.frozen + self.masters + self.states
    }

    /// The names and the bytes of all kinds.
    fn kinds(&self) -> [(&'static str, usize); 11] {
        [
            ("parameters", self.parameters),
            ("frozen parameters", self.frozen),
            ("master weights", self.masters),
            ("states", self.states),
            ("between steps", self.between_steps()),
            ("gradients", self.gradients),
            ("gradient shards", self.shards),
            ("messages", self.messages),
            ("gathered parameters", self.gathered),
            ("peak", self.peak),
            ("on the host", self.on_host),
        ]
    }
}

/// The bytes of every rank, from
/// [`DistMuonConfig::forecast_memory`](crate::DistMuonConfig::forecast_memory). Prints as a
/// table of the ranks with the least and the most memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryForecast {
    ranks: Vec<RankMemory>,
}

impl MemoryForecast {
    /// Returns the bytes of every rank, in the order of the ranks.
    pub fn ranks(&self) -> &[RankMemory] {
        &self.ranks
    }

    /// Returns the rank with the largest peak, and its bytes.
    pub fn largest(&self) -> (usize, RankMemory) {
        let ranks = self.ranks.iter().copied().enumerate();
        // The first of several, as a reader expects.
        ranks.rev().max_by_key(|(_, memory)| memory.peak).expect("a forecast has a rank")
    }

    /// Returns the rank with the smallest peak, and its bytes.
    pub fn smallest(&self) -> (usize, RankMemory) {
        let ranks = self.ranks.iter().copied().enumerate();
        ranks.min_by_key(|(_, memory)| memory.peak).expect("a forecast has a rank")
    }
}

impl fmt::Display for MemoryForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let [(least, smallest), (most, largest)] = [self.smallest(), self.largest()];
        let header = |text: &str, rank: usize| format!("{text}, rank {rank}");
        table.set_header(["bytes of".into(), header("least", least), header("most", most)]);
        for ((kind, least), (_, most)) in smallest.kinds().into_iter().zip(largest.kinds()) {
            table.add_row([kind.to_owned(), least.to_string(), most.to_string()]);
        }
        write!(f, "{table}\nranks: {}", self.ranks.len())
    }
}

impl DistMuonConfig {
    /// Returns the bytes that every one of `ranks` ranks on `nodes` nodes would hold, before
    /// anything is allocated: no rank runs, and parameters that are not initialised yet stay so.
    /// `layout` makes the layout of a rank, as for [`start`](Self::start).
    ///
    /// Only the state of a [user's optimizer](crate::custom) is made, since nothing else tells its
    /// size: for every shape once, on the model's device, by a step on made-up values or by
    /// [`LayerOptimizer::initial`](crate::custom::LayerOptimizer::initial), and dropped.
    ///
    /// The tensors of the model, its gradients and the optimizer count, as in
    /// [`MemoryReport`](crate::distributed::MemoryReport). The messages of an engine count as well,
    /// which sends and receives in memory of its own and adds up what every rank sent, as MPI does,
    /// and NCCL with exact sums. Among threads, a message that is received takes none. Activations
    /// do not count, nor do the intermediate results of an update
    /// ([`IterationPlan::workspace`](crate::IterationPlan::workspace)). Gradients are taken to be
    /// float32 with [`GradDtype::Float32`], and otherwise of their parameter's type. Parameters
    /// that are not initialised have the default type of their device.
    ///
    /// ```
    /// use burn::{nn::LinearConfig, tensor::Device};
    /// use distmuon::distributed::{Layout, MemoryForecast, Mesh, RankMemory};
    /// use distmuon::{DistMuonConfig, Error, World};
    ///
    /// let device = Device::default().autodiff();
    /// let layer = LinearConfig::new(4096, 4096).with_bias(false);
    /// let model: Vec<_> = (0..64).map(|_| layer.init(&device)).collect();
    /// let config = DistMuonConfig::new();
    /// let owned = |world: &World| Ok::<_, Error>(Layout::new(&Mesh::flat(world)).owned("dp"));
    /// let forecast: MemoryForecast = config.forecast_memory(8, 1, &model, owned)?;
    /// println!("{forecast}");
    /// let (_, largest) = forecast.largest();
    /// // 8 of the matrices of 64 MiB, and the momentum of each.
    /// let RankMemory { states, .. } = largest;
    /// assert_eq!(states, 8 << 26);
    /// assert!(largest.between_steps() > 2 * states); // and the parameters
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] if `ranks` is 0, if `nodes` does not divide it, and for
    /// [`CostSource::Measured`](crate::distributed::CostSource::Measured), since nothing is
    /// measured; as [`init_on`](Self::init_on) and
    /// [`Layout::table`](crate::distributed::Layout::table) for a model that the optimizer can't
    /// train or the layout can't divide; the errors of `layout`.
    pub fn forecast_memory<M: Module, E: From<Error>>(
        &self,
        ranks: usize,
        nodes: usize,
        model: &M,
        layout: impl Fn(&World) -> Result<Layout, E>,
    ) -> Result<MemoryForecast, E> {
        let planned = PlannedRanks { config: self, ranks, nodes, model, layout };
        // One plan for all: it is the same on every rank.
        let first = planned.first()?;
        let plan = first.plan()?;
        let mut own = OwnBytes::default();
        let mut all = vec![first.memory(&plan, 0, &mut own)];
        for rank in 1..ranks {
            all.push(planned.next(rank, &first)?.memory(&plan, rank, &mut own));
        }
        Ok(MemoryForecast { ranks: all })
    }
}

/// Bytes of the states of a rank's shard of a bucket.
#[derive(Default)]
struct StatesOfBucket {
    /// Momentum and moments.
    slots: usize,
    masters: usize,
    /// States that users' optimizers make.
    of_users: usize,
}

/// Bytes of the states that users' optimizers make, by their names and the shapes and types of
/// parameters. All ranks have the same.
#[derive(Default)]
struct OwnBytes(BTreeMap<(String, Vec<usize>, &'static str), usize>);

impl OwnBytes {
    fn of(&mut self, rank: &PlannedRank, parameter: &TrainableParameter) -> usize {
        let TrainableParameter { kind, shape, dtype, .. } = parameter;
        let UpdateKind::Whole { optimizer, .. } = kind else { return 0 };
        let key = (optimizer.clone(), shape.clone(), dtype.name());
        *self.0.entry(key).or_insert_with(|| {
            let device = rank.layout.world().device().clone().inner();
            rank.routing.updates().whole(optimizer).own_bytes_of(shape, *dtype, &device)
        })
    }
}

impl PlannedRank {
    fn memory(&self, plan: &Plan, rank: usize, own: &mut OwnBytes) -> RankMemory {
        let passes = self.layout.passes();
        let of_model = self.trainable.model.iter();
        let parameters = of_model.map(|known| bytes_of_parameter(known, &passes)).sum();
        let of_buckets: Vec<StatesOfBucket> =
            plan.buckets().iter().map(|bucket| self.states(bucket, rank, own)).collect();
        let sum = |of: fn(&StatesOfBucket) -> usize| of_buckets.iter().map(of).sum::<usize>();
        let (slots, masters, own) =
            (sum(|of| of.slots), sum(|of| of.masters), sum(|of| of.of_users));
        let memory = RankMemory {
            parameters,
            frozen: self.frozen(),
            gradients: self.gradients(),
            ..RankMemory::default()
        };
        let device = self.layout.world().device().clone().inner();
        let (memory, brought) = match self.layout.config().states_device(&device) {
            None => {
                (RankMemory { states: slots + own, masters, ..memory }, vec![0; of_buckets.len()])
            }
            Some(_) => {
                let brought = of_buckets.iter().map(|of| of.slots + of.masters).collect();
                (RankMemory { states: own, on_host: slots + masters, ..memory }, brought)
            }
        };
        // Passes before the step, which they leave the means to.
        let memory = PassMemory::new(self).run(&passes, memory);
        StepMemory::new(self, plan, (rank, brought), memory).run()
    }

    /// Bytes of the means that backward passes return.
    fn means(&self) -> usize {
        let passes = self.layout.passes();
        let means = passes.parameters().iter().filter(|parameter| parameter.is_trained);
        means.map(|parameter| parameter.shard_count() * parameter.mean_dtype.size()).sum()
    }

    fn frozen(&self) -> usize {
        let (cuts, passes) = (self.layout.cut_parameters(), self.layout.passes());
        let bytes = |found: &Found| {
            let slice = cuts.slice(&found.path).map(|slice| slice.shape());
            let elements = match passes.get(&found.path) {
                // A rank without a part holds one element in its place.
                Some(parameter) if parameter.placement.is_owned() => parameter.part_count().max(1),
                _ => slice.unwrap_or_else(|| found.shape.clone()).iter().product(),
            };
            elements * found.dtype.size()
        };
        self.found.iter().filter(|found| !found.trainable).map(bytes).sum()
    }

    /// Bytes of the gradients that a step reduces.
    fn gradients(&self) -> usize {
        let in_step =
            self.trainable.model.iter().filter(|known| !known.placement.reduces_in_backward());
        in_step
            .map(|known| {
                known.shape.iter().product::<usize>() * self.gradient_dtype(known.dtype).size()
            })
            .sum()
    }

    /// The type in which a step is given the gradients of parameters of a type.
    fn gradient_dtype(&self, parameter: DType) -> DType {
        match self.layout.config().grad_dtype {
            GradDtype::Parameter => parameter,
            GradDtype::Float32 => precise_dtype(parameter),
        }
    }

    /// Bytes of the states of a rank's shard of a bucket.
    fn states(&self, bucket: &Bucket, rank: usize, own: &mut OwnBytes) -> StatesOfBucket {
        let updates = self.routing.updates();
        let of = |table: Vec<Slot>, batch: [usize; 3]| {
            let (masters, slots): (Vec<Slot>, Vec<Slot>) =
                table.into_iter().partition(|slot| [MASTER, MANTISSA].contains(&slot.name));
            let [masters, slots] = [masters, slots].map(|slots| -> usize {
                slots.iter().map(|slot| slot.bytes(batch, bucket.dtype)).sum()
            });
            StatesOfBucket { masters, slots, of_users: 0 }
        };
        if matches!(bucket.kind, BucketKind::Elements | BucketKind::Replicated) {
            // One batch of all rows, also of zeros.
            let elements = bucket.counts.of(rank);
            let batch = ElementwiseUpdate::batch(&[elements]);
            return of(
                updates.rest[bucket.settings(&self.trainable.planned)].slots(bucket.dtype),
                batch,
            );
        }
        bucket.runs(rank).into_iter().fold(StatesOfBucket::default(), |sum, run| {
            let parameter = &self.trainable.trainable[run.parameter];
            let batch = match parameter.kind {
                UpdateKind::Muon { matrices, .. } => {
                    let [m, n] = matrices.shape;
                    [run.elements.len() / (m * n), m, n]
                }
                UpdateKind::Elementwise { .. } | UpdateKind::Whole { .. } => parameter.batch(),
            };
            let StatesOfBucket { slots, masters, .. } = of(parameter.slots(updates), batch);
            StatesOfBucket {
                slots: sum.slots + slots,
                masters: sum.masters + masters,
                of_users: sum.of_users + own.of(self, parameter),
            }
        })
    }
}
