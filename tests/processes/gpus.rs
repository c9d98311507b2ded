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
        let together = World::threads_with(devices.clone(), Relu::new(), with_a_model);
        assert_eq!(together.expect("the ranks agree"), ["nccl"; 2]);
        #[cfg(feature = "train")]
        assert_eq!(learner::engines(devices), ["nccl"; 2]);
    };
    if let Err(missing) = driver::run(TEST, &sources, check) {
        skip(&missing);
    }
}

/// A `Learner` whose ranks tell their engines, and then fail: the stand-in computes no training.
#[cfg(feature = "train")]
mod learner {
    use std::sync::{Arc, Mutex};

    use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
    use burn::data::dataset::InMemDataset;
    use burn::module::{Module, Param};
    use burn::optim::AdamWConfig;
    use burn::tensor::{Device, Tensor};
    use burn::train::{
        InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    };
    use distmuon::distributed::{DistMuonConfig, DistMuonStrategy, Layout};

    #[derive(Module, Debug)]
    struct Net {
        /// burn-train asks a model for its devices.
        weight: Param<Tensor<1>>,
    }

    impl TrainStep for Net {
        type Input = ();
        type Output = RegressionOutput;

        fn step(&self, (): ()) -> TrainOutput<RegressionOutput> {
            unreachable!("the ranks fail before their first step")
        }
    }

    impl InferenceStep for Net {
        type Input = ();
        type Output = RegressionOutput;

        fn step(&self, (): ()) -> RegressionOutput {
            unreachable!("the ranks fail before the first evaluation")
        }
    }

    struct Nothing;

    impl Batcher<usize, ()> for Nothing {
        fn batch(&self, _items: Vec<usize>, _device: &Device) {}
    }

    fn items() -> Arc<dyn DataLoader<()>> {
        DataLoaderBuilder::new(Nothing).batch_size(1).build(InMemDataset::new(vec![0, 1]))
    }

    /// The engines that the ranks on some devices have.
    pub fn engines(devices: Vec<Device>) -> Vec<&'static str> {
        let engines = Arc::new(Mutex::new(vec![]));
        let told = engines.clone();
        let strategy = DistMuonStrategy::new(devices.clone(), DistMuonConfig::new());
        let strategy = strategy.with_layout(move |world| -> distmuon::Result<Layout> {
            told.lock().unwrap().push(world.comm().engine_name());
            panic!("the test has seen the engine")
        });
        let folder = tempfile::tempdir().expect("a folder for temporary files exists");
        let training = SupervisedTraining::new(folder.path(), items(), items())
            .with_application_logger(None)
            .with_training_strategy(strategy.into());
        // Copied to the device, by no kernel.
        let weight = Param::from_data([1.0], &devices[0]);
        let learner = Learner::new(Net { weight }, AdamWConfig::new().init(), 1e-3);
        drop(training.launch(learner));
        std::mem::take(&mut *engines.lock().unwrap())
    }
}
