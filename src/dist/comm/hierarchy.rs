//! Shares of gradients and parameters that travel inside their node first, or last.
//!
//! Between nodes lies the slow link. A sum is taken inside every node before it crosses, and what has
//! crossed once is handed on inside: of a buffer of `B` bytes on `n` nodes of `d` ranks, a rank sends
//! `(n - 1) / (n d) B` between nodes, where a flat exchange of parts sends `(n - 1) / n B`. As in the
//! hybrid sharding of PyTorch's FSDP (<https://pytorch.org/docs/stable/fsdp.html>), but exact: where
//! neighbouring ranks are a node, and their number is a power of two, the order of additions is that
//! of all ranks. Half precision travels as it is inside a node, and as float32 between nodes, since
//! the sums of nodes are not rounded.
//!
//! The second half of a call starts when the first is waited for, not before. It needs the result of
//! the first on the device, and a device orders by streams: started earlier, it would make all later
//! work on the device, such as updates of parameters, wait for the first half. With several buckets
//! in flight, the halves of different buckets overlap.

use std::collections::HashMap;
use std::sync::Arc;

use burn::tensor::Tensor;

use serde::{Deserialize, Serialize};

use super::{Communicator, Pending, ReduceOp, check_counts, check_dtype, starts, value};
use crate::dist::flat;
use crate::error::Result;

/// An engine of nodes of equally many ranks, over any engine of all of them.
#[derive(Debug)]
pub struct Hierarchy {
    all: Arc<dyn Communicator>,
    /// The ranks of this node.
    node: Arc<dyn Communicator>,
    /// The ranks at this rank's place in every node.
    across: Arc<dyn Communicator>,
    /// The ranks of every node.
    nodes: Vec<Vec<usize>>,
    /// All ranks: those at the first place of every node, then those at the second, and so on.
    by_place: Vec<usize>,
}

/// The nodes of all ranks, as rank 0 tells the others.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Nodes {
    /// Nodes of one rank, only one node, or nodes of different sizes.
    None,
    /// So many neighbouring ranks are a node: the same few bytes for any number of ranks.
    Neighbours(usize),
    /// The node of every rank.
    Of(Vec<usize>),
}

impl Nodes {
    /// The ranks that give the same name are a node.
    fn of(names: &[Vec<u8>]) -> Self {
        let mut numbers = HashMap::new();
        let node = |name| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        let nodes: Vec<usize> = names.iter().map(node).collect();
        let mut sizes = vec![0; numbers.len()];
        nodes.iter().for_each(|node| sizes[*node] += 1);
        let each = sizes[0];
        if sizes.len() == 1 || each == 1 || sizes.iter().any(|size| *size != each) {
            return Self::None;
        }
        match nodes.iter().enumerate().all(|(rank, node)| *node == rank / each) {
            true => Self::Neighbours(each),
            false => Self::Of(nodes),
        }
    }

    /// The ranks of every node.
    fn ranks(&self, size: usize) -> Option<Vec<Vec<usize>>> {
        let node = |rank: usize| match self {
            Self::None => None,
            Self::Neighbours(each) => Some(rank / each),
            Self::Of(nodes) => Some(nodes[rank]),
        };
        let mut ranks: Vec<Vec<usize>> = Vec::new();
        for rank in 0..size {
            let node = node(rank)?;
            ranks.resize(ranks.len().max(node + 1), vec![]);
            ranks[node].push(rank);
        }
        Some(ranks)
    }
}

impl Hierarchy {
    /// The engine of the same ranks, of which those with the same name are a node. Nothing where nodes
    /// are single ranks, or only one, or of different sizes.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn over(all: Arc<dyn Communicator>, name: &str) -> Result<Option<Self>> {
        // Through rank 0, so that what goes to each rank does not grow with their number.
        let names = all.gather_bytes(name.as_bytes().to_vec(), 0)?;
        let told = names.map_or(vec![], |names| value::to_bytes(&Nodes::of(&names)));
        let told: Nodes = value::from_bytes(0, &all.broadcast_bytes(told, 0)?)?;
        let Some(nodes) = told.ranks(all.size()) else { return Ok(None) };
        let each = nodes[0].len();
        let place = |ranks: &Vec<usize>| ranks.iter().position(|rank| *rank == all.rank());
        let own =
            nodes.iter().position(|ranks| place(ranks).is_some()).expect("every rank has a node");
        let place = place(&nodes[own]).expect("the node was found by this rank");
        let node = all.split(own, place)?.into();
        let across = all.split(place, own)?.into();
        let at_place = |place: usize| nodes.iter().map(move |ranks| ranks[place]);
        let by_place = (0..each).flat_map(at_place).collect();
        Ok(Some(Self { all, node, across, nodes, by_place }))
    }

    /// Replaces the groups inside this node and across all nodes, to count or watch their calls.
    pub fn watched(
        self,
        watch: impl Fn(&'static str, Arc<dyn Communicator>) -> Arc<dyn Communicator>,
    ) -> Self {
        Self { node: watch("node", self.node), across: watch("across", self.across), ..self }
    }

    /// The elements that the ranks at every place have together.
    fn of_places(&self, counts: &[usize]) -> Vec<usize> {
        let places = self.by_place.chunks(self.nodes.len());
        places.map(|ranks| ranks.iter().map(|rank| counts[*rank]).sum()).collect()
    }

    /// The elements of every rank at this rank's place.
    fn of_own_place(&self, counts: &[usize]) -> Vec<usize> {
        self.nodes.iter().map(|ranks| counts[ranks[self.node.rank()]]).collect()
    }

    /// Starts a sum in float32 over all ranks: inside the node, every rank adds up the parts of the
    /// ranks at its place in all nodes; then these add up theirs.
    fn summed(&self, tensor: &Tensor<1>, counts: &[usize]) -> Result<Pending> {
        check_dtype("reduce_scatter", self.rank(), tensor.dtype())?;
        let lengths = (counts.iter().sum(), tensor.dims()[0]);
        check_counts("reduce_scatter", self.rank(), self.size(), counts, lengths)?;
        let by_place = rearranged(tensor, &starts(counts), counts, &self.by_place);
        let inside = self.node.reduce_scatter_f32(by_place, &self.of_places(counts))?;
        let (across, counts) = (self.across.clone(), self.of_own_place(counts));
        Ok(Pending::new(inside.bytes(), move || {
            across.reduce_scatter_f32(inside.wait()?, &counts)?.wait()
        }))
    }
}

