//! Engines on this host: their sessions, pools and leases.
//!
//! A lease, from the engine's request to its end:
//!
//! ```text
//!  lease ─▶ (Scrubbing) ─┬─▶ Held                                     purpose: hold
//!                        └─▶ Offered ─▶ Receiving ─┬─▶ Delivered      purpose: receive
//!                                └────────────┴────┴─▶ Over(outcome)
//!  from any of them: end_lease, or the engine is gone; then the lease holds nothing
//! ```

use alloc::collections::BTreeSet;
use alloc::sync::Arc;
use alloc::vec::Vec;

use bytes::Bytes;

use super::api::{Misbehaviour, Observation, Output, Tenants};
use super::slots::SlotTable;
use super::timers::{Timer, millis};
use super::{Life, ReceiveKey, State};
use crate::ids::{EngineId, LeaseId, PoolId, RequestId, RequestSeq, SlotIndex, SlotRef, TenantId};
use crate::limits;
use crate::outcome::{Abort, Failure, Outcome, Rejection};
use crate::pool::{PoolSpec, TokenRange};
use crate::wire::{AbortPolicy, Offer, Purpose, ToDaemon, ToEngine, VERSION};

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Engine {
    pub(super) tenants: Tenants,
    pub(super) pools: BTreeSet<PoolId>,
    pub(super) leases: BTreeSet<LeaseId>,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Pool {
    /// `None` once its session has ended: the pool stays until nobody holds a slot.
    pub(super) engine: Option<EngineId>,
    pub(super) spec: PoolSpec,
    pub(super) slots: SlotTable,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(super) struct Lease {
    pub(super) engine: EngineId,
    pub(super) pool: PoolId,
    pub(super) tenant: TenantId,
    pub(super) request: RequestId,
    pub(super) tokens: TokenRange,
    pub(super) slots: Arc<[SlotRef]>,
    pub(super) state: LeaseState,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum LeaseState {
    /// Not given out yet: another tenant's bytes are being overwritten.
    Scrubbing { seq: RequestSeq, purpose: Purpose },
    /// The engine fills it.
    Held,
    /// Its offer may be used once.
    Offered,
    /// A transfer has its grant.
    Receiving(ReceiveKey),
    /// Every page was verified; the engine owns them.
    Delivered,
    /// Its delivery ended otherwise. Nothing of it may be read.
    Over,
}

/// What an engine asks for.
struct Wanted {
    seq: RequestSeq,
    pool: PoolId,
    tenant: TenantId,
    request: RequestId,
    tokens: TokenRange,
    purpose: Purpose,
    named: Vec<SlotIndex>,
}

impl State {
    pub(super) fn engine_up(&mut self, engine: EngineId, tenants: Tenants) {
        let session = Engine {
            tenants,
            pools: BTreeSet::new(),
            leases: BTreeSet::new(),
        };
        let before = self.engines.insert(engine, session);
        assert!(before.is_none(), "an engine's session begins once");
        let (node, incarnation) = (self.config.node, self.config.incarnation);
        let welcome = ToEngine::Welcome {
            version: VERSION,
            node,
            incarnation,
            engine,
        };
        self.tell_engine(engine, welcome);
    }

    /// Ends all that a session held. Its pools stay mapped until no writer and no reader is left.
    pub(super) fn engine_gone(&mut self, engine: EngineId) {
        let Some(session) = self.engines.remove(&engine) else {
            return;
        };
        let sends: Vec<_> = self
            .sends
            .iter()
            .filter(|(_, send)| send.engine == engine)
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in sends {
            self.stop_send(transfer, Outcome::Failed(Failure::EngineGone));
        }
        for lease in session.leases {
            self.end_lease(lease, AbortPolicy::DrainNow);
        }
        for pool in session.pools {
            self.pools
                .get_mut(&pool)
                .expect("a session's pools are there")
                .engine = None;
            self.unmap_if_idle(pool);
        }
    }

    pub(super) fn register_pool(
        &mut self,
        engine: EngineId,
        seq: RequestSeq,
        pool: PoolId,
        spec: PoolSpec,
        memory_bytes: u64,
    ) {
        assert!(
            !self.pools.contains_key(&pool),
            "a pool's name is used once"
        );
        let Some(session) = self.engines.get_mut(&engine) else {
            return self.output(Output::Unmap { pool });
        };
        let checked = if self.life == Life::Serving {
            check_pool(
                session,
                &spec,
                memory_bytes,
                self.config.outstanding_bytes_max,
            )
        } else {
            Err(Rejection::ShuttingDown)
        };
        if let Err(reason) = checked {
            self.reject(engine, seq, reason);
            return self.output(Output::Unmap { pool });
        }
        session.pools.insert(pool);
        let slots = SlotTable::new(spec.slots, self.epoch_base);
        self.pools.insert(
            pool,
            Pool {
                engine: Some(engine),
                spec,
                slots,
            },
        );
        self.tell_engine(engine, ToEngine::PoolRegistered { seq, pool });
    }

    pub(super) fn engine_message(&mut self, engine: EngineId, message: ToDaemon) {
        if !self.engines.contains_key(&engine) {
            return self.observe(Observation::StaleMessage);
        }
        let result = match message {
            // The session's shell deals with these two.
            ToDaemon::Hello { .. } | ToDaemon::RegisterPool { .. } => Err(Misbehaviour::OutOfPlace),
            ToDaemon::Lease {
                seq,
                pool,
                tenant,
                request,
                tokens,
                purpose,
                named,
            } => {
                self.lease(
                    engine,
                    Wanted {
                        seq,
                        pool,
                        tenant,
                        request,
                        tokens,
                        purpose,
                        named,
                    },
                );
                Ok(())
            }
            ToDaemon::EndLease { lease, abort } => self.engine_ends_lease(engine, lease, abort),
            ToDaemon::Send { seq, lease, offer } => {
                self.send(engine, seq, lease, offer);
                Ok(())
            }
            ToDaemon::Seal {
                transfer,
                checksums,
            } => self.seal(engine, transfer, &checksums),
            ToDaemon::Finish { transfer, payload } => self.finish(engine, transfer, payload),
            ToDaemon::AbortSend { transfer } => self.abort_send(engine, transfer),
            ToDaemon::Verified {
                lease,
                attempt,
                corrupt,
            } => self.verified(engine, lease, attempt, corrupt),
        };
        if let Err(reason) = result {
            self.output(Output::CloseEngine { engine, reason });
        }
    }

    pub(super) fn reject(&mut self, engine: EngineId, seq: RequestSeq, reason: Rejection) {
        self.observe(Observation::Rejected(reason));
        self.tell_engine(engine, ToEngine::Rejected { seq, reason });
    }

    fn lease(&mut self, engine: EngineId, wanted: Wanted) {
        // S9: what cannot fit is turned away before any slot is leased.
        let indices = match self.admit(engine, &wanted) {
            Ok(indices) => indices,
            Err(reason) => return self.reject(engine, wanted.seq, reason),
        };
        let Wanted {
            seq,
            pool: pool_id,
            tenant,
            request,
            tokens,
            purpose,
            named: _,
        } = wanted;
        let lease = LeaseId(self.next_lease);
        self.next_lease += 1;
        let scrub = self.config.scrub;
        let pool = self
            .pools
            .get_mut(&pool_id)
            .expect("admission found the pool");
        let leased = pool.slots.lease(&indices, lease, &tenant, scrub);
        let dirty: Arc<[SlotRef]> = leased.dirty.into();
        pool.slots.pin(&dirty);
        let slots: Arc<[SlotRef]> = leased.slots.into();
        let slot_count = count_of(&slots);
        let state = LeaseState::Scrubbing { seq, purpose };
        let entry = Lease {
            engine,
            pool: pool_id,
            tenant,
            request,
            tokens,
            slots,
            state,
        };
        self.leases.insert(lease, entry);
        self.engines
            .get_mut(&engine)
            .expect("admission found it")
            .leases
            .insert(lease);
        self.observe(Observation::LeaseStarted { slots: slot_count });
        if dirty.is_empty() {
            self.give_out(lease);
        } else {
            self.scrubs.push((pool_id, Arc::clone(&dirty)));
            self.output(Output::Scrub {
                pool: pool_id,
                slots: dirty,
            });
        }
    }

    /// The ladder of a lease: who, whose, how much, and whether it is there now.
    fn admit(&self, engine: EngineId, wanted: &Wanted) -> Result<Vec<SlotIndex>, Rejection> {
        if self.life != Life::Serving {
            return Err(Rejection::ShuttingDown);
        }
        let session = self
            .engines
            .get(&engine)
            .expect("the message came from a live session");
        let missing = Rejection::NoSuchPool {
            pool: u64::from(wanted.pool.0),
            engine: engine.0,
        };
        if !session.pools.contains(&wanted.pool) {
            return Err(missing);
        }
        let allowed = match &session.tenants {
            Tenants::Any => true,
            Tenants::Only(tenants) => tenants.contains(&wanted.tenant),
        };
        if !allowed {
            return Err(Rejection::TenantNotAllowed);
        }
        exceeds(
            session.leases.len() as u64 + 1,
            limits::LEASES_PER_ENGINE_MAX as u64,
        )?;
        let pool = self.pools.get(&wanted.pool).ok_or(missing)?;
        let count = slots_needed(&pool.spec, wanted.tokens)?;
        if wanted.named.is_empty() {
            let slots_free = pool.slots.free_count();
            let busy = Rejection::Busy {
                slots_needed: u64::from(count),
                slots_free,
            };
            return pool.slots.choose(count).ok_or(busy);
        }
        check_named(pool, &wanted.named, count)?;
        Ok(wanted.named.clone())
    }

    /// Replies to a lease's request, once its slots hold nobody else's bytes.
    fn give_out(&mut self, id: LeaseId) {
        let lease = self
            .leases
            .get_mut(&id)
            .expect("the lease was just made or scrubbed");
        let LeaseState::Scrubbing { seq, purpose } = lease.state else {
            unreachable!("a lease is given out once");
        };
        let engine = lease.engine;
        let slots = lease.slots.to_vec();
        let offer = match purpose {
            Purpose::Hold => {
                lease.state = LeaseState::Held;
                None
            }
            Purpose::Receive if self.life == Life::Serving => Some(self.offer(id)),
            Purpose::Receive => {
                // Shutdown came while the slots were scrubbed.
                self.end_lease(id, AbortPolicy::DrainNow);
                return self.reject(engine, seq, Rejection::ShuttingDown);
            }
        };
        self.tell_engine(
            engine,
            ToEngine::Leased {
                seq,
                lease: id,
                slots,
                offer,
            },
        );
    }

    fn offer(&mut self, id: LeaseId) -> Bytes {
        let lease = self.leases.get_mut(&id).expect("the caller has the lease");
        lease.state = LeaseState::Offered;
        let offer = Offer {
            node: self.config.node,
            incarnation: self.config.incarnation,
            lease: id,
            tenant: lease.tenant.clone(),
            request: lease.request.clone(),
            tokens: lease.tokens,
            expires: self.now.plus(self.config.offer_ttl),
        };
        self.timers
            .set(self.now, Timer::Offer(id), self.config.offer_ttl);
        offer.sign(&self.config.secret)
    }

    pub(super) fn scrubbed(&mut self, pool: PoolId, slots: &Arc<[SlotRef]>) {
        let entry = self
            .scrubs
            .iter()
            .position(|(of, those)| *of == pool && those == slots);
        let entry = entry.expect("a scrub is answered once");
        self.scrubs.swap_remove(entry);
        let table = &mut self
            .pools
            .get_mut(&pool)
            .expect("a pin keeps the pool")
            .slots;
        // The lease may have ended meanwhile; the pin kept its slots from the next one.
        let lease = slots.first().and_then(|slot| table.lease_of(*slot));
        let freed = table.unpin(slots);
        self.freed(freed);
        if let Some(lease) = lease {
            self.give_out(lease);
        }
        self.unmap_if_idle(pool);
    }

    fn engine_ends_lease(
        &mut self,
        engine: EngineId,
        lease: LeaseId,
        abort: Option<AbortPolicy>,
    ) -> Result<(), Misbehaviour> {
        match self.leases.get(&lease) {
            Some(found) if found.engine == engine => {}
            Some(_) => return Err(Misbehaviour::NotYours(lease.0)),
            // Ended already, as an engine that retries may do.
            None if lease.0 < self.next_lease => {
                self.observe(Observation::StaleMessage);
                return Ok(());
            }
            None => return Err(Misbehaviour::NotYours(lease.0)),
        }
        self.end_lease(lease, abort.unwrap_or(self.config.abort));
        Ok(())
    }

    /// Takes the lease's hold away. Grants and pins hold on until they are proven over.
    pub(super) fn end_lease(&mut self, id: LeaseId, abort: AbortPolicy) {
        let reads: Vec<_> = self
            .sends
            .iter()
            .filter(|(_, send)| send.lease == id)
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in reads {
            self.stop_send(transfer, Outcome::Aborted(Abort::Source));
        }
        let lease = self.leases.remove(&id).expect("the caller has the lease");
        if let Some(session) = self.engines.get_mut(&lease.engine) {
            session.leases.remove(&id);
        }
        self.timers.clear(Timer::Offer(id));
        let pool = self
            .pools
            .get_mut(&lease.pool)
            .expect("a lease keeps its pool");
        let freed = pool.slots.end_lease(&lease.slots, id);
        self.observe(Observation::LeaseEnded {
            slots: count_of(&lease.slots),
        });
        self.freed(freed);
        if let LeaseState::Receiving(key) = lease.state {
            self.abandon_receive(key, abort);
        }
        self.unmap_if_idle(lease.pool);
    }

    /// Ends a delivery that no transfer is busy with.
    pub(super) fn withdraw_offer(&mut self, id: LeaseId, outcome: Outcome) {
        let lease = self.leases.get_mut(&id).expect("the caller has the lease");
        if lease.state == LeaseState::Offered {
            self.end_delivery(id, LeaseState::Over, outcome);
        }
    }

    /// Gives a lease's delivery its one outcome.
    // S3: `Delivered` is said where the state is `Delivered`, and nowhere else.
    pub(super) fn end_delivery(&mut self, id: LeaseId, state: LeaseState, outcome: Outcome) {
        assert_eq!(
            state == LeaseState::Delivered,
            outcome == Outcome::Delivered,
            "the outcome says what the state is"
        );
        let lease = self.leases.get_mut(&id).expect("the caller has the lease");
        assert!(
            matches!(lease.state, LeaseState::Offered | LeaseState::Receiving(_)),
            "a delivery ends once"
        );
        lease.state = state;
        let engine = lease.engine;
        self.timers.clear(Timer::Offer(id));
        self.observe(Observation::ReceiveEnded(outcome));
        self.tell_engine(engine, ToEngine::LeaseOutcome { lease: id, outcome });
    }

    pub(super) fn offer_expired(&mut self, lease: LeaseId, waited_ms: u64) {
        let limit_ms = millis(self.config.offer_ttl);
        let failure = Failure::OfferUnused {
            waited_ms,
            limit_ms,
        };
        self.withdraw_offer(lease, Outcome::Failed(failure));
    }

    /// Lets a pool's memory go once its engine is gone and nobody holds a slot.
    pub(super) fn unmap_if_idle(&mut self, id: PoolId) {
        let pool = self.pools.get(&id).expect("the caller has the pool");
        // S1: memory is unmapped only when no writer is left.
        let idle = pool.slots.is_idle() || planted!(UnmapUnderGrant);
        if pool.engine.is_none() && idle {
            self.pools.remove(&id);
            self.output(Output::Unmap { pool: id });
        }
    }

    pub(super) fn engines_invariants(&self) {
        for (id, engine) in &self.engines {
            let own = |lease: &LeaseId| self.leases[lease].engine == *id;
            assert!(
                engine.leases.iter().all(own),
                "a session's leases are its own"
            );
            let own = |pool: &PoolId| self.pools[pool].engine == Some(*id);
            assert!(
                engine.pools.iter().all(own),
                "a session's pools are its own"
            );
        }
        for (id, lease) in &self.leases {
            assert!(
                self.engines[&lease.engine].leases.contains(id),
                "a lease has its session"
            );
            if let LeaseState::Receiving(key) = lease.state {
                assert_eq!(
                    self.receives[&key].lease,
                    Some(*id),
                    "the transfer knows its lease"
                );
            }
        }
        for pool in self.pools.values().filter(|pool| pool.engine.is_none()) {
            // S4: what is left without an engine is there for a holder, not forgotten.
            assert!(
                !pool.slots.is_idle(),
                "an idle pool without an engine is unmapped"
            );
        }
    }
}

fn check_pool(
    session: &Engine,
    spec: &PoolSpec,
    memory_bytes: u64,
    outstanding_bytes_max: u64,
) -> Result<(), Rejection> {
    exceeds(
        session.pools.len() as u64 + 1,
        limits::POOLS_PER_ENGINE_MAX as u64,
    )?;
    spec.check()?;
    // S8: a page that could never be outstanding could never be sent.
    exceeds(u64::from(spec.layout.page_bytes), outstanding_bytes_max)?;
    let bytes_needed = spec.bytes();
    if memory_bytes < bytes_needed {
        return Err(Rejection::MemoryTooSmall {
            bytes: memory_bytes,
            bytes_needed,
        });
    }
    Ok(())
}

/// The slots that a token range needs of a pool.
fn slots_needed(spec: &PoolSpec, tokens: TokenRange) -> Result<u32, Rejection> {
    let per_slot = u64::from(spec.layout.tokens_per_slot);
    if tokens.count == 0 {
        return Err(Rejection::Malformed { value: 0, bound: 1 });
    }
    if !tokens.start.is_multiple_of(per_slot) {
        return Err(Rejection::Malformed {
            value: tokens.start,
            bound: per_slot,
        });
    }
    if tokens.end() > spec.context_tokens && !planted!(BusyForEver) {
        let context = spec.context_tokens;
        return Err(Rejection::ExceedsContext {
            tokens: tokens.end(),
            context,
        });
    }
    let slots_needed = spec.slots_for(tokens.count);
    if slots_needed > u64::from(spec.slots) && !planted!(BusyForEver) {
        return Err(Rejection::ExceedsPool {
            slots_needed,
            slots: u64::from(spec.slots),
        });
    }
    exceeds(slots_needed, u64::from(limits::LEASE_SLOTS_MAX))?;
    exceeds(
        slots_needed * u64::from(spec.layout.regions),
        limits::LEASE_PAGES_MAX,
    )?;
    Ok(u32::try_from(slots_needed).expect("the limit above fits"))
}

fn check_named(pool: &Pool, named: &[SlotIndex], count: u32) -> Result<(), Rejection> {
    if named.len() as u64 != u64::from(count) {
        return Err(Rejection::Malformed {
            value: named.len() as u64,
            bound: u64::from(count),
        });
    }
    let mut seen = BTreeSet::new();
    for &index in named {
        // S5: naming a slot that is held, or the same one twice, is refused.
        let taken = !pool.slots.is_free(index) && !planted!(NameATakenSlot);
        if taken || !seen.insert(index) {
            let slots = u64::from(pool.spec.slots);
            return Err(Rejection::SlotNotFree {
                slot: u64::from(index.0),
                slots,
            });
        }
    }
    Ok(())
}

pub(super) fn exceeds(value: u64, limit: u64) -> Result<(), Rejection> {
    if value > limit {
        return Err(Rejection::ExceedsLimit { value, limit });
    }
    Ok(())
}

pub(super) fn count_of(slots: &[SlotRef]) -> u32 {
    u32::try_from(slots.len()).expect("leases are bounded")
}
