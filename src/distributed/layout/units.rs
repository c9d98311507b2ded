//! The owned parameters of a model, as a step sees them.

use std::collections::HashMap;
use std::ops::Index;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::passes::Passes;
use super::unit::Unit;
use crate::error::{Error, Result};

/// The owned parameters by path. There may be none.
#[derive(Default)]
pub struct Units {
    passes: Option<Arc<Passes>>,
    by_path: HashMap<String, Arc<Unit>>,
}

impl Units {
    pub fn of(passes: &Arc<Passes>) -> Self {
        let by_path = passes.units().iter().map(|unit| (unit.path.clone(), unit.clone()));
        Self { passes: Some(passes.clone()), by_path: by_path.collect() }
    }

    pub fn get(&self, path: &str) -> Option<&Arc<Unit>> {
        self.by_path.get(path)
    }

    /// Begins a step: releases the parts, so that the step has the only reference to them.
    ///
    /// # Errors
    ///
    /// A failure of a pass; [`Error::Parameter`] for a gradient that was not collected.
    pub fn begin_step(&self, rank: usize) -> Result<()> {
        let Some(passes) = &self.passes else { return Ok(()) };
        passes.ensure_alive()?;
        if let Some(unit) = passes.uncollected() {
            let reason = "its gradient was not collected from the ranks";
            let remedy = "take gradients by `Layout::backward`, or pass them to `Layout::collect`";
            return Err(Error::parameter(&unit.path, rank, reason, remedy));
        }
        passes.forget_parts();
        Ok(())
    }

    /// Remembers this rank's new part of a parameter.
    pub fn remember<const D: usize>(&self, unit: &Unit, part: &Tensor<D>) {
        self.passes.iter().for_each(|passes| passes.remember_part(unit, part));
    }
}

impl Index<&str> for Units {
    type Output = Arc<Unit>;

    /// # Panics
    ///
    /// If the parameter is not owned.
    fn index(&self, path: &str) -> &Arc<Unit> {
        &self.by_path[path]
    }
}
