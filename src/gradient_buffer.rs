//! Gradients of several micro-batches, added up in float32.

use std::collections::HashSet;
use std::fmt;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use crate::checks::ensure_gradient_matches;
use crate::error::{Error, Result};
use crate::flat::{self, bytes};
use crate::parameters::{self, Field, Visit};
use crate::update::{ONLY_RANK, is_half};

/// The gradients of a step, the sums over its micro-batches: float32 for parameters
/// in half precision, and the parameter's type for all others.
///
/// Sums of many small gradients in half precision lose digits, and sums of scaled gradients in
/// float16 overflow. On several ranks, set
/// [`GradDtype::Float32`](crate::distributed::GradDtype::Float32), so that the sums are also
/// reduced in float32.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use distmuon::{GradientBuffer, MuonConfig};
///
/// let device = Device::default().autodiff();
/// let mut model = LinearConfig::new(8, 8).init(&device);
/// let mut optim = MuonConfig::new().init_batched(&model)?;
/// let mut buffer = GradientBuffer::new();
/// for _step in 0..2 {
///     for _micro_batch in 0..4 {
///         let loss = model.forward(Tensor::<2>::ones([4, 8], &device)).square().mean();
///         buffer.add(&model, GradientsParams::from_grads(loss.backward(), &model))?;
///     }
///     let grads = buffer.take_mean(&model);
///     model = optim.step(1e-3, model, grads)?;
/// }
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Default)]
pub struct GradientBuffer {
    sums: GradientsParams,
    /// The number of micro-batches.
    count: usize,
    bytes: usize,
}

impl fmt::Debug for GradientBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gradients of {} micro-batches, {} bytes", self.count, self.bytes)
    }
}

impl GradientBuffer {
    /// Makes a buffer without gradients.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the gradients of a micro-batch. Parameters that have no gradient in it count as zero.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a gradient that is on another device than its parameter, or has
    /// another shape. Where a [`Layout`](crate::distributed::Layout) reduces the gradient in the
    /// backward pass, the shape has to be as in the first micro-batch. [`Error::Usage`] for
    /// gradients of parameters that the model does not have. The buffer then has a part of the
    /// micro-batch: take it out and drop it.
    pub fn add<M: Module>(&mut self, model: &M, gradients: GradientsParams) -> Result<()> {
        let found = parameters::of(model).into_iter();
        let reduced = found
            .filter(|found| found.placement.reduces_in_backward())
            .map(|found| found.id)
            .collect();
        let mut add = Add { buffer: self, gradients, reduced, error: None };
        parameters::visit(model, &mut add);
        if let Some(error) = add.error {
            return Err(error);
        }
        let left_over = add.gradients.len();
        if left_over > 0 {
            return Err(Error::usage(
                "the gradients are of another model",
                "gradients of this model's parameters",
                format!("{left_over} of parameters that it does not have"),
                "take the gradients from the model that you add them for",
            ));
        }
        self.count += 1;
        Ok(())
    }

    /// [`add`](Self::add), which also fails if the buffer has gradients of another model.
    pub(crate) fn add_of_one_model<M: Module>(
        &mut self,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<()> {
        self.add(model, gradients)?;
        let mut own = Own { sums: &self.sums, found: HashSet::new() };
        parameters::visit(model, &mut own);
        let others = self.sums.len() - own.found.len();
        if others > 0 {
            return Err(Error::usage(
                "the micro-batches are of another model",
                "gradients of this model's parameters",
                format!("{others} of parameters that it does not have"),
                "make a layout for each model, or end the other model's step before",
            ));
        }
        Ok(())
    }

    /// Returns the number of micro-batches since the gradients were last taken.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes of all gradients.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the sum over all micro-batches out. A step frees it bucket by bucket.
    pub fn take_sum(&mut self) -> GradientsParams {
        std::mem::take(self).sums
    }

    /// Takes the mean over all micro-batches out, where `model` has the parameters. A step frees it
    /// bucket by bucket.
    pub fn take_mean<M: Module>(&mut self, model: &M) -> GradientsParams {
        let count = self.count.max(1) as f64;
        let mut mean = Mean { sums: self.take_sum(), count };
        parameters::visit(model, &mut mean);
        mean.sums
    }
}

struct Add<'a> {
    buffer: &'a mut GradientBuffer,
    gradients: GradientsParams,
    /// The parameters of whose gradients every rank has a shard.
    reduced: HashSet<ParamId>,
    error: Option<Error>,
}

impl Visit for Add<'_> {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        let value = param.val();
        if !value.is_require_grad() {
            // A frozen clone has the identity of the parameter whose gradient this is.
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let value = value.inner();
        let sum = self.buffer.sums.remove::<D>(param.id);
        // Only the layout knows the shape of a shard, so the first micro-batch decides it.
        let like = match self.reduced.contains(&param.id) {
            true => sum.as_ref().unwrap_or(&gradient),
            false => &value,
        };
        if let Err(error) =
            ensure_gradient_matches(&parameters::path(fields), ONLY_RANK, like, &gradient)
        {
            self.error.get_or_insert(error);
            return;
        }
        let wide = if is_half(value.dtype()) { DType::F32 } else { value.dtype() };
        let gradient = gradient.cast(wide);
        // Moved out above, so that the sum is the only reference and is added to in place.
        let sum = match sum {
            Some(sum) => flat::mapped(sum, |sum| sum + gradient),
            None => {
                self.buffer.bytes += bytes(&gradient);
                gradient
            }
        };
        self.buffer.sums.register(param.id, sum);
    }
}

/// The gradients of a model's parameters.
struct Own<'a> {
    sums: &'a GradientsParams,
    found: HashSet<ParamId>,
}

impl Visit for Own<'_> {
    fn visit<const D: usize>(&mut self, _fields: &[Field], param: &Param<Tensor<D>>) {
        if self.sums.get::<D>(param.id).is_some() {
            self.found.insert(param.id);
        }
    }
}

struct Mean {
    sums: GradientsParams,
    count: f64,
}

impl Visit for Mean {
    fn visit<const D: usize>(&mut self, _fields: &[Field], param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return; // as in `Add`
        }
        if let Some(sum) = self.sums.remove::<D>(param.id) {
            let mean = flat::mapped(sum, |sum| sum.div_scalar(self.count));
            self.sums.register(param.id, mean);
        }
    }
}
