//! The probe at start-up: what a port has to be seen to do before grants are given through it.
//!
//! ```text
//!   scratch memory ◀── owner ══ this host's port ══ writer ◀── scratch memory
//!                        │
//!                        └── windows and the fence, as grants will have them
//! ```
//!
//! Two queue pairs of this process are connected to each other through the port. What the proofs of
//! grants rest on is tried on them:
//!
//! 1. Window mode: windows can be bound, and open what they should. A message with invalidation is
//!    told as one, no other message is, and from then on the key opens nothing. No key opens
//!    anything to another queue pair, and the region's own key opens nothing at all.
//! 2. Pull mode: the same, of windows that are for reads: the writer of the picture reads what the
//!    owner sends. None of them opens anything to a write.
//! 3. Each mode: the fence, which is the very function that fences lanes, ends the writes of a
//!    writer in full flow. What the memory holds when it returns is what it holds ever after.
//! 4. Pull mode: so does the fence of who reads. That of an owner ends what can be read: what its
//!    memory holds from then on reaches nobody.
//!
//! What a port does not prove it is not used for. Each step has a time limit, so a device that does
//! not answer has failed. All ports are tried at once. Its own pauses are a sixth of a second for
//! each mode; soft-RoCE in an emulated host takes 0.5 to 3.3 s for both (measured).

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fabric_ipc::{Mapping, MappingError, MemoryError, create_sealed};
use fabric_proto::ids::Tag;
use fabric_proto::pool::{Arrangement, Layout, PoolSpec};
use tracing::warn;

use super::Mode;
use super::ffi::{
    Access, Capacity, CompletionChannel, CompletionQueue, Completions, Local, MemoryRegion,
    MemoryWindow, Opcode, ProtectionDomain, QueuePair, RKey, Remote, SendChain, Signal, Status,
    VerbsError, WorkCompletion,
};
use super::lanes::{self, fill_random, first_packet};
use super::rails::{Rail, Rights};
use crate::plane::pools::{Memory, Pool};

/// What the probe leaves.
#[derive(Debug)]
pub(super) struct Proven {
    /// The ports to use: each has proven every one of `modes`.
    pub(super) rails: Vec<Rail>,
    /// The preferred first.
    pub(super) modes: Vec<Mode>,
    /// What failed: where, and why.
    pub(super) refused: Vec<String>,
}

/// Tries `wanted` modes on each of the ports.
///
/// The modes that are left are the plane's, not each port's: how a grant is given is decided before
/// it is known through which port. Where ports differ, those that lack the most preferred mode that
/// any has proven are not used: a device that is worse than its neighbours costs bandwidth, and
/// never makes the grants of the others laxer.
pub(super) fn prove(rails: Vec<Rail>, wanted: &[Mode]) -> Proven {
    let mut refused = Vec::new();
    let mut tried = Vec::new();
    for (rail, outcomes) in try_all(rails, wanted) {
        let mut modes = Vec::new();
        for (mode, outcome) in outcomes {
            let Err(why) = outcome else {
                modes.push(mode);
                continue;
            };
            let (device, port, mode) = (rail.device(), rail.port, name(mode));
            warn!(device, port, mode, "a mode is not used: {why}");
            refused.push(format!("{device} port {port}, {mode}: {why}"));
        }
        tried.push((rail, modes));
    }
    let (mut rails, spare, modes) = agree(tried, wanted);
    for rail in spare {
        let (device, port) = (rail.device(), rail.port);
        warn!(device, port, "a port is not used: see its modes");
    }
    for rail in &mut rails {
        rail.allow(&modes);
    }
    Proven {
        rails,
        modes,
        refused,
    }
}

type Outcomes = Vec<(Mode, Result<(), Refusal>)>;

