//! The decode side: a lease that another engine fills, its verification, and its delivery.
//!
//! ```text
//!  Waiting ─Expect…, Verify─▶ Verifying ─reported─▶ Waiting ─LeaseOutcome─▶ Over
//!     ▲                                                │
//!     └──── some were corrupt: sent again, attempt + 1 ┘
//!  Waiting, Verifying ─aborted here─▶ Released       (what the daemon still says is ignored)
//!  Waiting, Verifying ─the session is over─▶ Over    (with Failed(DaemonGone))
//! ```
//!
//! The verification runs in tasks of the session, whether or not anybody waits for the delivery.
//! There is no way to switch it off.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric_proto::ids::SlotRef;
use fabric_proto::limits::RESEND_PAGES_MAX;
use fabric_proto::outcome::{Abort, Failure, Outcome};
use fabric_proto::pool::{PageRef, PageRun};
use fabric_proto::wire::{AbortPolicy, Checksums, ToDaemon};
use tokio::sync::watch;

use crate::checksum::{PageReader, Shares, Stopped};
use crate::closed::Misbehaviour;
use crate::lease::Lease;
use crate::session::Session;

/// Most corrupt pages that are named to the daemon: one more than it would have sent again, so that
/// it gives up, and the answer stays a message.
const REPORT_PAGES_MAX: usize = RESEND_PAGES_MAX + 1;

/// A lease whose pages are to arrive. There is no way to a byte of it but
/// [`ReceiveLease::delivered`].
#[must_use = "dropping a lease ends it"]
pub struct ReceiveLease {
    receive: Arc<Receive>,
    offer: Bytes,
    session: Session,
}

/// Aborts a lease that somebody else waits for. Keeps nothing alive.
#[derive(Clone)]
pub struct Aborter {
    receive: Weak<Receive>,
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
    lease: Arc<Lease>,
    payload: Bytes,
    stats: DeliveryStats,
    session: Session,
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
    state: State,
    /// By region and position: what the daemon says that the page holds,
    expected: Vec<u32>,
    /// whether it has said so,
    known: Vec<bool>,
    /// and whether the page matched when it was last verified.
    matches: Vec<bool>,
    /// Of the last verification; 0: there was none.
    attempt: u32,
    corrupt: u64,
    payload: Bytes,
    elapsed: Duration,
}

enum State {
    Waiting,
    /// The flag stops it. Relaxed wherever it is touched: it only spares the threads some pages.
    /// Whether what they found still counts is decided by this state, under the record's lock.
    Verifying(Arc<AtomicBool>),
    Over,
    Released,
}

