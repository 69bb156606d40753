//! The destination's side: grants, from the command to the proof.
//!
//! ```text
//!   Arm ─▶ waiting for a lane ─▶ binding ─▶ open: the peer knows the keys ─▶ closed by drain
//!              │                    │          │
//!              └────────────────────┴──────────┴── fence, fault, link down ─▶ closed by fence
//! ```

use std::sync::Arc;
use std::time::Instant;

use fabric_proto::host::{Input, StoppedBy};
use fabric_proto::ids::{GrantId, LinkId, PoolId, Secret};
use tracing::{debug, error, warn};

use super::codec::{EXTENTS_MAX, Message};
use super::extents::{Cover, Reach};
use super::ffi::{Access, MemoryRegion, MemoryWindow, RKey, Signal, VerbsError};
use super::lanes::{Kind, LaneKey, Revoked, Side, State, WINDOWS_MAX};
use super::worker::Worker;
use super::{Mode, PROGRESS};
use crate::plane::area::Area;
use crate::plane::grants::{GrantStopped, Terms};
use crate::plane::pools::Pool;

/// An armed grant.
#[derive(Debug)]
pub(super) struct Inbound {
    link: LinkId,
    key: Secret,
    pool_id: PoolId,
    pool: Arc<Pool>,
    mode: Mode,
    /// Keys are filled in as windows are bound.
    reach: Reach,
    lane: Option<LaneKey>,
    region: Option<Arc<MemoryRegion>>,
    /// By extent: those before were bound, or are about to be.
    windows: Vec<(RKey, MemoryWindow)>,
    /// How many of them the writer has invalidated, in order.
    invalidated: usize,
    armed: bool,
    landed: bool,
}

