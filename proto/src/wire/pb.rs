//! The protocol buffers, field number by field number. A number is never used for something else.

use alloc::string::String;
use alloc::vec::Vec;

use bytes::Bytes;

macro_rules! message {
    ($(#[$doc:meta])* $name:ident { $( $(#[$attr:meta])* $field:ident : $type:ty, )* }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, prost::Message)]
        pub(super) struct $name { $( $(#[$attr])* pub(super) $field: $type, )* }
    };
}

message!(Layout {
    #[prost(bytes = "bytes", tag = "1")]
    model: Bytes,
    #[prost(uint32, tag = "2")]
    regions: u32,
    #[prost(uint32, tag = "3")]
    page_bytes: u32,
    #[prost(uint32, tag = "4")]
    tokens_per_slot: u32,
});
message!(PoolSpec {
    #[prost(message, optional, tag = "1")] layout: Option<Layout>,
    #[prost(uint32, tag = "2")] slots: u32,
    #[prost(uint32, tag = "3")] arrangement: u32,
    #[prost(uint64, tag = "4")] context_tokens: u64,
});
message!(TokenRange {
    #[prost(uint64, tag = "1")]
    start: u64,
    #[prost(uint64, tag = "2")]
    count: u64,
});
message!(SlotRefs {
    #[prost(uint32, repeated, tag = "1")] index: Vec<u32>,
    #[prost(uint64, repeated, tag = "2")] epoch: Vec<u64>,
});
message!(PageRefs {
    #[prost(uint32, repeated, tag = "1")] region: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")] position: Vec<u32>,
});
message!(PageRuns {
    #[prost(uint32, repeated, tag = "1")] region: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")] first: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")] count: Vec<u32>,
});
message!(Checksums {
    #[prost(uint32, tag = "1")] region: u32,
    #[prost(uint32, tag = "2")] first: u32,
    #[prost(fixed32, repeated, tag = "3")] crcs: Vec<u32>,
});
message!(Reason {
    #[prost(uint32, tag = "1")]
    code: u32,
    #[prost(uint64, tag = "2")]
    got: u64,
    #[prost(uint64, tag = "3")]
    want: u64,
});
message!(Outcome {
    #[prost(uint32, tag = "1")] kind: u32,
    #[prost(message, optional, tag = "2")] reason: Option<Reason>,
});
message!(OfferBody {
    #[prost(bytes = "bytes", tag = "1")] node: Bytes,
    #[prost(uint64, tag = "2")] incarnation: u64,
    #[prost(uint64, tag = "3")] lease: u64,
    #[prost(string, tag = "4")] tenant: String,
    #[prost(string, tag = "5")] request: String,
    #[prost(message, optional, tag = "6")] tokens: Option<TokenRange>,
    #[prost(uint64, tag = "7")] expires_ms: u64,
});
message!(SignedOffer {
    #[prost(bytes = "bytes", tag = "1")]
    body: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    mac: Bytes,
});

message!(Hello {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(string, tag = "2")]
    name: String,
});
message!(RegisterPool {
    #[prost(uint64, tag = "1")] seq: u64,
    #[prost(message, optional, tag = "2")] spec: Option<PoolSpec>,
});
message!(Lease {
    #[prost(uint64, tag = "1")] seq: u64,
    #[prost(uint32, tag = "2")] pool: u32,
    #[prost(string, tag = "3")] tenant: String,
    #[prost(string, tag = "4")] request: String,
    #[prost(message, optional, tag = "5")] tokens: Option<TokenRange>,
    #[prost(uint32, tag = "6")] purpose: u32,
    #[prost(uint32, repeated, tag = "7")] named: Vec<u32>,
});
message!(EndLease {
    #[prost(uint64, tag = "1")]
    lease: u64,
    #[prost(uint32, tag = "2")]
    abort: u32,
});
message!(Send {
    #[prost(uint64, tag = "1")]
    seq: u64,
    #[prost(uint64, tag = "2")]
    lease: u64,
    #[prost(bytes = "bytes", tag = "3")]
    offer: Bytes,
});
message!(Seal {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(message, optional, tag = "2")] checksums: Option<Checksums>,
});
message!(Finish {
    #[prost(uint64, tag = "1")]
    transfer: u64,
    #[prost(bytes = "bytes", tag = "2")]
    payload: Bytes,
});
message!(AbortSend {
    #[prost(uint64, tag = "1")]
    transfer: u64,
});
message!(Verified {
    #[prost(uint64, tag = "1")] lease: u64,
    #[prost(uint32, tag = "2")] attempt: u32,
    #[prost(message, optional, tag = "3")] corrupt: Option<PageRefs>,
});

message!(Welcome {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(bytes = "bytes", tag = "2")]
    node: Bytes,
    #[prost(uint64, tag = "3")]
    incarnation: u64,
    #[prost(uint64, tag = "4")]
    engine: u64,
});
message!(Rejected {
    #[prost(uint64, tag = "1")] seq: u64,
    #[prost(message, optional, tag = "2")] reason: Option<Reason>,
});
message!(PoolRegistered {
    #[prost(uint64, tag = "1")]
    seq: u64,
    #[prost(uint32, tag = "2")]
    pool: u32,
});
message!(Leased {
    #[prost(uint64, tag = "1")] seq: u64,
    #[prost(uint64, tag = "2")] lease: u64,
    #[prost(message, optional, tag = "3")] slots: Option<SlotRefs>,
    #[prost(bytes = "bytes", optional, tag = "4")] offer: Option<Bytes>,
});
message!(SendOpened {
    #[prost(uint64, tag = "1")]
    seq: u64,
    #[prost(uint64, tag = "2")]
    transfer: u64,
    #[prost(uint32, tag = "3")]
    slots: u32,
    #[prost(uint32, tag = "4")]
    offset: u32,
});
message!(SendOutcome {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(message, optional, tag = "2")] outcome: Option<Outcome>,
});
message!(Expect {
    #[prost(uint64, tag = "1")] lease: u64,
    #[prost(message, optional, tag = "2")] checksums: Option<Checksums>,
});
message!(Verify {
    #[prost(uint64, tag = "1")] lease: u64,
    #[prost(uint32, tag = "2")] attempt: u32,
    #[prost(message, optional, tag = "3")] pages: Option<PageRuns>,
    #[prost(bytes = "bytes", tag = "4")] payload: Bytes,
});
message!(LeaseOutcome {
    #[prost(uint64, tag = "1")] lease: u64,
    #[prost(message, optional, tag = "2")] outcome: Option<Outcome>,
});

