//! AdamW on parameters in place.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::rows::{LaunchArguments, RowGrid, factor_of, launch_groups, number_of, read, write};
use super::{Batch, Joined, MAX_BUFFERS, Rows, UNITS, cube_row, unit_vectors};
use crate::error::{Result, check_buffer, check_dtype};

/// The constants of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Decay rate of the first moment.
    pub beta_1: f32,
    /// Decay rate of the second moment.
    pub beta_2: f32,
    /// Constant that is added to the root of the second moment.
    pub epsilon: f32,
}

/// A parameter with its gradient, its place in the moments and the factors of its step.
#[derive(Debug, Clone)]
pub struct AdamWUpdate {
    /// The values, updated in place: one row. The buffer may be that of [all parameters](Joined).
    pub values: Rows,
    /// The gradient.
    pub grad: Handle,
    /// The index of the parameter's first element in the moments.
    pub first: usize,
    /// The index of the parameter's flag and corrections.
    pub flag: usize,
    /// The factor on the old values.
    pub decay: f32,
    /// The factor on the step.
    pub lr: f32,
}

/// The float32 values on the device that control a step: flags and corrections with one value for
/// every parameter, and a factor for all of them.
#[derive(Debug, Clone, Copy)]
pub struct StepControls<'a> {
    /// The flags: 1 for parameters that are rejected, and else 0.
    pub rejected: &'a Handle,
    /// The bias corrections of the first and of the second moment.
    pub corrections: [&'a Handle; 2],
    /// A value by which all gradients are multiplied.
    pub factor: Option<&'a Handle>,
}

impl StepControls<'_> {
    fn check(&self, flags: usize) -> Result<()> {
        let [correction_1, correction_2] = self.corrections;
        Batch::check_f32_buffers(&[
            ("the flags", self.rejected, flags),
            ("the corrections", correction_1, flags),
            ("the corrections", correction_2, flags),
        ])?;
        Batch::check_factor(self.factor)
    }
}

/// The types of the operands of a step.
#[derive(Debug, Clone, Copy)]
pub struct AdamWTypes {
    /// The type of the parameters.
    pub parameters: ElemType,
    /// The type of the gradients.
    pub grads: ElemType,
    /// The type of both moments.
    pub moments: ElemType,
}

impl AdamWTypes {
    /// Returns one type for all operands.
    pub fn all(dtype: ElemType) -> Self {
        Self { parameters: dtype, grads: dtype, moments: dtype }
    }
}

/// Updates parameters and both of their moments in place (Loshchilov and Hutter,
/// <https://arxiv.org/abs/1711.05101>).
///
/// Each of the two moments has `elements` elements. Parameters that are `joined` have the places
/// that they have in the moments.
///
/// # Errors
///
/// Those of the [module](super).
pub fn adamw(
    client: &Client,
    (parameters, joined): (&[AdamWUpdate], Joined),
    moments: [&Handle; 2],
    elements: usize,
    controls: StepControls<'_>,
    dtypes: AdamWTypes,
    settings: AdamW,
) -> Result<()> {
    let all_values = parameters.iter().map(|parameter| &parameter.values);
    let end = parameters.iter().map(|parameter| parameter.first + parameter.values.len()).max();
    let needed = elements.max(end.unwrap_or(0));
    joined.check(client, all_values, needed, dtypes.parameters)?;
    for parameter in parameters {
        let grad = Rows { handle: parameter.grad.clone(), ..parameter.values.clone() };
        grad.check(client, "the gradient", dtypes.grads)?;
    }
    check_buffer("the first moment", moments[0], needed, dtypes.moments)?;
    check_buffer("the second moment", moments[1], needed, dtypes.moments)?;
    check_dtype(client, dtypes.moments)?;
    let flags = parameters.iter().map(|parameter| parameter.flag + 1).max().unwrap_or(0);
    controls.check(flags)?;
    let parameters: Vec<_> =
        parameters.iter().filter(|parameter| !parameter.values.is_empty()).cloned().collect();
    let longest = parameters.iter().map(|parameter| parameter.values.len()).max().unwrap_or(0);
    let arguments = LaunchArguments {
        buffers: 2,
        numbers: 5,
        // Two of the buffers of one parameter are its values and its gradient, and one is that of
        // numbers.
        shared: MAX_BUFFERS - 3,
        address: AddressType::from_len(longest.max(elements)),
    };
    let shared = SharedBuffers { joined, moments, elements, controls, flags };
    for group in launch_groups(client, &parameters, arguments, |parameter| parameter.values.shape())
    {
        settings.launch(client, group, &shared, arguments.address, dtypes);
    }
    Ok(())
}

/// The buffers that the parameters of a launch share, after their checks.
struct SharedBuffers<'a> {
    joined: Joined,
    moments: [&'a Handle; 2],
    /// Elements of each moment.
    elements: usize,
    controls: StepControls<'a>,
    /// The number of flags that the kernel reads, and of corrections.
    flags: usize,
}

