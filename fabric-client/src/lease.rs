//! A lease, and one that this engine fills itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use bytes::Bytes;
use fabric_proto::ids::{LeaseId, PoolId, RequestId, RequestSeq, SlotIndex, SlotRef, TenantId};
use fabric_proto::pool::TokenRange;
use fabric_proto::wire::{AbortPolicy, Purpose, ToDaemon};

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
    /// What becomes of a transfer into it when it ends: [`encode`]d.
    abort: AtomicU8,
}

impl Lease {
    /// Notes a lease that the daemon gave.
    pub(crate) fn new(
        pool: Arc<PoolShared>,
        id: LeaseId,
        slots: Vec<SlotRef>,
    ) -> Result<Arc<Self>, &'static str> {
        if slots.is_empty() || !pool.claim(&slots) {
            return Err("a lease of slots that are leased already, or none of the pool's");
        }
        Ok(Arc::new(Self {
            pool,
            id,
            slots,
            abort: AtomicU8::new(encode(None)),
        }))
    }

    pub(crate) fn set_abort(&self, policy: AbortPolicy) {
        // Relaxed: `Drop` has exclusive access, which orders it after this.
        self.abort.store(encode(Some(policy)), Ordering::Relaxed);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Before the daemon hears of it: from then on it may lease them again.
        self.pool.release(&self.slots);
        let abort = decode(*self.abort.get_mut());
        self.pool.session.send_now(&ToDaemon::EndLease {
            lease: self.id,
            abort,
        });
    }
}

fn encode(policy: Option<AbortPolicy>) -> u8 {
    match policy {
        None => 0,
        Some(AbortPolicy::FinishTransfer) => 1,
        Some(AbortPolicy::DrainNow) => 2,
    }
}

fn decode(policy: u8) -> Option<AbortPolicy> {
    match policy {
        1 => Some(AbortPolicy::FinishTransfer),
        2 => Some(AbortPolicy::DrainNow),
        _ => None,
    }
}

/// Slots that this engine fills: to send them, or for itself alone. Dropping it ends the lease.
#[must_use = "dropping a lease ends it"]
pub struct HeldLease {
    pub(crate) session: Session,
    pub(crate) lease: Arc<Lease>,
}

impl HeldLease {
    pub(crate) fn new(session: Session, lease: Arc<Lease>) -> Self {
        Self { session, lease }
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
    /// Not safe to cancel without losing the lease: it is ended then.
    ///
    /// # Errors
    ///
    /// [`SendRefused`], with the lease, where the local daemon refuses.
    pub async fn send(self, offer: Bytes) -> Result<Sending, SendRefused> {
        let opened = self.lease.pool.session.open(self.lease.id, offer).await;
        match opened {
            Some(Ok(opened)) => Sending::new(self, opened),
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
