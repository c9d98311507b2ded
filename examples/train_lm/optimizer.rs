//! The optimizers that can be compared.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, ensure};
use burn::optim::{self, GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use distmuon::checkpoint::Saver;
use distmuon::comm::World;
use distmuon::distributed::{
    Diagnostics, DistModuleOptimizer, DistMuonConfig, GradDtype, Layout, LossScaleConfig,
};
use distmuon::{
    Account, AdamWConfig, GradientBuffer, MuonConfig, ParameterRole, Recipe, Routing, RoutingRule,
    Schedule, checkpoint,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::experts::Experts;
use super::model::Gpt;
use super::settings::{Dtype, Preset, Settings};
use super::sharding::{self, Sharding};

#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerName {
    /// AdamW for everything.
    Adamw,
    /// Burn's Muon for matrices, AdamW for the rest.
    BurnMuon,
    /// This crate's Muon for matrices, AdamW for the rest.
    Muon,
    /// This crate's Muon and AdamW, shared by the ranks.
    DistMuon,
    /// AdamW for everything, shared by the ranks.
    DistAdamw,
}

/// An optimizer, and the recipe of its settings if they are not the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    pub optimizer: OptimizerName,
    /// For this crate's Muon only.
    pub recipe: Option<Recipe>,
}

/// An optimizer with its state.
pub enum Optim {
    /// With the routing, which has the counts.
    Single(Box<ModuleOptimizer>, Box<Routing>),
    Dist(Box<DistModuleOptimizer>, Box<Layout>),
}

impl OptimizerName {
    pub fn name(self) -> String {
        self.to_possible_value().expect("no value is skipped").get_name().to_owned()
    }

    /// Returns `true` for an optimizer of Burn, which gives no account of its steps.
    pub fn is_burns(self) -> bool {
        matches!(self, Self::Adamw | Self::BurnMuon)
    }

    /// Returns `true` if the optimizer can train on several ranks.
    pub fn is_shared(self) -> bool {
        matches!(self, Self::DistMuon | Self::DistAdamw)
    }

    /// The optimizer that reads the same checkpoints on a single device.
    pub fn single(self) -> Self {
        if self == Self::DistMuon { Self::Muon } else { self }
    }
}

/// The names of the recipes, for the command line.
pub fn recipe_values() -> [PossibleValue; 11] {
    Recipe::ALL.map(|recipe| {
        let help = format!("peak rate {:e} in its source", recipe.peak_lr());
        PossibleValue::new(recipe.name()).help(help)
    })
}

impl Contender {
    /// Parses the name of an optimizer, or of a recipe for this crate's Muon.
    pub fn parser() -> impl TypedValueParser<Value = Self> {
        let optimizers = OptimizerName::value_variants().iter();
        let optimizers = optimizers.filter_map(ValueEnum::to_possible_value);
        let recipes = recipe_values();
        PossibleValuesParser::new(optimizers.chain(recipes)).map(|name| {
            let recipe = Recipe::from_name(&name);
            let optimizer = OptimizerName::from_str(&name, false).unwrap_or(OptimizerName::Muon);
            Self { optimizer, recipe }
        })
    }

    pub fn name(self) -> String {
        match self.recipe {
            Some(recipe) => recipe.name().to_owned(),
            None => self.optimizer.name(),
        }
    }

    /// This contender on a number of ranks, or `None` if it trains on one only.
    pub fn on_ranks(self, ranks: usize) -> Option<Self> {
        let optimizer = match self.recipe {
            Some(_) if ranks > 1 => OptimizerName::DistMuon,
            _ => self.optimizer,
        };
        (ranks == 1 || optimizer.is_shared()).then_some(Self { optimizer, ..self })
    }

    /// The schedule of the learning rate: that of the recipe, or a warm-up over a twentieth of the
    /// run and a warm-down over its last half.
    pub fn lr_schedule(self, lr: f64, steps: usize) -> Schedule {
        if let Some(recipe) = self.recipe {
            return recipe.lr(lr, steps);
        }
        let warmup = steps / 20;
        let warmdown = steps / 2;
        Schedule::warmup_constant_warmdown(lr, warmup, steps - warmup - warmdown, warmdown)
    }

