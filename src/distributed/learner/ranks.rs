//! The ranks of a learner's training in this process: their devices, inputs and failures.

use std::fmt;
use std::sync::Mutex;

use burn::tensor::Device;
use burn::train::train::WorkerFailure;
use burn::train::{Learner, LearnerModel, TrainLoader, ValidLoader};

use super::training_loop::Loaders;
use crate::comm::World;
use crate::error::Error;
use crate::parameters;

/// The ranks of a training.
#[derive(Clone, Debug)]
pub enum Ranks {
    /// One thread per device.
    Threads(Vec<Device>),
    /// This process's rank, of a world of processes.
    Process(World),
}

impl Ranks {
    /// The devices of this process's ranks, with autodiff.
    pub fn devices(&self) -> Vec<Device> {
        let with_autodiff = |device: &Device| match device.is_autodiff() {
            true => device.clone(),
            false => device.clone().autodiff(),
        };
        match self {
            Self::Threads(devices) => devices.iter().map(with_autodiff).collect(),
            Self::Process(world) => vec![with_autodiff(world.device())],
        }
    }

    /// The first of this process's ranks.
    pub fn first(&self) -> usize {
        match self {
            Self::Threads(_) => 0,
            Self::Process(world) => world.rank(),
        }
    }

    /// The number of all ranks.
    pub fn count(&self) -> usize {
        match self {
            Self::Threads(devices) => devices.len(),
            Self::Process(world) => world.size(),
        }
    }
}

/// The items that every rank trains on. `World::threads_within` rejects an empty list of devices
/// later.
pub fn items_per_rank<M: LearnerModel>(train: &TrainLoader<M>, ranks: usize) -> usize {
    train.num_items() / ranks.max(1)
}

/// The inputs of one rank.
pub struct RankInputs<M: LearnerModel> {
    pub learner: Learner<M>,
    pub model: M,
    pub loaders: Loaders<M>,
}

impl<M: LearnerModel> RankInputs<M> {
    /// The inputs of this process's ranks. They can't be shared between threads: they are made
    /// before the ranks, and each rank takes one element.
    pub fn of_ranks(
        learner: &Learner<M>,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        ranks: &Ranks,
    ) -> Vec<Mutex<Option<Self>>> {
        let (size, items, model) =
            (ranks.count(), items_per_rank::<M>(train, ranks.count()), learner.model());
        let boundary = |rank: usize| rank * valid.num_items() / size;
        let inputs = (ranks.first()..).zip(ranks.devices()).map(|(rank, device)| {
            let validated = match ranks {
                Ranks::Process(_) => valid.clone(),
                Ranks::Threads(_) => valid.slice(boundary(rank), boundary(rank + 1)),
            };
            let spare = valid.slice(0, valid.num_items().min(1));
            let inner = device.clone().inner();
            Mutex::new(Some(Self {
                learner: learner.clone(),
                model: parameters::fork(&model, &device),
                loaders: Loaders {
                    train: train.slice(rank * items, (rank + 1) * items).to_device(&device),
                    valid: validated.to_device(&inner),
                    spare: spare.to_device(&inner),
                },
            }))
        });
        inputs.collect()
    }
}

pub fn take<T>(slot: &Mutex<Option<T>>) -> T {
    slot.lock().expect("no holder of the lock panics").take().expect("each rank takes once")
}

/// An error or a panic of a rank.
pub struct RankFailure(pub WorkerFailure);

impl From<Error> for RankFailure {
    fn from(error: Error) -> Self {
        Self(WorkerFailure { device_id: 0, message: error.to_string() })
    }
}

impl fmt::Display for RankFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}
