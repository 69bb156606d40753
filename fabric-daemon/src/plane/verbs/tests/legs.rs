//! Transfers over several devices. The host needs two: see `tests/rdma/vm`.

use super::*;

const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// Four lanes through each device. Those that were meant for the other device of the same host carry
/// nothing: it does not take packets in that did not come by its wire.
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
        pair.source.drain(grant);
        pair.source.wait_reads_stopped(grant).await;
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Drain
        );
        assert!(pair.target.contents() == shadow, "every byte of the pool");
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
