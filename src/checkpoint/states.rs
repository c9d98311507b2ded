//! The optimizer state of an archive, by the paths of the parameters.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use burn::optim::OptimizerRecord;
use burn_pack::Scalar;

use super::read::{Archive, Renamed, Stored};
use super::write::Contents;
use super::{MODEL, OPTIMIZER, prefixed};
use crate::error::{Error, Result};
use crate::load_difference::{Difference, DifferenceKind};
use crate::parameters::Found;
use crate::update::{BURNS_TIME, ONLY_RANK, REFUSED, TIME, from_burns, of_burns};

/// Name of the number of dimensions of a parameter, which Burn writes to every state.
pub const RANK: &str = "__rank";

/// The tensors and step counters of an optimizer, by the path of their parameter.
pub struct States {
    archive: Arc<Archive>,
    /// The identities of the parameters that have a state, as texts, by path.
    ids: HashMap<String, String>,
    /// The names of the tensors in the archive, by path and by name in the state.
    names: HashMap<(String, String), String>,
    /// The steps that parameters had taken, by path and by name in the state.
    times: HashMap<(String, String), usize>,
}

/// The paths of the parameters of a model that are trained, and of all others.
pub struct TrainedPaths {
    trained: BTreeSet<String>,
    others: BTreeSet<String>,
}

impl TrainedPaths {
    /// The paths of parameters that are all trained.
    pub fn all<'a>(paths: impl Iterator<Item = &'a str>) -> Self {
        Self { trained: paths.map(str::to_owned).collect(), others: BTreeSet::new() }
    }

    /// The paths of the parameters of a model.
    pub fn of(found: &[Found]) -> Self {
        let paths = |trained| {
            let found = found.iter().filter(move |found| found.trainable == trained);
            found.map(|found| found.path.clone()).collect()
        };
        Self { trained: paths(true), others: paths(false) }
    }
}

impl States {
    /// The states of a checkpoint, or of a record.
    pub fn new(archive: Archive) -> Self {
        let of_model = |path: &str| archive.tensors().get(&prefixed(MODEL, path))?.id;
        let ids = ids(&archive, of_model);
        Self::with_ids(archive, ids)
    }

    /// The states of a record for a model whose parameters have these identities, by path.
    pub fn for_model(archive: Archive, of_model: &HashMap<String, u64>) -> Self {
        let ids = ids(&archive, |path| of_model.get(path).copied());
        Self::with_ids(archive, ids)
    }

