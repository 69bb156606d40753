//! The process that ran here before. Its lock ends with its files; what its devices may still write
//! ends with the process, which can be a little later.
//!
//! A process is found by its number as long as this one sees the same ones: a daemon that comes
//! back in a new container has nothing to wait for, as the old one's processes went with it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process, told from every other that has, or will have, its number.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Process {
    pub(super) pid: i32,
    /// In clock ticks since the host's boot.
    started: u64,
    /// The host's boot.
    boot: String,
}

impl Process {
    /// This one.
    pub(super) fn own() -> io::Result<Self> {
        let pid = rustix::process::getpid();
        Self::of(pid)?.ok_or_else(|| io::Error::other("this process is not in /proc"))
    }

    /// That with a number, if there is one.
    pub(super) fn of(pid: Pid) -> io::Result<Option<Self>> {
        let pid = pid.as_raw_nonzero().get();
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // It ended while it was read.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let started = started(&stat).ok_or_else(|| io::Error::other("/proc/PID/stat is odd"))?;
        let boot = std::fs::read_to_string(BOOT_ID)?.trim().to_owned();
        Ok(Some(Self { pid, started, boot }))
    }

    /// Reads who is noted in a file. `None`: nobody, or the note was cut off, and with it the
    /// process, before it could do anything.
    pub(super) fn read(file: &File) -> io::Result<Option<Self>> {
        let mut bytes = [0; LINE_BYTES_MAX];
        let len = file.read_at(&mut bytes, 0)?;
        Ok(Self::parse(&bytes[..len]))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
        let mut words = line.split(' ');
        let process = Self {
            pid: words.next()?.parse().ok()?,
            started: words.next()?.parse().ok()?,
            boot: words.next()?.to_owned(),
        };
        words.next().is_none().then_some(process)
    }

    /// Notes it in a file.
    pub(super) fn write(&self, file: &File) -> io::Result<()> {
        file.set_len(0)?;
        let line = format!("{} {} {}\n", self.pid, self.started, self.boot);
        file.write_all_at(line.as_bytes(), 0)
    }

    /// Waits until it is gone; whether it is within `limit`.
    ///
    /// M: pidfd_open(2): readable once the process has ended; the kernel says so after it has
    /// closed its files, with which a device's queue pairs and regions end.
    pub(super) fn wait_gone(&self, limit: Duration) -> io::Result<bool> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(true);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            // Its number is free, or a thread's: EINVAL, or ENOENT from a newer kernel.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(true),
            Err(error) => return Err(error.into()),
        };
        // From here on the number can not go to another unseen.
        if Self::of(pid)?.as_ref() != Some(self) {
            return Ok(true);
        }
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit))?;
        Ok(ready > 0)
    }
}

/// M: proc_pid_stat(5): the 22nd field. The second, in parentheses, may hold anything.
fn started(stat: &str) -> Option<u64> {
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(22 - 3)?.parse().ok()
}

/// M: random(4): a fresh random UUID for each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// More than a line has.
const LINE_BYTES_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_ends_is_waited_for() {
        let mut child = Command::new("sleep").arg("0.3").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let process = Process::of(pid).unwrap().unwrap();
        assert!(!process.wait_gone(Duration::from_millis(1)).unwrap());
        assert!(process.wait_gone(Duration::from_secs(10)).unwrap());
        child.wait().unwrap();
        assert_eq!(Process::of(pid).unwrap(), None);
        assert!(process.wait_gone(Duration::ZERO).unwrap());
    }

    #[test]
    fn another_process_with_the_same_number_is_not_waited_for() {
        let own = Process::own().unwrap();
        assert!(!own.wait_gone(Duration::ZERO).unwrap());
        let earlier = Process {
            started: own.started - 1,
            ..own.clone()
        };
        assert!(earlier.wait_gone(Duration::ZERO).unwrap());
        let boot = "before".to_owned();
        let before_boot = Process { boot, ..own };
        assert!(before_boot.wait_gone(Duration::ZERO).unwrap());
    }

    #[test]
    fn a_thread_with_the_same_number_is_not_waited_for() {
        let (said, heard) = std::sync::mpsc::sync_channel(1);
        let (done, over) = std::sync::mpsc::sync_channel::<()>(1);
        let thread = std::thread::spawn(move || {
            said.send(std::fs::read_link("/proc/thread-self").unwrap())
                .unwrap();
            over.recv().unwrap_err();
        });
        let own = Process::own().unwrap();
        let path = heard.recv().unwrap();
        let pid = path.file_name().unwrap().to_str().unwrap();
        let pid = pid.parse().unwrap();
        assert!(Process { pid, ..own }.wait_gone(Duration::ZERO).unwrap());
        drop(done);
        thread.join().unwrap();
    }

    #[test]
    fn a_note_is_read_as_written_and_a_part_of_it_is_none() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Process::read(&file).unwrap(), None);
        let own = Process::own().unwrap();
        own.write(&file).unwrap();
        assert_eq!(Process::read(&file).unwrap(), Some(own.clone()));
        for len in (0..file.metadata().unwrap().len()).rev() {
            file.set_len(len).unwrap();
            assert_eq!(Process::read(&file).unwrap(), None, "{len}");
        }
        own.write(&file).unwrap();
        assert_eq!(Process::read(&file).unwrap(), Some(own));
    }

    #[test]
    fn a_name_with_parentheses_is_no_field() {
        let fields: Vec<_> = (3..60).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) b (c) {}", fields.join(" "));
        assert_eq!(started(&stat), Some(22));
    }
}
