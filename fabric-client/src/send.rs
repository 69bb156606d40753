//! The prefill side: a transfer from here.
//!
//! ```text
//!  a page:   Open ─seal begins─▶ Frozen ─queued for the daemon─▶ Queued ─seal returns─▶ Sealed
//!                                  └────────the seal was cancelled: seal it again────▲
//! ```
//!
//! A page that is frozen or sealed does not change until the outcome: threads here, and then the
//! daemon and its NIC, read it.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use fabric_proto::ids::{SlotRef, TransferId};
use fabric_proto::limits::{CHECKSUMS_PER_MESSAGE_MAX, PAYLOAD_BYTES_MAX};
use fabric_proto::outcome::{Failure, Outcome, Rejection};
use fabric_proto::pool::PageRun;
use fabric_proto::wire::{Checksums, ToDaemon};
use tokio::sync::{mpsc, watch};

use crate::checksum::{PageReader, Shares, Stopped};
use crate::closed::Misbehaviour;
use crate::lease::{HeldLease, Lease};

/// A transfer that is under way. Dropping it unfinished aborts it and ends its lease, in that order
/// and without waiting.
///
/// Positions count the transfer's own slots, which are those of the lease that the offer asks for.
#[must_use = "dropping a transfer aborts it"]
pub struct Sending {
    transfer: Transfer,
    /// `None` once it was given back.
    held: Option<HeldLease>,
    /// By region and position.
    pages: Vec<PageState>,
    /// Ends when the threads of a seal that was cancelled read no more.
    reading: Option<mpsc::Receiver<Infallible>>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PageState {
    Open,
    Frozen,
    Queued,
    Sealed,
}

/// A transfer as the daemon opened it. Dropping it before its outcome aborts it.
pub(crate) struct Transfer {
    id: TransferId,
    state: Arc<SendState>,
    slots: u32,
    offset: u32,
    aborted: bool,
    /// Last: the lease ends after the transfer, on the wire too.
    lease: Arc<Lease>,
}

/// What the session knows of a transfer.
pub(crate) struct SendState {
    /// Its lock orders all who change or read it.
    progress: watch::Sender<Progress>,
}

/// ```text
///  Open ─finish─▶ Committing ─any outcome─▶ Over
///    └─any outcome but Delivered──────────────▲
/// ```
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Progress {
    Open,
    Committing,
    Over(Outcome),
}

/// Why a page was not sealed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The page is outside the transfer.
    #[error("page {position} of region {region} is outside the transfer")]
    Outside {
        /// Its region.
        region: u16,
        /// Its position.
        position: u32,
    },
    /// The page was sealed before.
    #[error("page {position} of region {region} was sealed before")]
    Twice {
        /// Its region.
        region: u16,
        /// Its position.
        position: u32,
    },
    /// The transfer is over.
    #[error("the transfer is over: {0}")]
    Over(Outcome),
}

/// A transfer that the local daemon refused, with the lease.
#[derive(Debug, thiserror::Error)]
#[error("the transfer was refused: {reason}")]
pub struct SendRefused {
    /// The lease, as it was.
    pub held: HeldLease,
    /// Why.
    pub reason: SendRefusal,
}

/// Why the local daemon refused a transfer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SendRefusal {
    /// The offer or the lease does not allow it.
    #[error("{0}")]
    Rejected(Rejection),
    /// The session with the daemon ended.
    #[error("the session with the local daemon ended")]
    Gone,
}

impl SendRefused {
    pub(crate) fn rejected(held: HeldLease, reason: Rejection) -> Self {
        let reason = SendRefusal::Rejected(reason);
        Self { held, reason }
    }

    pub(crate) fn gone(held: HeldLease) -> Self {
        let reason = SendRefusal::Gone;
        Self { held, reason }
    }
}

impl Sending {
    pub(crate) fn new(held: HeldLease, transfer: Transfer) -> Self {
        assert!(
            Arc::ptr_eq(&held.lease, &transfer.lease),
            "the transfer is from this lease"
        );
        let regions = usize::from(held.lease.pool.spec.layout.regions);
        let pages = vec![PageState::Open; regions * transfer.slots as usize];
        Self {
            transfer,
            held: Some(held),
            pages,
            reading: None,
        }
    }

