//! What the planes' tests share: pools with shadows, two sides of a plane, and the tests that every
//! plane must pass.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use fabric_ipc::{Mapping, create_sealed};
use fabric_proto::host::{Input, PlaneCommand, ReadsStopped, StoppedBy, WritesStopped};
use fabric_proto::ids::{
    Epoch, GrantId, LinkId, PoolId, Secret, SlotIndex, SlotRef, Tag, TransferId,
};
use fabric_proto::pool::{Arrangement, Layout, PageRun, PoolSpec};
use tokio::sync::mpsc::{Receiver, Sender};

use quinn::rustls::pki_types::PrivatePkcs8KeyDer;
use quinn::{ClientConfig, Connection, Endpoint, EndpointConfig, ServerConfig, TokioRuntime};

use super::{Memory, Plane, PlaneProofs, Pool, Pools, UDP_PAYLOAD_BYTES_MAX, transport_config};

fn endpoint(server: Option<ServerConfig>) -> Endpoint {
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(UDP_PAYLOAD_BYTES_MAX).unwrap();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let socket = std::net::UdpSocket::bind(address).unwrap();
    Endpoint::new(config, server, socket, Arc::new(TokioRuntime)).unwrap()
}

/// Two ends of a connection on loopback, configured as links are.
pub(super) async fn connect() -> (Connection, Connection) {
    connect_with(16 << 20).await
}

/// As [`connect`], with so many bytes under way on a stream at most.
pub(super) async fn connect_with(stream_bytes: u64) -> (Connection, Connection) {
    let certified = rcgen::generate_simple_self_signed(vec!["node".into()]).unwrap();
    let certificate = certified.cert.der().clone();
    let key = PrivatePkcs8KeyDer::from(certified.signing_key.serialize_der());
    let transport = Arc::new(transport_config(stream_bytes, Duration::from_millis(2500)));
    let mut server = ServerConfig::with_single_cert(vec![certificate.clone()], key.into()).unwrap();
    server.transport_config(Arc::clone(&transport));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).unwrap();
    let mut client = ClientConfig::with_root_certificates(Arc::new(roots)).unwrap();
    client.transport_config(transport);

    let server = endpoint(Some(server));
    let mut client_endpoint = endpoint(None);
    client_endpoint.set_default_client_config(client);
    let connecting = client_endpoint
        .connect(server.local_addr().unwrap(), "node")
        .unwrap();
    let accepting = async { server.accept().await.unwrap().await.unwrap() };
    let (connected, accepted) = tokio::join!(connecting, accepting);
    (connected.unwrap(), accepted)
}

/// xorshift64*: seeded, so that a failure repeats.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(super) fn within(&mut self, range: RangeInclusive<usize>) -> usize {
        let span = (range.end() - range.start() + 1) as u64;
        range.start() + usize::try_from((self.next() >> 16) % span).unwrap()
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
        bytes
    }

    /// `count` different numbers below `below`.
    pub(super) fn pick(&mut self, count: usize, below: u32) -> Vec<u32> {
        let mut all: Vec<u32> = (0..below).collect();
        for index in 0..count {
            let other = self.within(index..=all.len() - 1);
            all.swap(index, other);
        }
        all.truncate(count);
        all
    }
}

pub(super) fn spec(regions: u16, page_bytes: u32, slots: u32) -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag([7; 32]),
            regions,
            page_bytes,
            tokens_per_slot: 16,
        },
        slots,
        arrangement: Arrangement::RegionMajor,
        context_tokens: 16,
    }
}

pub(super) fn pool(spec: PoolSpec) -> Pool {
    let fd = create_sealed("test-pool", spec.bytes()).unwrap();
    let memory = Mapping::read_write(&fd, spec.bytes()).unwrap();
    let memory = Memory::Host(memory);
    Pool { spec, memory, fd }
}

