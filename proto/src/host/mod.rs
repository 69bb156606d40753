//! The one machine that a daemon runs.
//!
//! ```text
//! loop {
//!     host.handle(now, input);                      // whatever happened
//!     while let Some(output) = host.poll() { .. }   // do it, in order
//!     sleep until host.deadline(), or an input; then Input::Tick
//! }
//! ```
//!
//! `handle` takes in events, `poll` gives actions, `deadline` says when to come back. Nothing else
//! is public but getters. The state is split by who it is about:
//!
//! - [`engines`]: sessions, pools and leases of the engines on this host;
//! - [`destination`]: transfers to here, and the grants under which peers write;
//! - [`source`]: transfers from here, and the pins that they read under;
//! - [`slots`], [`pages`], [`timers`]: the tables beneath.
//!
//! Every handler is a ladder of guards in one order (who, which life, which epoch, which state,
//! which bounds) and changes nothing before the last guard has passed.

mod api;
mod destination;
mod engines;
mod pages;
mod slots;
mod source;
mod timers;

#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::hash::{Hash, Hasher};
use core::marker::PhantomData;

pub use api::{
    Config, Input, Misbehaviour, Observation, Output, PlaneCommand, Proofs, ReadsStopped,
    ScrubPolicy, StoppedBy, Tenants, Usage, WritesStopped,
};

use self::destination::{Grant, Receive};
use self::engines::{Engine, Lease, Pool};
use self::source::Send;
use self::timers::{Timer, Timers};
use crate::ids::{
    EngineId, Epoch, GrantId, Incarnation, LeaseId, LinkId, NodeId, PoolId, SlotRef, TransferId,
};
use crate::outcome::{Abort, Outcome};
use crate::time::Now;
use crate::wire::{PeerMessage, PlaneKind, ToEngine};

/// A transfer to here: its link, and its source's number for it.
type ReceiveKey = (LinkId, TransferId);

/// The machine. See the module.
pub struct Host<P: Proofs> {
    state: State,
    proofs: PhantomData<fn(P)>,
}

/// A connection to a peer that is up.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct Link {
    node: NodeId,
    incarnation: Incarnation,
    planes: Vec<PlaneKind>,
}

/// Whether the machine still admits requests.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Life {
    Serving,
    ShuttingDown,
    Over,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
struct State {
    config: Config,
    epoch_base: Epoch,
    life: Life,
    now: Now,
    engines: BTreeMap<EngineId, Engine>,
    pools: BTreeMap<PoolId, Pool>,
    leases: BTreeMap<LeaseId, Lease>,
    links: BTreeMap<LinkId, Link>,
    /// Each grant that may still be written under. Leaves by a proof alone.
    grants: BTreeMap<GrantId, Grant>,
    receives: BTreeMap<ReceiveKey, Receive>,
    sends: BTreeMap<TransferId, Send>,
    /// Slots whose scrub has not been answered.
    scrubs: Vec<(PoolId, Arc<[SlotRef]>)>,
    timers: Timers,
    next_lease: u64,
    next_grant: u64,
    next_transfer: u64,
    outputs: VecDeque<Output>,
}

impl<P: Proofs> Host<P> {
    /// A machine at the start of its life.
    ///
    /// # Panics
    ///
    /// Where the configuration cannot work: no attempt, no byte outstanding, or an incarnation
    /// beyond 32 bits. The daemon checks its configuration first.
    #[must_use]
    pub fn new(config: Config) -> Self {
        assert!(config.attempts_max > 0, "pages are sent at least once");
        assert!(
            config.outstanding_bytes_max > 0,
            "at least a byte may be outstanding"
        );
        let mut epoch_base = Epoch::base(config.incarnation);
        if planted!(ReuseIncarnation) {
            epoch_base = Incarnation::new(1).and_then(Epoch::base);
        }
        let epoch_base = epoch_base.expect("incarnations fit in 32 bits");
        let state = State {
            config,
            epoch_base,
            life: Life::Serving,
            now: Now::default(),
            engines: BTreeMap::new(),
            pools: BTreeMap::new(),
            leases: BTreeMap::new(),
            links: BTreeMap::new(),
            grants: BTreeMap::new(),
            receives: BTreeMap::new(),
            sends: BTreeMap::new(),
            scrubs: Vec::new(),
            timers: Timers::default(),
            next_lease: 1,
            next_grant: 1,
            next_transfer: 1,
            outputs: VecDeque::new(),
        };
        Self {
            state,
            proofs: PhantomData,
        }
    }

