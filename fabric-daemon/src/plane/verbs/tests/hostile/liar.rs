//! A peer made by hand: real queue pairs, real messages, and whatever a test has it do with them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use fabric_proto::ids::GrantId;
use quinn::{Connection, SendStream};
use tokio::sync::mpsc;

use super::super::super::codec::{self, LaneNumber, LaneOffer, Message, RailAddress};
use super::super::super::extents::{Cover, Reach};
use super::super::super::ffi::{
    Access, Capacity, CompletionChannel, CompletionQueue, Completions, Local, MemoryRegion, Opcode,
    ProtectionDomain, QueuePair, RKey, Remote, Route, SendChain, Signal, Status,
};
use super::super::*;
use crate::plane::pools::Pool;

/// Its end of a lane of the destination.
pub(super) struct LiarLane {
    pub(super) queue_pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Sends that were posted and have not completed.
    outstanding: u32,
    /// The destination says that its end is gone.
    gone: bool,
}

/// What became of what a liar posted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fates {
    pub(super) done: u64,
    pub(super) refused: u64,
    flushed: u64,
    unanswered: u64,
    other: u64,
    /// Lies that were done.
    pub(super) lies_done: u64,
}

pub(super) struct Liar {
    port: u8,
    gid_index: u8,
    ours: RailAddress,
    theirs: Vec<RailAddress>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    region: MemoryRegion,
    /// What it writes.
    pub(super) bytes: Vec<u8>,
    pub(super) lanes: BTreeMap<LaneNumber, LiarLane>,
    /// Receives that it posts on each lane.
    pub(super) receives: u32,
    pub(super) reaches: BTreeMap<GrantId, (LaneNumber, Reach)>,
    pub(super) sending: SendStream,
    pub(super) messages: mpsc::Receiver<Message>,
    /// It takes no message any more.
    pub(super) is_deaf: Arc<AtomicBool>,
    pub(super) fates: Fates,
    pub(super) connection: Connection,
}

impl Liar {
    /// Opens its stream, and names its port. The destination's first message is taken.
    pub(super) async fn new(connection: &Connection, receives: u32) -> Self {
        let rail = rails::discover(&[]).unwrap().remove(0);
        let memory: Pool = testing::pool(testing::spec(1, LIAR_BYTES, 1));
        let bytes = Random::new(77).bytes(LIAR_BYTES as usize);
        memory.memory.mapped().write(0, &bytes).unwrap();
        let context = rail.domain.context();
        let domain = ProtectionDomain::new(context).unwrap();
        let region = MemoryRegion::register(&domain, &Arc::new(memory), Access::LOCAL_WRITE);
        let (mut sending, mut receiving) = connection.open_bi().await.unwrap();
        let ours = rail.address;
        codec::send(&mut sending, &Message::Rails(vec![ours]))
            .await
            .unwrap();
        let first = codec::receive(&mut receiving).await.unwrap();
        let Some(Message::Rails(theirs)) = first else {
            panic!("{first:?}");
        };
        let (said, messages) = mpsc::channel(4096);
        let is_deaf = Arc::new(AtomicBool::new(false));
        let stops = Arc::clone(&is_deaf);
        tokio::spawn(async move {
            while let Ok(Some(message)) = codec::receive(&mut receiving).await {
                if said.send(message).await.is_err() {
                    return;
                }
                if stops.load(Ordering::Relaxed) {
                    return said.closed().await;
                }
            }
        });
        Self {
            port: rail.port,
            gid_index: rail.gid.index,
            ours,
            theirs,
            channel: CompletionChannel::new(context).unwrap(),
            region: region.unwrap(),
            domain,
            bytes,
            lanes: BTreeMap::new(),
            receives,
            reaches: BTreeMap::new(),
            sending,
            messages,
            is_deaf,
            fates: Fates::default(),
            connection: connection.clone(),
        }
    }

