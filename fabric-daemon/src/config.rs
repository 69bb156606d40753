//! The configuration file: read once, checked once, typed from then on.
//!
//! The file is TOML. An unknown key is an error, and every error names the key, its value and the
//! bound that it breaks. [`template()`] is a whole file with every key, its default and bounds; it
//! is made from the same tables that the parser uses, so the two cannot disagree.

mod raw;
mod template;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fabric_proto::host::{ScrubPolicy, Tenants};
use fabric_proto::ids::{EngineName, NameError, NodeId, TenantId};
use fabric_proto::wire::{AbortPolicy, PlaneKind};
use thiserror::Error;
use tracing_subscriber::EnvFilter;

use crate::plane::{VerbsMode, VerbsSettings};

pub use template::template;

/// Everything that an operator says, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where the identity and the incarnation are kept.
    pub state_dir: PathBuf,
    /// Where the daemon listens.
    pub listen: Listen,
    /// The data planes, the preferred first. Without [`Listen::shm`] there is no `Shm` among them.
    pub planes: Vec<PlaneKind>,
    /// The engines that may connect.
    pub engines: Vec<EngineEntry>,
    /// The daemons that may connect, and be connected to.
    pub peers: Vec<PeerEntry>,
    /// Bounds and deadlines of transfers.
    pub transfer: Transfer,
    /// How long a peer may be silent before its link is down.
    pub link_silence_max: Duration,
    /// When slots are scrubbed.
    pub scrub: ScrubPolicy,
    /// How long a shutdown may take before the process exits all the same.
    pub shutdown_grace: Duration,
    /// What is logged, and how.
    pub log: Log,
    /// The `verbs` plane, if it is among the planes.
    pub verbs: VerbsSettings,
    /// Deliberate faults; none outside of tests.
    pub fault: Fault,
}

/// Where the daemon listens.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listen {
    /// For peers: QUIC over UDP.
    pub peers: SocketAddr,
    /// For operators: HTTP.
    pub admin: SocketAddr,
    /// For engines: a Unix socket.
    pub engines: PathBuf,
    /// For the `shm` plane of daemons on this host: a Unix socket. `None`: no such plane.
    pub shm: Option<PathBuf>,
}

/// An engine that may connect.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EngineEntry {
    /// What it calls itself.
    pub name: EngineName,
    /// For whom it may act.
    pub tenants: Tenants,
    /// The user that its process must run as; `None`: any that can open the socket.
    pub uid: Option<u32>,
}

/// A daemon that may connect, and be connected to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PeerEntry {
    /// For people.
    pub name: String,
    /// Its identity: nothing else is believed.
    pub node: NodeId,
    /// Where it listens.
    pub address: SocketAddr,
}

/// Bounds and deadlines of transfers. See the machine's own configuration for each.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Transfer {
    /// The most bytes outstanding under one grant.
    pub outstanding_bytes_max: u64,
    /// How often pages are sent in all.
    pub attempts_max: u32,
    /// What becomes of a transfer whose lease ends first.
    pub abort: AbortPolicy,
    /// How long an offer may wait.
    pub offer_ttl: Duration,
    /// How long a source waits for a grant.
    pub open_max: Duration,
    /// How long a grant may be silent.
    pub silence_max: Duration,
    /// How long a drain may take before the daemon fences.
    pub drain_max: Duration,
    /// How long an engine may take to verify.
    pub verify_max: Duration,
}

/// What is logged, and how.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Log {
    /// For people or for machines.
    pub format: LogFormat,
    /// A filter of `tracing`, such as `info` or `info,fabric_daemon=debug`. Parses.
    pub level: String,
}

/// How a line of log looks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Deliberate faults. Refused without the feature `fault-injection`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Fault {
    /// How many pages to corrupt on their way out.
    pub flip_pages: Option<u64>,
    /// After how many bytes every writer falls silent.
    pub stall_after_bytes: Option<u64>,
}

