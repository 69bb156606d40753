//! Transfers to here, and the grants under which peers write.
//!
//! ```text
//!  Open ─▶ Arming ─armed─▶ Open ─commit─▶ Committed ─proof─▶ Verifying ─good──▶ Delivered
//!            │              │ └─proof─▶ Drained ─commit──────▲  │ └─last attempt corrupt─▶ Failed
//!            │              │             │ late ─▶ Failed      └─corrupt─▶ Arming (next attempt)
//!            └──────────────┴─ abort, silence, link down ─▶ Closing ─proof─▶ Aborted or Failed
//! ```
//!
//! 1. An authentic offer opens one grant; its slots gain a holder that only a proof takes away.
//! 2. The plane accepts writes; the source is told. Checksums come in as pages are sealed.
//! 3. Commit and drain arrive in either order, on different channels. Both are needed.
//! 4. With the proof in hand the engine is asked to verify every page (S2: verify follows fence).
//! 5. Corrupt pages, and no others, get a new grant; the rest cannot be written again.
//! 6. A deadline in any state makes the daemon fence, which yields the proof, or ends what holds
//!    nothing. It never frees a slot.

use alloc::sync::Arc;
use alloc::vec::Vec;

use bytes::Bytes;

use super::api::{Misbehaviour, Observation, PlaneCommand, StoppedBy};
use super::engines::{LeaseState, count_of};
use super::pages::{Identity, PageTable, manifest_digest};
use super::timers::{Timer, millis};
use super::{Life, ReceiveKey, State};
use crate::ids::{
    EngineId, GrantId, LeaseId, LinkId, PoolId, RequestId, Secret, SlotRef, Tag, TenantId,
    TransferId,
};
use crate::limits;
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{Layout, PageRef, PageRun, TokenRange, runs_of};
use crate::wire::{AbortPolicy, Checksums, Offer, PeerMessage, PlaneKind, ToEngine};

/// What a source says when it asks for a grant.
pub(super) struct Asked {
    pub(super) layout: Layout,
    pub(super) tokens: TokenRange,
    pub(super) tenant: TenantId,
    pub(super) plane: PlaneKind,
}

/// A writer's hold on slots. Here exactly as long as a write may land.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Grant {
    pub(super) key: ReceiveKey,
    pub(super) pool: PoolId,
    pub(super) plane: PlaneKind,
    pub(super) slots: Arc<[SlotRef]>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Receive {
    /// `None` once it has ended: the transfer goes on to its proof, and nobody will read.
    pub(super) lease: Option<LeaseId>,
    pub(super) engine: EngineId,
    pool: PoolId,
    plane: PlaneKind,
    tenant: TenantId,
    request: RequestId,
    layout: Layout,
    tokens: TokenRange,
    slots: Arc<[SlotRef]>,
    /// The latest grant; still open only where `State::grants` has it.
    pub(super) grant: GrantId,
    /// Counts from 1.
    attempt: u32,
    pages: PageTable,
    /// The pages of this attempt.
    due: Vec<PageRun>,
    payload: Bytes,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Phase {
    /// The plane is about to accept writes.
    Arming,
    /// The source may write.
    Open,
    /// The source committed; its drain is on the way.
    Committed,
    /// The writes have stopped; the commit is on the way.
    Drained,
    /// The writes must stop; the outcome is settled.
    Closing { by: StoppedBy, outcome: Outcome },
    /// The writes have stopped and the engine verifies.
    Verifying { source: Source },
}

/// Whether corrupt pages can be asked for again.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Source {
    Waits,
    Gone,
}

impl Receive {
    fn due_count(&self) -> u64 {
        self.due.iter().map(|run| u64::from(run.count)).sum()
    }

    fn digest(&self, key: &Secret, payload: &[u8]) -> Tag {
        let identity = Identity {
            grant: self.grant,
            tenant: &self.tenant,
            request: &self.request,
            layout: &self.layout,
            tokens: self.tokens,
            slots: &self.slots,
        };
        manifest_digest(key, &identity, &self.pages, payload)
    }
}

