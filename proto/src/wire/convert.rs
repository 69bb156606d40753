//! Between the protocol buffers and the typed messages. Every bound of a field is checked here.

#![expect(
    clippy::too_many_lines,
    reason = "one arm for each message, and nothing else"
)]

use alloc::vec::Vec;

use bytes::Bytes;

use super::{AbortPolicy, Checksums, DecodeError, PlaneKind, Purpose, pb, slot_ref};
use super::{PeerMessage, ToDaemon, ToEngine};
use crate::ids::{
    EngineId, EngineName, GrantId, Incarnation, LeaseId, NodeId, PoolId, RequestId, RequestSeq,
    Secret, SlotIndex, SlotRef, Tag, TenantId, TransferId,
};
use crate::limits;
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{Arrangement, Layout, PageRef, PageRun, PoolSpec, TokenRange};

type Decoded<T> = Result<T, DecodeError>;

pub(super) fn required<T>(field: &'static str, value: Option<T>) -> Decoded<T> {
    value.ok_or(DecodeError::Field {
        field,
        got: 0,
        want: 1,
    })
}

pub(super) fn array(field: &'static str, bytes: &Bytes) -> Decoded<[u8; 32]> {
    let got = bytes.len() as u64;
    bytes[..].try_into().map_err(|_| DecodeError::Field {
        field,
        got,
        want: 32,
    })
}

pub(super) fn incarnation(value: u64) -> Decoded<Incarnation> {
    required("incarnation", Incarnation::new(value))
}

macro_rules! name {
    ($function:ident, $type:ident, $field:literal) => {
        pub(super) fn $function(name: &str) -> Decoded<$type> {
            $type::new(name).map_err(|_| DecodeError::Field {
                field: $field,
                got: name.len() as u64,
                want: limits::NAME_BYTES_MAX as u64,
            })
        }
    };
}

name!(tenant, TenantId, "tenant");
name!(request, RequestId, "request");
name!(engine_name, EngineName, "name");

fn small<T: TryFrom<u32>>(field: &'static str, value: u32, want: u64) -> Decoded<T> {
    T::try_from(value).map_err(|_| DecodeError::Field {
        field,
        got: u64::from(value),
        want,
    })
}

fn region(value: u32) -> Decoded<u16> {
    small("region", value, u64::from(u16::MAX))
}

fn bounded(field: &'static str, got: usize, want: usize) -> Decoded<()> {
    if got <= want {
        return Ok(());
    }
    Err(DecodeError::Field {
        field,
        got: got as u64,
        want: want as u64,
    })
}

fn payload(payload: Bytes) -> Decoded<Bytes> {
    bounded("payload", payload.len(), limits::PAYLOAD_BYTES_MAX)?;
    Ok(payload)
}

fn offer(offer: Bytes) -> Decoded<Bytes> {
    bounded("offer", offer.len(), limits::OFFER_BYTES_MAX)?;
    Ok(offer)
}

