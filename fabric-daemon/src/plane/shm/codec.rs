//! The frames between two daemons on one host.
//!
//! A frame is a kind (u8) and its fields in order, little-endian; a list runs to the frame's end.
//! How frames are cut out of a stream, and how descriptors travel with them, is `fabric_ipc`'s.

use fabric_proto::ids::{GrantId, PoolId, Secret, Tag};
use fabric_proto::limits;
use fabric_proto::pool::{Arrangement, Layout, PageRun, PoolSpec};
use thiserror::Error;

/// What the source says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Request {
    /// Write to these slots of the destination, by position, from these of a pool named before.
    Attach {
        grant: GrantId,
        key: Secret,
        pool: PoolId,
        /// At most [`limits::LEASE_SLOTS_MAX`].
        slots: Vec<u32>,
    },
    /// Copy nothing more, not even what was asked for. Answered by [`Reply::Stopped`].
    Cancel { grant: GrantId },
    /// Nothing more is to be copied. Answered, after all copies, by [`Reply::Stopped`].
    Drain { grant: GrantId },
    /// A pool is gone.
    Forget { pool: PoolId },
    /// A pool to copy from; its memory file travels along.
    Pool { pool: PoolId, spec: PoolSpec },
    /// Copy these pages. Answered by [`Reply::Completed`].
    Write {
        grant: GrantId,
        /// 1 to [`RUNS_PER_WRITE_MAX`].
        runs: Vec<PageRun>,
    },
}

/// What the destination says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reply {
    /// These many bytes were copied, and these many runs are through with that.
    Completed {
        grant: GrantId,
        runs: u32,
        bytes: u64,
    },
    /// The grant is not, or no longer, the sender's: nothing is read for it any more.
    Refused { grant: GrantId },
    /// As asked; nothing is read for this grant any more.
    Stopped { grant: GrantId },
}

/// Most runs of one `Write`.
pub(super) const RUNS_PER_WRITE_MAX: usize = 1024;

const RUN_BYTES: usize = 10;

/// Why a frame has no meaning.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(super) enum DecodeError {
    /// A kind that does not exist in this direction.
    #[error("a frame of kind {got}")]
    Kind {
        /// Which.
        got: u8,
    },
    /// The fields are not as long as the frame, or the list has too few or too many entries.
    #[error("a frame of kind {kind} has a wrong length")]
    Length {
        /// Its kind.
        kind: u8,
    },
    /// A pool that no daemon would have registered.
    #[error("a pool that is not within the limits")]
    Pool,
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Self::Attach {
                grant,
                key,
                pool,
                slots,
            } => {
                bytes.reserve(64 + slots.len() * 4);
                bytes.push(1);
                bytes.extend_from_slice(&grant.0.to_le_bytes());
                bytes.extend_from_slice(&key.0);
                bytes.extend_from_slice(&pool.0.to_le_bytes());
                bytes.extend(slots.iter().flat_map(|slot| slot.to_le_bytes()));
            }
            Self::Cancel { grant } => {
                bytes.push(2);
                bytes.extend_from_slice(&grant.0.to_le_bytes());
            }
            Self::Drain { grant } => {
                bytes.push(3);
                bytes.extend_from_slice(&grant.0.to_le_bytes());
            }
            Self::Forget { pool } => {
                bytes.push(4);
                bytes.extend_from_slice(&pool.0.to_le_bytes());
            }
            Self::Pool { pool, spec } => {
                bytes.push(5);
                bytes.extend_from_slice(&pool.0.to_le_bytes());
                bytes.extend_from_slice(&spec.layout.regions.to_le_bytes());
                bytes.extend_from_slice(&spec.layout.page_bytes.to_le_bytes());
                bytes.extend_from_slice(&spec.slots.to_le_bytes());
                bytes.push(match spec.arrangement {
                    Arrangement::RegionMajor => 0,
                    Arrangement::SlotMajor => 1,
                });
            }
            Self::Write { grant, runs } => {
                bytes.reserve(16 + runs.len() * RUN_BYTES);
                bytes.push(6);
                bytes.extend_from_slice(&grant.0.to_le_bytes());
                for run in runs {
                    bytes.extend_from_slice(&run.region.to_le_bytes());
                    bytes.extend_from_slice(&run.first.to_le_bytes());
                    bytes.extend_from_slice(&run.count.to_le_bytes());
                }
            }
        }
        bytes
    }

    /// Total: any bytes give a value or an error, and no more memory than the frame itself is used.
    pub(super) fn decode(frame: &[u8]) -> Result<Self, DecodeError> {
        let mut fields = Fields::of(frame)?;
        let request = match fields.kind {
            1 => Self::Attach {
                grant: GrantId(fields.u64()?),
                key: Secret(fields.take()?),
                pool: PoolId(fields.u32()?),
                slots: fields.slots()?,
            },
            2 => Self::Cancel {
                grant: GrantId(fields.u64()?),
            },
            3 => Self::Drain {
                grant: GrantId(fields.u64()?),
            },
            4 => Self::Forget {
                pool: PoolId(fields.u32()?),
            },
            5 => Self::Pool {
                pool: PoolId(fields.u32()?),
                spec: fields.spec()?,
            },
            6 => Self::Write {
                grant: GrantId(fields.u64()?),
                runs: fields.runs()?,
            },
            got => return Err(DecodeError::Kind { got }),
        };
        fields.end()?;
        Ok(request)
    }
}

