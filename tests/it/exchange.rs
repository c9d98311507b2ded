//! Runs that leave as safetensors and come back, and the names that other code bases read.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{
    Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig, LinearLayout,
};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use distmuon::distributed::Layout;
use distmuon::exchange::{Exchange, Implementation};
use distmuon::{
    AdamWConfig, Coefficients, DistMuonConfig, Error, IterationDtype, LionConfig, LrScale,
    MasterWeights, MatrixLayout, MomentumConfig, MomentumForm, MuonConfig, NewtonSchulzConfig,
    Recipe, RoutingRule, WeightDecay, World, checkpoint,
};
use distmuon_testing::excused;
use distmuon_testing::models::{self, Fixed};
use distmuon_testing::precision::{self, Rounded, has};
use safetensors::tensor::Dtype;
use safetensors::{SafeTensors, serialize_to_file, tensor::TensorView};
use serde::de::DeserializeOwned;

/// Tensors of a file by name: type, shape and bytes.
type Contents = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A layer of every kind that has another form in PyTorch, and others.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    blocks: Vec<Linear>,
    columns: Linear,
    norm: LayerNorm,
    experts: Param<Tensor<3>>,
    counts: Param<Tensor<1, Int>>,
    head: Linear,
}

impl Net {
    fn new(seed: u64) -> Self {
        let device = Device::default().autodiff();
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device);
        let net = Self {
            embedding: EmbeddingConfig::new(11, 6).init(&device),
            blocks: vec![linear(6, 9), linear(9, 9)],
            // Square, so that its shape does not show its layout.
            columns: LinearConfig::new(9, 9).with_layout(LinearLayout::Col).init(&device),
            norm: LayerNormConfig::new(9).init(&device),
            experts: Param::from_tensor(Tensor::ones([2, 5, 4], &device).require_grad()),
            counts: Param::initialized(
                ParamId::new(),
                Tensor::from_data([seed as i64, 2, 3], &device),
            ),
            head: linear(9, 11),
        };
        net.map(&mut Fixed::new(seed))
    }
}

fn config(form: MomentumForm) -> MuonConfig {
    MuonConfig::new()
        .with_momentum(MomentumConfig::new().with_form(form))
        .with_rule(RoutingRule::muon("experts").batch())
}

fn form(implementation: Implementation) -> MomentumForm {
    match implementation {
        Implementation::Dion => MomentumForm::Sum,
        _ => MomentumForm::Average,
    }
}

fn steps<M: Module>(
    (mut net, mut optim): (M, ModuleOptimizer),
    numbers: std::ops::Range<u64>,
) -> (M, ModuleOptimizer) {
    for number in numbers {
        let gradients = models::gradients(&net, number);
        net = optim.step(0.01, net, gradients);
    }
    (net, optim)
}

/// A run of three steps, saved, in a folder.
fn saved(config: &MuonConfig) -> (tempfile::TempDir, (Net, ModuleOptimizer)) {
    let folder = tempfile::tempdir().unwrap();
    let net = Net::new(7);
    let optim = config.init(&net);
    let (net, optim) = steps((net, optim), 0..3);
    checkpoint::save(folder.path().join("run.bpk"), &net, &optim, &3usize).unwrap();
    (folder, (net, optim))
}

/// A run that continues from a checkpoint, with another model than the one that saved it.
fn loaded<M: Module, P: DeserializeOwned>(
    path: &Path,
    config: &MuonConfig,
    net: M,
) -> (M, ModuleOptimizer, P) {
    let optim = config.init(&net);
    checkpoint::load(path, net, optim).unwrap()
}

