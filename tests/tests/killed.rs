//! Whoever is killed, at whatever moment of a transfer: the survivors hear a true outcome within
//! 5 s, and no slot leaks (vllm 46289, 49238, 55471; sglang 29978).

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_tests::child::LineChild;
use fabric_tests::cluster::{Cluster, NodeOptions};
use fabric_tests::programs::{Programs, own_binary};
use fabric_tests::random::Random;

const SOURCE: usize = 0;
const DESTINATION: usize = 1;
/// The issue's: a true outcome within 5 s.
const OUTCOME_LIMIT: Duration = Duration::from_secs(5);
const START_LIMIT: Duration = Duration::from_secs(20);

/// What happens to whom.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Fault {
    KillDaemon(usize),
    KillEngine(usize),
    CutLink,
    StopDaemon(usize),
}

/// Two daemons and two engines, all of them processes.
struct World {
    cluster: Cluster,
    program: PathBuf,
    engines: Vec<LineChild>,
    seed: u64,
}

impl World {
    async fn start(plane: &'static str) -> Result<Self> {
        // A fault may come before the source reaches the destination: then the offer's time is the
        // bound, and it is less than the limit as well.
        let nodes = ["prefill", "decode"].map(|name| {
            let settings = "[transfer]\noffer_ttl_ms = 3000";
            NodeOptions::new(name)
                .plane(plane)
                .proxied()
                .settings(settings)
        });
        let mut cluster = Cluster::start(&Programs::find_daemon()?, nodes.to_vec()).await?;
        cluster.loud = true;
        let mut world = Self {
            cluster,
            program: own_binary("fabric-test-engine")?,
            engines: Vec::new(),
            seed: 0,
        };
        for index in [SOURCE, DESTINATION] {
            let engine = world.engine(index).await?;
            world.engines.push(engine);
        }
        Ok(world)
    }

    async fn engine(&self, index: usize) -> Result<LineChild> {
        let socket = self.cluster.nodes[index].socket().display().to_string();
        let arguments = [&socket, "engine", "16", "4096", "64"].map(ToOwned::to_owned);
        let log = self.cluster.folder().join(format!("engine{index}.log"));
        let mut child = LineChild::spawn("engine", &self.program, &arguments, &log)?;
        child.expect("ready", START_LIMIT).await?;
        Ok(child)
    }

    /// Starts a transfer; gives its number.
    async fn begin(&mut self, pause_ms: u64) -> Result<u64> {
        self.seed += 1;
        let seed = self.seed;
        let line = format!("receive 64 {seed} a");
        let prefix = format!("offer {seed} ");
        let offer = self.engines[DESTINATION]
            .ask(&line, &prefix, START_LIMIT)
            .await?;
        let line = format!("send 64 {seed} a {pause_ms} {}", &offer[prefix.len()..]);
        self.engines[SOURCE].say(&line).await?;
        Ok(seed)
    }

    async fn strike(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::KillDaemon(index) => self.cluster.nodes[index].kill(),
            Fault::KillEngine(index) => self.engines[index].kill().await,
            Fault::StopDaemon(index) => self.cluster.nodes[index].daemon()?.stop(),
            Fault::CutLink => {
                for proxy in self
                    .cluster
                    .nodes
                    .iter()
                    .filter_map(|node| node.proxy.as_ref())
                {
                    proxy.cut(true);
                }
                Ok(())
            }
        }
    }

    /// Stops the fault and brings back who died.
    async fn heal(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::KillDaemon(index) => {
                self.cluster.restart(index).await?;
                self.engines[index].kill().await?;
                self.engines[index] = self.engine(index).await?;
            }
            Fault::KillEngine(index) => self.engines[index] = self.engine(index).await?,
            Fault::StopDaemon(index) => self.cluster.nodes[index].daemon()?.go_on()?,
            Fault::CutLink => {
                for proxy in self
                    .cluster
                    .nodes
                    .iter()
                    .filter_map(|node| node.proxy.as_ref())
                {
                    proxy.cut(false);
                }
            }
        }
        Ok(())
    }

    /// What an engine hears of a transfer, within the limit from `since`.
    async fn outcome(&mut self, index: usize, seed: u64, since: Instant) -> Result<String> {
        let verb = if index == SOURCE { "sent" } else { "received" };
        let left = OUTCOME_LIMIT.saturating_sub(since.elapsed());
        let prefix = format!("{verb} {seed} ");
        let line = self.engines[index].expect(&prefix, left).await?;
        Ok(line[prefix.len()..].to_owned())
    }

    async fn round(&mut self, fault: Fault, random: &mut Random) -> Result<String> {
        let seed = self.begin(random.below(4)).await?;
        tokio::time::sleep(Duration::from_micros(random.below(70_000))).await;
        let since = Instant::now();
        self.strike(fault).await?;
        // Who still runs, with a daemon that runs, must hear.
        let hears = |index| match fault {
            Fault::KillEngine(victim) | Fault::StopDaemon(victim) => victim != index,
            Fault::KillDaemon(_) | Fault::CutLink => true,
        };
        let mut heard = [String::new(), String::new()];
        for index in [DESTINATION, SOURCE] {
            if hears(index) {
                heard[index] = self.outcome(index, seed, since).await?;
            }
        }
        self.heal(fault).await?;
        if let Fault::StopDaemon(index) = fault {
            heard[index] = self.outcome(index, seed, Instant::now()).await?;
        }
        let [sent, received] = &heard;
        ensure!(
            !received.contains("wrong"),
            "wrong bytes were delivered: {received}"
        );
        let claims = sent.starts_with("delivered") && !received.is_empty();
        // The destination's engine may be told of its daemon's end instead of the delivery.
        let told = received.starts_with("delivered") || received.contains("daemon_gone");
        ensure!(!claims || told, "source: {sent}; destination: {received}");
        for index in [SOURCE, DESTINATION] {
            self.cluster.slots_all_free(index).await?;
        }
        Ok(format!("{sent} / {received}"))
    }
}

async fn rounds(faults: &[Fault], plane: &'static str, count: usize) -> Result<()> {
    let mut random = Random::from_environment("killed");
    let mut world = World::start(plane).await?;
    let mut seen = std::collections::BTreeMap::new();
    for round in 0..count {
        let fault = faults[round % faults.len()];
        let outcome = world.round(fault, &mut random).await;
        let outcome = outcome.with_context(|| format!("round {round}: {fault:?} over {plane}"))?;
        *seen.entry(format!("{fault:?}: {outcome}")).or_insert(0_u32) += 1;
    }
    eprintln!("{plane}: {seen:#?}");
    // And it goes on as before.
    let seed = world.begin(0).await?;
    let received = world.outcome(DESTINATION, seed, Instant::now()).await?;
    ensure!(
        received == "delivered none right",
        "after all faults: {received}"
    );
    let sent = world.outcome(SOURCE, seed, Instant::now()).await?;
    ensure!(sent == "delivered none", "after all faults: {sent}");
    for index in [SOURCE, DESTINATION] {
        world.cluster.slots_all_free(index).await?;
        fabric_tests::light::adds_up(&world.cluster, index).await?;
    }
    world.cluster.loud = false;
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
