//! The socket on which engines connect.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use thiserror::Error;
use tokio::net::UnixListener;
use tracing::info;

/// Why a socket cannot be listened on.
#[derive(Debug, Error)]
pub enum ListenError {
    /// Another daemon answers there.
    #[error("{} is in use: another daemon listens there", .path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("listen on {}: {error}", .path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// There is something else.
    #[error("{} exists and is not a socket", .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
}

/// Listens on a socket that its owner and group can connect to.
pub(super) fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    let failed = |error| ListenError::Io {
        path: path.to_owned(),
        error,
    };
    remove_stale(path)?;
    let open = || -> io::Result<UnixListener> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket: OwnedFd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        // Before `listen`, so that nobody connects while the mode is the umask's.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))?;
        rustix::net::listen(&socket, LISTEN_BACKLOG)?;
        UnixListener::from_std(StdListener::from(socket))
    };
    open().map_err(failed)
}

/// Removes a socket on which nobody answers.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let failed = |error| ListenError::Io {
        path: path.to_owned(),
        error,
    };
    let kind = match path.symlink_metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    let path_buf = path.to_owned();
    if !kind.is_socket() {
        return Err(ListenError::NotASocket { path: path_buf });
    }
    match StdStream::connect(path) {
        Ok(_) => Err(ListenError::InUse { path: path_buf }),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            info!(path = %path.display(), "removed a stale socket");
            std::fs::remove_file(path).map_err(failed)
        }
        // Somebody may listen there, but that cannot be told.
        Err(error) => Err(failed(error)),
    }
}

const SOCKET_MODE: u32 = 0o660;
const LISTEN_BACKLOG: i32 = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.sock");
        let first = listen(&path).unwrap();
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
        assert!(matches!(listen(&path), Err(ListenError::InUse { .. })));
        drop(first);
        assert!(path.exists(), "the file outlives its listener");
        listen(&path).unwrap();
    }

    #[tokio::test]
    async fn what_is_not_a_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.sock");
        std::fs::write(&path, b"precious").unwrap();
        assert!(matches!(listen(&path), Err(ListenError::NotASocket { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    }
}
