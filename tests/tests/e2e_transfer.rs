//! Transfers between real daemons: delivered byte for byte, or refused with a reason.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use fabric_client::LeaseError;
use fabric_client::proto::ids::SlotIndex;
use fabric_client::proto::outcome::{Failure, Outcome, Rejection};
use fabric_client::proto::pool::PoolSpec;
use fabric_tests::cluster::NodeOptions;
use fabric_tests::light::{self, Pair, pool, spec, transfer};
use fabric_tests::random::Random;

fn nodes(plane: &'static str) -> [NodeOptions; 2] {
    ["prefill", "decode"].map(|name| NodeOptions::new(name).plane(plane))
}

async fn many_shapes_arrive(plane: &'static str) -> Result<()> {
    let pair = Pair::start(nodes(plane), spec(60, 6144, 96)).await?;
    for (seed, slots) in (1..).zip([1, 2, 17, 64, 96]) {
        let delivered = pair.delivers(&pair.job("a", slots, seed)).await?;
        assert_eq!(delivered.stats().pages, 60 * u64::from(slots));
        assert_eq!(delivered.stats().attempts, 1);
    }
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_arrives_over_quic() -> Result<()> {
    many_shapes_arrive("quic").await
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_arrives_over_shm() -> Result<()> {
    many_shapes_arrive("shm").await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn every_byte_arrives_over_verbs() -> Result<()> {
    many_shapes_arrive("verbs").await?;
    pages_arrive("verbs").await
}

async fn pages_arrive(plane: &'static str) -> Result<()> {
    for (page, slots) in [(1, 300), (4093, 50), (3 << 20, 3)] {
        let pair = Pair::start(nodes(plane), spec(2, page, slots)).await?;
        drop(pair.delivers(&pair.job("a", slots, 9)).await?);
        pair.passed().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_and_large_pages_arrive() -> Result<()> {
    pages_arrive("quic").await?;
    pages_arrive("shm").await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_engines_of_one_daemon_reach_each_other() -> Result<()> {
    let mut nodes = nodes("shm");
    nodes[1] = nodes[1].clone().engine("other", &["*"]);
    let pair = Pair::start(nodes, spec(4, 4096, 32)).await?;
    let other = pool(&pair.cluster.nodes[1].socket(), "other", spec(4, 4096, 32)).await?;
    let job = pair.job("a", 32, 5);
    let ended = transfer(&other, &pair.destination, &job).await?;
    assert_eq!(ended.source, Outcome::Delivered);
    light::check(&ended.destination.context("delivered")?, &job)?;
    drop(other);
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_that_the_engine_names_are_the_ones_that_are_used() -> Result<()> {
    for plane in ["quic", "shm"] {
        let pair = Pair::start(nodes(plane), spec(3, 4096, 64)).await?;
        let mut job = pair.job("a", 40, 3);
        let named = |seed| -> Vec<SlotIndex> {
            let order = Random::new(seed).permutation(64);
            order.into_iter().take(40).map(SlotIndex).collect()
        };
        (job.source, job.destination) = (named(1), named(2));
        let delivered = pair.delivers(&job).await?;
        let used: Vec<SlotIndex> = delivered.slots().iter().map(|slot| slot.index).collect();
        assert_eq!(
            used, job.destination,
            "in the order in which they were named"
        );
        let Err(LeaseError::Rejected(reason)) = pair.destination.receive(job.wanted()).await else {
            bail!("slots that are held were leased again");
        };
        assert_eq!(reason.label(), "slot_not_free");
        drop(delivered);
        pair.passed().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_fit_is_refused_with_both_numbers_before_any_slot_is_leased() -> Result<()> {
    let pair = Pair::start(nodes("quic"), spec(2, 4096, 16)).await?;
    let too_long = pair.job("a", 17, 1);
    for pool in [&pair.source, &pair.destination] {
        let refused = pool.receive(too_long.wanted()).await.map(drop);
        let want = Rejection::ExceedsContext {
            tokens: 17,
            context: 16,
        };
        assert_eq!(refused, Err(LeaseError::Rejected(want)));
    }
    let first = pair
        .destination
        .receive(pair.job("a", 10, 2).wanted())
        .await?;
    let refused = pair
        .destination
        .receive(pair.job("a", 10, 3).wanted())
        .await
        .map(drop);
    let want = Rejection::Busy {
        slots_needed: 10,
        slots_free: 6,
    };
    assert_eq!(refused, Err(LeaseError::Rejected(want)));
    drop(first);
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_smaller_than_its_context_is_refused_with_both_numbers() -> Result<()> {
    let pair = Pair::start(nodes("quic"), spec(2, 4096, 16)).await?;
    let spec = PoolSpec {
        context_tokens: 17,
        ..spec(2, 4096, 16)
    };
    let refused = pair.source.session().register_pool(spec).await.map(drop);
    let text = format!("{refused:?}");
    assert!(text.contains("17") && text.contains("16"), "{text}");
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_is_served_by_its_own_engines_alone() -> Result<()> {
    let mut nodes = nodes("quic");
    nodes[1] = nodes[1].clone().engine("for-b", &["b"]);
    let pair = Pair::start(nodes, spec(2, 4096, 16)).await?;
    let socket = pair.cluster.nodes[1].socket();
    let for_b = pool(&socket, "for-b", spec(2, 4096, 16)).await?;
    let refused = for_b.receive(pair.job("a", 4, 1).wanted()).await.map(drop);
    assert_eq!(
        refused,
        Err(LeaseError::Rejected(Rejection::TenantNotAllowed))
    );
    let stranger = pool(&socket, "stranger", spec(2, 4096, 16)).await;
    assert!(stranger.is_err(), "an engine that nobody configured got in");
    // A source that holds its pages for another tenant than the offer's.
    let lease = pair
        .destination
        .receive(pair.job("a", 4, 2).wanted())
        .await?;
    let held = pair.source.hold(pair.job("b", 4, 2).held()).await?;
    let offer = lease.offer().to_vec();
    let (outcome, held) = light::send(held, offer, &pair.job("b", 4, 2)).await;
    assert_eq!(outcome, Outcome::Rejected(Rejection::TenantMismatch));
    drop((lease, held, for_b));
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn other_layouts_are_refused_and_never_converted() -> Result<()> {
    let mut nodes = nodes("quic");
    nodes[0] = nodes[0].clone().engine("other", &["*"]);
    let pair = Pair::start(nodes, spec(2, 4096, 16)).await?;
    let other = pool(&pair.cluster.nodes[0].socket(), "other", spec(2, 8192, 16)).await?;
    let job = pair.job("a", 4, 1);
    let lease = pair.destination.receive(job.wanted()).await?;
    let held = other.hold(job.held()).await?;
    let (outcome, held) = light::send(held, lease.offer().to_vec(), &job).await;
    let Outcome::Rejected(reason) = outcome else {
        bail!("not rejected: {outcome}");
    };
    assert_eq!(reason.label(), "layout_mismatch");
    drop((lease, held, other));
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn offers_that_are_forged_used_or_expired_open_nothing() -> Result<()> {
    let mut nodes = nodes("quic");
    nodes[1] = nodes[1].clone().settings("[transfer]\noffer_ttl_ms = 600");
    let pair = Pair::start(nodes, spec(2, 4096, 32)).await?;
    let send = async |offer: Vec<u8>, seed| -> Result<Outcome> {
        let job = pair.job("a", 4, seed);
        let held = pair.source.hold(job.held()).await?;
        let limit = light::TRANSFER_LIMIT;
        let sent = tokio::time::timeout(limit, light::send(held, offer, &job)).await;
        Ok(sent.context("a send without an outcome")?.0)
    };
    // S7: one bit of the signature.
    let lease = pair
        .destination
        .receive(pair.job("a", 4, 1).wanted())
        .await?;
    let mut forged = lease.offer().to_vec();
    *forged.last_mut().context("an offer has bytes")? ^= 1;
    assert_eq!(
        send(forged, 1).await?,
        Outcome::Rejected(Rejection::OfferForged)
    );
    assert_eq!(
        send(vec![0xff; 100], 1).await?.label(),
        "rejected",
        "no offer at all"
    );
    drop(lease);
    // S6: used once, it is good for nothing more.
    let job = pair.job("a", 4, 2);
    let lease = pair.destination.receive(job.wanted()).await?;
    let used = lease.offer().to_vec();
    let held = pair.source.hold(job.held()).await?;
    let ended = light::finish(lease, held, &job).await?;
    assert_eq!(ended.source, Outcome::Delivered);
    assert_eq!(
        send(used.clone(), 3).await?.label(),
        "rejected",
        "while its lease lives"
    );
    drop(ended);
    assert_eq!(
        send(used, 4).await?.label(),
        "rejected",
        "after its lease has ended"
    );
    // Past its time. The lease's own outcome says that nobody came.
    let lease = pair
        .destination
        .receive(pair.job("a", 4, 5).wanted())
        .await?;
    let late = lease.offer().to_vec();
    let unused = tokio::time::timeout(light::TRANSFER_LIMIT, lease.delivered()).await?;
    let outcome = unused.err().context("delivered without a source")?.outcome;
    assert_eq!(outcome.reason(), "offer_unused", "{outcome}");
    assert_eq!(send(late, 5).await?.label(), "rejected");
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_daemon_refuses_the_offers_of_its_earlier_life() -> Result<()> {
    let mut pair = Pair::start(nodes("quic"), spec(2, 4096, 16)).await?;
    let job = pair.job("a", 4, 1);
    let old = pair.destination.receive(job.wanted()).await?;
    let offer = old.offer().to_vec();
    pair.cluster.nodes[1].kill()?;
    let outcome = old
        .delivered()
        .await
        .err()
        .context("delivered by nobody")?
        .outcome;
    assert_eq!(outcome, Outcome::Failed(Failure::DaemonGone));
    pair.cluster.restart(1).await?;
    pair.destination = pool(&pair.cluster.nodes[1].socket(), "engine", spec(2, 4096, 16)).await?;
    let held = pair.source.hold(job.held()).await?;
    let (outcome, held) = light::send(held, offer, &job).await;
    // S6: its next life draws a new secret and counts up: either check may refuse first.
    let refused = ["offer_stale", "offer_forged"].contains(&outcome.reason());
    assert!(refused, "{outcome}");
    drop(held);
    drop(pair.delivers(&pair.job("a", 16, 2)).await?);
    pair.passed().await
}

/// The node whose daemon flips bits: the source's where it copies, else the destination's.
fn flipper(plane: &str) -> usize {
    usize::from(plane != "quic")
}

/// Its peer still has a link to the life that was killed: the network says nothing of its end.
async fn restarted(plane: &'static str) -> Result<()> {
    let mut pair = Pair::start(nodes(plane), spec(2, 4096, 16)).await?;
    drop(pair.delivers(&pair.job("a", 16, 1)).await?);
    pair.cluster.nodes[1].kill()?;
    pair.cluster.restart(1).await?;
    let socket = pair.cluster.nodes[1].socket();
    pair.destination = pool(&socket, "engine", spec(2, 4096, 16)).await?;
    drop(pair.delivers(&pair.job("a", 16, 2)).await?);
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_daemon_is_served_at_once() -> Result<()> {
    restarted("quic").await?;
    restarted("shm").await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_restarted_daemon_is_served_at_once_over_verbs() -> Result<()> {
    restarted("verbs").await
}

/// Its windows must go before the queue pairs that they are bound on: else the kernel waits for
/// them, 50 s with soft-RoCE, and then frees what is still in use.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_daemon_that_is_killed_with_windows_bound_is_gone_at_once() -> Result<()> {
    let mut nodes = nodes("verbs");
    let stall = "[fault]\nstall_after_bytes = 262144";
    nodes[0] = nodes[0].clone().settings(stall);
    nodes[1] = nodes[1].clone().settings("[transfer]\ndrain_ms = 30000");
    let mut pair = Pair::start(nodes, spec(2, 4096, 64)).await?;
    // Its windows are kept, and the link's next life has new queue pairs.
    drop(pair.delivers(&pair.job("a", 16, 1)).await?);
    pair.cluster.nodes[0].kill()?;
    pair.cluster.restart(0).await?;
    let socket = pair.cluster.nodes[0].socket();
    pair.source = pool(&socket, "engine", spec(2, 4096, 64)).await?;
    let job = pair.job("a", 64, 2);
    // Long enough for the writer to stall.
    tokio::select! {
        ended = transfer(&pair.source, &pair.destination, &job) => bail!("not stalled: {ended:?}"),
        () = tokio::time::sleep(Duration::from_secs(3)) => {}
    }
    let opened = pair.cluster.metrics(1).await?;
    assert_eq!(opened.sum("fabric_grants_opened_total"), 2.0);
    let killed = Instant::now();
    pair.cluster.nodes[1].kill()?;
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(30), "gone after {took:?}");
    pair.cluster.restart(1).await?;
    pair.cluster.slots_all_free(0).await?;
    pair.destination = pool(&pair.cluster.nodes[1].socket(), "engine", spec(2, 4096, 64)).await?;
    drop(pair.delivers(&pair.job("a", 16, 3)).await?);
    pair.passed().await
}

async fn flipped(plane: &'static str) -> Result<()> {
    let mut nodes = nodes(plane);
    let flipper = flipper(plane);
    nodes[flipper] = nodes[flipper].clone().settings("[fault]\nflip_pages = 1");
    let pair = Pair::start(nodes, spec(8, 4096, 32)).await?;
    let delivered = pair.delivers(&pair.job("a", 32, 1)).await?;
    assert_eq!(
        (delivered.stats().attempts, delivered.stats().corrupt),
        (2, 1)
    );
    drop(delivered);
    let metrics = pair.cluster.metrics(1).await?;
    assert_eq!(metrics.value("fabric_pages_corrupt_total"), 1.0);
    assert_eq!(metrics.value("fabric_pages_verified_total"), 256.0);
    assert_eq!(metrics.value("fabric_pages_arrived_total"), 257.0);
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_is_caught_and_only_its_page_sent_again() -> Result<()> {
    flipped("quic").await?;
    flipped("shm").await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_flipped_bit_is_caught_over_verbs() -> Result<()> {
    flipped("verbs").await?;
    corrupt(&["verbs"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_stays_corrupt_fails_the_transfer() -> Result<()> {
    corrupt(&["quic", "shm"]).await
}

async fn corrupt(planes: &[&'static str]) -> Result<()> {
    for plane in planes {
        let mut nodes = nodes(plane);
        let flipper = flipper(plane);
        nodes[flipper] = nodes[flipper]
            .clone()
            .settings("[fault]\nflip_pages = 1000000");
        let pair = Pair::start(nodes, spec(2, 4096, 8)).await?;
        let ended = transfer(&pair.source, &pair.destination, &pair.job("a", 8, 1)).await?;
        assert_eq!(ended.source.reason(), "corrupt", "{}", ended.source);
        let outcome = ended
            .destination
            .err()
            .context("corrupt pages were delivered")?
            .outcome;
        assert_eq!(outcome.reason(), "corrupt", "{outcome}");
        pair.passed().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_falls_silent_is_fenced() -> Result<()> {
    silent(&["quic", "shm"]).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn a_writer_that_falls_silent_is_fenced_over_verbs() -> Result<()> {
    silent(&["verbs"]).await
}

async fn silent(planes: &[&'static str]) -> Result<()> {
    for plane in planes {
        let mut nodes = nodes(plane);
        nodes[0] = nodes[0]
            .clone()
            .settings("[fault]\nstall_after_bytes = 65536");
        nodes[1] = nodes[1].clone().settings("[transfer]\nsilence_ms = 500");
        let pair = Pair::start(nodes, spec(8, 4096, 32)).await?;
        let ended = transfer(&pair.source, &pair.destination, &pair.job("a", 32, 1)).await?;
        assert_eq!(ended.source.label(), "failed", "{}", ended.source);
        let outcome = ended
            .destination
            .err()
            .context("half was delivered")?
            .outcome;
        assert_eq!(outcome.label(), "failed", "{outcome}");
        let metrics = pair.cluster.metrics(1).await?;
        let fenced = metrics.value("fabric_grants_closed_total{stopped_by=\"fence\"}");
        assert_eq!(fenced, 1.0, "the proof was a fence");
        pair.passed().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bits_flipped_and_datagrams_lost_on_the_way_change_nothing() -> Result<()> {
    let nodes = nodes("quic").map(NodeOptions::proxied);
    let pair = Pair::start(nodes, spec(8, 4096, 32)).await?;
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    for node in &pair.cluster.nodes {
        let proxy = node.proxy.as_ref().context("the node is proxied")?;
        for path in [&proxy.forward, &proxy.backward] {
            path.flip_permille.store(10, relaxed);
            path.drop_permille.store(10, relaxed);
        }
    }
    for seed in 1..=8 {
        drop(pair.delivers(&pair.job("a", 32, seed)).await?);
    }
    let proxies = pair
        .cluster
        .nodes
        .iter()
        .filter_map(|node| node.proxy.as_ref());
    let paths = proxies.flat_map(|proxy| [&proxy.forward, &proxy.backward]);
    let flipped: u64 = paths.map(|path| path.flipped.load(relaxed)).sum();
    assert!(flipped > 0, "nothing was flipped, so nothing was tested");
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_is_told_to_stop_drains_and_exits() -> Result<()> {
    for index in [0, 1] {
        let mut pair = Pair::start(nodes("quic"), spec(16, 4096, 64)).await?;
        let mut job = pair.job("a", 64, 1);
        job.pause = Duration::from_millis(20);
        let (source, destination) = (pair.source.clone(), pair.destination.clone());
        let running = tokio::spawn(async move { transfer(&source, &destination, &job).await });
        tokio::time::sleep(Duration::from_millis(120)).await;
        let mut daemon = pair.cluster.nodes[index].daemon.take().context("it runs")?;
        daemon.terminate()?;
        let status = daemon.ended(Duration::from_secs(15)).await?;
        assert!(
            status.success(),
            "node {index} did not drain: {status}\n{}",
            daemon.tail(40)
        );
        let ended = running.await.context("the transfer's task")??;
        let told = ended
            .destination
            .map_or_else(|error| error.outcome, |_| Outcome::Delivered);
        let honest = ended.source != Outcome::Delivered || told == Outcome::Delivered;
        assert!(honest, "source: {}, destination: {told}", ended.source);
        pair.cluster.slots_all_free(1 - index).await?;
        pair.cluster.loud = false;
    }
    Ok(())
}
