use burn::tensor::DType;

use super::*;
use crate::distributed::plan::tests::{
    WORLDS, costs, elements, flops, max_load, models, plan, stack,
};
use crate::distributed::plan::{
    Balancing, Cut, MatrixOrder, Parameter, Placement, PlanConfig, ShapeCost,
};

/// A machine on which only matrices take time.
const FREE: Machine = Machine {
    links: Links { bandwidth: f64::INFINITY, latency: 0.0 },
    node: None,
    elementwise: f64::INFINITY,
};

/// A machine with one kind of links.
fn machine(bandwidth: f64, latency: f64, elementwise: f64) -> Machine {
    Machine { links: Links { bandwidth, latency }, node: None, elementwise }
}

/// A step without passes.
const STEP: PassTimes = PassTimes {
    seconds: 0.0,
    inside_nodes: false,
    ahead: Some(0),
    in_flight: Some(0),
    activations: 0,
};

#[test]
fn without_communication_a_step_takes_the_time_of_the_busiest_rank() {
    for (name, parameters) in models() {
        let costs = costs(&parameters, 0.0);
        for world_size in WORLDS {
            let plan = plan(&parameters, world_size, Balancing::Greedy, &costs);
            let path = timeline(&plan, &costs, &FREE, &STEP);
            assert_eq!(path.communication, 0.0);
            let max_load = max_load(&plan, &costs);
            for time in [path.compute, path.total] {
                assert!((time / max_load - 1.0).abs() < 1e-9, "{name} on {world_size}: {path:?}");
            }
        }
    }
}

#[test]
fn the_timeline_of_two_ranks_equals_a_calculation_by_hand() {
    let parameters = vec![stack("a", 1, [8, 8]), stack("b", 1, [8, 8]), elements("e", &[4096])];
    let costs = Costs::new([([8, 8], ShapeCost { fixed: 1.0, each: 2.0 })]);
    let plan = plan(&parameters, 2, Balancing::Greedy, &costs);
    let path = timeline(&plan, &costs, &machine(1024.0, 0.5, 2048.0), &STEP);
    // Half of every buffer leaves a rank: 256 of 512 bytes, 8192 of 16384.
    let [matrices, vector] = [0.5 + 0.25, 0.5 + 8.0];
    let messages = 2.0 * (matrices + vector) + 2.0 * (0.5 + 2.0 * 3.0 / 1024.0);
    assert!((path.communication - messages).abs() < 1e-9, "{path:?}");
    // A batch of one matrix, and half of the vector.
    assert!((path.compute - (3.0 + 4.0)).abs() < 1e-9, "{path:?}");
    // Everything in turn, except that matrices are updated while the vector is reduced.
    let total = path.communication + path.compute - 3.0;
    assert!((path.total - total).abs() < 1e-9, "{path:?}");
}

