//! The backward passes of a layout: gradients are reduced while they go on.

use std::sync::{MutexGuard, PoisonError};

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::identity::Identities;
use super::{Layout, Place, Sharded};
use crate::error::{Error, Result};
use crate::gradient_buffer::GradientBuffer;

impl Layout {
    /// Runs the backward pass of a loss, and returns the gradients for a step: this rank's shards
    /// of the means of parameters whose gradients the pass reduces, and this rank's gradients of
    /// all others. All ranks make this call.
    ///
    /// # Errors
    ///
    /// A failure of the forward or of the backward pass; [`Error::Mismatch`] if the ranks have not
    /// used the same parameters in the same order; [`Error::Usage`] for a loss without a gradient;
    /// as every collective.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: &Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        self.ensure_tracked(loss)?;
        self.begin_backward(model)?;
        // Divided parameters take their gradients out during the pass, so these are the rest.
        let gradients = self.in_backward(|| GradientsParams::from_grads(loss.backward(), model));
        self.end_backward(model, gradients)
    }

    /// [`backward`](Self::backward) of a rank that has run out of batches, while others have some:
    /// it takes part in their pass, and its own gradients count as zero. The loss may be of any
    /// batch; see [`World::join`](crate::comm::World::join). A parameter that only such ranks use,
    /// where that is [allowed](Self::allow_unused), has no gradient.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::Usage`] if parameters are cut along an axis of
    /// ranks with different data, as experts may be: gradients of other ranks' items arrive in this
    /// rank's pass, and its own leave for other ranks. Multiply the loss by zero instead.
    pub fn drain<M: Module, const D: usize>(
        &self,
        loss: &Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        // Only ranks without a batch make this call: the others wait for them in their passes.
        self.ensure_drains().inspect_err(|error| self.world().comm().fail(&error.to_string()))?;
        if let Some(Sharded { passes, .. }) = self.sharded() {
            passes.drained(|| -> Result<()> {
                self.begin_backward(model)?;
                // For the calls that the closures of the pass make; the gradients count as zero.
                drop(loss.backward());
                Ok(())
            })?;
        }
        self.end_backward(model, GradientsParams::new())
    }

    /// Fails for a loss that no trained parameter has made. Other ranks wait for this one.
    fn ensure_tracked<const D: usize>(&self, loss: &Tensor<D>) -> Result<()> {
        if loss.is_tracked() {
            return Ok(());
        }
        let error = Error::usage(
            "the loss has no gradient",
            "a loss of a model with autodiff that has a trained parameter",
            "one that no trained parameter has made",
            "make the model on a device with autodiff, and train a part of it; an adapter that \
             `apply_lora` gives a divided model is lost: write it as layers next to a frozen one",
        );
        self.world().comm().fail(&error.to_string());
        Err(error)
    }

    /// Fails if a rank's pass has gradients of other ranks' items.
    fn ensure_drains(&self) -> Result<()> {
        let mut axes = self.places.iter().filter_map(Place::axis);
        let is_data = |axis: &&str| {
            self.mesh.axis(axis).is_some_and(|axis| axis.size() > 1 && !axis.is_model())
        };
        let Some(axis) = axes.find(is_data) else { return Ok(()) };
        Err(Error::usage(
            "`drain` leaves out the gradients of other ranks' items",
            "no parameters cut along an axis of data",
            format!("some that are cut along `{axis}`"),
            "call `backward` with the loss times zero, of a batch whose loss is finite",
        ))
    }

    fn begin_backward<M: Module>(&self, model: &M) -> Result<()> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(()) };
        // Only the message about unused parameters needs a walk through the model.
        let model = self.allows_unused.then(|| self.identities(model));
        passes.begin_backward(model.as_ref())
    }

    /// Ends the backward pass of a step: the gradients of earlier micro-batches are added.
    fn end_backward<M: Module>(
        &self,
        model: &M,
        mut gradients: GradientsParams,
    ) -> Result<GradientsParams> {
        // Of parameters that the step reduces: the passes add up their own.
        let mut buffer = self.micro_batches();
        if buffer.count() > 0 {
            buffer.add_of_one_model(model, gradients)?;
            gradients = buffer.take_sum();
        }
        // Not while the pass waits for other ranks.
        drop(buffer);
        self.finish(model, &mut gradients)?;
        Ok(gradients)
    }

    /// Runs the backward pass of a micro-batch, to whose gradients the next call of
    /// [`backward`](Self::backward) adds its own. Nothing is reduced until then, and every rank
    /// holds its whole gradients. All ranks make this call.
    ///
    /// The sums are float32 for parameters in half precision, which
    /// [`GradDtype::Float32`](crate::distributed::GradDtype::Float32) has a step accept.
    ///
    /// To hold shards instead, call `backward` for every micro-batch, and add up what it returns by
    /// [`GradientBuffer`](crate::GradientBuffer): the ranks then reduce once for each of them.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::Usage`] if the layout, or a clone of it, has
    /// micro-batches of another model.
    pub fn accumulate<M: Module, const D: usize>(&self, loss: &Tensor<D>, model: &M) -> Result<()> {
        self.ensure_tracked(loss)?;
        let backward = || GradientsParams::from_grads(loss.backward(), model);
        let gradients = self.in_micro_batch(model, backward)?;
        self.micro_batches().add_of_one_model(model, gradients)
    }

    /// Runs the backward pass of a step, which also reduces the gradients of micro-batches.
    pub(in crate::distributed) fn in_backward<T>(&self, backward: impl FnOnce() -> T) -> T {
        match self.sharded() {
            Some(Sharded { passes, .. }) => passes.in_backward(backward),
            None => backward(),
        }
    }

    /// Runs a backward pass of a model in which nothing is reduced.
    pub(in crate::distributed) fn in_micro_batch<M: Module, T>(
        &self,
        model: &M,
        backward: impl FnOnce() -> T,
    ) -> Result<T> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(backward()) };
        self.begin_backward(model)?;
        let outcome = passes.in_micro_batch(backward);
        passes.keep_micro_batch(&self.identities(model))?;
        Ok(outcome)
    }

    pub(super) fn identities<M: Module>(&self, model: &M) -> Identities {
        Identities::of_model(model, self.world().rank())
    }

    /// Adds this rank's shards of the means of a model's parameters whose gradients the pass has
    /// reduced, after a backward pass of the caller's. All ranks make this call.
    ///
    /// The ranks do not know yet which of them [leave parameters out](Self::allow_unused): with
    /// [`Keep::Nothing`](super::Keep::Nothing), such a pass is an error, and needs `backward`.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::Usage`] after
    /// [`accumulate`](Self::accumulate), whose gradients `backward` returns.
    pub fn collect<M: Module>(&self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        match self.micro_batches().count() {
            0 => self.finish(model, gradients),
            earlier => Err(Error::usage(
                "`Layout::collect` does not add earlier micro-batches",
                "no call of `Layout::accumulate` before it",
                format!("{earlier} calls"),
                "end with `Layout::backward`, or add up gradients by `GradientBuffer`",
            )),
        }
    }

    /// Ends a backward pass.
    fn finish<M: Module>(&self, model: &M, gradients: &mut GradientsParams) -> Result<()> {
        let Some(Sharded { passes, .. }) = self.sharded() else { return Ok(()) };
        let means = passes.finish(&self.identities(model))?;
        means.into_iter().for_each(|mean| mean.register(gradients));
        Ok(())
    }

    /// Forgets the forward passes that no backward pass has followed, and the gradients that a
    /// backward pass of the caller's has left. Micro-batches of [`accumulate`](Self::accumulate)
    /// stay. All ranks make this call.
    ///
    /// A forward pass of a model with autodiff counts as one that is trained. Without this call,
    /// the next backward pass waits for its gradients, and reduces the gradients of the same
    /// parameters at its end only. Until then, a rank keeps up to
    /// [`with_ahead_mb`](Self::with_ahead_mb) of parameters that the pass has gathered.
    /// `model.valid()` needs no call.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward); [`Error::Usage`] if a pass of `backward` that did not end
    /// has taken micro-batches with it.
    pub fn discard_pass(&self) -> Result<()> {
        self.passes().discard_pass()
    }

    /// [`discard_pass`](Self::discard_pass), and also forgets the gradients of micro-batches that
    /// are not to be trained on. All ranks make this call.
    ///
    /// # Errors
    ///
    /// As [`backward`](Self::backward).
    pub fn discard(&self) -> Result<()> {
        self.passes().discard()
    }

    fn micro_batches(&self) -> MutexGuard<'_, GradientBuffer> {
        self.micro_batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
