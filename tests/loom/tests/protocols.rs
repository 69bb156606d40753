//! The daemon's hand-written protocols between threads, in every order, under loom.
//!
//! What is checked is the shipped source: its files are included here by path, beside a `sync` that
//! gives loom's types where the daemon's gives std's. So neither side needs a build flag (loom's
//! usual one would also change tokio, which then does not build), nothing of the daemon but these
//! files is compiled, and no crate of its own is needed for a hundred lines.
//!
//! loom runs a closure once for each order of its threads' steps and each value that an atomic may
//! show by the C11 rules, but for values that are stored only later. That somebody gets in at last
//! is not checked: only what holds whenever somebody does.
//!
//! Each protocol is also checked in wrong variants, which must be caught: else the test is blind.

#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    reason = "a test, and helpers of tests are not recognised as such"
)]

use std::collections::VecDeque;

use loom::sync::Arc;
use loom::thread;

use gate::{Busy, Gate, NotAttached};
use queued_bytes::QueuedBytes;
use sync::{AtomicBool, AtomicUsize, Mutex, Ordering};

#[path = "../../../fabric-daemon/src/plane/gate.rs"]
mod gate;
#[path = "../../../fabric-daemon/src/queued_bytes.rs"]
mod queued_bytes;

/// The twin of the daemon's `sync`.
mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use std::sync::{PoisonError, TryLockError};
}

// The gate: a copy into a grant's slots against the closing of that grant.

/// What the gate does, and wrong gates do wrong.
trait Gates: Send + Sync + 'static {
    fn new() -> Self;
    /// Whether it was made.
    fn copy(&self, copy: impl FnOnce()) -> bool;
    /// Whether this call has the proof.
    fn close(&self) -> bool;
    /// As the machine's fence does: without waiting, or else from a thread that may.
    fn fence(&self) -> bool;
}

impl Gates for Gate {
    fn new() -> Self {
        Self::new()
    }

    fn copy(&self, copy: impl FnOnce()) -> bool {
        self.while_open(copy).is_some()
    }

    fn close(&self) -> bool {
        self.close().is_some()
    }

    fn fence(&self) -> bool {
        match self.try_close() {
            Ok(proof) => proof.is_some(),
            Err(Busy) => self.close().is_some(),
        }
    }
}

/// Two bytes of a slot. Relaxed: the slot's memory orders nothing, and is not asked to.
struct Slot([AtomicUsize; 2]);

/// What the slot's next owner writes.
const NEXT: usize = 100;

impl Slot {
    fn write(&self, value: usize) {
        // One after the other, so that a copy can be met half made.
        for byte in &self.0 {
            byte.store(value, Ordering::Relaxed);
        }
    }

    fn read(&self) -> [usize; 2] {
        [0, 1].map(|at: usize| self.0[at].load(Ordering::Relaxed))
    }
}

/// A writer copies 1, 2, … into a slot and drains, while the machine fences. Whoever has the proof
/// gives the slot to its next owner.
fn write_against_close<G: Gates>(copies: usize) {
    loom::model(move || {
        let gate = Arc::new(G::new());
        let slot = Arc::new(Slot([AtomicUsize::new(0), AtomicUsize::new(0)]));
        // With the proof: what the copies have left in the slot.
        let reuse = |slot: &Slot| {
            let left = slot.read();
            slot.write(NEXT);
            left
        };
        let writer = {
            let (gate, slot) = (Arc::clone(&gate), Arc::clone(&slot));
            thread::spawn(move || {
                let made = (1..=copies)
                    .take_while(|value| gate.copy(|| slot.write(*value)))
                    .count();
                (made, gate.close().then(|| reuse(&slot)))
            })
        };
        let by_fence = gate.fence().then(|| reuse(&slot));
        let (made, by_drain) = writer.join().unwrap();

        let proofs: Vec<_> = [by_fence, by_drain].into_iter().flatten().collect();
        assert_eq!(proofs.len(), 1, "a grant has one proof");
        // S1: nothing comes after the proof, and the proof comes after all that was copied.
        assert_eq!(slot.read(), [NEXT; 2], "a write landed after the proof");
        assert_eq!(proofs, [[made; 2]], "the proof shows every copy whole");
    });
}

