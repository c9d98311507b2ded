//! Ranks of one process with a GPU each, on a stand-in for CUDA's driver, which has two.

use std::path::Path;

use burn::nn::Relu;
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
        // The default device of this process, which has this test alone.
        // SAFETY: no other thread reads or writes the environment.
        unsafe { std::env::set_var("BURN_DEVICE", "cuda") };
        let names = |devices: Vec<Device>| format!("{devices:?}");
        let in_turn = [0, 1, 0].map(|index| Device::cuda(index).autodiff()).to_vec();
        assert_eq!(names(World::devices(3)), names(in_turn));
        assert_eq!(engines([0, 1]), ["nccl"; 2]);
        // NCCL refuses two ranks on one GPU.
        assert_eq!(engines([0, 0]), ["threads"; 2]);
        let with_a_model = |world: World, _: Relu| Ok::<_, Error>(world.comm().engine_name());
        let devices = [0, 1].map(|index| Device::cuda(index).autodiff()).to_vec();
        let together = World::threads_with(devices, Relu::new(), with_a_model);
        assert_eq!(together.expect("the ranks agree"), ["nccl"; 2]);
    };
    if let Err(missing) = driver::run(TEST, &sources, check) {
        skip(&missing);
    }
}
