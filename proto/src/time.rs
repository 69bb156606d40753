//! Time as a value.

use core::time::Duration;

/// A moment on the daemon's monotonic clock, counted from its start. Never sent to a peer.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Now(pub Duration);

impl Now {
    /// The moment `after` later.
    #[must_use]
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(after))
    }
}
