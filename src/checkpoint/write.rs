//! Writing a checkpoint tensor by tensor.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use burn::tensor::{DType, TensorData};
use burn_pack::{AtomicFile, Bytes, Scalar, Writer, aligned_data_section_start};

use super::layout::{Head, Index, Section, bytes_at, checksum_of};
use super::{OPTIMIZER, prefixed};
use crate::error::{Error, Result};

/// A tensor that is going to be written.
#[derive(Debug, Clone)]
pub struct Planned {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Identity of the parameter it belongs to.
    pub id: Option<u64>,
    pub bytes: usize,
}

impl Planned {
    /// A tensor whose size follows from its shape and type, as that of all but quantized ones.
    pub fn new(name: String, dtype: DType, shape: Vec<usize>, id: Option<u64>) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self { name, dtype, shape, id, bytes }
    }
}

/// The contents of a checkpoint, or of a part of it, without the elements.
#[derive(Debug, Default)]
pub struct Contents {
    pub tensors: Vec<Planned>,
    pub scalars: BTreeMap<String, Scalar>,
    pub metadata: BTreeMap<String, String>,
}

impl Contents {
    /// The contents of a record of Burn's, under the names they have in a checkpoint.
    pub fn of_optimizer(self) -> Self {
        let name = |name: String| prefixed(OPTIMIZER, &name);
        let Self { mut tensors, scalars, metadata } = self;
        tensors
            .iter_mut()
            .for_each(|planned| planned.name = name(std::mem::take(&mut planned.name)));
        Self {
            tensors,
            scalars: scalars.into_iter().map(|(key, value)| (name(key), value)).collect(),
            metadata: metadata.into_iter().map(|(key, value)| (name(key), value)).collect(),
        }
    }
}

/// A checkpoint in the making. It replaces what its path holds when it is [finished](Self::finish);
/// dropped before, it leaves no trace.
pub struct Saving {
    path: PathBuf,
    index: Index,
    /// The number of the next tensor.
    next: usize,
    data: Option<SyncSender<Bytes>>,
    writer: Option<JoinHandle<Result<(), burn_pack::Error>>>,
    scratch: Option<AtomicFile>,
}

impl Saving {
    /// Begins a file beside `path`.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be created.
    pub fn start(path: &Path, contents: Contents) -> Result<Self> {
        let (scratch, file) =
            AtomicFile::create(path).map_err(|error| failed(path, &error.to_string()))?;
        drop(file);
        // The container's writer draws the tensors from closures that own what they need, while the
        // caller makes them from what it borrows: a thread lets both have it their way. Nothing is
        // buffered between the two.
        let (data, source) = mpsc::sync_channel(0);
        let container = container(&contents, source);
        let place = scratch.path().to_owned();
        let writer = thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || container.write_to_file_in_place(place))
            .map_err(|error| failed(path, &format!("cannot start a thread: {error}")))?;
        let tensors = contents.tensors.into_iter().map(|planned| Section {
            name: planned.name,
            dtype: planned.dtype,
            shape: planned.shape,
            id: planned.id,
            bytes: planned.bytes as u64,
            checksum: 0,
        });
        let index = Index {
            head: Head::default(),
            tensors: tensors.collect(),
            scalars: contents.scalars,
            metadata: contents.metadata,
        };
        Ok(Self {
            path: path.to_owned(),
            index,
            next: 0,
            data: Some(data),
            writer: Some(writer),
            scratch: Some(scratch),
        })
    }

    /// Writes the next tensor, in the order of the contents.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be written.
    pub fn put(&mut self, data: TensorData) -> Result<()> {
        let (bytes, ..) = data.into_parts();
        let last = self.next + 1 == self.index.tensors.len();
        let section = &mut self.index.tensors[self.next];
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&bytes);
        if !last {
            let aligned = bytes.len().next_multiple_of(burn_pack::TENSOR_ALIGNMENT as usize);
            checksum.update(&vec![0; aligned - bytes.len()]);
        }
        section.checksum = checksum.finalize();
        self.next += 1;
        let sent = self.data.as_ref().is_some_and(|data| data.send(bytes).is_ok());
        if sent { Ok(()) } else { self.join() }
    }

    /// Puts the checkpoint in the place of what the path held before.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be written. What the path held is then unchanged.
    pub fn finish(mut self) -> Result<()> {
        self.join()?;
        let scratch = self.scratch.take().expect("a file is finished once");
        let appended = append(scratch.path(), &mut self.index);
        appended.map_err(|reason| failed(&self.path, &reason))?;
        scratch.commit().map_err(|error| failed(&self.path, &error.to_string()))
    }

    /// Waits for the end of the container.
    fn join(&mut self) -> Result<()> {
        self.data = None;
        let Some(writer) = self.writer.take() else {
            return Err(failed(&self.path, "it could not be written before"));
        };
        let written = writer.join().map_err(|_| failed(&self.path, "its writer panicked"))?;
        written.map_err(|error| failed(&self.path, &error.to_string()))
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        // The thread has to end before the file is removed: it may not have opened it yet.
        self.data = None;
        if let Some(writer) = self.writer.take() {
            writer.join().ok();
        }
    }
}

/// The container, whose tensors come from `source` in their order.
fn container(contents: &Contents, source: mpsc::Receiver<Bytes>) -> Writer {
    let source = Arc::new(Mutex::new(source));
    let tensors = contents.tensors.iter().map(|planned| {
        let (source, given_up) = (source.clone(), "the save was given up".to_owned());
        let next = move || {
            let received = source.lock().expect("no holder of the lock panics").recv();
            received.map_err(|_| burn_pack::Error::IoError(given_up.clone()))
        };
        let Planned { name, dtype, shape, id, bytes } = planned.clone();
        burn_pack::Tensor::deferred(name, dtype, shape, id, bytes, next)
    });
    let mut writer = Writer::new(tensors.collect()).auto_extension(false);
    for (key, value) in &contents.scalars {
        writer = writer.with_scalar(key, *value);
    }
    for (key, value) in &contents.metadata {
        writer = writer.with_metadata(key, value);
    }
    writer
}

/// Appends index and footer to a container.
fn append(path: &Path, index: &mut Index) -> Result<(), String> {
    let text = |error: std::io::Error| format!("cannot complete the file: {error}");
    let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(text)?;
    let header = bytes_at(&mut file, 0, burn_pack::HEADER_SIZE, "header")?;
    let header = burn_pack::Header::from_bytes(&header).map_err(|error| error.to_string())?;
    let head = aligned_data_section_start(header.metadata_size as usize) as u64;
    let checksum = checksum_of(&mut file, 0..head, "head")?;
    index.head = Head { bytes: head, checksum };
    let bytes = index.to_bytes().map_err(|error| error.to_string())?;
    file.write_all(&bytes).map_err(text)
}

fn failed(path: &Path, reason: &str) -> Error {
    Error::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_owned(),
        remedy: "check the folder and the space left; the previous checkpoint is unchanged",
    }
}