pub(super) fn slot_refs(slots: &[u32]) -> Arc<[SlotRef]> {
    let slot_ref = |index: &u32| SlotRef {
        index: SlotIndex(*index),
        epoch: Epoch::new(1).unwrap(),
    };
    slots.iter().map(slot_ref).collect()
}

pub(super) fn run(region: u16, first: u32, count: u32) -> PageRun {
    PageRun {
        region,
        first,
        count,
    }
}

/// An input of the machine that can be compared. Only this module can make one from a proof.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Event {
    Armed(u64),
    Landed(u64),
    ReadsStopped(u64),
    WriterFailed(u64),
    WritesStopped(u64, StoppedBy),
    Written(u64, u64),
}

impl Event {
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "everything else is not a plane's"
    )]
    pub(super) fn of(input: Input<PlaneProofs>) -> Self {
        match input {
            Input::Armed { grant } => Self::Armed(grant.0),
            Input::Landed { grant } => Self::Landed(grant.0),
            Input::ReadsStopped(proof) => Self::ReadsStopped(proof.grant().0),
            Input::WriterFailed { grant, .. } => Self::WriterFailed(grant.0),
            Input::WritesStopped(proof) => Self::WritesStopped(proof.grant().0, proof.by()),
            Input::Written { grant, bytes, .. } => Self::Written(grant.0, bytes),
            other => panic!("a plane has no business with {other:?}"),
        }
    }
}

/// One daemon's plane.
pub(super) struct Side {
    pub(super) plane: Box<dyn Plane>,
    pub(super) pools: Arc<Pools>,
    events: Receiver<Input<PlaneProofs>>,
    pub(super) log: Vec<Event>,
    /// The pool that `fill` made last. An id is never used twice.
    pool: AtomicU32,
}

pub(super) type Events = Sender<Input<PlaneProofs>>;

