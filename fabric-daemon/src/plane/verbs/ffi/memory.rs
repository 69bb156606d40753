//! Memory regions, and the windows into them that can be granted and taken back.

use std::fmt;
use std::ops::BitOr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use fabric_ipc::Mapping;
use rdma_mummy_sys as sys;

use super::super::super::pools::{Memory, Pool};
use super::{Made, ProtectionDomain, VerbsError, check, check_pointer, log_failure};

/// What a device may do with memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Access(pub(super) u32);

impl Access {
    /// Write for this host: what a read brings, or a peer's write.
    pub(crate) const LOCAL_WRITE: Self = Self(sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0);
    /// Read for a peer that shows the key.
    pub(crate) const REMOTE_READ: Self = Self(sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0);
    /// Write for a peer that shows the key.
    pub(crate) const REMOTE_WRITE: Self = Self(sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    /// Have windows bound to it.
    pub(crate) const WINDOWS: Self = Self(sys::ibv_access_flags::IBV_ACCESS_MW_BIND.0);
}

#[cfg(test)]
impl Access {
    /// Whether it allows all that `other` does.
    pub(crate) fn includes(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The key that a peer's work requests name memory by.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct RKey(pub(crate) u32);

impl fmt::Debug for RKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // It opens memory to whoever is connected.
        f.write_str("RKey(..)")
    }
}

/// A pool's memory, as one device knows it. Addresses are offsets into the pool: no peer learns
/// where it lies in this process.
pub(crate) struct MemoryRegion {
    raw: *mut sys::ibv_mr,
    _domain: Arc<ProtectionDomain>,
    // Dropped after `drop` has ended the registration: so the memory is mapped for as long.
    pool: Arc<Pool>,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a pool's memory: the kernel pins it, which takes a while for many gigabytes. That
    /// of a device stays where it is: the kernel gives the NIC a way to it, if its driver can.
    pub(crate) fn register(
        domain: &Arc<ProtectionDomain>,
        pool: &Arc<Pool>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let raw = match &pool.memory {
            Memory::Host(memory) => Self::register_host(domain, memory, access),
            Memory::Device { bytes } => {
                Self::register_device(domain, pool.fd.as_raw_fd(), *bytes, access)
            }
        };
        Ok(Self {
            raw: raw?,
            _domain: Arc::clone(domain),
            pool: Arc::clone(pool),
        })
    }

    fn register_host(
        domain: &ProtectionDomain,
        memory: &Mapping,
        access: Access,
    ) -> Result<*mut sys::ibv_mr, VerbsError> {
        let bytes = usize::try_from(memory.bytes()).expect(FITS);
        let start = memory.as_mut_ptr().cast();
        // SAFETY: the mapping has `bytes` bytes from `start` on, and is kept by the region.
        let raw = unsafe { sys::ibv_reg_mr_iova2(domain.raw(), start, bytes, 0, access.0) };
        check_pointer("ibv_reg_mr_iova2", raw)
    }

    fn register_device(
        domain: &ProtectionDomain,
        dma_buf: RawFd,
        bytes: u64,
        access: Access,
    ) -> Result<*mut sys::ibv_mr, VerbsError> {
        let bytes = usize::try_from(bytes).expect(FITS);
        let access = i32::try_from(access.0).expect("the flags that we use are small");
        // SAFETY: the kernel checks the descriptor, and holds its memory for as long as the region.
        let raw = unsafe { sys::ibv_reg_dmabuf_mr(domain.raw(), 0, bytes, 0, dma_buf, access) };
        check_pointer("ibv_reg_dmabuf_mr", raw)
    }

    /// Whether a device's driver knows device memory at all: then it finds that -1 is none.
    pub(crate) fn device_memory(domain: &ProtectionDomain) -> bool {
        let access = Access::LOCAL_WRITE;
        match Self::register_device(domain, -1, PAGE_BYTES, access) {
            Ok(_) => unreachable!("-1 is no descriptor"),
            Err(VerbsError { code, .. }) => code == EBADF,
        }
    }

