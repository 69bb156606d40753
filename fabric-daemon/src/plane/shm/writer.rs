//! The source's side: one connection for each link, which says what is to be copied.
//!
//! ```text
//!  submit ─▶ inbox ─▶ Session ──Pool, Attach, Write, Drain, Cancel──▶ destination
//!                       │ ▲                                              │
//!                       │ └──────────Completed, Stopped, Refused─────────┘
//!                       ▼
//!                Written, WriterFailed, ReadsStopped
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use fabric_ipc::{Connection, FrameError, FrameReader, FrameWriter, SendError};
use fabric_proto::ids::{GrantId, PoolId, Secret, TransferId};
use fabric_proto::pool::PageRun;
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tracing::{debug, error, info};

use super::codec::{DecodeError, RUNS_PER_WRITE_MAX, Reply, Request};
use super::{BYTES_OUTSTANDING_MAX, RUNS_OUTSTANDING_MAX};
use crate::plane::faults::Faults;
use crate::plane::lock;
use crate::plane::pools::Pool;
use crate::plane::registry::Registration;
use crate::plane::source::Source;

/// The source's end of a link.
#[derive(Debug)]
pub(super) struct Link {
    path: PathBuf,
    faults: Arc<Faults>,
    inbox: Mutex<Inbox>,
    ready: Notify,
    down: Notify,
}

#[derive(Debug, Default)]
struct Inbox {
    // Bounded by the machine, which counts every command that was not answered.
    orders: VecDeque<Order>,
    is_down: bool,
}

/// What `submit` asks of a link.
#[derive(Debug)]
pub(super) enum Order {
    Drain(TransferId),
    Open(Opening),
    Stop(TransferId),
    Write(TransferId, PageRun),
}

/// An attempt that begins.
#[derive(Debug)]
pub(super) struct Opening {
    // Before `source`: the writer is forgotten, then comes the proof.
    pub(super) registration: Registration<Arc<Link>>,
    pub(super) source: Source,
    pub(super) key: Secret,
}

impl Link {
    pub(super) fn new(path: PathBuf, faults: Arc<Faults>) -> Self {
        Self {
            path,
            faults,
            inbox: Mutex::default(),
            ready: Notify::new(),
            down: Notify::new(),
        }
    }

    /// Asks something of the link. Where it is down, the order is dropped, and an opening with it.
    pub(super) fn order(&self, order: Order) {
        let mut inbox = lock(&self.inbox);
        if inbox.is_down {
            // The lock is not held while the order is dropped: that tells the registry.
            drop(inbox);
            drop(order);
            return;
        }
        inbox.orders.push_back(order);
        drop(inbox);
        self.ready.notify_one();
    }

    /// Ends the link's task.
    pub(super) fn take_down(&self) {
        self.down.notify_one();
    }

    /// Serves the link until it is taken down.
    pub(super) async fn run(self: Arc<Self>) {
        tokio::select! {
            () = self.down.notified() => {}
            () = self.serve() => {}
        }
        // Dropping `serve` has dropped its session, with every attempt: see `Session`.
        let orders = {
            let mut inbox = lock(&self.inbox);
            inbox.is_down = true;
            std::mem::take(&mut inbox.orders)
        };
        drop(orders);
    }

    async fn serve(&self) {
        loop {
            self.ready.notified().await;
            while let Some(order) = self.next() {
                let Order::Open(opening) = order else {
                    debug!("an order for a writer that is gone");
                    continue;
                };
                let stream = match UnixStream::connect(&self.path).await {
                    Ok(stream) => stream,
                    Err(error) => {
                        info!(path = %self.path.display(), "connect to the peer: {error}");
                        opening.source.fail();
                        continue;
                    }
                };
                let mut session = Session::new(stream, Arc::clone(&self.faults));
                let error = session.run(self, opening).await;
                info!(path = %self.path.display(), "connection to the peer ended: {error}");
                session.fail();
            }
        }
    }

    fn next(&self) -> Option<Order> {
        lock(&self.inbox).orders.pop_front()
    }
}

