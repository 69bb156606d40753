//! Messages over a Unix socket: frames, with descriptors.
//!
//! ```text
//! ┌───────────────────────┬──────────────────────┐
//! │ length: u32, LE, 1..= │ `length` bytes       │   0..=4 descriptors travel with the first byte
//! │ FRAME_BYTES_MAX       │                      │   (SCM_RIGHTS)
//! └───────────────────────┴──────────────────────┘
//! ```
//!
//! An empty frame is refused: no message encodes to nothing, so a zero length means that the peer
//! is out of step, and a run of zero bytes fails at once instead of being a flood of frames.
//!
//! # Whose descriptors these are
//!
//! A socket is read 64 KiB at a time, so one read may hold many frames, and recvmsg(2) does not say
//! at which byte the descriptors were attached. It need not. M: net/unix/af_unix.c in Linux: a send
//! attaches its descriptors to the first buffer that it makes (`unix_stream_sendmsg`); a read takes
//! them with that buffer's first byte, and ends within the buffer or at its end, so that nothing
//! sent later follows in the same read (`unix_stream_read_generic`). Plain bytes sent *earlier* may
//! precede it. A test below holds the kernel to this.
//!
//! So, as [`FrameWriter::send`] gives a frame with descriptors a sendmsg(2) of its own:
//!
//! 1. the last byte of a read with descriptors belongs to the frame that they were sent with;
//! 2. that frame's first byte is in the same read.
//!
//! [`FrameReader`] assigns by 1 and refuses what breaks 2 ([`FrameError::DescriptorsInsideFrame`]).
//! A peer that attaches descriptors further inside, where one read still holds the frame's first
//! byte, is not told apart, and gains nothing: they are its own descriptors, with its own frame.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::num::TryFromIntError;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};
use thiserror::Error;
use tokio::io::Interest;
use tokio::net::UnixStream;

/// The most bytes that a frame may have, without its header.
pub const FRAME_BYTES_MAX: u32 = 4 * 1024 * 1024;

/// The most descriptors that a frame may carry.
pub const FRAME_FDS_MAX: usize = 4;

/// The most bytes that a [`FrameWriter`] queues, headers included.
pub const QUEUE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// A connected Unix socket that carries frames.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
}

impl Connection {
    /// Wraps a connected socket, nothing of which has been read or written otherwise.
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Returns who connected, as [`peer_credentials`].
    ///
    /// # Errors
    ///
    /// If the operating system cannot say.
    pub fn peer_credentials(&self) -> io::Result<PeerCredentials> {
        peer_credentials(&self.stream)
    }

    /// Splits into the two directions. The socket is closed when both are dropped.
    #[must_use]
    pub fn split(self) -> (FrameReader, FrameWriter) {
        let stream = Arc::new(self.stream);
        (
            FrameReader::new(Arc::clone(&stream)),
            FrameWriter::new(stream),
        )
    }
}

/// A message as it was sent.
#[derive(Debug)]
pub struct Frame {
    /// The message, never empty; memory of its own.
    pub bytes: Bytes,
    /// The descriptors sent with it, at most [`FRAME_FDS_MAX`], close-on-exec. Nothing is known
    /// about what they are.
    pub fds: Vec<OwnedFd>,
}

/// The receiving direction of a [`Connection`].
#[derive(Debug)]
pub struct FrameReader {
    stream: Arc<UnixStream>,
    chunk: Chunk,
    partial: Partial,
    /// An error was returned: what follows in the stream has no meaning.
    failed: bool,
}

impl FrameReader {
    /// Receives the next frame; `None` is the end of the stream, between two frames.
    ///
    /// Cancel-safe: if the future is dropped, no byte and no descriptor is lost, and the next call
    /// carries on. Memory grows with the bytes that have arrived, not with the length claimed.
    ///
    /// # Errors
    ///
    /// Any [`FrameError`]. The stream cannot be used any further then: drop both halves. A peer
    /// that closes with unread bytes of ours shows as [`FrameError::Io`], "connection reset".
    pub async fn recv(&mut self) -> Result<Option<Frame>, FrameError> {
        if self.failed {
            return Err(FrameError::AfterError);
        }
        let result = self.next().await;
        if result.is_err() {
            self.failed = true;
            self.chunk.fds.clear();
            self.partial = Partial::default();
        }
        result
    }

    fn new(stream: Arc<UnixStream>) -> Self {
        Self {
            stream,
            chunk: Chunk::new(),
            partial: Partial::default(),
            failed: false,
        }
    }

