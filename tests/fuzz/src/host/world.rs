//! One production machine beside the model: a step goes into both, and they must agree.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use fabric_proto::host::{Config, Host, Observation, Output, PlaneCommand};
use fabric_proto::ids::{EngineId, GrantId, LinkId, TransferId};
use fabric_proto::outcome::Rejection;
use fabric_proto::time::Now;
use fabric_proto::wire::{AbortPolicy, PeerMessage, ToDaemon, ToEngine};

use super::model::{Grant, Issued, Model};
use super::step::{Proven, Step};

pub(super) struct World {
    host: Host<Proven>,
    pub(super) model: Model,
    /// What the machine has said to itself.
    pub(super) loopback: VecDeque<PeerMessage>,
    /// What writers were told of their grants.
    pub(super) issued: Vec<Issued>,
    /// Sessions and links that the machine wants closed.
    pub(super) closing: Vec<Step>,
}

impl World {
    pub(super) fn new(config: Config) -> Self {
        Self {
            host: Host::new(config.clone()),
            model: Model::new(config),
            loopback: VecDeque::new(),
            issued: Vec::new(),
            closing: Vec::new(),
        }
    }

    pub(super) fn deadline(&self) -> Option<Duration> {
        self.host.deadline().map(|deadline| deadline.0)
    }

    /// Lets time pass. Every other step takes none, so that what is due is not taken for its doing.
    pub(super) fn pass(&mut self, time: Duration) {
        self.model.now += time;
        self.step(&Step::Tick);
    }

    pub(super) fn step(&mut self, step: &Step) {
        let before = step.is_message().then(|| self.host.clone());
        self.host.handle(Now(self.model.now), step.input());
        let outputs: Vec<Output> = std::iter::from_fn(|| self.host.poll()).collect();
        self.host.invariants();
        let refusal = outputs.iter().find_map(refusal);
        if let Some(close) = &refusal {
            self.refused(step, close);
            assert_eq!(outputs.len(), 1, "{outputs:?}");
            assert!(
                before == Some(self.host.clone()),
                "misbehaviour changes nothing"
            );
        }
        self.model.before(step, refusal.is_some());
        for output in &outputs {
            self.output(step, output);
        }
        self.model.settle_orphans(step);
        for output in &outputs {
            if let Output::Unmap { pool } = output {
                match step {
                    // It was turned away, and was never there.
                    Step::RegisterPool { pool: asked, .. } if asked == pool => {}
                    _ => self.model.unmapped(*pool),
                }
            }
        }
        self.model.after(step, self.host.usage());
    }

    /// Misbehaviour closes the session or the link that it came on, and no other.
    fn refused(&mut self, step: &Step, close: &Step) {
        let own = match (step, close) {
            (Step::Engine(from, _), Step::EngineGone(engine)) => from == engine,
            (Step::Peer(from, _), Step::LinkDown(link)) => from == link,
            _ => false,
        };
        assert!(own, "{step:?} led to {close:?}");
        self.closing.push(close.clone());
    }

    fn output(&mut self, step: &Step, output: &Output) {
        match output {
            Output::Engine { engine, message } => self.engine_hears(step, *engine, message),
            Output::Peer { link, message } => self.peer_hears(step, *link, message),
            Output::Plane { command, .. } => self.plane(step, command),
            Output::Scrub { pool, slots } => self.model.scrub(*pool, slots),
            Output::Observe(Observation::LeaseStarted { slots }) => {
                let Step::Engine(engine, asked) = step else {
                    panic!("a lease began by {step:?}");
                };
                self.model.lease_started(*engine, asked, *slots);
            }
            Output::Observe(observation) => self.model.observed(observation),
            Output::ShutdownComplete => {
                assert!(self.model.shutdown && !self.model.shutdown_complete);
                assert!(
                    self.model.grants.is_empty(),
                    "S1: no writer outlives the daemon"
                );
                self.model.shutdown_complete = true;
            }
            // The first two are dealt with by now; connections come when the script says so.
            Output::CloseEngine { .. }
            | Output::CloseLink { .. }
            | Output::Connect { .. }
            | Output::Unmap { .. } => {}
        }
    }

    fn engine_hears(&mut self, step: &Step, engine: EngineId, message: &ToEngine) {
        let model = &mut self.model;
        assert!(model.engines.contains(&engine), "nobody hears {message:?}");
        match message {
            ToEngine::Welcome { .. } => assert!(matches!(step, Step::EngineUp(..))),
            ToEngine::Rejected { seq, reason } => {
                if let (Step::Engine(_, asked), Rejection::Busy { slots_needed, .. }) =
                    (step, reason)
                {
                    model.assert_busy(asked, *slots_needed);
                }
                // Shutdown came while its slots were scrubbed.
                if let (Step::Scrubbed(..), Some(lease)) = (step, model.unanswered(engine, *seq)) {
                    model.end_lease(lease, AbortPolicy::DrainNow);
                }
            }
            ToEngine::PoolRegistered { pool, .. } => {
                let Step::RegisterPool { spec, .. } = step else {
                    panic!("a pool was registered by {step:?}");
                };
                model.registered(engine, *pool, *spec);
            }
            ToEngine::Leased {
                seq,
                lease,
                slots,
                offer,
            } => {
                model.given_out(*lease, *seq, slots);
                assert_eq!(model.leases[lease].engine, engine);
                model
                    .offers
                    .extend(offer.clone().map(|offer| (offer, *lease)));
            }
            ToEngine::SendOpened {
                transfer,
                slots,
                offset,
                ..
            } => {
                let Step::Engine(from, ToDaemon::Send { lease, .. }) = step else {
                    panic!("a send began by {step:?}");
                };
                model.send_began(*transfer, *from, *lease);
                model.pinned(*transfer, *offset, *slots);
            }
            ToEngine::SendOutcome { transfer, outcome } => {
                assert_eq!(model.sends[transfer].engine, engine);
                model.send_ended(*transfer, Some(*outcome));
            }
            ToEngine::Expect { lease, .. } => assert_eq!(model.leases[lease].engine, engine),
            ToEngine::Verify {
                lease,
                attempt,
                pages,
                ..
            } => {
                assert_eq!(model.leases[lease].engine, engine);
                model.asked_to_verify(*lease, *attempt, pages);
            }
            ToEngine::LeaseOutcome { lease, outcome } => {
                assert_eq!(model.leases[lease].engine, engine);
                model.received(*lease, *outcome, step);
            }
        }
    }

