//! Peers: who is at the other end of lanes, and how new lanes come to be.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_proto::ids::{GrantId, LinkId, Secret, TransferId};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, info, warn};

use super::codec::{LaneNumber, LaneOffer, LegNumber, Message, RailAddress};
use super::extents::Reach;
use super::ffi::{RKey, Signal, VerbsError};
use super::inbound::Waiter;
use super::lanes::{Kind, Lane, LaneKey, RECEIVES, Side, State};
use super::numa;
use super::pull_outbound::Exposer;
use super::worker::{Order, Worker};

/// A peer's number within this plane. Never used twice.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct PeerKey(pub(super) u64);

/// A peer, from the first message of its plane to the end of its link.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) link: Option<LinkId>,
    rails: Vec<RailAddress>,
    outgoing: mpsc::Sender<Message>,
    pub(super) is_deaf: bool,
    /// Whether it lets us read what it sends us.
    pub(super) exposes: bool,
    introduction: Option<Introduction>,
    /// The lanes that it is offered: each has one, or is offered another in a while.
    places: Vec<Place>,
    next_lane: u32,
    /// Our lanes, and the peer's, by number.
    ours: BTreeMap<LaneNumber, LaneKey>,
    pub(super) theirs: BTreeMap<LaneNumber, LaneKey>,
    /// Lanes that are being connected, at most [`CONNECTS_MAX`], and those that are to be.
    connecting: usize,
    to_connect: VecDeque<ToConnect>,
    /// Of those that are being connected: the peer's end is gone.
    gone: BTreeSet<LaneKey>,
    /// Ours that are free.
    idle: VecDeque<LaneKey>,
    /// Which of our ports the next grant's first leg is to go through, if it can.
    turn: usize,
    /// Who waits for one.
    pub(super) waiting: VecDeque<Waiter>,
    /// What the peer has granted us, until the writer takes it.
    pub(super) untaken: Untaken,
    /// Grants whose writer has taken it, and for which transfer.
    pub(super) taken: BTreeMap<GrantId, TransferId>,
}

/// A lane, and the peer's end of it: its port, its number and its first packet's.
#[derive(Clone, Copy, Debug)]
struct ToConnect {
    lane: LaneKey,
    address: RailAddress,
    theirs: (u32, u32),
}

/// A lane through one of our ports, whichever queue pair it is just now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Place {
    rail: usize,
    /// The peer's port that it is meant for. Where that does not answer it tries the others.
    their_rail: usize,
    /// How often in a row a lane of it has come to nothing.
    failures: u32,
}

/// What is left to do before the peer can be used: each end says whether a lane of its own carries
/// messages, and one of each must. Not every one: where each port is on a network of its own, two
/// of different networks do not reach each other.
#[derive(Debug)]
struct Introduction {
    done: oneshot::Sender<bool>,
    /// Places whose first lane has neither carried a message nor come to nothing.
    undecided: BTreeSet<usize>,
    /// Whether a lane of ours has carried a message.
    carries: bool,
    ours: Option<bool>,
    theirs: Option<bool>,
}

/// What a peer has granted.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) key: Secret,
    /// By leg.
    pub(super) lanes: Vec<LaneNumber>,
    pub(super) reach: Reach,
    /// When it came.
    pub(super) at: Instant,
}

/// What a peer has granted, until a writer takes it. How much that is the peer says: so there is
/// a bound, and an end.
#[derive(Debug, Default)]
pub(super) struct Untaken {
    grants: BTreeMap<GrantId, Granted>,
    extents: usize,
}

impl Untaken {
    /// Whether there was room for it, and no other of its name.
    fn insert(&mut self, grant: GrantId, granted: Granted) -> bool {
        let extents = self.extents + granted.reach.extents.len();
        if extents > EXTENTS_UNTAKEN_MAX || self.grants.contains_key(&grant) {
            return false;
        }
        self.extents = extents;
        self.grants.insert(grant, granted);
        true
    }

    pub(super) fn remove(&mut self, grant: GrantId) -> Option<Granted> {
        let granted = self.grants.remove(&grant)?;
        self.extents -= granted.reach.extents.len();
        Some(granted)
    }

