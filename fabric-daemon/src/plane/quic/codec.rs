//! The bytes of a writer's stream.
//!
//! ```text
//! header: version u8 = 1 │ grant u64 │ key [32]
//! then runs:               region u16 │ first u32 │ count u32 │ the pages' bytes
//! ```
//!
//! Numbers are little-endian. The stream may end between two runs, and that is the drain.

use std::collections::VecDeque;

use fabric_proto::ids::{GrantId, Secret};
use fabric_proto::pool::PageRun;
use thiserror::Error;

use crate::plane::faults::Faults;
use crate::plane::source::Source;

/// Bytes of a stream's header.
pub(super) const HEADER_BYTES: usize = 1 + 8 + 32;

/// Bytes of a run's header.
pub(super) const RUN_HEADER_BYTES: usize = 2 + 4 + 4;

const VERSION: u8 = 1;

/// Makes a stream's header.
pub(super) fn encode_header(grant: GrantId, key: &Secret) -> [u8; HEADER_BYTES] {
    let mut bytes = [VERSION; HEADER_BYTES];
    bytes[1..9].copy_from_slice(&grant.0.to_le_bytes());
    bytes[9..].copy_from_slice(&key.0);
    bytes
}

/// Takes a stream's header apart.
pub(super) fn decode_header(bytes: &[u8; HEADER_BYTES]) -> Result<(GrantId, Secret), DecodeError> {
    let (version, rest) = bytes.split_first().expect("a header is not empty");
    if *version != VERSION {
        return Err(DecodeError::Version {
            got: *version,
            want: VERSION,
        });
    }
    let (grant, key) = rest.split_first_chunk().expect("its length is fixed");
    let key = key.try_into().expect("its length is fixed");
    Ok((GrantId(u64::from_le_bytes(*grant)), Secret(key)))
}

fn encode_run(run: PageRun) -> [u8; RUN_HEADER_BYTES] {
    let mut bytes = [0; RUN_HEADER_BYTES];
    bytes[..2].copy_from_slice(&run.region.to_le_bytes());
    bytes[2..6].copy_from_slice(&run.first.to_le_bytes());
    bytes[6..].copy_from_slice(&run.count.to_le_bytes());
    bytes
}

fn decode_run(bytes: [u8; RUN_HEADER_BYTES]) -> PageRun {
    let [r0, r1, f0, f1, f2, f3, c0, c1, c2, c3] = bytes;
    PageRun {
        region: u16::from_le_bytes([r0, r1]),
        first: u32::from_le_bytes([f0, f1, f2, f3]),
        count: u32::from_le_bytes([c0, c1, c2, c3]),
    }
}

/// Why a stream has no meaning.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(super) enum DecodeError {
    /// A run of no pages.
    #[error("a run of no pages")]
    EmptyRun,
    /// A format that is not ours.
    #[error("version {got} of the stream, need {want}")]
    Version {
        /// Theirs.
        got: u8,
        /// Ours.
        want: u8,
    },
}

/// A part of a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Decoded<'a> {
    /// Bytes of the run that was announced last.
    Bytes {
        /// Which run.
        run: PageRun,
        /// Where in its bytes these belong.
        offset: u64,
        /// At least one.
        bytes: &'a [u8],
    },
    /// A run begins. At least one page.
    Run(PageRun),
}

/// Takes a stream's runs apart, however its bytes are cut. Total: it keeps one run header, and
/// allocates nothing.
#[derive(Debug)]
pub(super) struct Decoder {
    page_bytes: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// `offset` is below the run's bytes.
    Body { run: PageRun, offset: u64 },
    /// `filled` is below the header's bytes.
    Header {
        bytes: [u8; RUN_HEADER_BYTES],
        filled: usize,
    },
}

const BETWEEN_RUNS: State = State::Header {
    bytes: [0; RUN_HEADER_BYTES],
    filled: 0,
};