    /// Takes in what happened. Time never goes back: an earlier `now` counts as the latest one.
    pub fn handle(&mut self, now: Now, input: Input<P>) {
        let state = &mut self.state;
        state.now = state.now.max(now);
        state.expire();
        match input {
            Input::EngineUp { engine, tenants } => state.engine_up(engine, tenants),
            Input::EngineGone { engine } => state.engine_gone(engine),
            Input::RegisterPool {
                engine,
                seq,
                pool,
                spec,
                memory_bytes,
            } => {
                state.register_pool(engine, seq, pool, spec, memory_bytes);
            }
            Input::Engine { engine, message } => state.engine_message(engine, message),
            Input::LinkUp {
                link,
                node,
                incarnation,
                planes,
            } => {
                state.link_up(
                    link,
                    Link {
                        node,
                        incarnation,
                        planes,
                    },
                );
            }
            Input::LinkDown { link } => state.link_down(link),
            Input::ConnectFailed { node } => state.connect_failed(node),
            Input::Peer { link, message } => state.peer_message(link, message),
            Input::Armed { grant } => state.armed(grant),
            Input::Landed { grant } => state.landed(grant),
            Input::Written {
                transfer,
                grant,
                bytes,
            } => state.written(transfer, grant, bytes),
            Input::WriterFailed { transfer, grant } => state.writer_failed(transfer, grant),
            // S1: the proof is consumed here, and only here.
            Input::WritesStopped(proof) => state.writes_stopped(proof.grant(), proof.by()),
            Input::ReadsStopped(proof) => state.reads_stopped(proof.transfer(), proof.grant()),
            Input::Scrubbed { pool, slots } => state.scrubbed(pool, &slots),
            Input::Tick => {}
            Input::Shutdown => state.shutdown(),
        }
        state.finish_shutdown();
    }

    /// Gives what to do next; `None` until the next input.
    pub fn poll(&mut self) -> Option<Output> {
        self.state.outputs.pop_front()
    }

    /// When to call with [`Input::Tick`], if nothing else happens first.
    #[must_use]
    pub fn deadline(&self) -> Option<Now> {
        self.state.timers.next()
    }

    /// How full the pools are.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for pool in self.state.pools.values() {
            let slots = &pool.slots;
            usage.slots += slots.len();
            usage.free += slots.free_count();
            usage.leased += slots.leased_count();
            usage.granted += slots.granted_count();
            usage.pinned += slots.pinned_count();
            // What is neither free nor leased is held by writers and readers alone.
            usage.quarantined += slots.len() - slots.free_count() - slots.leased_count();
        }
        usage
    }

    /// Recounts everything from scratch.
    ///
    /// # Panics
    ///
    /// Where a count or an invariant is off.
    pub fn invariants(&self) {
        self.state.invariants();
    }
}

