//! A driver that chooses at random, from one seed.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::setup::{Budget, Request, Setup};
use crate::world::{Event, World};
use fabric_proto::wire::AbortPolicy;

/// A small generator of our own (xorshift64*): a seed is a run, on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below a bound.
    ///
    /// # Panics
    ///
    /// Where the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).expect("it is below a count")
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }
}

/// How a run went.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Summary {
    /// Nodes.
    pub nodes: usize,
    /// Events of the safety phase, in which things go wrong.
    pub events: usize,
    /// Events of the liveness phase, in which nothing does.
    pub settling: usize,
    /// What passed on all daemons' clocks together.
    pub virtual_time: Duration,
    /// What both sides of the requests heard in the end, by kind and reason.
    pub outcomes: BTreeMap<(&'static str, &'static str), u64>,
}

/// A random cluster, and how much may go wrong in it.
#[must_use]
pub fn setup(random: &mut Random, nodes_max: u64) -> Setup {
    let count = random.between(2, nodes_max);
    let nodes: Vec<Vec<u32>> = (0..count)
        .map(|_| {
            let engines = random.between(1, 2);
            let slots = |random: &mut Random| u32::try_from(random.between(3, 9)).expect("small");
            (0..engines).map(|_| slots(random)).collect()
        })
        .collect();
    let requests = (0..random.between(count, count * 3))
        .map(|_| request(random, &nodes))
        .collect();
    let several = |random: &mut Random, most| {
        u32::try_from(random.below(most + 1)).expect("a budget is small")
    };
    let budget = Budget {
        aborts: several(random, count * 2),
        cuts: several(random, count),
        daemon_crashes: several(random, count),
        engine_crashes: several(random, count),
        flips: several(random, 6),
        unreachable: several(random, count),
        ticks: several(random, count * 8),
        misroutes: several(random, 4),
        one_way: several(random, count),
        lies: several(random, 6),
        shutdowns: several(random, 2),
        clock_steps: several(random, 2),
        retries: several(random, count * 4),
    };
    Setup {
        nodes,
        requests,
        regions: u16::try_from(random.between(1, 3)).expect("small"),
        outstanding_pages: random.between(1, 5),
        attempts_max: u32::try_from(random.between(1, 3)).expect("small"),
        abort: [AbortPolicy::FinishTransfer, AbortPolicy::DrainNow][random.index(2)],
        recount: true,
        budget,
    }
}

/// Mostly a few; now and then more than the pool has.
fn slots(random: &mut Random) -> u32 {
    let most = if random.below(32) == 0 { 12 } else { 3 };
    u32::try_from(random.between(1, most)).expect("small")
}

fn request(random: &mut Random, nodes: &[Vec<u32>]) -> Request {
    let source = random.index(nodes.len());
    // Another node: a daemon's link to itself is its shell's business.
    let other = random.index(nodes.len() - 1);
    let destination = other + usize::from(other >= source);
    let source = (source, random.index(nodes[source].len()));
    let destination = (destination, random.index(nodes[destination].len()));
    Request {
        tenant: u8::try_from(random.below(3)).expect("small"),
        source,
        destination,
        slots: slots(random),
        named: random.below(8) == 0,
    }
}

/// Runs a seed: first things go wrong, then nothing does, and everything must come to rest.
///
/// # Errors
///
/// The world in which an invariant does not hold.
pub fn run(seed: u64, nodes_max: u64, events_max: usize) -> Result<Summary, Box<World>> {
    let mut random = Random::new(seed);
    let setup = setup(&mut random, nodes_max);
    run_in(&mut random, setup, events_max)
}

/// Runs a cluster that is set up already.
///
/// # Errors
///
/// The world in which an invariant does not hold.
pub fn run_in(random: &mut Random, setup: Setup, events_max: usize) -> Result<Summary, Box<World>> {
    let mut world = World::new(setup);
    let mut summary = Summary {
        nodes: world.nodes.len(),
        ..Summary::default()
    };
    for _ in 0..events_max {
        let events = world.enabled();
        let Some(event) = choose(random, &events) else {
            break;
        };
        world.apply(event);
        summary.events += 1;
    }
    if world.violation().is_none() {
        summary.settling = world.settle();
    }
    if world.violation().is_some() {
        return Err(Box::new(world));
    }
    summary.virtual_time = world.virtual_time();
    for outcome in world.outcomes() {
        let kind = (outcome.label(), outcome.reason());
        *summary.outcomes.entry(kind).or_default() += 1;
    }
    Ok(summary)
}

/// Mostly what moves things on; now and then a fault.
fn choose(random: &mut Random, events: &[Event]) -> Option<Event> {
    let is_fault = |event: &&Event| {
        matches!(
            event,
            Event::Flip(_)
                | Event::Cut(_)
                | Event::CrashDaemon(_)
                | Event::CrashEngine(..)
                | Event::Unreachable(_)
                | Event::AbortDestination(..)
                | Event::AbortSource(_)
                | Event::Misroute(..)
                | Event::OneWay(..)
                | Event::Lie(..)
                | Event::Shutdown(_)
                | Event::ClockStep(_)
                | Event::Tick(_)
        )
    };
    let (faults, moves): (Vec<&Event>, Vec<&Event>) = events.iter().partition(is_fault);
    let from = if moves.is_empty() || (!faults.is_empty() && random.below(20) == 0) {
        faults
    } else {
        moves
    };
    if from.is_empty() {
        return None;
    }
    Some(*from[random.index(from.len())])
}
