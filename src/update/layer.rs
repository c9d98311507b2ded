//! Optimizers of whole parameters, and those among them whose states the device can leave as they
//! are.

use std::sync::Arc;

use burn::optim::{DynOptimizer, DynState, LearningRate, Optimizer};
use burn::tensor::kind::BridgeTensor;
use burn::tensor::{Bool, Tensor};

/// The largest number of dimensions that Burn's optimizers support.
pub(crate) const MAX_RANK: usize = 8;

/// Evaluates an expression for the number of dimensions `$rank`, as the constant `$d`.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        match $rank {
            1 => {
                const $d: usize = 1;
                $body
            }
            2 => {
                const $d: usize = 2;
                $body
            }
            3 => {
                const $d: usize = 3;
                $body
            }
            4 => {
                const $d: usize = 4;
                $body
            }
            5 => {
                const $d: usize = 5;
                $body
            }
            6 => {
                const $d: usize = 6;
                $body
            }
            7 => {
                const $d: usize = 7;
                $body
            }
            8 => {
                const $d: usize = 8;
                $body
            }
            rank => panic!("a parameter of {rank} dimensions can't be updated whole"),
        }
    };
}
pub(crate) use with_rank;

/// A Burn optimizer of whole matrices or layers, such as SOAP or Shampoo, whose step the device can
/// take back.
///
/// A gradient that is not finite leaves a parameter and its state as they are. The state of any
/// Burn [`Optimizer`] may have numbers of the host, so the host has to wait for the decision before
/// each step. The state of a layer optimizer has tensors only, or numbers that do not depend on the
/// steps: the device chooses between the old ones and the new ones, and no host waits.
///
/// The operations of a step are also its cost. Plans balance the ranks by it, together with the
/// cost of Muon's matrices, which has the same unit.
///
/// ```
/// use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource};
/// use burn::tensor::{Device, Tensor};
/// use distmuon::custom::{LayerOptimizer, Rejected};
/// use distmuon::{MuonConfig, RoutingRule};
///
/// /// Momentum, divided by its Frobenius norm.
/// #[derive(Clone)]
/// struct Normalized;
///
/// #[derive(Clone)]
/// struct Momentum<const D: usize> { momentum: Tensor<D> }
///
/// impl<const D: usize> RecordState for Momentum<D> {
///     fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
///         out.push_tensor(prefix, "momentum", self.momentum.to_data());
///     }
///
///     fn state_unflatten(
///         prefix: &str,
///         source: &mut StateSource,
///         device: &Device,
///     ) -> Option<Self> {
///         let momentum = source.take_tensor(prefix, "momentum")?;
///         Some(Self { momentum: Tensor::from_data(momentum, device) })
///     }
/// }
///
/// impl Optimizer for Normalized {
///     type State<const D: usize> = Momentum<D>;
///
///     fn step<const D: usize>(
///         &self,
///         lr: LearningRate,
///         parameter: Tensor<D>,
///         gradient: Tensor<D>,
///         state: Option<Momentum<D>>,
///     ) -> (Tensor<D>, Option<Momentum<D>>) {
///         let Momentum { momentum } = state.unwrap_or_else(|| self.initial(&parameter));
///         let momentum = momentum * 0.9 + gradient * 0.1;
///         let norm = momentum.clone().square().sum().sqrt().reshape([1; D]);
///         let update = momentum.clone() / norm.expand(momentum.shape());
///         (parameter - update * lr, Some(Momentum { momentum }))
///     }
///
///     fn to_device<const D: usize>(state: Momentum<D>, device: &Device) -> Momentum<D> {
///         Momentum { momentum: state.momentum.to_device(device) }
///     }
/// }
///
/// impl LayerOptimizer for Normalized {
///     fn initial<const D: usize>(&self, parameter: &Tensor<D>) -> Momentum<D> {
///         Momentum { momentum: parameter.zeros_like() }
///     }
///
///     fn keep<const D: usize>(
///         rejected: &Rejected,
///         old: Momentum<D>,
///         new: Momentum<D>,
///     ) -> Momentum<D> {
///         Momentum { momentum: rejected.keep(old.momentum, new.momentum) }
///     }
///
///     fn operations(&self, shape: &[usize]) -> f64 {
///         6.0 * shape.iter().product::<usize>() as f64
///     }
/// }
///
/// let config = MuonConfig::new()
///     .with_layer_optimizer("normalized", Normalized)
///     .with_rule(RoutingRule::custom("mlp", "normalized"));
/// ```
pub trait LayerOptimizer: Optimizer {
    /// Returns the state of a parameter before its first step.
    ///
    /// A step from this state is a parameter's first one. [`Optimizer::step`] is always given a
    /// state here, and has no other first step.
    fn initial<const D: usize>(&self, parameter: &Tensor<D>) -> Self::State<D>;

    /// Returns the state after a step: each tensor by [`Rejected::keep`].
    fn keep<const D: usize>(
        rejected: &Rejected,
        old: Self::State<D>,
        new: Self::State<D>,
    ) -> Self::State<D>;

    /// Returns the floating-point operations of a step of a parameter of a shape: finite, zero or
    /// more, and equal on all ranks.
    fn operations(&self, shape: &[usize]) -> f64;
}

