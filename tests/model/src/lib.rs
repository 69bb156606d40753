//! Every order of events of a small cluster of the production machine.
//!
//! The world is `fabric-sim`'s: the machines that ship, engines, links, and an adversary that owns
//! the wire. Here nothing is chosen: every event that may happen next is followed, in every state
//! that can be reached, until the budget of faults is used up.
//!
//! Not covered: what a NIC's or a processor's memory ordering does below the planes; more than a
//! few requests, slots and faults at a time (`fabric-sim` has those, at random). The whole list is
//! in `proto/README.md`.

#![forbid(unsafe_code)]

use std::hash::{DefaultHasher, Hash, Hasher};

use fabric_proto::wire::AbortPolicy;
pub use fabric_sim::World;
use fabric_sim::{Budget, Event, Request, Setup};
use stateright::{Model, Property};

/// A cluster to explore, and what must be seen in it.
#[derive(Clone, Debug)]
pub struct Exhaustive {
    /// The cluster.
    pub setup: Setup,
    /// What must happen in some state.
    pub sometimes: Vec<Seen>,
}

/// A name, and whether it happened.
pub type Seen = (&'static str, fn(&Exhaustive, &World) -> bool);

/// What a side of a request must hear in some state: kind and reason.
#[macro_export]
macro_rules! heard {
    ($kind:literal, $reason:literal) => {
        (
            concat!($kind, " ", $reason),
            |_: &$crate::Exhaustive, world: &$crate::World| world.heard($kind, $reason),
        )
    };
}

impl Model for Exhaustive {
    type State = World;
    type Action = Event;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self.setup.clone())]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Event>) {
        actions.extend(world.enabled());
    }

    fn next_state(&self, world: &World, event: Event) -> Option<World> {
        let mut next = world.clone();
        next.apply(event);
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("assertions", |_, world| holds(world, 0)),
            Property::always("S1 no late write", |_, world| holds(world, 1)),
            Property::always("S2 no stale read", |_, world| holds(world, 2)),
            Property::always("S3 true outcomes", |_, world| holds(world, 3)),
            Property::always("S4 no leak", |_, world| {
                holds(world, 4) && (!is_looked_at(world) || world.comes_to_rest())
            }),
            Property::always("S5 one owner", |_, world| holds(world, 5)),
            Property::always("S6 no replay", |_, world| holds(world, 6)),
            Property::always("S7 least reach", |_, world| holds(world, 7)),
            Property::always("S8 bounded drain", |_, world| holds(world, 8)),
            Property::always("S9 honest capacity", |_, world| holds(world, 9)),
            Property::always("S10 nothing skipped", |_, world| holds(world, 10)),
        ];
        let seen = self.sometimes.iter();
        properties.extend(seen.map(|(name, seen)| Property::sometimes(name, *seen)));
        properties
    }
}

fn holds(world: &World, invariant: u8) -> bool {
    world
        .violation()
        .is_none_or(|found| found.invariant != invariant)
}

/// Coming to rest takes a hundred events. It is tried in every state without a next one, and in
/// one of 64 of the others.
fn is_looked_at(world: &World) -> bool {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish().is_multiple_of(64) || world.enabled().is_empty()
}

/// A prefill node, a decode node, and requests of different tenants that share one slot on both.
#[must_use]
pub fn pair(requests: u8, budget: Budget) -> Setup {
    let request = |tenant| Request {
        tenant,
        source: (0, 0),
        destination: (1, 0),
        slots: 1,
        named: false,
    };
    Setup {
        nodes: vec![vec![1], vec![1]],
        requests: (0..requests).map(request).collect(),
        regions: 1,
        outstanding_pages: 1,
        attempts_max: 2,
        abort: AbortPolicy::FinishTransfer,
        recount: true,
        budget,
    }
}
