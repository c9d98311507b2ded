//! Parameters in half precision: updates are computed in float32, and the digits that the
//! parameters do not have are kept in the state.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use super::int8_blocks::LARGEST_DECAY;
use super::rounding::{Origin, joined, split, stochastic};
use super::state::{Extent, MANTISSA, MASTER, Slot, SlotDtype, Slots};
use crate::backend::{Values, restore, round_parts};
use crate::error::{Error, Result};
use crate::flat;

/// The precision that updates keep of parameters in float16 and bfloat16. Parameters in float32 and
/// float64 do not need it.
///
/// A step changes a weight by less than half a unit in the last place of half precision most of the
/// time. Rounded to the nearest number, that change would be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum MasterWeights {
    /// A float32 copy of every parameter in the state, 4 bytes per element. The parameter is that
    /// value, rounded to the nearest number.
    Full,
    /// 16 further bits of the significand, 2 bytes per element: together with a bfloat16 parameter
    /// an exact float32 value, as in <https://github.com/KellerJordan/modded-nanogpt>. The
    /// parameters are as with `Full`, except that ties between two numbers round up. Magnitudes
    /// below 1e-30 may lose digits.
    Mantissa,
    /// Nothing: every step rounds parameters to the nearest number, and small changes are lost.
    None,
    /// Nothing, but every step rounds to one of both neighbours at random, with probabilities that
    /// make the mean the exact value (Gupta et al., <https://arxiv.org/abs/1502.02551>). The choice
    /// depends on the seed, the path of the parameter, its step and the index of the element: a run
    /// is repeatable, on any number of ranks.
    Stochastic {
        /// The seed of the random numbers.
        seed: u64,
    },
}

/// The type of momentum and moments. Checkpoints can be loaded with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StateDtype {
    /// float32, and float64 for float64 parameters.
    Float32,
    /// bfloat16, in half of the memory. An average whose decay is close to 1 changes by less than
    /// half a unit in the last place, and then stays: use it for momentum of 0.95, and not for
    /// second moments of 0.999.
    ///
    /// There is no float16: squares of gradients below 2e-4 would be zero in it.
    BFloat16,
    /// 8 bits for the momentum of the matrices that Muon updates, and float32 for everything else:
    /// the states of [`parts`](crate::parts), of AdamW and of Lion.
    ///
    /// 128 consecutive elements of a matrix have a float32 scale in common, their largest magnitude
    /// `A`, so that an element takes 1 + 4/128 bytes. An element is stored as a code `c` from -127
    /// to 127 for `A (c / 127) |c / 127|`, and one step changes the momentum of a matrix by about
    /// 0.7 % of its norm. Blocks whose values are all below 2e-34 are zeros.
    ///
    /// An element that would change by less than half the distance to the next code stays as it is.
    /// With momentum of 0.95 and gradients of zero, these are elements below 2.5 % of `A`, until
    /// `A` decreases. Use it for momentum of 0.95; more than 0.992 is rejected.
    Int8,
}

/// The settings of half precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Precision {
    pub master: MasterWeights,
    pub states: StateDtype,
}

/// Parameters in a state, in which they follow each other with zeros in between.
pub(crate) struct InState<'a> {
    /// The type of the parameters.
    pub dtype: DType,
    /// The index of each parameter's first element.
    pub firsts: &'a [usize],
    /// Elements of the state.
    pub elements: usize,
}

impl StateDtype {
    /// The type of slots of moments, and of momentum that is not a matrix's.
    pub(super) fn slot(self) -> SlotDtype {
        match self {
            Self::Float32 | Self::Int8 => SlotDtype::Precise,
            Self::BFloat16 => SlotDtype::BFloat16,
        }
    }

    /// The type of the slot of the momentum of matrices of a shape.
    pub(super) fn momentum_slot(self, [m, n]: [usize; 2]) -> SlotDtype {
        match self {
            Self::Int8 => SlotDtype::Int8Blocks { matrix: m * n },
            Self::Float32 | Self::BFloat16 => self.slot(),
        }
    }
}

/// Returns `true` for a type in half precision.
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

impl Precision {
    /// The slots for the further digits of parameters of a type.
    pub fn slots(self, parameter: DType) -> Option<Slot> {
        let slot = |name, dtype| Some(Slot { name, extent: Extent::Element, dtype });
        match self.master {
            _ if !is_half(parameter) => None,
            MasterWeights::Full => slot(MASTER, SlotDtype::F32),
            // bfloat16 is the upper half of a float32: 16 bits are all that is missing.
            MasterWeights::Mantissa => slot(MANTISSA, SlotDtype::Int16),
            MasterWeights::None | MasterWeights::Stochastic { .. } => None,
        }
    }

