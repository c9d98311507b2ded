//! Links against ordinary operations: values, gradients, the number of calls, and their order.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Tensor};
use distmuon::Error;
use distmuon::comm::{ReduceOp, World};
use distmuon::link::{GraphOrder, Link, supports};
use distmuon_testing::models::bits;

/// The device without checkpoints, and with.
fn devices() -> [Device; 2] {
    let device = Device::default().autodiff();
    assert!(supports(&device));
    [device.clone(), device.gradient_checkpointing()]
}

/// Calls of the closures of links.
#[derive(Clone, Debug, Default)]
struct Calls {
    backward: Arc<AtomicUsize>,
    again: Arc<AtomicUsize>,
}

impl Calls {
    fn counts(&self) -> [usize; 2] {
        [self.backward.load(SeqCst), self.again.load(SeqCst)]
    }

    /// The input times three, in another shape, computed without autodiff.
    fn triple(&self, input: Tensor<2>, made_again: bool) -> Tensor<3> {
        let [rows, columns] = input.dims();
        let output = (input.clone().without_autodiff() * 3.0).reshape([rows, 1, columns]);
        let Self { backward, again } = self.clone();
        let link = Link::new(move |gradient| {
            assert!(!gradient.is_autodiff() && gradient.dims() == [rows * columns]);
            backward.fetch_add(1, SeqCst);
            gradient * 3.0
        });
        let link = match made_again {
            true => link.made_again(move |input| {
                assert!(!input.is_autodiff());
                again.fetch_add(1, SeqCst);
                input * 3.0
            }),
            false => link,
        };
        link.attach(input, output)
    }
}

/// As [`Calls::triple`], by ordinary operations.
fn ordinary(input: Tensor<2>) -> Tensor<3> {
    let [rows, columns] = input.dims();
    (input * 3.0).reshape([rows, 1, columns])
}

fn leaf(device: &Device) -> Tensor<2> {
    Tensor::random([4, 5], Distribution::Uniform(-1.0, 1.0), device).require_grad()
}

/// A function of two leaves and of an operation.
type Loss = fn(&[Tensor<2>; 2], &dyn Fn(Tensor<2>) -> Tensor<3>) -> Tensor<1>;

/// Asserts that links and ordinary operations give equal bits. `backward` has the calls of the
/// backward closure, and `again` those of the forward closure on a device without checkpoints, and
/// with.
fn assert_equal(loss: Loss, backward: usize, again: [usize; 2]) {
    for made_again in [false, true] {
        for (device, again) in devices().into_iter().zip(again) {
            let leaves = [leaf(&device), leaf(&device)];
            let calls = Calls::default();
            let linked = loss(&leaves, &|input| calls.triple(input, made_again));
            let expected = loss(&leaves, &ordinary);
            assert_eq!(bits(&linked), bits(&expected));
            let [linked, expected] = [linked.backward(), expected.backward()];
            for leaf in &leaves {
                let [linked, expected] = [&linked, &expected].map(|all| leaf.grad(all));
                assert_eq!(linked.as_ref().map(bits), expected.as_ref().map(bits));
            }
            let again = if made_again { again } else { 0 };
            assert_eq!(calls.counts(), [backward, again], "{made_again} {device:?}");
        }
    }
}

#[test]
fn values_and_gradients_are_those_of_ordinary_operations() {
    // A square needs its input in the backward pass, a sum does not.
    assert_equal(|x, f| f(x[0].clone()).powi_scalar(2).sum(), 1, [1, 1]);
    assert_equal(|x, f| f(x[0].clone()).sum(), 1, [0, 0]);
}