    fn with_ids(archive: Archive, ids: HashMap<String, String>) -> Self {
        let key = |name| {
            let (path, id, state) = archive.state_key(name)?;
            // A path may have states under several identities, of which `ids` has chosen one.
            (ids.get(path)? == id).then(|| (path.to_owned(), state.to_owned()))
        };
        let names: HashMap<_, _> =
            archive.tensors().keys().filter_map(|name| Some((key(name)?, name.clone()))).collect();
        let times = archive
            .scalars()
            .iter()
            .filter_map(|(name, value)| {
                let key @ (_, state): &(String, String) = &key(name)?;
                state.ends_with(TIME).then_some((key.clone(), usize::try_from(*value).ok()?))
            })
            .collect();
        Self { archive: Arc::new(archive), ids, names, times }
    }

    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    /// The names of all tensors in the archive, each with the path of its parameter.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.names.iter().map(|((path, _), name)| (path.as_str(), name.as_str()))
    }

    /// The name in the archive of a parameter's tensor, and its entry there. Moments of Burn's
    /// AdamW are found by the names that they have here.
    pub fn find(&self, path: &str, name: &str) -> Option<(&str, &Stored)> {
        let find = |name: &str| self.names.get(&(path.to_owned(), name.to_owned()));
        let archive_name = find(name).or_else(|| find(of_burns(name)?))?;
        Some((archive_name, &self.archive.tensors()[archive_name]))
    }

    /// The tensors of a parameter whose names in the state begin with a prefix and a dot, each with
    /// its name in the archive. The parameter's numbers come with their names in the state.
    pub fn under(
        &self,
        path: &str,
        prefix: &str,
    ) -> (Vec<(String, &str)>, BTreeMap<String, Scalar>) {
        let state = |name| {
            let (found, id, state) = self.archive.state_key(name)?;
            (found == path && self.ids.get(path)? == id).then(|| state.to_owned())
        };
        let is_under = |name: &str| name.strip_prefix(prefix).is_some_and(|n| n.starts_with('.'));
        let tensors = self.archive.tensors().keys().filter_map(|name| {
            let state = state(name)?;
            is_under(&state).then_some((state, name.as_str()))
        });
        let scalars =
            self.archive.scalars().iter().filter_map(|(name, value)| Some((state(name)?, *value)));
        (tensors.collect(), scalars.collect())
    }

    /// A number of the whole optimizer.
    pub fn scalar(&self, name: &str) -> Option<Scalar> {
        self.archive.scalars().get(&prefixed(OPTIMIZER, name)).copied()
    }

    /// The paths of all parameters that have a state.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.ids.keys().map(String::as_str)
    }

    /// Returns `true` if the archive has a state of the parameter.
    pub fn knows(&self, path: &str) -> bool {
        self.ids.contains_key(path)
    }

    /// The number of steps that a parameter had taken, if its state counts them under this name.
    pub fn time(&self, path: &str, name: &str) -> Option<usize> {
        self.times.get(&(path.to_owned(), name.to_owned())).copied()
    }

    /// The number of steps of a parameter's state of Burn's AdamW.
    pub fn burns_time(&self, path: &str) -> Option<usize> {
        self.time(path, BURNS_TIME)
    }

    /// The reason for which an optimizer refused the state of a parameter, in its record.
    pub fn refusal(&self, path: &str) -> Option<String> {
        let name = self.names.get(&(path.to_owned(), REFUSED.to_owned()))?;
        let data = self.archive.data(name).ok()?;
        Some(String::from_utf8_lossy(data.as_bytes()).into_owned())
    }

    /// Fails if there are states, and none is of a parameter of the model with these identities.
    pub fn ensure_of_model(&self, ids: &HashMap<String, u64>) -> Result<()> {
        let is_known = self.ids.keys().any(|path| ids.contains_key(path));
        match self.ids.keys().min().filter(|_| !is_known) {
            Some(path) => Err(Error::parameter(
                path,
                ONLY_RANK,
                "the optimizer has a state of it, and the model does not have it",
                "save the model that the optimizer trains, not one that contains it or a part",
            )),
            None => Ok(()),
        }
    }

    /// The states of a model's parameters with these identities, by path. Warns of states that are
    /// of none of them.
    pub fn of_model<'a>(&'a self, ids: &'a HashMap<String, u64>) -> OfModel<'a> {
        let all = self.archive.state_ids().filter(|(id, _)| has_state(&self.archive, id));
        let mut orphaned: Vec<String> = all
            .filter(|(id, path)| {
                !ids.contains_key(*path) || self.ids.get(*path).is_none_or(|chosen| chosen != id)
            })
            .map(|(id, path)| format!("`{path}` (identity {id})"))
            .collect();
        if !orphaned.is_empty() {
            orphaned.sort();
            log::warn!(
                "optimizer states are dropped, since the model does not have their parameters: {}",
                orphaned.join(", ")
            );
        }
        OfModel { states: self, ids, unused: None }
    }

    /// The states of parameters that are not in those of the optimizer that they were loaded into,
    /// except of those that were not loaded.
    pub fn lost_in(
        &self,
        restored: &Self,
        trained: &TrainedPaths,
        unused: &BTreeSet<String>,
    ) -> Vec<Difference> {
        let mut lost = BTreeMap::new();
        for (path, state) in self.names.keys() {
            let TrainedPaths { trained, others } = trained;
            let is_of_model = trained.contains(path) || others.contains(path);
            if !is_of_model || unused.contains(path) || restored.has(path, state) {
                continue;
            }
            let problem = match restored.refusal(path) {
                Some(reason) => reason,
                None if others.contains(path) => {
                    "expected none, since it is not trained".to_owned()
                }
                None => format!("the optimizer does not take over `{state}`"),
            };
            let known: &mut String = lost.entry(path).or_insert_with(|| problem.clone());
            // The same in every run.
            if problem < *known {
                *known = problem;
            }
        }
        let lost = lost.into_iter();
        lost.map(|(path, problem)| Difference::new(path, DifferenceKind::State, problem)).collect()
    }

    /// Returns `true` if a tensor of a parameter's state was restored, under its name or under that
    /// which it has here.
    fn has(&self, path: &str, state: &str) -> bool {
        let has = |name: &str| self.names.contains_key(&(path.to_owned(), name.to_owned()));
        has(state) || from_burns(state).is_some_and(has)
    }

    /// The trained parameters of which there is no state, if there are states of others.
    pub fn missing(&self, trained: &TrainedPaths, unused: &BTreeSet<String>) -> Vec<Difference> {
        let is_missing = |path: &&String| !self.knows(path) && !unused.contains(*path);
        // Without any state, the run was saved before its first step, and none is missing.
        let missing = trained.trained.iter().filter(|_| !self.ids.is_empty()).filter(is_missing);
        missing.map(|path| Difference::no_state(path)).collect()
    }

    /// The names in the archive of the tensors of parameters for which a condition does not hold,
    /// in alphabetical order.
    pub fn unread(&self, is_read: impl Fn(&str) -> bool) -> Vec<&str> {
        let mut unread: Vec<&str> =
            self.tensors().filter(|(path, _)| !is_read(path)).map(|(_, name)| name).collect();
        unread.sort_unstable();
        unread
    }
}

