//! The session with the local daemon: one reader task, one writer task, and what they know.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use fabric_ipc::{Connection, FrameReader, FrameWriter, Mapping, MappingError, MemoryError};
use fabric_proto::ids::{
    EngineId, EngineName, Incarnation, LeaseId, NodeId, PoolId, RequestSeq, SlotRef, TransferId,
};
use fabric_proto::outcome::{Failure, Outcome, Rejection};
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::{DecodeError, ToDaemon, ToEngine, VERSION};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};

use crate::pool::{Pool, PoolShared};
use crate::receive::Receive;

/// Messages that may wait for the daemon. When it is full, callers wait, and a `Drop` closes.
const OUTGOING_MAX: usize = 4096;
/// Frames that are written by one system call at most.
const BATCH_MAX: usize = 256;

/// A session with the local daemon. Clones share it; it ends with the last one, its pools included.
#[derive(Clone)]
pub struct Session {
    handle: Arc<Handle>,
}

/// Ends the session when the last clone is gone; the tasks hold only what is inside.
struct Handle {
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// What the tasks and the handles share.
pub(crate) struct Shared {
    outgoing: mpsc::Sender<Outgoing>,
    /// Turns true once, when the session is over.
    closed: watch::Sender<bool>,
    welcome: Welcome,
    next_seq: AtomicU64,
    table: Mutex<Table>,
}

/// Who answers.
#[derive(Clone, Copy, Debug)]
struct Welcome {
    node: NodeId,
    incarnation: Incarnation,
    engine: EngineId,
}

/// What is waited for.
#[derive(Default)]
struct Table {
    gone: bool,
    pending: HashMap<RequestSeq, Pending>,
    receives: HashMap<LeaseId, Weak<Receive>>,
    sends: HashMap<TransferId, oneshot::Sender<Outcome>>,
}

/// Whose reply.
enum Pending {
    Pool(oneshot::Sender<Result<PoolId, Rejection>>),
    Lease {
        pool: Arc<PoolShared>,
        reply: oneshot::Sender<Result<Granted, Rejection>>,
    },
    Send(oneshot::Sender<Result<Opened, Rejection>>),
}

/// A lease as the daemon gave it.
pub(crate) struct Granted {
    pub(crate) lease: Arc<crate::lease::Lease>,
    /// For a lease to receive: made by the reader, so that nothing can come before it.
    pub(crate) receive: Option<(Arc<Receive>, Bytes)>,
}

/// A transfer as the daemon opened it.
pub(crate) struct Opened {
    pub(crate) transfer: TransferId,
    pub(crate) slots: u32,
    pub(crate) offset: u32,
    pub(crate) outcome: oneshot::Receiver<Outcome>,
}

enum Outgoing {
    Message(Bytes),
    WithMemory(Bytes, OwnedFd),
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
    /// Connects to the daemon's engine socket and says who this engine is.
    ///
    /// # Errors
    ///
    /// [`ConnectError`]: no socket, refused, another version.
    pub async fn connect(socket: impl AsRef<Path>, name: EngineName) -> Result<Self, ConnectError> {
        let path = socket.as_ref();
        let stream = UnixStream::connect(path)
            .await
            .map_err(|source| ConnectError::Connect {
                path: path.display().to_string(),
                source,
            })?;
        let (mut reader, mut writer) = Connection::new(stream).split();
        let hello = ToDaemon::Hello {
            version: VERSION,
            name,
        }
        .encode();
        writer
            .send(&hello, &[])
            .await
            .map_err(|_| ConnectError::Closed)?;
        let welcome = welcomed(&mut reader).await?;
        let (outgoing, queue) = mpsc::channel(OUTGOING_MAX);
        let shared = Arc::new(Shared {
            outgoing,
            closed: watch::channel(false).0,
            welcome,
            next_seq: AtomicU64::new(1),
            table: Mutex::new(Table::default()),
        });
        tokio::spawn(write(Arc::clone(&shared), writer, queue));
        tokio::spawn(read(Arc::clone(&shared), reader));
        Ok(Self {
            handle: Arc::new(Handle { shared }),
        })
    }

    /// Makes a pool's memory, maps it, and registers it with the daemon.
    ///
    /// Safe to cancel: a pool that is registered after that stays unused until the session ends.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]: the pool is refused (S9 names both numbers), no memory, no daemon.
    pub async fn register_pool(&self, spec: PoolSpec) -> Result<Pool, RegisterError> {
        spec.check().map_err(RegisterError::Rejected)?;
        let memory_file = fabric_ipc::create_sealed("fabric-pool", spec.bytes())?;
        let memory = Mapping::read_write(memory_file.as_fd(), spec.bytes())?;
        let shared = self.shared();
        let (reply, answer) = oneshot::channel();
        let seq = shared
            .expect(Pending::Pool(reply))
            .ok_or(RegisterError::Gone)?;
        let message = ToDaemon::RegisterPool { seq, spec }.encode();
        let outgoing = Outgoing::WithMemory(message, memory_file);
        shared
            .outgoing
            .send(outgoing)
            .await
            .map_err(|_| RegisterError::Gone)?;
        let id = answer
            .await
            .map_err(|_| RegisterError::Gone)?
            .map_err(RegisterError::Rejected)?;
        Ok(Pool::new(
            self.clone(),
            PoolShared::new(Arc::clone(shared), id, spec, memory),
        ))
    }

