//! Engine sessions: a Unix socket, one task for each engine, and one that writes to it.
//!
//! ```text
//!  connect ─▶ hello ─┬─▶ session: EngineUp ─▶ messages ─▶ EngineGone
//!                    └─▶ Rejected, closed
//! ```
//!
//! 1. The first message is a hello, within five seconds: our version, a name that is in the
//!    configuration, from a process of the user that the configuration says.
//! 2. Then every message goes to the machine as it comes. Only a pool's registration is dealt with
//!    here: its memory is checked and mapped, and the planes are ready for it, before the machine
//!    hears of it. What its engine says next waits meanwhile.
//! 3. However a session ends, the machine hears of it exactly once.

mod listener;
mod pool;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fabric_ipc::{
    Connection, Frame, FrameError, FrameReader, FrameWriter, PeerCredentials, SendError,
};
use fabric_proto::host::{Input, ScrubPolicy};
use fabric_proto::ids::{EngineId, EngineName, RequestSeq};
use fabric_proto::limits::ENGINES_MAX;
use fabric_proto::outcome::Rejection;
use fabric_proto::wire::{DecodeError, ToDaemon, ToEngine, VERSION};
use thiserror::Error;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tracing::{info, warn};

use crate::config::EngineEntry;
use crate::driver::Event;
use crate::metrics::Metrics;
use crate::plane::Pools;
use crate::planes::Planes;
use crate::registry::{Closing, Outgoing, Registry};

pub use listener::ListenError;

/// The engine sessions of a daemon.
#[derive(Debug)]
pub(crate) struct Sessions {
    registry: Registry<EngineId, About>,
    allowed: Vec<EngineEntry>,
    pools: Arc<Pools>,
    planes: Arc<Planes>,
    scrub: ScrubPolicy,
    events: mpsc::Sender<Event>,
    metrics: Arc<Metrics>,
    permits: Arc<Semaphore>,
    next_engine: AtomicU64,
    next_pool: AtomicU32,
}

/// Who is at the other end, for the admin page.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub(crate) name: EngineName,
    pub(crate) uid: u32,
    pub(crate) pid: Option<u32>,
}

