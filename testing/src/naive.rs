//! The reference for sharded optimizers: every rank gathers all gradients, and updates all
//! parameters.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use distmuon::Result;
use distmuon::comm::{Communicator, ReduceOp, World};
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig};

/// An optimizer of a whole model on every rank.
pub struct Naive {
    world: World,
    optim: DistModuleOptimizer,
}

/// Replaces gradients by their means over ranks, one after the other.
struct Averaging<'a> {
    comm: &'a Communicator,
    local: GradientsParams,
    means: GradientsParams,
    failure: Result<()>,
}

impl ModuleVisitor for Averaging<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.local.remove::<D>(param.id) else { return };
        let shape = gradient.shape();
        let mean = self.comm.all_reduce(gradient.reshape([-1]), ReduceOp::Mean);
        match mean.and_then(|mean| mean.wait()) {
            Ok(mean) => self.means.register::<D>(param.id, mean.reshape(shape)),
            Err(error) => self.failure = Err(error),
        }
    }
}

impl Naive {
    /// Makes the optimizer of a model that all ranks have.
    ///
    /// # Errors
    ///
    /// Those of [`DistMuonConfig::init`].
    pub fn new<M: Module>(world: &World, config: &DistMuonConfig, model: &M) -> Result<Self> {
        let optim = config.init(&World::alone(world.device().clone()), model)?;
        Ok(Self { world: world.clone(), optim })
    }

    /// Takes a step with the means of the ranks' gradients. All ranks make this call.
    ///
    /// # Errors
    ///
    /// Those of every collective, and of [`DistModuleOptimizer::step`].
    pub fn step<M: Module>(&mut self, lr: f64, model: M, local: GradientsParams) -> Result<M> {
        let means = means(self.world.comm(), &model, local)?;
        self.optim.step(lr, model, means)
    }
}

/// Returns the means of the ranks' gradients of a model, one after the other. All ranks make this
/// call, and have gradients of the same parameters.
///
/// # Errors
///
/// As every collective.
pub fn means<M: Module>(
    comm: &Communicator,
    model: &M,
    local: GradientsParams,
) -> Result<GradientsParams> {
    let mut averaging = Averaging { comm, local, means: GradientsParams::new(), failure: Ok(()) };
    model.visit(&mut averaging);
    averaging.failure.map(|()| averaging.means)
}
