//! Lanes: connected queue pairs, each for the writes of one leg of one grant at a time.
//!
//! ```text
//!   the destination offers                          the source connects
//!   Connecting ──LaneReady──▶ Probing ──pong──▶ Idle ──arm──▶ Busy ──drain──▶ Idle
//!       │                        │               │              │
//!       └────────────────────────┴───────────────┴──────────────┴── fault or fence: revoked
//! ```
//!
//! A grant has one leg or more, each with a lane and the memory that is to be written through it.
//!
//! A lane has one grant at a time, and that is a departure from DESIGN, which lets a few lanes
//! carry them all: here a fence, which destroys its lane, or a fault, which breaks it, costs no
//! other transfer anything, so there is nobody else's write to post again. Queue pairs are what
//! devices have plenty of.

use std::collections::VecDeque;
use std::sync::Arc;

use fabric_proto::ids::{GrantId, TransferId};
use rustls::crypto::ring::default_provider;

use super::codec::{LaneNumber, LegNumber};
use super::ffi::{Capacity, CompletionQueue, MemoryWindow, QueuePair, Route, VerbsError};
use super::peers::PeerKey;
use super::rails::Rail;

/// A lane's place in [`Lanes`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct LaneKey {
    index: u16,
    generation: u32,
}

/// What a work request was for: in its id, beside the lane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// The last of a group of binds.
    Binds,
    /// The last of a drain.
    Drain,
    /// The last of a group of binds for the peer to read through.
    Exposures,
    /// A message to see whether the lane carries anything.
    Probe,
    /// A message that says that the writer is alive.
    Progress,
    /// The last of a group of reads.
    Reads,
    /// A receive.
    Receive,
    /// The last of a group of messages that give back what was read.
    Returns,
    /// The last of a group of writes.
    Writes,
}

impl LaneKey {
    /// The id of a work request of this lane.
    pub(super) fn wr_id(self, kind: Kind) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index) << 16 | kind as u64
    }

    /// What an id says. `None`: no request had it.
    pub(super) fn parse(wr_id: u64) -> Option<(Self, Kind)> {
        let kinds = [
            Kind::Binds,
            Kind::Drain,
            Kind::Exposures,
            Kind::Probe,
            Kind::Progress,
            Kind::Reads,
            Kind::Receive,
            Kind::Returns,
            Kind::Writes,
        ];
        let kind = kinds
            .into_iter()
            .find(|kind| *kind as u64 == wr_id & 0xFFFF)?;
        let key = Self {
            index: u16::try_from(wr_id >> 16 & 0xFFFF).ok()?,
            generation: u32::try_from(wr_id >> 32).ok()?,
        };
        Some((key, kind))
    }
}

/// A connected queue pair, or one that is about to be.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) queue_pair: QueuePair,
    completions: Arc<CompletionQueue>,
    pub(super) rail: usize,
    /// Which of the peer's ports is at the other end.
    pub(super) their_rail: usize,
    pub(super) peer: PeerKey,
    /// At the destination: which of the lanes that the peer is offered it is.
    pub(super) place: usize,
    pub(super) number: LaneNumber,
    pub(super) side: Side,
    /// At the source: who gets the lane when the drain of who has it is acknowledged.
    pub(super) next: Option<LegOfWriter>,
    /// The number of our first packet.
    pub(super) first: u32,
    /// What was posted and not yet completed, by groups: the last request of each is signalled.
    groups: VecDeque<Group>,
    outstanding: u32,
    /// Receives that messages have taken, and that are not posted again.
    receives_gone: u32,
}

/// Whose lane it is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Side {
    /// Ours: peers write to us through it.
    Destination(State),
    /// The peer's: we write through it.
    Source(Option<LegOfWriter>),
}

/// A leg of the writer of a transfer.
pub(super) type LegOfWriter = (TransferId, LegNumber);

/// How far a lane of ours is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum State {
    /// Offered.
    Connecting,
    /// Connected; the first message is on its way.
    Probing,
    /// Free for a grant.
    Idle,
    /// Carries a leg of a grant.
    Busy(GrantId, LegNumber),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Group {
    requests: u32,
    /// How many of them are writes.
    writes: u32,
    /// And their bytes.
    bytes: u64,
}

