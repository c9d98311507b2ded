//! The values of the parameters of a step.

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor};

use super::precise::precise_dtype;
use super::tensor_list::TensorList;
use crate::flat;

type List = TensorList<Dispatch>;

/// The values of the parameters of a step, flat. There is at least one parameter.
#[derive(Clone, Debug)]
// There is one for a whole batch of parameters. Without backends, tensors are small.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Values {
    /// Each parameter's in a tensor of its own.
    Each(Vec<Tensor<1>>),
    /// All in one tensor, in the places that the parameters have in the state. A step writes to it
    /// in place, where it would copy the slices of a tensor before.
    Joined {
        all: Tensor<1>,
        /// The elements of each parameter.
        places: Vec<Range<usize>>,
    },
}

impl Values {
    pub fn dtype(&self) -> DType {
        self.any().dtype()
    }

    pub fn device(&self) -> Device {
        self.any().device()
    }

    fn any(&self) -> &Tensor<1> {
        match self {
            Self::Each(values) => &values[0],
            Self::Joined { all, .. } => all,
        }
    }

    /// The number of elements of each parameter.
    pub fn lengths(&self) -> Vec<usize> {
        match self {
            Self::Each(values) => values.iter().map(|values| values.dims()[0]).collect(),
            Self::Joined { places, .. } => places.iter().map(Range::len).collect(),
        }
    }

    /// A tensor for each parameter.
    pub fn into_each(self) -> Vec<Tensor<1>> {
        match self {
            Self::Each(values) => values,
            Self::Joined { all, places } => {
                places.into_iter().map(|place| flat::slice(&all, place)).collect()
            }
        }
    }

    /// Parameters that follow each other without gaps as one batch, in [`precise_dtype`].
    pub fn batch(&self, shape: [usize; 3]) -> Tensor<3> {
        let dtype = self.dtype();
        let all = match self {
            Self::Each(values) => flat::concat(values.clone(), dtype, &self.device()),
            Self::Joined { all, .. } => all.clone(),
        };
        all.cast(precise_dtype(dtype)).reshape(shape)
    }

    /// A batch as these parameters: the reverse of [`batch`](Self::batch).
    pub fn of_batch(&self, batch: Tensor<3>) -> Self {
        let all = batch.reshape([-1]);
        match self {
            Self::Each(_) => Self::Each(split(all, self.lengths())),
            Self::Joined { places, .. } => Self::Joined { all, places: places.clone() },
        }
    }

    /// Applies a backend's operation, whose arguments are a tensor for each parameter, or one for
    /// all and the parameters' places in it.
    pub(super) fn through<R>(
        self,
        operation: impl FnOnce(List, Vec<Range<usize>>) -> (List, R),
    ) -> (Self, R) {
        // Moved: a second reference would make the kernels copy before they write in place.
        match self {
            Self::Each(values) => {
                let (values, rest) = operation(TensorList::from_tensors(values), vec![]);
                (Self::Each(values.into_tensors()), rest)
            }
            Self::Joined { all, places } => {
                let all = TensorList::from_tensors(vec![all]);
                let (all, rest) = operation(all, places.clone());
                (Self::Joined { all: all.into_tensors().swap_remove(0), places }, rest)
            }
        }
    }
}

