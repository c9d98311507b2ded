//! The momentum before the iteration, and the update after it.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::norm::{RowNorms, VECTORS_PER_SUM, add_partials, add_squares, store_partial};
use super::rows::{
    LaunchArguments, RowGrid, factor_of, launch_groups, locate_row, number_of, read, write,
};
use super::{Batch, Joined, Rows, UNITS, cube_row, cubes_per_row, grid, unit_vectors, vector_size};
use crate::error::Result;
use crate::units::exchanging_units;

/// The gradient of a parameter, with the constants of its momentum.
#[derive(Debug, Clone)]
pub struct MomentumInput {
    /// The gradient: a row for every matrix.
    pub grad: Rows,
    /// The index of the parameter's flag.
    pub flag: usize,
    /// The weight of the old momentum, in `[0, 1)`.
    pub keep: f32,
    /// The weight of the gradient.
    pub fresh: f32,
}

/// The buffers that [`update_momentum`] reads and writes, excluding gradients.
#[derive(Debug, Clone, Copy)]
pub struct MomentumBuffers<'a> {
    /// The momentum of the batch, updated in place.
    pub momentum: &'a Handle,
    /// Receives the matrices to orthogonalise.
    pub update: &'a Handle,
    /// Receives the norms of the matrices to orthogonalise.
    pub norms: &'a RowNorms,
    /// A float32 flag for every parameter: 1 for those that are rejected, and else 0.
    pub rejected: &'a Handle,
    /// A float32 value by which all gradients are multiplied.
    pub factor: Option<&'a Handle>,
}

impl MomentumBuffers<'_> {
    fn check(&self, client: &Client, batch: Batch, flags: usize, dtype: ElemType) -> Result<()> {
        let Self { momentum, update, norms, rejected, factor } = self;
        batch.check(client, &[("the momentum", momentum, dtype), ("the update", update, dtype)])?;
        Batch::check_f32_buffers(&[
            ("the flags", rejected, flags),
            ("the norms", &norms.handle, 2 * batch.count * norms.partials),
        ])?;
        Batch::check_factor(*factor)
    }
}