impl State {
    /// A source asks for a grant.
    pub(super) fn open(
        &mut self,
        link: LinkId,
        transfer: TransferId,
        offer: &Bytes,
        asked: &Asked,
    ) -> Result<(), Misbehaviour> {
        let key = (link, transfer);
        if self.receives.contains_key(&key) {
            return Err(Misbehaviour::NotYours(transfer.0));
        }
        let lease = match self.authenticate(offer) {
            Ok(lease) => lease,
            Err(reason) => {
                self.refuse(link, transfer, reason);
                return Ok(());
            }
        };
        if let Err(reason) = self.compatible(link, lease, asked) {
            // The offer was real, so the decode side learns that nothing will come.
            self.end_delivery(lease, LeaseState::Over, Outcome::Rejected(reason));
            self.refuse(link, transfer, reason);
            return Ok(());
        }
        self.begin_receive(key, lease, asked.plane);
        Ok(())
    }

    fn refuse(&mut self, link: LinkId, transfer: TransferId, reason: Rejection) {
        self.observe(Observation::Rejected(reason));
        self.tell_peer(link, PeerMessage::Refused { transfer, reason });
    }

    /// The offer's own truth: made here, in this life, in time, and not used before.
    fn authenticate(&self, offer: &Bytes) -> Result<LeaseId, Rejection> {
        if self.life != Life::Serving {
            return Err(Rejection::ShuttingDown);
        }
        // The life comes before the MAC, since each life has its own key: a peer that holds an
        // offer of the last one learns that it is stale, not that it was forged.
        let claimed = Offer::peek(offer).map_err(|_| Rejection::OfferForged)?;
        let (got, now) = (
            claimed.incarnation.as_u64(),
            self.config.incarnation.as_u64(),
        );
        if claimed.node == self.config.node && got < now && !planted!(AcceptAnyLife) {
            // S6: nothing stamped by an earlier life is accepted.
            return Err(Rejection::OfferStale {
                incarnation: got,
                incarnation_now: now,
            });
        }
        let key = &self.config.secret;
        // S7: only what this daemon signed says where to write.
        let mut verified = Offer::verify(offer, key).ok().flatten();
        if planted!(AcceptForgedOffer | AcceptAnyLife) {
            verified = Some(claimed);
        }
        let offer = verified.ok_or(Rejection::OfferForged)?;
        if offer.expires < self.now {
            return Err(Rejection::OfferExpired);
        }
        let lease = self.leases.get(&offer.lease).ok_or(Rejection::OfferUsed)?;
        if lease.state != LeaseState::Offered && !planted!(OfferTwice) {
            // S6: an offer is good for one grant.
            return Err(Rejection::OfferUsed);
        }
        Ok(offer.lease)
    }

    /// Whether the source has what the lease wants, and may write it.
    fn compatible(&self, link: LinkId, lease: LeaseId, asked: &Asked) -> Result<(), Rejection> {
        let lease = &self.leases[&lease];
        if asked.tenant != lease.tenant && !planted!(IgnoreTenant) {
            // S7: for its tenant only.
            return Err(Rejection::TenantMismatch);
        }
        if !self.links[&link].planes.contains(&asked.plane) {
            return Err(Rejection::NoCommonPlane);
        }
        let layout = self.pools[&lease.pool].spec.layout;
        if asked.layout != layout {
            // S10: layouts that differ are refused, never checked less.
            return Err(Rejection::LayoutMismatch {
                page_bytes: u64::from(asked.layout.page_bytes),
                page_bytes_wanted: u64::from(layout.page_bytes),
            });
        }
        if asked.tokens != lease.tokens {
            return Err(Rejection::TokensMismatch {
                tokens: asked.tokens.count,
                tokens_wanted: lease.tokens.count,
            });
        }
        Ok(())
    }

    fn begin_receive(&mut self, key: ReceiveKey, id: LeaseId, plane: PlaneKind) {
        let lease = self
            .leases
            .get_mut(&id)
            .expect("the offer named a live lease");
        lease.state = LeaseState::Receiving(key);
        let layout = self.pools[&lease.pool].spec.layout;
        let pages = PageTable::new(layout.regions, count_of(&lease.slots));
        let receive = Receive {
            lease: Some(id),
            engine: lease.engine,
            pool: lease.pool,
            plane,
            tenant: lease.tenant.clone(),
            request: lease.request.clone(),
            layout,
            tokens: lease.tokens,
            slots: Arc::clone(&lease.slots),
            grant: GrantId(0),
            attempt: 0,
            due: pages.all_runs(),
            pages,
            payload: Bytes::new(),
            phase: Phase::Drained,
        };
        self.timers.clear(Timer::Offer(id));
        self.receives.insert(key, receive);
        self.open_grant(key);
    }

