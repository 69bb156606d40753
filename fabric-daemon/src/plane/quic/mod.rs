//! The plane for any two hosts: one QUIC stream for each grant.
//!
//! Control messages use bidirectional streams, which are the link layer's; every unidirectional
//! stream is this plane's. A writer opens one for each grant, shows the grant's key, sends pages,
//! and ends it: that is the in-band drain. The stream is ordered and whole, so its end says that
//! every write before it has been copied.

mod codec;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric_proto::host::{Input, PlaneCommand};
use fabric_proto::ids::{LinkId, Secret};
use fabric_proto::wire::PlaneKind;
use quinn::{Connection, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt, congestion};
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;
use tokio::task::AbortHandle;
use tracing::debug;

use super::faults::Faults;
use super::grants::{GrantTable, Terms};
use super::outbox::Outbox;
use super::pools::Pools;
use super::registry::Registry;
use super::source::Source;
use super::{Plane, PlaneProofs, lock};
use writer::{Queue, Writer};

/// Bounds of the plane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct QuicLimits {
    /// How long a new stream may take to show its header.
    pub header_wait: Duration,
}

impl Default for QuicLimits {
    fn default() -> Self {
        Self {
            header_wait: Duration::from_secs(5),
        }
    }
}

/// The plane over QUIC streams.
///
/// Calling order: [`QuicPlane::link_up`] before the machine hears of the link, then commands, then
/// [`Plane::link_down`].
#[derive(Debug)]
pub struct QuicPlane {
    shared: Arc<Shared>,
    runtime: Handle,
}

#[derive(Debug)]
struct Shared {
    pools: Arc<Pools>,
    outbox: Arc<Outbox>,
    grants: Arc<GrantTable>,
    limits: QuicLimits,
    faults: Arc<Faults>,
    writers: Arc<Registry<writer::Handle>>,
    links: Mutex<HashMap<LinkId, Link>>,
    refused: AtomicU64,
}

#[derive(Debug)]
struct Link {
    connection: Connection,
    accepting: AbortHandle,
}

impl QuicPlane {
    /// A plane without links, whose tasks run on the current runtime.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    #[must_use]
    pub fn new(
        pools: Arc<Pools>,
        events: Sender<Input<PlaneProofs>>,
        limits: QuicLimits,
        faults: Arc<Faults>,
    ) -> Self {
        let runtime = Handle::current();
        let outbox = Outbox::new(&runtime, events);
        let shared = Arc::new(Shared {
            pools,
            grants: GrantTable::new(&runtime, Arc::clone(&outbox)),
            outbox,
            limits,
            faults,
            writers: Registry::new(),
            links: Mutex::default(),
            refused: AtomicU64::new(0),
        });
        Self { shared, runtime }
    }

    /// Takes over the unidirectional streams of a link's connection.
    pub fn link_up(&self, link: LinkId, connection: Connection) {
        let accept = reader::accept(Arc::clone(&self.shared), link, connection.clone());
        let accepting = self.runtime.spawn(accept).abort_handle();
        let before = lock(&self.shared.links).insert(
            link,
            Link {
                connection,
                accepting,
            },
        );
        assert!(before.is_none(), "a link's id is never used twice");
    }

    /// Streams that were refused: they never showed the key of a grant of theirs.
    #[must_use]
    pub fn streams_refused(&self) -> u64 {
        // Relaxed: a statistic.
        self.shared.refused.load(Ordering::Relaxed)
    }

    fn open_writer(&self, link: LinkId, key: Secret, source: Source) {
        let (transfer, grant) = (source.transfer(), source.grant());
        let connection = lock(&self.shared.links)
            .get(&link)
            .map(|link| link.connection.clone());
        let Some(connection) = connection else {
            debug!(%transfer, %grant, %link, "writer failed: the link is down");
            return source.fail();
        };
        let queue = Arc::new(Queue::new());
        let handle = writer::Handle {
            link,
            queue: Arc::clone(&queue),
        };
        let (registration, before) = self.shared.writers.register(transfer, grant, handle);
        if let Some(before) = before {
            before.queue.stop();
        }
        let writer = Writer {
            _registration: registration,
            source,
            queue,
            connection,
            key,
            faults: Arc::clone(&self.shared.faults),
        };
        self.runtime.spawn(writer.run());
    }
}

