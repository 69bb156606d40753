//! Devices, their ports, and protection domains.

use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use rdma_mummy_sys as sys;

use super::{ENOSYS, EOPNOTSUPP, VerbsError, check, check_pointer, log_failure};

/// The names of this host's devices. None where the kernel has no RDMA stack, or the host no
/// libibverbs: both are hosts without RDMA.
pub(crate) fn device_names() -> Result<Vec<String>, VerbsError> {
    let list = match DeviceList::new() {
        Ok(list) => list,
        Err(error) if [ENOSYS, EOPNOTSUPP].contains(&error.code) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    Ok(list.devices().map(|(name, _)| name).collect())
}

/// An open device.
pub(crate) struct Context {
    raw: *mut sys::ibv_context,
    name: String,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device can do, as far as it matters here.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Limits {
    pub(crate) ports: u8,
    pub(crate) completions_max: u32,
    /// Reads of its peer that a queue pair answers at a time.
    pub(crate) reads_answered_max: u8,
    /// Reads that a queue pair has outstanding at a time.
    pub(crate) reads_outstanding_max: u8,
}

/// A port, as it is now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Port {
    pub(crate) is_active: bool,
    pub(crate) is_ethernet: bool,
    /// The local identifier; 0 on Ethernet.
    pub(crate) lid: u16,
    /// As in the specification: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u8,
    pub(crate) gids: u16,
}

/// A global identifier: a port's address.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// An entry of a port's table of addresses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct GidEntry {
    pub(crate) gid: Gid,
    pub(crate) index: u8,
    pub(crate) kind: GidKind,
}

/// How packets from an address travel.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(crate) enum GidKind {
    /// In InfiniBand packets.
    InfiniBand,
    /// In UDP over IP.
    RoceV2,
    /// In Ethernet frames, or in a way that is not known here.
    Other(u32),
}

/// Something that happened to a device.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum AsyncEvent {
    /// The device is lost.
    DeviceFatal,
    /// This port can be used again.
    PortActive(u8),
    /// This port can not be used.
    PortDown(u8),
    /// The addresses of this port are others than before.
    AddressesChanged(u8),
    /// A completion queue has lost completions.
    QueueFull,
    /// Anything else; M: the numbers of ibv_get_async_event(3).
    Other(u32),
}

impl Context {
    /// Opens the device of that name.
    pub(crate) fn open(name: &str) -> Result<Arc<Self>, VerbsError> {
        let list = DeviceList::new()?;
        let found = list.devices().find(|(other, _)| other == name);
        let device = found.map_or(ptr::null_mut(), |(_, device)| device);
        if device.is_null() {
            let (call, code) = ("ibv_get_device_list", ENODEV);
            return Err(VerbsError { call, code });
        }
        // SAFETY: `device` is of the list, which is freed only after this.
        let raw = unsafe { sys::ibv_open_device(device) };
        let raw = check_pointer("ibv_open_device", raw)?;
        Ok(Arc::new(Self {
            raw,
            name: name.to_owned(),
        }))
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.raw
    }

