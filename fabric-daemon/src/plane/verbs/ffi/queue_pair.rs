//! Queue pairs: reliable connections to one peer.

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ptr;
use std::sync::Arc;

use rdma_mummy_sys as sys;

use super::{
    Access, CompletionQueue, Gid, Made, ProtectionDomain, VerbsError, check, check_pointer,
    log_failure,
};

/// How much a queue pair takes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Capacity {
    pub(crate) sends: u32,
    pub(crate) receives: u32,
}

/// Receives that are posted at once.
const RECEIVE_CHAIN_MAX: u32 = 32;

/// From one queue pair to another.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Route {
    /// Ours; counts from 1.
    pub(crate) port: u8,
    /// Ours: which address of the port packets come from.
    pub(crate) gid_index: u8,
    /// As in the specification: what both ports take.
    pub(crate) mtu: u8,
    /// Whether packets carry global addresses: always on Ethernet.
    pub(crate) is_global: bool,
    /// The peer's.
    pub(crate) gid: Gid,
    /// The peer's; 0 on Ethernet.
    pub(crate) lid: u16,
    /// The peer's number of its queue pair.
    pub(crate) number: u32,
    /// The peer's first packet's number.
    pub(crate) their_first: u32,
    /// Our first packet's number.
    pub(crate) our_first: u32,
    /// Reads of the peer's that we answer at a time. At most what our device takes.
    pub(crate) reads_answered: u8,
    /// Reads of ours that are outstanding at a time. At most what the peer answers: more would
    /// break the connection.
    pub(crate) reads_outstanding: u8,
}

/// A reliable connection.
pub(crate) struct QueuePair {
    raw: *mut sys::ibv_qp,
    made: Made,
    owned: Owned,
}

struct Owned {
    _domain: Arc<ProtectionDomain>,
    _completions: Arc<CompletionQueue>,
}

