//! The sessions or links that are up, and the queues through which the driver reaches them.
//!
//! The driver never waits: a message is queued or, where the queue is full, its reader is too slow
//! and the connection is closed. So nothing that a peer or an engine does can stop the driver.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use fabric_proto::host::Misbehaviour;
use thiserror::Error;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot, watch};

use crate::queued_bytes::QueuedBytes;

/// Why we close a connection.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
pub(crate) enum Closing {
    /// The machine says so.
    #[error("it broke the protocol: {0}")]
    Misbehaved(#[from] Misbehaviour),
    /// The daemon is going.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// A later life of the same node has come.
    #[error("a later incarnation of the node is here")]
    Superseded,
    /// It does not read what it is sent.
    #[error("too slow: {messages} messages with {bytes} bytes wait for it")]
    TooSlow {
        /// How many wait.
        messages: usize,
        /// Their bytes.
        bytes: usize,
    },
}

/// Connections by name.
#[derive(Debug)]
pub(crate) struct Registry<K, T> {
    entries: Mutex<BTreeMap<K, Entry<T>>>,
    count: watch::Sender<usize>,
}

#[derive(Debug)]
struct Entry<T> {
    about: T,
    /// `None` once the connection is ending.
    line: Option<Line>,
}

/// The driver's end of a connection's queue.
#[derive(Debug)]
struct Line {
    messages: mpsc::Sender<Bytes>,
    queued_bytes: Arc<QueuedBytes>,
    close: oneshot::Sender<Closing>,
}

/// The connection's end.
#[derive(Debug)]
pub(crate) struct Outgoing {
    messages: mpsc::Receiver<Bytes>,
    queued_bytes: Arc<QueuedBytes>,
}

impl Outgoing {
    /// Waits for messages and moves some of them to `batch`, which must be empty. `false`: there
    /// will be no more.
    pub(crate) async fn next(&mut self, batch: &mut Vec<Bytes>) -> bool {
        assert!(batch.is_empty(), "a batch is written before the next");
        let count = self.messages.recv_many(batch, BATCH_MESSAGES_MAX).await;
        self.queued_bytes.taken(batch.iter().map(Bytes::len).sum());
        count > 0
    }
}

impl<K: Copy + Ord, T> Registry<K, T> {
    pub(crate) fn new() -> Self {
        Self {
            entries: Mutex::default(),
            count: watch::Sender::new(0),
        }
    }

    /// Adds a connection. Ends with [`Registry::hang_up`] and [`Registry::remove`].
    pub(crate) fn insert(&self, key: K, about: T) -> (Outgoing, oneshot::Receiver<Closing>) {
        let (sender, messages) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let (close, closing) = oneshot::channel();
        let queued_bytes = Arc::new(QueuedBytes::new());
        let line = Line {
            messages: sender,
            queued_bytes: Arc::clone(&queued_bytes),
            close,
        };
        let entry = Entry {
            about,
            line: Some(line),
        };
        let before = self.lock().insert(key, entry);
        assert!(before.is_none(), "a name is never used twice");
        self.count.send_modify(|count| *count += 1);
        let outgoing = Outgoing {
            messages,
            queued_bytes,
        };
        (outgoing, closing)
    }

    /// Queues a message. Where there is nobody, its end is on the way to the driver; where there is
    /// no room, the connection is closed.
    pub(crate) fn send(&self, key: K, message: Bytes) {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(&key) else {
            return;
        };
        let Some(line) = &entry.line else {
            return;
        };
        let too_slow = line.queued_bytes.queue(message.len(), |bytes| {
            let full = bytes > QUEUE_BYTES_MAX
                || matches!(line.messages.try_send(message), Err(TrySendError::Full(_)));
            let messages = QUEUE_MESSAGES_MAX - line.messages.capacity();
            full.then_some(Closing::TooSlow { messages, bytes })
        });
        if let Some(why) = too_slow {
            entry.close(why);
        }
    }

