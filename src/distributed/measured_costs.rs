//! The costs of a model's matrices and whole parameters: counted operations, or measured times.

use std::collections::BTreeMap;
use std::time::Instant;

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::config::CostSource;
use super::plan::{Costs, Parameter, ShapeCost, Work};
use super::trainable::{TrainableParameter, UpdateKind};
use crate::comm::World;
use crate::error::{Error, Result};
use crate::flat;
use crate::orthogonalize::NewtonSchulz;
use crate::routing::Updates;
use crate::update::{
    Decision, ElementwiseUpdate, Origin, Slots, UpdateTensors, WholeParameter, WholeUpdate,
};

/// Repetitions of a measurement, of which the fastest counts.
const REPETITIONS: usize = 3;

/// The costs of all matrices and whole parameters, agreed by all ranks. `parameters` are the
/// trainable ones as a plan sees them.
///
/// Only a layer optimizer counts its operations: whole parameters of others have a cost if it is
/// measured.
pub fn costs(
    source: CostSource,
    world: &World,
    parameters: &[Parameter],
    trainable: &[TrainableParameter],
    updates: &Updates,
) -> Result<Costs> {
    let (device, muon) = (world.device().clone().inner(), &updates.muon[0]);
    let iteration = &muon.newton_schulz;
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
        CostSource::Operations => {
            let matrices = Costs::new(distinct.into_iter().map(|(shape, dtype)| {
                let each = iteration.operations(shape, dtype, &device);
                (shape, ShapeCost { fixed: 0.0, each })
            }));
            let counted = whole(trainable, updates).filter_map(|(parameter, update)| {
                let operations = update.optimizer.operations(&parameter.shape)?;
                Some((parameter.path.clone(), operations))
            });
            Ok(matrices.with_whole(counted))
        }
        CostSource::Measured => {
            let measured = distinct
                .into_iter()
                .map(|(shape, dtype)| Ok((shape, measure(iteration, shape, dtype, &device)?)));
            let local = measured
                .collect::<Result<Vec<_>>>()
                .map(Costs::new)
                .and_then(|costs| Ok(costs.with_whole(measure_all(trainable, updates, &device)?)));
            // The slowest rank decides when a step ends.
            let slowest = |all: Vec<Costs>| {
                all.iter().fold(Costs::default(), |costs, other| costs.maximum(other))
            };
            // Agreed on first: a rank whose device fails must not leave the others in the next
            // call.
            world.combine_on_rank_0(&world.agree(local)?, slowest)
        }
    }
}

/// The parameters that are updated whole, with their updates.
fn whole<'a>(
    trainable: &'a [TrainableParameter],
    updates: &'a Updates,
) -> impl Iterator<Item = (&'a TrainableParameter, WholeUpdate)> {
    trainable.iter().filter_map(|parameter| match &parameter.kind {
        UpdateKind::Whole { optimizer, .. } => Some((parameter, updates.whole(optimizer))),
        UpdateKind::Muon { .. } | UpdateKind::Elementwise { .. } => None,
    })
}

/// Seconds that the steps of all whole parameters take, by path. Parameters of one optimizer, shape
/// and type are measured once.
fn measure_all(
    trainable: &[TrainableParameter],
    updates: &Updates,
    device: &Device,
) -> Result<Vec<(String, f64)>> {
    let mut known: BTreeMap<(String, &[usize], &str), f64> = BTreeMap::new();
    let seconds = whole(trainable, updates).map(|(parameter, update)| {
        let UpdateKind::Whole { optimizer, .. } = &parameter.kind else {
            unreachable!("only whole parameters are measured here")
        };
        let key = (optimizer.clone(), &parameter.shape[..], parameter.dtype.name());
        let seconds = match known.get(&key) {
            Some(seconds) => *seconds,
            None => {
                let seconds = measure_whole(&update, parameter, device)?;
                known.insert(key, seconds);
                seconds
            }
        };
        Ok((parameter.path.clone(), seconds))
    });
    seconds.collect()
}

/// Seconds that a step of a whole parameter takes, after its first ones.
fn measure_whole(
    update: &WholeUpdate,
    TrainableParameter { path, shape, dtype, .. }: &TrainableParameter,
    device: &Device,
) -> Result<f64> {
    let batch = ElementwiseUpdate::batch(shape);
    let mut slots = Slots::zeros(&update.slots(*dtype), batch, shape, *dtype, device);
    let elements: usize = shape.iter().product();
    let values = numbers(elements, *dtype, device);
    let gradient = values.clone().flip([0]);
    let mut own = None;
    let mut step = |at: usize| -> Result<f64> {
        sync(device)?;
        let start = Instant::now();
        let parameter = WholeParameter {
            flag: 0,
            shape,
            lr: 1e-3,
            origin: Origin { parameter: path, element: 0, step: at },
            factors: None,
            decision: Decision { flag: flat::zeros(1, DType::F32, device), read: Some(false) },
        };
        let tensors = UpdateTensors::of_one(values.clone(), gradient.clone());
        drop(update.step(tensors, parameter, &mut slots, &mut own, None));
        sync(device)?;
        Ok(start.elapsed().as_secs_f64())
    };
    step(0)?; // compiles, and makes the state
    (1..=REPETITIONS).try_fold(f64::INFINITY, |least, at| Ok(least.min(step(at)?)))
}

