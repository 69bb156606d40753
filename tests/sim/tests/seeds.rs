//! Random clusters: a fixed set of seeds, and fresh ones for a few seconds.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fabric_sim::run::{Summary, run};

/// Runs a seed; a failing one says how to see it again.
fn seed(seed: u64, nodes: u64, events: usize) -> Summary {
    run(seed, nodes, events).unwrap_or_else(|world| {
        panic!(
            "{:?}\n{world:#?}\nagain: cargo run --release -p fabric-sim -- --seed {seed} --nodes \
             {nodes} --events {events}",
            world.violation()
        )
    })
}

#[test]
fn small_clusters() {
    let mut heard = BTreeSet::new();
    for number in 0..20_000 {
        let summary = seed(number, 5, 3_000);
        assert!(summary.nodes >= 2 && summary.events > 0);
        heard.extend(summary.outcomes.into_keys());
    }
    // What no run ever hears, no run tests.
    let must = [
        ("aborted", "destination"),
        ("aborted", "source"),
        ("delivered", "none"),
        ("failed", "commit_late"),
        ("failed", "corrupt"),
        ("failed", "daemon_gone"),
        ("failed", "drain_late"),
        ("failed", "engine_gone"),
        ("failed", "link_lost"),
        ("failed", "offer_unused"),
        ("failed", "open_late"),
        ("failed", "plane"),
        ("failed", "silent"),
        ("failed", "verdict_late"),
        ("failed", "verdict_unknown"),
        ("failed", "verify_late"),
        ("rejected", "busy"),
        ("rejected", "offer_expired"),
        ("rejected", "offer_stale"),
        ("rejected", "offer_used"),
        ("rejected", "peer_unreachable"),
    ];
    let missing: Vec<_> = must.iter().filter(|kind| !heard.contains(*kind)).collect();
    assert!(missing.is_empty(), "never heard: {missing:?}");
}

#[test]
fn large_clusters() {
    for number in 0..600 {
        seed(number, 64, 20_000);
    }
}

#[test]
fn fresh_seeds() {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let first = since_epoch.map_or(0, |time| time.as_secs() << 24);
    let until = Instant::now() + Duration::from_secs(10);
    let mut number = first;
    while Instant::now() < until {
        seed(number, 8, 5_000);
        number += 1;
    }
    eprintln!("{} fresh seeds from {first}", number - first);
}
