//! Two virtual hosts on one wire, each with a daemon and its own RDMA device: here is the one that
//! receives, and the other can lose its power.

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result};
use fabric_tests::cluster::NodeOptions;
use fabric_tests::completions::Ask;
use fabric_tests::host::Host;
use fabric_tests::programs::Programs;
use fabric_tests::real_model::same_text;
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
    let rounds = rounds.map_or(Ok(6), |text| text.parse());
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
    let programs = Programs::find(&["verbs"])?;
    let hosts = terms()?.hosts;
    let node = |name, host| NodeOptions::new(name).plane("verbs").on(host);
    let nodes = [
        node("prefill", hosts[SOURCE]),
        node("decode", hosts[DESTINATION]),
    ];
    same_text(&programs, nodes, 64, &Ask::new("a", PROMPT, 3)).await
}

/// Short, as it is computed on emulated processors: some ten seconds a token.
const PROMPT: &str = "The capital of France is";

/// A bound against hanging.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
