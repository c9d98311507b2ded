//! Random trials: a model, its divisions among ranks, and a sequence of calls.

use std::fmt::{Debug, Formatter};

use distmuon::comm::World;
use distmuon::distributed::plan::Balancing;
use distmuon::distributed::{Axis, DistMuonConfig, Keep, Layout, Mesh, Place, Publish};
use distmuon::{MasterWeights, Result};
use proptest::collection::vec;
use proptest::prelude::*;

use super::model::{DENSE, EXPERTS, Experts, KINDS, Matrix, STACK, Shape};
use super::optim::{ABSENT, DIFFERENCES, Other, STATE, Users};
use crate::loads_states;

/// The most ranks of a world.
const RANKS: usize = 8;

/// The dimension along which each of a model's [kinds of matrices](super::model::Matrix) is cut.
pub type Cuts = [Option<usize>; 4];

/// The division of a model. Ranks with different data are one axis, or nodes with an axis of each;
/// those with the same data have slices of the model.
#[derive(Debug, Clone)]
pub struct Division {
    pub is_owned: bool,
    /// `true` if what is owned lies in rows.
    pub in_rows: bool,
    pub overlaps: bool,
    pub nodes: usize,
    pub keep: Keep,
    /// Limits of parameters that are gathered ahead, and of gradients; two layers, unless set.
    pub limits_mb: [Option<f64>; 2],
    pub small_elements: usize,
    pub allows_unused: bool,
    pub balancing: Balancing,
    /// The dimensions along which a table, a head, stacks and other layers are cut, where ranks
    /// have slices.
    pub cuts: Cuts,
    /// `true` if ranks with different data have the slices, where they can.
    pub cuts_data: bool,
    /// Places of single layers; the numbers after those of layers are the rest of the model.
    pub places: Vec<(usize, Named)>,
}

/// A place of a layer that differs from those of others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Named {
    Owned,
    Rows,
    Replicated,
}

impl Division {
    /// The layout of a trial's ranks for a model, which may have another shape after a load.
    pub fn layout(
        &self,
        world: &World,
        config: &DistMuonConfig,
        (trial, shape): (&Trial, &Shape),
    ) -> Result<Layout> {
        let &Trial { data, model, .. } = trial;
        let nodes = self.nodes(data);
        let mesh = match nodes * model {
            1 => Mesh::flat(world),
            _ => Mesh::new(
                world,
                [
                    Axis::data("node", nodes),
                    Axis::data("dp", data / nodes),
                    Axis::model("tp", model),
                ],
            )?,
        };
        let layout = Layout::new(&mesh).with_config(config.clone());
        let layout = layout.with_small_elements(self.small_elements);
        let [ahead, in_flight] = self.limits_mb;
        // Without gathers or reductions in passes, such settings are errors.
        let ahead = ahead.filter(|_| self.is_owned);
        let in_flight = in_flight.filter(|_| self.is_owned || self.overlaps);
        let layout = ahead.into_iter().fold(layout, Layout::with_ahead_mb);
        let layout = in_flight.into_iter().fold(layout, Layout::with_in_flight_mb);
        let layout = match (self.is_owned, self.in_rows) {
            (true, true) => layout.rows("dp").with_keep(self.keep),
            (true, false) => layout.owned("dp").with_keep(self.keep),
            (false, _) => layout,
        };
        let layout = if self.overlaps { layout.overlap_backward() } else { layout };
        let layout = self.places(trial, shape).into_iter().fold(layout, Layout::with_place);
        // Layers that some ranks leave out are an error otherwise.
        let allows_unused = self.allows_unused || shape.skips;
        Ok(if allows_unused { layout.allow_unused() } else { layout })
    }

    /// The number of nodes of ranks with different data.
    fn nodes(&self, data: usize) -> usize {
        // Means over a node and over nodes round twice, unless they divide by powers of two.
        let divides = data.is_power_of_two() && data.is_multiple_of(self.nodes);
        if divides { self.nodes } else { 1 }
    }

    /// Returns `true` if slices lie on ranks with different data.
    fn cuts_data(&self, trial: &Trial) -> bool {
        // All of these ranks use all slices in a pass. A sum of others is divided otherwise.
        let is_possible = trial.data.is_power_of_two() && !trial.shape.skips;
        self.cuts_data && is_possible && trial.data > 1 && self.nodes(trial.data) == 1
    }

