//! The plane for RDMA: the source's device writes into the destination's slots, through keys that
//! the destination's device takes back.
//!
//! ```text
//!   source                                             destination
//!   Worker ── writes, chained ──▶ lane ═══════════════▶ slots, through memory windows
//!     │                            │                      ▲
//!     │    SEND_WITH_INV ──────────┴─▶ window is void ────┘   the drain is the invalidation
//!     └── reach: lane, keys ◀── stream on the link ── Worker   the fence destroys the lane
//! ```
//!
//! A grant is written through several lanes where there are several ports, one leg each (striping),
//! and a leg whose lane breaks goes on through another (failover): see `inbound`.
//!
//! In pull mode the direction is turned round, for destinations that let nobody write: the source
//! binds windows to pages that are sealed, and the destination reads through them. Such a grant has
//! one lane: there is no striping and no failover. See `pull_inbound`.
//!
//! ```text
//!   source                                             destination
//!   pages, through memory windows ◀════════ lane ═════ Worker ── reads, chained
//!     ▲                                      │           ▲  │
//!     └─ window is void ◀── SEND_WITH_INV ───┴───────────│──┘  when its bytes have arrived
//!   Worker ── exposed: windows, pages ──▶ stream ────────┘
//! ```
//!
//! - [`ffi`]: the verbs API with safe owners.
//! - `regions`: pools, as the devices know them; `numa`: which ports are near which.
//! - `rails`: ports; `probe`: what a port must prove before it is used; `lanes`: queue pairs;
//!   `extents`: which memory a grant is.
//! - `inbound` and `outbound`: a grant at its destination, a writer at its source; `pull_inbound`
//!   and `pull_outbound`: what they do where the destination reads.
//! - `worker`: the one thread that owns it all.
//! - `peers`, `link`, `codec`: what planes tell each other.
//!
//! What the hardware adds, and what is not left to it. A device that keeps to the specification
//! confines a writer to the bytes of its windows, and after an invalidation refuses it whatever it
//! posts (S1, S7). Soft-RoCE checks a window's key, state and queue pair, but not its bounds: it
//! takes a write past the end as long as the region goes on (measured). And it checks them one
//! after the other without the window's lock, so a key of before, used in the very moment in which
//! the window is bound again for the same lane, can pass as its successor (seen, with a peer that
//! lies): the peer then has what it is about to be granted, and no more. So nothing here relies on
//! bounds alone: an honest writer looks every page up in what it was granted, every page is
//! verified after the grant is closed (S2), and a writer that strays through a window of its own
//! breaks another lease's checksum at worst, which is then found, never read.

mod codec;
#[cfg(test)]
mod cost;
mod extents;
pub(super) mod ffi;
mod inbound;
mod lanes;
mod link;
mod numa;
mod outbound;
mod peers;
mod probe;
mod pull_inbound;
mod pull_outbound;
mod rails;
mod regions;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use fabric_proto::host::{Input, PlaneCommand};
use fabric_proto::ids::{LinkId, PoolId};
use fabric_proto::wire::PlaneKind;
use quinn::Connection;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;
use tracing::info;

use self::codec::RailAddress;
use self::ffi::{MemoryRegion, SendChain};
use self::lanes::Lanes;
use self::peers::PeerKey;
use self::rails::Rail;
use self::regions::{Regions, Registrar};
use self::worker::{Counts, Inbox, Order, Worker};
use super::faults::Faults;
use super::outbox::Outbox;
use super::pools::{PoolRefused, Pools};
use super::{Opener, Plane, PlaneProofs, VerbsMode as Mode, VerbsSettings};

pub(super) use self::lanes::Revoked;
pub(crate) use self::link::Introduced;

/// The plane for RDMA.
#[derive(Debug)]
pub struct VerbsPlane {
    inbox: Arc<Inbox>,
    registrar: Registrar,
    counts: Arc<Counts>,
    addresses: Vec<RailAddress>,
    next_peer: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

/// Why the plane cannot start.
#[derive(Debug, Error)]
pub enum VerbsStartError {
    /// There are ports, but none that does what a mode rests on. Each failure: the port, the mode,
    /// what was tried, and what the device did.
    #[error("no RDMA port is fit for a mode of verbs.modes: {}", .0.join("; "))]
    NoMode(Vec<String>),
    /// There is no port to use.
    #[error("no RDMA device has an active port{}", hint(.0))]
    NoRail(Vec<String>),
    /// The operating system gives no thread or descriptor.
    #[error("start the verbs thread: {0}")]
    Thread(#[source] io::Error),
    /// A device refuses a call of libibverbs.
    #[error("{call}: {error}")]
    Verbs {
        /// Which.
        call: &'static str,
        /// Why.
        error: io::Error,
    },
}

fn hint(devices: &[String]) -> String {
    if devices.is_empty() {
        return String::new();
    }
    format!(" (verbs.devices allows {devices:?})")
}

/// The ports to use. What they have not proven is taken out of the settings.
fn ports(settings: &mut VerbsSettings) -> Result<Vec<Rail>, VerbsStartError> {
    let rails = rails::discover(&settings.devices);
    let rails = rails.map_err(|error| VerbsStartError::Verbs {
        call: error.call,
        error: io::Error::from_raw_os_error(error.code),
    })?;
    if rails.is_empty() {
        return Err(VerbsStartError::NoRail(settings.devices.clone()));
    }
    let proven = probe::prove(rails, &settings.modes);
    if proven.rails.is_empty() {
        return Err(VerbsStartError::NoMode(proven.refused));
    }
    settings.modes = proven.modes;
    for rail in &proven.rails {
        let (port, gid, numa_node) = (rail.port, rail.gid.index, rail.numa_node);
        let device_memory = MemoryRegion::device_memory(&rail.domain);
        let modes = &settings.modes;
        info!(
            device = rail.device(),
            port,
            gid,
            ?numa_node,
            ?modes,
            device_memory,
            "RDMA port"
        );
    }
    Ok(proven.rails)
}

impl VerbsPlane {
    /// A plane over the devices of this host, whose answers come on the current runtime.
    ///
    /// # Errors
    ///
    /// [`VerbsStartError`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(
        pools: Arc<Pools>,
        events: Sender<Input<PlaneProofs>>,
        mut settings: VerbsSettings,
        outstanding_bytes_max: u64,
        faults: Arc<Faults>,
    ) -> Result<Self, VerbsStartError> {
        let rails = ports(&mut settings)?;
        let worker = Self::worker(
            rails,
            pools,
            events,
            settings,
            outstanding_bytes_max,
            faults,
        )?;
        let registrar = Registrar::new(&worker);
        let (inbox, counts) = (Arc::clone(&worker.inbox), Arc::clone(&worker.counts));
        let addresses = worker.addresses.clone();
        let thread = thread::Builder::new()
            .name("verbs".into())
            .spawn(move || worker.run())
            .map_err(VerbsStartError::Thread)?;
        Ok(Self {
            inbox,
            registrar,
            counts,
            addresses,
            next_peer: AtomicU64::new(0),
            thread: Some(thread),
        })
    }

