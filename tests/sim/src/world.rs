//! Daemons, links, and what is on its way; what may happen next, and what it does.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use fabric_proto::host::{Host, Input, Observation, Output, PlaneCommand, StoppedBy, Tenants};
use fabric_proto::ids::{EngineId, Incarnation, LinkId, PoolId, RequestSeq, SlotRef, TransferId};
use fabric_proto::outcome::Outcome;
use fabric_proto::time::Now;
use fabric_proto::wire::{AbortPolicy, PeerMessage, PlaneKind, ToEngine};

use crate::engine::{Engine, Part, Progress, Transfer, request_of};
use crate::lies::Lie;
use crate::oracle::{Oracle, Violation};
use crate::plane::{Armed, Cargo, Content, Flight, Plane, Proven, Writer};
use crate::setup::{Budget, PAGE_BYTES, Setup, node_id, node_of};

/// Everything there is, at one moment.
#[derive(Clone, Eq, PartialEq)]
pub struct World {
    pub(crate) setup: Arc<Setup>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) links: BTreeMap<LinkId, Link>,
    pub(crate) dials: Vec<Dial>,
    pub(crate) flights: Vec<Flight>,
    pub(crate) requests: Vec<Progress>,
    pub(crate) budget: Budget,
    pub(crate) oracle: Oracle,
    next_link: u64,
    /// On the clocks of daemons that have died. For figures alone.
    pub(crate) lived: Duration,
}

/// A daemon and its engines.
#[derive(Clone, Eq, PartialEq)]
pub(crate) struct Node {
    /// Shared until it changes: most events change one machine.
    pub(crate) host: Arc<Host<Proven>>,
    pub(crate) incarnation: u64,
    pub(crate) now: Now,
    /// It was told to shut down.
    pub(crate) stopping: bool,
    /// What its planes and its scrubber have said.
    pub(crate) local: VecDeque<Local>,
    pub(crate) plane: Plane,
    pub(crate) engines: Vec<Engine>,
    pub(crate) next_engine: u64,
    pub(crate) next_pool: u32,
}

/// Something a machine is to hear from its own host.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Local {
    Armed(fabric_proto::ids::GrantId),
    Written(TransferId, fabric_proto::ids::GrantId),
    WriterFailed(TransferId, fabric_proto::ids::GrantId),
    WritesStopped(crate::plane::Stopped),
    ReadsStopped(crate::plane::Read),
    Scrubbed(PoolId, Arc<[SlotRef]>),
}

/// A connection between two daemons' lives.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Link {
    pub(crate) ends: [End; 2],
    /// Whether what is sent to an end is lost.
    pub(crate) deaf: [bool; 2],
    /// An end of it has lied: what the other makes of it is no fault of the other's.
    pub(crate) lied: bool,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct End {
    pub(crate) node: usize,
    pub(crate) incarnation: u64,
    /// What is on its way to this end.
    pub(crate) inbox: VecDeque<PeerMessage>,
    /// Whether this end still believes in the link.
    pub(crate) up: bool,
}

impl Link {
    /// Whether both ends will notice that it is gone.
    pub(crate) fn broken(&self) -> bool {
        self.deaf != [false; 2]
    }
}

/// A connection that a daemon wants.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct Dial {
    pub(crate) node: usize,
    incarnation: u64,
    peer: usize,
    after: Option<Incarnation>,
}

/// Something that may happen.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Event {
    /// Both engines of a request ask for their leases.
    Begin(usize),
    /// The router has brought a request's offer.
    Send(usize),
    /// A request's prefill is done.
    Seal(usize),
    /// One side of a request is lost, and the other side is told.
    GiveUp(usize),
    /// A daemon hears from its own planes.
    Local(usize),
    /// An engine hears from its daemon.
    Hear(usize, usize),
    /// An end of a link hears from the other.
    Peer(LinkId, usize),
    /// What is in the air arrives: a page, or a drain.
    Land(usize),
    /// A writer reads no more: what it has posted flies on.
    WriterEnds(usize, TransferId),
    /// A writer finds that its grant is gone.
    WriterBreaks(usize, TransferId),
    /// A fence is done.
    Fenced(usize, fabric_proto::ids::GrantId),
    /// An end of a broken link notices.
    Lost(LinkId, usize),
    /// A connection comes about, or finds nobody to connect to.
    Dialled(usize),
    /// Fault: a page arrives with a bit flipped.
    Flip(usize),
    /// Fault: a link breaks.
    Cut(LinkId),
    /// Fault: a daemon dies, and comes back.
    CrashDaemon(usize),
    /// Fault: an engine dies, and comes back.
    CrashEngine(usize, usize),
    /// Fault: a connection does not come about.
    Unreachable(usize),
    /// A request's client is gone.
    AbortDestination(usize, Option<AbortPolicy>),
    /// A request's prefill is stopped.
    AbortSource(usize),
    /// The router brings the first request's offer to the second's source.
    Misroute(usize, usize),
    /// Fault: what is sent to one end of a link is lost.
    OneWay(LinkId, usize),
    /// Fault: an end of a link hears what the other should not have said.
    Lie(LinkId, usize, Lie),
    /// A daemon is told to shut down; it comes back when it has.
    Shutdown(usize),
    /// Fault: a daemon's clock is set back.
    ClockStep(usize),
    /// A daemon's clock comes to its next deadline.
    Tick(usize),
}

