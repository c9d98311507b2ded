//! From a checkpoint to a safetensors file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, TensorData};

use super::file::{self, Written, transposed};
use super::forms::Form;
use super::{Exchange, Implementation, OPTIMIZER, STEP};
use crate::checkpoint::{self, Archive, Difference, DifferenceKind, MODEL, States, prefixed};
use crate::error::{Error, Result};
use crate::update::{CORRECTIONS, MASTER, MOMENTS, MOMENTUM, SKIPPED, TIME};

impl Exchange {
    /// Converts a checkpoint to a safetensors file, which replaces a previous one as a whole.
    /// Returns what the other code base has no place for, such as master weights and the states of
    /// [`parts`](crate::parts).
    ///
    /// `model` is made as the saved one was; its values are not read. States keep their type, which
    /// is float32 by default also for parameters in half precision. Tensors are read and written
    /// one at a time.
    ///
    /// # Errors
    ///
    /// - [`Error::Checkpoint`] if the checkpoint is missing or damaged;
    /// - [`Error::OtherRun`] if it is of another model;
    /// - [`Error::Parameter`] for a model that is divided among ranks;
    /// - [`Error::Usage`] if two parameters would have one name;
    /// - [`Error::Exchange`] if the file can't be written, or a parameter is of a type that
    ///   safetensors do not have, such as quantized ones.
    pub fn export<M: Module>(
        &self,
        checkpoint: impl AsRef<Path>,
        file: impl AsRef<Path>,
        model: &M,
    ) -> Result<Vec<Difference>> {
        let forms = self.forms(model)?;
        let path = checkpoint.as_ref();
        let states = States::new(checkpoint::open(path)?);
        let mut tensors = self.weights(path, states.archive(), &forms)?;
        // Damage is reported even in what the file does not get.
        let unread = states.unread(|path| forms.contains_key(path));
        unread.into_iter().try_for_each(|name| states.archive().verify(name))?;
        let mut left_out = vec![];
        let paths: BTreeSet<&str> = states.paths().collect();
        for path in paths {
            // States of parameters that the model no longer has.
            let Some(form) = forms.get(path) else { continue };
            let (written, rest) = self.states(&states, path, form)?;
            tensors.extend(written);
            if !rest.is_empty() {
                let problem = format!(
                    "a file of {} has no place for {}",
                    self.implementation,
                    rest.join(", ")
                );
                left_out.push(Difference::new(path, DifferenceKind::State, problem));
            }
        }
        file::write(file.as_ref(), &tensors)?;
        Ok(left_out)
    }

