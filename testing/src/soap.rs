//! SOAP, as a user of Burn would write it: an optimizer that needs whole matrices.
//!
//! Adam in the eigenbasis of Shampoo's preconditioners, algorithm 3 of Vyas et al., "SOAP:
//! Improving and Stabilizing Shampoo using Adam" (2024), <https://arxiv.org/abs/2409.11321>. Two
//! things are simpler here: bases start from the identity instead of the eigenvectors of the first
//! gradient, whose step the paper leaves out, and are refined in every step instead of every tenth.

use burn::optim::{LearningRate, Optimizer, RecordState, StateSink, StateSource, join_path};
use burn::tensor::{DType, Device, Tensor};
use distmuon::custom::{LayerOptimizer, Rejected};

/// Added to the diagonal of a preconditioner, relative to the mean of its diagonal: the
/// preconditioners of the first steps are of low rank, and have no other basis of their kernel.
const DAMPING: f32 = 1e-2;
/// Added as well, for a preconditioner of zeros.
const SMALLEST: f32 = 1e-12;

/// SOAP for matrices, and Adam for parameters of other dimensions.
#[derive(Clone, Debug)]
pub struct Soap {
    /// The decays of the momentum, and of second moments and preconditioners.
    pub betas: [f32; 2],
    /// The number that is added to the root of second moments.
    pub epsilon: f32,
    /// The decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for Soap {
    /// The paper's betas and epsilon (section 5), and its weight decay.
    fn default() -> Self {
        Self { betas: [0.95, 0.95], epsilon: 1e-8, weight_decay: 1e-4 }
    }
}

/// The state of a parameter. The tensors of `sides` are of one element, unless it is a matrix.
#[derive(Clone)]
pub struct SoapState<const D: usize> {
    momentum: Tensor<D>,
    /// The average of squares in the eigenbasis.
    second: Tensor<D>,
    left: Side,
    right: Side,
    /// Powers of both betas: on the device, so that a step that is taken back does not count.
    powers: Tensor<1>,
}

/// The preconditioner of the rows or of the columns, and its eigenvectors.
#[derive(Clone)]
pub struct Side {
    preconditioner: Tensor<2>,
    basis: Tensor<2>,
}

impl Side {
    fn initial(size: usize, device: &Device, dtype: DType) -> Self {
        let preconditioner = Tensor::zeros([size, size], (device, dtype));
        Self { preconditioner, basis: Tensor::<2>::eye(size, device).cast(dtype) }
    }

    /// The preconditioner with a further product of the gradient, and eigenvectors after a step of
    /// the power iteration.
    fn advance(self, product: Tensor<2>, beta: f32) -> Self {
        let preconditioner = self.preconditioner * beta + product * (1.0 - beta);
        let [size, _] = preconditioner.dims();
        let identity =
            Tensor::<2>::eye(size, &preconditioner.device()).cast(preconditioner.dtype());
        let trace = (preconditioner.clone() * identity).sum();
        let damping = trace * (DAMPING / size as f32) + SMALLEST;
        let shift = self.basis.clone() * damping.reshape([1, 1]);
        let basis = orthonormal(preconditioner.clone().matmul(self.basis) + shift);
        Self { preconditioner, basis }
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

impl RecordState for Side {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "preconditioner", self.preconditioner.to_data());
        out.push_tensor(prefix, "basis", self.basis.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let mut tensor = |name| Some(Tensor::from_data(source.take_tensor(prefix, name)?, device));
        Some(Self { preconditioner: tensor("preconditioner")?, basis: tensor("basis")? })
    }
}

// Burn's derive of `RecordState` finds its trait in Burn's own crate only.
impl<const D: usize> RecordState for SoapState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        out.push_tensor(prefix, "momentum", self.momentum.to_data());
        out.push_tensor(prefix, "second", self.second.to_data());
        self.left.state_flatten(&join_path(prefix, "left"), out);
        self.right.state_flatten(&join_path(prefix, "right"), out);
        out.push_tensor(prefix, "powers", self.powers.to_data());
    }

    fn state_unflatten(prefix: &str, source: &mut StateSource, device: &Device) -> Option<Self> {
        let mut tensor = |name| Some(Tensor::from_data(source.take_tensor(prefix, name)?, device));
        let [momentum, second] = [tensor("momentum")?, tensor("second")?];
        let powers = Tensor::from_data(source.take_tensor(prefix, "powers")?, device);
        let left = Side::state_unflatten(&join_path(prefix, "left"), source, device)?;
        let right = Side::state_unflatten(&join_path(prefix, "right"), source, device)?;
        Some(Self { momentum, second, left, right, powers })
    }
}

