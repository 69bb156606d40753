//! Matrix multiplication by quantised weights.
//!
//! On the CPU, the two formats of the default model have their own kernel: candle's has no vector
//! code for Q4_1 on x86, rounds the activations to 8 bits, and hands its work to one process-wide
//! pool of spinning threads, which does not suit a host that runs several engines. Every other
//! format and device goes to candle's `QMatMul`.

use std::array::from_fn;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{CpuStorage, CustomOp1, Layout, Module, Result, Shape, Tensor, bail};
use rayon::prelude::*;
use wide::{f32x8, i16x8, i32x8, u8x16};

use crate::model::math::{LANES, dots, sum_lanes};

/// Elements per quantised block, in both formats.
const BLOCK: usize = 32;
/// Output columns per piece of work, where many rows share the unpacked weights.
const COLUMNS: usize = 16;
/// Output columns per piece of work for a single row.
const COLUMNS_OF_ONE_ROW: usize = 48;

/// `y = x Wᵀ` with quantised `W`, `[out][in]`.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    weight: Arc<QTensor>,
    kernel: Kernel,
}

#[derive(Clone, Debug)]
enum Kernel {
    Blocks(Format),
    Candle(QMatMul),
}

/// The block formats with a kernel here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Format {
    Q4_1,
    Q8_0,
}

/// Quantised blocks of [`BLOCK`] elements.
trait BlockFormat {
    /// The bytes of a block.
    const BYTES: usize;

    /// A block's elements, in order.
    fn unpack(block: &[u8]) -> [f32x8; BLOCK / LANES];
}

/// An `f16` scale, an `f16` minimum, 32 four-bit numbers; low nibbles first.
struct Q4_1;

impl BlockFormat for Q4_1 {
    const BYTES: usize = 20;

    #[inline(always)]
    fn unpack(block: &[u8]) -> [f32x8; BLOCK / LANES] {
        let block: &[u8; 20] = block.first_chunk().expect("blocks are BYTES long");
        let scale = f32x8::splat(half_to_single([block[0], block[1]]));
        let minimum = f32x8::splat(half_to_single([block[2], block[3]]));
        let value = |numbers| widen(numbers).mul_add(scale, minimum);
        let pairs = u8x16::new(*block.last_chunk().expect("20 bytes end with 16"));
        let (first, second) = (i16x8::from_u8x16_low(pairs), i16x8::from_u8x16_high(pairs));
        let low = i16x8::splat(15);
        [
            value(first & low),
            value(second & low),
            value(first >> 4),
            value(second >> 4),
        ]
    }
}

/// An `f16` scale, 32 eight-bit numbers.
struct Q8_0;

impl BlockFormat for Q8_0 {
    const BYTES: usize = 34;

    #[inline(always)]
    fn unpack(block: &[u8]) -> [f32x8; BLOCK / LANES] {
        let block: &[u8; 34] = block.first_chunk().expect("blocks are BYTES long");
        let scale = f32x8::splat(half_to_single([block[0], block[1]]));
        // Shifting up and down again extends the sign.
        let value = |numbers: i16x8| widen((numbers << 8) >> 8) * scale;
        let (_, bytes) = block.split_at(2);
        let [left, right] = [0, 1].map(|half| u8x16::new(bytes.as_chunks::<16>().0[half]));
        let (first, second) = (i16x8::from_u8x16_low(left), i16x8::from_u8x16_high(left));
        let (third, fourth) = (i16x8::from_u8x16_low(right), i16x8::from_u8x16_high(right));
        [value(first), value(second), value(third), value(fourth)]
    }
}

/// A finite `f16` as an `f32`. The library's conversion is an instruction that the compiler cannot
/// move, and it was the longest wait in this loop.
#[inline(always)]
fn half_to_single(bytes: [u8; 2]) -> f32 {
    // The exponents' biases differ by 112.
    const SHIFT: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(u16::from_le_bytes(bytes));
    f32::from_bits((bits & 0x8000) << 16 | (bits & 0x7fff) << 13) * SHIFT
}

#[inline(always)]
fn widen(numbers: i16x8) -> f32x8 {
    f32x8::from_i32x8(i32x8::from_i16x8(numbers))
}

impl Linear {
    /// Multiplication by `weight`.
    pub(crate) fn new(weight: Arc<QTensor>) -> Result<Self> {
        let formats = [
            (GgmlDType::Q4_1, Format::Q4_1),
            (GgmlDType::Q8_0, Format::Q8_0),
        ];
        let format = formats.iter().find(|(dtype, _)| *dtype == weight.dtype());
        let kernel = match format.filter(|_| weight.device().is_cpu()) {
            Some((_, format)) => Kernel::Blocks(*format),
            None => Kernel::Candle(QMatMul::from_arc(Arc::clone(&weight))?),
        };
        Ok(Self { weight, kernel })
    }