    /// How many slots are sent.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.transfer.slots
    }

    /// Which of the lease's slots is the first that is sent.
    #[must_use]
    pub fn offset(&self) -> u32 {
        self.transfer.offset
    }

    /// The source's slots that are sent.
    #[must_use]
    pub fn slot_refs(&self) -> &[SlotRef] {
        let offset = self.transfer.offset as usize;
        &self.held().slots()[offset..offset + self.transfer.slots as usize]
    }

    /// A page to read.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the transfer.
    #[must_use]
    pub fn page(&self, region: u16, position: u32) -> &[u8] {
        self.index(region, position)
            .expect("the page is in the transfer");
        self.held().page(region, self.transfer.offset + position)
    }

    /// A page to fill.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the transfer, or the page is sealed: what was
    /// checksummed must not change, or the destination would find it corrupt.
    #[must_use]
    pub fn page_mut(&mut self, region: u16, position: u32) -> &mut [u8] {
        self.index(region, position)
            .expect("the page is in the transfer");
        self.lease_page_mut(region, self.transfer.offset + position)
    }

    /// A page of the whole lease to read: also of slots that are not sent, since the destination
    /// has their tokens already. `position` counts the lease's slots.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the lease.
    #[must_use]
    pub fn lease_page(&self, region: u16, position: u32) -> &[u8] {
        self.held().page(region, position)
    }

    /// A page of the whole lease to fill. `position` counts the lease's slots.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the lease, or the page is sealed.
    #[must_use]
    pub fn lease_page_mut(&mut self, region: u16, position: u32) -> &mut [u8] {
        let sent = position.checked_sub(self.transfer.offset);
        let index = sent.and_then(|position| self.index(region, position));
        let state = index.map_or(PageState::Open, |index| self.pages[index]);
        // S2: what was checksummed is what is sent.
        assert!(
            state == PageState::Open,
            "page {position} of region {region} is sealed"
        );
        let held = self.held.as_mut();
        let held = held.expect("the lease is given back at the end alone");
        held.page_mut(region, position)
    }

    /// Says that pages are complete: they are checksummed here, on threads of their own where they
    /// are many, and the first go out while the last are checksummed. Waits while the session's
    /// outgoing queue is full.
    ///
    /// Safe to cancel: then none of the pages is sealed, nor do they change; to seal them again
    /// goes on where it was cancelled.
    ///
    /// # Errors
    ///
    /// [`SealError`]; `Over` tells that there is no use in going on.
    pub async fn seal(&mut self, region: u16, positions: Range<u32>) -> Result<(), SealError> {
        self.freeze(region, &positions)?;
        self.reads_over().await;
        for run in self.frozen(region, &positions) {
            let (reading, over) = mpsc::channel(1);
            self.reading = Some(over);
            let reader = self.reader(Some(reading));
            let workers = Arc::clone(&self.transfer.lease.pool.session.workers);
            let mut shares = Shares::new(&workers, reader, &self.runs(region, &run));
            let mut first = run.start;
            // They are stopped by nobody but a runtime that shuts down, and the session with it.
            while let Some(crcs) = shares.next().await.map_err(|Stopped| GONE)? {
                self.queue(region, first, &crcs).await?;
                first += u32::try_from(crcs.len()).expect("a part of a range of u32");
            }
            self.reading = None;
        }
        self.set(region, &positions, PageState::Sealed);
        Ok(())
    }

    /// As [`Sending::seal`], on the calling thread: for one that computes.
    ///
    /// # Errors
    ///
    /// As [`Sending::seal`].
    ///
    /// # Panics
    ///
    /// Within an asynchronous task, as anything that blocks does.
    pub fn seal_blocking(&mut self, region: u16, positions: Range<u32>) -> Result<(), SealError> {
        self.freeze(region, &positions)?;
        let runtime = self.held().session.runtime().clone();
        for run in self.frozen(region, &positions) {
            let crcs = self.reader(None).checksums(&self.runs(region, &run));
            let crcs = crcs.ok_or(GONE)?;
            runtime.block_on(self.queue(region, run.start, &crcs))?;
        }
        self.set(region, &positions, PageState::Sealed);
        Ok(())
    }

    /// Says that every page is sealed, and waits for the outcome. From then on nothing reads the
    /// pages, and they may change.
    ///
    /// `payload`, at most [`PAYLOAD_BYTES_MAX`] bytes, arrives with the pages or not at all. With a
    /// page unsealed, or a longer payload, the transfer is aborted instead, and the outcome says
    /// so: half a prompt is never delivered.
    ///
    /// Cancelling it aborts the transfer, unless the destination has decided by then, and ends the
    /// lease.
    pub async fn finish(mut self, payload: Bytes) -> (Outcome, HeldLease) {
        let sealed = self.sealed_count();
        let (pages, bytes) = (self.pages.len(), payload.len());
        if sealed < pages || bytes > PAYLOAD_BYTES_MAX {
            let transfer = self.transfer.id;
            tracing::error!(%transfer, sealed, pages, payload_bytes = bytes, "cannot finish");
            return self.abort().await;
        }
        let message = ToDaemon::Finish {
            transfer: self.transfer.id,
            payload,
        };
        let message = vec![message.encode()];
        // Before the daemon can say that it delivered.
        self.transfer.state.commit();
        // A session that is over has told the outcome.
        let _ = self.transfer.lease.pool.session.send(message).await;
        self.ended().await
    }

    /// Ends the transfer from this side, and waits until nothing reads the pages. The outcome is
    /// `Aborted`, unless another came first.
    ///
    /// Cancelling it ends the lease too.
    pub async fn abort(mut self) -> (Outcome, HeldLease) {
        self.transfer.abort();
        self.ended().await
    }

    async fn ended(&mut self) -> (Outcome, HeldLease) {
        let outcome = self.transfer.state.outcome().await;
        self.reads_over().await;
        let held = self.held.take().expect("a transfer ends once");
        (outcome, held)
    }

    /// Waits until the threads of a seal that was cancelled read no more: they were told to stop.
    async fn reads_over(&mut self) {
        if let Some(reading) = &mut self.reading {
            // Nothing is ever said but the end.
            let _ = reading.recv().await;
        }
        self.reading = None;
    }

    /// Checks pages and makes sure that they do not change from now on.
    fn freeze(&mut self, region: u16, positions: &Range<u32>) -> Result<(), SealError> {
        if let Some(outcome) = self.transfer.state.known() {
            return Err(SealError::Over(outcome));
        }
        for position in positions.clone() {
            let outside = SealError::Outside { region, position };
            let index = self.index(region, position).ok_or(outside)?;
            if self.pages[index] == PageState::Sealed {
                return Err(SealError::Twice { region, position });
            }
        }
        for position in positions.clone() {
            let page = self.page_state(region, position);
            if *page == PageState::Open {
                *page = PageState::Frozen;
            }
        }
        Ok(())
    }

    /// What of some pages is frozen: all of them, unless a seal was cancelled before.
    fn frozen(&mut self, region: u16, positions: &Range<u32>) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for position in positions.clone() {
            if *self.page_state(region, position) != PageState::Frozen {
                continue;
            }
            match runs.last_mut() {
                Some(last) if last.end == position => last.end += 1,
                _ => runs.push(position..position + 1),
            }
        }
        runs
    }

    /// Queues what was checksummed from a page on: all of it or, where it is cancelled or over,
    /// none.
    async fn queue(&mut self, region: u16, first: u32, crcs: &[u32]) -> Result<(), SealError> {
        let count = u32::try_from(crcs.len()).expect("a part of a range of u32");
        let positions = first..first + count;
        let parts = positions.clone().step_by(CHECKSUMS_PER_MESSAGE_MAX);
        let messages = parts.zip(crcs.chunks(CHECKSUMS_PER_MESSAGE_MAX));
        let messages = messages.map(|(first, crcs)| {
            let crcs = crcs.to_vec();
            let checksums = Checksums {
                region,
                first,
                crcs,
            };
            let transfer = self.transfer.id;
            ToDaemon::Seal {
                transfer,
                checksums,
            }
            .encode()
        });
        let messages: Vec<_> = messages.collect();
        let sent = self.transfer.lease.pool.session.send(messages).await;
        sent.ok_or(GONE)?;
        // No await since they were queued.
        self.set(region, &positions, PageState::Queued);
        Ok(())
    }

    fn reader(&self, reading: Option<mpsc::Sender<Infallible>>) -> PageReader {
        PageReader {
            lease: Arc::clone(&self.transfer.lease),
            stop: Arc::new(AtomicBool::new(false)),
            reading,
        }
    }

    /// The pages by the lease's positions.
    fn runs(&self, region: u16, positions: &Range<u32>) -> Vec<PageRun> {
        let run = PageRun {
            region,
            first: self.transfer.offset + positions.start,
            count: u32::try_from(positions.len()).expect("a range of u32 that was checked"),
        };
        if run.count == 0 {
            Vec::new()
        } else {
            vec![run]
        }
    }

    fn set(&mut self, region: u16, positions: &Range<u32>, state: PageState) {
        for position in positions.clone() {
            *self.page_state(region, position) = state;
        }
    }

    fn page_state(&mut self, region: u16, position: u32) -> &mut PageState {
        let index = self.index(region, position);
        &mut self.pages[index.expect("the caller has checked the page")]
    }

    fn sealed_count(&self) -> usize {
        let sealed = |state: &&PageState| **state == PageState::Sealed;
        self.pages.iter().filter(sealed).count()
    }

    fn held(&self) -> &HeldLease {
        self.held
            .as_ref()
            .expect("the lease is given back at the end alone")
    }

    fn index(&self, region: u16, position: u32) -> Option<usize> {
        let (regions, slots) = (
            self.transfer.lease.pool.spec.layout.regions,
            self.transfer.slots,
        );
        let inside = region < regions && position < slots;
        inside.then(|| usize::from(region) * slots as usize + position as usize)
    }
}

