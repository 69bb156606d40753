//! A daemon that says what a test tells it to, on a real socket with real memory.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::PathBuf;

use bytes::Bytes;
use fabric_client::proto::ids::{
    EngineId, EngineName, Epoch, Incarnation, LeaseId, NodeId, PoolId, RequestId, RequestSeq,
    SlotIndex, SlotRef, Tag, TenantId, TransferId,
};
use fabric_client::proto::pool::{Arrangement, Layout, PageRun, PoolSpec, TokenRange};
use fabric_client::proto::wire::{Checksums, ToDaemon, ToEngine, VERSION};
use fabric_client::{HeldLease, LeaseRequest, Pool, ReceiveLease, Sending, Session};
use fabric_ipc::{Connection, FrameReader, FrameWriter, Mapping};
use tempfile::TempDir;
use tokio::net::UnixListener;

pub(crate) const POOL: PoolId = PoolId(7);
pub(crate) const OFFER: &[u8] = b"an offer";

/// Where a daemon will listen.
pub(crate) struct Place {
    _dir: TempDir,
    pub(crate) path: PathBuf,
    pub(crate) listener: UnixListener,
}

pub(crate) fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fabric.sock");
    let listener = UnixListener::bind(&path).unwrap();
    Place {
        _dir: dir,
        path,
        listener,
    }
}

pub(crate) fn name() -> EngineName {
    EngineName::new("test").unwrap()
}

pub(crate) fn welcome(version: u32) -> ToEngine {
    ToEngine::Welcome {
        version,
        node: NodeId([1; 32]),
        incarnation: Incarnation::new(3).unwrap(),
        engine: EngineId(5),
    }
}

/// The daemon's end of one session.
pub(crate) struct Daemon {
    reader: FrameReader,
    writer: FrameWriter,
    spec: PoolSpec,
    pub(crate) memory: Option<Mapping>,
}

/// A session that was welcomed.
pub(crate) async fn session() -> (Session, Daemon) {
    let place = place();
    let daemon = async {
        let mut daemon = Daemon::accept(&place).await;
        assert!(matches!(daemon.hear().await, ToDaemon::Hello { .. }));
        daemon.say(&welcome(VERSION)).await;
        daemon
    };
    let (session, daemon) = tokio::join!(Session::connect(&place.path, name()), daemon);
    (session.unwrap(), daemon)
}

/// A pool of `slots` slots of two regions, 4 tokens each.
pub(crate) fn spec(slots: u32, page_bytes: u32) -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag([9; 32]),
            regions: 2,
            page_bytes,
            tokens_per_slot: 4,
        },
        slots,
        arrangement: Arrangement::RegionMajor,
        context_tokens: u64::from(slots) * 4,
    }
}

pub(crate) async fn pool_of(spec: PoolSpec) -> (Pool, Daemon) {
    let (session, mut daemon) = session().await;
    let registered = async {
        let (message, memory) = daemon.hear_with_memory().await;
        let ToDaemon::RegisterPool { seq, .. } = message else {
            panic!("a registration, not {message:?}");
        };
        daemon.memory = Some(Mapping::read_write(memory.unwrap(), spec.bytes()).unwrap());
        daemon.spec = spec;
        daemon
            .say(&ToEngine::PoolRegistered { seq, pool: POOL })
            .await;
    };
    let (pool, ()) = tokio::join!(session.register_pool(spec), registered);
    (pool.unwrap(), daemon)
}

pub(crate) async fn pool() -> (Pool, Daemon) {
    pool_of(spec(8, 4096)).await
}

/// A request for `slots` slots.
pub(crate) fn request(slots: u64) -> LeaseRequest {
    LeaseRequest {
        tenant: TenantId::new("acme").unwrap(),
        request: RequestId::new("r-1").unwrap(),
        tokens: TokenRange {
            start: 0,
            count: slots * 4,
        },
        named: Vec::new(),
    }
}

pub(crate) fn slot(index: u32, epoch: u64) -> SlotRef {
    SlotRef {
        index: SlotIndex(index),
        epoch: Epoch::new(epoch).unwrap(),
    }
}

pub(crate) fn slots(range: std::ops::Range<u32>) -> Vec<SlotRef> {
    range.map(|index| slot(index, 1)).collect()
}

/// A lease of `slots`, named after its first slot.
pub(crate) async fn receive(
    pool: &Pool,
    daemon: &mut Daemon,
    slots: Vec<SlotRef>,
) -> (ReceiveLease, LeaseId) {
    let id = LeaseId(u64::from(slots[0].index.0));
    let wanted = pool.receive(request(slots.len() as u64));
    let (lease, ()) = tokio::join!(wanted, daemon.lease(id, slots, Some(OFFER)));
    (lease.unwrap(), id)
}

