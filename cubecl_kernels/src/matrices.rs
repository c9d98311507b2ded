//! Batches of matrices on a device.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};

/// A batch of matrices `[k, m, n]` of one type in a buffer.
#[derive(Debug, Clone)]
pub struct Matrices {
    /// The buffer; element `[i, row, column]` lies `i`, `row` and `column` strides from its start.
    pub handle: Handle,
    /// The type of the elements.
    pub dtype: ElemType,
    /// How many matrices, their rows and their columns.
    pub shape: [usize; 3],
    /// The distances between matrices, rows and columns, in elements.
    pub strides: [usize; 3],
}

impl Matrices {
    /// Matrices that fill a buffer in order, row by row.
    pub fn contiguous(handle: Handle, dtype: ElemType, shape: [usize; 3]) -> Self {
        let [_, m, n] = shape;
        Self { handle, dtype, shape, strides: [m * n, n, 1] }
    }

    /// Room for matrices, not initialised.
    pub fn empty(client: &Client, dtype: ElemType, shape: [usize; 3]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::contiguous(client.empty(bytes), dtype, shape)
    }

    /// The transposes, in the same buffer.
    pub fn transposed(self) -> Self {
        let ([k, m, n], [matrix, row, column]) = (self.shape, self.strides);
        Self { shape: [k, n, m], strides: [matrix, column, row], ..self }
    }

    /// Matrices of the same shape in order, nominally in the same buffer: only their layout counts.
    pub(crate) fn made_contiguous(self) -> Self {
        Self::contiguous(self.handle, self.dtype, self.shape)
    }

    /// Whether neighbours in a row or in a column are neighbours in memory.
    pub fn has_contiguous_lines(&self) -> bool {
        self.strides[1] == 1 || self.strides[2] == 1
    }

    /// Whether the elements fill a buffer in order, row by row.
    pub(crate) fn is_contiguous(&self) -> bool {
        let [k, m, n] = self.shape;
        let steps = [(k, m * n), (m, n), (n, 1)];
        // The step along a dimension of one counts for nothing.
        steps.iter().zip(self.strides).all(|((size, step), stride)| *size <= 1 || stride == *step)
    }

    /// Elements up to the last one. No buffer has so many as where this saturates.
    pub(crate) fn extent(&self) -> usize {
        let last = |(size, stride): (&usize, &usize)| (size - 1).saturating_mul(*stride);
        match self.shape.contains(&0) {
            true => 0,
            false => self.shape.iter().zip(&self.strides).map(last).fold(1, usize::saturating_add),
        }
    }

    /// The dimension along which neighbours are neighbours in memory.
    pub(crate) fn line_axis(&self) -> usize {
        if self.strides[2] == 1 { 2 } else { 1 }
    }

    /// The longest vectors that lines can be read in.
    pub(crate) fn vector_size(&self, client: &Client) -> usize {
        let axis = self.line_axis();
        if self.strides[axis] != 1 {
            return 1;
        }
        let offset = self.handle.offset_start.unwrap_or(0) as usize / self.dtype.size();
        let across = self.strides[3 - axis];
        let borders = [self.shape[axis], across, self.strides[0], offset];
        let fits = |size: &usize| borders.iter().all(|border| border.is_multiple_of(*size));
        client.io_optimized_vector_sizes(self.dtype.size()).filter(fits).max().unwrap_or(1)
    }

    /// The matrices as CubeCL describes tensors.
    ///
    /// # Safety
    ///
    /// The buffer holds the elements of all matrices at their strides.
    pub unsafe fn binding(&self) -> TensorBinding {
        // SAFETY: by the contract of this function.
        unsafe {
            TensorBinding::from_raw_parts(
                self.handle.clone(),
                Strides::new(&self.strides),
                Shape::new(self.shape),
            )
        }
    }
}