impl Fault {
    /// Whether anything is asked for.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.flip_pages.is_some() || self.stall_after_bytes.is_some()
    }
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]: the first thing that is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read {
            path: path.to_owned(),
            error,
        })?;
        Self::parse(&text)
    }

    /// Checks the text of a file.
    ///
    /// # Errors
    ///
    /// [`ConfigError`]: the first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let raw: raw::Config = toml::from_str(text)?;
        let listen = listen(raw.listen)?;
        let planes = planes(raw.planes, listen.shm.is_some())?;
        let transfer = &raw.transfer;
        Ok(Self {
            state_dir: raw.state_dir.unwrap_or_else(|| STATE_DIR.into()),
            listen,
            planes,
            engines: engines(&raw.engines)?,
            peers: peers(raw.peers)?,
            transfer: Transfer {
                outstanding_bytes_max: OUTSTANDING.read(transfer.outstanding_bytes_max)?,
                attempts_max: u32::try_from(ATTEMPTS.read(transfer.attempts_max)?)
                    .expect("the bound is 16"),
                abort: ABORT.read(transfer.abort.as_deref())?,
                offer_ttl: OFFER_TTL.duration(transfer.offer_ttl_ms)?,
                open_max: OPEN.duration(transfer.open_ms)?,
                silence_max: SILENCE.duration(transfer.silence_ms)?,
                drain_max: DRAIN.duration(transfer.drain_ms)?,
                verify_max: VERIFY.duration(transfer.verify_ms)?,
            },
            link_silence_max: LINK_SILENCE.duration(raw.link.silence_ms)?,
            scrub: SCRUB.read(raw.scrub.policy.as_deref())?,
            shutdown_grace: GRACE.duration(raw.shutdown.grace_ms)?,
            log: log(raw.log)?,
            verbs: verbs(raw.verbs)?,
            fault: fault(&raw.fault)?,
        })
    }

    /// The peer of that node.
    #[must_use]
    pub fn peer(&self, node: NodeId) -> Option<&PeerEntry> {
        self.peers.iter().find(|peer| peer.node == node)
    }
}

/// What is wrong with a configuration file.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// A number above its bound.
    #[error("{key}: {got} is above the most allowed, {most}")]
    Above {
        /// The key.
        key: &'static str,
        /// Its value.
        got: i64,
        /// The bound.
        most: u64,
    },
    /// Not an address with a port.
    #[error("{key}: \"{got}\" is not an IP address with a port, such as 10.0.0.2:7411")]
    Address {
        /// The key.
        key: String,
        /// Its value.
        got: String,
    },
    /// A number below its bound.
    #[error("{key}: {got} is below the least allowed, {least}")]
    Below {
        /// The key.
        key: &'static str,
        /// Its value.
        got: i64,
        /// The bound.
        least: u64,
    },
    /// None of the words that are allowed.
    #[error("{key}: \"{got}\" is not one of {want}")]
    Choice {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
        /// The words that are.
        want: String,
    },
    /// A value that must not occur twice.
    #[error("{key}: \"{got}\" is there twice")]
    Duplicate {
        /// The key.
        key: String,
        /// The value.
        got: String,
    },
    /// A list that must not be empty.
    #[error("{key}: the list is empty, and needs at least one entry")]
    Empty {
        /// The key.
        key: String,
    },
    /// A fault, in a daemon that was built without any.
    #[error(
        "{key}: {got} asks for a deliberate fault, and this daemon was built without the feature \
         fault-injection"
    )]
    FaultNotBuilt {
        /// The key.
        key: &'static str,
        /// Its value.
        got: i64,
    },
    /// Not a filter for the log.
    #[error("{key}: \"{got}\" is not a log filter, such as info or info,fabric_daemon=debug")]
    LogFilter {
        /// The key.
        key: &'static str,
        /// Its value.
        got: String,
    },
    /// Not a name.
    #[error("{key}: \"{got}\": {error}")]
    Name {
        /// The key.
        key: String,
        /// Its value.
        got: String,
        /// Why not.
        error: NameError,
    },
    /// Not a node id.
    #[error("{key}: \"{got}\" is not a node id: 64 hexadecimal digits, see fabric-daemon init")]
    Node {
        /// The key.
        key: String,
        /// Its value.
        got: String,
    },
    /// Something that this daemon was built without.
    #[error("{key}: \"{got}\" needs a fabric-daemon that was built with the feature {feature}")]
    NotBuilt {
        /// The key.
        key: &'static str,
        /// Its value.
        got: &'static str,
        /// Of cargo.
        feature: &'static str,
    },
    /// A path that no Unix socket can have.
    #[error("{key}: a path of {got} bytes is above the most allowed for a Unix socket, {most}")]
    SocketPath {
        /// The key.
        key: &'static str,
        /// Its length in bytes.
        got: usize,
        /// The bound.
        most: usize,
    },
    /// The file cannot be read.
    #[error("read {}: {error}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// Not TOML, a key that does not exist, or a value of the wrong type. The text has the line.
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
}

