//! What must never happen, said about slots, bytes and outcomes.
//!
//! It is told what leaves the machines and what the planes do, and keeps its own books. The first
//! violation is kept, and the world stops there.

use std::collections::BTreeMap;

use fabric_proto::host::Observation;
use fabric_proto::ids::{LeaseId, PoolId, SlotRef};

/// An invariant that does not hold.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Violation {
    /// The number of the invariant; 0 for an assertion of the machine's own.
    pub invariant: u8,
    /// What happened.
    pub what: String,
}

/// The oracle's books.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Oracle {
    violation: Option<Violation>,
    /// Who has each slot: by node, pool and slot.
    owners: BTreeMap<(usize, PoolId, u32), Owner>,
    /// The greatest epoch of each slot of a node's present life.
    epochs: BTreeMap<(usize, PoolId, u32), u64>,
    /// The greatest epoch of each node's earlier lives.
    past: BTreeMap<usize, u64>,
    pages: BTreeMap<usize, Pages>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
struct Owner {
    lease: LeaseId,
    request: usize,
}

/// S10's sum, for one daemon's life.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
struct Pages {
    arrived: u64,
    verified: u64,
    corrupt: u64,
    dropped: u64,
}

impl Oracle {
    /// The first violation.
    #[must_use]
    pub fn violation(&self) -> Option<&Violation> {
        self.violation.as_ref()
    }

    /// Notes a violation, unless there was one.
    pub fn violated(&mut self, invariant: u8, what: impl FnOnce() -> String) {
        self.violation.get_or_insert_with(|| Violation {
            invariant,
            what: what(),
        });
    }

    /// A daemon gave slots to a lease.
    pub fn leased(
        &mut self,
        node: usize,
        pool: PoolId,
        lease: LeaseId,
        request: usize,
        slots: &[SlotRef],
    ) {
        for slot in slots {
            let key = (node, pool, slot.index.0);
            let owner = Owner { lease, request };
            if let Some(before) = self.owners.insert(key, owner) {
                self.violated(5, || format!("{key:?} is {before:?}'s and now {owner:?}'s"));
            }
            let epoch = slot.epoch.as_u64();
            let past = self.past.get(&node).copied().unwrap_or(0);
            let before = self.epochs.insert(key, epoch).unwrap_or(past);
            if epoch <= before.max(past) {
                self.violated(6, || format!("{key:?} had epoch {before}, now {epoch}"));
            }
        }
    }

    /// A lease ended, as its engine said or since it died.
    pub fn released(&mut self, node: usize, pool: PoolId, slots: &[SlotRef]) {
        for slot in slots {
            self.owners.remove(&(node, pool, slot.index.0));
        }
    }

    /// A daemon died: its pools are gone, and its next life counts above all of this one.
    pub fn died(&mut self, node: usize) {
        self.owners.retain(|(of, ..), _| *of != node);
        let epochs = self.epochs.iter().filter(|((of, ..), _)| *of == node);
        let greatest = epochs.map(|(_, epoch)| *epoch).max().unwrap_or(0);
        let past = self.past.entry(node).or_default();
        *past = (*past).max(greatest);
        self.epochs.retain(|(of, ..), _| *of != node);
        self.pages.remove(&node);
    }

    /// A write landed in a slot, under a grant that names it with an epoch.
    /// `may` tells whether its writer may write for a request.
    pub fn landed(
        &mut self,
        node: usize,
        pool: PoolId,
        slot: SlotRef,
        may: impl Fn(usize) -> bool,
    ) {
        let key = (node, pool, slot.index.0);
        let (now, named) = (self.epochs.get(&key).copied(), slot.epoch.as_u64());
        if now != Some(named) {
            self.violated(1, || format!("a write for epoch {named} landed in {now:?}"));
        }
        if let Some(owner) = self.owners.get(&key).copied()
            && !may(owner.request)
        {
            self.violated(7, || format!("somebody else wrote into {owner:?}'s slot"));
        }
    }

    /// A daemon counted something.
    pub fn observed(&mut self, node: usize, observation: &Observation) {
        let pages = self.pages.entry(node).or_default();
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the rest is not about pages"
        )]
        match observation {
            Observation::PagesArrived { pages: count } => pages.arrived += count,
            Observation::PagesDropped { pages: count } => pages.dropped += count,
            Observation::PagesVerified { good, corrupt } => {
                pages.verified += good;
                pages.corrupt += corrupt;
            }
            _ => {}
        }
    }

    /// Nothing is under way any more: the sums must come out.
    pub fn settled(&mut self) {
        for (node, pages) in self.pages.clone() {
            let ended = pages.verified + pages.corrupt + pages.dropped;
            if pages.arrived != ended {
                self.violated(10, || format!("node {node}: {pages:?} do not add up"));
            }
        }
    }
}
