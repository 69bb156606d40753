//! On a real device, both ends in this process. They need one, so they are ignored where cargo runs
//! them, and run by `tests/rdma/run` in a virtual host.

use std::sync::Arc;
use std::time::Duration;

use fabric_proto::host::StoppedBy;
use fabric_proto::ids::TransferId;

use super::*;
use crate::plane::testing::{self, Event, Pair, Random, Side};

mod hostile;
mod legs;
mod pools;
mod port;
mod pull;

const OUT: LinkId = LinkId(1);
const BACK: LinkId = LinkId(2);

/// A plane that its test can still talk to.
struct Shared(Arc<VerbsPlane>);

impl Plane for Shared {
    fn kind(&self) -> PlaneKind {
        self.0.kind()
    }

    fn submit(&self, command: PlaneCommand) {
        self.0.submit(command);
    }

    fn pool_here(&self, pool: PoolId) -> Result<(), PoolRefused> {
        self.0.pool_here(pool)
    }

    fn pool_gone(&self, pool: PoolId) {
        self.0.pool_gone(pool);
    }

    fn link_down(&self, link: LinkId) {
        self.0.link_down(link);
    }
}

fn settings(modes: &[Mode]) -> VerbsSettings {
    VerbsSettings {
        devices: Vec::new(),
        modes: modes.to_vec(),
        lanes: 4,
    }
}

/// Where a second port of the host would only be in the way.
fn on_one_port(modes: &[Mode]) -> VerbsSettings {
    VerbsSettings {
        devices: vec!["rxe0".to_owned()],
        ..settings(modes)
    }
}

fn side(settings: VerbsSettings, faults: &Arc<Faults>) -> (Side, Arc<VerbsPlane>) {
    let mut plane = None;
    let side = Side::new(|pools, events| {
        let faults = Arc::clone(faults);
        let made = VerbsPlane::new(pools, events, settings, 4 << 20, faults).unwrap();
        Shared(Arc::clone(plane.insert(Arc::new(made))))
    });
    (side, plane.unwrap())
}

/// Shown where a test fails.
fn log() {
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG);
    let _first = log.with_ansi(false).with_test_writer().try_init();
}

/// Both planes are given as well.
async fn planes(modes: &[Mode], faults: &Arc<Faults>) -> (Pair, [Arc<VerbsPlane>; 2]) {
    planes_with(settings(modes), faults).await
}

async fn planes_with(
    settings: VerbsSettings,
    faults: &Arc<Faults>,
) -> (Pair, [Arc<VerbsPlane>; 2]) {
    planes_of([settings.clone(), settings], faults).await
}

/// The source's settings first.
async fn planes_of(
    [of_source, of_target]: [VerbsSettings; 2],
    faults: &Arc<Faults>,
) -> (Pair, [Arc<VerbsPlane>; 2]) {
    log();
    let (source, here) = side(of_source, faults);
    let (target, there) = side(of_target, faults);
    let (out, back) = testing::connect().await;
    let (ours, theirs) = tokio::join!(
        here.introduce(&out, Opener::Us),
        there.introduce(&back, Opener::Peer),
    );
    here.link_up(OUT, ours.unwrap().unwrap());
    there.link_up(BACK, theirs.unwrap().unwrap());
    let pair = Pair {
        source,
        target,
        out: OUT,
        back: BACK,
    };
    (pair, [here, there])
}

async fn pair() -> Pair {
    planes(&[Mode::Window], &Arc::default()).await.0
}

