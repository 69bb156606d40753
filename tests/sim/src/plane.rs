//! An honest data plane, and writes that stay in the air.
//!
//! A write is one page. Once it is posted it may land at any later moment, in any order, whatever
//! becomes of its writer and of the link, for as long as its grant is armed where it arrives. While
//! its writer reads, what lands is what the source's page holds *then*: a source whose slot was
//! given away too early sends somebody else's bytes. Only two things end that: a drain, which
//! arrives after every write of its grant, and a fence.

use std::collections::BTreeMap;
use std::sync::Arc;

use fabric_proto::host::{Proofs, ReadsStopped, StoppedBy, WritesStopped};
use fabric_proto::ids::{GrantId, LinkId, PoolId, Secret, SlotRef, TransferId};
use fabric_proto::pool::{PageRef, PageRun};

/// What a page holds.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Content {
    /// Fresh, or scrubbed.
    Zero,
    /// What a request's prefill computed for this page of it.
    Page {
        /// Which request, by its index.
        request: usize,
        /// Which page.
        page: PageRef,
        /// A bit flipped on the way.
        flipped: bool,
    },
    /// What a daemon that lies wrote.
    Junk {
        /// Which node.
        from: usize,
    },
}

impl Content {
    /// A checksum without collisions among the contents of a world.
    #[must_use]
    pub fn crc(self) -> u32 {
        match self {
            Self::Zero => 0,
            Self::Junk { .. } => u32::MAX,
            Self::Page {
                request,
                page,
                flipped,
            } => {
                let request = u32::try_from(request).expect("a world is small") + 1;
                assert!(page.region < 256 && page.position < 256, "a world is small");
                request << 17
                    | u32::from(page.region) << 9
                    | page.position << 1
                    | u32::from(flipped)
            }
        }
    }
}

/// One daemon's side of the plane.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Plane {
    /// Grants under which writes land.
    pub armed: BTreeMap<GrantId, Armed>,
    /// Writers that read slots here.
    pub writers: BTreeMap<TransferId, Writer>,
    /// The memory of pools that are mapped: by region, then slot.
    pub memory: BTreeMap<PoolId, Vec<Content>>,
}

/// A grant that is armed.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Armed {
    /// Whose writer it is for.
    pub link: LinkId,
    /// What the writer must show.
    pub key: Secret,
    /// Into which pool.
    pub pool: PoolId,
    /// Into which slots, by position.
    pub slots: Arc<[SlotRef]>,
    /// Which pages; empty: all.
    pub pages: Arc<[PageRun]>,
    /// A fence was asked for. Until it is done writes land.
    pub fencing: bool,
}

impl Armed {
    /// Whether a page may be written.
    #[must_use]
    pub fn allows(&self, page: PageRef) -> bool {
        (page.position as usize) < self.slots.len()
            && (self.pages.is_empty() || self.pages.iter().any(|run| run.contains(page)))
    }
}

/// A writer, from its opening until it reads no more.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Writer {
    /// Under which grant.
    pub grant: GrantId,
    /// On which link.
    pub link: LinkId,
    /// What it shows.
    pub key: Secret,
    /// From which pool.
    pub pool: PoolId,
    /// From which slots, by position.
    pub slots: Arc<[SlotRef]>,
    /// It posts no more.
    pub ending: bool,
}

/// Something in the air, under one grant of one daemon's life.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Flight {
    /// Node and life of the daemon that posted it.
    pub from: (usize, u64),
    /// Of which transfer.
    pub transfer: TransferId,
    /// Node and life of the daemon that it is for.
    pub to: (usize, u64),
    /// Under which grant.
    pub grant: GrantId,
    /// What it shows.
    pub key: Secret,
    /// A page, or the drain that comes after them all.
    pub cargo: Cargo,
}

/// What flies.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Cargo {
    /// A page. Without content its writer still reads it.
    Page(PageRef, Option<Content>),
    /// The writer's word that there is no more.
    Drain,
}

/// The proofs of this plane. Their fields are private to it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Proven;

/// No write under a grant can land any more.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Stopped {
    grant: GrantId,
    by: StoppedBy,
}

/// A writer reads no more.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Read {
    transfer: TransferId,
    grant: GrantId,
}

impl WritesStopped for Stopped {
    fn grant(&self) -> GrantId {
        self.grant
    }

    fn by(&self) -> StoppedBy {
        self.by
    }
}

impl ReadsStopped for Read {
    fn transfer(&self) -> TransferId {
        self.transfer
    }

    fn grant(&self) -> GrantId {
        self.grant
    }
}

impl Proofs for Proven {
    type WritesStopped = Stopped;
    type ReadsStopped = Read;
}

impl Plane {
    /// Closes a grant: from here on nothing lands under it. `None` where it was closed before.
    pub fn close(&mut self, grant: GrantId, by: StoppedBy) -> Option<Stopped> {
        self.armed.remove(&grant)?;
        Some(Stopped { grant, by })
    }

    /// Ends a writer: from here on it reads nothing.
    pub fn end_writer(&mut self, transfer: TransferId) -> Option<Read> {
        let grant = self.writers.remove(&transfer)?.grant;
        Some(Read { transfer, grant })
    }

    /// Whether a write could still land in a slot.
    #[must_use]
    pub fn may_be_written(&self, pool: PoolId, slot: u32) -> bool {
        let names = |slots: &Arc<[SlotRef]>| slots.iter().any(|other| other.index.0 == slot);
        self.armed
            .values()
            .any(|armed| armed.pool == pool && names(&armed.slots))
    }

    /// Whether a writer may still read a slot.
    #[must_use]
    pub fn may_be_read(&self, pool: PoolId, slot: u32) -> bool {
        let names = |slots: &Arc<[SlotRef]>| slots.iter().any(|other| other.index.0 == slot);
        self.writers
            .values()
            .any(|writer| writer.pool == pool && names(&writer.slots))
    }
}
