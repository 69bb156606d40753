//! The prefill role: computes a prompt and sends its pages layer by layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use fabric_client::{LeaseRequest, Sending};
use fabric_proto::ids::{RequestId, TenantId};
use fabric_proto::outcome::{Abort, Outcome};
use fabric_proto::pool::TokenRange;

use super::api::{PrefillDone, PrefillRequest};
use super::error::ServeError;
use super::fabric::Fabric;
use super::kv::SendingKv;
use super::{Shared, lease_error};
use crate::generate::{Handover, prefill};
use crate::kv::{KvShape, PagedKv};
use crate::resolve::Loaded;
use crate::sampling::{Sampler, SamplingParams};

/// What the prefill role needs beside the model.
pub(super) struct Prefill {
    pub(super) shared: Arc<Shared>,
    pub(super) fabric: Fabric,
    /// Slept after each layer, so that a transfer can be watched. 0 but in tests.
    pub(super) layer_delay: Duration,
}

/// What is computed.
struct Prompt {
    tokens: Vec<u32>,
    sampling: SamplingParams,
    shape: KvShape,
    layer_delay: Duration,
}

/// Tells a computation that nobody waits for it any more.
struct Cancel(Arc<AtomicBool>);

impl Drop for Cancel {
    fn drop(&mut self) {
        // Relaxed: it only makes the computation stop sooner, and orders nothing.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `POST /internal/prefill`.
pub(super) async fn handle(
    State(role): State<Arc<Prefill>>,
    Json(request): Json<PrefillRequest>,
) -> Result<Json<PrefillDone>, ServeError> {
    let result = role.run(request).await;
    role.shared
        .metrics
        .answered("prefill", result.as_ref().err());
    result.map(Json)
}

impl Prefill {
    async fn run(&self, request: PrefillRequest) -> Result<PrefillDone, ServeError> {
        let bad = |error: &dyn std::fmt::Display| ServeError::BadRequest(error.to_string());
        let tenant = TenantId::new(&request.tenant).map_err(|error| bad(&error))?;
        let name = RequestId::new(&request.request).map_err(|error| bad(&error))?;
        let offer = BASE64.decode(&request.offer).map_err(|error| bad(&error))?;
        let tokens = TokenRange {
            start: 0,
            count: request.tokens.len() as u64,
        };
        let _turn = self.shared.turn().await;
        let lease = LeaseRequest {
            tenant,
            request: name,
            tokens,
            named: Vec::new(),
        };
        // S9: a prompt that this pool cannot hold is refused here, with the numbers.
        let held = self.fabric.pool()?.hold(lease).await;
        let held = held.map_err(|error| lease_error("prefill pool", &error))?;
        let sending = held.send(Bytes::from(offer)).await;
        let sending = sending.map_err(|error| ServeError::Transfer(error.to_string()))?;
        let prompt = Prompt {
            tokens: request.tokens,
            sampling: request.sampling,
            shape: self.shared.shape,
            layer_delay: self.layer_delay,
        };
        self.compute_and_send(sending, prompt).await
    }

    async fn compute_and_send(
        &self,
        sending: Sending,
        prompt: Prompt,
    ) -> Result<PrefillDone, ServeError> {
        let begin = Instant::now();
        let cancel = Cancel(Arc::new(AtomicBool::new(false)));
        let stop = Arc::clone(&cancel.0);
        let loaded = self.shared.loaded.clone();
        let computed =
            tokio::task::spawn_blocking(move || compute(&loaded, sending, &prompt, &stop));
        let (sending, result) = computed
            .await
            .map_err(|error| ServeError::Internal(error.to_string()))?;
        let compute_seconds = begin.elapsed().as_secs_f64();
        let outcome = match result {
            Ok(payload) => sending.finish(payload).await.0,
            // What broke may be the transfer itself: then its own outcome says more.
            Err(error) => {
                let outcome = sending.abort().await.0;
                if outcome == Outcome::Aborted(Abort::Source) {
                    return Err(ServeError::Internal(format!("{error:#}")));
                }
                outcome
            }
        };
        if outcome == Outcome::Delivered {
            return Ok(PrefillDone { compute_seconds });
        }
        Err(ServeError::outcome("transfer", outcome))
    }
}

/// Computes the prompt; each layer's pages are sealed, and so sent, while the next is computed.
fn compute(
    loaded: &Loaded,
    sending: Sending,
    prompt: &Prompt,
    stop: &AtomicBool,
) -> (Sending, anyhow::Result<Bytes>) {
    let mut kv = SendingKv {
        sending,
        shape: prompt.shape,
    };
    let result = first_token(loaded, &mut kv, prompt, stop);
    (kv.sending, result)
}

fn first_token(
    loaded: &Loaded,
    kv: &mut SendingKv,
    prompt: &Prompt,
    stop: &AtomicBool,
) -> anyhow::Result<Bytes> {
    let mut sampler = Sampler::new(prompt.sampling)?;
    let mut on_layer = |_: &mut dyn PagedKv, _| {
        // Relaxed: see `Cancel`; a layer too many does no harm.
        ensure!(!stop.load(Ordering::Relaxed), "the request was abandoned");
        std::thread::sleep(prompt.layer_delay);
        Ok(())
    };
    let logits = prefill(&loaded.model, &prompt.tokens, 0, kv, &mut on_layer)?;
    let token = sampler.sample(&logits)?;
    Ok(serde_json::to_vec(&Handover { token, sampler })?.into())
}
