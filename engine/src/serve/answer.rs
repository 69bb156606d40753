//! From a first token and a filled cache to a response, whole or as it comes.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use axum::Json;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use fabric_proto::ids::TenantId;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::mpsc;

use super::Shared;
use super::api::{Choice, Completion, CompletionRequest, TransferReport, Usage, finish_reason};
use super::error::ServeError;
use crate::generate::{Generated, Handover, continue_from};
use crate::kv::PagedKv;
use crate::sampling::{Sampler, SamplingParams};

/// Names the tenant of a request.
pub(super) const TENANT_HEADER: &str = "x-fabric-tenant";
/// The tenant of a request that names none.
const TENANT_DEFAULT: &str = "default";
/// Pieces of text that may wait for a slow client before the computation waits too.
const PIECES_MAX: usize = 64;

/// A request that was found to be in order.
pub(super) struct Answer {
    shared: Arc<Shared>,
    pub(super) id: String,
    pub(super) prompt: Vec<u32>,
    pub(super) sampling: SamplingParams,
    max_tokens: usize,
    stream: bool,
    created: u64,
}

/// What a computation tells a streaming response.
enum Piece {
    Text(String),
    Done(Generated),
    Failed(String),
}

impl Answer {
    /// Checks a request against the model's context.
    pub(super) fn new(
        shared: &Arc<Shared>,
        request: CompletionRequest,
    ) -> Result<Self, ServeError> {
        let bad = |error: anyhow::Error| ServeError::BadRequest(format!("{error:#}"));
        let max_tokens = request.max_tokens()?;
        let sampling = request.sampling();
        Sampler::new(sampling).map_err(bad)?;
        let prompt = shared
            .loaded
            .tokenizer
            .encode_with_specials(&request.prompt)
            .map_err(bad)?;
        let (tokens, context) = (prompt.len(), shared.context);
        if tokens == 0 {
            return Err(ServeError::BadRequest("the prompt is empty".into()));
        }
        if tokens.saturating_add(max_tokens) > context {
            // S9: refused with the numbers, before anything is leased.
            return Err(ServeError::BadRequest(format!(
                "the prompt has {tokens} tokens and max_tokens is {max_tokens}: together {}, and \
                 the context has {context}",
                tokens.saturating_add(max_tokens)
            )));
        }
        let created = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let stream = request.stream;
        let id = shared.request_id();
        Ok(Self {
            shared: Arc::clone(shared),
            id,
            prompt,
            sampling,
            max_tokens,
            stream,
            created,
        })
    }

    /// The most tokens that the cache can have to hold.
    pub(super) fn tokens_max(&self) -> usize {
        self.prompt.len() + self.max_tokens
    }

    /// Generates and responds.
    pub(super) async fn respond(
        self,
        cache: Box<dyn PagedKv>,
        start: Handover,
        report: Option<TransferReport>,
    ) -> Result<Response, ServeError> {
        if self.stream {
            Ok(self.streamed(cache, start, report))
        } else {
            self.whole(cache, start, report).await
        }
    }

    async fn whole(
        self,
        mut cache: Box<dyn PagedKv>,
        start: Handover,
        report: Option<TransferReport>,
    ) -> Result<Response, ServeError> {
        let (loaded, position) = (self.shared.loaded.clone(), self.prompt.len());
        let max_tokens = self.max_tokens;
        let generated = tokio::task::spawn_blocking(move || {
            let on_text = &mut |_: &str| Ok(());
            continue_from(
                &loaded,
                start,
                position,
                max_tokens,
                cache.as_mut(),
                on_text,
            )
        });
        let internal = |error: &dyn std::fmt::Display| ServeError::Internal(format!("{error:#}"));
        let generated = generated.await.map_err(|error| internal(&error))?;
        let generated = generated.map_err(|error| internal(&error))?;
        self.shared.metrics.generated(generated.tokens.len());
        let mut completion = self.completion(generated.text.clone());
        self.close(&mut completion, &generated, report);
        Ok(Json(completion).into_response())
    }

