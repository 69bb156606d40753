//! Deliberate faults, for tests and the demo.

#[cfg(feature = "fault-injection")]
use std::sync::atomic::{AtomicU64, Ordering};

/// What a plane should get wrong on purpose. The default is nothing; without the feature
/// `fault-injection` there is nothing else, and asking costs nothing.
#[derive(Debug, Default)]
pub struct Faults {
    /// Flip a bit in each of this many of the next pages, after the source has sealed them.
    #[cfg(feature = "fault-injection")]
    pub flip_pages: AtomicU64,
    /// Let every writer fall silent after this many bytes, without a drain.
    #[cfg(feature = "fault-injection")]
    pub stall_after_bytes: Option<u64>,
}

#[cfg(feature = "fault-injection")]
impl Faults {
    /// Takes one flip from those that are left.
    pub(super) fn flips_page(&self) -> bool {
        let one_less = |left: u64| left.checked_sub(1);
        // Relaxed: the count orders nothing else.
        self.flip_pages
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
            .is_ok()
    }

    /// Whether pages have to be looked at one by one.
    pub(super) fn may_flip(&self) -> bool {
        // Relaxed: a hint, for speed; `flips_page` decides.
        self.flip_pages.load(Ordering::Relaxed) > 0
    }

    /// How many bytes a writer that has posted `posted` bytes may still post.
    pub(super) fn room(&self, posted: u64) -> u64 {
        self.stall_after_bytes
            .map_or(u64::MAX, |after| after.saturating_sub(posted))
    }
}

#[cfg(not(feature = "fault-injection"))]
#[expect(clippy::unused_self, reason = "as with the feature")]
impl Faults {
    /// Never.
    pub(super) fn flips_page(&self) -> bool {
        false
    }

    /// Never.
    pub(super) fn may_flip(&self) -> bool {
        false
    }

    /// As many as it likes.
    pub(super) fn room(&self, _posted: u64) -> u64 {
        u64::MAX
    }
}
