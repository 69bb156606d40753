//! Ports that lanes can go through, and what is shared by the lanes of one.

use std::sync::Arc;

use tracing::{info, warn};

use super::Mode;
use super::codec::{RAILS_MAX, RailAddress};
use super::ffi::{
    Access, CompletionChannel, CompletionQueue, Completions, Context, GidEntry, GidKind, Limits,
    MemoryWindow, ProtectionDomain, QueuePair, Route, VerbsError, device_names,
};
use super::lanes::{LANE_COMPLETIONS, Side};
use super::numa;

/// A port of a device.
#[derive(Debug)]
pub(super) struct Rail {
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) channel: Arc<CompletionChannel>,
    pub(super) port: u8,
    pub(super) gid: GidEntry,
    pub(super) address: RailAddress,
    pub(super) limits: Limits,
    /// Where the device is attached. `None`: the host does not say.
    pub(super) numa_node: Option<u32>,
    queues: Vec<Queue>,
    /// Windows that are bound to nothing.
    windows: Vec<MemoryWindow>,
    rights: Rights,
}

/// What devices may do, at the most: as little as the modes need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Rights {
    /// With a pool's own key; and whether windows may be bound to it.
    pub(super) region: Access,
    /// Through our end of a lane of ours, whose peer writes.
    pub(super) granting: Access,
    /// Through our end of a peer's lane, whose peer reads where it pulls.
    pub(super) exposing: Access,
}

impl Rights {
    pub(super) fn new(modes: &[Mode]) -> Self {
        let base = Access::LOCAL_WRITE;
        let mut rights = Self {
            region: base,
            granting: base,
            exposing: base,
        };
        for mode in modes {
            // S7: the pool's own key opens nothing where windows do it all. M: ibv_bind_mw(3): a
            // window for remote writes needs a region with local write and the right to bind, no
            // more; one for remote reads only needs the right to bind. Where peers are let in by
            // reads alone, no peer can write through any queue pair or key.
            match mode {
                Mode::Lane => {
                    rights.region = rights.region | Access::REMOTE_WRITE;
                    rights.granting = rights.granting | Access::REMOTE_WRITE;
                }
                Mode::Pull => {
                    rights.region = rights.region | Access::WINDOWS;
                    rights.exposing = rights.exposing | Access::WINDOWS | Access::REMOTE_READ;
                }
                Mode::Window => {
                    rights.region = rights.region | Access::WINDOWS;
                    rights.granting = rights.granting | Access::WINDOWS | Access::REMOTE_WRITE;
                }
            }
        }
        rights
    }
}

#[derive(Debug)]
struct Queue {
    completions: Arc<CompletionQueue>,
    /// Completions that its lanes may have outstanding at most. With those that are stale never
    /// above its capacity: so the queue cannot overflow.
    reserved: u32,
    /// Completions that lanes which are gone may have left in it.
    stale: u32,
    /// How many have to be taken until these surely are: they come in order.
    stale_until: u32,
}

impl Queue {
    fn has_room(&self) -> bool {
        self.reserved + self.stale + LANE_COMPLETIONS <= self.completions.capacity()
    }
}

impl Rail {
    fn open(context: &Arc<Context>, port: u8, limits: Limits) -> Result<Option<Self>, VerbsError> {
        let attributes = context.port(port)?;
        let device = context.name();
        if !attributes.is_active {
            info!(device, port, "not used: the port is not active");
            return Ok(None);
        }
        let gids = 0..u8::try_from(attributes.gids).unwrap_or(u8::MAX);
        let gids: Vec<_> = gids.filter_map(|index| context.gid(port, index)).collect();
        let Some(gid) = best_gid(&gids, attributes.is_ethernet) else {
            warn!(
                device,
                port, "not used: the port has no address that can be routed"
            );
            return Ok(None);
        };
        Ok(Some(Self {
            domain: ProtectionDomain::new(context)?,
            channel: CompletionChannel::new(context)?,
            port,
            gid,
            address: RailAddress {
                gid: gid.gid,
                lid: attributes.lid,
                mtu: attributes.mtu,
                is_ethernet: attributes.is_ethernet,
                reads: limits.reads_answered_max.min(READS_MAX),
            },
            limits,
            numa_node: numa::node_of_device(device),
            queues: Vec::new(),
            windows: Vec::new(),
            rights: Rights::new(&[]),
        }))
    }

    /// Has pools registered, and lanes made, for these modes from now on.
    pub(super) fn allow(&mut self, modes: &[Mode]) {
        self.rights = Rights::new(modes);
    }

