//! What is counted, for Prometheus.
//!
//! What is outstanding is the difference of two counters, started and ended: a scrape that comes
//! late still sees every change. Labels come from enumerations, never from a request or a tenant,
//! and every combination that can be known is there from the start, at 0.

use std::time::Duration;

use fabric_proto::host::{Observation, StoppedBy, Usage};
use fabric_proto::ids::{Incarnation, NodeId};
use fabric_proto::outcome::{Abort, Failure, Outcome, Rejection};
use fabric_proto::wire::PlaneKind;
use prometheus::core::Collector;
use prometheus::{
    HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};
use tracing::{info, warn};

use crate::link::Side;

/// Everything that is counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    bytes_written: IntCounter,
    grants_closed: IntCounterVec,
    grants_opened: IntCounterVec,
    inputs: IntCounter,
    invariant_checks: IntCounter,
    leases_ended: IntCounter,
    leases_started: IntCounter,
    link_dials_failed: IntCounterVec,
    link_dials_started: IntCounter,
    links: IntGauge,
    links_closed: IntCounterVec,
    links_opened: IntCounterVec,
    links_refused: IntCounterVec,
    messages_stale: IntCounter,
    pages_arrived: IntCounter,
    pages_corrupt: IntCounter,
    pages_dropped: IntCounter,
    pages_verified: IntCounter,
    plane_writers_refused: IntCounterVec,
    pool_slots: IntGaugeVec,
    receive_seconds: HistogramVec,
    receives_ended: IntCounterVec,
    requests_rejected: IntCounterVec,
    send_bytes: HistogramVec,
    send_seconds: HistogramVec,
    sends_ended: IntCounterVec,
    sends_started: IntCounter,
    sessions: IntGauge,
    sessions_closed: IntCounterVec,
    sessions_opened: IntCounter,
    sessions_refused: IntCounterVec,
    slots_freed: IntCounter,
    slots_leased: IntCounter,
    slots_released: IntCounter,
    verbs_failovers: IntCounter,
    verbs_objects: IntGaugeVec,
}

/// What is looked up when somebody asks.
#[derive(Clone, Debug)]
pub(crate) struct Gauges {
    pub(crate) usage: Usage,
    pub(crate) links: usize,
    pub(crate) sessions: usize,
    pub(crate) refused: [(PlaneKind, u64); 3],
    /// Of the `verbs` plane; empty where it is off.
    pub(crate) verbs_objects: Vec<(&'static str, u64)>,
    pub(crate) verbs_failovers: u64,
}

impl Metrics {
    #[expect(clippy::too_many_lines, reason = "a table: one entry a metric")]
    pub(crate) fn new(node: NodeId, incarnation: Incarnation) -> Self {
        let set = Set(Registry::new());
        let metrics = Self {
            bytes_written: set.counter("bytes_written_total", "Bytes that planes have sent."),
            grants_closed: set.counters(
                "grants_closed_total",
                "Grants that were closed, with proof, by what proved it.",
                &["stopped_by"],
            ),
            grants_opened: set.counters(
                "grants_opened_total",
                "Grants that were opened to remote writers.",
                &["plane"],
            ),
            inputs: set.counter("inputs_total", "Inputs that the machine has handled."),
            invariant_checks: set.counter(
                "invariant_checks_total",
                "How often every count of the machine was recomputed and compared.",
            ),
            leases_ended: set.counter("leases_ended_total", "Leases that ended."),
            leases_started: set.counter("leases_started_total", "Leases that were given."),
            link_dials_failed: set.counters(
                "link_dials_failed_total",
                "Attempts to connect to a peer that failed, by reason.",
                &["reason"],
            ),
            link_dials_started: set
                .counter("link_dials_started_total", "Attempts to connect to a peer."),
            links: set.gauge("links", "Links that are up."),
            links_closed: set.counters(
                "links_closed_total",
                "Links that ended, by reason.",
                &["reason"],
            ),
            links_opened: set.counters(
                "links_opened_total",
                "Links that came up, by who connected.",
                &["side"],
            ),
            links_refused: set.counters(
                "links_refused_total",
                "Peers that connected and got no link, by reason.",
                &["reason"],
            ),
            messages_stale: set.counter(
                "messages_stale_total",
                "Messages that came too late to matter.",
            ),
            pages_arrived: set.counter(
                "pages_arrived_total",
                "Pages that arrived: the sum of those verified, corrupt and dropped, in the end.",
            ),
            pages_corrupt: set.counter(
                "pages_corrupt_total",
                "Pages that arrived and did not match their checksum.",
            ),
            pages_dropped: set.counter(
                "pages_dropped_total",
                "Pages that arrived and are not verified, since their transfer is over.",
            ),
            pages_verified: set.counter(
                "pages_verified_total",
                "Pages that arrived and matched their checksum.",
            ),
            plane_writers_refused: set.counters(
                "plane_writers_refused_total",
                "Streams and writers that a plane refused.",
                &["plane"],
            ),
            pool_slots: set.gauges(
                "pool_slots",
                "Slots of all pools, by state; a slot can be in several but for free.",
                &["state"],
            ),
            receive_seconds: set.histogram(
                "receive_duration_seconds",
                "From a lease with an offer to its outcome.",
                SECONDS,
            ),
            receives_ended: set.counters(
                "receives_ended_total",
                "Deliveries to leases of this host that ended.",
                &["outcome", "reason"],
            ),
            requests_rejected: set.counters(
                "requests_rejected_total",
                "Requests that were turned away.",
                &["reason"],
            ),
            send_bytes: set.histogram("send_bytes", "Bytes of a transfer from here.", BYTES),
            send_seconds: set.histogram(
                "send_duration_seconds",
                "From the start of a transfer from here to its outcome.",
                SECONDS,
            ),
            sends_ended: set.counters(
                "sends_ended_total",
                "Transfers from here that ended.",
                &["outcome", "reason"],
            ),
            sends_started: set.counter("sends_started_total", "Transfers from here that began."),
            sessions: set.gauge("sessions", "Engines that are connected."),
            sessions_closed: set.counters(
                "sessions_closed_total",
                "Engine sessions that ended, by reason.",
                &["reason"],
            ),
            sessions_opened: set.counter("sessions_opened_total", "Engine sessions that began."),
            sessions_refused: set.counters(
                "sessions_refused_total",
                "Engines that connected and got no session, by reason.",
                &["reason"],
            ),
            slots_freed: set.counter("slots_freed_total", "Slots that nobody holds any more."),
            slots_leased: set.counter("slots_leased_total", "Slots that were leased."),
            slots_released: set.counter("slots_released_total", "Slots whose lease ended."),
            verbs_failovers: set.counter(
                "verbs_failovers_total",
                "Lanes that broke under a grant here, and whose part went on through another.",
            ),
            verbs_objects: set.gauges(
                "verbs_objects",
                "Objects that the verbs plane holds on RDMA devices, by kind.",
                &["kind"],
            ),
            registry: set.about(node, incarnation),
        };
        metrics.initialise();
        metrics
    }