impl World {
    /// A world in which nothing has happened.
    #[must_use]
    pub fn new(setup: Setup) -> Self {
        let budget = setup.budget;
        let requests = vec![Progress::default(); setup.requests.len()];
        let count = setup.nodes.len();
        let mut world = Self {
            setup: Arc::new(setup),
            nodes: Vec::new(),
            links: BTreeMap::new(),
            dials: Vec::new(),
            flights: Vec::new(),
            requests,
            budget,
            oracle: Oracle::default(),
            next_link: 1,
            lived: Duration::ZERO,
        };
        for node in 0..count {
            let host = Arc::new(Host::new(world.setup.config(node, 1)));
            world.nodes.push(Node {
                host,
                incarnation: 1,
                now: Now::default(),
                stopping: false,
                local: VecDeque::new(),
                plane: Plane::default(),
                engines: Vec::new(),
                next_engine: 1,
                next_pool: 1,
            });
            for engine in 0..world.setup.nodes[node].len() {
                world.start_engine((node, engine));
            }
        }
        world
    }

    /// The first violation.
    #[must_use]
    pub fn violation(&self) -> Option<&Violation> {
        self.oracle.violation()
    }

    /// What either side of any request has heard.
    pub fn outcomes(&self) -> impl Iterator<Item = Outcome> {
        let heard = |progress: &Progress| [progress.sent, progress.received];
        self.requests.iter().flat_map(heard).flatten()
    }

    /// Whether a side of a request heard this, by kind and reason.
    #[must_use]
    pub fn heard(&self, kind: &str, reason: &str) -> bool {
        self.outcomes()
            .any(|outcome| outcome.label() == kind && outcome.reason() == reason)
    }

    /// How much time has passed on all daemons' clocks together.
    #[must_use]
    pub fn virtual_time(&self) -> Duration {
        let before = self.lived;
        self.nodes.iter().map(|node| node.now.0).sum::<Duration>() + before
    }

    /// Whether everything comes to rest from here, with every invariant.
    #[must_use]
    pub fn comes_to_rest(&self) -> bool {
        let mut world = self.clone();
        world.settle();
        world.violation().is_none()
    }

    /// What may still go wrong.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// What may happen next. Nothing after a violation.
    #[must_use]
    pub fn enabled(&self) -> Vec<Event> {
        let mut events = Vec::new();
        if self.violation().is_none() {
            self.progress(&mut events);
            self.faults(&mut events);
        }
        events
    }

    /// What happens without any fault and without new work.
    pub(crate) fn progress(&self, events: &mut Vec<Event>) {
        for index in 0..self.requests.len() {
            self.progress_of(index, events);
        }
        for (node, state) in self.nodes.iter().enumerate() {
            if !state.local.is_empty() {
                events.push(Event::Local(node));
            }
            for (engine, state) in state.engines.iter().enumerate() {
                if !state.inbox.is_empty() {
                    events.push(Event::Hear(node, engine));
                }
            }
            for (grant, armed) in &state.plane.armed {
                if armed.fencing {
                    events.push(Event::Fenced(node, *grant));
                }
            }
            for (transfer, writer) in &state.plane.writers {
                if writer.ending {
                    events.push(Event::WriterEnds(node, *transfer));
                } else if !self.may_land(node, *transfer, writer) {
                    events.push(Event::WriterBreaks(node, *transfer));
                }
            }
        }
        for (id, link) in &self.links {
            for (side, end) in link.ends.iter().enumerate() {
                if end.up && !end.inbox.is_empty() {
                    events.push(Event::Peer(*id, side));
                }
                if end.up && link.broken() {
                    events.push(Event::Lost(*id, side));
                }
            }
        }
        for (index, flight) in self.flights.iter().enumerate() {
            let same = |other: &Flight| other.to == flight.to && other.grant == flight.grant;
            let is_page = |other: &Flight| matches!(other.cargo, Cargo::Page(..));
            // A drain comes after every write of its grant.
            let waits = !is_page(flight)
                && self
                    .flights
                    .iter()
                    .any(|other| is_page(other) && same(other));
            if !waits {
                events.push(Event::Land(index));
            }
        }
        events.extend((0..self.dials.len()).map(Event::Dialled));
    }

