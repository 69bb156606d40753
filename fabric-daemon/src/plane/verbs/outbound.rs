//! The source's side: writers, from the command to the proof.
//!
//! ```text
//!   OpenWriter ─▶ waiting for the keys ─▶ writing ─▶ drains posted ─▶ acknowledged: reads stopped
//!                      │                    │            │
//!                      └── stop, too late ──┴────────────┴── fault, link down ─▶ failed
//! ```
//!
//! A leg whose lane breaks waits for the peer to name another (failover, see `inbound`), and then
//! posts again what was not acknowledged.
//!
//! A writer has the legs that its grant has. What it is to write is cut into pieces, each of one
//! write, which wait with their leg: so a slow lane does not hold up the others before its leg has
//! [`PIECES_MAX`] of them.
//!
//! Where the peer reads there is nothing to write: see `pull_outbound`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_proto::ids::{GrantId, LinkId, Secret, TransferId};
use fabric_proto::pool::PageRun;
use tracing::{debug, info};

use super::codec::{LaneNumber, LegNumber, Message};
use super::extents::Reach;
use super::ffi::{Local, MemoryRegion, RKey, Remote, SendChain, Signal};
use super::lanes::{Kind, Lane, LaneKey, LegOfWriter, SENDS_MAX, Side};
use super::peers::{Granted, PeerKey, Reached};
use super::pull_outbound::Exposer;
use super::worker::Worker;
use super::{DRAIN, Mode, PROGRESS};
use crate::plane::source::Source;

/// One attempt of a transfer.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) source: Source,
    link: LinkId,
    key: Secret,
    pub(super) runs: VecDeque<PageRun>,
    /// Bytes of the first run that were posted.
    pub(super) offset: u64,
    pub(super) end: Option<End>,
    /// The peer has said that its grant is closed, and that every leg was drained.
    is_drained_there: bool,
    route: Option<Route>,
    /// Bytes posted in all, and how many of them are not acknowledged. Where the peer reads:
    /// exposed in all, and not given back.
    pub(super) posted: u64,
    pub(super) outstanding: u64,
    opened: Instant,
    /// When the machine stopped it.
    stopped: Option<Instant>,
    /// When the peer last heard of us.
    progress_at: Instant,
}

/// How a writer that has its keys reaches the peer.
#[derive(Debug)]
struct Route {
    reach: Reach,
    /// By number.
    legs: Vec<Leg>,
}

/// What of a grant is written through one lane.
#[derive(Debug)]
struct Leg {
    /// Indices into the reach's extents, in the order of the drain.
    extents: Vec<u16>,
    way: Way,
    /// Those that were posted and are not acknowledged, and then those that were not posted. At
    /// most [`PIECES_MAX`], for which there is room from the start.
    pieces: VecDeque<Piece>,
    /// How many of the pieces were posted.
    posted: usize,
    /// Extents whose invalidation was posted.
    drained: usize,
    drain_posted: bool,
}

/// How far a leg has its lane.
#[derive(Debug)]
enum Way {
    /// The peer has named it, and it is not free yet: the peer knew of its last drain before us.
    Given(LaneNumber),
    /// It has it.
    Laned(LaneKey, Arc<MemoryRegion>),
    /// It had one that broke, at that time. The peer is to name another.
    Lost(Instant),
    /// It needs none: its drain is acknowledged.
    Over,
}

/// One write.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Piece {
    /// In our pool.
    from: u64,
    /// In the peer's.
    to: u64,
    bytes: u32,
    /// Whose key opens it.
    extent: u16,
}

impl Writer {
    /// Whether the peer reads.
    fn is_pull(&self) -> bool {
        let route = self.route.as_ref();
        route.is_some_and(|route| route.reach.is_pull())
    }

    /// The lane of a writer whose peer reads, and the pool's region there, once it has it.
    pub(super) fn read_through(&self) -> Option<(LaneKey, &Arc<MemoryRegion>)> {
        match &self.route.as_ref()?.legs.first()?.way {
            Way::Laned(lane, region) => Some((*lane, region)),
            Way::Given(_) | Way::Lost(_) | Way::Over => None,
        }
    }

