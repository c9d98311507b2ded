//! From a safetensors file to a checkpoint.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use burn_pack::Scalar;
use serde::Serialize;

use super::file::{Source, converted, transposed};
use super::forms::Form;
use super::{Exchange, OPTIMIZER, STEP};
use crate::backend::precise_dtype;
use crate::checkpoint::{
    self, Begun, Contents, Difference, DifferenceKind, Planned, RANK, Undivided, Waiting,
};
use crate::error::{Error, Result};
use crate::load_difference::listed;
use crate::parameters::{self, Found};
use crate::update::{BURNS_MOMENTS, BURNS_TIME, MASTER, MOMENTUM, SKIPPED, TIME};

/// A tensor that a checkpoint gets from a file.
struct Taken {
    /// The name in the file; `None` for a count of zero.
    source: Option<String>,
    transposes: bool,
    planned: Planned,
}

/// The state of a parameter in a file.
struct SavedState {
    is_adamw: bool,
    has_master: bool,
    steps: Option<usize>,
}

impl Exchange {
    /// Converts a safetensors file to a checkpoint with this progress, which replaces a previous
    /// one as a whole. [`checkpoint::load`] continues from it.
    ///
    /// `model` is made as the one that will load it; its values are not read. Types are converted
    /// where every value stays what it is, as from bfloat16 to float32. Parameters without a state
    /// start with an empty one. Tensors are read and written one at a time.
    ///
    /// # Errors
    ///
    /// - [`Error::Exchange`] if the file is missing or damaged, or if a tensor is of an unknown
    ///   type or has values that the model's type does not have. If a parameter is missing or of
    ///   another shape, or if a tensor or key is not known, the error lists all differences. Also
    ///   if the number of [steps](Self::with_steps) is not known;
    /// - [`Error::Checkpoint`] if the checkpoint can't be written;
    /// - [`Error::Parameter`] for a model that is divided among ranks;
    /// - [`Error::Usage`] if two parameters would have one name.
    pub fn import<M: Module, T: Serialize>(
        &self,
        file: impl AsRef<Path>,
        checkpoint: impl AsRef<Path>,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        let forms = self.forms(model)?;
        let mut source = Source::open(file.as_ref())?;
        let mut differences = vec![];
        let weights = self.taken_weights(&source, model, &forms, &mut differences);
        let saved = self.saved_states(&mut source, &forms, &mut differences)?;
        let parameters = parameters::of(model);
        let (contents, states) =
            self.taken_states(&source, &parameters, &forms, saved, &mut differences)?;
        if !differences.is_empty() {
            return Err(Error::Exchange {
                path: file.as_ref().to_owned(),
                reason: format!("it does not fit the model:{}", listed(&differences)),
                remedy: "choose the implementation that wrote it, make the model as it was, or \
                         change `Exchange::with_names`",
            });
        }
        // No bytes wait for the writer, so that one tensor at a time is in memory.
        let of_model = weights.iter().map(|taken| taken.planned.clone()).collect();
        let begun = Begun::new(checkpoint.as_ref(), (model, &Undivided), progress)?;
        let mut saving = begun.with((of_model, contents), Waiting::Copies(0))?;
        for taken in weights.iter().chain(&states) {
            saving.put(taken.read(&mut source)?)?;
        }
        saving.finish()
    }

    /// The weights of a model, in its order.
    fn taken_weights<M: Module>(
        &self,
        source: &Source,
        model: &M,
        forms: &BTreeMap<String, Form>,
        differences: &mut Vec<Difference>,
    ) -> Vec<Taken> {
        // PyTorch's BatchNorm counts its batches, and Burn's does not.
        let is_weight = |name: &&str| split(name).is_none() && !name.ends_with(BATCHES);
        let mut unused: BTreeSet<&str> = source.names().filter(is_weight).collect();
        let mut weights = vec![];
        for entry in checkpoint::entries(model, &Undivided) {
            let (name, transposes) = match forms.get(entry.path()) {
                Some(form) => (form.name.clone(), form.transposes_weight),
                None => ((self.rename)(entry.path()), false),
            };
            unused.remove(&*name);
            let problem = match entry.planned.dtype {
                DType::QFloat(_) => Some("expected floats, got a quantized parameter".to_owned()),
                _ => shape_problem(source, &name, &entry.planned.shape, transposes),
            };
            differences
                .extend(problem.map(|problem| {
                    Difference::new(entry.path(), DifferenceKind::Weights, problem)
                }));
            weights.push(Taken { source: Some(name), transposes, planned: entry.planned });
        }
        let unused = unused.into_iter().map(|name| {
            Difference::new(name, DifferenceKind::Weights, "expected no parameter, got a tensor")
        });
        differences.extend(unused);
        weights
    }

