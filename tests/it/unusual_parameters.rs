//! Parameters as Burn has them: frozen clones, which keep the identity of their original, layers
//! that are not initialised yet, and weights that are stored transposed.

use std::collections::BTreeSet;
use std::path::PathBuf;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::store::ModuleRecord;
use burn::tensor::{Bytes, DType, Device, Tensor};
use distmuon::comm::{Communicator, World};
use distmuon::distributed::{Axis, Layout, Mesh, Place};
use distmuon::parallel::{ColumnLinear, RowLinear};
use distmuon::{
    DistMuonConfig, Error, GradientBuffer, MaxLogits, MuonConfig, QkClipConfig, QkClipRule, Result,
    RoutingRule, checkpoint,
};
use distmuon_testing::models::{Fixed, gradients, largest_difference, values, weights};
use distmuon_testing::{logs, panic_message};

#[derive(Module, Debug)]
struct Q {
    body: Linear,
    head: Linear,
}

impl Q {
    fn new(device: &Device, initialised: bool) -> Self {
        device.seed(5);
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        let q = Self { body: linear(32, 32), head: linear(32, 32) };
        if initialised { q.map(&mut Fixed::new(5)) } else { q }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.body.forward(x).tanh())
    }
}

#[derive(Module, Debug)]
struct TeacherFirst {
    teacher: Q,
    student: Q,
}

#[derive(Module, Debug)]
struct StudentFirst {
    student: Q,
    teacher: Q,
}

trait Pair: Module {
    fn of(student: Q) -> Self;
    fn parts(&self) -> [&Q; 2];

    fn loss(&self, device: &Device) -> Tensor<1> {
        let [student, teacher] = self.parts();
        let x = Tensor::<2>::ones([4, 32], device) * 0.3;
        let target = teacher.forward(x.clone()).detach() * 0.5;
        (student.forward(x) - target).square().mean()
    }

    fn gradients(&self, device: &Device) -> GradientsParams {
        GradientsParams::from_grads(self.loss(device).backward(), self)
    }
}

impl Pair for TeacherFirst {
    fn of(student: Q) -> Self {
        Self { teacher: student.clone().no_grad(), student }
    }

    fn parts(&self) -> [&Q; 2] {
        [&self.student, &self.teacher]
    }
}

impl Pair for StudentFirst {
    fn of(student: Q) -> Self {
        Self { teacher: student.clone().no_grad(), student }
    }

    fn parts(&self) -> [&Q; 2] {
        [&self.student, &self.teacher]
    }
}

/// The values of student and teacher.
fn of_parts(pair: &impl Pair) -> [Vec<f32>; 2] {
    pair.parts().map(values)
}

/// Burn keys states by the identity of a parameter.
#[test]
fn a_parameter_with_a_new_identity_in_every_step_is_warned_of() {
    #[derive(Module, Debug)]
    struct Renewed {
        renewed_in_every_step: Param<Tensor<2>>,
    }
    logs::collect();
    let device = Device::default().autodiff();
    let ones = Tensor::<2>::ones([4, 4], (&device, DType::F32)).require_grad();
    let mut net = Renewed { renewed_in_every_step: Param::from_tensor(ones) };
    let mut optim = MuonConfig::new().with_rule(RoutingRule::muon("renewed")).init(&net);
    let warnings = || logs::with(&["WARN", "renewed_in_every_step", "`Param::map`"]).len();
    for (step, expected) in [0, 0, 1, 1, 1].into_iter().enumerate() {
        let mut gradients = GradientsParams::new();
        let weight = net.renewed_in_every_step.val();
        gradients.register(net.renewed_in_every_step.id, weight.clone().inner());
        net = optim.step(0.01, net, gradients);
        assert_eq!(warnings(), expected, "step {step}");
        let clipped = net.renewed_in_every_step.val().clamp(-1.0, 1.0).detach();
        net.renewed_in_every_step = Param::from_tensor(clipped.require_grad());
    }
}

