//! The destination's side of every plane: who may write, and the proof that nobody writes any more.
//!
//! ```text
//!          arm                     attach (key, link)
//!  (none) ─────▶ open, no writer ─────────────────────▶ open, one writer
//!                     │                                    │         │
//!                     │ fence                        fence,│         │ drain
//!                     ▼                        writer gone ▼         ▼
//!                closed (Fence)                      closed (Fence)  closed (Drain)
//! ```
//!
//! 1. The machine arms a grant; the plane says `Armed`.
//! 2. A writer that shows the grant's key on the grant's link attaches. There is at most one.
//! 3. Each piece of at most 256 KiB is copied into the pool under the lock of the grant's [`Gate`],
//!    if it is open.
//! 4. The gate is closed under the same lock, by a drain, by a fence, or since its writer is gone.
//!    The grant leaves the table, and then there is one proof.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use fabric_ipc::Mapping;
use fabric_proto::host::{Input, StoppedBy, WritesStopped};
use fabric_proto::ids::{GrantId, LinkId, PoolId, Secret, SlotRef, Tag};
use fabric_proto::pool::PageRun;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tracing::error;

use super::area::Area;
use super::faults::Faults;
use super::gate::{Busy, Gate, GateClosed, NotAttached};
use super::outbox::Outbox;
use super::pools::{Pool, Pools};
use super::{PIECE_BYTES_MAX, lock};

/// The proof that no write under a grant can still land.
///
/// Its fields are private to this file, which makes one in three places: where a grant's gate has
/// been closed under the lock that every copy takes, where a grant never came to be, and, for the
/// `verbs` plane, from its own proof that hardware has taken the writer's rights back.
#[derive(Debug)]
#[must_use = "the slots stay held until the machine has it"]
pub struct GrantStopped {
    grant: GrantId,
    by: StoppedBy,
}

#[cfg(feature = "rdma")]
impl GrantStopped {
    // S1: there is a `Revoked` only where no key opens the grant's slots any more.
    pub(super) fn by_hardware(
        grant: GrantId,
        by: StoppedBy,
        _proof: super::verbs::Revoked,
    ) -> Self {
        Self { grant, by }
    }
}

impl WritesStopped for GrantStopped {
    fn grant(&self) -> GrantId {
        self.grant
    }

    fn by(&self) -> StoppedBy {
        self.by
    }
}

/// What a plane is told of a grant that it is to arm.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) grant: GrantId,
    pub(super) link: LinkId,
    pub(super) key: Secret,
    pub(super) pool: PoolId,
    pub(super) slots: Arc<[SlotRef]>,
    /// Sorted; empty: every page of the slots.
    pub(super) pages: Arc<[PageRun]>,
}

/// The open grants of a plane.
#[derive(Debug)]
pub(super) struct GrantTable {
    outbox: Arc<Outbox>,
    runtime: Handle,
    // As many as the machine has open.
    grants: Mutex<BTreeMap<GrantId, Arc<Grant>>>,
    /// Wakes the task that says `Landed`.
    armed: Arc<Notify>,
}

impl GrantTable {
    /// An empty table, with its task on `runtime`.
    pub(super) fn new(runtime: &Handle, outbox: Arc<Outbox>) -> Arc<Self> {
        let table = Arc::new(Self {
            outbox,
            runtime: runtime.clone(),
            grants: Mutex::default(),
            armed: Arc::new(Notify::new()),
        });
        runtime.spawn(say_landed(Arc::downgrade(&table), Arc::clone(&table.armed)));
        table
    }

    /// Opens a grant, and says so.
    pub(super) fn arm(&self, pools: &Pools, terms: Terms) {
        let Terms { grant, pool, .. } = terms;
        let Some(opened) = Grant::open(pools, terms) else {
            error!(%grant, %pool, "no such pool or slot to write to");
            // S1: this grant is not in the table and never was, so no writer can attach to it.
            let proof = GrantStopped {
                grant,
                by: StoppedBy::Fence,
            };
            self.outbox.post(Input::WritesStopped(proof));
            return;
        };
        let before = lock(&self.grants).insert(grant, Arc::new(opened));
        assert!(before.is_none(), "the machine never uses a grant id twice");
        self.armed.notify_one();
        self.outbox.post(Input::Armed { grant });
    }

