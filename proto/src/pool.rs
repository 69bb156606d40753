//! What a pool is: its layout, its geometry, and where each page lies.

use alloc::vec::Vec;

use crate::ids::Tag;
use crate::limits;
use crate::outcome::Rejection;

/// The shape of KV cache. Two pools can exchange pages only where their layouts are equal.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Layout {
    /// A digest that the engine makes of everything that gives the bytes their meaning: model,
    /// weights, data type, heads, order of axes. Equal digests mean interchangeable pages.
    pub model: Tag,
    /// Regions of the pool: a layer's K or V tensor each, or 1 where a slot is contiguous.
    pub regions: u16,
    /// Bytes of one page: one slot within one region.
    pub page_bytes: u32,
    /// Tokens that one slot holds.
    pub tokens_per_slot: u16,
}

/// How a pool's pages are ordered in its memory.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Arrangement {
    /// All slots of region 0, then all of region 1: one tensor for each region.
    RegionMajor,
    /// All regions of slot 0, then all of slot 1.
    SlotMajor,
}

/// What an engine says of a pool when it registers it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct PoolSpec {
    /// The shape of its pages.
    pub layout: Layout,
    /// Slots.
    pub slots: u32,
    /// The order of its pages.
    pub arrangement: Arrangement,
    /// The longest context, in tokens, that the engine tells its users it serves.
    pub context_tokens: u64,
}

/// How far apart the pages of a pool lie, in bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Strides {
    /// From a page to that of the next region, in the same slot.
    pub region: u64,
    /// From a page to that of the next slot, in the same region.
    pub slot: u64,
}

impl PoolSpec {
    /// Bytes of the whole pool.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.slots) * u64::from(self.layout.regions) * u64::from(self.layout.page_bytes)
    }

    /// Where the page of `slot` in `region` starts, in bytes from the pool's start.
    ///
    /// # Panics
    ///
    /// Where `region` or `slot` is outside the pool: callers check what they were told first.
    #[must_use]
    pub fn page_offset(&self, region: u16, slot: u32) -> u64 {
        assert!(region < self.layout.regions, "the region is in the pool");
        assert!(slot < self.slots, "the slot is in the pool");
        let strides = self.strides();
        u64::from(region) * strides.region + u64::from(slot) * strides.slot
    }

    /// How far apart pages lie.
    #[must_use]
    pub fn strides(&self) -> Strides {
        let page = u64::from(self.layout.page_bytes);
        match self.arrangement {
            Arrangement::RegionMajor => Strides {
                region: u64::from(self.slots) * page,
                slot: page,
            },
            Arrangement::SlotMajor => Strides {
                region: page,
                slot: u64::from(self.layout.regions) * page,
            },
        }
    }

    /// Slots that `tokens` tokens need.
    #[must_use]
    pub fn slots_for(&self, tokens: u64) -> u64 {
        tokens.div_ceil(u64::from(self.layout.tokens_per_slot))
    }

    /// Checks a pool before it is registered.
    ///
    /// # Errors
    ///
    /// The first bound that it breaks, with both numbers.
    // S9: a pool that cannot hold the context that it advertises is refused.
    pub fn check(&self) -> Result<(), Rejection> {
        let layout = &self.layout;
        let bounds = [
            (u64::from(layout.regions), u64::from(limits::REGIONS_MAX)),
            (
                u64::from(layout.page_bytes),
                u64::from(limits::PAGE_BYTES_MAX),
            ),
            (u64::from(layout.tokens_per_slot), u64::from(u16::MAX)),
            (u64::from(self.slots), u64::from(limits::POOL_SLOTS_MAX)),
            (self.context_tokens, u64::MAX),
        ];
        for (value, bound) in bounds {
            if value == 0 {
                return Err(Rejection::Malformed { value, bound });
            }
            if value > bound {
                return Err(Rejection::ExceedsLimit {
                    value,
                    limit: bound,
                });
            }
        }
        let tokens = u64::from(self.slots) * u64::from(layout.tokens_per_slot);
        if tokens < self.context_tokens {
            return Err(Rejection::PoolTooSmall {
                tokens,
                context: self.context_tokens,
            });
        }
        Ok(())
    }
}

