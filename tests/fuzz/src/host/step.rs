//! What happens to the machine, as a value that can be looked at after the machine has consumed it.

use std::sync::Arc;

use fabric_proto::host::{Input, Proofs, ReadsStopped, StoppedBy, Tenants, WritesStopped};
use fabric_proto::ids::{
    EngineId, GrantId, Incarnation, LinkId, NodeId, PoolId, RequestSeq, SlotRef, TransferId,
};
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::{PeerMessage, PlaneKind, ToDaemon};

/// The proofs of the plane here. Made in [`Step::input`] alone, from a step of an honest plane.
#[derive(Debug)]
pub(super) struct Proven;

#[derive(Debug)]
pub(super) struct Stopped(GrantId, StoppedBy);

#[derive(Debug)]
pub(super) struct Read(TransferId, GrantId);

impl Proofs for Proven {
    type WritesStopped = Stopped;
    type ReadsStopped = Read;
}

impl WritesStopped for Stopped {
    fn grant(&self) -> GrantId {
        self.0
    }

    fn by(&self) -> StoppedBy {
        self.1
    }
}

impl ReadsStopped for Read {
    fn transfer(&self) -> TransferId {
        self.0
    }

    fn grant(&self) -> GrantId {
        self.1
    }
}

/// See [`Input`]: one for each, and the same fields.
#[derive(Clone, Debug)]
pub(super) enum Step {
    EngineUp(EngineId, Tenants),
    EngineGone(EngineId),
    RegisterPool {
        engine: EngineId,
        seq: RequestSeq,
        pool: PoolId,
        spec: PoolSpec,
        memory_bytes: u64,
    },
    Engine(EngineId, ToDaemon),
    LinkUp {
        link: LinkId,
        node: NodeId,
        incarnation: Incarnation,
        planes: Vec<PlaneKind>,
    },
    LinkDown(LinkId),
    ConnectFailed(NodeId),
    Peer(LinkId, PeerMessage),
    Armed(GrantId),
    Landed(GrantId),
    Written(TransferId, GrantId, u64),
    WriterFailed(TransferId, GrantId),
    WritesStopped(GrantId, StoppedBy),
    ReadsStopped(TransferId, GrantId),
    Scrubbed(PoolId, Arc<[SlotRef]>),
    Tick,
    Shutdown,
}

impl Step {
    pub(super) fn input(&self) -> Input<Proven> {
        match self.clone() {
            Self::EngineUp(engine, tenants) => Input::EngineUp { engine, tenants },
            Self::EngineGone(engine) => Input::EngineGone { engine },
            Self::RegisterPool {
                engine,
                seq,
                pool,
                spec,
                memory_bytes,
            } => Input::RegisterPool {
                engine,
                seq,
                pool,
                spec,
                memory_bytes,
            },
            Self::Engine(engine, message) => Input::Engine { engine, message },
            Self::LinkUp {
                link,
                node,
                incarnation,
                planes,
            } => Input::LinkUp {
                link,
                node,
                incarnation,
                planes,
            },
            Self::LinkDown(link) => Input::LinkDown { link },
            Self::ConnectFailed(node) => Input::ConnectFailed { node },
            Self::Peer(link, message) => Input::Peer { link, message },
            Self::Armed(grant) => Input::Armed { grant },
            Self::Landed(grant) => Input::Landed { grant },
            Self::Written(transfer, grant, bytes) => Input::Written {
                transfer,
                grant,
                bytes,
            },
            Self::WriterFailed(transfer, grant) => Input::WriterFailed { transfer, grant },
            Self::WritesStopped(grant, by) => Input::WritesStopped(Stopped(grant, by)),
            Self::ReadsStopped(transfer, grant) => Input::ReadsStopped(Read(transfer, grant)),
            Self::Scrubbed(pool, slots) => Input::Scrubbed { pool, slots },
            Self::Tick => Input::Tick,
            Self::Shutdown => Input::Shutdown,
        }
    }

    /// Whether it is said by somebody who is not trusted.
    pub(super) fn is_message(&self) -> bool {
        matches!(self, Self::Engine(..) | Self::Peer(..))
    }
}
