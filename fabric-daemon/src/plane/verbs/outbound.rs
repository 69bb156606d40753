//! The source's side: writers, from the command to the proof.
//!
//! ```text
//!   OpenWriter ─▶ waiting for the keys ─▶ writing ─▶ drain posted ─▶ acknowledged: reads stopped
//!                      │                    │            │
//!                      └── stop, too late ──┴────────────┴── fault, link down ─▶ failed
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_proto::ids::{GrantId, LinkId, Secret, TransferId};
use fabric_proto::pool::PageRun;
use tracing::{debug, info};

use super::extents::Reach;
use super::ffi::{Local, MemoryRegion, Remote, SendChain, Signal};
use super::lanes::{Kind, LaneKey, Side};
use super::peers::Reached;
use super::worker::Worker;
use super::{DRAIN, PROGRESS};
use crate::plane::source::Source;

/// One attempt of a transfer.
#[derive(Debug)]
pub(super) struct Writer {
    source: Source,
    link: LinkId,
    key: Secret,
    runs: VecDeque<PageRun>,
    /// Bytes of the first run that were posted.
    offset: u64,
    end: Option<End>,
    route: Option<Path>,
    /// Bytes posted in all, and how many of them are not acknowledged.
    posted: u64,
    outstanding: u64,
    opened: Instant,
    /// When the peer last heard of us.
    progress_at: Instant,
}

/// How a writer that has its keys reaches the peer.
#[derive(Debug)]
struct Path {
    lane: LaneKey,
    reach: Reach,
    region: Arc<MemoryRegion>,
    /// Extents whose invalidation was posted.
    drained: usize,
    drain_posted: bool,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
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
        let now = Instant::now();
        let writer = Writer {
            source,
            link,
            key,
            runs: VecDeque::new(),
            offset: 0,
            end: None,
            route: None,
            posted: 0,
            outstanding: 0,
            opened: now,
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
        let peer = self
            .links
            .get(&link)
            .and_then(|key| self.peers.get_mut(key));
        let Some(peer) = peer else {
            return;
        };
        let lane = peer.lane_for(grant).and_then(|key| self.lanes.find(key));
        if lane.is_some_and(|lane| lane.side != Side::Source(None)) {
            // The lane's last drain has arrived there, and its acknowledgement is on its way here:
            // see `drain_completed`.
            return;
        }
        let reached = peer.take_reach(grant);
        if reached == Reached::Awaited {
            return;
        }
        self.awaiting.remove(&(link, grant));
        match reached {
            Reached::Now(key, lane, reach) => {
                let lane = peer.theirs.get(&lane).copied();
                match self.start(transfer, key, lane, reach) {
                    Ok(()) => self.pump(transfer),
                    Err(why) => self.fail_writer(transfer, &why),
                }
            }
            Reached::Taken => self.fail_writer(transfer, "the grant has a writer"),
            Reached::Awaited => {}
        }
    }