// SAFETY: see the module: the library locks what its handles share.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Makes a queue pair. Both of its directions complete to `completions`.
    pub(crate) fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        capacity: Capacity,
    ) -> Result<Self, VerbsError> {
        let mut attributes = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw(),
            recv_cq: completions.raw(),
            srq: ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: capacity.sends,
                max_recv_wr: capacity.receives,
                // A chain's requests have one piece each.
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queue are there, and are kept.
        let raw = unsafe { sys::ibv_create_qp(domain.raw(), &raw mut attributes) };
        let raw = check_pointer("ibv_create_qp", raw)?;
        Ok(Self {
            raw,
            made: Made::now(),
            owned: Owned {
                _domain: Arc::clone(domain),
                _completions: Arc::clone(completions),
            },
        })
    }

    /// When it was made.
    pub(crate) fn made(&self) -> Made {
        self.made
    }

    /// Its number on this device.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is there for as long as `self` lives.
        unsafe { (*self.raw).qp_num }
    }

    /// From `Reset` to `Init`: receives may be posted. `access` is the most that the peer may do
    /// through this queue pair, whatever key it shows.
    pub(crate) fn initialise(&self, port: u8, access: Access) -> Result<(), VerbsError> {
        let mut attributes = state(sys::ibv_qp_state::IBV_QPS_INIT);
        attributes.port_num = port;
        attributes.qp_access_flags = access.0;
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0
            | sys::ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0
            | sys::ibv_qp_attr_mask::IBV_QP_PORT.0
            | sys::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0;
        self.modify(attributes, mask)
    }

    /// From `Init` to `ReadyToReceive` and on to `ReadyToSend`.
    pub(crate) fn connect(&self, route: &Route) -> Result<(), VerbsError> {
        let mut attributes = state(sys::ibv_qp_state::IBV_QPS_RTR);
        attributes.path_mtu = route.mtu.into();
        attributes.dest_qp_num = route.number;
        attributes.rq_psn = route.their_first;
        attributes.max_dest_rd_atomic = route.reads_answered;
        attributes.min_rnr_timer = NOT_READY_WAIT;
        attributes.ah_attr = sys::ibv_ah_attr {
            grh: sys::ibv_global_route {
                dgid: sys::ibv_gid { raw: route.gid.0 },
                flow_label: 0,
                sgid_index: route.gid_index,
                hop_limit: HOPS_MAX,
                traffic_class: 0,
            },
            dlid: route.lid,
            sl: 0,
            src_path_bits: 0,
            static_rate: 0,
            is_global: u8::from(route.is_global),
            port_num: route.port,
        };
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0
            | sys::ibv_qp_attr_mask::IBV_QP_AV.0
            | sys::ibv_qp_attr_mask::IBV_QP_PATH_MTU.0
            | sys::ibv_qp_attr_mask::IBV_QP_DEST_QPN.0
            | sys::ibv_qp_attr_mask::IBV_QP_RQ_PSN.0
            | sys::ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
            | sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0;
        self.modify(attributes, mask)?;

        let mut attributes = state(sys::ibv_qp_state::IBV_QPS_RTS);
        attributes.timeout = ACKNOWLEDGE_WAIT;
        attributes.retry_cnt = RETRIES_MAX;
        attributes.rnr_retry = NOT_READY_RETRIES;
        attributes.sq_psn = route.our_first;
        attributes.max_rd_atomic = route.reads_outstanding;
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0
            | sys::ibv_qp_attr_mask::IBV_QP_TIMEOUT.0
            | sys::ibv_qp_attr_mask::IBV_QP_RETRY_CNT.0
            | sys::ibv_qp_attr_mask::IBV_QP_RNR_RETRY.0
            | sys::ibv_qp_attr_mask::IBV_QP_SQ_PSN.0
            | sys::ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
        self.modify(attributes, mask)
    }

    /// To `Error`: nothing more is sent, and what is outstanding is flushed. Not a barrier: a
    /// packet that is being taken in may still land after this has returned.
    pub(crate) fn stop(&self) -> Result<(), VerbsError> {
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0;
        self.modify(state(sys::ibv_qp_state::IBV_QPS_ERR), mask)
    }

    /// Posts `count` receives for messages without bytes.
    pub(crate) fn post_receives(&self, wr_id: u64, mut count: u32) -> Result<(), VerbsError> {
        let end = sys::ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        let mut requests = [end; RECEIVE_CHAIN_MAX as usize];
        while count > 0 {
            let some = count.min(RECEIVE_CHAIN_MAX);
            count -= some;
            let mut next = ptr::null_mut();
            for request in &mut requests[..some as usize] {
                request.next = next;
                next = request;
            }
            let mut refused = ptr::null_mut();
            // SAFETY: the queue pair is there, and the requests, each of which is linked to the one
            // before, outlive the call, which copies them.
            let code = unsafe { sys::ibv_post_recv(self.raw, next, &raw mut refused) };
            check("ibv_post_recv", code)?;
        }
        Ok(())
    }

    /// Destroys the queue pair. Once this has returned the device does not touch memory for it any
    /// more, in either direction: the last step of a fence.
    ///
    /// Windows that are bound on it must be gone: soft-RoCE waits for them, some fifty seconds.
    pub(crate) fn close(self) -> Result<(), VerbsError> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: made once, and destroyed once: `drop` does not run.
        let code = unsafe { sys::ibv_destroy_qp(this.raw) };
        // SAFETY: the field is not used again, as `this` is not.
        unsafe { ptr::drop_in_place(&raw mut this.owned) };
        check("ibv_destroy_qp", code)
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_qp {
        self.raw
    }

    fn modify(&self, mut attributes: sys::ibv_qp_attr, mask: u32) -> Result<(), VerbsError> {
        let mask = i32::try_from(mask).expect("the flags are small numbers");
        // SAFETY: the queue pair is there, and the call reads what the mask names.
        let code = unsafe { sys::ibv_modify_qp(self.raw, &raw mut attributes, mask) };
        check("ibv_modify_qp", code)
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("number", &self.number())
            .finish_non_exhaustive()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made once, and destroyed once: `close` does not come here.
        let code = unsafe { sys::ibv_destroy_qp(self.raw) };
        log_failure(check("ibv_destroy_qp", code));
    }
}

fn state(state: sys::ibv_qp_state::Type) -> sys::ibv_qp_attr {
    // SAFETY: numbers and flat structs of numbers only, for which zero bytes are fine.
    let mut attributes: sys::ibv_qp_attr = unsafe { mem::zeroed() };
    attributes.qp_state = state;
    attributes
}

/// How long a sender waits that finds no receive: 0.64 ms. M: ibv_modify_qp(3), `min_rnr_timer`.
const NOT_READY_WAIT: u8 = 12;

/// For ever: what a peer that never posts a receive holds up is bounded by `fail_late_writers`, and
/// at the destination by the machine's deadlines.
const NOT_READY_RETRIES: u8 = 7;

/// 4.096 µs × 2^14 = 67 ms; times the retries: a dead peer is noticed within a second or a few.
const ACKNOWLEDGE_WAIT: u8 = 14;

/// Not 7, the most that there is: soft-RoCE takes that for ever, as it is in `rnr_retry`
/// (measured).
const RETRIES_MAX: u8 = 6;

const HOPS_MAX: u8 = 64;
