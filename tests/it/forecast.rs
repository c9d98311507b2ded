//! Forecasts of memory against the reports of ranks that run, and against published tables; and of
//! time against calculations by hand.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdafactorConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, activation::relu};
use distmuon::comm::World;
use distmuon::custom::Soap;
use distmuon::distributed::{
    Axis, CostSource, DistMuonConfig, GradDtype, Layout, Links, MemoryReport, Mesh, Place, Publish,
    RankMemory, TimeAssumptions,
};
use distmuon::{Error, MasterWeights, MuonConfig, RoutingRule, StateDtype};
use distmuon_testing::models::{Fixed, Layers};

/// A model with parameters of all kinds, some of which no number of ranks divides.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    layers: Vec<Linear>,
    norm: LayerNorm,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            embedding: EmbeddingConfig::new(67, 32).init(device),
            layers: (0..5).map(|_| LinearConfig::new(32, 32).init(device)).collect(),
            norm: LayerNormConfig::new(32).init(device),
            head: LinearConfig::new(32, 67).init(device),
        };
        net.map(&mut Fixed::new(3))
    }

    fn loss(&self) -> Tensor<1> {
        let device = self.embedding.weight.val().device();
        let tokens = Tensor::<2, Int>::from_data([[1, 2, 66, 0]], &device);
        let x = self.embedding.forward(tokens);
        let x = self.layers.iter().fold(x, |x, layer| relu(layer.forward(x.clone())) + x);
        self.head.forward(self.norm.forward(x)).cast(DType::F32).square().mean()
    }
}

/// Converts the parameters of a model.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0).detach().require_grad())
    }
}

/// Replaces the values of a model by one element of a type, seen as all of them.
struct Expand(DType);

impl ModuleMapper for Expand {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let one = Tensor::<D>::zeros([1; D], (&param.lazy_device(), self.0));
        Param::initialized(param.id, one.expand(param.lazy_shape()).require_grad())
    }
}

/// Gradients of the same elements on all ranks, also of slices.
struct Equal(GradientsParams);

impl ModuleVisitor for Equal {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.register(param.id, param.val().inner().ones_like());
    }
}

fn equal_gradients(net: &Net) -> GradientsParams {
    let mut equal = Equal(GradientsParams::new());
    net.visit(&mut equal);
    equal.0
}

type Lay = fn(&World) -> Result<Layout, Error>;

/// A placement of parameters, by name; `true` if passes send gradients.
const PLACEMENTS: [(&str, usize, bool, Lay); 8] = [
    ("replicated", 1, false, |world| Ok(Layout::new(&Mesh::flat(world)))),
    ("reduced in passes", 1, true, |world| Ok(Layout::new(&Mesh::flat(world)).overlap_backward())),
    ("owned", 1, true, |world| Ok(Layout::new(&Mesh::flat(world)).owned("dp"))),
    ("rows", 1, true, |world| Ok(Layout::new(&Mesh::flat(world)).rows("dp"))),
    ("owned inside nodes", 4, true, |world| {
        let axes = [Axis::data("node", 2), Axis::data("gpu", world.size() / 2)];
        Ok(Layout::new(&Mesh::new(world, axes)?).owned("gpu"))
    }),
    ("owned, rounded means", 1, true, |world| {
        Ok(Layout::new(&Mesh::flat(world)).owned("dp").round_means())
    }),
    ("slices", 2, false, |world| {
        let axes = [Axis::data("dp", world.size() / 2), Axis::model("tp", 2)];
        let layout = Layout::new(&Mesh::new(world, axes)?);
        Ok(layout.with_place(Place::shard(r"layers\.\d\.weight$", "tp", 1)))
    }),
    ("slices of rows and of a table", 4, false, |world| {
        let axes = [Axis::data("dp", world.size() / 4), Axis::model("tp", 4)];
        let layout = Layout::new(&Mesh::new(world, axes)?);
        let layout = layout.with_place(Place::shard(r"layers\.\d\.weight$", "tp", 0));
        Ok(layout.with_place(Place::shard(r"^embedding", "tp", 0)))
    }),
];

