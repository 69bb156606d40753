//! What hand-written protocols between threads are made of.
//!
//! Such a protocol is a small type in a file of its own, which names nothing but `core` and this
//! module. `tests/loom` compiles the same file beside a `sync` of its own, with loom's types under
//! the same names: what it checks is what ships, and no build flag is needed for either.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
