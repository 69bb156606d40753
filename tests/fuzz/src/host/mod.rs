//! A list of operations, on one production machine beside a naive model.
//!
//! Engines, peers, the plane and the clock are all the script's. Engines and peers lie as they
//! like: wrong numbers, foreign and replayed offers, wrong digests, anything at any time. The plane
//! is honest: it proves a thing once, after it was asked for or broke. A link to itself lets the
//! machine be its own peer, so that whole transfers happen.
//!
//! - [`script`]: bytes as decisions; [`step`]: what goes into the machine;
//! - [`engines`], [`peers`], [`planes`]: one operation after another, from the script;
//! - [`world`]: runs a step in both, and holds what comes out against the model;
//! - [`model`]: who holds which slot.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "a model looks for the few steps that matter to it"
)]

mod engines;
mod model;
mod peers;
mod planes;
mod script;
mod step;
mod world;

use std::time::Duration;

use fabric_proto::host::{Config, ScrubPolicy};
use fabric_proto::ids::{Incarnation, LinkId, NodeId, Secret};
use fabric_proto::wire::{AbortPolicy, PlaneKind};

use self::script::Script;
use self::step::Step;
use self::world::World;

/// More than any finding needs; bounds how long one input takes.
const OPERATIONS_MAX: usize = 400;

/// More than any world that comes to rest needs.
const SETTLE_ROUNDS_MAX: usize = 100;

const PAGE_BYTES: u32 = 64;

/// Runs the operations that `bytes` are, then lets everything come to rest.
pub fn host(bytes: &[u8]) {
    let mut driver = Driver::new(Script::new(bytes));
    for _ in 0..OPERATIONS_MAX {
        let Some(operation) = driver.script.next() else {
            break;
        };
        driver.operate(operation);
    }
    driver.settle();
}

struct Driver<'a> {
    script: Script<'a>,
    world: World,
    /// For every name that is never used twice.
    next_name: u32,
}

impl<'a> Driver<'a> {
    fn new(mut script: Script<'a>) -> Self {
        let world = World::new(config(&mut script));
        let mut driver = Self {
            script,
            world,
            next_name: 1,
        };
        driver.engine_up();
        driver.register_pool();
        driver.world.step(&Step::LinkUp {
            link: LinkId::LOOPBACK,
            node: node(0),
            incarnation: incarnation(OWN_INCARNATION),
            planes: vec![PlaneKind::Shm],
        });
        driver
    }

    fn operate(&mut self, operation: u8) {
        match operation % 40 {
            0 => self.engine_up(),
            1 => self.engine_gone(),
            2 => self.register_pool(),
            3 | 4 => self.lease(),
            5 => self.end_lease(),
            6 | 7 => self.send(),
            8 | 9 => self.seal(),
            10 => self.seal_all(),
            11 => self.finish(),
            12 => self.abort_send(),
            13 => self.verified(),
            14 => self.raw_engine(),
            15 => self.link_up(),
            16 => self.link_down(),
            17 => self.connect_failed(),
            18 | 19 => self.open(),
            20 => self.checksums(),
            21 => self.commit(),
            22 => self.cancel(),
            23 => self.refuse(),
            24 | 25 => self.grant(),
            26 => self.drain_request(),
            27 => self.verdict(),
            28 => self.raw_peer(),
            29 => self.armed(),
            30 => self.landed(),
            31 => self.written(),
            32 => self.writer_failed(),
            33 => self.writes_stopped(),
            34 => self.reads_stopped(),
            35 => self.scrubbed(),
            36 => self.loopback(),
            37 => self.pass(),
            38 => self.honest_round(),
            _ => self.rare(),
        }
    }

    /// What ends most of an input: shutdown, and closing what the machine wants closed.
    fn rare(&mut self) {
        if self.script.seldom() {
            self.world.step(&Step::Shutdown);
        }
        self.close();
    }

