//! A lease, and one that this engine fills itself.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fabric_proto::ids::{LeaseId, PoolId, RequestId, RequestSeq, SlotIndex, SlotRef, TenantId};
use fabric_proto::pool::TokenRange;
use fabric_proto::wire::{AbortPolicy, Purpose, ToDaemon};

use crate::closed::Misbehaviour;
use crate::pool::PoolShared;
use crate::send::{SendRefused, Sending};
use crate::session::Session;

/// What a lease is asked for.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    /// For whom. The daemon's configuration says for whom this engine may act.
    pub tenant: TenantId,
    /// For which request: a name for logs and for the manifest.
    pub request: RequestId,
    /// For which of its tokens; the first is a multiple of the pool's tokens per slot.
    pub tokens: TokenRange,
    /// The slots, where the engine's own allocator rules the pool; empty: the daemon chooses.
    pub named: Vec<SlotIndex>,
}

impl LeaseRequest {
    pub(crate) fn message(self, seq: RequestSeq, pool: PoolId, purpose: Purpose) -> ToDaemon {
        let Self {
            tenant,
            request,
            tokens,
            named,
        } = self;
        ToDaemon::Lease {
            seq,
            pool,
            tenant,
            request,
            tokens,
            purpose,
            named,
        }
    }
}

/// A right to slots. Ends when the last of what uses it is gone.
pub(crate) struct Lease {
    pub(crate) pool: Arc<PoolShared>,
    pub(crate) id: LeaseId,
    pub(crate) slots: Vec<SlotRef>,
    /// What becomes of a transfer into it when it ends; unset: as the daemon is configured.
    abort: OnceLock<AbortPolicy>,
}

impl Lease {
    /// Notes a lease that the daemon gave.
    pub(crate) fn new(
        pool: Arc<PoolShared>,
        id: LeaseId,
        slots: Vec<SlotRef>,
    ) -> Result<Arc<Self>, Misbehaviour> {
        pool.claim(&slots)?;
        Ok(Arc::new(Self {
            pool,
            id,
            slots,
            abort: OnceLock::new(),
        }))
    }

    /// Says what becomes of a transfer into it. The first word stands.
    pub(crate) fn set_abort(&self, policy: AbortPolicy) {
        self.abort.get_or_init(|| policy);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Before the daemon hears of it: from then on it may lease the slots again.
        self.pool.release(&self.slots);
        let session = &self.pool.session;
        session.forget(self.id);
        session.send_end(&ToDaemon::EndLease {
            lease: self.id,
            abort: self.abort.get().copied(),
        });
    }
}

/// Slots that this engine fills: to send them, or for itself alone. Dropping it ends the lease.
#[must_use = "dropping a lease ends it"]
pub struct HeldLease {
    // Before the session, so that its end is said while there is one.
    pub(crate) lease: Arc<Lease>,
    pub(crate) session: Session,
}

impl HeldLease {
    pub(crate) fn new(session: Session, lease: Arc<Lease>) -> Self {
        Self { lease, session }
    }

    /// The slots, in the order of the request's tokens.
    #[must_use]
    pub fn slots(&self) -> &[SlotRef] {
        &self.lease.slots
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
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

    /// A page to write.
    ///
    /// # Panics
    ///
    /// Where the region or the position is outside the lease.
    #[must_use]
    pub fn page_mut(&mut self, region: u16, position: u32) -> &mut [u8] {
        crate::pages::page_mut(&mut self.lease, region, position)
    }

    /// Starts a transfer to where an offer says. Pages may be sealed from the moment it returns,
    /// while the destination still decides; its refusal is then the transfer's outcome.
    ///
    /// Cancelling it loses the lease: the transfer, where it was opened, is aborted, and then the
    /// lease is ended.
    ///
    /// # Errors
    ///
    /// [`SendRefused`], with the lease, where the local daemon refuses.
    pub async fn send(self, offer: Bytes) -> Result<Sending, SendRefused> {
        let session = &self.lease.pool.session;
        match session.open(Arc::clone(&self.lease), offer).await {
            Some(Ok(transfer)) => Ok(Sending::new(self, transfer)),
            Some(Err(reason)) => Err(SendRefused::rejected(self, reason)),
            None => Err(SendRefused::gone(self)),
        }
    }

    /// Ends the lease.
    pub fn end(self) {}
}

impl std::fmt::Debug for HeldLease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, slots) = (self.lease.id, self.lease.slots.len());
        f.debug_struct("HeldLease")
            .field("id", &id)
            .field("slots", &slots)
            .finish_non_exhaustive()
    }
}
