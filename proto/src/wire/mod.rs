//! Messages, and total decoders for them: any bytes give a message or a [`DecodeError`].
//!
//! Messages are protocol buffers ([`pb`] has the field numbers), since both wires must be able to
//! grow. What is read here is typed and bounded once; behind this module nothing is checked twice.
//! Decoding allocates at most a small multiple of the bytes that arrived, never what they claim.

mod convert;
mod offer;
mod pb;
#[cfg(test)]
mod tests;

use alloc::vec::Vec;

use bytes::Bytes;

use crate::ids::{
    EngineId, EngineName, Epoch, GrantId, Incarnation, LeaseId, NodeId, PoolId, RequestId,
    RequestSeq, Secret, SlotIndex, SlotRef, Tag, TenantId, TransferId,
};
use crate::outcome::{Outcome, Rejection};
use crate::pool::{Layout, PageRef, PageRun, PoolSpec, TokenRange};

pub use offer::Offer;

/// The version of both protocols. Peers and engines of another version are refused.
pub const VERSION: u32 = 1;

/// What a lease is for.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Purpose {
    /// The engine itself fills the pages: a prefill's source, or a single-node run.
    Hold,
    /// The pages arrive from another engine; the reply carries an offer.
    Receive,
}

/// What to do with a transfer whose lease is ended before its delivery.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum AbortPolicy {
    /// Let the writer finish; the slots are free after its own drain.
    FinishTransfer,
    /// Ask the writer to stop, and fence where it does not.
    DrainNow,
}

/// A data plane.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum PlaneKind {
    /// QUIC streams: any two hosts.
    Quic,
    /// The destination's daemon copies: both pools on one host.
    Shm,
    /// RDMA: the source's device writes.
    Verbs,
}

/// Checksums of consecutive pages of one region.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Checksums {
    /// Which region.
    pub region: u16,
    /// The position of the first.
    pub first: u32,
    /// CRC-32C of each page.
    pub crcs: Vec<u32>,
}

impl Checksums {
    /// The pages.
    #[must_use]
    pub fn run(&self) -> PageRun {
        let count = u32::try_from(self.crcs.len()).expect("the decoder bounds the count");
        PageRun {
            region: self.region,
            first: self.first,
            count,
        }
    }
}

/// From an engine to its local daemon.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum ToDaemon {
    /// Always the first.
    Hello {
        /// The engine's [`VERSION`].
        version: u32,
        /// Its name; the configuration says what it may do.
        name: EngineName,
    },
    /// Registers a pool. The frame carries one descriptor: the pool's sealed memory, or a dma-buf
    /// of a device's, which a daemon takes where nobody but RDMA devices has to touch it.
    RegisterPool {
        /// Echoed in the reply.
        seq: RequestSeq,
        /// What the pool is.
        spec: PoolSpec,
    },
    /// Asks for slots.
    Lease {
        /// Echoed in the reply.
        seq: RequestSeq,
        /// From which pool.
        pool: PoolId,
        /// For whom.
        tenant: TenantId,
        /// For which request.
        request: RequestId,
        /// For which of its tokens.
        tokens: TokenRange,
        /// To fill, or to receive.
        purpose: Purpose,
        /// The slots, where the engine's own allocator rules the pool; empty: the daemon chooses.
        named: Vec<SlotIndex>,
    },
    /// Ends a lease. Always succeeds; slots with other holders are free once those are gone.
    EndLease {
        /// Which.
        lease: LeaseId,
        /// What becomes of a transfer into it; `None`: as the daemon is configured.
        abort: Option<AbortPolicy>,
    },
    /// Starts a transfer from a lease of this engine to the offer's.
    Send {
        /// Echoed in the reply.
        seq: RequestSeq,
        /// The source.
        lease: LeaseId,
        /// The destination's offer.
        offer: Bytes,
    },
    /// Says that pages are complete, and what they hold. They must not change until the outcome.
    Seal {
        /// Which transfer.
        transfer: TransferId,
        /// Which pages, and their checksums.
        checksums: Checksums,
    },
    /// Says that every page is sealed.
    Finish {
        /// Which transfer.
        transfer: TransferId,
        /// What must arrive with the pages or not at all.
        payload: Bytes,
    },
    /// Ends a transfer on the source's side.
    AbortSend {
        /// Which transfer.
        transfer: TransferId,
    },
    /// The verification of one attempt's pages.
    Verified {
        /// Which lease.
        lease: LeaseId,
        /// As in [`ToEngine::Verify`].
        attempt: u32,
        /// Pages whose bytes do not match their checksum; empty: all match.
        corrupt: Vec<PageRef>,
    },
}

