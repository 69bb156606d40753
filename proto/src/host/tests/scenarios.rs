//! One scenario for each path of DESIGN 5, and one for each fault from the field.

use std::time::Duration;

use super::world::*;
use crate::host::{Input, Misbehaviour, Observation, ScrubPolicy, StoppedBy, Tenants};
use crate::ids::{EngineId, GrantId, LinkId, PoolId, RequestSeq, SlotIndex, TransferId};
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{PoolSpec, TokenRange};
use crate::wire::{
    AbortPolicy, Checksums, Offer, PeerMessage, PlaneKind, Purpose, ToDaemon, ToEngine,
};

#[test]
fn a_transfer_is_delivered_and_both_sides_say_so() {
    let mut world = World::new();
    let begun = world.arrive(10);
    let expected: u32 = world.nodes[D]
        .said
        .iter()
        .filter_map(|said| match said {
            ToEngine::Expect { checksums, .. } => Some(checksums.run().count),
            _ => None,
        })
        .sum();
    assert_eq!(
        expected,
        3 * u32::from(REGIONS),
        "the engine knows what each page must hold"
    );
    assert!(
        matches!(world.nodes[D].said.last(), Some(ToEngine::Verify { payload, .. })
        if payload == "first token")
    );
    assert_eq!(world.received(), [], "no outcome before the verification");
    world.verify(&begun, 1, vec![]);
    world.settle();
    assert_eq!(world.received(), [Outcome::Delivered]);
    assert_eq!(world.sent(), [Outcome::Delivered]);
    world.end(P, begun.from, AbortPolicy::DrainNow);
    world.end(D, begun.to, AbortPolicy::DrainNow);
    world.all_is_free();
}

#[test]
fn pages_go_out_while_later_ones_are_computed() {
    let mut world = World::new();
    let begun = world.begin(10);
    world.settle();
    let checksums = Checksums {
        region: 0,
        first: 0,
        crcs: vec![1, 2, 3],
    };
    world.engine(
        P,
        ToDaemon::Seal {
            transfer: begun.transfer,
            checksums,
        },
    );
    let written = |event: &Event| matches!(event, Event::Written(_, _, 200));
    assert!(
        world.queue.iter().any(|(_, event)| written(event)),
        "two pages fit in 250 bytes"
    );
    assert_eq!(
        world.queue.len(),
        2,
        "S8: and the third waits for a completion"
    );
}

#[test]
fn commit_and_drain_may_arrive_in_either_order() {
    for drain_first in [true, false] {
        let mut world = World::new();
        let begun = world.begin(8);
        world.seal_all(&begun);
        world.finish(&begun);
        world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Commit { .. })));
        if drain_first {
            let commit = world.queue.pop_front().unwrap();
            world.settle();
            assert_eq!(
                world.nodes[D].host.usage().granted,
                0,
                "the proof closes the grant"
            );
            world.queue.push_back(commit);
        }
        world.settle();
        world.verify(&begun, 1, vec![]);
        world.settle();
        assert_eq!(
            world.received(),
            [Outcome::Delivered],
            "drain first: {drain_first}"
        );
    }
}

#[test]
fn only_corrupt_pages_are_sent_again_and_nothing_else_can_be_written() {
    let mut world = World::new();
    let begun = world.arrive(12);
    world.verify(&begun, 1, pages(&[(1, 2), (0, 0)]));
    world.settle_until(|node, event| node == D && matches!(event, Event::Stopped(..)));
    let (_, armed) = world.nodes[D].armed.values().next().unwrap();
    assert_eq!(
        set(armed),
        set(&pages(&[(0, 0), (1, 2)])),
        "S7: the corrupt ones alone"
    );
    world.settle();
    world.verify(&begun, 2, vec![]);
    world.settle();
    assert_eq!(world.received(), [Outcome::Delivered]);
    assert_eq!(world.sent(), [Outcome::Delivered]);
}

#[test]
fn a_page_that_stays_corrupt_fails_the_transfer() {
    let mut world = World::new();
    let begun = world.arrive(4);
    for attempt in 1..=3 {
        world.verify(&begun, attempt, pages(&[(0, 0)]));
        world.settle();
    }
    let failure = Outcome::Failed(Failure::Corrupt {
        pages: 1,
        attempts: 3,
    });
    assert_eq!(world.received(), [failure]);
    assert_eq!(world.sent(), [failure]);
}

