//! In place of the `verbs` plane, where it is not built in: there is none, and no value of it.

use std::convert::Infallible;
use std::sync::Arc;

use fabric_proto::host::{Input, PlaneCommand};
use fabric_proto::ids::LinkId;
use fabric_proto::wire::PlaneKind;
use quinn::Connection;
use thiserror::Error;
use tokio::sync::mpsc::Sender;

use super::{Faults, Opener, Plane, PlaneProofs, Pools, VerbsSettings};

/// There is no such plane.
#[derive(Debug)]
pub struct VerbsPlane(Infallible);

/// There is no such peer.
#[derive(Debug)]
pub(crate) struct Introduced(Infallible);

/// Why the plane cannot start.
#[derive(Debug, Error)]
pub enum VerbsStartError {
    /// This build has none.
    #[error("this fabric-daemon was built without the feature rdma")]
    NotBuilt,
}

impl VerbsPlane {
    /// No plane.
    ///
    /// # Errors
    ///
    /// Always.
    pub fn new(
        _pools: Arc<Pools>,
        _events: Sender<Input<PlaneProofs>>,
        _settings: VerbsSettings,
        _outstanding_bytes_max: u64,
        _faults: Arc<Faults>,
    ) -> Result<Self, VerbsStartError> {
        Err(VerbsStartError::NotBuilt)
    }

    #[expect(clippy::unused_async, reason = "as where there is one")]
    pub(crate) async fn introduce(
        &self,
        _connection: &Connection,
        _opener: Opener,
    ) -> Result<Option<Introduced>, String> {
        match self.0 {}
    }

    pub(crate) fn link_up(&self, _link: LinkId, introduced: Introduced) {
        match introduced.0 {}
    }

    /// None.
    #[must_use]
    pub fn peers_refused(&self) -> u64 {
        match self.0 {}
    }

    /// None.
    #[must_use]
    pub fn failovers(&self) -> u64 {
        match self.0 {}
    }

    /// None.
    #[must_use]
    pub fn objects(&self) -> [(&'static str, u64); 3] {
        match self.0 {}
    }
}

impl Plane for VerbsPlane {
    fn kind(&self) -> PlaneKind {
        match self.0 {}
    }

    fn submit(&self, _command: PlaneCommand) {
        match self.0 {}
    }

    fn link_down(&self, _link: LinkId) {
        match self.0 {}
    }
}
