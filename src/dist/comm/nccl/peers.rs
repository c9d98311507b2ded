//! The other ranks of a group: how to work with them, and how to hear of them.

use std::time::Instant;

use super::super::control::{Control, Elsewhere, PATIENCE};
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
    pub fn finish(
        &self,
        call: &Elsewhere,
        [ready, done]: [&dyn Mark; 2],
        pause: impl Fn(),
    ) -> Result<()> {
        let finished = self
            .until_ready(call, ready, &pause)
            .and_then(|()| self.control.wait(call, || self.is_passed(call, done, &pause)));
        finished.map_err(|error| self.end(call, error))
    }

    /// Waits until this rank's own work before a call is done, however long that takes: the deadline is
    /// one for other ranks.
    fn until_ready(&self, call: &Elsewhere, ready: &dyn Mark, pause: &impl Fn()) -> Result<()> {
        let mut checked = Instant::now();
        while !self.is_passed(call, ready, pause)? {
            if checked.elapsed() >= PATIENCE {
                self.control.check()?;
                checked = Instant::now();
            }
        }
        Ok(())
    }

    fn is_passed(&self, call: &Elsewhere, mark: &dyn Mark, pause: &impl Fn()) -> Result<bool> {
        self.group.check(self.control.rank(), &call.call)?;
        let passed = mark.is_passed()?;
        if !passed {
            pause();
        }
        Ok(passed)
    }

    /// Ends the world because of an error, and then what NCCL still does: the other ranks can learn of
    /// the cause before they see the end.
    pub fn end(&self, call: &Elsewhere, error: Error) -> Error {
        let cause = self.control.cause_of(call, error, self.group.patience());
        self.group.abort();
        cause
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.fail("it panicked");
        }
        if self.control.has_failed() { self.group.abort() } else { self.group.part() }
    }
}