/// The proof that a grant's memory can not be written any more. Only this file makes one, from
/// the evidence of each of its legs.
#[derive(Debug)]
#[must_use = "the machine waits for it"]
pub(in crate::plane) struct Revoked(());

/// The evidence that a leg's memory can not be written any more. Only this file makes one, where
/// the queue pair that carried it is destroyed, where the device said of each of its windows that
/// the writer itself has invalidated it, and where the destination has read it all by itself.
#[derive(Debug)]
#[must_use = "its grant is not closed without it"]
pub(super) struct LegStopped {
    grant: GrantId,
    leg: LegNumber,
}

impl Lane {
    pub(super) fn new(
        rails: &mut [Rail],
        (rail, their_rail): (usize, usize),
        peer: PeerKey,
        number: LaneNumber,
        side: Side,
    ) -> Result<Self, VerbsError> {
        let first = first_packet()?;
        let of = &mut rails[rail];
        let completions = of.reserve()?;
        let capacity = Capacity {
            sends: SENDS_MAX,
            receives: RECEIVES,
        };
        let made = QueuePair::new(&of.domain, &completions, capacity)
            .and_then(|made| made.initialise(of.port, of.access(side)).map(|()| made));
        let queue_pair = match made {
            Ok(made) => made,
            Err(error) => {
                of.release(&completions);
                return Err(error);
            }
        };
        Ok(Self {
            queue_pair,
            completions,
            rail,
            their_rail,
            peer,
            place: 0,
            number,
            side,
            next: None,
            first,
            groups: VecDeque::with_capacity(SENDS_MAX as usize),
            outstanding: 0,
            receives_gone: 0,
        })
    }

    /// Posts the receives. Their key is the lane's.
    pub(super) fn post_receives(&self, key: LaneKey, count: u32) -> Result<(), VerbsError> {
        self.queue_pair
            .post_receives(key.wr_id(Kind::Receive), count)
    }

    /// Notes that a message has taken a receive, and posts others when enough are gone.
    pub(super) fn received(&mut self, key: LaneKey) -> Result<(), VerbsError> {
        self.receives_gone += 1;
        if self.receives_gone < RECEIVES_TOGETHER {
            return Ok(());
        }
        let gone = std::mem::take(&mut self.receives_gone);
        self.post_receives(key, gone)
    }

    pub(super) fn connect(&self, route: &Route) -> Result<(), VerbsError> {
        self.queue_pair.connect(route)
    }

    /// How many requests may still be posted.
    pub(super) fn room(&self) -> u32 {
        SENDS_MAX - self.outstanding
    }

    /// Notes a group that was posted, the last of which is signalled.
    pub(super) fn posted(&mut self, requests: u32, writes: u32, bytes: u64) {
        assert!(
            requests > 0 && requests <= self.room(),
            "the queue has room"
        );
        self.outstanding += requests;
        self.groups.push_back(Group {
            requests,
            writes,
            bytes,
        });
    }

    /// Notes that the oldest group has completed; its writes, and their bytes. `None`: there was
    /// none.
    pub(super) fn completed(&mut self) -> Option<(u32, u64)> {
        let group = self.groups.pop_front()?;
        self.outstanding -= group.requests;
        Some((group.writes, group.bytes))
    }

    /// Whether everything that was posted is completed.
    pub(super) fn is_quiet(&self) -> bool {
        self.groups.is_empty()
    }

    /// The fence: takes back whatever the peer could do through this lane, which ends with it.
    /// Needs nobody's help, whatever state the lane is in. The evidence is for the leg that it
    /// carried, if it carried one.
    pub(super) fn revoke(
        self,
        rails: &mut [Rail],
        windows: impl IntoIterator<Item = MemoryWindow>,
    ) -> Result<Option<LegStopped>, VerbsError> {
        let fenced = fence(self.queue_pair, windows);
        rails[self.rail].release(&self.completions);
        // S1: the device has no way left to write for this lane.
        fenced.map(|()| match self.side {
            Side::Destination(State::Busy(grant, leg)) => Some(LegStopped { grant, leg }),
            Side::Destination(State::Connecting | State::Probing | State::Idle)
            | Side::Source(_) => None,
        })
    }

