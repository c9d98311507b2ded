//! AdamW on rows.

use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::{Batch, UNITS};
use crate::error::Result;

/// The constants of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

/// Updates rows and both of their moments in place (Loshchilov and Hutter,
/// <https://arxiv.org/abs/1711.05101>). `rows` holds `[5, r]` float32 values: whether a row is
/// accepted; what its values are multiplied by; its learning rate; the corrections of its first and of
/// its second moment. The types are those of parameters and gradients, and of the moments.
pub fn adamw(
    client: &Client,
    [parameters, grads, moment_1, moment_2]: [&Handle; 4],
    rows: &Handle,
    batch: Batch,
    dtypes: [ElemType; 2],
    AdamW { beta_1, beta_2, epsilon }: AdamW,
) -> Result<()> {
    let [dtype, of_moments] = dtypes;
    batch.check(
        client,
        &[
            ("the parameter", parameters, dtype),
            ("the gradient", grads, dtype),
            ("the first moment", moment_1, of_moments),
            ("the second moment", moment_2, of_moments),
        ],
    )?;
    Batch::check_values(&[("the rows", rows, 5 * batch.count)])?;
    if batch.is_empty() {
        return Ok(());
    }
    let size = batch.vector_size(client, &dtypes);
    let (vectors, units) = (batch.len() / size, CubeDim::new_1d(UNITS));
    // SAFETY: units beyond the vectors do nothing.
    unsafe {
        adamw_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, vectors, units),
            units,
            batch.address_type(),
            size,
            batch.vectors(parameters, size),
            batch.vectors(grads, size),
            batch.vectors(moment_1, size),
            batch.vectors(moment_2, size),
            BufferArg::from_raw_parts(rows.clone(), 5 * batch.count),
            batch.elements / size,
            batch.count,
            beta_1,
            beta_2,
            epsilon,
            dtypes,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn adamw_kernel<F: Float, M: Float, N: Size>(
    parameters: &mut [Vector<F, N>],
    grads: &[Vector<F, N>],
    moment_1: &mut [Vector<M, N>],
    moment_2: &mut [Vector<M, N>],
    rows: &[f32],
    vectors: usize,
    count: usize,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    #[define(F, M)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    let row = at / vectors;
    if row >= count || rows[row] == 0.0 {
        terminate!();
    }
    let keep = Vector::<f32, N>::new(rows[count + row]);
    let lr = Vector::<f32, N>::new(rows[2 * count + row]);
    let correction_1 = Vector::<f32, N>::new(rows[3 * count + row]);
    let correction_2 = Vector::<f32, N>::new(rows[4 * count + row]);
    let (b1, fresh_1) = (Vector::<f32, N>::new(beta_1), Vector::<f32, N>::new(1.0 - beta_1));
    let (b2, fresh_2) = (Vector::<f32, N>::new(beta_2), Vector::<f32, N>::new(1.0 - beta_2));
    let grad = Vector::<f32, N>::cast_from(grads[at]);
    let m = b1 * Vector::cast_from(moment_1[at]) + fresh_1 * grad;
    let v = b2 * Vector::cast_from(moment_2[at]) + fresh_2 * grad * grad;
    let root = (v / correction_2).sqrt() + Vector::new(epsilon);
    let value = keep * Vector::cast_from(parameters[at]) - lr * (m / correction_1 / root);
    moment_1[at] = Vector::cast_from(m);
    moment_2[at] = Vector::cast_from(v);
    parameters[at] = Vector::cast_from(value);
}
