//! Against peers that keep no rule.

mod liar;
mod lies;

use std::time::Instant;

use fabric_proto::ids::GrantId;

use self::liar::{FIRST, Liar, PATIENCE, RECEIVE, TRUTH, meet, meet_over, met};
use super::super::codec::{self, LaneNumber, LaneOffer, Message};
use super::super::extents::{Cover, Reach};
use super::super::ffi::{SendChain, Signal};
use super::*;

/// Waits until a grant is armed, or closed without.
async fn ended_first(target: &mut Side, grant: u64) -> bool {
    let either = |event: &Event| match *event {
        Event::Armed(of) | Event::WritesStopped(of, _) => of == grant,
        Event::Landed(_) | Event::ReadsStopped(_) | Event::WriterFailed(_) | Event::Written(..) => {
            false
        }
    };
    target.wait(either).await != Event::Armed(grant)
}

/// Two honest planes, and a liar that has met the destination's.
async fn beside_a_liar() -> (Pair, [Arc<VerbsPlane>; 2], Liar) {
    let (pair, planes) = planes_with(on_one_port(&[Mode::Window]), &Arc::default()).await;
    let liar = meet(&planes[1], LIARS, 16).await;
    (pair, planes, liar)
}

/// An honest transfer of every page to `slots`.
async fn transfer(pair: &mut Pair, grant: u64, slots: &[u32]) {
    let count = u32::try_from(slots.len()).unwrap();
    pair.target.arm(grant, BACK, slots, &[]);
    pair.target
        .wait(|event| *event == Event::Armed(grant))
        .await;
    pair.source.open(grant, OUT, slots);
    pair.source.write(grant, testing::run(0, 0, count));
    pair.source.drain(grant);
    pair.source.wait_reads_stopped(grant).await;
    let by = pair.target.wait_writes_stopped(grant).await;
    assert_eq!(by, StoppedBy::Drain, "{grant}");
}

fn copy_slots(spec: &fabric_proto::pool::PoolSpec, from: &[u8], to: &mut [u8], slots: &[u32]) {
    let page = spec.layout.page_bytes as usize;
    for slot in slots {
        let at = *slot as usize * page;
        to[at..at + page].copy_from_slice(&from[at..at + page]);
    }
}

/// More messages than there are receives for, through every lane, all the time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_flood_of_messages_stops_nobody_else() {
    let (mut pair, _planes, mut liar) = beside_a_liar().await;
    let mut random = Random::new(43);
    let spec = testing::spec(1, 4096, 32);
    let source = pair.source.fill(spec, &mut random);
    let mut shadow = pair.target.fill(spec, &mut random);
    // One of its lanes has a grant.
    pair.target.arm(NEXT, LIARS, &[31], &[]);
    pair.target.wait(|event| *event == Event::Armed(NEXT)).await;
    for grant in 1..=40 {
        for lane in liar.living() {
            for _ in 0..8 {
                let mut chain = SendChain::new();
                for number in 0..SendChain::MAX {
                    let number = u32::try_from(number).unwrap() % 4;
                    chain.send_immediate(TRUTH, Signal::Yes, number);
                }
                liar.post(lane, &mut chain, 32);
            }
        }
        let slots = random.pick(5, 30);
        transfer(&mut pair, grant, &slots).await;
        copy_slots(&spec, &source, &mut shadow, &slots);
        assert!(pair.target.contents() == shadow, "{grant}");
    }
    pair.target.fence(NEXT);
    pair.target.wait_writes_stopped(NEXT).await;
    println!("{:?}", liar.fates);
    assert!(liar.fates.done > 2 * u64::from(lanes::RECEIVES));
}

