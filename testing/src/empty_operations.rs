//! Operations that write no element, which Burn's fusion must not see.
//!
//! Burn 0.22.1 fuses such an operation with others and launches no kernel for all of them, so that
//! values of other tensors are lost.

#[cfg(feature = "fusion")]
use std::{
    collections::BTreeSet,
    sync::{LazyLock, Mutex},
};

#[cfg(feature = "fusion")]
use burn::backend::fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
#[cfg(feature = "fusion")]
use burn_ir::{BaseOperationIr, OperationIr};

/// Runs a function, and returns an error that names the operations without elements that it, or
/// another function since the last error, asked fusion for on any device. There are none without
/// fusion.
pub fn ensure_none<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    #[cfg(feature = "fusion")]
    LazyLock::force(&OBSERVATION);
    let result = run()?;
    #[cfg(feature = "fusion")]
    {
        let seen = std::mem::take(&mut *SEEN.lock().expect("no holder of the lock panics"));
        if !seen.is_empty() {
            return Err(format!("operations without elements: expected none, got {seen:?}"));
        }
    }
    Ok(result)
}

#[cfg(feature = "fusion")]
static OBSERVATION: LazyLock<FusionObservation> =
    LazyLock::new(|| FusionObservation::new(std::sync::Arc::new(Observer)));

#[cfg(feature = "fusion")]
static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

#[cfg(feature = "fusion")]
struct Observer;

#[cfg(feature = "fusion")]
impl FusionObserver for Observer {
    fn registered(&self, operation: &OperationIr) {
        use OperationIr::{BaseBool, BaseFloat, BaseInt, Custom, Drop, Init};
        // None of them becomes part of a fused kernel.
        let is_unfused = matches!(
            operation,
            Init(_)
                | Custom(_)
                | Drop(_)
                | BaseFloat(BaseOperationIr::Empty(_))
                | BaseInt(BaseOperationIr::Empty(_))
                | BaseBool(BaseOperationIr::Empty(_))
        );
        let is_empty = operation.outputs().any(|output| output.shape.num_elements() == 0);
        if is_empty && !is_unfused {
            let mut seen = SEEN.lock().expect("no holder of the lock panics");
            seen.insert(format!("{operation:?}"));
        }
    }

    fn block_starts(&self, _block: BlockOperations<'_>) {}

    fn block_ran(&self) {}
}
