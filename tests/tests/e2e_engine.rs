//! The thin engine over real daemons: its text is a single node's, and no fault is ever 200.

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_tests::cluster::{Cluster, NodeOptions, scrape};
use fabric_tests::completions::{Answer, Ask, Refusal};
use fabric_tests::light::adds_up;
use fabric_tests::programs::Programs;

const PREFILL: usize = 0;
const DECODE: usize = 1;

/// Two daemons, a prefill, a decode and a single engine, all with the same small model.
struct World {
    cluster: Cluster,
    decode: String,
    single: String,
}

/// What differs from test to test.
#[derive(Clone, Copy)]
struct Shape {
    plane: &'static str,
    prefill_slots: &'static str,
    decode_slots: &'static str,
    delay_ms: &'static str,
}

const SHAPE: Shape = Shape {
    plane: "quic",
    prefill_slots: "256",
    decode_slots: "256",
    delay_ms: "0",
};

impl World {
    async fn start(shape: Shape) -> Result<Self> {
        let programs = Programs::find(&[])?;
        let nodes = ["prefill", "decode"].map(|name| NodeOptions::new(name).plane(shape.plane));
        let mut cluster = Cluster::start(&programs.daemon, nodes.to_vec()).await?;
        cluster.loud = true;
        let socket =
            |cluster: &Cluster, index: usize| cluster.nodes[index].socket().display().to_string();
        let prefill_context = shape.prefill_slots.parse::<u32>().context("slots")? * 16;
        let context = prefill_context.min(2048).to_string();
        let own = socket(&cluster, PREFILL);
        let arguments = words(&[
            "--role",
            "prefill",
            "--model",
            "random:1",
            "--daemon",
            &own,
            "--slots",
            shape.prefill_slots,
            "--context",
            &context,
            "--layer-delay-ms",
            shape.delay_ms,
        ]);
        let prefill = cluster
            .engine(0, &programs.engine, "prefill", &arguments)
            .await?;
        let own = socket(&cluster, DECODE);
        let context = shape.decode_slots.parse::<u32>().context("slots")? * 16;
        let context = context.min(2048).to_string();
        let arguments = words(&[
            "--role",
            "decode",
            "--model",
            "random:1",
            "--daemon",
            &own,
            "--slots",
            shape.decode_slots,
            "--context",
            &context,
            "--prefill",
            &prefill,
        ]);
        let decode = cluster
            .engine(1, &programs.engine, "decode", &arguments)
            .await?;
        let single = words(&["--role", "single", "--model", "random:1"]);
        let single = cluster
            .engine(1, &programs.engine, "single", &single)
            .await?;
        Ok(Self {
            cluster,
            decode,
            single,
        })
    }

    /// Asks both ways and compares the texts.
    async fn same(&self, ask: &Ask, stream: bool) -> Result<Answer> {
        let http = self.cluster.http();
        let alone = ok(ask.whole(http, &self.single).await?)?;
        let answer = match stream {
            true => ok(ask.streamed(http, &self.decode, |_| ()).await?)?,
            false => ok(ask.whole(http, &self.decode).await?)?,
        };
        ensure!(
            answer.text == alone.text,
            "{:?} is not {:?}",
            answer.text,
            alone.text
        );
        ensure!(!answer.text.is_empty(), "no text");
        ensure!(answer.fabric["outcome"] == "delivered", "{}", answer.fabric);
        ensure!(
            answer.usage == alone.usage,
            "{} is not {}",
            answer.usage,
            alone.usage
        );
        Ok(answer)
    }

    async fn refused(&self, ask: &Ask) -> Result<Refusal> {
        let answer = ask.whole(self.cluster.http(), &self.decode).await?;
        answer.err().context("served, and should have been refused")
    }

