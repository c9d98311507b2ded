//! What an orthogonalisation takes beside the batch that it works on, as the allocator of the host sees it.

use burn::tensor::{DType, Device, Distribution, Tensor};
use distmuon::{Coefficients, Form, IterationDtype, NewtonSchulz};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// For what libraries need to rearrange blocks of their operands in.
const SCRATCH: usize = 1 << 20;

/// Bytes beside the batch, and those that were announced.
fn extra(shape: [usize; 3], form: Form) -> [usize; 2] {
    let device = Device::default();
    let set = Coefficients::KellerJordan;
    let iteration = NewtonSchulz::new(&set, 5, 1e-7, IterationDtype::F32, form).unwrap();
    let batch = Tensor::<3>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32));
    // Libraries make what they keep at first use.
    drop(iteration.orthogonalize(batch.clone()));
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let result = iteration.orthogonalize(batch.clone());
    let extra = ALLOCATOR.peak_usage() - before;
    drop(result);
    [extra, shape[0] * iteration.explain(&batch).workspace]
}

#[test]
fn an_orthogonalisation_takes_what_is_announced() {
    if std::env::var("BURN_DEVICE").is_ok_and(|device| device != "flex") {
        println!("skipped: only the memory of the host can be counted");
        return;
    }
    for shape in [[1, 1024, 1024], [4, 512, 512], [1, 700, 1024], [2, 1536, 512], [1, 512, 2048]] {
        let bytes = shape.iter().product::<usize>() * 4;
        for form in [Form::Auto, Form::Standard, Form::Gram] {
            let [extra, announced] = extra(shape, form);
            let times = |taken: usize| taken as f64 / bytes as f64;
            println!("{shape:?} {form:?}: {:.2}, announced {:.2}", times(extra), times(announced));
            assert!(extra <= announced + SCRATCH, "{shape:?} {form:?}: {extra} > {announced}");
            // What is announced is needed.
            assert!(extra + SCRATCH > announced, "{shape:?} {form:?}: {extra} < {announced}");
            assert!(form == Form::Gram || announced <= 3 * bytes, "{shape:?} {form:?}");
        }
    }
}
