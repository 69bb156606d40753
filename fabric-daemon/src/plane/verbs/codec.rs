//! What two planes say to each other, on a stream of their link: which ports they have, which lanes
//! there are, and what a grant's writer may write. Little-endian; each frame has its length first.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use fabric_proto::ids::{GrantId, Secret};
use quinn::{ReadExactError, RecvStream, SendStream, WriteError};
use thiserror::Error;

use super::extents::{Extent, Reach};
use super::ffi::{Gid, RKey};

/// A message between planes.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Message {
    /// Always the first, both ways: the sender's ports, in the order that lanes name them by.
    Rails(Vec<RailAddress>),
    /// A queue pair of the sender, who will grant through it; the receiver is to connect one.
    Lane(LaneOffer),
    /// The receiver's end of a lane is connected.
    LaneReady {
        /// As offered.
        lane: LaneNumber,
        /// The queue pair's.
        number: u32,
        /// Its first packet's.
        first: u32,
    },
    /// A lane is no more, whoever offered it.
    LaneGone {
        /// Which.
        lane: LaneNumber,
        /// Whether the sender of this offered it.
        offered_by_sender: bool,
    },
    /// Whether messages go through a lane of the sender: the end of the introduction.
    Usable(bool),
    /// Where a grant's writer may write, and through which lanes of the sender.
    Reach {
        /// Which grant.
        grant: GrantId,
        /// What the machine's writer must show.
        key: Secret,
        /// That of each leg.
        lanes: Vec<LaneNumber>,
        /// Where. Each extent names its leg, and each leg has an extent; but where the receiver is
        /// to write nothing, and the sender reads, there is one leg without any.
        reach: Reach,
    },
    /// A grant is closed.
    Closed {
        /// Which.
        grant: GrantId,
        /// By the drain of every leg, so that all was written; else by a fence.
        is_drained: bool,
    },
    /// The receiver's grant has no writer any more, and its lanes end.
    GivenUp {
        /// Which.
        grant: GrantId,
    },
    /// A leg whose lane has broken is to go on through another. What of it was acknowledged has
    /// landed; of the rest nobody knows, so it is to be written again.
    Rerouted {
        /// Which grant.
        grant: GrantId,
        /// Which leg.
        leg: LegNumber,
        /// Its lane from now on.
        lane: LaneNumber,
        /// The keys of its extents from now on, in their order.
        keys: Vec<RKey>,
    },
    /// A leg whose lane has broken was drained before.
    LegDrained {
        /// Which grant.
        grant: GrantId,
        /// Which leg.
        leg: LegNumber,
    },
    /// Whether the sender lets peers read what it sends them: not so unless it was said.
    Exposes(bool),
    /// Memory of the sender, for the receiver to read under a grant of its own. Each is given back
    /// by a message on the grant's lane that invalidates its key, in this order.
    Exposed {
        /// Which grant.
        grant: GrantId,
        /// At least one.
        exposures: Vec<Exposure>,
    },
    /// Nothing more will be exposed under a grant of the receiver.
    AllExposed {
        /// Which.
        grant: GrantId,
    },
}

/// Bytes that a source lets its peer read, from byte `within` of a page on, and on through the
/// pages that follow it in its region.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Exposure {
    pub(super) region: u16,
    /// The position of the first page.
    pub(super) first: u32,
    pub(super) within: u32,
    /// Never 0.
    pub(super) bytes: u32,
    /// Where they lie in the source's pool.
    pub(super) offset: u64,
    /// Of a window of their own.
    pub(super) rkey: RKey,
}

/// A lane's number: unique among those that its destination offers on one link.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct LaneNumber(pub(super) u32);

/// A part of a grant, with a lane of its own.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct LegNumber(pub(super) u8);

impl LegNumber {
    pub(super) fn index(self) -> usize {
        self.0.into()
    }
}

/// A port, as a peer needs to know it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct RailAddress {
    pub(super) gid: Gid,
    pub(super) lid: u16,
    pub(super) mtu: u8,
    pub(super) is_ethernet: bool,
    /// How many reads a queue pair answers at a time.
    pub(super) reads: u8,
}

