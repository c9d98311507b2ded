//! Checkpoints: model, optimizer and progress of a run in one file that is replaced as a whole.
//!
//! The file is written beside its destination, synced and renamed, so that an interrupted save
//! leaves the previous checkpoint in place. Every byte is covered by a checksum, which is verified
//! when it is read. Tensors are written and read one at a time.
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
//! A checkpoint knows of no ranks: it continues on any number of them, and on a single device. What of a run
//! comes back, and what does not, is in [the guide](crate::guide::resuming).
//!
//! # Layout
//!
//! A file of version 2 is a [burnpack](burn_pack) container, which Burn's own tools open as well,
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
//! The tensor of a parameter is named `model.` and its path. The optimizer's are named `optimizer.`
//! and the name that Burn's [`OptimizerRecord`](burn::optim::OptimizerRecord) gives them, as are its scalars and paths. The texts
//! `parameters` and `progress` are JSON: a table of the float parameters, and the caller's value.
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
use burn::optim::{ModuleOptimizer, StateSource};
use burn::tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::dist::DistModuleOptimizer;
use crate::error::{Error, Result};
use crate::route::Walk;

pub(crate) use read::Archive;
pub(crate) use states::States;
pub(crate) use write::{Contents, Planned, Saving};

/// Key of the version in the metadata, which tells a checkpoint from other burnpack files.
const FORMAT: &str = "distmuon.checkpoint";
const PARAMETERS: &str = "parameters";
const PROGRESS: &str = "progress";
/// Prefixes of names.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

/// A line of the table of parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Parameter {
    path: String,
    shape: Vec<usize>,
    dtype: DType,
}

impl Parameter {
    fn describe(&self) -> String {
        format!("{:?} {}", self.shape, self.dtype.name())
    }
}

/// An optimizer that [`save`] and [`load`] take: Burn's [`ModuleOptimizer`], as
/// [`MuonConfig`](crate::MuonConfig) makes it, and
/// [`DistModuleOptimizer`].
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

/// Saves a run. `progress` is whatever else the run needs to go on, such as its step.
///
/// On many ranks all of them make this call, and rank 0 writes the file. It is the same file, whatever the
/// optimizer and the number of ranks: [`load`] continues it on any.
///
/// The model is written one parameter at a time. The state of a [`ModuleOptimizer`] can be had only
/// as a whole: host memory holds it twice meanwhile.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file can't be written. What the path held before is then unchanged. On many
/// ranks also those of every collective.
pub fn save<M: Module, T: Serialize>(
    path: impl AsRef<Path>,
    model: &M,
    optim: &impl Checkpointed,
    progress: &T,
) -> Result<()> {
    optim.save_run(path.as_ref(), model, progress)
}

/// Loads a run into a model and an optimizer that were made like those it was saved from.
///
/// On many ranks all of them make this call, and read what they need of the file, so that every host has to
/// have it.
///
/// The model is read one parameter at a time. A [`ModuleOptimizer`] takes its state only as a whole:
/// host memory holds it once meanwhile, and once more when it is compared with what was taken.
///
/// # Errors
///
/// - [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint, or if its optimizer
///   state is not that of `optim`;
/// - [`Error::OtherModel`] if a parameter is missing, new, or of another shape or type;
/// - on many ranks [`Error::CheckpointsDiffer`] if the ranks' files are not copies of one, [`Error::Parameter`] if a
///   state does not fit its parameter, and those of every collective.
pub fn load<M: Module, T: DeserializeOwned, O: Checkpointed>(
    path: impl AsRef<Path>,
    model: M,
    optim: O,
) -> Result<(M, O, T)> {
    optim.load_run(path.as_ref(), model)
}

/// Returns the progress of a saved run, without its model and optimizer: to make these as it says.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint, or if its progress is of another
/// type.
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
        let archive = Archive::from_record(self.to_record());
        let mut saving = start(path, model, archive.contents(), progress)?;
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
        let archive = Archive::open(path)?;
        let (model, progress) = load_model(&archive, model)?;
        let saved = States::new(archive);
        let keys: BTreeSet<_> = saved.keys().cloned().collect();
        let optim = self.load_record(saved.into_archive().into_record()?);
        // What an optimizer does not know it drops without a word.
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

impl Checkpointed for DistModuleOptimizer {
    fn save_run<M: Module, T: Serialize>(
        &self,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        self.save(path, model, progress)
    }

    fn load_run<M: Module, T: DeserializeOwned>(
        self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T)> {
        self.load(path, model)
    }
}

/// Begins a checkpoint and writes the model. The optimizer's tensors are put after it in the order
/// of `states`.
///
/// # Errors
///
/// As [`save`].
pub(crate) fn start<M: Module, T: Serialize>(
    path: &Path,
    model: &M,
    states: Contents,
    progress: &T,
) -> Result<Saving> {
    let json = |text: serde_json::Result<String>| {
        text.map_err(|error| Error::Checkpoint {
            path: path.to_owned(),
            reason: format!("its progress can't be written as JSON: {error}"),
            remedy: "give a value with text keys; the previous checkpoint is unchanged",
        })
    };
    let mut contents = states;
    let texts = [
        (FORMAT, layout::VERSION.to_string()),
        (PARAMETERS, json(serde_json::to_string(&parameters(model)))?),
        (PROGRESS, json(serde_json::to_string(progress))?),
    ];
    contents.metadata.extend(texts.map(|(key, text)| (key.to_owned(), text)));
    let entries = model::entries(model);
    contents.tensors.splice(0..0, entries.iter().map(|entry| entry.planned.clone()));
    let mut saving = Saving::start(path, contents)?;
    for entry in entries {
        saving.put((entry.data)())?;
    }
    Ok(saving)
}

/// Loads the model and the progress of a run; see [`load`].
pub(crate) fn load_model<M: Module, T: DeserializeOwned>(
    archive: &Archive,
    model: M,
) -> Result<(M, T)> {
    let saved: Vec<Parameter> = serde_json::from_str(archive.text(PARAMETERS))
        .map_err(|error| archive.broken(format!("its table of parameters: {error}")))?;
    same_model(archive.path(), &saved, &parameters(&model))?;
    let progress = archive.progress()?;
    Ok((model::load(archive, model)?, progress))
}

/// A name with its prefix, as in `model.layer.weight`.
fn prefixed(prefix: &str, name: &str) -> String {
    format!("{prefix}.{name}")
}

fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    let found = Walk::through(model).into_iter();
    found
        .map(|found| Parameter { path: found.path, shape: found.shape, dtype: found.dtype })
        .collect()
}

/// Refuses a model with other parameters than the saved one, and names the first that differs.
fn same_model(path: &Path, saved: &[Parameter], model: &[Parameter]) -> Result<()> {
    let by_path = |among: &[Parameter]| -> HashMap<String, String> {
        among.iter().map(|parameter| (parameter.path.clone(), parameter.describe())).collect()
    };
    let (in_files, in_models) = (by_path(saved), by_path(model));
    let absent = || "absent".to_owned();
    for parameter in model.iter().chain(saved) {
        let in_file = in_files.get(&parameter.path).cloned();
        let in_model = in_models.get(&parameter.path).cloned();
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

/// The tensor of an optimizer state that was saved under this name, in the type it was saved in.
pub(crate) fn saved_tensor<const D: usize>(
    name: &str,
    prefix: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<Tensor<D>> {
    let data = source.take_tensor(prefix, name)?;
    let dtype = data.dtype();
    (data.rank() == D).then(|| Tensor::from_data(data, (device, dtype)))
}
