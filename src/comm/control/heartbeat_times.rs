//! Heartbeats: their interval, and the silence after which a connection counts as lost.

use std::time::Duration;

/// The shortest time between two heartbeats of a process.
const MIN_INTERVAL: Duration = Duration::from_millis(500);
/// The most heartbeats that rank 0 receives per second, from all processes together.
const MAX_PER_SECOND: f64 = 2000.0;
/// Heartbeats that may be missed in a row: a process may be stopped or swapped out for a moment.
const MAX_MISSED: u32 = 8;
/// The longest timeout, unless [`MAX_MISSED`] heartbeats take longer. It is this long because a
/// false alarm ends a world that may have run for days.
const MAX_TIMEOUT: Duration = Duration::from_secs(20);

/// A process that was stalled for this long can't tell whether its peers were silent.
pub const STALL: Duration = Duration::from_secs(1);

/// The timing of a world's heartbeats.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatTimes {
    /// The time between two heartbeats of a process.
    pub interval: Duration,
    /// The silence after which a process counts as lost.
    pub timeout: Duration,
}

impl HeartbeatTimes {
    /// Returns the timing for `size` ranks that wait for each other for at most `deadline`.
    pub fn new(size: usize, deadline: Duration) -> Self {
        let interval = MIN_INTERVAL.max(Duration::from_secs_f64(size as f64 / MAX_PER_SECOND));
        Self { interval, timeout: (MAX_MISSED * interval).max(deadline.min(MAX_TIMEOUT)) }
    }

    /// The time before a rank's first heartbeat. It differs between ranks, since all of them join
    /// at about the same time and should not send at the same time.
    pub fn first_delay(&self, rank: usize, size: usize) -> Duration {
        self.interval.mul_f64((rank + 1) as f64 / size as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_of_a_world_of_any_size_stay_within_the_limit_of_rank_0() {
        for size in [1, 8, 1000, 4096, 100_000] {
            let heartbeat = HeartbeatTimes::new(size, Duration::from_secs(600));
            let per_second = size as f64 / heartbeat.interval.as_secs_f64();
            assert!(per_second <= MAX_PER_SECOND + 1e-3, "{size}");
            assert!(heartbeat.timeout >= MAX_MISSED * heartbeat.interval, "{size}");
            assert!(heartbeat.first_delay(size - 1, size) <= heartbeat.interval, "{size}");
        }
        let timeout = |deadline| HeartbeatTimes::new(8, Duration::from_secs(deadline)).timeout;
        assert_eq!([1, 7, 600].map(|deadline| timeout(deadline).as_secs()), [4, 7, 20]);
        let timeout = |size| HeartbeatTimes::new(size, Duration::from_secs(600)).timeout;
        assert_eq!([2, 5000, 10_000].map(|size| timeout(size).as_secs()), [20, 20, 40]);
    }
}