/// A range of a request's tokens.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct TokenRange {
    /// The first token. A multiple of the layout's tokens per slot.
    pub start: u64,
    /// How many.
    pub count: u64,
}

impl TokenRange {
    /// One past the last token; saturates, and admission refuses what saturated.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.count)
    }
}

/// A page of a transfer: the slot at `position` of the lease, within `region`.
///
/// The position counts the lease's own slot refs, so a page cannot be named without its lease.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PageRef {
    /// Which region.
    pub region: u16,
    /// Which of the transfer's slots.
    pub position: u32,
}

/// Pages of one region at consecutive positions.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PageRun {
    /// Which region.
    pub region: u16,
    /// The first position.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl PageRun {
    /// Whether `page` is one of the run's.
    #[must_use]
    pub fn contains(&self, page: PageRef) -> bool {
        page.region == self.region
            && page.position >= self.first
            && page.position - self.first < self.count
    }
}

/// Joins sorted pages into runs.
pub fn runs_of(pages: &[PageRef]) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for page in pages {
        match runs.last_mut() {
            Some(run) if run.region == page.region && run.first + run.count == page.position => {
                run.count += 1;
            }
            _ => runs.push(PageRun {
                region: page.region,
                first: page.position,
                count: 1,
            }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> PoolSpec {
        PoolSpec {
            layout: Layout {
                model: Tag([1; 32]),
                regions: 3,
                page_bytes: 10,
                tokens_per_slot: 4,
            },
            slots: 5,
            arrangement: Arrangement::RegionMajor,
            context_tokens: 20,
        }
    }

    #[test]
    fn pages_tile_the_pool_in_both_arrangements() {
        for arrangement in [Arrangement::RegionMajor, Arrangement::SlotMajor] {
            let spec = PoolSpec {
                arrangement,
                ..spec()
            };
            let mut starts: Vec<u64> = (0..3)
                .flat_map(|region| (0..5).map(move |slot| spec.page_offset(region, slot)))
                .collect();
            starts.sort_unstable();
            assert_eq!(starts, (0..15).map(|page| page * 10).collect::<Vec<_>>());
            assert_eq!(spec.bytes(), 150);
        }
    }

    #[test]
    fn a_pool_that_cannot_hold_its_context_is_refused_with_both_numbers() {
        let spec = PoolSpec {
            context_tokens: 21,
            ..spec()
        };
        assert_eq!(
            spec.check(),
            Err(Rejection::PoolTooSmall {
                tokens: 20,
                context: 21
            })
        );
    }

    #[test]
    fn each_bound_of_a_pool_is_allowed_and_one_more_is_refused() {
        type Set = fn(&mut PoolSpec, u32);
        let set: [(Set, u32); 3] = [
            (
                |spec, value| spec.layout.regions = u16::try_from(value).unwrap(),
                u32::from(limits::REGIONS_MAX),
            ),
            (
                |spec, value| spec.layout.page_bytes = value,
                limits::PAGE_BYTES_MAX,
            ),
            (|spec, value| spec.slots = value, limits::POOL_SLOTS_MAX),
        ];
        for (set, bound) in set {
            let with = |value| {
                let mut spec = spec();
                set(&mut spec, value);
                spec.check()
            };
            assert_eq!(with(bound), Ok(()));
            let (value, limit) = (u64::from(bound) + 1, u64::from(bound));
            let refused = Err(Rejection::ExceedsLimit { value, limit });
            assert_eq!(with(bound + 1), refused);
        }
    }

    #[test]
    fn sorted_pages_join_into_runs() {
        let page = |region, position| PageRef { region, position };
        let runs = runs_of(&[page(0, 1), page(0, 2), page(0, 4), page(1, 5)]);
        let run = |region, first, count| PageRun {
            region,
            first,
            count,
        };
        assert_eq!(runs, vec![run(0, 1, 2), run(0, 4, 1), run(1, 5, 1)]);
    }
}
