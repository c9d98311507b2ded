//! Exchange with other code bases: the weights and states of a run as a safetensors file, and back.
//!
//! [`Exchange::export`] converts a [checkpoint](crate::checkpoint) to a file, and
//! [`Exchange::import`] converts a file to a checkpoint, which [`checkpoint::load`] continues from,
//! on one device or on any number of ranks. [The guide](crate::guide::exchange) has the lines for
//! the other side.
//!
//! ```
//! use burn::{nn::LinearConfig, tensor::Device};
//! use distmuon::exchange::{Exchange, Implementation};
//! use distmuon::{MuonConfig, checkpoint};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let [run, file, back] = ["run.bpk", "file", "back.bpk"].map(|n| folder.path().join(n));
//! let model = LinearConfig::new(4, 8).init(&Device::default().autodiff());
//! let optim = MuonConfig::new().init(&model);
//! checkpoint::save(&run, &model, &optim, &100usize)?;
//!
//! let exchange = Exchange::new(Implementation::Torch);
//! let left_out = exchange.export(&run, &file, &model)?;
//! assert!(left_out.is_empty());
//! exchange.import(&file, &back, &model, &100usize)?;
//! let (model, optim, step): (_, _, usize) = checkpoint::load(&back, model, optim)?;
//! # assert_eq!(step, 100);
//! # Ok::<(), distmuon::Error>(())
//! ```
//!
//! # Layout
//!
//! The weight of a parameter has the parameter's name in the other code base, and its state has the
//! name `optimizer.NAME.KEY`. Matrices of a `Linear` are transposed, since PyTorch has
//! `[outputs, inputs]`, and their states as well. The scale and offset of a norm, `gamma` and
//! `beta`, are named `weight` and `bias`. [`Exchange::with_names`] changes names.
//!
//! | implementation | Muon | AdamW | steps |
//! |---|---|---|---|
//! | [`Torch`](Implementation::Torch) | `momentum_buffer` | `exp_avg`, `exp_avg_sq` | `step` of AdamW, float32 |
//! | [`KellerJordan`](Implementation::KellerJordan) | `momentum_buffer` | `exp_avg`, `exp_avg_sq` | `step` of AdamW, int64 |
//! | [`Dion`](Implementation::Dion) | `momentum` | `momentum`, `variance` | `step` of all, int64 |
//! | [`Megatron`](Implementation::Megatron) | `momentum_buffer` | `exp_avg`, `exp_avg_sq` | `step` of AdamW, int64 |
//!
//! Parameters in half precision have float32 master weights in Megatron-LM's files, `fp32_param`.
//! Steps have the shape `[]`. The settings of the optimizers are not part of a file.
//!
//! [`checkpoint::load`]: crate::checkpoint::load

mod export;
mod file;
mod forms;
mod import;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use burn::module::Module;

use crate::error::{Error, Result};
use crate::parameters::ensure_whole;
use forms::Form;

/// Prefix of the names of states in a file.
const OPTIMIZER: &str = "optimizer.";
/// Key of the number of steps in a file.
const STEP: &str = "step";

/// A code base whose names of states a file has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Implementation {
    /// `torch.optim.Muon` and `torch.optim.AdamW`
    /// (<https://github.com/pytorch/pytorch/blob/098e03f/torch/optim/_muon.py>).
    Torch,
    /// Keller Jordan's `Muon` and `MuonWithAuxAdam`
    /// (<https://github.com/KellerJordan/Muon/blob/00ba60d/muon.py>).
    KellerJordan,
    /// `Muon` with AdamW or Lion of Microsoft's dion, whose momentum is a
    /// [sum](crate::MomentumForm::Sum)
    /// (<https://github.com/microsoft/dion/blob/01287d7/dion/megabatch_base.py>).
    Dion,
    /// Megatron-LM's Adam and its Muon of Emerging-Optimizers, with float32 copies of parameters in
    /// half precision
    /// (<https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/emerging_optimizers.py>).
    Megatron,
}