    /// The key for this host's own work requests.
    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: the region is registered for as long as `self` lives.
        unsafe { (*self.raw).lkey }
    }

    /// The key that opens all of it to whoever is connected.
    pub(crate) fn rkey(&self) -> RKey {
        // SAFETY: the region is registered for as long as `self` lives.
        RKey(unsafe { (*self.raw).rkey })
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_mr {
        self.raw
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered once, ended once; who posts with its keys from now on is refused.
        let code = unsafe { sys::ibv_dereg_mr(self.raw) };
        log_failure(check("ibv_dereg_mr", code));
        if code != 0 {
            // The device may still reach the memory, so it must stay mapped: leaked for good.
            let _leaked = Arc::into_raw(Arc::clone(&self.pool));
        }
    }
}

/// A memory window of type 2: bound by a queue pair's work request to a part of a region, for the
/// peer of that queue pair alone, until it is invalidated.
pub(crate) struct MemoryWindow {
    raw: *mut sys::ibv_mw,
    made: Made,
    _domain: Arc<ProtectionDomain>,
    /// The key of the next bind. M: the provider does not keep it for type 2, ibv_bind_mw(3).
    next_key: u32,
    binds_left: u8,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    pub(crate) fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        // SAFETY: the domain is there.
        let raw = unsafe { sys::ibv_alloc_mw(domain.raw(), sys::ibv_mw_type::IBV_MW_TYPE_2) };
        let raw = check_pointer("ibv_alloc_mw", raw)?;
        // SAFETY: it was just made.
        let key = unsafe { (*raw).rkey };
        Ok(Self {
            raw,
            made: Made::now(),
            _domain: Arc::clone(domain),
            next_key: next_key(key),
            binds_left: BINDS_MAX,
        })
    }

    /// When it was made.
    pub(crate) fn made(&self) -> Made {
        self.made
    }

    /// The key for the next bind: never one that this window had before. `None`: its keys are used
    /// up, and it must go.
    // S6: the last eight bits are all that tells a key from its predecessors.
    pub(crate) fn take_key(&mut self) -> Option<RKey> {
        self.binds_left = self.binds_left.checked_sub(1)?;
        let key = self.next_key;
        self.next_key = next_key(key);
        Some(RKey(key))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_mw {
        self.raw
    }

    /// Notes the key of a bind that was posted. M: providers leave that to the caller for type 2,
    /// and soft-RoCE refuses the next bind of a window that has another key than it thinks.
    pub(crate) fn bound_under(&self, rkey: RKey) {
        // SAFETY: the window is there; `self` is not `Sync`, so nobody else looks at its fields.
        unsafe { (*self.raw).rkey = rkey.0 };
    }

    /// Destroys the window, bound or not. Once this has returned no new access through it begins;
    /// one packet may be under way until its queue pair is destroyed.
    pub(crate) fn close(self) -> Result<(), VerbsError> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: made once, and destroyed once: `drop` does not run.
        let code = unsafe { sys::ibv_dealloc_mw(this.raw) };
        // SAFETY: the field is not used again, as `this` is not.
        let domain = unsafe { std::ptr::read(&raw const this._domain) };
        drop(domain);
        check("ibv_dealloc_mw", code)
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("binds_left", &self.binds_left)
            .finish_non_exhaustive()
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: made once, and destroyed once: `close` does not come here.
        let code = unsafe { sys::ibv_dealloc_mw(self.raw) };
        log_failure(check("ibv_dealloc_mw", code));
    }
}

/// The last eight bits count binds, and wrap.
fn next_key(key: u32) -> u32 {
    (key & !0xFF) | (key.wrapping_add(1) & 0xFF)
}

const FITS: &str = "memory that there is has a length that fits usize";

/// The least that there can be of device memory.
const PAGE_BYTES: u64 = 4096;

/// M: errno(3).
const EBADF: i32 = 9;

/// After so many binds a key would come again.
const BINDS_MAX: u8 = 255;