    /// Makes every combination of labels that can be known.
    fn initialise(&self) {
        for plane in [PlaneKind::Quic, PlaneKind::Shm, PlaneKind::Verbs] {
            self.grants_opened.with_label_values(&[plane_label(plane)]);
            self.plane_writers_refused
                .with_label_values(&[plane_label(plane)]);
        }
        for by in [StoppedBy::Drain, StoppedBy::Fence] {
            self.grants_closed.with_label_values(&[stopped_by(by)]);
        }
        for side in Side::ALL {
            self.links_opened.with_label_values(&[side.label()]);
        }
        for (counter, reasons) in [
            (&self.link_dials_failed, LINK_REFUSALS),
            (&self.links_refused, LINK_REFUSALS),
            (&self.links_closed, LINK_ENDS),
            (&self.sessions_refused, SESSION_REFUSALS),
            (&self.sessions_closed, SESSION_ENDS),
        ] {
            for reason in reasons {
                counter.with_label_values(&[*reason]);
            }
        }
        let tables = [
            ("delivered", &[(0, "none")][..]),
            ("rejected", Rejection::TABLE),
            ("aborted", Abort::TABLE),
            ("failed", Failure::TABLE),
        ];
        for (outcome, table) in tables {
            for (_, reason) in table {
                self.sends_ended.with_label_values(&[outcome, *reason]);
                self.receives_ended.with_label_values(&[outcome, *reason]);
            }
            for histogram in [&self.send_bytes, &self.send_seconds, &self.receive_seconds] {
                histogram.with_label_values(&[outcome]);
            }
        }
        for (_, reason) in Rejection::TABLE {
            self.requests_rejected.with_label_values(&[*reason]);
        }
    }

