//! The planes' own stream on a link: from the first message to the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use quinn::{Connection, ConnectionError, RecvStream, SendStream, VarInt, WriteError};
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tracing::{debug, warn};

use super::Opener;
use super::codec::{self, Message, RailAddress, ReceiveError};
use super::peers::PeerKey;
use super::worker::{Inbox, Order};

/// A peer whose lanes carry messages both ways, before its link has an id. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Introduced {
    pub(super) peer: PeerKey,
    pub(super) inbox: Arc<Inbox>,
    pub(super) attached: bool,
}

impl Drop for Introduced {
    fn drop(&mut self) {
        if !self.attached {
            self.inbox.push(Order::PeerGone { peer: self.peer });
        }
    }
}

/// Why a peer's plane cannot be used.
#[derive(Debug, Error)]
pub(super) enum IntroductionError {
    #[error("{0}")]
    Connection(#[from] ConnectionError),
    #[error("its stream ended")]
    Ended,
    #[error("its first message does not name its ports")]
    NotRails,
    #[error("it does not say whether its lanes can be used")]
    Undecided,
    #[error("it does not say which ports it has within {PATH_WAIT:?}")]
    Late,
    #[error("{0}")]
    Receive(#[from] ReceiveError),
    #[error("{0}")]
    Write(#[from] WriteError),
}

/// Introduces the planes of both ends of a connection to each other.
pub(super) async fn introduce(
    inbox: &Arc<Inbox>,
    peer: PeerKey,
    rails: Vec<RailAddress>,
    connection: &Connection,
    opener: Opener,
) -> Result<Option<Introduced>, IntroductionError> {
    // It holds a place for handshakes, of which there are few.
    let opened = tokio::time::timeout(PATH_WAIT, open(rails, connection, opener)).await;
    let (sending, receiving, theirs) = opened.map_err(|_| IntroductionError::Late)??;
    let (outgoing, outbox) = mpsc::channel(MESSAGES_MAX);
    let (done, is_done) = oneshot::channel();
    inbox.push(Order::PeerUp {
        peer,
        rails: theirs,
        outgoing,
        done,
    });
    let introduced = Introduced {
        peer,
        inbox: Arc::clone(inbox),
        attached: false,
    };
    let in_use = Arc::new(AtomicBool::new(false));
    let serving = serve(Arc::clone(inbox), peer, (sending, receiving), outbox);
    let (connection, is_used) = (connection.clone(), Arc::clone(&in_use));
    tokio::spawn(async move {
        serving.await;
        // Relaxed: it was set long before, or does not matter.
        if is_used.load(Ordering::Relaxed) {
            // Grants of this plane can not be had on the link any more: it is of no use.
            let why = b"the verbs plane's stream ended";
            connection.close(VarInt::from_u32(CODE_PLANE_ENDED), why);
        }
    });
    let mut is_done = is_done;
    let mut judged = tokio::time::timeout(PATH_WAIT, &mut is_done).await;
    if judged.is_err() {
        inbox.push(Order::GiveUp { peer });
        judged = tokio::time::timeout(PATH_WAIT + PATH_WAIT, &mut is_done).await;
    }
    match judged {
        Ok(Ok(true)) => {
            // Relaxed: see above.
            in_use.store(true, Ordering::Relaxed);
            Ok(Some(introduced))
        }
        Ok(Ok(false)) => Ok(None),
        Ok(Err(_)) => Err(IntroductionError::Ended),
        Err(_) => Err(IntroductionError::Undecided),
    }
}

/// Opens the stream; each end says which ports it has.
async fn open(
    rails: Vec<RailAddress>,
    connection: &Connection,
    opener: Opener,
) -> Result<(SendStream, RecvStream, Vec<RailAddress>), IntroductionError> {
    let (mut sending, mut receiving) = match opener {
        Opener::Us => connection.open_bi().await?,
        Opener::Peer => connection.accept_bi().await?,
    };
    codec::send(&mut sending, &Message::Rails(rails)).await?;
    match codec::receive(&mut receiving).await? {
        Some(Message::Rails(theirs)) => Ok((sending, receiving, theirs)),
        _ => Err(IntroductionError::NotRails),
    }
}

/// Passes messages on, both ways, until either end has no more.
async fn serve(
    inbox: Arc<Inbox>,
    peer: PeerKey,
    (mut sending, mut receiving): (SendStream, RecvStream),
    mut outbox: mpsc::Receiver<Message>,
) {
    let places = Arc::new(Semaphore::new(MESSAGES_MAX));
    let receive = async {
        loop {
            match codec::receive(&mut receiving).await {
                Ok(Some(message)) => {
                    let weight = weight(&message);
                    let place = Arc::clone(&places).acquire_many_owned(weight).await;
                    let place = place.expect("the semaphore is never closed");
                    inbox.push(Order::PeerSaid {
                        peer,
                        message,
                        place,
                    });
                }
                Ok(None) => return debug!(peer = peer.0, "a peer's plane has left"),
                Err(error) => return debug!(peer = peer.0, "a peer's plane: {error}"),
            }
        }
    };
    let send = async {
        while let Some(message) = outbox.recv().await {
            match tokio::time::timeout(LISTEN_WAIT, codec::send(&mut sending, &message)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return debug!(peer = peer.0, "a peer's plane: {error}"),
                Err(_) => return warn!(peer = peer.0, "a peer's plane does not listen"),
            }
        }
    };
    tokio::select! {
        () = receive => {}
        () = send => {}
    }
    inbox.push(Order::PeerGone { peer });
}

/// How many places a message of a peer takes while it waits: about one for each 256 bytes.
fn weight(message: &Message) -> u32 {
    let extents = match message {
        Message::Reach { reach, .. } => reach.extents.len(),
        Message::Rerouted { keys, .. } => keys.len(),
        Message::Exposed { exposures, .. } => exposures.len(),
        Message::AllExposed { .. }
        | Message::Closed { .. }
        | Message::Exposes(_)
        | Message::GivenUp { .. }
        | Message::Lane(_)
        | Message::LaneGone { .. }
        | Message::LaneReady { .. }
        | Message::LegDrained { .. }
        | Message::Rails(_)
        | Message::Usable(_) => 0,
    };
    u32::try_from(1 + extents / 8).expect("the codec bounds it")
}

const _: () = assert!(
    codec::EXTENTS_MAX / 8 < MESSAGES_MAX,
    "each message has its places"
);

/// Messages that wait for a peer, and of a peer.
const MESSAGES_MAX: usize = 4096;

/// Time for every lane to be connected and tried. A port that nobody answers at is given up by the
/// device after a few seconds, so this is for the stream rather.
const PATH_WAIT: Duration = Duration::from_secs(5);

/// A peer that takes not one message in so long is cut off.
const LISTEN_WAIT: Duration = Duration::from_secs(5);

/// For the peer's log.
const CODE_PLANE_ENDED: u32 = 100;
