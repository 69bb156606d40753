//! Against peers that keep no rule. A [`Liar`] is a peer made by hand: real queue pairs, real
//! messages, and whatever a test has it do with them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use fabric_proto::ids::GrantId;
use quinn::{Connection, SendStream};
use tokio::sync::mpsc;

use super::super::codec::{self, LaneNumber, LaneOffer, Message, RailAddress};
use super::super::extents::{Cover, Reach};
use super::super::ffi::{
    Access, Capacity, CompletionChannel, CompletionQueue, Completions, Local, MemoryRegion, Opcode,
    ProtectionDomain, QueuePair, RKey, Remote, Route, SendChain, Signal, Status,
};
use super::*;
use crate::plane::pools::Pool;

/// Its end of a lane of the destination.
struct LiarLane {
    queue_pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Sends that were posted and have not completed.
    outstanding: u32,
    /// The destination says that its end is gone.
    gone: bool,
}

/// What became of what a liar posted.
#[derive(Clone, Copy, Debug, Default)]
struct Fates {
    done: u64,
    refused: u64,
    flushed: u64,
    unanswered: u64,
    other: u64,
    /// Lies that were done.
    lies_done: u64,
}

struct Liar {
    port: u8,
    gid_index: u8,
    ours: RailAddress,
    theirs: Vec<RailAddress>,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    region: MemoryRegion,
    /// What it writes.
    bytes: Vec<u8>,
    lanes: BTreeMap<LaneNumber, LiarLane>,
    /// Receives that it posts on each lane.
    receives: u32,
    reaches: BTreeMap<GrantId, (LaneNumber, Reach)>,
    sending: SendStream,
    messages: mpsc::Receiver<Message>,
    /// It takes no message any more.
    is_deaf: Arc<AtomicBool>,
    fates: Fates,
    connection: Connection,
}

