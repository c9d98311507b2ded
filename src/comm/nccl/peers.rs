//! The other ranks of a group: calls with them, and their failures.

use std::time::Instant;

use super::group::RawCommunicator;
use super::memory::StreamEvent;
use crate::comm::control::{self, COMPARE_AFTER, Control, ExternalCall};
use crate::error::{Error, Result};

/// The two connections to the ranks of a group. When this is dropped, NCCL's communicator is
/// finalized, or aborted after a failure.
#[derive(Debug)]
pub struct Peers {
    pub control: Control,
    pub comm: RawCommunicator,
}

impl Peers {
    /// Waits until NCCL has carried out a call. `pause` is called between two polls.
    ///
    /// # Errors
    ///
    /// The reason why the call can't finish. The world has ended then.
    pub fn finish(
        &self,
        call: &ExternalCall,
        [ready, done]: [&dyn StreamEvent; 2],
        pause: impl Fn(),
    ) -> Result<()> {
        let finished = self
            .wait_until_ready(call, ready, &pause)
            .and_then(|()| self.control.wait(call, || self.is_passed(call, done, &pause)));
        finished.map_err(|error| self.end(call, error))
    }

    /// Waits until this rank's work before a call is done, however long that takes: the deadline
    /// only applies to waits for other ranks.
    fn wait_until_ready(
        &self,
        call: &ExternalCall,
        ready: &dyn StreamEvent,
        pause: &impl Fn(),
    ) -> Result<()> {
        let start = Instant::now();
        let mut checked = start;
        while !self.is_passed(call, ready, pause)? {
            // Work of seconds is not polled all the time.
            control::pause(start.elapsed());
            if checked.elapsed() >= COMPARE_AFTER {
                self.control.check()?;
                checked = Instant::now();
            }
        }
        Ok(())
    }

    fn is_passed(
        &self,
        call: &ExternalCall,
        event: &dyn StreamEvent,
        pause: &impl Fn(),
    ) -> Result<bool> {
        self.comm.poll(self.control.rank(), &call.call)?;
        let is_passed = event.is_passed()?;
        if !is_passed {
            pause();
        }
        Ok(is_passed)
    }

    /// Ends the world because of an error, and returns the cause. Then aborts NCCL's communicator,
    /// in this order: the other ranks can learn of the cause before they see that NCCL has ended.
    pub fn end(&self, call: &ExternalCall, error: Error) -> Error {
        let cause = self.control.cause_of(call, error, self.comm.compare_timeout());
        self.comm.abort();
        cause
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.control.fail("it panicked");
        }
        if self.control.has_failed() { self.comm.abort() } else { self.comm.finalize() }
    }
}
