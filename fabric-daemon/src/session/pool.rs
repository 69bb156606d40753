//! Mapping a pool that an engine registers.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use fabric_ipc::{Mapping, MappingError, MemoryError, check_sealed};
use fabric_proto::host::Input;
use fabric_proto::ids::{EngineId, PoolId, RequestSeq};
use fabric_proto::limits::POOLS_PER_ENGINE_MAX;
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::PoolSpec;

use super::{Ended, Sessions};
use crate::driver::Event;
use crate::plane::Pool;

impl Sessions {
    /// Checks and maps a pool's memory; gives its name, and what the machine is to be told.
    ///
    /// The outer error ends the session; the inner one turns the request away. The machine checks
    /// the spec again: here, the check is what makes its bytes a sane number.
    pub(super) fn map_pool(
        &self,
        engine: EngineId,
        seq: RequestSeq,
        spec: PoolSpec,
        fd: OwnedFd,
        pools_mapped: &mut usize,
    ) -> Result<Result<(PoolId, Event), Rejection>, Ended> {
        // S9: first of all, whether it can hold what it advertises.
        if let Err(reason) = spec.check() {
            return Ok(Err(reason));
        }
        if *pools_mapped >= POOLS_PER_ENGINE_MAX {
            let limit = POOLS_PER_ENGINE_MAX as u64;
            let value = limit + 1;
            return Ok(Err(Rejection::ExceedsLimit { value, limit }));
        }
        match check_sealed(&fd, spec.bytes()) {
            Ok(()) => {}
            Err(MemoryError::TooSmall { got, want }) => {
                return Ok(Err(Rejection::MemoryTooSmall {
                    bytes: got,
                    bytes_needed: want,
                }));
            }
            // Memory that could shrink, or is none at all: mapping it would let the engine kill us.
            Err(error) => return Err(Ended::Memory(MappingError::Memory(error))),
        }
        let memory = Mapping::read_write(&fd, spec.bytes()).map_err(Ended::Memory)?;
        let memory_bytes = memory.bytes();
        let pool = self.next_pool()?;
        *pools_mapped += 1;
        self.pools.insert(pool, Pool { spec, memory, fd });
        let event = Input::RegisterPool {
            engine,
            seq,
            pool,
            spec,
            memory_bytes,
        };
        Ok(Ok((pool, event)))
    }

    /// A name that no pool had before. It never wraps.
    fn next_pool(&self) -> Result<PoolId, Ended> {
        // Relaxed: a number of one's own is all that is asked for.
        let up = |next: u32| next.checked_add(1);
        let next = self
            .next_pool
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, up);
        next.map(PoolId).map_err(|_| Ended::PoolIds)
    }
}
