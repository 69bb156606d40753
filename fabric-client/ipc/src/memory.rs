//! Sealed memory files: how a pool's bytes are shared between an engine and its daemon.
//!
//! Whoever can truncate a file can kill, by SIGBUS, every process that has mapped it. So the two
//! sides share only memory files (memfd) sealed against shrinking, and each side checks the
//! descriptors that it receives: a seal cannot be taken off again (fcntl(2), "File Sealing").

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
    memfd_create,
};
use rustix::io::Errno;
use thiserror::Error;

/// Creates a memory file of `bytes` zero bytes whose size can never change again.
///
/// `name` is for people (`/proc/<pid>/maps`); it need not be unique, and has at most 249 bytes.
/// Memory is allocated page by page as it is touched.
///
/// # Errors
///
/// [`MemoryError::Empty`] for 0 bytes, and [`MemoryError::TooLarge`] or an operating system's error
/// if there cannot be such a file.
pub fn create_sealed(name: &str, bytes: u64) -> Result<OwnedFd, MemoryError> {
    if bytes == 0 {
        return Err(MemoryError::Empty);
    }
    if bytes > MEMORY_BYTES_MAX {
        return Err(MemoryError::TooLarge {
            got: bytes,
            max: MEMORY_BYTES_MAX,
        });
    }
    let fd = create(name).map_err(MemoryError::Create)?;
    ftruncate(&fd, bytes).map_err(MemoryError::Resize)?;
    // `SEAL` too, so that nobody can make the file unwritable under a peer that is yet to map it.
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&fd, seals).map_err(MemoryError::Seal)?;
    Ok(fd)
}

/// Checks that `fd` is a memory file of at least `bytes` bytes that can never shrink.
///
/// What holds once holds for as long as the file lives.
///
/// # Errors
///
/// [`MemoryError::NotMemoryFile`], [`MemoryError::HugePages`], [`MemoryError::NotSealed`],
/// [`MemoryError::TooSmall`] or [`MemoryError::Empty`]: the peer's fault. [`MemoryError::Inspect`]:
/// the operating system's.
pub fn check_sealed(fd: impl AsFd, bytes: u64) -> Result<(), MemoryError> {
    let fd = fd.as_fd();
    if bytes == 0 {
        return Err(MemoryError::Empty);
    }
    // Only file systems that know seals answer; a regular tmpfs file does, but cannot have SHRINK.
    let seals = fcntl_get_seals(fd).map_err(|errno| match errno {
        Errno::INVAL | Errno::BADF => MemoryError::NotMemoryFile,
        other => MemoryError::Inspect(other),
    })?;
    let magic = fstatfs(fd).map_err(MemoryError::Inspect)?.f_type;
    if u64::try_from(magic) == Ok(HUGETLBFS_MAGIC) {
        return Err(MemoryError::HugePages);
    }
    // The seals before the size: the other way round, the file could shrink in between.
    if !seals.contains(SealFlags::SHRINK) {
        return Err(MemoryError::NotSealed {
            got: seals.bits(),
            want: SealFlags::SHRINK.bits(),
        });
    }
    let size = fstat(fd).map_err(MemoryError::Inspect)?.st_size;
    let got = u64::try_from(size).expect("the kernel gives no file a negative size");
    if got < bytes {
        return Err(MemoryError::TooSmall { got, want: bytes });
    }
    Ok(())
}

