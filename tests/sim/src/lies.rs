//! Daemons that lie: authenticated, and wrong.
//!
//! A lie is something that one end of a link hears or receives and that the other's machine never
//! said. What a daemon can do to itself is left out: one that misplaces what it is sent writes
//! over its own memory, and one that says "delivered" of what it threw away is believed, since it
//! is the authority. Everything else must stop at the honest end: no byte in a slot that the liar
//! has no grant for, nothing delivered that its source did not write, and everything at rest after.

use fabric_proto::ids::{GrantId, LinkId, Secret, TransferId};
use fabric_proto::outcome::Outcome;
use fabric_proto::pool::PageRef;
use fabric_proto::wire::{Offer, PeerMessage, PlaneKind};

use crate::engine::Part;
use crate::plane::{Cargo, Content, Flight};
use crate::world::{Event, World};

/// What a daemon does that it should not.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Lie {
    /// It says its last message twice.
    Repeat,
    /// It says its last message wrong: a part of the manifest is missing, a number is another
    /// transfer's, an epoch is off, a digest is false.
    Alter,
    /// It makes up an offer of the lease of a request.
    Forge(usize),
    /// It writes garbage to a page under a grant, before or after it said that it was done.
    Junk(GrantId, PageRef),
}

impl World {
    /// Which lies may be told next.
    pub(crate) fn lies(&self, events: &mut Vec<Event>) {
        for (id, link) in &self.links {
            if link.broken() || link.ends.iter().any(|end| !end.up) {
                continue;
            }
            for (side, end) in link.ends.iter().enumerate() {
                let lie = |lie| Event::Lie(*id, side, lie);
                if let Some(message) = end.inbox.front() {
                    events.push(lie(Lie::Repeat));
                    events.extend(altered(message).map(|_| lie(Lie::Alter)));
                }
                for (index, progress) in self.requests.iter().enumerate() {
                    let here = self.setup.requests[index].destination.0 == end.node;
                    let leased = matches!(progress.destination, Part::Leased(_));
                    if here && leased && progress.offer.is_some() {
                        events.push(lie(Lie::Forge(index)));
                    }
                }
                let armed = self.nodes[end.node].plane.armed.iter();
                for (grant, armed) in armed.filter(|(_, armed)| armed.link == *id) {
                    let slots = u32::try_from(armed.slots.len()).expect("a world is small");
                    let page = |position| PageRef {
                        region: 0,
                        position,
                    };
                    events.extend((0..slots).map(|at| lie(Lie::Junk(*grant, page(at)))));
                }
            }
        }
    }

    /// One end of a link hears a lie.
    pub(crate) fn lie(&mut self, id: LinkId, side: usize, lie: Lie) {
        let forged = match lie {
            Lie::Forge(index) => Some(self.forged(index)),
            Lie::Repeat | Lie::Alter | Lie::Junk(..) => None,
        };
        let link = self.links.get_mut(&id).expect("the link is there");
        link.lied = true;
        let liar = (link.ends[1 - side].node, link.ends[1 - side].incarnation);
        let end = &mut link.ends[side];
        let front = end.inbox.front().cloned();
        match lie {
            Lie::Repeat => end.inbox.extend(front),
            Lie::Alter => {
                let altered = front.as_ref().and_then(altered);
                end.inbox[0] = altered.expect("it can be altered");
            }
            Lie::Forge(_) => end.inbox.extend(forged),
            Lie::Junk(grant, page) => {
                let (node, incarnation) = (end.node, end.incarnation);
                let flight = Flight {
                    from: liar,
                    transfer: TransferId(0),
                    to: (node, incarnation),
                    grant,
                    key: self.nodes[node].plane.armed[&grant].key,
                    cargo: Cargo::Page(page, Some(Content::Junk { from: liar.0 })),
                };
                self.flights.push(flight);
            }
        }
    }

    /// An open message with a request's offer, as somebody without the daemon's key makes it.
    fn forged(&self, index: usize) -> PeerMessage {
        let request = self.setup.requests[index];
        let offer = self.requests[index].offer.as_ref();
        let offer = Offer::peek(offer.expect("there is an offer")).expect("it is the daemon's own");
        let (engine, node) = (request.destination.1, request.destination.0);
        PeerMessage::Open {
            transfer: TransferId(FORGED + index as u64),
            offer: offer.sign(&Secret([0xff; 32])),
            layout: self.setup.spec(self.setup.nodes[node][engine]).layout,
            tokens: request.tokens(),
            tenant: request.tenant_id(),
            plane: PlaneKind::Quic,
        }
    }
}

/// Above all numbers that a machine gives in a run.
const FORGED: u64 = 1 << 32;

/// A message with one thing wrong in it. `None` where only the liar itself would be harmed.
fn altered(message: &PeerMessage) -> Option<PeerMessage> {
    let mut message = message.clone();
    match &mut message {
        PeerMessage::Hello { .. } => return None,
        PeerMessage::Open { tokens, .. } => tokens.count += 1,
        PeerMessage::Checksums { checksums, .. } if checksums.crcs.len() > 1 => {
            checksums.crcs.pop();
        }
        PeerMessage::Checksums { checksums, .. } => checksums.crcs[0] ^= 1,
        PeerMessage::Commit { digest, .. } => digest.0[0] ^= 1,
        PeerMessage::Cancel { drain_follows, .. } => *drain_follows = !*drain_follows,
        PeerMessage::Granted { slots, .. } => {
            let last = slots.last_mut()?;
            last.epoch = last.epoch.checked_next()?;
        }
        PeerMessage::DrainRequest { grant } => grant.0 += 1,
        PeerMessage::Verdict { outcome, .. } if *outcome == Outcome::Delivered => return None,
        PeerMessage::Refused { transfer, .. } | PeerMessage::Verdict { transfer, .. } => {
            transfer.0 += 1;
        }
    }
    Some(message)
}