    fn leg(&mut self, leg: LegNumber) -> Option<&mut Leg> {
        self.route.as_mut()?.legs.get_mut(leg.index())
    }

    /// Cuts runs into pieces for as long as every leg has room for what comes next.
    fn fill(&mut self, piece_bytes_max: u64) -> Result<(), String> {
        let Some(Route { reach, legs }) = &mut self.route else {
            return Ok(());
        };
        let mut near = 0;
        while let Some(run) = self.runs.front().copied() {
            let area = &self.source.area;
            let here = area.extent(run, self.offset, piece_bytes_max);
            // S7: a page that the grant does not reach is not written, whatever we were told.
            let page_bytes = area.page_bytes();
            let index = u32::try_from(self.offset / page_bytes).expect("within the run's count");
            let page = (index, self.offset % page_bytes);
            let there = reach.piece(run, page, here.bytes, near);
            let there = there.ok_or_else(|| format!("the grant does not reach {run:?}"))?;
            near = there.extent;
            let leg = &mut legs[reach.extents[there.extent].leg.index()];
            if leg.pieces.len() == PIECES_MAX {
                break;
            }
            leg.pieces.push_back(Piece {
                from: here.start,
                to: there.offset,
                bytes: u32::try_from(there.bytes).expect("at most WRITE_BYTES_MAX"),
                extent: u16::try_from(there.extent).expect("at most EXTENTS_MAX"),
            });
            self.offset += there.bytes;
            if self.offset == area.run_bytes(run) {
                self.runs.pop_front();
                self.offset = 0;
            }
        }
        Ok(())
    }

    /// Forgets what was not posted.
    fn cut_short(&mut self) {
        self.runs.clear();
        self.offset = 0;
        for leg in self.route.iter_mut().flat_map(|route| &mut route.legs) {
            leg.pieces.truncate(leg.posted);
        }
    }
}

impl Leg {
    fn new(lane: LaneNumber) -> Self {
        Self {
            extents: Vec::new(),
            way: Way::Given(lane),
            pieces: VecDeque::with_capacity(PIECES_MAX),
            posted: 0,
            drained: 0,
            drain_posted: false,
        }
    }

