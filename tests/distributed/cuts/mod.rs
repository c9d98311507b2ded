//! Parameters that are cut into slices against whole ones: equal bits for equal gradients, on any
//! mesh and for every part of the update.

mod layers;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::Linear;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use distmuon::comm::World;
use distmuon::distributed::{
    Axis, DistMuonConfig, GradDtype, Gradients, Keep, Layout, LossScaleConfig, Mesh, Place, Publish,
};
use distmuon::parts::{Hyperball, MaxNorm, Part, RadialBrake};
use distmuon::{
    Coefficients, Error, IterationForm, MasterWeights, MuonConfig, NewtonSchulzConfig, Result,
    RoutingRule, WeightDecay,
};
use distmuon_testing::combinations;
use distmuon_testing::models::{Fixed, Layers, assert_same_weights, gradients, scaled, weights};
use distmuon_testing::precision::{Rounded, floats, has};
use distmuon_testing::watched::{counted, watched};
use distmuon_testing::worlds::{self, Case, Folder, cases};

use crate::owned::balancing::planners;
use crate::owned::rejections::assert_failures_stop_all_ranks;
use crate::{Net, config, ranks, ranks_here, trained};
use layers::convolutions_and_frozen_layers_are_trained_as_whole_ones;

pub const EVERYWHERE: &[Case] = cases![
    cut_parameters_are_updated_as_whole_ones,
    cut_parameters_are_owned_and_reduced_in_passes_as_whole_ones,
    cut_parameters_train_as_whole_ones_under_every_planner,
    every_part_of_the_update_is_exact_for_cut_matrices,
    a_matrix_that_diverges_leaves_its_slices_as_they_are,
    blocks_of_heads_are_updated_wherever_they_lie,
    different_gradients_of_slices_are_averaged,
    a_step_that_overflows_leaves_slices_as_they_are,
    cut_parameters_in_half_precision_are_updated_as_whole_ones,
    checkpoints_of_cut_parameters_continue_on_other_meshes,
    convolutions_and_frozen_layers_are_trained_as_whole_ones,
];

pub const IN_PROCESS: &[Case] = cases![
    whole_experts_are_updated_where_they_lie,
    a_rank_holds_its_slices_and_its_share_of_states,
    cuts_that_do_not_fit_are_rejected_naming_the_parameter,
    a_step_assembles_and_distributes_every_matrix_once,
    a_matrix_is_updated_while_others_are_assembled_and_distributed,
    a_rank_that_fails_at_any_event_with_slices_stops_all_ranks,
];

/// A cut of the test's own: axis, dimension and parts.
pub type Cut = (&'static str, usize, usize);

/// A mesh and a layout: the axes, and the cuts of parameters at paths.
#[derive(Clone)]
pub struct Cutting {
    pub axes: Vec<Axis>,
    pub cuts: Vec<(&'static str, Vec<Cut>)>,
}

impl Cutting {
    pub fn ranks(&self) -> usize {
        self.axes.iter().map(Axis::size).product()
    }

    pub fn name(&self) -> String {
        let axes = self.axes.iter().map(|axis| format!("{}={}", axis.name(), axis.size()));
        axes.collect::<Vec<_>>().join(",")
    }

    pub fn layout(&self, world: &World) -> Result<Layout> {
        let mut layout = Layout::new(&Mesh::new(world, self.axes.clone())?);
        for (pattern, cuts) in &self.cuts {
            for (axis, dimension, parts) in cuts {
                layout = layout.with_place(Place::shard(*pattern, *axis, *dimension).parts(*parts));
            }
        }
        Ok(layout)
    }

    /// The number of ranks of an axis, and the coordinate of a rank on it.
    fn coordinate(&self, axis: &str, rank: usize) -> (usize, usize) {
        let index = self.axes.iter().position(|known| known.name() == axis).unwrap();
        let inner: usize = self.axes[index + 1..].iter().map(Axis::size).product();
        (self.axes[index].size(), rank / inner % self.axes[index].size())
    }

    /// The indices of the elements that a rank has along each dimension of a parameter, and the
    /// number of ranks of data that have the others.
    fn held(&self, path: &str, shape: &[usize], rank: usize) -> (Vec<Vec<i32>>, usize) {
        let mut held: Vec<Vec<i32>> =
            shape.iter().map(|extent| (0..*extent as i32).collect()).collect();
        let mut shared = 1;
        let matching = self.cuts.iter().filter(|(pattern, _)| {
            let pattern = pattern.trim_start_matches('^').trim_end_matches('$').replace('\\', "");
            path == pattern || pattern.ends_with('.') && path.starts_with(&pattern)
        });
        for (axis, dimension, parts) in matching.flat_map(|(_, cuts)| cuts) {
            let (size, coordinate) = self.coordinate(axis, rank);
            let is_data = self.axes.iter().any(|known| known.name() == *axis && !known.is_model());
            shared *= if is_data { size } else { 1 };
            let extent = held[*dimension].len() / parts;
            let (start, end) = (coordinate * extent / size, (coordinate + 1) * extent / size);
            let parts = held[*dimension].chunks(extent).map(|part| part[start..end].to_vec());
            held[*dimension] = parts.collect::<Vec<_>>().concat();
        }
        (held, shared)
    }
}

/// A rank's gradients: the slices of those of a whole model.
struct SliceOf<'a> {
    case: &'a Cutting,
    rank: usize,
    averaged: bool,
    whole: &'a HashMap<String, (Vec<f32>, Vec<usize>, DType)>,
    path: Vec<String>,
    gradients: GradientsParams,
}

impl ModuleVisitor for SliceOf<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let Some((values, shape, dtype)) = self.whole.get(&path) else { return };
        let device = param.val().device().inner();
        let mut gradient = Tensor::<D>::from_data(
            TensorData::new(values.clone(), shape.clone()),
            (&device, DType::F32),
        );
        let (held, shared) = self.case.held(&path, shape, self.rank);
        for (dimension, indices) in held.into_iter().enumerate() {
            let indices = Tensor::<1, Int>::from_data(TensorData::from(&*indices), &device);
            gradient = gradient.select(dimension, indices);
        }
        // Each of the ranks that share a stack has a part of the gradient of all data.
        let factor = if self.averaged { 1.0 } else { shared as f64 };
        self.gradients.register(param.id, gradient.mul_scalar(factor).cast(*dtype));
    }
}