#[test]
fn a_frozen_clone_before_its_original_is_rejected_where_burn_would_train_it() {
    let device = Device::default().autodiff();
    let net = TeacherFirst::of(Q::new(&device, true));
    let error = MuonConfig::new().try_init(&net).map(drop).unwrap_err();
    let Error::Shared { first, second } = &error else { panic!("{error}") };
    assert_eq!([&**first, &**second], ["teacher.body.weight", "student.body.weight"]);
    assert!(error.to_string().contains("ParamId::new()"), "{error}");
    let routing = MuonConfig::new().route(&net).unwrap();
    assert_eq!(panic_message(|| routing.init()), error.to_string());
    let averaged = DistMuonConfig::new().with_gradients(distmuon::distributed::Gradients::Averaged);
    let rule = averaged.per_parameter(&World::alone(device)).unwrap();
    assert_eq!(rule.init(&net).map(drop).unwrap_err(), error);
}

#[test]
fn a_frozen_clone_stays_as_it_is_on_one_device() {
    let device = Device::default().autodiff();
    fn moved<P: Pair>(before: &P, after: &P) {
        let (before, after) = (of_parts(before), of_parts(after));
        assert!(largest_difference(&before[0], &after[0]) > 1e-3, "the student is trained");
        assert_eq!(before[1], after[1], "the teacher is not");
    }
    let net = StudentFirst::of(Q::new(&device, true));
    let grads = net.gradients(&device);
    moved(&net, &MuonConfig::new().init(&net).step(0.01, net.clone(), grads));
    let mut batched = MuonConfig::new().init_batched(&net).unwrap();
    moved(&net, &batched.step(0.01, net.clone(), net.gradients(&device)).unwrap());
    let net = TeacherFirst::of(Q::new(&device, true));
    let mut batched = MuonConfig::new().init_batched(&net).unwrap();
    moved(&net, &batched.step(0.01, net.clone(), net.gradients(&device)).unwrap());
}

#[test]
fn the_mean_of_micro_batches_is_taken_once_for_clones() {
    let device = Device::default().autodiff();
    let net = TeacherFirst::of(Q::new(&device, true));
    let mut buffer = GradientBuffer::new();
    for _ in 0..2 {
        buffer.add(&net, net.gradients(&device)).unwrap();
    }
    let id = net.student.body.weight.id;
    let mean = buffer.take_mean(&net).remove::<2>(id).unwrap();
    let one = net.gradients(&device).remove::<2>(id).unwrap();
    assert!((mean - one).abs().max().into_scalar::<f32>() < 1e-6);
}

/// A layout of two ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Replicated,
    Owned,
    Rows,
    Overlap,
}

fn layout(world: &World, kind: Kind) -> Result<Layout> {
    let layout = Layout::new(&Mesh::new(world, [Axis::data("dp", 2)])?).with_small_elements(64);
    Ok(match kind {
        Kind::Replicated => layout,
        Kind::Owned => layout.owned("dp"),
        Kind::Rows => layout.rows("dp"),
        Kind::Overlap => layout.overlap_backward(),
    })
}

const KINDS: [Kind; 4] = [Kind::Replicated, Kind::Owned, Kind::Rows, Kind::Overlap];

fn distilled<P: Pair>(kind: Kind, initialised: bool) -> Result<[Vec<f32>; 2]> {
    let mut trained = World::threads(World::devices(2), |world| {
        let layout = layout(&world, kind)?;
        let net = layout.shard(P::of(Q::new(world.device(), initialised)))?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        let grads = layout.backward(&net.loss(world.device()), &net)?;
        let net = optim.step(0.01, net, grads)?;
        Ok::<_, Error>(of_parts(&layout.unshard(&net)?))
    })?;
    Ok(trained.swap_remove(0))
}

#[test]
fn frozen_clones_stay_as_they_are_in_every_layout() {
    let expected = distilled::<StudentFirst>(Kind::Replicated, true).unwrap();
    assert_ne!(expected[0], expected[1], "the student is trained");
    for kind in KINDS {
        for (order, trained) in [
            ("teacher first", distilled::<TeacherFirst>(kind, true)),
            ("student first", distilled::<StudentFirst>(kind, true)),
        ] {
            let trained = trained.unwrap_or_else(|error| panic!("{kind:?}, {order}: {error}"));
            for (trained, expected) in trained.iter().zip(&expected) {
                assert!(largest_difference(trained, expected) < 1e-6, "{kind:?}, {order}");
            }
        }
        // Before they are initialised, Burn freezes all clones together.
        let error = distilled::<TeacherFirst>(kind, false).unwrap_err();
        assert_eq!(error, Error::AllFrozen { parameters: 8 }, "{kind:?}");
    }
}

/// A student whose teacher was cloned too early, next to a layer that is trained.
#[derive(Module, Debug)]
struct Distilled {
    pair: TeacherFirst,
    last: Linear,
}