    /// The drain: each window of the leg was invalidated by a message of its own writer, on the
    /// one queue pair that it was bound on.
    ///
    /// M: InfiniBand specification, 10.6.7.2 and 9.4: a responder executes the requests of a
    /// reliable connection in order, so every write before the message has landed, and the key is
    /// void for every one after it, whoever posts it.
    pub(super) fn drained(&self, invalidated: usize, windows: usize) -> LegStopped {
        assert_eq!(invalidated, windows, "the device told of each");
        // S1: see above.
        self.stopped()
    }

    /// The drain of a leg whose writer has the pool's own key: its message after the last write.
    ///
    /// That no write follows rests on the peer's word. Lane mode is for peers that are trusted like
    /// oneself, and has to be asked for.
    pub(super) fn drained_by_word(&self) -> LegStopped {
        self.stopped()
    }

    /// The drain of a leg whose bytes we have read ourselves: nothing that we posted is
    /// outstanding.
    ///
    /// Nobody was given a key for it. What lands is the answers to our own reads, and the device
    /// takes an answer only for a read that it awaits one for. So this rests on no peer's word, and
    /// on no order of messages either.
    pub(super) fn drained_by_reads(&self) -> LegStopped {
        assert!(self.is_quiet(), "every read has completed");
        // S1: see above.
        self.stopped()
    }

    fn stopped(&self) -> LegStopped {
        let Side::Destination(State::Busy(grant, leg)) = self.side else {
            panic!("only a lane that carries a leg is drained: {:?}", self.side);
        };
        LegStopped { grant, leg }
    }
}

impl Revoked {
    /// A grant that no lane ever carried.
    pub(super) fn never_armed() -> Self {
        Self(())
    }

    /// A grant whose every leg is stopped.
    pub(super) fn of_legs(grant: GrantId, legs: &[LegStopped]) -> Self {
        assert!(!legs.is_empty(), "an armed grant has a leg");
        // S1: of each of the grant's legs, and of no other's.
        for (number, stopped) in legs.iter().enumerate() {
            assert_eq!((stopped.grant, stopped.leg.index()), (grant, number));
        }
        Self(())
    }
}

/// The recipe of every fence, which the probe at start-up tries on each port: ends whatever the
/// peer of a queue pair may still do through it and its windows.
///
/// 1. The queue pair goes to `Error`: no new packet is taken in.
/// 2. The windows are destroyed: no key opens the slots. Before the queue pair, since soft-RoCE
///    would wait for them.
/// 3. The queue pair is destroyed. Only this is a barrier: a packet may be under way through the
///    first two (measured on soft-RoCE: 1 KiB, in 1 to 5 of 35 runs); none was after it.
pub(super) fn fence(
    queue_pair: QueuePair,
    windows: impl IntoIterator<Item = MemoryWindow>,
) -> Result<(), VerbsError> {
    let stopped = queue_pair.stop();
    let mut closed = Ok(());
    for window in windows {
        // All of them, whatever becomes of one.
        if let Err(error) = window.close() {
            closed = Err(error);
        }
    }
    let destroyed = queue_pair.close();
    // A queue pair that cannot be moved to `Error` can still be destroyed.
    if let Err(error) = stopped {
        tracing::warn!("stop a queue pair: {error}");
    }
    closed.and(destroyed)
}

/// A number for the first packet of a queue pair, so that a packet of an earlier one with the same
/// number is not taken for one of this.
pub(super) fn first_packet() -> Result<u32, VerbsError> {
    let mut number = [0; 4];
    fill_random(&mut number[..3])?;
    Ok(u32::from_le_bytes(number))
}

pub(super) fn fill_random(bytes: &mut [u8]) -> Result<(), VerbsError> {
    let random = default_provider().secure_random;
    random.fill(bytes).map_err(|_| VerbsError {
        call: "getrandom",
        code: NO_RANDOM,
    })
}

