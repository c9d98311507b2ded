//! The memory of the host that is kept between steps.

/// Keeps freed memory for the next step, which allocates the same again. By default, glibc gives
/// some of it back to the system, more or less with every change of the order of allocations, and
/// page faults then take up to a tenth of the time.
pub fn keep() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for parameter in [libc::M_TRIM_THRESHOLD, libc::M_MMAP_THRESHOLD] {
        const BYTES: libc::c_int = 1 << 30;
        // SAFETY: the call sets a number of the allocator.
        unsafe { libc::mallopt(parameter, BYTES) };
    }
}