#[test]
fn a_student_that_is_frozen_with_its_teacher_is_named() {
    logs::collect();
    let device = Device::default().autodiff();
    let new = |initialised| Distilled {
        pair: TeacherFirst::of(Q::new(&device, initialised)),
        last: LinearConfig::new(32, 7).init(&device),
    };
    let reason = |net: &Distilled| {
        let routing = MuonConfig::new().route(net).unwrap();
        let mut routes = routing.routes().iter();
        routes.find(|route| route.path == "pair.student.body.weight").unwrap().reason.clone()
    };
    let named = |words: &str| logs::with(&["WARN", "initialise the model before", words]);
    assert_eq!(reason(&new(true)), "hidden matrix");
    assert!(named("pair.student.body.weight").is_empty());
    assert_eq!(reason(&new(false)), "frozen, with its clone `pair.teacher.body.weight`");
    let pair = "`pair.teacher.body.weight` and `pair.student.body.weight`";
    assert_eq!(named(pair).len(), 1);
    MuonConfig::new().init_batched(&new(false)).unwrap();
    assert_eq!(named(pair).len(), 2);
}

#[test]
fn frozen_layers_that_are_not_initialised_are_not_divided() {
    for kind in KINDS {
        let frozen = World::threads(World::devices(2), |world| {
            let layout = layout(&world, kind)?;
            let q = Q::new(world.device(), false);
            let q = Q { body: q.body.no_grad(), ..q };
            let table = layout.table(&q)?.to_string();
            assert!(!q.body.weight.is_initialized() && !q.head.weight.is_initialized());
            let body = table.lines().find(|line| line.contains("body.weight")).expect("a line");
            assert!(!body.contains("owned") && !body.contains("reduced"), "{table}");
            let q = layout.shard(q)?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &q)?;
            let loss = q.forward(Tensor::ones([2, 32], world.device())).square().mean();
            let before = weights(&layout.unshard(&q)?);
            let grads = layout.backward(&loss, &q)?;
            let q = optim.step(0.01, q, grads)?;
            let after = weights(&layout.unshard(&q)?);
            let same = before.iter().zip(&after).map(|(before, after)| before == after);
            Ok::<_, Error>(same.collect::<Vec<_>>())
        });
        assert_eq!(frozen.unwrap(), vec![[true, true, false, false]; 2], "{kind:?}");
    }
}

/// Two layers whose weights are stored transposed.
#[derive(Module, Debug)]
struct Columns {
    up: Linear,
    head: Linear,
}

impl Columns {
    fn new(device: &Device) -> Self {
        device.seed(3);
        let config = |inputs, outputs| LinearConfig::new(inputs, outputs);
        let linear = |config: LinearConfig| config.with_layout(LinearLayout::Col).init(device);
        Self { up: linear(config(4, 6)), head: linear(config(6, 2)) }
    }

    fn fixed(device: &Device) -> Self {
        Self::new(device).map(&mut Fixed::new(2))
    }
}

fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.bpk");
    (folder, path)
}

#[test]
fn weights_that_are_stored_transposed_are_saved_and_loaded() {
    let device = Device::default().autodiff();
    let config = MuonConfig::new().with_rule(RoutingRule::muon("weight"));
    let (_folder, path) = file();
    let mut net = Columns::fixed(&device);
    let mut optim = config.init(&net);
    for step in 0..2 {
        let grads = gradients(&net, step);
        net = optim.step(0.01, net, grads);
    }
    checkpoint::save(&path, &net, &optim, &2).unwrap();
    let grads = gradients(&net, 9);
    let expected = values(&optim.step(0.01, net.clone(), grads));
    for fresh in [Columns::new(&device), Columns::fixed(&device)] {
        let optim = config.init(&fresh);
        let (loaded, mut optim, _): (_, _, i32) = checkpoint::load(&path, fresh, optim).unwrap();
        assert_eq!(values(&loaded), values(&net));
        let grads = gradients(&loaded, 9);
        assert_eq!(values(&optim.step(0.01, loaded, grads)), expected);
    }
    let fresh = Columns::new(&device);
    let optim = config.init_batched(&fresh).unwrap();
    let (loaded, mut optim, _): (_, _, i32) = checkpoint::load(&path, fresh, optim).unwrap();
    let grads = gradients(&loaded, 9);
    let batched = values(&optim.step(0.01, loaded, grads).unwrap());
    assert!(largest_difference(&batched, &expected) < 1e-5);
}