    /// Opens a grant for the pages that are due.
    fn open_grant(&mut self, key: ReceiveKey) {
        let grant = GrantId(self.next_grant);
        self.next_grant += 1;
        let secret = self.derived("fabric plane key", grant);
        let receive = self
            .receives
            .get_mut(&key)
            .expect("the caller has the transfer");
        assert!(
            !self.grants.contains_key(&receive.grant),
            "one grant at a time"
        );
        receive.grant = grant;
        receive.attempt += 1;
        receive.phase = Phase::Arming;
        // The first attempt's pages are all of them, which needs no list.
        let pages = if receive.attempt == 1 {
            Vec::new()
        } else {
            receive.due.clone()
        };
        let (pool, plane) = (receive.pool, receive.plane);
        let slots = Arc::clone(&receive.slots);
        // S1: from here on the slots have a writer, and keep it until there is a proof.
        let table = &mut self
            .pools
            .get_mut(&pool)
            .expect("a lease keeps its pool")
            .slots;
        table.open_grant(&slots, grant);
        let entry = Grant {
            key,
            pool,
            plane,
            slots: Arc::clone(&slots),
        };
        self.grants.insert(grant, entry);
        self.timers
            .set(self.now, Timer::Receive(key), self.config.silence_max);
        self.observe(Observation::GrantOpened(plane));
        let pages = pages.into();
        let arm = PlaneCommand::Arm {
            grant,
            link: key.0,
            key: secret,
            pool,
            slots,
            pages,
        };
        self.plane(plane, arm);
    }

    pub(super) fn armed(&mut self, grant: GrantId) {
        let Some(key) = self.grants.get(&grant).map(|grant| grant.key) else {
            return; // Stopped already.
        };
        let receive = self
            .receives
            .get_mut(&key)
            .expect("an open grant has its transfer");
        if receive.phase != Phase::Arming {
            return;
        }
        receive.phase = Phase::Open;
        let pages = if receive.attempt == 1 {
            Vec::new()
        } else {
            receive.due.clone()
        };
        let slots = receive.slots.to_vec();
        let granted = PeerMessage::Granted {
            transfer: key.1,
            grant,
            slots,
            plane_key: self.derived("fabric plane key", grant),
            manifest_key: self.derived("fabric manifest key", grant),
            outstanding_bytes_max: self.config.outstanding_bytes_max,
            pages,
        };
        self.timers
            .set(self.now, Timer::Receive(key), self.config.silence_max);
        self.tell_peer(key.0, granted);
    }

    /// A key for one grant: from the life's secret, so that it need not be kept.
    fn derived(&self, purpose: &str, grant: GrantId) -> Secret {
        let mut hasher = blake3::Hasher::new_keyed(&self.config.secret.0);
        hasher.update(purpose.as_bytes());
        hasher.update(&grant.0.to_le_bytes());
        Secret(*hasher.finalize().as_bytes())
    }

    pub(super) fn landed(&mut self, grant: GrantId) {
        if let Some(key) = self.grants.get(&grant).map(|grant| grant.key) {
            self.heard(key);
        }
    }

    /// A sign of life of an open grant's writer.
    fn heard(&mut self, key: ReceiveKey) {
        let receive = &self.receives[&key];
        // S4: once the lease has ended nobody waits for more: a trickle buys no time.
        if receive.phase == Phase::Open && receive.lease.is_some() {
            self.timers
                .set(self.now, Timer::Receive(key), self.config.silence_max);
        }
    }

    /// The transfer whose latest grant this is. `None` where it is over already.
    fn receive_of(
        &mut self,
        link: LinkId,
        grant: GrantId,
    ) -> Result<Option<ReceiveKey>, Misbehaviour> {
        let from = (link, TransferId(0));
        let to = (link, TransferId(u64::MAX));
        // An open grant knows its transfer; a drained one is found among its link's.
        let key = match self.grants.get(&grant) {
            Some(grant) => Some(grant.key),
            None => {
                let mut of_link = self.receives.range(from..=to);
                of_link
                    .find(|(_, receive)| receive.grant == grant)
                    .map(|(key, _)| *key)
            }
        };
        match key {
            Some(key) if key.0 == link => Ok(Some(key)),
            Some(_) => Err(Misbehaviour::NotYours(grant.0)),
            None if grant.0 < self.next_grant => {
                self.observe(Observation::StaleMessage);
                Ok(None)
            }
            None => Err(Misbehaviour::NotYours(grant.0)),
        }
    }

