//! The decode side: a lease that another engine fills, its verification, and its delivery.
//!
//! ```text
//!  Waiting ─Expect…, Verify─▶ Verifying ─all match──▶ Verified ─Delivered─▶ Delivered
//!              ▲                  └─some do not─▶ (reported) ─┐
//!              └───────────── sent again: Verify, attempt + 1 ┘
//!  from any: another outcome, or the session's end ─▶ Undelivered
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric_proto::ids::SlotRef;
use fabric_proto::outcome::{Failure, Outcome};
use fabric_proto::pool::{PageRef, PageRun};
use fabric_proto::wire::{AbortPolicy, Checksums, ToDaemon};
use tokio::sync::watch;

use crate::lease::Lease;
use crate::session::Session;

/// A verification of fewer bytes is done where its message is read; a hand-over costs more.
const INLINE_BYTES_MAX: u64 = 1 << 20;

/// A lease whose pages are to arrive. There is no way to a byte of it but [`ReceiveLease::delivered`].
#[must_use = "dropping a lease ends it"]
pub struct ReceiveLease {
    session: Session,
    receive: Arc<Receive>,
    offer: Bytes,
}

/// How a delivery went.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DeliveryStats {
    /// Pages that were verified.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How often pages were sent: 1 where none was corrupt.
    pub attempts: u32,
    /// Pages that did not match and were sent again, over all attempts.
    pub corrupt: u64,
    /// From the lease to the delivery.
    pub elapsed: Duration,
}

/// Pages that were delivered: every one was verified for this lease after its writes had stopped.
/// Dropping it ends the lease.
#[must_use = "dropping a delivery ends its lease"]
pub struct Delivered {
    session: Session,
    lease: Arc<Lease>,
    payload: Bytes,
    stats: DeliveryStats,
}

/// A delivery that did not come about. Its lease has ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not delivered: {outcome}")]
pub struct Undelivered {
    /// `Rejected`, `Aborted` or `Failed`.
    pub outcome: Outcome,
}

/// What the session knows of a lease that receives.
pub(crate) struct Receive {
    lease: Arc<Lease>,
    begin: Instant,
    outcome: watch::Sender<Option<Outcome>>,
    record: Mutex<Record>,
}

/// The record of the verification.
struct Record {
    /// CRC-32C by region and position; `None`: the daemon did not say.
    expected: Vec<Option<u32>>,
    /// Pages that matched when they were last verified.
    matches: Vec<bool>,
    attempt: u32,
    corrupt: u64,
    payload: Bytes,
}

impl ReceiveLease {
    pub(crate) fn new(session: Session, receive: Arc<Receive>, offer: Bytes) -> Self {
        Self {
            session,
            receive,
            offer,
        }
    }

    /// What the prefill side needs to write here: opaque, signed, good for one transfer.
    #[must_use]
    pub fn offer(&self) -> Bytes {
        self.offer.clone()
    }

    /// The slots, in the order of the request's tokens.
    #[must_use]
    pub fn slots(&self) -> &[SlotRef] {
        &self.receive.lease.slots
    }

    /// Waits for the outcome.
    ///
    /// Not safe to cancel without losing the lease: it is ended then.
    ///
    /// # Errors
    ///
    /// [`Undelivered`], with any outcome but `Delivered`. The lease has ended then.
    // S3: the one way from a lease to its bytes.
    pub async fn delivered(self) -> Result<Delivered, Undelivered> {
        let mut watched = self.receive.outcome.subscribe();
        let outcome = match watched.wait_for(Option::is_some).await {
            Ok(outcome) => *outcome,
            // `self` has the sender.
            Err(_) => None,
        };
        match outcome {
            Some(Outcome::Delivered) => Ok(self.deliver()),
            Some(outcome) => Err(Undelivered { outcome }),
            None => Err(Undelivered {
                outcome: Outcome::Failed(Failure::DaemonGone),
            }),
        }
    }

