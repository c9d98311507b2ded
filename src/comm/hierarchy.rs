//! Sums that are taken inside nodes before they are taken between them.
//!
//! The link between nodes is the slow one. A sum is taken inside every node before it crosses that
//! link, and what has crossed once is distributed inside the node. Of a buffer of `B` bytes on `n`
//! nodes of `d` ranks, a rank sends `(n - 1) / (n d) B` between nodes, where a flat exchange of
//! parts sends `(n - 1) / n B`. PyTorch's FSDP does the same in its hybrid sharding
//! (<https://pytorch.org/docs/stable/fsdp.html>), but here the result is exact: if neighbouring
//! ranks are a node, and their number is a power of two, additions have the same order as without
//! nodes. Half precision is sent unchanged inside a node, and as float32 between nodes, since the
//! sums of nodes are not rounded.
//!
//! The second half of a call starts when the first half is waited for, not before. The second half
//! needs the result of the first on the device, and a device orders by streams. Started earlier,
//! the second half would make all later work on the device wait for the first half, such as updates
//! of parameters. With several buckets in flight, the halves of different buckets overlap.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::counts::offsets;
use super::{Communicator, Engine, PairCounts, Pending, PendingParts, ReduceOp, value_bytes};
use crate::error::Result;
use crate::flat;

/// An engine that takes sums inside nodes before it takes them between nodes. It wraps any engine
/// of all ranks. All nodes have the same number of ranks.
///
/// Of a buffer of `B` bytes on `n` nodes of `d` ranks, a rank sends `(n - 1) / (n d) B` between
/// nodes, instead of `(n - 1) / n B` without nodes.
#[derive(Debug)]
pub struct Hierarchy {
    all: Communicator,
    /// The ranks of this node.
    node: Communicator,
    /// The ranks with this rank's local index in every node.
    across: Communicator,
    /// The ranks of every node.
    nodes: Vec<Vec<usize>>,
    /// All ranks: the first of every node, then the second of every node, and so on.
    by_local_index: Vec<usize>,
    /// The index of this node.
    node_index: usize,
}

/// The nodes of all ranks, as rank 0 sends them to the others.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Nodes {
    /// Nodes of one rank, only one node, or nodes of different sizes.
    None,
    /// This number of neighbouring ranks is a node. The message is short for any number of ranks.
    Neighbours(usize),
    /// The node of every rank.
    Of(Vec<usize>),
}

impl Nodes {
    /// Numbers the nodes in the order of their first ranks. Ranks with the same name are a node.
    fn from_names(names: &[Vec<u8>]) -> Self {
        let mut numbers = HashMap::new();
        let node = |name| {
            let next = numbers.len();
            *numbers.entry(name).or_insert(next)
        };
        let nodes: Vec<usize> = names.iter().map(node).collect();
        let mut sizes = vec![0; numbers.len()];
        nodes.iter().for_each(|node| sizes[*node] += 1);
        let size = sizes[0];
        // One node, or nodes of one rank, have no link to spare. With different sizes, some local
        // index would not exist on every node.
        if sizes.len() == 1 || size == 1 || sizes.iter().any(|other| *other != size) {
            return Self::None;
        }
        match nodes.iter().enumerate().all(|(rank, node)| *node == rank / size) {
            true => Self::Neighbours(size),
            false => Self::Of(nodes),
        }
    }