    /// Forgets what waits for too long: an honest peer's grant is taken at once.
    pub(super) fn forget_late(&mut self, now: Instant) {
        let is_late = |granted: &Granted| now.duration_since(granted.at) > REACH_KEPT;
        let late = self.grants.iter().filter(|(_, granted)| is_late(granted));
        let late: Vec<_> = late.map(|(grant, _)| *grant).collect();
        for grant in late {
            let _late = self.remove(grant);
        }
    }
}

/// What became of a reach.
#[derive(Debug)]
pub(super) enum Reached {
    /// Not here yet.
    Awaited,
    /// Here it is.
    Now(Granted),
    /// Another writer has it.
    Taken,
}

impl Peer {
    /// Tells the peer something. A peer that does not listen is cut off once its queue is full.
    pub(super) fn tell(&mut self, message: Message) {
        self.is_deaf |= self.outgoing.try_send(message).is_err();
    }

    /// Takes what the peer's grant reaches, once.
    pub(super) fn take_reach(&mut self, grant: GrantId, transfer: TransferId) -> Reached {
        if let Some(granted) = self.untaken.remove(grant) {
            self.taken.insert(grant, transfer);
            return Reached::Now(granted);
        }
        if self.taken.contains_key(&grant) {
            return Reached::Taken;
        }
        Reached::Awaited
    }
}

impl Worker {
    /// A peer's plane has said which ports it has: lanes are offered to it.
    pub(super) fn peer_up(
        &mut self,
        key: PeerKey,
        rails: Vec<RailAddress>,
        outgoing: mpsc::Sender<Message>,
        done: oneshot::Sender<bool>,
    ) {
        // So many for each port, as a grant takes one of each.
        let count = (self.settings.lanes * self.rails.len()).min(LANES_MAX);
        let routes = (0..count).filter_map(|turn| route_of(&self.addresses, &rails, turn));
        let places: Vec<_> = routes
            .map(|(rail, their_rail)| Place {
                rail,
                their_rail,
                failures: 0,
            })
            .collect();
        let count = places.len();
        let peer = Peer {
            link: None,
            rails,
            outgoing,
            is_deaf: false,
            exposes: false,
            introduction: Some(Introduction {
                done,
                undecided: (0..count).collect(),
                carries: false,
                ours: None,
                theirs: None,
            }),
            places,
            next_lane: 0,
            ours: BTreeMap::new(),
            theirs: BTreeMap::new(),
            connecting: 0,
            to_connect: VecDeque::new(),
            gone: BTreeSet::new(),
            idle: VecDeque::new(),
            turn: 0,
            waiting: VecDeque::new(),
            untaken: Untaken::default(),
            taken: BTreeMap::new(),
        };
        self.peers.insert(key, peer);
        self.tell_exposes(key);
        if count == 0 {
            warn!(
                peer = key.0,
                "no port of the peer is of a kind with one here"
            );
            return self.judge(key);
        }
        for place in 0..count {
            self.offer_lane(key, place);
        }
    }

    /// Everything of a peer ends: its writers fail, and its grants are fenced.
    pub(super) fn peer_gone(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.remove(&key) else {
            return;
        };
        for waiter in peer.waiting {
            match waiter {
                Waiter::Grant(grant) | Waiter::Leg(grant, _) => self.fence(grant),
            }
        }
        for lane in self.lanes.of_peer(key) {
            self.lane_broke(lane, "the link is down");
        }
        if let Some(link) = peer.link {
            self.links.remove(&link);
            self.fail_waiting_writers(link);
        }
    }

