//! A request is aborted in mid-transfer and its slots go to another tenant at once: no write of the
//! first may land there, whenever the abort comes (sglang 35049; nixl 2044; mooncake 4247).

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_client::proto::ids::SlotIndex;
use fabric_client::proto::wire::AbortPolicy;
use fabric_tests::cluster::NodeOptions;
use fabric_tests::light::{self, Pair, spec};
use fabric_tests::random::Random;

const REGIONS: u16 = 16;
const SLOTS: u32 = 16;
const PAGE: u32 = 4096;
const ROUNDS: u64 = 150;

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
    let next = light::next_tenant(&pair.destination, &second).await?;
    for (before, after) in epochs.iter().zip(next.slots()) {
        ensure!(after.index == before.index, "other slots");
        ensure!(
            after.epoch > before.epoch,
            "S6: the epoch went from {before:?} to {after:?}"
        );
    }
    light::nobody_elses_bytes(next, &second)
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

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn no_late_write_over_verbs() -> Result<()> {
    rounds("verbs").await
}
