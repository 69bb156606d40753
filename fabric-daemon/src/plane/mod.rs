//! Data planes: what moves pages between pools.
//!
//! A plane knows nothing of tenants, leases or policy. It is handed a grant, and returns evidence:
//!
//! ```text
//!            PlaneCommand                                 PlaneCommand
//!  machine ──────────────▶ plane ═══ page writes ═══▶ plane ◀────────────── machine
//!  (source) ◀───────────── writer                     grant table ───────▶ (destination)
//!            Written, WriterFailed, ReadsStopped         Armed, Landed, WritesStopped
//! ```
//!
//! Three rules hold all of it up, and each has one place:
//!
//! 1. `grants`: every byte that a plane puts into a pool is put there under the lock of an open
//!    grant, its `gate`. A grant is closed under that lock, and only then is there a
//!    [`GrantStopped`].
//! 2. `source`: whatever reads a pool to send from it does so through one value that is never
//!    copied. When that value is gone, and only then, there is a [`SourceStopped`].
//!
//! 3. `verbs::lanes`: where the source's device writes by itself, the proof is that the
//!    destination's has taken its rights back.
//!
//! Both proofs are made when a value is dropped at the latest, so a task that fails, panics or is
//! aborted still gives its evidence, and gives it once.

mod area;
mod faults;
mod gate;
mod grants;
mod outbox;
mod pools;
mod quic;
mod registry;
mod shm;
mod source;
#[cfg(test)]
mod testing;
#[cfg_attr(not(feature = "rdma"), path = "no_verbs.rs")]
mod verbs;
mod verbs_settings;

use std::sync::{Mutex, MutexGuard, PoisonError};

use fabric_proto::host::{PlaneCommand, Proofs};
use fabric_proto::ids::{LinkId, PoolId};
use fabric_proto::wire::PlaneKind;

pub use faults::Faults;
pub use grants::GrantStopped;
pub use pools::{Memory, Pool, PoolRefused, Pools};
pub use quic::{QuicLimits, QuicPlane, UDP_PAYLOAD_BYTES_MAX, transport_config};
pub use shm::{ShmError, ShmPlane};
pub use source::SourceStopped;
pub use verbs::{VerbsPlane, VerbsStartError};
pub use verbs_settings::{VerbsMode, VerbsSettings};

pub(crate) use verbs::Introduced;
pub(crate) use verbs_settings::Opener;

/// One way to move pages.
///
/// Results come as inputs of the machine, through the channel given at construction.
pub trait Plane: Send + Sync {
    /// Which plane it is.
    fn kind(&self) -> PlaneKind;

    /// Takes a command. Never blocks and never fails: how much is outstanding is bounded by the
    /// machine, and what went wrong comes back as an input.
    fn submit(&self, command: PlaneCommand);

    /// Hears that a pool is there, before any command names it. Takes the seconds that a device may
    /// need for many gigabytes: for threads that may wait.
    ///
    /// # Errors
    ///
    /// The plane cannot use it, and has said so in the log. What is asked of the plane for that
    /// pool fails.
    fn pool_here(&self, _pool: PoolId) -> Result<(), PoolRefused> {
        Ok(())
    }

    /// Hears that a pool is gone: its memory is to be let go with the last that uses it.
    fn pool_gone(&self, _pool: PoolId) {}

    /// Hears that a link is down: everything that was sent or received on it is over.
    fn link_down(&self, link: LinkId);
}

/// The proofs of every plane here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct PlaneProofs;

impl Proofs for PlaneProofs {
    type WritesStopped = GrantStopped;
    type ReadsStopped = SourceStopped;
}

/// The most bytes that are copied under one hold of a grant's lock: the longest that a fence
/// waits, about 50 µs.
const PIECE_BYTES_MAX: u64 = 256 * 1024;

/// Locks a mutex. Poison says only that another thread panicked; each of the values locked here is
/// whole after every single assignment, so there is nothing to distrust.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
