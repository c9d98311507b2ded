//! The built-in choice of roles, by names, types and shapes.

use std::collections::{HashMap, HashSet};

use super::ParameterRole;
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::parameters::Found;

/// Names of fields that hold an output head, in addition to those that end in `_head`.
const HEADS: [&str; 6] = ["head", "classifier", "unembed", "unembedding", "embed_out", "logits"];

/// A further name of an output head. It does not count if a field of the same depth has one of the
/// other names.
const OUTPUT: &str = "output";

/// The attention modules and output heads of a model, found by the names and types of its fields.
pub(super) struct Anatomy<'a> {
    parameters: &'a [Found],
    /// The paths of attention modules.
    attention: HashSet<&'a str>,
    /// The paths of the matrices that are output heads.
    heads: Vec<&'a str>,
    /// `true` if the heads were found by name, rather than by position.
    heads_are_named: bool,
}

impl<'a> Anatomy<'a> {
    pub fn of(parameters: &'a [Found]) -> Self {
        let attention = attention(parameters);
        let mut anatomy = Self { parameters, attention, heads: vec![], heads_are_named: true };
        anatomy.heads = anatomy.named_heads();
        if anatomy.heads.is_empty() {
            anatomy.heads.extend(anatomy.last_linear());
            anatomy.heads_are_named = false;
        }
        anatomy
    }

    /// The role of a parameter, and the reason.
    pub fn role(&self, parameter: &Found, layout: MatrixLayout) -> (ParameterRole, String) {
        if !parameter.trainable {
            let is_statistic =
                parameter.holder() == "BatchNorm" && parameter.name().starts_with("running_");
            let reason = match is_statistic {
                true => "running statistics",
                false if parameter.shape.contains(&0) => "no elements",
                false => "frozen",
            };
            return (ParameterRole::Frozen, reason.to_owned());
        }
        let (role, reason) = self.trained_role(parameter, layout);
        let reason = if parameter.is_adapter { format!("LoRA factor: {reason}") } else { reason };
        (role, reason)
    }

    /// The role of a trainable parameter, and the reason. A question mark marks a guess.
    fn trained_role(&self, parameter: &Found, layout: MatrixLayout) -> (ParameterRole, String) {
        let muon = ParameterRole::Muon { view: MatrixView::Single, layout };
        let embedding_field =
            || parameter.fields.iter().rev().take(3).find(|field| is_embedding(&field.name));
        let (role, reason) = if parameter.shape.len() < 2 {
            (ParameterRole::Vector, "fewer than two dimensions")
        } else if parameter.holder() == "Embedding" {
            (ParameterRole::Embedding, "in an Embedding")
        } else if self.heads.contains(&parameter.weight()) {
            let reason =
                if self.heads_are_named { "output head" } else { "output head? (last Linear)" };
            (ParameterRole::Head, reason)
        } else if parameter.shape.iter().filter(|size| **size > 1).count() < 2 {
            (ParameterRole::Vector, "a single row or column")
        } else if is_embedding(parameter.name()) {
            (ParameterRole::Embedding, "named as an embedding")
        } else if is_position(parameter.name()) {
            (ParameterRole::Embedding, "named as positions")
        } else if let Some(field) = embedding_field() {
            return (ParameterRole::Embedding, format!("embedding? (in `{}`)", field.name));
        } else if parameter.holder() == "Linear" {
            (muon, "hidden matrix")
        } else {
            (muon, "hidden matrix? (outside a Linear)")
        };
        (role, reason.to_owned())
    }

    /// Returns `true` if a parameter is in an attention module or a recurrent cell.
    fn is_in_attention_or_cell(&self, parameter: &Found) -> bool {
        (0..=parameter.fields.len()).any(|depth| self.attention.contains(parameter.module(depth)))
            || parameter.fields.iter().any(|field| field.holder == "GateController")
    }