#[test]
fn averages_of_weights_that_are_stored_transposed_are_those_of_the_layer() {
    for kind in KINDS {
        let run = World::threads(World::devices(2), |world| {
            let layout = layout(&world, kind)?.with_small_elements(1);
            let before = layout.shard(Columns::fixed(world.device()))?;
            let mut optim = DistMuonConfig::new().init_on(&layout, &before)?;
            let x = Tensor::<2>::ones([1, 4], world.device());
            let loss = before.head.forward(before.up.forward(x.clone())).square().mean();
            let grads = layout.backward(&loss, &before)?;
            let after = optim.step(0.1, before.clone(), grads)?;
            let of = |net: &Columns| Ok::<_, Error>(values(&layout.unshard(net)?));
            let pairs = of(&before)?.into_iter().zip(of(&after)?);
            let blend: Vec<f32> = pairs.map(|(a, b)| a * 0.75 + b * 0.25).collect();
            let average = layout.unshard(&layout.average(before, &after, 0.75)?)?;
            assert!(largest_difference(&values(&average), &blend) < 1e-6, "{kind:?}");
            let layer = |layer: &Linear, x: Tensor<2>| {
                let bias = layer.bias.as_ref().expect("a bias").val();
                x.matmul(layer.weight.val()) + bias.unsqueeze()
            };
            let expected = layer(&average.head, layer(&average.up, x.clone()));
            let output = average.head.forward(average.up.forward(x));
            let difference = (output - expected).abs().max().into_scalar::<f32>();
            assert!(difference < 1e-6, "{kind:?}: {difference}");
            Ok::<_, Error>(())
        });
        run.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    }
}

/// Two projections of an attention.
#[derive(Module, Debug)]
struct Projections {
    query: Linear,
    key: Linear,
}

#[test]
fn heads_of_weights_that_are_stored_transposed_are_clipped_as_those_of_the_layer() {
    let device = Device::default().autodiff();
    let clipped = |layout| {
        let linear = || LinearConfig::new(4, 6).with_layout(layout).init(&device);
        let net = vec![Projections { query: linear(), key: linear() }].map(&mut Fixed::new(2));
        let rule = QkClipRule::multi_head("^0$", 2);
        let clip = QkClipConfig::new().with_tau(1.0).with_rule(rule).init(&net).unwrap();
        let mut logits = MaxLogits::new();
        logits.report("0", Tensor::from_floats([4.0, 0.5], &device));
        let before = values(&net);
        let (net, heads) = clip.apply(net, &logits).unwrap();
        assert_eq!(heads.read()[0].clipped, 1);
        let (_folder, path) = file();
        let optim = MuonConfig::new().init(&net);
        checkpoint::save(&path, &net, &optim, &()).unwrap();
        let loaded = checkpoint::load(&path, net.clone(), optim).map(|(net, _, ())| net).unwrap();
        assert_eq!(values(&loaded), values(&net));
        [before, values(&net)]
    };
    let [before, after] = clipped(LinearLayout::Row);
    assert!(before != after);
    assert_eq!(clipped(LinearLayout::Col), [before, after]);
}

/// Returns the paths of the parameters that are initialised.
fn initialised(net: &impl Module) -> BTreeSet<String> {
    struct Initialised(Vec<String>, BTreeSet<String>);
    impl ModuleVisitor for Initialised {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.is_initialized() {
                self.1.insert(self.0.join("."));
            }
        }
    }
    let mut found = Initialised(vec![], BTreeSet::new());
    net.visit(&mut found);
    found.1
}

/// Burn takes the shape that is stored for that of a layer that is not initialised.
#[test]
fn an_optimizer_leaves_layers_as_lazy_as_they_were() {
    let device = Device::default().autodiff();
    let bytes: Bytes = Columns::fixed(&device).into_record().into_bytes().unwrap();
    let some = |initialises_up, initialises_head| {
        let (lazy, fixed) = (Columns::new(&device), Columns::fixed(&device));
        Columns {
            up: if initialises_up { fixed.up } else { lazy.up },
            head: if initialises_head { fixed.head } else { lazy.head },
        }
    };
    for net in [some(false, false), some(true, false), some(false, true)] {
        let before = initialised(&net);
        let routing = MuonConfig::new().route(&net).unwrap();
        assert_eq!(routing.routes()[0].shape, [4, 6], "as the layer sees it");
        let _optim = MuonConfig::new().init(&net);
        let _batched = MuonConfig::new().init_batched(&net).unwrap();
        // There is no attention to clip, which is found out without a value.
        assert!(QkClipConfig::new().with_rule(QkClipRule::multi_head("up", 2)).init(&net).is_err());
        assert_eq!(initialised(&net), before);
        if before.is_empty() {
            let record = ModuleRecord::from_bytes(bytes.clone()).unwrap();
            let loaded = net.try_load_record(record).unwrap();
            assert_eq!(values(&loaded), values(&Columns::fixed(&device)));
        }
    }
}

