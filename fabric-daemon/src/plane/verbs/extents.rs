//! What a writer is told of the memory that it may write: the destination plans it, the source
//! looks pages up in it.
//!
//! An extent is a rectangle of pages, some positions in some regions, at regular distances in the
//! destination's pool. Under windows each extent is contiguous bytes, which is what a window can
//! cover; with the whole pool's key an extent is a run of adjacent slots, in every region.

use fabric_proto::pool::{Arrangement, PageRun, PoolSpec};

use super::codec::LegNumber;
use super::ffi::RKey;

/// Pages that one key opens.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Extent {
    pub(super) region: u16,
    pub(super) regions: u16,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Where the first of them lies in the pool.
    pub(super) offset: u64,
    pub(super) rkey: RKey,
    /// Through which lane it is to be written.
    pub(super) leg: LegNumber,
}

/// All that a writer may write, and how it lies there.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Reach {
    /// Each extent has a window of its own, which the writer's drain is to invalidate; else the
    /// whole pool's key opens them all.
    pub(super) by_window: bool,
    pub(super) page_bytes: u32,
    /// From a page to that of the next region, in the same slot.
    pub(super) region_stride: u64,
    /// From a page to that of the next slot, in the same region.
    pub(super) slot_stride: u64,
    /// Sorted by first region, then by first position. They do not overlap. None: the destination
    /// reads by itself, so there is nothing that its peer may write.
    pub(super) extents: Vec<Extent>,
}

/// How the pages of a grant are to be covered.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Cover {
    /// By contiguous bytes, each of allowed pages alone.
    Contiguous,
    /// By runs of slots. Reaches pages that are not allowed.
    Slots,
}

impl Reach {
    /// The extents of a grant's pages, without keys. `slots` by position; `pages` sorted, and
    /// empty for all of them.
    pub(super) fn plan(spec: &PoolSpec, slots: &[u32], pages: &[PageRun], cover: Cover) -> Self {
        let regions = spec.layout.regions;
        let strides = spec.strides();
        let all = PageRun {
            region: 0,
            first: 0,
            count: u32::try_from(slots.len()).expect("a lease's slots are few"),
        };
        // In a slot-major pool adjacent slots are contiguous with all of their regions.
        let spans_regions = cover == Cover::Slots
            || (pages.is_empty() && spec.arrangement == Arrangement::SlotMajor);
        let mut reach = Self {
            by_window: cover == Cover::Contiguous,
            page_bytes: spec.layout.page_bytes,
            region_stride: strides.region,
            slot_stride: strides.slot,
            extents: Vec::new(),
        };
        if spans_regions {
            reach.add_runs(slots, all, regions);
        } else if pages.is_empty() {
            for region in 0..regions {
                reach.add_runs(slots, PageRun { region, ..all }, 1);
            }
        } else {
            for run in pages {
                reach.add_runs(slots, *run, 1);
            }
        }
        reach
    }

    /// Shares the extents out among at most `legs_max` legs of about equal bytes, and cuts some of
    /// them between pages for that, up to `extents_max` in all. How many legs there are: each has
    /// an extent.
    ///
    /// Each stripe goes to the leg that has the least so far, so that they take turns. Were each
    /// given one part of the whole, an engine that sends layer by layer, as it computes them, would
    /// use one lane after the other.
    pub(super) fn share(&mut self, legs_max: usize, extents_max: usize) -> usize {
        let total: u64 = self.extents.iter().map(|one| self.extent_bytes(one)).sum();
        let legs = (total / LEG_BYTES_MIN).clamp(1, legs_max.max(1) as u64);
        if legs == 1 {
            return self.extents.len().min(1); // Nothing to share: extents stay whole.
        }
        let mut cuts_left = extents_max.saturating_sub(self.extents.len());
        let per_leg = (total / (legs * STRIPE_BYTES_MIN)).min((cuts_left as u64 + 1) / legs);
        let whole = std::mem::take(&mut self.extents);
        let stripes = legs * per_leg.clamp(1, STRIPES_PER_LEG_MAX);
        let mut loads = vec![0; usize::try_from(legs).expect("legs are few")];
        let (mut before, mut stripe_ends_at, mut turn) = (0, 0, 0);
        for mut extent in whole {
            let unit = u64::from(extent.regions) * u64::from(self.page_bytes);
            while extent.count > 0 {
                if before >= stripe_ends_at {
                    let stripe = before * stripes / total;
                    stripe_ends_at = ((stripe + 1) * total).div_ceil(stripes);
                    let least = (0..).zip(&loads).min_by_key(|(_, bytes)| **bytes);
                    turn = least.expect("there is a leg").0;
                }
                let fit = (stripe_ends_at - before).div_ceil(unit);
                let mut count = extent.count;
                if let Ok(fit) = u32::try_from(fit)
                    && fit < count
                    && cuts_left > 0
                {
                    count = fit;
                    cuts_left -= 1;
                }
                let leg = LegNumber(u8::try_from(turn).expect("legs are few"));
                self.extents.push(Extent {
                    count,
                    leg,
                    ..extent
                });
                extent.first += count;
                extent.count -= count;
                extent.offset += u64::from(count) * self.slot_stride;
                before += u64::from(count) * unit;
                loads[turn] += u64::from(count) * unit;
            }
        }
        // Those that had nothing come last, as the first of the least is taken.
        loads.iter().filter(|bytes| **bytes > 0).count()
    }