impl Inbound {
    /// How many it has.
    pub(super) fn windows(&self) -> u64 {
        self.windows.len() as u64
    }
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
        match peer.idle.pop_front() {
            Some(lane) => self.bind(grant, lane),
            None => peer.waiting.push_back(grant),
        }
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
        let slots = slots.iter().map(|slot| slot.index.0);
        let area = Area::new(&pool.spec, slots).ok_or(PlanError::Memory)?;
        if !pages.iter().all(|run| area.holds(*run)) {
            return Err(PlanError::Memory);
        }
        let mut error = PlanError::NoMode;
        for mode in &self.settings.modes {
            let (cover, most) = match mode {
                Mode::Window => (Cover::Contiguous, usize::from(WINDOWS_MAX)),
                Mode::Lane => (Cover::Slots, EXTENTS_MAX),
            };
            let reach = Reach::plan(&pool.spec, area.slots(), &pages, cover);
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
                lane: None,
                region: None,
                windows: Vec::new(),
                invalidated: 0,
                armed: false,
                landed: false,
            });
        }
        Err(error)
    }

    /// Gives a waiting grant its lane.
    pub(super) fn bind(&mut self, grant: GrantId, lane: LaneKey) {
        let found = self.lanes.find(lane).expect("an idle lane is there");
        assert_eq!(
            found.side,
            Side::Destination(State::Idle),
            "one grant at a time"
        );
        found.side = Side::Destination(State::Busy(grant));
        let rail = found.rail;
        let inbound = self.grants.get_mut(&grant).expect("who waits is there");
        inbound.lane = Some(lane);
        match self.rails[rail].region(inbound.pool_id, &inbound.pool) {
            Ok(region) => inbound.region = Some(region),
            Err(error) => {
                error!(%grant, device = self.rails[rail].device(), "register a pool: {error}");
                return self.revoke_grant(grant);
            }
        }
        if inbound.mode == Mode::Lane {
            let rkey = inbound.region.as_ref().expect("it was just made").rkey();
            for extent in &mut inbound.reach.extents {
                extent.rkey = rkey;
            }
            return self.open(grant);
        }
        self.bind_more(grant);
    }

    /// Posts as many binds as the lane takes.
    fn bind_more(&mut self, grant: GrantId) {
        if let Err(error) = self.try_bind_more(grant) {
            error!(%grant, "bind a memory window: {error}");
            self.revoke_grant(grant);
        }
    }

    fn try_bind_more(&mut self, grant: GrantId) -> Result<(), VerbsError> {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let key = inbound.lane.expect("a grant that binds has its lane");
        let lane = self.lanes.find(key).expect("a grant keeps its lane");
        let region = inbound.region.as_ref().expect("it was registered before");
        let rail = &mut self.rails[lane.rail];
        loop {
            let left = inbound.reach.extents.len() - inbound.windows.len();
            let group = left.min(BIND_GROUP).min(lane.room() as usize);
            if group == 0 {
                return Ok(());
            }
            for last in (0..group).rev() {
                let extent = inbound.reach.extents[inbound.windows.len()];
                let (window, rkey) = next_window(|| rail.window())?;
                let signal = if last == 0 { Signal::Yes } else { Signal::No };
                lane.queue_pair.post_bind(
                    (key.wr_id(Kind::Binds), signal),
                    (&window, rkey),
                    region,
                    (extent.offset, inbound.reach.extent_bytes(&extent)),
                    Access::REMOTE_WRITE,
                )?;
                inbound.reach.extents[inbound.windows.len()].rkey = rkey;
                inbound.windows.push((rkey, window));
            }
            lane.posted(u32::try_from(group).expect("a group is small"), 0);
        }
    }

    /// A group of binds has completed.
    pub(super) fn binds_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.completed();
        let is_quiet = found.is_quiet();
        let Side::Destination(State::Busy(grant)) = found.side else {
            return;
        };
        let inbound = &self.grants[&grant];
        if inbound.windows.len() < inbound.reach.extents.len() {
            self.bind_more(grant);
        } else if is_quiet {
            self.open(grant);
        }
    }

    /// Tells the peer's plane the keys, and the machine that the grant is armed.
    fn open(&mut self, grant: GrantId) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        inbound.armed = true;
        let lane = inbound.lane.expect("an open grant has its lane");
        let lane = self.lanes.find(lane).expect("a grant keeps its lane");
        // S7: to the one peer that the grant is for, and the windows open to this lane alone.
        if let Some(peer) = self.peers.get_mut(&lane.peer) {
            peer.tell(Message::Reach {
                grant,
                key: inbound.key,
                lane: lane.number,
                reach: inbound.reach.clone(),
            });
        }
        self.outbox.post(Input::Armed { grant });
    }

    /// A message came in through a lane of ours.
    pub(super) fn received(&mut self, key: LaneKey, what: Received) {
        let Some(lane) = self.lanes.find(key) else {
            return;
        };
        // The receive that it took.
        if let Err(error) = lane.post_receives(key, 1) {
            return self.lane_broke(key, &error.to_string());
        }
        let Side::Destination(State::Busy(grant)) = lane.side else {
            return; // A probe, or of a grant that is closed.
        };
        let inbound = self
            .grants
            .get_mut(&grant)
            .expect("a busy lane has its grant");
        match what {
            Received::Invalidated(rkey) => {
                let expected = inbound.windows.get(inbound.invalidated);
                if !inbound.armed || expected.is_none_or(|(expected, _)| *expected != rkey) {
                    warn!(%grant, "the writer invalidated a window out of turn");
                    self.refused += 1;
                    return self.lane_broke(key, "its writer broke the order");
                }
                inbound.invalidated += 1;
                if inbound.invalidated == inbound.windows.len() {
                    self.drained(grant);
                }
            }
            Received::Number(PROGRESS) => self.landed(grant),
            Received::Number(_) if inbound.mode == Mode::Lane && inbound.armed => {
                self.drained(grant);
            }
            Received::Number(_) => {}
        }
    }

    /// The writer's drain is complete.
    fn drained(&mut self, grant: GrantId) {
        let inbound = self.grants.remove(&grant).expect("the caller has it");
        let key = inbound.lane.expect("an open grant has its lane");
        let lane = self.lanes.find(key).expect("a grant keeps its lane");
        let proof = match inbound.mode {
            Mode::Window => lane.drained(grant, inbound.invalidated, inbound.windows.len()),
            Mode::Lane => lane.drained_by_word(grant),
        };
        let rail = lane.rail;
        for (_, window) in inbound.windows {
            self.rails[rail].put_window(window);
        }
        self.flip(&inbound.pool, &inbound.reach);
        self.tell_closed(grant, inbound.link, StoppedBy::Drain, proof);
        self.lane_idle(key);
    }

    /// Makes it impossible that a write of this grant lands.
    pub(super) fn fence(&mut self, grant: GrantId) {
        match self.grants.get(&grant) {
            Some(inbound) if inbound.lane.is_some() => self.revoke_grant(grant),
            Some(_) => self.never_arm(grant),
            None => {} // Closed already: its proof was given.
        }
    }

    /// The fence of a grant that has a lane.
    pub(super) fn revoke_grant(&mut self, grant: GrantId) {
        let inbound = self.grants.remove(&grant).expect("the caller has it");
        let key = inbound.lane.expect("the caller has seen its lane");
        let lane = self.lanes.remove(key).expect("a grant keeps its lane");
        self.forget_lane(key, &lane);
        let windows = inbound.windows.into_iter().map(|(_, window)| window);
        let proof = lane
            .revoke(&mut self.rails, windows)
            .expect(super::MUST_END);
        self.tell_closed(grant, inbound.link, StoppedBy::Fence, proof);
    }

    /// Gives up a grant that waits for a lane.
    pub(super) fn never_arm(&mut self, grant: GrantId) {
        let Some(inbound) = self.grants.remove(&grant) else {
            return;
        };
        assert!(inbound.lane.is_none(), "the caller has seen that it waits");
        let peer = self.links.get(&inbound.link).copied();
        if let Some(peer) = peer.and_then(|key| self.peers.get_mut(&key)) {
            peer.waiting.retain(|other| *other != grant);
        }
        self.tell_never_armed(grant);
    }

    fn tell_never_armed(&self, grant: GrantId) {
        // S1: no key of its slots was ever made.
        let proof = Revoked::never_armed();
        let stopped = GrantStopped::by_hardware(grant, StoppedBy::Fence, proof);
        self.outbox.post(Input::WritesStopped(stopped));
    }

    fn tell_closed(&mut self, grant: GrantId, link: LinkId, by: StoppedBy, proof: Revoked) {
        let peer = self
            .links
            .get(&link)
            .and_then(|key| self.peers.get_mut(key));
        if let Some(peer) = peer {
            peer.tell(Message::Closed { grant });
        }
        let stopped = GrantStopped::by_hardware(grant, by, proof);
        self.outbox.post(Input::WritesStopped(stopped));
    }

    fn landed(&mut self, grant: GrantId) {
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
                    let mut byte = [0];
                    pool.memory.read(page, &mut byte).expect(IN_POOL);
                    pool.memory.write(page, &[byte[0] ^ 1]).expect(IN_POOL);
                }
            }
        }
    }
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
    #[error("verbs.modes allows none")]
    NoMode,
    #[error("its pages are {got} runs, and {most} are the most; verbs.modes could allow \"lane\"")]
    TooMany { got: usize, most: usize },
}

/// A window with a key that it never had. One whose keys are used up is destroyed.
fn next_window(
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

/// Binds that complete together.
const BIND_GROUP: usize = 32;

const IN_POOL: &str = "a reach lies within its pool, and a pool within its memory";
