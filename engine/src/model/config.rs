//! A model's dimensions, from GGUF metadata or made up.

use anyhow::{Result, ensure};
use candle_core::quantized::gguf_file::Content;

use crate::gguf::{GgufError, Metadata};
use crate::kv::KvShape;
use crate::model::math::LANES;

/// The dimensions of a Llama-family model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// A name for people.
    pub name: String,
    /// Transformer layers.
    pub layers: usize,
    /// The width of the residual stream.
    pub hidden: usize,
    /// The width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; they divide the query heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocabulary: usize,
    /// The most tokens of a sequence.
    pub context: usize,
    /// The base of the rotary embedding's frequencies.
    pub rope_base: f32,
    /// What the norms add to the mean square.
    pub norm_epsilon: f32,
}

impl Config {
    /// Reads the dimensions of a GGUF file.
    ///
    /// # Errors
    ///
    /// If a key is missing or out of range, or the model is of a kind that is not supported.
    pub fn from_gguf(content: &Content) -> Result<Self> {
        let meta = Metadata::new(content);
        meta.expect_text("general.architecture", "llama")?;
        if meta.has("llama.rope.scaling.type") {
            meta.expect_text("llama.rope.scaling.type", "none")?;
        }
        let hidden = meta.number("llama.embedding_length", 1..=1 << 16)?;
        let heads = meta.number("llama.attention.head_count", 1..=1 << 10)?;
        let optional = |key: &str, or: usize, max: usize| match meta.has(key) {
            true => meta.number(key, 1..=max),
            false => Ok(or),
        };
        let kv_heads = optional("llama.attention.head_count_kv", heads, heads)?;
        let head_dim = optional("llama.attention.key_length", hidden / heads, 1 << 10)?;
        for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            let got = optional(key, head_dim, 1 << 10)?;
            if got != head_dim {
                let (key, got, want) = (key.to_owned(), got.to_string(), head_dim.to_string());
                Err(GgufError::Unsupported { key, got, want })?;
            }
        }
        let token_count = meta
            .texts("tokenizer.ggml.tokens")
            .map_or(0, |tokens| tokens.len());
        let config = Self {
            name: meta.text("general.name").unwrap_or("unnamed").to_owned(),
            layers: meta.number("llama.block_count", 1..=1 << 10)?,
            hidden,
            feed_forward: meta.number("llama.feed_forward_length", 1..=1 << 18)?,
            heads,
            kv_heads,
            head_dim,
            vocabulary: optional("llama.vocab_size", token_count, 1 << 20)?,
            context: meta.number("llama.context_length", 1..=1 << 24)?,
            rope_base: match meta.has("llama.rope.freq_base") {
                true => meta.float("llama.rope.freq_base")?,
                false => 10_000.0,
            },
            norm_epsilon: meta.float("llama.attention.layer_norm_rms_epsilon")?,
        };
        config.check()?;
        Ok(config)
    }

    /// The dimensions of the random model.
    #[must_use]
    pub fn random(seed: u64, vocabulary: usize) -> Self {
        Self {
            name: format!("random:{seed}"),
            layers: 4,
            hidden: 64,
            feed_forward: 128,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocabulary,
            context: 2048,
            rope_base: 10_000.0,
            norm_epsilon: 1e-5,
        }
    }

    /// The shape of a cache for this model.
    #[must_use]
    pub fn kv_shape(&self, tokens_per_slot: usize) -> KvShape {
        let &Self {
            layers,
            kv_heads,
            head_dim,
            ..
        } = self;
        KvShape {
            layers,
            kv_heads,
            head_dim,
            tokens_per_slot,
        }
    }

    fn check(&self) -> Result<()> {
        let &Self {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self;
        ensure!(
            heads.is_multiple_of(kv_heads),
            "gguf: {heads} heads are not a multiple of {kv_heads} key/value heads"
        );
        ensure!(
            head_dim > 0 && head_dim.is_multiple_of(LANES),
            "gguf: head dimension is {head_dim}, want a multiple of {LANES}"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::*;
    use crate::gguf::tests::content;

    fn keys() -> Vec<(&'static str, Value)> {
        vec![
            ("general.architecture", Value::String("llama".into())),
            ("llama.embedding_length", Value::U32(576)),
            ("llama.attention.head_count", Value::U32(9)),
            ("llama.attention.head_count_kv", Value::U32(3)),
            ("llama.block_count", Value::U32(30)),
            ("llama.feed_forward_length", Value::U32(1536)),
            ("llama.vocab_size", Value::U32(49152)),
            ("llama.context_length", Value::U32(8192)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ]
    }

    fn with(key: &'static str, value: Value) -> String {
        let mut keys = keys();
        keys.retain(|(name, _)| *name != key);
        keys.push((key, value));
        Config::from_gguf(&content(&keys)).unwrap_err().to_string()
    }

    #[test]
    fn defaults_fill_in_what_llama_files_leave_out() {
        let config = Config::from_gguf(&content(&keys())).unwrap();
        assert_eq!((config.head_dim, config.rope_base), (64, 10_000.0));
        assert_eq!(config.kv_shape(16).page_bytes(), 16 * 3 * 64 * 2);
    }

    #[test]
    fn errors_name_key_and_value() {
        assert_eq!(
            with("general.architecture", Value::String("mamba".into())),
            "gguf: `general.architecture` is `mamba`, want `llama`"
        );
        assert_eq!(
            with("llama.block_count", Value::U32(0)),
            "gguf: `llama.block_count` is 0, want 1 to 1024"
        );
        assert_eq!(
            with("llama.attention.head_count_kv", Value::U32(10)),
            "gguf: `llama.attention.head_count_kv` is 10, want 1 to 9"
        );
        assert_eq!(
            with("llama.rope.dimension_count", Value::U32(32)),
            "gguf: `llama.rope.dimension_count` is `32`, want 64"
        );
        assert_eq!(
            with("llama.rope.scaling.type", Value::String("yarn".into())),
            "gguf: `llama.rope.scaling.type` is `yarn`, want `none`"
        );
        assert_eq!(
            with("llama.attention.head_count_kv", Value::U32(2)),
            "gguf: 9 heads are not a multiple of 2 key/value heads"
        );
        let mut keys = keys();
        keys.remove(5);
        assert_eq!(
            Config::from_gguf(&content(&keys)).unwrap_err().to_string(),
            "gguf: key `llama.feed_forward_length` is missing"
        );
    }
}
