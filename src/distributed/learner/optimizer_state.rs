//! The state of a learner's optimizer, which a learner gives to checkpointers only.

use std::sync::mpsc;

use burn::optim::OptimizerRecord;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction,
    CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, LearningCheckpointer};

/// Returns the state: this saves with a checkpointer that sends the record back.
pub fn state<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> OptimizerRecord {
    let (sender, states) = mpsc::channel();
    let mut checkpointer = LearningCheckpointer::new(
        AsyncCheckpointer::new(SendToChannel(mpsc::channel().0)),
        AsyncCheckpointer::new(SendToChannel(sender)),
        AsyncCheckpointer::new(SendToChannel(mpsc::channel().0)),
        Box::new(SaveAlways),
    );
    checkpointer.checkpoint(learner, 0, store);
    states.recv().expect("the checkpointer sends the record of the optimizer")
}

/// A checkpointer that sends the records to a channel.
struct SendToChannel<R>(mpsc::Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for SendToChannel<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        // The records of the model and of the scheduler have no receiver, which is not an error.
        self.0.send(record).or(Ok(()))
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("this checkpointer keeps no record".into()))
    }
}

/// A strategy that saves at every call.
struct SaveAlways;

impl CheckpointingStrategy for SaveAlways {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