impl Side {
    pub(super) fn new<P: Plane + 'static>(make: impl FnOnce(Arc<Pools>, Events) -> P) -> Self {
        // Small, so that the outbox is used.
        let (sender, events) = tokio::sync::mpsc::channel(2);
        let pools = Arc::new(Pools::new());
        Self {
            plane: Box::new(make(Arc::clone(&pools), sender)),
            pools,
            events,
            log: Vec::new(),
            pool: AtomicU32::new(0),
        }
    }

    /// Waits for an event like `want`; earlier ones count.
    pub(super) async fn wait(&mut self, want: impl Fn(&Event) -> bool) -> Event {
        loop {
            if let Some(event) = self.log.iter().find(|event| want(event)) {
                return *event;
            }
            let next = tokio::time::timeout(Duration::from_secs(10), self.events.recv()).await;
            let input = next.unwrap_or_else(|_| panic!("nothing more; had {:?}", self.log));
            self.log.push(Event::of(input.unwrap()));
        }
    }

    pub(super) async fn wait_writes_stopped(&mut self, grant: u64) -> StoppedBy {
        let by = |event: &Event| match *event {
            Event::WritesStopped(of, by) if of == grant => Some(by),
            Event::Armed(_)
            | Event::Landed(_)
            | Event::ReadsStopped(_)
            | Event::WriterFailed(_)
            | Event::WritesStopped(..)
            | Event::Written(..) => None,
        };
        let event = self.wait(|event| by(event).is_some()).await;
        by(&event).unwrap()
    }

    pub(super) async fn wait_reads_stopped(&mut self, grant: u64) {
        self.wait(|event| *event == Event::ReadsStopped(grant))
            .await;
    }

    /// Takes in what comes within a moment.
    pub(super) async fn settle(&mut self) {
        let moment = Duration::from_millis(120);
        while let Ok(Some(input)) = tokio::time::timeout(moment, self.events.recv()).await {
            self.log.push(Event::of(input));
        }
    }

    pub(super) fn count(&self, event: Event) -> usize {
        self.log.iter().filter(|other| **other == event).count()
    }

    pub(super) fn written(&self, grant: u64) -> u64 {
        let bytes = |event: &Event| {
            if let Event::Written(of, bytes) = event
                && *of == grant
            {
                *bytes
            } else {
                0
            }
        };
        self.log.iter().map(bytes).sum()
    }

    pub(super) fn arm(&self, grant: u64, link: LinkId, slots: &[u32], pages: &[PageRun]) {
        self.plane.submit(PlaneCommand::Arm {
            grant: GrantId(grant),
            link,
            key: key(grant),
            pool: self.pool_id(),
            slots: slot_refs(slots),
            pages: pages.into(),
        });
    }

    pub(super) fn fence(&self, grant: u64) {
        self.plane.submit(PlaneCommand::Fence {
            grant: GrantId(grant),
        });
    }

    /// Opens a writer for the transfer of the same number as the grant.
    pub(super) fn open(&self, grant: u64, link: LinkId, slots: &[u32]) {
        self.open_with(TransferId(grant), grant, link, slots, key(grant));
    }

    pub(super) fn open_with(
        &self,
        transfer: TransferId,
        grant: u64,
        link: LinkId,
        slots: &[u32],
        key: Secret,
    ) {
        self.plane.submit(PlaneCommand::OpenWriter {
            transfer,
            grant: GrantId(grant),
            link,
            key,
            pool: self.pool_id(),
            slots: slot_refs(slots),
        });
    }

    pub(super) fn write(&self, transfer: u64, run: PageRun) {
        let transfer = TransferId(transfer);
        self.plane.submit(PlaneCommand::Write { transfer, run });
    }

    pub(super) fn drain(&self, transfer: u64) {
        let transfer = TransferId(transfer);
        self.plane.submit(PlaneCommand::Drain { transfer });
    }

    pub(super) fn stop(&self, transfer: u64) {
        let transfer = TransferId(transfer);
        self.plane.submit(PlaneCommand::Stop { transfer });
    }

    /// Replaces the pool with one of random bytes, and returns these.
    pub(super) fn fill(&self, spec: PoolSpec, random: &mut Random) -> Vec<u8> {
        let pool = pool(spec);
        let bytes = random.bytes(usize::try_from(spec.bytes()).unwrap());
        pool.memory.mapped().write(0, &bytes).unwrap();
        self.replace(pool);
        bytes
    }

    /// Replaces the pool.
    pub(super) fn replace(&self, pool: Pool) {
        self.take_pool_away();
        self.pool.fetch_add(1, Ordering::Relaxed);
        self.pools.insert(self.pool_id(), pool);
        // One that no device takes is found out when it is used.
        let _refused = self.plane.pool_here(self.pool_id());
    }

    /// As when its engine is gone.
    pub(super) fn take_pool_away(&self) {
        drop(self.pools.remove(self.pool_id()));
        self.plane.pool_gone(self.pool_id());
    }

    fn pool_id(&self) -> PoolId {
        PoolId(self.pool.load(Ordering::Relaxed))
    }

    pub(super) fn contents(&self) -> Vec<u8> {
        let pool = self.pools.find(self.pool_id()).unwrap();
        let mut bytes = vec![0; usize::try_from(pool.spec.bytes()).unwrap()];
        pool.memory.mapped().read(0, &mut bytes).unwrap();
        bytes
    }
}

pub(super) fn key(grant: u64) -> Secret {
    let mut key = [0xA5; 32];
    key[24..].copy_from_slice(&grant.to_le_bytes());
    Secret(key)
}

/// A source and a destination, and what each calls the link between them.
pub(super) struct Pair {
    pub(super) source: Side,
    pub(super) target: Side,
    pub(super) out: LinkId,
    pub(super) back: LinkId,
}

impl Pair {
    pub(super) fn fill(&self, spec: PoolSpec, random: &mut Random) -> (Vec<u8>, Vec<u8>) {
        (
            self.source.fill(spec, random),
            self.target.fill(spec, random),
        )
    }

    pub(super) async fn begin(&mut self, grant: u64, from: &[u32], to: &[u32]) {
        self.target.arm(grant, self.back, to, &[]);
        self.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        self.source.open(grant, self.out, from);
    }

