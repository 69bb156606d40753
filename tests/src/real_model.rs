//! The real model on one node alone, and then on two: the text must be the same.

use anyhow::{Context, Result, ensure};

use crate::cluster::{Cluster, NodeOptions};
use crate::completions::{Answer, Ask};
use crate::programs::Programs;

const PREFILL: usize = 0;
const DECODE: usize = 1;

/// Tokens of a slot.
const SLOT_TOKENS: u64 = 16;

/// Regions of a slot: keys and values of each of the model's 30 layers.
const REGIONS: u64 = 60;

/// Prefills a prompt on the first node, decodes it on the second, and compares the text with what
/// the second says alone.
///
/// # Errors
///
/// If anything does not start or answer, or the text is another.
pub async fn same_text(
    programs: &Programs,
    nodes: [NodeOptions; 2],
    context: u64,
    ask: &Ask,
) -> Result<()> {
    let mut cluster = Cluster::start(&programs.daemon, nodes.to_vec()).await?;
    cluster.loud = true;
    let sockets = [PREFILL, DECODE].map(|index| cluster.nodes[index].socket());
    let (context, slots) = (context.to_string(), (context / SLOT_TOKENS).to_string());
    let arguments = |role: &str, index: usize, more: &[&str]| -> Vec<String> {
        let socket = sockets[index].display().to_string();
        let mut all = vec!["--role", role, "--model", "smollm2", "--context", &context];
        all.extend(["--slots", &slots, "--daemon", &socket]);
        all.extend(more);
        all.into_iter().map(ToOwned::to_owned).collect()
    };
    let engine = &programs.engine;
    let single = arguments("single", DECODE, &[]);
    let single = cluster.engine(DECODE, engine, "single", &single).await?;
    let alone = served(ask, &cluster, &single).await.context("single")?;
    // One model in memory at a time on each host.
    cluster.process("single")?.kill();
    let prefill = arguments("prefill", PREFILL, &[]);
    let prefill = cluster.engine(PREFILL, engine, "prefill", &prefill).await?;
    let decode = arguments("decode", DECODE, &["--prefill", &prefill]);
    let decode = cluster.engine(DECODE, engine, "decode", &decode).await?;
    let answer = served(ask, &cluster, &decode).await.context("fabric")?;
    ensure!(
        answer.text == alone.text,
        "{:?}, alone {:?}",
        answer.text,
        alone.text
    );
    ensure!(answer.fabric["outcome"] == "delivered", "{}", answer.fabric);
    let tokens = answer.usage["prompt_tokens"].as_u64().context("usage")?;
    let pages = tokens.div_ceil(SLOT_TOKENS) * REGIONS;
    ensure!(answer.fabric["pages"] == pages, "{}", answer.fabric);
    eprintln!("{tokens} tokens, {pages} pages: {:?}", answer.text);
    cluster.slots_all_free(DECODE).await?;
    cluster.loud = false;
    Ok(())
}

async fn served(ask: &Ask, cluster: &Cluster, url: &str) -> Result<Answer> {
    let answer = ask.whole(cluster.http(), url).await?;
    answer.map_err(|refusal| anyhow::anyhow!("HTTP {}: {}", refusal.status, refusal.body))
}
