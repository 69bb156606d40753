//! Causal attention over a paged cache, as a candle custom operation on the queries.
//!
//! The work is cut by KV head, block of queries and *span* of keys; each piece reads its keys and
//! values straight from the pages, with an online softmax, and the spans of a query are then merged
//! in order. Spans and key blocks start at fixed token indices, so the result depends neither on
//! the number of threads, nor on where the pages lie, nor on how many queries come at once.

use std::array::from_fn;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, bail};
use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::kv::{KvShape, PagedKv};
use crate::model::math::{LANES, add_weighted_rows, dots, eight_dots, exp};

/// Queries per piece of work: enough to pay for unpacking the keys, few enough to spread out.
const QUERY_BLOCK: usize = 16;
/// Keys that are unpacked to `f32` at a time.
const KEY_BLOCK: usize = 32;
/// Keys per piece of work, so that one long decode step keeps many threads busy.
const KEY_SPAN: usize = 256;
const _: () = assert!(KEY_SPAN.is_multiple_of(KEY_BLOCK));

/// Attention of the queries `[token][head][head dim]` over one layer of a paged cache.
pub(crate) struct PagedAttention<'a> {
    shape: KvShape,
    /// The index of the first query's token in the sequence.
    start: usize,
    keys: Vec<&'a [f16]>,
    values: Vec<&'a [f16]>,
}

/// The unnormalised attention of some rows over some keys.
struct Partial {
    /// The greatest score so far, per row.
    max: Vec<f32>,
    /// The sum of the weights, relative to `max`, per row.
    weight: Vec<f32>,
    /// The weighted sum of the values, `[row][head dim]`.
    value: Vec<f32>,
}

/// A piece of work.
#[derive(Clone, Copy)]
struct Piece {
    kv_head: usize,
    /// The first query, and one past the last.
    queries: (usize, usize),
    span: usize,
}

impl<'a> PagedAttention<'a> {
    /// Attention over `layer` for queries that start at token `start`; the cache holds their keys
    /// and values already, `tokens` in all.
    pub(crate) fn new(cache: &'a dyn PagedKv, layer: usize, start: usize, tokens: usize) -> Self {
        let shape = cache.shape();
        let slots = shape.slots_for(tokens);
        let pages = |region| (0..slots).map(|p| cache.page(region, p)).collect();
        let (keys, values) = (
            pages(shape.key_region(layer)),
            pages(shape.value_region(layer)),
        );
        Self {
            shape,
            start,
            keys,
            values,
        }
    }

    /// Unpacks one head of the tokens `from..to` to `f32`.
    fn unpack(&self, pages: &[&[f16]], head: usize, (from, to): (usize, usize), out: &mut [f32]) {
        let KvShape {
            head_dim,
            tokens_per_slot,
            ..
        } = self.shape;
        for (token, out) in (from..to).zip(out.chunks_exact_mut(head_dim)) {
            let offset = (token % tokens_per_slot) * self.shape.row_elements() + head * head_dim;
            let page = pages[token / tokens_per_slot];
            page[offset..offset + head_dim].convert_to_f32_slice(out);
        }
    }

    fn attend_piece(&self, piece: Piece, queries: &[f32], heads: usize) -> Partial {
        let KvShape {
            kv_heads, head_dim, ..
        } = self.shape;
        let group = heads / kv_heads;
        let (first, last) = piece.queries;
        let row_count = (last - first) * group;
        // Scaling the query instead of every score.
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut rows = Vec::with_capacity(row_count * head_dim);
        for query in first..last {
            let from = (query * heads + piece.kv_head * group) * head_dim;
            rows.extend(
                queries[from..from + group * head_dim]
                    .iter()
                    .map(|x| x * scale),
            );
        }
        let mut partial = Partial {
            max: vec![f32::NEG_INFINITY; row_count],
            weight: vec![0.0; row_count],
            value: vec![0.0; row_count * head_dim],
        };
        let (mut keys, mut values) = (
            vec![0.0; KEY_BLOCK * head_dim],
            vec![0.0; KEY_BLOCK * head_dim],
        );
        // The last query of the block sees the most keys.
        let end = ((piece.span + 1) * KEY_SPAN).min(self.start + last);
        for from in (piece.span * KEY_SPAN..end).step_by(KEY_BLOCK) {
            let to = (from + KEY_BLOCK).min(end);
            self.unpack(&self.keys, piece.kv_head, (from, to), &mut keys);
            self.unpack(&self.values, piece.kv_head, (from, to), &mut values);
            for (index, row) in rows.chunks_exact(head_dim).enumerate() {
                // Causality: a query sees the keys up to its own token.
                let visible = (self.start + first + index / group + 1).min(to);
                if visible > from {
                    partial.add_block(index, row, visible - from, &keys, &values);
                }
            }
        }
        partial
    }

