//! Batches of matrices on a device.

use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Shape, Strides};

use crate::error::{Error, Result};

/// A batch of matrices `[k, m, n]` of one type in a buffer.
///
/// The fields are not checked against each other: every kernel does that before it is launched.
#[derive(Debug, Clone)]
pub struct Matrices {
    /// The buffer; element `[i, row, column]` is `i`, `row` and `column` strides from its start.
    pub handle: Handle,
    /// The type of the elements.
    pub dtype: ElemType,
    /// The number of matrices, of their rows and of their columns.
    pub shape: [usize; 3],
    /// The distances between matrices, rows and columns, in elements.
    pub strides: [usize; 3],
}

impl Matrices {
    /// Returns matrices that fill a buffer in order, row by row.
    pub fn contiguous(handle: Handle, dtype: ElemType, shape: [usize; 3]) -> Self {
        let [_, m, n] = shape;
        Self { handle, dtype, shape, strides: [m * n, n, 1] }
    }

    /// Allocates contiguous matrices, which are not initialised.
    pub fn empty(client: &Client, dtype: ElemType, shape: [usize; 3]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::contiguous(client.empty(bytes), dtype, shape)
    }

    /// Returns the transposes, in the same buffer.
    pub fn transposed(self) -> Self {
        let ([k, m, n], [matrix, row, column]) = (self.shape, self.strides);
        Self { shape: [k, n, m], strides: [matrix, column, row], ..self }
    }

    /// Returns contiguous matrices of the same shape. They are nominally in the same buffer: only
    /// their layout is meaningful.
    pub(crate) fn with_contiguous_strides(self) -> Self {
        Self::contiguous(self.handle, self.dtype, self.shape)
    }

    /// Returns `true` if neighbours in a row or in a column are neighbours in memory.
    pub fn has_contiguous_lines(&self) -> bool {
        self.strides[1] == 1 || self.strides[2] == 1
    }

    /// Returns `true` if the elements fill a buffer in order, row by row.
    fn is_contiguous(&self) -> bool {
        let [k, m, n] = self.shape;
        let steps = [(k, m * n), (m, n), (n, 1)];
        // The stride along a dimension of size one is never used.
        steps.iter().zip(self.strides).all(|((size, step), stride)| *size <= 1 || stride == *step)
    }

    /// Checks that the matrices are contiguous.
    pub(crate) fn check_contiguous(&self, operand: &'static str) -> Result<()> {
        if self.is_contiguous() {
            return Ok(());
        }
        let expected = "a contiguous batch, row by row";
        Err(Error::Strides { operand, expected, strides: self.strides })
    }

    /// Checks that rows or columns are contiguous.
    pub(crate) fn check_lines(&self, operand: &'static str) -> Result<()> {
        if self.has_contiguous_lines() {
            return Ok(());
        }
        let expected = "contiguous rows or columns";
        Err(Error::Strides { operand, expected, strides: self.strides })
    }

    /// Checks that the matrices are square.
    pub(crate) fn check_square(&self, operand: &'static str) -> Result<()> {
        let [_, m, n] = self.shape;
        if m == n {
            return Ok(());
        }
        let expected = "square matrices".to_owned();
        Err(Error::Shape { operand, expected, actual: format!("{:?}", self.shape) })
    }

    /// Checks that the matrices have a shape and a type.
    pub(crate) fn check_like(
        &self,
        operand: &'static str,
        shape: [usize; 3],
        dtype: ElemType,
    ) -> Result<()> {
        if self.shape == shape && self.dtype == dtype {
            return Ok(());
        }
        let expected = format!("{shape:?} of {dtype:?}");
        let actual = format!("{:?} of {:?}", self.shape, self.dtype);
        Err(Error::Shape { operand, expected, actual })
    }

    /// Returns the number of elements from the start to the last one. The sum saturates at a number
    /// that no buffer has.
    pub(crate) fn extent(&self) -> usize {
        let last = |(size, stride): (&usize, &usize)| (size - 1).saturating_mul(*stride);
        match self.shape.contains(&0) {
            true => 0,
            false => self.shape.iter().zip(&self.strides).map(last).fold(1, usize::saturating_add),
        }
    }

    /// Returns the dimension along which neighbours are neighbours in memory.
    pub(crate) fn line_axis(&self) -> usize {
        if self.strides[2] == 1 { 2 } else { 1 }
    }

    /// Returns the length of the longest vectors that lines can be read in.
    pub(crate) fn vector_size(&self, client: &Client) -> usize {
        let axis = self.line_axis();
        if self.strides[axis] != 1 {
            return 1;
        }
        let offset = self.handle.offset_start.unwrap_or(0) as usize / self.dtype.size();
        let line_stride = self.strides[3 - axis];
        // Vectors begin at multiples of their length: all lines have to end and begin there.
        let boundaries = [self.shape[axis], line_stride, self.strides[0], offset];
        let fits = |size: &usize| boundaries.iter().all(|boundary| boundary.is_multiple_of(*size));
        client.io_optimized_vector_sizes(self.dtype.size()).filter(fits).max().unwrap_or(1)
    }

    /// Returns the matrices as CubeCL describes tensors.
    ///
    /// # Safety
    ///
    /// The buffer holds the elements of all matrices at their strides.
    pub(crate) unsafe fn binding(&self) -> TensorBinding {
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
