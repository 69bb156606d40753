//! Links: authenticated QUIC connections to peer daemons.
//!
//! ```text
//!  dial ────▶ handshake ─▶ hello both ways ─▶ LinkUp ─▶ messages ─▶ LinkDown
//!  accept ──▶    │              │
//!                └──────────────┴─▶ closed with a code and a reason; ConnectFailed if dialled
//! ```
//!
//! 1. TLS proves which node the peer is, by its certificate alone: see [`tls`].
//! 2. Whoever connected opens one bidirectional stream. Each side says hello on it: version,
//!    incarnation, planes, and where it listens on this host, if it is this host.
//! 3. The planes hear of the link, then the machine. From then on each message goes to the machine.
//! 4. However a link ends, the planes hear of it, and then the machine, exactly once.
//!
//! Unidirectional streams belong to the `quic` plane. Two nodes may have several links (they may
//! connect to each other at the same time); each is its own, with its own id.

mod allow;
mod frames;
mod hello;
mod tls;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fabric_proto::host::Input;
use fabric_proto::ids::{Incarnation, LinkId, NodeId};
use fabric_proto::limits::LINKS_MAX;
use fabric_proto::wire::{PeerMessage, PlaneKind};
use quinn::{
    Connection, ConnectionError, Endpoint, EndpointConfig, Incoming, SendStream, TransportConfig,
    VarInt, WriteError,
};
use thiserror::Error;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tracing::{debug, info, warn};

use self::frames::{Reader, ReceiveError};
use self::hello::{HelloError, Introduction};
use crate::driver::Event;
use crate::metrics::Metrics;
use crate::plane::{Introduced, UDP_PAYLOAD_BYTES_MAX, transport_config};
use crate::planes::{PeerPlanes, Planes};
use crate::registry::{Closing, Outgoing, Registry};
use crate::store::{CERTIFICATE_NAME, Identity};

pub(crate) use self::allow::AllowList;
pub(crate) use self::hello::{Own, host_digest};
pub use self::tls::TlsError;

/// The links of a daemon.
#[derive(Debug)]
pub(crate) struct Links {
    own: Own,
    identity: Identity,
    endpoint: Endpoint,
    transport: Arc<TransportConfig>,
    allowed: Arc<AllowList>,
    planes: Arc<Planes>,
    events: mpsc::Sender<Event>,
    metrics: Arc<Metrics>,
    registry: Registry<LinkId, About>,
    /// The latest life of each node that was heard of. As long as the allow-list at most.
    seen: Mutex<BTreeMap<NodeId, Incarnation>>,
    /// Nodes that are being connected to, and the life that would be too early.
    dialing: Mutex<BTreeMap<NodeId, Option<Incarnation>>>,
    handshakes: Arc<Semaphore>,
    permits: Arc<Semaphore>,
    next_link: AtomicU64,
}

/// What a link is, for the admin page.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) node: NodeId,
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    pub(crate) incarnation: Incarnation,
    pub(crate) planes: Vec<PlaneKind>,
    pub(crate) side: Side,
}

/// Who connected.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    /// The peer.
    Accepted,
    /// We.
    Dialled,
}

impl Side {
    pub(crate) const ALL: [Self; 2] = [Self::Accepted, Self::Dialled];

    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Dialled => "dialled",
        }
    }
}

/// A link that the machine is about to hear of.
struct Up {
    link: LinkId,
    about: About,
    connection: Connection,
    reader: Reader,
    stream: SendStream,
    outgoing: Outgoing,
    closing: oneshot::Receiver<Closing>,
    _permit: OwnedSemaphorePermit,
}

