//! Writing a checkpoint tensor by tensor.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use burn::tensor::{DType, TensorData};
use burn_pack::{AtomicFile, Bytes, Scalar, Writer, aligned_data_section_start};

use super::layout::{Excerpt, Head, Index, Section, bytes_at, checksum_of};
use super::{OPTIMIZER, prefixed};
use crate::comm::message;
use crate::error::{Error, Result};
use crate::host::copied;
use crate::replaced_file;

/// Name, type and shape of a tensor that will be written.
#[derive(Debug, Clone)]
pub struct Planned {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Identity of the tensor's parameter.
    pub id: Option<u64>,
    pub bytes: usize,
    /// `None` for a tensor that is written as a whole.
    pub excerpt: Option<Excerpt>,
}

impl Planned {
    /// A tensor whose size follows from its shape and type, as for all types except quantized ones.
    pub fn new(name: String, dtype: DType, shape: Vec<usize>, id: Option<u64>) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self { name, dtype, shape, id, bytes, excerpt: None }
    }

    /// The same tensor, of which these ranges are written, flat.
    pub fn excerpt(self, ranges: Vec<Range<usize>>) -> Self {
        let shape = vec![ranges.iter().map(Range::len).sum()];
        let excerpt = Some(Excerpt { whole: self.shape, ranges });
        Self { excerpt, ..Self::new(self.name, self.dtype, shape, self.id) }
    }
}

/// The contents of a checkpoint, or of a part of a checkpoint, without the elements.
#[derive(Debug, Default)]
pub struct Contents {
    pub tensors: Vec<Planned>,
    pub scalars: BTreeMap<String, Scalar>,
    pub metadata: BTreeMap<String, String>,
}

impl Contents {
    /// The contents of a Burn record of an optimizer, under their names in a checkpoint.
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

/// The temporary file of a checkpoint, in the folder of its path.
pub struct Scratch {
    path: PathBuf,
    file: AtomicFile,
}

impl Scratch {
    /// Creates the file.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be created.
    pub fn create(path: &Path) -> Result<Self> {
        let (scratch, file) =
            replaced_file::create(path).map_err(|error| failed(path, &error.to_string()))?;
        drop(file); // the writer of the container opens the path itself
        Ok(Self { path: path.to_owned(), file: scratch })
    }
}

/// The elements that wait for the writer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// Copies of so many bytes, or of one tensor that has more.
    Copies(usize),
    /// Tensors in the host's memory, which the writer reads: whoever changes one makes a copy.
    Tensors,
}

impl Waiting {
    fn bytes(self) -> usize {
        match self {
            Self::Copies(bytes) => bytes,
            Self::Tensors => usize::MAX,
        }
    }
}

/// The elements of tensors that follow each other. Each is read when it is asked for.
pub type Read = Box<dyn Iterator<Item = TensorData> + Send>;

/// A checkpoint that is being written. [`finish`](Self::finish) replaces the file at its path. If
/// it is dropped before, it leaves no file behind.
pub struct Saving {
    path: PathBuf,
    index: Index,
    waiting: Waiting,
    /// Sends the elements to the writer. Dropped when there are no more.
    data: Option<Sender<Read>>,
    /// The memory for elements that wait for the writer.
    room: Arc<Room>,
    /// The checksums of the tensors that the writer has taken.
    checksums: Arc<Mutex<Vec<u32>>>,
    /// The thread that writes the container.
    writer: Option<JoinHandle<Result<(), burn_pack::Error>>>,
    /// The temporary file.
    scratch: Option<AtomicFile>,
}

