//! SOAP: Adam in the eigenbasis of Shampoo's preconditioners.

use burn::config::Config;
use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::evd::{ComputeEigenvectors, self_adjoint_evd, self_adjoint_evd_scratch};
use faer::linalg::householder::{
    apply_block_householder_sequence_on_the_left_in_place_scratch,
    apply_block_householder_sequence_on_the_left_in_place_with_conj,
};
use faer::linalg::qr::no_pivoting::factor::{
    qr_in_place, qr_in_place_scratch, recommended_block_size,
};
use faer::{Conj, Mat, Par};

use super::{LayerOptimizer, Rejected};
use crate::checks::{ensure_decay, ensure_size};
use crate::error::{Error, Result};

/// Configuration of [`Soap`]. The defaults are from the authors' code.
#[derive(Config, Debug, PartialEq)]
pub struct SoapConfig {
    /// Decay of the momentum, in `[0, 1)`.
    #[config(default = 0.95)]
    pub beta_1: f64,
    /// Decay of the second moment and of the preconditioners, in `[0, 1)`.
    #[config(default = 0.95)]
    pub beta_2: f64,
    /// Summand of the root of the second moment in the divisor, zero or more.
    #[config(default = 1e-8)]
    pub epsilon: f64,
    /// Rate of decoupled weight decay, zero or more.
    #[config(default = 0.01)]
    pub weight_decay: f64,
    /// Steps between two refreshes of the eigenbases, at least 1.
    #[config(default = 10)]
    pub refresh_every: usize,
    /// The most rows or columns that have a preconditioner, at least 1. A longer side of a matrix
    /// keeps its own coordinates.
    #[config(default = 10_000)]
    pub largest_side: usize,
}

impl SoapConfig {
    /// Makes the optimizer with these settings.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a number that is out of its range.
    pub fn init(&self) -> Result<Soap> {
        ensure_decay("beta_1", self.beta_1)?;
        ensure_decay("beta_2", self.beta_2)?;
        ensure_size("epsilon", self.epsilon)?;
        ensure_size("weight_decay", self.weight_decay)?;
        for (name, number) in
            [("refresh_every", self.refresh_every), ("largest_side", self.largest_side)]
        {
            if number == 0 {
                return Err(Error::setting(name, 0, "at least 1"));
            }
        }
        Ok(Soap(self.clone()))
    }
}

/// SOAP for matrices, and Adam for parameters of any other number of dimensions (algorithm 3 of
/// Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam",
/// <https://arxiv.org/abs/2409.11321>).
///
/// Of a gradient `G`, with eigenvectors `Q` of the averages `L` of `G G^T` and `R` of `G^T G`, step
/// `t` is
///
/// ```text
/// M <- beta_1 M + (1 - beta_1) G
/// V <- beta_2 V + (1 - beta_2) (Q_L^T G Q_R)^2
/// P <- (1 - lr weight_decay) (P - lr c Q_L ((Q_L^T M Q_R) / (sqrt(V) + epsilon)) Q_R^T)
/// c  = sqrt(1 - beta_2^t) / (1 - beta_1^t)
/// ```
///
/// As in the authors' code (<https://github.com/nikhilvyas/SOAP>, 2024), the first gradient of a
/// parameter makes the bases and changes nothing else. In every tenth step
/// ([`refresh_every`](SoapConfig::refresh_every)) after that, a basis becomes the factor `Q` of a
/// QR decomposition of `L Q_L`, whose columns are in the order of falling eigenvalues.
///
/// ```
/// use distmuon::custom::SoapConfig;
/// use distmuon::{MuonConfig, RoutingRule};
///
/// let config = MuonConfig::new()
///     .with_layer_optimizer("soap", SoapConfig::new().init()?)
///     .with_rule(RoutingRule::custom(r"mlp\.", "soap"));
/// # Ok::<(), distmuon::Error>(())
/// ```
///
/// A matrix `[m, n]` has a state of `2 (m n + m^2 + n^2)` elements. Decompositions are computed on
/// the host, in float64 and by one thread: about `6 m^3` operations for a side. So the host waits
/// for the device at each refresh and at the step after it, and at the first two steps. With
/// [`CostSource::Measured`](crate::distributed::CostSource::Measured), the cost of a matrix is the
/// time of a step without a refresh.
#[derive(Clone, Debug, PartialEq)]
pub struct Soap(SoapConfig);

