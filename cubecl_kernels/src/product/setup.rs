//! The launch parameters of a product with a tiling.

use cubecl::client::Client;
use cubecl::ir::{AddressType, DeviceProperties};
use cubecl::prelude::*;
use cubecl::std::tensor::launch::ViewArg;
use cubecl::zspace::{Shape, Strides};
use cubek_matmul::definition::{
    MatmulAvailabilityError, MatmulElems, MatmulProblem, MatmulSetupError, MatmulVectorSizes,
};
use cubek_matmul::multi_level::args::BatchedCoords;
use cubek_matmul::multi_level::components::batch::{
    BatchMatmulFamily, PartitionedBatchMatmulFamily, RowMajorGlobalPartitionMatmul,
};
use cubek_matmul::multi_level::components::global::memory::{
    GlobalLayout, GlobalLayoutConfig, GlobalLayoutLaunch,
};
use cubek_matmul::multi_level::components::global::multi_stage::double_buffering::DoubleBufferingMatmulFamily;
use cubek_matmul::multi_level::components::global::read::sync_full_cyclic::SyncFullCyclicLoading;
use cubek_matmul::multi_level::components::global::read::sync_partial_cyclic::SyncPartialCyclicLoading;
use cubek_matmul::multi_level::components::global::single_stage::simple::SimpleMatmulFamily;
use cubek_matmul::multi_level::components::global::{
    GlobalMatmulFamily, PlaneWriterFamily, UnitWriterFamily,
};
use cubek_matmul::multi_level::components::stage::{PlanePartitioner, UnitPartitioner};
use cubek_matmul::multi_level::definition::{BatchMatmulBlueprint, Blueprint};
use cubek_matmul::multi_level::routines::select_swizzle;
use cubek_matmul::multi_level::stage::SwizzleModes;
use cubek_matmul::multi_level::tile::{ColMajorTilingOrder, RowMajorTilingOrder};
use cubek_std::MatrixLayout;

use super::Product;
use super::kernel::OperandsLaunch;
use super::tiling::{self, Tiling, Unit};
use crate::matrices::Matrices;

fn view(
    matrices: &Matrices,
    vector_size: usize,
    config: GlobalLayoutConfig,
) -> ViewArg<BatchedCoords> {
    // SAFETY: a launch has checked the buffers; without a launch nothing is read or written.
    let binding = unsafe { matrices.binding() };
    let layout = GlobalLayoutLaunch::from_handle(&binding, vector_size, config);
    ViewArg::new_tensor::<GlobalLayout>(binding.into_tensor_arg(), layout)
}

/// The parameters of a launch in addition to its buffers.
pub(super) struct Setup {
    pub problem: MatmulProblem,
    pub blueprint: BatchMatmulBlueprint,
    pub types: MatmulElems,
    pub sizes: MatmulVectorSizes,
    pub cube_dim: CubeDim,
}

impl Setup {
    pub fn new<G: GlobalMatmulFamily<()>>(
        product: &Product<'_>,
        tiling: &Tiling,
        result: &Matrices,
        sizes: MatmulVectorSizes,
        properties: &DeviceProperties,
    ) -> Result<Self, MatmulSetupError> {
        let types = tiling::types(tiling.unit, product.a.dtype, properties);
        let operands = [product.a, product.b, result];
        let [a, b, c] = operands.map(|operand| Shape::new(operand.shape));
        let [a_strides, b_strides, c_strides] =
            operands.map(|operand| Strides::new(&operand.strides));
        let problem = MatmulProblem::from_shapes_and_strides(
            a,
            b,
            c,
            a_strides,
            b_strides,
            c_strides,
            types.as_global_elems(),
            AddressType::from_len(product.extent(result)),
            None,
            None,
        )?;
        let plane = properties.hardware.plane_size_max;
        let scheme = tiling.scheme();
        let mut blueprint = BatchMatmulBlueprint::builder(tiling.kind(), scheme, plane, &problem)
            .partition_buffering(tiling.partition_buffering())
            .stage_buffering(G::num_stages().stage_buffering());
        // The instructions of `Cmma` load whole tiles by themselves, which a swizzled layout would
        // mix up.
        if properties.features.alignment && tiling.unit != Unit::Cmma {
            blueprint = blueprint.shared_swizzle(swizzles(&problem, tiling, &types, &sizes));
        }
        let blueprint = blueprint.build();
        let resource = G::cubedim_resource(&blueprint, &types, &sizes)?;
        let cube_dim = resource.to_cube_dim(plane)?;
        Ok(Self { problem, blueprint, types, sizes, cube_dim })
    }

