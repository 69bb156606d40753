//! An engine without a model, in a process of its own, for tests that kill it.
//!
//! It is driven by lines: `receive SLOTS SEED TENANT` is answered by `offer SEED HEX` and, later,
//! `received SEED OUTCOME REASON right|wrong|-`; `send SLOTS SEED TENANT PAUSE_MS HEX` by
//! `sent SEED OUTCOME REASON`. `abort SEED` gives up a lease of `receive`. `tenant SLOTS SEED
//! TENANT` holds slots, and compares every byte of them for a while: `tenant SEED alone`, or what
//! was wrong.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use fabric_client::proto::ids::SlotIndex;
use fabric_client::{LeaseError, Pool};
use fabric_tests::child::commands;
use fabric_tests::light::{self, Job};
use tokio::sync::oneshot;

/// A test's engine: see its source.
#[derive(Debug, Parser)]
struct Cli {
    /// The daemon's socket.
    socket: PathBuf,
    /// The engine's name.
    name: String,
    /// Regions of its pool.
    regions: u16,
    /// Bytes of a page.
    page: u32,
    /// Slots.
    slots: u32,
}

#[tokio::main]
async fn main() -> Result<()> {
    let cli = Cli::parse();
    let spec = light::spec(cli.regions, cli.page, cli.slots);
    let pool = light::pool(&cli.socket, &cli.name, spec).await?;
    println!("ready");
    let mut lines = commands();
    let mut aborts: BTreeMap<String, oneshot::Sender<()>> = BTreeMap::new();
    while let Some(line) = lines.recv().await {
        let words: Vec<&str> = line.split(' ').collect();
        let job = |slots: &str, seed: &str, tenant: &str| -> Result<Job> {
            let (slots, seed) = (
                slots.parse().context("slots")?,
                seed.parse().context("seed")?,
            );
            Ok(Job::new(tenant, cli.regions, slots, seed))
        };
        match words[..] {
            ["receive", slots, seed, tenant] => {
                let (abort, aborted) = oneshot::channel();
                aborts.insert(seed.to_owned(), abort);
                tokio::spawn(receive(pool.clone(), job(slots, seed, tenant)?, aborted));
            }
            ["abort", seed] => {
                let abort = aborts.remove(seed).context("no such lease")?;
                // It may be over.
                let _over = abort.send(());
            }
            ["tenant", slots, seed, tenant] => {
                tokio::spawn(next_tenant(pool.clone(), job(slots, seed, tenant)?));
            }
            ["send", slots, seed, tenant, pause, offer] => {
                let mut job = job(slots, seed, tenant)?;
                job.pause = Duration::from_millis(pause.parse().context("pause")?);
                let offer = hex::decode(offer).context("an offer in hexadecimal")?;
                tokio::spawn(send(pool.clone(), job, offer));
            }
            _ => bail!("unknown command {line}"),
        }
    }
    Ok(())
}

async fn receive(pool: Pool, job: Job, aborted: oneshot::Receiver<()>) {
    let seed = job.seed;
    let lease = match pool.receive(job.wanted()).await {
        Ok(lease) => lease,
        Err(error) => return println!("received {seed} {} -", refused(&error)),
    };
    println!("offer {seed} {}", hex::encode(lease.offer()));
    let delivered = tokio::select! {
        delivered = lease.delivered() => delivered,
        Ok(()) = aborted => return println!("received {seed} aborted dropped -"),
    };
    match delivered {
        Ok(delivered) => {
            let right = match light::check(&delivered, &job) {
                Ok(()) => "right",
                Err(_) => "wrong",
            };
            println!("received {seed} delivered none {right}");
        }
        Err(error) => {
            let outcome = error.outcome;
            println!("received {seed} {} {} -", outcome.label(), outcome.reason());
        }
    }
}

async fn send(pool: Pool, job: Job, offer: Vec<u8>) {
    let seed = job.seed;
    match pool.hold(job.held()).await {
        Ok(held) => {
            let (outcome, _held) = light::send(held, offer, &job).await;
            println!("sent {seed} {} {}", outcome.label(), outcome.reason());
        }
        Err(error) => println!("sent {seed} {}", refused(&error)),
    }
}

async fn next_tenant(pool: Pool, mut job: Job) {
    let seed = job.seed;
    job.source = (0..job.slots).map(SlotIndex).collect();
    let alone = async {
        let held = light::next_tenant(&pool, &job).await?;
        light::nobody_elses_bytes(held, &job).await
    };
    match alone.await {
        Ok(()) => println!("tenant {seed} alone"),
        Err(error) => println!("tenant {seed} {error:#}"),
    }
}

fn refused(error: &LeaseError) -> String {
    if let LeaseError::Rejected(reason) = error {
        format!("rejected {}", reason.label())
    } else {
        "failed daemon_gone".to_owned()
    }
}