/// The states of the parameters of a model, under the identities that these have there.
pub struct OfModel<'a> {
    states: &'a States,
    ids: &'a HashMap<String, u64>,
    /// The paths of the parameters whose states are left out.
    unused: Option<&'a BTreeSet<String>>,
}

impl<'a> OfModel<'a> {
    /// The same without the states of some parameters.
    pub fn without(self, unused: &'a BTreeSet<String>) -> Self {
        Self { unused: Some(unused), ..self }
    }

    /// The new name of an entry of the archive; `None` for one that is left out.
    fn renamed(&self, name: &str) -> Option<Renamed> {
        let (archive, rest) =
            (self.states.archive(), name.strip_prefix(OPTIMIZER)?.strip_prefix('.')?);
        let (path, id, state) = match archive.state_key(name) {
            Some((path, id, state)) => (path, id, Some(state)),
            // The path of an identity, or a number of the whole optimizer.
            None => match archive.state_ids().find(|(id, _)| *id == rest) {
                Some((id, path)) => (path, id, None),
                None => return Some(Renamed { name: name.to_owned(), id: None }),
            },
        };
        let is_unused = self.unused.is_some_and(|unused| unused.contains(path));
        if is_unused || self.states.ids.get(path)? != id {
            return None;
        }
        let id = self.ids.get(path)?;
        let name = match state {
            Some(state) => format!("{id}.{state}"),
            None => id.to_string(),
        };
        Some(Renamed { name: prefixed(OPTIMIZER, &name), id: Some(*id) })
    }

    /// The contents of a checkpoint with the states.
    pub fn contents(&self) -> Contents {
        self.states.archive.contents(|name| self.renamed(name))
    }

    /// The names in the archive of the tensors, in the order of [`contents`](Self::contents).
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.states.archive().tensors().keys().map(String::as_str);
        names.filter(|name| self.renamed(name).is_some())
    }

    /// The states as Burn's record, which is in host memory as a whole.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if a state can't be read.
    pub fn record(&self) -> Result<OptimizerRecord> {
        self.states.archive.record(|name| self.renamed(name))
    }
}

/// Returns `true` if an identity has more than the number of dimensions.
fn has_state(archive: &Archive, id: &str) -> bool {
    let prefix = prefixed(OPTIMIZER, &prefixed(id, ""));
    let is_state = |name: &&String| name.strip_prefix(&prefix).is_some_and(|name| name != RANK);
    let from = |name: &String| *name >= prefix;
    // Names are sorted, so that only this identity's names are looked at.
    let tensors = archive.tensors().range(prefix.clone()..).map(|(name, _)| name);
    let scalars = archive.scalars().range(prefix.clone()..).map(|(name, _)| name);
    let begins = |name: &&String| from(name) && name.starts_with(&prefix);
    tensors.take_while(begins).any(|name| is_state(&name))
        || scalars.take_while(begins).any(|name| is_state(&name))
}

/// The identity of the state of every parameter that has one. A parameter whose identity changed
/// between two steps has several: the model's counts, or else the one that took most steps.
fn ids(archive: &Archive, of_model: impl Fn(&str) -> Option<u64>) -> HashMap<String, String> {
    let time = |id: &str| {
        let name = prefixed(OPTIMIZER, &prefixed(id, TIME));
        archive.scalars().get(&name).and_then(|time| usize::try_from(*time).ok())
    };
    let mut chosen: HashMap<String, (bool, Option<usize>, String)> = HashMap::new();
    for (id, path) in archive.state_ids().filter(|(id, _)| has_state(archive, id)) {
        let is_of_model = of_model(path).is_some_and(|of_model| of_model.to_string() == id);
        let candidate = (is_of_model, time(id), id.to_owned());
        let best = chosen.entry(path.to_owned()).or_insert_with(|| candidate.clone());
        // By the fields in their order; the text comes last, so that the choice is the same in
        // every run.
        if *best < candidate {
            *best = candidate;
        }
    }
    chosen.into_iter().map(|(path, (_, _, id))| (path, id)).collect()
}
