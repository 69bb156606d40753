//! How fast Fabric moves scattered pages: two engine processes and two daemons, verification on.
//!
//! Measured is the time from `send(offer)` at the source until the source knows that every page was
//! verified at the destination. The shape and the keys are those of `peer_bench.py`, with which
//! other transfer layers were measured.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use fabric_client::proto::ids::{RequestId, SlotIndex, TenantId};
use fabric_client::proto::outcome::Outcome;
use fabric_client::proto::pool::TokenRange;
use fabric_client::{Delivered, HeldLease, LeaseError, LeaseRequest, Pool};
use fabric_tests::child::{LineChild, commands};
use fabric_tests::cluster::{Cluster, NodeOptions};
use fabric_tests::light;
use fabric_tests::programs::Programs;
use fabric_tests::random::Random;
use serde_json::json;

/// Measures transfers of scattered pages between two engines over two daemons.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    #[command(flatten)]
    shape: Shape,
    /// The data plane.
    #[arg(long, value_enum, default_value = "quic")]
    plane: Plane,
    /// Transfers of one page, for the latency.
    #[arg(long, default_value_t = 300)]
    singles: usize,
    /// Further tables of both daemons' configuration.
    #[arg(long, default_value = "")]
    settings: String,
    /// Print one JSON line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, Args)]
struct Shape {
    /// Bytes of a page.
    #[arg(long, default_value_t = 16_384, global = true)]
    page: u32,
    /// Pages of a batch.
    #[arg(long, default_value_t = 4096, global = true)]
    pages: u32,
    /// Batches.
    #[arg(long, default_value_t = 5, global = true)]
    rounds: usize,
    /// MiB of each pool.
    #[arg(long, default_value_t = 1024, global = true)]
    pool: u64,
    /// Slots next to each other, as the daemon chooses them, instead of scattered ones.
    #[arg(long, global = true)]
    adjacent: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Plane {
    Quic,
    Shm,
    Verbs,
}

/// The two engines: this program again, driven by lines.
#[derive(Clone, Debug, Subcommand)]
enum Role {
    /// The engine that sends.
    #[command(hide = true)]
    Source { socket: String },
    /// The engine that receives.
    #[command(hide = true)]
    Destination { socket: String },
}

impl Shape {
    fn slots(&self) -> Result<u32> {
        let slots = (self.pool << 20) / u64::from(self.page);
        u32::try_from(slots).context("fewer slots are needed: take a larger page or a smaller pool")
    }

    /// The batch's slots. Scattered, each side has its own order.
    fn named(&self, seed: u64) -> Result<Vec<SlotIndex>> {
        let order = if self.adjacent {
            (0..self.slots()?).collect()
        } else {
            Random::new(seed).permutation(self.slots()?)
        };
        Ok(order
            .into_iter()
            .take(self.pages as usize)
            .map(SlotIndex)
            .collect())
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let runtime = tokio::runtime::Runtime::new().context("start the runtime")?;
    match &cli.role {
        None => runtime.block_on(drive(&cli)),
        Some(Role::Source { socket }) => runtime.block_on(source(socket.as_ref(), cli.shape)),
        Some(Role::Destination { socket }) => {
            runtime.block_on(destination(socket.as_ref(), cli.shape))
        }
    }
}

/// The cluster and its two engines.
struct Bench {
    cluster: Cluster,
    source: LineChild,
    destination: LineChild,
}

impl Bench {
    async fn start(cli: &Cli) -> Result<Self> {
        let plane = match cli.plane {
            Plane::Quic => "quic",
            Plane::Shm => "shm",
            Plane::Verbs => "verbs",
        };
        let nodes = ["prefill", "decode"].map(|name| {
            NodeOptions::new(name)
                .plane(plane)
                .settings("[log]\nlevel = \"warn\"")
                .settings(&cli.settings)
        });
        let program = Programs::find_daemon(&[plane])?;
        eprintln!("starting two daemons");
        let cluster = Cluster::start(&program, nodes.to_vec()).await?;
        let own = std::env::current_exe().context("find this program")?;
        let child = |role: &str, index: usize| {
            let socket = cluster.nodes[index].socket().display().to_string();
            let Shape {
                page,
                pages,
                pool,
                adjacent,
                ..
            } = cli.shape;
            let mut arguments = vec![role.to_owned(), socket];
            arguments.extend(adjacent.then(|| "--adjacent".to_owned()));
            for (flag, value) in [
                ("page", u64::from(page)),
                ("pages", pages.into()),
                ("pool", pool),
            ] {
                arguments.extend([format!("--{flag}"), value.to_string()]);
            }
            let mut command = Command::new(&own);
            command.args(arguments);
            LineChild::spawn(role, command, &cluster.folder().join(format!("{role}.log")))
        };
        eprintln!("filling a pool of {} MiB", cli.shape.pool);
        let (mut source, mut destination) = (child("source", 0)?, child("destination", 1)?);
        for child in [&mut source, &mut destination] {
            child.expect("ready", LIMIT).await?;
        }
        Ok(Self {
            cluster,
            source,
            destination,
        })
    }

