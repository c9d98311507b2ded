//! Checkpoints: model, optimizer and progress of a run in one file, which is replaced atomically.
//!
//! A checkpoint is written to a temporary file in the folder of its destination, synced and
//! renamed, so an interrupted save leaves the previous checkpoint in place. Every byte is covered
//! by a checksum, which is verified when the byte is read. Tensors are written and read one at a
//! time.
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Device};
//! use distmuon::{MuonConfig, checkpoint};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("run.bpk");
//! let device = Device::default().autodiff();
//! let model = LinearConfig::new(4, 8).init(&device);
//! let optim = MuonConfig::new().init(&model);
//! checkpoint::save(&path, &model, &optim, &100usize)?;
//!
//! let model = LinearConfig::new(4, 8).init(&device);
//! let optim = MuonConfig::new().init(&model);
//! let (model, optim, step): (_, _, usize) = checkpoint::load(&path, model, optim)?;
//! assert_eq!(step, 100);
//! assert_eq!(checkpoint::progress::<usize>(&path)?, 100); // without model and optimizer
//! # Ok::<(), distmuon::Error>(())
//! ```
//!
//! A checkpoint does not depend on ranks: it continues on any number of them, and on a single
//! device. [The guide](crate::guide::resuming) lists the parts of a run that are restored, and
//! those that are not.
//!
//! # Layout
//!
//! A file of version 2 is a [burnpack](burn_pack) container, which Burn's own tools can also open,
//! followed by an index and a footer:
//!
//! | bytes | content |
//! |---|---|
//! | 0 to 10 | header of the container; its last four bytes are `m`, the length of the metadata |
//! | 10 to 10 + `m` | metadata of the container (CBOR) |
//! | to `h`, the next multiple of 256 | zeros |
//! | `h` to `c` | tensors in the order of the index, each at the next multiple of 256, zeros between |
//! | `c` to `c` + `i` | index (JSON): names, types, shapes and lengths of the tensors, the scalars and texts of the container, a CRC-32 of the head (0 to `h`), and one of every tensor with the zeros that follow it |
//! | 8 | `i`, little-endian |
//! | 4 | version of the layout: 2, little-endian |
//! | 4 | CRC-32 of the index, its length and the version, little-endian |
//! | 8 | `distmuon` |
//!
//! The tensor of a parameter is named `model.` followed by the path of the parameter. The tensors,
//! scalars and paths of the optimizer are named `optimizer.` followed by their names in Burn's
//! [`OptimizerRecord`](burn::optim::OptimizerRecord). The texts `parameters` and `progress` are
//! JSON: a table of the float parameters, and the caller's value.
//!
//! Files of version 1, which held two records as tensors of bytes without checksums, can be loaded.

mod layout;
mod model;
mod read;
mod states;
mod write;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::DType;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};
use crate::parameters;
use crate::update::ONLY_RANK;

pub(crate) use model::{Divided, Entry, Undivided};
pub(crate) use read::Archive;
pub(crate) use states::States;
pub(crate) use write::{Contents, Planned, Saving};

/// Key of the version in the metadata. Other burnpack files do not have it.
const FORMAT: &str = "distmuon.checkpoint";
/// Keys of the texts in the metadata.
const PARAMETERS: &str = "parameters";
const PROGRESS: &str = "progress";
/// Prefixes of the names of tensors, scalars and texts.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// An entry of the saved table of parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ParameterEntry {
    path: String,
    shape: Vec<usize>,
    dtype: DType,
}

impl ParameterEntry {
    fn describe(&self) -> String {
        format!("{:?} {}", self.shape, self.dtype.name())
    }
}

/// An optimizer that [`save`] and [`load`] accept: Burn's [`ModuleOptimizer`], as made by
/// [`MuonConfig`](crate::MuonConfig), and [`DistModuleOptimizer`](crate::DistModuleOptimizer).
pub trait Checkpointed: Sized {
    /// Saves a run with this optimizer; see [`save`].
    ///
    /// # Errors
    ///
    /// As [`save`].
    fn save_run<M: Module, T: Serialize>(&self, path: &Path, model: &M, progress: &T)
    -> Result<()>;

