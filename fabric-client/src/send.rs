//! The prefill side: a transfer from here.

use std::ops::Range;

use bytes::Bytes;
use fabric_proto::ids::{SlotRef, TransferId};
use fabric_proto::limits::CHECKSUMS_PER_MESSAGE_MAX;
use fabric_proto::outcome::{Failure, Outcome, Rejection};
use fabric_proto::wire::{Checksums, ToDaemon};
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;

use crate::lease::HeldLease;
use crate::session::Opened;

/// A transfer that is under way. Dropping it unfinished aborts it and ends its lease.
///
/// Positions count the transfer's own slots, which are those of the lease that the offer asks for.
#[must_use = "dropping a transfer aborts it"]
pub struct Sending {
    /// `None` once it was given back.
    held: Option<HeldLease>,
    transfer: TransferId,
    slots: u32,
    offset: u32,
    /// By region and position.
    sealed: Vec<bool>,
    outcome: oneshot::Receiver<Outcome>,
    /// The outcome, where it came while pages were sealed.
    known: Option<Outcome>,
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
    /// The daemon opened a transfer that the lease cannot have.
    #[error("the daemon opened {got} slots of a lease of {want}")]
    Misbehaved {
        /// The slots that it opened, and those before them.
        got: u64,
        /// The slots of the lease.
        want: u64,
    },
}

impl SendRefused {
    pub(crate) fn rejected(held: HeldLease, reason: Rejection) -> Self {
        Self {
            held,
            reason: SendRefusal::Rejected(reason),
        }
    }

    pub(crate) fn gone(held: HeldLease) -> Self {
        Self {
            held,
            reason: SendRefusal::Gone,
        }
    }
}

impl Sending {
    pub(crate) fn new(held: HeldLease, opened: Opened) -> Result<Self, SendRefused> {
        let Opened {
            transfer,
            slots,
            offset,
            outcome,
        } = opened;
        let (got, want) = (
            u64::from(slots) + u64::from(offset),
            held.slots().len() as u64,
        );
        if got > want {
            held.lease.pool.session.close();
            return Err(SendRefused {
                held,
                reason: SendRefusal::Misbehaved { got, want },
            });
        }
        let regions = usize::from(held.lease.pool.spec.layout.regions);
        let sealed = vec![false; regions * slots as usize];
        Ok(Self {
            held: Some(held),
            transfer,
            slots,
            offset,
            sealed,
            outcome,
            known: None,
        })
    }

    /// How many slots are sent.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The source's slots that are sent.
    #[must_use]
    pub fn slot_refs(&self) -> &[SlotRef] {
        let offset = self.offset as usize;
        &self.held().slots()[offset..offset + self.slots as usize]
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
        self.held().page(region, self.offset + position)
    }

    /// A page to fill.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the transfer, or the page is sealed: what was
    /// checksummed must not change, or the destination would find it corrupt.
    #[must_use]
    pub fn page_mut(&mut self, region: u16, position: u32) -> &mut [u8] {
        let index = self
            .index(region, position)
            .expect("the page is in the transfer");
        assert!(
            !self.sealed[index],
            "page {position} of region {region} is sealed"
        );
        let position = self.offset + position;
        let held = self
            .held
            .as_mut()
            .expect("the lease is given back at the end alone");
        held.page_mut(region, position)
    }

    /// Says that pages are complete: they are checksummed here, and go out as soon as they can.
    ///
    /// # Errors
    ///
    /// [`SealError`]; `Over` tells that there is no use in going on.
    pub async fn seal(&mut self, region: u16, positions: Range<u32>) -> Result<(), SealError> {
        for message in self.checksum(region, positions)? {
            let sent = self.held().lease.pool.session.send(message).await;
            sent.ok_or(SealError::Over(Outcome::Failed(Failure::DaemonGone)))?;
        }
        Ok(())
    }

    /// As [`Sending::seal`], from a thread that computes.
    ///
    /// # Errors
    ///
    /// As [`Sending::seal`].
    ///
    /// # Panics
    ///
    /// Within an asynchronous task, as anything that blocks does.
    pub fn seal_blocking(&mut self, region: u16, positions: Range<u32>) -> Result<(), SealError> {
        for message in self.checksum(region, positions)? {
            let sent = self.held().lease.pool.session.send_blocking(&message);
            sent.ok_or(SealError::Over(Outcome::Failed(Failure::DaemonGone)))?;
        }
        Ok(())
    }