    pub(super) fn attach(&mut self, key: PeerKey, link: LinkId) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.link = Some(link);
            self.links.insert(link, key);
        }
    }

    /// The peer at the other end of a link.
    pub(super) fn peer_at(&mut self, link: LinkId) -> Option<&mut Peer> {
        let key = self.links.get(&link)?;
        self.peers.get_mut(key)
    }

    /// Tells the peer at the other end of a link something, if there is one.
    pub(super) fn tell(&mut self, link: LinkId, message: Message) {
        if let Some(peer) = self.peer_at(link) {
            peer.tell(message);
        }
    }

    pub(super) fn peer_said(&mut self, key: PeerKey, message: Message) {
        if !self.peers.contains_key(&key) {
            return; // It was cut off.
        }
        let heard = match message {
            Message::Lane(offer) => self.lane_offered(key, offer),
            Message::LaneReady {
                lane,
                number,
                first,
            } => self.lane_ready(key, lane, number, first),
            Message::LaneGone {
                lane,
                offered_by_sender,
            } => {
                self.lane_gone(key, lane, offered_by_sender);
                Ok(())
            }
            Message::Usable(usable) => {
                self.introduce(key, |introduction| introduction.theirs = Some(usable));
                Ok(())
            }
            Message::Reach {
                grant,
                key: secret,
                lanes,
                reach,
            } => {
                let granted = Granted {
                    key: secret,
                    lanes,
                    reach,
                    at: Instant::now(),
                };
                self.reach_said(key, grant, granted)
            }
            Message::Closed { grant, is_drained } => {
                self.closed_there(key, grant, is_drained);
                Ok(())
            }
            Message::GivenUp { grant } => {
                self.given_up(key, grant);
                Ok(())
            }
            Message::Rerouted {
                grant,
                leg,
                lane,
                keys,
            } => self.reroute_said(key, grant, (leg, lane, keys)),
            Message::LegDrained { grant, leg } => {
                self.leg_drained_there(key, grant, leg);
                Ok(())
            }
            Message::Exposes(exposes) => self.exposes_said(key, exposes),
            Message::Exposed { grant, exposures } => self.exposed(key, grant, &exposures),
            Message::AllExposed { grant } => self.all_exposed(key, grant),
            Message::Rails(_) => Err(PeerError::OutOfPlace),
        };
        if let Err(error) = heard {
            warn!(peer = key.0, "a peer's plane is cut off: {error}");
            self.refused += 1;
            self.peer_gone(key);
        }
    }

    /// Offers a new lane to a peer. Where there can be none now, it tries again in a while.
    pub(super) fn offer_lane(&mut self, key: PeerKey, place: usize) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        let lane_number = LaneNumber(peer.next_lane);
        let Some(next) = peer.next_lane.checked_add(1) else {
            return;
        };
        peer.next_lane = next;
        let Place {
            rail,
            their_rail: meant,
            failures,
        } = peer.places[place];
        let their_rail = next_port(&peer.rails, meant, failures);
        let made = Lane::new(
            &mut self.rails,
            (rail, their_rail),
            key,
            lane_number,
            Side::Destination(State::Connecting),
        );
        let added = made.and_then(|mut made| {
            made.place = place;
            self.add_lane(made)
        });
        let lane = match added {
            Ok(lane) => lane,
            Err(error) => {
                warn!(device = self.rails[rail].device(), "make a lane: {error}");
                return self.place_failed(key, place);
            }
        };
        let made = self.lanes.find(lane).expect("it was just added");
        let (number, first) = (made.queue_pair.number(), made.first);
        let peer = self.peers.get_mut(&key).expect("it was found above");
        peer.ours.insert(lane_number, lane);
        peer.tell(Message::Lane(LaneOffer {
            lane: lane_number,
            rail: u8::try_from(rail).expect("ports are few"),
            their_rail: u8::try_from(their_rail).expect("ports are few"),
            number,
            first,
        }));
    }

    /// A lane came to nothing: the next one is offered later than this one was.
    fn place_failed(&mut self, key: PeerKey, place: usize) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        let failures = &mut peer.places[place].failures;
        let pause = offer_pause(*failures);
        *failures = failures.saturating_add(1);
        self.due_offers.push((Instant::now() + pause, key, place));
        self.decide(key, place, false);
    }

    /// A port of ours can be used again: its lanes are offered at once.
    pub(super) fn rail_up(&mut self, rail: usize) {
        for (due, key, place) in &mut self.due_offers {
            let peer = self.peers.get_mut(key);
            let place = peer.and_then(|peer| peer.places.get_mut(*place));
            if let Some(place) = place.filter(|place| place.rail == rail) {
                place.failures = 0;
                *due = Instant::now();
            }
        }
    }

    /// It is known of a place whether its first lane carries messages.
    fn decide(&mut self, key: PeerKey, place: usize, carries: bool) {
        let mut is_last = false;
        self.introduce(key, |introduction| {
            introduction.carries |= carries;
            is_last = introduction.undecided.remove(&place) && introduction.undecided.is_empty();
        });
        if is_last {
            self.judge(key);
        }
    }

    /// Adds a lane, and posts its receives.
    fn add_lane(&mut self, lane: Lane) -> Result<LaneKey, VerbsError> {
        let key = match self.lanes.insert(lane) {
            Ok(key) => key,
            Err(lane) => {
                let _unused = lane.revoke(&mut self.rails, [])?;
                return Err(VerbsError {
                    call: "insert",
                    code: TOO_MANY,
                });
            }
        };
        let lane = self.lanes.find(key).expect("it was just added");
        if let Err(error) = lane.post_receives(key, RECEIVES) {
            let lane = self.lanes.remove(key).expect("as above");
            let _unused = lane.revoke(&mut self.rails, [])?;
            return Err(error);
        }
        Ok(key)
    }

    /// The peer offers a lane: we connect to it.
    fn lane_offered(&mut self, key: PeerKey, offer: LaneOffer) -> Result<(), PeerError> {
        let peer = self.peers.get(&key).ok_or(PeerError::OutOfPlace)?;
        if peer.theirs.contains_key(&offer.lane) || peer.theirs.len() == LANES_MAX {
            return Err(PeerError::Lane(offer.lane));
        }
        let rail = usize::from(offer.their_rail);
        let address = peer.rails.get(usize::from(offer.rail)).copied();
        let (Some(address), true) = (address, rail < self.rails.len()) else {
            return Err(PeerError::Lane(offer.lane));
        };
        let side = Side::Source(None);
        let path = (rail, usize::from(offer.rail));
        let made = Lane::new(&mut self.rails, path, key, offer.lane, side)
            .and_then(|lane| self.add_lane(lane));
        let peer = self.peers.get_mut(&key).expect("it was found above");
        match made {
            Ok(lane) => {
                peer.theirs.insert(offer.lane, lane);
                self.connect(lane, address, (offer.number, offer.first));
            }
            Err(error) => {
                warn!(device = self.rails[rail].device(), "make a lane: {error}");
                peer.tell(Message::LaneGone {
                    lane: offer.lane,
                    offered_by_sender: false,
                });
            }
        }
        Ok(())
    }

    /// Connects a lane to the peer's end of it, in its turn.
    fn connect(&mut self, lane: LaneKey, address: RailAddress, theirs: (u32, u32)) {
        let found = self.lanes.find(lane).map(|found| found.peer);
        let Some(peer_key) = found else {
            return;
        };
        if let Some(peer) = self.peers.get_mut(&peer_key) {
            peer.to_connect.push_back(ToConnect {
                lane,
                address,
                theirs,
            });
        }
        self.connect_more(peer_key);
    }

    /// Connects as many of a peer's lanes at a time as it may have: elsewhere, as the kernel may
    /// have to look for its address, and waits a second for one that does not answer. The threads
    /// there are for others as well. Until a lane is back nobody finds it.
    fn connect_more(&mut self, key: PeerKey) {
        while let Some(peer) = self.peers.get_mut(&key)
            && peer.connecting < CONNECTS_MAX
            && let Some(next) = peer.to_connect.pop_front()
        {
            let lane = self.lanes.lend(next.lane);
            let lane = lane.expect("one that goes is taken off the list");
            peer.connecting += 1;
            let route = self.rails[lane.rail].route(next.address, next.theirs, lane.first);
            let inbox = Arc::clone(&self.inbox);
            self.runtime.spawn_blocking(move || {
                let result = lane.connect(&route);
                let (key, lane) = (next.lane, Box::new(lane));
                inbox.push(Order::Connected { key, lane, result });
            });
        }
    }

    /// A lane is back.
    pub(super) fn connected(&mut self, key: LaneKey, lane: Lane, result: Result<(), VerbsError>) {
        let (peer_key, number, side) = (lane.peer, lane.number, lane.side);
        let device = self.rails[lane.rail].device();
        if let Err(error) = &result {
            info!(device, "connect a lane: {error}");
        }
        self.lanes.take_back(key, lane);
        let is_ours = matches!(side, Side::Destination(_));
        // The peer, or its end of the lane, may have gone meanwhile.
        let is_gone = self.peers.get_mut(&peer_key).is_none_or(|peer| {
            peer.connecting -= 1;
            peer.gone.remove(&key)
        });
        self.connect_more(peer_key);
        if is_gone {
            self.destroy_lane(key);
        } else if let Err(error) = result {
            self.lane_broke(key, &error.to_string());
        } else if is_ours {
            self.probe(key);
        } else if let Some(peer) = self.peers.get_mut(&peer_key) {
            let lane = self.lanes.find(key).expect("it was just taken back");
            peer.tell(Message::LaneReady {
                lane: number,
                number: lane.queue_pair.number(),
                first: lane.first,
            });
        }
    }

    /// Sees whether a lane of ours carries anything.
    fn probe(&mut self, key: LaneKey) {
        let lane = self.lanes.find(key).expect("the caller has it");
        lane.side = Side::Destination(State::Probing);
        let id = key.wr_id(Kind::Probe);
        self.chain.send_immediate(id, Signal::Yes, super::PROBE);
        match self.chain.post(&lane.queue_pair) {
            Ok(()) => lane.posted(1, 0, 0),
            Err(error) => self.lane_broke(key, &error.to_string()),
        }
    }

    /// The peer has connected a lane of ours: we do.
    fn lane_ready(
        &mut self,
        key: PeerKey,
        lane_number: LaneNumber,
        number: u32,
        first: u32,
    ) -> Result<(), PeerError> {
        let peer = self.peers.get(&key).ok_or(PeerError::OutOfPlace)?;
        let Some(lane) = peer.ours.get(&lane_number).copied() else {
            return Ok(()); // It has just gone.
        };
        // None: it is being connected.
        let found = self.lanes.find(lane).filter(|found| {
            let offered = Side::Destination(State::Connecting);
            found.side == offered
        });
        let waits = peer.to_connect.iter().any(|next| next.lane == lane);
        let found = found.filter(|_| !waits);
        let found = found.ok_or(PeerError::Lane(lane_number))?;
        let address = peer.rails[found.their_rail];
        self.connect(lane, address, (number, first));
        Ok(())
    }

    /// A lane of ours carries messages: it is free.
    pub(super) fn lane_probed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        if found.side != Side::Destination(State::Probing) {
            return;
        }
        let (peer, place) = (found.peer, found.place);
        if let Some(peer) = self.peers.get_mut(&peer) {
            let failures = &mut peer.places[place].failures;
            *failures = (*failures).min(FAILURES_PROBED_MAX);
        }
        self.lane_idle(lane);
        self.decide(peer, place, true);
    }

    /// A lane of ours is free.
    pub(super) fn lane_idle(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        let has_carried = matches!(found.side, Side::Destination(State::Busy(..)));
        found.side = Side::Destination(State::Idle);
        let (key, place) = (found.peer, found.place);
        if let Some(peer) = self.peers.get_mut(&key) {
            if has_carried {
                peer.places[place].failures = 0;
            }
            peer.idle.push_back(lane);
            self.serve_waiting(key);
        }
    }

    /// Gives the grants that have waited longest their lanes, as long as there are any.
    pub(super) fn serve_waiting(&mut self, key: PeerKey) {
        while let Some(peer) = self.peers.get_mut(&key)
            && !peer.idle.is_empty()
            && let Some(waiter) = peer.waiting.pop_front()
        {
            match waiter {
                Waiter::Grant(grant) => self.bind(key, grant),
                Waiter::Leg(grant, leg) => self.rebind(key, grant, leg),
            }
        }
    }

    /// Through how many of our ports a peer has idle lanes.
    pub(super) fn idle_rails(&mut self, key: PeerKey) -> usize {
        let idle = self.peers.get(&key).map(|peer| &peer.idle);
        let mut rails: Vec<_> = idle
            .into_iter()
            .flatten()
            .filter_map(|lane| Some(self.lanes.find(*lane)?.rail))
            .collect();
        rails.sort_unstable();
        rails.dedup();
        rails.len()
    }

    /// Takes at most `count` idle lanes of a peer for memory on a node, each through another port
    /// of ours, those near it first, and, where there is the choice, of the peer's.
    pub(super) fn take_idle(
        &mut self,
        key: PeerKey,
        count: usize,
        memory: Option<u32>,
    ) -> Vec<LaneKey> {
        let nodes: Vec<_> = self.rails.iter().map(|rail| rail.numa_node).collect();
        let rails = self.rails.len();
        let mut taken = Vec::with_capacity(count);
        let mut theirs = Vec::with_capacity(count);
        let Some(peer) = self.peers.get_mut(&key) else {
            return taken;
        };
        for rail in numa::order(&nodes, peer.turn, memory) {
            if taken.len() == count {
                break;
            }
            let mut best = None;
            for (index, lane) in peer.idle.iter().enumerate() {
                let found = self.lanes.find(*lane).expect("an idle lane is there");
                let is_new = !theirs.contains(&found.their_rail);
                if found.rail == rail && (is_new || best.is_none()) {
                    best = Some((index, found.their_rail));
                    if is_new {
                        break;
                    }
                }
            }
            if let Some((index, their_rail)) = best {
                taken.extend(peer.idle.remove(index));
                theirs.push(their_rail);
                // The next grant begins where this one's first leg does not.
                if taken.len() == 1 {
                    peer.turn = (rail + 1) % rails;
                }
            }
        }
        taken
    }

    /// Takes an idle lane of a peer, through another port of ours than `rail` if there is one.
    pub(super) fn take_spare(&mut self, key: PeerKey, rail: usize) -> Option<LaneKey> {
        let idle = &mut self.peers.get_mut(&key)?.idle;
        let is_other = |lane: &LaneKey| {
            let found = self.lanes.find(*lane);
            found.expect("an idle lane is there").rail != rail
        };
        let index = idle.iter().position(is_other).unwrap_or(0);
        idle.remove(index)
    }

    /// Says whether a lane of ours can be used, once.
    pub(super) fn judge(&mut self, key: PeerKey) {
        let mut tell = None;
        self.introduce(key, |introduction| {
            if introduction.ours.is_none() {
                tell = Some(introduction.carries);
                introduction.ours = tell;
            }
        });
        if let Some(usable) = tell
            && let Some(peer) = self.peers.get_mut(&key)
        {
            peer.tell(Message::Usable(usable));
        }
    }

    fn introduce(&mut self, key: PeerKey, step: impl FnOnce(&mut Introduction)) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        let Some(introduction) = &mut peer.introduction else {
            return;
        };
        step(introduction);
        if let (Some(ours), Some(theirs)) = (introduction.ours, introduction.theirs) {
            let introduction = peer.introduction.take().expect("it was there");
            info!(peer = key.0, ours, theirs, "lanes were tried");
            let _given_up = introduction.done.send(ours && theirs);
        }
    }

    /// The peer says that a lane is gone.
    fn lane_gone(&mut self, key: PeerKey, number: LaneNumber, offered_by_sender: bool) {
        let Some(peer) = self.peers.get(&key) else {
            return;
        };
        let lanes = if offered_by_sender {
            &peer.theirs
        } else {
            &peer.ours
        };
        let Some(lane) = lanes.get(&number).copied() else {
            return;
        };
        if self.lanes.find(lane).is_some() {
            return self.lane_broke(lane, "the peer's end is gone");
        }
        // It is being connected, and destroyed when it is back. Until then it counts.
        let peer = self.peers.get_mut(&key).expect("it was found above");
        peer.gone.insert(lane);
    }

    /// A lane is of no use any more: whoever used it hears of that, and another takes its place.
    pub(super) fn lane_broke(&mut self, key: LaneKey, why: &str) {
        let Some(lane) = self.lanes.find(key) else {
            return;
        };
        let (peer, number, side) = (lane.peer, lane.number, lane.side);
        debug!(
            peer = peer.0,
            lane = number.0,
            ?side,
            "a lane is gone: {why}"
        );
        match side {
            Side::Destination(State::Busy(grant, leg)) => self.leg_broke(grant, leg),
            Side::Destination(State::Connecting | State::Probing | State::Idle) => {
                self.destroy_lane(key);
            }
            Side::Source(user) => {
                let next = lane.next;
                if let Some((transfer, leg)) = user {
                    let device = self.rails[lane.rail].device();
                    info!(%transfer, leg = leg.0, device, "a leg has lost its lane: {why}");
                }
                self.destroy_lane(key);
                if let Some(user) = user {
                    self.leg_lost(user);
                }
                if let Some(next) = next {
                    self.give_lane(next);
                }
            }
        }
    }

    /// Destroys a lane that carries nothing of a grant of ours that is not drained. What was posted
    /// reads no memory after it.
    pub(super) fn destroy_lane(&mut self, key: LaneKey) {
        if let Some(lane) = self.lanes.remove(key) {
            self.forget_lane(key, &lane);
            let exposed = self.exposers.remove(&key);
            let windows = exposed.into_iter().flat_map(Exposer::into_windows);
            let _no_grant = lane
                .revoke(&mut self.rails, windows)
                .expect(super::MUST_END);
        }
    }

    /// Takes a lane that was removed out of its peer's books, and offers another in its place.
    pub(super) fn forget_lane(&mut self, key: LaneKey, lane: &Lane) {
        let (peer_key, number) = (lane.peer, lane.number);
        let Some(peer) = self.peers.get_mut(&peer_key) else {
            return;
        };
        let is_ours = matches!(lane.side, Side::Destination(_));
        peer.to_connect.retain(|next| next.lane != key);
        peer.tell(Message::LaneGone {
            lane: number,
            offered_by_sender: is_ours,
        });
        if !is_ours {
            peer.theirs.remove(&number);
            return;
        }
        peer.ours.remove(&number);
        peer.idle.retain(|other| *other != key);
        if matches!(lane.side, Side::Destination(State::Busy(..))) {
            peer.places[lane.place].failures = 0;
        }
        self.place_failed(peer_key, lane.place);
    }

    fn reach_said(
        &mut self,
        key: PeerKey,
        grant: GrantId,
        granted: Granted,
    ) -> Result<(), PeerError> {
        let peer = self.peers.get_mut(&key).ok_or(PeerError::OutOfPlace)?;
        let has_room = peer.untaken.grants.len() + peer.taken.len() < GRANTS_MAX;
        if !has_room || peer.taken.contains_key(&grant) || !peer.untaken.insert(grant, granted) {
            return Err(PeerError::Grant(grant));
        }
        if let Some(link) = peer.link {
            self.reach_arrived(link, grant);
        }
        Ok(())
    }

    /// The peer has found another lane for a leg of its grant.
    fn reroute_said(
        &mut self,
        key: PeerKey,
        grant: GrantId,
        (leg, lane, keys): (LegNumber, LaneNumber, Vec<RKey>),
    ) -> Result<(), PeerError> {
        let peer = self.peers.get_mut(&key).ok_or(PeerError::OutOfPlace)?;
        if let Some(transfer) = peer.taken.get(&grant).copied() {
            let can_be = self.reroute(key, (transfer, leg), grant, (lane, &keys));
            return can_be.then_some(()).ok_or(PeerError::Grant(grant));
        }
        // No writer has taken it yet.
        let granted = peer.untaken.grants.get_mut(&grant);
        let granted = granted.ok_or(PeerError::Grant(grant))?;
        let place = granted.lanes.get_mut(leg.index());
        *place.ok_or(PeerError::Grant(grant))? = lane;
        let can_be = granted.reach.rekey(leg, &keys);
        can_be.then_some(()).ok_or(PeerError::Grant(grant))
    }
}

