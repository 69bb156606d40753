//! A pool's slots: who holds each one, and which are free.
//!
//! ```text
//!            lease()                    end_lease()
//!   free ─────────────▶ held: lease ────────────────▶ held by grants and pins alone ──▶ free
//!    ▲                  (epoch + 1)  ◀─ open_grant() / pin()      (quarantine)           │
//!    └────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! 1. A slot is free when it has no lease, no grant and no pin. That is the only way to be free,
//!    and [`SlotTable::settle`] is the only place where it becomes so.
//! 2. Leasing a free slot raises its epoch. Nothing else touches an epoch.
//! 3. A grant and a pin can be added only while a holder is there; each is taken away by name.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use super::api::ScrubPolicy;
use crate::ids::{Epoch, GrantId, LeaseId, SlotIndex, SlotRef, TenantId};

/// One slot.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Slot {
    /// Of its latest lease; before the first, the base of the incarnation.
    epoch: Epoch,
    /// The request whose slot it is.
    // S5: one place, so never two leases.
    lease: Option<LeaseId>,
    /// The remote writer that may still write it.
    grant: Option<GrantId>,
    /// Local readers and scrubs.
    pins: u32,
    /// Whose bytes it may hold; `None`: nobody's, since it was registered.
    tenant: Option<TenantId>,
}

impl Slot {
    fn is_free(&self) -> bool {
        let written = self.grant.is_some() && !planted!(FreeUnderGrant);
        let read = self.pins > 0 && !planted!(FreeUnderPin);
        self.lease.is_none() && !written && !read
    }
}

/// The slots of one pool.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct SlotTable {
    slots: Vec<Slot>,
    free: FreeRuns,
    leased_count: u64,
    granted_count: u64,
    pinned_count: u64,
}

/// The slots of a lease as they were found.
pub(super) struct Leased {
    /// The slots, with their new epochs.
    pub(super) slots: Vec<SlotRef>,
    /// Those that must be scrubbed before the lease is given out.
    pub(super) dirty: Vec<SlotRef>,
}

