//! The attentions of a model, as the rules find them, and the head of every output.

use std::collections::{BTreeMap, HashSet};
use std::iter::repeat_n;

use burn::tensor::{Device, Int, Tensor, TensorData};
use regex::Regex;

use super::config::{Heads, LatentHead, QkClipConfig, QkClipRule};
use crate::error::{Error, Result};
use crate::matrix_view::MatrixLayout;
use crate::parameters::Found;

/// The attentions of one rule, in the order of the model.
#[derive(Debug, Clone)]
pub struct Attentions {
    pub paths: Vec<String>,
    pub heads: [usize; 2],
}

impl Attentions {
    /// Heads of queries, over all attentions.
    pub fn queries(&self) -> usize {
        self.paths.len() * self.heads[0]
    }

    /// The place of a factor of an attention among all factors of the rule: 1 for outputs without
    /// one, then the factors of all heads of queries, of all heads of keys, and of all
    /// rotary parts.
    fn index(&self, attention: usize, factor: Factor) -> usize {
        let [queries, keys] = self.heads;
        let count = self.paths.len();
        // All factors of a rule are one vector: 1, then queries, keys and rotary parts, each by
        // attention. An index is then a single gather on the device.
        match factor {
            Factor::One => 0,
            Factor::Query(head) => 1 + attention * queries + head,
            Factor::Key(head) => 1 + count * queries + attention * keys + head,
            Factor::Rope(head) => 1 + count * (queries + keys) + attention * queries + head,
        }
    }
}

/// The factor of an output, with the head that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Factor {
    One,
    Query(usize),
    Key(usize),
    Rope(usize),
}

/// A parameter of a projection.
#[derive(Debug, Clone)]
pub struct Projected {
    /// The index of the rule.
    pub rule: usize,
    /// The index of every output's factor in the rule, `[outputs]`.
    pub indices: Tensor<1, Int>,
    /// The shape by which the factors apply to the parameter: 1 except where outputs are counted.
    pub broadcast: Vec<usize>,
    /// The shape of the parameter.
    pub shape: Vec<usize>,
}

/// The attentions of every rule, and all parameters of their projections by path.
pub struct Resolved {
    pub attentions: Vec<Attentions>,
    pub parameters: BTreeMap<String, Projected>,
}

impl Resolved {
    /// Finds the attentions of a model.
    pub fn new(config: &QkClipConfig, parameters: &[Found]) -> Result<Self> {
        let rules: Vec<Regex> = config.rules.iter().map(compile).collect::<Result<_>>()?;
        let heads = config.rules.iter().map(checked_counts).collect::<Result<Vec<_>>>()?;
        let mut attentions: Vec<Attentions> =
            heads.into_iter().map(|heads| Attentions { paths: vec![], heads }).collect();
        let mut found = vec![];
        // Two passes: the index of a factor needs the number of all attentions of its rule.
        for path in modules(parameters) {
            if let Some((rule, projections)) = last_rule(config, &rules, path, parameters)? {
                found.push((rule, attentions[rule].paths.len(), projections));
                attentions[rule].paths.push(path.to_owned());
            }
        }
        if let Some(unused) = attentions.iter().position(|found| found.paths.is_empty()) {
            return Err(no_attention(&config.rules[unused]));
        }
        let mut resolved = Self { attentions, parameters: BTreeMap::new() };
        for (rule, attention, projections) in found {
            resolved.add(config, rule, attention, projections)?;
        }
        Ok(resolved)
    }

    /// Adds the parameters of an attention's projections.
    fn add(
        &mut self,
        config: &QkClipConfig,
        rule: usize,
        attention: usize,
        projections: Vec<Vec<&Found>>,
    ) -> Result<()> {
        let attentions = &self.attentions[rule];
        let layout = config.rules[rule].layout.unwrap_or(config.layout);
        let outputs: Vec<usize> =
            projections.iter().map(|found| outputs(found, layout)).collect::<Result<_>>()?;
        let factors = factors(&config.rules[rule], &attentions.paths[attention], &outputs)?;
        for (found, factors) in projections.into_iter().zip(factors) {
            let index = |factor| attentions.index(attention, factor) as i32;
            let indices: Vec<i32> = factors.into_iter().map(index).collect();
            for found in found {
                let projected = Projected {
                    rule,
                    indices: on_device(&indices, &found.device),
                    broadcast: broadcast(indices.len(), &found.shape, layout),
                    shape: found.shape.clone(),
                };
                self.parameters.insert(found.path.clone(), projected);
            }
        }
        Ok(())
    }
}

fn on_device(indices: &[i32], device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::from(indices), &device.clone().inner())
}

fn compile(rule: &QkClipRule) -> Result<Regex> {
    Regex::new(&rule.pattern).map_err(|error| {
        let reason = format!("the pattern is not a regular expression: {error}");
        of_rule(rule, reason, "correct the pattern")
    })
}

