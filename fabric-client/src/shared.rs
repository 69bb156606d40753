//! What a session's task and its handles share: the requests, leases and transfers under way.
//!
//! Lock order: the table, then nothing. No lease is ever dropped while the table is locked, since
//! a lease's `Drop` locks it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use fabric_proto::ids::{LeaseId, PoolId, RequestSeq, SlotRef, TransferId};
use fabric_proto::limits;
use fabric_proto::outcome::{Failure, Outcome, Rejection};
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::{Purpose, ToDaemon, ToEngine};
use tokio::sync::{Notify, Semaphore, oneshot, watch};

use crate::closed::{Closed, Misbehaviour};
use crate::lease::{Lease, LeaseRequest};
use crate::outbox::Outbox;
use crate::pool::PoolShared;
use crate::receive::Receive;
use crate::send::{SendState, Transfer};

pub(crate) struct Shared {
    pub(crate) outbox: Outbox,
    /// Threads that may checksum at a time.
    pub(crate) workers: Arc<Semaphore>,
    closed: watch::Sender<Option<Closed>>,
    finishing: Notify,
    next_seq: AtomicU64,
    table: Mutex<Table>,
}

/// What is waited for. Bounded: [`limits::LEASES_PER_ENGINE_MAX`] leases, asked for or held, a
/// transfer or a request for one for each, and a pool's registration for each call.
#[derive(Default)]
struct Table {
    /// The session is over: nothing is noted any more.
    gone: bool,
    pending: BTreeMap<RequestSeq, Pending>,
    leases_pending: usize,
    pools: BTreeSet<PoolId>,
    leases: BTreeMap<LeaseId, Kind>,
    sends: BTreeMap<TransferId, Arc<SendState>>,
}

enum Kind {
    Held,
    Receiving(Weak<Receive>),
}

type Reply<T> = oneshot::Sender<Result<T, Rejection>>;

/// Whose reply. One that nobody waits for any more is taken in all the same, and undone.
enum Pending {
    Pool(Reply<PoolId>),
    Lease {
        wanted: WantedLease,
        reply: Reply<Granted>,
    },
    Send {
        /// Kept until the answer, so that its end can never overtake the transfer's.
        lease: Arc<Lease>,
        reply: Reply<Transfer>,
    },
}

struct WantedLease {
    pool: Arc<PoolShared>,
    purpose: Purpose,
    /// How many slots the tokens need.
    count: u64,
    named: Vec<fabric_proto::ids::SlotIndex>,
}

/// A lease as the daemon gave it.
pub(crate) enum Granted {
    Held(Arc<Lease>),
    Receiving(Arc<Receive>, Bytes),
}