/// The state of a parameter in [`Soap`].
#[derive(Clone)]
pub struct SoapState<const D: usize> {
    momentum: Tensor<D>,
    /// The average of squares in the eigenbasis.
    second: Tensor<D>,
    /// A matrix has one for its rows and one for its columns, up to the largest side.
    sides: [Option<SoapSide>; 2],
    /// Steps that were not skipped, without the first: -1 before that one. On the device, so that a
    /// step that is taken back does not count.
    taken: Tensor<1>,
    /// Steps after which the host reads `taken`, since a refresh may be due: it would be sooner
    /// only if the device skipped no step. No part of a record: the host may always look.
    look_in: usize,
}

/// The preconditioner of the rows or of the columns, and its eigenvectors.
#[derive(Clone)]
struct SoapSide {
    preconditioner: Tensor<2>,
    basis: Tensor<2>,
}

/// The names of the sides in records.
const SIDES: [&str; 2] = ["left", "right"];

impl SoapSide {
    fn initial(size: usize, device: &Device, dtype: DType) -> Self {
        let preconditioner = Tensor::zeros([size, size], (device, dtype));
        Self { preconditioner, basis: Tensor::<2>::eye(size, device).cast(dtype) }
    }

    /// Adds the product of a gradient with its transpose, over the other side.
    fn add(&mut self, product: Tensor<2>, beta: f64) {
        self.preconditioner =
            self.preconditioner.clone().mul_scalar(beta) + product.mul_scalar(1.0 - beta);
    }

    /// Takes the eigenvectors of the preconditioner as the basis.
    fn decompose(&mut self) {
        self.set_basis(self.preconditioner.clone(), eigenvectors);
    }

    /// Refines the basis by a step of the power iteration. Returns the order of its vectors before
    /// that, by falling eigenvalues.
    fn refresh(&mut self) -> Tensor<1, Int> {
        let power = self.preconditioner.clone().matmul(self.basis.clone());
        let values: Tensor<1> = (self.basis.clone() * power.clone()).sum_dim(0).reshape([-1]);
        let order = values.argsort_descending(0);
        self.set_basis(power.select(1, order.clone()), |matrix| Some(orthonormal(matrix)));
        order
    }

    /// Takes the result of a decomposition of a matrix as the basis. It stays as it is if there is
    /// none.
    fn set_basis(
        &mut self,
        matrix: Tensor<2>,
        decomposed: impl FnOnce(Mat<f64>) -> Option<Mat<f64>>,
    ) {
        let ([size, _], dtype) = (matrix.dims(), matrix.dtype());
        let values: Vec<f64> = matrix.into_data().iter::<f64>().collect();
        // Squares of large finite gradients overflow.
        if !values.iter().all(|value| value.is_finite()) {
            return;
        }
        let Some(basis) = decomposed(Mat::from_fn(size, size, |i, j| values[i * size + j])) else {
            return;
        };
        let values = (0..size * size).map(|at| basis[(at / size, at % size)]).collect::<Vec<_>>();
        let data = TensorData::new(values, [size, size]);
        self.basis = Tensor::from_data(data, (&self.basis.device(), dtype));
    }

    fn keep(rejected: &Rejected, old: Self, new: Self) -> Self {
        Self {
            preconditioner: rejected.keep(old.preconditioner, new.preconditioner),
            basis: rejected.keep(old.basis, new.basis),
        }
    }

    fn moved(self, device: &Device) -> Self {
        let [preconditioner, basis] =
            [self.preconditioner, self.basis].map(|tensor| tensor.to_device(device));
        Self { preconditioner, basis }
    }
}

/// The eigenvectors of a symmetric matrix, as columns in the order of falling eigenvalues. `None`
/// if the decomposition does not converge.
fn eigenvectors(matrix: Mat<f64>) -> Option<Mat<f64>> {
    let size = matrix.nrows();
    let (mut values, mut vectors) = (Diag::<f64>::zeros(size), Mat::zeros(size, size));
    // One thread, here and below: other threads would change the order of sums, and ranks that are
    // threads have their own cores already.
    let scratch = self_adjoint_evd_scratch::<f64>(
        size,
        ComputeEigenvectors::Yes,
        Par::Seq,
        Default::default(),
    );
    let mut memory = MemBuffer::new(scratch);
    self_adjoint_evd(
        matrix.as_ref(),
        values.as_mut(),
        Some(vectors.as_mut()),
        Par::Seq,
        MemStack::new(&mut memory),
        Default::default(),
    )
    .ok()?;
    // They come by rising eigenvalues.
    Some(vectors.reverse_cols().to_owned())
}

