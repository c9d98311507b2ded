//! The switch `DISTMUON_NATIVE`, and the decision whether a device runs native kernels: their first
//! load, and its checks.

use std::env;
use std::sync::{LazyLock, Mutex};

use cudarc::driver::{result, sys};

use super::Refusal;
use super::cublaslt::CublasLt;
use super::engine::{Native, ensure_enabled};
use super::launches::Element;
use super::per_device::Devices;
use super::ptx_module::{Module, Scratch};
use super::self_test::{self, Fault};
use super::stream_order::{SideStream, in_relaxed_mode};
use super::tile_choice::TileShape;

/// The compute capability whose instructions the kernels use.
const CAPABILITY: [i32; 2] = [9, 0];

/// The nanoseconds after which a block gives up to wait for others while the kernels are verified:
/// many times what any of these products takes.
const PATIENCE: u32 = 1_000_000_000;

/// The use of native kernels that the environment variable `DISTMUON_NATIVE` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    Off,
    /// The kernels run if the device can run them.
    On,
    /// A device that refuses them ends the program: for tests.
    Must,
}

impl Switch {
    /// Reads the variable once in a process.
    fn of_process() -> Result<Self, Refusal> {
        static SWITCH: LazyLock<Result<Switch, Refusal>> =
            LazyLock::new(|| Switch::parse(env::var("DISTMUON_NATIVE").ok().as_deref()));
        SWITCH.clone()
    }

    fn parse(value: Option<&str>) -> Result<Self, Refusal> {
        match value {
            None | Some("" | "on") => Ok(Self::On),
            Some("off") => Ok(Self::Off),
            Some("must") => Ok(Self::Must),
            Some(other) => Err(Refusal(format!(
                "DISTMUON_NATIVE is not understood: expected off, on or must, got {other}"
            ))),
        }
    }
}

/// Returns the result.
///
/// # Panics
///
/// For a refusal, if `DISTMUON_NATIVE` is `must`.
pub fn unless_required<T>(result: Result<T, Refusal>) -> Result<T, Refusal> {
    if let Err(reason) = &result
        && Switch::of_process() == Ok(Switch::Must)
    {
        panic!("native kernels are required by DISTMUON_NATIVE=must, but refused: {reason}");
    }
    result
}

impl Native {
    /// Returns the kernels of a type on a CUDA device. The first call loads them, and keeps the
    /// shapes of tiles with which the device multiplies integers exactly.
    ///
    /// # Errors
    ///
    /// The reason why the device can't run them, that a launch failed before, or that the
    /// environment variable `DISTMUON_NATIVE` is `off`.
    ///
    /// # Panics
    ///
    /// Instead of returning an error, if `DISTMUON_NATIVE` is `must`.
    pub fn of(device: usize, element: Element) -> Result<&'static Self, Refusal> {
        unless_required(Self::find(device, element))
    }

    fn find(device: usize, element: Element) -> Result<&'static Self, Refusal> {
        static DEVICES: [Devices<Native>; Element::ALL.len()] =
            [const { Devices::new() }; Element::ALL.len()];
        if Switch::of_process()? == Switch::Off {
            return Err(Refusal("DISTMUON_NATIVE is off".to_owned()));
        }
        ensure_enabled()?;
        DEVICES[element as usize].get(device, || Self::load(device, element))
    }

    fn load(device: usize, element: Element) -> Result<Self, Refusal> {
        // SAFETY: the library is only searched for.
        match unsafe { sys::is_culib_present() } {
            true => in_relaxed_mode(|| Self::load_and_verify(device, element)),
            false => Err(Refusal("there is no CUDA driver".to_owned())),
        }
    }

    fn load_and_verify(device: usize, element: Element) -> Result<Self, Refusal> {
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
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // A cluster of two blocks needs a place: see `Grid::fastest`.
        if multiprocessors < 2 {
            return Err(Refusal("the device has one multiprocessor".to_owned()));
        }
        let scratch =
            Scratch::new(&stream, multiprocessors as usize).map_err(failed("allocate memory"))?;
        // The device may wait for messages of other ranks, for any time: what is timed comes later.
        stream.synchronize().map_err(failed("clear memory"))?;
        let module = Module::load(element)?;
        let mut native = Self {
            element,
            stream,
            module,
            scratch,
            patience: PATIENCE,
            shapes: TileShape::ALL.to_vec(),
            fault: None,
            library: Err(Refusal("they are being verified".to_owned())),
            recordings: Mutex::default(),
        };
        match self_test::verify(&native) {
            Ok((exact, fault)) => (native.shapes, native.fault) = (exact, fault),
            Err(fault) => return Err(native.given_up(fault)),
        }
        // Verified kernels neither read the clock nor give up.
        native.patience = 0;
        native.library = CublasLt::open();
        if native.library.is_ok()
            && let Err(fault) = self_test::verify_library(&native)
        {
            match fault {
                Fault::Wrong(reason) => native.library = Err(reason),
                Fault::Stuck(_) => return Err(native.given_up(fault)),
            }
        }
        Ok(native)
    }

    /// Drops the kernels after a fault, but not what the device may be working on: freeing it would
    /// wait for the device.
    fn given_up(self, fault: Fault) -> Refusal {
        match fault {
            Fault::Wrong(reason) => reason,
            Fault::Stuck(reason) => {
                std::mem::forget(self);
                reason
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_takes_three_words_and_says_so() {
        for (value, expected) in [
            (None, Switch::On),
            (Some(""), Switch::On),
            (Some("on"), Switch::On),
            (Some("off"), Switch::Off),
            (Some("must"), Switch::Must),
        ] {
            assert_eq!(Switch::parse(value), Ok(expected));
        }
        let Refusal(reason) = Switch::parse(Some("1")).unwrap_err();
        assert!(reason.contains("expected off, on or must, got 1"), "{reason}");
    }
}
