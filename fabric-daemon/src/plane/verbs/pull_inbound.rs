//! Pull mode at the destination: it reads what the source exposes, and nobody writes.
//!
//! ```text
//!   Exposed ─▶ in order: read, chained ─▶ arrived ─▶ given back (SEND_WITH_INV) ─┐
//!   AllExposed ──────────────────────────────────────────────────────────────────┴─▶ drained
//! ```
//!
//! A window is given back only after its reads have completed. A message that is posted together
//! with the reads would need `IBV_SEND_FENCE` to stay behind them, and that would keep the next
//! reads back too, for a round trip each time. M: ibv_post_send(3); without that flag the
//! InfiniBand specification lets a send be executed before the answer to an earlier read is
//! complete.
//!
//! A grant in this mode has one lane, however many ports there are: what is read is not striped,
//! and a lane that breaks takes its grant along, by a fence. The next attempt has another lane.
//!
//! What the source can do wrong here:
//!
//! - expose pages that the grant does not name: checked run by run, before any byte is read (S7);
//! - expose memory that holds something else: verification finds it (S2);
//! - say that this is all too early: pages are missing, and the machine's manifest says so;
//! - take a key back: the read fails, and the grant is fenced with its lane.

use std::collections::VecDeque;
use std::sync::Arc;

use fabric_proto::ids::{GrantId, LinkId};
use fabric_proto::pool::PageRun;
use thiserror::Error;
use tracing::warn;

use super::Mode;
use super::codec::{Exposure, LegNumber, Message};
use super::ffi::{Local, RKey, Remote, SendChain, Signal};
use super::inbound::flip_byte;
use super::lanes::{Kind, LaneKey, Side, State, WINDOWS_MAX};
use super::peers::{PeerError, PeerKey};
use super::worker::Worker;
use crate::plane::area::Area;
use crate::plane::faults::Faults;
use crate::plane::pools::Pool;

/// What a grant reads, and how far it is.
#[derive(Debug)]
pub(super) struct Reader {
    area: Area,
    /// The pages of the grant; sorted, and empty for all.
    pages: Arc<[PageRun]>,
    /// What has not arrived as a whole, in the source's order. Reads are posted in this order, and
    /// complete in it.
    exposures: VecDeque<Exposure>,
    /// How many of these have all of their reads posted, and how many bytes the next one has.
    posted: usize,
    offset: u32,
    /// Bytes of the first exposure, and maybe of more, that have arrived.
    arrived: u64,
    /// Bytes whose reads are posted and have not completed.
    outstanding: u64,
    /// Windows that are to be given back.
    due: VecDeque<RKey>,
    /// No more exposures will come.
    is_all: bool,
}

/// What a source exposes that it must not.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
enum ExposureRefused {
    #[error("it has said before that this is all")]
    AfterAll,
    #[error("the grant does not allow what it exposes: {0:?}")]
    Pages(Exposure),
    #[error("more than {WINDOWS_MAX} windows at a time")]
    TooMany,
}

/// A chain that is about to be posted.
struct Group {
    requests: u32,
    bytes: u64,
}

impl Reader {
    pub(super) fn new(area: Area, pages: Arc<[PageRun]>) -> Self {
        Self {
            area,
            pages,
            exposures: VecDeque::new(),
            posted: 0,
            offset: 0,
            arrived: 0,
            outstanding: 0,
            due: VecDeque::new(),
            is_all: false,
        }
    }

    /// Takes in what the source has exposed: all of it, or nothing.
    fn expose(&mut self, exposures: &[Exposure]) -> Result<(), ExposureRefused> {
        if self.is_all {
            return Err(ExposureRefused::AfterAll);
        }
        // The source binds no more than that; and what a peer can make us keep has a bound.
        if self.exposures.len() + self.due.len() + exposures.len() > usize::from(WINDOWS_MAX) {
            return Err(ExposureRefused::TooMany);
        }
        for exposure in exposures {
            // S7: as a whole, before any byte of it is read.
            let run = self.run(exposure);
            if !run.is_some_and(|run| self.area.allows(&self.pages, run)) {
                return Err(ExposureRefused::Pages(*exposure));
            }
        }
        self.exposures.extend(exposures);
        Ok(())
    }

    /// The pages that an exposure has bytes of. `None`: no pages are like that.
    fn run(&self, exposure: &Exposure) -> Option<PageRun> {
        let page_bytes = self.area.page_bytes();
        if u64::from(exposure.within) >= page_bytes {
            return None;
        }
        let bytes = u64::from(exposure.within) + u64::from(exposure.bytes);
        Some(PageRun {
            region: exposure.region,
            first: exposure.first,
            count: u32::try_from(bytes.div_ceil(page_bytes)).ok()?,
        })
    }