impl Sessions {
    pub(crate) fn new(
        allowed: Vec<EngineEntry>,
        pools: Arc<Pools>,
        planes: Arc<Planes>,
        scrub: ScrubPolicy,
        events: mpsc::Sender<Event>,
        metrics: Arc<Metrics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            registry: Registry::new(),
            allowed,
            pools,
            planes,
            scrub,
            events,
            metrics,
            permits: Arc::new(Semaphore::new(ENGINES_MAX)),
            next_engine: AtomicU64::new(1),
            next_pool: AtomicU32::new(1),
        })
    }

    /// Sends to an engine, if it is there. Never waits.
    pub(crate) fn send(&self, engine: EngineId, message: &ToEngine) {
        self.registry.send(engine, message.encode());
    }

    /// Ends a session.
    pub(crate) fn close(&self, engine: EngineId, why: Closing) {
        self.registry.close(engine, why);
    }

    /// Ends all sessions, after what was sent to them, but within `wait`.
    pub(crate) async fn close_all(&self, wait: Duration) {
        self.registry.close_all(wait).await;
    }

    /// Ends all sessions, and waits for nobody.
    pub(crate) fn close_now(&self) {
        self.registry.close_now();
    }

    /// The sessions that there are.
    pub(crate) fn list(&self) -> Vec<(EngineId, About)> {
        self.registry.map(|engine, about| (engine, about.clone()))
    }

    /// How many sessions there are.
    pub(crate) fn count(&self) -> usize {
        self.registry.count()
    }

    /// Accepts engines until it is dropped.
    pub(crate) async fn accept(self: Arc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => self.accepted(stream),
                Err(error) => {
                    // Most likely too many open files: the sessions that there are go on.
                    warn!("accept an engine: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn accepted(self: &Arc<Self>, stream: UnixStream) {
        let permit = Arc::clone(&self.permits).try_acquire_owned();
        let sessions = Arc::clone(self);
        tokio::spawn(async move {
            let connection = Connection::new(stream);
            match permit {
                Ok(permit) => sessions.serve(connection, permit).await,
                Err(_) => {
                    let limit = ENGINES_MAX as u64;
                    warn!(limit, "refused an engine: there are as many as are allowed");
                    sessions.metrics.session_refused("limit");
                    let value = limit + 1;
                    refuse(
                        connection.split().1,
                        Rejection::ExceedsLimit { value, limit },
                    )
                    .await;
                }
            }
        });
    }

    /// Runs a connection from hello to end.
    async fn serve(&self, connection: Connection, permit: OwnedSemaphorePermit) {
        let credentials = connection.peer_credentials();
        let (mut reader, writer) = connection.split();
        let hello = async { self.hello(&mut reader, credentials?).await };
        let hello = match tokio::time::timeout(HELLO_WAIT, hello).await {
            Ok(hello) => hello,
            Err(_) => Err(HelloError::Late(HELLO_WAIT)),
        };
        match hello {
            Ok((entry, about)) => self.session(entry, about, reader, writer).await,
            Err(error) => {
                warn!("refused an engine: {error}");
                self.metrics.session_refused(error.label());
                if let HelloError::Refused { reason, .. } = error {
                    refuse(writer, reason).await;
                }
            }
        }
        drop(permit);
    }

    /// Hears who it is.
    async fn hello(
        &self,
        reader: &mut FrameReader,
        credentials: PeerCredentials,
    ) -> Result<(&EngineEntry, About), HelloError> {
        let Frame { bytes, fds } = reader.recv().await?.ok_or(HelloError::Left)?;
        if !fds.is_empty() {
            return Err(HelloError::Descriptors { got: fds.len() });
        }
        let ToDaemon::Hello { version, name } = ToDaemon::decode(bytes)? else {
            return Err(HelloError::NotHello);
        };
        let uid = credentials.uid;
        let refused = |reason| HelloError::Refused {
            name: name.clone(),
            uid,
            reason,
        };
        if version != VERSION {
            return Err(refused(Rejection::VersionMismatch {
                version: u64::from(version),
                version_wanted: u64::from(VERSION),
            }));
        }
        // S7: who is not in the configuration, or runs as somebody else, gets nothing.
        let entry = self.allowed.iter().find(|entry| entry.name == name);
        let entry = entry.filter(|entry| entry.uid.is_none_or(|want| want == uid));
        let entry = entry.ok_or_else(|| refused(Rejection::EngineNotAllowed))?;
        let pid = credentials.pid;
        Ok((entry, About { name, uid, pid }))
    }

    /// Runs a session from its first message to its end.
    async fn session(
        &self,
        entry: &EngineEntry,
        about: About,
        mut reader: FrameReader,
        writer: FrameWriter,
    ) {
        // Relaxed: a number of one's own is all that is asked for.
        let engine = EngineId(self.next_engine.fetch_add(1, Ordering::Relaxed));
        let (name, uid, pid) = (about.name.clone(), about.uid, about.pid);
        let (outgoing, closing) = self.registry.insert(engine, about);
        self.metrics.session_opened();
        info!(%engine, %name, uid, pid, "engine connected");
        let tenants = entry.tenants.clone();
        // Errors of this channel: the driver is gone, and there is nobody to tell.
        let _gone = self.events.send(Input::EngineUp { engine, tenants }).await;

        let mut writing = tokio::spawn(write(writer, outgoing));
        let ended = self.read(engine, &mut reader, closing, &mut writing).await;

        let _gone = self.events.send(Input::EngineGone { engine }).await;
        self.metrics.session_closed(ended.label());
        if ended.is_quiet() {
            info!(%engine, %name, "engine disconnected: {ended}");
        } else {
            warn!(%engine, %name, "closed the session of an engine: {ended}");
        }
        // What is queued may still say why; but nobody waits long for who does not read.
        self.registry.hang_up(engine);
        if !writing.is_finished() {
            let _late = tokio::time::timeout(FLUSH_WAIT, &mut writing).await;
            writing.abort();
        }
        self.registry.remove(engine);
    }

    /// Takes messages until there is a reason not to.
    async fn read(
        &self,
        engine: EngineId,
        reader: &mut FrameReader,
        mut closing: oneshot::Receiver<Closing>,
        writing: &mut JoinHandle<Result<(), SendError>>,
    ) -> Ended {
        let mut pools_mapped = 0;
        loop {
            let frame = tokio::select! {
                biased;
                Ok(why) = &mut closing => return Ended::Closing(why),
                written = &mut *writing => return match written {
                    Ok(Err(error)) => Ended::Lost(error),
                    Ok(Ok(())) | Err(_) => Ended::Left,
                },
                frame = reader.recv() => frame,
            };
            let taken = match frame {
                Ok(Some(frame)) => self.take(engine, frame, &mut pools_mapped).await,
                Ok(None) => return Ended::Left,
                Err(FrameError::Io(error)) => return Ended::Lost(error.into()),
                Err(error) => return Ended::Frame(error),
            };
            if let Err(ended) = taken {
                return ended;
            }
        }
    }

    /// Takes one message.
    async fn take(
        &self,
        engine: EngineId,
        frame: Frame,
        pools_mapped: &mut usize,
    ) -> Result<(), Ended> {
        let Frame { bytes, mut fds } = frame;
        let message = ToDaemon::decode(bytes)?;
        let want = usize::from(matches!(message, ToDaemon::RegisterPool { .. }));
        if fds.len() != want {
            let got = fds.len();
            return Err(Ended::Descriptors { got, want });
        }
        let event = match (message, fds.pop()) {
            (ToDaemon::RegisterPool { seq, spec }, Some(fd)) => {
                let registered = self.register_pool(engine, seq, spec, fd, pools_mapped);
                match registered.await? {
                    Ok(event) => event,
                    Err(reason) => {
                        self.metrics.rejected(&reason);
                        self.send(engine, &ToEngine::Rejected { seq, reason });
                        return Ok(());
                    }
                }
            }
            (message, _) => Input::Engine { engine, message },
        };
        let sent = self.events.send(event).await;
        sent.map_err(|_| Ended::Closing(Closing::ShuttingDown))
    }
}

/// How a session ended.
#[derive(Debug, Error)]
enum Ended {
    #[error(transparent)]
    Closing(Closing),
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("{got} descriptors with a message that takes {want}")]
    Descriptors { got: usize, want: usize },
    #[error("{0}")]
    Frame(FrameError),
    #[error("it left")]
    Left,
    #[error("{0}")]
    Lost(SendError),
    #[error("{0}")]
    Memory(fabric_ipc::MappingError),
    #[error("every pool id was used")]
    PoolIds,
}

