//! The whole transition relation as a snapshot: each state, each event, what comes of it.
//!
//! A new transition, or a changed one, is a visible diff; refused ones are in it too.

use std::fmt::Write as _;
use std::time::Duration;

use super::world::*;
use crate::host::{Input, StoppedBy};
use crate::outcome::Outcome;
use crate::wire::{AbortPolicy, PeerMessage, ToDaemon};

const DESTINATION: [&str; 6] = [
    "arming",
    "open",
    "committed",
    "drained",
    "closing",
    "verifying",
];

/// A transfer whose destination is in a state, and everything on its way lost.
fn destination(state: &str) -> (World, Begun) {
    let mut world = World::new();
    let begun = world.begin(8);
    world.seal_all(&begun);
    let stopped = |node: usize, event: &Event| node == D && matches!(event, Event::Stopped(..));
    match state {
        "arming" => world.settle_until(|_, event| matches!(event, Event::Armed(_))),
        "open" => world.settle(),
        "committed" => {
            world.finish(&begun);
            world.settle_until(stopped);
            world
                .queue
                .retain(|(_, event)| !matches!(event, Event::Stopped(..)));
            world.settle();
        }
        "drained" => {
            world.finish(&begun);
            world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Commit { .. })));
            world.queue.pop_front();
            world.settle();
        }
        "closing" => {
            world.settle();
            world.end(D, begun.to, AbortPolicy::DrainNow);
        }
        _ => {
            world.finish(&begun);
            world.settle();
        }
    }
    world.queue.clear();
    (world, begun)
}

fn source(state: &str) -> (World, Begun) {
    let mut world = World::new();
    world.reachable = state != "connecting";
    let begun = world.begin(8);
    match state {
        "connecting" => {}
        "opening" => {
            world.settle_until(|_, event| matches!(event, Event::Peer(PeerMessage::Open { .. })));
        }
        "streaming" => world.settle(),
        "ending" => {
            world.settle();
            world.engine(
                P,
                ToDaemon::AbortSend {
                    transfer: begun.transfer,
                },
            );
        }
        _ => {
            world.seal_all(&begun);
            world.finish(&begun);
            world.settle();
        }
    }
    world.queue.clear();
    (world, begun)
}

/// What the world saw of one event.
fn report(world: &World, node: usize, before: (usize, usize)) -> String {
    let mut text = String::new();
    let node_state = &world.nodes[node];
    for said in &node_state.said[before.0..] {
        let _ = write!(text, " tell:{}", head(&format!("{said:?}")));
    }
    for reason in &node_state.closed[before.1..] {
        let _ = write!(text, " close:{}", head(&format!("{reason:?}")));
    }
    for (to, event) in &world.queue {
        let to = if *to == node { "self" } else { "peer" };
        let _ = write!(text, " {to}:{}", head(&format!("{event:?}")));
    }
    let usage = node_state.host.usage();
    let _ = write!(
        text,
        " | free {} granted {} pinned {}",
        usage.free, usage.granted, usage.pinned
    );
    text
}

/// The start of a debug text: names, not numbers.
fn head(text: &str) -> String {
    let name = |text: &str| {
        text.chars()
            .take_while(|c| c.is_alphanumeric())
            .collect::<String>()
    };
    let mut parts = vec![name(text)];
    for marker in ["outcome: ", "Peer(", "Failed(", "Aborted(", "Rejected("] {
        if let Some(at) = text.find(marker) {
            parts.push(name(&text[at + marker.len()..]));
        }
    }
    parts.dedup();
    parts.join("/")
}

#[test]
fn every_state_and_event_of_a_destination() {
    let mut table = String::new();
    let events = [
        "armed",
        "landed",
        "checksums",
        "commit",
        "drain proof",
        "fence proof",
        "cancel",
        "cancel, drain follows",
        "lease ends, finish",
        "lease ends, drain",
        "link down",
        "deadline",
        "verified",
        "engine gone",
        "shutdown",
    ];
    for state in DESTINATION {
        for event in events {
            let (mut world, begun) = destination(state);
            // A proof exists only while there is a grant to prove it of.
            let armed = world.nodes[D].armed.keys().next().copied();
            if event.ends_with("proof") && armed.is_none() {
                continue;
            }
            let before = (world.nodes[D].said.len(), world.nodes[D].closed.len());
            apply_destination(&mut world, &begun, event);
            let _ = writeln!(table, "{state} + {event}:{}", report(&world, D, before));
        }
    }
    insta::assert_snapshot!(table);
}

fn apply_destination(world: &mut World, begun: &Begun, event: &str) {
    let link = world.link.unwrap();
    let transfer = begun.transfer;
    let grant = crate::ids::GrantId(1);
    let message = match event {
        "checksums" => {
            let checksums = crate::wire::Checksums {
                region: 0,
                first: 0,
                crcs: vec![1],
            };
            PeerMessage::Checksums { grant, checksums }
        }
        "commit" => {
            let (digest, payload) = (crate::ids::Tag([0; 32]), bytes::Bytes::new());
            PeerMessage::Commit {
                grant,
                digest,
                payload,
            }
        }
        "cancel" => PeerMessage::Cancel {
            transfer,
            drain_follows: false,
        },
        "cancel, drain follows" => PeerMessage::Cancel {
            transfer,
            drain_follows: true,
        },
        _ => return apply_destination_here(world, begun, event),
    };
    world.input(D, Input::Peer { link, message });
}

