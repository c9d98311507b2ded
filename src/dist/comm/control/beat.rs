//! The interval of heartbeats, and the longest silence.

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

/// A process that was kept from looking for so long can't tell whether others were silent.
pub const STALL: Duration = Duration::from_secs(1);

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_of_any_world_are_as_many_as_rank_0_takes() {
        for size in [1, 8, 1000, 4096, 100_000] {
            let beat = Beat::new(size, Duration::from_secs(600));
            assert!(size as f64 / beat.interval.as_secs_f64() <= PER_SECOND + 1e-3, "{size}");
            assert!(beat.silence >= MISSING * beat.interval, "{size}");
            assert!(beat.first(size - 1, size) <= beat.interval, "{size}");
        }
        let beat = |deadline| Beat::new(8, Duration::from_secs(deadline)).silence;
        assert_eq!([beat(1), beat(7), beat(600)].map(|silence| silence.as_secs()), [4, 7, 20]);
    }
}