/// Seconds that the iteration takes for a batch, from batches of one and of two.
fn measure(
    iteration: &NewtonSchulz,
    [m, n]: [usize; 2],
    dtype: DType,
    device: &Device,
) -> Result<ShapeCost> {
    let time = |count: usize| -> Result<f64> {
        let batch = numbers(count * m * n, dtype, device).reshape([count, m, n]);
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
    // Noise can make the second matrix cost less than nothing, or more than a batch of one.
    let each = (two - one).clamp(one / 10.0, one);
    Ok(ShapeCost { fixed: one - each, each })
}

/// Numbers between -1 and 1 without a pattern: a device may multiply zeros faster.
///
/// A chirp, since random numbers would be drawn from the device's generator, and the parameters
/// that a model draws later would depend on whether costs are measured.
fn numbers(elements: usize, dtype: DType, device: &Device) -> Tensor<1> {
    // Squares modulo a prime repeat only after that many elements.
    let number = |index: usize| ((index * index % 1_000_003) as f64 * 0.618_034).sin() as f32;
    let data = TensorData::new((0..elements).map(number).collect::<Vec<_>>(), [elements]);
    Tensor::from_data(data, (device, dtype))
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

#[cfg(all(test, feature = "optimal"))]
mod tests {
    use burn::nn::{Linear, LinearConfig};

    use super::*;
    use crate::distributed::config::DistMuonConfig;
    use crate::distributed::plan::Balancing;
    use crate::distributed::plan::tests::{max_load, plan, stack};
    use crate::muon::MuonConfig;
    use crate::routing::RoutingRule;

    /// Prints what measured costs gain where operations and time differ: the load of the busiest
    /// rank, in measured seconds over the mean, of plans by both costs. The model has layers of
    /// four widths.
    #[test]
    #[ignore = "prints a table of measurements, and takes a minute"]
    fn table_of_measured_costs() {
        let layers = [(1024, 2), (512, 4), (256, 8), (128, 16)];
        let shapes = |width: usize| {
            let [square, up, down] = [[width; 2], [width, 4 * width], [4 * width, width]];
            [square, square, square, square, up, down]
        };
        let matrices = layers.into_iter().flat_map(|(width, count)| {
            let layer = move |layer: usize| {
                let paths = (0..6).map(move |index| format!("{width}.{layer}.{index}"));
                paths.zip(shapes(width)).map(|(path, shape)| stack(&path, 1, shape))
            };
            (0..count).flat_map(layer)
        });
        let parameters: Vec<Parameter> = matrices.collect();
        let device = Device::default().autodiff();
        let model: Vec<Linear> = layers
            .iter()
            .flat_map(|(width, _)| shapes(*width)[3..].to_vec())
            .map(|[m, n]| LinearConfig::new(m, n).with_bias(false).init(&device))
            .collect();
        let muon = MuonConfig::new().with_rule(RoutingRule::muon(""));
        let config = DistMuonConfig::new().with_muon(muon);
        let [counted, measured] = [CostSource::Operations, CostSource::Measured].map(|source| {
            let world = World::alone(device.clone());
            let optim = config.clone().with_costs(source).init(&world, &model).unwrap();
            optim.costs().clone()
        });
        for [m, n] in measured.shapes() {
            let (counted, ShapeCost { fixed, each }) = (counted.of([m, n]), measured.of([m, n]));
            let rate = counted.each / each / 1e9;
            println!("{m} x {n}: {fixed:.2e} s + {each:.2e} s, {rate:.1} GFLOP/s");
        }
        println!("\n| ranks | in turns | operations | measured | measured, optimal |");
        println!("|---|---|---|---|---|");
        let optimal = Balancing::Optimal { time_limit_s: 10.0 };
        for ranks in [2, 4, 8, 16] {
            let loads = [
                (Balancing::BlockCyclic, &counted),
                (Balancing::Greedy, &counted),
                (Balancing::Greedy, &measured),
                (optimal, &measured),
            ];
            let loads = loads.map(|(balancing, costs)| {
                let plan = plan(&parameters, ranks, balancing, costs);
                max_load(&plan, &measured)
            });
            let alone = plan(&parameters, 1, Balancing::Greedy, &measured);
            let mean = max_load(&alone, &measured) / ranks as f64;
            let row = loads.map(|load| format!("{:.3}", load / mean));
            println!("| {ranks} | {} |", row.join(" | "));
        }
    }
}
