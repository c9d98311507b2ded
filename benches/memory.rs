//! Peak memory of a step on one GPT-2 layer, against Burn's own Muon.
//!
//! ```text
//! cargo bench --bench memory
//! ```
//!
//! Counts the bytes that are allocated in addition to parameters, gradients and momenta.
//! The counts are meaningful on CPU devices only.

mod common;

use burn::optim::Optimizer;
use burn::tensor::Device;
use common::{LAYER, random};
use distmuon::{Coefficients, MuonConfig, NewtonSchulzConfig};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Measures the peak of the second and third step, in MiB above the memory in use between steps.
/// The first step does not count, since it also allocates the momenta.
fn peak<O: Optimizer>(optimizer: &O) -> f32 {
    let device = Device::default();
    let random = |shape: &[usize; 2]| random(*shape, &device);
    let gradients: Vec<_> = LAYER.iter().map(random).collect();
    let mut parameters: Vec<_> = LAYER.iter().map(|shape| Some((random(shape), None))).collect();
    let mut peak = 0f32;
    for step in 0..3 {
        for (slot, gradient) in parameters.iter_mut().zip(&gradients) {
            let (parameter, state) = slot.take().expect("every slot is refilled after its step");
            let before = ALLOCATOR.current_usage_as_mb();
            ALLOCATOR.reset_peak_usage();
            *slot = Some(optimizer.step(1e-3, parameter, gradient.clone(), state));
            if step > 0 {
                peak = peak.max(ALLOCATOR.peak_usage_as_mb() - before);
            }
        }
    }
    peak
}

fn main() {
    let newton_schulz = NewtonSchulzConfig::new().with_coefficients(Coefficients::KellerJordan);
    let ours = MuonConfig::new().with_newton_schulz(newton_schulz).build();
    let (burn, ours) = (peak(&burn::optim::MuonConfig::new().build()), peak(&ours));
    println!(
        "peak of a step: burn {burn:.1} MiB, distmuon {ours:.1} MiB, {:.2} x burn",
        ours / burn
    );
}
