//! The built-in choice of roles, by names, types and shapes.

use std::collections::{HashMap, HashSet};

use super::layers::{Kind, Layer, Layers, is_convolution, is_transposed};
use super::names::{self, OUTPUT};
use super::{FirstLinear, ParameterRole};
use crate::matrix_view::{MatrixLayout, MatrixView};
use crate::parameters::Found;

/// The most inputs of a first `Linear` that AdamW updates by default. With as many and fewer, its
/// losses were lower in all networks but one that were measured, and with 16 they were higher (see
/// `docs/guide/excluding.md`, 2026-11-27).
const MOST_INPUTS: usize = 8;

/// The parts of a model, found by the names and types of its fields and by the widths of its
/// layers.
pub(super) struct Anatomy<'a> {
    parameters: &'a [Found],
    layers: Layers<'a>,
    /// The indices of layers, by the paths of their weights.
    by_weight: HashMap<&'a str, usize>,
    /// The paths of modules with a recurrence of the user's: state spaces, and RWKV's.
    recurrences: HashSet<&'a str>,
    /// The paths of attention modules, and of recurrences other than the whole model.
    mixers: HashSet<&'a str>,
    /// The reasons for output heads, by the paths of their weights.
    heads: HashMap<&'a str, &'static str>,
    /// The paths of the last layers whose outputs are compared with the embeddings.
    tied: HashSet<&'a str>,
    /// The layers that take the data of the model.
    takes_data: Vec<bool>,
    first_linear: FirstLinear,
}

impl<'a> Anatomy<'a> {
    pub fn of(parameters: &'a [Found], first_linear: FirstLinear) -> Self {
        let layers = Layers::of(parameters);
        let by_weight =
            layers.iter().map(|(index, layer)| (layer.weight.weight(), index)).collect();
        let recurrences = recurrences(parameters);
        let mut mixers = attention(parameters);
        // Not the whole model: all layers would be inside of it, and none could be a head.
        mixers.extend(recurrences.iter().filter(|path| !path.is_empty()));
        let mut anatomy = Self {
            parameters,
            layers,
            by_weight,
            recurrences,
            mixers,
            heads: HashMap::new(),
            tied: HashSet::new(),
            takes_data: vec![],
            first_linear,
        };
        anatomy.find_heads();
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
        match (parameter.is_adapter, role) {
            (false, _) => (role, reason),
            // Muon would make all directions of the few that a factor has equally large.
            (true, ParameterRole::Muon { .. }) => {
                (ParameterRole::Vector, format!("LoRA factor: {reason}"))
            }
            (true, _) => (role, format!("LoRA factor: {reason}")),
        }
    }

    /// The role of a trainable parameter, and the reason. A question mark marks a guess.
    fn trained_role(&self, parameter: &Found, layout: MatrixLayout) -> (ParameterRole, String) {
        let embedding = || named(parameter).find(|name| names::is_embedding(name));
        let lora = || named(parameter).find(|name| names::is_lora(name));
        // The order matters: types are certain, names nearly so, and widths are guesses.
        let (role, reason) = if parameter.shape.len() < 2 {
            (ParameterRole::Vector, "fewer than two dimensions")
        } else if parameter.holder() == "Embedding" {
            (ParameterRole::Embedding, "in an Embedding")
        } else if let Some(reason) = self.heads.get(parameter.weight()) {
            (ParameterRole::Head, *reason)
        } else if is_row_or_column(parameter) {
            (ParameterRole::Vector, "a single row or column")
        } else if names::is_embedding(parameter.name()) {
            (ParameterRole::Embedding, "named as an embedding")
        } else if names::is_position(parameter.name()) {
            (ParameterRole::Embedding, "named as positions")
        } else if let Some(name) = embedding() {
            return (ParameterRole::Embedding, format!("embedding? (in `{name}`)"));
        } else if let Some(name) = lora() {
            return (ParameterRole::Vector, format!("LoRA factor? (in `{name}`)"));
        } else if is_convolution(parameter.holder()) {
            self.convolution(parameter)
        } else if parameter.holder() == "Linear" {
            self.linear(parameter, layout)
        } else {
            // A parameter of the user's own type: only its name and its neighbours are known.
            return self.outside_of_layers(parameter, layout);
        };
        (role, reason.to_owned())
    }