    /// Drains a grant: everything was delivered, and every byte of the pool is the shadow's.
    pub(super) async fn drain(&mut self, grant: u64, shadow: &[u8]) {
        self.source.drain(grant);
        self.source.wait_reads_stopped(grant).await;
        assert_eq!(
            self.target.wait_writes_stopped(grant).await,
            StoppedBy::Drain
        );
        assert!(self.target.contents() == shadow, "every byte of the pool");
    }

    /// Checks that each attempt ended once, and each grant.
    pub(super) async fn finish(&mut self, grants: RangeInclusive<u64>) {
        self.source.settle().await;
        self.target.settle().await;
        for grant in grants {
            let proofs =
                |event: &&Event| matches!(event, Event::WritesStopped(of, _) if *of == grant);
            assert_eq!(self.source.count(Event::ReadsStopped(grant)), 1, "{grant}");
            assert_eq!(self.target.log.iter().filter(proofs).count(), 1, "{grant}");
        }
    }
}

/// Copies a run within shadows of both pools.
pub(super) fn copy(
    spec: &PoolSpec,
    source: &[u8],
    target: &mut [u8],
    from: &[u32],
    to: &[u32],
    run: PageRun,
) {
    for position in run.first..run.first + run.count {
        let position = position as usize;
        let page = |slot| usize::try_from(spec.page_offset(run.region, slot)).unwrap();
        let (from, to) = (page(from[position]), page(to[position]));
        let bytes = spec.layout.page_bytes as usize;
        target[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
    }
}

/// Random geometry, slots and runs: after the drain the whole pool is what it should be.
pub(super) async fn delivers_exact_bytes(pair: &mut Pair) {
    let mut random = Random::new(11);
    for grant in 1..=40 {
        let page_bytes = [1, 7, 100, 4096, 10_000, 300_000][random.within(0..=5)];
        let mut spec = spec(u16::try_from(random.within(1..=3)).unwrap(), page_bytes, 24);
        let (source, mut shadow) = {
            if random.within(0..=1) == 0 {
                spec.arrangement = Arrangement::SlotMajor;
            }
            pair.fill(spec, &mut random)
        };
        let count = random.within(1..=12);
        let (from, to) = if random.within(0..=2) == 0 {
            let run: Vec<u32> = (3..3 + u32::try_from(count).unwrap()).collect();
            (run.clone(), run)
        } else {
            (random.pick(count, 24), random.pick(count, 24))
        };
        pair.begin(grant, &from, &to).await;
        let mut bytes = 0;
        for _ in 0..random.within(0..=20) {
            let first = random.within(0..=count - 1);
            let run = PageRun {
                region: u16::try_from(random.within(0..=usize::from(spec.layout.regions) - 1))
                    .unwrap(),
                first: u32::try_from(first).unwrap(),
                count: u32::try_from(random.within(1..=count - first)).unwrap(),
            };
            pair.source.write(grant, run);
            copy(&spec, &source, &mut shadow, &from, &to, run);
            bytes += u64::from(run.count) * u64::from(page_bytes);
        }
        pair.drain(grant, &shadow).await;
        assert_eq!(pair.source.written(grant), bytes);
    }
    pair.finish(1..=40).await;
}

/// Fences at random moments of a transfer: no byte changes after the proof, and none at any time
/// outside the slots. S1, S7.
pub(super) async fn no_byte_lands_after_the_fence(pair: &mut Pair, rounds: u64) {
    no_byte_lands_after_a_fence_within(pair, rounds, Duration::from_micros(700)).await;
}

/// As [`no_byte_lands_after_the_fence`], where the first byte takes about as long as `pause_max`.
pub(super) async fn no_byte_lands_after_a_fence_within(
    pair: &mut Pair,
    rounds: u64,
    pause_max: Duration,
) {
    let pause_max_us = u64::try_from(pause_max.as_micros()).unwrap();
    let mut random = Random::new(12);
    let spec = spec(2, 16 * 1024, 40);
    let (_, before) = pair.fill(spec, &mut random);
    let mut cut_short = 0;
    let mut granted = before.clone();
    for grant in 1..=rounds {
        let (from, to) = (random.pick(16, 40), random.pick(16, 20));
        pair.begin(grant, &from, &to).await;
        for round in 0..4 {
            pair.source.write(grant, run(round % 2, 0, 16));
        }
        let pause = Duration::from_micros(random.next() % pause_max_us);
        let at_once = random.next().is_multiple_of(8);
        if !at_once {
            tokio::time::sleep(pause).await;
        }
        pair.target.fence(grant);
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Fence
        );
        let at_proof = pair.target.contents();
        // Time for a writer that had all of its writes before it to hear of the fence.
        let hears = 10 * pause_max + Duration::from_millis(10);
        tokio::time::sleep(if at_once { hears } else { pause }).await;
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        if pair.source.count(Event::WriterFailed(grant)) == 1 {
            cut_short += 1;
        }
        assert!(pair.target.contents() == at_proof, "a byte after the fence");
        for region in 0..2 {
            let outside = usize::try_from(spec.page_offset(region, 20)).unwrap();
            let bytes = 20 * 16 * 1024;
            let outside = outside..outside + bytes;
            assert!(
                at_proof[outside.clone()] == granted[outside],
                "a byte outside"
            );
        }
        granted = at_proof;
        pair.source
            .log
            .retain(|event| matches!(event, Event::ReadsStopped(_)));
    }
    assert!(granted != before, "bytes landed in some rounds");
    assert!(cut_short > 0, "some writers heard of the fence");
    pair.finish(1..=rounds).await;
}