#[test]
fn pages_written_verified_and_dropped_add_up() {
    let mut world = World::new();
    let begun = world.arrive(8);
    world.verify(&begun, 1, pages(&[(0, 1)]));
    world.settle();
    world.end(D, begun.to, AbortPolicy::DrainNow);
    world.settle();
    let (mut arrived, mut accounted) = (0, 0);
    for observation in &world.nodes[D].seen {
        match observation {
            Observation::PagesArrived { pages } => arrived += pages,
            Observation::PagesVerified { good, corrupt } => accounted += good + corrupt,
            Observation::PagesDropped { pages } => accounted += pages,
            _ => {}
        }
    }
    assert_eq!(
        (arrived, accounted),
        (5, 5),
        "S10: four, and the corrupt one again"
    );
}

#[test]
fn slots_of_an_aborted_request_are_not_given_away_while_its_writes_may_land() {
    let mut world = World::new();
    let begun = world.begin(24);
    world.settle();
    world.seal_all(&begun);
    world.end(D, begun.to, AbortPolicy::DrainNow);
    assert_eq!(
        world.free(D),
        0,
        "the lease is gone, and every slot still has its writer"
    );
    world.ask_lease(
        D,
        "b",
        TokenRange { start: 0, count: 4 },
        Purpose::Receive,
        vec![],
    );
    let busy = Rejection::Busy {
        slots_needed: 1,
        slots_free: 0,
    };
    assert_eq!(world.rejections(D), [busy]);
    world.settle();
    assert_eq!(world.free(D), 6, "the drain proves it");
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Destination)]);
}

#[test]
fn usage_tells_who_holds_what() {
    let usage = |world: &World, node: usize| {
        let usage = world.nodes[node].host.usage();
        assert_eq!(usage.slots, 6);
        [
            usage.free,
            usage.leased,
            usage.granted,
            usage.pinned,
            usage.quarantined,
        ]
    };
    let mut world = World::new();
    let begun = world.begin(8);
    assert!(world.nodes[D].host.deadline().is_some(), "an offer waits");
    world.settle();
    assert_eq!(usage(&world, D), [4, 2, 2, 0, 0]);
    assert_eq!(usage(&world, P), [4, 2, 0, 2, 0]);
    world.seal_all(&begun);
    world.end(D, begun.to, AbortPolicy::DrainNow);
    assert_eq!(usage(&world, D), [4, 0, 2, 0, 2]);
    world.end(P, begun.from, AbortPolicy::DrainNow);
    assert_eq!(usage(&world, P), [4, 0, 0, 2, 2]);
    world.settle();
    for node in [P, D] {
        assert_eq!(usage(&world, node), [6, 0, 0, 0, 0]);
        let seen = world.nodes[node].seen.iter();
        let freed: Vec<_> = seen
            .filter_map(|observation| match observation {
                Observation::SlotsFreed { slots } => Some(*slots),
                _ => None,
            })
            .collect();
        assert_eq!(freed, [2], "they became free at once, and that is all");
        assert_eq!(world.nodes[node].host.deadline(), None);
    }
}

#[test]
fn an_abort_that_the_writer_ignores_ends_in_a_fence() {
    let mut world = World::new();
    let begun = world.begin(24);
    world.settle();
    world.end(D, begun.to, AbortPolicy::DrainNow);
    world.queue.clear(); // The request to drain is lost on the way.
    world.pass(Duration::from_millis(999));
    assert_eq!(world.free(D), 0, "no timer frees a slot");
    world.pass(Duration::from_millis(1));
    assert_eq!(world.free(D), 0, "nor does the deadline itself");
    world.settle();
    assert_eq!(world.free(D), 6, "the fence does");
    assert!(
        world.nodes[D]
            .seen
            .contains(&Observation::GrantClosed(StoppedBy::Fence))
    );
}

/// Each time the deadline began anew, so whoever went on saying it was never fenced.
#[test]
fn a_peer_that_says_again_that_its_drain_follows_is_fenced_in_time() {
    let mut world = World::new();
    let begun = world.begin(24);
    world.settle();
    let (link, transfer) = (world.link.unwrap(), begun.transfer);
    for _ in 0..4 {
        let message = PeerMessage::Cancel {
            transfer,
            drain_follows: true,
        };
        world.input(D, Input::Peer { link, message });
        world.pass(Duration::from_millis(400));
    }
    world.settle();
    let fenced = Observation::GrantClosed(StoppedBy::Fence);
    assert!(world.nodes[D].seen.contains(&fenced), "S4: one deadline");
    assert_eq!(world.received(), [Outcome::Aborted(Abort::Source)]);
}

