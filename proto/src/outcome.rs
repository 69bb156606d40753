//! How a transfer can end, and why.
//!
//! One table gives each reason its wire code, its metric label and its text, so that none of the
//! three can drift from the others. A reason carries the two numbers that were compared, where
//! there are two.

macro_rules! reasons {
    (@numbers) => { (0, 0) };
    (@numbers $got:ident $want:ident) => { ($got, $want) };
    (
        $(#[$doc:meta])* $name:ident {
            $( $(#[$vdoc:meta])* $variant:ident $({ $got:ident, $want:ident })?
               = $code:literal, $label:literal, $text:literal; )+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd, thiserror::Error)]
        #[non_exhaustive]
        pub enum $name {
            /// A code that this version does not know, from a newer daemon.
            #[error("reason {code} (number {detail}), which this version does not know")]
            Unrecognised {
                /// The code.
                code: u64,
                /// Its first number.
                detail: u64,
            },
            $( $(#[$vdoc])* #[error($text)] $variant $({
                #[doc = concat!("See the variant: ", stringify!($got), ".")] $got: u64,
                #[doc = concat!("See the variant: ", stringify!($want), ".")] $want: u64,
            })?, )+
        }

        impl $name {
            /// Every reason's wire code and metric label, but for [`Self::Unrecognised`].
            pub const TABLE: &'static [(u32, &'static str)] = &[$(($code, $label)),+];

            /// The reason's number on every wire.
            #[must_use]
            pub fn code(&self) -> u32 {
                match self {
                    Self::Unrecognised { code, .. } => u32::try_from(*code).unwrap_or(u32::MAX),
                    $( Self::$variant { .. } => $code, )+
                }
            }

            /// The reason's value of a metric's `reason` label.
            #[must_use]
            pub const fn label(&self) -> &'static str {
                match self {
                    Self::Unrecognised { .. } => "unrecognised",
                    $( Self::$variant { .. } => $label, )+
                }
            }

            /// The two numbers that were compared, 0 where there are none.
            #[must_use]
            pub const fn numbers(&self) -> (u64, u64) {
                match *self {
                    Self::Unrecognised { detail, .. } => (detail, 0),
                    $( Self::$variant $({ $got, $want })? => reasons!(@numbers $($got $want)?), )+
                }
            }

            /// The reason of a wire code and its numbers.
            #[must_use]
            #[allow(unused_variables, reason = "a reason without numbers ignores them")]
            pub fn from_code(code: u32, got: u64, want: u64) -> Self {
                match code {
                    $( $code => Self::$variant $({ $got: got, $want: want })?, )+
                    _ => Self::Unrecognised { code: u64::from(code), detail: got },
                }
            }
        }
    };
}

