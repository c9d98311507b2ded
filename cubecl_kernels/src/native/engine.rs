//! The native kernels of a device, and their order with CubeCL's work.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, Mutex};

use cudarc::driver::{result, sys};

use super::module::Module;
use super::order::{Claim, SideStream, relaxed};
use super::product::{Element, Launch};
use super::self_test;
use super::{NotRun, Refusal};

/// The compute capability whose instructions the kernels use.
const CAPABILITY: [i32; 2] = [9, 0];

/// `true` once a launch has failed: no native kernel runs in this process any more.
static IS_DISABLED: AtomicBool = AtomicBool::new(false);

/// The devices that were asked for, with the reason of those that have no native kernels.
type Devices = BTreeMap<usize, Result<&'static Native, Refusal>>;
static DEVICES: LazyLock<Mutex<Devices>> = LazyLock::new(Mutex::default);

/// The native kernels of a device, loaded and verified.
pub struct Native {
    device: usize,
    stream: SideStream,
    modules: [Module; Element::ALL.len()],
}

impl Native {
    /// Returns the kernels of a CUDA device. The first call loads them, and verifies that the
    /// device multiplies integers exactly in every variant.
    ///
    /// # Errors
    ///
    /// The reason why the device can't run them, or why a launch failed before.
    pub fn of(device: usize) -> Result<&'static Self, Refusal> {
        if IS_DISABLED.load(Ordering::Relaxed) {
            return Err(Refusal("a launch has failed before".to_owned()));
        }
        if Claim::is_held(device) {
            let reason = "ranks exchange messages on the device, which iterations would wait for";
            return Err(Refusal(reason.to_owned()));
        }
        let mut devices = DEVICES.lock().expect("nothing panics while it holds the lock");
        let load = || relaxed(|| Self::load(device)).map(|native| &*Box::leak(Box::new(native)));
        devices.entry(device).or_insert_with(load).clone()
    }

    fn load(device: usize) -> Result<Self, Refusal> {
        // SAFETY: the library is only searched for.
        if !unsafe { sys::is_culib_present() } {
            return Err(Refusal("there is no CUDA driver".to_owned()));
        }
        let failed = |operation| move |error| Refusal::new(operation, error);
        let stream = SideStream::new(device).map_err(failed("open the device"))?;
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |attribute| {
            // SAFETY: the device exists.
            unsafe { result::device::get_attribute(stream.device(), attribute) }
                .map_err(failed("describe the device"))
        };
        let [major, minor] = [
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ];
        if [major, minor] != CAPABILITY {
            return Err(Refusal(format!(
                "the device has compute capability {major}.{minor}, not 9.0"
            )));
        }
        if !stream.has_context_events() {
            return Err(Refusal("the driver is older than CUDA 12.5".to_owned()));
        }
        let load = |element| Module::load(element).map_err(failed("load the kernels"));
        let [f16, bf16] = Element::ALL.map(load);
        let native = Self { device, stream, modules: [f16?, bf16?] };
        self_test::verify(&native)?;
        Ok(native)
    }

    /// Queues launches that read and write memory of CubeCL's tensors: after all work that CubeCL
    /// has given the device, and before all that it will give it.
    ///
    /// # Errors
    ///
    /// The reason why they did not run, or not all of them.
    ///
    /// # Safety
    ///
    /// The addresses of the launches are multiples of 16, and those of memory with their elements,
    /// which CubeCL does not free before the work that it will give the device.
    pub unsafe fn run(&self, element: Element, launches: &[Launch]) -> Result<(), NotRun> {
        if Claim::is_held(self.device) {
            return Err(Refusal("ranks exchange messages on the device".to_owned()).into());
        }
        relaxed(|| {
            // Refused while a graph is recorded in the context: nothing has been queued by then.
            let ordered = self.stream.wait_for_context();
            ordered.map_err(|error| Refusal::new("order the iteration", error))?;
            // SAFETY: as for this function.
            let queued = unsafe { self.queue(element, launches) };
            // Also after a failure, whose launches before it may be running.
            let ordered = self.stream.record().and_then(|event| event.make_context_wait());
            let outcome = queued.and(ordered.map(drop));
            outcome.map_err(|error| {
                IS_DISABLED.store(true, Ordering::Relaxed);
                // CubeCL may reuse the memory, which nothing orders now.
                self.stream.synchronize().ok();
                NotRun::Failed(Refusal::new("launch the iteration", error))
            })
        })
    }

    /// Queues launches on the stream, in no order with CubeCL's work.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run), until the stream has done its work.
    pub(super) unsafe fn queue(
        &self,
        element: Element,
        launches: &[Launch],
    ) -> Result<(), super::DriverError> {
        self.stream.make_current()?;
        let index = Element::ALL.iter().position(|known| *known == element);
        let module = &self.modules[index.expect("both types have a module")];
        // SAFETY: as for this function.
        launches.iter().try_for_each(|launch| unsafe { module.launch(&self.stream, launch) })
    }

    /// Returns the stream that the kernels run on.
    pub(super) fn stream(&self) -> &SideStream {
        &self.stream
    }
}
