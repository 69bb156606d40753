//! An engine without a model: pools of patterns, transfers, and checks of every byte.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use fabric_client::{
    Delivered, HeldLease, LeaseError, LeaseRequest, Pool, ReceiveLease, SendRefusal, Session,
    Undelivered,
};
use fabric_proto::ids::{EngineName, RequestId, SlotIndex, Tag, TenantId};
use fabric_proto::outcome::{Failure, Outcome};
use fabric_proto::pool::{Arrangement, Layout, PoolSpec, TokenRange};

use crate::cluster::{Cluster, NodeOptions};
use crate::programs::Programs;
use crate::random::mix;

/// A pool of patterns: one token for each slot, and a context of all its slots.
#[must_use]
pub fn spec(regions: u16, page_bytes: u32, slots: u32) -> PoolSpec {
    PoolSpec {
        layout: Layout {
            model: Tag([7; 32]),
            regions,
            page_bytes,
            tokens_per_slot: 1,
        },
        slots,
        arrangement: Arrangement::RegionMajor,
        context_tokens: u64::from(slots),
    }
}

/// Connects to a daemon and registers a pool.
///
/// # Errors
///
/// If the daemon cannot be reached or refuses.
pub async fn pool(socket: &Path, name: &str, spec: PoolSpec) -> Result<Pool> {
    let name = EngineName::new(name).context("an engine's name")?;
    let session = Session::connect(socket, name)
        .await
        .context("connect to the daemon")?;
    session.register_pool(spec).await.context("register a pool")
}

/// One transfer's terms.
#[derive(Clone, Debug)]
pub struct Job {
    /// For whom.
    pub tenant: TenantId,
    /// The request.
    pub request: RequestId,
    /// Regions of both pools.
    pub regions: u16,
    /// How many slots.
    pub slots: u32,
    /// Makes the pattern of its bytes.
    pub seed: u64,
    /// The source's slots; empty: the daemon chooses.
    pub source: Vec<SlotIndex>,
    /// The destination's slots; empty: the daemon chooses.
    pub destination: Vec<SlotIndex>,
    /// Waited after each region is sealed.
    pub pause: Duration,
}

impl Job {
    /// A transfer of some slots for a tenant; the seed also names the request.
    ///
    /// # Panics
    ///
    /// Where the tenant's name is not one.
    #[must_use]
    pub fn new(tenant: &str, regions: u16, slots: u32, seed: u64) -> Self {
        let request = RequestId::new(&format!("r{seed}"));
        Self {
            tenant: TenantId::new(tenant).expect("the tenant's name is short and plain"),
            request: request.expect("a number is short and plain"),
            regions,
            slots,
            seed,
            source: Vec::new(),
            destination: Vec::new(),
            pause: Duration::ZERO,
        }
    }

    /// What the destination asks for.
    #[must_use]
    pub fn wanted(&self) -> LeaseRequest {
        self.lease(self.destination.clone())
    }

    /// What the source asks for.
    #[must_use]
    pub fn held(&self) -> LeaseRequest {
        self.lease(self.source.clone())
    }

    fn lease(&self, named: Vec<SlotIndex>) -> LeaseRequest {
        LeaseRequest {
            tenant: self.tenant.clone(),
            request: self.request.clone(),
            tokens: TokenRange {
                start: 0,
                count: u64::from(self.slots),
            },
            named,
        }
    }
}

/// Fills a page with the pattern of a seed, a region and a position.
pub fn fill(page: &mut [u8], seed: u64, region: u16, position: u32) {
    let start = start(seed, region, position);
    for (index, bytes) in page.chunks_mut(8).enumerate() {
        let word = mix(start.wrapping_add(index as u64)).to_le_bytes();
        bytes.copy_from_slice(&word[..bytes.len()]);
    }
}

/// Whether a page has exactly the pattern of [`fill`].
#[must_use]
pub fn matches(page: &[u8], seed: u64, region: u16, position: u32) -> bool {
    let start = start(seed, region, position);
    page.chunks(8).enumerate().all(|(index, bytes)| {
        let word = mix(start.wrapping_add(index as u64)).to_le_bytes();
        bytes == &word[..bytes.len()]
    })
}

