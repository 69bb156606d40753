//! The daemon of Fabric, as a library: one for each host; owns slots, links and transfers.
//!
//! This is the shell around the machine of `fabric-proto`, which decides everything. Here is what
//! touches the world:
//!
//! - [`config`], [`store`]: what the operator says, and what survives the process;
//! - `session`: engines, over a Unix socket; `link`: peers, over QUIC;
//! - [`plane`]: what moves pages, and proves that it does so no more;
//! - `driver`: the one task that calls the machine, and does what it says;
//! - `metrics`, `admin`: what people see;
//! - [`Daemon`], [`run`]: all of it together.
#![deny(unsafe_code)]

#[cfg(fabric_planted)]
compile_error!("a daemon is never built with planted bugs: they are for `fabric-sim`");

pub mod config;
pub mod plane;
pub mod store;

mod admin;
mod clock;
mod daemon;
mod driver;
mod link;
mod metrics;
mod planes;
mod queued_bytes;
mod registry;
mod scrub;
mod session;
mod sync;

pub use config::Config;
pub use daemon::{Daemon, RunError, StartError, Stopped, run};
pub use link::{BindError, TlsError};
pub use planes::PlaneStartError;
pub use session::ListenError;
