//! The plane for two pools on one host: the destination's daemon copies.
//!
//! Only a pool's own daemon ever writes to it. The source's daemon passes its memory file, which
//! the destination maps read-only, and then says over a Unix socket which pages are to be copied,
//! so a fence needs nobody but the destination (S1). Two engines of one daemon take the same path:
//! the loopback link connects to the daemon's own socket.

mod codec;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fabric_proto::host::{Input, PlaneCommand};
use fabric_proto::ids::{LinkId, NodeId, Secret};
use fabric_proto::limits::LINKS_MAX;
use fabric_proto::wire::PlaneKind;
use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::Sender;
use tokio::task::AbortHandle;
use tracing::{debug, info, warn};

use super::faults::Faults;
use super::grants::{GrantTable, Terms};
use super::outbox::Outbox;
use super::pools::Pools;
use super::registry::Registry;
use super::source::Source;
use super::{Plane, PlaneProofs, lock};
use writer::{Link, Opening, Order};

/// The plane between two pools on one host.
///
/// Calling order: [`ShmPlane::link_up`] before the machine hears of the link, then commands, then
/// [`Plane::link_down`]. The loopback link is always up.
#[derive(Debug)]
pub struct ShmPlane {
    shared: Arc<Shared>,
    runtime: Handle,
    accepting: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    pools: Arc<Pools>,
    outbox: Arc<Outbox>,
    grants: Arc<GrantTable>,
    faults: Arc<Faults>,
    writers: Arc<Registry<Arc<Link>>>,
    links: Mutex<HashMap<LinkId, Arc<Link>>>,
    refused: AtomicU64,
}

impl Shared {
    /// Whether the machine can have given a grant to this link. That whoever shows the grant's key
    /// is the link's peer follows from the key: it was sent over that link and nowhere else, and
    /// the socket is open to this user's processes only.
    fn is_up(&self, link: LinkId) -> bool {
        lock(&self.links).contains_key(&link)
    }
}

/// Why the plane cannot listen.
#[derive(Debug, Error)]
pub enum ShmError {
    /// Somebody answers on the socket.
    #[error("{} is in use", .path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("listen on {}: {error}", .path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// There is something else where the socket should be.
    #[error("{} exists and is not a socket", .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

impl ShmPlane {
    /// A plane that listens on `socket_path`, and whose tasks run on the current runtime.
    ///
    /// # Errors
    ///
    /// [`ShmError`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(
        pools: Arc<Pools>,
        events: Sender<Input<PlaneProofs>>,
        socket_path: PathBuf,
        faults: Arc<Faults>,
    ) -> Result<Self, ShmError> {
        let runtime = Handle::current();
        let listener = listen(&socket_path)?;
        let outbox = Outbox::new(&runtime, events);
        let shared = Arc::new(Shared {
            pools,
            grants: GrantTable::new(&runtime, Arc::clone(&outbox)),
            outbox,
            faults,
            writers: Registry::new(),
            links: Mutex::default(),
            refused: AtomicU64::new(0),
        });
        let accepting = runtime
            .spawn(accept(Arc::clone(&shared), listener))
            .abort_handle();
        let plane = Self {
            shared,
            runtime,
            accepting,
        };
        plane.link_up(LinkId::LOOPBACK, None, socket_path);
        Ok(plane)
    }

    /// Hears where a link's peer listens; `None` is this daemon itself. The connection is made when
    /// there is something to send.
    pub fn link_up(&self, link: LinkId, peer: Option<NodeId>, peer_socket: PathBuf) {
        debug!(%link, ?peer, path = %peer_socket.display(), "link for shared memory");
        let up = Arc::new(Link::new(peer_socket, Arc::clone(&self.shared.faults)));
        self.runtime.spawn(Arc::clone(&up).run());
        let before = lock(&self.shared.links).insert(link, up);
        assert!(before.is_none(), "a link's id is never used twice");
    }

