//! What a page costs the verbs thread: both ends of a transfer, turned by hand on one thread, so
//! that the same is done every time and nothing is waited for. `tests/rdma/instructions` counts it,
//! over a device that does nothing; on any other this is one more test.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::hint::black_box;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fabric_proto::host::{Input, PlaneCommand, StoppedBy};
use fabric_proto::ids::{GrantId, LinkId, PoolId, TransferId};
use fabric_proto::pool::PoolSpec;
use tokio::sync::mpsc::{self, Receiver};
use tokio::sync::{Semaphore, oneshot};

use super::codec::Message;
use super::peers::PeerKey;
use super::rails;
use super::regions::Registrar;
use super::worker::{Order, Turn, Worker};
use super::{Mode, VerbsPlane, VerbsSettings};
use crate::plane::PlaneProofs;
use crate::plane::pools::Pools;
use crate::plane::testing::{self, Event, Random};

/// How the pages of a transfer lie.
struct Shape {
    name: &'static str,
    mode: Mode,
    /// Of the lease, on both sides; in each of [`REGIONS`] regions.
    slots: u32,
    /// Whether no slot lies next to another; else all do.
    scattered: bool,
}

const SHAPES: [Shape; 4] = [
    // As many windows as a grant may have.
    Shape {
        name: "scattered-window",
        mode: Mode::Window,
        slots: 32,
        scattered: true,
    },
    Shape {
        name: "scattered-lane",
        mode: Mode::Lane,
        slots: 64,
        scattered: true,
    },
    Shape {
        name: "adjacent-window",
        mode: Mode::Window,
        slots: 64,
        scattered: false,
    },
    Shape {
        name: "adjacent-lane",
        mode: Mode::Lane,
        slots: 64,
        scattered: false,
    },
];

const REGIONS: u16 = 32;

const PAGE_BYTES: u32 = 16 << 10;

const PEER: PeerKey = PeerKey(0);

const LINK: LinkId = LinkId(1);

const POOL: PoolId = PoolId(1);

impl Shape {
    fn spec(&self) -> PoolSpec {
        testing::spec(REGIONS, PAGE_BYTES, 2 * self.slots)
    }

    fn pages(&self) -> u64 {
        u64::from(REGIONS) * u64::from(self.slots)
    }

    fn bytes(&self) -> u64 {
        self.pages() * u64::from(PAGE_BYTES)
    }

    /// The slots of a lease. Scattered ones lie apart, in no order.
    fn pick(&self, random: &mut Random) -> Vec<u32> {
        let mut slots: Vec<u32> = (0..self.slots).collect();
        if self.scattered {
            let odd = |slot: u32| 2 * slot + 1;
            slots = random.pick(slots.len(), self.slots);
            slots.iter_mut().for_each(|slot| *slot = odd(*slot));
        }
        slots
    }
}

/// One daemon's verbs thread, without the thread.
struct End {
    worker: Worker,
    orders: VecDeque<Order>,
    events: Receiver<Input<PlaneProofs>>,
    outgoing: Receiver<Message>,
    usable: oneshot::Receiver<bool>,
    places: Arc<Semaphore>,
    log: Vec<Event>,
}

impl End {
    fn new(shape: &Shape) -> Self {
        // As the daemon's own channels: long enough that nothing waits in the outbox.
        let (sender, events) = mpsc::channel(4096);
        let pools = Arc::new(Pools::new());
        pools.insert(POOL, testing::pool(shape.spec()));
        let settings = VerbsSettings {
            devices: Vec::new(),
            modes: vec![shape.mode],
            lanes: 4,
        };
        // Not proven: nothing that moves no bytes can be.
        let mut rails = rails::discover(&[]).unwrap();
        rails
            .iter_mut()
            .for_each(|rail| rail.allow(&settings.modes));
        let worker = VerbsPlane::worker(rails, pools, sender, settings, 8 << 20, Arc::default());
        let worker = worker.unwrap();
        Registrar::new(&worker).register(POOL).unwrap();
        let (outgoing, done) = (mpsc::channel(4096), oneshot::channel());
        worker.inbox.push(Order::PeerUp {
            peer: PEER,
            rails: worker.addresses.clone(),
            outgoing: outgoing.0,
            done: done.0,
        });
        Self {
            worker,
            orders: VecDeque::new(),
            events,
            outgoing: outgoing.1,
            usable: done.1,
            places: Arc::new(Semaphore::new(4096)),
            log: Vec::new(),
        }
    }

    fn command(&self, command: PlaneCommand) {
        self.worker.inbox.push(Order::Command(command));
    }

    /// Turns until there is nothing to do.
    fn turn(&mut self) {
        while let Turn::Worked(_) = self.worker.turn(&mut self.orders) {}
    }

    /// Takes what it says, and is woken by what it says next, as those who listen are.
    async fn listen(&mut self) -> Vec<Message> {
        let mut messages = Vec::new();
        poll_fn(|context| {
            while let Poll::Ready(Some(event)) = self.events.poll_recv(context) {
                self.log.push(Event::of(event));
            }
            while let Poll::Ready(Some(message)) = self.outgoing.poll_recv(context) {
                messages.push(message);
            }
            Poll::Ready(())
        })
        .await;
        messages
    }

