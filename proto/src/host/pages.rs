//! The pages of one transfer: which are there, and what they must hold.

use alloc::vec::Vec;

use crate::ids::{GrantId, RequestId, Secret, SlotRef, Tag, TenantId};
use crate::pool::{Layout, PageRef, PageRun, TokenRange};
use crate::wire::Checksums;

/// The manifest's checksums as they come in, page by page, each once.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct PageTable {
    regions: u16,
    positions: u32,
    /// Region by region. Meaningful where `known` says so.
    crcs: Vec<u32>,
    known: Vec<bool>,
    known_count: u64,
}

impl PageTable {
    pub(super) fn new(regions: u16, positions: u32) -> Self {
        let count = usize::from(regions) * positions as usize;
        Self {
            regions,
            positions,
            crcs: alloc::vec![0; count],
            known: alloc::vec![false; count],
            known_count: 0,
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.crcs.len() as u64
    }

    pub(super) fn known_count(&self) -> u64 {
        self.known_count
    }

    pub(super) fn is_complete(&self) -> bool {
        self.known_count == self.count()
    }

    pub(super) fn contains(&self, page: PageRef) -> bool {
        page.region < self.regions && page.position < self.positions
    }

    /// Takes in checksums of pages that had none.
    ///
    /// # Errors
    ///
    /// The first page that is outside the transfer or had a checksum; nothing is changed then.
    pub(super) fn record(&mut self, checksums: &Checksums) -> Result<(), PageRef> {
        let page = |position| PageRef {
            region: checksums.region,
            position,
        };
        let run = checksums.run();
        let last = page(run.first + (run.count - 1));
        if !self.contains(last) {
            return Err(last);
        }
        let start = usize::from(run.region) * self.positions as usize + run.first as usize;
        let range = start..start + checksums.crcs.len();
        if let Some(known) = self.known[range.clone()].iter().position(|known| *known) {
            let offset = u32::try_from(known).expect("a run fits in 32 bits");
            return Err(page(run.first + offset));
        }
        self.crcs[range.clone()].copy_from_slice(&checksums.crcs);
        self.known[range].fill(true);
        self.known_count += u64::from(run.count);
        Ok(())
    }

    /// What is known, in messages of at most `max` checksums.
    pub(super) fn parts(&self, max: usize) -> Vec<Checksums> {
        let mut parts: Vec<Checksums> = Vec::new();
        for region in 0..self.regions {
            for position in 0..self.positions {
                let index = usize::from(region) * self.positions as usize + position as usize;
                if !self.known[index] {
                    continue;
                }
                let crc = self.crcs[index];
                match parts.last_mut() {
                    Some(part)
                        if part.region == region
                            && part.first + part.run().count == position
                            && part.crcs.len() < max =>
                    {
                        part.crcs.push(crc);
                    }
                    _ => parts.push(Checksums {
                        region,
                        first: position,
                        crcs: alloc::vec![crc],
                    }),
                }
            }
        }
        parts
    }

    /// Every page, as one run for each region.
    pub(super) fn all_runs(&self) -> Vec<PageRun> {
        let run = |region| PageRun {
            region,
            first: 0,
            count: self.positions,
        };
        (0..self.regions).map(run).collect()
    }

    pub(super) fn invariants(&self) {
        let known = self.known.iter().filter(|known| **known).count() as u64;
        assert_eq!(known, self.known_count, "the known checksums add up");
    }
}

/// Who and what a transfer's pages are: what the digest binds the checksums to.
pub(super) struct Identity<'a> {
    pub(super) grant: GrantId,
    pub(super) tenant: &'a TenantId,
    pub(super) request: &'a RequestId,
    pub(super) layout: &'a Layout,
    pub(super) tokens: TokenRange,
    /// The destination's slots.
    pub(super) slots: &'a [SlotRef],
}

