//! A naive model of who holds which slot, and what of everybody has been said about it.
//!
//! It hears what goes into the machine and what comes out, and keeps one list of holders for each
//! slot. It knows nothing of the machine's phases: a lease is over when its engine said so, a grant
//! from the moment of its proof, a pin when its send was said to be over or its scrub was done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fabric_proto::host::{Config, Observation, ScrubPolicy, Usage};
use fabric_proto::ids::{
    EngineId, GrantId, LeaseId, LinkId, PoolId, RequestId, RequestSeq, Secret, SlotRef, TenantId,
    TransferId,
};
use fabric_proto::outcome::Outcome;
use fabric_proto::pool::{PageRun, PoolSpec, TokenRange};
use fabric_proto::wire::{AbortPolicy, Checksums, PeerMessage, Purpose, ToDaemon};

use super::step::Step;

/// The books.
pub(super) struct Model {
    pub(super) config: Config,
    pub(super) now: Duration,
    /// Sessions that are there.
    pub(super) engines: BTreeSet<EngineId>,
    pub(super) pools: BTreeMap<PoolId, Pool>,
    /// Leases that have not ended.
    pub(super) leases: BTreeMap<LeaseId, Lease>,
    pub(super) lease_count: u64,
    /// Every offer that was ever made here, and its lease; and those that led to a grant.
    pub(super) offers: Vec<(Bytes, LeaseId)>,
    pub(super) offers_used: BTreeSet<LeaseId>,
    /// Grants whose proof has not been given.
    pub(super) grants: BTreeMap<GrantId, Grant>,
    /// Sends without an outcome.
    pub(super) sends: BTreeMap<TransferId, Send>,
    pub(super) scrubs: Vec<(PoolId, Arc<[SlotRef]>)>,
    pub(super) links: BTreeSet<LinkId>,
    pub(super) shutdown: bool,
    pub(super) shutdown_complete: bool,
    pub(super) sums: Sums,
}

/// S10's sum, and what is counted within one step.
#[derive(Default)]
pub(super) struct Sums {
    pub(super) pages_arrived: u64,
    pub(super) pages_ended: u64,
    pub(super) leases_ended: u64,
    pub(super) leases_ended_said: u64,
    pub(super) sends_ended: u64,
    pub(super) sends_ended_said: u64,
}

pub(super) struct Pool {
    pub(super) engine: EngineId,
    pub(super) spec: PoolSpec,
    slots: Vec<Slot>,
}

#[derive(Clone, Default)]
struct Slot {
    lease: Option<LeaseId>,
    grant: Option<GrantId>,
    pins: Vec<Pin>,
    /// The last epoch that was seen.
    epoch: u64,
    /// Whose bytes it may hold.
    tenant: Option<TenantId>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Pin {
    Send(TransferId),
    Scrub,
}

pub(super) struct Lease {
    pub(super) engine: EngineId,
    pub(super) pool: PoolId,
    pub(super) tenant: TenantId,
    pub(super) request: RequestId,
    pub(super) tokens: TokenRange,
    pub(super) purpose: Purpose,
    seq: RequestSeq,
    count: u64,
    /// Those that were named so far: the dirty ones, then all.
    pub(super) slots: Vec<SlotRef>,
    given_out: bool,
    pub(super) receiving: Option<(LinkId, TransferId)>,
    pub(super) outcome: Option<Outcome>,
    attempts: u32,
    /// What its engine was asked to verify, and has not.
    pub(super) verify: Option<(u32, Vec<PageRun>)>,
}

#[derive(Clone)]
pub(super) struct Grant {
    pub(super) link: LinkId,
    pub(super) transfer: TransferId,
    pub(super) lease: LeaseId,
    pub(super) pool: PoolId,
    pub(super) slots: Arc<[SlotRef]>,
    pub(super) armed: bool,
    pub(super) fencing: bool,
    /// When it must have been fenced at the latest, once the writes are to stop.
    fence_by: Option<Duration>,
}

/// What an honest writer of a grant knows.
#[derive(Clone)]
pub(super) struct Issued {
    pub(super) link: LinkId,
    pub(super) grant: GrantId,
    pub(super) slots: Vec<SlotRef>,
    pub(super) manifest_key: Secret,
    pub(super) spec: PoolSpec,
    pub(super) tenant: TenantId,
    pub(super) request: RequestId,
    pub(super) tokens: TokenRange,
}

pub(super) struct Send {
    pub(super) engine: EngineId,
    pub(super) lease: LeaseId,
    pub(super) pool: PoolId,
    pub(super) slots: Vec<SlotRef>,
    pub(super) spec: PoolSpec,
    pub(super) link: Option<LinkId>,
    pub(super) writer: Option<Writer>,
    /// The last grant that was accepted, and what it allows.
    granted: Option<(GrantId, u64)>,
    /// The grant of the latest writer.
    pub(super) reads_under: Option<GrantId>,
    pub(super) sealed: BTreeSet<(u16, u32)>,
    posted: BTreeSet<(u16, u32)>,
    pub(super) committed: Option<Duration>,
    pub(super) stopped: bool,
    delivered: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Writer {
    pub(super) grant: GrantId,
    pub(super) outstanding_bytes: u64,
    outstanding_bytes_max: u64,
    /// It was told to drain or to stop.
    pub(super) ending: bool,
}

impl Model {
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            now: Duration::ZERO,
            engines: BTreeSet::new(),
            pools: BTreeMap::new(),
            leases: BTreeMap::new(),
            lease_count: 0,
            offers: Vec::new(),
            offers_used: BTreeSet::new(),
            grants: BTreeMap::new(),
            sends: BTreeMap::new(),
            scrubs: Vec::new(),
            links: BTreeSet::new(),
            shutdown: false,
            shutdown_complete: false,
            sums: Sums::default(),
        }
    }

