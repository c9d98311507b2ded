//! The error type of the crate.
//!
//! ```
//! use distmuon::MuonConfig;
//! use distmuon::error::Error;
//!
//! match MuonConfig::new().with_lr_factor(-1.0).try_build() {
//!     Err(Error::Setting { setting, .. }) => assert_eq!(setting, "lr_factor"),
//!     _ => panic!("no run can use this factor"),
//! }
//! ```

use std::fmt;
use std::path::PathBuf;

use crate::load_difference::{Difference, listed};

/// An error of this crate. Its message names the parameter, setting, file or rank concerned, and
/// ends with the remedy.
///
/// `Debug` also prints the message.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyper-parameter has a value that no run can use.
    #[error("setting `{setting}` is invalid: expected {expected}, got {value}; change `{setting}`")]
    Setting {
        /// The setting as it is written in the configuration, after the fields that lead to it, as
        /// in `newton_schulz.steps` for a [`MuonConfig`](crate::MuonConfig).
        setting: String,
        /// The rejected value.
        value: String,
        /// The values that are accepted.
        expected: &'static str,
    },
    /// A program uses the crate in a way that no run can continue from.
    #[error("{what}: expected {expected}, got {got}; {remedy}")]
    Usage {
        /// The thing and the problem with it, such as `the model is on several devices`.
        what: &'static str,
        /// The use that is accepted.
        expected: &'static str,
        /// The use that was found.
        got: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A parameter has a shape that its view as matrices does not allow.
    #[error(
        "parameter `{parameter}` can't be seen as matrices: expected {expected}, got {shape:?}; \
         {remedy}"
    )]
    Shape {
        /// Path of the parameter in its module.
        parameter: String,
        /// The shapes that are accepted.
        expected: &'static str,
        /// Shape of the parameter.
        shape: Vec<usize>,
        /// The remedy, with code to copy.
        remedy: String,
    },
    /// Parameters of more than two dimensions have no view as matrices.
    #[error("{report}")]
    NoView {
        /// Paths of the parameters.
        parameters: Vec<String>,
        /// The parameters and their shapes, by the types that hold them, with rules to copy.
        report: String,
    },
    /// A device does not support the type of the iteration.
    #[error(
        "parameter `{parameter}` can't be orthogonalised in {dtype}: {device} does not support \
         that type; set `newton_schulz.dtype` to `Auto` or `F32`"
    )]
    Dtype {
        /// Path of the parameter in its module.
        parameter: String,
        /// The device.
        device: String,
        /// The requested type.
        dtype: String,
    },
    /// A device could not compute a step, usually because the device ran out of memory.
    #[error("parameter `{parameter}`: {device} could not compute its step: {reason}; {remedy}")]
    NotComputed {
        /// Path of the parameter in its module.
        parameter: String,
        /// The device.
        device: String,
        /// The reason that the device reports, such as the memory that it lacks.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The pattern of a routing rule is not a regular expression.
    #[error("routing rule `{pattern}` is not a regular expression: {reason}; correct the pattern")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// The error of the regular-expression parser.
        reason: String,
    },
    /// A routing rule matches no parameter that it can apply to, usually because of a typing error.
    #[error(
        "routing rule `{pattern}` has no effect: expected {expected}, got none; print \
         `MuonConfig::route(&model)` without it to see the paths and shapes"
    )]
    UnusedRule {
        /// The pattern as given.
        pattern: String,
        /// The kind of parameter that the rule needs in the model.
        expected: &'static str,
    },
    /// The model has no parameter to train.
    #[error(
        "the model has nothing to train: expected a float parameter, got none; make the optimizer \
         for the module that holds the layers"
    )]
    EmptyModel,
    /// The model has parameters, but none of them is trained.
    #[error(
        "the model has nothing to train: expected a parameter that requires a gradient, got \
         {parameters} that require none; build the model on `device.autodiff()`, unfreeze it, or \
         attach an adapter to quantized weights"
    )]
    AllFrozen {
        /// Number of parameters of the model.
        parameters: usize,
    },
    /// A checkpoint can't be read or written.
    #[error("checkpoint {path:?}: {reason}; {remedy}")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A safetensors file of another code base can't be read, written or converted.
    #[error("safetensors file {path:?}: {reason}; {remedy}")]
    Exchange {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The certificate of a run can't be read or written.
    #[error("certificate {path:?}: {reason}; {remedy}")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The run that saved a file or record had another model or optimizer.
    #[error(
        "{saved} is of another run:{}; make model and optimizer as they were when it was saved, or \
         {remedy}",
        listed(differences)
    )]
    OtherRun {
        /// The file or record that was loaded.
        saved: String,
        /// All differences.
        differences: Vec<Difference>,
        /// The remedy, if model and optimizer stay as they are.
        remedy: &'static str,
    },
    /// The ranks were about to load different checkpoints.
    #[error(
        "rank {rank} loads another checkpoint than rank 0: expected {expected}, got {got}; give \
         all ranks copies of the same file"
    )]
    CheckpointsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// Rank 0's file, with its digest and its progress.
        expected: String,
        /// The file of the rank that differs.
        got: String,
    },
    /// Another rank failed, so this rank can't continue.
    #[error("rank {rank} failed: {cause}; fix the cause and restart all ranks")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// The message of that rank, or the failure that the other ranks observed.
        cause: String,
    },
    /// The ranks did not make the same calls.
    #[error("the ranks disagree: {calls}; make the same calls in the same order on all ranks")]
    Mismatch {
        /// The calls of the ranks that differ.
        calls: String,
    },
    /// A collective was given invalid arguments.
    #[error("{collective} on rank {rank}: {reason}; {remedy}")]
    Collective {
        /// Name of the collective.
        collective: &'static str,
        /// The rank that called it.
        rank: usize,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A launcher's variable is missing or not valid.
    #[error("{variable} is {value}: {reason}; {remedy}")]
    Launch {
        /// The environment variable.
        variable: String,
        /// Value of the variable, or `not set`.
        value: String,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// Processes could not form a world.
    #[error("rank {rank} at {address}: {reason}; {remedy}")]
    Rendezvous {
        /// The rank that reports it.
        rank: usize,
        /// The address at which rank 0 waits for the others.
        address: String,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The library of an engine is missing or failed.
    #[error("{engine} on rank {rank}: {operation}: {reason}; {remedy}")]
    Engine {
        /// Name of the engine.
        engine: &'static str,
        /// The rank that reports it.
        rank: usize,
        /// The operation that failed.
        operation: String,
        /// The library's message.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The devices of a world belong to different backends.
    #[error(
        "rank {rank} has a device of another backend: expected one like {first} of rank 0, got \
         {device}; give all ranks devices of one backend"
    )]
    Devices {
        /// The first rank on another backend.
        rank: usize,
        /// The device of that rank.
        device: String,
        /// The device of rank 0.
        first: String,
    },
    /// The model of a rank differs from rank 0's.
    #[error(
        "parameter `{parameter}` differs on rank {rank}: expected {first} as on rank 0, got \
         {other}; give all ranks one model, by `DistMuonConfig::start` or `World::broadcast`"
    )]
    ModelsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The first parameter that differs.
        parameter: String,
        /// Shape and type on that rank, `absent`, or `other values`.
        other: String,
        /// Shape and type on rank 0, `absent`, or `the same values`.
        first: String,
    },
    /// Ranks that hold the same parameter have other bits of it, or of its state.
    #[error(
        "parameter `{parameter}` has drifted: expected its {part} to be {expected}, got {got}; \
         load the last checkpoint on all ranks, and find what differs on these ranks: memory that \
         fails, another build or device, or code that changes the model on some ranks only"
    )]
    Drifted {
        /// The first parameter that differs.
        parameter: String,
        /// `value`, or the name of a state, as in ``state `moment_1` ``.
        part: String,
        /// The ranks whose bits differ from those that most ranks have.
        ranks: Vec<usize>,
        /// The ranks that have the same bits.
        expected: String,
        /// The ranks that do not, and the number of other parameters and states that differ.
        got: String,
    },
    /// A rank that has computed a matrix again has other bits than the owner of the matrix.
    #[error(
        "the audit of parameter `{parameter}` in its step {step} has failed on rank {rank}: \
         expected its {part} to be as rank {auditor} computed it again, got other bits{}; load the \
         last checkpoint on all ranks, and look for memory or a device that fails on these two \
         ranks, or for another build of the program on one of them",
        and_more(*more)
    )]
    Audited {
        /// The first parameter that differs.
        parameter: String,
        /// ``state `momentum` before the step``, ``state `momentum` `` or `new value`.
        part: String,
        /// The number of the step among those that the parameter has taken, from 1.
        step: usize,
        /// The owner of the matrix, which has computed the step.
        rank: usize,
        /// The rank that has computed it again. Either of the two may be wrong.
        auditor: usize,
        /// The number of other states and values of the same owner that differ.
        more: usize,
    },
    /// A setting of a rank differs from rank 0's.
    #[error(
        "`{setting}` differs on rank {rank}: expected {first} as on rank 0, got {other}; give all \
         ranks the same value"
    )]
    SettingsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The first setting that differs, as it is written in the configuration.
        setting: String,
        /// Value of the setting on that rank.
        other: String,
        /// Value of the setting on rank 0.
        first: String,
    },
    /// A model or a step is not as a [`MuonConfig::expect`](crate::MuonConfig::expect) says.
    #[error(
        "parameter `{parameter}`{} is not trained as expected: expected {expected}, got {got}; \
         {remedy}",
        on_rank(*rank)
    )]
    Unexpected {
        /// Path of the parameter in its module, with the range of a block.
        parameter: String,
        /// The rank that reports it; `None` if the routing shows it before any rank has taken a
        /// step.
        rank: Option<usize>,
        /// The statement that does not hold.
        expected: String,
        /// The fact instead.
        got: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// Two parameters of a model have one identity, as clones have in Burn.
    #[error(
        "parameters `{first}` and `{second}` are the same parameter, which an optimizer step would \
         separate; keep the parameter in one place and use it from there, or give one of them (a \
         frozen clone, if it is one) a new identity with `Param::initialized(ParamId::new(), ...)`"
    )]
    Shared {
        /// Path of the parameter in its module.
        first: String,
        /// The second path of the same parameter.
        second: String,
    },
    /// A rule of QK-clip does not fit the model, or an attention's report does not fit the rules.
    #[error("QK-clip of {subject}: {reason}; {remedy}")]
    QkClip {
        /// The rule, attention or parameter.
        subject: String,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A parameter was skipped in too many steps in a row.
    #[error(
        "parameter `{parameter}` was skipped in {steps} steps in a row: expected finite gradients \
         and updates; lower the learning rate, find the source of NaN or infinity, or change \
         `max_skipped`"
    )]
    Skipped {
        /// Path of the parameter in its module.
        parameter: String,
        /// Number of consecutive steps.
        steps: usize,
    },
    /// A parameter or its gradient does not match the optimizer.
    #[error("parameter `{parameter}` on rank {rank}: {reason}; {remedy}")]
    Parameter {
        /// Path of the parameter in its module.
        parameter: String,
        /// The rank that reports it.
        rank: usize,
        /// The problem.
        reason: String,
        /// The remedy.
        remedy: &'static str,
    },
}