/// One connection, and the attempts that it carries.
///
/// An attempt ends, and with its [`Source`] comes the proof that nobody reads the pool for it, when
/// the destination has said `Stopped` or `Refused`: it has then dropped the attempt itself.
///
/// Or it ends with this connection, without a word of the destination. Then its process may still
/// read our pool: no longer than one piece if it is alive, since it stops when the connection
/// closes; for ever, for all that we know, if it is stopped. No means of ours can end that reading,
/// and none is needed for S2: the mapping is read-only there, and the bytes can go nowhere but into
/// slots of the grant, under its lock. There they count for nothing, because the destination closes
/// that grant before it verifies (S2), and then every page must match the checksum that its source
/// engine sealed, under a manifest of this very transfer. Bytes that changed owner in the meantime
/// do not match, so the page is corrupt, and nobody reads it. And they stay where they were before:
/// on this host, in the hands of a daemon that was trusted with the whole pool.
#[derive(Debug)]
struct Session {
    reader: FrameReader,
    writer: FrameWriter,
    faults: Arc<Faults>,
    /// Pools that the peer has mapped. Gone ones are forgotten, so that it unmaps them.
    pools: BTreeMap<PoolId, Weak<Pool>>,
    attempts: BTreeMap<GrantId, Attempt>,
    transfers: HashMap<TransferId, GrantId>,
    outstanding: Outstanding,
}

#[derive(Debug)]
struct Attempt {
    _registration: Registration<Arc<Link>>,
    source: Source,
    /// Not yet asked for.
    runs: VecDeque<PageRun>,
    end: End,
    outstanding: Outstanding,
    /// Asked for since the attempt began.
    posted_bytes: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// None in sight.
    Open,
    /// A drain is to be asked for after the runs.
    DrainDue,
    /// A drain was asked for.
    DrainAsked,
    /// A cancel was asked for.
    CancelAsked,
}

/// What was asked for and not answered.
#[derive(Clone, Copy, Debug, Default)]
struct Outstanding {
    runs: u64,
    bytes: u64,
}

impl Session {
    fn new(stream: UnixStream, faults: Arc<Faults>) -> Self {
        let (reader, writer) = Connection::new(stream).split();
        Self {
            reader,
            writer,
            faults,
            pools: BTreeMap::new(),
            attempts: BTreeMap::new(),
            transfers: HashMap::new(),
            outstanding: Outstanding::default(),
        }
    }

    /// Serves the link over this connection, until the connection fails.
    async fn run(&mut self, link: &Link, first: Opening) -> SessionError {
        match self.serve(link, first).await {
            Ok(never) => match never {},
            Err(error) => error,
        }
    }

    async fn serve(
        &mut self,
        link: &Link,
        first: Opening,
    ) -> Result<std::convert::Infallible, SessionError> {
        self.open(first).await?;
        let mut sweep = tokio::time::interval(SWEEP_EVERY);
        loop {
            while let Some(order) = link.next() {
                self.take(order).await?;
            }
            self.post()?;
            tokio::select! {
                () = link.ready.notified() => {}
                frame = self.reader.recv() => {
                    let frame = frame?.ok_or(SessionError::Closed)?;
                    self.hear(Reply::decode(&frame.bytes)?)?;
                }
                flushed = self.writer.flush(), if self.writer.queued_bytes() > 0 => flushed?,
                _ = sweep.tick() => self.forget_pools().await?,
            }
        }
    }

    async fn take(&mut self, order: Order) -> Result<(), SessionError> {
        match order {
            Order::Drain(transfer) => {
                if let Some(attempt) = self.attempt(transfer)
                    && attempt.end == End::Open
                {
                    attempt.end = End::DrainDue;
                }
            }
            Order::Open(opening) => self.open(opening).await?,
            Order::Stop(transfer) => self.cancel(transfer).await?,
            Order::Write(transfer, run) => {
                if let Some(attempt) = self.attempt(transfer)
                    && attempt.end == End::Open
                {
                    if attempt.source.area.holds(run) {
                        attempt.runs.push_back(run);
                    } else {
                        error!(%transfer, "the machine asked for {run:?}, not the transfer's");
                        attempt.source.failed();
                        self.cancel(transfer).await?;
                    }
                }
            }
        }
        Ok(())
    }

