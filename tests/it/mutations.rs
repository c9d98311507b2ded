//! Mistakes that are made on purpose, each in a run that is right without it, and what finds each.
//! `docs/design/mutations.md` has the table.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use distmuon::account::Account;
use distmuon::distributed::{DistModuleOptimizer, DistMuonConfig, Gradients, Layout, Mesh};
use distmuon::{
    Error, Expectation, FirstLinear, GradientBuffer, IterationDtype, IterationForm, KernelPolicy,
    LrScale, MatrixLayout, MuonConfig, NewtonSchulzConfig, Result, RoutingRule, World, checkpoint,
};
use distmuon_testing::device::has_type;
use distmuon_testing::models::{Fixed, gradients, tensors, weights};
use distmuon_testing::watched::replaced;

const RANKS: usize = 2;
const STEPS: u64 = 3;
/// Micro-batches of a rank in a step.
const PARTS: u64 = 2;
/// The step after which a run is saved and loaded.
const SAVED: u64 = 2;

#[derive(Module, Debug)]
struct Net {
    input: Linear,
    layers: Vec<Linear>,
    fused: Param<Tensor<2>>,
    stack: Param<Tensor<3>>,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let square = || LinearConfig::new(8, 8).with_bias(false).init(device);
        let options = (device, DType::F32);
        let net = Self {
            input: linear(6, 8),
            layers: (0..4).map(|_| square()).collect(),
            fused: Param::from_tensor(Tensor::ones([8, 12], options).require_grad()),
            stack: Param::from_tensor(Tensor::ones([3, 8, 6], options).require_grad()),
            head: linear(8, 5),
        };
        net.map(&mut Fixed::new(3))
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

/// Gradients whose sums over ranks and micro-batches are exact in float32: multiples of 1/64.
fn exact(net: &Net, seed: u64) -> GradientsParams {
    struct Round(GradientsParams);
    impl ModuleVisitor for Round {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = self.0.remove::<D>(param.id).expect("every parameter has a gradient");
            self.0.register(param.id, gradient.mul_scalar(64.0).round().div_scalar(64.0));
        }
    }
    let mut round = Round(gradients(net, seed));
    net.visit(&mut round);
    round.0
}

/// The gradients of a micro-batch.
fn of_part(net: &Net, step: u64, rank: usize, part: u64) -> GradientsParams {
    exact(net, (step * PARTS + part) * RANKS as u64 + rank as u64)
}

fn mean(net: &Net, parts: impl IntoIterator<Item = GradientsParams>) -> GradientsParams {
    let mut sum = GradientBuffer::new();
    parts.into_iter().for_each(|part| sum.add(net, part).expect("the gradients fit the model"));
    sum.take_mean(net)
}

fn of_rank(net: &Net, step: u64, rank: usize) -> GradientsParams {
    mean(net, (0..PARTS).map(|part| of_part(net, step, rank, part)))
}

/// The gradients of a rank in a step.
type OfRank = dyn Fn(&Net, u64, usize) -> Vec<GradientsParams> + Send + Sync;

/// A training program. Its closures are given the rank.
#[derive(Clone)]
struct Program {
    muon: MuonConfig,
    dist: DistMuonConfig,
    start: Arc<dyn Fn(Net, usize) -> Net + Send + Sync>,
    world: Arc<dyn Fn(&World) -> World + Send + Sync>,
    /// The gradients of every call of `step` in a step, by the step.
    gradients: Arc<OfRank>,
    lr: Arc<dyn Fn(usize) -> f64 + Send + Sync>,
    resume: Option<Resume>,
    /// The rank that does not request an account.
    silent: Option<usize>,
}

/// Loads the run that was saved at this path.
type Resume = fn(&Program, &World, &Path, Net, Old) -> Result<(Net, DistModuleOptimizer)>;

/// The optimizer of a program when it is saved.
struct Old {
    optim: DistModuleOptimizer,
}

/// The results of a run on rank 0.
#[derive(Debug, PartialEq)]
struct Run {
    accounts: Vec<Account>,
    weights: Vec<Vec<u8>>,
    /// By the position of the parameter in the model.
    states: BTreeMap<String, Vec<u8>>,
}

