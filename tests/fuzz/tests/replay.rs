//! Every committed input through its target, and as many changed ones as a few seconds hold.

use std::fs;
use std::path::Path;

use fabric_fuzz::{TARGETS, Target};
use fabric_proto::limits::{CHECKSUMS_PER_MESSAGE_MAX, LEASE_SLOTS_MAX, MESSAGE_BYTES_MAX};

/// More than this is not minimal, and slow to run with every test.
const FILES_MAX: usize = 60;
const BYTES_MAX: usize = 100 << 10;

/// How often each input is changed.
const CHANGES: usize = 60;

// One test for all: what a decoder allocates is counted for the whole process.
#[test]
fn no_committed_input_and_none_near_it_is_a_finding() {
    assert_every_corpus_is_of_a_target();
    for (name, target) in TARGETS {
        for (file, bytes) in long_inputs() {
            run(name, file, target, &bytes);
        }
    }
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        for (file, bytes) in &inputs {
            run(name, file, target, bytes);
        }
        // The same inputs every time: a failure comes again.
        let mut random = Random(0x5eed);
        for (file, bytes) in &inputs {
            for _ in 0..CHANGES {
                let changed = change(&mut random, bytes, &inputs);
                run(name, file, target, &changed);
            }
        }
    }
}

fn assert_every_corpus_is_of_a_target() {
    let names: Vec<String> = fs::read_dir(folder())
        .expect("there is a corpus")
        .map(|entry| entry.expect("a folder is readable").file_name())
        .map(|name| name.into_string().expect("names are plain"))
        .collect();
    for name in &names {
        let known = TARGETS.iter().any(|(target, _)| target == name);
        assert!(known, "corpus/{name} is of no target");
    }
    assert_eq!(names.len(), TARGETS.len(), "each target has its corpus");
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus"))
}

/// A target's inputs by name, in order.
fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder().join(name));
    let entries = entries.unwrap_or_else(|error| panic!("corpus/{name}: {error}"));
    let mut inputs: Vec<_> = entries
        .map(|entry| {
            let entry = entry.expect("a folder is readable");
            let bytes = fs::read(entry.path()).expect("an input is readable");
            (entry.file_name().display().to_string(), bytes)
        })
        .collect();
    inputs.sort();
    let bytes: usize = inputs.iter().map(|(_, bytes)| bytes.len()).sum();
    assert!(!inputs.is_empty(), "corpus/{name} is empty");
    assert!(
        inputs.len() <= FILES_MAX,
        "corpus/{name}: {} files",
        inputs.len()
    );
    assert!(bytes <= BYTES_MAX, "corpus/{name}: {bytes} bytes");
    inputs
}

/// Too long to keep in a corpus: lists that fill a message, and more than fills one.
fn long_inputs() -> Vec<(&'static str, Vec<u8>)> {
    let most = MESSAGE_BYTES_MAX - 64;
    vec![
        ("verified pages", long(&[9, 3], &[1, 2], most / 2)),
        ("a seal", long(&[6, 2], &[3], CHECKSUMS_PER_MESSAGE_MAX * 4)),
        ("a seal too long", long(&[6, 2], &[3], most / 4 * 4)),
        (
            "leased slots",
            long(&[4, 3], &[1, 2], LEASE_SLOTS_MAX as usize),
        ),
        ("too many slots", long(&[4, 3], &[1, 2], most / 2)),
        ("pages to verify", long(&[8, 3], &[1, 2, 3], most / 3)),
        ("pages to send again", long(&[4, 7], &[1, 2, 3], most / 3)),
        ("named slots", long(&[3], &[7], most)),
        ("too long", vec![0; MESSAGE_BYTES_MAX + 1]),
    ]
}

/// A message with packed lists of ones, each of `bytes_len` bytes, in nested fields.
fn long(path: &[u8], lists: &[u8], bytes_len: usize) -> Vec<u8> {
    let ones = vec![1; bytes_len];
    let lists = lists.iter().flat_map(|list| field(*list, &ones));
    let nested = |inner: Vec<u8>, outer: &u8| field(*outer, &inner);
    path.iter().rev().fold(lists.collect(), nested)
}

fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut left = bytes.len();
    while left >= 0x80 {
        field.push(left.to_le_bytes()[0] | 0x80);
        left >>= 7;
    }
    field.push(left.to_le_bytes()[0]);
    field.extend(bytes);
    field
}

/// Says which bytes were a finding, so that they can be kept.
fn run(name: &str, file: &str, target: Target, bytes: &[u8]) {
    let result = std::panic::catch_unwind(|| target(bytes));
    let shown = &bytes[..bytes.len().min(1024)];
    assert!(result.is_ok(), "{name}, from {file}: {shown:02x?}");
}

/// Changes a byte, cuts out or doubles a piece, or goes on with another input.
fn change(random: &mut Random, bytes: &[u8], inputs: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    for _ in 0..=random.below(3) {
        let start = random.below(changed.len() + 1);
        let end = start + random.below((changed.len() - start).min(16) + 1);
        match random.below(5) {
            0 => changed.truncate(start),
            1 => drop(changed.drain(start..end)),
            2 => {
                let piece = changed[start..end].to_vec();
                changed.splice(start..start, piece);
            }
            3 => {
                let (_, other) = &inputs[random.below(inputs.len())];
                changed.truncate(start);
                changed.extend(&other[random.below(other.len() + 1)..]);
            }
            _ => {
                let value = random.next().to_le_bytes()[0];
                changed
                    .get_mut(start)
                    .into_iter()
                    .for_each(|byte| *byte = value);
            }
        }
    }
    changed
}

/// SplitMix64: enough, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("bounds are small");
        usize::try_from(self.next() % bound).expect("it is below the bound")
    }
}