/// The lanes of a plane, by a key that is never used again.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    slots: Vec<Slot>,
    free: Vec<u16>,
    lent: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    lane: Option<Lane>,
}

impl Lanes {
    /// Adds a lane; gives it back where there are too many.
    pub(super) fn insert(&mut self, lane: Lane) -> Result<LaneKey, Box<Lane>> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => match u16::try_from(self.slots.len()) {
                Ok(index) => {
                    self.slots.push(Slot {
                        generation: 0,
                        lane: None,
                    });
                    index
                }
                Err(_) => return Err(Box::new(lane)),
            },
        };
        let slot = &mut self.slots[usize::from(index)];
        slot.lane = Some(lane);
        let generation = slot.generation;
        Ok(LaneKey { index, generation })
    }

    pub(super) fn find(&mut self, key: LaneKey) -> Option<&mut Lane> {
        let slot = self.slots.get_mut(usize::from(key.index))?;
        slot.lane
            .as_mut()
            .filter(|_| slot.generation == key.generation)
    }

    pub(super) fn remove(&mut self, key: LaneKey) -> Option<Lane> {
        self.find(key)?;
        let slot = &mut self.slots[usize::from(key.index)];
        // A slot whose numbers are used up is not used again.
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
            self.free.push(key.index);
        }
        slot.lane.take()
    }

    /// Takes a lane that is to come back: meanwhile nobody finds it, and its key is kept.
    pub(super) fn lend(&mut self, key: LaneKey) -> Option<Lane> {
        self.find(key)?;
        self.lent += 1;
        self.slots[usize::from(key.index)].lane.take()
    }

    /// Takes a lane back that was lent.
    pub(super) fn take_back(&mut self, key: LaneKey, lane: Lane) {
        let slot = &mut self.slots[usize::from(key.index)];
        assert_eq!(slot.generation, key.generation, "its place was kept");
        assert!(slot.lane.is_none(), "as above");
        slot.lane = Some(lane);
        self.lent -= 1;
    }

    pub(super) fn of_peer(&self, peer: PeerKey) -> Vec<LaneKey> {
        self.keys(|lane| lane.peer == peer)
    }

    /// Those through one of our ports.
    pub(super) fn of_rail(&self, rail: usize) -> Vec<LaneKey> {
        self.keys(|lane| lane.rail == rail)
    }

    /// Those that are as the caller says.
    pub(super) fn keys(&self, is_wanted: impl Fn(&Lane) -> bool) -> Vec<LaneKey> {
        let keys = (0..).zip(&self.slots).filter_map(|(index, slot)| {
            let generation = slot.generation;
            let lane = slot.lane.as_ref()?;
            is_wanted(lane).then_some(LaneKey { index, generation })
        });
        keys.collect()
    }

    pub(super) fn count(&self) -> u64 {
        self.lent + self.slots.iter().filter(|slot| slot.lane.is_some()).count() as u64
    }
}

/// M: errno(3), EIO.
const NO_RANDOM: i32 = 5;

/// Requests that one lane may have posted.
pub(super) const SENDS_MAX: u32 = 256;

/// Windows of one grant: each takes a message to invalidate, and a receive for it.
pub(super) const WINDOWS_MAX: u16 = 1024;

/// Receives of a lane: for a whole drain, for the few messages that say that the writer is alive,
/// and as many as may be gone before others are posted.
pub(super) const RECEIVES: u32 = WINDOWS_MAX as u32 + 32 + RECEIVES_TOGETHER;

/// Receives are posted again so many at a time.
const RECEIVES_TOGETHER: u32 = 32;

/// Completions that one lane may have outstanding.
pub(super) const LANE_COMPLETIONS: u32 = SENDS_MAX + RECEIVES;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_work_requests_come_back_as_they_were() {
        let key = LaneKey {
            index: 0xFEDC,
            generation: 0x89AB_CDEF,
        };
        for kind in [Kind::Binds, Kind::Reads, Kind::Returns, Kind::Writes] {
            assert_eq!(LaneKey::parse(key.wr_id(kind)), Some((key, kind)));
        }
        assert_eq!(LaneKey::parse(u64::MAX), None, "no such kind");
    }
}
