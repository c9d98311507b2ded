//! A checkpoint of many files: a folder with one part from each rank, and an index of the parts,
//! which is renamed last.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use burn_pack::AtomicFile;
use serde::{Deserialize, Serialize};

use super::layout::Seal;
use super::read::{Archive, broken, unopened};
use super::write::failed;
use crate::error::{Error, Result};

/// The name of the index in its folder.
const INDEX: &str = "index.json";
/// The version of the index. In version 1, every tensor was in one part as a whole.
const VERSION: u32 = 2;
/// The extension of a part, and of the file that says why a rank has none.
const PART: &str = "bpk";
const FAILURE: &str = "failed";
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
    /// Tells this part from the parts of other saves.
    seal: Seal,
}

impl IndexedPart {
    fn name(&self) -> Option<Name> {
        Name::read(&self.file).filter(|name| name.extension == PART)
    }
}

impl Index {
    /// The number of the save that completed the folder.
    fn save(&self) -> u64 {
        let saves = self.parts.iter().filter_map(|part| Some(part.name()?.save));
        saves.max().unwrap_or(0)
    }
}

/// The name of a file that a rank writes to the folder of a save.
#[derive(Clone, Copy)]
struct Name {
    save: u64,
    rank: usize,
    extension: &'static str,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part-{:016x}-{}.{}", self.save, self.rank, self.extension)
    }
}

impl Name {
    /// Reads a name. `None` if no rank writes exactly this one: the file is the user's.
    fn read(name: &str) -> Option<Self> {
        let (stem, extension) = name.rsplit_once('.')?;
        let (save, rank) = stem.strip_prefix("part-")?.split_once('-')?;
        let read = Self {
            save: u64::from_str_radix(save, 16).ok()?,
            rank: rank.parse().ok()?,
            extension: [PART, FAILURE].into_iter().find(|known| *known == extension)?,
        };
        (read.to_string() == name).then_some(read)
    }
}

/// The number of the save that wrote a file other than the index, by the name of the file, or of
/// its temporary file. `None` for the user's files. An index that was not completed has number 0.
fn save_of(name: &str) -> Option<u64> {
    let Some(destination) = destination(name) else { return Some(Name::read(name)?.save) };
    let save = Name::read(destination).map(|name| name.save);
    save.or((destination == INDEX).then_some(0))
}

/// The name that a temporary file of [`AtomicFile`] gets in the end.
fn destination(name: &str) -> Option<&str> {
    let (destination, numbers) = name.strip_suffix(".tmp")?.rsplit_once('.')?;
    let (process, count) = numbers.split_once('-')?;
    let is_number = |text: &str| text.parse::<u64>().is_ok_and(|number| number.to_string() == text);
    (is_number(process) && is_number(count)).then_some(destination)
}

