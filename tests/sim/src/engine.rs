//! What engines do: request by request, as the SDK would.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use fabric_proto::host::Input;
use fabric_proto::ids::{EngineId, LeaseId, PoolId, RequestSeq, SlotIndex, SlotRef, TransferId};
use fabric_proto::outcome::{Abort, Failure, Outcome, Rejection};
use fabric_proto::pool::{PageRef, PageRun};
use fabric_proto::wire::{AbortPolicy, Checksums, Purpose, ToDaemon, ToEngine};

use crate::plane::Content;
use crate::setup::Request;
use crate::world::World;

/// One engine's process.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Engine {
    /// Its session.
    pub id: EngineId,
    /// Its pool.
    pub pool: PoolId,
    /// What its daemon said and it has not read.
    pub inbox: VecDeque<ToEngine>,
    /// Its leases.
    pub leases: BTreeMap<LeaseId, Lease>,
    /// The requests of its transfers.
    pub sends: BTreeMap<TransferId, usize>,
    /// Transfers that began with an offer that had gone astray: the request, and whether the offer
    /// was another's.
    pub astray: BTreeMap<TransferId, (usize, bool)>,
}

/// A lease that an engine has.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Lease {
    /// For which request.
    pub request: usize,
    /// Its slots.
    pub slots: Vec<SlotRef>,
    /// What its pages must hold.
    pub expected: BTreeMap<PageRef, u32>,
}

/// How far a request is.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Progress {
    /// The decode side.
    pub destination: Part,
    /// The prefill side.
    pub source: Part,
    /// From the decode side, for the prefill side.
    pub offer: Option<Bytes>,
    /// How far the transfer is.
    pub transfer: Transfer,
    /// The decode side's daemon has said so, whether or not its engine has heard.
    pub delivered: bool,
    /// What the decode side heard.
    pub received: Option<Outcome>,
    /// What the prefill side heard.
    pub sent: Option<Outcome>,
}

/// One side's lease.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Part {
    /// Not asked for.
    #[default]
    Idle,
    /// Asked for.
    Asked,
    /// There.
    Leased(LeaseId),
    /// Ended, or never given.
    Over,
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Transfer {
    /// Not asked for.
    #[default]
    Idle,
    /// Asked for.
    Asked,
    /// Open.
    Open(TransferId),
    /// Every page is sealed, and it was committed.
    Sealed(TransferId),
    /// The engine has told it to stop.
    Aborted(TransferId),
}

/// Which reply is whose: four numbers for each request.
const DESTINATION: u64 = 0;
const SOURCE: u64 = 1;
const SEND: u64 = 2;
const ASTRAY: u64 = 3;
/// Added to the number of a send that brings another request's offer.
const FOREIGN: u64 = 1 << 32;

/// The request that a number is about.
pub(crate) fn request_of(seq: RequestSeq) -> usize {
    usize::try_from(seq.0 % FOREIGN / 4).expect("a world is small")
}

impl World {
    /// Both engines ask for their leases.
    pub(crate) fn begin(&mut self, index: usize) {
        let request = self.setup.requests[index];
        self.requests[index] = Progress {
            destination: Part::Asked,
            source: Part::Asked,
            ..Progress::default()
        };
        for (at, purpose, which) in [
            (request.destination, Purpose::Receive, DESTINATION),
            (request.source, Purpose::Hold, SOURCE),
        ] {
            let named = if request.named && which == DESTINATION {
                (0..request.slots).map(SlotIndex).collect()
            } else {
                Vec::new()
            };
            let message = ToDaemon::Lease {
                seq: RequestSeq(index as u64 * 4 + which),
                pool: self.engine(at).pool,
                tenant: request.tenant_id(),
                request: Request::request_id(index),
                tokens: request.tokens(),
                purpose,
                named,
            };
            self.say(at, message);
        }
    }

    /// The router has brought the offer: the source sends.
    pub(crate) fn send(&mut self, index: usize) {
        let at = self.setup.requests[index].source;
        let progress = &mut self.requests[index];
        let (Part::Leased(lease), Some(offer)) = (progress.source, progress.offer.clone()) else {
            panic!("both sides have their leases");
        };
        progress.transfer = Transfer::Asked;
        let seq = RequestSeq(index as u64 * 4 + SEND);
        self.say(at, ToDaemon::Send { seq, lease, offer });
    }

