//! Clusters of real processes on loopback.
//!
//! A cluster is a temporary folder with a folder for each node; processes log to files there.
//! What a cluster started it kills when it is dropped; where that happens in a failing test, the
//! ends of all logs are printed first.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::host::Host;
use crate::proxy::UdpProxy;

/// What a node is to be.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Its name.
    pub name: String,
    /// Its planes, the preferred first.
    pub planes: Vec<&'static str>,
    /// Its engines, and for whom each may act.
    pub engines: Vec<(String, Vec<String>)>,
    /// Further tables of the configuration.
    pub settings: String,
    /// Other nodes reach it through a [`UdpProxy`].
    pub proxied: bool,
    /// Where its processes run.
    pub host: Host,
}

impl NodeOptions {
    /// A node with both planes and one engine, `engine`, that acts for anybody.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            planes: vec!["shm", "quic"],
            engines: vec![("engine".to_owned(), vec!["*".to_owned()])],
            settings: String::new(),
            proxied: false,
            host: Host::here(),
        }
    }

    /// The same on another host.
    #[must_use]
    pub fn on(mut self, host: Host) -> Self {
        self.host = host;
        self
    }

    /// The same with one plane.
    #[must_use]
    pub fn plane(mut self, plane: &'static str) -> Self {
        self.planes = vec![plane];
        self
    }

    /// The same with further tables of configuration.
    #[must_use]
    pub fn settings(mut self, settings: &str) -> Self {
        self.settings.push_str(settings);
        self.settings.push('\n');
        self
    }

    /// The same with one more engine.
    #[must_use]
    pub fn engine(mut self, name: &str, tenants: &[&str]) -> Self {
        let tenants = tenants.iter().map(|&tenant| tenant.to_owned()).collect();
        self.engines.push((name.to_owned(), tenants));
        self
    }

    /// The same behind a proxy.
    #[must_use]
    pub fn proxied(mut self) -> Self {
        self.proxied = true;
        self
    }
}

/// A node: a daemon, and where it is reached.
#[derive(Debug)]
pub struct Node {
    /// Its options.
    pub options: NodeOptions,
    /// Its node id.
    pub id: String,
    /// Its QUIC address.
    pub peers: SocketAddr,
    /// Its admin page.
    pub admin: SocketAddr,
    /// Its folder.
    pub folder: PathBuf,
    /// What stands before [`Node::peers`], if it is proxied.
    pub proxy: Option<UdpProxy>,
    /// The daemon, while it runs.
    pub daemon: Option<Process>,
}

impl Node {
    /// The socket for its engines.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.join("engine.sock")
    }

    /// The daemon's log so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("daemon.log")).unwrap_or_default()
    }

    /// The daemon.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub fn daemon(&self) -> Result<&Process> {
        self.daemon
            .as_ref()
            .with_context(|| format!("daemon {} does not run", self.options.name))
    }

    /// Kills the daemon, as a power cut would.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub fn kill(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("the daemon does not run")?;
        daemon.kill();
        Ok(())
    }
}

/// Nodes that know each other.
#[derive(Debug)]
pub struct Cluster {
    /// The nodes, as they were asked for.
    pub nodes: Vec<Node>,
    /// Further processes.
    pub engines: Vec<Process>,
    /// Prints the ends of all logs when it is dropped: set by a test until it has passed.
    pub loud: bool,
    http: reqwest::Client,
    program: PathBuf,
    folder: TempDir,
}

impl Cluster {
    /// Starts a daemon for each node; each knows all the others.
    ///
    /// # Errors
    ///
    /// If a daemon does not become ready; the error has the end of its log.
    pub async fn start(program: &Path, options: Vec<NodeOptions>) -> Result<Self> {
        let mut attempt = 0;
        loop {
            attempt += 1;
            match Self::attempt(program, options.clone()).await {
                // Between a port's choice and its use somebody else may take it.
                Err(error) if attempt < 3 && format!("{error:#}").contains("in use") => {}
                result => return result,
            }
        }
    }