#[test]
fn inputs_outputs_and_links_may_be_reused() {
    // Without checkpoints, the view keeps its input.
    let input_reused: Loss = |x, f| {
        let y: Tensor<2> = f(x[0].clone()).squeeze_dim(1);
        (y * x[0].clone() * relu(x[0].clone())).sum() + x[0].clone().powi_scalar(2).sum()
    };
    assert_equal(input_reused, 1, [0, 1]);
    let output_used_twice: Loss = |x, f| {
        let y = f(x[0].clone());
        y.clone().powi_scalar(2).sum() + (y * x[1].clone().unsqueeze_dim(1)).sum()
    };
    assert_equal(output_used_twice, 1, [1, 1]);
    let two_of_a_leaf: Loss =
        |x, f| f(x[0].clone()).powi_scalar(2).sum() + f(x[0].clone()).powi_scalar(3).sum();
    assert_equal(two_of_a_leaf, 2, [2, 2]);
    let output_not_used: Loss = |x, f| {
        drop(f(x[0].clone()));
        x[1].clone().powi_scalar(2).sum()
    };
    assert_equal(output_not_used, 0, [0, 0]);
    let link_of_a_link: Loss = |x, f| {
        let y: Tensor<2> = f(relu(x[0].clone()) * x[1].clone()).squeeze_dim(1);
        (f(y) * x[1].clone().unsqueeze_dim(1)).powi_scalar(2).sum()
    };
    assert_equal(link_of_a_link, 2, [1, 2]);
}

#[test]
fn inputs_without_gradients_have_no_backward_pass() {
    for device in devices() {
        let input = Tensor::<2>::random([4, 5], Distribution::Default, &device);
        let weight = leaf(&device);
        let calls = Calls::default();
        let output = calls.triple(input.clone(), true) * weight.clone().unsqueeze_dim(1);
        let gradient = weight.grad(&output.sum().backward()).unwrap();
        assert_eq!(bits(&gradient), bits(&(input.clone() * 3.0)));
        let inner = calls.triple(input.inner(), true);
        assert!(!inner.is_autodiff());
        assert_eq!(calls.counts(), [0, 0]);
    }
}

#[test]
fn gradients_may_be_taken_at_a_leaf() {
    for device in devices() {
        let (leaf, taken) = (leaf(&device), Arc::new(Mutex::new(vec![])));
        let store = taken.clone();
        let link = Link::taking(move |gradient| store.lock().unwrap().push(gradient));
        let output: Tensor<1> = link.attach(leaf.clone(), leaf.clone().reshape([20]));
        assert!(leaf.grad(&output.powi_scalar(2).sum().backward()).is_none());
        let taken = taken.lock().unwrap().pop().unwrap();
        assert_eq!(bits(&taken), bits(&(leaf.inner() * 2.0)));
    }
}

#[test]
fn forward_passes_may_be_abandoned_and_repeated() {
    for device in devices() {
        let (leaf, calls) = (leaf(&device), Calls::default());
        for round in 1..=3 {
            drop(calls.triple(leaf.clone(), true).powi_scalar(2).sum());
            let gradients = calls.triple(leaf.clone(), true).powi_scalar(2).sum().backward();
            let expected = leaf.clone().inner() * 3.0 * 2.0 * 3.0;
            assert_eq!(bits(&leaf.grad(&gradients).unwrap()), bits(&expected));
            assert_eq!(calls.counts(), [round, round]);
        }
    }
}

/// The names of all closures of a graph in the order of their calls: branches of equal depth,
/// leaves that are used twice, and links of links, with an order or without.
fn sequence(device: &Device, order: Option<&GraphOrder>) -> Vec<String> {
    let log = Arc::<Mutex<Vec<String>>>::default();
    let named = |name: String, input: &Tensor<2>| -> Tensor<2> {
        let output = input.clone().without_autodiff() * 2.0;
        let [to, from] = [log.clone(), log.clone()];
        let (backward, again) = (name.clone(), format!("{name} again"));
        let link = Link::new(move |gradient| {
            to.lock().unwrap().push(backward.clone());
            gradient * 2.0
        });
        let link = link.made_again(move |input| {
            from.lock().unwrap().push(again.clone());
            input * 2.0
        });
        let link = match order {
            Some(order) => link.at(order.next(input)),
            None => link,
        };
        link.attach(input.clone(), output)
    };
    let random = |rows| Tensor::<2>::random([rows, 6], Distribution::Default, device);
    let leaves: Vec<_> = (0..8).map(|_| random(6).require_grad()).collect();
    let input = random(3);
    let mut sum = input.clone();
    for (index, leaf) in leaves.iter().enumerate() {
        let branch = input.clone().matmul(named(format!("branch {index}"), leaf));
        let second = named(format!("second {index}"), &leaves[(index + 5) % 8]);
        let twice = relu(branch).matmul(second);
        let inner = named(format!("inner {index}"), leaf);
        sum = sum + twice.clone().matmul(named(format!("outer {index}"), &inner)) * twice;
    }
    sum.sum().backward();
    log.lock().unwrap().drain(..).collect()
}