    /// Counts, and logs, what the machine has seen.
    pub(crate) fn observe(&self, observation: &Observation) {
        match observation {
            Observation::Rejected(reason) => {
                self.rejected(reason);
                info!("request rejected: {reason}");
            }
            Observation::LeaseStarted { slots } => {
                self.leases_started.inc();
                self.slots_leased.inc_by(u64::from(*slots));
            }
            Observation::LeaseEnded { slots } => {
                self.leases_ended.inc();
                self.slots_released.inc_by(u64::from(*slots));
            }
            Observation::SlotsFreed { slots } => self.slots_freed.inc_by(u64::from(*slots)),
            Observation::GrantOpened(plane) => {
                self.grants_opened
                    .with_label_values(&[plane_label(*plane)])
                    .inc();
            }
            Observation::GrantClosed(by) => {
                self.grants_closed
                    .with_label_values(&[stopped_by(*by)])
                    .inc();
            }
            Observation::SendStarted => self.sends_started.inc(),
            Observation::SendEnded(outcome) => ended(&self.sends_ended, outcome),
            Observation::ReceiveEnded(outcome) => ended(&self.receives_ended, outcome),
            Observation::PagesArrived { pages } => self.pages_arrived.inc_by(*pages),
            Observation::PagesVerified { good, corrupt } => {
                self.pages_verified.inc_by(*good);
                self.pages_corrupt.inc_by(*corrupt);
                if *corrupt > 0 {
                    warn!(corrupt, good, "pages arrived corrupt");
                }
            }
            Observation::PagesDropped { pages } => self.pages_dropped.inc_by(*pages),
            Observation::StaleMessage => self.messages_stale.inc(),
        }
    }

    pub(crate) fn rejected(&self, reason: &Rejection) {
        let reason = reason.label();
        self.requests_rejected.with_label_values(&[reason]).inc();
    }

    pub(crate) fn written(&self, bytes: u64) {
        self.bytes_written.inc_by(bytes);
    }

    pub(crate) fn handled(&self, inputs: u64) {
        self.inputs.inc_by(inputs);
    }

    pub(crate) fn invariants_checked(&self) {
        self.invariant_checks.inc();
    }

    pub(crate) fn send_took(&self, outcome: &Outcome, took: Duration, bytes: u64) {
        let outcome = &[outcome.label()];
        let seconds = took.as_secs_f64();
        self.send_seconds
            .with_label_values(outcome)
            .observe(seconds);
        #[expect(
            clippy::cast_precision_loss,
            reason = "a histogram's buckets are far apart"
        )]
        self.send_bytes
            .with_label_values(outcome)
            .observe(bytes as f64);
    }

    pub(crate) fn receive_took(&self, outcome: &Outcome, took: Duration) {
        let seconds = took.as_secs_f64();
        self.receive_seconds
            .with_label_values(&[outcome.label()])
            .observe(seconds);
    }

    pub(crate) fn session_opened(&self) {
        self.sessions_opened.inc();
    }

    pub(crate) fn session_closed(&self, reason: &'static str) {
        self.sessions_closed.with_label_values(&[reason]).inc();
    }

    pub(crate) fn session_refused(&self, reason: &'static str) {
        self.sessions_refused.with_label_values(&[reason]).inc();
    }

    pub(crate) fn link_opened(&self, side: Side) {
        self.links_opened.with_label_values(&[side.label()]).inc();
    }

    pub(crate) fn link_closed(&self, reason: &'static str) {
        self.links_closed.with_label_values(&[reason]).inc();
    }

    pub(crate) fn link_refused(&self, reason: &'static str) {
        self.links_refused.with_label_values(&[reason]).inc();
    }

    pub(crate) fn dial_started(&self) {
        self.link_dials_started.inc();
    }

    pub(crate) fn dial_failed(&self, reason: &'static str) {
        self.link_dials_failed.with_label_values(&[reason]).inc();
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self, gauges: &Gauges) -> String {
        self.links.set(signed(gauges.links as u64));
        self.sessions.set(signed(gauges.sessions as u64));
        for (state, slots) in states(&gauges.usage) {
            self.pool_slots
                .with_label_values(&[state])
                .set(signed(slots));
        }
        for (kind, count) in &gauges.verbs_objects {
            self.verbs_objects
                .with_label_values(&[kind])
                .set(signed(*count));
        }
        catch_up(&self.verbs_failovers, gauges.verbs_failovers);
        for (plane, refused) in gauges.refused {
            let counter = self
                .plane_writers_refused
                .with_label_values(&[plane_label(plane)]);
            catch_up(&counter, refused);
        }
        let text = TextEncoder::new().encode_to_string(&self.registry.gather());
        text.expect("names and labels are of the right form, as the tests see")
    }
}

/// Brings a counter to what was counted elsewhere. It never goes back.
fn catch_up(counter: &IntCounter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

/// Slots by the names that the metrics and the admin page give their states.
pub(crate) fn states(usage: &Usage) -> [(&'static str, u64); 6] {
    [
        ("all", usage.slots),
        ("free", usage.free),
        ("granted", usage.granted),
        ("leased", usage.leased),
        ("pinned", usage.pinned),
        ("quarantined", usage.quarantined),
    ]
}

/// A plane's label.
pub(crate) const fn plane_label(plane: PlaneKind) -> &'static str {
    match plane {
        PlaneKind::Quic => "quic",
        PlaneKind::Shm => "shm",
        PlaneKind::Verbs => "verbs",
    }
}

/// A proof's label.
pub(crate) const fn stopped_by(by: StoppedBy) -> &'static str {
    match by {
        StoppedBy::Drain => "drain",
        StoppedBy::Fence => "fence",
    }
}