    /// Loads a run into a model and this optimizer; see [`load`].
    ///
    /// # Errors
    ///
    /// As [`load`].
    fn load_run<M: Module, T: DeserializeOwned>(
        self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T)>;
}

/// Saves model, optimizer and progress of a run to a file. `progress` holds everything else that
/// the run needs to continue, such as its step.
///
/// On many ranks all of them make this call, and rank 0 writes the file. The format of the file
/// does not depend on the optimizer or the number of ranks: [`load`] continues the run on any of
/// them.
///
/// The model is written one parameter at a time. A [`ModuleOptimizer`] returns its state only as a
/// whole, which takes twice the memory of the state on the host.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file can't be written, or `progress` can't be written as JSON. A
/// previous file at the path is then unchanged. On many ranks also the errors of every collective.
pub fn save<M: Module, T: Serialize>(
    path: impl AsRef<Path>,
    model: &M,
    optim: &impl Checkpointed,
    progress: &T,
) -> Result<()> {
    optim.save_run(path.as_ref(), model, progress)
}

/// Loads a run into a model and an optimizer that were made like the saved ones. Returns the model,
/// the optimizer and the progress.
///
/// On many ranks all of them make this call. Each reads its part of the file, so every host has to
/// have the file.
///
/// The model is read one parameter at a time. A [`ModuleOptimizer`] accepts its state only as a
/// whole: the host holds the state once, and twice while it is compared with the state of the
/// restored optimizer.
///
/// # Errors
///
/// - [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint, or if its optimizer
///   state does not fit `optim`;
/// - [`Error::OtherModel`] if a parameter is missing, new, or of another shape or type;
/// - on many ranks [`Error::CheckpointsDiffer`] if the files of the ranks are not copies of one
///   file, [`Error::Parameter`] if a state does not fit its parameter, and the errors of every
///   collective.
pub fn load<M: Module, T: DeserializeOwned, O: Checkpointed>(
    path: impl AsRef<Path>,
    model: M,
    optim: O,
) -> Result<(M, O, T)> {
    optim.load_run(path.as_ref(), model)
}

/// Returns the progress of a saved run without loading its model and optimizer, for programs that
/// need the progress to make these.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint, or if its progress is
/// of another type.
pub fn progress<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<T> {
    Archive::open(path.as_ref())?.progress()
}

impl Checkpointed for ModuleOptimizer {
    fn save_run<M: Module, T: Serialize>(
        &self,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        ensure_whole(model)?;
        let archive = Archive::from_record(self.to_record());
        let (saving, entries) = start(path, (model, &Undivided), archive.contents(), progress);
        let mut saving = saving?;
        for entry in entries {
            saving.put((entry.data)(None))?;
        }
        for name in archive.tensors().keys() {
            saving.put(archive.data(name)?)?;
        }
        saving.finish()
    }

    fn load_run<M: Module, T: DeserializeOwned>(
        self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T)> {
        ensure_whole(&model)?;
        let archive = Archive::open(path)?;
        let (model, progress) = load_model(&archive, model, &Undivided)?;
        let saved = States::new(archive);
        let keys: BTreeSet<_> = saved.keys().cloned().collect();
        let optim = self.load_record(saved.into_archive().into_record()?);
        // Burn's optimizers drop states that they do not know, without an error.
        let restored = States::new(Archive::from_record(optim.to_record()));
        match keys.iter().find(|(path, name)| restored.find(path, name).is_none()) {
            Some((parameter, state)) => Err(Error::Checkpoint {
                path: path.to_owned(),
                reason: format!(
                    "its optimizer state `{state}` of `{parameter}` does not fit the optimizer"
                ),
                remedy: "configure the optimizer as it was when the checkpoint was saved",
            }),
            None => Ok((model, optim, progress)),
        }
    }
}

