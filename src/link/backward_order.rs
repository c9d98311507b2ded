//! The order of links in the backward pass.

use std::sync::{Mutex, PoisonError};

use burn::tensor::Tensor;

/// The depth from one use to the next, in operations. A sequence of more operations between two
/// uses may be passed by the later link's backward step, which then runs early: its gradient is
/// held for longer, and nothing else changes. Most weights of a transformer have less than 20
/// operations to the next one. An operation takes about 2 KB on the host, once for a model.
const SPACING: usize = 32;

/// The number of depths. Uses after them, as of many forward passes without a backward pass, have
/// the last one: their order is arbitrary, and nothing else changes.
const MOST: usize = 8192;

/// The order of the uses of leaves in a graph, each of which gets a depth of its own.
///
/// The depth of a node in Burn's graph counts its untracked parents as well, although they are not
/// part of the graph otherwise: a depth is an untracked tensor after many operations.
#[derive(Debug, Default)]
pub struct GraphOrder {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of uses in this graph.
    used: usize,
    /// The depths of all uses so far, of any graph.
    depths: Vec<Tensor<1>>,
}

/// A depth in the graph of a forward pass.
#[derive(Clone, Debug)]
pub struct Depth(pub(super) Tensor<1>);

impl GraphOrder {
    /// Returns the depth of the next use in the graph of a tensor. All tensors are on one device.
    pub fn next<const D: usize>(&self, like: &Tensor<D>) -> Depth {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let State { used, depths } = &mut *state;
        if *used == depths.len() && *used < MOST {
            let last = depths.last().cloned().unwrap_or_else(|| Tensor::zeros([1], &like.device()));
            // Each product is a node one deeper than the last. Operations of the model between two
            // links have room in between.
            depths.push((0..SPACING).fold(last, |depth, _| depth * 1.0));
        }
        let depth = Depth(depths[(*used).min(MOST - 1)].clone());
        *used += 1;
        depth
    }

    /// Returns to the first depth, for a new graph. Keeps at most twice the depths of the last
    /// graph, since many forward passes without a backward pass would keep half a gigabyte of them.
    pub fn reset(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let used = std::mem::take(&mut state.used);
        if used > 0 {
            // A pass with many uses, such as an evaluation, does not keep its memory.
            state.depths.truncate(2 * used);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn depths_of_abandoned_passes_are_dropped_after_a_shorter_one() {
        let (order, like) =
            (GraphOrder::default(), Tensor::<1>::zeros([1], &Device::default().autodiff()));
        let graph = |uses: usize| {
            (0..uses).for_each(|_| drop(order.next(&like)));
            order.reset();
            order.reset();
            order.state.lock().unwrap().depths.len()
        };
        assert_eq!([40, 20, 3, 4].map(graph), [40, 40, 6, 6]);
    }

    #[test]
    fn uses_without_end_have_a_limited_number_of_depths() {
        let like = Tensor::<1>::zeros([1], &Device::default().autodiff());
        let order = GraphOrder::default();
        (0..MOST + 8).for_each(|_| drop(order.next(&like)));
        assert_eq!(order.state.lock().unwrap().depths.len(), MOST);
    }
}