/// One end of a lane.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct LaneOffer {
    pub(super) lane: LaneNumber,
    /// Which of the sender's ports.
    pub(super) rail: u8,
    /// Which of the receiver's.
    pub(super) their_rail: u8,
    /// The queue pair's.
    pub(super) number: u32,
    /// Its first packet's.
    pub(super) first: u32,
}

impl Message {
    /// The message with its length.
    pub(super) fn encode(&self) -> Bytes {
        let mut frame = BytesMut::new();
        frame.put_u32_le(0);
        self.put(&mut frame);
        let bytes = u32::try_from(frame.len() - 4).expect("a frame is bounded by its parts");
        frame[..4].copy_from_slice(&bytes.to_le_bytes());
        frame.freeze()
    }

    fn put(&self, frame: &mut BytesMut) {
        match self {
            Self::Rails(rails) => {
                frame.put_u8(1);
                rails.iter().for_each(|rail| encode_rail(frame, rail));
            }
            Self::Lane(offer) => {
                frame.put_u8(2);
                encode_offer(frame, offer);
            }
            Self::LaneReady {
                lane,
                number,
                first,
            } => {
                frame.put_u8(3);
                frame.put_u32_le(lane.0);
                frame.put_u32_le(*number);
                frame.put_u32_le(*first);
            }
            Self::LaneGone {
                lane,
                offered_by_sender,
            } => {
                frame.put_u8(4);
                frame.put_u32_le(lane.0);
                frame.put_u8((*offered_by_sender).into());
            }
            Self::Usable(usable) => frame.put_slice(&[5, (*usable).into()]),
            Self::Reach {
                grant,
                key,
                lanes,
                reach,
            } => {
                frame.put_u8(6);
                frame.put_u64_le(grant.0);
                frame.put_slice(&key.0);
                frame.put_u8(u8::try_from(lanes.len()).expect("at most LEGS_MAX"));
                lanes.iter().for_each(|lane| frame.put_u32_le(lane.0));
                encode_reach(frame, reach);
            }
            Self::Closed { grant, is_drained } => {
                encode_grant(frame, 7, *grant);
                frame.put_u8((*is_drained).into());
            }
            Self::GivenUp { grant } => encode_grant(frame, 8, *grant),
            Self::Rerouted {
                grant,
                leg,
                lane,
                keys,
            } => {
                frame.put_u8(9);
                encode_leg(frame, *grant, *leg);
                frame.put_u32_le(lane.0);
                keys.iter().for_each(|key| frame.put_u32_le(key.0));
            }
            Self::LegDrained { grant, leg } => {
                frame.put_u8(10);
                encode_leg(frame, *grant, *leg);
            }
            Self::Exposes(exposes) => frame.put_slice(&[11, (*exposes).into()]),
            Self::Exposed { grant, exposures } => {
                encode_grant(frame, 12, *grant);
                encode_exposures(frame, exposures);
            }
            Self::AllExposed { grant } => encode_grant(frame, 13, *grant),
        }
    }

