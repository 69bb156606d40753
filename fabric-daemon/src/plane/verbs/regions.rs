//! What the devices know of pools, and how they come to: elsewhere than on the verbs thread, as to
//! pin many gigabytes takes seconds, and so does letting them go.
//!
//! ```text
//!   engine's session ─▶ Registrar ── every port at once ──▶ PoolHere ─▶ Regions, of the thread
//!                           │                                              │
//!                           └── one port refuses: none has it              └─▶ PoolGone: let go
//! ```
//!
//! The machine hears of a pool after its regions were handed over, so no command names one that is
//! being registered. Should a pool go meanwhile, the thread finds that it is not there any more.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Instant;

use fabric_proto::ids::PoolId;
use tracing::{debug, error, info};

use super::ffi::{Access, MemoryRegion, ProtectionDomain};
use super::numa;
use super::rails::Rail;
use super::worker::{Inbox, Order, Worker};
use crate::plane::pools::{Memory, Pool, PoolRefused, Pools};

/// Registers pools with the devices, on the threads of who asks.
#[derive(Debug)]
pub(super) struct Registrar {
    ports: Vec<Port>,
    pools: Arc<Pools>,
    inbox: Arc<Inbox>,
}

/// Of a rail, what it takes.
#[derive(Debug)]
struct Port {
    domain: Arc<ProtectionDomain>,
    access: Access,
}

impl Registrar {
    /// For a thread that is to be.
    pub(super) fn new(worker: &Worker) -> Self {
        let port = |rail: &Rail| Port {
            domain: Arc::clone(&rail.domain),
            access: rail.region_access(),
        };
        Self {
            ports: worker.rails.iter().map(port).collect(),
            pools: Arc::clone(&worker.pools),
            inbox: Arc::clone(&worker.inbox),
        }
    }

    /// Registers a pool with every port, and hands the regions to the thread. Takes as long as the
    /// kernel needs to pin its memory.
    ///
    /// A port may refuse: there is not enough memory, or `RLIMIT_MEMLOCK` does not allow as much.
    /// Then none has it, as which lanes a grant or a writer gets is for others to say, and what is
    /// asked of the plane for this pool ends at once.
    pub(super) fn register(&self, id: PoolId) -> Result<(), PoolRefused> {
        let Some(pool) = self.pools.find(id) else {
            debug!(pool = %id, "not registered: the pool is gone");
            return Ok(());
        };
        let (began, bytes) = (Instant::now(), pool.memory.bytes());
        let register = |port: &Port| MemoryRegion::register(&port.domain, &pool, port.access);
        match with_every(&self.ports, register) {
            Ok(regions) => {
                let (took, ports) = (began.elapsed(), regions.len());
                // Only now is all of it somewhere.
                let numa_node = match &pool.memory {
                    Memory::Host(memory) => numa::node_of_memory(memory),
                    Memory::Device { .. } => None,
                };
                info!(
                    pool = %id,
                    bytes,
                    ports,
                    ?numa_node,
                    ?took,
                    "registered a pool with every RDMA port"
                );
                let regions = regions.into_iter().map(Arc::new).collect();
                let known = Known { regions, numa_node };
                self.inbox.push(Order::PoolHere { id, pool, known });
                Ok(())
            }
            Err(refusals) => {
                let needs = match &pool.memory {
                    Memory::Host(_) => "its memory is to be pinned, within RLIMIT_MEMLOCK",
                    Memory::Device { .. } => "the device's driver is to know dma-buf",
                };
                for (port, error) in &refusals {
                    let device = self.ports[*port].domain.context().name();
                    error!(
                        pool = %id,
                        device,
                        bytes,
                        "the verbs plane cannot be used for a pool: {error}; {needs}"
                    );
                }
                let errno = refusals[0].1.code;
                Err(PoolRefused { errno })
            }
        }
    }
}

/// Does the same with each of `ports`, all at once: what it gives, in their order, or what went
/// wrong and where.
fn with_every<P, R, E>(
    ports: &[P],
    register: impl Fn(&P) -> Result<R, E> + Sync,
) -> Result<Vec<R>, Vec<(usize, E)>>
where
    P: Sync,
    R: Send,
    E: Send,
{
    let register = &register;
    let ended: Vec<_> = thread::scope(|scope| {
        let tries = ports.iter().map(|port| {
            let named = thread::Builder::new().name("verbs-pin".into());
            (port, named.spawn_scoped(scope, move || register(port)))
        });
        // Each is started before the first is waited for.
        let tries: Vec<_> = tries.collect();
        let ended = tries.into_iter().map(|(port, started)| match started {
            Ok(thread) => thread.join().expect("a call of libibverbs does not panic"),
            // No thread for it: then this one.
            Err(_) => register(port),
        });
        ended.collect()
    });
    let (mut regions, mut refusals) = (Vec::with_capacity(ended.len()), Vec::new());
    for (port, result) in ended.into_iter().enumerate() {
        match result {
            Ok(region) => regions.push(region),
            Err(error) => refusals.push((port, error)),
        }
    }
    if refusals.is_empty() {
        Ok(regions)
    } else {
        Err(refusals)
    }
}

/// What there is to know of a pool.
#[derive(Debug)]
pub(super) struct Known<R = MemoryRegion> {
    /// One for each port.
    regions: Vec<Arc<R>>,
    /// Where its memory is, as far as the host says.
    numa_node: Option<u32>,
}

/// The pools that there are.
#[derive(Debug)]
pub(super) struct Regions<R = MemoryRegion> {
    pools: BTreeMap<PoolId, Known<R>>,
    /// Of pools that are gone, until who used them last is over.
    leaving: Vec<Weak<R>>,
}