    /// The states of a file, by the paths of their parameters.
    fn saved_states(
        &self,
        source: &mut Source,
        forms: &BTreeMap<String, Form>,
        differences: &mut Vec<Difference>,
    ) -> Result<BTreeMap<String, SavedState>> {
        let paths: HashMap<&str, &str> =
            forms.iter().map(|(path, form)| (&*form.name, &**path)).collect();
        let mut by_name: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (name, key) in source.names().filter_map(split) {
            by_name.entry(name.to_owned()).or_default().insert(key.to_owned());
        }
        let mut states = BTreeMap::new();
        for (name, keys) in by_name {
            let problem = match (paths.get(&*name), self.is_adamw(&keys)) {
                (Some(path), Ok(is_adamw)) => {
                    let has_master =
                        self.implementation.keys().master.is_some_and(|key| keys.contains(key));
                    let steps = match keys.contains(STEP) {
                        true => Some(steps(source, &format!("{OPTIMIZER}{name}.{STEP}"))?),
                        false => None,
                    };
                    states.insert((*path).to_owned(), SavedState { is_adamw, has_master, steps });
                    continue;
                }
                (None, _) => "expected no parameter, got a state".to_owned(),
                (_, Err(problem)) => problem,
            };
            differences.push(Difference::new(name, DifferenceKind::State, problem));
        }
        Ok(states)
    }