/// Fails for a model that is divided among ranks.
fn ensure_whole<M: Module>(model: &M) -> Result<()> {
    match parameters::of(model).into_iter().find(|found| found.placement.is_owned()) {
        Some(found) => Err(Error::parameter(
            &found.path,
            ONLY_RANK,
            "it is divided among ranks, and the optimizer is that of one device",
            "save and load with `DistModuleOptimizer`, or the model of `Layout::unshard`",
        )),
        None => Ok(()),
    }
}

/// Begins a checkpoint. The tensors of the model are put in the order of the returned entries,
/// then those of the optimizer in the order of `states`.
///
/// # Errors
///
/// As [`save`].
pub(crate) fn start<M: Module, T: Serialize>(
    path: &Path,
    (model, divided): (&M, &dyn Divided),
    states: Contents,
    progress: &T,
) -> (Result<Saving>, Vec<Entry>) {
    let entries = model::entries(model, divided);
    let parameters = parameters(model, divided);
    (begin(path, &parameters, &entries, states, progress), entries)
}

fn begin<T: Serialize>(
    path: &Path,
    parameters: &[ParameterEntry],
    entries: &[Entry],
    states: Contents,
    progress: &T,
) -> Result<Saving> {
    let json = |text: serde_json::Result<String>| {
        text.map_err(|error| Error::Checkpoint {
            path: path.to_owned(),
            reason: format!("its progress can't be written as JSON: {error}"),
            remedy: "use text for the keys of maps; the previous checkpoint is unchanged",
        })
    };
    let mut contents = states;
    let texts = [
        (FORMAT, layout::VERSION.to_string()),
        (PARAMETERS, json(serde_json::to_string(parameters))?),
        (PROGRESS, json(serde_json::to_string(progress))?),
    ];
    contents.metadata.extend(texts.map(|(key, text)| (key.to_owned(), text)));
    contents.tensors.splice(0..0, entries.iter().map(|entry| entry.planned.clone()));
    Saving::start(path, contents)
}

/// Loads the model and the progress of a run; see [`load`]. Of a parameter that is divided, the
/// model gets this rank's part.
pub(crate) fn load_model<M: Module, T: DeserializeOwned>(
    archive: &Archive,
    model: M,
    divided: &dyn Divided,
) -> Result<(M, T)> {
    let saved: Vec<ParameterEntry> = serde_json::from_str(archive.text(PARAMETERS))
        .map_err(|error| archive.broken(format!("its table of parameters is invalid: {error}")))?;
    same_model(archive.path(), &saved, &parameters(&model, divided))?;
    let progress = archive.progress()?;
    Ok((model::load(archive, model, divided)?, progress))
}

/// Joins a prefix and a name, as in `model.layer.weight`.
fn prefixed(prefix: &str, name: &str) -> String {
    format!("{prefix}.{name}")
}

/// The table of the float parameters of a model, with the shapes of whole parameters.
fn parameters<M: Module>(model: &M, divided: &dyn Divided) -> Vec<ParameterEntry> {
    let entry = |found: parameters::Found| {
        let shape = divided.whole_shape(&found.path).unwrap_or(found.shape);
        ParameterEntry { path: found.path, shape, dtype: found.dtype }
    };
    parameters::of(model).into_iter().map(entry).collect()
}

/// Fails with the first parameter in which the model differs from the saved one.
fn same_model(path: &Path, saved: &[ParameterEntry], model: &[ParameterEntry]) -> Result<()> {
    let by_path = |parameters: &[ParameterEntry]| -> HashMap<String, String> {
        let entries = parameters.iter();
        entries.map(|parameter| (parameter.path.clone(), parameter.describe())).collect()
    };
    let saved_by_path = by_path(saved);
    let model_by_path = by_path(model);
    let absent = || "absent".to_owned();
    for parameter in model.iter().chain(saved) {
        let in_file = saved_by_path.get(&parameter.path).cloned();
        let in_model = model_by_path.get(&parameter.path).cloned();
        if in_file != in_model {
            return Err(Error::OtherModel {
                path: path.to_owned(),
                parameter: parameter.path.clone(),
                saved: in_file.unwrap_or_else(absent),
                model: in_model.unwrap_or_else(absent),
            });
        }
    }
    Ok(())
}
