//! Small models, and the ways in which a rank uses their parameters in a pass.

use burn::module::{Module, Param};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::module::embedding;
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use distmuon::MasterWeights;
use distmuon::comm::Communicator;
use distmuon::distributed::Layout;
use distmuon::parallel::{exchange, leave};
use distmuon_testing::models::Fixed;
use distmuon_testing::precision::Rounded;

use super::trial::Cuts;

const WIDTH: usize = 8;
pub const TOKENS: usize = 11;
/// The matrices of a stack.
pub const EXPERTS: usize = 3;

/// The kinds of layers, as numbers.
pub const DENSE: u8 = 0;
pub const STACK: u8 = 3;
pub const KINDS: u8 = 4;

/// A layer of one of the kinds that use their parameters differently.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)] // a handful of them
pub enum Layer {
    Dense(Linear),
    Norm(LayerNorm),
    Feed(PositionWiseFeedForward),
    Stack(Stack),
}

#[derive(Module, Debug)]
pub struct Stack {
    matrices: Param<Tensor<3>>,
}

#[derive(Module, Debug)]
pub struct Net {
    embedding: Embedding,
    pub layers: Vec<Layer>,
    /// Without one, the embedding is also the output head.
    head: Option<Linear>,
    /// Used without gradients only.
    evaluated: Option<Linear>,
}

/// The kinds of matrices that may be cut.
#[derive(Debug, Clone, Copy)]
pub enum Matrix {
    Table,
    Head,
    Stack,
    Layer,
}

/// The matrices of a stack that a pass uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Experts {
    All,
    /// One in each pass, the same on all ranks: the gradients of the others are zero on all ranks.
    OfPass,
    /// One in each pass, another one on every rank.
    OfRank,
}

/// A model, and the layers of a pass, in order: some several times, and some not at all.
#[derive(Debug, Clone)]
pub struct Shape {
    pub kinds: Vec<u8>,
    pub uses: Vec<usize>,
    pub frozen: Option<usize>,
    pub has_head: bool,
    pub has_evaluated: bool,
    pub experts: Experts,
    /// `true` if each rank leaves another use of a layer out of a pass.
    pub skips: bool,
    /// `true` if ranks may have slices of layers.
    pub is_cut: bool,
}

impl Shape {
    /// Returns `true` if a stack of matrices is trained, for which there is a rule.
    pub fn trains_stack(&self) -> bool {
        let mut kinds = self.kinds.iter().enumerate();
        kinds.any(|(index, kind)| *kind == STACK && self.frozen != Some(index))
    }

    /// The layers of a kind.
    pub fn of_kind(&self, kind: u8) -> impl Iterator<Item = usize> {
        let kinds = self.kinds.iter().enumerate();
        kinds.filter(move |(_, other)| **other == kind).map(|(index, _)| index)
    }

    /// Leaves at most two uses of a parameter in a pass: a sum of more depends on their order. A
    /// teacher that still has the model's parameters uses each as often as the model.
    pub fn limit_uses(&mut self, has_teacher: bool) {
        let most = if has_teacher { 1 } else { 2 };
        let mut counts = vec![0; self.kinds.len()];
        self.uses.retain(|index| {
            counts[*index] += 1;
            counts[*index] <= most
        });
        self.has_head |= has_teacher;
    }
}

/// A pass of a rank.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    pub shape: &'a Shape,
    /// The ranks that have slices of parameters, if any are cut.
    pub slices: Option<&'a Communicator>,
    /// The cuts, if these ranks have different data.
    pub data_cuts: Option<Cuts>,
    /// The layout of a model of which some ranks leave layers out.
    pub layout: Option<&'a Layout>,
    /// The rank among those that have other data.
    pub rank: usize,
    /// The number of the pass.
    pub number: usize,
}