/// Collects gradients by path.
struct ByPath {
    gradients: GradientsParams,
    path: Vec<String>,
    found: HashMap<String, (Vec<f32>, Vec<usize>, DType)>,
}

impl ModuleVisitor for ByPath {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let (shape, dtype) = (gradient.dims().to_vec(), gradient.dtype());
            let values = gradient.into_data().iter::<f32>().collect();
            self.found.insert(self.path.join("."), (values, shape, dtype));
        }
    }
}

/// The gradients of a rank's slices from those of a whole model.
pub fn slices<M: Module>(
    case: &Cutting,
    (whole, gradients): (&M, GradientsParams),
    model: &M,
    (rank, averaged): (usize, bool),
) -> GradientsParams {
    let mut by_path = ByPath { gradients, path: vec![], found: HashMap::new() };
    whole.visit(&mut by_path);
    let (whole, gradients) = (&by_path.found, GradientsParams::new());
    let mut slices = SliceOf { case, rank, averaged, whole, path: vec![], gradients };
    model.visit(&mut slices);
    slices.gradients
}

/// The sum of the products of a parameter with its gradient.
pub fn product<const D: usize>(
    param: &Param<Tensor<D>>,
    gradients: &mut GradientsParams,
) -> Tensor<1> {
    let gradient = gradients.remove::<D>(param.id).expect("every parameter has a gradient");
    let value = param.val();
    // In float32: a sum in half precision may overflow, and has the same gradient.
    let gradient = Tensor::from_inner(gradient).cast(value.dtype());
    (value * gradient).cast(DType::F32).sum()
}

/// The sum of the products of all parameters with the gradients of a rank's slices: the loss that
/// has these gradients.
pub fn loss(net: &Net, mut gradients: GradientsParams) -> Tensor<1> {
    let mut sum = product(&net.embedding.weight, &mut gradients);
    for Linear { weight, bias } in net.square.iter().chain([&net.wide, &net.tall, &net.head]) {
        sum = sum + product(weight, &mut gradients);
        sum = sum + product(bias.as_ref().expect("a bias"), &mut gradients);
    }
    sum = sum + product(&net.experts, &mut gradients);
    sum = sum + product(&net.norm.gamma, &mut gradients);
    sum + product(net.norm.beta.as_ref().expect("a beta"), &mut gradients)
}

/// Meshes with cuts of the shapes that no number of ranks divides.
fn cases_of_net() -> Vec<Cutting> {
    let columns_and_rows = vec![
        ("^embedding\\.weight$", vec![("tp", 0, 1)]),
        ("^square\\.", vec![]),
        ("^square\\.0\\.weight$", vec![("tp", 1, 1)]),
        ("^square\\.0\\.bias$", vec![("tp", 0, 1)]),
        ("^square\\.1\\.weight$", vec![("tp", 0, 1)]),
        ("^wide\\.weight$", vec![("tp", 0, 1)]),
        ("^tall\\.weight$", vec![("tp", 0, 1)]),
        ("^tall\\.bias$", vec![("tp", 0, 1)]),
        ("^experts$", vec![("tp", 2, 2)]),
        ("^head\\.weight$", vec![("tp", 1, 1)]),
        ("^head\\.bias$", vec![("tp", 0, 1)]),
    ];
    let other_dimensions = vec![
        ("^embedding\\.weight$", vec![("tp", 1, 3)]),
        ("^square\\.0\\.weight$", vec![("tp", 0, 4)]),
        ("^wide\\.weight$", vec![("tp", 1, 1)]),
        ("^tall\\.weight$", vec![("tp", 1, 1)]),
        ("^norm\\.gamma$", vec![("tp", 0, 1)]),
        ("^experts$", vec![("tp", 1, 1)]),
    ];
    let both = vec![
        ("^square\\.0\\.weight$", vec![("tp", 1, 1), ("ep", 1, 1)]),
        ("^square\\.1\\.weight$", vec![("tp", 0, 1), ("ep", 1, 2)]),
        ("^wide\\.weight$", vec![("ep", 1, 1), ("tp", 0, 1)]),
        ("^experts$", vec![("ep", 0, 1), ("tp", 2, 1)]),
        ("^head\\.weight$", vec![("tp", 1, 1)]),
        ("^embedding\\.weight$", vec![("ep", 0, 1)]),
    ];
    let dp_tp = |dp, tp| vec![Axis::data("dp", dp), Axis::model("tp", tp)];
    let mut all = vec![];
    for (dp, tp) in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 2)] {
        for cuts in [&columns_and_rows, &other_dimensions] {
            all.push(Cutting { axes: dp_tp(dp, tp), cuts: cuts.clone() });
        }
    }
    for axes in [
        vec![Axis::data("dp", 2), Axis::data("ep", 2), Axis::model("tp", 2)],
        vec![Axis::model("tp", 2), Axis::data("ep", 2)],
    ] {
        // A list of matrices may not be cut along data: `square` by a model axis only.
        let ep_is_model = |axis: Axis| match axis.name() {
            "ep" => Axis::model("ep", axis.size()),
            _ => axis,
        };
        all.push(Cutting {
            axes: axes.iter().cloned().map(ep_is_model).collect(),
            cuts: both.clone(),
        });
        let stacks = both.iter().filter(|(pattern, _)| !pattern.starts_with("^square")).cloned();
        all.push(Cutting { axes, cuts: stacks.collect() });
    }
    all.iter_mut().for_each(|case| case.cuts.retain(|(_, cuts)| !cuts.is_empty()));
    all
}

