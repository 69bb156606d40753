//! What is waited for, and until when. A timer that fires makes something happen; it never takes a
//! holder away by itself.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use super::ReceiveKey;
use crate::ids::{LeaseId, TransferId};
use crate::time::Now;

/// Whose timer.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Timer {
    /// A lease whose offer nobody has used.
    Offer(LeaseId),
    /// A transfer to here.
    Receive(ReceiveKey),
    /// A transfer from here.
    Send(TransferId),
}

/// At most one deadline for each.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Timers {
    by_time: BTreeSet<(Now, Timer)>,
    by_timer: BTreeMap<Timer, (Now, Now)>,
}

impl Timers {
    /// Sets a deadline `after` from now, in place of any earlier one.
    pub(super) fn set(&mut self, now: Now, timer: Timer, after: Duration) {
        self.clear(timer);
        let deadline = now.plus(after);
        self.by_time.insert((deadline, timer));
        self.by_timer.insert(timer, (deadline, now));
    }

    pub(super) fn clear(&mut self, timer: Timer) {
        if let Some((deadline, _)) = self.by_timer.remove(&timer) {
            self.by_time.remove(&(deadline, timer));
        }
    }

    pub(super) fn next(&self) -> Option<Now> {
        self.by_time.first().map(|(deadline, _)| *deadline)
    }

    /// Takes out one that is due, with the milliseconds that were waited.
    pub(super) fn pop(&mut self, now: Now) -> Option<(Timer, u64)> {
        let (deadline, timer) = *self.by_time.first()?;
        if deadline > now {
            return None;
        }
        let (_, since) = self.by_timer[&timer];
        self.clear(timer);
        let waited = now.0.saturating_sub(since.0);
        Some((timer, millis(waited)))
    }

    pub(super) fn timers(&self) -> impl Iterator<Item = Timer> + '_ {
        self.by_timer.keys().copied()
    }
}

/// Whole milliseconds, for the numbers of a reason.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
