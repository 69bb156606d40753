//! The SDK against a daemon that dies, lies, or talks nonsense.

#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    reason = "a test's helpers may fail as a test does"
)]

mod fake;

use std::time::Duration;

use bytes::Bytes;
use fabric_client::proto::ids::{EngineName, LeaseId, RequestSeq, SlotIndex};
use fabric_client::proto::outcome::{Failure, Outcome, Rejection};
use fabric_client::proto::wire::{Checksums, ToDaemon, ToEngine, VERSION};
use fabric_client::{
    Closed, ConnectError, LeaseError, Misbehaviour, RegisterError, SealError, SendRefusal, Session,
};
use fake::{
    Daemon, OFFER, hold, name, place, pool, pool_of, receive, request, run, sending, session, slot,
    slots, spec, welcome,
};

const GONE: Outcome = Outcome::Failed(Failure::DaemonGone);

async fn connect_and(say: Option<Bytes>) -> ConnectError {
    let place = place();
    let daemon = async {
        let mut daemon = Daemon::accept(&place).await;
        daemon.hear().await;
        if let Some(say) = say {
            daemon.raw(&say).await;
        }
    };
    let (session, ()) = tokio::join!(Session::connect(&place.path, name()), daemon);
    session.unwrap_err()
}

#[tokio::test]
async fn connecting_says_what_is_wrong() {
    let nowhere = Session::connect("/nonexistent/fabric.sock", name()).await;
    let Err(ConnectError::Connect { path, source }) = nowhere else {
        panic!("nobody is there");
    };
    assert_eq!(path, "/nonexistent/fabric.sock");
    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);

    let reason = Rejection::EngineNotAllowed;
    let seq = RequestSeq(0);
    let refused = connect_and(Some(ToEngine::Rejected { seq, reason }.encode())).await;
    assert!(matches!(refused, ConnectError::Refused(got) if got == reason));

    let other = connect_and(Some(welcome(VERSION + 1).encode())).await;
    let (got, want) = (VERSION + 1, VERSION);
    assert!(matches!(other, ConnectError::Version { got: g, want: w } if (g, w) == (got, want)));

    let garbage = connect_and(Some(Bytes::from_static(b"\xff\xff\xff"))).await;
    assert!(matches!(garbage, ConnectError::Decode(_)), "{garbage}");
    let end = connect_and(None).await;
    assert!(matches!(end, ConnectError::Closed), "{end}");
    let pool = fake::POOL;
    let early = connect_and(Some(ToEngine::PoolRegistered { seq, pool }.encode())).await;
    assert!(matches!(early, ConnectError::Misbehaved), "{early}");
}

#[tokio::test]
async fn a_pool_that_cannot_hold_its_context_is_not_even_asked_for() {
    let (session, _daemon) = session().await;
    let mut spec = spec(8, 4096);
    spec.context_tokens = 33;
    let (tokens, context) = (32, 33);
    let refused = session.register_pool(spec).await.unwrap_err();
    let RegisterError::Rejected(reason) = refused else {
        panic!("{refused}");
    };
    assert_eq!(reason, Rejection::PoolTooSmall { tokens, context });
}

#[tokio::test]
async fn a_rejection_has_both_numbers_and_the_session_goes_on() {
    let (pool, mut daemon) = pool().await;
    let (tokens, context) = (36, 32);
    let reason = Rejection::ExceedsContext { tokens, context };
    let rejected = async {
        let seq = daemon.hear_lease().await;
        daemon.say(&ToEngine::Rejected { seq, reason }).await;
    };
    let (lease, ()) = tokio::join!(pool.receive(request(9)), rejected);
    assert_eq!(lease.unwrap_err(), LeaseError::Rejected(reason));
    let (lease, _) = receive(&pool, &mut daemon, slots(0..2)).await;
    assert_eq!(lease.slots(), slots(0..2));
    assert_eq!(lease.offer(), OFFER);
}

