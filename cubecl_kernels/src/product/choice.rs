//! Choices that are kept for products of one layout, which come again at every step.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl_core::device::ServiceId;

use super::grid::Triangle;
use super::setup::Setup;
use super::{Product, Tiling};
use crate::error::{Error, Result};
use crate::matrices::Matrices;

/// The tiling that suits a product, and its set-up.
pub(super) struct Choice {
    pub tiling: Tiling,
    pub setup: Setup,
}

/// All that a choice depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    device: ServiceId,
    dtype: ElemType,
    triangle: Triangle,
    /// `A`, `B`, and `D` if there is one.
    operands: [Option<Layout>; 3],
}

/// The layout of an operand: its shape and strides, and the power of two that its first element is a multiple of.
type Layout = ([usize; 3], [usize; 3], u32);

/// No vector is of more elements than two to this power.
const LONGEST_VECTOR: u32 = 6;

fn layout(matrices: &Matrices) -> Layout {
    let offset = matrices.handle.offset_start.unwrap_or(0) as usize / matrices.dtype.size();
    (matrices.shape, matrices.strides, (offset | 1 << LONGEST_VECTOR).trailing_zeros())
}

/// Values that are worked out once.
type Known<K, V> = LazyLock<Mutex<HashMap<K, V>>>;

/// The known value of a key, else what is made for it, which is kept then. It is made without the lock, since a proof
/// waits for the device.
fn known_or<K: Eq + Hash, V: Clone>(
    known: &Mutex<HashMap<K, V>>,
    key: K,
    make: impl FnOnce() -> Result<V>,
) -> Result<V> {
    // Entries are whole whenever the lock is free.
    let known = || known.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(value) = known().get(&key) {
        return Ok(value.clone());
    }
    let value = make()?;
    known().insert(key, value.clone());
    Ok(value)
}

impl Product<'_> {
    /// The tiling that suits the product best of those that are not refused and multiply integers exactly.
    pub(super) fn choice(&self, client: &Client) -> Result<Arc<Choice>> {
        static KNOWN: Known<Key, Arc<Choice>> = LazyLock::new(Mutex::default);
        let addend = self.addend.map(|(addend, _)| addend);
        let key = Key {
            device: client.service_id(),
            dtype: self.a.dtype,
            triangle: self.triangle,
            operands: [Some(self.a), Some(self.b), addend].map(|of| of.map(layout)),
        };
        let prove = |tiling: &Tiling| tiling.proven(client, self.a.dtype);
        known_or(&KNOWN, key, || self.choose(client, prove).map(Arc::new))
    }

    /// The choice among the tilings that a proof does not refuse.
    fn choose(&self, client: &Client, prove: impl Fn(&Tiling) -> Result<()>) -> Result<Choice> {
        let (properties, dtype) = (client.properties(), self.a.dtype);
        let result = self.unallocated_result();
        let mut refusal = Error::Dtype(dtype);
        for tiling in Tiling::by_suitability(properties, dtype, self.triangle, self.shape()) {
            let setup = self.validated_setup(client, &tiling, &result);
            match setup.and_then(|setup| prove(&tiling).map(|()| setup)) {
                Ok(setup) => return Ok(Choice { tiling, setup }),
                // It says nothing of the tiling, and a choice is kept for good.
                Err(error @ Error::Read(_)) => return Err(error),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

impl Tiling {
    /// Refuses a tiling that does not [multiply integers exactly](Self::multiplies_integers) on a device. The answer is
    /// kept for every device and type.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`], and those of [`multiplies_integers`](Self::multiplies_integers).
    pub fn proven(&self, client: &Client, dtype: ElemType) -> Result<()> {
        static KNOWN: Known<(ServiceId, ElemType, Tiling), bool> = LazyLock::new(Mutex::default);
        let key = (client.service_id(), dtype, *self);
        match known_or(&KNOWN, key, || self.multiplies_integers(client, dtype))? {
            true => Ok(()),
            false => Err(Error::Refused {
                kernel: self.to_string(),
                reason:
                    "the device can't launch it, or it does not multiply small integers exactly"
                        .to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::ir::FloatKind;

    use super::*;

    #[test]
    fn a_tiling_that_is_not_proven_is_passed_over() {
        let device = || cubecl::Device::Wgpu(Default::default()).client();
        let Ok(client) = std::panic::catch_unwind(device) else {
            crate::skips::skip("there is no device");
            return;
        };
        let a = Matrices::empty(&client, ElemType::Float(FloatKind::F32), [1, 256, 256]);
        let b = a.clone().transposed();
        let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle: Triangle::Lower };
        let wrong =
            |tiling: &Tiling| Error::Refused { kernel: tiling.to_string(), reason: "wrong".into() };

        let best = product.choose(&client, |_| Ok(())).unwrap().tiling;
        let but_best = |tiling: &Tiling| if *tiling == best { Err(wrong(tiling)) } else { Ok(()) };
        let next = product.choose(&client, but_best).unwrap().tiling;
        assert_ne!(next, best);
        let none = product.choose(&client, |tiling| Err(wrong(tiling)));
        assert!(matches!(none, Err(Error::Refused { .. })));
        let unread = product.choose(&client, |_| Err(Error::Read("lost".into())));
        assert!(matches!(unread, Err(Error::Read(_))));
    }
}
