//! QK-clip against attention in float64, for every kind of attention.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use distmuon::{
    Error, LatentHead, MatrixLayout, MaxLogits, QkClip, QkClipConfig, QkClipRule, Result, World,
};
use distmuon_testing::models::weights;
use rand::{RngExt, SeedableRng, rngs::StdRng};

const INPUTS: usize = 6;
const POSITIONS: usize = 9;
const ALPHAS: [f64; 4] = [0.0, 0.3, 0.5, 1.0];

/// A linear layer in either layout.
#[derive(Module, Debug)]
struct Projection {
    weight: Param<Tensor<2>>,
    bias: Option<Param<Tensor<1>>>,
}

#[derive(Module, Debug)]
struct Attention {
    query: Projection,
    key: Projection,
    /// The projection of the rotary key that all heads of latent attention share.
    rope_key: Projection,
}

#[derive(Module, Debug)]
struct Net {
    blocks: Vec<Attention>,
    head: Projection,
}

/// A kind of attention.
#[derive(Clone, Copy, Debug)]
struct Kind {
    queries: usize,
    keys: usize,
    /// The part of a head without a shared key. It is rotated by the position if `rotates`.
    nope: usize,
    rotates: bool,
    /// The part of a query that meets the shared key.
    rope: usize,
    /// The part of the key's projection that holds values.
    value: usize,
}

const MULTI_HEAD: Kind = Kind { queries: 4, keys: 4, nope: 4, rotates: true, rope: 0, value: 0 };
const TWO_GROUPS: Kind = Kind { keys: 2, ..MULTI_HEAD };
const FOUR_GROUPS: Kind = Kind { queries: 12, keys: 4, rotates: false, ..MULTI_HEAD };
const LATENT: Kind = Kind { nope: 6, rotates: false, rope: 4, value: 3, ..MULTI_HEAD };
const LATENT_WITHOUT_ROPE: Kind = Kind { rope: 0, ..LATENT };
const KINDS: [Kind; 5] = [MULTI_HEAD, TWO_GROUPS, FOUR_GROUPS, LATENT, LATENT_WITHOUT_ROPE];

impl Kind {
    fn rule(self, pattern: &str) -> QkClipRule {
        match self {
            Kind { value: 0, queries, keys, .. } if queries == keys => {
                QkClipRule::multi_head(pattern, queries)
            }
            Kind { value: 0, queries, keys, .. } => {
                QkClipRule::grouped_query(pattern, queries, keys)
            }
            Kind { queries, nope, rope, value, .. } => {
                QkClipRule::latent(pattern, queries, LatentHead { nope, rope, value })
            }
        }
    }

    fn config(self, layout: MatrixLayout) -> QkClipConfig {
        QkClipConfig::new().with_rule(self.rule(r"blocks\.\d+$")).with_layout(layout)
    }

    /// The head of keys of a head of queries.
    fn key_of(self, query: usize) -> usize {
        query / (self.queries / self.keys)
    }

    /// The factors of all outputs of queries and of keys in float64, from the definition: a head's
    /// logits are scaled by its gamma, and a head of keys takes its part for the least of them.
    fn factors(self, maxima: &[f64], tau: f64, alpha: f64) -> [Vec<f64>; 2] {
        let gamma: Vec<f64> = maxima.iter().map(|max| (tau / max).min(1.0)).collect();
        let key = |key: usize| {
            let sharing = (0..self.queries).filter(|query| self.key_of(*query) == key);
            sharing.map(|query| gamma[query]).fold(1.0, f64::min).powf(1.0 - alpha)
        };
        let mut factors = [vec![], vec![]];
        for (query, gamma) in gamma.iter().enumerate() {
            factors[0].extend(vec![gamma / key(self.key_of(query)); self.nope]);
            factors[0].extend(vec![*gamma; self.rope]);
        }
        for head in 0..self.keys {
            factors[1].extend(vec![key(head); self.nope]);
            factors[1].extend(vec![1.0; self.value]);
        }
        factors
    }

