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
//! [`load`] takes over everything or fails with all differences. A run that was changed since takes
//! the model alone by [`load_weights`], or everything that fits by [`load_matching`], which lists
//! the rest.
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
//! [`OptimizerRecord`]. The texts `parameters` and `progress` are
//! JSON: a table of the float parameters, and the caller's value.
//!
//! A folder of [parts](Saver::with_parts) has one such file from each rank, with some of the
//! tensors, and `index.json`: for each file its name, its length, and the CRC-32 in its footer. Of
//! a state of which several ranks hold pieces, each of their files has an excerpt, as a flat
//! tensor: the index of the file then has the shape of the whole, and the ranges of its elements.
//!
//! Files of version 1, which held two records as tensors of bytes without checksums, can be loaded.

mod layout;
mod model;
mod parts;
mod read;
mod saver;
mod states;
mod write;

use std::collections::{BTreeSet, HashMap};
use std::iter;
use std::path::Path;

use burn::grad_clipping::GradientClipping;
use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::DType;
use burn_pack::Writer;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::error::{Error, Result};
use crate::load_difference::listed;
pub use crate::load_difference::{Difference, DifferenceKind};
use crate::parameters::{self, ensure_whole};
use crate::update::OF_INIT;

#[cfg(feature = "train")]
pub(crate) use model::stored_otherwise;
pub(crate) use model::{Divided, Entry, Undivided, entries};
pub(crate) use parts::open;
pub(crate) use read::Archive;
pub use saver::{Saver, WhenBusy, latest};
pub(crate) use states::{RANK, States, TrainedPaths};
use write::Scratch;
pub(crate) use write::{Contents, Planned, Read, Saving, Waiting};

