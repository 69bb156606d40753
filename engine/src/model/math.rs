//! The inner loops of the CPU kernels.
//!
//! All of them are written so that one output element is always computed by the same operations in
//! the same order, whatever the block sizes and thread count around them. So a token's activations
//! do not depend on how many other tokens are computed in the same call: chunked prefill, one-shot
//! prefill and decode agree bit for bit, and so do two machines with the same floating point.

use std::array::from_fn;

use wide::f32x8;

/// The width of the accumulators. Part of the result's definition: another width, other rounding.
pub(crate) const LANES: usize = 8;

/// Sums the lanes as a tree.
#[inline(always)]
pub(crate) fn sum_lanes(lanes: f32x8) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes.to_array();
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// The dot products of `R` rows with `C` columns, all equally long and a multiple of [`LANES`].
///
/// Explicit vectors, because the compiler's own are several times slower here.
#[inline(always)]
pub(crate) fn dots<const R: usize, const C: usize>(
    rows: [&[f32]; R],
    columns: [&[f32]; C],
) -> [[f32; C]; R] {
    let steps = rows[0].len() / LANES;
    let rows = rows.map(|row| &row.as_chunks::<LANES>().0[..steps]);
    let columns = columns.map(|column| &column.as_chunks::<LANES>().0[..steps]);
    let mut sums = [[f32x8::ZERO; C]; R];
    for step in 0..steps {
        let columns: [f32x8; C] = from_fn(|column| f32x8::new(columns[column][step]));
        for row in 0..R {
            let x = f32x8::new(rows[row][step]);
            sums[row] = from_fn(|column| x.mul_add(columns[column], sums[row][column]));
        }
    }
    sums.map(|sums| sums.map(sum_lanes))
}

/// The same as [`dots`] of one row and eight columns, with the lanes summed side by side: that
/// matters where rows are short.
#[inline(always)]
pub(crate) fn eight_dots(row: &[f32], columns: [&[f32]; LANES]) -> [f32; LANES] {
    let row = row.as_chunks::<LANES>().0;
    let columns = columns.map(|column| &column.as_chunks::<LANES>().0[..row.len()]);
    let mut sums = [f32x8::ZERO; LANES];
    for (step, x) in row.iter().enumerate() {
        let x = f32x8::new(*x);
        for column in 0..LANES {
            sums[column] = x.mul_add(f32x8::new(columns[column][step]), sums[column]);
        }
    }
    let [a, b, c, d, e, f, g, h] = f32x8::transpose(sums);
    (((a + e) + (c + g)) + ((b + f) + (d + h))).to_array()
}

/// Adds `weights[i] * rows[i]` to `sum`, in order of `i`. `rows` is `[weights][sum.len()]`, and
/// `sum` is a multiple of [`LANES`] long.
pub(crate) fn add_weighted_rows(sum: &mut [f32], weights: &[f32], rows: &[f32]) {
    let width = sum.len();
    let mut done = 0;
    while done < width {
        done += match width - done {
            left if left >= 8 * LANES => add_weighted_part::<8>(sum, weights, rows, done),
            left if left >= 2 * LANES => add_weighted_part::<2>(sum, weights, rows, done),
            _ => add_weighted_part::<1>(sum, weights, rows, done),
        };
    }
}

/// The same for `N` vectors from element `from` on; returns their length.
fn add_weighted_part<const N: usize>(
    sum: &mut [f32],
    weights: &[f32],
    rows: &[f32],
    from: usize,
) -> usize {
    let width = sum.len();
    let to = from + N * LANES;
    let vectors = |part: &[f32]| -> [f32x8; N] {
        let part = &part.as_chunks::<LANES>().0[..N];
        from_fn(|index| f32x8::new(part[index]))
    };
    let mut total = vectors(&sum[from..to]);
    for (weight, row) in weights.iter().zip(rows.chunks_exact(width)) {
        let (weight, row) = (f32x8::splat(*weight), vectors(&row[from..to]));
        total = from_fn(|index| weight.mul_add(row[index], total[index]));
    }
    for (sum, total) in sum[from..to]
        .as_chunks_mut::<LANES>()
        .0
        .iter_mut()
        .zip(total)
    {
        *sum = total.to_array();
    }
    N * LANES
}

/// `e` to the power `x`, within two units in the last place for `x` up to 88; below -87 it is 0.
///
/// The C library's differs from machine to machine, and does not vectorise.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // ln 2 in two parts: the first has so few bits that `n * HIGH` is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, whose two's complement is
    // then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    // The Taylor polynomial of degree 7 on |r| <= ln(2)/2: its error is below 5e-9.
    let mut p = 1.0 / 5040.0;
    for c in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * r + c;
    }
    let scale = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    if x < -87.0 { 0.0 } else { p * scale }
}

/// `gate * sigmoid(gate) * up`, element by element, into `gate`.
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_real_one() {
        let mut x = -86.9_f64;
        while x < 88.0 {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "the argument under test is f32"
            )]
            let x32 = x as f32;
            let want = f64::from(x32).exp();
            let error = (f64::from(exp(x32)) - want).abs() / want;
            assert!(error < 3e-7, "exp({x32}) is off by {error}");
            x += 0.0137;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0, "a masked score has no weight");
        assert!(exp(f32::NAN).is_nan(), "a broken score stays visible");
    }

    #[test]
    fn block_size_does_not_change_a_dot() {
        let series = |seed: f32| {
            (0..64_u8)
                .map(|i| (f32::from(i) * seed).sin())
                .collect::<Vec<_>>()
        };
        let [a, b, c, d] = [0.3, 0.7, 1.1, 1.9].map(series);
        let block = dots([&a[..], &b[..]], [&c[..], &d[..]]);
        assert_eq!(block[0][1], dots([&a[..]], [&d[..]])[0][0]);
        assert_eq!(block[1][0], dots([&b[..]], [&c[..]])[0][0]);
        let eight = [&c, &d, &a, &b, &d, &c, &b, &a].map(|column| &column[..]);
        let want = eight.map(|column| dots([&a[..]], [column])[0][0]);
        assert_eq!(eight_dots(&a, eight), want, "side by side or one by one");
        let plain: f32 = a.iter().zip(&d).map(|(x, y)| x * y).sum();
        assert!((block[0][1] - plain).abs() < 1e-5);
    }

    #[test]
    fn weighted_rows_add_up_for_any_width() {
        for dim in [8, 32, 40, 64, 88] {
            let mut sum = vec![1.0; dim];
            let rows: Vec<f32> = [2.0, 3.0].iter().flat_map(|x| vec![*x; dim]).collect();
            add_weighted_rows(&mut sum, &[10.0, 100.0], &rows);
            assert!(sum.iter().all(|x| *x == 321.0), "width {dim}");
        }
    }
}