impl SlotTable {
    pub(super) fn new(count: u32, base: Epoch) -> Self {
        let slot = Slot {
            epoch: base,
            lease: None,
            grant: None,
            pins: 0,
            tenant: None,
        };
        Self {
            slots: alloc::vec![slot; count as usize],
            free: FreeRuns::all(count),
            leased_count: 0,
            granted_count: 0,
            pinned_count: 0,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64
    }

    pub(super) fn free_count(&self) -> u64 {
        self.free.count
    }

    pub(super) fn leased_count(&self) -> u64 {
        self.leased_count
    }

    pub(super) fn granted_count(&self) -> u64 {
        self.granted_count
    }

    pub(super) fn pinned_count(&self) -> u64 {
        self.pinned_count
    }

    /// Whether anybody holds any slot.
    pub(super) fn is_idle(&self) -> bool {
        self.free.count == self.len()
    }

    pub(super) fn is_free(&self, index: SlotIndex) -> bool {
        self.slots.get(index.0 as usize).is_some_and(Slot::is_free)
    }

    /// Chooses `count` free slots, contiguous where it can: fewer runs need fewer memory windows.
    /// `None` where too few are free.
    pub(super) fn choose(&self, count: u32) -> Option<Vec<SlotIndex>> {
        if planted!(LeaseATakenSlot) {
            return Some((0..count).map(SlotIndex).collect());
        }
        self.free.choose(count)
    }

    /// Leases slots that are free; the caller has checked that they are.
    pub(super) fn lease(
        &mut self,
        indices: &[SlotIndex],
        lease: LeaseId,
        tenant: &TenantId,
        scrub: ScrubPolicy,
    ) -> Leased {
        let mut leased = Leased {
            slots: Vec::with_capacity(indices.len()),
            dirty: Vec::new(),
        };
        for &index in indices {
            if !planted!(LeaseATakenSlot) || self.free.contains(index.0) {
                self.free.take(index.0);
            }
            let slot = &mut self.slots[index.0 as usize];
            // S5: only a slot without any holder is leased.
            let taken = !slot.is_free() && !planted!(LeaseATakenSlot);
            assert!(!taken, "slot {index} is free when it is leased");
            // S6: the epoch goes up by one, and 2^32 leases of a slot in one life never happen.
            let next = slot.epoch.checked_next();
            if !planted!(EpochStands) {
                slot.epoch = next.expect("an epoch does not reach its end");
            }
            let slot_ref = SlotRef {
                index,
                epoch: slot.epoch,
            };
            let foreign = slot.tenant.as_ref().is_some_and(|last| last != tenant);
            slot.lease = Some(lease);
            if slot.tenant.as_ref() != Some(tenant) {
                slot.tenant = Some(tenant.clone());
            }
            leased.slots.push(slot_ref);
            let stale = scrub == ScrubPolicy::CrossTenant && foreign && !planted!(SkipScrub);
            if scrub == ScrubPolicy::Always || stale {
                leased.dirty.push(slot_ref);
            }
        }
        self.leased_count += indices.len() as u64;
        leased
    }

    /// Ends a lease's hold. Returns how many slots became free.
    pub(super) fn end_lease(&mut self, slots: &[SlotRef], lease: LeaseId) -> u32 {
        self.leased_count -= slots.len() as u64;
        self.release(slots, |slot| {
            assert_eq!(slot.lease, Some(lease), "a lease ends its own hold");
            slot.lease = None;
        })
    }

    /// Lets a remote writer hold slots.
    pub(super) fn open_grant(&mut self, slots: &[SlotRef], grant: GrantId) {
        self.granted_count += slots.len() as u64;
        for slot_ref in slots {
            let slot = self.held(*slot_ref);
            assert!(
                slot.lease.is_some(),
                "a grant is opened only for a live lease"
            );
            // S7: one writer at a time.
            assert_eq!(slot.grant, None, "a slot has one writer at a time");
            slot.grant = Some(grant);
        }
    }

    /// Ends a remote writer's hold; called with a proof in hand. Returns how many became free.
    pub(super) fn close_grant(&mut self, slots: &[SlotRef], grant: GrantId) -> u32 {
        self.granted_count -= slots.len() as u64;
        self.release(slots, |slot| {
            assert_eq!(slot.grant, Some(grant), "a grant ends its own hold");
            slot.grant = None;
        })
    }

    /// Lets a local reader, or a scrub, hold slots.
    // S2: nobody is given a slot that is being read or scrubbed.
    pub(super) fn pin(&mut self, slots: &[SlotRef]) {
        for slot_ref in slots {
            let slot = self.held(*slot_ref);
            assert!(
                slot.lease.is_some(),
                "a pin is taken only under a live lease"
            );
            slot.pins = slot
                .pins
                .checked_add(1)
                .expect("pins are bounded by transfers");
            if slot.pins == 1 {
                self.pinned_count += 1;
            }
        }
    }

    /// Ends one pin of each slot. Returns how many became free.
    pub(super) fn unpin(&mut self, slots: &[SlotRef]) -> u32 {
        let mut unpinned = 0;
        let freed = self.release(slots, |slot| {
            slot.pins = slot.pins.checked_sub(1).expect("a pin is taken away once");
            unpinned += u64::from(slot.pins == 0);
        });
        self.pinned_count -= unpinned;
        freed
    }

    /// The lease that a slot ref still belongs to.
    pub(super) fn lease_of(&self, slot_ref: SlotRef) -> Option<LeaseId> {
        let slot = self.slots.get(slot_ref.index.0 as usize)?;
        if slot.epoch == slot_ref.epoch {
            slot.lease
        } else {
            None
        }
    }

    /// Recounts everything. `pins` tells how many pins a slot must have.
    pub(super) fn invariants(
        &self,
        leases: impl Fn(LeaseId, SlotRef) -> bool,
        grants: impl Fn(GrantId, SlotRef) -> bool,
        pins: &BTreeMap<SlotRef, u32>,
    ) {
        let mut counts = [0_u64; 4];
        for (index, slot) in (0_u32..).zip(&self.slots) {
            let slot_ref = SlotRef {
                index: SlotIndex(index),
                epoch: slot.epoch,
            };
            assert_eq!(
                self.free.contains(index),
                slot.is_free(),
                "slot {index} is free or held"
            );
            if let Some(lease) = slot.lease {
                assert!(
                    leases(lease, slot_ref),
                    "the lease of slot {index} knows it"
                );
            }
            if let Some(grant) = slot.grant {
                assert!(
                    grants(grant, slot_ref),
                    "the grant of slot {index} knows it"
                );
            }
            let want = pins.get(&slot_ref).copied().unwrap_or(0);
            assert_eq!(slot.pins, want, "the pins of slot {index} add up");
            counts[0] += u64::from(slot.is_free());
            counts[1] += u64::from(slot.lease.is_some());
            counts[2] += u64::from(slot.grant.is_some());
            counts[3] += u64::from(slot.pins > 0);
        }
        let kept = [
            self.free.count,
            self.leased_count,
            self.granted_count,
            self.pinned_count,
        ];
        assert_eq!(
            counts, kept,
            "the counts of free, leased, granted and pinned slots"
        );
        self.free.invariants();
    }

    /// Takes a holder away from each slot, and frees the slots that it was the last of.
    fn release(&mut self, slots: &[SlotRef], mut take: impl FnMut(&mut Slot)) -> u32 {
        let mut freed = 0;
        for slot_ref in slots {
            take(self.held(*slot_ref));
            freed += u32::from(self.settle(slot_ref.index));
        }
        freed
    }

    fn settle(&mut self, index: SlotIndex) -> bool {
        // S1, S4: free exactly when the last holder is gone; no timer comes by here.
        let is_free = self.slots[index.0 as usize].is_free();
        if is_free {
            self.free.give(index.0);
        }
        is_free
    }

    /// The slot of a ref that must be the current one: its holder keeps the epoch from moving.
    fn held(&mut self, slot_ref: SlotRef) -> &mut Slot {
        let slot = &mut self.slots[slot_ref.index.0 as usize];
        // S1: a slot cannot change its epoch under a holder.
        assert_eq!(
            slot.epoch, slot_ref.epoch,
            "the epoch of slot {} stands",
            slot_ref.index
        );
        assert!(!slot.is_free(), "slot {} is held", slot_ref.index);
        slot
    }
}

/// The free slots as runs, start to length; no two runs touch.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct FreeRuns {
    runs: BTreeMap<u32, u32>,
    count: u64,
}