impl Saving {
    /// Begins to write to a temporary file.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if no thread can be started.
    pub fn start(scratch: Scratch, contents: Contents, waiting: Waiting) -> Result<Self> {
        let Scratch { path, file: scratch } = scratch;
        // The writer of the container pulls tensors from closures that own their data, while the
        // caller pushes tensors that it makes from borrowed data. A thread connects the two.
        let (data, tensors) = mpsc::channel();
        let (room, checksums) =
            (Arc::new(Room::new(waiting.bytes())), Arc::<Mutex<Vec<u32>>>::default());
        let source = Producer {
            tensors,
            read: Box::new(iter::empty()),
            room: room.clone(),
            written: 0,
            checksums: checksums.clone(),
            count: contents.tensors.len(),
        };
        let container = container(&contents, source);
        let scratch_path = scratch.path().to_owned();
        let writer = thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || container.write_to_file_in_place(scratch_path))
            .map_err(|error| failed(&path, &format!("cannot start a thread: {error}")))?;
        let tensors = contents.tensors.into_iter().map(|planned| Section {
            name: planned.name,
            dtype: planned.dtype,
            shape: planned.shape,
            id: planned.id,
            bytes: planned.bytes as u64,
            checksum: 0,
            excerpt: planned.excerpt,
        });
        let index = Index {
            head: Head::default(),
            tensors: tensors.collect(),
            scalars: contents.scalars,
            metadata: contents.metadata,
        };
        Ok(Self {
            path,
            index,
            waiting,
            data: Some(data),
            room,
            checksums,
            writer: Some(writer),
            scratch: Some(scratch),
        })
    }

    /// Writes the next tensor, in the order of the contents, or leaves it to the writer.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be written.
    pub fn put(&mut self, data: TensorData) -> Result<()> {
        // Here, and not in the writer: training goes on meanwhile, and changes tensors in place.
        let data = copied(data);
        let bytes = data.bytes().len();
        self.send(bytes, Box::new(iter::once(data)))
    }

    /// Writes the next tensors, of so many bytes together, or leaves them to the writer, which
    /// reads them if that is how they [wait](Waiting::Tensors).
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if they can't be written.
    pub fn put_read(&mut self, bytes: usize, mut read: Read) -> Result<()> {
        match self.waiting {
            Waiting::Copies(_) => read.try_for_each(|data| self.put(data)),
            Waiting::Tensors => self.send(bytes, read),
        }
    }

    fn send(&mut self, bytes: usize, read: Read) -> Result<()> {
        // Before the tensors are sent: the caller waits here while the writer is behind, so that
        // the memory of the host stays bounded.
        self.room.take(bytes);
        let sent = self.data.as_ref().is_some_and(|data| data.send(read).is_ok());
        // The writer has ended: its error says why.
        if sent { Ok(()) } else { self.join() }
    }

    /// Replaces the file at the path by the checkpoint.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be written. A previous file at the path is then unchanged.
    pub fn finish(mut self) -> Result<()> {
        self.join()?;
        let checksums = std::mem::take(&mut *self.checksums.lock().expect("the writer has ended"));
        for (section, checksum) in self.index.tensors.iter_mut().zip(checksums) {
            section.checksum = checksum;
        }
        let scratch = self.scratch.take().expect("`finish` consumes the checkpoint");
        // The index comes last, when all checksums are known. Burn's tools read the container
        // before it.
        let appended = append(scratch.path(), &mut self.index);
        appended.map_err(|reason| failed(&self.path, &reason))?;
        // Only now does the file have its name: a crash before leaves the previous checkpoint.
        scratch.commit().map_err(|error| failed(&self.path, &error.to_string()))
    }

    /// Waits until the container is written.
    fn join(&mut self) -> Result<()> {
        self.data = None;
        let Some(writer) = self.writer.take() else {
            return Err(failed(&self.path, "an earlier write failed"));
        };
        let written = writer.join().map_err(|panic| {
            failed(&self.path, &format!("its writer panicked: {}", message(&*panic)))
        })?;
        written.map_err(|error| failed(&self.path, &error.to_string()))
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        // The thread has to end before the file is removed: otherwise it may open, and so create,
        // the file afterwards.
        self.data = None;
        if let Some(writer) = self.writer.take() {
            writer.join().ok();
        }
    }
}

/// Bytes of elements that wait for the writer.
struct Room {
    limit: usize,
    /// The bytes that wait. `None` once the writer has ended.
    used: Mutex<Option<usize>>,
    changed: Condvar,
}

impl Room {
    fn new(limit: usize) -> Self {
        Self { limit, used: Mutex::new(Some(0)), changed: Condvar::new() }
    }

    /// Waits until there is room for a number of bytes, and takes it. A tensor above the limit has
    /// room alone.
    fn take(&self, bytes: usize) {
        let used = self.used.lock().expect("no holder of the lock panics");
        let is_full = |used: &mut Option<usize>| {
            // A tensor always fits into an empty room, however large: it could never be written
            // otherwise.
            used.is_some_and(|used| used > 0 && used.saturating_add(bytes) > self.limit)
        };
        let mut used = self.changed.wait_while(used, is_full).expect("no holder panics");
        *used = used.map(|used| used + bytes);
    }

