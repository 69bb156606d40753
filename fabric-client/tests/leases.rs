//! What the SDK says to its daemon, in which order, and what it verifies.

#![allow(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    clippy::cast_possible_truncation,
    reason = "a test's helpers may fail as a test does"
)]

mod fake;

use std::time::Duration;

use bytes::Bytes;
use fabric_client::SealError;
use fabric_client::proto::ids::LeaseId;
use fabric_client::proto::outcome::{Abort, Failure, Outcome, Rejection};
use fabric_client::proto::pool::PageRef;
use fabric_client::proto::wire::{AbortPolicy, Checksums, ToDaemon, ToEngine};
use fabric_client::{LeaseError, SendRefusal};
use fake::{OFFER, hold, pool, pool_of, receive, request, run, sending, slot, slots, spec};

fn end(lease: LeaseId) -> ToDaemon {
    let abort = None;
    ToDaemon::EndLease { lease, abort }
}

fn verified(lease: LeaseId, attempt: u32, corrupt: &[(u16, u32)]) -> ToDaemon {
    let corrupt = corrupt
        .iter()
        .map(|&(region, position)| PageRef { region, position })
        .collect();
    ToDaemon::Verified {
        lease,
        attempt,
        corrupt,
    }
}

#[tokio::test]
async fn a_corrupt_page_is_named_and_verified_again() {
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, vec![slot(6, 1), slot(2, 1)]).await;
    let mut crcs = [Vec::new(), Vec::new()];
    for (region, crcs) in (0..).zip(&mut crcs) {
        for (slot, fill) in [(6, 10), (2, 20)] {
            crcs.push(daemon.write(region, slot, fill + u8::try_from(region).unwrap()));
        }
    }
    daemon.write(1, 2, 99);
    let [first, second] = crcs;
    daemon.expect(id, 0, first).await;
    daemon.expect(id, 1, second).await;
    // Nobody waits for the delivery yet.
    daemon.verify(id, 1, vec![run(0, 0, 2), run(1, 0, 2)]).await;
    assert_eq!(daemon.hear().await, verified(id, 1, &[(1, 1)]));
    daemon.write(1, 2, 21);
    daemon.verify(id, 2, vec![run(1, 1, 1)]).await;
    assert_eq!(daemon.hear().await, verified(id, 2, &[]));
    let outcome = Outcome::Delivered;
    daemon
        .say(&ToEngine::LeaseOutcome { lease: id, outcome })
        .await;

    let mut delivered = lease.delivered().await.unwrap();
    for (region, position, fill) in [(0, 0, 10), (0, 1, 20), (1, 0, 11), (1, 1, 21)] {
        assert_eq!(delivered.page(region, position), [fill; 4096]);
    }
    assert_eq!(delivered.payload(), &b"payload"[..]);
    let stats = delivered.stats();
    let counts = (stats.pages, stats.bytes, stats.attempts, stats.corrupt);
    assert_eq!(counts, (4, 4 * 4096, 2, 1));
    delivered.page_mut(1, 1)[0] = 1;
    assert_eq!(delivered.page(1, 1)[..2], [1, 21]);
    delivered.end();
    assert_eq!(daemon.hear().await, end(id));
}

#[tokio::test]
async fn a_page_without_an_expected_checksum_is_corrupt() {
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..2)).await;
    // S10: zeros, whose checksum is not that of "nothing was said".
    daemon.verify(id, 1, vec![run(0, 0, 2), run(1, 0, 2)]).await;
    let all = [(0, 0), (0, 1), (1, 0), (1, 1)];
    assert_eq!(daemon.hear().await, verified(id, 1, &all));
    let (pages, attempts) = (4, 1);
    let outcome = Outcome::Failed(Failure::Corrupt { pages, attempts });
    daemon
        .say(&ToEngine::LeaseOutcome { lease: id, outcome })
        .await;
    assert_eq!(lease.delivered().await.unwrap_err().outcome, outcome);
    assert_eq!(daemon.hear().await, end(id));
}

