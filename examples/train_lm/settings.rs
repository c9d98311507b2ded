//! The settings of a run, and its progress as saved in a checkpoint.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{DType, Device};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Args, Command, ValueEnum};
use distmuon::comm::World;
use distmuon::custom::SoapConfig;
use distmuon::{Dial, MasterWeights, MuonConfig, Recipe, RoutingRule, StateDtype, checkpoint};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::average::{Averaging, averaging};
use super::data::{Corpus, files};
use super::model::GptConfig;
use super::optimizer::{Contender, OptimizerName, recipe_values};
use super::options::{at_least_one, positive};
use super::shards::{Format, Shards};

/// The vocabulary of GPT-2 in multiples of 128, as in modded-nanogpt.
const GPT2_VOCABULARY: usize = 50_304;

/// The settings that a continued run takes from its checkpoint.
#[derive(Args, Serialize, Deserialize, Debug, Clone)]
pub struct Settings {
    /// Text to train on, or shards of tokens: a file, or a folder of files.
    ///
    /// Default: Rust sources in cargo's registry.
    ///
    /// Shards are files .bin of 16-bit tokens, as of modded-nanogpt's tools.
    ///
    /// They are read in order; those with val in their names validate.
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub data: Option<PathBuf>,
    /// Format of the files .bin of --data.
    ///
    /// With nanogpt, other files of a folder are left out.
    #[arg(long, value_enum, default_value_t = Format::ModdedNanogpt, help_heading = "Data")]
    #[arg(requires = "data")]
    #[serde(default)]
    pub data_format: Format,
    /// Tokens of a BPE vocabulary, trained on the text. Default: bytes.
    #[arg(long, value_name = "TOKENS", help_heading = "Data")]
    pub bpe: Option<usize>,
    /// Tokens of the vocabulary of shards. Default: 50304, which is GPT-2's.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, help_heading = "Data")]
    #[serde(default)]
    pub vocabulary: Option<usize>,
    /// Sequences in a step, on all ranks together.
    #[arg(long, default_value_t = 16, value_parser = at_least_one, help_heading = "Data")]
    pub batch: usize,
    /// Size of the model.
    #[arg(long, value_enum, default_value_t = Preset::Tiny, help_heading = "Model")]
    pub preset: Preset,
    /// Layers, from which other settings follow as in nanochat.
    ///
    /// These are width, heads, context, batch, steps, rates and decay.
    ///
    /// --context, --batch, --steps and --lr replace them one by one.
    ///
    /// Runs are long: without these, depth 4 takes 19 hours on two cores.
    #[arg(long, value_name = "LAYERS", value_parser = at_least_one, help_heading = "Model")]
    #[arg(conflicts_with_all = ["preset", "recipe", "optimizer", "compare"])]
    #[serde(default)]
    pub depth: Option<usize>,
    /// Width of the layers. Default: one for the preset or the depth.
    ///
    /// A multiple of the width of the preset's heads, which stays as it is.
    #[arg(long, value_parser = at_least_one, help_heading = "Model", conflicts_with = "depth")]
    #[serde(default)]
    pub width: Option<usize>,
    /// Tokens of a sequence. Default: one for the preset or the depth.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, help_heading = "Model")]
    #[serde(default)]
    pub context: Option<usize>,
    /// Seed of the weights, the batches and the samples.
    #[arg(long, default_value_t = 1, help_heading = "Model")]
    pub seed: u64,
    /// Optimizer. Default: muon, and dist-muon for what muon does not do.
    ///
    /// That is several ranks, f16, --qk-clip and --diagnose-every.
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Optimizer")]
    pub optimizer: Option<OptimizerName>,
    /// Settings of muon with which others train. Default: this crate's.
    ///
    /// The name list prints them, with their versions, dates and sources.
    #[arg(long, value_name = "NAME", value_parser = RecipeName, help_heading = "Optimizer")]
    pub recipe: Option<Recipe>,
    /// Settings of muon, as JSON, in place of the recipe's.
    ///
    /// Fields of MuonConfig, as in {"newton_schulz": {"steps": 6}}.
    ///
    /// Exact MARS takes a second backward pass of each batch.
    #[arg(long, value_name = "JSON", value_parser = object, help_heading = "Optimizer")]
    #[serde(default)]
    pub settings: Option<Map<String, Value>>,
    /// Type of the parameters.
    ///
    /// On CUDA, gpt2 and depths have bf16 by default, with --master full.
    ///
    /// Runs of Burn's optimizers have f32 there, and muon with --qk-clip.
    ///
    /// f16 is trained with loss scaling, by dist-muon or dist-adamw.
    #[arg(long, value_enum, default_value_t = Dtype::F32, help_heading = "Model")]
    #[serde(default)]
    pub dtype: Dtype,
    /// Digits that muon, dist-muon and dist-adamw keep of f16 and bf16.
    #[arg(long, value_enum, default_value_t = Master::Full, help_heading = "Optimizer")]
    #[serde(default)]
    pub master: Master,
    /// Type of momentum and moments in muon, dist-muon and dist-adamw.
    #[arg(long, value_enum, default_value_t = States::F32, help_heading = "Optimizer")]
    #[serde(default)]
    pub states: States,
    /// Peak learning rate. Default: one for the optimizer or the recipe.
    #[arg(long, allow_negative_numbers = true, value_parser = positive)]
    #[arg(help_heading = "Optimizer")]
    pub lr: Option<f64>,
    /// Clips heads of attention whose maximum logit is above TAU.
    ///
    /// --recipe kimi-k2 has it at 100.
    ///
    /// The model then does not normalise its queries and keys.
    #[arg(long, value_name = "TAU", value_parser = positive, help_heading = "Optimizer")]
    #[serde(default)]
    pub qk_clip: Option<f64>,
    /// Parameters that SOAP updates instead of muon: a pattern of their paths.
    #[arg(long, value_name = "PATTERN", help_heading = "Optimizer")]
    #[serde(default)]
    pub soap: Option<String>,
    /// Validates with an average of the weights over the last steps.
    ///
    /// As in from=200,span=50,share=0.6: after step 200, with a decay of
    ///
    /// 1 - 1/50, and 0.4 of the weights themselves. Checkpoints have these.
    #[arg(long, value_name = "from=STEP,..", value_parser = averaging, help_heading = "Optimizer")]
    #[serde(default)]
    pub average: Option<Averaging>,
    /// Steps of training. A resumed run can be given more of them.
    #[arg(long, default_value_t = 300, value_parser = at_least_one, help_heading = "Optimizer")]
    pub steps: usize,
}

