//! Bounds-checked access to a sealed memory file that other processes, or a NIC, may write.
//!
//! No safe function here makes a `&[u8]` or `&mut [u8]` over mapped bytes: the compiler may assume
//! that such a slice does not change under it, and a peer can change these at any moment. The safe
//! methods move bytes between the mapping and private memory through raw pointers.
//!
//! What a race then costs: bytes that somebody else writes during `read`, `copy_from` or `crc32c`
//! come out old, new or mixed, and nothing else. No length, address or branch is ever taken from
//! mapped bytes, and the copies are calls of memmove and memset, into which the compiler does not
//! see. That the bytes that anybody *uses* are not racing is for the protocol to say: one
//! lease per slot (S5), and reading only after the fence (S2).
//!
//! No peer can make an access fault: the file is sealed against shrinking (checked here, not by the
//! caller), is not of huge pages, and the mapping ends before the file does.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::slice;

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::io::Errno;
use thiserror::Error;

use crate::checksum::Crc32c;
use crate::memory::{MemoryError, check_sealed};

/// A shared mapping of a sealed memory file, unmapped when dropped.
///
/// Offsets and lengths are in bytes. An empty range is in bounds up to and including the end.
///
/// The kernel is told that huge pages are welcome: 2 MiB at a time take fewer faults, fewer entries
/// in the TLB and, where a NIC has the memory, in its own tables. It heeds that where
/// `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is `advise` (or `within_size` or `always`;
/// the default is `never`), for pages that nobody has touched before, and where as much contiguous
/// memory is free: else pages are small. Such pages never raise SIGBUS, other than those of
/// hugetlbfs. A file of which little is ever touched may take more memory with them.
pub struct Mapping {
    raw: MmapRaw,
    access: Access,
}

// A mapping is shared between the threads of a plane. `MmapRaw` is `Send + Sync` because it hands
// out raw pointers only, and so do the methods below, but for the unsafe ones.
const _: () = {
    const fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Mapping>();
};

impl Mapping {
    /// Maps the first `bytes` bytes of `fd` for reading and writing.
    ///
    /// # Errors
    ///
    /// [`MappingError::Memory`] if `fd` is not a memory file sealed against shrinking, or is
    /// smaller; [`MappingError::Map`] if the operating system refuses.
    pub fn read_write(fd: impl AsFd, bytes: u64) -> Result<Self, MappingError> {
        let fd = fd.as_fd();
        check_sealed(fd, bytes)?;
        let options = options(bytes)?;
        let raw = options.map_raw(fd.as_raw_fd()).map_err(MappingError::Map)?;
        advise_huge(&raw);
        Ok(Self {
            raw,
            access: Access::ReadWrite,
        })
    }

    /// Maps the first `bytes` bytes of `fd` for reading: the hardware refuses a write.
    ///
    /// # Errors
    ///
    /// As [`Mapping::read_write`].
    pub fn read_only(fd: impl AsFd, bytes: u64) -> Result<Self, MappingError> {
        let fd = fd.as_fd();
        check_sealed(fd, bytes)?;
        let options = options(bytes)?;
        let raw = options
            .map_raw_read_only(fd.as_raw_fd())
            .map_err(MappingError::Map)?;
        advise_huge(&raw);
        Ok(Self {
            raw,
            access: Access::ReadOnly,
        })
    }