    /// Fills the chain with what comes next. `None`: there is nothing, or no room for it.
    fn next(&mut self, to: &mut Posting<'_>) -> Option<Group> {
        // What is given back comes first: the source can expose as much more.
        let group = if self.due.is_empty() {
            self.reads(to)
        } else {
            self.returns(to)
        };
        if group.requests == 0 {
            return None;
        }
        self.outstanding += group.bytes;
        Some(group)
    }

    fn returns(&mut self, to: &mut Posting<'_>) -> Group {
        let requests = to
            .room
            .min(u32::try_from(self.due.len()).unwrap_or(u32::MAX));
        for left in (0..requests).rev() {
            let rkey = self.due.pop_front().expect("as many as there are");
            let id = to.lane.wr_id(Kind::Returns);
            to.chain.send_invalidate(id, signal(left == 0), rkey);
        }
        Group { requests, bytes: 0 }
    }

    fn reads(&mut self, to: &mut Posting<'_>) -> Group {
        let mut group = Group {
            requests: 0,
            bytes: 0,
        };
        // S8: what is outstanding is what a drain has to wait for.
        let budget = to.outstanding_bytes_max.saturating_sub(self.outstanding);
        let budget = budget.min(CHAIN_BYTES_MAX);
        while group.requests < to.room && group.bytes < budget {
            let Some(exposure) = self.exposures.get(self.posted).copied() else {
                break;
            };
            let run = self.run(&exposure).expect("it was checked when it came");
            let left = u64::from(exposure.bytes - self.offset).min(budget - group.bytes);
            let at = u64::from(exposure.within) + u64::from(self.offset);
            let here = self.area.extent(run, at, left);
            let bytes = u32::try_from(here.bytes).expect("at most an exposure's");
            let local = Local {
                offset: here.start,
                bytes,
                lkey: to.lkey,
            };
            let remote = Remote {
                // No overflow: checked when the message was decoded.
                offset: exposure.offset + u64::from(self.offset),
                rkey: exposure.rkey,
            };
            group.requests += 1;
            group.bytes += here.bytes;
            self.offset += bytes;
            if self.offset == exposure.bytes {
                self.posted += 1;
                self.offset = 0;
            }
            let is_last = group.requests == to.room
                || group.bytes == budget
                || self.posted == self.exposures.len();
            let id = to.lane.wr_id(Kind::Reads);
            to.chain.read(id, signal(is_last), local, remote);
        }
        group
    }

    /// Notes that a chain of reads has completed.
    fn arrived(&mut self, bytes: u64) {
        self.outstanding -= bytes;
        self.arrived += bytes;
    }

    /// The next exposure that has arrived as a whole: it will be given back.
    fn take_arrived(&mut self) -> Option<Exposure> {
        let bytes = u64::from(self.exposures.front()?.bytes);
        self.arrived = self.arrived.checked_sub(bytes)?;
        self.posted -= 1;
        let exposure = self.exposures.pop_front()?;
        self.due.push_back(exposure.rkey);
        Some(exposure)
    }

    /// Whether there is nothing left to do, or to come.
    fn is_over(&self) -> bool {
        self.is_all && self.exposures.is_empty() && self.due.is_empty()
    }

    /// Flips a bit of each page that the faults ask for, of those that begin in an exposure.
    fn flip(&self, faults: &Faults, pool: &Pool, exposure: &Exposure) {
        if !faults.may_flip() {
            return;
        }
        let run = self.run(exposure).expect("it was checked when it came");
        let page_bytes = self.area.page_bytes();
        for index in u64::from(exposure.within > 0)..u64::from(run.count) {
            if !faults.flips_page() {
                return;
            }
            let page = self.area.extent(run, index * page_bytes, 1).start;
            flip_byte(pool, page);
        }
    }
}

/// How chains are filled.
struct Posting<'a> {
    chain: &'a mut SendChain,
    lane: LaneKey,
    lkey: u32,
    room: u32,
    outstanding_bytes_max: u64,
}

fn signal(is_last: bool) -> Signal {
    if is_last { Signal::Yes } else { Signal::No }
}

