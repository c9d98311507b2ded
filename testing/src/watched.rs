//! An engine between the optimizer and another engine, which reports every call and counts the
//! bytes that it sends.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::tensor::Tensor;
use distmuon::Result;
use distmuon::comm::{Communicator, Engine, PairCounts, Pending, PendingParts, ReduceOp, World};

use crate::worlds;

/// A call, or the wait for its result.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// The rank that calls or waits.
    pub rank: usize,
    /// The number of the event among those of the rank.
    pub number: usize,
    /// The name of the collective.
    pub collective: &'static str,
    /// `true` for the wait, `false` for the call.
    pub waits: bool,
}

type Watch = Arc<dyn Fn(Event) -> Result<()> + Send + Sync>;
type Replace = Arc<dyn Fn(&'static str, Tensor<1>) -> Tensor<1> + Send + Sync>;

/// Bytes that a rank has sent to others, for every collective: as its engine counts them, or, if
/// ranks share memory, at least as many as a rank of a ring has to send.
pub type Traffic = Arc<Mutex<BTreeMap<&'static str, usize>>>;

#[derive(Clone)]
struct Watched {
    inner: Communicator,
    /// The rank in the world, of which this may be a group.
    rank: usize,
    events: Arc<AtomicUsize>,
    watch: Watch,
    replace: Replace,
    traffic: Traffic,
    values: Traffic,
}

impl Watched {
    fn over(inner: Communicator) -> Self {
        Self {
            rank: inner.rank(),
            inner,
            events: Arc::default(),
            watch: Arc::new(|_| Ok(())),
            replace: Arc::new(|_, result| result),
            traffic: Arc::default(),
            values: Arc::default(),
        }
    }
}

/// Returns the same rank of the same world, with a function that is called before every event.
pub fn watched(
    world: &World,
    watch: impl Fn(Event) -> Result<()> + Send + Sync + 'static,
) -> World {
    let engine = Watched { watch: Arc::new(watch), ..Watched::over(world.communicator()) };
    World::new(engine, world.device().clone())
}

/// Returns the same rank of the same world, with a function that replaces the results of
/// collectives, whose name it is given: of all that return one tensor, and so not of `gather`.
pub fn replaced(
    world: &World,
    replace: impl Fn(&'static str, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
) -> World {
    let engine = Watched { replace: Arc::new(replace), ..Watched::over(world.communicator()) };
    World::new(engine, world.device().clone())
}

/// Returns the same communicator, and the bytes that it sends.
pub fn counted(inner: Communicator) -> (Communicator, Traffic) {
    let engine = Watched::over(inner);
    let traffic = engine.traffic.clone();
    (engine.into(), traffic)
}

/// Returns the same rank of the same world, and the bytes of the values that it sends by calls
/// without tensors.
pub fn with_counted_values(world: &World) -> (World, Traffic) {
    let engine = Watched::over(world.communicator());
    let values = engine.values.clone();
    (World::new(engine, world.device().clone()), values)
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watched({:?})", self.inner)
    }
}

impl Watched {
    fn event(&self, collective: &'static str, waits: bool) -> Result<()> {
        let number = self.events.fetch_add(1, Ordering::SeqCst);
        (self.watch)(Event { rank: self.rank, number, collective, waits })
    }

    /// Adds the bytes that a part of a call sends: `ring_bytes`, unless the engine counts them.
    fn count<T>(&self, collective: &'static str, ring_bytes: usize, part: impl FnOnce() -> T) -> T {
        let sent = || worlds::sent(self.inner.engine_name());
        let before = sent();
        let outcome = part();
        let bytes = sent().zip(before).map_or(ring_bytes, |(now, before)| (now - before) as usize);
        let mut traffic = self.traffic.lock().expect("no holder of the lock panics");
        *traffic.entry(collective).or_default() += bytes;
        outcome
    }

    fn call(
        &self,
        collective: &'static str,
        ring_bytes: usize,
        start: impl FnOnce(&Communicator) -> Result<Pending>,
    ) -> Result<Pending> {
        let started = self.started(collective, ring_bytes, start)?;
        let replace = self.replace.clone();
        Ok(Pending::new(started.bytes(), move || Ok(replace(collective, started.wait()?))))
    }

    /// A call whose result stays as it is.
    fn started<T: 'static>(
        &self,
        collective: &'static str,
        ring_bytes: usize,
        start: impl FnOnce(&Communicator) -> Result<Pending<T>>,
    ) -> Result<Pending<T>> {
        self.event(collective, false)?;
        let pending = self.count(collective, ring_bytes, || start(&self.inner))?;
        let this = self.clone();
        Ok(Pending::new(pending.bytes(), move || {
            this.event(collective, true)?;
            this.count(collective, 0, || pending.wait())
        }))
    }

    /// A call without tensors, to which this rank adds a value.
    fn value(&self, collective: &'static str, bytes: usize) -> Result<()> {
        self.event(collective, false)?;
        *self
            .values
            .lock()
            .expect("no holder of the lock panics")
            .entry(collective)
            .or_default() += bytes;
        Ok(())
    }

    /// Returns the bytes that a ring sends of a buffer in one pass: `(N - 1) / N` of the buffer.
    fn pass(&self, tensor: &Tensor<1>) -> usize {
        let bytes = tensor.dims()[0] * tensor.dtype().size();
        bytes * (self.size() - 1) / self.size()
    }
}

