//! Choices of a tiling, cached for products of one layout, which recur at every step.

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

/// The tiling chosen for a product, and its set-up.
pub(super) struct Choice {
    pub tiling: Tiling,
    pub setup: Setup,
}

/// Everything that a choice depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    device: ServiceId,
    dtype: ElemType,
    triangle: Triangle,
    /// `A`, `B`, and `D` if there is one.
    operands: [Option<OperandLayout>; 3],
}

/// The layout of an operand: its shape, its strides, and the exponent of the largest power of two
/// that divides the index of its first element.
type OperandLayout = ([usize; 3], [usize; 3], u32);

/// Largest exponent of an [`OperandLayout`]: no vector has more elements than two to this power.
const MAX_VECTOR_EXPONENT: u32 = 6;

fn layout(matrices: &Matrices) -> OperandLayout {
    // A choice depends on the alignment and not on the address: the key has the power of two that
    // divides the offset, up to the widest vector.
    let offset = matrices.handle.offset_start.unwrap_or(0) as usize / matrices.dtype.size();
    (matrices.shape, matrices.strides, (offset | 1 << MAX_VECTOR_EXPONENT).trailing_zeros())
}

/// Values that are computed once.
type Cache<K, V> = LazyLock<Mutex<HashMap<K, V>>>;

/// Returns the cached value of a key, or computes and caches it.
fn get_or_compute<K: Eq + Hash, V: Clone>(
    cache: &Mutex<HashMap<K, V>>,
    key: K,
    compute: impl FnOnce() -> Result<V>,
) -> Result<V> {
    // A poisoned lock is harmless: entries are complete whenever the lock is free.
    let entries = || cache.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(value) = entries().get(&key) {
        return Ok(value.clone());
    }
    // Without the lock, since a self-test waits for the device.
    let value = compute()?;
    entries().insert(key, value.clone());
    Ok(value)
}

impl Product<'_> {
    /// Returns the most suitable tiling of those that the device runs and that pass the integer
    /// test.
    pub(super) fn choice(&self, client: &Client) -> Result<Arc<Choice>> {
        static CHOICES: Cache<Key, Arc<Choice>> = LazyLock::new(Mutex::default);
        let addend = self.addend.map(|(addend, _)| addend);
        let key = Key {
            device: client.service_id(),
            dtype: self.a.dtype,
            triangle: self.triangle,
            operands: [Some(self.a), Some(self.b), addend].map(|operand| operand.map(layout)),
        };
        // Passed as a function, so that a test can refuse a tiling.
        let verify = |tiling: &Tiling| tiling.verify(client, self.a.dtype);
        get_or_compute(&CHOICES, key, || self.choose(client, verify).map(Arc::new))
    }

    /// Returns the most suitable tiling that the device runs and that is verified.
    fn choose(&self, client: &Client, verify: impl Fn(&Tiling) -> Result<()>) -> Result<Choice> {
        let properties = client.properties();
        let dtype = self.a.dtype;
        let result = self.unallocated_result();
        // A device without any tiling has none of this type.
        let mut last_error = Error::Dtype(dtype);
        for tiling in Tiling::by_suitability(properties, dtype, self.triangle, self.shape()) {
            let setup = self.validated_setup(client, &tiling, &result);
            match setup.and_then(|setup| verify(&tiling).map(|()| setup)) {
                Ok(setup) => return Ok(Choice { tiling, setup }),
                // A failed read says nothing about the tiling, and a choice is cached for good.
                Err(error @ Error::Read(_)) => return Err(error),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }
}

impl Tiling {
    /// Checks that the tiling [passes the integer test](Self::passes_integer_test) on a device. The
    /// outcome is cached for every device and type.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a tiling that does not pass, and those of
    /// [`passes_integer_test`](Self::passes_integer_test).
    pub fn verify(&self, client: &Client, dtype: ElemType) -> Result<()> {
        static OUTCOMES: Cache<(ServiceId, ElemType, Tiling), bool> = LazyLock::new(Mutex::default);
        let key = (client.service_id(), dtype, *self);
        match get_or_compute(&OUTCOMES, key, || self.passes_integer_test(client, dtype))? {
            true => Ok(()),
            false => Err(Error::Unsupported {
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
    use crate::tests::any_device;

    #[test]
    fn a_tiling_that_fails_its_verification_is_not_chosen() {
        let Some(client) = any_device() else { return };
        let a = Matrices::empty(&client, ElemType::Float(FloatKind::F32), [1, 256, 256]);
        let b = a.clone().transposed();
        let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle: Triangle::Lower };
        let failure = |tiling: &Tiling| {
            Err(Error::Unsupported { kernel: tiling.to_string(), reason: "wrong".into() })
        };

        let best = product.choose(&client, |_| Ok(())).unwrap().tiling;
        let except_best = |tiling: &Tiling| if *tiling == best { failure(tiling) } else { Ok(()) };
        let next = product.choose(&client, except_best).unwrap().tiling;
        assert_ne!(next, best);
        let none = product.choose(&client, failure);
        assert!(matches!(none, Err(Error::Unsupported { .. })));
        let unread = product.choose(&client, |_| Err(Error::Read("lost".into())));
        assert!(matches!(unread, Err(Error::Read(_))));
    }
}