/// Updates the momentum of the matrices of a batch from `first` on, in place:
/// `M <- keep M + fresh G`.
///
/// Writes the matrices to orthogonalise and their partial norms: `keep M + fresh G` with
/// `nesterov`, `M` without it, and zeros for a parameter that is rejected. `dtypes` are the type of
/// the gradients, and the type of the momentum and of the matrices to orthogonalise.
///
/// # Errors
///
/// Those of the [module](super).
pub fn update_momentum(
    client: &Client,
    inputs: &[MomentumInput],
    buffers: MomentumBuffers<'_>,
    batch: Batch,
    mut first: usize,
    dtypes: [ElemType; 2],
    nesterov: bool,
) -> Result<()> {
    let [grad_dtype, dtype] = dtypes;
    let flags = inputs.iter().map(|input| input.flag + 1).max().unwrap_or(0);
    buffers.check(client, batch, flags, dtype)?;
    inputs.iter().try_for_each(|input| input.grad.check(client, "the gradient", grad_dtype))?;
    batch.check_rows("the gradients", inputs.iter().map(|input| &input.grad), first)?;
    if batch.is_empty() {
        return Ok(());
    }
    let MomentumBuffers { momentum, update, norms, rejected, factor } = buffers;
    // The units of a cube add up their norms, for which they have to wait for each other.
    let units = exchanging_units(&client.properties().hardware, UNITS);
    let arguments =
        LaunchArguments { buffers: 1, numbers: 5, shared: 5, address: batch.address_type() };
    for group in launch_groups(client, inputs, arguments, |input| input.grad.shape()) {
        let all_rows = group.iter().map(|input| &input.grad);
        let grid = RowGrid::new(client, &dtypes, all_rows.clone(), &[]);
        let size = grid.vector_size;
        // SAFETY: every index is below the vectors of a matrix; rows, flags and norms were checked
        // above.
        unsafe {
            update_momentum_kernel::launch_unchecked(
                client,
                grid.cube_count(norms.partials),
                CubeDim::new_1d(units),
                batch.address_type(),
                size,
                all_rows.map(|rows| rows.vectors(size)).collect(),
                batch.vectors(momentum, size),
                batch.vectors(update, size),
                norms.arg(batch),
                BufferArg::from_raw_parts(rejected.clone(), flags),
                // Without a factor, any buffer is bound in its place and not read.
                BufferArg::from_raw_parts(factor.unwrap_or(rejected).clone(), 1),
                grid.first_rows(),
                grid.end_rows(),
                group.iter().map(|input| input.flag).collect(),
                group.iter().map(|input| input.keep).collect(),
                group.iter().map(|input| input.fresh).collect(),
                first,
                batch.elements / size,
                nesterov,
                factor.is_some(),
                units,
                dtypes,
            );
        }
        first += grid.rows;
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn update_momentum_kernel<G: Float, F: Float, N: Size>(
    grads: &Sequence<Box<[Vector<G, N>]>>,
    momentum: &mut [Vector<F, N>],
    update: &mut [Vector<F, N>],
    norms: &mut [f32],
    rejected: &[f32],
    factor: &[f32],
    first_rows: &Sequence<usize>,
    end_rows: &Sequence<usize>,
    flags: &Sequence<usize>,
    keeps: &Sequence<f32>,
    freshs: &Sequence<f32>,
    base: usize,
    vectors: usize,
    #[comptime] nesterov: bool,
    #[comptime] scaled: bool,
    #[comptime] units: u32,
    #[define(G, F)] _dtypes: [ElemType; 2],
) {
    let row = cube_row();
    let (index, grad_row) = locate_row(first_rows, end_rows, row);
    // The grid may be rounded up: cubes past the last row have nothing to do.
    if index >= grads.len() {
        terminate!();
    }
    let is_updated = rejected[number_of(flags, index)] == 0.0;
    let keep = Vector::<f32, N>::new(factor_of(keeps, index));
    // Read once, before the loop: each is a branch over all tensors.
    let fresh = Vector::<f32, N>::new(factor_of(freshs, index));
    let mut scale = f32::new(0.0);
    let mut squares = f32::new(0.0);
    let (first, step) = unit_vectors();
    // Squares are added up in two levels, which keeps rounding errors small.
    for start in range_stepped(first, vectors, step * VECTORS_PER_SUM) {
        let mut s = f32::new(0.0);
        let mut q = f32::new(0.0);
        for i in range_stepped(start, min(start + step * VECTORS_PER_SUM, vectors), step) {
            let position = (base + row) * vectors + i;
            if is_updated {
                let mut grad = read(grads, index, grad_row * vectors + i);
                if comptime!(scaled) {
                    // In float32: the inverse of a loss scale may be zero in half precision.
                    grad *= Vector::new(factor[0]);
                }
                let grad = fresh * grad;
                let averaged = keep * Vector::cast_from(momentum[position]) + grad;
                momentum[position] = Vector::cast_from(averaged);
                let ahead = if comptime!(nesterov) { keep * averaged + grad } else { averaged };
                update[position] = Vector::cast_from(ahead);
                let (scale, squares) = add_squares::<N>(s, q, ahead);
                s = scale;
                q = squares;
            } else {
                // A rejected gradient may be NaN: the iteration gets zeros, which it returns as
                // zeros.
                update[position] = Vector::new(F::new(0.0));
            }
        }
        let (s, q) = add_partials(scale, squares, s, q);
        scale = s;
        squares = q;
    }
    store_partial(norms, base + row, scale, squares, units);
}

/// A parameter with the factors of its update.
#[derive(Debug, Clone)]
pub struct ParameterUpdate {
    /// The values, updated in place: a row for every matrix. The buffer may be that of
    /// [all parameters](Joined).
    pub values: Rows,
    /// The index of the parameter's flag.
    pub flag: usize,
    /// The factor on the old values.
    pub decay: f32,
    /// The factor on the direction.
    pub lr: f32,
}

/// Updates parameters in place: `P <- decay P - lr U`, where `U` are the matrices of a batch from
/// `first` on.
///
/// A parameter whose flag is set in `rejected` keeps its values, as does a matrix whose flag is set
/// in `diverged`, in which the flags of the batch begin at index `first_diverged`. Parameters that
/// are `joined` have the places of their matrices in the batch. `dtypes` are the types of `P` and
/// of `U`.
///
/// # Errors
///
/// Those of the [module](super).
pub fn apply(
    client: &Client,
    (parameters, joined): (&[ParameterUpdate], Joined),
    directions: &Handle,
    rejected: &Handle,
    (diverged, first_diverged): (&Handle, usize),
    (batch, mut first): (Batch, usize),
    dtypes: [ElemType; 2],
) -> Result<()> {
    batch.check(client, &[("the direction", directions, dtypes[1])])?;
    let all_values = parameters.iter().map(|parameter| &parameter.values);
    joined.check(client, all_values.clone(), batch.len(), dtypes[0])?;
    let flags = parameters.iter().map(|parameter| parameter.flag + 1).max().unwrap_or(0);
    let diverged_flags = first_diverged + batch.count;
    Batch::check_f32_buffers(&[
        ("the flags", rejected, flags),
        ("the flags of diverged matrices", diverged, diverged_flags),
    ])?;
    batch.check_rows("the parameters", all_values, first)?;
    if batch.is_empty() {
        return Ok(());
    }
    let arguments =
        LaunchArguments { buffers: 1, numbers: 5, shared: 3, address: batch.address_type() };
    for group in launch_groups(client, parameters, arguments, |parameter| parameter.values.shape())
    {
        let all_rows = group.iter().map(|parameter| &parameter.values);
        let grid = RowGrid::new(client, &dtypes, all_rows.clone(), &[]);
        let size = grid.vector_size;
        // SAFETY: every index is below the vectors of a matrix; rows and flags were checked above.
        unsafe {
            apply_kernel::launch_unchecked(
                client,
                grid.cube_count(grid.cubes_per_row),
                CubeDim::new_1d(UNITS),
                batch.address_type(),
                size,
                joined.buffers(all_rows, batch.len(), size),
                batch.vectors(directions, size),
                BufferArg::from_raw_parts(rejected.clone(), flags),
                BufferArg::from_raw_parts(diverged.clone(), diverged_flags),
                grid.first_rows(),
                grid.end_rows(),
                group.iter().map(|parameter| parameter.flag).collect(),
                group.iter().map(|parameter| parameter.decay).collect(),
                group.iter().map(|parameter| parameter.lr).collect(),
                first,
                first_diverged,
                batch.elements / size,
                joined.0,
                dtypes,
            );
        }
        first += grid.rows;
    }
    Ok(())
}

/// The float32 buffers of one value each in which [`apply_and_count`] counts.
#[derive(Debug, Clone, Copy)]
pub struct SkipBuffers<'a> {
    /// The number of steps that left the parameter as it is.
    pub skipped: &'a Handle,
    /// Receives that number after this step.
    pub counted: &'a Handle,
    /// Receives a zero: the flag of a later step.
    pub zero: &'a Handle,
}

/// [`apply`] for one parameter of one matrix, which stays as it is if its `flag` is set. Also
/// counts that in the same launch.
///
/// # Errors
///
/// Those of the [module](super).
pub fn apply_and_count(
    client: &Client,
    values: &Rows,
    direction: &Handle,
    flag: &Handle,
    SkipBuffers { skipped, counted, zero }: SkipBuffers<'_>,
    [decay, lr]: [f32; 2],
    dtypes: [ElemType; 2],
) -> Result<()> {
    let batch = Batch { count: 1, elements: values.len() };
    batch.check(client, &[("the direction", direction, dtypes[1])])?;
    values.check(client, "the parameter", dtypes[0])?;
    Batch::check_f32_buffers(&[
        ("the flag", flag, 1),
        ("the count", skipped, 1),
        ("the new count", counted, 1),
        ("the zero", zero, 1),
    ])?;
    let size = vector_size(client, &dtypes, [batch.elements].into_iter());
    let vectors = batch.elements / size;
    // SAFETY: every buffer was checked to have its elements.
    let number = |handle: &Handle| unsafe { BufferArg::from_raw_parts(handle.clone(), 1) };
    // SAFETY: every index is below the vectors of the matrix.
    unsafe {
        apply_and_count_kernel::launch_unchecked(
            client,
            grid(cubes_per_row(vectors), 1),
            CubeDim::new_1d(UNITS),
            batch.address_type(),
            size,
            values.vectors(size),
            batch.vectors(direction, size),
            number(flag),
            number(skipped),
            number(counted),
            number(zero),
            vectors,
            decay,
            lr,
            dtypes,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn apply_and_count_kernel<F: Float, U: Float, N: Size>(
    parameter: &mut [Vector<F, N>],
    direction: &[Vector<U, N>],
    flag: &[f32],
    skipped: &[f32],
    counted: &mut [f32],
    zero: &mut [f32],
    vectors: usize,
    decay: f32,
    lr: f32,
    #[define(F, U)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS == 0 {
        counted[0] = skipped[0] + flag[0];
        zero[0] = f32::new(0.0);
    }
    // Nothing is written: the parameter keeps its bits, without weight decay.
    if flag[0] != 0.0 {
        terminate!();
    }
    let (first, step) = unit_vectors();
    for i in range_stepped(first, vectors, step) {
        let decayed = Vector::<f32, N>::new(decay) * Vector::cast_from(parameter[i]);
        let step = Vector::<f32, N>::new(lr) * Vector::cast_from(direction[i]);
        parameter[i] = Vector::cast_from(decayed - step);
    }
}

#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
pub(crate) fn apply_kernel<F: Float, U: Float, N: Size>(
    parameters: &mut Sequence<Box<[Vector<F, N>]>>,
    directions: &[Vector<U, N>],
    rejected: &[f32],
    diverged: &[f32],
    first_rows: &Sequence<usize>,
    end_rows: &Sequence<usize>,
    flags: &Sequence<usize>,
    decays: &Sequence<f32>,
    lrs: &Sequence<f32>,
    base: usize,
    first_diverged: usize,
    vectors: usize,
    #[comptime] joined: bool,
    #[define(F, U)] _dtypes: [ElemType; 2],
) {
    let row = cube_row();
    let (index, parameter_row) = locate_row(first_rows, end_rows, row);
    if index >= flags.len() {
        terminate!();
    }
    let matrix = base + row;
    // Nothing is written: the parameter keeps its bits, without weight decay.
    if rejected[number_of(flags, index)] != 0.0 || diverged[first_diverged + matrix] != 0.0 {
        terminate!();
    }
    let decay = Vector::<f32, N>::new(factor_of(decays, index));
    let lr = Vector::<f32, N>::new(factor_of(lrs, index));
    let (first, step) = unit_vectors();
    let (tensor, start) = if comptime!(joined) {
        (0_usize.runtime(), matrix * vectors)
    } else {
        (index, parameter_row * vectors)
    };
    for i in range_stepped(first, vectors, step) {
        let position = start + i;
        let decayed = decay * read(&*parameters, tensor, position);
        let direction = Vector::cast_from(directions[matrix * vectors + i]);
        write(parameters, tensor, position, decayed - lr * direction);
    }
}