    /// The best peak learning rate of a sweep of the default task (`docs/results/recipes.md`), and
    /// for a recipe one for the scale of its updates: none was swept.
    pub fn tuned_lr(self) -> f64 {
        use OptimizerName::{Adamw, BurnMuon, DistAdamw, DistMuon, Muon};
        match (self.recipe, self.optimizer) {
            (Some(recipe @ (Recipe::ModdedNanogpt | Recipe::Track3)), _) => recipe.peak_lr(),
            (Some(Recipe::Torch | Recipe::KellerJordan | Recipe::Nanochat), _) => 0.02,
            (_, Adamw | DistAdamw) => 4e-3,
            (_, BurnMuon) => 1.1e-2,
            (_, Muon | DistMuon) => 8e-3,
        }
    }

    /// The settings of this crate's Muon.
    pub fn muon(self, settings: &Settings) -> Result<MuonConfig> {
        let muon = settings.muon(self.recipe)?;
        Ok(match settings.preset {
            Preset::Mixture => Experts::rules().into_iter().fold(muon, MuonConfig::with_rule),
            Preset::Tiny | Preset::Small | Preset::Gpt2 => muon,
        })
    }

    /// The settings of an optimizer that some ranks share.
    pub fn config(
        self,
        settings: &Settings,
        sharding: &Sharding,
        ranks: usize,
    ) -> Result<DistMuonConfig> {
        let muon = self.muon(settings)?;
        let muon = match self.optimizer {
            OptimizerName::DistAdamw => only_adamw(muon),
            _ => muon,
        };
        shared_config(muon, settings, (sharding, ranks))
    }

    /// Makes the optimizer of a rank for a run of `steps` steps, and the routing of the parameters.
    /// Returns the model as it is divided among the ranks.
    pub fn init(
        self,
        world: &World,
        model: Gpt,
        settings: &Settings,
        sharding: &Sharding,
    ) -> Result<(Gpt, Optim, Routing)> {
        let scales = settings.dtype == Dtype::F16;
        ensure!(
            self.optimizer.is_shared() || !scales,
            "--dtype f16 needs loss scaling, which {} does not have; use dist-muon or dist-adamw",
            self.name()
        );
        let ours = self.muon(settings)?;
        ensure!(
            self.optimizer != OptimizerName::BurnMuon || settings.preset != Preset::Mixture,
            "--preset mixture has stacks of matrices, which burn-muon does not take; use muon"
        );
        let adamw = || optim::AdamWConfig::new().with_beta_2(0.95).with_epsilon(1e-8);
        let routing = ours.route(&model)?;
        let single =
            |optim: ModuleOptimizer| Optim::Single(Box::new(optim), Box::new(routing.clone()));
        let shared = |muon: MuonConfig, model: Gpt| -> Result<_> {
            let config = shared_config(muon, settings, (sharding, world.size()))?;
            let layout = sharding.layout(world, &config, &model)?;
            let model = sharding::on_ranks(layout.shard(model)?, &layout);
            let optim = config.init_on(&layout, &model)?;
            let routing = optim.routing().clone();
            Ok((model, Optim::Dist(Box::new(optim), Box::new(layout)), routing))
        };
        let optim = match self.optimizer {
            OptimizerName::Adamw => single(adamw().with_weight_decay(0.1).init()),
            OptimizerName::BurnMuon => {
                let muon = optim::MuonConfig::new()
                    .with_adjust_lr_fn(optim::AdjustLrFn::MatchRmsAdamW)
                    .with_weight_decay(Some(optim::decay::WeightDecayConfig::new(0.1)))
                    .build();
                let matrices = routing.group(|role| matches!(role, ParameterRole::Muon { .. }));
                single(adamw().with_weight_decay(0.0).init().with_group(matrices, muon, None))
            }
            OptimizerName::Muon => single(routing.init()),
            OptimizerName::DistMuon => return shared(ours, model),
            OptimizerName::DistAdamw => return shared(only_adamw(ours), model),
        };
        Ok((model, optim, routing))
    }
}

/// AdamW for everything.
fn only_adamw(muon: MuonConfig) -> MuonConfig {
    muon.with_adamw(AdamWConfig::new().with_weight_decay(0.1)).with_rule(RoutingRule::adamw(""))
}

/// The settings of an optimizer that some ranks share.
fn shared_config(
    muon: MuonConfig,
    settings: &Settings,
    (sharding, ranks): (&Sharding, usize),
) -> Result<DistMuonConfig> {
    let scales = settings.dtype == Dtype::F16;
    let config = DistMuonConfig::new()
        .with_muon(muon)
        .with_grad_dtype(GradDtype::Float32)
        .with_publish(sharding.publish(ranks))
        .with_loss_scale(scales.then(LossScaleConfig::new));
    sharding.planned(config)
}

