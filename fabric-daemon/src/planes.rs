//! The planes that are switched on, together.

use std::path::PathBuf;
use std::sync::Arc;

use fabric_proto::host::PlaneCommand;
use fabric_proto::ids::{LinkId, PoolId};
use fabric_proto::wire::PlaneKind;
use quinn::Connection;
use thiserror::Error;
use tokio::sync::mpsc::Sender;
use tracing::warn;

use crate::config::{Config, Fault};
use crate::driver::Event;
use crate::link::{About, Side};
use crate::plane::{
    Faults, Introduced, Opener, Plane, PoolRefused, Pools, QuicLimits, QuicPlane, ShmError,
    ShmPlane, VerbsPlane, VerbsStartError,
};

/// The planes of a daemon.
#[derive(Debug)]
pub(crate) struct Planes {
    quic: Option<QuicPlane>,
    shm: Option<ShmPlane>,
    verbs: Option<VerbsPlane>,
}

/// Why a plane cannot start.
#[derive(Debug, Error)]
pub enum PlaneStartError {
    /// The `shm` plane's socket.
    #[error("listen.shm: {0}")]
    Shm(#[from] ShmError),
    /// The devices of the `verbs` plane.
    #[error("planes: \"verbs\": {0}")]
    Verbs(#[from] VerbsStartError),
}

/// What a link's peer has that the planes need.
#[derive(Debug)]
pub(crate) struct PeerPlanes {
    /// Where its `shm` plane listens.
    pub(crate) shm_path: Option<PathBuf>,
    /// Its `verbs` plane, if the two can use it.
    pub(crate) verbs: Option<Introduced>,
}

impl Planes {
    /// Starts what the configuration asks for.
    pub(crate) fn new(
        config: &Config,
        pools: &Arc<Pools>,
        events: &Sender<Event>,
    ) -> Result<Self, PlaneStartError> {
        let faults = Arc::new(faults(config.fault));
        let has = |kind| config.planes.contains(&kind);
        let quic = has(PlaneKind::Quic).then(|| {
            QuicPlane::new(
                Arc::clone(pools),
                events.clone(),
                QuicLimits::default(),
                Arc::clone(&faults),
            )
        });
        let path = config.listen.shm.as_ref();
        let shm = path.filter(|_| has(PlaneKind::Shm)).map(|path| {
            ShmPlane::new(
                Arc::clone(pools),
                events.clone(),
                path.clone(),
                Arc::clone(&faults),
            )
        });
        let verbs = has(PlaneKind::Verbs).then(|| {
            VerbsPlane::new(
                Arc::clone(pools),
                events.clone(),
                config.verbs.clone(),
                config.transfer.outstanding_bytes_max,
                Arc::clone(&faults),
            )
        });
        Ok(Self {
            quic,
            shm: shm.transpose()?,
            verbs: verbs.transpose()?,
        })
    }

    /// Passes a command on. Never blocks.
    pub(crate) fn submit(&self, kind: PlaneKind, command: PlaneCommand) {
        let plane: Option<&dyn Plane> = match kind {
            PlaneKind::Quic => self.quic.as_ref().map(|plane| plane as &dyn Plane),
            PlaneKind::Shm => self.shm.as_ref().map(|plane| plane as &dyn Plane),
            PlaneKind::Verbs => self.verbs.as_ref().map(|plane| plane as &dyn Plane),
        };
        let plane = plane.expect("the machine uses the planes of its links, which are these");
        plane.submit(command);
    }

    /// Introduces the planes that need it to those of a connection's other end. An error is one of
    /// the connection's; a plane that cannot be used is said, and left out.
    pub(crate) async fn introduce(
        &self,
        connection: &Connection,
        side: Side,
    ) -> Result<Option<Introduced>, String> {
        let Some(verbs) = &self.verbs else {
            return Ok(None);
        };
        let opener = match side {
            Side::Accepted => Opener::Peer,
            Side::Dialled => Opener::Us,
        };
        let introduced = verbs.introduce(connection, opener).await?;
        if introduced.is_none() {
            let address = connection.remote_address();
            warn!(%address, "no RDMA path to a peer: some lane carries no message");
        }
        Ok(introduced)
    }

    /// Says that a link is up, before the machine hears of it.
    pub(crate) fn link_up(
        &self,
        link: LinkId,
        about: &About,
        connection: &Connection,
        theirs: PeerPlanes,
    ) {
        if let (Some(verbs), Some(introduced)) = (&self.verbs, theirs.verbs) {
            verbs.link_up(link, introduced);
        }
        for kind in &about.planes {
            match (kind, &self.quic, &self.shm, &theirs.shm_path) {
                (PlaneKind::Quic, Some(quic), _, _) => quic.link_up(link, connection.clone()),
                (PlaneKind::Shm, _, Some(shm), Some(path)) => {
                    shm.link_up(link, Some(about.node), path.clone());
                }
                _ => {}
            }
        }
    }

    /// Says that a link is down, before the machine hears of it.
    pub(crate) fn link_down(&self, link: LinkId) {
        if let Some(quic) = &self.quic {
            quic.link_down(link);
        }
        if let Some(shm) = &self.shm {
            shm.link_down(link);
        }
        if let Some(verbs) = &self.verbs {
            verbs.link_down(link);
        }
    }

    /// Says that a pool is there, before the machine hears of it, and waits until the planes are
    /// ready for it: elsewhere, as a device may need seconds for many gigabytes. An error is one of
    /// the devices'; other planes do without.
    pub(crate) async fn pool_here(self: &Arc<Self>, pool: PoolId) -> Result<(), PoolRefused> {
        if self.verbs.is_none() {
            return Ok(());
        }
        let planes = Arc::clone(self);
        let ready = tokio::task::spawn_blocking(move || match &planes.verbs {
            Some(verbs) => verbs.pool_here(pool),
            None => Ok(()),
        });
        match ready.await {
            Ok(ready) => ready,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // Cancelled: the runtime ends.
            Err(_) => Ok(()),
        }
    }

    /// Whether this plane is here, and no other.
    pub(crate) fn are_only(&self, kind: PlaneKind) -> bool {
        let here = [
            (PlaneKind::Quic, self.quic.is_some()),
            (PlaneKind::Shm, self.shm.is_some()),
            (PlaneKind::Verbs, self.verbs.is_some()),
        ];
        here.iter()
            .all(|(other, is_here)| *is_here == (*other == kind))
    }

    /// Says that a pool is gone, after it has been taken out of the pools.
    pub(crate) fn pool_gone(&self, pool: PoolId) {
        if let Some(verbs) = &self.verbs {
            verbs.pool_gone(pool);
        }
    }

    /// What the `verbs` plane has of each kind of object.
    pub(crate) fn verbs_objects(&self) -> Vec<(&'static str, u64)> {
        let objects = self.verbs.as_ref().map(VerbsPlane::objects);
        objects.into_iter().flatten().collect()
    }

    /// Times that the `verbs` plane has led a part of a grant over another lane.
    pub(crate) fn verbs_failovers(&self) -> u64 {
        self.verbs.as_ref().map_or(0, VerbsPlane::failovers)
    }

    /// The planes of the link to ourselves.
    pub(crate) fn loopback(&self) -> Vec<PlaneKind> {
        self.shm.iter().map(|_| PlaneKind::Shm).collect()
    }

    /// Streams and writers that were refused, by plane.
    pub(crate) fn refused(&self) -> [(PlaneKind, u64); 3] {
        let quic = self.quic.as_ref().map_or(0, QuicPlane::streams_refused);
        let shm = self.shm.as_ref().map_or(0, ShmPlane::peers_refused);
        let verbs = self.verbs.as_ref().map_or(0, VerbsPlane::peers_refused);
        [
            (PlaneKind::Quic, quic),
            (PlaneKind::Shm, shm),
            (PlaneKind::Verbs, verbs),
        ]
    }
}

#[cfg(feature = "fault-injection")]
fn faults(fault: Fault) -> Faults {
    Faults {
        flip_pages: fault.flip_pages.unwrap_or(0).into(),
        stall_after_bytes: fault.stall_after_bytes,
    }
}

#[cfg(not(feature = "fault-injection"))]
fn faults(fault: Fault) -> Faults {
    assert!(!fault.is_any(), "the configuration refuses faults");
    Faults::default()
}