/// All at once: hosts have up to a dozen ports, and the probe mostly waits.
fn try_all(rails: Vec<Rail>, wanted: &[Mode]) -> Vec<(Rail, Outcomes)> {
    thread::scope(|scope| {
        let tries = rails.into_iter().map(|rail| {
            scope.spawn(move || {
                let outcomes = wanted.iter().map(|mode| (*mode, try_mode(&rail, *mode)));
                let outcomes = outcomes.collect();
                (rail, outcomes)
            })
        });
        // Each is started before the first is waited for.
        let tries: Vec<_> = tries.collect();
        let ended = tries.into_iter().map(thread::ScopedJoinHandle::join);
        ended
            .map(|ended| ended.expect("the probe does not panic"))
            .collect()
    })
}

/// Which ports to use, which not, and in which modes: see [`prove`].
fn agree<T>(tried: Vec<(T, Vec<Mode>)>, wanted: &[Mode]) -> (Vec<T>, Vec<T>, Vec<Mode>) {
    let has_any = |mode: &&Mode| tried.iter().any(|(_, modes)| modes.contains(mode));
    let best = wanted.iter().find(has_any).copied();
    let (used, spare): (Vec<_>, Vec<_>) = tried
        .into_iter()
        .partition(|(_, modes)| best.is_some_and(|best| modes.contains(&best)));
    let has_all = |mode: &&Mode| used.iter().all(|(_, modes)| modes.contains(mode));
    let modes = wanted.iter().filter(|_| best.is_some()).filter(has_all);
    let modes = modes.copied().collect();
    let only = |ports: Vec<(T, Vec<Mode>)>| ports.into_iter().map(|(port, _)| port).collect();
    (only(used), only(spare), modes)
}

fn name(mode: Mode) -> &'static str {
    match mode {
        Mode::Lane => "lane",
        Mode::Pull => "pull",
        Mode::Window => "window",
    }
}

fn try_mode(rail: &Rail, mode: Mode) -> Result<(), Refusal> {
    let bench = Bench::new(rail, mode).map_err(at(Step::Prepare))?;
    match mode {
        Mode::Lane => bench.try_region()?,
        Mode::Pull => {
            bench.try_windows()?;
            bench
                .try_fence_of_reads(&mut lanes::fence)
                .map_err(at(Step::FenceOfReads))?;
        }
        Mode::Window => bench.try_windows()?,
    }
    bench.try_fence(&mut lanes::fence).map_err(at(Step::Fence))
}

/// Why a mode is refused.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {fault}")]
struct Refusal {
    step: Step,
    fault: Fault,
}

fn at(step: Step) -> impl FnOnce(Fault) -> Refusal {
    move |fault| Refusal { step, fault }
}

/// What was tried.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    Bind,
    BindAgain,
    Fence,
    FenceOfReads,
    Invalidate,
    Message,
    OldKey,
    OtherLane,
    OtherUse,
    PoolKey,
    Prepare,
    Settle,
    Use,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bind => "bind a memory window",
            Self::BindAgain => "bind a memory window that was invalidated",
            Self::Fence => "fence a peer",
            Self::FenceOfReads => "fence reads",
            Self::Invalidate => "invalidate a memory window by a message",
            Self::Message => "send a message that invalidates nothing",
            Self::OldKey => "refuse a key after its invalidation",
            Self::OtherLane => "refuse a key through another queue pair",
            Self::OtherUse => "refuse a write with a key for reads",
            Self::PoolKey => "refuse the pool's own key",
            Self::Prepare => "connect two queue pairs",
            Self::Settle => "keep the memory as it was",
            Self::Use => "write or read what a key opens",
        })
    }
}

/// What the device did.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("it was done, and must be refused")]
    Accepted,
    #[error("bytes changed that must not")]
    Changed,
    #[error("it took {0:?}")]
    Late(Duration),
    #[error("scratch memory: {0}")]
    Mapping(#[from] MappingError),
    #[error("scratch memory: {0}")]
    Memory(#[from] MemoryError),
    #[error("the bytes did not arrive")]
    Missing,
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("{0}")]
    Status(Status),
    #[error("a completion says {got:?}, and should say {want:?}")]
    Told { got: Opcode, want: Opcode },
    #[error("{0}")]
    Verbs(#[from] VerbsError),
}

/// How a lane is fenced: [`lanes::fence`], but in tests.
type Fence<'a> = &'a mut dyn FnMut(QueuePair, Vec<MemoryWindow>) -> Result<(), VerbsError>;

/// A port, and scratch memory that its device knows.
///
/// The memory starts with what writers send, or readers read; then come areas that it is to get to.
struct Bench<'a> {
    rail: &'a Rail,
    mode: Mode,
    rights: Rights,
    domain: Arc<ProtectionDomain>,
    channel: Arc<CompletionChannel>,
    memory: Arc<Pool>,
    region: MemoryRegion,
    /// What writers send, or readers read.
    sent: Vec<u8>,
    /// For each step.
    time_limit: Duration,
}

