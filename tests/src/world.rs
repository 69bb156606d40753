//! Two daemons and two engines, all of them processes: transfers between them, and faults in their
//! midst.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fabric_daemon::store::Store;

use crate::child::LineChild;
use crate::cluster::{Cluster, Metrics, NodeOptions};
use crate::host::Host;
use crate::light::adds_up;
use crate::programs::{Programs, own_binary};
use crate::random::Random;

/// The node that sends.
pub const SOURCE: usize = 0;

/// The node that receives.
pub const DESTINATION: usize = 1;

/// What happens to whom.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// The destination's engine gives its lease up.
    Abort,
    /// A node's daemon is killed.
    KillDaemon(usize),
    /// A node's engine is killed.
    KillEngine(usize),
    /// The control link's datagrams are lost, both ways.
    CutLink,
    /// A node's daemon stops in its tracks, and goes on later.
    StopDaemon(usize),
    /// A node's host, which has an agent, loses its power.
    PowerOff(usize),
}

/// Where and how.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The data plane.
    pub plane: &'static str,
    /// Of each node.
    pub hosts: [Host; 2],
    /// Further configuration of both nodes.
    pub settings: &'static str,
    /// How long a survivor may take to hear of the outcome.
    pub outcome_limit: Duration,
    /// Faults come so soon after a transfer's begin: about as long as one takes.
    pub strike_within: Duration,
}

impl Terms {
    /// On this host. A true outcome within 5 s, as this machine is no slower than others.
    #[must_use]
    pub fn here(plane: &'static str) -> Self {
        Self {
            plane,
            hosts: [Host::here(); 2],
            // A fault may come before the source reaches the destination: then the offer's time is
            // the bound, and it is less than the limit as well.
            settings: "[transfer]\noffer_ttl_ms = 3000",
            outcome_limit: Duration::from_secs(5),
            strike_within: Duration::from_millis(70),
        }
    }

    /// The same in hosts whose processors are emulated, ten times slower and more.
    #[must_use]
    pub fn emulated(self) -> Self {
        Self {
            settings: "[transfer]\noffer_ttl_ms = 10000\nopen_ms = 20000\ndrain_ms = 10000\n\
                [link]\nsilence_ms = 5000",
            outcome_limit: Duration::from_secs(30),
            strike_within: Duration::from_millis(400),
            ..self
        }
    }
}

/// Two daemons and two engines.
#[derive(Debug)]
pub struct World {
    /// The daemons.
    pub cluster: Cluster,
    terms: Terms,
    engines: Vec<LineChild>,
    seed: u64,
}

