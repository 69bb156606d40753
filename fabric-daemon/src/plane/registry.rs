//! The writers of a plane, by transfer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use fabric_proto::ids::{GrantId, TransferId};
use tracing::{debug, error};

use super::lock;

/// Which writer a transfer's commands go to. As many as the machine has open.
#[derive(Debug)]
pub(super) struct Registry<W> {
    // Ordered, since going through it must not depend on chance.
    writers: Mutex<BTreeMap<TransferId, (GrantId, W)>>,
}

impl<W> Registry<W> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            writers: Mutex::default(),
        })
    }

    /// Makes `writer` the transfer's, until the registration is dropped. Gives back the one of an
    /// earlier attempt, if that is not over: the machine waits for that, so it is a bug.
    pub(super) fn register(
        self: &Arc<Self>,
        transfer: TransferId,
        grant: GrantId,
        writer: W,
    ) -> (Registration<W>, Option<W>) {
        let before = lock(&self.writers).insert(transfer, (grant, writer));
        let registration = Registration {
            registry: Arc::clone(self),
            transfer,
            grant,
        };
        if let Some((before, _)) = &before {
            error!(%transfer, %grant, %before, "the transfer still has a writer");
        }
        (registration, before.map(|(_, writer)| writer))
    }

    /// Tells a transfer's writer something. There is none where it has just failed; the machine
    /// hears of that.
    pub(super) fn tell(&self, transfer: TransferId, tell: impl FnOnce(&W)) {
        match lock(&self.writers).get(&transfer) {
            Some((_, writer)) => tell(writer),
            None => debug!(%transfer, "the writer is gone"),
        }
    }

    /// Tells every writer something.
    pub(super) fn tell_all(&self, tell: impl Fn(&W)) {
        for (_, writer) in lock(&self.writers).values() {
            tell(writer);
        }
    }
}

/// A writer's place in the registry.
#[derive(Debug)]
pub(super) struct Registration<W> {
    registry: Arc<Registry<W>>,
    transfer: TransferId,
    grant: GrantId,
}

impl<W> Drop for Registration<W> {
    fn drop(&mut self) {
        let mut writers = lock(&self.registry.writers);
        // The next attempt of the transfer may have begun.
        if writers
            .get(&self.transfer)
            .is_some_and(|(grant, _)| *grant == self.grant)
        {
            writers.remove(&self.transfer);
        }
    }
}