#[test]
fn the_timelines_of_owned_and_reduced_parameters_equal_calculations_by_hand() {
    let placed = |placement, bucket_bytes| {
        let parameters: Vec<_> =
            ["a", "b"].map(|path| Parameter { placement, ..stack(path, 1, [8, 8]) }).into();
        let costs = Costs::new([([8, 8], ShapeCost { fixed: 0.0, each: 1.0 })]);
        let config =
            PlanConfig { bucket_bytes, order: MatrixOrder::Model, ..PlanConfig::default() };
        (Plan::new(parameters, 2, &config, &costs).unwrap(), costs)
    };
    // 256 bytes in two passes: forward 3 and 3, backward 6 and 6. A message takes 2.
    let slow = machine(64.0, 0.0, 1.0);
    let time = |placement, ahead| {
        let (plan, costs) = placed(placement, 256);
        let passes = PassTimes { seconds: 18.0, ahead: Some(ahead), ..STEP };
        timeline(&plan, &costs, &slow, &passes)
    };
    // The last reduction is not hidden, and each rank updates its matrix. Flags of two parameters
    // are summed at the end: 8 bytes, twice, which nothing waits for.
    let reduced = time(Placement::Reduced, 0);
    let flags = 2.0 * 4.0 / 64.0;
    // The first parameter arrives after 2, the second one meanwhile.
    assert!((reduced.total - (2.0 + 18.0 + 2.0 + 1.0)).abs() < 1e-9, "{reduced:?}");
    assert!((reduced.communication - 4.0 * 2.0).abs() < 1e-9 + flags, "{reduced:?}");
    // Both arrive together as one bucket.
    let (plan, costs) = placed(Placement::Reduced, 512);
    let passes = PassTimes { seconds: 18.0, ..STEP };
    let together = timeline(&plan, &costs, &slow, &passes);
    assert!((together.total - (4.0 + 18.0 + 2.0 + 1.0)).abs() < 1e-9, "{together:?}");
    // Each of four uses waits for its gathering, and the second of the backward pass for the
    // reduction before it.
    let owned = time(Placement::Owned, 0);
    assert!((owned.total - (4.0 * 2.0 + 18.0 + 2.0 * 2.0 + 1.0)).abs() < 1e-9, "{owned:?}");
    // Gathered ahead, only the first uses of both passes wait.
    let ahead = time(Placement::Owned, 512);
    assert!((ahead.total - (2.0 * 2.0 + 18.0 + 2.0 + 1.0)).abs() < 1e-9, "{ahead:?}");
    assert!((ahead.communication - 6.0 * 2.0).abs() < 1e-9 + flags, "{ahead:?}");
}

#[test]
fn nodes_divide_what_crosses_between_them() {
    let parameters = [Parameter { placement: Placement::Owned, ..stack("a", 1, [8, 8]) }];
    let costs = Costs::new([([8, 8], ShapeCost { fixed: 0.0, each: 0.0 })]);
    let plan = plan(&parameters, 4, Balancing::Greedy, &costs);
    let [inside, links] = [256.0, 16.0].map(|bandwidth| Links { bandwidth, latency: 0.0 });
    let machine = Machine { links, node: Some((2, inside)), elementwise: 1.0 };
    let passes = PassTimes { inside_nodes: true, ..STEP };
    let path = timeline(&plan, &costs, &machine, &passes);
    // Inside, half of 256 bytes, three times; across, half of 128 bytes, twice: for the new part
    // and for the sum.
    let [inside, across] = [3.0 * 128.0 / 256.0, 2.0 * 64.0 / 16.0];
    // One flag, to all and back.
    let flags = 2.0 * (2.0 / 256.0 + 1.0 / 16.0);
    assert!((path.total - (inside + across + flags)).abs() < 1e-9, "{path:?}");
}

#[test]
fn better_links_never_lengthen_a_step() {
    let [(_, gpt2), ..] = models();
    let costs = costs(&gpt2, 1e9);
    for world_size in WORLDS {
        let plan = plan(&gpt2, world_size, Balancing::Greedy, &costs);
        let total = |bandwidth, latency| {
            timeline(&plan, &costs, &machine(bandwidth, latency, 1e-3), &STEP).total
        };
        let times = [total(1e-4, 1e6), total(1e-3, 1e6), total(1e-3, 0.0), total(1e9, 0.0)];
        assert!(times.is_sorted_by(|slow, fast| slow >= fast), "{times:?}");
    }
}

