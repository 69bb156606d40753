use std::path::Path;

use bytes::Bytes;
use fabric_proto::host::Usage;
use fabric_proto::ids::{GrantId, Tag, TransferId};
use fabric_proto::wire::VERSION;
use quinn::ApplicationClose;

use super::*;
use crate::config::Config;
use crate::driver::EVENTS_MAX;
use crate::plane::Pools;
use crate::store::{Store, init};

/// A daemon's links, and what its machine would be told.
struct Node {
    links: Arc<Links>,
    events: mpsc::Receiver<Event>,
    metrics: Arc<Metrics>,
    node: NodeId,
}

impl Node {
    fn new(identity: Identity, life: u64, peers: &[(NodeId, SocketAddr)]) -> Self {
        let node = identity.node;
        let list = peers.iter().map(|(node, address)| {
            format!("[[peers]]\nname = \"p\"\nnode = \"{node}\"\naddress = \"{address}\"\n")
        });
        let text = format!("planes = [\"quic\"]\n{}", list.collect::<String>());
        let config = Config::parse(&text).unwrap();
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let incarnation = Incarnation::new(life).unwrap();
        let metrics = Arc::new(Metrics::new(node, incarnation));
        let pools = Arc::new(Pools::new());
        let planes = Arc::new(Planes::new(&config, &pools, &sender).unwrap());
        let own = Own {
            incarnation,
            planes: config.planes.clone(),
            shm: None,
            outstanding_bytes_max: 1 << 20,
            silence_max: config.link_silence_max,
            host: Tag([9; 32]),
        };
        let links = Links::new(
            "127.0.0.1:0".parse().unwrap(),
            own,
            identity,
            AllowList::new(&config.peers, node),
            planes,
            sender,
            Arc::clone(&metrics),
        )
        .unwrap();
        tokio::spawn(Arc::clone(&links).accept());
        Self {
            links,
            events,
            metrics,
            node,
        }
    }

    fn address(&self) -> SocketAddr {
        self.links.address().unwrap()
    }

    async fn next(&mut self) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(8), self.events.recv()).await;
        next.expect("the machine is told").unwrap()
    }

    async fn is_up(&mut self, peer: NodeId) -> LinkId {
        match self.next().await {
            Input::LinkUp {
                link, node, planes, ..
            } => {
                assert_eq!((node, planes), (peer, vec![PlaneKind::Quic]));
                link
            }
            other => panic!("expected a link, got {other:?}"),
        }
    }

    async fn is_down(&mut self, link: LinkId) {
        match self.next().await {
            Input::LinkDown { link: got } => assert_eq!(got, link),
            other => panic!("expected its end, got {other:?}"),
        }
    }

    fn is_quiet(&mut self) {
        assert!(
            self.events.try_recv().is_err(),
            "the machine was told nothing more"
        );
    }

    fn counts(&self, line: &str) {
        let text = self.metrics.text(&crate::metrics::Gauges {
            usage: Usage::default(),
            links: self.links.count(),
            sessions: 0,
            refused: [
                (PlaneKind::Quic, 0),
                (PlaneKind::Shm, 0),
                (PlaneKind::Verbs, 0),
            ],
            verbs_objects: Vec::new(),
            verbs_failovers: 0,
        });
        assert!(text.contains(line), "{line} is missing from\n{text}");
    }
}

fn identity(dir: &Path) -> Identity {
    init(dir).unwrap();
    Store::open(dir).unwrap().identity().unwrap()
}

fn identities<const N: usize>() -> ([Identity; N], tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let made = std::array::from_fn(|index| identity(&dir.path().join(index.to_string())));
    (made, dir)
}

fn nowhere() -> SocketAddr {
    "127.0.0.1:9".parse().unwrap()
}

/// A peer that says what it likes.
struct Raw {
    _endpoint: Endpoint,
    connection: Connection,
    stream: SendStream,
    _receive: quinn::RecvStream,
}

impl Raw {
    async fn connect(identity: &Identity, to: &Node) -> Self {
        let crypto = tls::client(identity, to.node).unwrap();
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(Arc::new(transport_config(1 << 20, Duration::from_secs(2))));
        let endpoint = Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let connecting = endpoint.connect_with(config, to.address(), CERTIFICATE_NAME);
        let connection = connecting.unwrap().await.unwrap();
        let (stream, receive) = connection.open_bi().await.unwrap();
        Self {
            _endpoint: endpoint,
            connection,
            stream,
            _receive: receive,
        }
    }

    async fn say(&mut self, message: &PeerMessage) {
        frames::send(&mut self.stream, &message.encode())
            .await
            .unwrap();
    }

    async fn closed(&self) -> (u64, String) {
        let closed = tokio::time::timeout(Duration::from_secs(8), self.connection.closed()).await;
        match closed.expect("the daemon closes the connection") {
            ConnectionError::ApplicationClosed(ApplicationClose { error_code, reason }) => (
                error_code.into_inner(),
                String::from_utf8_lossy(&reason).into(),
            ),
            other => panic!("{other}"),
        }
    }
}