async fn lane_pair() -> Pair {
    planes(&[Mode::Lane], &Arc::default()).await.0
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn drain_delivers_exact_bytes() {
    testing::delivers_exact_bytes(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn drain_delivers_exact_bytes_by_lane() {
    testing::delivers_exact_bytes(&mut lane_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn no_byte_lands_after_the_fence() {
    testing::no_byte_lands_after_the_fence(&mut pair().await, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn no_byte_lands_after_the_fence_by_lane() {
    testing::no_byte_lands_after_the_fence(&mut lane_pair().await, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pages_outside_the_grant_are_refused() {
    testing::pages_outside_the_grant_are_refused(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn stop_ends_a_run_in_its_midst() {
    testing::stop_ends_a_run_in_its_midst(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn link_down_ends_every_writer() {
    testing::link_down_ends_every_writer(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn transfer_is_sent_again_under_a_new_grant() {
    testing::transfer_is_sent_again_under_a_new_grant(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn unknown_pools_and_links_are_answered() {
    testing::unknown_pools_and_links_are_answered(&mut pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_second_writer_and_one_with_another_key_are_refused() {
    let mut pair = pair().await;
    let mut random = Random::new(31);
    let spec = testing::spec(1, 1000, 8);
    pair.source.fill(spec, &mut random);
    let before = pair.target.fill(spec, &mut random);
    pair.target.arm(1, BACK, &[0, 1], &[]);
    pair.target.wait(|event| *event == Event::Armed(1)).await;
    let thief = TransferId(100);
    pair.source
        .open_with(thief, 1, OUT, &[0, 1], testing::key(2));
    pair.source.write(100, testing::run(0, 0, 2));
    pair.source
        .wait(|event| *event == Event::WriterFailed(1))
        .await;
    pair.source.log.clear();
    pair.source.open(1, OUT, &[0, 1]);
    pair.source.write(1, testing::run(0, 0, 2));
    pair.source
        .wait(|event| *event == Event::WriterFailed(1))
        .await;
    assert!(pair.target.contents() == before);
    pair.target.fence(1);
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn more_grants_than_lanes_wait_for_their_turn() {
    grants_wait_for_lanes(&mut pair().await).await;
}

async fn grants_wait_for_lanes(pair: &mut Pair) {
    let mut random = Random::new(32);
    let spec = testing::spec(2, 4096, 64);
    pair.source.fill(spec, &mut random);
    pair.target.fill(spec, &mut random);
    let slots = |grant: u64| [u32::try_from(grant).unwrap()];
    for grant in 1..=20 {
        pair.target.arm(grant, BACK, &slots(grant), &[]);
    }
    for grant in 1..=20 {
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        pair.source.open(grant, OUT, &slots(grant));
        pair.source.write(grant, testing::run(0, 0, 1));
        pair.source.drain(grant);
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Drain
        );
    }
}

/// No window, region or queue pair is left behind by transfers, however they end.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn ten_thousand_transfers_leave_no_object_behind() {
    let (mut pair, planes) = planes(&[Mode::Window], &Arc::default()).await;
    let mut random = Random::new(33);
    let spec = testing::spec(1, 256, 64);
    pair.source.fill(spec, &mut random);
    pair.target.fill(spec, &mut random);
    let objects = |planes: &[Arc<VerbsPlane>; 2]| {
        planes.each_ref().map(|plane| {
            let [queue_pairs, regions, (_, windows)] = plane.objects();
            // Those of a fenced grant are destroyed, and those of one that was faster are kept.
            assert!(windows <= 3, "{windows} are more than a grant has");
            [queue_pairs, regions]
        })
    };
    let mut after_warm_up = None;
    for grant in 1..=10_000 {
        let slots = random.pick(3, 64);
        pair.target.arm(grant, BACK, &slots, &[]);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, 3));
        if grant % 100 == 0 {
            pair.target.fence(grant);
            pair.source.stop(grant);
        } else {
            pair.source.drain(grant);
        }
        pair.target.wait_writes_stopped(grant).await;
        pair.source.wait_reads_stopped(grant).await;
        pair.source.log.clear();
        pair.target.log.clear();
        if grant == 200 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            after_warm_up = Some(objects(&planes));
        }
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(Some(objects(&planes)), after_warm_up);
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn flipped_pages_arrive_flipped() {
    let faults = Arc::default();
    let mut pair = planes(&[Mode::Window], &faults).await.0;
    testing::flipped_pages_arrive_flipped(&mut pair, &faults).await;
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn stalled_writer_is_silent_until_it_is_stopped() {
    let faults = Arc::new(Faults {
        stall_after_bytes: Some(4500),
        ..Faults::default()
    });
    let mut pair = planes(&[Mode::Window], &faults).await.0;
    testing::stalled_writer_is_silent_until_it_is_stopped(&mut pair, 4500, StoppedBy::Drain).await;
}

#[tokio::test]
async fn a_host_without_rdma_is_told_so() {
    if !ffi::device_names().unwrap().is_empty() {
        return; // In a virtual host there is a device, and the others are the test.
    }
    let (events, _) = tokio::sync::mpsc::channel(1);
    let settings = settings(&[Mode::Window]);
    let error = VerbsPlane::new(Arc::default(), events, settings, 1, Arc::default()).unwrap_err();
    assert_eq!(error.to_string(), "no RDMA device has an active port");
}