#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// 0.9 million parameters.
    Tiny,
    /// 7 million parameters.
    Small,
    /// GPT-2's 12 layers of 768, for GPUs.
    Gpt2,
    /// Tiny with 8 experts in every layer: 4.5 million.
    Mixture,
}

#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Dtype {
    /// float32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
}

#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Master {
    /// A float32 copy.
    #[default]
    Full,
    /// 16 further bits of bfloat16.
    Mantissa,
    /// None: rounded to the nearest number.
    None,
    /// None: rounded at random, by the seed of the run.
    Stochastic,
}

#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum States {
    /// float32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// 8 bits for the momentum of Muon, and float32 for the others.
    Int8,
}

impl States {
    fn dtype(self) -> StateDtype {
        match self {
            Self::F32 => StateDtype::Float32,
            Self::Bf16 => StateDtype::BFloat16,
            Self::Int8 => StateDtype::Int8,
        }
    }
}

impl Dtype {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

impl Preset {
    fn name(self) -> String {
        self.to_possible_value().expect("no value is skipped").get_name().to_owned()
    }

    fn config(self, vocabulary: usize) -> GptConfig {
        match self {
            Self::Tiny => GptConfig::new(4, 4, 128, 128, vocabulary),
            Self::Small => GptConfig::new(8, 8, 256, 256, vocabulary),
            Self::Gpt2 => GptConfig::new(12, 12, 768, 1024, vocabulary),
            Self::Mixture => GptConfig::new(4, 4, 128, 128, vocabulary).with_experts(8),
        }
    }

