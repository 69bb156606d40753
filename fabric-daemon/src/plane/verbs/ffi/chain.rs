//! Chains of work requests: filled in place, posted with one doorbell.

use std::mem;
use std::ptr;

use rdma_mummy_sys as sys;

use super::{Access, MemoryRegion, MemoryWindow, QueuePair, RKey, VerbsError};

/// Up to [`SendChain::MAX`] work requests for one queue pair. Made once and filled again and again:
/// nothing is allocated for a request.
pub(crate) struct SendChain {
    /// Each is linked to the next and to its piece, for good; the last one that is posted is the
    /// end for as long as that takes.
    requests: Box<[sys::ibv_send_wr; Self::MAX]>,
    pieces: Box<[sys::ibv_sge; Self::MAX]>,
    len: usize,
}

// SAFETY: the raw pointers in it point into its own boxes.
unsafe impl Send for SendChain {}

/// Memory of this host.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Local {
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    pub(crate) lkey: u32,
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Remote {
    pub(crate) offset: u64,
    pub(crate) rkey: RKey,
}

/// Whether a request that succeeds says so. One that fails always does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Signal {
    No,
    Yes,
}

impl Signal {
    pub(super) fn flags(self) -> u32 {
        match self {
            Self::No => 0,
            Self::Yes => sys::ibv_send_flags::IBV_SEND_SIGNALED.0,
        }
    }
}

impl SendChain {
    /// Most requests of a chain.
    pub(crate) const MAX: usize = 32;

    pub(crate) fn new() -> Self {
        // SAFETY: numbers, unions of numbers and null pointers, for which zero bytes are fine.
        let mut requests: Box<[sys::ibv_send_wr; Self::MAX]> = unsafe { Box::new(mem::zeroed()) };
        // SAFETY: as above.
        let mut pieces: Box<[sys::ibv_sge; Self::MAX]> = unsafe { Box::new(mem::zeroed()) };
        let mut next = ptr::null_mut();
        for (request, piece) in requests.iter_mut().zip(pieces.iter_mut()).rev() {
            request.next = next;
            request.sg_list = piece;
            next = request;
        }
        Self {
            requests,
            pieces,
            len: 0,
        }
    }

    /// Writes to the peer's memory.
    ///
    /// # Panics
    ///
    /// Where the chain is full; so do the others.
    pub(crate) fn write(&mut self, wr_id: u64, signal: Signal, local: Local, remote: Remote) {
        let opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        self.transfer(opcode, (wr_id, signal), local, remote);
    }

    /// Reads from the peer's memory into this host's.
    pub(crate) fn read(&mut self, wr_id: u64, signal: Signal, local: Local, remote: Remote) {
        let opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_READ;
        self.transfer(opcode, (wr_id, signal), local, remote);
    }

    #[inline]
    fn transfer(
        &mut self,
        opcode: sys::ibv_wr_opcode::Type,
        (wr_id, signal): (u64, Signal),
        local: Local,
        remote: Remote,
    ) {
        self.pieces[self.len] = sys::ibv_sge {
            addr: local.offset,
            length: local.bytes,
            lkey: local.lkey,
        };
        let request = self.next(opcode, wr_id, signal);
        request.num_sge = 1;
        request.wr.rdma = sys::rdma_t {
            remote_addr: remote.offset,
            rkey: remote.rkey.0,
        };
    }

    /// Sends an empty message.
    pub(crate) fn send_empty(&mut self, wr_id: u64, signal: Signal) {
        self.next(sys::ibv_wr_opcode::IBV_WR_SEND, wr_id, signal);
    }

    /// Sends a message of nothing but a number.
    pub(crate) fn send_immediate(&mut self, wr_id: u64, signal: Signal, number: u32) {
        let request = self.next(sys::ibv_wr_opcode::IBV_WR_SEND_WITH_IMM, wr_id, signal);
        request.imm_data_invalidated_rkey_union = sys::imm_data_invalidated_rkey_union_t {
            imm_data: number.to_be(),
        };
    }

    /// Sends an empty message that invalidates the peer's window with this key.
    pub(crate) fn send_invalidate(&mut self, wr_id: u64, signal: Signal, rkey: RKey) {
        let request = self.next(sys::ibv_wr_opcode::IBV_WR_SEND_WITH_INV, wr_id, signal);
        request.imm_data_invalidated_rkey_union = sys::imm_data_invalidated_rkey_union_t {
            invalidated_rkey: rkey.0,
        };
    }

    /// Binds a window to a part of a region, from an offset on and so many bytes, under `rkey`, for
    /// the peer of the chain's queue pair alone. All of them must be there until it is posted.
    pub(crate) fn bind(
        &mut self,
        wr_id: u64,
        signal: Signal,
        (window, rkey): (&MemoryWindow, RKey),
        (region, offset, bytes): (&MemoryRegion, u64, u64),
        access: Access,
    ) {
        let request = self.next(sys::ibv_wr_opcode::IBV_WR_BIND_MW, wr_id, signal);
        request.bind_mw_tso_union.bind_mw = sys::bind_mw_t {
            mw: window.raw(),
            rkey: rkey.0,
            bind_info: sys::ibv_mw_bind_info {
                mr: region.raw(),
                addr: offset,
                length: bytes,
                mw_access_flags: access.0,
            },
        };
    }

    /// Has the last request say so when it succeeds.
    ///
    /// # Panics
    ///
    /// Where there is none.
    pub(crate) fn signal_last(&mut self) {
        self.requests[self.len - 1].send_flags = Signal::Yes.flags();
    }

    /// Forgets what was not posted.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// Posts the chain, and empties it. On an error the queue pair took only a part of it, if any:
    /// there is no telling what it will do, so it must be closed.
    pub(crate) fn post(&mut self, queue_pair: &QueuePair) -> Result<(), VerbsError> {
        let len = mem::take(&mut self.len);
        if len == 0 {
            return Ok(());
        }
        let after = mem::replace(&mut self.requests[len - 1].next, ptr::null_mut());
        let mut refused = ptr::null_mut();
        let first = self.requests.as_mut_ptr();
        // SAFETY: the queue pair is there; the requests are linked and their pieces are in boxes of
        // this value, which outlive the call, which copies both.
        let code = unsafe { sys::ibv_post_send(queue_pair.raw(), first, &raw mut refused) };
        self.requests[len - 1].next = after;
        super::check("ibv_post_send", code)
    }

    /// The next request.
    fn next(
        &mut self,
        opcode: sys::ibv_wr_opcode::Type,
        wr_id: u64,
        signal: Signal,
    ) -> &mut sys::ibv_send_wr {
        let request = &mut self.requests[self.len];
        self.len += 1;
        request.wr_id = wr_id;
        request.opcode = opcode;
        request.send_flags = signal.flags();
        request.num_sge = 0;
        request
    }
}

impl std::fmt::Debug for SendChain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendChain")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
