//! The parts put together: start, serve, stop.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use fabric_proto::host::{Config as HostConfig, Host, Input, Usage};
use fabric_proto::ids::{Incarnation, NodeId, Secret};
use rustls::crypto::ring::default_provider;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tracing::{error, info, warn};

use crate::admin::{self, Page, Phase};
use crate::clock::Clock;
use crate::config::Config;
use crate::driver::{Driver, EVENTS_MAX, Event, Parts};
use crate::link::{self, AllowList, BindError, Links, Own};
use crate::metrics::Metrics;
use crate::plane::Pools;
use crate::planes::{PlaneStartError, Planes};
use crate::scrub::Scrubber;
use crate::session::{self, ListenError, Sessions};
use crate::store::{Identity, Store, StoreError};

/// A daemon that runs, on the runtime that it was started on.
///
/// Calling order: [`Daemon::start`], then [`Daemon::stop`]. Dropped without `stop`, it ends at
/// once: nothing is drained, as if the process had died.
#[derive(Debug)]
pub struct Daemon {
    node: NodeId,
    incarnation: Incarnation,
    peers: SocketAddr,
    admin: SocketAddr,
    engines: PathBuf,
    grace: Duration,
    events: mpsc::Sender<Event>,
    phase: watch::Sender<Phase>,
    sessions: Arc<Sessions>,
    links: Arc<Links>,
    driver: JoinHandle<()>,
    /// Accepting engines and peers.
    accepting: Vec<JoinHandle<()>>,
    page: JoinHandle<()>,
    /// Holds the state directory.
    _store: Store,
}

/// What both the driver and the admin page need.
#[derive(Clone, Debug)]
pub(crate) struct Shell {
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) clock: Clock,
    pub(crate) sessions: Arc<Sessions>,
    pub(crate) links: Arc<Links>,
    pub(crate) planes: Arc<Planes>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Shell {
    fn new(
        config: &Config,
        clock: Clock,
        identity: Identity,
        incarnation: Incarnation,
        pools: &Arc<Pools>,
        events: &mpsc::Sender<Event>,
    ) -> Result<Self, StartError> {
        let node = identity.node;
        let metrics = Arc::new(Metrics::new(node, incarnation));
        let planes = Arc::new(Planes::new(config, pools, events)?);
        let sessions = Sessions::new(
            config.engines.clone(),
            Arc::clone(pools),
            Arc::clone(&planes),
            config.scrub,
            events.clone(),
            Arc::clone(&metrics),
        );
        let links = Links::new(
            config.listen.peers,
            own(config, node, incarnation),
            identity,
            AllowList::new(&config.peers, node),
            Arc::clone(&planes),
            events.clone(),
            Arc::clone(&metrics),
        )?;
        Ok(Self {
            node,
            incarnation,
            clock,
            sessions,
            links,
            planes,
            metrics,
        })
    }
}

/// How a daemon stopped.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Stopped {
    /// Every grant was closed with proof, and every transfer told its outcome.
    Drained,
    /// Time was up first. What was left ends with the process.
    GraceExpired,
}

