//! Transfers from here, and the pins under which their pages are read.
//!
//! ```text
//!  send ─▶ Connecting ─link─▶ Opening ─granted─▶ Streaming ─last page─▶ Committed ─▶ outcome
//!              │                 │ refused ─▶ Rejected  ▲                  │
//!              │                 │                      └── granted again ─┘
//!              └─────────────────┴─ abort, link down ─▶ Ending ─reads stopped─▶ outcome
//! ```
//!
//! 1. The source's slots are pinned for the whole of a transfer: they can be sent again.
//! 2. Sealed pages go out as soon as there is a grant, never more than may be outstanding (S8).
//! 3. When every page is sealed and posted, the drain follows in band and the commit beside it.
//! 4. After the commit the destination is the authority: only its verdict, or its loss, ends it.
//! 5. The engine learns the outcome when the plane has proven that it reads no more, and not
//!    before: from then on the pages may change.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bytes::Bytes;

use super::api::{Misbehaviour, Observation, Output, PlaneCommand};
use super::engines::{LeaseState, exceeds};
use super::pages::{Identity, PageTable, manifest_digest};
use super::timers::{Timer, millis};
use super::{Life, State};
use crate::ids::{
    EngineId, GrantId, Incarnation, LeaseId, LinkId, NodeId, PoolId, RequestSeq, Secret, SlotRef,
    TransferId,
};
use crate::limits;
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{Layout, PageRef, PageRun};
use crate::wire::{Checksums, Offer, PeerMessage, PlaneKind, ToEngine};