    /// Ends the lease, and says what becomes of its transfer. Dropping it instead leaves that to
    /// the daemon's configuration.
    pub fn abort(self, policy: AbortPolicy) {
        self.receive.lease.set_abort(policy);
    }

    fn deliver(self) -> Delivered {
        let record = self.receive.record();
        // S2, S10: our own record, and not the daemon's word alone.
        assert!(record.is_verified(), "every page was verified here");
        let pages = record.matches.len() as u64;
        let stats = DeliveryStats {
            pages,
            bytes: pages * u64::from(self.receive.lease.pool.spec.layout.page_bytes),
            attempts: record.attempt,
            corrupt: record.corrupt,
            elapsed: self.receive.begin.elapsed(),
        };
        let payload = record.payload.clone();
        drop(record);
        let lease = Arc::clone(&self.receive.lease);
        Delivered {
            session: self.session.clone(),
            lease,
            payload,
            stats,
        }
    }
}

impl Drop for Receive {
    fn drop(&mut self) {
        // Messages that are still on their way are about nothing any more.
        self.lease.pool.session.forget_receive(self.lease.id);
    }
}

impl Delivered {
    /// The slots, in the order of the request's tokens.
    #[must_use]
    pub fn slots(&self) -> &[SlotRef] {
        &self.lease.slots
    }

    /// What the prefill side sent along.
    #[must_use]
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// How the delivery went.
    #[must_use]
    pub fn stats(&self) -> DeliveryStats {
        self.stats
    }

    /// A page: the slot at `position` of the lease, within `region`.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the lease.
    #[must_use]
    pub fn page(&self, region: u16, position: u32) -> &[u8] {
        crate::pages::page(&self.lease, region, position)
    }

    /// A page to append to: after delivery its holder owns it.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the lease.
    #[must_use]
    pub fn page_mut(&mut self, region: u16, position: u32) -> &mut [u8] {
        crate::pages::page_mut(&mut self.lease, region, position)
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Ends the lease.
    pub fn end(self) {}
}

impl Receive {
    pub(crate) fn new(lease: Arc<Lease>) -> Self {
        let pages = usize::from(lease.pool.spec.layout.regions) * lease.slots.len();
        let record = Record {
            expected: vec![None; pages],
            matches: vec![false; pages],
            attempt: 0,
            corrupt: 0,
            payload: Bytes::new(),
        };
        let outcome = watch::channel(None).0;
        Self {
            lease,
            begin: Instant::now(),
            outcome,
            record: Mutex::new(record),
        }
    }

    /// Notes what pages must hold.
    pub(crate) fn expect(&self, checksums: &Checksums) -> Result<(), &'static str> {
        let range = self
            .range(checksums.run())
            .ok_or("checksums of pages outside the lease")?;
        let mut record = self.record();
        for (expected, crc) in record.expected[range].iter_mut().zip(&checksums.crcs) {
            *expected = Some(*crc);
        }
        Ok(())
    }