impl Reply {
    pub(super) fn encode(self) -> Vec<u8> {
        let (kind, grant) = match self {
            Self::Completed { grant, .. } => (1, grant),
            Self::Refused { grant } => (2, grant),
            Self::Stopped { grant } => (3, grant),
        };
        let mut bytes = Vec::with_capacity(32);
        bytes.push(kind);
        bytes.extend_from_slice(&grant.0.to_le_bytes());
        if let Self::Completed {
            runs, bytes: count, ..
        } = self
        {
            bytes.extend_from_slice(&runs.to_le_bytes());
            bytes.extend_from_slice(&count.to_le_bytes());
        }
        bytes
    }

    /// Total, as [`Request::decode`].
    pub(super) fn decode(frame: &[u8]) -> Result<Self, DecodeError> {
        let mut fields = Fields::of(frame)?;
        let kind = fields.kind;
        if !(1..=3).contains(&kind) {
            return Err(DecodeError::Kind { got: kind });
        }
        let grant = GrantId(fields.u64()?);
        let reply = match kind {
            1 => Self::Completed {
                grant,
                runs: fields.u32()?,
                bytes: fields.u64()?,
            },
            2 => Self::Refused { grant },
            _ => Self::Stopped { grant },
        };
        fields.end()?;
        Ok(reply)
    }
}