    /// Closes a grant. The proof comes at once, or, where a copy holds the grant's lock just now,
    /// from a task that waits for it. There is none where the grant is closed already: its proof
    /// was given.
    pub(super) fn fence(self: &Arc<Self>, grant: GrantId) {
        let Some(grant) = self.find(grant) else {
            return;
        };
        match grant.gate.try_close() {
            Ok(Some(closed)) => self.tell_closed(&grant, closed, StoppedBy::Fence),
            Ok(None) => {}
            Err(Busy) => {
                let table = Arc::clone(self);
                self.runtime.spawn_blocking(move || {
                    table.close(&grant, StoppedBy::Fence);
                });
            }
        }
    }

    /// Makes the caller the writer of a grant.
    ///
    /// `may_write` says whether the caller speaks for a link. Checked after the key: who does not
    /// know the key learns nothing else.
    pub(super) fn attach(
        self: &Arc<Self>,
        grant: GrantId,
        key: &Secret,
        may_write: impl FnOnce(LinkId) -> bool,
    ) -> Result<Attached, AttachError> {
        let grant = self.find(grant).ok_or(AttachError::Unknown)?;
        // S7: the key is a tag to the comparison, which takes the same time wherever they differ.
        if Tag(grant.key.0) != Tag(key.0) {
            return Err(AttachError::Key);
        }
        if !may_write(grant.link) {
            return Err(AttachError::Link(grant.link));
        }
        grant.gate.attach().map_err(|why| match why {
            NotAttached::Closed => AttachError::Unknown,
            NotAttached::Taken => AttachError::Taken,
        })?;
        Ok(Attached {
            table: Arc::clone(self),
            grant,
        })
    }

    fn find(&self, grant: GrantId) -> Option<Arc<Grant>> {
        lock(&self.grants).get(&grant).map(Arc::clone)
    }

    /// Closes a grant; whether it was open.
    fn close(&self, grant: &Grant, by: StoppedBy) -> bool {
        let Some(closed) = grant.gate.close() else {
            return false;
        };
        self.tell_closed(grant, closed, by);
        true
    }

    /// Takes a grant whose gate was closed out of the table, and tells the machine of its proof.
    fn tell_closed(&self, grant: &Grant, _proof: GateClosed, by: StoppedBy) {
        // Before the proof: `report_landed` posts with this lock, so nothing lands after it.
        lock(&self.grants).remove(&grant.id);
        grant.closed.notify_one();
        // S1: every copy under this grant goes through the gate, which is closed: none is under
        // way, and none can begin.
        let proof = GrantStopped {
            grant: grant.id,
            by,
        };
        self.outbox.post(Input::WritesStopped(proof));
    }

    /// Says of each grant whether bytes landed since the last time; whether there are grants.
    fn report_landed(&self) -> bool {
        let grants = lock(&self.grants);
        if self.outbox.is_clear() {
            for grant in grants.values() {
                // Relaxed: a sign of life, through which nobody reads a byte. A copy whose mark is
                // not seen yet is told of the next time; one swap takes one mark.
                if grant.landed.swap(false, Ordering::Relaxed) {
                    self.outbox.post(Input::Landed { grant: grant.id });
                }
            }
        }
        !grants.is_empty()
    }
}

impl Drop for GrantTable {
    fn drop(&mut self) {
        // Its task finds the table gone.
        self.armed.notify_one();
    }
}

async fn say_landed(table: Weak<GrantTable>, armed: Arc<Notify>) {
    loop {
        armed.notified().await;
        loop {
            tokio::time::sleep(LANDED_EVERY).await;
            let Some(table) = table.upgrade() else {
                return;
            };
            if !table.report_landed() {
                break;
            }
        }
    }
}

/// The one writer of an open grant. Dropping it closes the grant, by fence if not by drain before:
/// without its writer nothing more is to come.
#[derive(Debug)]
pub(super) struct Attached {
    table: Arc<GrantTable>,
    grant: Arc<Grant>,
}

impl Attached {
    /// Bytes of the pool's pages.
    pub(super) fn page_bytes(&self) -> u64 {
        self.grant.area.page_bytes()
    }

    /// Regions of the pool.
    pub(super) fn regions(&self) -> u16 {
        self.grant.pool.spec.layout.regions
    }

    /// Checks that the grant allows every page of `run`.
    // S7: a run is checked as a whole before any byte of it is copied.
    pub(super) fn check(&self, run: PageRun) -> Result<(), PageRefused> {
        if self.grant.area.allows(&self.grant.pages, run) {
            Ok(())
        } else {
            Err(PageRefused { run })
        }
    }

