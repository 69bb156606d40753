//! The thread that owns everything of the plane: it takes orders, polls completions and posts.
//!
//! ```text
//!   commands, peers' messages ──▶ inbox ──▶ turn ──▶ post ──▶ device
//!                                             ▲                  │
//!                                             └─── completions ──┘
//! ```
//!
//! It polls for as long as there is something to do and a little longer, and then sleeps until the
//! inbox or a completion channel wakes it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use fabric_proto::host::PlaneCommand;
use fabric_proto::ids::{GrantId, LinkId, PoolId, TransferId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tracing::{debug, error, info, warn};

use super::VerbsSettings;
use super::codec::{Message, RailAddress};
use super::ffi::{AsyncEvent, Completions, Context, Opcode, SendChain, VerbsError, WorkCompletion};
use super::inbound::{Inbound, Received};
use super::lanes::{Kind, Lane, LaneKey, Lanes};
#[cfg(test)]
use super::lanes::{Side, State};
use super::outbound::Writer;
use super::peers::{Peer, PeerKey};
use super::pull_outbound::Exposer;
use super::rails::Rail;
use super::regions::{Known, Regions};
use crate::plane::faults::Faults;
use crate::plane::grants::Terms;
use crate::plane::lock;
use crate::plane::outbox::Outbox;
use crate::plane::pools::{Pool, Pools};
use crate::plane::source::Source;

/// What the thread is asked to do.
#[derive(Debug)]
pub(super) enum Order {
    /// The peer's plane has said which ports it has.
    PeerUp {
        peer: PeerKey,
        rails: Vec<RailAddress>,
        outgoing: mpsc::Sender<Message>,
        done: oneshot::Sender<bool>,
    },
    /// The link that the peer is at the other end of.
    Attach {
        peer: PeerKey,
        link: LinkId,
    },
    /// A message of the peer's plane. The permit is for its place in the queue.
    PeerSaid {
        peer: PeerKey,
        message: Message,
        place: OwnedSemaphorePermit,
    },
    /// A lane that was lent to be connected is back.
    Connected {
        key: LaneKey,
        lane: Box<Lane>,
        result: Result<(), VerbsError>,
    },
    /// The introduction takes too long.
    GiveUp {
        peer: PeerKey,
    },
    PeerGone {
        peer: PeerKey,
    },
    Command(PlaneCommand),
    LinkDown(LinkId),
    /// A pool is registered.
    PoolHere {
        id: PoolId,
        pool: Arc<Pool>,
        known: Known,
    },
    PoolGone(PoolId),
    /// The rails' devices are on other nodes.
    #[cfg(test)]
    Move(Vec<Option<u32>>),
    /// One of the lanes that carry something breaks.
    #[cfg(test)]
    Break {
        turn: usize,
    },
    /// The end.
    Stop,
}

/// The way to the thread. Never waits.
#[derive(Debug)]
pub(super) struct Inbox {
    // As long as the machine's outstanding commands and the peers' places.
    orders: Mutex<VecDeque<Order>>,
    wake: OwnedFd,
}

impl Inbox {
    pub(super) fn new() -> rustix::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            orders: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    pub(super) fn push(&self, order: Order) {
        let mut orders = lock(&self.orders);
        let is_first = orders.is_empty();
        orders.push_back(order);
        drop(orders);
        // The thread takes all that there are whenever it wakes.
        if is_first && let Err(error) = rustix::io::write(&self.wake, &1_u64.to_ne_bytes()) {
            // EAGAIN: the count is full, so it is awake.
            debug!("wake the verbs thread: {error}");
        }
    }

    fn take(&self, into: &mut VecDeque<Order>) {
        std::mem::swap(&mut *lock(&self.orders), into);
    }
}

/// What there is, for people.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) queue_pairs: AtomicU64,
    pub(super) regions: AtomicU64,
    /// Bound or idle.
    pub(super) windows: AtomicU64,
    /// Peers that were cut off, and writers that were refused.
    pub(super) refused: AtomicU64,
    /// Legs of grants here that went on through another lane.
    pub(super) failovers: AtomicU64,
}