#[test]
fn a_lease_that_ends_may_let_its_transfer_finish() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle();
    world.end(D, begun.to, AbortPolicy::FinishTransfer);
    world.seal_all(&begun);
    world.finish(&begun);
    world.settle();
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Destination)]);
    assert_eq!(world.received(), [], "nobody is there to be told");
    assert_eq!(world.free(D), 6);
}

#[test]
fn an_abort_by_the_source_drains() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle();
    world.engine(
        P,
        ToDaemon::AbortSend {
            transfer: begun.transfer,
        },
    );
    world.settle();
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Source)]);
    assert_eq!(world.received(), [Outcome::Aborted(Abort::Source)]);
    assert!(
        world.nodes[D]
            .seen
            .contains(&Observation::GrantClosed(StoppedBy::Drain))
    );
}

#[test]
fn an_abort_by_the_source_before_the_grant_reaches_it_is_fenced() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Granted { .. })));
    world.engine(
        P,
        ToDaemon::AbortSend {
            transfer: begun.transfer,
        },
    );
    world.settle();
    assert_eq!(world.received(), [Outcome::Aborted(Abort::Source)]);
    assert!(
        world.nodes[D]
            .seen
            .contains(&Observation::GrantClosed(StoppedBy::Fence))
    );
}

#[test]
fn source_pages_are_held_while_they_are_read_whatever_the_lease_does() {
    let mut world = World::new();
    let begun = world.begin(24);
    world.settle();
    world.seal_all(&begun);
    world.end(P, begun.from, AbortPolicy::DrainNow);
    assert_eq!(world.free(P), 0, "the plane may still read every slot");
    assert_eq!(
        world.sent(),
        [],
        "and the engine is not told that it may change them"
    );
    world.settle();
    assert_eq!(world.free(P), 6);
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Source)]);
}

#[test]
fn a_lost_link_fails_both_sides_at_every_step_and_leaks_nothing() {
    for steps in 0..200 {
        let mut world = World::new();
        let begun = world.begin(10);
        world.seal_all(&begun);
        world.finish(&begun);
        let mut arrived = false;
        for _ in 0..steps {
            let Some((index, event)) = world.queue.pop_front() else {
                arrived = true;
                break;
            };
            world.deliver(index, event);
        }
        world.cut();
        for (_, event) in &mut world.queue {
            if *event == Event::LinkUp {
                *event = Event::ConnectFailed;
            }
        }
        world.settle();
        world.pass(Duration::from_secs(4));
        world.settle();
        let sent = world.sent();
        assert_eq!(sent.len(), 1, "one outcome after {steps} steps");
        assert_ne!(sent[0], Outcome::Delivered);
        if arrived {
            // The pages had arrived: the destination is the authority, and goes on.
            assert_eq!(sent, [Outcome::Failed(Failure::VerdictUnknown)]);
            world.verify(&begun, 1, vec![]);
            assert_eq!(world.received(), [Outcome::Delivered]);
        }
        world.pass(Duration::from_secs(60));
        world.settle();
        assert_eq!(world.received().len(), 1, "one outcome after {steps} steps");
        world.end(P, begun.from, AbortPolicy::DrainNow);
        world.end(D, begun.to, AbortPolicy::DrainNow);
        world.all_is_free();
        if arrived {
            return;
        }
    }
    panic!("the transfer never arrived");
}

#[test]
fn corrupt_pages_cannot_be_asked_for_once_the_source_is_gone() {
    let mut world = World::new();
    let begun = world.arrive(4);
    world.cut();
    world.verify(&begun, 1, pages(&[(0, 0)]));
    let failure = Failure::Corrupt {
        pages: 1,
        attempts: 1,
    };
    assert_eq!(world.received(), [Outcome::Failed(failure)]);
}

#[test]
fn a_silent_writer_is_fenced() {
    let mut world = World::new();
    world.begin(8);
    world.settle();
    world.pass(Duration::from_secs(29));
    world.input(D, Input::Landed { grant: GrantId(1) });
    world.pass(Duration::from_secs(29));
    assert_eq!(world.received(), [], "a byte is a sign of life");
    world.pass(Duration::from_secs(1));
    world.settle();
    let failure = Failure::Silent {
        waited_ms: 30_000,
        limit_ms: 30_000,
    };
    assert_eq!(world.received(), [Outcome::Failed(failure)]);
    assert_eq!(world.sent(), [Outcome::Failed(failure)]);
}

