//! The choice of the engine for ranks that are threads of one process.

use std::collections::HashSet;

#[cfg(feature = "cuda")]
use burn::backend::DispatchDevice;
use burn::tensor::Device;
#[cfg(feature = "cuda")]
use burn_cubecl::CubeDevice;

#[cfg(feature = "cuda")]
use super::nccl::Nccl;
use crate::error::Result;

/// The engine that moves tensors between threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// [`Threads`](super::Threads), by copies between devices.
    Threads,
    /// NCCL.
    Nccl,
    /// [`Threads`](super::Threads) for want of NCCL's library, with a warning that names it.
    WithoutNccl(String),
}

/// Chooses the engine for ranks on these devices.
pub fn of_devices(devices: &[Device]) -> Choice {
    let cuda: Vec<Option<usize>> = devices.iter().map(cuda_index).collect();
    of_cuda_indices(&cuda, find_nccl)
}

/// Chooses the engine for ranks on CUDA devices with these indices, `None` for other devices. NCCL
/// connects ranks that have a CUDA device each, if its library is found.
fn of_cuda_indices(cuda: &[Option<usize>], find_nccl: impl FnOnce() -> Result<()>) -> Choice {
    let different: HashSet<usize> = cuda.iter().copied().flatten().collect();
    // Devices without an index, and those given twice, make the set smaller. NCCL refuses two ranks
    // on one GPU.
    if cuda.len() < 2 || different.len() < cuda.len() {
        return Choice::Threads;
    }
    match find_nccl() {
        Ok(()) => Choice::Nccl,
        Err(error) => Choice::WithoutNccl(format!(
            "the ranks are threads on {} GPUs that copy tensors to each other: expected NCCL \
             (libnccl.so.2), got {error}",
            cuda.len()
        )),
    }
}

/// The index of a CUDA device; `None` for other devices.
pub fn cuda_index(device: &Device) -> Option<usize> {
    #[cfg(feature = "cuda")]
    if let DispatchDevice::Cube(CubeDevice::Cuda(cuda)) = device.clone().inner().as_dispatch() {
        return Some(cuda.index);
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
    None
}

/// Fails if NCCL's library is not found, or is too old.
fn find_nccl() -> Result<()> {
    #[cfg(feature = "cuda")]
    Nccl::installed_version()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn is_found() -> Result<()> {
        Ok(())
    }

    fn is_missing() -> Result<()> {
        Err(Error::Engine {
            engine: "nccl",
            rank: 0,
            operation: "NCCL was not found".into(),
            reason: "libnccl.so.2: no such file".into(),
            remedy: "install NCCL",
        })
    }

    fn is_not_looked_for() -> Result<()> {
        panic!("these ranks need no library")
    }

    #[test]
    fn ranks_with_a_cuda_device_each_use_nccl() {
        assert_eq!(of_cuda_indices(&[Some(0), Some(1)], is_found), Choice::Nccl);
        assert_eq!(of_cuda_indices(&[Some(3), Some(0), Some(7)], is_found), Choice::Nccl);
    }

    #[test]
    fn all_other_ranks_use_threads_and_do_not_look_for_nccl() {
        for cuda in [
            &[][..],
            &[None],
            &[Some(0)],
            &[None, None],
            &[Some(0), Some(0)],
            &[Some(0), Some(1), Some(0)],
            &[Some(0), None],
        ] {
            assert_eq!(of_cuda_indices(cuda, is_not_looked_for), Choice::Threads, "{cuda:?}");
        }
        // On Flex, all handles are the same device.
        let devices = vec![Device::default().autodiff(); 2];
        if cuda_index(&devices[0]).is_none() {
            assert_eq!(of_devices(&devices), Choice::Threads);
        }
    }

    #[test]
    fn without_its_library_a_warning_names_it_and_threads_go_on() {
        let choice = of_cuda_indices(&[Some(0), Some(1)], is_missing);
        let Choice::WithoutNccl(warning) = choice else { panic!("{choice:?}") };
        for part in ["2 GPUs", "libnccl.so.2", "NCCL was not found", "install NCCL"] {
            assert!(warning.contains(part), "{warning}");
        }
    }
}