    /// Closes a connection, if it is there and not closing already.
    pub(crate) fn close(&self, key: K, why: Closing) {
        if let Some(entry) = self.lock().get_mut(&key) {
            entry.close(why);
        }
    }

    /// Closes those that `which` chooses.
    pub(crate) fn close_where(&self, why: Closing, which: impl Fn(&T) -> bool) {
        let mut entries = self.lock();
        let chosen = entries.values_mut().filter(|entry| which(&entry.about));
        chosen.for_each(|entry| entry.close(why));
    }

    /// Takes no more messages for a connection; those that are queued can still go out.
    pub(crate) fn hang_up(&self, key: K) {
        if let Some(entry) = self.lock().get_mut(&key) {
            entry.line = None;
        }
    }

    /// Forgets a connection.
    pub(crate) fn remove(&self, key: K) {
        let removed = self.lock().remove(&key);
        assert!(removed.is_some(), "a connection ends once");
        self.count.send_modify(|count| *count -= 1);
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Looks at each.
    pub(crate) fn map<R>(&self, look: impl Fn(K, &T) -> R) -> Vec<R> {
        let entries = self.lock();
        entries
            .iter()
            .map(|(key, entry)| look(*key, &entry.about))
            .collect()
    }

    /// Closes all, and waits for them to go, but not longer than `wait`.
    pub(crate) async fn close_all(&self, wait: Duration) {
        self.close_now();
        let mut count = self.count.subscribe();
        // Late is no error: the process, or the runtime, ends what is left.
        let _late = tokio::time::timeout(wait, count.wait_for(|count| *count == 0)).await;
    }

    /// Closes all, and waits for nobody.
    pub(crate) fn close_now(&self) {
        self.close_where(Closing::ShuttingDown, |_| true);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, Entry<T>>> {
        // Poison says only that another thread panicked: every change here is one assignment.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Entry<T> {
    fn close(&mut self, why: Closing) {
        if let Some(line) = self.line.take() {
            // The connection may be ending by itself.
            let _gone = line.close.send(why);
        }
    }
}

/// Most messages that wait for one connection.
const QUEUE_MESSAGES_MAX: usize = 16_384;

/// Most bytes that wait for one connection: the checksums of some of the longest leases at once.
const QUEUE_BYTES_MAX: usize = 128 << 20;

/// Most messages that are written before more are looked for.
const BATCH_MESSAGES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_queue_closes_the_connection_and_never_waits() {
        let registry = Registry::new();
        let (mut outgoing, closing) = registry.insert(1, ());
        for _ in 0..=QUEUE_MESSAGES_MAX {
            registry.send(1, Bytes::from_static(b"x"));
        }
        let messages = QUEUE_MESSAGES_MAX;
        let bytes = messages + 1;
        assert_eq!(closing.await, Ok(Closing::TooSlow { messages, bytes }));
        let (mut batch, mut got) = (Vec::new(), 0);
        while outgoing.next(&mut batch).await {
            got += batch.drain(..).count();
        }
        assert_eq!(got, QUEUE_MESSAGES_MAX, "what was queued can still go out");
    }

    #[tokio::test]
    async fn too_many_bytes_close_the_connection() {
        let registry = Registry::new();
        let (_outgoing, mut closing) = registry.insert(1, ());
        let message = Bytes::from(vec![0; QUEUE_BYTES_MAX / 4]);
        for _ in 0..4 {
            registry.send(1, message.clone());
        }
        assert!(closing.try_recv().is_err(), "just at the bound");
        registry.send(1, Bytes::from_static(b"x"));
        assert!(matches!(closing.await, Ok(Closing::TooSlow { .. })));
    }

    #[tokio::test]
    async fn whoever_is_not_there_is_sent_nothing() {
        let registry = Registry::<u8, ()>::new();
        registry.send(7, Bytes::from_static(b"x"));
        registry.close(7, Closing::ShuttingDown);
        registry.close_all(Duration::from_secs(60)).await;
        assert_eq!(registry.count(), 0);
    }
}