impl Liar {
    /// Opens its stream, and names its port. The destination's first message is taken.
    async fn new(connection: &Connection, receives: u32) -> Self {
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

    async fn say(&mut self, message: Message) {
        codec::send(&mut self.sending, &message).await.unwrap();
    }

    /// Takes the destination's next message; connects what lanes it offers.
    async fn hear(&mut self) -> Message {
        let next = tokio::time::timeout(PATIENCE, self.messages.recv()).await;
        let message = next.expect("the destination says something").unwrap();
        self.took(&message).await;
        message
    }

    /// Takes what the destination has said so far.
    async fn catch_up(&mut self) {
        while let Ok(message) = self.messages.try_recv() {
            self.took(&message).await;
        }
    }

    async fn took(&mut self, message: &Message) {
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
    async fn offer(&mut self, lane: LaneNumber) -> (QueuePair, MemoryRegion) {
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
    async fn grant(&mut self, grant: u64, lane: LaneNumber, region: &MemoryRegion) {
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
    async fn reach(&mut self, target: &mut Side, grant: u64) -> Option<(LaneNumber, Reach)> {
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
    async fn wait_closed(&mut self, target: &mut Side, grant: u64) -> StoppedBy {
        let deadline = Instant::now() + PATIENCE;
        while !has_closed(target, grant).await {
            assert!(Instant::now() < deadline, "grant {grant} is not closed");
            self.catch_up().await;
        }
        target.wait_writes_stopped(grant).await
    }

    /// Waits until it has so many lanes that the destination has not said to be gone.
    async fn wait_lanes(&mut self, count: usize) {
        self.catch_up().await;
        while self.living().len() < count {
            self.hear().await;
        }
    }

    fn living(&self) -> Vec<LaneNumber> {
        let living = self.lanes.iter().filter(|(_, lane)| !lane.gone);
        living.map(|(number, _)| *number).collect()
    }

    /// Adds a write from its `from` on.
    fn add(&self, chain: &mut SendChain, id: u64, from: u64, bytes: u64, to: (u64, RKey)) {
        let local = Local {
            offset: from,
            bytes: u32::try_from(bytes).unwrap(),
            lkey: self.region.lkey(),
        };
        let (offset, rkey) = to;
        chain.write(id, Signal::Yes, local, Remote { offset, rkey });
    }

    /// Posts `count` requests of a chain through a lane. Whether they can be posted is not asked.
    fn post(&mut self, number: LaneNumber, chain: &mut SendChain, count: u32) {
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
    async fn finish(&mut self) {
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
async fn met(modes: &[Mode], receives: u32) -> (Side, Arc<VerbsPlane>, Liar) {
    log();
    let (target, plane) = side(on_one_port(modes), &Arc::default());
    let liar = meet(&plane, BACK, receives).await;
    (target, plane, liar)
}

async fn meet(plane: &VerbsPlane, link: LinkId, receives: u32) -> Liar {
    meet_over(testing::connect().await, plane, link, receives).await
}

async fn meet_over(
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

/// How a liar breaks the rules of its grant.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Lie {
    /// It drains, and goes on writing in the same breath.
    AfterDrain,
    /// It invalidates some of its windows, and writes into all of them.
    AfterSome,
    /// It uses its keys on other lanes, and then drains.
    OtherLanes,
    /// It invalidates windows out of order.
    OutOfOrder,
    /// It never drains.
    Never,
    /// It sends messages that no plane sends.
    Messages,
}

const LIES: [Lie; 6] = [
    Lie::AfterDrain,
    Lie::AfterSome,
    Lie::OtherLanes,
    Lie::OutOfOrder,
    Lie::Never,
    Lie::Messages,
];

/// One grant of a liar.
struct Round<'a> {
    grant: u64,
    lie: Lie,
    lane: LaneNumber,
    reach: Reach,
    random: &'a mut Random,
}

impl Round<'_> {
    /// A write of random bytes to somewhere in one of the windows, and in the shadow.
    fn write(
        &mut self,
        liar: &Liar,
        chain: &mut SendChain,
        id: u64,
        index: usize,
    ) -> (usize, Vec<u8>) {
        let extent = self.reach.extents[index];
        let all = usize::try_from(self.reach.extent_bytes(&extent)).unwrap();
        let start = self.random.within(0..=all - 1);
        let bytes = self.random.within(1..=all - start);
        let from = self.random.within(0..=liar.bytes.len() - bytes);
        let offset = extent.offset + start as u64;
        let to = (offset, extent.rkey);
        liar.add(chain, id, from as u64, bytes as u64, to);
        let at = usize::try_from(offset).unwrap();
        (at, liar.bytes[from..from + bytes].to_vec())
    }

    /// Writes that are allowed.
    fn write_truly(&mut self, liar: &mut Liar, shadow: &mut [u8]) {
        let mut chain = SendChain::new();
        let count = self.random.within(1..=8);
        for _ in 0..count {
            let index = self.random.within(0..=self.reach.extents.len() - 1);
            let (at, bytes) = self.write(liar, &mut chain, TRUTH, index);
            shadow[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        liar.post(self.lane, &mut chain, u32::try_from(count).unwrap());
    }

    /// Writes that must not land, through a lane, into windows from `first` on.
    fn write_lies(&mut self, liar: &mut Liar, lane: LaneNumber, count: usize) {
        let mut chain = SendChain::new();
        for _ in 0..count {
            let index = self.random.within(0..=self.reach.extents.len() - 1);
            self.write(liar, &mut chain, LIE, index);
        }
        liar.post(lane, &mut chain, u32::try_from(count).unwrap());
    }

    /// Its windows are invalidated, in order, but for those from `end` on. Then come lies about
    /// those, in the same chain.
    fn invalidate(&mut self, liar: &mut Liar, end: usize, lies: usize) {
        let mut chain = SendChain::new();
        for extent in &self.reach.extents[..end] {
            chain.send_invalidate(TRUTH, Signal::Yes, extent.rkey);
        }
        for _ in 0..lies {
            let index = self.random.within(0..=end - 1);
            self.write(liar, &mut chain, LIE, index);
        }
        liar.post(self.lane, &mut chain, u32::try_from(end + lies).unwrap());
    }

    async fn break_rules(&mut self, liar: &mut Liar, target: &Side) {
        let windows = self.reach.extents.len();
        let others: Vec<_> = liar.living();
        let others: Vec<_> = others
            .into_iter()
            .filter(|lane| *lane != self.lane)
            .collect();
        match self.lie {
            Lie::AfterDrain => {
                let lies = self.random.within(1..=12);
                self.invalidate(liar, windows, lies);
                for lane in others {
                    let lies = self.random.within(0..=2);
                    self.write_lies(liar, lane, lies);
                }
            }
            Lie::AfterSome => {
                let end = self.random.within(1..=windows - 1);
                let lies = self.random.within(1..=12);
                self.invalidate(liar, end, lies);
                let mut chain = SendChain::new();
                for extent in &self.reach.extents[end..] {
                    chain.send_invalidate(LIE, Signal::Yes, extent.rkey);
                }
                let count = u32::try_from(windows - end).unwrap();
                liar.post(self.lane, &mut chain, count);
            }
            Lie::OtherLanes => {
                for lane in others {
                    let lies = self.random.within(1..=4);
                    self.write_lies(liar, lane, lies);
                }
                self.invalidate(liar, windows, 0);
            }
            Lie::OutOfOrder => {
                let mut chain = SendChain::new();
                let rkey = self.reach.extents[windows - 1].rkey;
                chain.send_invalidate(TRUTH, Signal::Yes, rkey);
                liar.post(self.lane, &mut chain, 1);
                self.invalidate(liar, windows - 1, 2);
            }
            Lie::Never => self.never_drain(liar, target).await,
            Lie::Messages => self.send_nonsense(liar),
        }
    }

    /// Writes until some moment, when its owner fences, and a little longer.
    async fn never_drain(&mut self, liar: &mut Liar, target: &Side) {
        let turns = self.random.within(1..=6);
        let fence_at = self.random.within(0..=turns - 1);
        for turn in 0..turns {
            if turn == fence_at {
                target.fence(self.grant);
            }
            let mut chain = SendChain::new();
            for _ in 0..8 {
                let index = self.random.within(0..=self.reach.extents.len() - 1);
                self.write(liar, &mut chain, TRUTH, index);
            }
            liar.post(self.lane, &mut chain, 8);
            tokio::time::sleep(Duration::from_micros(self.random.next() % 300)).await;
        }
    }

    fn send_nonsense(&mut self, liar: &mut Liar) {
        let mut chain = SendChain::new();
        // A window that is not its own, one that was, and one that never was.
        let rkey = self.reach.extents[0].rkey;
        let wrong = [RKey(rkey.0 ^ 0x0100), RKey(rkey.0 - 1), RKey(u32::MAX)];
        for lane in liar.living() {
            chain.send_immediate(TRUTH, Signal::Yes, 0xDEAD_BEEF);
            chain.send_immediate(TRUTH, Signal::Yes, PROGRESS);
            chain.send_immediate(TRUTH, Signal::Yes, DRAIN);
            if self.random.within(0..=1) == 0 {
                chain.send_empty(TRUTH, Signal::Yes);
            } else {
                let rkey = wrong[self.random.within(0..=2)];
                chain.send_invalidate(TRUTH, Signal::Yes, rkey);
            }
            liar.post(lane, &mut chain, 4);
        }
    }
}

/// S1, S7: whatever a writer does, nothing lands that its grant does not allow, and nothing at all
/// once the grant is closed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_writer_that_lies_changes_no_byte_after_its_grant() {
    let (mut target, plane, mut liar) = met(&[Mode::Window], 16).await;
    let mut random = Random::new(41);
    let spec = testing::spec(1, 8192, 32);
    let mut shadow = target.fill(spec, &mut random);
    let (mut by_drain, mut by_fence) = (0, 0);
    for grant in 1..=LIAR_ROUNDS {
        liar.wait_lanes(4).await;
        let lie = LIES[random.within(0..=LIES.len() - 1)];
        let slots = scattered(&mut random);
        target.arm(grant, BACK, &slots, &[]);
        let Some((lane, reach)) = liar.reach(&mut target, grant).await else {
            continue; // Its lane broke just before, of a lie of the round before.
        };
        let (random, mut truth) = (&mut random, shadow.clone());
        let mut round = Round {
            grant,
            lie,
            lane,
            reach,
            random,
        };
        round.write_truly(&mut liar, &mut truth);
        round.break_rules(&mut liar, &target).await;
        let is_whole = matches!(lie, Lie::AfterDrain | Lie::OtherLanes);
        if lie == Lie::Messages {
            // Numbers end nothing.
            tokio::time::sleep(Duration::from_millis(5)).await;
            target.fence(grant);
        }
        let by = liar.wait_closed(&mut target, grant).await;
        let at_proof = target.contents();
        let want = if is_whole {
            StoppedBy::Drain
        } else {
            StoppedBy::Fence
        };
        assert_eq!(by, want, "{grant} {lie:?}");
        *(if is_whole {
            &mut by_drain
        } else {
            &mut by_fence
        }) += 1;
        if is_whole {
            assert!(
                at_proof == truth,
                "{grant} {lie:?}: every byte before the drain, no other"
            );
        }
        only_slots_changed(&spec, &slots, &shadow, &at_proof, (grant, lie));
        // The same slots for somebody else, while the liar goes on with keys that it had, and with
        // those that follow them.
        go_on(&mut target, &mut liar, &mut round, &slots).await;
        liar.finish().await;
        assert_eq!(liar.fates.lies_done, 0, "{grant} {lie:?}: after the proof");
        assert!(
            target.contents() == at_proof,
            "{grant} {lie:?}: a byte after the proof"
        );
        target.fence(NEXT + grant);
        target.wait_writes_stopped(NEXT + grant).await;
        assert_eq!(liar.fates.lies_done, 0, "{grant} {lie:?}");
        assert!(
            target.contents() == at_proof,
            "{grant} {lie:?}: a byte under no grant"
        );
        target.log.clear();
        shadow = at_proof;
    }
    println!("{by_drain} drains, {by_fence} fences, {:?}", liar.fates);
    println!("{} peers refused", plane.peers_refused());
    assert!(by_drain > 0 && by_fence > 0 && liar.fates.refused > 0);
}

/// Slots no two of which are neighbours: each has a window of its own.
fn scattered(random: &mut Random) -> Vec<u32> {
    let slots = random.pick(5, 16);
    slots.into_iter().map(|slot| slot * 2).collect()
}

fn only_slots_changed(
    spec: &fabric_proto::pool::PoolSpec,
    slots: &[u32],
    before: &[u8],
    after: &[u8],
    round: (u64, Lie),
) {
    let page = spec.layout.page_bytes as usize;
    for (slot, (before, after)) in (0..).zip(before.chunks(page).zip(after.chunks(page))) {
        let is_granted = slots.contains(&slot);
        assert!(is_granted || before == after, "{round:?}: slot {slot}");
    }
}

/// The liar uses the keys that it had through every lane. Then the slots are granted again, and it
/// uses the old keys through every lane again and the new through every one but their own.
///
/// In between it waits for what it has posted. Soft-RoCE compares a window's key, queue pair and
/// state one after the other and without its lock: an old key that it has just compared when the
/// window is bound again, on the same queue pair, opens what the new one does (seen once in some
/// thousand rounds; within eleven with a driver made to pause between the comparisons). That is a
/// write under the new grant, by its own writer, and no late one.
async fn go_on(target: &mut Side, liar: &mut Liar, round: &mut Round<'_>, slots: &[u32]) {
    for lane in liar.living() {
        if round.random.within(0..=2) == 0 {
            round.write_lies(liar, lane, 2);
        }
    }
    round.write_lies(liar, round.lane, 4);
    liar.finish().await;
    let next = NEXT + round.grant;
    target.arm(next, BACK, slots, &[]);
    let Some((new_lane, reach)) = liar.reach(target, next).await else {
        return;
    };
    for lane in liar.living() {
        round.write_lies(liar, lane, 2);
    }
    let old = std::mem::replace(&mut round.reach, reach);
    for lane in liar.lanes.keys().copied().collect::<Vec<_>>() {
        if lane != new_lane {
            round.write_lies(liar, lane, 3);
        }
    }
    round.reach = old;
}

async fn has_closed(target: &mut Side, grant: u64) -> bool {
    let closed = |event: &Event| matches!(event, Event::WritesStopped(of, _) if *of == grant);
    let moment = Duration::from_millis(1);
    tokio::time::timeout(moment, target.wait(closed))
        .await
        .is_ok()
}

/// Waits until a grant is armed, or closed without.
async fn ended_first(target: &mut Side, grant: u64) -> bool {
    let either = |event: &Event| match *event {
        Event::Armed(of) | Event::WritesStopped(of, _) => of == grant,
        Event::Landed(_) | Event::ReadsStopped(_) | Event::WriterFailed(_) | Event::Written(..) => {
            false
        }
    };
    target.wait(either).await != Event::Armed(grant)
}

/// Two honest planes, and a liar that has met the destination's.
async fn beside_a_liar() -> (Pair, [Arc<VerbsPlane>; 2], Liar) {
    let (pair, planes) = planes_with(on_one_port(&[Mode::Window]), &Arc::default()).await;
    let liar = meet(&planes[1], LIARS, 16).await;
    (pair, planes, liar)
}

/// An honest transfer of every page to `slots`.
async fn transfer(pair: &mut Pair, grant: u64, slots: &[u32]) {
    let count = u32::try_from(slots.len()).unwrap();
    pair.target.arm(grant, BACK, slots, &[]);
    pair.target
        .wait(|event| *event == Event::Armed(grant))
        .await;
    pair.source.open(grant, OUT, slots);
    pair.source.write(grant, testing::run(0, 0, count));
    pair.source.drain(grant);
    pair.source.wait_reads_stopped(grant).await;
    let by = pair.target.wait_writes_stopped(grant).await;
    assert_eq!(by, StoppedBy::Drain, "{grant}");
}

fn copy_slots(spec: &fabric_proto::pool::PoolSpec, from: &[u8], to: &mut [u8], slots: &[u32]) {
    let page = spec.layout.page_bytes as usize;
    for slot in slots {
        let at = *slot as usize * page;
        to[at..at + page].copy_from_slice(&from[at..at + page]);
    }
}

/// S7: windows go from one grant to the next, so a peer can tell the keys of another's grant from
/// those that it had. It can do nothing with them.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn the_keys_of_another_peers_grant_open_nothing() {
    let (mut pair, _planes, mut liar) = beside_a_liar().await;
    let mut random = Random::new(42);
    let spec = testing::spec(1, 4096, 32);
    let source = pair.source.fill(spec, &mut random);
    let mut shadow = pair.target.fill(spec, &mut random);
    for grant in 1..=60 {
        liar.wait_lanes(4).await;
        let slots = scattered(&mut random);
        pair.target.arm(NEXT + grant, LIARS, &slots, &[]);
        let found = liar.reach(&mut pair.target, NEXT + grant).await;
        let Some((lane, reach)) = found else {
            continue;
        };
        let mut round = Round {
            grant,
            lie: Lie::OtherLanes,
            lane,
            reach,
            random: &mut random,
        };
        let windows = round.reach.extents.len();
        round.invalidate(&mut liar, windows, 0);
        let by = liar.wait_closed(&mut pair.target, NEXT + grant).await;
        assert_eq!(by, StoppedBy::Drain);
        // The next keys of the same windows.
        for extent in &mut round.reach.extents {
            let key = extent.rkey.0;
            extent.rkey = RKey(key & !0xFF | (key + 1) & 0xFF);
        }
        pair.target.arm(grant, BACK, &slots, &[]);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        for lane in liar.living() {
            round.write_lies(&mut liar, lane, 3);
            let mut chain = SendChain::new();
            chain.send_invalidate(TRUTH, Signal::Yes, round.reach.extents[0].rkey);
            liar.post(lane, &mut chain, 1);
        }
        liar.finish().await;
        assert!(
            pair.target.contents() == shadow,
            "{grant}: a byte of the liar"
        );
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, 5));
        pair.source.drain(grant);
        let by = pair.target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Drain, "{grant}: its windows are untouched");
        copy_slots(&spec, &source, &mut shadow, &slots);
        assert!(pair.target.contents() == shadow, "{grant}");
        pair.target.log.clear();
    }
    println!("{:?}", liar.fates);
    assert_eq!(liar.fates.lies_done, 0);
    assert!(liar.fates.refused > 0);
}

/// More messages than there are receives for, through every lane, all the time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_flood_of_messages_stops_nobody_else() {
    let (mut pair, _planes, mut liar) = beside_a_liar().await;
    let mut random = Random::new(43);
    let spec = testing::spec(1, 4096, 32);
    let source = pair.source.fill(spec, &mut random);
    let mut shadow = pair.target.fill(spec, &mut random);
    // One of its lanes has a grant.
    pair.target.arm(NEXT, LIARS, &[31], &[]);
    pair.target.wait(|event| *event == Event::Armed(NEXT)).await;
    for grant in 1..=40 {
        for lane in liar.living() {
            for _ in 0..8 {
                let mut chain = SendChain::new();
                for number in 0..SendChain::MAX {
                    let number = u32::try_from(number).unwrap() % 4;
                    chain.send_immediate(TRUTH, Signal::Yes, number);
                }
                liar.post(lane, &mut chain, 32);
            }
        }
        let slots = random.pick(5, 30);
        transfer(&mut pair, grant, &slots).await;
        copy_slots(&spec, &source, &mut shadow, &slots);
        assert!(pair.target.contents() == shadow, "{grant}");
    }
    pair.target.fence(NEXT);
    pair.target.wait_writes_stopped(NEXT).await;
    println!("{:?}", liar.fates);
    assert!(liar.fates.done > 2 * u64::from(lanes::RECEIVES));
}

/// Lanes that are offered and gone in one breath leave completions behind: a thousand receives each
/// are flushed. They have room.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_flood_of_lanes_stops_nobody_else() {
    let (mut pair, planes, mut liar) = beside_a_liar().await;
    let mut random = Random::new(44);
    let spec = testing::spec(1, 4096, 32);
    let source = pair.source.fill(spec, &mut random);
    let mut shadow = pair.target.fill(spec, &mut random);
    for grant in 1..=6 {
        for lane in (grant * 1000..).take(200) {
            let lane = LaneNumber(u32::try_from(lane).unwrap());
            liar.say(Message::Lane(LaneOffer {
                lane,
                rail: 0,
                their_rail: 0,
                number: 0x00AB_CDEF,
                first: FIRST,
            }))
            .await;
            liar.say(Message::LaneGone {
                lane,
                offered_by_sender: true,
            })
            .await;
        }
        let slots = random.pick(5, 32);
        transfer(&mut pair, grant, &slots).await;
        copy_slots(&spec, &source, &mut shadow, &slots);
        assert!(pair.target.contents() == shadow, "{grant}");
    }
    // Four of ours for each of two peers, and the honest one's four.
    let deadline = Instant::now() + PATIENCE;
    while planes[1].objects()[0] != ("queue_pair", 12) {
        liar.catch_up().await;
        assert!(Instant::now() < deadline, "{:?}", planes[1].objects());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A lane whose other end takes no message is no lane, and says so in time.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_posts_no_receives_is_not_used() {
    log();
    let (_target, plane) = side(on_one_port(&[Mode::Window]), &Arc::default());
    let (out, back) = testing::connect().await;
    let posing = async {
        let mut liar = Liar::new(&out, 0).await;
        liar.say(Message::Usable(true)).await;
        while !matches!(liar.hear().await, Message::Usable(false)) {}
        liar
    };
    let both = async { tokio::join!(plane.introduce(&back, Opener::Peer), posing) };
    let (introduced, _liar) = tokio::time::timeout(PATIENCE * 2, both).await.unwrap();
    assert!(introduced.unwrap().is_none());
}

/// The same, where it had receives at first: grants wait for a lane, and their fence is not kept.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn grants_of_a_peer_that_takes_no_messages_end_in_proof() {
    let (mut target, _plane, mut liar) = met(&[Mode::Window], 16).await;
    let mut random = Random::new(45);
    target.fill(testing::spec(1, 4096, 32), &mut random);
    liar.receives = 0;
    for grant in 1..=12 {
        target.arm(grant, BACK, &[1, 3], &[]);
        // The first four have lanes.
        if grant <= 4 {
            target.wait(|event| *event == Event::Armed(grant)).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
        target.fence(grant);
        let by = target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Fence);
        liar.catch_up().await;
    }
    // It takes messages again.
    liar.receives = 16;
    target.arm(100, BACK, &[1, 3], &[]);
    let armed = tokio::time::timeout(PATIENCE, async {
        loop {
            if let Some(reach) = liar.reaches.remove(&GrantId(100)) {
                return reach;
            }
            // Lanes that carry nothing are given up in their own time; so are these.
            for number in liar.lanes.keys().copied().collect::<Vec<_>>() {
                liar.lanes[&number]
                    .queue_pair
                    .post_receives(RECEIVE, 1)
                    .unwrap_or(());
            }
            let heard = tokio::time::timeout(Duration::from_millis(50), liar.messages.recv()).await;
            if let Ok(Some(message)) = heard {
                liar.took(&message).await;
            }
        }
    });
    let (_lane, reach) = armed.await.unwrap();
    assert_eq!(reach.extents.len(), 2);
}

/// S4: a source's pins end without the help of a destination that takes no message. It has taken
/// the writes.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_destination_without_receives_holds_nothing_after_a_stop() {
    let (mut source, _plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 4096, 32);
    source.fill(spec, &mut Random::new(48));
    let lane = LaneNumber(7);
    let (_queue_pair, region) = liar.offer(lane).await;
    liar.grant(1, lane, &region).await;
    source.open(1, BACK, &[4, 9]);
    source.write(1, testing::run(0, 0, 2));
    source
        .wait(|event| matches!(event, Event::Written(1, _)))
        .await;
    source.drain(1);
    source.settle().await;
    assert_eq!(source.count(Event::ReadsStopped(1)), 0, "it waits");
    source.stop(1);
    source.wait_reads_stopped(1).await;
    assert_eq!(source.count(Event::WriterFailed(1)), 1);
}

/// S4: nor do they wait for another writer, to whom the peer has given the same lane.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_writer_that_waits_for_anothers_lane_is_over_soon_after_its_stop() {
    let (mut source, _plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 4096, 32);
    source.fill(spec, &mut Random::new(49));
    let lane = LaneNumber(7);
    let (_queue_pair, region) = liar.offer(lane).await;
    for grant in [1, 2] {
        liar.grant(grant, lane, &region).await;
        source.open(grant, BACK, &[4, 9]);
        source.write(grant, testing::run(0, 0, 2));
    }
    source
        .wait(|event| matches!(event, Event::Written(1, _)))
        .await;
    source.stop(2);
    source.wait_reads_stopped(2).await;
    assert_eq!(source.written(2), 0);
    assert_eq!(source.count(Event::ReadsStopped(1)), 0, "it has its lane");
}