/// The cases that this engine can have: all of them on threads, and some on others, which do not
/// see what they send.
fn cases_here() -> impl Iterator<Item = Cutting> {
    let every = if worlds::name() == "threads" { 1 } else { 3 };
    let cases = cases_of_net().into_iter().filter(|case| worlds::has(&case.ranks()));
    cases.step_by(every)
}

/// The weights of the whole model after some steps on a layout.
fn trained_on(
    case: &Cutting,
    steps: u64,
    config: &DistMuonConfig,
    change: Option<&(dyn Fn(Layout) -> Layout + Sync)>,
) -> Vec<Vec<u8>> {
    let passes = change.is_some();
    let count = case.ranks();
    let averaged = config.gradients == Gradients::Averaged;
    let nets = ranks(count, |world| {
        let layout = case.layout(&world)?.with_config(config.clone());
        let layout = change.map_or(layout.clone(), |change| change(layout));
        let whole = Net::new(world.device());
        let mut net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        for step in 0..steps {
            let of = (world.rank(), averaged);
            let mut gradients = slices(case, (&whole, whole.gradients(step)), &net, of);
            if passes {
                gradients = layout.backward(&loss(&net, gradients), &net)?;
            }
            net = optim.step(0.01, net, gradients)?;
        }
        Ok(layout.unshard(&net)?.weights())
    });
    let mut nets = nets.unwrap();
    for net in &nets[1..] {
        assert_eq!(*net, nets[0], "the ranks agree on {}", case.name());
    }
    nets.swap_remove(0)
}

fn cut_parameters_are_updated_as_whole_ones() {
    let clipped = config().with_max_norm(Some(0.5));
    for config in [config(), clipped] {
        let alone = trained(1, 4, &config);
        for case in cases_here() {
            // The mean of three equal gradients may differ from them in the last digit.
            let gradients = match case.ranks().is_power_of_two() {
                true => Gradients::PerRank,
                false => Gradients::Averaged,
            };
            for (bucket_mb, in_flight, publish) in
                [(25.0, 3, Publish::Now), (0.001, 1, Publish::Now), (0.001, 2, Publish::AtFirstUse)]
            {
                let config = config
                    .clone()
                    .with_gradients(gradients)
                    .with_bucket_mb(Some(bucket_mb))
                    .with_in_flight(in_flight)
                    .with_publish(publish);
                let trained = trained_on(&case, 4, &config, None);
                assert!(trained == alone, "{}, {config}", case.name());
            }
        }
    }
}

fn cut_parameters_are_owned_and_reduced_in_passes_as_whole_ones() {
    // Clipped, so that the scale of a gradient counts, and checked for differences of replicas.
    let clipped = config().with_max_norm(Some(0.5)).with_check_every(1);
    let alone = [config(), clipped.clone()].map(|config| trained(1, 3, &config));
    for case in cases_here().filter(|case| case.ranks().is_power_of_two()) {
        let data = case.axes.iter().find(|axis| !axis.is_model()).map(Axis::name);
        let owned = |layout: Layout, keep| {
            let layout = match data {
                Some(axis) => layout.owned(axis).with_keep(keep).with_ahead_mb(0.002),
                None => layout,
            };
            layout.with_small_elements(8)
        };
        let in_rows = |layout: Layout| match data {
            Some(axis) => layout.rows(axis),
            None => layout,
        };
        let layouts: [&(dyn Fn(Layout) -> Layout + Sync); 4] = [
            &|layout| owned(layout, Keep::Nothing),
            &|layout| in_rows(owned(layout, Keep::Nothing)),
            &|layout| owned(layout, Keep::Weights).overlap_backward(),
            &|layout| layout.overlap_backward().with_small_elements(8),
        ];
        for (index, change) in layouts.into_iter().enumerate() {
            for (publish, bucket_mb) in [(Publish::Now, 25.0), (Publish::AtFirstUse, 0.001)] {
                for (config, alone) in [config(), clipped.clone()].into_iter().zip(&alone) {
                    let config = config.with_publish(publish).with_bucket_mb(Some(bucket_mb));
                    let trained = trained_on(&case, 3, &config, Some(change));
                    assert!(trained == *alone, "{}, layout {index}, {config}", case.name());
                }
            }
        }
    }
}

fn cut_parameters_train_as_whole_ones_under_every_planner() {
    let alone = trained(1, 2, &config());
    let dp_tp = |case: &Cutting| case.name() == "dp=2,tp=2";
    for case in cases_of_net().into_iter().filter(dp_tp) {
        let layouts: [&(dyn Fn(Layout) -> Layout + Sync); 4] = [
            &|layout| layout,
            &|layout| layout.owned("dp").with_small_elements(8),
            &|layout| layout.rows("dp").with_small_elements(8),
            &|layout| layout.overlap_backward().with_small_elements(8),
        ];
        for (index, change) in layouts.into_iter().enumerate() {
            for config in planners(&config()) {
                let trained = trained_on(&case, 2, &config, Some(change));
                assert!(trained == alone, "layout {index}, {config}");
            }
        }
    }
}

