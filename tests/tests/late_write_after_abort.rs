//! A request is aborted in mid-transfer and its slots go to another tenant at once: no write of the
//! first may land there, whenever the abort comes (sglang 35049; nixl 2044; mooncake 4247).

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_client::proto::ids::SlotIndex;
use fabric_client::proto::wire::AbortPolicy;
use fabric_client::{HeldLease, LeaseError, Pool};
use fabric_tests::cluster::NodeOptions;
use fabric_tests::light::{self, Job, Pair, fill, matches, spec};
use fabric_tests::random::Random;

const REGIONS: u16 = 16;
const SLOTS: u32 = 16;
const PAGE: u32 = 4096;
const ROUNDS: u64 = 150;

/// Leases the same slots for another tenant, as soon as the daemon gives them out again.
async fn next_tenant(pool: &Pool, job: &Job) -> Result<HeldLease> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        match pool.hold(job.held()).await {
            Ok(held) => return Ok(held),
            Err(LeaseError::Rejected(reason)) => {
                let wait = ["slot_not_free", "busy"].contains(&reason.label());
                ensure!(wait, "the next tenant is refused: {reason}");
            }
            Err(error) => return Err(error.into()),
        }
        ensure!(
            tokio::time::Instant::now() < deadline,
            "the slots are never free again"
        );
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

/// Every page of the slots, as the next tenant finds them, then as it leaves them.
async fn nobody_elses_bytes(mut held: HeldLease, job: &Job) -> Result<()> {
    for region in 0..REGIONS {
        for position in 0..SLOTS {
            // S1, S2: scrubbed of the last tenant's bytes, and nothing has landed since.
            let page = held.page(region, position);
            ensure!(
                page.iter().all(|byte| *byte == 0),
                "region {region}, {position}: not scrubbed"
            );
            fill(held.page_mut(region, position), job.seed, region, position);
        }
    }
    tokio::time::sleep(Duration::from_millis(job.seed % 8)).await;
    for region in 0..REGIONS {
        for position in 0..SLOTS {
            let page = held.page(region, position);
            ensure!(
                matches(page, job.seed, region, position),
                "a late write: {region}, {position}"
            );
        }
    }
    held.end();
    Ok(())
}

async fn round(pair: &Pair, random: &mut Random, seed: u64) -> Result<&'static str> {
    let mut first = pair.job("first", SLOTS, seed * 2);
    first.destination = (0..SLOTS).map(SlotIndex).collect();
    first.pause = Duration::from_micros(random.below(800));
    let lease = pair
        .destination
        .receive(first.wanted())
        .await
        .context("first lease")?;
    let epochs: Vec<_> = lease.slots().to_vec();
    let held = pair
        .source
        .hold(first.held())
        .await
        .context("source's lease")?;
    let offer = lease.offer().to_vec();
    let job = first.clone();
    let sent = tokio::spawn(async move { light::send(held, offer, &job).await.0 });
    tokio::time::sleep(Duration::from_micros(random.below(12_000))).await;
    match random.below(3) {
        0 => lease.abort(AbortPolicy::DrainNow),
        1 => lease.abort(AbortPolicy::FinishTransfer),
        _ => drop(lease),
    }
    let mut second = pair.job("second", SLOTS, seed * 2 + 1);
    second.source = (0..SLOTS).map(SlotIndex).collect();
    let next = next_tenant(&pair.destination, &second).await?;
    for (before, after) in epochs.iter().zip(next.slots()) {
        ensure!(after.index == before.index, "other slots");
        ensure!(
            after.epoch > before.epoch,
            "S6: the epoch went from {before:?} to {after:?}"
        );
    }
    nobody_elses_bytes(next, &second)
        .await
        .with_context(|| format!("round {seed}"))?;
    let outcome = tokio::time::timeout(light::TRANSFER_LIMIT, sent).await;
    Ok(outcome
        .context("the source has no outcome")?
        .context("the source's task")?
        .label())
}

async fn rounds(plane: &'static str) -> Result<()> {
    let mut random = Random::from_environment("late_write_after_abort");
    let nodes = ["prefill", "decode"].map(|name| {
        NodeOptions::new(name)
            .plane(plane)
            .settings("[log]\nlevel = \"warn\"")
    });
    let pair = Pair::start(nodes, spec(REGIONS, PAGE, SLOTS)).await?;
    let mut outcomes = std::collections::BTreeMap::new();
    for seed in 1..=ROUNDS {
        *outcomes
            .entry(round(&pair, &mut random, seed).await?)
            .or_insert(0_u32) += 1;
    }
    eprintln!("{plane}: what the sources heard: {outcomes:?}");
    assert!(
        outcomes.contains_key("aborted"),
        "no abort came in mid-transfer: {outcomes:?}"
    );
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_late_write_over_quic() -> Result<()> {
    rounds("quic").await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_late_write_over_shm() -> Result<()> {
    rounds("shm").await
}
