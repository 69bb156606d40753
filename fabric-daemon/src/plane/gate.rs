//! The gate of a grant: every copy into its slots goes through here, and no more once it is closed.
//!
//! 1. [`Gate::attach`] lets in one writer, once.
//! 2. [`Gate::while_open`] runs its copies, each under the lock.
//! 3. [`Gate::close`] closes it under the same lock. Whoever closes it gets the proof; whoever
//!    comes later gets nothing.
//!
//! The lock decides everything, and its order is the one that counts: what was copied before the
//! gate closed happened before the proof, for every thread that the proof is handed to.
//!
//! Checked by `tests/loom`, which compiles this file as it is: see [`crate::sync`].

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, TryLockError};

/// Whether copies may be made, and whose.
#[derive(Debug)]
pub(super) struct Gate {
    state: Mutex<State>,
    /// Somebody closes it: a hint to the copier not to take the lock again first. The lock is not
    /// fair: without the hint whoever closes might wait for many copies.
    closing: AtomicBool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Closed,
    Open { attached: bool },
}

/// The proof that a gate is closed: no copy is under way, and none will begin. There is one for
/// each gate, and only this file makes it.
#[derive(Debug)]
#[must_use = "there is no second proof"]
pub(super) struct GateClosed(());

/// A copy, or somebody else for a moment, holds the gate's lock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Busy;

/// Why a writer was not let in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NotAttached {
    Closed,
    /// There is a writer.
    Taken,
}

impl Gate {
    /// An open gate without a writer.
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(State::Open { attached: false }),
            closing: AtomicBool::new(false),
        }
    }

    /// Lets in the one writer.
    pub(super) fn attach(&self) -> Result<(), NotAttached> {
        let mut state = self.lock();
        match *state {
            State::Closed => Err(NotAttached::Closed),
            State::Open { attached: true } => Err(NotAttached::Taken),
            State::Open { attached: false } => {
                *state = State::Open { attached: true };
                Ok(())
            }
        }
    }

    /// Runs `copy` under the lock. `None`, and no copy, where the gate is closed or somebody is
    /// about to close it.
    // S1, S7: no copy without an open grant, and none is under way when it closes.
    pub(super) fn while_open<T>(&self, copy: impl FnOnce() -> T) -> Option<T> {
        // Relaxed: whoever sees it does nothing, and whoever does not see it yet takes the lock,
        // under which `state` decides. So no order hangs on it, only how soon we stop.
        if self.closing.load(Ordering::Relaxed) {
            return None;
        }
        let state = self.lock();
        if *state == State::Closed {
            return None;
        }
        let copied = copy();
        // After the copy. Unlocking releases it to whoever locks next, the closer among them.
        drop(state);
        Some(copied)
    }

    /// Closes the gate, after the copy that is under way. `None` where it is closed already.
    pub(super) fn close(&self) -> Option<GateClosed> {
        self.announce();
        Self::close_locked(self.lock())
    }

    /// As [`Gate::close`], but never waits. Whoever gets [`Busy`] has to call `close`: no more
    /// copies begin as soon as the copier sees that it should stop.
    pub(super) fn try_close(&self) -> Result<Option<GateClosed>, Busy> {
        self.announce();
        match self.state.try_lock() {
            Ok(state) => Ok(Self::close_locked(state)),
            Err(TryLockError::Poisoned(poison)) => Ok(Self::close_locked(poison.into_inner())),
            Err(TryLockError::WouldBlock) => Err(Busy),
        }
    }

    fn announce(&self) {
        // Relaxed: it publishes nothing. It is set before the lock is asked for, since that is what
        // it is for; the proof does not depend on that.
        self.closing.store(true, Ordering::Relaxed);
    }

    fn close_locked(mut state: MutexGuard<'_, State>) -> Option<GateClosed> {
        if *state == State::Closed {
            return None;
        }
        // S1: every copy is made with `state` locked and open. We hold the lock, so none is under
        // way; it is closed for good, so none can begin.
        *state = State::Closed;
        Some(GateClosed(()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Poison says only that a copy panicked: each change of the state is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
