//! AdamW on parameters where they lie.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::parts::{Layout, factor_of, groups, number_of, read, write};
use super::{Batch, MOST_BUFFERS, Part, UNITS, own_matrix, own_vectors};
use crate::error::{Result, check_buffer, check_dtype};

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

/// A parameter, and how it is updated.
#[derive(Debug, Clone)]
pub struct Stepped {
    /// The values, updated in place: one row.
    pub values: Part,
    /// The gradient.
    pub grad: Handle,
    /// The first of its elements in the moments.
    pub first: usize,
    /// The number of the parameter's flag and corrections.
    pub flag: usize,
    /// The factor on the old values.
    pub keep: f32,
    /// The factor on the step.
    pub lr: f32,
}

/// A float32 value for every parameter, and what all of them share.
#[derive(Debug, Clone, Copy)]
pub struct Controls<'a> {
    /// 1 for parameters that stay as they are.
    pub left: &'a Handle,
    /// The corrections of the first and of the second moment.
    pub corrections: [&'a Handle; 2],
    /// A value that gradients are multiplied by.
    pub factor: Option<&'a Handle>,
}

/// Updates parameters and both of their moments, which have `elements`, in place (Loshchilov and Hutter,
/// <https://arxiv.org/abs/1711.05101>). The types are those of parameters and gradients, and of the moments.
///
/// # Errors
///
/// Those of the [module](super).
pub fn adamw(
    client: &Client,
    parameters: &[Stepped],
    moments: [&Handle; 2],
    elements: usize,
    Controls { left, corrections, factor }: Controls<'_>,
    dtypes: [ElemType; 2],
    AdamW { beta_1, beta_2, epsilon }: AdamW,
) -> Result<()> {
    let [dtype, of_moments] = dtypes;
    let flags = parameters.iter().map(|of| of.flag + 1).max().unwrap_or(0);
    for of in parameters {
        of.values.check(client, "the parameter", dtype)?;
        let grad = Part { handle: of.grad.clone(), ..of.values.clone() };
        grad.check(client, "the gradient", dtype)?;
        let needed = elements.max(of.first + of.values.len());
        check_buffer("the first moment", moments[0], needed, of_moments)?;
        check_buffer("the second moment", moments[1], needed, of_moments)?;
    }
    let [first, second] = corrections;
    let values = [("the flags", left), ("the corrections", first), ("the corrections", second)];
    Batch::check_values(&values.map(|(what, handle)| (what, handle, flags)))?;
    factor.map_or(Ok(()), |factor| Batch::check_values(&[("the factor", factor, 1)]))?;
    check_dtype(client, of_moments)?;
    // SAFETY: flags and corrections were checked above, and moments have so many elements.
    let buffer =
        |handle: &Handle, length| unsafe { BufferArg::from_raw_parts(handle.clone(), length) };
    let parameters: Vec<_> =
        parameters.iter().filter(|of| !of.values.is_empty()).cloned().collect();
    for group in groups(client, &parameters, 2, MOST_BUFFERS - 3) {
        let all = group.iter().map(|of| &of.values);
        let firsts: Vec<usize> = group.iter().map(|of| of.first).chain([elements]).collect();
        let layout = Layout::new(client, &dtypes, all.clone(), &firsts);
        let size = layout.vector_size;
        // SAFETY: units beyond the vectors of a part do nothing.
        unsafe {
            adamw_kernel::launch_unchecked(
                client,
                layout.cube_count(layout.cubes),
                CubeDim::new_1d(UNITS),
                layout.address_type(elements),
                size,
                all.clone().map(|part| part.vectors(size)).collect(),
                group.iter().map(|of| buffer(&of.grad, of.values.len() / size)).collect(),
                buffer(moments[0], elements / size),
                buffer(moments[1], elements / size),
                buffer(left, flags),
                buffer(first, flags),
                buffer(second, flags),
                buffer(factor.unwrap_or(left), 1),
                firsts[..group.len()].iter().map(|first| first / size).collect(),
                all.map(|part| part.len() / size).collect(),
                group.iter().map(|of| of.flag).collect(),
                group.iter().map(|of| of.keep).collect(),
                group.iter().map(|of| of.lr).collect(),
                beta_1,
                beta_2,
                epsilon,
                factor.is_some(),
                dtypes,
            );
        }
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn adamw_kernel<F: Float, M: Float, N: Size>(
    parameters: &mut Sequence<Box<[Vector<F, N>]>>,
    grads: &Sequence<Box<[Vector<F, N>]>>,
    moment_1: &mut [Vector<M, N>],
    moment_2: &mut [Vector<M, N>],
    left: &[f32],
    corrections_1: &[f32],
    corrections_2: &[f32],
    factor: &[f32],
    firsts: &Sequence<usize>,
    vectors: &Sequence<usize>,
    flags: &Sequence<usize>,
    keeps: &Sequence<f32>,
    lrs: &Sequence<f32>,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    #[comptime] scaled: bool,
    #[define(F, M)] _dtypes: [ElemType; 2],
) {
    let own = own_matrix();
    if own >= parameters.len() {
        terminate!();
    }
    let flag = number_of(flags, own);
    if left[flag] != 0.0 {
        terminate!();
    }
    let correction_1 = Vector::<f32, N>::new(corrections_1[flag]);
    let correction_2 = Vector::<f32, N>::new(corrections_2[flag]);
    let keep = Vector::<f32, N>::new(factor_of(keeps, own));
    let lr = Vector::<f32, N>::new(factor_of(lrs, own));
    let (b1, fresh_1) = (Vector::<f32, N>::new(beta_1), Vector::<f32, N>::new(1.0 - beta_1));
    let (b2, fresh_2) = (Vector::<f32, N>::new(beta_2), Vector::<f32, N>::new(1.0 - beta_2));
    let (start, length) = (number_of(firsts, own), number_of(vectors, own));
    let (first, step) = own_vectors();
    for i in range_stepped(first, length, step) {
        let at = start + i;
        let mut grad = read(grads, own, i);
        if comptime!(scaled) {
            grad *= Vector::new(factor[0]);
        }
        let m = b1 * Vector::cast_from(moment_1[at]) + fresh_1 * grad;
        let v = b2 * Vector::cast_from(moment_2[at]) + fresh_2 * grad * grad;
        let root = (v / correction_2).sqrt() + Vector::new(epsilon);
        let value = keep * read(&*parameters, own, i) - lr * (m / correction_1 / root);
        moment_1[at] = Vector::cast_from(m);
        moment_2[at] = Vector::cast_from(v);
        write(parameters, own, i, value);
    }
}
