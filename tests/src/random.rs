//! Random numbers from a seed, so that a failing run can be run again.

/// SplitMix64: small, seeded, good enough for schedules and patterns.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Starts from `FABRIC_SEED`, else from the clock; says which on standard error.
    #[must_use]
    pub fn from_environment(what: &str) -> Self {
        let given = std::env::var("FABRIC_SEED").ok();
        let seed = given.and_then(|text| text.parse().ok()).unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            now.map_or(1, |now| now.as_secs() ^ u64::from(now.subsec_nanos()))
        });
        eprintln!("{what}: run again with FABRIC_SEED={seed}");
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    /// The numbers from 0 to `count`, in random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for last in (1..order.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).expect("below a usize");
            order.swap(last, other);
        }
        order
    }
}

/// Spreads the bits of a number.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
