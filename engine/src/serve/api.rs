//! The shapes of the HTTP interface.

use serde::{Deserialize, Serialize};

use super::error::ServeError;
use crate::generate::Stop;
use crate::sampling::SamplingParams;

/// The most tokens that are generated where the request does not say; as OpenAI has it.
const MAX_TOKENS_DEFAULT: usize = 16;

/// `POST /v1/completions`, the parts of OpenAI's request that this engine knows. `model` is not
/// among them: an engine serves one.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct CompletionRequest {
    /// The text to go on from.
    pub(super) prompt: String,
    /// The most tokens to generate.
    #[serde(default)]
    pub(super) max_tokens: Option<usize>,
    /// 0, the default here, always takes the likeliest token.
    #[serde(default)]
    pub(super) temperature: Option<f32>,
    /// Keeps the likeliest tokens up to this probability.
    #[serde(default)]
    pub(super) top_p: Option<f32>,
    /// Seeds the choices.
    #[serde(default)]
    pub(super) seed: Option<u64>,
    /// Send the text as it comes, as server-sent events.
    #[serde(default)]
    pub(super) stream: bool,
    /// How many answers; only 1 is served.
    #[serde(default)]
    pub(super) n: Option<u32>,
}

impl CompletionRequest {
    /// The most tokens to generate.
    ///
    /// # Errors
    ///
    /// For what this engine does not serve: it is refused, not ignored.
    pub(super) fn max_tokens(&self) -> Result<usize, ServeError> {
        match (self.n, self.max_tokens) {
            (Some(n), _) if n != 1 => Err(ServeError::BadRequest(format!(
                "n is {n}, and only 1 is served"
            ))),
            (_, Some(0)) => Err(ServeError::BadRequest(
                "max_tokens is 0, and at least 1 is needed".into(),
            )),
            (_, max_tokens) => Ok(max_tokens.unwrap_or(MAX_TOKENS_DEFAULT)),
        }
    }

    /// How to choose tokens.
    #[must_use]
    pub(super) fn sampling(&self) -> SamplingParams {
        let default = SamplingParams::default();
        SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            seed: self.seed.unwrap_or(default.seed),
        }
    }
}

/// A response, or one event of a streamed one.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Completion {
    /// Which request.
    pub(super) id: String,
    /// Always `text_completion`.
    pub(super) object: &'static str,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// The model.
    pub(super) model: String,
    /// The one answer, or a piece of it.
    pub(super) choices: [Choice; 1],
    /// Counts; in the last event only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    /// What the transfer was; in the last event only, and only where there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fabric: Option<TransferReport>,
}

/// An answer, or a piece of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Choice {
    /// Always 0.
    pub(super) index: u32,
    /// The text.
    pub(super) text: String,
    /// Why it ended; `None` before it has.
    pub(super) finish_reason: Option<&'static str>,
    /// Always `None`.
    pub(super) logprobs: Option<()>,
}

/// Counts of tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Usage {
    /// In the prompt.
    pub(super) prompt_tokens: usize,
    /// Generated.
    pub(super) completion_tokens: usize,
    /// Both.
    pub(super) total_tokens: usize,
}

/// What a request's transfer was.
#[derive(Clone, Debug, Serialize)]
pub(super) struct TransferReport {
    /// The request's name on every wire.
    pub(super) request: String,
    /// How the transfer ended.
    pub(super) outcome: &'static str,
    /// Pages that were verified.
    pub(super) pages: u64,
    /// Their bytes.
    pub(super) bytes: u64,
    /// How often pages were sent: 1 where none was corrupt.
    pub(super) attempts: u32,
    /// From the offer to the delivery; the prompt's computation is within.
    pub(super) transfer_seconds: f64,
    /// From the request to its first token.
    pub(super) ttft_seconds: f64,
    /// The destination's slots, `[index, epoch]` each, in the order of the tokens.
    pub(super) slots: Vec<(u32, u64)>,
}

/// `finish_reason`, in OpenAI's words.
#[must_use]
pub(super) const fn finish_reason(stop: Stop) -> &'static str {
    match stop {
        Stop::End => "stop",
        Stop::Context | Stop::MaxTokens => "length",
    }
}

/// From a decode engine to its prefill engine.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct PrefillRequest {
    /// The request's name on every wire.
    pub(super) request: String,
    /// For whom.
    pub(super) tenant: String,
    /// The prompt's tokens.
    pub(super) tokens: Vec<u32>,
    /// How the first token is chosen.
    pub(super) sampling: SamplingParams,
    /// The destination's offer, in base64.
    pub(super) offer: String,
}

/// The answer to a [`PrefillRequest`] whose pages were delivered.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub(super) struct PrefillDone {
    /// From the request to the last layer of the prompt.
    pub(super) compute_seconds: f64,
}
