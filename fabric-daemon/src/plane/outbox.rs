//! What planes tell the machine, in the order in which it happened.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use fabric_proto::host::Input;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;

use super::{PlaneProofs, lock};

/// The way into the driver's bounded channel that never makes a plane wait.
///
/// The driver both receives from that channel and calls `submit`: a plane that waited for room
/// inside `submit`, or with a lock that `submit` takes, would wait for ever. So what finds no room
/// queues here, and a task of its own waits.
///
/// The queue's bound is the machine's: each entry answers a command that the machine counts as
/// outstanding, but for `Landed`, of which there is at most one for each grant, and only while
/// nothing else waits ([`Outbox::is_clear`]).
#[derive(Debug)]
pub(super) struct Outbox {
    events: Sender<Input<PlaneProofs>>,
    queue: Mutex<VecDeque<Input<PlaneProofs>>>,
    queued: Notify,
}

impl Outbox {
    /// An outbox for `events`, whose task runs until the driver drops the receiver.
    pub(super) fn new(runtime: &Handle, events: Sender<Input<PlaneProofs>>) -> Arc<Self> {
        let outbox = Arc::new(Self {
            events,
            queue: Mutex::default(),
            queued: Notify::new(),
        });
        runtime.spawn(Arc::clone(&outbox).forward());
        outbox
    }

    /// Tells the machine. Never blocks; once the driver is gone, nobody is told.
    pub(super) fn post(&self, input: Input<PlaneProofs>) {
        let mut queue = lock(&self.queue);
        let input = if queue.is_empty() {
            match self.events.try_send(input) {
                Ok(()) | Err(TrySendError::Closed(_)) => return,
                Err(TrySendError::Full(input)) => input,
            }
        } else {
            input
        };
        queue.push_back(input);
        drop(queue);
        self.queued.notify_one();
    }

    /// Whether the driver keeps up.
    pub(super) fn is_clear(&self) -> bool {
        lock(&self.queue).is_empty()
    }

    async fn forward(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = self.queued.notified() => {}
                () = self.events.closed() => return,
            }
            while !self.is_clear() {
                let Ok(room) = self.events.reserve().await else {
                    return;
                };
                // Under the lock, so that `post` cannot overtake what was queued before.
                let mut queue = lock(&self.queue);
                if let Some(input) = queue.pop_front() {
                    room.send(input);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use fabric_proto::ids::GrantId;

    use super::*;

    #[tokio::test]
    async fn a_full_channel_delays_events_and_keeps_their_order() {
        let (events, mut received) = tokio::sync::mpsc::channel(2);
        let outbox = Outbox::new(&Handle::current(), events);
        for id in 0..100 {
            outbox.post(Input::Armed { grant: GrantId(id) });
        }
        for id in 0..100 {
            match received.recv().await {
                Some(Input::Armed { grant }) => assert_eq!(grant, GrantId(id)),
                other => panic!("{other:?}"),
            }
        }
    }
}
