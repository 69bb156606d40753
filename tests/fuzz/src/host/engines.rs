//! What engines do: as the SDK would, or not.

use bytes::Bytes;
use fabric_proto::host::Tenants;
use fabric_proto::ids::{
    EngineId, LeaseId, LinkId, PoolId, RequestId, RequestSeq, Secret, SlotIndex, Tag, TenantId,
    TransferId,
};
use fabric_proto::pool::{Arrangement, Layout, PageRef, PageRun, PoolSpec, TokenRange};
use fabric_proto::time::Now;
use fabric_proto::wire::{AbortPolicy, Checksums, Offer, Purpose, ToDaemon};

use super::model::{Lease, honest_checksums};
use super::step::Step;
use super::{Driver, OFFER_TTL, PAGE_BYTES, incarnation, node};

const ENGINES_MAX: usize = 3;
const POOLS_MAX: usize = 5;

impl Driver<'_> {
    pub(super) fn engine_up(&mut self) {
        if self.world.model.engines.len() >= ENGINES_MAX {
            return;
        }
        let engine = EngineId(self.fresh().into());
        let tenants = if self.script.seldom() {
            Tenants::Only(vec![tenant(0)])
        } else {
            Tenants::Any
        };
        self.world.step(&Step::EngineUp(engine, tenants));
    }

    pub(super) fn engine_gone(&mut self) {
        if let Some(engine) = self.script.pick(self.world.model.engines.clone()) {
            self.world.step(&Step::EngineGone(engine));
        }
    }

    pub(super) fn register_pool(&mut self) {
        let engine = self.script.pick(self.world.model.engines.clone());
        if self.world.model.pools.len() >= POOLS_MAX {
            return;
        }
        let shape = self.script.byte();
        let slots = u32::from(shape & 7) + 1;
        let tokens_per_slot = if shape & 8 == 0 { 1 } else { 4 };
        let odd = self.script.seldom();
        let spec = PoolSpec {
            layout: Layout {
                model: Tag([1; 32]),
                regions: u16::from(shape >> 4 & 1) + 1,
                page_bytes: PAGE_BYTES,
                tokens_per_slot,
            },
            slots,
            arrangement: Arrangement::RegionMajor,
            context_tokens: u64::from(slots) * u64::from(tokens_per_slot) + u64::from(odd),
        };
        let short = u64::from(self.script.seldom());
        let step = Step::RegisterPool {
            engine: engine.unwrap_or(EngineId(0)),
            seq: self.seq(),
            pool: PoolId(self.fresh()),
            spec,
            memory_bytes: spec.bytes() - short,
        };
        self.world.step(&step);
    }

    pub(super) fn lease(&mut self) {
        let Some((pool, engine, spec)) = self.pool() else {
            return;
        };
        let engine = self.engine(engine);
        let per_slot = u64::from(spec.layout.tokens_per_slot);
        let odd = u64::from(self.script.seldom());
        let tokens = TokenRange {
            start: u64::from(self.script.below(3)) * per_slot + odd,
            count: u64::from(self.script.below(20)) + 1 - odd,
        };
        let choices = self.script.byte();
        let purpose = if choices & 1 == 0 {
            Purpose::Receive
        } else {
            Purpose::Hold
        };
        let mut named = Vec::new();
        if choices & 6 == 6 {
            let first = u32::from(choices >> 3 & 7);
            let count = u32::try_from(spec.slots_for(tokens.count)).expect("it is small");
            let over = u32::from(self.script.seldom());
            named.extend((first..first + count + over).map(|slot| SlotIndex(slot % spec.slots)));
        }
        let message = ToDaemon::Lease {
            seq: self.seq(),
            pool,
            tenant: tenant(choices >> 6),
            request: RequestId::new("request").expect("a short name"),
            tokens,
            purpose,
            named,
        };
        self.say(engine, message);
    }

    pub(super) fn end_lease(&mut self) {
        let (lease, engine) = self.any_lease();
        let abort = match self.script.below(3) {
            0 => None,
            1 => Some(AbortPolicy::FinishTransfer),
            _ => Some(AbortPolicy::DrainNow),
        };
        self.say(engine, ToDaemon::EndLease { lease, abort });
    }

    pub(super) fn send(&mut self) {
        let kind = self.script.below(8);
        let own = self.script.pick(self.world.model.offers.clone());
        let offer = match (kind, own) {
            (0..=4, Some((offer, lease))) => self.send_to_self(offer, lease),
            (7, _) => Some((
                self.any_lease(),
                Bytes::copy_from_slice(self.script.slice()),
            )),
            _ => self.remote_offer(),
        };
        if let Some(((lease, engine), offer)) = offer {
            let engine = self.engine(engine);
            let seq = self.seq();
            self.say(engine, ToDaemon::Send { seq, lease, offer });
        }
    }

    /// A lease that an offer fits, or any.
    fn send_to_self(&mut self, offer: Bytes, offered: LeaseId) -> Option<(Whose, Bytes)> {
        let leases = &self.world.model.leases;
        let fits = |lease: &Lease| {
            let wanted = leases.get(&offered);
            lease.purpose == Purpose::Hold
                && wanted.is_none_or(|wanted| {
                    wanted.tenant == lease.tenant
                        && wanted.tokens.start >= lease.tokens.start
                        && wanted.tokens.end() <= lease.tokens.end()
                })
        };
        let fitting = leases.iter().filter(|(_, lease)| fits(lease));
        let fitting: Vec<Whose> = fitting.map(|(id, lease)| (*id, lease.engine)).collect();
        let whose = if self.script.seldom() {
            self.any_lease()
        } else {
            self.script.pick(fitting)?
        };
        Some((whose, offer))
    }

    /// An offer as another daemon could have made it for a lease's pages, or for some of them.
    fn remote_offer(&mut self) -> Option<(Whose, Bytes)> {
        let (id, engine) = self.any_lease();
        let lease = self.world.model.leases.get(&id)?;
        let (own, pool) = (lease.tenant.clone(), lease.pool);
        let per_slot = self.world.model.pools[&pool].spec.layout.tokens_per_slot;
        let skip = u64::from(self.script.below(3)) * u64::from(per_slot);
        let tokens = lease.tokens;
        let choices = self.script.byte();
        let offer = Offer {
            node: node(choices & 1 | u8::from(choices < 0xc0)),
            incarnation: incarnation(u64::from(choices >> 1 & 1) + 1),
            lease: LeaseId(1),
            tenant: if choices >= 0xf0 { tenant(2) } else { own },
            request: RequestId::new("request").expect("a short name"),
            tokens: TokenRange {
                start: tokens.start + skip,
                count: tokens.count.saturating_sub(skip),
            },
            expires: Now(OFFER_TTL),
        };
        Some(((id, engine), offer.sign(&Secret([9; 32]))))
    }

    pub(super) fn seal(&mut self) {
        let Some((transfer, engine)) = self.any_send() else {
            return;
        };
        let engine = self.engine(engine);
        let checksums = if self.script.seldom() {
            self.any_checksums()
        } else if let Some(page) = self.unsealed(transfer) {
            honest_checksums(page)
        } else {
            return;
        };
        let message = ToDaemon::Seal {
            transfer,
            checksums,
        };
        self.say(engine, message);
    }

    pub(super) fn seal_all(&mut self) {
        let Some((transfer, engine)) = self.any_send() else {
            return;
        };
        while let Some(page) = self.unsealed(transfer) {
            let checksums = honest_checksums(page);
            let message = ToDaemon::Seal {
                transfer,
                checksums,
            };
            let before = self.sealed_count(transfer);
            self.say(engine, message);
            if self.sealed_count(transfer) == before {
                return; // It is ending.
            }
        }
        let payload = Bytes::from_static(b"payload");
        self.say(engine, ToDaemon::Finish { transfer, payload });
    }

    pub(super) fn finish(&mut self) {
        if let Some((transfer, engine)) = self.any_send() {
            let engine = self.engine(engine);
            let payload = Bytes::copy_from_slice(self.script.slice());
            self.say(engine, ToDaemon::Finish { transfer, payload });
        }
    }

    pub(super) fn abort_send(&mut self) {
        if let Some((transfer, engine)) = self.any_send() {
            let engine = self.engine(engine);
            self.say(engine, ToDaemon::AbortSend { transfer });
        }
    }

    pub(super) fn verified(&mut self) {
        let leases = self.world.model.leases.iter();
        let asked = leases.filter_map(|(id, lease)| {
            let (attempt, pages) = lease.verify.clone()?;
            Some((*id, lease.engine, attempt, pages))
        });
        let asked: Vec<_> = asked.collect();
        let odd = self.script.seldom();
        let picked = self.script.pick(asked);
        let (lease, engine, attempt, pages) = picked.unwrap_or_else(|| {
            let (lease, engine) = self.any_lease();
            (lease, engine, 1, Vec::new())
        });
        let engine = self.engine(engine);
        let mask = self.script.byte();
        let all = pages.iter().flat_map(|run| {
            let region = run.region;
            (run.first..run.first + run.count).map(move |position| PageRef { region, position })
        });
        let bits = (0..8).cycle().map(|bit| mask >> bit & 1 == 1);
        let mut corrupt: Vec<PageRef> = all
            .zip(bits)
            .filter(|(_, bad)| *bad)
            .map(|(page, _)| page)
            .collect();
        if odd {
            let (region, position) = (self.script.below(3).into(), self.script.below(9).into());
            corrupt.push(PageRef { region, position });
        }
        let attempt = attempt + u32::from(odd && mask == 0);
        let message = ToDaemon::Verified {
            lease,
            attempt,
            corrupt,
        };
        self.say(engine, message);
    }

    /// Whatever decodes.
    pub(super) fn raw_engine(&mut self) {
        let Some(engine) = self.script.pick(self.world.model.engines.clone()) else {
            return;
        };
        let Ok(mut message) = ToDaemon::decode(Bytes::copy_from_slice(self.script.slice())) else {
            return;
        };
        // The model tells requests apart by their numbers, as an engine must.
        if let ToDaemon::Lease { seq, .. } | ToDaemon::Send { seq, .. } = &mut message {
            *seq = self.seq();
        }
        self.say(engine, message);
    }

    pub(super) fn any_checksums(&mut self) -> Checksums {
        let count = u32::from(self.script.below(4)) + 1;
        let first = match self.script.byte() {
            0xff => u32::MAX - count,
            first => u32::from(first % 10),
        };
        honest_checksums(PageRun {
            region: self.script.below(3).into(),
            first,
            count,
        })
    }

    pub(super) fn say(&mut self, engine: EngineId, message: ToDaemon) {
        self.world.step(&Step::Engine(engine, message));
    }

    /// The first page that is not sealed, and all that follow it in its region.
    fn unsealed(&self, transfer: TransferId) -> Option<PageRun> {
        let send = self.world.model.sends.get(&transfer)?;
        let positions = u32::try_from(send.slots.len()).expect("a lease is small");
        let regions = 0..send.spec.layout.regions;
        let mut pages = regions.flat_map(|region| (0..positions).map(move |page| (region, page)));
        let (region, first) = pages.find(|page| !send.sealed.contains(page))?;
        let sealed = |position: &u32| send.sealed.contains(&(region, *position));
        let end = (first..positions).find(sealed).unwrap_or(positions);
        Some(PageRun {
            region,
            first,
            count: end - first,
        })
    }

    fn sealed_count(&self, transfer: TransferId) -> Option<usize> {
        let send = self.world.model.sends.get(&transfer)?;
        Some(send.sealed.len())
    }

    fn seq(&mut self) -> RequestSeq {
        RequestSeq(self.fresh().into())
    }

    /// The engine that something belongs to, or another.
    fn engine(&mut self, owner: EngineId) -> EngineId {
        if !self.script.seldom() {
            return owner;
        }
        let engines = self.world.model.engines.clone();
        self.script.pick(engines).unwrap_or(EngineId(0))
    }

    fn pool(&mut self) -> Option<(PoolId, EngineId, PoolSpec)> {
        let pools = self.world.model.pools.iter();
        let pools = pools.map(|(id, pool)| (*id, pool.engine, pool.spec));
        self.script.pick(pools.collect::<Vec<_>>())
    }

    /// A lease that is there, or a number.
    fn any_lease(&mut self) -> Whose {
        let leases = self.world.model.leases.iter();
        let leases: Vec<Whose> = leases.map(|(id, lease)| (*id, lease.engine)).collect();
        if !self.script.seldom()
            && let Some(whose) = self.script.pick(leases)
        {
            return whose;
        }
        let engine = self.script.pick(self.world.model.engines.clone());
        let lease = LeaseId(self.script.below(20).into());
        (lease, engine.unwrap_or(EngineId(0)))
    }

    fn any_send(&mut self) -> Option<(TransferId, EngineId)> {
        let sends = self.world.model.sends.iter();
        let sends: Vec<_> = sends.map(|(id, send)| (*id, send.engine)).collect();
        if !self.script.seldom() {
            return self.script.pick(sends);
        }
        let engine = self.script.pick(self.world.model.engines.clone())?;
        Some((TransferId(self.script.below(9).into()), engine))
    }
}