/// How long after a lane came to nothing the next one is offered: each time twice as long. One that
/// carried a grant is replaced at once: a fence takes a lane.
fn offer_pause(failures: u32) -> Duration {
    let pause = OFFER_PAUSE.saturating_mul(2_u32.saturating_pow(failures));
    pause.min(OFFER_PAUSE_MAX)
}

/// Which ports a lane goes through: ours and the peer's, of one kind, in turn.
fn route_of(ours: &[RailAddress], theirs: &[RailAddress], turn: usize) -> Option<(usize, usize)> {
    let mut pairs = Vec::new();
    for (shift, _) in theirs.iter().enumerate() {
        for (rail, address) in ours.iter().enumerate() {
            let their_rail = (rail + shift) % theirs.len();
            if theirs[their_rail].is_ethernet == address.is_ethernet {
                pairs.push((rail, their_rail));
            }
        }
    }
    pairs.get(turn % pairs.len().max(1)).copied()
}

/// Which port of a peer to try after so many failures of a lane that is meant for `meant`: those of
/// its kind, in turn.
fn next_port(theirs: &[RailAddress], meant: usize, failures: u32) -> usize {
    let from_there = (meant..meant + theirs.len()).map(|port| port % theirs.len());
    let of_kind = |port: &usize| theirs[*port].is_ethernet == theirs[meant].is_ethernet;
    let ports: Vec<_> = from_there.filter(of_kind).collect();
    let turn = usize::try_from(failures).expect("usize has 32 bits or more");
    ports[turn % ports.len()]
}

