//! The primitives that [`rendezvous`](super::rendezvous) is made of. Its test replaces them by
//! those of a checker that explores interleavings.

pub use std::sync::atomic::{AtomicU64, Ordering};
pub use std::sync::{Condvar, Mutex, MutexGuard};