    /// The maximum logit of every head over all pairs of a query and a key that is not after it,
    /// in float64.
    fn max_logits(
        self,
        attention: &Attention,
        layout: MatrixLayout,
        inputs: &[Vec<f64>],
    ) -> Vec<f64> {
        let [queries, keys, shared] = [&attention.query, &attention.key, &attention.rope_key]
            .map(|p| p.forward(layout, inputs));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let turned = |part: &[f64], position, rotates| match rotates {
            true => rotated(part, position),
            false => part.to_vec(),
        };
        let logit = |head: usize, i: usize, j: usize| {
            let query = &queries[i][head * (self.nope + self.rope)..];
            let key = &keys[j][self.key_of(head) * (self.nope + self.value)..];
            let plain = dot(
                &turned(&query[..self.nope], i, self.rotates),
                &turned(&key[..self.nope], j, self.rotates),
            );
            let rotary = dot(
                &rotated(&query[self.nope..self.nope + self.rope], i),
                &rotated(&shared[j][..self.rope], j),
            );
            (plain + rotary) / ((self.nope + self.rope) as f64).sqrt()
        };
        let pairs = |head| (0..POSITIONS).flat_map(move |i| (0..=i).map(move |j| (head, i, j)));
        let max = |head| pairs(head).map(|(head, i, j)| logit(head, i, j)).fold(f64::MIN, f64::max);
        (0..self.queries).map(max).collect()
    }
}

/// Rotary position embedding: every pair of elements turned by an angle of its own.
fn rotated(part: &[f64], position: usize) -> Vec<f64> {
    let pairs = part.chunks(2).enumerate().flat_map(|(pair, values)| {
        let angle = position as f64 * 100f64.powf(-2.0 * pair as f64 / part.len() as f64);
        let (sin, cos) = angle.sin_cos();
        [values[0] * cos - values[1] * sin, values[0] * sin + values[1] * cos]
    });
    pairs.collect()
}

fn random(rng: &mut StdRng, count: usize) -> Vec<f64> {
    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
}

fn inputs() -> Vec<Vec<f64>> {
    let mut rng = StdRng::seed_from_u64(11);
    (0..POSITIONS).map(|_| random(&mut rng, INPUTS)).collect()
}

fn parameter<const D: usize>(values: &[f64], shape: [usize; D], dtype: DType) -> Param<Tensor<D>> {
    let data = TensorData::new(values.iter().map(|value| *value as f32).collect(), shape);
    Param::from_tensor(Tensor::from_data(data, (&device(), dtype)).require_grad())
}

fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

fn device() -> Device {
    Device::default().autodiff()
}

impl Projection {
    fn new(
        rng: &mut StdRng,
        outputs: usize,
        layout: MatrixLayout,
        bias: bool,
        dtype: DType,
    ) -> Self {
        let shape = match layout {
            MatrixLayout::InOut => [INPUTS, outputs],
            MatrixLayout::OutIn => [outputs, INPUTS],
        };
        let weight = parameter(&random(rng, INPUTS * outputs), shape, dtype);
        Self { weight, bias: bias.then(|| parameter(&random(rng, outputs), [outputs], dtype)) }
    }

    /// The outputs for every input, in float64.
    fn forward(&self, layout: MatrixLayout, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = values(&self.weight.val());
        let outputs = weight.len() / INPUTS;
        let bias = self.bias.as_ref().map_or(vec![0.0; outputs], |bias| values(&bias.val()));
        let element = |input: usize, output: usize| match layout {
            MatrixLayout::InOut => weight[input * outputs + output],
            MatrixLayout::OutIn => weight[output * INPUTS + input],
        };
        let output = |x: &[f64], output: usize| {
            bias[output] + (0..INPUTS).map(|input| x[input] * element(input, output)).sum::<f64>()
        };
        inputs.iter().map(|x| (0..outputs).map(|index| output(x, index)).collect()).collect()
    }
}