/// The states of an optimizer.
fn states(net: &Net, optim: &DistModuleOptimizer) -> Result<BTreeMap<String, Vec<u8>>> {
    struct Ids(Vec<String>);
    impl ModuleVisitor for Ids {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.id.val().to_string());
        }
    }
    let mut ids = Ids(vec![]);
    net.visit(&mut ids);
    let record = tensors(optim.to_record()?.into_bytes().expect("a record can be written"));
    let position = |(name, bytes): (String, Vec<u8>)| {
        let (id, slot) = name.split_once('.').expect("a state has the name of its parameter");
        let position = ids.0.iter().position(|each| each == id);
        (format!("{}.{slot}", position.expect("the model has the parameter")), bytes)
    };
    Ok(record.into_iter().map(position).collect())
}

/// A type of half precision that the device has.
fn half() -> IterationDtype {
    if has_type(FloatDType::BF16) { IterationDtype::Bf16 } else { IterationDtype::F16 }
}

impl Program {
    fn new() -> Self {
        let newton_schulz = NewtonSchulzConfig::new()
            .with_dtype(IterationDtype::F32)
            .with_form(IterationForm::Standard);
        let muon = MuonConfig::new()
            .with_newton_schulz(newton_schulz)
            .with_lr_scale(LrScale::Original)
            .with_first_linear(FirstLinear::Muon)
            .with_rule(RoutingRule::muon("stack").batch())
            .with_rule(RoutingRule::muon("fused").split([8, 4]))
            .expect(Expectation::Muon(r"^(input|layers\.\d+)\.weight$|^fused$|^stack$".into()))
            .expect(Expectation::MuonShare(0.85))
            .expect(Expectation::OncePerStep);
        Self {
            muon,
            dist: DistMuonConfig::new().with_check_every(1).with_small_elements(4),
            start: Arc::new(|net, _| net),
            world: Arc::new(World::clone),
            gradients: Arc::new(|net, step, rank| vec![of_rank(net, step, rank)]),
            lr: Arc::new(|_| 0.01),
            resume: None,
            silent: None,
        }
    }

    /// The settings without the expectations that name paths and count.
    fn expecting(mut self, expectation: Expectation) -> Self {
        self.muon.expectations = vec![expectation];
        self
    }

    fn config(&self) -> DistMuonConfig {
        self.dist.clone().with_muon(self.muon.clone())
    }

    /// Trains on two ranks.
    fn run(&self) -> Result<Run> {
        self.run_on(RANKS)
    }

    fn run_on(&self, ranks: usize) -> Result<Run> {
        let folder = tempfile::tempdir().expect("a folder can be created");
        let path = folder.path().join("run.bpk");
        let runs = World::threads(vec![device(); ranks], |world| self.rank(&world, &path));
        Ok(runs?.swap_remove(0))
    }

    fn rank(&self, world: &World, path: &Path) -> Result<Run> {
        let world = &(self.world)(world);
        let rank = world.rank();
        let mut net = (self.start)(Net::new(world.device()), rank);
        let layout = Layout::new(&Mesh::flat(world)).with_muon(self.muon.clone());
        let mut optim = self.config().init_on(&layout, &net)?;
        let mut accounts = vec![];
        for step in 0..STEPS {
            for grads in (self.gradients)(&net, step, rank) {
                if self.silent != Some(rank) {
                    optim.request_account();
                }
                net = optim.step((self.lr)(rank), net, grads)?;
                accounts.extend(optim.account()?);
            }
            if let Some(resume) = self.resume.filter(|_| step + 1 == SAVED) {
                checkpoint::save(path, &net, &optim, &step)?;
                (net, optim) = resume(self, world, path, net, Old { optim })?;
            }
        }
        Ok(Run { accounts, weights: weights(&net), states: states(&net, &optim)? })
    }

    /// A change of this program.
    fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    fn with_gradients(
        self,
        gradients: impl Fn(&Net, u64, usize) -> Vec<GradientsParams> + Send + Sync + 'static,
    ) -> Self {
        Self { gradients: Arc::new(gradients), ..self }
    }