impl<'a> Bench<'a> {
    fn new(rail: &'a Rail, mode: Mode) -> Result<Self, Fault> {
        Self::with(rail, mode, Rights::new(&[mode]))
    }

    fn with(rail: &'a Rail, mode: Mode, rights: Rights) -> Result<Self, Fault> {
        let memory = Arc::new(scratch()?);
        let mut sent = vec![0; index(SENT_BYTES)];
        // Random, so that no two writes bring the same bytes to the same place.
        fill_random(&mut sent)?;
        memory.memory.mapped().write(0, &sent)?;
        let context = rail.domain.context();
        let domain = ProtectionDomain::new(context)?;
        Ok(Self {
            rail,
            mode,
            rights,
            region: MemoryRegion::register(&domain, &memory, rights.region)?,
            channel: CompletionChannel::new(context)?,
            domain,
            memory,
            sent,
            time_limit: TIME_LIMIT,
        })
    }

    /// Two queue pairs that are connected to each other.
    fn pair(&self) -> Result<Pair, Fault> {
        let end = |access, capacity| -> Result<(End, u32), Fault> {
            let completions = CompletionQueue::new(&self.channel, capacity_of(&capacity))?;
            let queue_pair = QueuePair::new(&self.domain, &completions, capacity)?;
            queue_pair.initialise(self.rail.port, access)?;
            let end = End {
                queue_pair,
                completions,
                taken: VecDeque::new(),
                outstanding: 0,
                time_limit: self.time_limit,
            };
            Ok((end, first_packet()?))
        };
        let (owners, writers) = match self.mode {
            Mode::Lane | Mode::Window => (self.rights.granting, self.rights.exposing),
            Mode::Pull => (self.rights.exposing, self.rights.granting),
        };
        let capacity = |sends, receives| Capacity { sends, receives };
        let (owner, owners_first) = end(owners, capacity(1, MESSAGES))?;
        let (writer, writers_first) = end(writers, capacity(WRITES, 1))?;
        owner.queue_pair.post_receives(RECEIVE, MESSAGES)?;
        let (owners, writers) = (owner.queue_pair.number(), writer.queue_pair.number());
        // From the port to itself.
        let route = |theirs, our_first| self.rail.route(self.rail.address, theirs, our_first);
        let to_writer = route((writers, writers_first), owners_first);
        owner.queue_pair.connect(&to_writer)?;
        let to_owner = route((owners, owners_first), writers_first);
        writer.queue_pair.connect(&to_owner)?;
        Ok(Pair { writer, owner })
    }

    /// Binds a window to an area, or to all that may be read.
    fn bind(&self, owner: &mut End, window: &mut MemoryWindow, area: u64) -> Result<RKey, Fault> {
        let rkey = window.take_key().expect("it was bound twice at most");
        let ((from, bytes), access) = match self.mode {
            Mode::Lane | Mode::Window => ((area, AREA_BYTES), Access::REMOTE_WRITE),
            Mode::Pull => ((0, SENT_BYTES), Access::REMOTE_READ),
        };
        let mut chain = SendChain::new();
        chain.bind(
            BIND,
            Signal::Yes,
            (window, rkey),
            (&self.region, from, bytes),
            access,
        );
        chain.post(&owner.queue_pair)?;
        window.bound_under(rkey);
        owner.told(Opcode::Bind)?;
        Ok(rkey)
    }