    /// Returns the mapping's length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        wide(self.raw.len())
    }

    /// Returns where the mapping begins, for whoever hands it to a NIC. It is mapped for as long as
    /// this value lives.
    #[must_use]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.raw.as_mut_ptr()
    }

    /// Copies `source` to `offset`.
    ///
    /// # Errors
    ///
    /// [`MappingError::ReadOnly`], [`MappingError::OutOfBounds`]; then nothing was written.
    pub fn write(&self, offset: u64, source: &[u8]) -> Result<(), MappingError> {
        let target = self.writable(offset, wide(source.len()))?;
        // SAFETY: `writable` has checked that the target's bytes are mapped and writable; the
        // caller's slice is valid for its length. `copy` allows the two to overlap, should the
        // slice be of this memory (see `slice`).
        unsafe { ptr::copy(source.as_ptr(), target, source.len()) };
        Ok(())
    }

    /// Copies the bytes at `offset` to `target`, filling it.
    ///
    /// # Errors
    ///
    /// [`MappingError::OutOfBounds`]; then `target` is as it was.
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), MappingError> {
        let source = self.readable(offset, wide(target.len()))?;
        // SAFETY: `readable` has checked that the source's bytes are mapped; `target` is the
        // caller's, exclusively, for its length.
        unsafe { ptr::copy(source, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `len` bytes at `source_offset` of `source` to `target_offset` of this mapping.
    ///
    /// The two may be the same mapping and may overlap. If they are *different* mappings of one
    /// file and overlap there, what is written is unspecified.
    ///
    /// # Errors
    ///
    /// [`MappingError::ReadOnly`], [`MappingError::OutOfBounds`]; then nothing was written.
    pub fn copy_from(
        &self,
        source: &Self,
        source_offset: u64,
        target_offset: u64,
        len: u64,
    ) -> Result<(), MappingError> {
        let source = source.readable(source_offset, len)?;
        let target = self.writable(target_offset, len)?;
        // SAFETY: `readable` and `writable` have checked that both ranges are mapped, the target's
        // writable, and `copy` allows them to overlap.
        unsafe { ptr::copy(source, target, narrow(len)) };
        Ok(())
    }

    /// Writes `len` zero bytes at `offset`.
    ///
    /// # Errors
    ///
    /// [`MappingError::ReadOnly`], [`MappingError::OutOfBounds`]; then nothing was written.
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), MappingError> {
        let target = self.writable(offset, len)?;
        // SAFETY: `writable` has checked that these bytes are mapped and writable.
        unsafe { ptr::write_bytes(target, 0, narrow(len)) };
        Ok(())
    }

    /// Returns the CRC-32C of `len` bytes at `offset`, whoever may be writing them.
    ///
    /// The bytes pass through a private buffer, 4 KiB at a time. That costs about a fifth of the
    /// speed out of memory (6.7 instead of 8.6 GB/s on a shared machine, 64 KiB pages) and more
    /// than half in cache. Who holds the lease can use [`Mapping::slice`] and [`crate::crc32c`]
    /// instead.
    ///
    /// # Errors
    ///
    /// [`MappingError::OutOfBounds`].
    pub fn crc32c(&self, offset: u64, len: u64) -> Result<u32, MappingError> {
        self.readable(offset, len)?;
        let mut crc = Crc32c::new();
        let mut buffer = [0; CRC_BUFFER_BYTES];
        let mut done = 0;
        while done < len {
            let step = (len - done).min(wide(CRC_BUFFER_BYTES));
            let piece = &mut buffer[..narrow(step)];
            self.read(offset + done, piece)?;
            crc.update(piece);
            done += step;
        }
        assert_eq!(done, len, "every byte asked for is in the checksum");
        Ok(crc.value())
    }

    /// Has the kernel allocate and map every page now, so that no later access waits for it.
    ///
    /// # Errors
    ///
    /// [`MappingError::Prefault`] if there is not enough memory; some pages may be mapped then.
    pub fn prefault(&self) -> Result<Prefault, MappingError> {
        let advice = match self.access {
            Access::ReadOnly => Advice::PopulateRead,
            Access::ReadWrite => Advice::PopulateWrite,
        };
        match self.raw.advise(advice) {
            Ok(()) => Ok(Prefault::Populated),
            // M: madvise(2): EINVAL before Linux 5.14.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                Ok(Prefault::Unsupported)
            }
            Err(error) => Err(MappingError::Prefault(error)),
        }
    }

    /// Views `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// [`MappingError::OutOfBounds`].
    ///
    /// # Safety
    ///
    /// The caller holds the lease, or a pin, on these bytes, and every grant that names them is
    /// closed. So for as long as the slice lives nobody writes them: not this process (through
    /// [`Mapping::write`], [`Mapping::slice_mut`] or another mapping), no other process, no NIC, no
    /// GPU.
    pub unsafe fn slice(&self, offset: u64, len: u64) -> Result<&[u8], MappingError> {
        let start = self.readable(offset, len)?;
        // SAFETY: `readable` has checked that these bytes are mapped, and `self`, borrowed for the
        // slice's life, keeps them so; the caller upholds that nobody writes them.
        Ok(unsafe { slice::from_raw_parts(start, narrow(len)) })
    }

    /// Views `len` bytes at `offset`, to write them in place.
    ///
    /// # Errors
    ///
    /// [`MappingError::ReadOnly`], [`MappingError::OutOfBounds`].
    ///
    /// # Safety
    ///
    /// The caller holds the lease on these bytes, and every grant that names them is closed. So for
    /// as long as the slice lives nobody else reads or writes them: not this process (through any
    /// method here or another mapping), no other process, no NIC, no GPU.
    #[expect(
        clippy::mut_from_ref,
        reason = "the lease, not the borrow, makes access exclusive"
    )]
    pub unsafe fn slice_mut(&self, offset: u64, len: u64) -> Result<&mut [u8], MappingError> {
        let start = self.writable(offset, len)?;
        // SAFETY: `writable` has checked that these bytes are mapped and writable, and `self`,
        // borrowed for the slice's life, keeps them so; the caller upholds that nobody else touches
        // them.
        Ok(unsafe { slice::from_raw_parts_mut(start, narrow(len)) })
    }

    /// Returns a pointer to `len` bytes that are mapped.
    fn readable(&self, offset: u64, len: u64) -> Result<*const u8, MappingError> {
        Ok(self.in_bounds(offset, len)?.cast_const())
    }

    /// Returns a pointer to `len` bytes that are mapped and writable.
    fn writable(&self, offset: u64, len: u64) -> Result<*mut u8, MappingError> {
        match self.access {
            Access::ReadOnly => Err(MappingError::ReadOnly),
            Access::ReadWrite => self.in_bounds(offset, len),
        }
    }

    fn in_bounds(&self, offset: u64, len: u64) -> Result<*mut u8, MappingError> {
        let bytes = self.bytes();
        if offset > bytes || len > bytes - offset {
            return Err(MappingError::OutOfBounds { offset, len, bytes });
        }
        // SAFETY: the lines above show that `offset` is within the mapping or just at its end.
        Ok(unsafe { self.raw.as_mut_ptr().add(narrow(offset)) })
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { raw: _, access } = self;
        // Not the address: it helps only who should not have it.
        f.debug_struct("Mapping")
            .field("bytes", &self.bytes())
            .field("access", access)
            .finish_non_exhaustive()
    }
}