// The message instead of the fields: `main` and `unwrap` print this, and should show the remedy.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// A setting with a value that no run can use.
    pub(crate) fn setting(
        setting: impl Into<String>,
        value: impl ToString,
        expected: &'static str,
    ) -> Self {
        Self::Setting { setting: setting.into(), value: value.to_string(), expected }
    }

    /// A use of the crate that no run can continue from.
    pub(crate) fn usage(
        what: &'static str,
        expected: &'static str,
        got: impl ToString,
        remedy: &'static str,
    ) -> Self {
        Self::Usage { what, expected, got: got.to_string(), remedy }
    }

    /// The error of a configuration that is a field of another one.
    pub(crate) fn in_field(self, field: &str) -> Self {
        match self {
            Self::Setting { setting, value, expected } => {
                Self::Setting { setting: format!("{field}.{setting}"), value, expected }
            }
            error => error,
        }
    }

    /// The error of a collective, with the action that needed it.
    pub(crate) fn in_action(self, action: &str) -> Self {
        match self {
            Self::PeerFailed { rank, cause } => {
                Self::PeerFailed { rank, cause: format!("{cause} (while {action})") }
            }
            Self::Mismatch { calls } => {
                Self::Mismatch { calls: format!("{calls} (while {action})") }
            }
            error => error,
        }
    }

    /// A parameter that does not match the optimizer.
    pub(crate) fn parameter(
        parameter: &str,
        rank: usize,
        reason: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self::Parameter { parameter: parameter.to_owned(), rank, reason: reason.into(), remedy }
    }
}

/// The number of further differences in an error, if there are any.
fn and_more(more: usize) -> String {
    match more {
        0 => String::new(),
        _ => format!(", and in {more} more values and states"),
    }
}

/// The rank in an error that may have none.
fn on_rank(rank: Option<usize>) -> String {
    rank.map_or_else(String::new, |rank| format!(" on rank {rank}"))
}

/// A [`Result`](core::result::Result) with the crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;
