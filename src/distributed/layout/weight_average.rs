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
    /// The average is stored in the types of the parameters. In half precision, a change that is
    /// smaller than half a digit of the average is lost: in bfloat16, where `(1 - decay)` times the
    /// distance of `P` from `A` is less than about `A / 512`. With a decay near 1, such an average
    /// stays where it began: use a [`WeightAverage`], which is in float32.
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
        let remedy = "start with a clone of the model";
        let values = ValuesByPath::of(model, ("the model", remedy), self.world().rank());
        mixed(average, decay, values)
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
        map_elements(model, function)
    }
}

fn map_elements<M: Module>(model: M, function: impl FnMut(&str, Tensor<1>) -> Tensor<1>) -> M {
    let owned = owned_in(&model);
    parameters::map(model, &mut Elementwise { owned, function })
}

/// The paths of owned parameters, whose base has no values.
fn owned_in<M: Module>(model: &M) -> HashSet<String> {
    let found = parameters::of(model).into_iter();
    found.filter(|found| found.placement.is_owned()).map(|found| found.path).collect()
}

/// The model with `share` of its own values and the rest of others.
fn mixed<M: Module>(model: M, share: f64, mut others: ValuesByPath) -> Result<M> {
    let mut error = None;
    let mixed = map_elements(model, |path, own| match others.check(path, &own) {
        Ok(()) => mix(own, others.values.remove(path).expect("the values were checked"), share),
        Err(missing) => {
            error.get_or_insert(missing);
            own
        }
    });
    error.map_or(Ok(mixed), Err)
}

/// An average of the weights of a model, in float32 whatever their type is.
///
/// Every rank has the average of the parts that it holds: 4 bytes for each of their elements, and 8
/// in float64. All float parameters have one, also frozen ones.
///
/// This is the tail average of modded-nanogpt's third track
/// (<https://github.com/KellerJordan/modded-nanogpt>, pull request 325, June 2026), which has 0.6
/// of the average and 0.4 of the model. (There, the token embedding has none.)
///
/// ```
/// use burn::module::Module;
/// use burn::nn::LinearConfig;
/// use distmuon::World;
/// use distmuon::distributed::{Layout, WeightAverage};
///
/// World::threads(World::devices(2), |world| {
///     let layout = Layout::from(&world); // on one device: `Layout::from(&World::alone(device))`
///     let model = layout.shard(LinearConfig::new(64, 64).init(world.device()))?;
///     let mut average = WeightAverage::new(&layout, &model); // late in the run
///     average.add(&model, 1.0 - 1.0 / 150.0)?; // after every step from there on
///     let evaluated = average.mixed_into(model.clone(), 0.6)?; // before an evaluation
///     # let _ = evaluated.num_params();
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// All ranks have to make the same calls: a rank that adds a model alone has parts of another
/// average than the others, which nothing finds. A checkpoint has one model, and not its average.
/// To keep the average as well, save [`Layout::unshard`] of the model with it, in the types of its
/// parameters.
#[derive(Debug, Clone)]
pub struct WeightAverage(ValuesByPath);

impl WeightAverage {
    /// Returns an average that has the weights of a model, which the layout divides. Waits for
    /// parameters of the last step that are on their way, so that all ranks make this call.
    pub fn new<M: Module>(layout: &Layout, model: &M) -> Self {
        let rank = layout.world().rank();
        let mut average = ValuesByPath::of(model, ("the average", START), rank);
        average.values.values_mut().for_each(|value| {
            // Not the tensors of the model, which the next step could then not write in place.
            *value = value.clone().cast(precise_dtype(value.dtype())).mul_scalar(1.0);
        });
        Self(average)
    }

    /// Adds the weights of a model: of every parameter, the average becomes `decay A + (1 - decay)
    /// P`. Sends nothing, and waits as [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a decay that is not in `[0, 1)`; [`Error::Parameter`] for a model
    /// with other parameters than the first one. The average then stays as it was.
    pub fn add<M: Module>(&mut self, model: &M, decay: f64) -> Result<()> {
        ensure_decay("decay", decay)?;
        let mut added = ValuesByPath::of(model, ("the model", START), self.0.rank);
        for (path, value) in &added.values {
            self.0.check(path, value)?;
        }
        for (path, average) in &self.0.values {
            added.check(path, average)?;
        }
        for (path, average) in &mut self.0.values {
            let value = added.values.remove(path).expect("both have the same paths");
            // Moved out, so that there is one further average of a parameter, and not of all.
            let old = std::mem::replace(average, value.clone());
            *average = mix(old, value, decay);
        }
        Ok(())
    }

    /// Returns a model with `share` of the average and the rest of its own weights, in the types of
    /// its parameters: 1 for the average alone. Sends nothing, and waits as [`new`](Self::new).
    ///
    /// Clones of a model share running statistics, such as BatchNorm's, so these are not averaged.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a share that is not in `[0, 1]`; [`Error::Parameter`] for a model
    /// with other parameters than the first one.
    pub fn mixed_into<M: Module>(&self, model: M, share: f64) -> Result<M> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::setting("share", share, "at least 0 and at most 1"));
        }
        mixed(model, 1.0 - share, self.0.clone())
    }
}

/// The remedy for a model with other parameters than an average.
const START: &str = "make an average of this model by `WeightAverage::new`";

/// `share` of the first values and the rest of the second ones, computed at least in float32, on
/// the device of the first ones.
fn mix(first: Tensor<1>, second: Tensor<1>, share: f64) -> Tensor<1> {
    // Half precision would round the share as well: 0.999 is 1 in bfloat16.
    let precise = precise_dtype(first.dtype());
    let second = second.to_device(&first.device()).cast(precise);
    // Zero times NaN is NaN: an average is wanted most where the model has one.
    if share == 0.0 {
        return second;
    }
    first.cast(precise).mul_scalar(share) + second.mul_scalar(1.0 - share)
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
#[derive(Debug, Clone)]
struct ValuesByPath {
    values: HashMap<String, Tensor<1>>,
    /// The name of their owner in errors, and the remedy for values that it does not have.
    named: (&'static str, &'static str),
    rank: usize,
}

impl ValuesByPath {
    fn of<M: Module>(model: &M, named: (&'static str, &'static str), rank: usize) -> Self {
        let mut read = ReadValues { owned: owned_in(model), values: HashMap::new() };
        parameters::visit(model, &mut read);
        Self { values: read.values, named, rank }
    }

    /// Fails unless there are values of a path, as many as others.
    fn check(&self, path: &str, like: &Tensor<1>) -> Result<()> {
        match self.values.get(path).is_some_and(|values| values.dims() == like.dims()) {
            true => Ok(()),
            false => {
                let (what, remedy) = self.named;
                let reason = format!("{what} does not have it in this shape");
                Err(Error::parameter(path, self.rank, reason, remedy))
            }
        }
    }
}

struct ReadValues {
    owned: HashSet<String>,
    values: HashMap<String, Tensor<1>>,
}

impl Visit for ReadValues {
    fn visit<const D: usize>(&mut self, fields: &[Field], param: &Param<Tensor<D>>) {
        // To flatten a base would fill its memory.
        if !self.owned.contains(&parameters::path(fields)) {
            let values = param.val().without_autodiff().reshape([-1]);
            self.values.insert(parameters::path_with_parts(fields), values);
        }
    }
}