#[tokio::test]
async fn one_wrong_byte_of_a_large_delivery_is_found() {
    let (pool, mut daemon) = pool_of(spec(256, 64 << 10)).await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..256)).await;
    for region in 0..2 {
        let crcs = (0..256).map(|slot| daemon.write(region, slot, 3)).collect();
        daemon.expect(id, region, crcs).await;
    }
    let offset = spec(256, 64 << 10).page_offset(1, 200) + 77;
    daemon.memory.as_ref().unwrap().write(offset, &[4]).unwrap();
    daemon
        .verify(id, 1, vec![run(0, 0, 256), run(1, 0, 256)])
        .await;
    assert_eq!(daemon.hear().await, verified(id, 1, &[(1, 200)]));
    drop(lease);
    assert_eq!(daemon.hear().await, end(id));
}

#[tokio::test]
async fn more_corrupt_pages_than_would_be_sent_again_are_not_all_named() {
    let (pool, mut daemon) = pool_of(spec(20_000, 8)).await;
    let (_lease, id) = receive(&pool, &mut daemon, slots(0..20_000)).await;
    daemon
        .verify(id, 1, vec![run(0, 0, 20_000), run(1, 0, 20_000)])
        .await;
    let ToDaemon::Verified { corrupt, .. } = daemon.hear().await else {
        panic!("a verification");
    };
    let limit = fabric_client::proto::limits::RESEND_PAGES_MAX;
    assert_eq!(
        corrupt.len(),
        limit + 1,
        "enough to make the daemon give up"
    );
}

#[tokio::test]
async fn dropping_and_aborting_end_a_lease_by_their_policies() {
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..1)).await;
    drop(lease);
    assert_eq!(daemon.hear().await, end(id));
    for policy in [AbortPolicy::DrainNow, AbortPolicy::FinishTransfer] {
        let again = vec![slot(1, u64::from(policy == AbortPolicy::DrainNow) * 4 + 1)];
        let (pool, mut daemon) = fake::pool().await;
        let (lease, id) = receive(&pool, &mut daemon, again).await;
        lease.abort(policy);
        let ended = ToDaemon::EndLease {
            lease: id,
            abort: Some(policy),
        };
        assert_eq!(daemon.hear().await, ended);
    }
    let (lease, id) = hold(&pool, &mut daemon, slots(2..3)).await;
    drop(lease);
    assert_eq!(daemon.hear().await, end(id));
}

#[tokio::test]
async fn an_aborter_tells_who_waits_and_what_comes_later_is_ignored() {
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..1)).await;
    let aborter = lease.aborter();
    let waiting = tokio::spawn(lease.delivered());
    tokio::task::yield_now().await;
    aborter.abort(AbortPolicy::DrainNow);
    let outcome = waiting.await.unwrap().unwrap_err().outcome;
    assert_eq!(outcome, Outcome::Aborted(Abort::Destination));
    let abort = Some(AbortPolicy::DrainNow);
    assert_eq!(daemon.hear().await, ToDaemon::EndLease { lease: id, abort });
    aborter.abort(AbortPolicy::FinishTransfer);

    // On their way when the lease ended.
    daemon.expect(id, 0, vec![1]).await;
    daemon.verify(id, 1, vec![run(0, 0, 1)]).await;
    let outcome = Outcome::Delivered;
    daemon
        .say(&ToEngine::LeaseOutcome { lease: id, outcome })
        .await;
    let (lease, _) = receive(&pool, &mut daemon, slots(1..2)).await;
    drop(lease);
}

#[tokio::test]
async fn a_lease_that_nobody_waits_for_any_more_is_ended() {
    let (pool, mut daemon) = pool().await;
    let wanted = {
        let pool = pool.clone();
        tokio::spawn(async move { pool.receive(request(1)).await })
    };
    let seq = daemon.hear_lease().await;
    wanted.abort();
    assert!(wanted.await.unwrap_err().is_cancelled());
    let lease = LeaseId(9);
    let leased = ToEngine::Leased {
        seq,
        lease,
        slots: slots(0..1),
        offer: Some(Bytes::from_static(OFFER)),
    };
    daemon.say(&leased).await;
    assert_eq!(daemon.hear().await, end(lease));
    // Its slot is not believed to be leased any more.
    let (lease, _) = receive(&pool, &mut daemon, vec![slot(0, 2)]).await;
    drop(lease);
}

