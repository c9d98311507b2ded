//! A checkpoint of many files: a folder with one part from each rank, and an index of the parts,
//! which is renamed last.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use burn_pack::AtomicFile;
use serde::{Deserialize, Serialize};

use super::layout::Seal;
use super::read::{Archive, broken};
use super::write::failed;
use crate::error::{Error, Result};

/// The name of the index in its folder.
const INDEX: &str = "index.json";
/// The version of the index.
const VERSION: u32 = 1;
/// The beginning of the names of all parts.
const PREFIX: &str = "part-";
/// The time between two looks at the folder for the parts of other ranks.
const PAUSE: Duration = Duration::from_millis(20);

/// The parts of a checkpoint, in the order of the ranks that wrote them.
#[derive(Serialize, Deserialize)]
struct Index {
    version: u32,
    parts: Vec<IndexedPart>,
}

/// A file of the folder.
#[derive(Serialize, Deserialize)]
struct IndexedPart {
    file: String,
    /// Tells this part from those of other saves.
    seal: Seal,
}

/// The part of one rank in a save of many ranks.
#[derive(Clone, Debug)]
pub struct Part {
    folder: PathBuf,
    /// A number of the save, which no other save to the folder has.
    save: u64,
    rank: usize,
    ranks: usize,
}

impl Part {
    pub fn new(folder: &Path, save: u64, [rank, ranks]: [usize; 2]) -> Self {
        Self { folder: folder.to_owned(), save, rank, ranks }
    }

    /// Returns `true` for the part of rank 0, which completes the checkpoint.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// The file of this part.
    pub fn path(&self) -> PathBuf {
        self.path_of(self.rank)
    }

    fn path_of(&self, rank: usize) -> PathBuf {
        self.folder.join(format!("{PREFIX}{:016x}-{rank}.bpk", self.save))
    }

    /// The file that says why a rank has no part.
    fn failure_of(&self, rank: usize) -> PathBuf {
        self.path_of(rank).with_extension("failed")
    }

    /// Tells the rank that waits for all parts that this one will not come.
    pub fn give_up(&self, error: &Error) {
        // On a full disk, rank 0 may find an empty file, or wait for its deadline.
        fs::write(self.failure_of(self.rank), error.to_string()).ok();
    }

    /// Waits for the parts of all ranks, and makes them the checkpoint. Rank 0 does this.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a rank gave up, or if nothing changed in the folder for `patience`;
    /// if the index can't be written. The previous checkpoint is then unchanged.
    pub fn complete(&self, patience: &Patience) -> Result<()> {
        let mut quiet = Quiet::new(&self.folder);
        for rank in 0..self.ranks {
            let path = self.path_of(rank);
            while !path.exists() {
                if let Ok(reason) = fs::read_to_string(self.failure_of(rank)) {
                    self.remove_others();
                    return Err(failed(
                        &path,
                        &format!("rank {rank} could not write it: {reason}"),
                    ));
                }
                let longest = patience.longest();
                if quiet.time(&self.folder) > longest {
                    return Err(Error::Checkpoint {
                        path,
                        reason: format!("rank {rank} did not write its part in {longest:?}"),
                        remedy: "save to a folder that all ranks share; the previous checkpoint is \
                                 unchanged",
                    });
                }
                thread::sleep(PAUSE);
            }
        }
        let files: Vec<PathBuf> = (0..self.ranks).map(|rank| self.path_of(rank)).collect();
        let index = self.folder.join(INDEX);
        write_index(&index, &files).map_err(|reason| failed(&index, &reason))?;
        self.remove_others();
        Ok(())
    }

    /// Removes the parts that the index does not list: those of older saves and of saves that
    /// failed. What can't be removed takes space, and nothing else.
    fn remove_others(&self) {
        let keeps = match (read_index(&self.folder), self.folder.join(INDEX).try_exists()) {
            (Ok(index), _) => self.files(&index),
            (Err(_), Ok(false)) => vec![],
            // It may list any of them.
            (Err(_), _) => return,
        };
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(PREFIX) && !keeps.contains(&path) {
                fs::remove_file(&path).ok();
            }
        }
    }

    fn files(&self, index: &Index) -> Vec<PathBuf> {
        index.parts.iter().map(|part| self.folder.join(&part.file)).collect()
    }
}

/// The longest time without a change in a folder, which may become shorter while a save runs.
#[derive(Clone, Debug)]
pub struct Patience(Arc<AtomicU64>);

