//! The first message of a link, both ways.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use fabric_proto::ids::{Incarnation, NodeId, Tag};
use fabric_proto::wire::{PeerMessage, PlaneKind, VERSION};
use quinn::{Connection, ConnectionError, SendStream, WriteError};
use thiserror::Error;
use tracing::warn;

use super::Side;
use super::frames::{self, Reader, ReceiveError};

/// What we say of ourselves.
#[derive(Clone, Debug)]
pub(crate) struct Own {
    pub(crate) incarnation: Incarnation,
    /// The preferred first.
    pub(crate) planes: Vec<PlaneKind>,
    /// Where our `shm` plane listens.
    pub(crate) shm: Option<PathBuf>,
    /// What the connection is configured with.
    pub(crate) outstanding_bytes_max: u64,
    /// The same.
    pub(crate) silence_max: Duration,
    /// Equal on one host only.
    pub(crate) host: Tag,
}

/// What a peer says of itself.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) incarnation: Incarnation,
    pub(super) planes: Vec<PlaneKind>,
    pub(super) host: Tag,
    pub(super) shm_path: Option<PathBuf>,
}

/// A control stream on which both have said hello.
pub(super) struct Introduction {
    pub(super) reader: Reader,
    pub(super) stream: SendStream,
    pub(super) peer: Peer,
}

impl Own {
    /// The planes that both sides allow, by our preference.
    pub(super) fn planes_with(&self, peer: &Peer) -> Vec<PlaneKind> {
        let same_host = peer.host == self.host && peer.shm_path.is_some();
        let both = |plane: &&PlaneKind| {
            peer.planes.contains(plane) && (**plane != PlaneKind::Shm || same_host)
        };
        self.planes.iter().filter(both).copied().collect()
    }

    pub(super) fn hello(&self) -> PeerMessage {
        let path = self.shm.as_ref().map(|path| path.as_os_str().as_bytes());
        PeerMessage::Hello {
            version: VERSION,
            incarnation: self.incarnation,
            planes: self.planes.clone(),
            host: self.host,
            shm_path: Bytes::copy_from_slice(path.unwrap_or_default()),
        }
    }
}

/// Says hello and hears it. Whoever connected opens the stream.
pub(super) async fn exchange(
    own: &Own,
    connection: &Connection,
    side: Side,
) -> Result<Introduction, HelloError> {
    let (mut stream, receive) = match side {
        Side::Accepted => connection.accept_bi().await?,
        Side::Dialled => connection.open_bi().await?,
    };
    frames::send(&mut stream, &own.hello().encode()).await?;
    let mut reader = Reader::new(receive);
    let hello = reader.next().await?.ok_or(HelloError::NotHello)?;
    let PeerMessage::Hello {
        version,
        incarnation,
        planes,
        host,
        shm_path,
    } = hello
    else {
        return Err(HelloError::NotHello);
    };
    if version != VERSION {
        return Err(HelloError::Version {
            got: version,
            want: VERSION,
        });
    }
    let path = std::ffi::OsString::from_vec(shm_path.to_vec());
    let peer = Peer {
        incarnation,
        planes,
        host,
        shm_path: (!path.is_empty()).then(|| path.into()),
    };
    Ok(Introduction {
        reader,
        stream,
        peer,
    })
}

/// Why a peer was not introduced.
#[derive(Debug, Error)]
pub(super) enum HelloError {
    #[error("{0}")]
    Connection(#[from] ConnectionError),
    #[error("the first message is not a hello")]
    NotHello,
    #[error("{0}")]
    Receive(#[from] ReceiveError),
    #[error("the peer speaks version {got} of the protocol, and this daemon {want}")]
    Version { got: u32, want: u32 },
    #[error("{0}")]
    Write(#[from] WriteError),
}

/// A digest that is equal for daemons of one boot of one kernel, whatever their namespaces.
pub(crate) fn host_digest(node: NodeId, incarnation: Incarnation) -> Tag {
    let mut hasher = blake3::Hasher::new_derive_key("fabric 1 host digest");
    match std::fs::read(BOOT_ID) {
        Ok(boot) if !boot.is_empty() => hasher.update(&boot),
        result => {
            warn!("read {BOOT_ID}: {result:?}; no peer will be taken to be on this host");
            hasher.update(&node.0);
            hasher.update(&incarnation.as_u64().to_le_bytes())
        }
    };
    Tag(*hasher.finalize().as_bytes())
}

/// M: random(4): a fresh random UUID for each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[cfg(test)]
mod tests {
    use super::*;

    fn own(planes: &[PlaneKind]) -> Own {
        Own {
            incarnation: Incarnation::new(1).unwrap(),
            planes: planes.into(),
            shm: Some("/run/own.sock".into()),
            outstanding_bytes_max: 1 << 20,
            silence_max: Duration::from_secs(2),
            host: Tag([7; 32]),
        }
    }

    fn peer(planes: &[PlaneKind], host: u8, path: Option<&str>) -> Peer {
        Peer {
            incarnation: Incarnation::new(1).unwrap(),
            planes: planes.into(),
            host: Tag([host; 32]),
            shm_path: path.map(Into::into),
        }
    }

    #[test]
    fn planes_are_those_of_both_sides_in_our_order() {
        use PlaneKind::{Quic, Shm};
        let shm_first = own(&[Shm, Quic]);
        let quic_first = own(&[Quic, Shm]);
        let here = peer(&[Quic, Shm], 7, Some("/run/peer.sock"));
        assert_eq!(shm_first.planes_with(&here), [Shm, Quic]);
        assert_eq!(quic_first.planes_with(&here), [Quic, Shm]);
        assert_eq!(own(&[Shm]).planes_with(&peer(&[Quic], 7, Some("/x"))), []);
    }

    #[test]
    fn shm_needs_the_same_host_and_a_path() {
        use PlaneKind::{Quic, Shm};
        let own = own(&[Shm, Quic]);
        let there = peer(&[Shm, Quic], 8, Some("/run/peer.sock"));
        assert_eq!(own.planes_with(&there), [Quic], "another host");
        let silent = peer(&[Shm, Quic], 7, None);
        assert_eq!(own.planes_with(&silent), [Quic], "no path");
    }

    #[test]
    fn the_host_digest_does_not_depend_on_the_daemon() {
        let digest = |node, life| host_digest(NodeId([node; 32]), Incarnation::new(life).unwrap());
        if std::path::Path::new(BOOT_ID).exists() {
            assert_eq!(digest(1, 1), digest(2, 9));
        } else {
            assert_ne!(digest(1, 1), digest(2, 1));
        }
    }
}