    fn progress_of(&self, index: usize, events: &mut Vec<Event>) {
        let progress = &self.requests[index];
        let begun = progress.destination != Part::Idle;
        let over = progress.destination == Part::Over && progress.source == Part::Over;
        let delivered = progress.received == Some(Outcome::Delivered);
        if !begun || (over && !delivered && self.budget.retries > 0) {
            events.push(Event::Begin(index));
        }
        let (source, destination) = (progress.source, progress.destination);
        let leased = |part| matches!(part, Part::Leased(_));
        if leased(source) && progress.offer.is_some() && progress.transfer == Transfer::Idle {
            events.push(Event::Send(index));
        }
        if leased(source) && matches!(progress.transfer, Transfer::Open(_)) {
            events.push(Event::Seal(index));
        }
        let lone_source =
            leased(source) && destination == Part::Over && progress.transfer == Transfer::Idle;
        let lone_destination = leased(destination)
            && source == Part::Over
            && progress.sent != Some(Outcome::Delivered);
        if lone_source || lone_destination {
            events.push(Event::GiveUp(index));
        }
    }

    /// Lets an event happen, which must be one that may.
    ///
    /// # Panics
    ///
    /// Where it may not. What goes wrong inside a machine is a violation instead.
    pub fn apply(&mut self, event: Event) {
        match event {
            Event::Begin(index) => {
                if self.requests[index].destination != Part::Idle {
                    self.budget.retries -= 1;
                }
                self.begin(index);
            }
            Event::Send(index) => self.send(index),
            Event::Seal(index) => self.seal(index),
            Event::GiveUp(index) => {
                let request = self.setup.requests[index];
                if let Part::Leased(_) = self.requests[index].source {
                    self.end(request.source, index, None);
                } else {
                    self.end(request.destination, index, None);
                }
            }
            Event::Local(node) => self.local(node),
            Event::Hear(node, engine) => self.hear((node, engine)),
            Event::Peer(link, side) => {
                let end = &mut self.links.get_mut(&link).expect("the link is there").ends[side];
                let (node, message) = (end.node, end.inbox.pop_front());
                let message = message.expect("there is a message");
                self.input(node, Input::Peer { link, message });
            }
            Event::Land(index) => self.land(index, false),
            Event::WriterEnds(node, transfer) => self.writer_ends(node, transfer, true),
            Event::WriterBreaks(node, transfer) => {
                let grant = self.nodes[node].plane.writers[&transfer].grant;
                self.tell(node, Local::WriterFailed(transfer, grant));
                self.writer_ends(node, transfer, false);
            }
            Event::Fenced(node, grant) => {
                let proof = self.nodes[node].plane.close(grant, StoppedBy::Fence);
                let proof = proof.expect("the grant is armed");
                self.tell(node, Local::WritesStopped(proof));
                self.clear_air();
            }
            Event::Lost(link, side) => self.lost(link, side),
            Event::Dialled(index) => self.dialled(index),
            Event::Flip(_)
            | Event::Cut(_)
            | Event::OneWay(..)
            | Event::Lie(..)
            | Event::Shutdown(_)
            | Event::ClockStep(_)
            | Event::CrashDaemon(_)
            | Event::CrashEngine(..)
            | Event::Unreachable(_)
            | Event::AbortDestination(..)
            | Event::AbortSource(_)
            | Event::Misroute(..)
            | Event::Tick(_) => self.fault(event),
        }
    }

    /// Lets a daemon's clock come to its next deadline, if it has one.
    pub(crate) fn tick(&mut self, node: usize) {
        if let Some(deadline) = self.nodes[node].host.deadline() {
            self.nodes[node].now = self.nodes[node].now.max(deadline);
            self.input(node, Input::Tick);
        }
    }

