//! Saving while training goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use burn::module::Module;
use serde::Serialize;

use super::layout::Seal;
use super::parts::{self, Part, Patience};
use super::write::{Saving, Waiting, failed};
use super::{Checkpointed, Entry};
use crate::comm::message;
use crate::error::{Error, Result};

/// The answer of [`Saver::save`] while an earlier save still runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenBusy {
    /// Waits for its end.
    #[default]
    Wait,
    /// Fails with [`Error::Usage`].
    Refuse,
}

/// Saves checkpoints while training goes on.
///
/// [`save`](Self::save) copies model and optimizer to the memory of the host and returns. A thread
/// then writes, syncs and renames the file, which is the one that [`checkpoint::save`](super::save)
/// writes, byte for byte. An interrupted save leaves the previous file in place.
///
/// On Flex, whose tensors are in the memory of the host, `save` does not copy them: the thread
/// reads them, while a step that changes one makes a new tensor. It copies only what it converts,
/// such as states in 8 bits, parameters that a layout divides, states of users' optimizers, and
/// what ranks in other processes send. The model and its optimizer have to be on one device, and
/// clones of a user's state must not share what a step changes.
///
/// An error of the thread is returned by the next [`save`](Self::save) or [`wait`](Self::wait): end
/// a run with `wait`. A `Saver` that is dropped waits as well, and logs the error.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use distmuon::{MuonConfig, checkpoint};
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let folder = folder.path();
/// let model = LinearConfig::new(4, 8).init(&Device::default().autodiff());
/// let optim = MuonConfig::new().init(&model);
/// let mut saver = checkpoint::Saver::new().with_keep_last(2);
/// for step in [100, 200, 300] {
///     // Training goes on while the file is written.
///     saver.save(folder.join(format!("step-{step}.bpk")), &model, &optim, &step)?;
/// }
/// saver.wait()?;
/// let latest = checkpoint::latest(folder.join("step-0.bpk"))?;
/// assert_eq!(latest, Some(folder.join("step-300.bpk")));
/// assert!(!folder.join("step-100.bpk").exists());
/// # Ok::<(), distmuon::Error>(())
/// ```
#[derive(Debug)]
pub struct Saver {
    when_busy: WhenBusy,
    keep_last: Option<usize>,
    /// Bytes that may wait for the writer.
    host_bytes: usize,
    /// `true` if every rank writes a file.
    in_parts: bool,
    /// The longest time without a change in the parts of a save.
    patience: Duration,
    is_immediate: bool,
    running: Option<Running>,
}

/// The thread of the last save.
#[derive(Debug)]
struct Running {
    thread: JoinHandle<Result<()>>,
    patience: Patience,
}

impl Default for Saver {
    fn default() -> Self {
        Self::new()
    }
}

impl Saver {
    /// Makes a saver that waits for an earlier save, keeps all files, and does not limit the memory
    /// of the host.
    pub fn new() -> Self {
        Self {
            when_busy: WhenBusy::default(),
            keep_last: None,
            host_bytes: usize::MAX,
            in_parts: false,
            patience: PATIENCE,
            is_immediate: false,
            running: None,
        }
    }

    /// A saver whose saves have ended when they return.
    pub(crate) fn immediate() -> Self {
        let mut saver = Self::new().with_host_mb(0);
        saver.is_immediate = true;
        saver
    }

    /// Saves to folders, to which all ranks write at the same time: each a file of its own in the
    /// folder at the path, and then rank 0 an index of them. The hosts have to share the folder.
    /// Every function that loads a file loads a folder as well, on any number of ranks.
    ///
    /// An interrupted save leaves the previous checkpoint in the folder.
    pub fn with_parts(mut self) -> Self {
        self.in_parts = true;
        self
    }

    /// Sets the time for which rank 0 waits for the [parts](Self::with_parts) of other ranks while
    /// none of them grows: ten minutes by default. A saver that is dropped waits for one minute at
    /// most, as does one of a world in which a rank has failed.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets what a save does while an earlier one still runs.
    pub fn with_when_busy(mut self, when_busy: WhenBusy) -> Self {
        self.when_busy = when_busy;
        self
    }

    /// Keeps the last `count` files or [folders of parts](Self::with_parts), at least one. A save
    /// that has succeeded removes the other checkpoints beside it, whose names differ from its own
    /// only in the last number, which has to be smaller. Names without a number are refused. The
    /// user's files in a folder stay.
    pub fn with_keep_last(mut self, count: usize) -> Self {
        self.keep_last = Some(count.max(1));
        self
    }

    /// Limits the memory of the host that copies take, in megabytes (10^6 bytes). A save then
    /// returns only once all but the last `megabytes` are written. One tensor may exceed the limit.
    pub fn with_host_mb(mut self, megabytes: usize) -> Self {
        self.host_bytes = megabytes * 1_000_000;
        self
    }

