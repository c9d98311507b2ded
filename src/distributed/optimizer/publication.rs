//! New parameters that are on their way when a step returns.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::module::{Param, ParamMapper};
use burn::tensor::{Device, Tensor};

use crate::comm::Pending;
use crate::distributed::exclusive::{Access, Exclusive, Taken};
use crate::distributed::plan::{Bucket, InBuffer};
use crate::distributed::trainable::ModelParameter;
use crate::error::{Error, Result};
use crate::flat;
use crate::parameters::in_place_if_trained;

/// The buckets of a step that are being gathered. The first use of a parameter waits for its
/// bucket, and for those before it.
#[derive(Default)]
pub struct Publication {
    /// Taken while a use waits for other ranks: the waits of a rank have one order.
    arrivals: Exclusive<Arrivals>,
    /// For reports, which do not wait.
    arriving: Mutex<Arriving>,
}

#[derive(Default)]
struct Arrivals {
    pending: VecDeque<(Bucket, Pending)>,
    /// The parameters that have arrived, by their index.
    arrived: HashMap<usize, Tensor<1>>,
    /// The parameters that the step has not changed. No use waits for them.
    left_out: HashSet<usize>,
    failure: Option<Error>,
}

/// Bytes of parameters that have not arrived.
#[derive(Clone, Copy, Default)]
pub struct Arriving {
    pub parameters: usize,
    /// The bytes of their buffers, for sending and receiving.
    pub buffers: usize,
}

impl Publication {
    /// The bytes that are on their way.
    pub fn arriving(&self) -> Arriving {
        *self.lock_arriving()
    }

    fn lock_arriving(&self) -> MutexGuard<'_, Arriving> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A second thread may wait for it as well: the gathering has started on all ranks.
    fn state(&self) -> Taken<'_, Arrivals> {
        self.arrivals.take(Access::Look, || {})
    }

    /// Adds a bucket, whose gathering has started after the buckets before it.
    pub fn add(&self, bucket: &Bucket, pending: Pending) {
        let more = Arriving::of(bucket, &pending);
        self.state().pending.push_back((bucket.clone(), pending));
        let mut arriving = self.lock_arriving();
        arriving.parameters += more.parameters;
        arriving.buffers += more.buffers;
    }

    /// Adds a parameter that this rank has updated itself: a part of one of the model whose other
    /// parts are on their way.
    pub fn keep(&self, index: usize, value: Tensor<1>) {
        self.state().arrived.insert(index, value);
    }

    /// Drops parameters when they arrive: the model has kept their values.
    pub fn leave_out(&self, parameters: Range<usize>) {
        let mut state = self.state();
        parameters.clone().for_each(|index| drop(state.arrived.remove(&index)));
        state.left_out.extend(parameters);
    }

    /// Waits for the oldest bucket. Returns `false` if there is none, or after a failure.
    fn land(&self, state: &mut Arrivals) -> bool {
        let Some((bucket, pending)) = state.pending.pop_front() else { return false };
        let landed = Arriving::of(&bucket, &pending);
        let outcome = pending.wait();
        let mut arriving = self.lock_arriving();
        match outcome {
            Ok(buffer) => {
                arriving.parameters -= landed.parameters;
                arriving.buffers -= landed.buffers;
                let Arrivals { arrived, left_out, .. } = state;
                let awaited = values(&bucket, &buffer);
                arrived.extend(awaited.filter(|(index, _)| !left_out.contains(index)));
                true
            }
            Err(error) => {
                // The first failure names the cause; later ones follow from it.
                state.failure.get_or_insert(error);
                state.pending.clear();
                *arriving = Arriving::default();
                false
            }
        }
    }

    /// Waits for all buckets.
    ///
    /// # Errors
    ///
    /// The first failure of a bucket.
    pub fn finish(&self) -> Result<()> {
        let mut state = self.state();
        while self.land(&mut state) {}
        // Kept, and not taken: every later call has to fail as well.
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// The value of a model's parameter, flat: NaN after a failure, since a use can't return an
    /// error.
    fn take(&self, parameter: &ModelParameter, device: &Device) -> Tensor<1> {
        let mut state = self.state();
        let is_empty: Vec<bool> =
            parameter.held.batches().map(|batch| batch.contains(&0)).collect();
        let mut block = |index: usize| loop {
            if is_empty[index - parameter.trainable.start] {
                // This rank's slice has nothing of the block.
                return Some(flat::empty(parameter.dtype, device));
            }
            // Taken out, so that the parameter has the only reference.
            if let Some(value) = state.arrived.remove(&index) {
                return Some(value);
            }
            if !self.land(&mut state) {
                assert!(state.failure.is_some(), "no bucket has block {index} of a parameter");
                return None;
            }
        };
        let blocks: Option<Vec<_>> = parameter.trainable.clone().map(&mut block).collect();
        let nan = || {
            let elements: usize = parameter.shape.iter().product();
            Tensor::full([elements], f32::NAN, (device, parameter.dtype))
        };
        blocks.map_or_else(nan, |blocks| parameter.held.join(blocks))
    }
}

