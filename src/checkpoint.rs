//! Checkpoints: model, optimizer and progress of a run in one file that is replaced as a whole.
//!
//! The file is a burnpack container of two records, the model's and the optimizer's, in Burn's own
//! formats, with the table of parameters and the caller's progress as metadata. It is written beside
//! its destination, synced and renamed, so that an interrupted save leaves the previous checkpoint
//! in place.
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
//! # Ok::<(), distmuon::Error>(())
//! ```

use std::path::Path;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord, StateSource};
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, Device, Tensor};
use burn_pack::{Reader, Writer};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};
use crate::route::Walk;

/// Metadata key and value that tell a checkpoint from other burnpack files.
const FORMAT: (&str, &str) = ("distmuon.checkpoint", "1");
const PARAMETERS: &str = "parameters";
const PROGRESS: &str = "progress";
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

/// Saves a run. `progress` is whatever else the run needs to go on, such as its step.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file can't be written. What the path held before is then unchanged.
pub fn save<M: Module, T: Serialize>(
    path: impl AsRef<Path>,
    model: &M,
    optim: &ModuleOptimizer,
    progress: &T,
) -> Result<()> {
    write(path.as_ref(), model, optim.to_record(), progress)
}

/// [`save`], with the record of an optimizer of any kind.
pub(crate) fn write<M: Module, T: Serialize>(
    path: &Path,
    model: &M,
    optim: OptimizerRecord,
    progress: &T,
) -> Result<()> {
    let failed = |reason: String| Error::Checkpoint {
        path: path.to_owned(),
        reason,
        remedy: "check the folder and the space left; the previous checkpoint is unchanged",
    };
    let blob = |name: &str, bytes: Bytes| {
        let length = bytes.len();
        burn_pack::Tensor::new(name.to_owned(), DType::U8, [length], None, bytes)
    };
    let json = |what: serde_json::Result<String>| what.map_err(|error| failed(error.to_string()));
    let record = |bytes: Result<Bytes, burn::store::RecordError>| {
        bytes.map_err(|error| failed(error.to_string()))
    };

    let parameters = json(serde_json::to_string(&parameters(model)))?;
    let progress = json(serde_json::to_string(progress))?;
    let model = record(model.clone().into_record().into_bytes())?;
    let optim = record(optim.into_bytes())?;
    Writer::new(vec![blob(MODEL, model), blob(OPTIMIZER, optim)])
        .with_metadata(FORMAT.0, FORMAT.1)
        .with_metadata(PARAMETERS, &parameters)
        .with_metadata(PROGRESS, &progress)
        .auto_extension(false)
        .write_to_file(path)
        .map_err(|error| failed(error.to_string()))
}

/// Loads a run into a model and an optimizer that were made like those it was saved from.
///
/// # Errors
///
/// - [`Error::Checkpoint`] if the file is missing, truncated or no checkpoint, or if its optimizer
///   state is not that of `optim`;
/// - [`Error::OtherModel`] if a parameter is missing, new, or of another shape or type.
pub fn load<M: Module, T: DeserializeOwned>(
    path: impl AsRef<Path>,
    model: M,
    optim: ModuleOptimizer,
) -> Result<(M, ModuleOptimizer, T)> {
    let path = path.as_ref();
    let (model, record, progress) = read(path, model)?;
    let tensors = record.len();
    let optim = optim.load_record(record);
    let restored = optim.to_record().len();
    if restored != tensors {
        return Err(Error::Checkpoint {
            path: path.to_owned(),
            reason: format!(
                "{restored} of the {tensors} tensors of its optimizer state fit the optimizer"
            ),
            remedy: "configure the optimizer as it was when the checkpoint was saved",
        });
    }
    Ok((model, optim, progress))
}

/// Loads the model of a run, and the record of its optimizer; see [`load`].
pub(crate) fn read<M: Module, T: DeserializeOwned>(
    path: &Path,
    model: M,
) -> Result<(M, OptimizerRecord, T)> {
    let failed =
        |reason: String, remedy| Error::Checkpoint { path: path.to_owned(), reason, remedy };
    let broken = |error: &dyn std::fmt::Display| {
        failed(error.to_string(), "the file is missing or damaged; load an older checkpoint")
    };

    let reader = Reader::from_file_exact(path).map_err(|error| broken(&error))?;
    let metadata = reader.metadata();
    if metadata.get(FORMAT.0).map(String::as_str) != Some(FORMAT.1) {
        let reason = format!("it is no checkpoint of version {}", FORMAT.1);
        return Err(failed(reason, "give a file that `checkpoint::save` wrote"));
    }
    let text = |key: &str| metadata.get(key).map_or("", String::as_str);
    let saved: Vec<Parameter> =
        serde_json::from_str(text(PARAMETERS)).map_err(|error| broken(&error))?;
    same_model(path, &saved, &parameters(&model))?;
    let progress = serde_json::from_str(text(PROGRESS)).map_err(|error| {
        failed(format!("its progress is of another kind: {error}"), "load it as what was saved")
    })?;

    let record = |name| reader.tensor_data(name).map(Bytes::from_bytes_vec);
    let model_record = record(MODEL).map_err(|error| broken(&error))?;
    let optim_record = record(OPTIMIZER).map_err(|error| broken(&error))?;
    let model_record = ModuleRecord::from_bytes(model_record).map_err(|error| broken(&error))?;
    let optim_record = OptimizerRecord::from_bytes(optim_record).map_err(|error| broken(&error))?;

    let model = model.try_load_record(model_record).map_err(|error| broken(&error))?;
    Ok((model, optim_record, progress))
}

fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    let found = Walk::through(model).into_iter();
    found
        .map(|found| Parameter { path: found.path, shape: found.shape, dtype: found.dtype })
        .collect()
}

/// Names the first parameter that differs.
fn same_model(path: &Path, saved: &[Parameter], model: &[Parameter]) -> Result<()> {
    let find = |among: &[Parameter], path: &str| {
        among.iter().find(|parameter| parameter.path == path).map(Parameter::describe)
    };
    let absent = || "absent".to_owned();
    for parameter in model.iter().chain(saved) {
        let (in_file, in_model) = (find(saved, &parameter.path), find(model, &parameter.path));
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