#[test]
fn a_commit_without_its_drain_is_fenced_and_fails() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.seal_all(&begun);
    world.finish(&begun);
    world.settle_until(|node, event| node == D && matches!(event, Event::Stopped(..)));
    world
        .queue
        .retain(|(_, event)| !matches!(event, Event::Stopped(_, StoppedBy::Drain)));
    world.settle();
    world.pass(Duration::from_secs(1));
    world.settle();
    let failure = Failure::DrainLate {
        waited_ms: 1000,
        limit_ms: 1000,
    };
    assert_eq!(world.received(), [Outcome::Failed(failure)]);
}

#[test]
fn an_offer_that_nobody_uses_ends() {
    let mut world = World::new();
    let (lease, _, _) = world.lease(D, "a", 4, Purpose::Receive);
    world.pass(Duration::from_secs(30));
    let failure = Failure::OfferUnused {
        waited_ms: 30_000,
        limit_ms: 30_000,
    };
    assert_eq!(world.received(), [Outcome::Failed(failure)]);
    assert_eq!(
        world.free(D),
        5,
        "and the lease is still the engine's to end"
    );
    world.end(D, lease, AbortPolicy::DrainNow);
    world.all_is_free();
}

#[test]
fn an_offer_is_good_for_one_grant() {
    let mut world = World::new();
    let begun = world.begin(4);
    world.settle();
    let (from, _, _) = world.lease(P, "a", 4, Purpose::Hold);
    world.engine(
        P,
        ToDaemon::Send {
            seq: RequestSeq(3),
            lease: from,
            offer: begun.offer,
        },
    );
    world.settle();
    assert_eq!(world.sent(), [Outcome::Rejected(Rejection::OfferUsed)]);
}

#[test]
fn an_offer_of_another_life_key_or_node_opens_nothing() {
    let mut world = World::new();
    let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let real = Offer::peek(&offer.unwrap()).unwrap();
    let key = config(D).secret;
    let life = |value| crate::ids::Incarnation::new(value).unwrap();
    let stale = Offer {
        incarnation: life(6),
        ..real.clone()
    };
    let forged = Offer {
        lease: crate::ids::LeaseId(9),
        ..real.clone()
    };
    world.connect();
    let link = world.link.unwrap();
    for (transfer, offer) in [(1, stale.sign(&key)), (2, forged.sign(&config(P).secret))] {
        let open = PeerMessage::Open {
            transfer: TransferId(transfer),
            offer,
            layout: spec().layout,
            tokens: real.tokens,
            tenant: tenant("a"),
            plane: PlaneKind::Quic,
        };
        world.input(
            D,
            Input::Peer {
                link,
                message: open,
            },
        );
    }
    let refused: Vec<_> = world
        .queue
        .iter()
        .filter_map(|(_, event)| match event {
            Event::Peer(PeerMessage::Refused { reason, .. }) => Some(*reason),
            _ => None,
        })
        .collect();
    let stale = Rejection::OfferStale {
        incarnation: 6,
        incarnation_now: 7,
    };
    assert_eq!(refused, [stale, Rejection::OfferForged]);
    assert_eq!(world.nodes[D].host.usage().granted, 0);
}

/// The source asks again where the node is: its link may be to a daemon that is dead, and the offer
/// from the one that came after it.
#[test]
fn an_offer_of_a_later_life_waits_for_a_link_to_that_life() {
    for restarted in [false, true] {
        let mut world = World::new();
        let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
        let (from, _, _) = world.lease(P, "a", 4, Purpose::Hold);
        let incarnation = crate::ids::Incarnation::new(8).unwrap();
        let offer = Offer {
            incarnation,
            ..Offer::peek(&offer.unwrap()).unwrap()
        };
        world.connect();
        let send = ToDaemon::Send {
            seq: RequestSeq(2),
            lease: from,
            offer: offer.sign(&config(D).secret),
        };
        world.engine(P, send);
        assert_eq!(world.rejections(P), [], "not before the node was asked");
        let asks = |world: &World| {
            let mut queue = world.queue.iter();
            queue.any(|(_, event)| matches!(event, Event::Peer(PeerMessage::Open { .. })))
        };
        assert!(!asks(&world));
        if restarted {
            let up = Input::LinkUp {
                link: LinkId(77),
                node: offer.node,
                incarnation,
                planes: vec![PlaneKind::Quic],
            };
            world.input(P, up);
            assert!(asks(&world), "the later life is asked for its grant");
        } else {
            world.settle();
            let reason = Rejection::OfferStale {
                incarnation: 8,
                incarnation_now: 7,
            };
            assert_eq!(world.sent(), [Outcome::Rejected(reason)]);
        }
    }
}