    /// Says that every page is sealed, and waits for the outcome. From then on nothing reads the
    /// pages, and they may change.
    ///
    /// `payload`, at most [`PAYLOAD_BYTES_MAX`](fabric_proto::limits::PAYLOAD_BYTES_MAX) bytes,
    /// arrives with the pages or not at all. With a page unsealed, or a longer payload, the
    /// transfer is aborted instead: half a prompt is never delivered.
    ///
    /// Cancelling it aborts the transfer, unless the destination has decided by then.
    pub async fn finish(mut self, payload: Bytes) -> (Outcome, HeldLease) {
        let complete = self.sealed.iter().all(|sealed| *sealed);
        if !complete || payload.len() > fabric_proto::limits::PAYLOAD_BYTES_MAX {
            tracing::error!(transfer = %self.transfer, complete, "a transfer cannot be finished");
            return self.abort().await;
        }
        let message = ToDaemon::Finish {
            transfer: self.transfer,
            payload,
        };
        // A session that is gone has told the outcome.
        self.held().lease.pool.session.send(message).await;
        self.ended().await
    }

    /// Ends the transfer from this side, and waits until nothing reads the pages. The outcome is
    /// `Aborted`, unless another came first.
    pub async fn abort(mut self) -> (Outcome, HeldLease) {
        let message = ToDaemon::AbortSend {
            transfer: self.transfer,
        };
        self.held().lease.pool.session.send(message).await;
        self.ended().await
    }

    async fn ended(&mut self) -> (Outcome, HeldLease) {
        let outcome = match self.known {
            Some(outcome) => outcome,
            None => (&mut self.outcome)
                .await
                .unwrap_or(Outcome::Failed(Failure::DaemonGone)),
        };
        let held = self.held.take().expect("a transfer ends once");
        (outcome, held)
    }

    /// Checksums pages and notes that they are sealed; gives the messages that say so.
    fn checksum(&mut self, region: u16, positions: Range<u32>) -> Result<Vec<ToDaemon>, SealError> {
        self.still_under_way()?;
        for position in positions.clone() {
            let outside = SealError::Outside { region, position };
            let index = self.index(region, position).ok_or(outside)?;
            if self.sealed[index] {
                return Err(SealError::Twice { region, position });
            }
        }
        let mut messages = Vec::new();
        let mut first = positions.start;
        let most = u32::try_from(CHECKSUMS_PER_MESSAGE_MAX).expect("the limit fits");
        while first < positions.end {
            let end = positions.end.min(first.saturating_add(most));
            let crcs = (first..end).map(|position| fabric_ipc::crc32c(self.page(region, position)));
            let checksums = Checksums {
                region,
                first,
                crcs: crcs.collect(),
            };
            messages.push(ToDaemon::Seal {
                transfer: self.transfer,
                checksums,
            });
            first = end;
        }
        for position in positions {
            let index = self.index(region, position).expect("it was checked above");
            self.sealed[index] = true;
        }
        Ok(messages)
    }

    fn still_under_way(&mut self) -> Result<(), SealError> {
        if self.known.is_none() {
            self.known = match self.outcome.try_recv() {
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Closed) => Some(Outcome::Failed(Failure::DaemonGone)),
            };
        }
        self.known
            .map_or(Ok(()), |outcome| Err(SealError::Over(outcome)))
    }

    fn held(&self) -> &HeldLease {
        self.held
            .as_ref()
            .expect("the lease is given back at the end alone")
    }

    fn index(&self, region: u16, position: u32) -> Option<usize> {
        let inside = region < self.held().lease.pool.spec.layout.regions && position < self.slots;
        inside.then(|| usize::from(region) * self.slots as usize + position as usize)
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        // The lease ends right after, and in that order on the wire.
        if let Some(held) = &self.held {
            held.lease.pool.session.send_now(&ToDaemon::AbortSend {
                transfer: self.transfer,
            });
        }
    }
}

impl std::fmt::Debug for Sending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (transfer, slots) = (self.transfer, self.slots);
        f.debug_struct("Sending")
            .field("transfer", &transfer)
            .field("slots", &slots)
            .finish_non_exhaustive()
    }
}