    /// What a step changes by itself, before anything comes out. `refused`: it was misbehaviour.
    pub(super) fn before(&mut self, step: &Step, refused: bool) {
        match step {
            Step::EngineUp(engine, _) => assert!(self.engines.insert(*engine)),
            Step::EngineGone(engine) => self.engine_gone(*engine),
            Step::Engine(engine, message) if !refused => self.engine_said(*engine, message),
            Step::LinkUp { link, .. } => assert!(self.links.insert(*link)),
            Step::LinkDown(link) => assert!(self.links.remove(link)),
            Step::Peer(link, message) if !refused => self.peer_said(*link, message),
            Step::Armed(grant) => self.grants.get_mut(grant).expect("it is open").armed = true,
            Step::Written(transfer, _, bytes) => {
                let writer = self.sends.get_mut(transfer).expect("a writer has a send");
                let writer = writer.writer.as_mut().expect("a writer is open");
                writer.outstanding_bytes -= bytes;
            }
            Step::WritesStopped(grant, _) => {
                let grant = self.grants.remove(grant).expect("it was open");
                self.each(grant.pool, &grant.slots, |slot| slot.grant = None);
            }
            Step::ReadsStopped(transfer, _) => {
                let send = self.sends.get_mut(transfer).expect("a writer has a send");
                assert!(send.writer.take().is_some(), "a writer was open");
            }
            Step::Scrubbed(pool, slots) => {
                self.scrubs
                    .retain(|scrub| scrub != &(*pool, Arc::clone(slots)));
                self.each(*pool, slots, |slot| {
                    slot.pins.retain(|pin| *pin != Pin::Scrub)
                });
            }
            Step::Shutdown => {
                self.shutdown = true;
                let all: Vec<GrantId> = self.grants.keys().copied().collect();
                all.into_iter().for_each(|grant| self.must_stop(grant));
            }
            Step::RegisterPool { .. }
            | Step::Engine(..)
            | Step::ConnectFailed(_)
            | Step::Peer(..)
            | Step::Landed(_)
            | Step::WriterFailed(..)
            | Step::Tick => {}
        }
    }