impl Links {
    /// Binds the endpoint. Nobody is accepted before [`Links::accept`].
    pub(crate) fn new(
        listen: SocketAddr,
        own: Own,
        identity: Identity,
        allowed: AllowList,
        planes: Arc<Planes>,
        events: mpsc::Sender<Event>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, BindError> {
        let allowed = Arc::new(allowed);
        // The control stream, and then that of the verbs plane: whoever connects opens both.
        let mut accepting = transport_config(own.outstanding_bytes_max, own.silence_max);
        accepting.max_concurrent_bidi_streams(VarInt::from_u32(2));
        let mut transport = transport_config(own.outstanding_bytes_max, own.silence_max);
        transport.max_concurrent_bidi_streams(VarInt::from_u32(0));
        let crypto = tls::server(&identity, Arc::clone(&allowed))?;
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(Arc::new(accepting));
        server.max_incoming(HANDSHAKES_MAX);
        Ok(Arc::new(Self {
            own,
            identity,
            endpoint: bind(listen, server).map_err(|error| BindError::Bind {
                address: listen,
                error,
            })?,
            transport: Arc::new(transport),
            allowed,
            planes,
            events,
            metrics,
            registry: Registry::new(),
            seen: Mutex::default(),
            dialing: Mutex::default(),
            handshakes: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
            permits: Arc::new(Semaphore::new(LINKS_MAX)),
            next_link: AtomicU64::new(LinkId::LOOPBACK.0 + 1),
        }))
    }

    /// Where the endpoint listens.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Sends to a peer, if its link is there. Never waits.
    pub(crate) fn send(&self, link: LinkId, message: &PeerMessage) {
        self.registry.send(link, message.encode());
    }

    /// Ends a link.
    pub(crate) fn close(&self, link: LinkId, why: Closing) {
        self.registry.close(link, why);
    }

    /// The links that there are.
    pub(crate) fn list(&self) -> Vec<(LinkId, About)> {
        self.registry.map(|link, about| (link, about.clone()))
    }

    /// How many links there are.
    pub(crate) fn count(&self) -> usize {
        self.registry.count()
    }

    /// Refuses who connects from now on.
    pub(crate) fn stop_accepting(&self) {
        self.endpoint.set_server_config(None);
    }

    /// Ends all links, after what was sent on them, but within `wait`.
    pub(crate) async fn close_all(&self, wait: Duration) {
        self.registry.close_all(wait).await;
        self.endpoint.close(code(Code::Goodbye), b"shutting down");
        let _late = tokio::time::timeout(wait, self.endpoint.wait_idle()).await;
    }

    /// Ends all links, and waits for nobody.
    pub(crate) fn close_now(&self) {
        self.registry.close_now();
        self.endpoint.close(code(Code::Goodbye), b"gone");
    }

    /// Accepts peers until it is dropped, or the endpoint is closed.
    pub(crate) async fn accept(self: Arc<Self>) {
        while let Some(incoming) = self.endpoint.accept().await {
            let Ok(permit) = Arc::clone(&self.handshakes).try_acquire_owned() else {
                self.metrics.link_refused("limit");
                incoming.refuse();
                continue;
            };
            // When it gets crowded, only who answers at its address gets in.
            let crowded = self.handshakes.available_permits() < HANDSHAKES_MAX / 2;
            if crowded && !incoming.remote_address_validated() {
                if let Err(error) = incoming.retry() {
                    debug!("retry a peer's connection: {error}");
                }
                continue;
            }
            let links = Arc::clone(&self);
            tokio::spawn(async move { links.accepted(incoming, permit).await });
        }
    }

    async fn accepted(&self, incoming: Incoming, permit: OwnedSemaphorePermit) {
        let address = incoming.remote_address();
        let up = async {
            let connection = timely(async { Ok(incoming.await?) }).await?;
            self.introduce(connection, Side::Accepted).await
        };
        let up = up.await;
        drop(permit);
        match up {
            Ok(up) => self.run(up).await,
            Err(error) => {
                warn!(%address, "refused a peer: {error}");
                self.metrics.link_refused(error.label());
            }
        }
    }

    /// Connects to a node, unless that is under way: to a later life of it than `after`, if given.
    /// `LinkUp` or `ConnectFailed` follows.
    pub(crate) fn connect(self: &Arc<Self>, node: NodeId, after: Option<Incarnation>) {
        match lock(&self.dialing).entry(node) {
            // The attempt is for both: whatever suits the less demanding of them.
            Entry::Occupied(mut dialing) => {
                let least = (*dialing.get()).min(after);
                dialing.insert(least);
                return;
            }
            Entry::Vacant(free) => {
                free.insert(after);
            }
        }
        let links = Arc::clone(self);
        tokio::spawn(async move {
            links.metrics.dial_started();
            let dialled = links.dial(node).await;
            // Before the answer: who asks after it gets an attempt, and an answer, of its own.
            lock(&links.dialing).remove(&node);
            match dialled {
                Ok(up) => links.run(up).await,
                Err(error) => {
                    warn!(%node, "connect to a peer: {error}");
                    links.metrics.dial_failed(error.label());
                    let _gone = links.events.send(Input::ConnectFailed { node }).await;
                }
            }
        });
    }

    async fn dial(&self, node: NodeId) -> Result<Up, LinkError> {
        let address = self.allowed.find(node).ok_or(LinkError::NotListed)?.address;
        let crypto = tls::client(&self.identity, node)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::clone(&self.transport));
        let connecting = self
            .endpoint
            .connect_with(config, address, CERTIFICATE_NAME)?;
        let connection = tokio::time::timeout(DIAL_WAIT, connecting).await;
        let connection = connection.map_err(|_| LinkError::Unreachable(DIAL_WAIT))??;
        self.introduce(connection, Side::Dialled).await
    }