    /// Returns the ranks of every node, of `size` ranks in all.
    fn ranks(&self, size: usize) -> Option<Vec<Vec<usize>>> {
        let node = |rank: usize| match self {
            Self::None => None,
            Self::Neighbours(node_size) => Some(rank / node_size),
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
    /// Makes the engine of the same ranks, where the ranks that give the same name are a node.
    /// Returns `None` for nodes of single ranks, for only one node, and for nodes of different
    /// sizes. All ranks make this call.
    ///
    /// # Errors
    ///
    /// As every collective (see [`Communicator`]).
    pub fn over(all: Communicator, name: &str) -> Result<Option<Self>> {
        // Through rank 0, so that the bytes sent to each rank do not grow with the number of ranks.
        let names = all.gather_bytes(name.as_bytes().to_vec(), 0)?;
        let bytes = names.map_or(vec![], |names| value_bytes::to_bytes(&Nodes::from_names(&names)));
        let nodes: Nodes = value_bytes::from_bytes(0, &all.broadcast_bytes(bytes, 0)?)?;
        let Some(nodes) = nodes.ranks(all.size()) else { return Ok(None) };
        let node_size = nodes[0].len();
        let find = |ranks: &Vec<usize>| ranks.iter().position(|rank| *rank == all.rank());
        let (node_index, local_index) = nodes
            .iter()
            .enumerate()
            .find_map(|(node, ranks)| Some((node, find(ranks)?)))
            .expect("every rank is in a node");
        // Two groups of every rank: its node, and the ranks of its local index on all nodes.
        let node = all.split(node_index, local_index)?;
        let across = all.split(local_index, node_index)?;
        let by_local_index = (0..node_size)
            .flat_map(|local_index| nodes.iter().map(move |ranks| ranks[local_index]))
            .collect();
        Ok(Some(Self { all, node, across, nodes, by_local_index, node_index }))
    }

    /// Replaces the communicators inside this node and across nodes by those that `watch` returns,
    /// to count or log their calls. `watch` is given the name, `node` or `across`, and the
    /// communicator.
    pub fn watched(self, watch: impl Fn(&'static str, Communicator) -> Communicator) -> Self {
        Self { node: watch("node", self.node), across: watch("across", self.across), ..self }
    }

    /// Returns, for every local index, the number of elements of the ranks with that local index.
    fn counts_by_local_index(&self, counts: &[usize]) -> Vec<usize> {
        let same_index = self.by_local_index.chunks(self.nodes.len());
        same_index.map(|ranks| ranks.iter().map(|rank| counts[*rank]).sum()).collect()
    }

    /// Returns the number of elements of every rank in the group across nodes.
    fn counts_across(&self, counts: &[usize]) -> Vec<usize> {
        self.nodes.iter().map(|ranks| counts[ranks[self.node.rank()]]).collect()
    }

    /// Starts a sum in float32 over all ranks. Inside a node, every rank adds up the parts of the
    /// ranks with its local index in all nodes. Then these ranks add up their sums.
    fn start_sum(&self, tensor: &Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let by_local_index = reordered(tensor, &offsets(counts), counts, &self.by_local_index);
        let node_counts = self.counts_by_local_index(counts);
        let inside = self.node.reduce_scatter_f32(by_local_index, &node_counts)?;
        // The second half is started by the wait for the first: see the module.
        let across = self.across.clone();
        let counts = self.counts_across(counts);
        Ok(Pending::new(inside.bytes(), move || {
            across.reduce_scatter_f32(inside.wait()?, &counts)?.wait()
        }))
    }
}

/// Returns the parts of ranks in another order. The part of rank `r` begins at `offsets[r]`.
fn reordered(
    tensor: &Tensor<1>,
    offsets: &[usize],
    counts: &[usize],
    order: &[usize],
) -> Tensor<1> {
    let filled = order.iter().filter(|rank| counts[**rank] > 0);
    // Empty parts may be anywhere: the parts of few owners are often in order, and need no copy.
    if filled.clone().is_sorted_by_key(|rank| offsets[*rank]) {
        return tensor.clone();
    }
    let part = |rank: &usize| {
        let start = offsets[*rank];
        flat::slice(tensor, start..start + counts[*rank])
    };
    flat::concat(filled.map(part).collect(), tensor.dtype(), &tensor.device())
}

impl Engine for Hierarchy {
    fn engine_name(&self) -> &'static str {
        self.all.engine_name()
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

    fn communicators(&self) -> usize {
        self.all.communicators()
    }

    // Only the calls of buckets go by nodes: the others are small, or rare.
    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        self.all.all_reduce(tensor, op)
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        let dtype = tensor.dtype();
        let size = self.size();
        let sum = self.start_sum(&tensor, counts)?;
        Ok(Pending::new(sum.bytes(), move || Ok(op.finish(sum.wait()?, size, dtype))))
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        self.start_sum(&tensor, counts)
    }

    /// Ranks with the same local index in all nodes exchange their parts. Then the ranks of every
    /// node exchange what they have received.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let across = self.across.all_gather(tensor, &self.counts_across(counts))?;
        let node = self.node.clone();
        let node_counts = self.counts_by_local_index(counts);
        let by_local_index = self.by_local_index.clone();
        let counts = counts.to_vec();
        Ok(Pending::new(across.bytes(), move || {
            let gathered = node.all_gather(across.wait()?, &node_counts)?.wait()?;
            let gathered_counts: Vec<usize> =
                by_local_index.iter().map(|rank| counts[*rank]).collect();
            // The parts arrived in the order of local indices: note the start of each rank's part.
            let mut rank_offsets = vec![0; counts.len()];
            for (rank, offset) in by_local_index.into_iter().zip(offsets(&gathered_counts)) {
                rank_offsets[rank] = offset;
            }
            let by_rank: Vec<usize> = (0..counts.len()).collect();
            Ok(reordered(&gathered, &rank_offsets, &counts, &by_rank))
        }))
    }

    fn has_exact_sums(&self) -> bool {
        self.all.has_exact_sums()
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        self.all.broadcast(tensor, root)
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        self.all.all_to_all(tensor, counts)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
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

    fn set_busy_limit(&self, limit: Duration) {
        self.all.set_busy_limit(limit);
    }

    /// The ranks of a group that are in one node remain so.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>> {
        let group = self.all.split(color, key)?;
        // A group may lie on fewer nodes, or on one. Their names are known here: no host is asked
        // again.
        Ok(match Self::over(group.clone(), &self.node_index.to_string())? {
            Some(hierarchy) => Arc::new(hierarchy),
            None => group.into_engine(),
        })
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
    fn nodes_of_neighbouring_ranks_are_sent_in_few_bytes() {
        let nodes = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| name.as_bytes().to_vec()).collect();
            Nodes::from_names(&names)
        };
        assert_eq!(nodes(&["a", "a", "b", "b", "c", "c"]), Nodes::Neighbours(2));
        assert_eq!(nodes(&["a", "b", "a", "b"]), Nodes::Of(vec![0, 1, 0, 1]));
        for flat in [&["a", "a"][..], &["a", "b"], &["a", "a", "b"]] {
            assert_eq!(nodes(flat), Nodes::None);
        }
        let ranks = |nodes: Nodes, size| {
            let received: Nodes =
                value_bytes::from_bytes(0, &value_bytes::to_bytes(&nodes)).unwrap();
            received.ranks(size)
        };
        assert_eq!(ranks(Nodes::Neighbours(2), 4), Some(vec![vec![0, 1], vec![2, 3]]));
        assert_eq!(ranks(Nodes::Of(vec![0, 1, 0, 1]), 4), Some(vec![vec![0, 2], vec![1, 3]]));
        assert_eq!(ranks(Nodes::None, 4), None);
        assert!(value_bytes::to_bytes(&Nodes::Neighbours(8)).len() < 20);
    }
}
