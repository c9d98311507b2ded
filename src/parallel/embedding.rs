//! An embedding of which every rank of a group has some of the rows.

use std::collections::BTreeSet;

use burn::module::Module;
use burn::nn::Embedding;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::exchange;
use crate::comm::{Communicator, PairCounts};
use crate::error::{Error, Result};
use crate::flat;

/// The largest number of rows of a rank: their indices are sent as float32, which has all integers
/// up to it.
const MAX_ROWS: usize = 1 << 24;

/// An embedding whose rows are divided among the ranks of an axis of data.
///
/// A rank sends the tokens that it looks up to the ranks that have their rows, and gets the rows.
/// The gradients of rows return in the backward pass. For a batch, a rank sends and receives each
/// different token and its row once in each pass, where a whole table would be gathered, and its
/// gradient reduced. The table is cut along its first dimension:
///
/// ```
/// use burn::module::Module;
/// use burn::nn::EmbeddingConfig;
/// use burn::tensor::{Int, Tensor};
/// use distmuon::World;
/// use distmuon::distributed::{Layout, Mesh, Place};
/// use distmuon::parallel::RowEmbedding;
///
/// #[derive(Module, Debug)]
/// struct Model {
///     tokens: RowEmbedding,
/// }
///
/// World::threads(World::devices(2), |world| {
///     let mesh = Mesh::flat(&world);
///     let layout = Layout::new(&mesh).with_place(Place::shard(r"^tokens\.", "dp", 0));
///     let whole = EmbeddingConfig::new(9, 4).init(world.device());
///     let model = Model { tokens: RowEmbedding::new(whole, world.comm()) };
///     let model = layout.shard(model)?; // 4 rows on rank 0, 5 on rank 1
///     let ids = Tensor::<2, Int>::from_data([[8, 0, 8]], world.device());
///     assert_eq!(model.tokens.forward(ids).dims(), [1, 3, 4]);
///     Ok::<_, distmuon::Error>(())
/// })?;
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Module, Debug)]
pub struct RowEmbedding {
    /// The rows of this rank.
    pub embedding: Embedding,
    /// The number of rows of all ranks.
    #[module(skip)]
    count: usize,
    #[module(skip)]
    group: Communicator,
}

/// The rows that this rank looks up.
struct Lookup {
    /// Each once, in ascending order, and hence in the order of the ranks that have them.
    rows: Vec<usize>,
    /// The index of every token's row among them.
    positions: Vec<i32>,
}

impl RowEmbedding {
    /// Returns the layer of a whole embedding. [`Layout::shard`](crate::distributed::Layout::shard)
    /// divides it, as in the example above.
    ///
    /// # Panics
    ///
    /// If a rank has more than 2^24 rows.
    pub fn new(embedding: Embedding, group: &Communicator) -> Self {
        let [rows, _] = embedding.weight.shape().dims();
        assert!(
            rows.div_ceil(group.size()) <= MAX_ROWS,
            "rows of an embedding: expected at most {MAX_ROWS} for each of {} ranks, got {rows}; \
             divide it among more ranks",
            group.size()
        );
        Self { embedding, count: rows, group: group.clone() }
    }

    /// Returns the rows of some tokens of this rank, `[batch, length]` to
    /// `[batch, length, columns]`. All ranks of the group make this call, with at least one token
    /// each; the numbers of tokens may differ.
    ///
    /// The tokens are read by the host, which waits for the work on the device before them. For a
    /// token without a row, and for a table that is not cut, the result is NaN, and the next
    /// collective of any rank returns an error.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, length] = tokens.dims();
        let table = self.embedding.weight.val();
        let ([_, columns], device, dtype) = (table.dims(), table.device(), table.dtype());
        let tokens = tokens.into_data().iter::<i64>().collect::<Vec<_>>();
        let rows = self.rows(table, &tokens).unwrap_or_else(|error| {
            self.group.fail(&error.to_string());
            Tensor::full([tokens.len(), columns], f32::NAN, (&device, dtype))
        });
        rows.reshape([batch, length, columns])
    }

    /// The rows of tokens, in their order.
    fn rows(&self, table: Tensor<2>, tokens: &[i64]) -> Result<Tensor<2>> {
        let ([held, _], device) = (table.dims(), table.device());
        self.check(held)?;
        let Lookup { rows, positions } = self.lookup(tokens)?;
        let (counts, asked) = self.ask(&rows, &device)?;
        let rows = exchange(table.select(0, asked), &counts.back(), &self.group);
        Ok(rows.select(0, Tensor::from_data(TensorData::from(&*positions), &device)))
    }

    /// Fails for a table that does not have the rows of this rank.
    fn check(&self, held: usize) -> Result<()> {
        match self.rows_of(self.group.rank()).len() {
            rows if rows == held => Ok(()),
            rows => Err(self.error(
                format!("its table has other rows: expected {rows} of {}, got {held}", self.count),
                "cut the table with `Place::shard(pattern, axis, 0)`, along the axis of its group; \
                 give a whole table a group of one rank",
            )),
        }
    }

    fn error(&self, reason: String, remedy: &'static str) -> Error {
        let rank = self.group.rank();
        Error::Collective { collective: "RowEmbedding", rank, reason, remedy }
    }

    fn lookup(&self, tokens: &[i64]) -> Result<Lookup> {
        let row = |token: &i64| {
            let row = usize::try_from(*token).ok().filter(|row| *row < self.count);
            row.ok_or_else(|| {
                self.error(
                    format!("a token has no row: expected 0 to {}, got {token}", self.count - 1),
                    "make the embedding with a row for every token",
                )
            })
        };
        let of_tokens = tokens.iter().map(row).collect::<Result<Vec<_>>>()?;
        // This rank always asks itself for its first row: a table without a row in use would have
        // no gradient, and make fewer calls in the backward pass.
        let first = self.rows_of(self.group.rank()).start;
        // Each row once, in ascending order, so the rows of one rank are neighbours.
        let wanted: BTreeSet<usize> = of_tokens.iter().copied().chain([first]).collect();
        let rows: Vec<usize> = wanted.into_iter().collect();
        let position = |row| rows.partition_point(|other| *other < row) as i32;
        let positions = of_tokens.into_iter().map(position).collect();
        Ok(Lookup { rows, positions })
    }

    /// The rows that a rank has.
    fn rows_of(&self, rank: usize) -> std::ops::Range<usize> {
        flat::share(self.count, rank, self.group.size())
    }

    /// Exchanges requests for rows. Returns the number of rows that each pair of ranks exchanges,
    /// and the indices of this rank's rows that the ranks requested.
    fn ask(&self, rows: &[usize], device: &Device) -> Result<(PairCounts, Tensor<1, Int>)> {
        let of_rank = |rank: usize| {
            let held = self.rows_of(rank);
            let [first, end] =
                [held.start, held.end].map(|row| rows.partition_point(|other| *other < row));
            // Collectives move floats: indices below 2^24 are exact.
            rows[first..end].iter().map(move |row| (row - held.start) as f32)
        };
        let ranks = 0..self.group.size();
        let wanted: Vec<usize> = ranks.clone().map(|rank| of_rank(rank).len()).collect();
        let counts = self.group.pair_counts(&wanted, device)?;
        let indices: Vec<f32> = ranks.flat_map(of_rank).collect();
        let indices = TensorData::from(&*indices);
        let indices = Tensor::<1>::from_data(indices, (device, DType::F32)).without_autodiff();
        let asked = self.group.all_to_all(indices, &counts)?.wait()?;
        Ok((counts, asked.int().to_device(device)))
    }
}
