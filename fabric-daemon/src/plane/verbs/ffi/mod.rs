//! The verbs API, with owners that are safe to use. The only unsafe code of the plane.
//!
//! Underneath is one crate, `rdma-mummy-sys`: the bindings of `rdma-sys`, continued by its authors,
//! over a shim that looks for libibverbs when the process starts. So one binary serves hosts with
//! and without RDMA; `ibverbs` and `rdma-sys` link the library, without which their binary does not
//! start at all. `ibverbs` also wraps neither memory windows nor invalidation.
//!
//! Owners hold their parents, so nothing is destroyed before what depends on it. Each handle may be
//! used from any thread. M: libibverbs is thread-safe as a whole, ibverbs(7).
//!
//! Whatever a caller here posts, no Rust value is at risk: work requests name memory by key, the
//! device accepts keys of registered regions only, and a region is registered from a mapping that
//! it keeps alive, whose bytes nobody holds a reference to (see [`fabric_ipc::Mapping`]).
#![expect(unsafe_code, reason = "libibverbs is C")]

mod chain;
mod completion;
mod device;
mod memory;
mod queue_pair;

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

pub(super) use chain::{Local, Remote, SendChain, Signal};
pub(super) use completion::{
    CompletionChannel, CompletionQueue, Completions, Opcode, Status, WorkCompletion,
};
pub(super) use device::{
    AsyncEvent, Context, Gid, GidEntry, GidKind, Limits, ProtectionDomain, device_names,
};
pub(super) use memory::{Access, MemoryRegion, MemoryWindow, RKey};
pub(super) use queue_pair::{Capacity, QueuePair, Route};

/// When an object was made, among those of this process.
///
/// The kernel destroys what a process leaves behind in the opposite order. A window must go before
/// the queue pair that it is bound on: soft-RoCE waits 50 s for it to, keeping the process from
/// ending, and then frees the queue pair all the same, which has crashed a host (measured on Linux
/// 6.1). So a window is bound on queue pairs that are older than it.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Made(u64);

impl Made {
    fn now() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: who makes two objects in turn sees the numbers in turn.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A call of libibverbs that failed.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("{call}: {}", io::Error::from_raw_os_error(*.code))]
pub(super) struct VerbsError {
    /// Its name.
    pub(super) call: &'static str,
    /// Its errno.
    pub(super) code: i32,
}

impl VerbsError {
    /// From errno, just after the call.
    fn last(call: &'static str) -> Self {
        let code = io::Error::last_os_error().raw_os_error();
        Self {
            call,
            code: code.unwrap_or(0),
        }
    }
}

/// For calls that return an errno. Some return -1 and set it instead.
fn check(call: &'static str, code: i32) -> Result<(), VerbsError> {
    match code {
        0 => Ok(()),
        -1 => Err(VerbsError::last(call)),
        code => Err(VerbsError {
            call,
            code: code.abs(),
        }),
    }
}

/// For calls that return a pointer, and set errno with a null one.
fn check_pointer<T>(call: &'static str, pointer: *mut T) -> Result<*mut T, VerbsError> {
    if pointer.is_null() {
        return Err(VerbsError::last(call));
    }
    Ok(pointer)
}

/// For the drops: what cannot be destroyed is leaked, and said.
fn log_failure(result: Result<(), VerbsError>) {
    if let Err(error) = result {
        tracing::error!("destroy a verbs object: {error}");
    }
}

/// M: errno(3). The kernel has no RDMA stack at all.
const ENOSYS: i32 = 38;

/// M: errno(3). The library is not installed: the shim's answer.
const EOPNOTSUPP: i32 = 95;
