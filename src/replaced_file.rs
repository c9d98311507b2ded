//! Files that take the place of earlier ones as a whole, once they are complete.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use burn_pack::AtomicFile;

/// Creates a temporary file in the folder of a path's file, which `commit` gives its name. A
/// symbolic link stays: the file that it leads to is replaced.
pub(crate) fn create(path: &Path) -> io::Result<(AtomicFile, File)> {
    AtomicFile::create(&target(path)?).map_err(|error| io::Error::other(error.to_string()))
}

/// The file that a path leads to: of a symbolic link its target, which may not exist yet.
fn target(path: &Path) -> io::Result<PathBuf> {
    /// Links that Linux follows in one path.
    const MOST_LINKS: usize = 40;
    let mut target = path.to_owned();
    for _ in 0..MOST_LINKS {
        match target.symlink_metadata() {
            Ok(metadata) if metadata.is_symlink() => {
                let link = target.read_link()?;
                // A relative link starts at its folder.
                target = target.parent().unwrap_or(Path::new("")).join(link);
            }
            _ => return Ok(target),
        }
    }
    Err(io::Error::other("its symbolic links form a circle"))
}