/// The reports of ranks that take two steps.
fn reports(
    config: &DistMuonConfig,
    ranks: usize,
    passes: bool,
    lay: Lay,
    dtype: DType,
) -> Vec<MemoryReport> {
    let device = Device::default().autodiff().gradient_checkpointing();
    let run = World::threads(vec![device; ranks], |world| {
        let layout = lay(&world)?.with_muon(config.muon.clone());
        let net = Net::new(world.device()).map(&mut Cast(dtype));
        let mut net = layout.shard(net)?;
        let mut optim = config.init_on(&layout, &net)?;
        for _step in 0..2 {
            let grads = match passes {
                true => layout.backward(&net.loss(), &net)?,
                false => equal_gradients(&net),
            };
            net = optim.step(1e-3, net, grads)?;
        }
        optim.finish_publication()?;
        Ok::<_, Error>(optim.memory())
    });
    run.unwrap()
}

fn half(master: MasterWeights, states: StateDtype) -> MuonConfig {
    MuonConfig::new().with_master_weights(master).with_state_dtype(states)
}

/// Optimizers whose states have other shapes than the parameters: rows and columns of Adafactor,
/// preconditioners of SOAP.
fn of_users() -> MuonConfig {
    MuonConfig::new()
        .with_optimizer("adafactor", AdafactorConfig::new().build())
        .with_layer_optimizer("soap", Soap::default())
        .with_rule(RoutingRule::custom("^(embedding|norm)", "adafactor"))
        .with_rule(RoutingRule::custom(r"^layers\.\d\.(weight|bias)$", "soap"))
}

#[test]
fn forecasts_are_the_reports_of_ranks() {
    let small = || DistMuonConfig::new().with_bucket_mb(Some(0.005)).with_small_elements(64);
    let lean = half(MasterWeights::Mantissa, StateDtype::BFloat16);
    let configs = [
        ("defaults", DType::F32, DistMuonConfig::new()),
        ("small buckets", DType::F32, small().with_in_flight(1)),
        ("clipped", DType::F32, small().with_max_norm(Some(1.0))),
        ("at first use", DType::F32, small().with_publish(Publish::AtFirstUse)),
        (
            "AdamW",
            DType::F32,
            small().with_muon(MuonConfig::new().with_rule(RoutingRule::adamw(""))),
        ),
        ("bfloat16", DType::BF16, small()),
        ("lean", DType::BF16, small().with_muon(lean)),
        (
            "8 bits",
            DType::F32,
            small().with_muon(MuonConfig::new().with_state_dtype(StateDtype::Int8)),
        ),
        ("users' optimizers", DType::F32, small().with_muon(of_users())),
        ("users' optimizers, bfloat16", DType::BF16, small().with_muon(of_users())),
    ];
    for (name, least, passes, lay) in PLACEMENTS {
        for ranks in [1, 2, 4, 8].into_iter().filter(|ranks| *ranks >= least) {
            // Threads of 8 ranks take seconds.
            let configs = if ranks == 8 { &configs[..1] } else { &configs };
            for (settings, dtype, config) in configs {
                let case = format!("{name}, {ranks} ranks, {settings}");
                let model = Net::new(&Device::default().autodiff()).map(&mut Expand(*dtype));
                let layout =
                    |world: &World| lay(world).map(|layout| layout.with_muon(config.muon.clone()));
                let forecast = config.forecast_memory(ranks, 1, &model, layout).unwrap();
                let reports = reports(config, ranks, passes, lay, *dtype);
                assert_eq!(reports.len(), forecast.ranks().len());
                for (rank, (memory, report)) in forecast.ranks().iter().zip(&reports).enumerate() {
                    let case = format!("{case}, rank {rank}: {memory:?}\n{report}");
                    assert_eq!(memory.parameters, report.parameters.now, "{case}");
                    assert_eq!(memory.masters, report.masters.now, "{case}");
                    assert_eq!(memory.states, report.states.now, "{case}");
                    if !passes {
                        assert_eq!(memory.gradients, report.gradients.peak, "{case}");
                    }
                    assert!(report.gathered.peak <= memory.gathered, "{case}");
                    // Among threads, a message that is received takes no memory.
                    let total = report.total.peak;
                    let in_messages = memory.messages + memory.gathered;
                    assert!(total <= memory.peak, "{case}");
                    assert!(memory.peak <= total + in_messages, "{case}");
                }
            }
        }
    }
}