#[test]
fn closures_are_called_in_the_order_of_the_graph() {
    for device in devices() {
        let first = sequence(&device, None);
        assert_eq!(first.iter().filter(|name| !name.ends_with("again")).count(), 4 * 8);
        // Numbers of nodes of several threads interleave.
        for _ in 0..5 {
            std::thread::scope(|scope| {
                let run = || scope.spawn(|| sequence(&device, None));
                for run in [run(), run(), run(), run()] {
                    assert_eq!(run.join().unwrap(), first);
                }
            });
        }
    }
}

#[test]
fn a_clock_places_every_use_of_a_leaf_in_the_backward_pass() {
    for device in devices() {
        let (order, log) = (GraphOrder::default(), Arc::<Mutex<Vec<String>>>::default());
        let logged = |name: String| {
            let log = log.clone();
            move || log.lock().unwrap().push(name.clone())
        };
        let random = || Tensor::<2>::random([5, 5], Distribution::Default, &device);
        let run = |is_ordered: bool| {
            order.reset();
            let weights = [random(), random(), random()].map(Tensor::require_grad);
            let output = weights.iter().enumerate().fold(random(), |input, (index, weight)| {
                let take = logged(format!("weight {index}"));
                let link = Link::taking(move |_| take());
                let link = if is_ordered { link.at(order.next(weight)) } else { link };
                let value = weight.clone().without_autodiff();
                let output = input.matmul(link.attach(weight.clone(), value));
                let pass = logged(format!("output {index}"));
                let link = Link::new(move |gradient| {
                    pass();
                    gradient
                });
                let value = output.clone().without_autodiff();
                relu(relu(link.attach(output, value)) * 0.5)
            });
            output.sum().backward();
            log.lock().unwrap().drain(..).collect::<Vec<_>>()
        };
        let at_the_end = ["output 2", "output 1", "output 0", "weight 2", "weight 1", "weight 0"];
        assert_eq!(run(false), at_the_end);
        let in_between = ["output 2", "weight 2", "output 1", "weight 1", "output 0", "weight 0"];
        for _ in 0..2 {
            assert_eq!(run(true), in_between);
        }
    }
}

#[test]
fn ranks_wait_for_each_other_in_the_backward_pass() {
    let deadline = Duration::from_secs(60);
    let devices = vec![Device::default().autodiff(); 2];
    World::threads_within(deadline, devices, |world| {
        let (device, comm) = (world.device(), world.communicator());
        let model: Vec<Linear> =
            (0..2).map(|_| LinearConfig::new(6, 6).with_bias(false).init(device)).collect();
        let reduced = |weight: Tensor<2>| {
            let (value, [to, from]) =
                (weight.clone().without_autodiff(), [comm.clone(), comm.clone()]);
            let sum = |comm: &distmuon::comm::Communicator, values| {
                comm.all_reduce(values, ReduceOp::Mean).unwrap().wait().unwrap()
            };
            let link = Link::new(move |gradient| sum(&to, gradient));
            link.made_again(move |values| sum(&from, values)).attach(weight, value)
        };
        for round in 0..ROUNDS {
            if (round + world.rank()) % 3 == 0 {
                std::thread::sleep(Duration::from_micros(100)); // out of step
            }
            let input = Tensor::<2>::ones([2, 6], device);
            let layers = model.iter().map(|layer| reduced(layer.weight.val()));
            let output = layers.fold(input, |output, weight| relu(output.matmul(weight)));
            let gradients = output.sum().backward();
            assert!(model[0].weight.val().grad(&gradients).is_some());
        }
        Ok::<_, Error>(())
    })
    .unwrap();
}

/// Rounds of two ranks. On devices other than CPUs, an exchange takes milliseconds.
const ROUNDS: usize = 2000;