impl Worker {
    /// Tells a peer whether it may read what is sent to it from here.
    pub(super) fn tell_exposes(&mut self, key: PeerKey) {
        let answers = self.rails.iter().all(|rail| rail.address.reads > 0);
        let exposes = answers && self.settings.modes.contains(&Mode::Pull);
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.tell(Message::Exposes(exposes));
        }
    }

    pub(super) fn exposes_said(&mut self, key: PeerKey, exposes: bool) -> Result<(), PeerError> {
        let peer = self.peers.get_mut(&key).ok_or(PeerError::OutOfPlace)?;
        peer.exposes = exposes;
        Ok(())
    }

    /// Whether pages can be read from the peer at the other end of a link.
    pub(super) fn can_pull(&self, link: LinkId) -> bool {
        let peer = self.links.get(&link).and_then(|key| self.peers.get(key));
        let asks = |rail: &super::rails::Rail| rail.limits.reads_outstanding_max > 0;
        peer.is_some_and(|peer| peer.exposes) && self.rails.iter().all(asks)
    }

    /// A peer exposes memory for a grant of ours.
    pub(super) fn exposed(
        &mut self,
        key: PeerKey,
        grant: GrantId,
        exposures: &[Exposure],
    ) -> Result<(), PeerError> {
        self.hear_of_exposures(key, grant, |reader| reader.expose(exposures))
    }

    /// A peer has exposed all that it will for a grant of ours.
    pub(super) fn all_exposed(&mut self, key: PeerKey, grant: GrantId) -> Result<(), PeerError> {
        self.hear_of_exposures(key, grant, |reader| {
            if std::mem::replace(&mut reader.is_all, true) {
                return Err(ExposureRefused::AfterAll);
            }
            Ok(())
        })
    }

    fn hear_of_exposures(
        &mut self,
        key: PeerKey,
        grant: GrantId,
        hear: impl FnOnce(&mut Reader) -> Result<(), ExposureRefused>,
    ) -> Result<(), PeerError> {
        let Some(inbound) = self.grants.get_mut(&grant) else {
            // Closed, while this was on its way.
            return Ok(());
        };
        // S7: of the one peer that the grant is for.
        let is_peers = self.links.get(&inbound.link) == Some(&key);
        let may_expose = is_peers && inbound.armed;
        let Some((reader, lane, _)) = inbound.reading().filter(|_| may_expose) else {
            return Err(PeerError::Exposed(grant));
        };
        match hear(reader) {
            Ok(()) => self.read(grant),
            Err(why) => {
                warn!(%grant, "what its source exposes is refused: {why}");
                self.refused += 1;
                self.lane_broke(lane, "its source exposes what it must not");
            }
        }
        Ok(())
    }

    /// Some reads, or messages that give windows back, have completed.
    pub(super) fn reads_completed(&mut self, lane: LaneKey) {
        let Some(found) = self.lanes.find(lane) else {
            return;
        };
        let (_, bytes) = found.completed().unwrap_or((0, 0));
        let Side::Destination(State::Busy(grant, _)) = found.side else {
            return;
        };
        let inbound = self
            .grants
            .get_mut(&grant)
            .expect("a busy lane has its grant");
        let pool = Arc::clone(&inbound.pool);
        let Some((reader, ..)) = inbound.reading() else {
            return;
        };
        reader.arrived(bytes);
        while let Some(exposure) = reader.take_arrived() {
            reader.flip(&self.faults, &pool, &exposure);
        }
        if bytes > 0 {
            self.landed(grant);
        }
        self.read(grant);
    }

    /// Posts as much as the lane takes; closes the grant where nothing is left.
    fn read(&mut self, grant: GrantId) {
        let inbound = self.grants.get_mut(&grant).expect("the caller has it");
        let Some((reader, key, region)) = inbound.reading() else {
            return;
        };
        let lane = self.lanes.find(key).expect("a leg keeps its lane");
        loop {
            let group = reader.next(&mut Posting {
                chain: &mut self.chain,
                lane: key,
                lkey: region.lkey(),
                room: lane.room().min(CHAIN_MAX),
                outstanding_bytes_max: self.outstanding_bytes_max,
            });
            let Some(group) = group else {
                break;
            };
            if let Err(error) = self.chain.post(&lane.queue_pair) {
                return self.lane_broke(key, &error.to_string());
            }
            lane.posted(group.requests, 0, group.bytes);
        }
        // Quiet: the source has been told of every window too, so the lane can serve another grant.
        if reader.is_over() && lane.is_quiet() {
            self.leg_drained(grant, ONE_LEG);
        }
    }
}

/// All of a grant.
const ONE_LEG: LegNumber = LegNumber(0);

/// [`SendChain::MAX`].
const CHAIN_MAX: u32 = 32;

const _: () = assert!(CHAIN_MAX as usize == SendChain::MAX);