impl Net {
    fn new(kind: Kind, layout: MatrixLayout, bias: bool, dtype: DType) -> Self {
        let mut rng = StdRng::seed_from_u64(5);
        let mut projection =
            |outputs: usize| Projection::new(&mut rng, outputs, layout, bias, dtype);
        let mut attention = || Attention {
            query: projection(kind.queries * (kind.nope + kind.rope)),
            key: projection(kind.keys * (kind.nope + kind.value)),
            rope_key: projection(kind.rope.max(1)),
        };
        Self { blocks: vec![attention(), attention()], head: projection(7) }
    }

    fn multi_head() -> Self {
        Self::new(MULTI_HEAD, MatrixLayout::InOut, true, DType::F32)
    }

    /// The maximum logits of every block.
    fn max_logits(&self, kind: Kind, layout: MatrixLayout) -> Vec<Vec<f64>> {
        let inputs = inputs();
        self.blocks.iter().map(|block| kind.max_logits(block, layout, &inputs)).collect()
    }
}

fn vector(values: &[f64]) -> Tensor<1> {
    let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
    Tensor::from_data(TensorData::from(&values[..]), (&device(), DType::F32))
}

/// The reports of the blocks of a model.
fn reported(maxima: &[Vec<f64>]) -> MaxLogits {
    let mut logits = MaxLogits::new();
    for (block, maxima) in maxima.iter().enumerate() {
        logits.report(format!("blocks.{block}"), vector(maxima));
    }
    logits
}

/// A threshold that about half of the heads are above.
fn median(maxima: &[Vec<f64>]) -> f64 {
    let mut all = maxima.concat();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2 - 1..=all.len() / 2].iter().sum::<f64>() / 2.0
}

fn assert_close(case: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{case}");
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let error = (actual - expected).abs();
        assert!(error <= tolerance * expected.abs(), "{case}, {index}: {actual} for {expected}");
    }
}

#[test]
fn clipped_heads_end_at_the_threshold_and_others_keep_their_logits() {
    for kind in KINDS {
        for (layout, bias) in [(MatrixLayout::InOut, true), (MatrixLayout::OutIn, false)] {
            let net = Net::new(kind, layout, bias, DType::F32);
            let before = net.max_logits(kind, layout);
            let tau = median(&before);
            for alpha in ALPHAS {
                let case = format!("{kind:?}, {layout:?}, alpha {alpha}");
                let clip = kind.config(layout).with_tau(tau).with_alpha(alpha).init(&net).unwrap();
                let (clipped, heads) = clip.apply(net.clone(), &reported(&before)).unwrap();
                let after = clipped.max_logits(kind, layout);
                for (index, (before, after)) in before.iter().zip(&after).enumerate() {
                    let expected: Vec<f64> = before.iter().map(|max| max.min(tau)).collect();
                    assert_close(&case, after, &expected, 1e-5);
                    let report = &heads.read()[index];
                    let above = before.iter().filter(|max| **max > tau).count();
                    assert_eq!((report.clipped, report.not_finite), (above, 0), "{case}");
                    let largest = before.iter().copied().fold(f64::MIN, f64::max);
                    assert_eq!(report.max_logit, Some(largest as f32), "{case}");
                }
                let counts = heads.read().iter().map(|report| report.clipped).sum::<usize>();
                assert_eq!(counts, kind.queries, "half of the heads of two blocks: {case}");
            }
        }
    }
}

#[test]
fn factors_are_those_of_the_definition() {
    for kind in KINDS {
        let net = Net::new(kind, MatrixLayout::InOut, true, DType::F32);
        let maxima = net.max_logits(kind, MatrixLayout::InOut);
        let tau = median(&maxima);
        for alpha in ALPHAS {
            let config = kind.config(MatrixLayout::InOut).with_tau(tau).with_alpha(alpha);
            let clip = config.init(&net).unwrap();
            let factors = clip.factors(&reported(&maxima)).unwrap();
            for (block, maxima) in maxima.iter().enumerate() {
                let expected = kind.factors(maxima, tau, alpha);
                for (field, expected) in ["query", "key"].into_iter().zip(expected) {
                    for parameter in ["weight", "bias"] {
                        let path = format!("blocks.{block}.{field}.{parameter}");
                        let actual = factors.of(&path).expect("a factor");
                        let case = format!("{kind:?}, alpha {alpha}, {path}");
                        assert_close(&case, &values(&actual), &expected, 1e-6);
                    }
                }
            }
            for path in ["head.weight", "blocks.0.rope_key.weight", "blocks.0", ""] {
                assert!(factors.of(path).is_none(), "{path}");
            }
        }
    }
}

