//! The optimizer state of an archive, by the paths of the parameters.

use std::collections::{BTreeMap, HashMap, HashSet};

use burn_pack::Scalar;

use super::read::{Archive, Stored};
use super::{OPTIMIZER, prefixed};
use crate::update::TIME;

/// The tensors and step counters of an optimizer, by the path of their parameter.
pub struct States {
    archive: Archive,
    /// The names of the tensors in the archive, by path and by name in the state.
    names: HashMap<(String, String), String>,
    /// The paths of all parameters that have a tensor.
    paths: HashSet<String>,
    /// The steps that parameters had taken, by path and by name in the state.
    times: HashMap<(String, String), usize>,
}

impl States {
    pub fn new(archive: Archive) -> Self {
        let key = |name| archive.state_key(name).map(|(path, state)| (path.into(), state.into()));
        let names = archive.tensors().keys().filter_map(|name| Some((key(name)?, name.clone())));
        let names: HashMap<_, _> = names.collect();
        let times = archive.scalars().iter().filter_map(|(name, value)| {
            let key @ (_, state): &(String, String) = &key(name)?;
            state.ends_with(TIME).then_some((key.clone(), usize::try_from(*value).ok()?))
        });
        let times = times.collect();
        let paths = names.keys().map(|(path, _)| path.clone()).collect();
        Self { archive, names, paths, times }
    }

    pub fn archive(&self) -> &Archive {
        &self.archive
    }

    pub fn into_archive(self) -> Archive {
        self.archive
    }

    /// The paths and names of all tensors.
    pub fn keys(&self) -> impl Iterator<Item = &(String, String)> {
        self.names.keys()
    }

    /// The name in the archive of a parameter's tensor, and its entry there.
    pub fn find(&self, path: &str, name: &str) -> Option<(&str, &Stored)> {
        let archive_name = self.names.get(&(path.to_owned(), name.to_owned()))?;
        Some((archive_name, &self.archive.tensors()[archive_name]))
    }

    /// The tensors of a parameter whose names in the state begin with a prefix and a dot, each with
    /// its name in the archive, and the numbers of the parameter by their names in the state.
    pub fn under(
        &self,
        path: &str,
        prefix: &str,
    ) -> (Vec<(String, &str)>, BTreeMap<String, Scalar>) {
        let key = |name| self.archive.state_key(name).filter(|(found, _)| *found == path);
        let is_under = |name: &str| name.strip_prefix(prefix).is_some_and(|n| n.starts_with('.'));
        let tensors = self.archive.tensors().keys().filter_map(|name| {
            let (_, state) = key(name)?;
            is_under(state).then(|| (state.to_owned(), name.as_str()))
        });
        let scalars = self.archive.scalars().iter();
        let scalars = scalars.filter_map(|(name, value)| Some((key(name)?.1.to_owned(), *value)));
        (tensors.collect(), scalars.collect())
    }

    /// A number of the whole optimizer.
    pub fn scalar(&self, name: &str) -> Option<Scalar> {
        self.archive.scalars().get(&prefixed(OPTIMIZER, name)).copied()
    }

    /// Returns `true` if the archive has a tensor of the parameter's state.
    pub fn knows(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// The number of steps that a parameter had taken, if its state counts them under this name.
    pub fn time(&self, path: &str, name: &str) -> Option<usize> {
        self.times.get(&(path.to_owned(), name.to_owned())).copied()
    }
}
