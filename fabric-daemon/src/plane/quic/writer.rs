//! The source's side: one task for each attempt of a transfer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use fabric_proto::ids::{LinkId, Secret};
use fabric_proto::pool::PageRun;
use quinn::{Connection, ConnectionError, SendStream, WriteError};
use thiserror::Error;
use tokio::sync::Notify;
use tracing::{debug, error, info};

use super::code;
use super::codec::{Encoder, RUN_HEADER_BYTES, encode_header};
use crate::plane::faults::Faults;
use crate::plane::lock;
use crate::plane::registry::Registration;
use crate::plane::source::Source;

/// What a writer has still to do. Filled by `submit`; how full is bounded by the machine, which
/// counts every write that was not answered.
#[derive(Debug)]
pub(super) struct Queue {
    jobs: Mutex<Jobs>,
    /// There is something to do.
    ready: Notify,
    /// The end is `Stop`.
    stop: Notify,
}

#[derive(Debug, Default)]
struct Jobs {
    runs: VecDeque<PageRun>,
    end: Option<End>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum End {
    /// After the runs.
    Drain,
    /// Now.
    Stop,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            jobs: Mutex::default(),
            ready: Notify::new(),
            stop: Notify::new(),
        }
    }

    /// Queues a run. Pages that continue the run before become part of it.
    pub(super) fn write(&self, run: PageRun) {
        let mut jobs = lock(&self.jobs);
        if jobs.end.is_some() {
            return;
        }
        let joined = jobs.runs.back_mut().is_some_and(|last| join(last, run));
        if !joined {
            jobs.runs.push_back(run);
        }
        drop(jobs);
        self.ready.notify_one();
    }

    pub(super) fn drain(&self) {
        let mut jobs = lock(&self.jobs);
        jobs.end = jobs.end.or(Some(End::Drain));
        drop(jobs);
        self.ready.notify_one();
    }

    pub(super) fn stop(&self) {
        let mut jobs = lock(&self.jobs);
        jobs.end = Some(End::Stop);
        jobs.runs.clear();
        drop(jobs);
        self.stop.notify_one();
    }

    /// Waits for something to do, and moves the runs to `runs`, which is empty. `false`: there will
    /// be none.
    async fn next(&self, runs: &mut VecDeque<PageRun>) -> bool {
        loop {
            {
                let mut jobs = lock(&self.jobs);
                std::mem::swap(&mut jobs.runs, runs);
                if !runs.is_empty() {
                    return true;
                }
                if jobs.end.is_some() {
                    return false;
                }
            }
            self.ready.notified().await;
        }
    }
}

/// Appends `run` to `last`, if it continues it.
fn join(last: &mut PageRun, run: PageRun) -> bool {
    let continues =
        last.region == run.region && last.first.checked_add(last.count) == Some(run.first);
    match last.count.checked_add(run.count) {
        Some(count) if continues => {
            last.count = count;
            true
        }
        Some(_) | None => false,
    }
}

/// One attempt of a transfer, on its way out.
#[derive(Debug)]
pub(super) struct Writer {
    // Before `source`: the writer is forgotten, then comes the proof.
    pub(super) _registration: Registration<Handle>,
    pub(super) source: Source,
    pub(super) queue: Arc<Queue>,
    pub(super) connection: Connection,
    pub(super) key: Secret,
    pub(super) faults: Arc<Faults>,
}