    /// Saves model, optimizer and progress of a run as [`checkpoint::save`](super::save), and
    /// returns once they are copied, or on Flex at once. On many ranks all of them make this call,
    /// and rank 0 writes, or [all of them](Self::with_parts).
    ///
    /// # Errors
    ///
    /// As [`checkpoint::save`](super::save). If the save before has failed, its error, and nothing
    /// is saved. [`Error::Usage`] if an earlier save still runs and is not [waited
    /// for](WhenBusy::Refuse), for an empty path, or for a name without a number whose [last files
    /// are to be kept](Self::with_keep_last).
    pub fn save<M: Module, T: Serialize>(
        &mut self,
        path: impl AsRef<Path>,
        model: &M,
        optim: &impl Checkpointed,
        progress: &T,
    ) -> Result<()> {
        optim.save_run(self, path.as_ref(), model, progress)
    }

    /// Returns `true` while this rank writes a file.
    ///
    /// ```
    /// let saver = distmuon::checkpoint::Saver::new();
    /// assert!(!saver.is_saving()); // no save yet
    /// ```
    pub fn is_saving(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.thread.is_finished())
    }

    /// Waits until the file of the last save is complete; with [parts](Self::with_parts), until
    /// this rank's file is, and on rank 0 the whole folder. Does nothing on a rank that does not
    /// write.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if it can't be written: a previous file at the path is then unchanged.
    pub fn wait(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        running.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Fails if a save to a path can't begin: on a rank that writes, for all ranks.
    pub(crate) fn prepare(&mut self, path: &Path) -> Result<()> {
        if path.as_os_str().is_empty() {
            return Err(Error::usage(
                "the path of the checkpoint is empty",
                "a file, or a folder for parts",
                "\"\"",
                "pass a name, such as `step-300.bpk`",
            ));
        }
        if self.keep_last.is_some() {
            // Before anything is written: files whose names have no number would never be removed.
            Numbered::of(path)?;
        }
        if self.is_saving() && self.when_busy == WhenBusy::Refuse {
            return Err(Error::usage(
                "the save is refused",
                "no earlier save that still runs",
                "one",
                "call `Saver::wait`, save less often, or choose `WhenBusy::Wait`",
            ));
        }
        // Also returns the error of the earlier save, which nothing else would report before the
        // end.
        self.wait()?;
        if self.in_parts {
            // By every rank, since any of them may come first.
            let created = fs::create_dir_all(path);
            created.map_err(|error| failed(path, &format!("cannot create the folder: {error}")))?;
            parts::ensure_ours(path)?;
        }
        Ok(())
    }

    /// Waits for the end of a save that has failed on a rank, and drops its error, which all ranks
    /// have got.
    pub(crate) fn abandon(&mut self) {
        self.hurry();
        self.wait().ok();
    }

    /// Shortens the patience of the running save: perhaps another rank has failed, and its part
    /// will not come.
    fn hurry(&self) {
        self.running.iter().for_each(|running| running.patience.shorten(GRACE));
    }

    /// The elements that may wait for the writer, of a model and of states, which may be on the
    /// host.
    pub(crate) fn waiting(&self, entries: &[Entry], are_states_on_host: bool) -> Waiting {
        let are_on_host = are_states_on_host && entries.iter().all(|entry| entry.is_on_host);
        // Under a limit, copies are counted. Nobody counts the copies that training makes.
        match self.host_bytes == usize::MAX && are_on_host {
            true => Waiting::Tensors,
            false => Waiting::Copies(self.host_bytes),
        }
    }

    /// Returns `true` if every rank writes a file.
    pub(crate) fn is_in_parts(&self) -> bool {
        self.in_parts
    }

    /// A number for the next save to a path, which no save to the same folder has had.
    pub(crate) fn number(&self, path: &Path) -> u64 {
        if self.in_parts { parts::next_save(path) } else { 0 }
    }

    /// The file of a rank, which writes, in the save of this number.
    pub(crate) fn target(&self, path: &Path, save: u64, ranks: [usize; 2]) -> Target {
        let part = self.in_parts.then(|| Part::new(path, save, ranks));
        Target { path: path.to_owned(), part }
    }

    /// Completes a file whose tensors have all been put, or fails with the error of one of them.
    pub(crate) fn finish(&mut self, target: Target, saving: Result<Saving>) -> Result<()> {
        let saving = saving.inspect_err(|error| target.give_up(error))?;
        self.finish_later(target, || Ok(saving))
    }

    /// [`finish`](Self::finish) of a file whose tensors the thread puts.
    pub(crate) fn finish_later(
        &mut self,
        target: Target,
        put: impl FnOnce() -> Result<Saving> + Send + 'static,
    ) -> Result<()> {
        let (keep_last, patience) = (self.keep_last, Patience::new(self.patience));
        let (to, waits) = (target.clone(), patience.clone());
        let finish = move || {
            put().and_then(Saving::finish).inspect_err(|error| to.give_up(error))?;
            // Rank 0 alone completes the folder, and removes older ones.
            if to.part.as_ref().is_some_and(|part| !part.is_first()) {
                return Ok(());
            }
            to.part.iter().try_for_each(|part| part.complete(&waits))?;
            // After the new file is complete, so that there are never fewer.
            keep_last.map_or(Ok(()), |count| remove_older(&to.path, count))
        };
        if self.is_immediate {
            return finish();
        }
        let thread = thread::Builder::new().name("save".to_owned()).spawn(finish);
        let thread = thread
            .map_err(|error| failed(&target.path, &format!("cannot start a thread: {error}")))
            .inspect_err(|error| target.give_up(error))?;
        self.running = Some(Running { thread, patience });
        Ok(())
    }
}