fn hello(version: u32, life: u64) -> PeerMessage {
    PeerMessage::Hello {
        version,
        incarnation: Incarnation::new(life).unwrap(),
        planes: vec![PlaneKind::Quic, PlaneKind::Shm],
        host: Tag([9; 32]),
        shm_path: Bytes::from_static(b"/run/peer.sock"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_link_talk_and_part() {
    let ([left, right], _dir) = identities();
    let (left_id, right_id) = (left.node, right.node);
    let mut right = Node::new(right, 1, &[(left_id, nowhere())]);
    let mut left = Node::new(left, 1, &[(right_id, right.address())]);
    lock(&left.links.dialing).insert(right_id, None);
    left.links.connect(right_id, None);
    left.counts("fabric_link_dials_started_total 0");
    lock(&left.links.dialing).remove(&right_id);
    left.links.connect(right_id, None);
    let (there, back) = (left.is_up(right_id).await, right.is_up(left_id).await);
    left.is_quiet();

    for grant in 0..1000 {
        let grant = GrantId(grant);
        left.links.send(there, &PeerMessage::DrainRequest { grant });
    }
    for want in 0..1000 {
        match right.next().await {
            Input::Peer {
                link,
                message: PeerMessage::DrainRequest { grant },
            } => assert_eq!((link, grant), (back, GrantId(want)), "in order"),
            other => panic!("{other:?}"),
        }
    }
    // What was said last still arrives.
    let transfer = TransferId(7);
    let last = PeerMessage::Cancel {
        transfer,
        drain_follows: false,
    };
    left.links.send(there, &last);
    left.links.close_all(Duration::from_secs(5)).await;
    left.is_down(there).await;
    let Input::Peer { message, .. } = right.next().await else {
        panic!("the last message arrives");
    };
    assert_eq!(message, last);
    right.is_down(back).await;
    left.is_quiet();
    right.is_quiet();
    left.counts("fabric_links_closed_total{reason=\"shutdown\"} 1");
    right.counts("fabric_links_closed_total{reason=\"left\"} 1");
}

// S7: who is not on the list gets nothing, whichever side it is on.
#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_node_is_refused_by_both_sides() {
    let ([known, unknown, impostor], _dir) = identities();
    let (known_id, unknown_id, impostor_id) = (known.node, unknown.node, impostor.node);
    let mut known = Node::new(known, 1, &[]);
    let mut unknown = Node::new(unknown, 1, &[(known_id, known.address())]);
    unknown.links.connect(known_id, None);
    let failed = unknown.next().await;
    assert!(
        matches!(failed, Input::ConnectFailed { node } if node == known_id),
        "{failed:?}"
    );

    // It listens where the known node should be.
    let mut impostor = Node::new(impostor, 1, &[(unknown_id, nowhere())]);
    let ([other], _dir) = identities();
    let mut other = Node::new(other, 1, &[(known_id, impostor.address())]);
    other.links.connect(known_id, None);
    let failed = other.next().await;
    assert!(
        matches!(failed, Input::ConnectFailed { node } if node == known_id),
        "{failed:?}"
    );

    // It is not on our list, so nobody is asked.
    other.links.connect(impostor_id, None);
    let failed = other.next().await;
    assert!(
        matches!(failed, Input::ConnectFailed { node } if node == impostor_id),
        "{failed:?}"
    );
    other.counts("fabric_link_dials_failed_total{reason=\"not_listed\"} 1");
    for node in [&mut known, &mut unknown, &mut impostor, &mut other] {
        node.is_quiet();
        assert_eq!(node.links.count(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_answer_cannot_be_connected_to() {
    let ([left, right], _dir) = identities();
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let right_id = right.node;
    let mut left = Node::new(left, 1, &[(right_id, silent.local_addr().unwrap())]);
    left.links.connect(right_id, None);
    let failed = left.next().await;
    assert!(
        matches!(failed, Input::ConnectFailed { node } if node == right_id),
        "{failed:?}"
    );
    left.counts("fabric_link_dials_failed_total{reason=\"unreachable\"} 1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_hello_is_refused_with_the_reason() {
    let ([left, right], _dir) = identities();
    let mut node = Node::new(left, 1, &[(right.node, nowhere())]);

    let mut raw = Raw::connect(&right, &node).await;
    raw.say(&hello(VERSION + 1, 1)).await;
    let (code, reason) = raw.closed().await;
    assert_eq!(code, Code::Version as u64);
    assert_eq!(
        reason,
        "the peer speaks version 2 of the protocol, and this daemon 1"
    );

    let mut raw = Raw::connect(&right, &node).await;
    let grant = GrantId(1);
    raw.say(&PeerMessage::DrainRequest { grant }).await;
    assert_eq!(raw.closed().await.0, Code::Malformed as u64);

    for garbage in [&[0; 8][..], &[0xff; 8], &[4, 0, 0, 0, 9, 9, 9, 9]] {
        let mut raw = Raw::connect(&right, &node).await;
        raw.stream.write_all(garbage).await.unwrap();
        assert_eq!(raw.closed().await.0, Code::Malformed as u64, "{garbage:?}");
    }
    // Nothing at all, and half a hello.
    let silent = Raw::connect(&right, &node).await;
    let mut slow = Raw::connect(&right, &node).await;
    slow.stream.write_all(&[40, 0, 0, 0, 1]).await.unwrap();
    assert_eq!(slow.closed().await.0, Code::Late as u64);
    assert_eq!(silent.closed().await.0, Code::Late as u64);
    node.is_quiet();
    node.counts("fabric_links_refused_total{reason=\"version\"} 1");
    node.counts("fabric_links_refused_total{reason=\"late\"} 2");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_looks_for_a_later_life_gets_no_second_link_to_the_same() {
    let ([left, right], _dir) = identities();
    let (left_id, right_id) = (left.node, right.node);
    let mut right = Node::new(right, 4, &[(left_id, nowhere())]);
    let mut left = Node::new(left, 1, &[(right_id, right.address())]);
    let life = |value| Some(Incarnation::new(value).unwrap());
    left.links.connect(right_id, life(4));
    let failed = left.next().await;
    assert!(matches!(failed, Input::ConnectFailed { node } if node == right_id));
    left.counts("fabric_link_dials_failed_total{reason=\"not_restarted\"} 1");
    let link = right.is_up(left_id).await;
    right.is_down(link).await;
    left.links.connect(right_id, life(3));
    left.is_up(right_id).await;
}

// S6: an earlier life of a node gets no link once a later one was here.
#[tokio::test(flavor = "multi_thread")]
async fn an_earlier_life_of_a_node_is_refused_and_a_later_one_replaces_it() {
    let ([left, right], _dir) = identities();
    let mut node = Node::new(left, 1, &[(right.node, nowhere())]);
    let mut fifth = Raw::connect(&right, &node).await;
    fifth.say(&hello(VERSION, 5)).await;
    let first_link = node.is_up(right.node).await;

    let mut fourth = Raw::connect(&right, &node).await;
    fourth.say(&hello(VERSION, 4)).await;
    let (code, reason) = fourth.closed().await;
    assert_eq!(code, Code::Stale as u64);
    assert_eq!(
        reason,
        "incarnation 4 of the node is older than 5, which was here before"
    );
    node.is_quiet();

    let mut again = Raw::connect(&right, &node).await;
    again.say(&hello(VERSION, 5)).await;
    let second_link = node.is_up(right.node).await;
    assert_ne!(
        first_link, second_link,
        "a second link of the same life is its own"
    );

    let mut sixth = Raw::connect(&right, &node).await;
    sixth.say(&hello(VERSION, 6)).await;
    let mut down = Vec::new();
    for _ in 0..3 {
        match node.next().await {
            Input::LinkDown { link } => down.push(link),
            Input::LinkUp { incarnation, .. } => assert_eq!(incarnation.as_u64(), 6),
            other => panic!("{other:?}"),
        }
    }
    down.sort_unstable();
    assert_eq!(down, [first_link, second_link]);
    assert_eq!(fifth.closed().await.0, Code::Superseded as u64);
    // A link leaves the registry just after the machine hears of its end.
    let one_is_left = async {
        while node.links.count() != 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(20), one_is_left).await;
    waited.expect("one link is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_breaks_the_protocol_loses_its_link_once() {
    let ([left, right], _dir) = identities();
    let mut node = Node::new(left, 1, &[(right.node, nowhere())]);
    let torn = [40, 0, 0, 0, 1];
    for (garbage, code) in [
        (&[0; 4][..], Code::Malformed),
        (&[0xff; 4], Code::Malformed),
        (&[1, 0, 0, 0, 0xff], Code::Malformed),
        (&torn, Code::Malformed),
        (&[], Code::Goodbye),
    ] {
        let mut raw = Raw::connect(&right, &node).await;
        raw.say(&hello(VERSION, 1)).await;
        let link = node.is_up(right.node).await;
        raw.stream.write_all(garbage).await.unwrap();
        raw.stream.finish().unwrap();
        assert_eq!(raw.closed().await.0, code as u64, "{garbage:?}");
        node.is_down(link).await;
        node.is_quiet();
    }
    let mut raw = Raw::connect(&right, &node).await;
    raw.say(&hello(VERSION, 1)).await;
    let link = node.is_up(right.node).await;
    let reason = fabric_proto::host::Misbehaviour::OutOfPlace;
    node.links.close(link, Closing::Misbehaved(reason));
    node.links.close(link, Closing::ShuttingDown);
    let (code, text) = raw.closed().await;
    assert_eq!(code, Code::Misbehaved as u64);
    assert_eq!(text, "it broke the protocol: a message out of place");
    node.is_down(link).await;
    node.is_quiet();
}