    fn engine_gone(&mut self, engine: EngineId) {
        assert!(self.engines.remove(&engine));
        let leases = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.engine == engine);
        let leases: Vec<LeaseId> = leases.map(|(id, _)| *id).collect();
        for lease in leases {
            self.end_lease(lease, AbortPolicy::DrainNow);
        }
    }

    fn engine_said(&mut self, engine: EngineId, message: &ToDaemon) {
        if !self.engines.contains(&engine) {
            return;
        }
        if let ToDaemon::EndLease { lease, abort } = message
            && self.leases.contains_key(lease)
        {
            let owner = self.leases[lease].engine;
            assert_eq!(owner, engine, "an engine ends its own leases");
            self.end_lease(*lease, abort.unwrap_or(self.config.abort));
        }
        if let ToDaemon::Seal {
            transfer,
            checksums,
        } = message
            && let Some(send) = self.sends.get_mut(transfer)
        {
            assert_eq!(send.engine, engine, "an engine seals its own pages");
            let pages = pages_of(&checksums.run());
            send.sealed.extend(pages);
        }
    }

    fn peer_said(&mut self, link: LinkId, message: &PeerMessage) {
        if !self.links.contains(&link) {
            return;
        }
        if let PeerMessage::Cancel { transfer, .. } = message {
            let under = |grant: &&Grant| (grant.link, grant.transfer) == (link, *transfer);
            let of = self.grants.iter().find(|(_, grant)| under(grant));
            if let Some(grant) = of.map(|(id, _)| *id) {
                self.must_stop(grant);
            }
        }
        if let PeerMessage::Granted {
            transfer,
            grant,
            outstanding_bytes_max,
            ..
        } = message
            && let Some(send) = self.sends.get_mut(transfer)
        {
            assert_eq!(send.link, Some(link), "a grant comes on the send's link");
            send.granted = Some((*grant, *outstanding_bytes_max));
        }
        if let PeerMessage::Verdict { transfer, outcome } = message
            && let Some(send) = self.sends.get_mut(transfer)
        {
            assert_eq!(send.link, Some(link), "a verdict comes on the send's link");
            send.delivered |= *outcome == Outcome::Delivered && send.committed.is_some();
        }
    }

    /// From now on the daemon has its drain's time, and then it must fence.
    // S4, S8: no peer can put that off.
    pub(super) fn must_stop(&mut self, grant: GrantId) {
        let fence_by = self.now + self.config.drain_max;
        let grant = self.grants.get_mut(&grant).expect("it is open");
        grant.fence_by.get_or_insert(fence_by);
    }

    pub(super) fn end_lease(&mut self, id: LeaseId, abort: AbortPolicy) {
        let lease = self.leases.remove(&id).expect("it has not ended");
        self.each(lease.pool, &lease.slots, |slot| {
            assert_eq!(slot.lease, Some(id), "a lease ends its own hold");
            slot.lease = None;
        });
        self.sums.leases_ended += 1;
        if abort == AbortPolicy::DrainNow {
            let grants = self.grants.iter().filter(|(_, grant)| grant.lease == id);
            let grants: Vec<GrantId> = grants.map(|(grant, _)| *grant).collect();
            grants.into_iter().for_each(|grant| self.must_stop(grant));
        }
    }

    fn each(&mut self, pool: PoolId, slots: &[SlotRef], mut change: impl FnMut(&mut Slot)) {
        let pool = self.pools.get_mut(&pool).expect("a held pool is mapped");
        for slot in slots {
            change(&mut pool.slots[slot.index.0 as usize]);
        }
    }

    pub(super) fn registered(&mut self, engine: EngineId, id: PoolId, spec: PoolSpec) {
        let slots = vec![Slot::default(); spec.slots as usize];
        let pool = Pool {
            engine,
            spec,
            slots,
        };
        assert!(self.pools.insert(id, pool).is_none());
    }

    /// Slots were leased; which ones is said later.
    pub(super) fn lease_started(&mut self, engine: EngineId, asked: &ToDaemon, count: u32) {
        let ToDaemon::Lease {
            seq,
            pool,
            tenant,
            request,
            tokens,
            purpose,
            named,
        } = asked
        else {
            panic!("a lease begins with a request");
        };
        let per_slot = u64::from(self.pools[pool].spec.layout.tokens_per_slot);
        assert_eq!(u64::from(count), tokens.count.div_ceil(per_slot));
        assert!(named.is_empty() || named.len() == count as usize);
        let context = self.pools[pool].spec.context_tokens;
        assert!(tokens.end() <= context, "S9: a lease is within the context");
        self.lease_count += 1;
        let lease = Lease {
            engine,
            pool: *pool,
            tenant: tenant.clone(),
            request: request.clone(),
            tokens: *tokens,
            purpose: *purpose,
            seq: *seq,
            count: u64::from(count),
            slots: Vec::new(),
            given_out: false,
            receiving: None,
            outcome: None,
            attempts: 0,
            verify: None,
        };
        self.leases.insert(LeaseId(self.lease_count), lease);
    }

    /// The dirty slots of the lease that has just begun.
    pub(super) fn scrub(&mut self, pool: PoolId, slots: &Arc<[SlotRef]>) {
        let id = LeaseId(self.lease_count);
        self.take(id, slots);
        assert_eq!(self.leases[&id].pool, pool);
        self.each(pool, slots, |slot| slot.pins.push(Pin::Scrub));
        self.leases.get_mut(&id).expect("it began").slots = slots.to_vec();
        self.scrubs.push((pool, Arc::clone(slots)));
    }

    pub(super) fn given_out(&mut self, id: LeaseId, seq: RequestSeq, slots: &[SlotRef]) {
        let lease = &self.leases[&id];
        assert_eq!((lease.seq, lease.given_out), (seq, false));
        assert_eq!(lease.count, slots.len() as u64);
        let dirty = lease.slots.clone();
        assert!(dirty.iter().all(|slot| slots.contains(slot)));
        let clean = slots.iter().filter(|slot| !dirty.contains(slot));
        let clean: Vec<SlotRef> = clean.copied().collect();
        self.assert_clean(id, &clean);
        self.take(id, &clean);
        let lease = self.leases.get_mut(&id).expect("it is there");
        lease.slots = slots.to_vec();
        lease.given_out = true;
    }

    /// S2: slots that were not scrubbed hold nobody else's bytes, but where nobody minds.
    fn assert_clean(&self, id: LeaseId, slots: &[SlotRef]) {
        let lease = &self.leases[&id];
        let pool = &self.pools[&lease.pool];
        for slot_ref in slots {
            let last = &pool.slots[slot_ref.index.0 as usize].tenant;
            let clean = match self.config.scrub {
                ScrubPolicy::Always => false,
                ScrubPolicy::CrossTenant => last.as_ref().is_none_or(|last| *last == lease.tenant),
                ScrubPolicy::Never => true,
            };
            assert!(clean, "{slot_ref} was to be scrubbed");
        }
    }

    /// Gives slots to a lease. Nobody else may hold them.
    fn take(&mut self, id: LeaseId, slots: &[SlotRef]) {
        let lease = &self.leases[&id];
        let pool = self.pools.get_mut(&lease.pool);
        let pool = pool.expect("a lease has its pool");
        let epoch_min = self.config.incarnation.as_u64() << 32;
        for slot_ref in slots {
            let slot = &mut pool.slots[slot_ref.index.0 as usize];
            // S5, S1, S6.
            assert_eq!(slot.lease, None, "{slot_ref} has one lease");
            assert_eq!(slot.grant, None, "{slot_ref} has no writer");
            assert_eq!(slot.pins, [], "{slot_ref} has no reader");
            let epoch = slot_ref.epoch.as_u64();
            assert!(epoch > slot.epoch, "{slot_ref} had epoch {}", slot.epoch);
            assert!(epoch > epoch_min, "{slot_ref} is above every earlier life");
            slot.tenant = Some(lease.tenant.clone());
            slot.lease = Some(id);
            slot.epoch = epoch;
        }
    }

    /// S9: what is told to come again could be given, and only the others are in the way.
    pub(super) fn assert_busy(&self, asked: &ToDaemon, slots_needed: u64) {
        let ToDaemon::Lease { pool, tokens, .. } = asked else {
            panic!("{asked:?} needs no slots");
        };
        let spec = self.pools[pool].spec;
        assert!(slots_needed <= u64::from(spec.slots) && tokens.end() <= spec.context_tokens);
    }

    /// The lease whose request is still unanswered.
    pub(super) fn unanswered(&self, engine: EngineId, seq: RequestSeq) -> Option<LeaseId> {
        let of = |lease: &Lease| !lease.given_out && (lease.engine, lease.seq) == (engine, seq);
        let mut leases = self.leases.iter().filter(|(_, lease)| of(lease));
        leases.next().map(|(id, _)| *id)
    }

    pub(super) fn grant_opened(&mut self, id: GrantId, grant: Grant, again: bool) {
        let lease = self.leases.get_mut(&grant.lease).expect("it has a lease");
        assert_eq!(
            (lease.pool, &lease.slots[..]),
            (grant.pool, &grant.slots[..])
        );
        let key = (grant.link, grant.transfer);
        assert_eq!(
            lease.receiving,
            again.then_some(key),
            "one transfer to a lease"
        );
        lease.receiving = Some(key);
        lease.attempts += 1;
        assert!(lease.attempts <= self.config.attempts_max);
        let lease = grant.lease;
        self.each(grant.pool, &Arc::clone(&grant.slots), |slot| {
            // S7, S5.
            assert_eq!((slot.grant, slot.lease), (None, Some(lease)));
            slot.grant = Some(id);
        });
        assert!(self.grants.insert(id, grant).is_none());
    }

    /// An honest writer's view of a grant.
    pub(super) fn issue(&self, id: GrantId, manifest_key: Secret) -> Option<Issued> {
        let grant = &self.grants[&id];
        let lease = self.leases.get(&grant.lease)?;
        Some(Issued {
            link: grant.link,
            grant: id,
            slots: grant.slots.to_vec(),
            manifest_key,
            spec: self.pools[&grant.pool].spec,
            tenant: lease.tenant.clone(),
            request: lease.request.clone(),
            tokens: lease.tokens,
        })
    }

    /// S2: nothing is verified, and nothing is delivered, while somebody may write.
    pub(super) fn assert_no_writer(&self, lease: LeaseId) {
        assert!(self.grants.values().all(|grant| grant.lease != lease));
    }

    pub(super) fn asked_to_verify(&mut self, id: LeaseId, attempt: u32, pages: &[PageRun]) {
        self.assert_no_writer(id);
        let lease = self.leases.get_mut(&id).expect("a lease is verified");
        assert_eq!(lease.attempts, attempt);
        assert_eq!(lease.outcome, None);
        lease.verify = Some((attempt, pages.to_vec()));
    }

    /// One outcome for each delivery.
    pub(super) fn received(&mut self, id: LeaseId, outcome: Outcome, step: &Step) {
        self.assert_no_writer(id);
        let lease = self.leases.get_mut(&id).expect("a lease has an outcome");
        assert_eq!(lease.purpose, Purpose::Receive);
        assert_eq!(lease.outcome.replace(outcome), None, "one outcome");
        let verify = lease.verify.take();
        if outcome != Outcome::Delivered {
            return;
        }
        // S3, S10: only a verification without a corrupt page, of what was asked for last.
        let Step::Engine(
            _,
            ToDaemon::Verified {
                lease,
                attempt,
                corrupt,
            },
        ) = step
        else {
            panic!("delivered by {step:?}");
        };
        assert_eq!((*lease, &corrupt[..]), (id, &[][..]));
        assert_eq!(verify.map(|(attempt, _)| attempt), Some(*attempt));
    }

    pub(super) fn send_began(&mut self, id: TransferId, engine: EngineId, lease: LeaseId) {
        let (pool, whole) = (self.leases[&lease].pool, &self.leases[&lease]);
        assert_eq!(whole.engine, engine, "an engine sends its own pages");
        let send = Send {
            engine,
            lease,
            pool,
            slots: Vec::new(),
            spec: self.pools[&pool].spec,
            link: None,
            writer: None,
            granted: None,
            reads_under: None,
            sealed: BTreeSet::new(),
            posted: BTreeSet::new(),
            committed: None,
            stopped: false,
            delivered: false,
        };
        assert!(self.sends.insert(id, send).is_none());
    }

    /// Which slots of its lease a send reads.
    pub(super) fn pinned(&mut self, id: TransferId, offset: u32, count: u32) {
        let send = self.sends.get_mut(&id).expect("it began");
        let slots = &self.leases[&send.lease].slots[offset as usize..][..count as usize];
        send.slots = slots.to_vec();
        let (pool, slots) = (send.pool, send.slots.clone());
        self.each(pool, &slots, |slot| {
            assert!(slot.lease.is_some(), "what is sent is leased");
            slot.pins.push(Pin::Send(id));
        });
    }

    pub(super) fn send_ended(&mut self, id: TransferId, outcome: Option<Outcome>) {
        let send = self.sends.remove(&id).expect("one outcome for each send");
        assert!(send.writer.is_none(), "nothing reads the pages");
        if outcome == Some(Outcome::Delivered) {
            assert!(send.delivered, "S3: the destination said so");
        }
        self.each(send.pool, &send.slots, |slot| {
            let before = slot.pins.len();
            slot.pins.retain(|pin| *pin != Pin::Send(id));
            assert_eq!(slot.pins.len() + 1, before, "a send has one pin");
        });
        self.sums.sends_ended += 1;
    }

    pub(super) fn writer_opened(&mut self, id: TransferId, grant: GrantId, slots: &[SlotRef]) {
        let send = self.sends.get_mut(&id).expect("a writer has a send");
        assert!(send.writer.is_none(), "one writer at a time");
        assert_eq!(send.slots, slots, "a writer reads what is pinned");
        let (granted, outstanding_bytes_max) = send.granted.expect("somebody granted it");
        assert_eq!(granted, grant);
        send.committed = None;
        send.reads_under = Some(grant);
        send.writer = Some(Writer {
            grant,
            outstanding_bytes: 0,
            outstanding_bytes_max,
            ending: false,
        });
    }

    pub(super) fn posted(&mut self, id: TransferId, run: &PageRun) {
        let send = self.sends.get_mut(&id).expect("a writer has a send");
        let pages: Vec<(u16, u32)> = pages_of(run).collect();
        assert!(
            pages.iter().all(|page| send.sealed.contains(page)),
            "only sealed pages go"
        );
        let writer = send.writer.as_mut().expect("a writer is open");
        assert!(!writer.ending, "an ending writer posts no more");
        let bytes = u64::from(run.count) * u64::from(send.spec.layout.page_bytes);
        writer.outstanding_bytes += bytes;
        // S8.
        assert!(writer.outstanding_bytes <= writer.outstanding_bytes_max);
        send.posted.extend(pages);
    }

    /// Everything was posted, or nothing more is to be.
    pub(super) fn ends_writer(&mut self, id: TransferId, drain: bool) {
        let now = self.now;
        let send = self.sends.get_mut(&id).expect("a writer has a send");
        let writer = send.writer.as_mut().expect("a writer is open");
        if drain {
            let pages = usize::from(send.spec.layout.regions) * send.slots.len();
            assert_eq!(send.posted.len(), pages, "S10: every page was posted");
            send.committed = Some(now);
        } else {
            assert!(!send.stopped, "a writer is stopped once");
            send.stopped = true;
        }
        writer.ending = true;
    }

    /// What a send whose engine is gone says to nobody: that it is over. It is once nothing reads,
    /// unless it was committed and the destination has not had its last word.
    fn orphans(&mut self, step: &Step) {
        let wait = self.config.verify_max * 2 + self.config.drain_max;
        let drained = self.drained_by(step);
        let mut over = Vec::new();
        for (id, send) in &self.sends {
            if self.engines.contains(&send.engine) || send.writer.is_some() {
                continue;
            }
            let last_word = match step {
                Step::Peer(
                    link,
                    PeerMessage::Verdict { transfer, .. } | PeerMessage::Refused { transfer, .. },
                ) => (send.link, transfer) == (Some(*link), id),
                Step::LinkDown(link) => send.link == Some(*link),
                _ => false,
            };
            let waits = send.committed.is_some_and(|at| self.now < at + wait);
            if !waits || send.stopped || last_word || drained == Some(*id) {
                over.push(*id);
            }
        }
        over.into_iter().for_each(|id| self.send_ended(id, None));
    }

    /// The send that a peer asked to drain: the first with that grant on that link.
    fn drained_by(&self, step: &Step) -> Option<TransferId> {
        let Step::Peer(link, PeerMessage::DrainRequest { grant }) = step else {
            return None;
        };
        let under = |send: &Send| (send.link, send.reads_under) == (Some(*link), Some(*grant));
        let mut sends = self.sends.iter().filter(|(_, send)| under(send));
        sends.next().map(|(id, _)| *id)
    }

    pub(super) fn observed(&mut self, observation: &Observation) {
        let sums = &mut self.sums;
        match observation {
            Observation::LeaseEnded { .. } => sums.leases_ended_said += 1,
            Observation::SendEnded(_) => sums.sends_ended_said += 1,
            Observation::PagesArrived { pages } => sums.pages_arrived += pages,
            Observation::PagesDropped { pages } => sums.pages_ended += pages,
            Observation::PagesVerified { good, corrupt } => sums.pages_ended += good + corrupt,
            Observation::Rejected(_)
            | Observation::LeaseStarted { .. }
            | Observation::SlotsFreed { .. }
            | Observation::GrantOpened(_)
            | Observation::GrantClosed(_)
            | Observation::SendStarted
            | Observation::ReceiveEnded(_)
            | Observation::StaleMessage => {}
        }
    }

    /// Nobody holds a slot of an unmapped pool, and its engine is gone.
    pub(super) fn unmapped(&mut self, id: PoolId) {
        let pool = self.pools.remove(&id).expect("it was mapped");
        assert!(
            !self.engines.contains(&pool.engine),
            "a session keeps its pools"
        );
        let held = pool.slots.iter().find(|slot| !slot.is_free());
        assert!(held.is_none(), "S1: an unmapped pool has no holder");
    }

    /// What must hold after every step.
    pub(super) fn after(&mut self, step: &Step, usage: Usage) {
        let sums = &self.sums;
        assert_eq!(
            sums.leases_ended, sums.leases_ended_said,
            "every lease ends once"
        );
        assert_eq!(self.naive_usage(), usage, "the counts after {step:?}");
        for (id, grant) in &self.grants {
            let late = grant.fence_by.is_some_and(|by| by <= self.now);
            assert!(!late || grant.fencing, "S4: {id} was to be fenced by now");
            let cut = !self.links.contains(&grant.link);
            assert!(!cut || grant.fencing, "S4: the link of {id} is gone");
        }
    }

    /// Before the pools that these sends were the last to hold are unmapped.
    pub(super) fn settle_orphans(&mut self, step: &Step) {
        self.orphans(step);
        let sums = &self.sums;
        assert_eq!(
            sums.sends_ended, sums.sends_ended_said,
            "every send ends once"
        );
    }

    fn naive_usage(&self) -> Usage {
        let mut usage = Usage::default();
        for slot in self.pools.values().flat_map(|pool| &pool.slots) {
            usage.slots += 1;
            usage.free += u64::from(slot.is_free());
            usage.leased += u64::from(slot.lease.is_some());
            usage.granted += u64::from(slot.grant.is_some());
            usage.pinned += u64::from(!slot.pins.is_empty());
        }
        for lease in self.leases.values() {
            // Leased, and it has not been said which.
            let unnamed = lease.count - lease.slots.len() as u64;
            usage.leased += unnamed;
            usage.free -= unnamed;
        }
        usage.quarantined = usage.slots - usage.free - usage.leased;
        usage
    }
}