    /// The width of a head of attention.
    fn head(self) -> usize {
        let GptConfig { width, heads, .. } = self.config(1);
        width / heads
    }
}

/// Returns `true` for NVIDIA's GPUs, whose matrix units multiply bfloat16 faster than float32.
fn is_cuda(device: &Device) -> bool {
    // Burn shows the kind of a device only in this way.
    format!("{device:?}").contains("Cuda")
}

impl Settings {
    /// The sizes of the model, and its form.
    pub fn model(&self, vocabulary: usize) -> GptConfig {
        let sizes = match self.dial(vocabulary) {
            Ok(Some(Dial { depth, heads, width, context, .. })) => {
                GptConfig::new(depth, heads, width, context, vocabulary)
            }
            _ => self.preset.config(vocabulary),
        };
        let context = self.context.unwrap_or(sizes.context);
        let config = GptConfig { context, ..sizes }.with_qk_norm(self.qk_clip.is_none());
        match self.width {
            Some(width) => GptConfig { width, heads: width / self.preset.head(), ..config },
            None => config,
        }
    }

    /// The settings that follow from the depth, for this batch, if it is given.
    pub fn dial(&self, vocabulary: usize) -> Result<Option<Dial>> {
        let Some(depth) = self.depth else { return Ok(None) };
        Ok(Some(Dial::nanochat(depth, vocabulary)?))
    }

    /// The settings that follow from the depth, for the batch of the run.
    fn dial_of_run(&self) -> Result<Option<Dial>> {
        let vocabulary = self.vocabulary();
        let tokens = self.batch * self.model(vocabulary).context;
        let dial = self.dial(vocabulary)?;
        Ok(dial.map(|dial| dial.with_batch(tokens)).transpose()?)
    }

    /// The settings of Muon, of a recipe or of the depth.
    pub fn muon(&self, recipe: Option<Recipe>) -> Result<MuonConfig> {
        let muon = match (self.dial_of_run()?, recipe) {
            (Some(dial), _) => dial.muon(self.steps),
            (None, Some(recipe)) => MuonConfig::preset(recipe, self.steps),
            (None, None) => MuonConfig::new(),
        };
        let by_heads = recipe.and_then(|recipe| self.by_heads(recipe));
        let muon = by_heads.into_iter().fold(muon, MuonConfig::with_rule);
        let muon = muon.with_state_dtype(self.states.dtype());
        let muon = muon.with_master_weights(self.master_weights());
        let muon = match &self.settings {
            Some(changes) => changed(&muon, changes)?,
            None => muon,
        };
        let Some(pattern) = &self.soap else { return Ok(muon) };
        let soap = SoapConfig::new().init()?;
        let rule = RoutingRule::custom(pattern.as_str(), "soap");
        Ok(muon.with_layer_optimizer("soap", soap).with_rule(rule))
    }

    /// Fails for settings of Muon that no run has, or that one of them can't have.
    pub fn check_muon(&self, runs: &[Contender]) -> Result<()> {
        let is_muon = |run: &&Contender| run.optimizer.single() == OptimizerName::Muon;
        let of_muon: Vec<_> = runs.iter().filter(is_muon).collect();
        let option = if self.soap.is_some() { "--soap" } else { "--settings" };
        ensure!(
            self.soap.is_none() && self.settings.is_none() || !of_muon.is_empty(),
            "{option} is for muon, dist-muon and recipes; use or compare one of them"
        );
        of_muon.into_iter().try_for_each(|run| {
            let built = self.muon(run.recipe).and_then(|muon| Ok(muon.try_build()?));
            built.map(drop).with_context(|| format!("{option} for {}", run.name()))
        })
    }

    /// Fails for an average of no step.
    pub fn check_average(&self) -> Result<()> {
        self.average.map_or(Ok(()), |averaging| averaging.check(self.steps))
    }

    /// The rule by which a recipe orthogonalises projections of attention in blocks of heads.
    fn by_heads(&self, recipe: Recipe) -> Option<RoutingRule> {
        let projections = match recipe {
            Recipe::ModdedNanogpt => r"\.attention\.(query|key)\.weight$",
            _ => r"\.attention\.(query|key|value)\.weight$",
        };
        recipe.per_head(projections, self.model(self.vocabulary()).heads)
    }