    /// The role of the weight of a convolution without the name of another role.
    fn convolution(&self, weight: &Found) -> (ParameterRole, &'static str) {
        let layout = flat_layout(weight);
        let muon = ParameterRole::Muon { view: MatrixView::Flatten, layout };
        let Some(index) = self.by_weight.get(weight.weight()) else {
            return (muon, "hidden convolution");
        };
        match self.layers.get(*index).kind {
            Kind::Depthwise => (ParameterRole::Vector, "depthwise convolution"),
            _ if !self.takes_data[*index] => (muon, "hidden convolution"),
            _ if self.is_stem(*index) => (ParameterRole::Embedding, "stem convolution"),
            // Fewer inputs than all earlier layers have outputs, but not the channels of the data.
            _ => (muon, "hidden convolution? (grouped)"),
        }
    }

    /// Returns `true` if a convolution that takes data has the input channels of the first one.
    fn is_stem(&self, index: usize) -> bool {
        let mut layers = self.layers.iter();
        let first = layers
            .find(|(index, layer)| layer.kind == Kind::Convolution && self.takes_data[*index]);
        first.is_some_and(|(_, first)| first.inputs == self.layers.get(index).inputs)
    }

    /// The role of the weight of a `Linear` without the name of another role.
    fn linear(&self, weight: &Found, layout: MatrixLayout) -> (ParameterRole, &'static str) {
        let muon = ParameterRole::Muon { view: MatrixView::Single, layout };
        let index = self.by_weight.get(weight.weight());
        let first = index
            .filter(|index| self.takes_data[**index] && self.may_take_data(**index))
            .map(|index| self.layers.get(*index));
        if let Some(Layer { inputs, .. }) = first {
            let is_muons = match self.first_linear {
                FirstLinear::Auto => *inputs > MOST_INPUTS,
                FirstLinear::Muon => true,
                FirstLinear::AdamW => false,
            };
            return match is_muons {
                true => (muon, "hidden matrix? (first Linear)"),
                false => (ParameterRole::Embedding, "input layer? (first Linear)"),
            };
        }
        if self.tied.contains(weight.weight()) {
            return (muon, "hidden matrix? (as wide as the embedding)");
        }
        if self.is_fused(weight) {
            return (muon, "hidden matrix? (several in one)");
        }
        if index.is_some_and(|index| self.is_wide_end(*index)) {
            return (muon, "hidden matrix? (no layer takes its outputs)");
        }
        (muon, "hidden matrix")
    }

    /// Returns `true` for a layer that is at least as wide as its inputs, and whose outputs no
    /// layer takes: a further head, such as one for a vocabulary, or one with gates.
    fn is_wide_end(&self, index: usize) -> bool {
        let mut followers = self.layers.followers(index, &self.takes_data);
        self.may_be_last(index) && followers.next().is_none()
    }

    /// Returns `true` for a layer outside of attention and stacks, or of a recurrent cell.
    fn may_take_data(&self, index: usize) -> bool {
        is_in_cell(self.layers.get(index).weight) || self.is_free(index)
    }

    /// Returns `true` for a projection to several hidden spaces.
    fn is_fused(&self, weight: &Found) -> bool {
        let Some(depth) = weight.fields.len().checked_sub(2) else { return false };
        let name = &weight.fields[depth].name;
        names::is_fused(name)
            // The `in_proj` of a state space has several outputs side by side; elsewhere the name
            // says nothing.
            || name == "in_proj" && self.recurrences.contains(weight.module(depth))
    }