/// The factor Q of a QR decomposition, by the Gram-Schmidt process, which no host waits for. Twice
/// for every column, which is then orthogonal to the others up to rounding.
fn orthonormal(matrix: Tensor<2>) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    let mut basis: Option<Tensor<2>> = None;
    for column in 0..columns {
        let mut vector = matrix.clone().slice([0..rows, column..column + 1]);
        for before in basis.iter().chain(&basis) {
            let along = before.clone().transpose().matmul(vector.clone());
            vector = vector - before.clone().matmul(along);
        }
        let norm = vector.clone().square().sum().sqrt().clamp_min(1e-30);
        let unit = vector / norm.reshape([1, 1]);
        basis = Some(match basis {
            Some(before) => Tensor::cat(vec![before, unit], 1),
            None => unit,
        });
    }
    basis.expect("a matrix has columns")
}

impl Soap {
    /// A matrix, as which a parameter is seen.
    fn matrix<const D: usize>(tensor: Tensor<D>) -> Tensor<2> {
        let [rows, columns] = [tensor.dims()[0], tensor.dims()[D - 1]];
        tensor.reshape([rows, columns])
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
        let state = state.unwrap_or_else(|| self.initial(&parameter));
        let SoapState { momentum, second, left, right, powers } = state;
        let [beta_1, beta_2] = self.betas;
        let is_matrix = D == 2;
        // U' = Q_L^T U Q_R, and back.
        let rotated = |tensor: Tensor<D>| match is_matrix {
            true => {
                let rows = left.basis.clone().transpose().matmul(Self::matrix(tensor.clone()));
                rows.matmul(right.basis.clone()).reshape(tensor.shape())
            }
            false => tensor,
        };
        let back = |tensor: Tensor<D>| match is_matrix {
            true => {
                let rows = left.basis.clone().matmul(Self::matrix(tensor.clone()));
                rows.matmul(right.basis.clone().transpose()).reshape(tensor.shape())
            }
            false => tensor,
        };
        let momentum = momentum * beta_1 + gradient.clone() * (1.0 - beta_1);
        let second = second * beta_2 + rotated(gradient.clone()).square() * (1.0 - beta_2);
        let betas = Tensor::from_data([beta_1, beta_2], (&powers.device(), powers.dtype()));
        let powers = powers * betas;
        let correction = |index: usize| {
            let power = powers.clone().narrow(0, index, 1);
            (power * -1.0 + 1.0).reshape([1; D])
        };
        let root = (second.clone() / correction(1)).sqrt() + self.epsilon;
        let update = back(rotated(momentum.clone()) / correction(0) / root);
        let updated = parameter * (1.0 - lr * self.weight_decay) - update * lr;

        let (left, right) = match is_matrix {
            true => {
                let gradient = Self::matrix(gradient);
                let transposed = gradient.clone().transpose();
                (
                    left.advance(gradient.clone().matmul(transposed.clone()), beta_2),
                    right.advance(transposed.matmul(gradient), beta_2),
                )
            }
            false => (left, right),
        };
        (updated, Some(SoapState { momentum, second, left, right, powers }))
    }

    fn to_device<const D: usize>(state: SoapState<D>, device: &Device) -> SoapState<D> {
        SoapState {
            momentum: state.momentum.to_device(device),
            second: state.second.to_device(device),
            left: state.left.moved(device),
            right: state.right.moved(device),
            powers: state.powers.to_device(device),
        }
    }
}

impl LayerOptimizer for Soap {
    fn initial<const D: usize>(&self, parameter: &Tensor<D>) -> SoapState<D> {
        let (device, dtype) = (parameter.device(), parameter.dtype());
        let sizes = match D {
            2 => [0, 1].map(|dimension| parameter.dims()[dimension]),
            _ => [1, 1],
        };
        let [left, right] = sizes.map(|size| Side::initial(size, &device, dtype));
        SoapState {
            momentum: parameter.zeros_like(),
            second: parameter.zeros_like(),
            left,
            right,
            powers: Tensor::ones([2], (&device, dtype)),
        }
    }

    fn keep<const D: usize>(
        rejected: &Rejected,
        old: SoapState<D>,
        new: SoapState<D>,
    ) -> SoapState<D> {
        SoapState {
            momentum: rejected.keep(old.momentum, new.momentum),
            second: rejected.keep(old.second, new.second),
            left: Side::keep(rejected, old.left, new.left),
            right: Side::keep(rejected, old.right, new.right),
            powers: rejected.keep(old.powers, new.powers),
        }
    }

    /// Counts the products: both preconditioners, their power iterations and Gram-Schmidt
    /// processes, and three rotations of two products each.
    fn operations(&self, shape: &[usize]) -> f64 {
        let elements = shape.iter().product::<usize>() as f64;
        let &[m, n] = shape else { return 12.0 * elements };
        let [m, n] = [m as f64, n as f64];
        let of_side = |side: f64| 2.0 * elements * side + 2.0 * side.powi(3) + 4.0 * side.powi(3);
        let rotations = 3.0 * 2.0 * elements * (m + n);
        of_side(m) + of_side(n) + rotations + 12.0 * elements
    }
}
