//! The destination's side: one task for each connection of a source's daemon, which does the
//! copying.
//!
//! The task takes frames in and copies in turn: after every piece it looks at the socket again, so
//! a cancel waits for one piece and for nothing else.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use fabric_ipc::{
    Connection, Frame, FrameError, FrameReader, FrameWriter, Mapping, MappingError, SendError,
};
use fabric_proto::host::StoppedBy;
use fabric_proto::ids::{GrantId, PoolId, Secret};
use fabric_proto::pool::{PageRun, PoolSpec};
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tracing::{debug, info, warn};

use super::codec::{DecodeError, Reply, Request};
use super::{RUNS_OUTSTANDING_MAX, Shared};
use crate::plane::area::Area;
use crate::plane::grants::{Attached, Cursor, GrantClosed};
use crate::plane::lock;

/// Serves one connection to its end. The grants that were attached on it are closed then, by fence
/// if not by drain before: each [`Attached`] is dropped.
pub(super) async fn serve(shared: Arc<Shared>, stream: UnixStream) {
    let (reader, writer) = Connection::new(stream).split();
    let peer = Peer {
        shared,
        attachments: Mutex::default(),
        work: Mutex::default(),
        ready: Notify::new(),
    };
    let ended = tokio::select! {
        ended = peer.receive(reader) => ended,
        ended = peer.copy(writer) => ended,
    };
    match ended {
        Ok(()) => debug!("a peer closed its connection"),
        Err(error @ (PeerError::Recv(FrameError::Io(_)) | PeerError::Send(_))) => {
            info!("connection of a peer ended: {error}");
        }
        Err(error) => {
            // Relaxed, here and below: a statistic.
            peer.shared.refused.fetch_add(1, Ordering::Relaxed);
            warn!("closed the connection of a peer: {error}");
        }
    }
}

struct Peer {
    shared: Arc<Shared>,
    attachments: Mutex<BTreeMap<GrantId, Arc<Attachment>>>,
    work: Mutex<Work>,
    ready: Notify,
}

/// A grant that the peer writes under, and where it writes from.
struct Attachment {
    grant: GrantId,
    attached: Attached,
    pool: Arc<SourcePool>,
    area: Area,
    /// The peer was told that it is over; what is left of its work is skipped.
    ///
    /// Only the connection's one task touches it, in program order: it is atomic since a task may
    /// move between threads, not since two share it, so Relaxed will do. No proof hangs on it: the
    /// grant's gate makes that, once, whoever closes it.
    ended: AtomicBool,
}

struct SourcePool {
    spec: PoolSpec,
    memory: Mapping,
}

#[derive(Default)]
struct Work {
    /// At most [`OPS_MAX`].
    ops: VecDeque<Op>,
    /// Runs of the writes among them. At most [`RUNS_OUTSTANDING_MAX`].
    runs: u64,
    /// Goes before `ops`. At most one for each attachment.
    cancelled: VecDeque<Arc<Attachment>>,
}

enum Op {
    Drain(Arc<Attachment>),
    Refuse(GrantId),
    Write(Arc<Attachment>, Vec<PageRun>),
}

impl Peer {
    async fn receive(&self, mut reader: FrameReader) -> Result<(), PeerError> {
        let mut pools = HashMap::new();
        while let Some(Frame { bytes, fds }) = reader.recv().await? {
            let request = Request::decode(&bytes)?;
            if !fds.is_empty() && !matches!(request, Request::Pool { .. }) {
                return Err(PeerError::Descriptors { got: fds.len() });
            }
            match request {
                Request::Attach {
                    grant,
                    key,
                    pool,
                    slots,
                } => {
                    let pool = pools.get(&pool).ok_or(PeerError::NoPool(pool))?;
                    self.attach(grant, &key, pool, &slots)?;
                }
                Request::Cancel { grant } => {
                    if let Some(attachment) = self.detach(grant) {
                        lock(&self.work).cancelled.push_back(attachment);
                    }
                }
                Request::Drain { grant } => {
                    if let Some(attachment) = self.find(grant) {
                        self.push(Op::Drain(attachment))?;
                    }
                }
                Request::Forget { pool } => {
                    pools.remove(&pool);
                }
                Request::Pool { pool, spec } => {
                    if pools.len() == POOLS_MAX || pools.contains_key(&pool) {
                        return Err(PeerError::Pool(pool));
                    }
                    pools.insert(pool, SourcePool::map(spec, fds)?);
                }
                Request::Write { grant, runs } => self.write(grant, runs)?,
            }
            self.ready.notify_one();
        }
        Ok(())
    }