    /// Behaves until the destination takes it for one of its like.
    async fn pose(&mut self) {
        loop {
            if let Message::Usable(usable) = self.hear().await {
                assert!(usable);
                return self.say(Message::Usable(true)).await;
            }
        }
    }

    pub(super) async fn say(&mut self, message: Message) {
        codec::send(&mut self.sending, &message).await.unwrap();
    }

    /// Takes the destination's next message; connects what lanes it offers.
    pub(super) async fn hear(&mut self) -> Message {
        let next = tokio::time::timeout(PATIENCE, self.messages.recv()).await;
        let message = next.expect("the destination says something").unwrap();
        self.took(&message).await;
        message
    }

    /// Takes what the destination has said so far.
    pub(super) async fn catch_up(&mut self) {
        while let Ok(message) = self.messages.try_recv() {
            self.took(&message).await;
        }
    }

    pub(super) async fn took(&mut self, message: &Message) {
        match message {
            Message::Lane(offer) => self.connect(*offer).await,
            Message::LaneGone {
                lane,
                offered_by_sender: true,
            } => {
                if let Some(lane) = self.lanes.get_mut(lane) {
                    lane.gone = true;
                }
            }
            Message::Reach {
                grant,
                lanes,
                reach,
                ..
            } => {
                // With one port on each side, a grant has one leg.
                self.reaches.insert(*grant, (lanes[0], reach.clone()));
            }
            // Its lie broke the lane: it has no use for another.
            Message::Rerouted { grant, .. } => {
                self.say(Message::GivenUp { grant: *grant }).await;
            }
            Message::AllExposed { .. }
            | Message::Exposed { .. }
            | Message::Exposes(_)
            | Message::LaneReady { .. }
            | Message::LaneGone { .. }
            | Message::Rails(_)
            | Message::Usable(_)
            | Message::LegDrained { .. }
            | Message::GivenUp { .. }
            | Message::Closed { .. } => {}
        }
    }

    fn queue_pair(&self) -> (QueuePair, Arc<CompletionQueue>) {
        let capacity = Capacity {
            sends: LIES_MAX,
            receives: self.receives.max(1),
        };
        let completions = CompletionQueue::new(&self.channel, LIES_MAX + 64).unwrap();
        let queue_pair = QueuePair::new(&self.domain, &completions, capacity).unwrap();
        queue_pair
            .initialise(self.port, Access::LOCAL_WRITE)
            .unwrap();
        queue_pair.post_receives(RECEIVE, self.receives).unwrap();
        (queue_pair, completions)
    }

    async fn connect(&mut self, offer: LaneOffer) {
        let (queue_pair, completions) = self.queue_pair();
        let route = self.route(offer.rail, offer.number, offer.first);
        queue_pair.connect(&route).unwrap();
        let number = queue_pair.number();
        let lane = LiarLane {
            queue_pair,
            completions,
            outstanding: 0,
            gone: false,
        };
        self.lanes.insert(offer.lane, lane);
        self.say(Message::LaneReady {
            lane: offer.lane,
            number,
            first: FIRST,
        })
        .await;
    }

    /// Offers a lane of its own, through which the destination may write memory of its own. It
    /// takes no message there.
    pub(super) async fn offer(&mut self, lane: LaneNumber) -> (QueuePair, MemoryRegion) {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = Arc::new(testing::pool(testing::spec(1, LIAR_BYTES, 1)));
        let region = MemoryRegion::register(&self.domain, &memory, access).unwrap();
        let completions = CompletionQueue::new(&self.channel, 64).unwrap();
        let capacity = Capacity {
            sends: 1,
            receives: 1,
        };
        let queue_pair = QueuePair::new(&self.domain, &completions, capacity).unwrap();
        queue_pair.initialise(self.port, access).unwrap();
        self.say(Message::Lane(LaneOffer {
            lane,
            rail: 0,
            their_rail: 0,
            number: queue_pair.number(),
            first: FIRST,
        }))
        .await;
        loop {
            if let Message::LaneReady { number, first, .. } = self.hear().await {
                queue_pair.connect(&self.route(0, number, first)).unwrap();
                return (queue_pair, region);
            }
        }
    }