/// The longest time without a change in the parts of a save, by default.
const PATIENCE: Duration = Duration::from_secs(600);
/// The same once a rank may have failed. A part does not grow while its file is synced.
const GRACE: Duration = Duration::from_secs(60);

/// The checkpoint at a path, and this rank's part of it if it has parts.
#[derive(Clone)]
pub struct Target {
    path: PathBuf,
    part: Option<Part>,
}

impl Target {
    /// The file that this rank writes.
    pub fn file(&self) -> PathBuf {
        self.part.as_ref().map_or_else(|| self.path.clone(), Part::path)
    }

    /// Tells the rank that waits for all parts that this one will not come.
    fn give_up(&self, error: &Error) {
        self.part.iter().for_each(|part| part.give_up(error));
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let is_panicking = thread::panicking();
        self.hurry();
        let Some(running) = self.running.take() else { return };
        match running.thread.join() {
            // During a panic, its message is the one to be seen.
            _ if is_panicking => {}
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::error!("the last checkpoint was not saved: {error}"),
            Err(panic) => log::error!(
                "the last checkpoint was not saved: its thread panicked: {}",
                message(&*panic)
            ),
        }
    }
}

/// Returns the checkpoint of the highest number in the folder of a path, or `None` if there is
/// none: among files and complete [folders of parts](Saver::with_parts) whose names differ from the
/// path's only in their last number. The path's own file need not exist.
///
/// # Errors
///
/// [`Error::Usage`] for a name without a number; [`Error::Checkpoint`] if the folder can't be read.
/// A folder that does not exist has no files.
pub fn latest(path: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    let (path, numbered) = (path.as_ref(), Numbered::of(path.as_ref())?);
    Ok(numbered.siblings(path)?.pop_last().map(|(_, file)| file))
}

/// Removes the checkpoints with a smaller number than a path's, except for the last ones.
fn remove_older(path: &Path, keep: usize) -> Result<()> {
    let numbered = Numbered::of(path)?;
    let older: Vec<_> = numbered.siblings(path)?.range(..=numbered.number).map(file).collect();
    // A folder was looked into already.
    let is_ours = |path: &&PathBuf| path.is_dir() || Seal::is_of(path);
    for path in older.iter().rev().filter(is_ours).skip(keep) {
        let removed = if path.is_dir() { parts::remove(path) } else { fs::remove_file(path) };
        removed.map_err(|error| failed(path, &error.to_string()))?;
    }
    Ok(())
}

fn file((_, file): (&u64, &PathBuf)) -> PathBuf {
    file.clone()
}

/// A file name around its last number.
struct Numbered<'a> {
    before: &'a str,
    number: u64,
    after: &'a str,
}

impl<'a> Numbered<'a> {
    /// Splits the name of a path.
    fn of(path: &'a Path) -> Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        Self::split(name).ok_or_else(|| {
            Error::usage(
                "the name of the checkpoint has no number",
                "a number, such as `step-300.bpk`, by which files are ordered",
                format!("{path:?}"),
                "add the step to the name",
            )
        })
    }

    fn split(name: &'a str) -> Option<Self> {
        let end = name.rfind(|c: char| c.is_ascii_digit())? + 1;
        let start = name[..end].trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let number = name[start..end].parse().ok()?;
        Some(Self { before: &name[..start], number, after: &name[end..] })
    }

    /// The files of a path's folder with the same name but for the number, by that number.
    fn siblings(&self, path: &Path) -> Result<BTreeMap<u64, PathBuf>> {
        let folder = match path.parent() {
            // The parent of a bare name is empty, and stands for the current folder.
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(BTreeMap::new());
            }
            entries => entries.map_err(|error| failed(folder, &error.to_string()))?,
        };
        let mut siblings = BTreeMap::new();
        for entry in entries {
            let name = entry.map_err(|error| failed(folder, &error.to_string()))?.file_name();
            let Some(found) = name.to_str().and_then(Numbered::split) else { continue };
            let is_alike = (found.before, found.after) == (self.before, self.after);
            let path = path.with_file_name(&name);
            // A folder without the index of a checkpoint is not complete, or another's.
            if is_alike && (!path.is_dir() || parts::is_checkpoint(&path)) {
                siblings.insert(found.number, path);
            }
        }
        Ok(siblings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_their_last_number() {
        for (name, parts) in [
            ("step-300.bpk", Some(("step-", 300, ".bpk"))),
            ("run2-007", Some(("run2-", 7, ""))),
            ("12", Some(("", 12, ""))),
            ("run.bpk", None),
        ] {
            let split = Numbered::split(name);
            assert_eq!(split.map(|n| (n.before, n.number, n.after)), parts, "{name}");
        }
    }
}