fn start(seed: u64, region: u16, position: u32) -> u64 {
    mix(seed ^ (u64::from(region) << 48) ^ (u64::from(position) << 20))
}

/// Fills, seals and sends region after region; gives the outcome and the lease, where it is left.
pub async fn send(held: HeldLease, offer: Vec<u8>, job: &Job) -> (Outcome, Option<HeldLease>) {
    let mut sending = match held.send(offer.into()).await {
        Ok(sending) => sending,
        Err(refused) => {
            let outcome = if let SendRefusal::Rejected(reason) = refused.reason {
                Outcome::Rejected(reason)
            } else {
                Outcome::Failed(Failure::DaemonGone)
            };
            return (outcome, Some(refused.held));
        }
    };
    let (regions, slots) = (job.regions, sending.slots());
    for region in 0..regions {
        for position in 0..slots {
            fill(
                sending.page_mut(region, position),
                job.seed,
                region,
                position,
            );
        }
        if let Err(error) = sending.seal(region, 0..slots).await {
            tracing::debug!("seal: {error}");
            break;
        }
        if !job.pause.is_zero() {
            tokio::time::sleep(job.pause).await;
        }
    }
    let (outcome, held) = sending.finish(job.seed.to_le_bytes().to_vec().into()).await;
    (outcome, Some(held))
}

/// Whether everything that was delivered is what [`send`] sent for the job.
///
/// # Errors
///
/// Names the first page that is not.
pub fn check(delivered: &Delivered, job: &Job) -> Result<()> {
    anyhow::ensure!(
        delivered.payload()[..] == job.seed.to_le_bytes(),
        "the payload is another's"
    );
    let slots = u32::try_from(delivered.slots().len()).context("a lease is small")?;
    anyhow::ensure!(slots == job.slots, "{slots} slots instead of {}", job.slots);
    for region in 0..job.regions {
        for position in 0..slots {
            anyhow::ensure!(
                matches(delivered.page(region, position), job.seed, region, position),
                "region {region}, position {position} has other bytes"
            );
        }
    }
    Ok(())
}

/// Both sides of one transfer, when it is over.
#[derive(Debug)]
pub struct Ended {
    /// What the source heard.
    pub source: Outcome,
    /// What the destination got.
    pub destination: std::result::Result<Delivered, Undelivered>,
}

/// Runs one transfer from pool to pool.
///
/// # Errors
///
/// If a lease is refused, or not both sides have an outcome in time.
pub async fn transfer(source: &Pool, destination: &Pool, job: &Job) -> Result<Ended> {
    let lease = destination
        .receive(job.wanted())
        .await
        .context("destination's lease")?;
    let held = source.hold(job.held()).await.context("source's lease")?;
    finish(lease, held, job).await
}

/// Runs one transfer between leases.
///
/// # Errors
///
/// If not both sides have an outcome in time.
pub async fn finish(lease: ReceiveLease, held: HeldLease, job: &Job) -> Result<Ended> {
    let offer = lease.offer().to_vec();
    let both = async { tokio::join!(send(held, offer, job), lease.delivered()) };
    let both = tokio::time::timeout(TRANSFER_LIMIT, both).await;
    let ((source, _held), destination) = both.context("a transfer without an outcome")?;
    Ok(Ended {
        source,
        destination,
    })
}