    /// Grants two slots of the liar's own memory, through a lane that it offered.
    pub(super) async fn grant(&mut self, grant: u64, lane: LaneNumber, region: &MemoryRegion) {
        let mut reach = Reach::plan(&testing::spec(1, 4096, 32), &[0, 1], &[], Cover::Slots);
        reach.extents[0].rkey = region.rkey();
        self.say(Message::Reach {
            grant: GrantId(grant),
            key: testing::key(grant),
            lanes: vec![lane],
            reach,
        })
        .await;
    }

    /// To a queue pair of the destination.
    fn route(&self, rail: u8, number: u32, their_first: u32) -> Route {
        let peer = self.theirs[usize::from(rail)];
        Route {
            port: self.port,
            gid_index: self.gid_index,
            mtu: self.ours.mtu.min(peer.mtu),
            is_global: peer.is_ethernet,
            gid: peer.gid,
            lid: peer.lid,
            number,
            their_first,
            our_first: FIRST,
            reads_answered: self.ours.reads,
            reads_outstanding: peer.reads,
        }
    }

    /// What a grant reaches, and through which lane. `None`: it is closed already.
    pub(super) async fn reach(
        &mut self,
        target: &mut Side,
        grant: u64,
    ) -> Option<(LaneNumber, Reach)> {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            // It may wait for lanes, which we have to connect.
            self.catch_up().await;
            if let Some(reach) = self.reaches.remove(&GrantId(grant)) {
                return Some(reach);
            }
            if has_closed(target, grant).await {
                return None;
            }
        }
        panic!("grant {grant} is neither open nor closed");
    }

    /// Waits until a grant is closed; by what.
    pub(super) async fn wait_closed(&mut self, target: &mut Side, grant: u64) -> StoppedBy {
        let deadline = Instant::now() + PATIENCE;
        while !has_closed(target, grant).await {
            assert!(Instant::now() < deadline, "grant {grant} is not closed");
            self.catch_up().await;
        }
        target.wait_writes_stopped(grant).await
    }

    /// Waits until it has so many lanes that the destination has not said to be gone.
    pub(super) async fn wait_lanes(&mut self, count: usize) {
        self.catch_up().await;
        while self.living().len() < count {
            self.hear().await;
        }
    }

    pub(super) fn living(&self) -> Vec<LaneNumber> {
        let living = self.lanes.iter().filter(|(_, lane)| !lane.gone);
        living.map(|(number, _)| *number).collect()
    }

    /// Adds a write from its `from` on.
    pub(super) fn add(
        &self,
        chain: &mut SendChain,
        id: u64,
        from: u64,
        bytes: u64,
        to: (u64, RKey),
    ) {
        let local = Local {
            offset: from,
            bytes: u32::try_from(bytes).unwrap(),
            lkey: self.region.lkey(),
        };
        let (offset, rkey) = to;
        chain.write(id, Signal::Yes, local, Remote { offset, rkey });
    }

    /// Posts `count` requests of a chain through a lane. Whether they can be posted is not asked.
    pub(super) fn post(&mut self, number: LaneNumber, chain: &mut SendChain, count: u32) {
        self.collect(number);
        let Some(lane) = self.lanes.get_mut(&number) else {
            return *chain = SendChain::new();
        };
        if lane.outstanding + count > LIES_MAX {
            return *chain = SendChain::new();
        }
        if chain.post(&lane.queue_pair).is_ok() {
            lane.outstanding += count;
        }
    }

    /// Takes in what became of what was posted.
    fn collect(&mut self, number: LaneNumber) {
        let Some(lane) = self.lanes.get_mut(&number) else {
            return;
        };
        loop {
            let mut room = Completions::new();
            let mut count = 0;
            for completion in lane.completions.poll(&mut room).unwrap() {
                count += 1;
                if completion.wr_id == RECEIVE {
                    continue;
                }
                lane.outstanding -= 1;
                let fate = match completion.result {
                    Ok(Opcode::Write) if completion.wr_id == LIE => &mut self.fates.lies_done,
                    Ok(_) => &mut self.fates.done,
                    Err(Status::REMOTE_ACCESS) => &mut self.fates.refused,
                    Err(Status::FLUSHED) => &mut self.fates.flushed,
                    Err(Status::RETRIES_EXCEEDED) => &mut self.fates.unanswered,
                    Err(_) => &mut self.fates.other,
                };
                *fate += 1;
            }
            if count == 0 {
                return;
            }
        }
    }

    /// Waits a moment for what was posted, and ends it all: with every lane that it used.
    pub(super) async fn finish(&mut self) {
        let used = |lane: &LiarLane| lane.outstanding > 0 || lane.gone;
        let deadline = Instant::now() + Duration::from_millis(40);
        while Instant::now() < deadline {
            let numbers: Vec<_> = self.lanes.keys().copied().collect();
            numbers.iter().for_each(|number| self.collect(*number));
            if self.lanes.values().all(|lane| lane.outstanding == 0) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let ended: Vec<_> = self.lanes.iter().filter(|(_, lane)| used(lane)).collect();
        let ended: Vec<_> = ended.into_iter().map(|(number, _)| *number).collect();
        for number in ended {
            self.lanes[&number].queue_pair.stop().unwrap();
            let deadline = Instant::now() + PATIENCE;
            while self.lanes[&number].outstanding > 0 {
                self.collect(number);
                assert!(Instant::now() < deadline, "a stopped queue pair flushes");
                tokio::task::yield_now().await;
            }
            let lane = self.lanes.remove(&number).unwrap();
            if !lane.gone {
                // So that there comes another.
                self.say(Message::LaneGone {
                    lane: number,
                    offered_by_sender: false,
                })
                .await;
            }
        }
    }
}