    fn attach(
        &self,
        grant: GrantId,
        key: &Secret,
        pool: &Arc<SourcePool>,
        slots: &[u32],
    ) -> Result<(), PeerError> {
        let Some(area) = Area::new(&pool.spec, slots.iter().copied()) else {
            return Err(PeerError::Slot);
        };
        let shared = &self.shared;
        let attached = match shared.grants.attach(grant, key, |link| shared.is_up(link)) {
            Ok(attached) => attached,
            Err(error) => {
                shared.refused.fetch_add(1, Ordering::Relaxed);
                warn!(%grant, "refused a writer: {error}");
                return self.push(Op::Refuse(grant));
            }
        };
        let layout = &pool.spec.layout;
        let theirs = (u64::from(layout.page_bytes), layout.regions);
        let ours = (attached.page_bytes(), attached.regions());
        if theirs != ours {
            warn!(%grant, "refused a writer: pages and regions {theirs:?}, need {ours:?}");
            return self.push(Op::Refuse(grant));
        }
        let attachment = Attachment {
            grant,
            attached,
            pool: Arc::clone(pool),
            area,
            ended: AtomicBool::new(false),
        };
        lock(&self.attachments).insert(grant, Arc::new(attachment));
        Ok(())
    }

    fn write(&self, grant: GrantId, runs: Vec<PageRun>) -> Result<(), PeerError> {
        // Not the peer's fault where we have just refused it.
        let Some(attachment) = self.find(grant) else {
            return Ok(());
        };
        for run in &runs {
            // On both sides: in the source's pool, and within what the grant allows (S7).
            let allowed = attachment.attached.check(*run);
            if let Err(error) = allowed {
                warn!(%grant, "refused a writer: {error}");
                attachment.end();
                self.detach(grant);
                return self.push(Op::Refuse(grant));
            }
            if !attachment.area.holds(*run) {
                return Err(PeerError::Slot);
            }
        }
        self.push(Op::Write(attachment, runs))
    }

    fn find(&self, grant: GrantId) -> Option<Arc<Attachment>> {
        lock(&self.attachments).get(&grant).map(Arc::clone)
    }

    fn detach(&self, grant: GrantId) -> Option<Arc<Attachment>> {
        lock(&self.attachments).remove(&grant)
    }

    fn push(&self, op: Op) -> Result<(), PeerError> {
        let mut work = lock(&self.work);
        if let Op::Write(_, runs) = &op {
            work.runs += u64::try_from(runs.len()).expect("lengths fit 64 bits");
        }
        // An honest peer keeps within these, see `writer::Session`.
        if work.runs > RUNS_OUTSTANDING_MAX || work.ops.len() == OPS_MAX {
            return Err(PeerError::TooMuch {
                runs: work.runs,
                ops: work.ops.len(),
            });
        }
        work.ops.push_back(op);
        Ok(())
    }

    /// Does the work, in the order in which it was asked for; cancels go before.
    async fn copy(&self, writer: FrameWriter) -> Result<(), PeerError> {
        let mut replies = Replies {
            writer,
            completed: None,
        };
        loop {
            self.do_cancels(&mut replies)?;
            let Some(op) = self.next_op() else {
                replies.flush().await?;
                self.ready.notified().await;
                continue;
            };
            match op {
                Op::Drain(attachment) => self.drain(&attachment, &mut replies)?,
                Op::Refuse(grant) => replies.say(Reply::Refused { grant })?,
                Op::Write(attachment, runs) => {
                    self.copy_runs(&attachment, &runs, &mut replies).await?;
                }
            }
        }
    }

    fn next_op(&self) -> Option<Op> {
        let mut work = lock(&self.work);
        let op = work.ops.pop_front();
        if let Some(Op::Write(_, runs)) = &op {
            work.runs -= u64::try_from(runs.len()).expect("lengths fit 64 bits");
        }
        op
    }

    fn do_cancels(&self, replies: &mut Replies) -> Result<(), PeerError> {
        loop {
            let Some(attachment) = lock(&self.work).cancelled.pop_front() else {
                return Ok(());
            };
            let grant = attachment.grant;
            if attachment.end() {
                replies.say(Reply::Stopped { grant })?;
            }
        }
    }

    fn drain(&self, attachment: &Attachment, replies: &mut Replies) -> Result<(), PeerError> {
        if attachment.ended.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let grant = attachment.grant;
        self.detach(grant);
        // All that was asked for before has been copied, in order, by this very task.
        let reply = if attachment.attached.close(StoppedBy::Drain) {
            Reply::Stopped { grant }
        } else {
            Reply::Refused { grant }
        };
        replies.say(reply)
    }