impl Pass<'_> {
    pub fn tokens(&self, device: &Device) -> Tensor<2, Int> {
        let Self { rank, number, .. } = self;
        let token =
            |index: usize| ((index * (7 + number) + rank * 5 + number * number) % TOKENS) as i64;
        Tensor::from_data(TensorData::new((0..12).map(token).collect::<Vec<_>>(), [2, 6]), device)
    }

    /// Returns `true` if this rank leaves a use of a layer out. In some passes, none is left out.
    fn skips(&self, number: usize) -> bool {
        let uses = self.shape.uses.len() + 1;
        self.shape.skips && (self.rank + self.number) % uses == number
    }

    /// The whole of a parameter that may be cut.
    fn whole<const D: usize>(
        &self,
        held: Tensor<D>,
        whole: [usize; D],
        matrix: Matrix,
    ) -> Tensor<D> {
        match self.data_cuts {
            Some(cuts) => self.exchanged(held, whole, cuts[matrix as usize]),
            None => self.sum_of_slices(held, whole),
        }
    }

    /// The slices that ranks with different data send each other: the gradient of a slice is the
    /// sum over their data. A rank that has all parameters sends as much, so that its gradients
    /// have the bits of slices.
    fn exchanged<const D: usize>(
        &self,
        held: Tensor<D>,
        whole: [usize; D],
        cut: Option<usize>,
    ) -> Tensor<D> {
        let Some(dimension) = cut else {
            return held;
        };
        let group = self.slices.expect("slices have a group");
        let bound = |rank: usize| rank * whole[dimension] / group.size();
        let own = bound(group.rank())..bound(group.rank() + 1);
        let is_whole = held.dims() == whole;
        let slice = if is_whole { held.narrow(dimension, own.start, own.len()) } else { held };
        // An operation of its own adds up the gradients of the copies, before those of other uses.
        let rows = (slice * 1.0).swap_dims(0, dimension);
        let sent = vec![own.len(); group.size()];
        let counts = group.pair_counts(&sent, &rows.device()).expect("all ranks send slices");
        let copies = Tensor::cat(vec![rows; group.size()], 0);
        exchange(copies, &counts, group).swap_dims(0, dimension)
    }

    /// The sum of the slices of ranks that share data, each among zeros.
    fn sum_of_slices<const D: usize>(&self, held: Tensor<D>, whole: [usize; D]) -> Tensor<D> {
        let dims = held.dims();
        let Some(dimension) = (0..D).find(|dimension| dims[*dimension] != whole[*dimension]) else {
            return held;
        };
        let group = self.slices.expect("slices have a group");
        let start = group.rank() * whole[dimension] / group.size();
        let end = whole[dimension] - start - dims[dimension];
        let zeros = |length| {
            let mut shape = dims;
            shape[dimension] = length;
            (length > 0).then(|| Tensor::zeros(shape, (&held.device(), held.dtype())))
        };
        let parts = [zeros(start), Some(held.clone()), zeros(end)];
        leave(Tensor::cat(parts.into_iter().flatten().collect(), dimension), group)
    }

    fn linear(&self, linear: &Linear, x: Tensor<3>, matrix: Matrix) -> Tensor<3> {
        let Linear { weight, bias, .. } = linear;
        let outputs = if let Matrix::Head = matrix { TOKENS } else { WIDTH };
        let product = x.matmul(self.whole(weight.val(), [WIDTH, outputs], matrix).unsqueeze());
        product + bias.as_ref().expect("the layer has a bias").val().unsqueeze()
    }

    /// A weight that the stack of a layer has in this pass.
    fn of_stack(&self, stack: &Stack, layer: usize) -> Tensor<2> {
        let shape = [EXPERTS, WIDTH, WIDTH];
        let matrices = self.whole(stack.matrices.val(), shape, Matrix::Stack);
        let expert = match self.shape.experts {
            Experts::All => return matrices.mean_dim(0).squeeze_dim(0),
            Experts::OfPass => self.number + layer,
            Experts::OfRank => self.number + layer + self.rank,
        } % EXPERTS;
        matrices.narrow(0, expert, 1).squeeze_dim(0)
    }
}

impl Net {
    pub fn new(shape: &Shape, seed: u64, half: Option<MasterWeights>, device: &Device) -> Self {
        let linear = |outputs| LinearConfig::new(WIDTH, outputs).init(device);
        let layer = |kind: &u8| match *kind {
            DENSE => Layer::Dense(linear(WIDTH)),
            1 => Layer::Norm(LayerNormConfig::new(WIDTH).init(device)),
            2 => {
                let feed = PositionWiseFeedForwardConfig::new(WIDTH, 3 * WIDTH);
                Layer::Feed(feed.with_dropout(0.0).init(device))
            }
            _ => {
                let normal = Distribution::Normal(0.0, 0.1);
                let matrices = Tensor::random([EXPERTS, WIDTH, WIDTH], normal, device);
                Layer::Stack(Stack { matrices: Param::from_tensor(matrices.require_grad()) })
            }
        };
        let net = Self {
            embedding: EmbeddingConfig::new(TOKENS, WIDTH).init(device),
            layers: shape.kinds.iter().map(layer).collect(),
            head: shape.has_head.then(|| linear(TOKENS)),
            evaluated: shape.has_evaluated.then(|| linear(TOKENS)),
        };
        let net = net.map(&mut Fixed::new(seed));
        let mut net = if half.is_some() { net.map(&mut Rounded(DType::BF16)) } else { net };
        if let Some(frozen) = shape.frozen {
            let layer = net.layers.remove(frozen);
            net.layers.insert(frozen, layer.no_grad());
        }
        net
    }

    fn table(&self, pass: Pass<'_>) -> Tensor<2> {
        pass.whole(self.embedding.weight.val(), [TOKENS, WIDTH], Matrix::Table)
    }

    fn features(&self, pass: Pass<'_>, tokens: Tensor<2, Int>) -> Tensor<3> {
        let x = embedding(self.table(pass), tokens);
        let uses = pass.shape.uses.iter().enumerate();
        uses.fold(x, |x, (number, index)| match &self.layers[*index] {
            layer if pass.skips(number) => {
                if let Some(layout) = pass.layout {
                    layout.unused(layer);
                }
                x
            }
            // Burn's own layer where it is not cut.
            Layer::Dense(linear) if pass.shape.is_cut => {
                relu(pass.linear(linear, x, Matrix::Layer))
            }
            Layer::Dense(linear) => relu(linear.forward(x)),
            Layer::Norm(norm) => norm.forward(x),
            Layer::Feed(feed) => feed.forward(x),
            Layer::Stack(stack) => x.clone() + x.matmul(pass.of_stack(stack, *index).unsqueeze()),
        })
    }

    pub fn loss(&self, pass: Pass<'_>, tokens: Tensor<2, Int>) -> Tensor<1> {
        let x = self.features(pass, tokens);
        let logits = match &self.head {
            Some(head) => pass.linear(head, x, Matrix::Head),
            None => x.matmul(self.table(pass).transpose().unsqueeze()),
        };
        (logits - 0.5).square().mean()
    }

    pub fn evaluate(&self, pass: Pass<'_>, tokens: Tensor<2, Int>) -> Tensor<1> {
        match &self.evaluated {
            Some(linear) => linear.forward(self.features(pass, tokens)).square().mean(),
            None => self.loss(pass, tokens),
        }
    }
}