    /// Writers that were refused without any effect, and connections that were closed because their
    /// peer broke the format.
    #[must_use]
    pub fn peers_refused(&self) -> u64 {
        // Relaxed: a statistic.
        self.shared.refused.load(Ordering::Relaxed)
    }

    fn open_writer(&self, link: LinkId, key: Secret, source: Source) {
        let (transfer, grant) = (source.transfer(), source.grant());
        let Some(up) = lock(&self.shared.links).get(&link).map(Arc::clone) else {
            debug!(%transfer, %grant, %link, "writer failed: the link is down");
            return source.fail();
        };
        let writers = &self.shared.writers;
        let (registration, before) = writers.register(transfer, grant, Arc::clone(&up));
        if let Some(before) = before {
            before.order(Order::Stop(transfer));
        }
        up.order(Order::Open(Opening {
            registration,
            source,
            key,
        }));
    }
}

impl Plane for ShmPlane {
    fn kind(&self) -> PlaneKind {
        PlaneKind::Shm
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
                let order = Order::Write(transfer, run);
                shared.writers.tell(transfer, |link| link.order(order));
            }
            PlaneCommand::Drain { transfer } => {
                let order = Order::Drain(transfer);
                shared.writers.tell(transfer, |link| link.order(order));
            }
            PlaneCommand::Stop { transfer } => {
                let order = Order::Stop(transfer);
                shared.writers.tell(transfer, |link| link.order(order));
            }
        }
    }

    fn link_down(&self, link: LinkId) {
        if let Some(link) = lock(&self.shared.links).remove(&link) {
            link.take_down();
        }
    }
}

impl Drop for ShmPlane {
    fn drop(&mut self) {
        self.accepting.abort();
        #[expect(clippy::iter_over_hash_type, reason = "in any order")]
        for link in lock(&self.shared.links).values() {
            link.take_down();
        }
    }
}

async fn accept(shared: Arc<Shared>, listener: UnixListener) {
    let free = Arc::new(Semaphore::new(LINKS_MAX));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most likely too many open files: the connections that there are go on.
                warn!("accept a peer's connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&free).try_acquire_owned() else {
            warn!("closed the connection of a peer: there are {LINKS_MAX} already");
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            reader::serve(shared, stream).await;
            drop(permit);
        });
    }
}

/// Listens on a socket that only this user can connect to.
fn listen(path: &Path) -> Result<UnixListener, ShmError> {
    remove_stale(path)?;
    let open = || -> io::Result<UnixListener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket: OwnedFd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // Before the name exists, so that it is never open to others. M: Linux takes the mode of
        // the file from the socket (`unix_bind_bsd` in net/unix/af_unix.c).
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&socket, LISTEN_BACKLOG)?;
        UnixListener::from_std(StdListener::from(socket))
    };
    open().map_err(|error| ShmError::Listen {
        path: path.to_owned(),
        error,
    })
}

/// Removes a socket on which nobody answers.
fn remove_stale(path: &Path) -> Result<(), ShmError> {
    let failed = |error| ShmError::Listen {
        path: path.to_owned(),
        error,
    };
    let kind = match path.symlink_metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    if !kind.is_socket() {
        return Err(ShmError::NotASocket {
            path: path.to_owned(),
        });
    }
    match StdStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            info!(path = %path.display(), "removed a stale socket");
            std::fs::remove_file(path).map_err(failed)
        }
        // Nobody may be listening, but that cannot be told.
        Err(error) => Err(failed(error)),
        Ok(_) => Err(ShmError::InUse {
            path: path.to_owned(),
        }),
    }
}

/// Most runs that the source of a connection has asked for and not heard of.
const RUNS_OUTSTANDING_MAX: u64 = 1 << 16;

/// The source asks for no more while so many bytes are outstanding on a connection.
const BYTES_OUTSTANDING_MAX: u64 = 64 << 20;

const LISTEN_BACKLOG: i32 = 128;

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