    /// The weights of a checkpoint.
    fn weights<'a>(
        &self,
        checkpoint: &Path,
        archive: &'a Archive,
        forms: &BTreeMap<String, Form>,
    ) -> Result<Vec<Written<'a>>> {
        let mut missing: BTreeSet<&str> = forms.keys().map(String::as_str).collect();
        let (mut tensors, mut differences) = (vec![], vec![]);
        for (name, stored) in archive.tensors() {
            let Some(path) = name.strip_prefix(&prefixed(MODEL, "")) else { continue };
            missing.remove(path);
            let (written, transposes) = match forms.get(path) {
                Some(form) => (form.name.clone(), form.transposes_weight),
                // Integers and booleans, which no optimizer trains.
                None if !stored.dtype.is_float() => ((self.rename)(path), false),
                None => {
                    let problem = "expected no parameter, got a tensor";
                    differences.push(Difference::new(path, DifferenceKind::Weights, problem));
                    continue;
                }
            };
            let shape = (stored.dtype, &*stored.shape);
            tensors.push(written_from(archive, name, written, shape, transposes));
        }
        let missing = missing.into_iter().map(|path| {
            Difference::new(path, DifferenceKind::Weights, "expected a tensor, got none")
        });
        differences.extend(missing);
        if differences.is_empty() {
            return Ok(tensors);
        }
        let (saved, remedy) = (format!("checkpoint {checkpoint:?}"), checkpoint::TAKE_OVER);
        Err(Error::OtherRun { saved, differences, remedy })
    }

    /// The state of a parameter, and the names of its parts that have no place in the file.
    fn states<'a>(
        &self,
        states: &'a States,
        path: &str,
        form: &Form,
    ) -> Result<(Vec<Written<'a>>, Vec<String>)> {
        let (keys, archive) = (self.implementation.keys(), states.archive());
        // Names that Burn's AdamW writes are found by this crate's.
        let is_adamw = MOMENTS[..2].iter().all(|name| states.find(path, name).is_some());
        let names = match is_adamw {
            true => vec![(MOMENTS[0], keys.moments[0]), (MOMENTS[1], keys.moments[1])],
            false => vec![(MOMENTUM, keys.momentum)],
        };
        let key = |key: &str| format!("{OPTIMIZER}{}.{key}", form.name);
        let (mut written, mut used) = (vec![], BTreeSet::new());
        let is_known = names.iter().all(|(state, _)| states.find(path, state).is_some());
        // Not alone, as beside the state of an optimizer that the other side does not have.
        let master = keys.master.filter(|_| is_known).map(|key| (MASTER, key));
        for (state, name) in names.into_iter().chain(master) {
            let Some((found, stored)) = states.find(path, state) else { continue };
            let shape = (stored.dtype, &*stored.shape);
            let transposes = form.transposes_state && stored.shape.len() == 2;
            written.push(written_from(archive, found, key(name), shape, transposes));
            used.insert(found);
        }
        if !written.is_empty() && (is_adamw || keys.counts_all) {
            written.push(self.steps_of(states, path, key(STEP))?);
        }
        // Counts of what this crate alone counts, and numbers that follow from the steps.
        let implied = [SKIPPED.name, CORRECTIONS[0].name, CORRECTIONS[1].name];
        let rest = states.tensors().filter(|(of, name)| *of == path && !used.contains(name));
        let rest: Vec<&str> = rest.map(|(_, name)| name).collect();
        rest.iter().try_for_each(|name| archive.verify(name))?;
        let rest = rest.into_iter().filter_map(|name| archive.state_key(name));
        let rest = rest.filter(|(.., state)| !implied.contains(state));
        let mut rest: Vec<String> = rest.map(|(.., state)| format!("`{state}`")).collect();
        rest.sort_unstable();
        Ok((written, rest))
    }

    /// The number of steps that a parameter has taken, without those that it skipped.
    fn steps_of<'a>(&self, states: &States, path: &str, name: String) -> Result<Written<'a>> {
        let time = states.time(path, TIME).or_else(|| states.burns_time(path)).unwrap_or(0);
        let skipped = match states.find(path, SKIPPED.name) {
            Some((name, _)) => {
                let data = states.archive().data(name)?;
                data.iter::<f32>().next().unwrap_or(0.0) as usize
            }
            None => 0,
        };
        // The other code base skips no step, and so counts those that were taken.
        let steps = time.saturating_sub(skipped);
        let data = match self.implementation {
            // PyTorch's AdamW has its `step` as a float32 tensor, the others as an integer.
            Implementation::Torch => TensorData::new(vec![steps as f32], [0_usize; 0]),
            Implementation::KellerJordan | Implementation::Dion | Implementation::Megatron => {
                TensorData::new(vec![steps as i64], [0_usize; 0])
            }
        };
        let dtype = data.dtype();
        Ok(Written { name, dtype, shape: vec![], data: Box::new(move || Ok(data.clone())) })
    }
}

/// A tensor of an archive, or its transpose, under another name.
fn written_from<'a>(
    archive: &'a Archive,
    source: &'a str,
    name: String,
    (dtype, shape): (DType, &[usize]),
    transposes: bool,
) -> Written<'a> {
    let mut shape = shape.to_vec();
    if transposes {
        shape.reverse();
    }
    let data = move || {
        let data = archive.data(source)?;
        Ok(if transposes { transposed(data) } else { data })
    };
    Written { name, dtype, shape, data: Box::new(data) }
}