    /// Gives the extents of a leg other keys, in their order; whether there are as many.
    pub(super) fn rekey(&mut self, leg: LegNumber, keys: &[RKey]) -> bool {
        let of_leg = |extent: &&mut Extent| extent.leg == leg;
        if self.extents.iter_mut().filter(of_leg).count() != keys.len() {
            return false;
        }
        let extents = self.extents.iter_mut().filter(of_leg);
        extents
            .zip(keys)
            .for_each(|(extent, key)| extent.rkey = *key);
        true
    }

    /// That of a grant whose destination reads by itself.
    pub(super) fn pull(spec: &PoolSpec) -> Self {
        let strides = spec.strides();
        Self {
            by_window: false,
            page_bytes: spec.layout.page_bytes,
            region_stride: strides.region,
            slot_stride: strides.slot,
            extents: Vec::new(),
        }
    }

    /// Whether the destination reads by itself.
    pub(super) fn is_pull(&self) -> bool {
        self.extents.is_empty()
    }

    /// Bytes that an extent of contiguous pages has.
    pub(super) fn extent_bytes(&self, extent: &Extent) -> u64 {
        u64::from(extent.regions) * u64::from(extent.count) * u64::from(self.page_bytes)
    }

    /// The index of a page's extent, and where the page lies. `near`: that of the page before, as
    /// pages are mostly asked for in order.
    pub(super) fn find(&self, region: u16, position: u32, near: usize) -> Option<(usize, u64)> {
        for index in [near, near + 1] {
            if let Some(offset) = self.locate(index, region, position) {
                return Some((index, offset));
            }
        }
        let spans = self.extents.first().is_some_and(|first| first.regions > 1);
        let key = if spans {
            (0, position)
        } else {
            (region, position)
        };
        let after = self
            .extents
            .partition_point(|extent| (extent.region, extent.first) <= key);
        let index = after.checked_sub(1)?;
        Some((index, self.locate(index, region, position)?))
    }

    /// Where a page lies, if it is of this extent.
    fn locate(&self, index: usize, region: u16, position: u32) -> Option<u64> {
        let extent = self.extents.get(index)?;
        let across = region.checked_sub(extent.region)?;
        let along = position.checked_sub(extent.first)?;
        if across >= extent.regions || along >= extent.count {
            return None;
        }
        // Checked: a peer says what these are.
        let across = self.region_stride.checked_mul(across.into())?;
        let along = self.slot_stride.checked_mul(along.into())?;
        extent.offset.checked_add(across)?.checked_add(along)
    }

    /// How many bytes from byte `within` of page `index` of `run` on are contiguous and under one
    /// key, and where they lie. `None`: the page is not one of these. `near`: see [`Reach::find`].
    pub(super) fn piece(
        &self,
        run: PageRun,
        (index, within): (u32, u64),
        bytes_max: u64,
        near: usize,
    ) -> Option<Piece> {
        let page_bytes = u64::from(self.page_bytes);
        let position = run.first.checked_add(index)?;
        let (found, page) = self.find(run.region, position, near)?;
        let extent = &self.extents[found];
        let pages = if self.slot_stride == page_bytes {
            (run.count - index).min(extent.count - (position - extent.first))
        } else {
            1
        };
        Some(Piece {
            offset: page.checked_add(within)?,
            bytes: (u64::from(pages) * page_bytes - within).min(bytes_max),
            extent: found,
        })
    }