#[tokio::test]
async fn daemon_death_ends_everything_at_once_and_truly() {
    let (pool, mut daemon) = pool().await;
    let (waiting, _) = receive(&pool, &mut daemon, slots(0..1)).await;
    let (mut sealing, _) = sending(&pool, &mut daemon, slots(1..2), 0).await;
    let (mut finishing, _) = sending(&pool, &mut daemon, slots(2..3), 0).await;
    finishing.seal(0, 0..1).await.unwrap();
    finishing.seal(1, 0..1).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(daemon.hear().await, ToDaemon::Seal { .. }));
    }
    let (mut held, _) = hold(&pool, &mut daemon, slots(3..4)).await;
    held.page_mut(1, 0).fill(7);
    let (opening, _) = hold(&pool, &mut daemon, slots(4..5)).await;
    let session = pool.session().clone();
    let register = session.register_pool(spec(1, 1));

    let death = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(daemon);
    };
    let all = async {
        tokio::join!(
            waiting.delivered(),
            finishing.finish(Bytes::new()),
            opening.send(Bytes::from_static(OFFER)),
            pool.hold(request(1)),
            register,
            death,
        )
    };
    let all = tokio::time::timeout(Duration::from_secs(5), all).await;
    let (delivered, finished, opened, lease, registered, ()) = all.expect("at once");
    assert_eq!(delivered.unwrap_err().outcome, GONE);
    assert_eq!(finished.0, GONE);
    let refused = opened.unwrap_err();
    assert_eq!(refused.reason, SendRefusal::Gone);
    assert_eq!(refused.held.slots(), slots(4..5), "the lease is given back");
    assert_eq!(lease.unwrap_err(), LeaseError::Gone);
    assert!(matches!(registered, Err(RegisterError::Gone)));

    // And so do later calls; the memory stays.
    assert_eq!(sealing.seal(0, 0..1).await, Err(SealError::Over(GONE)));
    assert_eq!(
        pool.receive(request(1)).await.unwrap_err(),
        LeaseError::Gone
    );
    let refused = held.send(Bytes::from_static(OFFER)).await.unwrap_err();
    assert_eq!(refused.reason, SendRefusal::Gone);
    assert_eq!(refused.held.page(1, 0), [7; 4096]);
    let closed = session.closed().await;
    assert!(matches!(closed, Closed::Daemon | Closed::Io(_)), "{closed}");
}

#[tokio::test]
async fn a_daemon_that_dies_in_the_middle_of_a_message_is_a_dead_daemon() {
    let place = place();
    let connected = Session::connect(&place.path, name());
    let daemon = async {
        let (mut stream, _) = place.listener.accept().await.unwrap();
        // What is left unread would reset the connection instead, at whatever moment.
        let mut hello = [0; 1024];
        let read = tokio::io::AsyncReadExt::read(&mut stream, &mut hello).await;
        assert_ne!(read.unwrap(), 0);
        let message = welcome(VERSION).encode();
        let mut bytes = u32::try_from(message.len()).unwrap().to_le_bytes().to_vec();
        bytes.extend_from_slice(&message);
        bytes.extend_from_slice(&[200, 0, 0, 0, 1, 2, 3]);
        let written = tokio::io::AsyncWriteExt::write_all(&mut stream, &bytes).await;
        written.unwrap();
    };
    let (session, ()) = tokio::join!(connected, daemon);
    let closed = session.unwrap().closed().await;
    assert!(matches!(closed, Closed::Daemon | Closed::Io(_)), "{closed}");
}

#[tokio::test]
async fn garbage_closes_the_session_and_tells_who_waits() {
    let (pool, mut daemon) = pool().await;
    let (lease, _) = receive(&pool, &mut daemon, slots(0..1)).await;
    daemon.raw(b"\xff\xff\xff\xff").await;
    assert_eq!(lease.delivered().await.unwrap_err().outcome, GONE);
    let closed = pool.session().closed().await;
    assert!(
        matches!(closed, Closed::Misbehaved(Misbehaviour::Malformed(_))),
        "{closed}"
    );
    daemon.heard_all().await;
}

