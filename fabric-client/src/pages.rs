//! The pages of a lease as slices: the one module that trusts a lease with memory.
//!
//! Who upholds it: the daemon gives a slot to one lease at a time (S5), which this process checks
//! again (`PoolShared::claim`); a remote writer reaches a slot only under a grant, and the pages of
//! a lease that receives are not reached from here before its grants were closed (S2); the daemon
//! itself writes only under a grant, or scrubs before a lease is given out. Within this process a
//! lease is reached through one owner, whose borrows are the slices' borrows.

use std::sync::Arc;

use crate::lease::Lease;

/// A page to read.
pub(crate) fn page(lease: &Lease, region: u16, position: u32) -> &[u8] {
    let (offset, len) = place(lease, region, position);
    // SAFETY: the lease's holder borrows it for as long as the slice lives, and nobody else writes
    // to its slots: see the module.
    let page = unsafe { lease.pool.memory.slice(offset, len) };
    page.expect("the page is in the pool, which was mapped whole")
}

/// A page to write.
pub(crate) fn page_mut(lease: &mut Arc<Lease>, region: u16, position: u32) -> &mut [u8] {
    let (offset, len) = place(lease, region, position);
    // SAFETY: the lease's one owner is borrowed mutably for as long as the slice lives, and nobody
    // else reads or writes this page: see the module. Clones of the `Arc` are kept by readers alone
    // (`PageReader`): a verification, which is over before there is an owner with pages, and a
    // seal, whose pages the owner does not reach until it is over (`Sending::lease_page_mut`).
    let page = unsafe { lease.pool.memory.slice_mut(offset, len) };
    page.expect("the page is in the pool, which was mapped whole")
}

/// Where a page lies in the pool.
fn place(lease: &Lease, region: u16, position: u32) -> (u64, u64) {
    let spec = &lease.pool.spec;
    let regions = spec.layout.regions;
    assert!(
        region < regions,
        "region {region} is outside the pool's {regions}"
    );
    let slots = lease.slots.len();
    let slot = lease.slots.get(position as usize);
    let slot = slot.unwrap_or_else(|| panic!("position {position} is outside the lease's {slots}"));
    (
        spec.page_offset(region, slot.index.0),
        u64::from(spec.layout.page_bytes),
    )
}
