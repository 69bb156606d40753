//! Names for everything that crosses a boundary. One newtype each, so that no two can be swapped.

use alloc::sync::Arc;
use core::fmt;
use core::num::NonZeroU64;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// An engine's session with its local daemon. Never used twice within one incarnation.
    EngineId(u64)
);
id!(
    /// A permission for one remote writer, given by the destination daemon.
    GrantId(u64)
);
id!(
    /// A request's right to a set of slots in one pool.
    LeaseId(u64)
);
id!(
    /// One connection to a peer daemon. A peer that reconnects gets a new one, so nothing that was
    /// said on the old connection can be taken for something said on the new.
    LinkId(u64)
);
id!(
    /// A registered pool. Never used twice within one incarnation.
    PoolId(u32)
);
id!(
    /// An engine's own number for one of its requests to the daemon; the reply carries it back.
    RequestSeq(u64)
);
id!(
    /// The index of a slot in its pool.
    SlotIndex(u32)
);
id!(
    /// A transfer, as its source daemon counts it.
    TransferId(u64)
);

impl LinkId {
    /// The link of a daemon to itself: both engines on one host.
    pub const LOOPBACK: Self = Self(0);
}

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub struct $name(NonZeroU64);

        impl $name {
            /// Wraps `value`, which must not be 0: 0 never names anything, so that a zeroed field
            /// on the wire is refused instead of matching.
            #[must_use]
            pub const fn new(value: u64) -> Option<Self> {
                match NonZeroU64::new(value) {
                    Some(value) => Some(Self(value)),
                    None => None,
                }
            }

            /// The plain number.
            #[must_use]
            pub const fn as_u64(self) -> u64 {
                self.0.get()
            }

            /// The next one up, or `None` at the end of the range: it never wraps.
            // S6: neither counter can go down.
            #[must_use]
            pub fn checked_next(self) -> Option<Self> {
                self.0.checked_add(1).map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter!(
    /// A slot's count of leases. Goes up by one each time that the slot is leased.
    Epoch
);
counter!(
    /// A daemon's life on its node. Persisted, strictly greater at every start.
    Incarnation
);

impl Epoch {
    /// The epoch before the first lease of any slot of a daemon in this incarnation.
    ///
    /// The incarnation is the upper half, so that an epoch of a later life is greater than every
    /// epoch of an earlier one without a write to disk for each lease. `None` once the incarnation
    /// does not fit in 32 bits: at a start a second that takes 136 years.
    // S6: epochs never go down, across any crash.
    #[must_use]
    pub fn base(incarnation: Incarnation) -> Option<Self> {
        let upper = u32::try_from(incarnation.as_u64()).ok()?;
        Self::new(u64::from(upper) << 32)
    }
}

/// The only way that a slot is named on any wire: an index alone would still mean something after
/// the slot went to somebody else.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct SlotRef {
    /// Which slot of the pool.
    pub index: SlotIndex,
    /// Which lease of that slot.
    pub epoch: Epoch,
}

impl fmt::Display for SlotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.index, self.epoch)
    }
}

/// A node: the BLAKE3 hash of its daemon's certificate (DER).
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub [u8; 32]);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..4]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A key that authenticates or scopes. Never printed.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct Secret(pub [u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A tag over bytes: a MAC or a digest, made with a keyed BLAKE3.
///
/// Compared in constant time, so that a forger learns nothing from how fast it is refused.
#[derive(Clone, Copy)]
pub struct Tag(pub [u8; 32]);

impl PartialEq for Tag {
    fn eq(&self, other: &Self) -> bool {
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }
}

impl Eq for Tag {}

impl core::hash::Hash for Tag {
    fn hash<H: core::hash::Hasher>(&self, hasher: &mut H) {
        self.0.hash(hasher);
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tag(")?;
        self.0[..4]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// Why a name was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum NameError {
    /// Names are 1 to [`NAME_BYTES_MAX`](crate::limits::NAME_BYTES_MAX) bytes long.
    #[error("a name has {got} bytes, and 1 to {want} are allowed")]
    Length {
        /// Its length in bytes.
        got: usize,
        /// The greatest length.
        want: usize,
    },
    /// Names are printable ASCII, so that one cannot disturb a log line or look like another.
    #[error("a name has byte {got:#04x}, and printable ASCII is allowed")]
    Byte {
        /// The first byte that is not printable ASCII.
        got: u8,
    },
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks and wraps a name.
            ///
            /// # Errors
            ///
            /// [`NameError`], where it is empty, too long, or not printable ASCII.
            pub fn new(name: &str) -> Result<Self, NameError> {
                let want = crate::limits::NAME_BYTES_MAX;
                if name.is_empty() || name.len() > want {
                    return Err(NameError::Length { got: name.len(), want });
                }
                match name.bytes().find(|byte| !(b' '..=b'~').contains(byte)) {
                    Some(got) => Err(NameError::Byte { got }),
                    None => Ok(Self(name.into())),
                }
            }

            /// The name itself.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name!(
    /// Who a request is for. Two tenants never see each other's bytes.
    TenantId
);
name!(
    /// An engine's name for a request, for logs and for the manifest.
    RequestId
);
name!(
    /// An engine's name for itself; the configuration says which tenants it may act for.
    EngineName
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_of_a_later_incarnation_are_greater_than_all_before() {
        let first = Incarnation::new(1).unwrap();
        let last_of_first = (Epoch::base(first).unwrap().as_u64()) | u64::from(u32::MAX);
        let second = first.checked_next().unwrap();
        assert!(Epoch::base(second).unwrap().as_u64() > last_of_first);
    }

    #[test]
    fn counters_refuse_zero_and_never_wrap() {
        assert_eq!(Epoch::new(0), None);
        assert_eq!(Epoch::new(u64::MAX).unwrap().checked_next(), None);
        assert_eq!(Epoch::base(Incarnation::new(1 << 32).unwrap()), None);
    }

    #[test]
    fn ids_print_as_people_read_them() {
        let slot = SlotRef {
            index: SlotIndex(7),
            epoch: Epoch::new(3).unwrap(),
        };
        assert_eq!(slot.to_string(), "7@3");
        let node = NodeId([0xab; 32]);
        assert_eq!(node.to_string(), "ab".repeat(32));
        assert_eq!(format!("{node:?}"), "abababab");
    }

    #[test]
    fn names_are_short_printable_ascii() {
        assert!(TenantId::new("acme").is_ok());
        assert_eq!(
            TenantId::new(""),
            Err(NameError::Length { got: 0, want: 64 })
        );
        assert_eq!(TenantId::new("a\nb"), Err(NameError::Byte { got: b'\n' }));
        assert_eq!(
            TenantId::new(&"x".repeat(65)),
            Err(NameError::Length { got: 65, want: 64 })
        );
    }

    #[test]
    fn secrets_do_not_print() {
        assert_eq!(format!("{:?}", Secret([7; 32])), "Secret(..)");
    }
}
