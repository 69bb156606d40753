//! One guard each, at its very bound: what mutation testing took away and no other test missed.

use std::time::Duration;

use bytes::Bytes;

use super::world::*;
use crate::host::pages::{Identity, PageTable, manifest_digest};
use crate::host::{Config, Input, Misbehaviour, Observation};
use crate::ids::{
    EngineId, GrantId, Incarnation, LeaseId, LinkId, NodeId, PoolId, RequestId, RequestSeq, Tag,
    TransferId,
};
use crate::limits;
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{Arrangement, Layout, PageRef, PoolSpec, TokenRange};
use crate::wire::{AbortPolicy, Checksums, PeerMessage, PlaneKind, Purpose, ToDaemon, ToEngine};

fn is_open(node: usize, event: &Event) -> bool {
    node == D && matches!(event, Event::Peer(PeerMessage::Open { .. }))
}

#[test]
fn an_offer_that_comes_too_late_is_expired() {
    let mut world = World::new();
    world.begin(4);
    world.settle_until(is_open);
    world.pass(Duration::from_secs(31));
    world.settle();
    assert_eq!(world.rejections(D), [], "its engine was told long ago");
    let refused = Observation::Rejected(Rejection::OfferExpired);
    assert!(world.nodes[D].seen.contains(&refused));
}

// S7: the destination looks for itself, whatever the source's daemon let through.
#[test]
fn an_open_for_another_tenant_is_refused_by_its_destination() {
    let mut world = World::new();
    world.begin(4);
    world.settle_until(is_open);
    let Some((_, Event::Peer(PeerMessage::Open { tenant: of, .. }))) = world.queue.front_mut()
    else {
        panic!("the open is next");
    };
    *of = tenant("b");
    world.settle();
    let mismatch = Outcome::Rejected(Rejection::TenantMismatch);
    assert_eq!(world.received(), [mismatch]);
    assert_eq!(world.sent(), [mismatch]);
}

// S7: a grant is its link's.
#[test]
fn a_peer_cannot_speak_of_anothers_grant() {
    let mut world = World::new();
    world.begin(8);
    world.settle();
    let link = LinkId(77);
    let up = Input::LinkUp {
        link,
        node: NodeId([9; 32]),
        incarnation: Incarnation::new(1).unwrap(),
        planes: vec![PlaneKind::Quic],
    };
    world.input(D, up);
    let checksums = Checksums {
        region: 0,
        first: 0,
        crcs: vec![0],
    };
    let message = PeerMessage::Checksums {
        grant: GrantId(1),
        checksums,
    };
    world.input(D, Input::Peer { link, message });
    assert_eq!(world.nodes[D].closed, [Misbehaviour::NotYours(1)]);
}

#[test]
fn the_next_number_was_never_given() {
    let commit = PeerMessage::Commit {
        grant: GrantId(2),
        digest: Tag([0; 32]),
        payload: Bytes::new(),
    };
    let mut world = World::new();
    world.begin(8);
    world.settle();
    let link = world.link.unwrap();
    world.input(
        D,
        Input::Peer {
            link,
            message: commit,
        },
    );
    assert_eq!(world.nodes[D].closed, [Misbehaviour::NotYours(2)]);

    let lease = LeaseId(2);
    for message in [
        ToDaemon::Verified {
            lease,
            attempt: 1,
            corrupt: vec![],
        },
        ToDaemon::EndLease { lease, abort: None },
    ] {
        let mut world = World::new();
        world.begin(8);
        world.engine(D, message);
        assert_eq!(world.nodes[D].closed, [Misbehaviour::NotYours(2)]);
    }
}

#[test]
fn an_engine_cannot_end_anothers_lease() {
    let mut world = World::new();
    let begun = world.begin(8);
    let (engine, lease) = (EngineId(2), begun.to);
    world.engine_up(D, engine, PoolId(2));
    let message = ToDaemon::EndLease { lease, abort: None };
    world.input(D, Input::Engine { engine, message });
    assert_eq!(world.nodes[D].closed, [Misbehaviour::NotYours(lease.0)]);
    assert_eq!(
        world.free(D),
        4,
        "the other engine is gone, and the lease is not"
    );
}

// S10: the digest alone would not tell: it is right, of checksums that are all zero.
#[test]
fn a_commit_without_its_manifest_is_not_verified() {
    let mut world = World::new();
    world.begin(8);
    let is_granted = |event: &Event| matches!(event, Event::Peer(PeerMessage::Granted { .. }));
    world.settle_until(|node, event| node == P && is_granted(event));
    let Some((_, Event::Peer(granted))) = world.queue.front().cloned() else {
        panic!("the grant is next");
    };
    let PeerMessage::Granted {
        grant,
        slots,
        manifest_key,
        ..
    } = granted
    else {
        panic!("{granted:?}");
    };
    let (tenant, request) = (tenant("a"), RequestId::new("r").unwrap());
    let layout = spec().layout;
    let identity = Identity {
        grant,
        tenant: &tenant,
        request: &request,
        layout: &layout,
        tokens: TokenRange { start: 0, count: 8 },
        slots: &slots,
    };
    let empty = PageTable::new(REGIONS, 2);
    let digest = manifest_digest(&manifest_key, &identity, &empty, &[]);
    let (link, payload) = (world.link.unwrap(), Bytes::new());
    let message = PeerMessage::Commit {
        grant,
        digest,
        payload,
    };
    world.input(D, Input::Peer { link, message });
    world.settle();
    let missing = Failure::PagesMissing {
        pages: 0,
        pages_wanted: 4,
    };
    assert_eq!(world.received(), [Outcome::Failed(missing)]);
}