    /// Lets everything come to rest, without faults and without new requests, and checks that
    /// nothing is left: S4, and the sums of S10. Gives the number of events.
    pub fn settle(&mut self) -> usize {
        self.budget = Budget::default();
        let mut events = Vec::new();
        for step in 0..SETTLE_EVENTS_MAX {
            events.clear();
            self.progress(&mut events);
            events.retain(|event| !matches!(event, Event::Begin(_)));
            if self.violation().is_some() {
                return step;
            }
            if let Some(event) = events.first() {
                self.apply(*event);
                continue;
            }
            let due = |node: &Node| node.host.deadline();
            let next = (0..self.nodes.len()).filter_map(|node| {
                let deadline = due(&self.nodes[node])?;
                Some((deadline, node))
            });
            match next.min() {
                Some((_, node)) => self.tick(node),
                None => {
                    self.is_at_rest();
                    return step;
                }
            }
        }
        self.oracle
            .violated(4, || "it never comes to rest".to_owned());
        SETTLE_EVENTS_MAX
    }

    fn is_at_rest(&mut self) {
        for index in 0..self.requests.len() {
            let progress = &self.requests[index];
            let ended = |part| matches!(part, Part::Idle | Part::Over);
            if !ended(progress.destination) || !ended(progress.source) {
                let what = format!("request {index} is left: {progress:?}");
                self.oracle.violated(4, || what);
            }
        }
        for node in 0..self.nodes.len() {
            let state = &self.nodes[node];
            let usage = state.host.usage();
            let left = state.plane.armed.len() + state.plane.writers.len();
            if usage.free != usage.slots || left > 0 {
                let what = format!("node {node}: {usage:?}, {left} grants and writers");
                self.oracle.violated(4, || what);
            }
        }
        self.oracle.settled();
    }

    /// A machine handles an input, and the world does what it asks for.
    pub(crate) fn input(&mut self, node: usize, input: Input<Proven>) {
        let state = &mut self.nodes[node];
        let (host, now) = (Arc::make_mut(&mut state.host), state.now);
        let recount = self.setup.recount;
        let mut outputs = Vec::new();
        let handled = catch_unwind(AssertUnwindSafe(|| {
            host.handle(now, input);
            while let Some(output) = host.poll() {
                outputs.push(output);
            }
            if recount {
                host.invariants();
            }
        }));
        if let Err(panic) = handled {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            return self.oracle.violated(0, || text.unwrap_or_default());
        }
        for output in outputs {
            self.output(node, output);
        }
    }

    fn output(&mut self, node: usize, output: Output) {
        match output {
            Output::Engine { engine, message } => self.tell_engine(node, engine, message),
            Output::CloseEngine { reason, .. } => {
                let what = format!("node {node} blames an honest engine: {reason}");
                self.oracle.violated(3, || what);
            }
            Output::Peer { link, message } => self.tell_peer(node, link, message),
            Output::CloseLink { link, reason } => {
                let link = self.links.get_mut(&link).expect("the link is there");
                if link.lied {
                    link.deaf = [true; 2];
                    return;
                }
                let what = format!("node {node} blames an honest peer: {reason}");
                self.oracle.violated(3, || what);
            }
            Output::Connect { node: peer, after } => {
                let dial = Dial {
                    node,
                    incarnation: self.nodes[node].incarnation,
                    peer: node_of(peer),
                    after,
                };
                let same = |other: &&mut Dial| other.node == node && other.peer == dial.peer;
                match self.dials.iter_mut().find(same) {
                    Some(other) => other.after = other.after.min(after),
                    None => self.dials.push(dial),
                }
            }
            Output::Plane { command, .. } => self.command(node, command),
            Output::Scrub { pool, slots } => {
                self.scrub(node, pool, &slots);
                self.tell(node, Local::Scrubbed(pool, slots));
            }
            Output::Unmap { pool } => {
                let plane = &mut self.nodes[node].plane;
                let used = plane.armed.values().any(|armed| armed.pool == pool)
                    || plane.writers.values().any(|writer| writer.pool == pool);
                plane.memory.remove(&pool);
                if used {
                    let what = format!("node {node} unmaps {pool}, which is written or read");
                    self.oracle.violated(1, || what);
                }
            }
            Output::Observe(observation) => self.observe(node, &observation),
            Output::ShutdownComplete => self.shut_down(node),
        }
    }

    fn observe(&mut self, node: usize, observation: &Observation) {
        self.oracle.observed(node, observation);
    }