/// The bytes of the first of some ranks, for square matrices without values.
fn square(
    config: &DistMuonConfig,
    dtype: DType,
    [count, width]: [usize; 2],
    ranks: usize,
    lay: Lay,
) -> RankMemory {
    let model = Layers::square(count, width, &Device::default().autodiff());
    let model = model.map(&mut Expand(dtype));
    let layout = |world: &World| lay(world).map(|layout| layout.with_muon(config.muon.clone()));
    let forecast = config.forecast_memory(ranks, 1, &model, layout).unwrap();
    let between = forecast.ranks()[0].between_steps();
    assert!(forecast.ranks().iter().all(|rank| rank.between_steps() == between), "{forecast}");
    forecast.largest().1
}

fn reduced(world: &World) -> Result<Layout, Error> {
    Ok(Layout::new(&Mesh::flat(world)).overlap_backward().with_in_flight_mb(0.0))
}

fn replicated(world: &World) -> Result<Layout, Error> {
    Ok(Layout::new(&Mesh::flat(world)))
}

#[test]
fn sharded_gradients_and_states_save_what_was_published() {
    let config = DistMuonConfig::new().with_bucket_mb(Some(1.0));
    let (layers, width) = (64, 256);
    let p = layers * width * width * 4;
    for (ranks, percent) in [(2, 33.0), (4, 50.0), (8, 58.0), (16, 63.0), (64, 66.0)] {
        let memory = square(&config, DType::F32, [layers, width], ranks, reduced);
        let held = memory.between_steps() + memory.gradients + memory.shards;
        assert_eq!(held, p + 2 * p / ranks, "{ranks} ranks: {memory:?}");
        // The buckets in flight, and the sums of one, are all that comes on top.
        assert!(memory.peak <= held + memory.messages, "{ranks} ranks: {memory:?}");
        assert!(memory.messages <= (3 * 2 + 1) * 1_000_000, "{ranks} ranks: {memory:?}");
        let saved = 100.0 * (1.0 - held as f64 / (3 * p) as f64);
        assert_eq!((saved + 1e-9).round(), percent, "{ranks} ranks: {saved}");
    }
}

#[test]
fn a_billion_parameters_of_bfloat16_take_the_published_memory() {
    let config = |master, states| DistMuonConfig::new().with_muon(half(master, states));
    let lean = config(MasterWeights::Stochastic { seed: 1 }, StateDtype::BFloat16);
    for (shape, elements, published) in [
        // 1e9 parameters, 2 GB; and 2.7e8, 540 MB.
        ([64, 3952], 1e9, [6e9, 2.5e9]),
        ([64, 2054], 2.7e8, [1.62e9, 675e6]),
    ] {
        let [count, width] = shape;
        let near = |bytes: usize, expected: f64| {
            assert!((bytes as f64 / expected - 1.0).abs() < 1e-3, "{bytes}, not {expected}");
        };
        near(count * width * width, elements);
        // One device: parameters, gradients and momentum.
        let alone = square(&lean, DType::BF16, shape, 1, replicated);
        near(alone.between_steps() + alone.gradients, published[0]);
        let rounded =
            square(&lean, DType::BF16, shape, 8, |world| Ok(reduced(world)?.round_means()));
        near(rounded.between_steps() + rounded.shards, published[1]);
        // By default, means stay in float32.
        let wide = square(&lean, DType::BF16, shape, 8, reduced);
        near(wide.between_steps() + wide.shards, published[1] + elements * 2.0 / 8.0);
        // Owned parameters stay below it by far.
        let owned = square(&lean, DType::BF16, shape, 8, |world| {
            Ok(Layout::new(&Mesh::flat(world)).owned("dp"))
        });
        near(owned.between_steps() + owned.shards, elements * 8.0 / 8.0);
        assert!((owned.peak as f64) < published[1], "{owned:?}");
    }
}

