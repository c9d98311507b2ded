//! Data parallel ranks: `cargo run --example ranks -- 4` trains on four ranks, two by default.
//!
//! Every rank is a thread here. Any number of ranks that divides the batch prints the same.

use std::ops::Range;

use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use distmuon::{DistMuonConfig, Error, Schedule, World};

const BATCH: usize = 24; // of all ranks together
const STEPS: usize = 40;

fn main() -> Result<(), Error> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("ranks: a number"));
    let devices = World::devices(ranks);
    devices[0].seed(1);
    let model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(&devices[0]);
    World::threads_with(devices, model, train)?; // a rank on each device, with a copy of the model
    Ok(())
}

/// Trains on one rank. All ranks run it, on their parts of the data.
fn train(world: World, mut model: PositionWiseFeedForward) -> Result<(), Error> {
    let mut optim = DistMuonConfig::new().init(&world, &model)?; // shares work and states
    let lr = Schedule::warmup_cosine(3e-3, 5, STEPS - 5, 0.0);
    for step in 0..STEPS {
        let part = world.part(BATCH);
        let first = step * BATCH;
        let x = batch(first + part.start..first + part.end, world.device());
        let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr.at(step), model, grads)?; // by the mean of all ranks' gradients
        let loss = world.mean(loss.into_scalar::<f32>())?;
        if world.is_main() && (step == 0 || step + 1 == STEPS) {
            println!("step {}: loss {loss:.4}", step + 1);
        }
    }
    Ok(())
}

/// Sines: for each item, a sequence of two rows.
fn batch(items: Range<usize>, device: &Device) -> Tensor<3> {
    let values = items.start as i64 * 32..items.end as i64 * 32;
    Tensor::<1, Int>::arange(values, device).float().sin().reshape([-1, 2, 16])
}