    /// Waits until the session is over.
    pub async fn closed(&self) {
        self.shared().closed().await;
    }

    /// The node of the local daemon.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.shared().welcome.node
    }

    /// The life of the local daemon.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.shared().welcome.incarnation
    }

    /// This session, as the daemon counts them.
    #[must_use]
    pub fn engine(&self) -> EngineId {
        self.shared().welcome.engine
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("welcome", &self.shared().welcome)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Ends the session: both tasks stop, and whoever waits is told.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
    }

    async fn closed(&self) {
        let mut closed = self.closed.subscribe();
        // An error would mean that the sender is gone, and `self` has it.
        let _ = closed.wait_for(|closed| *closed).await;
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is consistent after any panic: each change to it is a single insert or remove.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a reply that is to come. `None` where the session is over.
    fn expect(&self, pending: Pending) -> Option<RequestSeq> {
        // Relaxed: a number of one's own is all that is asked for.
        let seq = RequestSeq(self.next_seq.fetch_add(1, Ordering::Relaxed));
        let mut table = self.table();
        if table.gone {
            return None;
        }
        table.pending.insert(seq, pending);
        Some(seq)
    }

    /// Asks for a lease. `None` where the session is over.
    pub(crate) async fn lease(
        &self,
        pool: Arc<PoolShared>,
        ask: impl FnOnce(RequestSeq) -> ToDaemon,
    ) -> Option<Result<Granted, Rejection>> {
        let (reply, answer) = oneshot::channel();
        let seq = self.expect(Pending::Lease { pool, reply })?;
        self.send(ask(seq)).await?;
        answer.await.ok()
    }

    /// Asks for a transfer. `None` where the session is over.
    pub(crate) async fn open(
        &self,
        lease: LeaseId,
        offer: Bytes,
    ) -> Option<Result<Opened, Rejection>> {
        let (reply, answer) = oneshot::channel();
        let seq = self.expect(Pending::Send(reply))?;
        self.send(ToDaemon::Send { seq, lease, offer }).await?;
        answer.await.ok()
    }

    /// Queues a message, waiting for room. `None` where the session is over.
    pub(crate) async fn send(&self, message: ToDaemon) -> Option<()> {
        self.outgoing
            .send(Outgoing::Message(message.encode()))
            .await
            .ok()
    }

    /// As [`Shared::send`], from a thread that may block.
    pub(crate) fn send_blocking(&self, message: &ToDaemon) -> Option<()> {
        self.outgoing
            .blocking_send(Outgoing::Message(message.encode()))
            .ok()
    }

    /// Queues a message that must not be lost and cannot wait.
    pub(crate) fn send_now(&self, message: &ToDaemon) {
        let queued = self.outgoing.try_send(Outgoing::Message(message.encode()));
        if let Err(mpsc::error::TrySendError::Full(_)) = queued {
            // S4: the daemon ends whatever the session held, this included.
            tracing::error!(
                limit = OUTGOING_MAX,
                "the daemon does not read: session closed"
            );
            self.close();
        }
    }

    pub(crate) fn forget_receive(&self, lease: LeaseId) {
        self.table().receives.remove(&lease);
    }

    /// Takes in one message. `Err` closes the session.
    fn handle(self: &Arc<Self>, message: ToEngine) -> Result<(), &'static str> {
        match message {
            ToEngine::Welcome { .. } => Err("a second welcome"),
            ToEngine::Rejected { seq, reason } => {
                let pending = self.table().pending.remove(&seq);
                match pending.ok_or("a reply to nothing")? {
                    Pending::Pool(reply) => answer(reply, Err(reason)),
                    Pending::Lease { reply, .. } => answer(reply, Err(reason)),
                    Pending::Send(reply) => answer(reply, Err(reason)),
                }
                Ok(())
            }
            ToEngine::PoolRegistered { seq, pool } => {
                let Some(Pending::Pool(reply)) = self.table().pending.remove(&seq) else {
                    return Err("a pool that was not registered");
                };
                answer(reply, Ok(pool));
                Ok(())
            }
            ToEngine::Leased {
                seq,
                lease,
                slots,
                offer,
            } => self.leased(seq, lease, slots, offer),
            ToEngine::SendOpened {
                seq,
                transfer,
                slots,
                offset,
            } => self.send_opened(seq, transfer, slots, offset),
            ToEngine::SendOutcome { transfer, outcome } => {
                if let Some(sender) = self.table().sends.remove(&transfer) {
                    answer(sender, outcome);
                }
                Ok(())
            }
            ToEngine::Expect { lease, checksums } => match self.receive(lease) {
                Some(receive) => receive.expect(&checksums),
                None => Ok(()),
            },
            ToEngine::Verify {
                lease,
                attempt,
                pages,
                payload,
            } => match self.receive(lease) {
                Some(receive) => receive.verify(attempt, pages, payload),
                None => Ok(()),
            },
            ToEngine::LeaseOutcome { lease, outcome } => match self.receive(lease) {
                Some(receive) => receive.end(outcome),
                None => Ok(()),
            },
        }
    }

    fn send_opened(
        &self,
        seq: RequestSeq,
        transfer: TransferId,
        slots: u32,
        offset: u32,
    ) -> Result<(), &'static str> {
        let (sender, outcome) = oneshot::channel();
        let mut table = self.table();
        let Some(Pending::Send(reply)) = table.pending.remove(&seq) else {
            return Err("a transfer that was not asked for");
        };
        table.sends.insert(transfer, sender);
        drop(table);
        if reply
            .send(Ok(Opened {
                transfer,
                slots,
                offset,
                outcome,
            }))
            .is_err()
        {
            // The caller stopped waiting, and its lease ends with it.
            self.send_now(&ToDaemon::AbortSend { transfer });
        }
        Ok(())
    }

    /// A lease whose end was not said yet. Messages may still come for one that has ended here.
    fn receive(&self, lease: LeaseId) -> Option<Arc<Receive>> {
        self.table().receives.get(&lease)?.upgrade()
    }

    fn leased(
        self: &Arc<Self>,
        seq: RequestSeq,
        id: LeaseId,
        slots: Vec<SlotRef>,
        offer: Option<Bytes>,
    ) -> Result<(), &'static str> {
        let Some(Pending::Lease { pool, reply }) = self.table().pending.remove(&seq) else {
            return Err("a lease that was not asked for");
        };
        let lease = crate::lease::Lease::new(pool, id, slots)?;
        let receive = offer.map(|offer| {
            let receive = Arc::new(Receive::new(Arc::clone(&lease)));
            self.table().receives.insert(id, Arc::downgrade(&receive));
            (receive, offer)
        });
        // Where nobody waits any more the lease is dropped here, which ends it.
        answer(reply, Ok(Granted { lease, receive }));
        Ok(())
    }

    /// The session is over: everybody who waits is told so.
    fn gone(&self) {
        self.close();
        let mut table = self.table();
        table.gone = true;
        let Table {
            pending,
            receives,
            sends,
            ..
        } = &mut *table;
        // Dropping a reply's sender tells its caller.
        let pending = std::mem::take(pending);
        let receives = std::mem::take(receives);
        let sends = std::mem::take(sends);
        drop(table);
        drop(pending);
        let outcome = Outcome::Failed(Failure::DaemonGone);
        for receive in receives
            .into_values()
            .filter_map(|receive| receive.upgrade())
        {
            // Its only error is about a delivery, which this is not.
            let _ = receive.end(outcome);
        }
        for sender in sends.into_values() {
            answer(sender, outcome);
        }
    }
}