fn every_part_of_the_update_is_exact_for_cut_matrices() {
    let cut = |dimension| Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![
            ("^weights.", vec![("tp", dimension, 1)]),
            ("^weight_stack$", vec![("tp", dimension + 1, 1)]),
            ("^table$", vec![("tp", 1, 1)]),
        ],
    };
    // Those that need whole values, and each without what needs them.
    for (name, muon, dtype) in combinations::in_types() {
        let config = DistMuonConfig::new().with_muon(muon.clone()).with_bucket_mb(Some(0.0005));
        let run = |case: Option<&Cutting>, count: usize| {
            let nets = ranks(count, |world| {
                let mesh = Mesh::flat(&world);
                let layout = case.map_or(Ok(Layout::new(&mesh)), |case| case.layout(&world))?;
                let layout = layout.with_muon(muon.clone());
                let whole = combinations::Net::of(dtype, world.device());
                let mut net = layout.shard(whole.clone())?;
                let mut optim = config.init_on(&layout, &net)?;
                for step in 0..4 {
                    let gradients = whole.gradients(step);
                    let gradients = match case {
                        Some(case) => {
                            slices(case, (&whole, gradients), &net, (world.rank(), false))
                        }
                        None => gradients,
                    };
                    net = optim.step(0.02, net, gradients)?;
                }
                Ok((floats(&layout.unshard(&net)?), optim.skipped_steps().read()))
            });
            nets.unwrap()
        };
        let (expected, skipped) = run(None, 1).swap_remove(0);
        for dimension in [0, 1] {
            for (trained, also_skipped) in run(Some(&cut(dimension)), 4) {
                assert_same_weights(&format!("{name}, {dimension}"), &trained, &expected);
                assert_eq!(also_skipped, skipped, "{name}");
            }
        }
    }
}

/// Only one matrix of a stack diverges: gradients below the `epsilon` of the iteration are not made
/// larger before it.
fn a_matrix_that_diverges_leaves_its_slices_as_they_are() {
    #[derive(Module, Debug)]
    struct Stack {
        matrices: Param<Tensor<3>>,
    }
    let muon =
        MuonConfig::new().with_rule(RoutingRule::muon("matrices").batch()).with_newton_schulz(
            NewtonSchulzConfig::new()
                .with_coefficients(Coefficients::Custom(vec![[1e13, 0.0, 0.0]; 3]))
                // So that matrices of 1e-30 stay finite.
                .with_epsilon(1e-7)
                .with_form(IterationForm::Standard),
        );
    let config = DistMuonConfig::new().with_muon(muon.clone());
    let case = Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![("^matrices$", vec![("tp", 2, 1)])],
    };
    let trained = ranks(4, |world| {
        let layout = case.layout(&world)?.with_muon(muon.clone());
        let values = Tensor::<3>::ones([5, 4, 6], (world.device(), DType::F32));
        let whole = Stack { matrices: Param::from_tensor(values.require_grad()) };
        let mut net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        for _ in 0..2 {
            let device = world.device().clone().inner();
            let gradient = Tensor::<3>::full([5, 4, 6], 1e-30, (&device, DType::F32));
            let mut gradients = GradientsParams::new();
            gradients.register(whole.matrices.id, gradient.slice_fill([2..3, 0..4, 0..6], 1.0));
            let gradients = slices(&case, (&whole, gradients), &net, (world.rank(), false));
            net = optim.step(0.5, net, gradients)?;
        }
        let whole = layout.unshard(&net)?.matrices.val().into_data();
        Ok((whole.iter::<f32>().collect::<Vec<_>>(), optim.skipped_steps().read()))
    });
    for (values, skipped) in trained.unwrap() {
        // Of matrices with several owners, the second step counts those of the first.
        assert_eq!(skipped, [("matrices".to_owned(), 1)].into());
        for (index, matrix) in values.chunks(24).enumerate() {
            let moves = matrix.iter().all(|value| *value < 1.0);
            let stays = matrix.iter().all(|value| *value == 1.0);
            assert!(if index == 2 { stays } else { moves }, "matrix {index}: {matrix:?}");
        }
    }
}

fn cut_parameters_in_half_precision_are_updated_as_whole_ones() {
    for (dtype, master, grad_dtype) in [
        (DType::F16, MasterWeights::Full, GradDtype::Parameter),
        (DType::BF16, MasterWeights::Mantissa, GradDtype::Float32),
    ] {
        if has(FloatDType::from(dtype)) {
            let muon = config().muon.with_master_weights(master);
            let config = config().with_muon(muon).with_grad_dtype(grad_dtype);
            let folder = Folder::create();
            let path = folder.path().join("half.bpk");
            let run = |case: &Cutting| {
                let nets = ranks(case.ranks(), |world| {
                    let layout = case.layout(&world)?.with_muon(config.muon.clone());
                    let whole = Net::new(world.device()).map(&mut Rounded(dtype));
                    let mut net = layout.shard(whole.clone())?;
                    let mut optim = config.init_on(&layout, &net)?;
                    for step in 0..3 {
                        let gradients = (&whole, whole.gradients(step));
                        let gradients = slices(case, gradients, &net, (world.rank(), false));
                        net = optim.step(0.01, net, gradients)?;
                    }
                    optim.save(&path, &net, &3)?;
                    let (net, _, steps): (_, _, i32) = optim.load(&path, net)?;
                    assert_eq!(steps, 3);
                    Ok(weights(&layout.unshard(&net)?))
                });
                nets.unwrap().swap_remove(0)
            };
            let alone = run(&Cutting { axes: vec![Axis::data("dp", 1)], cuts: vec![] });
            for case in cases_of_net().into_iter().filter(|case| case.ranks() == 4) {
                assert!(run(&case) == alone, "{}, {dtype:?}, {master:?}", case.name());
            }
        }
    }
}