/// A key with a number: all that is to be known about it, in one place.
struct Number {
    key: &'static str,
    default: u64,
    least: u64,
    most: u64,
    unit: &'static str,
    about: &'static str,
}

impl Number {
    fn read(&self, value: Option<i64>) -> Result<u64, ConfigError> {
        let Some(got) = value else {
            return Ok(self.default);
        };
        let (key, least, most) = (self.key, self.least, self.most);
        match u64::try_from(got) {
            Ok(value) if value > most => Err(ConfigError::Above { key, got, most }),
            Ok(value) if value >= least => Ok(value),
            _ => Err(ConfigError::Below { key, got, least }),
        }
    }

    fn duration(&self, value: Option<i64>) -> Result<Duration, ConfigError> {
        self.read(value).map(Duration::from_millis)
    }
}

/// A key with one of a few words, the default first.
struct Choice<T: 'static> {
    key: &'static str,
    words: &'static [(&'static str, T)],
    about: &'static str,
}

impl<T: Copy> Choice<T> {
    fn read(&self, value: Option<&str>) -> Result<T, ConfigError> {
        let Some(got) = value else {
            return Ok(self.words[0].1);
        };
        let found = self.words.iter().find(|(word, _)| *word == got);
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| ConfigError::Choice {
                key: self.key,
                got: got.into(),
                want: self.listed(),
            })
    }

    fn listed(&self) -> String {
        let words: Vec<_> = self
            .words
            .iter()
            .map(|(word, _)| format!("\"{word}\""))
            .collect();
        words.join(", ")
    }
}

fn listen(raw: raw::Listen) -> Result<Listen, ConfigError> {
    let engines = raw.engines.unwrap_or_else(|| LISTEN_ENGINES.into());
    Ok(Listen {
        peers: address("listen.peers", raw.peers.as_deref().unwrap_or(LISTEN_PEERS))?,
        admin: address("listen.admin", raw.admin.as_deref().unwrap_or(LISTEN_ADMIN))?,
        engines: socket_path("listen.engines", engines)?,
        shm: raw
            .shm
            .map(|path| socket_path("listen.shm", path))
            .transpose()?,
    })
}

fn address(key: &str, got: &str) -> Result<SocketAddr, ConfigError> {
    got.parse().map_err(|_| ConfigError::Address {
        key: key.into(),
        got: got.into(),
    })
}

fn socket_path(key: &'static str, path: PathBuf) -> Result<PathBuf, ConfigError> {
    // Peers are told the path, and may run elsewhere.
    let path = std::path::absolute(&path).unwrap_or(path);
    let (got, most) = (path.as_os_str().len(), SOCKET_PATH_BYTES_MAX);
    if got > most {
        return Err(ConfigError::SocketPath { key, got, most });
    }
    Ok(path)
}

fn planes(raw: Option<Vec<String>>, has_shm: bool) -> Result<Vec<PlaneKind>, ConfigError> {
    let mut planes = list(&PLANES, raw, &[PlaneKind::Shm, PlaneKind::Quic])?;
    if planes.contains(&PlaneKind::Verbs) && !cfg!(feature = "rdma") {
        return Err(ConfigError::NotBuilt {
            key: PLANES.key,
            got: "verbs",
            feature: "rdma",
        });
    }
    planes.retain(|plane| *plane != PlaneKind::Shm || has_shm);
    Ok(planes)
}

/// A list of words, none of them twice.
fn list<T: Copy + PartialEq>(
    choice: &Choice<T>,
    raw: Option<Vec<String>>,
    default: &[T],
) -> Result<Vec<T>, ConfigError> {
    let Some(words) = raw else {
        return Ok(default.to_vec());
    };
    let mut values = Vec::new();
    for word in &words {
        let value = choice.read(Some(word))?;
        if values.contains(&value) {
            return Err(ConfigError::Duplicate {
                key: choice.key.into(),
                got: word.clone(),
            });
        }
        values.push(value);
    }
    if values.is_empty() {
        return Err(ConfigError::Empty {
            key: choice.key.into(),
        });
    }
    Ok(values)
}