/// What a destination grants.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Granted {
    pub(super) grant: GrantId,
    pub(super) slots: Arc<[SlotRef]>,
    pub(super) plane_key: Secret,
    pub(super) manifest_key: Secret,
    pub(super) outstanding_bytes_max: u64,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Send {
    pub(super) engine: EngineId,
    pub(super) lease: LeaseId,
    pub(super) pool: PoolId,
    /// The source's slots, pinned.
    pub(super) slots: Arc<[SlotRef]>,
    layout: Layout,
    offer: Offer,
    offer_bytes: Bytes,
    /// `None` until there is a link.
    route: Option<(LinkId, PlaneKind)>,
    pages: PageTable,
    grant: Option<Granted>,
    /// Grants so far.
    attempts: u32,
    /// Sealed, not posted yet.
    queue: VecDeque<PageRun>,
    outstanding_bytes: u64,
    /// The payload, once the engine has finished.
    payload: Option<Bytes>,
    writer: Writer,
    phase: Phase,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Phase {
    /// Waits for a link.
    Connecting,
    /// Waits for the destination's answer.
    Opening,
    /// Writes pages as they are sealed.
    Streaming,
    /// Everything is posted; waits for the verdict.
    Committed,
    /// The outcome is settled; waits until nothing reads the pages.
    Ending(Outcome),
}

/// The source's side of the plane.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
enum Writer {
    /// Reads nothing: before the first grant, or since its proof.
    Idle,
    /// May read the pages.
    Open,
    /// May read the pages still, and the destination has granted again already: the two answers
    /// come on different channels.
    OpenThenAgain(Granted, Vec<PageRun>),
}

impl State {
    /// Starts a transfer from a lease to an offer.
    pub(super) fn send(&mut self, engine: EngineId, seq: RequestSeq, id: LeaseId, bytes: Bytes) {
        let (offer, offset) = match self.admit_send(engine, id, &bytes) {
            Ok(admitted) => admitted,
            Err(reason) => return self.reject(engine, seq, reason),
        };
        let lease = &self.leases[&id];
        let (pool_id, node, offer_life) = (lease.pool, offer.node, offer.incarnation);
        let pool = self
            .pools
            .get_mut(&pool_id)
            .expect("a lease keeps its pool");
        let count = pool.spec.slots_for(offer.tokens.count);
        let count = u32::try_from(count).expect("admission bounded it by the lease");
        let slots: Arc<[SlotRef]> = lease.slots[offset as usize..][..count as usize].into();
        // The pages may be read until the plane proves that it is done, whatever the lease does.
        if !planted!(ReadWithoutPin) {
            pool.slots.pin(&slots);
        }
        let layout = pool.spec.layout;
        let transfer = TransferId(self.next_transfer);
        self.next_transfer += 1;
        let send = Send {
            engine,
            lease: id,
            pool: pool_id,
            slots,
            layout,
            offer,
            offer_bytes: bytes,
            route: None,
            pages: PageTable::new(layout.regions, count),
            grant: None,
            attempts: 0,
            queue: VecDeque::new(),
            outstanding_bytes: 0,
            payload: None,
            writer: Writer::Idle,
            phase: Phase::Connecting,
        };
        self.sends.insert(transfer, send);
        self.observe(Observation::SendStarted);
        self.timers
            .set(self.now, Timer::Send(transfer), self.config.open_max);
        self.tell_engine(
            engine,
            ToEngine::SendOpened {
                seq,
                transfer,
                slots: count,
                offset,
            },
        );
        match self.newest_link(node) {
            Some(link) if self.may_have_restarted(link, offer_life) => {
                let after = Some(self.links[&link].incarnation);
                self.output(Output::Connect { node, after });
            }
            Some(link) => self.ask(transfer, link),
            None => self.output(Output::Connect { node, after: None }),
        }
    }

    /// The ladder of a send: whose lease, whose offer, and does the one cover the other.
    fn admit_send(
        &self,
        engine: EngineId,
        id: LeaseId,
        bytes: &Bytes,
    ) -> Result<(Offer, u32), Rejection> {
        if self.life != Life::Serving {
            return Err(Rejection::ShuttingDown);
        }
        exceeds(self.sends.len() as u64 + 1, limits::TRANSFERS_MAX as u64)?;
        let missing = Rejection::NoSuchLease {
            lease: id.0,
            engine: engine.0,
        };
        let lease = self
            .leases
            .get(&id)
            .filter(|lease| lease.engine == engine)
            .ok_or(missing)?;
        if !matches!(lease.state, LeaseState::Held | LeaseState::Delivered) {
            return Err(missing);
        }
        let offer = Offer::peek(bytes).map_err(|_| Rejection::OfferForged)?;
        if offer.tenant != lease.tenant && !planted!(IgnoreTenant) {
            // S7: nobody's pages are sent for somebody else.
            return Err(Rejection::TenantMismatch);
        }
        let per_slot = u64::from(self.pools[&lease.pool].spec.layout.tokens_per_slot);
        let (held, asked) = (lease.tokens, offer.tokens);
        let covers = asked.count > 0 && asked.start >= held.start && asked.end() <= held.end();
        if !covers || !asked.start.is_multiple_of(per_slot) {
            let (tokens, tokens_wanted) = (held.count, asked.count);
            return Err(Rejection::TokensMismatch {
                tokens,
                tokens_wanted,
            });
        }
        let offset = (asked.start - held.start) / per_slot;
        Ok((
            offer,
            u32::try_from(offset).expect("an offset within a lease fits"),
        ))
    }

    fn newest_link(&self, node: NodeId) -> Option<LinkId> {
        let of_node = self.links.iter().filter(|(_, link)| link.node == node);
        of_node
            .max_by_key(|(id, link)| (link.incarnation, **id))
            .map(|(id, _)| *id)
    }

    /// Whether an offer may be of a later life of a link's node, which has not noticed its end yet.
    /// The offer alone proves nothing: only its daemon can check its signature.
    fn may_have_restarted(&self, link: LinkId, offer_life: Incarnation) -> bool {
        let link = &self.links[&link];
        link.node != self.config.node && link.incarnation < offer_life
    }

    /// A link came up: transfers that waited for its node go on.
    pub(super) fn connected(&mut self, link: LinkId, node: NodeId) {
        for transfer in self.connecting_to(node) {
            self.ask(transfer, link);
        }
    }

    /// Where there is a link all the same, no later life of the node was found: `ask` says so.
    pub(super) fn connect_failed(&mut self, node: NodeId) {
        let link = self.newest_link(node);
        for transfer in self.connecting_to(node) {
            match link {
                Some(link) => self.ask(transfer, link),
                None => {
                    let reason = Rejection::PeerUnreachable;
                    self.end_send(transfer, Outcome::Rejected(reason));
                }
            }
        }
    }

    fn connecting_to(&self, node: NodeId) -> Vec<TransferId> {
        let waiting = |send: &Send| send.phase == Phase::Connecting && send.offer.node == node;
        self.sends
            .iter()
            .filter(|(_, send)| waiting(send))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Asks the destination for a grant.
    fn ask(&mut self, transfer: TransferId, link_id: LinkId) {
        let link = &self.links[&link_id];
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        assert_eq!(send.phase, Phase::Connecting, "a grant is asked for once");
        let (incarnation, incarnation_now) =
            (send.offer.incarnation.as_u64(), link.incarnation.as_u64());
        if incarnation != incarnation_now && !planted!(AcceptAnyLife) {
            // S6: the daemon that made the offer is gone, whichever of the two is older.
            let reason = Rejection::OfferStale {
                incarnation,
                incarnation_now,
            };
            return self.end_send(transfer, Outcome::Rejected(reason));
        }
        let Some(plane) = link.planes.first().copied() else {
            return self.end_send(transfer, Outcome::Rejected(Rejection::NoCommonPlane));
        };
        send.route = Some((link_id, plane));
        send.phase = Phase::Opening;
        let open = PeerMessage::Open {
            transfer,
            offer: send.offer_bytes.clone(),
            layout: send.layout,
            tokens: send.offer.tokens,
            tenant: send.offer.tenant.clone(),
            plane,
        };
        self.tell_peer(link_id, open);
    }

    /// The transfer of a peer's message. `None` where it is over already.
    fn send_of(
        &mut self,
        link: LinkId,
        transfer: TransferId,
    ) -> Result<Option<&mut Send>, Misbehaviour> {
        let on_link = |send: &Send| send.route.is_some_and(|(of, _)| of == link);
        match self.sends.get(&transfer) {
            Some(send) if on_link(send) => Ok(self.sends.get_mut(&transfer)),
            Some(_) => Err(Misbehaviour::NotYours(transfer.0)),
            None if transfer.0 < self.next_transfer => {
                self.observe(Observation::StaleMessage);
                Ok(None)
            }
            None => Err(Misbehaviour::NotYours(transfer.0)),
        }
    }

    /// The destination grants: all pages at first, later the corrupt ones again.
    pub(super) fn granted(
        &mut self,
        link: LinkId,
        transfer: TransferId,
        granted: Granted,
        again: Vec<PageRun>,
    ) -> Result<(), Misbehaviour> {
        let Some(send) = self.send_of(link, transfer)? else {
            return Ok(());
        };
        let slots = send.slots.len() as u64;
        if granted.slots.len() as u64 != slots {
            return Err(Misbehaviour::Limit {
                got: granted.slots.len() as u64,
                want: slots,
            });
        }
        if granted.outstanding_bytes_max < u64::from(send.layout.page_bytes) {
            // S8: not a single page could be outstanding.
            let (got, want) = (
                granted.outstanding_bytes_max,
                u64::from(send.layout.page_bytes),
            );
            return Err(Misbehaviour::Limit { got, want });
        }
        if send.attempts >= limits::ATTEMPTS_MAX {
            // S4: nobody holds this side's slots by asking without end.
            let (got, want) = (send.attempts, limits::ATTEMPTS_MAX);
            let (got, want) = (u64::from(got) + 1, u64::from(want));
            return Err(Misbehaviour::Limit { got, want });
        }
        for run in &again {
            let last = PageRef {
                region: run.region,
                position: run.first + (run.count - 1),
            };
            if !send.pages.contains(last) {
                let PageRef { region, position } = last;
                return Err(Misbehaviour::Page { region, position });
            }
        }
        // A destination counts its grants: the same one twice would mix what was written under it.
        let later = send
            .grant
            .as_ref()
            .is_none_or(|last| last.grant < granted.grant);
        match (&send.phase, &send.writer) {
            (Phase::Ending(_), _) => self.observe(Observation::StaleMessage),
            _ if !later => return Err(Misbehaviour::OutOfPlace),
            (Phase::Opening, Writer::Idle) if again.is_empty() => self.stream(transfer, granted),
            (Phase::Committed, Writer::Idle) if !again.is_empty() => {
                self.stream_again(transfer, granted, again);
            }
            (Phase::Committed, Writer::Open) if !again.is_empty() => {
                send.writer = Writer::OpenThenAgain(granted, again);
            }
            _ => return Err(Misbehaviour::OutOfPlace),
        }
        Ok(())
    }

    /// Opens the writer and sends what is sealed already.
    fn stream(&mut self, transfer: TransferId, granted: Granted) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        let (link, grant) = (
            send.route.expect("a grant came on the link").0,
            granted.grant,
        );
        let parts = send.pages.parts(limits::CHECKSUMS_PER_MESSAGE_MAX);
        self.timers.clear(Timer::Send(transfer));
        self.open_writer(transfer, granted);
        for checksums in parts {
            self.tell_peer(link, PeerMessage::Checksums { grant, checksums });
        }
        self.pump(transfer);
    }

    /// Sends corrupt pages again; their checksums stand.
    fn stream_again(&mut self, transfer: TransferId, granted: Granted, again: Vec<PageRun>) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        assert!(
            send.queue.is_empty(),
            "everything was posted before the commit"
        );
        send.queue = again.into();
        self.timers.clear(Timer::Send(transfer));
        self.open_writer(transfer, granted);
        self.pump(transfer);
    }

    fn open_writer(&mut self, transfer: TransferId, granted: Granted) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        assert_eq!(send.writer, Writer::Idle, "one writer at a time");
        assert_eq!(
            send.outstanding_bytes, 0,
            "a new writer has nothing outstanding"
        );
        let (link, plane) = send.route.expect("a grant came on the link");
        let command = PlaneCommand::OpenWriter {
            transfer,
            grant: granted.grant,
            link,
            key: granted.plane_key,
            pool: send.pool,
            slots: Arc::clone(&send.slots),
        };
        send.attempts += 1;
        send.writer = Writer::Open;
        send.phase = Phase::Streaming;
        send.grant = Some(granted);
        self.plane(plane, command);
    }

    pub(super) fn seal(
        &mut self,
        engine: EngineId,
        transfer: TransferId,
        checksums: &Checksums,
    ) -> Result<(), Misbehaviour> {
        let Some(send) = self.send_from(engine, transfer)? else {
            return Ok(());
        };
        if matches!(send.phase, Phase::Ending(_)) {
            return Ok(()); // The engine has not heard yet.
        }
        if send.payload.is_some() {
            return Err(Misbehaviour::OutOfPlace);
        }
        let recorded = send.pages.record(checksums);
        recorded.map_err(|PageRef { region, position }| Misbehaviour::Page { region, position })?;
        send.queue.push_back(checksums.run());
        if let (Phase::Streaming, Some(granted)) = (&send.phase, &send.grant) {
            let (link, _) = send.route.expect("a grant came on the link");
            let (grant, checksums) = (granted.grant, checksums.clone());
            self.tell_peer(link, PeerMessage::Checksums { grant, checksums });
            self.pump(transfer);
        }
        Ok(())
    }

    pub(super) fn finish(
        &mut self,
        engine: EngineId,
        transfer: TransferId,
        payload: Bytes,
    ) -> Result<(), Misbehaviour> {
        let Some(send) = self.send_from(engine, transfer)? else {
            return Ok(());
        };
        if matches!(send.phase, Phase::Ending(_)) {
            return Ok(());
        }
        if send.payload.is_some() {
            return Err(Misbehaviour::OutOfPlace);
        }
        if !send.pages.is_complete() {
            // S10: an engine cannot finish with a page that it never sealed.
            let (got, want) = (send.pages.known_count(), send.pages.count());
            return Err(Misbehaviour::Limit { got, want });
        }
        send.payload = Some(payload);
        self.pump(transfer);
        Ok(())
    }

    /// Posts what may be posted, and commits when all is.
    fn pump(&mut self, transfer: TransferId) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        let (Phase::Streaming, Some(granted)) = (&send.phase, &send.grant) else {
            return;
        };
        let (link, plane) = send.route.expect("a grant came on the link");
        let page_bytes = u64::from(send.layout.page_bytes);
        let mut posted = Vec::new();
        while let Some(run) = send.queue.front_mut() {
            let room = if planted!(IgnoreOutstanding) {
                u64::from(run.count)
            } else {
                (granted.outstanding_bytes_max - send.outstanding_bytes) / page_bytes
            };
            let count = run.count.min(u32::try_from(room).unwrap_or(u32::MAX));
            if count == 0 {
                break;
            }
            posted.push(PageRun { count, ..*run });
            send.outstanding_bytes += u64::from(count) * page_bytes;
            // S8: never more outstanding than the grant allows.
            let most = granted.outstanding_bytes_max;
            assert!(send.outstanding_bytes <= most || planted!(IgnoreOutstanding));
            run.first += count;
            run.count -= count;
            if run.count == 0 {
                send.queue.pop_front();
            }
        }
        let all_posted = send.queue.is_empty() && send.payload.is_some();
        for run in posted {
            self.plane(plane, PlaneCommand::Write { transfer, run });
        }
        if all_posted {
            self.commit_send(transfer, link, plane);
        }
    }

    fn commit_send(&mut self, transfer: TransferId, link: LinkId, plane: PlaneKind) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        let granted = send.grant.as_ref().expect("a commit is made under a grant");
        let payload = send.payload.clone().expect("the engine has finished");
        let identity = Identity {
            grant: granted.grant,
            tenant: &send.offer.tenant,
            request: &send.offer.request,
            layout: &send.layout,
            tokens: send.offer.tokens,
            slots: &granted.slots,
        };
        let digest = manifest_digest(&granted.manifest_key, &identity, &send.pages, &payload);
        let grant = granted.grant;
        send.phase = Phase::Committed;
        // Longer than the destination may take at most, so that its verdict comes first.
        let wait = self.config.verify_max.saturating_mul(2) + self.config.drain_max;
        self.timers.set(self.now, Timer::Send(transfer), wait);
        self.plane(plane, PlaneCommand::Drain { transfer });
        self.tell_peer(
            link,
            PeerMessage::Commit {
                grant,
                digest,
                payload,
            },
        );
    }

    pub(super) fn written(&mut self, transfer: TransferId, grant: GrantId, bytes: u64) {
        let Some(send) = self.sends.get_mut(&transfer) else {
            return;
        };
        if send.grant.as_ref().map(|granted| granted.grant) != Some(grant) {
            return;
        }
        let mut left = send.outstanding_bytes.checked_sub(bytes);
        if planted!(WrittenFreesAll) {
            left = Some(0);
        }
        send.outstanding_bytes = left.expect("a plane completes what was posted, once");
        self.pump(transfer);
    }

    pub(super) fn writer_failed(&mut self, transfer: TransferId, grant: GrantId) {
        let Some(send) = self.sends.get(&transfer) else {
            return;
        };
        if send.grant.as_ref().map(|granted| granted.grant) == Some(grant) {
            self.stop_send(transfer, Outcome::Failed(Failure::Plane));
        }
    }

    /// A proof: the plane reads this attempt's pages no more.
    pub(super) fn reads_stopped(&mut self, transfer: TransferId, grant: GrantId) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("an open writer keeps its transfer");
        let current = send.grant.as_ref().map(|granted| granted.grant);
        assert_eq!(
            current,
            Some(grant),
            "a plane proves each writer's end once"
        );
        send.outstanding_bytes = 0;
        let writer = core::mem::replace(&mut send.writer, Writer::Idle);
        match (send.phase.clone(), writer) {
            (_, Writer::Idle) => unreachable!("a plane proves each writer's end once"),
            (Phase::Ending(outcome), _) => self.end_send(transfer, outcome),
            (Phase::Committed, Writer::OpenThenAgain(granted, again)) => {
                self.stream_again(transfer, granted, again);
            }
            (Phase::Committed, Writer::Open) => {}
            // Before everything was posted: it broke.
            (Phase::Streaming, _) => self.stop_send(transfer, Outcome::Failed(Failure::Plane)),
            (Phase::Connecting | Phase::Opening, _) => unreachable!("no writer before a grant"),
        }
    }

    pub(super) fn abort_send(
        &mut self,
        engine: EngineId,
        transfer: TransferId,
    ) -> Result<(), Misbehaviour> {
        if self.send_from(engine, transfer)?.is_some() {
            self.stop_send(transfer, Outcome::Aborted(Abort::Source));
        }
        Ok(())
    }

    /// Ends a transfer from this side, unless it has been committed: then the destination decides.
    pub(super) fn stop_send(&mut self, transfer: TransferId, outcome: Outcome) {
        let send = &self.sends[&transfer];
        let drain_follows = send.writer != Writer::Idle;
        match send.phase {
            Phase::Committed | Phase::Ending(_) => return,
            Phase::Connecting => return self.end_send(transfer, outcome),
            Phase::Opening | Phase::Streaming => {}
        }
        let (link, _) = send.route.expect("it was asked for on a link");
        self.stop_reads(transfer, outcome);
        self.tell_peer(
            link,
            PeerMessage::Cancel {
                transfer,
                drain_follows,
            },
        );
    }

    /// Settles the outcome; it is told when nothing reads the pages any more.
    fn stop_reads(&mut self, transfer: TransferId, outcome: Outcome) {
        let send = self
            .sends
            .get_mut(&transfer)
            .expect("the caller has the transfer");
        if matches!(send.phase, Phase::Ending(_)) {
            return; // What was settled first stands.
        }
        // S2: what a writer may still read keeps its pin, or it would send the next owner's bytes.
        if send.writer == Writer::Idle || planted!(UnpinBeforeReadsStop) {
            return self.end_send(transfer, outcome);
        }
        let (_, plane) = send.route.expect("a writer has a plane");
        send.phase = Phase::Ending(outcome);
        send.queue.clear();
        self.timers.clear(Timer::Send(transfer));
        self.plane(plane, PlaneCommand::Stop { transfer });
    }

    /// The destination's last word.
    pub(super) fn verdict(
        &mut self,
        link: LinkId,
        transfer: TransferId,
        outcome: Outcome,
    ) -> Result<(), Misbehaviour> {
        let Some(send) = self.send_of(link, transfer)? else {
            return Ok(());
        };
        if outcome == Outcome::Delivered && send.phase != Phase::Committed {
            if matches!(send.phase, Phase::Ending(_)) {
                return Ok(());
            }
            // S3: nothing can have been delivered before it was committed.
            return Err(Misbehaviour::OutOfPlace);
        }
        if planted!(RejectedIsDelivered) && matches!(outcome, Outcome::Rejected(_)) {
            self.stop_reads(transfer, Outcome::Delivered);
            return Ok(());
        }
        self.stop_reads(transfer, outcome);
        Ok(())
    }

    pub(super) fn drain_requested(&mut self, link: LinkId, grant: GrantId) {
        let under = |send: &Send| {
            send.route.is_some_and(|(of, _)| of == link)
                && send
                    .grant
                    .as_ref()
                    .is_some_and(|granted| granted.grant == grant)
        };
        let found = self
            .sends
            .iter()
            .find(|(_, send)| under(send))
            .map(|(id, _)| *id);
        match found {
            // The in-band drain is the answer; the verdict tells the rest.
            Some(transfer) => self.stop_reads(transfer, Outcome::Aborted(Abort::Destination)),
            None => self.observe(Observation::StaleMessage),
        }
    }

    /// The link of some transfers is gone.
    pub(super) fn sends_lost(&mut self, link: LinkId) {
        let on_link = |send: &Send| send.route.is_some_and(|(of, _)| of == link);
        let lost = self
            .sends
            .iter()
            .filter(|(_, send)| on_link(send))
            .map(|(id, _)| *id);
        for transfer in lost.collect::<Vec<_>>() {
            let phase = &self.sends[&transfer].phase;
            if planted!(LinkLossIsDelivered) && *phase == Phase::Committed {
                self.stop_reads(transfer, Outcome::Delivered);
                continue;
            }
            let failure = match phase {
                Phase::Committed => Failure::VerdictUnknown,
                Phase::Connecting | Phase::Opening | Phase::Streaming | Phase::Ending(_) => {
                    Failure::LinkLost
                }
            };
            self.stop_reads(transfer, Outcome::Failed(failure));
        }
    }

    // S4: whoever waits for a peer stops waiting.
    pub(super) fn send_expired(&mut self, transfer: TransferId, waited_ms: u64) {
        match self.sends[&transfer].phase {
            Phase::Committed if planted!(LateVerdictIsDelivered) => {
                self.stop_reads(transfer, Outcome::Delivered);
            }
            Phase::Committed => {
                let limit_ms = millis(self.config.verify_max);
                let failure = Failure::VerdictLate {
                    waited_ms,
                    limit_ms,
                };
                self.stop_reads(transfer, Outcome::Failed(failure));
            }
            Phase::Connecting | Phase::Opening | Phase::Streaming | Phase::Ending(_) => {
                let limit_ms = millis(self.config.open_max);
                let failure = Failure::OpenLate {
                    waited_ms,
                    limit_ms,
                };
                self.stop_send(transfer, Outcome::Failed(failure));
            }
        }
    }

    /// The transfer of an engine's message. `None` where it is over already.
    fn send_from(
        &mut self,
        engine: EngineId,
        transfer: TransferId,
    ) -> Result<Option<&mut Send>, Misbehaviour> {
        match self.sends.get(&transfer) {
            Some(send) if send.engine == engine => Ok(self.sends.get_mut(&transfer)),
            Some(_) => Err(Misbehaviour::NotYours(transfer.0)),
            None if transfer.0 < self.next_transfer => {
                self.observe(Observation::StaleMessage);
                Ok(None)
            }
            None => Err(Misbehaviour::NotYours(transfer.0)),
        }
    }

    /// Gives a transfer from here its one outcome, and its slots back.
    fn end_send(&mut self, transfer: TransferId, outcome: Outcome) {
        let send = self
            .sends
            .remove(&transfer)
            .expect("the caller has the transfer");
        let reads = send.writer != Writer::Idle && !planted!(UnpinBeforeReadsStop);
        assert!(!reads, "nothing reads the pages any more");
        self.timers.clear(Timer::Send(transfer));
        let table = &mut self
            .pools
            .get_mut(&send.pool)
            .expect("a pin keeps the pool")
            .slots;
        let freed = if planted!(ReadWithoutPin) {
            0
        } else {
            table.unpin(&send.slots)
        };
        self.freed(freed);
        self.observe(Observation::SendEnded(outcome));
        self.tell_engine(send.engine, ToEngine::SendOutcome { transfer, outcome });
        self.unmap_if_idle(send.pool);
    }

    pub(super) fn source_invariants(&self) {
        for (transfer, send) in &self.sends {
            send.pages.invariants();
            let timed = self
                .timers
                .timers()
                .any(|timer| timer == Timer::Send(*transfer));
            match send.phase {
                Phase::Connecting | Phase::Opening | Phase::Committed => {
                    assert!(timed, "a transfer that waits for a peer has a deadline");
                }
                // Streaming waits for the engine, ending for the plane: both end with this host.
                Phase::Streaming | Phase::Ending(_) => assert!(!timed),
            }
            let reads = send.writer != Writer::Idle;
            match send.phase {
                Phase::Connecting | Phase::Opening => assert!(!reads, "no writer before a grant"),
                Phase::Streaming | Phase::Ending(_) => assert!(reads, "a writer is open"),
                Phase::Committed => {}
            }
            assert!(
                reads || send.outstanding_bytes == 0,
                "nothing is outstanding without one"
            );
        }
    }
}