    /// Returns the operands of the launch.
    pub fn operands<A: CubePrimitive, B: CubePrimitive, O: Numeric, N: Size>(
        &self,
        product: &Product<'_>,
        result: &Matrices,
    ) -> OperandsLaunch<A, B, O, N> {
        let sizes = &self.sizes;
        let out = self.blueprint.out_global_layout_config();
        let addend = match product.addend {
            Some((addend, _)) => ComptimeOptionArgs::Some(view(addend, sizes.out, out)),
            None => ComptimeOptionArgs::None,
        };
        let (addend_stride, beta) =
            product.addend.map_or((0, 0.0), |(d, beta)| (d.strides[0], beta));
        OperandsLaunch::new(
            view(product.a, sizes.lhs, self.blueprint.lhs_global_layout_config()),
            view(product.b, sizes.rhs, self.blueprint.rhs_global_layout_config()),
            addend,
            view(result, sizes.out, out),
            // The same buffer, in which mirror images are written element by element.
            view(result, 1, out),
            product.a.strides[0],
            product.b.strides[0],
            addend_stride,
            result.strides[0],
            product.alpha,
            beta,
        )
    }

    /// Checks that the device has everything that the components need.
    pub fn validated<G: GlobalMatmulFamily<()>>(
        self,
        client: &Client,
    ) -> Result<Self, MatmulSetupError> {
        type Family<G> = PartitionedBatchMatmulFamily<(), G, RowMajorGlobalPartitionMatmul>;
        let Self { problem, blueprint, types, sizes, cube_dim } = &self;
        <Family<G> as BatchMatmulFamily<()>>::validate_blueprint(
            client, blueprint, problem, types, sizes,
        )?;
        let max_units = client.properties().hardware.max_units_per_cube;
        if cube_dim.num_elems() > max_units {
            let error = MatmulAvailabilityError::CubeDimTooBig(*cube_dim);
            return Err(MatmulSetupError::Unavailable(error));
        }
        Ok(self)
    }
}

/// Returns permutations of the stages in shared memory that spread their rows over its banks.
fn swizzles(
    problem: &MatmulProblem,
    tiling: &Tiling,
    types: &MatmulElems,
    sizes: &MatmulVectorSizes,
) -> SwizzleModes {
    let [rows, columns] = tiling.side();
    let depth = tiling.depth() as usize;
    let lhs = if problem.lhs_layout == MatrixLayout::RowMajor { depth } else { rows };
    let rhs = if problem.rhs_layout == MatrixLayout::RowMajor { columns } else { depth };
    SwizzleModes {
        lhs: select_swizzle(lhs, types.lhs_stage, sizes.lhs),
        rhs: select_swizzle(rhs, types.rhs_stage, sizes.rhs),
        ..Default::default()
    }
}

/// Plain arithmetic, one stage.
pub(super) type UnitFamily = SimpleMatmulFamily<
    UnitPartitioner,
    (),
    SyncFullCyclicLoading<ColMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    UnitWriterFamily,
>;

/// Matrix units, one stage.
pub(super) type PlaneFamily = SimpleMatmulFamily<
    PlanePartitioner,
    (),
    SyncFullCyclicLoading<ColMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    PlaneWriterFamily,
>;

/// Matrix units, two stages.
pub(super) type DoubleBufferedPlaneFamily = DoubleBufferingMatmulFamily<
    PlanePartitioner,
    (),
    SyncPartialCyclicLoading<RowMajorTilingOrder>,
    SyncPartialCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    PlaneWriterFamily,
>;