    /// The runs of adjacent slots among the positions of `run`, over `regions` regions.
    fn add_runs(&mut self, slots: &[u32], run: PageRun, regions: u16) {
        let mut position = run.first;
        let end = run.first + run.count;
        while position < end {
            let slot = slots[position as usize];
            let mut count = 1;
            while position + count < end && slots[(position + count) as usize] == slot + count {
                count += 1;
            }
            // Only where slots lie next to each other without a gap, or a key covers them all.
            if regions == 1 && self.slot_stride != u64::from(self.page_bytes) {
                count = 1;
            }
            self.extents.push(Extent {
                region: run.region,
                regions,
                first: position,
                count,
                offset: u64::from(run.region) * self.region_stride
                    + u64::from(slot) * self.slot_stride,
                rkey: RKey(0),
                leg: LegNumber(0),
            });
            position += count;
        }
    }
}

/// Bytes of the destination's pool that one write can fill.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The index of its extent.
    pub(super) extent: usize,
}

/// A leg with fewer bytes is not worth a lane: a port of 50 GB/s writes them in 5 µs, about what
/// it costs to bind one more window and to take it back.
const LEG_BYTES_MIN: u64 = 256 << 10;

/// A stripe with fewer bytes is not worth a window of its own; one write has as many at most.
const STRIPE_BYTES_MIN: u64 = 1 << 20;