impl Patience {
    pub fn new(longest: Duration) -> Self {
        Self(Arc::new(AtomicU64::new(milliseconds(longest))))
    }

    pub fn shorten(&self, longest: Duration) {
        self.0.fetch_min(milliseconds(longest), Ordering::Relaxed);
    }

    fn longest(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The time since a folder changed: its files are written as long as they grow.
struct Quiet {
    bytes: u64,
    since: Instant,
}

impl Quiet {
    fn new(folder: &Path) -> Self {
        Self { bytes: bytes_of(folder), since: Instant::now() }
    }

    fn time(&mut self, folder: &Path) -> Duration {
        let bytes = bytes_of(folder);
        if bytes != self.bytes {
            *self = Self { bytes, since: Instant::now() };
        }
        self.since.elapsed()
    }
}

/// The bytes of all files of a folder.
fn bytes_of(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum()
}

fn write_index(path: &Path, files: &[PathBuf]) -> Result<(), String> {
    let text = |error: io::Error| error.to_string();
    let entry = |path: &PathBuf| {
        let seal = Seal::read(&mut File::open(path).map_err(text)?)?;
        let seal = seal.ok_or_else(|| format!("{path:?} is not complete"))?;
        let name = path.file_name().expect("a part has a name").to_string_lossy();
        Ok(IndexedPart { file: name.into_owned(), seal })
    };
    let parts = files.iter().map(entry).collect::<Result<_, String>>()?;
    let index = Index { version: VERSION, parts };
    let bytes = serde_json::to_vec(&index).expect("numbers and names are JSON");
    let (scratch, mut file) = AtomicFile::create(path).map_err(|error| error.to_string())?;
    file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(text)?;
    scratch.commit().map_err(|error| error.to_string())
}

/// Returns `true` for a folder with the index of a checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(INDEX).is_file()
}

/// Removes a checkpoint: its index first, so that what is left is none.
pub fn remove(folder: &Path) -> io::Result<()> {
    fs::remove_file(folder.join(INDEX))?;
    fs::remove_dir_all(folder)
}

fn read_index(folder: &Path) -> Result<Index> {
    let path = folder.join(INDEX);
    let bytes = fs::read(&path).map_err(|error| Error::Checkpoint {
        path: folder.to_owned(),
        reason: format!("it is not a checkpoint: cannot read its `{INDEX}`: {error}"),
        remedy: "pass a folder that a `Saver` with parts completed",
    })?;
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|error| broken(&path, format!("it can't be parsed: {error}")))?;
    if index.version != VERSION {
        let version = index.version;
        return Err(broken(
            &path,
            format!("its version is unknown: expected {VERSION}, got {version}"),
        ));
    }
    Ok(index)
}

/// Opens a checkpoint: a file, or the parts in a folder as one archive.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint; if the folder has no
/// index, or a part is missing, damaged or of another save.
pub fn open(path: &Path) -> Result<Archive> {
    if path.is_dir() { open_folder(path) } else { Archive::open(path) }
}

fn open_folder(folder: &Path) -> Result<Archive> {
    let mut all: Option<Archive> = None;
    for part in read_index(folder)?.parts {
        let archive = open_part(folder, &part)?;
        match &mut all {
            None => all = Some(archive),
            Some(all) => all.join(archive)?,
        }
    }
    let all = all.ok_or_else(|| broken(&folder.join(INDEX), "it has no parts".to_owned()))?;
    Ok(all.at(folder))
}

fn open_part(folder: &Path, part: &IndexedPart) -> Result<Archive> {
    // A name with a folder would lead out of the checkpoint.
    if Path::new(&part.file).file_name().is_none_or(|name| name != part.file.as_str()) {
        return Err(broken(&folder.join(INDEX), format!("{:?} is not a file name", part.file)));
    }
    let path = folder.join(&part.file);
    let file = File::open(&path).map_err(|error| Error::Checkpoint {
        path: path.clone(),
        reason: format!("the part is missing: {error}"),
        remedy: "copy all files of the folder, or load an older checkpoint",
    });
    let seal = Seal::read(&mut file?).map_err(|reason| broken(&path, reason))?;
    if seal.as_ref() != Some(&part.seal) {
        let got = seal.map_or("a damaged end".to_owned(), |seal| seal.to_string());
        let reason = format!("it is of another save: expected {}, got {got}", part.seal);
        return Err(broken(&path, reason));
    }
    Archive::open(&path)
}