impl Engine for Watched {
    fn engine_name(&self) -> &'static str {
        self.inner.engine_name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn nodes(&self) -> Vec<Vec<usize>> {
        self.inner.nodes()
    }

    fn communicators(&self) -> usize {
        self.inner.communicators()
    }

    fn has_exact_sums(&self) -> bool {
        self.inner.has_exact_sums()
    }

    fn all_reduce(&self, tensor: Tensor<1>, op: ReduceOp) -> Result<Pending> {
        let bytes = 2 * self.pass(&tensor);
        self.call("all_reduce", bytes, |inner| inner.all_reduce(tensor, op))
    }

    fn reduce_scatter(&self, tensor: Tensor<1>, counts: &[usize], op: ReduceOp) -> Result<Pending> {
        // At least the elements that other ranks reduce have to be sent.
        let bytes = (tensor.dims()[0] - counts[self.rank()]) * tensor.dtype().size();
        self.call("reduce_scatter", bytes, |inner| inner.reduce_scatter(tensor, counts, op))
    }

    fn reduce_scatter_f32(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        let bytes = (tensor.dims()[0] - counts[self.rank()]) * tensor.dtype().size();
        self.call("reduce_scatter", bytes, |inner| inner.reduce_scatter_f32(tensor, counts))
    }

    fn all_gather(&self, tensor: Tensor<1>, counts: &[usize]) -> Result<Pending> {
        // In a ring, a rank sends the number of elements that it receives: those of the other
        // ranks.
        let others = counts.iter().sum::<usize>() - tensor.dims()[0];
        let bytes = others * tensor.dtype().size();
        self.call("all_gather", bytes, |inner| inner.all_gather(tensor, counts))
    }

    fn broadcast(&self, tensor: Tensor<1>, root: usize) -> Result<Pending> {
        let bytes = self.pass(&tensor);
        self.call("broadcast", bytes, |inner| inner.broadcast(tensor, root))
    }

    fn all_to_all(&self, tensor: Tensor<1>, counts: &PairCounts) -> Result<Pending> {
        let bytes = (tensor.dims()[0] - counts.sent[self.rank()]) * tensor.dtype().size();
        self.call("all_to_all", bytes, |inner| inner.all_to_all(tensor, counts))
    }

    fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.value("all_gather_bytes", bytes.len())?;
        self.inner.all_gather_bytes(bytes)
    }

    fn gather(&self, tensor: Tensor<1>, counts: &[usize], root: usize) -> Result<PendingParts> {
        let bytes = if root == self.rank() { 0 } else { tensor.dims()[0] * tensor.dtype().size() };
        self.started("gather", bytes, |inner| inner.gather(tensor, counts, root))
    }

    fn gather_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Option<Vec<Vec<u8>>>> {
        self.value("gather_bytes", bytes.len())?;
        self.inner.gather_bytes(bytes, root)
    }

    fn broadcast_bytes(&self, bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
        self.value("broadcast_bytes", bytes.len())?;
        self.inner.broadcast_bytes(bytes, root)
    }

    fn first_bytes(&self, bytes: Option<Vec<u8>>) -> Result<Option<(usize, Vec<u8>)>> {
        self.value("first_bytes", bytes.as_ref().map_or(0, Vec::len))?;
        self.inner.first_bytes(bytes)
    }

    fn or_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.value("or_bytes", bytes.len())?;
        self.inner.or_bytes(bytes)
    }

    fn set_busy(&self, busy: bool) {
        self.inner.set_busy(busy);
    }

    fn set_busy_limit(&self, limit: Duration) {
        self.inner.set_busy_limit(limit);
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Engine>> {
        self.event("split", false)?;
        let inner = self.inner.split(color, key)?;
        Ok(Arc::new(Self { inner, ..self.clone() }))
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    fn fail(&self, cause: &str) {
        self.inner.fail(cause);
    }
}