    fn peer_hears(&mut self, step: &Step, link: LinkId, message: &PeerMessage) {
        let model = &mut self.model;
        assert!(model.links.contains(&link), "nobody hears {message:?}");
        match message {
            PeerMessage::Open { transfer, .. } => {
                let send = model.sends.get_mut(transfer).expect("a send asks");
                assert_eq!(send.link.replace(link), None, "a grant is asked for once");
            }
            PeerMessage::Granted {
                transfer,
                grant,
                slots,
                manifest_key,
                ..
            } => {
                assert!(matches!(step, Step::Armed(armed) if armed == grant));
                let open = &model.grants[grant];
                assert_eq!((open.link, open.transfer), (link, *transfer));
                assert_eq!(&open.slots[..], slots);
                self.issued.extend(model.issue(*grant, *manifest_key));
            }
            PeerMessage::DrainRequest { grant } => {
                assert_eq!(model.grants[grant].link, link);
                model.must_stop(*grant);
            }
            PeerMessage::Verdict { transfer, .. } => {
                let under = |grant: &Grant| (grant.link, grant.transfer) == (link, *transfer);
                assert!(
                    !model.grants.values().any(under),
                    "S1: proof before the outcome"
                );
            }
            PeerMessage::Hello { .. } => panic!("hellos are the shell's"),
            PeerMessage::Refused { .. } => assert!(matches!(step, Step::Peer(..))),
            PeerMessage::Checksums { .. }
            | PeerMessage::Commit { .. }
            | PeerMessage::Cancel { .. } => {}
        }
        if link == LinkId::LOOPBACK {
            self.loopback.push_back(message.clone());
        }
    }

    fn plane(&mut self, step: &Step, command: &PlaneCommand) {
        let model = &mut self.model;
        match command {
            PlaneCommand::Arm { grant, .. } => self.arm(step, *grant, command),
            PlaneCommand::Fence { grant } => {
                let grant = model.grants.get_mut(grant).expect("it is open");
                assert!(!grant.fencing, "a grant is fenced once");
                grant.fencing = true;
            }
            PlaneCommand::OpenWriter {
                transfer,
                grant,
                link,
                slots,
                ..
            } => {
                assert_eq!(model.sends[transfer].link, Some(*link));
                model.writer_opened(*transfer, *grant, slots);
            }
            PlaneCommand::Write { transfer, run } => model.posted(*transfer, run),
            PlaneCommand::Drain { transfer } => model.ends_writer(*transfer, true),
            PlaneCommand::Stop { transfer } => model.ends_writer(*transfer, false),
        }
    }

    /// A grant is opened by an offer, once, or by a verification that found corrupt pages.
    fn arm(&mut self, step: &Step, id: GrantId, command: &PlaneCommand) {
        let PlaneCommand::Arm {
            link,
            pool,
            slots,
            pages,
            ..
        } = command
        else {
            panic!("called for an arm alone");
        };
        let (lease, transfer, again) = match step {
            Step::Peer(
                from,
                PeerMessage::Open {
                    transfer,
                    offer,
                    tenant,
                    ..
                },
            ) => {
                assert_eq!(from, link);
                let made = self.model.offers.iter().find(|(made, _)| made == offer);
                // S7, S6: an offer of this daemon, for its tenant, for the first time.
                let lease = made.expect("this daemon made it").1;
                assert_eq!(&self.model.leases[&lease].tenant, tenant);
                assert!(
                    self.model.offers_used.insert(lease),
                    "an offer is good once"
                );
                (lease, *transfer, false)
            }
            Step::Engine(_, ToDaemon::Verified { lease, corrupt, .. }) => {
                let pages: u64 = pages.iter().map(|run| u64::from(run.count)).sum();
                assert_eq!(
                    pages,
                    corrupt.len() as u64,
                    "the corrupt pages, and no others"
                );
                let key = self.model.leases[lease].receiving;
                let (_, transfer): (LinkId, TransferId) = key.expect("there was a transfer");
                (*lease, transfer, true)
            }
            _ => panic!("a grant was opened by {step:?}"),
        };
        let grant = Grant::new(*link, transfer, lease, *pool, Arc::clone(slots));
        self.model.grant_opened(id, grant, again);
    }
}

/// How the shell answers a refusal.
fn refusal(output: &Output) -> Option<Step> {
    match output {
        Output::CloseEngine { engine, .. } => Some(Step::EngineGone(*engine)),
        Output::CloseLink { link, .. } => Some(Step::LinkDown(*link)),
        _ => None,
    }
}