/// It holds one of the places for handshakes, of which there are few.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_does_not_name_its_ports_is_given_up() {
    log();
    let (_side, plane) = side(on_one_port(&[Mode::Lane]), &Arc::default());
    let (out, back) = testing::connect().await;
    let silent = tokio::time::timeout(PATIENCE, plane.introduce(&back, Opener::Peer)).await;
    silent.expect("it ends by itself").unwrap_err();
    let (mut opened, _) = out.open_bi().await.unwrap();
    opened.write_all(&[0]).await.unwrap();
    let halting = tokio::time::timeout(PATIENCE, plane.introduce(&back, Opener::Peer)).await;
    halting.expect("it ends by itself").unwrap_err();
}

/// A peer that grants what nobody waits for is cut off before that is much.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn grants_that_nobody_takes_are_bounded() {
    let (_side, plane, mut liar) = met(&[Mode::Lane], 16).await;
    let spec = testing::spec(1, 64, 1 << 14);
    let scattered: Vec<_> = (0..8192).map(|slot| slot * 2).collect();
    let reach = Reach::plan(&spec, &scattered, &[], Cover::Slots);
    assert_eq!(reach.extents.len(), 8192);
    let mut granted = 0;
    while granted < 400 && plane.peers_refused() == 0 {
        let message = Message::Reach {
            grant: GrantId(granted),
            key: testing::key(granted),
            lanes: vec![LaneNumber(0)],
            reach: reach.clone(),
        };
        if codec::send(&mut liar.sending, &message).await.is_err() {
            break;
        }
        granted += 1;
    }
    let closed = tokio::time::timeout(PATIENCE, liar.connection.closed()).await;
    closed.expect("it is cut off, and its link ends");
    assert!((256..400).contains(&granted), "{granted}");
}