/// A wrong key, a foreign link and a second writer are turned away, and the grant does not notice.
pub(super) async fn intruders_are_refused_without_effect(pair: &mut Pair, foreign: LinkId) {
    let mut random = Random::new(13);
    let spec = spec(1, 1000, 8);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..8).collect();
    pair.target.arm(1, pair.back, &slots, &[]);
    pair.target.wait(|event| *event == Event::Armed(1)).await;

    let thief = TransferId(100);
    pair.source.open_with(thief, 1, pair.out, &slots, key(2));
    pair.source.write(100, run(0, 0, 8));
    pair.source.drain(100);
    pair.source.settle().await;
    pair.source.stop(100);
    pair.source.wait_reads_stopped(1).await;
    assert!(pair.target.contents() == shadow, "the wrong key");

    pair.target.arm(2, foreign, &slots, &[]);
    pair.source.log.clear();
    pair.source.open(2, pair.out, &slots);
    pair.source.write(2, run(0, 0, 8));
    pair.source.settle().await;
    pair.source.stop(2);
    pair.source.wait_reads_stopped(2).await;
    assert!(pair.target.contents() == shadow, "the wrong link");
    pair.target.settle().await;
    assert_eq!(pair.target.log.len(), 2, "armed, and nothing else");
    pair.target.fence(2);
    assert_eq!(pair.target.wait_writes_stopped(2).await, StoppedBy::Fence);

    // The right one, and another beside it with the right key.
    pair.source.log.clear();
    pair.source.open(1, pair.out, &slots);
    pair.source.write(1, run(0, 0, 2));
    copy(&spec, &source, &mut shadow, &slots, &slots, run(0, 0, 2));
    pair.target.wait(|event| *event == Event::Landed(1)).await;
    pair.source.open_with(thief, 1, pair.out, &slots, key(1));
    pair.source.write(100, run(0, 4, 4));
    pair.source.settle().await;
    pair.source.stop(100);
    pair.source.wait_reads_stopped(1).await;
    pair.source.log.clear();
    pair.source.write(1, run(0, 2, 1));
    copy(&spec, &source, &mut shadow, &slots, &slots, run(0, 2, 1));
    pair.source.drain(1);
    pair.source.wait_reads_stopped(1).await;
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Drain);
    assert!(
        pair.target.contents() == shadow,
        "only the first writer's bytes"
    );
    pair.finish(1..=1).await;
}