impl Plane for QuicPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Quic
    }

    fn submit(&self, command: PlaneCommand) {
        let shared = &self.shared;
        match command {
            PlaneCommand::Arm {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            } => {
                let terms = Terms {
                    grant,
                    link,
                    key,
                    pool,
                    slots,
                    pages,
                };
                shared.grants.arm(&shared.pools, terms);
            }
            PlaneCommand::Fence { grant } => shared.grants.fence(grant),
            PlaneCommand::OpenWriter {
                transfer,
                grant,
                link,
                key,
                pool,
                slots,
            } => {
                let (outbox, pools) = (&shared.outbox, &shared.pools);
                if let Some(source) = Source::open(outbox, pools, transfer, grant, pool, &slots) {
                    self.open_writer(link, key, source);
                }
            }
            PlaneCommand::Write { transfer, run } => {
                shared
                    .writers
                    .tell(transfer, |writer| writer.queue.write(run));
            }
            PlaneCommand::Drain { transfer } => {
                shared.writers.tell(transfer, |writer| writer.queue.drain());
            }
            PlaneCommand::Stop { transfer } => {
                shared.writers.tell(transfer, |writer| writer.queue.stop());
            }
        }
    }

    fn link_down(&self, link: LinkId) {
        if let Some(link) = lock(&self.shared.links).remove(&link) {
            link.accepting.abort();
        }
        self.shared.writers.tell_all(|writer| {
            if writer.link == link {
                writer.queue.stop();
            }
        });
    }
}

/// The error codes of streams. For logs: neither side acts on them.
mod code {
    /// The writer was told to stop, inside a run.
    pub(super) const STOPPED: u32 = 1;
    /// The writer failed.
    pub(super) const FAILED: u32 = 2;
    /// The stream did not show the key of a grant of its link, or the grant has a writer.
    pub(super) const REFUSED: u32 = 3;
    /// The stream broke the format, or named a page that its grant does not allow.
    pub(super) const MALFORMED: u32 = 4;
    /// The grant was closed.
    pub(super) const CLOSED: u32 = 5;
}

/// The most bytes that a datagram of ours may carry: for `EndpointConfig::max_udp_payload_size`,
/// without which a peer sends 1472 at most.
///
/// Not the 64 KiB that loopback would take: quinn hands the kernel up to ten datagrams in one call
/// (segmentation offload), and what exceeds 65,507 bytes in all is refused, looks like loss, and
/// then like a path that takes 1200. Measured on loopback, two cores, 16 KiB pages, in GB/s: 1.3
/// with 6,500 and offload; 1.0 to 1.7 with 65,507 and none; 0.6 and 0.35 with 1,472 (an Ethernet's)
/// with and without. So the offload is worth more wherever links are used in earnest: one host has
/// `shm`.
pub const UDP_PAYLOAD_BYTES_MAX: u16 = 6_550;

const _: () = assert!(UDP_PAYLOAD_BYTES_MAX as u32 * 10 <= 65_507);

/// What every link's connection must be configured with, at both ends.
///
/// `outstanding_bytes_max` is the machine's: the most bytes outstanding under one grant. A peer
/// that is silent for `silence_max` is taken for dead; the lesser of both ends counts.
///
/// The UDP socket needs buffers of some 4 MiB beside it: with the kernel's default, bursts overflow
/// them thousands of times a second, and half the speed is lost.
#[must_use]
pub fn transport_config(outstanding_bytes_max: u64, silence_max: Duration) -> TransportConfig {
    let silence_ms = u32::try_from(silence_max.as_millis()).unwrap_or(u32::MAX);
    let outstanding = VarInt::from_u64(outstanding_bytes_max).unwrap_or(VarInt::MAX);
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(UDP_PAYLOAD_BYTES_MAX)
        .black_hole_cooldown(BLACK_HOLE_COOLDOWN);
    let mut cubic = congestion::CubicConfig::default();
    cubic.initial_window(INITIAL_WINDOW_BYTES);
    let mut config = TransportConfig::default();
    config
        // S8: a writer's bytes are outstanding from the time that it read them to the time that the
        // destination has copied them. On their way they are in our send buffer, which this bounds
        // for all grants of the link together ...
        .send_window(outstanding_bytes_max)
        // ... or in the peer's receive buffer, which this bounds for each. So once a drain is asked
        // for, no more than that has to go through.
        .stream_receive_window(outstanding)
        .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(silence_ms))))
        .keep_alive_interval(Some(silence_max / KEEP_ALIVES))
        .max_concurrent_uni_streams(VarInt::from_u32(WRITERS_PER_LINK_MAX))
        .max_concurrent_bidi_streams(VarInt::from_u32(BIDI_STREAMS_MAX))
        .datagram_receive_buffer_size(None)
        .congestion_controller_factory(Arc::new(cubic))
        .mtu_discovery_config(Some(mtu));
    config
}

/// Within the longest silence: three in a row must be lost before a link is.
const KEEP_ALIVES: u32 = 5;

/// Streams of a peer at a time; the transfers beyond wait for their turn.
const WRITERS_PER_LINK_MAX: u32 = 1024;

/// The link layer needs one or two.
const BIDI_STREAMS_MAX: u32 = 16;

/// After some bursts of loss quinn sends small datagrams only; this is when it tries again.
const BLACK_HOLE_COOLDOWN: Duration = Duration::from_secs(5);

/// A few dozen pages before the first acknowledgement, and well within a socket's buffer.
const INITIAL_WINDOW_BYTES: u64 = 256 * 1024;
