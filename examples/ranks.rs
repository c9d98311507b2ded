//! `minimal.rs` on ranks: `cargo run --example ranks -- 4` trains on four, two by default.
//!
//! The ranks are threads, or the processes of a launcher: `mpirun -n 4 ranks` with feature `mpi`.
//! Any number of ranks that divides the batch prints the same losses. `World::launch` takes the
//! place of `World::alone`: three lines differ.

use std::ops::Range;

use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::tensor::{Device, Int, Tensor};
use distmuon::{DistMuonConfig, Error, Schedule, World};

const BATCH: usize = 24; // of all ranks together
const STEPS: usize = 40;

fn main() -> Result<(), Error> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("ranks: a number"));
    World::launch(ranks, |world| {
        let device = world.device();
        device.seed(1);
        let model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(device);
        let (mut model, mut optim) = DistMuonConfig::new().start(&world, model)?;
        let lr = Schedule::warmup_cosine(3e-3, 5, STEPS - 5, 0.0);
        for step in 0..STEPS {
            let x = batch(world.part_of(BATCH * step..BATCH * (step + 1)), device);
            let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
            let grads = optim.backward(&loss, &model)?;
            model = optim.step(lr.at(step), model, grads)?;
            let loss = world.mean(loss.into_scalar::<f32>())?;
            if world.is_main() && (step == 0 || step + 1 == STEPS) {
                println!("step {}: loss {loss:.4}", step + 1);
            }
        }
        println!("rank {}: {} bytes of parameters", world.rank(), optim.memory().parameters.now);
        Ok(())
    })
}

/// Sines: for each item, a sequence of two rows.
fn batch(items: Range<usize>, device: &Device) -> Tensor<3> {
    let values = items.start as i64 * 32..items.end as i64 * 32;
    Tensor::<1, Int>::arange(values, device).float().sin().reshape([-1, 2, 16])
}