impl World {
    /// Starts them all; logs are printed when it is dropped before [`World::passed`].
    ///
    /// # Errors
    ///
    /// If one does not start.
    pub async fn start(terms: Terms) -> Result<Self> {
        let mut nodes = Vec::new();
        for (name, host) in ["prefill", "decode"].into_iter().zip(terms.hosts) {
            let node = NodeOptions::new(name)
                .plane(terms.plane)
                .on(host)
                .settings(terms.settings);
            let has_proxy = terms.hosts == [Host::here(); 2];
            nodes.push(if has_proxy { node.proxied() } else { node });
        }
        let mut cluster = Cluster::start(&Programs::find_daemon(&[terms.plane])?, nodes).await?;
        cluster.loud = true;
        let mut world = Self {
            cluster,
            terms,
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
        let node = &self.cluster.nodes[index];
        let program = own_binary("fabric-test-engine")?;
        let mut command = node.options.host.command(&program)?;
        command.arg(node.socket());
        command.args(["engine", "16", "4096", "64"]);
        let log = self.cluster.folder().join(format!("engine{index}.log"));
        let mut child = LineChild::spawn("engine", command, &log)?;
        child.expect("ready", START_LIMIT).await?;
        Ok(child)
    }

    /// Starts a transfer of the whole pool; gives its number.
    ///
    /// # Errors
    ///
    /// If the destination gets no lease.
    pub async fn begin(&mut self, pause_ms: u64) -> Result<u64> {
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

    async fn strike(&mut self, fault: Fault, seed: u64) -> Result<()> {
        match fault {
            Fault::Abort => {
                let line = format!("abort {seed}");
                self.engines[DESTINATION].say(&line).await
            }
            Fault::KillDaemon(index) => self.cluster.nodes[index].kill(),
            Fault::KillEngine(index) => self.engines[index].kill().await,
            Fault::StopDaemon(index) => self.cluster.nodes[index].daemon()?.stop(),
            Fault::CutLink => self.cut(true),
            Fault::PowerOff(index) => self.cluster.nodes[index].options.host.power_off(),
        }
    }

    /// Stops the fault and brings back who died.
    async fn heal(&mut self, fault: Fault) -> Result<()> {
        match fault {
            Fault::Abort => Ok(()),
            Fault::KillDaemon(index) => self.restart(index).await,
            Fault::KillEngine(index) => {
                self.engines[index] = self.engine(index).await?;
                Ok(())
            }
            Fault::StopDaemon(index) => self.cluster.nodes[index].daemon()?.go_on(),
            Fault::CutLink => self.cut(false),
            Fault::PowerOff(index) => {
                // So that nobody takes the host that still goes down for the one that comes.
                tokio::time::sleep(Duration::from_secs(1)).await;
                self.cluster.nodes[index].options.host.wait(BOOT_LIMIT)?;
                self.restart(index).await
            }
        }
    }

    fn cut(&self, is_cut: bool) -> Result<()> {
        let proxies: Vec<_> = (self.cluster.nodes.iter())
            .filter_map(|node| node.proxy.as_ref())
            .collect();
        ensure!(!proxies.is_empty(), "there is no link that could be cut");
        proxies.into_iter().for_each(|proxy| proxy.cut(is_cut));
        Ok(())
    }

    /// Starts a node's daemon and engine again.
    async fn restart(&mut self, index: usize) -> Result<()> {
        let node = &self.cluster.nodes[index];
        if node.options.host.agent.is_some() {
            // What it has on disk does not survive a virtual host, so its lives are counted here.
            let store = Store::open(&node.folder.join("state")).context("open the state")?;
            store.next_incarnation().context("count the lives")?;
            self.cluster.configure(index)?;
        }
        self.cluster.restart(index).await?;
        // It may have ended with its host.
        drop(self.engines[index].kill().await);
        self.engines[index] = self.engine(index).await?;
        Ok(())
    }

    /// What an engine hears of a transfer, within the limit from `since`.
    ///
    /// # Errors
    ///
    /// If it hears nothing in time.
    pub async fn outcome(&mut self, index: usize, seed: u64, since: Instant) -> Result<String> {
        let verb = if index == SOURCE { "sent" } else { "received" };
        let left = self.terms.outcome_limit.saturating_sub(since.elapsed());
        let prefix = format!("{verb} {seed} ");
        let line = self.engines[index].expect(&prefix, left).await?;
        Ok(line[prefix.len()..].to_owned())
    }

    /// One transfer, with a fault at a random moment; what both sides heard.
    async fn round(&mut self, fault: Fault, random: &mut Random) -> Result<String> {
        // Where everything is slow, most moments are before the first write or after the last.
        let is_aimed = self.terms.plane == "verbs" && random.below(4) > 0;
        let pause = if is_aimed { 60 } else { random.below(4) };
        let seed = self.begin(pause).await?;
        if is_aimed {
            let granted = "fabric_pool_slots{state=\"granted\"}";
            let what = "slots are granted";
            let is_granted = |metrics: &Metrics| metrics.value(granted) > 0.0;
            self.cluster.until(DESTINATION, what, is_granted).await?;
        }
        let most = u64::try_from(self.terms.strike_within.as_micros()).context("a short time")?;
        tokio::time::sleep(Duration::from_micros(random.below(most))).await;
        let since = Instant::now();
        self.strike(fault, seed).await?;
        // Who still runs, with a daemon that runs, must hear.
        let hears = |index| match fault {
            Fault::KillEngine(victim) | Fault::StopDaemon(victim) | Fault::PowerOff(victim) => {
                victim != index
            }
            Fault::Abort | Fault::KillDaemon(_) | Fault::CutLink => true,
        };
        let mut heard = [String::new(), String::new()];
        for index in [DESTINATION, SOURCE] {
            if hears(index) {
                heard[index] = self.outcome(index, seed, since).await?;
            }
        }
        // A dead peer's slots are free again while it is still dead (S4), and for others to use.
        if fault != Fault::KillDaemon(DESTINATION) && hears(DESTINATION) {
            self.cluster.slots_all_free(DESTINATION).await?;
            self.next_tenant().await?;
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
        // Or have given the lease up once the pages were verified, before it heard.
        let gave_up = fault == Fault::Abort && received.starts_with("aborted dropped");
        ensure!(
            !claims || told || gave_up,
            "source: {sent}; destination: {received}"
        );
        for index in [SOURCE, DESTINATION] {
            self.cluster.slots_all_free(index).await?;
        }
        Ok(format!("{sent} / {received}"))
    }

    /// Every slot goes to another tenant, who compares every byte: scrubbed at first, and nothing
    /// lands later.
    async fn next_tenant(&mut self) -> Result<()> {
        self.seed += 1;
        let line = format!("tenant 64 {} b", self.seed);
        let prefix = format!("tenant {} ", self.seed);
        let answer = self.engines[DESTINATION]
            .ask(&line, &prefix, START_LIMIT)
            .await?;
        match &answer[prefix.len()..] {
            "alone" => Ok(()),
            other => bail!("the next tenant of the slots: {other}"),
        }
    }

    /// Rounds with one fault after another; then everything must go on as before.
    ///
    /// # Errors
    ///
    /// Where anything is not as it must be.
    pub async fn rounds(&mut self, faults: &[Fault], count: usize, name: &str) -> Result<()> {
        let mut random = Random::from_environment(name);
        let plane = self.terms.plane;
        self.delivers().await?;
        let objects = self.objects().await?;
        let mut seen = BTreeMap::new();
        for round in 0..count {
            let fault = faults[round % faults.len()];
            let outcome = self.round(fault, &mut random).await;
            let outcome =
                outcome.with_context(|| format!("round {round}: {fault:?} over {plane}"))?;
            *seen.entry(format!("{fault:?}: {outcome}")).or_insert(0_u32) += 1;
        }
        eprintln!("{plane}: {seen:#?}");
        self.delivers().await?;
        for index in [SOURCE, DESTINATION] {
            self.cluster.slots_all_free(index).await?;
            adds_up(&self.cluster, index).await?;
        }
        if let Some(before) = objects {
            let what = format!("as many RDMA objects as before: {before:?}");
            let same = |metrics: &Metrics| OBJECTS.map(|series| metrics.value(series)) == before;
            self.cluster.until(DESTINATION, &what, same).await?;
        }
        Ok(())
    }

    /// A transfer that nothing disturbs.
    ///
    /// # Errors
    ///
    /// If it is not delivered whole.
    pub async fn delivers(&mut self) -> Result<()> {
        let seed = self.begin(0).await?;
        let received = self.outcome(DESTINATION, seed, Instant::now()).await?;
        ensure!(
            received == "delivered none right",
            "undisturbed: {received}"
        );
        let sent = self.outcome(SOURCE, seed, Instant::now()).await?;
        ensure!(sent == "delivered none", "undisturbed: {sent}");
        Ok(())
    }

    /// The queue pairs and memory regions of the destination, where its plane has any.
    async fn objects(&self) -> Result<Option<[f64; 2]>> {
        if self.terms.plane != "verbs" {
            return Ok(None);
        }
        let metrics = self.cluster.metrics(DESTINATION).await?;
        Ok(Some(OBJECTS.map(|series| metrics.value(series))))
    }

    /// Ends the test well.
    pub fn passed(mut self) {
        self.cluster.loud = false;
    }
}

/// What a fault must not leave behind.
const OBJECTS: [&str; 2] = [
    "fabric_verbs_objects{kind=\"queue_pair\"}",
    "fabric_verbs_objects{kind=\"memory_region\"}",
];

/// A bound against hanging.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A virtual host is back within.
const BOOT_LIMIT: Duration = Duration::from_secs(120);
