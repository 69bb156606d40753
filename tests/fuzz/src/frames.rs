//! The frames of `fabric-ipc`, on a real socket.
//!
//! The first byte says how many descriptors go with the second write, the second how long the first
//! write is; the rest is what an engine sends.

use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use fabric_ipc::{Connection, FRAME_BYTES_MAX, FRAME_FDS_MAX, Frame, FrameError};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::runtime::{Builder, Runtime};

use crate::memory::paid_for;

/// What a receiver allocates whatever arrives: its chunk, its socket, its runtime's share.
const RECEIVER_BYTES: usize = 192 << 10;

/// More than a socket holds is not written, since nobody reads meanwhile.
const INPUT_BYTES_MAX: usize = 64 << 10;

/// Descriptors that a frame may carry, and one too many.
const FDS_MAX: usize = FRAME_FDS_MAX + 1;

/// What arrives on an engine's socket, in any pieces, with descriptors anywhere.
pub fn frames(bytes: &[u8]) {
    let [fds_count, split, stream @ ..] = bytes else {
        return;
    };
    let stream = &stream[..stream.len().min(INPUT_BYTES_MAX)];
    let fds_count = usize::from(*fds_count) % (FDS_MAX + 1);
    let split = usize::from(*split).min(stream.len());
    let (received, end) = paid_for(stream.len() + RECEIVER_BYTES / 64, || {
        runtime().block_on(receive(stream, split, fds_count))
    });
    let (want, whole) = naive(stream);
    let got: Vec<&[u8]> = received.iter().map(|frame| &frame.bytes[..]).collect();
    let fds: usize = received.iter().map(|frame| frame.fds.len()).sum();
    let sent = if split < stream.len() { fds_count } else { 0 };
    if sent == 0 {
        assert_eq!(
            got, want,
            "every frame before the first error, and no other"
        );
        assert_eq!(
            end.is_ok(),
            whole,
            "the stream ends between two frames: {end:?}"
        );
        return;
    }
    // Where descriptors go in can be an error of its own; nothing else may change.
    assert!(want.starts_with(&got), "frames are what was sent");
    assert!(fds == sent || (fds == 0 && got.len() <= want.len()));
    let of_descriptors = matches!(
        end,
        Err(FrameError::DescriptorsInsideFrame { .. } | FrameError::TooManyDescriptors { .. })
    );
    if !of_descriptors {
        assert_eq!((got, end.is_ok()), (want, whole), "{end:?}");
    }
}

/// One runtime for all runs: a fresh one costs more than what is tested.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_current_thread();
        builder.enable_io().build().expect("a runtime starts")
    })
}

async fn receive(
    stream: &[u8],
    split: usize,
    fds_count: usize,
) -> (Vec<Frame>, Result<(), FrameError>) {
    let (mut near, far) = UnixStream::pair().expect("a socket pair opens");
    let expectation = "a socket holds what is written";
    near.write_all(&stream[..split]).expect(expectation);
    if split < stream.len() {
        send(&near, &stream[split..], fds_count);
    }
    drop(near);
    far.set_nonblocking(true).expect("a socket can be polled");
    let far = tokio::net::UnixStream::from_std(far).expect("a socket can be watched");
    let (mut reader, _writer) = Connection::new(far).split();
    let mut frames = Vec::new();
    loop {
        match reader.recv().await {
            Ok(Some(frame)) => frames.push(frame),
            Ok(None) => return (frames, Ok(())),
            Err(error) => return (frames, Err(error)),
        }
    }
}

fn send(near: &UnixStream, bytes: &[u8], fds_count: usize) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // Not the socket itself: a frame that holds its own writer's end never sees it close.
    static SPARE: OnceLock<UnixStream> = OnceLock::new();
    let spare = SPARE.get_or_init(|| UnixStream::pair().expect("a socket pair opens").0);
    let fds: [BorrowedFd<'_>; FDS_MAX] = [spare.as_fd(); FDS_MAX];
    if fds_count > 0 {
        let rights = SendAncillaryMessage::ScmRights(&fds[..fds_count]);
        assert!(control.push(rights), "there is room for them");
    }
    let sent = sendmsg(
        near,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::empty(),
    );
    assert_eq!(sent, Ok(bytes.len()), "a socket holds what is written");
}

/// The frames of a stream up to its first error, and whether it has none.
fn naive(mut stream: &[u8]) -> (Vec<&[u8]>, bool) {
    let mut frames = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*header);
        if length == 0 || length > FRAME_BYTES_MAX || rest.len() < length as usize {
            return (frames, false);
        }
        let (frame, rest) = rest.split_at(length as usize);
        frames.push(frame);
        stream = rest;
    }
    (frames, stream.is_empty())
}
