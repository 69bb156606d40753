//! Two machines, their planes and the links between them, in virtual time: a few lines a scenario.
//!
//! [`World`] does what the daemons' shells do, and keeps what a shell cannot: every message waits
//! in a queue that a scenario may hold back, and the planes answer only when they are told to.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a test looks for one variant of many"
)]

mod chaos;
mod guards;
mod guards_source;
mod scenarios;
mod table;
mod world;