impl Shared {
    pub(crate) fn new() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            outbox: Outbox::new(),
            workers: Arc::new(Semaphore::new(workers)),
            closed: watch::channel(None).0,
            finishing: Notify::new(),
            next_seq: AtomicU64::new(1),
            table: Mutex::new(Table::default()),
        }
    }

    /// Registers a pool. `None` where the session is over.
    pub(crate) async fn register_pool(
        &self,
        spec: PoolSpec,
        memory: OwnedFd,
    ) -> Option<Result<PoolId, Rejection>> {
        let seq = self.next_seq();
        let (reply, answer) = oneshot::channel();
        let message = ToDaemon::RegisterPool { seq, spec };
        let asked = self.request(seq, &message, Some(memory), Pending::Pool(reply));
        match asked.await? {
            Ok(()) => answer.await.ok(),
            Err(reason) => Some(Err(reason)),
        }
    }

    /// Asks for a lease. `None` where the session is over.
    pub(crate) async fn lease(
        &self,
        pool: Arc<PoolShared>,
        request: LeaseRequest,
        purpose: Purpose,
    ) -> Option<Result<Granted, Rejection>> {
        let (value, limit) = (
            request.named.len() as u64,
            u64::from(limits::LEASE_SLOTS_MAX),
        );
        if value > limit {
            // More would not be a message, and the daemon would close the session.
            return Some(Err(Rejection::ExceedsLimit { value, limit }));
        }
        let seq = self.next_seq();
        let (reply, answer) = oneshot::channel();
        let wanted = WantedLease {
            purpose,
            count: pool.spec.slots_for(request.tokens.count),
            named: request.named.clone(),
            pool,
        };
        let message = request.message(seq, wanted.pool.id, purpose);
        let pending = Pending::Lease { wanted, reply };
        match self.request(seq, &message, None, pending).await? {
            Ok(()) => answer.await.ok(),
            Err(reason) => Some(Err(reason)),
        }
    }

    /// Asks for a transfer. `None` where the session is over.
    pub(crate) async fn open(
        &self,
        lease: Arc<Lease>,
        offer: Bytes,
    ) -> Option<Result<Transfer, Rejection>> {
        let (value, limit) = (offer.len() as u64, limits::OFFER_BYTES_MAX as u64);
        if value > limit {
            return Some(Err(Rejection::ExceedsLimit { value, limit }));
        }
        let seq = self.next_seq();
        let (reply, answer) = oneshot::channel();
        let id = lease.id;
        let message = ToDaemon::Send {
            seq,
            lease: id,
            offer,
        };
        let pending = Pending::Send { lease, reply };
        match self.request(seq, &message, None, pending).await? {
            Ok(()) => answer.await.ok(),
            Err(reason) => Some(Err(reason)),
        }
    }

    /// Queues messages that belong together, all or none, waiting for room. `None` where the
    /// session is over.
    ///
    /// Safe to cancel: then none is queued.
    pub(crate) async fn send(&self, messages: Vec<Bytes>) -> Option<()> {
        let bytes = messages.iter().map(Bytes::len).sum();
        let room = self.outbox.room(bytes).await?;
        self.outbox.push(room, messages, None);
        Some(())
    }

    /// Queues an end, which must not be lost and cannot wait.
    pub(crate) fn send_end(&self, message: &ToDaemon) {
        self.outbox.push_end(message.encode());
    }

    /// Waits until the session is over.
    pub(crate) async fn closed(&self) -> Closed {
        let mut closed = self.closed.subscribe();
        let known = closed.wait_for(Option::is_some).await;
        known
            .ok()
            .and_then(|closed| *closed)
            .unwrap_or(Closed::Local)
    }

    /// The last handle is gone: what is queued is written, then the session is over.
    pub(crate) fn finish(&self) {
        self.outbox.finish();
        self.finishing.notify_one();
    }

    /// Waits until the last handle is gone. For the session's one task.
    pub(crate) async fn finishing(&self) {
        self.finishing.notified().await;
    }

    /// The session is over: everybody who waits is told so, and nobody can wait any more.
    pub(crate) fn gone(&self, closed: Closed) {
        self.outbox.close();
        let mut table = self.table();
        table.gone = true;
        let pending = std::mem::take(&mut table.pending);
        let leases = std::mem::take(&mut table.leases);
        let sends = std::mem::take(&mut table.sends);
        drop(table);
        // Before whoever waits is told that the session is over: by then its outcomes are known.
        for kind in leases.into_values() {
            if let Kind::Receiving(receive) = kind
                && let Some(receive) = receive.upgrade()
            {
                receive.lose();
            }
        }
        for send in sends.into_values() {
            send.end(Outcome::Failed(Failure::DaemonGone));
        }
        self.closed.send_if_modified(|known| {
            let first = known.is_none();
            known.get_or_insert(closed);
            first
        });
        // Dropping a reply's sender tells its caller.
        drop(pending);
    }

    /// A lease has ended here: messages about it that are still on their way are about nothing.
    pub(crate) fn forget(&self, lease: LeaseId) {
        self.table().leases.remove(&lease);
    }

    /// Takes in one message. `Err` closes the session.
    pub(crate) fn handle(self: &Arc<Self>, message: ToEngine) -> Result<(), Misbehaviour> {
        match message {
            ToEngine::Welcome { .. } => Err(Misbehaviour::OutOfPlace),
            ToEngine::Rejected { seq, reason } => {
                match self.answered(seq)? {
                    Pending::Pool(reply) => answer(reply, Err(reason)),
                    Pending::Lease { reply, .. } => answer(reply, Err(reason)),
                    Pending::Send { reply, .. } => answer(reply, Err(reason)),
                }
                Ok(())
            }
            ToEngine::PoolRegistered { seq, pool } => self.pool_registered(seq, pool),
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
                let send = self.table().sends.remove(&transfer);
                // One that is not known was never opened, or is over; either changes nothing.
                send.map_or(Ok(()), |send| send.ended(transfer, outcome))
            }
            ToEngine::Expect { lease, checksums } => match self.receive(lease)? {
                Some(receive) => receive.expect(&checksums),
                None => Ok(()),
            },
            ToEngine::Verify {
                lease,
                attempt,
                pages,
                payload,
            } => match self.receive(lease)? {
                Some(receive) => receive.verify(attempt, pages, payload),
                None => Ok(()),
            },
            ToEngine::LeaseOutcome { lease, outcome } => match self.receive(lease)? {
                Some(receive) => receive.end(outcome),
                None => Ok(()),
            },
        }
    }

    fn pool_registered(&self, seq: RequestSeq, pool: PoolId) -> Result<(), Misbehaviour> {
        let Pending::Pool(reply) = self.answered(seq)? else {
            return Err(Misbehaviour::UnknownReply(seq));
        };
        if !self.table().pools.insert(pool) {
            return Err(Misbehaviour::OutOfPlace);
        }
        answer(reply, Ok(pool));
        Ok(())
    }

    fn leased(
        &self,
        seq: RequestSeq,
        id: LeaseId,
        slots: Vec<SlotRef>,
        offer: Option<Bytes>,
    ) -> Result<(), Misbehaviour> {
        let Pending::Lease { wanted, reply } = self.answered(seq)? else {
            return Err(Misbehaviour::UnknownReply(seq));
        };
        wanted.check(&slots)?;
        if self.table().leases.contains_key(&id) {
            return Err(Misbehaviour::LeaseTwice(id));
        }
        let purpose = wanted.purpose;
        let lease = Lease::new(wanted.pool, id, slots)?;
        let (granted, kind) = match (purpose, offer) {
            (Purpose::Hold, None) => (Granted::Held(lease), Kind::Held),
            (Purpose::Receive, Some(offer)) => {
                let receive = Arc::new(Receive::new(lease));
                let kind = Kind::Receiving(Arc::downgrade(&receive));
                (Granted::Receiving(receive, offer), kind)
            }
            (Purpose::Hold, Some(_)) | (Purpose::Receive, None) => {
                return Err(Misbehaviour::NotOfThatKind(id));
            }
        };
        // Before anybody can drop the lease, which takes it out again.
        self.table().leases.insert(id, kind);
        // Where nobody waits any more the lease is dropped here, which ends it.
        answer(reply, Ok(granted));
        Ok(())
    }

    fn send_opened(
        self: &Arc<Self>,
        seq: RequestSeq,
        id: TransferId,
        slots: u32,
        offset: u32,
    ) -> Result<(), Misbehaviour> {
        let Pending::Send { lease, reply } = self.answered(seq)? else {
            return Err(Misbehaviour::UnknownReply(seq));
        };
        let got = u64::from(slots) + u64::from(offset);
        let want = lease.slots.len() as u64;
        let state = Arc::new(SendState::new());
        let fresh = {
            let mut table = self.table();
            let before = table.sends.insert(id, Arc::clone(&state));
            before.is_none()
        };
        if slots == 0 || got > want || !fresh {
            return Err(Misbehaviour::Transfer {
                transfer: id,
                got,
                want,
            });
        }
        // Where nobody waits any more the transfer is dropped here, which aborts it and then ends
        // its lease.
        answer(reply, Ok(Transfer::new(lease, id, state, slots, offset)));
        Ok(())
    }

    /// A lease that receives. `None` for one that has ended here: the daemon did not know yet.
    fn receive(&self, lease: LeaseId) -> Result<Option<Arc<Receive>>, Misbehaviour> {
        match self.table().leases.get(&lease) {
            None => {
                tracing::trace!(%lease, "a message about a lease that has ended");
                Ok(None)
            }
            Some(Kind::Held) => Err(Misbehaviour::NotOfThatKind(lease)),
            Some(Kind::Receiving(receive)) => Ok(receive.upgrade()),
        }
    }

    fn answered(&self, seq: RequestSeq) -> Result<Pending, Misbehaviour> {
        let mut table = self.table();
        let pending = table.pending.remove(&seq);
        if let Some(Pending::Lease { .. }) = pending {
            table.leases_pending -= 1;
        }
        drop(table);
        pending.ok_or(Misbehaviour::UnknownReply(seq))
    }

    /// Queues a request and notes that its reply is to come, both or neither. `None` where the
    /// session is over; a rejection where there are too many leases already.
    ///
    /// Safe to cancel: then neither is done.
    async fn request(
        &self,
        seq: RequestSeq,
        message: &ToDaemon,
        memory: Option<OwnedFd>,
        pending: Pending,
    ) -> Option<Result<(), Rejection>> {
        let bytes = message.encode();
        let room = self.outbox.room(bytes.len()).await?;
        let mut table = self.table();
        if table.gone {
            drop(table);
            // Only now: it may hold a lease.
            drop(pending);
            return None;
        }
        if let Pending::Lease { .. } = pending {
            let value = (table.leases.len() + table.leases_pending) as u64 + 1;
            let limit = limits::LEASES_PER_ENGINE_MAX as u64;
            if value > limit {
                drop(table);
                return Some(Err(Rejection::ExceedsLimit { value, limit }));
            }
            table.leases_pending += 1;
        }
        let before = table.pending.insert(seq, pending);
        drop(table);
        assert!(before.is_none(), "a request's number is its own");
        self.outbox.push(room, vec![bytes], memory);
        Some(Ok(()))
    }

    fn next_seq(&self) -> RequestSeq {
        // Relaxed: a number of one's own is all that is asked for.
        RequestSeq(self.next_seq.fetch_add(1, Ordering::Relaxed))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The table is consistent after any panic: each change to it is a single insert or remove.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WantedLease {
    /// Whether the daemon gave what was asked for, in number and, where they were named, in place.
    fn check(&self, slots: &[SlotRef]) -> Result<(), Misbehaviour> {
        let (got, want) = (slots.len() as u64, self.count);
        let regions = u64::from(self.pool.spec.layout.regions);
        // S9: fewer would leave tokens without a place; the bound keeps the tables of what is
        // verified within theirs.
        if got != want || got == 0 || got * regions > limits::LEASE_PAGES_MAX {
            return Err(Misbehaviour::SlotCount { got, want });
        }
        let pairs = self.named.iter().zip(slots);
        for (named, slot) in pairs {
            if *named != slot.index {
                return Err(Misbehaviour::SlotNotNamed {
                    got: slot.index.0,
                    want: named.0,
                });
            }
        }
        Ok(())
    }
}

/// Answers a caller. One that stopped waiting does not mind.
fn answer<T>(reply: oneshot::Sender<T>, value: T) {
    let _ = reply.send(value);
}
