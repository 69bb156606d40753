//! What survives the process: the node's identity, and its incarnation.
//!
//! ```text
//! state_dir/lock              held by the one daemon that runs here, which is noted in it
//!           certificate.der   self-signed; its BLAKE3 hash is the node id
//!           key.der           its private key (PKCS #8), mode 0600
//!           incarnation       the last one that was used
//! ```
//!
//! A file is written beside its place, synced, renamed into it, and the directory is synced; so at
//! a crash there is the old one or the new one. What cannot be read is an error at start, never a
//! reason to begin anew: an incarnation that goes back would make old offers and epochs live again.
//!
//! The lock keeps two daemons out of one directory. It says nothing about a predecessor's data
//! planes: those of `quic` and `shm` end with its process's threads, but what peers' devices write
//! through `verbs` ends when its process is wholly gone. So that is waited for.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fabric_proto::ids::{Epoch, Incarnation, NodeId};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use thiserror::Error;

use predecessor::Process;

mod predecessor;

/// A state directory that this process alone uses.
#[derive(Debug)]
pub struct Store {
    dir: PathBuf,
    /// Holds the lock until it is closed.
    _lock: File,
}

/// Who a node is.
#[derive(Debug)]
pub struct Identity {
    /// The hash of the certificate.
    pub node: NodeId,
    /// Self-signed; it says nothing but its key.
    pub certificate: CertificateDer<'static>,
    /// The certificate's private key.
    pub key: PrivatePkcs8KeyDer<'static>,
}

/// What [`init`] found or made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Init {
    /// The node.
    pub node: NodeId,
    /// Whether it is new.
    pub origin: Origin,
}

/// Whether an identity is new.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Origin {
    /// It was there.
    Existing,
    /// It was made just now.
    Made,
}

/// Makes a node's identity, unless there is one.
///
/// # Errors
///
/// [`StoreError`]; then there is either no identity, or the one that was there.
pub fn init(dir: &Path) -> Result<Init, StoreError> {
    if exists(&dir.join(CERTIFICATE))? {
        return found(dir);
    }
    std::fs::create_dir_all(dir).map_err(failed("create", dir))?;
    let store = Store::lock(dir)?;
    // Somebody else may have made it while we waited for nobody.
    if exists(&dir.join(CERTIFICATE))? {
        return found(dir);
    }
    if exists(&dir.join(INCARNATION))? {
        store.last_incarnation()?;
    } else {
        store.write(INCARNATION, &incarnation_text(0), PUBLIC)?;
    }
    let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?;
    let certificate =
        rcgen::CertificateParams::new(vec![CERTIFICATE_NAME.into()])?.self_signed(&key)?;
    // The certificate last: it is what makes the identity one.
    store.write(KEY, key.serialized_der(), PRIVATE)?;
    store.write(CERTIFICATE, certificate.der(), PUBLIC)?;
    Ok(Init {
        node: node_id(certificate.der()),
        origin: Origin::Made,
    })
}

/// The node that a certificate stands for.
#[must_use]
pub fn node_id(certificate: &CertificateDer<'_>) -> NodeId {
    NodeId(*blake3::hash(certificate).as_bytes())
}