    /// What the peer of a lane may do through our end of it, at the most.
    pub(super) fn access(&self, side: Side) -> Access {
        match side {
            Side::Destination(_) => self.rights.granting,
            Side::Source(_) => self.rights.exposing,
        }
    }

    /// The way from a queue pair here, whose first packet has the number `our_first`, to one of a
    /// peer's port: `theirs` are its number and that of its first packet.
    pub(super) fn route(&self, peer: RailAddress, theirs: (u32, u32), our_first: u32) -> Route {
        Route {
            port: self.port,
            gid_index: self.gid_index(),
            mtu: self.address.mtu.min(peer.mtu),
            is_global: self.address.is_ethernet,
            gid: peer.gid,
            lid: peer.lid,
            number: theirs.0,
            their_first: theirs.1,
            our_first,
            reads_answered: self.address.reads,
            reads_outstanding: self.limits.reads_outstanding_max.min(peer.reads),
        }
    }

    pub(super) fn device(&self) -> &str {
        self.domain.context().name()
    }

    /// Where the port's address is in the port's table now: elsewhere than before, once it has been
    /// taken away and given back.
    fn gid_index(&self) -> u8 {
        let context = self.domain.context();
        let is_at = |index: &u8| {
            let found = context.gid(self.port, *index);
            found.is_some_and(|entry| (entry.gid, entry.kind) == (self.gid.gid, self.gid.kind))
        };
        let gids = context.port(self.port).map_or(0, |port| port.gids);
        let all = 0..u8::try_from(gids).unwrap_or(u8::MAX);
        // First where it was. With none the caller hears of it from the device.
        let mut likely_first = [self.gid.index].into_iter().chain(all);
        likely_first.find(is_at).unwrap_or(self.gid.index)
    }

    /// A queue with room for one more lane.
    pub(super) fn reserve(&mut self) -> Result<Arc<CompletionQueue>, VerbsError> {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.has_room()) {
            queue.reserved += LANE_COMPLETIONS;
            return Ok(Arc::clone(&queue.completions));
        }
        let capacity = self.limits.completions_max.min(QUEUE_COMPLETIONS_MAX);
        let completions = CompletionQueue::new(&self.channel, capacity)?;
        completions.request_notification()?;
        self.queues.push(Queue {
            completions: Arc::clone(&completions),
            reserved: LANE_COMPLETIONS,
            stale: 0,
            stale_until: 0,
        });
        Ok(completions)
    }

    /// A lane of this queue is gone. Its receives were flushed, and some devices leave that in the
    /// queue.
    pub(super) fn release(&mut self, completions: &Arc<CompletionQueue>) {
        let of_lane = |queue: &&mut Queue| Arc::ptr_eq(&queue.completions, completions);
        if let Some(queue) = self.queues.iter_mut().find(of_lane) {
            queue.reserved -= LANE_COMPLETIONS;
            queue.stale += LANE_COMPLETIONS;
            queue.stale_until = queue.completions.capacity();
        }
    }

    /// So many completions of a queue were taken.
    pub(super) fn took(&mut self, index: usize, count: usize) {
        let Some(queue) = self.queues.get_mut(index) else {
            return;
        };
        let taken = u32::try_from(count).expect("one poll takes few");
        queue.stale_until = queue.stale_until.saturating_sub(taken);
        if count < Completions::MAX || queue.stale_until == 0 {
            queue.stale = 0;
        }
    }

    /// Whether what lanes that are gone have left should be taken before more of them go.
    pub(super) fn is_crowded(&self) -> bool {
        let is_crowded = |queue: &Queue| queue.stale > queue.completions.capacity() / 4;
        self.queues.iter().any(is_crowded)
    }

    pub(super) fn queues(&self) -> impl Iterator<Item = &Arc<CompletionQueue>> {
        self.queues.iter().map(|queue| &queue.completions)
    }

    /// The queue of that number, if there are so many.
    pub(super) fn queue(&self, index: usize) -> Option<&CompletionQueue> {
        self.queues.get(index).map(|queue| &*queue.completions)
    }

    /// What the device may do with pools.
    pub(super) fn region_access(&self) -> Access {
        self.rights.region
    }

    /// A window that is bound to nothing, to be bound on this queue pair: so it is younger. An
    /// older one is of no use once there are queue pairs like this, and goes.
    pub(super) fn window(&mut self, on: &QueuePair) -> Result<MemoryWindow, VerbsError> {
        while let Some(window) = self.windows.pop() {
            if window.made() > on.made() {
                return Ok(window);
            }
            window.close()?;
        }
        MemoryWindow::new(&self.domain)
    }

    /// Takes a window back that was invalidated.
    pub(super) fn put_window(&mut self, window: MemoryWindow) {
        if self.windows.len() < WINDOWS_KEPT_MAX {
            self.windows.push(window);
        }
    }

    /// Idle windows that there are.
    pub(super) fn windows(&self) -> u64 {
        self.windows.len() as u64
    }
}

