//! Products of matrices plus a scaled addend; of a symmetric product, only half is computed.
//!
//! A [`Product`] is `C = alpha A B + beta D` for every matrix of a batch. With [`Triangle::Lower`],
//! only the tiles on and below the diagonal are multiplied, and stored together with their mirror
//! images. All symmetric products of Newton-Schulz have this form: `X X^T`, `b R + c R^2`,
//! `Q Z + a Q` and `Z (R Z) + a R Z`. Products are summed in float32, scaled and added to in
//! float32, and rounded once.

mod choice;
mod grid;
mod kernel;
mod output;
mod self_test;
mod setup;
mod tiling;

pub use grid::Triangle;
pub use tiling::{Buffering, Tiling, Unit};

#[cfg(test)]
use std::sync::Arc;

use cubecl::client::Client;
#[cfg(test)]
use cubecl::ir::{DeviceProperties, TargetProperties};
#[cfg(test)]
use cubecl::prelude::{CubeCount, KernelDefinition};
use cubek_matmul::definition::MatmulVectorSizes;
use cubek_matmul::multi_level::components::global::GlobalMatmulFamily;

use crate::error::{Error, Result, check_addresses, check_buffer, check_count, check_dtype};
use crate::matrices::Matrices;
use kernel::{ASize, BSize, In, Out, OutSize, product_kernel};
use setup::{DoubleBufferedPlaneFamily, PlaneFamily, Setup, UnitFamily};

/// Length of the longest vectors in which float32 sums go through shared memory: 16 bytes.
const MAX_SUMS: usize = 4;

/// Calls a method with the family that multiplies the tiles of a tiling. This is the only place
/// that names all families.
macro_rules! by_family {
    ($tiling:expr, $product:expr, $method:ident($($argument:expr),*)) => {
        match ($tiling.unit, $tiling.buffering) {
            (Unit::Registers, _) => $product.$method::<UnitFamily>($($argument),*),
            (_, Buffering::Single) => $product.$method::<PlaneFamily>($($argument),*),
            (_, Buffering::Double) => $product.$method::<DoubleBufferedPlaneFamily>($($argument),*),
        }
    };
}

/// The product `C = alpha A B + beta D` for every matrix of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// `A`, `[k, m, inner]`.
    pub a: &'a Matrices,
    /// `B`, `[k, inner, n]`.
    pub b: &'a Matrices,
    /// The factor of the product.
    pub alpha: f32,
    /// `D`, `[k, m, n]`, and its factor. Only the lower triangle of a symmetric `D` is read.
    pub addend: Option<(&'a Matrices, f32)>,
    /// [`Triangle::Lower`] if the result is known to be symmetric.
    pub triangle: Triangle,
}