    /// The matrices in fields with the name of a head that are closest to the root. Where a field
    /// has several matrices, it is the last one. Excluded are fields in a stack of layers, and
    /// fields that contain attention or recurrence.
    fn named_heads(&self) -> Vec<&'a str> {
        let mut heads = vec![];
        for parameter in self.parameters.iter().filter(|parameter| is_matrix(parameter)) {
            let named = (1..=parameter.fields.len()).filter(|depth| {
                let name = &parameter.fields[depth - 1].name;
                // The last condition reads all parameters, and is evaluated for few.
                is_head(name)
                    && !parameter.in_stack(*depth)
                    && !(name == OUTPUT && self.is_in_layer(parameter, *depth))
            });
            heads.extend(named.map(|depth| (depth, parameter)));
        }
        heads.retain(|(depth, parameter)| {
            !self.has_attention_or_cell(parameter.module(*depth), *depth)
        });
        let min_depth = heads.iter().map(|(depth, _)| *depth).min();
        heads.retain(|(depth, _)| Some(*depth) == min_depth);
        let is_certain =
            |(depth, parameter): &(usize, &Found)| parameter.fields[depth - 1].name != OUTPUT;
        if heads.iter().any(is_certain) {
            heads.retain(is_certain);
        }
        // Later matrices of a field replace earlier ones.
        let last: HashMap<&str, &str> = heads
            .into_iter()
            .map(|(depth, parameter)| (parameter.module(depth), parameter.weight()))
            .collect();
        last.into_values().collect()
    }

    /// The last `Linear` of the model, unless it belongs to a layer. Where the head is tied to the
    /// embedding, the last `Linear` belongs to the last layer.
    fn last_linear(&self) -> Option<&'a str> {
        let mut matrices = self.parameters.iter().filter(|parameter| is_matrix(parameter));
        let last = matrices.rfind(|parameter| parameter.holder() == "Linear")?;
        let depth = last.fields.len();
        let hidden = last.in_stack(depth)
            || self.is_in_attention_or_cell(last)
            || self.is_in_layer(last, depth);
        (!hidden).then(|| last.weight())
    }

    /// Returns `true` if a module above this depth on the way to a parameter is a layer.
    fn is_in_layer(&self, parameter: &Found, depth: usize) -> bool {
        (1..depth).any(|depth| self.is_layer(parameter.module(depth), depth))
    }

    /// Returns `true` if a module is a layer of a model, rather than the model: it has attention or
    /// recurrence, but not all parameters, and no embedding.
    fn is_layer(&self, module: &str, depth: usize) -> bool {
        let (inside, outside): (Vec<&Found>, Vec<&Found>) =
            self.parameters.iter().partition(|parameter| parameter.is_in(module, depth));
        self.has_attention_or_cell(module, depth)
            && !outside.is_empty()
            && !inside.iter().any(|parameter| parameter.holder() == "Embedding")
    }

    /// Returns `true` if a module contains attention or recurrence.
    fn has_attention_or_cell(&self, module: &str, depth: usize) -> bool {
        let mut inside = self.parameters.iter().filter(|parameter| parameter.is_in(module, depth));
        inside.any(|parameter| self.is_in_attention_or_cell(parameter))
    }
}

/// The paths of the attention modules: by type, by the name of their field, or because they have
/// fields for queries and keys. The whole model is an attention module only by both type and
/// fields.
fn attention(parameters: &[Found]) -> HashSet<&str> {
    let mut modules: HashMap<&str, [bool; 3]> = HashMap::new();
    for parameter in parameters {
        for (depth, field) in parameter.fields.iter().enumerate() {
            let field_name = depth.checked_sub(1).map_or("", |above| &parameter.fields[above].name);
            let [named, queries, keys] = modules.entry(parameter.module(depth)).or_default();
            *named |= field.holder.ends_with("Attention")
                || field.holder.ends_with("Attn")
                || has_word(field_name, &["attention", "attn"]);
            *queries |= has_word(&field.name, &["q", "query", "queries", "wq", "qkv", "wqkv"]);
            *keys |= has_word(&field.name, &["k", "key", "keys", "kv", "wk", "qkv", "wqkv"]);
        }
    }
    let is_attention = |(path, [named, queries, keys]): (_, [bool; 3])| {
        let projects = queries && keys;
        let is_root = str::is_empty(path);
        (if is_root { named && projects } else { named || projects }).then_some(path)
    };
    modules.into_iter().filter_map(is_attention).collect()
}

/// Returns `true` if a parameter may be a head by its shape and type.
fn is_matrix(parameter: &Found) -> bool {
    parameter.shape.len() >= 2 && parameter.holder() != "Embedding" && !parameter.is_adapter
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

/// Returns `true` if a name has one of these words between its underscores.
fn has_word(name: &str, words: &[&str]) -> bool {
    name.split('_').any(|word| words.contains(&word))
}