struct Fields<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn of(frame: &'a [u8]) -> Result<Self, DecodeError> {
        match frame.split_first() {
            Some((kind, rest)) => Ok(Self { kind: *kind, rest }),
            None => Err(DecodeError::Length { kind: 0 }),
        }
    }

    fn wrong_length(&self) -> DecodeError {
        DecodeError::Length { kind: self.kind }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let Some((bytes, rest)) = self.rest.split_first_chunk() else {
            return Err(self.wrong_length());
        };
        self.rest = rest;
        Ok(*bytes)
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    fn slots(&mut self) -> Result<Vec<u32>, DecodeError> {
        let (slots, rest) = self.rest.as_chunks();
        let most = usize::try_from(limits::LEASE_SLOTS_MAX).expect("the limit fits usize");
        if !rest.is_empty() || slots.len() > most {
            return Err(self.wrong_length());
        }
        self.rest = rest;
        Ok(slots
            .iter()
            .map(|bytes| u32::from_le_bytes(*bytes))
            .collect())
    }

    fn runs(&mut self) -> Result<Vec<PageRun>, DecodeError> {
        let (runs, rest) = self.rest.as_chunks::<RUN_BYTES>();
        if !rest.is_empty() || runs.is_empty() || runs.len() > RUNS_PER_WRITE_MAX {
            return Err(self.wrong_length());
        }
        self.rest = rest;
        let decode = |bytes: &[u8; RUN_BYTES]| {
            let [r0, r1, f0, f1, f2, f3, c0, c1, c2, c3] = *bytes;
            PageRun {
                region: u16::from_le_bytes([r0, r1]),
                first: u32::from_le_bytes([f0, f1, f2, f3]),
                count: u32::from_le_bytes([c0, c1, c2, c3]),
            }
        };
        Ok(runs.iter().map(decode).collect())
    }

    /// What of a pool's spec matters here; the rest is what `check` accepts.
    fn spec(&mut self) -> Result<PoolSpec, DecodeError> {
        let spec = PoolSpec {
            layout: Layout {
                model: Tag([0; 32]),
                regions: self.take().map(u16::from_le_bytes)?,
                page_bytes: self.u32()?,
                tokens_per_slot: 1,
            },
            slots: self.u32()?,
            arrangement: match self.take()? {
                [0] => Arrangement::RegionMajor,
                [1] => Arrangement::SlotMajor,
                [_] => return Err(DecodeError::Pool),
            },
            context_tokens: 1,
        };
        spec.check().map_err(|_| DecodeError::Pool)?;
        Ok(spec)
    }

    fn end(&self) -> Result<(), DecodeError> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err(self.wrong_length())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::testing::Random;

    fn requests() -> [Request; 6] {
        let (grant, pool) = (GrantId(0x0807_0605_0403_0201), PoolId(9));
        let mut spec = crate::plane::testing::spec(2, 4096, 8);
        spec.layout.model = Tag([0; 32]);
        (spec.layout.tokens_per_slot, spec.context_tokens) = (1, 1);
        let run = |first| PageRun {
            region: 1,
            first,
            count: 2,
        };
        [
            Request::Attach {
                grant,
                key: Secret([3; 32]),
                pool,
                slots: vec![5, 1, 7],
            },
            Request::Cancel { grant },
            Request::Drain { grant },
            Request::Forget { pool },
            Request::Pool { pool, spec },
            Request::Write {
                grant,
                runs: vec![run(0), run(4)],
            },
        ]
    }

    #[test]
    fn frames_round_trip() {
        for request in requests() {
            assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
        let grant = GrantId(7);
        for reply in [
            Reply::Completed {
                grant,
                runs: 3,
                bytes: 1 << 40,
            },
            Reply::Refused { grant },
            Reply::Stopped { grant },
        ] {
            assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        }
        let golden = [2, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(requests()[1].encode(), golden, "golden");
    }

    #[test]
    fn any_bytes_decode_or_are_refused() {
        let mut random = Random::new(3);
        let frames: Vec<Vec<u8>> = requests().iter().map(Request::encode).collect();
        for _ in 0..20_000 {
            let mut frame = frames[random.within(0..=frames.len() - 1)].clone();
            for _ in 0..random.within(0..=3) {
                let at = random.within(0..=frame.len() - 1);
                frame[at] = random.bytes(1)[0];
            }
            frame.truncate(random.within(0..=frame.len()));
            if let Ok(request) = Request::decode(&frame) {
                assert_eq!(request.encode(), frame, "one encoding of each value");
            }
            if let Ok(reply) = Reply::decode(&frame) {
                assert_eq!(reply.encode(), frame, "one encoding of each value");
            }
        }
    }

    #[test]
    fn too_long_lists_are_refused() {
        let grant = GrantId(1);
        let run = PageRun {
            region: 0,
            first: 0,
            count: 1,
        };
        let request = Request::Write {
            grant,
            runs: vec![run; RUNS_PER_WRITE_MAX + 1],
        };
        assert_eq!(
            Request::decode(&request.encode()),
            Err(DecodeError::Length { kind: 6 })
        );
    }
}
