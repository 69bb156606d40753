//! The demo: a real prompt is prefilled on one node, moved, verified and decoded on another; then
//! the two leaks that Fabric exists for, and a flipped bit, are tried on it.

#![forbid(unsafe_code)]

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use fabric_tests::cluster::{Cluster, NodeOptions};
use fabric_tests::completions::{Answer, Ask, Refusal};
use fabric_tests::programs::Programs;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Prefills a prompt on one node, decodes it on another, and attacks the transfer.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// The data plane.
    #[arg(long, value_enum, default_value = "quic")]
    plane: Plane,
    /// The prompt; a text of a few hundred tokens if not given.
    #[arg(long)]
    prompt: Option<String>,
    /// The most tokens to generate.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(8..=512))]
    max_tokens: u32,
    /// The model: smollm2, random:SEED, or a path to a .gguf file.
    #[arg(long, default_value = "smollm2")]
    model: String,
    /// Print one JSON document.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Plane {
    Quic,
    Shm,
    /// RDMA: this host needs a device with an active port.
    Verbs,
}

const PROMPT: &str = include_str!("../../data/prompt.txt");
/// The longest prompt and answer together.
const CONTEXT: u32 = 1024;
const PREFILL: usize = 0;
const DECODE: usize = 1;
/// A bound against hanging.
const LIMIT: Duration = Duration::from_secs(60);

/// One line of the check.
struct Check {
    what: &'static str,
    holds: bool,
    evidence: String,
}

