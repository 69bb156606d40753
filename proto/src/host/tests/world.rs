//! The world around two machines.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::host::{
    Config, Host, Input, Misbehaviour, Observation, Output, PlaneCommand, Proofs, ReadsStopped,
    ScrubPolicy, StoppedBy, Tenants, WritesStopped,
};
use crate::ids::{
    EngineId, GrantId, Incarnation, LeaseId, LinkId, NodeId, PoolId, RequestId, RequestSeq, Secret,
    SlotIndex, SlotRef, Tag, TenantId, TransferId,
};
use crate::outcome::Outcome;
use crate::pool::{Arrangement, Layout, PageRef, PageRun, PoolSpec, TokenRange};
use crate::time::Now;
use crate::wire::{AbortPolicy, Checksums, PeerMessage, PlaneKind, Purpose, ToDaemon, ToEngine};

pub(super) const REGIONS: u16 = 2;
pub(super) const PAGE_BYTES: u32 = 100;
pub(super) const PER_SLOT: u16 = 4;
pub(super) const SLOTS: u32 = 6;

/// The proofs of the world's planes.
#[derive(Debug)]
pub(super) struct Proven;

#[derive(Debug)]
pub(super) struct Stopped(pub(super) GrantId, pub(super) StoppedBy);

impl WritesStopped for Stopped {
    fn grant(&self) -> GrantId {
        self.0
    }

    fn by(&self) -> StoppedBy {
        self.1
    }
}

#[derive(Debug)]
pub(super) struct Read(TransferId, GrantId);

impl ReadsStopped for Read {
    fn transfer(&self) -> TransferId {
        self.0
    }

    fn grant(&self) -> GrantId {
        self.1
    }
}

impl Proofs for Proven {
    type WritesStopped = Stopped;
    type ReadsStopped = Read;
}

/// A machine and what its shell would know.
pub(super) struct Node {
    pub(super) host: Host<Proven>,
    pub(super) said: Vec<ToEngine>,
    pub(super) seen: Vec<Observation>,
    pub(super) unmapped: Vec<PoolId>,
    pub(super) closed: Vec<Misbehaviour>,
    pub(super) shut: bool,
    /// Grants that the destination's plane accepts writes under.
    pub(super) armed: BTreeMap<GrantId, (PoolId, Vec<PageRef>)>,
    /// The source's open writers.
    pub(super) writers: BTreeMap<TransferId, GrantId>,
    /// What they were told to write.
    pub(super) written: Vec<PageRun>,
    pub(super) scrubs: VecDeque<(PoolId, Arc<[SlotRef]>)>,
}

/// Something on its way.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Event {
    Peer(PeerMessage),
    Armed(GrantId),
    Written(TransferId, GrantId, u64),
    Stopped(GrantId, StoppedBy),
    ReadsStopped(TransferId, GrantId),
    LinkUp,
    ConnectFailed,
}

pub(super) struct World {
    pub(super) now: Now,
    pub(super) nodes: [Node; 2],
    pub(super) queue: VecDeque<(usize, Event)>,
    pub(super) link: Option<LinkId>,
    next_link: u64,
    /// Where the destination's plane finds pages that a write did not land in.
    pub(super) planes: Vec<PlaneKind>,
    pub(super) reachable: bool,
}

pub(super) const P: usize = 0;
pub(super) const D: usize = 1;
pub(super) const ENGINE: EngineId = EngineId(1);
pub(super) const POOL: PoolId = PoolId(1);

pub(super) fn tenant(name: &str) -> TenantId {
    TenantId::new(name).unwrap()
}

pub(super) fn config(node: usize) -> Config {
    Config {
        node: NodeId([u8::try_from(node).unwrap(); 32]),
        incarnation: Incarnation::new(7).unwrap(),
        secret: Secret([u8::try_from(node).unwrap() + 40; 32]),
        abort: AbortPolicy::FinishTransfer,
        scrub: ScrubPolicy::CrossTenant,
        offer_ttl: Duration::from_secs(30),
        open_max: Duration::from_secs(4),
        silence_max: Duration::from_secs(30),
        drain_max: Duration::from_secs(1),
        verify_max: Duration::from_secs(60),
        attempts_max: 3,
        outstanding_bytes_max: 250,
    }
}