/// Lanes that are offered and gone in one breath leave completions behind: a thousand receives each
/// are flushed. They have room.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_flood_of_lanes_stops_nobody_else() {
    let (mut pair, planes, mut liar) = beside_a_liar().await;
    let mut random = Random::new(44);
    let spec = testing::spec(1, 4096, 32);
    let source = pair.source.fill(spec, &mut random);
    let mut shadow = pair.target.fill(spec, &mut random);
    for grant in 1..=6 {
        for lane in (grant * 1000..).take(200) {
            let lane = LaneNumber(u32::try_from(lane).unwrap());
            liar.say(Message::Lane(LaneOffer {
                lane,
                rail: 0,
                their_rail: 0,
                number: 0x00AB_CDEF,
                first: FIRST,
            }))
            .await;
            liar.say(Message::LaneGone {
                lane,
                offered_by_sender: true,
            })
            .await;
        }
        let slots = random.pick(5, 32);
        transfer(&mut pair, grant, &slots).await;
        copy_slots(&spec, &source, &mut shadow, &slots);
        assert!(pair.target.contents() == shadow, "{grant}");
    }
    // Four of ours for each of two peers, and the honest one's four.
    let deadline = Instant::now() + PATIENCE;
    while planes[1].objects()[0] != ("queue_pair", 12) {
        liar.catch_up().await;
        assert!(Instant::now() < deadline, "{:?}", planes[1].objects());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A lane whose other end takes no message is no lane, and says so in time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_posts_no_receives_is_not_used() {
    log();
    let (_target, plane) = side(on_one_port(&[Mode::Window]), &Arc::default());
    let (out, back) = testing::connect().await;
    let posing = async {
        let mut liar = Liar::new(&out, 0).await;
        liar.say(Message::Usable(true)).await;
        while !matches!(liar.hear().await, Message::Usable(false)) {}
        liar
    };
    let both = async { tokio::join!(plane.introduce(&back, Opener::Peer), posing) };
    let (introduced, _liar) = tokio::time::timeout(PATIENCE * 2, both).await.unwrap();
    assert!(introduced.unwrap().is_none());
}

/// The same, where it had receives at first: grants wait for a lane, and their fence is not kept.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn grants_of_a_peer_that_takes_no_messages_end_in_proof() {
    let (mut target, _plane, mut liar) = met(&[Mode::Window], 16).await;
    let mut random = Random::new(45);
    target.fill(testing::spec(1, 4096, 32), &mut random);
    liar.receives = 0;
    for grant in 1..=12 {
        target.arm(grant, BACK, &[1, 3], &[]);
        // The first four have lanes.
        if grant <= 4 {
            target.wait(|event| *event == Event::Armed(grant)).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        target.fence(grant);
        let by = target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Fence);
        liar.catch_up().await;
    }
    // It takes messages again.
    liar.receives = 16;
    target.arm(100, BACK, &[1, 3], &[]);
    let armed = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(reach) = liar.reaches.remove(&GrantId(100)) {
                return reach;
            }
            // Lanes that carry nothing are given up in their own time; so are these.
            for number in liar.lanes.keys().copied().collect::<Vec<_>>() {
                liar.lanes[&number]
                    .queue_pair
                    .post_receives(RECEIVE, 1)
                    .unwrap_or(());
            }
            let heard = tokio::time::timeout(Duration::from_millis(50), liar.messages.recv()).await;
            if let Ok(Some(message)) = heard {
                liar.took(&message).await;
            }
        }
    });
    let (_lane, reach) = armed.await.unwrap();
    assert_eq!(reach.extents.len(), 2);
}

/// S4: a source's pins end without the help of a destination that takes no message. It has taken
/// the writes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_destination_without_receives_holds_nothing_after_a_stop() {
    let (mut source, _plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 4096, 32);
    source.fill(spec, &mut Random::new(48));
    let lane = LaneNumber(7);
    let (_queue_pair, region) = liar.offer(lane).await;
    liar.grant(1, lane, &region).await;
    source.open(1, BACK, &[4, 9]);
    source.write(1, testing::run(0, 0, 2));
    source
        .wait(|event| matches!(event, Event::Written(1, _)))
        .await;
    source.drain(1);
    source.settle().await;
    assert_eq!(source.count(Event::ReadsStopped(1)), 0, "it waits");
    source.stop(1);
    source.wait_reads_stopped(1).await;
    assert_eq!(source.count(Event::WriterFailed(1)), 1);
}