impl FreeRuns {
    fn all(count: u32) -> Self {
        let runs = if count == 0 {
            BTreeMap::new()
        } else {
            BTreeMap::from([(0, count)])
        };
        Self {
            runs,
            count: u64::from(count),
        }
    }

    fn contains(&self, index: u32) -> bool {
        self.runs
            .range(..=index)
            .next_back()
            .is_some_and(|(start, len)| index - start < *len)
    }

    /// The first run that is long enough, else pieces from the lowest runs up.
    fn choose(&self, count: u32) -> Option<Vec<SlotIndex>> {
        if u64::from(count) > self.count && !planted!(LeaseWhatIsLeft) {
            return None;
        }
        if let Some((start, _)) = self.runs.iter().find(|(_, len)| **len >= count) {
            return Some((*start..*start + count).map(SlotIndex).collect());
        }
        let all = self
            .runs
            .iter()
            .flat_map(|(start, len)| *start..*start + *len);
        Some(all.take(count as usize).map(SlotIndex).collect())
    }

    fn take(&mut self, index: u32) {
        let (start, len) = self
            .runs
            .range(..=index)
            .next_back()
            .map(|(start, len)| (*start, *len))
            .filter(|(start, len)| index - start < *len)
            .expect("a slot that is leased is free");
        self.runs.remove(&start);
        if index > start {
            self.runs.insert(start, index - start);
        }
        let after = start + len - index - 1;
        if after > 0 {
            self.runs.insert(index + 1, after);
        }
        self.count -= 1;
    }

    fn give(&mut self, index: u32) {
        assert!(!self.contains(index), "a slot becomes free once");
        let mut start = index;
        let mut len = 1;
        if let Some((before, before_len)) = self.runs.range(..index).next_back()
            && before + before_len == index
        {
            start = *before;
            len += before_len;
        }
        if let Some(after_len) = self.runs.remove(&(index + 1)) {
            len += after_len;
        }
        self.runs.insert(start, len);
        self.count += 1;
    }