    /// The role of a parameter in a module of the user's, without the name of another role.
    fn outside_of_layers(
        &self,
        parameter: &Found,
        layout: MatrixLayout,
    ) -> (ParameterRole, String) {
        let module = parameter.module(parameter.fields.len().saturating_sub(1));
        // As above, names before shapes: a stack of biases has the shape of a matrix.
        let (role, reason) = if names::is_bias(parameter.name()) {
            (ParameterRole::Vector, "named as a bias")
        } else if names::is_learned_input(parameter.name()) {
            (ParameterRole::Embedding, "named as learned inputs")
        } else if self.recurrences.contains(module) {
            (ParameterRole::Vector, "parameter of a recurrence? (outside a Linear)")
        } else if let Some(matrices) = self.matrices_of_biases(parameter, module) {
            let reason = format!("bias? (of the outputs of `{}`)", matrices.name());
            return (ParameterRole::Vector, reason);
        } else if is_spectral(parameter) {
            let reason = format!("spectral weights? (in `{}`)", parameter.holder());
            return (ParameterRole::Vector, reason);
        } else {
            let muon = ParameterRole::Muon { view: MatrixView::Single, layout };
            (muon, "hidden matrix? (outside a Linear)")
        };
        (role, reason.to_owned())
    }

    /// The stack of matrices in the same module whose outputs a parameter may be added to.
    fn matrices_of_biases(&self, parameter: &Found, module: &str) -> Option<&Found> {
        let depth = parameter.fields.len().checked_sub(1)?;
        // Biases may have dimensions of 1, by which they are added to every item of a batch.
        let without_ones = |shape: &[usize]| -> Vec<usize> {
            shape.iter().copied().filter(|size| *size > 1).collect()
        };
        let biases = without_ones(&parameter.shape);
        self.parameters.iter().find(|other| {
            other.fields.len() == depth + 1
                && other.is_in(module, depth)
                && matches!(&other.shape[..], [stack @ .., inputs, outputs] if !stack.is_empty()
                    && *inputs > 1
                    && without_ones(&[stack, &[*outputs]].concat()) == biases)
        })
    }

    /// Returns `true` if a parameter is in an attention module or a recurrence.
    fn is_in_mixer(&self, parameter: &Found) -> bool {
        is_in_cell(parameter)
            || (0..=parameter.fields.len())
                .any(|depth| self.mixers.contains(parameter.module(depth)))
    }

    /// Finds the output heads: by the names of heads; by the names that several outputs have, and
    /// by the widths of layers; and if no layer has the name of a head, by position.
    fn find_heads(&mut self) {
        let (mut heads, mut tied) = (HashMap::new(), HashSet::new());
        let named = self.named_heads();
        for &(weight, name) in &named {
            let layer = self.by_weight.get(weight).map(|index| self.layers.get(*index));
            // `output` says less than the other names: the last layer before a tied head may have
            // it, too.
            match layer.filter(|_| name == OUTPUT) {
                Some(layer) if self.is_tied(layer) => _ = tied.insert(weight),
                // A head mostly changes the width, so that this one is a guess.
                Some(layer) if layer.inputs == layer.outputs => {
                    heads.insert(weight, "output head? (named `output`)");
                }
                _ => _ = heads.insert(weight, "output head"),
            }
        }
        let path = |index: usize| self.layers.get(index).weight.weight();
        for index in self.named_outputs() {
            heads.entry(path(index)).or_insert("output head? (by its name)");
        }
        // Before the guesses: a layer that only takes data does not take another's outputs.
        let takes_data = self.layers.that_take_data(|index| heads.contains_key(path(index)));
        let mut guesses = self.ends(&takes_data);
        // A model that names its heads has no further one at its end.
        if named.is_empty() {
            guesses.extend(self.last(&takes_data, !(heads.is_empty() && guesses.is_empty())));
        }
        for (index, reason) in guesses {
            match self.is_tied(self.layers.get(index)) {
                true => _ = tied.insert(path(index)),
                false => _ = heads.entry(path(index)).or_insert(reason),
            }
        }
        // Once more: with the guessed heads, fewer layers have outputs that could be taken.
        self.takes_data = self.layers.that_take_data(|index| heads.contains_key(path(index)));
        (self.heads, self.tied) = (heads, tied);
    }

