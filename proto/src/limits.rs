//! Every bound of the protocol. Reaching one is a defined outcome, never a surprise.

/// Longest tenant, request or engine name.
pub const NAME_BYTES_MAX: usize = 64;

/// Longest control message, either socket. A claimed length above it closes the connection.
pub const MESSAGE_BYTES_MAX: usize = 2 << 20;

/// Most slots of one pool.
pub const POOL_SLOTS_MAX: u32 = 1 << 24;

/// Most slots of one lease: a context of 1,048,576 tokens at 16 tokens a slot.
pub const LEASE_SLOTS_MAX: u32 = 1 << 16;

/// Most regions of a pool.
pub const REGIONS_MAX: u16 = 1024;

/// Most pages of one lease. At four bytes of checksum each, 32 MiB on either daemon.
pub const LEASE_PAGES_MAX: u64 = 1 << 23;

/// Largest page.
pub const PAGE_BYTES_MAX: u32 = 64 << 20;

/// Most checksums in one message, so that a long lease never needs a long message.
pub const CHECKSUMS_PER_MESSAGE_MAX: usize = 1 << 14;

/// Most corrupt pages that are sent again; above it the transfer fails.
pub const RESEND_PAGES_MAX: usize = 1 << 14;

/// Most times that a transfer's pages are sent in all, whatever its destination asks for: its
/// source's slots are held as long.
pub const ATTEMPTS_MAX: u32 = 16;

/// Longest engine payload of a transfer.
pub const PAYLOAD_BYTES_MAX: usize = 64 << 10;

/// Longest offer.
pub const OFFER_BYTES_MAX: usize = 1024;

/// Most engines of one daemon at a time.
pub const ENGINES_MAX: usize = 256;

/// Most pools of one engine.
pub const POOLS_PER_ENGINE_MAX: usize = 16;

/// Most leases of one engine at a time.
pub const LEASES_PER_ENGINE_MAX: usize = 1 << 16;

/// Most transfers that one daemon sends at a time.
pub const TRANSFERS_MAX: usize = 1 << 14;

/// Most links of one daemon at a time.
pub const LINKS_MAX: usize = 1024;

const _: () = assert!(CHECKSUMS_PER_MESSAGE_MAX * 5 < MESSAGE_BYTES_MAX);
// A slot ref is at most 5 + 10 bytes on the wire; a page ref 5 + 3.
const _: () = assert!((LEASE_SLOTS_MAX as usize) * 15 + (RESEND_PAGES_MAX) * 8 < MESSAGE_BYTES_MAX);
const _: () = assert!(PAYLOAD_BYTES_MAX * 2 < MESSAGE_BYTES_MAX);