/// A tensor as tensors of some lengths.
pub(crate) fn split(all: Tensor<1>, lengths: Vec<usize>) -> Vec<Tensor<1>> {
    match *lengths {
        [_] => vec![all],
        _ => all.split_with_sizes(lengths, 0),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Distribution, TensorData, s};

    use super::*;
    use crate::backend::ops::{
        AdamWControls, AdamWStep, ElementwiseRows, MatrixFlags, Moments, ParameterStep,
    };
    use crate::backend::{KernelPolicy, apply, portable, restore, round_parts, rounded};
    use crate::checks::rounds_to;
    use crate::skipped_tests::lacks;

    const POLICIES: [KernelPolicy; 2] = [KernelPolicy::Auto, KernelPolicy::Portable];

    fn random(elements: usize) -> Tensor<1> {
        let options = (&Device::default(), DType::F32);
        Tensor::random([elements], Distribution::Uniform(-1.0, 1.0), options)
    }

    fn flags(values: &[f32]) -> Tensor<1> {
        Tensor::from_data(TensorData::from(values), (&Device::default(), DType::F32))
    }

    /// The same parameters in both forms.
    fn forms(all: &Tensor<1>, places: &[Range<usize>]) -> [Values; 2] {
        let joined = Values::Joined { all: all.clone(), places: places.to_vec() };
        let copy = |part: Tensor<1>| part.clone().add(part).div_scalar(2.0);
        let each = joined.clone().into_each().into_iter().map(copy);
        [Values::Each(each.collect()), joined]
    }

    fn data(values: Values) -> Vec<TensorData> {
        values.into_each().into_iter().map(Tensor::into_data).collect()
    }

    /// The third of four parameters is rejected, and a matrix of the second has diverged.
    #[test]
    fn matrices_in_one_tensor_are_updated_as_each_in_its_own() {
        let (counts, [m, n]) = ([1, 3, 2, 1], [5, 7]);
        let shape = [counts.iter().sum(), m, n];
        let ends = [0, 1, 4, 6, 7].map(|end| end * m * n);
        let places: Vec<_> = ends.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let (all, direction) = (random(ends[4]), random(ends[4]).reshape(shape));
        let step = |flag: usize| {
            let size = 1.0 + flag as f64;
            ParameterStep { flag, decay: 1.0 - 0.1 * size, lr: 0.1 * size, cautious: false }
        };
        let steps: Vec<_> = (0..counts.len()).map(step).collect();
        let rejected = flags(&[0.0, 0.0, 1.0, 0.0]);
        let diverged = flags(&[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        let diverged = MatrixFlags { flags: &diverged, first: 1 };
        for policy in POLICIES {
            let [each, joined] = forms(&all, &places).map(|values| {
                data(apply(policy, values, direction.clone(), &rejected, diverged, &steps))
            });
            assert_eq!(each, joined, "{policy:?}");
            assert_ne!(joined[0], data(forms(&all, &places)[1].clone())[0], "they are updated");
        }
    }

    #[test]
    fn elements_in_one_tensor_are_updated_as_each_in_its_own() {
        // With gaps, which stay as they are.
        let places = [0..300, 304..305, 312..512, 520..776];
        let (all, elements) = (random(780), 780);
        let controls = AdamWControls {
            rejected: &flags(&[0.0, 0.0, 1.0, 0.0]),
            corrections: &[flags(&[0.5; 4]), flags(&[0.25; 4])],
            factor: None,
        };
        let row = |(flag, place): (usize, &Range<usize>)| {
            let lr = 0.1 * (flag + 1) as f64;
            ElementwiseRows { flag, first: place.start, decay: 1.0 - lr, lr }
        };
        let rows: Vec<_> = places.iter().enumerate().map(row).collect();
        let (cautious, amsgrad) = (false, false);
        let step = AdamWStep { beta_1: 0.9, beta_2: 0.95, epsilon: 1e-8, cautious, amsgrad };
        let grads: Vec<_> = places.iter().map(|place| random(place.len())).collect();
        let [moment_1, moment_2] = [random(elements), random(elements).abs()];
        for policy in POLICIES {
            let [each, joined] = forms(&all, &places).map(|values| {
                let copy = |moment: &Tensor<1>| moment.clone() * 1.0;
                let moments = Moments {
                    moment_1: copy(&moment_1),
                    moment_2: copy(&moment_2),
                    max_moment_2: None,
                };
                let (values, moments) =
                    step.run(policy, values, grads.clone(), moments, &controls, &rows);
                (data(values), moments.moment_1.into_data(), moments.moment_2.into_data())
            });
            assert_eq!(each, joined, "{policy:?}");
        }
    }

    #[test]
    fn master_weights_of_changed_elements_are_replaced_on_every_path() {
        let device = Device::default();
        for half in [DType::F16, DType::BF16] {
            if !(device.supports_dtype(half) && rounds_to(&device, half.into())) {
                lacks(format!("{half:?}"));
                continue;
            }
            let places = vec![0..300, 304..305, 312..512];
            let firsts: Vec<usize> = places.iter().map(|place| place.start).collect();
            let masters = random(512);
            let mut published = round_parts(masters.clone(), places.clone(), half.into());
            let changed = published[2].clone().slice_fill(s![7..9], 2.5);
            published[2] = changed.slice_fill(s![100..101], f32::NAN);
            let rounded = rounded(masters.clone(), half);
            let expected = portable::restore(masters.clone(), rounded, published.clone(), &firsts);
            let restored = restore(masters.clone(), published, &firsts);
            let values = |all: &Tensor<1>| -> Vec<u32> {
                let values = Values::Joined { all: all.clone(), places: places.clone() };
                let each = data(values).into_iter();
                each.flat_map(|data| data.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>())
                    .collect()
            };
            let (expected, restored, old) =
                (values(&expected), values(&restored), values(&masters));
            assert_eq!(expected.len(), restored.len());
            for (index, (expected, restored)) in expected.iter().zip(&restored).enumerate() {
                let [expected, restored] = [*expected, *restored].map(f32::from_bits);
                let is_equal = expected == restored || expected.is_nan() && restored.is_nan();
                assert!(is_equal, "{index}: {restored}, expected {expected}");
            }
            let differ: Vec<usize> =
                (0..old.len()).filter(|index| old[*index] != restored[*index]).collect();
            assert_eq!(differ, [308, 309, 401], "{half:?}");
        }
    }
}