impl AdamW {
    /// Updates as many parameters as fit in one launch.
    fn launch(
        self,
        client: &Client,
        group: &[AdamWUpdate],
        &SharedBuffers { joined, moments, elements, controls, flags }: &SharedBuffers<'_>,
        address: AddressType,
        AdamWTypes { parameters, grads, moments: of_moments }: AdamWTypes,
    ) {
        let dtypes = [parameters, grads, of_moments];
        let StepControls { rejected, corrections, factor } = controls;
        // SAFETY: `adamw` has checked that every buffer has this number of elements.
        let buffer =
            |handle: &Handle, length| unsafe { BufferArg::from_raw_parts(handle.clone(), length) };
        let all_rows = group.iter().map(|parameter| &parameter.values);
        // With the end of the moments: their length is also a number of whole vectors.
        let firsts: Vec<usize> =
            group.iter().map(|parameter| parameter.first).chain([elements]).collect();
        let grid = RowGrid::new(client, &dtypes, all_rows.clone(), &firsts);
        let size = grid.vector_size;
        // SAFETY: units past the vectors of a tensor do nothing.
        unsafe {
            adamw_kernel::launch_unchecked(
                client,
                grid.cube_count(grid.cubes_per_row),
                CubeDim::new_1d(UNITS),
                address,
                size,
                joined.buffers(all_rows.clone(), elements, size),
                group
                    .iter()
                    .map(|parameter| buffer(&parameter.grad, parameter.values.len() / size))
                    .collect(),
                buffer(moments[0], elements / size),
                buffer(moments[1], elements / size),
                buffer(rejected, flags),
                buffer(corrections[0], flags),
                buffer(corrections[1], flags),
                // Without a factor, any buffer is bound in its place and not read.
                buffer(factor.unwrap_or(rejected), 1),
                firsts[..group.len()].iter().map(|first| first / size).collect(),
                all_rows.map(|rows| rows.len() / size).collect(),
                group.iter().map(|parameter| parameter.flag).collect(),
                group.iter().map(|parameter| parameter.decay).collect(),
                group.iter().map(|parameter| parameter.lr).collect(),
                self.beta_1,
                self.beta_2,
                self.epsilon,
                factor.is_some(),
                joined.0,
                dtypes,
            );
        }
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn adamw_kernel<F: Float, G: Float, M: Float, N: Size>(
    parameters: &mut Sequence<Box<[Vector<F, N>]>>,
    grads: &Sequence<Box<[Vector<G, N>]>>,
    moment_1: &mut [Vector<M, N>],
    moment_2: &mut [Vector<M, N>],
    rejected: &[f32],
    corrections_1: &[f32],
    corrections_2: &[f32],
    factor: &[f32],
    firsts: &Sequence<usize>,
    vectors: &Sequence<usize>,
    flags: &Sequence<usize>,
    decays: &Sequence<f32>,
    lrs: &Sequence<f32>,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    #[comptime] scaled: bool,
    #[comptime] joined: bool,
    #[define(F, G, M)] _dtypes: [ElemType; 3],
) {
    let index = cube_row();
    if index >= flags.len() {
        terminate!();
    }
    let flag = number_of(flags, index);
    if rejected[flag] != 0.0 {
        terminate!();
    }
    let correction_1 = Vector::<f32, N>::new(corrections_1[flag]);
    let correction_2 = Vector::<f32, N>::new(corrections_2[flag]);
    let decay = Vector::<f32, N>::new(factor_of(decays, index));
    let lr = Vector::<f32, N>::new(factor_of(lrs, index));
    let b1 = Vector::<f32, N>::new(beta_1);
    let fresh_1 = Vector::<f32, N>::new(1.0 - beta_1);
    let b2 = Vector::<f32, N>::new(beta_2);
    let fresh_2 = Vector::<f32, N>::new(1.0 - beta_2);
    let start = number_of(firsts, index);
    let length = number_of(vectors, index);
    let (tensor, origin) =
        if comptime!(joined) { (0_usize.runtime(), start) } else { (index, 0_usize.runtime()) };
    let (first, step) = unit_vectors();
    for i in range_stepped(first, length, step) {
        let position = start + i;
        let mut grad = read(grads, index, i);
        if comptime!(scaled) {
            grad *= Vector::new(factor[0]);
        }
        let m = b1 * Vector::cast_from(moment_1[position]) + fresh_1 * grad;
        let v = b2 * Vector::cast_from(moment_2[position]) + fresh_2 * grad * grad;
        let root = (v / correction_2).sqrt() + Vector::new(epsilon);
        let value = decay * read(&*parameters, tensor, origin + i) - lr * (m / correction_1 / root);
        moment_1[position] = Vector::cast_from(m);
        moment_2[position] = Vector::cast_from(v);
        write(parameters, tensor, origin + i, value);
    }
}
