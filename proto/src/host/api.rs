//! What goes into the machine and what comes out of it.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use crate::ids::{
    EngineId, GrantId, Incarnation, LinkId, NodeId, PoolId, RequestSeq, Secret, SlotRef, TenantId,
    TransferId,
};
use crate::outcome::Rejection;
use crate::pool::{PageRun, PoolSpec};
use crate::wire::{AbortPolicy, PeerMessage, PlaneKind, ToDaemon, ToEngine};

/// When a slot's bytes are overwritten before its next lease.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum ScrubPolicy {
    /// Before every lease.
    Always,
    /// Before a lease of another tenant than the last.
    CrossTenant,
    /// Never: for pools of one trusted tenant.
    Never,
}

/// Everything that the machine is told once, at the start of its life.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Config {
    /// This daemon's node.
    pub node: NodeId,
    /// This life of the daemon. Already persisted.
    pub incarnation: Incarnation,
    /// Keys offers, manifests and grants. Drawn anew for each life.
    pub secret: Secret,
    /// What becomes of a transfer whose lease ends first.
    pub abort: AbortPolicy,
    /// When slots are scrubbed.
    pub scrub: ScrubPolicy,
    /// How long an offer may wait to be used.
    pub offer_ttl: Duration,
    /// How long a source waits for a link and a grant.
    pub open_max: Duration,
    /// How long an open grant may be silent: no byte, no checksum, no commit.
    pub silence_max: Duration,
    /// How long a drain (or the commit beside it) may take before the daemon fences.
    pub drain_max: Duration,
    /// How long an engine may take to verify.
    pub verify_max: Duration,
    /// How often pages are sent in all before a corrupt one fails the transfer. At least 1.
    pub attempts_max: u32,
    /// The most bytes that may be outstanding under one grant.
    pub outstanding_bytes_max: u64,
}

/// For whom an engine may act.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Tenants {
    /// For anybody.
    Any,
    /// For these.
    Only(Vec<TenantId>),
}

/// How a grant's writes were stopped.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum StoppedBy {
    /// The writer's own in-band drain.
    Drain,
    /// The destination's fence.
    Fence,
}

/// The proof that no write under a grant can still land.
///
/// The machine is generic over it, and a plane's own type has private fields: who has no plane
/// cannot make one, and that is checked by the compiler.
// S1: slots lose their writer only by a value of this trait.
pub trait WritesStopped {
    /// Under which grant.
    fn grant(&self) -> GrantId;
    /// How.
    fn by(&self) -> StoppedBy;
}

/// The proof that a source's plane reads the pages of one attempt no more.
pub trait ReadsStopped {
    /// For which transfer.
    fn transfer(&self) -> TransferId;
    /// Under which grant.
    fn grant(&self) -> GrantId;
}

/// The two proofs of a set of planes.
pub trait Proofs {
    /// Made by the destination's side of a plane.
    type WritesStopped: WritesStopped;
    /// Made by the source's side of a plane.
    type ReadsStopped: ReadsStopped;
}