fn copied(bytes: &[u8; 32]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

impl From<&Layout> for pb::Layout {
    fn from(layout: &Layout) -> Self {
        Self {
            model: copied(&layout.model.0),
            regions: u32::from(layout.regions),
            page_bytes: layout.page_bytes,
            tokens_per_slot: u32::from(layout.tokens_per_slot),
        }
    }
}

impl TryFrom<pb::Layout> for Layout {
    type Error = DecodeError;

    fn try_from(layout: pb::Layout) -> Decoded<Self> {
        Ok(Self {
            model: Tag(array("layout.model", &layout.model)?),
            regions: small(
                "layout.regions",
                layout.regions,
                u64::from(limits::REGIONS_MAX),
            )?,
            page_bytes: layout.page_bytes,
            tokens_per_slot: small(
                "layout.tokens_per_slot",
                layout.tokens_per_slot,
                u64::from(u16::MAX),
            )?,
        })
    }
}

impl From<&PoolSpec> for pb::PoolSpec {
    fn from(spec: &PoolSpec) -> Self {
        let arrangement = match spec.arrangement {
            Arrangement::RegionMajor => 1,
            Arrangement::SlotMajor => 2,
        };
        Self {
            layout: Some((&spec.layout).into()),
            slots: spec.slots,
            arrangement,
            context_tokens: spec.context_tokens,
        }
    }
}

impl TryFrom<pb::PoolSpec> for PoolSpec {
    type Error = DecodeError;

    fn try_from(spec: pb::PoolSpec) -> Decoded<Self> {
        let arrangement = match spec.arrangement {
            1 => Arrangement::RegionMajor,
            2 => Arrangement::SlotMajor,
            got => {
                return Err(DecodeError::Field {
                    field: "pool.arrangement",
                    got: u64::from(got),
                    want: 2,
                });
            }
        };
        Ok(Self {
            layout: required("pool.layout", spec.layout)?.try_into()?,
            slots: spec.slots,
            arrangement,
            context_tokens: spec.context_tokens,
        })
    }
}

impl From<TokenRange> for pb::TokenRange {
    fn from(range: TokenRange) -> Self {
        Self {
            start: range.start,
            count: range.count,
        }
    }
}

impl From<pb::TokenRange> for TokenRange {
    fn from(range: pb::TokenRange) -> Self {
        Self {
            start: range.start,
            count: range.count,
        }
    }
}

impl From<&[SlotRef]> for pb::SlotRefs {
    fn from(slots: &[SlotRef]) -> Self {
        Self {
            index: slots.iter().map(|slot| slot.index.0).collect(),
            epoch: slots.iter().map(|slot| slot.epoch.as_u64()).collect(),
        }
    }
}

impl TryFrom<pb::SlotRefs> for Vec<SlotRef> {
    type Error = DecodeError;

    fn try_from(slots: pb::SlotRefs) -> Decoded<Self> {
        same_length("slots", slots.index.len(), slots.epoch.len())?;
        bounded("slots", slots.index.len(), limits::LEASE_SLOTS_MAX as usize)?;
        slots
            .index
            .iter()
            .zip(&slots.epoch)
            .map(|(&index, &epoch)| slot_ref(index, epoch))
            .collect()
    }
}

fn same_length(field: &'static str, got: usize, want: usize) -> Decoded<()> {
    if got == want {
        return Ok(());
    }
    Err(DecodeError::Field {
        field,
        got: got as u64,
        want: want as u64,
    })
}

impl From<&[PageRef]> for pb::PageRefs {
    fn from(pages: &[PageRef]) -> Self {
        Self {
            region: pages.iter().map(|page| u32::from(page.region)).collect(),
            position: pages.iter().map(|page| page.position).collect(),
        }
    }
}

impl TryFrom<pb::PageRefs> for Vec<PageRef> {
    type Error = DecodeError;

    fn try_from(pages: pb::PageRefs) -> Decoded<Self> {
        same_length("pages", pages.region.len(), pages.position.len())?;
        let pages = pages.region.iter().zip(pages.position);
        pages
            .map(|(&r, position)| {
                Ok(PageRef {
                    region: region(r)?,
                    position,
                })
            })
            .collect()
    }
}

impl From<&[PageRun]> for pb::PageRuns {
    fn from(runs: &[PageRun]) -> Self {
        Self {
            region: runs.iter().map(|run| u32::from(run.region)).collect(),
            first: runs.iter().map(|run| run.first).collect(),
            count: runs.iter().map(|run| run.count).collect(),
        }
    }
}

impl TryFrom<pb::PageRuns> for Vec<PageRun> {
    type Error = DecodeError;

    fn try_from(runs: pb::PageRuns) -> Decoded<Self> {
        same_length("runs", runs.region.len(), runs.first.len())?;
        same_length("runs", runs.region.len(), runs.count.len())?;
        let fields = runs.region.iter().zip(runs.first).zip(runs.count);
        fields
            .map(|((&r, first), count)| {
                // A run of nothing, or one whose end cannot be counted, is no run.
                if count == 0 || first.checked_add(count).is_none() {
                    let got = u64::from(count);
                    return Err(DecodeError::Field {
                        field: "run.count",
                        got,
                        want: 1,
                    });
                }
                Ok(PageRun {
                    region: region(r)?,
                    first,
                    count,
                })
            })
            .collect()
    }
}

impl From<&Checksums> for pb::Checksums {
    fn from(checksums: &Checksums) -> Self {
        Self {
            region: u32::from(checksums.region),
            first: checksums.first,
            crcs: checksums.crcs.clone(),
        }
    }
}

impl TryFrom<pb::Checksums> for Checksums {
    type Error = DecodeError;

    fn try_from(checksums: pb::Checksums) -> Decoded<Self> {
        let count = checksums.crcs.len();
        bounded("checksums", count, limits::CHECKSUMS_PER_MESSAGE_MAX)?;
        let count = u32::try_from(count).expect("the bound above fits");
        if count == 0 || checksums.first.checked_add(count).is_none() {
            let got = u64::from(count);
            return Err(DecodeError::Field {
                field: "checksums",
                got,
                want: 1,
            });
        }
        Ok(Self {
            region: region(checksums.region)?,
            first: checksums.first,
            crcs: checksums.crcs,
        })
    }
}

fn checksums(value: Option<pb::Checksums>) -> Decoded<Checksums> {
    required("checksums", value)?.try_into()
}

macro_rules! reason {
    ($encode:ident, $decode:ident, $type:ident) => {
        fn $encode(reason: &$type) -> pb::Reason {
            let (got, want) = reason.numbers();
            pb::Reason {
                code: reason.code(),
                got,
                want,
            }
        }

        fn $decode(reason: Option<pb::Reason>) -> Decoded<$type> {
            let reason = required("reason", reason)?;
            Ok($type::from_code(reason.code, reason.got, reason.want))
        }
    };
}

reason!(encode_rejection, decode_rejection, Rejection);
reason!(encode_abort, decode_abort, Abort);
reason!(encode_failure, decode_failure, Failure);

impl From<&Outcome> for pb::Outcome {
    fn from(outcome: &Outcome) -> Self {
        let (kind, reason) = match outcome {
            Outcome::Delivered => (1, None),
            Outcome::Rejected(reason) => (2, Some(encode_rejection(reason))),
            Outcome::Aborted(reason) => (3, Some(encode_abort(reason))),
            Outcome::Failed(reason) => (4, Some(encode_failure(reason))),
        };
        Self { kind, reason }
    }
}

fn outcome(outcome: Option<pb::Outcome>) -> Decoded<Outcome> {
    let outcome = required("outcome", outcome)?;
    match outcome.kind {
        1 => Ok(Outcome::Delivered),
        2 => Ok(Outcome::Rejected(decode_rejection(outcome.reason)?)),
        3 => Ok(Outcome::Aborted(decode_abort(outcome.reason)?)),
        4 => Ok(Outcome::Failed(decode_failure(outcome.reason)?)),
        // S3: an unknown kind is an error, never read as some other outcome.
        kind => Err(DecodeError::Field {
            field: "outcome.kind",
            got: u64::from(kind),
            want: 4,
        }),
    }
}

fn encode_plane(plane: PlaneKind) -> u32 {
    match plane {
        PlaneKind::Quic => 1,
        PlaneKind::Shm => 2,
        PlaneKind::Verbs => 3,
    }
}

fn plane(plane: u32) -> Decoded<PlaneKind> {
    match plane {
        1 => Ok(PlaneKind::Quic),
        2 => Ok(PlaneKind::Shm),
        3 => Ok(PlaneKind::Verbs),
        got => Err(DecodeError::Field {
            field: "plane",
            got: u64::from(got),
            want: 3,
        }),
    }
}

impl From<&ToDaemon> for pb::ToDaemon {
    fn from(message: &ToDaemon) -> Self {
        use pb::to_daemon::Body;
        let body = match message {
            ToDaemon::Hello { version, name } => Body::Hello(pb::Hello {
                version: *version,
                name: name.as_str().into(),
            }),
            ToDaemon::RegisterPool { seq, spec } => Body::RegisterPool(pb::RegisterPool {
                seq: seq.0,
                spec: Some(spec.into()),
            }),
            ToDaemon::Lease {
                seq,
                pool,
                tenant,
                request,
                tokens,
                purpose,
                named,
            } => Body::Lease(pb::Lease {
                seq: seq.0,
                pool: pool.0,
                tenant: tenant.as_str().into(),
                request: request.as_str().into(),
                tokens: Some((*tokens).into()),
                purpose: match purpose {
                    Purpose::Hold => 1,
                    Purpose::Receive => 2,
                },
                named: named.iter().map(|slot| slot.0).collect(),
            }),
            ToDaemon::EndLease { lease, abort } => Body::EndLease(pb::EndLease {
                lease: lease.0,
                abort: match abort {
                    None => 0,
                    Some(AbortPolicy::FinishTransfer) => 1,
                    Some(AbortPolicy::DrainNow) => 2,
                },
            }),
            ToDaemon::Send { seq, lease, offer } => Body::Send(pb::Send {
                seq: seq.0,
                lease: lease.0,
                offer: offer.clone(),
            }),
            ToDaemon::Seal {
                transfer,
                checksums,
            } => Body::Seal(pb::Seal {
                transfer: transfer.0,
                checksums: Some(checksums.into()),
            }),
            ToDaemon::Finish { transfer, payload } => Body::Finish(pb::Finish {
                transfer: transfer.0,
                payload: payload.clone(),
            }),
            ToDaemon::AbortSend { transfer } => Body::AbortSend(pb::AbortSend {
                transfer: transfer.0,
            }),
            ToDaemon::Verified {
                lease,
                attempt,
                corrupt,
            } => Body::Verified(pb::Verified {
                lease: lease.0,
                attempt: *attempt,
                corrupt: Some(corrupt[..].into()),
            }),
        };
        Self { body: Some(body) }
    }
}

impl TryFrom<pb::ToDaemon> for ToDaemon {
    type Error = DecodeError;

    fn try_from(message: pb::ToDaemon) -> Decoded<Self> {
        use pb::to_daemon::Body;
        Ok(match required("body", message.body)? {
            Body::Hello(hello) => Self::Hello {
                version: hello.version,
                name: engine_name(&hello.name)?,
            },
            Body::RegisterPool(register) => Self::RegisterPool {
                seq: RequestSeq(register.seq),
                spec: required("pool", register.spec)?.try_into()?,
            },
            Body::Lease(lease) => decode_lease(lease)?,
            Body::EndLease(end) => Self::EndLease {
                lease: LeaseId(end.lease),
                abort: match end.abort {
                    0 => None,
                    1 => Some(AbortPolicy::FinishTransfer),
                    2 => Some(AbortPolicy::DrainNow),
                    got => {
                        let got = u64::from(got);
                        return Err(DecodeError::Field {
                            field: "abort",
                            got,
                            want: 2,
                        });
                    }
                },
            },
            Body::Send(send) => Self::Send {
                seq: RequestSeq(send.seq),
                lease: LeaseId(send.lease),
                offer: offer(send.offer)?,
            },
            Body::Seal(seal) => Self::Seal {
                transfer: TransferId(seal.transfer),
                checksums: checksums(seal.checksums)?,
            },
            Body::Finish(finish) => Self::Finish {
                transfer: TransferId(finish.transfer),
                payload: payload(finish.payload)?,
            },
            Body::AbortSend(abort) => Self::AbortSend {
                transfer: TransferId(abort.transfer),
            },
            Body::Verified(verified) => Self::Verified {
                lease: LeaseId(verified.lease),
                attempt: verified.attempt,
                corrupt: required("corrupt", verified.corrupt)?.try_into()?,
            },
        })
    }
}

fn decode_lease(lease: pb::Lease) -> Decoded<ToDaemon> {
    bounded("named", lease.named.len(), limits::LEASE_SLOTS_MAX as usize)?;
    Ok(ToDaemon::Lease {
        seq: RequestSeq(lease.seq),
        pool: PoolId(lease.pool),
        tenant: tenant(&lease.tenant)?,
        request: request(&lease.request)?,
        tokens: required("tokens", lease.tokens)?.into(),
        purpose: match lease.purpose {
            1 => Purpose::Hold,
            2 => Purpose::Receive,
            got => {
                let got = u64::from(got);
                return Err(DecodeError::Field {
                    field: "purpose",
                    got,
                    want: 2,
                });
            }
        },
        named: lease.named.into_iter().map(SlotIndex).collect(),
    })
}

impl From<&ToEngine> for pb::ToEngine {
    fn from(message: &ToEngine) -> Self {
        use pb::to_engine::Body;
        let body = match message {
            ToEngine::Welcome {
                version,
                node,
                incarnation,
                engine,
            } => Body::Welcome(pb::Welcome {
                version: *version,
                node: copied(&node.0),
                incarnation: incarnation.as_u64(),
                engine: engine.0,
            }),
            ToEngine::Rejected { seq, reason } => Body::Rejected(pb::Rejected {
                seq: seq.0,
                reason: Some(encode_rejection(reason)),
            }),
            ToEngine::PoolRegistered { seq, pool } => Body::PoolRegistered(pb::PoolRegistered {
                seq: seq.0,
                pool: pool.0,
            }),
            ToEngine::Leased {
                seq,
                lease,
                slots,
                offer,
            } => Body::Leased(pb::Leased {
                seq: seq.0,
                lease: lease.0,
                slots: Some(slots[..].into()),
                offer: offer.clone(),
            }),
            ToEngine::SendOpened {
                seq,
                transfer,
                slots,
                offset,
            } => {
                let (transfer, slots, offset) = (transfer.0, *slots, *offset);
                Body::SendOpened(pb::SendOpened {
                    seq: seq.0,
                    transfer,
                    slots,
                    offset,
                })
            }
            ToEngine::SendOutcome { transfer, outcome } => {
                let outcome = Some(outcome.into());
                Body::SendOutcome(pb::SendOutcome {
                    transfer: transfer.0,
                    outcome,
                })
            }
            ToEngine::Expect { lease, checksums } => Body::Expect(pb::Expect {
                lease: lease.0,
                checksums: Some(checksums.into()),
            }),
            ToEngine::Verify {
                lease,
                attempt,
                pages,
                payload,
            } => Body::Verify(pb::Verify {
                lease: lease.0,
                attempt: *attempt,
                pages: Some(pages[..].into()),
                payload: payload.clone(),
            }),
            ToEngine::LeaseOutcome { lease, outcome } => {
                let outcome = Some(outcome.into());
                Body::LeaseOutcome(pb::LeaseOutcome {
                    lease: lease.0,
                    outcome,
                })
            }
        };
        Self { body: Some(body) }
    }
}

impl TryFrom<pb::ToEngine> for ToEngine {
    type Error = DecodeError;

    fn try_from(message: pb::ToEngine) -> Decoded<Self> {
        use pb::to_engine::Body;
        Ok(match required("body", message.body)? {
            Body::Welcome(welcome) => Self::Welcome {
                version: welcome.version,
                node: NodeId(array("node", &welcome.node)?),
                incarnation: incarnation(welcome.incarnation)?,
                engine: EngineId(welcome.engine),
            },
            Body::Rejected(rejected) => Self::Rejected {
                seq: RequestSeq(rejected.seq),
                reason: decode_rejection(rejected.reason)?,
            },
            Body::PoolRegistered(registered) => Self::PoolRegistered {
                seq: RequestSeq(registered.seq),
                pool: PoolId(registered.pool),
            },
            Body::Leased(leased) => Self::Leased {
                seq: RequestSeq(leased.seq),
                lease: LeaseId(leased.lease),
                slots: required("slots", leased.slots)?.try_into()?,
                offer: leased.offer.map(offer).transpose()?,
            },
            Body::SendOpened(opened) => Self::SendOpened {
                seq: RequestSeq(opened.seq),
                transfer: TransferId(opened.transfer),
                slots: opened.slots,
                offset: opened.offset,
            },
            Body::SendOutcome(ended) => Self::SendOutcome {
                transfer: TransferId(ended.transfer),
                outcome: outcome(ended.outcome)?,
            },
            Body::Expect(expect) => Self::Expect {
                lease: LeaseId(expect.lease),
                checksums: checksums(expect.checksums)?,
            },
            Body::Verify(verify) => Self::Verify {
                lease: LeaseId(verify.lease),
                attempt: verify.attempt,
                pages: required("pages", verify.pages)?.try_into()?,
                payload: payload(verify.payload)?,
            },
            Body::LeaseOutcome(ended) => Self::LeaseOutcome {
                lease: LeaseId(ended.lease),
                outcome: outcome(ended.outcome)?,
            },
        })
    }
}

impl From<&PeerMessage> for pb::PeerMessage {
    fn from(message: &PeerMessage) -> Self {
        use pb::peer_message::Body;
        let body = match message {
            PeerMessage::Hello {
                version,
                incarnation,
                planes,
                host,
                shm_path,
            } => Body::Hello(pb::PeerHello {
                version: *version,
                incarnation: incarnation.as_u64(),
                planes: planes.iter().map(|plane| encode_plane(*plane)).collect(),
                host: copied(&host.0),
                shm_path: shm_path.clone(),
            }),
            PeerMessage::Open {
                transfer,
                offer,
                layout,
                tokens,
                tenant,
                plane,
            } => Body::Open(pb::Open {
                transfer: transfer.0,
                offer: offer.clone(),
                layout: Some(layout.into()),
                tokens: Some((*tokens).into()),
                tenant: tenant.as_str().into(),
                plane: encode_plane(*plane),
            }),
            PeerMessage::Refused { transfer, reason } => {
                let reason = Some(encode_rejection(reason));
                Body::Refused(pb::Refused {
                    transfer: transfer.0,
                    reason,
                })
            }
            PeerMessage::Granted { .. } => Body::Granted(encode_granted(message)),
            PeerMessage::Checksums { grant, checksums } => Body::Checksums(pb::PeerChecksums {
                grant: grant.0,
                checksums: Some(checksums.into()),
            }),
            PeerMessage::Commit {
                grant,
                digest,
                payload,
            } => Body::Commit(pb::Commit {
                grant: grant.0,
                digest: copied(&digest.0),
                payload: payload.clone(),
            }),
            PeerMessage::Cancel {
                transfer,
                drain_follows,
            } => Body::Cancel(pb::Cancel {
                transfer: transfer.0,
                drain_follows: *drain_follows,
            }),
            PeerMessage::DrainRequest { grant } => {
                Body::DrainRequest(pb::DrainRequest { grant: grant.0 })
            }
            PeerMessage::Verdict { transfer, outcome } => Body::Verdict(pb::Verdict {
                transfer: transfer.0,
                outcome: Some(outcome.into()),
            }),
        };
        Self { body: Some(body) }
    }
}

fn encode_granted(message: &PeerMessage) -> pb::Granted {
    let PeerMessage::Granted {
        transfer,
        grant,
        slots,
        plane_key,
        manifest_key,
        outstanding_bytes_max,
        pages,
    } = message
    else {
        unreachable!("called for a grant alone");
    };
    pb::Granted {
        transfer: transfer.0,
        grant: grant.0,
        slots: Some(slots[..].into()),
        plane_key: copied(&plane_key.0),
        manifest_key: copied(&manifest_key.0),
        outstanding_bytes_max: *outstanding_bytes_max,
        pages: Some(pages[..].into()),
    }
}

impl TryFrom<pb::PeerMessage> for PeerMessage {
    type Error = DecodeError;

    fn try_from(message: pb::PeerMessage) -> Decoded<Self> {
        use pb::peer_message::Body;
        Ok(match required("body", message.body)? {
            Body::Hello(hello) => {
                bounded("planes", hello.planes.len(), 8)?;
                bounded("shm_path", hello.shm_path.len(), 108)?;
                Self::Hello {
                    version: hello.version,
                    incarnation: incarnation(hello.incarnation)?,
                    // A plane that only a newer version knows is one that we do not share.
                    planes: hello
                        .planes
                        .iter()
                        .filter_map(|&kind| plane(kind).ok())
                        .collect(),
                    host: Tag(array("host", &hello.host)?),
                    shm_path: hello.shm_path,
                }
            }
            Body::Open(open) => Self::Open {
                transfer: TransferId(open.transfer),
                offer: offer(open.offer)?,
                layout: required("layout", open.layout)?.try_into()?,
                tokens: required("tokens", open.tokens)?.into(),
                tenant: tenant(&open.tenant)?,
                plane: plane(open.plane)?,
            },
            Body::Refused(refused) => Self::Refused {
                transfer: TransferId(refused.transfer),
                reason: decode_rejection(refused.reason)?,
            },
            Body::Granted(granted) => Self::Granted {
                transfer: TransferId(granted.transfer),
                grant: GrantId(granted.grant),
                slots: required("slots", granted.slots)?.try_into()?,
                plane_key: Secret(array("plane_key", &granted.plane_key)?),
                manifest_key: Secret(array("manifest_key", &granted.manifest_key)?),
                outstanding_bytes_max: granted.outstanding_bytes_max,
                pages: required("pages", granted.pages)?.try_into()?,
            },
            Body::Checksums(part) => Self::Checksums {
                grant: GrantId(part.grant),
                checksums: checksums(part.checksums)?,
            },
            Body::Commit(commit) => Self::Commit {
                grant: GrantId(commit.grant),
                digest: Tag(array("digest", &commit.digest)?),
                payload: payload(commit.payload)?,
            },
            Body::Cancel(cancel) => Self::Cancel {
                transfer: TransferId(cancel.transfer),
                drain_follows: cancel.drain_follows,
            },
            Body::DrainRequest(request) => Self::DrainRequest {
                grant: GrantId(request.grant),
            },
            Body::Verdict(verdict) => Self::Verdict {
                transfer: TransferId(verdict.transfer),
                outcome: outcome(verdict.outcome)?,
            },
        })
    }
}
