//! Data that are made of the index of an item: the same in every process.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::client::Items;

pub fn rng(seed: usize) -> StdRng {
    StdRng::seed_from_u64(seed as u64)
}

/// A generator for values that belong to a task and not to an item.
pub fn of_task() -> StdRng {
    rng(usize::MAX)
}

pub fn floats<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

pub fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, targets)
}

pub const VOCABULARY: usize = 16;

/// Texts `[items, length]`: a token mostly follows from the two before it.
pub fn texts(items: &Items, length: usize) -> Tensor<2, Int> {
    let mut table = of_task();
    let table: Vec<usize> =
        (0..VOCABULARY * VOCABULARY).map(|_| table.random_range(0..VOCABULARY)).collect();
    let text = |item: &usize| {
        let mut rng = rng(*item);
        let mut text: Vec<usize> = (0..2).map(|_| rng.random_range(0..VOCABULARY)).collect();
        while text.len() < length {
            let last = &text[text.len() - 2..];
            let noise = rng.random_range(0..VOCABULARY);
            let next = table[last[0] * VOCABULARY + last[1]];
            text.push(if rng.random_range(0..10) == 0 { noise } else { next });
        }
        text.into_iter().map(|token| token as i32).collect::<Vec<_>>()
    };
    let texts = items.indices.iter().flat_map(text).collect();
    ints(texts, [items.indices.len(), length], &items.device)
}

pub const IMAGE: usize = 8;
pub const CLASSES: usize = 8;

/// Images `[items, 1, 8, 8]` of waves, and the direction of each.
pub fn images(items: &Items) -> (Tensor<4>, Tensor<1, Int>) {
    let count = items.indices.len();
    let (mut pixels, mut classes) = (vec![], vec![]);
    for item in &items.indices {
        let mut rng = rng(*item);
        let class = rng.random_range(0..CLASSES);
        let angle = std::f32::consts::PI * class as f32 / CLASSES as f32;
        let phase = rng.random_range(0.0..std::f32::consts::TAU);
        for y in 0..IMAGE {
            for x in 0..IMAGE {
                let along = x as f32 * angle.cos() + y as f32 * angle.sin();
                pixels.push((1.2 * along + phase).sin() + rng.random_range(-1.0..1.0));
            }
        }
        classes.push(class as i32);
    }
    let images = floats(pixels, [count, 1, IMAGE, IMAGE], &items.device);
    (images, ints(classes, [count], &items.device))
}

/// Inputs `[items, width]` in -1 to 1.
pub fn inputs(items: &Items, width: usize) -> Vec<Vec<f32>> {
    let input = |item: &usize| {
        let mut rng = rng(*item);
        (0..width).map(|_| rng.random_range(-1.0..1.0)).collect()
    };
    items.indices.iter().map(input).collect()
}

/// A function of the task from inputs to some outputs: a network with random weights.
pub fn teacher(input: &[f32], outputs: usize) -> Vec<f32> {
    const HIDDEN: usize = 8;
    let mut rng = of_task();
    let mut layer = |input: &[f32], outputs: usize| -> Vec<f32> {
        let mut sum = || input.iter().map(|x| x * rng.random_range(-2.0..2.0)).sum();
        (0..outputs).map(|_| sum()).collect()
    };
    let hidden: Vec<f32> = layer(input, HIDDEN).into_iter().map(f32::tanh).collect();
    layer(&hidden, outputs)
}
