//! The bytes that the kernels of a step read and write, from the arguments of their launches.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, bail, ensure};

use crate::driver::Arguments;

/// Vectors of a buffer below which a kernel counts as one of flags, norms or numbers of the step.
const FEW: usize = 4096;

/// The work of the launches of one kind of kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    pub launches: usize,
    /// Elements of gradients, parameters or directions that they pass over: those of a model, if
    /// all launches together pass over it once.
    pub elements: usize,
    pub read: usize,
    pub written: usize,
}

/// A kind of kernel, in the order of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    GradientsAreFinite,
    Momentum,
    Normalize,
    Products,
    DirectionsAreFinite,
    Apply,
    AdamW,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GradientsAreFinite => "gradients are finite",
            Self::Momentum => "momentum",
            Self::Normalize => "division by the norm",
            Self::Products => "products",
            Self::DirectionsAreFinite => "directions are finite",
            Self::Apply => "new values",
            Self::AdamW => "AdamW",
        })
    }
}

/// The traffic of all kernels of a step by their kinds.
///
/// A product counts each of its matrices once, and a symmetric result as a whole: the least that it
/// has to move. Fails for a kernel of whole tensors that is not known here.
pub fn of_step(launches: &[Arguments]) -> anyhow::Result<BTreeMap<Kind, Traffic>> {
    let mut kinds = BTreeMap::<Kind, Traffic>::new();
    for launch in launches {
        let Some((kind, Traffic { launches, elements, read, written })) = of_launch(launch)? else {
            continue;
        };
        let sum = kinds.entry(kind).or_default();
        sum.launches += launches;
        sum.elements += elements;
        sum.read += read;
        sum.written += written;
    }
    Ok(kinds)
}

/// The kind of a launch and its traffic; `None` for one of few numbers.
fn of_launch(launch: &Arguments) -> anyhow::Result<Option<(Kind, Traffic)>> {
    let Arguments { kernel, grid, parameters } = launch;
    if kernel.starts_with("product") {
        return Ok(Some((Kind::Products, of_product(launch)?)));
    }
    if kernel == "plus_identity" {
        let rows = u32::from_ne_bytes(parameters[2][..].try_into()?) as usize;
        // In two bytes, of all matrices of the batch.
        let bytes = 2 * rows * rows * grid[1] as usize;
        let traffic = Traffic { launches: 1, elements: 0, read: bytes, written: bytes };
        return Ok(Some((Kind::Products, traffic)));
    }
    let (name, types) = kernel.split_once("_kernel").unwrap_or((kernel, ""));
    let lengths = lengths(launch)?;
    let bytes_of = |letter: &str| bytes_of(types, letter).with_context(|| kernel.clone());
    // Of the buffers at the beginning, one for every tensor of the launch.
    let tensors = |others: usize| lengths[..lengths.len() - others].iter().sum::<usize>();
    // Bytes of an element that are read, and bytes that are written.
    let (kind, vectors, [read, written]) = match name {
        "reject" => {
            let bytes = bytes_of("f")?;
            // Gradients are in float32, and directions in half precision.
            let kind =
                if bytes == 4 { Kind::GradientsAreFinite } else { Kind::DirectionsAreFinite };
            (kind, tensors(1), [bytes, 0])
        }
        "update_momentum" => {
            let (gradient, momentum) = (bytes_of("g")?, bytes_of("f")?);
            (Kind::Momentum, tensors(5), [gradient + momentum, 2 * momentum])
        }
        "normalize" => (Kind::Normalize, lengths[0], [bytes_of("f")?, bytes_of("o")?]),
        "apply" => {
            let (parameter, direction) = (bytes_of("f")?, bytes_of("u")?);
            (Kind::Apply, tensors(3), [parameter + direction, parameter])
        }
        "adamw" => {
            let (parameter, gradient, moment) = (bytes_of("f")?, bytes_of("g")?, bytes_of("m")?);
            // A parameter and a gradient each.
            (
                Kind::AdamW,
                tensors(6) / 2,
                [parameter + gradient + 2 * moment, parameter + 2 * moment],
            )
        }
        _ => {
            let largest = lengths.iter().max().copied().unwrap_or_default();
            ensure!(largest <= FEW, "{kernel} has {largest} vectors, and its bytes are unknown");
            return Ok(None);
        }
    };
    let size: usize = types
        .split_once("_n_")
        .and_then(|(_, rest)| rest.split('_').next()?.parse().ok())
        .with_context(|| format!("{kernel} has no length of vectors"))?;
    let elements = vectors * size;
    let traffic =
        Traffic { launches: 1, elements, read: elements * read, written: elements * written };
    Ok(Some((kind, traffic)))
}

/// The vectors of every buffer of a kernel of CubeCL without tensors of several dimensions: the
/// last numbers of its last parameter, of four bytes each and filled up to eight.
fn lengths(Arguments { kernel, parameters, .. }: &Arguments) -> anyhow::Result<Vec<usize>> {
    let Some((numbers, buffers)) = parameters.split_last() else { bail!("{kernel} is bare") };
    ensure!(buffers.iter().all(|buffer| buffer.len() == 8), "{kernel} has other parameters");
    let bytes = 4 * buffers.len().next_multiple_of(2);
    let first = numbers.len().checked_sub(bytes).with_context(|| kernel.clone())?;
    let number =
        |bytes: &[u8]| bytes.try_into().map(u32::from_ne_bytes).map(|number| number as usize);
    let lengths = numbers[first..].chunks_exact(4).take(buffers.len()).map(number);
    Ok(lengths.collect::<Result<_, _>>()?)
}

/// The bytes of an element, by the letter of its type in the name of a kernel: `f_f32_o_f16_n_4`.
fn bytes_of(types: &str, letter: &str) -> Option<usize> {
    let words: Vec<&str> = types.split('_').collect();
    let place = words.iter().position(|word| *word == letter)?;
    match *words.get(place + 1)? {
        "f32" => Some(4),
        "f16" | "bf16" => Some(2),
        "f64" => Some(8),
        _ => None,
    }
}

/// The matrices of a product, by their tensor maps: both factors, or one that is both, what is
/// added, and the result.
fn of_product(Arguments { kernel, parameters, .. }: &Arguments) -> anyhow::Result<Traffic> {
    /// The place of the number in `Sizes` that says whether something is added.
    const ADDEND: usize = 6;
    let words = |parameter: usize| -> Vec<u64> {
        let words = parameters[parameter].chunks_exact(8);
        words.map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes"))).collect()
    };
    ensure!(parameters.len() == 7 && parameters[0].len() == 128, "{kernel} has other parameters");
    // A map as the stand-in writes it: a mark, the address, three sizes and three strides.
    let matrix = |parameter: usize| {
        let words = words(parameter);
        (words[1], (words[4] * words[7]) as usize)
    };
    let [(a, left), (b, right), (_, added), (_, result)] = [0, 1, 2, 3].map(matrix);
    let has_addend = parameters[4][4 * ADDEND] == 1;
    let read = left + if a == b { 0 } else { right } + if has_addend { added } else { 0 };
    Ok(Traffic { launches: 1, elements: 0, read, written: result })
}