    pub(super) fn checksums(
        &mut self,
        link: LinkId,
        grant: GrantId,
        checksums: &Checksums,
    ) -> Result<(), Misbehaviour> {
        let Some(key) = self.receive_of(link, grant)? else {
            return Ok(());
        };
        let receive = self.receives.get_mut(&key).expect("it was just found");
        match receive.phase {
            Phase::Closing { .. } => return Ok(()),
            Phase::Open | Phase::Drained => {}
            Phase::Arming | Phase::Committed | Phase::Verifying { .. } => {
                return Err(Misbehaviour::OutOfPlace);
            }
        }
        let recorded = receive.pages.record(checksums);
        recorded.map_err(|PageRef { region, position }| Misbehaviour::Page { region, position })?;
        self.heard(key);
        Ok(())
    }

    pub(super) fn commit(
        &mut self,
        link: LinkId,
        grant: GrantId,
        digest: Tag,
        payload: Bytes,
    ) -> Result<(), Misbehaviour> {
        let Some(key) = self.receive_of(link, grant)? else {
            return Ok(());
        };
        let manifest_key = self.derived("fabric manifest key", grant);
        let receive = self.receives.get_mut(&key).expect("it was just found");
        let drained = match receive.phase {
            Phase::Closing { .. } => return Ok(()),
            Phase::Open => false,
            Phase::Drained => true,
            Phase::Arming | Phase::Committed | Phase::Verifying { .. } => {
                return Err(Misbehaviour::OutOfPlace);
            }
        };
        let (pages, pages_wanted) = (receive.pages.known_count(), receive.pages.count());
        let failure = if pages < pages_wanted {
            // S10: every page is accounted for at the commit.
            Some(Failure::PagesMissing {
                pages,
                pages_wanted,
            })
        } else if receive.digest(&manifest_key, &payload) != digest {
            Some(Failure::ManifestMismatch)
        } else {
            None
        };
        if let Some(failure) = failure {
            self.stop_writer(key, StoppedBy::Fence, Outcome::Failed(failure));
            return Ok(());
        }
        receive.payload = payload;
        if drained || planted!(VerifyBeforeFence) {
            self.begin_verification(key);
        } else {
            receive.phase = Phase::Committed;
            self.timers
                .set(self.now, Timer::Receive(key), self.config.drain_max);
        }
        Ok(())
    }

    /// A proof: nothing can land under this grant any more.
    pub(super) fn writes_stopped(&mut self, id: GrantId, by: StoppedBy) {
        let grant = self
            .grants
            .remove(&id)
            .expect("a plane proves each grant's end once");
        let table = &mut self
            .pools
            .get_mut(&grant.pool)
            .expect("a grant keeps its pool")
            .slots;
        // S1: the one place where a writer's hold ends.
        let freed = table.close_grant(&grant.slots, id);
        self.observe(Observation::GrantClosed(by));
        self.freed(freed);
        let receive = self
            .receives
            .get_mut(&grant.key)
            .expect("a grant has its transfer");
        assert_eq!(receive.grant, id, "the transfer's latest grant");
        match receive.phase {
            Phase::Arming => self.end_receive(grant.key, Outcome::Failed(Failure::Plane)),
            Phase::Open => {
                receive.phase = Phase::Drained;
                self.timers
                    .set(self.now, Timer::Receive(grant.key), self.config.drain_max);
            }
            Phase::Committed => self.begin_verification(grant.key),
            Phase::Closing { outcome, .. } => self.end_receive(grant.key, outcome),
            Phase::Drained | Phase::Verifying { .. } => {
                unreachable!("a transfer without a grant has no proof")
            }
        }
        self.unmap_if_idle(grant.pool);
    }

