//! Tokenised text in shards: memory-mapped files of 16-bit tokens, which are read in order.
//!
//! A file of the speed runs of GPT-2 begins with a header of 256 little-endian `i32`, of which the
//! first three are 20240520, the version 1 and the number of tokens. The tokens follow as
//! little-endian `u16` (`_load_data_shard` of <https://github.com/KellerJordan/modded-nanogpt>,
//! `train_gpt.py`). A file of nanoGPT has tokens alone (`data/openwebtext/prepare.py` of
//! <https://github.com/karpathy/nanoGPT>).

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use memmap2::Mmap;
use serde::{Deserialize, Serialize};

/// The first two numbers of a header.
const MAGIC: i32 = 20_240_520;
const VERSION: i32 = 1;
/// Bytes of a header.
const HEADER: usize = 256 * size_of::<i32>();
/// Bytes of a token.
const TOKEN: usize = size_of::<u16>();
/// The part of the tokens that is for validation, where no file is: one in this many, the last
/// ones.
const VALIDATION_PART: usize = 20;
/// Bytes at both ends of a file that its fingerprint is made of.
const ENDS: usize = 1 << 16;

/// A format of files of tokens.
#[derive(ValueEnum, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// A header, and tokens.
    #[default]
    ModdedNanogpt,
    /// Tokens alone, as prepare.py of nanoGPT writes them.
    Nanogpt,
}

impl Format {
    /// Bytes before the tokens.
    fn header(self) -> usize {
        match self {
            Self::ModdedNanogpt => HEADER,
            Self::Nanogpt => 0,
        }
    }
}

/// A file of tokens.
struct Shard {
    path: PathBuf,
    bytes: Mmap,
    /// The index of its first token among those of all files.
    first: usize,
}

/// The tokens of some files, one after the other: first those for training, then those for
/// validation.
pub struct Shards {
    shards: Vec<Shard>,
    format: Format,
    training: usize,
    all: usize,
}

impl Shards {
    /// Selects the shards among files. `None` if the files are text.
    ///
    /// Files that all have the names of shards are shards. nanoGPT's folders also have the text and
    /// the program that wrote the tokens.
    pub fn among(files: &[PathBuf], format: Format) -> Option<Vec<PathBuf>> {
        let is_shard =
            |file: &&PathBuf| file.extension().is_some_and(|extension| extension == "bin");
        let shards: Vec<_> = files.iter().filter(is_shard).cloned().collect();
        (shards.len() == files.len() || format == Format::Nanogpt).then_some(shards)
    }

    /// Maps files. Those with `val` in their names are for validation; without one, the last
    /// twentieth of all tokens is.
    pub fn open(mut files: Vec<PathBuf>, format: Format) -> Result<Self> {
        ensure!(
            !files.is_empty(),
            "--data-format nanogpt: --data has no tokens: expected files .bin, got none; write \
             them with nanoGPT's prepare.py, or leave --data-format out for text"
        );
        let validates = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains("val"))
        };
        files.sort_by_key(|path| (validates(path), path.clone()));
        let named = files.iter().filter(|path| validates(path)).count();
        let count = files.len();
        let (mut shards, mut first, mut training) = (vec![], 0, 0);
        for (index, path) in files.into_iter().enumerate() {
            let (bytes, tokens) = mapped(&path, format)?;
            shards.push(Shard { path, bytes, first });
            first += tokens;
            if index + named < count {
                training = first;
            }
        }
        if named == 0 {
            training = first - first / VALIDATION_PART;
        }
        Ok(Self { shards, format, training, all: first })
    }

    /// The number of all tokens.
    pub fn len(&self) -> usize {
        self.all
    }

    /// The tokens for training, or for validation.
    pub fn range(&self, is_training: bool) -> Range<usize> {
        if is_training { 0..self.training } else { self.training..self.all }
    }

    /// The first tokens of the sequences of a batch, the `index`-th in order. After the last whole
    /// batch, the first one follows.
    pub fn windows(
        &self,
        is_training: bool,
        index: u64,
        batch: usize,
        context: usize,
    ) -> Vec<usize> {
        let range = self.range(is_training);
        // A target follows the last token.
        let batches = (range.len() - 1) / (batch * context);
        let first = range.start + (index % batches as u64) as usize * batch * context;
        (0..batch).map(|sequence| first + sequence * context).collect()
    }

    /// A token by its index among all.
    pub fn token(&self, index: usize) -> u16 {
        let (shard, at) = self.place(index);
        u16::from_le_bytes([shard.bytes[at], shard.bytes[at + 1]])
    }

    /// The file and the byte of a token.
    pub fn position(&self, index: usize) -> (&Path, usize) {
        let (shard, at) = self.place(index);
        (&shard.path, at)
    }

    fn place(&self, index: usize) -> (&Shard, usize) {
        let after = self.shards.partition_point(|shard| shard.first <= index);
        let shard = &self.shards[after - 1];
        (shard, self.format.header() + (index - shard.first) * TOKEN)
    }

    /// A number that tells apart other files, from their lengths and their ends: all of them may be
    /// terabytes.
    pub fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for Shard { bytes, .. } in &self.shards {
            let end = bytes.len().min(ENDS);
            (bytes.len(), &bytes[..end], &bytes[bytes.len() - end..]).hash(&mut hasher);
        }
        hasher.finish()
    }
}