#[test]
fn nobody_writes_for_another_tenant() {
    let mut world = World::new();
    let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let (from, _, _) = world.lease(P, "b", 4, Purpose::Hold);
    let offer = offer.unwrap();
    world.engine(
        P,
        ToDaemon::Send {
            seq: RequestSeq(2),
            lease: from,
            offer,
        },
    );
    assert_eq!(world.rejections(P), [Rejection::TenantMismatch]);
}

#[test]
fn layouts_that_differ_are_refused_and_both_engines_learn_it() {
    let mut world = World::new();
    let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let mut spec = spec();
    spec.layout.model = crate::ids::Tag([2; 32]);
    let (engine, pool) = (EngineId(2), PoolId(2));
    world.input(
        P,
        Input::EngineUp {
            engine,
            tenants: Tenants::Any,
        },
    );
    let memory_bytes = spec.bytes();
    let seq = RequestSeq(0);
    world.input(
        P,
        Input::RegisterPool {
            engine,
            seq,
            pool,
            spec,
            memory_bytes,
        },
    );
    let message = ToDaemon::Lease {
        seq,
        pool,
        tenant: tenant("a"),
        request: crate::ids::RequestId::new("r").unwrap(),
        tokens: TokenRange { start: 0, count: 4 },
        purpose: Purpose::Hold,
        named: vec![],
    };
    world.input(P, Input::Engine { engine, message });
    let Some(ToEngine::Leased { lease, .. }) = world.nodes[P].said.last() else {
        panic!()
    };
    let message = ToDaemon::Send {
        seq,
        lease: *lease,
        offer: offer.unwrap(),
    };
    world.input(P, Input::Engine { engine, message });
    world.settle();
    let reason = Rejection::LayoutMismatch {
        page_bytes: 100,
        page_bytes_wanted: 100,
    };
    assert_eq!(world.sent(), [Outcome::Rejected(reason)]);
    assert_eq!(world.received(), [Outcome::Rejected(reason)]);
}

#[test]
fn a_request_that_cannot_fit_is_rejected_before_any_slot_is_leased() {
    let mut world = World::new();
    let ask = |world: &mut World, start, count| {
        let tokens = TokenRange { start, count };
        world.ask_lease(D, "a", tokens, Purpose::Receive, vec![]);
        *world.rejections(D).last().unwrap()
    };
    let exceeds = |tokens| Rejection::ExceedsContext {
        tokens,
        context: 24,
    };
    assert_eq!(ask(&mut world, 0, 25), exceeds(25));
    assert_eq!(ask(&mut world, 24, 1), exceeds(25));
    assert_eq!(ask(&mut world, u64::MAX - 3, u64::MAX), exceeds(u64::MAX));
    assert_eq!(
        ask(&mut world, 2, 4),
        Rejection::Malformed { value: 2, bound: 4 }
    );
    assert_eq!(
        ask(&mut world, 0, 0),
        Rejection::Malformed { value: 0, bound: 1 }
    );
    assert_eq!(world.free(D), 6);
    world.lease(D, "a", 21, Purpose::Receive);
    assert_eq!(
        ask(&mut world, 0, 1),
        Rejection::Busy {
            slots_needed: 1,
            slots_free: 0
        }
    );
}

#[test]
fn a_pool_is_refused_with_both_numbers() {
    let mut world = World::new();
    let mut refused = |pool, spec: PoolSpec, memory_bytes| {
        let (engine, seq) = (ENGINE, RequestSeq(0));
        let pool = PoolId(pool);
        world.input(
            D,
            Input::RegisterPool {
                engine,
                seq,
                pool,
                spec,
                memory_bytes,
            },
        );
        assert_eq!(world.nodes[D].unmapped.last(), Some(&pool));
        *world.rejections(D).last().unwrap()
    };
    let short = PoolSpec {
        context_tokens: 25,
        ..spec()
    };
    let reason = refused(2, short, u64::MAX);
    assert_eq!(
        reason,
        Rejection::PoolTooSmall {
            tokens: 24,
            context: 25
        }
    );
    let reason = refused(3, spec(), 1199);
    assert_eq!(
        reason,
        Rejection::MemoryTooSmall {
            bytes: 1199,
            bytes_needed: 1200
        }
    );
    let mut wide = spec();
    wide.layout.page_bytes = 251;
    let reason = refused(4, wide, u64::MAX);
    assert_eq!(
        reason,
        Rejection::ExceedsLimit {
            value: 251,
            limit: 250
        }
    );
}