/// Bounds the windows that sharing adds. With as many stripes, a layer of a large model touches
/// every leg or its neighbour does.
const STRIPES_PER_LEG_MAX: u64 = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::testing;

    fn spec(arrangement: Arrangement) -> PoolSpec {
        PoolSpec {
            arrangement,
            ..testing::spec(3, 100, 10)
        }
    }

    const SLOTS: [u32; 6] = [7, 8, 9, 2, 3, 0];

    fn plans() -> impl Iterator<Item = (PoolSpec, Cover, Vec<PageRun>, Reach)> {
        let some = vec![
            PageRun {
                region: 0,
                first: 1,
                count: 3,
            },
            PageRun {
                region: 2,
                first: 4,
                count: 2,
            },
        ];
        let mut plans = Vec::new();
        for arrangement in [Arrangement::RegionMajor, Arrangement::SlotMajor] {
            for cover in [Cover::Contiguous, Cover::Slots] {
                for pages in [Vec::new(), some.clone()] {
                    let spec = spec(arrangement);
                    let reach = Reach::plan(&spec, &SLOTS, &pages, cover);
                    plans.push((spec, cover, pages, reach));
                }
            }
        }
        plans.into_iter()
    }

    #[test]
    fn every_page_is_found_where_the_pools_own_geometry_has_it() {
        for (spec, cover, pages, reach) in plans() {
            for region in 0..3 {
                for (position, slot) in (0..).zip(SLOTS) {
                    let allowed = pages.is_empty()
                        || cover == Cover::Slots
                        || pages.iter().any(|run| {
                            run.region == region
                                && (run.first..run.first + run.count).contains(&position)
                        });
                    let want = allowed.then(|| spec.page_offset(region, slot));
                    // Wherever the page before was, or was said to be.
                    for near in 0..=reach.extents.len() {
                        let found = reach.find(region, position, near).map(|(_, offset)| offset);
                        assert_eq!(found, want, "{region} {position} {near} {reach:?}");
                    }
                }
            }
            assert_eq!(reach.find(3, 0, 0), None);
            assert_eq!(reach.find(0, 6, 0), None);
        }
    }

    #[test]
    fn contiguous_extents_hold_allowed_pages_alone() {
        for (spec, cover, pages, reach) in plans() {
            if cover != Cover::Contiguous {
                continue;
            }
            let mut covered = vec![0; usize::try_from(spec.bytes()).unwrap()];
            for extent in &reach.extents {
                let start = usize::try_from(extent.offset).unwrap();
                let bytes = usize::try_from(reach.extent_bytes(extent)).unwrap();
                covered[start..start + bytes]
                    .iter_mut()
                    .for_each(|byte| *byte += 1);
            }
            let mut want = vec![0; covered.len()];
            for region in 0..3 {
                for (position, slot) in (0..).zip(SLOTS) {
                    let named = |run: &PageRun| {
                        run.region == region
                            && (run.first..run.first + run.count).contains(&position)
                    };
                    if pages.is_empty() || pages.iter().any(named) {
                        let start = usize::try_from(spec.page_offset(region, slot)).unwrap();
                        want[start..start + 100].fill(1);
                    }
                }
            }
            assert_eq!(covered, want, "{:?}", reach.extents);
        }
    }

    #[test]
    fn adjacent_slots_take_one_extent() {
        let count = |arrangement, cover| {
            Reach::plan(&spec(arrangement), &SLOTS, &[], cover)
                .extents
                .len()
        };
        assert_eq!(count(Arrangement::RegionMajor, Cover::Contiguous), 9);
        assert_eq!(count(Arrangement::SlotMajor, Cover::Contiguous), 3);
        assert_eq!(count(Arrangement::RegionMajor, Cover::Slots), 3);
    }

    #[test]
    fn shared_extents_hold_the_same_pages_in_legs_of_about_equal_bytes() {
        for arrangement in [Arrangement::RegionMajor, Arrangement::SlotMajor] {
            for (page_bytes, slots) in [(1 << 20, 64), (4096, 1024), (3 << 20, 5), (100, 6)] {
                for cover in [Cover::Contiguous, Cover::Slots] {
                    let spec = PoolSpec {
                        arrangement,
                        ..testing::spec(3, page_bytes, 2048)
                    };
                    let all: Vec<u32> = (7..7 + slots).collect();
                    let plan = Reach::plan(&spec, &all, &[], cover);
                    for legs_max in 1..=4 {
                        let mut shared = plan.clone();
                        let legs = shared.share(legs_max, 1000);
                        if legs == 1 {
                            assert_eq!(shared, plan, "nothing is cut for nothing");
                        }
                        let mut bytes = vec![0; legs];
                        for extent in &shared.extents {
                            bytes[extent.leg.index()] += shared.extent_bytes(extent);
                        }
                        let total: u64 = bytes.iter().sum();
                        let want = (total / LEG_BYTES_MIN).clamp(1, legs_max as u64);
                        assert_eq!(legs as u64, want);
                        let stripe = (total / want / STRIPES_PER_LEG_MAX).max(STRIPE_BYTES_MIN);
                        let unit = 3 * u64::from(page_bytes);
                        let most = *bytes.iter().max().unwrap();
                        let least = *bytes.iter().min().unwrap();
                        assert!(most - least <= stripe + unit, "{bytes:?} {page_bytes}");
                        assert!(least > 0, "each leg has an extent");
                        for region in 0..3 {
                            for position in 0..slots {
                                let offset = |reach: &Reach| {
                                    reach.find(region, position, 0).map(|(_, offset)| offset)
                                };
                                assert_eq!(offset(&shared), offset(&plan));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn extents_are_not_cut_beyond_the_most_that_there_may_be() {
        let spec = testing::spec(1, 1 << 20, 64);
        let slots: Vec<u32> = (0..64).collect();
        for (most, want_extents, want_legs) in [(1, 1, 1), (2, 2, 2), (9, 8, 4), (1000, 64, 4)] {
            let mut reach = Reach::plan(&spec, &slots, &[], Cover::Contiguous);
            let legs = reach.share(4, most);
            assert_eq!((reach.extents.len(), legs), (want_extents, want_legs));
        }
    }

    #[test]
    fn pieces_of_every_offset_agree_with_the_pools_own_geometry() {
        let run = PageRun {
            region: 2,
            first: 1,
            count: 5,
        };
        for (spec, _, pages, reach) in plans() {
            if !pages.is_empty() {
                continue;
            }
            for offset in 0..500 {
                for bytes_max in [1, 50, 100, 150, 1000] {
                    let page = (u32::try_from(offset / 100).unwrap(), offset % 100);
                    let piece = reach.piece(run, page, bytes_max, 0).unwrap();
                    assert!(piece.bytes >= 1 && piece.bytes <= bytes_max);
                    for byte in 0..piece.bytes {
                        let at = usize::try_from(offset + byte).unwrap();
                        let page = spec.page_offset(2, SLOTS[1 + at / 100]);
                        let want = page + u64::try_from(at % 100).unwrap();
                        assert_eq!(piece.offset + byte, want);
                    }
                }
            }
        }
    }
}