/// A file in memory, and the number of its tokens.
fn mapped(path: &Path, format: Format) -> Result<(Mmap, usize)> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("--data {name}: unreadable"))?;
    // SAFETY: a file that another process changes meanwhile gives other tokens, which are checked
    // when they are used; one that is cut ends the process.
    let bytes = unsafe { Mmap::map(&file) }.with_context(|| format!("can't map {name}"))?;
    let tokens = match format {
        Format::ModdedNanogpt => tokens_by_header(path, &bytes)?,
        Format::Nanogpt => tokens_alone(path, &bytes)?,
    };
    Ok((bytes, tokens))
}

/// A number of a header.
fn number(bytes: &[u8], index: usize) -> i32 {
    let at = index * size_of::<i32>();
    i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The number of tokens behind a header that fits them.
fn tokens_by_header(path: &Path, bytes: &[u8]) -> Result<usize> {
    let name = path.display();
    let remedy = "write it with the tools of modded-nanogpt, give --data-format nanogpt if it has \
                  tokens alone, or give text";
    ensure!(
        bytes.len() >= HEADER,
        "--data {name}: it is too short for a shard: expected a header of {HEADER} bytes, got {}; \
         {remedy}",
        bytes.len()
    );
    let [magic, version, tokens] = [0, 1, 2].map(|index| number(bytes, index));
    ensure!(
        (magic, version) == (MAGIC, VERSION),
        "--data {name}: it does not have the header of a shard: expected {MAGIC} and version \
         {VERSION}, got {magic} and {version}; {remedy}"
    );
    let expected = bytes.len() - HEADER;
    ensure!(
        usize::try_from(tokens).is_ok_and(|tokens| tokens * TOKEN == expected),
        "--data {name}: its header does not fit it: expected {} tokens in {} bytes, got {tokens}; \
         write it anew",
        expected / TOKEN,
        bytes.len()
    );
    Ok(expected / TOKEN)
}

/// The number of tokens of a file without a header.
fn tokens_alone(path: &Path, bytes: &[u8]) -> Result<usize> {
    let name = path.display();
    // As tokens, the header would be trained on: the first of them is none of GPT-2's vocabulary,
    // which other vocabularies may have.
    let has_header = bytes.len() >= HEADER && number(bytes, 0) == MAGIC;
    ensure!(
        !has_header,
        "--data {name}: it has the header of a shard: expected tokens alone, got {MAGIC} and \
         version {}; leave --data-format nanogpt out",
        number(bytes, 1)
    );
    ensure!(
        bytes.len().is_multiple_of(TOKEN),
        "--data {name}: its last token is cut: expected an even number of bytes, of 16-bit tokens, \
         got {}; write it anew with nanoGPT's prepare.py, or leave --data-format nanogpt out",
        bytes.len()
    );
    Ok(bytes.len() / TOKEN)
}