    /// With a function that replaces the results of collectives.
    fn with_results(
        self,
        replace: impl Fn(usize, &'static str, Tensor<1>) -> Tensor<1> + Send + Sync + 'static,
    ) -> Self {
        let replace = Arc::new(replace);
        let world = move |world: &World| {
            let (rank, replace) = (world.rank(), replace.clone());
            replaced(world, move |collective, result| replace(rank, collective, result))
        };
        Self { world: Arc::new(world), ..self }
    }

    fn resuming(self, resume: Resume) -> Self {
        Self { resume: Some(resume), ..self }
    }
}

/// A mistake.
struct Mutation {
    name: &'static str,
    /// The check that finds it.
    by: &'static str,
    /// A part of the message, as the name of the parameter.
    names: &'static str,
    program: Program,
}

/// The check that finds a mistake, with the message.
fn found(program: &Program, right: &Run) -> (&'static str, String) {
    let run = match program.run() {
        Ok(run) => run,
        Err(error) => {
            let by = match &error {
                Error::Unexpected { rank: None, .. } | Error::Setting { .. } => {
                    "an expectation, before the first step"
                }
                Error::Unexpected { rank: Some(_), .. } => "an expectation, in the step",
                Error::Audited { .. } => "the audit by another rank",
                Error::Drifted { .. } => "the comparison of the ranks' bits",
                Error::ModelsDiffer { .. }
                | Error::SettingsDiffer { .. }
                | Error::Mismatch { .. }
                | Error::CheckpointsDiffer { .. } => "the agreement of the ranks",
                Error::Checkpoint { .. } | Error::OtherRun { .. } => "the checkpoint",
                // The other rank was faster.
                Error::PeerFailed { cause, .. } if cause.starts_with("checkpoint") => {
                    "the checkpoint"
                }
                other => panic!("{other}"),
            };
            return (by, error.to_string());
        }
    };
    let by = if run.accounts != right.accounts {
        "the account"
    } else if run.weights != right.weights {
        "the weights of one device"
    } else if run.states != right.states {
        "the states of one device"
    } else {
        "nothing"
    };
    (by, String::new())
}

fn routing() -> Vec<Mutation> {
    const BEFORE: &str = "an expectation, before the first step";
    let rule = |rule: RoutingRule| Program::new().with(|program| program.muon.rules.push(rule));
    vec![
        Mutation {
            name: "a rule gives a matrix to AdamW",
            by: BEFORE,
            names: "`layers.1.weight` is not trained as expected",
            program: rule(RoutingRule::adamw(r"layers\.1")),
        },
        Mutation {
            name: "a rule gives every matrix to AdamW",
            by: BEFORE,
            names: "0.0 %, and `AdamW",
            program: rule(RoutingRule::adamw("")).expecting(Expectation::MuonShare(0.85)),
        },
        Mutation {
            name: "a rule gives a matrix to another optimizer",
            by: BEFORE,
            names: "`sgd (vector)`",
            program: rule(RoutingRule::custom(r"layers\.2", "sgd")).with(|program| {
                let sgd = SgdConfig::new().build();
                program.muon = program.muon.clone().with_optimizer("sgd", sgd);
            }),
        },
        Mutation {
            name: "a matrix is frozen",
            by: BEFORE,
            names: "no optimizer, since it is frozen",
            program: Program::new().with(|program| {
                program.start = Arc::new(|mut net, _| {
                    net.layers[0] = net.layers[0].clone().no_grad();
                    net
                });
            }),
        },
        Mutation {
            name: "a block of a matrix is left to AdamW",
            by: BEFORE,
            names: "`fused` is not trained as expected",
            program: rule(RoutingRule::muon("fused").split([8, 4]).leave([1]).into()),
        },
        Mutation {
            name: "the first layer is left to AdamW",
            by: BEFORE,
            names: "`input.weight` is not trained as expected",
            program: Program::new().with(|p| p.muon.first_linear = FirstLinear::AdamW),
        },
        Mutation {
            name: "the pattern of an expectation has a typing error",
            by: BEFORE,
            names: "laiers",
            program: Program::new().expecting(Expectation::Muon("laiers".into())),
        },
        Mutation {
            name: "a stack is taken for one matrix",
            by: "the account",
            names: "",
            program: rule(RoutingRule::muon("stack").flatten().into()),
        },
        Mutation {
            name: "inputs are taken for outputs",
            by: "the weights of one device",
            names: "",
            program: rule(RoutingRule::muon("input").layout(MatrixLayout::OutIn).into()),
        },
    ]
}

/// Gradients of a rank without those of some layers.
fn without(net: &Net, mut grads: GradientsParams, layers: &[usize]) -> GradientsParams {
    for layer in layers {
        grads.remove::<2>(net.layers[*layer].weight.id);
    }
    grads
}

fn accumulation() -> Vec<Mutation> {
    const WEIGHTS: &str = "the weights of one device";
    let program = Program::new;
    vec![
        Mutation {
            name: "the gradient of a matrix is lost on all ranks",
            by: "an expectation, in the step",
            names: "`layers.3.weight` on rank",
            program: program().with_gradients(|net, step, rank| {
                vec![without(net, of_rank(net, step, rank), &[3])]
            }),
        },
        Mutation {
            name: "the gradients of several matrices are lost on all ranks",
            by: "an expectation, in the step",
            names: "`layers.1.weight` on rank",
            program: program().expecting(Expectation::MuonShare(0.85)).with_gradients(
                |net, step, rank| vec![without(net, of_rank(net, step, rank), &[0, 1])],
            ),
        },
        Mutation {
            name: "the gradients are of another model",
            by: "an expectation, in the step",
            names: "no gradient on any rank",
            program: program().with_gradients(|net, step, rank| {
                let other = Net::new(&net.input.weight.val().device());
                vec![of_rank(&other, step, rank)]
            }),
        },
        Mutation {
            name: "the gradient of a matrix is lost on one rank",
            by: WEIGHTS,
            names: "",
            program: program().with_gradients(|net, step, rank| {
                let lost = if rank == 1 { &[3][..] } else { &[] };
                vec![without(net, of_rank(net, step, rank), lost)]
            }),
        },
        Mutation {
            name: "a rank has no gradients at all",
            by: WEIGHTS,
            names: "",
            program: program().with_gradients(|net, step, rank| {
                let none = rank == 1;
                vec![if none { GradientsParams::new() } else { of_rank(net, step, rank) }]
            }),
        },
        Mutation {
            name: "a step for every micro-batch",
            by: "the account",
            names: "",
            program: program().with_gradients(|net, step, rank| {
                (0..PARTS).map(|part| of_part(net, step, rank, part)).collect()
            }),
        },
        Mutation {
            name: "the last micro-batch alone counts",
            by: WEIGHTS,
            names: "",
            program: program()
                .with_gradients(|net, step, rank| vec![of_part(net, step, rank, PARTS - 1)]),
        },
        Mutation {
            name: "a micro-batch counts twice",
            by: WEIGHTS,
            names: "",
            program: program().with_gradients(|net, step, rank| {
                vec![mean(net, [0, 0, 1].map(|part| of_part(net, step, rank, part)))]
            }),
        },
        Mutation {
            name: "the gradients of the step before stay in the sum",
            by: WEIGHTS,
            names: "",
            program: program().with_gradients(|net, step, rank| {
                let steps = step.saturating_sub(1)..=step;
                vec![mean(net, steps.map(|step| of_rank(net, step, rank)))]
            }),
        },
        Mutation {
            name: "micro-batches are summed instead of averaged",
            by: "the weights of one device",
            names: "",
            program: program().with_gradients(|net, step, rank| {
                let mut sum = GradientBuffer::new();
                for part in 0..PARTS {
                    sum.add(net, of_part(net, step, rank, part))
                        .expect("the gradients fit the model");
                }
                vec![sum.take_sum()]
            }),
        },
    ]
}

/// A tensor with another lowest bit in its first element.
fn flipped(tensor: Tensor<1>) -> Tensor<1> {
    let mut values: Vec<f32> = tensor.to_data().iter::<f32>().collect();
    let Some(first) = values.first_mut() else { return tensor };
    *first = f32::from_bits(first.to_bits() ^ 1);
    Tensor::from_data(&values[..], (&tensor.device(), DType::F32))
}

/// Results of a call in the step before, for calls in one order.
#[derive(Default)]
struct Stale(Mutex<HashMap<(usize, usize), Vec<Tensor<1>>>>);

impl Stale {
    /// The result of two steps: where several calls have one length, those of this step come in the
    /// order of those of the last.
    fn replace(&self, rank: usize, calls: usize, result: Tensor<1>) -> Tensor<1> {
        let mut known = self.0.lock().expect("no holder of the lock panics");
        let earlier = known.entry((rank, result.dims()[0])).or_default();
        earlier.push(result.clone());
        match earlier.len() > calls {
            true => earlier[earlier.len() - 1 - calls].clone(),
            false => result,
        }
    }
}

fn communication() -> Vec<Mutation> {
    const DRIFT: &str = "the comparison of the ranks' bits";
    const AGREEMENT: &str = "the agreement of the ranks";
    const WEIGHTS: &str = "the weights of one device";
    let program = Program::new;
    let stale = |on: fn(usize) -> bool| {
        let stale = Stale::default();
        Program::new().with_results(move |rank, collective, result| match collective {
            "all_gather" if on(rank) => stale.replace(rank, 1, result),
            _ => result,
        })
    };
    let auditing = program().with(|program| program.dist.audit_every = 1);
    vec![
        Mutation {
            name: "gradients are not reduced",
            by: WEIGHTS,
            names: "",
            program: program().with(|program| program.dist.gradients = Gradients::Averaged),
        },
        Mutation {
            name: "gradients are reduced twice",
            by: "the weights of one device",
            names: "",
            program: program().with_results(|_, collective, result| match collective {
                "reduce_scatter" => result.mul_scalar(RANKS as f64),
                _ => result,
            }),
        },
        Mutation {
            name: "the sums of a rank are lost",
            by: WEIGHTS,
            names: "",
            program: program().with_results(|rank, collective, result| match collective {
                "reduce_scatter" if rank == 1 => result.zeros_like(),
                _ => result,
            }),
        },
        Mutation {
            name: "a bit of a reduced gradient is flipped on one rank",
            by: "the audit by another rank",
            names: "expected its state `momentum` to be as rank",
            program: auditing.with_results(|rank, collective, result| match collective {
                "reduce_scatter" if rank == 1 => flipped(result),
                _ => result,
            }),
        },
        Mutation {
            name: "a publication is stale on one rank",
            by: DRIFT,
            names: "has drifted",
            program: stale(|rank| rank == 1),
        },
        Mutation {
            name: "a publication is stale on all ranks",
            by: WEIGHTS,
            names: "",
            program: stale(|_| true),
        },
        Mutation {
            name: "a bit of a publication is flipped on one rank",
            by: DRIFT,
            names: "has drifted",
            program: program().with_results(|rank, collective, result| match collective {
                "all_gather" if rank == 1 => flipped(result),
                _ => result,
            }),
        },
        Mutation {
            name: "the values of owners are exchanged",
            by: WEIGHTS,
            names: "",
            program: program().with_results(|_, collective, result| match collective {
                "all_gather" => result.flip([0]),
                _ => result,
            }),
        },
        Mutation {
            name: "a rank starts from another model",
            by: AGREEMENT,
            names: "`input.weight` differs on rank 1",
            program: program().with(|program| {
                program.start = Arc::new(|net, rank| match rank {
                    0 => net,
                    _ => net.map(&mut Fixed::new(4)),
                });
            }),
        },
        Mutation {
            name: "a rank has another learning rate",
            by: AGREEMENT,
            names: "learning rate of `input.weight`",
            program: program().with(|program| {
                program.lr = Arc::new(|rank| 0.01 * (1 + rank) as f64);
            }),
        },
        Mutation {
            name: "a rank does not ask for the account",
            by: AGREEMENT,
            names: "`request_account` differs on rank 1",
            program: program().with(|program| program.silent = Some(1)),
        },
    ]
}

/// The optimizer of a program, without states.
fn fresh(program: &Program, world: &World, net: &Net) -> Result<DistModuleOptimizer> {
    program.config().init(world, net)
}

fn load(
    program: &Program,
    world: &World,
    path: &Path,
    net: Net,
) -> Result<(Net, DistModuleOptimizer)> {
    let optim = fresh(program, world, &net)?;
    let (net, optim, _): (_, _, u64) = checkpoint::load(path, net, optim)?;
    Ok((net, optim))
}

/// A copy of a file with another bit in its middle.
fn damaged(path: &Path, rank: usize) -> std::path::PathBuf {
    let copy = path.with_extension(format!("{rank}"));
    let mut bytes = fs::read(path).expect("the file can be read");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&copy, bytes).expect("the file can be written");
    copy
}