/// Answers a caller. One that stopped waiting does not mind.
fn answer<T>(reply: oneshot::Sender<T>, value: T) {
    let _ = reply.send(value);
}

async fn welcomed(reader: &mut FrameReader) -> Result<Welcome, ConnectError> {
    let frame = reader
        .recv()
        .await
        .ok()
        .flatten()
        .ok_or(ConnectError::Closed)?;
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

async fn read(shared: Arc<Shared>, mut reader: FrameReader) {
    loop {
        let frame = tokio::select! {
            frame = reader.recv() => frame,
            () = shared.closed() => break,
        };
        let frame = match frame {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(error) => {
                tracing::warn!("read from the daemon: {error}");
                break;
            }
        };
        let message = match ToEngine::decode(frame.bytes) {
            Ok(message) => message,
            Err(error) => {
                tracing::error!("the daemon sent bytes that are no message: {error}");
                break;
            }
        };
        if let Err(what) = shared.handle(message) {
            tracing::error!("the daemon broke the protocol: {what}");
            break;
        }
    }
    shared.gone();
}

async fn write(shared: Arc<Shared>, mut writer: FrameWriter, mut queue: mpsc::Receiver<Outgoing>) {
    let mut batch = Vec::with_capacity(BATCH_MAX);
    loop {
        let count = tokio::select! {
            count = queue.recv_many(&mut batch, BATCH_MAX) => count,
            () = shared.closed() => break,
        };
        if count == 0 {
            break;
        }
        let written = tokio::select! {
            written = write_batch(&mut writer, &mut batch) => written,
            () = shared.closed() => break,
        };
        if let Err(error) = written {
            tracing::warn!("write to the daemon: {error}");
            break;
        }
    }
    // The reader tells whoever waits.
    shared.close();
}

async fn write_batch(
    writer: &mut FrameWriter,
    batch: &mut Vec<Outgoing>,
) -> Result<(), fabric_ipc::SendError> {
    for outgoing in batch.drain(..) {
        match outgoing {
            Outgoing::Message(bytes) => {
                if writer.queued_bytes() + bytes.len() > fabric_ipc::FRAME_BYTES_MAX as usize {
                    writer.flush().await?;
                }
                writer.queue(&bytes)?;
            }
            Outgoing::WithMemory(bytes, memory) => writer.send(&bytes, &[memory.as_fd()]).await?,
        }
    }
    writer.flush().await
}
