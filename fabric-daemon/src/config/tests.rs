use super::*;

fn error(text: &str) -> String {
    Config::parse(text).unwrap_err().to_string()
}

#[test]
fn an_empty_file_has_every_default() {
    let config = Config::parse("").unwrap();
    assert_eq!(config.state_dir, Path::new("/var/lib/fabric"));
    assert_eq!(config.listen.peers, "0.0.0.0:7411".parse().unwrap());
    assert_eq!(config.listen.shm, None);
    assert_eq!(
        config.planes,
        [PlaneKind::Quic],
        "no shm plane without a socket for it"
    );
    assert_eq!(config.transfer.outstanding_bytes_max, 8 << 20);
    assert_eq!(config.transfer.attempts_max, 3);
    assert_eq!(config.transfer.abort, AbortPolicy::FinishTransfer);
    assert_eq!(config.transfer.drain_max, Duration::from_secs(1));
    assert_eq!(config.link_silence_max, Duration::from_millis(2500));
    assert_eq!(config.scrub, ScrubPolicy::CrossTenant);
    assert_eq!(config.shutdown_grace, Duration::from_secs(5));
    assert!(!config.fault.is_any());
}

#[test]
fn the_template_is_the_defaults() {
    let (template, empty) = (Config::parse(&template()), Config::parse(""));
    assert_eq!(
        format!("{:?}", template.unwrap()),
        format!("{:?}", empty.unwrap())
    );
}

#[test]
fn the_template_has_every_key_and_its_comments_parse_too() {
    let template = template();
    let (head, fault) = template.split_once("# [fault]").unwrap();
    let mut text = String::new();
    for line in head.lines() {
        let bare = line.strip_prefix("# ").unwrap_or(line);
        let is_key = bare.starts_with("[[") || bare.split_once(" = ").is_some();
        text.push_str(if is_key { bare } else { line });
        text.push('\n');
    }
    let config = Config::parse(&text).unwrap();
    assert_eq!(config.engines.len(), 1);
    assert_eq!(config.engines[0].tenants, Tenants::Any);
    assert_eq!(config.engines[0].uid, Some(1000));
    assert_eq!(config.peers.len(), 1);
    assert_eq!(config.planes, [PlaneKind::Shm, PlaneKind::Quic]);
    assert!(fault.contains("flip_pages = 1") && fault.contains("stall_after_bytes = 1"));
    assert!(template.lines().all(|line| line.len() <= 120));
}

#[test]
fn modes_of_the_verbs_plane_keep_their_order() {
    let config = Config::parse("[verbs]\nmodes = [\"pull\", \"window\", \"lane\"]").unwrap();
    let modes = [VerbsMode::Pull, VerbsMode::Window, VerbsMode::Lane];
    assert_eq!(config.verbs.modes, modes);
    assert_eq!(
        error("[verbs]\nmodes = [\"push\"]"),
        "verbs.modes: \"push\" is not one of \"window\", \"lane\", \"pull\""
    );
}

#[test]
fn a_number_outside_its_bounds_is_named_with_them() {
    assert_eq!(
        error("[transfer]\noutstanding_bytes_max = 12"),
        "transfer.outstanding_bytes_max: 12 is below the least allowed, 65536"
    );
    assert_eq!(
        error("[transfer]\nattempts_max = 17"),
        "transfer.attempts_max: 17 is above the most allowed, 16"
    );
    assert_eq!(
        error("[shutdown]\ngrace_ms = -1"),
        "shutdown.grace_ms: -1 is below the least allowed, 0"
    );
    assert_eq!(
        error("[transfer]\nverify_ms = 9"),
        "transfer.verify_ms: 9 is below the least allowed, 10"
    );
}

#[test]
fn a_word_that_is_none_of_the_choices_is_named_with_them() {
    assert_eq!(
        error("[scrub]\npolicy = \"sometimes\""),
        "scrub.policy: \"sometimes\" is not one of \"cross-tenant\", \"always\", \"never\""
    );
    assert_eq!(
        error("planes = [\"rdma\"]"),
        "planes: \"rdma\" is not one of \"shm\", \"quic\", \"verbs\""
    );
    assert_eq!(
        error("[transfer]\nabort = \"no\""),
        "transfer.abort: \"no\" is not one of \"finish-transfer\", \"drain-now\""
    );
    assert_eq!(
        error("[log]\nformat = \"xml\""),
        "log.format: \"xml\" is not one of \"text\", \"json\""
    );
}