    fn tell_engine(&mut self, node: usize, id: EngineId, message: ToEngine) {
        let Some(engine) = self.nodes[node].engines.iter().position(|one| one.id == id) else {
            return;
        };
        if let ToEngine::Welcome { .. } = message {
            return;
        }
        if let ToEngine::PoolRegistered { .. } = message {
            return;
        }
        if let ToEngine::Leased {
            seq, lease, slots, ..
        } = &message
        {
            let pool = self.nodes[node].engines[engine].pool;
            let request = request_of(*seq);
            let (got, want) = (slots.len() as u64, self.setup.requests[request].slots);
            if got != u64::from(want) {
                let what = || format!("request {request} is given {got} slots, not {want}");
                self.oracle.violated(9, what);
            }
            self.oracle.leased(node, pool, *lease, request, slots);
            for slot in slots {
                let plane = &self.nodes[node].plane;
                if plane.may_be_written(pool, slot.index.0) {
                    let what = || format!("{slot:?} is leased and an old grant may write it");
                    self.oracle.violated(1, what);
                }
                if plane.may_be_read(pool, slot.index.0) {
                    let what = || format!("{slot:?} is leased and an old writer reads it");
                    self.oracle.violated(2, what);
                }
            }
            self.is_clean(node, pool, slots, request);
        }
        if let ToEngine::LeaseOutcome { lease, outcome } = &message
            && *outcome == Outcome::Delivered
            && let Some(lease) = self.nodes[node].engines[engine].leases.get(lease)
        {
            self.requests[lease.request].delivered = true;
        }
        self.nodes[node].engines[engine].inbox.push_back(message);
    }

    /// A tenant finds no other tenant's bytes in its fresh lease.
    fn is_clean(&mut self, node: usize, pool: PoolId, slots: &[SlotRef], request: usize) {
        let tenant = self.setup.requests[request].tenant;
        let memory = &self.nodes[node].plane.memory[&pool];
        let per_region = memory.len() / usize::from(self.setup.regions);
        let mut found = None;
        for slot in slots {
            let pages = memory.iter().skip(slot.index.0 as usize);
            for content in pages.step_by(per_region) {
                if let Content::Page { request: other, .. } = content
                    && self.setup.requests[*other].tenant != tenant
                {
                    found = Some((*slot, *content));
                }
            }
        }
        if let Some((slot, content)) = found {
            let what = || format!("tenant {tenant} is given {slot:?} with {content:?}");
            self.oracle.violated(2, what);
        }
    }

    fn tell_peer(&mut self, node: usize, id: LinkId, message: PeerMessage) {
        let incarnation = self.nodes[node].incarnation;
        let Some(link) = self.links.get_mut(&id) else {
            return;
        };
        let own = link
            .ends
            .iter()
            .position(|end| (end.node, end.incarnation) == (node, incarnation));
        let own = own.expect("a daemon speaks on its own links");
        if !link.deaf[1 - own] {
            link.ends[1 - own].inbox.push_back(message);
        }
    }

    fn tell(&mut self, node: usize, local: Local) {
        self.nodes[node].local.push_back(local);
    }

    fn local(&mut self, node: usize) {
        let local = self.nodes[node].local.pop_front();
        let input = match local.expect("there is something to hear") {
            Local::Armed(grant) => Input::Armed { grant },
            Local::Written(transfer, grant) => Input::Written {
                transfer,
                grant,
                bytes: u64::from(PAGE_BYTES),
            },
            Local::WriterFailed(transfer, grant) => Input::WriterFailed { transfer, grant },
            Local::WritesStopped(proof) => Input::WritesStopped(proof),
            Local::ReadsStopped(proof) => Input::ReadsStopped(proof),
            Local::Scrubbed(pool, slots) => Input::Scrubbed { pool, slots },
        };
        self.input(node, input);
    }

