//! Averages and maps of the weights of a model, in the memory of its parts.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, Param};
use burn::tensor::Tensor;

use super::Layout;
use crate::backend::precise_dtype;
use crate::checks::ensure_decay;
use crate::error::{Error, Result};
use crate::parameters::{self, Field, Visit, in_place_of};

impl Layout {
    /// Returns the average with the values of a model added to it: of every float parameter
    /// `decay A + (1 - decay) P`, computed at least in float32. Starts with a clone of the model,
    /// and is used like the model. Sends nothing, and is called by all ranks, as
    /// [`map_elements`](Self::map_elements).
    ///
    /// Two calls make the tail average of modded-nanogpt's third track
    /// (<https://github.com/KellerJordan/modded-nanogpt>, pull request 325, June 2026): late in the
    /// run, clone the model, and call `layout.average(average, &model, 1.0 - 1.0 / 150.0)` after
    /// every step. Before an evaluation, `layout.average(model.clone(), &average, 0.4)` has 0.4 of
    /// the model and 0.6 of the average. In the source, the token embedding is bfloat16 and has no
    /// average, and all other parameters are float32. Here all float parameters have one.
    ///
    /// The average is stored in the types of the parameters. In half precision, a change that is
    /// smaller than half a digit of the average is lost: in bfloat16, where `(1 - decay)` times the
    /// distance of `P` from `A` is less than about `A / 512`. With a decay near 1, such an average
    /// stays where it began. Average a model in float32, or call it every several steps with a
    /// smaller decay.
    ///
    /// A rank averages the parts that it has. Clones of a model share running statistics, such as
    /// BatchNorm's, so these are not averaged. A checkpoint has one model: to keep the average as
    /// well, save [`unshard`](Self::unshard)`(&average)` with Burn's recorders.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::LinearConfig;
    /// use distmuon::comm::World;
    /// use distmuon::distributed::{Layout, Mesh};
    ///
    /// World::threads(World::devices(2), |world| {
    ///     let layout = Layout::new(&Mesh::flat(&world)).owned("dp");
    ///     let model = layout.shard(LinearConfig::new(64, 64).init(world.device()))?;
    ///     let average = layout.average(model.clone(), &model, 0.999)?; // after every step
    ///     # let _ = average.num_params();
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a decay that is not in `[0, 1)`; [`Error::Parameter`] for a model
    /// with other parameters than the average.
    pub fn average<M: Module>(&self, average: M, model: &M, decay: f64) -> Result<M> {
        ensure_decay("decay", decay)?;
        let rank = self.world().rank();
        let mut values = ValuesByPath(HashMap::new());
        parameters::visit(model, &mut values);
        let mut error = None;
        let average = self.map_elements(average, |path, old| {
            let value = values.0.remove(path).filter(|value| value.dims() == old.dims());
            let Some(value) = value else {
                let reason = "the model does not have it in the shape of the average";
                let remedy = "start with a clone of the model";
                error.get_or_insert(Error::parameter(path, rank, reason, remedy));
                return old;
            };
            // Half precision would round the decay as well: 0.999 is 1 in bfloat16.
            let precise = precise_dtype(old.dtype());
            let kept = old.cast(precise).mul_scalar(decay);
            kept + value.cast(precise).mul_scalar(1.0 - decay)
        });
        error.map_or(Ok(average), Err)
    }

    /// Returns the model with a function applied to the values of its float parameters, such as the
    /// clipping of weights: the function gets the path of a parameter and values of it in one
    /// dimension. These are all of them, or this rank's part, so the function has to treat each
    /// element by itself. A rank without a part has one element, which nothing reads. The function
    /// is also called for frozen parameters.
    ///
    /// Sends nothing, but waits for parameters of the last step that are on their way, so that all
    /// ranks make this call.
    ///
    /// A [`ModuleMapper`](burn::module::ModuleMapper) of the caller's would also visit the stand-in
    /// of every owned parameter, which has the shape of the whole and no values, and fill its
    /// memory.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use distmuon::comm::World;
    /// use distmuon::distributed::Layout;
    ///
    /// World::threads(World::devices(2), |world| {
    ///     let layout = Layout::from(&world).owned("dp");
    ///     let critic = layout.shard(LinearConfig::new(64, 64).init(world.device()))?;
    ///     let critic = layout.map_elements(critic, |_, values| values.clamp(-0.01, 0.01));
    ///     let whole = layout.unshard(&critic)?;
    ///     assert!(whole.weight.val().abs().max().into_scalar::<f32>() <= 0.01);
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn map_elements<M: Module>(
        &self,
        model: M,
        function: impl FnMut(&str, Tensor<1>) -> Tensor<1>,
    ) -> M {
        let found = parameters::of(&model).into_iter();
        let owned = found.filter(|found| found.placement.is_owned()).map(|found| found.path);
        parameters::map(model, &mut Elementwise { owned: owned.collect(), function })
    }
}

struct Elementwise<F> {
    owned: HashSet<String>,
    function: F,
}

impl<F: FnMut(&str, Tensor<1>) -> Tensor<1>> Elementwise<F> {
    fn apply<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, old, mapper) = param.consume();
        let (shape, dtype) = (old.shape(), old.dtype());
        let new = (self.function)(path, old.clone().without_autodiff().reshape([-1]));
        let new: Tensor<D> = new.cast(dtype).reshape(shape);
        Param::from_mapped_value(id, in_place_of(&old, new), mapper)
    }
}

impl<F: FnMut(&str, Tensor<1>) -> Tensor<1>> parameters::Map for Elementwise<F> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.owned.contains(path) {
            true => param, // the base
            false => self.apply(path, param),
        }
    }

    fn map_part<const D: usize>(&mut self, path: &str, part: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.apply(path, part)
    }
}

/// The values of parameters, flat, or of this rank's parts of them.
struct ValuesByPath(HashMap<String, Tensor<1>>);

impl Visit for ValuesByPath {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        self.0.insert(
            parameters::path_with_parts(fields),
            param.val().without_autodiff().reshape([-1]),
        );
    }
}