    /// Total: any bytes are a message or an error.
    pub(super) fn decode(mut frame: Bytes) -> Result<Self, DecodeError> {
        let kind = frame.try_get_u8()?;
        let message = match kind {
            1 => {
                let mut rails = Vec::new();
                while frame.has_remaining() {
                    if rails.len() == RAILS_MAX {
                        return Err(DecodeError::Rails);
                    }
                    rails.push(decode_rail(&mut frame)?);
                }
                Self::Rails(rails)
            }
            2 => Self::Lane(LaneOffer {
                lane: LaneNumber(frame.try_get_u32_le()?),
                rail: frame.try_get_u8()?,
                their_rail: frame.try_get_u8()?,
                number: frame.try_get_u32_le()?,
                first: frame.try_get_u32_le()?,
            }),
            3 => Self::LaneReady {
                lane: LaneNumber(frame.try_get_u32_le()?),
                number: frame.try_get_u32_le()?,
                first: frame.try_get_u32_le()?,
            },
            4 => Self::LaneGone {
                lane: LaneNumber(frame.try_get_u32_le()?),
                offered_by_sender: frame.try_get_u8()? != 0,
            },
            5 => Self::Usable(frame.try_get_u8()? != 0),
            6 => decode_granted(&mut frame)?,
            7 => Self::Closed {
                grant: GrantId(frame.try_get_u64_le()?),
                is_drained: frame.try_get_u8()? != 0,
            },
            8 => Self::GivenUp {
                grant: GrantId(frame.try_get_u64_le()?),
            },
            9 => decode_rerouted(&mut frame)?,
            10 => Self::LegDrained {
                grant: GrantId(frame.try_get_u64_le()?),
                leg: LegNumber(frame.try_get_u8()?),
            },
            11 => Self::Exposes(frame.try_get_u8()? != 0),
            12 => Self::Exposed {
                grant: GrantId(frame.try_get_u64_le()?),
                exposures: decode_exposures(&mut frame)?,
            },
            13 => Self::AllExposed {
                grant: GrantId(frame.try_get_u64_le()?),
            },
            other => return Err(DecodeError::Kind(other)),
        };
        match frame.remaining() {
            0 => Ok(message),
            bytes => Err(DecodeError::Trailing { bytes }),
        }
    }
}

/// Receives the next message; `None` where the peer has finished the stream.
pub(super) async fn receive(stream: &mut RecvStream) -> Result<Option<Message>, ReceiveError> {
    let mut head = [0; 4];
    match stream.read_exact(&mut head).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let bytes = usize::try_from(u32::from_le_bytes(head)).expect("usize has 32 bits or more");
    if bytes > FRAME_BYTES_MAX {
        let (got, want) = (bytes, FRAME_BYTES_MAX);
        return Err(ReceiveError::TooLong { got, want });
    }
    let mut frame = BytesMut::zeroed(bytes);
    stream.read_exact(&mut frame).await?;
    Ok(Some(Message::decode(frame.freeze())?))
}

/// Sends a message.
pub(super) async fn send(stream: &mut SendStream, message: &Message) -> Result<(), WriteError> {
    stream.write_all(&message.encode()).await
}

/// Why there is no next message.
#[derive(Debug, Error)]
pub(super) enum ReceiveError {
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("{0}")]
    Read(#[from] ReadExactError),
    #[error("a message of {got} bytes, at most {want}")]
    TooLong { got: usize, want: usize },
}

/// Bytes that are no message.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
pub(super) enum DecodeError {
    #[error("exposures that are empty, past the end of memory, none, or too many")]
    Exposures,
    #[error("extents that are empty, out of order, or too many")]
    Extents,
    #[error("no message has the kind {0}")]
    Kind(u8),
    #[error("legs without an extent, extents without a leg, or more legs than {LEGS_MAX}")]
    Legs,
    #[error("more than {RAILS_MAX} ports")]
    Rails,
    #[error("{bytes} bytes after a message")]
    Trailing { bytes: usize },
    #[error("a message that ends early")]
    Truncated,
}

impl From<bytes::TryGetError> for DecodeError {
    fn from(_: bytes::TryGetError) -> Self {
        Self::Truncated
    }
}

fn encode_rail(frame: &mut BytesMut, rail: &RailAddress) {
    frame.put_slice(&rail.gid.0);
    frame.put_u16_le(rail.lid);
    frame.put_u8(rail.mtu);
    frame.put_u8(rail.is_ethernet.into());
    frame.put_u8(rail.reads);
}

fn encode_offer(frame: &mut BytesMut, offer: &LaneOffer) {
    frame.put_u32_le(offer.lane.0);
    frame.put_u8(offer.rail);
    frame.put_u8(offer.their_rail);
    frame.put_u32_le(offer.number);
    frame.put_u32_le(offer.first);
}

/// A message's kind, and which grant it is of.
fn encode_grant(frame: &mut BytesMut, kind: u8, grant: GrantId) {
    frame.put_u8(kind);
    frame.put_u64_le(grant.0);
}