    fn command(&mut self, node: usize, command: PlaneCommand) {
        match command {
            PlaneCommand::Arm {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            } => {
                let armed = Armed {
                    link,
                    key,
                    pool,
                    slots,
                    pages,
                    fencing: false,
                };
                self.nodes[node].plane.armed.insert(grant, armed);
                self.tell(node, Local::Armed(grant));
            }
            PlaneCommand::Fence { grant } => {
                // Where it was drained in the meantime the proof is on its way.
                if let Some(armed) = self.nodes[node].plane.armed.get_mut(&grant) {
                    armed.fencing = true;
                }
            }
            PlaneCommand::OpenWriter {
                transfer,
                grant,
                link,
                key,
                pool,
                slots,
            } => {
                let writer = Writer {
                    grant,
                    link,
                    key,
                    pool,
                    slots,
                    ending: false,
                };
                let before = self.nodes[node].plane.writers.insert(transfer, writer);
                assert!(before.is_none(), "a transfer has one writer at a time");
            }
            PlaneCommand::Write { transfer, run } => self.post(node, transfer, run),
            PlaneCommand::Drain { transfer } | PlaneCommand::Stop { transfer } => {
                if let Some(writer) = self.nodes[node].plane.writers.get_mut(&transfer) {
                    writer.ending = true;
                }
            }
        }
    }

    fn post(&mut self, node: usize, transfer: TransferId, run: fabric_proto::pool::PageRun) {
        let Some(writer) = self.nodes[node].plane.writers.get(&transfer).cloned() else {
            return; // It broke in the meantime.
        };
        let Some(to) = self.other_end(node, writer.link) else {
            return; // The link is gone: nothing that is posted arrives.
        };
        let from = (node, self.nodes[node].incarnation);
        for position in run.first..run.first + run.count {
            let page = fabric_proto::pool::PageRef {
                region: run.region,
                position,
            };
            self.flights.push(Flight {
                from,
                transfer,
                to,
                grant: writer.grant,
                key: writer.key,
                cargo: Cargo::Page(page, None),
            });
        }
        let under = |flight: &&Flight| {
            let honest = !matches!(flight.cargo, Cargo::Page(_, Some(Content::Junk { .. })));
            honest && flight.to == to && flight.grant == writer.grant
        };
        let in_air = self.flights.iter().filter(under).count() as u64;
        if in_air > self.setup.outstanding_pages {
            let what = || format!("{in_air} pages are outstanding under {}", writer.grant);
            self.oracle.violated(8, what);
        }
        self.clear_air();
    }

    /// Node and life at the other end of a link.
    fn other_end(&self, node: usize, link: LinkId) -> Option<(usize, u64)> {
        let link = self.links.get(&link)?;
        let life = (node, self.nodes[node].incarnation);
        let own = link
            .ends
            .iter()
            .position(|end| (end.node, end.incarnation) == life)?;
        let other = &link.ends[1 - own];
        Some((other.node, other.incarnation))
    }

    /// Whether what a writer posts could still land.
    fn may_land(&self, node: usize, _transfer: TransferId, writer: &Writer) -> bool {
        let Some((peer, incarnation)) = self.other_end(node, writer.link) else {
            return false;
        };
        let peer = &self.nodes[peer];
        let armed = peer.plane.armed.get(&writer.grant);
        peer.incarnation == incarnation && armed.is_some_and(|armed| armed.key == writer.key)
    }

    /// What a page in the air holds: what was captured, or what its source holds now.
    pub(crate) fn carried(&self, flight: &Flight) -> Option<Content> {
        let Cargo::Page(page, captured) = flight.cargo else {
            return None;
        };
        if captured.is_some() {
            return captured;
        }
        let source = &self.nodes[flight.from.0];
        let writer = source.plane.writers.get(&flight.transfer)?;
        let memory = source.plane.memory.get(&writer.pool)?;
        let per_region = memory.len() / usize::from(self.setup.regions);
        let slot = writer.slots[page.position as usize].index.0 as usize;
        Some(memory[usize::from(page.region) * per_region + slot])
    }

    pub(crate) fn land(&mut self, index: usize, flip: bool) {
        let carried = self.carried(&self.flights[index]);
        let flight = self.flights.remove(index);
        let (node, incarnation) = flight.to;
        let alive = self.nodes[node].incarnation == incarnation;
        let plane = &mut self.nodes[node].plane;
        let armed = plane.armed.get(&flight.grant).cloned();
        let Some(armed) = armed.filter(|armed| alive && armed.key == flight.key) else {
            return; // The plane turns it away.
        };
        match flight.cargo {
            Cargo::Drain => {
                let proof = plane.close(flight.grant, StoppedBy::Drain);
                let proof = proof.expect("it was armed just now");
                self.tell(node, Local::WritesStopped(proof));
                self.clear_air();
            }
            Cargo::Page(page, _) => {
                if !armed.allows(page) {
                    return;
                }
                let slot = armed.slots[page.position as usize];
                let content = carried.expect("its writer reads, or it was captured");
                self.write(node, &armed, page, slot, content, flip);
                let writer = self.nodes[flight.from.0]
                    .plane
                    .writers
                    .get(&flight.transfer);
                let alive = self.nodes[flight.from.0].incarnation == flight.from.1;
                if alive && writer.is_some_and(|writer| writer.grant == flight.grant) {
                    let written = Local::Written(flight.transfer, flight.grant);
                    self.tell(flight.from.0, written);
                }
            }
        }
    }