/// The parts of ranks in another order, for parts that begin at `starts`.
fn rearranged(
    tensor: &Tensor<1>,
    starts: &[usize],
    counts: &[usize],
    order: &[usize],
) -> Tensor<1> {
    let filled = order.iter().filter(|rank| counts[**rank] > 0);
    // Empty parts may be anywhere: few owners are often in order, and need no copy.
    if filled.clone().is_sorted_by_key(|rank| starts[*rank]) {
        return tensor.clone();
    }
    let part = |rank: &usize| flat::part(tensor, starts[*rank]..starts[*rank] + counts[*rank]);
    flat::join(filled.map(part).collect(), tensor.dtype(), &tensor.device())
}

impl Communicator for Hierarchy {
    fn engine(&self) -> &'static str {
        self.all.engine()
    }

    fn version(&self) -> String {
        format!("{}, {} nodes", self.all.version(), self.nodes.len())
    }

    fn rank(&self) -> usize {
        self.all.rank()
    }

    fn size(&self) -> usize {
        self.all.size()
    }

    fn nodes(&self) -> Vec<Vec<usize>> {
        self.nodes.clone()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        self.all.all_reduce(tensor, op)
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let (dtype, size) = (tensor.dtype(), self.size());
        let sum = self.summed(&tensor, counts)?;
        Ok(Pending::new(sum.bytes(), move || Ok(op.finish(sum.wait()?, size, dtype))))
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        self.summed(&tensor, counts)
    }

    /// Ranks at the same place in all nodes give each other theirs; then every node has all.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let across = self.across.all_gather(tensor, &self.of_own_place(counts))?;
        let (node, of_places) = (self.node.clone(), self.of_places(counts));
        let (by_place, counts) = (self.by_place.clone(), counts.to_vec());
        Ok(Pending::new(across.bytes(), move || {
            let gathered = node.all_gather(across.wait()?, &of_places)?.wait()?;
            let placed: Vec<usize> = by_place.iter().map(|rank| counts[*rank]).collect();
            let mut starts_of = vec![0; counts.len()];
            for (rank, start) in by_place.into_iter().zip(starts(&placed)) {
                starts_of[rank] = start;
            }
            let order: Vec<usize> = (0..counts.len()).collect();
            Ok(rearranged(&gathered, &starts_of, &counts, &order))
        }))
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        self.all.broadcast(tensor, root)
    }

    fn all_to_all(&self, tensor: Tensor<1>, send: &[usize], receive: &[usize]) -> Result<Pending> {
        self.all.all_to_all(tensor, send, receive)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<Pending> {
        self.all.gather(tensor, counts, root)
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.all.all_gather_bytes(bytes)
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.all.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        self.all.broadcast_bytes(bytes, root)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.all.first_bytes(bytes)
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.all.or_bytes(bytes)
    }

    fn set_busy(&self, busy: bool) {
        self.all.set_busy(busy);
    }

    fn split(&self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        self.all.split(color, key)
    }

    fn synchronize(&self) -> Result<()> {
        [&self.all, &self.node, &self.across].into_iter().try_for_each(|group| group.synchronize())
    }

    fn fail(&self, cause: &str) {
        self.all.fail(cause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_neighbours_are_told_in_few_bytes() {
        let names = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let nodes = |of: &[&str]| Nodes::of(&names(of) as &Vec<Vec<u8>>);
        assert_eq!(nodes(&["a", "a", "b", "b", "c", "c"]), Nodes::Neighbours(2));
        assert_eq!(nodes(&["a", "b", "a", "b"]), Nodes::Of(vec![0, 1, 0, 1]));
        for flat in [&["a", "a"][..], &["a", "b"], &["a", "a", "b"]] {
            assert_eq!(nodes(flat), Nodes::None);
        }
        let ranks = |nodes: Nodes, size| {
            let told: Nodes = value::from_bytes(0, &value::to_bytes(&nodes)).unwrap();
            told.ranks(size)
        };
        assert_eq!(ranks(Nodes::Neighbours(2), 4), Some(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(ranks(Nodes::Of(vec![0, 1, 0, 1]), 4), Some(vec![vec![0, 2], vec![1, 3]]));
        assert_eq!(ranks(Nodes::None, 4), None);
        assert!(value::to_bytes(&Nodes::Neighbours(8)).len() < 20);
    }
}
