//! Proof that a tiling multiplies, before it may be chosen by its speed.

use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};

use super::{Product, Tiling, Triangle};
use crate::matrices::Matrices;

impl Tiling {
    /// Whether a tiling computes a product of small integers exactly, as every kernel that is right does,
    /// in any type and on any device. Waits for the device.
    pub fn multiplies_integers(&self, client: &Client, dtype: ElemType) -> bool {
        let ([rows, _], inner) = (self.side(), 2 * self.depth() as usize + 3);
        let m = rows + 5;
        let value = |row: usize, j: usize| ((row * 31 + j * 17) % 5) as i32 - 2;
        let entries = (0..m * inner).map(|at| value(at / inner, at % inner) as f32);
        let entries = client.create_from_slice(&encoded(entries, dtype));
        let a = Matrices::contiguous(entries, dtype, [1, m, inner]);
        let b = a.clone().transposed();
        let product = Product { a: &a, b: &b, alpha: 1.0, addend: None, triangle: Triangle::Lower };
        let Ok(result) = product.launch(client, self) else { return false };
        let Ok(found) = client.read_one(result.handle) else { return false };
        let sum = |at: usize| (0..inner).map(|j| value(at / m, j) * value(at % m, j)).sum::<i32>();
        found.as_ref() == encoded((0..m * m).map(|at| sum(at) as f32), dtype)
    }
}

/// Values in the bytes of a type.
fn encoded(values: impl Iterator<Item = f32>, dtype: ElemType) -> Vec<u8> {
    match dtype {
        ElemType::Float(FloatKind::F16) => {
            values.flat_map(|x| half::f16::from_f32(x).to_ne_bytes()).collect()
        }
        ElemType::Float(FloatKind::BF16) => {
            values.flat_map(|x| half::bf16::from_f32(x).to_ne_bytes()).collect()
        }
        _ => values.flat_map(f32::to_ne_bytes).collect(),
    }
}