    /// Multiplies `[rows][in]` to `[rows][out]`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.kernel {
            Kernel::Blocks(format) => x.apply_op1_no_bwd(&BlockMatMul {
                weight: &self.weight,
                format: *format,
            }),
            Kernel::Candle(weight) => weight.forward(x),
        }
    }
}

struct BlockMatMul<'a> {
    weight: &'a QTensor,
    format: Format,
}

impl CustomOp1 for BlockMatMul<'_> {
    fn name(&self) -> &'static str {
        "block-matmul"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (out_dim, in_dim) = self.weight.shape().dims2()?;
        let (rows, got) = layout.shape().dims2()?;
        let Some((from, to)) = layout.contiguous_offsets().filter(|_| got == in_dim) else {
            bail!(
                "input {layout:?} does not fit weights {:?}",
                self.weight.shape()
            );
        };
        let x = &storage.as_slice::<f32>()?[from..to];
        let data = self.weight.data()?;
        let out = match self.format {
            Format::Q4_1 => multiply::<Q4_1>(x, &data, in_dim, out_dim),
            Format::Q8_0 => multiply::<Q8_0>(x, &data, in_dim, out_dim),
        };
        Ok((CpuStorage::F32(out), Shape::from((rows, out_dim))))
    }
}

/// Multiplies rows of `x` by all columns. One row and many give the same bits: the elements are
/// unpacked, multiplied and added in the same order.
fn multiply<B: BlockFormat>(x: &[f32], data: &[u8], in_dim: usize, out_dim: usize) -> Vec<f32> {
    let column_bytes = in_dim / BLOCK * B::BYTES;
    let rows = x.len() / in_dim;
    if rows == 1 {
        let mut out = vec![0.0; out_dim];
        let pieces = data.par_chunks(COLUMNS_OF_ONE_ROW * column_bytes);
        out.par_chunks_mut(COLUMNS_OF_ONE_ROW)
            .zip(pieces)
            .for_each(|(out, data)| multiply_row::<B>(x, data, column_bytes, out));
        return out;
    }
    // Computed as [out][rows], so that the threads write disjoint runs.
    let mut transposed = vec![0.0; out_dim * rows];
    let pieces = data.par_chunks(COLUMNS * column_bytes);
    transposed
        .par_chunks_mut(COLUMNS * rows)
        .zip(pieces)
        .for_each_init(
            || vec![0.0; COLUMNS * in_dim],
            |unpacked, (out, data)| {
                let mut count = 0;
                let columns = unpacked.chunks_exact_mut(in_dim);
                for (column, unpacked) in data.chunks_exact(column_bytes).zip(columns) {
                    let unpacked = unpacked.as_chunks_mut::<BLOCK>().0;
                    for (block, unpacked) in column.chunks_exact(B::BYTES).zip(unpacked) {
                        let vectors = unpacked.as_chunks_mut::<LANES>().0.iter_mut();
                        vectors
                            .zip(B::unpack(block))
                            .for_each(|(out, x)| *out = x.to_array());
                    }
                    count += 1;
                }
                multiply_block(x, &unpacked[..count * in_dim], in_dim, out);
            },
        );
    transpose(&transposed, rows)
}

/// The products of one row and the columns in `data`.
fn multiply_row<B: BlockFormat>(x: &[f32], data: &[u8], column_bytes: usize, out: &mut [f32]) {
    let (fours, rest) = out.as_chunks_mut::<4>();
    let (four_data, rest_data) = data.split_at(fours.len() * 4 * column_bytes);
    for (out, data) in fours
        .iter_mut()
        .zip(four_data.chunks_exact(4 * column_bytes))
    {
        let column = |index| &data[index * column_bytes..(index + 1) * column_bytes];
        *out = dots_of_blocks::<B, 4>(x, from_fn(column));
    }
    for (out, data) in rest.iter_mut().zip(rest_data.chunks_exact(column_bytes)) {
        [*out] = dots_of_blocks::<B, 1>(x, [data]);
    }
}