reasons! {
    /// Why a request was turned away. Nothing was written; nothing of it is live.
    Rejection {
        /// More tokens than the pool's advertised context.
        ExceedsContext { tokens, context } = 1, "exceeds_context",
            "the request has {tokens} tokens, and the context has {context}";
        /// More slots than the pool has, busy or not.
        ExceedsPool { slots_needed, slots } = 2, "exceeds_pool",
            "the request needs {slots_needed} slots, and the pool has {slots}";
        /// More slots than are free just now; worth trying again.
        Busy { slots_needed, slots_free } = 3, "busy",
            "the request needs {slots_needed} slots, and {slots_free} are free now";
        /// More than a protocol bound.
        ExceedsLimit { value, limit } = 4, "exceeds_limit",
            "a value of {value} exceeds the protocol's limit of {limit}";
        /// The pool cannot hold the context that it advertises.
        PoolTooSmall { tokens, context } = 5, "pool_too_small",
            "the pool holds {tokens} tokens, and advertises a context of {context}";
        /// The registered memory is smaller than the pool's layout needs.
        MemoryTooSmall { bytes, bytes_needed } = 6, "memory_too_small",
            "the memory has {bytes} bytes, and the layout needs {bytes_needed}";
        /// A layout with a zero, or a token range that starts inside a slot.
        Malformed { value, bound } = 7, "malformed",
            "a value of {value} is not allowed here (bound {bound})";
        /// The engine may not act for that tenant.
        TenantNotAllowed = 8, "tenant_not_allowed",
            "the engine may not act for this tenant";
        /// The two pools' layouts differ. Never skipped, never converted in silence.
        LayoutMismatch { page_bytes, page_bytes_wanted } = 9, "layout_mismatch",
            "the layouts differ (page of {page_bytes} bytes, destination has {page_bytes_wanted})";
        /// The source's lease does not cover the tokens that the offer asks for.
        TokensMismatch { tokens, tokens_wanted } = 10, "tokens_mismatch",
            "the source holds {tokens} of the tokens, and the offer asks for {tokens_wanted}";
        /// The offer's MAC is wrong, or it is not an offer at all.
        OfferForged = 11, "offer_forged",
            "the offer was not made by the daemon that it names";
        /// The offer is past its time.
        OfferExpired = 12, "offer_expired",
            "the offer has expired";
        /// The offer was made by an earlier life of the daemon.
        OfferStale { incarnation, incarnation_now } = 13, "offer_stale",
            "the offer is from incarnation {incarnation}, and the daemon is in {incarnation_now}";
        /// The offer is being used, or was used, or its lease has ended.
        OfferUsed = 14, "offer_used",
            "the offer was used already, or its lease has ended";
        /// The offer is for another tenant than the source's lease.
        TenantMismatch = 15, "tenant_mismatch",
            "the offer and the source's lease are for different tenants";
        /// No data plane that both daemons allow.
        NoCommonPlane = 16, "no_common_plane",
            "the two daemons have no data plane in common";
        /// The destination is not on the allow-list, or cannot be reached.
        PeerUnreachable = 17, "peer_unreachable",
            "the destination daemon cannot be reached";
        /// The daemon is shutting down.
        ShuttingDown = 18, "shutting_down",
            "the daemon is shutting down";
        /// A slot that the engine named is held, or named twice.
        SlotNotFree { slot, slots } = 19, "slot_not_free",
            "slot {slot} is not free (the pool has {slots})";
        /// The lease is not the engine's, or not of the kind that this needs.
        NoSuchLease { lease, engine } = 20, "no_such_lease",
            "lease {lease} is not one that engine {engine} can use for this";
        /// The pool is not the engine's.
        NoSuchPool { pool, engine } = 21, "no_such_pool",
            "pool {pool} is not one of engine {engine}";
        /// The engine's name is not in the daemon's configuration.
        EngineNotAllowed = 22, "engine_not_allowed",
            "the engine is not in the daemon's configuration";
        /// The two sides speak different versions of the protocol.
        VersionMismatch { version, version_wanted } = 23, "version_mismatch",
            "the peer speaks version {version}, and this daemon {version_wanted}";
        /// Device memory, and a plane besides `verbs` that would have to read and write it.
        DeviceMemoryNotReached = 24, "device_memory_not_reached",
            "device memory is moved by RDMA devices alone: this daemon needs planes = [\"verbs\"]";
        /// Device memory, which the daemon cannot overwrite between two tenants.
        DeviceMemoryNotScrubbed = 25, "device_memory_not_scrubbed",
            "this daemon cannot overwrite device memory: it needs scrub.policy = \"never\"";
        /// Device memory that a port cannot register: its driver lacks that, most likely.
        DeviceMemoryRefused { errno, bytes } = 26, "device_memory_refused",
            "an RDMA device refused {bytes} bytes of device memory (errno {errno})";
    }
}

reasons! {
    /// Who ended a transfer on purpose.
    Abort {
        /// The decode side: its client went, or its lease ended.
        Destination = 1, "destination", "the destination aborted";
        /// The prefill side.
        Source = 2, "source", "the source aborted";
        /// A daemon is shutting down.
        Shutdown = 3, "shutdown", "a daemon is shutting down";
    }
}

