//! Every guard matters: without it, some seed sees an invariant broken.
//!
//! Each bug of `fabric_proto::Bug` is planted in turn, and random clusters run until one notices.
//! Machines do not recount themselves here: what catches a bug is what it does, or an assertion in
//! its way. Needs `--cfg fabric_planted`; `tests/run` builds it so, in a folder of its own.

#![cfg(fabric_planted)]
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use fabric_proto::{Bug, plant};
use fabric_sim::Violation;
use fabric_sim::run::{Random, run_in, setup};

/// Many times what the shyest bug needs.
const SEEDS_MAX: u64 = 20_000;

/// The first seed that sees a violation, and what it saw.
fn hunt() -> Option<(u64, Violation)> {
    (0..SEEDS_MAX).find_map(|seed| {
        let mut random = Random::new(seed);
        let mut setup = setup(&mut random, 5);
        setup.recount = false;
        let world = run_in(&mut random, setup, 3_000).err()?;
        let violation = world.violation().expect("an error is a violation");
        Some((seed, violation.clone()))
    })
}

/// One test, since what is planted is planted for the whole process.
#[test]
fn every_planted_bug_is_caught() {
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    let mut caught = BTreeMap::new();
    for &bug in Bug::ALL {
        plant(Some(bug));
        match hunt() {
            Some((seed, violation)) => {
                let Violation { invariant, what } = violation;
                let what = what.lines().next().unwrap_or_default();
                println!("{bug:?}: seed {seed}, S{invariant}: {what}");
                *caught.entry(invariant).or_insert(0) += 1;
            }
            None => missed.push(bug),
        }
    }
    plant(None);
    println!(
        "{} planted; caught by invariant (0: an assertion): {caught:?}",
        Bug::ALL.len()
    );
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "nothing noticed {missed:?}");
    assert_eq!(hunt(), None, "without a bug there is nothing to see");
}