    /// The pieces, ordered so that those of one query block and head are consecutive.
    fn pieces(&self, query_count: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for kv_head in 0..self.shape.kv_heads {
            for first in (0..query_count).step_by(QUERY_BLOCK) {
                let last = (first + QUERY_BLOCK).min(query_count);
                let spans = (self.start + last).div_ceil(KEY_SPAN);
                let piece = |span| Piece {
                    kv_head,
                    queries: (first, last),
                    span,
                };
                pieces.extend((0..spans).map(piece));
            }
        }
        pieces
    }

    /// Computes all queries; the output is laid out like them.
    pub(crate) fn attend(&self, queries: &[f32], heads: usize) -> Vec<f32> {
        let KvShape {
            kv_heads, head_dim, ..
        } = self.shape;
        let group = heads / kv_heads;
        let query_count = queries.len() / (heads * head_dim);
        let pieces = self.pieces(query_count);
        let partials: Vec<Partial> = pieces
            .par_iter()
            .map(|piece| self.attend_piece(*piece, queries, heads))
            .collect();
        let mut out = vec![0.0; queries.len()];
        let mut rest = pieces.iter().zip(partials).peekable();
        while let Some((piece, mut total)) = rest.next() {
            while let Some((_, more)) = rest.next_if(|(next, _)| next.span > 0) {
                total.merge(&more);
            }
            let (first, last) = piece.queries;
            for (index, value) in total.value.chunks_exact(group * head_dim).enumerate() {
                let from = ((first + index) * heads + piece.kv_head * group) * head_dim;
                let weights = &total.weight[index * group..(index + 1) * group];
                let out = out[from..from + group * head_dim].chunks_exact_mut(head_dim);
                for ((out, value), weight) in out.zip(value.chunks_exact(head_dim)).zip(weights) {
                    out.iter_mut()
                        .zip(value)
                        .for_each(|(out, value)| *out = value / weight);
                }
            }
            assert_eq!(
                total.weight.len(),
                (last - first) * group,
                "a row per query and head"
            );
        }
        out
    }
}

impl Partial {
    /// Adds a block of keys and values to one row.
    fn add_block(&mut self, index: usize, row: &[f32], count: usize, keys: &[f32], values: &[f32]) {
        let dim = row.len();
        let mut scores = [0.0; KEY_BLOCK];
        let scores = &mut scores[..count];
        let key = |index: usize| &keys[index * dim..(index + 1) * dim];
        let mut at = 0;
        while at + LANES <= count {
            let eight = eight_dots(row, from_fn(|index| key(at + index)));
            scores[at..at + LANES].copy_from_slice(&eight);
            at += LANES;
        }
        for (at, score) in scores.iter_mut().enumerate().skip(at) {
            *score = dots([row], [key(at)])[0][0];
        }
        let max = scores
            .iter()
            .fold(self.max[index], |max, score| max.max(*score));
        let keep = exp(self.max[index] - max);
        scores
            .iter_mut()
            .for_each(|score| *score = exp(*score - max));
        let sum: f32 = scores.iter().sum();
        self.max[index] = max;
        self.weight[index] = self.weight[index] * keep + sum;
        let value = &mut self.value[index * dim..(index + 1) * dim];
        if keep != 1.0 {
            value.iter_mut().for_each(|value| *value *= keep);
        }
        add_weighted_rows(value, scores, &values[..count * dim]);
    }

    /// Adds the same rows' attention over later keys.
    fn merge(&mut self, more: &Self) {
        let dim = self.value.len() / self.max.len();
        for index in 0..self.max.len() {
            if more.weight[index] == 0.0 {
                // This row sees none of those keys.
                continue;
            }
            let max = self.max[index].max(more.max[index]);
            let (keep, add) = (exp(self.max[index] - max), exp(more.max[index] - max));
            self.max[index] = max;
            self.weight[index] = self.weight[index] * keep + more.weight[index] * add;
            let range = index * dim..(index + 1) * dim;
            for (value, more) in self.value[range.clone()].iter_mut().zip(&more.value[range]) {
                *value = *value * keep + more * add;
            }
        }
    }
}