/// Key of the version in the metadata. Other burnpack files do not have it.
const FORMAT: &str = "distmuon.checkpoint";
/// Keys of the texts in the metadata.
const PARAMETERS: &str = "parameters";
const PROGRESS: &str = "progress";
/// Prefixes of the names of tensors, scalars and texts.
pub(crate) const MODEL: &str = "model";
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
///
/// ```
/// use burn::module::Module;
/// use distmuon::checkpoint::{self, Checkpointed};
///
/// // For a training loop with either optimizer.
/// fn save<M: Module, O: Checkpointed>(model: &M, optim: &O, step: usize) -> distmuon::Result<()> {
///     match step % 100 {
///         0 => checkpoint::save("run.bpk", model, optim, &step),
///         _ => Ok(()),
///     }
/// }
/// ```
pub trait Checkpointed: Sized {
    /// Saves a run with this optimizer; see [`Saver::save`].
    ///
    /// # Errors
    ///
    /// As [`Saver::save`].
    fn save_run<M: Module, T: Serialize>(
        &self,
        saver: &mut Saver,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()>;

    /// Loads what fits of a run into a model and this optimizer; see [`load_matching`].
    ///
    /// # Errors
    ///
    /// As [`load_matching`].
    fn load_run<M: Module, T: DeserializeOwned>(
        self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T, Vec<Difference>)>;
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
/// [`Error::Checkpoint`] if the file can't be written, or `progress` can't be written as JSON;
/// [`Error::Usage`] for an optimizer of [`MuonConfig::init`](crate::MuonConfig::init) with Burn's
/// `with_grad_clipping`, which clips nothing there. A previous file at the path is then unchanged.
/// On many ranks also the errors of every collective.
pub fn save<M: Module, T: Serialize>(
    path: impl AsRef<Path>,
    model: &M,
    optim: &impl Checkpointed,
    progress: &T,
) -> Result<()> {
    Saver::immediate().save(path, model, optim, progress)
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
/// A trained parameter of which the file has no state, since it was frozen or never had a gradient,
/// starts with an empty one, and a warning names it. Moments of Burn's `AdamW` and `Adam` continue
/// in the parameters that [`AdamWConfig`](crate::AdamWConfig) updates.
///
/// # Errors
///
/// - [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint;
/// - [`Error::Usage`] as [`save`];
/// - [`Error::OtherRun`] with all differences, if a parameter is missing, new, or of another shape
///   or type, or if a saved state does not fit `optim`;
/// - on many ranks [`Error::CheckpointsDiffer`] if the files of the ranks are not copies of one
///   file, and the errors of every collective.
pub fn load<M: Module, T: DeserializeOwned, O: Checkpointed>(
    path: impl AsRef<Path>,
    model: M,
    optim: O,
) -> Result<(M, O, T)> {
    let path = path.as_ref();
    let (model, optim, progress, differences) = optim.load_run(path, model)?;
    ensure_complete(format!("checkpoint {path:?}"), differences, TAKE_OVER)?;
    Ok((model, optim, progress))
}

/// Loads what fits of a run that was changed since it was saved: the parameters of the same path,
/// shape and type, and the states that their optimizers can continue from. Returns the model, the
/// optimizer, the progress, and all differences: the parameters that keep the values of `model`,
/// those that start with an empty state, and saved parameters and states that were not used.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::checkpoint::{self, Difference, DifferenceKind};
/// use distmuon::{MuonConfig, RoutingRule};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("run.bpk");
/// let model = LinearConfig::new(4, 8).init(&Device::default().autodiff());
/// checkpoint::save(&path, &model, &MuonConfig::new().init(&model), &100usize)?;
///
/// // Other rules than in the saved run.
/// let optim = MuonConfig::new().with_rule(RoutingRule::muon("weight")).init(&model);
/// let (model, optim, step, differences): (_, _, usize, _) =
///     checkpoint::load_matching(&path, model, optim)?;
/// for difference in &differences {
///     println!("starts anew: {difference}");
/// }
/// // The model is the saved one.
/// let is_of_weights = |each: &Difference| each.kind == DifferenceKind::Weights;
/// assert!(!differences.iter().any(is_of_weights));
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// # Errors
///
/// As [`load`], without [`Error::OtherRun`].
pub fn load_matching<M: Module, T: DeserializeOwned, O: Checkpointed>(
    path: impl AsRef<Path>,
    model: M,
    optim: O,
) -> Result<(M, O, T, Vec<Difference>)> {
    optim.load_run(path.as_ref(), model)
}

/// Loads the model of a run without its optimizer: for inference, or to train with another
/// optimizer. [`progress`] has the rest.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint; [`Error::OtherRun`]
/// with all differences if a parameter is missing, new, or of another shape or type;
/// [`Error::Parameter`] for a model that is divided among ranks.
pub fn load_weights<M: Module>(path: impl AsRef<Path>, model: M) -> Result<M> {
    ensure_whole(&model)?;
    let path = path.as_ref();
    let (model, differences) = load_model(&open(path)?, model, &Undivided)?;
    ensure_complete(format!("checkpoint {path:?}"), differences, TAKE_OVER)?;
    Ok(model)
}

/// The remedy for a checkpoint of another run, if model and optimizer stay as they are.
pub(crate) const TAKE_OVER: &str = "take over what fits by `checkpoint::load_matching`";

/// Fails if something that was saved was not taken over. Warns of parameters whose state starts
/// empty.
pub(crate) fn ensure_complete(
    saved: String,
    mut differences: Vec<Difference>,
    remedy: &'static str,
) -> Result<()> {
    let missing: Vec<Difference> =
        differences.extract_if(.., |difference| !difference.is_loss()).collect();
    if !differences.is_empty() {
        return Err(Error::OtherRun { saved, differences, remedy });
    }
    if !missing.is_empty() {
        log::warn!(
            "{saved} has no state of some parameters, which start with an empty one:{}",
            listed(&missing)
        );
    }
    Ok(())
}

/// Returns the progress of a saved run without loading its model and optimizer, for programs that
/// need the progress to make these.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint, or if its progress is
/// of another type.
pub fn progress<T: DeserializeOwned>(path: impl AsRef<Path>) -> Result<T> {
    open(path.as_ref())?.progress()
}

impl Checkpointed for ModuleOptimizer {
    fn save_run<M: Module, T: Serialize>(
        &self,
        saver: &mut Saver,
        path: &Path,
        model: &M,
        progress: &T,
    ) -> Result<()> {
        // First, since it returns the error of the save before, after which nothing is saved.
        saver.prepare(path)?;
        ensure_whole(model)?;
        ensure_clips(self)?;
        let (ids, entries) = (ids(model), entries(model, &Undivided));
        // The states are on the devices of their parameters.
        let waiting = saver.waiting(&entries, !entries.is_empty());
        let target = saver.target(path, saver.number(path), [0, 1]);
        let begun = Begun::new(&target.file(), (model, &Undivided), progress)?;
        let optim = self.clone();
        let put = move || {
            // Burn copies the states to make a record of them.
            let record = optim.to_record();
            drop(optim);
            let states = States::for_model(Archive::from_record(record), &ids);
            states.ensure_of_model(&ids)?;
            let of_model = states.of_model(&ids);
            let planned = entries.iter().map(|entry| entry.planned.clone()).collect();
            let mut saving = begun.with((planned, of_model.contents()), waiting)?;
            for Entry { planned, data, .. } in entries {
                saving.put_read(planned.bytes, Box::new(iter::once_with(move || data(None))))?;
            }
            for name in of_model.names() {
                saving.put(states.archive().data(name)?)?;
            }
            Ok(saving)
        };
        match waiting {
            Waiting::Tensors => saver.finish_later(target, put),
            Waiting::Copies(_) => saver.finish(target, put()),
        }
    }

    fn load_run<M: Module, T: DeserializeOwned>(
        self,
        path: &Path,
        model: M,
    ) -> Result<(M, Self, T, Vec<Difference>)> {
        ensure_whole(&model)?;
        ensure_clips(&self)?;
        let archive = open(path)?;
        // Before the model is read, so that a progress of another type fails at once.
        let progress = archive.progress()?;
        let (model, mut differences) = load_model(&archive, model, &Undivided)?;
        let states = States::new(archive);
        let trained = TrainedPaths::of(&parameters::of(&model));
        let mut unused: BTreeSet<String> =
            differences.iter().map(|difference| difference.parameter.clone()).collect();
        let (ids, mut optim) = (ids(&model), self);
        loop {
            // A state that does not fit may be dropped with others of its parameter: load again
            // without all of them, until nothing is lost.
            let of_model = states.of_model(&ids).without(&unused);
            optim = optim.load_record(of_model.record()?);
            // Burn's optimizers drop states that they do not know, without an error.
            let restored = States::new(Archive::from_record(optim.to_record()));
            let lost = states.lost_in(&restored, &trained, &unused);
            if lost.is_empty() {
                break;
            }
            unused.extend(lost.iter().map(|difference| difference.parameter.clone()));
            differences.extend(lost);
        }
        let is_read = |path: &str| ids.contains_key(path) && !unused.contains(path);
        // Tensors that nothing reads are also checked: a damaged file must not seem intact.
        states.unread(is_read).into_iter().try_for_each(|name| states.archive().verify(name))?;
        differences.extend(states.missing(&trained, &unused));
        Ok((model, optim, progress, differences))
    }
}

/// The identities of a model's parameters, by path.
fn ids<M: Module>(model: &M) -> HashMap<String, u64> {
    parameters::of(model).into_iter().map(|found| (found.path, found.id.val())).collect()
}

/// Fails for an optimizer of `MuonConfig::init` whose gradients were to be clipped by Burn's
/// setter. It reaches the first group of an optimizer alone, which has no parameters there, and
/// Burn shows an optimizer's rules nothing of it. Here is the first occasion to report it.
fn ensure_clips(optim: &ModuleOptimizer) -> Result<()> {
    let Some(clipping) = optim.grad_clipping().filter(|_| is_of_init(optim)) else { return Ok(()) };
    Err(Error::usage(
        "`ModuleOptimizer::with_grad_clipping` clips nothing here",
        "no call of it on an optimizer of `MuonConfig::init`",
        match clipping {
            GradientClipping::Value(limit) => format!("Value({limit})"),
            GradientClipping::Norm(limit) => format!("Norm({limit})"),
        },
        "use `MuonConfig::with_grad_clipping`",
    ))
}

/// Returns `true` for an optimizer of `MuonConfig::init`, which alone returns the state of a
/// parameter that no model has.
fn is_of_init(optim: &ModuleOptimizer) -> bool {
    let question = Writer::new(vec![])
        .with_scalar("0.__rank", 1u64.into())
        .with_scalar(&prefixed("0", OF_INIT), true.into());
    let question = question.into_bytes().expect("a record can be written to memory");
    let question = OptimizerRecord::from_bytes(question).expect("the record is valid");
    let answer = Archive::from_record(optim.clone().load_record(question).to_record());
    answer.scalars().keys().any(|name| name.ends_with(OF_INIT))
}

/// A file of a checkpoint that has begun, without tensors so far.
pub(crate) struct Begun {
    scratch: Scratch,
    texts: [(&'static str, String); 3],
}

impl Begun {
    /// Begins a file.
    ///
    /// # Errors
    ///
    /// As [`save`].
    pub fn new<M: Module, T: Serialize>(
        path: &Path,
        (model, divided): (&M, &dyn Divided),
        progress: &T,
    ) -> Result<Self> {
        let json = |text: serde_json::Result<String>| {
            text.map_err(|error| Error::Checkpoint {
                path: path.to_owned(),
                reason: format!("its progress can't be written as JSON: {error}"),
                remedy: "use text for the keys of maps; the previous checkpoint is unchanged",
            })
        };
        let texts = [
            (FORMAT, layout::VERSION.to_string()),
            (PARAMETERS, json(serde_json::to_string(&parameters(model, divided)))?),
            (PROGRESS, json(serde_json::to_string(progress))?),
        ];
        Ok(Self { scratch: Scratch::create(path)?, texts })
    }

    /// Begins to write: the tensors of the model are to be put first, and the states then.
    ///
    /// # Errors
    ///
    /// As [`save`].
    pub fn with(
        self,
        (of_model, states): (Vec<Planned>, Contents),
        waiting: Waiting,
    ) -> Result<Saving> {
        let Self { scratch, texts } = self;
        let mut contents = states;
        contents.metadata.extend(texts.map(|(key, text)| (key.to_owned(), text)));
        contents.tensors.splice(0..0, of_model);
        Saving::start(scratch, contents, waiting)
    }
}

/// Loads what fits of the model of a run, and returns the differences. Of a parameter that is
/// divided, the model gets this rank's part.
pub(crate) fn load_model<M: Module>(
    archive: &Archive,
    model: M,
    divided: &dyn Divided,
) -> Result<(M, Vec<Difference>)> {
    let saved: Vec<ParameterEntry> = serde_json::from_str(archive.text(PARAMETERS))
        .map_err(|error| archive.broken(format!("its table of parameters is invalid: {error}")))?;
    // By the table in the file, before any tensor is read.
    let differences = differences(&saved, &parameters(&model, divided));
    model::load(archive, model, divided, differences)
}

/// Joins a prefix and a name, as in `model.layer.weight`.
pub(crate) fn prefixed(prefix: &str, name: &str) -> String {
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

/// The float parameters in which a model differs from the saved one.
fn differences(saved: &[ParameterEntry], model: &[ParameterEntry]) -> Vec<Difference> {
    let by_path = |parameters: &[ParameterEntry]| -> HashMap<String, String> {
        let entries = parameters.iter();
        entries.map(|parameter| (parameter.path.clone(), parameter.describe())).collect()
    };
    let (in_file, in_model) = (by_path(saved), by_path(model));
    let new = saved.iter().filter(|parameter| !in_model.contains_key(&parameter.path));
    let differing = model.iter().chain(new).filter_map(|ParameterEntry { path, .. }| {
        let described = |of: &HashMap<String, String>| match of.get(path) {
            Some(described) => described.clone(),
            None => "absent".to_owned(),
        };
        let (expected, got) = (described(&in_model), described(&in_file));
        let problem = format!("expected {expected}, got {got}");
        (expected != got).then(|| Difference::new(path, DifferenceKind::Weights, problem))
    });
    differing.collect()
}
