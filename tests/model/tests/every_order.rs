//! Clusters that are explored to the end, with the number of their states.
//!
//! A count changes when the protocol does. It is pinned so that no change makes the model smaller
//! unseen: look at why, then write the new one down.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use fabric_model::{Exhaustive, Seen, heard, pair};
use fabric_sim::{Budget, Request, Setup};
use stateright::{Checker, Model};

/// Explores everything; gives the number of distinct states.
fn explore(setup: Setup, sometimes: &[Seen]) -> usize {
    // Its message is in the violation.
    std::panic::set_hook(Box::new(|_| ()));
    let model = Exhaustive {
        setup,
        sometimes: sometimes.to_vec(),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads).spawn_dfs().join();
    let found: BTreeMap<_, _> = checker.discoveries().into_iter().collect();
    for (name, path) in found {
        if sometimes.iter().any(|(seen, _)| *seen == name) {
            continue;
        }
        let violation = format!("{:?}", path.last_state().violation());
        eprintln!("{name}: {violation}\n{:#?}", path.into_actions());
    }
    let _ = std::panic::take_hook();
    checker.assert_properties();
    checker.unique_state_count()
}

const NONE: Budget = Budget {
    aborts: 0,
    cuts: 0,
    daemon_crashes: 0,
    engine_crashes: 0,
    flips: 0,
    unreachable: 0,
    ticks: 0,
    misroutes: 0,
    one_way: 0,
    lies: 0,
    shutdowns: 0,
    clock_steps: 0,
    retries: 0,
};

#[test]
fn nothing_goes_wrong() {
    let seen: &[Seen] = &[heard!("delivered", "none"), heard!("rejected", "busy")];
    assert_eq!(explore(pair(2, NONE), seen), 1_309);
}

#[test]
fn clients_and_prefills_stop() {
    let seen: &[Seen] = &[
        heard!("delivered", "none"),
        heard!("aborted", "destination"),
        heard!("aborted", "source"),
        heard!("rejected", "offer_used"),
    ];
    let budget = Budget { aborts: 2, ..NONE };
    assert_eq!(explore(pair(2, budget), seen), 39_619);
}

#[test]
fn links_break() {
    let seen: &[Seen] = &[
        heard!("delivered", "none"),
        heard!("failed", "link_lost"),
        heard!("failed", "verdict_unknown"),
    ];
    let budget = Budget { cuts: 2, ..NONE };
    assert_eq!(explore(pair(2, budget), seen), 65_127);
}

#[test]
fn nodes_are_not_reached() {
    let seen: &[Seen] = &[heard!("rejected", "peer_unreachable")];
    let budget = Budget {
        unreachable: 1,
        cuts: 1,
        retries: 1,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 148_175);
}

#[test]
fn daemons_die() {
    let seen: &[Seen] = &[
        heard!("delivered", "none"),
        heard!("failed", "daemon_gone"),
        heard!("rejected", "offer_stale"),
    ];
    let budget = Budget {
        daemon_crashes: 2,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 100_545);
}

#[test]
fn engines_die() {
    let seen: &[Seen] = &[heard!("delivered", "none"), heard!("failed", "engine_gone")];
    let budget = Budget {
        engine_crashes: 2,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 273_140);
}

#[test]
fn bits_flip() {
    let seen: &[Seen] = &[heard!("delivered", "none"), heard!("failed", "corrupt")];
    let mut setup = pair(2, Budget { flips: 2, ..NONE });
    setup.regions = 2;
    assert_eq!(explore(setup, seen), 9_599);
}

#[test]
fn deadlines_pass() {
    let seen: &[Seen] = &[
        heard!("failed", "offer_unused"),
        heard!("failed", "open_late"),
        heard!("failed", "silent"),
        heard!("failed", "drain_late"),
        heard!("failed", "commit_late"),
        heard!("failed", "verify_late"),
        heard!("failed", "verdict_late"),
    ];
    let budget = Budget { ticks: 3, ..NONE };
    assert_eq!(explore(pair(2, budget), seen), 232_091);
}

