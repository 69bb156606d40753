//! What the whole-system tests, the demo and the benchmark share: clusters of real processes on
//! loopback, light engines, faults.
//!
//! - [`cluster`]: daemons and engines as processes, with readiness, logs, signals, metrics.
//! - [`proxy`]: a network between two daemons that can be cut, slowed and made to lie.
//! - [`light`]: an engine without a model: pools of patterns, transfers, checks of every byte.
//! - [`completions`]: a client of the thin engine.
//! - [`child`]: helper processes that are driven over their standard input and output.
//! - [`host`]: other hosts, virtual ones for instance, and processes on them.
//! - [`real_model`]: the real model on one node and on two.
//! - [`world`]: two daemons and two engines, each a process that can be killed.

#![forbid(unsafe_code)]

pub mod child;
pub mod cluster;
pub mod completions;
pub mod host;
pub mod light;
pub mod programs;
pub mod proxy;
pub mod random;
pub mod real_model;
pub mod world;