/// A destination, and a liar that it takes for a peer.
pub(super) async fn met(modes: &[Mode], receives: u32) -> (Side, Arc<VerbsPlane>, Liar) {
    log();
    let (target, plane) = side(on_one_port(modes), &Arc::default());
    let liar = meet(&plane, BACK, receives).await;
    (target, plane, liar)
}

pub(super) async fn meet(plane: &VerbsPlane, link: LinkId, receives: u32) -> Liar {
    meet_over(testing::connect().await, plane, link, receives).await
}

pub(super) async fn meet_over(
    (out, back): (Connection, Connection),
    plane: &VerbsPlane,
    link: LinkId,
    receives: u32,
) -> Liar {
    let posing = async {
        let mut liar = Liar::new(&out, receives).await;
        liar.pose().await;
        liar
    };
    let (introduced, liar) = tokio::join!(plane.introduce(&back, Opener::Peer), posing);
    plane.link_up(link, introduced.unwrap().unwrap());
    liar
}

async fn has_closed(target: &mut Side, grant: u64) -> bool {
    let closed = |event: &Event| matches!(event, Event::WritesStopped(of, _) if *of == grant);
    let moment = Duration::from_millis(1);
    tokio::time::timeout(moment, target.wait(closed))
        .await
        .is_ok()
}

const LIAR_BYTES: u32 = 64 * 1024;

/// Sends that a liar has outstanding on a lane.
const LIES_MAX: u32 = 256;

pub(super) const PATIENCE: Duration = Duration::from_secs(20);

// Ids of a liar's work requests.
pub(super) const LIE: u64 = 1;
pub(super) const TRUTH: u64 = 2;
pub(super) const RECEIVE: u64 = 3;

pub(super) const FIRST: u32 = 77;
