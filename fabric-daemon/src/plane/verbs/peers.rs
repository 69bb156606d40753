//! Peers: who is at the other end of lanes, and how new lanes come to be.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use fabric_proto::ids::{GrantId, LinkId, Secret};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, info, warn};

use super::codec::{LaneNumber, LaneOffer, Message, RailAddress};
use super::extents::Reach;
use super::ffi::{Route, VerbsError};
use super::lanes::{Kind, Lane, LaneKey, RECEIVES, Side, State};
use super::worker::Worker;

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
    introduction: Option<Introduction>,
    next_lane: u32,
    /// Our lanes, and the peer's, by number.
    ours: BTreeMap<LaneNumber, LaneKey>,
    pub(super) theirs: BTreeMap<LaneNumber, LaneKey>,
    /// Ours that are free.
    pub(super) idle: VecDeque<LaneKey>,
    /// Grants that wait for one.
    pub(super) waiting: VecDeque<GrantId>,
    /// What the peer has granted us, until the writer takes it.
    reaches: BTreeMap<GrantId, (Secret, LaneNumber, Reach)>,
    /// Grants whose writer has taken it.
    taken: BTreeSet<GrantId>,
}

/// What is left to do before the peer can be used: each end says whether its lanes carry messages,
/// and both must.
#[derive(Debug)]
struct Introduction {
    done: oneshot::Sender<bool>,
    /// Lanes of ours that do not carry anything yet.
    lanes_left: usize,
    ours: Option<bool>,
    theirs: Option<bool>,
}

/// What became of a reach.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Reached {
    /// Not here yet.
    Awaited,
    /// Here it is: the key, the lane, and where.
    Now(Secret, LaneNumber, Reach),
    /// Another writer has it.
    Taken,
}

impl Peer {
    /// Tells the peer something. A peer that does not listen is cut off once its queue is full.
    pub(super) fn tell(&mut self, message: Message) {
        self.is_deaf |= self.outgoing.try_send(message).is_err();
    }

    /// The lane that the peer's grant is for, if it was said and not taken.
    pub(super) fn lane_for(&self, grant: GrantId) -> Option<LaneKey> {
        let (_, lane, _) = self.reaches.get(&grant)?;
        self.theirs.get(lane).copied()
    }

    /// Takes what the peer's grant reaches, once.
    pub(super) fn take_reach(&mut self, grant: GrantId) -> Reached {
        if let Some((key, lane, reach)) = self.reaches.remove(&grant) {
            self.taken.insert(grant);
            return Reached::Now(key, lane, reach);
        }
        if self.taken.contains(&grant) {
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
        let peer = Peer {
            link: None,
            rails,
            outgoing,
            is_deaf: false,
            introduction: Some(Introduction {
                done,
                lanes_left: self.settings.lanes,
                ours: None,
                theirs: None,
            }),
            next_lane: 0,
            ours: BTreeMap::new(),
            theirs: BTreeMap::new(),
            idle: VecDeque::new(),
            waiting: VecDeque::new(),
            reaches: BTreeMap::new(),
            taken: BTreeSet::new(),
        };
        self.peers.insert(key, peer);
        for _ in 0..self.settings.lanes {
            self.offer_lane(key);
        }
    }

    /// Everything of a peer ends: its writers fail, and its grants are fenced.
    pub(super) fn peer_gone(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.remove(&key) else {
            return;
        };
        for grant in peer.waiting {
            self.never_arm(grant);
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
                lane,
                reach,
            } => self.reach_said(key, grant, (secret, lane, reach)),
            Message::Closed { grant } => {
                if let Some(peer) = self.peers.get_mut(&key) {
                    peer.reaches.remove(&grant);
                    peer.taken.remove(&grant);
                }
                Ok(())
            }
            Message::Rails(_) => Err(PeerError::OutOfPlace),
        };
        if let Err(error) = heard {
            warn!(peer = key.0, "a peer's plane is cut off: {error}");
            self.refused += 1;
            self.peer_gone(key);
        }
    }

