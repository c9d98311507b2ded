//! A mixture of experts: one of several networks computes every token. They may lie on different
//! ranks, to which the tokens are sent.

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear, LinearConfig};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Device, Int, Tensor, TensorData};
use distmuon::RoutingRule;
use distmuon::comm::{Communicator, PairCounts};
use distmuon::parallel::exchange;

use super::model::Region;

/// Experts with one hidden layer each. A router chooses one for every token.
#[derive(Module, Debug)]
pub struct Experts {
    router: Linear,
    /// `[experts, width, hidden]`: those of this rank.
    up: Param<Tensor<3>>,
    /// `[experts, hidden, width]`.
    down: Param<Tensor<3>>,
    /// The ranks that have the other experts.
    #[module(skip)]
    pub group: Option<Communicator>,
    pub region: Region,
}

/// Numbers of tokens.
struct Counts {
    /// Tokens of this rank for each of all experts.
    sent: Vec<usize>,
    /// Tokens of all ranks for each expert of this rank, rank by rank.
    received: Vec<usize>,
}

impl Experts {
    pub fn new(count: usize, width: usize, hidden: usize, device: &Device) -> Self {
        let stack = |inputs: usize, outputs| {
            let std = 0.5 / (inputs as f64).sqrt();
            Initializer::Normal { mean: 0.0, std }.init([count, inputs, outputs], device)
        };
        Self {
            router: LinearConfig::new(width, count).with_bias(false).init(device),
            up: stack(width, hidden),
            down: stack(hidden, width),
            group: None,
            region: Region::default(),
        }
    }

    /// The optimizers of the parameters.
    pub fn rules() -> [RoutingRule; 2] {
        [
            RoutingRule::muon(r"\.experts\.(up|down)$").batch().into(),
            RoutingRule::adamw(r"\.experts\.router\."),
        ]
    }

    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let shape = x.dims();
        let [batch, length, width] = shape;
        let x = x.reshape([batch * length, width]);
        let scores = softmax(self.router.forward(x.clone()), 1);
        let (score, choice) = scores.clone().max_dim_with_indices(1);
        let choice: Vec<usize> =
            choice.into_data().iter::<i64>().map(|expert| expert as usize).collect();
        let [_, experts] = scores.dims();
        let order = sorted(&choice);
        let Some(counts) = self.counts(&choice, experts, &x.device()) else {
            // A pass returns no error: the next step does.
            return Tensor::full(shape, f32::NAN, &x.device());
        };
        let computed = self.computed(select(x, &order), &counts);
        // Back in the order of tokens.
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(row, token)| back[*token] = row);
        (select(computed, &back) * score).reshape(shape)
    }

    /// The numbers of tokens, by the experts of this rank's. `None` after a failure.
    fn counts(&self, choice: &[usize], experts: usize, device: &Device) -> Option<Counts> {
        let mut sent = vec![0; experts];
        choice.iter().for_each(|expert| sent[*expert] += 1);
        let received = match &self.group {
            Some(group) => group.all_to_all_numbers(&sent, device).ok()?,
            None => sent.clone(),
        };
        Some(Counts { sent, received })
    }

    /// The rows of this rank's tokens, in the order of their experts, as these compute them.
    fn computed(&self, rows: Tensor<2>, counts: &Counts) -> Tensor<2> {
        // One use in a pass, also by a rank whose experts get no tokens: the same on all ranks.
        let stacks = [self.up.val(), self.down.val()];
        let Some(group) = &self.group else { return self.by_expert(stacks, rows, &counts.sent) };
        let held = counts.sent.len() / group.size();
        let of_ranks =
            |counts: &[usize]| counts.chunks(held).map(|rank| rank.iter().sum()).collect();
        let pairs =
            PairCounts { sent: of_ranks(&counts.sent), received: of_ranks(&counts.received) };
        let received = exchange(rows, &pairs, group);
        // Rank by rank, and there expert by expert: from now on the other way round.
        let of_ranks: Vec<&[usize]> = counts.received.chunks(held).collect();
        let experts = of_ranks.iter().flat_map(|counts| {
            counts.iter().enumerate().flat_map(|(expert, count)| vec![expert; *count])
        });
        let order = sorted(&experts.collect::<Vec<_>>());
        let all = (0..held).map(|expert| of_ranks.iter().map(|counts| counts[expert]).sum());
        let all: Vec<usize> = all.collect();
        if order.is_empty() {
            // No rows were received, but they have a gradient, and so have the experts.
            let [up, down] = stacks.map(Tensor::sum);
            return exchange(received, &pairs.back(), group) + ((up + down) * 0.0).unsqueeze();
        }
        let mut rank_by_rank = vec![0; order.len()];
        order.iter().enumerate().for_each(|(row, token)| rank_by_rank[*token] = row);
        let computed = self.by_expert(stacks, select(received, &order), &all);
        exchange(select(computed, &rank_by_rank), &pairs.back(), group)
    }

    /// Rows in the order of their experts, as these compute them.
    fn by_expert(
        &self,
        [up, down]: [Tensor<3>; 2],
        rows: Tensor<2>,
        counts: &[usize],
    ) -> Tensor<2> {
        let rows = self.region.enter(rows);
        let [_, width] = rows.dims();
        let mut first = 0;
        let mut computed = vec![];
        for (expert, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let matrix = |stack: &Tensor<3>| stack.clone().slice_dim(0, expert).squeeze_dim::<2>(0);
            let rows = rows.clone().slice([first..first + count, 0..width]);
            let hidden = relu(rows.matmul(matrix(&up))).square();
            computed.push(hidden.matmul(matrix(&down)));
            first += count;
        }
        self.region.leave(Tensor::cat(computed, 0))
    }
}

/// The indices of items in the order of their keys, and then their own.
fn sorted(keys: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|index| keys[*index]);
    order
}

fn select(rows: Tensor<2>, indices: &[usize]) -> Tensor<2> {
    let indices: Vec<i32> = indices.iter().map(|index| *index as i32).collect();
    let indices = Tensor::<1, Int>::from_data(TensorData::from(&*indices), &rows.device());
    rows.select(0, indices)
}
