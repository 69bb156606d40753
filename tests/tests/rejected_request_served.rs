//! A request that was turned away must never go on as if it were live (sglang 30233, 38935).

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_client::LeaseError;
use fabric_tests::cluster::NodeOptions;
use fabric_tests::light::{self, Pair, pool, spec};

/// The prompt fits into the decode pool and not into the prefill pool: the leak's own shape.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_beyond_the_prefill_pool_delivers_nothing() -> Result<()> {
    let mut nodes = ["prefill", "decode"].map(|name| NodeOptions::new(name).plane("quic"));
    nodes[0] = nodes[0].clone().engine("small", &["*"]);
    nodes[1] = nodes[1].clone().settings("[transfer]\noffer_ttl_ms = 500");
    let pair = Pair::start(nodes, spec(2, 4096, 64)).await?;
    let small = pool(&pair.cluster.nodes[0].socket(), "small", spec(2, 4096, 8)).await?;
    // Somebody else's bytes are on the very slots that the request will get.
    drop(pair.delivers(&pair.job("victim", 64, 1)).await?);
    let job = pair.job("asker", 64, 2);
    let lease = pair.destination.receive(job.wanted()).await?;
    let Err(LeaseError::Rejected(reason)) = small.hold(job.held()).await else {
        anyhow::bail!("a prompt of 64 tokens got into a pool of 8");
    };
    ensure!(reason.numbers() == (64, 8), "not both numbers: {reason}");
    // What remains: a smaller lease than the offer asks for is refused as well.
    let part = light::Job {
        slots: 8,
        ..job.clone()
    };
    let held = small.hold(part.held()).await?;
    let (outcome, held) = light::send(held, lease.offer().to_vec(), &part).await;
    ensure!(
        outcome.label() == "rejected",
        "half a prompt was accepted: {outcome}"
    );
    drop(held);
    // S3: the destination has an outcome, and no way to a byte.
    let delivery = tokio::time::timeout(Duration::from_secs(10), lease.delivered()).await;
    let outcome = delivery
        .context("no outcome")?
        .err()
        .context("it was served")?
        .outcome;
    ensure!(outcome.label() != "delivered", "{outcome}");
    drop(small);
    pair.passed().await
}
