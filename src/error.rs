//! The error type of the crate.

use std::fmt;
use std::path::PathBuf;

/// What can go wrong, with the parameter, setting or file concerned and the remedy.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A hyper-parameter has a value that no run can use.
    #[error("setting `{setting}` is {value}, but must be {expected}")]
    Setting {
        /// Name of the setting as it is written in the configuration.
        setting: &'static str,
        /// The refused value.
        value: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// A parameter has a shape that its view as matrices does not allow.
    #[error(
        "parameter `{parameter}` can't be seen as matrices: expected {expected}, got {shape:?}; {remedy}"
    )]
    Shape {
        /// Path of the parameter in its module.
        parameter: String,
        /// The shape that Muon could take.
        expected: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// What to write instead.
        remedy: String,
    },
    /// A device has not the type that the iteration would run in.
    #[error(
        "parameter `{parameter}`: {device} has no {dtype} arithmetic; set `iteration_dtype` to `Auto` or `F32`"
    )]
    Dtype {
        /// Path of the parameter in its module.
        parameter: String,
        /// The device.
        device: String,
        /// The type that was asked for.
        dtype: String,
    },
    /// A device could not compute a step, most often because its memory ran out.
    #[error("parameter `{parameter}`: {device} could not compute its step: {reason}; {remedy}")]
    NotComputed {
        /// Path of the parameter in its module.
        parameter: String,
        /// The device.
        device: String,
        /// What the device lacks, or what it said.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The pattern of a routing rule is not a regular expression.
    #[error("routing rule `{pattern}` is not a regular expression: {reason}")]
    Pattern {
        /// The pattern as given.
        pattern: String,
        /// What the parser objects to.
        reason: String,
    },
    /// A routing rule matches nothing that it could be for, most likely because of a typing error.
    #[error(
        "routing rule `{pattern}` is of no use: expected {expected}, got none; print \
         `MuonConfig::route(&model)` without it to see the paths and shapes"
    )]
    UnusedRule {
        /// The pattern as given.
        pattern: String,
        /// What it needs in the model.
        expected: &'static str,
    },
    /// The model has no parameter to train.
    #[error(
        "the model has nothing to train: expected a float parameter, got none; make the optimizer for \
         the module that holds the layers"
    )]
    EmptyModel,
    /// The model has parameters, but none that is trained.
    #[error(
        "the model has nothing to train: expected a parameter that requires a gradient, got {parameters} \
         that require none; build the model on `device.autodiff()`, or unfreeze it"
    )]
    AllFrozen {
        /// The number of its parameters.
        parameters: usize,
    },
    /// A checkpoint can't be read or written.
    #[error("checkpoint {path:?}: {reason}; {remedy}")]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What happened.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// A checkpoint belongs to another model.
    #[error(
        "checkpoint {path:?} is of another model: parameter `{parameter}` is {saved} in the file and {model} in the model; load it into the model it was saved from"
    )]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// First parameter that differs.
        parameter: String,
        /// Shape and type in the file, or `absent`.
        saved: String,
        /// Shape and type in the model, or `absent`.
        model: String,
    },
    /// The ranks were about to load different checkpoints.
    #[error(
        "rank {rank} loads another checkpoint than rank 0: expected {expected}, got {got}; give all \
         ranks copies of the same file"
    )]
    CheckpointsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// Rank 0's file, with its digest and its progress.
        expected: String,
        /// That of the rank.
        got: String,
    },
    /// Another rank failed, so that this one can't go on.
    #[error("rank {rank} failed: {cause}; mend that, and start all ranks again")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// What it said, or what was seen of it.
        cause: String,
    },
    /// The ranks did not make the same calls.
    #[error(
        "the ranks disagree ({calls}); all of them have to make the same calls in the same order"
    )]
    Mismatch {
        /// Who called what.
        calls: String,
    },
    /// A collective was given what it can't take.
    #[error("{collective} on rank {rank}: {reason}; {remedy}")]
    Collective {
        /// Its name.
        collective: &'static str,
        /// The rank that called it.
        rank: usize,
        /// What is wrong.
        reason: String,
        /// What to give instead.
        remedy: &'static str,
    },
    /// What the launcher says of the ranks can't be.
    #[error("{variable} is {value}: {reason}; {remedy}")]
    Launch {
        /// The environment variable.
        variable: String,
        /// Its value, or `not set`.
        value: String,
        /// What is wrong with it.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// Processes could not find together.
    #[error("rank {rank} at {address}: {reason}; {remedy}")]
    Rendezvous {
        /// The rank that noticed.
        rank: usize,
        /// Where rank 0 waits, or should.
        address: String,
        /// What happened.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The library of an engine is absent or failed.
    #[error("{engine} on rank {rank}: {operation}: {reason}; {remedy}")]
    Engine {
        /// Name of the engine.
        engine: &'static str,
        /// The rank that noticed.
        rank: usize,
        /// What was asked of it.
        operation: String,
        /// What it said, in its own words.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The devices of a world belong to different backends.
    #[error(
        "rank {rank} is on {device} and rank 0 on {first}; give all ranks devices of one backend"
    )]
    Devices {
        /// The first rank on another backend.
        rank: usize,
        /// Its device.
        device: String,
        /// The device of rank 0.
        first: String,
    },
    /// The model of a rank differs from that of rank 0.
    #[error(
        "parameter `{parameter}` is {other} on rank {rank} and {first} on rank 0; start \
         from one model: by `World::threads_with` among threads, by `World::broadcast` among processes"
    )]
    ModelsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The first parameter that differs.
        parameter: String,
        /// What it is there.
        other: String,
        /// What it is on rank 0.
        first: String,
    },
    /// A setting of a rank differs from that of rank 0.
    #[error("`{setting}` is {other} on rank {rank} and {first} on rank 0; give all ranks the same")]
    SettingsDiffer {
        /// The first rank that differs.
        rank: usize,
        /// The first setting that differs, as it is written in the configuration, or what it is of.
        setting: String,
        /// Its value there.
        other: String,
        /// Its value on rank 0.
        first: String,
    },
    /// Two parameters of a model are one: Burn gives a clone the identity of what it was cloned from.
    #[error(
        "parameters `{first}` and `{second}` are the same parameter, which an optimizer step would make two; \
         keep it in one place and use it from there, or give the second an identity of its own with \
         `Param::initialized(ParamId::new(), ...)`"
    )]
    Shared {
        /// Path of the parameter in its module.
        first: String,
        /// The path at which it is met again.
        second: String,
    },
    /// A parameter was skipped in too many steps in a row.
    #[error(
        "parameter `{parameter}` was skipped in {steps} steps in a row: expected finite gradients and updates; \
         lower the learning rate, look for what makes them NaN or infinite, or set another `max_skipped`"
    )]
    Skipped {
        /// Path of the parameter in its module.
        parameter: String,
        /// The number of steps.
        steps: usize,
    },
    /// A parameter or its gradient is not what the optimizer was made for.
    #[error("parameter `{parameter}` on rank {rank}: {reason}; {remedy}")]
    Parameter {
        /// Path of the parameter in its module.
        parameter: String,
        /// The rank that noticed.
        rank: usize,
        /// What is wrong.
        reason: String,
        /// What to do about it.
        remedy: &'static str,
    },
}

/// The message: what `main` and `unwrap` show of an error should have the remedy, too.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A [`Result`](core::result::Result) with the crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;