fn encode_leg(frame: &mut BytesMut, grant: GrantId, leg: LegNumber) {
    frame.put_u64_le(grant.0);
    frame.put_u8(leg.0);
}

fn decode_rail(frame: &mut Bytes) -> Result<RailAddress, DecodeError> {
    let mut gid = [0; 16];
    frame.try_copy_to_slice(&mut gid)?;
    Ok(RailAddress {
        gid: Gid(gid),
        lid: frame.try_get_u16_le()?,
        mtu: frame.try_get_u8()?,
        is_ethernet: frame.try_get_u8()? != 0,
        reads: frame.try_get_u8()?,
    })
}

fn decode_granted(frame: &mut Bytes) -> Result<Message, DecodeError> {
    let grant = GrantId(frame.try_get_u64_le()?);
    let mut key = [0; 32];
    frame.try_copy_to_slice(&mut key)?;
    let legs = usize::from(frame.try_get_u8()?);
    if legs > LEGS_MAX {
        return Err(DecodeError::Legs);
    }
    let mut lanes = Vec::with_capacity(legs);
    for _ in 0..legs {
        lanes.push(LaneNumber(frame.try_get_u32_le()?));
    }
    Ok(Message::Reach {
        grant,
        key: Secret(key),
        lanes,
        reach: decode_reach(frame, legs)?,
    })
}

fn decode_rerouted(frame: &mut Bytes) -> Result<Message, DecodeError> {
    let grant = GrantId(frame.try_get_u64_le()?);
    let leg = LegNumber(frame.try_get_u8()?);
    let lane = LaneNumber(frame.try_get_u32_le()?);
    let mut keys = Vec::new();
    while frame.has_remaining() {
        if keys.len() == EXTENTS_MAX {
            return Err(DecodeError::Extents);
        }
        keys.push(RKey(frame.try_get_u32_le()?));
    }
    Ok(Message::Rerouted {
        grant,
        leg,
        lane,
        keys,
    })
}

fn encode_exposures(frame: &mut BytesMut, exposures: &[Exposure]) {
    for exposure in exposures {
        frame.put_u16_le(exposure.region);
        frame.put_u32_le(exposure.first);
        frame.put_u32_le(exposure.within);
        frame.put_u32_le(exposure.bytes);
        frame.put_u64_le(exposure.offset);
        frame.put_u32_le(exposure.rkey.0);
    }
}

/// Where the bytes are to go is checked by whoever knows the grant. What is checked here is what
/// reading them relies on.
fn decode_exposures(frame: &mut Bytes) -> Result<Vec<Exposure>, DecodeError> {
    let mut exposures = Vec::new();
    while frame.has_remaining() {
        let exposure = Exposure {
            region: frame.try_get_u16_le()?,
            first: frame.try_get_u32_le()?,
            within: frame.try_get_u32_le()?,
            bytes: frame.try_get_u32_le()?,
            offset: frame.try_get_u64_le()?,
            rkey: RKey(frame.try_get_u32_le()?),
        };
        let ends_at = exposure.offset.checked_add(exposure.bytes.into());
        let is_full = exposures.len() == EXPOSURES_MAX;
        if is_full || exposure.bytes == 0 || ends_at.is_none() {
            return Err(DecodeError::Exposures);
        }
        exposures.push(exposure);
    }
    if exposures.is_empty() {
        return Err(DecodeError::Exposures);
    }
    Ok(exposures)
}

fn encode_reach(frame: &mut BytesMut, reach: &Reach) {
    frame.put_u8(reach.by_window.into());
    frame.put_u32_le(reach.page_bytes);
    frame.put_u64_le(reach.region_stride);
    frame.put_u64_le(reach.slot_stride);
    for extent in &reach.extents {
        frame.put_u16_le(extent.region);
        frame.put_u16_le(extent.regions);
        frame.put_u32_le(extent.first);
        frame.put_u32_le(extent.count);
        frame.put_u64_le(extent.offset);
        frame.put_u32_le(extent.rkey.0);
        frame.put_u8(extent.leg.0);
    }
}

