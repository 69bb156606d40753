//! The protocol of Fabric, as it ships: ids, limits, wire messages, and the machine that a daemon
//! runs.
//!
//! Nothing here does I/O, reads a clock, draws a random number or starts a task: all of that comes
//! in as values, so the same inputs give the same outputs, and what the model checker explores is
//! this crate and not a copy of it. `no_std` makes that a compile error to break.
//!
//! Where to look:
//!
//! - [`ids`], [`limits`], [`time`]: the words, and every bound.
//! - [`outcome`]: how a transfer can end, and why. There is no other way for one to be over (S3).
//! - [`wire`]: total decoders for every message, from engines and from peers.
//! - [`host`]: the one machine. `handle` takes an input, `poll` gives what to do next, `deadline`
//!   says when to call again.
//!
//! ```text
//!  engine ──ToDaemon──▶ ┌──────────────── Host ────────────────┐ ──ToEngine──▶ engine
//!  peer ──PeerMessage─▶ │ pools ─ slots ─┬─ leases (requests)  │ ──PeerMessage─▶ peer
//!  plane ──proofs─────▶ │   (epochs)     ├─ grants (writers)   │ ──PlaneCommand─▶ plane
//!  clock ──Now────────▶ │                └─ pins   (readers)   │ ──deadline─────▶ clock
//!                       └──────────────────────────────────────┘
//! ```
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

#[macro_use]
mod planted;
#[cfg(fabric_planted)]
pub use planted::{Bug, plant};

pub mod host;
pub mod ids;
pub mod limits;
pub mod outcome;
pub mod pool;
pub mod time;
pub mod wire;
