//! The destination's side: grants, from the command to the proof.
//!
//! ```text
//!   Arm ─▶ waiting for a lane ─▶ binding ─▶ open: the peer knows the keys ─▶ closed by drain
//!              │                    │          │
//!              └────────────────────┴──────────┴── fence, fault, link down ─▶ closed by fence
//! ```
//!
//! A grant has a leg for each lane that it gets: some of its extents, which are written through
//! that lane alone. It is open when the windows of every leg are bound, and closed when every leg
//! is stopped.
//!
//! ```text
//!                 ┌──────────────── lane ◀─── waiting ◀── lane broke: it is destroyed ──┐
//!                 ▼                              │                                      │
//!   leg:  lane: binding ─▶ bound: writable ──────┼──────────────────────────────────────┘
//!                             │                  └── none in time: the grant is fenced
//!                             └── invalidated by the writer ─▶ drained
//! ```
//!
//! A leg whose lane breaks goes on through another (failover):
//!
//! 1. The broken lane is destroyed, which fences the leg: a write that was flushed may have landed,
//!    or land, until then.
//! 2. Its extents get windows on an idle lane, through another port if there is one.
//! 3. The peer's plane is told the new lane and keys. It posts again what was not acknowledged.
//!    That is idempotent: the source's pages are sealed, and go to the same places.
//!
//! The other legs go on. Only the destination decides: the writer has no key but what it was told.
//!
//! A grant in pull mode has one leg without extents, and ends with its lane: see `pull_inbound`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_proto::host::{Input, StoppedBy};
use fabric_proto::ids::{GrantId, LinkId, PoolId, Secret};
use tracing::{debug, error, info, warn};

use super::codec::{EXTENTS_MAX, LegNumber, Message};
use super::extents::{Cover, Reach};
use super::ffi::{Access, MemoryRegion, MemoryWindow, RKey, Signal, VerbsError};
use super::lanes::{Kind, LaneKey, LegStopped, Revoked, Side, State, WINDOWS_MAX};
use super::peers::PeerKey;
use super::pull_inbound::Reader;
use super::worker::Worker;
use super::{Mode, PROGRESS};
use crate::plane::area::Area;
use crate::plane::grants::{GrantStopped, Terms};
use crate::plane::pools::{Memory, Pool};

/// An armed grant.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) link: LinkId,
    key: Secret,
    pool_id: PoolId,
    pub(super) pool: Arc<Pool>,
    mode: Mode,
    /// Keys are filled in as windows are bound.
    reach: Reach,
    /// By number. None: it waits for a lane.
    legs: Vec<Leg>,
    failovers: u32,
    pub(super) armed: bool,
    landed: bool,
    /// In pull mode.
    reader: Option<Box<Reader>>,
}

/// What of a grant is written through one lane.
#[derive(Debug)]
struct Leg {
    /// Indices into the reach's extents, in the order of the drain.
    extents: Vec<u16>,
    state: LegState,
}

#[derive(Debug)]
enum LegState {
    /// The writer has drained it. The lane is kept for as long as the grant is open, if it holds.
    Drained(Option<LaneKey>, LegStopped),
    /// It has a lane.
    Laned(Bound),
    /// Its lane broke, through this port of ours and at that time. It is to have another.
    Waiting {
        stopped: LegStopped,
        rail: usize,
        since: Instant,
    },
}

/// A leg's lane, and what is bound on it.
#[derive(Debug)]
struct Bound {
    lane: LaneKey,
    region: Arc<MemoryRegion>,
    /// By place in the leg's extents: those before were bound, or are about to be.
    windows: Vec<(RKey, MemoryWindow)>,
    /// All of them are bound.
    is_bound: bool,
    /// How many of them the writer has invalidated, in order.
    invalidated: usize,
}

impl Inbound {
    /// How many it has.
    pub(super) fn windows(&self) -> u64 {
        let of_leg = |leg: &Leg| match &leg.state {
            LegState::Drained(..) | LegState::Waiting { .. } => 0,
            LegState::Laned(bound) => bound.windows.len() as u64,
        };
        self.legs.iter().map(of_leg).sum()
    }