    fn write(
        &mut self,
        node: usize,
        armed: &Armed,
        page: fabric_proto::pool::PageRef,
        slot: SlotRef,
        content: Content,
        flip: bool,
    ) {
        let content = match content {
            Content::Page {
                request,
                page,
                flipped,
            } => Content::Page {
                request,
                page,
                flipped: flipped ^ flip,
            },
            Content::Zero | Content::Junk { .. } => content,
        };
        let memory = self.nodes[node].plane.memory.get_mut(&armed.pool);
        let Some(memory) = memory else {
            let what = || format!("a write landed in {}, which is unmapped", armed.pool);
            return self.oracle.violated(1, what);
        };
        let per_region = memory.len() / usize::from(self.setup.regions);
        memory[usize::from(page.region) * per_region + slot.index.0 as usize] = content;
        match content {
            Content::Page { request, .. } => {
                // What a lying destination asked for is its own affair.
                let lied = self.links.get(&armed.link).is_some_and(|link| link.lied);
                let is_owner = |owner| lied || owner == request;
                self.oracle.landed(node, armed.pool, slot, is_owner);
            }
            Content::Junk { from } => {
                let requests = &self.setup.requests;
                let is_source = |owner: usize| requests[owner].source.0 == from;
                self.oracle.landed(node, armed.pool, slot, is_source);
            }
            Content::Zero => {}
        }
    }

    /// A writer reads no more. What it posted flies on, with what it holds now; then the drain.
    fn writer_ends(&mut self, node: usize, transfer: TransferId, drains: bool) {
        let from = (node, self.nodes[node].incarnation);
        for index in 0..self.flights.len() {
            let flight = &self.flights[index];
            if (flight.from, flight.transfer) == (from, transfer) {
                let carried = self.carried(flight);
                if let Cargo::Page(page, _) = self.flights[index].cargo {
                    self.flights[index].cargo = Cargo::Page(page, carried);
                }
            }
        }
        let writer = self.nodes[node].plane.writers[&transfer].clone();
        let to = self.other_end(node, writer.link);
        let proof = self.nodes[node].plane.end_writer(transfer);
        self.tell(
            node,
            Local::ReadsStopped(proof.expect("the writer is there")),
        );
        if let (Some(to), true) = (to, drains) {
            self.flights.push(Flight {
                from,
                transfer,
                to,
                grant: writer.grant,
                key: writer.key,
                cargo: Cargo::Drain,
            });
            self.clear_air();
        }
    }

    /// Forgets what cannot land any more: its grant is closed for good.
    pub(crate) fn clear_air(&mut self) {
        let nodes = &self.nodes;
        self.flights.retain(|flight| {
            let (node, incarnation) = flight.to;
            let node = &nodes[node];
            node.incarnation == incarnation && node.plane.armed.contains_key(&flight.grant)
        });
    }

    /// An end of a broken link notices: its writers end, its machine hears of it.
    fn lost(&mut self, id: LinkId, side: usize) {
        let link = self.links.get_mut(&id).expect("the link is there");
        let end = &mut link.ends[side];
        end.up = false;
        end.inbox.clear();
        let node = end.node;
        let writers = &self.nodes[node].plane.writers;
        let broken: Vec<_> = writers
            .iter()
            .filter(|(_, writer)| writer.link == id)
            .map(|(transfer, writer)| (*transfer, writer.grant))
            .collect();
        for (transfer, grant) in broken {
            self.tell(node, Local::WriterFailed(transfer, grant));
            self.writer_ends(node, transfer, false);
        }
        if self.links[&id].ends.iter().all(|end| !end.up) {
            self.links.remove(&id);
        }
        self.input(node, Input::LinkDown { link: id });
    }

    pub(crate) fn connect_failed(&mut self, dial: Dial) {
        let peer = node_id(dial.peer);
        self.input(dial.node, Input::ConnectFailed { node: peer });
    }