    /// Verifies pages, here or on threads of its own, and reports.
    pub(crate) fn verify(
        self: Arc<Self>,
        attempt: u32,
        runs: Vec<PageRun>,
        payload: Bytes,
    ) -> Result<(), &'static str> {
        if runs.is_empty() || runs.iter().any(|run| self.range(*run).is_none()) {
            return Err("a verification of pages outside the lease");
        }
        {
            let mut record = self.record();
            if attempt != record.attempt + 1 {
                return Err("a verification out of order");
            }
            record.attempt = attempt;
            record.payload = payload;
        }
        let pages: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let page_bytes = u64::from(self.lease.pool.spec.layout.page_bytes);
        if pages * page_bytes <= INLINE_BYTES_MAX {
            let corrupt = self.check(&runs);
            self.report(attempt, &runs, corrupt);
        } else {
            tokio::task::spawn_blocking(move || {
                let corrupt = self.check_in_parallel(&runs);
                self.report(attempt, &runs, corrupt);
            });
        }
        Ok(())
    }

    /// Notes the outcome. `Err` where the daemon claims what was not verified.
    pub(crate) fn end(&self, outcome: Outcome) -> Result<(), &'static str> {
        let believed = outcome != Outcome::Delivered || self.record().is_verified();
        // S2: an unverified page is not readable, whoever says that it was delivered.
        let noted = if believed {
            outcome
        } else {
            Outcome::Failed(Failure::PeerMisbehaved)
        };
        self.outcome.send_if_modified(|known| {
            // S3: one outcome, the first.
            let first = known.is_none();
            if first {
                *known = Some(noted);
            }
            first
        });
        if believed {
            Ok(())
        } else {
            Err("a delivery of pages that were not verified")
        }
    }

    /// The pages of the runs whose bytes do not match.
    // S10: a page without an expected checksum counts as corrupt, not as checked.
    fn check(&self, runs: &[PageRun]) -> Vec<PageRef> {
        let mut corrupt = Vec::new();
        for run in runs {
            let range = self.range(*run).expect("the runs were checked");
            let expected = self.record().expected[range].to_vec();
            for (position, expected) in (run.first..).zip(expected) {
                let page = crate::pages::page(&self.lease, run.region, position);
                if expected != Some(fabric_ipc::crc32c(page)) {
                    corrupt.push(PageRef {
                        region: run.region,
                        position,
                    });
                }
            }
        }
        corrupt
    }

    fn check_in_parallel(&self, runs: &[PageRun]) -> Vec<PageRef> {
        let threads = std::thread::available_parallelism()
            .map_or(1, usize::from)
            .min(8);
        let total: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        let shares = share(runs, total.div_ceil(threads as u64));
        std::thread::scope(|scope| {
            let checks: Vec<_> = shares
                .iter()
                .map(|share| scope.spawn(|| self.check(share)))
                .collect();
            let joined = checks.into_iter();
            joined
                .flat_map(|check| check.join().expect("a check does not panic"))
                .collect()
        })
    }

    fn report(&self, attempt: u32, runs: &[PageRun], corrupt: Vec<PageRef>) {
        let mut record = self.record();
        for run in runs {
            let range = self.range(*run).expect("the runs were checked");
            record.matches[range].fill(true);
        }
        for page in &corrupt {
            let index = self.index(page.region, page.position);
            record.matches[index] = false;
        }
        record.corrupt += corrupt.len() as u64;
        drop(record);
        if !corrupt.is_empty() {
            tracing::warn!(lease = %self.lease.id, attempt, pages = corrupt.len(), "corrupt pages");
        }
        let verified = ToDaemon::Verified {
            lease: self.lease.id,
            attempt,
            corrupt,
        };
        self.lease.pool.session.send_now(&verified);
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        // A panic leaves pages unverified, and so unreadable.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, region: u16, position: u32) -> usize {
        usize::from(region) * self.lease.slots.len() + position as usize
    }

    /// The indices of a run's pages; `None` where it leaves the lease.
    fn range(&self, run: PageRun) -> Option<std::ops::Range<usize>> {
        let slots = self.lease.slots.len() as u64;
        let inside = u64::from(run.first) + u64::from(run.count) <= slots;
        if run.region >= self.lease.pool.spec.layout.regions || !inside {
            return None;
        }
        let start = self.index(run.region, run.first);
        Some(start..start + run.count as usize)
    }
}

impl Record {
    fn is_verified(&self) -> bool {
        self.attempt > 0 && self.matches.iter().all(|matches| *matches)
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

impl std::fmt::Debug for ReceiveLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, slots) = (self.receive.lease.id, self.slots().len());
        f.debug_struct("ReceiveLease")
            .field("id", &id)
            .field("slots", &slots)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Delivered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, stats) = (self.lease.id, &self.stats);
        f.debug_struct("Delivered")
            .field("id", &id)
            .field("stats", stats)
            .finish_non_exhaustive()
    }
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