impl Product<'_> {
    /// Returns the shape `[k, m, n]` of the result.
    pub fn shape(&self) -> [usize; 3] {
        [self.a.shape[0], self.a.shape[1], self.b.shape[2]]
    }

    fn inner(&self) -> usize {
        self.a.shape[2]
    }

    /// Returns the extent of the largest operand.
    fn extent(&self, result: &Matrices) -> usize {
        let operands = [self.a, self.b, result].into_iter();
        let extents = operands.chain(self.addend.map(|(addend, _)| addend)).map(Matrices::extent);
        extents.max().unwrap_or(0)
    }

    /// Checks that the operands fit together, and that the device can address and allocate them.
    fn check(&self, client: &Client, result: &Matrices) -> Result<()> {
        let dtype = self.a.dtype;
        check_dtype(client, dtype)?;
        let shape = self.shape();
        let [k, m, n] = shape;
        if self.inner() == 0 {
            let expected = "a non-empty inner dimension".to_owned();
            let actual = format!("{:?}", self.a.shape);
            return Err(Error::Shape { operand: "A", expected, actual });
        }
        let check_operand = |operand, matrices: &Matrices, expected: [usize; 3]| {
            matrices.check_like(operand, expected, dtype)?;
            matrices.check_lines(operand)
        };
        check_operand("A", self.a, [k, m, self.inner()])?;
        check_operand("B", self.b, [k, self.inner(), n])?;
        if let Some((addend, _)) = self.addend {
            check_operand("D", addend, shape)?;
        }
        check_operand("C", result, shape)?;
        if self.triangle == Triangle::Lower {
            result.check_square("C")?;
        }
        check_addresses(client, self.extent(result))?;
        let bytes = shape.iter().product::<usize>() as u64 * dtype.size() as u64;
        let max = client.properties().memory.max_page_size;
        if bytes > max {
            return Err(Error::Memory { bytes, max });
        }
        check_count(k, client.properties().hardware.max_cube_count.2)
    }

    /// Returns the tiling that suits the product best, of those that the device runs.
    ///
    /// The tiling uses the first unit among the [candidates](Tiling::candidates), and gives all
    /// multiprocessors about the same amount of work. The first product of a layout may wait for
    /// the device, on which the tiling has to be [verified](Tiling::verify).
    ///
    /// # Errors
    ///
    /// Those of [`launch_into`](Self::launch_into) and of [`Tiling::verify`].
    pub fn tiling(&self, client: &Client) -> Result<Tiling> {
        self.check(client, &self.unallocated_result())?;
        Ok(self.choice(client)?.tiling)
    }

    /// Computes the product with the [tiling](Self::tiling) that suits it best.
    ///
    /// # Errors
    ///
    /// Those of [`tiling`](Self::tiling).
    pub fn compute(&self, client: &Client) -> Result<Matrices> {
        self.check(client, &self.unallocated_result())?;
        let choice = self.choice(client)?;
        let result = Matrices::empty(client, self.a.dtype, self.shape());
        self.check_buffers(&result)?;
        if result.extent() > 0 {
            self.launch_set_up(client, &choice.tiling, &choice.setup, &result);
        }
        Ok(result)
    }

    /// Computes the product with a tiling.
    ///
    /// # Errors
    ///
    /// Those of [`launch_into`](Self::launch_into).
    pub fn launch(&self, client: &Client, tiling: &Tiling) -> Result<Matrices> {
        // Before the allocation, which may be too large.
        self.check(client, &self.unallocated_result())?;
        let result = Matrices::empty(client, self.a.dtype, self.shape());
        self.launch_checked(client, tiling, &result)?;
        Ok(result)
    }

    /// Computes the product with a tiling, into existing matrices. Their previous values are not
    /// read.
    ///
    /// # Errors
    ///
    /// Before anything is launched:
    ///
    /// - [`Error::Dtype`], [`Error::Shape`], [`Error::Strides`], [`Error::Buffer`],
    ///   [`Error::TooMany`], [`Error::TooLarge`] and [`Error::Memory`] for operands that do not fit
    ///   together, or not on this device;
    /// - [`Error::Unsupported`] for a tiling that the device can't run.
    pub fn launch_into(&self, client: &Client, tiling: &Tiling, result: &Matrices) -> Result<()> {
        self.check(client, result)?;
        self.launch_checked(client, tiling, result)
    }

    /// Sets up and launches a product whose shapes and layouts were checked.
    fn launch_checked(&self, client: &Client, tiling: &Tiling, result: &Matrices) -> Result<()> {
        self.check_buffers(result)?;
        if result.extent() > 0 {
            let setup = self.validated_setup(client, tiling, result)?;
            self.launch_set_up(client, tiling, &setup, result);
        }
        Ok(())
    }

    /// Launches a product whose operands were checked, with a set-up for their layouts.
    fn launch_set_up(&self, client: &Client, tiling: &Tiling, setup: &Setup, result: &Matrices) {
        by_family!(tiling, self, launch_on(client, tiling, setup, result));
    }

    /// Checks that the buffers have room for the operands.
    fn check_buffers(&self, result: &Matrices) -> Result<()> {
        let addend = self.addend.map(|(addend, _)| ("D", addend));
        let operands = [("A", self.a), ("B", self.b), ("C", result)].into_iter().chain(addend);
        for (name, operand) in operands {
            check_buffer(name, &operand.handle, operand.extent(), operand.dtype)?;
        }
        Ok(())
    }

    /// Returns the layout of the result. Its buffer is that of an operand, and must not be written.
    fn unallocated_result(&self) -> Matrices {
        Matrices { shape: self.shape(), ..self.a.clone() }.with_contiguous_strides()
    }

    /// Returns the set-up for a tiling, or an error if the device does not run it.
    fn validated_setup(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> Result<Setup> {
        by_family!(tiling, self, setup(client, tiling, result))
    }

    fn setup<G: GlobalMatmulFamily<()>>(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> Result<Setup> {
        let sizes = self.vector_sizes(client, tiling, result);
        let setup = Setup::new::<G>(self, tiling, result, sizes, client.properties());
        setup.and_then(|setup| setup.validated::<G>(client)).map_err(|error| Error::Unsupported {
            kernel: tiling.to_string(),
            reason: error.to_string(),
        })
    }

    fn launch_on<G: GlobalMatmulFamily<()>>(
        &self,
        client: &Client,
        tiling: &Tiling,
        setup: &Setup,
        result: &Matrices,
    ) {
        let operands = setup.operands(self, result);
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
                setup.blueprint.clone(),
                setup.types.clone(),
                self.triangle,
                [self.a.dtype, result.dtype],
                [setup.sizes.lhs, setup.sizes.rhs, setup.sizes.out],
            );
        }
    }

    /// Returns the kernel that would run on a device, and the units of a cube.
    #[cfg(test)]
    pub(crate) fn definition(
        &self,
        tiling: &Tiling,
        properties: &Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> (KernelDefinition, u32) {
        by_family!(tiling, self, define(tiling, properties, target))
    }

    #[cfg(test)]
    fn define<G: GlobalMatmulFamily<()>>(
        &self,
        tiling: &Tiling,
        properties: &Arc<DeviceProperties>,
        target: Arc<TargetProperties>,
    ) -> (KernelDefinition, u32) {
        let result = self.unallocated_result();
        let vector = 16 / self.a.dtype.size();
        let [_, _, depth] = tiling.tile.map(|x| x as usize);
        let sizes =
            MatmulVectorSizes { lhs: vector.min(depth), rhs: vector.min(depth), out: MAX_SUMS };
        let setup = Setup::new::<G>(self, tiling, &result, sizes, properties).unwrap();
        let operands = setup.operands(self, &result);
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
        let definition = cubecl_core::define_kernel(&kernel)
            .unwrap_or_else(|error| panic!("{tiling}: {error:?}"));
        (definition, setup.cube_dim.num_elems())
    }

    /// Returns the longest vectors that the operands can be read and written in, and that divide
    /// the tiles.
    fn vector_sizes(
        &self,
        client: &Client,
        tiling: &Tiling,
        result: &Matrices,
    ) -> MatmulVectorSizes {
        let [m, n, k] = tiling.tile.map(|x| x as usize);
        let vector_size = |matrices: &Matrices, rows: usize, columns: usize| {
            let line = if matrices.line_axis() == 2 { columns } else { rows };
            matrices.vector_size(client).min(line)
        };
        // The addend is read where the result is written: along its rows.
        let addend = self.addend.map_or(n, |(addend, _)| match addend.line_axis() {
            2 => addend.vector_size(client),
            _ => 1,
        });
        MatmulVectorSizes {
            lhs: vector_size(self.a, m, k),
            rhs: vector_size(self.b, k, n),
            out: vector_size(result, m, n).min(addend).min(MAX_SUMS),
        }
    }
}