/// From a daemon to one of its engines.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum ToEngine {
    /// The answer to [`ToDaemon::Hello`].
    Welcome {
        /// The daemon's [`VERSION`].
        version: u32,
        /// The daemon's node.
        node: NodeId,
        /// The daemon's life.
        incarnation: Incarnation,
        /// The session.
        engine: EngineId,
    },
    /// A request was turned away.
    Rejected {
        /// Which request; 0 for the hello.
        seq: RequestSeq,
        /// Why.
        reason: Rejection,
    },
    /// A pool is registered.
    PoolRegistered {
        /// Which request.
        seq: RequestSeq,
        /// Its name from now on.
        pool: PoolId,
    },
    /// Slots are leased.
    Leased {
        /// Which request.
        seq: RequestSeq,
        /// The lease.
        lease: LeaseId,
        /// Its slots, in the order of its tokens.
        slots: Vec<SlotRef>,
        /// For [`Purpose::Receive`]: what the prefill side needs.
        offer: Option<Bytes>,
    },
    /// A transfer has begun; pages may be sealed. The destination may still refuse it.
    SendOpened {
        /// Which request.
        seq: RequestSeq,
        /// The transfer.
        transfer: TransferId,
        /// How many slots it covers.
        slots: u32,
        /// Which of the source lease's slots is the first.
        offset: u32,
    },
    /// A transfer from this engine is over, and nothing reads its pages any more.
    SendOutcome {
        /// Which transfer.
        transfer: TransferId,
        /// How it ended.
        outcome: Outcome,
    },
    /// A part of the manifest, ahead of [`ToEngine::Verify`].
    Expect {
        /// Which lease.
        lease: LeaseId,
        /// Which pages, and what they must hold.
        checksums: Checksums,
    },
    /// Every write has provably stopped: these pages can be verified now.
    Verify {
        /// Which lease.
        lease: LeaseId,
        /// Counts from 1.
        attempt: u32,
        /// Which pages; all on the first attempt, the corrupt ones later.
        pages: Vec<PageRun>,
        /// The engine's payload, as the source sent it.
        payload: Bytes,
    },
    /// What became of the transfer into a lease.
    LeaseOutcome {
        /// Which lease.
        lease: LeaseId,
        /// How it ended.
        outcome: Outcome,
    },
}

/// Between daemons, on an authenticated link, in order.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub enum PeerMessage {
    /// Always the first, both ways.
    Hello {
        /// The sender's [`VERSION`].
        version: u32,
        /// The sender's life.
        incarnation: Incarnation,
        /// The planes that it allows.
        planes: Vec<PlaneKind>,
        /// A digest of the host's boot: equal on one host only.
        host: Tag,
        /// Where its `shm` plane listens; empty: nowhere.
        shm_path: Bytes,
    },
    /// The source asks for a grant.
    Open {
        /// The source's number for it.
        transfer: TransferId,
        /// The destination's own offer.
        offer: Bytes,
        /// The source's layout.
        layout: Layout,
        /// The tokens that the source holds.
        tokens: TokenRange,
        /// On whose behalf the source engine acts.
        tenant: TenantId,
        /// The plane that the source chose.
        plane: PlaneKind,
    },
    /// The destination turns it away.
    Refused {
        /// Which.
        transfer: TransferId,
        /// Why.
        reason: Rejection,
    },
    /// The destination grants it: the first time, or again for corrupt pages.
    Granted {
        /// Which.
        transfer: TransferId,
        /// The permission.
        grant: GrantId,
        /// The destination's slots, by position.
        slots: Vec<SlotRef>,
        /// Opens the grant on the data plane.
        plane_key: Secret,
        /// Keys the manifest's digest.
        manifest_key: Secret,
        /// The most bytes that may be outstanding.
        outstanding_bytes_max: u64,
        /// The pages that it is for; empty: every page.
        pages: Vec<PageRun>,
    },
    /// A part of the manifest, as pages are sealed.
    Checksums {
        /// Under which grant.
        grant: GrantId,
        /// Which pages, and their checksums.
        checksums: Checksums,
    },
    /// Every page was posted; the drain follows in band.
    Commit {
        /// Under which grant.
        grant: GrantId,
        /// The digest over identity, checksums and payload.
        digest: Tag,
        /// The engine's payload.
        payload: Bytes,
    },
    /// The source stops.
    Cancel {
        /// Which.
        transfer: TransferId,
        /// Whether a drain follows in band: only where a writer was open.
        drain_follows: bool,
    },
    /// The destination asks the source to stop and drain.
    DrainRequest {
        /// Which grant.
        grant: GrantId,
    },
    /// The destination's last word on a transfer.
    Verdict {
        /// Which.
        transfer: TransferId,
        /// How it ended.
        outcome: Outcome,
    },
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum DecodeError {
    /// Not a protocol buffer, or none of the known messages.
    #[error("{bytes} bytes are not a message of this protocol")]
    Malformed {
        /// How many bytes there were.
        bytes: usize,
    },
    /// Longer than any message may be.
    #[error("a message has {got} bytes, and {want} are allowed")]
    TooLong {
        /// Its length.
        got: usize,
        /// The bound.
        want: usize,
    },
    /// A field is missing or outside its bound.
    #[error("field {field} has the value {got}, and the bound is {want}")]
    Field {
        /// Its name in this version of the protocol.
        field: &'static str,
        /// Its value, or its length.
        got: u64,
        /// The bound that it breaks.
        want: u64,
    },
}

macro_rules! codec {
    ($($message:ident),+) => {$(
        impl $message {
            /// Encodes the message.
            #[must_use]
            pub fn encode(&self) -> Bytes {
                Bytes::from(prost::Message::encode_to_vec(&pb::$message::from(self)))
            }

            /// Decodes a message.
            ///
            /// # Errors
            ///
            /// [`DecodeError`], for any bytes that are not exactly a message within its bounds.
            pub fn decode(bytes: Bytes) -> Result<Self, DecodeError> {
                let (got, want) = (bytes.len(), crate::limits::MESSAGE_BYTES_MAX);
                if got > want {
                    return Err(DecodeError::TooLong { got, want });
                }
                let message: pb::$message = prost::Message::decode(bytes)
                    .map_err(|_| DecodeError::Malformed { bytes: got })?;
                Self::try_from(message)
            }
        }
    )+};
}

codec!(ToDaemon, ToEngine, PeerMessage);

fn slot_ref(index: u32, epoch: u64) -> Result<SlotRef, DecodeError> {
    let epoch = Epoch::new(epoch).ok_or(DecodeError::Field {
        field: "epoch",
        got: epoch,
        want: 1,
    })?;
    Ok(SlotRef {
        index: SlotIndex(index),
        epoch,
    })
}
