//! The one reader of time.

use std::time::{Duration, Instant};

use fabric_proto::time::Now;

/// A monotonic clock that starts at 0 with the daemon.
///
/// Nothing else in the daemon asks what time it is: the machine is told, and waits are durations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    /// Starts a clock.
    #[must_use]
    pub(crate) fn start() -> Self {
        Self {
            start: Instant::now(),
        }
    }

    /// The moment that it is.
    #[must_use]
    pub(crate) fn now(&self) -> Now {
        Now(self.start.elapsed())
    }

    /// How long it is until `moment`; zero where it has passed.
    #[must_use]
    pub(crate) fn until(&self, moment: Now) -> Duration {
        moment.0.saturating_sub(self.start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn now_never_goes_back_and_the_past_is_due_at_once() {
        let clock = Clock::start();
        let (first, second) = (clock.now(), clock.now());
        assert!(first <= second);
        assert_eq!(clock.until(Now(Duration::ZERO)), Duration::ZERO);
        assert!(clock.until(first.plus(Duration::from_secs(60))) > Duration::from_secs(30));
    }
}
