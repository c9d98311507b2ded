//! Ranks of one process with a GPU each, on a stand-in for CUDA's driver, which has two.

use std::path::Path;

use burn::tensor::Device;
use distmuon::Error;
use distmuon::comm::World;
use distmuon_testing::skip;

#[allow(dead_code)] // The engines need no order of work.
#[path = "../../cubecl_kernels/tests/driver/mod.rs"]
mod driver;

pub const TEST: &str = "threads_with_a_gpu_each_are_over_nccl";

pub fn threads_with_a_gpu_each_are_over_nccl() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cubecl_kernels/tests/driver");
    let engines = |gpus: [usize; 2]| {
        let devices = gpus.map(|index| Device::cuda(index).autodiff());
        let engine = |world: World| Ok::<_, Error>(world.comm().engine_name());
        World::threads(devices, engine).expect("the ranks agree")
    };
    let check = || {
        assert_eq!(engines([0, 1]), ["nccl"; 2]);
        // NCCL refuses two ranks on one GPU.
        assert_eq!(engines([0, 0]), ["threads"; 2]);
    };
    if let Err(missing) = driver::run(TEST, &sources, check) {
        skip(&missing);
    }
}
