//! Work of one rank that the others wait for without a deadline.

use crate::comm::Communicator;

/// Marks this rank as busy with work that may take longer than the deadline, until this is dropped.
pub struct Busy(Communicator);

impl Busy {
    pub fn new(comm: Communicator) -> Self {
        comm.set_busy(true);
        Self(comm)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_busy(false);
    }
}