#[test]
fn the_timeline_of_slices_equals_a_calculation_by_hand() {
    let cut = Cut { axis: "tp".into(), ranks: 2, dimension: 1, parts: 1 };
    let slices = Some(Slices::new(&[1, 8, 8], &[cut]));
    let costs = Costs::new([([8, 8], ShapeCost { fixed: 0.0, each: 4.0 })]);
    let parameters = [Parameter { slices, ..stack("a", 1, [8, 8]) }];
    let total = |ranks: usize, activations: usize| {
        let passes = PassTimes { activations, ..STEP };
        let plan = plan(&parameters, ranks, Balancing::Greedy, &costs);
        timeline(&plan, &costs, &machine(64.0, 0.0, 1.0), &passes).total
    };
    // 256 bytes at 64 bytes a second on two ranks with a half each: nothing to reduce; of 128
    // bytes, half is sent to assemble in 1 second, 4 seconds of iteration, and 1 to distribute.
    // Then one flag, to all and back.
    let flags = |ranks: f64| 2.0 * 4.0 * (ranks - 1.0) / ranks / 64.0;
    assert_eq!(total(2, 0), 6.0 + flags(2.0));
    // On four ranks, half of the 128 bytes of a slice is reduced in 1 second, and gathered in 1;
    // of 64 bytes, half is sent to assemble in 0.5 seconds, and to distribute in 0.5.
    assert_eq!(total(4, 0), 1.0 + 0.5 + 4.0 + 0.5 + 1.0 + flags(4.0));
    // 256 bytes of activations: in each pass, half of 128 to scatter and to gather.
    assert_eq!(total(2, 256), 4.0 + 6.0 + flags(2.0));

    // In half precision, a gradient of 4 bytes and a value of 2 come, and a value goes.
    let [a] = &parameters;
    let halves = [Parameter { dtype: DType::BF16, ..a.clone() }];
    let half = plan(&halves, 2, Balancing::Greedy, &costs);
    let passes = PassTimes::default();
    let total = timeline(&half, &costs, &machine(64.0, 0.0, 1.0), &passes).total;
    assert_eq!(total, (6.0 + 2.0) * 16.0 / 64.0 + 4.0 + flags(2.0));

    // Rows are gathered for both passes and reduced, as a whole matrix is: half of 256 bytes. The
    // step assembles and distributes half of a matrix.
    let slices = Some(Slices::new(&[1, 8, 8], &[]).in_rows("dp", 2));
    let rows = [Parameter { slices, placement: Placement::Owned, ..a.clone() }];
    let rows = plan(&rows, 2, Balancing::Greedy, &costs);
    let total = timeline(&rows, &costs, &machine(64.0, 0.0, 1.0), &STEP).total;
    assert_eq!(total, 3.0 * 2.0 + 1.0 + 4.0 + 1.0 + flags(2.0));
}

/// A simulation of passes layer by layer, each with the bytes of one message. It is independent of
/// the code of plans.
struct Layers {
    bytes: Vec<f64>,
    /// Seconds of both passes, and of the iteration on the busiest rank.
    seconds: f64,
    iteration: f64,
    ranks: usize,
}

impl Layers {
    const NODE: usize = 8;
    const INSIDE: Links = Links { bandwidth: 4.5e11, latency: 1e-5 };
    const ACROSS: Links = Links { bandwidth: 5e10, latency: 1e-5 };

    fn message(bytes: f64, ranks: usize, links: Links) -> f64 {
        let ranks = ranks as f64;
        links.latency * ranks.log2() + bytes * (ranks - 1.0) / ranks / links.bandwidth
    }

    /// Nothing is hidden, and nodes count for nothing.
    fn flat(&self) -> f64 {
        let message = |bytes: &f64| Self::message(*bytes, self.ranks, Self::ACROSS);
        self.seconds + 2.0 * self.bytes.iter().map(message).sum::<f64>() + self.iteration
    }

