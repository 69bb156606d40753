//! The pools that an engine registers: their memory is checked, mapped, and made known to devices.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use fabric_ipc::{Mapping, MappingError, MemoryError, check_sealed};
use fabric_proto::host::{Input, ScrubPolicy};
use fabric_proto::ids::{EngineId, PoolId, RequestSeq};
use fabric_proto::limits::POOLS_PER_ENGINE_MAX;
use fabric_proto::outcome::Rejection;
use fabric_proto::pool::PoolSpec;
use fabric_proto::wire::PlaneKind;
use rustix::fs::{SeekFrom, fstatfs, seek};

use super::{Ended, Sessions};
use crate::driver::Event;
use crate::plane::{Memory, Pool};

impl Sessions {
    /// Checks and maps a pool's memory, and waits until the planes are ready for it; gives what the
    /// machine is to be told.
    ///
    /// The outer error ends the session; the inner one turns the request away. The machine checks
    /// the spec again: here, the check is what makes its bytes a sane number.
    pub(super) async fn register_pool(
        &self,
        engine: EngineId,
        seq: RequestSeq,
        spec: PoolSpec,
        fd: OwnedFd,
        pools_mapped: &mut usize,
    ) -> Result<Result<Event, Rejection>, Ended> {
        // S9: first of all, whether it can hold what it advertises.
        if let Err(reason) = spec.check() {
            return Ok(Err(reason));
        }
        if *pools_mapped >= POOLS_PER_ENGINE_MAX {
            let limit = POOLS_PER_ENGINE_MAX as u64;
            let value = limit + 1;
            return Ok(Err(Rejection::ExceedsLimit { value, limit }));
        }
        let memory = match dma_buf_bytes(&fd) {
            Some(bytes) => self.device_memory(spec, bytes),
            None => host_memory(spec, &fd)?,
        };
        let memory = match memory {
            Ok(memory) => memory,
            Err(reason) => return Ok(Err(reason)),
        };
        let memory_bytes = memory.bytes();
        let is_device = matches!(memory, Memory::Device { .. });
        let pool = self.next_pool()?;
        self.pools.insert(pool, Pool { spec, memory, fd });
        match self.planes.pool_here(pool).await {
            // No other plane reaches it.
            Err(refused) if is_device => {
                self.pools.remove(pool);
                let errno = u64::from(refused.errno.unsigned_abs());
                let bytes = memory_bytes;
                return Ok(Err(Rejection::DeviceMemoryRefused { errno, bytes }));
            }
            Ok(()) | Err(_) => {}
        }
        *pools_mapped += 1;
        Ok(Ok(Input::RegisterPool {
            engine,
            seq,
            pool,
            spec,
            memory_bytes,
        }))
    }

    /// Memory of a device, of which this process can touch no byte: so nothing here may have to.
    fn device_memory(&self, spec: PoolSpec, bytes: u64) -> Result<Memory, Rejection> {
        let bytes_needed = spec.bytes();
        if bytes < bytes_needed {
            return Err(Rejection::MemoryTooSmall {
                bytes,
                bytes_needed,
            });
        }
        if !self.planes.are_only(PlaneKind::Verbs) {
            return Err(Rejection::DeviceMemoryNotReached);
        }
        if self.scrub != ScrubPolicy::Never {
            return Err(Rejection::DeviceMemoryNotScrubbed);
        }
        let bytes = bytes_needed;
        Ok(Memory::Device { bytes })
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

/// Memory of this host, in a sealed file. As for `register_pool`, what ends the session is outside.
fn host_memory(spec: PoolSpec, fd: &OwnedFd) -> Result<Result<Memory, Rejection>, Ended> {
    match check_sealed(fd, spec.bytes()) {
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
    let mapping = Mapping::read_write(fd, spec.bytes()).map_err(Ended::Memory)?;
    Ok(Ok(Memory::Host(mapping)))
}

/// How large the dma-buf is that a descriptor is of. `None`: it is of something else.
fn dma_buf_bytes(fd: &OwnedFd) -> Option<u64> {
    let magic = fstatfs(fd).ok()?.f_type;
    if u64::try_from(magic) != Ok(DMA_BUF_MAGIC) {
        return None;
    }
    // M: Documentation/driver-api/dma-buf.rst: its size is where its end is.
    seek(fd, SeekFrom::End(0)).ok()
}

/// M: linux/magic.h: the file system of dma-bufs.
const DMA_BUF_MAGIC: u64 = 0x444d_4142;
