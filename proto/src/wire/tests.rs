//! Golden bytes, round trips, and bytes from nowhere.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::outcome::{Abort, Failure};
use crate::pool::Arrangement;

fn name<T>(make: impl Fn(&str) -> Result<T, crate::ids::NameError>) -> T {
    make("name").unwrap()
}

fn checksums() -> Checksums {
    Checksums {
        region: 3,
        first: 4,
        crcs: vec![0xdead_beef, 1],
    }
}

fn layout() -> Layout {
    Layout {
        model: Tag([1; 32]),
        regions: 60,
        page_bytes: 6144,
        tokens_per_slot: 16,
    }
}

fn tokens() -> TokenRange {
    TokenRange {
        start: 16,
        count: 300,
    }
}

fn slots() -> Vec<SlotRef> {
    let slot = |index, epoch| SlotRef {
        index: SlotIndex(index),
        epoch: Epoch::new(epoch).unwrap(),
    };
    vec![slot(0, (7 << 32) + 1), slot(300, (7 << 32) + 2)]
}

fn to_daemon() -> Vec<ToDaemon> {
    let (seq, lease, transfer) = (RequestSeq(1), LeaseId(2), TransferId(3));
    let spec = PoolSpec {
        layout: layout(),
        slots: 512,
        arrangement: Arrangement::SlotMajor,
        context_tokens: 8192,
    };
    vec![
        ToDaemon::Hello {
            version: VERSION,
            name: name(EngineName::new),
        },
        ToDaemon::RegisterPool { seq, spec },
        ToDaemon::Lease {
            seq,
            pool: PoolId(9),
            tenant: name(TenantId::new),
            request: name(RequestId::new),
            tokens: tokens(),
            purpose: Purpose::Receive,
            named: vec![SlotIndex(0), SlotIndex(200)],
        },
        ToDaemon::EndLease {
            lease,
            abort: Some(AbortPolicy::DrainNow),
        },
        ToDaemon::Send {
            seq,
            lease,
            offer: Bytes::from_static(b"offer"),
        },
        ToDaemon::Seal {
            transfer,
            checksums: checksums(),
        },
        ToDaemon::Finish {
            transfer,
            payload: Bytes::from_static(b"payload"),
        },
        ToDaemon::AbortSend { transfer },
        ToDaemon::Verified {
            lease,
            attempt: 2,
            corrupt: vec![PageRef {
                region: 1,
                position: 2,
            }],
        },
    ]
}

fn to_engine() -> Vec<ToEngine> {
    let (seq, lease, transfer) = (RequestSeq(1), LeaseId(2), TransferId(3));
    let busy = Rejection::Busy {
        slots_needed: 9,
        slots_free: 8,
    };
    let late = Failure::DrainLate {
        waited_ms: 1001,
        limit_ms: 1000,
    };
    vec![
        ToEngine::Welcome {
            version: VERSION,
            node: NodeId([2; 32]),
            incarnation: Incarnation::new(7).unwrap(),
            engine: EngineId(4),
        },
        ToEngine::Rejected { seq, reason: busy },
        ToEngine::PoolRegistered {
            seq,
            pool: PoolId(9),
        },
        ToEngine::Leased {
            seq,
            lease,
            slots: slots(),
            offer: Some(Bytes::from_static(b"offer")),
        },
        ToEngine::SendOpened {
            seq,
            transfer,
            slots: 5,
            offset: 6,
        },
        ToEngine::SendOutcome {
            transfer,
            outcome: Outcome::Failed(late),
        },
        ToEngine::Expect {
            lease,
            checksums: checksums(),
        },
        ToEngine::Verify {
            lease,
            attempt: 1,
            pages: vec![PageRun {
                region: 0,
                first: 1,
                count: 2,
            }],
            payload: Bytes::from_static(b"payload"),
        },
        ToEngine::LeaseOutcome {
            lease,
            outcome: Outcome::Delivered,
        },
    ]
}

