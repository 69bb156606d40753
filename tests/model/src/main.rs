//! Explores one cluster, as large as there is memory and time for.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use fabric_model::{Exhaustive, pair};
use fabric_sim::Budget;
use stateright::{Checker, Model};

/// Follows every order of events of a small cluster of the production machine.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Requests of different tenants on the same slot.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=4))]
    requests: u8,
    /// Slots of both pools.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4))]
    slots: u32,
    /// Regions.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=4))]
    regions: u16,
    /// Leases that end early, transfers that are stopped.
    #[arg(long, default_value_t = 0)]
    aborts: u32,
    /// Links that break.
    #[arg(long, default_value_t = 0)]
    cuts: u32,
    /// Daemons that die and come back.
    #[arg(long, default_value_t = 0)]
    daemon_crashes: u32,
    /// Engines that die and come back.
    #[arg(long, default_value_t = 0)]
    engine_crashes: u32,
    /// Bits that flip.
    #[arg(long, default_value_t = 0)]
    flips: u32,
    /// Deadlines that pass.
    #[arg(long, default_value_t = 0)]
    ticks: u32,
    /// Offers that are brought twice, or to another tenant's prefill.
    #[arg(long, default_value_t = 0)]
    misroutes: u32,
    /// Links of which one direction breaks first.
    #[arg(long, default_value_t = 0)]
    one_way: u32,
    /// Things that a daemon says or writes and should not.
    #[arg(long, default_value_t = 0)]
    lies: u32,
    /// Daemons that are told to shut down.
    #[arg(long, default_value_t = 0)]
    shutdowns: u32,
    /// Requests that are tried again.
    #[arg(long, default_value_t = 0)]
    retries: u32,
    /// Stop after this many distinct states.
    #[arg(long, default_value_t = 100_000_000)]
    states: usize,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let budget = Budget {
        aborts: cli.aborts,
        cuts: cli.cuts,
        daemon_crashes: cli.daemon_crashes,
        engine_crashes: cli.engine_crashes,
        flips: cli.flips,
        ticks: cli.ticks,
        misroutes: cli.misroutes,
        one_way: cli.one_way,
        lies: cli.lies,
        shutdowns: cli.shutdowns,
        retries: cli.retries,
        ..Budget::default()
    };
    let mut setup = pair(cli.requests, budget);
    setup.nodes = vec![vec![cli.slots]; 2];
    setup.regions = cli.regions;
    let model = Exhaustive {
        setup,
        sometimes: Vec::new(),
    };
    let begin = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let checker = model.checker().threads(threads);
    let checker = checker.target_state_count(cli.states).spawn_dfs();
    while !checker.is_done() {
        std::thread::sleep(Duration::from_secs(1));
        eprint!("\r{} distinct states", checker.unique_state_count());
    }
    let checker = checker.join();
    eprintln!();
    let found: BTreeMap<_, _> = checker.discoveries().into_iter().collect();
    println!(
        "{} distinct states, {} in all, depth {}, {:.1} s, {} violations",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        begin.elapsed().as_secs_f64(),
        found.len()
    );
    for (name, path) in &found {
        let last = path.last_state();
        println!("{name}: {:?}", last.violation());
        for event in path.clone().into_actions() {
            println!("  {event:?}");
        }
    }
    if found.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