fn main() -> ExitCode {
    match block_on(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn block_on(cli: &Cli) -> Result<()> {
    let runtime = tokio::runtime::Runtime::new().context("start the runtime")?;
    runtime.block_on(async {
        tokio::select! {
            result = run(cli) => result,
            // Dropping the run ends its processes.
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    })
}

async fn run(cli: &Cli) -> Result<()> {
    let mut demo = Demo::start(cli).await?;
    let (answer, seconds) = demo.answer().await?;
    let reference = demo.reference(&demo.ask(), "single node").await?;
    let mut checks = vec![Check {
        what: "same text as a single node's",
        holds: answer.text == reference.text && answer.fabric["outcome"] == "delivered",
        evidence: format!("{} characters, compared", answer.text.len()),
    }];
    checks.push(demo.oversized().await?);
    checks.push(demo.aborted().await?);
    let verified = "fabric_pages_verified_total";
    let mut pages_verified = demo.cluster.metrics(DECODE).await?.value(verified);
    checks.push(demo.flipped(&reference).await?);
    let metrics = demo.cluster.metrics(DECODE).await?;
    // A daemon that was restarted counts from zero.
    pages_verified = match cli.plane {
        Plane::Quic => metrics.value(verified),
        Plane::Shm | Plane::Verbs => pages_verified + metrics.value(verified),
    };
    let report = json!({
        "plane": demo.plane,
        "prompt_tokens": answer.usage["prompt_tokens"],
        "completion_tokens": answer.usage["completion_tokens"],
        "text": answer.text,
        "pages": answer.fabric["pages"],
        "bytes": answer.fabric["bytes"],
        "attempts": answer.fabric["attempts"],
        "transfer_seconds": answer.fabric["transfer_seconds"],
        "gb_s": gb_s(&answer.fabric),
        "ttft_seconds": answer.fabric["ttft_seconds"],
        "seconds": seconds,
        "pages_verified_in_all": pages_verified,
        "checks": checks.iter().map(Check::json).collect::<Vec<_>>(),
        "ok": checks.iter().all(|check| check.holds),
    });
    print(cli, &report, &checks)?;
    ensure!(
        checks.iter().all(|check| check.holds),
        "a check does not hold"
    );
    Ok(())
}

/// The cluster, and where its engines listen.
struct Demo<'a> {
    cli: &'a Cli,
    cluster: Cluster,
    programs: Programs,
    plane: &'static str,
    prompt: String,
    decode: String,
    single: String,
}

impl<'a> Demo<'a> {
    async fn start(cli: &'a Cli) -> Result<Self> {
        let plane = match cli.plane {
            Plane::Quic => "quic",
            Plane::Shm => "shm",
            Plane::Verbs => "verbs",
        };
        let programs = Programs::find(&[plane])?;
        fetch(&programs, &cli.model).await?;
        let nodes = ["prefill", "decode"].map(|name| {
            NodeOptions::new(name)
                .plane(plane)
                .engine("slow", &["*"])
                .engine("narrow", &["*"])
        });
        let bar = slow("start two daemons");
        let cluster = Cluster::start(&programs.daemon, nodes.to_vec()).await?;
        bar.finish_and_clear();
        let mut demo = Self {
            cli,
            cluster,
            programs,
            plane,
            prompt: cli
                .prompt
                .as_deref()
                .unwrap_or(PROMPT)
                .trim_end()
                .to_owned(),
            decode: String::new(),
            single: String::new(),
        };
        let slots = (CONTEXT / 16).to_string();
        let prefill = demo
            .engine("prefill", PREFILL, "engine", &["--slots", &slots])
            .await?;
        let more = ["--slots", &slots, "--prefill", &prefill];
        demo.decode = demo.engine("decode", DECODE, "engine", &more).await?;
        demo.single = demo.engine("single", DECODE, "none", &[]).await?;
        Ok(demo)
    }

    /// Starts an engine with a role: its name up to the first hyphen.
    async fn engine(
        &mut self,
        name: &str,
        node: usize,
        engine: &str,
        more: &[&str],
    ) -> Result<String> {
        let bar = slow(&format!("load the model: {name}"));
        let role = name.split('-').next().unwrap_or(name);
        let socket = self.cluster.nodes[node].socket().display().to_string();
        let mut arguments = vec!["--role", role, "--model", &self.cli.model];
        if role != "single" {
            arguments.extend(["--daemon", &socket, "--name", engine]);
        }
        let context = CONTEXT.to_string();
        if !more.contains(&"--context") {
            arguments.extend(["--context", &context]);
        }
        arguments.extend(more);
        let arguments: Vec<String> = arguments.into_iter().map(ToOwned::to_owned).collect();
        let url = self
            .cluster
            .engine(node, &self.programs.engine, name, &arguments)
            .await;
        bar.finish_and_clear();
        url
    }

    fn ask(&self) -> Ask {
        Ask::new("alice", &self.prompt, self.cli.max_tokens)
    }

    /// The main job, with the text as it comes.
    async fn answer(&self) -> Result<(Answer, f64)> {
        if !self.cli.json {
            println!("\n{}\n", self.prompt);
        }
        let begin = Instant::now();
        let bar = slow("prefill on one node, pages stream to the other");
        let json = self.cli.json;
        let shown = bar.clone();
        let ask = self.ask();
        let answer = ask.streamed(self.cluster.http(), &self.decode, move |text| {
            shown.finish_and_clear();
            if !json {
                print!("{text}");
                // A terminal that is gone ends the demo soon enough.
                drop(std::io::stdout().flush());
            }
        });
        let answer = answer.await?;
        bar.finish_and_clear();
        if !json {
            println!("\n");
        }
        Ok((served(answer)?, begin.elapsed().as_secs_f64()))
    }

    async fn reference(&self, ask: &Ask, what: &str) -> Result<Answer> {
        let bar = slow(&format!("the same on one node alone: {what}"));
        let answer = ask.whole(self.cluster.http(), &self.single).await;
        bar.finish_and_clear();
        served(answer?)
    }

    /// The first leak's shape: a prompt that cannot fit.
    async fn oversized(&self) -> Result<Check> {
        let bar = slow("an oversized prompt");
        let leases = "fabric_leases_started_total";
        let before = self.cluster.metrics(DECODE).await?.value(leases);
        let prompt = format!("{} ", self.prompt).repeat(8);
        let ask = Ask::new("alice", &prompt, self.cli.max_tokens);
        let answer = ask.whole(self.cluster.http(), &self.decode).await?;
        let after = self.cluster.metrics(DECODE).await?.value(leases);
        bar.finish_and_clear();
        let (holds, evidence) = match answer {
            Ok(answer) => (false, format!("served: {}", answer.text)),
            Err(refusal) => {
                let body = message(&refusal);
                let named = body.contains(&CONTEXT.to_string());
                let holds = refusal.status == 400 && named && before == after;
                (
                    holds,
                    format!("HTTP {}: {body}; no slot was leased", refusal.status),
                )
            }
        };
        Ok(Check {
            what: "an oversized prompt is refused",
            holds,
            evidence,
        })
    }

    /// The second leak's shape: an abort in mid-transfer, and another tenant on the same slots.
    async fn aborted(&mut self) -> Result<Check> {
        let layer_delay = ["--slots", "64", "--layer-delay-ms", "60"];
        let slow_prefill = self
            .engine("prefill-slow", PREFILL, "slow", &layer_delay)
            .await?;
        // A pool that one request fills: whoever comes next gets the same slots.
        let whole = self.reference(&self.ask(), "to count its tokens").await?;
        let tokens = whole.usage["total_tokens"]
            .as_u64()
            .context("usage counts")?;
        let prompt_tokens = whole.usage["prompt_tokens"]
            .as_u64()
            .context("usage counts")?;
        let most = prompt_tokens + u64::from(self.cli.max_tokens);
        let slots = most.max(tokens).div_ceil(16);
        let (slots, context) = (slots.to_string(), (slots * 16).to_string());
        let more = [
            "--slots",
            &slots,
            "--context",
            &context,
            "--prefill",
            &slow_prefill,
        ];
        let decode = self
            .engine("decode-narrow", DECODE, "narrow", &more)
            .await?;
        let bar = slow("a request, whole: its slots and epochs");
        let first = served(self.ask().whole(self.cluster.http(), &decode).await?)?;
        bar.set_message("the same again; its client goes away in mid-transfer");
        let dropped = self.abandon(&decode).await?;
        bar.set_message("another tenant, on the same slots");
        let half = self.prompt.len() / 2;
        let half = (half..)
            .find(|at| self.prompt.is_char_boundary(*at))
            .unwrap_or(0);
        let ask = Ask::new("bob", &self.prompt[half..], 32);
        let second = self.patiently(&ask, &decode).await?;
        bar.finish_and_clear();
        let alone = self.reference(&ask, "the other tenant").await?;
        let (kept, example) = same_slots(&first.fabric["slots"], &second.fabric["slots"])?;
        Ok(Check {
            what: "an abort in mid-transfer leaks nothing to the next tenant",
            holds: kept && dropped && second.text == alone.text,
            evidence: format!("{example}; the next tenant's text is its single-node text"),
        })
    }

    /// Sends a request and disconnects once its pages are on the way. Whether they were.
    async fn abandon(&self, decode: &str) -> Result<bool> {
        let written = "fabric_bytes_written_total";
        let before = self.cluster.metrics(PREFILL).await?.value(written);
        let (http, url, ask) = (self.cluster.http().clone(), decode.to_owned(), self.ask());
        let request = tokio::spawn(async move { ask.whole(&http, &url).await });
        let deadline = Instant::now() + LIMIT;
        let moving = loop {
            let moved = self.cluster.metrics(PREFILL).await?.value(written) - before;
            let granted = self.cluster.metrics(DECODE).await?;
            let granted = granted.value("fabric_pool_slots{state=\"granted\"}");
            if moved > 0.0 && granted > 0.0 {
                break true;
            }
            if request.is_finished() || Instant::now() > deadline {
                break false;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        // Dropping the request closes its connection: what an impatient client does.
        request.abort();
        Ok(moving && request.await.is_err())
    }

    /// Asks until the slots are free again: they are held until the writes have provably stopped.
    async fn patiently(&self, ask: &Ask, url: &str) -> Result<Answer> {
        let deadline = Instant::now() + LIMIT;
        loop {
            match ask.whole(self.cluster.http(), url).await? {
                Err(refusal) if refusal.status == 503 && Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                answer => return served(answer),
            }
        }
    }

    /// A bit flips on the wire, below every checksum of the network.
    async fn flipped(&mut self, reference: &Answer) -> Result<Check> {
        let bar = slow("a flipped bit: restart a daemon with a fault");
        // The daemon whose plane moves the bytes: over shm the destination's copies them. Over
        // verbs devices do, and the destination's daemon flips what has arrived.
        let at = match self.cli.plane {
            Plane::Quic => PREFILL,
            Plane::Shm | Plane::Verbs => DECODE,
        };
        let node = &mut self.cluster.nodes[at];
        node.kill()?;
        node.options.settings.push_str("[fault]\nflip_pages = 1\n");
        self.cluster.configure(at)?;
        self.cluster.restart(at).await?;
        let corrupt = "fabric_pages_corrupt_total";
        let before = self.cluster.metrics(DECODE).await?.value(corrupt);
        // The engines connect to the new daemon by themselves.
        let answer = self.patiently(&self.ask(), &self.decode).await?;
        let caught = self.cluster.metrics(DECODE).await?.value(corrupt) - before;
        bar.finish_and_clear();
        let attempts = &answer.fabric["attempts"];
        let same = answer.text == reference.text;
        Ok(Check {
            what: "a flipped bit is caught, and its page sent again",
            holds: *attempts == 2 && caught == 1.0 && same,
            evidence: format!(
                "attempts: {attempts}, corrupt pages: {caught}, text {}",
                if same { "identical" } else { "different" }
            ),
        })
    }
}

impl Check {
    fn json(&self) -> Value {
        json!({"check": self.what, "pass": self.holds, "evidence": self.evidence})
    }
}

/// Resolves the model; the engine shows its own progress.
async fn fetch(programs: &Programs, model: &str) -> Result<()> {
    eprintln!("model {model}: found, or else fetched");
    let engine: &PathBuf = &programs.engine;
    let mut command = tokio::process::Command::new(engine);
    command
        .args(["fetch", "--model", model])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let status = command
        .kill_on_drop(true)
        .status()
        .await
        .context("run the engine")?;
    ensure!(status.success(), "the model cannot be fetched: see above");
    Ok(())
}

/// Whether two answers had a slot in common, and each such slot's epoch has grown by 2 or more: the
/// abandoned request had it in between.
fn same_slots(first: &Value, second: &Value) -> Result<(bool, String)> {
    let parse = |slots: &Value| -> Result<Vec<(u64, u64)>> {
        serde_json::from_value(slots.clone()).context("slots are pairs of index and epoch")
    };
    let (first, second) = (parse(first)?, parse(second)?);
    let mut common = Vec::new();
    for (index, after) in second {
        if let Some((_, before)) = first.iter().find(|(other, _)| *other == index) {
            common.push((index, *before, after));
        }
    }
    let Some((index, before, after)) = common.first().copied() else {
        return Ok((false, "no slot in common".to_owned()));
    };
    let grown = common.iter().all(|(_, before, after)| *after >= before + 2);
    let text = format!(
        "{} slots in common; slot {index}: epoch {before}, aborted, then epoch {after} (+{})",
        common.len(),
        after.saturating_sub(before)
    );
    Ok((grown, text))
}

fn served(answer: std::result::Result<Answer, Refusal>) -> Result<Answer> {
    answer.map_err(|refusal| {
        anyhow::anyhow!("not served: HTTP {}: {}", refusal.status, message(&refusal))
    })
}

fn message(refusal: &Refusal) -> String {
    let body: Value = serde_json::from_str(&refusal.body).unwrap_or(Value::Null);
    body["error"]["message"]
        .as_str()
        .unwrap_or(&refusal.body)
        .to_owned()
}

fn gb_s(fabric: &Value) -> f64 {
    let (bytes, seconds) = (
        fabric["bytes"].as_f64(),
        fabric["transfer_seconds"].as_f64(),
    );
    bytes.unwrap_or(0.0) / seconds.unwrap_or(f64::INFINITY).max(1e-9) / 1e9
}

/// Something slow: a spinner on a terminal, else a line.
fn slow(what: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        eprintln!("{what}");
    }
    let bar = ProgressBar::new_spinner().with_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

fn print(cli: &Cli, report: &Value, checks: &[Check]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if cli.json {
        return writeln!(out, "{report:#}").context("print");
    }
    let mut table = comfy_table::Table::new();
    let number =
        |key: &str, digits: usize| format!("{:.digits$}", report[key].as_f64().unwrap_or(f64::NAN));
    for (what, value) in [
        ("plane", report["plane"].as_str().unwrap_or("?").to_owned()),
        ("tokens of the prompt", number("prompt_tokens", 0)),
        ("pages moved and verified", number("pages", 0)),
        ("bytes", number("bytes", 0)),
        ("GB/s, the prompt's computation included", number("gb_s", 4)),
        (
            "seconds from offer to delivery",
            number("transfer_seconds", 3),
        ),
        ("seconds to the first token", number("ttft_seconds", 3)),
        (
            "pages verified in the whole demo",
            number("pages_verified_in_all", 0),
        ),
    ] {
        table.add_row([what.to_owned(), value]);
    }
    writeln!(out, "{table}\n").context("print")?;
    for check in checks {
        let word = if check.holds { "PASS" } else { "FAIL" };
        writeln!(out, "{word}  {}\n      {}", check.what, check.evidence).context("print")?;
    }
    Ok(())
}