    /// What reads, where a grant that is in pull mode has its lane; and that, and its region.
    pub(super) fn reading(&mut self) -> Option<(&mut Reader, LaneKey, &MemoryRegion)> {
        let reader = self.reader.as_deref_mut()?;
        match &self.legs.first()?.state {
            LegState::Drained(..) | LegState::Waiting { .. } => None,
            LegState::Laned(bound) => Some((reader, bound.lane, &bound.region)),
        }
    }

    fn laned(&mut self, leg: LegNumber) -> Option<(&mut Bound, &[u16], &mut Reach)> {
        let Leg { extents, state } = self.legs.get_mut(leg.index())?;
        match state {
            LegState::Drained(..) | LegState::Waiting { .. } => None,
            LegState::Laned(bound) => Some((bound, extents, &mut self.reach)),
        }
    }
}

/// Who waits for a lane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Waiter {
    Grant(GrantId),
    Leg(GrantId, LegNumber),
}

impl Worker {
    /// Opens a grant as soon as there is a lane.
    pub(super) fn arm(&mut self, terms: Terms) {
        let grant = terms.grant;
        let Some(peer_key) = self.links.get(&terms.link).copied() else {
            debug!(%grant, "not armed: the link is down");
            return self.tell_never_armed(grant);
        };
        let inbound = match self.plan(terms) {
            Ok(inbound) => inbound,
            Err(why) => {
                error!(%grant, "not armed: {why}");
                return self.tell_never_armed(grant);
            }
        };
        let before = self.grants.insert(grant, inbound);
        assert!(before.is_none(), "the machine never uses a grant id twice");
        let peer = self.peers.get_mut(&peer_key).expect("a link has its peer");
        peer.waiting.push_back(Waiter::Grant(grant));
        self.serve_waiting(peer_key);
    }

    /// How a grant's memory is to be reached.
    fn plan(&self, terms: Terms) -> Result<Inbound, PlanError> {
        let Terms {
            grant: _,
            link,
            key,
            pool: pool_id,
            slots,
            pages,
        } = terms;
        let pool = self.pools.find(pool_id).ok_or(PlanError::Memory)?;
        if !self.regions.knows(pool_id) {
            return Err(PlanError::NotRegistered);
        }
        let slots = slots.iter().map(|slot| slot.index.0);
        let area = Area::new(&pool.spec, slots).ok_or(PlanError::Memory)?;
        if !pages.iter().all(|run| area.holds(*run)) {
            return Err(PlanError::Memory);
        }
        let mut error = PlanError::NoMode;
        for mode in &self.settings.modes {
            let plan = |cover| Reach::plan(&pool.spec, area.slots(), &pages, cover);
            let reach = match mode {
                Mode::Window => plan(Cover::Contiguous),
                Mode::Lane => plan(Cover::Slots),
                Mode::Pull if self.can_pull(link) => Reach::pull(&pool.spec),
                Mode::Pull => continue,
            };
            let most = extents_max(*mode);
            let got = reach.extents.len();
            if got > most {
                error = PlanError::TooMany { got, most };
                continue;
            }
            return Ok(Inbound {
                link,
                key,
                pool_id,
                pool,
                mode: *mode,
                reach,
                legs: Vec::new(),
                failovers: 0,
                armed: false,
                landed: false,
                reader: (*mode == Mode::Pull).then(|| Box::new(Reader::new(area, pages))),
            });
        }
        Err(error)
    }