/// A peer that does not read what the plane says is cut off, and its link ends.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_does_not_listen_is_cut_off() {
    log();
    let (mut target, plane) = side(on_one_port(&[Mode::Lane]), &Arc::default());
    let connection = testing::connect_with(64 << 10).await;
    let mut liar = meet_over(connection, &plane, BACK, 16).await;
    target.fill(testing::spec(1, 64, 32), &mut Random::new(46));
    liar.is_deaf.store(true, Ordering::Relaxed);
    let mut grants = 0;
    for grant in 1..=6000 {
        target.arm(grant, BACK, &[1, 3, 5, 7], &[]);
        if ended_first(&mut target, grant).await {
            grants = grant;
            break;
        }
        // It knows of no grant, but in lane mode its word ends whatever there is.
        for lane in liar.living() {
            let mut chain = SendChain::new();
            chain.send_immediate(TRUTH, Signal::Yes, DRAIN);
            liar.post(lane, &mut chain, 1);
        }
        target.wait_writes_stopped(grant).await;
        target.log.clear();
    }
    println!("cut off at grant {grants}");
    assert!(grants > 0);
    let closed = tokio::time::timeout(PATIENCE, liar.connection.closed()).await;
    closed.expect("the link is of no use, and ends");
}

/// The link between the destination and a liar beside an honest peer.
const LIARS: LinkId = LinkId(3);

const LIAR_BYTES: u32 = 64 * 1024;

/// Sends that a liar has outstanding on a lane.
const LIES_MAX: u32 = 256;

/// Grants of the second use of a round's slots.
const NEXT: u64 = 1 << 32;

const LIAR_ROUNDS: u64 = 240;

const PATIENCE: Duration = Duration::from_secs(20);

// Ids of a liar's work requests.
const LIE: u64 = 1;
const TRUTH: u64 = 2;
const RECEIVE: u64 = 3;

const FIRST: u32 = 77;
