//! The decode role: leases slots, has a prefill engine fill them, and answers from them.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fabric_client::{Delivered, HeldLease, LeaseRequest, Pool, ReceiveLease};
use fabric_proto::ids::{RequestId, TenantId};
use fabric_proto::pool::TokenRange;

use super::answer::{Answer, tenant_of};
use super::api::{CompletionRequest, PrefillRequest, TransferReport};
use super::error::{ErrorBody, ServeError};
use super::fabric::Fabric;
use super::kv::DeliveredKv;
use super::{Shared, lease_error};
use crate::generate::Handover;
use crate::kv::PagedKv;

/// What the decode role needs beside the model.
pub(super) struct Decode {
    pub(super) shared: Arc<Shared>,
    pub(super) fabric: Fabric,
    pub(super) http: reqwest::Client,
    /// Where the prefill engine listens.
    pub(super) prefill: String,
}

/// A request's slots, before anything has arrived in them.
struct Leased {
    prompt: ReceiveLease,
    rest: Option<HeldLease>,
}

/// `POST /v1/completions`.
pub(super) async fn handle(
    State(role): State<Arc<Decode>>,
    headers: HeaderMap,
    Json(request): Json<CompletionRequest>,
) -> Result<Response, ServeError> {
    let result = role.run(&headers, request).await;
    role.shared
        .metrics
        .answered("decode", result.as_ref().err());
    result
}

impl Decode {
    async fn run(
        &self,
        headers: &HeaderMap,
        request: CompletionRequest,
    ) -> Result<Response, ServeError> {
        let begin = Instant::now();
        let tenant = tenant_of(headers)?;
        let answer = Answer::new(&self.shared, request)?;
        let _turn = self.shared.turn().await;
        let leased = self.lease(&answer, &tenant).await?;
        let offered = Instant::now();
        let delivered = self.transfer(&answer, &tenant, leased.prompt).await?;
        let transfer_seconds = offered.elapsed().as_secs_f64();
        let kv = DeliveredKv {
            prompt: delivered,
            rest: leased.rest,
            shape: self.shared.shape,
        };
        let handover: Handover = serde_json::from_slice(&kv.payload())
            .map_err(|error| ServeError::Transfer(format!("payload: {error}")))?;
        let report = report(&answer, &kv.prompt, transfer_seconds, begin);
        let cache: Box<dyn PagedKv> = Box::new(kv);
        answer.respond(cache, handover, Some(report)).await
    }

    /// Leases everything that the request can need, so that nothing can run out later.
    // S9: what cannot fit is turned away before any prompt is computed.
    async fn lease(&self, answer: &Answer, tenant: &TenantId) -> Result<Leased, ServeError> {
        let pool = self.fabric.pool()?;
        let (prompt, all) = (answer.prompt.len() as u64, answer.tokens_max() as u64);
        let lease = |tokens| LeaseRequest {
            tenant: tenant.clone(),
            request: request_id(answer),
            tokens,
            named: Vec::new(),
        };
        let tokens = TokenRange {
            start: 0,
            count: prompt,
        };
        let received = pool.receive(lease(tokens)).await;
        let received = received.map_err(|error| lease_error("decode pool", &error))?;
        let per_slot = self.shared.shape.tokens_per_slot as u64;
        let start = prompt.div_ceil(per_slot) * per_slot;
        let rest = match all.checked_sub(start) {
            None | Some(0) => None,
            Some(count) => Some(self.hold(&pool, lease(TokenRange { start, count })).await?),
        };
        Ok(Leased {
            prompt: received,
            rest,
        })
    }

    async fn hold(&self, pool: &Pool, lease: LeaseRequest) -> Result<HeldLease, ServeError> {
        let held = pool.hold(lease).await;
        held.map_err(|error| lease_error("decode pool", &error))
    }

    /// Has the prompt computed and its pages delivered. Whichever side fails first tells.
    async fn transfer(
        &self,
        answer: &Answer,
        tenant: &TenantId,
        lease: ReceiveLease,
    ) -> Result<Delivered, ServeError> {
        let request = PrefillRequest {
            request: answer.id.clone(),
            tenant: tenant.as_str().to_owned(),
            tokens: answer.prompt.clone(),
            sampling: answer.sampling,
            offer: BASE64.encode(lease.offer()),
        };
        let prefill = self.prefill(&request);
        let delivered = lease.delivered();
        tokio::pin!(prefill, delivered);
        tokio::select! {
            // The destination's own word comes first, where both are there.
            biased;
            delivered = &mut delivered => {
                delivered.map_err(|error| ServeError::outcome("transfer", error.outcome))
            }
            done = &mut prefill => {
                // An error ends the lease, since `delivered` is dropped; otherwise the outcome is
                // on its way.
                done?;
                let delivered = delivered.await;
                delivered.map_err(|error| ServeError::outcome("transfer", error.outcome))
            }
        }
    }

    async fn prefill(&self, request: &PrefillRequest) -> Result<(), ServeError> {
        let failed = |error: reqwest::Error| ServeError::Transfer(format!("prefill: {error}"));
        let url = format!("{}/internal/prefill", self.prefill);
        let response = self
            .http
            .post(url)
            .json(request)
            .send()
            .await
            .map_err(failed)?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let body = response.json::<ErrorBody>().await.map_err(failed)?;
        Err(ServeError::relayed(status.as_u16(), body.error.message))
    }
}

fn request_id(answer: &Answer) -> RequestId {
    RequestId::new(&answer.id).expect("the engine's own names are short and plain")
}

fn report(
    answer: &Answer,
    delivered: &Delivered,
    transfer_seconds: f64,
    begin: Instant,
) -> TransferReport {
    let stats = delivered.stats();
    let slots = delivered.slots().iter();
    TransferReport {
        request: answer.id.clone(),
        outcome: "delivered",
        pages: stats.pages,
        bytes: stats.bytes,
        attempts: stats.attempts,
        transfer_seconds,
        ttft_seconds: begin.elapsed().as_secs_f64(),
        slots: slots
            .map(|slot| (slot.index.0, slot.epoch.as_u64()))
            .collect(),
    }
}