    /// Returns `true` for a large model whose digits all optimizers keep in half precision.
    fn suits_half_precision(&self, compared: &[Contender]) -> bool {
        let is_large = self.preset == Preset::Gpt2 || self.depth.is_some();
        let mut optimizers = self.optimizer.into_iter().chain(compared.iter().map(|c| c.optimizer));
        // Burn's optimizers have no master weights.
        let loses =
            |optimizer: OptimizerName| optimizer.is_burns() || self.clip_loses_digits(optimizer);
        is_large && self.has_masters() && !optimizers.any(loses)
    }

    /// Returns `true` if parameters in half precision have master weights.
    fn has_masters(&self) -> bool {
        matches!(self.master, Master::Full | Master::Mantissa)
    }

    /// Returns `true` for an optimizer after whose step QK-clip scales parameters in half precision
    /// without their master weights.
    fn clip_loses_digits(&self, optimizer: OptimizerName) -> bool {
        optimizer == OptimizerName::Muon && self.qk_clip.is_some() && self.has_masters()
    }

    /// Sets what follows from the device, the depth or the recipe and was not given.
    pub fn complete(
        &mut self,
        device: &Device,
        compared: &[Contender],
        is_given: impl Fn(&str) -> bool,
    ) -> Result<()> {
        if let Some(recipe) = self.recipe
            && let Some(clip) = recipe.qk_clip()
        {
            self.qk_clip.get_or_insert(clip.tau);
        }
        if is_cuda(device) && !is_given("dtype") && self.suits_half_precision(compared) {
            self.dtype = Dtype::Bf16;
        }
        let Some(dial) = self.dial(self.vocabulary())? else { return Ok(()) };
        self.recipe = Some(Recipe::Nanochat);
        if !is_given("batch") {
            self.batch = (dial.batch / self.model(dial.vocabulary).context).max(1);
        }
        let Some(dial) = self.dial_of_run()? else { return Ok(()) };
        if !is_given("steps") {
            self.steps = dial.steps();
        }
        self.lr.get_or_insert(dial.peak_lr());
        Ok(())
    }

    /// The tokens of the vocabulary, before the data is read.
    pub fn vocabulary(&self) -> usize {
        let is_shards = || {
            let files = files(self.data.as_deref()?).ok()?;
            Some(Shards::among(&files, self.data_format).is_some())
        };
        match (self.vocabulary, self.bpe) {
            (Some(vocabulary), _) => vocabulary,
            (None, Some(vocabulary)) => vocabulary,
            (None, None) if is_shards().unwrap_or(false) => GPT2_VOCABULARY,
            (None, None) => 256,
        }
    }

    /// The text or the shards.
    pub fn corpus(&self) -> Result<Corpus> {
        Corpus::load(self.data.as_deref(), self.data_format, self.bpe, self.vocabulary())
    }

    /// Fails on all ranks if the options of one of them differ, and names the first that does.
    pub fn ensure_same(&self, world: &World) -> Result<()> {
        let all: Vec<String> = world.all_gather_value(&serde_json::to_string(self)?)?;
        let fields = |text: &str| -> Result<Map<String, Value>> { Ok(serde_json::from_str(text)?) };
        let first = fields(&all[0])?;
        for (rank, other) in all.iter().enumerate() {
            let other = fields(other)?;
            let differs = |name: &&String| *name != "data" && first[*name] != other[*name];
            if let Some(name) = first.keys().find(differs) {
                bail!(
                    "--{} differs on rank {rank}: expected {} as on rank 0, got {}; give all ranks \
                     the same options",
                    name.replace('_', "-"),
                    text(&first[name]),
                    text(&other[name])
                );
            }
        }
        Ok(())
    }

    /// The settings of one run, with its optimizer, its learning rate, its seed, and an absolute
    /// path.
    pub fn for_run(&self, contender: Contender, seed: u64) -> Result<Self> {
        let data = self.data.as_deref().map(std::path::absolute).transpose();
        Ok(Self {
            data: data.context("--data")?,
            optimizer: Some(contender.optimizer),
            recipe: contender.recipe,
            lr: Some(self.lr.unwrap_or(contender.tuned_lr())),
            seed,
            ..self.clone()
        })
    }

