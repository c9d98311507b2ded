//! A parameter that is updated as several blocks.

use burn::optim::{
    LearningRate, Optimizer, RecordState, StateSink, StateSource, join_index, join_path,
};
use burn::tensor::{Device, Tensor};

use crate::elementwise::{Elementwise, ElementwiseState};
use crate::matrix_blocks::Blocks;
use crate::update::{ELEMENTS, Resumable};

/// The rules of a parameter's blocks.
#[derive(Clone)]
pub(crate) struct Split<O> {
    blocks: Blocks,
    rules: Vec<BlockRule<O>>,
}

/// The rule of a block.
#[derive(Clone)]
pub(crate) enum BlockRule<O> {
    Matrices(O),
    Elements(Elementwise),
}

/// The state of a block. A state of elements has its own name in records, since a momentum may be
/// Lion's or Muon's.
#[derive(Clone)]
// There is one for each block of a parameter. Without backends, tensors are small.
#[allow(clippy::large_enum_variant)]
pub(crate) enum BlockState<S> {
    Matrices(S),
    Elements(ElementwiseState<3>),
}

impl<S: RecordState> RecordState for BlockState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        match self {
            Self::Matrices(state) => state.state_flatten(prefix, out),
            Self::Elements(state) => state.state_flatten(&join_path(prefix, ELEMENTS), out),
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let elements = join_path(prefix, ELEMENTS);
        let elements = ElementwiseState::state_unflatten(&elements, src, device);
        elements
            .map(Self::Elements)
            .or_else(|| S::state_unflatten(prefix, src, device).map(Self::Matrices))
    }
}

impl<O: Optimizer> BlockRule<O> {
    /// The step of a block.
    ///
    /// # Panics
    ///
    /// If the state is another rule's.
    fn step(
        &self,
        lr: LearningRate,
        values: Tensor<3>,
        grad: Tensor<3>,
        state: Option<BlockState<O::State<3>>>,
    ) -> (Tensor<3>, BlockState<O::State<3>>) {
        let made = "a step makes a state";
        match (self, state) {
            (Self::Matrices(rule), None) => {
                let (values, state) = rule.step(lr, values, grad, None);
                (values, BlockState::Matrices(state.expect(made)))
            }
            (Self::Matrices(rule), Some(BlockState::Matrices(state))) => {
                let (values, state) = rule.step(lr, values, grad, Some(state));
                (values, BlockState::Matrices(state.expect(made)))
            }
            (Self::Elements(rule), None) => {
                let (values, state) = rule.step(lr, values, grad, None);
                (values, BlockState::Elements(state.expect(made)))
            }
            (Self::Elements(rule), Some(BlockState::Elements(state))) => {
                let (values, state) = rule.step(lr, values, grad, Some(state));
                (values, BlockState::Elements(state.expect(made)))
            }
            (rule, Some(_)) => panic!("{}", rule.unfit()),
        }
    }

    fn unfit(&self) -> String {
        let block = match self {
            Self::Matrices(_) => "a block of Muon's has the state of an elementwise rule",
            Self::Elements(_) => "a block that is left to an elementwise rule has Muon's state",
        };
        format!("{block}: configure the optimizer as it was when the state was saved")
    }
}

impl<O> Split<O> {
    /// The rule of a parameter from the rules of its blocks.
    pub fn new(blocks: Blocks, rules: Vec<BlockRule<O>>) -> Self {
        Self { blocks, rules }
    }
}

/// The states of all blocks. Its record has the blocks' records, under their indices.
#[derive(Clone)]
pub(crate) struct SplitState<S>(Vec<S>);

impl<S: RecordState> RecordState for SplitState<S> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        for (index, state) in self.0.iter().enumerate() {
            state.state_flatten(&join_index(prefix, index), out);
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let block = |index| S::state_unflatten(&join_index(prefix, index), src, device);
        // The record has no number of blocks: they end where one is missing.
        let states: Vec<S> = (0..).map_while(block).collect();
        (!states.is_empty()).then_some(Self(states))
    }
}

impl<O: Optimizer> Optimizer for Split<O> {
    type State<const D: usize> = SplitState<BlockState<O::State<3>>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let shape = parameter.dims();
        let cut = |tensor: Tensor<D>| self.blocks.cut(tensor.reshape([-1])).into_iter();
        // Moved out, so that each block's step has the only reference to its state.
        let mut states = state.map(|SplitState(states)| states.into_iter());
        let each = cut(parameter).zip(cut(grad)).zip(self.blocks.batches()).zip(&self.rules);
        let (values, states) = each
            .map(|(((values, grad), batch), rule)| {
                let state = states.as_mut().and_then(Iterator::next);
                let (values, state) =
                    rule.step(lr, values.reshape(batch), grad.reshape(batch), state);
                (values.reshape([-1]), state)
            })
            .unzip();
        (self.blocks.join(values).reshape(shape), Some(SplitState(states)))
    }

    fn to_device<const D: usize>(
        SplitState(states): Self::State<D>,
        device: &Device,
    ) -> Self::State<D> {
        let to_device = |state| match state {
            BlockState::Matrices(state) => BlockState::Matrices(O::to_device(state, device)),
            BlockState::Elements(state) => {
                BlockState::Elements(Elementwise::to_device(state, device))
            }
        };
        SplitState(states.into_iter().map(to_device).collect())
    }
}

impl<O: Resumable> Resumable for Split<O> {
    fn problem<const D: usize>(&self, SplitState(states): &Self::State<D>) -> Option<String> {
        let (expected, got) = (self.rules.len(), states.len());
        if expected != got {
            return Some(format!("expected {expected} blocks, got {got}"));
        }
        self.rules.iter().zip(states).find_map(|(rule, state)| match (rule, state) {
            (BlockRule::Matrices(rule), BlockState::Matrices(state)) => rule.problem(state),
            (BlockRule::Elements(rule), BlockState::Elements(state)) => rule.problem(state),
            (rule, _) => Some(rule.unfit()),
        })
    }

    fn start_counting<const D: usize>(&self, SplitState(states): &mut Self::State<D>) {
        for (rule, state) in self.rules.iter().zip(states) {
            match (rule, state) {
                (BlockRule::Matrices(rule), BlockState::Matrices(state)) => {
                    rule.start_counting(state);
                }
                (BlockRule::Elements(rule), BlockState::Elements(state)) => {
                    rule.start_counting(state);
                }
                // `problem` rejects it before.
                _ => {}
            }
        }
    }
}
