//! A whole configuration file, from the tables that the parser uses.

use std::fmt::Write;

use super::{
    ABORT, ATTEMPTS, Choice, DRAIN, FLIP, GRACE, LANES, LINK_SILENCE, LISTEN_ADMIN, LISTEN_ENGINES,
    LISTEN_PEERS, LISTEN_SHM, LOG_FORMAT, LOG_LEVEL, Number, OFFER_TTL, OPEN, OUTSTANDING, PLANES,
    SCRUB, SILENCE, STALL, STATE_DIR, VERIFY,
};

const VERBS: &str = r#"
[verbs]
# RDMA devices to use; all of them, if there are none here.
devices = []
# How a peer's device may be let in, the preferred first. "window": to the pages of its grant, for
# as long as that is open. "lane": to the whole pool, and stopped by its own word or with its queue
# pair: for peers that are trusted like this daemon itself. "pull": not at all; this daemon's device
# reads from peers that list "pull" as well, which lets them read what is sent to them from here.
modes = ["window"]
"#;

/// A configuration file with every key, each with what it means, its default, unit and bounds.
///
/// What has no default is commented out.
#[must_use]
pub fn template() -> String {
    let mut text = format!(
        r#"# Configuration of fabric-daemon. Every key is here, with its default; one that is left
# out has it too. What has no default is commented out. An unknown key is an error.
# Check a file with: fabric-daemon check --config FILE

# Where the identity and the incarnation are kept. Made by: fabric-daemon init --state-dir DIR
state_dir = "{STATE_DIR}"

# {about} Each is one of {planes}.
# "shm" is for two pools on one host, and needs listen.shm; "quic" is for any two hosts; "verbs" is
# RDMA, and needs a build with the feature rdma and a device with an active port. It pins every
# pool when its engine registers it: RLIMIT_MEMLOCK must allow that.
planes = ["shm", "quic"]

[listen]
# For peers: QUIC. A UDP address.
peers = "{LISTEN_PEERS}"
# For operators: HTTP with /metrics, /healthz, /readyz and /status. A TCP address.
admin = "{LISTEN_ADMIN}"
# For engines: a Unix socket (mode 0660), at most 107 bytes of path.
engines = "{LISTEN_ENGINES}"
# For the shm plane of daemons on this host: a Unix socket. Left out, there is no shm plane.
# shm = "{LISTEN_SHM}"

# The engines that may connect: none but these.
# [[engines]]
# What the engine calls itself: 1 to 64 printable characters of ASCII.
# name = "prefill-0"
# For whom it may act: names of tenants, or ["*"] for everybody.
# tenants = ["*"]
# The user that its process must run as; left out, any that can open the socket.
# uid = 1000

# The daemons that may connect, and be connected to: none but these.
# [[peers]]
# For people.
# name = "decode-1"
# Its identity, as its own fabric-daemon init prints it: 64 hexadecimal digits.
# node = "{node}"
# Where its listen.peers is reached: an IP address with a port.
# address = "10.0.0.2:7411"

[transfer]
"#,
        about = PLANES.about,
        planes = PLANES.listed(),
        node = "0".repeat(64),
    );
    number(&mut text, &OUTSTANDING);
    number(&mut text, &ATTEMPTS);
    choice(&mut text, &ABORT);
    for key in [&OFFER_TTL, &OPEN, &SILENCE, &DRAIN, &VERIFY] {
        number(&mut text, key);
    }
    text.push_str(VERBS);
    number(&mut text, &LANES);
    text.push_str("\n[link]\n");
    number(&mut text, &LINK_SILENCE);
    text.push_str("\n[scrub]\n");
    choice(&mut text, &SCRUB);
    text.push_str("\n[shutdown]\n");
    number(&mut text, &GRACE);
    text.push_str("\n[log]\n");
    choice(&mut text, &LOG_FORMAT);
    text.push_str("# What is logged: a level, or a filter such as info,fabric_daemon=debug.\n");
    push(&mut text, format_args!("level = \"{LOG_LEVEL}\"\n"));
    text.push_str("\n# Deliberate faults, for tests. Refused unless built with fault-injection.\n");
    text.push_str("# [fault]\n");
    for key in [&FLIP, &STALL] {
        about_number(&mut text, key);
        push(&mut text, format_args!("# {} = 1\n", last(key.key)));
    }
    text
}

fn number(text: &mut String, number: &Number) {
    about_number(text, number);
    push(
        text,
        format_args!("{} = {}\n", last(number.key), number.default),
    );
}

fn about_number(text: &mut String, number: &Number) {
    let Number {
        least,
        most,
        unit,
        about,
        ..
    } = number;
    push(text, format_args!("# {about} {least} to {most} {unit}.\n"));
}

fn choice<T: Copy>(text: &mut String, choice: &Choice<T>) {
    push(
        text,
        format_args!("# {} One of {}.\n", choice.about, choice.listed()),
    );
    push(
        text,
        format_args!("{} = \"{}\"\n", last(choice.key), choice.words[0].0),
    );
}

fn last(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    text.write_fmt(line).expect("a string takes any text");
}
