//! Links as operations of Burn's autodiff: the only file that names it.

use std::fmt;
use std::marker::PhantomData;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, DispatchDevice, DispatchKindConversion, DispatchTensor, GradientCheckpointingStrategy,
    TensorMetadata,
};
use burn::tensor::{Device, Shape, Tensor};

use super::{Forward, Link};

/// The reason that a tensor's conversion to a primitive succeeds.
const OF_THIS_BACKEND: &str = "the tensor is of the backend of its device";

/// Calls a function with the type of a device's backend. `None` for other backends.
macro_rules! with_backend {
    ($device:expr, $backend:ident => $call:expr) => {
        match $device {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => {
                type $backend = burn::backend::Flex;
                Some($call)
            }
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(_) => {
                type $backend = burn::backend::Cube;
                Some($call)
            }
            #[cfg(feature = "tch")]
            DispatchDevice::LibTorch(_) => {
                #[allow(deprecated)]
                type $backend = burn::backend::LibTorch;
                Some($call)
            }
            // With the features of all backends, nothing is left for it.
            #[allow(unreachable_patterns)]
            _ => None,
        }
    };
}

/// Returns `true` if links work on a device: on Flex, on CubeCL's backends and on LibTorch, as far
/// as their features are enabled.
pub fn supports(device: &Device) -> bool {
    let device = device.clone().inner();
    let name: Option<&str> = with_backend!(device.as_dispatch(), B => std::any::type_name::<B>());
    name.is_some()
}

/// Returns a number that a tensor has in common with its clones and with no other, if it has
/// autodiff.
pub(crate) fn identity<const D: usize>(tensor: &Tensor<D>) -> Option<u64> {
    let strategy = tensor.gradient_checkpointing_strategy()?;
    let (device, tensor) = (tensor.device().inner(), tensor.clone());
    with_backend!(device.as_dispatch(), B => match strategy {
        GradientCheckpointingStrategy::Disabled => node::<B, NoCheckpointing, D>(tensor),
        GradientCheckpointingStrategy::Balanced => node::<B, BalancedCheckpointing, D>(tensor),
    })
}

fn node<B, C, const D: usize>(tensor: Tensor<D>) -> u64
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<Autodiff<B, C>>,
{
    tensor.try_into_primitive::<Autodiff<B, C>>().expect(OF_THIS_BACKEND).id().value
}

pub(super) fn attach<const D: usize, const E: usize>(
    link: Link,
    input: Tensor<D>,
    output: Tensor<E>,
) -> Tensor<E> {
    // A device without autodiff has no strategy, and no backward pass.
    let Some(strategy) = input.gradient_checkpointing_strategy() else { return output };
    let device = input.device().inner();
    let attached = with_backend!(device.as_dispatch(), B => match strategy {
        GradientCheckpointingStrategy::Disabled => {
            attach_on::<B, NoCheckpointing, D, E>(link, input, output)
        }
        GradientCheckpointingStrategy::Balanced => {
            attach_on::<B, BalancedCheckpointing, D, E>(link, input, output)
        }
    });
    attached.unwrap_or_else(|| panic!("links do not work on {device:?}"))
}

/// Attaches a link on backend `B`. `C` is the strategy of the device.
fn attach_on<B, C, const D: usize, const E: usize>(
    Link { backward, again, depth }: Link,
    input: Tensor<D>,
    output: Tensor<E>,
) -> Tensor<E>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B> + DispatchKindConversion<Autodiff<B, C>>,
{
    // Any untracked tensor stands in for a depth.
    let depth = depth.map_or_else(|| Tensor::zeros([1], &input.device()), |depth| depth.0);
    let depth = depth.try_into_primitive::<Autodiff<B, C>>().expect(OF_THIS_BACKEND);
    let input = input.try_into_primitive::<Autodiff<B, C>>().expect(OF_THIS_BACKEND);
    let output: FloatTensor<B> = output.try_into_primitive::<B>().expect(OF_THIS_BACKEND);
    // Burn runs a backward pass from the deepest node upwards. The second parent only sets the
    // depth.
    let nodes = [input.node(), depth.node()];
    let state = State { shape: input.shape(), backward };
    let attached = match again {
        None => {
            let prepared = Backward::<B, 2>::prepare::<C>(Linked, nodes).compute_bound();
            finish(prepared.stateful(), state, output)
        }
        // Whatever the strategy of the device is, this value is made again.
        Some(again) => {
            let shape = output.shape();
            let again = Again { input: input.id(), shape, again, backend: PhantomData::<B> };
            let prepared = Backward::<B, 2>::prepare::<BalancedCheckpointing>(Linked, nodes);
            let prepared = prepared.memory_bound().retro_forward(again).parents([&input]);
            finish(prepared.stateful(), state, output)
        }
    };
    Tensor::from_primitive::<Autodiff<B, C>>(attached)
}

fn finish<B, C>(
    kind: OpsKind<Linked, B, State, C, 2>,
    state: State,
    output: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<B>,
{
    match kind {
        OpsKind::Tracked(prepared) => prepared.finish(state, output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

#[derive(Debug)]
struct Linked;

#[derive(Clone)]
struct State {
    /// Shape of the input.
    shape: Shape,
    backward: super::Backward,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl<B: Backend> Backward<B, 2> for Linked
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = State;

    fn backward(self, ops: Ops<State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let State { shape, backward } = ops.state;
        let gradient = flat::<B>(grads.consume::<B>(&ops.node));
        // The depth is untracked, and gets no gradient.
        let [parent, _depth] = ops.parents;
        if let (Some(gradient), Some(parent)) = (backward(gradient), parent) {
            grads.register::<B>(parent.id, shaped::<B>(gradient, shape));
        }
    }
}

/// The output, made again.
struct Again<B> {
    input: NodeId,
    /// Shape of the output.
    shape: Shape,
    again: Forward,
    backend: PhantomData<B>,
}

impl<B> fmt::Debug for Again<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Again").field("input", &self.input).finish_non_exhaustive()
    }
}

impl<B: Backend> RetroForward for Again<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn forward(&self, states: &mut BackwardStates, node: NodeId) {
        let input = flat::<B>(states.get_state::<FloatTensor<B>>(&self.input));
        states.save(node, shaped::<B>((self.again)(input), self.shape.clone()));
    }
}

fn flat<B: Backend>(tensor: FloatTensor<B>) -> Tensor<1>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    let elements = tensor.shape().num_elements();
    Tensor::from_primitive::<B>(B::float_reshape(tensor, Shape::from([elements])))
}

fn shaped<B: Backend>(tensor: Tensor<1>, shape: Shape) -> FloatTensor<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    B::float_reshape(tensor.try_into_primitive::<B>().expect(OF_THIS_BACKEND), shape)
}
