//! What this engine says to its daemon, in order, until it is written.
//!
//! Two kinds of message share one queue. Those that can wait take room by their bytes, and wait for
//! it: at most [`ROOM_BYTES`] of them are queued. Those that cannot, since a `Drop` says them, take
//! none: they are ends of leases and transfers, at most two for each lease, and a process has at
//! most [`LEASES_PER_ENGINE_MAX`](fabric_proto::limits::LEASES_PER_ENGINE_MAX) of those. While
//! their ends are queued no further lease can be had, since its request would wait behind them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use fabric_proto::limits::MESSAGE_BYTES_MAX;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Bytes of the messages that wait for the daemon to read, but for ends.
const ROOM_BYTES: usize = 8 << 20;
const _: () = assert!(MESSAGE_BYTES_MAX <= ROOM_BYTES, "any message fits");

/// The queue. One task takes from it.
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    ready: Notify,
    room: Arc<Semaphore>,
}

struct Queue {
    messages: VecDeque<Outgoing>,
    state: State,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Open,
    /// Ends once it is empty.
    Closing,
    Closed,
}

/// A message on its way.
pub(crate) struct Outgoing {
    pub(crate) bytes: Bytes,
    /// A pool's memory.
    pub(crate) memory: Option<OwnedFd>,
    /// Given back when the message was written; `None` for an end.
    _room: Option<Arc<OwnedSemaphorePermit>>,
}

/// Room for messages that are about to be queued.
pub(crate) struct Room(OwnedSemaphorePermit);

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            queue: Mutex::new(Queue {
                messages: VecDeque::new(),
                state: State::Open,
            }),
            ready: Notify::new(),
            room: Arc::new(Semaphore::new(ROOM_BYTES)),
        }
    }

    /// Waits for room for `bytes` bytes of messages, in turn. `None` once the queue is closed.
    pub(crate) async fn room(&self, bytes: usize) -> Option<Room> {
        let bytes = u32::try_from(bytes.min(ROOM_BYTES)).expect("the room fits 32 bits");
        let room = Arc::clone(&self.room).acquire_many_owned(bytes).await;
        room.ok().map(Room)
    }

    /// Queues messages that have room, all or none, together.
    pub(crate) fn push(&self, room: Room, messages: Vec<Bytes>, memory: Option<OwnedFd>) {
        // The room is given back with the last of them.
        let room = Arc::new(room.0);
        let mut memory = memory;
        self.extend(messages.into_iter().map(|bytes| Outgoing {
            bytes,
            memory: memory.take(),
            _room: Some(Arc::clone(&room)),
        }));
    }

    /// Queues an end, which cannot wait.
    pub(crate) fn push_end(&self, bytes: Bytes) {
        self.extend(std::iter::once(Outgoing {
            bytes,
            memory: None,
            _room: None,
        }));
    }

    /// Takes all that is queued, and waits while nothing is. `None` at the end.
    pub(crate) async fn take(&self) -> Option<VecDeque<Outgoing>> {
        loop {
            {
                let mut queue = self.queue();
                if !queue.messages.is_empty() {
                    return Some(std::mem::take(&mut queue.messages));
                }
                if queue.state != State::Open {
                    return None;
                }
            }
            self.ready.notified().await;
        }
    }

    /// Ends the queue once what is in it has been taken.
    pub(crate) fn finish(&self) {
        let mut queue = self.queue();
        if queue.state == State::Open {
            queue.state = State::Closing;
        }
        drop(queue);
        self.ready.notify_one();
    }

    /// Ends the queue at once; whoever waits for room is told.
    pub(crate) fn close(&self) {
        let mut queue = self.queue();
        queue.state = State::Closed;
        let messages = std::mem::take(&mut queue.messages);
        drop(queue);
        drop(messages);
        self.room.close();
        self.ready.notify_one();
    }

    fn extend(&self, messages: impl Iterator<Item = Outgoing>) {
        let mut queue = self.queue();
        if queue.state != State::Closed {
            queue.messages.extend(messages);
        }
        drop(queue);
        self.ready.notify_one();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it is locked but for want of memory.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_wait_for_room_and_ends_do_not() {
        let outbox = Outbox::new();
        let room = outbox.room(ROOM_BYTES).await.unwrap();
        outbox.push(room, vec![Bytes::from_static(b"full")], None);
        let waits = tokio::time::timeout(std::time::Duration::from_millis(20), outbox.room(1));
        assert!(waits.await.is_err(), "there is no room");
        outbox.push_end(Bytes::from_static(b"end"));

        let taken = outbox.take().await.unwrap();
        let bytes: Vec<_> = taken.iter().map(|message| &message.bytes[..]).collect();
        assert_eq!(bytes, [&b"full"[..], b"end"], "in the order of the calls");
        drop(taken);
        assert!(
            outbox.room(1).await.is_some(),
            "what was written has given its room back"
        );
    }

    #[tokio::test]
    async fn closing_tells_who_waits_and_finishing_lets_the_rest_out() {
        let outbox = Outbox::new();
        outbox.push_end(Bytes::from_static(b"end"));
        outbox.finish();
        assert_eq!(outbox.take().await.unwrap().len(), 1);
        assert!(outbox.take().await.is_none());

        let outbox = Outbox::new();
        let _all = outbox.room(ROOM_BYTES).await.unwrap();
        let waiter = outbox.room(1);
        tokio::pin!(waiter);
        assert!(
            tokio::time::timeout(std::time::Duration::ZERO, &mut waiter)
                .await
                .is_err()
        );
        outbox.close();
        assert!(waiter.await.is_none());
    }
}