    fn target(&self, offset: u64, rkey: RKey) -> Target {
        Target {
            offset,
            rkey,
            lkey: self.region.lkey(),
            is_read: self.mode == Mode::Pull,
        }
    }

    /// One write, or read: from `from` in what is sent to the start of an area.
    fn post(&self, writer: &mut End, from: u64, to: Target) -> Result<(), Fault> {
        let mut chain = SendChain::new();
        to.add(&mut chain, from, SHORT_BYTES);
        Ok(chain.post(&writer.queue_pair)?)
    }

    /// One that must be done, and arrive.
    fn lands(&self, pair: &mut Pair, from: u64, area: u64, rkey: RKey) -> Result<(), Fault> {
        let target = self.target(area, rkey);
        self.post(&mut pair.writer, from, target)?;
        let done = if target.is_read {
            Opcode::Read
        } else {
            Opcode::Write
        };
        pair.writer.told(done)?;
        let want = &self.sent[index(from)..][..SHORT_BYTES as usize];
        // M: an acknowledgement does not say that the bytes can be seen here yet.
        let deadline = Instant::now() + self.time_limit;
        while self.bytes(area, SHORT_BYTES.into())? != want {
            if Instant::now() >= deadline {
                return Err(Fault::Missing);
            }
            thread::yield_now();
        }
        Ok(())
    }

    /// One that must be refused, by the device that it asks.
    fn refused(&self, pair: &mut Pair, from: u64, area: u64, rkey: RKey) -> Result<(), Fault> {
        self.refuses(pair, from, self.target(area, rkey))
    }

    fn refuses(&self, pair: &mut Pair, from: u64, target: Target) -> Result<(), Fault> {
        let before = self.bytes(0, MEMORY_BYTES)?;
        self.post(&mut pair.writer, from, target)?;
        match pair.writer.next()?.result {
            Ok(_) => return Err(Fault::Accepted),
            // Nobody was asked.
            Err(status @ (Status::FLUSHED | Status::RETRIES_EXCEEDED)) => {
                return Err(Fault::Status(status));
            }
            Err(_) => {}
        }
        if self.bytes(0, MEMORY_BYTES)? != before {
            return Err(Fault::Changed);
        }
        Ok(())
    }

    /// What lane mode rests on, but for the fence.
    fn try_region(&self) -> Result<(), Refusal> {
        let mut pair = self.pair().map_err(at(Step::Prepare))?;
        self.lands(&mut pair, 64, area(0), self.region.rkey())
            .map_err(at(Step::Use))?;
        pair.messages().map_err(at(Step::Message))
    }

    /// What window and pull mode rest on, but for the fence.
    fn try_windows(&self) -> Result<(), Refusal> {
        let (first, second) = (area(0), area(1));
        // S7: windows are all that opens a pool.
        let mut pair = self.pair().map_err(at(Step::Prepare))?;
        self.refused(&mut pair, 0, first, self.region.rkey())
            .map_err(at(Step::PoolKey))?;

        let mut pair = self.pair().map_err(at(Step::Prepare))?;
        // Declared after its queue pair, so that it is destroyed before.
        let made = MemoryWindow::new(&self.domain).map_err(Fault::from);
        let mut window = made.map_err(at(Step::Bind))?;
        let rkey = self.bind(&mut pair.owner, &mut window, first);
        let rkey = rkey.map_err(at(Step::Bind))?;
        self.lands(&mut pair, 64, first, rkey)
            .map_err(at(Step::Use))?;
        pair.messages().map_err(at(Step::Message))?;
        self.lands(&mut pair, 128, first, rkey)
            .map_err(at(Step::Message))?;
        // S7: not with the key either, but through its own queue pair.
        let mut other = self.pair().map_err(at(Step::Prepare))?;
        self.refused(&mut other, 192, first, rkey)
            .map_err(at(Step::OtherLane))?;
        // S1: a drain is this message, and its proof is that the key is void.
        pair.invalidate(rkey).map_err(at(Step::Invalidate))?;
        self.refused(&mut pair, 256, first, rkey)
            .map_err(at(Step::OldKey))?;

        let mut pair = self.pair().map_err(at(Step::Prepare))?;
        let new_rkey = self.bind(&mut pair.owner, &mut window, second);
        let new_rkey = new_rkey.map_err(at(Step::BindAgain))?;
        self.lands(&mut pair, 320, second, new_rkey)
            .map_err(at(Step::BindAgain))?;
        // S6: the key that it had before.
        self.refused(&mut pair, 384, second, rkey)
            .map_err(at(Step::OldKey))?;
        drop(window);
        if self.mode == Mode::Pull {
            self.try_to_write().map_err(at(Step::OtherUse))?;
        }

        thread::sleep(SETTLE);
        self.settled(&[(first, 128), (second, 320)])
            .map_err(at(Step::Settle))
    }

