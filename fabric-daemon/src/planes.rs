//! The planes that are switched on, together.

use std::path::PathBuf;
use std::sync::Arc;

use fabric_proto::host::PlaneCommand;
use fabric_proto::ids::LinkId;
use fabric_proto::wire::PlaneKind;
use quinn::Connection;
use tokio::sync::mpsc::Sender;

use crate::config::{Config, Fault};
use crate::driver::Event;
use crate::link::About;
use crate::plane::{Faults, Plane, Pools, QuicLimits, QuicPlane, ShmError, ShmPlane};

/// The planes of a daemon.
#[derive(Debug)]
pub(crate) struct Planes {
    quic: Option<QuicPlane>,
    shm: Option<ShmPlane>,
}

impl Planes {
    /// Starts what the configuration asks for.
    pub(crate) fn new(
        config: &Config,
        pools: &Arc<Pools>,
        events: &Sender<Event>,
    ) -> Result<Self, ShmError> {
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
        Ok(Self {
            quic,
            shm: shm.transpose()?,
        })
    }

    /// Passes a command on. Never blocks.
    pub(crate) fn submit(&self, kind: PlaneKind, command: PlaneCommand) {
        let plane: Option<&dyn Plane> = match kind {
            PlaneKind::Quic => self.quic.as_ref().map(|plane| plane as &dyn Plane),
            PlaneKind::Shm => self.shm.as_ref().map(|plane| plane as &dyn Plane),
        };
        let plane = plane.expect("the machine uses the planes of its links, which are these");
        plane.submit(command);
    }

    /// Says that a link is up, before the machine hears of it.
    pub(crate) fn link_up(
        &self,
        link: LinkId,
        about: &About,
        connection: &Connection,
        shm_path: Option<PathBuf>,
    ) {
        for kind in &about.planes {
            match (kind, &self.quic, &self.shm, &shm_path) {
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
    }

    /// The planes of the link to ourselves.
    pub(crate) fn loopback(&self) -> Vec<PlaneKind> {
        self.shm.iter().map(|_| PlaneKind::Shm).collect()
    }

    /// Streams and writers that were refused, by plane.
    pub(crate) fn refused(&self) -> [(PlaneKind, u64); 2] {
        let quic = self.quic.as_ref().map_or(0, QuicPlane::streams_refused);
        let shm = self.shm.as_ref().map_or(0, ShmPlane::peers_refused);
        [(PlaneKind::Quic, quic), (PlaneKind::Shm, shm)]
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