impl Decoder {
    /// A decoder for pages of `page_bytes` bytes, at the first run's header.
    pub(super) fn new(page_bytes: u64) -> Self {
        assert!(page_bytes > 0, "pools have no empty pages");
        Self {
            page_bytes,
            state: BETWEEN_RUNS,
        }
    }

    /// Takes the next part off the front of `input`; `None` once that is empty.
    pub(super) fn next<'a>(
        &mut self,
        input: &mut &'a [u8],
    ) -> Result<Option<Decoded<'a>>, DecodeError> {
        if input.is_empty() {
            return Ok(None);
        }
        match &mut self.state {
            State::Body { run, offset } => {
                let run_bytes = u64::from(run.count) * self.page_bytes;
                let rest = usize::try_from(run_bytes - *offset).unwrap_or(usize::MAX);
                let (bytes, later) = input.split_at(rest.min(input.len()));
                *input = later;
                let part = Decoded::Bytes {
                    run: *run,
                    offset: *offset,
                    bytes,
                };
                *offset += u64::try_from(bytes.len()).expect("lengths fit 64 bits");
                if *offset == run_bytes {
                    self.state = BETWEEN_RUNS;
                }
                Ok(Some(part))
            }
            State::Header { bytes, filled } => {
                let missing = &mut bytes[*filled..];
                let (now, later) = input.split_at(missing.len().min(input.len()));
                missing[..now.len()].copy_from_slice(now);
                *input = later;
                *filled += now.len();
                if *filled < RUN_HEADER_BYTES {
                    return Ok(None);
                }
                let run = decode_run(*bytes);
                if run.count == 0 {
                    return Err(DecodeError::EmptyRun);
                }
                self.state = State::Body { run, offset: 0 };
                Ok(Some(Decoded::Run(run)))
            }
        }
    }

    /// Whether the stream may end here.
    pub(super) fn is_between_runs(&self) -> bool {
        matches!(self.state, State::Header { filled: 0, .. })
    }
}

/// Puts runs together for a stream.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    /// The run that is partly out, and how many of its bytes are.
    partial: Option<(PageRun, u64)>,
}

/// What [`Encoder::fill`] made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Filled {
    /// Bytes of the buffer that are filled.
    pub(super) bytes: usize,
    /// How many of them are pages' bytes.
    pub(super) page_bytes: u64,
}

impl Encoder {
    /// Fills `buffer` from the runs at the front of `queue` as far as they last, reading their
    /// pages. Each was checked against the source's area.
    pub(super) fn fill(
        &mut self,
        queue: &mut VecDeque<PageRun>,
        source: &Source,
        buffer: &mut [u8],
        faults: &Faults,
    ) -> Filled {
        let mut filled = Filled {
            bytes: 0,
            page_bytes: 0,
        };
        loop {
            let rest = &mut buffer[filled.bytes..];
            let Some((run, offset)) = &mut self.partial else {
                if rest.len() <= RUN_HEADER_BYTES {
                    return filled;
                }
                let Some(run) = queue.pop_front() else {
                    return filled;
                };
                rest[..RUN_HEADER_BYTES].copy_from_slice(&encode_run(run));
                filled.bytes += RUN_HEADER_BYTES;
                self.partial = Some((run, 0));
                continue;
            };
            if rest.is_empty() {
                return filled;
            }
            let room = u64::try_from(rest.len()).expect("lengths fit 64 bits");
            let extent = source.area.extent(*run, *offset, room);
            let bytes = usize::try_from(extent.bytes).expect("it is at most the room");
            let target = &mut rest[..bytes];
            source
                .pool
                .memory
                .mapped()
                .read(extent.start, target)
                .expect("an area lies within its pool, and a pool within its memory");
            if faults.may_flip() {
                flip(target, *offset, source.area.page_bytes(), faults);
            }
            filled.bytes += bytes;
            filled.page_bytes += extent.bytes;
            *offset += extent.bytes;
            if *offset == source.area.run_bytes(*run) {
                self.partial = None;
            }
        }
    }

    /// Whether the stream may end after what was filled.
    pub(super) fn is_between_runs(&self) -> bool {
        self.partial.is_none()
    }
}

