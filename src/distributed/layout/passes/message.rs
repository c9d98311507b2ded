//! Several parameters in one call.

use burn::tensor::Tensor;

use crate::distributed::plan::Counts;
use crate::flat;

/// The elements of several tensors that every rank gives or gets in one call. In the buffer, a
/// rank's part of each tensor follows its part of the one before, and all parts of a rank follow
/// the rank before.
#[derive(Debug)]
pub struct Message {
    /// For every tensor, the elements of every rank.
    counts: Vec<Vec<usize>>,
}

impl Message {
    /// The message of tensors whose parts have these elements. There is at least one.
    pub fn of<'a>(counts: impl IntoIterator<Item = &'a Counts>) -> Self {
        Self { counts: counts.into_iter().map(Counts::to_vec).collect() }
    }

    /// The elements of every rank.
    pub fn totals(&self) -> Vec<usize> {
        let ranks = 0..self.counts[0].len();
        ranks.map(|rank| self.of_rank(rank).sum()).collect()
    }

    /// A rank's elements of every tensor.
    fn of_rank(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.counts.iter().map(move |counts| counts[rank])
    }

    /// Returns `true` if every rank has as many elements of a tensor as any other, and not none.
    fn is_even(&self) -> bool {
        let is_even = |counts: &Vec<usize>| counts.iter().all(|count| *count == counts[0]);
        self.counts.iter().all(|counts| is_even(counts) && counts[0] > 0)
    }

    /// The buffer, from tensors that each have the parts of all ranks one after the other.
    pub fn pack(&self, mut tensors: Vec<Tensor<1>>) -> Tensor<1> {
        if tensors.len() == 1 {
            return tensors.swap_remove(0);
        }
        let ranks = self.counts[0].len();
        if self.is_even() {
            // As for parameters in rows: one launch for each tensor, instead of one for each part.
            let lines = tensors.into_iter().zip(self.of_rank(0));
            let lines = lines.map(|(tensor, count)| tensor.reshape([ranks, count]));
            return Tensor::cat(lines.collect(), 1).reshape([-1]);
        }
        let (mut starts, mut parts) = (vec![0; tensors.len()], vec![]);
        for rank in 0..ranks {
            for ((tensor, start), count) in tensors.iter().zip(&mut starts).zip(self.of_rank(rank))
            {
                parts.push(flat::slice(tensor, *start..*start + count));
                *start += count;
            }
        }
        flat::concat(parts, tensors[0].dtype(), &tensors[0].device())
    }

    /// A rank's parts of all tensors, from what the buffer has of this rank. Parts of several
    /// tensors are views.
    pub fn split(&self, part: Tensor<1>, rank: usize) -> Vec<Tensor<1>> {
        if self.counts.len() == 1 {
            return vec![part];
        }
        let mut start = 0;
        self.of_rank(rank)
            .map(|count| {
                start += count;
                flat::slice(&part, start - count..start)
            })
            .collect()
    }

    /// A tensor with the parts of all ranks one after the other, from the buffer. It does not keep
    /// what else the buffer has.
    pub fn unpack(&self, buffer: &Tensor<1>, tensor: usize) -> Tensor<1> {
        if self.counts.len() == 1 {
            return buffer.clone();
        }
        let parts = self.starts(tensor).into_iter().zip(&self.counts[tensor]);
        flat::joined(buffer, parts.map(|(start, count)| start..start + count))
    }

    /// The first positions in the buffer of all ranks' parts of a tensor.
    pub fn starts(&self, tensor: usize) -> Vec<usize> {
        let mut end = 0;
        (0..self.counts[0].len())
            .map(|rank| {
                let start = end + self.of_rank(rank).take(tensor).sum::<usize>();
                end += self.of_rank(rank).sum::<usize>();
                start
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    fn values(tensor: Tensor<1>) -> Vec<f32> {
        tensor.into_data().try_to_vec().unwrap()
    }

    #[test]
    fn equal_parts_are_interleaved() {
        let counts = [[2, 2, 2], [1, 1, 1]].map(Counts::from_iter);
        let message = Message::of(&counts);
        let tensors = [&[1., 2., 3., 4., 5., 6.][..], &[7., 8., 9.]];
        let tensors = tensors.map(|values| Tensor::<1>::from_floats(values, &Device::default()));
        let buffer = message.pack(tensors.to_vec());
        assert_eq!(values(buffer.clone()), [1., 2., 7., 3., 4., 8., 5., 6., 9.]);
        for (tensor, expected) in tensors.iter().enumerate() {
            assert_eq!(values(message.unpack(&buffer, tensor)), values(expected.clone()));
        }
    }

    #[test]
    fn the_parts_of_a_rank_follow_each_other() {
        let counts = [[2, 0, 1], [0, 0, 2], [1, 1, 1]].map(Counts::from_iter);
        let message = Message::of(&counts);
        assert_eq!(message.totals(), [3, 1, 4]);
        let tensors = [&[1., 2., 3.][..], &[4., 5.], &[6., 7., 8.]];
        let tensors = tensors.map(|values| Tensor::<1>::from_floats(values, &Device::default()));
        let buffer = message.pack(tensors.to_vec());
        assert_eq!(values(buffer.clone()), [1., 2., 6., 7., 3., 4., 5., 8.]);
        assert_eq!(
            [0, 1, 2].map(|tensor| message.starts(tensor)),
            [[0, 3, 4], [2, 3, 5], [2, 3, 7]]
        );
        for (tensor, expected) in tensors.iter().enumerate() {
            assert_eq!(values(message.unpack(&buffer, tensor)), values(expected.clone()));
        }
        for (rank, range) in [0..3, 3..4, 4..8].into_iter().enumerate() {
            let split = message.split(flat::slice(&buffer, range), rank).into_iter();
            let expected = counts.iter().zip(&tensors).map(|(counts, tensor)| {
                let start = counts.before(rank);
                flat::slice(tensor, start..start + counts.of(rank))
            });
            assert!(split.map(values).eq(expected.map(values)), "rank {rank}");
        }
    }
}
