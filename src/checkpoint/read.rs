//! Reading a checkpoint tensor by tensor.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use burn::optim::OptimizerRecord;
use burn::tensor::{Bytes, DType, TensorData};
use burn_pack::{Reader, Scalar, Writer};
use serde::de::DeserializeOwned;

use super::layout::{Index, Section, bytes_at, checksum_of, read_at, verify};
use super::write::{Contents, Planned};
use super::{FORMAT, MODEL, OPTIMIZER, PROGRESS, prefixed};
use crate::error::{Error, Result};
use crate::host;

/// The named tensors, scalars and texts of a checkpoint or of an optimizer's record.
///
/// The elements of a file are read by [`data`](Self::data), tensor by tensor.
pub struct Archive {
    path: PathBuf,
    tensors: BTreeMap<String, Stored>,
    scalars: BTreeMap<String, Scalar>,
    metadata: BTreeMap<String, String>,
    /// The digest of a record, computed when it is asked for: it reads all tensors.
    digest: OnceLock<u64>,
}

/// The name and the identity that a tensor of a state gets in another file or record.
pub struct Renamed {
    pub name: String,
    /// `None` for the identity that it has.
    pub id: Option<u64>,
}

/// A tensor of an archive.
pub struct Stored {
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Identity of the tensor's parameter.
    pub id: Option<u64>,
    location: Location,
}

/// The location of a tensor's elements.
enum Location {
    File(InFile),
    /// The ranges of the elements that each of several files has.
    Files(Vec<(Vec<Range<usize>>, InFile)>),
    Memory(Bytes),
}

/// A range of a file: `bytes` bytes of elements, then zeros. The checksum covers both.
struct InFile {
    file: Arc<Source>,
    range: Range<u64>,
    bytes: usize,
    checksum: u32,
}

impl InFile {
    /// Reads the elements of a tensor and verifies their checksum.
    fn read(&self, name: &str, dtype: DType) -> Result<Bytes> {
        let Self { file, range, bytes, checksum } = self;
        let part = format!("tensor `{name}`");
        let end = range.start + *bytes as u64;
        let mut data = host::zeros(*bytes, dtype);
        file.read(|file| {
            read_at(file, range.start, &mut data, &part)?;
            // Verified in memory: a second read could return other bytes.
            let mut hash = crc32fast::Hasher::new();
            hash.update(&data);
            hash.update(&bytes_at(file, end, (range.end - end) as usize, &part)?);
            verify(&part, *checksum, hash.finalize())
        })?;
        Ok(data)
    }

    /// Verifies the checksum of a tensor without keeping it in memory.
    fn verify(&self, name: &str) -> Result<()> {
        let Self { file, range, checksum, .. } = self;
        let part = format!("tensor `{name}`");
        file.read(|file| verify(&part, *checksum, checksum_of(file, range.clone(), &part)?))
    }
}

/// A file with tensors.
struct Source {
    path: PathBuf,
    /// The open file, which a save may replace. `None` for a file that is opened for every read.
    file: Option<Mutex<File>>,
}

impl Source {
    /// Reads from the file, and names it in the error.
    fn read<T>(&self, read: impl FnOnce(&mut File) -> Result<T, String>) -> Result<T> {
        let read = match &self.file {
            // One position for all readers: a seek and its read belong together.
            Some(file) => read(&mut file.lock().expect("no holder of the lock panics")),
            None => {
                read(&mut File::open(&self.path).map_err(|error| unopened(&self.path, &error))?)
            }
        };
        read.map_err(|reason| broken(&self.path, reason))
    }
}

impl Stored {
    /// Bytes of the elements.
    fn bytes(&self) -> usize {
        match &self.location {
            Location::File(InFile { bytes, .. }) => *bytes,
            Location::Files(files) => files.iter().map(|(_, file)| file.bytes).sum(),
            Location::Memory(bytes) => bytes.len(),
        }
    }