/// The device's decision whether a parameter stays as it is.
#[derive(Debug, Clone)]
pub struct Rejected(Tensor<1, Bool>);

impl Rejected {
    /// Returns `old` for a parameter that stays as it is, and `new` for any other. Both have one
    /// shape and one type.
    pub fn keep<const D: usize>(&self, old: Tensor<D>, new: Tensor<D>) -> Tensor<D> {
        let everywhere = self.0.clone().reshape([1; D]).expand(new.shape());
        new.mask_where(everywhere, old)
    }
}

/// The decision about a whole parameter in a step.
pub(crate) struct Decision {
    /// A tensor of one element: above zero if the parameter stays as it is.
    pub flag: Tensor<1>,
    /// The same on the host, if it was read.
    pub read: Option<bool>,
}

/// An optimizer of whole parameters.
#[derive(Clone)]
pub(crate) enum WholeOptimizer {
    /// Any of Burn's interface. No tensor operation undoes its step.
    Any(Arc<dyn DynOptimizer>),
    Layer(Arc<dyn DynLayerOptimizer>),
}

impl WholeOptimizer {
    /// The optimizer by Burn's interface.
    pub fn erased(&self) -> &dyn DynOptimizer {
        match self {
            Self::Any(optimizer) => &**optimizer,
            Self::Layer(optimizer) => &**optimizer,
        }
    }

    /// Returns `true` if the host has to know a decision before the step.
    pub fn reads(&self) -> bool {
        matches!(self, Self::Any(_))
    }

    /// The operations of a step, if they are known.
    pub fn operations(&self, shape: &[usize]) -> Option<f64> {
        match self {
            Self::Any(_) => None,
            Self::Layer(optimizer) => Some(optimizer.operations_of(shape)),
        }
    }

    /// A state with the shapes of a first step's.
    pub fn state_after_step(&self, rank: usize, tensors: WholeTensors) -> Option<DynState> {
        let WholeTensors { values, gradient } = tensors;
        match self {
            // Any rate: shapes do not depend on values.
            Self::Any(optimizer) => optimizer.step_dyn(rank, 1e-3, values, gradient, None).1,
            // A step leaves their shapes as they are, since it can be taken back.
            Self::Layer(optimizer) => Some(optimizer.initial_of(rank, values)),
        }
    }

    /// The values and the state after a step, or those before it if it is rejected.
    pub fn step(
        &self,
        rank: usize,
        lr: LearningRate,
        tensors: WholeTensors,
        state: Option<DynState>,
        Decision { flag, read }: Decision,
    ) -> (BridgeTensor, Option<DynState>) {
        match self {
            // Read here, parameter by parameter, only where a step has not read all decisions at
            // once.
            Self::Any(optimizer) => match read.unwrap_or_else(|| flag.into_scalar::<f32>() > 0.0) {
                true => (tensors.values, state),
                false => optimizer.step_dyn(rank, lr, tensors.values, tensors.gradient, state),
            },
            Self::Layer(optimizer) => {
                let rejected = Rejected(flag.greater_elem(0.0));
                let (values, state) = optimizer.step_unless(&rejected, rank, lr, tensors, state);
                (values, Some(state))
            }
        }
    }
}

/// A parameter and its gradient in a step of a user's optimizer.
pub(crate) struct WholeTensors {
    pub values: BridgeTensor,
    pub gradient: BridgeTensor,
}

/// A [`LayerOptimizer`] for parameters of any number of dimensions.
pub(crate) trait DynLayerOptimizer: DynOptimizer {
    fn operations_of(&self, shape: &[usize]) -> f64;

    /// The state before the first step.
    fn initial_of(&self, rank: usize, values: BridgeTensor) -> DynState;

    /// The values and the state after a step, or those before it where it is rejected.
    fn step_unless(
        &self,
        rejected: &Rejected,
        rank: usize,
        lr: LearningRate,
        tensors: WholeTensors,
        state: Option<DynState>,
    ) -> (BridgeTensor, DynState);
}

impl<O: LayerOptimizer> DynLayerOptimizer for O {
    fn operations_of(&self, shape: &[usize]) -> f64 {
        self.operations(shape)
    }

    fn initial_of(&self, rank: usize, values: BridgeTensor) -> DynState {
        with_rank!(rank, D => {
            DynState::create(self.initial(&Tensor::<D>::from_bridge(values)), rank)
        })
    }

    fn step_unless(
        &self,
        rejected: &Rejected,
        rank: usize,
        lr: LearningRate,
        WholeTensors { values, gradient }: WholeTensors,
        state: Option<DynState>,
    ) -> (BridgeTensor, DynState) {
        with_rank!(rank, D => {
            let (values, gradient) =
                (Tensor::<D>::from_bridge(values), Tensor::<D>::from_bridge(gradient));
            let old = match state {
                Some(state) => state.downcast::<O::State<D>>(),
                None => self.initial(&values),
            };
            // The old values and the old state are kept, since only the device knows whether the
            // step is rejected.
            let (new_values, new) = self.step(lr, values.clone(), gradient, Some(old.clone()));
            let state = match new {
                Some(new) => O::keep(rejected, old, new),
                // An optimizer that returns no state leaves it as it was.
                None => old,
            };
            let values = rejected.keep(values, new_values);
            (values.into_bridge(), DynState::create(state, rank))
        })
    }
}
