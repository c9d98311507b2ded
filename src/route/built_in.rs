//! The built-in decisions, by names, types and shapes.

use std::collections::{HashMap, HashSet};

use super::Group;
use super::walk::Found;
use crate::muon::{MatrixLayout, MatrixView};

/// Names of fields that hold an output head, beside those that end in `_head`.
const HEADS: [&str; 6] = ["head", "classifier", "unembed", "unembedding", "embed_out", "logits"];

/// The name of a head, unless one of [`HEADS`] is beside it.
const OUTPUT: &str = "output";

/// The modules of a model, as its fields describe them.
pub(super) struct Anatomy<'a> {
    parameters: &'a [Found],
    /// The paths of attention modules.
    attention: HashSet<&'a str>,
    /// The paths of the matrices that are output heads.
    heads: Vec<&'a str>,
    /// `true` if names made them heads, rather than their place.
    named: bool,
}

impl<'a> Anatomy<'a> {
    pub fn of(parameters: &'a [Found]) -> Self {
        let attention = attention(parameters);
        let mut anatomy = Self { parameters, attention, heads: vec![], named: true };
        anatomy.heads = anatomy.named_heads();
        if anatomy.heads.is_empty() {
            anatomy.heads.extend(anatomy.last_linear());
            anatomy.named = false;
        }
        anatomy
    }

    /// The group of a parameter, and why.
    pub fn group(&self, found: &Found, layout: MatrixLayout) -> (Group, String) {
        if !found.trainable {
            let is_statistic =
                found.holder() == "BatchNorm" && found.name().starts_with("running_");
            let reason = match is_statistic {
                true => "running statistics",
                false if found.shape.contains(&0) => "no elements",
                false => "frozen",
            };
            return (Group::Frozen, reason.to_owned());
        }
        let (group, reason) = self.trained(found, layout);
        let reason = if found.is_adapter { format!("LoRA factor: {reason}") } else { reason };
        (group, reason)
    }

    fn trained(&self, found: &Found, layout: MatrixLayout) -> (Group, String) {
        let muon = Group::Muon { view: MatrixView::Single, layout };
        let module = || found.fields.iter().rev().take(3).find(|field| is_embedding(&field.name));
        let (group, reason) = if found.shape.len() < 2 {
            (Group::Vector, "fewer than two dimensions")
        } else if found.holder() == "Embedding" {
            (Group::Embedding, "in an Embedding")
        } else if self.heads.contains(&found.weight()) {
            (Group::Head, if self.named { "output head" } else { "output head? (last Linear)" })
        } else if found.shape.iter().filter(|size| **size > 1).count() < 2 {
            (Group::Vector, "a single row or column")
        } else if is_embedding(found.name()) {
            (Group::Embedding, "named as an embedding")
        } else if is_position(found.name()) {
            (Group::Embedding, "named as positions")
        } else if let Some(module) = module() {
            return (Group::Embedding, format!("embedding? (in `{}`)", module.name));
        } else if found.holder() == "Linear" {
            (muon, "hidden matrix")
        } else {
            (muon, "hidden matrix? (outside a Linear)")
        };
        (group, reason.to_owned())
    }

    /// Tells whether a parameter is in an attention module or a recurrent cell.
    fn is_inner(&self, found: &Found) -> bool {
        (0..=found.fields.len()).any(|depth| self.attention.contains(found.module(depth)))
            || found.fields.iter().any(|field| field.holder == "GateController")
    }

