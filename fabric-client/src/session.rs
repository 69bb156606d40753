//! The session with the local daemon: one task that reads and writes, and what it knows.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fabric_ipc::{Connection, FrameReader, FrameWriter, Mapping, MappingError, MemoryError};
use fabric_proto::ids::{EngineId, EngineName, Incarnation, NodeId};
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::{DecodeError, ToDaemon, ToEngine, VERSION};
use tokio::net::UnixStream;

use crate::closed::{Closed, Misbehaviour};
use crate::pool::{Pool, PoolShared};
use crate::shared::Shared;

/// How long a daemon may take to answer the hello.
const WELCOME_MAX: Duration = Duration::from_secs(10);
/// How long the last messages of a session that this process lets go of may take. A daemon that
/// reads none of them learns the same from the end of the connection.
const LINGER_MAX: Duration = Duration::from_secs(1);

/// A session with the local daemon. Clones share it; it ends with the last one, its pools, leases
/// and transfers included.
#[derive(Clone)]
pub struct Session {
    handle: Arc<Handle>,
}

/// Ends the session when the last clone is gone; the task holds only what is inside.
struct Handle {
    shared: Arc<Shared>,
    welcome: Welcome,
    runtime: tokio::runtime::Handle,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.finish();
    }
}

/// Who answers.
#[derive(Clone, Copy, Debug)]
struct Welcome {
    node: NodeId,
    incarnation: Incarnation,
    engine: EngineId,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody answers on the socket.
    #[error("connect to the daemon at {path}")]
    Connect {
        /// The socket.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The connection broke before the daemon's welcome.
    #[error("the daemon closed the connection before its welcome")]
    Closed,
    /// The daemon refused this engine.
    #[error("the daemon refused this engine: {0}")]
    Refused(Rejection),
    /// The daemon broke the protocol.
    #[error("the daemon sent something that is not a welcome")]
    Misbehaved,
    /// The daemon sent bytes that are no message.
    #[error("the daemon sent bytes that are no message: {0}")]
    Decode(DecodeError),
    /// The daemon took the connection and said nothing.
    #[error("the daemon did not answer within {limit:?}")]
    Silent {
        /// How long was waited.
        limit: Duration,
    },
    /// The daemon speaks another version.
    #[error("the daemon speaks version {got}, and this SDK {want}")]
    Version {
        /// The daemon's.
        got: u32,
        /// This SDK's.
        want: u32,
    },
}

/// Why a pool was not registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The pool, as described, is refused; the reason has both numbers.
    #[error("the pool was refused: {0}")]
    Rejected(Rejection),
    /// The memory could not be made.
    #[error("make the pool's memory: {0}")]
    Memory(#[from] MemoryError),
    /// The memory could not be mapped.
    #[error("map the pool's memory: {0}")]
    Map(#[from] MappingError),
    /// The session with the daemon ended.
    #[error("the session with the local daemon ended")]
    Gone,
}

impl Session {
    /// Connects to the daemon's engine socket and says who this engine is. Needs a tokio runtime
    /// with I/O and time; the session is served by a task of it.
    ///
    /// Safe to cancel: the connection is closed.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: no socket, refused, another version.
    pub async fn connect(socket: impl AsRef<Path>, name: EngineName) -> Result<Self, ConnectError> {
        let path = socket.as_ref();
        let connect_error = |source| ConnectError::Connect {
            path: path.display().to_string(),
            source,
        };
        let stream = UnixStream::connect(path).await.map_err(connect_error)?;
        let (mut reader, mut writer) = Connection::new(stream).split();
        let hello = async {
            let version = VERSION;
            let hello = ToDaemon::Hello { version, name }.encode();
            // A daemon that refuses before it has read all of the hello has still said why.
            let sent = writer.send(&hello, &[]).await;
            let welcome = welcomed(&mut reader).await?;
            sent.map_err(|_| ConnectError::Closed)?;
            Ok(welcome)
        };
        let limit = WELCOME_MAX;
        let welcome = tokio::time::timeout(limit, hello).await;
        let welcome = welcome.unwrap_or(Err(ConnectError::Silent { limit }))?;
        let shared = Arc::new(Shared::new());
        tokio::spawn(serve(Arc::clone(&shared), reader, writer));
        let runtime = tokio::runtime::Handle::current();
        Ok(Self {
            handle: Arc::new(Handle {
                shared,
                welcome,
                runtime,
            }),
        })
    }

    /// Makes a pool's memory, maps it, and registers it with the daemon. A pool stays registered
    /// until the session ends.
    ///
    /// Safe to cancel: a pool that is registered after that stays unused until the session ends.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]: the pool is refused (S9 names both numbers), no memory, no daemon.
    pub async fn register_pool(&self, spec: PoolSpec) -> Result<Pool, RegisterError> {
        // S9: refused here, before any memory is made.
        spec.check().map_err(RegisterError::Rejected)?;
        let memory_file = fabric_ipc::create_sealed("fabric-pool", spec.bytes())?;
        let memory = Mapping::read_write(memory_file.as_fd(), spec.bytes())?;
        let shared = self.shared();
        let registered = shared.register_pool(spec, memory_file).await;
        let id = registered
            .ok_or(RegisterError::Gone)?
            .map_err(RegisterError::Rejected)?;
        let pool = PoolShared::new(Arc::clone(shared), id, spec, memory);
        Ok(Pool::new(self.clone(), pool))
    }

    /// Waits until the session is over, and tells why.
    ///
    /// Safe to cancel.
    pub async fn closed(&self) -> Closed {
        self.shared().closed().await
    }

    /// The node of the local daemon.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.handle.welcome.node
    }

    /// The life of the local daemon.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.handle.welcome.incarnation
    }

