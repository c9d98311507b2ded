//! A parameter that is updated as several blocks.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_index};
use burn::tensor::{Device, Tensor};

use crate::blocks::Blocks;
use crate::update::Resumable;

/// The rules of a parameter's blocks.
#[derive(Clone)]
pub(crate) struct Split<O> {
    blocks: Blocks,
    rules: Vec<O>,
}

impl<O> Split<O> {
    /// The rule of a parameter from those of its blocks.
    pub fn new(blocks: Blocks, rules: Vec<O>) -> Self {
        Self { blocks, rules }
    }
}

/// The states of all blocks. A record of it has those of the blocks, under their indices.
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
        let states: Vec<S> = (0..).map_while(block).collect();
        (!states.is_empty()).then_some(Self(states))
    }
}

impl<O: Optimizer> Optimizer for Split<O> {
    type State<const D: usize> = SplitState<O::State<3>>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        grad: Tensor<D>,
        state: Option<SplitState<O::State<3>>>,
    ) -> (Tensor<D>, Option<SplitState<O::State<3>>>) {
        let shape = parameter.dims();
        let cut = |tensor: Tensor<D>| self.blocks.cut(tensor.reshape([-1])).into_iter();
        let mut states = state.map(|SplitState(states)| states.into_iter());
        let each = cut(parameter).zip(cut(grad)).zip(self.blocks.batches()).zip(&self.rules);
        let (values, states) = each
            .map(|(((values, grad), batch), rule)| {
                let state = states.as_mut().and_then(Iterator::next);
                let (values, state) =
                    rule.step(lr, values.reshape(batch), grad.reshape(batch), state);
                (values.reshape([-1]), state.expect("a step makes a state"))
            })
            .unzip();
        (self.blocks.join(values).reshape(shape), Some(SplitState(states)))
    }

    fn to_device<const D: usize>(
        SplitState(states): SplitState<O::State<3>>,
        device: &Device,
    ) -> SplitState<O::State<3>> {
        SplitState(states.into_iter().map(|state| O::to_device(state, device)).collect())
    }
}

impl<O: Resumable> Resumable for Split<O> {
    fn problem<const D: usize>(
        &self,
        SplitState(states): &SplitState<O::State<3>>,
    ) -> Option<String> {
        let (expected, got) = (self.rules.len(), states.len());
        if expected != got {
            return Some(format!("expected {expected} blocks, got {got}"));
        }
        self.rules.iter().zip(states).find_map(|(rule, state)| rule.problem(state))
    }

    fn start_counting<const D: usize>(&self, SplitState(states): &mut SplitState<O::State<3>>) {
        for (rule, state) in self.rules.iter().zip(states) {
            rule.start_counting(state);
        }
    }
}