/// The tensors of a file: types, shapes and bytes.
fn tensors(path: &Path) -> Contents {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let entry = |(name, view): (&str, TensorView<'_>)| {
        (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.iter().map(entry).collect()
}

fn write(path: &Path, tensors: &Contents) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    serialize_to_file(views, None, path).unwrap();
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// The transpose of a matrix, as bytes.
fn transpose(matrix: Tensor<2>) -> Vec<u8> {
    matrix.transpose().to_data().as_bytes().to_vec()
}

#[test]
fn a_checkpoint_in_parts_leaves_as_a_file_does() {
    let (folder, (net, optim)) = saved(&config(MomentumForm::Average));
    let at = |name: &str| folder.path().join(name);
    let mut saver = checkpoint::Saver::new().with_parts();
    saver.save(at("run.parts"), &net, &optim, &3usize).unwrap();
    saver.wait().unwrap();
    let exchange = Exchange::new(Implementation::Torch);
    for from in ["run.bpk", "run.parts"] {
        exchange.export(at(from), at(&format!("{from}.file")), &Net::new(1)).unwrap();
    }
    assert!(tensors(&at("run.bpk.file")) == tensors(&at("run.parts.file")));
}

#[test]
fn a_run_comes_back_from_every_implementation_and_continues() {
    for implementation in Implementation::ALL {
        let config = config(form(implementation));
        let (folder, (net, optim)) = saved(&config);
        let at = |name: &str| folder.path().join(name);
        let exchange = Exchange::new(implementation);
        let left_out = exchange.export(at("run.bpk"), at("file"), &Net::new(1)).unwrap();
        // The steps without a gradient of each matrix of a stack: there were none.
        let left_out: Vec<String> = left_out.iter().map(ToString::to_string).collect();
        let idle = format!("a file of {implementation} has no place for `idle`");
        assert_eq!(left_out, [format!("optimizer state of `experts`: {idle}")]);
        exchange.import(at("file"), at("back.bpk"), &Net::new(2), &3usize).unwrap();

        let (back, back_optim, step) = loaded::<_, usize>(&at("back.bpk"), &config, Net::new(3));
        assert_eq!(step, 3);
        assert_eq!(models::weights(&back), models::weights(&net), "{implementation}");
        assert_eq!(
            models::bits(&back.columns.weight.val()),
            models::bits(&net.columns.weight.val())
        );
        assert_eq!(back.counts.val().into_data(), net.counts.val().into_data());
        let (expected, _) = steps((net, optim), 3..6);
        let (continued, _) = steps((back, back_optim), 3..6);
        // The bias corrections of AdamW are computed anew.
        let expected_values = models::values(&expected);
        assert_close(&models::values(&continued), &expected_values);
        let experts = [&continued, &expected].map(|net| models::bits(&net.experts.val()));
        assert_eq!(experts[0], experts[1], "{implementation}: Muon's bits");
        on_ranks(&at("back.bpk"), &config, &expected_values);
    }
}

/// A model of another stack that was published without its optimizer.
#[test]
fn weights_alone_come_with_states_that_start_empty() {
    let config = config(MomentumForm::Average);
    let (folder, (net, _)) = saved(&config);
    let at = |name: &str| folder.path().join(name);
    let exchange = Exchange::new(Implementation::Torch);
    exchange.export(at("run.bpk"), at("file"), &Net::new(1)).unwrap();
    let mut file = tensors(&at("file"));
    file.retain(|name, _| !name.starts_with("optimizer."));
    write(&at("weights"), &file);
    exchange.import(at("weights"), at("back.bpk"), &Net::new(2), &0usize).unwrap();
    let (back, optim, _) = loaded::<_, usize>(&at("back.bpk"), &config, Net::new(3));
    assert_eq!(models::weights(&back), models::weights(&net));
    let expected = steps((back.clone(), config.init(&back)), 0..3).0;
    assert_eq!(models::weights(&steps((back, optim), 0..3).0), models::weights(&expected));
}

#[test]
fn the_momentum_of_lion_comes_back() {
    for implementation in Implementation::ALL {
        let config = config(form(implementation)).with_rest(LionConfig::new().into());
        let (folder, (net, optim)) = saved(&config);
        let at = |name: &str| folder.path().join(name);
        // Lion counts no steps.
        let exchange = Exchange::new(implementation).with_steps(3);
        exchange.export(at("run.bpk"), at("file"), &Net::new(1)).unwrap();
        exchange.import(at("file"), at("back.bpk"), &Net::new(2), &3usize).unwrap();
        let (back, of_back, _) = loaded::<_, usize>(&at("back.bpk"), &config, Net::new(3));
        let (expected, _) = steps((net, optim), 3..6);
        let (continued, _) = steps((back, of_back), 3..6);
        assert_eq!(models::weights(&continued), models::weights(&expected), "{implementation}");
    }
}

#[test]
fn an_imported_run_continues_with_divided_parameters() {
    let config = config(MomentumForm::Average);
    let (folder, (net, optim)) = saved(&config);
    let at = |name: &str| folder.path().join(name);
    let exchange = Exchange::new(Implementation::Torch);
    exchange.export(at("run.bpk"), at("file"), &Net::new(1)).unwrap();
    exchange.import(at("file"), at("back.bpk"), &Net::new(2), &3usize).unwrap();
    let loss = |net: &Net| {
        let device = net.head.weight.val().device();
        let tokens = Tensor::<2, Int>::from_data([[1, 5, 3]], &device);
        let x = net.embedding.forward(tokens);
        let x = net.blocks.iter().fold(x, |x, block| block.forward(x));
        net.head.forward(net.norm.forward(net.columns.forward(x))).square().mean()
    };
    let (mut alone, mut optim) = (net, optim);
    for _ in 0..3 {
        let gradients = GradientsParams::from_grads(loss(&alone).backward(), &alone);
        alone = optim.step(0.01, alone, gradients);
    }
    let device = Device::default().autodiff().gradient_checkpointing();
    let runs = World::threads(vec![device; 2], |world| {
        let dist = DistMuonConfig::new().with_muon(config.clone());
        let layout = Layout::from(&world).owned("dp").with_small_elements(0);
        let (net, optim) = dist.start(&layout, Net::new(4))?;
        let (mut net, mut optim, _) = optim.load::<_, usize>(at("back.bpk"), net)?;
        for _ in 0..3 {
            let gradients = optim.backward(&loss(&net), &net)?;
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, Error>(models::values(&layout.unshard(&net)?))
    });
    for run in runs.unwrap() {
        assert_close(&run, &models::values(&alone));
    }
}

/// Fails for weights that differ by more than roundings of the bias corrections.
fn assert_close(actual: &[f32], expected: &[f32]) {
    let difference = models::largest_difference(actual, expected);
    assert!(difference < 1e-6, "{difference:e}");
}

/// Loads a checkpoint on two ranks, and compares the run with that of one device.
fn on_ranks(path: &Path, config: &MuonConfig, expected: &[f32]) {
    let device = Device::default().autodiff();
    let runs = World::threads(vec![device; 2], |world| {
        let net = Net::new(4);
        let optim = DistMuonConfig::new().with_muon(config.clone()).init(&world, &net)?;
        let (mut net, mut optim, _): (_, _, usize) = checkpoint::load(path, net, optim)?;
        for number in 3..6 {
            let gradients = models::gradients(&net, number);
            net = optim.step(0.01, net, gradients)?;
        }
        Ok::<_, Error>(models::values(&net))
    });
    for run in runs.unwrap() {
        assert_close(&run, expected);
    }
}

#[test]
fn files_have_the_names_shapes_and_types_of_pytorch() {
    let (folder, (net, _)) = saved(&config(MomentumForm::Average));
    let file = folder.path().join("file");
    let run = folder.path().join("run.bpk");
    let exported = |exchange: Exchange| {
        exchange.export(&run, &file, &net).unwrap();
        tensors(&file)
    };
    let torch = exported(Exchange::new(Implementation::Torch));
    let shape = |name: &str| (torch[name].0, torch[name].1.clone());
    assert_eq!(shape("blocks.0.weight"), (Dtype::F32, vec![9, 6]));
    assert_eq!(shape("optimizer.blocks.0.weight.momentum_buffer"), (Dtype::F32, vec![9, 6]));
    assert_eq!(shape("embedding.weight"), (Dtype::F32, vec![11, 6]));
    assert_eq!(shape("optimizer.embedding.weight.exp_avg_sq"), (Dtype::F32, vec![11, 6]));
    assert_eq!(shape("experts"), (Dtype::F32, vec![2, 5, 4]));
    assert_eq!(shape("norm.weight"), (Dtype::F32, vec![9]));
    assert_eq!(shape("optimizer.norm.bias.step"), (Dtype::F32, vec![]));
    assert_eq!(floats(&torch["optimizer.norm.bias.step"].2), [3.0]);
    assert_eq!(torch["counts"].1, [3]);
    assert_eq!(torch["blocks.0.weight"].2, transpose(net.blocks[0].weight.val()));
    assert_eq!(torch["columns.weight"].2, transpose(net.columns.weight.val()));
    assert!(!torch.contains_key("optimizer.blocks.0.weight.step"));
    let header = fs::read(&file).unwrap();
    assert!(String::from_utf8_lossy(&header[..4096]).contains(r#""format":"pt""#));

    let keller = exported(Exchange::new(Implementation::KellerJordan));
    let (dtype, shape, bytes) = &keller["optimizer.norm.bias.step"];
    assert_eq!((*dtype, shape.len()), (Dtype::I64, 0));
    assert_eq!(bytes[..], 3i64.to_le_bytes());

    let dion = exported(Exchange::new(Implementation::Dion));
    assert_eq!(dion["optimizer.blocks.0.weight.step"].2, 3i64.to_le_bytes());
    let momentum = |name: &str| dion[&format!("optimizer.{name}.momentum")].2.clone();
    assert_eq!(momentum("norm.bias"), torch["optimizer.norm.bias.exp_avg"].2);
    assert_eq!(momentum("experts"), torch["optimizer.experts.momentum_buffer"].2);

    let renamed = Exchange::new(Implementation::Torch)
        .with_names(|name| name.replace("blocks.", "transformer.h."));
    let renamed = exported(renamed);
    assert_eq!(renamed["transformer.h.1.bias"], torch["blocks.1.bias"]);
    assert!(renamed.contains_key("optimizer.transformer.h.1.weight.momentum_buffer"));
}

/// The code bases of which there are runs.
const GOLDEN: [Implementation; 3] =
    [Implementation::Torch, Implementation::KellerJordan, Implementation::Megatron];

/// The iteration of all runs of other code bases.
fn iteration() -> NewtonSchulzConfig {
    NewtonSchulzConfig::new()
        .with_coefficients(Coefficients::KellerJordan)
        .with_steps(Some(5))
        .with_epsilon(1e-7)
        .with_dtype(IterationDtype::F32)
}

/// Settings of the runs in `tests/data/torch_run.py`.
fn settings(implementation: Implementation) -> MuonConfig {
    let recipe = match implementation {
        Implementation::Torch => Recipe::Torch,
        _ => Recipe::KellerJordan,
    };
    let adamw = AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01);
    MuonConfig::preset(recipe, 1)
        .with_newton_schulz(iteration())
        .with_momentum(0.95.into())
        .with_weight_decay(0.1.into())
        .with_lr_scale(LrScale::Original)
        .with_layout(MatrixLayout::InOut)
        .with_adamw(adamw)
        .with_rule(RoutingRule::muon("up.weight"))
        .with_rule(RoutingRule::muon("hidden.weight"))
}

/// The model of `tests/data/torch_run.py`.
#[derive(Module, Debug)]
struct OfTorch {
    up: Linear,
    hidden: Linear,
    norm: LayerNorm,
}

impl OfTorch {
    fn new() -> Self {
        let device = Device::default().autodiff();
        Self {
            up: LinearConfig::new(6, 10).init(&device),
            hidden: LinearConfig::new(10, 10).init(&device),
            norm: LayerNormConfig::new(10).init(&device),
        }
    }
}

/// The other side's trajectory, in the layout of Burn.
struct Trajectory(Contents);

/// A map of every parameter of a model to a tensor of the trajectory.
struct Named<'a> {
    trajectory: &'a Trajectory,
    prefix: String,
    path: Vec<String>,
    gradients: GradientsParams,
    takes: bool,
    error: f64,
    before: String,
}

impl Trajectory {
    fn read(implementation: Implementation) -> Self {
        Self(tensors(&data(implementation, "run")))
    }

    fn tensor<const D: usize>(&self, prefix: &str, path: &str) -> Tensor<D> {
        let name = path.replace("gamma", "weight").replace("beta", "bias");
        let (_, shape, bytes) = &self.0[&format!("{prefix}.{name}")];
        let data = TensorData::new(floats(bytes), shape.clone());
        let tensor = Tensor::from_data(data, &Device::default());
        if D == 2 { tensor.swap_dims(0, 1) } else { tensor }
    }

    fn walk(&self, model: OfTorch, prefix: &str, takes: bool) -> (OfTorch, GradientsParams, f64) {
        let mut named = Named {
            trajectory: self,
            prefix: prefix.to_owned(),
            path: vec![],
            gradients: GradientsParams::new(),
            takes,
            error: 0.0,
            before: "param.3".to_owned(),
        };
        let model = model.map(&mut named);
        (model, named.gradients, named.error)
    }

    /// Steps with the gradients of the trajectory, and the largest error to its parameters.
    fn follow<O>(
        &self,
        mut model: OfTorch,
        optim: &mut O,
        numbers: std::ops::RangeInclusive<usize>,
        mut step: impl FnMut(&mut O, OfTorch, GradientsParams) -> OfTorch,
    ) -> (OfTorch, f64) {
        let mut worst = 0f64;
        for number in numbers {
            let (old, gradients, _) = self.walk(model, &format!("grad.{number}"), false);
            model = step(optim, old, gradients);
            if number > 3 {
                let (same, _, error) = self.walk(model, &format!("param.{number}"), false);
                (model, worst) = (same, worst.max(error));
            }
        }
        (model, worst)
    }
}

impl ModuleMapper for Named<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let value: Tensor<D> = self.trajectory.tensor(&self.prefix, &path);
        if self.prefix.starts_with("grad") {
            self.gradients.register(param.id, value);
            return param;
        }
        if self.takes {
            return param.map(|_| Tensor::from_inner(value).require_grad());
        }
        let before: Tensor<D> = self.trajectory.tensor(&self.before, &path);
        self.error = self.error.max(relative_error(param.val().inner(), value, before, &path));
        param
    }
}

/// The distance of a parameter to its expected value, in units of the distance from the value
/// before to the expected one.
fn relative_error<const D: usize>(
    actual: Tensor<D>,
    expected: Tensor<D>,
    before: Tensor<D>,
    path: &str,
) -> f64 {
    let norm = |tensor: Tensor<D>| tensor.square().sum().sqrt().into_scalar::<f32>();
    let error = norm(actual - expected.clone()) / norm(expected - before);
    assert!(error.is_finite(), "{path}");
    error.into()
}

/// A file of `tests/data/torch_run.py`.
fn data(implementation: Implementation, kind: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    folder.join(format!("{implementation}-{kind}.safetensors"))
}

/// The tolerance of the golden trajectories of the same optimizers in float32.
const TOLERANCE: f64 = 1e-4;

#[test]
fn runs_of_pytorch_continue_here() {
    for implementation in GOLDEN {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.bpk");
        let state = data(implementation, "state");
        let exchange = Exchange::new(implementation);
        exchange.import(state, &path, &OfTorch::new(), &3usize).unwrap();
        let trajectory = Trajectory::read(implementation);
        let settings = settings(implementation);
        let net = OfTorch::new();
        let optim = settings.init(&net);
        let (net, mut optim, _): (_, _, usize) = checkpoint::load(&path, net, optim).unwrap();
        let (_, error) = trajectory
            .follow(net, &mut optim, 4..=6, |optim, net, grads| optim.step(0.02, net, grads));
        assert!(error <= TOLERANCE, "{implementation}: {error:.1e}");
        // Without the states, the same steps are others.
        let (net, mut optim) = (checkpoint::load_weights(&path, OfTorch::new()).unwrap(), None);
        let (_, error) = trajectory.follow(net, &mut optim, 4..=6, |optim, net, grads| {
            optim.get_or_insert_with(|| settings.init(&net)).step(0.02, net, grads)
        });
        assert!(error > 100.0 * TOLERANCE, "{implementation}: {error:.1e}");
    }
}

#[test]
fn runs_continue_in_pytorch() {
    for implementation in GOLDEN {
        let folder = tempfile::tempdir().unwrap();
        let [run, file] = ["run.bpk", "run.safetensors"].map(|name| folder.path().join(name));
        let trajectory = Trajectory::read(implementation);
        let (net, ..) = trajectory.walk(OfTorch::new(), "init", true);
        let mut optim = settings(implementation).init(&net);
        let (net, _) = trajectory
            .follow(net, &mut optim, 1..=3, |optim, net, grads| optim.step(0.02, net, grads));
        checkpoint::save(&run, &net, &optim, &3usize).unwrap();
        Exchange::new(implementation).export(&run, &file, &net).unwrap();
        // The file that PyTorch wrote at this step, except for roundings.
        let (ours, theirs) = (tensors(&file), tensors(&data(implementation, "state")));
        let described = |tensors: &Contents| -> Vec<_> {
            tensors
                .iter()
                .map(|(name, (dtype, shape, _))| (name.clone(), *dtype, shape.clone()))
                .collect()
        };
        assert_eq!(described(&ours), described(&theirs), "{implementation}");
        for (name, (dtype, _, bytes)) in &ours {
            if *dtype != Dtype::F32 {
                assert_eq!(*bytes, theirs[name].2, "{implementation}: {name}");
                continue;
            }
            let (ours, theirs) = (floats(bytes), floats(&theirs[name].2));
            let largest = theirs.iter().fold(0f32, |most, value| most.max(value.abs()));
            let difference = models::largest_difference(&ours, &theirs);
            assert!(difference <= 1e-4 * largest, "{name}: {difference:e} of {largest:e}");
        }
        in_pytorch(implementation, &file);
    }
}

/// A layer that dion and Emerging-Optimizers, whose Muon Megatron-LM has, trained for six steps.
#[derive(Module, Debug)]
struct OneLayer {
    layer: Linear,
}

impl OneLayer {
    fn new([outputs, inputs]: [usize; 2]) -> Self {
        let layer = LinearConfig::new(inputs, outputs).with_bias(false);
        Self { layer: layer.init(&Device::default().autodiff()) }
    }

    /// With another weight.
    fn with(self, weight: Tensor<2>) -> Self {
        let weight = self.layer.weight.map(|_| Tensor::from_inner(weight).require_grad());
        Self { layer: Linear { weight, ..self.layer } }
    }

    fn step(self, optim: &mut ModuleOptimizer, gradient: Tensor<2>) -> Self {
        let mut gradients = GradientsParams::new();
        gradients.register(self.layer.weight.id, gradient);
        optim.step(LR, self, gradients)
    }
}

/// The learning rate of the recorded runs.
const LR: f64 = 0.02;

/// A trajectory of six steps of another implementation, its settings, and the momentum after three
/// steps, which follows from the gradients.
struct Recorded {
    tensors: Contents,
    shape: [usize; 2],
    config: MuonConfig,
    momentum: Vec<f32>,
}

impl Recorded {
    fn read(implementation: Implementation, folder: &Path) -> Self {
        let (file, scale, decay) = match implementation {
            Implementation::Dion => {
                let decay = WeightDecay::Decoupled(0.05.into());
                ("dion-classical-momentum", LrScale::Spectral, decay)
            }
            _ => {
                let decay = WeightDecay::Independent(0.01.into());
                ("eo-independent-decay", LrScale::Original, decay)
            }
        };
        let form = form(implementation);
        let momentum = MomentumConfig::new().with_momentum(0.95.into()).with_form(form);
        let config = MuonConfig::new()
            .with_newton_schulz(iteration())
            .with_momentum(momentum)
            .with_weight_decay(decay)
            .with_lr_scale(scale)
            .with_layout(MatrixLayout::InOut)
            .with_rule(RoutingRule::muon("layer.weight"));
        let tensors = tensors(&folder.join("family").join(format!("{file}.safetensors")));
        let shape: [usize; 2] = tensors["param.0.init"].1.clone().try_into().unwrap();
        let momentum = vec![0.0; shape[0] * shape[1]];
        let mut recorded = Self { tensors, shape, config, momentum };
        let fresh = if form == MomentumForm::Sum { 1.0 } else { 1.0 - 0.95 };
        for step in 1..=3 {
            let gradient = floats(recorded.bytes(&format!("grad.0.{step}")));
            for (momentum, gradient) in recorded.momentum.iter_mut().zip(gradient) {
                *momentum = 0.95 * *momentum + fresh * gradient;
            }
        }
        recorded
    }

    fn bytes(&self, name: &str) -> &[u8] {
        &self.tensors[name].2
    }

    /// A tensor in Burn's layout.
    fn tensor(&self, name: &str) -> Tensor<2> {
        let data = TensorData::new(floats(self.bytes(name)), self.shape);
        Tensor::from_data(data, &Device::default()).transpose()
    }

    /// The largest error of some steps.
    fn follow(
        &self,
        mut net: OneLayer,
        optim: &mut ModuleOptimizer,
        steps: std::ops::RangeInclusive<usize>,
    ) -> (OneLayer, f64) {
        let mut worst = 0f64;
        for step in steps {
            net = net.step(optim, self.tensor(&format!("grad.0.{step}")));
            let expected = self.tensor(&format!("param.0.{step}"));
            let (actual, start) = (net.layer.weight.val().inner(), self.tensor("param.0.init"));
            worst = worst.max(relative_error(actual, expected, start, "layer.weight"));
        }
        (net, worst)
    }
}

/// The optimizers of packages that CI does not install were recorded elsewhere, and their states
/// follow from their rules.
#[test]
fn recorded_runs_of_dion_and_megatron_continue_here_and_leave_as_their_files() {
    let Some(folder) = std::env::var_os("DISTMUON_CONFORMANCE_DIR").map(PathBuf::from) else {
        excused("no trajectories of other implementations: set DISTMUON_CONFORMANCE_DIR");
        return;
    };
    for (implementation, key) in
        [(Implementation::Dion, "momentum"), (Implementation::Megatron, "momentum_buffer")]
    {
        let recorded = Recorded::read(implementation, &folder);
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let exchange = Exchange::new(implementation).with_steps(3);
        let entry = |bytes: Vec<u8>| (Dtype::F32, recorded.shape.to_vec(), bytes);
        let momentum = recorded.momentum.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut file = Contents::new();
        file.insert("layer.weight".to_owned(), entry(recorded.bytes("param.0.3").to_vec()));
        file.insert(format!("optimizer.layer.weight.{key}"), entry(momentum));
        write(&at("file"), &file);

        let fresh = || OneLayer::new(recorded.shape);
        exchange.import(at("file"), at("run.bpk"), &fresh(), &3usize).unwrap();
        let (net, mut optim, _) = loaded::<_, usize>(&at("run.bpk"), &recorded.config, fresh());
        let (_, error) = recorded.follow(net, &mut optim, 4..=6);
        assert!(error <= TOLERANCE, "{implementation}: {error:.1e}");
        // Without the state, the same steps are others.
        let net = fresh().with(recorded.tensor("param.0.3"));
        let mut optim = recorded.config.init(&net);
        let (_, error) = recorded.follow(net, &mut optim, 4..=6);
        assert!(error > 100.0 * TOLERANCE, "{implementation}: {error:.1e}");

        let net = fresh().with(recorded.tensor("param.0.init"));
        let mut optim = recorded.config.init(&net);
        let (net, error) = recorded.follow(net, &mut optim, 1..=3);
        assert!(error <= TOLERANCE, "{implementation}: {error:.1e}");
        checkpoint::save(at("ours.bpk"), &net, &optim, &3usize).unwrap();
        exchange.export(at("ours.bpk"), at("ours"), &net).unwrap();
        let ours = tensors(&at("ours"));
        for (name, expected) in &file {
            let (expected, (dtype, shape, actual)) = (floats(&expected.2), &ours[name]);
            assert_eq!((*dtype, &**shape), (Dtype::F32, &recorded.shape[..]), "{name}");
            let largest = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
            let difference = models::largest_difference(&floats(actual), &expected);
            assert!(difference <= 1e-4 * largest, "{name}: {difference:e} of {largest:e}");
        }
    }
}

#[test]
fn master_weights_leave_and_come_back_in_files_of_megatron() {
    if !has(FloatDType::BF16) {
        return;
    }
    let config = config(MomentumForm::Average);
    let of_megatron = |seed| Net::new(seed).map(&mut Rounded(DType::BF16));
    let train = |(mut net, mut optim): (Net, ModuleOptimizer), numbers: std::ops::Range<u64>| {
        for number in numbers {
            let gradients = precision::gradients(&net, number, DType::BF16);
            // Most steps are smaller than what the parameters can change by.
            net = optim.step(2e-4, net, gradients);
        }
        (net, optim)
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let net = of_megatron(7);
    let optim = config.init(&net);
    let run = train((net, optim), 0..3);
    checkpoint::save(at("run.bpk"), &run.0, &run.1, &3usize).unwrap();
    let expected = precision::floats(&train(run, 3..9).0);

    let exchange = Exchange::new(Implementation::Megatron);
    let left_out = exchange.export(at("run.bpk"), at("file"), &of_megatron(1)).unwrap();
    assert!(left_out.iter().all(|left| left.to_string().contains("`idle`")), "{left_out:?}");
    let file = tensors(&at("file"));
    for (name, shape) in [("blocks.0.weight", vec![9, 6]), ("embedding.weight", vec![11, 6])] {
        let (dtype, found, master) = &file[&format!("optimizer.{name}.fp32_param")];
        assert_eq!((*dtype, found), (Dtype::F32, &shape), "{name}");
        assert_eq!(file[name].0, Dtype::BF16);
        // The digits that the parameter does not have.
        assert!(master.chunks(4).any(|value| value[..2] != [0, 0]), "{name}");
    }
    let continued = |implementation: Implementation| {
        let exchange = Exchange::new(implementation);
        exchange.export(at("run.bpk"), at("file"), &of_megatron(1)).unwrap();
        exchange.import(at("file"), at("back.bpk"), &of_megatron(2), &3usize).unwrap();
        let (net, optim, _) = loaded::<_, usize>(&at("back.bpk"), &config, of_megatron(3));
        precision::floats(&train((net, optim), 3..9).0)
    };
    // The bias corrections of AdamW are computed anew, so that a rounding may differ.
    let differing = |values: &[f32]| values.iter().zip(&expected).filter(|(a, b)| a != b).count();
    let with = differing(&continued(Implementation::Megatron));
    let without = differing(&continued(Implementation::Torch));
    assert!(100 * with <= expected.len(), "{with} of {} values differ", expected.len());
    assert!(
        without > 10 * with.max(1),
        "{without} values differ without master weights, {with} with"
    );

    // A model in float32 has no place for them.
    exchange.export(at("run.bpk"), at("file"), &of_megatron(1)).unwrap();
    let refused = refused(&exchange, &at("file"));
    assert!(refused.contains("expected no master weights"), "{refused}");
}

/// Python, if it can import what is needed.
fn python(imports: &str) -> Option<Command> {
    let python = || Command::new(std::env::var_os("PYTHON").unwrap_or("python3".into()));
    let imported = python().args(["-c", imports]).output();
    let can_import = imported.is_ok_and(|output| output.status.success());
    if !can_import {
        excused(format!("python3 can't run `{imports}`"));
    }
    can_import.then(python)
}

#[test]
fn folders_of_megatron_become_files() {
    let Some(mut command) = python("import torch, safetensors") else { return };
    command.arg(data(Implementation::Torch, "run").with_file_name("megatron.py")).arg("check");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Continues in PyTorch, where it and the implementation are installed.
fn in_pytorch(implementation: Implementation, file: &Path) {
    let optimizer = match implementation {
        Implementation::Torch => "torch.optim.Muon",
        Implementation::Megatron => {
            "from emerging_optimizers.orthogonalized_optimizers import Muon"
        }
        _ => "from muon import SingleDeviceMuonWithAuxAdam",
    };
    let Some(mut command) = python(&format!("import torch, safetensors; {optimizer}")) else {
        return;
    };
    command.arg(data(implementation, "run").with_file_name("torch_run.py"));
    command.args(["continue", implementation.name()]).arg(file).arg(data(implementation, "run"));
    let output = command.output().unwrap();
    println!("{implementation}: {}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{output:?}");
}

/// The reason and remedy of an import that fails, which leaves the old checkpoint in place.
fn refused(exchange: &Exchange, path: &Path) -> String {
    let target = path.with_extension("bpk");
    fs::write(&target, "old").unwrap();
    let error = exchange.import(path, &target, &Net::new(1), &3usize).unwrap_err();
    assert!(matches!(&error, Error::Exchange { path: named, .. } if named == path), "{error}");
    assert_eq!(fs::read(&target).unwrap(), b"old", "{error}");
    let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
    // Those of the test: a run, two files, and the targets of both.
    assert!(left.len() <= 5, "temporary files: {left:?}");
    error.to_string()
}

#[test]
fn files_that_do_not_fit_are_refused_with_all_differences() {
    let (folder, (net, _)) = saved(&config(MomentumForm::Average));
    let at = |name: &str| folder.path().join(name);
    let torch = Exchange::new(Implementation::Torch);
    torch.export(at("run.bpk"), at("good"), &net).unwrap();
    let good = tensors(&at("good"));
    let changed = |change: &dyn Fn(&mut Contents)| {
        let mut tensors = good.clone();
        change(&mut tensors);
        write(&at("bad"), &tensors);
        refused(&torch, &at("bad"))
    };
    let scalar = |dtype: Dtype, bytes: &[u8]| (dtype, vec![], bytes.to_vec());

    // Several at once.
    let error = changed(&|tensors| {
        tensors.remove("blocks.0.bias");
        tensors.insert("lm_head.bias".into(), good["head.bias"].clone());
        tensors.get_mut("norm.weight").unwrap().1 = vec![3, 3];
        let buffer = tensors.remove("optimizer.blocks.1.weight.momentum_buffer").unwrap();
        tensors.insert("optimizer.blocks.1.weight.momentum".into(), buffer.clone());
        tensors.insert("optimizer.other.momentum_buffer".into(), buffer);
        tensors.remove("optimizer.head.bias.step");
    });
    for text in [
        "weights of `blocks.0.bias`: expected a tensor `blocks.0.bias`, got none",
        "weights of `lm_head.bias`: expected no parameter, got a tensor",
        "weights of `norm.gamma`: expected [9] of `norm.weight`, got [3, 3]",
        "optimizer state of `blocks.1.weight`: its keys are unknown in torch",
        "optimizer state of `other`: expected no parameter, got a state",
        "optimizer state of `head.bias`: its keys are unknown in torch",
    ] {
        assert!(error.contains(text), "{text}: {error}");
    }
    // A file of another implementation.
    let dion = refused(&Exchange::new(Implementation::Dion), &at("good"));
    assert!(dion.contains("are unknown in dion") && dion.contains("choose the impl"), "{dion}");
    // Types.
    let error = changed(&|tensors| {
        tensors.insert("head.bias".into(), (Dtype::F8_E4M3, vec![11], vec![0; 11]));
    });
    assert!(
        error.contains("`head.bias` has an unknown type") && error.contains("F8_E4M3"),
        "{error}"
    );
    let error = changed(&|tensors| {
        let third: Vec<u8> = [1.0 / 3.0; 11].iter().flat_map(|x: &f64| x.to_le_bytes()).collect();
        tensors.insert("head.bias".into(), (Dtype::F64, vec![11], third));
    });
    assert!(error.contains("expected f32, got f64"), "{error}");
    let error = changed(&|tensors| {
        tensors
            .insert("optimizer.head.bias.step".into(), scalar(Dtype::F32, &2.5f32.to_le_bytes()));
    });
    assert!(error.contains("is no number of steps: got [2.5]"), "{error}");
}

#[test]
fn types_are_converted_where_no_value_changes() {
    let (folder, (net, optim)) = saved(&config(MomentumForm::Average));
    let at = |name: &str| folder.path().join(name);
    let torch = Exchange::new(Implementation::Torch);
    torch.export(at("run.bpk"), at("file"), &net).unwrap();
    let mut file = tensors(&at("file"));
    let wide: Vec<u8> =
        floats(&file["head.bias"].2).iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect();
    file.insert("head.bias".into(), (Dtype::F64, vec![11], wide));
    write(&at("file"), &file);
    torch.import(at("file"), at("back.bpk"), &net, &3usize).unwrap();
    let (back, ..): (Net, _, usize) = checkpoint::load(at("back.bpk"), Net::new(2), optim).unwrap();
    assert_eq!(models::weights(&back), models::weights(&net));
}

#[cfg(unix)]
#[test]
fn a_symbolic_link_to_an_exported_file_stays() {
    let (folder, (net, _)) = saved(&config(MomentumForm::Average));
    let at = |name: &str| folder.path().join(name);
    std::os::unix::fs::symlink("file", at("latest")).unwrap();
    Exchange::new(Implementation::Torch).export(at("run.bpk"), at("latest"), &net).unwrap();
    assert!(at("latest").symlink_metadata().unwrap().is_symlink());
    assert_eq!(tensors(&at("file")).len(), tensors(&at("latest")).len());
}

#[test]
fn damaged_files_are_refused() {
    let (folder, (net, _)) = saved(&config(MomentumForm::Average));
    let at = |name: &str| folder.path().join(name);
    let torch = Exchange::new(Implementation::Torch);
    torch.export(at("run.bpk"), at("good"), &net).unwrap();
    let bytes = fs::read(at("good")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for length in [0, 7, 8, 100, header - 1, header, header + 9, bytes.len() - 1] {
        fs::write(at("bad"), &bytes[..length]).unwrap();
        refused(&torch, &at("bad"));
    }
    for position in [0, 7, 8, 20] {
        let mut bytes = bytes.clone();
        bytes[position] ^= 0x40;
        fs::write(at("bad"), &bytes).unwrap();
        refused(&torch, &at("bad"));
    }
    fs::remove_file(at("bad")).unwrap();
    let error = refused(&torch, &at("bad"));
    assert!(error.contains("cannot read it"), "{error}");
    // A damaged checkpoint leaves the old file in place.
    let run = fs::read(at("run.bpk")).unwrap();
    for position in (0..run.len()).step_by(61) {
        let mut damaged = run.clone();
        damaged[position] ^= 1;
        fs::write(at("run.bpk"), damaged).unwrap();
        let error = torch.export(at("run.bpk"), at("good"), &net).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { .. }), "byte {position}: {error}");
        assert!(fs::read(at("good")).unwrap() == bytes);
    }
}

#[test]
fn steps_of_muon_have_to_be_known() {
    #[derive(Module, Debug)]
    struct Matrix {
        layer: Linear,
    }
    let device = Device::default().autodiff();
    let net = || Matrix { layer: LinearConfig::new(4, 5).with_bias(false).init(&device) };
    let config = MuonConfig::new().with_rule(RoutingRule::muon("layer.weight"));
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let trained = net();
    let optim = config.init(&trained);
    let (trained, optim) = steps((trained, optim), 0..2);
    checkpoint::save(at("run.bpk"), &trained, &optim, &()).unwrap();
    let torch = Exchange::new(Implementation::Torch);
    torch.export(at("run.bpk"), at("file"), &trained).unwrap();
    let error = torch.import(at("file"), at("back.bpk"), &trained, &()).unwrap_err().to_string();
    assert!(error.contains("steps of `layer.weight` is unknown"), "{error}");
    assert!(error.contains("`Exchange::with_steps`"), "{error}");
    torch.with_steps(2).import(at("file"), at("back.bpk"), &trained, &()).unwrap();
    let (back, back_optim, ()) = loaded(&at("back.bpk"), &config, net());
    // The momentum rises over these steps.
    let [(back, _), (trained, _)] =
        [(back, back_optim), (trained, optim)].map(|run| steps(run, 2..4));
    assert_eq!(models::weights(&back), models::weights(&trained));
}

#[test]
fn what_has_no_place_is_listed() {
    let config = config(MomentumForm::Average)
        .with_parts(vec![distmuon::parts::NorMuon::new(0.95).into()])
        .with_master_weights(MasterWeights::Full);
    let (folder, (net, _)) = saved(&config);
    let at = |name: &str| folder.path().join(name);
    let torch = Exchange::new(Implementation::Torch);
    let left_out = torch.export(at("run.bpk"), at("file"), &net).unwrap();
    let experts = left_out.iter().find(|difference| difference.parameter == "experts").unwrap();
    assert!(experts.to_string().contains("a file of torch has no place for `"), "{experts}");
    // Such a state can't continue with the part, and says so at the load.
    torch.import(at("file"), at("back.bpk"), &net, &3usize).unwrap();
    let optim = config.init(&net);
    let loaded: distmuon::Result<(Net, _, usize)> = checkpoint::load(at("back.bpk"), net, optim);
    assert!(matches!(loaded, Err(Error::OtherRun { .. })));
}

/// The states that the guide names.
#[test]
fn states_that_another_stack_does_not_know_are_listed() {
    let config = config(MomentumForm::Average)
        .with_adamw(AdamWConfig::new().with_amsgrad(true))
        .with_rule(RoutingRule::muon(r"blocks\.0\.weight").split([3, 6]));
    let (folder, (net, _)) = saved(&config);
    let at = |name: &str| folder.path().join(name);
    let left = Exchange::new(Implementation::Torch).export(at("run.bpk"), at("file"), &net);
    let left: Vec<String> = left.unwrap().iter().map(ToString::to_string).collect();
    for path in ["embedding.weight", "blocks.0.weight", "norm.gamma"] {
        let is_listed = |line: &String| line.contains(&format!("`{path}`"));
        assert!(left.iter().any(is_listed), "{path}: {left:#?}");
    }
}

#[test]
fn names_of_implementations_and_parameters_are_checked() {
    for implementation in Implementation::ALL {
        assert_eq!(implementation.name().parse(), Ok(implementation));
    }
    let error = "optax".parse::<Implementation>().unwrap_err().to_string();
    assert!(error.contains("`dion` or `megatron`, got `optax`"), "{error}");
    let (folder, (net, _)) = saved(&config(MomentumForm::Average));
    let one = Exchange::new(Implementation::Torch).with_names(|_| "weight".to_owned());
    let file = folder.path().join("file");
    let error = one.export(folder.path().join("run.bpk"), &file, &net).unwrap_err();
    assert!(matches!(error, Error::Usage { .. }), "{error}");
    assert!(!file.exists());
    // A checkpoint of another model.
    let error = Exchange::new(Implementation::Torch)
        .export(folder.path().join("run.bpk"), &file, &OfTorch::new())
        .unwrap_err();
    assert!(matches!(error, Error::OtherRun { .. }), "{error}");
}

#[test]
fn the_guide_has_the_functions_that_are_tested() {
    let page = include_str!("../../docs/guide/exchange.md");
    let (_, block) = page.split_once("```python\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    let script = include_str!("../data/torch_run.py");
    let functions: Vec<&str> =
        block.split("\n\n\n").filter(|part| part.contains("optimizers")).collect();
    assert_eq!(functions.len(), 2, "{block}");
    for function in functions {
        assert!(script.contains(function.trim()), "{function}");
    }
}