    async fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        loop {
            if let Some(frame) = self.partial.advance(&mut self.chunk)? {
                return Ok(Some(frame));
            }
            // No await follows a read before its bytes are in `chunk`, so none is lost by
            // cancelling.
            let Self { stream, chunk, .. } = self;
            let interest = Interest::READABLE;
            let read = stream.async_io(interest, || chunk.fill(stream)).await?;
            if read.bytes == 0 {
                return self.partial.at_end().map(|()| None);
            }
            self.partial.began_in_chunk = false;
            self.chunk.check(read)?;
        }
    }
}

/// Whether and how a frame can be received no further.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// [`FrameReader::recv`] was called again after it had failed: the caller's bug.
    #[error("receive after an earlier error")]
    AfterError,
    /// The peer attached descriptors to a byte that is not a frame's first. They were closed.
    #[error("{got} descriptors inside a frame")]
    DescriptorsInsideFrame {
        /// How many.
        got: usize,
    },
    /// The kernel could not pass on all descriptors, most likely because this process has as many
    /// open as it may. Those that came were closed.
    #[error("lost descriptors of a frame, kept {got}: too many open files?")]
    DescriptorsLost {
        /// How many came.
        got: usize,
    },
    /// The peer sent a length of 0.
    #[error("an empty frame")]
    Empty,
    /// The stream ended inside a frame's bytes.
    #[error("stream ended after {got} of a frame's {want} bytes")]
    EndInBody {
        /// Bytes that came.
        got: usize,
        /// Bytes that its header claims.
        want: usize,
    },
    /// The stream ended inside a frame's length.
    #[error("stream ended after {got} of a header's {want} bytes")]
    EndInHeader {
        /// Bytes that came.
        got: usize,
        /// Bytes of a header.
        want: usize,
    },
    /// The socket failed.
    #[error("receive a frame: {0}")]
    Io(#[from] io::Error),
    /// The peer claims more bytes than a frame may have.
    #[error("a frame of {got} bytes, at most {max}")]
    TooLong {
        /// The length claimed.
        got: u32,
        /// [`FRAME_BYTES_MAX`].
        max: u32,
    },
    /// The peer attached more descriptors than a frame may carry. They were closed.
    #[error("a frame with {got} or more descriptors, at most {max}")]
    TooManyDescriptors {
        /// How many came; the kernel closed those beyond by itself.
        got: usize,
        /// [`FRAME_FDS_MAX`].
        max: usize,
    },
}

/// The sending direction of a [`Connection`].
///
/// Frames go out in the order of the calls. [`FrameWriter::queue`] and then [`FrameWriter::flush`]
/// sends many frames with one system call; [`FrameWriter::send`] sends one, after those queued.
///
/// Dropping it loses what is queued, and does not end the stream while the reader lives: see
/// [`FrameWriter::close`].
#[derive(Debug)]
pub struct FrameWriter {
    stream: Arc<UnixStream>,
    /// Bytes that are due, in order: the rest of a frame that is partly sent, then whole frames.
    queue: BytesMut,
}

impl FrameWriter {
    /// Queues a frame without descriptors. It is sent by the next `flush`, `send` or `close`.
    ///
    /// # Errors
    ///
    /// [`SendError::Empty`], [`SendError::TooLong`], [`SendError::QueueFull`]; then nothing was
    /// queued.
    pub fn queue(&mut self, bytes: &[u8]) -> Result<(), SendError> {
        let header = header(bytes)?;
        let frame_bytes = header.len() + bytes.len();
        if frame_bytes > QUEUE_BYTES_MAX - self.queue.len() {
            return Err(SendError::QueueFull {
                queued: self.queue.len(),
                got: frame_bytes,
                max: QUEUE_BYTES_MAX,
            });
        }
        self.queue.reserve(frame_bytes);
        self.queue.extend_from_slice(&header);
        self.queue.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the bytes that are queued and not yet sent, headers included.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.queue.len()
    }

    /// Sends what is queued.
    ///
    /// Cancel-safe: what was not sent stays queued.
    ///
    /// # Errors
    ///
    /// [`SendError::Io`]: the stream cannot be used any further.
    pub async fn flush(&mut self) -> Result<(), SendError> {
        while !self.queue.is_empty() {
            let Self { stream, queue } = self;
            let attempt = || send_some(stream, &[IoSlice::new(queue)], &[]);
            let sent = stream.async_io(Interest::WRITABLE, attempt).await?;
            self.queue.advance(sent);
        }
        if self.queue.capacity() > QUEUE_BYTES_KEPT {
            self.queue = BytesMut::new();
        }
        Ok(())
    }