/// S4: nor do they wait for another writer, to whom the peer has given the same lane.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_writer_that_waits_for_anothers_lane_is_over_soon_after_its_stop() {
    let (mut source, _plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 4096, 32);
    source.fill(spec, &mut Random::new(49));
    let lane = LaneNumber(7);
    let (_queue_pair, region) = liar.offer(lane).await;
    for grant in [1, 2] {
        liar.grant(grant, lane, &region).await;
        source.open(grant, BACK, &[4, 9]);
        source.write(grant, testing::run(0, 0, 2));
    }
    source
        .wait(|event| matches!(event, Event::Written(1, _)))
        .await;
    source.stop(2);
    source.wait_reads_stopped(2).await;
    assert_eq!(source.written(2), 0);
    assert_eq!(source.count(Event::ReadsStopped(1)), 0, "it has its lane");
}

/// It holds one of the places for handshakes, of which there are few.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_does_not_name_its_ports_is_given_up() {
    log();
    let (_side, plane) = side(on_one_port(&[Mode::Lane]), &Arc::default());
    let (out, back) = testing::connect().await;
    let silent = tokio::time::timeout(PATIENCE, plane.introduce(&back, Opener::Peer)).await;
    silent.expect("it ends by itself").unwrap_err();
    let (mut opened, _) = out.open_bi().await.unwrap();
    opened.write_all(&[0]).await.unwrap();
    let halting = tokio::time::timeout(PATIENCE, plane.introduce(&back, Opener::Peer)).await;
    halting.expect("it ends by itself").unwrap_err();
}

/// A peer that grants what nobody waits for is cut off before that is much.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn grants_that_nobody_takes_are_bounded() {
    let (_side, plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 64, 1 << 14);
    let scattered: Vec<_> = (0..8192).map(|slot| slot * 2).collect();
    let reach = Reach::plan(&spec, &scattered, &[], Cover::Slots);
    assert_eq!(reach.extents.len(), 8192);
    let mut granted = 0;
    while granted < 400 && plane.peers_refused() == 0 {
        let message = Message::Reach {
            grant: GrantId(granted),
            key: testing::key(granted),
            lanes: vec![LaneNumber(0)],
            reach: reach.clone(),
        };
        if codec::send(&mut liar.sending, &message).await.is_err() {
            break;
        }
        granted += 1;
    }
    let closed = tokio::time::timeout(PATIENCE, liar.connection.closed()).await;
    closed.expect("it is cut off, and its link ends");
    assert!((256..400).contains(&granted), "{granted}");
}

/// A peer that does not read what the plane says is cut off, and its link ends.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_does_not_listen_is_cut_off() {
    log();
    let (mut target, plane) = side(on_one_port(&[Mode::Lane]), &Arc::default());
    let connection = testing::connect_with(64 << 10).await;
    let mut liar = meet_over(connection, &plane, BACK, 16).await;
    target.fill(testing::spec(1, 64, 32), &mut Random::new(46));
    liar.is_deaf.store(true, Ordering::Relaxed);
    let mut grants = 0;
    for grant in 1..=6000 {
        target.arm(grant, BACK, &[1, 3, 5, 7], &[]);
        if ended_first(&mut target, grant).await {
            grants = grant;
            break;
        }
        // It knows of no grant, but in lane mode its word ends whatever there is.
        for lane in liar.living() {
            let mut chain = SendChain::new();
            chain.send_immediate(TRUTH, Signal::Yes, DRAIN);
            liar.post(lane, &mut chain, 1);
        }
        target.wait_writes_stopped(grant).await;
        target.log.clear();
    }
    println!("cut off at grant {grants}");
    assert!(grants > 0);
    let closed = tokio::time::timeout(PATIENCE, liar.connection.closed()).await;
    closed.expect("the link is of no use, and ends");
}

/// The link between the destination and a liar beside an honest peer.
const LIARS: LinkId = LinkId(3);

/// Grants beside those that a test counts.
const NEXT: u64 = 1 << 32;