    /// Copies `bytes` to where `run`, which was checked, has them from its byte `offset` on.
    pub(super) fn write(&self, run: PageRun, offset: u64, bytes: &[u8]) -> Result<(), GrantClosed> {
        let piece_bytes = usize::try_from(PIECE_BYTES_MAX).expect("256 KiB fit usize");
        let mut at = offset;
        for piece in bytes.chunks(piece_bytes) {
            self.grant.while_open(|memory, area| {
                let mut rest = piece;
                while !rest.is_empty() {
                    let extent = area.extent(run, at, wide(rest.len()));
                    let (now, later) = rest.split_at(narrow(extent.bytes));
                    memory.write(extent.start, now).expect(IN_POOL);
                    (at, rest) = (at + extent.bytes, later);
                }
            })?;
        }
        Ok(())
    }

    /// Copies the next piece of `runs`, all of which were checked on both sides, out of another
    /// pool's memory; how many bytes that was.
    pub(super) fn copy(
        &self,
        memory: &Mapping,
        area: &Area,
        runs: &[PageRun],
        cursor: &mut Cursor,
        faults: &Faults,
    ) -> Result<u64, GrantClosed> {
        assert_eq!(
            area.page_bytes(),
            self.page_bytes(),
            "pages of one size only are exchanged"
        );
        self.grant.while_open(|target_memory, target_area| {
            let mut copied = 0;
            while let Some(run) = runs.get(cursor.index) {
                if copied == PIECE_BYTES_MAX {
                    break;
                }
                let source = area.extent(*run, cursor.offset, PIECE_BYTES_MAX - copied);
                let target = target_area.extent(*run, cursor.offset, source.bytes);
                target_memory
                    .copy_from(memory, source.start, target.start, target.bytes)
                    .expect(IN_POOL);
                if faults.may_flip() {
                    flip(
                        target_memory,
                        target_area,
                        *run,
                        cursor.offset,
                        target.bytes,
                        faults,
                    );
                }
                copied += target.bytes;
                cursor.offset += target.bytes;
                if cursor.offset == target_area.run_bytes(*run) {
                    *cursor = Cursor {
                        index: cursor.index + 1,
                        offset: 0,
                    };
                }
            }
            copied
        })
    }

    /// Closes the grant; whether it was still open.
    pub(super) fn close(&self, by: StoppedBy) -> bool {
        self.table.close(&self.grant, by)
    }

    /// Waits until the grant is closed. For one caller at a time.
    pub(super) async fn closed(&self) {
        self.grant.closed.notified().await;
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        self.close(StoppedBy::Fence);
    }
}

/// How far a list of runs has been copied.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    /// Which run is next.
    pub(super) index: usize,
    /// How many of its bytes were copied.
    pub(super) offset: u64,
}

/// Why a writer was not let in.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(super) enum AttachError {
    /// It showed another key.
    #[error("the key is not this grant's")]
    Key,
    /// It came over another link.
    #[error("the grant is for link {0}")]
    Link(LinkId),
    /// There is a writer.
    #[error("the grant has a writer")]
    Taken,
    /// There is no such grant, or no more.
    #[error("no such grant")]
    Unknown,
}

/// The grant was closed: nothing of this piece was copied.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("the grant is closed")]
pub(super) struct GrantClosed;

/// A page that the grant does not allow.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("the grant does not allow every page of {run:?}")]
pub(super) struct PageRefused {
    run: PageRun,
}

#[derive(Debug)]
struct Grant {
    id: GrantId,
    link: LinkId,
    key: Secret,
    pool: Arc<Pool>,
    area: Area,
    pages: Arc<[PageRun]>,
    gate: Gate,
    closed: Notify,
    /// Bytes landed since the machine was last told.
    landed: AtomicBool,
}

impl Grant {
    fn open(pools: &Pools, terms: Terms) -> Option<Self> {
        let pool = pools.find(terms.pool)?;
        let area = Area::new(&pool.spec, terms.slots.iter().map(|slot| slot.index.0))?;
        Some(Self {
            id: terms.grant,
            link: terms.link,
            key: terms.key,
            pool,
            area,
            pages: terms.pages,
            gate: Gate::new(),
            closed: Notify::new(),
            landed: AtomicBool::new(false),
        })
    }

    /// Runs `copy` if the grant is open. The only way from here to a pool's memory.
    // S1, S7: no copy but through the gate.
    fn while_open<T>(&self, copy: impl FnOnce(&Mapping, &Area) -> T) -> Result<T, GrantClosed> {
        let copied = self.gate.while_open(|| {
            let copied = copy(self.pool.memory.mapped(), &self.area);
            // Relaxed: see `report_landed`.
            self.landed.store(true, Ordering::Relaxed);
            copied
        });
        copied.ok_or(GrantClosed)
    }
}