#[test]
fn bytes_per_parameter_of_adamw_are_those_of_megatron() {
    let adamw = MuonConfig::new().with_rule(RoutingRule::adamw(""));
    for ranks in [1, 2, 4, 8, 16, 64] {
        let d = ranks as f64;
        for (dtype, grads, expected) in [
            (DType::F32, GradDtype::Float32, 8.0 + 8.0 / d),
            (DType::BF16, GradDtype::Float32, 6.0 + 12.0 / d),
            // Megatron's 4 + 16 / d has float32 copies of gradients.
            (DType::F16, GradDtype::Parameter, 4.0 + 12.0 / d),
        ] {
            let config = DistMuonConfig::new().with_muon(adamw.clone()).with_grad_dtype(grads);
            let memory = square(&config, dtype, [16, 512], ranks, replicated);
            let elements = (16 * 512 * 512) as f64;
            let bytes = (memory.between_steps() + memory.gradients) as f64 / elements;
            assert_eq!(bytes, expected, "{dtype:?}, {ranks} ranks");
        }
    }
}

#[test]
fn a_forecast_prints_the_least_and_the_most_memory() {
    let model = Net::new(&Device::default().autodiff());
    let owned = |world: &World| Ok::<_, Error>(Layout::new(&Mesh::flat(world)).owned("dp"));
    let forecast = DistMuonConfig::new().forecast_memory(8, 2, &model, owned).unwrap();
    let table = forecast.to_string();
    let ([least, _], [most, memory]) =
        ([forecast.smallest().0, 0], [forecast.largest().0, forecast.largest().1.peak]);
    for expected in [
        format!("least, rank {least}"),
        format!("most, rank {most}"),
        format!("{memory}"),
        "ranks: 8".to_owned(),
    ] {
        assert!(table.contains(&expected), "no {expected} in {table}");
    }
    assert!(least != most && table.lines().all(|line| line.len() <= 80), "{table}");
}

#[test]
fn forecasts_of_what_no_run_can_do_are_errors() {
    let device = Device::default().autodiff();
    let config = DistMuonConfig::new();
    let forecast = |ranks, nodes, lay: Lay| {
        let forecast = config.forecast_memory(ranks, nodes, &Net::new(&device), lay);
        forecast.expect_err("no run can do that").to_string()
    };
    let errors = [
        (forecast(0, 1, replicated), "`ranks` is invalid: expected at least 1, got 0"),
        (
            forecast(8, 3, replicated),
            "`nodes` is invalid: expected a divisor of the number of ranks, got 3 for 8 ranks",
        ),
        (forecast(8, 0, replicated), "got 0 for 8 ranks"),
        (forecast(4, 1, |world| Ok(Layout::new(&Mesh::flat(world)).owned("gpu"))), "axis `gpu`"),
        (
            forecast(64, 1, |world| {
                let layout = Layout::new(&Mesh::new(world, [Axis::model("tp", 64)])?);
                Ok(layout.with_place(Place::shard(r"layers\.0\.weight", "tp", 1)))
            }),
            "parameter `layers.0.weight` on rank 0: it can't be cut along `tp`: its shape [32, 32] \
             has fewer elements than ranks; leave it whole, or use fewer ranks",
        ),
    ];
    for (error, expected) in errors {
        assert!(error.contains(expected), "{expected:?} is not in {error}");
    }
    let wide = Net::new(&device).map(&mut Cast(DType::F64));
    let error = config.forecast_memory(2, 1, &wide, replicated).unwrap_err().to_string();
    assert!(error.contains("got float64") || error.contains("f64"), "{error}");
    let invalid = DistMuonConfig::new().with_in_flight(0);
    let error = invalid.forecast_memory(2, 1, &Net::new(&device), replicated).unwrap_err();
    assert!(error.to_string().contains("`in_flight`"), "{error}");
}

