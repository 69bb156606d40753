//! Whoever is killed, at whatever moment of a transfer: the survivors hear a true outcome within
//! 5 s, and no slot leaks (vllm 46289, 49238, 55471; sglang 29978).

#![forbid(unsafe_code)]

use anyhow::Result;
use fabric_tests::world::{DESTINATION, Fault, SOURCE, Terms, World};

async fn rounds(faults: &[Fault], plane: &'static str, count: usize) -> Result<()> {
    let mut world = World::start(Terms::here(plane)).await?;
    world.rounds(faults, count, "killed").await?;
    world.passed();
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_source_engine() -> Result<()> {
    rounds(&[Fault::KillEngine(SOURCE)], "quic", 16).await?;
    rounds(&[Fault::KillEngine(SOURCE)], "shm", 12).await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_destination_engine() -> Result<()> {
    rounds(&[Fault::KillEngine(DESTINATION)], "quic", 16).await?;
    rounds(&[Fault::KillEngine(DESTINATION)], "shm", 12).await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_source_daemon() -> Result<()> {
    rounds(&[Fault::KillDaemon(SOURCE)], "quic", 12).await?;
    rounds(&[Fault::KillDaemon(SOURCE)], "shm", 12).await
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_destination_daemon() -> Result<()> {
    rounds(&[Fault::KillDaemon(DESTINATION)], "quic", 12).await?;
    rounds(&[Fault::KillDaemon(DESTINATION)], "shm", 12).await
}

#[tokio::test(flavor = "multi_thread")]
async fn link_cut() -> Result<()> {
    rounds(&[Fault::CutLink], "quic", 12).await?;
    rounds(&[Fault::CutLink], "shm", 8).await
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_peer_daemon() -> Result<()> {
    let faults = [Fault::StopDaemon(SOURCE), Fault::StopDaemon(DESTINATION)];
    rounds(&faults, "quic", 12).await?;
    rounds(&faults, "shm", 8).await
}

/// Two daemons on one host, whose queue pairs are connected through its device.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn whoever_is_killed_over_verbs() -> Result<()> {
    let faults = [
        Fault::KillEngine(SOURCE),
        Fault::KillEngine(DESTINATION),
        Fault::KillDaemon(SOURCE),
        Fault::KillDaemon(DESTINATION),
        Fault::CutLink,
        Fault::StopDaemon(SOURCE),
        Fault::StopDaemon(DESTINATION),
        Fault::Abort,
    ];
    let mut world = World::start(Terms::here("verbs").emulated()).await?;
    world.rounds(&faults, 32, "killed").await?;
    world.passed();
    Ok(())
}