    /// The axis of the ranks that have slices, and the dimensions of cuts.
    fn cuts(&self, trial: &Trial) -> (&'static str, Cuts) {
        let mut cuts = self.cuts;
        let (axis, ranks) = match self.cuts_data(trial) {
            true => {
                // Each rank would have others of a list.
                cuts[Matrix::Layer as usize] = None;
                ("dp", trial.data)
            }
            false => ("tp", trial.model),
        };
        if ranks == 1 {
            cuts = [None; 4];
        }
        // Every rank has a matrix of a stack, or a part of each.
        let stacks = &mut cuts[Matrix::Stack as usize];
        *stacks = stacks.filter(|dimension| *dimension > 0 || ranks <= EXPERTS);
        (axis, cuts)
    }

    /// The rules of cuts, and of places that differ.
    fn places(&self, trial: &Trial, shape: &Shape) -> Vec<Place> {
        let layers = shape.kinds.len();
        let mut places = vec![];
        let dense: Vec<String> = shape.of_kind(DENSE).map(|layer| layer.to_string()).collect();
        let dense = format!(r"^layers\.({})\.(\w+\.)?weight$", dense.join("|"));
        let has =
            [true, shape.has_head, shape.kinds.contains(&STACK), shape.kinds.contains(&DENSE)];
        let patterns = ["^embedding", r"^head\.weight$", "matrices$", &dense];
        let (axis, cuts) = self.cuts(trial);
        for ((pattern, cut), has) in patterns.into_iter().zip(cuts).zip(has) {
            if let Some(dimension) = cut.filter(|_| has) {
                places.push(Place::shard(pattern, axis, dimension));
            }
        }
        // A run without the division knows which slices there are by the cuts alone.
        let differ = self.is_owned && !self.cuts_data(trial);
        for (number, named) in self.places.iter().filter(|_| differ) {
            let number = number % (layers + 3);
            let pattern = match number - number.min(layers) {
                _ if number < layers => format!(r"^layers\.{number}\."),
                0 => "^embedding".to_owned(),
                1 if shape.has_head => "^head".to_owned(),
                2 if shape.has_evaluated => "^evaluated".to_owned(),
                _ => continue,
            };
            match named {
                Named::Owned => places.push(Place::owned(pattern)),
                Named::Rows => places.push(Place::rows(pattern)),
                // Frozen layers are replicated without a rule, which would match nothing.
                Named::Replicated if shape.frozen == Some(number) => {}
                Named::Replicated => places.push(Place::replicated(pattern)),
            }
        }
        places
    }
}

/// The next call of a training loop.
#[derive(Debug, Clone)]
pub enum Call {
    /// A step with the sum of some micro-batches. The loss of the last one is not a number on a
    /// rank.
    Train {
        batches: usize,
        spoiled: Option<usize>,
        way: Way,
    },
    /// Steps until the ranks have run out of batches, of which they have different numbers.
    Join {
        offset: usize,
        batches: usize,
    },
    Evaluate,
    /// Drops a pass.
    Drop(Dropped),
    /// Keeps the model at hand as a teacher, whose loss is added to those of all further passes.
    /// It may be read before, so that new parameters have arrived.
    Teach {
        is_read: bool,
    },
    /// Adds the model to the average of its weights, and evaluates that.
    Average,
    /// Saves the run, and loads it into a model that is made anew.
    Reload(Load),
    /// Loads the weights of another run into the model as it is.
    Pretrain,
    /// Sets the learning rate.
    Rate(f64),
    /// Freezes a layer, or trains it again.
    Freeze(usize),
}

/// The way of a step's micro-batches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Way {
    /// The backward pass of each follows its forward pass.
    InTurn,
    /// All forward passes, then the backward passes in the same order.
    ForwardFirst,
    /// Each but the last is followed by a pass that is dropped.
    Dropping(Dropped),
    /// The last backward pass is the caller's own, where the layout collects from such a pass.
    Collected,
}

/// A pass that is dropped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dropped {
    Forward,
    /// With a backward pass of the caller's.
    Backward,
    /// With all micro-batches, itself one of them.
    MicroBatch,
}

/// The part of a run that is loaded.
#[derive(Debug, Clone, Copy)]
pub enum Load {
    Run,
    /// The weights alone, before the model is divided.
    Weights,
    /// Into a model with another layer more, or less.
    Matching,
}

