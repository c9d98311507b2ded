//! The costs of a model's matrices: counted operations, or measured times.

use std::time::Instant;

use burn::tensor::{DType, Device, Distribution, Tensor};

use super::config::CostSource;
use super::plan::{Costs, Parameter, ShapeCost, Work};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::orthogonalize::NewtonSchulz;
use crate::update::MuonUpdate;

/// Repetitions of a measurement, of which the fastest counts.
const REPETITIONS: usize = 3;

/// The costs of all matrices among the parameters, agreed by all ranks.
pub fn costs(
    source: CostSource,
    world: &World,
    parameters: &[Parameter],
    muon: &MuonUpdate,
) -> Result<Costs> {
    let (device, iteration) = (world.device().clone().inner(), &muon.newton_schulz);
    let matrices = parameters.iter().filter_map(|parameter| match parameter.work {
        Work::Matrices { rows, columns, .. } => {
            Some(([rows, columns], muon.iterated_dtype(parameter.dtype)))
        }
        Work::Whole | Work::Elements => None,
    });
    let mut distinct: Vec<([usize; 2], DType)> = matrices.collect();
    distinct.sort_by_key(|(shape, dtype)| (*shape, dtype.size()));
    // One type for each shape: costs are by shape alone, and the sort above has put the narrowest
    // first.
    distinct.dedup_by_key(|(shape, _)| *shape);
    match source {
        CostSource::Operations => Ok(Costs::new(distinct.into_iter().map(|(shape, dtype)| {
            let each = iteration.operations(shape, dtype, &device);
            (shape, ShapeCost { fixed: 0.0, each })
        }))),
        CostSource::Measured => {
            let measured = distinct
                .into_iter()
                .map(|(shape, dtype)| Ok((shape, measure(iteration, shape, dtype, &device)?)));
            let local = measured.collect::<Result<Vec<_>>>().map(Costs::new);
            let all = world.gather_value(&world.agree(local)?, 0)?.unwrap_or_default();
            // The slowest rank decides when a step ends.
            let slowest = all.iter().fold(Costs::default(), |costs, other| costs.maximum(other));
            world.broadcast_value(&slowest, 0)
        }
    }
}

/// Seconds that the iteration takes for a batch, from batches of one and of two.
fn measure(
    iteration: &NewtonSchulz,
    [m, n]: [usize; 2],
    dtype: DType,
    device: &Device,
) -> Result<ShapeCost> {
    let time = |count: usize| -> Result<f64> {
        // Random values: a device may multiply zeros faster.
        let ones = Distribution::Normal(0.0, 1.0);
        let batch = Tensor::<3>::random([count, m, n], ones, (device, dtype));
        let run = || -> Result<f64> {
            sync(device)?;
            let start = Instant::now();
            iteration.orthogonalize(batch.clone());
            sync(device)?;
            Ok(start.elapsed().as_secs_f64())
        };
        run()?; // compiles and tunes
        // The least: whatever else the machine does makes a run slower, and none faster.
        (0..REPETITIONS).try_fold(f64::INFINITY, |least, _| Ok(least.min(run()?)))
    };
    let (one, two) = (time(1)?, time(2)?);
    let each = (two - one).clamp(one / 10.0, one);
    Ok(ShapeCost { fixed: one - each, each })
}

fn sync(device: &Device) -> Result<()> {
    device.sync().map_err(|error| {
        Error::setting(
            "costs",
            format!("Measured, on a device that fails: {error:?}"),
            "`Operations`, or a device that works",
        )
    })
}
