//! As `guards`, for transfers from here.

use std::time::Duration;

use super::world::*;
use crate::host::{Config, Input, Misbehaviour, Observation, Output};
use crate::ids::{EngineId, GrantId, Incarnation, LinkId, NodeId, PoolId, RequestSeq, TransferId};
use crate::limits;
use crate::outcome::{Failure, Outcome, Rejection};
use crate::pool::{PageRun, TokenRange};
use crate::wire::{Offer, PeerMessage, PlaneKind, Purpose, ToDaemon, ToEngine};

fn is_granted(node: usize, event: &Event) -> bool {
    node == P && matches!(event, Event::Peer(PeerMessage::Granted { .. }))
}

/// What a grant says beside its names: the bytes that may be outstanding, and the pages.
fn next_grant(world: &mut World) -> (&mut u64, &mut Vec<PageRun>) {
    match world.queue.front_mut() {
        Some((
            _,
            Event::Peer(PeerMessage::Granted {
                outstanding_bytes_max,
                pages,
                ..
            }),
        )) => (outstanding_bytes_max, pages),
        other => panic!("a grant, not {other:?}"),
    }
}

#[test]
fn an_offer_of_the_life_at_hand_is_asked_for_at_once() {
    let mut world = World::new();
    world.connect();
    world.begin(4);
    let next = world.queue.front();
    let is_open = matches!(next, Some((D, Event::Peer(PeerMessage::Open { .. }))));
    assert!(is_open, "{next:?}");
}

#[test]
fn a_daemon_sends_as_many_transfers_as_the_limit_and_no_more() {
    let mut world = World::new();
    let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let (lease, _, _) = world.lease(P, "a", 4, Purpose::Hold);
    let (now, offer) = (world.now, offer.expect("an offer"));
    let host = &mut world.nodes[P].host;
    let mut send = || {
        let message = ToDaemon::Send {
            seq: RequestSeq(2),
            lease,
            offer: offer.clone(),
        };
        let engine = ENGINE;
        host.handle(now, Input::Engine { engine, message });
        let said = std::iter::from_fn(|| host.poll()).filter_map(|output| match output {
            Output::Engine { message, .. } => Some(message),
            _ => None,
        });
        said.last()
    };
    for _ in 0..limits::TRANSFERS_MAX {
        assert!(matches!(send(), Some(ToEngine::SendOpened { .. })));
    }
    let limit = limits::TRANSFERS_MAX as u64;
    let reason = Rejection::ExceedsLimit {
        value: limit + 1,
        limit,
    };
    let seq = RequestSeq(2);
    assert_eq!(send(), Some(ToEngine::Rejected { seq, reason }));
}

#[test]
fn an_offer_of_no_token_is_refused() {
    let mut world = World::new();
    let (_, _, offer) = world.lease(D, "a", 4, Purpose::Receive);
    let (lease, _, _) = world.lease(P, "a", 4, Purpose::Hold);
    let empty = Offer {
        tokens: TokenRange { start: 0, count: 0 },
        ..Offer::peek(&offer.expect("an offer")).unwrap()
    };
    let offer = empty.sign(&config(D).secret);
    let seq = RequestSeq(2);
    world.engine(P, ToDaemon::Send { seq, lease, offer });
    let mismatch = Rejection::TokensMismatch {
        tokens: 4,
        tokens_wanted: 0,
    };
    assert_eq!(world.rejections(P), [mismatch]);
}

#[test]
fn the_offset_counts_from_the_lease() {
    let mut world = World::new();
    let tokens = TokenRange { start: 8, count: 8 };
    world.ask_lease(D, "a", tokens, Purpose::Receive, vec![]);
    let Some(ToEngine::Leased {
        offer: Some(offer), ..
    }) = world.nodes[D].said.last().cloned()
    else {
        panic!("a lease")
    };
    let tokens = TokenRange {
        start: 4,
        count: 12,
    };
    world.ask_lease(P, "a", tokens, Purpose::Hold, vec![]);
    let Some(ToEngine::Leased { lease, .. }) = world.nodes[P].said.last().cloned() else {
        panic!("a lease")
    };
    let seq = RequestSeq(2);
    world.engine(P, ToDaemon::Send { seq, lease, offer });
    let opened = ToEngine::SendOpened {
        seq,
        transfer: TransferId(1),
        slots: 2,
        offset: 1,
    };
    assert_eq!(world.nodes[P].said.last(), Some(&opened));
}