    /// The router has brought an offer to a request's source that should not have it, or not again.
    pub(crate) fn misroute(&mut self, offered: usize, index: usize) {
        let at = self.setup.requests[index].source;
        let offer = self.requests[offered].offer.clone();
        let (Part::Leased(lease), Some(offer)) = (self.requests[index].source, offer) else {
            panic!("there is a lease, and an offer");
        };
        let foreign = if offered == index { 0 } else { FOREIGN };
        let seq = RequestSeq(foreign + index as u64 * 4 + ASTRAY);
        self.say(at, ToDaemon::Send { seq, lease, offer });
    }

    /// The source has computed everything.
    pub(crate) fn seal(&mut self, index: usize) {
        let progress = &mut self.requests[index];
        let (Transfer::Open(transfer), Part::Leased(lease)) = (progress.transfer, progress.source)
        else {
            panic!("the transfer is open");
        };
        progress.transfer = Transfer::Sealed(transfer);
        self.seal_all(index, transfer, lease);
    }

    fn seal_all(&mut self, index: usize, transfer: TransferId, lease: LeaseId) {
        let request = self.setup.requests[index];
        let slots = self.engine(request.source).leases[&lease].slots.clone();
        for region in 0..self.setup.regions {
            let crcs = slots
                .iter()
                .map(|slot| self.content(request.source, region, *slot).crc());
            let checksums = Checksums {
                region,
                first: 0,
                crcs: crcs.collect(),
            };
            let message = ToDaemon::Seal {
                transfer,
                checksums,
            };
            self.say(request.source, message);
        }
        let payload = Bytes::from(format!("payload {index}"));
        self.say(request.source, ToDaemon::Finish { transfer, payload });
    }

    /// The source stops its transfer.
    pub(crate) fn abort_source(&mut self, index: usize) {
        let at = self.setup.requests[index].source;
        let progress = &mut self.requests[index];
        let (Transfer::Open(transfer) | Transfer::Sealed(transfer)) = progress.transfer else {
            panic!("the transfer is open");
        };
        progress.transfer = Transfer::Aborted(transfer);
        self.say(at, ToDaemon::AbortSend { transfer });
    }

    /// The destination's client is gone.
    pub(crate) fn abort_destination(&mut self, index: usize, policy: Option<AbortPolicy>) {
        let at = self.setup.requests[index].destination;
        self.requests[index].received = Some(Outcome::Aborted(Abort::Destination));
        self.end(at, index, policy);
    }

    /// Ends an engine's lease for a request.
    pub(crate) fn end(&mut self, at: (usize, usize), index: usize, abort: Option<AbortPolicy>) {
        let source = at == self.setup.requests[index].source;
        let progress = &mut self.requests[index];
        let part = if source {
            &mut progress.source
        } else {
            &mut progress.destination
        };
        let Part::Leased(lease) = core::mem::replace(part, Part::Over) else {
            panic!("the lease is there");
        };
        let pool = self.engine(at).pool;
        let ended = self.engine_mut(at).leases.remove(&lease);
        let ended = ended.expect("the lease is there");
        self.oracle.released(at.0, pool, &ended.slots);
        self.say(at, ToDaemon::EndLease { lease, abort });
    }

    /// An engine takes the next message from its daemon.
    pub(crate) fn hear(&mut self, at: (usize, usize)) {
        let message = self.engine_mut(at).inbox.pop_front();
        match message.expect("there is a message") {
            ToEngine::Welcome { .. } | ToEngine::PoolRegistered { .. } => {
                unreachable!("they are heard at once")
            }
            ToEngine::Rejected { seq, reason } => self.rejected(at, seq, reason),
            ToEngine::Leased {
                seq,
                lease,
                slots,
                offer,
            } => self.got_lease(at, seq, lease, slots, offer),
            ToEngine::SendOpened { seq, transfer, .. } => self.send_opened(at, seq, transfer),
            ToEngine::SendOutcome { transfer, outcome } => self.send_ended(at, transfer, outcome),
            ToEngine::Expect { lease, checksums } => self.expect(at, lease, &checksums),
            ToEngine::Verify {
                lease,
                attempt,
                pages,
                ..
            } => self.verify(at, lease, attempt, &pages),
            ToEngine::LeaseOutcome { lease, outcome } => self.received(at, lease, outcome),
        }
    }

