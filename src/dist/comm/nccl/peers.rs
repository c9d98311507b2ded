//! The other ranks of a group: how to work with them, and how to hear of them.

use super::super::control::{Control, Elsewhere};
use super::group::Group;
use super::memory::Mark;
use crate::error::{Error, Result};

/// Both ways to the ranks of a group. Dropped, NCCL's communicator is ended: in peace, if all went well.
#[derive(Debug)]
pub struct Peers {
    pub control: Control,
    pub group: Group,
}

impl Peers {
    /// Waits until NCCL has carried a call out. `pause` is called between looks.
    ///
    /// # Errors
    ///
    /// Why it will not; the world is ended then.
    pub fn finish(&self, call: &Elsewhere, mark: &dyn Mark, pause: impl Fn()) -> Result<()> {
        let finished = self.control.wait(call, || {
            self.group.check(self.control.rank(), &call.call)?;
            let passed = mark.is_passed()?;
            if !passed {
                pause();
            }
            Ok(passed)
        });
        finished.map_err(|error| self.end(call, error))
    }

    /// Ends the world because of an error, and then what NCCL still does: whoever sees the end can
    /// learn of the cause.
    pub fn end(&self, call: &Elsewhere, error: Error) -> Error {
        let cause = self.control.cause_of(call, error, self.group.patience());
        self.group.abort();
        cause
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if self.control.has_failed() { self.group.abort() } else { self.group.part() }
    }
}