    /// One transfer; how long it took.
    async fn round(&mut self, pages: u32) -> Result<Duration> {
        self.source
            .ask(&format!("hold {pages}"), "held", LIMIT)
            .await?;
        let offer = self
            .destination
            .ask(&format!("receive {pages}"), "offer ", LIMIT)
            .await?;
        let sent = self
            .source
            .ask(&format!("send {}", &offer[6..]), "sent ", LIMIT)
            .await?;
        self.destination.expect("delivered", LIMIT).await?;
        let nanos = sent[5..]
            .parse()
            .with_context(|| format!("a time in: {sent}"))?;
        Ok(Duration::from_nanos(nanos))
    }

    /// User and system time of both engines and both daemons so far, in seconds.
    fn cpu(&self) -> Result<f64> {
        let mut pids = vec![self.source.pid()?, self.destination.pid()?];
        for node in &self.cluster.nodes {
            pids.push(node.daemon()?.pid());
        }
        pids.into_iter().map(cpu_seconds).sum()
    }
}

async fn drive(cli: &Cli) -> Result<()> {
    let shape = cli.shape;
    let pages = shape.pages;
    ensure!(
        pages > 0 && shape.rounds > 0 && cli.singles > 0,
        "--pages, --rounds and --singles are at least 1"
    );
    ensure!(
        pages <= shape.slots()?,
        "--pages {pages} do not fit into a pool of {} MiB",
        shape.pool
    );
    let most = fabric_client::proto::limits::LEASE_SLOTS_MAX;
    ensure!(
        pages <= most,
        "--pages {pages} exceeds the {most} slots of a lease"
    );
    ensure!(
        !matches!(cli.plane, Plane::Verbs) || shape.adjacent || pages <= WINDOWS_MAX,
        "--pages {pages} exceeds the {WINDOWS_MAX} memory windows of a grant, one for each \
         scattered page"
    );
    let mut bench = Bench::start(cli).await?;
    bench.round(1).await?;
    let before = bench.cpu()?;
    let mut times = Vec::new();
    for round in 0..shape.rounds {
        eprint!("\rround {} of {}", round + 1, shape.rounds);
        times.push(bench.round(pages).await?.as_secs_f64());
    }
    let cpu = bench.cpu()? - before;
    eprintln!();
    let mut latencies = Vec::new();
    for round in 0..cli.singles {
        if round % 50 == 0 {
            eprint!("\rone-page round {round} of {}", cli.singles);
        }
        latencies.push(bench.round(1).await?.as_secs_f64() * 1e6);
    }
    eprintln!("\rchecking every byte of one more batch");
    bench.destination.ask("wipe", "wiped", LIMIT).await?;
    bench.round(pages).await?;
    let ok = bench.destination.ask("check", "checked ", LIMIT).await? == "checked true";
    times.sort_by(f64::total_cmp);
    latencies.sort_by(f64::total_cmp);
    let bytes = f64::from(pages) * f64::from(shape.page);
    let median = times[times.len() / 2];
    let gib = bytes * times.len() as f64 / f64::from(1 << 30);
    let row = Row {
        plane: format!("{:?}", cli.plane).to_lowercase(),
        gb_s: bytes / median / 1e9,
        us_page: median / f64::from(pages) * 1e6,
        p50: latencies[cli.singles / 2],
        p99: latencies[cli.singles * 99 / 100],
        cpu: cpu / gib,
        ok,
    };
    row.print(cli)?;
    ensure!(ok, "not every byte arrived");
    Ok(())
}

struct Row {
    plane: String,
    gb_s: f64,
    us_page: f64,
    p50: f64,
    p99: f64,
    cpu: f64,
    ok: bool,
}

impl Row {
    fn print(&self, cli: &Cli) -> Result<()> {
        let round =
            |value: f64, digits: i32| (value * 10_f64.powi(digits)).round() / 10_f64.powi(digits);
        let (page, pages) = (cli.shape.page, cli.shape.pages);
        let (gb_s, us_page) = (round(self.gb_s, 3), round(self.us_page, 3));
        let (p50, p99, cpu) = (round(self.p50, 1), round(self.p99, 1), round(self.cpu, 3));
        let mut out = std::io::stdout().lock();
        if cli.json {
            let line = json!({
                "peer": "fabric", "tls": self.plane, "page": page, "pages": pages, "gb_s": gb_s,
                "us_page": us_page, "p50_us": p50, "p99_us": p99, "cpu_s_per_gib": cpu,
                "ok": self.ok,
            });
            return writeln!(out, "{line}").context("print");
        }
        let mut table = comfy_table::Table::new();
        table.set_header([
            "plane",
            "page",
            "pages",
            "GB/s",
            "µs/page",
            "p50 µs",
            "p99 µs",
            "CPU s/GiB",
            "ok",
        ]);
        let mut row = vec![self.plane.clone(), page.to_string(), pages.to_string()];
        row.extend([gb_s, us_page, p50, p99, cpu].map(|value| value.to_string()));
        row.push(self.ok.to_string());
        table.add_row(row);
        writeln!(out, "{table}").context("print")
    }
}

/// The engine that sends.
async fn source(socket: &Path, shape: Shape) -> Result<()> {
    let pool = light::pool(socket, "engine", light::spec(1, shape.page, shape.slots()?)).await?;
    fill(&pool, &shape).await?;
    let slots = shape.named(SOURCE_SEED)?;
    let mut held: Option<HeldLease> = None;
    let mut commands = commands();
    println!("ready");
    while let Some(line) = commands.recv().await {
        match line.split_once(' ') {
            Some(("hold", count)) => {
                let count: usize = count.parse().context("a count")?;
                drop(held.take());
                let named = slots[..count].to_vec();
                let request = lease(named)?;
                held = Some(when_free(async || pool.hold(request.clone()).await).await?);
                println!("held");
            }
            Some(("send", offer)) => {
                let offer = hex::decode(offer).context("an offer in hexadecimal")?;
                let lease = held.take().context("hold comes before send")?;
                println!("sent {}", send(lease, offer).await?.as_nanos());
            }
            _ => bail!("unknown command {line}"),
        }
    }
    drop(held);
    Ok(())
}

async fn send(held: HeldLease, offer: Vec<u8>) -> Result<Duration> {
    let begin = Instant::now();
    let mut sending = held.send(offer.into()).await.context("send")?;
    sending.seal(0, 0..sending.slots()).await.context("seal")?;
    let (outcome, _held) = sending.finish(Vec::new().into()).await;
    let took = begin.elapsed();
    ensure!(
        outcome == Outcome::Delivered,
        "the transfer ended otherwise: {outcome}"
    );
    Ok(took)
}

/// Fills every slot with what `peer_bench.py` fills it with.
async fn fill(pool: &Pool, shape: &Shape) -> Result<()> {
    let all: Vec<SlotIndex> = (0..shape.slots()?).map(SlotIndex).collect();
    let most = fabric_client::proto::limits::LEASE_SLOTS_MAX as usize;
    for chunk in all.chunks(most) {
        let mut held = pool
            .hold(lease(chunk.to_vec())?)
            .await
            .context("hold to fill")?;
        for (position, slot) in (0..).zip(chunk) {
            held.page_mut(0, position).fill(pattern(*slot));
        }
        held.end();
    }
    Ok(())
}

/// The engine that receives.
async fn destination(socket: &Path, shape: Shape) -> Result<()> {
    let pool = light::pool(socket, "engine", light::spec(1, shape.page, shape.slots()?)).await?;
    let (sources, slots) = (shape.named(SOURCE_SEED)?, shape.named(DESTINATION_SEED)?);
    let mut delivered: Option<Delivered> = None;
    let mut commands = commands();
    println!("ready");
    while let Some(line) = commands.recv().await {
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("receive", count) => {
                let count: usize = count.parse().context("a count")?;
                drop(delivered.take());
                let named = slots[..count].to_vec();
                let request = lease(named)?;
                let lease = when_free(async || pool.receive(request.clone()).await).await?;
                println!("offer {}", hex::encode(lease.offer()));
                delivered = Some(lease.delivered().await.context("delivery")?);
                println!("delivered");
            }
            ("wipe", _) => {
                delivered = None;
                let request = lease(slots.clone())?;
                let mut held = when_free(async || pool.hold(request.clone()).await).await?;
                for position in 0..shape.pages {
                    held.page_mut(0, position).fill(0xff);
                }
                println!("wiped");
            }
            ("check", _) => {
                let delivered = delivered.as_ref().context("receive comes before check")?;
                let right = (0..).zip(&sources).all(|(position, source)| {
                    let byte = pattern(*source);
                    delivered.page(0, position).iter().all(|got| *got == byte)
                });
                println!("checked {right}");
            }
            _ => bail!("unknown command {line}"),
        }
    }
    drop(delivered);
    Ok(())
}

fn pattern(slot: SlotIndex) -> u8 {
    u8::try_from((u64::from(slot.0) * 31 + 7) % 251).expect("below 251")
}

fn lease(named: Vec<SlotIndex>) -> Result<LeaseRequest> {
    Ok(LeaseRequest {
        tenant: TenantId::new("bench").context("a tenant")?,
        request: RequestId::new("bench").context("a request")?,
        tokens: TokenRange {
            start: 0,
            count: named.len() as u64,
        },
        named,
    })
}

/// Leases slots as soon as the last lease of them has ended, which the daemon hears of by the way.
async fn when_free<T>(lease: impl AsyncFn() -> Result<T, LeaseError>) -> Result<T> {
    let deadline = Instant::now() + LIMIT / 2;
    loop {
        match lease().await {
            Err(LeaseError::Rejected(reason))
                if reason.label() == "slot_not_free" && Instant::now() < deadline => {}
            result => return result.context("lease slots"),
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// User and system time of a process so far.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    // M: proc_pid_stat(5): the name ends at the last parenthesis; utime and stime are fields 14,
    // 15.
    let (_, fields) = text.rsplit_once(')').context("a process has a name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |index: usize| -> Result<u64> {
        fields
            .get(index)
            .context("stat has the field")?
            .parse()
            .context("a number of ticks")
    };
    let ticks = ticks(11)? + ticks(12)?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

const SOURCE_SEED: u64 = 1;
const DESTINATION_SEED: u64 = 2;
/// What the verbs plane gives a grant, and a lane refuses beyond.
const WINDOWS_MAX: u32 = 1024;
/// A bound against hanging.
const LIMIT: Duration = Duration::from_secs(120);
