//! The index and the footer after the burnpack container, and the positions of its tensors.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use burn::tensor::DType;
use burn_pack::{Scalar, TENSOR_ALIGNMENT};
use serde::{Deserialize, Serialize};

/// The version of the layout, in the footer and in the metadata of the container.
pub const VERSION: u32 = 2;
/// Bytes of the footer: length of the index, version, checksum and [`MAGIC`].
const FOOTER: usize = 24;
/// The last bytes of every checkpoint.
const MAGIC: [u8; 8] = *b"distmuon";

/// The contents of a checkpoint except the elements of its tensors, with checksums of the whole
/// container.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Index {
    /// The part of the container before its first tensor.
    pub head: Head,
    /// The tensors in the order of the container.
    pub tensors: Vec<Section>,
    pub scalars: BTreeMap<String, Scalar>,
    pub metadata: BTreeMap<String, String>,
}

/// Length and checksum of the part of the container before its first tensor.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Head {
    pub bytes: u64,
    pub checksum: u32,
}

/// The end of a file, which tells it from any other checkpoint: its checksum covers the index, and
/// so the checksums of all tensors.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The length of the file.
    pub bytes: u64,
    /// The checksum in its footer.
    pub checksum: u32,
}

impl Seal {
    /// Returns `true` for a file that ends like a checkpoint.
    pub fn is_of(path: &Path) -> bool {
        File::open(path).is_ok_and(|mut file| matches!(Self::read(&mut file), Ok(Some(_))))
    }

    /// Reads the seal of a file. `None` if it does not end like a checkpoint.
    ///
    /// # Errors
    ///
    /// A text that names the part which can't be read.
    pub fn read(file: &mut File) -> Result<Option<Self>, String> {
        let bytes = file.seek(SeekFrom::End(0)).map_err(|error| unreadable("length", &error))?;
        let Some(footer) = bytes.checked_sub(FOOTER as u64) else { return Ok(None) };
        let footer = bytes_at(file, footer, FOOTER, "footer")?;
        let Some(checksum) = footer.strip_suffix(&MAGIC) else { return Ok(None) };
        let checksum = checksum.last_chunk().expect("the footer has a checksum");
        Ok(Some(Self { bytes, checksum: u32::from_le_bytes(*checksum) }))
    }
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes with checksum {:08x}", self.bytes, self.checksum)
    }
}

/// A tensor in the container.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Section {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Identity of the tensor's parameter.
    pub id: Option<u64>,
    pub bytes: u64,
    /// CRC-32 of the tensor's bytes and of the zeros between them and the next tensor.
    pub checksum: u32,
    /// The place of the elements in a larger tensor, if the file has only some of its elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excerpt: Option<Excerpt>,
}

/// The place of elements in a tensor, of which other files of the folder have the other elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Excerpt {
    /// The shape of the whole tensor.
    pub whole: Vec<usize>,
    /// The ranges of the whole, flat, in the order of the file.
    pub ranges: Vec<Range<usize>>,
}

impl Excerpt {
    /// Returns `true` if the ranges lie in the whole, and a section has as many elements and bytes.
    fn fits(&self, section: &Section) -> bool {
        // Elements of less than a byte, as of quantized tensors, are never in excerpts.
        if section.dtype.size() == 0 {
            return false;
        }
        let Some(whole) = elements(&self.whole) else { return false };
        let held = self.ranges.iter().try_fold(0_usize, |held, range| {
            let is_inside = range.start <= range.end && range.end <= whole;
            is_inside.then(|| held.checked_add(range.len())).flatten()
        });
        let bytes = held.and_then(|held| held.checked_mul(section.dtype.size()));
        held == elements(&section.shape) && bytes.is_some_and(|bytes| bytes as u64 == section.bytes)
    }
}

/// The number of elements of a shape. `None` if it exceeds 64 bits.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))
}

impl Index {
    /// The range of every tensor in the file, including the zeros after the tensor. Together with
    /// the head, the ranges cover the container without a gap. `None` if an end exceeds 64 bits.
    pub fn spans(&self) -> Option<Vec<Range<u64>>> {
        let mut spans: Vec<Range<u64>> = Vec::with_capacity(self.tensors.len());
        let mut end = self.head.bytes;
        for section in &self.tensors {
            // Checked, since the numbers come from a file that may be damaged.
            let start = end.checked_next_multiple_of(TENSOR_ALIGNMENT)?;
            if let Some(last) = spans.last_mut() {
                // The checksum of a tensor covers the zeros behind it, so that every byte is
                // covered.
                last.end = start;
            }
            end = start.checked_add(section.bytes)?;
            spans.push(start..end);
        }
        Some(spans)
    }

