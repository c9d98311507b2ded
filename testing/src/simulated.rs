//! A rank among many that are not there: what a rank sends and holds, for any number of ranks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::tensor::Tensor;
use distmuon::Result;
use distmuon::comm::{Engine, PairCounts, Pending, PendingParts, ReduceOp};

/// Rank 0 of a group whose other ranks send zeros, and nothing where they may choose.
#[derive(Debug, Clone)]
pub struct Simulated {
    size: usize,
    /// Elements and counts of all calls.
    numbers: Arc<AtomicUsize>,
}

impl Simulated {
    /// Returns rank 0 of `size` ranks.
    pub fn new(size: usize) -> Self {
        Self { size, numbers: Arc::default() }
    }

    /// Returns the elements that were passed to all calls so far, and their counts.
    pub fn numbers(&self) -> usize {
        self.numbers.load(Ordering::SeqCst)
    }

    fn call(&self, tensor: &Tensor<1>, counts: usize, received: usize) -> Pending {
        self.numbers.fetch_add(tensor.dims()[0] + counts + received, Ordering::SeqCst);
        Pending::ready(Tensor::zeros([received], (&tensor.device(), tensor.dtype())))
    }
}

impl Engine for Simulated {
    fn engine_name(&self) -> &'static str {
        "simulated"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.size
    }

    fn communicators(&self) -> usize {
        1
    }

    fn has_exact_sums(&self) -> bool {
        true
    }

    fn all_reduce(&self, tensor: Tensor<1>, _: ReduceOp) -> Result<Pending> {
        Ok(self.call(&tensor, 0, tensor.dims()[0]))
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], _: ReduceOp) -> Result<Pending> {
        Ok(self.call(&tensor, counts.len(), counts[0]))
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        Ok(self.call(&tensor, counts.len(), counts[0]))
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        Ok(self.call(&tensor, counts.len(), counts.iter().sum()))
    }

    fn broadcast(&self, tensor: Tensor<1>, _: usize) -> Result<Pending> {
        Ok(self.call(&tensor, 0, tensor.dims()[0]))
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        let PairCounts { sent, received } = counts;
        Ok(self.call(&tensor, sent.len() + received.len(), received.iter().sum()))
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let received = if root == 0 { counts.iter().sum() } else { 0 };
        let gathered = self.call(&tensor, counts.len(), received).wait()?;
        Ok(Pending::new(0, move || Ok(vec![gathered])))
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.numbers.fetch_add(bytes.len() * self.size, Ordering::SeqCst);
        Ok(vec![bytes; self.size])
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        (root == 0).then(|| self.all_gather_bytes(bytes)).transpose()
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, _: usize) -> Result<Vec<u8>> {
        self.numbers.fetch_add(bytes.len(), Ordering::SeqCst);
        Ok(bytes)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        Ok(bytes.map(|bytes| (0, bytes)))
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        Ok(bytes)
    }

    fn set_busy(&self, _: bool) {}

    fn set_busy_limit(&self, _: Duration) {}

    /// No other rank tells its color: this one is alone.
    fn split(&self, _: usize, _: usize) -> Result<Arc<dyn Engine>> {
        Ok(Arc::new(Self { size: 1, ..self.clone() }))
    }

    fn fail(&self, cause: &str) {
        panic!("{cause}");
    }
}
