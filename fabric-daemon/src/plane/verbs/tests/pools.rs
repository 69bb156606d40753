//! Pools that come and go, and that no device takes.

use std::sync::Weak;
use std::time::Instant;

use fabric_ipc::{Mapping, create_sealed};

use super::ffi::Access;
use super::*;
use crate::plane::{Memory, Pool};

/// Waits until a plane says that it has so many memory regions.
async fn regions_are(plane: &VerbsPlane, want: u64) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while plane.objects()[1] != ("memory_region", want) {
        assert!(Instant::now() < deadline, "{:?}", plane.objects());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn ports() -> u64 {
    rails::discover(&[]).unwrap().len() as u64
}

/// A pool that no device may write to.
fn unfit(spec: fabric_proto::pool::PoolSpec) -> Pool {
    let fd = create_sealed("unfit", spec.bytes()).unwrap();
    let memory = Mapping::read_only(&fd, spec.bytes()).unwrap();
    let memory = Memory::Host(memory);
    Pool { spec, memory, fd }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pools_are_registered_when_they_come_and_let_go_when_they_go() {
    let (side, plane) = side(settings(&[Mode::Window]), &Arc::default());
    let mut random = Random::new(61);
    for round in 0..3 {
        side.fill(testing::spec(1, 4096, 256 << round), &mut random);
        regions_are(&plane, ports()).await;
    }
    side.take_pool_away();
    regions_are(&plane, 0).await;
}

/// What is registered of a pool after it has gone is let go: its memory is nobody's.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pools_that_go_while_they_are_registered_leave_nothing_behind() {
    let (side, plane) = side(settings(&[Mode::Window]), &Arc::default());
    let mut random = Random::new(62);
    let mut gone: Vec<Weak<Pool>> = Vec::new();
    for id in (100..160).map(PoolId) {
        // Large enough that to register it takes some milliseconds.
        side.pools
            .insert(id, testing::pool(testing::spec(1, 1 << 20, 16)));
        gone.push(Arc::downgrade(&side.pools.find(id).unwrap()));
        let registering = Arc::clone(&plane);
        let registered = tokio::task::spawn_blocking(move || registering.pool_here(id));
        tokio::time::sleep(Duration::from_micros(random.next() % 20_000)).await;
        drop(side.pools.remove(id));
        side.plane.pool_gone(id);
        registered.await.unwrap().unwrap();
    }
    regions_are(&plane, 0).await;
    let deadline = Instant::now() + Duration::from_secs(20);
    while gone.iter().any(|pool| pool.strong_count() > 0) {
        assert!(Instant::now() < deadline, "a pool's memory is kept");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Which of the two is for the driver to say: soft-RoCE's does not, tests/null-verbs does.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn device_memory_is_registered_by_drivers_that_know_it_and_refused_by_others() {
    let rails = rails::discover(&[]).unwrap();
    let domain = &rails[0].domain;
    let spec = testing::spec(1, 4096, 16);
    let pool = Arc::new(Pool {
        spec,
        memory: Memory::Device {
            bytes: spec.bytes(),
        },
        fd: std::fs::File::open("/dev/null").unwrap().into(),
    });
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let registered = MemoryRegion::register(domain, &pool, access);
    if MemoryRegion::device_memory(domain) {
        let region = registered.expect("it knows device memory");
        assert_eq!(Arc::strong_count(&pool), 2, "the memory is kept for it");
        drop(region);
    } else {
        let error = registered.unwrap_err();
        assert_eq!((error.call, error.code), ("ibv_reg_dmabuf_mr", 95));
    }
    assert_eq!(Arc::strong_count(&pool), 1);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pools_that_no_device_knows_are_answered_and_the_others_go_on() {
    let (mut pair, planes) = planes(&[Mode::Window], &Arc::default()).await;
    let mut random = Random::new(63);
    let spec = testing::spec(1, 4096, 8);
    let slots: Vec<u32> = (0..8).collect();
    // One that is refused, and one that was never registered: the thread does not do it.
    pair.source.replace(unfit(spec));
    pair.target.replace(unfit(spec));
    for grant in 1..=2 {
        pair.target.arm(grant, BACK, &slots, &[]);
        let by = pair.target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Fence);
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, 8));
        pair.source.wait_reads_stopped(grant).await;
        assert_eq!(pair.source.count(Event::WriterFailed(grant)), 1);
        for (side, id) in [(&pair.source, PoolId(1)), (&pair.target, PoolId(1))] {
            side.pools.remove(id);
            side.pools.insert(id, testing::pool(spec));
        }
    }
    for plane in &planes {
        regions_are(plane, 0).await;
    }
    let (source, mut shadow) = pair.fill(spec, &mut random);
    pair.begin(3, &slots, &slots).await;
    pair.source.write(3, testing::run(0, 0, 8));
    testing::copy(
        &spec,
        &source,
        &mut shadow,
        &slots,
        &slots,
        testing::run(0, 0, 8),
    );
    pair.drain(3, &shadow).await;
    pair.finish(1..=3).await;
}

/// The machine asks for no such thing; but nothing registers the pool again for it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_grant_that_waits_while_its_pool_goes_is_fenced() {
    let (mut pair, planes) = planes_with(on_one_port(&[Mode::Window]), &Arc::default()).await;
    pair.fill(testing::spec(1, 4096, 8), &mut Random::new(64));
    for grant in 1..=5 {
        pair.target
            .arm(grant, BACK, &[u32::try_from(grant).unwrap()], &[]);
    }
    for grant in 1..=4 {
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
    }
    pair.target.take_pool_away();
    // Their regions are theirs for as long as they are open.
    pair.target.fence(1);
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
    assert_eq!(pair.target.wait_writes_stopped(5).await, StoppedBy::Fence);
    assert_eq!(pair.target.count(Event::Armed(5)), 0, "it had no lane");
    regions_are(&planes[1], 1).await;
    for grant in 2..=4 {
        pair.target.fence(grant);
        pair.target.wait_writes_stopped(grant).await;
    }
    regions_are(&planes[1], 0).await;
}

/// What shared memory may be of, while a test wants it so.
struct ShmemHuge(String);

impl ShmemHuge {
    const PATH: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

    fn advise() -> Self {
        let modes = std::fs::read_to_string(Self::PATH).unwrap();
        let before = modes.split(['[', ']']).nth(1).unwrap().to_owned();
        std::fs::write(Self::PATH, "advise").unwrap();
        Self(before)
    }
}

impl Drop for ShmemHuge {
    fn drop(&mut self) {
        let done = std::fs::write(Self::PATH, &self.0);
        assert!(done.is_ok() || thread::panicking(), "{done:?}");
    }
}

/// The test is root in a virtual host of its own.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pools_are_of_huge_pages_where_the_host_allows_them() {
    let (side, plane) = side(settings(&[Mode::Window]), &Arc::default());
    let _advise = ShmemHuge::advise();
    let pool = testing::pool(testing::spec(1, 1 << 20, 8));
    let start = format!("{:x}-", pool.memory.mapped().as_mut_ptr().addr());
    // Not touched yet: the registration brings its pages.
    side.replace(pool);
    regions_are(&plane, ports()).await;
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
    let huge = lines.find_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    assert_eq!(huge.map(str::trim), Some("8192 kB"));
    side.take_pool_away();
    regions_are(&plane, 0).await;
}