/// Positions beyond the grant's slots, and pages that it does not name, end the grant unwritten.
pub(super) async fn pages_outside_the_grant_are_refused(pair: &mut Pair) {
    let mut random = Random::new(14);
    let spec = spec(2, 500, 16);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..8).collect();
    let more: Vec<u32> = (0..9).collect();
    let named = [run(0, 1, 2), run(0, 3, 1), run(1, 0, 1)];
    let outside = [
        (&[][..], run(0, 8, 1)),
        (&[][..], run(1, 0, 9)),
        (&named[..], run(0, 0, 2)),
        (&named[..], run(0, 1, 4)),
        (&named[..], run(1, 1, 1)),
    ];
    for (grant, (pages, run)) in (1..).zip(outside) {
        pair.target.arm(grant, pair.back, &slots, pages);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        pair.source.open(grant, pair.out, &more);
        pair.source.write(grant, run);
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Fence
        );
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        assert!(pair.target.contents() == shadow, "{run:?}");
    }
    pair.target.arm(6, pair.back, &slots, &named);
    pair.source.open(6, pair.out, &more);
    for run in [run(0, 1, 3), run(1, 0, 1)] {
        pair.source.write(6, run);
        copy(&spec, &source, &mut shadow, &more, &slots, run);
    }
    pair.source.drain(6);
    assert_eq!(pair.target.wait_writes_stopped(6).await, StoppedBy::Drain);
    assert!(pair.target.contents() == shadow, "the pages that it names");
    pair.finish(1..=6).await;
}

/// A stop takes effect in the midst of a run, and both sides get their proof.
pub(super) async fn stop_ends_a_run_in_its_midst(pair: &mut Pair) {
    let mut random = Random::new(15);
    let spec = spec(1, 4 << 20, 16);
    pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..16).collect();
    for grant in 1..=20 {
        pair.begin(grant, &slots, &slots).await;
        for _ in 0..8 {
            pair.source.write(grant, run(0, 0, 16));
        }
        tokio::time::sleep(Duration::from_micros(random.next() % 20_000)).await;
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        pair.target.fence(grant);
        pair.target.wait_writes_stopped(grant).await;
        assert!(
            pair.source.written(grant) < 8 * spec.bytes(),
            "it was stopped"
        );
    }
    pair.finish(1..=20).await;
}

/// The writers of a link that goes down end, whatever they were doing.
pub(super) async fn link_down_ends_every_writer(pair: &mut Pair) {
    let mut random = Random::new(16);
    let spec = spec(1, 1 << 20, 16);
    pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..4).collect();
    for grant in 1..=6 {
        pair.begin(grant, &slots, &slots).await;
        for _ in 0..grant * 4 {
            pair.source.write(grant, run(0, 0, 4));
        }
        if grant % 2 == 0 {
            pair.source.drain(grant);
        }
    }
    tokio::time::sleep(Duration::from_millis(3)).await;
    pair.source.plane.link_down(pair.out);
    for grant in 1..=6 {
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        pair.target.fence(grant);
        pair.target.wait_writes_stopped(grant).await;
    }
    pair.finish(1..=6).await;
    // And those that come too late.
    pair.source.open(7, pair.out, &slots);
    pair.source.write(7, run(0, 0, 1));
    pair.source.wait_reads_stopped(7).await;
    assert_eq!(pair.source.count(Event::WriterFailed(7)), 1);
}

