//! A vision transformer with a pooler that no forward pass uses.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, s};

use crate::client::{Client, Items, Run};
use crate::data::{CLASSES, IMAGE, cross_entropy, images};

const PATCH: usize = 2;
const WIDTH: usize = 32;
const PATCHES: usize = (IMAGE / PATCH) * (IMAGE / PATCH);

#[derive(Module, Debug)]
pub struct Vit {
    patches: Conv2d,
    cls_token: Param<Tensor<3>>,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    pooler: Linear,
    classifier: Linear,
}

impl Vit {
    fn cross_entropy(&self, items: &Items) -> Tensor<1> {
        let (images, classes) = images(items);
        let count = items.indices.len();
        let x = self.patches.forward(images).flatten::<3>(2, 3).swap_dims(1, 2);
        let x = Tensor::cat(vec![self.cls_token.val().expand([count, 1, WIDTH]), x], 1);
        let x = TransformerEncoderInput::new(x + self.positions.val());
        let x = self.norm.forward(self.encoder.forward(x)).slice(s![.., 0..1]);
        cross_entropy(self.classifier.forward(x.squeeze_dim::<2>(1)), classes)
    }
}

impl Client for Vit {
    type Model = Self;

    const NAME: &'static str = "vit, an unused pooler";
    const ROUTING: &'static str = "\
        AdamW (embedding): patches.weight positions\n\
        Muon: encoder.layers.*.mha.query.weight encoder.layers.*.mha.key.weight \
            encoder.layers.*.mha.value.weight encoder.layers.*.mha.output.weight \
            encoder.layers.*.pwff.linear_inner.weight encoder.layers.*.pwff.linear_outer.weight \
            pooler.weight\n\
        AdamW (head): classifier.weight";

    fn model(device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, 4, 2);
        let patches = Conv2dConfig::new([1, WIDTH], [PATCH, PATCH]).with_stride([PATCH, PATCH]);
        let zeros =
            |shape: [usize; 3]| Param::from_tensor(Tensor::zeros(shape, device).require_grad());
        Self {
            patches: patches.init(device),
            cls_token: zeros([1, 1, WIDTH]),
            positions: zeros([1, PATCHES + 1, WIDTH]),
            encoder: encoder.with_dropout(0.0).with_norm_first(true).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            pooler: LinearConfig::new(WIDTH, WIDTH).init(device),
            classifier: LinearConfig::new(WIDTH, CLASSES).init(device),
        }
    }

    fn train(run: &Run, model: Self) -> Self {
        let (mut model, mut optim) = run.start(model);
        for step in run.steps.clone() {
            let loss = model.cross_entropy(&run.batch(step, 16));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        run.save(&model, &optim);
        model
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.cross_entropy(&items).into_scalar()
    }
}