impl Ended {
    fn label(&self) -> &'static str {
        match self {
            Self::Closing(Closing::Misbehaved(_)) => "misbehaved",
            Self::Closing(Closing::ShuttingDown) => "shutdown",
            Self::Closing(Closing::Superseded) => "superseded",
            Self::Closing(Closing::TooSlow { .. }) => "too_slow",
            Self::Decode(_) | Self::Frame(_) => "malformed",
            Self::Descriptors { .. } | Self::Memory(_) => "memory",
            Self::Left => "left",
            Self::Lost(_) => "lost",
            Self::PoolIds => "pool_ids",
        }
    }

    /// Whether nobody needs to look: engines come and go.
    fn is_quiet(&self) -> bool {
        matches!(self.label(), "left" | "lost" | "shutdown")
    }
}

/// Why a connection did not become a session.
#[derive(Debug, Error)]
enum HelloError {
    #[error("the operating system does not say who it is: {0}")]
    Credentials(#[from] std::io::Error),
    #[error("hello: {0}")]
    Decode(#[from] DecodeError),
    #[error("{got} descriptors with the hello")]
    Descriptors { got: usize },
    #[error("hello: {0}")]
    Frame(#[from] FrameError),
    #[error("no hello within {0:?}")]
    Late(Duration),
    #[error("it left before its hello")]
    Left,
    #[error("its first message is not a hello")]
    NotHello,
    #[error("{name} (uid {uid}): {reason}")]
    Refused {
        name: EngineName,
        uid: u32,
        reason: Rejection,
    },
}

impl HelloError {
    fn label(&self) -> &'static str {
        match self {
            Self::Credentials(_) => "credentials",
            Self::Decode(_) | Self::Descriptors { .. } | Self::Frame(_) | Self::NotHello => {
                "malformed"
            }
            Self::Late(_) => "late",
            Self::Left => "left",
            Self::Refused { .. } => "not_allowed",
        }
    }
}

/// Says why there will be no session. Its failure says no more than that the engine is gone.
async fn refuse(mut writer: FrameWriter, reason: Rejection) {
    let seq = RequestSeq(0);
    let bytes = ToEngine::Rejected { seq, reason }.encode();
    let said = async move {
        writer.send(&bytes, &[]).await?;
        writer.close().await
    };
    let _gone = tokio::time::timeout(FLUSH_WAIT, said).await;
}

/// Writes what is queued, then ends the stream.
async fn write(mut writer: FrameWriter, mut outgoing: Outgoing) -> Result<(), SendError> {
    let mut batch: Vec<Bytes> = Vec::new();
    while outgoing.next(&mut batch).await {
        for message in batch.drain(..) {
            if writer.queued_bytes() + message.len() > WRITE_BYTES_MAX {
                writer.flush().await?;
            }
            writer.queue(&message)?;
        }
        writer.flush().await?;
    }
    writer.close().await
}

/// Listens for engines.
///
/// # Errors
///
/// [`ListenError`].
pub(crate) fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    listener::listen(path)
}

/// Removes the socket of a listener that is gone.
pub(crate) fn remove_socket(path: &PathBuf) {
    if let Err(error) = std::fs::remove_file(path) {
        warn!(path = %path.display(), "remove the engines' socket: {error}");
    }
}

/// How long an engine may take to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);

/// How long a session's last messages may take to go out.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

/// How long to wait before accepting again, after that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Most bytes that are gathered for one write.
const WRITE_BYTES_MAX: usize = 1 << 20;
