//! The kernel: one cube multiplies one tile, with the components of cubek-matmul.

use core::marker::PhantomData;

use cubecl::prelude::*;
use cubecl::std::tensor::{View, ViewMut};
use cubek_matmul::definition::{MatmulElems, MatmulVectorSizes};
use cubek_matmul::multi_level::args::BatchedCoords;
use cubek_matmul::multi_level::components::batch::SliceIndex;
use cubek_matmul::multi_level::components::global::{
    GlobalConfig, GlobalMatmul, GlobalMatmulFamily,
};
use cubek_matmul::multi_level::definition::{
    AccGE, AccGS, BatchMatmulBlueprint, LhsG, MatmulTypes, RhsG,
};

define_scalar!(pub In);
define_scalar!(pub Out);
define_size!(pub ASize);
define_size!(pub BSize);
define_size!(pub OutSize);

use super::grid::{Triangle, cube_tile};
use super::output::{Output, Unchanged};

/// The operands of the product `C = alpha A B + beta D` of a batch.
#[derive(CubeType, CubeLaunch)]
pub struct Operands<A: CubePrimitive, B: CubePrimitive, O: Numeric, N: Size> {
    a: View<'static, A, BatchedCoords>,
    b: View<'static, B, BatchedCoords>,
    addend: ComptimeOption<View<'static, Vector<O, N>, BatchedCoords>>,
    result: ViewMut<'static, Vector<O, N>, BatchedCoords>,
    elements: ViewMut<'static, O, BatchedCoords>,
    // The distances between the matrices of `A`, `B`, `D` and `C`.
    a_stride: usize,
    b_stride: usize,
    addend_stride: usize,
    result_stride: usize,
    alpha: f32,
    beta: f32,
}

/// Multiplies the tile of this cube by the family `G`, the only part that depends on matrix units:
/// one of cubek-matmul's, or another implementation of the same trait.
#[cube(launch_unchecked, create_dummy_kernel, explicit_define, address_type = "dynamic")]
pub fn product_kernel<
    I: Numeric,
    AN: Size,
    BN: Size,
    O: Numeric,
    N: Size,
    G: GlobalMatmulFamily<()>,
>(
    operands: &Operands<Vector<I, AN>, Vector<I, BN>, O, N>,
    #[comptime] blueprint: BatchMatmulBlueprint,
    #[comptime] dtypes: MatmulElems,
    #[comptime] triangle: Triangle,
    #[define(I, O)] _types: [ElemType; 2],
    #[define(AN, BN, N)] _sizes: [usize; 3],
) {
    let (a_size, b_size) = (operands.a.vector_size(), operands.b.vector_size());
    let out_size = operands.result.vector_size();
    let vector_sizes = comptime!(MatmulVectorSizes { lhs: a_size, rhs: b_size, out: out_size });
    let properties = comptime::device_properties();
    let config = comptime!(G::expand_config(&properties, &blueprint, &dtypes, &vector_sizes));
    // A kernel can't return an error while it is made: CubeCL collects this one.
    if comptime!(config.is_err()) {
        push_validation_error(config.err().unwrap().to_string());
        comptime!(return);
    }
    let config = comptime!(config.unwrap());

    let lhs = config.stage_config().lhs_smem_config();
    let rhs = config.stage_config().rhs_smem_config();
    let acc = config.stage_config().acc_smem_config();
    let define!(LhsStage) = lhs.dtype;
    let size!(LhsN) = comptime![lhs.vector_size as usize];
    let define!(LhsRegister) = dtypes.lhs_register;
    let define!(RhsStage) = rhs.dtype;
    let size!(RhsN) = comptime![rhs.vector_size as usize];
    let define!(RhsRegister) = dtypes.rhs_register;
    let define!(AccStage) = acc.dtype;
    let size!(AccN) = comptime![acc.vector_size as usize];
    let define!(AccRegister) = dtypes.acc_register;

    multiply_tile::<
        (
            (I, AN, LhsStage, LhsN, LhsRegister, LhsN),
            (I, BN, RhsStage, RhsN, RhsRegister, RhsN),
            (f32, N, AccStage, AccN, AccRegister, AccN),
        ),
        G::Matmul<(
            (I, AN, LhsStage, LhsN, LhsRegister, LhsN),
            (I, BN, RhsStage, RhsN, RhsRegister, RhsN),
            (f32, N, AccStage, AccN, AccRegister, AccN),
        )>,
        O,
    >(operands, triangle, config);
}

/// Computes `C = alpha A B + beta D` for the tile of this cube.
#[cube]
fn multiply_tile<MP: MatmulTypes, M: GlobalMatmul<(), MP>, O: Numeric>(
    operands: &Operands<LhsG<MP>, RhsG<MP>, O, AccGS<MP>>,
    #[comptime] triangle: Triangle,
    #[comptime] config: M::Config,
) {
    let height = config.stage_config().elements_in_stage_m().runtime();
    let width = config.stage_config().elements_in_stage_n().runtime();
    let (_, m, inner) = operands.a.shape();
    // Tiles of a triangle are square, so the rows of tiles are its columns as well.
    let (tile_row, tile_column) = cube_tile(m.div_ceil(height), triangle);
    let row = tile_row * height;
    let column = tile_column * width;
    let matrix = CUBE_POS_Z as usize;

    let a = operands.a.view(SliceIndex::new(matrix * operands.a_stride, operands.a.shape()));
    let b = operands.b.view(SliceIndex::new(matrix * operands.b_stride, operands.b.shape()));
    let shape = operands.result.shape();
    let output = output_view::<LhsG<MP>, RhsG<MP>, O, AccGE<MP>, AccGS<MP>>(operands, triangle);
    let output =
        ViewMut::new::<Output<O, AccGE<MP>, AccGS<MP>>, BatchedCoords>(output, Unchanged { shape });
    let output = output.view_mut(SliceIndex::new(matrix * operands.result_stride, shape));

    M::execute(
        M::init_lhs_global_reader(a.slice_unchecked((row, 0), (height, inner)), (), config),
        M::init_rhs_global_reader(b.slice_unchecked((0, column), (inner, width)), (), config),
        // The addend is no accumulator: `Output` adds it after the scaling, in float32.
        M::init_acc_global_reader(ComptimeOption::new_None(), (), config),
        M::init_global_writer(output.slice_mut_unchecked((row, column), (height, width)), config),
        // All of the inner dimension: a product is never divided along it.
        (0, inner),
        config,
    );
}

#[cube]
fn output_view<A: CubePrimitive, B: CubePrimitive, O: Numeric, P: Numeric, N: Size>(
    operands: &Operands<A, B, O, N>,
    #[comptime] triangle: Triangle,
) -> Output<O, P, N> {
    Output::<O, P, N> {
        result: operands.result,
        elements: operands.elements,
        addend: operands.addend,
        addend_offset: CUBE_POS_Z as usize * operands.addend_stride,
        alpha: operands.alpha,
        beta: operands.beta,
        triangle,
        _product: PhantomData,
    }
}
