//! The optimizer's part of an archive, by the paths of the parameters.

use std::collections::{HashMap, HashSet};

use super::read::{Archive, Stored};
use super::{OPTIMIZER, prefixed};

/// The optimizer's tensors and step counters by the path of their parameter.
pub struct States {
    archive: Archive,
    /// The names of the tensors in the archive, by path and name in the state.
    names: HashMap<(String, String), String>,
    paths: HashSet<String>,
    times: HashMap<String, usize>,
}

impl States {
    pub fn new(archive: Archive) -> Self {
        let path = |id: &str| archive.metadata().get(&prefixed(OPTIMIZER, id)).cloned();
        // `optimizer.ID.NAME`, where the name may have dots of its own.
        let key = |name: &str| {
            let (id, own) = name.strip_prefix(OPTIMIZER)?.strip_prefix('.')?.split_once('.')?;
            Some((path(id)?, own.to_owned()))
        };
        let names = archive.tensors().keys().filter_map(|name| Some((key(name)?, name.clone())));
        let names: HashMap<_, _> = names.collect();
        let times = archive.scalars().iter().filter_map(|(name, value)| {
            let (path, own) = key(name)?;
            (own == "time").then_some((path, usize::try_from(*value).ok()?))
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

    /// Paths and names of all tensors.
    pub fn keys(&self) -> impl Iterator<Item = &(String, String)> {
        self.names.keys()
    }

    /// The name in the archive of a parameter's tensor, and what is known about it.
    pub fn find(&self, path: &str, name: &str) -> Option<(&str, &Stored)> {
        let found = self.names.get(&(path.to_owned(), name.to_owned()))?;
        Some((found, &self.archive.tensors()[found]))
    }

    /// Returns `true` if anything is known of the parameter.
    pub fn knows(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// The steps that a parameter had taken, if its state counts them.
    pub fn time(&self, path: &str) -> Option<usize> {
        self.times.get(path).copied()
    }
}
