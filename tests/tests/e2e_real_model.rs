//! The real model over both planes: the text is a single node's.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use fabric_tests::cluster::{Cluster, NodeOptions};
use fabric_tests::completions::Ask;
use fabric_tests::programs::Programs;

const PROMPT: &str = include_str!("../data/prompt.txt");

#[tokio::test(flavor = "multi_thread")]
async fn a_real_prompt_is_prefilled_here_and_decoded_there() -> Result<()> {
    let programs = Programs::find()?;
    let found = tokio::process::Command::new(&programs.engine)
        .args(["fetch", "--model", "smollm2"])
        .output()
        .await
        .context("run the engine")?;
    ensure!(
        found.status.success(),
        "this test needs the model; run: fabric-engine fetch --model smollm2\n{}",
        String::from_utf8_lossy(&found.stderr)
    );
    let mut nodes = ["prefill", "decode"].map(NodeOptions::new);
    nodes[1].planes = vec!["quic"];
    let mut cluster = Cluster::start(&programs.daemon, nodes.to_vec()).await?;
    cluster.loud = true;
    let sockets = [0, 1].map(|index| cluster.nodes[index].socket().display().to_string());
    let arguments = |role: &str, index: usize, more: &[&str]| {
        let mut all = vec!["--role", role, "--model", "smollm2", "--context", "1024"];
        all.extend(["--slots", "64", "--daemon", &sockets[index]]);
        all.extend(more);
        all.into_iter()
            .map(ToOwned::to_owned)
            .collect::<Vec<String>>()
    };
    let (prefill, single) = (arguments("prefill", 0, &[]), arguments("single", 0, &[]));
    let prefill = cluster
        .engine(0, &programs.engine, "prefill", &prefill)
        .await?;
    let decode = arguments("decode", 1, &["--prefill", &prefill]);
    let decode = cluster
        .engine(1, &programs.engine, "decode", &decode)
        .await?;
    let single = cluster
        .engine(0, &programs.engine, "single", &single)
        .await?;
    let ask = Ask::new("a", PROMPT.trim_end(), 24);
    let alone = ask.whole(cluster.http(), &single).await?;
    let alone = alone.map_err(|refusal| anyhow::anyhow!("single: {}", refusal.body))?;
    let answer = ask.whole(cluster.http(), &decode).await?;
    let answer = answer.map_err(|refusal| anyhow::anyhow!("fabric: {}", refusal.body))?;
    assert_eq!(answer.text, alone.text);
    let tokens = answer.usage["prompt_tokens"].as_u64().context("usage")?;
    assert_eq!(
        answer.fabric["pages"],
        tokens.div_ceil(16) * 60,
        "60 regions a slot"
    );
    cluster.slots_all_free(1).await?;
    cluster.loud = false;
    Ok(())
}