    /// Tries to write through a window that is for reads.
    // S7: a peer that may read what it is sent can not change it.
    fn try_to_write(&self) -> Result<(), Fault> {
        let mut pair = self.pair()?;
        let mut window = MemoryWindow::new(&self.domain)?;
        let rkey = self.bind(&mut pair.owner, &mut window, 0)?;
        let target = Target {
            is_read: false,
            ..self.target(SHORT_BYTES.into(), rkey)
        };
        self.refuses(&mut pair, 0, target)
    }

    /// Checks that the areas, and all after them, hold what was sent from there, and nothing else.
    fn settled(&self, areas: &[(u64, u64)]) -> Result<(), Fault> {
        let mut want = vec![0; index(MEMORY_BYTES)];
        want[..self.sent.len()].copy_from_slice(&self.sent);
        for (area, from) in areas {
            let sent = &self.sent[index(*from)..][..SHORT_BYTES as usize];
            want[index(*area)..][..sent.len()].copy_from_slice(sent);
        }
        if self.bytes(0, MEMORY_BYTES)? != want {
            return Err(Fault::Changed);
        }
        Ok(())
    }

    /// Fences the owners of writers, or readers, in full flow, each in an area of its own. Their
    /// ends are kept, so each of them goes on trying until the last has been fenced.
    fn try_fence(&self, fence: Fence<'_>) -> Result<(), Fault> {
        if self.mode == Mode::Pull {
            self.memory
                .memory
                .mapped()
                .write(0, &vec![0; index(MEMORY_BYTES)])?;
            self.stamp(0)?;
        }
        let mut rounds = Vec::new();
        for number in 0..ROUNDS {
            let (writer, at_fence) = self.fence_one(fence, number)?;
            rounds.push((number, writer, at_fence));
        }
        thread::sleep(SETTLE);
        self.unchanged(&rounds)?;
        for (_, writer, _) in &mut rounds {
            writer.queue_pair.stop()?;
            writer.finish()?;
        }
        self.unchanged(&rounds)
    }

    /// Checks that every area is what it was when its fence had returned. What was read may have
    /// been under way then: such an area has nothing that was sent after.
    fn unchanged(&self, rounds: &[(u64, End, Vec<u8>)]) -> Result<(), Fault> {
        for (number, _, at_fence) in rounds {
            let now = self.bytes(area(*number), AREA_BYTES)?;
            let is_fenced = match self.mode {
                // S1: not a byte.
                Mode::Lane | Mode::Window => now == *at_fence,
                // S2: as above.
                Mode::Pull => now.iter().all(|byte| *byte <= stamp(*number)),
            };
            if !is_fenced {
                return Err(Fault::Changed);
            }
        }
        Ok(())
    }

    /// From now on that is what can be read, so that it shows when it was.
    fn stamp(&self, number: u64) -> Result<(), Fault> {
        let stamped = vec![stamp(number); index(SENT_BYTES)];
        Ok(self.memory.memory.mapped().write(0, &stamped)?)
    }

