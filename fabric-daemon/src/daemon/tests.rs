#[cfg(feature = "rdma")]
mod device_memory;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use fabric_ipc::{Connection, FrameReader, FrameWriter, create_sealed};
use fabric_proto::ids::{EngineName, PoolId, RequestId, RequestSeq, Tag, TenantId};
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::{Arrangement, Layout, PoolSpec, TokenRange};
use fabric_proto::wire::{Purpose, ToDaemon, ToEngine, VERSION};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::*;
use crate::store;

/// A daemon alone on this host, with two engines in its configuration: "decode" for everybody, and
/// "stranger" who must be of a user that nobody is.
async fn daemon() -> (tempfile::TempDir, Daemon) {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    store::init(&config.state_dir).unwrap();
    let daemon = Daemon::start(config).await.unwrap();
    (dir, daemon)
}

fn config(dir: &Path) -> Config {
    config_with(dir, "")
}

/// `more` are keys and sections of their own.
fn config_with(dir: &Path, more: &str) -> Config {
    let dir = dir.display();
    Config::parse(&format!(
        r#"
        {more}
        state_dir = "{dir}/state"
        [listen]
        peers = "127.0.0.1:0"
        admin = "127.0.0.1:0"
        engines = "{dir}/engine.sock"
        shm = "{dir}/shm.sock"
        [[engines]]
        name = "decode"
        tenants = ["*"]
        [[engines]]
        name = "stranger"
        tenants = ["*"]
        uid = 4294967294
        "#
    ))
    .unwrap()
}

struct Engine {
    reader: FrameReader,
    writer: FrameWriter,
}

impl Engine {
    async fn connect(daemon: &Daemon) -> Self {
        let stream = UnixStream::connect(&daemon.engines).await.unwrap();
        let (reader, writer) = Connection::new(stream).split();
        Self { reader, writer }
    }

    async fn hello(daemon: &Daemon) -> Self {
        let mut engine = Self::connect(daemon).await;
        engine.send(&hello(VERSION, "decode"), &[]).await;
        let welcome = engine.recv().await;
        assert!(
            matches!(welcome, Some(ToEngine::Welcome { .. })),
            "{welcome:?}"
        );
        engine
    }

    async fn send(&mut self, message: &ToDaemon, fds: &[BorrowedFd<'_>]) {
        self.writer.send(&message.encode(), fds).await.unwrap();
    }

    async fn recv(&mut self) -> Option<ToEngine> {
        let wait = Duration::from_secs(8);
        let frame = tokio::time::timeout(wait, self.reader.recv()).await;
        // A reset is an end as well: the daemon left bytes of ours unread.
        let frame = frame
            .expect("the daemon answers or closes")
            .ok()
            .flatten()?;
        Some(ToEngine::decode(frame.bytes).unwrap())
    }

    async fn is_closed(&mut self) {
        let end = self.recv().await;
        assert_eq!(end, None, "the session is closed");
    }
}

fn hello(version: u32, name: &str) -> ToDaemon {
    let name = EngineName::new(name).unwrap();
    ToDaemon::Hello { version, name }
}

fn spec() -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag([3; 32]),
            regions: 2,
            page_bytes: 4096,
            tokens_per_slot: 16,
        },
        slots: 8,
        arrangement: Arrangement::RegionMajor,
        context_tokens: 128,
    }
}

fn register(seq: u64, spec: PoolSpec) -> ToDaemon {
    let seq = RequestSeq(seq);
    ToDaemon::RegisterPool { seq, spec }
}

fn memory(bytes: u64) -> OwnedFd {
    create_sealed("test", bytes).unwrap()
}

/// A session that works, which shows that the daemon has survived whatever came before.
async fn works(daemon: &Daemon) {
    let mut engine = Engine::hello(daemon).await;
    let fd = memory(spec().bytes());
    engine.send(&register(1, spec()), &[fd.as_fd()]).await;
    let Some(ToEngine::PoolRegistered { seq, pool }) = engine.recv().await else {
        panic!("a good pool is registered");
    };
    assert_eq!(seq, RequestSeq(1));
    let lease = ToDaemon::Lease {
        seq: RequestSeq(2),
        pool,
        tenant: TenantId::new("acme").unwrap(),
        request: RequestId::new("r-1").unwrap(),
        tokens: TokenRange {
            start: 0,
            count: 40,
        },
        purpose: Purpose::Hold,
        named: Vec::new(),
    };
    engine.send(&lease, &[]).await;
    let leased = engine.recv().await;
    assert!(
        matches!(&leased, Some(ToEngine::Leased { slots, .. }) if slots.len() == 3),
        "{leased:?}"
    );
}