#[tokio::test]
async fn dropping_a_transfer_aborts_it_before_its_lease_ends() {
    let (pool, mut daemon) = pool().await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..2), 0).await;
    sending.seal(0, 0..2).await.unwrap();
    assert!(matches!(daemon.hear().await, ToDaemon::Seal { .. }));
    drop(sending);
    assert_eq!(daemon.hear().await, ToDaemon::AbortSend { transfer });
    assert_eq!(daemon.hear().await, end(LeaseId(0)));
}

#[tokio::test]
async fn a_transfer_that_nobody_waits_for_any_more_is_aborted_before_its_lease_ends() {
    for opens in [true, false] {
        let (pool, mut daemon) = pool().await;
        let (held, id) = hold(&pool, &mut daemon, slots(0..2)).await;
        let opening = tokio::spawn(held.send(Bytes::from_static(OFFER)));
        let seq = daemon.hear_send().await;
        opening.abort();
        assert!(opening.await.unwrap_err().is_cancelled());
        let transfer = fabric_client::proto::ids::TransferId(4);
        let (slots, offset) = (2, 0);
        if opens {
            let opened = ToEngine::SendOpened {
                seq,
                transfer,
                slots,
                offset,
            };
            daemon.say(&opened).await;
            assert_eq!(daemon.hear().await, ToDaemon::AbortSend { transfer });
        } else {
            let reason = Rejection::OfferExpired;
            daemon.say(&ToEngine::Rejected { seq, reason }).await;
        }
        assert_eq!(daemon.hear().await, end(id));
    }
}

#[tokio::test]
async fn a_refused_transfer_gives_its_lease_back() {
    let (pool, mut daemon) = pool().await;
    let (mut held, _) = hold(&pool, &mut daemon, slots(0..1)).await;
    held.page_mut(0, 0).fill(5);
    let reason = Rejection::OfferForged;
    let rejected = async {
        let seq = daemon.hear_send().await;
        daemon.say(&ToEngine::Rejected { seq, reason }).await;
    };
    let (sent, ()) = tokio::join!(held.send(Bytes::from_static(OFFER)), rejected);
    let refused = sent.unwrap_err();
    assert_eq!(refused.reason, SendRefusal::Rejected(reason));
    // What could be no message does not reach the daemon, which would hang up.
    let long = refused.held.send(Bytes::from(vec![0; 2000])).await;
    let refused = long.unwrap_err();
    let (value, limit) = (2000, 1024);
    let exceeds = Rejection::ExceedsLimit { value, limit };
    assert_eq!(refused.reason, SendRefusal::Rejected(exceeds));
    let mut held = refused.held;
    held.page_mut(0, 0)[0] = 6;
    assert_eq!(held.page(0, 0)[..2], [6, 5]);
    let mut many = request(1);
    many.named = vec![fabric_client::proto::ids::SlotIndex(0); 70_000];
    let refused = pool.hold(many).await.unwrap_err();
    assert!(matches!(
        refused,
        LeaseError::Rejected(Rejection::ExceedsLimit { .. })
    ));
}

#[tokio::test]
async fn sealed_pages_go_out_once_and_do_not_change() {
    let (pool, mut daemon) = pool().await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..3), 1).await;
    assert_eq!((sending.slots(), sending.offset()), (2, 1));
    assert_eq!(sending.slot_refs(), slots(1..3));
    sending.lease_page_mut(1, 0).fill(1);
    sending.page_mut(1, 0).fill(2);
    sending.page_mut(1, 1).fill(3);
    assert_eq!(sending.lease_page(1, 1), [2; 4096]);
    sending.seal(1, 0..2).await.unwrap();
    let checksums = Checksums {
        region: 1,
        first: 0,
        crcs: [2, 3]
            .map(|fill| fabric_ipc::crc32c(&[fill; 4096]))
            .to_vec(),
    };
    let sealed = ToDaemon::Seal {
        transfer,
        checksums,
    };
    assert_eq!(daemon.hear().await, sealed);
    let (region, position) = (1, 0);
    let twice = Err(SealError::Twice { region, position });
    assert_eq!(sending.seal(1, 0..1).await, twice);
    let (region, position) = (0, 2);
    let outside = Err(SealError::Outside { region, position });
    assert_eq!(sending.seal(0, 0..3).await, outside);
    sending.page_mut(0, 0).fill(4);
    sending.lease_page_mut(1, 0).fill(5);
    for page in [(1, 0), (1, 1)] {
        let changed = std::panic::AssertUnwindSafe(|| sending.page_mut(page.0, page.1)[0] = 9);
        assert!(
            std::panic::catch_unwind(changed).is_err(),
            "the page is sealed"
        );
    }
    let changed = std::panic::AssertUnwindSafe(|| sending.lease_page_mut(1, 2)[0] = 9);
    assert!(
        std::panic::catch_unwind(changed).is_err(),
        "the page is sealed"
    );
}