pub(super) fn spec() -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag([1; 32]),
            regions: REGIONS,
            page_bytes: PAGE_BYTES,
            tokens_per_slot: PER_SLOT,
        },
        slots: SLOTS,
        arrangement: Arrangement::RegionMajor,
        context_tokens: u64::from(SLOTS) * u64::from(PER_SLOT),
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(config)
    }

    /// Two machines with an engine and a pool each, and no link yet.
    pub(super) fn with(config: impl Fn(usize) -> Config) -> Self {
        let node = |index| Node {
            host: Host::new(config(index)),
            said: Vec::new(),
            seen: Vec::new(),
            unmapped: Vec::new(),
            closed: Vec::new(),
            shut: false,
            armed: BTreeMap::new(),
            writers: BTreeMap::new(),
            written: Vec::new(),
            scrubs: VecDeque::new(),
        };
        let mut world = Self {
            now: Now::default(),
            nodes: [node(P), node(D)],
            queue: VecDeque::new(),
            link: None,
            next_link: 1,
            planes: vec![PlaneKind::Quic],
            reachable: true,
        };
        for index in [P, D] {
            world.engine_up(index, ENGINE, POOL);
        }
        world
    }

    pub(super) fn engine_up(&mut self, node: usize, engine: EngineId, pool: PoolId) {
        self.input(
            node,
            Input::EngineUp {
                engine,
                tenants: Tenants::Any,
            },
        );
        let (seq, spec) = (RequestSeq(0), spec());
        let memory_bytes = spec.bytes();
        self.input(
            node,
            Input::RegisterPool {
                engine,
                seq,
                pool,
                spec,
                memory_bytes,
            },
        );
    }

    /// Gives one machine an input, checks it, and carries out what it says.
    pub(super) fn input(&mut self, index: usize, input: Input<Proven>) {
        let now = self.now;
        self.nodes[index].host.handle(now, input);
        while let Some(output) = self.nodes[index].host.poll() {
            self.output(index, output);
        }
        self.nodes[index].host.invariants();
    }

    fn output(&mut self, index: usize, output: Output) {
        let node = &mut self.nodes[index];
        match output {
            Output::Engine { message, .. } => node.said.push(message),
            Output::CloseEngine { engine, reason } => {
                node.closed.push(reason);
                self.input(index, Input::EngineGone { engine });
            }
            Output::Peer { message, .. } => self.queue.push_back((1 - index, Event::Peer(message))),
            Output::CloseLink { reason, .. } => {
                node.closed.push(reason);
                self.cut();
            }
            // The nodes of this world live once.
            Output::Connect { after: None, .. } if self.reachable => {
                self.queue.push_back((index, Event::LinkUp));
            }
            Output::Connect { .. } => self.queue.push_back((index, Event::ConnectFailed)),
            Output::Plane { command, .. } => self.plane(index, command),
            Output::Scrub { pool, slots } => node.scrubs.push_back((pool, slots)),
            Output::Unmap { pool } => {
                let into = |(armed, _): &(PoolId, _)| *armed == pool;
                assert!(
                    !node.armed.values().any(into),
                    "no memory goes while a write may land"
                );
                node.unmapped.push(pool);
            }
            Output::Observe(observation) => node.seen.push(observation),
            Output::ShutdownComplete => node.shut = true,
        }
    }

    fn plane(&mut self, index: usize, command: PlaneCommand) {
        let node = &mut self.nodes[index];
        let event = match command {
            PlaneCommand::Arm {
                grant,
                pool,
                slots,
                pages,
                ..
            } => {
                let all = (0..REGIONS).flat_map(|region| {
                    let positions = 0..u32::try_from(slots.len()).unwrap();
                    positions.map(move |position| PageRef { region, position })
                });
                let allowed = |page: &PageRef| {
                    pages.is_empty() || pages.iter().any(|run| run.contains(*page))
                };
                node.armed
                    .insert(grant, (pool, all.filter(allowed).collect()));
                (index, Event::Armed(grant))
            }
            PlaneCommand::Fence { grant } => match node.armed.remove(&grant) {
                Some(_) => (index, Event::Stopped(grant, StoppedBy::Fence)),
                None => return,
            },
            PlaneCommand::OpenWriter {
                transfer, grant, ..
            } => {
                assert_eq!(
                    node.writers.insert(transfer, grant),
                    None,
                    "one writer at a time"
                );
                return;
            }
            PlaneCommand::Write { transfer, run } => {
                let grant = node.writers[&transfer];
                node.written.push(run);
                let bytes = u64::from(run.count) * u64::from(PAGE_BYTES);
                (index, Event::Written(transfer, grant, bytes))
            }
            PlaneCommand::Drain { transfer } | PlaneCommand::Stop { transfer } => {
                let Some(grant) = node.writers.remove(&transfer) else {
                    return;
                };
                self.queue
                    .push_back((index, Event::ReadsStopped(transfer, grant)));
                (1 - index, Event::Stopped(grant, StoppedBy::Drain))
            }
        };
        self.queue.push_back(event);
    }

    /// Delivers one event; tells whether it still meant something.
    pub(super) fn deliver(&mut self, index: usize, event: Event) {
        let link = self.link;
        let input = match event {
            Event::Peer(message) => match link {
                Some(link) => Input::Peer { link, message },
                None => return,
            },
            Event::Armed(grant) => Input::Armed { grant },
            Event::Written(transfer, grant, bytes) => Input::Written {
                transfer,
                grant,
                bytes,
            },
            Event::Stopped(grant, StoppedBy::Drain) => {
                // The drain comes by the link, and only for a grant that is still armed.
                if link.is_none() || self.nodes[index].armed.remove(&grant).is_none() {
                    return;
                }
                Input::WritesStopped(Stopped(grant, StoppedBy::Drain))
            }
            Event::Stopped(grant, by) => Input::WritesStopped(Stopped(grant, by)),
            Event::ReadsStopped(transfer, grant) => Input::ReadsStopped(Read(transfer, grant)),
            Event::LinkUp => return self.connect(),
            Event::ConnectFailed => {
                let node = NodeId([u8::try_from(1 - index).unwrap(); 32]);
                Input::ConnectFailed { node }
            }
        };
        self.input(index, input);
    }

    pub(super) fn connect(&mut self) {
        if self.link.is_some() {
            return;
        }
        let link = LinkId(self.next_link);
        self.next_link += 1;
        self.link = Some(link);
        for index in [P, D] {
            let node = NodeId([u8::try_from(1 - index).unwrap(); 32]);
            let incarnation = Incarnation::new(7).unwrap();
            let planes = self.planes.clone();
            self.input(
                index,
                Input::LinkUp {
                    link,
                    node,
                    incarnation,
                    planes,
                },
            );
        }
    }

    /// Cuts the link: what was on it is lost, what the planes said to their own hosts is not.
    pub(super) fn cut(&mut self) {
        let Some(link) = self.link.take() else { return };
        self.queue.retain(|(_, event)| {
            !matches!(event, Event::Peer(_) | Event::Stopped(_, StoppedBy::Drain))
        });
        for index in [P, D] {
            self.input(index, Input::LinkDown { link });
        }
    }

    /// Delivers everything that is on its way, scrubs too.
    pub(super) fn settle(&mut self) {
        loop {
            for index in [P, D] {
                while let Some((pool, slots)) = self.nodes[index].scrubs.pop_front() {
                    self.input(index, Input::Scrubbed { pool, slots });
                }
            }
            let Some((index, event)) = self.queue.pop_front() else {
                return;
            };
            self.deliver(index, event);
        }
    }

    /// Delivers until an event matches, which is left at the head of the queue.
    pub(super) fn settle_until(&mut self, stop: impl Fn(usize, &Event) -> bool) {
        while let Some((index, event)) = self.queue.pop_front() {
            if stop(index, &event) {
                return self.queue.push_front((index, event));
            }
            self.deliver(index, event);
        }
        panic!("the event never came");
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now.plus(time);
        for index in [P, D] {
            self.input(index, Input::Tick);
        }
    }

    pub(super) fn engine(&mut self, index: usize, message: ToDaemon) {
        self.input(
            index,
            Input::Engine {
                engine: ENGINE,
                message,
            },
        );
    }

    /// Leases slots for `tokens` tokens; the reply is the last thing said.
    pub(super) fn lease(
        &mut self,
        index: usize,
        name: &str,
        tokens: u64,
        purpose: Purpose,
    ) -> (LeaseId, Vec<SlotRef>, Option<Bytes>) {
        self.ask_lease(
            index,
            name,
            TokenRange {
                start: 0,
                count: tokens,
            },
            purpose,
            Vec::new(),
        );
        match self.nodes[index].said.last() {
            Some(ToEngine::Leased {
                lease,
                slots,
                offer,
                ..
            }) => (*lease, slots.clone(), offer.clone()),
            other => panic!("a lease, not {other:?}"),
        }
    }

    pub(super) fn ask_lease(
        &mut self,
        index: usize,
        name: &str,
        tokens: TokenRange,
        purpose: Purpose,
        named: Vec<SlotIndex>,
    ) {
        let request = RequestId::new("r").unwrap();
        let tenant = tenant(name);
        let seq = RequestSeq(1);
        let lease = ToDaemon::Lease {
            seq,
            pool: POOL,
            tenant,
            request,
            tokens,
            purpose,
            named,
        };
        self.engine(index, lease);
        let scrubs = std::mem::take(&mut self.nodes[index].scrubs);
        for (pool, slots) in scrubs {
            self.input(index, Input::Scrubbed { pool, slots });
        }
    }

    /// Both leases, and a send between them that nothing has been delivered of yet.
    pub(super) fn begin(&mut self, tokens: u64) -> Begun {
        let (to, _, offer) = self.lease(D, "a", tokens, Purpose::Receive);
        let (from, _, _) = self.lease(P, "a", tokens, Purpose::Hold);
        let offer = offer.unwrap();
        self.engine(
            P,
            ToDaemon::Send {
                seq: RequestSeq(2),
                lease: from,
                offer: offer.clone(),
            },
        );
        let Some(ToEngine::SendOpened {
            transfer, slots, ..
        }) = self.nodes[P].said.last()
        else {
            panic!("a transfer, not {:?}", self.nodes[P].said.last());
        };
        Begun {
            to,
            from,
            transfer: *transfer,
            slots: *slots,
            offer,
        }
    }

    pub(super) fn seal_all(&mut self, begun: &Begun) {
        for region in 0..REGIONS {
            let crcs = (0..begun.slots)
                .map(|slot| slot * 7 + u32::from(region))
                .collect();
            let checksums = Checksums {
                region,
                first: 0,
                crcs,
            };
            self.engine(
                P,
                ToDaemon::Seal {
                    transfer: begun.transfer,
                    checksums,
                },
            );
        }
    }

    pub(super) fn finish(&mut self, begun: &Begun) {
        let payload = Bytes::from_static(b"first token");
        self.engine(
            P,
            ToDaemon::Finish {
                transfer: begun.transfer,
                payload,
            },
        );
    }

    /// A transfer whose pages have arrived and wait to be verified.
    pub(super) fn arrive(&mut self, tokens: u64) -> Begun {
        let begun = self.begin(tokens);
        self.seal_all(&begun);
        self.finish(&begun);
        self.settle();
        begun
    }

    pub(super) fn verify(&mut self, begun: &Begun, attempt: u32, corrupt: Vec<PageRef>) {
        self.engine(
            D,
            ToDaemon::Verified {
                lease: begun.to,
                attempt,
                corrupt,
            },
        );
    }

    pub(super) fn end(&mut self, index: usize, lease: LeaseId, abort: AbortPolicy) {
        self.engine(
            index,
            ToDaemon::EndLease {
                lease,
                abort: Some(abort),
            },
        );
    }

    pub(super) fn sent(&self) -> Vec<Outcome> {
        let outcome = |said: &ToEngine| match said {
            ToEngine::SendOutcome { outcome, .. } => Some(*outcome),
            _ => None,
        };
        self.nodes[P].said.iter().filter_map(outcome).collect()
    }

    pub(super) fn received(&self) -> Vec<Outcome> {
        let outcome = |said: &ToEngine| match said {
            ToEngine::LeaseOutcome { outcome, .. } => Some(*outcome),
            _ => None,
        };
        self.nodes[D].said.iter().filter_map(outcome).collect()
    }

    pub(super) fn free(&self, index: usize) -> u64 {
        self.nodes[index].host.usage().free
    }

    pub(super) fn rejections(&self, index: usize) -> Vec<crate::outcome::Rejection> {
        let reason = |said: &ToEngine| match said {
            ToEngine::Rejected { reason, .. } => Some(*reason),
            _ => None,
        };
        self.nodes[index].said.iter().filter_map(reason).collect()
    }

    /// S4: after everything has ended, every slot is free and nothing is left.
    pub(super) fn all_is_free(&self) {
        for node in &self.nodes {
            let usage = node.host.usage();
            assert_eq!(usage.free, usage.slots, "every slot is free: {usage:?}");
            assert!(node.armed.is_empty() && node.writers.is_empty());
            assert_eq!(node.host.deadline(), None, "nothing is waited for");
        }
    }
}

pub(super) struct Begun {
    pub(super) to: LeaseId,
    pub(super) from: LeaseId,
    pub(super) transfer: TransferId,
    pub(super) slots: u32,
    pub(super) offer: Bytes,
}

pub(super) fn pages(runs: &[(u16, u32)]) -> Vec<PageRef> {
    runs.iter()
        .map(|&(region, position)| PageRef { region, position })
        .collect()
}

/// Every page of a set, for comparing what a plane was allowed.
pub(super) fn set(pages: &[PageRef]) -> BTreeSet<PageRef> {
    pages.iter().copied().collect()
}