    /// Gives bytes back.
    fn give(&self, bytes: usize) {
        let mut used = self.used.lock().expect("no holder of the lock panics");
        *used = used.map(|used| used - bytes);
        self.changed.notify_all();
    }

    /// Lets everyone pass: nothing is written any more.
    fn close(&self) {
        *self.used.lock().expect("no holder of the lock panics") = None;
        self.changed.notify_all();
    }
}

/// The writer's end of the channel.
struct Producer {
    tensors: Receiver<Read>,
    /// The tensors that follow the one before.
    read: Read,
    room: Arc<Room>,
    /// Bytes of the tensor that was taken last.
    written: usize,
    checksums: Arc<Mutex<Vec<u32>>>,
    /// The number of all tensors.
    count: usize,
}

impl Producer {
    /// The elements of the next tensor. The writer asks for it once the one before is written.
    fn next(&mut self) -> Option<Bytes> {
        // The container asks for a tensor when it has written the last one.
        self.room.give(self.written);
        self.written = 0;
        let data = loop {
            match self.read.next() {
                Some(data) => break data,
                None => self.read = self.tensors.recv().ok()?,
            }
        };
        let (bytes, ..) = data.into_parts();
        self.written = bytes.len();
        let mut checksums = self.checksums.lock().expect("no holder of the lock panics");
        let is_last = checksums.len() + 1 == self.count;
        checksums.push(checksum(&bytes, is_last));
        Some(bytes)
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        // The writer has ended, perhaps by an error: a caller must not wait for room any longer.
        self.room.close();
    }
}

/// The checksum of a tensor, with the zeros that follow it: the container aligns the next tensor,
/// see `Index::spans`.
fn checksum(bytes: &[u8], is_last: bool) -> u32 {
    let mut checksum = crc32fast::Hasher::new();
    checksum.update(bytes);
    // The container fills up every tensor but the last: the checksum is of the bytes in the file.
    if !is_last {
        let aligned = bytes.len().next_multiple_of(burn_pack::TENSOR_ALIGNMENT as usize);
        checksum.update(&vec![0; aligned - bytes.len()]);
    }
    checksum.finalize()
}

/// The writer of the container, which receives the tensors from `source` in their order.
fn container(contents: &Contents, source: Producer) -> Writer {
    let source = Arc::new(Mutex::new(source));
    let tensors = contents.tensors.iter().map(|planned| {
        let source = source.clone();
        let next = move || {
            let next = source.lock().expect("no holder of the lock panics").next();
            next.ok_or_else(|| burn_pack::Error::IoError("the save was aborted".to_owned()))
        };
        let Planned { name, dtype, shape, id, bytes, .. } = planned.clone();
        burn_pack::Tensor::deferred(name, dtype, shape, id, bytes, next)
    });
    // The path is the temporary file's, which must not get another extension.
    let mut writer = Writer::new(tensors.collect()).auto_extension(false);
    for (key, value) in &contents.scalars {
        writer = writer.with_scalar(key, *value);
    }
    for (key, value) in &contents.metadata {
        writer = writer.with_metadata(key, value);
    }
    writer
}

/// Appends the index and the footer to a container.
fn append(path: &Path, index: &mut Index) -> Result<(), String> {
    let incomplete = |error: std::io::Error| format!("cannot complete the file: {error}");
    let mut file = OpenOptions::new().read(true).append(true).open(path).map_err(incomplete)?;
    let header = bytes_at(&mut file, 0, burn_pack::HEADER_SIZE, "header")?;
    let header = burn_pack::Header::from_bytes(&header).map_err(|error| error.to_string())?;
    let head = aligned_data_section_start(header.metadata_size as usize) as u64;
    let checksum = checksum_of(&mut file, 0..head, "head")?;
    index.head = Head { bytes: head, checksum };
    let bytes = index.to_bytes().map_err(|error| error.to_string())?;
    file.write_all(&bytes).map_err(incomplete)
}

pub(super) fn failed(path: &Path, reason: &str) -> Error {
    Error::Checkpoint {
        path: path.to_owned(),
        reason: reason.to_owned(),
        remedy: "check the folder and its free space; the previous checkpoint is unchanged",
    }
}
