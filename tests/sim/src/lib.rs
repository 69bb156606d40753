//! Whole clusters of the production [`Host`](fabric_proto::host::Host), without a process or a
//! clock: what happens next is an [`Event`], and whoever drives the world chooses it.
//!
//! ```text
//!  driver ─ enabled() ─▶ events that could happen now
//!         ─ apply(event) ─▶ a machine handles an input, its outputs change the world
//!                             └─▶ the oracle looks, and notes the first violation
//! ```
//!
//! - [`world`]: daemons, links and what is on its way; what may happen, and what it does;
//! - [`plane`]: an honest data plane whose writes stay in the air for as long as they like;
//! - [`engine`]: what engines do with the SDK, request by request;
//! - [`oracle`]: what must never happen, said about bytes and slots. It shares no code with the
//!   product, and sees only what crosses the machines' boundaries;
//! - [`run`]: a driver that chooses at random; `fabric-model` has one that chooses everything.

#![forbid(unsafe_code)]

pub mod engine;
mod faults;
pub mod lies;
pub mod oracle;
pub mod plane;
pub mod run;
pub mod setup;
pub mod world;

pub use oracle::Violation;
pub use setup::{Budget, Request, Setup};
pub use world::{Event, World};