fn checkpoints_of_cut_parameters_continue_on_other_meshes() {
    let folder = Folder::create();
    let config = config();
    let all = cases_of_net();
    let find = |ranks: usize, index: usize| {
        let mut of_size = all.iter().filter(|case| case.ranks() == ranks && worlds::has(&ranks));
        of_size.nth(index).cloned()
    };
    let plain = |ranks| Cutting { axes: vec![Axis::data("dp", ranks)], cuts: vec![] };
    let cases = [Some(plain(1)), find(2, 0), find(4, 1), find(4, 2), find(8, 1), Some(plain(2))];
    let cases: Vec<Cutting> =
        cases.into_iter().flatten().filter(|case| worlds::has(&case.ranks())).collect();
    // With `passes`, the backward pass reduces the gradients, and what ranks of data share lies in
    // rows.
    let steps =
        |case: &Cutting, range: std::ops::Range<u64>, files: [Option<&str>; 2], passes: bool| {
            let [from, to] = files.map(|file| file.map(|file| folder.path().join(file)));
            let nets = ranks(case.ranks(), |world| {
                let layout = case.layout(&world)?.with_muon(config.muon.clone());
                let data = case.axes.iter().find(|axis| !axis.is_model());
                let layout = match (passes, data) {
                    (true, Some(axis)) => layout.rows(axis.name()).with_small_elements(8),
                    (true, None) => layout.overlap_backward().with_small_elements(8),
                    (false, _) => layout,
                };
                let whole = Net::new(world.device());
                let mut net = layout.shard(whole.clone())?;
                let mut optim = config.init_on(&layout, &net)?;
                if let Some(from) = &from {
                    let progress: u64;
                    (net, optim, progress) = optim.load(from, net)?;
                    assert_eq!(progress, range.start);
                }
                for step in range.clone() {
                    let gradients = (&whole, whole.gradients(step));
                    let mut gradients = slices(case, gradients, &net, (world.rank(), false));
                    if passes {
                        gradients = layout.backward(&loss(&net, gradients), &net)?;
                    }
                    net = optim.step(0.01, net, gradients)?;
                }
                if let Some(to) = &to {
                    optim.save(to, &net, &range.end)?;
                }
                Ok(layout.unshard(&net)?.weights())
            });
            nets.unwrap().swap_remove(0)
        };
    let expected = trained(1, 5, &config);
    for (index, case) in cases.iter().enumerate() {
        let file = format!("{index}.bpk");
        steps(case, 0..2, [None, Some(&file)], index % 2 == 1);
        for (turn, other) in cases.iter().enumerate() {
            let trained = steps(other, 2..5, [Some(&file), None], (index + turn) % 2 == 0);
            assert!(trained == expected, "{} into {}", case.name(), other.name());
        }
    }
}

fn whole_experts_are_updated_where_they_lie() {
    // Stacks of experts, cut among two ranks of data: nothing is exchanged along the axis.
    let case = Cutting {
        axes: vec![Axis::data("dp", 2), Axis::data("ep", 2)],
        cuts: vec![("^experts$", vec![("ep", 0, 1)])],
    };
    #[derive(Module, Debug)]
    struct Experts {
        experts: Param<Tensor<3>>,
    }
    let experts = |device: &Device| {
        let values = Tensor::<3>::random(
            [8, 6, 4],
            burn::tensor::Distribution::Normal(0.0, 0.1),
            (device, DType::F32),
        );
        Experts { experts: Param::from_tensor(values.require_grad()) }
    };
    let config = config();
    let sent = ranks_here(4, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let exchanged = || traffic.lock().unwrap().get("all_to_all").copied();
        let layout = case.layout(&world)?.with_muon(config.muon.clone());
        let whole = experts(world.device());
        let mut net = layout.shard(whole.clone())?;
        assert_eq!(net.experts.val().dims(), [4, 6, 4]);
        let mut optim = config.init_on(&layout, &net)?;
        let owners = optim.plan().owners()[0].clone();
        for (expert, owner) in owners.iter().enumerate() {
            assert_eq!(owner % 2, expert / 4, "expert {expert} is updated where it lies");
        }
        let gradients = gradients(&net, 3);
        net = optim.step(0.01, net, gradients)?;
        drop(net);
        Ok(exchanged())
    });
    assert_eq!(sent.unwrap(), [None; 4]);
}

fn a_rank_holds_its_slices_and_its_share_of_states() {
    const BYTES: usize = 8 * 64 * 64 * 4;
    let case = Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![("^layers.", vec![("tp", 1, 1)])],
    };
    for is_owned in [false, true] {
        let held = ranks_here(4, |world| {
            let layout = case.layout(&world)?;
            let layout = if is_owned { layout.owned("dp") } else { layout };
            let whole = Layers::square(8, 64, world.device()).map(&mut Fixed::new(5));
            let mut model = layout.shard(whole.clone())?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &model)?;
            let before = optim.memory();
            for _ in 0..2 {
                let of = (world.rank(), false);
                let mut sliced = slices(&case, (&whole, gradients(&whole, 1)), &model, of);
                let products = model.layers.iter().map(|layer| product(&layer.weight, &mut sliced));
                let loss = products.reduce(|sum, product| sum + product).expect("layers");
                let gradients = layout.backward(&loss, &model)?;
                model = optim.step(0.01, model, gradients)?;
            }
            Ok([before, optim.memory()])
        });
        for [before, after] in held.unwrap() {
            let parameters = if is_owned { BYTES / 4 } else { BYTES / 2 };
            // A parameter of which the rank has nothing has an element.
            let elements = if is_owned { 4 * 4 } else { 0 };
            for memory in [&before, &after] {
                assert_eq!(memory.parameters.now, parameters + elements, "{is_owned}: {memory}");
                assert_eq!(memory.states.now, BYTES / 4, "{is_owned}: {memory}");
            }
            // This rank's gradients after a backward pass: of its slices, or its shares of those.
            assert_eq!(after.gradients.peak, parameters, "{is_owned}: {after}");
            assert!(after.shards.peak <= BYTES / 4, "{is_owned}: {after}");
        }
    }
}

