//! A rank of a world whose other ranks are not there: a layout is planned on it, and nothing is
//! sent.

use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};

use crate::comm::{Engine, PairCounts, Pending, PendingParts, ReduceOp, World};
use crate::error::{Error, Result};

/// One of several ranks, the others of which agree to whatever it gives.
#[derive(Debug, Clone)]
pub struct Planned {
    rank: usize,
    ranks: usize,
    nodes: usize,
}

impl Planned {
    /// A rank's view of `ranks` ranks on `nodes` nodes.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for numbers of which no world consists.
    pub fn world(rank: usize, ranks: usize, nodes: usize, device: Device) -> Result<World> {
        if ranks == 0 {
            return Err(Error::setting("ranks", 0, "at least 1"));
        }
        if nodes == 0 || !ranks.is_multiple_of(nodes) {
            let value = format!("{nodes} for {ranks} ranks");
            return Err(Error::setting("nodes", value, "a divisor of the number of ranks"));
        }
        Ok(World::new(Self { rank, ranks, nodes }, device))
    }

    fn nothing_to_exchange<T>() -> Result<T> {
        Err(Error::usage(
            "a planned rank exchanges no tensors",
            "a forecast, which makes no step",
            "a collective",
            "make a world of ranks that run, as by `World::threads`",
        ))
    }
}

impl Engine for Planned {
    fn engine_name(&self) -> &'static str {
        "planned"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks
    }

    fn nodes(&self) -> Vec<Vec<usize>> {
        let each = self.ranks / self.nodes;
        (0..self.nodes).map(|node| (node * each..(node + 1) * each).collect()).collect()
    }

    fn communicators(&self) -> usize {
        1
    }

    fn has_exact_sums(&self) -> bool {
        true
    }

    fn all_reduce(&self, _: Tensor<1>, _: ReduceOp) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn reduce_scatter(&self, _: Tensor<1>, _: &[usize], _: ReduceOp) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn reduce_scatter_f32(&self, _: Tensor<1>, _: &[usize]) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn all_gather(&self, _: Tensor<1>, _: &[usize]) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn broadcast(&self, _: Tensor<1>, _: usize) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn all_to_all(&self, _: Tensor<1>, _: &PairCounts) -> Result<Pending> {
        Self::nothing_to_exchange()
    }

    fn gather(&self, _: Tensor<1>, _: &[usize], _: usize) -> Result<PendingParts> {
        Self::nothing_to_exchange()
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        // All ranks would say the same: what ranks agree on holds in the forecast.
        Ok(vec![bytes; self.ranks])
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        (root == self.rank).then(|| self.all_gather_bytes(bytes)).transpose()
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, _: usize) -> Result<Vec<u8>> {
        Ok(bytes)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        Ok(bytes.map(|bytes| (self.rank, bytes)))
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        Ok(bytes)
    }

    fn set_busy(&self, _: bool) {}

    fn set_busy_limit(&self, _: Duration) {}

    /// This rank alone, since a call has the color of no other rank. Plans take the ranks of a
    /// group from the mesh.
    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>> {
        // A group for which only its existence counts: sizes come from the mesh.
        Ok(Arc::new(Self { rank: 0, ranks: 1, nodes: 1 }))
    }

    fn fail(&self, _: &str) {}
}