impl ReceiveLease {
    pub(crate) fn new(session: Session, receive: Arc<Receive>, offer: Bytes) -> Self {
        Self {
            receive,
            offer,
            session,
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
    /// Cancelling it ends the lease, as dropping the lease does.
    ///
    /// # Errors
    ///
    /// [`Undelivered`], with any outcome but `Delivered`. The lease has ended then.
    // S3: the one way from a lease to its bytes.
    pub async fn delivered(self) -> Result<Delivered, Undelivered> {
        let mut watched = self.receive.outcome.subscribe();
        let known = watched.wait_for(Option::is_some).await;
        let known = known.ok().and_then(|outcome| *outcome);
        match known.expect("the sender is there, and has an outcome") {
            Outcome::Delivered => Ok(self.deliver()),
            outcome @ (Outcome::Rejected(_) | Outcome::Aborted(_) | Outcome::Failed(_)) => {
                Err(Undelivered { outcome })
            }
        }
    }

    /// Ends the lease, and says what becomes of its transfer. Dropping it instead leaves that to
    /// the daemon's configuration.
    pub fn abort(self, policy: AbortPolicy) {
        self.receive.release(Some(policy));
    }

    /// A handle that can abort the lease while somebody waits for [`ReceiveLease::delivered`].
    #[must_use]
    pub fn aborter(&self) -> Aborter {
        Aborter {
            receive: Arc::downgrade(&self.receive),
        }
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    fn deliver(self) -> Delivered {
        let record = self.receive.record();
        // S2, S10: our own record, and not the daemon's word alone.
        assert!(
            matches!(record.state, State::Over) && record.is_verified(),
            "every page was verified here on its last attempt, and none is being verified"
        );
        let pages = record.matches.len() as u64;
        let stats = DeliveryStats {
            pages,
            bytes: pages * u64::from(self.receive.lease.pool.spec.layout.page_bytes),
            attempts: record.attempt,
            corrupt: record.corrupt,
            elapsed: record.elapsed,
        };
        let payload = record.payload.clone();
        drop(record);
        Delivered {
            lease: Arc::clone(&self.receive.lease),
            payload,
            stats,
            session: self.session.clone(),
        }
    }
}

impl Drop for ReceiveLease {
    fn drop(&mut self) {
        // A verification that runs keeps the lease until it has stopped, at its next page.
        self.receive.release(None);
    }
}

impl Aborter {
    /// Ends the delivery, and says what becomes of its transfer: the outcome is
    /// `Aborted(Destination)`, and the lease ends when who waits for it has been told. Does nothing
    /// where the delivery is over already, or the lease has ended.
    pub fn abort(&self, policy: AbortPolicy) {
        if let Some(receive) = self.receive.upgrade() {
            receive.release(Some(policy));
        }
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
        // Zeroed memory costs nothing until it is touched.
        let pages = usize::from(lease.pool.spec.layout.regions) * lease.slots.len();
        let record = Record {
            state: State::Waiting,
            expected: vec![0; pages],
            known: vec![false; pages],
            matches: vec![false; pages],
            attempt: 0,
            corrupt: 0,
            payload: Bytes::new(),
            elapsed: Duration::ZERO,
        };
        Self {
            lease,
            begin: Instant::now(),
            outcome: watch::channel(None).0,
            record: Mutex::new(record),
        }
    }

    /// Notes what pages must hold.
    pub(crate) fn expect(&self, checksums: &Checksums) -> Result<(), Misbehaviour> {
        let range = self.range(checksums.run())?;
        let mut record = self.record();
        match record.state {
            State::Waiting => {}
            State::Released => return Ok(()),
            State::Verifying(_) | State::Over => return Err(Misbehaviour::OutOfPlace),
        }
        for (index, crc) in range.zip(&checksums.crcs) {
            // S2: a page is verified against what it must hold, not against what it had to.
            if record.expected[index] != *crc {
                record.matches[index] = false;
            }
            record.expected[index] = *crc;
            record.known[index] = true;
        }
        Ok(())
    }

    /// Verifies pages, in a task of its own, and reports.
    pub(crate) fn verify(
        self: Arc<Self>,
        attempt: u32,
        runs: Vec<PageRun>,
        payload: Bytes,
    ) -> Result<(), Misbehaviour> {
        if let Some(stop) = self.begin(attempt, &runs, payload)? {
            tokio::spawn(self.run(attempt, runs, stop));
        }
        Ok(())
    }

    /// Notes that a verification begins. `None` where it does not matter any more.
    fn begin(
        &self,
        attempt: u32,
        runs: &[PageRun],
        payload: Bytes,
    ) -> Result<Option<Arc<AtomicBool>>, Misbehaviour> {
        let mut record = self.record();
        match record.state {
            State::Waiting => {}
            State::Released => return Ok(None),
            State::Verifying(_) | State::Over => return Err(Misbehaviour::OutOfPlace),
        }
        let (got, want) = (attempt, record.attempt.saturating_add(1));
        if got != want {
            return Err(Misbehaviour::Attempt { got, want });
        }
        // Runs are 12 bytes and may name 2^32 pages each: no more are verified than there are.
        let got = runs.iter().map(|run| u64::from(run.count)).sum();
        let want = record.matches.len() as u64;
        if got == 0 || got > want {
            return Err(Misbehaviour::PagesTwice { got, want });
        }
        for run in runs {
            // S2: what an earlier attempt found does not count for bytes that came after it.
            record.matches[self.range(*run)?].fill(false);
        }
        let stop = Arc::new(AtomicBool::new(false));
        record.attempt = attempt;
        record.payload = payload;
        record.state = State::Verifying(Arc::clone(&stop));
        Ok(Some(stop))
    }

    async fn run(self: Arc<Self>, attempt: u32, runs: Vec<PageRun>, stop: Arc<AtomicBool>) {
        let session = Arc::clone(&self.lease.pool.session);
        let reader = PageReader {
            lease: Arc::clone(&self.lease),
            stop,
            reading: None,
        };
        let mut shares = Shares::new(&session.workers, reader, &runs);
        let mut crcs = Vec::new();
        loop {
            match shares.next().await {
                Ok(Some(share)) => crcs.extend(share),
                Ok(None) => break,
                Err(Stopped) => return,
            }
        }
        drop(shares);
        let Some(report) = self.compare(attempt, &runs, &crcs) else {
            return;
        };
        // The answer may have to wait for room; the lease need not.
        drop(self);
        let _ = session.send(vec![report.encode()]).await;
    }

    /// Compares what pages hold with what they must, and makes the report.
    fn compare(&self, attempt: u32, runs: &[PageRun], crcs: &[u32]) -> Option<ToDaemon> {
        let mut record = self.record();
        let State::Verifying(_) = record.state else {
            return None;
        };
        let pages: usize = runs.iter().map(|run| run.count as usize).sum();
        // S10: nothing is skipped.
        assert_eq!(crcs.len(), pages, "every page was checksummed");
        let mut corrupt_count = 0;
        let mut corrupt = Vec::new();
        let named = runs.iter().flat_map(|run| {
            let positions = run.first..run.first + run.count;
            positions.map(|position| PageRef {
                region: run.region,
                position,
            })
        });
        for (page, crc) in named.zip(crcs) {
            let index = self.index(page.region, page.position);
            // S10: a page of which nobody said what it must hold is corrupt, not checked.
            let matches = record.known[index] && record.expected[index] == *crc;
            record.matches[index] = matches;
            if !matches {
                corrupt_count += 1;
                if corrupt.len() < REPORT_PAGES_MAX {
                    corrupt.push(page);
                }
            }
        }
        record.corrupt += corrupt_count;
        record.state = State::Waiting;
        drop(record);
        let lease = self.lease.id;
        if corrupt_count > 0 {
            tracing::warn!(%lease, attempt, pages = corrupt_count, "corrupt pages");
        }
        Some(ToDaemon::Verified {
            lease,
            attempt,
            corrupt,
        })
    }

    /// Notes the outcome that the daemon tells.
    pub(crate) fn end(&self, outcome: Outcome) -> Result<(), Misbehaviour> {
        let mut record = self.record();
        match &record.state {
            State::Waiting => {}
            State::Verifying(stop) => {
                if outcome == Outcome::Delivered {
                    return Err(record.unverified());
                }
                stop.store(true, Ordering::Relaxed);
            }
            State::Released => return Ok(()),
            // S3: one outcome.
            State::Over => return Err(Misbehaviour::OutOfPlace),
        }
        // S2: an unverified page is not readable, whoever says that it was delivered.
        if outcome == Outcome::Delivered && !record.is_verified() {
            return Err(record.unverified());
        }
        record.state = State::Over;
        record.elapsed = self.begin.elapsed();
        drop(record);
        self.outcome.send_replace(Some(outcome));
        Ok(())
    }

    /// The session is over, and no outcome can come any more.
    pub(crate) fn lose(&self) {
        self.settle(State::Over, Outcome::Failed(Failure::DaemonGone));
    }

    /// Nobody here wants the delivery any more.
    fn release(&self, policy: Option<AbortPolicy>) {
        if self.settle(State::Released, Outcome::Aborted(Abort::Destination))
            && let Some(policy) = policy
        {
            self.lease.set_abort(policy);
        }
    }

    /// Settles the outcome from this side. False where it was settled before.
    fn settle(&self, state: State, outcome: Outcome) -> bool {
        let mut record = self.record();
        match &record.state {
            State::Waiting => {}
            State::Verifying(stop) => stop.store(true, Ordering::Relaxed),
            State::Over | State::Released => return false,
        }
        record.state = state;
        drop(record);
        self.outcome.send_replace(Some(outcome));
        true
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        // A panic leaves pages unverified, and so unreadable.
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self, region: u16, position: u32) -> usize {
        usize::from(region) * self.lease.slots.len() + position as usize
    }

    /// The indices of a run's pages.
    fn range(&self, run: PageRun) -> Result<Range<usize>, Misbehaviour> {
        let PageRun {
            region,
            first,
            count,
        } = run;
        let slots = self.lease.slots.len() as u64;
        let inside = u64::from(first) + u64::from(count) <= slots;
        if region >= self.lease.pool.spec.layout.regions || !inside {
            return Err(Misbehaviour::PagesOutside {
                region,
                first,
                count,
            });
        }
        let start = self.index(region, first);
        Ok(start..start + count as usize)
    }
}

impl Record {
    fn is_verified(&self) -> bool {
        self.attempt > 0 && self.matches.iter().all(|matches| *matches)
    }

    fn unverified(&self) -> Misbehaviour {
        let got = match self.state {
            State::Verifying(_) => 0,
            State::Waiting | State::Over | State::Released => {
                self.matches.iter().filter(|matches| **matches).count() as u64
            }
        };
        let want = self.matches.len() as u64;
        Misbehaviour::Unverified { got, want }
    }
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

impl std::fmt::Debug for Aborter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Aborter").finish_non_exhaustive()
    }
}
