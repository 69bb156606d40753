//! A Llama-family decoder-only transformer over a paged KV cache.
//!
//! Weights stay quantised, activations are `f32`. One forward pass computes some consecutive tokens
//! of one sequence; several sequences may run in parallel over one shared [`Model`].

mod attention;
mod config;
mod linear;
pub(crate) mod math;
mod weights;

use std::fs::File;
use std::io::BufReader;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::Content;
use candle_core::{CpuStorage, CustomOp2, Device, Layout, Shape, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope_i;

use crate::kv::{KvShape, PagedKv, store_rows};
use crate::model::attention::PagedAttention;
pub use crate::model::config::Config;
use crate::model::linear::Linear;
use crate::model::weights::{GgufWeights, RandomWeights, Weights};

/// Called in a forward pass when a layer's K and V are in the cache, with the layer's index.
pub type OnLayer<'a> = dyn FnMut(&mut dyn PagedKv, usize) -> Result<()> + 'a;

struct Layer {
    attention_norm: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    feed_forward_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A model's weights.
pub struct Model {
    config: Config,
    embedding: Arc<QTensor>,
    layers: Vec<Layer>,
    output_norm: Tensor,
    output: Linear,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Loads the model of an opened GGUF file.
    ///
    /// # Errors
    ///
    /// If the file is not a plain Llama-family model or cannot be read.
    pub fn from_gguf(content: &Content, file: BufReader<File>) -> Result<Self> {
        Self::build(Config::from_gguf(content)?, GgufWeights::new(content, file))
    }

    /// Makes a small model of random weights: quick to load, deterministic, and speaks nonsense.
    ///
    /// # Errors
    ///
    /// If a tensor cannot be made.
    pub fn random(seed: u64, vocabulary: usize) -> Result<Self> {
        Self::build(Config::random(seed, vocabulary), RandomWeights::new(seed))
    }

    fn build(config: Config, mut weights: impl Weights) -> Result<Self> {
        let &Config {
            hidden, vocabulary, ..
        } = &config;
        let embedding = Arc::new(weights.tensor("token_embd.weight", &[vocabulary, hidden])?);
        let output = match weights.has("output.weight") {
            true => Arc::new(weights.tensor("output.weight", &[vocabulary, hidden])?),
            // Tied: the embedding is also the output.
            false => Arc::clone(&embedding),
        };
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            layers.push(Layer::load(&config, index, &mut weights)?);
        }
        let output_norm = weights.tensor("output_norm.weight", &[hidden])?;
        weights.finish()?;
        Ok(Self {
            embedding,
            layers,
            output_norm: output_norm.dequantize(&Device::Cpu)?,
            output: Linear::new(output)?,
            config,
        })
    }

    /// The model's dimensions.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The shape of a cache for this model.
    #[must_use]
    pub fn kv_shape(&self, tokens_per_slot: usize) -> KvShape {
        self.config.kv_shape(tokens_per_slot)
    }

    /// Computes `tokens`, the first of which is token `start` of its sequence; the cache holds the
    /// K and V of those before it and receives theirs. Returns the logits after the last token.
    ///
    /// After a layer's K and V are in the cache, and before the rest of the layer is computed,
    /// `on_layer` is called: that is when its pages can go out.
    ///
    /// # Errors
    ///
    /// If the tokens do not fit the vocabulary, the context or the cache, or `on_layer` fails.
    pub fn forward(
        &self,
        tokens: &[u32],
        start: usize,
        cache: &mut dyn PagedKv,
        on_layer: &mut OnLayer<'_>,
    ) -> Result<Tensor> {
        self.check(tokens, start, cache)?;
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let rope = self.rope(start, tokens.len())?;
        let mut x = self.embedding.embedding(&ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = rms_norm(&x, &layer.attention_norm, self.config.norm_epsilon)?;
            layer.store(&self.config, index, &normed, &rope, start, cache)?;
            on_layer(cache, index)?;
            let last = index + 1 == self.layers.len();
            // After the last layer only the last token's output is wanted.
            let skip = if last { tokens.len() - 1 } else { 0 };
            x = layer.finish(
                &self.config,
                index,
                &x,
                &normed,
                &rope,
                (start, skip),
                cache,
            )?;
        }
        let x = rms_norm(&x, &self.output_norm, self.config.norm_epsilon)?;
        Ok(self.output.forward(&x)?.squeeze(0)?)
    }

    fn check(&self, tokens: &[u32], start: usize, cache: &dyn PagedKv) -> Result<()> {
        let &Config {
            vocabulary,
            context,
            ..
        } = &self.config;
        let shape = cache.shape();
        ensure!(
            shape.tokens_per_slot > 0 && shape == self.kv_shape(shape.tokens_per_slot),
            "cache has {shape:?}, the model {:?}",
            self.kv_shape(shape.tokens_per_slot)
        );
        ensure!(!tokens.is_empty(), "no tokens to compute");
        let end = start + tokens.len();
        ensure!(
            end <= context,
            "{end} tokens do not fit a context of {context}"
        );
        let capacity = cache.slots() * shape.tokens_per_slot;
        ensure!(
            end <= capacity,
            "{end} tokens do not fit a cache of {capacity}"
        );
        let outside = tokens.iter().find(|token| **token as usize >= vocabulary);
        ensure!(
            outside.is_none(),
            "token {outside:?} is outside a vocabulary of {vocabulary}"
        );
        Ok(())
    }

    /// The cosines and sines of the tokens' rotations, `[token][1][head dim / 2]`.
    fn rope(&self, start: usize, count: usize) -> Result<(Tensor, Tensor)> {
        let half = self.config.head_dim / 2;
        let base = f64::from(self.config.rope_base);
        let mut cosines = Vec::with_capacity(count * half);
        let mut sines = Vec::with_capacity(count * half);
        for token in start..start + count {
            for index in 0..half {
                let (token, exponent) = (token as f64, -(index as f64) / half as f64);
                let (sine, cosine) = (token * base.powf(exponent)).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
                let (sine, cosine) = (sine as f32, cosine as f32);
                sines.push(sine);
                cosines.push(cosine);
            }
        }
        let tensor = |values| Tensor::from_vec(values, (count, 1, half), &Device::Cpu);
        Ok((tensor(cosines)?, tensor(sines)?))
    }
}

impl Layer {
    fn load(config: &Config, index: usize, weights: &mut impl Weights) -> Result<Self> {
        let &Config {
            hidden,
            feed_forward,
            heads,
            kv_heads,
            head_dim,
            ..
        } = config;
        let (q_dim, kv_dim) = (heads * head_dim, kv_heads * head_dim);
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let mut linear = |part: &str, shape: [usize; 2]| -> Result<Linear> {
            Ok(Linear::new(Arc::new(weights.tensor(&name(part), &shape)?))?)
        };
        let query = linear("attn_q", [q_dim, hidden])?;
        let key = linear("attn_k", [kv_dim, hidden])?;
        let value = linear("attn_v", [kv_dim, hidden])?;
        let attention_output = linear("attn_output", [hidden, q_dim])?;
        let gate = linear("ffn_gate", [feed_forward, hidden])?;
        let up = linear("ffn_up", [feed_forward, hidden])?;
        let down = linear("ffn_down", [hidden, feed_forward])?;
        let mut norm = |part: &str| -> Result<Tensor> {
            Ok(weights
                .tensor(&name(part), &[hidden])?
                .dequantize(&Device::Cpu)?)
        };
        let attention_norm = norm("attn_norm")?;
        let feed_forward_norm = norm("ffn_norm")?;
        Ok(Self {
            attention_norm,
            query,
            key,
            value,
            attention_output,
            feed_forward_norm,
            gate,
            up,
            down,
        })
    }

    /// Computes the tokens' K and V and writes them to the cache.
    fn store(
        &self,
        config: &Config,
        index: usize,
        normed: &Tensor,
        rope: &(Tensor, Tensor),
        start: usize,
        cache: &mut dyn PagedKv,
    ) -> Result<()> {
        let shape = cache.shape();
        let keys = rotate(
            &self.key.forward(normed)?,
            config.kv_heads,
            config.head_dim,
            rope,
        )?;
        let values = self.value.forward(normed)?;
        let (keys, values) = (
            keys.flatten_all()?.to_vec1()?,
            values.flatten_all()?.to_vec1()?,
        );
        store_rows(cache, shape.key_region(index), start, &keys);
        store_rows(cache, shape.value_region(index), start, &values);
        Ok(())
    }

    /// Computes attention and feed-forward for the tokens after the first `skip`, which start at
    /// token `start`.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, from the loop over the layers"
    )]
    fn finish(
        &self,
        config: &Config,
        index: usize,
        x: &Tensor,
        normed: &Tensor,
        (cosines, sines): &(Tensor, Tensor),
        (start, skip): (usize, usize),
        cache: &dyn PagedKv,
    ) -> Result<Tensor> {
        let count = x.dim(0)?;
        let rest = |tensor: &Tensor| tensor.narrow(0, skip, count - skip)?.contiguous();
        let rope = (rest(cosines)?, rest(sines)?);
        let x = rest(x)?;
        let queries = self.query.forward(&rest(normed)?)?;
        let queries = rotate(&queries, config.heads, config.head_dim, &rope)?.squeeze(2)?;
        let attention = PagedAttention::new(cache, index, start + skip, start + count);
        let attended = queries.apply_op1_no_bwd(&attention)?.flatten_from(1)?;
        let x = (x + self.attention_output.forward(&attended)?)?;
        let normed = rms_norm(&x, &self.feed_forward_norm, config.norm_epsilon)?;
        let (gate, up) = (self.gate.forward(&normed)?, self.up.forward(&normed)?);
        let inner = gate.apply_op2_no_bwd(&up, &SwiGlu)?;
        Ok((x + self.down.forward(&inner)?)?)
    }
}

