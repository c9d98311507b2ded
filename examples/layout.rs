//! Parameters divided among ranks (ZeRO-3): `cargo run --example layout -- 4`, with two ranks by
//! default. It trains the model of `ranks.rs` and prints the same losses. Numbers mark the lines
//! that divide the parameters.

use std::ops::Range;

use burn::module::Module;
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::tensor::{Device, Int, Tensor};
use distmuon::distributed::{Layout, Mesh};
use distmuon::{DistMuonConfig, Error, Schedule, World};

const BATCH: usize = 24; // of all ranks together
const STEPS: usize = 40;

fn main() -> Result<(), Error> {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().expect("ranks: a number"));
    let devices = World::devices(ranks).into_iter();
    let devices: Vec<_> = devices.map(Device::gradient_checkpointing).collect(); // 1.
    devices[0].seed(1);
    let model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(&devices[0]);
    World::threads_with(devices, model, train)?;
    Ok(())
}

/// Trains on one rank. Each matrix lies at one rank, is gathered for every use, and is then freed.
fn train(world: World, model: PositionWiseFeedForward) -> Result<(), Error> {
    let config = DistMuonConfig::new();
    let layout = Layout::new(&Mesh::flat(&world)).owned("dp").with_muon(config.muon.clone());
    let whole = 4 * model.num_params();
    let mut model = layout.shard(model)?; // 2. with the values of rank 0
    let mut optim = config.init_on(&layout, &model)?; // 3. instead of `init(&world, &model)`
    let lr = Schedule::warmup_cosine(3e-3, 5, STEPS - 5, 0.0);
    for step in 0..STEPS {
        let part = world.part(BATCH);
        let first = step * BATCH;
        let x = batch(first + part.start..first + part.end, world.device());
        let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
        let grads = layout.backward(&loss, &model)?; // 4. instead of `loss.backward()`
        model = optim.step(lr.at(step), model, grads)?;
        let loss = world.mean(loss.into_scalar::<f32>())?;
        if world.is_main() && (step == 0 || step + 1 == STEPS) {
            println!("step {}: loss {loss:.4}", step + 1);
        }
    }
    let held = optim.memory().parameters.now;
    println!("rank {}: {held} of {whole} bytes of parameters", world.rank());
    Ok(())
}

/// Sines: for each item, a sequence of two rows.
fn batch(items: Range<usize>, device: &Device) -> Tensor<3> {
    let values = items.start as i64 * 32..items.end as i64 * 32;
    Tensor::<1, Int>::arange(values, device).float().sin().reshape([-1, 2, 16])
}