impl Arriving {
    fn of(bucket: &Bucket, pending: &Pending) -> Self {
        let segments = bucket.by_parameter().into_values().flatten();
        let elements: usize = segments.map(|segment| segment.len).sum();
        Self { parameters: elements * bucket.dtype.size(), buffers: pending.bytes() }
    }
}

impl Drop for Arrivals {
    /// Waits for all that was not used, since the other ranks send it.
    fn drop(&mut self) {
        // After a failure there is nothing to wait for.
        _ = self.pending.drain(..).try_for_each(|(_, pending)| pending.wait().map(drop));
    }
}

/// The parameters of a bucket, by their index, from its gathered buffer.
pub fn values<'a>(
    bucket: &'a Bucket,
    buffer: &'a Tensor<1>,
) -> impl Iterator<Item = (usize, Tensor<1>)> + 'a {
    bucket.by_parameter().into_iter().map(|(index, segments)| {
        let pieces = segments
            .iter()
            .map(|InBuffer { start, len, .. }| flat::slice(buffer, *start..start + len));
        (index, flat::concat(pieces.collect(), bucket.dtype, &buffer.device()))
    })
}

/// The parameter with a value that is waited for at its first use. Its mappers stay.
pub fn at_first_use<const D: usize>(
    param: Param<Tensor<D>>,
    parameter: ModelParameter,
    publication: Arc<Publication>,
) -> Param<Tensor<D>> {
    let (device, id) = (param.lazy_device(), param.id);
    let (_, placeholder, mapper) = param.consume();
    // From the second step on, these are those below, which must not be wrapped again.
    let mapper = parameter.mapper.get_or_init(|| Box::new(mapper));
    // Stored without its dimensions, since parameters of all of them share one type.
    let mapper = mapper.downcast_ref::<ParamMapper<Tensor<D>>>();
    let mapper = mapper.expect("the parameter had these dimensions before").clone();
    let shape = parameter.shape.as_slice().try_into();
    let shape: [usize; D] = shape.expect("the parameter was detached with this shape");
    let is_trained = placeholder.is_require_grad();
    let take = move |device: &Device, is_trained: bool| {
        let value = publication.take(&parameter, &device.clone().inner());
        // A map may have moved the parameter to another device since the step.
        let value = value.to_device(&device.clone().inner());
        // It may have been frozen or unfrozen since the step.
        in_place_if_trained(&placeholder, value.reshape(shape), is_trained)
    };
    // Of a parameter that is not initialised, Burn expects the shape that is stored in files.
    let one = Tensor::<D>::zeros([1; D], &device.clone().inner()).expand(shape);
    let stored = mapper.on_save(one).shape();
    let (load, save) = (mapper.clone(), mapper);
    Param::uninitialized(id, take, device, is_trained, stored)
        .load_mapper(move |tensor| load.on_load(tensor))
        .save_mapper(move |tensor| save.on_save(tensor))
}