#[test]
fn only_the_projections_change_and_nothing_below_the_threshold() {
    for dtype in [DType::F32, DType::BF16] {
        for kind in KINDS {
            let net = Net::new(kind, MatrixLayout::InOut, true, dtype);
            let maxima = net.max_logits(kind, MatrixLayout::InOut);
            let largest = maxima.concat().into_iter().fold(f64::MIN, f64::max);
            for alpha in ALPHAS {
                let config = kind.config(MatrixLayout::InOut).with_alpha(alpha);
                let clip = |tau: f64| config.clone().with_tau(tau).init(&net).unwrap();
                let apply = |tau| clip(tau).apply(net.clone(), &reported(&maxima)).unwrap();
                let (same, heads) = apply(1.001 * largest);
                assert!(weights(&same) == weights(&net), "{kind:?}, {dtype:?}");
                assert!(heads.read().iter().all(|report| report.clipped == 0));
                let (clipped, _) = apply(largest / 8.0);
                let others = |net: &Net| {
                    let shared = net.blocks.iter().map(|block| weights(&block.rope_key));
                    (shared.collect::<Vec<_>>(), weights(&net.head))
                };
                assert_eq!(others(&clipped), others(&net));
                assert!(weights(&clipped) != weights(&net));
                assert!(clipped.blocks[0].query.weight.val().is_require_grad());
                assert_eq!(clipped.blocks[0].query.weight.id, net.blocks[0].query.weight.id);
            }
        }
    }
}

#[test]
fn half_precision_is_rounded_once() {
    let net = Net::new(TWO_GROUPS, MatrixLayout::InOut, true, DType::BF16);
    let maxima = vec![vec![7.0, 2.0, 3.0, 1.0], vec![1.0, 0.5, 1.0, 9.0]];
    let clip = TWO_GROUPS.config(MatrixLayout::InOut).with_tau(1.3).init(&net).unwrap();
    let logits = reported(&maxima);
    let factors = clip.factors(&logits).unwrap();
    let (clipped, _) = clip.apply(net.clone(), &logits).unwrap();
    for block in 0..2 {
        let factors = values(&factors.of(&format!("blocks.{block}.query.weight")).unwrap());
        let weight = |net: &Net| net.blocks[block].query.weight.val();
        assert_eq!(weight(&clipped).dtype(), DType::BF16);
        let expected = values(&weight(&net)).into_iter().zip(factors.iter().cycle());
        for (actual, (value, factor)) in values(&weight(&clipped)).into_iter().zip(expected) {
            let exact = value * factor;
            // A bfloat16 has 7 bits after the first one. The product in float32 is rounded as well.
            let unit = 2f64.powi(exact.abs().log2().floor() as i32 - 7);
            let error = (actual - exact).abs();
            assert!(error <= 0.501 * unit, "{actual} for {exact}: off by {} units", error / unit);
        }
    }
}