fn verbs(raw: raw::Verbs) -> Result<VerbsSettings, ConfigError> {
    let lanes = LANES.read(raw.lanes)?;
    Ok(VerbsSettings {
        devices: raw.devices.unwrap_or_default(),
        modes: list(&MODES, raw.modes, &[VerbsMode::Window])?,
        lanes: usize::try_from(lanes).expect("the bound is small"),
    })
}

fn engines(raw: &[raw::Engine]) -> Result<Vec<EngineEntry>, ConfigError> {
    let mut names = BTreeSet::new();
    let mut entries = Vec::with_capacity(raw.len());
    for (index, engine) in raw.iter().enumerate() {
        let key = format!("engines[{index}].name");
        let name = EngineName::new(&engine.name).map_err(|error| ConfigError::Name {
            key: key.clone(),
            got: engine.name.clone(),
            error,
        })?;
        if !names.insert(name.clone()) {
            return Err(ConfigError::Duplicate {
                key,
                got: engine.name.clone(),
            });
        }
        entries.push(EngineEntry {
            name,
            tenants: tenants(&format!("engines[{index}].tenants"), &engine.tenants)?,
            uid: engine.uid,
        });
    }
    Ok(entries)
}

fn tenants(key: &str, raw: &[String]) -> Result<Tenants, ConfigError> {
    if raw.is_empty() {
        return Err(ConfigError::Empty { key: key.into() });
    }
    if raw == ["*"] {
        return Ok(Tenants::Any);
    }
    let mut tenants = Vec::with_capacity(raw.len());
    for name in raw {
        let tenant = TenantId::new(name).map_err(|error| ConfigError::Name {
            key: key.into(),
            got: name.clone(),
            error,
        })?;
        if tenants.contains(&tenant) {
            return Err(ConfigError::Duplicate {
                key: key.into(),
                got: name.clone(),
            });
        }
        tenants.push(tenant);
    }
    Ok(Tenants::Only(tenants))
}

fn peers(raw: Vec<raw::Peer>) -> Result<Vec<PeerEntry>, ConfigError> {
    let mut nodes = BTreeSet::new();
    let mut entries = Vec::with_capacity(raw.len());
    for (index, peer) in raw.into_iter().enumerate() {
        let key = format!("peers[{index}].node");
        let Some(node) = node(&peer.node) else {
            return Err(ConfigError::Node {
                key,
                got: peer.node,
            });
        };
        if !nodes.insert(node) {
            return Err(ConfigError::Duplicate {
                key,
                got: peer.node,
            });
        }
        entries.push(PeerEntry {
            name: peer.name,
            node,
            address: address(&format!("peers[{index}].address"), &peer.address)?,
        });
    }
    Ok(entries)
}

fn node(text: &str) -> Option<NodeId> {
    let mut id = [0; 32];
    hex::decode_to_slice(text, &mut id).ok()?;
    Some(NodeId(id))
}

fn log(raw: raw::Log) -> Result<Log, ConfigError> {
    let level = raw.level.unwrap_or_else(|| LOG_LEVEL.into());
    if level.is_empty() || EnvFilter::try_new(&level).is_err() {
        return Err(ConfigError::LogFilter {
            key: "log.level",
            got: level,
        });
    }
    Ok(Log {
        format: LOG_FORMAT.read(raw.format.as_deref())?,
        level,
    })
}

fn fault(raw: &raw::Fault) -> Result<Fault, ConfigError> {
    for (number, value) in [(&FLIP, raw.flip_pages), (&STALL, raw.stall_after_bytes)] {
        if let Some(got) = value
            && cfg!(not(feature = "fault-injection"))
        {
            return Err(ConfigError::FaultNotBuilt {
                key: number.key,
                got,
            });
        }
    }
    let read = |number: &Number, value: Option<i64>| {
        value.map(|value| number.read(Some(value))).transpose()
    };
    Ok(Fault {
        flip_pages: read(&FLIP, raw.flip_pages)?,
        stall_after_bytes: read(&STALL, raw.stall_after_bytes)?,
    })
}

const STATE_DIR: &str = "/var/lib/fabric";
const LISTEN_PEERS: &str = "0.0.0.0:7411";
const LISTEN_ADMIN: &str = "127.0.0.1:9411";
const LISTEN_ENGINES: &str = "/run/fabric/engine.sock";
const LISTEN_SHM: &str = "/run/fabric/shm.sock";
const LOG_LEVEL: &str = "info";

/// M: unix(7): `sun_path` has 108 bytes, the last of which is a zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

