//! The memory that planes move pages in and out of.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use fabric_ipc::Mapping;
use fabric_proto::ids::PoolId;
use fabric_proto::pool::PoolSpec;
use thiserror::Error;

use super::lock;

/// A registered pool's memory.
#[derive(Debug)]
pub struct Pool {
    /// What its engine said of it; checked.
    pub spec: PoolSpec,
    /// At least the spec's bytes.
    pub memory: Memory,
    /// What the engine passed: a sealed memory file, for the daemon of a destination on this host;
    /// or a dma-buf, for RDMA devices.
    pub fd: OwnedFd,
}

/// Where a pool's bytes are.
#[derive(Debug)]
pub enum Memory {
    /// In this host's memory, mapped.
    Host(Mapping),
    /// On a device, in a dma-buf. RDMA devices reach it; this process has no way to.
    Device {
        /// How many there are.
        bytes: u64,
    },
}

impl Memory {
    /// How many bytes there are.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(mapping) => mapping.bytes(),
            Self::Device { bytes } => *bytes,
        }
    }

    /// The mapping, for whoever moves bytes by the CPU.
    ///
    /// # Panics
    ///
    /// For device memory: a pool of it is registered only where nobody does that.
    #[must_use]
    pub fn mapped(&self) -> &Mapping {
        match self {
            Self::Host(mapping) => mapping,
            Self::Device { .. } => panic!("a daemon with device memory moves none by its CPU"),
        }
    }
}

/// A device cannot use a pool.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("registered with no device: {}", io::Error::from_raw_os_error(*.errno))]
pub struct PoolRefused {
    /// Why, as the system says it.
    pub errno: i32,
}

/// The pools of this daemon. The driver fills it; planes look pools up.
///
/// A plane keeps the pools of its grants and writers alive by itself: what is removed here is
/// unmapped once the last of them is over.
#[derive(Debug, Default)]
pub struct Pools {
    pools: Mutex<HashMap<PoolId, Arc<Pool>>>,
}

impl Pools {
    /// No pools.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a pool.
    ///
    /// # Panics
    ///
    /// If its memory is smaller than its spec says: whoever maps it has checked that.
    pub fn insert(&self, id: PoolId, pool: Pool) {
        assert!(
            pool.memory.bytes() >= pool.spec.bytes(),
            "a pool's memory holds all of its pages"
        );
        lock(&self.pools).insert(id, Arc::new(pool));
    }

    /// Takes a pool out.
    pub fn remove(&self, id: PoolId) -> Option<Arc<Pool>> {
        lock(&self.pools).remove(&id)
    }

    /// Looks a pool up.
    #[must_use]
    pub fn find(&self, id: PoolId) -> Option<Arc<Pool>> {
        lock(&self.pools).get(&id).map(Arc::clone)
    }
}