/// Leases the slots that a job names for another tenant, as soon as the daemon gives them out
/// again.
///
/// # Errors
///
/// If it does not in time, or refuses.
pub async fn next_tenant(pool: &Pool, job: &Job) -> Result<HeldLease> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    loop {
        match pool.hold(job.held()).await {
            Ok(held) => return Ok(held),
            Err(LeaseError::Rejected(reason)) => {
                let wait = ["slot_not_free", "busy"].contains(&reason.label());
                anyhow::ensure!(wait, "the next tenant is refused: {reason}");
            }
            Err(error) => return Err(error.into()),
        }
        anyhow::ensure!(
            tokio::time::Instant::now() < deadline,
            "the slots are never free again"
        );
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

/// Looks at every page of the slots, as the next tenant finds them, then as it leaves them.
///
/// # Errors
///
/// If a byte is another's.
pub async fn nobody_elses_bytes(mut held: HeldLease, job: &Job) -> Result<()> {
    for region in 0..job.regions {
        for position in 0..job.slots {
            // S1, S2: scrubbed of the last tenant's bytes, and nothing has landed since.
            let page = held.page(region, position);
            anyhow::ensure!(
                page.iter().all(|byte| *byte == 0),
                "region {region}, {position}: not scrubbed"
            );
            fill(held.page_mut(region, position), job.seed, region, position);
        }
    }
    tokio::time::sleep(Duration::from_millis(job.seed % 8)).await;
    for region in 0..job.regions {
        for position in 0..job.slots {
            let page = held.page(region, position);
            anyhow::ensure!(
                matches(page, job.seed, region, position),
                "a late write: {region}, {position}"
            );
        }
    }
    held.end();
    Ok(())
}

/// Two nodes, `prefill` (0) and `decode` (1), each with an engine in this process.
#[derive(Debug)]
pub struct Pair {
    /// The nodes.
    pub cluster: Cluster,
    /// The engine of node 0.
    pub source: Pool,
    /// The engine of node 1.
    pub destination: Pool,
    regions: u16,
}

impl Pair {
    /// Starts both nodes and both engines; prints logs when dropped before [`Pair::passed`].
    ///
    /// # Errors
    ///
    /// If something does not start.
    pub async fn start(nodes: [NodeOptions; 2], spec: PoolSpec) -> Result<Self> {
        let program = Programs::find_daemon(&nodes[0].planes)?;
        let mut cluster = Cluster::start(&program, nodes.to_vec()).await?;
        cluster.loud = true;
        let source = pool(&cluster.nodes[0].socket(), "engine", spec).await?;
        let destination = pool(&cluster.nodes[1].socket(), "engine", spec).await?;
        Ok(Self {
            cluster,
            source,
            destination,
            regions: spec.layout.regions,
        })
    }

    /// A transfer's terms.
    #[must_use]
    pub fn job(&self, tenant: &str, slots: u32, seed: u64) -> Job {
        Job::new(tenant, self.regions, slots, seed)
    }

    /// Runs a transfer that must be delivered, and checks every byte.
    ///
    /// # Errors
    ///
    /// If it is not, or a byte is wrong.
    pub async fn delivers(&self, job: &Job) -> Result<Delivered> {
        let ended = transfer(&self.source, &self.destination, job).await?;
        anyhow::ensure!(
            ended.source == Outcome::Delivered,
            "source: {}",
            ended.source
        );
        let delivered = ended.destination.context("destination")?;
        check(&delivered, job)?;
        Ok(delivered)
    }

    /// Ends the test: every slot must become free, and the pages of both nodes add up (S10).
    ///
    /// # Errors
    ///
    /// If they do not.
    pub async fn passed(mut self) -> Result<()> {
        for index in 0..2 {
            self.cluster.slots_all_free(index).await?;
            adds_up(&self.cluster, index).await?;
        }
        self.cluster.loud = false;
        Ok(())
    }
}

/// S10: pages that arrived are those verified, corrupt and dropped; what started has ended.
///
/// # Errors
///
/// If a sum does not come out right in time.
pub async fn adds_up(cluster: &Cluster, index: usize) -> Result<()> {
    let pairs = [
        ("fabric_grants_opened_total", "fabric_grants_closed_total"),
        ("fabric_leases_started_total", "fabric_leases_ended_total"),
        ("fabric_sends_started_total", "fabric_sends_ended_total"),
        ("fabric_slots_leased_total", "fabric_slots_freed_total"),
    ];
    for (started, ended) in pairs {
        let what = format!("{started} = {ended}");
        cluster
            .until(index, &what, |metrics| {
                metrics.sum(started) == metrics.sum(ended)
            })
            .await?;
    }
    cluster
        .until(
            index,
            "pages arrived = verified + corrupt + dropped",
            |metrics| {
                let ended = ["verified", "corrupt", "dropped"]
                    .map(|state| metrics.sum(&format!("fabric_pages_{state}_total")));
                metrics.sum("fabric_pages_arrived_total") == ended.into_iter().sum::<f64>()
            },
        )
        .await
}

/// A bound against hanging.
pub const TRANSFER_LIMIT: Duration = Duration::from_secs(60);