    /// Asks the engine to verify what has arrived.
    fn begin_verification(&mut self, key: ReceiveKey) {
        let receive = self
            .receives
            .get_mut(&key)
            .expect("the caller has the transfer");
        // S2: verify follows fence, or a write could land between check and use.
        let open = self.grants.contains_key(&receive.grant) && !planted!(VerifyBeforeFence);
        assert!(!open, "no write can land any more");
        let pages = receive.due_count();
        let Some(lease) = receive.lease else {
            self.observe(Observation::PagesArrived { pages });
            self.observe(Observation::PagesDropped { pages });
            return self.end_receive(key, Outcome::Aborted(Abort::Destination));
        };
        receive.phase = Phase::Verifying {
            source: Source::Waits,
        };
        let (engine, attempt) = (receive.engine, receive.attempt);
        let verify = ToEngine::Verify {
            lease,
            attempt,
            pages: receive.due.clone(),
            payload: receive.payload.clone(),
        };
        if attempt == 1 {
            for checksums in receive.pages.parts(limits::CHECKSUMS_PER_MESSAGE_MAX) {
                self.tell_engine(engine, ToEngine::Expect { lease, checksums });
            }
        }
        self.timers
            .set(self.now, Timer::Receive(key), self.config.verify_max);
        self.observe(Observation::PagesArrived { pages });
        if planted!(SkipVerification) {
            return self.end_receive(key, Outcome::Delivered);
        }
        self.tell_engine(engine, verify);
    }

    /// The engine's verification of one attempt.
    pub(super) fn verified(
        &mut self,
        engine: EngineId,
        lease: LeaseId,
        attempt: u32,
        mut corrupt: Vec<PageRef>,
    ) -> Result<(), Misbehaviour> {
        let Some(key) = self.verifying(engine, lease, attempt)? else {
            return Ok(());
        };
        let receive = &self.receives[&key];
        corrupt.sort_unstable();
        let due = |page: &PageRef| receive.due.iter().any(|run| run.contains(*page));
        let twice = corrupt
            .windows(2)
            .find(|pair| pair[0] == pair[1])
            .map(|pair| pair[0]);
        let foreign = corrupt.iter().copied().find(|page| !due(page));
        if let Some(PageRef { region, position }) = twice.or(foreign) {
            return Err(Misbehaviour::Page { region, position });
        }
        let found = corrupt.len() as u64;
        let bad = if planted!(IgnoreCorrupt) { 0 } else { found };
        let good = receive.due_count() - bad;
        // S10: what arrived is either good or corrupt; nothing is skipped.
        let counted = if planted!(CorruptUncounted) { 0 } else { bad };
        self.observe(Observation::PagesVerified {
            good,
            corrupt: counted,
        });
        if bad == 0 {
            self.end_receive(key, Outcome::Delivered);
        } else {
            self.resend(key, &corrupt);
        }
        Ok(())
    }

    fn verifying(
        &mut self,
        engine: EngineId,
        lease: LeaseId,
        attempt: u32,
    ) -> Result<Option<ReceiveKey>, Misbehaviour> {
        let Some(found) = self.leases.get(&lease) else {
            if lease.0 < self.next_lease {
                self.observe(Observation::StaleMessage);
                return Ok(None);
            }
            return Err(Misbehaviour::NotYours(lease.0));
        };
        if found.engine != engine {
            return Err(Misbehaviour::NotYours(lease.0));
        }
        let LeaseState::Receiving(key) = found.state else {
            // Over while the engine verified.
            self.observe(Observation::StaleMessage);
            return Ok(None);
        };
        let receive = &self.receives[&key];
        // S2: an answer counts for the attempt that it names, while that attempt is verified.
        match receive.phase {
            Phase::Verifying { .. } if receive.attempt == attempt => Ok(Some(key)),
            Phase::Arming
            | Phase::Open
            | Phase::Committed
            | Phase::Drained
            | Phase::Closing { .. }
            | Phase::Verifying { .. } => Err(Misbehaviour::OutOfPlace),
        }
    }

    /// Asks for the corrupt pages again, or gives up.
    fn resend(&mut self, key: ReceiveKey, corrupt: &[PageRef]) {
        let receive = self
            .receives
            .get_mut(&key)
            .expect("the caller has the transfer");
        let last = receive.attempt >= self.config.attempts_max
            || corrupt.len() > limits::RESEND_PAGES_MAX
            || receive.phase
                == Phase::Verifying {
                    source: Source::Gone,
                }
            || self.life != Life::Serving;
        if last {
            let (pages, attempts) = (corrupt.len() as u64, u64::from(receive.attempt));
            let failure = Failure::Corrupt { pages, attempts };
            return self.end_receive(key, Outcome::Failed(failure));
        }
        receive.due = runs_of(corrupt);
        self.open_grant(key);
    }

