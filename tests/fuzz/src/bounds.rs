//! What must hold of anything that was decoded, said again from `fabric_proto::limits` alone.

use fabric_proto::limits;
use fabric_proto::pool::{PageRun, PoolSpec};
use fabric_proto::wire::{Checksums, PeerMessage, ToDaemon, ToEngine};

pub(crate) fn to_daemon(message: &ToDaemon) {
    match message {
        ToDaemon::Hello { name: engine, .. } => name(engine.as_str()),
        ToDaemon::RegisterPool { spec, .. } => pool(spec),
        ToDaemon::Lease {
            tenant,
            request,
            named,
            ..
        } => {
            name(tenant.as_str());
            name(request.as_str());
            assert!(named.len() <= limits::LEASE_SLOTS_MAX as usize);
        }
        ToDaemon::Send { offer, .. } => assert!(offer.len() <= limits::OFFER_BYTES_MAX),
        ToDaemon::Seal { checksums: of, .. } => checksums(of),
        ToDaemon::Finish { payload, .. } => assert!(payload.len() <= limits::PAYLOAD_BYTES_MAX),
        ToDaemon::EndLease { .. } | ToDaemon::AbortSend { .. } | ToDaemon::Verified { .. } => {}
    }
}

pub(crate) fn to_engine(message: &ToEngine) {
    match message {
        ToEngine::Leased { slots, offer, .. } => {
            assert!(slots.len() <= limits::LEASE_SLOTS_MAX as usize);
            let offer_bytes = offer.as_ref().map_or(0, bytes::Bytes::len);
            assert!(offer_bytes <= limits::OFFER_BYTES_MAX);
        }
        ToEngine::Expect { checksums: of, .. } => checksums(of),
        ToEngine::Verify { pages, payload, .. } => {
            runs(pages);
            assert!(payload.len() <= limits::PAYLOAD_BYTES_MAX);
        }
        ToEngine::Welcome { .. }
        | ToEngine::Rejected { .. }
        | ToEngine::PoolRegistered { .. }
        | ToEngine::SendOpened { .. }
        | ToEngine::SendOutcome { .. }
        | ToEngine::LeaseOutcome { .. } => {}
    }
}

pub(crate) fn peer_message(message: &PeerMessage) {
    match message {
        PeerMessage::Hello {
            planes, shm_path, ..
        } => {
            assert!(planes.len() <= 8, "a handful of planes");
            assert!(shm_path.len() <= 108, "a path that a socket can have");
        }
        PeerMessage::Open { offer, tenant, .. } => {
            assert!(offer.len() <= limits::OFFER_BYTES_MAX);
            name(tenant.as_str());
        }
        PeerMessage::Granted { slots, pages, .. } => {
            assert!(slots.len() <= limits::LEASE_SLOTS_MAX as usize);
            runs(pages);
        }
        PeerMessage::Checksums { checksums: of, .. } => checksums(of),
        PeerMessage::Commit { payload, .. } => assert!(payload.len() <= limits::PAYLOAD_BYTES_MAX),
        PeerMessage::Refused { .. }
        | PeerMessage::Cancel { .. }
        | PeerMessage::DrainRequest { .. }
        | PeerMessage::Verdict { .. } => {}
    }
}

/// A name is short, and cannot disturb a log line.
pub(crate) fn name(name: &str) {
    assert!((1..=limits::NAME_BYTES_MAX).contains(&name.len()));
    assert!(name.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
}

/// Where a pool passes its check, no size of it overflows and every page is inside.
fn pool(spec: &PoolSpec) {
    if spec.check().is_err() {
        return;
    }
    assert!(spec.slots <= limits::POOL_SLOTS_MAX);
    assert!(spec.layout.regions <= limits::REGIONS_MAX);
    assert!(spec.layout.page_bytes <= limits::PAGE_BYTES_MAX);
    let last = spec.page_offset(spec.layout.regions - 1, spec.slots - 1);
    assert_eq!(last + u64::from(spec.layout.page_bytes), spec.bytes());
    let context_slots = spec.slots_for(spec.context_tokens);
    assert!(
        context_slots <= u64::from(spec.slots),
        "S9: the context fits"
    );
}

fn checksums(checksums: &Checksums) {
    assert!((1..=limits::CHECKSUMS_PER_MESSAGE_MAX).contains(&checksums.crcs.len()));
    runs(&[checksums.run()]);
}

fn runs(runs: &[PageRun]) {
    for run in runs {
        assert!(run.count > 0, "no run is empty");
        assert!(run.first.checked_add(run.count).is_some(), "a run ends");
    }
}