/// Why a memory file could not be made, or a descriptor is not one that can be mapped safely.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum MemoryError {
    /// memfd_create(2) failed.
    #[error("create a memory file: {0}")]
    Create(#[source] Errno),
    /// No bytes were asked for: there is nothing to map.
    #[error("a memory file of 0 bytes")]
    Empty,
    /// The file is on hugetlbfs, where touching a mapping can raise SIGBUS whatever the seals (the
    /// peer can punch holes, and the pool of huge pages can run dry).
    #[error("a memory file of huge pages can fault when it is touched")]
    HugePages,
    /// The descriptor could not be inspected.
    #[error("inspect a memory file: {0}")]
    Inspect(#[source] Errno),
    /// The descriptor is not a file that can have seals.
    #[error("the descriptor is not a memory file")]
    NotMemoryFile,
    /// The file can still shrink. Both are `F_SEAL_*` bits.
    #[error("the memory file's seals are {got:#x}, need {want:#x}")]
    NotSealed {
        /// The seals that it has.
        got: u32,
        /// The seals that it must have, among others.
        want: u32,
    },
    /// ftruncate(2) failed.
    #[error("resize a memory file: {0}")]
    Resize(#[source] Errno),
    /// fcntl(2), `F_ADD_SEALS`, failed.
    #[error("seal a memory file: {0}")]
    Seal(#[source] Errno),
    /// More bytes than any file can have.
    #[error("a memory file of {got} bytes, at most {max}")]
    TooLarge {
        /// Bytes asked for.
        got: u64,
        /// Bytes possible.
        max: u64,
    },
    /// The file is smaller than what is to be mapped.
    #[error("the memory file has {got} bytes, need {want}")]
    TooSmall {
        /// The file's bytes.
        got: u64,
        /// The bytes to be mapped.
        want: u64,
    },
}

/// Creates the file, not executable where the kernel has that (Linux 6.3); before, the flag is
/// EINVAL.
fn create(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags),
        result => result,
    }
}

/// File sizes are signed in the kernel.
const MEMORY_BYTES_MAX: u64 = i64::MAX.unsigned_abs();

/// M: statfs(2), `HUGETLBFS_MAGIC`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const BYTES: u64 = 64 * 1024;

    #[test]
    fn created_memory_passes_the_check() {
        let fd = create_sealed("test", BYTES).unwrap();
        assert_eq!(check_sealed(&fd, BYTES), Ok(()));
        assert_eq!(check_sealed(&fd, 1), Ok(()), "more than enough is enough");
    }

    #[test]
    fn size_never_changes_after_sealing() {
        let fd = create_sealed("test", BYTES).unwrap();
        assert_eq!(ftruncate(&fd, BYTES - 1), Err(Errno::PERM), "shrink");
        assert_eq!(ftruncate(&fd, BYTES + 1), Err(Errno::PERM), "grow");
        assert_eq!(
            fcntl_add_seals(&fd, SealFlags::WRITE),
            Err(Errno::PERM),
            "seal further"
        );
    }

    #[test]
    fn unsealed_file_is_refused() {
        let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, BYTES).unwrap();
        let want = SealFlags::SHRINK.bits();
        assert_eq!(
            check_sealed(&fd, BYTES),
            Err(MemoryError::NotSealed { got: 0, want })
        );

        fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
        let got = SealFlags::GROW.bits();
        let error = check_sealed(&fd, BYTES);
        assert_eq!(
            error,
            Err(MemoryError::NotSealed { got, want }),
            "the wrong seal is none"
        );
    }

    #[test]
    fn what_is_no_memory_file_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(BYTES).unwrap();
        let error = check_sealed(&file, BYTES).unwrap_err();
        // A tmpfs file knows seals, but has none that helps; other file systems know none.
        assert!(
            matches!(
                error,
                MemoryError::NotMemoryFile | MemoryError::NotSealed { .. }
            ),
            "{error}"
        );

        let (socket, _peer) = UnixStream::pair().unwrap();
        assert_eq!(
            check_sealed(&socket, BYTES),
            Err(MemoryError::NotMemoryFile)
        );
    }

    #[test]
    fn smaller_memory_than_claimed_is_refused() {
        let fd = create_sealed("test", BYTES).unwrap();
        let want = BYTES + 1;
        assert_eq!(
            check_sealed(&fd, want),
            Err(MemoryError::TooSmall { got: BYTES, want })
        );
        let want = u64::MAX;
        assert_eq!(
            check_sealed(&fd, want),
            Err(MemoryError::TooSmall { got: BYTES, want })
        );
    }

    #[test]
    fn impossible_sizes_and_names_are_refused() {
        assert_eq!(create_sealed("test", 0).unwrap_err(), MemoryError::Empty);
        let (got, max) = (u64::MAX, MEMORY_BYTES_MAX);
        let error = create_sealed("test", got).unwrap_err();
        assert_eq!(error, MemoryError::TooLarge { got, max });
        let error = create_sealed(&"x".repeat(250), BYTES).unwrap_err();
        assert_eq!(error, MemoryError::Create(Errno::INVAL));

        let fd = create_sealed("test", BYTES).unwrap();
        assert_eq!(check_sealed(&fd, 0), Err(MemoryError::Empty));
    }

    #[test]
    fn huge_pages_are_refused() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        // A kernel without huge pages cannot be asked for the file that is to be refused.
        let Ok(fd) = memfd_create("test", flags) else {
            return;
        };
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert_eq!(check_sealed(&fd, BYTES), Err(MemoryError::HugePages));
    }
}
