//! A network between two daemons: UDP datagrams pass through, and a test decides which, when and
//! how whole.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::random::Random;

/// What one direction does to datagrams. Everything may change at any time.
#[derive(Debug, Default)]
pub struct Path {
    /// Nothing passes.
    pub cut: AtomicBool,
    /// Of 1,000 datagrams so many are dropped.
    pub drop_permille: AtomicU32,
    /// Of 1,000 datagrams so many have one bit flipped.
    pub flip_permille: AtomicU32,
    /// Each datagram is this late.
    pub delay_ms: AtomicU32,
    /// Datagrams that had a bit flipped.
    pub flipped: AtomicU64,
    /// Datagrams that passed.
    pub passed: AtomicU64,
}

/// A proxy in front of one UDP address. Dropping it ends it.
#[derive(Debug)]
pub struct UdpProxy {
    /// Where clients send to.
    pub address: SocketAddr,
    /// From clients to the target.
    pub forward: Arc<Path>,
    /// From the target to clients.
    pub backward: Arc<Path>,
    task: JoinHandle<()>,
}

impl UdpProxy {
    /// Starts a proxy in front of `target`.
    ///
    /// # Errors
    ///
    /// If no socket can be bound.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let front = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let front = Arc::new(front.context("bind the proxy")?);
        let address = front.local_addr().context("ask for the proxy's address")?;
        let (forward, backward) = (Arc::<Path>::default(), Arc::<Path>::default());
        let paths = (Arc::clone(&forward), Arc::clone(&backward));
        let task = tokio::spawn(serve(front, target, paths));
        Ok(Self {
            address,
            forward,
            backward,
            task,
        })
    }

    /// Cuts both directions, or heals them.
    pub fn cut(&self, cut: bool) {
        // Relaxed, here and below: a datagram more or less makes no difference.
        self.forward.cut.store(cut, Ordering::Relaxed);
        self.backward.cut.store(cut, Ordering::Relaxed);
    }
}

impl Drop for UdpProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One datagram and when it is due.
type Due = (Instant, Vec<u8>);

async fn serve(front: Arc<UdpSocket>, target: SocketAddr, paths: (Arc<Path>, Arc<Path>)) {
    let mut lines: BTreeMap<SocketAddr, mpsc::Sender<Due>> = BTreeMap::new();
    let mut tasks = tokio::task::JoinSet::new();
    let mut random = Random::new(u64::from(target.port()));
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        let Ok((len, client)) = front.recv_from(&mut buffer).await else {
            continue;
        };
        if !lines.contains_key(&client) {
            if lines.len() == CLIENTS_MAX {
                lines.clear();
                tasks.abort_all();
            }
            let Ok(back) = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await else {
                continue;
            };
            let back = Arc::new(back);
            let (forward, queue) = mpsc::channel(QUEUE_MAX);
            tasks.spawn(send_when_due(queue, Arc::clone(&back), target));
            let (answers, queue) = mpsc::channel(QUEUE_MAX);
            tasks.spawn(send_when_due(queue, Arc::clone(&front), client));
            tasks.spawn(answer(back, Arc::clone(&paths.1), answers));
            lines.insert(client, forward);
        }
        if let Some(line) = lines.get(&client) {
            pass(&buffer[..len], &paths.0, &mut random, line);
        }
    }
}

async fn answer(back: Arc<UdpSocket>, path: Arc<Path>, line: mpsc::Sender<Due>) {
    let mut random = Random::new(back.local_addr().map_or(1, |own| u64::from(own.port())));
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        // An error is an ICMP answer: nobody listens at the target just now.
        if let Ok((len, _)) = back.recv_from(&mut buffer).await {
            pass(&buffer[..len], &path, &mut random, &line);
        }
    }
}

fn pass(datagram: &[u8], path: &Path, random: &mut Random, line: &mpsc::Sender<Due>) {
    let chance = |permille: &AtomicU32, random: &mut Random| {
        let permille = u64::from(permille.load(Ordering::Relaxed));
        permille > 0 && random.below(1000) < permille
    };
    if path.cut.load(Ordering::Relaxed) || chance(&path.drop_permille, random) {
        return;
    }
    let mut datagram = datagram.to_vec();
    if !datagram.is_empty() && chance(&path.flip_permille, random) {
        let bit = random.below(datagram.len() as u64 * 8);
        let byte = usize::try_from(bit / 8).expect("within the datagram");
        datagram[byte] ^= 1 << (bit % 8);
        path.flipped.fetch_add(1, Ordering::Relaxed);
    }
    path.passed.fetch_add(1, Ordering::Relaxed);
    let delay = Duration::from_millis(path.delay_ms.load(Ordering::Relaxed).into());
    // A full queue drops, as a router does.
    drop(line.try_send((Instant::now() + delay, datagram)));
}

async fn send_when_due(mut queue: mpsc::Receiver<Due>, socket: Arc<UdpSocket>, to: SocketAddr) {
    while let Some((due, datagram)) = queue.recv().await {
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
        }
        // The receiver may be gone, which is a fault like any other.
        drop(socket.send_to(&datagram, to).await);
    }
}

const DATAGRAM_BYTES_MAX: usize = 65_536;
/// Datagrams on their way in one direction.
const QUEUE_MAX: usize = 4096;
/// Clients at a time; with more, all start anew.
const CLIENTS_MAX: usize = 64;
