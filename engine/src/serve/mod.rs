//! The engine as a server: `POST /v1/completions`, `/health`, `/metrics`, in one of three roles.
//!
//! ```text
//!  client ─▶ decode: lease ─▶ offer ───── POST /internal/prefill ────▶ prefill: lease, send(offer)
//!               │                                                        │ compute, seal by layer
//!               ◀── first token, pages verified ── fabric ◀──────────────┘
//!            decode the rest ─▶ client
//! ```
//!
//! - [`decode`], [`prefill`], [`single`]: the roles.
//! - `answer`: what the first and the last have in common.
//! - `fabric`: the session with the daemon; `kv`: leases as the model's cache.

mod answer;
mod api;
mod decode;
mod error;
mod fabric;
mod kv;
mod metrics;
mod prefill;
mod single;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use clap::{Args, ValueEnum};
use fabric_client::LeaseError;
use fabric_proto::ids::EngineName;
use tokio::sync::{Semaphore, SemaphorePermit};

use self::answer::Names;
use self::error::ServeError;
use self::fabric::{Fabric, Registration, pool_spec};
use self::metrics::Metrics;
use crate::kv::KvShape;
use crate::resolve::{DEFAULT_MODEL, Loaded, cache_folder, load, resolve};

/// Tokens that a slot holds.
const TOKENS_PER_SLOT: usize = 16;
/// Bytes of a prefill request's body: a million token ids in JSON.
const BODY_BYTES_MAX: usize = 16 << 20;

/// What an engine does.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum Role {
    /// Computes prompts and sends their pages.
    Prefill,
    /// Receives pages and answers clients.
    Decode,
    /// Does both alone, without a daemon.
    Single,
}

/// `fabric-engine serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// What this engine does.
    #[arg(long, value_enum)]
    role: Role,
    /// A path to a .gguf file, random:SEED or smollm2.
    #[arg(long, default_value = DEFAULT_MODEL)]
    model: String,
    /// Where to listen for HTTP.
    #[arg(long, default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// The local daemon's socket for engines (not for the single role).
    #[arg(long, default_value = "/run/fabric/engine.sock")]
    daemon: PathBuf,
    /// This engine's name in the daemon's configuration.
    #[arg(long, default_value = "engine")]
    name: String,
    /// Slots of the pool, 16 tokens each.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    slots: u32,
    /// The context to advertise, in tokens; the model's own if not given. The pool must hold it.
    #[arg(long)]
    context: Option<usize>,
    /// Where the prefill engine listens, as http://HOST:PORT (decode role only).
    #[arg(long, required_if_eq("role", "decode"))]
    prefill: Option<String>,
    /// Requests that are computed at a time; more wait.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: u16,
    /// Sleep after each layer of a prompt, in milliseconds, to watch a transfer (prefill role).
    #[arg(long, default_value_t = 0)]
    layer_delay_ms: u64,
}

/// What every role needs.
struct Shared {
    loaded: Loaded,
    shape: KvShape,
    context: usize,
    metrics: Metrics,
    names: Names,
    turns: Semaphore,
}

impl Shared {
    fn request_id(&self) -> String {
        self.names.next()
    }

    /// Waits for a turn to compute.
    async fn turn(&self) -> SemaphorePermit<'_> {
        self.turns.acquire().await.expect("nobody closes it")
    }
}

/// Runs the server until a signal ends it.
///
/// # Errors
///
/// If the model cannot be loaded, the daemon not be reached, or the address not be bound.
pub async fn serve(args: ServeArgs) -> Result<()> {
    let model = args.model.clone();
    let loaded = tokio::task::spawn_blocking(move || load(&resolve(&model, &cache_folder()?)?));
    let loaded = loaded.await??;
    let shape = loaded.model.kv_shape(TOKENS_PER_SLOT);
    let model_context = loaded.model.config().context;
    let context = args.context.unwrap_or(model_context);
    ensure!(
        (1..=model_context).contains(&context),
        "--context is {context}, and the model's has {model_context} tokens"
    );
    let turns = Semaphore::new(usize::from(args.concurrency));
    let metrics = Metrics::new()?;
    let names = Names::new();
    let shared = Arc::new(Shared {
        loaded,
        shape,
        context,
        metrics,
        names,
        turns,
    });
    let (router, fabric) = router(&args, Arc::clone(&shared)).await?;
    let health = Arc::new(Health { shared, fabric });
    let common = Router::new()
        .route("/health", get(healthy))
        .route("/metrics", get(metrics_text))
        .with_state(health);
    let listener = tokio::net::TcpListener::bind(args.listen).await;
    let listener = listener.with_context(|| format!("listen on {}", args.listen))?;
    tracing::info!(role = ?args.role, listen = %listener.local_addr()?, context, "serving");
    axum::serve(listener, router.merge(common))
        .with_graceful_shutdown(signalled())
        .await?;
    Ok(())
}

async fn router(args: &ServeArgs, shared: Arc<Shared>) -> Result<(Router, Option<Fabric>)> {
    if args.role == Role::Single {
        let router = Router::new().route("/v1/completions", post(single::handle));
        return Ok((router.with_state(shared), None));
    }
    let fabric = Fabric::connect(Registration {
        socket: args.daemon.clone(),
        name: EngineName::new(&args.name).context("--name")?,
        spec: pool_spec(
            &shared.loaded.model.config().name,
            shared.shape,
            args.slots,
            shared.context as u64,
        )?,
    });
    let fabric = fabric
        .await
        .context("register the pool with the local daemon")?;
    let body_limit = axum::extract::DefaultBodyLimit::max(BODY_BYTES_MAX);
    let router = if args.role == Role::Prefill {
        let layer_delay = Duration::from_millis(args.layer_delay_ms);
        let role = prefill::Prefill {
            shared,
            fabric: fabric.clone(),
            layer_delay,
        };
        Router::new()
            .route("/internal/prefill", post(prefill::handle))
            .with_state(Arc::new(role))
    } else {
        let prefill = args
            .prefill
            .clone()
            .context("--prefill is needed for the decode role")?;
        let http = reqwest::Client::builder().build()?;
        let role = decode::Decode {
            shared,
            fabric: fabric.clone(),
            http,
            prefill,
        };
        Router::new()
            .route("/v1/completions", post(decode::handle))
            .with_state(Arc::new(role))
    };
    Ok((router.layer(body_limit), Some(fabric)))
}

struct Health {
    shared: Arc<Shared>,
    /// `None` for the single role.
    fabric: Option<Fabric>,
}

/// `GET /health`: 200 while requests can be answered.
async fn healthy(State(health): State<Arc<Health>>) -> Result<&'static str, ServeError> {
    if let Some(fabric) = &health.fabric {
        fabric.pool()?;
    }
    Ok("ok\n")
}

/// `GET /metrics`.
async fn metrics_text(State(health): State<Arc<Health>>) -> impl IntoResponse {
    match health.shared.metrics.text() {
        Ok(text) => (StatusCode::OK, text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

/// The error of a lease that was not given.
fn lease_error(what: &str, error: &LeaseError) -> ServeError {
    if let LeaseError::Rejected(reason) = error {
        return ServeError::rejected(what, *reason);
    }
    ServeError::Busy(format!("{what}: {error}"))
}

async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        Err(error) => {
            tracing::warn!("no signal can be waited for: {error}");
            std::future::pending::<()>().await;
        }
    }
}