/// Pages are sent again under a new grant of the same transfer.
pub(super) async fn transfer_is_sent_again_under_a_new_grant(pair: &mut Pair) {
    let mut random = Random::new(17);
    let spec = spec(1, 2000, 8);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let (from, to) = ([1, 2, 3], [4, 0, 6]);
    for grant in 1..=10 {
        let pages = [run(0, 1, 1)];
        pair.target
            .arm(grant, pair.back, &to, if grant == 1 { &[] } else { &pages });
        pair.source
            .open_with(TransferId(5), grant, pair.out, &from, key(grant));
        let run = if grant == 1 { run(0, 0, 3) } else { pages[0] };
        pair.source.write(5, run);
        pair.source.drain(5);
        pair.source.wait_reads_stopped(grant).await;
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Drain
        );
        copy(&spec, &source, &mut shadow, &from, &to, run);
        assert!(pair.target.contents() == shadow);
    }
    pair.finish(1..=10).await;
}

/// What the machine should never ask for is answered nonetheless.
pub(super) async fn unknown_pools_and_links_are_answered(pair: &mut Pair) {
    pair.target.arm(1, pair.back, &[0], &[]);
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
    pair.source.open(1, pair.out, &[0]);
    pair.source.wait_reads_stopped(1).await;
    let mut random = Random::new(18);
    pair.fill(spec(1, 100, 4), &mut random);
    pair.source.open(2, LinkId(999), &[0]);
    pair.source.wait_reads_stopped(2).await;
    pair.target.arm(2, pair.back, &[4], &[]);
    assert_eq!(pair.target.wait_writes_stopped(2).await, StoppedBy::Fence);
    pair.target.fence(2);
    pair.target.fence(77);
    pair.source.write(77, run(0, 0, 1));
    pair.source.stop(77);
    pair.finish(1..=2).await;
}

/// As many pages as asked for differ, each in one bit.
#[cfg(feature = "fault-injection")]
pub(super) async fn flipped_pages_arrive_flipped(pair: &mut Pair, faults: &super::Faults) {
    let mut random = Random::new(19);
    let spec = spec(1, 40_000, 32);
    let (source, _) = pair.fill(spec, &mut random);
    let slots: Vec<u32> = (0..32).collect();
    faults.flip_pages.store(11, Ordering::Relaxed);
    for (grant, want) in [(1, 11), (2, 0)] {
        pair.begin(grant, &slots, &slots).await;
        pair.source.write(grant, run(0, 0, 32));
        pair.source.drain(grant);
        assert_eq!(
            pair.target.wait_writes_stopped(grant).await,
            StoppedBy::Drain
        );
        let mut flipped = 0;
        for (sent, got) in source
            .chunks(40_000)
            .zip(pair.target.contents().chunks(40_000))
        {
            let bits = |(a, b): (&u8, &u8)| (a ^ b).count_ones();
            let bits: u32 = sent.iter().zip(got).map(bits).sum();
            assert!(bits <= 1, "a page has one flipped bit at most");
            flipped += bits;
        }
        assert_eq!(flipped, want);
    }
    pair.finish(1..=2).await;
}

/// A writer that stalls posts about as many bytes as asked for, drains nothing, and can be stopped.
#[cfg(feature = "fault-injection")]
pub(super) async fn stalled_writer_is_silent_until_it_is_stopped(
    pair: &mut Pair,
    after: u64,
    stopped_by: StoppedBy,
) {
    let spec = spec(1, 1000, 32);
    pair.fill(spec, &mut Random::new(20));
    let slots: Vec<u32> = (0..32).collect();
    pair.begin(1, &slots, &slots).await;
    for position in 0..32 {
        pair.source.write(1, run(0, position, 1));
    }
    pair.source.drain(1);
    pair.source.settle().await;
    pair.target.settle().await;
    let posted = pair.source.written(1);
    assert!((after..after + 1000).contains(&posted), "{posted}");
    assert_eq!(pair.source.count(Event::ReadsStopped(1)), 0);
    assert_eq!(
        pair.target.count(Event::WritesStopped(1, StoppedBy::Drain)),
        0
    );
    pair.source.stop(1);
    pair.source.wait_reads_stopped(1).await;
    assert_eq!(pair.target.wait_writes_stopped(1).await, stopped_by);
    pair.finish(1..=1).await;
}
