//! A whole request on one node: prefill, then decode, over one cache.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

use crate::kv::PagedKv;
use crate::model::{Model, OnLayer};
use crate::resolve::Loaded;
use crate::sampling::{Sampler, SamplingParams};

/// The most tokens that one forward pass of [`prefill`] computes, to bound the activations' memory.
/// The result does not depend on it.
pub const PREFILL_CHUNK: usize = 256;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// How to choose them.
    pub sampling: SamplingParams,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// The cache or the model's context is full.
    Context,
    /// The model ended its answer.
    End,
    /// The request's limit is reached.
    MaxTokens,
}

/// What was generated.
#[derive(Clone, Debug, Serialize)]
pub struct Generated {
    /// The tokens, without the one that ends an answer.
    pub tokens: Vec<u32>,
    /// Their text.
    pub text: String,
    /// Why it ended.
    pub stop: Stop,
    /// The time from the start to the first choice.
    pub prefill: Duration,
    /// The time from the first choice to the end.
    pub decode: Duration,
    /// The forward passes in `decode`.
    pub decode_steps: usize,
}

/// Computes a prompt in chunks, the first token of which is token `start`; returns the logits after
/// the last. `on_layer` is called for every layer of every chunk, and a layer's pages are sealed as
/// soon as the prompt writes them no more, while later layers are still to be computed.
///
/// # Errors
///
/// As [`Model::forward`].
pub fn prefill(
    model: &Model,
    tokens: &[u32],
    start: usize,
    cache: &mut dyn PagedKv,
    on_layer: &mut OnLayer<'_>,
) -> Result<Vec<f32>> {
    ensure!(!tokens.is_empty(), "the prompt is empty");
    let shape = cache.shape();
    let end = start + tokens.len();
    let mut logits = None;
    let mut at = start;
    for chunk in tokens.chunks(PREFILL_CHUNK) {
        let next = at + chunk.len();
        // A slot that the next chunk goes on filling is not complete yet.
        let full = if next == end {
            shape.slots_for(next)
        } else {
            next / shape.tokens_per_slot
        };
        let complete = at / shape.tokens_per_slot..full;
        let mut after_layer = |cache: &mut dyn PagedKv, layer| {
            for region in [shape.key_region(layer), shape.value_region(layer)] {
                cache.seal(region, complete.clone())?;
            }
            on_layer(cache, layer)
        };
        logits = Some(model.forward(chunk, at, cache, &mut after_layer)?);
        at = next;
    }
    let logits = logits.expect("there is at least one chunk");
    Ok(logits.to_vec1()?)
}

/// Computes one token, which is token `position` of its sequence; returns the logits after it.
///
/// # Errors
///
/// As [`Model::forward`].
pub fn decode(
    model: &Model,
    token: u32,
    position: usize,
    cache: &mut dyn PagedKv,
) -> Result<Vec<f32>> {
    Ok(model
        .forward(&[token], position, cache, &mut |_, _| Ok(()))?
        .to_vec1()?)
}

/// Generates over an empty cache, and hands out text as it comes, in whole characters.
///
/// # Errors
///
/// If the prompt does not fit the model or the cache, or `on_text` fails.
pub fn generate(
    loaded: &Loaded,
    request: &Request,
    cache: &mut dyn PagedKv,
    on_text: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Generated> {
    let begin = Instant::now();
    let mut sampler = Sampler::new(request.sampling)?;
    let logits = prefill(&loaded.model, &request.prompt, 0, cache, &mut |_, _| Ok(()))?;
    let prefill = begin.elapsed();
    let token = sampler.sample(&logits)?;
    let prompt = request.prompt.len();
    let handover = Handover { token, sampler };
    let generated = continue_from(loaded, handover, prompt, request.max_tokens, cache, on_text)?;
    Ok(Generated {
        prefill,
        ..generated
    })
}

/// What a prefill hands to whoever goes on: everything beside the cache.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Handover {
    /// The first token.
    pub token: u32,
    /// The state of the choices after it.
    pub sampler: Sampler,
}

/// Goes on from the first token of an answer, over a cache that holds the `prompt` tokens before
/// it.
///
/// # Errors
///
/// If `on_text` fails.
pub fn continue_from(
    loaded: &Loaded,
    handover: Handover,
    prompt: usize,
    max_tokens: usize,
    cache: &mut dyn PagedKv,
    on_text: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<Generated> {
    let Loaded { model, tokenizer } = loaded;
    let Handover {
        mut token,
        mut sampler,
    } = handover;
    let capacity = cache.slots() * cache.shape().tokens_per_slot;
    let room = capacity.min(model.config().context);
    let begin = Instant::now();
    let mut stream = tokenizer.stream();
    let (mut tokens, mut text) = (Vec::new(), String::new());
    let mut decode_steps = 0;
    let stop = loop {
        if tokens.len() >= max_tokens {
            break Stop::MaxTokens;
        }
        if tokenizer.is_end(token) {
            break Stop::End;
        }
        tokens.push(token);
        if let Some(piece) = stream.push(token) {
            on_text(&piece)?;
            text.push_str(&piece);
        }
        let position = prompt + tokens.len() - 1;
        if position >= room {
            break Stop::Context;
        }
        if tokens.len() < max_tokens {
            token = sampler.sample(&decode(model, token, position, cache)?)?;
            decode_steps += 1;
        }
    };
    if let Some(piece) = stream.finish() {
        on_text(&piece)?;
        text.push_str(&piece);
    }
    let (prefill, decode) = (Duration::ZERO, begin.elapsed());
    Ok(Generated {
        tokens,
        text,
        stop,
        prefill,
        decode,
        decode_steps,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::HostKv;
    use crate::resolve::{ModelSource, load};

    fn run(prompt: &str, max_tokens: usize, slots: usize, sampling: SamplingParams) -> Generated {
        let loaded = load(&ModelSource::Random { seed: 5 }).unwrap();
        let prompt = loaded.tokenizer.encode(prompt).unwrap();
        let mut cache = HostKv::new(loaded.model.kv_shape(16), slots);
        let mut streamed = String::new();
        let mut on_text = |text: &str| {
            streamed.push_str(text);
            Ok(())
        };
        let request = Request {
            prompt,
            max_tokens,
            sampling,
        };
        let generated = generate(&loaded, &request, &mut cache, &mut on_text).unwrap();
        assert_eq!(
            streamed, generated.text,
            "what is streamed is what is returned"
        );
        generated
    }

    #[test]
    fn a_request_repeats_itself() {
        let params = SamplingParams {
            temperature: 1.0,
            top_p: 0.9,
            seed: 4,
        };
        let first = run("hello there", 40, 8, params);
        assert_eq!(first.tokens, run("hello there", 40, 8, params).tokens);
        let other = SamplingParams { seed: 5, ..params };
        assert_ne!(first.tokens, run("hello there", 40, 8, other).tokens);
    }

    #[test]
    fn limits_end_a_request() {
        let params = SamplingParams::default();
        let none = run("hello", 0, 1, params);
        assert_eq!((none.tokens.len(), none.stop), (0, Stop::MaxTokens));
        let some = run("hello", 3, 1, params);
        assert_eq!(
            (some.tokens.len(), some.stop, some.decode_steps),
            (3, Stop::MaxTokens, 2)
        );
        // 16 tokens fit; the 12th chosen token would be number 16 and cannot be computed, but it
        // is still an answer.
        let full = run("hello", 100, 1, params);
        assert_eq!((full.tokens.len(), full.stop), (12, Stop::Context));
    }
}
