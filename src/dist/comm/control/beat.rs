//! How often a process says that it lives, and how long it may be silent.

use std::time::Duration;

/// The shortest time between two heartbeats of a process.
const SHORTEST: Duration = Duration::from_millis(500);
/// Heartbeats that rank 0 takes in a second, from all processes together.
const PER_SECOND: f64 = 2000.0;
/// Heartbeats that may be missing: a process may be stopped or swapped out for a moment.
const MISSING: u32 = 8;
/// The longest silence, if heartbeats come more often: a false alarm ends a world that may have run
/// for days.
const LONGEST: Duration = Duration::from_secs(20);

/// The heartbeats of a world.
#[derive(Debug, Clone, Copy)]
pub struct Beat {
    /// The time between two heartbeats of a process.
    pub interval: Duration,
    /// The time after which a process that has said nothing counts as gone.
    pub silence: Duration,
}

impl Beat {
    /// The heartbeats of `size` ranks that wait for each other for `deadline`.
    pub fn new(size: usize, deadline: Duration) -> Self {
        let interval = SHORTEST.max(Duration::from_secs_f64(size as f64 / PER_SECOND));
        Self { interval, silence: (MISSING * interval).max(deadline.min(LONGEST)) }
    }

    /// When a rank says that it lives for the first time: all ranks join at about the same time, and
    /// should not speak at the same time.
    pub fn first(&self, rank: usize, size: usize) -> Duration {
        self.interval.mul_f64((rank + 1) as f64 / size as f64)
    }
}
