//! The ledger of a step: an entry for everything that was done to a parameter, written where it is
//! done. Nothing is written unless someone asks.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::FloatDType;
use serde::{Deserialize, Serialize};

use crate::backend::NativeKernels;
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

/// The way in which matrices were orthogonalised. Prints as in `Gram, F32, Flex`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IterationUsed {
    /// The form, never [`IterationForm::Auto`].
    pub form: IterationForm,
    /// The type of the iteration.
    pub dtype: FloatDType,
    /// The [`ComputePath`](crate::ComputePath), or the description of native kernels.
    pub kernels: String,
}

impl IterationUsed {
    fn of(plan: &IterationPlan) -> Self {
        let kernels = match &plan.native {
            NativeKernels::Used(kernels) | NativeKernels::Measured(kernels) => kernels.clone(),
            NativeKernels::Refused(_) => format!("{:?}", plan.path),
        };
        Self { form: plan.form, dtype: plan.dtype, kernels }
    }
}

impl fmt::Display for IterationUsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { form, dtype, kernels } = self;
        write!(f, "{form:?}, {dtype:?}, {kernels}")
    }
}

/// The updates of a parameter on a rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub by: UpdatedBy,
    /// The number of matrices that were orthogonalised, each counted every time.
    pub iterations: usize,
    pub iteration: Option<IterationUsed>,
}

/// The updates on a rank, by the names of parameters.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Entries(BTreeMap<String, Entry>);

impl Entries {
    pub fn get(&self, parameter: &str) -> Option<&Entry> {
        self.0.get(parameter)
    }

    /// The number of matrices of a parameter that were orthogonalised.
    pub fn iterations(&self, parameter: &str) -> usize {
        self.get(parameter).map_or(0, |entry| entry.iterations)
    }

    /// Forgets what was done to a parameter.
    pub fn remove(&mut self, parameter: &str) {
        self.0.remove(parameter);
    }

    /// Adds an update that is not Muon's.
    pub fn add(&mut self, parameter: &str, by: UpdatedBy) {
        let entry = Entry { by, iterations: 0, iteration: None };
        self.0.entry(parameter.to_owned()).or_insert(entry);
    }

    /// Adds the orthogonalisation of some matrices. There is no plan for empty ones.
    pub fn add_iteration(
        &mut self,
        parameter: &str,
        matrices: usize,
        plan: Option<&IterationPlan>,
    ) {
        let Some(plan) = plan else { return };
        let entry = Entry { by: UpdatedBy::Muon, iterations: 0, iteration: None };
        let entry = self.0.entry(parameter.to_owned()).or_insert(entry);
        entry.iterations += matrices;
        entry.iteration = Some(IterationUsed::of(plan));
    }
}

/// The entries of the updates of one optimizer. They are written only while the ledger is open.
/// Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Option<Entries>>>);

impl Ledger {
    /// Opens the ledger, without entries.
    pub fn open(&self) {
        *self.entries() = Some(Entries::default());
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
