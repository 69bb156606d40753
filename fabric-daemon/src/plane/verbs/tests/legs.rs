//! Transfers over several devices. The host needs two: see `tests/rdma/vm`.

use fabric_proto::pool::PoolSpec;

use super::*;

const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// Four lanes through each device. Those that were meant for the other device of the same host
/// carry nothing: it does not take packets in that did not come by its wire.
async fn two_devices(modes: &[Mode]) -> (Pair, [Arc<VerbsPlane>; 2]) {
    let names = ffi::device_names().unwrap();
    assert!(
        DEVICES
            .iter()
            .all(|name| names.iter().any(|other| other == name)),
        "{names:?}"
    );
    let settings = VerbsSettings {
        devices: DEVICES.map(String::from).to_vec(),
        ..settings(modes)
    };
    planes_with(settings, &Arc::default()).await
}

/// Packets that each device has sent.
fn sent() -> [u64; 2] {
    DEVICES.map(|device| {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
        std::fs::read_to_string(path)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    })
}

async fn striped_transfers_deliver_exact_bytes(modes: &[Mode]) {
    let (mut pair, planes) = two_devices(modes).await;
    let mut random = Random::new(51);
    let spec = testing::spec(3, 32 << 10, 48);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let before = sent();
    let mut after_warm_up = None;
    for grant in 1..=30 {
        let contiguous: Vec<u32> = (2..34).collect();
        let (from, to) = match grant % 3 {
            0 => (random.pick(32, 48), contiguous),
            1 => (random.pick(32, 48), random.pick(32, 48)),
            _ => (contiguous.clone(), contiguous),
        };
        pair.begin(grant, &from, &to).await;
        for region in 0..3 {
            let run = testing::run(region, 0, 32);
            pair.source.write(grant, run);
            testing::copy(&spec, &source, &mut shadow, &from, &to, run);
        }
        pair.drain(grant, &shadow).await;
        assert_eq!(pair.source.written(grant), 3 * 32 * (32 << 10));
        if grant == 6 {
            tokio::time::sleep(Duration::from_secs(2)).await;
            after_warm_up = Some(planes.each_ref().map(|plane| plane.objects()));
        }
    }
    let carried = [0, 1].map(|device| sent()[device] - before[device]);
    let total: u64 = carried.iter().sum();
    assert!(
        carried.iter().all(|packets| *packets > total / 3),
        "{carried:?}"
    );
    tokio::time::sleep(Duration::from_secs(2)).await;
    let after = planes.each_ref().map(|plane| plane.objects());
    assert_eq!(Some(after), after_warm_up);
    pair.finish(1..=30).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn striped_transfers_use_both_devices_and_deliver_exact_bytes() {
    striped_transfers_deliver_exact_bytes(&[Mode::Window]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn striped_transfers_use_both_devices_and_deliver_exact_bytes_by_lane() {
    striped_transfers_deliver_exact_bytes(&[Mode::Lane]).await;
}

/// One of the planes' lanes that carry something breaks, if there is one.
fn break_lane(planes: &[Arc<VerbsPlane>; 2], random: &mut Random) {
    let turn = random.within(0..=1000);
    planes[random.within(0..=1)]
        .inbox
        .push(Order::Break { turn });
}

/// What became of rounds with faults.
#[derive(Debug, Default)]
struct Tally {
    delivered: u64,
    fenced: u64,
    /// Without having been told to.
    fenced_by_itself: u64,
}

/// Lanes break at random moments, and some grants are fenced then. What is drained has arrived as a
/// whole; what is fenced changes no more; nothing is ever written outside. S1, S7.
async fn lanes_break_at_random_moments(modes: &[Mode], rounds: u64) {
    let (mut pair, planes) = two_devices(modes).await;
    let mut random = Random::new(52);
    let spec = testing::spec(2, 32 << 10, 32);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let mut tally = Tally::default();
    for grant in 1..=rounds {
        let (from, to) = (random.pick(16, 32), random.pick(16, 32));
        pair.begin(grant, &from, &to).await;
        let mut whole = shadow.clone();
        for region in [0, 1, 0, 1] {
            let run = testing::run(region, 0, 16);
            pair.source.write(grant, run);
            testing::copy(&spec, &source, &mut whole, &from, &to, run);
        }
        if random.within(0..=1) == 0 {
            pair.source.drain(grant);
        }
        for _ in 0..random.within(1..=3) {
            tokio::time::sleep(Duration::from_micros(random.next() % 30_000)).await;
            break_lane(&planes, &mut random);
        }
        let is_fenced = random.within(0..=4) == 0;
        if is_fenced {
            tokio::time::sleep(Duration::from_micros(random.next() % 3000)).await;
            pair.target.fence(grant);
        }
        pair.source.drain(grant);
        let by = pair.target.wait_writes_stopped(grant).await;
        let at_proof = pair.target.contents();
        if by == StoppedBy::Fence {
            pair.source.stop(grant);
        }
        pair.source.wait_reads_stopped(grant).await;
        assert!(pair.target.contents() == at_proof, "a byte after the proof");
        match by {
            StoppedBy::Drain => {
                tally.delivered += 1;
                assert!(at_proof == whole, "every byte of the pool");
                assert_eq!(pair.source.count(Event::WriterFailed(grant)), 0);
                assert_eq!(pair.source.written(grant), 4 * 16 * (32 << 10));
            }
            StoppedBy::Fence => {
                tally.fenced += 1;
                tally.fenced_by_itself += u64::from(!is_fenced);
                assert_outside_unchanged(&spec, &shadow, &at_proof, &to);
            }
        }
        shadow = at_proof;
        let is_proof =
            |event: &Event| matches!(event, Event::ReadsStopped(_) | Event::WritesStopped(..));
        pair.source.log.retain(is_proof);
        pair.target.log.retain(is_proof);
    }
    pair.finish(1..=rounds).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let failovers = planes[1].failovers();
    println!("{rounds} rounds: {tally:?}, {failovers} failovers");
    assert!(failovers > rounds / 4, "legs went on: {failovers}");
    assert!(tally.delivered > rounds / 2, "{tally:?}");
    assert!(tally.fenced > 0, "{tally:?}");
    // A drain may have arrived, and its lane be destroyed before that is seen: safe, and the more
    // frequent the busier the host.
    assert!(tally.fenced_by_itself <= rounds / 5, "{tally:?}");
    settle(&planes).await;
}

/// Everything but the slots of a grant is as it was.
pub(super) fn assert_outside_unchanged(
    spec: &PoolSpec,
    before: &[u8],
    after: &[u8],
    slots: &[u32],
) {
    let page_bytes = spec.layout.page_bytes as usize;
    for region in 0..spec.layout.regions {
        for slot in (0..spec.slots).filter(|slot| !slots.contains(slot)) {
            let start = usize::try_from(spec.page_offset(region, slot)).unwrap();
            let page = start..start + page_bytes;
            assert!(before[page.clone()] == after[page], "a byte outside");
        }
    }
}

/// Waits until every lane is there again, and no window is bound that should not be.
async fn settle(planes: &[Arc<VerbsPlane>; 2]) {
    // Four through each of two devices, as destination and as source.
    let all = |plane: &Arc<VerbsPlane>| plane.objects()[0].1 == 16;
    for _ in 0..400 {
        if planes.iter().all(all) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:?}", planes.each_ref().map(|plane| plane.objects()));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn legs_whose_lane_breaks_go_on_through_another() {
    lanes_break_at_random_moments(&[Mode::Window], 300).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn legs_whose_lane_breaks_go_on_through_another_by_lane() {
    lanes_break_at_random_moments(&[Mode::Lane], 100).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn a_grant_that_loses_too_many_lanes_is_fenced() {
    let (mut pair, planes) = two_devices(&[Mode::Window]).await;
    let mut random = Random::new(53);
    let spec = testing::spec(1, 64 << 10, 16);
    pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..16).collect();
    // Not drained: it waits for more, and has its lanes for as long.
    pair.begin(1, &slots, &slots).await;
    for turn in 0..200 {
        planes[1].inbox.push(Order::Break { turn });
        tokio::time::sleep(Duration::from_millis(50)).await;
        pair.target.settle().await;
        let proof = Event::WritesStopped(1, StoppedBy::Fence);
        if pair.target.count(proof) > 0 {
            break;
        }
    }
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
    pair.source
        .wait(|event| *event == Event::WriterFailed(1))
        .await;
    pair.source.wait_reads_stopped(1).await;
    pair.finish(1..=1).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let failovers = planes[1].failovers();
    assert!(
        (4..=8).contains(&failovers),
        "as many as there may be: {failovers}"
    );
}

fn set_link(device: &str, state: &str) {
    let mut command = std::process::Command::new("ip");
    let status = command.args(["link", "set", device, state]).status();
    assert!(status.unwrap().success(), "ip link set {device} {state}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn transfers_outlive_a_port() {
    let (mut pair, planes) = two_devices(&[Mode::Window]).await;
    let mut random = Random::new(54);
    let spec = testing::spec(2, 64 << 10, 32);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let mut failovers = 0;
    for grant in 1..=12 {
        settle(&planes).await;
        let (from, to) = (random.pick(32, 32), random.pick(32, 32));
        pair.begin(grant, &from, &to).await;
        for region in [0, 1].repeat(4) {
            let run = testing::run(region, 0, 32);
            pair.source.write(grant, run);
            testing::copy(&spec, &source, &mut shadow, &from, &to, run);
        }
        tokio::time::sleep(Duration::from_micros(random.next() % 200_000)).await;
        set_link("eth1", "down");
        pair.drain(grant, &shadow).await;
        set_link("eth1", "up");
        failovers = planes[1].failovers();
    }
    pair.finish(1..=12).await;
    println!("12 rounds: {failovers} failovers");
    assert!(failovers > 0, "the port was in use");
}

/// Grants of one leg each: how many of the packets each device has carried.
async fn carried_by(pair: &mut Pair, grants: std::ops::RangeInclusive<u64>) -> [u64; 2] {
    let slots: Vec<u32> = (0..8).collect();
    let before = sent();
    for grant in grants {
        pair.begin(grant, &slots, &slots).await;
        pair.source.write(grant, testing::run(0, 0, 8));
        pair.source.drain(grant);
        let by = pair.target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Drain);
        pair.source.wait_reads_stopped(grant).await;
    }
    [0, 1].map(|device| sent()[device] - before[device])
}

/// The devices are moved: those of a virtual host are on no node, and its memory is on one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs RDMA devices: tests/rdma/run"]
async fn small_grants_go_through_the_device_that_is_near_their_memory() {
    let (mut pair, planes) = two_devices(&[Mode::Window]).await;
    pair.fill(testing::spec(1, 16 << 10, 8), &mut Random::new(55));
    settle(&planes).await;
    let mut grants = 1..;
    let (near, far) = (Some(0), Some(1));
    for (nodes, share) in [
        ([near, far], [1.0, 0.0]),
        ([far, near], [0.0, 1.0]),
        ([None, None], [0.5, 0.5]),
        ([far, far], [0.5, 0.5]),
    ] {
        planes[1].inbox.push(Order::Move(nodes.to_vec()));
        let first: u64 = grants.nth(7).unwrap();
        let carried = carried_by(&mut pair, first - 7..=first).await;
        println!("{nodes:?}: {carried:?}");
        let total = carried.iter().sum::<u64>() as f64;
        for (packets, share) in carried.into_iter().zip(share) {
            let got = packets as f64 / total;
            assert!((got - share).abs() < 0.1, "{nodes:?}: {carried:?}");
        }
    }
    pair.finish(1..=32).await;
}
