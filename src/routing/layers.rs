//! The layers of a model, by the widths of their weights: which layers may take the outputs of
//! which others. A module does not tell in which order its fields are used, so these are guesses.

use std::collections::HashMap;

use crate::parameters::Found;

/// The kind of a layer, by the type that holds its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Linear,
    Convolution,
    /// A convolution of every channel by itself.
    Depthwise,
    Embedding,
    Norm,
    /// A matrix in a type of the user's.
    Other,
}

/// A layer with a weight.
pub struct Layer<'a> {
    pub weight: &'a Found,
    pub kind: Kind,
    /// The numbers of inputs and outputs: channels of a convolution, the width of an embedding.
    pub inputs: usize,
    pub outputs: usize,
}

/// The layers of a model, in the order of its fields.
pub struct Layers<'a> {
    all: Vec<Layer<'a>>,
    /// The layers of every stack whose elements have one layer each, by the path of the stack.
    stacks: HashMap<&'a str, Vec<usize>>,
}

/// Most channels of images, and of the latent images of diffusion.
const MAX_CHANNELS: usize = 4;

/// Returns `true` for the types of Burn's convolutions.
pub fn is_convolution(holder: &str) -> bool {
    let kinds = ["Conv", "ConvTranspose", "DeformConv"];
    let name = holder.strip_suffix("d").and_then(|name| name.strip_suffix(['1', '2', '3']));
    name.is_some_and(|name| kinds.contains(&name))
}

/// Returns `true` for the types of convolutions that have their inputs first.
pub fn is_transposed(holder: &str) -> bool {
    holder.starts_with("ConvTranspose")
}

impl<'a> Layer<'a> {
    fn of(weight: &'a Found, earlier: &[Layer<'_>]) -> Option<Self> {
        let holder = weight.holder();
        let (kind, inputs, outputs) = match weight.shape[..] {
            _ if weight.is_adapter => return None,
            [inputs, outputs] if holder == "Linear" => (Kind::Linear, inputs, outputs),
            [first, second, _, ..] if is_convolution(holder) => {
                let divides = |width: usize| width > 1 && first.is_multiple_of(width);
                // One channel may also be a grey image: depthwise only behind a layer with as many
                // outputs, or with a divisor of them.
                if second == 1 && earlier.iter().any(|layer| divides(layer.outputs)) {
                    (Kind::Depthwise, first, first)
                } else if is_transposed(holder) {
                    (Kind::Convolution, first, second)
                } else {
                    (Kind::Convolution, second, first)
                }
            }
            [count, width] if holder == "Embedding" => (Kind::Embedding, count, width),
            [width] if holder.ends_with("Norm") => (Kind::Norm, width, width),
            [first, .., last] => (Kind::Other, first, last),
            _ => return None,
        };
        Some(Self { weight, kind, inputs, outputs })
    }

    /// Returns `true` for a `Linear` and a convolution that mixes channels.
    pub fn is_dense(&self) -> bool {
        matches!(self.kind, Kind::Linear | Kind::Convolution)
    }

    /// Returns `true` if its outputs may go into other layers.
    fn produces(&self) -> bool {
        self.is_dense() || matches!(self.kind, Kind::Depthwise | Kind::Embedding)
    }

    /// Returns `true` if its outputs may be inputs of a later layer, alone or next to others.
    fn may_feed(&self, later: &Self) -> bool {
        // Data has few channels, into which a vector is not reshaped.
        let becomes_feature_map = || {
            (self.kind, later.kind) == (Kind::Linear, Kind::Convolution)
                && self.outputs.is_multiple_of(later.inputs)
                && (is_transposed(later.weight.holder()) || later.inputs > MAX_CHANNELS)
        };
        self.outputs <= later.inputs || becomes_feature_map()
    }

    /// Returns `true` if it may take the outputs of another layer alone.
    pub fn may_follow(&self, other: &Self) -> bool {
        match (self.kind, other.kind) {
            (Kind::Embedding, _) => false,
            (Kind::Other, _) => {
                let matrix = self.weight.shape.iter().filter(|size| **size > 1).count() > 1;
                matrix && self.weight.shape.contains(&other.outputs)
            }
            // A feature map becomes a vector, and a vector a feature map.
            (Kind::Linear, Kind::Convolution) => self.inputs.is_multiple_of(other.outputs),
            (Kind::Convolution, Kind::Linear) => other.outputs.is_multiple_of(self.inputs),
            _ => self.inputs == other.outputs,
        }
    }
}