    pub(crate) fn limits(&self) -> Result<Limits, VerbsError> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: `raw` is open, and the target is as large as the call fills.
        let code = unsafe { sys::ibv_query_device(self.raw, attributes.as_mut_ptr()) };
        check("ibv_query_device", code)?;
        // SAFETY: numbers only, for which zero bytes are fine, and the call has filled it.
        let attributes = unsafe { attributes.assume_init() };
        Ok(Limits {
            ports: attributes.phys_port_cnt,
            completions_max: count(attributes.max_cqe),
            reads_answered_max: count_u8(attributes.max_qp_rd_atom),
            reads_outstanding_max: count_u8(attributes.max_qp_init_rd_atom),
        })
    }

    /// What a port is now. Ports count from 1.
    pub(crate) fn port(&self, port: u8) -> Result<Port, VerbsError> {
        let mut attributes = MaybeUninit::zeroed();
        // SAFETY: `raw` is open, and the target is as large as the call fills.
        let code = unsafe { sys::ibv_query_port(self.raw, port, attributes.as_mut_ptr()) };
        check("ibv_query_port", code)?;
        // SAFETY: numbers only, for which zero bytes are fine, and the call has filled it.
        let attributes: sys::ibv_port_attr = unsafe { attributes.assume_init() };
        Ok(Port {
            is_active: attributes.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            is_ethernet: attributes.link_layer == LINK_LAYER_ETHERNET,
            lid: attributes.lid,
            mtu: u8::try_from(attributes.active_mtu).unwrap_or(0),
            gids: u16::try_from(attributes.gid_tbl_len).unwrap_or(0),
        })
    }

    /// An address of a port; `None` where the table has no such entry.
    pub(crate) fn gid(&self, port: u8, index: u8) -> Option<GidEntry> {
        let mut entry = MaybeUninit::<sys::ibv_gid_entry>::zeroed();
        // SAFETY: `raw` is open, and the target is as large as the call fills.
        let code = unsafe {
            sys::ibv_query_gid_ex(self.raw, port.into(), index.into(), entry.as_mut_ptr(), 0)
        };
        check("ibv_query_gid_ex", code).ok()?;
        // SAFETY: numbers only, for which zero bytes are fine, and the call has filled it.
        let entry = unsafe { entry.assume_init() };
        let kind = match entry.gid_type {
            sys::IBV_GID_TYPE_IB => GidKind::InfiniBand,
            sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            other => GidKind::Other(other),
        };
        // SAFETY: every variant of this union is sixteen plain bytes.
        let gid = Gid(unsafe { entry.gid.raw });
        Some(GidEntry { gid, index, kind })
    }

    /// Readable when [`Context::next_event`] has something.
    pub(crate) fn events_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `raw` is open for as long as `self` is borrowed.
        let fd = unsafe { (*self.raw).async_fd };
        // SAFETY: the library keeps this descriptor open for as long as the context is.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes the next event. Waits for one: see [`Context::events_fd`].
    pub(crate) fn next_event(&self) -> Result<AsyncEvent, VerbsError> {
        // Not the binding's own type: that has an enum, which must not hold a number it lacks.
        // The element is a union of pointers and of a port's number, an `int`.
        #[repr(C, align(8))]
        struct RawEvent {
            port: i32,
            rest: i32,
            kind: u32,
        }
        let mut event = RawEvent {
            port: 0,
            rest: 0,
            kind: 0,
        };
        let raw = (&raw mut event).cast::<sys::ibv_async_event>();
        // SAFETY: `raw` is open, and the target has the layout of the event that the call fills.
        let code = unsafe { sys::ibv_get_async_event(self.raw, raw) };
        check("ibv_get_async_event", code)?;
        // SAFETY: the event was just taken, and its object, if any, is not looked at.
        unsafe { sys::ibv_ack_async_event(raw) };
        // M: libibverbs counts ports from 1, in 8 bits.
        let port = u8::try_from(event.port).unwrap_or(0);
        Ok(match event.kind {
            0 => AsyncEvent::QueueFull,
            8 => AsyncEvent::DeviceFatal,
            9 => AsyncEvent::PortActive(port),
            10 => AsyncEvent::PortDown(port),
            18 => AsyncEvent::AddressesChanged(port),
            other => AsyncEvent::Other(other),
        })
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made from the context holds it, so nothing of it is left.
        let code = unsafe { sys::ibv_close_device(self.raw) };
        log_failure(check("ibv_close_device", code));
    }
}

/// What queue pairs, regions and windows belong to: those of one domain work with each other.
pub(crate) struct ProtectionDomain {
    raw: *mut sys::ibv_pd,
    context: Arc<Context>,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { sys::ibv_alloc_pd(context.raw) };
        let raw = check_pointer("ibv_alloc_pd", raw)?;
        let context = Arc::clone(context);
        Ok(Arc::new(Self { raw, context }))
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain holds it, so nothing of it is left.
        let code = unsafe { sys::ibv_dealloc_pd(self.raw) };
        log_failure(check("ibv_dealloc_pd", code));
    }
}

struct DeviceList {
    raw: *mut *mut sys::ibv_device,
    count: usize,
}

impl DeviceList {
    fn new() -> Result<Self, VerbsError> {
        let mut found = 0;
        // SAFETY: the target is the caller's.
        let raw = unsafe { sys::ibv_get_device_list(&raw mut found) };
        let raw = check_pointer("ibv_get_device_list", raw)?;
        let count = usize::try_from(found).unwrap_or(0);
        Ok(Self { raw, count })
    }

    fn devices(&self) -> impl Iterator<Item = (String, *mut sys::ibv_device)> {
        (0..self.count).map(|index| {
            // SAFETY: the list has `count` entries.
            let entry = unsafe { self.raw.add(index) };
            // SAFETY: as above, and the list is not freed yet.
            let device = unsafe { *entry };
            // SAFETY: the device is of the list, which is not freed yet.
            let name = unsafe { sys::ibv_get_device_name(device) };
            // SAFETY: the library's name ends with a zero byte, and lives as long as the list.
            let name = unsafe { CStr::from_ptr(name) };
            (name.to_string_lossy().into_owned(), device)
        })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the library's own list, freed once.
        unsafe { sys::ibv_free_device_list(self.raw) };
    }
}

fn count(limit: i32) -> u32 {
    u32::try_from(limit).unwrap_or(0)
}

fn count_u8(limit: i32) -> u8 {
    u8::try_from(limit.max(0)).unwrap_or(u8::MAX)
}

/// M: verbs.h, `IBV_LINK_LAYER_ETHERNET`.
const LINK_LAYER_ETHERNET: u8 = 2;

/// M: errno(3).
const ENODEV: i32 = 19;
