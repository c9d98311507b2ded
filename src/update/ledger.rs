//! The ledger of a step: an entry for everything that was done to a parameter, written where it is
//! done. Nothing is written unless someone asks.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use crate::backend::ComputePath;
use crate::orthogonalize::{IterationForm, IterationPlan};

/// The optimizer that has updated a parameter, as its update tells.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum UpdatedBy {
    /// Muon.
    Muon,
    /// AdamW.
    AdamW,
    /// Lion.
    Lion,
    /// An optimizer of the user's, by its name.
    Custom(String),
    /// Nothing, since no rank had a gradient.
    NoGradient,
    /// Nothing, since the parameter is frozen.
    Frozen,
}

impl fmt::Display for UpdatedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Muon => "Muon",
            Self::AdamW => "AdamW",
            Self::Lion => "Lion",
            Self::Custom(name) => name,
            Self::NoGradient => "no gradient",
            Self::Frozen => "frozen",
        })
    }
}

/// The way in which matrices were orthogonalised. Prints its form, steps, type and kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IterationUsed {
    /// The form, never [`IterationForm::Auto`].
    pub form: IterationForm,
    /// The number of steps.
    pub steps: usize,
    /// The type of the iteration.
    pub dtype: FloatDType,
    /// The implementation of the products.
    pub path: ComputePath,
    /// Name of the kernel that computes `X X^T`.
    pub kernel: String,
}

impl IterationUsed {
    fn of(plan: IterationPlan) -> Self {
        let IterationPlan { form, steps, dtype, path, kernel, .. } = plan;
        Self { form, steps, dtype, path, kernel }
    }
}

impl fmt::Display for IterationUsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { form, steps, dtype, kernel, .. } = self;
        write!(f, "{form:?}, {steps} steps, {dtype:?}, {kernel}")
    }
}

/// The updates of a parameter on a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub by: UpdatedBy,
    /// The number of matrices that were orthogonalised, each counted every time.
    pub iterations: usize,
    /// `None` unless details are wanted.
    pub iteration: Option<IterationUsed>,
}

/// The updates on a rank, by the names of parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Entries {
    by_name: BTreeMap<String, Entry>,
    has_details: bool,
}

impl Entries {
    pub fn get(&self, parameter: &str) -> Option<&Entry> {
        self.by_name.get(parameter)
    }

    /// Returns `true` if the entries tell how matrices were orthogonalised.
    #[cfg(test)]
    pub fn has_details(&self) -> bool {
        self.has_details
    }

    /// The number of matrices of a parameter that were orthogonalised.
    pub fn iterations(&self, parameter: &str) -> usize {
        self.get(parameter).map_or(0, |entry| entry.iterations)
    }

    /// Forgets what was done to a parameter.
    pub fn remove(&mut self, parameter: &str) {
        self.by_name.remove(parameter);
    }

    /// Adds an update that is not Muon's.
    pub fn add(&mut self, parameter: &str, by: UpdatedBy) {
        let entry = Entry { by, iterations: 0, iteration: None };
        // An entry that is there stays: a parameter may be updated in several parts.
        self.by_name.entry(parameter.to_owned()).or_insert(entry);
    }

    /// Adds the orthogonalisation of a batch by a plan: some matrices of every parameter.
    pub fn add_iteration<'a>(
        &mut self,
        explained: impl FnOnce() -> IterationPlan,
        parameters: impl Iterator<Item = (&'a str, usize)>,
    ) {
        // Only on request, since the name of a kernel may need it compiled and verified.
        let iteration = self.has_details.then(|| IterationUsed::of(explained()));
        for (parameter, matrices) in parameters {
            let entry = Entry { by: UpdatedBy::Muon, iterations: 0, iteration: None };
            let entry = self.by_name.entry(parameter.to_owned()).or_insert(entry);
            entry.iterations += matrices;
            entry.iteration.clone_from(&iteration);
        }
    }
}

/// The entries of the updates of one optimizer. They are written only while the ledger is open.
/// Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Option<Entries>>>);

impl Ledger {
    /// Opens the ledger, without entries: with details of the iterations, or for counts alone.
    pub fn open(&self, has_details: bool) {
        *self.entries() = Some(Entries { by_name: BTreeMap::new(), has_details });
    }

    /// Closes the ledger, and returns its entries if it was open.
    pub fn close(&self) -> Option<Entries> {
        self.entries().take()
    }

    /// The entries of an open ledger.
    pub fn entries(&self) -> MutexGuard<'_, Option<Entries>> {
        // The entries are consistent after every statement, also after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