    /// Takes the oldest pieces, which were acknowledged.
    fn acknowledged(&mut self, count: u32) {
        let count = count as usize;
        assert!(count <= self.posted, "each was posted");
        self.posted -= count;
        self.pieces.drain(..count);
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum End {
    /// After the runs.
    Drain,
    /// Now.
    Stop,
}

impl Worker {
    pub(super) fn open_writer(&mut self, link: LinkId, key: Secret, source: Source) {
        let (transfer, grant) = (source.transfer(), source.grant());
        if !self.links.contains_key(&link) {
            debug!(%transfer, %grant, %link, "writer failed: the link is down");
            return source.fail();
        }
        if !self.regions.knows(source.pool_id) {
            info!(%transfer, %grant, "writer failed: no RDMA device knows its pool");
            return source.fail();
        }
        let now = Instant::now();
        let writer = Writer {
            source,
            link,
            key,
            runs: VecDeque::new(),
            offset: 0,
            end: None,
            is_drained_there: false,
            route: None,
            posted: 0,
            outstanding: 0,
            opened: now,
            stopped: None,
            progress_at: now,
        };
        if let Some(before) = self.writers.insert(transfer, writer) {
            // The machine waits for the end of an attempt before the next, so this is a bug; what
            // the lane has posted ends with the lane.
            tracing::error!(%transfer, "the transfer still has a writer");
            self.end_writer(before, Some("superseded"));
        }
        if self.awaiting.contains_key(&(link, grant)) {
            return self.fail_writer(transfer, "the grant has a writer");
        }
        self.awaiting.insert((link, grant), transfer);
        self.reach_arrived(link, grant);
    }

    /// Starts the writer that waits for these keys, if they and it are here.
    pub(super) fn reach_arrived(&mut self, link: LinkId, grant: GrantId) {
        let Some(transfer) = self.awaiting.get(&(link, grant)).copied() else {
            return;
        };
        let Some(peer) = self.peer_at(link) else {
            return;
        };
        let reached = peer.take_reach(grant, transfer);
        if matches!(reached, Reached::Awaited) {
            return;
        }
        self.awaiting.remove(&(link, grant));
        match reached {
            Reached::Now(granted) => match self.start(transfer, granted) {
                Ok(()) => self.pump(transfer),
                Err(why) => self.fail_writer(transfer, &why),
            },
            Reached::Taken => self.fail_writer(transfer, "the grant has a writer"),
            Reached::Awaited => {}
        }
    }

    fn start(&mut self, transfer: TransferId, granted: Granted) -> Result<(), String> {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return Ok(());
        };
        let Granted {
            key,
            lanes,
            reach,
            at: _,
        } = granted;
        if writer.key != key {
            return Err("the grant's key is another".into());
        }
        if u64::from(reach.page_bytes) != writer.source.area.page_bytes() {
            return Err(format!("the peer's pages have {} bytes", reach.page_bytes));
        }
        if reach.is_pull() && !self.settings.modes.contains(&Mode::Pull) {
            return Err("the peer is to read, and verbs.modes does not allow \"pull\"".into());
        }
        let mut legs: Vec<_> = lanes.into_iter().map(Leg::new).collect();
        for (index, extent) in (0..).zip(&reach.extents) {
            legs[extent.leg.index()].extents.push(index);
        }
        let numbers = 0..u8::try_from(legs.len()).expect("at most LEGS_MAX");
        writer.route = Some(Route { reach, legs });
        for number in numbers {
            self.take_lane((transfer, LegNumber(number)))?;
        }
        Ok(())
    }

    /// A lane that a leg waits for is free, or gone.
    pub(super) fn give_lane(&mut self, leg: LegOfWriter) {
        match self.take_lane(leg) {
            Ok(()) => self.pump(leg.0),
            Err(why) => self.fail_writer(leg.0, &why),
        }
    }

    /// Gives a leg the lane that the peer has named for it, as soon as it is free.
    fn take_lane(&mut self, (transfer, leg): LegOfWriter) -> Result<(), String> {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return Ok(());
        };
        let peer = self.links.get(&writer.link);
        let peer = peer.and_then(|key| self.peers.get(key));
        let is_pull = writer.is_pull();
        let (source, route) = (&writer.source, &mut writer.route);
        let found = route
            .as_mut()
            .and_then(|route| route.legs.get_mut(leg.index()));
        let Some((Some(peer), found)) = found.map(|found| (peer, found)) else {
            return Ok(());
        };
        let Way::Given(number) = found.way else {
            return Ok(());
        };
        let key = peer.theirs.get(&number).copied();
        let lane = key.and_then(|key| Some((key, self.lanes.find(key)?)));
        let Some((key, lane)) = lane else {
            // The peer has heard of that, or will.
            found.way = Way::Lost(Instant::now());
            return Ok(());
        };
        match (lane.side, lane.next) {
            (Side::Source(None), _) => {
                let region = self.regions.find(lane.rail, source.pool_id);
                let region = Arc::clone(region.ok_or("its pool is gone")?);
                lane.side = Side::Source(Some((transfer, leg)));
                found.way = Way::Laned(key, region);
                if is_pull {
                    self.exposers.insert(key, Exposer::new());
                }
                Ok(())
            }
            (Side::Source(Some(_)), None) => {
                lane.next = Some((transfer, leg));
                Ok(())
            }
            (Side::Source(Some(_)), Some(_)) | (Side::Destination(_), _) => {
                Err("the peer has given its lane to others as well".into())
            }
        }
    }