    /// Exchanges hellos, and gives the link its id. Whoever is refused is told why.
    async fn introduce(&self, connection: Connection, side: Side) -> Result<Up, LinkError> {
        let introduced = timely(async { Ok(hello::exchange(&self.own, &connection, side).await?) });
        let result = match introduced.await {
            Ok(introduction) => self.acquaint(&connection, introduction, side).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &result {
            connection.close(code(error.code()), error.to_string().as_bytes());
        }
        result
    }

    /// Introduces the planes, where both ends have one that needs it, and registers the link.
    async fn acquaint(
        &self,
        connection: &Connection,
        introduction: Introduction,
        side: Side,
    ) -> Result<Up, LinkError> {
        // A peer that nobody knows gets no queue pairs.
        let node = tls::peer_node(connection).ok_or(LinkError::NotListed)?;
        self.allowed.find(node).ok_or(LinkError::NotListed)?;
        let mut planes = self.own.planes_with(&introduction.peer);
        let mut verbs = None;
        if planes.contains(&PlaneKind::Verbs) {
            let introduced = self.planes.introduce(connection, side).await;
            verbs = introduced.map_err(LinkError::Verbs)?;
            planes.retain(|plane| *plane != PlaneKind::Verbs || verbs.is_some());
        }
        self.register(connection.clone(), introduction, side, (planes, verbs))
    }

    fn register(
        &self,
        connection: Connection,
        introduction: Introduction,
        side: Side,
        (planes, verbs): (Vec<PlaneKind>, Option<Introduced>),
    ) -> Result<Up, LinkError> {
        let node = tls::peer_node(&connection).ok_or(LinkError::NotListed)?;
        let allowed = self.allowed.find(node).ok_or(LinkError::NotListed)?;
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        let permit = permit.map_err(|_| LinkError::Full { limit: LINKS_MAX })?;
        let Introduction {
            reader,
            stream,
            peer,
        } = introduction;
        let about = About {
            node,
            name: allowed.name.clone(),
            address: connection.remote_address(),
            incarnation: peer.incarnation,
            planes,
            side,
        };
        // Held until the link is listed: so an older life cannot slip in behind the check.
        let mut seen = lock(&self.seen);
        let (got, latest) = (peer.incarnation, seen.get(&node).copied());
        // S6: what an earlier life of the peer says is about grants that are gone.
        if let Some(want) = latest.filter(|want| got < *want) {
            return Err(LinkError::Stale { got, want });
        }
        let dialing = lock(&self.dialing).get(&node).copied().flatten();
        if let Some(after) = dialing.filter(|after| side == Side::Dialled && got <= *after) {
            return Err(LinkError::NotRestarted { got, after });
        }
        seen.insert(node, got);
        self.registry.close_where(Closing::Superseded, |other| {
            other.node == node && other.incarnation < got
        });
        // Relaxed: a number of its own; the order of links is that of `seen`'s lock.
        let link = LinkId(self.next_link.fetch_add(1, Ordering::Relaxed));
        let (outgoing, closing) = self.registry.insert(link, about.clone());
        drop(seen);
        let theirs = PeerPlanes {
            shm_path: peer.shm_path,
            verbs,
        };
        self.planes.link_up(link, &about, &connection, theirs);
        Ok(Up {
            link,
            about,
            connection,
            reader,
            stream,
            outgoing,
            closing,
            _permit: permit,
        })
    }

    /// Runs a link from here to its end.
    async fn run(&self, up: Up) {
        let Up {
            link,
            about,
            connection,
            mut reader,
            stream,
            outgoing,
            closing,
            _permit,
        } = up;
        let (node, name) = (about.node, about.name);
        self.metrics.link_opened(about.side);
        let incarnation = about.incarnation;
        let side = about.side.label();
        let planes = about.planes.clone();
        info!(%link, %node, name, %incarnation, ?planes, side, "link up");
        // Errors of this channel: the driver is gone, and there is nobody to tell.
        let _gone = self
            .events
            .send(Input::LinkUp {
                link,
                node,
                incarnation,
                planes,
            })
            .await;

        let mut writing = tokio::spawn(frames::write(stream, outgoing));
        let ended = self.read(link, &mut reader, closing, &mut writing).await;

        self.registry.hang_up(link);
        if matches!(ended, Ended::Closing(Closing::ShuttingDown)) {
            // The verdicts that are queued are worth a moment.
            let _late = tokio::time::timeout(FLUSH_WAIT, &mut writing).await;
        }
        writing.abort();
        connection.close(code(ended.code()), ended.to_string().as_bytes());
        // The planes first: the machine takes what they said of the link before its end.
        self.planes.link_down(link);
        let _gone = self.events.send(Input::LinkDown { link }).await;
        self.metrics.link_closed(ended.label());
        if ended.is_quiet() {
            info!(%link, %node, name, "link down: {ended}");
        } else {
            warn!(%link, %node, name, "link down: {ended}");
        }
        self.registry.remove(link);
    }

    /// Takes messages until there is a reason not to.
    async fn read(
        &self,
        link: LinkId,
        reader: &mut Reader,
        mut closing: oneshot::Receiver<Closing>,
        writing: &mut JoinHandle<Result<(), WriteError>>,
    ) -> Ended {
        loop {
            let message = tokio::select! {
                biased;
                Ok(why) = &mut closing => return Ended::Closing(why),
                message = reader.next() => message,
                written = &mut *writing => return match written {
                    Ok(Err(error)) => Ended::Write(error),
                    Ok(Ok(())) | Err(_) => Ended::Left,
                },
            };
            let message = match message {
                Ok(Some(message)) => message,
                Ok(None) => return Ended::Left,
                Err(error) => return Ended::Receive(error),
            };
            if self
                .events
                .send(Input::Peer { link, message })
                .await
                .is_err()
            {
                return Ended::Closing(Closing::ShuttingDown);
            }
        }
    }
}

/// Why the endpoint cannot be opened.
#[derive(Debug, Error)]
pub enum BindError {
    /// The operating system refuses.
    #[error("listen.peers: bind UDP {address}: {error}")]
    Bind {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The identity cannot be used.
    #[error("{0}")]
    Tls(#[from] TlsError),
}

fn bind(listen: SocketAddr, server: quinn::ServerConfig) -> io::Result<Endpoint> {
    let socket = UdpSocket::bind(listen)?;
    // Larger buffers save packets when this process is not scheduled for a while. The kernel gives
    // what its own limit allows.
    for set in [
        rustix::net::sockopt::set_socket_recv_buffer_size,
        rustix::net::sockopt::set_socket_send_buffer_size,
    ] {
        if let Err(error) = set(&socket, SOCKET_BUFFER_BYTES) {
            debug!("set the buffer of the peers' socket: {error}");
        }
    }
    let mut config = EndpointConfig::default();
    config
        .max_udp_payload_size(UDP_PAYLOAD_BYTES_MAX)
        .expect("the bound is what UDP allows");
    let runtime = Arc::new(quinn::TokioRuntime);
    Endpoint::new(config, Some(server), socket, runtime)
}

async fn timely<T>(
    work: impl Future<Output = Result<T, LinkError>> + Send,
) -> Result<T, LinkError> {
    match tokio::time::timeout(HELLO_WAIT, work).await {
        Ok(result) => result,
        Err(_) => Err(LinkError::Late(HELLO_WAIT)),
    }
}

/// Why a connection did not become a link.
#[derive(Debug, Error)]
enum LinkError {
    #[error("{0}")]
    Connect(#[from] quinn::ConnectError),
    #[error("{0}")]
    Connection(#[from] ConnectionError),
    #[error("there are {limit} links, which is as many as are allowed")]
    Full { limit: usize },
    #[error("{0}")]
    Hello(#[from] HelloError),
    #[error("no hello within {0:?}")]
    Late(Duration),
    #[error("the node is not on the allow-list")]
    NotListed,
    #[error("the node is in incarnation {got}; there is a link to {after} of it already")]
    NotRestarted {
        got: Incarnation,
        after: Incarnation,
    },
    #[error("incarnation {got} of the node is older than {want}, which was here before")]
    Stale { got: Incarnation, want: Incarnation },
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("no answer within {0:?}")]
    Unreachable(Duration),
    #[error("the verbs plane of the peer: {0}")]
    Verbs(String),
}

impl LinkError {
    fn code(&self) -> Code {
        match self {
            Self::Hello(HelloError::Version { .. }) => Code::Version,
            Self::Hello(_) => Code::Malformed,
            Self::Full { .. } => Code::Full,
            Self::Late(_) => Code::Late,
            Self::NotListed => Code::NotListed,
            Self::Stale { .. } => Code::Stale,
            Self::Connect(_)
            | Self::Connection(_)
            | Self::NotRestarted { .. }
            | Self::Tls(_)
            | Self::Unreachable(_)
            | Self::Verbs(_) => Code::Goodbye,
        }
    }

    fn label(&self) -> &'static str {
        match self {
            Self::Connect(_) | Self::Tls(_) => "local",
            Self::Connection(_) => "connection",
            Self::Full { .. } => "limit",
            Self::Hello(HelloError::Version { .. }) => "version",
            Self::Hello(_) => "malformed",
            Self::Late(_) => "late",
            Self::NotListed => "not_listed",
            Self::NotRestarted { .. } => "not_restarted",
            Self::Stale { .. } => "stale_incarnation",
            Self::Unreachable(_) => "unreachable",
            Self::Verbs(_) => "verbs",
        }
    }
}

/// How a link ended.
#[derive(Debug, Error)]
enum Ended {
    #[error("{0}")]
    Closing(Closing),
    #[error("the peer left")]
    Left,
    #[error("{0}")]
    Receive(ReceiveError),
    #[error("the control stream: {0}")]
    Write(WriteError),
}

impl Ended {
    fn code(&self) -> Code {
        match self {
            Self::Closing(Closing::Misbehaved(_)) => Code::Misbehaved,
            Self::Closing(Closing::ShuttingDown) | Self::Left => Code::Goodbye,
            Self::Closing(Closing::Superseded) => Code::Superseded,
            Self::Closing(Closing::TooSlow { .. }) => Code::TooSlow,
            Self::Receive(_) | Self::Write(_) => Code::Malformed,
        }
    }

    fn label(&self) -> &'static str {
        match self {
            Self::Closing(Closing::Misbehaved(_)) => "misbehaved",
            Self::Closing(Closing::ShuttingDown) => "shutdown",
            Self::Closing(Closing::Superseded) => "superseded",
            Self::Closing(Closing::TooSlow { .. }) => "too_slow",
            Self::Left => "left",
            Self::Receive(ReceiveError::Read(_)) | Self::Write(_) => "lost",
            Self::Receive(_) => "malformed",
        }
    }

    /// Whether nobody needs to look: peers come and go.
    fn is_quiet(&self) -> bool {
        matches!(self.label(), "left" | "lost" | "shutdown" | "superseded")
    }
}

/// Why we close a connection, as the peer sees it. For logs: neither side acts on it.
#[derive(Clone, Copy, Debug)]
enum Code {
    Goodbye = 0,
    Version = 1,
    Malformed = 2,
    Misbehaved = 3,
    TooSlow = 4,
    Stale = 5,
    Late = 6,
    Full = 7,
    Superseded = 8,
    NotListed = 9,
}

fn code(code: Code) -> VarInt {
    VarInt::from_u32(code as u32)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Poison says only that another thread panicked: every change here is one call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long a peer may take to answer at all.
const DIAL_WAIT: Duration = Duration::from_secs(2);

/// How long a handshake may take, and then the hellos.
const HELLO_WAIT: Duration = Duration::from_secs(3);

/// How long a link's last messages may take to arrive.
const FLUSH_WAIT: Duration = Duration::from_millis(500);

/// Most connections that are not yet links.
const HANDSHAKES_MAX: usize = 64;

const SOCKET_BUFFER_BYTES: usize = 8 << 20;

#[cfg(test)]
#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "a test names what it expects; all else is a failure"
)]
mod tests;
