//! The file as it is written: optional everywhere, nothing checked but names and types.

use std::path::PathBuf;

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Config {
    pub(super) state_dir: Option<PathBuf>,
    pub(super) planes: Option<Vec<String>>,
    pub(super) listen: Listen,
    pub(super) engines: Vec<Engine>,
    pub(super) peers: Vec<Peer>,
    pub(super) transfer: Transfer,
    pub(super) link: Link,
    pub(super) scrub: Scrub,
    pub(super) shutdown: Shutdown,
    pub(super) log: Log,
    pub(super) fault: Fault,
    pub(super) verbs: Verbs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Verbs {
    pub(super) devices: Option<Vec<String>>,
    pub(super) modes: Option<Vec<String>>,
    pub(super) lanes: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Listen {
    pub(super) peers: Option<String>,
    pub(super) admin: Option<String>,
    pub(super) engines: Option<PathBuf>,
    pub(super) shm: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Engine {
    pub(super) name: String,
    pub(super) tenants: Vec<String>,
    pub(super) uid: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) address: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Transfer {
    pub(super) outstanding_bytes_max: Option<i64>,
    pub(super) attempts_max: Option<i64>,
    pub(super) abort: Option<String>,
    pub(super) offer_ttl_ms: Option<i64>,
    pub(super) open_ms: Option<i64>,
    pub(super) silence_ms: Option<i64>,
    pub(super) drain_ms: Option<i64>,
    pub(super) verify_ms: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Link {
    pub(super) silence_ms: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Scrub {
    pub(super) policy: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Shutdown {
    pub(super) grace_ms: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Log {
    pub(super) format: Option<String>,
    pub(super) level: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Fault {
    pub(super) flip_pages: Option<i64>,
    pub(super) stall_after_bytes: Option<i64>,
}
