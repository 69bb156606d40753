//! The page for operators and their tools: HTTP, read only.
//!
//! `/metrics` for Prometheus; `/healthz`: the process answers; `/readyz`: it serves, else 503 and
//! why not; `/status`: what there is, as JSON.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use fabric_proto::host::Usage;
use fabric_proto::wire::PlaneKind;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Sleep;
use tracing::warn;

use crate::daemon::Shell;
use crate::metrics::{Gauges, plane_label, states};

/// What the page shows.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) shell: Shell,
    pub(crate) planes_on: Vec<PlaneKind>,
    pub(crate) phase: watch::Receiver<Phase>,
    pub(crate) usage: watch::Receiver<Usage>,
}

/// How far the daemon is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Phase {
    /// Not all of it runs yet.
    Starting,
    /// It serves.
    Serving,
    /// It is on its way out.
    ShuttingDown,
}

impl Phase {
    const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::ShuttingDown => "shutting down",
        }
    }
}

/// Serves the page until it is dropped.
pub(crate) async fn serve(listener: TcpListener, page: Page) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .with_state(Arc::new(page));
    let listener = Bounded {
        listener,
        free: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
    };
    if let Err(error) = axum::serve(listener, router).await {
        warn!("the admin page ended: {error}");
    }
}

async fn metrics(State(page): State<Arc<Page>>) -> Response {
    let gauges = Gauges {
        usage: *page.usage.borrow(),
        links: page.shell.links.count(),
        sessions: page.shell.sessions.count(),
        refused: page.shell.planes.refused(),
        verbs_objects: page.shell.planes.verbs_objects(),
        verbs_failovers: page.shell.planes.verbs_failovers(),
    };
    let kind = [(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)];
    (kind, page.shell.metrics.text(&gauges)).into_response()
}

async fn ready(State(page): State<Arc<Page>>) -> Response {
    let phase = *page.phase.borrow();
    let status = match phase {
        Phase::Serving => StatusCode::OK,
        Phase::Starting | Phase::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, format!("{}\n", phase.label())).into_response()
}

async fn status(State(page): State<Arc<Page>>) -> Json<Value> {
    let links = page.shell.links.list().into_iter().map(|(link, about)| {
        json!({
            "link": link.0,
            "node": about.node.to_string(),
            "name": about.name,
            "address": about.address.to_string(),
            "incarnation": about.incarnation.as_u64(),
            "planes": labels(&about.planes),
            "side": about.side.label(),
        })
    });
    let sessions = page
        .shell
        .sessions
        .list()
        .into_iter()
        .map(|(engine, about)| {
            json!({
                "engine": engine.0,
                "name": about.name.as_str(),
                "uid": about.uid,
                "pid": about.pid,
            })
        });
    let usage = *page.usage.borrow();
    let slots: Map<String, Value> = states(&usage)
        .into_iter()
        .map(|(state, slots)| (state.into(), slots.into()))
        .collect();
    Json(json!({
        "node": page.shell.node.to_string(),
        "incarnation": page.shell.incarnation.as_u64(),
        "version": env!("CARGO_PKG_VERSION"),
        "phase": page.phase.borrow().label(),
        "uptime_seconds": page.shell.clock.now().0.as_secs(),
        "planes": labels(&page.planes_on),
        "links": links.collect::<Vec<_>>(),
        "sessions": sessions.collect::<Vec<_>>(),
        "pool_slots": slots,
    }))
}

fn labels(planes: &[PlaneKind]) -> Vec<&'static str> {
    planes.iter().map(|plane| plane_label(*plane)).collect()
}

/// A listener with a bound on connections, and on the life of each.
#[derive(Debug)]
struct Bounded {
    listener: TcpListener,
    free: Arc<Semaphore>,
}

impl axum::serve::Listener for Bounded {
    type Io = Timed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Timed, SocketAddr) {
        let permit = Arc::clone(&self.free).acquire_owned().await;
        let permit = permit.expect("nobody closes the semaphore");
        loop {
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let timed = Timed {
                        stream,
                        until: Box::pin(tokio::time::sleep(CONNECTION_LIFE)),
                        _permit: permit,
                    };
                    return (timed, address);
                }
                Err(error) => {
                    warn!("accept on the admin page: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that is over when its time is: a slow client cannot keep its place.
#[derive(Debug)]
struct Timed {
    stream: TcpStream,
    until: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl Timed {
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.until.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Most clients at a time.
const CONNECTIONS_MAX: usize = 64;

/// How long a client may keep its connection. No multiple of a usual scrape interval.
const CONNECTION_LIFE: Duration = Duration::from_secs(25);

/// How long to wait before accepting again, after that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