/// What a peer claims of its own memory is its own risk; what is checked here is what the look-up
/// relies on.
fn decode_reach(frame: &mut Bytes, legs: usize) -> Result<Reach, DecodeError> {
    let mut has_extent = [false; LEGS_MAX];
    let mut reach = Reach {
        by_window: frame.try_get_u8()? != 0,
        page_bytes: frame.try_get_u32_le()?,
        region_stride: frame.try_get_u64_le()?,
        slot_stride: frame.try_get_u64_le()?,
        extents: Vec::new(),
    };
    while frame.has_remaining() {
        let extent = Extent {
            region: frame.try_get_u16_le()?,
            regions: frame.try_get_u16_le()?,
            first: frame.try_get_u32_le()?,
            count: frame.try_get_u32_le()?,
            offset: frame.try_get_u64_le()?,
            rkey: RKey(frame.try_get_u32_le()?),
            leg: LegNumber(frame.try_get_u8()?),
        };
        let ends_at = extent.first.checked_add(extent.count);
        let follows = reach.extents.last().is_none_or(|last: &Extent| {
            (last.region, last.first) < (extent.region, extent.first)
                && (last.regions > 1) == (extent.regions > 1)
        });
        let holds_pages = extent.regions > 0 && extent.count > 0;
        let is_full = reach.extents.len() == EXTENTS_MAX;
        if is_full || ends_at.is_none() || !(follows && holds_pages) || reach.page_bytes == 0 {
            return Err(DecodeError::Extents);
        }
        if extent.leg.index() >= legs {
            return Err(DecodeError::Legs);
        }
        has_extent[extent.leg.index()] = true;
        reach.extents.push(extent);
    }
    // A destination that reads by itself has one lane for all of it.
    if reach.is_pull() && legs == 1 {
        return Ok(reach);
    }
    // A leg is over with the drain of its extents: one without any never would be.
    if legs == 0 || has_extent[..legs].contains(&false) {
        return Err(DecodeError::Legs);
    }
    Ok(reach)
}

/// Most extents of a grant. Whatever needs more is refused.
pub(super) const EXTENTS_MAX: usize = 1 << 13;

/// Most exposures of one message.
pub(super) const EXPOSURES_MAX: usize = 32;

/// Most ports of a node.
pub(super) const RAILS_MAX: usize = 32;

/// Most legs of a grant: one for each port of a node.
pub(super) const LEGS_MAX: usize = RAILS_MAX;

const EXTENT_BYTES: usize = 25;