    /// What its thread is to own.
    fn worker(
        rails: Vec<Rail>,
        pools: Arc<Pools>,
        events: Sender<Input<PlaneProofs>>,
        settings: VerbsSettings,
        outstanding_bytes_max: u64,
        faults: Arc<Faults>,
    ) -> Result<Worker, VerbsStartError> {
        let addresses = rails.iter().map(|rail| rail.address).collect();
        let inbox = Inbox::new().map_err(|error| VerbsStartError::Thread(error.into()))?;
        Ok(Worker {
            inbox,
            runtime: Handle::current(),
            outbox: Outbox::new(&Handle::current(), events),
            pools,
            faults,
            settings,
            outstanding_bytes_max,
            counts: Arc::default(),
            grants: BTreeMap::new(),
            exposers: BTreeMap::new(),
            lanes: Lanes::default(),
            rails,
            regions: Regions::default(),
            addresses,
            peers: BTreeMap::new(),
            links: HashMap::new(),
            writers: BTreeMap::new(),
            awaiting: BTreeMap::new(),
            chain: SendChain::new(),
            room: None,
            due_offers: Vec::new(),
            say_landed_at: None,
            looked_for_late: Instant::now(),
            looked_for_events: Instant::now(),
            refused: 0,
            failovers: 0,
        })
    }

    /// Introduces the plane to that of the other end of a connection. `None`: both ends know that
    /// it cannot be used between them.
    pub(crate) async fn introduce(
        &self,
        connection: &Connection,
        opener: Opener,
    ) -> Result<Option<Introduced>, String> {
        // Relaxed: a number of its own.
        let peer = PeerKey(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let rails = self.addresses.clone();
        let introduced = link::introduce(&self.inbox, peer, rails, connection, opener).await;
        introduced.map_err(|error| error.to_string())
    }

    /// Hears which link a peer that was introduced is at the other end of.
    pub(crate) fn link_up(&self, link: LinkId, mut introduced: Introduced) {
        introduced.attached = true;
        let peer = introduced.peer;
        self.inbox.push(Order::Attach { peer, link });
    }

    /// Peers and writers that were refused.
    #[must_use]
    pub fn peers_refused(&self) -> u64 {
        // Relaxed: a statistic.
        self.counts.refused.load(Ordering::Relaxed)
    }

    /// Times that a part of a grant here lost its lane and went on through another.
    #[must_use]
    pub fn failovers(&self) -> u64 {
        // Relaxed: a statistic.
        self.counts.failovers.load(Ordering::Relaxed)
    }

    /// Queue pairs, memory regions and memory windows that there are.
    #[must_use]
    pub fn objects(&self) -> [(&'static str, u64); 3] {
        // Relaxed: statistics.
        let counts = &self.counts;
        [
            ("queue_pair", counts.queue_pairs.load(Ordering::Relaxed)),
            ("memory_region", counts.regions.load(Ordering::Relaxed)),
            ("memory_window", counts.windows.load(Ordering::Relaxed)),
        ]
    }
}

impl Plane for VerbsPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Verbs
    }

    fn submit(&self, command: PlaneCommand) {
        self.inbox.push(Order::Command(command));
    }

    fn pool_here(&self, pool: PoolId) -> Result<(), PoolRefused> {
        self.registrar.register(pool)
    }

    fn pool_gone(&self, pool: PoolId) {
        self.inbox.push(Order::PoolGone(pool));
    }

    fn link_down(&self, link: LinkId) {
        self.inbox.push(Order::LinkDown(link));
    }
}

impl Drop for VerbsPlane {
    fn drop(&mut self) {
        self.inbox.push(Order::Stop);
        if let Some(thread) = self.thread.take() {
            // It never waits for anybody, so this is short; a panic of it has ended the process.
            let _ended = thread.join();
        }
    }
}

/// A message to see whether a lane carries anything.
const PROBE: u32 = 0;

/// A message that says that the writer is alive.
const PROGRESS: u32 = 1;

/// The drain of a grant without windows.
const DRAIN: u32 = 2;

/// Why there is no way on from there: a device that can not destroy what it made may still write.
const MUST_END: &str = "a fence must end in proof, or the daemon must";
