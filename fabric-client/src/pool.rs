//! A registered pool.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fabric_ipc::Mapping;
use fabric_proto::ids::{PoolId, SlotRef};
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::Purpose;

use crate::lease::{HeldLease, LeaseRequest};
use crate::receive::ReceiveLease;
use crate::session::{Granted, Session, Shared};

/// Memory that this process and its daemon both map. Clones share it.
#[derive(Clone)]
pub struct Pool {
    session: Session,
    shared: Arc<PoolShared>,
}

/// What every lease of a pool keeps alive: the mapping first of all.
pub(crate) struct PoolShared {
    pub(crate) session: Arc<Shared>,
    pub(crate) id: PoolId,
    pub(crate) spec: PoolSpec,
    pub(crate) memory: Mapping,
    /// Slots of leases that this process has not ended.
    live: Mutex<HashSet<u32>>,
}

/// Why there is no lease.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The daemon turned the request away.
    #[error("{0}")]
    Rejected(Rejection),
    /// The session with the daemon ended.
    #[error("the session with the local daemon ended")]
    Gone,
}

impl Pool {
    pub(crate) fn new(session: Session, shared: Arc<PoolShared>) -> Self {
        Self { session, shared }
    }

    /// Leases slots that another engine will fill; the lease has the offer for it.
    ///
    /// Safe to cancel: a lease that is given after that is ended at once.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Rejected`] with both numbers (S9), before any slot is leased.
    pub async fn receive(&self, request: LeaseRequest) -> Result<ReceiveLease, LeaseError> {
        let granted = self.lease(request, Purpose::Receive).await?;
        // An offer is missing only where the daemon is at fault.
        let (receive, offer) = granted.receive.ok_or(LeaseError::Gone)?;
        Ok(ReceiveLease::new(self.session.clone(), receive, offer))
    }

    /// Leases slots for this engine to fill.
    ///
    /// Safe to cancel: a lease that is given after that is ended at once.
    ///
    /// # Errors
    ///
    /// As [`Pool::receive`].
    pub async fn hold(&self, request: LeaseRequest) -> Result<HeldLease, LeaseError> {
        let granted = self.lease(request, Purpose::Hold).await?;
        Ok(HeldLease::new(self.session.clone(), granted.lease))
    }

    /// What was registered.
    #[must_use]
    pub fn spec(&self) -> &PoolSpec {
        &self.shared.spec
    }

    /// The session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    async fn lease(&self, wanted: LeaseRequest, purpose: Purpose) -> Result<Granted, LeaseError> {
        let pool = self.shared.id;
        let ask = |seq| wanted.message(seq, pool, purpose);
        let granted = self
            .shared
            .session
            .lease(Arc::clone(&self.shared), ask)
            .await;
        granted
            .ok_or(LeaseError::Gone)?
            .map_err(LeaseError::Rejected)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, spec) = (self.shared.id, &self.shared.spec);
        f.debug_struct("Pool")
            .field("id", &id)
            .field("spec", spec)
            .finish_non_exhaustive()
    }
}

impl PoolShared {
    pub(crate) fn new(
        session: Arc<Shared>,
        id: PoolId,
        spec: PoolSpec,
        memory: Mapping,
    ) -> Arc<Self> {
        Arc::new(Self {
            session,
            id,
            spec,
            memory,
            live: Mutex::new(HashSet::new()),
        })
    }

    /// Notes that slots are leased. False, with nothing noted, where one is leased already or is
    /// none of the pool's: then the daemon cannot be trusted with memory.
    // S5: checked on this side too.
    pub(crate) fn claim(&self, slots: &[SlotRef]) -> bool {
        let mut live = self.live();
        let count = live.len();
        let fresh = |slot: &SlotRef| slot.index.0 < self.spec.slots && live.insert(slot.index.0);
        let claimed = slots.iter().copied().take_while({
            let mut fresh = fresh;
            move |slot| fresh(slot)
        });
        let claimed = claimed.count();
        if claimed == slots.len() {
            return true;
        }
        for slot in &slots[..claimed] {
            live.remove(&slot.index.0);
        }
        debug_assert_eq!(live.len(), count, "nothing is noted of a refused lease");
        false
    }

    pub(crate) fn release(&self, slots: &[SlotRef]) {
        let mut live = self.live();
        for slot in slots {
            live.remove(&slot.index.0);
        }
    }

    fn live(&self) -> MutexGuard<'_, HashSet<u32>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