/// The factor `Q` of the QR decomposition of a square matrix.
fn orthonormal(mut matrix: Mat<f64>) -> Mat<f64> {
    let size = matrix.nrows();
    let block = recommended_block_size::<f64>(size, size);
    let mut coefficients = Mat::zeros(block, size);
    let scratch = qr_in_place_scratch::<f64>(size, size, block, Par::Seq, Default::default());
    qr_in_place(
        matrix.as_mut(),
        coefficients.as_mut(),
        Par::Seq,
        MemStack::new(&mut MemBuffer::new(scratch)),
        Default::default(),
    );
    let mut basis = Mat::identity(size, size);
    let scratch =
        apply_block_householder_sequence_on_the_left_in_place_scratch::<f64>(size, block, size);
    apply_block_householder_sequence_on_the_left_in_place_with_conj(
        matrix.as_ref(),
        coefficients.as_ref(),
        Conj::No,
        basis.as_mut(),
        Par::Seq,
        MemStack::new(&mut MemBuffer::new(scratch)),
    );
    basis
}

impl Default for Soap {
    fn default() -> Self {
        Self(SoapConfig::new())
    }
}

impl<const D: usize> SoapState<D> {
    /// Adds a gradient to the preconditioners.
    fn precondition(&mut self, gradient: Tensor<D>, beta: f64) {
        if self.sides.iter().all(Option::is_none) {
            return;
        }
        let gradient = as_matrix(gradient);
        let transposed = gradient.clone().transpose();
        let [left, right] = &mut self.sides;
        if let Some(left) = left {
            left.add(gradient.clone().matmul(transposed.clone()), beta);
        }
        if let Some(right) = right {
            right.add(transposed.matmul(gradient), beta);
        }
    }

    /// The values in the eigenbases, `Q_L^T X Q_R`, or with `back` from there: `Q_L X Q_R^T`.
    fn rotated(&self, values: Tensor<D>, back: bool) -> Tensor<D> {
        if self.sides.iter().all(Option::is_none) {
            return values;
        }
        let shape = values.shape();
        let [left, right] = self.sides.each_ref().map(|side| {
            side.as_ref().map(|SoapSide { basis, .. }| match back {
                false => basis.clone(),
                true => basis.clone().transpose(),
            })
        });
        let mut matrix = as_matrix(values);
        if let Some(left) = left {
            matrix = left.transpose().matmul(matrix);
        }
        if let Some(right) = right {
            matrix = matrix.matmul(right);
        }
        matrix.reshape(shape)
    }

    /// Refines the eigenbases, and follows the order of their vectors.
    fn refresh(&mut self) {
        for (dimension, side) in self.sides.iter_mut().enumerate() {
            if let Some(side) = side {
                let order = side.refresh();
                self.second = self.second.clone().select(dimension, order);
            }
        }
    }

    /// Refreshes the bases if that is due after every so many steps. Returns `false` for a
    /// parameter without bases: this step is its first one.
    fn prepare(&mut self, every: usize) -> bool {
        if self.look_in == 0 {
            let taken = self.taken.clone().into_scalar::<f32>();
            if taken < 0.0 {
                return false;
            }
            let since = taken as usize % every;
            let is_due = since == 0 && taken > 0.0;
            if is_due {
                self.refresh();
            }
            self.look_in = match self.sides {
                [None, None] => usize::MAX,
                // The device may take this step back, and with it the new bases.
                _ if is_due => 1,
                _ => every - since,
            };
        }
        self.look_in -= 1;
        true
    }
}

/// A matrix in the two dimensions that its number of dimensions says.
fn as_matrix<const D: usize>(tensor: Tensor<D>) -> Tensor<2> {
    let [rows, columns] = [tensor.dims()[0], tensor.dims()[D - 1]];
    tensor.reshape([rows, columns])
}

impl RecordState for SoapSide {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "preconditioner", self.preconditioner.to_data());
        out.push_tensor(prefix, "basis", self.basis.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let preconditioner = tensor(prefix, "preconditioner", source, device)?;
        Some(Self { preconditioner, basis: tensor(prefix, "basis", source, device)? })
    }
}

