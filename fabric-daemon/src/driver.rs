//! The only caller of the machine.
//!
//! ```text
//! planes, sessions, links ──▶ one bounded channel ──▶ machine ──▶ outputs, done in order
//!                                         ▲                          │
//!                                         └──── loopback link ◀──────┘
//! ```
//!
//! Everybody may wait for the driver; the driver waits for nobody. Each output is done by a call
//! that cannot block: a full queue closes the connection that it belongs to. So there is no circle
//! of waits, whatever engines, peers and planes do.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fabric_proto::host::{Host, Input, Output, PlaneCommand, Proofs, Usage, WritesStopped};
use fabric_proto::ids::{EngineId, LeaseId, LinkId, TransferId};
use fabric_proto::time::Now;
use fabric_proto::wire::{ToDaemon, ToEngine};
use tokio::sync::{mpsc, watch};
use tracing::{debug, error, info};

use crate::daemon::Shell;
use crate::metrics::{Metrics, plane_label, stopped_by};
use crate::plane::{PlaneProofs, Pools};
use crate::registry::Closing;
use crate::scrub::Scrubber;

/// What everybody tells the driver.
pub(crate) type Event = Input<PlaneProofs>;

/// Events that may wait for the driver; whoever has more waits with them.
pub(crate) const EVENTS_MAX: usize = 4096;

/// Whom the driver does outputs with.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) shell: Shell,
    pub(crate) pools: Arc<Pools>,
    pub(crate) scrubber: Scrubber,
    pub(crate) usage: watch::Sender<Usage>,
}

/// The task that owns the machine.
pub(crate) struct Driver {
    host: Host<PlaneProofs>,
    parts: Parts,
    events: mpsc::Receiver<Event>,
    loopback: Loopback,
    timings: Timings,
    handled: u64,
    life: Life,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Life {
    Running,
    /// The machine has nothing left to wait for.
    Over,
}

/// The link to ourselves: what is sent on it is the next input.
#[derive(Debug, Default)]
struct Loopback {
    state: LoopbackState,
    /// Emptied before another event is taken, so it holds the outputs of one event at most.
    queue: VecDeque<Event>,
}

#[derive(Debug, Default, Eq, PartialEq)]
enum LoopbackState {
    #[default]
    Down,
    Up,
}

impl Driver {
    pub(crate) fn new(
        host: Host<PlaneProofs>,
        parts: Parts,
        events: mpsc::Receiver<Event>,
    ) -> Self {
        Self {
            host,
            parts,
            events,
            loopback: Loopback::default(),
            timings: Timings::default(),
            handled: 0,
            life: Life::Running,
        }
    }