    fn rejected(&mut self, at: (usize, usize), seq: RequestSeq, reason: Rejection) {
        let (index, outcome) = (request_of(seq), Outcome::Rejected(reason));
        let pool = self.setup.nodes[at.0][at.1];
        if matches!(reason, Rejection::Busy { .. }) && self.setup.requests[index].slots > pool {
            let what = || format!("request {index} can never fit, and is told to wait");
            self.oracle.violated(9, what);
        }
        let progress = &mut self.requests[index];
        match seq.0 % 4 {
            DESTINATION => {
                progress.destination = Part::Over;
                progress.received = Some(outcome);
            }
            SOURCE => {
                progress.source = Part::Over;
                progress.sent = Some(outcome);
            }
            SEND => {
                progress.sent = Some(outcome);
                self.end(at, index, None);
            }
            _ => {}
        }
    }

    fn send_opened(&mut self, at: (usize, usize), seq: RequestSeq, transfer: TransferId) {
        let index = request_of(seq);
        if seq.0 % 4 != ASTRAY {
            self.requests[index].transfer = Transfer::Open(transfer);
            self.engine_mut(at).sends.insert(transfer, index);
            return;
        }
        let entry = (index, seq.0 >= FOREIGN);
        self.engine_mut(at).astray.insert(transfer, entry);
        // Its lease may have ended, and with it the transfer.
        if let Part::Leased(lease) = self.requests[index].source {
            self.seal_all(index, transfer, lease);
        }
    }

    fn send_ended(&mut self, at: (usize, usize), transfer: TransferId, outcome: Outcome) {
        let delivered = outcome == Outcome::Delivered;
        if let Some((index, foreign)) = self.engine_mut(at).astray.remove(&transfer) {
            // The same offer twice is good once, whichever comes first.
            let twice = self.requests[index].sent == Some(Outcome::Delivered);
            if delivered && (foreign || twice) {
                let what = || format!("transfer {transfer} went astray");
                self.oracle.violated(6, what);
            }
            return;
        }
        let Some(index) = self.engine_mut(at).sends.remove(&transfer) else {
            let what = || format!("transfer {transfer} has a second outcome");
            return self.oracle.violated(3, what);
        };
        let progress = &self.requests[index];
        let sealed = matches!(
            progress.transfer,
            Transfer::Sealed(_) | Transfer::Aborted(_)
        );
        if delivered && !sealed {
            let what = || format!("transfer {transfer} was never sealed");
            self.oracle.violated(3, what);
        }
        if delivered && !self.requests[index].delivered {
            let what = || format!("request {index} was never delivered");
            self.oracle.violated(3, what);
        }
        self.requests[index].sent = Some(outcome);
        self.end(at, index, None);
    }

    fn got_lease(
        &mut self,
        at: (usize, usize),
        seq: RequestSeq,
        lease: LeaseId,
        slots: Vec<SlotRef>,
        offer: Option<Bytes>,
    ) {
        let index = request_of(seq);
        if seq.0 % 4 == SOURCE {
            self.requests[index].source = Part::Leased(lease);
            for region in 0..self.setup.regions {
                for (position, slot) in (0..).zip(&slots) {
                    let page = PageRef { region, position };
                    let content = Content::Page {
                        request: index,
                        page,
                        flipped: false,
                    };
                    *self.content_mut(at, region, *slot) = content;
                }
            }
        } else {
            let progress = &mut self.requests[index];
            progress.destination = Part::Leased(lease);
            progress.offer = offer;
        }
        let entry = Lease {
            request: index,
            slots,
            expected: BTreeMap::new(),
        };
        self.engine_mut(at).leases.insert(lease, entry);
    }

    fn expect(&mut self, at: (usize, usize), lease: LeaseId, checksums: &Checksums) {
        // Of a lease that ended here in the meantime.
        let Some(lease) = self.engine_mut(at).leases.get_mut(&lease) else {
            return;
        };
        for (position, crc) in (checksums.first..).zip(&checksums.crcs) {
            let region = checksums.region;
            lease.expected.insert(PageRef { region, position }, *crc);
        }
    }