impl<R> Default for Regions<R> {
    fn default() -> Self {
        Self {
            pools: BTreeMap::new(),
            leaving: Vec::new(),
        }
    }
}

impl<R> Regions<R> {
    /// Takes in those of a pool that is there.
    pub(super) fn insert(&mut self, id: PoolId, known: Known<R>) {
        let before = self.pools.insert(id, known);
        assert!(before.is_none(), "a pool is registered once");
    }

    /// Whether a pool is registered: then it is with every port.
    pub(super) fn knows(&self, id: PoolId) -> bool {
        self.pools.contains_key(&id)
    }

    /// A pool's at a port.
    pub(super) fn find(&self, rail: usize, id: PoolId) -> Option<&Arc<R>> {
        self.pools.get(&id)?.regions.get(rail)
    }

    /// Where a pool's memory is, as far as the host says.
    pub(super) fn numa_node(&self, id: PoolId) -> Option<u32> {
        self.pools.get(&id)?.numa_node
    }

    /// Forgets a pool. What is given back is not to be dropped by who may not wait. Where a grant
    /// or a writer uses one its memory is let go with the last of them.
    #[must_use = "to let memory go takes a while"]
    pub(super) fn remove(&mut self, id: PoolId) -> Vec<Arc<R>> {
        let known = self.pools.remove(&id);
        let regions = known.map_or_else(Vec::new, |known| known.regions);
        self.leaving.retain(|region| region.strong_count() > 0);
        self.leaving.extend(regions.iter().map(Arc::downgrade));
        regions
    }

    /// How many there are, with those that are about to go.
    pub(super) fn count(&self) -> u64 {
        let known = self.pools.values().map(|known| known.regions.len());
        let known: usize = known.sum();
        let leaving = self.leaving.iter();
        let leaving = leaving.filter(|region| region.strong_count() > 0).count();
        (known + leaving) as u64
    }
}

impl Worker {
    /// A pool is registered with every port.
    pub(super) fn pool_here(&mut self, id: PoolId, pool: Arc<Pool>, known: Known) {
        let found = self.pools.find(id);
        if found.is_some_and(|found| Arc::ptr_eq(&found, &pool)) {
            return self.regions.insert(id, known);
        }
        // It went while it was being registered. That it is gone was said before, or will be.
        debug!(pool = %id, "the pool is gone: its memory is let go");
        self.let_go((pool, known));
    }

    /// A pool is gone.
    pub(super) fn pool_gone(&mut self, id: PoolId) {
        let regions = self.regions.remove(id);
        if !regions.is_empty() {
            self.let_go(regions);
        }
    }

    /// Lets memory go elsewhere: to unpin and to unmap many gigabytes takes a while.
    fn let_go(&self, memory: impl Send + 'static) {
        self.runtime.spawn_blocking(move || drop(memory));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pool_is_registered_with_every_port_or_with_none() {
        let memory = Arc::new(());
        let register = |port: &u8| match port {
            0..3 => Ok((*port, Arc::clone(&memory))),
            _ => Err(-i32::from(*port)),
        };
        let regions = with_every(&[2, 0, 1], register).unwrap();
        let order: Vec<_> = regions.iter().map(|(port, _)| *port).collect();
        assert_eq!(order, [2, 0, 1], "a region's place is its port's");
        drop(regions);
        let refused = with_every(&[0, 4, 1, 7], register);
        assert_eq!(refused, Err(vec![(1, -4), (3, -7)]));
        assert_eq!(Arc::strong_count(&memory), 1, "no region is left behind");
        assert_eq!(with_every(&[], register), Ok(Vec::new()));
    }

    #[test]
    fn ports_register_at_the_same_time() {
        let under_way = AtomicUsize::new(0);
        let deadline = Instant::now() + Duration::from_secs(10);
        let meet = |_: &()| {
            under_way.fetch_add(1, Ordering::SeqCst);
            while under_way.load(Ordering::SeqCst) < 3 && Instant::now() < deadline {
                thread::yield_now();
            }
            let met = under_way.load(Ordering::SeqCst);
            if met == 3 { Ok(()) } else { Err(met) }
        };
        assert_eq!(with_every(&[(); 3], meet), Ok(vec![(); 3]));
    }

    #[test]
    fn a_region_counts_until_who_uses_it_last_lets_go() {
        let (first, second) = (PoolId(1), PoolId(2));
        let mut regions = Regions::default();
        let known = |names: [&'static str; 2], numa_node| Known {
            regions: names.map(Arc::new).to_vec(),
            numa_node,
        };
        regions.insert(first, known(["1 at 0", "1 at 1"], None));
        regions.insert(second, known(["2 at 0", "2 at 1"], Some(7)));
        assert_eq!(
            [first, second].map(|id| regions.numa_node(id)),
            [None, Some(7)]
        );
        assert_eq!(regions.find(1, first).map(|found| **found), Some("1 at 1"));
        assert_eq!(regions.find(0, second).map(|found| **found), Some("2 at 0"));
        assert_eq!(regions.find(2, first), None, "no such port");
        assert_eq!(regions.count(), 4);

        let in_use = Arc::clone(regions.find(1, first).unwrap());
        let given_back = regions.remove(first);
        assert!(!regions.knows(first) && regions.knows(second));
        assert_eq!(regions.find(1, first), None);
        assert_eq!(given_back.len(), 2);
        drop(given_back);
        assert_eq!(regions.count(), 3, "one is in use");
        drop(in_use);
        assert_eq!(regions.count(), 2);
        assert!(regions.remove(first).is_empty(), "gone already");
        drop(regions.remove(second));
        assert_eq!(regions.count(), 0);
    }
}