message!(PeerHello {
    #[prost(uint32, tag = "1")] version: u32,
    #[prost(uint64, tag = "2")] incarnation: u64,
    #[prost(uint32, repeated, tag = "3")] planes: Vec<u32>,
    #[prost(bytes = "bytes", tag = "4")] host: Bytes,
    #[prost(bytes = "bytes", tag = "5")] shm_path: Bytes,
});
message!(Open {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(bytes = "bytes", tag = "2")] offer: Bytes,
    #[prost(message, optional, tag = "3")] layout: Option<Layout>,
    #[prost(message, optional, tag = "4")] tokens: Option<TokenRange>,
    #[prost(string, tag = "5")] tenant: String,
    #[prost(uint32, tag = "6")] plane: u32,
});
message!(Refused {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(message, optional, tag = "2")] reason: Option<Reason>,
});
message!(Granted {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(uint64, tag = "2")] grant: u64,
    #[prost(message, optional, tag = "3")] slots: Option<SlotRefs>,
    #[prost(bytes = "bytes", tag = "4")] plane_key: Bytes,
    #[prost(bytes = "bytes", tag = "5")] manifest_key: Bytes,
    #[prost(uint64, tag = "6")] outstanding_bytes_max: u64,
    #[prost(message, optional, tag = "7")] pages: Option<PageRuns>,
});
message!(PeerChecksums {
    #[prost(uint64, tag = "1")] grant: u64,
    #[prost(message, optional, tag = "2")] checksums: Option<Checksums>,
});
message!(Commit {
    #[prost(uint64, tag = "1")]
    grant: u64,
    #[prost(bytes = "bytes", tag = "2")]
    digest: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    payload: Bytes,
});
message!(Cancel {
    #[prost(uint64, tag = "1")]
    transfer: u64,
    #[prost(bool, tag = "2")]
    drain_follows: bool,
});
message!(DrainRequest {
    #[prost(uint64, tag = "1")]
    grant: u64,
});
message!(Verdict {
    #[prost(uint64, tag = "1")] transfer: u64,
    #[prost(message, optional, tag = "2")] outcome: Option<Outcome>,
});

message!(ToDaemon {
    #[prost(oneof = "to_daemon::Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    body: Option<to_daemon::Body>,
});
message!(ToEngine {
    #[prost(oneof = "to_engine::Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    body: Option<to_engine::Body>,
});
message!(PeerMessage {
    #[prost(oneof = "peer_message::Body", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9")]
    body: Option<peer_message::Body>,
});

macro_rules! bodies {
    ($module:ident { $( $tag:literal $variant:ident($type:ident), )+ }) => {
        pub(super) mod $module {
            #[derive(Clone, PartialEq, prost::Oneof)]
            pub(in crate::wire) enum Body {
                $( #[prost(message, tag = $tag)] $variant(super::$type), )+
            }
        }
    };
}

bodies!(to_daemon {
    "1" Hello(Hello),
    "2" RegisterPool(RegisterPool),
    "3" Lease(Lease),
    "4" EndLease(EndLease),
    "5" Send(Send),
    "6" Seal(Seal),
    "7" Finish(Finish),
    "8" AbortSend(AbortSend),
    "9" Verified(Verified),
});
bodies!(to_engine {
    "1" Welcome(Welcome),
    "2" Rejected(Rejected),
    "3" PoolRegistered(PoolRegistered),
    "4" Leased(Leased),
    "5" SendOpened(SendOpened),
    "6" SendOutcome(SendOutcome),
    "7" Expect(Expect),
    "8" Verify(Verify),
    "9" LeaseOutcome(LeaseOutcome),
});
bodies!(peer_message {
    "1" Hello(PeerHello),
    "2" Open(Open),
    "3" Refused(Refused),
    "4" Granted(Granted),
    "5" Checksums(PeerChecksums),
    "6" Commit(Commit),
    "7" Cancel(Cancel),
    "8" DrainRequest(DrainRequest),
    "9" Verdict(Verdict),
});