#[tokio::test]
async fn a_finished_transfer_gives_its_lease_back_with_the_outcome() {
    let (pool, mut daemon) = pool().await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..1), 0).await;
    let sealed = tokio::task::spawn_blocking(move || {
        sending.page_mut(0, 0).fill(1);
        sending.seal_blocking(0, 0..1).unwrap();
        sending.seal_blocking(1, 0..1).unwrap();
        sending
    });
    let sending = sealed.await.unwrap();
    let payload = Bytes::from_static(b"token");
    let finish = ToDaemon::Finish {
        transfer,
        payload: payload.clone(),
    };
    let outcome = Outcome::Delivered;
    let told = async {
        daemon.hear().await;
        daemon.hear().await;
        assert_eq!(daemon.hear().await, finish);
        daemon
            .say(&ToEngine::SendOutcome { transfer, outcome })
            .await;
    };
    let ((got, mut held), ()) = tokio::join!(sending.finish(payload), told);
    assert_eq!(got, outcome);
    held.page_mut(0, 0).fill(2);
    held.end();
    assert_eq!(
        daemon.hear().await,
        end(LeaseId(0)),
        "and no abort before it"
    );
}

#[tokio::test]
async fn a_transfer_with_an_unsealed_page_is_aborted_instead_of_finished() {
    let (pool, mut daemon) = pool().await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..1), 0).await;
    sending.seal(0, 0..1).await.unwrap();
    let outcome = Outcome::Aborted(Abort::Source);
    let told = async {
        daemon.hear().await;
        assert_eq!(daemon.hear().await, ToDaemon::AbortSend { transfer });
        daemon
            .say(&ToEngine::SendOutcome { transfer, outcome })
            .await;
    };
    let ((got, _held), ()) = tokio::join!(sending.finish(Bytes::new()), told);
    assert_eq!(got, outcome);
}

#[tokio::test]
async fn sealing_after_the_outcome_says_that_it_is_over() {
    let (pool, mut daemon) = pool().await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..1), 0).await;
    let outcome = Outcome::Rejected(Rejection::OfferUsed);
    daemon
        .say(&ToEngine::SendOutcome { transfer, outcome })
        .await;
    let over = loop {
        // An empty seal asks and says nothing.
        match sending.seal(0, 0..0).await {
            Ok(()) => tokio::time::sleep(Duration::from_millis(1)).await,
            Err(over) => break over,
        }
    };
    assert_eq!(over, SealError::Over(outcome));
    assert_eq!(sending.finish(Bytes::new()).await.0, outcome);
}

#[tokio::test]
async fn many_pages_are_sealed_in_several_messages() {
    let (pool, mut daemon) = pool_of(spec(20_000, 64)).await;
    let (mut sending, _) = sending(&pool, &mut daemon, slots(0..20_000), 0).await;
    // 1.28 MB: on other threads.
    sending.seal(1, 0..20_000).await.unwrap();
    let mut next = 0;
    let zeros = fabric_ipc::crc32c(&[0; 64]);
    while next < 20_000 {
        let ToDaemon::Seal { checksums, .. } = daemon.hear().await else {
            panic!("a seal");
        };
        assert_eq!((checksums.region, checksums.first), (1, next));
        assert!(checksums.crcs.iter().all(|crc| *crc == zeros));
        next += u32::try_from(checksums.crcs.len()).unwrap();
    }
    assert_eq!(next, 20_000);
}