impl CustomOp1 for PagedAttention<'_> {
    fn name(&self) -> &'static str {
        "paged-attention"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, heads, head_dim) = layout.shape().dims3()?;
        if head_dim != self.shape.head_dim || !heads.is_multiple_of(self.shape.kv_heads) {
            bail!(
                "queries {:?} do not fit a cache of {:?}",
                layout.shape(),
                self.shape
            );
        }
        let Some((from, to)) = layout.contiguous_offsets() else {
            bail!("queries must be contiguous, got {layout:?}");
        };
        let out = self.attend(&storage.as_slice::<f32>()?[from..to], heads);
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{HostKv, store_rows};
    use crate::sampling::SplitMix64;

    const SHAPE: KvShape = KvShape {
        layers: 1,
        kv_heads: 2,
        head_dim: 16,
        tokens_per_slot: 8,
    };
    const HEADS: usize = 6;

    fn noise(seed: u64, count: usize) -> Vec<f32> {
        let mut random = SplitMix64::new(seed);
        (0..count).map(|_| random.unit() * 2.0 - 1.0).collect()
    }

    fn cache(tokens: usize, table: Vec<usize>, tokens_per_slot: usize) -> HostKv {
        let shape = KvShape {
            tokens_per_slot,
            ..SHAPE
        };
        let mut cache = HostKv::scattered(shape, table.len(), table);
        store_rows(&mut cache, 0, 0, &noise(1, tokens * shape.row_elements()));
        store_rows(&mut cache, 1, 0, &noise(2, tokens * shape.row_elements()));
        cache
    }

    /// The textbook formula, in f64.
    fn naive(cache: &HostKv, start: usize, queries: &[f32]) -> Vec<f64> {
        let KvShape {
            kv_heads,
            head_dim,
            tokens_per_slot,
            ..
        } = cache.shape();
        let element = |region, token: usize, head: usize, d: usize| {
            let page = cache.page(region, token / tokens_per_slot);
            page[((token % tokens_per_slot) * kv_heads + head) * head_dim + d].to_f64()
        };
        let mut out = Vec::new();
        for (row, query) in queries.chunks_exact(head_dim).enumerate() {
            let (token, head) = (start + row / HEADS, row % HEADS / (HEADS / kv_heads));
            let dot = |t| {
                let products = (0..head_dim).map(|d| f64::from(query[d]) * element(0, t, head, d));
                products.sum::<f64>() / 16_f64.sqrt()
            };
            let weights: Vec<f64> = (0..=token).map(|t| f64::exp(dot(t))).collect();
            let sum: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let value = weights
                    .iter()
                    .enumerate()
                    .map(|(t, w)| w * element(1, t, head, d));
                out.push(value.sum::<f64>() / sum);
            }
        }
        out
    }

    #[test]
    fn matches_the_textbook_formula() {
        // 700 keys: three spans, the last of them ragged.
        let cache = cache(700, (0..88).collect(), 8);
        for (start, count) in [(699, 1), (650, 50), (0, 20), (250, 40)] {
            let queries = noise(3, count * HEADS * SHAPE.head_dim);
            let op = PagedAttention::new(&cache, 0, start, start + count);
            let got = op.attend(&queries, HEADS);
            for (got, want) in got.iter().zip(naive(&cache, start, &queries)) {
                assert!(
                    (f64::from(*got) - want).abs() < 2e-6,
                    "{got} {want} from {start}"
                );
            }
        }
    }

    #[test]
    fn bits_depend_on_neither_scatter_nor_slot_size_nor_batch() {
        let queries = noise(3, 90 * HEADS * SHAPE.head_dim);
        let run = |cache: &HostKv, start: usize, queries: &[f32]| {
            let count = queries.len() / (HEADS * SHAPE.head_dim);
            PagedAttention::new(cache, 0, start, start + count).attend(queries, HEADS)
        };
        let plain = cache(390, (0..49).collect(), 8);
        let want = run(&plain, 300, &queries);
        let scattered = cache(390, (0..49).map(|i| i * 20 % 49).collect(), 8);
        assert_eq!(run(&scattered, 300, &queries), want, "other slots");
        let wide = cache(390, (0..25).collect(), 16);
        assert_eq!(run(&wide, 300, &queries), want, "other slot size");
        let row = HEADS * SHAPE.head_dim;
        for at in 0..90 {
            let one = run(&plain, 300 + at, &queries[at * row..(at + 1) * row]);
            assert_eq!(one, want[at * row..(at + 1) * row], "query {at} alone");
        }
    }

    #[test]
    fn bits_do_not_depend_on_thread_count() {
        let cache = cache(390, (0..49).collect(), 8);
        let queries = noise(3, 90 * HEADS * SHAPE.head_dim);
        let op = PagedAttention::new(&cache, 0, 300, 390);
        let with = |threads| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            pool.install(|| op.attend(&queries, HEADS))
        };
        assert_eq!(with(1), with(5));
    }

    #[test]
    fn bytes_after_the_last_token_are_not_read() {
        let mut cache = cache(21, (0..4).collect(), 8);
        let queries = noise(3, HEADS * SHAPE.head_dim);
        let want = PagedAttention::new(&cache, 0, 20, 21).attend(&queries, HEADS);
        for region in 0..2 {
            cache.page_mut(region, 2)[5 * 32..].fill(f16::NAN);
            cache.page_mut(region, 3).fill(f16::INFINITY);
        }
        assert_eq!(
            PagedAttention::new(&cache, 0, 20, 21).attend(&queries, HEADS),
            want
        );
    }
}