impl Optim {
    pub fn step(&mut self, lr: f64, model: Gpt, gradients: GradientsParams) -> Result<Gpt> {
        match self {
            Self::Single(optim, _) => Ok(optim.step(lr, model, gradients)),
            Self::Dist(optim, _) => Ok(optim.step(lr, model, gradients)?),
        }
    }

    /// Runs the backward pass of a part of the batch. The gradients of all parts are added up, and
    /// returned after the last part.
    pub fn backward(
        &self,
        loss: &Tensor<1>,
        model: &Gpt,
        sum: &mut GradientBuffer,
        is_last: bool,
    ) -> Result<Option<GradientsParams>> {
        match self {
            Self::Dist(_, layout) if is_last => Ok(Some(layout.backward(loss, model)?)),
            Self::Dist(_, layout) => Ok(layout.accumulate(loss, model).map(|()| None)?),
            Self::Single(..) => {
                let grads = GradientsParams::from_grads(loss.backward(), model);
                if is_last && sum.count() == 0 {
                    // Of one part, the gradients stay in the type of the parameters.
                    return Ok(Some(grads));
                }
                sum.add(model, grads)?;
                Ok(is_last.then(|| sum.take_sum()))
            }
        }
    }

    /// The model with all parameters on every rank, for work of a single rank.
    pub fn whole(&self, model: &Gpt) -> Result<Gpt> {
        match self {
            Self::Single(..) => Ok(model.clone()),
            Self::Dist(optim, layout) => {
                optim.finish_publication()?;
                Ok(layout.unshard(model)?.on_ranks(None, None))
            }
        }
    }

    /// The layout of the model.
    pub fn layout(&self, world: &World) -> Layout {
        match self {
            Self::Single(..) => Layout::from(world),
            Self::Dist(_, layout) => (**layout).clone(),
        }
    }

    /// The ranks that train on different data.
    pub fn data<'a>(&'a self, world: &'a World) -> &'a World {
        match self {
            Self::Single(..) => world,
            Self::Dist(_, layout) => layout.mesh().data(),
        }
    }

    /// The factor on the loss of the next step.
    pub fn loss_scale(&self) -> f64 {
        match self {
            Self::Single(..) => 1.0,
            Self::Dist(optim, _) => optim.loss_scale(),
        }
    }

    /// Requests the norms of the next step, where the optimizer has them.
    pub fn request_diagnostics(&mut self) {
        if let Self::Dist(optim, _) = self {
            optim.request_diagnostics();
        }
    }

    /// The norms of the last step by group, if they were requested.
    pub fn diagnostics(&mut self) -> Result<Option<Diagnostics>> {
        match self {
            Self::Single(..) => Ok(None),
            Self::Dist(optim, _) => Ok(optim.diagnostics()?),
        }
    }

    /// Requests the account of the next step, with norms where the optimizer has them.
    pub fn request_account(&mut self) {
        match self {
            Self::Single(_, routing) => routing.request_account(),
            Self::Dist(optim, _) => {
                optim.request_account();
                optim.request_diagnostics();
            }
        }
    }

    /// The account of the last step, if it was requested.
    pub fn account(&mut self) -> Result<Option<Account>> {
        match self {
            Self::Single(_, routing) => Ok(routing.account()),
            Self::Dist(optim, _) => Ok(optim.account()?),
        }
    }

    pub fn save<T: Serialize>(
        &self,
        (saver, path): (&mut Saver, &Path),
        model: &Gpt,
        progress: &T,
    ) -> Result<()> {
        match self {
            Self::Single(optim, _) => Ok(saver.save(path, model, &**optim, progress)?),
            Self::Dist(optim, _) => Ok(saver.save(path, model, &**optim, progress)?),
        }
    }

    pub fn load<T: DeserializeOwned>(self, path: &Path, model: Gpt) -> Result<(Gpt, Self, T)> {
        match self {
            Self::Single(optim, routing) => {
                let (model, optim, progress) = checkpoint::load(path, model, *optim)?;
                Ok((model, Self::Single(Box::new(optim), routing), progress))
            }
            Self::Dist(optim, layout) => {
                let (model, optim, progress) = checkpoint::load(path, model, *optim)?;
                Ok((model, Self::Dist(Box::new(optim), layout), progress))
            }
        }
    }

    /// The number of steps that each parameter skipped because its gradient was non-finite.
    pub fn skipped_steps(&self) -> BTreeMap<String, u64> {
        match self {
            Self::Single(_, routing) => routing.skipped_steps().read(),
            Self::Dist(optim, _) => optim.skipped_steps().read(),
        }
    }
}
