//! The self-test of a tiling: it must multiply integers exactly before it may be chosen for its
//! speed.

use cubecl::client::Client;
use cubecl::ir::{ElemType, FloatKind};

use super::{Product, Tiling, Triangle};
use crate::error::{Error, Result};
use crate::matrices::Matrices;

impl Tiling {
    /// Returns `true` if the tiling computes products of small integers exactly, as every correct
    /// kernel does in any type and on any device.
    ///
    /// The products have sizes that the tiling divides and others, contiguous rows and contiguous
    /// columns, an addend and none. Returns `false` also for a tiling that the device can't launch.
    /// Waits for the device.
    ///
    /// # Errors
    ///
    /// Those of [`Product::launch_into`], and [`Error::Read`] for a result that can't be read.
    pub fn passes_integer_test(&self, client: &Client, dtype: ElemType) -> Result<bool> {
        let [rows, _] = self.side();
        let depth = self.depth() as usize;
        // Odd sizes have tiles at all edges; even ones have none, so that vectors are as wide as
        // they can be.
        let odd = Trial { m: rows + 5, inner: 2 * depth + 3, columns: false, beta: None };
        let even = Trial { m: 2 * rows, inner: 4 * depth, columns: true, beta: Some(2.0) };
        Ok(odd.succeeds(client, self, dtype)? && even.succeeds(client, self, dtype)?)
    }
}

/// A symmetric product of integers.
struct Trial {
    m: usize,
    inner: usize,
    /// `true` if the columns of `A` are contiguous, `false` if its rows are.
    columns: bool,
    beta: Option<f32>,
}

impl Trial {
    fn succeeds(&self, client: &Client, tiling: &Tiling, dtype: ElemType) -> Result<bool> {
        let Self { m, inner, columns, beta } = *self;
        let upload = |entries: &mut dyn Iterator<Item = i32>| {
            client.create_from_slice(&encode(entries.map(|x| x as f32), dtype))
        };
        // From -2 to 2: small enough for exact products and sums, in half precision too.
        let value = |row: usize, j: usize| ((row * 31 + j * 17) % 5) as i32 - 2;
        let a = if columns {
            let entries = upload(&mut (0..m * inner).map(|i| value(i % m, i / m)));
            Matrices::contiguous(entries, dtype, [1, inner, m]).transposed()
        } else {
            let entries = upload(&mut (0..m * inner).map(|i| value(i / inner, i % inner)));
            Matrices::contiguous(entries, dtype, [1, m, inner])
        };
        let added = |row: usize, column: usize| ((row + column) % 7) as i32;
        let d = upload(&mut (0..m * m).map(|i| added(i / m, i % m)));
        let d = Matrices::contiguous(d, dtype, [1, m, m]);
        let b = a.clone().transposed();
        let addend = beta.map(|beta| (&d, beta));
        let product = Product { a: &a, b: &b, alpha: 1.0, addend, triangle: Triangle::Lower };
        let result = product.launch(client, tiling)?;
        let bytes = match client.read_one(result.handle) {
            Ok(bytes) => bytes,
            // A compiler or driver may refuse a kernel that the properties of the device allow: the
            // tiling is then not one for this device.
            Err(error) if error.is_refusal() => return Ok(false),
            Err(error) => return Err(Error::Read(error.to_string())),
        };
        let expected = (0..m * m).map(|i| {
            let (row, column) = (i / m, i % m);
            let sum: i32 = (0..inner).map(|j| value(row, j) * value(column, j)).sum();
            sum as f32 + beta.unwrap_or(0.0) * added(row, column) as f32
        });
        // Bits and not values: NaN would differ from everything.
        Ok(bytes.as_ref() == encode(expected, dtype))
    }
}

/// Returns values as the bytes of a type.
fn encode(values: impl Iterator<Item = f32>, dtype: ElemType) -> Vec<u8> {
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