#[test]
fn an_engine_that_dies_ends_its_own_transfers_alone() {
    let mut world = World::new();
    world.begin(8);
    let other = EngineId(2);
    world.engine_up(P, other, PoolId(2));
    world.input(P, Input::EngineGone { engine: other });
    let ended = |world: &World| {
        let seen = world.nodes[P].seen.iter();
        let outcomes = seen.filter_map(|observation| match observation {
            Observation::SendEnded(outcome) => Some(*outcome),
            _ => None,
        });
        outcomes.collect::<Vec<_>>()
    };
    world.settle();
    assert_eq!(ended(&world), []);
    world.input(P, Input::EngineGone { engine: ENGINE });
    world.settle();
    assert_eq!(ended(&world), [Outcome::Failed(Failure::EngineGone)]);
}

#[test]
fn a_lease_whose_slots_are_scrubbed_when_shutdown_comes_is_rejected() {
    let mut world = World::new();
    let (lease, _, _) = world.lease(D, "a", 24, Purpose::Hold);
    world.end(D, lease, AbortPolicy::DrainNow);
    let ask = ToDaemon::Lease {
        seq: RequestSeq(9),
        pool: POOL,
        tenant: tenant("b"),
        request: RequestId::new("r").unwrap(),
        tokens: TokenRange { start: 0, count: 4 },
        purpose: Purpose::Receive,
        named: vec![],
    };
    world.engine(D, ask);
    world.input(D, Input::Shutdown);
    let (pool, slots) = world.nodes[D].scrubs.pop_front().expect("a scrub");
    world.input(D, Input::Scrubbed { pool, slots });
    let rejected = ToEngine::Rejected {
        seq: RequestSeq(9),
        reason: Rejection::ShuttingDown,
    };
    assert_eq!(world.nodes[D].said.last(), Some(&rejected));
    assert_eq!(world.free(D), 6);
}

#[test]
fn shutdown_waits_for_a_verification() {
    let mut world = World::new();
    let begun = world.arrive(8);
    world.input(D, Input::Shutdown);
    world.settle();
    assert!(!world.nodes[D].shut, "the engine verifies still");
    world.verify(&begun, 1, vec![]);
    assert!(world.nodes[D].shut);
    assert_eq!(world.received(), [Outcome::Delivered]);
}

// S4: whoever is left to finish has one deadline, however it goes on.
#[test]
fn a_writer_that_trickles_into_an_ended_lease_is_stopped() {
    let mut world = World::new();
    let begun = world.begin(24);
    world.settle();
    world.end(D, begun.to, AbortPolicy::FinishTransfer);
    for _ in 0..3 {
        world.pass(Duration::from_secs(10));
        world.input(D, Input::Landed { grant: GrantId(1) });
    }
    world.settle();
    assert_eq!(world.free(D), 6);
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Destination)]);
}

// S4: a destination that finds a page corrupt for ever does not hold the source's slots for ever.
#[test]
fn a_destination_that_asks_again_without_end_loses_its_link() {
    let mut world = World::with(|node| Config {
        attempts_max: 99,
        ..config(node)
    });
    let begun = world.arrive(4);
    for attempt in 1..limits::ATTEMPTS_MAX {
        world.verify(&begun, attempt, pages(&[(0, 0)]));
        world.settle();
    }
    assert_eq!(world.nodes[P].closed, []);
    world.verify(&begun, limits::ATTEMPTS_MAX, pages(&[(0, 0)]));
    world.settle();
    let limit = Misbehaviour::Limit { got: 17, want: 16 };
    assert_eq!(world.nodes[P].closed, [limit]);
    let failure = Outcome::Failed(Failure::VerdictUnknown);
    assert_eq!(world.sent(), [failure]);
}

fn register(world: &mut World, pool: PoolId, spec: PoolSpec) {
    let input = Input::RegisterPool {
        engine: ENGINE,
        seq: RequestSeq(5),
        pool,
        spec,
        memory_bytes: u64::MAX,
    };
    world.input(D, input);
}

fn ask(pool: PoolId, slots: u64) -> ToDaemon {
    ToDaemon::Lease {
        seq: RequestSeq(9),
        pool,
        tenant: tenant("a"),
        request: RequestId::new("r").unwrap(),
        tokens: TokenRange {
            start: 0,
            count: slots * u64::from(PER_SLOT),
        },
        purpose: Purpose::Hold,
        named: vec![],
    }
}

fn wide(regions: u16, slots: u32) -> PoolSpec {
    let layout = Layout {
        regions,
        ..spec().layout
    };
    PoolSpec {
        layout,
        slots,
        arrangement: Arrangement::RegionMajor,
        context_tokens: u64::from(slots) * u64::from(PER_SLOT),
    }
}

