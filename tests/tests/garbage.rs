//! Bad bytes on either socket: a clear line in the log, a closed connection, a daemon that lives on
//! in bounded memory.

#![forbid(unsafe_code)]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_tests::cluster::NodeOptions;
use fabric_tests::light::{Pair, spec};
use fabric_tests::random::Random;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UdpSocket, UnixStream};

async fn pair() -> Result<Pair> {
    let nodes = ["prefill", "decode"].map(|name| NodeOptions::new(name).plane("quic"));
    Pair::start(nodes, spec(2, 4096, 16)).await
}

fn noise(random: &mut Random, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|_| random.next_u64().to_le_bytes()[0])
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_engine_socket_closes_that_connection_alone() -> Result<()> {
    let pair = pair().await?;
    let node = &pair.cluster.nodes[1];
    let before = node.daemon()?.resident_bytes()?;
    let mut random = Random::from_environment("garbage");
    let length = |claimed: u32| claimed.to_le_bytes().to_vec();
    let mut attacks = vec![
        length(0),
        length(u32::MAX),
        length(4 << 20),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        [length(8), vec![0xff; 8]].concat(),
    ];
    attacks.extend((0..40).map(|_| noise(&mut random, 4096)));
    for attack in attacks {
        let mut socket = UnixStream::connect(node.socket())
            .await
            .context("connect")?;
        // The daemon may close while we still write.
        drop(socket.write_all(&attack).await);
        drop(socket.shutdown().await);
        let mut answer = Vec::new();
        let closed = tokio::time::timeout(Duration::from_secs(10), socket.read_to_end(&mut answer));
        // An error is a reset: closed, too.
        drop(closed.await.context("the connection was not closed")?);
    }
    let grown = node.daemon()?.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 64 << 20, "the daemon grew by {grown} bytes");
    let metrics = pair.cluster.metrics(1).await?;
    let refused = metrics.starting("fabric_sessions_refused_total");
    ensure!(
        metrics.sum("fabric_sessions_refused_total") > 0.0,
        "refusals: {refused:?}"
    );
    let log = node.log();
    ensure!(
        log.contains("malformed") || log.contains("frame"),
        "the log does not say why:\n{log}"
    );
    ensure!(!log.contains("panicked"), "{log}");
    drop(pair.delivers(&pair.job("a", 16, 1)).await?);
    pair.passed().await
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_the_quic_port_changes_nothing() -> Result<()> {
    let pair = pair().await?;
    let node = &pair.cluster.nodes[1];
    let before = node.daemon()?.resident_bytes()?;
    let mut random = Random::from_environment("garbage");
    let socket = UdpSocket::bind("127.0.0.1:0").await.context("bind")?;
    for round in 0..2000 {
        let mut datagram = noise(&mut random, 1200);
        if round % 2 == 0 {
            // The shape of a QUIC version 1 Initial, so that it is looked at more closely.
            datagram[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
        }
        socket
            .send_to(&datagram, node.peers)
            .await
            .context("send")?;
    }
    drop(pair.delivers(&pair.job("a", 16, 1)).await?);
    let grown = node.daemon()?.resident_bytes()?.saturating_sub(before);
    ensure!(grown < 64 << 20, "the daemon grew by {grown} bytes");
    ensure!(!node.log().contains("panicked"), "{}", node.log());
    pair.passed().await
}