fn apply_destination_here(world: &mut World, begun: &Begun, event: &str) {
    let link = world.link.unwrap();
    let grant = crate::ids::GrantId(1);
    match event {
        "armed" => world.input(D, Input::Armed { grant }),
        "landed" => world.input(D, Input::Landed { grant }),
        "drain proof" | "fence proof" => {
            let by = if event == "drain proof" {
                StoppedBy::Drain
            } else {
                StoppedBy::Fence
            };
            world.nodes[D].armed.remove(&grant);
            world.input(D, Input::WritesStopped(Stopped(grant, by)));
        }
        "lease ends, finish" => world.end(D, begun.to, AbortPolicy::FinishTransfer),
        "lease ends, drain" => world.end(D, begun.to, AbortPolicy::DrainNow),
        "link down" => world.input(D, Input::LinkDown { link }),
        "deadline" => {
            world.now = world.now.plus(Duration::from_secs(60));
            world.input(D, Input::Tick);
        }
        "verified" => world.verify(begun, 1, vec![]),
        "engine gone" => world.input(D, Input::EngineGone { engine: ENGINE }),
        "shutdown" => world.input(D, Input::Shutdown),
        other => panic!("{other}"),
    }
}

#[test]
fn every_state_and_event_of_a_source() {
    let mut table = String::new();
    let events = [
        "link up",
        "connect failed",
        "refused",
        "granted",
        "granted again",
        "seal",
        "finish",
        "abort",
        "lease ends",
        "engine gone",
        "drain request",
        "verdict delivered",
        "verdict failed",
        "link down",
        "deadline",
        "shutdown",
    ];
    for state in ["connecting", "opening", "streaming", "committed", "ending"] {
        for event in events {
            let (mut world, begun) = source(state);
            if world.link.is_none() == (event != "link up")
                && ![
                    "connect failed",
                    "abort",
                    "lease ends",
                    "engine gone",
                    "deadline",
                    "shutdown",
                ]
                .contains(&event)
            {
                continue;
            }
            let before = (world.nodes[P].said.len(), world.nodes[P].closed.len());
            apply_source(&mut world, &begun, event);
            let _ = writeln!(table, "{state} + {event}:{}", report(&world, P, before));
        }
    }
    insta::assert_snapshot!(table);
}

fn apply_source(world: &mut World, begun: &Begun, event: &str) {
    let transfer = begun.transfer;
    let granted = |pages| {
        let lease = [1, 2].map(|index| crate::ids::SlotRef {
            index: crate::ids::SlotIndex(index),
            epoch: crate::ids::Epoch::new(9).unwrap(),
        });
        PeerMessage::Granted {
            transfer,
            grant: crate::ids::GrantId(2),
            slots: lease.to_vec(),
            plane_key: crate::ids::Secret([0; 32]),
            manifest_key: crate::ids::Secret([0; 32]),
            outstanding_bytes_max: 250,
            pages,
        }
    };
    let reason = crate::outcome::Rejection::OfferUsed;
    let failed = Outcome::Failed(crate::outcome::Failure::Plane);
    let run = crate::pool::PageRun {
        region: 0,
        first: 0,
        count: 1,
    };
    let message = match event {
        "refused" => PeerMessage::Refused { transfer, reason },
        "granted" => granted(vec![]),
        "granted again" => granted(vec![run]),
        "drain request" => PeerMessage::DrainRequest {
            grant: crate::ids::GrantId(1),
        },
        "verdict delivered" => PeerMessage::Verdict {
            transfer,
            outcome: Outcome::Delivered,
        },
        "verdict failed" => PeerMessage::Verdict {
            transfer,
            outcome: failed,
        },
        _ => return apply_source_here(world, begun, event),
    };
    let link = world.link.unwrap();
    world.input(P, Input::Peer { link, message });
}

fn apply_source_here(world: &mut World, begun: &Begun, event: &str) {
    let transfer = begun.transfer;
    match event {
        "link up" => world.connect(),
        "connect failed" => {
            world.input(
                P,
                Input::ConnectFailed {
                    node: config(D).node,
                },
            );
        }
        "seal" => {
            let checksums = crate::wire::Checksums {
                region: 0,
                first: 0,
                crcs: vec![1],
            };
            world.engine(
                P,
                ToDaemon::Seal {
                    transfer,
                    checksums,
                },
            );
        }
        "finish" => world.finish(begun),
        "abort" => world.engine(P, ToDaemon::AbortSend { transfer }),
        "lease ends" => world.end(P, begun.from, AbortPolicy::DrainNow),
        "engine gone" => world.input(P, Input::EngineGone { engine: ENGINE }),
        "link down" => {
            let link = world.link.unwrap();
            world.input(P, Input::LinkDown { link });
        }
        "deadline" => {
            world.now = world.now.plus(Duration::from_secs(130));
            world.input(P, Input::Tick);
        }
        "shutdown" => world.input(P, Input::Shutdown),
        other => panic!("{other}"),
    }
}