/// More than a million states: an abort, a broken link and a deadline, in every order with all
/// that two tenants do on one slot.
#[test]
fn an_abort_a_cut_and_a_deadline() {
    let seen: &[Seen] = &[heard!("delivered", "none")];
    let budget = Budget {
        aborts: 1,
        cuts: 1,
        ticks: 1,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 1_631_871);
}

#[test]
fn what_went_wrong_is_tried_again() {
    let seen: &[Seen] = &[heard!("delivered", "none")];
    let budget = Budget {
        flips: 1,
        cuts: 1,
        daemon_crashes: 1,
        retries: 1,
        ..NONE
    };
    assert_eq!(explore(pair(1, budget), seen), 71_988);
}

/// Two prefill nodes that write into the one slot of a third.
#[test]
fn two_sources_share_a_destination() {
    let seen: &[Seen] = &[heard!("delivered", "none"), heard!("rejected", "busy")];
    let budget = Budget {
        aborts: 1,
        cuts: 1,
        ..NONE
    };
    let request = |tenant, node| Request {
        tenant,
        source: (node, 0),
        destination: (2, 0),
        slots: 1,
        named: false,
    };
    let setup = Setup {
        nodes: vec![vec![1]; 3],
        requests: vec![request(0, 0), request(1, 1)],
        ..pair(0, budget)
    };
    assert_eq!(explore(setup, seen), 692_081);
}

/// Both nodes prefill for each other: each is a source and a destination at once.
#[test]
fn two_nodes_send_to_each_other() {
    let seen: &[Seen] = &[heard!("delivered", "none")];
    let budget = Budget { cuts: 1, ..NONE };
    let request = |tenant: u8, source: usize| Request {
        tenant,
        source: (source, 0),
        destination: (1 - source, 0),
        slots: 1,
        named: false,
    };
    let setup = Setup {
        nodes: vec![vec![2]; 2],
        requests: vec![request(0, 0), request(1, 1)],
        ..pair(0, budget)
    };
    assert_eq!(explore(setup, seen), 2_129_813);
}

/// A daemon repeats or alters any of its messages, makes up an offer, or writes garbage.
#[test]
fn a_daemon_lies() {
    let seen: &[Seen] = &[
        heard!("delivered", "none"),
        heard!("failed", "manifest_mismatch"),
        heard!("failed", "corrupt"),
        heard!("rejected", "tokens_mismatch"),
    ];
    let mut setup = pair(2, Budget { lies: 2, ..NONE });
    setup.attempts_max = 1;
    assert_eq!(explore(setup, seen), 334_179);
}

#[test]
fn a_daemon_lies_about_pages_that_it_sends_again() {
    let seen: &[Seen] = &[heard!("delivered", "none")];
    let budget = Budget {
        flips: 1,
        lies: 2,
        ..NONE
    };
    let mut setup = pair(1, budget);
    setup.requests[0].slots = 2;
    setup.nodes = vec![vec![2]; 2];
    assert_eq!(explore(setup, seen), 75_332);
}

#[test]
fn offers_go_astray() {
    let seen: &[Seen] = &[heard!("delivered", "none")];
    let budget = Budget {
        misroutes: 1,
        aborts: 1,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 183_781);
}

#[test]
fn daemons_shut_down() {
    let seen: &[Seen] = &[
        heard!("delivered", "none"),
        heard!("aborted", "shutdown"),
        heard!("rejected", "shutting_down"),
    ];
    let budget = Budget {
        shutdowns: 1,
        ticks: 1,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 443_545);
}

#[test]
fn what_is_sent_one_way_is_lost() {
    let seen: &[Seen] = &[
        heard!("failed", "link_lost"),
        heard!("failed", "verdict_unknown"),
    ];
    let budget = Budget {
        one_way: 1,
        ticks: 1,
        ..NONE
    };
    assert_eq!(explore(pair(2, budget), seen), 423_773);
}