#[test]
fn lists_are_checked_entry_by_entry() {
    assert_eq!(
        error("planes = []"),
        "planes: the list is empty, and needs at least one entry"
    );
    assert_eq!(
        error("planes = [\"quic\", \"quic\"]"),
        "planes: \"quic\" is there twice"
    );
    assert_eq!(
        error("[[engines]]\nname = \"a\"\ntenants = []"),
        "engines[0].tenants: the list is empty, and needs at least one entry"
    );
    assert_eq!(
        error("[[engines]]\nname = \"\"\ntenants = [\"*\"]"),
        "engines[0].name: \"\": a name has 0 bytes, and 1 to 64 are allowed"
    );
    let twice = "[[engines]]\nname = \"a\"\ntenants = [\"*\"]\n".repeat(2);
    assert_eq!(error(&twice), "engines[1].name: \"a\" is there twice");
    assert_eq!(
        error("[[peers]]\nname = \"b\"\nnode = \"12\"\naddress = \"1.2.3.4:5\""),
        "peers[0].node: \"12\" is not a node id: 64 hexadecimal digits, see fabric-daemon init"
    );
    let node = "ab".repeat(32);
    assert_eq!(
        error(&format!(
            "[[peers]]\nname = \"b\"\nnode = \"{node}\"\naddress = \"b:5\""
        )),
        "peers[0].address: \"b:5\" is not an IP address with a port, such as 10.0.0.2:7411"
    );
    let peer = format!("[[peers]]\nname = \"b\"\nnode = \"{node}\"\naddress = \"1.2.3.4:5\"\n");
    assert_eq!(
        error(&peer.repeat(2)),
        format!("peers[1].node: \"{node}\" is there twice")
    );
}

#[test]
fn addresses_paths_and_filters_are_checked() {
    assert_eq!(
        error("[listen]\npeers = \"7411\""),
        "listen.peers: \"7411\" is not an IP address with a port, such as 10.0.0.2:7411"
    );
    assert_eq!(
        error(&format!("[listen]\nshm = \"/{}\"", "x".repeat(107))),
        "listen.shm: a path of 108 bytes is above the most allowed for a Unix socket, 107"
    );
    assert_eq!(
        error("[log]\nlevel = \"a=b=c\""),
        "log.level: \"a=b=c\" is not a log filter, such as info or info,fabric_daemon=debug"
    );
}

#[test]
fn an_unknown_key_or_a_wrong_type_is_named_with_its_line() {
    let unknown = error("[transfer]\ndrain = 5");
    assert!(
        unknown.contains("line 2") && unknown.contains("unknown field `drain`"),
        "{unknown}"
    );
    let typed = error("[transfer]\ndrain_ms = \"5\"");
    assert!(
        typed.contains("line 2") && typed.contains("invalid type"),
        "{typed}"
    );
    let missing = error("[[engines]]\nname = \"a\"");
    assert!(missing.contains("missing field `tenants`"), "{missing}");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Config::load(Path::new("/nonexistent/fabric.toml")).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("read /nonexistent/fabric.toml: "),
        "{error}"
    );
}

#[test]
#[cfg(not(feature = "fault-injection"))]
fn a_fault_is_refused_by_a_daemon_without_faults() {
    assert_eq!(
        error("[fault]\nflip_pages = 3"),
        "fault.flip_pages: 3 asks for a deliberate fault, and this daemon was built without the \
         feature fault-injection"
    );
    assert!(error("[fault]\nstall_after_bytes = 0").starts_with("fault.stall_after_bytes: 0 "));
}

#[test]
#[cfg(feature = "fault-injection")]
fn a_fault_is_taken_by_a_daemon_with_faults() {
    let config = Config::parse("[fault]\nflip_pages = 3").unwrap();
    assert_eq!(config.fault.flip_pages, Some(3));
    assert!(config.fault.is_any());
}
