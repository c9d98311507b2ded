//! Shares of gradients and parameters that travel inside their node first, or last.
//!
//! Between nodes lies the slow link. A sum is taken inside every node before it crosses, and what has
//! crossed once is handed on inside: of a buffer of `B` bytes on `n` nodes of `d` ranks, a rank sends
//! `(n - 1) / (n d) B` between nodes, where a flat exchange of parts sends `(n - 1) / n B`. As in the
//! hybrid sharding of PyTorch's FSDP (<https://pytorch.org/docs/stable/fsdp.html>), but exact: with
//! sums in pairs and a power of two of ranks in a node, the order of additions is that of all ranks.

use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};

use super::{Communicator, Pending, ReduceOp, before, check_counts, check_dtype};
use crate::dist::flat;
use crate::error::Result;

/// An engine of nodes of equally many ranks, over any engine of all of them.
///
/// All ranks have to wait for results in the order of the calls: the second half of a call starts when
/// its first half is waited for.
#[derive(Debug)]
pub struct Hierarchy {
    all: Arc<dyn Communicator>,
    /// The ranks of the own node.
    node: Arc<dyn Communicator>,
    /// The ranks at the own place in every node.
    across: Arc<dyn Communicator>,
    /// The ranks of every node.
    nodes: Vec<Vec<usize>>,
}

impl Hierarchy {
    /// The engine of the same ranks, of which those with the same name are a node. Nothing where nodes
    /// are single ranks, or only one, or of different sizes.
    ///
    /// # Errors
    ///
    /// As every collective.
    pub fn over(all: Arc<dyn Communicator>, name: &str) -> Result<Option<Self>> {
        let names = all.all_gather_bytes(name.as_bytes().to_vec())?;
        let mut nodes: Vec<(&[u8], Vec<usize>)> = Vec::new();
        for (rank, name) in names.iter().enumerate() {
            match nodes.iter_mut().find(|(node, _)| node == name) {
                Some((_, ranks)) => ranks.push(rank),
                None => nodes.push((name, vec![rank])),
            }
        }
        let nodes: Vec<Vec<usize>> = nodes.into_iter().map(|(_, ranks)| ranks).collect();
        let each = nodes[0].len();
        if nodes.len() == 1 || each == 1 || nodes.iter().any(|ranks| ranks.len() != each) {
            return Ok(None);
        }
        let place = |ranks: &Vec<usize>| ranks.iter().position(|rank| *rank == all.rank());
        let own =
            nodes.iter().position(|ranks| place(ranks).is_some()).expect("every rank has a node");
        let place = place(&nodes[own]).expect("it is there");
        let node = all.split(own, place)?.into();
        let across = all.split(place, own)?.into();
        Ok(Some(Self { all, node, across, nodes }))
    }

    /// The groups inside the own node and across all nodes, to be counted or watched.
    pub fn watched(
        self,
        watch: impl Fn(&'static str, Arc<dyn Communicator>) -> Arc<dyn Communicator>,
    ) -> Self {
        Self { node: watch("node", self.node), across: watch("across", self.across), ..self }
    }

    /// All ranks: those at the first place of every node, then those at the second, and so on.
    fn by_place(&self) -> impl Iterator<Item = usize> {
        let places = 0..self.nodes[0].len();
        places.flat_map(|place| self.nodes.iter().map(move |ranks| ranks[place]))
    }

    /// What the ranks at every place have together.
    fn of_places(&self, counts: &[usize]) -> Vec<usize> {
        let of_ranks: Vec<usize> = self.by_place().map(|rank| counts[rank]).collect();
        of_ranks.chunks(self.nodes.len()).map(|of_place| of_place.iter().sum()).collect()
    }

    /// What the ranks at the own place have.
    fn of_own_place(&self, counts: &[usize]) -> Vec<usize> {
        self.nodes.iter().map(|ranks| counts[ranks[self.node.rank()]]).collect()
    }
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

    /// Inside the node, every rank adds up what goes to the ranks at its place in all nodes; then these
    /// add up theirs.
    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        check_dtype("reduce_scatter", self.rank(), tensor.dtype())?;
        let lengths = (counts.iter().sum(), tensor.dims()[0]);
        check_counts("reduce_scatter", self.rank(), self.size(), counts, lengths)?;
        let (dtype, size, device) = (tensor.dtype(), self.size(), tensor.device());
        let parts = self.by_place().map(|rank| {
            let start = before(counts, rank);
            flat::part(&tensor, start..start + counts[rank])
        });
        let by_place = flat::join(parts.collect(), dtype, &device).cast(FloatDType::F32);
        let inside = self.node.reduce_scatter(by_place, &self.of_places(counts), ReduceOp::Sum)?;
        let (across, counts) = (self.across.clone(), self.of_own_place(counts));
        Ok(Pending::new(move || {
            let sum = across.reduce_scatter(inside.wait()?, &counts, ReduceOp::Sum)?.wait()?;
            Ok(op.finish(sum, size, dtype))
        }))
    }

    /// Ranks at the same place in all nodes give each other theirs; then every node has all.
    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let own = counts.get(self.rank()).copied().unwrap_or_default();
        check_counts("all_gather", self.rank(), self.size(), counts, (own, tensor.dims()[0]))?;
        let (dtype, device) = (tensor.dtype(), tensor.device());
        let across = self.across.all_gather(tensor, &self.of_own_place(counts))?;
        let (node, of_places) = (self.node.clone(), self.of_places(counts));
        let order: Vec<usize> = self.by_place().collect();
        let counts = counts.to_vec();
        Ok(Pending::new(move || {
            let by_place = node.all_gather(across.wait()?, &of_places)?.wait()?;
            let mut parts = vec![None; counts.len()];
            let mut start = 0;
            for rank in order {
                parts[rank] = Some(flat::part(&by_place, start..start + counts[rank]));
                start += counts[rank];
            }
            Ok(flat::join(parts.into_iter().flatten().collect(), dtype, &device))
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