    fn dialled(&mut self, index: usize) {
        let dial = self.dials.remove(index);
        let life = self.nodes[dial.peer].incarnation;
        if dial.after.is_some_and(|after| life <= after.as_u64()) {
            return self.connect_failed(dial);
        }
        let ends = [dial.node, dial.peer].map(|node| End {
            node,
            incarnation: self.nodes[node].incarnation,
            inbox: VecDeque::new(),
            up: true,
        });
        let link = LinkId(self.next_link);
        self.next_link += 1;
        let fresh = Link {
            ends,
            deaf: [false; 2],
            lied: false,
        };
        self.links.insert(link, fresh);
        // A later life has come: links to the earlier ones end.
        for other in self.links.values_mut() {
            for (at, peer) in [(0, 1), (1, 0)] {
                let (near, far) = (&other.ends[at], &other.ends[peer]);
                let between = [near.node, far.node]
                    .iter()
                    .all(|node| [dial.node, dial.peer].contains(node) && dial.node != dial.peer);
                if between && far.incarnation < self.nodes[far.node].incarnation {
                    other.deaf = [true; 2];
                }
            }
        }
        for (node, peer) in [(dial.node, dial.peer), (dial.peer, dial.node)] {
            let incarnation = Incarnation::new(self.nodes[peer].incarnation);
            let input = Input::LinkUp {
                link,
                node: node_id(peer),
                incarnation: incarnation.expect("lives count from 1"),
                planes: vec![PlaneKind::Quic],
            };
            self.input(node, input);
        }
    }

    /// An engine connects, and registers fresh memory.
    pub(crate) fn start_engine(&mut self, at: (usize, usize)) {
        let slots = self.setup.nodes[at.0][at.1];
        let spec = self.setup.spec(slots);
        let state = &mut self.nodes[at.0];
        let (id, pool) = (EngineId(state.next_engine), PoolId(state.next_pool));
        state.next_engine += 1;
        state.next_pool += 1;
        let engine = Engine {
            id,
            pool,
            inbox: VecDeque::new(),
            leases: BTreeMap::new(),
            sends: BTreeMap::new(),
            astray: BTreeMap::new(),
        };
        if at.1 == state.engines.len() {
            state.engines.push(engine);
        } else {
            state.engines[at.1] = engine;
        }
        let pages = slots as usize * usize::from(self.setup.regions);
        state.plane.memory.insert(pool, vec![Content::Zero; pages]);
        let tenants = Tenants::Any;
        self.input(
            at.0,
            Input::EngineUp {
                engine: id,
                tenants,
            },
        );
        let register = Input::RegisterPool {
            engine: id,
            seq: RequestSeq(1),
            pool,
            spec,
            memory_bytes: spec.bytes(),
        };
        self.input(at.0, register);
    }

    /// Slots are overwritten. Nobody may hold them.
    fn scrub(&mut self, node: usize, pool: PoolId, slots: &[SlotRef]) {
        let regions = usize::from(self.setup.regions);
        for slot in slots {
            let plane = &mut self.nodes[node].plane;
            let index = slot.index.0;
            if plane.may_be_written(pool, index) || plane.may_be_read(pool, index) {
                let what = || format!("{slot:?} is scrubbed while it is written or read");
                self.oracle.violated(1, what);
            }
            let plane = &mut self.nodes[node].plane;
            if let Some(memory) = plane.memory.get_mut(&pool) {
                let per_region = memory.len() / regions;
                let pages = memory.iter_mut().skip(index as usize).step_by(per_region);
                pages.for_each(|page| *page = Content::Zero);
            }
        }
    }
}

impl Hash for World {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        for node in &self.nodes {
            node.hash(hasher);
        }
        self.links.hash(hasher);
        self.dials.hash(hasher);
        self.flights.hash(hasher);
        self.requests.hash(hasher);
        self.budget.hash(hasher);
        self.oracle.hash(hasher);
        self.next_link.hash(hasher);
    }
}

impl Hash for Node {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.host.hash(hasher);
        self.incarnation.hash(hasher);
        self.now.hash(hasher);
        self.local.hash(hasher);
        self.plane.hash(hasher);
        self.engines.hash(hasher);
        (self.next_engine, self.next_pool).hash(hasher);
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("violation", &self.violation())
            .field("requests", &self.requests)
            .field("links", &self.links)
            .field("dials", &self.dials)
            .field("flights", &self.flights)
            .field("budget", &self.budget)
            .finish_non_exhaustive()
    }
}

/// More than any world that comes to rest needs.
const SETTLE_EVENTS_MAX: usize = 100_000;
