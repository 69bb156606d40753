//! Which ports are near a pool's memory: on its NUMA node. A port that is not moves every byte
//! through the link between the processors, which is slower, and shared.
//!
//! Where the host does not say, or has one node, all ports are alike.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::ops::Range;

use fabric_ipc::Mapping;

/// The node that has most of a mapping's pages. `None`: none has, or the host does not say. For
/// memory that is there, as that of a pool is once it is pinned; takes a while where that is much.
pub(super) fn node_of_memory(memory: &Mapping) -> Option<u32> {
    // M: proc(5): not there where the kernel knows no nodes.
    let maps = File::open("/proc/self/numa_maps").ok()?;
    let start = memory.as_mut_ptr().addr() as u64;
    most(BufReader::new(maps), start..start + memory.bytes())
}

/// The node that a device is attached to.
pub(super) fn node_of_device(device: &str) -> Option<u32> {
    let path = format!("/sys/class/infiniband/{device}/device/numa_node");
    // -1, which does not parse, where there is but one.
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// In which order a grant takes lanes of ports, which are on `nodes`: first those of its memory's
/// own, then those that may be, then the others; else in turn, from `first` on.
pub(super) fn order(nodes: &[Option<u32>], first: usize, memory: Option<u32>) -> Vec<usize> {
    let mut ports: Vec<_> = (first..first + nodes.len())
        .map(|turn| turn % nodes.len())
        .collect();
    if let Some(memory) = memory {
        // Stable: those that are alike stay in turn.
        ports.sort_by_key(|port| match nodes[*port] {
            Some(node) if node == memory => 0,
            None => 1,
            Some(_) => 2,
        });
    }
    ports
}

/// The node that has more than half of the pages in `area`, by a text as `numa_maps`.
fn most(maps: impl BufRead, area: Range<u64>) -> Option<u32> {
    let mut pages = BTreeMap::new();
    // Not by `lines`: a file's name may be any bytes.
    for line in maps.split(b'\n') {
        let line = line.ok()?;
        let line = String::from_utf8_lossy(&line);
        let mut words = line.split(' ');
        let start = words.next().map(|word| u64::from_str_radix(word, 16));
        let Some(Ok(start)) = start else {
            continue;
        };
        // In the order of addresses. The kernel goes through the pages of each as it is read.
        if start >= area.end {
            break;
        }
        if area.contains(&start) {
            for (node, count) in words.filter_map(pages_on_node) {
                *pages.entry(node).or_insert(0_u64) += count;
            }
        }
    }
    let all: u64 = pages.values().sum();
    let mut nodes = pages.into_iter();
    nodes
        .find(|(_, count)| *count > all / 2)
        .map(|(node, _)| node)
}

/// M: proc(5): `N<node>=<pages>`.
fn pages_on_node(word: &str) -> Option<(u32, u64)> {
    let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
    Some((node.parse().ok()?, pages.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::plane::testing;

    const MAPS: &[u8] = b"\
55d0aa5ff000 default file=/usr/bin/fabric-daemon mapped=9 N1=9 kernelpagesize_kB=4
7f0000000000 bind:0 file=/memfd:N9=99\\040pool\\040(deleted) dirty=512 N0=200 N1=312
7f0000200000 default file=/memfd:\xFF\xFE\\040(deleted) dirty=4 N3=4 kernelpagesize_kB=2048
7f0000a00000 interleave:0-1 file=/memfd:other\\040(deleted) dirty=10 mapmax=2 N0=5 N1=5
7f0001000000 default
7f0002000000 default anon=8 dirty=8 active=0 N2=8 kernelpagesize_kB=4
7f0002008000 default anon=9 dirty=9 N0=9 kernelpagesize_kB=4
not an address N7=77
7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4
";

    fn most_of(start: u64, bytes: u64) -> Option<u32> {
        most(MAPS, start..start + bytes)
    }

    #[test]
    fn memory_is_on_the_node_that_has_more_than_half_of_it() {
        assert_eq!(most_of(0x7f00_0000_0000, 0x20_0000), Some(1));
        assert_eq!(most_of(0x7f00_0020_0000, 0x80_0000), Some(3));
        assert_eq!(most_of(0x7f00_00a0_0000, 0xa000), None, "half and half");
        let both = most_of(0x7f00_0200_0000, 0x1_1000);
        assert_eq!(both, Some(0), "the kernel may have cut a mapping in two");
        assert_eq!(most_of(0x7f00_0200_0000, 0x8000), Some(2), "not the next");
    }

    #[test]
    fn of_memory_that_is_not_there_nothing_is_said() {
        assert_eq!(most_of(0x7f00_0100_0000, 0x1000), None, "not touched");
        assert_eq!(most_of(0x7f00_0300_0000, 0x1000), None, "no such mapping");
        assert_eq!(most(&b""[..], 0..u64::MAX), None);
        assert_eq!(
            most(&b"\n\n7f00\n7f01 N=1 N1= NaN=3 N-1=5\n"[..], 0..u64::MAX),
            None
        );
    }

    #[test]
    fn the_node_of_ones_own_memory_is_one_that_there_is() {
        let pool = testing::pool(testing::spec(1, 4096, 64));
        pool.memory.mapped().zero(0, pool.memory.bytes()).unwrap();
        let node = node_of_memory(pool.memory.mapped());
        if !Path::new("/proc/self/numa_maps").exists() {
            return assert_eq!(node, None, "the kernel knows no nodes");
        }
        let node = node.expect("256 KiB lie on one node, mostly");
        let path = format!("/sys/devices/system/node/node{node}");
        assert!(Path::new(&path).exists(), "{path}");
    }

    #[test]
    fn lanes_are_taken_near_the_memory_first_and_in_turn() {
        let nodes = [Some(1), Some(0), Some(1), Some(0)];
        assert_eq!(order(&nodes, 0, Some(0)), [1, 3, 0, 2]);
        assert_eq!(order(&nodes, 2, Some(0)), [3, 1, 2, 0]);
        assert_eq!(order(&nodes, 3, Some(1)), [0, 2, 3, 1]);
        assert_eq!(order(&nodes, 2, Some(7)), [2, 3, 0, 1], "none is near");
        assert_eq!(
            order(&nodes, 2, None),
            [2, 3, 0, 1],
            "not known of the memory"
        );
        assert_eq!(order(&[None; 3], 1, Some(0)), [1, 2, 0], "nor of the ports");
        let mixed = [Some(1), None, Some(0)];
        assert_eq!(order(&mixed, 0, Some(0)), [2, 1, 0], "it may be near");
        assert_eq!(order(&[], 0, Some(0)), [0; 0]);
    }
}
