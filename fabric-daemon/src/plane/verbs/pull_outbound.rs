//! Pull mode at the source: it exposes what it is to send, and the peer reads.
//!
//! ```text
//!   Write ─▶ window bound ─▶ told (Exposed) ─▶ given back: `Written`, the window is void ─┐
//!   Drain, Stop ─▶ all told (AllExposed) ─────────────────────────────────────────────────┴─▶ end
//! ```
//!
//! 1. A window is bound to bytes of sealed pages alone, on our end of the grant's lane, so that
//!    nobody but the destination reads through it, and only what it is sent (S7).
//! 2. The destination gives it back by a message that invalidates its key. M: InfiniBand
//!    specification, 10.6.7.2: the key is void for whatever is posted after, and our device tells.
//! 3. When all are back, the device can read nothing for the peer any more: `ReadsStopped`.
//!
//! That needs the destination's help. Where it gives none, the lane is destroyed with its windows,
//! which needs nobody's: on a fault, when the link goes, when it takes too long after a stop, and
//! when nothing was given back for long. A destination that reads and does not wait for the answer
//! before it gives a window back gets what was in flight then, of this window, and no more.
//!
//! A writer whose peer reads has one lane, and fails with it: there is no other (see `inbound`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_proto::ids::TransferId;
use tracing::warn;

use super::codec::{EXPOSURES_MAX, Exposure, Message};
use super::ffi::{Access, MemoryWindow, RKey, Signal, VerbsError};
use super::inbound::{BIND_GROUP, Received, next_window};
use super::lanes::{Kind, LaneKey, LegOfWriter, Side, WINDOWS_MAX};
use super::outbound::{End, Writer};
use super::worker::Worker;

/// What the peer of one lane may read.
#[derive(Debug)]
pub(super) struct Exposer {
    /// Bound, or about to be, in the order in which they are to be given back.
    windows: VecDeque<Exposed>,
    /// How many of them, from the first on, the peer knows of.
    told: usize,
    /// By group of binds that has not completed.
    binding: VecDeque<Vec<Exposure>>,
    all_told: bool,
    /// When something was last given back, or exposed with nothing else left.
    heard: Instant,
}

#[derive(Debug)]
struct Exposed {
    rkey: RKey,
    window: MemoryWindow,
    bytes: u32,
}

impl Exposer {
    pub(super) fn new() -> Self {
        Self {
            windows: VecDeque::new(),
            told: 0,
            binding: VecDeque::new(),
            all_told: false,
            heard: Instant::now(),
        }
    }

    /// How many it has.
    pub(super) fn windows(&self) -> u64 {
        self.windows.len() as u64
    }

    /// For the lane's end.
    pub(super) fn into_windows(self) -> impl Iterator<Item = MemoryWindow> {
        self.windows.into_iter().map(|exposed| exposed.window)
    }

    /// Whether the peer has had long enough.
    fn is_late(&self, now: Instant) -> bool {
        !self.windows.is_empty() && now.duration_since(self.heard) > RETURN_WAIT
    }
}

impl Writer {
    /// The next bytes to expose, at most `stall`; without their key. `None`: nothing, for now.
    fn next_exposure(&mut self, outstanding_bytes_max: u64, stall: u64) -> Option<Exposure> {
        let run = self.runs.front().copied()?;
        let most = (outstanding_bytes_max / EXPOSURES_AHEAD).clamp(1, EXPOSURE_BYTES_MAX);
        let here = self.source.area.extent(run, self.offset, most);
        // S8: what is outstanding is what a drain has to wait for.
        let budget = outstanding_bytes_max.saturating_sub(self.outstanding);
        if here.bytes > budget || stall == 0 {
            return None;
        }
        let bytes = here.bytes.min(stall);
        let page_bytes = self.source.area.page_bytes();
        let index = u32::try_from(self.offset / page_bytes).expect("within the run");
        let within = u32::try_from(self.offset % page_bytes).expect("a page's bytes fit");
        self.offset += bytes;
        if self.offset == self.source.area.run_bytes(run) {
            self.runs.pop_front();
            self.offset = 0;
        }
        self.posted += bytes;
        self.outstanding += bytes;
        Some(Exposure {
            region: run.region,
            first: run.first + index,
            within,
            bytes: u32::try_from(bytes).expect("at most EXPOSURE_BYTES_MAX"),
            offset: here.start,
            rkey: RKey(0),
        })
    }
}

impl Worker {
    /// Exposes as much as the lane and the bounds take. Ends the writer where all is given back.
    pub(super) fn expose(&mut self, transfer: TransferId) {
        if let Err(error) = self.bind_exposures(transfer) {
            self.chain.clear();
            return self.fail_writer(transfer, &format!("expose pages: {error}"));
        }
        let Some(writer) = self.writers.get(&transfer) else {
            return;
        };
        let Some((key, _)) = writer.read_through() else {
            return;
        };
        let (Some(lane), Some(exposer)) = (self.lanes.find(key), self.exposers.get_mut(&key))
        else {
            return;
        };
        let stalls = writer.end != Some(End::Stop) && self.faults.room(writer.posted) == 0;
        let is_all = writer.end.is_some() && writer.runs.is_empty() && !stalls;
        if is_all && exposer.binding.is_empty() && !exposer.all_told {
            exposer.all_told = true;
            if let Some(peer) = self.peers.get_mut(&lane.peer) {
                let grant = writer.source.grant();
                peer.tell(Message::AllExposed { grant });
            }
        }
        if !exposer.all_told || !exposer.windows.is_empty() {
            return;
        }
        let Side::Source(Some(leg)) = lane.side else {
            return;
        };
        self.exposers.remove(&key);
        // S2: the device told of each window of this attempt that its key is void.
        self.lane_over(key, leg);
    }

