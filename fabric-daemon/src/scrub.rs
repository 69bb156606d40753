//! Overwriting slots before another tenant may have them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use fabric_proto::host::Input;
use fabric_proto::ids::{PoolId, SlotRef};
use tokio::sync::mpsc::Sender;

use crate::driver::Event;
use crate::plane::{Pool, Pools};

/// Scrubs on a thread that may block, one job after the other: more would only share the memory's
/// bandwidth.
///
/// The queue's bound is the machine's: at most one job for each lease.
#[derive(Debug)]
pub(crate) struct Scrubber {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    pools: Arc<Pools>,
    events: Sender<Event>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    worker: Worker,
}

#[derive(Debug, Default, Eq, PartialEq)]
enum Worker {
    /// There is none; whoever adds a job starts one.
    #[default]
    Absent,
    /// It looks for more jobs before it goes.
    Running,
}

#[derive(Debug)]
struct Job {
    pool: PoolId,
    slots: Arc<[SlotRef]>,
}

impl Scrubber {
    pub(crate) fn new(pools: Arc<Pools>, events: Sender<Event>) -> Self {
        let state = Mutex::default();
        Self {
            shared: Arc::new(Shared {
                pools,
                events,
                state,
            }),
        }
    }

    /// Scrubs slots; [`Input::Scrubbed`] follows. Never blocks.
    pub(crate) fn submit(&self, pool: PoolId, slots: Arc<[SlotRef]>) {
        let mut state = lock(&self.shared.state);
        state.jobs.push_back(Job { pool, slots });
        if state.worker == Worker::Absent {
            state.worker = Worker::Running;
            let shared = Arc::clone(&self.shared);
            tokio::task::spawn_blocking(move || shared.work());
        }
    }
}

impl Shared {
    fn work(&self) {
        while let Some(Job { pool, slots }) = self.next() {
            let found = self.pools.find(pool);
            let found = found.expect("a pool is unmapped only when no slot of it is held");
            zero(&found, &slots);
            let scrubbed = Input::Scrubbed { pool, slots };
            if self.events.blocking_send(scrubbed).is_err() {
                // The driver is gone, and with it every lease.
                return;
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        let job = state.jobs.pop_front();
        if job.is_none() {
            state.worker = Worker::Absent;
        }
        job
    }
}

/// Overwrites every page of the slots.
fn zero(pool: &Pool, slots: &[SlotRef]) {
    let page_bytes = u64::from(pool.spec.layout.page_bytes);
    for slot in slots {
        for region in 0..pool.spec.layout.regions {
            let offset = pool.spec.page_offset(region, slot.index.0);
            let zeroed = pool.memory.mapped().zero(offset, page_bytes);
            zeroed.expect("the pool is mapped for writing, as large as its spec");
        }
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    // Poison says only that another thread panicked: every change here is whole.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use fabric_ipc::{Mapping, create_sealed};
    use fabric_proto::ids::{Epoch, SlotIndex, Tag};
    use fabric_proto::pool::{Arrangement, Layout, PoolSpec};

    use super::*;
    use crate::plane::Memory;

    #[tokio::test]
    async fn scrubbing_zeroes_the_slots_and_nothing_else() {
        let spec = PoolSpec {
            layout: Layout {
                model: Tag([1; 32]),
                regions: 3,
                page_bytes: 100,
                tokens_per_slot: 16,
            },
            slots: 4,
            arrangement: Arrangement::RegionMajor,
            context_tokens: 64,
        };
        let fd = create_sealed("test", spec.bytes()).unwrap();
        let memory = Mapping::read_write(&fd, spec.bytes()).unwrap();
        memory.write(0, &[7; 1200]).unwrap();
        let pools = Arc::new(Pools::new());
        pools.insert(
            PoolId(1),
            Pool {
                spec,
                memory: Memory::Host(memory),
                fd,
            },
        );
        let (events, mut received) = tokio::sync::mpsc::channel(8);
        let scrubber = Scrubber::new(Arc::clone(&pools), events);
        let slots: Arc<[SlotRef]> = [1, 2]
            .map(|index| SlotRef {
                index: SlotIndex(index),
                epoch: Epoch::new(1).unwrap(),
            })
            .into();
        scrubber.submit(PoolId(1), Arc::clone(&slots));
        match received.recv().await {
            Some(Input::Scrubbed { pool, slots: got }) => {
                assert_eq!((pool, got), (PoolId(1), slots));
            }
            other => panic!("{other:?}"),
        }
        let mut bytes = [0; 1200];
        pools
            .find(PoolId(1))
            .unwrap()
            .memory
            .mapped()
            .read(0, &mut bytes)
            .unwrap();
        for region in bytes.chunks(400) {
            assert_eq!(region[..100], [7; 100]);
            assert_eq!(region[100..300], [0; 200]);
            assert_eq!(region[300..], [7; 100]);
        }
    }
}