/// The heads of a rule, if an attention can have them.
fn checked_counts(rule: &QkClipRule) -> Result<[usize; 2]> {
    let [queries, keys] = rule.counts();
    // Every head of keys serves as many heads of queries.
    if queries == 0 || keys == 0 || !queries.is_multiple_of(keys) {
        let expected = "expected numbers above 0, of which that of queries is a multiple of that \
                        of keys";
        return Err(of_rule(
            rule,
            format!("its heads do not form groups: {expected}, got {queries} and {keys}"),
            "give the number of heads of queries, and then of keys",
        ));
    }
    if matches!(rule.heads, Heads::Latent { .. }) && rule.query == rule.key {
        return Err(of_rule(
            rule,
            format!(
                "its projections are one field: expected two of latent attention, got `{}`",
                rule.query
            ),
            "give the up-projections with `query` and `key`",
        ));
    }
    Ok([queries, keys])
}

fn no_attention(rule: &QkClipRule) -> Error {
    let reason = format!(
        "it has no effect: expected a module that it is the last rule to match, with the fields \
         `{}` and `{}`, got none",
        rule.query, rule.key
    );
    of_rule(rule, reason, "print `MuonConfig::route(&model)` to see the paths")
}

fn of_rule(rule: &QkClipRule, reason: String, remedy: &'static str) -> Error {
    Error::QkClip { subject: format!("rule `{}`", rule.pattern), reason, remedy }
}

fn of_path(path: &str, reason: String, remedy: &'static str) -> Error {
    Error::QkClip { subject: format!("`{path}`"), reason, remedy }
}

/// The paths of all modules, in the order of the model, the root's first.
fn modules(parameters: &[Found]) -> Vec<&str> {
    let mut known = HashSet::new();
    let paths = parameters
        .iter()
        .flat_map(|found| (0..=found.fields.len()).map(move |depth| found.module(depth)));
    paths.filter(|path| known.insert(*path)).collect()
}

/// The parameters of every projection of an attention.
type Projections<'a> = Vec<Vec<&'a Found>>;

/// The last rule for which a module is an attention, and the parameters of its projections.
fn last_rule<'a>(
    config: &QkClipConfig,
    patterns: &[Regex],
    path: &str,
    parameters: &'a [Found],
) -> Result<Option<(usize, Projections<'a>)>> {
    // As with routing rules, the last rule that matches counts.
    for (index, rule) in config.rules.iter().enumerate().rev() {
        if patterns[index].is_match(path)
            && let Some(projections) = projections(rule, path, parameters)?
        {
            return Ok(Some((index, projections)));
        }
    }
    Ok(None)
}

/// The parameters of the projections of a module, if it is an attention: for queries and keys, or
/// for both in one fused projection.
fn projections<'a>(
    rule: &QkClipRule,
    path: &str,
    parameters: &'a [Found],
) -> Result<Option<Projections<'a>>> {
    let of_field = |field: &str| -> Vec<&Found> {
        let field = if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") };
        let is_in = |found: &&Found| {
            let rest = found.path.strip_prefix(&field);
            // `query` must not match `query_norm`.
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        parameters.iter().filter(is_in).collect()
    };
    let queries = of_field(&rule.query);
    if rule.query == rule.key {
        return Ok((!queries.is_empty()).then(|| vec![queries]));
    }
    let keys = of_field(&rule.key);
    let (present, missing) = match (queries.is_empty(), keys.is_empty()) {
        (true, true) => return Ok(None),
        (false, false) => return Ok(Some(vec![queries, keys])),
        (false, true) => (&rule.query, &rule.key),
        (true, false) => (&rule.key, &rule.query),
    };
    Err(of_path(
        path,
        format!(
            "it has one projection: expected parameters in `{missing}` and `{present}`, got \
                 them in `{present}`"
        ),
        "name the fields with `query` and `key`, or narrow the pattern of the rule",
    ))
}

/// The outputs of a projection, which all its parameters have.
fn outputs(projection: &[&Found], layout: MatrixLayout) -> Result<usize> {
    let mut known = None;
    for found in projection {
        let outputs = outputs_of(found, layout)?;
        let first = *known.get_or_insert(outputs);
        if outputs != first {
            return Err(of_path(
                &found.path,
                format!(
                    "it has other outputs than its projection: expected {first}, got {outputs}"
                ),
                "give the field of a linear layer, or set the `layout` of the rule",
            ));
        }
    }
    Ok(known.expect("a projection has a parameter"))
}