    async fn attempt(program: &Path, options: Vec<NodeOptions>) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("fabric-").tempdir();
        let folder = folder.context("make a temporary folder")?;
        let mut nodes = Vec::new();
        for options in options {
            nodes.push(node(program, folder.path(), options).await?);
        }
        let mut cluster = Self {
            nodes,
            engines: Vec::new(),
            loud: false,
            http: client()?,
            program: program.to_owned(),
            folder,
        };
        for index in 0..cluster.nodes.len() {
            cluster.configure(index)?;
        }
        for index in 0..cluster.nodes.len() {
            cluster.spawn_daemon(index)?;
        }
        for index in 0..cluster.nodes.len() {
            cluster.ready(index).await?;
        }
        Ok(cluster)
    }

    /// Writes a node's configuration, after its options have changed for instance.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn configure(&self, index: usize) -> Result<()> {
        let node = &self.nodes[index];
        let text = config(node, self.nodes.iter().filter(|other| other.id != node.id));
        let path = node.folder.join("daemon.toml");
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        node.options.host.put_folder(&node.folder)
    }

    /// Starts a node's daemon again, with the configuration as it is now.
    ///
    /// # Errors
    ///
    /// If it does not become ready.
    pub async fn restart(&mut self, index: usize) -> Result<()> {
        self.nodes[index].daemon = None;
        self.spawn_daemon(index)?;
        self.ready(index).await
    }

    fn spawn_daemon(&mut self, index: usize) -> Result<()> {
        let node = &mut self.nodes[index];
        let mut command = node.options.host.command(&self.program)?;
        command
            .arg("serve")
            .arg("--config")
            .arg(node.folder.join("daemon.toml"));
        let name = format!("daemon {}", node.options.name);
        let log = node.folder.join("daemon.log");
        node.daemon = Some(Process::spawn(&name, &mut command, &log)?);
        Ok(())
    }

    async fn ready(&mut self, index: usize) -> Result<()> {
        let http = self.http.clone();
        let node = &mut self.nodes[index];
        let url = format!("http://{}/readyz", node.admin);
        let daemon = node.daemon.as_mut().context("the daemon was started")?;
        daemon.answers(&http, &url, READY_LIMIT).await
    }

    /// Starts `fabric-engine` beside a node with arguments, and waits until it is ready. Gives its
    /// URL.
    ///
    /// # Errors
    ///
    /// If it does not become ready; the error has the end of its log.
    pub async fn engine(
        &mut self,
        index: usize,
        program: &Path,
        name: &str,
        arguments: &[String],
    ) -> Result<String> {
        let host = self.nodes[index].options.host;
        let listen = SocketAddr::from((host.ip, free_port()?));
        let mut command = host.command(program)?;
        command
            .arg("serve")
            .args(["--listen", &listen.to_string()])
            .args(arguments);
        let log = self.folder.path().join(format!("{name}.log"));
        let mut process = Process::spawn(name, &mut command, &log)?;
        let url = format!("http://{listen}");
        process
            .answers(&self.http, &format!("{url}/health"), ENGINE_LIMIT)
            .await?;
        self.engines.push(process);
        Ok(url)
    }

    /// A process that this cluster started, by name.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn process(&mut self, name: &str) -> Result<&mut Process> {
        let found = self
            .engines
            .iter_mut()
            .rfind(|process| process.name == name);
        found.with_context(|| format!("no process {name}"))
    }

    /// The cluster's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// An HTTP client that heeds no proxy of the environment.
    #[must_use]
    pub fn http(&self) -> &reqwest::Client {
        &self.http
    }

    /// What a node counts.
    ///
    /// # Errors
    ///
    /// If its admin page does not answer.
    pub async fn metrics(&self, index: usize) -> Result<Metrics> {
        let url = format!("http://{}/metrics", self.nodes[index].admin);
        scrape(&self.http, &url).await
    }

    /// A node's `/status`.
    ///
    /// # Errors
    ///
    /// If its admin page does not answer.
    pub async fn status(&self, index: usize) -> Result<Value> {
        let url = format!("http://{}/status", self.nodes[index].admin);
        let response = self
            .http
            .get(url)
            .send()
            .await
            .context("ask for the status")?;
        response.json().await.context("read the status")
    }

    /// Waits until every slot of a node is free: S4's bound.
    ///
    /// # Errors
    ///
    /// If one is not; the error has the gauges.
    pub async fn slots_all_free(&self, index: usize) -> Result<()> {
        let free = "fabric_pool_slots{state=\"free\"}";
        let all = "fabric_pool_slots{state=\"all\"}";
        self.until(index, "all slots are free", |metrics| {
            metrics.value(free) == metrics.value(all)
        })
        .await
    }

    /// Waits until what a node counts fulfils a condition.
    ///
    /// # Errors
    ///
    /// If it does not in time; the error has the slots' gauges.
    pub async fn until(
        &self,
        index: usize,
        what: &str,
        holds: impl Fn(&Metrics) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + FREE_LIMIT;
        loop {
            let metrics = self.metrics(index).await?;
            if holds(&metrics) {
                return Ok(());
            }
            if Instant::now() > deadline {
                let name = &self.nodes[index].options.name;
                let slots = metrics.starting("fabric_pool_slots");
                bail!("{name}: not within {FREE_LIMIT:?}: {what}; {slots:?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !self.loud && !std::thread::panicking() {
            return;
        }
        let daemons = self.nodes.iter().filter_map(|node| node.daemon.as_ref());
        for process in daemons.chain(&self.engines) {
            eprintln!("--- {}\n{}", process.name, process.tail(TAIL_LINES));
        }
    }
}

/// A process that ends with its owner.
#[derive(Debug)]
pub struct Process {
    /// For people.
    pub name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a process; what it prints goes to the end of `log`.
    ///
    /// # Errors
    ///
    /// If it cannot be started.
    pub fn spawn(name: &str, command: &mut Command, log: &Path) -> Result<Self> {
        let open = || -> Result<File> {
            let file = OpenOptions::new().create(true).append(true).open(log);
            file.with_context(|| format!("open {}", log.display()))
        };
        let child = command
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?)
            .spawn();
        let child = child.with_context(|| format!("start {name}: {command:?}"))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            log: log.to_owned(),
        })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        drop(self.child.kill());
        drop(self.child.wait());
    }

    /// Stops it in its tracks (SIGSTOP).
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Lets it go on (SIGCONT).
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn go_on(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Asks it to end (SIGTERM).
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn terminate(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    ///
    /// If it does not in time.
    pub async fn ended(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().context("wait for a process")? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!(
                    "{} has not ended within {limit:?}:\n{}",
                    self.name,
                    self.tail(TAIL_LINES)
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether it still runs.
    #[must_use]
    pub fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// The last lines of its log.
    #[must_use]
    pub fn tail(&self, lines: usize) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Memory that it occupies, in bytes.
    ///
    /// # Errors
    ///
    /// If it has ended.
    pub fn resident_bytes(&self) -> Result<u64> {
        let path = format!("/proc/{}/statm", self.pid());
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let pages = text.split(' ').nth(1).context("statm has a second field")?;
        let pages: u64 = pages.parse().context("statm's second field is a number")?;
        Ok(pages * rustix::param::page_size() as u64)
    }

    async fn answers(&mut self, http: &reqwest::Client, url: &str, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().context("wait for a process")? {
                let tail = self.tail(TAIL_LINES);
                bail!(
                    "{} ended with {status} before it was ready:\n{tail}",
                    self.name
                );
            }
            let answer = http.get(url).timeout(Duration::from_secs(2)).send().await;
            if answer.is_ok_and(|answer| answer.status().is_success()) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "{} is not ready within {limit:?}:\n{}",
                    self.name,
                    self.tail(TAIL_LINES)
                );
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        let pid = pid.context("a pid is a positive number")?;
        kill_process(pid, signal).with_context(|| format!("signal {}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What was scraped, by name and labels as they are written.
#[derive(Clone, Debug)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// The value of one series.
    ///
    /// # Panics
    ///
    /// Where there is none: a test that asks for a misspelled name must not pass.
    #[must_use]
    pub fn value(&self, series: &str) -> f64 {
        match self.0.get(series) {
            Some(value) => *value,
            None => panic!("no series {series} among {:?}", self.0.keys()),
        }
    }

    /// The sum over all series of a name.
    ///
    /// # Panics
    ///
    /// Where there is none.
    #[must_use]
    pub fn sum(&self, name: &str) -> f64 {
        let of_name = |series: &str| series == name || series.starts_with(&format!("{name}{{"));
        let found: Vec<f64> = self
            .0
            .iter()
            .filter(|(series, _)| of_name(series))
            .map(|(_, value)| *value)
            .collect();
        assert!(
            !found.is_empty(),
            "no series of {name} among {:?}",
            self.0.keys()
        );
        found.iter().sum()
    }

    /// The series that start so, and are not 0.
    #[must_use]
    pub fn starting(&self, prefix: &str) -> Vec<(String, f64)> {
        let found = self
            .0
            .iter()
            .filter(|(series, value)| series.starts_with(prefix) && **value != 0.0);
        found
            .map(|(series, value)| (series.clone(), *value))
            .collect()
    }
}

/// Reads the text that Prometheus reads.
///
/// # Errors
///
/// If nobody answers, or a line is malformed.
pub async fn scrape(http: &reqwest::Client, url: &str) -> Result<Metrics> {
    let answer = http.get(url).timeout(Duration::from_secs(5)).send().await;
    let answer = answer.with_context(|| format!("scrape {url}"))?;
    ensure!(answer.status().is_success(), "{url}: {}", answer.status());
    let text = answer.text().await.context("read metrics")?;
    let mut metrics = BTreeMap::new();
    for line in text
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
    {
        let (series, value) = line.rsplit_once(' ').context("a series and its value")?;
        let value = value
            .parse()
            .with_context(|| format!("a number in: {line}"))?;
        metrics.insert(series.to_owned(), value);
    }
    Ok(Metrics(metrics))
}

/// An HTTP client for loopback.
///
/// # Errors
///
/// If it cannot be made.
pub fn client() -> Result<reqwest::Client> {
    reqwest::Client::builder()
        .no_proxy()
        .build()
        .context("make an HTTP client")
}

/// A TCP port that nobody listens on just now.
///
/// # Errors
///
/// If there is none.
pub fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
    Ok(listener.local_addr().context("ask for a port")?.port())
}

fn free_udp_port() -> Result<u16> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("find a free port")?;
    Ok(socket.local_addr().context("ask for a port")?.port())
}

async fn node(program: &Path, folder: &Path, options: NodeOptions) -> Result<Node> {
    let folder = folder.join(&options.name);
    std::fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
    let state = folder.join("state");
    let made = Command::new(program)
        .args(["init", "--json", "--state-dir"])
        .arg(&state)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {}", program.display()))?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(
        made.status.success(),
        "fabric-daemon init: {}: {said}",
        made.status
    );
    let about: Value = serde_json::from_slice(&made.stdout).context("read init's JSON")?;
    let id = about["node"]
        .as_str()
        .context("init names the node")?
        .to_owned();
    let ip = options.host.ip;
    let peers = SocketAddr::from((ip, free_udp_port()?));
    let proxy = match options.proxied {
        true => Some(UdpProxy::start(peers).await?),
        false => None,
    };
    Ok(Node {
        id,
        peers,
        admin: SocketAddr::from((ip, free_port()?)),
        folder,
        proxy,
        daemon: None,
        options,
    })
}

fn config<'a>(node: &Node, others: impl Iterator<Item = &'a Node>) -> String {
    let quoted = |path: &Path| format!("{:?}", path.display().to_string());
    let mut text = format!(
        "state_dir = {}\nplanes = {:?}\n[listen]\npeers = \"{}\"\nadmin = \"{}\"\nengines = {}\n",
        quoted(&node.folder.join("state")),
        node.options.planes,
        node.peers,
        node.admin,
        quoted(&node.socket()),
    );
    if node.options.planes.contains(&"shm") {
        text += &format!("shm = {}\n", quoted(&node.folder.join("shm.sock")));
    }
    for (name, tenants) in &node.options.engines {
        text += &format!("[[engines]]\nname = {name:?}\ntenants = {tenants:?}\n");
    }
    for other in others {
        let address = other
            .proxy
            .as_ref()
            .map_or(other.peers, |proxy| proxy.address);
        let (name, id) = (&other.options.name, &other.id);
        text += &format!("[[peers]]\nname = {name:?}\nnode = {id:?}\naddress = \"{address}\"\n");
    }
    text + &node.options.settings
}

/// A bound against hanging: a daemon starts in milliseconds.
const READY_LIMIT: Duration = Duration::from_secs(20);
/// A bound against hanging: a model is loaded within.
const ENGINE_LIMIT: Duration = Duration::from_secs(180);
/// Slots are free within this, once faults have stopped and leases were released.
const FREE_LIMIT: Duration = Duration::from_secs(10);
/// Lines of a log that a failing test prints.
const TAIL_LINES: usize = 60;
