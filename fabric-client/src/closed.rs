//! Why a session is over, and what a daemon can do wrong.

use std::io;

use fabric_ipc::FrameError;
use fabric_proto::ids::{LeaseId, RequestSeq, TransferId};
use fabric_proto::wire::DecodeError;

/// Why a session is over. The first reason stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Closed {
    /// The daemon broke the protocol, and cannot be trusted with memory.
    #[error("the daemon broke the protocol: {0}")]
    Misbehaved(Misbehaviour),
    /// The daemon closed the connection, or died.
    #[error("the daemon closed the connection")]
    Daemon,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Io(io::ErrorKind),
    /// This process let go of the session, or stopped the runtime that served it.
    #[error("this process closed the session")]
    Local,
}

/// What a daemon did that the protocol does not allow.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// A verification whose number is not the next.
    #[error("verification {got} came, and {want} is next")]
    Attempt {
        /// Its number.
        got: u32,
        /// The next number.
        want: u32,
    },
    /// A frame with descriptors; a daemon sends none.
    #[error("{got} descriptors came, and {want} are allowed")]
    Descriptors {
        /// How many.
        got: usize,
        /// None.
        want: usize,
    },
    /// An epoch that is not above all before it of that slot (S6).
    #[error("slot {slot} has epoch {got}, and had {before}")]
    EpochNotNewer {
        /// Which slot.
        slot: u32,
        /// The epoch of the new lease.
        got: u64,
        /// The epoch of the last.
        before: u64,
    },
    /// Bytes that are no frame.
    #[error("bytes that are no frame")]
    Frame,
    /// A lease whose name another lease has.
    #[error("lease {0} is there already")]
    LeaseTwice(LeaseId),
    /// A frame that is no message.
    #[error(transparent)]
    Malformed(DecodeError),
    /// An offer for a lease that is held, none for one that receives, or news of the delivery of a
    /// lease that is held.
    #[error("lease {0} is not of that kind")]
    NotOfThatKind(LeaseId),
    /// A message that does not belong at this point: of the session, or of the lease's delivery.
    #[error("a message out of place")]
    OutOfPlace,
    /// Pages outside a lease.
    #[error("{count} pages from position {first} of region {region} are outside the lease")]
    PagesOutside {
        /// Their region.
        region: u16,
        /// The first position.
        first: u32,
        /// How many.
        count: u32,
    },
    /// More pages than the lease has, so that some came twice; or none.
    #[error("{got} pages are to be verified, of {want}")]
    PagesTwice {
        /// How many are named.
        got: u64,
        /// How many the lease has.
        want: u64,
    },
    /// Another number of slots than the tokens need.
    #[error("a lease has {got} slots, and its tokens need {want}")]
    SlotCount {
        /// Slots of the lease.
        got: u64,
        /// Slots that its tokens need.
        want: u64,
    },
    /// A slot that this process still holds under another lease (S5), or the same one twice.
    #[error("slot {0} is leased already")]
    SlotLeased(u32),
    /// Another slot than the one named.
    #[error("slot {got} was given, and {want} was named")]
    SlotNotNamed {
        /// The slot that was given.
        got: u32,
        /// The slot that was named.
        want: u32,
    },
    /// A slot that is none of the pool's.
    #[error("slot {got} is outside the pool of {want}")]
    SlotOutside {
        /// Its index.
        got: u32,
        /// Slots of the pool.
        want: u32,
    },
    /// A transfer that its lease cannot have, or whose name another transfer has.
    #[error("transfer {transfer} has slots up to {got}, and its lease has {want}")]
    Transfer {
        /// Which.
        transfer: TransferId,
        /// One past its last slot.
        got: u64,
        /// Slots of the lease.
        want: u64,
    },
    /// A reply to a request that nobody made, or of another kind.
    #[error("reply {0} answers nothing")]
    UnknownReply(RequestSeq),
    /// A delivery of pages that this process has not verified (S2).
    #[error("{got} pages are verified, and {want} were said to be delivered")]
    Unverified {
        /// Pages that were verified, and are.
        got: u64,
        /// Pages of the lease.
        want: u64,
    },
    /// A delivery of a transfer that was not finished.
    #[error("transfer {0} was delivered before it was finished")]
    Unfinished(TransferId),
}

impl From<&FrameError> for Closed {
    fn from(error: &FrameError) -> Self {
        if let FrameError::Io(error) = error {
            return Self::Io(error.kind());
        }
        // A daemon that dies while it writes.
        let torn = matches!(
            error,
            FrameError::EndInBody { .. } | FrameError::EndInHeader { .. }
        );
        if torn {
            Self::Daemon
        } else {
            Self::Misbehaved(Misbehaviour::Frame)
        }
    }
}

impl From<Misbehaviour> for Closed {
    fn from(misbehaviour: Misbehaviour) -> Self {
        Self::Misbehaved(misbehaviour)
    }
}
