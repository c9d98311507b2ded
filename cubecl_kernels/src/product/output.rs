//! The output of a product: results are scaled, added to, rounded once, and mirrored.

use core::marker::PhantomData;

use cubecl::frontend::barrier::BarrierExpand;
use cubecl::prelude::*;
use cubecl::std::tensor::layout::Layout;
use cubecl::std::tensor::layout::LayoutExpand;
use cubecl::std::tensor::{
    View, ViewMut, ViewOperations, ViewOperationsExpand, ViewOperationsMut, ViewOperationsMutExpand,
};
use cubek_matmul::multi_level::args::BatchedCoords;

use super::grid::Triangle;

/// The result `C` as a view: products `AB` of type `P` are written to it, and stored as
/// `alpha AB + beta D`.
///
/// The positions of the view are the offset of the matrix in `C`, the row and the column.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub struct Output<O: Numeric, P: Numeric, N: Size> {
    pub result: ViewMut<'static, Vector<O, N>, BatchedCoords>,
    /// The same buffer, element by element.
    pub elements: ViewMut<'static, O, BatchedCoords>,
    pub addend: ComptimeOption<View<'static, Vector<O, N>, BatchedCoords>>,
    /// The offset of the matrix in `D`.
    pub addend_offset: usize,
    pub alpha: f32,
    pub beta: f32,
    #[cube(comptime)]
    pub triangle: Triangle,
    #[cube(comptime)]
    pub _product: PhantomData<P>,
}

/// Stores a vector of products.
///
/// Of a symmetric result, exactly the entries on and below the diagonal are stored, and each entry
/// below the diagonal a second time as its mirror image: no entry is written twice, and both halves
/// are rounded from the same number. The units of a plane hold vectors of neighbouring rows: the
/// images of one element of each vector are also neighbours in memory.
#[cube]
fn store<O: Numeric, P: Numeric, N: Size>(
    output: &Output<O, P, N>,
    position: BatchedCoords,
    product: Vector<P, N>,
) {
    let (offset, row, column) = position;
    let (_, rows, columns) = output.result.shape();
    // Tiles may reach over the edges of the matrix, where nothing may be written.
    if row < rows && column < columns {
        let mut value = Vector::<f32, N>::cast_from(product) * Vector::new(output.alpha);
        #[comptime]
        match &output.addend {
            ComptimeOption::Some(addend) => {
                let added = addend.read((output.addend_offset, row, column));
                value += Vector::cast_from(added) * Vector::new(output.beta);
            }
            ComptimeOption::None => {}
        }
        let rounded = Vector::<O, N>::cast_from(value);
        match output.triangle.comptime() {
            Triangle::Full => output.result.write((offset, row, column), rounded),
            Triangle::Lower => {
                let size = N::value();
                // A vector that lies below the diagonal is written at once; one that crosses it,
                // element by element.
                let last = column + comptime!(size as u32 - 1);
                if last <= row {
                    output.result.write((offset, row, column), rounded);
                }
                #[unroll]
                for i in 0..N::value() {
                    let column = column + i as u32;
                    let element = rounded.extract(i);
                    if last > row && column <= row {
                        output.elements.write((offset, row, column), element);
                    }
                    // The diagonal is its own mirror image, and is written once.
                    if column < row {
                        output.elements.write((offset, column, row), element);
                    }
                }
            }
        }
    }
}

/// The layout that leaves the positions of [`Output`] unchanged.
#[derive(CubeType, Clone)]
#[expand(derive(Clone))]
pub struct Unchanged {
    pub shape: BatchedCoords,
}

#[cube]
impl Layout for Unchanged {
    type Coordinates = BatchedCoords;
    type SourceCoordinates = BatchedCoords;

    fn to_source_pos(&self, pos: BatchedCoords) -> BatchedCoords {
        pos
    }

    fn to_source_pos_checked(&self, pos: BatchedCoords) -> (BatchedCoords, bool) {
        // No check here, since `store` compares every position with the shape.
        (pos, true.runtime())
    }

    fn shape(&self) -> BatchedCoords {
        self.shape
    }

    fn is_in_bounds(&self, _pos: BatchedCoords) -> bool {
        true.runtime()
    }
}

type Position = <BatchedCoords as CubeType>::ExpandType;
type Value<P, N> = <Vector<P, N> as CubeType>::ExpandType;

impl<O: Numeric, P: Numeric, N: Size> Vectorized for Output<O, P, N> {}
impl<O: Numeric, P: Numeric, N: Size> ViewOperations<Vector<P, N>, BatchedCoords>
    for Output<O, P, N>
{
}
impl<O: Numeric, P: Numeric, N: Size> ViewOperationsMut<Vector<P, N>, BatchedCoords>
    for Output<O, P, N>
{
}

impl<O: Numeric, P: Numeric, N: Size> VectorizedExpand for OutputExpand<O, P, N> {
    fn __expand_vector_size_method(&self, scope: &Scope) -> VectorSize {
        self.result.__expand_vector_size_method(scope)
    }
}

/// Panic message of all reads: a product is written to its output, and never read from it.
const WRITE_ONLY: &str = "the output of a product is only written to";

impl<O: Numeric, P: Numeric, N: Size> ViewOperationsExpand<Vector<P, N>, BatchedCoords>
    for OutputExpand<O, P, N>
{
    fn __expand_read_method(&self, _: &Scope, _: Position) -> Value<P, N> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_read_checked_method(&self, _: &Scope, _: Position) -> Value<P, N> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_read_masked_method(&self, _: &Scope, _: Position, _: Value<P, N>) -> Value<P, N> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_read_unchecked_method(&self, _: &Scope, _: Position) -> Value<P, N> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_as_linear_slice_method(
        &self,
        _: &Scope,
        _: Position,
        _: Position,
    ) -> &SliceExpand<Vector<P, N>> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_tensor_map_load_method(
        &self,
        _: &Scope,
        _: &BarrierExpand,
        _: &mut SliceExpand<Vector<P, N>>,
        _: Position,
    ) {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_shape_method(&self, scope: &Scope) -> Position {
        self.result.__expand_shape_method(scope)
    }

    fn __expand_is_in_bounds_method(
        &self,
        scope: &Scope,
        position: Position,
    ) -> NativeExpand<bool> {
        self.result.__expand_is_in_bounds_method(scope, position)
    }
}

impl<O: Numeric, P: Numeric, N: Size> ViewOperationsMutExpand<Vector<P, N>, BatchedCoords>
    for OutputExpand<O, P, N>
{
    fn __expand_write_method(&self, scope: &Scope, position: Position, value: Value<P, N>) {
        store::expand::<O, P, N>(scope, self, position, value)
    }

    // `store` checks bounds itself.
    fn __expand_write_checked_method(&self, scope: &Scope, position: Position, value: Value<P, N>) {
        store::expand::<O, P, N>(scope, self, position, value)
    }

    fn __expand_as_linear_slice_mut_method(
        &self,
        _: &Scope,
        _: Position,
        _: Position,
    ) -> &mut SliceExpand<Vector<P, N>> {
        unreachable!("{WRITE_ONLY}")
    }

    fn __expand_tensor_map_store_method(
        &self,
        _: &Scope,
        _: &SliceExpand<Vector<P, N>>,
        _: Position,
    ) {
        unreachable!("{WRITE_ONLY}")
    }
}