const PLANES: Choice<PlaneKind> = Choice {
    key: "planes",
    words: &[
        ("shm", PlaneKind::Shm),
        ("quic", PlaneKind::Quic),
        ("verbs", PlaneKind::Verbs),
    ],
    about: "Data planes, the preferred first.",
};

const MODES: Choice<VerbsMode> = Choice {
    key: "verbs.modes",
    words: &[
        ("window", VerbsMode::Window),
        ("lane", VerbsMode::Lane),
        ("pull", VerbsMode::Pull),
    ],
    about: "How a peer's device may be let in, the preferred first.",
};

const LANES: Number = Number {
    key: "verbs.lanes",
    default: 8,
    least: 1,
    most: 256,
    unit: "queue pairs",
    about: "How many transfers from one peer may write at a time, and so queue pairs for a port.",
};

const ABORT: Choice<AbortPolicy> = Choice {
    key: "transfer.abort",
    words: &[
        ("finish-transfer", AbortPolicy::FinishTransfer),
        ("drain-now", AbortPolicy::DrainNow),
    ],
    about: "What becomes of a transfer whose lease ends first.",
};

const SCRUB: Choice<ScrubPolicy> = Choice {
    key: "scrub.policy",
    words: &[
        ("cross-tenant", ScrubPolicy::CrossTenant),
        ("always", ScrubPolicy::Always),
        ("never", ScrubPolicy::Never),
    ],
    about: "Before which leases a slot is overwritten with zeros.",
};

const LOG_FORMAT: Choice<LogFormat> = Choice {
    key: "log.format",
    words: &[("text", LogFormat::Text), ("json", LogFormat::Json)],
    about: "How a line of log looks.",
};

const OUTSTANDING: Number = Number {
    key: "transfer.outstanding_bytes_max",
    default: 8 << 20,
    least: 64 << 10,
    most: 1 << 30,
    unit: "bytes",
    about: "Most bytes outstanding under one grant; they bound how long a drain takes.",
};

const ATTEMPTS: Number = Number {
    key: "transfer.attempts_max",
    default: 3,
    least: 1,
    most: fabric_proto::limits::ATTEMPTS_MAX as u64,
    unit: "attempts",
    about: "How often pages are sent in all before a corrupt one fails the transfer.",
};

const OFFER_TTL: Number = Number {
    key: "transfer.offer_ttl_ms",
    default: 30_000,
    least: 10,
    most: 3_600_000,
    unit: "ms",
    about: "How long an offer may wait to be used.",
};

const OPEN: Number = Number {
    key: "transfer.open_ms",
    default: 4_000,
    least: 10,
    most: 600_000,
    unit: "ms",
    about: "How long a source waits for a link and a grant.",
};

const SILENCE: Number = Number {
    key: "transfer.silence_ms",
    default: 30_000,
    least: 10,
    most: 3_600_000,
    unit: "ms",
    about: "How long an open grant may be silent before it is fenced.",
};

const DRAIN: Number = Number {
    key: "transfer.drain_ms",
    default: 1_000,
    least: 10,
    most: 600_000,
    unit: "ms",
    about: "How long a drain, or the commit beside it, may take before the grant is fenced.",
};

const VERIFY: Number = Number {
    key: "transfer.verify_ms",
    default: 60_000,
    least: 10,
    most: 3_600_000,
    unit: "ms",
    about: "How long an engine may take to verify what arrived.",
};

const LINK_SILENCE: Number = Number {
    key: "link.silence_ms",
    default: 2_500,
    least: 100,
    most: 600_000,
    unit: "ms",
    about: "How long a peer may be silent before its link is down; the lesser of both ends counts.",
};

const GRACE: Number = Number {
    key: "shutdown.grace_ms",
    default: 5_000,
    least: 0,
    most: 600_000,
    unit: "ms",
    about: "How long a shutdown may take; after it the process exits with 1 all the same.",
};

const FLIP: Number = Number {
    key: "fault.flip_pages",
    default: 0,
    least: 0,
    most: 1 << 32,
    unit: "pages",
    about: "Flip a bit in this many pages, as they are moved (over shm, by the destination).",
};

const STALL: Number = Number {
    key: "fault.stall_after_bytes",
    default: 0,
    least: 0,
    most: 1 << 50,
    unit: "bytes",
    about: "Every writer falls silent after this many bytes, without a drain.",
};

#[cfg(test)]
mod tests;