    /// The settings of the library for the digits of parameters.
    pub fn master_weights(&self) -> MasterWeights {
        match self.master {
            Master::Full => MasterWeights::Full,
            Master::Mantissa => MasterWeights::Mantissa,
            Master::None => MasterWeights::None,
            Master::Stochastic => MasterWeights::Stochastic { seed: self.seed },
        }
    }

    /// Describes the sizes of the model and of the batches in a few words.
    pub fn describe(&self, sizes: &GptConfig) -> String {
        let Self { steps, batch, .. } = self;
        let form = match (self.depth, self.width) {
            (Some(depth), _) => format!("depth {depth}"),
            (None, Some(width)) => format!("preset {} of width {width}", self.preset.name()),
            (None, None) => format!("preset {}", self.preset.name()),
        };
        format!("{form}, {steps} steps of {batch} x {} tokens", sizes.context)
    }

    /// The optimizer on a number of ranks, with its recipe. One that sees the whole model can also
    /// scale losses and clip heads of master weights, and whatever else needs it.
    pub fn contender_on(&self, ranks: usize, needs_all: bool) -> Result<Contender> {
        let sees_all = ranks > 1 || needs_all || self.dtype == Dtype::F16 || self.qk_clip.is_some();
        let default = if sees_all { OptimizerName::DistMuon } else { OptimizerName::Muon };
        let optimizer = self.optimizer.unwrap_or(default);
        ensure!(
            ranks == 1 || optimizer.is_shared(),
            "--optimizer {} trains on one rank; --ranks {ranks} is for dist-muon and dist-adamw",
            optimizer.name()
        );
        if let Some(recipe) = self.recipe {
            ensure!(
                optimizer.single() == OptimizerName::Muon,
                "--recipe {} is for muon and dist-muon; leave --optimizer {} out",
                recipe.name(),
                optimizer.name()
            );
        }
        Ok(Contender { optimizer, recipe: self.recipe })
    }

    /// Fails for a width that is not one of whole heads, for layers that can't be cut into a number
    /// of slices of whole heads, and for experts that can't be divided into a number of parts.
    pub fn check_sizes(&self, slices: usize, parts: usize) -> Result<()> {
        let GptConfig { heads, experts, .. } = self.model(1);
        if let Some(width) = self.width {
            let head = self.preset.head();
            ensure!(
                width.is_multiple_of(head),
                "--width {width} is not one of whole heads of preset {}; give a multiple of {head}",
                self.preset.name()
            );
        }
        ensure!(
            heads.is_multiple_of(slices),
            "--mesh: {heads} heads of attention can't be divided among {slices} ranks of the axis \
             tp; give a divisor of {heads}"
        );
        ensure!(
            parts == 1 || experts > 1,
            "--mesh: the model has no experts for the axis ep; use --preset mixture"
        );
        ensure!(
            experts.is_multiple_of(parts),
            "--mesh: {experts} experts can't be divided among {parts} ranks of the axis ep; give \
             a divisor of {experts}"
        );
        Ok(())
    }

    /// Fails for an optimizer whose clipped heads would lose the digits of master weights.
    pub fn check_digits(&self, contender: Contender) -> Result<()> {
        ensure!(
            self.dtype == Dtype::F32 || !self.clip_loses_digits(contender.optimizer),
            "--qk-clip scales parameters in half precision after the step of {}, which loses the \
             digits of --master; use dist-muon, or several ranks",
            contender.name()
        );
        Ok(())
    }