    /// Hidden behind the passes. Owned layers are gathered inside nodes for each pass, one ahead of
    /// its use, and exchanged between nodes once.
    fn hidden(&self, owned: bool) -> f64 {
        let (nodes, last) = (self.ranks / Self::NODE, self.bytes.len() - 1);
        let inside = |layer: usize| Self::message(self.bytes[layer], Self::NODE, Self::INSIDE);
        let across = |layer: usize| {
            Self::message(self.bytes[layer] / Self::NODE as f64, nodes, Self::ACROSS)
        };
        let forward =
            |layer: usize| self.seconds / 3.0 * self.bytes[layer] / self.bytes.iter().sum::<f64>();
        let (mut time, mut near, mut far) = (0.0_f64, 0.0_f64, 0.0_f64);
        for layer in 0..=last {
            far += across(layer);
            near = near.max(far) + inside(layer);
            time = time.max(near) + forward(layer);
        }
        (near, far) = (near.max(time), far.max(time));
        if owned {
            near += inside(last);
            time = time.max(near);
        }
        for layer in (0..=last).rev() {
            let again = owned && layer > 0;
            near += if again { inside(layer - 1) } else { 0.0 };
            let ready = near;
            time += 2.0 * forward(layer);
            near = near.max(time) + inside(layer);
            far = far.max(near) + across(layer);
            time = if again { time.max(ready) } else { time };
        }
        time.max(near).max(far) + self.iteration
    }
}

#[test]
fn timelines_are_those_of_a_simulation_layer_by_layer() {
    // A GPT of 20 layers of 12 x 1280 x 1280 in float32, and 32 layers of 13 x 4096 x 4096, near
    // those of Llama-3-8B, in bfloat16.
    let gpt = (20, 12, 1280, 65_536, DType::F32, 524_288.0);
    let llama = (32, 13, 4096, 128_256, DType::BF16, 4_194_304.0);
    for (layers, matrices, width, vocabulary, dtype, tokens) in [gpt, llama] {
        let placed = |placement| -> Vec<Parameter> {
            let layer = |_| stack("layer", matrices, [width; 2]);
            // Two tables, in parts no larger than a layer.
            let rows = matrices * width;
            let starts = (0..2 * vocabulary).step_by(rows);
            let part = |start: usize| elements("part", &[rows.min(2 * vocabulary - start), width]);
            let all = (0..layers).map(layer).chain(starts.map(part));
            all.map(|parameter| Parameter { dtype, placement, ..parameter }).collect()
        };
        let bytes: Vec<f64> = placed(Placement::Replicated)
            .iter()
            .map(|parameter| (parameter.elements() * dtype.size()) as f64)
            .collect();
        let elements: f64 = bytes.iter().sum::<f64>() / dtype.size() as f64;
        let each = flops([width; 2]) / 4e14;
        let costs = Costs::new([([width; 2], ShapeCost { fixed: 0.0, each })]);
        for ranks in [64, 128, 512] {
            let simulated = Layers {
                bytes: bytes.clone(),
                seconds: 6.0 * elements * tokens / ranks as f64 / 4e14,
                iteration: (layers * matrices).div_ceil(ranks) as f64 * each,
                ranks,
            };
            let total = |placement, node, ahead| {
                let config = PlanConfig { bucket_bytes: 1, ..PlanConfig::default() };
                let plan = Plan::new(placed(placement), ranks, &config, &costs).unwrap();
                let machine = Machine { links: Layers::ACROSS, node, elementwise: f64::INFINITY };
                let seconds = simulated.seconds;
                let passes =
                    PassTimes { seconds, inside_nodes: true, ahead, ..PassTimes::default() };
                timeline(&plan, &costs, &machine, &passes).total
            };
            let nodes = Some((Layers::NODE, Layers::INSIDE));
            // By default as well: there are no lists, and no parameter is larger than a layer.
            let ahead = Some(2 * bytes[0] as usize);
            let pairs = [
                (total(Placement::Replicated, None, ahead), simulated.flat()),
                (total(Placement::Reduced, nodes, ahead), simulated.hidden(false)),
                (total(Placement::Owned, nodes, ahead), simulated.hidden(true)),
                (total(Placement::Owned, nodes, None), simulated.hidden(true)),
            ];
            for (index, (total, expected)) in pairs.into_iter().enumerate() {
                let [part, expected] = [total, expected].map(|time| simulated.seconds / time);
                let text = format!("{width}, {ranks} ranks, {index}: {part}, not {expected}");
                assert!((part - expected).abs() < 0.02, "{text}");
            }
        }
    }
}