// S7: a transfer is its link's.
#[test]
fn a_peer_cannot_speak_of_anothers_transfer() {
    for (link, transfer) in [(LinkId(77), 1), (LinkId(1), 2)] {
        let mut world = World::new();
        world.begin(8);
        world.settle();
        let up = Input::LinkUp {
            link: LinkId(77),
            node: NodeId([9; 32]),
            incarnation: Incarnation::new(1).unwrap(),
            planes: vec![PlaneKind::Quic],
        };
        world.input(P, up);
        let message = PeerMessage::Verdict {
            transfer: TransferId(transfer),
            outcome: Outcome::Failed(Failure::Plane),
        };
        world.input(P, Input::Peer { link, message });
        assert_eq!(world.nodes[P].closed, [Misbehaviour::NotYours(transfer)]);
    }
}

// S7: a transfer is its engine's.
#[test]
fn an_engine_cannot_speak_of_anothers_transfer() {
    for (engine, transfer) in [(EngineId(2), 1), (ENGINE, 2)] {
        let mut world = World::new();
        world.begin(8);
        world.engine_up(P, EngineId(2), PoolId(2));
        let message = ToDaemon::AbortSend {
            transfer: TransferId(transfer),
        };
        world.input(P, Input::Engine { engine, message });
        assert_eq!(world.nodes[P].closed, [Misbehaviour::NotYours(transfer)]);
    }
}

// S8: one page is the least that may be outstanding.
#[test]
fn a_grant_of_a_page_at_a_time_will_do_and_of_less_will_not() {
    let mut world = World::with(|node| Config {
        outstanding_bytes_max: u64::from(PAGE_BYTES),
        ..config(node)
    });
    world.arrive(12);
    let runs = [0, 1].map(|region| {
        [0, 1, 2].map(|first| PageRun {
            region,
            first,
            count: 1,
        })
    });
    assert_eq!(world.nodes[P].written, runs.as_flattened());

    let mut world = World::new();
    world.begin(12);
    world.settle_until(is_granted);
    *next_grant(&mut world).0 = u64::from(PAGE_BYTES) - 1;
    world.settle();
    let limit = Misbehaviour::Limit { got: 99, want: 100 };
    assert_eq!(world.nodes[P].closed, [limit]);
}

#[test]
fn pages_beyond_the_transfer_are_not_sent_again() {
    let mut world = World::new();
    let begun = world.arrive(8);
    world.verify(&begun, 1, pages(&[(1, 1)]));
    world.settle_until(is_granted);
    next_grant(&mut world).1[0].count = 2;
    world.settle();
    let page = Misbehaviour::Page {
        region: 1,
        position: 2,
    };
    assert_eq!(world.nodes[P].closed, [page]);
}

/// A transfer that is granted again before its source's plane has said that it reads no more.
fn again_before_reads_stopped() -> (World, Begun, Event) {
    let mut world = World::new();
    let begun = world.begin(8);
    world.seal_all(&begun);
    world.finish(&begun);
    world.settle_until(|_, event| matches!(event, Event::ReadsStopped(..)));
    let (_, stopped) = world.queue.pop_front().expect("it is the next");
    world.settle();
    world.verify(&begun, 1, pages(&[(0, 1)]));
    (world, begun, stopped)
}

#[test]
fn the_next_grant_may_come_before_the_last_writer_has_ended() {
    let (mut world, begun, stopped) = again_before_reads_stopped();
    world.settle();
    let before = world.nodes[P].written.len();
    world.deliver(P, stopped);
    world.settle();
    let again = PageRun {
        region: 0,
        first: 1,
        count: 1,
    };
    assert_eq!(world.nodes[P].written[before..], [again]);
    world.verify(&begun, 2, vec![]);
    world.settle();
    assert_eq!(world.sent(), [Outcome::Delivered]);
}

#[test]
fn a_grant_of_every_page_comes_once() {
    let (mut world, ..) = again_before_reads_stopped();
    world.settle_until(is_granted);
    next_grant(&mut world).1.clear();
    world.settle();
    assert_eq!(world.nodes[P].closed, [Misbehaviour::OutOfPlace]);
}

#[test]
fn a_verdict_is_waited_for_longer_than_the_destination_may_take() {
    let mut world = World::new();
    world.arrive(8);
    let deadline = world.nodes[P].host.deadline();
    assert_eq!(deadline.map(|at| at.0), Some(Duration::from_secs(121)));
}

// A plane that breaks fails its own transfer, and no other's.
#[test]
fn a_writer_that_fails_fails_its_transfer() {
    let mut world = World::new();
    let begun = world.begin(8);
    world.settle();
    let transfer = begun.transfer;
    for (grant, failed) in [(GrantId(9), false), (GrantId(1), true)] {
        world.input(P, Input::WriterFailed { transfer, grant });
        world.settle();
        let failure = Outcome::Failed(Failure::Plane);
        let ended = world.nodes[P]
            .seen
            .contains(&Observation::SendEnded(failure));
        assert_eq!(ended, failed, "{grant}");
    }
}