    /// One writer, and what its area holds after the fence.
    fn fence_one(&self, fence: Fence<'_>, number: u64) -> Result<(End, Vec<u8>), Fault> {
        let Pair {
            mut writer,
            mut owner,
        } = self.pair()?;
        let area = area(number);
        let mut windows = Vec::new();
        let rkey = match self.mode {
            Mode::Lane => self.region.rkey(),
            Mode::Pull | Mode::Window => {
                let mut window = MemoryWindow::new(&self.domain)?;
                let rkey = self.bind(&mut owner, &mut window, area)?;
                windows.push(window);
                rkey
            }
        };
        let target = self.target(area, rkey);
        let flow = Flow::default();
        // By a thread of its own: soft-RoCE sends within the call that posts.
        let (wrote, at_fence) = thread::scope(|scope| {
            let writing = scope.spawn(|| writer.write_on(target, &flow));
            let at_fence = self.fence_flow(&flow, number, || fence(owner.queue_pair, windows));
            flow.say(Flow::END);
            (writing.join().expect("the writer does not panic"), at_fence)
        });
        wrote?;
        Ok((writer, at_fence?))
    }

    /// Fences who reads, with many reads outstanding, each in an area of its own.
    fn try_fence_of_reads(&self, fence: Fence<'_>) -> Result<(), Fault> {
        let mut rounds = Vec::new();
        for number in 0..READ_ROUNDS {
            let Pair {
                writer: mut reader,
                mut owner,
            } = self.pair()?;
            // Declared after its queue pair, and kept before it.
            let mut window = MemoryWindow::new(&self.domain)?;
            let target = self.target(area(number), self.bind(&mut owner, &mut window, 0)?);
            let (mut chain, mut count) = (SendChain::new(), 0);
            while count < READS && reader.post_some(&mut chain, target, &mut count)? {}
            fence(reader.queue_pair, Vec::new())?;
            let at_fence = self.bytes(area(number), AREA_BYTES)?;
            rounds.push((at_fence, window, owner));
        }
        thread::sleep(SETTLE);
        for (number, (at_fence, ..)) in (0..).zip(&rounds) {
            // S1: not a byte.
            if self.bytes(area(number), AREA_BYTES)? != *at_fence {
                return Err(Fault::Changed);
            }
        }
        Ok(())
    }

    /// Fences a writer as soon as it is in flow: in its first writes, or in those that follow its
    /// first acknowledgement. What its area holds then.
    fn fence_flow(
        &self,
        flow: &Flow,
        number: u64,
        fence: impl FnOnce() -> Result<(), VerbsError>,
    ) -> Result<Vec<u8>, Fault> {
        let want = if number.is_multiple_of(2) {
            Flow::ACKNOWLEDGED
        } else {
            Flow::POSTING
        };
        let deadline = Instant::now() + self.time_limit;
        while flow.state() < want {
            if Instant::now() >= deadline {
                return Err(Fault::Silent(self.time_limit));
            }
            thread::yield_now();
        }
        thread::sleep(PAUSE_STEP * u32::try_from(number).expect("rounds are few"));
        let began = Instant::now();
        fence()?;
        let took = began.elapsed();
        if took > self.time_limit {
            return Err(Fault::Late(took));
        }
        if self.mode == Mode::Pull {
            self.stamp(number + 1)?;
            thread::sleep(READ_ON);
        }
        self.bytes(area(number), AREA_BYTES)
    }

    fn bytes(&self, offset: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        let mut target = vec![0; index(bytes)];
        self.memory.memory.mapped().read(offset, &mut target)?;
        Ok(target)
    }
}

/// Memory of this process alone.
fn scratch() -> Result<Pool, Fault> {
    let fd = create_sealed("fabric-probe", MEMORY_BYTES)?;
    let memory = Mapping::read_write(&fd, MEMORY_BYTES)?;
    let layout = Layout {
        model: Tag([0; 32]),
        regions: 1,
        page_bytes: LONG_BYTES,
        tokens_per_slot: 1,
    };
    // Nobody looks at it: a pool is what regions are made from.
    let spec = PoolSpec {
        layout,
        slots: 1,
        arrangement: Arrangement::RegionMajor,
        context_tokens: 1,
    };
    let memory = Memory::Host(memory);
    Ok(Pool { spec, memory, fd })
}

/// Where a writer writes, and from what; or where a reader reads to.
#[derive(Clone, Copy)]
struct Target {
    offset: u64,
    rkey: RKey,
    lkey: u32,
    is_read: bool,
}