    fn start(
        &mut self,
        transfer: TransferId,
        key: Secret,
        lane: Option<LaneKey>,
        reach: Reach,
    ) -> Result<(), String> {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return Ok(());
        };
        let lane_key = lane.ok_or("its lane is gone")?;
        let lane = self.lanes.find(lane_key).ok_or("its lane is gone")?;
        if writer.key != key {
            return Err("the grant's key is another".into());
        }
        if u64::from(reach.page_bytes) != writer.source.area.page_bytes() {
            return Err(format!("the peer's pages have {} bytes", reach.page_bytes));
        }
        assert_eq!(
            lane.side,
            Side::Source(None),
            "the caller has seen that it is free"
        );
        let rail = &mut self.rails[lane.rail];
        let region = rail
            .region(writer.source.pool_id, &writer.source.pool)
            .map_err(|error| format!("register a pool: {error}"))?;
        lane.side = Side::Source(Some(transfer));
        writer.route = Some(Path {
            lane: lane_key,
            reach,
            region,
            drained: 0,
            drain_posted: false,
        });
        Ok(())
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
        writer.runs.clear();
        writer.offset = 0;
        if writer.route.is_some() {
            return self.pump(transfer);
        }
        // Nothing was read or written: there is nothing to drain.
        if let Some(writer) = self.writers.remove(&transfer) {
            self.end_writer(writer, None);
        }
    }

    /// Posts as much as the lane and the bound on outstanding bytes take.
    pub(super) fn pump(&mut self, transfer: TransferId) {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        let Some(path) = &mut writer.route else {
            return;
        };
        let Some(lane) = self.lanes.find(path.lane) else {
            return;
        };
        let mut posting = Posting {
            chain: &mut self.chain,
            wr_id: path.lane.wr_id(Kind::Writes),
            drain_id: path.lane.wr_id(Kind::Drain),
            outstanding_bytes_max: self.outstanding_bytes_max,
            stall: match writer.end {
                Some(End::Stop) => u64::MAX,
                Some(End::Drain) | None => self.faults.room(writer.posted),
            },
        };
        let posted = loop {
            let parts = Parts {
                source: &writer.source,
                runs: &mut writer.runs,
                offset: &mut writer.offset,
                outstanding: writer.outstanding,
                end: writer.end,
                path,
                room: lane.room(),
            };
            match posting.next(parts) {
                Ok(None) => break Ok(()),
                Ok(Some(group)) => {
                    if let Err(error) = posting.chain.post(&lane.queue_pair) {
                        break Err(error.to_string());
                    }
                    lane.posted(group.requests, group.bytes);
                    writer.posted += group.bytes;
                    writer.outstanding += group.bytes;
                    posting.stall = posting.stall.saturating_sub(group.bytes);
                }
                Err(why) => {
                    // The next chain is for another lane.
                    posting.chain.clear();
                    break Err(why);
                }
            }
        };
        if let Err(why) = posted {
            self.fail_writer(transfer, &why);
        }
    }

    /// A group of writes is acknowledged.
    pub(super) fn writes_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        let bytes = found.completed().unwrap_or(0);
        let Side::Source(Some(transfer)) = found.side else {
            return;
        };
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return;
        };
        writer.outstanding -= bytes;
        if bytes > 0 {
            writer.source.written(bytes);
        }
        let now = Instant::now();
        if now.duration_since(writer.progress_at) >= PROGRESS_EVERY
            && writer.route.as_ref().is_some_and(|path| !path.drain_posted)
        {
            writer.progress_at = now;
            let id = lane.wr_id(Kind::Progress);
            self.chain.send_immediate(id, Signal::Yes, PROGRESS);
            match self.chain.post(&found.queue_pair) {
                Ok(()) => found.posted(1, 0),
                Err(error) => return self.lane_broke(lane, &error.to_string()),
            }
        }
        self.pump(transfer);
    }

    /// The drain is acknowledged, and with it everything before.
    pub(super) fn drain_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.completed();
        let Side::Source(Some(transfer)) = found.side else {
            return;
        };
        assert!(found.is_quiet(), "requests of a lane complete in order");
        found.side = Side::Source(None);
        // S2: every request of this attempt is acknowledged, so the device reads nothing more for
        // it. Dropping its `Source` is the proof.
        let writer = self.writers.remove(&transfer);
        if let Some(Writer { link, .. }) = writer {
            // The peer knew of the drain before us, and may have used the lane for another grant.
            let of_link = (link, GrantId(0))..=(link, GrantId(u64::MAX));
            let waiting: Vec<_> = self.awaiting.range(of_link).map(|(key, _)| *key).collect();
            for (link, grant) in waiting {
                self.reach_arrived(link, grant);
            }
        }
    }

    /// Ends a writer that cannot go on.
    pub(super) fn fail_writer(&mut self, transfer: TransferId, why: &str) {
        if let Some(writer) = self.writers.remove(&transfer) {
            self.end_writer(writer, Some(why));
        }
    }

    /// Ends a writer that was removed. Where it has posted anything its lane goes first: only then
    /// does the device read the pool no more.
    fn end_writer(&mut self, mut writer: Writer, failed: Option<&str>) {
        let transfer = writer.source.transfer();
        self.awaiting.retain(|_, other| *other != transfer);
        if let Some(path) = writer.route.take() {
            if let Some(lane) = self.lanes.find(path.lane) {
                lane.side = Side::Source(None);
            }
            self.lane_broke(path.lane, "its writer has failed");
        }
        match failed {
            Some(why) => {
                info!(%transfer, grant = %writer.source.grant(), "writer failed: {why}");
                writer.source.fail();
            }
            None => drop(writer),
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

    /// Fails the writers that have waited too long for their keys.
    pub(super) fn fail_late_writers(&mut self, now: Instant) {
        let is_late = |writer: &Writer| now.duration_since(writer.opened) > REACH_WAIT;
        let late = self.awaiting.values().copied();
        let late: Vec<_> = late
            .filter(|transfer| self.writers.get(transfer).is_some_and(is_late))
            .collect();
        for transfer in late {
            self.fail_writer(transfer, "the peer does not say where to write");
        }
    }
}

/// What one chain of requests is made from.
struct Parts<'a> {
    source: &'a Source,
    runs: &'a mut VecDeque<PageRun>,
    offset: &'a mut u64,
    outstanding: u64,
    end: Option<End>,
    path: &'a mut Path,
    room: u32,
}