#[test]
fn a_fused_projection_has_the_factors_of_separate_ones() {
    #[derive(Module, Debug)]
    struct Fused {
        qkv: Projection,
    }
    for kind in [MULTI_HEAD, TWO_GROUPS, FOUR_GROUPS] {
        let Kind { queries, keys, nope, .. } = kind;
        let mut rng = StdRng::seed_from_u64(3);
        let outputs = (queries + 2 * keys) * nope;
        let qkv = Projection::new(&mut rng, outputs, MatrixLayout::OutIn, true, DType::F32);
        let fused = Fused { qkv };
        let rule = kind.rule("^$").fused("qkv").layout(MatrixLayout::OutIn);
        let config = QkClipConfig::new().with_tau(1.0).with_alpha(0.3);
        let clip = config.with_rule(rule).init(&fused).unwrap();
        let maxima: Vec<f64> = (0..queries).map(|head| 0.4 * head as f64 + 0.3).collect();
        let mut logits = MaxLogits::new();
        logits.report("", vector(&maxima));
        let factors = clip.factors(&logits).unwrap();
        let [query, key] = kind.factors(&maxima, 1.0, 0.3);
        let expected = [query, key, vec![1.0; keys * nope]].concat();
        for path in ["qkv.weight", "qkv.bias"] {
            assert_close(path, &values(&factors.of(path).unwrap()), &expected, 1e-6);
        }
        let clipped = factors.apply(fused.clone()).unwrap();
        let weight = |fused: &Fused| values(&fused.qkv.weight.val());
        let rows = weight(&fused).into_iter().enumerate();
        let rows = rows.map(|(index, value)| value * expected[index / INPUTS]);
        assert_close("rows", &weight(&clipped), &rows.collect::<Vec<_>>(), 1e-6);
    }
}

#[test]
fn the_largest_of_several_reports_counts() {
    let net = Net::multi_head();
    let clip = MULTI_HEAD.config(MatrixLayout::InOut).with_tau(2.0).init(&net).unwrap();
    let parts = [[1.0, 5.0, -3.0, f64::NEG_INFINITY], [4.0, 1.0, -2.0, f64::NEG_INFINITY]];
    let mut several = MaxLogits::new();
    for part in parts {
        several.report("blocks.0", vector(&part));
        several.report("blocks.1", vector(&part).cast(FloatDType::F16));
    }
    let largest = vec![4.0, 5.0, -2.0, f64::NEG_INFINITY];
    let at_once = reported(&[largest.clone(), largest]);
    let [several, at_once] = [several, at_once].map(|logits| {
        let (net, heads) = clip.apply(net.clone(), &logits).unwrap();
        (weights(&net), heads.read())
    });
    assert!(several.0 == at_once.0, "the weights differ");
    assert_eq!(several.1, at_once.1);
    assert_eq!((several.1[0].clipped, several.1[0].not_finite), (2, 0));
}

#[test]
fn heads_without_a_finite_maximum_are_counted_and_not_clipped() {
    let net = Net::multi_head();
    let clip = MULTI_HEAD.config(MatrixLayout::InOut).with_tau(1.0).init(&net).unwrap();
    let broken = vec![f64::NAN, f64::INFINITY, 4.0, 0.5];
    let mut logits = reported(&[broken, vec![f64::NAN; 4]]);
    logits.report("blocks.0", vector(&[3.0, 3.0, 3.0, 3.0])); // finite in another micro-batch
    let factors = clip.factors(&logits).unwrap();
    let query = values(&factors.of("blocks.0.query.weight").unwrap());
    let expected = [1.0, 1.0, 0.5, (1.0 / 3.0f64).sqrt()].map(|factor| [factor; 4]);
    assert_close("the first block", &query, &expected.concat(), 1e-6);
    let (clipped, heads) = clip.apply(net.clone(), &logits).unwrap();
    assert!(weights(&clipped.blocks[1]) == weights(&net.blocks[1]));
    let heads = heads.read();
    let counts: Vec<_> = heads.iter().map(|report| (report.clipped, report.not_finite)).collect();
    assert_eq!(counts, [(2, 2), (0, 4)]);
    assert_eq!(heads[0].max_logit, Some(4.0));
    assert_eq!(heads[1].max_logit, None);
    assert_eq!(heads[1].path, "blocks.1");
}