impl Target {
    fn add(self, chain: &mut SendChain, from: u64, bytes: u32) {
        let Self { rkey, lkey, .. } = self;
        let (here, there) = if self.is_read {
            (self.offset, from)
        } else {
            (from, self.offset)
        };
        let local = Local {
            offset: here,
            bytes,
            lkey,
        };
        let remote = Remote {
            offset: there,
            rkey,
        };
        if self.is_read {
            chain.read(WRITE, Signal::Yes, local, remote);
        } else {
            chain.write(WRITE, Signal::Yes, local, remote);
        }
    }
}

/// How far a writer is, and when it is to end.
#[derive(Debug, Default)]
struct Flow(AtomicU8);

impl Flow {
    /// About to post its first writes.
    const POSTING: u8 = 1;
    /// A write of it was acknowledged.
    const ACKNOWLEDGED: u8 = 2;
    const END: u8 = 3;

    fn say(&self, state: u8) {
        // Relaxed: no bytes hang on it.
        self.0.fetch_max(state, Ordering::Relaxed);
    }

    fn state(&self) -> u8 {
        // Relaxed: as above.
        self.0.load(Ordering::Relaxed)
    }
}

struct Pair {
    writer: End,
    owner: End,
}

impl Pair {
    /// Messages that invalidate nothing, and must not be taken for one that does.
    fn messages(&mut self) -> Result<(), Fault> {
        let mut chain = SendChain::new();
        chain.send_empty(MESSAGE, Signal::Yes);
        self.message(&mut chain, Opcode::Receive)?;
        chain.send_immediate(MESSAGE, Signal::Yes, NUMBER);
        self.message(&mut chain, Opcode::ReceiveImmediate(NUMBER))
    }

    /// A message that invalidates a key, and must say so.
    fn invalidate(&mut self, rkey: RKey) -> Result<(), Fault> {
        let mut chain = SendChain::new();
        chain.send_invalidate(MESSAGE, Signal::Yes, rkey);
        self.message(&mut chain, Opcode::ReceiveInvalidate(rkey))
    }

    fn message(&mut self, chain: &mut SendChain, want: Opcode) -> Result<(), Fault> {
        chain.post(&self.writer.queue_pair)?;
        self.owner.told(want)?;
        self.writer.told(Opcode::Send)
    }
}

/// One end of a connection.
struct End {
    queue_pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Completions that nobody has asked for yet.
    taken: VecDeque<WorkCompletion>,
    /// Writes that were posted and have not completed.
    outstanding: usize,
    time_limit: Duration,
}

impl End {
    /// Posts writes, as many as there is room for, until it is told to end or one fails.
    fn write_on(&mut self, target: Target, flow: &Flow) -> Result<(), Fault> {
        let mut chain = SendChain::new();
        let deadline = Instant::now() + self.time_limit + self.time_limit;
        let mut count = 0;
        while flow.state() < Flow::END && Instant::now() < deadline {
            flow.say(Flow::POSTING);
            self.post_some(&mut chain, target, &mut count)?;
            self.poll()?;
            if self
                .taken
                .iter()
                .any(|completion| completion.result.is_err())
            {
                break;
            }
            if !self.taken.is_empty() {
                flow.say(Flow::ACKNOWLEDGED);
            }
            self.outstanding -= self.taken.len();
            self.taken.clear();
        }
        Ok(())
    }

    /// Posts some more writes, after `count` of them; whether there was room.
    fn post_some(
        &mut self,
        chain: &mut SendChain,
        target: Target,
        count: &mut u32,
    ) -> Result<bool, Fault> {
        if self.outstanding + CHAIN > WRITES as usize {
            return Ok(false);
        }
        for _ in 0..CHAIN {
            // Each brings other bytes to the same place: the last packet of any shows.
            let shift = u64::from(*count % SHIFTS) * u64::from(SHIFT_BYTES);
            target.add(chain, shift, LONG_BYTES);
            *count += 1;
        }
        chain.post(&self.queue_pair)?;
        self.outstanding += CHAIN;
        Ok(true)
    }