#[test]
fn forecasts_by_measured_costs_are_errors() {
    let model = Net::new(&Device::default().autodiff());
    let config = DistMuonConfig::new().with_costs(CostSource::Measured);
    let lays: [Lay; 2] = [replicated, |world| Ok(Layout::new(&Mesh::flat(world)).owned("dp"))];
    for lay in lays {
        let memory = config.forecast_memory(2, 1, &model, lay).unwrap_err();
        let time = config.forecast_time(2, 1, &model, lay, &TimeAssumptions::new(1.0));
        for error in [memory, time.unwrap_err()] {
            assert!(matches!(error, Error::Setting { .. }), "{error}");
            let expected = "`costs` is invalid: expected `Operations` (a forecast measures \
                            nothing), got Measured; change `costs`";
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}

#[test]
fn the_time_of_one_matrix_on_two_ranks_equals_a_calculation_by_hand() {
    let device = Device::default().autodiff();
    let model = LinearConfig::new(8, 8).with_bias(false).init(&device);
    let muon = MuonConfig::new().with_rule(RoutingRule::muon(""));
    let config = DistMuonConfig::new().with_muon(muon);
    // Not run: the operations of an iteration, which the optimizer counts as well.
    let optim = config.init(&World::alone(device), &model).unwrap();
    let iteration = optim.costs().of([8, 8]).each;
    assert!(iteration > 0.0);
    let links = |bandwidth: f64, latency: f64| Links { bandwidth, latency };
    let mut assumed = TimeAssumptions::new(10.0);
    assumed.operations = iteration / 5.0; // 5 seconds
    assumed.elementwise = 1.0;
    assumed.inside = links(64.0, 0.5);
    assumed.across = links(32.0, 1.0);
    let flat = |world: &World| Ok::<_, Error>(Layout::new(&Mesh::flat(world)));
    let time = |nodes: usize, lay: Lay, assumed: &TimeAssumptions| {
        config.forecast_time(2, nodes, &model, lay, assumed).unwrap()
    };
    // 6 operations for 64 parameters and 10 tokens, of which a rank has half.
    let passes = 6.0 * 64.0 * 10.0 / 2.0 / assumed.operations;
    // Half of 256 bytes, twice; then a flag of 4 bytes, to all and back.
    let messages = |bandwidth: f64, latency: f64| {
        [2.0 * (latency + 128.0 / bandwidth), 2.0 * (latency + 2.0 / bandwidth)]
    };
    for (nodes, [matrix, flags]) in [(1, messages(64.0, 0.5)), (2, messages(32.0, 1.0))] {
        let forecast = time(nodes, flat, &assumed);
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9 * b, "{nodes}: {a}, not {b}");
        near(forecast.compute, passes + 5.0);
        near(forecast.communication, matrix + flags);
        near(forecast.total, passes + 5.0 + matrix + flags);
    }
    // Owned: gathered for both passes, reduced in the backward pass, and not gathered after it.
    // Also small matrices.
    let owned: Lay = |world| Ok(Layout::new(&Mesh::flat(world)).owned("dp").with_small_elements(1));
    let [matrix, flags] = messages(64.0, 0.5);
    let forecast = time(1, owned, &assumed);
    // Flags pass during the iteration, and nothing waits for them.
    let expected = passes + 5.0 + 1.5 * matrix;
    assert!((forecast.total - expected).abs() < 1e-9 * expected, "{forecast}");
    assert!((forecast.communication - 1.5 * matrix - flags).abs() < 1e-9, "{forecast}");

    for (name, wrong) in [
        ("operations", TimeAssumptions::new(1.0)),
        ("inside.latency", TimeAssumptions::new(1.0)),
        ("tokens", TimeAssumptions::new(f64::NAN)),
    ] {
        let mut wrong = wrong;
        match name {
            "operations" => wrong.operations = 0.0,
            "inside.latency" => wrong.inside.latency = -1.0,
            _ => {}
        }
        let error = config.forecast_time(2, 1, &model, flat, &wrong).unwrap_err().to_string();
        assert!(error.contains(&format!("`{name}` is invalid")), "{error}");
    }
}