    pub(super) fn write(&mut self, transfer: TransferId, run: PageRun) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        if writer.end.is_some() {
            return;
        }
        if !writer.source.area.holds(run) {
            return self.fail_writer(transfer, "the machine asked for what is not the transfer's");
        }
        writer.runs.push_back(run);
        self.pump(transfer);
    }

    pub(super) fn drain(&mut self, transfer: TransferId) {
        if let Some(writer) = self.writers.get_mut(&transfer) {
            writer.end = writer.end.or(Some(End::Drain));
            self.pump(transfer);
        }
    }

    pub(super) fn stop(&mut self, transfer: TransferId) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        writer.end = Some(End::Stop);
        writer.stopped = writer.stopped.or_else(|| Some(Instant::now()));
        writer.cut_short();
        if writer.route.is_some() {
            return self.pump(transfer);
        }
        // Nothing was read or written: there is nothing to drain.
        if let Some(writer) = self.writers.remove(&transfer) {
            self.end_writer(writer, None);
        }
    }

    /// Posts as much as the lanes and the bound on outstanding bytes take.
    pub(super) fn pump(&mut self, transfer: TransferId) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        if writer.is_pull() {
            return self.expose(transfer);
        }
        // So that one piece always fits.
        let piece_bytes_max = WRITE_BYTES_MAX.min(self.outstanding_bytes_max);
        let mut pumped = writer.fill(piece_bytes_max);
        let mut posting = Posting {
            chain: &mut self.chain,
            outstanding_bytes_max: self.outstanding_bytes_max,
            stall: match writer.end {
                Some(End::Stop) => u64::MAX,
                Some(End::Drain) | None => self.faults.room(writer.posted),
            },
            is_last: writer.end.is_some() && writer.runs.is_empty(),
            posted: 0,
            outstanding: writer.outstanding,
        };
        if let Some(Route { reach, legs }) = &mut writer.route {
            for leg in legs {
                let Way::Laned(key, region) = &leg.way else {
                    continue;
                };
                let (key, lkey) = (*key, region.lkey());
                let lane = self.lanes.find(key).expect("a leg keeps its lane");
                while pumped.is_ok() && posting.fill(leg, reach, (key, lkey), lane) {
                    pumped = posting.post(lane);
                }
            }
        }
        writer.posted += posting.posted;
        writer.outstanding = posting.outstanding;
        if let Err(why) = pumped {
            self.fail_writer(transfer, &why);
        }
    }

    /// A group of writes is acknowledged.
    pub(super) fn writes_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        let (writes, bytes) = found.completed().unwrap_or((0, 0));
        let Side::Source(Some((transfer, number))) = found.side else {
            return;
        };
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        let Some(leg) = writer.leg(number) else {
            return;
        };
        leg.acknowledged(writes);
        let drain_posted = leg.drain_posted;
        writer.outstanding -= bytes;
        if bytes > 0 {
            writer.source.written(bytes);
        }
        let now = Instant::now();
        if now.duration_since(writer.progress_at) >= PROGRESS_EVERY && !drain_posted {
            writer.progress_at = now;
            let id = lane.wr_id(Kind::Progress);
            self.chain.send_immediate(id, Signal::Yes, PROGRESS);
            match self.chain.post(&found.queue_pair) {
                Ok(()) => found.posted(1, 0, 0),
                Err(error) => return self.lane_broke(lane, &error.to_string()),
            }
        }
        self.pump(transfer);
    }

    /// The drain of a leg is acknowledged, and with it everything before.
    pub(super) fn drain_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.completed();
        if let Side::Source(Some(leg)) = found.side {
            self.lane_over(lane, leg);
        }
    }

    /// A leg is over, and its lane is free.
    pub(super) fn lane_over(&mut self, lane: LaneKey, (transfer, number): LegOfWriter) {
        let found = self.lanes.find(lane).expect("the caller has seen it");
        assert!(found.is_quiet(), "requests of a lane complete in order");
        found.side = Side::Source(None);
        let next = found.next.take();
        self.leg_over(transfer, number);
        // The peer knew of the drain before us, and may have used the lane for another grant.
        if let Some(next) = next {
            self.give_lane(next);
        }
    }

    /// A leg's lane is destroyed. What it had not acknowledged may have landed or not.
    pub(super) fn leg_lost(&mut self, (transfer, number): LegOfWriter) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        if writer.is_pull() {
            return self.fail_writer(transfer, "the lane that its peer reads through is gone");
        }
        let is_stopped = writer.end == Some(End::Stop);
        let Some(leg) = writer.leg(number) else {
            return;
        };
        let posted = leg.pieces.range(..leg.posted);
        let bytes: u64 = posted.map(|piece| u64::from(piece.bytes)).sum();
        leg.posted = 0;
        leg.way = Way::Lost(Instant::now());
        if is_stopped {
            leg.pieces.clear();
        }
        // S8: nothing of it is on its way any more.
        writer.outstanding -= bytes;
        if writer.is_drained_there {
            self.leg_landed((transfer, number));
        }
    }

    /// The peer says of a leg whose lane broke that it was drained before.
    fn leg_landed(&mut self, (transfer, number): LegOfWriter) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        let Some(leg) = writer.leg(number) else {
            return;
        };
        if !matches!(leg.way, Way::Lost(_)) {
            return;
        }
        if !leg.drain_posted {
            return self.fail_writer(transfer, "the peer closed a leg that was not drained");
        }
        let pieces = std::mem::take(&mut leg.pieces);
        let bytes = pieces.iter().map(|piece| u64::from(piece.bytes)).sum();
        if bytes > 0 {
            writer.source.written(bytes);
        }
        self.leg_over(transfer, number);
    }

    /// The peer says that its grant is closed.
    pub(super) fn closed_there(&mut self, key: PeerKey, grant: GrantId, is_drained: bool) {
        let Some(peer) = self.peers.get_mut(&key) else {
            return;
        };
        let _untaken = peer.untaken.remove(grant);
        let Some(transfer) = peer.taken.remove(&grant) else {
            return;
        };
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        if writer.source.grant() != grant {
            return;
        }
        if !is_drained {
            return self.fail_writer(transfer, "the peer has closed the grant");
        }
        writer.is_drained_there = true;
        let legs = writer.route.as_ref().map_or(0, |route| route.legs.len());
        for number in (0..).map(LegNumber).take(legs) {
            self.leg_landed((transfer, number));
        }
    }

    /// The peer says of a leg that it was drained before its lane broke.
    pub(super) fn leg_drained_there(&mut self, key: PeerKey, grant: GrantId, leg: LegNumber) {
        let peer = self.peers.get(&key);
        let Some(transfer) = peer.and_then(|peer| peer.taken.get(&grant).copied()) else {
            return;
        };
        let writer = self.writers.get(&transfer);
        if writer.is_some_and(|writer| writer.source.grant() == grant) {
            self.leg_landed((transfer, leg));
        }
    }

    /// The peer has found another lane for a leg that lost its own, and other keys; whether that
    /// can be.
    pub(super) fn reroute(
        &mut self,
        key: PeerKey,
        (transfer, number): LegOfWriter,
        grant: GrantId,
        (lane, keys): (LaneNumber, &[RKey]),
    ) -> bool {
        let writer = self.writers.get_mut(&transfer);
        let Some(writer) = writer.filter(|writer| writer.source.grant() == grant) else {
            // It is over, or has failed: the peer need not wait for it.
            let message = Message::GivenUp { grant };
            self.peers.entry(key).and_modify(|peer| peer.tell(message));
            return true;
        };
        let Some(Route { reach, legs }) = &mut writer.route else {
            return false;
        };
        let Some(leg) = legs.get_mut(number.index()) else {
            return false;
        };
        // Over: the drain was acknowledged, but its lane was destroyed before the peer saw it.
        let has_none = matches!(leg.way, Way::Lost(_) | Way::Over);
        if !has_none || !reach.rekey(number, keys) {
            return false;
        }
        let writes = leg.pieces.len();
        info!(%transfer, %grant, leg = number.0, lane = lane.0, writes, "a leg goes on");
        leg.way = Way::Given(lane);
        leg.drained = 0;
        leg.drain_posted = false;
        self.give_lane((transfer, number));
        true
    }

    /// A leg needs its lane no more.
    fn leg_over(&mut self, transfer: TransferId, number: LegNumber) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        let Some(leg) = writer.leg(number) else {
            return;
        };
        leg.way = Way::Over;
        let mut legs = writer.route.iter().flat_map(|route| &route.legs);
        if legs.all(|leg| matches!(leg.way, Way::Over)) {
            // S2: every request of this attempt is acknowledged, and every window to its pages
            // void, so the device reads nothing more for it. Dropping its `Source` is the proof.
            self.writers.remove(&transfer);
        }
    }

    /// Ends a writer that cannot go on.
    pub(super) fn fail_writer(&mut self, transfer: TransferId, why: &str) {
        if let Some(writer) = self.writers.remove(&transfer) {
            self.end_writer(writer, Some(why));
        }
    }

    /// Ends a writer that was removed. Where it has posted anything its lanes go first: only then
    /// does the device read the pool no more.
    fn end_writer(&mut self, writer: Writer, failed: Option<&str>) {
        let transfer = writer.source.transfer();
        self.awaiting.retain(|_, other| *other != transfer);
        if writer.route.is_some() {
            // Before its lanes go, so that the peer looks for no others.
            let grant = writer.source.grant();
            self.tell(writer.link, Message::GivenUp { grant });
        }
        for leg in writer.route.iter().flat_map(|route| &route.legs) {
            match leg.way {
                Way::Given(number) => self.give_up_lane(writer.link, number, transfer),
                Way::Laned(lane, _) => {
                    if let Some(lane) = self.lanes.find(lane) {
                        lane.side = Side::Source(None);
                    }
                    self.lane_broke(lane, "its writer has failed");
                }
                Way::Lost(_) | Way::Over => {}
            }
        }
        match failed {
            Some(why) => {
                info!(%transfer, grant = %writer.source.grant(), "writer failed: {why}");
                writer.source.fail();
            }
            None => drop(writer),
        }
    }

    /// A writer that waits for a lane to be free waits no more.
    fn give_up_lane(&mut self, link: LinkId, number: LaneNumber, transfer: TransferId) {
        let peer = self.links.get(&link).and_then(|key| self.peers.get(key));
        let key = peer.and_then(|peer| peer.theirs.get(&number).copied());
        if let Some(lane) = key.and_then(|key| self.lanes.find(key)) {
            lane.next = lane.next.filter(|(other, _)| *other != transfer);
        }
    }

    /// Fails the writers of a link that have no lane: the others' lanes have failed them.
    pub(super) fn fail_waiting_writers(&mut self, link: LinkId) {
        let of_link = self
            .writers
            .iter()
            .filter(|(_, writer)| writer.link == link);
        let of_link: Vec<_> = of_link.map(|(transfer, _)| *transfer).collect();
        for transfer in of_link {
            self.fail_writer(transfer, "the link is down");
        }
    }

    /// Fails the writers that have waited too long for their keys, or for another lane, and those
    /// that were stopped and are not over: whatever their peer does or leaves undone.
    // S4: a source's pins end without the peer's help.
    pub(super) fn fail_late_writers(&mut self, now: Instant) {
        let is_late = |writer: &Writer| now.duration_since(writer.opened) > REACH_WAIT;
        let late = self.awaiting.values().copied();
        let late: Vec<_> = late
            .filter(|transfer| self.writers.get(transfer).is_some_and(is_late))
            .collect();
        for transfer in late {
            self.fail_writer(transfer, "the peer does not say where to write");
        }
        let is_late = |leg: &Leg| match leg.way {
            Way::Lost(since) => now.duration_since(since) > REROUTE_WAIT,
            Way::Given(_) | Way::Laned(..) | Way::Over => false,
        };
        let late = self.writers.iter().filter(|(_, writer)| {
            let mut legs = writer.route.iter().flat_map(|route| &route.legs);
            legs.any(is_late)
        });
        let late: Vec<_> = late.map(|(transfer, _)| *transfer).collect();
        for transfer in late {
            self.fail_writer(transfer, "the peer names no other lane for a leg");
        }
        let is_late = |since: Instant| now.duration_since(since) > STOP_WAIT;
        let late = self.writers.iter();
        let late = late.filter(|(_, writer)| writer.stopped.is_some_and(is_late));
        let late: Vec<_> = late.map(|(transfer, _)| *transfer).collect();
        for transfer in late {
            self.fail_writer(transfer, "it was stopped, and its peer holds it up");
        }
    }
}

