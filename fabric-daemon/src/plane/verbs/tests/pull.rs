//! Pull mode: the destination reads, and nobody writes.

use fabric_proto::ids::GrantId;
use tokio::sync::Semaphore;

use super::super::codec::{Exposure, LaneNumber, Message};
use super::super::extents::Reach;
use super::super::ffi::RKey;
use super::*;
use crate::plane::Pool;

async fn pull_pair() -> Pair {
    planes(&[Mode::Pull], &Arc::default()).await.0
}

/// Has a plane hear a message as if its one peer had said it.
async fn forge(plane: &VerbsPlane, message: Message) {
    let place = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
    plane.inbox.push(Order::PeerSaid {
        peer: PeerKey(0),
        message,
        place,
    });
}

fn exposure(first: u32, bytes: u32) -> Exposure {
    Exposure {
        region: 0,
        first,
        within: 0,
        bytes,
        offset: 0,
        rkey: RKey(0x0012_3456),
    }
}

/// That a peer exposes memory by a key that opens nothing.
fn exposed(grant: u64, exposures: &[Exposure]) -> Message {
    Message::Exposed {
        grant: GrantId(grant),
        exposures: exposures.to_vec(),
    }
}

fn all_exposed(grant: u64) -> Message {
    let grant = GrantId(grant);
    Message::AllExposed { grant }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn drain_delivers_exact_bytes_by_pull() {
    testing::delivers_exact_bytes(&mut pull_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn no_byte_lands_after_the_fence_by_pull() {
    // Two messages on the link come before the first read.
    let pause_max = Duration::from_millis(20);
    testing::no_byte_lands_after_a_fence_within(&mut pull_pair().await, 100, pause_max).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pages_outside_the_grant_are_not_read() {
    testing::pages_outside_the_grant_are_refused(&mut pull_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn stop_ends_a_run_in_its_midst_by_pull() {
    testing::stop_ends_a_run_in_its_midst(&mut pull_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn link_down_ends_every_writer_by_pull() {
    testing::link_down_ends_every_writer(&mut pull_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn transfer_is_pulled_again_under_a_new_grant() {
    testing::transfer_is_sent_again_under_a_new_grant(&mut pull_pair().await).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn unknown_pools_and_links_are_answered_by_pull() {
    testing::unknown_pools_and_links_are_answered(&mut pull_pair().await).await;
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn flipped_pages_arrive_flipped_by_pull() {
    let faults = Arc::default();
    let mut pair = planes(&[Mode::Pull], &faults).await.0;
    testing::flipped_pages_arrive_flipped(&mut pair, &faults).await;
}

#[cfg(feature = "fault-injection")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn stalled_exposer_is_silent_until_it_is_stopped() {
    let faults = Arc::new(Faults {
        stall_after_bytes: Some(4500),
        ..Faults::default()
    });
    let mut pair = planes(&[Mode::Pull], &faults).await.0;
    testing::stalled_writer_is_silent_until_it_is_stopped(&mut pair, 4500, StoppedBy::Drain).await;
}

/// A pair whose pools hold one value in every byte, so that it shows where bytes come from.
struct Marked {
    pair: Pair,
    from: Arc<Pool>,
    to: Arc<Pool>,
    random: Random,
}

impl Marked {
    /// Before a transfer, in the source's pool; and after its end.
    const OLD: u8 = 1;
    const NEW: u8 = 2;
    const SLOTS: u32 = 40;

    async fn new(seed: u64) -> Self {
        let pair = pull_pair().await;
        let mut random = Random::new(seed);
        let spec = testing::spec(1, 128 * 1024, Self::SLOTS);
        pair.source.fill(spec, &mut random);
        pair.target.fill(spec, &mut random);
        let pool = |side: &Side| side.pools.find(PoolId(1)).unwrap();
        let (from, to) = (pool(&pair.source), pool(&pair.target));
        Self {
            pair,
            from,
            to,
            random,
        }
    }

    fn fill(pool: &Pool, byte: u8) {
        let bytes = vec![byte; usize::try_from(pool.spec.bytes()).unwrap()];
        pool.memory.mapped().write(0, &bytes).unwrap();
    }

    /// Has a transfer of the whole pool go on for a while: until some page has begun to arrive,
    /// whose slot is returned, or, in some rounds, for any time.
    async fn begin(&mut self, grant: u64) -> u32 {
        Self::fill(&self.from, Self::OLD);
        Self::fill(&self.to, 0);
        let pair = &mut self.pair;
        pair.source.log.clear();
        pair.target.log.clear();
        let slots: Vec<u32> = (0..Self::SLOTS).collect();
        pair.target.arm(grant, BACK, &slots, &[]);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        let slots = self.random.pick(40, Self::SLOTS);
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, Self::SLOTS));
        if self.random.next().is_multiple_of(4) {
            let pause = Duration::from_micros(self.random.next() % 12_000);
            tokio::time::sleep(pause).await;
            return 0;
        }
        // Pages arrive in the order of their slots.
        let slot = u32::try_from(self.random.within(0..=30)).unwrap();
        let page = self.to.spec.page_offset(0, slot);
        let mut byte = [0];
        for _ in 0..50_000 {
            self.to.memory.mapped().read(page, &mut byte).unwrap();
            if byte == [Self::OLD] {
                return slot;
            }
            tokio::time::sleep(Duration::from_micros(50)).await;
        }
        panic!("page {slot} does not arrive");
    }
}

/// What a pool has arrived of.
fn arrived(contents: &[u8]) -> usize {
    contents.iter().filter(|byte| **byte == Marked::OLD).count()
}

/// As the test that all planes share, whose pauses are shorter than what comes before the first
/// read takes. S1.
///
/// What these fences meet is reads that are still to be posted, rather than reads that are under
/// way: soft-RoCE within one host seems to carry out what is posted within the call that posts it.
/// (Measured: with all 20 MiB of a pool outstanding, each of 100 fences found all of it arrived.)
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn no_byte_lands_after_a_fence_in_the_midst_of_reads() {
    let mut marked = Marked::new(42).await;
    let next = vec![Marked::NEW; 128 * 1024];
    let mut in_midst = 0;
    for grant in 1..=100 {
        let slot = marked.begin(grant).await;
        let pair = &mut marked.pair;
        pair.target.fence(grant);
        pair.target.wait_writes_stopped(grant).await;
        // As the slots' next owner would, and first where bytes were landing.
        let slots = (slot..Marked::SLOTS).chain(0..slot);
        let mut pages = 0;
        for slot in slots {
            let page = marked.to.spec.page_offset(0, slot);
            let mut byte = [0];
            marked.to.memory.mapped().read(page, &mut byte).unwrap();
            pages += usize::from(byte == [Marked::OLD]);
            marked.to.memory.mapped().write(page, &next).unwrap();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        pair.source.stop(grant);
        pair.source.wait_reads_stopped(grant).await;
        let contents = pair.target.contents();
        assert_eq!(arrived(&contents), 0, "bytes after the fence: {grant}");
        in_midst += usize::from((1..Marked::SLOTS as usize).contains(&pages));
    }
    println!("{in_midst} in the midst");
    assert!(in_midst > 10, "{in_midst}");
}

/// However a transfer ends: nothing that is written to the source's pool after the proof reaches
/// the destination. S2.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn nothing_is_read_from_the_source_after_its_proof() {
    let mut marked = Marked::new(41).await;
    let (mut some, mut all) = (0, 0);
    for grant in 1..=120 {
        marked.begin(grant).await;
        let pair = &mut marked.pair;
        match grant % 4 {
            0 => pair.source.drain(grant),
            1 => pair.source.stop(grant),
            // The writer fails: it is no page of the transfer.
            2 => pair.source.write(grant, testing::run(0, Marked::SLOTS, 1)),
            _ => pair.target.fence(grant),
        }
        pair.source.wait_reads_stopped(grant).await;
        Marked::fill(&marked.from, Marked::NEW);
        pair.target.fence(grant);
        pair.target.wait_writes_stopped(grant).await;
        let contents = pair.target.contents();
        assert!(
            !contents.contains(&Marked::NEW),
            "read after the proof: {grant}"
        );
        some += usize::from((1..contents.len()).contains(&arrived(&contents)));
        all += usize::from(arrived(&contents) == contents.len());
    }
    println!("{some} in part, {all} as a whole");
    assert!(some > 0, "some were cut off while they read");
    assert!(all > 0, "some were complete");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn more_pulls_than_lanes_wait_for_their_turn() {
    grants_wait_for_lanes(&mut pull_pair().await).await;
}

/// A lane that breaks, at either end, takes its grant along, and no other: what is drained has
/// arrived as a whole, what is fenced changes no more, and nothing changes outside. S1, S2, S7.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_pull_whose_lane_breaks_is_fenced_and_the_next_has_another() {
    let settings = on_one_port(&[Mode::Pull]);
    let (mut pair, planes) = planes_with(settings, &Arc::default()).await;
    let mut random = Random::new(49);
    let spec = testing::spec(2, 32 << 10, 32);
    let (source, mut shadow) = pair.fill(spec, &mut random);
    let (mut drained, mut fenced) = (0, 0);
    for grant in 1..=80 {
        let (from, to) = (random.pick(16, 32), random.pick(16, 32));
        pair.begin(grant, &from, &to).await;
        let mut whole = shadow.clone();
        for region in [0, 1, 0, 1] {
            let run = testing::run(region, 0, 16);
            pair.source.write(grant, run);
            testing::copy(&spec, &source, &mut whole, &from, &to, run);
        }
        tokio::time::sleep(Duration::from_micros(random.next() % 40_000)).await;
        let turn = random.within(0..=1000);
        let plane = &planes[random.within(0..=1)];
        plane.inbox.push(Order::Break { turn });
        pair.source.drain(grant);
        let by = pair.target.wait_writes_stopped(grant).await;
        let at_proof = pair.target.contents();
        pair.source.wait_reads_stopped(grant).await;
        assert!(pair.target.contents() == at_proof, "a byte after the proof");
        if by == StoppedBy::Drain {
            drained += 1;
            assert!(at_proof == whole, "{grant}: every byte of the pool");
        } else {
            fenced += 1;
            legs::assert_outside_unchanged(&spec, &shadow, &at_proof, &to);
        }
        shadow = at_proof;
    }
    pair.finish(1..=80).await;
    println!("{drained} drained, {fenced} fenced");
    assert!(fenced > 10, "{fenced}");
    assert_eq!(planes[1].failovers(), 0, "there is none in this mode");
}

/// No window, region or queue pair is left behind by transfers, however they end.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_thousand_pulls_leave_no_object_behind() {
    let settings = on_one_port(&[Mode::Pull]);
    let (mut pair, planes) = planes_with(settings, &Arc::default()).await;
    let mut random = Random::new(43);
    let spec = testing::spec(1, 256, 64);
    pair.source.fill(spec, &mut random);
    pair.target.fill(spec, &mut random);
    let objects = |planes: &[Arc<VerbsPlane>; 2]| planes.each_ref().map(|plane| plane.objects());
    let mut after_warm_up = None;
    for grant in 1..=1001 {
        // What is counted is what three windows leave: the last lane may have taken its own along.
        let is_counted = [201, 1001].contains(&grant);
        let slots = if is_counted {
            vec![0, 2, 4]
        } else {
            random.pick(3, 64)
        };
        pair.target.arm(grant, BACK, &slots, &[]);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        pair.source.open(grant, OUT, &slots);
        pair.source.write(grant, testing::run(0, 0, 3));
        match grant % 40 {
            0 => {
                pair.target.fence(grant);
                pair.source.stop(grant);
            }
            20 => pair.source.stop(grant),
            30 => pair.source.write(grant, testing::run(0, 3, 1)),
            _ => pair.source.drain(grant),
        }
        pair.source.wait_reads_stopped(grant).await;
        if grant % 10 == 0 {
            // One that was stopped before it knew of the lane has drained nothing.
            pair.target.fence(grant);
        }
        let by = pair.target.wait_writes_stopped(grant).await;
        assert!(grant % 10 == 0 || by == StoppedBy::Drain, "{grant}");
        pair.source.log.clear();
        pair.target.log.clear();
        if is_counted {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let now = objects(&planes);
            assert_eq!(*after_warm_up.get_or_insert(now), now);
        }
    }
}

/// What a source says that is not so changes no byte outside the grant, and ends the grant.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_source_that_lies_about_what_it_exposes_is_refused() {
    let (mut pair, [_, there]) = planes(&[Mode::Pull], &Arc::default()).await;
    let mut random = Random::new(44);
    let spec = testing::spec(1, 1000, 16);
    pair.source.fill(spec, &mut random);
    let before = pair.target.fill(spec, &mut random);
    let slots = [3, 4, 5, 6];
    let named = [testing::run(0, 0, 3)];
    let within = |within, bytes| Exposure {
        within,
        bytes,
        ..exposure(0, 0)
    };
    let region = Exposure {
        region: 1,
        ..exposure(0, 1000)
    };
    let lies = [
        vec![exposed(1, &[exposure(3, 1000)])],
        vec![exposed(2, &[exposure(4, 1)])],
        vec![exposed(3, &[exposure(u32::MAX, u32::MAX)])],
        vec![exposed(4, &[exposure(0, 3001)])],
        vec![exposed(5, &[within(1000, 1)])],
        vec![exposed(6, &[within(999, 2002)])],
        vec![exposed(7, &[region])],
        // A page of the grant, by a key that opens nothing.
        vec![exposed(8, &[exposure(0, 1000)])],
        vec![
            exposed(9, &[exposure(0, 1000)]),
            all_exposed(9),
            exposed(9, &[exposure(1, 1000)]),
        ],
        vec![
            exposed(10, &[exposure(0, 1000)]),
            all_exposed(10),
            all_exposed(10),
        ],
        vec![exposed(11, &[exposure(0, 1000); 32]); 33],
    ];
    for (grant, messages) in (1..).zip(lies) {
        pair.target.arm(grant, BACK, &slots, &named);
        pair.target
            .wait(|event| *event == Event::Armed(grant))
            .await;
        for message in messages {
            forge(&there, message).await;
        }
        let by = pair.target.wait_writes_stopped(grant).await;
        assert_eq!(by, StoppedBy::Fence, "{grant}");
        assert!(pair.target.contents() == before, "{grant}");
    }
    // The first seven are refused by what they say. For the others it may be the key that fails
    // them first. The count is told once a second.
    for _ in 0..50 {
        if there.peers_refused() < 7 {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    assert!((7..=10).contains(&there.peers_refused()));
}

/// Nothing is read after it, and what says otherwise later is for a grant that is closed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_source_that_says_too_early_that_this_was_all_changes_no_byte() {
    let (mut pair, [_, there]) = planes(&[Mode::Pull], &Arc::default()).await;
    let mut random = Random::new(48);
    let spec = testing::spec(1, 1000, 16);
    pair.source.fill(spec, &mut random);
    let before = pair.target.fill(spec, &mut random);
    let slots = [3, 4, 5, 6];
    let named = [testing::run(0, 0, 3)];
    pair.target.arm(20, BACK, &slots, &named);
    pair.target.wait(|event| *event == Event::Armed(20)).await;
    forge(&there, all_exposed(20)).await;
    let by = pair.target.wait_writes_stopped(20).await;
    assert_eq!(by, StoppedBy::Drain);
    // For grants that are closed, or never were.
    forge(&there, exposed(20, &[exposure(0, 1000)])).await;
    forge(&there, all_exposed(20)).await;
    forge(&there, exposed(99, &[exposure(0, 1000)])).await;
    assert!(pair.target.contents() == before);
    // The link is as good as before.
    pair.source.open(21, OUT, &slots);
    pair.source.write(21, testing::run(0, 0, 4));
    pair.target.arm(21, BACK, &slots, &[]);
    pair.source.drain(21);
    let by = pair.target.wait_writes_stopped(21).await;
    assert_eq!(by, StoppedBy::Drain);
    pair.source.wait_reads_stopped(21).await;
    assert_eq!(pair.source.written(21), 4000);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_peer_that_exposes_for_a_grant_by_window_is_cut_off() {
    let (mut pair, [_, there]) = planes(&[Mode::Window], &Arc::default()).await;
    let mut random = Random::new(45);
    let spec = testing::spec(1, 1000, 16);
    let before = pair.target.fill(spec, &mut random);
    pair.target.arm(1, BACK, &[0, 1], &[]);
    pair.target.wait(|event| *event == Event::Armed(1)).await;
    forge(&there, exposed(1, &[exposure(0, 1000)])).await;
    assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
    assert!(pair.target.contents() == before);
    // S4: and it stays so.
    pair.target.arm(2, BACK, &[0, 1], &[]);
    assert_eq!(pair.target.wait_writes_stopped(2).await, StoppedBy::Fence);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn pull_is_passed_over_where_the_source_does_not_allow_it() {
    let faults = Arc::default();
    for modes in [&[Mode::Pull, Mode::Window][..], &[Mode::Pull]] {
        let settings = [&[Mode::Window], modes].map(on_one_port);
        let (mut pair, [here, _]) = planes_of(settings, &faults).await;
        let mut random = Random::new(46);
        let spec = testing::spec(1, 1000, 16);
        let source = pair.source.fill(spec, &mut random);
        pair.target.fill(spec, &mut random);
        pair.target.arm(1, BACK, &[0, 1], &[]);
        if modes.len() == 1 {
            assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Fence);
            assert_eq!(pair.target.count(Event::Armed(1)), 0);
            // And where the peer asks for it all the same.
            forge(&here, reach_by_pull(1)).await;
            pair.source.open(1, OUT, &[0, 1]);
            pair.source.write(1, testing::run(0, 0, 2));
            pair.source.wait_reads_stopped(1).await;
            assert_eq!(pair.source.count(Event::WriterFailed(1)), 1);
            assert_eq!(pair.source.written(1), 0);
            continue;
        }
        pair.source.open(1, OUT, &[0, 1]);
        pair.source.write(1, testing::run(0, 0, 2));
        pair.source.drain(1);
        assert_eq!(pair.target.wait_writes_stopped(1).await, StoppedBy::Drain);
        assert!(pair.target.contents()[..2000] == source[..2000]);
    }
}

/// That a peer's grant is to be read by itself.
fn reach_by_pull(grant: u64) -> Message {
    Message::Reach {
        grant: GrantId(grant),
        key: testing::key(grant),
        lanes: vec![LaneNumber(0)],
        reach: Reach::pull(&testing::spec(1, 1000, 16)),
    }
}

/// A source's pins end without the help of a destination that does not read. S4.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_destination_that_does_not_read_holds_nothing_after_a_stop() {
    let settings = on_one_port(&[Mode::Pull]);
    let (mut pair, [here, _]) = planes_with(settings, &Arc::default()).await;
    let mut random = Random::new(47);
    let spec = testing::spec(1, 1000, 16);
    pair.source.fill(spec, &mut random);
    pair.target.fill(spec, &mut random);
    // Its plane knows of no such grant, and takes what is exposed for one that is closed.
    forge(&here, reach_by_pull(1)).await;
    pair.source.open(1, OUT, &[0, 1]);
    pair.source.write(1, testing::run(0, 0, 2));
    pair.source.drain(1);
    pair.source.settle().await;
    assert!(pair.source.log.is_empty(), "it is being read");
    pair.source.stop(1);
    pair.source.wait_reads_stopped(1).await;
    assert_eq!(pair.source.count(Event::WriterFailed(1)), 1);
    assert_eq!(pair.source.written(1), 0);
}
