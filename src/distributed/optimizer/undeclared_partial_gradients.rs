//! The search for gradients that are taken to be the same on the ranks of a model axis, and are
//! not.
//!
//! A parameter that every rank uses for its own slice, such as the norm of queries inside a region
//! of tensor parallelism, has another gradient on every rank, and needs
//! [`Place::partial`](crate::distributed::Place::partial). Without it, training goes on with wrong
//! gradients. The ranks compare every gradient once, in the first steps.

use std::collections::HashSet;

use burn::tensor::{DType, Device, Int, Tensor};

use super::detached_parameters::FlatTensors;
use super::divided_model::DividedModel;
use crate::distributed::mesh::Axis;
use crate::error::{Error, Result};
use crate::flat;

/// The difference of two gradients, relative to their norm, from which they are not the same. Their
/// rounding errors are far below.
const TOLERANCE: f32 = 0.01;

/// Steps after which gradients that were always zero are compared no more.
const STEPS: usize = 8;

/// The gradients that were compared, and the steps so far.
#[derive(Default)]
pub struct ComparedGradients {
    /// The name of an axis and the index of a parameter.
    compared: HashSet<(String, usize)>,
    steps: usize,
}

impl ComparedGradients {
    /// Compares gradients on the ranks of every model axis, as far as the step reduces them and
    /// their parameters are neither cut nor partial along the axis. Each is compared in the first
    /// step in which it is neither zero nor infinite.
    pub fn compare(&mut self, gradients: &FlatTensors, divided: &DividedModel) -> Result<()> {
        if self.steps == STEPS {
            return Ok(());
        }
        self.steps += 1;
        let mut axes =
            divided.layout.mesh().axes().iter().filter(|axis| axis.is_model() && axis.size() > 1);
        axes.try_for_each(|axis| self.compare_along(axis, gradients, divided))
    }

    fn compare_along(
        &mut self,
        axis: &Axis,
        gradients: &FlatTensors,
        divided: &DividedModel,
    ) -> Result<()> {
        let group = divided.layout.mesh().group(axis.name()).expect("an axis of the mesh");
        let compared: Vec<usize> = (0..divided.trainable.len())
            .filter(|index| {
                let parameter = divided.of_model(*index);
                !parameter.placement.reduces_in_backward()
                    && !divided.cuts.differs_along(&parameter.path, axis.name())
                    && !self.compared.contains(&(axis.name().to_owned(), *index))
            })
            .collect();
        if compared.is_empty() {
            return Ok(());
        }
        let device = divided.device();
        let mut found = vec![];
        for index in &compared {
            found.push(match gradients.get(*index) {
                Some(gradient) => projected(gradient, &device),
                // Counts as zeros, as in a reduction: it differs from a gradient of another rank.
                None => flat::zeros(2, DType::F32, &device),
            });
        }
        let found = flat::concat(found, DType::F32, &device);
        let all = group.all_gather(found, &vec![2 * compared.len(); group.size()])?.wait()?;
        // The host waits for the device here, in the first steps only.
        let all: Vec<f32> = all.into_data().iter::<f32>().collect();
        let (first, others) = all.split_at(2 * compared.len());
        // The same on all ranks of the axis, which have the same numbers.
        let is_usable = |number: &usize| {
            let norms = all.chunks_exact(first.len()).map(|of_rank| of_rank[2 * number + 1]);
            norms.into_iter().all(|norm| norm.is_finite() && norm > 0.0)
        };
        let usable = (0..compared.len()).filter(is_usable);
        // Zeros, as of a layer that starts at zero, may become different later: such a gradient is
        // compared again.
        self.compared.extend(usable.map(|number| (axis.name().to_owned(), compared[number])));
        for other in others.chunks_exact(first.len()) {
            let pairs = first.chunks_exact(2).zip(other.chunks_exact(2));
            let differs =
                |(a, b): (&[f32], &[f32])| (a[0] - b[0]).abs() > TOLERANCE * a[1].max(b[1]).sqrt();
            if let Some(number) = pairs.into_iter().position(differs) {
                let axis = axis.name();
                return Err(Error::parameter(
                    divided.path(compared[number]),
                    divided.world.rank(),
                    format!("its gradient is not the same on the ranks along `{axis}`"),
                    "add `Place::partial` if every rank uses it for its slice; otherwise give the \
                     ranks of a model axis the same data, and begin regions by `parallel::enter`",
                ));
            }
        }
        Ok(())
    }
}

/// The product of a gradient with a fixed vector, and the square of its norm.
fn projected(gradient: &Tensor<1>, device: &Device) -> Tensor<1> {
    let gradient = gradient.clone().cast(DType::F32);
    let [elements] = gradient.dims();
    // Small numbers, which every type of floats has.
    let index = Tensor::<1, Int>::arange(0..elements as i64, device).remainder_scalar(251);
    let index = index.float().cast(DType::F32);
    // Cosines of integers are spread like random numbers.
    let product = (gradient.clone() * index.cos()).sum();
    Tensor::cat(vec![product, gradient.square().sum()], 0)
}