const FRAME_BYTES_MAX: usize = EXTENTS_MAX * EXTENT_BYTES + LEGS_MAX * 4 + 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<Message> {
        let mut messages = messages_of_writes();
        messages.extend(messages_of_reads());
        messages
    }

    fn messages_of_reads() -> [Message; 4] {
        let grant = GrantId(77);
        [
            Message::Reach {
                grant,
                key: Secret([3; 32]),
                lanes: vec![LaneNumber(4)],
                reach: Reach::pull(&crate::plane::testing::spec(2, 4096, 8)),
            },
            Message::Exposes(true),
            Message::Exposed {
                grant,
                exposures: vec![exposure(0), exposure(9)],
            },
            Message::AllExposed { grant },
        ]
    }

    fn messages_of_writes() -> Vec<Message> {
        let extent = |region, first, leg| Extent {
            region,
            regions: 1,
            first,
            count: 2,
            offset: 4096 * u64::from(first),
            rkey: RKey(0x1234_5678),
            leg: LegNumber(leg),
        };
        vec![
            Message::Rails(vec![RailAddress {
                gid: Gid([7; 16]),
                lid: 3,
                mtu: 5,
                is_ethernet: true,
                reads: 16,
            }]),
            Message::Lane(LaneOffer {
                lane: LaneNumber(9),
                rail: 1,
                their_rail: 2,
                number: 17,
                first: 0x00FF_FFFF,
            }),
            Message::LaneReady {
                lane: LaneNumber(9),
                number: 18,
                first: 5,
            },
            Message::LaneGone {
                lane: LaneNumber(1),
                offered_by_sender: true,
            },
            Message::Usable(true),
            Message::Reach {
                grant: GrantId(77),
                key: Secret([3; 32]),
                lanes: vec![LaneNumber(4), LaneNumber(7)],
                reach: Reach {
                    by_window: true,
                    page_bytes: 4096,
                    region_stride: 1 << 20,
                    slot_stride: 4096,
                    extents: vec![extent(0, 0, 0), extent(0, 5, 1), extent(1, 0, 0)],
                },
            },
            Message::Closed {
                grant: GrantId(77),
                is_drained: true,
            },
            Message::GivenUp { grant: GrantId(78) },
            Message::Rerouted {
                grant: GrantId(79),
                leg: LegNumber(1),
                lane: LaneNumber(70),
                keys: vec![RKey(5), RKey(6)],
            },
            Message::LegDrained {
                grant: GrantId(79),
                leg: LegNumber(3),
            },
        ]
    }

    fn exposure(first: u32) -> Exposure {
        Exposure {
            region: 1,
            first,
            within: 100,
            bytes: 4096,
            offset: 4096 * u64::from(first),
            rkey: RKey(0x1234_5678),
        }
    }

    #[test]
    fn exposures_of_nothing_or_past_the_end_of_memory_are_refused() {
        let bad = [
            vec![],
            vec![Exposure {
                bytes: 0,
                ..exposure(0)
            }],
            vec![
                exposure(0),
                Exposure {
                    offset: u64::MAX - 4095,
                    ..exposure(1)
                },
            ],
            vec![exposure(0); EXPOSURES_MAX + 1],
        ];
        for exposures in bad {
            let grant = GrantId(77);
            let frame = Message::Exposed { grant, exposures }.encode();
            let decoded = Message::decode(frame.slice(4..));
            assert_eq!(decoded, Err(DecodeError::Exposures));
        }
    }

    #[test]
    fn messages_come_back_as_they_were() {
        for message in messages() {
            let frame = message.encode().slice(4..);
            assert_eq!(Message::decode(frame), Ok(message));
        }
    }

    #[test]
    fn whatever_is_cut_or_changed_is_a_message_or_an_error() {
        for message in messages() {
            let frame = message.encode().slice(4..);
            for cut in 0..frame.len() {
                let _total = Message::decode(frame.slice(..cut));
                for bit in 0..8 {
                    let mut changed = frame.to_vec();
                    changed[cut] ^= 1 << bit;
                    if let Ok(Message::Reach { reach, .. }) = Message::decode(changed.into()) {
                        for region in [0, 1, u16::MAX] {
                            for position in [0, 6, u32::MAX] {
                                let _total = reach.find(region, position, 0);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn each_leg_must_have_an_extent_and_each_extent_a_leg() {
        for legs in [0, 1, 3, LEGS_MAX + 1] {
            let mut message = messages().remove(5);
            let Message::Reach { lanes, .. } = &mut message else {
                panic!("{message:?}");
            };
            lanes.resize(legs, LaneNumber(8));
            let frame = message.encode().slice(4..);
            assert_eq!(Message::decode(frame), Err(DecodeError::Legs), "{legs}");
        }
        // Where the destination reads: one leg, without any.
        for legs in [0, 2, LEGS_MAX] {
            let [mut message, ..] = messages_of_reads();
            let Message::Reach { lanes, .. } = &mut message else {
                panic!("{message:?}");
            };
            lanes.resize(legs, LaneNumber(8));
            let frame = message.encode().slice(4..);
            assert_eq!(Message::decode(frame), Err(DecodeError::Legs), "{legs}");
        }
    }

    #[test]
    fn trailing_bytes_and_unknown_kinds_are_refused() {
        let trailing = Bytes::from_static(&[5, 0, 0]);
        let error = Message::decode(trailing);
        assert_eq!(error, Err(DecodeError::Trailing { bytes: 1 }));
        let error = Message::decode(Bytes::from_static(&[99]));
        assert_eq!(error, Err(DecodeError::Kind(99)));
    }
}
