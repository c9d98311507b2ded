//! Reading and writing safetensors files tensor by tensor.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType, TensorData};
use safetensors::tensor::{Dtype, Metadata, TensorInfo, View};

use crate::error::{Error, Result};
use crate::host;
use crate::replaced_file;

/// Bytes of the length in front of a header.
const LENGTH: u64 = 8;
/// The largest header of the format, in bytes (<https://github.com/huggingface/safetensors>).
const LARGEST_HEADER: u64 = 100_000_000;

/// A safetensors file that is being read.
pub struct Source {
    path: PathBuf,
    file: File,
    /// The position of the first tensor.
    start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl Source {
    /// Reads the header of a file.
    ///
    /// # Errors
    ///
    /// [`Error::Exchange`] if the file is missing, damaged or cut off.
    pub fn open(path: &Path) -> Result<Self> {
        let broken = |reason: String| broken(path, reason);
        let unreadable = |error: std::io::Error| broken(format!("cannot read it: {error}"));
        let mut file = File::open(path).map_err(unreadable)?;
        let size = file.metadata().map_err(unreadable)?.len();
        let mut length = [0; LENGTH as usize];
        file.read_exact(&mut length).map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        // Before memory is taken: of another kind of file, these eight bytes may be any number.
        if length > LARGEST_HEADER.min(size.saturating_sub(LENGTH)) {
            return Err(broken(format!(
                "it is no safetensors file, or damaged: expected a header within {size} bytes, got \
                 one of {length}"
            )));
        }
        let mut header = vec![0; length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| broken(format!("its header can't be read: {error}")))?;
        let start = LENGTH + length;
        let expected = start + metadata.data_len() as u64;
        // A file that is cut off would otherwise fail only when its last tensor is read.
        if expected != size {
            return Err(broken(format!(
                "it is cut off or damaged: expected {expected} bytes, got {size}"
            )));
        }
        let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, info.clone()));
        Ok(Self { path: path.to_owned(), file, start, tensors: tensors.collect() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| &*info.shape)
    }

    /// Reads a tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Exchange`] if it can't be read, or is of a type that Burn does not have.
    pub fn data(&mut self, name: &str) -> Result<TensorData> {
        let Some(info) = self.tensors.get(name) else {
            return Err(self.broken(format!("it has no tensor `{name}`")));
        };
        let Some(dtype) = of_file(info.dtype) else {
            return Err(Error::Exchange {
                path: self.path.clone(),
                reason: format!(
                    "tensor `{name}` has an unknown type: expected floats of 16 to 64 bits, \
                     integers or booleans, got {:?}",
                    info.dtype
                ),
                remedy: "convert the tensor before the file is written",
            });
        };
        let (start, end) = info.data_offsets;
        let shape = self.tensors[name].shape.clone();
        let mut bytes = host::zeros(end - start, dtype);
        let position = SeekFrom::Start(self.start + start as u64);
        let read = self.file.seek(position).and_then(|_| self.file.read_exact(&mut bytes));
        read.map_err(|error| self.broken(format!("cannot read tensor `{name}`: {error}")))?;
        TensorData::try_from_bytes(bytes, shape, dtype)
            .map_err(|error| self.broken(format!("tensor `{name}`: {error}")))
    }

    /// The error of a file with unusable contents.
    pub fn broken(&self, reason: String) -> Error {
        broken(&self.path, reason)
    }
}

fn broken(path: &Path, reason: String) -> Error {
    Error::Exchange { path: path.to_owned(), reason, remedy: "check the path, or write it again" }
}

/// A tensor that will be written.
pub struct Written<'a> {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Reads the elements, in the order of the file.
    pub data: Box<dyn Fn() -> Result<TensorData> + 'a>,
}