impl Store {
    /// Opens a state directory that [`init`] has filled, and locks it.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] where another daemon has it; [`StoreError::NoIdentity`] where there is
    /// nothing to open.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        if !exists(&dir.join(CERTIFICATE))? {
            return Err(StoreError::NoIdentity {
                path: dir.to_owned(),
            });
        }
        Self::lock(dir)
    }

    /// Reads the identity.
    ///
    /// # Errors
    ///
    /// [`StoreError`], also where others can read the private key.
    pub fn identity(&self) -> Result<Identity, StoreError> {
        let certificate = CertificateDer::from(self.read(CERTIFICATE)?);
        let path = self.dir.join(KEY);
        let metadata = path.metadata().map_err(failed("inspect", &path))?;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(StoreError::KeyReadable {
                path,
                got: mode,
                want: PRIVATE,
            });
        }
        Ok(Identity {
            node: node_id(&certificate),
            certificate,
            key: PrivatePkcs8KeyDer::from(self.read(KEY)?),
        })
    }

    /// Begins a new life: an incarnation that is greater than every one before, and on disk.
    ///
    /// # Errors
    ///
    /// [`StoreError`]; then nothing may be done in the new incarnation's name.
    // S6: persisted before anything can be stamped with it.
    pub fn next_incarnation(&self) -> Result<Incarnation, StoreError> {
        let last = self.last_incarnation()?;
        let exhausted = StoreError::Exhausted { last };
        let next = last.checked_add(1).and_then(Incarnation::new);
        let next = next.filter(|next| Epoch::base(*next).is_some());
        let next = next.ok_or(exhausted)?;
        self.write(INCARNATION, &incarnation_text(next.as_u64()), PUBLIC)?;
        let read_back = self.last_incarnation()?;
        assert_eq!(
            read_back,
            next.as_u64(),
            "what was written is what is there"
        );
        assert!(read_back > last, "S6: incarnations go up");
        Ok(next)
    }

    fn last_incarnation(&self) -> Result<u64, StoreError> {
        let text = self.read(INCARNATION)?;
        parse_incarnation(&text).ok_or_else(|| StoreError::IncarnationCorrupt {
            path: self.dir.join(INCARNATION),
            bytes: text.len(),
        })
    }

    fn lock(dir: &Path) -> Result<Self, StoreError> {
        let path = dir.join(LOCK);
        let mut options = OpenOptions::new();
        options
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(PRIVATE);
        let lock = options.open(&path).map_err(failed("open", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(StoreError::InUse {
                    path: dir.to_owned(),
                });
            }
            Err(error) => return Err(failed("lock", &path)(error.into())),
        }
        let own = Process::own().map_err(failed("note this process in", &path))?;
        let before = Process::read(&lock).map_err(failed("read", &path))?;
        if let Some(before) = before.filter(|before| *before != own) {
            // S1: whatever peers' devices could write for it, they can not write any more.
            let is_gone = before.wait_gone(PREDECESSOR_WAIT);
            if !is_gone.map_err(failed("wait for who is noted in", &path))? {
                return Err(StoreError::PredecessorRuns {
                    path: dir.to_owned(),
                    pid: before.pid,
                    waited: PREDECESSOR_WAIT,
                });
            }
        }
        own.write(&lock)
            .map_err(failed("note this process in", &path))?;
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
        })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let path = self.dir.join(name);
        let file = File::open(&path).map_err(failed("open", &path))?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX)
            .read_to_end(&mut bytes)
            .map_err(failed("read", &path))?;
        Ok(bytes)
    }

    /// Replaces a file as a whole.
    fn write(&self, name: &str, bytes: &[u8], mode: u32) -> Result<(), StoreError> {
        let (path, beside) = (self.dir.join(name), self.dir.join(format!("{name}.tmp")));
        // From a crash between the lines below. Not reused: its mode may be another.
        if let Err(error) = std::fs::remove_file(&beside)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(failed("remove", &beside)(error));
        }
        let mut options = OpenOptions::new();
        options.create_new(true).write(true).mode(mode);
        let mut file = options.open(&beside).map_err(failed("create", &beside))?;
        file.write_all(bytes).map_err(failed("write", &beside))?;
        file.sync_all().map_err(failed("sync", &beside))?;
        std::fs::rename(&beside, &path).map_err(failed("replace", &path))?;
        let dir = File::open(&self.dir).map_err(failed("open", &self.dir))?;
        dir.sync_all().map_err(failed("sync", &self.dir))
    }
}