impl Writer {
    /// Sends until the drain, a stop or an error. The drop of `source` at the end is the proof that
    /// this attempt reads the pool no more: the bytes on their way are copies, in quinn's memory.
    pub(super) async fn run(self) {
        let opened = tokio::select! {
            biased;
            () = self.queue.stop.notified() => return,
            opened = self.connection.open_uni() => opened,
        };
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => return self.fail(&WriterError::Open(error)),
        };
        let mut between_runs = false;
        let ended = tokio::select! {
            biased;
            () = self.queue.stop.notified() => Ok(End::Stop),
            ended = self.send(&mut stream, &mut between_runs) => ended,
        };
        match ended {
            // In band either way. At the end of a run it is a drain; elsewhere what has been sent
            // of the run is of no use, and the destination fences.
            Ok(End::Drain | End::Stop) if between_runs => {
                stream
                    .finish()
                    .unwrap_or_else(|_| debug!("stream is closed already"));
            }
            Ok(End::Drain | End::Stop) => reset(stream, code::STOPPED),
            Err(error) => {
                reset(stream, code::FAILED);
                self.fail(&error);
            }
        }
    }

    async fn send(
        &self,
        stream: &mut SendStream,
        between_runs: &mut bool,
    ) -> Result<End, WriterError> {
        let header = encode_header(self.source.grant(), &self.key);
        stream.write_all(&header).await?;
        *between_runs = true;
        let mut runs = VecDeque::new();
        let mut encoder = Encoder::default();
        let mut buffers = Buffers::default();
        let mut sent = 0;
        while self.queue.next(&mut runs).await {
            if let Some(run) = runs.iter().find(|run| !self.source.area.holds(**run)) {
                return Err(WriterError::Run(*run));
            }
            *between_runs = false;
            while !(runs.is_empty() && encoder.is_between_runs()) {
                let room = self.faults.room(sent);
                if room == 0 {
                    std::future::pending::<()>().await;
                }
                let mut buffer = buffers.take();
                let target = &mut buffer[..batch_bytes(room)];
                let filled = encoder.fill(&mut runs, &self.source, target, &self.faults);
                stream
                    .write_chunk(buffers.lend(buffer, filled.bytes))
                    .await?;
                self.source.written(filled.page_bytes);
                sent += filled.page_bytes;
            }
            *between_runs = true;
        }
        Ok(End::Drain)
    }

    fn fail(self, error: &WriterError) {
        let (transfer, grant) = (self.source.transfer(), self.source.grant());
        match error {
            WriterError::Run(_) => error!(%transfer, %grant, "writer failed: {error}"),
            WriterError::Open(_) | WriterError::Write(_) => {
                info!(%transfer, %grant, "writer failed: {error}");
            }
        }
        self.source.fail();
    }
}

fn reset(mut stream: SendStream, code: u32) {
    stream
        .reset(code.into())
        .unwrap_or_else(|_| debug!("stream is closed already"));
}

#[derive(Debug, Error)]
enum WriterError {
    #[error("open a stream: {0}")]
    Open(#[from] ConnectionError),
    #[error("the machine asked for {0:?}, which is not the transfer's")]
    Run(PageRun),
    #[error("write to a stream: {0}")]
    Write(#[from] WriteError),
}

/// A writer as the plane knows it.
#[derive(Debug)]
pub(super) struct Handle {
    pub(super) link: LinkId,
    pub(super) queue: Arc<Queue>,
}

/// Buffers that quinn lets go once their bytes are acknowledged. Fresh ones cost page faults.
#[derive(Debug, Default)]
struct Buffers {
    lent: VecDeque<Bytes>,
}

impl Buffers {
    fn take(&mut self) -> BytesMut {
        match self.lent.pop_front().map(Bytes::try_into_mut) {
            Some(Ok(buffer)) => return buffer,
            Some(Err(lent)) if self.lent.len() < LENT_BUFFERS_MAX => self.lent.push_front(lent),
            // The oldest is still out, and so are enough of the others: forget it.
            Some(Err(_)) | None => {}
        }
        BytesMut::zeroed(BATCH_BYTES)
    }

    /// Makes the first `bytes` bytes ready to send, and remembers the buffer.
    fn lend(&mut self, buffer: BytesMut, bytes: usize) -> Bytes {
        let whole = buffer.freeze();
        let lent = whole.slice(..bytes);
        self.lent.push_back(whole);
        lent
    }
}

/// How much of a buffer to fill, where pages' bytes are to be `room` at most, or a few more.
fn batch_bytes(room: u64) -> usize {
    let room = usize::try_from(room).unwrap_or(usize::MAX);
    room.saturating_add(RUN_HEADER_BYTES).min(BATCH_BYTES)
}

/// What is read out of the pool, and handed to quinn, at a time.
const BATCH_BYTES: usize = 256 * 1024;

/// As many as fill quinn's send window in its usual size.
const LENT_BUFFERS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_continue_each_other_are_joined() {
        let run = |region, first, count| PageRun {
            region,
            first,
            count,
        };
        let queue = Queue::new();
        for queued in [run(0, 0, 2), run(0, 2, 1), run(1, 3, 1), run(1, 5, 1)] {
            queue.write(queued);
        }
        let runs = &lock(&queue.jobs).runs;
        assert_eq!(*runs, [run(0, 0, 3), run(1, 3, 1), run(1, 5, 1)]);
    }
}