/// A further run with which a trial is compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Second {
    /// Every rank gathers all gradients, and updates all parameters.
    Everything,
    /// Burn's optimizer on one rank, which computes the losses of all.
    Burn,
}

impl Second {
    /// Returns `true` if it has what a run has seen under a name.
    pub fn has(self, name: &str) -> bool {
        // It has no states of parameters that have never had a gradient.
        let is_of_states = [ABSENT, DIFFERENCES].contains(&name) || name.starts_with(STATE);
        self == Self::Everything || !is_of_states
    }
}

#[derive(Clone)]
pub struct Trial {
    /// The number of ranks with different data.
    pub data: usize,
    /// The number of ranks that share data, and have slices of one model.
    pub model: usize,
    pub half: Option<MasterWeights>,
    pub users: Option<Users>,
    pub shape: Shape,
    pub divisions: Vec<Division>,
    pub publish: Publish,
    pub max_norm: Option<f64>,
    /// `true` if the ranks compare what they have in common after every step.
    pub checks: bool,
    pub calls: Vec<Call>,
    pub second: Option<Second>,
}

impl Trial {
    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.data * self.model
    }

    /// The division after a number of loads.
    pub fn division(&self, loads: usize) -> &Division {
        &self.divisions[loads % self.divisions.len()]
    }

    /// The cuts after a number of loads, if ranks with different data have the slices.
    pub fn data_cuts(&self, loads: usize) -> Option<Cuts> {
        let division = self.division(loads);
        division.cuts_data(self).then(|| division.cuts(self).1)
    }

    /// Returns `true` if there is such a reference.
    pub fn has(&self, second: Second) -> bool {
        self.second == Some(second)
            && match second {
                Second::Everything => true,
                // It clips no norm of all gradients, and loses the state of a parameter that gets
                // another identity by a load. A mean of other numbers of ranks rounds, in the order
                // of the ranks' exchange, and has no slices of ranks with different data.
                Second::Burn => {
                    let has = |is: fn(&Call) -> bool| self.calls.iter().any(is);
                    self.max_norm.is_none()
                        && !self.divisions.iter().any(|division| division.cuts_data(self))
                        && self.data.is_power_of_two()
                        && !has(|call| matches!(call, Call::Pretrain))
                }
            }
    }
}

impl Debug for Trial {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let Self { data, model, half, users, shape, divisions, publish, max_norm, .. } = self;
        let Self { checks, calls, second, .. } = self;
        write!(f, "{data} x {model} ranks, {half:?}, {users:?}, {shape:?}, {divisions:?}, ")?;
        write!(f, "{publish:?}, ")?;
        write!(f, "{max_norm:?}, checks: {checks}, {calls:?}, {second:?}")
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let experts = prop_oneof![
        2 => Just(Experts::All),
        1 => Just(Experts::OfPass),
        1 => Just(Experts::OfRank),
    ];
    let layers = vec(0..KINDS, 1..5).prop_flat_map(|kinds| {
        let count = kinds.len();
        let frozen = proptest::option::weighted(0.3, 0..count);
        (Just(kinds), vec(0..count, 0..6), frozen)
    });
    let flags = (any::<[bool; 2]>(), proptest::bool::weighted(0.2));
    (layers, flags, experts).prop_map(|((kinds, uses, frozen), (has, skips), experts)| {
        let [has_head, has_evaluated] = has;
        Shape { kinds, uses, frozen, has_head, has_evaluated, experts, skips, is_cut: false }
    })
}