    /// Gives a grant of a peer that has an idle lane one for each leg.
    pub(super) fn bind(&mut self, peer: PeerKey, grant: GrantId) {
        let rails = self.idle_rails(peer);
        let inbound = self.grants.get_mut(&grant).expect("who waits is there");
        let legs = match inbound.mode {
            Mode::Lane | Mode::Window => inbound.reach.share(rails, extents_max(inbound.mode)),
            Mode::Pull => 1,
        };
        let mut extents = vec![Vec::new(); legs];
        for (index, extent) in (0..).zip(&inbound.reach.extents) {
            extents[extent.leg.index()].push(index);
        }
        let memory = self.regions.numa_node(inbound.pool_id);
        let mut lanes = self.take_idle(peer, legs, memory).into_iter();
        for (number, extents) in (0..).zip(extents) {
            let lane = lanes.next().expect("a lane for each leg");
            if let Err(why) = self.add_leg(grant, LegNumber(number), lane, extents) {
                error!(%grant, "{why}");
                self.fence(grant);
                return [lane]
                    .into_iter()
                    .chain(lanes)
                    .for_each(|lane| self.lane_idle(lane));
            }
        }
        for number in 0..legs {
            let number = LegNumber(u8::try_from(number).expect("legs are few"));
            self.bind_leg(grant, number);
        }
    }

    fn add_leg(
        &mut self,
        grant: GrantId,
        leg: LegNumber,
        key: LaneKey,
        extents: Vec<u16>,
    ) -> Result<(), String> {
        let bound = self.laned(grant, leg, key)?;
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let state = LegState::Laned(bound);
        inbound.legs.push(Leg { extents, state });
        Ok(())
    }

    /// Makes an idle lane that of a leg.
    fn laned(&mut self, grant: GrantId, leg: LegNumber, key: LaneKey) -> Result<Bound, String> {
        let inbound = &self.grants[&grant];
        let lane = self.lanes.find(key).expect("an idle lane is there");
        let region = self.regions.find(lane.rail, inbound.pool_id);
        let region = Arc::clone(region.ok_or("its pool is gone")?);
        let idle = Side::Destination(State::Idle);
        assert_eq!(lane.side, idle, "one grant at a time");
        lane.side = Side::Destination(State::Busy(grant, leg));
        Ok(Bound {
            lane: key,
            region,
            windows: Vec::new(),
            is_bound: false,
            invalidated: 0,
        })
    }

    /// Binds the extents of a leg, whose lane was just taken.
    fn bind_leg(&mut self, grant: GrantId, leg: LegNumber) {
        let Some(inbound) = self.grants.get_mut(&grant) else {
            return; // Another leg could not be bound.
        };
        if inbound.mode == Mode::Window {
            return self.bind_more(grant, leg);
        }
        let (bound, extents, reach) = inbound.laned(leg).expect("the caller has its lane");
        let rkey = bound.region.rkey();
        for index in extents {
            reach.extents[usize::from(*index)].rkey = rkey;
        }
        self.leg_bound(grant, leg);
    }

    /// Posts as many binds as the lane takes.
    fn bind_more(&mut self, grant: GrantId, leg: LegNumber) {
        if let Err(error) = self.try_bind_more(grant, leg) {
            error!(%grant, "bind a memory window: {error}");
            self.chain.clear();
            self.leg_broke(grant, leg);
        }
    }

    fn try_bind_more(&mut self, grant: GrantId, leg: LegNumber) -> Result<(), VerbsError> {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let (bound, extents, reach) = inbound.laned(leg).expect("a leg that binds has its lane");
        let key = bound.lane;
        let lane = self.lanes.find(key).expect("a leg keeps its lane");
        let rail = &mut self.rails[lane.rail];
        bound
            .windows
            .reserve_exact(extents.len() - bound.windows.len());
        loop {
            let left = extents.len() - bound.windows.len();
            let group = left.min(BIND_GROUP).min(lane.room() as usize);
            if group == 0 {
                return Ok(());
            }
            for last in (0..group).rev() {
                let index = usize::from(extents[bound.windows.len()]);
                let extent = reach.extents[index];
                let (window, rkey) = next_window(|| rail.window(&lane.queue_pair))?;
                let signal = if last == 0 { Signal::Yes } else { Signal::No };
                self.chain.bind(
                    key.wr_id(Kind::Binds),
                    signal,
                    (&window, rkey),
                    (&bound.region, extent.offset, reach.extent_bytes(&extent)),
                    Access::REMOTE_WRITE,
                );
                reach.extents[index].rkey = rkey;
                bound.windows.push((rkey, window));
            }
            self.chain.post(&lane.queue_pair)?;
            // Only now: what is posted names the key before as well.
            for (rkey, window) in &bound.windows[bound.windows.len() - group..] {
                window.bound_under(*rkey);
            }
            lane.posted(u32::try_from(group).expect("a group is small"), 0, 0);
        }
    }

