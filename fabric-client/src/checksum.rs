//! Checksums of many pages: here, or on threads of their own where they are many bytes.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::vec;

use fabric_proto::pool::PageRun;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinError, JoinHandle};

use crate::lease::Lease;

/// Fewer bytes are checksummed where they are asked for: a hand-over would take longer.
const INLINE_BYTES_MAX: u64 = 1 << 20;
/// Bytes that a thread checksums before it takes its next share.
const SHARE_BYTES: u64 = 4 << 20;

/// Reads a lease's pages. It keeps the lease: no slot is given to somebody else while it is read.
///
/// Whoever makes one sees to it that nobody writes these pages: they wait for their verification,
/// and no owner has them yet, or they are sealed.
#[derive(Clone)]
pub(crate) struct PageReader {
    pub(crate) lease: Arc<Lease>,
    /// Turns true, once, when nobody wants the checksums any more. A hint: it ends the reading
    /// sooner. What counts is decided elsewhere, by `Receive`'s record and the end of `reading`.
    pub(crate) stop: Arc<AtomicBool>,
    /// Tells, by its end, that nobody reads any more.
    #[expect(dead_code, reason = "it is dropped, and that is what it says")]
    pub(crate) reading: Option<mpsc::Sender<Infallible>>,
}

/// Stops the threads when the future that waits for them is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // Relaxed: it carries nothing but itself, and late is early enough.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The CRC-32C of every page of some runs (positions of the lease), in order, share after share:
/// what is to be done with the first need not wait for the last.
///
/// Dropping it stops the threads at their next page; they keep the lease until then.
pub(crate) struct Shares {
    workers: Arc<Semaphore>,
    reader: PageReader,
    /// Whether there are so few bytes that no thread is worth it.
    inline: bool,
    next: Option<Vec<PageRun>>,
    waiting: vec::IntoIter<Vec<PageRun>>,
    running: VecDeque<JoinHandle<Option<Vec<u32>>>>,
    stop: StopOnDrop,
}

/// Nobody wants the checksums any more, or the runtime is stopping.
pub(crate) struct Stopped;

impl Shares {
    pub(crate) fn new(workers: &Arc<Semaphore>, reader: PageReader, runs: &[PageRun]) -> Self {
        let page_bytes = u64::from(reader.lease.pool.spec.layout.page_bytes);
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let mut waiting = share(runs, (SHARE_BYTES / page_bytes).max(1)).into_iter();
        Self {
            workers: Arc::clone(workers),
            inline: pages * page_bytes <= INLINE_BYTES_MAX,
            next: waiting.next(),
            waiting,
            running: VecDeque::new(),
            stop: StopOnDrop(Arc::clone(&reader.stop)),
            reader,
        }
    }

    /// Those of the next share; `None` after the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<u32>>, Stopped> {
        if self.inline {
            let share = self.next.take();
            self.next = self.waiting.next();
            let crcs = share.map(|share| self.reader.checksums(&share).ok_or(Stopped));
            return crcs.transpose();
        }
        loop {
            tokio::select! {
                // In turn with every other delivery of the session, so that none waits for the
                // whole of a long one, and never more threads than processors.
                worker = Arc::clone(&self.workers).acquire_owned(), if self.next.is_some() => {
                    self.start(worker.map_err(|_| Stopped)?);
                }
                done = first(&mut self.running), if !self.running.is_empty() => {
                    self.running.pop_front();
                    return match done {
                        Ok(crcs) => crcs.map(Some).ok_or(Stopped),
                        Err(error) if error.is_cancelled() => Err(Stopped),
                        Err(error) => std::panic::resume_unwind(error.into_panic()),
                    };
                }
                else => break,
            }
        }
        // Relaxed: the checksums came through the joins above; a stop that is not seen here is
        // found in the record, under its lock.
        let is_stopped = self.stop.0.load(Ordering::Relaxed);
        if is_stopped { Err(Stopped) } else { Ok(None) }
    }

    fn start(&mut self, worker: OwnedSemaphorePermit) {
        let Some(share) = self.next.take() else {
            return;
        };
        self.next = self.waiting.next();
        let reader = self.reader.clone();
        self.running.push_back(tokio::task::spawn_blocking(move || {
            let crcs = reader.checksums(&share);
            drop(worker);
            crcs
        }));
    }
}

async fn first<T>(running: &mut VecDeque<JoinHandle<T>>) -> Result<T, JoinError> {
    let first = running.front_mut();
    first.expect("the caller has seen that there is one").await
}

impl PageReader {
    /// Checksums pages on this thread. `None` where it was stopped.
    pub(crate) fn checksums(&self, runs: &[PageRun]) -> Option<Vec<u32>> {
        let mut crcs = Vec::new();
        for run in runs {
            for position in run.first..run.first + run.count {
                // Relaxed: nothing is read through it, and a page too many does no harm.
                if self.stop.load(Ordering::Relaxed) {
                    return None;
                }
                let page = crate::pages::page(&self.lease, run.region, position);
                crcs.push(fabric_ipc::crc32c(page));
            }
        }
        Some(crcs)
    }
}

/// Splits runs into shares of at most `pages` pages each.
fn share(runs: &[PageRun], pages: u64) -> Vec<Vec<PageRun>> {
    let mut shares = vec![Vec::new()];
    let mut room = pages;
    for run in runs {
        let mut rest = *run;
        while rest.count > 0 {
            if room == 0 {
                shares.push(Vec::new());
                room = pages;
            }
            let count = rest.count.min(u32::try_from(room).unwrap_or(u32::MAX));
            let last = shares.last_mut().expect("there is at least one");
            last.push(PageRun { count, ..rest });
            rest.first += count;
            rest.count -= count;
            room -= u64::from(count);
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_every_page_once() {
        let run = |region, first, count| PageRun {
            region,
            first,
            count,
        };
        let runs = [run(0, 0, 5), run(1, 2, 1), run(2, 0, 4)];
        let shares = share(&runs, 4);
        let expected = [
            vec![run(0, 0, 4)],
            vec![run(0, 4, 1), run(1, 2, 1), run(2, 0, 2)],
            vec![run(2, 2, 2)],
        ];
        assert_eq!(shares, expected);
    }
}