/// Hears of 64 pages of 1 MiB of ones, each once and in order.
async fn all_are_sealed(daemon: &mut fake::Daemon, mut next: u32) {
    let ones = fabric_ipc::crc32c(&vec![1; 1 << 20]);
    while next < 64 {
        let ToDaemon::Seal { checksums, .. } = daemon.hear().await else {
            panic!("a seal");
        };
        assert_eq!(checksums.first, next);
        assert!(checksums.crcs.iter().all(|crc| *crc == ones));
        next += u32::try_from(checksums.crcs.len()).unwrap();
    }
    assert_eq!(next, 64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seal_that_is_cancelled_in_its_midst_goes_on_where_it_was() {
    let (pool, mut daemon) = pool_of(spec(64, 1 << 20)).await;
    let (mut sending, _) = sending(&pool, &mut daemon, slots(0..64), 0).await;
    for position in 0..64 {
        sending.page_mut(0, position).fill(1);
    }
    let first = tokio::select! {
        biased;
        heard = daemon.hear() => heard,
        sealed = sending.seal(0, 0..64) => panic!("{sealed:?} before its first page went out"),
    };
    let ToDaemon::Seal { checksums, .. } = first else {
        panic!("a seal");
    };
    // None of them counts as sealed, so the second time is no mistake.
    sending.seal(0, 0..64).await.unwrap();
    let next = u32::try_from(checksums.crcs.len()).unwrap();
    assert!(checksums.first == 0 && next < 64, "{checksums:?}");
    all_are_sealed(&mut daemon, next).await;
    let twice = SealError::Twice {
        region: 0,
        position: 0,
    };
    assert_eq!(sending.seal(0, 0..64).await, Err(twice));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_seal_leaves_pages_unsealed_and_unchangeable() {
    let (pool, mut daemon) = pool_of(spec(64, 1 << 20)).await;
    let (mut sending, transfer) = sending(&pool, &mut daemon, slots(0..64), 0).await;
    for position in 0..64 {
        sending.page_mut(0, position).fill(1);
    }
    let cancelled = tokio::time::timeout(Duration::ZERO, sending.seal(0, 0..64)).await;
    assert!(cancelled.is_err(), "64 MiB take longer");
    let changed = std::panic::AssertUnwindSafe(|| sending.page_mut(0, 0)[0] = 9);
    assert!(
        std::panic::catch_unwind(changed).is_err(),
        "it may be read still"
    );
    sending.seal(0, 0..64).await.unwrap();
    all_are_sealed(&mut daemon, 0).await;
    let outcome = Outcome::Aborted(Abort::Source);
    let told = async {
        assert_eq!(daemon.hear().await, ToDaemon::AbortSend { transfer });
        daemon
            .say(&ToEngine::SendOutcome { transfer, outcome })
            .await;
    };
    let ((_, mut held), ()) = tokio::join!(sending.abort(), told);
    held.page_mut(0, 0).fill(2);
}

#[tokio::test]
async fn ends_are_never_lost_however_many_come_at_once() {
    let (pool, mut daemon) = pool_of(spec(10_000, 8)).await;
    let mut leases = Vec::new();
    for index in 0..10_000 {
        leases.push(hold(&pool, &mut daemon, slots(index..index + 1)).await.0);
    }
    // Nothing runs meanwhile that could write any of them.
    drop(leases);
    for index in 0..10_000 {
        assert_eq!(daemon.hear().await, end(LeaseId(index)));
    }
}

#[tokio::test]
async fn what_was_said_before_the_last_handle_went_is_still_written() {
    let (pool, mut daemon) = pool().await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..1)).await;
    drop(pool);
    lease.abort(AbortPolicy::FinishTransfer);
    let abort = Some(AbortPolicy::FinishTransfer);
    assert_eq!(daemon.hear().await, ToDaemon::EndLease { lease: id, abort });
    daemon.heard_all().await;
}

#[tokio::test]
async fn a_long_verification_does_not_delay_other_messages() {
    let (pool, mut daemon) = pool_of(spec(513, 1 << 20)).await;
    let (lease, id) = receive(&pool, &mut daemon, slots(0..512)).await;
    daemon
        .verify(id, 1, vec![run(0, 0, 512), run(1, 0, 512)])
        .await;
    let (other, _) = receive(&pool, &mut daemon, slots(512..513)).await;
    drop(other);
    // The lease's answer overtook the verification of 1 GiB, and so did the end.
    assert_eq!(daemon.hear().await, end(LeaseId(512)));
    drop(lease);
    // The verification was stopped, and not answered.
    assert_eq!(daemon.hear().await, end(id));
}