    /// Waits until every write has completed, one way or the other.
    fn finish(&mut self) -> Result<(), Fault> {
        self.take(self.outstanding)
    }

    /// The next completion must be of this.
    fn told(&mut self, want: Opcode) -> Result<(), Fault> {
        match self.next()?.result {
            Ok(got) if got == want => Ok(()),
            Ok(got) => Err(Fault::Told { got, want }),
            Err(status) => Err(Fault::Status(status)),
        }
    }

    fn next(&mut self) -> Result<WorkCompletion, Fault> {
        self.take(1)?;
        Ok(self.taken.pop_front().expect("there is one, or no answer"))
    }

    /// Waits until there are `count` completions that nobody has asked for.
    fn take(&mut self, count: usize) -> Result<(), Fault> {
        let deadline = Instant::now() + self.time_limit;
        loop {
            self.poll()?;
            if self.taken.len() >= count {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Fault::Silent(self.time_limit));
            }
            thread::yield_now();
        }
    }

    /// Takes in what there is.
    fn poll(&mut self) -> Result<(), Fault> {
        let mut room = Completions::new();
        loop {
            let before = self.taken.len();
            self.taken.extend(self.completions.poll(&mut room)?);
            if self.taken.len() == before {
                return Ok(());
            }
        }
    }
}

/// Most completions of one end.
fn capacity_of(capacity: &Capacity) -> u32 {
    capacity.sends + capacity.receives
}

/// What is read in a round, and in no earlier one.
fn stamp(number: u64) -> u8 {
    u8::try_from(number + 1).expect("rounds are few")
}

/// Where an area starts.
fn area(number: u64) -> u64 {
    SENT_BYTES + number * AREA_BYTES
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("scratch memory is small")
}

/// Fences of each mode. One that does nothing is found out at once. One that lacks only its
/// barrier, so that now and then a packet is late, is found out by one probe of ten or twenty
/// (measured on soft-RoCE).
const ROUNDS: u64 = 16;

/// Fences of who reads, and reads that each of them meets: 2 MiB.
const READ_ROUNDS: u64 = 4;
const READS: u32 = 64;

const _: () = assert!(READ_ROUNDS <= ROUNDS);

/// Writes that a writer has outstanding: 8 MiB, a tenth of a millisecond or more of any port.
const WRITES: u32 = 256;

/// Writes that are posted at a time.
const CHAIN: usize = 8;

const _: () = assert!(CHAIN <= SendChain::MAX);

/// Short, so that an area is read before what is late has landed.
const LONG_BYTES: u32 = 32 << 10;

const SHORT_BYTES: u32 = 4096;

/// From where one write's bytes are to where the next's are, and how many times until the first's
/// come again.
const SHIFT_BYTES: u32 = 64;
const SHIFTS: u32 = 1024;

const AREA_BYTES: u64 = LONG_BYTES as u64;

const SENT_BYTES: u64 = 128 << 10;

const _: () = assert!((LONG_BYTES + SHIFTS * SHIFT_BYTES) as u64 <= SENT_BYTES);

const MEMORY_BYTES: u64 = SENT_BYTES + ROUNDS * AREA_BYTES;

/// Receives that an owner has posted.
const MESSAGES: u32 = 8;

/// Any number whose bytes differ.
const NUMBER: u32 = 0x0102_0304;

/// By how much each moment of a fence is later than that of the one before.
const PAUSE_STEP: Duration = Duration::from_micros(30);

/// How long a reader may go on after its owner's fence.
const READ_ON: Duration = Duration::from_millis(2);

/// For what is late to land.
const SETTLE: Duration = Duration::from_millis(50);

/// A device that works answers within microseconds, soft-RoCE in an emulated host within a second.
const TIME_LIMIT: Duration = Duration::from_secs(5);

// Ids of work requests, for whoever debugs one.
const BIND: u64 = 1;
const MESSAGE: u64 = 2;
const RECEIVE: u64 = 3;
const WRITE: u64 = 4;

#[cfg(test)]
mod tests;