    fn attempt(&mut self, transfer: TransferId) -> Option<&mut Attempt> {
        let grant = self.transfers.get(&transfer)?;
        self.attempts.get_mut(grant)
    }

    async fn open(&mut self, opening: Opening) -> Result<(), SessionError> {
        let Opening {
            registration,
            source,
            key,
        } = opening;
        let (pool, grant) = (source.pool_id, source.grant());
        let slots = source.area.slots().to_vec();
        if self.attempts.contains_key(&grant) {
            error!(%grant, "the grant has a writer");
            drop(registration);
            source.fail();
            return Ok(());
        }
        let memory = Arc::clone(&source.pool);
        // From here on, whatever fails ends this attempt with the session.
        self.transfers.insert(source.transfer(), grant);
        let attempt = Attempt {
            _registration: registration,
            source,
            runs: VecDeque::new(),
            end: End::Open,
            outstanding: Outstanding::default(),
            posted_bytes: 0,
        };
        self.attempts.insert(grant, attempt);
        if !self.pools.contains_key(&pool) {
            let spec = memory.spec;
            let frame = Request::Pool { pool, spec }.encode();
            self.writer.send(&frame, &[memory.fd.as_fd()]).await?;
            self.pools.insert(pool, Arc::downgrade(&memory));
        }
        let attach = Request::Attach {
            grant,
            key,
            pool,
            slots,
        };
        self.queue(&attach).await
    }

    /// Asks that nothing more be copied for a transfer, and drops what was not yet asked for.
    async fn cancel(&mut self, transfer: TransferId) -> Result<(), SessionError> {
        let Some(attempt) = self.attempt(transfer) else {
            return Ok(());
        };
        attempt.runs.clear();
        if attempt.end == End::CancelAsked {
            return Ok(());
        }
        attempt.end = End::CancelAsked;
        let grant = attempt.source.grant();
        self.queue(&Request::Cancel { grant }).await
    }

    /// Asks for as many writes as may be outstanding, of all attempts in turn, and for the drains
    /// that are due.
    fn post(&mut self) -> Result<(), SessionError> {
        let mut progress = true;
        while progress {
            progress = false;
            for (grant, attempt) in &mut self.attempts {
                if self.writer.queued_bytes() > QUEUED_BYTES_MAX {
                    return Ok(());
                }
                let stalls = self.faults.room(attempt.posted_bytes) == 0;
                let drained = attempt.runs.is_empty() && attempt.end == End::DrainDue && !stalls;
                if drained {
                    attempt.end = End::DrainAsked;
                    let frame = Request::Drain { grant: *grant }.encode();
                    self.writer.queue(&frame)?;
                    continue;
                }
                let runs = attempt.take_runs(&mut self.outstanding, &self.faults);
                if !runs.is_empty() {
                    progress = true;
                    let frame = Request::Write {
                        grant: *grant,
                        runs,
                    };
                    self.writer.queue(&frame.encode())?;
                }
            }
        }
        Ok(())
    }