/// How the lanes of a writer are filled.
struct Posting<'a> {
    chain: &'a mut SendChain,
    outstanding_bytes_max: u64,
    /// How many more bytes a fault lets through. The piece that reaches it is whole.
    stall: u64,
    /// Whether the pieces that wait are the last, and the drain is to follow.
    is_last: bool,
    posted: u64,
    outstanding: u64,
}

impl Posting<'_> {
    /// Fills the chain with what comes next on a lane, whose key and whose region's it is given,
    /// and notes it; whether there is anything, and room for it.
    fn fill(
        &mut self,
        leg: &mut Leg,
        reach: &Reach,
        (key, lkey): (LaneKey, u32),
        lane: &mut Lane,
    ) -> bool {
        // One place stays free, for the message that says that we are alive.
        let room = lane.room().saturating_sub(1).min(CHAIN_MAX);
        let (mut count, mut bytes) = (0, 0);
        let wr_id = key.wr_id(Kind::Writes);
        let ahead = self.outstanding_bytes_max.saturating_sub(self.outstanding);
        for piece in leg.pieces.range(leg.posted..).take(room as usize) {
            let after = bytes + u64::from(piece.bytes);
            // S8: what is outstanding, over all legs, is what a drain has to wait for.
            if after > ahead || bytes >= self.stall {
                break;
            }
            bytes = after;
            count += 1;
            let local = Local {
                offset: piece.from,
                bytes: piece.bytes,
                lkey,
            };
            let remote = Remote {
                offset: piece.to,
                rkey: reach.extents[usize::from(piece.extent)].rkey,
            };
            self.chain.write(wr_id, Signal::No, local, remote);
        }
        if count > 0 {
            self.chain.signal_last();
            self.posted += bytes;
            self.outstanding += bytes;
            self.stall = self.stall.saturating_sub(bytes);
            leg.posted += count as usize;
            lane.posted(count, count, bytes);
            return true;
        }
        let may_drain = self.is_last && self.stall > 0 && leg.posted == leg.pieces.len();
        if !may_drain || leg.drain_posted || room == 0 {
            return false;
        }
        lane.posted(self.drain(leg, reach, key, room), 0, 0);
        true
    }

    /// The next messages of a drain, and how many: each takes a window away, and the last of them
    /// is the proof.
    fn drain(&mut self, leg: &mut Leg, reach: &Reach, key: LaneKey, room: u32) -> u32 {
        let last = key.wr_id(Kind::Drain);
        if !reach.by_window {
            self.chain.send_immediate(last, Signal::Yes, DRAIN);
            leg.drain_posted = true;
            return 1;
        }
        let mut count = 0;
        while count < room && !leg.drain_posted {
            let index = usize::from(leg.extents[leg.drained]);
            let rkey = reach.extents[index].rkey;
            leg.drained += 1;
            count += 1;
            if leg.drained == leg.extents.len() {
                leg.drain_posted = true;
                self.chain.send_invalidate(last, Signal::Yes, rkey);
            } else {
                let signal = if count == room {
                    Signal::Yes
                } else {
                    Signal::No
                };
                self.chain
                    .send_invalidate(key.wr_id(Kind::Writes), signal, rkey);
            }
        }
        count
    }

    fn post(&mut self, lane: &Lane) -> Result<(), String> {
        self.chain
            .post(&lane.queue_pair)
            .map_err(|error| error.to_string())
    }
}

/// [`SendChain::MAX`].
const CHAIN_MAX: u32 = 32;

const _: () = assert!(CHAIN_MAX as usize == SendChain::MAX);

/// Pieces of one leg: those that its lane has posted, and as many that wait.
const PIECES_MAX: usize = 2 * SENDS_MAX as usize;

/// Bytes of one write. Short enough that a slow port says often that it is alive.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// How often the destination hears that we are alive.
const PROGRESS_EVERY: Duration = Duration::from_millis(50);

/// How long a leg waits for another lane: longer than the peer may look for one.
const REROUTE_WAIT: Duration = Duration::from_secs(5);

/// How long a writer that was stopped may wait for what it has posted: as long as for a lane.
const STOP_WAIT: Duration = REROUTE_WAIT;

/// How long a writer waits for its keys, which are said before the machine's own message.
const REACH_WAIT: Duration = Duration::from_secs(5);