/// Bytes whose reads complete together: so windows are given back while others are being read.
const CHAIN_BYTES_MAX: u64 = 1 << 19;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::testing::{self, Random};

    const PAGE_BYTES: u32 = 1000;

    /// Of positions 0 to 7, in slots without neighbours, of which 1 to 5 are granted.
    fn reader() -> Reader {
        let spec = testing::spec(2, PAGE_BYTES, 16);
        let area = Area::new(&spec, (0..16).step_by(2)).unwrap();
        Reader::new(area, Arc::from([testing::run(1, 1, 5)]))
    }

    fn exposure(first: u32, within: u32, bytes: u32) -> Exposure {
        Exposure {
            region: 1,
            first,
            within,
            bytes,
            offset: 0,
            rkey: RKey(first),
        }
    }

    #[test]
    fn what_is_not_granted_is_refused_and_nothing_beside_it_is_read() {
        let region = Exposure {
            region: 0,
            ..exposure(1, 0, 1)
        };
        let refused = [
            exposure(0, 0, 1),
            exposure(0, 999, 2),
            exposure(6, 0, 1),
            exposure(5, 0, 1001),
            exposure(5, 999, 2),
            exposure(1, 0, 5001),
            exposure(1, 1000, 1),
            exposure(u32::MAX, 0, u32::MAX),
            exposure(1, u32::MAX, u32::MAX),
            region,
        ];
        for refused in refused {
            let mut reader = reader();
            let both = [exposure(1, 0, 1000), refused];
            assert_eq!(reader.expose(&both), Err(ExposureRefused::Pages(refused)));
            assert!(reader.exposures.is_empty(), "all of it, or nothing");
            assert_eq!(reader.expose(&[exposure(1, 0, 5000)]), Ok(()));
        }
    }

    #[test]
    fn exposures_after_the_last_and_without_end_are_refused() {
        let mut reader = reader();
        let one = exposure(1, 0, 1000);
        for _ in 0..WINDOWS_MAX {
            assert_eq!(reader.expose(&[one]), Ok(()));
        }
        assert_eq!(reader.expose(&[one]), Err(ExposureRefused::TooMany));
        // What has arrived counts until it is given back.
        (reader.posted, reader.outstanding) = (1, 1000);
        reader.arrived(1000);
        assert!(reader.take_arrived().is_some());
        assert_eq!(reader.expose(&[one]), Err(ExposureRefused::TooMany));
        reader.due.clear();
        assert_eq!(reader.expose(&[one]), Ok(()));
        reader.is_all = true;
        assert_eq!(reader.expose(&[one]), Err(ExposureRefused::AfterAll));
    }

    #[test]
    fn windows_are_given_back_in_order_each_after_all_of_its_bytes() {
        let (lane, _) = LaneKey::parse(Kind::Reads as u64).unwrap();
        let mut chain = SendChain::new();
        for seed in 0..300 {
            let mut random = Random::new(seed);
            let mut reader = reader();
            let exposures: Vec<_> = (0..random.within(1..=40))
                .map(|_| {
                    let at = random.within(1000..=5999);
                    let bytes = random.within(1..=6000 - at);
                    let number = |number| u32::try_from(number).unwrap();
                    exposure(number(at / 1000), number(at % 1000), number(bytes))
                })
                .collect();
            reader.expose(&exposures).unwrap();
            reader.is_all = true;
            let outstanding_bytes_max = random.within(1..=4000) as u64;
            let mut posted = VecDeque::new();
            let (mut arrived, mut returned) = (0, 0);
            for _ in 0..100_000 {
                if random.within(0..=1) == 0 {
                    chain.clear();
                    let group = reader.next(&mut Posting {
                        chain: &mut chain,
                        lane,
                        lkey: 0,
                        room: u32::try_from(random.within(0..=32)).unwrap(),
                        outstanding_bytes_max,
                    });
                    if let Some(group) = &group
                        && group.bytes == 0
                    {
                        returned += group.requests as usize;
                        let before = exposures[..returned].iter();
                        let bytes: u64 = before.map(|one| u64::from(one.bytes)).sum();
                        assert!(bytes <= arrived, "given back too early");
                    }
                    posted.extend(group);
                } else if let Some(group) = posted.pop_front() {
                    arrived += group.bytes;
                    reader.arrived(group.bytes);
                    while reader.take_arrived().is_some() {}
                }
                let outstanding: u64 = posted.iter().map(|group| group.bytes).sum();
                assert_eq!(reader.outstanding, outstanding);
                assert!(outstanding <= outstanding_bytes_max);
                if reader.is_over() && posted.is_empty() {
                    break;
                }
            }
            let all: u64 = exposures.iter().map(|one| u64::from(one.bytes)).sum();
            assert_eq!((arrived, returned), (all, exposures.len()));
        }
    }
}
