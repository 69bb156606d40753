//! What a world has, and how much may go wrong in it.

use std::time::Duration;

use fabric_proto::host::{Config, ScrubPolicy};
use fabric_proto::ids::{Incarnation, NodeId, RequestId, Secret, Tag, TenantId};
use fabric_proto::pool::{Arrangement, Layout, PoolSpec, TokenRange};
use fabric_proto::wire::AbortPolicy;

/// A world before anything has happened.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Setup {
    /// Slots of the pools of each engine of each node.
    pub nodes: Vec<Vec<u32>>,
    /// What is asked for, in any order and at any time.
    pub requests: Vec<Request>,
    /// Regions of every pool.
    pub regions: u16,
    /// Pages that may be outstanding under one grant.
    pub outstanding_pages: u64,
    /// How often pages are sent in all.
    pub attempts_max: u32,
    /// What becomes of a transfer whose lease ends first.
    pub abort: AbortPolicy,
    /// Whether each machine recounts everything after each input. Off, only what it does and does
    /// not do tells of a bug.
    pub recount: bool,
    /// How much may go wrong.
    pub budget: Budget,
}

/// A prompt that is prefilled in one place and decoded in another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    /// For whom: requests of one number are of one tenant.
    pub tenant: u8,
    /// Node and engine that prefill.
    pub source: (usize, usize),
    /// Node and engine that decode.
    pub destination: (usize, usize),
    /// How many slots it needs.
    pub slots: u32,
    /// The decode side names the slots that it wants, the first of its pool.
    pub named: bool,
}

/// How often each thing may still go wrong.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Budget {
    /// An engine ends its lease, or its transfer, before the outcome.
    pub aborts: u32,
    /// A link breaks.
    pub cuts: u32,
    /// A daemon dies and comes back.
    pub daemon_crashes: u32,
    /// An engine dies and comes back.
    pub engine_crashes: u32,
    /// A bit of a page flips on its way.
    pub flips: u32,
    /// A node cannot be reached.
    pub unreachable: u32,
    /// A daemon's clock comes to its next deadline.
    pub ticks: u32,
    /// The router brings an offer twice, or to another tenant's prefill.
    pub misroutes: u32,
    /// What is sent to one end of a link is lost.
    pub one_way: u32,
    /// A daemon says or writes what it should not.
    pub lies: u32,
    /// A daemon is told to shut down.
    pub shutdowns: u32,
    /// A daemon's clock is set back.
    pub clock_steps: u32,
    /// A request is asked for again after it was turned away or went wrong.
    pub retries: u32,
}

/// A page is as many bytes as its content is said to have; no byte of it is stored.
pub(crate) const PAGE_BYTES: u32 = 64;
pub(crate) const TOKENS_PER_SLOT: u16 = 1;

impl Setup {
    pub(crate) fn spec(&self, slots: u32) -> PoolSpec {
        PoolSpec {
            layout: Layout {
                model: Tag([1; 32]),
                regions: self.regions,
                page_bytes: PAGE_BYTES,
                tokens_per_slot: TOKENS_PER_SLOT,
            },
            slots,
            arrangement: Arrangement::RegionMajor,
            context_tokens: u64::from(slots),
        }
    }

    pub(crate) fn config(&self, node: usize, incarnation: u64) -> Config {
        let mut secret = [0; 32];
        secret[..8].copy_from_slice(&(node as u64).to_le_bytes());
        secret[8..16].copy_from_slice(&incarnation.to_le_bytes());
        Config {
            node: node_id(node),
            incarnation: Incarnation::new(incarnation).expect("lives count from 1"),
            secret: Secret(secret),
            abort: self.abort,
            scrub: ScrubPolicy::CrossTenant,
            offer_ttl: Duration::from_secs(30),
            open_max: Duration::from_secs(4),
            silence_max: Duration::from_secs(30),
            drain_max: Duration::from_secs(1),
            verify_max: Duration::from_secs(60),
            attempts_max: self.attempts_max,
            outstanding_bytes_max: self.outstanding_pages * u64::from(PAGE_BYTES),
        }
    }
}

impl Request {
    pub(crate) fn tenant_id(&self) -> TenantId {
        TenantId::new(&format!("tenant-{}", self.tenant)).expect("a short name")
    }

    pub(crate) fn request_id(index: usize) -> RequestId {
        RequestId::new(&format!("request-{index}")).expect("a short name")
    }

    pub(crate) fn tokens(&self) -> TokenRange {
        TokenRange {
            start: 0,
            count: u64::from(self.slots) * u64::from(TOKENS_PER_SLOT),
        }
    }
}

pub(crate) fn node_id(node: usize) -> NodeId {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&(node as u64).to_le_bytes());
    NodeId(id)
}

pub(crate) fn node_of(id: NodeId) -> usize {
    let mut node = [0; 8];
    node.copy_from_slice(&id.0[..8]);
    usize::try_from(u64::from_le_bytes(node)).expect("it was made of an index")
}
