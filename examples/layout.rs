//! `ranks.rs` with the parameters divided among the ranks (ZeRO-3): `cargo run --example layout`.
//!
//! Each matrix lies at one rank, is gathered for every use, and is then freed. The losses are those
//! of `ranks.rs`. Three lines differ, and an import.

use std::ops::Range;

use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::tensor::{Device, Int, Tensor};
use distmuon::distributed::Layout;
use distmuon::{DistMuonConfig, Error, Schedule, World};

const BATCH: usize = 24; // of all ranks together
const STEPS: usize = 40;

fn main() -> Result<(), Error> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("ranks: a number"));
    World::launch(ranks, |world| {
        let world = world.gradient_checkpointing();
        let device = world.device();
        device.seed(1);
        let model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(device);
        let layout = Layout::from(&world).owned("dp");
        let (mut model, mut optim) = DistMuonConfig::new().start(&layout, model)?;
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