impl<'a> Layers<'a> {
    pub fn of(parameters: &'a [Found]) -> Self {
        let mut all: Vec<Layer<'a>> = vec![];
        for parameter in parameters {
            let layer = Layer::of(parameter, &all);
            all.extend(layer);
        }
        let mut elements: HashMap<(&str, &str), Vec<usize>> = HashMap::new();
        let dense = all.iter().enumerate().filter(|(_, layer)| layer.is_dense());
        for (index, Layer { weight, .. }) in dense {
            if let Some(depth) = weight.only_index() {
                let element = (weight.module(depth), weight.module(depth + 1));
                elements.entry(element).or_default().push(index);
            }
        }
        let mut stacks: HashMap<&str, Vec<usize>> = HashMap::new();
        let mut others = vec![];
        for ((stack, _), layers) in elements {
            match layers[..] {
                [layer] => stacks.entry(stack).or_default().push(layer),
                _ => others.push(stack),
            }
        }
        // One element of several layers makes the list a stack of blocks.
        stacks.retain(|stack, _| !others.contains(stack));
        // The map of elements has lost the order of the fields.
        stacks.values_mut().for_each(|layers| layers.sort_unstable());
        Self { all, stacks }
    }

    /// The layers and their indices, in the order of the fields.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, &Layer<'a>)> {
        self.all.iter().enumerate()
    }

    pub fn get(&self, index: usize) -> &Layer<'a> {
        &self.all[index]
    }

    /// The layers of the stack, of one layer for each element, that a layer is in.
    pub fn stack(&self, index: usize) -> Option<&[usize]> {
        let weight = self.get(index).weight;
        self.stacks.get(weight.module(weight.only_index()?)).map(Vec::as_slice)
    }

    /// Returns `true` if the layers of a stack follow each other, rather than being used side by
    /// side. A layer may also take the inputs of the stack.
    pub fn is_chain(&self, stack: &[usize]) -> bool {
        let input = stack.first().map_or(0, |first| self.get(*first).inputs);
        stack.windows(2).all(|pair| {
            let (before, after) = (self.get(pair[0]), self.get(pair[1]));
            [before.outputs, before.outputs + input].contains(&after.inputs)
        })
    }

    /// The layers that take the data of the model, rather than outputs of earlier layers or a
    /// concatenation of them: all of these are wider than the inputs. Of `heads`, none does, and
    /// their outputs do not become parts of inputs.
    pub fn that_take_data(&self, is_head: impl Fn(usize) -> bool) -> Vec<bool> {
        self.iter()
            .map(|(index, layer)| {
                let mut others = self.iter().filter(|(other, _)| *other != index);
                let may_feed = |(other, before): (usize, &Layer<'_>)| {
                    // Embeddings take no outputs: they come first, wherever their fields are.
                    let is_earlier = other < index || before.kind == Kind::Embedding;
                    let is_alone = before.outputs == layer.inputs;
                    // A layer alone, as in attention, has others of its width next to it.
                    before.produces()
                        && (is_earlier && (is_alone || !is_head(other) && before.may_feed(layer))
                            || layer.inputs == layer.outputs && is_alone)
                };
                layer.is_dense() && !is_head(index) && !others.any(may_feed)
            })
            .collect()
    }

    /// Returns `true` for the last of `Linear`s that follow each other after a feature map, which
    /// becomes a vector of several positions.
    pub fn ends_map(&self, index: usize) -> bool {
        let mut after = self.get(index);
        for before in self.all[..index].iter().rev().filter(|layer| layer.is_dense()) {
            match before.kind {
                Kind::Linear if before.outputs == after.inputs => after = before,
                Kind::Convolution => {
                    return after.inputs > before.outputs && after.may_follow(before);
                }
                _ => return false,
            }
        }
        false
    }

    /// The layers that may take the outputs of a layer, alone or next to another's. Layers
    /// that take the data do so only if they come later, as the decoder of an autoencoder.
    pub fn followers<'b>(
        &'b self,
        index: usize,
        takes_data: &'b [bool],
    ) -> impl Iterator<Item = &'b Layer<'a>> {
        let layer = self.get(index);
        // If the outputs of no layer alone are the inputs of the follower.
        let joined = move |other: usize, follower: &Layer<'_>| {
            let rest = follower.inputs.checked_sub(layer.outputs);
            follower.is_dense()
                && !self.iter().any(|(_, alone)| alone.produces() && follower.may_follow(alone))
                && self.iter().any(|(third, beside)| {
                    third != index
                        && third != other
                        && beside.produces()
                        && Some(beside.outputs) == rest
                })
        };
        self.iter()
            .filter(move |(other, follower)| {
                *other != index
                    && (*other > index || !takes_data[*other])
                    && (follower.may_follow(layer) || joined(*other, follower))
            })
            .map(|(_, follower)| follower)
    }
}