/// The manifest's digest. Both daemons compute it from what they themselves believe, so one that
/// differs in anything, from the tenant to a checksum, is noticed.
// S2: what is verified later is bound to this request, lease, epochs and bytes.
pub(super) fn manifest_digest(
    key: &Secret,
    identity: &Identity<'_>,
    pages: &PageTable,
    payload: &[u8],
) -> Tag {
    let mut hasher = blake3::Hasher::new_keyed(&key.0);
    let mut text = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    text(b"fabric manifest 1");
    text(identity.tenant.as_str().as_bytes());
    text(identity.request.as_str().as_bytes());
    text(payload);
    let layout = identity.layout;
    hasher.update(&layout.model.0);
    let numbers = [
        identity.grant.0,
        u64::from(layout.regions),
        u64::from(layout.page_bytes),
        u64::from(layout.tokens_per_slot),
        identity.tokens.start,
        identity.tokens.count,
        identity.slots.len() as u64,
    ];
    for number in numbers {
        hasher.update(&number.to_le_bytes());
    }
    // Many small updates are slow: gather them.
    let mut buffer = Vec::with_capacity(identity.slots.len() * 12);
    for slot in identity.slots {
        buffer.extend_from_slice(&slot.index.0.to_le_bytes());
        buffer.extend_from_slice(&slot.epoch.as_u64().to_le_bytes());
    }
    hasher.update(&buffer);
    buffer.clear();
    buffer.extend(pages.crcs.iter().flat_map(|crc| crc.to_le_bytes()));
    hasher.update(&buffer);
    Tag(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Epoch, SlotIndex};

    fn checksums(region: u16, first: u32, crcs: &[u32]) -> Checksums {
        Checksums {
            region,
            first,
            crcs: crcs.to_vec(),
        }
    }

    #[test]
    fn a_page_is_recorded_once_and_only_inside_the_transfer() {
        let mut pages = PageTable::new(2, 3);
        assert_eq!(pages.record(&checksums(0, 0, &[1, 2])), Ok(()));
        let again = PageRef {
            region: 0,
            position: 1,
        };
        assert_eq!(pages.record(&checksums(0, 1, &[2, 3])), Err(again));
        let outside = PageRef {
            region: 1,
            position: 3,
        };
        assert_eq!(pages.record(&checksums(1, 2, &[5, 6])), Err(outside));
        assert_eq!(pages.known_count(), 2, "what was refused changed nothing");
        assert_eq!(pages.record(&checksums(0, 2, &[3])), Ok(()));
        assert_eq!(pages.record(&checksums(1, 2, &[6])), Ok(()));
        let again = PageRef {
            region: 1,
            position: 2,
        };
        assert_eq!(pages.record(&checksums(1, 1, &[5, 6])), Err(again));
        assert_eq!(pages.record(&checksums(1, 0, &[4, 5])), Ok(()));
        assert!(pages.is_complete());
        let parts = [
            checksums(0, 0, &[1, 2]),
            checksums(0, 2, &[3]),
            checksums(1, 0, &[4, 5]),
            checksums(1, 2, &[6]),
        ];
        assert_eq!(pages.parts(2), parts);
    }

    #[test]
    fn the_digest_depends_on_everything() {
        let tenants = ["a", "b"].map(|name| TenantId::new(name).unwrap());
        let requests = ["r", "s"].map(|name| RequestId::new(name).unwrap());
        let slot = |index, epoch| SlotRef {
            index: SlotIndex(index),
            epoch: Epoch::new(epoch).unwrap(),
        };
        let digest = |change: usize| {
            let pick = |at: usize| usize::from(change == at);
            let layout = Layout {
                model: Tag([u8::from(change == 2); 32]),
                regions: 1,
                page_bytes: 8 + u32::from(change == 3),
                tokens_per_slot: 4,
            };
            let slots = [slot(u32::from(change == 5), 1 + u64::from(change == 6))];
            let identity = Identity {
                grant: GrantId(u64::from(change == 7)),
                tenant: &tenants[pick(0)],
                request: &requests[pick(1)],
                layout: &layout,
                tokens: TokenRange {
                    start: u64::from(change == 4),
                    count: 4,
                },
                slots: &slots,
            };
            let mut pages = PageTable::new(1, 1);
            pages
                .record(&checksums(0, 0, &[u32::from(change == 8)]))
                .unwrap();
            let payload = [u8::from(change == 9)];
            manifest_digest(
                &Secret([u8::from(change == 10); 32]),
                &identity,
                &pages,
                &payload,
            )
        };
        let base = digest(usize::MAX);
        for change in 0..=10 {
            assert_ne!(digest(change), base, "change {change} is noticed");
        }
    }
}