    fn invariants(&self) {
        let mut end = None;
        for (start, len) in &self.runs {
            assert!(*len > 0, "no run is empty");
            assert!(end.is_none_or(|end| end < *start), "no two runs touch");
            end = Some(start + len);
        }
        let count: u64 = self.runs.values().map(|len| u64::from(*len)).sum();
        assert_eq!(count, self.count, "the runs add up");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn base() -> Epoch {
        Epoch::base(crate::ids::Incarnation::new(1).unwrap()).unwrap()
    }

    fn tenant(name: &str) -> TenantId {
        TenantId::new(name).unwrap()
    }

    fn lease(table: &mut SlotTable, count: u32, id: u64, name: &str) -> Leased {
        let indices = table.choose(count).unwrap();
        table.lease(
            &indices,
            LeaseId(id),
            &tenant(name),
            ScrubPolicy::CrossTenant,
        )
    }

    #[test]
    fn a_slot_is_free_only_when_lease_grant_and_pin_are_gone() {
        let mut table = SlotTable::new(2, base());
        let slots = lease(&mut table, 1, 1, "a").slots;
        table.open_grant(&slots, GrantId(1));
        table.pin(&slots);
        assert_eq!(table.end_lease(&slots, LeaseId(1)), 0);
        assert_eq!(table.close_grant(&slots, GrantId(1)), 0);
        assert_eq!(table.free_count(), 1, "the pin still holds it");
        assert_eq!(table.unpin(&slots), 1);
        assert!(table.is_idle());
    }

    #[test]
    fn each_lease_of_a_slot_has_the_next_epoch() {
        let mut table = SlotTable::new(1, base());
        let first = lease(&mut table, 1, 1, "a").slots;
        table.end_lease(&first, LeaseId(1));
        let second = lease(&mut table, 1, 2, "a").slots;
        assert_eq!(Some(second[0].epoch), first[0].epoch.checked_next());
        assert_eq!(table.lease_of(first[0]), None, "the old ref names nothing");
    }

    #[test]
    fn only_a_change_of_tenant_makes_a_slot_dirty() {
        let mut table = SlotTable::new(1, base());
        for (name, dirty) in [("a", 0), ("a", 0), ("b", 1), ("b", 0)] {
            let leased = lease(&mut table, 1, 1, name);
            assert_eq!(leased.dirty.len(), dirty, "lease of {name}");
            table.end_lease(&leased.slots, LeaseId(1));
        }
    }

    #[test]
    #[should_panic(expected = "the epoch of slot 0 stands")]
    fn a_stale_slot_ref_is_caught_at_use() {
        let mut table = SlotTable::new(1, base());
        let first = lease(&mut table, 1, 1, "a").slots;
        table.end_lease(&first, LeaseId(1));
        lease(&mut table, 1, 2, "a");
        table.pin(&first);
    }

    #[test]
    fn a_lease_takes_one_run_where_there_is_one() {
        let mut table = SlotTable::new(8, base());
        let low = lease(&mut table, 2, 1, "a").slots;
        lease(&mut table, 1, 2, "a");
        table.end_lease(&low, LeaseId(1));
        let indices = table.choose(3).unwrap();
        assert_eq!(indices, [3, 4, 5].map(SlotIndex), "not 0, 1 and 3");
        assert_eq!(table.choose(7).unwrap().len(), 7, "in pieces where it must");
        assert_eq!(table.choose(8), None);
    }

    proptest! {
        #[test]
        fn free_runs_are_a_set(
            operations in prop::collection::vec((0_u32..32, any::<bool>()), 200)
        ) {
            let mut runs = FreeRuns::all(32);
            let mut model: std::collections::BTreeSet<u32> = (0..32).collect();
            for (index, take) in operations {
                match (take, model.contains(&index)) {
                    (true, true) => { runs.take(index); model.remove(&index); }
                    (false, false) => { runs.give(index); model.insert(index); }
                    _ => {}
                }
                runs.invariants();
                for index in 0..32 {
                    prop_assert_eq!(runs.contains(index), model.contains(&index));
                }
            }
        }
    }
}