    /// The source stops.
    pub(super) fn cancelled(&mut self, key: ReceiveKey, drain_follows: bool) {
        let Some(receive) = self.receives.get_mut(&key) else {
            return self.observe(Observation::StaleMessage);
        };
        if let Phase::Verifying { source } = &mut receive.phase {
            // It committed before, so what arrived still counts.
            *source = Source::Gone;
            return;
        }
        let by = if drain_follows {
            StoppedBy::Drain
        } else {
            StoppedBy::Fence
        };
        self.stop_writer(key, by, Outcome::Aborted(Abort::Source));
    }

    /// Ends a transfer that this side does not want, where that is still to be decided.
    pub(super) fn stop_receive(&mut self, key: ReceiveKey, outcome: Outcome) {
        let receive = &self.receives[&key];
        match receive.phase {
            Phase::Arming => self.stop_writer(key, StoppedBy::Fence, outcome),
            Phase::Open | Phase::Committed => {
                let grant = receive.grant;
                self.stop_writer(key, StoppedBy::Drain, outcome);
                self.tell_peer(key.0, PeerMessage::DrainRequest { grant });
                if planted!(DrainRequestIsADrain) {
                    self.writes_stopped(grant, StoppedBy::Drain);
                }
            }
            Phase::Drained => self.end_receive(key, outcome),
            Phase::Closing { .. } | Phase::Verifying { .. } => {}
        }
    }

    /// The lease of a transfer has ended.
    pub(super) fn abandon_receive(&mut self, key: ReceiveKey, abort: AbortPolicy) {
        let receive = self
            .receives
            .get_mut(&key)
            .expect("a receiving lease has its transfer");
        receive.lease = None;
        let outcome = Outcome::Aborted(Abort::Destination);
        match (receive.phase, abort) {
            (Phase::Verifying { .. }, _) => {
                let pages = receive.due_count();
                if !planted!(DropUncounted) {
                    self.observe(Observation::PagesDropped { pages });
                }
                self.end_receive(key, outcome);
            }
            (_, AbortPolicy::FinishTransfer) => {}
            (_, AbortPolicy::DrainNow) => self.stop_receive(key, outcome),
        }
    }

    /// The link of some transfers is gone.
    pub(super) fn receives_lost(&mut self, link: LinkId) {
        let of_link = (link, TransferId(0))..=(link, TransferId(u64::MAX));
        let keys: Vec<_> = self.receives.range(of_link).map(|(key, _)| *key).collect();
        for key in keys {
            let receive = self.receives.get_mut(&key).expect("it was just listed");
            if let Phase::Verifying { source } = &mut receive.phase {
                // The pages are here, and the destination is the authority: go on.
                *source = Source::Gone;
            } else {
                let grant = receive.grant;
                self.stop_writer(key, StoppedBy::Fence, Outcome::Failed(Failure::LinkLost));
                if planted!(LinkLossIsADrain) && self.grants.contains_key(&grant) {
                    self.writes_stopped(grant, StoppedBy::Drain);
                }
            }
        }
    }

    /// Makes the writes stop, by waiting for the writer's drain or by a fence; then the outcome.
    fn stop_writer(&mut self, key: ReceiveKey, by: StoppedBy, outcome: Outcome) {
        let receive = self
            .receives
            .get_mut(&key)
            .expect("the caller has the transfer");
        let grant = receive.grant;
        let plane = receive.plane;
        let outcome = match receive.phase {
            // They have stopped.
            Phase::Drained => return self.end_receive(key, outcome),
            // What was settled first stands.
            Phase::Closing {
                by: StoppedBy::Drain,
                outcome,
            } if by == StoppedBy::Fence => outcome,
            // S4: saying again that a drain follows buys the writer no time.
            Phase::Closing { .. } => return,
            Phase::Arming | Phase::Open | Phase::Committed => outcome,
            Phase::Verifying { .. } => unreachable!("callers deal with a verification"),
        };
        receive.phase = Phase::Closing { by, outcome };
        match by {
            StoppedBy::Drain => {
                self.timers
                    .set(self.now, Timer::Receive(key), self.config.drain_max);
            }
            StoppedBy::Fence => {
                // The plane answers without the peer: there is nothing left to wait for.
                self.timers.clear(Timer::Receive(key));
                if !planted!(ForgetTheFence) {
                    self.plane(plane, PlaneCommand::Fence { grant });
                }
            }
        }
    }