    async fn passed(mut self) -> Result<()> {
        for index in 0..2 {
            self.cluster.slots_all_free(index).await?;
            adds_up(&self.cluster, index).await?;
        }
        self.cluster.loud = false;
        Ok(())
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

fn ok(answer: std::result::Result<Answer, Refusal>) -> Result<Answer> {
    answer.map_err(|refusal| anyhow::anyhow!("HTTP {}: {}", refusal.status, refusal.body))
}

fn prompt(words: usize) -> String {
    (0..words).map(|word| format!("w{} ", word % 17)).collect()
}

async fn same_text(plane: &'static str) -> Result<()> {
    let world = World::start(Shape { plane, ..SHAPE }).await?;
    for words in [1, 4, 40, 150] {
        for stream in [false, true] {
            let greedy = Ask::new("a", &prompt(words), 24);
            let answer = world.same(&greedy, stream).await?;
            ensure!(answer.fabric["attempts"] == 1, "{}", answer.fabric);
            world.same(&greedy.sampled(0.8, 42), stream).await?;
        }
    }
    world.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn text_over_quic_is_a_single_nodes_text() -> Result<()> {
    same_text("quic").await
}

#[tokio::test(flavor = "multi_thread")]
async fn text_over_shm_is_a_single_nodes_text() -> Result<()> {
    same_text("shm").await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oversized_prompt_gets_400_with_the_numbers() -> Result<()> {
    let world = World::start(Shape {
        decode_slots: "16",
        ..SHAPE
    })
    .await?;
    let refusal = world.refused(&Ask::new("a", &prompt(600), 16)).await?;
    ensure!(
        refusal.status == 400,
        "HTTP {}: {}",
        refusal.status,
        refusal.body
    );
    ensure!(
        refusal.body.contains("256"),
        "the context is not named: {}",
        refusal.body
    );
    world.same(&Ask::new("a", &prompt(5), 8), false).await?;
    world.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_beyond_the_prefill_pool_gets_400_with_the_numbers() -> Result<()> {
    let world = World::start(Shape {
        prefill_slots: "4",
        ..SHAPE
    })
    .await?;
    let refusal = world.refused(&Ask::new("a", &prompt(60), 16)).await?;
    ensure!(
        refusal.status == 400,
        "HTTP {}: {}",
        refusal.status,
        refusal.body
    );
    ensure!(
        refusal.body.contains("64"),
        "the pool is not named: {}",
        refusal.body
    );
    world.same(&Ask::new("a", &prompt(5), 8), false).await?;
    world.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_pool_gets_503_with_retry_after() -> Result<()> {
    let world = World::start(Shape {
        decode_slots: "12",
        delay_ms: "700",
        ..SHAPE
    })
    .await?;
    let first = Ask::new("a", &prompt(30), 60);
    let (http, url) = (world.cluster.http().clone(), world.decode.clone());
    let running = tokio::spawn(async move { first.whole(&http, &url).await });
    let leased = "fabric_pool_slots{state=\"leased\"}";
    world
        .cluster
        .until(DECODE, "slots are leased", |now| now.value(leased) > 0.0)
        .await?;
    let refusal = world.refused(&Ask::new("b", &prompt(30), 60)).await?;
    ensure!(
        refusal.status == 503,
        "HTTP {}: {}",
        refusal.status,
        refusal.body
    );
    ensure!(refusal.retry_after.is_some(), "no Retry-After");
    ok(running.await.context("the first request")??)?;
    world.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_prefill_dies_gets_502_and_never_200() -> Result<()> {
    for daemon in [false, true] {
        let mut world = World::start(Shape {
            delay_ms: "500",
            ..SHAPE
        })
        .await?;
        let ask = Ask::new("a", &prompt(60), 16);
        let (http, url) = (world.cluster.http().clone(), world.decode.clone());
        let running = tokio::spawn(async move { ask.whole(&http, &url).await });
        let granted = "fabric_pool_slots{state=\"granted\"}";
        world
            .cluster
            .until(DECODE, "a grant is open", |now| now.value(granted) > 0.0)
            .await?;
        if daemon {
            world.cluster.nodes[PREFILL].kill()?;
        } else {
            world.cluster.process("prefill")?.kill();
        }
        let limit = Duration::from_secs(5);
        let answer = tokio::time::timeout(limit, running)
            .await
            .context("no answer in 5 s")?;
        let answer = answer.context("the request")??;
        let refusal = answer
            .err()
            .context("sglang 33507: half a prompt answered with 200")?;
        ensure!(
            refusal.status == 502,
            "HTTP {}: {}",
            refusal.status,
            refusal.body
        );
        world.cluster.slots_all_free(DECODE).await?;
        world.cluster.loud = false;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_at_the_same_time_each_get_their_own_text() -> Result<()> {
    let world = World::start(SHAPE).await?;
    for round in 0..3 {
        let asks: Vec<Ask> = (0..8)
            .map(|index| {
                let tenant = ["a", "b"][index % 2];
                Ask::new(
                    tenant,
                    &format!("{tenant}{round}{index} {}", prompt(20 + index)),
                    12,
                )
            })
            .collect();
        let all = asks.iter().map(|ask| world.same(ask, false));
        for answer in futures_util::future::join_all(all).await {
            answer?;
        }
    }
    world.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_comes_in_pieces_and_the_pages_for_operators_answer() -> Result<()> {
    let world = World::start(SHAPE).await?;
    let answer = world.same(&Ask::new("a", &prompt(9), 24), true).await?;
    ensure!(answer.pieces > 1, "in one piece: {answer:?}");
    for url in [&world.decode, &world.single] {
        let health = world
            .cluster
            .http()
            .get(format!("{url}/health"))
            .send()
            .await?;
        ensure!(health.status() == 200, "{url}: {}", health.status());
        let metrics = scrape(world.cluster.http(), &format!("{url}/metrics")).await?;
        ensure!(
            metrics.sum("fabric_engine_requests_total") >= 1.0,
            "nothing was counted"
        );
    }
    let status = world.cluster.status(DECODE).await?;
    ensure!(status["phase"] == "serving", "{status}");
    world.passed().await
}