fn cuts_that_do_not_fit_are_rejected_naming_the_parameter() {
    let error = |places: Vec<Place>, owned: Option<&str>| {
        let errors = ranks_here(2, |world| {
            let axes = [Axis::data("dp", 1), Axis::model("tp", 2), Axis::data("ep", 1)];
            let mut layout = Layout::new(&Mesh::new(&world, axes)?).with_muon(config().muon);
            for place in places.clone() {
                layout = layout.with_place(place);
            }
            if let Some(axis) = owned {
                layout = layout.owned(axis);
            }
            let sharded = layout.shard(Net::new(world.device()));
            Ok(sharded.expect_err("the layout is rejected").to_string())
        });
        let errors = errors.unwrap();
        assert_eq!(errors[0], errors[1].replace("rank 1", "rank 0"), "all ranks are told");
        errors[0].clone()
    };
    let shard = Place::shard;
    let expected = [
        (vec![shard("wide.weight", "tp", 2)], None, "does not have dimension 2"),
        (vec![shard("wide.weight", "tp", 1).parts(2)], None, "2 parts do not divide dimension 1"),
        (vec![shard("wide.weight", "xp", 1)], None, "axis `xp` of a mesh with `dp`, `tp`, `ep`"),
        (
            vec![shard("wide.weight", "tp", 1), shard("wide.weight", "tp", 0)],
            None,
            "it is cut along `tp` twice",
        ),
        (vec![shard("square", "ep", 0)], None, "in a list of layers"),
        (vec![Place::partial("norm", "dp")], None, "an axis of `Axis::model`"),
        (
            vec![shard("wide.weight", "tp", 1), Place::partial("wide", "tp")],
            None,
            "partial along it",
        ),
        (vec![], Some("tp"), "an axis of `Axis::data`"),
    ];
    for (places, owned, words) in expected {
        let text = error(places, owned);
        assert!(text.contains(words), "{text}: expected {words}");
    }
    let few = ranks_here(4, |world| {
        let mesh = Mesh::new(&world, [Axis::model("tp", 4)])?;
        let layout = Layout::new(&mesh).with_muon(config().muon);
        let layout = layout.with_place(shard("tall.weight", "tp", 1));
        Ok(layout.shard(Net::new(world.device())).expect_err("the layout is rejected"))
    });
    for error in few.unwrap() {
        let text = error.to_string();
        assert!(matches!(error, Error::Parameter { .. } | Error::PeerFailed { .. }), "{text}");
        assert!(text.contains("`tall.weight`") && text.contains("fewer elements"), "{text}");
    }
    // A whole model, where slices are expected.
    let other = ranks_here(2, |world| {
        let mesh = Mesh::new(&world, [Axis::model("tp", 2)])?;
        let layout = Layout::new(&mesh).with_muon(config().muon);
        let layout = layout.with_place(shard("wide.weight", "tp", 1));
        let whole = Net::new(world.device());
        layout.shard(whole.clone())?;
        Ok(config().init_on(&layout, &whole).err().expect("the layout is rejected").to_string())
    });
    for text in other.unwrap() {
        assert!(text.contains("`wide.weight`") && text.contains("not this rank's slice"), "{text}");
    }
}

/// Layers that are cut among two ranks, on two ranks of data.
fn cut_layers() -> Cutting {
    Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![("^layers.", vec![("tp", 1, 1)])],
    }
}

/// The bytes that a step of cut layers of a type sends by each collective, on each of four ranks.
fn sent_by_a_step(config: DistMuonConfig, dtype: DType) -> Vec<BTreeMap<&'static str, usize>> {
    sent_by_an_observed_step(config, dtype, false)
}

/// The same for a step with diagnostics, or without.
fn sent_by_an_observed_step(
    config: DistMuonConfig,
    dtype: DType,
    is_observed: bool,
) -> Vec<BTreeMap<&'static str, usize>> {
    let case = cut_layers();
    let sent = ranks_here(4, |world| {
        let (comm, traffic) = counted(world.communicator());
        let world = World::new(comm, world.device().clone());
        let layout = case.layout(&world)?.with_muon(config.muon.clone());
        let model = Layers::square(16, 32, world.device()).map(&mut Fixed::new(5));
        let model = layout.shard(model.map(&mut Rounded(dtype)))?;
        let mut optim = config.init_on(&layout, &model)?;
        let gradients = gradients(&model, 0);
        if is_observed {
            optim.request_diagnostics();
        }
        traffic.lock().unwrap().clear();
        optim.step(0.01, model, gradients)?;
        Ok(std::mem::take(&mut *traffic.lock().unwrap()))
    });
    sent.unwrap()
}