fn peer() -> Vec<PeerMessage> {
    let (transfer, grant) = (TransferId(3), GrantId(5));
    vec![
        PeerMessage::Hello {
            version: VERSION,
            incarnation: Incarnation::new(7).unwrap(),
            planes: vec![PlaneKind::Shm, PlaneKind::Quic],
            host: Tag([4; 32]),
            shm_path: Bytes::from_static(b"/run/fabric/shm.sock"),
        },
        PeerMessage::Open {
            transfer,
            offer: Bytes::from_static(b"offer"),
            layout: layout(),
            tokens: tokens(),
            tenant: name(TenantId::new),
            plane: PlaneKind::Quic,
        },
        PeerMessage::Refused {
            transfer,
            reason: Rejection::OfferUsed,
        },
        PeerMessage::Granted {
            transfer,
            grant,
            slots: slots(),
            plane_key: Secret([5; 32]),
            manifest_key: Secret([6; 32]),
            outstanding_bytes_max: 8 << 20,
            pages: vec![PageRun {
                region: 0,
                first: 1,
                count: 2,
            }],
        },
        PeerMessage::Checksums {
            grant,
            checksums: checksums(),
        },
        PeerMessage::Commit {
            grant,
            digest: Tag([8; 32]),
            payload: Bytes::from_static(b"p"),
        },
        PeerMessage::Cancel {
            transfer,
            drain_follows: true,
        },
        PeerMessage::DrainRequest { grant },
        PeerMessage::Verdict {
            transfer,
            outcome: Outcome::Aborted(Abort::Destination),
        },
    ]
}

#[test]
fn the_bytes_of_every_message_are_pinned_and_decode_to_it() {
    let mut golden = String::new();
    let mut pin = |name: &str, bytes: &Bytes| {
        let hex = bytes
            .iter()
            .fold(String::new(), |hex, byte| hex + &format!("{byte:02x}"));
        writeln!(golden, "{name} {hex}").unwrap();
    };
    for message in to_daemon() {
        let bytes = message.encode();
        pin("to_daemon", &bytes);
        assert_eq!(ToDaemon::decode(bytes), Ok(message));
    }
    for message in to_engine() {
        let bytes = message.encode();
        pin("to_engine", &bytes);
        assert_eq!(ToEngine::decode(bytes), Ok(message));
    }
    for message in peer() {
        let bytes = message.encode();
        pin("peer", &bytes);
        assert_eq!(PeerMessage::decode(bytes), Ok(message));
    }
    insta::assert_snapshot!(golden);
}

#[test]
fn a_message_beyond_its_bounds_is_refused_with_both_numbers() {
    let long = Bytes::from(vec![0; crate::limits::MESSAGE_BYTES_MAX + 1]);
    let (got, want) = (long.len(), crate::limits::MESSAGE_BYTES_MAX);
    assert_eq!(
        ToDaemon::decode(long),
        Err(DecodeError::TooLong { got, want })
    );
    let payload = Bytes::from(vec![0; crate::limits::PAYLOAD_BYTES_MAX + 1]);
    let finish = ToDaemon::Finish {
        transfer: TransferId(1),
        payload,
    };
    let (got, want) = (65_537, 65_536);
    let error = DecodeError::Field {
        field: "payload",
        got,
        want,
    };
    assert_eq!(ToDaemon::decode(finish.encode()), Err(error));
    let end = Checksums {
        region: 0,
        first: u32::MAX,
        crcs: vec![1, 2],
    };
    let seal = ToDaemon::Seal {
        transfer: TransferId(1),
        checksums: end,
    };
    let error = DecodeError::Field {
        field: "checksums",
        got: 2,
        want: 1,
    };
    assert_eq!(ToDaemon::decode(seal.encode()), Err(error));
    assert_eq!(
        ToDaemon::decode(Bytes::new()),
        Err(DecodeError::Field {
            field: "body",
            got: 0,
            want: 1
        })
    );
}

#[test]
fn a_slot_of_epoch_zero_is_not_a_slot() {
    // Leased { slots { index: [0], epoch: [0] } }
    let bytes = Bytes::from_static(&[0x22, 0x08, 0x1a, 0x06, 0x0a, 0x01, 0x00, 0x12, 0x01, 0x00]);
    let error = DecodeError::Field {
        field: "epoch",
        got: 0,
        want: 1,
    };
    assert_eq!(ToEngine::decode(bytes), Err(error));
}

proptest! {
    #[test]
    fn any_bytes_give_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = Bytes::from(bytes);
        let _ = ToDaemon::decode(bytes.clone());
        let _ = ToEngine::decode(bytes.clone());
        let _ = PeerMessage::decode(bytes.clone());
        let _ = Offer::peek(&bytes);
    }

    #[test]
    fn a_damaged_message_is_a_message_or_an_error(
        which in 0_usize..9,
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let (daemon, engine) = (to_daemon()[which].encode(), to_engine()[which].encode());
        for bytes in [daemon, engine, peer()[which].encode()] {
            let mut bytes = bytes.to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let cut = cut.index(bytes.len());
            for bytes in [Bytes::from(bytes.clone()), Bytes::from(bytes[..cut].to_vec())] {
                let _ = ToDaemon::decode(bytes.clone());
                let _ = ToEngine::decode(bytes.clone());
                let _ = PeerMessage::decode(bytes);
            }
        }
    }
}