fn loading() -> Vec<Mutation> {
    const WEIGHTS: &str = "the weights of one device";
    let resuming = |resume: Resume| Program::new().resuming(resume);
    vec![
        Mutation {
            name: "the states are not loaded",
            by: WEIGHTS,
            names: "",
            program: resuming(|program, world, _, net, _| {
                let optim = fresh(program, world, &net)?;
                Ok((net, optim))
            }),
        },
        Mutation {
            name: "a rank goes on without loading",
            by: "the agreement of the ranks",
            names: "the ranks disagree",
            program: resuming(|program, world, path, net, old| match world.rank() {
                0 => load(program, world, path, net),
                _ => Ok((net, old.optim)),
            }),
        },
        Mutation {
            name: "the weights are not loaded",
            by: WEIGHTS,
            names: "",
            program: resuming(|program, world, path, net, _| {
                let (_, optim) = load(program, world, path, net)?;
                Ok((Net::new(world.device()), optim))
            }),
        },
        Mutation {
            name: "the states are those of another step",
            by: WEIGHTS,
            names: "",
            program: resuming(|program, world, path, net, mut old| {
                let later = (program.gradients)(&net, STEPS, world.rank()).swap_remove(0);
                let later = old.optim.step(0.01, net.clone(), later)?;
                checkpoint::save(path, &later, &old.optim, &SAVED)?;
                let (_, optim) = load(program, world, path, net.clone())?;
                Ok((net, optim))
            }),
        },
        Mutation {
            name: "the states are another optimizer's",
            by: "the checkpoint",
            names: "is of another run",
            program: resuming(|program, world, path, net, _| {
                let mut adamw = program.muon.clone().with_rule(RoutingRule::adamw(""));
                adamw.expectations.clear();
                let optim = program.dist.clone().with_muon(adamw).init(world, &net)?;
                checkpoint::save(path, &net, &optim, &SAVED)?;
                load(program, world, path, net)
            }),
        },
        Mutation {
            name: "a bit of the file is flipped",
            by: "the checkpoint",
            names: "checkpoint",
            program: resuming(|program, world, path, net, _| {
                load(program, world, &damaged(path, world.rank()), net)
            }),
        },
        Mutation {
            name: "a matrix is AdamW's since it was saved",
            by: "an expectation, before the first step",
            names: "`layers.1.weight` is not trained as expected",
            program: resuming(|program, world, path, net, _| {
                let rule = RoutingRule::adamw(r"layers\.1");
                let program = program.clone().with(|program| program.muon.rules.push(rule));
                load(&program, world, path, net)
            }),
        },
    ]
}