    fn bind_exposures(&mut self, transfer: TransferId) -> Result<(), VerbsError> {
        let Some(writer) = self.writers.get_mut(&transfer) else {
            return Ok(());
        };
        let Some((key, region)) = writer.read_through() else {
            return Ok(());
        };
        let region = Arc::clone(region);
        let (Some(lane), Some(exposer)) = (self.lanes.find(key), self.exposers.get_mut(&key))
        else {
            return Ok(());
        };
        if exposer.windows.is_empty() {
            exposer.heard = Instant::now();
        }
        let rail = &mut self.rails[lane.rail];
        loop {
            let left = usize::from(WINDOWS_MAX) - exposer.windows.len();
            let room = left.min(GROUP_MAX).min(lane.room() as usize);
            let mut group = Vec::with_capacity(room);
            while group.len() < room {
                let stall = self.faults.room(writer.posted);
                match writer.next_exposure(self.outstanding_bytes_max, stall) {
                    Some(exposure) => group.push(exposure),
                    None => break,
                }
            }
            let Some(last) = group.len().checked_sub(1) else {
                return Ok(());
            };
            for (index, exposure) in group.iter_mut().enumerate() {
                let (window, rkey) = next_window(|| rail.window(&lane.queue_pair))?;
                let signal = if index == last {
                    Signal::Yes
                } else {
                    Signal::No
                };
                // S7: for the peer of this lane alone, to read alone, these bytes alone.
                self.chain.bind(
                    key.wr_id(Kind::Exposures),
                    signal,
                    (&window, rkey),
                    (&region, exposure.offset, exposure.bytes.into()),
                    Access::REMOTE_READ,
                );
                exposure.rkey = rkey;
                let bytes = exposure.bytes;
                exposer.windows.push_back(Exposed {
                    rkey,
                    window,
                    bytes,
                });
            }
            self.chain.post(&lane.queue_pair)?;
            // Only now: what is posted names the key before as well.
            let first = exposer.windows.len() - group.len();
            for exposed in exposer.windows.range(first..) {
                exposed.window.bound_under(exposed.rkey);
            }
            lane.posted(u32::try_from(group.len()).expect("a group is small"), 0, 0);
            exposer.binding.push_back(group);
        }
    }

    /// A group of windows is bound: the peer may know of it.
    pub(super) fn exposures_bound(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        found.completed();
        let Side::Source(Some((transfer, _))) = found.side else {
            return;
        };
        let (Some(exposer), Some(writer)) =
            (self.exposers.get_mut(&lane), self.writers.get(&transfer))
        else {
            return;
        };
        let exposures = exposer.binding.pop_front().expect("each group is noted");
        exposer.told += exposures.len();
        if let Some(peer) = self.peers.get_mut(&found.peer) {
            let grant = writer.source.grant();
            peer.tell(Message::Exposed { grant, exposures });
        }
        self.expose(transfer);
    }

    /// A message came in through a peer's lane: a window is given back, or the lane was tried.
    pub(super) fn returned(&mut self, key: LaneKey, user: Option<LegOfWriter>, what: Received) {
        let Received::Invalidated(rkey) = what else {
            return;
        };
        let exposer = self.exposers.get_mut(&key);
        let writer = user.and_then(|(transfer, _)| self.writers.get_mut(&transfer));
        let (Some(exposer), Some(writer)) = (exposer, writer) else {
            return self.lane_broke(key, "its peer gives back what it was not given");
        };
        let is_next = exposer.told > 0;
        let next = exposer
            .windows
            .pop_front_if(|next| is_next && next.rkey == rkey);
        let Some(Exposed { window, bytes, .. }) = next else {
            warn!(grant = %writer.source.grant(), "the destination broke the order of windows");
            self.refused += 1;
            return self.lane_broke(key, "its peer broke the order");
        };
        exposer.told -= 1;
        exposer.heard = Instant::now();
        writer.outstanding -= u64::from(bytes);
        writer.source.written(bytes.into());
        let transfer = writer.source.transfer();
        if let Some(lane) = self.lanes.find(key) {
            self.rails[lane.rail].put_window(window);
        }
        self.expose(transfer);
    }

    /// Fails the writers whose peer does not give back what it was given.
    // S4: a source's pins end without the peer's help.
    pub(super) fn fail_unread_writers(&mut self, now: Instant) {
        let late = self.exposers.iter();
        let late: Vec<_> = late
            .filter(|(_, exposer)| exposer.is_late(now))
            .map(|(key, _)| *key)
            .collect();
        for key in late {
            self.lane_broke(key, "its peer does not read");
        }
    }
}

/// Windows that are bound, and told of, together.
const GROUP_MAX: usize = BIND_GROUP;

const _: () = assert!(GROUP_MAX <= EXPOSURES_MAX);

/// Bytes of one window. Short enough that windows come back while others are being read.
const EXPOSURE_BYTES_MAX: u64 = 1 << 20;

/// How many windows the bound on outstanding bytes is shared among, at least.
const EXPOSURES_AHEAD: u64 = 8;

/// How long a peer may keep what it was given without giving anything back: as long as a grant may
/// be silent by default.
const RETURN_WAIT: Duration = Duration::from_secs(30);
