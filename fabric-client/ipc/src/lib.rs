//! The Unix side of a Fabric session, shared by the daemon and the client SDK.
//!
//! - [`memory`]: sealed memory files, and the check that a descriptor received is one;
//! - [`mapping`]: bounds-checked access to such a file, the only `unsafe` here;
//! - [`checksum`]: CRC-32C, which every page carries;
//! - [`frame`]: length-prefixed messages with descriptors, over a Unix socket.

#![deny(unsafe_code)]

pub mod checksum;
pub mod frame;
#[expect(
    unsafe_code,
    reason = "memory that other processes map has no safe view"
)]
pub mod mapping;
pub mod memory;

pub use checksum::{Crc32c, crc32c};
pub use frame::{
    Connection, FRAME_BYTES_MAX, FRAME_FDS_MAX, Frame, FrameError, FrameReader, FrameWriter,
    PeerCredentials, SendError, peer_credentials,
};
pub use mapping::{Mapping, MappingError, Prefault};
pub use memory::{MemoryError, check_sealed, create_sealed};
