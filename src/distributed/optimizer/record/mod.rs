//! The states of all ranks as one, as of the single-device optimizer: a record or a checkpoint
//! does not depend on the ranks, the plan or the engine.
//!
//! A save gathers the states bucket by bucket on rank 0, or in parts leaves them where they are:
//! every rank then writes what it has. No rank holds more than a bucket on the host. A load reads
//! on every rank only the tensors that its shards need, after the ranks have compared the files.

mod contents;
mod load;
mod parameters;
mod save;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use burn::module::Module;
use burn::optim::OptimizerRecord;
use burn::tensor::TensorData;
use serde::{Serialize, de::DeserializeOwned};

use super::DistModuleOptimizer;
use super::custom_states::{OwnStates, Receivers};
use crate::checkpoint::{self, Archive, Checkpointed, Contents, Planned, Saver, States};
use crate::distributed::busy::Busy;
use crate::error::Result;
use crate::load_difference::Difference;
use crate::update::BEGIN_ANEW;
use contents::{Counter, recorded};
use load::compare;
use save::collect;

impl DistModuleOptimizer {
    /// Returns the state of all ranks on all ranks, as a
    /// [`ModuleOptimizer`](burn::optim::ModuleOptimizer) of [`MuonConfig`](crate::MuonConfig)
    /// records it. All ranks make this call.
    ///
    /// Every rank then has the whole state in host memory, and briefly twice. To write a
    /// checkpoint, use [`save`](Self::save), which does not collect the whole state.
    ///
    /// # Errors
    ///
    /// As every collective; [`Error::Parameter`](crate::Error::Parameter) if two parameters share
    /// one identity; [`Error::Usage`](crate::Error::Usage) for a state beyond the limits of Burn's
    /// records, such as 100,000 tensors, which [`save`](Self::save) does not have.
    pub fn to_record(&self) -> Result<OptimizerRecord> {
        Ok(self.record(true)?.expect("every rank keeps the record"))
    }

    /// [`to_record`](Self::to_record) on rank 0. The others return nothing, and hold nothing on the
    /// host.
    ///
    /// # Errors
    ///
    /// As [`to_record`](Self::to_record).
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(in crate::distributed) fn gather_record(&self) -> Result<Option<OptimizerRecord>> {
        self.record(false)
    }

    /// Returns the optimizer with the state of a record, which any number of ranks or a single
    /// device made. The state of a parameter that is not in the record starts at zero, and a
    /// warning names it. All ranks make this call, with equal records.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors:
    /// [`Error::CheckpointsDiffer`](crate::Error::CheckpointsDiffer) if the records differ;
    /// [`Error::OtherRun`](crate::Error::OtherRun) with all differences, if recorded states do not
    /// fit their parameters, or are of parameters that the model does not have; as every
    /// collective.
    pub fn load_record(self, record: OptimizerRecord) -> Result<Self> {
        self.load_states(&States::new(Archive::from_record(record)))
    }

    /// [`load_record`](Self::load_record) of a state that ranks of one process may share.
    pub(in crate::distributed) fn load_states(mut self, states: &States) -> Result<Self> {
        compare(states.archive(), &self.divided.world)?;
        let differences = self.take_over(states, BTreeSet::new())?;
        let saved = "the record of the optimizer".to_owned();
        checkpoint::ensure_complete(saved, differences, BEGIN_ANEW)?;
        Ok(self)
    }

    /// Saves model, optimizer and progress of the run as [`checkpoint::save`] does, in the same
    /// format for any number of ranks. All ranks make this call; rank 0 writes.
    ///
    /// Rank 0 collects and writes the state bucket by bucket, and the model parameter by parameter.
    /// The other ranks wait until the file is complete, for up to an hour:
    /// [`Communicator::set_busy_limit`](crate::comm::Communicator::set_busy_limit).
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors:
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if the file can't be written, in which case
    /// a previous file at the path is unchanged; [`Error::Mismatch`](crate::Error::Mismatch) if the
    /// ranks have models with other values of owned parameters, such as an average that one of them
    /// has changed alone; those of every collective.
    pub fn save<M: Module, T: Serialize>(
        &self,
        path: impl AsRef<Path>,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        checkpoint::save(path, model, self, progress)
    }

    /// Loads a run that [`save`](Self::save) or [`checkpoint::save`] saved, on any number of ranks.
    /// All ranks make this call. Each reads its part of the file, so every host has to have the
    /// file.
    ///
    /// # Errors
    ///
    /// On all ranks, if any rank has one of these errors: those of [`checkpoint::load`] and of
    /// [`load_record`](Self::load_record);
    /// [`Error::CheckpointsDiffer`](crate::Error::CheckpointsDiffer) if the files that the ranks
    /// open are not copies of one file.
    pub fn load<M: Module, T: DeserializeOwned>(
        self,
        path: impl AsRef<Path>,
        model: M,
    ) -> Result<(M, Self, T)> {
        checkpoint::load(path, model, self)
    }