fn iteration() -> Vec<Mutation> {
    let iterating = |change: fn(NewtonSchulzConfig) -> NewtonSchulzConfig| {
        Program::new().with(|p| p.muon.newton_schulz = change(p.muon.newton_schulz.clone()))
    };
    vec![
        Mutation {
            name: "the iteration has the other form",
            by: "the account",
            names: "",
            program: iterating(|iteration| iteration.with_form(IterationForm::Gram)),
        },
        Mutation {
            name: "the iteration has another type",
            by: "the account",
            names: "",
            program: iterating(|iteration| iteration.with_dtype(half())),
        },
        Mutation {
            name: "other kernels run than expected",
            by: "the account",
            names: "",
            program: Program::new().with(|p| p.muon.kernels = KernelPolicy::Portable),
        },
        Mutation {
            name: "the iteration ends too early",
            by: "the account",
            names: "",
            program: iterating(|iteration| iteration.with_steps(Some(2))),
        },
    ]
}

/// One device with the mean of the gradients of all ranks.
fn one_device() -> Run {
    let all = Program::new().with_gradients(|net, step, _| {
        vec![mean(net, (0..RANKS).map(|rank| of_rank(net, step, rank)))]
    });
    all.run_on(1).unwrap()
}

#[test]
fn every_mistake_is_found() {
    let alone = one_device();
    let right = Program::new().run().unwrap();
    assert!(right.weights == alone.weights, "without a mistake, ranks train as one device");
    assert!(right.states == alone.states, "their states are those of one device");
    assert!(right.accounts.iter().all(|account| account.muon_share() > 0.85));
    let resumed =
        Program::new().resuming(|program, world, path, net, _| load(program, world, path, net));
    assert_eq!(found(&resumed, &right).0, "nothing", "a run may be continued");

    let page = include_str!("../../docs/design/mutations.md");
    let all = [routing(), accumulation(), communication(), loading(), iteration()];
    let mut failures = vec![];
    for Mutation { name, by, names, program } in all.into_iter().flatten() {
        let (actual, message) = found(&program, &right);
        let row = format!("| {name} | {actual} |");
        println!("{row} {message}");
        if actual != by || !message.contains(names) || !page.contains(&row) {
            failures.push(format!("{row} {message}"));
        }
    }
    assert!(failures.is_empty(), "not as expected, or not in the table:\n{}", failures.join("\n"));
}
