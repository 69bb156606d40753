//! The source's side of every plane: who reads a pool to send from it.

use std::sync::Arc;

use fabric_proto::host::{Input, ReadsStopped};
use fabric_proto::ids::{GrantId, PoolId, SlotRef, TransferId};
use tracing::error;

use super::area::Area;
use super::outbox::Outbox;
use super::pools::{Pool, Pools};

/// The proof that a source's plane reads the pages of one attempt no more.
///
/// It has no constructor, and its fields are private to this file: only the end of a `Reading`
/// makes one.
#[derive(Debug)]
#[must_use = "the slots stay pinned until the machine has it"]
pub struct SourceStopped {
    transfer: TransferId,
    grant: GrantId,
}

impl ReadsStopped for SourceStopped {
    fn transfer(&self) -> TransferId {
        self.transfer
    }

    fn grant(&self) -> GrantId {
        self.grant
    }
}

/// One attempt to send: the only way that a plane reads a pool for it.
///
/// Whoever may still read the pool for this attempt holds this value, and it cannot be copied.
/// Dropping it therefore proves that the reading is over, and tells the machine so: once for each
/// `OpenWriter`, whatever became of it.
#[derive(Debug)]
pub(super) struct Source {
    // Before `reading`, as fields are dropped in this order: the pool is let go, then comes the
    // proof.
    pub(super) pool: Arc<Pool>,
    pub(super) pool_id: PoolId,
    pub(super) area: Area,
    reading: Reading,
}

impl Source {
    /// Opens an attempt. Where the pool or a slot does not exist, the machine is told that the
    /// writer failed and, since nothing was read, that it reads no more.
    pub(super) fn open(
        outbox: &Arc<Outbox>,
        pools: &Pools,
        transfer: TransferId,
        grant: GrantId,
        pool_id: PoolId,
        slots: &[SlotRef],
    ) -> Option<Self> {
        let reading = Reading {
            outbox: Arc::clone(outbox),
            transfer,
            grant,
        };
        let found = pools.find(pool_id).and_then(|pool| {
            let area = Area::new(&pool.spec, slots.iter().map(|slot| slot.index.0))?;
            Some((pool, area))
        });
        match found {
            Some((pool, area)) => Some(Self {
                pool,
                pool_id,
                area,
                reading,
            }),
            None => {
                error!(%transfer, %grant, pool = %pool_id, "no such pool or slot to send from");
                reading.failed();
                None
            }
        }
    }

    /// Under which grant.
    pub(super) fn grant(&self) -> GrantId {
        self.reading.grant
    }

    /// For which transfer.
    pub(super) fn transfer(&self) -> TransferId {
        self.reading.transfer
    }

    /// Tells the machine that writes completed.
    pub(super) fn written(&self, bytes: u64) {
        self.reading.outbox.post(Input::Written {
            transfer: self.reading.transfer,
            grant: self.reading.grant,
            bytes,
        });
    }

    /// Tells the machine that this attempt cannot go on. The proof that it reads no more follows.
    pub(super) fn failed(&self) {
        self.reading.failed();
    }

    /// Tells the machine that this attempt cannot go on, and ends it.
    pub(super) fn fail(self) {
        self.failed();
    }
}

#[derive(Debug)]
struct Reading {
    outbox: Arc<Outbox>,
    transfer: TransferId,
    grant: GrantId,
}

impl Reading {
    fn failed(&self) {
        self.outbox.post(Input::WriterFailed {
            transfer: self.transfer,
            grant: self.grant,
        });
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // S2: a source's pins end by this alone. The value was the only way to read the pool for
        // this attempt within this process; who else may read it, see `shm::source`.
        self.outbox.post(Input::ReadsStopped(SourceStopped {
            transfer: self.transfer,
            grant: self.grant,
        }));
    }
}