fn a_step_assembles_and_distributes_every_matrix_once() {
    const BYTES: usize = 16 * 32 * 32 * 4;
    let config = DistMuonConfig::new().with_bucket_mb(Some(0.02));
    // Every rank owns a quarter, of which the other slice is half: a gradient comes, and a
    // direction goes.
    let part = BYTES / 4 / 2;
    for sent in sent_by_a_step(config.clone(), DType::F32) {
        assert_eq!(sent["all_to_all"], 2 * part, "{sent:?}");
        let of_slices = sent["reduce_scatter"] + sent["all_gather"];
        // The first step also compares the gradients of parameters without slices: of none here.
        let is_exact = worlds::is_exact();
        assert!(of_slices == 2 * BYTES / 2 / 2 || !is_exact, "{sent:?}");
    }
    // A gradient in float32 and a value come, a value goes.
    if has(FloatDType::BF16) {
        for sent in sent_by_a_step(config.clone(), DType::BF16) {
            assert_eq!(sent["all_to_all"], 2 * part, "{sent:?}");
        }
    }
    let with = |part: Part| config.muon.clone().with_parts(vec![part]);
    let of_values = [
        with(MaxNorm::new(1.0).into()),
        with(RadialBrake::new(0.5, 1.0).into()),
        with(Hyperball::initial().into()).with_weight_decay(0.0.into()),
        config.muon.clone().with_weight_decay(WeightDecay::Coupled(0.1.into())),
    ];
    for muon in of_values {
        for sent in sent_by_a_step(config.clone().with_muon(muon.clone()), DType::F32) {
            assert_eq!(sent["all_to_all"], 3 * part, "{muon:?}: {sent:?}");
        }
    }
    for sent in sent_by_an_observed_step(config.clone(), DType::F32, true) {
        assert_eq!(sent["all_to_all"], 3 * part, "diagnostics: {sent:?}");
    }
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(""));
    for sent in sent_by_a_step(config.clone().with_muon(adamw), DType::F32) {
        assert_eq!(sent["all_to_all"], 3 * part, "AdamW: {sent:?}");
    }
}

fn a_matrix_is_updated_while_others_are_assembled_and_distributed() {
    let case = cut_layers();
    let events = |in_flight: usize| {
        let seen = Arc::new(Mutex::new(vec![]));
        let run = ranks_here(4, |world| {
            let seen = seen.clone();
            let world = watched(&world, move |event| {
                if event.rank == 0 && event.collective == "all_to_all" {
                    seen.lock().unwrap().push(event.waits);
                }
                Ok(())
            });
            let layout = case.layout(&world)?;
            let model =
                layout.shard(Layers::square(16, 32, world.device()).map(&mut Fixed::new(5)))?;
            let config = DistMuonConfig::new().with_bucket_mb(Some(0.02)).with_in_flight(in_flight);
            let mut optim = config.init_on(&layout, &model)?;
            let gradients = gradients(&model, 0);
            optim.step(0.01, model, gradients).map(|_| ())
        });
        run.unwrap();
        Arc::into_inner(seen).unwrap().into_inner().unwrap()
    };
    // Calls and waits of a rank in their order: the third call distributes the first bucket after
    // its update, when two buckets were assembled.
    let in_flight = |events: &[bool]| {
        let third = events.iter().enumerate().filter(|(_, waits)| !**waits).nth(2).unwrap().0;
        2 - events[..third].iter().filter(|waits| **waits).count()
    };
    let overlapped = events(2);
    assert!(in_flight(&overlapped) > 0, "{overlapped:?}");
    let one_by_one = events(1);
    let calls = one_by_one.iter().filter(|waits| !**waits).count();
    assert!(calls >= 6 && calls * 2 == one_by_one.len(), "{one_by_one:?}");
    // One bucket: a call to assemble, and its wait, before the call to distribute.
    assert_eq!(one_by_one[..3], [false, true, false]);
}

/// Fused projections of heads, which are matrices of their own, and two stacks.
#[derive(Module, Debug)]
struct Blocks {
    heads: Param<Tensor<2>>,
    experts: Param<Tensor<3>>,
    other_experts: Param<Tensor<3>>,
    out: Param<Tensor<2>>,
}

impl Blocks {
    fn new(dtype: DType, device: &Device) -> Self {
        let ones = |shape: [usize; 2]| {
            Param::from_tensor(Tensor::<2>::ones(shape, (device, DType::F32)).require_grad())
        };
        let stack = |shape: [usize; 3]| {
            Param::from_tensor(Tensor::<3>::ones(shape, (device, DType::F32)).require_grad())
        };
        let model = Self {
            heads: ones([16, 24]),
            experts: stack([4, 6, 8]),
            other_experts: stack([4, 8, 6]),
            out: ones([24, 16]),
        };
        model.map(&mut Fixed::new(3)).map(&mut Rounded(dtype))
    }

    fn config() -> DistMuonConfig {
        let muon = MuonConfig::new()
            .with_rule(RoutingRule::muon("heads").heads(4))
            .with_rule(RoutingRule::muon("experts").batch())
            .with_rule(RoutingRule::muon("out"));
        DistMuonConfig::new().with_muon(muon)
    }

    /// Slices of heads, of rows, and experts that are cut in both ways.
    fn cutting() -> Cutting {
        Cutting {
            axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
            cuts: vec![
                ("^heads$", vec![("tp", 1, 1)]),
                ("^out$", vec![("tp", 0, 1)]),
                ("^experts$", vec![("tp", 2, 1)]),
                ("^other_experts$", vec![("tp", 1, 1)]),
            ],
        }
    }

    fn loss(&self, mut gradients: GradientsParams) -> Tensor<1> {
        product(&self.heads, &mut gradients)
            + product(&self.experts, &mut gradients)
            + product(&self.other_experts, &mut gradients)
            + product(&self.out, &mut gradients)
    }
}