    fn hear(&mut self, reply: Reply) -> Result<(), SessionError> {
        match reply {
            Reply::Completed { grant, runs, bytes } => {
                // After a refusal, the completions before it have been taken as lost.
                let Some(attempt) = self.attempts.get_mut(&grant) else {
                    return Ok(());
                };
                attempt.outstanding.take(u64::from(runs), bytes)?;
                self.outstanding.take(u64::from(runs), bytes)?;
                if bytes > 0 {
                    attempt.source.written(bytes);
                }
            }
            Reply::Refused { grant } => {
                if let Some(attempt) = self.close(grant)? {
                    info!(%grant, "the destination refuses the writer");
                    attempt.source.failed();
                }
            }
            Reply::Stopped { grant } => {
                if let Some(attempt) = self.close(grant)? {
                    let whole = attempt.outstanding.runs == 0;
                    let asked = match attempt.end {
                        End::CancelAsked => true,
                        End::DrainAsked => whole,
                        End::DrainDue | End::Open => false,
                    };
                    if !asked {
                        attempt.source.failed();
                        return Err(SessionError::Stopped);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes an attempt out. Its drop is the proof: see [`Session`].
    fn close(&mut self, grant: GrantId) -> Result<Option<Attempt>, SessionError> {
        let Some(attempt) = self.attempts.remove(&grant) else {
            return Ok(None);
        };
        let transfer = attempt.source.transfer();
        if self.transfers.get(&transfer) == Some(&grant) {
            self.transfers.remove(&transfer);
        }
        let Outstanding { runs, bytes } = attempt.outstanding;
        self.outstanding.take(runs, bytes)?;
        Ok(Some(attempt))
    }

    /// Tells the machine that every attempt has failed, and ends them: see [`Session`].
    fn fail(self) {
        for attempt in self.attempts.into_values() {
            attempt.source.failed();
        }
    }

    async fn forget_pools(&mut self) -> Result<(), SessionError> {
        let is_gone = |(_, pool): &(&PoolId, &Weak<Pool>)| pool.strong_count() == 0;
        let gone: Vec<PoolId> = self
            .pools
            .iter()
            .filter(is_gone)
            .map(|(id, _)| *id)
            .collect();
        for pool in gone {
            self.pools.remove(&pool);
            self.queue(&Request::Forget { pool }).await?;
        }
        Ok(())
    }

    async fn queue(&mut self, request: &Request) -> Result<(), SessionError> {
        if self.writer.queued_bytes() > QUEUED_BYTES_MAX {
            self.writer.flush().await?;
        }
        Ok(self.writer.queue(&request.encode())?)
    }
}

impl Attempt {
    /// Takes runs for one frame off the queue, as many as may be outstanding. Pages that continue
    /// each other become one run.
    fn take_runs(&mut self, outstanding: &mut Outstanding, faults: &Faults) -> Vec<PageRun> {
        let mut runs: Vec<PageRun> = Vec::new();
        let mut frame_bytes = 0;
        while outstanding.has_room()
            && frame_bytes < WRITE_BYTES_MAX
            && faults.room(self.posted_bytes) > 0
        {
            let Some(run) = self.runs.pop_front() else {
                break;
            };
            let bytes = self.source.area.run_bytes(run);
            let is_full = runs.len() == RUNS_PER_WRITE_MAX;
            match runs.last_mut() {
                Some(last) if last.region == run.region && last.first + last.count == run.first => {
                    last.count += run.count;
                }
                Some(_) if is_full => {
                    self.runs.push_front(run);
                    break;
                }
                Some(_) | None => {
                    runs.push(run);
                    outstanding.runs += 1;
                    self.outstanding.runs += 1;
                }
            }
            outstanding.bytes += bytes;
            self.outstanding.bytes += bytes;
            self.posted_bytes += bytes;
            frame_bytes += bytes;
        }
        runs
    }
}

impl Outstanding {
    fn has_room(self) -> bool {
        self.runs < RUNS_OUTSTANDING_MAX && self.bytes < BYTES_OUTSTANDING_MAX
    }

    fn take(&mut self, runs: u64, bytes: u64) -> Result<(), SessionError> {
        let left = (self.runs.checked_sub(runs), self.bytes.checked_sub(bytes));
        let (Some(runs), Some(bytes)) = left else {
            return Err(SessionError::Completed);
        };
        *self = Self { runs, bytes };
        Ok(())
    }
}

/// Why a connection is of no use any more.
#[derive(Debug, Error)]
enum SessionError {
    #[error("the peer closed it")]
    Closed,
    #[error("the peer completed more than was asked for")]
    Completed,
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    #[error(transparent)]
    Recv(#[from] FrameError),
    #[error(transparent)]
    Send(#[from] SendError),
    #[error("the peer stopped a writer that had not ended")]
    Stopped,
}

/// Above it, the next frames wait in the queues that the machine bounds.
const QUEUED_BYTES_MAX: usize = 1024 * 1024;

/// After so many bytes the next attempt has its turn.
const WRITE_BYTES_MAX: u64 = 1024 * 1024;

/// How often the peer is told of pools that are gone.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