/// What a daemon says to a session that has a held lease of slots 0 and 1, lease 0; one that
/// receives slots 2 and 3, lease 2; and asks for another of 2 slots.
async fn answer(say: impl FnOnce(RequestSeq) -> ToEngine) -> Misbehaviour {
    let (pool, mut daemon) = pool().await;
    let (_held, _) = hold(&pool, &mut daemon, slots(0..2)).await;
    let (receiving, _) = receive(&pool, &mut daemon, slots(2..4)).await;
    let nonsense = async {
        let seq = daemon.hear_lease().await;
        daemon.say(&say(seq)).await;
    };
    let mut wanted = request(2);
    wanted.named = vec![SlotIndex(4), SlotIndex(5)];
    let (lease, ()) = tokio::join!(pool.receive(wanted), nonsense);
    assert_eq!(lease.unwrap_err(), LeaseError::Gone);
    assert_eq!(receiving.delivered().await.unwrap_err().outcome, GONE);
    match pool.session().closed().await {
        Closed::Misbehaved(what) => what,
        other => panic!("{other}"),
    }
}

fn leased(
    seq: RequestSeq,
    lease: u64,
    slots: Vec<fabric_client::proto::ids::SlotRef>,
    offer: bool,
) -> ToEngine {
    ToEngine::Leased {
        seq,
        lease: LeaseId(lease),
        slots,
        offer: offer.then(|| Bytes::from_static(OFFER)),
    }
}

#[tokio::test]
async fn slots_that_are_leased_already_are_refused() {
    let again = |seq| leased(seq, 9, vec![slot(4, 1), slot(5, 1)], true);
    let what = answer(|seq| match again(seq) {
        ToEngine::Leased {
            seq, lease, offer, ..
        } => ToEngine::Leased {
            seq,
            lease,
            slots: vec![slot(4, 1), slot(4, 2)],
            offer,
        },
        other => other,
    });
    // Named slots are held to their names first.
    let (got, want) = (4, 5);
    assert_eq!(what.await, Misbehaviour::SlotNotNamed { got, want });

    // S5: twice in one lease, and under two leases.
    for (slots, twice) in [
        (vec![slot(6, 1), slot(6, 2)], 6),
        (vec![slot(6, 1), slot(1, 9)], 1),
    ] {
        let (pool, mut daemon) = pool().await;
        let (_held, _) = hold(&pool, &mut daemon, fake::slots(0..2)).await;
        let wanted = pool.receive(request(2));
        let (lease, ()) = tokio::join!(wanted, daemon.lease(LeaseId(9), slots, Some(OFFER)));
        assert_eq!(lease.unwrap_err(), LeaseError::Gone);
        let closed = pool.session().closed().await;
        assert_eq!(closed, Closed::Misbehaved(Misbehaviour::SlotLeased(twice)));
    }
}

#[tokio::test]
async fn an_epoch_that_does_not_go_up_is_refused() {
    let (pool, mut daemon) = pool().await;
    let (held, _) = hold(&pool, &mut daemon, vec![slot(0, 5)]).await;
    held.end();
    daemon.hear().await;
    let (held, _) = hold(&pool, &mut daemon, vec![slot(0, 6)]).await;
    held.end();
    daemon.hear().await;
    let again = daemon.lease(LeaseId(1), vec![slot(0, 6)], None);
    let (lease, ()) = tokio::join!(pool.hold(request(1)), again);
    assert_eq!(lease.unwrap_err(), LeaseError::Gone);
    let (slot, got, before) = (0, 6, 6);
    let what = Misbehaviour::EpochNotNewer { slot, got, before };
    assert_eq!(pool.session().closed().await, Closed::Misbehaved(what));
}