reasons! {
    /// What went wrong. No byte of a failed transfer can be read.
    Failure {
        /// The link to the peer broke, or the peer died.
        LinkLost = 1, "link_lost", "the link to the peer was lost";
        /// The link broke after the commit: the destination alone knows whether it delivered.
        VerdictUnknown = 2, "verdict_unknown",
            "the link to the destination was lost before its verdict: it may have delivered";
        /// No byte, checksum or commit came for too long.
        Silent { waited_ms, limit_ms } = 3, "silent",
            "the writer was silent for {waited_ms} ms (limit {limit_ms})";
        /// The writer committed or stopped, and its drain did not arrive in time.
        DrainLate { waited_ms, limit_ms } = 4, "drain_late",
            "the drain did not arrive within {waited_ms} ms (limit {limit_ms})";
        /// The writer drained, and its commit did not arrive in time.
        CommitLate { waited_ms, limit_ms } = 5, "commit_late",
            "the commit did not arrive within {waited_ms} ms (limit {limit_ms})";
        /// The engine did not verify in time.
        VerifyLate { waited_ms, limit_ms } = 6, "verify_late",
            "the engine did not verify within {waited_ms} ms (limit {limit_ms})";
        /// The manifest's digest is not that of the lease and the checksums that arrived.
        ManifestMismatch = 7, "manifest_mismatch",
            "the manifest does not match the lease";
        /// Checksums are missing at the commit.
        PagesMissing { pages, pages_wanted } = 8, "pages_missing",
            "{pages} pages were committed, and the lease has {pages_wanted}";
        /// Pages were still corrupt after the last attempt.
        Corrupt { pages, attempts } = 9, "corrupt",
            "{pages} pages were still corrupt after {attempts} attempts";
        /// No prefill engine used the offer in time.
        OfferUnused { waited_ms, limit_ms } = 10, "offer_unused",
            "nobody used the offer within {waited_ms} ms (limit {limit_ms})";
        /// The data plane failed.
        Plane = 11, "plane", "the data plane failed";
        /// The destination did not answer in time.
        OpenLate { waited_ms, limit_ms } = 12, "open_late",
            "the destination did not answer within {waited_ms} ms (limit {limit_ms})";
        /// The engine's session with its daemon ended.
        EngineGone = 13, "engine_gone", "the engine's session ended";
        /// The session with the local daemon ended (said by the SDK alone).
        DaemonGone = 14, "daemon_gone", "the session with the local daemon ended";
        /// The peer broke the protocol.
        PeerMisbehaved = 15, "peer_misbehaved", "the peer broke the protocol";
        /// The destination gave no verdict in time.
        VerdictLate { waited_ms, limit_ms } = 16, "verdict_late",
            "the destination gave no verdict within {waited_ms} ms (limit {limit_ms})";
    }
}

/// How a transfer or a lease's delivery ended. There is no flag beside it that says "finished".
// S3: one of four, and only `Delivered` leads to bytes.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Outcome {
    /// Every page was verified at the destination.
    Delivered,
    /// Turned away before anything was written.
    Rejected(Rejection),
    /// Ended on purpose.
    Aborted(Abort),
    /// Went wrong.
    Failed(Failure),
}

impl Outcome {
    /// The metric label of the outcome's kind.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Delivered => "delivered",
            Self::Rejected(_) => "rejected",
            Self::Aborted(_) => "aborted",
            Self::Failed(_) => "failed",
        }
    }

    /// The metric label of the outcome's reason.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Delivered => "none",
            Self::Rejected(reason) => reason.label(),
            Self::Aborted(reason) => reason.label(),
            Self::Failed(reason) => reason.label(),
        }
    }
}

impl core::fmt::Display for Outcome {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Delivered => f.write_str("delivered"),
            Self::Rejected(reason) => write!(f, "rejected: {reason}"),
            Self::Aborted(reason) => write!(f, "aborted: {reason}"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire() {
        for (code, label) in Rejection::TABLE {
            let reason = Rejection::from_code(*code, 1, 2);
            assert_eq!((reason.code(), reason.label()), (*code, *label));
        }
        for (code, label) in Failure::TABLE {
            let reason = Failure::from_code(*code, 1, 2);
            assert_eq!((reason.code(), reason.label()), (*code, *label));
        }
        let full = Rejection::ExceedsContext {
            tokens: 9,
            context: 8,
        };
        assert_eq!(full.numbers(), (9, 8));
        assert_eq!(
            full.to_string(),
            "the request has 9 tokens, and the context has 8"
        );
    }

    #[test]
    fn a_code_from_a_newer_version_is_kept() {
        let reason = Failure::from_code(999, 5, 6);
        assert_eq!(
            reason,
            Failure::Unrecognised {
                code: 999,
                detail: 5
            }
        );
        assert_eq!(reason.code(), 999);
    }
}
