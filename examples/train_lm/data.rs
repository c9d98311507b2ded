//! Real text as memory-mapped tokens, from a file or folder, or from the sources of crates that
//! every build of this repository downloads.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{Device, Int, Tensor, TensorData};
use memmap2::Mmap;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde::Deserialize;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder, TokenizerImpl};
use walkdir::WalkDir;

use super::shards::{Format, Shards};

/// Crates whose sources are the default text. The lock file names their versions and every build
/// unpacks them, so one lock file gives one text.
const DEFAULT_CRATES: [&str; 10] = [
    "burn-autodiff",
    "burn-backend",
    "burn-core",
    "burn-flex",
    "burn-nn",
    "burn-optim",
    "burn-std",
    "burn-tensor",
    "clap_builder",
    "rayon",
];

/// Largest size of a text in bytes; the rest of larger ones is left out.
const MAX_BYTES: usize = 64 << 20;

/// Size of the text that a BPE vocabulary is trained on, in bytes.
const BPE_BYTES: usize = 4 << 20;

/// Tokens of a block.
const BLOCK: usize = 1 << 13;

/// One in this many blocks is for validation, the others are for training.
const VALIDATION_EVERY: usize = 20;

type Bpe = TokenizerImpl<BPE, tokenizers::NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>;

/// Converts text to tokens and back.
pub enum Tokenizer {
    Bytes,
    Bpe(Box<Bpe>),
    /// The text was tokenised elsewhere.
    Elsewhere {
        vocabulary: usize,
    },
}

impl Tokenizer {
    fn new(vocabulary: Option<usize>, text: &[u8]) -> Result<Self> {
        let Some(size) = vocabulary else {
            return Ok(Self::Bytes);
        };
        ensure!(
            (257..=65_536).contains(&size),
            "--bpe {size}: a vocabulary has 257 to 65536 tokens, since each is stored in two bytes"
        );
        let mut trainer = BpeTrainer::builder()
            .vocab_size(size)
            .show_progress(false)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(Vec::<AddedToken>::new())
            .build();
        let mut bpe: Bpe = TokenizerBuilder::new()
            .with_model(BPE::default())
            .with_pre_tokenizer(Some(ByteLevel::new(false, true, true)))
            .with_post_processor(Some(ByteLevel::default()))
            .with_decoder(Some(ByteLevel::default()))
            .build()
            .map_err(anyhow::Error::msg)?;
        let sample = String::from_utf8_lossy(&text[..text.len().min(BPE_BYTES)]);
        bpe.train(&mut trainer, sample.lines()).map_err(anyhow::Error::msg)?;
        Ok(Self::Bpe(Box::new(bpe)))
    }

    pub fn encode(&self, text: &[u8]) -> Result<Vec<u16>> {
        match self {
            Self::Bytes => Ok(text.iter().map(|byte| u16::from(*byte)).collect()),
            Self::Bpe(bpe) => {
                let text = String::from_utf8_lossy(text);
                let encoding = bpe.encode_fast(text.as_ref(), false).map_err(anyhow::Error::msg)?;
                Ok(encoding.get_ids().iter().map(|id| *id as u16).collect())
            }
            Self::Elsewhere { .. } => Ok(vec![0]),
        }
    }

    pub fn decode(&self, tokens: &[u16]) -> Result<String> {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = tokens.iter().map(|token| *token as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::Bpe(bpe) => {
                let ids: Vec<u32> = tokens.iter().map(|token| u32::from(*token)).collect();
                bpe.decode(&ids, false).map_err(anyhow::Error::msg)
            }
            Self::Elsewhere { .. } => {
                let ids: Vec<String> = tokens.iter().map(u16::to_string).collect();
                Ok(ids.join(" "))
            }
        }
    }

    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => 256,
            Self::Bpe(bpe) => bpe.get_vocab_size(true),
            Self::Elsewhere { vocabulary } => *vocabulary,
        }
    }
}

/// A tokenised text, split into training and validation blocks.
pub struct Corpus {
    pub tokenizer: Tokenizer,
    /// Hash of the tokens.
    pub fingerprint: u64,
    tokens: Tokens,
}

enum Tokens {
    /// Little-endian `u16`s in a file without a name.
    Text(Mmap),
    Shards(Shards),
}

/// A batch of a split.
#[derive(Clone, Copy)]
pub struct Draw {
    pub split: Split,
    /// The number of the batch, in the order in which shards are read.
    pub index: u64,
    /// The seed of the windows that are drawn from a text.
    pub seed: u64,
    /// Sequences of the batch.
    pub batch: usize,
    /// Tokens of a sequence.
    pub context: usize,
}