    /// A group of binds has completed.
    pub(super) fn binds_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.completed();
        let is_quiet = found.is_quiet();
        let Side::Destination(State::Busy(grant, leg)) = found.side else {
            return;
        };
        let inbound = self
            .grants
            .get_mut(&grant)
            .expect("a busy lane has its grant");
        let Some((bound, extents, _)) = inbound.laned(leg) else {
            return;
        };
        if bound.windows.len() < extents.len() {
            self.bind_more(grant, leg);
        } else if is_quiet {
            self.leg_bound(grant, leg);
        }
    }

    /// Every window of a leg is bound.
    fn leg_bound(&mut self, grant: GrantId, leg: LegNumber) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let (bound, ..) = inbound.laned(leg).expect("the caller has seen its lane");
        bound.is_bound = true;
        if inbound.armed {
            return self.rerouted(grant, leg);
        }
        let is_bound =
            |leg: &Leg| matches!(&leg.state, LegState::Laned(Bound { is_bound: true, .. }));
        if inbound.legs.iter().all(is_bound) {
            self.open(grant);
        }
    }

    /// A leg of an open grant has another lane: the peer's plane is told.
    fn rerouted(&mut self, grant: GrantId, leg: LegNumber) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let link = inbound.link;
        let (bound, extents, reach) = inbound.laned(leg).expect("as above");
        let lane = self.lanes.find(bound.lane).expect("a leg keeps its lane");
        let device = self.rails[lane.rail].device();
        self.failovers += 1;
        info!(%grant, leg = leg.0, device, lane = lane.number.0, "a leg goes on");
        let key = |index: &u16| reach.extents[usize::from(*index)].rkey;
        let message = Message::Rerouted {
            grant,
            leg,
            lane: lane.number,
            keys: extents.iter().map(key).collect(),
        };
        // S7: as in `open`.
        self.tell(link, message);
    }

    /// Tells the peer's plane the keys, and the machine that the grant is armed.
    fn open(&mut self, grant: GrantId) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        inbound.armed = true;
        let mut lanes = Vec::with_capacity(inbound.legs.len());
        for leg in &inbound.legs {
            let LegState::Laned(Bound { lane, .. }) = &leg.state else {
                panic!("a grant that is about to open has its lanes");
            };
            let lane = self.lanes.find(*lane).expect("a leg keeps its lane");
            lanes.push(lane.number);
        }
        let message = Message::Reach {
            grant,
            key: inbound.key,
            lanes,
            reach: inbound.reach.clone(),
        };
        let link = inbound.link;
        // S7: to the one peer that the grant is for, and each window opens to its lane alone.
        self.tell(link, message);
        self.outbox.post(Input::Armed { grant });
    }

    /// A message came in through a lane of ours.
    pub(super) fn received(&mut self, key: LaneKey, what: Received) {
        let Some(lane) = self.lanes.find(key) else {
            return;
        };
        // The receive that it took.
        if let Err(error) = lane.received(key) {
            return self.lane_broke(key, &error.to_string());
        }
        if let Side::Source(user) = lane.side {
            return self.returned(key, user, what);
        }
        let Side::Destination(State::Busy(grant, leg)) = lane.side else {
            return; // A probe, or of a grant that is closed.
        };
        let inbound = self
            .grants
            .get_mut(&grant)
            .expect("a busy lane has its grant");
        let (mode, armed) = (inbound.mode, inbound.armed);
        match what {
            Received::Invalidated(rkey) => {
                let laned = inbound.laned(leg).filter(|_| armed);
                let of_turn = laned.map(|(bound, ..)| bound).filter(|bound| {
                    // Keys can be guessed: before the last bind completed it was told none.
                    let expected = bound.windows.get(bound.invalidated);
                    bound.is_bound && expected.is_some_and(|(expected, _)| *expected == rkey)
                });
                let Some(bound) = of_turn else {
                    warn!(%grant, "the writer invalidated a window out of turn");
                    self.refused += 1;
                    return self.revoke_grant(grant);
                };
                bound.invalidated += 1;
                if bound.invalidated == bound.windows.len() {
                    self.leg_drained(grant, leg);
                }
            }
            Received::Number(PROGRESS) => self.landed(grant),
            Received::Number(_) if mode == Mode::Lane && armed => self.leg_drained(grant, leg),
            Received::Number(_) => {}
        }
    }

    /// The writer's drain of a leg is complete; or all of it was read.
    pub(super) fn leg_drained(&mut self, grant: GrantId, leg: LegNumber) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let mode = inbound.mode;
        let Some((bound, ..)) = inbound.laned(leg) else {
            return; // Said twice, by one whose word has to be taken.
        };
        let key = bound.lane;
        let lane = self.lanes.find(key).expect("a leg keeps its lane");
        let stopped = match mode {
            Mode::Window => lane.drained(bound.invalidated, bound.windows.len()),
            Mode::Lane => lane.drained_by_word(),
            Mode::Pull => lane.drained_by_reads(),
        };
        for (_, window) in std::mem::take(&mut bound.windows) {
            self.rails[lane.rail].put_window(window);
        }
        inbound.legs[leg.index()].state = LegState::Drained(Some(key), stopped);
        let is_drained = |leg: &Leg| matches!(leg.state, LegState::Drained(..));
        if inbound.legs.iter().all(is_drained) {
            self.close_grant(grant, StoppedBy::Drain);
        }
    }

    /// Makes it impossible that a write of this grant lands.
    pub(super) fn fence(&mut self, grant: GrantId) {
        match self.grants.get(&grant) {
            Some(inbound) if !inbound.legs.is_empty() => self.revoke_grant(grant),
            Some(_) => self.never_arm(grant),
            None => {} // Closed already: its proof was given.
        }
    }

    /// The fence of a grant that has a lane.
    pub(super) fn revoke_grant(&mut self, grant: GrantId) {
        self.close_grant(grant, StoppedBy::Fence);
    }

    /// Closes a grant that has lanes: each leg that is not drained is fenced.
    fn close_grant(&mut self, grant: GrantId, by: StoppedBy) {
        let inbound = self.grants.remove(&grant).expect("the caller has it");
        self.wait_no_more(grant, inbound.link);
        let mut legs = Vec::with_capacity(inbound.legs.len());
        let mut idle = Vec::new();
        for leg in inbound.legs {
            legs.push(match leg.state {
                LegState::Drained(lane, stopped) => {
                    idle.extend(lane);
                    stopped
                }
                LegState::Laned(bound) => self.revoke_leg(bound.lane, bound.windows),
                LegState::Waiting { stopped, .. } => stopped,
            });
        }
        let proof = Revoked::of_legs(grant, &legs);
        if by == StoppedBy::Drain {
            self.flip(&inbound.pool, &inbound.reach);
        }
        self.tell_closed(grant, inbound.link, by, proof);
        for lane in idle {
            self.lane_idle(lane);
        }
    }

    /// The lane of a leg is of no use any more: it is destroyed, and the leg waits for another.
    pub(super) fn leg_broke(&mut self, grant: GrantId, leg: LegNumber) {
        let inbound = self
            .grants
            .get_mut(&grant)
            .expect("a busy lane has its grant");
        let link = inbound.link;
        let has_peer = |key| self.peers.contains_key(key);
        let may_go_on = inbound.mode != Mode::Pull
            && inbound.failovers < FAILOVERS_MAX
            && self.links.get(&link).is_some_and(has_peer);
        let (key, windows) = match &mut inbound.legs[leg.index()].state {
            LegState::Drained(lane, _) => {
                if let Some(lane) = lane.take() {
                    self.destroy_lane(lane);
                    self.tell(link, Message::LegDrained { grant, leg });
                }
                return;
            }
            LegState::Waiting { .. } => return,
            LegState::Laned(_) if !may_go_on => return self.revoke_grant(grant),
            LegState::Laned(bound) => (bound.lane, std::mem::take(&mut bound.windows)),
        };
        inbound.failovers += 1;
        let rail = self.lanes.find(key).expect("a leg keeps its lane").rail;
        let device = self.rails[rail].device();
        info!(%grant, leg = leg.0, device, "a leg has lost its lane");
        // S1: the old keys and the old lane are gone before there are new ones.
        let stopped = self.revoke_leg(key, windows);
        let inbound = self.grants.get_mut(&grant).expect("it was there");
        inbound.legs[leg.index()].state = LegState::Waiting {
            stopped,
            rail,
            since: Instant::now(),
        };
        let peer_key = self.links[&link];
        if let Some(peer) = self.peers.get_mut(&peer_key) {
            // Before grants that have nothing to lose yet.
            peer.waiting.push_front(Waiter::Leg(grant, leg));
            self.serve_waiting(peer_key);
        }
    }

    /// Gives a leg whose lane broke another, of a peer that has one idle.
    pub(super) fn rebind(&mut self, peer: PeerKey, grant: GrantId, leg: LegNumber) {
        let inbound = self.grants.get_mut(&grant).expect("who waits is there");
        let LegState::Waiting { rail, .. } = inbound.legs[leg.index()].state else {
            panic!("a leg that waits is waiting");
        };
        let Some(lane) = self.take_spare(peer, rail) else {
            return;
        };
        match self.laned(grant, leg, lane) {
            Ok(bound) => {
                let inbound = self.grants.get_mut(&grant).expect("as above");
                // What was proven of the old lane says nothing of this one: it is dropped.
                inbound.legs[leg.index()].state = LegState::Laned(bound);
                self.bind_leg(grant, leg);
            }
            Err(why) => {
                error!(%grant, "{why}");
                self.revoke_grant(grant);
                self.lane_idle(lane);
            }
        }
    }

    /// Fences the grants with a leg that has waited too long for another lane.
    pub(super) fn fence_late_legs(&mut self, now: Instant) {
        let is_late = |leg: &Leg| match leg.state {
            LegState::Waiting { since, .. } => now.duration_since(since) > LANE_WAIT,
            LegState::Drained(..) | LegState::Laned(_) => false,
        };
        let grants = self.grants.iter();
        let late = grants.filter(|(_, inbound)| inbound.legs.iter().any(is_late));
        let late: Vec<_> = late.map(|(grant, _)| *grant).collect();
        for grant in late {
            info!(%grant, "no other lane for a leg: the grant is fenced");
            self.fence(grant);
        }
    }

    /// The peer says that a grant has no writer any more.
    pub(super) fn given_up(&mut self, peer: PeerKey, grant: GrantId) {
        let inbound = self.grants.get(&grant);
        // S7: who has no part in a grant does not end it.
        if inbound.is_some_and(|inbound| self.links.get(&inbound.link) == Some(&peer)) {
            self.fence(grant);
        }
    }

    fn wait_no_more(&mut self, grant: GrantId, link: LinkId) {
        if let Some(peer) = self.peer_at(link) {
            peer.waiting.retain(|waiter| match waiter {
                Waiter::Grant(other) | Waiter::Leg(other, _) => *other != grant,
            });
        }
    }

    /// The fence of a leg, which takes its lane.
    fn revoke_leg(
        &mut self,
        key: LaneKey,
        windows: impl IntoIterator<Item = (RKey, MemoryWindow)>,
    ) -> LegStopped {
        let lane = self.lanes.remove(key).expect("a leg keeps its lane");
        self.forget_lane(key, &lane);
        let windows = windows.into_iter().map(|(_, window)| window);
        let stopped = lane.revoke(&mut self.rails, windows);
        let stopped = stopped.expect(super::MUST_END);
        stopped.expect("the lane carried the leg")
    }

    /// Gives up a grant that waits for a lane.
    pub(super) fn never_arm(&mut self, grant: GrantId) {
        let Some(inbound) = self.grants.remove(&grant) else {
            return;
        };
        assert!(inbound.legs.is_empty(), "the caller has seen that it waits");
        self.wait_no_more(grant, inbound.link);
        self.tell_never_armed(grant);
    }

    fn tell_never_armed(&self, grant: GrantId) {
        // S1: no key of its slots was ever made.
        let proof = Revoked::never_armed();
        let stopped = GrantStopped::by_hardware(grant, StoppedBy::Fence, proof);
        self.outbox.post(Input::WritesStopped(stopped));
    }

    fn tell_closed(&mut self, grant: GrantId, link: LinkId, by: StoppedBy, proof: Revoked) {
        let is_drained = by == StoppedBy::Drain;
        self.tell(link, Message::Closed { grant, is_drained });
        let stopped = GrantStopped::by_hardware(grant, by, proof);
        self.outbox.post(Input::WritesStopped(stopped));
    }

    pub(super) fn landed(&mut self, grant: GrantId) {
        if let Some(inbound) = self.grants.get_mut(&grant) {
            inbound.landed = true;
            self.say_landed_at = self.say_landed_at.or_else(|| Some(Instant::now()));
        }
    }

    /// Says of each grant whether its writer has been heard of since the last time.
    pub(super) fn report_landed(&mut self) {
        self.say_landed_at = None;
        if !self.outbox.is_clear() {
            return;
        }
        for (grant, inbound) in &mut self.grants {
            if std::mem::take(&mut inbound.landed) {
                self.outbox.post(Input::Landed { grant: *grant });
            }
        }
    }

    /// Flips a bit of each page that the faults ask for.
    fn flip(&self, pool: &Pool, reach: &Reach) {
        if !self.faults.may_flip() {
            return;
        }
        for extent in &reach.extents {
            for across in 0..u64::from(extent.regions) {
                for along in 0..u64::from(extent.count) {
                    if !self.faults.flips_page() {
                        return;
                    }
                    let page =
                        extent.offset + across * reach.region_stride + along * reach.slot_stride;
                    flip_byte(pool, page);
                }
            }
        }
    }
}