    /// Takes the location of further elements over from the same tensor of another file. Returns
    /// `false` if it is another tensor, or if either of the files has the whole.
    fn join(&mut self, next: Self) -> bool {
        let are_alike = self.dtype == next.dtype && self.shape == next.shape && self.id == next.id;
        match (&mut self.location, next.location) {
            (Location::Files(files), Location::Files(others)) if are_alike => {
                files.extend(others);
                true
            }
            _ => false,
        }
    }

    /// Returns `true` if every element is in exactly one place.
    fn is_whole(&self) -> bool {
        let Location::Files(files) = &self.location else { return true };
        let mut ranges: Vec<_> = files.iter().flat_map(|(ranges, _)| ranges).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let end =
            ranges.into_iter().try_fold(0, |end, range| (range.start == end).then_some(range.end));
        end == Some(self.shape.iter().product())
    }
}

impl Archive {
    /// Opens a file and reads its index and the head of its container.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_as(path, |file| Some(Mutex::new(file)))
    }

    /// Opens one of many files, which are never replaced. Each is open only while it is read, since
    /// a process can have only so many open files.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_part(path: &Path) -> Result<Self> {
        Self::open_as(path, |_| None)
    }

    fn open_as(path: &Path, kept: impl FnOnce(File) -> Option<Mutex<File>>) -> Result<Self> {
        let broken = |reason: String| broken(path, reason);
        let mut file = File::open(path).map_err(|error| unopened(path, &error))?;
        let Some((index, bytes)) = Index::read(&mut file).map_err(broken)? else {
            return Self::open_other(path);
        };
        let head = checksum_of(&mut file, 0..index.head.bytes, "head").map_err(broken)?;
        // The head is not used here, but Burn's tools read it: damage must not wait for them.
        verify("its head", index.head.checksum, head).map_err(broken)?;
        let spans = index.spans().expect("`Index::read` has checked the spans");
        let file = Arc::new(Source { path: path.to_owned(), file: kept(file) });
        let tensors = index.tensors.into_iter().zip(spans).map(|(section, range)| {
            let Section { name, dtype, mut shape, id, bytes, checksum, excerpt } = section;
            let in_file = InFile { file: file.clone(), range, bytes: bytes as usize, checksum };
            let location = match excerpt {
                None => Location::File(in_file),
                Some(excerpt) => {
                    shape = excerpt.whole;
                    Location::Files(vec![(excerpt.ranges, in_file)])
                }
            };
            (name, Stored { dtype, shape, id, location })
        });
        Ok(Self {
            path: path.to_owned(),
            tensors: tensors.collect(),
            scalars: index.scalars,
            metadata: index.metadata,
            // The index has a checksum of every tensor, so that its bytes stand for the whole file.
            digest: digest(&[&bytes]).into(),
        })
    }

    /// Adds the contents of the next part of one checkpoint. The first part of all has the texts
    /// that every rank writes.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if several parts have a whole tensor, or other tensors of one name.
    pub fn join(&mut self, next: Self) -> Result<()> {
        let digest = digest(&[&self.digest().to_le_bytes(), &next.digest().to_le_bytes()]);
        self.digest = digest.into();
        for (name, value) in next.scalars {
            self.scalars.entry(name).or_insert(value);
        }
        for (name, text) in next.metadata {
            self.metadata.entry(name).or_insert(text);
        }
        for (name, stored) in next.tensors {
            let is_new = match self.tensors.get_mut(&name) {
                Some(known) => known.join(stored),
                None => self.tensors.insert(name.clone(), stored).is_none(),
            };
            if !is_new {
                let reason = format!("tensor `{name}` is in another part, too");
                return Err(broken(&next.path, reason));
            }
        }
        Ok(())
    }

    /// Fails if it has some elements of a tensor and not all, as a part of a folder has.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] that names the tensor.
    pub fn ensure_whole(&self) -> Result<()> {
        match self.tensors.iter().find(|(_, stored)| !stored.is_whole()) {
            None => Ok(()),
            Some((name, Stored { dtype, shape, .. })) => {
                let [expected, got] =
                    [shape.iter().product(), self.tensors[name].bytes() / dtype.size()];
                Err(self.broken(format!(
                    "tensor `{name}` is not whole: expected its {expected} elements once each, got \
                     {got}; a file of a folder is not a checkpoint without the others"
                )))
            }
        }
    }

    /// The archive under another path.
    pub fn at(self, path: &Path) -> Self {
        Self { path: path.to_owned(), ..self }
    }

    /// Opens a file that does not end like a checkpoint of this version.
    fn open_other(path: &Path) -> Result<Self> {
        let broken = |reason: String| broken(path, reason);
        let reader = Reader::from_file_exact(path).map_err(|error| broken(error.to_string()))?;
        match reader.metadata().get(FORMAT).map(String::as_str) {
            Some("1") => Self::from_version_1(path, reader),
            Some(_) => Err(broken("its footer is damaged or cut off".into())),
            None => Err(Error::Checkpoint {
                path: path.to_owned(),
                reason: "it is not a checkpoint: its metadata names no format".into(),
                remedy: "pass a file that `checkpoint::save` wrote",
            }),
        }
    }

    /// Reads a checkpoint of version 1, which is two records, each as one tensor of bytes.
    fn from_version_1(path: &Path, reader: Reader) -> Result<Self> {
        let broken = |error: burn_pack::Error| broken(path, error.to_string());
        let [model, optim] = [MODEL, OPTIMIZER].map(|name| reader.tensor_data(name));
        let model = model.map_err(broken)?;
        let optim = optim.map_err(broken)?;
        let mut archive = Self {
            path: path.to_owned(),
            tensors: BTreeMap::new(),
            scalars: BTreeMap::new(),
            metadata: reader.metadata().clone(),
            digest: OnceLock::new(),
        };
        let described = format!("{:?}", archive.metadata);
        archive.digest = digest(&[described.as_bytes(), &model, &optim]).into();
        archive.add(MODEL, Bytes::from_bytes_vec(model)).map_err(broken)?;
        archive.add(OPTIMIZER, Bytes::from_bytes_vec(optim)).map_err(broken)?;
        Ok(archive)
    }

    /// Reads the state in a record.
    ///
    /// # Panics
    ///
    /// If the record can't be written to memory.
    pub fn from_record(record: OptimizerRecord) -> Self {
        Self::from_record_bytes(record.into_bytes().expect("a record can be written to memory"))
    }

    /// Reads the state in the bytes of a record.
    ///
    /// # Panics
    ///
    /// If the bytes are not a record.
    pub fn from_record_bytes(bytes: Bytes) -> Self {
        let mut archive = Self {
            path: PathBuf::new(),
            tensors: BTreeMap::new(),
            scalars: BTreeMap::new(),
            metadata: BTreeMap::new(),
            digest: OnceLock::new(),
        };
        archive.add(OPTIMIZER, bytes).expect("the caller passes the bytes of a record");
        archive
    }

    /// The digest of the states by the paths of their parameters. Neither identities nor the order
    /// of tensors are part of it, because they may differ between records of the same state.
    fn digest_of_states(&self) -> u64 {
        let by_path = |name| self.state_key(name).map(|(path, _, state)| format!("{path} {state}"));
        let tensors = self.tensors.iter().filter_map(|(name, stored)| {
            let Location::Memory(bytes) = &stored.location else { return None };
            let Stored { dtype, shape, .. } = stored;
            let sum = crc32fast::hash(bytes);
            Some(format!("{}: {dtype:?} {shape:?} {sum:08x}", by_path(name)?))
        });
        let scalars = self
            .scalars
            .iter()
            .filter_map(|(name, value)| Some(format!("{}: {value:?}", by_path(name)?)));
        let mut all: Vec<String> = tensors.chain(scalars).collect();
        // The order of a record follows its identities, which differ from run to run.
        all.sort_unstable();
        digest(&[all.join("\n").as_bytes()])
    }

    /// Adds the contents of a record under names with a prefix.
    fn add(&mut self, prefix: &str, record: Bytes) -> Result<(), burn_pack::Error> {
        let reader = Reader::from_bytes(record)?;
        let name = |name: &str| prefixed(prefix, name);
        self.scalars.extend(reader.scalars().iter().map(|(key, value)| (name(key), *value)));
        let metadata = reader.metadata().iter();
        self.metadata.extend(metadata.map(|(key, value)| (name(key), value.clone())));
        for tensor in reader.into_tensors()? {
            let (record_name, dtype, shape, id, bytes) = tensor.into_parts()?;
            let location = Location::Memory(bytes);
            let stored = Stored { dtype, shape: shape.to_vec(), id, location };
            self.tensors.insert(name(&record_name), stored);
        }
        Ok(())
    }

    /// The contents of a state without the elements, under the names that a function gives; none
    /// for what is left out.
    pub fn contents(&self, renamed: impl Fn(&str) -> Option<Renamed>) -> Contents {
        let tensors = self.tensors.iter().filter_map(|(name, stored)| {
            let Renamed { name, id } = renamed(name)?;
            let Stored { dtype, shape, .. } = stored;
            Some(Planned {
                bytes: stored.bytes(),
                ..Planned::new(name, *dtype, shape.clone(), id.or(stored.id))
            })
        });
        let named = |name: &str| renamed(name).map(|renamed| renamed.name);
        let scalars = self.scalars.iter();
        let metadata = self.metadata.iter();
        Contents {
            tensors: tensors.collect(),
            scalars: scalars.filter_map(|(name, value)| Some((named(name)?, *value))).collect(),
            metadata: metadata
                .filter_map(|(name, value)| Some((named(name)?, value.clone())))
                .collect(),
        }
    }

    pub fn scalars(&self) -> &BTreeMap<String, Scalar> {
        &self.scalars
    }

    pub fn tensors(&self) -> &BTreeMap<String, Stored> {
        &self.tensors
    }

    /// The identities of optimizer states, as texts, each with the path of its parameter.
    pub fn state_ids(&self) -> impl Iterator<Item = (&str, &str)> {
        let prefix = prefixed(OPTIMIZER, "");
        self.metadata
            .iter()
            .filter_map(move |(key, path)| Some((key.strip_prefix(&prefix)?, path.as_str())))
    }

    /// The path of a parameter, its identity as a text, and a name in its state, from
    /// `optimizer.ID.NAME`, where the name may also contain dots. `None` for the names of other
    /// tensors and scalars.
    pub fn state_key<'a>(&'a self, name: &'a str) -> Option<(&'a str, &'a str, &'a str)> {
        let (id, state) = name.strip_prefix(OPTIMIZER)?.strip_prefix('.')?.split_once('.')?;
        Some((self.metadata.get(&prefixed(OPTIMIZER, id))?, id, state))
    }

    /// The text of a metadata key, empty if the key is missing.
    pub fn text(&self, key: &str) -> &str {
        self.metadata.get(key).map_or("", String::as_str)
    }

    /// The saved progress.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the progress is of another type.
    pub fn progress<T: DeserializeOwned>(&self) -> Result<T> {
        serde_json::from_str(self.text(PROGRESS)).map_err(|error| Error::Checkpoint {
            path: self.path.clone(),
            reason: format!("its progress is of another type: {error}"),
            remedy: "load it as the type that was saved",
        })
    }

    /// A fingerprint of the contents, which covers names, shapes, checksums and progress.
    pub fn digest(&self) -> u64 {
        *self.digest.get_or_init(|| self.digest_of_states())
    }

    /// Describes the file by its path, digest and progress, for messages.
    pub fn describe(&self) -> String {
        // Enough to tell two saves apart, in an error of a line or two.
        let progress: String = self.text(PROGRESS).chars().take(80).collect();
        match self.path.as_os_str().is_empty() {
            true => format!("a record of digest {:016x}", self.digest()),
            false => {
                format!("{:?} of digest {:016x} and progress {progress}", self.path, self.digest())
            }
        }
    }

    /// Reads a tensor and verifies its checksum.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if the file has no such tensor, can't be read or is damaged.
    pub fn data(&self, name: &str) -> Result<TensorData> {
        let Some(stored) = self.tensors.get(name) else {
            return Err(self.broken(format!("it has no tensor `{name}`")));
        };
        let bytes = match &stored.location {
            Location::Memory(bytes) => bytes.clone(),
            Location::File(file) => file.read(name, stored.dtype)?,
            Location::Files(files) => {
                let (dtype, size) = (stored.dtype, stored.dtype.size());
                let mut all = host::zeros(stored.bytes(), dtype);
                for (ranges, file) in files {
                    let (bytes, mut end) = (file.read(name, dtype)?, 0);
                    for range in ranges {
                        let start = end;
                        end += range.len() * size;
                        all[range.start * size..range.end * size]
                            .copy_from_slice(&bytes[start..end]);
                    }
                }
                all
            }
        };
        TensorData::try_from_bytes(bytes, stored.shape.clone(), stored.dtype)
            .map_err(|error| self.broken(format!("tensor `{name}`: {error}")))
    }

    /// Verifies the checksum of a tensor without keeping it in memory.
    ///
    /// # Errors
    ///
    /// As [`data`](Self::data).
    pub fn verify(&self, name: &str) -> Result<()> {
        match self.tensors.get(name).map(|stored| &stored.location) {
            None | Some(Location::Memory(_)) => Ok(()),
            Some(Location::File(file)) => file.verify(name),
            Some(Location::Files(files)) => {
                files.iter().try_for_each(|(_, file)| file.verify(name))
            }
        }
    }

    /// Converts a state to Burn's record, which is in host memory as a whole. The names are those
    /// of [`contents`](Self::contents), after the prefix of states.
    ///
    /// # Errors
    ///
    /// As [`data`](Self::data).
    pub fn record(
        self: &Arc<Self>,
        renamed: impl Fn(&str) -> Option<Renamed>,
    ) -> Result<OptimizerRecord> {
        // The closures return errors of the record's writer. The crate's error is kept here.
        let failure: Arc<Mutex<Option<Error>>> = Arc::default();
        let recorded = |name: &str| {
            let Renamed { name, id } = renamed(name)?;
            let name = name.strip_prefix(OPTIMIZER)?.strip_prefix('.')?.to_owned();
            Some(Renamed { name, id })
        };
        let mut tensors = Vec::new();
        for (name, stored) in &self.tensors {
            let Some(Renamed { name: record_name, id }) = recorded(name) else { continue };
            let (source, name, failure) = (self.clone(), name.clone(), failure.clone());
            let read = move || match source.data(&name) {
                Ok(data) => Ok(data.into_bytes()),
                Err(error) => {
                    let text = error.to_string();
                    *failure.lock().expect("no holder of the lock panics") = Some(error);
                    Err(burn_pack::Error::IoError(text))
                }
            };
            tensors.push(burn_pack::Tensor::deferred(
                record_name,
                stored.dtype,
                stored.shape.clone(),
                id.or(stored.id),
                stored.bytes(),
                read,
            ));
        }
        let mut writer = Writer::new(tensors);
        for (name, value) in &self.scalars {
            if let Some(Renamed { name, .. }) = recorded(name) {
                writer = writer.with_scalar(&name, *value);
            }
        }
        for (name, value) in &self.metadata {
            if let Some(Renamed { name, .. }) = recorded(name) {
                writer = writer.with_metadata(&name, value);
            }
        }
        let bytes = writer.into_bytes().map_err(|error| {
            let failure = failure.lock().expect("no holder of the lock panics").take();
            failure.unwrap_or_else(|| self.broken(error.to_string()))
        })?;
        OptimizerRecord::from_bytes(bytes).map_err(|error| self.broken(error.to_string()))
    }

    /// The error of a file with unusable contents.
    pub fn broken(&self, reason: String) -> Error {
        broken(&self.path, reason)
    }
}

pub(super) fn broken(path: &Path, reason: String) -> Error {
    Error::Checkpoint {
        path: path.to_owned(),
        reason,
        remedy: "check the path, or load an older checkpoint",
    }
}

/// The error of a file that can't be opened.
pub(super) fn unopened(path: &Path, error: &std::io::Error) -> Error {
    broken(path, format!("cannot open the file: {error}"))
}

/// A hash of the parts, the same in every process that runs the same program.
fn digest(parts: &[&[u8]]) -> u64 {
    // Without random keys, since ranks that are processes compare the hash.
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}