/// The files that saves have written to a folder, except for the index, with the numbers of the
/// saves.
fn files_of_saves(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = vec![];
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        let save = name.to_str().and_then(save_of);
        files.extend(save.map(|save| (save, folder.join(&name))));
    }
    Ok(files)
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
        self.file(rank, PART)
    }

    /// The file that says why a rank has no part.
    fn failure_of(&self, rank: usize) -> PathBuf {
        self.file(rank, FAILURE)
    }

    fn file(&self, rank: usize, extension: &'static str) -> PathBuf {
        let name = Name { save: self.save, rank, extension };
        self.folder.join(name.to_string())
    }

    /// Tells the rank that waits for all parts, rank 0, that this one will not come.
    pub fn give_up(&self, error: &Error) {
        if self.is_first() {
            // Nobody waits for rank 0's part without rank 0: there is only something to clean up.
            return self.remove_others();
        }
        // On a full disk, rank 0 may find an empty file, or wait for its deadline.
        fs::write(self.failure_of(self.rank), error.to_string()).ok();
    }

    /// Waits for the parts of all ranks, and makes them the checkpoint. Rank 0 does this.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if a rank gave up, or if the files of this save did not change for
    /// `patience`; if the index can't be written, or a newer save has written its own. The previous
    /// checkpoint is then unchanged.
    pub fn complete(&self, patience: &Patience) -> Result<()> {
        let written = self.wait_for_parts(patience).and_then(|()| self.write_index());
        if written.is_ok() {
            self.ensure_complete()?;
        }
        self.remove_others();
        written
    }

    fn wait_for_parts(&self, patience: &Patience) -> Result<()> {
        let mut quiet = Quiet::new(self);
        for rank in 0..self.ranks {
            let path = self.path_of(rank);
            // A part gets this name once it is complete and synced.
            while !path.exists() {
                if let Ok(reason) = fs::read_to_string(self.failure_of(rank)) {
                    let reason = format!("rank {rank} could not write it: {reason}");
                    return Err(failed(&path, &reason));
                }
                let longest = patience.longest();
                // Growth of any file of the save counts: a slow disk is no failure.
                if quiet.time(self) > longest {
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
        Ok(())
    }

    fn write_index(&self) -> Result<()> {
        let path = self.folder.join(INDEX);
        let parts = (0..self.ranks).map(|rank| self.indexed(rank)).collect::<Result<_>>()?;
        let index = Index { version: VERSION, parts };
        let bytes = serde_json::to_vec(&index).expect("numbers and names are JSON");
        let refused = |error: burn_pack::Error| failed(&path, &error.to_string());
        let (scratch, mut file) = AtomicFile::create(&path).map_err(refused)?;
        // Synced before it is renamed: after a crash, the name must not stand for missing bytes.
        let written = file.write_all(&bytes).and_then(|()| file.sync_all());
        written.map_err(|error| failed(&path, &error.to_string()))?;
        // As late as possible: another run may save to the folder.
        let found = last_save(&self.folder)?;
        if found > self.save {
            return Err(self.beaten_by(found));
        }
        scratch.commit().map_err(refused)
    }

    fn indexed(&self, rank: usize) -> Result<IndexedPart> {
        let path = self.path_of(rank);
        let seal = File::open(&path)
            .map_err(|error| error.to_string())
            .and_then(|mut file| Seal::read(&mut file))
            .and_then(|seal| seal.ok_or_else(|| "its end is damaged".to_owned()))
            .map_err(|reason| failed(&path, &reason))?;
        let file = Name { save: self.save, rank, extension: PART }.to_string();
        Ok(IndexedPart { file, seal })
    }

    /// Fails if a save of another run has replaced the index, or removed a part before it was
    /// listed.
    fn ensure_complete(&self) -> Result<()> {
        let found = last_save(&self.folder)?;
        if found != self.save {
            return Err(self.beaten_by(found));
        }
        match (0..self.ranks).map(|rank| self.path_of(rank)).find(|path| !path.exists()) {
            Some(missing) => Err(self.beaten(format!("expected {missing:?}, got no such file"))),
            None => Ok(()),
        }
    }

    fn beaten_by(&self, save: u64) -> Error {
        self.beaten(format!("expected save {:016x}, got {save:016x}", self.save))
    }

    fn beaten(&self, found: String) -> Error {
        Error::Checkpoint {
            path: self.folder.clone(),
            reason: format!("another run saves to it at the same time: {found}"),
            remedy: "end one of the runs, or save to different folders",
        }
    }

    /// Removes the parts that the index does not list: of older saves, and of this one if it
    /// failed. A save of another run may still write newer ones. What can't be removed takes space,
    /// and nothing else.
    fn remove_others(&self) {
        // It may list any of them if it can't be read.
        let Ok(index) = find_index(&self.folder) else { return };
        let listed = index.map_or(vec![], |index| index.parts);
        let listed: Vec<PathBuf> = listed.iter().map(|part| self.folder.join(&part.file)).collect();
        for (save, path) in files_of_saves(&self.folder).unwrap_or_default() {
            if save <= self.save && !listed.contains(&path) {
                fs::remove_file(path).ok();
            }
        }
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
        // A single number, on which no other memory depends.
        self.0.fetch_min(milliseconds(longest), Ordering::Relaxed);
    }

    fn longest(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The time since the files of a save changed: they are written as long as they grow. Other files
/// of the folder may grow for ever.
struct Quiet {
    bytes: u64,
    since: Instant,
}

impl Quiet {
    fn new(part: &Part) -> Self {
        Self { bytes: bytes_of(part), since: Instant::now() }
    }

    fn time(&mut self, part: &Part) -> Duration {
        let bytes = bytes_of(part);
        if bytes != self.bytes {
            *self = Self { bytes, since: Instant::now() };
        }
        self.since.elapsed()
    }
}

/// The bytes of all files of a save.
fn bytes_of(part: &Part) -> u64 {
    // A folder that can't be read at the moment counts as one that does not grow.
    let files = files_of_saves(&part.folder).unwrap_or_default();
    let files = files.into_iter().filter(|(save, _)| *save == part.save);
    files.filter_map(|(_, path)| path.metadata().ok()).map(|metadata| metadata.len()).sum()
}

/// The number of the save that completed a folder, or 0 if none has.
fn last_save(folder: &Path) -> Result<u64> {
    Ok(find_index(folder)?.map_or(0, |index| index.save()))
}

/// A number for the next save to a folder, larger than its checkpoint's.
pub fn next_save(folder: &Path) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let last = last_save(folder).unwrap_or(0);
    // The clock of the host that wrote it may be ahead.
    (now.as_nanos() as u64).max(last.saturating_add(1))
}

/// Fails if a save would replace an `index.json` that is not a checkpoint's.
pub fn ensure_ours(folder: &Path) -> Result<()> {
    find_index(folder).map(drop).map_err(|error| Error::Checkpoint {
        path: folder.to_owned(),
        reason: format!("its `{INDEX}` is not a checkpoint's, and is not replaced: {error}"),
        remedy: "save to another folder, or move the file away",
    })
}

/// Returns `true` for a folder with the index of a checkpoint.
pub fn is_checkpoint(folder: &Path) -> bool {
    matches!(find_index(folder), Ok(Some(_)))
}

/// Removes a checkpoint: its index first, so that what is left is none. The user's files stay.
pub fn remove(folder: &Path) -> io::Result<()> {
    remove_file(&folder.join(INDEX))?;
    files_of_saves(folder)?.iter().try_for_each(|(_, path)| remove_file(path))?;
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

/// Removes a file, unless another run has done so.
fn remove_file(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The index of a folder, if the folder has one.
///
/// # Errors
///
/// [`Error::Checkpoint`] if its `index.json` can't be read, or is not the index of a checkpoint.
fn find_index(folder: &Path) -> Result<Option<Index>> {
    let path = folder.join(INDEX);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| broken(&path, format!("it can't be read: {error}")))?,
    };
    let index: Index = serde_json::from_slice(&bytes)
        .map_err(|error| broken(&path, format!("it can't be parsed: {error}")))?;
    if !(1..=VERSION).contains(&index.version) {
        let version = index.version;
        let reason = format!("its version is unknown: expected 1 to {VERSION}, got {version}");
        return Err(broken(&path, reason));
    }
    // A name with a folder would lead out of the checkpoint.
    if let Some(IndexedPart { file, .. }) = index.parts.iter().find(|part| part.name().is_none()) {
        return Err(broken(&path, format!("{file:?} is not the name of a part")));
    }
    match index.parts.is_empty() {
        true => Err(broken(&path, "it has no parts".to_owned())),
        false => Ok(Some(index)),
    }
}

/// Opens a checkpoint: a file, or the parts in a folder as one archive.
///
/// # Errors
///
/// [`Error::Checkpoint`] if the file is missing, damaged or not a checkpoint; if the folder has no
/// index, or a part is missing, damaged or of another save.
pub fn open(path: &Path) -> Result<Archive> {
    let archive = if path.is_dir() { open_folder(path)? } else { Archive::open(path)? };
    archive.ensure_whole()?;
    Ok(archive)
}

fn open_folder(folder: &Path) -> Result<Archive> {
    let index = find_index(folder)?.ok_or_else(|| Error::Checkpoint {
        path: folder.to_owned(),
        reason: format!("it is not a checkpoint: it has no `{INDEX}`"),
        remedy: "pass a folder that a `Saver` with parts completed",
    })?;
    let mut parts = index.parts.iter();
    let first = parts.next().expect("an index has parts");
    let mut all = open_part(folder, first)?;
    parts.try_for_each(|part| all.join(open_part(folder, part)?))?;
    Ok(all.at(folder))
}

fn open_part(folder: &Path, part: &IndexedPart) -> Result<Archive> {
    let path = folder.join(&part.file);
    let mut file = File::open(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::Checkpoint {
            path: path.clone(),
            reason: format!("the part is missing: {error}"),
            remedy: "copy all files of the folder, or load an older checkpoint",
        },
        _ => unopened(&path, &error),
    })?;
    let seal = Seal::read(&mut file).map_err(|reason| broken(&path, reason))?;
    if seal.as_ref() != Some(&part.seal) {
        let got = seal.map_or("a damaged end".to_owned(), |seal| seal.to_string());
        let reason = format!("it is of another save: expected {}, got {got}", part.seal);
        return Err(broken(&path, reason));
    }
    Archive::open_part(&path)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, TensorData};

    use super::super::write::{Contents, Planned, Saving, Scratch, Waiting};
    use super::*;

    /// Patience for parts that are there.
    fn patience() -> Patience {
        Patience::new(Duration::from_millis(300))
    }

    fn write(part: &Part) {
        start(part, Contents::default()).finish().unwrap();
    }

    fn start(part: &Part, contents: Contents) -> Saving {
        let scratch = Scratch::create(&part.path()).unwrap();
        Saving::start(scratch, contents, Waiting::Copies(usize::MAX)).unwrap()
    }

    /// A run is still saving to a folder to which its successor saves.
    #[test]
    fn of_two_runs_one_checkpoint_stays_whole() {
        for older_is_first in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let parts = |save: u64| [0, 1].map(|rank| Part::new(folder.path(), save, [rank, 2]));
            let [older, newer] = [parts(1), parts(2)];
            older.iter().chain(&newer).for_each(write);
            if older_is_first {
                older[0].complete(&patience()).unwrap();
                open(folder.path()).unwrap();
                newer[0].complete(&patience()).unwrap();
            } else {
                newer[0].complete(&patience()).unwrap();
                open(folder.path()).unwrap();
                older.iter().for_each(write);
                let error = older[0].complete(&patience()).unwrap_err().to_string();
                assert!(error.contains("another run saves to it"), "{error}");
            }
            open(folder.path()).unwrap();
            let files = fs::read_dir(folder.path()).unwrap().count();
            assert_eq!(files, 3, "the parts of the newer save, and its index");
        }
    }

    /// The successor has removed the parts of a run when that run replaces the index.
    #[test]
    fn nothing_is_removed_for_an_index_of_missing_parts() {
        let folder = tempfile::tempdir().unwrap();
        let [older, newer] = [1, 2].map(|save| Part::new(folder.path(), save, [0, 1]));
        [&older, &newer].into_iter().for_each(write);
        let index = |part: &Part| {
            part.write_index().unwrap();
            fs::read(folder.path().join(INDEX)).unwrap()
        };
        let of_older = index(&older);
        index(&newer);
        newer.ensure_complete().unwrap();
        fs::remove_file(older.path()).unwrap();
        fs::write(folder.path().join(INDEX), of_older).unwrap();
        assert!(older.ensure_complete().is_err() && newer.ensure_complete().is_err());
        older.remove_others();
        assert!(newer.path().exists());
    }

    #[test]
    fn the_number_of_a_save_exceeds_that_of_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let ahead = next_save(folder.path()) + (1 << 60);
        let part = Part::new(folder.path(), ahead, [0, 1]);
        write(&part);
        part.complete(&patience()).unwrap();
        assert_eq!(next_save(folder.path()), ahead + 1);
    }

    #[test]
    fn files_of_the_user_do_not_count_as_progress() {
        let folder = tempfile::tempdir().unwrap();
        let part = Part::new(folder.path(), 1, [0, 2]);
        write(&part);
        let start = Instant::now();
        let error = thread::scope(|scope| {
            let completed = scope.spawn(|| part.complete(&patience()).unwrap_err().to_string());
            let mut metrics = File::create(folder.path().join("metrics.csv")).unwrap();
            while !completed.is_finished() && start.elapsed() < Duration::from_secs(5) {
                metrics.write_all(b"1\n").unwrap();
                thread::sleep(PAUSE);
            }
            completed.join().unwrap()
        });
        assert!(error.contains("rank 1 did not write its part in 300ms"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_parts_of_an_open_checkpoint_are_closed() {
        let folder = tempfile::tempdir().unwrap();
        let parts: Vec<Part> = (0..9).map(|rank| Part::new(folder.path(), 1, [rank, 9])).collect();
        for (rank, part) in parts.iter().enumerate() {
            let name = format!("tensor-{rank}");
            let planned = Planned::new(name, DType::F32, vec![2], None);
            let contents = Contents { tensors: vec![planned], ..Contents::default() };
            let mut saving = start(part, contents);
            saving.put(TensorData::from([rank as f32, 1.0])).unwrap();
            saving.finish().unwrap();
        }
        parts[0].complete(&patience()).unwrap();
        let archive = open(folder.path()).unwrap();
        let held = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let held = held.filter_map(|entry| fs::read_link(entry.path()).ok());
        assert_eq!(held.filter(|file| file.starts_with(folder.path())).count(), 0);
        assert_eq!(archive.data("tensor-7").unwrap(), TensorData::from([7.0f32, 1.0]));
        // The error of a part that is damaged or gone names it.
        let bytes = fs::read(parts[7].path()).unwrap();
        let flipped: Vec<u8> = bytes.iter().map(|byte| byte ^ 1).collect();
        fs::write(parts[7].path(), flipped).unwrap();
        assert!(archive.data("tensor-7").unwrap_err().to_string().contains("-7.bpk"));
        fs::remove_file(parts[7].path()).unwrap();
        let error = archive.data("tensor-7").unwrap_err().to_string();
        assert!(error.contains("-7.bpk") && error.contains("cannot open the file"), "{error}");
    }
}