    /// Fails for a parameter whose type does not have the configured form of master weights.
    pub fn ensure_supported(self, path: &str, dtype: DType) -> Result<()> {
        match (self.master, dtype) {
            (MasterWeights::Mantissa, DType::F16) => Err(Error::setting(
                "master_weights",
                format!("`Mantissa` for `{path}` of float16"),
                "bfloat16 parameters for `Mantissa` (use `Full` for float16)",
            )),
            _ => Ok(()),
        }
    }

    /// Fails for matrices on a device that can't store their momentum.
    pub fn ensure_stored(self, path: &str, device: &Device) -> Result<()> {
        if self.states != StateDtype::Int8 || device.supports_dtype(DType::I8) {
            return Ok(());
        }
        Err(Error::setting(
            "state_dtype",
            format!("`Int8` for `{path}` on {device:?}, which does not have integers of 8 bits"),
            "`Float32` or `BFloat16`",
        ))
    }

    /// Fails for a momentum of matrices that its type does not follow, as
    /// [`ensure_decays`](Self::ensure_decays) does for other averages.
    pub fn ensure_momentum_decays(self, setting: &'static str, momentum: f64) -> Result<()> {
        if self.states == StateDtype::Int8 && momentum > LARGEST_DECAY {
            let expected = "at most 0.992 with momentum in 8 bits, which does not decrease \
                            otherwise (use `StateDtype::Float32`)";
            return Err(Error::setting(setting, momentum, expected));
        }
        self.ensure_decays(setting, momentum)
    }

    /// Fails for the decay of an average that its type does not follow: times `1 - 2^-8` and more,
    /// values of bfloat16 round to themselves, so that the average would never decrease.
    pub fn ensure_decays(self, setting: &'static str, decay: f64) -> Result<()> {
        // bfloat16 has 8 bits: `decay * x` rounds back to `x` where `1 - decay` is below half a
        // unit in the last place.
        if self.states == StateDtype::BFloat16 && decay > 1.0 - 1.0 / 256.0 {
            let expected = "at most 0.996 with averages in bfloat16, which do not decrease \
                            otherwise (use `StateDtype::Float32`)";
            return Err(Error::setting(setting, decay, expected));
        }
        Ok(())
    }

    /// The float32 values of parameters in half precision, and any others as they are. `firsts` has
    /// the index of each parameter's first element in the state.
    ///
    /// If a value was changed since the last step, the stored digits belong to the old value and
    /// are ignored, as if none had been stored.
    pub fn widen(self, values: Vec<Tensor<1>>, firsts: &[usize], state: &mut Slots) -> Values {
        if !is_half(values[0].dtype()) {
            return Values::Each(values);
        }
        let places = places(&values, firsts);
        let all = match self.master {
            MasterWeights::None | MasterWeights::Stochastic { .. } => {
                let wide = values.into_iter().map(|values| values.cast(DType::F32));
                return Values::Each(wide.collect());
            }
            // A master that does not round to the parameter is of an old value: the parameter was
            // changed by hand, or loaded.
            MasterWeights::Full => restore(state.take(MASTER), values, firsts),
            MasterWeights::Mantissa => {
                let low = state.take(MANTISSA);
                joined(flat::place(values, firsts, low.dims()[0]), low)
            }
        };
        Values::Joined { all, places }
    }

    /// Rounds the new values of parameters to their type, and stores the digits that it does not
    /// have: the reverse of [`widen`](Self::widen).
    pub fn narrow<'a>(
        self,
        values: Values,
        InState { dtype: half, firsts, elements }: InState<'_>,
        origins: impl Iterator<Item = Origin<'a>>,
        state: &mut Slots,
    ) -> Vec<Tensor<1>> {
        let together = |values: Values| match values {
            Values::Joined { all, places } => (all, places),
            Values::Each(values) => {
                let places = places(&values, firsts);
                (flat::place(values, firsts, elements), places)
            }
        };
        match self.master {
            _ if !is_half(half) => values.into_each(),
            MasterWeights::None => {
                values.into_each().into_iter().map(|values| values.cast(half)).collect()
            }
            MasterWeights::Stochastic { seed } => {
                let each = values.into_each().into_iter().zip(origins);
                each.map(|(values, origin)| stochastic(values, half, seed, origin)).collect()
            }
            MasterWeights::Full => {
                let (all, places) = together(values);
                // The published parameter is this value, rounded: `widen` compares them at the next
                // step.
                state.put(MASTER, all.clone());
                round_parts(all, places, half.into())
            }
            MasterWeights::Mantissa => {
                let (all, places) = together(values);
                let (high, low) = split(all);
                state.put(MANTISSA, low);
                Values::Joined { all: high, places }.into_each()
            }
        }
    }
}

/// The elements of each parameter in a flat state.
fn places(values: &[Tensor<1>], firsts: &[usize]) -> Vec<Range<usize>> {
    let each = firsts.iter().zip(values);
    each.map(|(first, values)| *first..first + values.dims()[0]).collect()
}
