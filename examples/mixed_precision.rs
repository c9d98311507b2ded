//! Weights in bfloat16 with and without float32 masters: `cargo run --example mixed_precision`.
//!
//! At a small learning rate, most steps are smaller than the spacing of bfloat16 numbers. Masters
//! keep the digits that the weights do not have; without them, such steps are rounded away.

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Int, Tensor};
use distmuon::{Error, MasterWeights, MuonConfig};

fn main() -> Result<(), Error> {
    let device = Device::default().autodiff();
    device.seed(1);
    let model = PositionWiseFeedForwardConfig::new(16, 64).with_dropout(0.0).init(&device);
    let float32 = train(model.clone(), MasterWeights::None, &device)?;
    let model = model.map(&mut Cast(DType::BF16));
    let with = train(model.clone(), MasterWeights::Full, &device)?; // `Full` is the default
    let without = train(model, MasterWeights::None, &device)?;
    println!("loss in float32:            {float32:.4}");
    println!("bfloat16, float32 masters:  {with:.4}");
    println!("bfloat16, without masters:  {without:.4}");
    Ok(())
}

/// Returns the loss after 100 steps.
fn train(
    mut model: PositionWiseFeedForward,
    masters: MasterWeights,
    device: &Device,
) -> Result<f32, Error> {
    let mut optim = MuonConfig::new().with_master_weights(masters).init_batched(&model)?;
    let dtype = model.linear_inner.weight.val().dtype();
    let x = Tensor::<1, Int>::arange(0..512, device).float().sin().reshape([16, 2, 16]);
    let x = x.cast(dtype);
    for _ in 0..100 {
        let loss = loss(&model, &x);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1e-4, model, grads)?;
    }
    Ok(loss(&model, &x).into_scalar::<f32>())
}

/// The loss, in float32, of a network that learns to reverse its input.
fn loss(model: &PositionWiseFeedForward, x: &Tensor<3>) -> Tensor<1> {
    let output = model.forward(x.clone()).cast(DType::F32);
    (output - x.clone().cast(DType::F32).flip([2])).square().mean()
}

/// Converts the parameters of a model.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0).detach().require_grad())
    }
}