impl State {
    fn output(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    fn observe(&mut self, observation: Observation) {
        self.output(Output::Observe(observation));
    }

    fn freed(&mut self, slots: u32) {
        if slots > 0 {
            self.observe(Observation::SlotsFreed { slots });
        }
    }

    fn plane(&mut self, plane: PlaneKind, command: PlaneCommand) {
        self.output(Output::Plane { plane, command });
    }

    /// Sends to an engine that is still there.
    fn tell_engine(&mut self, engine: EngineId, message: ToEngine) {
        if self.engines.contains_key(&engine) {
            self.output(Output::Engine { engine, message });
        }
    }

    /// Sends to a peer whose link is still up.
    fn tell_peer(&mut self, link: LinkId, message: PeerMessage) {
        if self.links.contains_key(&link) {
            self.output(Output::Peer { link, message });
        }
    }

    /// Does what is due.
    fn expire(&mut self) {
        while let Some((timer, waited_ms)) = self.timers.pop(self.now) {
            match timer {
                Timer::Offer(lease) => self.offer_expired(lease, waited_ms),
                Timer::Receive(key) => self.receive_expired(key, waited_ms),
                Timer::Send(transfer) => self.send_expired(transfer, waited_ms),
            }
        }
    }

    fn link_up(&mut self, link: LinkId, up: Link) {
        let node = up.node;
        let before = self.links.insert(link, up);
        assert!(before.is_none(), "a link comes up once");
        self.connected(link, node);
    }

    fn link_down(&mut self, link: LinkId) {
        if self.links.remove(&link).is_none() {
            return;
        }
        self.receives_lost(link);
        self.sends_lost(link);
    }

    fn peer_message(&mut self, link: LinkId, message: PeerMessage) {
        if !self.links.contains_key(&link) {
            // It was on its way when the link went down, and with it all that it could be about.
            return self.observe(Observation::StaleMessage);
        }
        let result = match message {
            PeerMessage::Hello { .. } => Err(Misbehaviour::OutOfPlace),
            PeerMessage::Open {
                transfer,
                offer,
                layout,
                tokens,
                tenant,
                plane,
            } => {
                let asked = destination::Asked {
                    layout,
                    tokens,
                    tenant,
                    plane,
                };
                self.open(link, transfer, &offer, &asked)
            }
            PeerMessage::Checksums { grant, checksums } => self.checksums(link, grant, &checksums),
            PeerMessage::Commit {
                grant,
                digest,
                payload,
            } => self.commit(link, grant, digest, payload),
            PeerMessage::Cancel {
                transfer,
                drain_follows,
            } => {
                self.cancelled((link, transfer), drain_follows);
                Ok(())
            }
            PeerMessage::Refused { transfer, reason } => {
                self.verdict(link, transfer, Outcome::Rejected(reason))
            }
            PeerMessage::Granted {
                transfer,
                grant,
                slots,
                plane_key,
                manifest_key,
                outstanding_bytes_max,
                pages,
            } => {
                let granted = source::Granted {
                    grant,
                    slots: slots.into(),
                    plane_key,
                    manifest_key,
                    outstanding_bytes_max,
                };
                self.granted(link, transfer, granted, pages)
            }
            PeerMessage::DrainRequest { grant } => {
                self.drain_requested(link, grant);
                Ok(())
            }
            PeerMessage::Verdict { transfer, outcome } => self.verdict(link, transfer, outcome),
        };
        if let Err(reason) = result {
            self.output(Output::CloseLink { link, reason });
        }
    }

    fn shutdown(&mut self) {
        if self.life != Life::Serving {
            return;
        }
        self.life = Life::ShuttingDown;
        let waiting: Vec<LeaseId> = self.leases.keys().copied().collect();
        for lease in waiting {
            self.withdraw_offer(lease, Outcome::Aborted(Abort::Shutdown));
        }
        let receives: Vec<ReceiveKey> = self.receives.keys().copied().collect();
        for key in receives {
            self.stop_receive(key, Outcome::Aborted(Abort::Shutdown));
        }
        let sends: Vec<TransferId> = self.sends.keys().copied().collect();
        for transfer in sends {
            self.stop_send(transfer, Outcome::Aborted(Abort::Shutdown));
        }
    }

    fn finish_shutdown(&mut self) {
        let idle = self.receives.is_empty() && self.grants.is_empty() && self.sends.is_empty();
        if self.life == Life::ShuttingDown && (idle || planted!(ShutdownBeforeDrained)) {
            self.life = Life::Over;
            self.output(Output::ShutdownComplete);
        }
    }

    fn invariants(&self) {
        let mut pins: BTreeMap<PoolId, BTreeMap<SlotRef, u32>> = BTreeMap::new();
        let sends = self.sends.values().map(|send| (send.pool, &send.slots));
        let scrubs = self.scrubs.iter().map(|(pool, slots)| (*pool, slots));
        for (pool, slots) in sends.chain(scrubs) {
            let pins = pins.entry(pool).or_default();
            slots
                .iter()
                .for_each(|slot| *pins.entry(*slot).or_default() += 1);
        }
        let none = BTreeMap::new();
        for (id, pool) in &self.pools {
            pool.slots.invariants(
                |lease, slot| {
                    // S5: the one lease that the slot names has the slot.
                    let lease = &self.leases[&lease];
                    lease.pool == *id && lease.slots.contains(&slot)
                },
                |grant, slot| {
                    let grant = &self.grants[&grant];
                    grant.pool == *id && grant.slots.contains(&slot)
                },
                pins.get(id).unwrap_or(&none),
            );
        }
        for (id, lease) in &self.leases {
            let table = &self.pools[&lease.pool].slots;
            assert!(
                lease
                    .slots
                    .iter()
                    .all(|slot| table.lease_of(*slot) == Some(*id))
            );
        }
        self.engines_invariants();
        self.destination_invariants();
        self.source_invariants();
        for timer in self.timers.timers() {
            let live = match timer {
                Timer::Offer(lease) => self.leases.contains_key(&lease),
                Timer::Receive(key) => self.receives.contains_key(&key),
                Timer::Send(transfer) => self.sends.contains_key(&transfer),
            };
            assert!(live, "{timer:?} is about something that is there");
        }
    }
}

impl<P: Proofs> core::fmt::Debug for Host<P> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.state.fmt(f)
    }
}

impl<P: Proofs> Clone for Host<P> {
    fn clone(&self) -> Self {
        Self {
            state: self.state.clone(),
            proofs: PhantomData,
        }
    }
}

impl<P: Proofs> PartialEq for Host<P> {
    fn eq(&self, other: &Self) -> bool {
        self.state == other.state
    }
}

impl<P: Proofs> Eq for Host<P> {}

impl<P: Proofs> Hash for Host<P> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.state.hash(hasher);
    }
}
