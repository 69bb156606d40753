//! Messages on a link's control stream: a length of four bytes, little-endian, then the message.

use bytes::{Buf, Bytes, BytesMut};
use fabric_proto::limits::MESSAGE_BYTES_MAX;
use fabric_proto::wire::{DecodeError, PeerMessage};
use quinn::{ReadError, RecvStream, SendStream, WriteError};
use thiserror::Error;

use crate::registry::Outgoing;

/// The receiving half.
#[derive(Debug)]
pub(super) struct Reader {
    stream: RecvStream,
    /// What has come and is not yet a message. Grows as bytes come, not as lengths claim.
    buffer: BytesMut,
}

impl Reader {
    pub(super) fn new(stream: RecvStream) -> Self {
        Self {
            stream,
            buffer: BytesMut::new(),
        }
    }

    /// Receives a message; `None` is the end of the stream, between two messages.
    ///
    /// Cancel-safe: what has come stays in the buffer.
    pub(super) async fn next(&mut self) -> Result<Option<PeerMessage>, ReceiveError> {
        loop {
            if let Some(frame) = split(&mut self.buffer)? {
                return Ok(Some(PeerMessage::decode(frame)?));
            }
            match self.stream.read_chunk(CHUNK_BYTES_MAX, true).await? {
                Some(chunk) => self.buffer.extend_from_slice(&chunk.bytes),
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(ReceiveError::Torn(self.buffer.len())),
            }
        }
    }
}

/// Takes a whole frame off the front, if there is one.
fn split(buffer: &mut BytesMut) -> Result<Option<Bytes>, ReceiveError> {
    let Some(header) = buffer.first_chunk::<HEADER_BYTES>() else {
        return Ok(None);
    };
    let length = u32::from_le_bytes(*header);
    let got = usize::try_from(length).unwrap_or(usize::MAX);
    if got == 0 {
        return Err(ReceiveError::Empty);
    }
    if got > MESSAGE_BYTES_MAX {
        let want = MESSAGE_BYTES_MAX;
        return Err(ReceiveError::TooLong { got, want });
    }
    if buffer.len() < HEADER_BYTES + got {
        return Ok(None);
    }
    buffer.advance(HEADER_BYTES);
    Ok(Some(buffer.split_to(got).freeze()))
}

/// Why a message could not be received. The link is over.
#[derive(Debug, Error)]
pub(super) enum ReceiveError {
    #[error("{0}")]
    Decode(#[from] DecodeError),
    #[error("an empty message")]
    Empty,
    #[error("the control stream: {0}")]
    Read(#[from] ReadError),
    #[error("a message has {got} bytes, and {want} are allowed")]
    TooLong { got: usize, want: usize },
    #[error("the control stream ended inside a message, after {0} of its bytes")]
    Torn(usize),
}

/// Sends one message.
pub(super) async fn send(stream: &mut SendStream, message: &Bytes) -> Result<(), WriteError> {
    let mut chunks = [header(message), message.clone()];
    stream.write_all_chunks(&mut chunks).await
}

/// Sends what is queued until there will be no more, then ends the stream and waits until the peer
/// has all of it.
pub(super) async fn write(
    mut stream: SendStream,
    mut outgoing: Outgoing,
) -> Result<(), WriteError> {
    let mut batch: Vec<Bytes> = Vec::new();
    while outgoing.next(&mut batch).await {
        let frames = batch
            .drain(..)
            .flat_map(|message| [header(&message), message]);
        let mut chunks: Vec<Bytes> = frames.collect();
        stream.write_all_chunks(&mut chunks).await?;
    }
    if stream.finish().is_ok() {
        // Any answer will do: it has all, it wants no more, or it is gone.
        let _stopped = stream.stopped().await;
    }
    Ok(())
}

fn header(message: &Bytes) -> Bytes {
    assert!(
        message.len() <= MESSAGE_BYTES_MAX,
        "the machine keeps messages short"
    );
    let length = u32::try_from(message.len()).expect("the line above");
    Bytes::copy_from_slice(&length.to_le_bytes())
}

const HEADER_BYTES: usize = 4;

/// Most bytes that are taken from the connection at a time.
const CHUNK_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_split_at_every_boundary_and_lengths_are_checked_first() {
        let mut whole = BytesMut::new();
        for message in [&b"abc"[..], b"d"] {
            whole.extend_from_slice(&header(&Bytes::copy_from_slice(message)));
            whole.extend_from_slice(message);
        }
        for cut in 0..whole.len() {
            let mut buffer = BytesMut::from(&whole[..cut]);
            let mut got = Vec::new();
            for rest in [&whole[cut..], &[]] {
                while let Some(frame) = split(&mut buffer).unwrap() {
                    got.push(frame);
                }
                buffer.extend_from_slice(rest);
            }
            while let Some(frame) = split(&mut buffer).unwrap() {
                got.push(frame);
            }
            assert_eq!(got, [&b"abc"[..], b"d"], "cut at {cut}");
        }
        let mut empty = BytesMut::from(&[0; 4][..]);
        assert!(matches!(split(&mut empty), Err(ReceiveError::Empty)));
        let mut long = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
        assert!(matches!(
            split(&mut long),
            Err(ReceiveError::TooLong { .. })
        ));
        assert!(long.capacity() < 1024, "nothing was allocated for it");
    }
}