fn outputs_of(found: &Found, layout: MatrixLayout) -> Result<usize> {
    if found.is_adapter {
        return Err(of_path(
            &found.path,
            "it is of a LoRA adapter: expected a matrix or a bias, got a factor".into(),
            "merge the adapter, or narrow the pattern of the rule",
        ));
    }
    if !found.trainable {
        return Err(of_path(
            &found.path,
            "it is frozen: expected a parameter that is trained, got one that requires no \
             gradient"
                .into(),
            "build the model on `device.autodiff()`, unfreeze it, or narrow the pattern of the \
             rule",
        ));
    }
    match (&found.shape[..], layout) {
        (&[outputs], _) | (&[_, outputs], MatrixLayout::InOut) => Ok(outputs),
        (&[outputs, _], MatrixLayout::OutIn) => Ok(outputs),
        (shape, _) => Err(of_path(
            &found.path,
            format!("it is not a projection: expected a matrix or a bias, got shape {shape:?}"),
            "give the field of a linear layer",
        )),
    }
}

/// The shape by which factors of outputs apply to a parameter.
fn broadcast(outputs: usize, shape: &[usize], layout: MatrixLayout) -> Vec<usize> {
    match (shape.len(), layout) {
        (1, _) => vec![outputs],
        (_, MatrixLayout::InOut) => vec![1, outputs],
        (_, MatrixLayout::OutIn) => vec![outputs, 1],
    }
}

/// The factor of every output of every projection of an attention.
fn factors(rule: &QkClipRule, path: &str, outputs: &[usize]) -> Result<Vec<Vec<Factor>>> {
    match (rule.heads, outputs) {
        (Heads::Grouped { queries, keys }, &[outputs]) => {
            // Values have as many heads as keys, and stay as they are.
            let heads = queries + 2 * keys;
            let width = width(path, &rule.query, outputs, heads)?;
            let all = (0..heads).map(|head| match head {
                _ if head < queries => Factor::Query(head),
                _ if head < queries + keys => Factor::Key(head - queries),
                _ => Factor::One,
            });
            Ok(vec![repeated(all, width)])
        }
        (Heads::Grouped { queries, keys }, _) => {
            let widths = [
                width(path, &rule.query, outputs[0], queries)?,
                width(path, &rule.key, outputs[1], keys)?,
            ];
            if widths[0] != widths[1] {
                return Err(of_path(
                    path,
                    format!(
                        "its heads differ in width: expected {} as for queries, got {} for keys",
                        widths[0], widths[1]
                    ),
                    "correct the numbers of heads, or set the `layout` of the rule",
                ));
            }
            Ok(vec![
                repeated((0..queries).map(Factor::Query), widths[0]),
                repeated((0..keys).map(Factor::Key), widths[1]),
            ])
        }
        (Heads::Latent { count, head: LatentHead { nope, rope, value } }, _) => {
            // Kimi K2, section 2.1: the parts without positions share gamma by `alpha`. The rotary
            // part of the queries takes all of it, since all heads share its keys.
            let query: [HeadPart; 2] = [(nope, Factor::Query), (rope, Factor::Rope)];
            let key: [HeadPart; 2] = [(nope, Factor::Key), (value, |_| Factor::One)];
            Ok(vec![
                latent(path, &rule.query, outputs[0], count, query)?,
                latent(path, &rule.key, outputs[1], count, key)?,
            ])
        }
    }
}

/// The width of every head of a projection.
fn width(path: &str, field: &str, outputs: usize, heads: usize) -> Result<usize> {
    if outputs.is_multiple_of(heads) {
        return Ok(outputs / heads);
    }
    Err(of_path(
        path,
        format!(
            "the outputs of `{field}` do not divide: expected a multiple of {heads}, the \
                 heads, got {outputs}"
        ),
        "correct the numbers of heads, or set the `layout` of the rule",
    ))
}

/// Every factor, `width` times.
fn repeated(factors: impl Iterator<Item = Factor>, width: usize) -> Vec<Factor> {
    factors.flat_map(|factor| repeat_n(factor, width)).collect()
}

/// A part of every head of an up-projection: its width, and its factor by head.
type HeadPart = (usize, fn(usize) -> Factor);

/// The factors of an up-projection whose heads have these parts.
fn latent(
    path: &str,
    field: &str,
    outputs: usize,
    heads: usize,
    parts: [HeadPart; 2],
) -> Result<Vec<Factor>> {
    let [(first, _), (second, _)] = parts;
    let expected = heads * (first + second);
    if outputs != expected {
        return Err(of_path(
            path,
            format!(
                "the parts of the heads do not make up the outputs of `{field}`: expected \
                 {expected} for {heads} heads of {first} and {second}, got {outputs}"
            ),
            "correct the heads and the widths of their parts, or set the `layout` of the rule",
        ));
    }
    Ok((0..heads)
        .flat_map(|head| parts.into_iter().flat_map(move |(width, of)| repeat_n(of(head), width)))
        .collect())
}