/// A tensor of a record, in the type that was saved.
fn tensor<const D: usize>(
    prefix: &str,
    name: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<Tensor<D>> {
    let data = source.take_tensor(prefix, name)?;
    let dtype = data.dtype();
    Some(Tensor::from_data(data, (device, dtype)))
}

// Burn's derive of `RecordState` finds its trait in Burn's own crate only.
impl<const D: usize> RecordState for SoapState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "momentum", self.momentum.to_data());
        out.push_tensor(prefix, "second", self.second.to_data());
        for (side, name) in self.sides.iter().zip(SIDES) {
            if let Some(side) = side {
                side.state_flatten(&join_path(prefix, name), out);
            }
        }
        out.push_tensor(prefix, "taken", self.taken.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let momentum = tensor(prefix, "momentum", source, device)?;
        let second = tensor(prefix, "second", source, device)?;
        let sides =
            SIDES.map(|name| SoapSide::state_unflatten(&join_path(prefix, name), source, device));
        let taken = tensor(prefix, "taken", source, device)?;
        Some(Self { momentum, second, sides, taken, look_in: 0 })
    }
}

impl Optimizer for Soap {
    type State<const D: usize> = SoapState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<SoapState<D>>,
    ) -> (Tensor<D>, Option<SoapState<D>>) {
        let mut state = state.unwrap_or_else(|| self.initial(&parameter));
        let &Self(SoapConfig { beta_1, beta_2, epsilon, weight_decay, refresh_every, .. }) = self;
        let is_first = !state.prepare(refresh_every);
        state.taken = state.taken.add_scalar(1.0);
        if is_first {
            state.precondition(gradient, beta_2);
            state.sides.iter_mut().flatten().for_each(SoapSide::decompose);
            return (parameter, Some(state));
        }
        let squares = state.rotated(gradient.clone(), false).square();
        state.momentum =
            state.momentum.mul_scalar(beta_1) + gradient.clone().mul_scalar(1.0 - beta_1);
        state.second = state.second.mul_scalar(beta_2) + squares.mul_scalar(1.0 - beta_2);
        // 1 - beta^t.
        let weight =
            |beta: f64| state.taken.clone().mul_scalar(beta.ln()).exp().neg().add_scalar(1.0);
        let size = (weight(beta_2).sqrt() / weight(beta_1)).mul_scalar(lr);
        let size = size.reshape([1; D]);
        let momentum = state.rotated(state.momentum.clone(), false);
        let update = momentum / state.second.clone().sqrt().add_scalar(epsilon);
        let update = state.rotated(update, true) * size;
        state.precondition(gradient, beta_2);
        ((parameter - update).mul_scalar(1.0 - lr * weight_decay), Some(state))
    }

    fn to_device<const D: usize>(state: SoapState<D>, device: &Device) -> SoapState<D> {
        SoapState {
            momentum: state.momentum.to_device(device),
            second: state.second.to_device(device),
            sides: state.sides.map(|side| side.map(|side| side.moved(device))),
            taken: state.taken.to_device(device),
            look_in: state.look_in,
        }
    }
}

impl LayerOptimizer for Soap {
    fn initial<const D: usize>(&self, parameter: &Tensor<D>) -> SoapState<D> {
        let (device, dtype) = (parameter.device(), parameter.dtype());
        let side = |dimension: usize| {
            let size = (D == 2).then(|| parameter.dims()[dimension])?;
            (size <= self.0.largest_side).then(|| SoapSide::initial(size, &device, dtype))
        };
        SoapState {
            momentum: parameter.zeros_like(),
            second: parameter.zeros_like(),
            sides: [side(0), side(1)],
            taken: Tensor::full([1], -1.0, (&device, dtype)),
            look_in: 0,
        }
    }

    fn keep<const D: usize>(
        rejected: &Rejected,
        old: SoapState<D>,
        new: SoapState<D>,
    ) -> SoapState<D> {
        let [old_left, old_right] = old.sides;
        let [left, right] = new.sides;
        let keep = |old: Option<SoapSide>, new| Some(SoapSide::keep(rejected, old?, new?));
        SoapState {
            momentum: rejected.keep(old.momentum, new.momentum),
            second: rejected.keep(old.second, new.second),
            sides: [keep(old_left, left), keep(old_right, right)],
            taken: rejected.keep(old.taken, new.taken),
            look_in: new.look_in,
        }
    }

    /// Counts the products of both preconditioners, of their refreshes over the steps between two
    /// of them, and of three rotations.
    fn operations(&self, shape: &[usize]) -> f64 {
        let elements = shape.iter().product::<usize>() as f64;
        let &[m, n] = shape else { return 12.0 * elements };
        let sides = [m, n].into_iter().filter(|side| *side <= self.0.largest_side);
        let of_side = |side: usize| {
            let side = side as f64;
            // A product with the basis, and the decomposition.
            let refresh = 8.0 * side.powi(3) / self.0.refresh_every as f64;
            4.0 * 2.0 * elements * side + refresh
        };
        sides.map(of_side).sum::<f64>() + 12.0 * elements
    }
}