#[test]
fn an_engine_may_name_its_slots_but_only_free_ones() {
    let mut world = World::new();
    let tokens = TokenRange { start: 0, count: 8 };
    let named = |indices: [u32; 2]| indices.map(SlotIndex).to_vec();
    world.ask_lease(D, "a", tokens, Purpose::Hold, named([4, 2]));
    let Some(ToEngine::Leased { slots, .. }) = world.nodes[D].said.last() else {
        panic!()
    };
    assert_eq!(
        slots.iter().map(|slot| slot.index.0).collect::<Vec<_>>(),
        [4, 2]
    );
    for (indices, slot) in [([0, 4], 4), ([1, 1], 1), ([0, 6], 6)] {
        world.ask_lease(D, "a", tokens, Purpose::Hold, named(indices));
        let refused = Rejection::SlotNotFree { slot, slots: 6 };
        assert_eq!(world.rejections(D).last(), Some(&refused));
    }
    world.ask_lease(D, "a", tokens, Purpose::Hold, vec![SlotIndex(0)]);
    assert_eq!(
        world.rejections(D).last(),
        Some(&Rejection::Malformed { value: 1, bound: 2 })
    );
}

#[test]
fn another_tenants_bytes_are_overwritten_before_the_lease_is_given_out() {
    let mut world = World::new();
    let (first, _, _) = world.lease(D, "a", 24, Purpose::Hold);
    world.end(D, first, AbortPolicy::DrainNow);
    let said = world.nodes[D].said.len();
    let message = ToDaemon::Lease {
        seq: RequestSeq(5),
        pool: POOL,
        tenant: tenant("b"),
        request: crate::ids::RequestId::new("r").unwrap(),
        tokens: TokenRange { start: 0, count: 8 },
        purpose: Purpose::Hold,
        named: vec![],
    };
    world.engine(D, message);
    assert_eq!(world.nodes[D].said.len(), said, "no reply before the scrub");
    assert_eq!(world.nodes[D].scrubs.len(), 1);
    // The engine dies while its slots are scrubbed: they stay held until the scrub is over.
    world.input(D, Input::EngineGone { engine: ENGINE });
    assert_eq!(world.nodes[D].unmapped, [], "the scrub still writes there");
    world.settle();
    assert_eq!(world.nodes[D].unmapped, [POOL]);
}

#[test]
fn the_scrub_policy_decides() {
    for (policy, scrubs) in [(ScrubPolicy::Always, 2), (ScrubPolicy::Never, 0)] {
        let mut world = World::with(|node| super::super::Config {
            scrub: policy,
            ..config(node)
        });
        let mut count = 0;
        for name in ["a", "b"] {
            let tokens = TokenRange { start: 0, count: 4 };
            let message = ToDaemon::Lease {
                seq: RequestSeq(5),
                pool: POOL,
                tenant: tenant(name),
                request: crate::ids::RequestId::new("r").unwrap(),
                tokens,
                purpose: Purpose::Hold,
                named: vec![SlotIndex(0)],
            };
            world.engine(D, message);
            count += world.nodes[D].scrubs.len();
            world.settle();
            let Some(ToEngine::Leased { lease, .. }) = world.nodes[D].said.last() else {
                panic!()
            };
            let lease = *lease;
            world.end(D, lease, AbortPolicy::DrainNow);
        }
        assert_eq!(count, scrubs, "{policy:?}");
    }
}

#[test]
fn an_engine_that_dies_keeps_its_memory_mapped_until_the_last_write_is_impossible() {
    let mut world = World::new();
    world.begin(8);
    world.settle();
    world.input(D, Input::EngineGone { engine: ENGINE });
    assert_eq!(world.nodes[D].unmapped, [], "a write may still land");
    world.settle();
    assert_eq!(world.nodes[D].unmapped, [POOL]);
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Destination)]);
}

#[test]
fn a_prefill_engine_that_dies_fails_its_transfers() {
    let mut world = World::new();
    world.begin(8);
    world.settle();
    world.input(P, Input::EngineGone { engine: ENGINE });
    world.settle();
    assert_eq!(world.received(), [Outcome::Aborted(Abort::Source)]);
    assert_eq!(world.nodes[P].unmapped, [POOL]);
}

#[test]
fn an_unreachable_destination_is_a_rejection() {
    let mut world = World::new();
    world.reachable = false;
    world.begin(8);
    world.settle();
    assert_eq!(
        world.sent(),
        [Outcome::Rejected(Rejection::PeerUnreachable)]
    );
}

