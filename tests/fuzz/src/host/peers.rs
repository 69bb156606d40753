//! What other daemons do: as a daemon would, or not.

use bytes::Bytes;
use fabric_proto::ids::{
    Epoch, GrantId, LeaseId, LinkId, Secret, SlotIndex, SlotRef, Tag, TransferId,
};
use fabric_proto::outcome::{Abort, Failure, Outcome, Rejection};
use fabric_proto::pool::PageRun;
use fabric_proto::wire::{Offer, PeerMessage, PlaneKind};

use super::model::{Issued, Send, honest_checksums};
use super::step::Step;
use super::{Driver, OWN_INCARNATION, PAGE_BYTES, incarnation, node};

const LINKS_MAX: usize = 4;

impl Driver<'_> {
    pub(super) fn link_up(&mut self) {
        if self.world.model.links.len() > LINKS_MAX {
            return;
        }
        let choices = self.script.byte();
        let planes = match choices >> 2 & 3 {
            0 => vec![],
            1 => vec![PlaneKind::Shm, PlaneKind::Quic],
            _ => vec![PlaneKind::Quic],
        };
        let step = Step::LinkUp {
            link: LinkId(self.fresh().into()),
            node: node((choices & 1) + 1),
            incarnation: incarnation(u64::from(choices >> 1 & 1) + 1),
            planes,
        };
        self.world.step(&step);
    }

    pub(super) fn link_down(&mut self) {
        let all = self.script.seldom();
        let links = self.world.model.links.iter().copied();
        let links = links.filter(|link| all || *link != LinkId::LOOPBACK);
        let links: Vec<LinkId> = links.collect();
        if let Some(link) = self.script.pick(links) {
            if link == LinkId::LOOPBACK {
                self.world.loopback.clear();
            }
            self.world.step(&Step::LinkDown(link));
        }
    }

    pub(super) fn connect_failed(&mut self) {
        let node = node(self.script.below(3));
        self.world.step(&Step::ConnectFailed(node));
    }

    pub(super) fn open(&mut self) {
        let Some((mut offer, id)) = self.script.pick(self.world.model.offers.clone()) else {
            return;
        };
        let link = self.any_link();
        let transfer = TransferId(self.script.below(6).into());
        let lies = self.script.byte();
        let model = &self.world.model;
        let lease = model
            .leases
            .get(&id)
            .or_else(|| model.leases.values().next());
        let Some(lease) = lease else {
            return;
        };
        let (mut tokens, mut tenant) = (lease.tokens, lease.tenant.clone());
        let mut layout = model.pools[&lease.pool].spec.layout;
        let mut plane = PlaneKind::Quic;
        match lies {
            0xf0..=0xf3 => offer = self.false_offer(&offer, id),
            0xf4..=0xf5 => tokens.start += 1,
            0xf6..=0xf7 => layout.page_bytes += 1,
            0xf8..=0xfb => tenant = self.any_tenant(),
            0xfc..=0xff => plane = PlaneKind::Shm,
            _ => {}
        }
        let message = PeerMessage::Open {
            transfer,
            offer,
            layout,
            tokens,
            tenant,
            plane,
        };
        self.world.step(&Step::Peer(link, message));
    }

    /// An offer that this daemon did not make, or not in this life.
    fn false_offer(&mut self, offer: &Bytes, lease: LeaseId) -> Bytes {
        let choice = self.script.byte();
        let mut bytes = offer.to_vec();
        let index = usize::from(choice) % bytes.len();
        bytes[index] ^= 1 << (choice % 8);
        let changed = Bytes::from(bytes);
        let Ok(mut claimed) = Offer::peek(offer) else {
            return changed;
        };
        match choice % 4 {
            0 => claimed.incarnation = incarnation(OWN_INCARNATION - 1),
            1 => claimed.lease = LeaseId(lease.0 + 1),
            2 => claimed.node = node(1),
            _ => return changed,
        }
        claimed.sign(&Secret([9; 32]))
    }

    pub(super) fn checksums(&mut self) {
        let Some((link, issued)) = self.any_issued() else {
            return;
        };
        let checksums = if self.script.seldom() {
            self.any_checksums()
        } else {
            let regions = u8::try_from(issued.spec.layout.regions).unwrap_or(u8::MAX);
            honest_checksums(PageRun {
                region: self.script.below(regions).into(),
                first: 0,
                count: u32::try_from(issued.slots.len()).expect("a lease is small"),
            })
        };
        let message = PeerMessage::Checksums {
            grant: issued.grant,
            checksums,
        };
        self.world.step(&Step::Peer(link, message));
    }

    pub(super) fn commit(&mut self) {
        let Some((link, issued)) = self.any_issued() else {
            return;
        };
        let lies = self.script.seldom();
        let payload = Bytes::copy_from_slice(self.script.slice());
        let digest = if lies {
            [0; 32]
        } else {
            issued.digest(&payload)
        };
        let message = PeerMessage::Commit {
            grant: issued.grant,
            digest: Tag(digest),
            payload,
        };
        self.world.step(&Step::Peer(link, message));
    }

    pub(super) fn cancel(&mut self) {
        let grants = self.world.model.grants.values();
        let keys: Vec<_> = grants.map(|grant| (grant.link, grant.transfer)).collect();
        let (mut link, mut transfer) = self
            .script
            .pick(keys)
            .unwrap_or((LinkId(99), TransferId(0)));
        if self.script.seldom() || link == LinkId::LOOPBACK {
            link = self.any_link();
            transfer = TransferId(self.script.below(6).into());
        }
        let message = PeerMessage::Cancel {
            transfer,
            drain_follows: !self.script.seldom(),
        };
        self.world.step(&Step::Peer(link, message));
    }

    pub(super) fn refuse(&mut self) {
        let (link, transfer) = self.any_route();
        let reason = Rejection::OfferUsed;
        let message = PeerMessage::Refused { transfer, reason };
        self.world.step(&Step::Peer(link, message));
    }

    pub(super) fn grant(&mut self) {
        let (link, transfer) = self.any_route();
        let Some(send) = self.world.model.sends.get(&transfer) else {
            return;
        };
        let (count, again) = (send.slots.len(), send.committed.is_some());
        // An honest destination counts up.
        let last = send.reads_under.map_or(0, |grant| grant.0);
        let lies = self.script.byte();
        let count = u32::try_from(count).expect("a lease is small") + u32::from(lies >= 0xf8);
        let slot = |index| SlotRef {
            index: SlotIndex(index),
            epoch: Epoch::new(u64::from(index) + 1).expect("it is not 0"),
        };
        let pages = if again != (lies & 0xf8 == 0xf0) {
            self.any_runs()
        } else {
            Vec::new()
        };
        let outstanding_pages = u64::from(self.script.below(4)) + 1;
        let outstanding_bytes_max = match lies {
            0xe8..=0xeb => u64::MAX,
            0xec..=0xef => 1,
            _ => outstanding_pages * u64::from(PAGE_BYTES),
        };
        let message = PeerMessage::Granted {
            transfer,
            grant: GrantId(last + u64::from(self.script.below(5))),
            slots: (0..count).map(slot).collect(),
            plane_key: Secret([1; 32]),
            manifest_key: Secret([2; 32]),
            outstanding_bytes_max,
            pages,
        };
        self.world.step(&Step::Peer(link, message));
    }

    fn any_runs(&mut self) -> Vec<PageRun> {
        let count = self.script.below(3) + 1;
        let runs = (0..count).map(|_| {
            let shape = self.script.byte();
            PageRun {
                region: u16::from(shape >> 7),
                first: if shape == 0xff {
                    u32::MAX - 1
                } else {
                    u32::from(shape & 7)
                },
                count: u32::from(shape >> 5 & 3) / 2 + 1,
            }
        });
        runs.collect()
    }

    pub(super) fn drain_request(&mut self) {
        let (link, transfer) = self.any_route();
        let send = self.world.model.sends.get(&transfer);
        let grant = send.and_then(|send| send.reads_under);
        let grant = match grant {
            Some(grant) if !self.script.seldom() => grant,
            _ => GrantId(self.script.below(5).into()),
        };
        let message = PeerMessage::DrainRequest { grant };
        self.world.step(&Step::Peer(link, message));
    }

    pub(super) fn verdict(&mut self) {
        let (link, transfer) = self.any_route();
        let outcome = match self.script.below(5) {
            0 => Outcome::Delivered,
            1 => Outcome::Rejected(Rejection::OfferUsed),
            2 => Outcome::Aborted(Abort::Destination),
            3 => Outcome::Failed(Failure::ManifestMismatch),
            _ => Outcome::Failed(Failure::Unrecognised { code: 9, detail: 9 }),
        };
        let message = PeerMessage::Verdict { transfer, outcome };
        self.world.step(&Step::Peer(link, message));
    }

    /// Whatever decodes.
    pub(super) fn raw_peer(&mut self) {
        let link = self.any_link();
        let bytes = Bytes::copy_from_slice(self.script.slice());
        if let Ok(message) = PeerMessage::decode(bytes) {
            self.world.step(&Step::Peer(link, message));
        }
    }

    /// The machine hears from itself.
    pub(super) fn loopback(&mut self) {
        if let Some(message) = self.world.loopback.pop_front() {
            self.world.step(&Step::Peer(LinkId::LOOPBACK, message));
        }
    }

    /// A grant that was issued, and a link: its own, or another.
    fn any_issued(&mut self) -> Option<(LinkId, Issued)> {
        let issued = self.world.issued.iter();
        let remote = issued.filter(|issued| issued.link != LinkId::LOOPBACK);
        let remote: Vec<Issued> = remote.rev().take(8).cloned().collect();
        let mut issued = self.script.pick(remote)?;
        let mut link = issued.link;
        match self.script.byte() {
            0xf0..=0xf7 => link = self.any_link(),
            0xf8..=0xff => issued.grant = GrantId(self.script.below(9).into()),
            _ => {}
        }
        Some((link, issued))
    }

    /// A send from here, and a link: its own, or another.
    fn any_route(&mut self) -> (LinkId, TransferId) {
        let sends = self.world.model.sends.iter();
        let route = |(id, send): (&TransferId, &Send)| Some((send.link?, *id));
        let routes = sends.filter_map(route);
        let remote: Vec<_> = routes
            .filter(|(link, _)| *link != LinkId::LOOPBACK)
            .collect();
        let route = self.script.pick(remote);
        match (self.script.byte(), route) {
            (0..=0xef, Some(route)) => route,
            (_, Some((_, transfer))) => (self.any_link(), transfer),
            (_, None) => {
                let transfer = TransferId(self.script.below(9).into());
                (self.any_link(), transfer)
            }
        }
    }
}