/// Corrupts a page. In host memory: that is where tests ask for it.
pub(super) fn flip_byte(pool: &Pool, page: u64) {
    let Memory::Host(memory) = &pool.memory else {
        return;
    };
    let mut byte = [0];
    memory.read(page, &mut byte).expect(IN_POOL);
    memory.write(page, &[byte[0] ^ 1]).expect(IN_POOL);
}

/// A message's content.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Received {
    /// It has invalidated this key.
    Invalidated(RKey),
    /// It is this number.
    Number(u32),
}

/// Why a grant cannot be armed.
#[derive(Debug, thiserror::Error)]
enum PlanError {
    #[error("no such pool, slot or page")]
    Memory,
    #[error("verbs.modes allows none that the peer does too")]
    NoMode,
    #[error("no RDMA device knows its pool")]
    NotRegistered,
    #[error("its pages are {got} runs, and {most} are the most; verbs.modes could allow \"lane\"")]
    TooMany { got: usize, most: usize },
}

fn extents_max(mode: Mode) -> usize {
    match mode {
        Mode::Window => WINDOWS_MAX.into(),
        Mode::Lane => EXTENTS_MAX,
        Mode::Pull => 0,
    }
}

/// A window with a key that it never had. One whose keys are used up is destroyed.
pub(super) fn next_window(
    mut take: impl FnMut() -> Result<MemoryWindow, VerbsError>,
) -> Result<(MemoryWindow, RKey), VerbsError> {
    loop {
        let mut window = take()?;
        match window.take_key() {
            Some(rkey) => return Ok((window, rkey)),
            None => window.close()?,
        }
    }
}

/// Lanes that one grant may lose before it is fenced: a fault that each lane meets anew is not the
/// lanes'.
const FAILOVERS_MAX: u32 = 8;

/// How long a leg waits for another lane. One that is offered anew takes a few round trips.
const LANE_WAIT: Duration = Duration::from_secs(2);

/// Binds that complete together.
pub(super) const BIND_GROUP: usize = 32;

const IN_POOL: &str = "a reach lies within its pool, and a pool within its memory";