/// A transfer of more pages than may be sent again, of which `corrupt` arrive corrupt.
fn arrives_corrupt(corrupt: usize) -> World {
    let (mut world, regions, slots) = (World::new(), 1024, 17);
    let pool = PoolId(2);
    for node in [P, D] {
        let input = Input::RegisterPool {
            engine: ENGINE,
            seq: RequestSeq(5),
            pool,
            spec: wide(regions, slots),
            memory_bytes: u64::MAX,
        };
        world.input(node, input);
    }
    let mut receive = ask(pool, u64::from(slots));
    if let ToDaemon::Lease { purpose, .. } = &mut receive {
        *purpose = Purpose::Receive;
    }
    world.engine(D, receive);
    world.engine(P, ask(pool, u64::from(slots)));
    let leased = |world: &World, node: usize| match world.nodes[node].said.last() {
        Some(ToEngine::Leased { lease, offer, .. }) => (*lease, offer.clone()),
        other => panic!("a lease, not {other:?}"),
    };
    let ((to, offer), (lease, _)) = (leased(&world, D), leased(&world, P));
    let (seq, offer) = (RequestSeq(6), offer.expect("an offer"));
    world.engine(P, ToDaemon::Send { seq, lease, offer });
    let transfer = TransferId(1);
    for region in 0..regions {
        let checksums = Checksums {
            region,
            first: 0,
            crcs: vec![0; slots as usize],
        };
        world.engine(
            P,
            ToDaemon::Seal {
                transfer,
                checksums,
            },
        );
    }
    let payload = Bytes::new();
    world.engine(P, ToDaemon::Finish { transfer, payload });
    world.settle();
    let all = (0..regions)
        .flat_map(|region| (0..slots).map(move |position| PageRef { region, position }));
    let verified = ToDaemon::Verified {
        lease: to,
        attempt: 1,
        corrupt: all.take(corrupt).collect(),
    };
    world.engine(D, verified);
    world
}

#[test]
fn as_many_pages_as_the_limit_are_sent_again_and_no_more() {
    let most = limits::RESEND_PAGES_MAX;
    assert_eq!(arrives_corrupt(most).received(), [], "they come again");
    let failure = Failure::Corrupt {
        pages: most as u64 + 1,
        attempts: 1,
    };
    let world = arrives_corrupt(most + 1);
    assert_eq!(world.received(), [Outcome::Failed(failure)]);
}

// S9: the limit itself is allowed, and one more is refused with both numbers.
#[test]
fn a_lease_may_have_as_many_pages_as_the_limit_and_no_more() {
    let mut world = World::new();
    let pool = PoolId(2);
    let most = u32::try_from(limits::LEASE_PAGES_MAX / 1024).unwrap();
    register(&mut world, pool, wide(1024, most + 1));
    world.engine(D, ask(pool, u64::from(most) + 1));
    let (value, limit) = (limits::LEASE_PAGES_MAX + 1024, limits::LEASE_PAGES_MAX);
    assert_eq!(
        world.rejections(D),
        [Rejection::ExceedsLimit { value, limit }]
    );
    world.engine(D, ask(pool, u64::from(most)));
    let last = world.nodes[D].said.last();
    assert!(matches!(last, Some(ToEngine::Leased { .. })), "{last:?}");
}

#[test]
fn an_engine_may_have_as_many_pools_as_the_limit_and_no_more() {
    let mut world = World::new();
    let most = u32::try_from(limits::POOLS_PER_ENGINE_MAX).unwrap();
    for pool in 2..=most {
        register(&mut world, PoolId(pool), spec());
    }
    assert_eq!(world.rejections(D), []);
    register(&mut world, PoolId(most + 1), spec());
    let (value, limit) = (u64::from(most) + 1, u64::from(most));
    assert_eq!(
        world.rejections(D),
        [Rejection::ExceedsLimit { value, limit }]
    );
}

#[test]
fn an_engine_may_have_as_many_leases_as_the_limit_and_no_more() {
    let mut world = World::new();
    let (pool, most) = (PoolId(2), limits::LEASES_PER_ENGINE_MAX);
    let slots = u32::try_from(most).unwrap() + 1;
    register(&mut world, pool, wide(1, slots));
    let now = world.now;
    let host = &mut world.nodes[D].host;
    let mut lease = || {
        let (engine, message) = (ENGINE, ask(pool, 1));
        host.handle(now, Input::Engine { engine, message });
        let outputs = std::iter::from_fn(|| host.poll());
        outputs
            .filter_map(|output| match output {
                crate::host::Output::Engine { message, .. } => Some(message),
                _ => None,
            })
            .last()
    };
    for _ in 0..most {
        assert!(matches!(lease(), Some(ToEngine::Leased { .. })));
    }
    let (value, limit) = (most as u64 + 1, most as u64);
    let want = ToEngine::Rejected {
        seq: RequestSeq(9),
        reason: Rejection::ExceedsLimit { value, limit },
    };
    assert_eq!(lease(), Some(want));
}
