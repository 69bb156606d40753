//! The SDK of Fabric: what an inference engine links.
//!
//! ```text
//!  Session ─register_pool─▶ Pool ─┬─receive─▶ ReceiveLease ─delivered─▶ Delivered (pages to read)
//!                                 │                            └──────▶ Undelivered (an outcome)
//!                                 └─hold────▶ HeldLease ─send─▶ Sending ─seal…, finish─▶ Outcome
//! ```
//!
//! - [`Session`]: the connection to the local daemon. Cheap to clone; safe to use from many tasks.
//! - [`Pool`]: memory that this process and the daemon both map, in slots of pages.
//! - [`ReceiveLease`], [`Delivered`]: the decode side. Bytes that came from elsewhere are reached
//!   through `Delivered` alone, and that exists only after every page was verified here (S2, S3).
//! - [`HeldLease`], [`Sending`]: the prefill side. A page is filled, sealed, and then left alone
//!   until the outcome.
//!
//! Every queue has a bound. When the daemon does not take what the engine says for so long that the
//! outgoing queue is full, [`Sending::seal`] and the like wait; what cannot wait, a `Drop`, closes
//! the session instead, which makes the daemon end everything that the session held. When the
//! session ends, for that or any other reason, every transfer gets the outcome
//! `Failed(DaemonGone)` and every call [`LeaseError::Gone`] or its like, at once.
//!
//! Bytes from elsewhere cannot be reached before their verification:
//!
//! ```compile_fail,E0599
//! # fn read(lease: fabric_client::ReceiveLease) {
//! lease.page(0, 0); // Only `Delivered` has pages.
//! # }
//! ```
//!
//! nor through an outcome that was made up:
//!
//! ```compile_fail,E0451
//! # fn forge(lease: std::sync::Arc<()>) {
//! let forged = fabric_client::Delivered { lease: todo!() }; // Private fields.
//! # }
//! ```
//!
//! nor after the lease has ended:
//!
//! ```compile_fail,E0382
//! # fn late(delivered: fabric_client::Delivered) {
//! delivered.end();
//! delivered.page(0, 0);
//! # }
//! ```
#![deny(unsafe_code)]

mod lease;
#[expect(
    unsafe_code,
    reason = "a lease's pages are slices of memory that the daemon maps too"
)]
mod pages;
mod pool;
mod receive;
mod send;
mod session;

pub use lease::{HeldLease, LeaseRequest};
pub use pool::{LeaseError, Pool};
pub use receive::{Delivered, DeliveryStats, ReceiveLease, Undelivered};
pub use send::{SealError, SendRefusal, SendRefused, Sending};
pub use session::{ConnectError, RegisterError, Session};

pub use fabric_proto as proto;