/// The blocks that a batch is drawn from.
#[derive(Clone, Copy, PartialEq)]
pub enum Split {
    Train,
    Validation,
}

impl Corpus {
    /// Maps shards at `data`, whose tokens are below `of_shards`, or reads and tokenises the text
    /// there, or the default text.
    pub fn load(
        data: Option<&Path>,
        format: Format,
        vocabulary: Option<usize>,
        of_shards: usize,
    ) -> Result<Self> {
        let files = match data {
            Some(path) => files(path)?,
            None => default_files()?,
        };
        if let Some(files) = Shards::among(&files, format) {
            ensure!(
                vocabulary.is_none(),
                "--bpe is for text, and shards have tokens; leave it out"
            );
            let count = files.len();
            let shards = Shards::open(files, format)?;
            tracing::info!("shards: {count} files, {} tokens", shards.len());
            let tokenizer = Tokenizer::Elsewhere { vocabulary: of_shards };
            let fingerprint = shards.fingerprint();
            return Ok(Self { tokenizer, fingerprint, tokens: Tokens::Shards(shards) });
        }
        let text = read(&files)?;
        let tokenizer = Tokenizer::new(vocabulary, &text)?;
        let file = tempfile::tempfile().context("can't make a temporary file for the tokens")?;
        let mut writer = BufWriter::new(&file);
        let mut count = 0;
        for piece in pieces(&text) {
            let tokens = tokenizer.encode(piece)?;
            count += tokens.len();
            for token in tokens {
                writer.write_all(&token.to_le_bytes()).context("can't write the tokens")?;
            }
        }
        writer.flush().context("can't write the tokens")?;
        drop(writer);
        ensure!(
            count >= BLOCK * VALIDATION_EVERY,
            "--data {}: {count} tokens are too few; give a text of at least {}",
            data.unwrap_or(Path::new("(default)")).display(),
            BLOCK * VALIDATION_EVERY
        );
        // SAFETY: the file has no name and no other handle, so no other process can change it.
        let tokens = unsafe { Mmap::map(&file) }.context("can't map the tokens")?;
        tracing::info!("text: {} files, {} bytes, {count} tokens", files.len(), text.len());
        let mut hasher = DefaultHasher::new();
        tokens.hash(&mut hasher);
        Ok(Self { tokenizer, fingerprint: hasher.finish(), tokens: Tokens::Text(tokens) })
    }

    /// Fails if the tokens are fewer than a batch.
    pub fn check(&self, batch: usize, context: usize) -> Result<()> {
        let Tokens::Shards(shards) = &self.tokens else {
            ensure!(
                context < BLOCK,
                "--context {context}: a text has blocks of {BLOCK} tokens; give fewer"
            );
            return Ok(());
        };
        for (is_training, name) in [(true, "training"), (false, "validation")] {
            let (got, expected) = (shards.range(is_training).len(), batch * context + 1);
            ensure!(
                got >= expected,
                "--data: the shards have fewer tokens for {name} than a batch: expected \
                 {expected}, got {got}; give more shards, or a smaller --batch or --context"
            );
        }
        Ok(())
    }

    /// The file and the byte at which a batch begins, of shards.
    pub fn position(&self, draw: &Draw) -> Option<(&Path, usize)> {
        match &self.tokens {
            Tokens::Text(_) => None,
            Tokens::Shards(shards) => Some(shards.position(self.windows(draw)[0])),
        }
    }

    /// Inputs and targets of some sequences of a batch, `[sequences, context]` each.
    pub fn batch(
        &self,
        draw: &Draw,
        sequences: Range<usize>,
        device: &Device,
    ) -> Result<[Tensor<2, Int>; 2]> {
        let (windows, context) = (self.windows(draw), draw.context);
        let tensor = |shift: usize| -> Result<Tensor<2, Int>> {
            let windows = windows[sequences.clone()].iter();
            let indices = windows.flat_map(|start| start + shift..start + shift + context);
            let values: Vec<i32> = indices.map(|index| self.token(index)).collect::<Result<_>>()?;
            let data = TensorData::new(values, [sequences.len(), context]);
            Ok(Tensor::from_data(data, device))
        };
        Ok([tensor(0)?, tensor(1)?])
    }