impl Transfer {
    pub(crate) fn new(
        lease: Arc<Lease>,
        id: TransferId,
        state: Arc<SendState>,
        slots: u32,
        offset: u32,
    ) -> Self {
        Self {
            id,
            state,
            slots,
            offset,
            aborted: false,
            lease,
        }
    }

    /// Says that the transfer ends from this side, unless it is over or that was said.
    fn abort(&mut self) {
        if self.aborted || self.state.known().is_some() {
            return;
        }
        self.aborted = true;
        let message = ToDaemon::AbortSend { transfer: self.id };
        self.lease.pool.session.send_end(&message);
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.abort();
    }
}

impl SendState {
    pub(crate) fn new() -> Self {
        Self {
            progress: watch::channel(Progress::Open).0,
        }
    }

    /// Notes that the daemon is about to be told to finish: from now on it may deliver.
    fn commit(&self) {
        self.progress.send_if_modified(|progress| {
            if *progress == Progress::Open {
                *progress = Progress::Committing;
            }
            // Who waits, waits for an outcome.
            false
        });
    }

    /// Takes in what the daemon says.
    pub(crate) fn ended(&self, id: TransferId, outcome: Outcome) -> Result<(), Misbehaviour> {
        let open = *self.progress.borrow() == Progress::Open;
        // S3: no transfer is delivered that this engine has not finished.
        if open && outcome == Outcome::Delivered {
            self.end(Outcome::Failed(Failure::DaemonGone));
            return Err(Misbehaviour::Unfinished(id));
        }
        self.end(outcome);
        Ok(())
    }

    /// Notes the outcome. The first stands.
    pub(crate) fn end(&self, outcome: Outcome) {
        self.progress.send_if_modified(|progress| {
            let first = progress.outcome().is_none();
            if first {
                *progress = Progress::Over(outcome);
            }
            first
        });
    }

    fn known(&self) -> Option<Outcome> {
        self.progress.borrow().outcome()
    }

    async fn outcome(&self) -> Outcome {
        let mut watched = self.progress.subscribe();
        let over = watched.wait_for(|progress| progress.outcome().is_some());
        let known = over.await.ok().and_then(|progress| progress.outcome());
        known.expect("the sender is there, and has an outcome")
    }
}

impl Progress {
    fn outcome(self) -> Option<Outcome> {
        match self {
            Self::Open | Self::Committing => None,
            Self::Over(outcome) => Some(outcome),
        }
    }
}

impl std::fmt::Debug for Sending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (transfer, slots) = (self.transfer.id, self.transfer.slots);
        f.debug_struct("Sending")
            .field("transfer", &transfer)
            .field("slots", &slots)
            .finish_non_exhaustive()
    }
}

/// What a seal says when the session is over.
const GONE: SealError = SealError::Over(Outcome::Failed(Failure::DaemonGone));