/// The ports of the devices named, or of all: those that can be used. For no mode yet: see
/// [`super::probe::prove`].
pub(super) fn discover(wanted: &[String]) -> Result<Vec<Rail>, VerbsError> {
    let mut rails = Vec::new();
    let names = device_names()?;
    for name in wanted.iter().filter(|name| !names.contains(name)) {
        warn!(device = name, "no such RDMA device; there are {names:?}");
    }
    for name in names {
        if !wanted.is_empty() && !wanted.contains(&name) {
            continue;
        }
        let context = Context::open(&name)?;
        let limits = context.limits()?;
        for port in 1..=limits.ports {
            if let Some(rail) = Rail::open(&context, port, limits)? {
                rails.push(rail);
            }
        }
    }
    rails.truncate(RAILS_MAX);
    Ok(rails)
}

/// The address that reaches furthest. On InfiniBand that is the first.
fn best_gid(gids: &[GidEntry], is_ethernet: bool) -> Option<GidEntry> {
    if !is_ethernet {
        return gids.first().copied();
    }
    let usable = gids.iter().filter(|entry| entry.kind == GidKind::RoceV2);
    // Link-local ones last: they are for one network segment.
    let rank = |entry: &&GidEntry| {
        let is_ipv4 = entry.gid.0[..12] == IPV4_MAPPED;
        let is_link_local = entry.gid.0[..2] == [0xFE, 0x80];
        (is_link_local, !is_ipv4, entry.index)
    };
    usable.min_by_key(rank).copied()
}

/// Completions of one queue: as many as some fifty lanes may have.
const QUEUE_COMPLETIONS_MAX: u32 = 1 << 16;

/// Reads of one lane at a time: enough for the longest way, if each is not very short.
const READS_MAX: u8 = 16;

/// Idle windows of one port.
const WINDOWS_KEPT_MAX: usize = 1 << 14;

/// M: RFC 4291, section 2.5.5.2.
const IPV4_MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF];

#[cfg(test)]
mod tests {
    use super::super::ffi::Gid;
    use super::*;

    fn entry(index: u8, kind: GidKind, start: [u8; 2], ipv4: bool) -> GidEntry {
        let mut gid = [9; 16];
        if ipv4 {
            gid[..12].copy_from_slice(&IPV4_MAPPED);
        } else {
            gid[..2].copy_from_slice(&start);
        }
        let gid = Gid(gid);
        GidEntry { gid, index, kind }
    }

    #[test]
    fn where_peers_are_let_in_by_reads_alone_nothing_opens_to_a_write() {
        let rights = Rights::new(&[Mode::Pull]);
        for access in [rights.region, rights.granting, rights.exposing] {
            assert!(!access.includes(Access::REMOTE_WRITE), "{rights:?}");
        }
        assert!(!rights.region.includes(Access::REMOTE_READ), "{rights:?}");
        assert!(!rights.granting.includes(Access::REMOTE_READ), "{rights:?}");
        assert!(rights.exposing.includes(Access::REMOTE_READ), "{rights:?}");
    }

    #[test]
    fn where_peers_do_not_pull_nothing_opens_to_a_read() {
        let rights = Rights::new(&[Mode::Window, Mode::Lane]);
        for access in [rights.region, rights.granting, rights.exposing] {
            assert!(!access.includes(Access::REMOTE_READ), "{rights:?}");
        }
        assert!(
            !rights.exposing.includes(Access::REMOTE_WRITE),
            "{rights:?}"
        );
    }

    #[test]
    fn the_address_is_the_one_that_reaches_furthest() {
        let link_local = entry(0, GidKind::RoceV2, [0xFE, 0x80], false);
        let old = entry(1, GidKind::Other(1), [0, 0], true);
        let global = entry(2, GidKind::RoceV2, [0x20, 0x01], false);
        let ipv4 = entry(3, GidKind::RoceV2, [0, 0], true);
        let all = [link_local, old, global, ipv4];
        assert_eq!(best_gid(&all, true), Some(ipv4));
        assert_eq!(best_gid(&all[..3], true), Some(global));
        assert_eq!(best_gid(&all[..2], true), Some(link_local));
        assert_eq!(best_gid(&all[1..2], true), None, "not routable");
        assert_eq!(best_gid(&all, false), Some(link_local), "InfiniBand");
    }
}
