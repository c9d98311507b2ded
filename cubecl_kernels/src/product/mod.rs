//! Products of matrices with an epilogue, of which a symmetric one computes only half.
//!
//! [`product`] computes `C = alpha A B + beta D` for every matrix of a batch; with [`Triangle::Lower`]
//! only the tiles on and below the diagonal are multiplied, and their mirror images stored with them.
//! That serves every symmetric product of Newton-Schulz: `X X^T`, `b R + c R^2`, `Q Z + a Q` and
//! `Z (R Z) + a R Z`. Products are summed in float32, scaled and added to in float32, and rounded
//! once.

mod grid;
mod kernel;
mod output;
mod tiling;

pub use grid::Triangle;
pub use tiling::{Buffering, Tiling, Unit};

#[cfg(test)]
use std::sync::Arc;

use cubecl::client::Client;
use cubecl::features::TypeUsage;
#[cfg(test)]
use cubecl::ir::TargetProperties;
use cubecl::ir::{AddressType, DeviceProperties, ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::std::tensor::launch::ViewArg;
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

use crate::error::{Error, Result};
use crate::matrices::Matrices;
use kernel::{ASize, BSize, In, OperandsLaunch, Out, OutSize, product_kernel};

/// `C = alpha A B + beta D`, for every matrix of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// `A`, `[k, m, inner]`.
    pub a: &'a Matrices,
    /// `B`, `[k, inner, n]`.
    pub b: &'a Matrices,
    /// The factor of the product.
    pub alpha: f32,
    /// `D` and its factor, `[k, m, n]`. Of a symmetric `D`, only the lower triangle is read.
    pub addend: Option<(&'a Matrices, f32)>,
    /// [`Triangle::Lower`] if the result is known to be symmetric.
    pub triangle: Triangle,
}

impl Product<'_> {
    /// `[k, m, n]` of the result.
    pub fn shape(&self) -> [usize; 3] {
        [self.a.shape[0], self.a.shape[1], self.b.shape[2]]
    }

    fn inner(&self) -> usize {
        self.a.shape[2]
    }

    /// Refuses what no kernel can do.
    fn check(&self, client: &Client, result: &Matrices) -> Result<()> {
        let dtype = self.a.dtype;
        if !client
            .properties()
            .type_usage(dtype)
            .is_superset(TypeUsage::Buffer | TypeUsage::Conversion)
        {
            return Err(Error::Dtype(dtype));
        }
        let shape = self.shape();
        let [k, m, n] = shape;
        let like = |what, found: &Matrices, expected: [usize; 3]| {
            if found.shape != expected || found.dtype != dtype {
                let expected = format!("{expected:?} of {dtype:?}");
                return Err(Error::Shape { what, found: found.shape, expected });
            }
            let lines = found.has_contiguous_lines();
            if lines { Ok(()) } else { Err(Error::Strides(what)) }
        };
        if self.inner() == 0 {
            let expected = "not empty along the inner dimension".to_owned();
            return Err(Error::Shape { what: "A", found: self.a.shape, expected });
        }
        like("A", self.a, [k, m, self.inner()])?;
        like("B", self.b, [k, self.inner(), n])?;
        if let Some((addend, _)) = self.addend {
            like("D", addend, shape)?;
        }
        like("C", result, shape)?;
        if self.triangle == Triangle::Lower && m != n {
            let expected = "square, since it is symmetric".to_owned();
            return Err(Error::Shape { what: "C", found: shape, expected });
        }
        let most = client.properties().hardware.max_cube_count.2 as usize;
        if k > most {
            return Err(Error::TooMany { count: k, most });
        }
        Ok(())
    }

    /// The tiling that suits the product: matrix units before plain arithmetic, and the largest tiles
    /// that still keep the device busy.
    ///
    /// # Errors
    ///
    /// Those of [`launch_into`](Self::launch_into).
    pub fn tiling(&self, client: &Client) -> Result<Tiling> {
        let candidates = Tiling::candidates(client, self.a.dtype);
        let result = Matrices { shape: self.shape(), ..self.a.clone() }.made_contiguous();
        let unit = candidates.first().map(|tiling| tiling.unit);
        let best = candidates.iter().filter(|tiling| Some(tiling.unit) == unit);
        let mut order: Vec<_> = best.collect();
        order.sort_by_key(|tiling| !tiling.fills(client, self.triangle, self.shape()));
        if !order[0].fills(client, self.triangle, self.shape()) {
            order.reverse();
        }
        self.check(client, &result)?;
        let others = candidates.iter().filter(|tiling| Some(tiling.unit) != unit);
        let mut refusal = None;
        for tiling in order.into_iter().chain(others) {
            match self.validate(client, tiling, &result) {
                Ok(()) => return Ok(*tiling),
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.unwrap_or(Error::Dtype(self.a.dtype)))
    }

    /// Computes the product with a tiling.
    ///
    /// # Errors
    ///
    /// Those of [`launch_into`](Self::launch_into).
    pub fn launch(&self, client: &Client, tiling: &Tiling) -> Result<Matrices> {
        let result = Matrices::empty(client, self.a.dtype, self.shape());
        self.launch_into(client, tiling, &result)?;
        Ok(result)
    }

    /// Computes the product with a tiling, into matrices that are there already. What they held
    /// before is not read.
    ///
    /// # Errors
    ///
    /// Before anything is launched: [`Error::Dtype`], [`Error::Shape`], [`Error::Strides`] and
    /// [`Error::TooMany`] for operands that do not go together or not on this device;
    /// [`Error::Refused`] for a tiling that the device can't run.
    pub fn launch_into(&self, client: &Client, tiling: &Tiling, result: &Matrices) -> Result<()> {
        self.check(client, result)?;
        if result.extent() == 0 {
            return Ok(());
        }
        match (tiling.unit, tiling.buffering) {
            (Unit::Registers, _) => self.launch_on::<OnUnits>(client, tiling, result),
            (_, Buffering::Single) => self.launch_on::<OnPlanes>(client, tiling, result),
            (_, Buffering::Double) => self.launch_on::<OnPlanesTwice>(client, tiling, result),
        }
    }

    fn validate(&self, client: &Client, tiling: &Tiling, result: &Matrices) -> Result<()> {
        match (tiling.unit, tiling.buffering) {
            (Unit::Registers, _) => self.setup::<OnUnits>(client, tiling, result).map(drop),
            (_, Buffering::Single) => self.setup::<OnPlanes>(client, tiling, result).map(drop),
            (_, Buffering::Double) => self.setup::<OnPlanesTwice>(client, tiling, result).map(drop),
        }
    }

    fn setup<G: GlobalMatmulFamily<()>>(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> Result<Setup> {
        let sizes = self.vector_sizes(client, tiling, result);
        let setup = Setup::new::<G>(self, tiling, result, sizes, client.properties());
        setup.and_then(|setup| setup.validated::<G>(client)).map_err(|error| Error::Refused {
            kernel: tiling.to_string(),
            reason: error.to_string(),
        })
    }

    fn launch_on<G: GlobalMatmulFamily<()>>(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> Result<()> {
        let setup = self.setup::<G>(client, tiling, result)?;
        let operands = self.operands(result, &setup);
        let [rows, columns] = tiling.side();
        let [batch, m, n] = result.shape;
        let cubes = self.triangle.cube_count(m.div_ceil(rows), n.div_ceil(columns), batch);
        // SAFETY: the readers check bounds wherever tiles do not divide the matrices, the output
        // everywhere.
        unsafe {
            product_kernel::launch_unchecked::<In, ASize, BSize, Out, OutSize, G>(
                client,
                cubes,
                setup.cube_dim,
                setup.problem.address_type,
                operands,
                setup.blueprint,
                setup.types,
                self.triangle,
                [self.a.dtype, result.dtype],
                [setup.sizes.lhs, setup.sizes.rhs, setup.sizes.out],
            );
        }
        Ok(())
    }

    /// The kernel that would run on a device, and the units of a cube.
    #[cfg(test)]
    pub(crate) fn definition(
        &self,
        tiling: &Tiling,
        properties: &Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> (KernelDefinition, usize) {
        match (tiling.unit, tiling.buffering) {
            (Unit::Registers, _) => self.define::<OnUnits>(tiling, properties, target),
            (_, Buffering::Single) => self.define::<OnPlanes>(tiling, properties, target),
            (_, Buffering::Double) => self.define::<OnPlanesTwice>(tiling, properties, target),
        }
    }

    #[cfg(test)]
    fn define<G: GlobalMatmulFamily<()>>(
        &self,
        tiling: &Tiling,
        properties: &Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> (KernelDefinition, usize) {
        let result = Matrices { shape: self.shape(), ..self.a.clone() }.made_contiguous();
        let vector = 16 / self.a.dtype.size();
        let [_, _, depth] = tiling.tile.map(|x| x as usize);
        let sizes =
            MatmulVectorSizes { lhs: vector.min(depth), rhs: vector.min(depth), out: LONGEST_SUMS };
        let setup = Setup::new::<G>(self, tiling, &result, sizes, properties).unwrap();
        let operands = self.operands(&result, &setup);
        let kernel = product_kernel::create_dummy_kernel::<In, ASize, BSize, Out, OutSize, G>(
            properties.clone(),
            target,
            CubeCount::Static(1, 1, 1),
            setup.cube_dim,
            setup.problem.address_type,
            operands,
            setup.blueprint,
            setup.types,
            self.triangle,
            [self.a.dtype, result.dtype],
            [sizes.lhs, sizes.rhs, sizes.out],
        );
        let definition = cubecl_core::define_kernel(&kernel);
        let definition = definition.unwrap_or_else(|error| panic!("{tiling}: {error:?}"));
        (definition, setup.cube_dim.num_elems() as usize)
    }

    /// The longest vectors that the operands can be read and written in, and that divide the tiles.
    fn vector_sizes(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> MatmulVectorSizes {
        let [m, n, k] = tiling.tile.map(|x| x as usize);
        let of = |matrices: &Matrices, rows: usize, columns: usize| {
            let line = if matrices.line_axis() == 2 { columns } else { rows };
            matrices.vector_size(client).min(line)
        };
        let addend = self.addend.map_or(n, |(addend, _)| match addend.line_axis() {
            2 => addend.vector_size(client),
            _ => 1,
        });
        MatmulVectorSizes {
            lhs: of(self.a, m, k),
            rhs: of(self.b, k, n),
            out: of(result, m, n).min(addend).min(LONGEST_SUMS),
        }
    }

    fn operands<A: CubePrimitive, B: CubePrimitive, O: Numeric, N: Size>(
        &self,
        result: &Matrices,
        setup: &Setup,
    ) -> OperandsLaunch<A, B, O, N> {
        let sizes = &setup.sizes;
        let out = setup.blueprint.out_global_layout_config();
        let addend = match self.addend {
            Some((addend, _)) => ComptimeOptionArgs::Some(view(addend, sizes.out, out)),
            None => ComptimeOptionArgs::None,
        };
        let (addend_stride, beta) = self.addend.map_or((0, 0.0), |(d, beta)| (d.strides[0], beta));
        OperandsLaunch::new(
            view(self.a, sizes.lhs, setup.blueprint.lhs_global_layout_config()),
            view(self.b, sizes.rhs, setup.blueprint.rhs_global_layout_config()),
            addend,
            view(result, sizes.out, out),
            view(result, 1, out),
            self.a.strides[0],
            self.b.strides[0],
            addend_stride,
            result.strides[0],
            self.alpha,
            beta,
        )
    }
}

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

/// float32 sums that go through shared memory in one vector, of 16 bytes.
const LONGEST_SUMS: usize = 4;

fn view(
    matrices: &Matrices,
    vector_size: usize,
    config: GlobalLayoutConfig,
) -> ViewArg<BatchedCoords> {
    let binding = matrices.binding();
    let layout = GlobalLayoutLaunch::from_handle(&binding, vector_size, config);
    ViewArg::new_tensor::<GlobalLayout>(binding.into_tensor_arg(), layout)
}

/// A tiling, worked out for a product on a device.
struct Setup {
    problem: MatmulProblem,
    blueprint: BatchMatmulBlueprint,
    types: MatmulElems,
    sizes: MatmulVectorSizes,
    cube_dim: CubeDim,
}

impl Setup {
    fn new<G: GlobalMatmulFamily<()>>(
        product: &Product<'_>,
        tiling: &Tiling,
        result: &Matrices,
        sizes: MatmulVectorSizes,
        properties: &DeviceProperties,
    ) -> Result<Self, MatmulSetupError> {
        let types = tiling::types(tiling.unit, product.a.dtype, properties);
        let [a, b, c] = [product.a, product.b, result].map(Matrices::binding);
        let operands = [product.a, product.b, result].into_iter();
        let extents =
            operands.chain(product.addend.map(|(addend, _)| addend)).map(Matrices::extent);
        let problem = MatmulProblem::from_shapes_and_strides(
            a.shape,
            b.shape,
            c.shape,
            a.strides,
            b.strides,
            c.strides,
            types.as_global_elems(),
            AddressType::from_len(extents.max().unwrap_or(0)),
            None,
            None,
        )?;
        let plane = properties.hardware.plane_size_max;
        let scheme = tiling.scheme();
        let mut blueprint = BatchMatmulBlueprint::builder(tiling.kind(), scheme, plane, &problem)
            .partition_buffering(tiling.partition_buffering())
            .stage_buffering(G::num_stages().stage_buffering());
        if properties.features.alignment && tiling.unit != Unit::Cmma {
            blueprint = blueprint.shared_swizzle(swizzles(&problem, tiling, &types, &sizes));
        }
        let blueprint = blueprint.build();
        let resource = G::cubedim_resource(&blueprint, &types, &sizes)?;
        let cube_dim = resource.to_cube_dim(plane)?;
        Ok(Self { problem, blueprint, types, sizes, cube_dim })
    }

    /// Asks the components whether the device has what they need.
    fn validated<G: GlobalMatmulFamily<()>>(
        self,
        client: &Client,
    ) -> Result<Self, MatmulSetupError> {
        type Family<G> = PartitionedBatchMatmulFamily<(), G, RowMajorGlobalPartitionMatmul>;
        let Self { problem, blueprint, types, sizes, cube_dim } = &self;
        <Family<G> as BatchMatmulFamily<()>>::validate_blueprint(
            client, blueprint, problem, types, sizes,
        )?;
        let most = client.properties().hardware.max_units_per_cube;
        if cube_dim.num_elems() > most {
            let error = MatmulAvailabilityError::CubeDimTooBig(*cube_dim);
            return Err(MatmulSetupError::Unavailable(error));
        }
        Ok(self)
    }
}

/// Permutations of the stages in shared memory that spread their rows over its banks.
fn swizzles(
    problem: &MatmulProblem,
    tiling: &Tiling,
    types: &MatmulElems,
    sizes: &MatmulVectorSizes,
) -> SwizzleModes {
    let ([rows, columns], depth) = (tiling.side(), tiling.depth() as usize);
    let lhs = if problem.lhs_layout == MatrixLayout::RowMajor { depth } else { rows };
    let rhs = if problem.rhs_layout == MatrixLayout::RowMajor { columns } else { depth };
    SwizzleModes {
        lhs: select_swizzle(lhs, types.lhs_stage, sizes.lhs),
        rhs: select_swizzle(rhs, types.rhs_stage, sizes.rhs),
        ..Default::default()
    }
}

/// Plain arithmetic, one stage.
type OnUnits = SimpleMatmulFamily<
    UnitPartitioner,
    (),
    SyncFullCyclicLoading<ColMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    UnitWriterFamily,
>;

/// Matrix units, one stage.
type OnPlanes = SimpleMatmulFamily<
    PlanePartitioner,
    (),
    SyncFullCyclicLoading<ColMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    PlaneWriterFamily,
>;

/// Matrix units, two stages.
type OnPlanesTwice = DoubleBufferingMatmulFamily<
    PlanePartitioner,
    (),
    SyncPartialCyclicLoading<RowMajorTilingOrder>,
    SyncPartialCyclicLoading<RowMajorTilingOrder>,
    SyncFullCyclicLoading<RowMajorTilingOrder>,
    PlaneWriterFamily,
>;