// S1
#[test]
fn no_write_is_in_its_copy_after_the_proof() {
    write_against_close::<Gate>(3);
}

// S1
#[test]
fn of_all_who_close_a_gate_one_has_the_proof() {
    loom::model(|| {
        let gate = Arc::new(Gate::new());
        let others = [(); 2].map(|()| {
            let gate = Arc::clone(&gate);
            thread::spawn(move || Gates::close(&*gate))
        });
        let here = gate.fence();
        let others = others.map(|other| other.join().unwrap());
        let proofs = others.into_iter().chain([here]).filter(|proof| *proof);
        assert_eq!(proofs.count(), 1, "a grant has one proof");
    });
}

// S7
#[test]
fn a_gate_lets_in_one_writer_and_none_once_it_is_closed() {
    loom::model(|| {
        let gate = Arc::new(Gate::new());
        let others = [(); 2].map(|()| {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.attach())
        });
        assert!(gate.close().is_some());
        assert_eq!(gate.attach(), Err(NotAttached::Closed));
        let others = others.map(|other| other.join().unwrap());
        let attached = others.iter().filter(|other| other.is_ok()).count();
        assert!(attached <= 1, "two writers: {others:?}");
        let taken = others.contains(&Err(NotAttached::Taken));
        assert!(!taken || attached == 1, "taken by nobody: {others:?}");
    });
}

/// Wrong: the hint decides, whatever its ordering.
struct HintAlone(AtomicBool);

impl Gates for HintAlone {
    fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    fn copy(&self, copy: impl FnOnce()) -> bool {
        let open = !self.0.load(Ordering::SeqCst);
        if open {
            copy();
        }
        open
    }

    fn close(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }

    fn fence(&self) -> bool {
        self.close()
    }
}

#[test]
#[should_panic(expected = "the proof shows every copy whole")]
fn a_gate_without_its_lock_is_caught() {
    write_against_close::<HintAlone>(1);
}

/// Wrong: the lock is given back before the copy.
struct CheckThenCopy(Mutex<bool>);

impl Gates for CheckThenCopy {
    fn new() -> Self {
        Self(Mutex::new(false))
    }

    fn copy(&self, copy: impl FnOnce()) -> bool {
        let open = !*self.0.lock().unwrap();
        if open {
            copy();
        }
        open
    }

    fn close(&self) -> bool {
        !std::mem::replace(&mut *self.0.lock().unwrap(), true)
    }

    fn fence(&self) -> bool {
        self.close()
    }
}

#[test]
#[should_panic(expected = "a write landed after the proof")]
fn a_gate_that_is_unlocked_before_the_copy_is_caught() {
    write_against_close::<CheckThenCopy>(1);
}

/// For one copy: the fence closes only once the copy says that it is over. Wrong where that is said
/// with `Relaxed`: every thread does the right things in the right order, and bytes land late.
struct CopyOver<const RELAXED: bool> {
    over: AtomicBool,
    closed: AtomicBool,
}

