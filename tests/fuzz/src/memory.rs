//! What a parser allocates, held against the bytes that it was given.

use std::alloc::System;

use cap::Cap;

/// Counts every byte that this process allocates from Rust.
#[global_allocator]
static ALLOCATED: Cap<System> = Cap::new(System, usize::MAX);

/// What a parser may allocate for each byte that arrived, all its growing vectors together: a byte
/// of packed integers becomes one integer of 8 bytes, and half a slot ref of 16.
const BYTES_PER_BYTE_MAX: usize = 64;

/// What it may allocate for no byte at all.
const BYTES_MIN: usize = 4 << 10;

/// Runs a parser of `bytes_len` bytes.
///
/// # Panics
///
/// Where it allocates more than a small multiple of what arrived. Threads are not told apart, so
/// nothing else may run meanwhile.
pub(crate) fn paid_for<T>(bytes_len: usize, parse: impl FnOnce() -> T) -> T {
    let before = ALLOCATED.total_allocated();
    let parsed = parse();
    let allocated = ALLOCATED.total_allocated() - before;
    assert!(
        allocated <= BYTES_MIN + bytes_len * BYTES_PER_BYTE_MAX,
        "{allocated} bytes were allocated for {bytes_len} that arrived"
    );
    parsed
}