    /// Offers a new lane to a peer, through the ports whose turn it is.
    pub(super) fn offer_lane(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        let lane_number = LaneNumber(peer.next_lane);
        let Some(next) = peer.next_lane.checked_add(1) else {
            return;
        };
        peer.next_lane = next;
        let Some((rail, their_rail)) = route_of(&self.addresses, &peer.rails, lane_number.0) else {
            warn!(
                peer = key.0,
                "no port of the peer is of a kind with one here"
            );
            return;
        };
        let made = Lane::new(
            &mut self.rails,
            rail,
            key,
            lane_number,
            Side::Destination(State::Connecting),
        );
        let added = made.and_then(|lane| self.add_lane(lane));
        let lane = match added {
            Ok(lane) => lane,
            Err(error) => {
                warn!(device = self.rails[rail].device(), "make a lane: {error}");
                return;
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
        lane.post_receives(key, RECEIVES)?;
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
        let made = Lane::new(&mut self.rails, rail, key, offer.lane, side)
            .and_then(|lane| self.add_lane(lane));
        let connected = made.and_then(|lane| {
            let first = self.lanes.find(lane).expect("it was just added").first;
            let route = self.route(rail, address, (offer.number, offer.first), first);
            let found = self.lanes.find(lane).expect("as above");
            found.connect(&route)?;
            Ok((lane, found.queue_pair.number(), first))
        });
        let peer = self.peers.get_mut(&key).expect("it was found above");
        match connected {
            Ok((lane, number, first)) => {
                peer.theirs.insert(offer.lane, lane);
                peer.tell(Message::LaneReady {
                    lane: offer.lane,
                    number,
                    first,
                });
            }
            Err(error) => {
                warn!(peer = key.0, "connect a lane: {error}");
                peer.tell(Message::LaneGone {
                    lane: offer.lane,
                    offered_by_sender: false,
                });
            }
        }
        Ok(())
    }

    /// The peer has connected a lane of ours: we do, and see whether it carries anything.
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
        let found = self.lanes.find(lane).expect("the peer's lanes are there");
        if found.side != Side::Destination(State::Connecting) {
            return Err(PeerError::Lane(lane_number));
        }
        let (rail, our_first) = (found.rail, found.first);
        let (_, their_rail) =
            route_of(&self.addresses, &peer.rails, lane_number.0).expect("as when it was offered");
        let address = peer.rails[their_rail];
        let route = self.route(rail, address, (number, first), our_first);
        let found = self.lanes.find(lane).expect("as above");
        found.side = Side::Destination(State::Probing);
        let connected = found.connect(&route).and_then(|()| {
            self.chain.send_immediate(
                lane.wr_id(Kind::Probe),
                super::ffi::Signal::Yes,
                super::PROBE,
            );
            self.chain.post(&found.queue_pair)
        });
        match connected {
            Ok(()) => found.posted(1, 0),
            Err(error) => self.lane_broke(lane, &error.to_string()),
        }
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
        let peer = found.peer;
        self.lane_idle(lane);
        let mut is_last = false;
        self.introduce(peer, |introduction| {
            introduction.lanes_left = introduction.lanes_left.saturating_sub(1);
            is_last = introduction.lanes_left == 0;
        });
        if is_last {
            self.judge(peer, true);
        }
    }

    /// A lane of ours is free: the grant that has waited longest gets it.
    pub(super) fn lane_idle(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.side = Side::Destination(State::Idle);
        let Some(peer) = self.peers.get_mut(&found.peer) else {
            return;
        };
        match peer.waiting.pop_front() {
            Some(grant) => self.bind(grant, lane),
            None => peer.idle.push_back(lane),
        }
    }

    /// Says whether our lanes can be used, once.
    pub(super) fn judge(&mut self, key: PeerKey, usable: bool) {
        let mut tell = false;
        self.introduce(key, |introduction| {
            tell = introduction.ours.is_none();
            introduction.ours = introduction.ours.or(Some(usable));
        });
        if tell && let Some(peer) = self.peers.get_mut(&key) {
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
        if let Some(lane) = lanes.get(&number).copied() {
            self.lane_broke(lane, "the peer's end is gone");
        }
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
            Side::Destination(State::Busy(grant)) => self.revoke_grant(grant),
            Side::Destination(_) => self.destroy_lane(key),
            Side::Source(user) => {
                self.destroy_lane(key);
                if let Some(transfer) = user {
                    self.fail_writer(transfer, why);
                }
            }
        }
    }

    /// Destroys a lane that carries no grant of ours. What was posted reads no memory after it.
    fn destroy_lane(&mut self, key: LaneKey) {
        if let Some(lane) = self.lanes.remove(key) {
            self.forget_lane(key, &lane);
            let _no_grant = lane.revoke(&mut self.rails, []).expect(super::MUST_END);
        }
    }

    /// Takes a lane that was removed out of its peer's books, and offers another in its place.
    pub(super) fn forget_lane(&mut self, key: LaneKey, lane: &Lane) {
        let (peer_key, number) = (lane.peer, lane.number);
        let Some(peer) = self.peers.get_mut(&peer_key) else {
            return;
        };
        let is_ours = matches!(lane.side, Side::Destination(_));
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
        if peer.introduction.is_some() {
            self.judge(peer_key, false);
        } else {
            self.due_offers
                .push((Instant::now() + super::OFFER_PAUSE, peer_key));
        }
    }

    fn reach_said(
        &mut self,
        key: PeerKey,
        grant: GrantId,
        reach: (Secret, LaneNumber, Reach),
    ) -> Result<(), PeerError> {
        let peer = self.peers.get_mut(&key).ok_or(PeerError::OutOfPlace)?;
        let is_known = peer.reaches.contains_key(&grant) || peer.taken.contains(&grant);
        if is_known || peer.reaches.len() + peer.taken.len() == GRANTS_MAX {
            return Err(PeerError::Grant(grant));
        }
        peer.reaches.insert(grant, reach);
        if let Some(link) = peer.link {
            self.reach_arrived(link, grant);
        }
        Ok(())
    }

    fn route(&self, rail: usize, peer: RailAddress, theirs: (u32, u32), our_first: u32) -> Route {
        let rail = &self.rails[rail];
        Route {
            port: rail.port,
            gid_index: rail.gid.index,
            mtu: rail.address.mtu.min(peer.mtu),
            is_global: rail.address.is_ethernet,
            gid: peer.gid,
            lid: peer.lid,
            number: theirs.0,
            their_first: theirs.1,
            our_first,
        }
    }
}

/// Which ports a lane goes through: ours and the peer's, of one kind, in turn.
fn route_of(ours: &[RailAddress], theirs: &[RailAddress], turn: u32) -> Option<(usize, usize)> {
    let mut pairs = Vec::new();
    for (shift, _) in theirs.iter().enumerate() {
        for (rail, address) in ours.iter().enumerate() {
            let their_rail = (rail + shift) % theirs.len();
            if theirs[their_rail].is_ethernet == address.is_ethernet {
                pairs.push((rail, their_rail));
            }
        }
    }
    let turn = usize::try_from(turn).expect("usize has 32 bits or more");
    pairs.get(turn % pairs.len().max(1)).copied()
}

/// What a peer's plane did that it must not.
#[derive(Debug, thiserror::Error)]
enum PeerError {
    #[error("grant {0} was said before, or there are too many")]
    Grant(GrantId),
    #[error("lane {} is not one that can be", .0.0)]
    Lane(LaneNumber),
    #[error("a message out of place")]
    OutOfPlace,
}

/// Lanes that one peer may offer.
const LANES_MAX: usize = 1024;

/// Grants of one peer that no writer has taken, or that are not closed.
const GRANTS_MAX: usize = fabric_proto::limits::TRANSFERS_MAX;

/// M: errno(3), ENOSPC.
const TOO_MANY: i32 = 28;

#[cfg(test)]
mod tests {
    use super::super::ffi::Gid;
    use super::*;

    #[test]
    fn lanes_take_turns_over_every_pair_of_ports_of_one_kind() {
        let port = |kind, id| RailAddress {
            gid: Gid([id; 16]),
            lid: 0,
            mtu: 5,
            is_ethernet: kind,
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
    }
}