/// All that the thread owns.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) inbox: Arc<Inbox>,
    /// For what has to wait.
    pub(super) runtime: Handle,
    pub(super) outbox: Arc<Outbox>,
    pub(super) pools: Arc<Pools>,
    pub(super) faults: Arc<Faults>,
    pub(super) settings: VerbsSettings,
    pub(super) outstanding_bytes_max: u64,
    pub(super) counts: Arc<Counts>,
    // Windows before lanes: a queue pair with bound windows takes long to destroy.
    pub(super) grants: BTreeMap<GrantId, Inbound>,
    /// What peers may read, by the lane that they read through.
    pub(super) exposers: BTreeMap<LaneKey, Exposer>,
    pub(super) lanes: Lanes,
    pub(super) rails: Vec<Rail>,
    pub(super) regions: Regions,
    /// The rails', as peers know them.
    pub(super) addresses: Vec<RailAddress>,
    pub(super) peers: BTreeMap<PeerKey, Peer>,
    pub(super) links: HashMap<LinkId, PeerKey>,
    // After lanes: what a device may still read ends with them.
    pub(super) writers: BTreeMap<TransferId, Writer>,
    /// Writers that wait for their keys.
    pub(super) awaiting: BTreeMap<(LinkId, GrantId), TransferId>,
    pub(super) chain: SendChain,
    /// For what a poll takes; elsewhere while one is taken.
    pub(super) room: Option<Box<Completions>>,
    /// Lanes that are to be offered: when, to whom, and in which of its places.
    pub(super) due_offers: Vec<(Instant, PeerKey, usize)>,
    /// Since when some grant's sign of life waits to be told.
    pub(super) say_landed_at: Option<Instant>,
    pub(super) looked_for_late: Instant,
    pub(super) looked_for_events: Instant,
    pub(super) refused: u64,
    /// Legs that got another lane in place of one that broke.
    pub(super) failovers: u64,
}

impl Worker {
    /// Runs until it is told to stop.
    pub(super) fn run(mut self) {
        let _abort = AbortOnPanic;
        let mut orders = VecDeque::new();
        let mut busy_at = Instant::now();
        loop {
            match self.turn(&mut orders) {
                Turn::Stopped => return self.close(),
                Turn::Worked(now) => busy_at = now,
                Turn::Idle(now) if now.duration_since(busy_at) < SPIN => {}
                Turn::Idle(now) => {
                    self.publish();
                    self.sleep(now);
                    busy_at = Instant::now();
                }
            }
        }
    }