/// A lease, and its engine.
type Whose = (LeaseId, EngineId);

fn tenant(number: u8) -> TenantId {
    let names = ["acme", "bolt", "corp", "acme"];
    TenantId::new(names[usize::from(number) % names.len()]).expect("a short name")
}

impl Driver<'_> {
    /// Every engine does what it was asked to, and finds every page as it should be.
    pub(super) fn engines_verify(&mut self) {
        let leases = self.world.model.leases.iter();
        let asked = leases.filter_map(|(id, lease)| {
            let (attempt, _) = lease.verify.as_ref()?;
            Some((*id, lease.engine, *attempt))
        });
        for (lease, engine, attempt) in asked.collect::<Vec<_>>() {
            let corrupt = Vec::new();
            let message = ToDaemon::Verified {
                lease,
                attempt,
                corrupt,
            };
            self.say(engine, message);
        }
    }

    /// A tenant, for a peer.
    pub(super) fn any_tenant(&mut self) -> TenantId {
        tenant(self.script.byte())
    }

    /// A link, for a peer: of those that are up, or a number.
    pub(super) fn any_link(&mut self) -> LinkId {
        let links = self.world.model.links.iter().copied();
        let remote: Vec<LinkId> = links.filter(|link| *link != LinkId::LOOPBACK).collect();
        self.script.pick(remote).unwrap_or(LinkId(99))
    }
}
