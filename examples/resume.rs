//! A run that continues from its checkpoint: `cargo run --example resume -- FILE STEPS`.
//!
//! It trains up to a step and saves. Started again with more steps, it goes on from the file. So
//! `resume a 20` and then `resume a 40` end with the same bits as `resume b 40`.

use std::path::Path;

use burn::nn::transformer::PositionWiseFeedForwardConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use distmuon::{Error, MuonConfig, Schedule, checkpoint};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or("resume.bpk".into());
    let steps = arguments.next().map_or(20, |steps| steps.parse().expect("steps: a number"));
    train(Path::new(&path), steps)
}

fn train(path: &Path, steps: usize) -> Result<(), Error> {
    let device = Device::default().autodiff();
    device.seed(1);
    let mut model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(&device);
    let mut optim = MuonConfig::new().init_batched(&model)?;
    let mut step = 0;
    if path.exists() {
        (model, optim, step) = checkpoint::load(path, model, optim)?;
        println!("resumed at step {step}");
    }
    let lr = Schedule::warmup_cosine(3e-3, 5, 35, 0.0);
    while step < steps {
        let first = 64 * step as i64; // the data of a step depends on its number alone
        let x = Tensor::<1, Int>::arange(first..first + 64, &device).float().sin();
        let x = x.reshape([2, 2, 16]);
        let loss = (model.forward(x.clone()) - x.flip([2])).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr.at(step), model, grads)?;
        step += 1;
        if step == steps {
            println!("step {step}: loss {:?}", loss.into_scalar::<f32>()); // all digits
        }
    }
    checkpoint::save(path, &model, &optim, &step)
}