#[tokio::test]
async fn leases_that_were_not_asked_for_are_refused() {
    let good = || vec![slot(4, 1), slot(5, 1)];
    let what = answer(|seq| leased(RequestSeq(seq.0 + 1), 9, good(), true)).await;
    assert!(matches!(what, Misbehaviour::UnknownReply(_)), "{what}");
    let pool = fake::POOL;
    let what = answer(|seq| ToEngine::PoolRegistered { seq, pool }).await;
    assert!(matches!(what, Misbehaviour::UnknownReply(_)), "{what}");
    let what = answer(|seq| leased(seq, 9, good(), false)).await;
    assert_eq!(what, Misbehaviour::NotOfThatKind(LeaseId(9)));
    let what = answer(|seq| leased(seq, 0, good(), true)).await;
    assert_eq!(what, Misbehaviour::LeaseTwice(LeaseId(0)));
    let what = answer(|seq| leased(seq, 9, vec![slot(4, 1)], true)).await;
    let (got, want) = (1, 2);
    assert_eq!(what, Misbehaviour::SlotCount { got, want });
    let what = answer(|seq| leased(seq, 9, vec![slot(4, 1), slot(8, 1)], true)).await;
    let (got, want) = (8, 5);
    assert_eq!(what, Misbehaviour::SlotNotNamed { got, want });
    let what = answer(|_| welcome(VERSION)).await;
    assert_eq!(what, Misbehaviour::OutOfPlace);
}

#[tokio::test]
async fn nonsense_about_a_delivery_is_refused() {
    let verify = |lease, attempt, pages| ToEngine::Verify {
        lease: LeaseId(lease),
        attempt,
        pages,
        payload: Bytes::new(),
    };
    let what = answer(|_| verify(0, 1, vec![run(0, 0, 1)])).await;
    assert_eq!(
        what,
        Misbehaviour::NotOfThatKind(LeaseId(0)),
        "a held lease"
    );
    let (got, want) = (2, 1);
    let what = answer(|_| verify(2, 2, vec![run(0, 0, 1)])).await;
    assert_eq!(what, Misbehaviour::Attempt { got, want });
    for (region, first, count) in [(2, 0, 1), (0, 1, 2), (0, 2, 1), (0, u32::MAX - 1, 1)] {
        let outside = Misbehaviour::PagesOutside {
            region,
            first,
            count,
        };
        let what = answer(|_| verify(2, 1, vec![run(region, first, count)])).await;
        assert_eq!(what, outside);
        let checksums = Checksums {
            region,
            first,
            crcs: vec![0; count as usize],
        };
        let lease = LeaseId(2);
        let what = answer(|_| ToEngine::Expect { lease, checksums }).await;
        assert_eq!(what, outside);
    }
    for runs in [Vec::new(), vec![run(0, 0, 2); 3]] {
        let (got, want) = (2 * runs.len() as u64, 4);
        let what = answer(|_| verify(2, 1, runs)).await;
        assert_eq!(what, Misbehaviour::PagesTwice { got, want });
    }
}

#[tokio::test]
async fn a_delivery_that_was_not_verified_is_refused() {
    let (got, want) = (0, 4);
    let lease = LeaseId(2);
    let outcome = Outcome::Delivered;
    let what = answer(|_| ToEngine::LeaseOutcome { lease, outcome }).await;
    assert_eq!(what, Misbehaviour::Unverified { got, want });

    // Verified, and then said to hold something else.
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..1)).await;
    for region in 0..2 {
        let crc = daemon.write(region, 0, 1);
        daemon.expect(id, region, vec![crc]).await;
    }
    daemon.verify(id, 1, vec![run(0, 0, 1), run(1, 0, 1)]).await;
    let verified = daemon.hear().await;
    assert!(matches!(verified, ToDaemon::Verified { corrupt, .. } if corrupt.is_empty()));
    daemon.expect(id, 1, vec![77]).await;
    daemon
        .say(&ToEngine::LeaseOutcome { lease: id, outcome })
        .await;
    assert_eq!(lease.delivered().await.unwrap_err().outcome, GONE);
    let (got, want) = (1, 2);
    let what = Misbehaviour::Unverified { got, want };
    assert_eq!(pool.session().closed().await, Closed::Misbehaved(what));
}

