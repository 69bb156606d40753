//! One node alone: the same answers without any transfer, to compare with.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::Shared;
use super::answer::{Answer, tenant_of};
use super::api::CompletionRequest;
use super::error::ServeError;
use crate::generate::{Handover, prefill};
use crate::kv::{HostKv, PagedKv};
use crate::sampling::Sampler;

/// `POST /v1/completions`.
pub(super) async fn handle(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Json(request): Json<CompletionRequest>,
) -> Result<Response, ServeError> {
    let result = run(&shared, &headers, request).await;
    shared.metrics.answered("single", result.as_ref().err());
    result
}

async fn run(
    shared: &Arc<Shared>,
    headers: &HeaderMap,
    request: CompletionRequest,
) -> Result<Response, ServeError> {
    tenant_of(headers)?;
    let answer = Answer::new(shared, request)?;
    let _turn = shared.turn().await;
    let (loaded, shape) = (shared.loaded.clone(), shared.shape);
    let (prompt, sampling) = (answer.prompt.clone(), answer.sampling);
    let mut cache = HostKv::new(shape, shape.slots_for(answer.tokens_max()));
    let computed = tokio::task::spawn_blocking(move || -> anyhow::Result<_> {
        let mut sampler = Sampler::new(sampling)?;
        let logits = prefill(&loaded.model, &prompt, 0, &mut cache, &mut |_, _| Ok(()))?;
        let token = sampler.sample(&logits)?;
        Ok((cache, Handover { token, sampler }))
    });
    let internal = |error: &dyn std::fmt::Display| ServeError::Internal(format!("{error:#}"));
    let computed = computed.await.map_err(|error| internal(&error))?;
    let (cache, start) = computed.map_err(|error| internal(&error))?;
    let cache: Box<dyn PagedKv> = Box::new(cache);
    answer.respond(cache, start, None).await
}
