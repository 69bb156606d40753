//! Runs seeds: a fixed set, one alone, or fresh ones for a while.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use fabric_sim::run::run;

/// Simulates whole clusters of the production machine under faults, one seed after another.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// Run this seed alone.
    #[arg(long)]
    seed: Option<u64>,
    /// Run the seeds from 0 to this one.
    #[arg(long, default_value_t = 2_000)]
    seeds: u64,
    /// Then run fresh seeds for this many seconds.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Then run fresh seeds for this many hours.
    #[arg(long, default_value_t = 0)]
    hours: u64,
    /// The largest cluster.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..=64))]
    nodes: u64,
    /// The most events of a run's first phase.
    #[arg(long, default_value_t = 5_000)]
    events: usize,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Its message is in the violation.
    std::panic::set_hook(Box::new(|_| ()));
    let begin = Instant::now();
    let mut total = Total::default();
    let fixed = cli.seed.map_or(0..cli.seeds, |seed| seed..seed + 1);
    for seed in fixed {
        if !total.run(seed, &cli) {
            return ExitCode::FAILURE;
        }
    }
    let until = begin + Duration::from_secs(cli.seconds + cli.hours * 3600);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut seed = since_epoch.map_or(0, |time| time.as_secs() << 24);
    while cli.seed.is_none() && Instant::now() < until {
        if !total.run(seed, &cli) {
            return ExitCode::FAILURE;
        }
        seed += 1;
    }
    let Total { runs, events, .. } = total;
    let hours = total.virtual_time.as_secs() / 3600;
    println!(
        "{runs} runs, {events} events, {hours} virtual hours of daemons; every invariant holds."
    );
    println!("What both sides heard:");
    for ((kind, reason), count) in total.outcomes {
        println!("{count:>9} {kind} {reason}");
    }
    ExitCode::SUCCESS
}

#[derive(Default)]
struct Total {
    runs: u64,
    events: usize,
    virtual_time: Duration,
    outcomes: BTreeMap<(&'static str, &'static str), u64>,
}

impl Total {
    fn run(&mut self, seed: u64, cli: &Cli) -> bool {
        match run(seed, cli.nodes, cli.events) {
            Ok(summary) => {
                self.runs += 1;
                self.events += summary.events + summary.settling;
                self.virtual_time += summary.virtual_time;
                for (kind, count) in summary.outcomes {
                    *self.outcomes.entry(kind).or_default() += count;
                }
                true
            }
            Err(world) => {
                let (nodes, events) = (cli.nodes, cli.events);
                eprintln!("seed {seed}: {:?}", world.violation());
                eprintln!("{world:#?}");
                eprintln!(
                    "again: cargo run --release -p fabric-sim -- --seed {seed} --nodes {nodes} \
                     --events {events}"
                );
                false
            }
        }
    }
}