impl Grant {
    pub(super) fn new(
        link: LinkId,
        transfer: TransferId,
        lease: LeaseId,
        pool: PoolId,
        slots: Arc<[SlotRef]>,
    ) -> Self {
        Self {
            link,
            transfer,
            lease,
            pool,
            slots,
            armed: false,
            fencing: false,
            fence_by: None,
        }
    }
}

impl Slot {
    fn is_free(&self) -> bool {
        self.lease.is_none() && self.grant.is_none() && self.pins.is_empty()
    }
}

fn pages_of(run: &PageRun) -> impl Iterator<Item = (u16, u32)> + use<> {
    let region = run.region;
    (run.first..run.first + run.count).map(move |position| (region, position))
}

/// Checksums of pages that are what they should be.
pub(super) fn honest_checksums(run: PageRun) -> Checksums {
    let crcs = pages_of(&run).map(|(region, position)| crc(region, position));
    Checksums {
        region: run.region,
        first: run.first,
        crcs: crcs.collect(),
    }
}

fn crc(region: u16, position: u32) -> u32 {
    u32::from(region) << 16 | position
}

impl Issued {
    /// The manifest's digest, as the design says what it binds.
    pub(super) fn digest(&self, payload: &[u8]) -> [u8; 32] {
        let mut all = Vec::new();
        let names = [
            b"fabric manifest 1",
            self.tenant.as_str().as_bytes(),
            self.request.as_str().as_bytes(),
            payload,
        ];
        for name in names {
            all.extend((name.len() as u64).to_le_bytes());
            all.extend(name);
        }
        let layout = self.spec.layout;
        all.extend(layout.model.0);
        let numbers = [
            self.grant.0,
            layout.regions.into(),
            layout.page_bytes.into(),
            layout.tokens_per_slot.into(),
            self.tokens.start,
            self.tokens.count,
            self.slots.len() as u64,
        ];
        all.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        for slot in &self.slots {
            all.extend(slot.index.0.to_le_bytes());
            all.extend(slot.epoch.as_u64().to_le_bytes());
        }
        for region in 0..layout.regions {
            let positions = 0..u32::try_from(self.slots.len()).expect("a lease is small");
            all.extend(positions.flat_map(|position| crc(region, position).to_le_bytes()));
        }
        *blake3::keyed_hash(&self.manifest_key.0, &all).as_bytes()
    }
}
