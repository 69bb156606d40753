//! The real model over both planes: the text is a single node's.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use fabric_tests::cluster::NodeOptions;
use fabric_tests::completions::Ask;
use fabric_tests::programs::Programs;
use fabric_tests::real_model::same_text;

const PROMPT: &str = include_str!("../data/prompt.txt");

#[tokio::test(flavor = "multi_thread")]
async fn a_real_prompt_is_prefilled_here_and_decoded_there() -> Result<()> {
    let programs = Programs::find(&[])?;
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
    same_text(
        &programs,
        nodes,
        1024,
        &Ask::new("a", PROMPT.trim_end(), 24),
    )
    .await
}