/// What [`Mapping::prefault`] did.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Prefault {
    /// Every page is allocated and mapped.
    Populated,
    /// The kernel is older than Linux 5.14; pages are mapped at first touch.
    Unsupported,
}

/// Why memory could not be mapped or accessed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MappingError {
    /// mmap(2) failed.
    #[error("map memory: {0}")]
    Map(#[source] io::Error),
    /// The descriptor is not one that can be mapped safely.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The bytes are not all within the mapping.
    #[error("{len} bytes at {offset} of a mapping of {bytes} bytes")]
    OutOfBounds {
        /// Where the bytes start.
        offset: u64,
        /// How many they are.
        len: u64,
        /// How many bytes the mapping has.
        bytes: u64,
    },
    /// madvise(2), `MADV_POPULATE_*`, failed.
    #[error("prefault memory: {0}")]
    Prefault(#[source] io::Error),
    /// A write to a read-only mapping.
    #[error("the mapping is read-only")]
    ReadOnly,
    /// More bytes than this machine can address.
    #[error("a mapping of {got} bytes, at most {max}")]
    TooLarge {
        /// Bytes asked for.
        got: u64,
        /// Bytes possible.
        max: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum Access {
    ReadOnly,
    ReadWrite,
}

/// Welcomes huge pages: see [`Mapping`].
fn advise_huge(raw: &MmapRaw) {
    // M: madvise(2): EINVAL where the kernel was built without them. Whatever it says, the mapping
    // is as good as before.
    let _advice_taken = raw.advise(Advice::HugePage);
}

fn options(bytes: u64) -> Result<MmapOptions, MappingError> {
    // Pointer arithmetic within one object is limited to `isize::MAX` bytes.
    let max = wide(isize::MAX.unsigned_abs());
    if bytes > max {
        return Err(MappingError::TooLarge { got: bytes, max });
    }
    let mut options = MmapOptions::new();
    options.len(narrow(bytes));
    Ok(options)
}

fn wide(bytes: usize) -> u64 {
    u64::try_from(bytes).expect("no machine has more than 64-bit addresses")
}

/// Only for what is known to be at most a mapping's length.
fn narrow(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a mapping's length fits usize: see `options`")
}

/// Small enough for the innermost cache, large enough that the checksum's start-up does not show.
const CRC_BUFFER_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;
    use crate::memory::create_sealed;

    const LEN: usize = 64 * 1024;
    const BYTES: u64 = LEN as u64;

    fn memory() -> OwnedFd {
        create_sealed("test", BYTES).unwrap()
    }

    fn read(mapping: &Mapping, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0xEE; len];
        mapping.read(offset, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn two_mappings_of_one_file_see_each_others_bytes() {
        let fd = memory();
        let (first, second) = (
            Mapping::read_write(&fd, BYTES).unwrap(),
            Mapping::read_write(&fd, BYTES).unwrap(),
        );
        let reader = Mapping::read_only(&fd, BYTES).unwrap();
        drop(fd);

        first.write(100, b"from the first").unwrap();
        second.write(BYTES - 4, b"last").unwrap();
        for mapping in [&first, &second, &reader] {
            assert_eq!(read(mapping, 100, 14), b"from the first");
            assert_eq!(read(mapping, BYTES - 4, 4), b"last");
        }
        second.zero(100, 8).unwrap();
        assert_eq!(read(&first, 100, 14), b"\0\0\0\0\0\0\0\0 first");
    }

    #[test]
    fn read_only_mapping_refuses_every_write() {
        let fd = memory();
        let writer = Mapping::read_write(&fd, BYTES).unwrap();
        let reader = Mapping::read_only(&fd, BYTES).unwrap();
        assert!(matches!(reader.write(0, b"x"), Err(MappingError::ReadOnly)));
        assert!(matches!(reader.zero(0, 1), Err(MappingError::ReadOnly)));
        assert!(matches!(
            reader.copy_from(&writer, 0, 0, 1),
            Err(MappingError::ReadOnly)
        ));
        // SAFETY: nobody else in this test touches these bytes.
        let slice = unsafe { reader.slice_mut(0, 1) };
        assert!(matches!(slice, Err(MappingError::ReadOnly)));
        assert_eq!(read(&writer, 0, 1), [0], "nothing was written");
    }

    #[test]
    fn read_only_mapping_is_read_only_in_the_page_tables() {
        let fd = memory();
        for (mapping, want) in [
            (Mapping::read_only(&fd, BYTES).unwrap(), "r--s"),
            (Mapping::read_write(&fd, BYTES).unwrap(), "rw-s"),
        ] {
            let start = format!("{:x}-", mapping.raw.as_ptr() as usize);
            let maps = fs::read_to_string("/proc/self/maps").unwrap();
            let line = maps.lines().find(|line| line.starts_with(&start)).unwrap();
            assert_eq!(line.split(' ').nth(1), Some(want), "{line}");
        }
    }

    #[test]
    fn ranges_outside_are_refused_whatever_the_arithmetic() {
        let mapping = Mapping::read_write(memory(), BYTES).unwrap();
        for (offset, len) in [
            (0, BYTES + 1),
            (1, BYTES),
            (BYTES, 1),
            (BYTES + 1, 0),
            (u64::MAX, 0),
            (u64::MAX, 1),
            (1, u64::MAX),
            (u64::MAX, u64::MAX),
        ] {
            let want = MappingError::OutOfBounds {
                offset,
                len,
                bytes: BYTES,
            }
            .to_string();
            assert_eq!(mapping.zero(offset, len).unwrap_err().to_string(), want);
            assert_eq!(mapping.crc32c(offset, len).unwrap_err().to_string(), want);
            assert_eq!(
                mapping
                    .copy_from(&mapping, offset, 0, len)
                    .unwrap_err()
                    .to_string(),
                want
            );
            assert!(mapping.copy_from(&mapping, 0, offset, len).is_err());
            // SAFETY: nobody else in this test touches these bytes.
            let slice = unsafe { mapping.slice(offset, len) };
            assert_eq!(slice.unwrap_err().to_string(), want);
        }
        assert!(mapping.write(BYTES - 1, b"xy").is_err());
        assert!(mapping.read(BYTES - 1, &mut [0; 2]).is_err());
        assert_eq!(read(&mapping, 0, LEN), [0; LEN], "all untouched");
    }

    #[test]
    fn empty_range_at_the_end_is_in_bounds() {
        let mapping = Mapping::read_write(memory(), BYTES).unwrap();
        mapping.write(BYTES, b"").unwrap();
        mapping.zero(BYTES, 0).unwrap();
        assert_eq!(mapping.crc32c(BYTES, 0).unwrap(), 0);
    }

    #[test]
    fn bytes_beyond_the_mapped_part_are_out_of_bounds() {
        let mapping = Mapping::read_write(memory(), BYTES / 2).unwrap();
        assert_eq!(mapping.bytes(), BYTES / 2);
        assert!(mapping.write(BYTES / 2, b"x").is_err());
    }

    #[test]
    fn copies_between_and_within_mappings_arrive_whole() {
        let (left, right) = (
            Mapping::read_write(memory(), BYTES).unwrap(),
            Mapping::read_write(memory(), BYTES).unwrap(),
        );
        let page: Vec<u8> = (0..4096_u32).map(|i| i.to_le_bytes()[0] ^ 0x5A).collect();
        left.write(4096, &page).unwrap();
        right.copy_from(&left, 4096, 8192, 4096).unwrap();
        assert_eq!(read(&right, 8192, 4096), page);

        right.copy_from(&right, 8192, 8200, 4096).unwrap();
        assert_eq!(
            read(&right, 8200, 4096),
            page,
            "an overlapping copy behaves like memmove"
        );
    }

    #[test]
    fn checksum_is_that_of_the_bytes() {
        let mapping = Mapping::read_write(memory(), BYTES).unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|i| (i * 31).to_le_bytes()[1]).collect();
        mapping.write(0, &bytes).unwrap();
        for (offset, len) in [(0, LEN), (1, 4096), (4095, 4097), (7, 3), (LEN - 1, 1)] {
            let want = crate::crc32c(&bytes[offset..offset + len]);
            let got = mapping.crc32c(wide(offset), wide(len)).unwrap();
            assert_eq!(got, want, "{len} bytes at {offset}");
        }
    }

    #[test]
    fn slices_are_views_of_the_mapping() {
        let mapping = Mapping::read_write(memory(), BYTES).unwrap();
        // SAFETY: nobody else in this test touches these bytes.
        let slice = unsafe { mapping.slice_mut(10, 3) }.unwrap();
        slice.copy_from_slice(b"abc");
        // SAFETY: as above, and the mutable slice is not used any more.
        let slice = unsafe { mapping.slice(9, 5) }.unwrap();
        assert_eq!(slice, b"\0abc\0");
    }

    #[test]
    fn unsealed_or_small_memory_is_not_mapped() {
        let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, BYTES).unwrap();
        let error = Mapping::read_only(&fd, BYTES).unwrap_err();
        assert!(
            matches!(error, MappingError::Memory(MemoryError::NotSealed { .. })),
            "{error}"
        );

        let error = Mapping::read_write(memory(), BYTES + 1).unwrap_err();
        assert!(
            matches!(error, MappingError::Memory(MemoryError::TooSmall { .. })),
            "{error}"
        );
    }

    #[test]
    fn memory_sealed_against_writing_is_not_mapped_for_writing() {
        let fd = memfd_create("test", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, BYTES).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::WRITE).unwrap();
        assert!(matches!(
            Mapping::read_write(&fd, BYTES),
            Err(MappingError::Map(_))
        ));
    }

    /// Of the mapping that begins there: what is in its line of that name of `/proc/self/smaps`.
    fn smaps(start: *const u8, name: &str) -> Option<String> {
        let start = format!("{:x}-", start as usize);
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
    }

    #[test]
    fn huge_pages_are_welcome_on_both_sides() {
        let fd = memory();
        // Without: the kernel was built without them, and nobody can be told.
        let has_huge_pages = fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap();
        for mapping in [
            Mapping::read_write(&fd, BYTES).unwrap(),
            Mapping::read_only(&fd, BYTES).unwrap(),
        ] {
            let flags = smaps(mapping.raw.as_ptr(), "VmFlags:").unwrap();
            let is_advised = flags.split(' ').any(|flag| flag == "hg");
            assert_eq!(is_advised, has_huge_pages, "{flags}");
        }
    }

    #[test]
    fn prefault_changes_no_byte() {
        let fd = memory();
        let writer = Mapping::read_write(&fd, BYTES).unwrap();
        writer.write(5, b"kept").unwrap();
        for mapping in [&writer, &Mapping::read_only(&fd, BYTES).unwrap()] {
            assert_eq!(mapping.prefault().unwrap(), Prefault::Populated);
            assert_eq!(read(mapping, 4, 6), b"\0kept\0");
        }
    }
}