#[test]
fn ranks_clip_by_the_largest_maximum_of_all() {
    for kind in [MULTI_HEAD, TWO_GROUPS, LATENT] {
        let net = Net::new(kind, MatrixLayout::InOut, true, DType::F32);
        let config = kind.config(MatrixLayout::InOut).with_tau(1.5);
        // The head with the largest maximum is another one on every rank.
        let local = |rank: usize, ranks: usize| -> Vec<Vec<f64>> {
            let max = |block: usize, head: usize| match head % ranks == rank {
                true => 1.0 + (block + head) as f64,
                false => 0.1,
            };
            let heads = |block| (0..kind.queries).map(|head| max(block, head)).collect();
            (0..2).map(heads).collect()
        };
        let clip = config.init(&net).unwrap();
        let (alone, heads) = clip.apply(net.clone(), &reported(&local(0, 1))).unwrap();
        let expected = (weights(&alone), heads.read());
        assert!(expected.1.iter().all(|report| report.clipped > 0));
        for ranks in [1, 2, 3] {
            let run = World::threads_with(
                vec![device(); ranks],
                net.clone(),
                |world, net| -> Result<_> {
                    let clip = config.init(&net)?;
                    let logits = reported(&local(world.rank(), ranks));
                    let (net, heads) = clip.apply_on(&world, net, &logits)?;
                    Ok((weights(&net), heads.read()))
                },
            );
            for rank in run.unwrap() {
                assert!(rank == expected, "{kind:?} on {ranks} ranks");
            }
        }
    }
}

/// All ranks clip the other heads alike.
#[test]
fn a_head_that_is_not_finite_on_one_rank_is_left_as_it_is_on_all() {
    let net = Net::multi_head();
    let config = MULTI_HEAD.config(MatrixLayout::InOut).with_tau(1.5);
    let run = World::threads_with(vec![device(); 2], net.clone(), |world, net| -> Result<_> {
        let clip = config.init(&net)?;
        let first = if world.rank() == 1 { f64::NAN } else { 4.0 };
        let logits = reported(&[vec![first, 4.0, 1.0, 1.0], vec![1.0; 4]]);
        let (net, heads) = clip.apply_on(&world, net, &logits)?;
        Ok((weights(&net), heads.read()))
    });
    let run = run.unwrap();
    assert!(run[0] == run[1]);
    let report = &run[0].1[0];
    assert_eq!((report.clipped, report.not_finite), (1, 1), "{report:?}");
    assert!(run[0].0 != weights(&net), "the second head is clipped");
}

#[test]
fn a_rank_with_a_wrong_report_ends_the_world() {
    let net = Net::multi_head();
    let config = MULTI_HEAD.config(MatrixLayout::InOut);
    let errors = World::threads_with(vec![device(); 2], net, |world, net| -> Result<_> {
        let clip = config.init(&net)?;
        let logits = match world.rank() {
            0 => reported(&[vec![1.0; 4], vec![1.0; 4]]),
            _ => reported(&[vec![1.0; 4]]),
        };
        Ok(clip.apply_on(&world, net, &logits).map(drop).unwrap_err())
    });
    let errors = errors.unwrap();
    assert!(matches!(errors[0], Error::PeerFailed { rank: 1, .. }), "{}", errors[0]);
    assert!(matches!(errors[1], Error::QkClip { .. }), "{}", errors[1]);
}

/// The message of an error of QK-clip.
fn message<T>(result: Result<T>) -> String {
    match result.map(drop).unwrap_err() {
        error @ Error::QkClip { .. } => error.to_string(),
        error => panic!("another error: {error}"),
    }
}

