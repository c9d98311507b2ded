//! An LSTM whose optimizer is a field of a saved configuration, with Burn's files for model and
//! optimizer.

use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, activation::sigmoid, s};
use distmuon::{MuonConfig, RoutingRule};

use crate::client::{Client, Items, Run, Settings};
use crate::data::{floats, inputs};

const LENGTH: usize = 10;
const WIDTH: usize = 32;

#[derive(Config, Debug)]
struct TrainingConfig {
    #[config(default = 32)]
    batch: usize,
    optimizer: MuonConfig,
}

#[derive(Module, Debug)]
pub struct Cell {
    weight_ih: Linear,
    weight_hh: Linear,
}

#[derive(Module, Debug)]
pub struct Recurrent {
    lstm: Vec<Cell>,
    output: Linear,
}

impl Cell {
    /// The outputs of all steps.
    fn forward(&self, inputs: Vec<Tensor<2>>) -> Vec<Tensor<2>> {
        let zeros = Tensor::<2>::zeros([inputs[0].dims()[0], WIDTH], &inputs[0].device());
        let (mut hidden, mut cell) = (zeros.clone(), zeros);
        let step = |x| {
            let gates = self.weight_ih.forward(x) + self.weight_hh.forward(hidden.clone());
            let gate = |index| gates.clone().slice(s![.., index * WIDTH..(index + 1) * WIDTH]);
            let [input, forget, output] = [0, 1, 2].map(|index| sigmoid(gate(index)));
            cell = forget * cell.clone() + input * gate(3).tanh();
            hidden = output * cell.clone().tanh();
            hidden.clone()
        };
        inputs.into_iter().map(step).collect()
    }
}

impl Recurrent {
    /// The error of the next value of a recurrence, whose coefficient has to be inferred.
    fn error(&self, items: &Items) -> Tensor<1> {
        let sequence = |input: Vec<f32>| {
            let mut values = vec![input[0], input[1]];
            for step in 2..=LENGTH {
                values.push((1.0 + input[2]) * values[step - 1] - values[step - 2]);
            }
            values
        };
        let values: Vec<f32> = inputs(items, 3).into_iter().flat_map(sequence).collect();
        let x = floats(values, [items.indices.len(), LENGTH + 1], &items.device);
        let steps = (0..LENGTH).map(|step| x.clone().slice(s![.., step..step + 1])).collect();
        let outputs = self.lstm.iter().fold(steps, |steps, cell| cell.forward(steps));
        let output = self.output.forward(outputs.into_iter().last().expect("`LENGTH` is not 0"));
        (output - x.slice(s![.., LENGTH..])).square().mean()
    }
}

impl Client for Recurrent {
    type Model = Self;

    const NAME: &'static str = "lstm, an optimizer in a saved configuration";
    const ROUTING: &'static str = "\
        Muon: lstm.*.weight_hh.weight lstm.*.weight_ih.weight\n\
        AdamW (head): output.weight";

    fn model(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let cell = |inputs| Cell {
            weight_ih: linear(inputs, 4 * WIDTH),
            weight_hh: linear(WIDTH, 4 * WIDTH),
        };
        Self { lstm: vec![cell(1), cell(WIDTH)], output: linear(WIDTH, 1) }
    }

    fn train(run: &Run, model: Self) -> Self {
        let path = run.file("config.json");
        let config = match run.is_resumed() {
            true => TrainingConfig::load(path).expect("the configuration was saved"),
            false => {
                let config = TrainingConfig::new(MuonConfig::new());
                config.save(path).expect("the configuration can be saved");
                config
            }
        };
        let mut optim = run.optimizer(&Settings::new(config.optimizer.clone()), &model);
        let mut model = model;
        if run.is_resumed() {
            model = model.load_file(run.file("model"));
            optim = optim.load(run.file("optimizer")).expect("the optimizer was saved");
        }
        for step in run.steps.clone() {
            let loss = model.error(&run.batch(step, config.batch));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(run.rate(step), model, gradients);
        }
        model.clone().save_file(run.file("model")).expect("the model can be saved");
        optim.save(run.file("optimizer")).expect("the optimizer can be saved");
        model
    }

    /// The gates.
    fn blocks() -> Vec<RoutingRule> {
        vec![RoutingRule::muon("weight_(ih|hh)").split([WIDTH; 4]).into()]
    }

    fn loss(model: &Self, items: Items) -> f32 {
        model.error(&items).into_scalar()
    }
}