    /// Combines the settings that are given with those of a saved run for the others.
    ///
    /// Fails if a given setting contradicts the steps that the saved run has done, and names it.
    pub fn or_saved(&self, is_given: impl Fn(&str) -> bool, saved: &Self) -> Result<Self> {
        let mut merged = saved.fields()?;
        let mut differing = Vec::new();
        for (name, value) in self.fields()?.into_iter().filter(|(name, _)| is_given(name)) {
            let before = &merged[&name];
            if before != &value && !self.may_change(&name, saved) {
                let name = name.replace('_', "-");
                differing.push(format!("--{name} {} (saved: {})", text(&value), text(before)));
            }
            merged.insert(name, value);
        }
        ensure!(
            differing.is_empty(),
            "it is the checkpoint of a run with other settings: {}; leave them out to continue it",
            differing.join(", ")
        );
        let mut settings: Self = serde_json::from_value(Value::Object(merged))?;
        if !is_given("optimizer") {
            // Muon on one rank and on several read the same file. The number of ranks decides.
            settings.optimizer =
                settings.optimizer.filter(|name| name.single() != OptimizerName::Muon);
        }
        Ok(settings)
    }

    /// Returns `true` if a setting may differ from the saved one. The path of the text may, since
    /// the text itself is compared once it is read.
    fn may_change(&self, name: &str, saved: &Self) -> bool {
        let family = |settings: &Self| settings.optimizer.map(OptimizerName::single);
        match name {
            "steps" | "data" => true,
            "optimizer" => family(self) == family(saved),
            _ => false,
        }
    }

    fn fields(&self) -> Result<Map<String, Value>> {
        match serde_json::to_value(self)? {
            Value::Object(fields) => Ok(fields),
            other => Err(anyhow!("{other} is not a JSON object")),
        }
    }
}

/// Parses a JSON object.
fn object(text: &str) -> Result<Map<String, Value>> {
    Ok(serde_json::from_str(text)?)
}

/// The settings of Muon with some fields changed.
fn changed(muon: &MuonConfig, changes: &Map<String, Value>) -> Result<MuonConfig> {
    let (mut settings, changes) = (serde_json::to_value(muon)?, Value::Object(changes.clone()));
    change(&mut settings, &changes);
    let changed: MuonConfig = serde_json::from_value(settings)?;
    ensure_known("muon", &changes, &serde_json::to_value(&changed)?)?;
    Ok(changed)
}

/// Changes a setting: of an object the fields that are given, and the whole of any other.
fn change(setting: &mut Value, to: &Value) {
    match (setting, to) {
        // An enum's variant with its value is an object of one field, and another one replaces it.
        (Value::Object(fields), Value::Object(changes))
            if fields.len() > 1 || changes.keys().eq(fields.keys()) =>
        {
            for (name, to) in changes {
                change(fields.entry(name).or_insert(Value::Null), to);
            }
        }
        (setting, to) => *setting = to.clone(),
    }
}

/// Fails for a field that the settings do not have, which serde passes over.
fn ensure_known(name: &str, given: &Value, settings: &Value) -> Result<()> {
    match (given, settings) {
        (Value::Object(given), Value::Object(settings)) => {
            given.iter().try_for_each(|(field, given)| {
                let known = settings.get(field).with_context(|| {
                    let names: Vec<_> = settings.keys().map(String::as_str).collect();
                    let names = names.join(", ");
                    format!("{name} has an unknown setting: expected one of {names}, got {field}")
                })?;
                ensure_known(field, given, known)
            })
        }
        (Value::Array(given), Value::Array(settings)) => given
            .iter()
            .zip(settings)
            .try_for_each(|(given, settings)| ensure_known(name, given, settings)),
        _ => Ok(()),
    }
}

/// The parser of a recipe's name. Another name, `list`, prints all recipes.
#[derive(Clone)]
struct RecipeName;

impl TypedValueParser for RecipeName {
    type Value = Recipe;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<Recipe, clap::Error> {
        if value == "list" {
            // As for `--help`: printed to standard output, and no error.
            return Err(clap::Error::raw(ErrorKind::DisplayHelp, recipes()));
        }
        let names = PossibleValuesParser::new(recipe_values());
        let name = names.parse_ref(command, argument, value)?;
        Ok(Recipe::from_name(&name).expect("the parser knows the names of recipes alone"))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let list = PossibleValue::new("list").help("prints the recipes");
        Some(Box::new(recipe_values().into_iter().chain([list])))
    }
}

/// The recipes with their versions, dates and sources, as a table.
fn recipes() -> String {
    let row = |recipe: Recipe| {
        let (name, version, date) = (recipe.name(), recipe.version(), recipe.date());
        format!("{name:16}{version:18}{date:12}{:<8e}{}\n", recipe.peak_lr(), recipe.source())
    };
    let title = format!("{:16}{:18}{:12}{:8}{}\n", "recipe", "version", "date", "rate", "source");
    [title].into_iter().chain(Recipe::ALL.map(row)).collect()
}

/// A value as it is written on the command line.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The part of a checkpoint in addition to model and optimizer.
#[derive(Serialize, Deserialize)]
pub struct Progress {
    pub settings: Settings,
    /// Fingerprint of the text.
    pub text: u64,
    pub step: usize,
    /// Steps, and the validation loss after each.
    #[serde(deserialize_with = "with_nan")]
    pub curve: Vec<(usize, f64)>,
    /// The number of skipped steps of each parameter that has skipped any.
    pub skipped: BTreeMap<String, u64>,
}

impl Progress {
    pub fn new(settings: Settings, corpus: &Corpus) -> Self {
        Self {
            settings,
            text: corpus.fingerprint,
            step: 0,
            curve: Vec::new(),
            skipped: BTreeMap::new(),
        }
    }

