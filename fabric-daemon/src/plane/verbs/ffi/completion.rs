//! Completion queues, and the channel that tells of them.

use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use rdma_mummy_sys as sys;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::{Context, RKey, VerbsError, check, check_pointer, log_failure};

/// Tells that a completion queue has something, by its descriptor.
pub(crate) struct CompletionChannel {
    raw: *mut sys::ibv_comp_channel,
    context: Arc<Context>,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { sys::ibv_create_comp_channel(context.raw()) };
        let raw = check_pointer("ibv_create_comp_channel", raw)?;
        let context = Arc::clone(context);
        let channel = Arc::new(Self { raw, context });
        let fd = channel.fd();
        let blocking = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        blocking.map_err(|error| VerbsError {
            call: "fcntl",
            code: error.raw_os_error(),
        })?;
        Ok(channel)
    }

    /// Readable when a queue that asked for it has something.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is there for as long as `self` is borrowed.
        let fd = unsafe { (*self.raw).fd };
        // SAFETY: the library keeps this descriptor open for as long as the channel is there.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Takes in what the channel tells; never waits.
    pub(crate) fn clear(&self) {
        loop {
            let (mut queue, mut about) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is there, and the targets are this function's.
            let code = unsafe { sys::ibv_get_cq_event(self.raw, &raw mut queue, &raw mut about) };
            if code != 0 {
                return;
            }
            // SAFETY: a queue of this channel, with the event that was just taken.
            unsafe { sys::ibv_ack_cq_events(queue, 1) };
        }
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: queues hold their channel, so none of it is left.
        let code = unsafe { sys::ibv_destroy_comp_channel(self.raw) };
        log_failure(check("ibv_destroy_comp_channel", code));
    }
}

/// Where queue pairs say what became of work requests.
pub(crate) struct CompletionQueue {
    raw: *mut sys::ibv_cq,
    channel: Arc<CompletionChannel>,
    capacity: u32,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue for at least `capacity` completions. Whoever has more outstanding than that loses
    /// the queue, and every queue pair with it.
    pub(crate) fn new(
        channel: &Arc<CompletionChannel>,
        capacity: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let entries = i32::try_from(capacity).unwrap_or(i32::MAX);
        let context = channel.context.raw();
        // SAFETY: the context is open and the channel is there; both are kept.
        let raw = unsafe { sys::ibv_create_cq(context, entries, ptr::null_mut(), channel.raw, 0) };
        let raw = check_pointer("ibv_create_cq", raw)?;
        let channel = Arc::clone(channel);
        Ok(Arc::new(Self {
            raw,
            channel,
            capacity,
        }))
    }

    /// How many completions fit.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Has the channel tell of the next completion.
    pub(crate) fn request_notification(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is there.
        let code = unsafe { sys::ibv_req_notify_cq(self.raw, 0) };
        check("ibv_req_notify_cq", code)
    }

    /// Takes what there is, at most [`Completions::MAX`]. Never waits.
    pub(crate) fn poll<'a>(
        &self,
        completions: &'a mut Completions,
    ) -> Result<impl ExactSizeIterator<Item = WorkCompletion> + use<'a>, VerbsError> {
        let entries = completions.0.as_mut_ptr().cast::<sys::ibv_wc>();
        // SAFETY: the target has room for as many as are asked for.
        let polled = unsafe { sys::ibv_poll_cq(self.raw, COMPLETIONS_COUNT, entries) };
        let Ok(polled) = usize::try_from(polled) else {
            return Err(VerbsError::last("ibv_poll_cq"));
        };
        let filled = completions.0.iter().take(polled);
        // SAFETY: they were zeroes, which are a completion, before the call filled what it fills.
        Ok(filled.map(|wc| WorkCompletion::new(unsafe { wc.assume_init_ref() })))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("channel", &self.channel)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their queue, so none of it is left.
        let code = unsafe { sys::ibv_destroy_cq(self.raw) };
        log_failure(check("ibv_destroy_cq", code));
    }
}

/// Room for what one poll takes. M: ibv_poll_cq(3) leaves fields of a completion as they were that
/// mean nothing for it.
pub(crate) struct Completions([MaybeUninit<sys::ibv_wc>; Self::MAX]);

