//! Text generation in a `Learner`, with accumulation and checkpoints.

use burn::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use crate::accumulation::Gpt;
use crate::client::{Client, Items, Run};
use crate::learner::{self, classified, learns};

#[derive(Module, Debug)]
pub struct Generator {
    gpt: Gpt,
}

impl Generator {
    fn logits(&self, items: &Items) -> (Tensor<2>, Tensor<1, Int>) {
        self.gpt.predict(items)
    }
}

learns!(Generator);

impl Client for Generator {
    type Model = Self;

    const NAME: &'static str = "text generation in a learner";
    const ROUTING: &'static str = "\
        AdamW (embedding): gpt.tokens.weight gpt.positions.weight\n\
        Muon: gpt.transformer.layers.*.mha.query.weight gpt.transformer.layers.*.mha.key.weight \
            gpt.transformer.layers.*.mha.value.weight \
            gpt.transformer.layers.*.mha.output.weight \
            gpt.transformer.layers.*.pwff.linear_inner.weight \
            gpt.transformer.layers.*.pwff.linear_outer.weight\n\
        AdamW (head): gpt.head.weight";

    fn model(device: &Device) -> Self {
        Self { gpt: Gpt::new(device) }
    }

    fn train(run: &Run, model: Self) -> Self {
        learner::train(run, run.rates().into_lr_scheduler(), model, 2, |training| {
            training.grads_accumulation(2)
        })
    }

    fn loss(model: &Self, items: Items) -> f32 {
        classified(model.logits(&items)).loss.into_scalar()
    }
}

/// The same with the scheduler of its public program, which a checkpoint saves.
pub struct WithNoam;

impl Client for WithNoam {
    type Model = Generator;

    const NAME: &'static str = "text generation in a learner, Noam's rates";
    const ROUTING: &'static str = Generator::ROUTING;

    fn model(device: &Device) -> Generator {
        Generator::model(device)
    }

    fn train(run: &Run, model: Generator) -> Generator {
        let rates = NoamLrSchedulerConfig::new(run.rate)
            .with_warmup_steps(run.total / 4)
            .with_model_size(1)
            .init()
            .expect("the scheduler's settings are valid");
        learner::train(run, rates, model, 2, |training| training)
    }

    fn loss(model: &Generator, items: Items) -> f32 {
        Generator::loss(model, items)
    }
}