fn ended(counter: &IntCounterVec, outcome: &Outcome) {
    let labels = &[outcome.label(), outcome.reason()];
    counter.with_label_values(labels).inc();
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A registry, while it is being filled.
struct Set(Registry);

impl Set {
    fn add<T: Collector + Clone + 'static>(&self, made: prometheus::Result<T>) -> T {
        let metric = made.expect("the name and labels are of the right form");
        let added = self.0.register(Box::new(metric.clone()));
        added.expect("every name is there once");
        metric
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::with_opts(opts(name, help)))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(opts(name, help), labels))
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::with_opts(opts(name, help)))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(opts(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> HistogramVec {
        let opts = HistogramOpts::from(opts(name, help)).buckets(buckets.to_vec());
        self.add(HistogramVec::new(opts, &["outcome"]))
    }

    /// Adds what never changes, and gives the registry.
    fn about(self, node: NodeId, incarnation: Incarnation) -> Registry {
        let build = self.gauges("build_info", "What runs here.", &["version", "node"]);
        let version = env!("CARGO_PKG_VERSION");
        build
            .with_label_values(&[version, &node.to_string()])
            .set(1);
        let life = self.gauge("incarnation", "The daemon's life on its node.");
        life.set(signed(incarnation.as_u64()));
        self.0
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(format!("fabric_{name}"), help)
}

const SECONDS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
];

const BYTES: &[f64] = &[
    65_536.0,
    1_048_576.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
    17_179_869_184.0,
    68_719_476_736.0,
];

const LINK_REFUSALS: &[&str] = &[
    "connection",
    "late",
    "limit",
    "local",
    "malformed",
    "not_listed",
    "not_restarted",
    "stale_incarnation",
    "unreachable",
    "version",
];

const LINK_ENDS: &[&str] = &[
    "left",
    "lost",
    "malformed",
    "misbehaved",
    "shutdown",
    "superseded",
    "too_slow",
];

const SESSION_REFUSALS: &[&str] = &[
    "credentials",
    "late",
    "left",
    "limit",
    "malformed",
    "not_allowed",
];

const SESSION_ENDS: &[&str] = &[
    "left",
    "lost",
    "malformed",
    "memory",
    "misbehaved",
    "pool_ids",
    "shutdown",
    "too_slow",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn gauges() -> Gauges {
        Gauges {
            usage: Usage {
                slots: 9,
                free: 4,
                ..Usage::default()
            },
            links: 2,
            sessions: 1,
            refused: [
                (PlaneKind::Quic, 3),
                (PlaneKind::Shm, 0),
                (PlaneKind::Verbs, 0),
            ],
            verbs_objects: vec![("queue_pair", 16)],
            verbs_failovers: 3,
        }
    }

    fn metrics() -> Metrics {
        Metrics::new(NodeId([0xab; 32]), Incarnation::new(7).unwrap())
    }

    #[test]
    fn every_combination_is_there_from_the_start() {
        let text = metrics().text(&gauges());
        for line in [
            "fabric_requests_rejected_total{reason=\"pool_too_small\"} 0",
            "fabric_sends_ended_total{outcome=\"failed\",reason=\"drain_late\"} 0",
            "fabric_receives_ended_total{outcome=\"delivered\",reason=\"none\"} 0",
            "fabric_grants_closed_total{stopped_by=\"fence\"} 0",
            "fabric_grants_opened_total{plane=\"shm\"} 0",
            "fabric_pool_slots{state=\"free\"} 4",
            "fabric_links 2",
            "fabric_incarnation 7",
            "fabric_plane_writers_refused_total{plane=\"quic\"} 3",
            "fabric_send_duration_seconds_count{outcome=\"aborted\"} 0",
        ] {
            assert!(text.contains(line), "{line} is missing from\n{text}");
        }
    }

    #[test]
    fn observations_are_counted_once_and_refusals_do_not_add_up_at_each_scrape() {
        let metrics = metrics();
        metrics.observe(&Observation::PagesVerified {
            good: 5,
            corrupt: 2,
        });
        metrics.observe(&Observation::SendEnded(Outcome::Aborted(Abort::Source)));
        metrics.text(&gauges());
        let text = metrics.text(&gauges());
        for line in [
            "fabric_pages_verified_total 5",
            "fabric_pages_corrupt_total 2",
            "fabric_sends_ended_total{outcome=\"aborted\",reason=\"source\"} 1",
            "fabric_verbs_failovers_total 3",
            "fabric_plane_writers_refused_total{plane=\"quic\"} 3",
        ] {
            assert!(text.contains(line), "{line} is missing from\n{text}");
        }
    }
}