    /// Sends one frame with `fds` attached, after what is queued.
    ///
    /// If the future is dropped, the stream is not torn: either nothing of this frame has been sent
    /// and nothing will be, or its rest is queued, and goes out before anything else. The caller is
    /// not told which; who must know queues and flushes.
    ///
    /// # Errors
    ///
    /// [`SendError::Empty`], [`SendError::TooLong`], [`SendError::TooManyDescriptors`]: nothing was
    /// sent. [`SendError::Io`]: the stream cannot be used any further.
    pub async fn send(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let header = header(bytes)?;
        if fds.len() > FRAME_FDS_MAX {
            return Err(SendError::TooManyDescriptors {
                got: fds.len(),
                max: FRAME_FDS_MAX,
            });
        }
        let fits = header.len() + bytes.len() <= QUEUE_BYTES_MAX - self.queue.len();
        if fds.is_empty() && fits {
            self.queue(bytes)?;
            return self.flush().await;
        }
        // Nothing else may be in the call that carries descriptors: see the module's two rules.
        self.flush().await?;
        let parts = [IoSlice::new(&header), IoSlice::new(bytes)];
        let attempt = || send_some(&self.stream, &parts, fds);
        let sent = self.stream.async_io(Interest::WRITABLE, attempt).await?;
        // Before the next await, so that cancelling cannot leave the frame torn.
        self.queue
            .extend_from_slice(&header[sent.min(header.len())..]);
        self.queue
            .extend_from_slice(&bytes[sent.saturating_sub(header.len())..]);
        self.flush().await
    }

    /// Sends what is queued, then ends the stream: the peer receives everything, then `None`.
    ///
    /// # Errors
    ///
    /// [`SendError::Io`].
    pub async fn close(mut self) -> Result<(), SendError> {
        self.flush().await?;
        shutdown(&*self.stream, Shutdown::Write).map_err(io::Error::from)?;
        Ok(())
    }

    fn new(stream: Arc<UnixStream>) -> Self {
        Self {
            stream,
            queue: BytesMut::new(),
        }
    }
}

/// Why a frame was not sent.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SendError {
    /// A frame must have at least one byte: the caller's bug.
    #[error("send an empty frame")]
    Empty,
    /// The socket failed.
    #[error("send a frame: {0}")]
    Io(#[from] io::Error),
    /// The queue must be flushed before more is queued.
    #[error("queue {got} bytes after {queued}, at most {max}")]
    QueueFull {
        /// Bytes in the queue.
        queued: usize,
        /// Bytes of the frame, with its header.
        got: usize,
        /// [`QUEUE_BYTES_MAX`].
        max: usize,
    },
    /// More bytes than a frame may have: the caller's bug.
    #[error("send a frame of {got} bytes, at most {max}")]
    TooLong {
        /// Bytes of the frame.
        got: usize,
        /// [`FRAME_BYTES_MAX`].
        max: u32,
    },
    /// More descriptors than a frame may carry: the caller's bug.
    #[error("send a frame with {got} descriptors, at most {max}")]
    TooManyDescriptors {
        /// Descriptors given.
        got: usize,
        /// [`FRAME_FDS_MAX`].
        max: usize,
    },
}

/// Who a peer was when it connected (or made the pair), as the kernel recorded it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PeerCredentials {
    /// Process id, as seen from here; `None` if the peer is in a process namespace that is not
    /// visible from here. It may have been reused since.
    pub pid: Option<u32>,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Returns who is at the other end of `stream`.
///
/// # Errors
///
/// If the operating system cannot say.
pub fn peer_credentials(stream: &UnixStream) -> io::Result<PeerCredentials> {
    // Not rustix's `socket_peercred`: its pid type cannot hold the kernel's 0 for "not visible".
    let credentials = stream.peer_cred()?;
    let visible = |pid: i32| u32::try_from(pid).ok().filter(|pid| *pid != 0);
    Ok(PeerCredentials {
        pid: credentials.pid().and_then(visible),
        uid: credentials.uid(),
        gid: credentials.gid(),
    })
}

/// What one read brought: bytes that are not yet in a frame, and descriptors.
#[derive(Debug)]
struct Chunk {
    buffer: Box<[u8]>,
    /// The bytes that are left are `buffer[start..end]`.
    start: usize,
    end: usize,
    /// They belong to the frame that holds byte `end - 1`.
    fds: Vec<OwnedFd>,
    #[cfg(test)]
    reads_count: usize,
}

