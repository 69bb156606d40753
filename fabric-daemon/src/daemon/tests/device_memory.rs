//! Pools in the memory of a device, of which the daemon can touch no byte.
//!
//! On the virtual hosts the device is vgem, whose dma-bufs are as real as a GPU's; soft-RoCE knows
//! none.

use std::fs::File;

use rustix::ioctl::{Updater, ioctl, opcode};

use super::*;

/// M: drm/drm_mode.h.
#[repr(C)]
#[derive(Default)]
struct CreateDumb {
    height: u32,
    width: u32,
    bits_per_pixel: u32,
    flags: u32,
    handle: u32,
    pitch: u32,
    bytes: u64,
}

/// M: drm/drm.h.
#[repr(C)]
#[derive(Default)]
struct PrimeHandle {
    handle: u32,
    flags: u32,
    fd: i32,
}

/// A dma-buf of at least so many bytes.
#[expect(unsafe_code, reason = "the kernel has no other way")]
fn dma_buf(bytes: u64) -> OwnedFd {
    use std::os::fd::FromRawFd;
    const CREATE_DUMB: u32 = opcode::read_write::<CreateDumb>(b'd', 0xB2);
    const HANDLE_TO_FD: u32 = opcode::read_write::<PrimeHandle>(b'd', 0x2D);
    let card = File::options()
        .read(true)
        .write(true)
        .open("/dev/dri/card0");
    let card = card.expect("the virtual host has vgem");
    let mut dumb = CreateDumb {
        height: u32::try_from(bytes.div_ceil(4096)).unwrap(),
        width: 1024,
        bits_per_pixel: 32,
        ..CreateDumb::default()
    };
    // SAFETY: the structure is the one that the call is of.
    let create = unsafe { Updater::<CREATE_DUMB, _>::new(&mut dumb) };
    // SAFETY: the kernel fills that structure, and does nothing else to us.
    unsafe { ioctl(&card, create) }.unwrap();
    let mut prime = PrimeHandle {
        handle: dumb.handle,
        flags: rustix::fs::OFlags::RDWR.bits(),
        fd: -1,
    };
    // SAFETY: as for the first.
    let export = unsafe { Updater::<HANDLE_TO_FD, _>::new(&mut prime) };
    // SAFETY: as for the first.
    unsafe { ioctl(&card, export) }.unwrap();
    // SAFETY: the kernel has just made it for us.
    unsafe { OwnedFd::from_raw_fd(prime.fd) }
}

/// What a daemon with these settings says of such memory.
async fn refusal(settings: &str, memory: &OwnedFd) -> Rejection {
    let dir = tempfile::tempdir().unwrap();
    let config = config_with(dir.path(), settings);
    store::init(&config.state_dir).unwrap();
    let daemon = Daemon::start(config).await.unwrap();
    let mut engine = Engine::hello(&daemon).await;
    engine.send(&register(1, spec()), &[memory.as_fd()]).await;
    let (seq, reason) = rejection(&mut engine).await;
    assert_eq!(seq, RequestSeq(1));
    works(&daemon).await;
    reason
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn device_memory_is_refused_where_something_here_would_have_to_touch_it() {
    let memory = dma_buf(spec().bytes());
    let quic = refusal("", &memory).await;
    assert_eq!(quic, Rejection::DeviceMemoryNotReached);
    let scrubbed = refusal("planes = [\"verbs\"]", &memory).await;
    assert_eq!(scrubbed, Rejection::DeviceMemoryNotScrubbed);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device: tests/rdma/run"]
async fn device_memory_is_refused_where_the_devices_driver_lacks_it() {
    let settings = "planes = [\"verbs\"]\nscrub.policy = \"never\"";
    let bytes = spec().bytes();
    let refused = refusal(settings, &dma_buf(bytes)).await;
    let lacks_it = Rejection::DeviceMemoryRefused {
        errno: 95, // EOPNOTSUPP
        bytes,
    };
    assert_eq!(refused, lacks_it);
    let small = refusal(settings, &dma_buf(bytes / 2)).await;
    assert!(matches!(small, Rejection::MemoryTooSmall { .. }), "{small}");
}
