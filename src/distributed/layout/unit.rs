//! An owned parameter: the conversion between the whole, as modules use it, and the parts of ranks.

use burn::module::ParamId;
use burn::tensor::{DType, Device, Tensor};

use crate::blocks::Blocks;
use crate::distributed::plan::{Bucket, Run};
use crate::slices;

/// A parameter that is divided among ranks between steps.
#[derive(Debug)]
pub struct Unit {
    /// Its index among the owned parameters.
    pub index: usize,
    pub path: String,
    /// Identity of this rank's part.
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// The blocks that are trained each as a parameter of its own.
    blocks: Blocks,
    /// The parts of all ranks, one after the other. Its parameters are the blocks.
    bucket: Bucket,
    rank: usize,
}

/// Elements of one block, in the part of a rank.
pub struct BlockPart {
    pub block: usize,
    /// The first of the elements, in the block.
    pub start: usize,
    pub values: Tensor<1>,
}

impl Unit {
    pub fn new(
        index: usize,
        (path, id): (&str, ParamId),
        (shape, dtype): (&[usize], DType),
        blocks: Blocks,
        bucket: Bucket,
        rank: usize,
    ) -> Self {
        let (path, shape) = (path.to_owned(), shape.to_vec());
        Self { index, path, id, shape, dtype, blocks, bucket, rank }
    }

    /// Elements of every rank's part.
    pub fn counts(&self) -> &[usize] {
        &self.bucket.counts
    }

    /// Elements of this rank's part.
    pub fn count(&self) -> usize {
        self.bucket.counts[self.rank]
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> usize {
        self.bucket.elements() * self.dtype.size()
    }

    /// NaN in place of the whole, flat.
    pub fn nan(&self, device: &Device) -> Tensor<1> {
        let elements: usize = self.shape.iter().product();
        Tensor::full([elements], f32::NAN, (device, self.dtype))
    }

    /// The whole, flat, from the parts of all ranks one after the other.
    pub fn whole(&self, parts: &Tensor<1>) -> Tensor<1> {
        let block = |pieces: &Vec<(usize, usize, usize)>| {
            let pieces =
                pieces.iter().map(|(_, start, len)| slices::slice(parts, *start..start + len));
            slices::concat(pieces.collect(), parts.dtype(), &parts.device())
        };
        self.blocks.join(self.bucket.by_parameter().values().map(block).collect())
    }

    /// The parts of all ranks one after the other, from the whole.
    pub fn parts(&self, whole: Tensor<1>) -> Tensor<1> {
        let (dtype, device) = (whole.dtype(), whole.device());
        let blocks = self.blocks.cut(whole);
        let mut pieces = vec![];
        for (block, elements, padding) in self.bucket.overlaps(0..self.bucket.elements()) {
            pieces.push(slices::slice(&blocks[block], elements));
            pieces.extend((padding > 0).then(|| slices::zeros(padding, dtype, &device)));
        }
        slices::concat(pieces, dtype, &device)
    }

    /// This rank's part of the whole, in memory of its own. One element that nothing reads where
    /// the rank has none, since a parameter has at least one.
    pub fn part(&self, whole: Tensor<1>) -> Tensor<1> {
        let (dtype, device) = (whole.dtype(), whole.device());
        match self.count() {
            0 => Tensor::zeros([1], (&device, dtype)),
            _ => slices::slice(&self.parts(whole), self.bucket.shard_range(self.rank)),
        }
    }

    fn runs(&self) -> Vec<Run> {
        self.bucket.runs(self.rank)
    }

    /// The blocks of this rank's part, or of its gradient.
    pub fn cut(&self, part: &Tensor<1>) -> Vec<BlockPart> {
        let block = |Run { parameter: block, elements, range }| {
            let values = slices::slice(part, range);
            BlockPart { block, start: elements.start, values }
        };
        self.runs().into_iter().map(block).collect()
    }

    /// This rank's part from those of its blocks, the reverse of [`cut`](Self::cut).
    pub fn join(&self, mut values: impl FnMut(usize) -> Tensor<1>, device: &Device) -> Tensor<1> {
        let runs = self.runs();
        if runs.is_empty() {
            return Tensor::zeros([self.count().max(1)], (device, self.dtype));
        }
        let firsts: Vec<usize> = runs.iter().map(|run| run.range.start).collect();
        let values = runs.iter().map(|run| values(run.parameter)).collect();
        slices::place(values, &firsts, self.count())
    }
}