    /// A deadline passed. It makes the daemon fence; it never frees anything.
    // S4: whatever waits comes to an end.
    pub(super) fn receive_expired(&mut self, key: ReceiveKey, waited_ms: u64) {
        let receive = &self.receives[&key];
        if planted!(WaitWithoutEnd) && receive.phase == Phase::Open {
            let silence_max = self.config.silence_max;
            return self.timers.set(self.now, Timer::Receive(key), silence_max);
        }
        let limit = |duration| millis(duration);
        let (by, failure) = match receive.phase {
            Phase::Arming => (StoppedBy::Fence, Failure::Plane),
            Phase::Open if receive.lease.is_none() => {
                // Nobody reads what still comes, and it has had its time.
                return self.stop_receive(key, Outcome::Aborted(Abort::Destination));
            }
            Phase::Open => {
                let limit_ms = limit(self.config.silence_max);
                (
                    StoppedBy::Fence,
                    Failure::Silent {
                        waited_ms,
                        limit_ms,
                    },
                )
            }
            Phase::Committed | Phase::Closing { .. } => {
                let limit_ms = limit(self.config.drain_max);
                (
                    StoppedBy::Fence,
                    Failure::DrainLate {
                        waited_ms,
                        limit_ms,
                    },
                )
            }
            Phase::Drained => {
                let limit_ms = limit(self.config.drain_max);
                (
                    StoppedBy::Drain,
                    Failure::CommitLate {
                        waited_ms,
                        limit_ms,
                    },
                )
            }
            Phase::Verifying { .. } => {
                let limit_ms = limit(self.config.verify_max);
                let failure = Failure::VerifyLate {
                    waited_ms,
                    limit_ms,
                };
                let pages = receive.due_count();
                self.observe(Observation::PagesDropped { pages });
                return self.end_receive(key, Outcome::Failed(failure));
            }
        };
        let grant = receive.grant;
        self.stop_writer(key, by, Outcome::Failed(failure));
        if planted!(FreeOnTimeout) && self.grants.contains_key(&grant) {
            self.writes_stopped(grant, StoppedBy::Fence);
        }
    }

    /// Gives a transfer to here its one outcome.
    fn end_receive(&mut self, key: ReceiveKey, outcome: Outcome) {
        let receive = self
            .receives
            .remove(&key)
            .expect("the caller has the transfer");
        // S1: an outcome before the proof would invite somebody to use the slots.
        let open = self.grants.contains_key(&receive.grant) && !planted!(VerifyBeforeFence);
        assert!(!open, "the writes have stopped");
        self.timers.clear(Timer::Receive(key));
        match receive.lease {
            Some(lease) => {
                let delivered = outcome == Outcome::Delivered;
                let state = if delivered {
                    LeaseState::Delivered
                } else {
                    LeaseState::Over
                };
                self.end_delivery(lease, state, outcome);
            }
            None => {
                assert_ne!(
                    outcome,
                    Outcome::Delivered,
                    "nobody is there to be delivered to"
                );
                self.observe(Observation::ReceiveEnded(outcome));
            }
        }
        self.tell_peer(
            key.0,
            PeerMessage::Verdict {
                transfer: key.1,
                outcome,
            },
        );
    }

    pub(super) fn destination_invariants(&self) {
        for (id, grant) in &self.grants {
            assert_eq!(
                self.receives[&grant.key].grant, *id,
                "a grant has its transfer"
            );
        }
        for (key, receive) in &self.receives {
            receive.pages.invariants();
            let open = self.grants.contains_key(&receive.grant);
            let stopped = matches!(receive.phase, Phase::Drained | Phase::Verifying { .. });
            assert_eq!(open, !stopped, "a grant is open until its proof");
            if let Some(lease) = receive.lease {
                let state = self.leases[&lease].state;
                assert_eq!(
                    state,
                    LeaseState::Receiving(*key),
                    "the lease knows its transfer"
                );
            }
            let lone_fence = matches!(
                receive.phase,
                Phase::Closing {
                    by: StoppedBy::Fence,
                    ..
                }
            );
            let timed = self
                .timers
                .timers()
                .any(|timer| timer == Timer::Receive(*key));
            // S4: whatever waits has a deadline, but for a fence, which needs nobody else.
            assert!(timed || lone_fence, "a transfer that waits has a deadline");
        }
    }
}