/// How chains are filled.
struct Posting<'a> {
    chain: &'a mut SendChain,
    wr_id: u64,
    drain_id: u64,
    outstanding_bytes_max: u64,
    /// How many more bytes a fault lets through.
    stall: u64,
}

/// A chain that is about to be posted.
struct Group {
    requests: u32,
    bytes: u64,
}

impl Posting<'_> {
    /// Fills the chain with what comes next; `None` where there is nothing, or no room for it.
    fn next(&mut self, parts: Parts<'_>) -> Result<Option<Group>, String> {
        // One place stays free, for the message that says that we are alive.
        let room = parts.room.saturating_sub(1).min(CHAIN_MAX);
        if room == 0 {
            return Ok(None);
        }
        if !parts.runs.is_empty() {
            return self.writes(parts, room);
        }
        if parts.end.is_some() && !parts.path.drain_posted && self.stall > 0 {
            return Ok(Some(self.drain(parts.path, room)));
        }
        Ok(None)
    }

    fn writes(&mut self, parts: Parts<'_>, room: u32) -> Result<Option<Group>, String> {
        let Parts {
            source,
            runs,
            offset,
            outstanding,
            path,
            ..
        } = parts;
        // S8: what is outstanding is what a drain has to wait for.
        let mut budget = self
            .outstanding_bytes_max
            .saturating_sub(outstanding)
            .min(self.stall);
        let mut group = Group {
            requests: 0,
            bytes: 0,
        };
        let lkey = path.region.lkey();
        while group.requests < room && budget > 0 {
            let Some(run) = runs.front().copied() else {
                break;
            };
            let here = source
                .area
                .extent(run, *offset, budget.min(WRITE_BYTES_MAX));
            // S7: a page that the grant does not reach is not written, whatever we were told.
            let piece = path.reach.piece(run, *offset, here.bytes);
            let piece = piece.ok_or_else(|| format!("the grant does not reach {run:?}"))?;
            let local = Local {
                offset: here.start,
                bytes: u32::try_from(piece.bytes).expect("at most WRITE_BYTES_MAX"),
                lkey,
            };
            let remote = Remote {
                offset: piece.offset,
                rkey: piece.rkey,
            };
            *offset += piece.bytes;
            budget -= piece.bytes;
            group.bytes += piece.bytes;
            group.requests += 1;
            if *offset == source.area.run_bytes(run) {
                runs.pop_front();
                *offset = 0;
            }
            let is_last = group.requests == room || budget == 0 || runs.is_empty();
            let signal = if is_last { Signal::Yes } else { Signal::No };
            self.chain.write(self.wr_id, signal, local, remote);
        }
        Ok((group.requests > 0).then_some(group))
    }

    /// The next messages of a drain: each takes a window away, and the last of them is the proof.
    fn drain(&mut self, path: &mut Path, room: u32) -> Group {
        let mut group = Group {
            requests: 0,
            bytes: 0,
        };
        if !path.reach.by_window {
            self.chain.send_immediate(self.drain_id, Signal::Yes, DRAIN);
            path.drain_posted = true;
            group.requests = 1;
            return group;
        }
        while group.requests < room && !path.drain_posted {
            let rkey = path.reach.extents[path.drained].rkey;
            path.drained += 1;
            group.requests += 1;
            if path.drained == path.reach.extents.len() {
                path.drain_posted = true;
                self.chain.send_invalidate(self.drain_id, Signal::Yes, rkey);
            } else {
                let signal = if group.requests == room {
                    Signal::Yes
                } else {
                    Signal::No
                };
                self.chain.send_invalidate(self.wr_id, signal, rkey);
            }
        }
        group
    }
}

/// [`SendChain::MAX`].
const CHAIN_MAX: u32 = 32;

const _: () = assert!(CHAIN_MAX as usize == SendChain::MAX);

/// Bytes of one write. Short enough that a slow port says often that it is alive.
const WRITE_BYTES_MAX: u64 = 1 << 20;

/// How often the destination hears that we are alive.
const PROGRESS_EVERY: Duration = Duration::from_millis(50);

/// How long a writer waits for its keys, which are said before the machine's own message.
const REACH_WAIT: Duration = Duration::from_secs(5);
