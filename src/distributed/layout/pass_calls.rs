//! The calls of passes, which ranks compare at the end of a pass.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::identity::Version;

/// A collective of a pass, by the index of its parameter: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// With the version of the values, or `None` if the last step has made them and no pass used
    /// them.
    Gather(usize, Option<Version>),
    Reduce(usize),
}

/// The number of calls that are kept one by one. A training pass has fewer; evaluation, in
/// which no pass ends, may go on for ever.
const KEPT: usize = 1 << 14;

/// Calls in their order, in memory that does not grow with their number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Events {
    /// The number of earlier calls, and a hash of them.
    earlier: (usize, u64),
    latest: Vec<Event>,
}

impl Events {
    pub fn push(&mut self, event: Event) {
        if self.latest.len() == KEPT {
            let mut hasher = DefaultHasher::new();
            (self.earlier.1, &self.latest).hash(&mut hasher);
            self.earlier = (self.earlier.0 + KEPT, hasher.finish());
            self.latest.clear();
        }
        self.latest.push(event);
    }

    /// Returns `true` if a call is one of the latest.
    pub fn has(&self, event: Event) -> bool {
        self.latest.contains(&event)
    }

    /// The first calls that differ from another rank's. `None` for the end of the calls.
    pub fn difference(&self, other: &Self) -> Option<[Option<Event>; 2]> {
        let [first, second] = [&self.latest, &other.latest];
        let mut indices = 0..first.len().max(second.len());
        let index = indices.find(|index| first.get(*index) != second.get(*index));
        // Those that are kept may begin at different calls, or follow ones that differ.
        let index = index.or_else(|| (self.earlier != other.earlier).then_some(0))?;
        Some([first, second].map(|events| events.get(index).copied()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(count: usize, change: Option<usize>) -> Events {
        let mut events = Events::default();
        for index in 0..count {
            let event =
                if change == Some(index) { Event::Reduce(7) } else { Event::Gather(index, None) };
            events.push(event);
        }
        events
    }

    #[test]
    fn differences_are_found_in_memory_that_does_not_grow() {
        for count in [0, 5, KEPT, KEPT + 1, 3 * KEPT + 2] {
            assert_eq!(events(count, None), events(count, None));
            assert!(events(count, None).difference(&events(count, None)).is_none());
            assert!(events(count, None).latest.capacity() <= 2 * KEPT);
            for change in [0, count / 2, count.saturating_sub(1)].into_iter().filter(|c| *c < count)
            {
                let changed = events(count, Some(change));
                assert_ne!(digest(&events(count, None)), digest(&changed), "{count}, {change}");
                assert!(events(count, None).difference(&changed).is_some());
            }
        }
        let difference = events(5, None).difference(&events(5, Some(3))).unwrap();
        assert_eq!(difference, [Some(Event::Gather(3, None)), Some(Event::Reduce(7))]);
        let ended = events(5, None).difference(&events(4, None)).unwrap();
        assert_eq!(ended, [Some(Event::Gather(4, None)), None]);
    }

    fn digest(events: &Events) -> u64 {
        let mut hasher = DefaultHasher::new();
        events.hash(&mut hasher);
        hasher.finish()
    }
}
