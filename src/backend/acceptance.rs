//! The parameters that a step leaves as they are, and the counts of all parameters, on a compute
//! path.

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::compute_path::{ComputePath, KernelPolicy};
use super::ops::{Acceptance, StepCounts, StepOps};
use super::portable;

/// Decides which parameters a step leaves as they are: those whose value in `sums` is positive, and
/// those that are `absent`. Counts the former as skipped, and once more those that diverged, whose
/// values in `sums` follow, if there are any. The corrections of the others advance by `betas`.
pub(crate) fn accept(
    policy: KernelPolicy,
    sums: Tensor<1>,
    absent: Option<&Tensor<1>>,
    StepCounts { skipped, corrections }: StepCounts,
    betas: Option<[f64; 2]>,
) -> Acceptance {
    let dtype = corrections[0].dtype().into();
    let path = ComputePath::choose(policy, &skipped.device(), dtype);
    if path == ComputePath::Portable {
        return portable::accept(sums, absent, StepCounts { skipped, corrections }, betas);
    }
    // A backend extension has no optional tensors: where none is absent, any tensor stands in.
    let flags = absent.unwrap_or(&skipped).clone().into_dispatch();
    let [first, second] = corrections.map(Tensor::into_dispatch);
    let weights = betas.unwrap_or([1.0; 2]).map(|beta| [beta as f32, (1.0 - beta) as f32]);
    let (skipped, sums) = (skipped.into_dispatch(), sums.into_dispatch());
    let (rejected, skipped, first, second, zeros) =
        Dispatch::accept(sums, flags, skipped, first, second, weights, absent.is_some());
    let [rejected, skipped, zeros] = [rejected, skipped, zeros].map(Tensor::from_dispatch);
    let corrections = [first, second].map(Tensor::from_dispatch);
    // Flex makes zeros where they are needed: that costs no launch.
    let zeros = matches!(path, ComputePath::CubeCl { .. }).then_some(zeros);
    Acceptance { rejected, counts: StepCounts { skipped, corrections }, zeros }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device};

    use super::*;

    #[test]
    fn the_fastest_path_decides_and_counts_as_burns_operations_do() {
        let device = Device::default();
        // More than a cube has units.
        let parameters = 300;
        let tensor = |of: fn(usize) -> f32| {
            let values: Vec<f32> = (0..parameters).map(of).collect();
            Tensor::<1>::from_data(&*values, (&device, DType::F32))
        };
        let rejects = || tensor(|at| if at % 3 == 0 { 2.0 } else { 0.0 });
        let diverges = || tensor(|at| if at % 4 == 0 { 3.0 } else { 0.0 });
        let absent = tensor(|at| if at % 7 == 0 { 1.0 } else { 0.0 });
        let counts = || StepCounts {
            skipped: tensor(|at| at as f32),
            corrections: [tensor(|at| 0.01 * at as f32), tensor(|at| 0.007 * at as f32)],
        };
        for (sums, absent, betas) in [
            (rejects(), None, Some([0.9, 0.999])),
            (Tensor::cat(vec![rejects(), diverges()], 0), Some(&absent), Some([0.95, 0.98])),
            (rejects(), Some(&absent), None),
        ] {
            let values = |policy| {
                let Acceptance { rejected, counts, zeros } =
                    accept(policy, sums.clone(), absent, counts(), betas);
                if let Some(zeros) = zeros {
                    let zeros = zeros.into_data().try_into_vec::<f32>().expect("in float32");
                    assert_eq!(zeros, vec![0.0; parameters]);
                }
                let StepCounts { skipped, corrections: [first, second] } = counts;
                [rejected, skipped, first, second].map(|values| {
                    values.into_data().try_into_vec::<f32>().expect("values in float32")
                })
            };
            let [fast, plain] = [KernelPolicy::Auto, KernelPolicy::Portable].map(values);
            assert_eq!(fast[..2], plain[..2]);
            let path = ComputePath::choose(KernelPolicy::Auto, &device, DType::F32.into());
            assert_ne!(path, ComputePath::Portable, "both paths are one");
            for (fast, plain) in fast[2..].concat().iter().zip(plain[2..].concat()) {
                // A GPU may round the product and the sum once together.
                let tolerance = if path == ComputePath::Flex { 0.0 } else { f32::EPSILON * plain };
                assert!((fast - plain).abs() <= tolerance, "{fast}, not {plain}");
            }
        }
    }
}