async fn rejection(engine: &mut Engine) -> (RequestSeq, Rejection) {
    match engine.recv().await {
        Some(ToEngine::Rejected { seq, reason }) => (seq, reason),
        other => panic!("expected a rejection, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_message_close_the_session_and_nothing_else() {
    let (_dir, daemon) = daemon().await;
    let hostile: [&[u8]; 6] = [
        &[],
        &[0; 64],
        &[0xff; 64],
        &[5, 0, 0, 0, 1, 2, 3, 4, 5],
        &[0xff, 0xff, 0xff, 0x7f, 1, 2],
        &[0, 0, 0, 0],
    ];
    for bytes in hostile {
        // Instead of a hello, and after it.
        let mut stream = UnixStream::connect(&daemon.engines).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        let _reset = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty(), "no answer to {bytes:?}");

        let mut stream = UnixStream::connect(&daemon.engines).await.unwrap();
        let message = hello(VERSION, "decode").encode();
        let length = u32::try_from(message.len()).unwrap().to_le_bytes();
        let all = [&length, &message[..], bytes].concat();
        stream.write_all(&all).await.unwrap();
        stream.shutdown().await.unwrap();
        let _reset = stream.read_to_end(&mut rest).await;
    }
    let mut engine = Engine::hello(&daemon).await;
    let oversize = vec![7; fabric_proto::limits::MESSAGE_BYTES_MAX + 1];
    // The daemon may close while we still write.
    let _reset = engine.writer.send(&oversize, &[]).await;
    engine.is_closed().await;
    works(&daemon).await;
    assert_eq!(daemon.stop().await, Stopped::Drained);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_must_say_hello_first_in_time_and_in_our_version() {
    let (_dir, daemon) = daemon().await;
    let mut silent = Engine::connect(&daemon).await;

    let mut rude = Engine::connect(&daemon).await;
    let fd = memory(spec().bytes());
    rude.send(&register(1, spec()), &[]).await;
    rude.is_closed().await;
    let mut generous = Engine::connect(&daemon).await;
    generous
        .send(&hello(VERSION, "decode"), &[fd.as_fd()])
        .await;
    generous.is_closed().await;

    let mut old = Engine::connect(&daemon).await;
    old.send(&hello(VERSION + 1, "decode"), &[]).await;
    let mismatch = Rejection::VersionMismatch {
        version: u64::from(VERSION) + 1,
        version_wanted: u64::from(VERSION),
    };
    assert_eq!(rejection(&mut old).await, (RequestSeq(0), mismatch));
    old.is_closed().await;

    for name in ["nobody", "stranger"] {
        let mut engine = Engine::connect(&daemon).await;
        engine.send(&hello(VERSION, name), &[]).await;
        let refused = (RequestSeq(0), Rejection::EngineNotAllowed);
        assert_eq!(rejection(&mut engine).await, refused, "{name}");
        engine.is_closed().await;
    }

    let mut twice = Engine::hello(&daemon).await;
    twice.send(&hello(VERSION, "decode"), &[]).await;
    twice.is_closed().await;

    silent.is_closed().await;
    works(&daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_needs_one_descriptor_of_sealed_memory() {
    let (_dir, daemon) = daemon().await;
    let sealed = memory(spec().bytes());
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("test", flags).unwrap();
    rustix::fs::ftruncate(&unsealed, spec().bytes()).unwrap();
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let bad: [&[BorrowedFd<'_>]; 4] = [
        &[],
        &[sealed.as_fd(), sealed.as_fd()],
        &[unsealed.as_fd()],
        &[file.as_fd()],
    ];
    for fds in bad {
        let mut engine = Engine::hello(&daemon).await;
        engine.send(&register(1, spec()), fds).await;
        engine.is_closed().await;
    }
    let mut engine = Engine::hello(&daemon).await;
    let lease = fabric_proto::ids::LeaseId(1);
    let end = ToDaemon::EndLease { lease, abort: None };
    engine.send(&end, &[sealed.as_fd()]).await;
    engine.is_closed().await;
    works(&daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_cannot_be_is_turned_away_with_both_numbers() {
    let (_dir, daemon) = daemon().await;
    let mut engine = Engine::hello(&daemon).await;
    let (bytes_needed, bytes) = (spec().bytes(), spec().bytes() - 1);
    let small = memory(bytes);
    engine.send(&register(1, spec()), &[small.as_fd()]).await;
    let reason = Rejection::MemoryTooSmall {
        bytes,
        bytes_needed,
    };
    assert_eq!(rejection(&mut engine).await, (RequestSeq(1), reason));

    // S9: the context that it advertises does not fit.
    let boastful = PoolSpec {
        context_tokens: 129,
        ..spec()
    };
    let fd = memory(spec().bytes());
    engine.send(&register(2, boastful), &[fd.as_fd()]).await;
    let reason = Rejection::PoolTooSmall {
        tokens: 128,
        context: 129,
    };
    assert_eq!(rejection(&mut engine).await, (RequestSeq(2), reason));

    // The session goes on, up to its limit of pools.
    for seq in 3..19 {
        engine.send(&register(seq, spec()), &[fd.as_fd()]).await;
        let answer = engine.recv().await;
        assert!(
            matches!(answer, Some(ToEngine::PoolRegistered { .. })),
            "{seq}: {answer:?}"
        );
    }
    engine.send(&register(19, spec()), &[fd.as_fd()]).await;
    let (_, reason) = rejection(&mut engine).await;
    assert!(matches!(reason, Rejection::ExceedsLimit { .. }), "{reason}");
    works(&daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_leaves_gives_its_pools_back() {
    let (_dir, daemon) = daemon().await;
    works(&daemon).await;
    for _ in 0..200 {
        let page = get(&daemon, "/metrics").await;
        let gone = page.contains("fabric_sessions_closed_total{reason=\"left\"} 1")
            && page.contains("fabric_pool_slots{state=\"all\"} 0")
            && page.contains("fabric_leases_started_total 1")
            && page.contains("fabric_leases_ended_total 1");
        if gone {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{}", get(&daemon, "/metrics").await);
}

async fn get(daemon: &Daemon, path: &str) -> String {
    let mut stream = TcpStream::connect(daemon.admin_address()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: fabric\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_what_there_is() {
    let (_dir, daemon) = daemon().await;
    let engine = Engine::hello(&daemon).await;
    assert!(get(&daemon, "/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(get(&daemon, "/readyz").await.starts_with("HTTP/1.1 200"));
    let status = get(&daemon, "/status").await;
    for text in [
        format!("\"node\":\"{}\"", daemon.node()),
        "\"incarnation\":1".into(),
        "\"planes\":[\"shm\",\"quic\"]".into(),
        "\"name\":\"decode\"".into(),
    ] {
        assert!(status.contains(&text), "{text} is missing from {status}");
    }
    daemon.phase.send_replace(Phase::ShuttingDown);
    let ready = get(&daemon, "/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains("shutting down"));
    drop(engine);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_ends_sessions_and_the_next_life_is_a_later_one() {
    let (dir, daemon) = daemon().await;
    let mut engine = Engine::hello(&daemon).await;
    let first = daemon.incarnation();
    let error = Daemon::start(config(dir.path())).await.unwrap_err();
    assert!(
        matches!(error, StartError::Store(StoreError::InUse { .. })),
        "{error}"
    );

    assert_eq!(daemon.stop().await, Stopped::Drained);
    engine.is_closed().await;
    let again = Daemon::start(config(dir.path())).await.unwrap();
    assert!(again.incarnation() > first);
    works(&again).await;
    drop(again);
    // As if the process had died: the sockets are stale, and the state directory is free.
    for _ in 0..100 {
        match Daemon::start(config(dir.path())).await {
            Ok(third) => return works(&third).await,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("the third life does not start");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_id_is_never_given_twice() {
    let (_dir, daemon) = daemon().await;
    let mut seen = std::collections::BTreeSet::<PoolId>::new();
    let fd = memory(spec().bytes());
    for _ in 0..5 {
        let mut engine = Engine::hello(&daemon).await;
        engine.send(&register(1, spec()), &[fd.as_fd()]).await;
        match engine.recv().await {
            Some(ToEngine::PoolRegistered { pool, .. }) => assert!(seen.insert(pool)),
            other => panic!("{other:?}"),
        }
    }
}
