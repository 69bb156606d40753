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
//! Every queue has a bound. When the daemon does not take what the engine says for so long that
//! 8 MiB are queued, calls that say more wait: [`Sending::seal`], [`Pool::receive`] and the like.
//! What cannot wait, the ends of leases and transfers that a `Drop` says, is queued all the same;
//! it is bounded by the leases that a process can have. When the session ends, every transfer and
//! delivery under way gets the outcome `Failed(DaemonGone)`, and every call [`LeaseError::Gone`] or
//! its like, at once; [`Session::closed`] tells why. Memory stays mapped while a lease of it lives.
//!
//! A daemon that breaks the protocol is not trusted any further: the session ends with
//! [`Closed::Misbehaved`], and nothing here panics or aborts the engine's process for it.
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

mod checksum;
mod closed;
mod lease;
mod outbox;
#[expect(
    unsafe_code,
    reason = "a lease's pages are slices of memory that the daemon maps too"
)]
mod pages;
mod pool;
mod receive;
mod send;
mod session;
mod shared;

pub use closed::{Closed, Misbehaviour};
pub use lease::{HeldLease, LeaseRequest};
pub use pool::{LeaseError, Pool};
pub use receive::{Aborter, Delivered, DeliveryStats, ReceiveLease, Undelivered};
pub use send::{SealError, SendRefusal, SendRefused, Sending};
pub use session::{ConnectError, RegisterError, Session};

pub use fabric_proto as proto;