    fn streamed(
        self,
        mut cache: Box<dyn PagedKv>,
        start: Handover,
        report: Option<TransferReport>,
    ) -> Response {
        let (pieces, receiver) = mpsc::channel(PIECES_MAX);
        let (loaded, position) = (self.shared.loaded.clone(), self.prompt.len());
        let max_tokens = self.max_tokens;
        tokio::task::spawn_blocking(move || {
            let mut on_text = |text: &str| {
                // A client that is gone ends the computation, and with it the leases.
                let sent = pieces.blocking_send(Piece::Text(text.to_owned()));
                ensure!(sent.is_ok(), "the client is gone");
                Ok(())
            };
            let cache = cache.as_mut();
            let generated =
                continue_from(&loaded, start, position, max_tokens, cache, &mut on_text);
            let last =
                generated.map_or_else(|error| Piece::Failed(format!("{error:#}")), Piece::Done);
            // Nobody listens where the client is gone.
            drop(pieces.blocking_send(last));
        });
        let state = (self, receiver, report);
        let events = stream::unfold(Some(state), |state| async move {
            let (answer, mut receiver, report) = state?;
            let piece = receiver.recv().await?;
            let (event, more) = answer.event(piece, &report);
            let next = more.then_some((answer, receiver, report));
            Some((Ok::<_, Infallible>(event), next))
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, Body::from_stream(events)).into_response()
    }

    /// One event, and whether more follow.
    fn event(&self, piece: Piece, report: &Option<TransferReport>) -> (Bytes, bool) {
        match piece {
            Piece::Text(text) => (event(&self.completion(text)), true),
            Piece::Done(generated) => {
                self.shared.metrics.generated(generated.tokens.len());
                let mut completion = self.completion(String::new());
                self.close(&mut completion, &generated, report.clone());
                let mut last = event(&completion).to_vec();
                last.extend_from_slice(b"data: [DONE]\n\n");
                (last.into(), false)
            }
            Piece::Failed(message) => {
                // The status line is out already: the stream ends with an error and no [DONE].
                let error = serde_json::json!({
                    "error": {"message": message, "type": "internal_error", "code": 500}
                });
                (event(&error), false)
            }
        }
    }

    fn completion(&self, text: String) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.shared.loaded.model.config().name.clone(),
            choices: [Choice {
                index: 0,
                text,
                finish_reason: None,
                logprobs: None,
            }],
            usage: None,
            fabric: None,
        }
    }

    fn close(
        &self,
        completion: &mut Completion,
        generated: &Generated,
        report: Option<TransferReport>,
    ) {
        let (prompt_tokens, completion_tokens) = (self.prompt.len(), generated.tokens.len());
        completion.choices[0].finish_reason = Some(finish_reason(generated.stop));
        let total_tokens = prompt_tokens + completion_tokens;
        completion.usage = Some(Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens,
        });
        completion.fabric = report;
    }
}

fn event(value: &impl Serialize) -> Bytes {
    let text = serde_json::to_string(value).expect("plain structures have a JSON form");
    Bytes::from(format!("data: {text}\n\n"))
}

/// The tenant of a request.
pub(super) fn tenant_of(headers: &HeaderMap) -> Result<TenantId, ServeError> {
    let name = match headers.get(TENANT_HEADER) {
        None => TENANT_DEFAULT,
        Some(value) => value
            .to_str()
            .map_err(|_| ServeError::BadRequest(format!("{TENANT_HEADER} is not plain text")))?,
    };
    let bad = |error| ServeError::BadRequest(format!("{TENANT_HEADER}: {error}"));
    TenantId::new(name).map_err(bad)
}

/// Names requests: unique within a process, and unlikely to meet another's.
pub(super) struct Names {
    prefix: String,
    next: AtomicU64,
}

impl Names {
    pub(super) fn new() -> Self {
        let nanos = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let prefix = format!("cmpl-{:x}-{nanos:x}", std::process::id());
        Self {
            prefix,
            next: AtomicU64::new(1),
        }
    }

    pub(super) fn next(&self) -> String {
        // Relaxed: each caller gets a number of its own, and nothing else is ordered by it.
        format!(
            "{}-{}",
            self.prefix,
            self.next.fetch_add(1, Ordering::Relaxed)
        )
    }
}