pub(crate) async fn hold(
    pool: &Pool,
    daemon: &mut Daemon,
    slots: Vec<SlotRef>,
) -> (HeldLease, LeaseId) {
    let id = LeaseId(u64::from(slots[0].index.0));
    let wanted = pool.hold(request(slots.len() as u64));
    let (lease, ()) = tokio::join!(wanted, daemon.lease(id, slots, None));
    (lease.unwrap(), id)
}

/// A transfer of all slots but the first `offset` of a lease of `slots`.
pub(crate) async fn sending(
    pool: &Pool,
    daemon: &mut Daemon,
    slots: Vec<SlotRef>,
    offset: u32,
) -> (Sending, TransferId) {
    let count = slots.len() as u32 - offset;
    let (held, id) = hold(pool, daemon, slots).await;
    let transfer = TransferId(id.0 + 100);
    let opened = async {
        let seq = daemon.hear_send().await;
        let opened = ToEngine::SendOpened {
            seq,
            transfer,
            slots: count,
            offset,
        };
        daemon.say(&opened).await;
    };
    let (sending, ()) = tokio::join!(held.send(Bytes::from_static(OFFER)), opened);
    (sending.unwrap(), transfer)
}

impl Daemon {
    pub(crate) async fn accept(place: &Place) -> Self {
        let (stream, _) = place.listener.accept().await.unwrap();
        let (reader, writer) = Connection::new(stream).split();
        Self {
            reader,
            writer,
            spec: spec(1, 1),
            memory: None,
        }
    }

    pub(crate) async fn hear_with_memory(&mut self) -> (ToDaemon, Option<std::os::fd::OwnedFd>) {
        let frame = self.reader.recv().await.unwrap();
        let frame = frame.expect("the engine says something more");
        let message = ToDaemon::decode(frame.bytes).expect("an engine says what is a message");
        (message, frame.fds.into_iter().next())
    }

    pub(crate) async fn hear(&mut self) -> ToDaemon {
        self.hear_with_memory().await.0
    }

    pub(crate) async fn hear_lease(&mut self) -> RequestSeq {
        match self.hear().await {
            ToDaemon::Lease { seq, .. } => seq,
            other => panic!("a lease, not {other:?}"),
        }
    }

    pub(crate) async fn hear_send(&mut self) -> RequestSeq {
        match self.hear().await {
            ToDaemon::Send { seq, .. } => seq,
            other => panic!("a send, not {other:?}"),
        }
    }

    /// Waits until the engine has closed the connection.
    pub(crate) async fn heard_all(mut self) {
        while let Ok(Some(_)) = self.reader.recv().await {}
    }

    pub(crate) async fn say(&mut self, message: &ToEngine) {
        self.raw(&message.encode()).await;
    }

    /// A frame of any bytes. An engine that has hung up already does not mind.
    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        let _ = self.writer.send(bytes, &[]).await;
    }

    /// Answers a request for a lease.
    pub(crate) async fn lease(
        &mut self,
        lease: LeaseId,
        slots: Vec<SlotRef>,
        offer: Option<&'static [u8]>,
    ) {
        let seq = self.hear_lease().await;
        let offer = offer.map(Bytes::from_static);
        let leased = ToEngine::Leased {
            seq,
            lease,
            slots,
            offer,
        };
        self.say(&leased).await;
    }

    /// Writes a page as a plane would, and gives its checksum.
    pub(crate) fn write(&self, region: u16, slot: u32, fill: u8) -> u32 {
        let page = vec![fill; self.spec.layout.page_bytes as usize];
        let offset = self.spec.page_offset(region, slot);
        self.memory.as_ref().unwrap().write(offset, &page).unwrap();
        fabric_ipc::crc32c(&page)
    }

    pub(crate) async fn expect(&mut self, lease: LeaseId, region: u16, crcs: Vec<u32>) {
        let checksums = Checksums {
            region,
            first: 0,
            crcs,
        };
        self.say(&ToEngine::Expect { lease, checksums }).await;
    }

    pub(crate) async fn verify(&mut self, lease: LeaseId, attempt: u32, pages: Vec<PageRun>) {
        let payload = Bytes::from_static(b"payload");
        let verify = ToEngine::Verify {
            lease,
            attempt,
            pages,
            payload,
        };
        self.say(&verify).await;
    }
}

pub(crate) fn run(region: u16, first: u32, count: u32) -> PageRun {
    PageRun {
        region,
        first,
        count,
    }
}
