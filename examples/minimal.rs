//! A training loop on one device: `cargo run --example minimal`.

use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};
use distmuon::{MuonConfig, Schedule};

fn main() -> Result<(), distmuon::Error> {
    let device = Device::default().autodiff();
    let mut model = PositionWiseFeedForwardConfig::new(32, 128).init(&device);
    let mut optim = MuonConfig::new().init_batched(&model)?;
    let lr = Schedule::warmup_cosine(0.003, 10, 190, 0.0);
    for step in 0..200 {
        let x = Tensor::<3>::random([8, 4, 32], Distribution::Normal(0.0, 1.0), &device);
        let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr.at(step), model, grads)?;
        if (step + 1) % 100 == 0 || step == 0 {
            println!("step {}: loss {:.4}", step + 1, loss.into_scalar::<f32>());
        }
    }
    Ok(())
}