    /// Does all that there is to do just now. `orders`: empty, and is again.
    pub(super) fn turn(&mut self, orders: &mut VecDeque<Order>) -> Turn {
        let mut worked = false;
        self.inbox.take(orders);
        while let Some(order) = orders.pop_front() {
            worked = true;
            if matches!(order, Order::Stop) {
                return Turn::Stopped;
            }
            self.obey(order);
            // Peers say how many lanes come and go.
            while self.rails.iter().any(Rail::is_crowded) {
                self.poll();
            }
        }
        worked |= self.poll();
        let now = Instant::now();
        self.keep_time(now);
        if !worked {
            return Turn::Idle(now);
        }
        self.cut_off_the_deaf();
        Turn::Worked(now)
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::PeerUp {
                peer,
                rails,
                outgoing,
                done,
            } => self.peer_up(peer, rails, outgoing, done),
            Order::Attach { peer, link } => self.attach(peer, link),
            Order::PeerSaid {
                peer,
                message,
                place,
            } => {
                self.peer_said(peer, message);
                drop(place);
            }
            Order::Connected { key, lane, result } => self.connected(key, *lane, result),
            Order::GiveUp { peer } => self.judge(peer),
            Order::PeerGone { peer } => self.peer_gone(peer),
            Order::LinkDown(link) => {
                if let Some(peer) = self.links.get(&link).copied() {
                    self.peer_gone(peer);
                }
            }
            Order::PoolHere { id, pool, known } => self.pool_here(id, pool, known),
            Order::PoolGone(pool) => self.pool_gone(pool),
            Order::Command(command) => self.command(command),
            #[cfg(test)]
            Order::Move(nodes) => {
                for (rail, node) in self.rails.iter_mut().zip(nodes) {
                    rail.numa_node = node;
                }
            }
            #[cfg(test)]
            Order::Break { turn } => self.break_lane(turn),
            Order::Stop => {}
        }
    }

    /// Does to a lane what a fault of its device does.
    #[cfg(test)]
    fn break_lane(&mut self, turn: usize) {
        let carrying = self.lanes.keys(|lane| {
            matches!(
                lane.side,
                Side::Destination(State::Busy(..)) | Side::Source(Some(_))
            )
        });
        if let Some(key) = carrying.get(turn % carrying.len().max(1))
            && let Some(lane) = self.lanes.find(*key)
        {
            lane.queue_pair.stop().unwrap();
        }
    }

    fn command(&mut self, command: PlaneCommand) {
        match command {
            PlaneCommand::Arm {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            } => self.arm(Terms {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            }),
            PlaneCommand::Fence { grant } => self.fence(grant),
            PlaneCommand::OpenWriter {
                transfer,
                grant,
                link,
                key,
                pool,
                slots,
            } => {
                let (outbox, pools) = (&self.outbox, &self.pools);
                if let Some(source) = Source::open(outbox, pools, transfer, grant, pool, &slots) {
                    self.open_writer(link, key, source);
                }
            }
            PlaneCommand::Write { transfer, run } => self.write(transfer, run),
            PlaneCommand::Drain { transfer } => self.drain(transfer),
            PlaneCommand::Stop { transfer } => self.stop(transfer),
        }
    }

    /// Takes completions in; whether there were any.
    fn poll(&mut self) -> bool {
        let mut worked = false;
        let mut room = self.room.take().unwrap_or_default();
        for rail in 0..self.rails.len() {
            let mut index = 0;
            while let Some(queue) = self.rails[rail].queue(index) {
                index += 1;
                match queue.poll(&mut room) {
                    Ok(polled) => {
                        self.rails[rail].took(index - 1, polled.len());
                        for completion in polled {
                            worked = true;
                            self.completed(completion);
                        }
                    }
                    Err(error) => panic!("a completion queue is lost: {error}"),
                }
            }
        }
        self.room = Some(room);
        worked
    }

    fn completed(&mut self, completion: WorkCompletion) {
        let Some((lane, kind)) = LaneKey::parse(completion.wr_id) else {
            return error!("a completion of no request of ours: {completion:?}");
        };
        let opcode = match completion.result {
            Ok(opcode) => opcode,
            // A flush says nothing of delivery: whatever the lane carried is fenced.
            Err(status) => {
                // Each request of a lane that is gone is flushed: a thousand receives and more.
                if self.lanes.find(lane).is_some() {
                    self.lane_broke(lane, &format!("{status} ({kind:?})"));
                }
                return;
            }
        };
        match (kind, opcode) {
            (Kind::Receive, Opcode::ReceiveInvalidate(rkey)) => {
                self.received(lane, Received::Invalidated(rkey));
            }
            (Kind::Receive, Opcode::ReceiveImmediate(number)) => {
                self.received(lane, Received::Number(number));
            }
            (Kind::Binds, _) => self.binds_completed(lane),
            (Kind::Drain, _) => self.drain_completed(lane),
            (Kind::Exposures, _) => self.exposures_bound(lane),
            (Kind::Probe, _) => {
                if let Some(found) = self.lanes.find(lane) {
                    found.completed();
                }
                self.lane_probed(lane);
            }
            (Kind::Progress | Kind::Writes, _) => self.writes_completed(lane),
            (Kind::Reads | Kind::Returns, _) => self.reads_completed(lane),
            (Kind::Receive, other) => {
                debug!(?other, "a message that no plane sends");
                self.lane_broke(lane, "a message that no plane sends");
            }
        }
    }

    fn keep_time(&mut self, now: Instant) {
        if self
            .say_landed_at
            .is_some_and(|since| now >= since + LANDED_EVERY)
        {
            self.report_landed();
        }
        while let Some(index) = self.due_offers.iter().position(|(at, ..)| now >= *at) {
            let (_, peer, place) = self.due_offers.swap_remove(index);
            self.offer_lane(peer, place);
        }
        if now.duration_since(self.looked_for_events) >= EVENTS_EVERY {
            self.look_for_events(now);
        }
        if now.duration_since(self.looked_for_late) >= LATE_EVERY {
            self.looked_for_late = now;
            for peer in self.peers.values_mut() {
                peer.untaken.forget_late(now);
            }
            self.fail_late_writers(now);
            self.fence_late_legs(now);
            self.fail_unread_writers(now);
            self.publish();
        }
    }

    /// How long until `keep_time` has something to do.
    fn until_due(&self, now: Instant) -> Duration {
        let landed = self.say_landed_at.map(|since| since + LANDED_EVERY);
        let offers = self.due_offers.iter().map(|(at, ..)| *at);
        let late = (!self.awaiting.is_empty()).then(|| self.looked_for_late + LATE_EVERY);
        let next = landed.into_iter().chain(offers).chain(late).min();
        next.map_or(SLEEP_MAX, |at| {
            at.saturating_duration_since(now).min(SLEEP_MAX)
        })
    }

    /// Sleeps until there is something to do.
    fn sleep(&mut self, now: Instant) {
        for rail in &self.rails {
            rail.channel.clear();
            for queue in rail.queues() {
                if let Err(error) = queue.request_notification() {
                    panic!("a completion queue is lost: {error}");
                }
            }
        }
        // What completed before notification was asked for is not told of.
        if self.poll() || !lock(&self.inbox.orders).is_empty() {
            return;
        }
        let timeout = Timespec::try_from(self.until_due(now)).unwrap_or(Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        });
        let contexts = self.rails.iter().map(|rail| rail.domain.context());
        let mut fds = vec![PollFd::new(&self.inbox.wake, PollFlags::IN)];
        fds.extend(
            self.rails
                .iter()
                .map(|rail| PollFd::from_borrowed_fd(rail.channel.as_fd(), PollFlags::IN)),
        );
        fds.extend(
            contexts.map(|context| PollFd::from_borrowed_fd(context.events_fd(), PollFlags::IN)),
        );
        if let Err(error) = poll(&mut fds, Some(&timeout)) {
            debug!("wait for the verbs devices: {error}");
        }
        drop(fds);
        let mut count = [0; 8];
        // EAGAIN: something else woke us.
        let _none = rustix::io::read(&self.inbox.wake, &mut count);
        self.look_for_events(Instant::now());
    }

    /// Takes in what happened to the devices.
    fn look_for_events(&mut self, now: Instant) {
        self.looked_for_events = now;
        for rail in 0..self.rails.len() {
            let context = Arc::clone(self.rails[rail].domain.context());
            let is_same = |other: &Rail| Arc::ptr_eq(other.domain.context(), &context);
            // Ports of one device have their events in common.
            if self.rails[..rail].iter().any(is_same) {
                continue;
            }
            let at_once = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            let mut fds = [PollFd::from_borrowed_fd(context.events_fd(), PollFlags::IN)];
            // One at a time: there is another turn soon.
            if poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0) {
                match context.next_event() {
                    Ok(event) => self.device_event(&context, event),
                    Err(error) => debug!(device = context.name(), "{error}"),
                }
            }
        }
    }

    fn device_event(&mut self, context: &Arc<Context>, event: AsyncEvent) {
        let device = context.name();
        match event {
            AsyncEvent::PortActive(port) | AsyncEvent::AddressesChanged(port) => {
                info!(device, port, "the port is up, or has another address");
                for rail in self.rails_of(context, Some(port)) {
                    self.rail_up(rail);
                }
            }
            AsyncEvent::PortDown(port) => {
                warn!(device, port, "the port is down");
                self.break_lanes(context, Some(port), "the port is down");
            }
            AsyncEvent::DeviceFatal => {
                // S1: what cannot be destroyed may still write; then `MUST_END` ends the process.
                error!(
                    device,
                    "the device is lost; the daemon ends if what it had open there cannot be closed"
                );
                self.break_lanes(context, None, "the device is lost");
            }
            AsyncEvent::Other(kind) => debug!(device, kind, "a device's event"),
            // Completions are lost, and with them who waits for them.
            AsyncEvent::QueueFull => panic!("a completion queue of {device} overflows"),
        }
    }

    /// Breaks the lanes of a device, or of one of its ports: at once, where their own retries would
    /// take seconds.
    fn break_lanes(&mut self, context: &Arc<Context>, port: Option<u8>, why: &str) {
        // What has arrived has arrived: a drain is not to be waited for again.
        self.poll();
        for rail in self.rails_of(context, port) {
            for lane in self.lanes.of_rail(rail) {
                self.lane_broke(lane, why);
            }
        }
    }

    /// A device's, or one of them by its port.
    fn rails_of(&self, context: &Arc<Context>, port: Option<u8>) -> Vec<usize> {
        let is_meant = |rail: &Rail| {
            Arc::ptr_eq(rail.domain.context(), context) && port.is_none_or(|port| port == rail.port)
        };
        let rails = self.rails.iter().enumerate();
        rails
            .filter(|(_, rail)| is_meant(rail))
            .map(|(index, _)| index)
            .collect()
    }

    fn cut_off_the_deaf(&mut self) {
        let deaf = self.peers.iter().find(|(_, peer)| peer.is_deaf);
        if let Some(peer) = deaf.map(|(key, _)| *key) {
            warn!(
                peer = peer.0,
                "a peer's plane does not listen: it is cut off"
            );
            self.refused += 1;
            self.peer_gone(peer);
        }
    }

    fn publish(&self) {
        let bound: u64 = self.grants.values().map(Inbound::windows).sum();
        let exposed: u64 = self.exposers.values().map(Exposer::windows).sum();
        let idle: u64 = self.rails.iter().map(Rail::windows).sum();
        // Relaxed: statistics.
        let counts = &self.counts;
        counts
            .queue_pairs
            .store(self.lanes.count(), Ordering::Relaxed);
        let (regions, windows) = (self.regions.count(), bound + exposed + idle);
        counts.regions.store(regions, Ordering::Relaxed);
        counts.windows.store(windows, Ordering::Relaxed);
        counts.refused.store(self.refused, Ordering::Relaxed);
        counts.failovers.store(self.failovers, Ordering::Relaxed);
    }

    /// Ends every peer: grants are fenced and writers fail, with proof.
    fn close(mut self) {
        let peers: Vec<_> = self.peers.keys().copied().collect();
        for peer in peers {
            self.peer_gone(peer);
        }
    }
}

/// What came of a turn, and when it ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Turn {
    /// There was nothing to do.
    Idle(Instant),
    /// It was told to stop.
    Stopped,
    Worked(Instant),
}

/// A plane whose thread is gone would hold every slot for ever, while the daemon seems well. Queue
/// pairs end with the process, and its next life accepts nothing from before (S6).
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            error!("the verbs thread has failed: the daemon ends");
            std::process::abort();
        }
    }
}

/// How long to poll on when there is nothing: about what a wake-up costs.
const SPIN: Duration = Duration::from_micros(50);

/// How often the machine hears of a sign of life.
const LANDED_EVERY: Duration = Duration::from_millis(50);

/// How often to look for writers that have waited too long.
const LATE_EVERY: Duration = Duration::from_secs(1);

/// How often to look for what happened to devices, while there is something else to do.
const EVENTS_EVERY: Duration = Duration::from_millis(10);

const SLEEP_MAX: Duration = Duration::from_secs(1);