    /// Returns `true` for the keys of a state of AdamW, `false` for Muon's. The error is the
    /// problem of other keys.
    fn is_adamw(&self, found: &BTreeSet<String>) -> std::result::Result<bool, String> {
        let keys = self.implementation.keys();
        let [first, second] = keys.moments;
        let of_optimizer = |key: &&str| keys.master != Some(*key);
        let is = |expected: &[&str]| {
            found.iter().map(String::as_str).filter(of_optimizer).eq(expected.iter().copied())
        };
        let sorted = |mut keys: Vec<&'static str>| {
            keys.sort_unstable();
            keys
        };
        if is(&sorted(vec![first, second, STEP])) {
            return Ok(true);
        }
        if is(&[keys.momentum]) || is(&sorted(vec![keys.momentum, STEP])) {
            return Ok(false);
        }
        Err(format!(
            "its keys are unknown in {}: expected `{}`, or `{first}`, `{second}` and `{STEP}`, \
             got {found:?}",
            self.implementation, keys.momentum
        ))
    }

    /// The contents of the optimizer in a checkpoint, and its tensors in their order.
    fn taken_states(
        &self,
        source: &Source,
        parameters: &[Found],
        forms: &BTreeMap<String, Form>,
        saved: BTreeMap<String, SavedState>,
        differences: &mut Vec<Difference>,
    ) -> Result<(Contents, Vec<Taken>)> {
        let keys = self.implementation.keys();
        // In most files, only AdamW's states have a count: the largest stands in for matrices.
        let most = saved.values().filter_map(|state| state.steps).max();
        let (mut contents, mut taken) = (Contents::default(), vec![]);
        for (found, state) in parameters.iter().filter_map(|p| Some((p, saved.get(&p.path)?))) {
            let (id, form) = (found.id.val(), &forms[&found.path]);
            // AdamW's moments get the names of Burn's, of which a load computes the corrections by
            // the betas of the optimizer that continues: a file does not have them.
            let (mut names, time) = match state.is_adamw {
                true => (BURNS_MOMENTS.into_iter().zip(keys.moments).collect(), BURNS_TIME),
                false => (vec![(MOMENTUM, keys.momentum)], TIME),
            };
            if let Some(master) = keys.master.filter(|_| state.has_master) {
                names.push((MASTER, master));
                let problem = "expected no master weights of a parameter that is not in half \
                               precision, got some";
                let difference = Difference::new(&found.path, DifferenceKind::State, problem);
                differences
                    .extend((found.dtype == precise_dtype(found.dtype)).then_some(difference));
            }
            for (state, key) in names {
                let name = format!("{OPTIMIZER}{}.{key}", form.name);
                let problem = shape_problem(source, &name, &found.shape, form.transposes_state);
                let difference = problem
                    .map(|problem| Difference::new(&found.path, DifferenceKind::State, problem));
                differences.extend(difference);
                let dtype = precise_dtype(found.dtype);
                let planned =
                    Planned::new(format!("{id}.{state}"), dtype, found.shape.clone(), Some(id));
                let transposes = form.transposes_state;
                taken.push(Taken { source: Some(name), transposes, planned });
            }
            let steps = state.steps.or(self.steps).or(most);
            let steps = steps.ok_or_else(|| self.unknown_steps(source, &found.path))?;
            // Muon's states need a count of skipped steps. AdamW's are read as Burn's, which have
            // none.
            if !state.is_adamw {
                let name = format!("{id}.{}", SKIPPED.name);
                let planned = Planned::new(name, DType::F32, vec![1], Some(id));
                taken.push(Taken { source: None, transposes: false, planned });
            }
            contents.scalars.insert(format!("{id}.{time}"), Scalar::from(steps));
            contents.scalars.insert(format!("{id}.{RANK}"), Scalar::from(found.shape.len()));
            contents.metadata.insert(id.to_string(), found.path.clone());
        }
        contents.tensors = taken.iter().map(|taken| taken.planned.clone()).collect();
        Ok((contents.of_optimizer(), taken))
    }

    fn unknown_steps(&self, source: &Source, parameter: &str) -> Error {
        Error::Exchange {
            path: source.path().to_owned(),
            reason: format!(
                "the number of steps of `{parameter}` is unknown: expected a `{STEP}` of one \
                 parameter, got none"
            ),
            remedy: "set it by `Exchange::with_steps`",
        }
    }
}

/// The end of the names of what Burn's BatchNorm does not have.
const BATCHES: &str = ".num_batches_tracked";

/// The name of the parameter and the key of a state; `None` for a weight.
fn split(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(OPTIMIZER)?.rsplit_once('.')
}

/// A number of steps in a file, which is a float or an integer.
fn steps(source: &mut Source, name: &str) -> Result<usize> {
    let data = source.data(name)?;
    let values: Vec<f64> = data.iter::<f64>().collect();
    match values[..] {
        [steps] if steps >= 0.0 && steps.fract() == 0.0 => Ok(steps as usize),
        _ => Err(source.broken(format!("`{name}` is no number of steps: got {values:?}"))),
    }
}

/// The problem of a tensor that is missing or has another shape.
fn shape_problem(source: &Source, name: &str, shape: &[usize], transposes: bool) -> Option<String> {
    let mut expected = shape.to_vec();
    if transposes {
        expected.reverse();
    }
    match source.shape(name) {
        Some(shape) if shape == expected => None,
        Some(shape) => Some(format!("expected {expected:?} of `{name}`, got {shape:?}")),
        None => Some(format!("expected a tensor `{name}`, got none")),
    }
}

impl Taken {
    /// Reads the tensor.
    fn read(&self, source: &mut Source) -> Result<TensorData> {
        let Some(name) = &self.source else {
            return Ok(TensorData::zeros::<f32, _>(self.planned.shape.clone()));
        };
        let data = source.data(name)?;
        let (data, dtype) =
            (if self.transposes { transposed(data) } else { data }, self.planned.dtype);
        let original = data.dtype();
        converted(data, dtype).ok_or_else(|| Error::Exchange {
            path: source.path().to_owned(),
            reason: format!(
                "tensor `{name}` has values that the model's type does not have: expected {}, got \
                 {}",
                dtype.name(),
                original.name()
            ),
            remedy: "make the model in the type of the file, or convert the file",
        })
    }
}