    /// The first tokens of the sequences of a batch.
    fn windows(&self, draw: &Draw) -> Vec<usize> {
        let Draw { split, index, seed, batch, context } = *draw;
        let tokens = match &self.tokens {
            Tokens::Shards(shards) => {
                return shards.windows(split == Split::Train, index, batch, context);
            }
            Tokens::Text(tokens) => tokens,
        };
        let mut rng = StdRng::seed_from_u64(seed);
        let blocks = tokens.len() / 2 / BLOCK;
        let validation = blocks / VALIDATION_EVERY;
        let mut window = |_| {
            let block = match split {
                Split::Validation => {
                    rng.random_range(0..validation) * VALIDATION_EVERY + VALIDATION_EVERY - 1
                }
                Split::Train => loop {
                    let block = rng.random_range(0..blocks);
                    if block % VALIDATION_EVERY != VALIDATION_EVERY - 1 {
                        break block;
                    }
                },
            };
            block * BLOCK + rng.random_range(0..BLOCK - context)
        };
        (0..batch).map(&mut window).collect()
    }

    fn token(&self, index: usize) -> Result<i32> {
        let shards = match &self.tokens {
            Tokens::Text(tokens) => {
                let token = u16::from_le_bytes([tokens[2 * index], tokens[2 * index + 1]]);
                return Ok(i32::from(token));
            }
            Tokens::Shards(shards) => shards,
        };
        let token = shards.token(index);
        let vocabulary = self.tokenizer.vocabulary();
        if usize::from(token) >= vocabulary {
            let (path, byte) = shards.position(index);
            bail!(
                "--data {}: the token at byte {byte} is not in the vocabulary: expected less than \
                 {vocabulary}, got {token}; give the size of the vocabulary with --vocabulary",
                path.display()
            );
        }
        Ok(i32::from(token))
    }
}

/// Splits the text into pieces of whole lines, small enough for the tokenizer.
fn pieces(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let minimum = rest.len().min(1 << 16);
        let newline = rest[minimum..].iter().position(|byte| *byte == b'\n');
        let end = newline.map_or(rest.len(), |newline| minimum + newline + 1);
        let (piece, after) = rest.split_at(end);
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Lists the file, or all files of the folder in the order of their paths.
pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
    ensure!(path.exists(), "--data {}: no such file or folder", path.display());
    let mut files = Vec::new();
    for entry in WalkDir::new(path).sort_by_file_name() {
        let entry = entry.with_context(|| format!("--data {}: unreadable", path.display()))?;
        if entry.path().is_file() {
            files.push(entry.into_path());
        }
    }
    ensure!(!files.is_empty(), "--data {}: the folder holds no file", path.display());
    Ok(files)
}

fn read(files: &[PathBuf]) -> Result<Vec<u8>> {
    let mut text = Vec::new();
    for file in files {
        let bytes = fs::read(file).with_context(|| format!("can't read {}", file.display()))?;
        text.extend(bytes);
        if text.len() >= MAX_BYTES {
            tracing::warn!("the text is cut at {} MiB", MAX_BYTES >> 20);
            text.truncate(MAX_BYTES);
            break;
        }
    }
    Ok(text)
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
}

/// Lists the Rust sources of [`DEFAULT_CRATES`] in cargo's registry.
fn default_files() -> Result<Vec<PathBuf>> {
    // The bench `gpu`, which includes this file, is in a folder of the workspace.
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().take(2);
    let mut locks = folders.map(|folder| folder.join("Cargo.lock"));
    let lock = locks.find(|lock| lock.exists()).unwrap_or_else(|| "Cargo.lock".into());
    let remedy = "give a text with --data FILE_OR_FOLDER";
    let text = fs::read_to_string(&lock)
        .with_context(|| format!("can't read {}; {remedy}", lock.display()))?;
    let lock: Lock =
        toml::from_str(&text).with_context(|| format!("the lock file is malformed; {remedy}"))?;
    let registry = home::cargo_home().context(remedy)?.join("registry/src");
    let mut all = Vec::new();
    for name in DEFAULT_CRATES {
        let Some(package) = lock.package.iter().find(|package| package.name == name) else {
            bail!("the lock file has no crate {name}; {remedy}")
        };
        let folder = format!("{name}-{}", package.version);
        let sources = fs::read_dir(&registry)
            .into_iter()
            .flatten()
            .flatten()
            .map(|index| index.path().join(&folder).join("src"))
            .find(|sources| sources.is_dir());
        let Some(sources) = sources else {
            bail!("no {folder} in {}; {remedy}, or run `cargo fetch`", registry.display())
        };
        all.extend(
            files(&sources)?.into_iter().filter(|file| file.extension() == Some("rs".as_ref())),
        );
    }
    Ok(all)
}