#[test]
fn a_destination_that_does_not_answer_fails_the_transfer() {
    let mut world = World::new();
    world.begin(8);
    world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Open { .. })));
    world.queue.clear();
    world.pass(Duration::from_secs(4));
    world.settle();
    let failure = Failure::OpenLate {
        waited_ms: 4000,
        limit_ms: 4000,
    };
    assert_eq!(world.sent(), [Outcome::Failed(failure)]);
}

#[test]
fn links_without_a_common_plane_are_refused() {
    let mut world = World::new();
    world.planes.clear();
    world.begin(8);
    world.settle();
    assert_eq!(world.sent(), [Outcome::Rejected(Rejection::NoCommonPlane)]);
}

#[test]
fn shutdown_drains_then_is_complete() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle();
    world.input(D, Input::Shutdown);
    assert!(!world.nodes[D].shut, "a writer is left");
    world.settle();
    assert!(world.nodes[D].shut);
    assert_eq!(world.received(), [Outcome::Aborted(Abort::Shutdown)]);
    assert_eq!(world.sent(), [Outcome::Aborted(Abort::Destination)]);
    world.end(D, begun.to, AbortPolicy::DrainNow);
    world.ask_lease(
        D,
        "a",
        TokenRange { start: 0, count: 4 },
        Purpose::Hold,
        vec![],
    );
    assert_eq!(world.rejections(D), [Rejection::ShuttingDown]);
}

#[test]
fn a_shutdown_that_the_writer_ignores_fences() {
    let mut world = World::new();
    world.begin(8);
    world.settle();
    world.input(D, Input::Shutdown);
    world.queue.clear();
    world.pass(Duration::from_secs(1));
    world.settle();
    assert!(world.nodes[D].shut);
}

#[test]
fn an_engine_cannot_seal_twice_outside_or_finish_early() {
    let cases: [(Checksums, Misbehaviour); 2] = [
        (
            Checksums {
                region: 0,
                first: 1,
                crcs: vec![1, 2],
            },
            Misbehaviour::Page {
                region: 0,
                position: 2,
            },
        ),
        (
            Checksums {
                region: 2,
                first: 0,
                crcs: vec![1],
            },
            Misbehaviour::Page {
                region: 2,
                position: 0,
            },
        ),
    ];
    for (checksums, reason) in cases {
        let mut world = World::new();
        let begun = world.begin(8);
        world.engine(
            P,
            ToDaemon::Seal {
                transfer: begun.transfer,
                checksums,
            },
        );
        assert_eq!(world.nodes[P].closed, [reason]);
    }
    let mut world = World::new();
    let begun = world.begin(8);
    world.finish(&begun);
    assert_eq!(
        world.nodes[P].closed,
        [Misbehaviour::Limit { got: 0, want: 4 }]
    );
}

#[test]
fn a_verification_of_pages_that_were_not_asked_about_is_refused() {
    for corrupt in [pages(&[(0, 9)]), pages(&[(0, 0), (0, 0)])] {
        let mut world = World::new();
        let begun = world.arrive(8);
        world.verify(&begun, 1, corrupt);
        assert_eq!(world.nodes[D].closed.len(), 1);
        assert_ne!(world.received(), [Outcome::Delivered]);
    }
}

#[test]
fn an_old_attempts_answer_is_not_taken_for_the_new_ones() {
    let mut world = World::new();
    let begun = world.arrive(8);
    world.verify(&begun, 1, pages(&[(0, 0)]));
    world.settle();
    world.verify(&begun, 1, vec![]);
    assert_eq!(world.nodes[D].closed, [Misbehaviour::OutOfPlace]);
    assert_ne!(world.received(), [Outcome::Delivered]);
}

#[test]
fn peers_that_break_the_protocol_lose_their_link() {
    let hostile = [
        PeerMessage::Commit {
            grant: GrantId(99),
            digest: crate::ids::Tag([0; 32]),
            payload: bytes::Bytes::new(),
        },
        PeerMessage::Verdict {
            transfer: TransferId(99),
            outcome: Outcome::Delivered,
        },
        PeerMessage::Checksums {
            grant: GrantId(1),
            checksums: Checksums {
                region: 0,
                first: 0,
                crcs: vec![0; 9],
            },
        },
    ];
    for message in hostile {
        let mut world = World::new();
        world.begin(8);
        world.settle();
        let link = world.link.unwrap();
        world.input(
            D,
            Input::Peer {
                link,
                message: message.clone(),
            },
        );
        assert_eq!(world.nodes[D].closed.len(), 1, "{message:?}");
        world.settle();
        assert_eq!(world.received(), [Outcome::Failed(Failure::LinkLost)]);
    }
}

