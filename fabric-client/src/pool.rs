//! A registered pool.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fabric_ipc::{Mapping, MappingError};
use fabric_proto::ids::{Epoch, PoolId, SlotRef};
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::Purpose;

use crate::closed::Misbehaviour;
use crate::lease::{HeldLease, LeaseRequest};
use crate::receive::ReceiveLease;
use crate::session::Session;
use crate::shared::{Granted, Shared};

/// Memory that this process and its daemon both map. Clones share it.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<PoolShared>,
    session: Session,
}

/// What every lease of a pool keeps alive: the mapping first of all.
pub(crate) struct PoolShared {
    pub(crate) session: Arc<Shared>,
    pub(crate) id: PoolId,
    pub(crate) spec: PoolSpec,
    pub(crate) memory: Mapping,
    /// By index, every slot that was ever leased.
    slots: Mutex<BTreeMap<u32, Slot>>,
}

/// What this process knows of a slot.
#[derive(Clone, Copy)]
struct Slot {
    /// Of its last lease.
    epoch: Epoch,
    /// Whether this process has yet to end that lease.
    leased: bool,
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
        Self { shared, session }
    }

    /// Leases slots that another engine will fill; the lease has the offer for it.
    ///
    /// Safe to cancel: a lease that is given after that is ended at once.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Rejected`] with both numbers (S9), before any slot is leased.
    pub async fn receive(&self, request: LeaseRequest) -> Result<ReceiveLease, LeaseError> {
        match self.lease(request, Purpose::Receive).await? {
            Granted::Receiving(receive, offer) => {
                Ok(ReceiveLease::new(self.session.clone(), receive, offer))
            }
            Granted::Held(_) => unreachable!("the session checks the kind"),
        }
    }

    /// Leases slots for this engine to fill.
    ///
    /// Safe to cancel: a lease that is given after that is ended at once.
    ///
    /// # Errors
    ///
    /// As [`Pool::receive`].
    pub async fn hold(&self, request: LeaseRequest) -> Result<HeldLease, LeaseError> {
        match self.lease(request, Purpose::Hold).await? {
            Granted::Held(lease) => Ok(HeldLease::new(self.session.clone(), lease)),
            Granted::Receiving(..) => unreachable!("the session checks the kind"),
        }
    }

    /// Has the kernel allocate and map all of the pool's memory now, so that no later access waits
    /// for it. Takes seconds for a large pool, on a thread of its own.
    ///
    /// Safe to cancel: it goes on, and changes no byte.
    ///
    /// # Errors
    ///
    /// [`MappingError::Prefault`] where there is not enough memory.
    pub async fn prefault(&self) -> Result<(), MappingError> {
        let shared = Arc::clone(&self.shared);
        let populate = move || shared.memory.prefault().map(|_| ());
        match tokio::task::spawn_blocking(populate).await {
            Ok(result) => result,
            Err(error) if error.is_cancelled() => Ok(()),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        }
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
        let pool = Arc::clone(&self.shared);
        let granted = self.shared.session.lease(pool, wanted, purpose).await;
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
            slots: Mutex::new(BTreeMap::new()),
        })
    }

    /// Notes that slots are leased.
    ///
    /// # Errors
    ///
    /// What is wrong with the first slot that cannot be: then the daemon cannot be trusted with
    /// memory, the session ends, and it does not matter which of them were noted.
    // S5: one owner; S6: no epoch twice. Both are checked on this side too.
    pub(crate) fn claim(&self, slots: &[SlotRef]) -> Result<(), Misbehaviour> {
        let mut known = self.slots();
        for slot in slots {
            let (index, epoch) = (slot.index.0, slot.epoch);
            if index >= self.spec.slots {
                let (got, want) = (index, self.spec.slots);
                return Err(Misbehaviour::SlotOutside { got, want });
            }
            let leased = true;
            match known.insert(index, Slot { epoch, leased }) {
                Some(before) if before.leased => return Err(Misbehaviour::SlotLeased(index)),
                Some(before) if epoch <= before.epoch => {
                    return Err(Misbehaviour::EpochNotNewer {
                        slot: index,
                        got: epoch.as_u64(),
                        before: before.epoch.as_u64(),
                    });
                }
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    pub(crate) fn release(&self, slots: &[SlotRef]) {
        let mut known = self.slots();
        for slot in slots {
            if let Some(known) = known.get_mut(&slot.index.0)
                && known.epoch == slot.epoch
            {
                known.leased = false;
            }
        }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<u32, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