    fn verify(&mut self, at: (usize, usize), id: LeaseId, attempt: u32, pages: &[PageRun]) {
        let Some(lease) = self.engine(at).leases.get(&id) else {
            return;
        };
        let (slots, expected) = (lease.slots.clone(), lease.expected.clone());
        let pool = self.engine(at).pool;
        for slot in &slots {
            if self.nodes[at.0].plane.may_be_written(pool, slot.index.0) {
                self.oracle
                    .violated(2, || format!("{slot:?} is verified and may be written"));
            }
        }
        let mut corrupt = Vec::new();
        for run in pages {
            for position in run.first..run.first + run.count {
                let region = run.region;
                let page = PageRef { region, position };
                let holds = self.content(at, region, slots[position as usize]).crc();
                if expected.get(&page) != Some(&holds) {
                    corrupt.push(page);
                }
            }
        }
        let message = ToDaemon::Verified {
            lease: id,
            attempt,
            corrupt,
        };
        self.say(at, message);
    }

    fn received(&mut self, at: (usize, usize), id: LeaseId, outcome: Outcome) {
        let Some(lease) = self.engine(at).leases.get(&id) else {
            return;
        };
        let (index, slots) = (lease.request, lease.slots.clone());
        if outcome == Outcome::Delivered {
            for region in 0..self.setup.regions {
                for (position, slot) in (0..).zip(&slots) {
                    let page = PageRef { region, position };
                    let want = Content::Page {
                        request: index,
                        page,
                        flipped: false,
                    };
                    let got = self.content(at, region, *slot);
                    if got != want {
                        let what = || format!("request {index} reads {got:?}, wants {want:?}");
                        self.oracle.violated(2, what);
                    }
                }
            }
        }
        self.requests[index].received = Some(outcome);
        self.end(at, index, None);
    }

    /// An engine's session is gone, and what it knew with it.
    pub(crate) fn session_lost(&mut self, at: (usize, usize), failure: Failure) {
        let pool = self.engine(at).pool;
        let leases = core::mem::take(&mut self.engine_mut(at).leases);
        for lease in leases.values() {
            self.oracle.released(at.0, pool, &lease.slots);
        }
        for index in 0..self.requests.len() {
            let request = self.setup.requests[index];
            let progress = &mut self.requests[index];
            let lives = |part| !matches!(part, Part::Idle | Part::Over);
            if request.destination == at && lives(progress.destination) {
                progress.destination = Part::Over;
                progress.received = Some(Outcome::Failed(failure));
            }
            if request.source == at && lives(progress.source) {
                progress.source = Part::Over;
                progress.sent = Some(Outcome::Failed(failure));
            }
        }
    }

    /// An engine speaks, if its daemon still has its session.
    pub(crate) fn say(&mut self, at: (usize, usize), message: ToDaemon) {
        let engine = self.engine(at).id;
        self.input(at.0, Input::Engine { engine, message });
    }

    pub(crate) fn engine(&self, at: (usize, usize)) -> &Engine {
        &self.nodes[at.0].engines[at.1]
    }

    pub(crate) fn engine_mut(&mut self, at: (usize, usize)) -> &mut Engine {
        &mut self.nodes[at.0].engines[at.1]
    }

    fn content(&self, at: (usize, usize), region: u16, slot: SlotRef) -> Content {
        let pool = self.engine(at).pool;
        let memory = &self.nodes[at.0].plane.memory[&pool];
        memory[self.place(at, region, slot)]
    }

    fn content_mut(&mut self, at: (usize, usize), region: u16, slot: SlotRef) -> &mut Content {
        let (pool, place) = (self.engine(at).pool, self.place(at, region, slot));
        let memory = self.nodes[at.0].plane.memory.get_mut(&pool);
        &mut memory.expect("a session's pool is mapped")[place]
    }

    fn place(&self, at: (usize, usize), region: u16, slot: SlotRef) -> usize {
        let slots = self.setup.nodes[at.0][at.1];
        usize::from(region) * slots as usize + slot.index.0 as usize
    }
}