/// Once it ended the honest daemon: completions of the one were taken for the other's.
#[test]
fn a_peer_that_gives_the_same_grant_twice_loses_its_link() {
    let mut world = World::new();
    let begun = world.arrive(8);
    world.verify(&begun, 1, pages(&[(0, 0)]));
    let again = |event: &Event| matches!(event, Event::Peer(PeerMessage::Granted { .. }));
    world.settle_until(|node, event| node == P && again(event));
    let Some((_, Event::Peer(granted))) = world.queue.front().cloned() else {
        panic!("the grant for the corrupt page is next");
    };
    world.settle();
    let (link, message) = (world.link.unwrap(), granted);
    world.input(P, Input::Peer { link, message });
    assert_eq!(world.nodes[P].closed, [Misbehaviour::OutOfPlace]);
    world.settle();
    let failure = Outcome::Failed(Failure::VerdictUnknown);
    assert_eq!(world.sent(), [failure]);
}

#[test]
fn a_manifest_that_differs_fails_the_transfer() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.seal_all(&begun);
    world.finish(&begun);
    world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Commit { .. })));
    let Some((_, Event::Peer(PeerMessage::Commit { digest, .. }))) = world.queue.front_mut() else {
        panic!()
    };
    digest.0[0] ^= 1;
    world.settle();
    assert_eq!(
        world.received(),
        [Outcome::Failed(Failure::ManifestMismatch)]
    );
    assert_eq!(world.sent(), [Outcome::Failed(Failure::ManifestMismatch)]);
}

#[test]
fn a_verdict_of_delivered_before_the_commit_is_a_lie() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle();
    let link = world.link.unwrap();
    let (transfer, outcome) = (begun.transfer, Outcome::Delivered);
    world.input(
        P,
        Input::Peer {
            link,
            message: PeerMessage::Verdict { transfer, outcome },
        },
    );
    assert_eq!(world.nodes[P].closed, [Misbehaviour::OutOfPlace]);
    world.settle();
    assert_eq!(world.sent(), [Outcome::Failed(Failure::LinkLost)]);
}

#[test]
fn a_part_of_a_prompt_is_sent_from_the_middle_of_a_lease() {
    let mut world = World::new();
    let tokens = TokenRange { start: 8, count: 8 };
    world.ask_lease(D, "a", tokens, Purpose::Receive, vec![]);
    let Some(ToEngine::Leased {
        lease: to,
        offer: Some(offer),
        slots,
        ..
    }) = world.nodes[D].said.last().cloned()
    else {
        panic!()
    };
    assert_eq!(slots.len(), 2, "the shared prefix is not leased");
    let (from, _, _) = world.lease(P, "a", 16, Purpose::Hold);
    world.engine(
        P,
        ToDaemon::Send {
            seq: RequestSeq(2),
            lease: from,
            offer: offer.clone(),
        },
    );
    let Some(ToEngine::SendOpened {
        transfer,
        slots,
        offset,
        ..
    }) = world.nodes[P].said.last().cloned()
    else {
        panic!()
    };
    assert_eq!((slots, offset), (2, 2));
    let begun = Begun {
        to,
        from,
        transfer,
        slots,
        offer,
    };
    world.seal_all(&begun);
    world.finish(&begun);
    world.settle();
    world.verify(&begun, 1, vec![]);
    assert_eq!(world.received(), [Outcome::Delivered]);
}

#[test]
fn both_engines_may_be_on_one_host() {
    let mut world = World::new();
    let node = config(D).node;
    let incarnation = config(D).incarnation;
    let (to, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let (from, _, _) = world.lease(D, "a", 4, Purpose::Hold);
    let offer = offer.unwrap();
    world.engine(
        D,
        ToDaemon::Send {
            seq: RequestSeq(2),
            lease: from,
            offer,
        },
    );
    let planes = vec![PlaneKind::Shm];
    world.input(
        D,
        Input::LinkUp {
            link: LinkId::LOOPBACK,
            node,
            incarnation,
            planes,
        },
    );
    let opens = world
        .queue
        .iter()
        .filter(|(_, event)| matches!(event, Event::Peer(PeerMessage::Open { .. })));
    assert_eq!(
        opens.count(),
        1,
        "the daemon asks itself, by the same messages"
    );
    let _ = to;
}