/// Writes a file, which replaces a previous one as a whole.
///
/// # Errors
///
/// [`Error::Exchange`] if it can't be written, or a tensor is of a type that the format does not
/// have; the errors of the tensors' data. A previous file is then unchanged.
pub fn write(path: &Path, tensors: &[Written<'_>]) -> Result<()> {
    let failed = |reason: String| Error::Exchange {
        path: path.to_owned(),
        reason,
        remedy: "check the folder and its free space; a previous file is unchanged",
    };
    let failure = RefCell::default();
    let mut views = vec![];
    for tensor in tensors {
        let Some(dtype) = to_file(tensor.dtype) else {
            return Err(Error::Exchange {
                path: path.to_owned(),
                reason: format!(
                    "`{}` can't be written: expected a type of safetensors, got {}",
                    tensor.name,
                    tensor.dtype.name()
                ),
                remedy: "convert the parameter before the checkpoint is saved",
            });
        };
        views.push((tensor.name.as_str(), Elements { tensor, dtype, failure: &failure }));
    }
    let (scratch, file) = replaced_file::create(path).map_err(|error| failed(error.to_string()))?;
    let permissions = file.metadata().map_err(|error| failed(error.to_string()))?.permissions();
    drop(file); // the writer opens the path itself
    // Loaders of PyTorch's ask for it.
    let format = [("format".to_owned(), "pt".to_owned())].into();
    let written = safetensors::serialize_to_file(views, Some(format), scratch.path());
    if let Some(error) = failure.take() {
        return Err(error);
    }
    written.map_err(|error| failed(error.to_string()))?;
    // The writer replaces the file by one that its owner alone can read.
    fs::set_permissions(scratch.path(), permissions).map_err(|error| failed(error.to_string()))?;
    // Only now does the file have its name: an error before leaves the previous one.
    scratch.commit().map_err(|error| failed(error.to_string()))
}

/// The elements of a tensor, which the format's writer asks for one tensor at a time.
struct Elements<'a> {
    tensor: &'a Written<'a>,
    dtype: Dtype,
    /// The first error, since the writer accepts none.
    failure: &'a RefCell<Option<Error>>,
}

impl View for Elements<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        // After an error the file is dropped, so its bytes do not matter.
        if self.failure.borrow().is_some() {
            return vec![].into();
        }
        match (self.tensor.data)() {
            Ok(data) => data.into_bytes().to_vec().into(),
            Err(error) => {
                *self.failure.borrow_mut() = Some(error);
                vec![].into()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * self.tensor.dtype.size()
    }
}

/// The type of a tensor in a file; `None` if the format has no such type.
fn to_file(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(BoolStore::Native | BoolStore::U8) => Dtype::BOOL,
        _ => return None,
    })
}

/// The type of a tensor from a file; `None` if Burn has no such type.
fn of_file(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// A tensor whose last two dimensions are swapped, of a matrix.
pub fn transposed(data: TensorData) -> TensorData {
    let dtype = data.dtype();
    let (bytes, shape, _) = data.into_parts();
    let [rows, columns] = shape.dims();
    let (size, mut swapped) = (dtype.size(), host::zeros(bytes.len(), dtype));
    let elements = (0..columns).flat_map(|column| (0..rows).map(move |row| [row, column]));
    for (to, [row, column]) in swapped.chunks_exact_mut(size).zip(elements) {
        let start = (row * columns + column) * size;
        to.copy_from_slice(&bytes[start..start + size]);
    }
    TensorData::from_bytes(swapped, [columns, rows], dtype)
}

/// The least and the largest integer of a type, as far as float64 has all integers up to them;
/// infinite for floats.
fn integers(dtype: DType) -> [f64; 2] {
    const MOST: f64 = (1u64 << f64::MANTISSA_DIGITS) as f64;
    let signed = |bits: i32| [-2f64.powi(bits - 1), 2f64.powi(bits - 1) - 1.0];
    let unsigned = |bits: i32| [0.0, 2f64.powi(bits) - 1.0];
    match dtype {
        DType::I64 => [-MOST, MOST],
        DType::I32 => signed(32),
        DType::I16 => signed(16),
        DType::I8 => signed(8),
        DType::U64 => [0.0, MOST],
        DType::U32 => unsigned(32),
        DType::U16 => unsigned(16),
        DType::U8 => unsigned(8),
        DType::Bool(_) => [0.0, 1.0],
        _ => [f64::NEG_INFINITY, f64::INFINITY],
    }
}

/// A tensor in another type; `None` if the type does not have its values.
pub fn converted(data: TensorData, dtype: DType) -> Option<TensorData> {
    if data.dtype() == dtype {
        return Some(data);
    }
    let original = data.dtype();
    // Burn's conversion panics for a value that an integer type does not have.
    let [low, high] = [original, dtype]
        .map(integers)
        .into_iter()
        .fold([f64::NEG_INFINITY, f64::INFINITY], |[low, high], [least, most]| {
            [low.max(least), high.min(most)]
        });
    if low.is_finite() && !data.iter::<f64>().all(|value| (low..=high).contains(&value)) {
        return None;
    }
    let converted = data.clone().convert_dtype(dtype);
    // Back again, the bits have to be the same: nothing was rounded or cut off.
    let is_exact = converted.clone().convert_dtype(original).as_bytes() == data.as_bytes();
    is_exact.then_some(converted)
}