/// Why a state directory cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The certificate cannot be made.
    #[error("make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// There have been as many lives as can be counted.
    #[error("incarnation {last} was the last that can be counted: make a new identity")]
    Exhausted {
        /// The last one.
        last: u64,
    },
    /// The incarnation cannot be read.
    #[error(
        "{}: {bytes} bytes that are not an incarnation; put back the file as it was, or make a new \
         identity in an empty directory: starting over would make old offers valid again",
        .path.display()
    )]
    IncarnationCorrupt {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: usize,
    },
    /// Another daemon runs there.
    #[error("state directory {} is in use by another fabric-daemon", .path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The operating system refuses.
    #[error("{call} {}: {error}", .path.display())]
    Io {
        /// What was tried.
        call: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// The private key is not private.
    #[error(
        "{}: others can read the key: mode {got:04o}, and {want:04o} is needed",
        .path.display()
    )]
    KeyReadable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        got: u32,
        /// The mode that it must have.
        want: u32,
    },
    /// The process before this one has let go of its lock, but has not ended.
    #[error(
        "state directory {}: process {pid}, which had it before, has not ended within {waited:?}",
        .path.display()
    )]
    PredecessorRuns {
        /// The directory.
        path: PathBuf,
        /// The process.
        pid: i32,
        /// For so long.
        waited: Duration,
    },
    /// There is no identity.
    #[error(
        "state directory {} has no identity: run fabric-daemon init --state-dir {}",
        .path.display(), .path.display()
    )]
    NoIdentity {
        /// The directory.
        path: PathBuf,
    },
}