/// Trains them, on a mesh or on one rank, with the gradients of a step and a rank of data.
fn train_blocks(
    case: Option<&Cutting>,
    config: &DistMuonConfig,
    change: impl Fn(Layout) -> (Layout, bool) + Sync,
    gradients_of: impl Fn(&Blocks, u64, [usize; 2]) -> GradientsParams + Sync,
    dtype: DType,
) -> Vec<Vec<u8>> {
    let nets = ranks(case.map_or(1, Cutting::ranks), |world| {
        let mesh = Mesh::flat(&world);
        let layout = case.map_or(Ok(Layout::new(&mesh)), |case| case.layout(&world))?;
        let (layout, passes) = change(layout.with_muon(config.muon.clone()));
        let whole = Blocks::new(dtype, world.device());
        let mut net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        for step in 0..3 {
            let data = layout.mesh().data();
            let mut local = gradients_of(&whole, step, [data.rank(), data.size()]);
            if let Some(case) = case {
                local = slices(case, (&whole, local), &net, (world.rank(), false));
            }
            if passes {
                local = layout.backward(&net.loss(local), &net)?;
            }
            net = optim.step(0.01, net, local)?;
        }
        optim.finish_publication()?;
        Ok(weights(&layout.unshard(&net)?))
    });
    nets.unwrap().swap_remove(0)
}

fn blocks_of_heads_are_updated_wherever_they_lie() {
    let config = Blocks::config();
    let same = |net: &Blocks, step, _: [usize; 2]| gradients(net, step);
    let alone = train_blocks(None, &config, |layout| (layout, false), same, DType::F32);
    let case = Blocks::cutting();
    for publish in [Publish::Now, Publish::AtFirstUse] {
        for bucket_mb in [25.0, 0.0005] {
            let config = config.clone().with_publish(publish).with_bucket_mb(Some(bucket_mb));
            let layouts: [&(dyn Fn(Layout) -> (Layout, bool) + Sync); 3] = [
                &|layout| (layout, false),
                &|layout| (layout.owned("dp").with_small_elements(8), true),
                &|layout| (layout.overlap_backward().with_small_elements(8), true),
            ];
            for (index, change) in layouts.into_iter().enumerate() {
                let trained = train_blocks(Some(&case), &config, change, same, DType::F32);
                assert!(trained == alone, "layout {index}, {config}");
            }
        }
    }
}

fn different_gradients_of_slices_are_averaged() {
    let config = Blocks::config().with_max_norm(Some(0.5));
    // Those of two ranks of data, and their exact mean.
    let of_rank = |net: &Blocks, step: u64, [rank, count]: [usize; 2]| {
        let weight = [0.5, 1.5][rank] * f64::from(u8::from(count == 2));
        let weight = if count == 1 { 1.0 } else { weight };
        scaled(net, gradients(net, step), weight, DType::F32)
    };
    let alone = train_blocks(None, &config, |layout| (layout, false), of_rank, DType::F32);
    let floats = |weights: &[Vec<u8>]| -> Vec<f32> {
        let all = weights.iter().flat_map(|bytes| bytes.chunks_exact(4));
        all.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let case = Blocks::cutting();
    for owned in [false, true] {
        let change = |layout: Layout| match owned {
            true => (layout.owned("dp").with_small_elements(8), true),
            false => (layout, false),
        };
        let trained = train_blocks(Some(&case), &config, change, of_rank, DType::F32);
        for (trained, alone) in floats(&trained).iter().zip(floats(&alone)) {
            assert!((trained - alone).abs() < 1e-6, "owned {owned}: {trained} for {alone}");
        }
    }
}

fn a_step_that_overflows_leaves_slices_as_they_are() {
    if !has(FloatDType::F16) {
        return;
    }
    let scale = LossScaleConfig::new();
    let config = Blocks::config().with_loss_scale(Some(scale));
    let infinite = |net: &Blocks, step, _: [usize; 2]| {
        let factor = if step == 1 { f64::INFINITY } else { 1.0 };
        scaled(net, gradients(net, step), factor, DType::F16)
    };
    let alone = train_blocks(None, &config, |layout| (layout, false), infinite, DType::F16);
    for owned in [false, true] {
        let change = |layout: Layout| match owned {
            true => (layout.owned("dp").with_small_elements(8), true),
            false => (layout, false),
        };
        let case = Blocks::cutting();
        let trained = train_blocks(Some(&case), &config, change, infinite, DType::F16);
        assert!(trained == alone, "owned {owned}");
    }
}

fn a_rank_that_fails_at_any_event_with_slices_stops_all_ranks() {
    let case = Cutting {
        axes: vec![Axis::data("dp", 2), Axis::model("tp", 2)],
        cuts: vec![
            ("^experts$", vec![("tp", 2, 1)]),
            ("^square\\.0\\.weight$", vec![("tp", 0, 1)]),
        ],
    };
    assert_failures_stop_all_ranks(case.ranks(), |rank, path| {
        let world = &rank.world;
        let config = config().with_bucket_mb(Some(0.002));
        let layout = case.layout(world)?.with_muon(config.muon.clone());
        let layout = layout.owned("dp").with_small_elements(200).with_ahead_mb(0.01);
        let whole = Net::new(world.device());
        let net = layout.shard(whole.clone())?;
        let mut optim = config.init_on(&layout, &net)?;
        rank.set_ready();
        let of = (world.rank(), false);
        let gradients = slices(&case, (&whole, whole.gradients(0)), &net, of);
        let gradients = layout.backward(&loss(&net, gradients), &net)?;
        let net = optim.step(0.01, net, gradients)?;
        world.comm().synchronize()?;
        optim.save(path, &net, &1)
    });
}