/// Splits `[token][head * dim]` into `[token][head][1][dim]`; rotates each by its token's angles.
///
/// GGUF stores the weights so that the two elements of a rotated pair are neighbours. The tokens
/// are a batch of sequences of one, each with its own angles, which saves transposing.
fn rotate(x: &Tensor, heads: usize, dim: usize, rope: &(Tensor, Tensor)) -> Result<Tensor> {
    let x = x.reshape((x.dim(0)?, heads, 1, dim))?;
    Ok(rope_i(&x, &rope.0, &rope.1)?)
}

/// The feed-forward's activation, `silu(gate) * up`.
struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let offsets = (
            gate_layout.contiguous_offsets(),
            up_layout.contiguous_offsets(),
        );
        let (Some(gate_range), Some(up_range)) = offsets else {
            candle_core::bail!("swiglu wants contiguous inputs");
        };
        let mut out = gate.as_slice::<f32>()?[gate_range.0..gate_range.1].to_vec();
        math::swiglu(&mut out, &up.as_slice::<f32>()?[up_range.0..up_range.1]);
        Ok((CpuStorage::F32(out), gate_layout.shape().clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::HostKv;

    fn logits(model: &Model, chunks: &[&[u32]], cache: &mut dyn PagedKv) -> Vec<f32> {
        let mut start = 0;
        let mut logits = Vec::new();
        for chunk in chunks {
            let out = model
                .forward(chunk, start, cache, &mut |_, _| Ok(()))
                .unwrap();
            logits = out.to_vec1().unwrap();
            start += chunk.len();
        }
        logits
    }

    fn model() -> Model {
        Model::random(1, 259).unwrap()
    }

    fn fresh(model: &Model) -> HostKv {
        HostKv::new(model.kv_shape(16), 20)
    }

    fn prompt(count: u32) -> Vec<u32> {
        (0..count).map(|i| (i * 37 + 11) % 256).collect()
    }

    #[test]
    fn chunks_of_any_size_give_the_same_bits() {
        let model = model();
        let tokens = prompt(301);
        let want = logits(&model, &[&tokens], &mut fresh(&model));
        assert!(want.iter().all(|x| x.is_finite()));
        for size in [1, 7, 16, 128] {
            let chunks: Vec<&[u32]> = tokens.chunks(size).collect();
            assert_eq!(
                logits(&model, &chunks, &mut fresh(&model)),
                want,
                "chunks of {size}"
            );
        }
    }

    #[test]
    fn a_later_token_does_not_change_earlier_ones() {
        let model = model();
        let mut tokens = prompt(80);
        let mut cache = fresh(&model);
        logits(&model, &[&tokens], &mut cache);
        tokens[50] = 200;
        let mut other = fresh(&model);
        logits(&model, &[&tokens], &mut other);
        for region in 0..model.kv_shape(16).regions() {
            // Token 50 is the third of slot 3.
            let row = model.kv_shape(16).row_elements();
            assert_eq!(
                cache.page(region, 2),
                other.page(region, 2),
                "tokens 32 to 47"
            );
            assert_eq!(
                cache.page(region, 3)[..2 * row],
                other.page(region, 3)[..2 * row]
            );
            assert_ne!(
                cache.page(region, 3)[2 * row..],
                other.page(region, 3)[2 * row..]
            );
        }
    }

    #[test]
    fn every_earlier_token_matters() {
        let model = model();
        let tokens = prompt(40);
        let want = logits(&model, &[&tokens], &mut fresh(&model));
        for at in 0..40 {
            let mut changed = tokens.clone();
            changed[at] = 255;
            assert_ne!(
                logits(&model, &[&changed], &mut fresh(&model)),
                want,
                "token {at}"
            );
        }
    }

    #[test]
    fn page_scatter_and_slot_size_do_not_matter() {
        let model = model();
        let tokens = prompt(150);
        let want = logits(&model, &[&tokens], &mut fresh(&model));
        let table = vec![30, 2, 17, 5, 9, 0, 21, 12, 3, 28];
        let mut scattered = HostKv::scattered(model.kv_shape(16), 31, table);
        assert_eq!(logits(&model, &[&tokens], &mut scattered), want);
        let mut narrow = HostKv::new(model.kv_shape(5), 30);
        assert_eq!(logits(&model, &[&tokens], &mut narrow), want);
    }

    #[test]
    fn on_layer_sees_its_layer_written_and_later_ones_not() {
        let model = model();
        let mut cache = fresh(&model);
        let mut seen = Vec::new();
        let mut on_layer = |cache: &mut dyn PagedKv, layer: usize| {
            let written = |region| cache.page(region, 0).iter().all(|x| x.to_f32() != 0.0);
            assert!(
                written(2 * layer) && written(2 * layer + 1),
                "layer {layer} is written"
            );
            assert!(
                layer == 3 || !written(2 * layer + 2),
                "the next layer is not"
            );
            seen.push(layer);
            Ok(())
        };
        model
            .forward(&prompt(16), 0, &mut cache, &mut on_layer)
            .unwrap();
        assert_eq!(seen, [0, 1, 2, 3]);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let model = model();
        let refuse = |tokens: &[u32], start, cache: &mut HostKv| {
            model
                .forward(tokens, start, cache, &mut |_, _| Ok(()))
                .unwrap_err()
                .to_string()
        };
        let mut cache = fresh(&model);
        assert_eq!(
            refuse(&[1, 2], 319, &mut cache),
            "321 tokens do not fit a cache of 320"
        );
        assert_eq!(
            refuse(&[1, 2], 2047, &mut cache),
            "2049 tokens do not fit a context of 2048"
        );
        assert_eq!(refuse(&[], 0, &mut cache), "no tokens to compute");
        assert!(refuse(&[259], 0, &mut cache).contains("259"));
        let shape = KvShape {
            layers: 3,
            ..model.kv_shape(16)
        };
        assert!(refuse(&[1], 0, &mut HostKv::new(shape, 1)).contains("layers: 3"));
    }

    #[test]
    fn seeds_make_different_models() {
        let (one, two) = (model(), Model::random(2, 259).unwrap());
        let tokens = prompt(5);
        let first = logits(&one, &[&tokens], &mut fresh(&one));
        assert_eq!(
            first,
            logits(&model(), &[&tokens], &mut fresh(&one)),
            "same seed"
        );
        assert_ne!(
            first,
            logits(&two, &[&tokens], &mut fresh(&two)),
            "other seed"
        );
    }

    #[test]
    fn sequences_run_in_parallel_over_one_model() {
        fn shared<T: Send + Sync>(_: &T) {}
        let model = model();
        shared(&model);
        let tokens = prompt(60);
        let want = logits(&model, &[&tokens], &mut fresh(&model));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert_eq!(logits(&model, &[&tokens], &mut fresh(&model)), want));
            }
        });
    }
}