/// Why a daemon did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The admin page.
    #[error("listen.admin: bind TCP {address}: {error}")]
    Admin {
        /// Where.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The peers' socket.
    #[error("{0}")]
    Bind(#[from] BindError),
    /// The engines' socket.
    #[error("listen.engines: {0}")]
    Engines(#[from] ListenError),
    /// The operating system gives no random numbers.
    #[error("draw a secret: no random numbers")]
    Random,
    /// A data plane.
    #[error("{0}")]
    Plane(#[from] PlaneStartError),
    /// A socket that was bound does not say where.
    #[error("ask a socket for its address: {0}")]
    Socket(#[from] io::Error),
    /// The state directory.
    #[error("{0}")]
    Store(#[from] StoreError),
}

/// How a run failed.
#[derive(Debug, Error)]
pub enum RunError {
    /// The driver ended by itself: a defect, and it was logged.
    #[error("the driver ended")]
    Driver,
    /// The shutdown took too long.
    #[error("shutdown.grace_ms: {0:?} passed before everything was drained")]
    Grace(Duration),
    /// Signals cannot be heard.
    #[error("listen for signals: {0}")]
    Signals(#[source] io::Error),
    /// It did not start.
    #[error("{0}")]
    Start(#[from] StartError),
}

/// Runs a daemon until SIGTERM or SIGINT, then drains it. A second signal ends the process at once,
/// with status 1.
///
/// # Errors
///
/// [`RunError`].
pub async fn run(config: Config) -> Result<(), RunError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(RunError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(RunError::Signals)?;
    let mut daemon = Daemon::start(config).await?;
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        _ = &mut daemon.driver => return Err(RunError::Driver),
    };
    info!(
        signal = name,
        "stopping; a second signal ends the process at once"
    );
    let grace = daemon.grace;
    tokio::select! {
        stopped = daemon.stop() => match stopped {
            Stopped::Drained => Ok(()),
            Stopped::GraceExpired => Err(RunError::Grace(grace)),
        },
        _ = terminate.recv() => end_now(),
        _ = interrupt.recv() => end_now(),
    }
}

impl Daemon {
    /// Starts a daemon. When this returns it serves.
    ///
    /// # Errors
    ///
    /// [`StartError`]; then nothing of it is left but a used-up incarnation.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        let clock = Clock::start();
        let store = Store::open(&config.state_dir)?;
        let identity = store.identity()?;
        // S6: before anything is bound, so that nothing is said in an earlier life's name.
        let incarnation = store.next_incarnation()?;
        warn_of(&config);
        let (events, received) = mpsc::channel(EVENTS_MAX);
        let (usage, usage_seen) = watch::channel(Usage::default());
        let (phase, phase_seen) = watch::channel(Phase::Starting);
        let pools = Arc::new(Pools::new());
        let host = Host::new(host_config(&config, identity.node, incarnation)?);
        let admin_socket = bind_admin(config.listen.admin).await?;
        let admin = admin_socket.local_addr()?;
        let engine_socket = session::listen(&config.listen.engines)?;
        let shell = Shell::new(&config, clock, identity, incarnation, &pools, &events)?;
        let (node, peers) = (shell.node, shell.links.address()?);
        let (sessions, links) = (Arc::clone(&shell.sessions), Arc::clone(&shell.links));

        let page = Page {
            shell: shell.clone(),
            planes_on: config.planes.clone(),
            phase: phase_seen,
            usage: usage_seen,
        };
        let parts = Parts {
            shell,
            scrubber: Scrubber::new(Arc::clone(&pools), events.clone()),
            pools,
            usage,
        };
        let driver = tokio::spawn(Driver::new(host, parts, received).run());
        let accepting = vec![
            tokio::spawn(Arc::clone(&sessions).accept(engine_socket)),
            tokio::spawn(Arc::clone(&links).accept()),
        ];
        let page = tokio::spawn(admin::serve(admin_socket, page));
        phase.send_replace(Phase::Serving);
        let (engines, planes) = (config.listen.engines, config.planes);
        let socket = engines.display();
        info!(%node, %incarnation, %peers, %admin, engines = %socket, ?planes, "serving");
        Ok(Self {
            node,
            incarnation,
            peers,
            admin,
            engines,
            grace: config.shutdown_grace,
            events,
            phase,
            sessions,
            links,
            driver,
            accepting,
            page,
            _store: store,
        })
    }

    /// The daemon's node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The daemon's life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Where it listens for peers; with the port that the system chose, if the configuration has 0.
    #[must_use]
    pub fn peers_address(&self) -> SocketAddr {
        self.peers
    }

    /// Where it serves the admin page.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.admin
    }

    /// Stops: admits nothing more, drains, fences what does not drain, tells everybody, and ends.
    pub async fn stop(mut self) -> Stopped {
        self.phase.send_replace(Phase::ShuttingDown);
        self.links.stop_accepting();
        self.accepting.iter().for_each(JoinHandle::abort);
        let drain = async {
            // An error says that the driver is gone, which is what is waited for.
            let _gone = self.events.send(Input::Shutdown).await;
            (&mut self.driver).await
        };
        let stopped = match tokio::time::timeout(self.grace, drain).await {
            Ok(Ok(())) => Stopped::Drained,
            Ok(Err(panic)) => {
                error!("the driver ended by a defect: {panic}");
                Stopped::GraceExpired
            }
            Err(_) => {
                let grace = self.grace;
                error!(
                    ?grace,
                    "not everything was drained in time; ending all the same"
                );
                Stopped::GraceExpired
            }
        };
        // What the machine said last is on its way: outcomes to engines, verdicts to peers.
        tokio::join!(
            self.sessions.close_all(GOODBYE_WAIT),
            self.links.close_all(GOODBYE_WAIT),
        );
        session::remove_socket(&self.engines);
        info!(?stopped, "stopped");
        stopped
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.accepting.iter().for_each(JoinHandle::abort);
        self.driver.abort();
        self.page.abort();
        self.links.close_now();
        self.sessions.close_now();
    }
}

fn end_now() -> ! {
    error!("a second signal: ending without draining");
    std::process::exit(1)
}

async fn bind_admin(address: SocketAddr) -> Result<TcpListener, StartError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| StartError::Admin { address, error })
}

fn own(config: &Config, node: NodeId, incarnation: Incarnation) -> Own {
    let has_shm = config.planes.contains(&fabric_proto::wire::PlaneKind::Shm);
    Own {
        incarnation,
        planes: config.planes.clone(),
        shm: config.listen.shm.clone().filter(|_| has_shm),
        outstanding_bytes_max: config.transfer.outstanding_bytes_max,
        silence_max: config.link_silence_max,
        host: link::host_digest(node, incarnation),
    }
}

fn host_config(
    config: &Config,
    node: NodeId,
    incarnation: Incarnation,
) -> Result<HostConfig, StartError> {
    let mut secret = [0; 32];
    let random = default_provider().secure_random;
    random.fill(&mut secret).map_err(|_| StartError::Random)?;
    let transfer = config.transfer;
    Ok(HostConfig {
        node,
        incarnation,
        secret: Secret(secret),
        abort: transfer.abort,
        scrub: config.scrub,
        offer_ttl: transfer.offer_ttl,
        open_max: transfer.open_max,
        silence_max: transfer.silence_max,
        drain_max: transfer.drain_max,
        verify_max: transfer.verify_max,
        attempts_max: transfer.attempts_max,
        outstanding_bytes_max: transfer.outstanding_bytes_max,
    })
}

/// Says loudly what nobody should run by mistake.
fn warn_of(config: &Config) {
    if config.fault.is_any() {
        let fault = config.fault;
        warn!(
            ?fault,
            "DELIBERATE FAULTS ARE ON: this daemon corrupts or stalls transfers"
        );
    }
    if config.engines.is_empty() {
        warn!("engines: the list is empty, so no engine can connect");
    }
    if config.planes.is_empty() {
        warn!("planes: none is on (\"shm\" needs listen.shm), so nothing can be transferred");
    }
}

/// How long the last messages to engines and peers may take.
const GOODBYE_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests;