/// Flips a bit of every page that begins within the `bytes` bytes of `run` from `offset` on, as
/// long as the faults ask for it.
fn flip(memory: &Mapping, area: &Area, run: PageRun, offset: u64, bytes: u64, faults: &Faults) {
    let mut page_start = offset.next_multiple_of(area.page_bytes());
    while page_start < offset + bytes && faults.flips_page() {
        let extent = area.extent(run, page_start, 1);
        let mut byte = [0];
        memory.read(extent.start, &mut byte).expect(IN_POOL);
        memory.write(extent.start, &[byte[0] ^ 1]).expect(IN_POOL);
        page_start += area.page_bytes();
    }
}

fn wide(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("no machine has more than 64-bit addresses")
}

/// Only for what is at most a slice's length.
fn narrow(bytes: u64) -> usize {
    usize::try_from(bytes).expect("an extent is at most what was asked for")
}

const IN_POOL: &str = "an area lies within its pool, and a pool within its memory";

/// How often the machine hears of a sign of life. Well below any silence that it would act on.
const LANDED_EVERY: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::plane::testing::{self, Event, Side};
    use fabric_proto::host::PlaneCommand;
    use fabric_proto::wire::PlaneKind;

    const LINK: LinkId = LinkId(1);

    /// A plane that is nothing but its table.
    struct TablePlane {
        table: Arc<GrantTable>,
        pools: Arc<Pools>,
    }

    impl crate::plane::Plane for TablePlane {
        fn kind(&self) -> PlaneKind {
            PlaneKind::Shm
        }

        fn submit(&self, command: PlaneCommand) {
            let PlaneCommand::Arm {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            } = command
            else {
                panic!("{command:?}");
            };
            let terms = Terms {
                grant,
                link,
                key,
                pool,
                slots,
                pages,
            };
            self.table.arm(&self.pools, terms);
        }

        fn link_down(&self, _link: LinkId) {}
    }

    /// A pool of ones, and grant 1 for its first slot, with its writer.
    fn armed() -> (Side, Arc<GrantTable>, Attached) {
        let runtime = Handle::current();
        let mut table = None;
        let side = Side::new(|pools, events| {
            let outbox = Outbox::new(&runtime, events);
            let made = table.insert(GrantTable::new(&runtime, outbox));
            TablePlane {
                table: Arc::clone(made),
                pools,
            }
        });
        let table = table.unwrap();
        side.fill(testing::spec(1, 100, 2), &mut testing::Random::new(41));
        side.arm(1, LINK, &[0], &[]);
        let key = testing::key(1);
        let attached = table.attach(GrantId(1), &key, |link| link == LINK).unwrap();
        (side, table, attached)
    }

    // S1: every order of a copy and a fence at its gate is in `tests/loom`; this is the table's
    // part.
    #[tokio::test]
    async fn writer_of_a_closed_grant_copies_nothing() {
        let (mut side, table, attached) = armed();
        let before = side.contents();
        table.fence(GrantId(1));
        let outcome = attached.write(testing::run(0, 0, 1), 0, &[0; 100]);
        assert_eq!(outcome, Err(GrantClosed));
        assert!(side.contents() == before);
        assert_eq!(side.wait_writes_stopped(1).await, StoppedBy::Fence);
    }

    // S1: the proof comes after the copy, and `fence` itself does not wait for that.
    #[tokio::test]
    async fn fence_gives_its_proof_only_when_the_copy_under_way_is_over() {
        let (mut side, table, attached) = armed();
        let (begun, has_begun) = std::sync::mpsc::sync_channel(0);
        let (end, may_end) = std::sync::mpsc::sync_channel(0);
        let copier = thread::spawn(move || {
            let outcome = attached.grant.while_open(|_, _| {
                begun.send(()).unwrap();
                may_end.recv().unwrap();
            });
            (attached, outcome)
        });
        has_begun.recv().unwrap();
        table.fence(GrantId(1));
        side.settle().await;
        assert_eq!(side.log, [Event::Armed(1)], "a copy is under way");
        end.send(()).unwrap();
        let (attached, outcome) = copier.join().unwrap();
        assert_eq!(outcome, Ok(()));
        assert_eq!(side.wait_writes_stopped(1).await, StoppedBy::Fence);
        let late = attached.write(testing::run(0, 0, 1), 0, &[0; 100]);
        assert_eq!(late, Err(GrantClosed));
        drop(attached);
        table.fence(GrantId(1));
        side.settle().await;
        assert_eq!(side.log.len(), 2, "one proof: {:?}", side.log);
    }
}