#[derive(Module, Debug)]
struct Mlp {
    up: ColumnLinear,
    down: RowLinear,
}

impl Mlp {
    /// A model of which none, some or all layers are initialised.
    fn new(
        tp: &Communicator,
        device: &Device,
        layout: LinearLayout,
        [up, down]: [bool; 2],
    ) -> Self {
        device.seed(1);
        let linear = |inputs, outputs, initialised| {
            let linear = LinearConfig::new(inputs, outputs).with_layout(layout).init(device);
            if initialised { linear.map(&mut Fixed::new(1)) } else { linear }
        };
        Self {
            up: ColumnLinear::new(linear(8, 16, up), tp),
            down: RowLinear::new(linear(16, 8, down), tp),
        }
    }
}

/// The outputs, and the outputs after a step, a save and a load.
fn sliced(
    layout_of: LinearLayout,
    initialised: [bool; 2],
    place: fn(Layout) -> Layout,
) -> Result<Vec<Vec<f32>>> {
    let (_folder, path) = file();
    let mut outputs = World::threads(World::devices(2), |world| {
        let mesh = Mesh::new(&world, [Axis::data("dp", 1), Axis::model("tp", 2)])?;
        let tp = mesh.group("tp").expect("an axis").clone();
        let net = Mlp::new(&tp, world.device(), layout_of, initialised);
        let layout = Layout::new(&mesh)
            .with_small_elements(16)
            .with_place(Place::shard(r"up\.linear\.weight$", "tp", 1))
            .with_place(Place::shard(r"up\.linear\.bias$", "tp", 0))
            .with_place(Place::shard(r"down\.linear\.weight$", "tp", 0));
        let layout = place(layout);
        let net = layout.shard(net)?;
        let mut optim = DistMuonConfig::new().init_on(&layout, &net)?;
        let output = |net: &Mlp| {
            let x = Tensor::<2>::ones([1, 8], world.device()) * 0.5;
            net.down.forward(net.up.forward(x))
        };
        let plain = |output: Tensor<2>| output.into_data().iter::<f32>().collect::<Vec<_>>();
        let before = output(&net);
        let grads = layout.backward(&before.clone().square().mean(), &net)?;
        let net = optim.step(0.01, net, grads)?;
        let stepped = plain(output(&net));
        optim.save(&path, &net, &1)?;
        let (net, _, _): (_, _, i32) = optim.load(&path, net)?;
        Ok::<_, Error>(vec![plain(before), stepped, plain(output(&net))])
    })?;
    Ok(outputs.swap_remove(0))
}

#[test]
fn slices_of_weights_that_are_stored_transposed_are_those_of_the_layer() {
    type Change = fn(Layout) -> Layout;
    let places: [(_, Change); 3] = [
        ("replicated", |layout| layout),
        ("owned", |layout| layout.owned("dp")),
        ("rows", |layout| layout.rows("dp")),
    ];
    for (name, place) in places {
        let rows = sliced(LinearLayout::Row, [true; 2], place).unwrap();
        assert_eq!(rows[1], rows[2], "saved and loaded");
        let columns = sliced(LinearLayout::Col, [true; 2], place).unwrap();
        for (rows, columns) in rows.iter().zip(&columns) {
            assert!(largest_difference(rows, columns) < 1e-6, "{name}");
        }
        for initialised in [[false, false], [true, false], [false, true]] {
            let lazy = sliced(LinearLayout::Col, initialised, place).unwrap();
            let differs = largest_difference(&lazy[0], &lazy[1]);
            assert!(differs > 1e-4, "{name}, {initialised:?}: trained");
            assert_eq!(lazy[1], lazy[2], "{initialised:?}: saved and loaded");
        }
    }
}