    /// Runs until the machine says that the shutdown is complete, or nobody can tell it anything.
    pub(crate) async fn run(mut self) {
        let mut batch = Vec::with_capacity(BATCH_EVENTS_MAX);
        while self.life == Life::Running {
            let deadline = self.host.deadline();
            let clock = self.parts.shell.clock;
            let due = async move {
                match deadline {
                    Some(at) => tokio::time::sleep(clock.until(at)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Events first: each of them tells the machine the time as well.
                biased;
                count = self.events.recv_many(&mut batch, BATCH_EVENTS_MAX) => {
                    if count == 0 {
                        return;
                    }
                }
                () = due => batch.push(Input::Tick),
            }
            self.parts.shell.metrics.handled(batch.len() as u64);
            for event in batch.drain(..) {
                self.take(event);
            }
            self.parts.usage.send_replace(self.host.usage());
        }
    }

    /// Takes an event, and all that follows from it on the loopback link.
    fn take(&mut self, event: Event) {
        let mut next = Some(event);
        while let Some(event) = next {
            let now = self.parts.shell.clock.now();
            self.note_input(&event);
            self.host.handle(now, event);
            while let Some(output) = self.host.poll() {
                self.perform(now, output);
            }
            self.handled += 1;
            if self.handled.is_multiple_of(INVARIANTS_EVERY) {
                self.host.invariants();
                self.parts.shell.metrics.invariants_checked();
            }
            next = self.loopback.queue.pop_front();
        }
    }

    fn perform(&mut self, now: Now, output: Output) {
        let parts = &self.parts;
        match output {
            Output::Engine { engine, message } => {
                self.timings
                    .told_engine(&parts.shell.metrics, now, engine, &message);
                parts.shell.sessions.send(engine, &message);
            }
            Output::CloseEngine { engine, reason } => {
                parts
                    .shell
                    .sessions
                    .close(engine, Closing::Misbehaved(reason));
            }
            Output::Peer { link, message } if link == LinkId::LOOPBACK => {
                self.loopback.queue.push_back(Input::Peer { link, message });
            }
            Output::Peer { link, message } => parts.shell.links.send(link, &message),
            Output::CloseLink { link, reason } if link == LinkId::LOOPBACK => {
                // Both ends are this machine, so the fault is here.
                error!("the daemon broke the protocol with itself: {reason}");
                self.loopback.queue.clear();
                self.loopback.state = LoopbackState::Down;
                self.loopback.queue.push_back(Input::LinkDown { link });
            }
            Output::CloseLink { link, reason } => {
                parts.shell.links.close(link, Closing::Misbehaved(reason));
            }
            Output::Connect { node, .. } if node == parts.shell.node => self.loop_back(),
            Output::Connect { node, after } => parts.shell.links.connect(node, after),
            Output::Plane { plane, command } => {
                note_command(plane_label(plane), &command);
                parts.shell.planes.submit(plane, command);
            }
            Output::Scrub { pool, slots } => parts.scrubber.submit(pool, slots),
            Output::Unmap { pool: id } => {
                let pool = parts.pools.remove(id);
                parts.shell.planes.pool_gone(id);
                // Giving back many gigabytes takes a while.
                tokio::task::spawn_blocking(move || drop(pool));
            }
            Output::Observe(observation) => parts.shell.metrics.observe(&observation),
            Output::ShutdownComplete => self.life = Life::Over,
        }
    }

    /// Brings up the link to ourselves.
    fn loop_back(&mut self) {
        if self.loopback.state == LoopbackState::Up {
            return;
        }
        self.loopback.state = LoopbackState::Up;
        self.loopback.queue.push_back(Input::LinkUp {
            link: LinkId::LOOPBACK,
            node: self.parts.shell.node,
            incarnation: self.parts.shell.incarnation,
            planes: self.parts.shell.planes.loopback(),
        });
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "most inputs are not noted")]
    fn note_input(&mut self, event: &Event) {
        match event {
            Input::WritesStopped(proof) => note_stopped::<PlaneProofs>(proof),
            Input::Written {
                transfer, bytes, ..
            } => {
                self.parts.shell.metrics.written(*bytes);
                self.timings.written(*transfer, *bytes);
            }
            Input::EngineGone { engine } => self.timings.engine_gone(*engine),
            Input::Engine {
                engine,
                message: ToDaemon::EndLease { lease, .. },
            } => self.timings.lease_ended(*engine, *lease),
            Input::Shutdown => info!("shutting down: draining"),
            _ => {}
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("handled", &self.handled)
            .field("life", &self.life)
            .finish_non_exhaustive()
    }
}

fn note_stopped<P: Proofs>(proof: &P::WritesStopped) {
    info!(grant = %proof.grant(), stopped_by = stopped_by(proof.by()), "grant closed");
}

fn note_command(plane: &'static str, command: &PlaneCommand) {
    match command {
        PlaneCommand::Arm {
            grant,
            link,
            pool,
            slots,
            ..
        } => info!(%grant, %link, %pool, slots = slots.len(), plane, "grant opened"),
        PlaneCommand::Fence { grant } => info!(%grant, plane, "fencing a grant"),
        PlaneCommand::OpenWriter {
            transfer,
            grant,
            link,
            ..
        } => debug!(%transfer, %grant, %link, plane, "writer opened"),
        PlaneCommand::Write { .. } => {}
        PlaneCommand::Drain { transfer } => debug!(%transfer, plane, "draining"),
        PlaneCommand::Stop { transfer } => debug!(%transfer, plane, "stopping a writer"),
    }
}

/// When transfers began, for the histograms and the log. As long as the machine's own tables.
#[derive(Debug, Default)]
struct Timings {
    sends: BTreeMap<TransferId, Send>,
    receives: BTreeMap<(EngineId, LeaseId), Now>,
}

#[derive(Debug)]
struct Send {
    engine: EngineId,
    began: Now,
    bytes: u64,
}

impl Timings {
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "the others begin and end nothing"
    )]
    fn told_engine(&mut self, metrics: &Metrics, now: Now, engine: EngineId, message: &ToEngine) {
        let since = |began: Now| now.0.saturating_sub(began.0);
        match message {
            ToEngine::SendOpened {
                transfer, slots, ..
            } => {
                info!(%transfer, %engine, slots, "send opened");
                let (began, bytes) = (now, 0);
                self.sends.insert(
                    *transfer,
                    Send {
                        engine,
                        began,
                        bytes,
                    },
                );
            }
            ToEngine::SendOutcome { transfer, outcome } => {
                if let Some(send) = self.sends.remove(transfer) {
                    let (took, bytes) = (since(send.began), send.bytes);
                    info!(%transfer, %engine, ?took, bytes, "send ended: {outcome}");
                    metrics.send_took(outcome, took, bytes);
                }
            }
            ToEngine::Leased {
                lease,
                offer: Some(_),
                ..
            } => {
                self.receives.insert((engine, *lease), now);
            }
            ToEngine::LeaseOutcome { lease, outcome } => {
                if let Some(began) = self.receives.remove(&(engine, *lease)) {
                    let took = since(began);
                    info!(%lease, %engine, ?took, "receive ended: {outcome}");
                    metrics.receive_took(outcome, took);
                }
            }
            _ => {}
        }
    }

    fn written(&mut self, transfer: TransferId, bytes: u64) {
        if let Some(send) = self.sends.get_mut(&transfer) {
            send.bytes += bytes;
        }
    }

    /// A lease that its engine has ended has no outcome that the engine hears of.
    fn lease_ended(&mut self, engine: EngineId, lease: LeaseId) {
        self.receives.remove(&(engine, lease));
    }

    fn engine_gone(&mut self, engine: EngineId) {
        self.sends.retain(|_, send| send.engine != engine);
        self.receives.retain(|(owner, _), _| *owner != engine);
    }
}

/// Events that are handled before the driver lets other tasks run.
const BATCH_EVENTS_MAX: usize = 256;

/// How often the machine recounts itself: it looks at every slot, so not often.
const INVARIANTS_EVERY: u64 = 1 << 14;
