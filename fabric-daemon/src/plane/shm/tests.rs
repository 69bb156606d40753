//! Over real sockets and memory files.

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;

use fabric_ipc::{Connection, FrameReader, FrameWriter};
use fabric_proto::host::StoppedBy;
use fabric_proto::ids::{GrantId, PoolId};
use tempfile::TempDir;
use tokio::net::UnixStream;

use super::codec::{Reply, Request};
use super::*;
use crate::plane::testing::{self, Event, Pair, Random, Side};

const OUT: LinkId = LinkId(1);
const BACK: LinkId = LinkId(2);

fn side(directory: &TempDir, name: &str, link: LinkId, peer: &str) -> Side {
    faulty_side(directory, name, link, peer, Arc::default())
}

fn faulty_side(
    directory: &TempDir,
    name: &str,
    link: LinkId,
    peer: &str,
    faults: Arc<Faults>,
) -> Side {
    let path = |name| directory.path().join(name);
    Side::new(|pools, events| {
        let plane = ShmPlane::new(pools, events, path(name), faults).unwrap();
        plane.link_up(link, None, path(peer));
        plane
    })
}

fn pair() -> (TempDir, Pair) {
    let directory = tempfile::tempdir().unwrap();
    let pair = Pair {
        source: side(&directory, "source", OUT, "target"),
        target: side(&directory, "target", BACK, "source"),
        out: OUT,
        back: BACK,
    };
    (directory, pair)
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_delivers_exact_bytes() {
    let (_directory, mut pair) = pair();
    testing::delivers_exact_bytes(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_byte_lands_after_the_fence() {
    let (_directory, mut pair) = pair();
    testing::no_byte_lands_after_the_fence(&mut pair, 300).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn intruders_are_refused_without_effect() {
    let (_directory, mut pair) = pair();
    testing::intruders_are_refused_without_effect(&mut pair, LinkId(3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_outside_the_grant_are_refused() {
    let (_directory, mut pair) = pair();
    testing::pages_outside_the_grant_are_refused(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_ends_a_run_in_its_midst() {
    let (_directory, mut pair) = pair();
    testing::stop_ends_a_run_in_its_midst(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn link_down_ends_every_writer() {
    let (_directory, mut pair) = pair();
    testing::link_down_ends_every_writer(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transfer_is_sent_again_under_a_new_grant() {
    let (_directory, mut pair) = pair();
    testing::transfer_is_sent_again_under_a_new_grant(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_pools_and_links_are_answered() {
    let (_directory, mut pair) = pair();
    testing::unknown_pools_and_links_are_answered(&mut pair).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn loopback_takes_the_same_path() {
    let directory = tempfile::tempdir().unwrap();
    let mut only = side(&directory, "only", OUT, "nowhere");
    let mut random = Random::new(31);
    let spec = testing::spec(1, 1000, 8);
    let mut shadow = only.fill(spec, &mut random);
    only.arm(1, LinkId::LOOPBACK, &[4, 5], &[]);
    only.open(1, LinkId::LOOPBACK, &[0, 2]);
    only.write(1, testing::run(0, 0, 2));
    only.drain(1);
    only.wait_reads_stopped(1).await;
    assert_eq!(only.wait_writes_stopped(1).await, StoppedBy::Drain);
    shadow.copy_within(0..1000, 4000);
    shadow.copy_within(2000..3000, 5000);
    assert!(only.contents() == shadow);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_another_size_are_refused() {
    let (_directory, mut pair) = pair();
    let mut random = Random::new(32);
    pair.source.fill(testing::spec(1, 1000, 8), &mut random);
    let before = pair.target.fill(testing::spec(1, 500, 16), &mut random);
    pair.target.arm(1, BACK, &[0, 1], &[]);
    pair.source.open(1, OUT, &[0, 1]);
    pair.source.write(1, testing::run(0, 0, 2));
    pair.source.wait_reads_stopped(1).await;
    assert_eq!(pair.source.count(Event::WriterFailed(1)), 1);
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
    assert!(pair.target.contents() == before);
}

/// A destination that takes frames in and never answers.
async fn silent_peer(directory: &TempDir) -> (Side, UnixListener) {
    let silent = UnixListener::bind(directory.path().join("silent")).unwrap();
    let source = side(directory, "source", OUT, "silent");
    source.fill(testing::spec(1, 1 << 20, 8), &mut Random::new(33));
    source.open(1, OUT, &[0, 1]);
    for _ in 0..1000 {
        source.write(1, testing::run(0, 0, 2));
    }
    (source, silent)
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_process_holds_the_proof_up_until_the_link_is_down() {
    let directory = tempfile::tempdir().unwrap();
    let (mut source, silent) = silent_peer(&directory).await;
    let _stream = silent.accept().await.unwrap();
    source.stop(1);
    source.settle().await;
    assert_eq!(source.log, [], "nobody has said that it has stopped");
    source.plane.link_down(OUT);
    source.wait_reads_stopped(1).await;
    assert_eq!(source.log, [Event::ReadsStopped(1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_peer_fails_its_writers_and_the_next_may_succeed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut source, silent) = silent_peer(&directory).await;
    drop(silent.accept().await.unwrap());
    source.wait_reads_stopped(1).await;
    assert_eq!(source.log, [Event::WriterFailed(1), Event::ReadsStopped(1)]);
    drop(silent);
    source.open(2, OUT, &[0, 1]);
    source.wait_reads_stopped(2).await;
    assert_eq!(source.count(Event::WriterFailed(2)), 1);

    std::fs::remove_file(directory.path().join("silent")).unwrap();
    let mut target = side(&directory, "silent", BACK, "source");
    target.fill(testing::spec(1, 1 << 20, 8), &mut Random::new(34));
    target.arm(3, BACK, &[0, 1], &[]);
    source.open(3, OUT, &[0, 1]);
    source.write(3, testing::run(0, 0, 2));
    source.drain(3);
    source.wait_reads_stopped(3).await;
    assert_eq!(target.wait_writes_stopped(3).await, StoppedBy::Drain);
}

/// A peer by hand.
struct Peer {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Peer {
    async fn connect(directory: &TempDir, name: &str) -> Self {
        let stream = UnixStream::connect(directory.path().join(name))
            .await
            .unwrap();
        let (reader, writer) = Connection::new(stream).split();
        Self { reader, writer }
    }

    async fn say(&mut self, request: Request) {
        self.writer.send(&request.encode(), &[]).await.unwrap();
    }

    /// Passes a pool, and attaches to grant `grant` from its first two slots.
    async fn attach(&mut self, pool: &crate::plane::Pool, grant: u64) {
        let id = PoolId(5);
        let spec = pool.spec;
        let request = Request::Pool { pool: id, spec }.encode();
        self.writer
            .send(&request, &[pool.fd.as_fd()])
            .await
            .unwrap();
        self.say(Request::Attach {
            grant: GrantId(grant),
            key: testing::key(grant),
            pool: id,
            slots: vec![0, 1],
        })
        .await;
    }

    async fn reply(&mut self) -> Option<Reply> {
        let frame = tokio::time::timeout(Duration::from_secs(10), self.reader.recv()).await;
        let frame = frame.unwrap().ok()??;
        Some(Reply::decode(&frame.bytes).unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_that_ends_closes_its_grants() {
    let directory = tempfile::tempdir().unwrap();
    let mut target = side(&directory, "target", BACK, "nowhere");
    let spec = testing::spec(1, 1000, 8);
    target.fill(spec, &mut Random::new(35));
    target.arm(1, BACK, &[0, 1], &[]);
    let mut peer = Peer::connect(&directory, "target").await;
    let source = testing::pool(spec);
    peer.attach(&source, 1).await;
    let grant = GrantId(1);
    let runs = vec![testing::run(0, 0, 2)];
    peer.say(Request::Write { grant, runs }).await;
    let (runs, bytes) = (1, 2000);
    assert_eq!(
        peer.reply().await,
        Some(Reply::Completed { grant, runs, bytes })
    );
    assert_eq!(target.count(Event::WritesStopped(1, StoppedBy::Fence)), 0);
    drop(peer);
    assert_eq!(target.wait_writes_stopped(1).await, StoppedBy::Fence);
}

#[tokio::test(flavor = "multi_thread")]
async fn second_connection_for_a_grant_is_refused_and_the_first_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let mut target = side(&directory, "target", BACK, "nowhere");
    let spec = testing::spec(1, 1000, 8);
    target.fill(spec, &mut Random::new(39));
    target.arm(1, BACK, &[0, 1], &[]);
    let grant = GrantId(1);
    let mut first = Peer::connect(&directory, "target").await;
    first.attach(&testing::pool(spec), 1).await;
    for first_write in [true, false] {
        let runs = vec![testing::run(0, 0, 1)];
        first.say(Request::Write { grant, runs }).await;
        let (runs, bytes) = (1, 1000);
        let completed = Some(Reply::Completed { grant, runs, bytes });
        assert_eq!(first.reply().await, completed);
        if first_write {
            let mut second = Peer::connect(&directory, "target").await;
            second.attach(&testing::pool(spec), 1).await;
            assert_eq!(second.reply().await, Some(Reply::Refused { grant }));
        }
    }
    first.say(Request::Drain { grant }).await;
    assert_eq!(first.reply().await, Some(Reply::Stopped { grant }));
    assert_eq!(target.wait_writes_stopped(1).await, StoppedBy::Drain);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancel_overtakes_what_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let mut target = side(&directory, "target", BACK, "nowhere");
    let spec = testing::spec(1, 16 << 20, 2);
    target.fill(spec, &mut Random::new(36));
    target.arm(1, BACK, &[0, 1], &[]);
    let mut peer = Peer::connect(&directory, "target").await;
    peer.attach(&testing::pool(spec), 1).await;
    let grant = GrantId(1);
    let asked: u64 = 300 * spec.bytes();
    for _ in 0..300 {
        let runs = vec![testing::run(0, 0, 2)];
        peer.say(Request::Write { grant, runs }).await;
    }
    peer.say(Request::Cancel { grant }).await;
    let mut copied = 0;
    loop {
        match peer.reply().await.unwrap() {
            Reply::Completed { bytes, .. } => copied += bytes,
            Reply::Refused { .. } => panic!("it was cancelled"),
            Reply::Stopped { .. } => break,
        }
    }
    assert!(copied < asked, "{copied} of {asked}");
    assert_eq!(target.wait_writes_stopped(1).await, StoppedBy::Fence);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_closes_the_connection_and_nothing_lands() {
    let directory = tempfile::tempdir().unwrap();
    let mut target = side(&directory, "target", BACK, "nowhere");
    let mut random = Random::new(37);
    let spec = testing::spec(1, 1000, 8);
    let before = target.fill(spec, &mut random);
    for grant in 1..=100 {
        target.arm(grant, BACK, &[0, 1], &[]);
        let mut peer = Peer::connect(&directory, "target").await;
        peer.attach(&testing::pool(spec), grant).await;
        let count = random.within(1..=60);
        let mut bytes = random.bytes(count);
        bytes[0] = if grant % 2 == 0 {
            bytes[0]
        } else {
            bytes[0] % 7
        };
        // What happens to mean something is followed by what does not. The far end may close the
        // connection before all is sent.
        for bytes in [&bytes[..], &[0xFF]] {
            let _sent = peer.writer.send(bytes, &[]).await;
        }
        while peer.reply().await.is_some() {}
        assert_eq!(target.wait_writes_stopped(grant).await, StoppedBy::Fence);
        assert!(target.contents() == before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_could_shrink_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let target = side(&directory, "target", BACK, "nowhere");
    target.fill(testing::spec(1, 1000, 8), &mut Random::new(38));
    let mut peer = Peer::connect(&directory, "target").await;
    let unsealed = tempfile::tempfile().unwrap();
    unsealed.set_len(8000).unwrap();
    let spec = testing::spec(1, 1000, 8);
    let request = Request::Pool {
        pool: PoolId(1),
        spec,
    };
    let fds = [unsealed.as_fd()];
    peer.writer.send(&request.encode(), &fds).await.unwrap();
    assert_eq!(peer.reply().await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn socket_is_private_and_only_a_stale_one_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let new = |path: &Path| {
        let (events, _) = tokio::sync::mpsc::channel(1);
        ShmPlane::new(Arc::default(), events, path.to_owned(), Arc::default())
    };
    let first = new(&path).unwrap();
    let mode = path.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(new(&path), Err(ShmError::InUse { .. })));
    drop(first);
    let mut replaced = false;
    for _ in 0..100 {
        replaced |= new(&path).is_ok();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(replaced, "nobody answers any more");
    let file = directory.path().join("file");
    std::fs::write(&file, b"mine").unwrap();
    assert!(matches!(new(&file), Err(ShmError::NotASocket { .. })));
}

#[cfg(feature = "fault-injection")]
fn faulty_pair(faults: &Arc<Faults>) -> (TempDir, Pair) {
    let directory = tempfile::tempdir().unwrap();
    let side = |name, link, peer| faulty_side(&directory, name, link, peer, Arc::clone(faults));
    let pair = Pair {
        source: side("source", OUT, "target"),
        target: side("target", BACK, "source"),
        out: OUT,
        back: BACK,
    };
    (directory, pair)
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
async fn flipped_pages_arrive_flipped() {
    let faults = Arc::default();
    let (_directory, mut pair) = faulty_pair(&faults);
    testing::flipped_pages_arrive_flipped(&mut pair, &faults).await;
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
async fn stalled_writer_is_silent_until_it_is_stopped() {
    let stall_after_bytes = Some(4500);
    let faults = Arc::new(Faults {
        stall_after_bytes,
        ..Faults::default()
    });
    let (_directory, mut pair) = faulty_pair(&faults);
    testing::stalled_writer_is_silent_until_it_is_stopped(&mut pair, 4500, StoppedBy::Fence).await;
}