/// What happened.
#[derive(Debug)]
pub enum Input<P: Proofs> {
    /// An engine connected, said hello, and is allowed. The machine welcomes it.
    EngineUp {
        /// Never used before.
        engine: EngineId,
        /// From its configuration entry.
        tenants: Tenants,
    },
    /// An engine's session ended.
    EngineGone {
        /// Which.
        engine: EngineId,
    },
    /// An engine registers a pool; its memory is mapped already.
    RegisterPool {
        /// Which engine.
        engine: EngineId,
        /// Echoed in the reply.
        seq: RequestSeq,
        /// Never used before. Given back by [`Output::Unmap`], also where it is refused.
        pool: PoolId,
        /// What the engine says of it.
        spec: PoolSpec,
        /// The bytes that are mapped.
        memory_bytes: u64,
    },
    /// A message from an engine.
    Engine {
        /// Which engine.
        engine: EngineId,
        /// The message.
        message: ToDaemon,
    },
    /// A link is up: authenticated, hellos exchanged.
    LinkUp {
        /// Never used before; or the loopback link.
        link: LinkId,
        /// The peer.
        node: NodeId,
        /// The peer's life.
        incarnation: Incarnation,
        /// The planes that both sides allow on it, the best first.
        planes: Vec<PlaneKind>,
    },
    /// A link is down, for whatever reason.
    LinkDown {
        /// Which.
        link: LinkId,
    },
    /// A node cannot be reached, or is not allowed.
    ConnectFailed {
        /// Which.
        node: NodeId,
    },
    /// A message from a peer.
    Peer {
        /// On which link.
        link: LinkId,
        /// The message.
        message: PeerMessage,
    },
    /// A plane accepts writes under a grant.
    Armed {
        /// Which.
        grant: GrantId,
    },
    /// Bytes landed under a grant since the last time that the plane said so. A sign of life.
    Landed {
        /// Which.
        grant: GrantId,
    },
    /// Writes of the source's plane completed.
    Written {
        /// Of which transfer.
        transfer: TransferId,
        /// Under which grant.
        grant: GrantId,
        /// How many bytes.
        bytes: u64,
    },
    /// The source's plane cannot go on. Its proof that it reads no more follows.
    WriterFailed {
        /// Of which transfer.
        transfer: TransferId,
        /// Under which grant.
        grant: GrantId,
    },
    /// A proof of the destination's plane.
    WritesStopped(P::WritesStopped),
    /// A proof of the source's plane.
    ReadsStopped(P::ReadsStopped),
    /// Slots were scrubbed, as [`Output::Scrub`] asked.
    Scrubbed {
        /// In which pool.
        pool: PoolId,
        /// Which.
        slots: Arc<[SlotRef]>,
    },
    /// Time passed.
    Tick,
    /// Stop: admit nothing, drain, at the deadline fence.
    Shutdown,
}

/// What a plane is asked to do. Every command of one grant or transfer goes to the same plane.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum PlaneCommand {
    /// Destination: accept writes of this grant, to these slots and pages and no others.
    /// Answered by [`Input::Armed`].
    Arm {
        /// Which grant.
        grant: GrantId,
        /// The link whose peer may write.
        link: LinkId,
        /// What the writer must show.
        key: Secret,
        /// Into which pool.
        pool: PoolId,
        /// Into which slots, by position.
        slots: Arc<[SlotRef]>,
        /// The pages that may be written, sorted; empty: every page of the slots.
        pages: Arc<[PageRun]>,
    },
    /// Destination: make it impossible that a write of this grant lands, then prove it.
    Fence {
        /// Which grant.
        grant: GrantId,
    },
    /// Source: open the writer's side.
    OpenWriter {
        /// Which transfer.
        transfer: TransferId,
        /// Under which grant.
        grant: GrantId,
        /// On which link.
        link: LinkId,
        /// What to show.
        key: Secret,
        /// From which pool.
        pool: PoolId,
        /// From which slots, by position.
        slots: Arc<[SlotRef]>,
    },
    /// Source: write these pages, in order. Answered by [`Input::Written`].
    Write {
        /// Which transfer.
        transfer: TransferId,
        /// Which pages.
        run: PageRun,
    },
    /// Source: nothing more will be written; say so in band. Answered by [`Input::ReadsStopped`].
    Drain {
        /// Which transfer.
        transfer: TransferId,
    },
    /// Source: write nothing more, not even what was asked for; then as for `Drain`.
    Stop {
        /// Which transfer.
        transfer: TransferId,
    },
}