    fn close(&mut self) {
        for step in std::mem::take(&mut self.world.closing) {
            let model = &self.world.model;
            let there = match &step {
                Step::EngineGone(engine) => model.engines.contains(engine),
                Step::LinkDown(link) => model.links.contains(link),
                _ => false,
            };
            if there {
                self.world.step(&step);
            }
        }
    }

    fn pass(&mut self) {
        let time = match self.script.below(8) {
            0 => Duration::from_millis(1),
            1 => DRAIN_MAX / 2,
            2 => DRAIN_MAX,
            3 => OPEN_MAX,
            4 => SILENCE_MAX,
            5 => OFFER_TTL,
            6 => VERIFY_MAX,
            _ => self.until_deadline(),
        };
        self.world.pass(time);
    }

    fn until_deadline(&self) -> Duration {
        let deadline = self.world.deadline().unwrap_or(self.world.model.now);
        deadline.saturating_sub(self.world.model.now)
    }

    /// S4: with an honest plane and a clock, and nobody's help, every writer is stopped; with the
    /// engines and links gone, every slot is free and every pool unmapped.
    fn settle(&mut self) {
        self.rest();
        let model = &self.world.model;
        assert!(model.grants.is_empty(), "a writer is left without help");
        let (engines, links) = (model.engines.clone(), model.links.clone());
        for engine in engines {
            self.world.step(&Step::EngineGone(engine));
        }
        for link in links {
            self.world.step(&Step::LinkDown(link));
        }
        self.rest();
        let model = &self.world.model;
        assert!(model.sends.is_empty() && model.leases.is_empty());
        assert!(model.pools.is_empty(), "S4: every slot is free");
        assert_eq!(model.sums.pages_arrived, model.sums.pages_ended, "S10");
        assert_eq!(model.shutdown, model.shutdown_complete);
    }

    /// The plane and the scrubber answer, and time passes, until nothing is waited for.
    fn rest(&mut self) {
        for _ in 0..SETTLE_ROUNDS_MAX {
            self.planes_answer();
            if self.world.deadline().is_none() {
                self.planes_answer();
                return;
            }
            let time = self.until_deadline();
            self.world.pass(time);
        }
        panic!("S4: something is waited for again and again");
    }

    /// A name that was never used.
    fn fresh(&mut self) -> u32 {
        self.next_name += 1;
        self.next_name
    }
}

const OWN_INCARNATION: u64 = 3;
const DRAIN_MAX: Duration = Duration::from_secs(1);
const OPEN_MAX: Duration = Duration::from_secs(4);
const SILENCE_MAX: Duration = Duration::from_secs(20);
const OFFER_TTL: Duration = Duration::from_secs(30);
const VERIFY_MAX: Duration = Duration::from_secs(60);

fn config(script: &mut Script<'_>) -> Config {
    let choices = script.byte();
    let abort = if choices & 1 == 0 {
        AbortPolicy::FinishTransfer
    } else {
        AbortPolicy::DrainNow
    };
    let scrub = match choices >> 1 & 3 {
        0 | 3 => ScrubPolicy::CrossTenant,
        1 => ScrubPolicy::Always,
        _ => ScrubPolicy::Never,
    };
    Config {
        node: node(0),
        incarnation: incarnation(OWN_INCARNATION),
        secret: Secret([5; 32]),
        abort,
        scrub,
        offer_ttl: OFFER_TTL,
        open_max: OPEN_MAX,
        silence_max: SILENCE_MAX,
        drain_max: DRAIN_MAX,
        verify_max: VERIFY_MAX,
        attempts_max: u32::from(choices >> 3 & 3) + 1,
        outstanding_bytes_max: u64::from(PAGE_BYTES) * (u64::from(choices >> 5) + 1),
    }
}

fn node(number: u8) -> NodeId {
    NodeId([number; 32])
}

fn incarnation(life: u64) -> Incarnation {
    Incarnation::new(life).expect("lives count from 1")
}