fn failed(call: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError + use<> {
    let path = path.to_owned();
    move |error| StoreError::Io { call, path, error }
}

fn exists(path: &Path) -> Result<bool, StoreError> {
    path.try_exists().map_err(failed("inspect", path))
}

fn found(dir: &Path) -> Result<Init, StoreError> {
    let path = dir.join(CERTIFICATE);
    let certificate = std::fs::read(&path).map_err(failed("read", &path))?;
    let incarnation = dir.join(INCARNATION);
    std::fs::metadata(&incarnation).map_err(failed("inspect", &incarnation))?;
    Ok(Init {
        node: node_id(&CertificateDer::from(certificate)),
        origin: Origin::Existing,
    })
}

/// The number, and a digest of it, so that a file that was cut off or edited is seen to be.
fn incarnation_text(incarnation: u64) -> Vec<u8> {
    let head = format!("{INCARNATION_HEAD}{incarnation} ");
    let digest = blake3::hash(head.as_bytes()).to_hex();
    format!("{head}{}\n", &digest[..16]).into_bytes()
}

fn parse_incarnation(text: &[u8]) -> Option<u64> {
    let line = std::str::from_utf8(text).ok()?;
    let (number, _) = line.strip_prefix(INCARNATION_HEAD)?.split_once(' ')?;
    let incarnation = number.parse().ok()?;
    (incarnation_text(incarnation) == text).then_some(incarnation)
}

const LOCK: &str = "lock";
const CERTIFICATE: &str = "certificate.der";
const KEY: &str = "key.der";
const INCARNATION: &str = "incarnation";
const INCARNATION_HEAD: &str = "fabric incarnation ";

/// The name in every certificate, and the one that clients ask for. It identifies nobody.
pub(crate) const CERTIFICATE_NAME: &str = "fabric";

const PUBLIC: u32 = 0o644;
const PRIVATE: u32 = 0o600;

/// A process that was killed takes a moment to end: its memory is taken apart.
const PREDECESSOR_WAIT: Duration = Duration::from_secs(30);

/// Far more than any of the files has.
const FILE_BYTES_MAX: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> (tempfile::TempDir, NodeId) {
        let dir = tempfile::tempdir().unwrap();
        let made = init(dir.path()).unwrap();
        assert_eq!(made.origin, Origin::Made);
        (dir, made.node)
    }

    fn start(dir: &Path) -> Result<u64, StoreError> {
        let store = Store::open(dir)?;
        store.next_incarnation().map(Incarnation::as_u64)
    }

    #[test]
    fn an_identity_is_made_once_and_its_key_is_private() {
        let (dir, node) = fresh();
        let again = init(dir.path()).unwrap();
        assert_eq!((again.node, again.origin), (node, Origin::Existing));
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.identity().unwrap().node, node);
        let key = dir.path().join(KEY);
        assert_eq!(key.metadata().unwrap().permissions().mode() & 0o777, 0o600);

        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o640)).unwrap();
        let error = store.identity().unwrap_err().to_string();
        assert!(error.ends_with("mode 0640, and 0600 is needed"), "{error}");
    }

    #[test]
    fn incarnations_go_up_by_one_at_every_start() {
        let (dir, _) = fresh();
        for want in 1..=5 {
            assert_eq!(start(dir.path()).unwrap(), want);
        }
    }

    #[test]
    fn a_directory_without_identity_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let error = start(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains("run fabric-daemon init --state-dir"),
            "{error}"
        );
    }

    #[test]
    fn one_daemon_at_a_time_has_a_state_directory() {
        let (dir, _) = fresh();
        let first = Store::open(dir.path()).unwrap();
        let error = Store::open(dir.path()).unwrap_err().to_string();
        assert!(
            error.ends_with("is in use by another fabric-daemon"),
            "{error}"
        );
        drop(first);
        Store::open(dir.path()).unwrap();
    }

    // S1: its devices may still write.
    #[test]
    fn a_predecessor_that_has_not_ended_is_waited_for() {
        let (dir, _) = fresh();
        drop(Store::open(dir.path()).unwrap());
        let mut child = std::process::Command::new("sleep")
            .arg("0.5")
            .spawn()
            .unwrap();
        let noted = File::options()
            .write(true)
            .open(dir.path().join(LOCK))
            .unwrap();
        let process = Process::of(rustix::process::Pid::from_child(&child)).unwrap();
        process.unwrap().write(&noted).unwrap();
        let _store = Store::open(dir.path()).unwrap();
        // Ended, and nobody has waited for it before us.
        assert!(child.try_wait().unwrap().is_some());
        let own = Process::own().unwrap();
        assert_eq!(
            Process::read(&File::open(dir.path().join(LOCK)).unwrap()).unwrap(),
            Some(own)
        );
    }

    // S6: a crash at any point of the write leaves the old number or the new one.
    #[test]
    fn a_crash_before_the_rename_leaves_the_last_incarnation() {
        let (dir, _) = fresh();
        assert_eq!(start(dir.path()).unwrap(), 1);
        let beside = dir.path().join("incarnation.tmp");
        for leftover in [&b""[..], b"fabric incar", &incarnation_text(77)] {
            std::fs::write(&beside, leftover).unwrap();
            let before = std::fs::read(dir.path().join(INCARNATION)).unwrap();
            let last = parse_incarnation(&before).unwrap();
            assert_eq!(start(dir.path()).unwrap(), last + 1, "{leftover:?}");
            assert!(!beside.exists());
        }
    }

    // S6: never a reset.
    #[test]
    fn a_damaged_or_missing_incarnation_is_an_error_and_never_a_reset() {
        let (dir, _) = fresh();
        let path = dir.path().join(INCARNATION);
        let whole = incarnation_text(1234);
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let error = start(dir.path()).unwrap_err();
            assert!(
                matches!(error, StoreError::IncarnationCorrupt { bytes, .. } if bytes == cut),
                "{error}"
            );
            assert_eq!(
                std::fs::read(&path).unwrap(),
                &whole[..cut],
                "left as it was"
            );
        }
        for index in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[index] ^= 1;
            std::fs::write(&path, &flipped).unwrap();
            assert!(start(dir.path()).is_err(), "byte {index} flipped");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(start(dir.path()).is_err());
        assert!(init(dir.path()).is_err(), "init does not reset it either");
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(start(dir.path()).unwrap(), 1235);
    }

    #[test]
    fn the_last_incarnation_that_fits_is_the_last() {
        let (dir, _) = fresh();
        let last = u64::from(u32::MAX);
        std::fs::write(dir.path().join(INCARNATION), incarnation_text(last)).unwrap();
        let error = start(dir.path()).unwrap_err();
        assert!(matches!(error, StoreError::Exhausted { last: got } if got == last));
    }
}