    /// The state of all ranks on all of them, or on rank 0 only.
    fn record(&self, everywhere: bool) -> Result<Option<OptimizerRecord>> {
        let mut states = Vec::new();
        let (divided, shards) = (&self.divided, &self.shards);
        let receivers = if everywhere { Receivers::All } else { Receivers::Main };
        let own = self.announced(OwnStates::gather(divided, shards, receivers))?;
        let counters = divided.recorded_counters(&self.accounts.counters);
        let contents = self.contents(&counters, &own, &divided.ids(), receivers);
        let collected = collect(divided, shards, &own, receivers, |_, read| states.extend(read));
        self.announced(collected)?;
        // Collectives may return results that the device has not received yet.
        self.announced(divided.world.comm().synchronize())?;
        if !everywhere && divided.world.rank() != 0 {
            return Ok(None);
        }
        let _busy = Busy::new(divided.world.communicator());
        // Only now: an error of this rank must not leave the others in the collectives above.
        let contents = contents?;
        states.extend(counters.into_iter().map(|counter| TensorData::from([counter.value])));
        recorded(contents, states).map(Some)
    }

    /// A record with the names, types and ranks of this one's state, in tensors of one element
    /// each.
    #[cfg_attr(not(feature = "train"), expect(dead_code, reason = "for learners"))]
    pub(in crate::distributed) fn outline(&self) -> Result<OptimizerRecord> {
        let counters = self.divided.recorded_counters(&self.accounts.counters);
        let own = OwnStates::local(&self.shards);
        let contents = self.contents(&counters, &own, &self.divided.ids(), Receivers::All)?;
        let one = |planned: &Planned| {
            TensorData::from_bytes_vec(
                vec![0; planned.dtype.size()],
                vec![1; planned.shape.len()],
                planned.dtype,
            )
        };
        let tensors = contents.tensors.iter().map(one).collect();
        recorded(contents, tensors)
    }

    /// The names, types and shapes of the state; see [`DividedModel::contents`].
    ///
    /// [`DividedModel::contents`]: super::divided_model::DividedModel::contents
    fn contents(
        &self,
        counters: &[Counter],
        own: &OwnStates,
        ids: &HashMap<String, u64>,
        receivers: Receivers,
    ) -> Result<Contents> {
        let loss_scale = self.scaling.loss_scale.as_ref();
        self.divided.contents((counters, own), ids, loss_scale, receivers)
    }
}

impl Checkpointed for DistModuleOptimizer {
    fn save_run<M: Module, T: Serialize>(
        &self,
        saver: &mut Saver,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        self.finish_publication()?;
        let world = &self.divided.world;
        let prepared = {
            // A rank may wait for its file of an earlier save.
            let _busy = Busy::new(world.communicator());
            saver.prepare(path)
        };
        let parts = world.agree(prepared.and_then(|()| self.divided.divided_values(model)))?;
        self.divided.passes.ensure_same_values(model)?;
        // A collective that fails ends the world: only the file is left to agree on.
        let written = self.announced(self.write((saver, path), model, parts, progress))?;
        let agreed = world.agree(written);
        if agreed.is_err() {
            let _busy = Busy::new(world.communicator());
            // Rank 0 is still waiting for the part that a rank could not write.
            saver.abandon();
        }
        agreed
    }

    fn load_run<M: Module, T: DeserializeOwned>(
        mut self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T, Vec<Difference>)> {
        let opened = {
            let _busy = Busy::new(self.divided.world.communicator());
            let parts = self.divided.divided_values(&model);
            parts.and_then(|_| checkpoint::open(path))
        };
        // Gradients of the values that are replaced.
        self.divided.passes.discard()?;
        self.divided.passes.forget_parts();
        // After `discard`, whose calls all ranks make, also one that can't open its file.
        let archive = self.divided.world.agree(opened)?;
        compare(&archive, &self.divided.world)?;
        let read = {
            let _busy = Busy::new(self.divided.world.communicator());
            let progress = archive.progress();
            progress.and_then(|progress| {
                Ok((checkpoint::load_model(&archive, model, &self.divided)?, progress))
            })
        };
        let ((model, mut differences), progress) = self.divided.world.agree(read)?;
        let unused = differences.iter().map(|difference| difference.parameter.clone()).collect();
        differences.extend(self.take_over(&States::new(archive), unused)?);
        Ok((model, self, progress, differences))
    }
}