    /// The matrices in fields with the name of a head that are closest to the root, each with the
    /// name. Where a field has several matrices, it is the last one, unless they are side by side.
    /// Excluded are fields in a stack of layers, and fields that contain attention or recurrence.
    fn named_heads(&self) -> Vec<(&'a str, &'a str)> {
        let mut heads = vec![];
        for parameter in self.parameters.iter().filter(|parameter| is_matrix(parameter)) {
            let named = (1..=parameter.fields.len()).filter(|depth| {
                let name = &parameter.fields[depth - 1].name;
                // A parameter of attention heads, as of their scales.
                let is_of_heads = *depth == parameter.fields.len() && name.ends_with("heads");
                // `is_in_layer` reads all parameters, and is evaluated for few.
                let is_inside = || {
                    parameter.in_stack(*depth)
                        || name == OUTPUT && self.is_in_layer(parameter, *depth)
                };
                names::is_head(name) && !is_of_heads && !is_inside()
            });
            heads.extend(named.map(|depth| (depth, parameter)));
        }
        // With attention inside, a field is a block, whatever its name.
        heads.retain(|(depth, parameter)| !self.has_mixer(parameter.module(*depth), *depth));
        // A head inside of a block, such as one of attention, is not the model's.
        let min_depth = heads.iter().map(|(depth, _)| *depth).min();
        heads.retain(|(depth, _)| Some(*depth) == min_depth);
        let is_certain =
            |(depth, parameter): &(usize, &Found)| parameter.fields[depth - 1].name != OUTPUT;
        // At one depth, `output` next to a head's name is something else.
        if heads.iter().any(is_certain) {
            heads.retain(is_certain);
        }
        // Later matrices of a field replace earlier ones.
        let field = |depth: usize, parameter: &'a Found| match self.is_side_by_side(parameter) {
            true => parameter.weight(),
            false => parameter.module(depth),
        };
        let last: HashMap<&str, (&str, &str)> = heads
            .into_iter()
            .map(|(depth, parameter)| {
                let name = parameter.fields[depth - 1].name.as_str();
                (field(depth, parameter), (parameter.weight(), name))
            })
            .collect();
        last.into_values().collect()
    }

    /// The last layers of the fields whose names several outputs have. Excluded are those in a
    /// stack of layers, and values next to keys.
    fn named_outputs(&self) -> Vec<usize> {
        let (mut outputs, mut seen) = (vec![], HashSet::new());
        for (_, Layer { weight, .. }) in self.dense() {
            let fields = weight.fields.iter().enumerate().take(weight.fields.len() - 1);
            for (above, field) in fields {
                let (module, depth) = (weight.module(above + 1), above + 1);
                if names::is_one_of_the_outputs(&field.name)
                    && !weight.in_stack(depth)
                    // Each module once, whichever of its layers is met first.
                    && seen.insert(module)
                    // Next to keys, `value` and `q` are projections of attention.
                    && !self.has_keys(weight.module(above), above)
                {
                    outputs.extend(self.outputs_of(module, depth));
                }
            }
        }
        outputs
    }

    /// The last layers of a module, unless others in it, or in the next of its name, take their
    /// outputs.
    fn outputs_of(&self, module: &str, depth: usize) -> Vec<usize> {
        let name = names::without_digits(module);
        let is_near = |weight: &Found| {
            weight.fields.len() >= depth && names::without_digits(weight.module(depth)) == name
        };
        let inside = || self.dense().filter(|(_, layer)| layer.weight.is_in(module, depth));
        let Some((last, _)) = inside().rfind(|(index, _)| self.is_free(*index)) else {
            return vec![];
        };
        if self.is_side_by_side(self.layers.get(last).weight) {
            return self.layers.stack(last).expect("layers side by side are in a stack").to_vec();
        }
        // The first layer of a module takes its inputs.
        let first = inside().next().map(|(first, _)| first);
        let is_followed = self.dense().any(|(index, other)| {
            ![Some(last), first].contains(&Some(index))
                && is_near(other.weight)
                && other.may_follow(self.layers.get(last))
        });
        if is_followed || !self.may_be_last(last) { vec![] } else { vec![last] }
    }

    /// The layers that are narrower than their inputs, and whose outputs no layer takes.
    fn ends(&self, takes_data: &[bool]) -> Vec<(usize, &'static str)> {
        let is_end = |(index, layer): &(usize, &Layer<'_>)| {
            layer.outputs < layer.inputs
                && self.may_be_last(*index)
                && self.layers.followers(*index, takes_data).next().is_none()
        };
        let reason = "output head? (no layer takes its outputs)";
        self.dense().filter(is_end).map(|(index, _)| (index, reason)).collect()
    }

    /// The last layer of the model, unless it belongs to a layer with attention, with the reason.
    /// Where the head is tied to the embedding, the last layer belongs to the last block. If it is
    /// a convolution that others follow, it is not the output, and the last `Linear` counts.
    fn last(&self, takes_data: &[bool], has_heads: bool) -> Option<(usize, &'static str)> {
        let followers = |index| self.layers.followers(index, takes_data);
        let is_modulation = |weight: &Found| named(weight).any(names::is_modulation);
        // A modulation scales other layers, and is never the output, even if its field is the last.
        let layers = || self.dense().rev().filter(|(_, layer)| !is_modulation(layer.weight));
        let (last, layer) = layers().next()?;
        if layer.kind == Kind::Convolution
            && self.may_be_last(last)
            && followers(last).next().is_none()
        {
            return Some((last, "output head? (last convolution)"));
        }
        let (last, _) = layers().find(|(_, layer)| layer.kind == Kind::Linear)?;
        // Classes do not go into an earlier convolution, even one with their number of channels.
        let ends_map = self.layers.ends_map(last);
        let is_earlier = |other: &Layer<'_>| self.by_weight[other.weight.weight()] < last;
        let is_inside = || {
            followers(last).any(|other| match other.kind {
                Kind::Convolution => !(ends_map && is_earlier(other)),
                // Without any head, the last `Linear` is one even if its width fits another layer.
                _ => has_heads,
            })
        };
        let is_last = self.may_be_last(last) && !is_inside();
        is_last.then_some((last, "output head? (last Linear)"))
    }

    /// The layers that mix their inputs.
    fn dense(&self) -> impl DoubleEndedIterator<Item = (usize, &Layer<'a>)> {
        self.layers.iter().filter(|(_, layer)| layer.is_dense())
    }

    /// Returns `true` if a layer may be the last of a model. It is outside of blocks, is not named
    /// like a router, and no layer follows it in a stack.
    fn may_be_last(&self, index: usize) -> bool {
        let is_last_of_stack = || match self.layers.stack(index) {
            Some(stack) if self.layers.is_chain(stack) => {
                let layer = self.layers.get(index);
                // A chain of one width is made of hidden layers: a head changes the width.
                stack.last() == Some(&index) && layer.inputs != layer.outputs
            }
            // Side by side, and wide: experts rather than outputs.
            Some(_) => self.layers.get(index).outputs < self.layers.get(index).inputs,
            None => true,
        };
        let is_inner = || named(self.layers.get(index).weight).any(names::is_inner);
        !is_inner() && is_last_of_stack() && self.is_free(index)
    }

    /// Returns `true` for a layer outside of attention, recurrence, and stacks of blocks with
    /// several layers.
    fn is_free(&self, index: usize) -> bool {
        let weight = self.layers.get(index).weight;
        let depth = weight.fields.len();
        (!weight.in_stack(depth) || self.layers.stack(index).is_some())
            && !self.is_in_mixer(weight)
            && !self.is_in_layer(weight, depth)
    }

    /// Returns `true` for a layer in a stack whose layers do not follow each other.
    fn is_side_by_side(&self, weight: &Found) -> bool {
        let index = self.by_weight.get(weight.weight());
        let stack = index.and_then(|index| self.layers.stack(*index));
        stack.is_some_and(|stack| !self.layers.is_chain(stack))
    }

    /// Returns `true` if the outputs of a layer may be compared with an embedding, as in the
    /// last `Linear` before a tied head.
    fn is_tied(&self, layer: &Layer<'_>) -> bool {
        let is_embedding = |other: &Layer<'_>| {
            other.kind == Kind::Embedding
                && other.outputs == layer.outputs
                && other.inputs != layer.outputs
        };
        layer.kind == Kind::Linear && self.layers.iter().any(|(_, other)| is_embedding(other))
    }

    /// Returns `true` if a module has a field for keys.
    fn has_keys(&self, module: &str, depth: usize) -> bool {
        let mut inside = self.parameters.iter().filter(|parameter| parameter.is_in(module, depth));
        inside.any(|parameter| {
            parameter.fields.get(depth).is_some_and(|field| names::is_key(&field.name))
        })
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
        self.has_mixer(module, depth)
            && !outside.is_empty()
            && !inside.iter().any(|parameter| parameter.holder() == "Embedding")
    }

    /// Returns `true` if a module contains attention or recurrence.
    fn has_mixer(&self, module: &str, depth: usize) -> bool {
        let mut inside = self.parameters.iter().filter(|parameter| parameter.is_in(module, depth));
        inside.any(|parameter| self.is_in_mixer(parameter))
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
                || names::is_attention(field_name);
            *queries |= names::is_query(&field.name);
            *keys |= names::is_key(&field.name);
        }
    }
    let is_attention = |(path, [named, queries, keys]): (_, [bool; 3])| {
        let projects = queries && keys;
        let is_root = str::is_empty(path);
        (if is_root { named && projects } else { named || projects }).then_some(path)
    };
    modules.into_iter().filter_map(is_attention).collect()
}