impl<const RELAXED: bool> Gates for CopyOver<RELAXED> {
    fn new() -> Self {
        Self {
            over: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn copy(&self, copy: impl FnOnce()) -> bool {
        copy();
        let release = if RELAXED {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        self.over.store(true, release);
        true
    }

    fn close(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }

    fn fence(&self) -> bool {
        self.over.load(Ordering::Acquire) && self.close()
    }
}

#[test]
fn a_copy_that_releases_its_bytes_is_seen() {
    write_against_close::<CopyOver<false>>(1);
}

#[test]
#[should_panic(expected = "a write landed after the proof")]
fn a_copy_that_does_not_release_its_bytes_is_caught() {
    write_against_close::<CopyOver<true>>(1);
}

// The bytes that wait in a connection's queue.

/// What the count does, and wrong counts do wrong.
trait Counts: Send + Sync + 'static {
    fn new() -> Self;
    fn queue<T>(&self, bytes: usize, queue: impl FnOnce(usize) -> T) -> T;
    fn taken(&self, bytes: usize);
}

impl Counts for QueuedBytes {
    fn new() -> Self {
        Self::new()
    }

    fn queue<T>(&self, bytes: usize, queue: impl FnOnce(usize) -> T) -> T {
        self.queue(bytes, queue)
    }

    fn taken(&self, bytes: usize) {
        self.taken(bytes);
    }
}

/// The driver queues messages of 3, 2 and 1 bytes, at most 5 at a time, until one is refused; the
/// connection takes what there is, three times.
fn queue_against_take<C: Counts>() {
    const BYTES_MAX: usize = 5;
    loom::model(|| {
        let count = Arc::new(C::new());
        let messages = Arc::new(Mutex::new(VecDeque::new()));
        let connection = {
            let (count, messages) = (Arc::clone(&count), Arc::clone(&messages));
            thread::spawn(move || {
                for _ in 0..3 {
                    let message = messages.lock().unwrap().pop_front();
                    if let Some(bytes) = message {
                        count.taken(bytes);
                    }
                }
            })
        };
        let mut refused = 0;
        for bytes in [3, 2, 1] {
            let sent = count.queue(bytes, |counted| {
                let mut messages = messages.lock().unwrap();
                let waiting = messages.iter().sum::<usize>() + bytes;
                assert!(counted >= waiting, "more bytes wait than are counted");
                let fits = counted <= BYTES_MAX;
                if fits {
                    messages.push_back(bytes);
                }
                fits
            });
            if !sent {
                refused = bytes;
                break;
            }
        }
        connection.join().unwrap();
        for bytes in messages.lock().unwrap().drain(..) {
            count.taken(bytes);
        }
        let left = count.queue(0, |counted| counted);
        assert_eq!(
            left, refused,
            "what was queued was taken, and no count is lost"
        );
    });
}

#[test]
fn no_byte_is_queued_uncounted_and_no_count_is_lost() {
    queue_against_take::<QueuedBytes>();
}

/// Wrong: a message is counted once it is in the queue.
struct CountedLate(AtomicUsize);

impl Counts for CountedLate {
    fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    fn queue<T>(&self, bytes: usize, queue: impl FnOnce(usize) -> T) -> T {
        let queued = self.0.load(Ordering::SeqCst) + bytes;
        let done = queue(queued);
        self.0.fetch_add(bytes, Ordering::SeqCst);
        done
    }

    fn taken(&self, bytes: usize) {
        let before = self.0.fetch_sub(bytes, Ordering::SeqCst);
        assert!(before >= bytes, "taken before it was counted");
    }
}

#[test]
#[should_panic(expected = "taken before it was counted")]
fn a_count_that_comes_after_the_message_is_caught() {
    queue_against_take::<CountedLate>();
}

/// Wrong: loads and stores, between which the other end can come.
struct CountedInTwo(AtomicUsize);

impl Counts for CountedInTwo {
    fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    fn queue<T>(&self, bytes: usize, queue: impl FnOnce(usize) -> T) -> T {
        let queued = self.0.load(Ordering::SeqCst) + bytes;
        self.0.store(queued, Ordering::SeqCst);
        queue(queued)
    }

    fn taken(&self, bytes: usize) {
        let before = self.0.load(Ordering::SeqCst);
        self.0.store(before - bytes, Ordering::SeqCst);
    }
}

#[test]
#[should_panic(expected = "no count is lost")]
fn a_count_in_two_steps_is_caught() {
    queue_against_take::<CountedInTwo>();
}
