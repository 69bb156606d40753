//! The paged KV cache as the model sees it: pages of `f16`, named by region and position.
//!
//! Region `2 * layer` holds a layer's K, region `2 * layer + 1` its V. A *position* is the index of
//! a slot within one request: token `t` lives in position `t / tokens_per_slot`. A page is laid out
//! `[token in slot][kv head][head dim]`, so a token's row is contiguous.

use std::ops::Range;

use anyhow::Result;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// The dimensions of a paged cache; two caches with equal shapes have interchangeable pages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KvShape {
    /// Transformer layers; each has a K and a V region.
    pub layers: usize,
    /// Key/value heads per layer.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens that one slot holds.
    pub tokens_per_slot: usize,
}

impl KvShape {
    /// The elements of one token in one region.
    #[must_use]
    pub fn row_elements(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The elements of one page.
    #[must_use]
    pub fn page_elements(&self) -> usize {
        self.tokens_per_slot * self.row_elements()
    }

    /// The bytes of one page.
    #[must_use]
    pub fn page_bytes(&self) -> usize {
        self.page_elements() * size_of::<f16>()
    }

    /// The number of regions: a K and a V per layer.
    #[must_use]
    pub fn regions(&self) -> usize {
        2 * self.layers
    }

    /// The region of a layer's K.
    #[must_use]
    pub fn key_region(&self, layer: usize) -> usize {
        2 * layer
    }

    /// The region of a layer's V.
    #[must_use]
    pub fn value_region(&self, layer: usize) -> usize {
        2 * layer + 1
    }

    /// The slots that hold `tokens` tokens.
    #[must_use]
    pub fn slots_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.tokens_per_slot)
    }
}

/// One request's view of a paged cache.
pub trait PagedKv: Send + Sync {
    /// The dimensions of the pages.
    fn shape(&self) -> KvShape;

    /// How many slots this request has.
    fn slots(&self) -> usize;

    /// A page, `page_elements()` long.
    fn page(&self, region: usize, position: usize) -> &[f16];

    /// A page to write, `page_elements()` long.
    fn page_mut(&mut self, region: usize, position: usize) -> &mut [f16];

    /// Called when pages of a region will not be written again, so that they can go out. A cache
    /// that stays where it is has nothing to do.
    ///
    /// # Errors
    ///
    /// If they cannot go out, and there is no use in computing more.
    fn seal(&mut self, _region: usize, _positions: Range<usize>) -> Result<()> {
        Ok(())
    }
}

/// Writes the rows of consecutive tokens, the first of which is token `start`, into a region.
///
/// # Panics
///
/// If the tokens do not fit in the cache's slots: the caller checks that first.
pub(crate) fn store_rows(cache: &mut dyn PagedKv, region: usize, start: usize, rows: &[f32]) {
    let shape = cache.shape();
    let row = shape.row_elements();
    let mut token = start;
    let mut rest = rows;
    while !rest.is_empty() {
        let first = token % shape.tokens_per_slot;
        let count = (shape.tokens_per_slot - first).min(rest.len() / row);
        assert!(count > 0, "rows are whole tokens");
        let (now, later) = rest.split_at(count * row);
        let page = cache.page_mut(region, token / shape.tokens_per_slot);
        page[first * row..(first + count) * row].convert_from_f32_slice(now);
        token += count;
        rest = later;
    }
}

/// A cache in ordinary memory, for one request: single-node runs and tests.
#[derive(Clone, Debug)]
pub struct HostKv {
    shape: KvShape,
    /// Position within the request → index of the slot in `elements`.
    table: Vec<usize>,
    /// `[region][slot][page]`.
    elements: Vec<f16>,
    pool_slots: usize,
}

impl HostKv {
    /// A zeroed cache of `slots` slots in order.
    #[must_use]
    pub fn new(shape: KvShape, slots: usize) -> Self {
        Self::scattered(shape, slots, (0..slots).collect())
    }

    /// A zeroed cache whose request holds the slots in `table`, in that order, of a pool of
    /// `pool_slots` slots.
    ///
    /// # Panics
    ///
    /// If a slot is named twice or is outside the pool.
    #[must_use]
    pub fn scattered(shape: KvShape, pool_slots: usize, table: Vec<usize>) -> Self {
        let mut named = vec![false; pool_slots];
        for &slot in &table {
            assert!(
                slot < pool_slots,
                "slot {slot} is outside a pool of {pool_slots}"
            );
            assert!(!named[slot], "slot {slot} is named twice");
            named[slot] = true;
        }
        let elements = vec![f16::ZERO; shape.regions() * pool_slots * shape.page_elements()];
        Self {
            shape,
            table,
            elements,
            pool_slots,
        }
    }

    fn page_start(&self, region: usize, position: usize) -> usize {
        assert!(
            region < self.shape.regions(),
            "region {region} of {}",
            self.shape.regions()
        );
        (region * self.pool_slots + self.table[position]) * self.shape.page_elements()
    }
}

impl PagedKv for HostKv {
    fn shape(&self) -> KvShape {
        self.shape
    }

    fn slots(&self) -> usize {
        self.table.len()
    }

    fn page(&self, region: usize, position: usize) -> &[f16] {
        let start = self.page_start(region, position);
        &self.elements[start..start + self.shape.page_elements()]
    }

    fn page_mut(&mut self, region: usize, position: usize) -> &mut [f16] {
        let start = self.page_start(region, position);
        &mut self.elements[start..start + self.shape.page_elements()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: KvShape = KvShape {
        layers: 2,
        kv_heads: 3,
        head_dim: 8,
        tokens_per_slot: 4,
    };

    #[test]
    fn shape_counts_match_by_hand() {
        assert_eq!(SHAPE.page_elements(), 96, "4 tokens of 3 heads of 8");
        assert_eq!(SHAPE.page_bytes(), 192, "two bytes an element");
        assert_eq!(SHAPE.regions(), 4, "K and V of two layers");
        assert_eq!(
            (SHAPE.key_region(1), SHAPE.value_region(1)),
            (2, 3),
            "K is even, V odd"
        );
        assert_eq!(
            (SHAPE.slots_for(0), SHAPE.slots_for(4), SHAPE.slots_for(5)),
            (0, 1, 2)
        );
    }

    #[test]
    fn rows_land_at_their_tokens_across_a_slot_boundary() {
        let mut cache = HostKv::scattered(SHAPE, 5, vec![4, 1]);
        let rows: Vec<f32> = (0..3 * 24_u8).map(f32::from).collect();
        store_rows(&mut cache, 1, 3, &rows);
        assert_eq!(
            cache.page(1, 0)[3 * 24].to_f32(),
            0.0,
            "token 3 is the last of slot 0"
        );
        assert_eq!(cache.page(1, 0)[3 * 24 + 5].to_f32(), 5.0);
        assert_eq!(
            cache.page(1, 1)[0].to_f32(),
            24.0,
            "token 4 is the first of slot 1"
        );
        assert_eq!(cache.page(1, 1)[47].to_f32(), 71.0);
        assert_eq!(cache.page(1, 1)[48].to_f32(), 0.0, "token 6 is not written");
        assert!(
            cache.page(0, 0).iter().all(|x| *x == f16::ZERO),
            "other regions are untouched"
        );
    }

    #[test]
    #[should_panic(expected = "named twice")]
    fn one_slot_cannot_hold_two_positions() {
        let _ = HostKv::scattered(SHAPE, 5, vec![2, 2]);
    }
}