/// The paths of the modules that have fields of a recurrence.
fn recurrences(parameters: &[Found]) -> HashSet<&str> {
    let of = |parameter: &'_ Found| {
        let fields = parameter.fields.iter().enumerate();
        // The innermost such field: the module around it is the recurrence, and not every one
        // above.
        let depth = fields.rev().find(|(_, field)| names::is_recurrence(&field.name));
        depth.map(|(depth, _)| depth)
    };
    parameters
        .iter()
        .filter_map(|parameter| of(parameter).map(|depth| parameter.module(depth)))
        .collect()
}

/// The dimension of a convolution's outputs, where its weight is a matrix of the first dimension by
/// all others.
pub(super) fn flat_layout(weight: &Found) -> MatrixLayout {
    match is_transposed(weight.holder()) {
        true => MatrixLayout::InOut,
        false => MatrixLayout::OutIn,
    }
}

/// Returns `true` if a parameter may be a head by its shape and type.
fn is_matrix(parameter: &Found) -> bool {
    parameter.shape.len() >= 2
        && parameter.holder() != "Embedding"
        && !parameter.is_adapter
        && !names::is_bias(parameter.name())
}

/// Returns `true` for a matrix of a single row or column.
fn is_row_or_column(parameter: &Found) -> bool {
    let above_one = |shape: &[usize]| shape.iter().filter(|size| **size > 1).count();
    above_one(&parameter.shape) < 2
        // Flattened, such a weight is a single row.
        || is_convolution(parameter.holder()) && parameter.shape.first() == Some(&1)
}

/// Returns `true` for a parameter of one of Burn's recurrent cells.
fn is_in_cell(parameter: &Found) -> bool {
    parameter.fields.iter().any(|field| field.holder == "GateController")
}

/// The names of the last three fields on the way to a parameter, from the last, without indices.
fn named(parameter: &Found) -> impl Iterator<Item = &str> {
    let fields = parameter.fields.iter().rev().filter(|field| !field.is_index());
    // Names far above say little of a parameter: `embeddings.encoder.layer.up` is no embedding.
    fields.take(3).map(|field| field.name.as_str())
}

/// Returns `true` for a parameter of frequencies, whose matrices, if any, are not its last
/// dimensions.
fn is_spectral(parameter: &Found) -> bool {
    parameter.shape.len() > 2
        && ["Spectral", "Fourier"].iter().any(|word| parameter.holder().contains(word))
}