/// What a peer's plane did that it must not.
#[derive(Debug, thiserror::Error)]
pub(super) enum PeerError {
    #[error("grant {0} is not one that it may expose anything for")]
    Exposed(GrantId),
    #[error("grant {0} was said before, or is not one, or there are too many")]
    Grant(GrantId),
    #[error("lane {} is not one that can be", .0.0)]
    Lane(LaneNumber),
    #[error("a message out of place")]
    OutOfPlace,
}

/// Before a lane is offered in place of one that is gone.
const OFFER_PAUSE: Duration = Duration::from_millis(10);

/// Between lanes that come to nothing, at most. To make one takes some of the thread's time: where
/// the peer's port is down its address has to be looked for.
const OFFER_PAUSE_MAX: Duration = Duration::from_secs(30);

/// Where the last lane has carried a message, its way is good: the next one comes soon.
const FAILURES_PROBED_MAX: u32 = 3;

/// Lanes that one peer may offer.
const LANES_MAX: usize = 1024;

/// Grants of one peer that no writer has taken, or that are not closed.
const GRANTS_MAX: usize = fabric_proto::limits::TRANSFERS_MAX;

/// Extents of a peer's grants that no writer has taken: 64 MiB of them.
const EXTENTS_UNTAKEN_MAX: usize = 1 << 21;