    /// Reads the progress of a checkpoint without its tensors.
    pub fn read(path: &Path) -> Result<Self> {
        checkpoint::progress(path).context("give a file that train_lm has saved")
    }

    /// Describes where a run continues, and the consequence of a changed number of steps.
    pub fn describe(&self, steps: usize) -> String {
        let before = self.settings.steps;
        let resumed = format!("resumed after step {} of {steps}", self.step);
        match steps == before {
            true => resumed,
            false => format!(
                "{resumed}, no longer of {before}: from here on, the learning rate is that of \
                 {steps} steps"
            ),
        }
    }

    /// Fails if the run can't be continued on this text or to this step.
    pub fn check(&self, corpus: &Corpus, settings: &Settings) -> Result<()> {
        ensure!(
            self.text == corpus.fingerprint,
            "it was trained on another text; give that one with --data"
        );
        ensure!(
            self.step <= settings.steps,
            "it has {} steps behind it; give more than that with --steps",
            self.step
        );
        settings.average.map_or(Ok(()), |averaging| averaging.check_resumed(self.step))
    }
}

/// Reads a curve. JSON has null for losses that are not finite.
fn with_nan<'de, D: Deserializer<'de>>(saved: D) -> Result<Vec<(usize, f64)>, D::Error> {
    let curve = Vec::<(usize, Option<f64>)>::deserialize(saved)?.into_iter();
    Ok(curve.map(|(step, loss)| (step, loss.unwrap_or(f64::NAN))).collect())
}

#[cfg(all(test, feature = "cuda", feature = "flex"))]
mod tests {
    #[test]
    fn large_models_have_bfloat16_on_cuda_by_default() {
        // Here, since the program of the benches has this module without its tests.
        use super::super::options::Options;
        use super::*;
        use clap::{CommandFactory, FromArgMatches, parser::ValueSource};

        let completed = |device: Device, flags: &str| {
            let flags = ["train_lm"].into_iter().chain(flags.split(' '));
            let matches = Options::command().get_matches_from(flags);
            let mut options = Options::from_arg_matches(&matches).expect("the flags are right");
            let is_given =
                |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
            options.settings.complete(&device, &options.compare, is_given).expect("no conflict");
            options.settings.dtype
        };
        let on_cuda = |flags| completed(Device::cuda(0), flags);
        for flags in ["--preset gpt2", "--depth 4", "--preset gpt2 --compare muon,dist-adamw"] {
            assert_eq!(on_cuda(flags), Dtype::Bf16, "{flags}");
            assert_eq!(completed(Device::flex(), flags), Dtype::F32, "{flags}");
        }
        for flags in [
            "--preset small",
            "--preset gpt2 --dtype f32",
            "--preset gpt2 --compare adamw,muon",
            "--preset gpt2 --optimizer burn-muon",
            "--preset gpt2 --optimizer muon --recipe kimi-k2",
            "--preset gpt2 --master none",
        ] {
            assert_eq!(on_cuda(flags), Dtype::F32, "{flags}");
        }
    }
}