#[test]
fn rules_that_do_not_fit_the_model_are_rejected_by_name() {
    let net = Net::multi_head();
    let latent = LatentHead { nope: 3, rope: 1, value: 2 };
    for (rule, words) in [
        (QkClipRule::multi_head("blocks(", 4), "is not a regular expression"),
        (QkClipRule::multi_head("layers", 4), "rule `layers`: it has no effect"),
        (
            QkClipRule::multi_head("blocks", 4).query("q_proj").key("k_proj"),
            "`q_proj` and `k_proj`",
        ),
        (QkClipRule::multi_head("blocks", 4).key("k_proj"), "`blocks.0`: it has one projection"),
        (QkClipRule::multi_head("blocks", 4).fused("qkv"), "it has no effect"),
        (QkClipRule::multi_head("blocks", 0), "got 0 and 0"),
        (QkClipRule::grouped_query("blocks", 4, 3), "got 4 and 3"),
        (QkClipRule::multi_head("blocks", 3), "the outputs of `query` do not divide"),
        (QkClipRule::grouped_query("blocks", 4, 2), "expected 4 as for queries, got 8 for keys"),
        (QkClipRule::multi_head("blocks", 4).fused("query"), "expected a multiple of 12"),
        (QkClipRule::multi_head("blocks", 4).layout(MatrixLayout::OutIn), "has other outputs"),
        (
            QkClipRule::latent("blocks", 4, latent),
            "the parts of the heads do not make up the outputs of `key`: expected 20 for 4 heads \
             of 3 and 2, got 16",
        ),
        (QkClipRule::latent("blocks", 4, latent).fused("query"), "its projections are one field"),
        (QkClipRule::multi_head("^$", 4).query("blocks").key("head"), "has other outputs"),
    ] {
        let message = message(QkClipConfig::new().with_rule(rule).init(&net));
        assert!(message.contains(words) && message.contains("; "), "{words}: {message}");
    }
    let frozen =
        Net { blocks: net.blocks.clone().into_iter().map(Module::no_grad).collect(), ..net };
    let message = message(MULTI_HEAD.config(MatrixLayout::InOut).init(&frozen));
    assert!(message.contains("`blocks.0.query.weight`: it is frozen"), "{message}");
}

#[test]
fn settings_that_no_run_can_use_are_rejected_by_name() {
    let net = Net::multi_head();
    let config = MULTI_HEAD.config(MatrixLayout::InOut);
    let refused = |config: QkClipConfig, name: &str| match config.init(&net).map(drop).unwrap_err()
    {
        Error::Setting { setting, .. } => assert_eq!(setting, name),
        error => panic!("{error}"),
    };
    for tau in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
        refused(config.clone().with_tau(tau), "tau");
    }
    for alpha in [-0.1, 1.1, f64::NAN] {
        refused(config.clone().with_alpha(alpha), "alpha");
    }
    refused(QkClipConfig::new(), "rules");
}

#[test]
fn reports_that_do_not_fit_the_rules_are_rejected_by_name() {
    let net = Net::multi_head();
    let clip: QkClip = MULTI_HEAD.config(MatrixLayout::InOut).init(&net).unwrap();
    assert_eq!(clip.attentions().collect::<Vec<_>>(), [("blocks.0", 4), ("blocks.1", 4)]);
    let with = |path: &str, heads: usize| {
        let mut logits = reported(&[vec![1.0; 4], vec![1.0; 4]]);
        logits.report(path, vector(&vec![1.0; heads]));
        logits
    };
    for (logits, words) in [
        (reported(&[vec![1.0; 4]]), "`blocks.1`: it has not reported: expected 4 maximum logits"),
        (with("blocks.2", 4), "`blocks.2`: it reports logits and is not an attention"),
        (with("blocks.0", 1), "`blocks.0`: its report is of other heads: expected [4]"),
    ] {
        let message = message(clip.factors(&logits));
        assert!(message.contains(words), "{words}: {message}");
    }
    let logits = reported(&[vec![1.0; 4], vec![1.0; 4]]);
    let mut other = net.clone();
    other.blocks.pop();
    let missing = message(clip.apply(other, &logits));
    assert!(missing.contains("expected 8, got 4"), "{missing}");
    let changed =
        message(clip.apply(Net::new(LATENT, MatrixLayout::InOut, true, DType::F32), &logits));
    assert!(changed.contains("`blocks.0.query.weight`: its shape has changed"), "{changed}");
}

#[test]
fn the_last_rule_of_an_attention_counts_and_configurations_are_saved() {
    let net = Net::multi_head();
    let rule = QkClipRule::grouped_query("blocks.1$", 4, 4);
    let config = MULTI_HEAD.config(MatrixLayout::InOut).with_rule(rule).with_tau(3.0);
    let clip = config.init(&net).unwrap();
    assert_eq!(clip.attentions().collect::<Vec<_>>(), [("blocks.0", 4), ("blocks.1", 4)]);
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<QkClipConfig>(&text).unwrap(), config);
}