impl Completions {
    /// Most completions of one poll.
    pub(crate) const MAX: usize = 64;

    pub(crate) const fn new() -> Self {
        Self([const { MaybeUninit::zeroed() }; Self::MAX])
    }
}

impl Default for Completions {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completions").finish_non_exhaustive()
    }
}

const COMPLETIONS_COUNT: i32 = 64;

const _: () = assert!(COMPLETIONS_COUNT as usize == Completions::MAX);

/// What became of a work request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct WorkCompletion {
    /// As the request had it.
    pub(crate) wr_id: u64,
    /// What was done; the reason where it was not.
    pub(crate) result: Result<Opcode, Status>,
}

/// What a work request that succeeded did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Opcode {
    /// A window was bound.
    Bind,
    /// A window was invalidated by this host.
    LocalInvalidate,
    /// A message arrived.
    Receive,
    /// A message arrived, with this number.
    ReceiveImmediate(u32),
    /// A message arrived, and the window with this key was invalidated by it.
    ReceiveInvalidate(RKey),
    /// A read brought its bytes.
    Read,
    /// A message was sent, and is acknowledged.
    Send,
    /// A write is acknowledged.
    Write,
    /// M: the numbers of ibv_poll_cq(3).
    Unknown(u32),
}

/// Why a work request was not done. M: the numbers of ibv_poll_cq(3), `enum ibv_wc_status`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Status(pub(crate) u32);

impl Status {
    /// The queue pair is in error, from another request's fault or since it was told to.
    pub(crate) const FLUSHED: Self = Self(sys::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// The peer refuses the key, or what is asked of it.
    pub(crate) const REMOTE_ACCESS: Self = Self(sys::ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    /// The peer does not answer.
    pub(crate) const RETRIES_EXCEEDED: Self = Self(sys::ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::FLUSHED => f.write_str("flushed"),
            Self::REMOTE_ACCESS => f.write_str("the peer refuses access"),
            Self::RETRIES_EXCEEDED => f.write_str("the peer does not answer"),
            Self(other) => write!(f, "work completion status {other}"),
        }
    }
}

impl WorkCompletion {
    fn new(wc: &sys::ibv_wc) -> Self {
        let result = if wc.status == sys::ibv_wc_status::IBV_WC_SUCCESS {
            Ok(Opcode::new(wc))
        } else {
            // M: ibv_poll_cq(3): only wr_id, status and qp_num are valid then.
            Err(Status(wc.status))
        };
        Self {
            wr_id: wc.wr_id,
            result,
        }
    }
}

impl Opcode {
    fn new(wc: &sys::ibv_wc) -> Self {
        // SAFETY: both variants are a u32; the flags say how to read it.
        let number = unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey };
        let has = |flag: sys::ibv_wc_flags| wc.wc_flags & flag.0 != 0;
        match wc.opcode {
            sys::ibv_wc_opcode::IBV_WC_BIND_MW => Self::Bind,
            sys::ibv_wc_opcode::IBV_WC_LOCAL_INV => Self::LocalInvalidate,
            sys::ibv_wc_opcode::IBV_WC_RDMA_READ => Self::Read,
            sys::ibv_wc_opcode::IBV_WC_RDMA_WRITE => Self::Write,
            sys::ibv_wc_opcode::IBV_WC_SEND => Self::Send,
            sys::ibv_wc_opcode::IBV_WC_RECV if has(sys::ibv_wc_flags::IBV_WC_WITH_IMM) => {
                Self::ReceiveImmediate(u32::from_be(number))
            }
            // Soft-RoCE's kernel module passes its own number for the flag on, which means
            // IP_CSUM_OK to the library: measured on 6.1. That has no meaning on a reliable
            // connection.
            sys::ibv_wc_opcode::IBV_WC_RECV
                if has(sys::ibv_wc_flags::IBV_WC_WITH_INV)
                    || has(sys::ibv_wc_flags::IBV_WC_IP_CSUM_OK) =>
            {
                Self::ReceiveInvalidate(RKey(number))
            }
            sys::ibv_wc_opcode::IBV_WC_RECV => Self::Receive,
            other => Self::Unknown(other),
        }
    }
}