    /// This session, as the daemon counts them.
    #[must_use]
    pub fn engine(&self) -> EngineId {
        self.handle.welcome.engine
    }

    /// The runtime that serves the session.
    pub(crate) fn runtime(&self) -> &tokio::runtime::Handle {
        &self.handle.runtime
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("welcome", &self.handle.welcome)
            .finish_non_exhaustive()
    }
}

async fn welcomed(reader: &mut FrameReader) -> Result<Welcome, ConnectError> {
    let frame = reader.recv().await.ok().flatten();
    let frame = frame.ok_or(ConnectError::Closed)?;
    match ToEngine::decode(frame.bytes).map_err(ConnectError::Decode)? {
        ToEngine::Welcome { version, .. } if version != VERSION => Err(ConnectError::Version {
            got: version,
            want: VERSION,
        }),
        ToEngine::Welcome {
            node,
            incarnation,
            engine,
            ..
        } => Ok(Welcome {
            node,
            incarnation,
            engine,
        }),
        ToEngine::Rejected { reason, .. } => Err(ConnectError::Refused(reason)),
        ToEngine::PoolRegistered { .. }
        | ToEngine::Leased { .. }
        | ToEngine::SendOpened { .. }
        | ToEngine::SendOutcome { .. }
        | ToEngine::Expect { .. }
        | ToEngine::Verify { .. }
        | ToEngine::LeaseOutcome { .. } => Err(ConnectError::Misbehaved),
    }
}

/// Tells whoever waits that the session is over, however its task ends: a runtime that shuts down
/// drops it in the middle.
struct Gone(Arc<Shared>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.gone(Closed::Local);
    }
}

async fn serve(shared: Arc<Shared>, reader: FrameReader, writer: FrameWriter) {
    let gone = Gone(Arc::clone(&shared));
    // Each loop runs undisturbed by the other: neither is ever cancelled but at the end.
    let closed = tokio::select! {
        closed = read(&shared, reader) => closed,
        closed = write(&shared, writer) => closed,
        () = linger(&shared) => Closed::Local,
    };
    match closed {
        Closed::Misbehaved(what) => tracing::error!("session closed: {what}"),
        Closed::Daemon | Closed::Io(_) => tracing::warn!("session over: {closed}"),
        Closed::Local => tracing::debug!("session over: {closed}"),
    }
    shared.gone(closed);
    drop(gone);
}

async fn read(shared: &Arc<Shared>, mut reader: FrameReader) -> Closed {
    loop {
        let frame = match reader.recv().await {
            Ok(Some(frame)) => frame,
            Ok(None) => return Closed::Daemon,
            Err(error) => return Closed::from(&error),
        };
        let (got, want) = (frame.fds.len(), 0);
        if got != want {
            return Misbehaviour::Descriptors { got, want }.into();
        }
        let message = ToEngine::decode(frame.bytes).map_err(Misbehaviour::Malformed);
        if let Err(what) = message.and_then(|message| shared.handle(message)) {
            return what.into();
        }
    }
}

/// Ends some time after the last handle is gone, should the daemon not read what is left.
async fn linger(shared: &Shared) {
    shared.finishing().await;
    tokio::time::sleep(LINGER_MAX).await;
}

async fn write(shared: &Shared, mut writer: FrameWriter) -> Closed {
    while let Some(batch) = shared.outbox.take().await {
        let written = write_batch(&mut writer, batch).await;
        if let Err(error) = written {
            tracing::debug!("write to the daemon: {error}");
            // Every message is within its bounds: any other error would be a bug of ours.
            return if let fabric_ipc::SendError::Io(error) = error {
                Closed::Io(error.kind())
            } else {
                Closed::Local
            };
        }
    }
    Closed::Local
}

async fn write_batch(
    writer: &mut FrameWriter,
    batch: std::collections::VecDeque<crate::outbox::Outgoing>,
) -> Result<(), fabric_ipc::SendError> {
    for outgoing in batch {
        if let Some(memory) = &outgoing.memory {
            writer.send(&outgoing.bytes, &[memory.as_fd()]).await?;
            continue;
        }
        if writer.queued_bytes() + outgoing.bytes.len() > fabric_ipc::FRAME_BYTES_MAX as usize {
            writer.flush().await?;
        }
        writer.queue(&outgoing.bytes)?;
    }
    writer.flush().await
}
