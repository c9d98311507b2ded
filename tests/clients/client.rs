//! The trait of all programs, a run of some steps, and its optimizer.

use std::ops::Range;
use std::path::{Path, PathBuf};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdamWConfig as BurnAdamWConfig, AdjustLrFn, GradientsParams, ModuleOptimizer,
    MuonConfig as BurnMuonConfig,
};
use burn::tensor::Device;
use distmuon::distributed::Gradients;
use distmuon::{
    AdamWConfig, DistModuleOptimizer, DistMuonConfig, MuonConfig, ParameterRole, RoutingRule,
    Schedule, World, checkpoint,
};
use distmuon_testing::models::values;

/// A program.
pub trait Client {
    type Model: Module;

    const NAME: &'static str;
    /// The optimizer of every parameter but vectors, as [`roles`](crate::roles) prints them.
    const ROUTING: &'static str;

    /// A new model, as the generator of the device has it.
    fn model(device: &Device) -> Self::Model;

    /// Trains a new model for the steps of a run, or the model that the run has saved.
    fn train(run: &Run, model: Self::Model) -> Self::Model;

    /// The loss for items that were not trained on.
    fn loss(model: &Self::Model, items: Items) -> f32;

    /// Rules that take the parts of a fused projection as matrices of their own. No test has them:
    /// `blocks` compares the losses.
    fn blocks() -> Vec<RoutingRule> {
        vec![]
    }

    /// The optimizers of the parameters, by default without a rule.
    fn roles(model: &Self::Model) -> String {
        crate::roles(&MuonConfig::new(), model)
    }
}

/// A program as functions.
#[derive(Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    pub expected: &'static str,
    pub roles: fn() -> String,
    /// Trains, and returns the elements of all parameters.
    pub train: fn(&Run) -> Vec<f32>,
    /// Trains on one device, or on every rank of several with the same data, and returns the
    /// elements of all. The model has initial values before, in the order of its fields.
    pub train_on_ranks: fn(&Run, usize) -> Vec<Vec<f32>>,
    /// Trains, and returns the loss for other items.
    pub loss: fn(&Run) -> f32,
    pub blocks: fn() -> Vec<RoutingRule>,
}

pub fn entry<C: Client>() -> Entry {
    Entry {
        name: C::NAME,
        expected: C::ROUTING,
        roles: || C::roles(&C::model(&device())),
        train: |run| values(&trained::<C>(run)),
        train_on_ranks: trained_on_ranks::<C>,
        loss: |run| {
            let device = device().inner();
            C::loss(&trained::<C>(run).valid(), Items { indices: OTHERS.collect(), device })
        },
        blocks: C::blocks,
    }
}

fn trained<C: Client>(run: &Run) -> C::Model {
    let device = device();
    // The model of a run that continues is another one than the saved one.
    device.seed(run.seed + run.steps.start as u64);
    C::train(run, C::model(&device))
}

fn trained_on_ranks<C: Client>(run: &Run, ranks: usize) -> Vec<Vec<f32>> {
    let device = device();
    device.seed(run.seed);
    let model = C::model(&device);
    // Drawn here: ranks would draw at the same time.
    _ = values(&model);
    if ranks == 1 {
        return vec![values(&C::train(run, model))];
    }
    let trained = World::threads_with(World::devices(ranks), model, |world, model| {
        let run = Run { world: Some(world), ..run.clone() };
        Ok::<_, distmuon::Error>(values(&C::train(&run, model)))
    });
    trained.expect("every rank trains")
}

/// Items that no run trains on.
pub const OTHERS: Range<usize> = 0..128;

pub fn device() -> Device {
    Device::default().autodiff()
}

/// The items of a batch, by their indices. Every program makes its data of them.
#[derive(Clone, Debug)]
pub struct Items {
    pub indices: Vec<usize>,
    pub device: Device,
}

/// An optimizer for hidden matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    DistMuon,
    /// Burn's Muon for those matrices of two dimensions that are Muon's here, Burn's AdamW for all
    /// others.
    BurnMuon,
    BurnAdamW,
}

/// The settings of a program, for each choice.
pub struct Settings {
    dist_muon: MuonConfig,
    burn_muon: BurnMuonConfig,
    burn_adamw: BurnAdamWConfig,
}

impl Settings {
    /// The default settings of Burn's optimizers, with the scale and the decay of distmuon's.
    pub fn new(dist_muon: MuonConfig) -> Self {
        let burn_muon = BurnMuonConfig::new()
            .with_weight_decay(Some(WeightDecayConfig { penalty: 0.1 }))
            .with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
        Self { dist_muon, burn_muon, burn_adamw: BurnAdamWConfig::new() }
    }

    /// Neither momentum nor weight decay in any optimizer.
    pub fn without_momentum_and_decay() -> Self {
        // Otherwise Burn's defaults, so that the optimizers differ in the matrices alone.
        let rest = AdamWConfig::new().with_beta_1(0.0).with_beta_2(0.999).with_epsilon(1e-5);
        let rest = rest.with_weight_decay(0.0);
        let dist_muon = MuonConfig::new().with_momentum(0.0.into()).with_weight_decay(0.0.into());
        let Self { dist_muon, burn_muon, burn_adamw } = Self::new(dist_muon.with_adamw(rest));
        let momentum = MomentumConfig { momentum: 0.0, dampening: 0.0, nesterov: false };
        Self {
            dist_muon,
            burn_muon: burn_muon.with_weight_decay(None).with_momentum(momentum),
            burn_adamw: burn_adamw.with_beta_1(0.0).with_weight_decay(0.0),
        }
    }
}

