//! Steps of ranks that have different numbers of batches.

use std::iter::Fuse;

use super::World;
use crate::error::{Error, Result};

/// The batches of a rank for the steps of all ranks, from [`World::join`].
///
/// ```
/// use distmuon::comm::{Join, Joined, World};
///
/// /// The number of batches of this rank that count.
/// fn count(mut batches: Join<impl Iterator<Item = usize>>) -> distmuon::Result<usize> {
///     let mut count = 0;
///     while let Some(batch) = batches.next_batch()? {
///         count += usize::from(matches!(batch, Joined::Own(_)));
///     }
///     Ok(count)
/// }
///
/// let counts =
///     World::threads(World::devices(2), |world| count(world.join(0..3 + world.rank())))?;
/// assert_eq!(counts, [3, 4]); // both ranks took four steps
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug)]
pub struct Join<I: Iterator> {
    world: World,
    batches: Fuse<I>,
    last: Option<I::Item>,
}

/// A batch for a step that all ranks take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Joined<B> {
    /// The next batch of this rank.
    Own(B),
    /// The last batch of this rank once more, since other ranks have further ones. Its gradients
    /// must not count.
    Repeated(B),
}

impl World {
    /// Lets ranks with fewer batches take part in the steps of the others, until all have run out.
    /// All ranks make this call.
    ///
    /// A rank that has run out gets its last batch again. With a
    /// [`Layout`](crate::distributed::Layout), it passes the loss of that batch to
    /// [`drain`](crate::distributed::Layout::drain) in place of
    /// [`backward`](crate::distributed::Layout::backward), since passes are collective calls.
    /// Without one, it needs no pass, and steps with `GradientsParams::new()`. A step divides the
    /// sum of gradients by the number of all ranks.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Tensor;
    /// use distmuon::comm::{Joined, World};
    /// use distmuon::distributed::Layout;
    /// use distmuon::DistMuonConfig;
    ///
    /// World::launch(2, |world| {
    ///     let layout = Layout::from(&world).owned("dp");
    ///     let model = LinearConfig::new(64, 64).init(world.device());
    ///     let (mut model, mut optim) = DistMuonConfig::new().start(&layout, model)?;
    ///     let batch = || Tensor::<2>::ones([4, 64], world.device());
    ///     let mut batches = world.join((0..3 + world.rank()).map(|_| batch()));
    ///     while let Some(batch) = batches.next_batch()? {
    ///         let grads = match batch {
    ///             Joined::Own(x) => optim.backward(&model.forward(x).square().mean(), &model)?,
    ///             Joined::Repeated(x) => layout.drain(&model.forward(x).square().mean(), &model)?,
    ///         };
    ///         model = optim.step(1e-3, model, grads)?;
    ///     }
    ///     Ok::<_, distmuon::Error>(())
    /// })?;
    /// # Ok::<(), distmuon::Error>(())
    /// ```
    pub fn join<I>(&self, batches: I) -> Join<I::IntoIter>
    where
        I: IntoIterator,
    {
        // Asked again after its end, an iterator may go on: `fuse` keeps it at the end.
        Join { world: self.clone(), batches: batches.into_iter().fuse(), last: None }
    }
}

impl<I> Join<I>
where
    I: Iterator,
    I::Item: Clone,
{
    /// Returns the batch for the next step, or `None` on all ranks when all have run out. All ranks
    /// make this call, which sends a small message.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] on a rank that has no batch at all, while others have some; as every
    /// collective (see [`Communicator`](super::Communicator)).
    pub fn next_batch(&mut self) -> Result<Option<Joined<I::Item>>> {
        let next = self.batches.next();
        // One small message for each step, also on ranks that have run out: nobody knows the number
        // before.
        if !self.world.any(next.is_some())? {
            return Ok(None);
        }
        if let Some(batch) = next {
            self.last = Some(batch.clone());
            return Ok(Some(Joined::Own(batch)));
        }
        match &self.last {
            Some(last) => Ok(Some(Joined::Repeated(last.clone()))),
            None => {
                let error = Error::usage(
                    "a rank has no batch",
                    "at least one on every rank, which it repeats while others go on",
                    format!("none on rank {}", self.world.rank()),
                    "divide the items anew",
                );
                self.world.comm().fail(&error.to_string());
                Err(error)
            }
        }
    }
}
