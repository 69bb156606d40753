//! The allow-list: which nodes are peers, and where they are.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fabric_proto::ids::NodeId;

use crate::config::PeerEntry;

/// The nodes that may be linked with.
#[derive(Debug)]
pub(crate) struct AllowList {
    peers: BTreeMap<NodeId, Allowed>,
}

/// What the configuration says of a peer.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
}

impl AllowList {
    /// The peers of a configuration, which may list `own` too, so that all nodes can share one.
    pub(crate) fn new(peers: &[PeerEntry], own: NodeId) -> Self {
        let allowed = |peer: &PeerEntry| Allowed {
            name: peer.name.clone(),
            address: peer.address,
        };
        let others = peers.iter().filter(|peer| peer.node != own);
        Self {
            peers: others.map(|peer| (peer.node, allowed(peer))).collect(),
        }
    }

    pub(crate) fn find(&self, node: NodeId) -> Option<&Allowed> {
        self.peers.get(&node)
    }
}
