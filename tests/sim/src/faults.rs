//! What may go wrong, and what it does.

use std::collections::VecDeque;
use std::sync::Arc;

use fabric_proto::host::{Host, Input};
use fabric_proto::outcome::Failure;
use fabric_proto::time::Now;
use fabric_proto::wire::AbortPolicy;

use crate::engine::{Part, Transfer};
use crate::plane::{Cargo, Plane};
use crate::world::{Event, World};

impl World {
    /// What may go wrong next.
    pub(crate) fn faults(&self, events: &mut Vec<Event>) {
        let budget = &self.budget;
        if budget.aborts > 0 {
            for (index, progress) in self.requests.iter().enumerate() {
                if matches!(progress.destination, Part::Leased(_)) {
                    for policy in [AbortPolicy::FinishTransfer, AbortPolicy::DrainNow] {
                        events.push(Event::AbortDestination(index, Some(policy)));
                    }
                }
                let open = matches!(progress.transfer, Transfer::Open(_) | Transfer::Sealed(_));
                if open && matches!(progress.source, Part::Leased(_)) {
                    events.push(Event::AbortSource(index));
                }
            }
        }
        if budget.misroutes > 0 {
            self.misroutes(events);
        }
        if budget.flips > 0 {
            for (index, flight) in self.flights.iter().enumerate() {
                if matches!(flight.cargo, Cargo::Page(..)) {
                    events.push(Event::Flip(index));
                }
            }
        }
        if budget.cuts > 0 {
            let whole = self.links.iter().filter(|(_, link)| !link.broken());
            events.extend(whole.map(|(id, _)| Event::Cut(*id)));
        }
        if budget.one_way > 0 {
            let whole = self.links.iter().filter(|(_, link)| !link.broken());
            events.extend(whole.flat_map(|(id, _)| [0, 1].map(|side| Event::OneWay(*id, side))));
        }
        if budget.lies > 0 {
            self.lies(events);
        }
        if budget.unreachable > 0 {
            events.extend((0..self.dials.len()).map(Event::Unreachable));
        }
        for (node, state) in self.nodes.iter().enumerate() {
            if budget.daemon_crashes > 0 {
                events.push(Event::CrashDaemon(node));
            }
            if budget.shutdowns > 0 && !state.stopping {
                events.push(Event::Shutdown(node));
            }
            if budget.clock_steps > 0 {
                events.push(Event::ClockStep(node));
            }
            if budget.engine_crashes > 0 && !state.stopping {
                let engines = 0..state.engines.len();
                events.extend(engines.map(|engine| Event::CrashEngine(node, engine)));
            }
            if budget.ticks > 0 && state.host.deadline().is_some() {
                events.push(Event::Tick(node));
            }
        }
    }

    fn misroutes(&self, events: &mut Vec<Event>) {
        let requests = self.setup.requests.iter().zip(&self.requests).enumerate();
        for (index, (request, progress)) in requests {
            if !matches!(progress.source, Part::Leased(_)) {
                continue;
            }
            for (offered, other) in self.requests.iter().enumerate() {
                let tenant = self.setup.requests[offered].tenant;
                let twice = offered == index && progress.transfer != Transfer::Idle;
                // A daemon's link to itself is its shell's business.
                let here = self.setup.requests[offered].destination.0 == request.source.0;
                if other.offer.is_some() && !here && (twice || tenant != request.tenant) {
                    events.push(Event::Misroute(offered, index));
                }
            }
        }
    }

    /// Lets go wrong what the budget allows.
    pub(crate) fn fault(&mut self, event: Event) {
        let budget = &mut self.budget;
        #[expect(clippy::wildcard_enum_match_arm, reason = "`apply` sends only these")]
        match event {
            Event::Flip(index) => {
                budget.flips -= 1;
                self.land(index, true);
            }
            Event::Cut(link) => {
                budget.cuts -= 1;
                self.links.get_mut(&link).expect("the link is there").deaf = [true; 2];
            }
            Event::OneWay(link, side) => {
                budget.one_way -= 1;
                self.links.get_mut(&link).expect("the link is there").deaf[side] = true;
            }
            Event::Lie(link, side, lie) => {
                budget.lies -= 1;
                self.lie(link, side, lie);
            }
            Event::Shutdown(node) => {
                budget.shutdowns -= 1;
                self.nodes[node].stopping = true;
                self.input(node, Input::Shutdown);
            }
            Event::ClockStep(node) => {
                budget.clock_steps -= 1;
                self.nodes[node].now = Now::default();
            }
            Event::CrashDaemon(node) => {
                budget.daemon_crashes -= 1;
                self.crash_daemon(node);
            }
            Event::CrashEngine(node, engine) => {
                budget.engine_crashes -= 1;
                let id = self.nodes[node].engines[engine].id;
                self.session_lost((node, engine), Failure::EngineGone);
                self.input(node, Input::EngineGone { engine: id });
                self.start_engine((node, engine));
            }
            Event::Unreachable(index) => {
                budget.unreachable -= 1;
                let dial = self.dials.remove(index);
                self.connect_failed(dial);
            }
            Event::AbortDestination(index, policy) => {
                budget.aborts -= 1;
                self.abort_destination(index, policy);
            }
            Event::AbortSource(index) => {
                budget.aborts -= 1;
                self.abort_source(index);
            }
            Event::Misroute(offered, index) => {
                budget.misroutes -= 1;
                self.misroute(offered, index);
            }
            Event::Tick(node) => {
                budget.ticks = budget.ticks.saturating_sub(1);
                self.tick(node);
            }
            _ => unreachable!("no fault"),
        }
    }

    /// A daemon has shut down: its process ends, and the next one begins.
    pub(crate) fn shut_down(&mut self, node: usize) {
        let plane = &self.nodes[node].plane;
        let left = plane.armed.len() + plane.writers.len();
        if left > 0 {
            let what = || format!("node {node} ends with {left} grants and writers");
            self.oracle.violated(1, what);
        }
        self.crash_daemon(node);
    }

    pub(crate) fn crash_daemon(&mut self, node: usize) {
        self.oracle.died(node);
        for engine in 0..self.nodes[node].engines.len() {
            self.session_lost((node, engine), Failure::DaemonGone);
        }
        for index in 0..self.flights.len() {
            // What was posted flies on: its memory is captured by the hardware.
            let carried = self.carried(&self.flights[index]);
            if self.flights[index].from.0 == node
                && let Cargo::Page(page, None) = self.flights[index].cargo
            {
                self.flights[index].cargo = Cargo::Page(page, carried);
            }
        }
        let state = &mut self.nodes[node];
        state.incarnation += 1;
        self.lived += state.now.0;
        state.now = Now::default();
        state.stopping = false;
        state.local.clear();
        state.plane = Plane::default();
        (state.next_engine, state.next_pool) = (1, 1);
        state.host = Arc::new(Host::new(self.setup.config(node, state.incarnation)));
        self.dials.retain(|dial| dial.node != node);
        for link in self.links.values_mut() {
            for end in &mut link.ends {
                if end.node == node {
                    end.up = false;
                    end.inbox = VecDeque::new();
                    link.deaf = [true; 2];
                }
            }
        }
        self.links
            .retain(|_, link| link.ends.iter().any(|end| end.up));
        self.clear_air();
        for engine in 0..self.setup.nodes[node].len() {
            self.start_engine((node, engine));
        }
    }
}
