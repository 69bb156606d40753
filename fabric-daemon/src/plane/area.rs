//! Where the pages of a lease lie in a pool's memory.

use fabric_proto::pool::{PageRef, PageRun, PoolSpec};

/// The slots of a lease, by position, and the geometry of their pool.
///
/// Whatever [`Area::extent`] returns lies within the pool: the slots were checked against the pool
/// when the area was made, and a run is checked with [`Area::holds`] before it is used.
#[derive(Debug)]
pub(super) struct Area {
    page_bytes: u64,
    regions: u16,
    region_stride: u64,
    slot_stride: u64,
    slots: Box<[u32]>,
}

/// Bytes that are contiguous in a pool.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Area {
    /// The area of `slots` in a pool; `None` if one is outside it.
    pub(super) fn new(spec: &PoolSpec, slots: impl Iterator<Item = u32>) -> Option<Self> {
        let slots: Box<[u32]> = slots.collect();
        if slots.iter().any(|slot| *slot >= spec.slots) {
            return None;
        }
        let strides = spec.strides();
        Some(Self {
            page_bytes: u64::from(spec.layout.page_bytes),
            regions: spec.layout.regions,
            region_stride: strides.region,
            slot_stride: strides.slot,
            slots,
        })
    }

    /// Whether every page of `run` is one of the area's, and there is one.
    pub(super) fn holds(&self, run: PageRun) -> bool {
        let end = u64::from(run.first) + u64::from(run.count);
        let slots = u64::try_from(self.slots.len()).expect("a slice's length fits 64 bits");
        run.count > 0 && run.region < self.regions && end <= slots
    }

    /// Whether the area holds every page of `run`, and `pages` names each. `pages` is sorted, and
    /// empty for all of them.
    pub(super) fn allows(&self, pages: &[PageRun], run: PageRun) -> bool {
        if !self.holds(run) {
            return false;
        }
        // No overflow: the area holds the run.
        let end = run.first + run.count;
        let mut position = run.first;
        while !pages.is_empty() && position < end {
            let page = PageRef {
                region: run.region,
                position,
            };
            let after = pages.partition_point(|allowed| {
                (allowed.region, allowed.first) <= (run.region, position)
            });
            match after.checked_sub(1).map(|index| pages[index]) {
                Some(allowed) if allowed.contains(page) => {
                    position = allowed.first.saturating_add(allowed.count);
                }
                Some(_) | None => return false,
            }
        }
        true
    }

    /// Bytes of `run`'s pages. At most 2^58, as a page has at most 2^26.
    pub(super) fn run_bytes(&self, run: PageRun) -> u64 {
        u64::from(run.count) * self.page_bytes
    }

    /// The slots, by position.
    pub(super) fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Where the bytes of `run` from its byte `offset` on lie: as many as are contiguous, at most
    /// `bytes_max`. Pages in adjacent slots are, where their pool keeps a region together.
    ///
    /// # Panics
    ///
    /// Where the area does not hold `run`, or `offset` is not within it.
    pub(super) fn extent(&self, run: PageRun, offset: u64, bytes_max: u64) -> Extent {
        let (index, within) = (offset / self.page_bytes, offset % self.page_bytes);
        assert!(
            index < u64::from(run.count),
            "the caller keeps the offset within the run"
        );
        let first = usize::try_from(u64::from(run.first) + index).expect("positions fit 32 bits");
        let end = run.first as usize + run.count as usize;
        let slots = &self.slots[first..end];
        let slot = slots[0];
        let mut bytes = self.page_bytes - within;
        if self.slot_stride == self.page_bytes {
            for (next, other) in (slot + 1..).zip(&slots[1..]) {
                if bytes >= bytes_max || *other != next {
                    break;
                }
                bytes += self.page_bytes;
            }
        }
        let page = u64::from(run.region) * self.region_stride + u64::from(slot) * self.slot_stride;
        Extent {
            start: page + within,
            bytes: bytes.min(bytes_max),
        }
    }
}

#[cfg(test)]
mod tests {
    use fabric_proto::pool::Arrangement;

    use super::*;
    use crate::plane::testing;

    fn spec(arrangement: Arrangement) -> PoolSpec {
        PoolSpec {
            arrangement,
            ..testing::spec(3, 100, 10)
        }
    }

    #[test]
    fn extents_of_every_offset_agree_with_the_pools_own_geometry() {
        let slots = [7, 8, 9, 2, 3, 0];
        for arrangement in [Arrangement::RegionMajor, Arrangement::SlotMajor] {
            let spec = spec(arrangement);
            let area = Area::new(&spec, slots.into_iter()).unwrap();
            let run = PageRun {
                region: 2,
                first: 1,
                count: 5,
            };
            assert!(area.holds(run));
            for offset in 0..500 {
                for bytes_max in [1, 50, 100, 150, 1000] {
                    let extent = area.extent(run, offset, bytes_max);
                    assert!(extent.bytes >= 1 && extent.bytes <= bytes_max);
                    for byte in 0..extent.bytes {
                        let at = usize::try_from(offset + byte).unwrap();
                        let page = spec.page_offset(2, slots[1 + at / 100]);
                        let want = page + u64::try_from(at % 100).unwrap();
                        assert_eq!(extent.start + byte, want);
                    }
                }
            }
        }
    }

    #[test]
    fn adjacent_slots_are_one_extent_where_a_region_is_kept_together() {
        let run = PageRun {
            region: 1,
            first: 0,
            count: 4,
        };
        let slots = || [5, 6, 7, 3].into_iter();
        let area = Area::new(&spec(Arrangement::RegionMajor), slots()).unwrap();
        let (start, bytes) = (10 * 100 + 550, 250);
        assert_eq!(area.extent(run, 50, 1000), Extent { start, bytes });
        let area = Area::new(&spec(Arrangement::SlotMajor), slots()).unwrap();
        assert_eq!(area.extent(run, 50, 1000).bytes, 50);
    }

    #[test]
    fn what_is_outside_is_refused() {
        let spec = spec(Arrangement::RegionMajor);
        assert!(Area::new(&spec, [10].into_iter()).is_none());
        let area = Area::new(&spec, [1, 2].into_iter()).unwrap();
        let run = |region, first, count| PageRun {
            region,
            first,
            count,
        };
        assert!(area.holds(run(2, 0, 2)));
        for outside in [
            run(3, 0, 1),
            run(0, 0, 3),
            run(0, 2, 1),
            run(0, 0, 0),
            run(0, u32::MAX, u32::MAX),
        ] {
            assert!(!area.holds(outside), "{outside:?}");
        }
    }
}