    /// The matrices in fields of such names that are closest to the root: the last one where a field has
    /// several. Neither is one in a stack of layers, nor what has to do with attention or recurrence.
    fn named_heads(&self) -> Vec<&'a str> {
        let mut heads = vec![];
        for found in self.parameters.iter().filter(|found| is_matrix(found)) {
            let named = (1..=found.fields.len()).filter(|depth| {
                let name = &found.fields[depth - 1].name;
                // At last what looks at all parameters.
                is_head(name)
                    && !found.in_stack(*depth)
                    && !(name == OUTPUT && self.is_in_layer(found, *depth))
            });
            heads.extend(named.map(|depth| (depth, found)));
        }
        heads.retain(|(depth, found)| !self.holds_inner(found.module(*depth), *depth));
        let least = heads.iter().map(|(depth, _)| *depth).min();
        heads.retain(|(depth, _)| Some(*depth) == least);
        let is_sure = |(depth, found): &(usize, &Found)| found.fields[depth - 1].name != OUTPUT;
        if heads.iter().any(is_sure) {
            heads.retain(is_sure);
        }
        let last: HashMap<&str, &str> =
            heads.into_iter().map(|(depth, found)| (found.module(depth), found.weight())).collect();
        last.into_values().collect()
    }

    /// The last `Linear` of the model, unless it is of a layer: where the head is tied to the
    /// embedding, the last `Linear` belongs to the last layer.
    fn last_linear(&self) -> Option<&'a str> {
        let mut matrices = self.parameters.iter().filter(|found| is_matrix(found));
        let last = matrices.rfind(|found| found.holder() == "Linear")?;
        let depth = last.fields.len();
        let hidden = last.in_stack(depth) || self.is_inner(last) || self.is_in_layer(last, depth);
        (!hidden).then(|| last.weight())
    }

    /// Tells whether a module above this depth is a layer.
    fn is_in_layer(&self, found: &Found, depth: usize) -> bool {
        (1..depth).any(|depth| self.is_layer(found.module(depth), depth))
    }

    /// Tells whether a module is a layer of a model, rather than the model: it has attention, but not all
    /// parameters, and no embeddings.
    fn is_layer(&self, module: &str, depth: usize) -> bool {
        let (inside, outside): (Vec<&Found>, Vec<&Found>) =
            self.parameters.iter().partition(|found| found.is_in(module, depth));
        self.holds_inner(module, depth)
            && !outside.is_empty()
            && !inside.iter().any(|found| found.holder() == "Embedding")
    }

    fn holds_inner(&self, module: &str, depth: usize) -> bool {
        self.parameters.iter().any(|found| found.is_in(module, depth) && self.is_inner(found))
    }
}

/// The paths of the modules that are attention: by type, by the name of their field, or because they
/// have fields for queries and keys. The whole model is one only by type and fields.
fn attention(parameters: &[Found]) -> HashSet<&str> {
    let mut modules: HashMap<&str, [bool; 3]> = HashMap::new();
    for found in parameters {
        for (depth, field) in found.fields.iter().enumerate() {
            let field_name = depth.checked_sub(1).map_or("", |above| &found.fields[above].name);
            let [called, queries, keys] = modules.entry(found.module(depth)).or_default();
            *called |= field.holder.ends_with("Attention")
                || field.holder.ends_with("Attn")
                || has_word(field_name, &["attention", "attn"]);
            *queries |= has_word(&field.name, &["q", "query", "queries", "wq", "qkv", "wqkv"]);
            *keys |= has_word(&field.name, &["k", "key", "keys", "kv", "wk", "qkv", "wqkv"]);
        }
    }
    let is_attention = |(path, [called, queries, keys]): (_, [bool; 3])| {
        let projects = queries && keys;
        let is_root = str::is_empty(path);
        (if is_root { called && projects } else { called || projects }).then_some(path)
    };
    modules.into_iter().filter_map(is_attention).collect()
}

/// Tells whether a parameter may be a head by its shape and type.
fn is_matrix(found: &Found) -> bool {
    found.shape.len() >= 2 && found.holder() != "Embedding" && !found.is_adapter
}

fn is_head(name: &str) -> bool {
    HEADS.contains(&name) || name.ends_with("_head") || name == OUTPUT
}

fn is_embedding(name: &str) -> bool {
    has_word(name, &["emb", "wte", "wpe"]) || name.contains("embed") && !name.contains("unembed")
}

fn is_position(name: &str) -> bool {
    has_word(name, &["pos", "position", "positions", "positional"])
}

/// Tells whether a name has one of these words between its underscores.
fn has_word(name: &str, words: &[&str]) -> bool {
    name.split('_').any(|word| words.contains(&word))
}