/// The keys of an implementation.
struct Keys {
    momentum: &'static str,
    /// The keys of AdamW's moments.
    moments: [&'static str; 2],
    /// The key of master weights, if the code base stores them with the states.
    master: Option<&'static str>,
    /// `true` if the number of steps is also stored of matrices.
    counts_all: bool,
}

impl Implementation {
    /// All implementations.
    pub const ALL: [Self; 4] = [Self::Torch, Self::KellerJordan, Self::Dion, Self::Megatron];

    /// Returns the name that [`from_str`](str::parse) reads.
    pub fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::KellerJordan => "keller-jordan",
            Self::Dion => "dion",
            Self::Megatron => "megatron",
        }
    }

    fn keys(self) -> Keys {
        match self {
            Self::Torch | Self::KellerJordan | Self::Megatron => Keys {
                momentum: "momentum_buffer",
                moments: ["exp_avg", "exp_avg_sq"],
                master: (self == Self::Megatron).then_some("fp32_param"),
                counts_all: false,
            },
            Self::Dion => Keys {
                momentum: "momentum",
                moments: ["momentum", "variance"],
                master: None,
                // Counted for a group of parameters, and so for all of them.
                counts_all: true,
            },
        }
    }
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Implementation {
    type Err = Error;

    /// Reads a [`name`](Implementation::name).
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] for other names.
    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|implementation| implementation.name() == name);
        found.ok_or_else(|| {
            Error::usage(
                "the layout of states is unknown",
                "`torch`, `keller-jordan`, `dion` or `megatron`",
                format!("`{name}`"),
                "name the optimizer that writes or reads the file",
            )
        })
    }
}

/// The conversion between checkpoints and safetensors files.
pub struct Exchange {
    implementation: Implementation,
    steps: Option<usize>,
    rename: Box<dyn Fn(&str) -> String + Send + Sync>,
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { implementation, steps, .. } = self;
        f.debug_struct("Exchange")
            .field("implementation", implementation)
            .field("steps", steps)
            .finish_non_exhaustive()
    }
}

impl Exchange {
    /// Makes a conversion with the names of an implementation. Parameters have the same paths on
    /// both sides, except for fields of norms.
    pub fn new(implementation: Implementation) -> Self {
        Self { implementation, steps: None, rename: Box::new(str::to_owned) }
    }

    /// Sets the number of steps that an imported run had taken, for matrices whose steps the file
    /// does not count. The schedule of Muon's momentum goes on there.
    pub fn with_steps(mut self, steps: usize) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Sets a function that returns the name of a parameter in the other code base, given the name
    /// that it has without the function: its path, with PyTorch's names of the fields of norms.
    ///
    /// ```
    /// use distmuon::exchange::{Exchange, Implementation};
    ///
    /// let exchange = Exchange::new(Implementation::Torch)
    ///     .with_names(|name| name.replace("blocks.", "transformer.h."));
    /// ```
    pub fn with_names(mut self, rename: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        self.rename = Box::new(rename);
        self
    }

    /// The form in the file of every float parameter of a model, by its path.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a model that is divided among ranks; [`Error::Usage`] for names
    /// that several parameters have.
    fn forms<M: Module>(&self, model: &M) -> Result<BTreeMap<String, Form>> {
        ensure_whole(model)?;
        let forms = forms::of(model, &self.rename);
        // A second tensor of a name would replace the first in the file, in silence.
        let mut paths = BTreeMap::new();
        for (path, form) in &forms {
            if let Some(other) = paths.insert(&form.name, path) {
                return Err(Error::usage(
                    "two parameters have one name in the file",
                    "a name for every parameter",
                    format!("`{}` of `{other}` and `{path}`", form.name),
                    "change the function of `Exchange::with_names`",
                ));
            }
        }
        Ok(forms)
    }
}