#[tokio::test]
async fn a_delivery_while_its_pages_are_verified_again_is_refused() {
    // Large enough to be still under way when the next message is read.
    let (pool, mut daemon) = pool_of(spec(64, 1 << 20)).await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..64)).await;
    for region in 0..2 {
        let crcs = (0..64).map(|slot| daemon.write(region, slot, 1)).collect();
        daemon.expect(id, region, crcs).await;
    }
    let all = vec![run(0, 0, 64), run(1, 0, 64)];
    daemon.verify(id, 1, all.clone()).await;
    let verified = daemon.hear().await;
    assert!(matches!(verified, ToDaemon::Verified { corrupt, .. } if corrupt.is_empty()));
    daemon.verify(id, 2, all).await;
    let outcome = Outcome::Delivered;
    daemon
        .say(&ToEngine::LeaseOutcome { lease: id, outcome })
        .await;
    assert_eq!(lease.delivered().await.unwrap_err().outcome, GONE);
    let closed = pool.session().closed().await;
    let unverified = matches!(closed, Closed::Misbehaved(Misbehaviour::Unverified { .. }));
    assert!(unverified, "{closed}");
}

#[tokio::test]
async fn transfers_that_a_lease_cannot_have_are_refused() {
    for (slots, offset) in [(0, 0), (2, 1), (u32::MAX, u32::MAX)] {
        let (pool, mut daemon) = pool().await;
        let (held, _) = hold(&pool, &mut daemon, fake::slots(0..2)).await;
        let transfer = fabric_client::proto::ids::TransferId(1);
        let opened = async {
            let seq = daemon.hear_send().await;
            let opened = ToEngine::SendOpened {
                seq,
                transfer,
                slots,
                offset,
            };
            daemon.say(&opened).await;
        };
        let (sending, ()) = tokio::join!(held.send(Bytes::from_static(OFFER)), opened);
        let refused = sending.unwrap_err();
        assert_eq!(refused.reason, SendRefusal::Gone);
        let got = u64::from(slots) + u64::from(offset);
        let want = 2;
        let what = Misbehaviour::Transfer {
            transfer,
            got,
            want,
        };
        assert_eq!(pool.session().closed().await, Closed::Misbehaved(what));
    }
}

#[tokio::test]
async fn a_delivery_before_the_finish_is_refused() {
    let (pool, mut daemon) = pool().await;
    let (sending, transfer) = sending(&pool, &mut daemon, slots(0..1), 0).await;
    let outcome = Outcome::Delivered;
    daemon
        .say(&ToEngine::SendOutcome { transfer, outcome })
        .await;
    let closed = pool.session().closed().await;
    assert_eq!(
        closed,
        Closed::Misbehaved(Misbehaviour::Unfinished(transfer))
    );
    assert_eq!(sending.abort().await.0, GONE);
}

/// Every message with every byte changed in several ways: an error or another message, and never a
/// panic, which would show as a session that this process closed.
#[tokio::test]
async fn no_changed_byte_of_a_message_panics() {
    let lease = LeaseId(0);
    let messages = [
        leased(RequestSeq(3), 9, slots(4..6), true),
        ToEngine::Expect {
            lease,
            checksums: Checksums {
                region: 1,
                first: 0,
                crcs: vec![5, 6],
            },
        },
        ToEngine::Verify {
            lease,
            attempt: 1,
            pages: vec![run(0, 0, 2), run(1, 0, 2)],
            payload: Bytes::from_static(b"p"),
        },
        ToEngine::LeaseOutcome {
            lease,
            outcome: GONE,
        },
    ];
    for message in messages {
        let bytes = message.encode();
        for index in 0..bytes.len() {
            for change in [1, 0x80, 0xff] {
                let (pool, mut daemon) = pool_of(spec(8, 8)).await;
                let (_lease, _) = receive(&pool, &mut daemon, slots(0..2)).await;
                let mut bytes = bytes.to_vec();
                bytes[index] ^= change;
                daemon.raw(&bytes).await;
                drop(daemon);
                let closed = pool.session().closed().await;
                assert_ne!(
                    closed,
                    Closed::Local,
                    "{message:?}, byte {index} ^ {change}"
                );
            }
        }
    }
}

#[tokio::test]
async fn an_engine_that_is_refused_by_its_name_can_say_so() {
    assert!(EngineName::new("").is_err());
    let place = place();
    drop(place.listener);
    let error = Session::connect(&place.path, name()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("fabric.sock"), "{text}");
}