/// Something to count or log. It changes nothing.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Observation {
    /// A request was turned away.
    Rejected(Rejection),
    /// Slots were leased.
    LeaseStarted {
        /// How many.
        slots: u32,
    },
    /// A lease ended.
    LeaseEnded {
        /// Its slots.
        slots: u32,
    },
    /// Slots became free.
    SlotsFreed {
        /// How many.
        slots: u32,
    },
    /// A grant was opened.
    GrantOpened(PlaneKind),
    /// A grant was closed, with proof.
    GrantClosed(StoppedBy),
    /// A transfer from here began.
    SendStarted,
    /// A transfer from here ended.
    SendEnded(crate::outcome::Outcome),
    /// A lease's delivery ended.
    ReceiveEnded(crate::outcome::Outcome),
    /// Pages arrived and wait to be verified.
    PagesArrived {
        /// How many.
        pages: u64,
    },
    /// Pages were verified.
    PagesVerified {
        /// How many matched.
        good: u64,
        /// How many did not.
        corrupt: u64,
    },
    /// Pages arrived and will not be verified, since the transfer is over.
    PagesDropped {
        /// How many.
        pages: u64,
    },
    /// A message came too late to matter, as can happen on any link.
    StaleMessage,
}

/// What to do next. The caller does them in order.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum Output {
    /// Send a message to an engine.
    Engine {
        /// Which.
        engine: EngineId,
        /// The message.
        message: ToEngine,
    },
    /// Close an engine's session: it broke the protocol. Answered by [`Input::EngineGone`].
    CloseEngine {
        /// Which.
        engine: EngineId,
        /// What it did.
        reason: Misbehaviour,
    },
    /// Send a message to a peer; on the loopback link, to ourselves.
    Peer {
        /// On which link.
        link: LinkId,
        /// The message.
        message: PeerMessage,
    },
    /// Close a link: the peer broke the protocol. Answered by [`Input::LinkDown`].
    CloseLink {
        /// Which.
        link: LinkId,
        /// What it did.
        reason: Misbehaviour,
    },
    /// Connect to a node. Answered by [`Input::LinkUp`] or [`Input::ConnectFailed`].
    Connect {
        /// Which.
        node: NodeId,
        /// Only a later life of it than this one will do.
        after: Option<Incarnation>,
    },
    /// Tell a plane.
    Plane {
        /// Which plane.
        plane: PlaneKind,
        /// What.
        command: PlaneCommand,
    },
    /// Overwrite slots with zeros. Answered by [`Input::Scrubbed`].
    Scrub {
        /// In which pool.
        pool: PoolId,
        /// Which.
        slots: Arc<[SlotRef]>,
    },
    /// Forget a pool: nobody holds a slot of it any more.
    Unmap {
        /// Which.
        pool: PoolId,
    },
    /// Count it.
    Observe(Observation),
    /// Every grant is closed and every transfer over: the process may exit.
    ShutdownComplete,
}

/// What an engine or a peer did that the protocol does not allow.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq, thiserror::Error)]
pub enum Misbehaviour {
    /// A message that does not belong at this point of the session.
    #[error("a message out of place")]
    OutOfPlace,
    /// A name that was never given, or given to somebody else.
    #[error("number {0} was never given to this sender")]
    NotYours(u64),
    /// A page outside the transfer, or one that was already dealt with.
    #[error("page {position} of region {region} is outside the transfer, or was named before")]
    Page {
        /// Its region.
        region: u16,
        /// Its position.
        position: u32,
    },
    /// More than a bound allows.
    #[error("{got} exceeds the limit of {want}")]
    Limit {
        /// How many.
        got: u64,
        /// The limit.
        want: u64,
    },
}

/// How full a pool is, for metrics and the admin page.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Usage {
    /// Slots in all.
    pub slots: u64,
    /// Slots that nobody holds.
    pub free: u64,
    /// Slots under a lease.
    pub leased: u64,
    /// Slots that a remote writer may still write.
    pub granted: u64,
    /// Slots that a local send or scrub holds.
    pub pinned: u64,
    /// Slots that only a writer or reader still holds: their lease is over.
    pub quarantined: u64,
}