/// Steps of a run.
#[derive(Clone)]
pub struct Run {
    /// The folder of all files of the run.
    pub folder: PathBuf,
    pub steps: Range<usize>,
    /// Steps of the whole training.
    pub total: usize,
    pub seed: u64,
    /// The highest learning rate.
    pub rate: f64,
    pub choice: Choice,
    /// Rules for distmuon that are added to the program's.
    pub rules: Vec<RoutingRule>,
    /// The ranks that train together, if there are several.
    pub world: Option<World>,
}

impl Run {
    /// Returns `true` if the run continues from its files.
    pub fn is_resumed(&self) -> bool {
        self.steps.start > 0
    }

    /// The learning rate of every step, which falls over the second half of the training.
    pub fn rates(&self) -> Schedule {
        Schedule::constant(self.rate).hold(self.total / 2).linear(self.total / 2, 0.0)
    }

    pub fn rate(&self, step: usize) -> f64 {
        self.rates().at(step)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The items of the batch with a number, of `count` items.
    pub fn batch(&self, number: usize, count: usize) -> Items {
        let first = self.first_item() + number * count;
        Items { indices: (first..first + count).collect(), device: device() }
    }

    /// The first item to train on, different for every seed.
    pub fn first_item(&self) -> usize {
        OTHERS.end + self.seed as usize * 1_000_000
    }

    /// Burn's optimizer of a model, by the settings of a program.
    pub fn optimizer<M: Module>(&self, settings: &Settings, model: &M) -> ModuleOptimizer {
        let Settings { dist_muon, burn_muon, burn_adamw } = settings;
        let dist_muon = self.with_rules(dist_muon.clone());
        match self.choice {
            Choice::DistMuon => match &self.world {
                Some(world) => {
                    let config = DistMuonConfig::new().with_muon(dist_muon.clone());
                    let config = config.with_gradients(Gradients::Averaged);
                    let rule = config.per_parameter(world).expect("the configuration is valid");
                    rule.init(model).expect("the model is routed")
                }
                None => dist_muon.init(model),
            },
            Choice::BurnAdamW => burn_adamw.init(),
            Choice::BurnMuon => {
                let routing = dist_muon.route(model).expect("the model is routed");
                let matrices = routing.routes().iter().filter(|route| {
                    matches!(route.role, ParameterRole::Muon { .. }) && route.shape.len() == 2
                });
                let paths: Vec<String> = matrices.map(|route| route.path.clone()).collect();
                burn_adamw.init().with_group(ParamGroup::from_paths(paths), burn_muon.build(), None)
            }
        }
    }

    fn with_rules(&self, config: MuonConfig) -> MuonConfig {
        self.rules.iter().cloned().fold(config, MuonConfig::with_rule)
    }

    /// A model and its optimizer for a loop of the program's own, with the default settings.
    pub fn start<M: Module>(&self, model: M) -> (M, Optim) {
        self.start_with(MuonConfig::new(), model)
    }

    /// [`start`](Self::start), with settings of the program's own.
    pub fn start_with<M: Module>(&self, config: MuonConfig, model: M) -> (M, Optim) {
        let config = self.with_rules(config);
        let optim = match self.choice {
            Choice::DistMuon => {
                let batched = match &self.world {
                    Some(world) => DistMuonConfig::new().with_muon(config).init(world, &model),
                    None => config.init_batched(&model),
                };
                Optim::Batched(Box::new(batched.expect("the model is routed")))
            }
            _ => Optim::Burn(self.optimizer(&Settings::new(config), &model)),
        };
        if self.is_resumed() { optim.load(&self.file("run.bpk"), model) } else { (model, optim) }
    }

    /// Saves a model and its optimizer.
    pub fn save<M: Module>(&self, model: &M, optim: &Optim) {
        let path = self.file("run.bpk");
        let saved = match optim {
            Optim::Burn(optim) => checkpoint::save(path, model, optim, &()),
            Optim::Batched(optim) => checkpoint::save(path, model, &**optim, &()),
        };
        saved.expect("the run can be saved");
    }
}

/// An optimizer of a loop of the program's own.
pub enum Optim {
    Burn(ModuleOptimizer),
    Batched(Box<DistModuleOptimizer>),
}

impl Optim {
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        gradients: GradientsParams,
    ) -> M {
        match self {
            Self::Burn(optim) => optim.step(lr, model, gradients),
            Self::Batched(optim) => optim.step(lr, model, gradients).expect("the step is taken"),
        }
    }

    fn load<M: Module>(self, path: &Path, model: M) -> (M, Self) {
        let loaded = match self {
            Self::Burn(optim) => checkpoint::load(path, model, optim)
                .map(|(model, optim, ())| (model, Self::Burn(optim))),
            Self::Batched(optim) => checkpoint::load(path, model, *optim)
                .map(|(model, optim, ())| (model, Self::Batched(Box::new(optim)))),
        };
        loaded.expect("the run was saved")
    }
}