/// Flips a bit of every page that begins in `bytes`, which are a run's from its byte `offset` on.
fn flip(bytes: &mut [u8], offset: u64, page_bytes: u64, faults: &Faults) {
    let page_starts = (offset.next_multiple_of(page_bytes)..)
        .step_by(usize::try_from(page_bytes).expect("a page has at most 64 MiB"));
    for start in page_starts {
        let within = usize::try_from(start - offset).unwrap_or(usize::MAX);
        match bytes.get_mut(within) {
            Some(byte) if faults.flips_page() => *byte ^= 1,
            Some(_) | None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::testing::Random;

    type Runs = Vec<(PageRun, Vec<u8>)>;

    /// Decodes `stream` in pieces cut by `random`.
    fn decode(
        stream: &[u8],
        page_bytes: u64,
        random: &mut Random,
    ) -> Result<(Runs, bool), DecodeError> {
        let mut decoder = Decoder::new(page_bytes);
        let mut runs = Runs::new();
        let mut rest = stream;
        while !rest.is_empty() {
            let (mut piece, later) = rest.split_at(random.within(1..=rest.len().min(37)));
            rest = later;
            while let Some(part) = decoder.next(&mut piece)? {
                match part {
                    Decoded::Run(run) => runs.push((run, Vec::new())),
                    Decoded::Bytes { run, offset, bytes } => {
                        let (announced, so_far) = runs.last_mut().unwrap();
                        assert_eq!(*announced, run);
                        assert_eq!(so_far.len() as u64, offset);
                        so_far.extend_from_slice(bytes);
                    }
                }
            }
            assert!(piece.is_empty(), "all of a piece is taken");
        }
        Ok((runs, decoder.is_between_runs()))
    }

    #[test]
    fn runs_come_out_as_they_went_in_however_the_bytes_are_cut() {
        let mut random = Random::new(1);
        for _ in 0..500 {
            let page_bytes = random.within(1..=50);
            let mut stream = Vec::new();
            let mut want = Vec::new();
            for _ in 0..random.within(0..=5) {
                let count = random.within(1..=4);
                let run = PageRun {
                    region: u16::try_from(random.within(0..=65535)).unwrap(),
                    first: u32::try_from(random.within(0..=1 << 20)).unwrap(),
                    count: u32::try_from(count).unwrap(),
                };
                let bytes = random.bytes(count * page_bytes);
                stream.extend_from_slice(&encode_run(run));
                stream.extend_from_slice(&bytes);
                want.push((run, bytes));
            }
            let got = decode(&stream, page_bytes as u64, &mut random);
            assert_eq!(got, Ok((want, true)));
            // Cut short, it does not end between runs.
            if let Some(short) = stream.len().checked_sub(1) {
                let (_, between) =
                    decode(&stream[..short], page_bytes as u64, &mut random).unwrap();
                assert!(!between);
            }
        }
    }

    #[test]
    fn any_bytes_decode_or_are_refused() {
        let mut random = Random::new(2);
        for _ in 0..2000 {
            let length = random.within(0..=300);
            let mut bytes = random.bytes(length);
            if random.within(0..=1) == 0 {
                bytes.iter_mut().for_each(|byte| *byte &= 1);
            }
            let outcome = decode(&bytes, 1 + random.next() % 40, &mut random);
            assert!(matches!(outcome, Ok(_) | Err(DecodeError::EmptyRun)));
        }
    }

    #[test]
    fn header_round_trips_and_other_versions_are_refused() {
        let (grant, key) = (GrantId(0x0102_0304_0506_0708), Secret([9; 32]));
        let mut bytes = encode_header(grant, &key);
        assert_eq!(decode_header(&bytes), Ok((grant, key)));
        assert_eq!(bytes[..9], [1, 8, 7, 6, 5, 4, 3, 2, 1], "golden");
        bytes[0] = 2;
        assert_eq!(
            decode_header(&bytes),
            Err(DecodeError::Version { got: 2, want: 1 })
        );
    }
}
