//! Two virtual hosts on one wire, each with a daemon and its own RDMA device: here is the one that
//! receives, and the other can lose its power.

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_tests::cluster::{Cluster, NodeOptions};
use fabric_tests::completions::Ask;
use fabric_tests::host::Host;
use fabric_tests::programs::Programs;
use fabric_tests::world::{DESTINATION, Fault, SOURCE, Terms, World};

fn terms() -> Result<Terms> {
    let terms = Terms::here("verbs").emulated();
    let hosts = Host::pair()?;
    hosts[SOURCE].wait(BOOT_LIMIT)?;
    Ok(Terms { hosts, ..terms })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs two hosts with RDMA devices: tests/rdma/run"]
async fn whoever_is_killed_on_either_host() -> Result<()> {
    let faults = [
        Fault::Abort,
        Fault::KillEngine(SOURCE),
        Fault::KillDaemon(SOURCE),
        Fault::KillEngine(DESTINATION),
        Fault::KillDaemon(DESTINATION),
    ];
    let mut world = World::start(terms()?).await?;
    world.rounds(&faults, 20, "two_hosts_killed").await?;
    world.passed();
    Ok(())
}

/// The writer's host loses its power in the midst of its writes; the destination frees the slots by
/// itself, while the other is away.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs two hosts with RDMA devices: tests/rdma/run"]
async fn writer_whose_host_loses_its_power() -> Result<()> {
    let mut world = World::start(terms()?).await?;
    let rounds = std::env::var("FABRIC_POWER_CUTS");
    let rounds = rounds.map_or(Ok(3), |text| text.parse());
    let rounds = rounds.context("FABRIC_POWER_CUTS is a number")?;
    let faults = [Fault::PowerOff(SOURCE)];
    world.rounds(&faults, rounds, "two_hosts_power").await?;
    world.passed();
    Ok(())
}

/// The demo's job: prefill there, decode here, and the text is a single node's.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs two hosts with RDMA devices: tests/rdma/run"]
async fn a_real_prompt_is_prefilled_on_one_host_and_decoded_on_another() -> Result<()> {
    let programs = Programs::find()?;
    let hosts = terms()?.hosts;
    let node = |name, host| NodeOptions::new(name).plane("verbs").on(host);
    let nodes = vec![
        node("prefill", hosts[SOURCE]),
        node("decode", hosts[DESTINATION]),
    ];
    let mut cluster = Cluster::start(&programs.daemon, nodes).await?;
    cluster.loud = true;
    let sockets = [0, 1].map(|index| cluster.nodes[index].socket().display().to_string());
    let arguments = |role: &str, index: usize, more: &[&str]| -> Vec<String> {
        let mut all = vec!["--role", role, "--model", "smollm2", "--context", "64"];
        if role != "single" {
            all.extend(["--slots", "4", "--daemon", &sockets[index]]);
        }
        all.extend(more);
        all.into_iter().map(ToOwned::to_owned).collect()
    };
    let engine = &programs.engine;
    let alone = arguments("single", DESTINATION, &[]);
    let single = cluster
        .engine(DESTINATION, engine, "single", &alone)
        .await?;
    let ask = Ask::new("a", PROMPT, 3);
    let alone = ask.whole(cluster.http(), &single).await?;
    let alone = alone.map_err(|refusal| anyhow::anyhow!("single: {}", refusal.body))?;
    // One model in memory at a time on each host.
    cluster.process("single")?.kill();
    let there = arguments("prefill", SOURCE, &[]);
    let prefill = cluster.engine(SOURCE, engine, "prefill", &there).await?;
    let here = arguments("decode", DESTINATION, &["--prefill", &prefill]);
    let decode = cluster.engine(DESTINATION, engine, "decode", &here).await?;
    let answer = ask.whole(cluster.http(), &decode).await?;
    let answer = answer.map_err(|refusal| anyhow::anyhow!("fabric: {}", refusal.body))?;
    ensure!(
        answer.text == alone.text,
        "{:?}, alone {:?}",
        answer.text,
        alone.text
    );
    ensure!(answer.fabric["outcome"] == "delivered", "{}", answer.fabric);
    let tokens = answer.usage["prompt_tokens"].as_u64().context("usage")?;
    let pages = tokens.div_ceil(16) * 60;
    ensure!(
        answer.fabric["pages"] == pages,
        "60 regions a slot: {}",
        answer.fabric
    );
    eprintln!(
        "{tokens} tokens, {pages} pages over verbs: {:?}",
        answer.text
    );
    cluster.slots_all_free(DESTINATION).await?;
    cluster.loud = false;
    Ok(())
}

/// Short, as it is computed on emulated processors: some ten seconds a token.
const PROMPT: &str = "The capital of France is";

/// A bound against hanging.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