    async fn copy_runs(
        &self,
        attachment: &Attachment,
        runs: &[PageRun],
        replies: &mut Replies,
    ) -> Result<(), PeerError> {
        let grant = attachment.grant;
        let mut cursor = Cursor::default();
        while cursor.index < runs.len() {
            if attachment.ended.load(Ordering::Relaxed) {
                return Ok(());
            }
            let before = cursor.index;
            let copied = attachment.attached.copy(
                &attachment.pool.memory,
                &attachment.area,
                runs,
                &mut cursor,
                &self.shared.faults,
            );
            match copied {
                Ok(bytes) => {
                    let runs = u32::try_from(cursor.index - before).expect("a frame has few runs");
                    replies.completed(grant, runs, bytes)?;
                }
                Err(GrantClosed) => {
                    attachment.end();
                    self.detach(grant);
                    return replies.say(Reply::Refused { grant });
                }
            }
            if replies.are_due() {
                replies.flush().await?;
            }
            // To the socket: there may be a cancel.
            tokio::task::yield_now().await;
            self.do_cancels(replies)?;
        }
        Ok(())
    }
}

impl Attachment {
    /// Closes the grant, if it is open, so that nothing is read or written for it any more; whether
    /// the peer is to be told.
    fn end(&self) -> bool {
        self.attached.close(StoppedBy::Fence);
        !self.ended.swap(true, Ordering::Relaxed)
    }
}

impl SourcePool {
    fn map(spec: PoolSpec, fds: Vec<OwnedFd>) -> Result<Arc<Self>, PeerError> {
        let got = fds.len();
        let [fd] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| PeerError::Descriptors { got })?;
        // Checks the seals: a file that shrinks would kill us.
        let memory = Mapping::read_only(&fd, spec.bytes())?;
        Ok(Arc::new(Self { spec, memory }))
    }
}

/// What is due to the peer. Completions of one grant are added up.
struct Replies {
    writer: FrameWriter,
    completed: Option<(GrantId, u32, u64)>,
}

impl Replies {
    fn completed(&mut self, grant: GrantId, runs: u32, bytes: u64) -> Result<(), PeerError> {
        match &mut self.completed {
            Some(sum) if sum.0 == grant && sum.1 < u32::MAX - runs => {
                sum.1 += runs;
                sum.2 += bytes;
            }
            Some(_) | None => {
                self.sum_up()?;
                self.completed = Some((grant, runs, bytes));
            }
        }
        Ok(())
    }

    fn are_due(&self) -> bool {
        let bytes = self.completed.map_or(0, |(_, _, bytes)| bytes);
        bytes >= COMPLETED_BYTES || self.writer.queued_bytes() > REPLIES_BYTES
    }

    fn say(&mut self, reply: Reply) -> Result<(), PeerError> {
        self.sum_up()?;
        Ok(self.writer.queue(&reply.encode())?)
    }

    async fn flush(&mut self) -> Result<(), PeerError> {
        self.sum_up()?;
        Ok(self.writer.flush().await?)
    }

    fn sum_up(&mut self) -> Result<(), PeerError> {
        if let Some((grant, runs, bytes)) = self.completed.take() {
            let reply = Reply::Completed { grant, runs, bytes };
            self.writer.queue(&reply.encode())?;
        }
        Ok(())
    }
}

/// Why a peer's connection is closed.
#[derive(Debug, Error)]
enum PeerError {
    #[error("a frame with {got} descriptors")]
    Descriptors { got: usize },
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    #[error("its memory cannot be mapped: {0}")]
    Map(#[from] MappingError),
    #[error("it attaches from pool {0}, which it has not named")]
    NoPool(PoolId),
    #[error("it names pool {0} twice, or too many pools")]
    Pool(PoolId),
    #[error(transparent)]
    Recv(#[from] FrameError),
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("it copies from a slot or page outside its pool")]
    Slot,
    #[error("it has {runs} runs in {ops} requests outstanding")]
    TooMuch { runs: u64, ops: usize },
}

/// Most pools of a peer at a time.
const POOLS_MAX: usize =
    fabric_proto::limits::ENGINES_MAX * fabric_proto::limits::POOLS_PER_ENGINE_MAX;

/// Most requests of a peer that wait: each write has a run, and each transfer an attach and an end.
const OPS_MAX: usize = (1 << 16) + 2 * fabric_proto::limits::TRANSFERS_MAX;

const _: () = assert!(OPS_MAX as u64 > RUNS_OUTSTANDING_MAX);

/// The source hears of completions about every so many bytes: often enough to keep it going, seldom
/// enough to cost nothing.
const COMPLETED_BYTES: u64 = 1024 * 1024;

/// Replies that go out with the next piece.
const REPLIES_BYTES: usize = 16 * 1024;
