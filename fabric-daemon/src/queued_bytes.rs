//! The bytes that wait in a queue, counted from both of its ends.
//!
//! Checked by `tests/loom`, which compiles this file as it is: see [`crate::sync`].

use crate::sync::{AtomicUsize, Ordering};

/// How many bytes wait in a queue: never fewer than there are.
///
/// A message is counted before it is queued, and discounted after it was taken. So the count can be
/// too high for a moment, which refuses a message too many, and never too low, which would let the
/// queue grow past its bound, or wrap.
#[derive(Debug)]
pub(crate) struct QueuedBytes(AtomicUsize);

impl QueuedBytes {
    /// Of an empty queue.
    pub(crate) fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Counts a message, and has `queue` queue it, which is told how many bytes wait then, the
    /// message's included. Where it does not queue it the bytes stay counted: nothing more is to be
    /// queued.
    // Relaxed, here and below: each is one read-modify-write, so no count is lost, and nothing but
    // the count is read through it. That `taken` comes after `queue` for the same message is the
    // queue's doing: whoever took the message has seen what was done before it was queued.
    pub(crate) fn queue<T>(&self, bytes: usize, queue: impl FnOnce(usize) -> T) -> T {
        let queued = self.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
        queue(queued)
    }

    /// Discounts messages that were taken from the queue.
    pub(crate) fn taken(&self, bytes: usize) {
        let before = self.0.fetch_sub(bytes, Ordering::Relaxed);
        assert!(before >= bytes, "what is taken was counted before");
    }
}