    fn written(&self, id: u64) -> u64 {
        let bytes = |event: &Event| match *event {
            Event::Written(of, bytes) if of == id => bytes,
            Event::Armed(_)
            | Event::Landed(_)
            | Event::ReadsStopped(_)
            | Event::WriterFailed(_)
            | Event::WritesStopped(..)
            | Event::Written(..) => 0,
        };
        self.log.iter().map(bytes).sum()
    }

    fn hear(&self, message: Message) {
        let place = Arc::clone(&self.places).try_acquire_owned().unwrap();
        self.worker.inbox.push(Order::PeerSaid {
            peer: PEER,
            message,
            place,
        });
    }
}

// What is counted: each of these, and all that it calls. They differ, lest they be made one.

#[inline(never)]
fn turn_of_the_source(end: &mut End) {
    black_box(1);
    end.turn();
}

#[inline(never)]
fn turn_of_the_destination(end: &mut End) {
    black_box(2);
    end.turn();
}

/// On a link, each end does its part on another thread than the verbs thread.
#[inline(never)]
fn message_on_the_link(message: &Message) -> Message {
    let frame: Bytes = message.encode();
    Message::decode(frame.slice(4..)).unwrap()
}

/// Here a count ends, and the next begins.
#[inline(never)]
fn mark_of_the_count() {
    black_box(3);
}

struct Ends {
    source: End,
    target: End,
}

impl Ends {
    /// Both, connected to each other.
    async fn connected(shape: &Shape) -> Self {
        let (source, target) = (End::new(shape), End::new(shape));
        let mut ends = Self { source, target };
        let (mut ours, mut theirs) = (None, None);
        ends.until(|ends| {
            ours = ours.or_else(|| ends.source.usable.try_recv().ok());
            theirs = theirs.or_else(|| ends.target.usable.try_recv().ok());
            ours.is_some() && theirs.is_some()
        })
        .await;
        assert_eq!((ours, theirs), (Some(true), Some(true)), "usable");
        for end in [&ends.source, &ends.target] {
            end.worker.inbox.push(Order::Attach {
                peer: PEER,
                link: LINK,
            });
        }
        ends
    }

    async fn step(&mut self) {
        turn_of_the_destination(&mut self.target);
        for message in self.target.listen().await {
            self.source.hear(message_on_the_link(&message));
        }
        turn_of_the_source(&mut self.source);
        for message in self.source.listen().await {
            self.target.hear(message_on_the_link(&message));
        }
        // A task is given so many messages, and then none until it has let others run.
        tokio::task::yield_now().await;
    }

    async fn until(&mut self, mut holds: impl FnMut(&mut Self) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < WAIT, "it hangs");
            self.step().await;
        }
    }

    /// A transfer as engines ask for it: a region after the other, each in one piece.
    async fn transfer(&mut self, id: u64, shape: &Shape, random: &mut Random) {
        let (grant, transfer, key) = (GrantId(id), TransferId(id), testing::key(id));
        self.target.command(PlaneCommand::Arm {
            grant,
            link: LINK,
            key,
            pool: POOL,
            slots: testing::slot_refs(&shape.pick(random)),
            pages: [].into(),
        });
        self.until(|ends| ends.target.log.contains(&Event::Armed(id)))
            .await;
        self.source.command(PlaneCommand::OpenWriter {
            transfer,
            grant,
            link: LINK,
            key,
            pool: POOL,
            slots: testing::slot_refs(&shape.pick(random)),
        });
        for region in 0..REGIONS {
            let run = testing::run(region, 0, shape.slots);
            self.source.command(PlaneCommand::Write { transfer, run });
            self.step().await;
        }
        self.source.command(PlaneCommand::Drain { transfer });
        let closed = Event::WritesStopped(id, StoppedBy::Drain);
        self.until(|ends| {
            ends.source.log.contains(&Event::ReadsStopped(id)) && ends.target.log.contains(&closed)
        })
        .await;
        assert_eq!(self.source.written(id), shape.bytes(), "every page");
        self.source.log.clear();
        self.target.log.clear();
    }
}

/// Runs transfers of one shape, or of each: `FABRIC_COST_SHAPE`. Where `FABRIC_COST_TRANSFERS` says
/// how many, that many after the first are one count, and twice as many are another.
#[tokio::test]
#[ignore = "needs an RDMA device: tests/rdma/run, or tests/rdma/instructions"]
async fn cost_of_a_page() {
    let wanted = std::env::var("FABRIC_COST_SHAPE").ok();
    let transfers =
        std::env::var("FABRIC_COST_TRANSFERS").map_or(0, |count| count.parse().unwrap());
    let is_wanted = |shape: &&Shape| wanted.as_ref().is_none_or(|name| name == shape.name);
    let shapes: Vec<_> = SHAPES.iter().filter(is_wanted).collect();
    assert!(!shapes.is_empty(), "no shape is called {wanted:?}");
    for shape in shapes {
        let mut random = Random::new(41);
        let mut ends = Ends::connected(shape).await;
        ends.transfer(1, shape, &mut random).await;
        mark_of_the_count();
        for id in 2..2 + 3 * transfers {
            if id == 2 + transfers {
                mark_of_the_count();
            }
            ends.transfer(id, shape, &mut random).await;
        }
        mark_of_the_count();
        println!("{}: {} pages", shape.name, shape.pages());
    }
}

const WAIT: Duration = Duration::from_secs(60);
