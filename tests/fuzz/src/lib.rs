//! Fuzz targets: functions that take any bytes, and panic on a finding.
//!
//! - [`to_daemon`], [`to_engine`], [`peer_message`], [`offer`]: the decoders of `fabric-proto`.
//!   Any bytes give a value or an error, at a cost that the bytes pay for; what is decoded is
//!   within the protocol's bounds, and encodes to something that decodes to the same.
//! - [`frames`]: the frames of `fabric-ipc`, on a real socket, beside a parser of ten lines.
//! - [`host`]: the bytes are a list of operations, honest and not, on one production machine
//!   beside a naive model of who holds which slot.
//!
//! The script `fuzz` runs one under libFuzzer; `tests/replay.rs` runs what was found to be worth
//! keeping (`corpus/`) with every `cargo test`.

#![forbid(unsafe_code)]

mod bounds;
mod frames;
mod host;
mod memory;
mod wire;

pub use frames::frames;
pub use host::host;
pub use wire::{offer, peer_message, to_daemon, to_engine};

/// A target: panics on a finding.
pub type Target = fn(&[u8]);

/// Every target, under the name of its program and of its corpus.
pub const TARGETS: [(&str, Target); 6] = [
    ("frames", frames),
    ("host", host),
    ("offer", offer),
    ("peer_message", peer_message),
    ("to_daemon", to_daemon),
    ("to_engine", to_engine),
];
