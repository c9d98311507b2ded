//! x
#![warn(missing_docs)]

pub mod adamw;
pub mod checkpoint;
pub mod error;
mod gate;
pub mod muon;
pub mod orthogonalize;
pub mod route;
pub mod schedule;

pub use adamw::AdamWSettings;
pub use error::{Error, Result};
pub use gate::SkippedSteps;
pub use muon::{LrScale, MatrixLayout, MatrixView, Muon, MuonConfig, MuonState};
pub use orthogonalize::{Coefficients, Form, IterationDtype, Kernels, NewtonSchulz};
pub use route::{Group, Route, Routing, Rule};
pub use schedule::Schedule;
