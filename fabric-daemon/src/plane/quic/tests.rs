//! Over real connections on loopback.

use fabric_proto::host::StoppedBy;
use quinn::Connection;

use super::*;
use crate::plane::testing::{self, Pair, Random, Side};

const OUT: LinkId = LinkId(1);
const BACK: LinkId = LinkId(2);

fn side(link: LinkId, connection: Connection) -> Side {
    faulty_side(link, connection, Arc::default())
}

fn faulty_side(link: LinkId, connection: Connection, faults: Arc<Faults>) -> Side {
    Side::new(|pools, events| {
        let plane = QuicPlane::new(pools, events, QuicLimits::default(), faults);
        plane.link_up(link, connection);
        plane
    })
}

async fn pair() -> Pair {
    let (here, there) = testing::connect().await;
    Pair {
        source: side(OUT, here),
        target: side(BACK, there),
        out: OUT,
        back: BACK,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_delivers_exact_bytes() {
    testing::delivers_exact_bytes(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_byte_lands_after_the_fence() {
    testing::no_byte_lands_after_the_fence(&mut pair().await, 300).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn intruders_are_refused_without_effect() {
    testing::intruders_are_refused_without_effect(&mut pair().await, LinkId(3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_outside_the_grant_are_refused() {
    testing::pages_outside_the_grant_are_refused(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_ends_a_run_in_its_midst() {
    testing::stop_ends_a_run_in_its_midst(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn link_down_ends_every_writer() {
    testing::link_down_ends_every_writer(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transfer_is_sent_again_under_a_new_grant() {
    testing::transfer_is_sent_again_under_a_new_grant(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_pools_and_links_are_answered() {
    testing::unknown_pools_and_links_are_answered(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_connection_ends_grant_and_writer() {
    let (here, there) = testing::connect().await;
    let (mut source, mut target) = (side(OUT, here.clone()), side(BACK, there));
    let mut random = Random::new(21);
    let spec = testing::spec(1, 1 << 20, 8);
    source.fill(spec, &mut random);
    target.fill(spec, &mut random);
    let slots: Vec<u32> = (0..8).collect();
    target.arm(1, BACK, &slots, &[]);
    source.open(1, OUT, &slots);
    for _ in 0..100 {
        source.write(1, testing::run(0, 0, 8));
    }
    target
        .wait(|event| *event == testing::Event::Landed(1))
        .await;
    here.close(0_u32.into(), b"");
    source.wait_reads_stopped(1).await;
    assert_eq!(source.count(testing::Event::WriterFailed(1)), 1);
    assert_eq!(target.wait_writes_stopped(1).await, StoppedBy::Fence);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_streams_are_refused_without_effect() {
    let (here, there) = testing::connect().await;
    let mut target = side(BACK, there);
    let mut random = Random::new(22);
    let before = target.fill(testing::spec(1, 1000, 8), &mut random);
    target.arm(1, BACK, &[0, 1, 2], &[]);
    for _ in 0..200 {
        let mut stream = here.open_uni().await.unwrap();
        let mut bytes = vec![1];
        let count = random.within(0..=200);
        bytes.extend(random.bytes(count));
        stream.write_all(&bytes).await.unwrap();
        stream.finish().unwrap();
        stream.stopped().await.unwrap();
    }
    target.settle().await;
    assert_eq!(target.log, [testing::Event::Armed(1)]);
    assert!(target.contents() == before);
    // The key, and then garbage: it ends the grant, and still nothing lands.
    let mut stream = here.open_uni().await.unwrap();
    let mut bytes = codec::encode_header(fabric_proto::ids::GrantId(1), &testing::key(1)).to_vec();
    bytes.extend([0xFF; 100]);
    stream.write_all(&bytes).await.unwrap();
    assert_eq!(target.wait_writes_stopped(1).await, StoppedBy::Fence);
    assert_eq!(
        stream.stopped().await.unwrap(),
        Some(code::MALFORMED.into())
    );
    assert!(target.contents() == before);
}

#[tokio::test(flavor = "multi_thread")]
async fn end_inside_a_run_is_no_drain() {
    let (here, there) = testing::connect().await;
    let mut target = side(BACK, there);
    target.fill(testing::spec(1, 1000, 8), &mut Random::new(23));
    for (grant, cut) in [(1, 1), (2, 5), (3, 10), (4, 11), (5, 1009)] {
        target.arm(grant, BACK, &[0, 1, 2], &[]);
        let mut stream = here.open_uni().await.unwrap();
        let mut bytes =
            codec::encode_header(fabric_proto::ids::GrantId(grant), &testing::key(grant)).to_vec();
        let run = [0, 0, 1, 0, 0, 0, 1, 0, 0, 0];
        bytes.extend(run.iter().chain(&[9; 1000]).take(cut));
        stream.write_all(&bytes).await.unwrap();
        stream.finish().unwrap();
        assert_eq!(
            target.wait_writes_stopped(grant).await,
            StoppedBy::Fence,
            "{cut}"
        );
    }
}

#[cfg(feature = "fault-injection")]
async fn faulty_pair(faults: &Arc<Faults>) -> Pair {
    let (here, there) = testing::connect().await;
    Pair {
        source: faulty_side(OUT, here, Arc::clone(faults)),
        target: faulty_side(BACK, there, Arc::clone(faults)),
        out: OUT,
        back: BACK,
    }
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
async fn flipped_pages_arrive_flipped() {
    let faults = Arc::default();
    testing::flipped_pages_arrive_flipped(&mut faulty_pair(&faults).await, &faults).await;
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
async fn stalled_writer_is_silent_until_it_is_stopped() {
    let stall_after_bytes = Some(4500);
    let faults = Arc::new(Faults {
        stall_after_bytes,
        ..Faults::default()
    });
    let mut pair = faulty_pair(&faults).await;
    testing::stalled_writer_is_silent_until_it_is_stopped(&mut pair, 4500, StoppedBy::Fence).await;
}