fn divisions() -> impl Strategy<Value = Division> {
    let keep = prop_oneof![Just(Keep::Weights), Just(Keep::Nothing)];
    let limit = prop_oneof![Just(Some(0.0)), Just(Some(0.0005)), Just(Some(64.0)), Just(None)];
    let limits = [limit.clone(), limit];
    let nodes = prop_oneof![2 => Just(1_usize), 2 => Just(2), 1 => Just(4)];
    let small = prop_oneof![Just(0_usize), Just(16), Just(64), Just(4096)];
    let cut = |dimensions| proptest::option::weighted(0.7, 0..dimensions);
    let cuts = (cut(2_usize), cut(2), cut(3), cut(2)).prop_map(<[_; 4]>::from);
    let cuts = (cuts, proptest::bool::weighted(0.25));
    let balancing = prop_oneof![Just(Balancing::Greedy), Just(Balancing::BlockCyclic)];
    let named = prop_oneof![Just(Named::Owned), Just(Named::Rows), Just(Named::Replicated)];
    let places = vec((0..8_usize, named), 0..3);
    let all = (any::<[bool; 4]>(), nodes, keep, limits, small, balancing, cuts, places);
    all.prop_map(|(flags, nodes, keep, limits_mb, small_elements, balancing, cuts, places)| {
        let [is_owned, in_rows, overlaps, allows_unused] = flags;
        let (cuts, cuts_data) = cuts;
        Division {
            is_owned,
            in_rows,
            overlaps,
            nodes,
            keep,
            limits_mb,
            small_elements,
            allows_unused,
            balancing,
            cuts,
            cuts_data,
            places,
        }
    })
}

fn calls() -> impl Strategy<Value = Call> {
    let load = prop_oneof![Just(Load::Run), Just(Load::Weights), Just(Load::Matching)];
    let spoiled = proptest::option::weighted(0.1, 0..RANKS);
    let dropped =
        prop_oneof![Just(Dropped::Forward), Just(Dropped::Backward), Just(Dropped::MicroBatch)];
    let way = prop_oneof![
        3 => Just(Way::InTurn),
        1 => Just(Way::ForwardFirst),
        1 => prop_oneof![Just(Dropped::Forward), Just(Dropped::Backward)].prop_map(Way::Dropping),
        1 => Just(Way::Collected),
    ];
    prop_oneof![
        8 => (1..4_usize, spoiled, way)
            .prop_map(|(batches, spoiled, way)| Call::Train { batches, spoiled, way }),
        1 => (0..3_usize, 1..3_usize).prop_map(|(offset, batches)| Call::Join { offset, batches }),
        2 => Just(Call::Evaluate),
        2 => dropped.prop_map(Call::Drop),
        2 => any::<bool>().prop_map(|is_read| Call::Teach { is_read }),
        2 => Just(Call::Average),
        2 => load.prop_map(Call::Reload),
        1 => Just(Call::Pretrain),
        2 => (1..5_u8).prop_map(|rate| Call::Rate(0.01 * f64::from(rate))),
        2 => (0..4_usize).prop_map(Call::Freeze),
    ]
}

/// The numbers of ranks with different data, and of ranks that share it.
fn meshes() -> impl Strategy<Value = (usize, usize)> {
    let model = prop_oneof![4 => Just(1_usize), 2 => Just(2), 1 => Just(4)];
    model.prop_flat_map(|model| (1..=RANKS / model, Just(model)))
}

pub fn trials() -> impl Strategy<Value = Trial> {
    let publish = prop_oneof![Just(Publish::Now), Just(Publish::AtFirstUse)];
    let max_norm = proptest::option::weighted(0.3, Just(0.05));
    let masters = prop_oneof![Just(MasterWeights::Full), Just(MasterWeights::Mantissa)];
    let half = proptest::option::weighted(0.25, masters);
    let second = prop_oneof![Just(Second::Everything), Just(Second::Burn)];
    let second = proptest::option::weighted(0.6, second);
    let other = prop_oneof![Just(Other::Adafactor), Just(Other::Lamb), Just(Other::Soap)];
    let users =
        (other, any::<bool>()).prop_map(|(optimizer, has_layers)| Users { optimizer, has_layers });
    let users = proptest::option::weighted(0.3, users);
    let settings = (publish, max_norm, half, users, proptest::bool::weighted(0.3), second);
    (meshes(), shapes(), vec(divisions(), 1..3), settings, vec(calls(), 1..14)).prop_map(
        |((data, model), mut shape, divisions, settings, calls)| {
            let (publish, max_norm, half, users, checks, second) = settings;
            // Burn reads their states in the default type alone.
            let users = users.filter(|_| loads_states());
            shape.limit_uses(calls.iter().any(|call| matches!(call, Call::Teach { .. })));
            let mut trial = Trial {
                data,
                model,
                half,
                users,
                shape,
                divisions,
                publish,
                max_norm,
                checks,
                calls,
                second,
            };
            let cuts_data = trial.divisions.iter().any(|division| division.cuts_data(&trial));
            trial.shape.is_cut = model > 1 || cuts_data;
            trial
        },
    )
}