/// The same as [`dots`] of one row and the unpacked columns.
#[inline(always)]
fn dots_of_blocks<B: BlockFormat, const C: usize>(x: &[f32], columns: [&[u8]; C]) -> [f32; C] {
    let mut sums = [f32x8::ZERO; C];
    for (index, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let x = x.as_chunks::<LANES>().0;
        for column in 0..C {
            let block = B::unpack(&columns[column][index * B::BYTES..(index + 1) * B::BYTES]);
            for part in 0..BLOCK / LANES {
                sums[column] = f32x8::new(x[part]).mul_add(block[part], sums[column]);
            }
        }
    }
    sums.map(sum_lanes)
}

/// The products of all rows of `x` and all rows of `weights`, as `[weight][x]`.
fn multiply_block(x: &[f32], weights: &[f32], in_dim: usize, out: &mut [f32]) {
    let rows = x.len() / in_dim;
    let columns = weights.len() / in_dim;
    let row = |index: usize| &x[index * in_dim..(index + 1) * in_dim];
    let weight = |index: usize| &weights[index * in_dim..(index + 1) * in_dim];
    let mut at = 0;
    while at < rows {
        let tall = at + 4 <= rows;
        let mut column = 0;
        while column < columns {
            let wide = column + 4 <= columns;
            let four = |index| [index, index + 1, index + 2, index + 3];
            match (tall, wide) {
                (true, true) => {
                    let block = dots(four(at).map(row), four(column).map(weight));
                    for (r, block) in block.iter().enumerate() {
                        for (c, value) in block.iter().enumerate() {
                            out[(column + c) * rows + at + r] = *value;
                        }
                    }
                }
                (true, false) => {
                    let block = dots(four(at).map(row), [weight(column)]);
                    for (r, [value]) in block.iter().enumerate() {
                        out[column * rows + at + r] = *value;
                    }
                }
                (false, true) => {
                    let [block] = dots([row(at)], four(column).map(weight));
                    for (c, value) in block.iter().enumerate() {
                        out[(column + c) * rows + at] = *value;
                    }
                }
                (false, false) => {
                    out[column * rows + at] = dots([row(at)], [weight(column)])[0][0];
                }
            }
            column += if wide { 4 } else { 1 };
        }
        at += if tall { 4 } else { 1 };
    }
}

/// `[out][rows]` to `[rows][out]`.
fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    let out_dim = x.len() / rows;
    let mut out = vec![0.0; x.len()];
    out.par_chunks_mut(out_dim)
        .enumerate()
        .for_each(|(row, out)| {
            out.iter_mut()
                .zip(x.iter().skip(row).step_by(rows))
                .for_each(|(out, x)| *out = *x);
        });
    out
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::sampling::SplitMix64;

    fn noise(seed: u64, rows: usize, columns: usize) -> Tensor {
        let mut random = SplitMix64::new(seed);
        let data: Vec<f32> = (0..rows * columns).map(|_| random.unit() - 0.5).collect();
        Tensor::from_vec(data, (rows, columns), &Device::Cpu).unwrap()
    }

    #[test]
    fn matches_dequantised_multiplication() {
        for dtype in [GgmlDType::Q4_1, GgmlDType::Q8_0, GgmlDType::F32] {
            // 37 columns: not a multiple of any block size.
            let weight = Arc::new(QTensor::quantize(&noise(1, 37, 96), dtype).unwrap());
            let linear = Linear::new(Arc::clone(&weight)).unwrap();
            for rows in [1, 3, 4, 9] {
                let x = noise(2, rows, 96);
                let got = linear.forward(&x).unwrap().to_vec2::<f32>().unwrap();
                let plain = weight.dequantize(&Device::Cpu).unwrap();
                let want = x
                    .matmul(&plain.t().unwrap())
                    .unwrap()
                    .to_vec2::<f32>()
                    .unwrap();
                for (got, want) in got.concat().iter().zip(want.concat()) {
                    assert!((got - want).abs() < 1e-5, "{dtype:?} {got} {want}");
                }
            }
        }
    }

    #[test]
    fn every_finite_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let want = half::f16::from_bits(bits);
            if want.is_finite() {
                let got = half_to_single(bits.to_le_bytes());
                assert_eq!(got.to_bits(), want.to_f32().to_bits(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let weight = Arc::new(QTensor::quantize(&noise(1, 40, 64), GgmlDType::Q4_1).unwrap());
        let linear = Linear::new(weight).unwrap();
        let x = noise(2, 11, 64);
        let all = linear.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        for (at, want) in all.iter().enumerate() {
            let one = linear
                .forward(&x.narrow(0, at, 1).unwrap().contiguous().unwrap())
                .unwrap();
            assert_eq!(
                &one.to_vec2::<f32>().unwrap()[0],
                want,
                "bit for bit, row {at}"
            );
        }
    }
}