    /// The bytes after the container: the index and the footer.
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.extend((bytes.len() as u64).to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        // Over the index, its length and the version. The magic number comes last, where a file
        // that is cut off lacks it.
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes.extend(MAGIC);
        Ok(bytes)
    }

    /// Reads the index of a file, and returns it with its bytes. `None` if the file does not end
    /// like a checkpoint.
    ///
    /// # Errors
    ///
    /// A text that names the damaged part.
    pub fn read(file: &mut File) -> Result<Option<(Self, Vec<u8>)>, String> {
        let length = file.seek(SeekFrom::End(0)).map_err(|error| unreadable("length", &error))?;
        let Some(index_end) = length.checked_sub(FOOTER as u64) else { return Ok(None) };
        let footer = bytes_at(file, index_end, FOOTER, "footer")?;
        let (numbers, magic) = footer.split_at(FOOTER - MAGIC.len());
        // Another file, perhaps of version 1, or one that was cut off.
        if magic != MAGIC {
            return Ok(None);
        }
        let (size_and_version, checksum) = numbers.split_at(12);
        let (size, version) = size_and_version.split_at(8);
        let size = u64::from_le_bytes(size.try_into().expect("the slice has eight bytes"));
        let Some(start) = index_end.checked_sub(size) else {
            return Err(format!(
                "its footer is damaged: expected an index of at most {index_end} bytes, got {size}"
            ));
        };
        let bytes = bytes_at(file, start, size as usize, "index")?;
        let mut actual = crc32fast::Hasher::new();
        actual.update(&bytes);
        actual.update(size_and_version);
        let expected = u32::from_le_bytes(checksum.try_into().expect("the slice has four bytes"));
        // Before the version is looked at, which may be what is damaged.
        verify("its index or footer", expected, actual.finalize())?;
        let version = u32::from_le_bytes(version.try_into().expect("the slice has four bytes"));
        if version != VERSION {
            return Err(format!("its version is unknown: expected {VERSION}, got {version}"));
        }
        let index: Self = serde_json::from_slice(&bytes)
            .map_err(|error| format!("its index can't be parsed: {error}"))?;
        index.check(start)?;
        Ok(Some((index, bytes)))
    }

    /// Fails if the length of the container is not as in the index.
    fn check(&self, container: u64) -> Result<(), String> {
        // Checked here: whoever reads the tensor multiplies the sizes without a check.
        let overflows = |section: &&Section| elements(&section.shape).is_none();
        if let Some(section) = self.tensors.iter().find(overflows) {
            return Err(format!(
                "tensor `{}` has too many elements: shape {:?}",
                section.name, section.shape
            ));
        }
        let misfits = |section: &&Section| {
            section.excerpt.as_ref().is_some_and(|excerpt| !excerpt.fits(section))
        };
        if let Some(section) = self.tensors.iter().find(misfits) {
            return Err(format!("tensor `{}` does not fit the whole that it is of", section.name));
        }
        let spans = self.spans();
        let end = spans.map(|spans| spans.last().map_or(self.head.bytes, |span| span.end));
        if end == Some(container) {
            return Ok(());
        }
        Err(format!("its container has another length: expected {end:?} bytes, got {container}"))
    }
}

/// Reads `count` bytes of a file.
///
/// # Errors
///
/// A text that names `part`.
pub fn bytes_at(file: &mut File, start: u64, count: usize, part: &str) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; count];
    read_at(file, start, &mut bytes, part).map(|()| bytes)
}

/// Reads the bytes of a file from `start` on into `bytes`.
///
/// # Errors
///
/// A text that names `part`.
pub fn read_at(file: &mut File, start: u64, bytes: &mut [u8], part: &str) -> Result<(), String> {
    let read = file.seek(SeekFrom::Start(start)).and_then(|_| file.read_exact(bytes));
    read.map_err(|error| unreadable(part, &error))
}

/// The CRC-32 of a range of a file, which is read block by block.
///
/// # Errors
///
/// A text that names `part`.
pub fn checksum_of(file: &mut File, range: Range<u64>, part: &str) -> Result<u32, String> {
    // A tensor may be larger than the memory that is left.
    const BLOCK: u64 = 1 << 20;
    let mut checksum = crc32fast::Hasher::new();
    let mut position = range.start;
    while position < range.end {
        let count = BLOCK.min(range.end - position);
        checksum.update(&bytes_at(file, position, count as usize, part)?);
        position += count;
    }
    Ok(checksum.finalize())
}

/// Fails if two checksums differ.
///
/// # Errors
///
/// A text that names `part`.
pub fn verify(part: &str, expected: u32, actual: u32) -> Result<(), String> {
    if expected == actual {
        return Ok(());
    }
    Err(format!("{part} is damaged: expected checksum {expected:08x}, got {actual:08x}"))
}

fn unreadable(part: &str, error: &std::io::Error) -> String {
    format!("cannot read its {part}: {error}")
}