/// How long a grant waits for its writer, whose machine hears of it at about the same time.
const REACH_KEPT: Duration = Duration::from_secs(30);

/// Lanes of one peer that are connected at a time.
const CONNECTS_MAX: usize = 32;

/// M: errno(3), ENOSPC.
const TOO_MANY: i32 = 28;

#[cfg(test)]
mod tests {
    use super::super::ffi::Gid;
    use super::*;

    #[test]
    fn pauses_between_lanes_that_come_to_nothing_grow_up_to_a_bound() {
        let pauses = [0, 1, 5, 11, 12, 31, 32, u32::MAX].map(offer_pause);
        let millis = [10, 20, 320, 20_480, 30_000, 30_000, 30_000, 30_000];
        assert_eq!(pauses, millis.map(Duration::from_millis));
    }

    #[test]
    fn lanes_take_turns_over_every_pair_of_ports_of_one_kind() {
        let port = |kind, id| RailAddress {
            gid: Gid([id; 16]),
            lid: 0,
            mtu: 5,
            is_ethernet: kind,
            reads: 16,
        };
        let ours = [port(true, 0), port(true, 1)];
        let theirs = [port(true, 2), port(true, 3)];
        let turns: Vec<_> = (0..5)
            .filter_map(|turn| route_of(&ours, &theirs, turn))
            .collect();
        assert_eq!(turns, [(0, 0), (1, 1), (0, 1), (1, 0), (0, 0)]);
        let mixed = [port(false, 4), port(true, 5)];
        assert_eq!(route_of(&ours, &mixed, 0), Some((1, 1)));
        assert_eq!(route_of(&ours, &mixed[..1], 0), None);
        assert_eq!(route_of(&ours, &[], 0), None);
        let three = [port(true, 5), port(false, 6), port(true, 7)];
        let tried: Vec<_> = (0..4).map(|turn| next_port(&three, 2, turn)).collect();
        assert_eq!(
            tried,
            [2, 0, 2, 0],
            "a lane that fails tries the other ports"
        );
    }
}
