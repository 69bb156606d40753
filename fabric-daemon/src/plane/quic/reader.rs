//! The destination's side: one task for each stream of a link.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use fabric_proto::host::StoppedBy;
use fabric_proto::ids::LinkId;
use quinn::{Connection, ReadError, ReadExactError, RecvStream};
use thiserror::Error;
use tracing::{debug, info, warn};

use super::codec::{DecodeError, Decoded, Decoder, HEADER_BYTES, decode_header};
use super::{Shared, code};
use crate::plane::grants::{AttachError, Attached, GrantClosed, PageRefused};

/// Takes in the streams of a link until its connection is closed.
///
/// There are at most as many tasks as the transport configuration allows streams.
pub(super) async fn accept(shared: Arc<Shared>, link: LinkId, connection: Connection) {
    loop {
        match connection.accept_uni().await {
            Ok(stream) => {
                tokio::spawn(receive(Arc::clone(&shared), link, stream));
            }
            Err(error) => {
                debug!(%link, "link takes no more streams: {error}");
                return;
            }
        }
    }
}

async fn receive(shared: Arc<Shared>, link: LinkId, mut stream: RecvStream) {
    let attached = match attach(&shared, link, &mut stream).await {
        Ok(attached) => attached,
        Err(error) => {
            // Relaxed: a statistic.
            shared.refused.fetch_add(1, Ordering::Relaxed);
            warn!(%link, "refused a stream: {error}");
            stop(stream, code::REFUSED);
            return;
        }
    };
    // Dropping `attached` closes the grant by fence, unless the drain has closed it.
    match copy(&attached, &mut stream).await {
        Ok(()) => {
            attached.close(StoppedBy::Drain);
        }
        Err(ReaderError::Closed(GrantClosed)) => {
            info!(%link, "stopped a stream: its grant was closed");
            stop(stream, code::CLOSED);
        }
        Err(error @ ReaderError::Read(_)) => {
            info!(%link, "stream ended early: {error}");
        }
        Err(error @ (ReaderError::EndInRun | ReaderError::Malformed(_) | ReaderError::Page(_))) => {
            warn!(%link, "stopped a stream: {error}");
            stop(stream, code::MALFORMED);
        }
    }
}

async fn attach(
    shared: &Shared,
    link: LinkId,
    stream: &mut RecvStream,
) -> Result<Attached, HeaderError> {
    let mut header = [0; HEADER_BYTES];
    tokio::time::timeout(shared.limits.header_wait, stream.read_exact(&mut header))
        .await
        .map_err(|_| HeaderError::Late)??;
    let (grant, key) = decode_header(&header)?;
    Ok(shared
        .grants
        .attach(grant, &key, |granted| granted == link)?)
}

/// Copies pages until the drain.
async fn copy(attached: &Attached, stream: &mut RecvStream) -> Result<(), ReaderError> {
    let mut decoder = Decoder::new(attached.page_bytes());
    let mut chunks = [const { Bytes::new() }; CHUNKS];
    loop {
        let read = tokio::select! {
            biased;
            () = attached.closed() => return Err(ReaderError::Closed(GrantClosed)),
            read = stream.read_chunks(&mut chunks) => read?,
        };
        let Some(count) = read else {
            return if decoder.is_between_runs() {
                Ok(())
            } else {
                Err(ReaderError::EndInRun)
            };
        };
        for chunk in &mut chunks[..count] {
            // Taken out, so that its memory goes back to quinn at once.
            let chunk = std::mem::take(chunk);
            let mut rest = &chunk[..];
            while let Some(part) = decoder.next(&mut rest)? {
                match part {
                    Decoded::Bytes { run, offset, bytes } => attached.write(run, offset, bytes)?,
                    Decoded::Run(run) => attached.check(run)?,
                }
            }
        }
    }
}

fn stop(mut stream: RecvStream, code: u32) {
    stream
        .stop(code.into())
        .unwrap_or_else(|_| debug!("stream is closed already"));
}

/// Why a stream was not let in. It affects no grant.
#[derive(Debug, Error)]
enum HeaderError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error("no header in time")]
    Late,
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    #[error("read its header: {0}")]
    Read(#[from] ReadExactError),
}

/// Why a writer's stream is read no further.
#[derive(Debug, Error)]
enum ReaderError {
    #[error(transparent)]
    Closed(#[from] GrantClosed),
    #[error("it ended inside a run")]
    EndInRun,
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    #[error(transparent)]
    Page(#[from] PageRefused),
    #[error("read a stream: {0}")]
    Read(#[from] ReadError),
}

/// How many chunks are taken at a time; a chunk is what one packet carried.
const CHUNKS: usize = 16;