impl Chunk {
    fn new() -> Self {
        Self {
            buffer: vec![0; CHUNK_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            fds: Vec::new(),
            #[cfg(test)]
            reads_count: 0,
        }
    }

    /// Reads once. Only when all that was read before is in frames.
    fn fill(&mut self, stream: &UnixStream) -> io::Result<Read> {
        assert!(self.is_empty(), "a read would overwrite bytes");
        assert!(
            self.fds.is_empty(),
            "a read would mix the descriptors of two frames"
        );
        let mut space = [MaybeUninit::uninit(); RECV_CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = rustix::io::retry_on_intr(|| {
            recvmsg(
                stream,
                &mut [IoSliceMut::new(&mut self.buffer)],
                &mut control,
                flags,
            )
        })?;
        #[cfg(test)]
        {
            self.reads_count += 1;
        }
        for part in control.drain() {
            // Nothing else comes to a socket that does not ask for it, nor must be closed.
            if let RecvAncillaryMessage::ScmRights(fds) = part {
                self.fds.extend(fds);
            }
        }
        self.start = 0;
        self.end = message.bytes;
        let cut_off = message.flags.contains(ReturnFlags::CTRUNC);
        Ok(Read {
            bytes: message.bytes,
            cut_off,
        })
    }

    /// Checks the descriptors that a read brought.
    fn check(&self, read: Read) -> Result<(), FrameError> {
        let got = self.fds.len();
        if got > FRAME_FDS_MAX {
            return Err(FrameError::TooManyDescriptors {
                got,
                max: FRAME_FDS_MAX,
            });
        }
        if read.cut_off {
            return Err(FrameError::DescriptorsLost { got });
        }
        Ok(())
    }

    /// Takes up to `bytes_max` bytes.
    fn take(&mut self, bytes_max: usize) -> &[u8] {
        let start = self.start;
        self.start += bytes_max.min(self.end - start);
        &self.buffer[start..self.start]
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

#[derive(Clone, Copy, Debug)]
struct Read {
    /// 0 means the end of the stream.
    bytes: usize,
    /// The kernel had more descriptors than it could pass on.
    cut_off: bool,
}

/// The frame whose bytes are arriving.
#[derive(Debug, Default)]
struct Partial {
    header: [u8; HEADER_BYTES],
    /// How many bytes of `header` have come; 0 between frames.
    header_filled: usize,
    /// What has come of the frame's bytes; grows as they come.
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
    /// The frame's first byte is in the chunk that is being taken apart.
    began_in_chunk: bool,
}

impl Partial {
    /// Moves bytes from `chunk` into the frame; returns the frame once it is whole, else `chunk` is
    /// empty afterwards.
    fn advance(&mut self, chunk: &mut Chunk) -> Result<Option<Frame>, FrameError> {
        if chunk.is_empty() {
            return Ok(None);
        }
        if self.header_filled == 0 {
            self.began_in_chunk = true;
        }
        let missing = &mut self.header[self.header_filled..];
        let bytes = chunk.take(missing.len());
        missing[..bytes.len()].copy_from_slice(bytes);
        self.header_filled += bytes.len();

        let whole = if self.header_filled == HEADER_BYTES {
            let body_bytes = self.body_bytes()?;
            self.body
                .extend_from_slice(chunk.take(body_bytes - self.body.len()));
            self.body.len() == body_bytes
        } else {
            false
        };
        // Rule 1: the descriptors go with the read's last byte.
        if chunk.is_empty() && !chunk.fds.is_empty() {
            // Rule 2: and the frame must have begun in the same read.
            if !self.began_in_chunk {
                return Err(FrameError::DescriptorsInsideFrame {
                    got: chunk.fds.len(),
                });
            }
            assert!(self.fds.is_empty(), "a frame begins in one read only");
            self.fds.append(&mut chunk.fds);
        }
        if !whole {
            assert!(chunk.is_empty(), "a frame ends only when it is whole");
            return Ok(None);
        }
        let Self { body, fds, .. } = std::mem::take(self);
        Ok(Some(Frame {
            bytes: Bytes::from(body),
            fds,
        }))
    }

    /// Decides whether the stream may end here.
    fn at_end(&self) -> Result<(), FrameError> {
        match self.header_filled {
            0 => Ok(()),
            HEADER_BYTES => {
                let got = self.body.len();
                Err(FrameError::EndInBody {
                    got,
                    want: self.body_bytes()?,
                })
            }
            got => Err(FrameError::EndInHeader {
                got,
                want: HEADER_BYTES,
            }),
        }
    }

    /// Returns the length that the header claims, if it may be.
    fn body_bytes(&self) -> Result<usize, FrameError> {
        match u32::from_le_bytes(self.header) {
            0 => Err(FrameError::Empty),
            got if got > FRAME_BYTES_MAX => Err(FrameError::TooLong {
                got,
                max: FRAME_BYTES_MAX,
            }),
            length => Ok(usize::try_from(length).expect("FRAME_BYTES_MAX fits usize")),
        }
    }
}

fn header(bytes: &[u8]) -> Result<[u8; HEADER_BYTES], SendError> {
    if bytes.is_empty() {
        return Err(SendError::Empty);
    }
    let too_long = SendError::TooLong {
        got: bytes.len(),
        max: FRAME_BYTES_MAX,
    };
    match u32::try_from(bytes.len()) {
        Ok(length) if length <= FRAME_BYTES_MAX => Ok(length.to_le_bytes()),
        Ok(_) | Err(TryFromIntError { .. }) => Err(too_long),
    }
}

/// Sends as much of `parts` as the socket takes, at least one byte, `fds` with the first.
fn send_some(
    stream: &UnixStream,
    parts: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "the space is that of FRAME_FDS_MAX descriptors");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::io::retry_on_intr(|| sendmsg(stream, parts, &mut control, flags))?;
    assert!(sent > 0, "a socket that takes nothing says so");
    Ok(sent)
}

const HEADER_BYTES: usize = size_of::<u32>();

/// What one read asks for.
const CHUNK_BYTES: usize = 64 * 1024;

/// Memory that an empty queue may keep for the next frames.
const QUEUE_BYTES_KEPT: usize = 256 * 1024;

/// One more than is allowed, to tell a frame with too many from a process that can open no more.
const RECV_CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(FRAME_FDS_MAX + 1));

const _: () = assert!(FRAME_BYTES_MAX as usize + HEADER_BYTES <= QUEUE_BYTES_MAX);

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{PipeReader, PipeWriter, Read as _, Write as _, pipe};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream as RawStream;
    use std::time::Duration;

    use rustix::fs::{OFlags, fcntl_getfl};
    use rustix::io::{FdFlags, fcntl_getfd};
    use tokio::time::{sleep, timeout};

    use super::*;

    type Halves = (FrameReader, FrameWriter);

    fn pair() -> (Halves, Halves) {
        let (left, right) = UnixStream::pair().unwrap();
        (
            Connection::new(left).split(),
            Connection::new(right).split(),
        )
    }

    /// A reader, and its peer as a bare socket that sends what it likes.
    fn hostile() -> (FrameReader, RawStream) {
        let (ours, theirs) = RawStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let (reader, _) = Connection::new(UnixStream::from_std(ours).unwrap()).split();
        (reader, theirs)
    }

    /// What a peer that sends `bytes` and leaves makes of a reader.
    async fn error_after(bytes: &[u8]) -> FrameError {
        let (mut reader, mut peer) = hostile();
        peer.write_all(bytes).unwrap();
        drop(peer);
        reader.recv().await.unwrap_err()
    }

    fn send_raw(peer: &RawStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let sent = sendmsg(
            peer,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::empty(),
        )
        .unwrap();
        assert_eq!(sent, bytes.len());
    }

    fn pipes(count: usize) -> (Vec<PipeReader>, Vec<PipeWriter>) {
        (0..count).map(|_| pipe().unwrap()).unzip()
    }

    /// Holds once every copy of the pipes' writing ends is closed, wherever it was.
    fn assert_closed(readers: Vec<PipeReader>) {
        for mut reader in readers {
            let mut rest = Vec::new();
            assert_eq!(reader.read_to_end(&mut rest).unwrap(), 0);
        }
    }

    async fn recv(reader: &mut FrameReader) -> Frame {
        let received = timeout(Duration::from_secs(20), reader.recv()).await;
        received
            .expect("a frame is due")
            .unwrap()
            .expect("the stream goes on")
    }

    fn pattern(bytes: usize) -> Vec<u8> {
        (0..bytes)
            .map(|i| (i * 2_654_435_761).to_le_bytes()[2])
            .collect()
    }

    #[tokio::test]
    async fn frames_arrive_whole_in_order_and_then_the_end() {
        let ((mut reader, _), (_, mut writer)) = pair();
        let sizes = [
            1,
            3,
            4,
            5,
            65_531,
            65_532,
            65_533,
            1_000_000,
            FRAME_BYTES_MAX as usize,
            7,
        ];
        let sending = async move {
            for size in sizes {
                writer.send(&pattern(size), &[]).await.unwrap();
            }
            writer.close().await.unwrap();
        };
        let receiving = async {
            for size in sizes {
                let frame = recv(&mut reader).await;
                assert_eq!(frame.bytes.len(), size);
                assert_eq!(frame.bytes, pattern(size));
                assert!(frame.fds.is_empty());
            }
            assert!(reader.recv().await.unwrap().is_none());
            assert!(
                reader.recv().await.unwrap().is_none(),
                "the end stays the end"
            );
        };
        tokio::join!(sending, receiving);
    }

    #[tokio::test]
    async fn ten_thousand_small_frames_cost_few_system_calls() {
        const FRAMES: u32 = 10_000;
        let ((mut reader, _), (_, mut writer)) = pair();
        for i in 0..FRAMES {
            writer.queue(&i.to_le_bytes()).unwrap();
        }
        let receiving = async {
            for i in 0..FRAMES {
                assert_eq!(recv(&mut reader).await.bytes, i.to_le_bytes().as_slice());
            }
        };
        let (flushed, ()) = tokio::join!(writer.flush(), receiving);
        flushed.unwrap();
        assert_eq!(writer.queued_bytes(), 0);
        let reads = reader.chunk.reads_count;
        assert!(reads < 40, "{reads} reads for 80,000 bytes");
    }

    #[tokio::test]
    async fn descriptors_stay_with_their_frame_among_many() {
        // Short frames that share reads, one that takes several, with and without descriptors.
        let body_bytes = |k: u8| if k == 33 { 300_000 } else { usize::from(k) + 1 };
        let fds_count = |k: u8| {
            if k.is_multiple_of(3) {
                1 + usize::from(k) % FRAME_FDS_MAX
            } else {
                0
            }
        };
        let ((mut reader, _), (_, mut writer)) = pair();
        let sending = async {
            for k in 0..60 {
                let bytes = vec![k; body_bytes(k)];
                let files: Vec<File> = (0..fds_count(k)).map(|i| numbered(k, i)).collect();
                let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
                if fds.is_empty() {
                    writer.queue(&bytes).unwrap();
                } else {
                    writer.send(&bytes, &fds).await.unwrap();
                }
            }
            writer.flush().await.unwrap();
        };
        let receiving = async {
            for k in 0..60 {
                let frame = recv(&mut reader).await;
                assert!(frame.bytes == vec![k; body_bytes(k)], "frame {k}");
                assert_eq!(frame.fds.len(), fds_count(k), "frame {k}");
                for (i, fd) in frame.fds.into_iter().enumerate() {
                    assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
                    assert_number(fd, k, i);
                }
            }
        };
        tokio::join!(sending, receiving);
    }

    /// An open file that says which frame it belongs to.
    fn numbered(frame: u8, index: usize) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[frame, index.to_le_bytes()[0]]).unwrap();
        file
    }

    fn assert_number(fd: OwnedFd, frame: u8, index: usize) {
        let mut got = [0; 2];
        std::os::unix::fs::FileExt::read_exact_at(&File::from(fd), &mut got, 0).unwrap();
        assert_eq!(got, [frame, index.to_le_bytes()[0]]);
    }

    #[tokio::test]
    async fn descriptors_behind_plain_bytes_in_one_read_belong_to_the_last_frame() {
        // M: the kernel's rule that the module depends on, stated on bare sockets.
        let (mut reader, mut peer) = hostile();
        let (_pipe_reader, pipe_writer) = pipe().unwrap();
        peer.write_all(b"\x01\0\0\0a\x01\0\0\0b").unwrap();
        send_raw(&peer, b"\x01\0\0\0c", &[pipe_writer.as_fd()]);
        peer.write_all(b"\x01\0\0\0d").unwrap();
        for (want, fds_count) in [(b"a", 0), (b"b", 0), (b"c", 1), (b"d", 0)] {
            let frame = recv(&mut reader).await;
            assert_eq!(
                (&frame.bytes[..], frame.fds.len()),
                (want.as_slice(), fds_count)
            );
        }
        let reads = reader.chunk.reads_count;
        assert_eq!(reads, 2, "the descriptors are a barrier behind, not before");
    }

    #[tokio::test]
    async fn empty_and_overlong_frames_are_refused_by_their_header() {
        assert!(matches!(error_after(&[0; 4]).await, FrameError::Empty));
        for length in [FRAME_BYTES_MAX + 1, u32::MAX] {
            let error = error_after(&length.to_le_bytes()).await;
            assert!(
                matches!(error, FrameError::TooLong { got, .. } if got == length),
                "{error}"
            );
        }
    }

    #[tokio::test]
    async fn end_inside_a_frame_is_an_error() {
        let error = error_after(&[9, 0]).await;
        assert!(
            matches!(error, FrameError::EndInHeader { got: 2, want: 4 }),
            "{error}"
        );
        let error = error_after(&[9, 0, 0, 0]).await;
        assert!(
            matches!(error, FrameError::EndInBody { got: 0, want: 9 }),
            "{error}"
        );
        let error = error_after(b"\x09\0\0\0abc").await;
        assert!(
            matches!(error, FrameError::EndInBody { got: 3, want: 9 }),
            "{error}"
        );
    }

    #[tokio::test]
    async fn claimed_length_allocates_nothing() {
        let (mut reader, mut peer) = hostile();
        peer.write_all(&FRAME_BYTES_MAX.to_le_bytes()).unwrap();
        peer.write_all(b"ten bytes.").unwrap();
        let received = timeout(Duration::from_millis(20), reader.recv()).await;
        assert!(received.is_err(), "the frame is not whole");
        assert_eq!(reader.partial.body.len(), 10);
        assert!(reader.partial.body.capacity() <= 64);
    }

    #[tokio::test]
    async fn too_many_descriptors_are_closed_and_refused() {
        for count in [FRAME_FDS_MAX + 1, 64] {
            let (mut reader, peer) = hostile();
            let (ends, others) = pipes(count);
            let fds: Vec<_> = others.iter().map(AsFd::as_fd).collect();
            send_raw(&peer, b"\x01\0\0\0a", &fds);
            let error = reader.recv().await.unwrap_err();
            assert!(
                matches!(error, FrameError::TooManyDescriptors { got: 5.., .. }),
                "{error}"
            );
            drop(others);
            assert_closed(ends);
            assert!(matches!(reader.recv().await, Err(FrameError::AfterError)));
        }
    }

    #[test]
    fn descriptors_that_the_kernel_could_not_pass_on_are_an_error() {
        // As when this process may open no more files, which a test cannot do to its neighbours.
        let mut chunk = Chunk::new();
        chunk.fds.push(pipe().unwrap().0.into());
        let error = chunk
            .check(Read {
                bytes: 5,
                cut_off: true,
            })
            .unwrap_err();
        assert!(
            matches!(error, FrameError::DescriptorsLost { got: 1 }),
            "{error}"
        );
    }

    #[tokio::test]
    async fn descriptors_inside_a_frame_are_closed_and_refused() {
        let (mut reader, mut peer) = hostile();
        let (ends, others) = pipes(2);
        peer.write_all(b"\x09\0\0\0abc").unwrap();
        assert!(
            timeout(Duration::from_millis(20), reader.recv())
                .await
                .is_err()
        );
        let fds: Vec<_> = others.iter().map(AsFd::as_fd).collect();
        send_raw(&peer, b"defghi", &fds);
        let error = reader.recv().await.unwrap_err();
        assert!(
            matches!(error, FrameError::DescriptorsInsideFrame { got: 2 }),
            "{error}"
        );
        drop(others);
        assert_closed(ends);
    }

    #[tokio::test]
    async fn descriptors_of_a_frame_that_never_ends_are_closed() {
        let (mut reader, peer) = hostile();
        let (ends, others) = pipes(1);
        send_raw(&peer, b"\x09\0\0\0abc", &[others[0].as_fd()]);
        drop(peer);
        let error = reader.recv().await.unwrap_err();
        assert!(matches!(error, FrameError::EndInBody { .. }), "{error}");
        drop(others);
        assert_closed(ends);
    }

    #[tokio::test]
    async fn any_bytes_give_frames_or_an_error() {
        let mut state = 1_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..2_000 {
            let (mut reader, mut peer) = hostile();
            let length = random() % 200;
            // Small bytes, so that some lengths are plausible.
            let mask = if random() % 2 == 0 { 0xFF } else { 0x03 };
            let bytes: Vec<u8> = (0..length)
                .map(|_| random().to_le_bytes()[0] & mask)
                .collect();
            peer.write_all(&bytes).unwrap();
            drop(peer);
            let mut taken = 0;
            let clean_end = loop {
                match reader.recv().await {
                    Ok(Some(frame)) => taken += HEADER_BYTES + frame.bytes.len(),
                    Ok(None) => break true,
                    Err(FrameError::Io(error)) => panic!("{error}"),
                    Err(_) => break false,
                }
            };
            assert!(taken <= bytes.len(), "no byte is made up");
            assert_eq!(
                clean_end,
                taken == bytes.len(),
                "no byte is skipped: {bytes:?}"
            );
        }
    }

    #[tokio::test]
    async fn cancelled_receive_loses_nothing() {
        let (mut reader, mut peer) = hostile();
        let (_pipe_reader, pipe_writer) = pipe().unwrap();
        let sending = async {
            for round in 0..20_u8 {
                send_raw(&peer, &[3], &[pipe_writer.as_fd()]);
                for byte in [0, 0, 0, round, round, round] {
                    sleep(Duration::from_micros(300)).await;
                    peer.write_all(&[byte]).unwrap();
                }
            }
        };
        let receiving = async {
            let mut received = 0;
            let mut cancelled = 0;
            while received < 20 {
                tokio::select! {
                    biased;
                    () = sleep(Duration::from_micros(100)) => cancelled += 1,
                    frame = reader.recv() => {
                        let frame = frame.unwrap().unwrap();
                        assert_eq!(&frame.bytes[..], [received; 3]);
                        assert_eq!(frame.fds.len(), 1);
                        received += 1;
                    }
                }
            }
            assert!(cancelled > 0, "the test must cancel to test");
        };
        tokio::join!(sending, receiving);
    }

    #[tokio::test]
    async fn cancelled_send_leaves_no_torn_frame() {
        let ((mut reader, _), (_, mut writer)) = pair();
        let (_pipe_reader, pipe_writer) = pipe().unwrap();
        let long = pattern(3_000_000);
        for fds in [&[][..], &[pipe_writer.as_fd()]] {
            // Nobody reads yet, and the socket holds far less.
            let sending = timeout(Duration::from_millis(20), writer.send(&long, fds));
            assert!(sending.await.is_err(), "the send must be cancelled to test");
            assert!(writer.queued_bytes() > 0);
            let receiving = async {
                let frame = recv(&mut reader).await;
                assert!(frame.bytes == long, "all bytes, in order");
                assert_eq!(frame.fds.len(), fds.len());
                assert_eq!(&recv(&mut reader).await.bytes[..], b"after");
            };
            let (sent, ()) = tokio::join!(writer.send(b"after", &[]), receiving);
            sent.unwrap();
        }
    }

    #[tokio::test]
    async fn writer_refuses_what_the_reader_would() {
        let ((mut reader, _), (_, mut writer)) = pair();
        let (_pipe_reader, pipe_writer) = pipe().unwrap();
        let long = vec![0; FRAME_BYTES_MAX as usize + 1];
        let fds = [pipe_writer.as_fd(); FRAME_FDS_MAX + 1];
        assert!(matches!(writer.send(b"", &[]).await, Err(SendError::Empty)));
        assert!(matches!(writer.queue(b""), Err(SendError::Empty)));
        assert!(matches!(
            writer.send(&long, &[]).await,
            Err(SendError::TooLong { .. })
        ));
        let error = writer.send(b"x", &fds).await.unwrap_err();
        assert!(
            matches!(error, SendError::TooManyDescriptors { got: 5, max: 4 }),
            "{error}"
        );
        assert_eq!(writer.queued_bytes(), 0, "nothing was sent or queued");

        writer.send(b"fine", &fds[..FRAME_FDS_MAX]).await.unwrap();
        let frame = recv(&mut reader).await;
        assert_eq!(
            (&frame.bytes[..], frame.fds.len()),
            (b"fine".as_slice(), FRAME_FDS_MAX)
        );
    }

    #[tokio::test]
    async fn queue_has_a_bound_and_send_flushes_first() {
        let ((mut reader, _), (_, mut writer)) = pair();
        let frame = vec![7; FRAME_BYTES_MAX as usize];
        writer.queue(&frame).unwrap();
        let error = writer.queue(&frame).unwrap_err();
        assert!(matches!(error, SendError::QueueFull { .. }), "{error}");
        let receiving = async { (recv(&mut reader).await, recv(&mut reader).await) };
        let (sent, (first, second)) = tokio::join!(writer.send(&frame, &[]), receiving);
        sent.unwrap();
        assert!(first.bytes == frame && second.bytes == frame);
        assert!(
            writer.queue.capacity() <= QUEUE_BYTES_KEPT,
            "a long frame's memory is not kept"
        );
    }

    #[tokio::test]
    async fn send_to_a_peer_that_left_is_an_error() {
        let ((reader, other), (_, mut writer)) = pair();
        drop((reader, other));
        assert!(matches!(
            writer.send(b"x", &[]).await,
            Err(SendError::Io(_))
        ));
    }

    #[tokio::test]
    async fn peer_credentials_are_the_peers() {
        let (left, _right) = UnixStream::pair().unwrap();
        let want = PeerCredentials {
            pid: Some(std::process::id()),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        };
        assert_eq!(Connection::new(left).peer_credentials().unwrap(), want);
    }

    #[tokio::test]
    async fn blocking_file_description_does_not_block_the_reader() {
        // O_NONBLOCK belongs to whoever shares the open file; the calls do not rely on it.
        let (ours, mut peer) = RawStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let twin = ours.try_clone().unwrap();
        let (mut reader, _) = Connection::new(UnixStream::from_std(ours).unwrap()).split();
        twin.set_nonblocking(false).unwrap();
        assert!(!fcntl_getfl(&twin).unwrap().contains(OFlags::NONBLOCK));
        peer.write_all(b"\x01\0\0\0a").unwrap();
        assert_eq!(&recv(&mut reader).await.bytes[..], b"a");
        assert!(
            timeout(Duration::from_millis(20), reader.recv())
                .await
                .is_err()
        );
    }

    #[test]
    fn futures_can_move_between_threads() {
        fn is_send<T: Send>(_: T) {}
        let _ = |reader: &'static mut FrameReader, writer: &'static mut FrameWriter| {
            is_send(reader.recv());
            is_send(writer.send(&[1], &[]));
        };
    }
}
